"""Methods that follow straight paths from baselines to the image: integrated and expected gradients, and IDGI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from ..attribution.options import Budget, EngineOptions, SamplingOptions
from ..attribution.resolved_target import ResolvedTarget
from ..engine.estimates import Estimate
from ..engine.multi_pass import ImageAttribution, MultiPassAttribution, SampledAttribution, from_estimate, generator
from ..engine.runner import MakeInputs, PassRunner
from ..targets.class_names import class_scores
from ..targets.targets import ClassScore, OutputTarget, Probability
from .baselines import BaselineLike, ResolvedBaseline, baselines, resolve_baseline
from .quadrature import Adaptive, Rule
from .quadrature import rule as rule_of

MOST_NODES = 256
"""Where an adaptive integral ends at the latest: the gradients at all nodes are kept."""


class IntegratedGradients(MultiPassAttribution):
    """The mean gradient on the straight path from a baseline to the image, times the way between them.

    The default baseline is the mean colour, 0 in the normalised input: it is the same for all images, is known of every
    model, and lies nearer to most pixels than black, under which dark pixels get nothing however much they count.

    A trained network's gradient changes so fast along the path that fixed rules converge slowly: on the bundled network
    and real photos, 50 nodes of Gauss and Legendre leave a residual of 1 to 17 % of the rise, 32 one of 5 to 50 %. A
    `tolerance` is met with far fewer passes, in two ways. The scores at two nodes say what the gradients in between
    must add up to, so the gradients at both are mixed accordingly, which is exact for one kink in between; and nodes
    are added where no mixture does, in the intervals with the largest residuals. All nodes are kept (those of Gauss and
    Legendre's rule, asked for more, are all new ones). The weights are never negative and sum to 1 under every rule, so
    the result is always a mean of true gradients.

    A small residual is not a small error of the map: at 1 %, after 10 to 17 passes, the maps of the bundled network's
    top class on five photos have a cosine of .87 to .98 with those of 256 nodes; under 50 nodes .994 to .999.

    Args:
        model: As for every method.
        baseline: "mean", "black", "white", "blur", "noise" (of the normalised input's mean and spread), a number in
            units of the normalised input, a float tensor, a picture or its path; of several, or of a tensor
            (K, C, H, W), the mean over all is taken.
        rule: "gauss_legendre", "midpoint", "trapezoid", "riemann_left" or "riemann_right".
        steps: The number of nodes on each path.
        tolerance: The residual, relative to the score's rise over the baseline's, at which nodes suffice. They are then
            chosen as said above, and `rule` and `steps` do not count.
        **running: See `saliency.attribution.options.EngineOptions`.

    Values: (N, C, H, W), signed, in score units; they and the residual make up the score less that of the baseline.

    Raises:
        MethodError: An option that is none, or a baseline that does not fit.
        TargetError: The target does not fit the model's output, or does not depend on the input.

    Source: Sundararajan et al., "Axiomatic Attribution for Deep Networks" (2017), https://arxiv.org/abs/1703.01365;
        baselines: Sturmfels et al., "Visualizing the Impact of Feature Attribution Baselines" (2020),
        https://doi.org/10.23915/distill.00022.
    """

    name = "integrated_gradients"
    cost = "50 forwards and backwards, 1 forward; with a tolerance of 1 % about 13"
    quick_options: ClassVar[Mapping[str, Any]] = {"steps": 3}

    def __init__(
        self,
        model: nn.Module,
        *,
        baseline: BaselineLike = "mean",
        rule: Rule = "gauss_legendre",
        steps: int = 50,
        tolerance: float | None = None,
        **running: Unpack[EngineOptions],
    ) -> None:
        super().__init__(model, **running)
        self.baseline = resolve_baseline("baseline", baseline, self.preprocess)
        self.rule, self.steps = rule, steps
        self.tolerance = checked_tolerance(tolerance)
        rule_of(rule, steps)

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """The mean over the baselines of the integral on the path from each."""
        references = baselines(self.baseline, passes.x, self.preprocess, self.seed)
        if self.tolerance is not None:
            return _adaptively_integrated(passes, references, self.tolerance)
        gradients = mean_gradients(passes, references, self.rule, self.steps)
        values = ((passes.x - references) * gradients).mean(0)  # (C, H, W)
        return ImageAttribution(values, residual=residual_of(values, score, scores_of(passes, references)))


class IDGI(MultiPassAttribution):
    """The score's rise along the path from a baseline, each step's dealt out by the squared gradient.

    Of what integrated gradients sums up, only the part along the gradient changes the score; the rest is noise that
    cancels in the sum alone. So each step's rise is given to the pixels by their share in the gradient's square, which
    makes the values add up exactly, but for steps that begin where the gradient is zero.

    As in the authors' code, a class is explained by its probability, and the result's `target_names` say so. Any other
    target is explained as it is, as `saliency.value(281)` for the logit, and so is the only output of a model. On the
    bundled network and photos the outer 16 pixels, next to the padding, hold 16 % of the map on average, and 21 % where
    the logit is explained.

    Args:
        model: As for every method.
        baseline: As for `IntegratedGradients`.
        steps: The number of steps on each path.
        **running: See `saliency.attribution.options.EngineOptions`.

    Values: (N, C, H, W), signed, in units of the probability, or of the target's score; they sum to that of the image
    less that of the baseline.

    Raises:
        MethodError: An option that is none, or a baseline that does not fit.
        TargetError: The target does not fit the model's output, or does not depend on the input.

    Source: Yang et al., "IDGI: A Framework to Eliminate Explanation Noise from Integrated Gradients" (2023),
        https://arxiv.org/abs/2303.14242.
    """

    name = "idgi"
    cost = "51 forwards and backwards"
    quick_options: ClassVar[Mapping[str, Any]] = {"steps": 3}

    def __init__(
        self, model: nn.Module, *, baseline: BaselineLike = "mean", steps: int = 50, **running: Unpack[EngineOptions]
    ) -> None:
        super().__init__(model, **running)
        self.baseline = resolve_baseline("baseline", baseline, self.preprocess)
        self.steps = steps
        rule_of("midpoint", steps)

    def explained_target(self, target: ResolvedTarget) -> ResolvedTarget:
        """The probability of a class instead of its logit."""
        if not isinstance(target.target, ClassScore):
            return target
        return ResolvedTarget(_ProbabilityIfAny((target.target,)), target.images, target.categories)

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """The steps' rises, dealt out."""
        references = baselines(self.baseline, passes.x, self.preprocess, self.seed)
        stations = self.steps + 1
        values = torch.zeros_like(passes.x[0], dtype=wide(passes.x))
        risen = 0.0
        open_share, open_score = torch.zeros_like(values), 0.0  # of the station that the last chunk ended at
        at = torch.linspace(0, 1, stations, dtype=torch.float64, device="cpu")
        for done in passes.gradients(on_paths(passes.x, references, at), len(references) * stations):
            shares = _squared_shares(done.gradients.to(values.dtype))
            for place, (share, here) in enumerate(zip(shares, done.scores.tolist(), strict=True), start=done.start):
                if place % stations:
                    values += (here - open_score) * open_share
                    risen += here - open_score
                open_share, open_score = share, here
        values, risen = values / len(references), risen / len(references)
        return ImageAttribution(values, residual=risen - float(values.sum(dtype=torch.float64)))


class _ProbabilityIfAny(Probability):
    """The probability of a class; the score itself where the model gives one number per image."""

    def resolve_from(self, output: Any) -> OutputTarget:
        """With the top class, where none was named."""
        score = self.scores[0].resolve_from(output)
        return score if class_scores(output).shape[1] == 1 else Probability((score,))


class ExpectedGradients(SampledAttribution):
    """The mean of gradient times way over random places on random paths: integrated gradients over many baselines.

    Each sample takes one baseline and one place on its path. That makes no single baseline's colour invisible, and the
    map comes with a standard error. By default each baseline is one random colour, normally distributed as the
    normalised input's values are, which needs no data; the authors draw training images.

    Args:
        model: As for every method.
        references: "colours"; or what is drawn from: a float tensor (K, C, H, W), or a list of pictures, paths, or
            baselines as of `IntegratedGradients`. Of "noise", each sample has its own.
        **sampling: See `saliency.attribution.options.SamplingOptions`.

    Values: (N, C, H, W), signed, in score units; their expectation sums to the score less the baselines' mean score.

    Raises:
        MethodError: An option that is none, or a reference that does not fit.
        TargetError: The target does not fit the model's output, or does not depend on the input.

    Source: Erion et al., "Improving Performance of Deep Learning Models with Axiomatic Attribution Priors and Expected
        Gradients" (2019), https://arxiv.org/abs/1906.10670.
    """

    name = "expected_gradients"
    cost = "200 forwards and backwards"
    samples = 200
    quick_options: ClassVar[Mapping[str, Any]] = {"passes": 4}

    def __init__(
        self, model: nn.Module, *, references: BaselineLike = "colours", **sampling: Unpack[SamplingOptions]
    ) -> None:
        super().__init__(model, **sampling)
        self.references: ResolvedBaseline | list[ResolvedBaseline] = (
            "colours"
            if isinstance(references, str) and references == "colours"
            else resolve_baseline("references", references, self.preprocess)
        )

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """The mean over the samples."""
        x, estimate = passes.x, Estimate()
        drawn = self.references in ("colours", "noise")
        given = x if drawn else baselines(self.references, x, self.preprocess, self.seed)

        def draw(sample: int) -> tuple[Tensor, float]:
            """A sample's baseline (C, H, W) and its place on the path."""
            random = generator(self.seed, sample)
            place = float(torch.rand((), generator=random, dtype=torch.float64, device="cpu"))
            if not drawn:
                return given[int(torch.randint(len(given), (), generator=random, device="cpu"))], place
            shape = (x.shape[1], 1, 1) if self.references == "colours" else x.shape[1:]
            return torch.randn(shape, generator=random, dtype=torch.float64, device="cpu").to(x).expand_as(x[0]), place

        def make(start: int, stop: int) -> Tensor:
            drawings = [draw(sample) for sample in range(start, stop)]
            return torch.stack([torch.lerp(reference, x[0], place) for reference, place in drawings])

        for done in passes.gradients(make, self.most_passes):
            count = len(done.scores)
            references = torch.stack([draw(sample)[0] for sample in range(done.start, done.start + count)])
            estimate.add((x - references).to(wide(x)) * done.gradients)
            if passes.enough(estimate):
                break
        return from_estimate(estimate, x.to(wide(x)))


def on_paths(x: Tensor, references: Tensor, at: Tensor) -> MakeInputs:
    """The inputs on the straight paths from each of K baselines to the image: all nodes of one, then the next's.

    Args:
        x: (1, C, H, W) the image.
        references: (K, C, H, W) the baselines.
        at: (n,) the nodes, 0 at the baseline and 1 at the image.
    """

    def make(start: int, stop: int) -> Tensor:
        places = torch.arange(start, stop, device="cpu")
        shares = at[places % len(at)].to(x).view(-1, 1, 1, 1)
        return torch.lerp(references[(places // len(at)).to(x.device)], x, shares)

    return make


def mean_gradients(passes: PassRunner, references: Tensor, rule_name: Rule, steps: int) -> Tensor:
    """Return the mean gradients (K, C, H, W) on the paths from K baselines to the image, by a rule with `steps` nodes.

    After an interrupt, the mean over the passes that were run.
    """
    nodes = rule_of(rule_name, steps)
    repeated = torch.kron(torch.eye(len(references), dtype=torch.float64, device="cpu"), nodes.weights)  # (K, K * n)
    weights = repeated.to(passes.x.device, wide(passes.x))
    total = torch.zeros(len(references), *passes.x.shape[1:], dtype=weights.dtype, device=weights.device)
    counted = weights.new_zeros(len(references))
    for done in passes.gradients(on_paths(passes.x, references, nodes.at), weights.shape[1]):
        of_chunk = weights[:, done.start : done.start + len(done.scores)]
        total += torch.einsum("pk,kchw->pchw", of_chunk, done.gradients.to(weights.dtype))
        counted += of_chunk.sum(1)
    return total / counted.clamp(min=torch.finfo(counted.dtype).tiny).view(-1, 1, 1, 1)


def scores_of(passes: PassRunner, inputs: Tensor) -> Tensor:
    """The scores (k,) of inputs (k, C, H, W); fewer after an interrupt."""
    found = [done.scores for done in passes.forwards(lambda start, stop: inputs[start:stop], len(inputs))]
    return torch.cat(found) if found else inputs.new_zeros(0)


def residual_of(values: Tensor, score: Tensor, references: Tensor) -> float | None:
    """What values miss of the score less the mean of the baselines' scores; None where an interrupt left these out."""
    if not len(references):
        return None
    return float(score) - float(references.double().mean()) - float(values.sum(dtype=torch.float64))


def wide(x: Tensor) -> torch.dtype:
    """The type that sums are kept in: that of the input, but no half precision."""
    return torch.promote_types(x.dtype, torch.float32)


def checked_tolerance(tolerance: float | None) -> float | None:
    """A tolerance that is one. Raises MethodError."""
    Budget(tolerance=tolerance)
    return tolerance


def _adaptively_integrated(passes: PassRunner, references: Tensor, tolerance: float) -> ImageAttribution:
    """The mean over the baselines, with as many nodes on each path as the residual asks for."""
    x = passes.x
    ways = (x - references).to(wide(x))  # (K, C, H, W)
    paths = [Adaptive() for _ in references]
    gradients: list[list[Tensor]] = [[] for _ in references]  # of each path, (C, H, W) at each node
    while passes.stopped == "complete" and not _is_met(paths, tolerance):
        if passes.used >= MOST_NODES * len(paths):
            passes.notes.append(f"the tolerance was not met with {MOST_NODES} nodes")
            break
        wanted = [(path, at) for path in range(len(paths)) for at in paths[path].wanted()]

        def make(start: int, stop: int, wanted: list[tuple[int, float]] = wanted) -> Tensor:
            return torch.stack([torch.lerp(references[path], x[0], at) for path, at in wanted[start:stop]])

        for done in passes.gradients(make, len(wanted)):
            rows = zip(wanted[done.start :], done.scores.tolist(), done.gradients, strict=False)
            for (path, at), value, gradient in rows:
                paths[path].add(at, value, float((gradient.to(ways.dtype) * ways[path]).sum(dtype=torch.float64)))
                gradients[path].append(gradient)
    means = [
        torch.einsum("n,nchw->chw", path.weights.to(ways), torch.stack(found).to(ways.dtype))
        for path, found in zip(paths, gradients, strict=True)
        if found
    ]
    values = (ways[: len(means)] * torch.stack(means)).mean(0)
    return ImageAttribution(values, residual=sum(path.residual for path in paths) / len(paths))


def _is_met(paths: list[Adaptive], tolerance: float) -> bool:
    """Whether the mean residual of some paths is small, measured by their mean rise, or by what rounding leaves."""
    if not paths[0].at:
        return False
    residual, rise = (abs(sum(each)) for each in ([path.residual for path in paths], [path.rise for path in paths]))
    return residual <= max(tolerance * rise, sum(path.rounding for path in paths))


def _squared_shares(gradients: Tensor) -> Tensor:
    """The share of each value in the square of its gradient (k, C, H, W); zero where the gradient is."""
    largest = gradients.abs().amax((1, 2, 3), keepdim=True)
    # Scaled first: the square of a small gradient would vanish.
    squares = (gradients / torch.where(largest == 0, torch.ones_like(largest), largest)).square()
    total = squares.sum((1, 2, 3), keepdim=True)
    return squares / torch.where(total == 0, torch.ones_like(total), total)
