"""Path methods: integrated and expected gradients, IDGI, Guided IG and Blur IG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..attribution.estimates import Estimate, generator
from ..attribution.options import LARGEST_STEPS, Option
from ..attribution.passes import ImageAttribution, Passes, SampledAttribution, TimedAttribution, from_estimate
from ..errors import optional_import, warn
from ..hooks.autograd_graph import is_tracing
from ..io.axes import along_rows, at_least_float32, require_two_axes, spatial
from ..targets.classes import ClassTarget, FunctionTarget, Probability, TargetList
from ..targets.question import Target
from ..targets.similarity import Similarity, TextSimilarity
from ..validation import check_choice, check_integer, check_number
from .baselines import BaselineOption, Diffusion, baselines

QuadratureRule = Literal["gauss_legendre", "midpoint", "trapezoid", "riemann_left", "riemann_right"]

RULES: tuple[QuadratureRule, ...] = get_args(QuadratureRule)

MOST_NODES = 256
"""The maximum number of nodes of an adaptive integral. All their gradients are in memory at once."""
FIRST_NODES = 9
"""The number of evenly spaced nodes that an adaptive integral starts with."""
NEW_NODES = 4
"""The maximum number of intervals that are halved at once. It does not depend on the chunk size."""

STEP_TOLERANCE = 1e-9
"""The allowed error in the length of a step of Guided IG, as a fraction of the whole path."""


class IntegratedGradients(TimedAttribution):
    """The mean gradient on the straight path from a baseline to the image, times the image minus the baseline.

    Formula: S = (x − x′) ⊙ ∫₀¹ ∇y(x′ + t (x − x′)) dt.

    The default baseline is the mean colour, 0 in the normalised input. It is the same for all images and models, and is
    closer to most pixels than black. With a black baseline, dark pixels get no attribution.

    A trained network's gradient changes so fast along the path that fixed rules converge slowly. On the bundled network
    and real photos, 50 Gauss-Legendre nodes leave a residual of 1 to 11 % of the rise, and 32 nodes 5 to 50 %. A
    `tolerance` is met with far fewer passes, for two reasons. First, the scores at two nodes give the mean slope
    between them, and the gradients at both are mixed to match that slope. This is exact for one kink between the nodes.
    Second, new nodes are added in the intervals with the largest residuals, and earlier nodes are reused (a
    Gauss-Legendre rule with more nodes reuses none). Under every rule the weights are not
    negative and sum to 1, so the result is a mean of true gradients.

    A small residual is not a small error of the map. At 1 %, after 10 to 17 passes, the maps of the bundled network's
    top class on five photos have a cosine of .87 to .98 with the maps of 256 nodes; with 50 nodes .994 to .999.

    Args:
        baseline: "mean", "black", "white", "blur", "noise" (of the normalised input's mean and standard deviation), a
            number in units of the normalised input, a float tensor, an image or its path. For several, or a tensor
            (K, C, H, W), the mean over all is taken.
        rule: "gauss_legendre", "midpoint", "trapezoid", "riemann_left" or "riemann_right".
        steps: The number of nodes on each path.
        tolerance: The residual at which no more nodes are added, relative to the difference of the score and the
            baseline's score. Nodes are then chosen as described above; `rule` and `steps` are not used.

    Values: (N, C, H, W), signed, in score units; they and the residual sum to the score minus the score of the
    baseline.

    Raises:
        MethodError: An option is invalid, or a baseline does not fit.

    Source: Sundararajan et al., "Axiomatic Attribution for Deep Networks" (2017), https://arxiv.org/abs/1703.01365;
        baselines: Sturmfels et al., "Visualizing the Impact of Feature Attribution Baselines" (2020),
        https://doi.org/10.23915/distill.00022.
    """

    name = "integrated_gradients"
    joins_inputs = True
    cost = "50 forwards and backwards, 1 forward; with a tolerance of 1 % about 13"
    preview_options: ClassVar = {"steps": 3}

    baseline: BaselineOption = BaselineOption("mean")
    rule: Option[QuadratureRule] = Option("gauss_legendre", check_choice, RULES)
    steps: Option[int] = Option(50, check_integer, most=LARGEST_STEPS)
    tolerance: Option[float | None] = Option(None, check_number, above=0)

    def explain_image(self, passes: Passes, score: Tensor) -> ImageAttribution:
        """Compute the mean over the baselines of the integrals on their paths."""
        references = baselines(self.baseline, passes.x, self.preprocess, self.seed)
        if self.tolerance is not None:
            return _adaptively_integrated(passes, references, self.tolerance)
        gradients = passes.in_time(partial(mean_gradients, passes, references, self.rule), self.steps)
        values = ((passes.x - references) * gradients).mean(0)  # (C, H, W)
        return ImageAttribution(values, residual=residual_of(passes, values, score, references))


class IDGI(TimedAttribution):
    """The rise of the score along the path from a baseline, divided at each step in proportion to squared gradients.

    Formula: S = Σ_n (y(x_n+1) − y(x_n)) ∇y(x_n)² / ‖∇y(x_n)‖², with y the probability of the class, and the points x_n
    on the path.

    Of each step that integrated gradients add up, only the component along the gradient changes the score; the rest is
    noise. So IDGI divides the rise of each step among the pixels, in proportion to the squares of their gradients. The
    values then sum exactly to the rise, except for steps that start where the gradient is zero.

    As in the authors' code, a class is explained by its probability, and the result's `target_names` say so. Any other
    target, such as `saliency.value(281)` for the logit, and the score of a model of one class are explained unchanged.
    On the bundled network and photos the outer 16 pixels, next to the padding, hold 16 % of the map on average (21 %
    for the logit).

    Args:
        baseline: As for `IntegratedGradients`.
        steps: The number of steps on each path.

    Values: (N, C, H, W), signed, in units of the probability, or of the target's score; they sum to its rise from the
    baseline to the image.

    Warns:
        SaliencyWarning: The target is a function or a similarity: then the map often shows the border of the image.

    Raises:
        MethodError: An option is invalid, or a baseline does not fit.

    Source: Yang et al., "IDGI: A Framework to Eliminate Explanation Noise from Integrated Gradients" (2023),
        https://arxiv.org/abs/2303.14242.
    """

    name = "idgi"
    joins_inputs = True
    cost = "51 forwards and backwards"
    preview_options: ClassVar = {"steps": 3}

    baseline: BaselineOption = BaselineOption("mean")
    steps: Option[int] = Option(50, check_integer, most=LARGEST_STEPS)

    def explained_target(self, target: Target) -> Target:
        """Return the probability of a class instead of its logit."""
        if isinstance(target, TargetList):
            return TargetList(tuple(map(self.explained_target, target.targets)))
        if isinstance(target, FunctionTarget | Similarity | TextSimilarity):
            warn(
                f"{self.name}: only classes are explained by their probability; this map may show stripes at "
                "the border of the image; use integrated_gradients"
            )
        return Probability(target, or_score=True) if isinstance(target, ClassTarget) else target

    def explain_image(self, passes: Passes, score: Tensor) -> ImageAttribution:
        """Divide the rise of each step in proportion to the squared gradient at its start."""
        return passes.in_time(partial(self._divided, passes), self.steps)

    def _divided(self, passes: Passes, steps: int) -> ImageAttribution:
        references = baselines(self.baseline, passes.x, self.preprocess, self.seed)
        nodes, count = steps + 1, (steps + 1) * len(references)
        values = torch.zeros_like(at_least_float32(passes.x[0]))
        rise = 0.0
        last_fractions, last_score = torch.zeros_like(values), 0.0
        positions = torch.linspace(0, 1, nodes, dtype=torch.float64, device="cpu")
        for done in passes.gradients(on_paths(passes.x, references, positions), count, least=count):
            rows = zip(_squared_fractions(done.gradients.to(values.dtype)), done.scores.tolist(), strict=True)
            for node, (fractions, node_score) in enumerate(rows, start=done.start):
                if node % nodes:
                    values += (node_score - last_score) * last_fractions
                    rise += node_score - last_score
                last_fractions, last_score = fractions, node_score
        values, rise = values / len(references), rise / len(references)
        return ImageAttribution(values, residual=rise - float(values.sum(dtype=torch.float64)))


def _squared_fractions(gradients: Tensor) -> Tensor:
    """Return each squared gradient (k, C, H, W) as a fraction of their sum; zero for a zero gradient."""
    largest = gradients.abs().amax(axes := spatial(gradients, 1), keepdim=True)
    # Scale first: the square of a small gradient would vanish.
    squares = (gradients / torch.where(largest == 0, torch.ones_like(largest), largest)).square()
    total = squares.sum(axes, keepdim=True)
    return squares / torch.where(total == 0, torch.ones_like(total), total)


class ExpectedGradients(SampledAttribution):
    """Integrated gradients averaged over many baselines, estimated at random points on the paths.

    Formula: S = mean_x′,t (x − x′) ⊙ ∇y(x′ + t (x − x′)), with random baselines x′ and t in 0..1.

    Each sample draws one baseline and one point on its path. Because the baselines differ, no colour is left without
    attribution, and the map has a standard error. By default, each baseline is a random colour from the normal
    distribution of the normalised input, which needs no data; the authors draw training images.

    Args:
        baseline: "colours", or a set to draw baselines from: a float tensor (K, C, H, W), or a list of images, paths,
            or baselines as for `IntegratedGradients`. For "noise", each sample has different noise.

    Values: (N, C, H, W), signed, in score units; their expectation sums to the score minus the baselines' mean score.

    Raises:
        MethodError: An option is invalid, or a baseline does not fit.

    Source: Erion et al., "Improving Performance of Deep Learning Models with Axiomatic Attribution Priors and Expected
        Gradients" (2019), https://arxiv.org/abs/1906.10670.
    """

    name = "expected_gradients"
    cost = "200 forwards and backwards"
    default_passes = 200
    preview_options: ClassVar = {"passes": 4}

    baseline: BaselineOption = BaselineOption("colours")

    def explain_image(self, passes: Passes, score: Tensor) -> ImageAttribution:
        """Compute the mean over the samples."""
        x, estimate = passes.x, Estimate()
        is_drawn = self.baseline in ("colours", "noise")
        images = x if is_drawn else baselines(self.baseline, x, self.preprocess, self.seed)

        def draw(sample: int) -> tuple[Tensor, float]:
            """Return the baseline (C, H, W) of a sample and its point on the path."""
            random = generator(self.seed, sample)
            point = float(torch.rand((), generator=random, dtype=torch.float64, device="cpu"))
            if not is_drawn:
                return images[int(torch.randint(len(images), (), generator=random, device="cpu"))], point
            shape = (x.shape[1], *[1] * (x.dim() - 2)) if self.baseline == "colours" else x.shape[1:]
            return torch.randn(shape, generator=random, dtype=torch.float64, device="cpu").to(x).expand_as(x[0]), point

        def make(start: int, stop: int) -> Tensor:
            draws = map(draw, range(start, stop))
            return torch.stack([torch.lerp(reference, x[0], point) for reference, point in draws])

        for done in passes.gradients(make, self.most_passes, estimate=estimate):
            references = torch.stack([draw(done.start + row)[0] for row in range(len(done.scores))])
            estimate.add(at_least_float32(x - references) * done.gradients)
        return from_estimate(estimate, at_least_float32(x))


class GuidedIG(TimedAttribution):
    """Integrated gradients on a path that moves the values with the smallest gradients first.

    Formula: S = Σ_n ∇y(x_n) ⊙ (x_n+1 − x_n), with a path that moves the values of smallest |∇y(x_n)| first.

    A straight path collects noise at pixels with a large gradient that it only passes. This path postpones these
    values. A step moves the `fraction` of values with the smallest gradients to their limit. Further fractions follow
    until the whole path is one step closer to the image. No value may lead the straight path by more than
    `max_distance`, and a value that lags by more is moved along.

    Each step starts at the end of the previous one, so passes run one by one.

    Args:
        baseline: As for `IntegratedGradients`.
        steps: The number of steps.
        fraction: The fraction of values that move together, above 0 and at most 1.
        max_distance: The largest distance of a value from the straight path, from 0 to 1, as a fraction of the path. 0
            gives integrated gradients, 1 a free path.

    Values: (N, C, H, W), signed, in score units; they and the residual sum to the score minus the score of the
    baseline.

    Raises:
        MethodError: An option is invalid, or a baseline does not fit.

    Source: Kapishnikov et al., "Guided Integrated Gradients" (2021), https://arxiv.org/abs/2106.09788.
    """

    name = "guided_ig"
    joins_inputs = True
    cost = "200 forwards and backwards, one by one, 1 forward"
    preview_options: ClassVar = {"steps": 3}

    baseline: BaselineOption = BaselineOption("mean")
    steps: Option[int] = Option(200, check_integer, most=LARGEST_STEPS)
    fraction: Option[float] = Option(0.25, check_number, above=0, most=1)
    max_distance: Option[float] = Option(0.02, check_number, least=0, most=1)

    def explain_image(self, passes: Passes, score: Tensor) -> ImageAttribution:
        """Compute the mean over the paths."""
        references = baselines(self.baseline, passes.x, self.preprocess, self.seed)

        def run(steps: int) -> Tensor:
            return torch.stack([self._path_values(passes, reference[None], steps) for reference in references]).mean(0)

        values = passes.in_time(run, self.steps)
        return ImageAttribution(values, residual=residual_of(passes, values, score, references))

    def _path_values(self, passes: Passes, reference: Tensor, steps: int) -> Tensor:
        """Return the path's values (C, H, W) from one baseline (1, C, H, W)."""
        start, end = at_least_float32(reference), at_least_float32(passes.x)
        # The position of each value on its path, from 0 at the baseline to 1 at the image, and the path's length.
        position, length = torch.zeros_like(start), (end - start).abs()
        values = torch.zeros_like(start)

        def make(first: int, last: int) -> Tensor:
            return torch.lerp(start, end, position)

        for done in passes.gradients(make, steps, size=1, least=steps):
            gradient = done.gradients.to(start.dtype)
            moved = self.moved(position, gradient.abs(), length, (done.start + 1) / steps)
            values += gradient * (moved - position) * (end - start)
            position = moved
        return values[0]

    def moved(self, position: Tensor, slopes: Tensor, length: Tensor, done: float) -> Tensor:
        """Return the position of each value after a step that completes the fraction `done` of the whole path.

        Args:
            position: The position of each value, 0 to 1.
            slopes: The magnitude of the gradient there.
            length: The length of each value's whole path.
            done: The position on the straight path.
        """
        whole = float(length.sum(dtype=torch.float64))
        least, most = max(done - self.max_distance, 0.0), min(done + self.max_distance, 1.0)
        position = position.clamp(min=least)
        waiting = torch.where((position < most) & (length > 0), slopes, torch.inf)
        taken = max(1, int(self.fraction * (slopes.numel() - 1)) + 1)
        while True:
            missing = float(((1 - position) * length).sum(dtype=torch.float64)) - (1 - done) * whole
            bound = waiting.flatten().kthvalue(taken).values
            chosen = (waiting <= bound) & waiting.isfinite()
            if missing <= STEP_TOLERANCE * whole or not chosen.any():
                return position
            gain = float(((most - position) * length * chosen).sum(dtype=torch.float64))
            part = missing / gain if gain > missing else 1.0
            position = torch.where(chosen, torch.lerp(position, torch.full_like(position, most), part), position)
            if part < 1:
                return position
            waiting = torch.where(chosen, torch.inf, waiting)


class BlurIG(TimedAttribution):
    """Integrated gradients on the path from a blurred image to the sharp image.

    Formula: S = −∫ ∇y(x_σ) ⊙ ∂x_σ/∂σ dσ from 0 to the widest blur, with x_σ the image blurred by σ.

    The baseline lacks detail, but has the colours of the image. The Gaussian blur reflects the image at its edges, so
    that nothing darkens there, and its derivative with respect to the width is exact.

    The baseline is the image under the widest blur, so it differs for each image.

    Args:
        max_sigma: The widest blur's standard deviation, in pixels of the model's input.
        steps: The number of Gauss-Legendre nodes, on the standard deviation.

    Values: (N, C, H, W), signed, in score units; they sum to the score minus the score of the blurred image, up to the
    residual.

    Source: Xu et al., "Attribution in Scale and Space" (2020), https://arxiv.org/abs/2004.03383.
    """

    name = "blur_ig"
    is_complete = False  # the baseline differs for each image
    cost = "100 forwards and backwards, 1 forward"
    preview_options: ClassVar = {"steps": 3}

    max_sigma: Option[float] = Option(50.0, check_number, above=0)
    steps: Option[int] = Option(100, check_integer, most=LARGEST_STEPS)

    def explain_image(self, passes: Passes, score: Tensor) -> ImageAttribution:
        """Compute minus the integral, over the standard deviation, of gradient times change of the image."""
        image = Diffusion(passes.x[0], passes.x.dim() - 2)
        values = passes.in_time(partial(self._integral, passes, image), self.steps)
        blurred = image(torch.tensor([self.max_sigma], dtype=torch.float64, device="cpu"))
        return ImageAttribution(values, residual=residual_of(passes, values, score, blurred))

    def _integral(self, passes: Passes, image: Diffusion, steps: int) -> Tensor:
        nodes, weights = quadrature("gauss_legendre", steps)
        sigmas = nodes * self.max_sigma
        values = torch.zeros_like(at_least_float32(passes.x[0]))
        for done in passes.gradients(lambda start, stop: image(sigmas[start:stop]), steps, least=steps):
            rows = slice(done.start, done.start + len(done.scores))
            change = image.derivative(sigmas[rows]).to(values.dtype)  # (k, C, H, W)
            widths = (weights[rows] * self.max_sigma).to(values)
            values -= torch.einsum("k,k...,k...->...", widths, change, done.gradients.to(values.dtype))
        return values


def on_paths(x: Tensor, references: Tensor, nodes: Tensor) -> Callable[[int, int], Tensor]:
    """Return a function that creates the inputs on the straight paths from K baselines to the image, path by path.

    Args:
        x: (1, C, H, W) the image.
        references: (K, C, H, W) the baselines.
        nodes: (n,) the nodes on each path, 0 at the baseline and 1 at the image.
    """
    points = along_rows(nodes.to(x), x)

    def make(start: int, stop: int) -> Tensor:
        numbers = torch.arange(start, stop, device=x.device)
        return torch.lerp(references[numbers // len(nodes)], x, points[numbers % len(nodes)])

    return make


def mean_gradients(passes: Passes, references: Tensor, rule: QuadratureRule, steps: int) -> Tensor:
    """Return the mean gradients (K, C, H, W) on the paths from K baselines to the image, by a rule."""
    nodes, of_path = quadrature(rule, steps)
    repeated = torch.kron(torch.eye(len(references), dtype=torch.float64, device="cpu"), of_path)  # (K, K * n)
    weights = repeated.to(at_least_float32(passes.x))
    total = torch.zeros(len(references), *passes.x.shape[1:], dtype=weights.dtype, device=weights.device)
    for done in passes.gradients(on_paths(passes.x, references, nodes), len(weights[0]), least=len(weights[0])):
        of_chunk = weights[:, done.start : done.start + len(done.scores)]
        total += torch.einsum("pk,k...->p...", of_chunk, done.gradients.to(weights.dtype))
    return total


def residual_of(passes: Passes, values: Tensor, score: Tensor, references: Tensor) -> float:
    """Return the score minus the mean score of the baselines (K, C, H, W) minus the sum of the values."""
    if is_tracing():
        return math.nan
    count = len(references)
    scores = passes.scores(lambda start, stop: references[start:stop], count, least=count)
    return float(score) - float(scores.double().mean()) - float(values.sum(dtype=torch.float64))


def quadrature(rule: QuadratureRule, count: int) -> tuple[Tensor, Tensor]:
    """Return the ascending nodes (n,) and the weights (n,), of sum 1, of a rule for integrals over 0..1.

    Both are in float64 on the CPU.

    Gauss-Legendre is exact for polynomials of degree 2n - 1, the midpoint and the trapezoid rule for degree 1. The
    Riemann sums, which take the left or right end of each of n intervals, are exact for constants.

    Args:
        rule: One of `RULES`.
        count: The number of nodes; at least two for the trapezoid rule, which includes both ends.

    Raises:
        MethodError: The number of nodes is too small.

    Source: Golub and Welsch, "Calculation of Gauss Quadrature Rules" (1969),
        https://doi.org/10.1090/S0025-5718-69-99647-1.
    """
    if rule == "trapezoid":
        check_integer("steps", count, least=2)
    if rule == "gauss_legendre":
        roots, weights = np.polynomial.legendre.leggauss(count)
        nodes = (roots + 1) / 2
    elif rule == "trapezoid":
        nodes, weights = np.linspace(0, 1, count), np.ones(count)
        weights[[0, -1]] /= 2
    else:
        shift = {"riemann_left": 0.0, "midpoint": 0.5, "riemann_right": 1.0}[rule]
        nodes, weights = (np.arange(count) + shift) / count, np.ones(count)
    return torch.from_numpy(nodes), torch.from_numpy(weights / weights.sum())


class AdaptiveIntegral:
    """Mean slope of a function over 0..1, from its values and slopes at nodes that are added where needed.

    In each interval between two nodes, the slopes at both ends are weighted so that their mean is the secant slope of
    the values. For a piecewise linear function with one kink in the interval this is exact for any position of the
    kink; networks with ReLUs are piecewise linear on a straight path. If the secant is not between the two slopes, only
    the closer slope is used, and a residual remains. The intervals with the largest residuals are halved next.

    The weights of the slopes are not negative and sum to 1, so the result is a mean of slopes.
    """

    def __init__(self) -> None:
        self.nodes: list[tuple[float, float, float]] = []  # position, value and slope, in the order of arrival

    def wanted(self) -> list[float]:
        """Return the nodes to evaluate next: first evenly spaced nodes, then the centres of the worst intervals."""
        if not self.nodes:
            return [i / (FIRST_NODES - 1) for i in range(FIRST_NODES)]
        _, positions, _, signed = self._mixed()
        residuals = signed.abs()
        worst = residuals.sort(descending=True, stable=True).indices[:NEW_NODES]
        worst = worst[residuals[worst] > 0.1 * residuals.max()]
        centres: list[float] = ((positions[worst] + positions[worst + 1]) / 2).sort().values.tolist()
        return centres

    def add(self, position: float, value: float, slope: float) -> None:
        """Add the function's value and slope at a node."""
        self.nodes.append((position, value, slope))

    @property
    def weights(self) -> Tensor:
        """The weight of the slope at each node (n,), in the order of arrival; float64, of sum 1."""
        order, positions, fractions, _ = self._mixed()
        widths, weights = positions.diff(), torch.zeros_like(positions)
        weights[order[:-1]] += widths * fractions
        weights[order[1:]] += widths * (1 - fractions)
        return weights

    @property
    def rise(self) -> float:
        """The difference of the values at the last and the first node."""
        return max(self.nodes)[1] - min(self.nodes)[1]

    @property
    def residual(self) -> float:
        """The part of the rise that the weighted slopes do not add up to."""
        return float(self._mixed()[3].sum())

    @property
    def rounding(self) -> float:
        """The residual that rounding may cause, for values in float32."""
        return 1e-6 * max(abs(value) for _, value, _ in self.nodes)

    def _mixed(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the order of the nodes by position (n,), and their positions in this order.

        Also return, for each interval (n - 1,), the weight of the slope at its start, and the residual.
        """
        positions, values, slopes = torch.tensor(self.nodes, dtype=torch.float64, device="cpu").T
        order = positions.argsort()
        positions, values, slopes = positions[order], values[order], slopes[order]
        starts, ends, widths, rises = slopes[:-1], slopes[1:], positions.diff(), values.diff()
        difference = starts - ends
        differs = difference.abs() > 1e-9 * slopes.abs().max()
        fractions = (rises / widths - ends) / torch.where(differs, difference, 1.0)
        fractions = torch.where(differs, fractions, 0.5).clamp(0, 1)
        return order, positions, fractions, rises - widths * (fractions * starts + (1 - fractions) * ends)


def _adaptively_integrated(passes: Passes, references: Tensor, tolerance: float) -> ImageAttribution:
    """Return the mean over the baselines, with as many nodes on each path as the tolerance needs."""
    x = passes.x
    differences = at_least_float32(x - references)  # (K, C, H, W)
    paths = [AdaptiveIntegral() for _ in references]
    gradients: list[list[Tensor]] = [[] for _ in references]  # of each path, (C, H, W) at each node
    notes = []
    while True:
        wanted = [(path, point) for path in range(len(paths)) for point in paths[path].wanted()]

        def make(start: int, stop: int, wanted: list[tuple[int, float]] = wanted) -> Tensor:
            return torch.stack([torch.lerp(references[path], x[0], point) for path, point in wanted[start:stop]])

        for done in passes.gradients(make, len(wanted), least=1 if gradients[0] else len(wanted)):
            nodes, added = wanted[done.start : done.start + len(done.scores)], done.gradients.to(differences)
            products = added * differences[[path for path, _ in nodes]]
            slopes = products.flatten(1).sum(1, dtype=torch.float64).tolist()
            for (path, point), value, slope, gradient in zip(nodes, done.scores.tolist(), slopes, added, strict=True):
                paths[path].add(point, value, slope)
                gradients[path].append(gradient)
        residual, rise = abs(sum(path.residual for path in paths)), abs(sum(path.rise for path in paths))
        rounding = sum(path.rounding for path in paths)
        # Scores or gradients that are not finite are reported with the result; more nodes do not change them.
        if not max(tolerance * rise, rounding) < residual < math.inf or passes.budget.is_over():
            break
        if sum(map(len, gradients)) >= MOST_NODES * len(paths):
            notes.append(f"the tolerance was not met with {MOST_NODES} nodes")
            break
    pairs = zip((path.weights.to(differences) for path in paths), map(torch.stack, gradients), strict=True)
    means = [torch.einsum("n,n...->...", weights, slopes) for weights, slopes in pairs]
    values = (differences * torch.stack(means)).mean(0)
    return ImageAttribution(values, residual=sum(path.residual for path in paths) / len(paths), notes=notes)


AREA = 224 * 224
"""The number of pixels for which the authors give areas, scales and lengths. Areas and scales are proportional to the
number of pixels of an image, lengths to its square root."""
SCALES = (50.0, 100.0, 150.0, 250.0, 500.0, 1200.0)
"""Felzenszwalb's scales, from small segments to large ones, for `AREA` pixels."""
SIGMA = 0.8
LEAST_SEGMENT = 150
MIN_SEGMENT = 9
"""The minimum number of pixels of a segment in images of any size."""
LEAST_GAIN = 50
RADIUS = 5


class XRAI(TimedAttribution):
    """The mean integrated gradient of whole regions, from segmentations of the image at six scales.

    Formula: S_i = mean_j max_c G_cj over the new pixels j of the region of i, with G the integrated gradients, averaged
    over a dark and a bright baseline.

    Integrated gradients start from the darkest and from the brightest value of the image, so that black and white
    regions both get values; the map takes the largest channel of their mean. Segments, dilated a little to include
    their edges, are then taken one by one. The next segment is the segment whose remaining pixels have the largest
    mean; this mean becomes their value. A segment that adds only a few pixels is dropped. The value of pixels outside
    all segments is their mean.

    Args:
        steps: The number of Gauss-Legendre nodes on each of the two paths.

    Values: (N, 1, H, W), in score units per pixel, constant within a region; only their order is meaningful.

    Raises:
        DependencyError: scikit-image is not installed.

    Source: Kapishnikov et al., "XRAI: Better Attributions Through Regions" (2019), https://arxiv.org/abs/1906.02825;
        segments: Felzenszwalb and Huttenlocher, "Efficient Graph-Based Image Segmentation" (2004),
        https://doi.org/10.1023/B:VISI.0000022288.19776.77.
    """

    name = "xrai"
    cost = "100 forwards and backwards"
    sign = "positive"
    preview_options: ClassVar = {"steps": 2}

    steps: Option[int] = Option(50, check_integer, most=LARGEST_STEPS)

    def explain_image(self, passes: Passes, score: Tensor) -> ImageAttribution:
        """Compute the means of the regions."""
        x = passes.x
        require_two_axes(x, self.name)
        references = torch.cat([torch.full_like(x, float(extreme)) for extreme in x.aminmax()])  # (2, C, H, W)
        regions = multiscale_regions(x[0].to("cpu", torch.float64).permute(1, 2, 0).numpy(), passes.report)
        gradients = passes.in_time(partial(mean_gradients, passes, references, "gauss_legendre"), self.steps)
        pixels = ((x - references) * gradients).mean(0).amax(0)  # (H, W)
        least = LEAST_GAIN * pixels.numel() / AREA
        values = ranked(pixels.to("cpu", torch.float64).numpy(), regions, least)
        return ImageAttribution(torch.from_numpy(values)[None].to(at_least_float32(x)))


def multiscale_regions(image: NDArray[np.float64], report: Callable[[], None]) -> list[NDArray[np.int64]]:
    """Segment an image (H, W, C) at six scales, and dilate each segment by a few pixels. Report after each scale.

    Returns:
        The flat indices of the pixels of each region.
    """
    felzenszwalb = optional_import("skimage.segmentation", "perturbation", "XRAI").felzenszwalb

    from scipy.ndimage import find_objects
    from skimage.morphology import isotropic_dilation

    low, high = float(image.min()), float(image.max())
    image = (image - low) * (2 / (high - low)) - 1 if high > low else np.zeros_like(image)
    height, width = image.shape[:2]
    ratio = height * width / AREA
    radius = round(RADIUS * ratio**0.5)
    least = max(MIN_SEGMENT, round(LEAST_SEGMENT * ratio))
    pixels: list[NDArray[np.int64]] = []
    for scale in SCALES:
        labels = felzenszwalb(image, scale * ratio, SIGMA, least, channel_axis=-1) + 1  # 0 is the background
        for label, (down, across) in enumerate(find_objects(labels), start=1):
            top, left = max(down.start - radius, 0), max(across.start - radius, 0)
            mask = labels[top : down.stop + radius, left : across.stop + radius] == label
            rows, columns = np.nonzero(isotropic_dilation(mask, radius))
            pixels.append((rows + top) * width + columns + left)
        report()
    return pixels


def ranked(values: NDArray[np.float64], regions: Sequence[NDArray[np.int64]], least: float) -> NDArray[np.float64]:
    """Average values over regions, always next over the region whose remaining pixels have the largest mean.

    When a pixel is taken, the mean of every region that contains it is updated.

    Args:
        values: (H, W).
        regions: The flat indices of the pixels of each region; regions may overlap.
        least: The smallest number of new pixels with which a region is kept.
    """
    from scipy.sparse import csr_matrix

    flat, pixels, starts = values.ravel(), np.concatenate(regions), np.cumsum([0, *map(len, regions)])
    members = csr_matrix((np.ones(len(pixels)), pixels, starts), (len(regions), flat.size))
    remaining, sums = members @ np.ones(flat.size), members @ flat  # the pixels not yet taken, and their sum
    members = members.tocsc()
    result, taken = np.zeros_like(flat), np.zeros(flat.size, bool)
    while True:
        means = np.where(remaining >= max(least, 1), sums / np.maximum(remaining, 1), -np.inf)
        best = int(means.argmax())
        if means[best] == -np.inf:
            break
        region = regions[best][~taken[regions[best]]]
        result[region], taken[region] = flat[region].mean(), True
        touched = members[:, region]
        remaining -= touched @ np.ones(len(region))
        sums -= touched @ flat[region]
    if not taken.all():
        result[~taken] = flat[~taken].mean()
    return result.reshape(values.shape)
