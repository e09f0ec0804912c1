"""Metrics of faithfulness: does the score drop where the map says that it depends on the pixels?

They compare a map with the scores of perturbed images, which all metrics of one call share.
"""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

from ...attribution.base import METHODS
from ...attribution.estimates import generator, precise_type, tied_ranks
from ...attribution.explanation import reduced_maps
from ...attribution.inputs import each_alone
from ...attribution.options import ConvertedOption, Option
from ...attribution.passes import MakeInputs, Passes, check_chunk
from ...attribution.questions import Questions
from ...hooks.manager import HookManager
from ...io.inputs import Batch
from ...methods.baselines import Fill, Filler, FillOption, GivenImages
from ...methods.gradient import VanillaGradient
from ...methods.segments import ResolvedSegments, Segments, SegmentsLike, resolve_segments, segmented
from ...model.call import bound, current_call, run_model
from ...targets.classes import TargetLike
from ...validation import check_choice, check_integer, check_number
from .base import Metric, Outcome, SharedResults, Subject, stacked

GROUPS = 50
"""The number of groups of samples of which one is left out at a time, for standard errors."""


class PerturbationMetric(Metric):
    """Base class of the metrics that compare the scores of perturbed images with a map.

    All such metrics of one call share the forwards of equal images.
    """

    of_explained_score: ClassVar[bool] = False
    """Whether the metric reads the explained score where other metrics read the probability."""

    @abstractmethod
    def measure_image(self, image: PerturbedImage) -> Outcome:
        """Compute the values (M,) of one image, for the map and its controls."""

    def outcome(self, subject: Subject) -> Outcome:
        """Compute the values of all images, (M, N)."""
        return self.together([self], subject)[self]

    def together(self, metrics: Sequence[Metric], subject: Subject, **passes: Any) -> dict[Metric, Outcome]:
        """Measure by all metrics of this kind, which share the forwards; other kinds are ignored."""
        if "chunk" in passes:
            check_chunk("chunk", passes["chunk"])
        same_kind = [metric for metric in metrics if isinstance(metric, PerturbationMetric)]
        sharing = [metric for metric in same_kind if metric.of_explained_score == self.of_explained_score]
        images, measured = subject.images, list[list[Outcome]]()
        reader = VanillaGradient(subject.reader.model, layout=subject.reader.layout)  # without options for each image
        target = subject.explained_target if self.of_explained_score else subject.scored_target

        def measure(batch: Batch, targets: Sequence[TargetLike]) -> None:
            """Measure the next images. The model is prepared."""
            x, model = batch.inputs, reader.model
            asked = Questions(targets[0], reader.images(x, batch.frames))
            with HookManager(), torch.no_grad():
                # A target that reads logits finds them in the forward of this call.
                is_new = len(x) < len(images) or current_call().logits is not None
                for index, score in enumerate(asked(run_model(model, x) if is_new else subject.output)):
                    single = x[index : index + 1]
                    with Passes(model, single, asked, index, score, label="metrics", **passes) as variants:
                        image = PerturbedImage(variants, score, subject, len(measured), self.of_explained_score)
                        measured.append([image.measured(metric) for metric in sharing])

        inputs = subject.inputs_for(reader, images)
        batch = inputs if isinstance(inputs, Batch) else Batch(images, (None,) * len(images))
        compiled = getattr(subject.reader, "passes_of_model", None)
        with reader.call(batch, [target]), bound(compiled=compiled):
            each_alone(batch, [target], measure)
        return {metric: stacked(outcomes, 1) for metric, *outcomes in zip(sharing, *measured, strict=True)}


class PerturbedImage:
    """Variants of one image. Each is run once, and all metrics and explanations of a call share its score.

    Args:
        passes: Runs the variants.
        score: The score of the image.
        subject: The explanation to measure.
        index: The index of the image.
        is_explained: Whether the score is the explained score, even if other metrics read the probability.

    Attributes:
        x: (1, C, H, W) the image.
        full: The score of the image.
        maps: (M, H, W) the map and the controls.
        seed: The seed of all draws.
        preprocess: The preprocessing of the images, or None.
        shared: Results that do not depend on the map.
    """

    def __init__(self, passes: Passes, score: Tensor, subject: Subject, index: int, is_explained: bool) -> None:
        self.passes, self.x, self.full = passes, passes.x, float(score)
        self.maps, self.seed = subject.maps[:, index], subject.seed
        self.preprocess = subject.reader.preprocess
        self._subject, self._index = subject, index
        target = index, subject.explanation.target[index], subject.explanation.target_names[index], is_explained
        key = "image", id(subject.reader.model), *target, self.seed, digest(self.x)
        self.shared = subject.shared.once(key, SharedResults)

    def measured(self, metric: PerturbationMetric) -> Outcome:
        """Measure the image by a metric, and count the passes."""
        before = self.passes.budget.used
        outcome = metric.measure_image(self)
        return outcome._replace(passes=self.passes.budget.used - before)

    @property
    def pixels(self) -> int:
        """The number of pixels."""
        return self.x[0, 0].numel()

    @cached_property
    def ranks(self) -> Tensor:
        """The rank of each pixel in descending order of relevance (M, H, W); ties keep the order of the pixels."""
        return ranks_of(self.maps.flatten(1)).view_as(self.maps)

    def contributions(self, fill: Fill) -> Tensor:
        """Return the contribution of each pixel to the score, minus the contribution of the fill (M, H, W).

        Values in score units per unit of the input are multiplied by the difference to the fill. Other values
        are used unchanged.
        """
        return self._subject.once(("contributions", self._index, fill_name(fill)), self._contributions, fill)

    def _contributions(self, fill: Fill) -> Tensor:
        explanation = self._subject.explanation[self._index]
        maps = reduced_maps(explanation, "signed")
        units = METHODS[explanation.method].units if explanation.method in METHODS else ""
        if "score per unit" in units and explanation.values.shape == self.x.shape:
            maps = (explanation.values * (self.x - Filler(self.x, fill).background)).sum(1)
        return self._subject.controlled(maps, slice(self._index, self._index + 1))[:, 0]

    def segments(self, by: ResolvedSegments) -> Segments:
        """Return the segments of the image."""
        key = "segments", by if isinstance(by, int | tuple) else id(by)
        return self.shared.once(key, segmented, self.x, by, self.preprocess)

    def scores(self, key: Hashable, count: int, make: MakeInputs, *, local: bool = False) -> Tensor:
        """Return the scores of images (count,), float64 on the CPU, as `Passes.scores`. Each key is run once."""
        return self.shared.once(("scores", key), lambda: self.passes.scores(make, count, local=local).cpu().double())

    def masked_scores(
        self, key: Hashable, count: int, fill: Fill, hidden: Callable[[int, int], Tensor], *, local: bool = False
    ) -> Tensor:
        """Return the scores (count,) with some pixels replaced.

        `hidden(start, stop)` returns some of the masks (k, H, W), true for hidden pixels; the key identifies all masks.
        """
        filler = Filler(self.x, fill)
        return self.scores((key, fill_name(fill)), count, lambda i, j: filler(hidden(i, j)[:, None]), local=local)

    def empty(self, fill: Fill) -> float:
        """Return the score with all pixels replaced."""
        hidden = torch.ones_like(self.x[:, 0], dtype=torch.bool)
        return float(self.masked_scores("all", 1, fill, lambda start, stop: hidden))

    def curves(self, counts: Sequence[int], fill: Fill, *, lowest_first: bool = False, insert: bool = False) -> Tensor:
        """Return the scores without the first pixels of each order (M, K), or with `insert` only with these shown."""
        ranks = self.pixels - 1 - self.ranks if lowest_first else self.ranks
        return torch.stack([self.curve(row, counts, fill, insert) for row in ranks])

    def curve(self, ranks: Tensor, counts: Sequence[int], fill: Fill, insert: bool = False) -> Tensor:
        """Return the scores (K,) with the first pixels of an order (H, W) replaced, or with only these shown."""
        last = int(ranks.max()) + 1
        inner = [count for count in counts if 0 < count < last]
        limits = torch.tensor(inner, dtype=torch.int64, device=ranks.device)[:, None, None]

        def hidden(start: int, stop: int) -> Tensor:
            return (ranks < limits[start:stop]) != insert

        key = "curve", digest(ranks), *inner, insert
        scores = dict(zip(inner, self.masked_scores(key, len(inner), fill, hidden).tolist(), strict=True))
        for count in {*counts} - {*inner}:  # all pixels or none: the same for all orders
            scores[count] = self.full if (count == 0) != insert else self.empty(fill)
        return torch.tensor([scores[count] for count in counts], dtype=torch.float64, device="cpu")

    @property
    def blurred(self) -> GivenImages:
        """The image, blurred by a Gaussian of 11 pixels with a standard deviation of 5, as in RISE."""
        return self.shared.once("blurred", self._blurred)

    def _blurred(self) -> GivenImages:
        weights = torch.exp(-0.5 * ((torch.arange(11, device=self.x.device) - 5) / 5).square()).to(self.x)
        kernel = torch.outer(weights, weights) / weights.sum().square()
        padded = pad(self.x.transpose(0, 1), (5, 5, 5, 5), mode="replicate")
        return GivenImages("blur of 11 pixels", conv2d(padded, kernel[None, None]).transpose(0, 1))

    def segment_sums(self, segments: Segments, maps: Tensor) -> Tensor:
        """Return the sum of maps (M, H, W) over each segment: (M, segments), float64 on the CPU."""
        sums = torch.zeros(len(maps), segments.count, dtype=torch.float64, device="cpu")
        return sums.index_add_(1, segments.labels.flatten().cpu(), maps.flatten(1).cpu().double())

    def segment_ranks(self, segments: Segments) -> Tensor:
        """Return the rank of each segment in descending order of mean relevance (M, segments)."""
        return ranks_of(self.segment_sums(segments, self.maps) / segments.sizes.cpu())

    def subsets(self, by: ResolvedSegments, size: int, passes: int, fill: Fill) -> tuple[Tensor, Tensor]:
        """Return the contribution of random sets of segments (M, passes), and the drops in the score without them."""
        segments = self.segments(by)
        chosen = torch.zeros(passes, segments.count, dtype=torch.bool, device="cpu")
        for number, row in enumerate(chosen):
            row[torch.randperm(len(row), generator=generator(self.seed, size, number), device="cpu")[:size]] = True

        def hidden(start: int, stop: int) -> Tensor:
            return segments.hidden(~chosen[start:stop])[:, 0]

        key = "subsets", size, passes, id(segments)
        falls = self.full - self.masked_scores(key, passes, fill, hidden, local=size == 1)
        return self.segment_sums(segments, self.contributions(fill)) @ chosen.double().T, falls

    def shown_by_map(self) -> Tensor:
        """Return the scores of the image multiplied by each map, scaled to 0..1 (M,); a constant map is scaled to 1."""
        masks = scaled_to_one(self.maps)
        return self.scores(("masked", digest(masks)), len(masks), lambda start, stop: self.x * masks[start:stop, None])


def scaled_to_one(maps: Tensor) -> Tensor:
    """Return each map (M, H, W) scaled to 0..1; a constant map is scaled to 1."""
    low, high = (extreme[:, None, None] for extreme in maps.flatten(1).aminmax(dim=1))
    return torch.where(high > low, (maps - low) / (high - low).clamp(min=1e-30), 1.0)


def ranks_of(values: Tensor) -> Tensor:
    """Return the rank of each value in descending order, by row (M, n); ties keep their order."""
    order = values.argsort(dim=1, descending=True, stable=True)
    positions = torch.arange(values.shape[1], device=values.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, positions)


def digest(values: Tensor) -> bytes:
    """Return a digest of the values of a tensor. It distinguishes tensors of one shape and type."""
    return hashlib.sha256(values.contiguous().view(torch.uint8).cpu().numpy().data).digest()


def fill_name(fill: Fill) -> Hashable:
    """Return a key that identifies a fill."""
    return id(fill.values) if isinstance(fill, GivenImages) else fill


def row_ranks(values: Tensor) -> Tensor:
    """Return the ranks of values (M, n) in their rows, from the lowest; ties get their mean rank."""
    return torch.stack([tied_ranks(row) for row in values])


def area(curves: Tensor) -> Tensor:
    """Return the area under curves (..., K) at K equally spaced fractions from 0 to 1, by the trapezoid rule."""
    return torch.trapezoid(curves, dx=1 / max(curves.shape[-1] - 1, 1))


def jackknife(statistic: Callable[[Tensor], Tensor], count: int) -> Outcome:
    """Return a statistic of `count` samples with the standard error of each row.

    For few groups, the errors are widened by the factor of Student's t, so that 1.96 errors cover 95 % for any number
    of samples.

    Args:
        statistic: Returns the values (M,) from the samples of these indices (k,).
        count: The number of samples.

    Source: Efron and Stein, "The Jackknife Estimate of Variance" (1981), https://doi.org/10.1214/aos/1176345462;
        Goldberg and Levine, "Approximate Formulas for the Percentage Points and Normalization of t and χ²" (1946),
        https://doi.org/10.1214/aoms/1177730985.
    """
    indices = torch.arange(count, device="cpu")
    groups = min(GROUPS, count)
    without = torch.stack([statistic(indices[indices % groups != group]) for group in range(groups)])  # (G, M)
    widened = 1 + 1.21 / (groups - 1) + 1.44 / (groups - 1) ** 2
    return Outcome(statistic(indices), widened * ((groups - 1) * without.var(0, correction=0)).sqrt())


def correlation(first: Tensor, second: Tensor) -> Tensor:
    """Return Pearson's correlation along the last axis; 0 if either is constant."""
    first, second = (values.to(precise_type(values)) for values in (first, second))
    first, second = (values - values.mean(-1, keepdim=True) for values in (first, second))
    norms = first.norm(dim=-1) * second.norm(dim=-1)
    return torch.where(norms > 0, (first * second).sum(-1) / norms.clamp(min=1e-300), 0.0)


RemovalOrder = Literal["morf", "lerf"]


def _counts(steps: int, pixels: int, until: float = 1) -> list[int]:
    """Return the numbers of pixels that equal steps replace, from 0 to a fraction of all."""
    last = max(1, round(until * pixels))
    steps = min(steps, last)
    return [round(step * last / steps) for step in range(steps + 1)]


def _areas(curves: Tensor, until: float = 1) -> Outcome:
    """Return the areas under curves (M, K) at equal steps from 0 to a fraction of the pixels, divided by it."""
    fractions = torch.linspace(0, until, curves.shape[-1], dtype=torch.float64, device="cpu")
    return Outcome(area(curves), curves=curves, at=fractions)


class OrderedMetric(PerturbationMetric):
    """Base class of metrics that replace pixels in either order of their relevance.

    Args:
        order: "morf" replaces the most relevant pixels first, where lower is better; "lerf" the least relevant first,
            where higher is better.
    """

    order: Option[RemovalOrder] = Option("morf", check_choice, ("morf", "lerf"))

    @property
    def higher_is_better(self) -> bool:  # type: ignore[override] # depends on the order
        """Whether the least relevant pixels are replaced first."""
        return self.order == "lerf"


class OrderDifference(PerturbationMetric):
    """Base class of an `OrderedMetric` with the least relevant pixels first, minus the same with the most relevant."""

    higher_is_better = True
    ordered: ClassVar[type[OrderedMetric]]
    """The metric, which has the options of this one."""

    def measure_image(self, image: PerturbedImage) -> Outcome:
        """Compute the differences of one image."""
        metrics = [self.ordered(order=order, **vars(self)) for order in ("lerf", "morf")]
        least, most = (cast("Any", metric.measure_image(image)) for metric in metrics)
        return Outcome(least.values - most.values, curves=least.curves - most.curves, at=least.at)


class Deletion(OrderedMetric):
    """Area under the score while the most relevant pixels are deleted first; lower is better. Also: pixel flipping.

    Args:
        steps: The number of equal steps; 224 steps of an image of 224x224 delete one row of pixels each.
        fill: The value of deleted pixels, as for `saliency.Occlusion`; 0 is the mean colour of the training images.
        until: The fraction of the pixels that the steps delete.

    Values: (N,), in units of the score: the area by the trapezoid rule over the fraction of deleted pixels, divided by
    `until`.

    Source: Petsiuk et al., "RISE: Randomized Input Sampling for Explanation of Black-box Models" (2018),
        https://arxiv.org/abs/1806.07421; both orders: Bach et al., "On Pixel-Wise Explanations for Non-Linear
        Classifier Decisions by Layer-Wise Relevance Propagation" (2015),
        https://doi.org/10.1371/journal.pone.0130140.
    """

    name = "deletion"

    steps: Option[int] = Option(224, check_integer)
    fill: FillOption = FillOption()
    until: Option[float] = Option(1.0, check_number, above=0, most=1)

    def measure_image(self, image: PerturbedImage) -> Outcome:
        """Compute the areas of one image."""
        counts = _counts(self.steps, image.pixels, self.until)
        return _areas(image.curves(counts, self.fill, lowest_first=self.order == "lerf"), self.until)


class Insertion(PerturbationMetric):
    """Area under the score curve while the most relevant pixels are inserted into a blurred image; higher is better.

    Args:
        steps: As for `Deletion`.
        until: As for `Deletion`.

    Values: (N,), in units of the score, as for `Deletion`. The blur is a Gaussian of 11 pixels with a standard
    deviation of 5.

    Source: Petsiuk et al., "RISE: Randomized Input Sampling for Explanation of Black-box Models" (2018),
        https://arxiv.org/abs/1806.07421.
    """

    name = "insertion"
    higher_is_better = True

    steps: Option[int] = Option(224, check_integer)
    until: Option[float] = Option(1.0, check_number, above=0, most=1)

    def measure_image(self, image: PerturbedImage) -> Outcome:
        """Compute the areas of one image."""
        counts = _counts(self.steps, image.pixels, self.until)
        return _areas(image.curves(counts, image.blurred, insert=True), self.until)


class ABPC(OrderDifference):
    """Area between the curves of deletion: least relevant first, minus most relevant first; higher is better.

    Args:
        steps: As for `Deletion`.
        fill: As for `Deletion`.

    Values: (N,), in units of the score. The curve is the difference of both curves.

    Source: Schulz et al., "Restricting the Flow: Information Bottlenecks for Attribution" (2020),
        https://arxiv.org/abs/2001.00396, as the degradation of an image.
    """

    name = "abpc"
    ordered = Deletion

    steps: Option[int] = Option(224, check_integer)
    fill: FillOption = FillOption()


class AOPC(PerturbationMetric):
    """Mean drop in the score while the patches of highest relevance are replaced by noise; higher is better.

    Args:
        patch: The edge of a patch in pixels.
        steps: The largest number of replaced patches.
        draws: The number of draws of the noise, for the standard error.

    Values: (N,), in units of the score: the mean over the steps, of which the first replaces nothing. The noise is
    uniform between the smallest and the largest value of each channel.

    Source: Samek et al., "Evaluating the Visualization of What a Deep Neural Network Has Learned" (2017),
        https://arxiv.org/abs/1509.06321.
    """

    name = "aopc"
    higher_is_better = True

    patch: Option[int] = Option(9, check_integer)
    steps: Option[int] = Option(100, check_integer)
    draws: Option[int] = Option(10, check_integer, least=2)

    def measure_image(self, image: PerturbedImage) -> Outcome:
        """Compute the mean drops of one image."""
        rows, columns = (max(1, round(edge / self.patch)) for edge in image.x.shape[2:])
        segments = image.segments((rows, columns))
        ranks = image.segment_ranks(segments).to(image.x.device)  # (M, segments)
        steps = min(self.steps, segments.count)
        low, high = (extreme[:, None, None] for extreme in image.x[0].flatten(1).aminmax(dim=1))
        falls = []
        for row in ranks:

            def make(start: int, stop: int, row: Tensor = row) -> Tensor:
                images = []
                for number in range(start, stop):
                    draw, step = divmod(number, steps)
                    source = generator(image.seed, draw, step)
                    noise = torch.rand(image.x.shape[1:], generator=source, dtype=torch.float32, device="cpu")
                    hidden = (row <= step)[segments.labels]
                    images.append(torch.where(hidden, low + noise.to(image.x) * (high - low), image.x[0]))
                return torch.stack(images)

            scores = image.scores(("noise", digest(row), self.patch, steps, self.draws), self.draws * steps, make)
            falls.append(image.full - scores.view(self.draws, steps))
        curves = torch.stack(falls)  # (M, draws, steps)
        mean = jackknife(lambda draws: curves[:, draws].sum(2).mean(1) / (steps + 1), self.draws)
        return mean._replace(curves=curves.mean(1), at=torch.arange(1, steps + 1, device="cpu"))


class IROF(PerturbationMetric):
    """Area over the score curve while the most relevant superpixels are replaced by the mean; higher is better.

    Args:
        segments: As for `saliency.FeatureAblation`.

    Values: (N,): 1 minus the area under the score curve relative to the score of the image; 0 for an image of score 0.

    Raises:
        DependencyError: Superpixels need scikit-image, which is not installed.

    Source: Rieger and Hansen, "IROF: a Low Resource Evaluation Metric for Explanation Methods" (2020),
        https://arxiv.org/abs/2003.08747.
    """

    name = "irof"
    higher_is_better = True

    segments: ConvertedOption[SegmentsLike, ResolvedSegments] = ConvertedOption(100, resolve_segments)

    def measure_image(self, image: PerturbedImage) -> Outcome:
        """Compute the areas of one image."""
        segments = image.segments(self.segments)
        ranks = image.segment_ranks(segments).to(image.x.device)
        counts = range(segments.count + 1)
        curves = torch.stack([image.curve(row[segments.labels], counts, "mean") for row in ranks])
        outcome = _areas(curves / image.full if image.full else torch.ones_like(curves))
        return outcome._replace(values=1 - outcome.values)


class Infidelity(PerturbationMetric):
    """Mean squared difference between the relevance of a random square and the drop in the score without it.

    Lower is better.

    Args:
        side: The edge of the squares, as a fraction of the image's shorter edge.
        passes: The number of squares.
        scaled: Whether the map is first multiplied by the factor of at least 0 that gives the smallest value. The scale
            of most maps has no meaning, and no map has the scale of a probability. The sign has a meaning: a map
            with the wrong sign gets the value of a map of zeros.
        fill: As for `Deletion`.

    Values: (N,), in squared units of the score. Relevance in score units per unit of the input is multiplied by the
    difference to the fill.

    Source: Yeh et al., "On the (In)fidelity and Sensitivity of Explanations" (2019), https://arxiv.org/abs/1901.09392.
    """

    name = "infidelity"
    higher_is_better = False

    side: Option[float] = Option(0.25, check_number, above=0, most=1)
    passes: Option[int] = Option(200, check_integer, least=2)
    scaled: Option[bool] = Option(True)
    fill: FillOption = FillOption()

    def measure_image(self, image: PerturbedImage) -> Outcome:
        """Compute the errors of one image."""
        height, width = image.x.shape[2:]
        side = max(1, round(self.side * min(height, width)))
        squares = torch.zeros(self.passes, height, width, dtype=torch.bool, device=image.x.device)
        for number, square in enumerate(squares):
            draws = torch.rand(2, generator=generator(image.seed, number), dtype=torch.float64, device="cpu").tolist()
            top, left = int(draws[0] * (height - side + 1)), int(draws[1] * (width - side + 1))
            square[top : top + side, left : left + side] = True
        key = ("square", side, self.passes)
        scores = image.masked_scores(key, self.passes, self.fill, lambda i, j: squares[i:j], local=True)
        falls = image.full - scores
        sums = torch.stack([image.contributions(self.fill)[:, square].sum(1) for square in squares], 1).cpu().double()

        def errors(chosen: Tensor) -> Tensor:
            relevance, fall = sums[:, chosen], falls[chosen]
            norm = relevance.square().sum(1)
            fitted = ((relevance * fall).sum(1) / torch.where(norm > 0, norm, 1)).clamp(min=0)
            factor = fitted if self.scaled else torch.ones_like(norm)
            return (factor[:, None] * relevance - fall).square().mean(1)

        return jackknife(errors, self.passes)


class FaithfulnessCorrelation(PerturbationMetric):
    """Correlation of the relevance of random sets of features with the drop in the score without them.

    Higher is better.

    Args:
        segments: The features: the (rows, columns) of a grid, or as for `saliency.FeatureAblation`.
        share: The fraction of the features that each set hides.
        passes: The number of sets.
        fill: As for `Deletion`.

    Values: (N,), Pearson's correlation; 0 if the relevance of all sets is equal.

    Source: Bhatt et al., "Evaluating and Aggregating Feature-based Model Explanations" (2020),
        https://arxiv.org/abs/2005.00631.
    """

    name = "faithfulness_correlation"
    higher_is_better = True

    segments: ConvertedOption[SegmentsLike, ResolvedSegments] = ConvertedOption((16, 16), resolve_segments)
    share: Option[float] = Option(0.25, check_number, above=0, below=1)
    passes: Option[int] = Option(200, check_integer, least=2)
    fill: FillOption = FillOption()

    def measure_image(self, image: PerturbedImage) -> Outcome:
        """Compute the correlations of one image."""
        count = image.segments(self.segments).count
        size = max(1, round(self.share * count))
        sums, falls = image.subsets(self.segments, size, self.passes, self.fill)
        return jackknife(lambda chosen: correlation(sums[:, chosen], falls[chosen]), self.passes)


class SensitivityN(PerturbationMetric):
    """Correlation of the relevance of random sets of n features with the drop in the score, for several n.

    Higher is better.

    Args:
        segments: As for `FaithfulnessCorrelation`.
        sizes: The number of sizes n, on a logarithmic grid from 1 to 80 % of the features.
        passes: The number of sets of each size.
        fill: As for `Deletion`.

    Values: (N,), the mean of Pearson's correlations over n. The curve has the correlation for each n.

    Source: Ancona et al., "Towards better understanding of gradient-based attribution methods for Deep Neural Networks"
        (2018), https://arxiv.org/abs/1711.06104.
    """

    name = "sensitivity_n"
    higher_is_better = True

    segments: ConvertedOption[SegmentsLike, ResolvedSegments] = ConvertedOption((16, 16), resolve_segments)
    sizes: Option[int] = Option(8, check_integer)
    passes: Option[int] = Option(100, check_integer, least=2)
    fill: FillOption = FillOption()

    def measure_image(self, image: PerturbedImage) -> Outcome:
        """Compute the correlations of one image."""
        largest = max(1, round(0.8 * image.segments(self.segments).count))
        grid = torch.logspace(0, math.log10(largest), self.sizes, dtype=torch.float64, device="cpu")
        sizes = sorted(set(grid.round().int().tolist()))
        drawn = [image.subsets(self.segments, size, self.passes, self.fill) for size in sizes]

        def curves(chosen: Tensor) -> Tensor:  # (M, sizes)
            return torch.stack([correlation(sums[:, chosen], falls[chosen]) for sums, falls in drawn], 1)

        mean = jackknife(lambda chosen: curves(chosen).mean(1), self.passes)
        drawn_curves, positions = curves(torch.arange(self.passes, device="cpu")), torch.tensor(sizes, device="cpu")
        return mean._replace(curves=drawn_curves, at=positions)


class AverageDrop(PerturbationMetric):
    """Relative drop in the score of the image multiplied by the map scaled to 0..1; lower is better.

    Values: (N,), relative to the score of the image, 0 if the score rises. A constant map is scaled to 1.

    Source: Chattopadhay et al., "Grad-CAM++: Generalized Gradient-based Visual Explanations for Deep Convolutional
        Networks" (2018), https://arxiv.org/abs/1710.11063.
    """

    name = "average_drop"
    higher_is_better = False

    def measure_image(self, image: PerturbedImage) -> Outcome:
        """Compute the drops of one image."""
        falls = (image.full - image.shown_by_map()) / (abs(image.full) or 1.0)
        return Outcome(falls.clamp(min=0))


class Increase(PerturbationMetric):
    """Whether the score rises when the image is multiplied by the map scaled to 0..1; higher is better.

    Values: (N,), 1 or 0.

    Source: Chattopadhay et al., "Grad-CAM++: Generalized Gradient-based Visual Explanations for Deep Convolutional
        Networks" (2018), https://arxiv.org/abs/1710.11063.
    """

    name = "increase"
    higher_is_better = True

    def measure_image(self, image: PerturbedImage) -> Outcome:
        """Compare the scores of one image."""
        return Outcome((image.shown_by_map() > image.full).double())


class Completeness(PerturbationMetric):
    """Relative difference between the sum of the map and the score's rise above a baseline's; lower is better.

    Args:
        fill: The baseline, as for `Deletion`.

    Values: (N,), |sum - (f(x) - f(baseline))| / |f(x) - f(baseline)|, of the explained score. Values in score units per
    unit of the input are multiplied by the difference to the baseline.

    Source: Sundararajan et al., "Axiomatic Attribution for Deep Networks" (2017), https://arxiv.org/abs/1703.01365.
    """

    name = "completeness"
    higher_is_better = False
    of_explained_score = True

    fill: FillOption = FillOption()

    def measure_image(self, image: PerturbedImage) -> Outcome:
        """Compute the differences of one image."""
        change = image.full - image.empty(self.fill)
        sums = image.contributions(self.fill).flatten(1).sum(1).cpu().double()
        return Outcome((sums - change).abs() / (abs(change) or 1.0))
