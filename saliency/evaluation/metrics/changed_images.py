"""The perturbed images of one image, and their scores, which metrics share."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

from ...attribution.answer import Answer
from ...attribution.base import METHODS
from ...attribution.heatmap import reduced_maps
from ...attribution.questions import Questions
from ...engine.estimates import generator, tied_ranks
from ...engine.multi_pass import MakeInputs, Passes, check_chunk
from ...hooks.manager import HookManager
from ...hooks.model_state import run_model
from ...io.inputs import Batch
from ...methods.baselines import Fill, Filler, GivenImages
from ...methods.gradient import VanillaGradient
from ...methods.segments import ResolvedSegments, Segments, segmented
from ...targets.targets import TargetLike, per_image
from .base import Metric, Outcome, SharedResults, Subject, stacked

GROUPS = 50
"""The number of groups of samples of which one is left out at a time, for standard errors."""


class PerturbationMetric(Metric):
    """Base class of the metrics that compare the scores of perturbed images with a map.

    All such metrics of one call share the forwards of equal images.
    """

    of_explained_score: ClassVar[bool] = False
    """Whether the metric needs the explained score, even if others get the probability."""

    @abstractmethod
    def measure_image(self, image: PerturbedImage) -> Outcome:
        """Compute the values (M,) of one image, for the map and its controls."""

    def outcome(self, subject: Subject) -> Outcome:
        """Compute the values of all images, (M, N)."""
        return self.together([self], subject)[self]

    def together(self, metrics: Sequence[Metric], subject: Subject, **passes: Any) -> dict[Metric, Outcome]:
        """Measure by all metrics of this kind, which share the forwards.

        Args:
            metrics: The metrics; other kinds are ignored.
            subject: The explanation to measure.
            **passes: Options of `MultiPassAttribution`: `chunk`, `progress`.
        """
        if "chunk" in passes:
            check_chunk("chunk", passes["chunk"])
        same_kind = [metric for metric in metrics if isinstance(metric, PerturbationMetric)]
        sharing = [metric for metric in same_kind if metric.of_explained_score == self.of_explained_score]
        images, measured = subject.images, list[list[Outcome]]()
        reader = VanillaGradient(subject.reader.model, layout=subject.reader.layout)  # without options for each image
        target = subject.explained_target if self.of_explained_score else subject.scored_target

        def measure(batch: Batch, target: TargetLike) -> None:
            """Measure the next images. The model is prepared."""
            x = batch.inputs
            asked = Questions(target, reader.images(x, batch.frames))
            with HookManager(), torch.no_grad():
                for index, score in enumerate(asked(run_model(reader.model, x))):
                    with Passes(
                        reader.model, x[index : index + 1], asked, index, score, label="metrics", **passes
                    ) as variants:
                        image = PerturbedImage(variants, score, subject, len(measured), self.of_explained_score)
                        measured.append([image.measured(metric) for metric in sharing])

        inputs = subject.inputs_for(reader, images)
        batch = inputs if isinstance(inputs, Answer) else Batch(images, (None,) * len(images))
        with reader.call(batch, [target]):
            if isinstance(batch, Answer) and len(images) > 1:
                targets = per_image(target, len(images))
                batch.by_image(lambda part, image: measure(part, targets[image]))
            else:
                measure(batch, target)
        return {metric: stacked(own, 1) for metric, *own in zip(sharing, *measured, strict=True)}


class PerturbedImage:
    """Variants of one image. Each is run once, and all metrics and explanations of a call share its score.

    Args:
        passes: Runs the variants.
        score: The score of the image.
        subject: The explanation to measure.
        index: The index of the image.
        is_explained: Whether the score is the explained one, even if others are probabilities.

    Attributes:
        x: (1, C, H, W) the image.
        full: The score of the image.
        maps: (M, H, W) the map and the controls.
        seed: The seed of all draws.
        preprocess: How images become the model's input, if known.
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

        Values in score units per unit of the input are multiplied by the difference to the fill. Others are taken as
        they are.
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
        """Return the scores of `count` images (count,), float64 on the CPU. Equal keys are run once.

        Args:
            key: A key that identifies the images.
            count: The number of images.
            make: As for `Passes.forwards`.
            local: As for `Passes.forwards`.
        """
        return self.shared.once(("scores", key), self._run, count, make, local)

    def _run(self, count: int, make: MakeInputs, local: bool) -> Tensor:
        return self.passes.scores(make, count, local=local).cpu().double()

    def masked_scores(
        self, key: Hashable, count: int, fill: Fill, hidden: Callable[[int, int], Tensor], *, local: bool = False
    ) -> Tensor:
        """Return the scores (count,) with some pixels replaced.

        Args:
            key: A key that identifies the masks.
            count: The number of images.
            fill: The value of hidden pixels.
            hidden: Returns the masks (k, H, W) from one number to another, true for hidden pixels.
            local: As for `Passes.forwards`.
        """
        filler = Filler(self.x, fill)

        def make(start: int, stop: int) -> Tensor:
            return filler(hidden(start, stop)[:, None])

        return self.scores((key, fill_name(fill)), count, make, local=local)

    def empty(self, fill: Fill) -> float:
        """Return the score with all pixels replaced."""
        hidden = torch.ones_like(self.x[:, 0], dtype=torch.bool)
        return float(self.masked_scores("all", 1, fill, lambda start, stop: hidden))

    def curves(self, counts: Sequence[int], fill: Fill, *, lowest_first: bool = False, insert: bool = False) -> Tensor:
        """Return the scores with the first pixels of each order replaced (M, K), or with only these shown.

        Args:
            counts: The K numbers of pixels.
            fill: The value of hidden pixels.
            lowest_first: Whether the order is of ascending relevance.
            insert: Whether the first pixels are shown and all others hidden.
        """
        places = self.pixels - 1 - self.ranks if lowest_first else self.ranks
        return torch.stack([self._curve(place, counts, fill, insert) for place in places])

    def _curve(self, place: Tensor, counts: Sequence[int], fill: Fill, insert: bool = False) -> Tensor:
        """Return the scores (K,) with the first places of an order (H, W) replaced, or with only these shown."""
        last = int(place.max()) + 1
        inner = [count for count in counts if 0 < count < last]
        limits = torch.tensor(inner, dtype=torch.int64, device=place.device)[:, None, None]

        def hidden(start: int, stop: int) -> Tensor:
            first = place < limits[start:stop]
            return ~first if insert else first

        scores = self.masked_scores(("curve", digest(place), *inner, insert), len(inner), fill, hidden)
        known: dict[int, float] = dict(zip(inner, scores.tolist(), strict=True))

        def score(count: int) -> float:
            if count in known:
                return known[count]
            return self.full if (count == 0) != insert else self.empty(fill)  # equal for all orders

        return torch.tensor([score(count) for count in counts], dtype=torch.float64, device="cpu")

    @property
    def blurred(self) -> GivenImages:
        """The image under a Gaussian of 11 pixels with a standard deviation of 5, as in RISE."""
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

    def segment_curves(self, by: ResolvedSegments, fill: Fill) -> Tensor:
        """Return the scores with the segments of highest mean relevance replaced, none to all: (M, segments + 1)."""
        segments = self.segments(by)
        places = self.segment_ranks(segments).to(self.x.device)
        return torch.stack([self._curve(place[segments.labels], range(segments.count + 1), fill) for place in places])

    def without_segments(
        self, key: Hashable, by: ResolvedSegments, chosen: Tensor, fill: Fill
    ) -> tuple[Tensor, Tensor]:
        """Return the contribution of sets of segments (M, k), and the drops in the score without them (k,).

        Args:
            key: A key that identifies the sets.
            by: The segments.
            chosen: (k, segments) of bool, on the CPU.
            fill: The value of hidden pixels.
        """
        segments = self.segments(by)
        is_single = bool((chosen.sum(1) == 1).all())

        def hidden(start: int, stop: int) -> Tensor:
            return segments.hidden(~chosen[start:stop])[:, 0]

        scores = self.masked_scores((key, id(segments)), len(chosen), fill, hidden, local=is_single)
        return self.segment_sums(segments, self.contributions(fill)) @ chosen.double().T, self.full - scores

    def subsets(self, by: ResolvedSegments, size: int, passes: int, fill: Fill) -> tuple[Tensor, Tensor]:
        """Return the same for random sets of `size` segments."""
        count = self.segments(by).count
        chosen = torch.zeros(passes, count, dtype=torch.bool, device="cpu")
        for number, row in enumerate(chosen):
            row[torch.randperm(count, generator=generator(self.seed, size, number), device="cpu")[:size]] = True
        return self.without_segments(("subsets", size, passes), by, chosen, fill)

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
    places = torch.arange(values.shape[1], device=values.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)


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
    """Return a statistic of `count` samples with its standard errors: of each row, and of the first minus each row.

    The errors of few groups are widened as Student's t is, so that 1.96 errors cover 95 % for any number of samples.

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

    def error(rows: Tensor) -> Tensor:
        return widened * ((groups - 1) * rows.var(0, correction=0)).sqrt()

    return Outcome(statistic(indices), error(without), error(without[:, :1] - without))


def correlation(first: Tensor, second: Tensor) -> Tensor:
    """Return Pearson's correlation along the last axis; 0 if one of them is constant."""
    first, second = (values.double() - values.double().mean(-1, keepdim=True) for values in (first, second))
    norms = first.norm(dim=-1) * second.norm(dim=-1)
    return torch.where(norms > 0, (first * second).sum(-1) / norms.clamp(min=1e-300), 0.0)
