"""Metrics that call the method again: on another model, for another target, or on other images.

They are metrics of randomisation, of robustness, a mean that combines three metrics, and exact tests of two hypotheses:
that the class does not matter, and that the learned weights do not matter.

`MPRT` and `RandomLogit` measure a drop in similarity: similarity of the map to a repeated computation, minus similarity
to the map after the change. A map that ignores the model has a value of 0, whether it is constant or noise.
"""

from __future__ import annotations

import copy
import math
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from importlib.resources import files
from itertools import pairwise, permutations
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad

from ...attribution.base import Attribution
from ...attribution.estimates import generator, precise_type
from ...attribution.explanation import resized
from ...attribution.forward import Needs, SharedForward
from ...attribution.options import Option
from ...errors import MethodError, SaliencyError, TargetError
from ...hooks.manager import HookManager
from ...io.geometry import Box
from ...io.inputs import split_images
from ...model.answer import Answer
from ...model.call import bound, prepared_for_attribution, run_model
from ...model.layers import default_layer, find
from ...targets.classes import TargetLike, class_scores
from ...targets.question import Images
from ...targets.words import words
from ...validation import check_choice, check_integer, check_number
from .base import ABSOLUTE, RELATIVE, Metric, Outcome, SharedResults, Subject, edges, full_size, stacked
from .faithfulness import Deletion, Insertion, area, correlation, digest, row_ranks, scaled_to_one
from .map_metrics import WINDOW, ssim

SimilarityKind = Literal["spearman", "absolute", "ssim"]
SIMILARITIES: tuple[SimilarityKind, ...] = get_args(SimilarityKind)

METHOD_CONTROLS = ("constant", "random", "edges")
"""The controls of metrics that call the method: a constant, new noise for each call, and the edges of the image."""


class Maps(SharedResults):
    """Maps of any images, by the method or by a control, which ignores the model and the target.

    Attributes:
        subject: The explanation to measure.
        control: One of `METHOD_CONTROLS`, or "" for the method.
        calls: The number of calls of the method so far.
    """

    def __init__(self, subject: Subject, control: str = "") -> None:
        super().__init__()
        self.subject, self.control, self.calls = subject, control, 0

    @cached_property
    def original(self) -> Tensor:
        """The maps of the explained images (N, C, h, w)."""
        return self._control_maps(self.subject.images, 0) if self.control else self.subject.explanation.values

    def __call__(self, images: Tensor, method: Attribution | None = None, target: TargetLike = None) -> Tensor:
        """Return the maps (N, C, h, w) of images (N, C, H, W), by default by the explained method and target."""
        self.calls += 1
        if self.control:
            is_original = images is self.subject.images and self.control != "random"
            return self.original if is_original else self._control_maps(images, self.calls)
        target = self.subject.explained_target if target is None else target
        method = method or self.subject.method
        return method.attribute(self.subject.inputs_for(method, images), target).values

    def again(self) -> Tensor:
        """Return the maps of the explained images, computed again."""
        return self.once("again", self, self.subject.images)

    def _control_maps(self, images: Tensor, number: int) -> Tensor:
        shape = (1, *self.subject.explanation.values.shape[2:])
        if self.control == "constant":
            return images.new_ones(len(images), *shape)
        if self.control == "random":
            source = generator(self.subject.seed, number)
            noise = torch.randn(shape, generator=source, dtype=torch.float32, device="cpu")
            return noise.to(images).expand(len(images), *shape)
        return edges(images)[:, None]


class MethodMetric(Metric):
    """Base class of the metrics that call the method again. The controls are methods that ignore the model."""

    @abstractmethod
    def measure_maps(self, maps: Maps) -> Outcome:
        """Compute the values (N,) of the images, for the maps of the method or of one control."""

    def outcome(self, subject: Subject) -> Outcome:
        """Compute the values of all images, (M, N)."""
        controls = METHOD_CONTROLS if subject.controls else ()
        sources = subject.once("maps", lambda: [Maps(subject, control) for control in ("", *controls)])
        before = sources[0].calls
        with torch.no_grad():
            rows = [self.measure_maps(maps) for maps in sources]
        return stacked(rows, 0)._replace(passes=sources[0].calls - before, controls=METHOD_CONTROLS)


def similarities(first: Tensor, others: Iterable[Tensor], kind: SimilarityKind = "spearman") -> Tensor:
    """Return the similarity of maps (N, C, h, w), summed over the channels, to k other maps: (N, k). Equal maps have 1.

    "spearman" is the rank correlation, "absolute" the rank correlation of magnitudes, and "ssim" the structural
    similarity, for which maps of fewer than 11 cells are enlarged.
    """
    comparable, columns = _comparable(first, kind), []
    for other in others:
        values = (ssim if kind == "ssim" else correlation)(comparable, _comparable(other, kind))
        columns.append(torch.where((first == other).flatten(1).all(1), 1.0, values).cpu())
    return torch.stack(columns, 1)


def _comparable(values: Tensor, kind: SimilarityKind) -> Tensor:
    """Return the maps (N, h, w) of which `ssim` is taken, or the ranks (N, h * w) that are correlated."""
    maps = values.sum(1).to(precise_type(values))
    if kind == "ssim":
        return resized(maps, (max(WINDOW, maps.shape[1]), max(WINDOW, maps.shape[2])))
    return row_ranks((maps.abs() if kind == "absolute" else maps).flatten(1))


Randomised = Literal["cascading", "independent"]


class MPRT(MethodMetric):
    """Drop in the similarity of the map while the layers are randomised from the top down; higher is better.

    Args:
        order: "cascading" keeps the layers above randomised; "independent" randomises one layer at a time.
        compare: The similarity of two maps: "spearman" (rank correlation), "absolute" (of magnitudes) or "ssim".
        layers: The number of steps, each of which randomises an equal number of layers; None for one step per layer.
        draws: The number of draws of the weights, for the standard error.

    Values: (N,), the similarity of the map to a repeated computation, minus the mean similarity over the layers. The
    curve has the similarities: the first with the unchanged model. All parameters and buffers are randomised by
    permuting the values of each tensor, which keeps their distribution. Smooth MPRT (Hedström et al. 2024) is this
    metric, measured for `SmoothGrad(method)`.

    Source: Adebayo et al., "Sanity Checks for Saliency Maps" (2018), https://arxiv.org/abs/1810.03292.
    """

    name = "mprt"
    higher_is_better = True

    order: Option[Randomised] = Option("cascading", check_choice, ("cascading", "independent"))
    compare: Option[SimilarityKind] = Option("spearman", check_choice, SIMILARITIES)
    layers: Option[int | None] = Option(None, check_integer)
    draws: Option[int] = Option(1, check_integer)

    def measure_maps(self, maps: Maps) -> Outcome:
        """Compute the drops of the images."""
        randomised = torch.stack([self._one_draw(maps, draw) for draw in range(self.draws)])  # (draws, N, layers)
        same = similarities(maps.original, [maps.again()], self.compare)  # (N, 1)
        falls = same - randomised.mean(2).T
        error = standard_error(falls) if self.draws > 1 else None
        return Outcome(falls.mean(1), error, curves=torch.cat([same, randomised.mean(0)], 1))

    def _one_draw(self, maps: Maps, draw: int) -> Tensor:
        """Return the similarities for one draw of the weights: (N, layers)."""
        others = (maps(maps.subject.images, method) for method in self._randomised(maps, draw))
        return similarities(maps.original, others, self.compare)

    def _randomised(self, maps: Maps, draw: int) -> Iterator[Attribution]:
        """Yield the method on a copy of the model with randomised layers; each is valid until the next step."""
        subject = maps.subject
        with subject.bound(subject.images[:1]):
            names = subject.once("layers", layers_from_the_top, subject.method, subject.images[:1])
        count = min(self.layers or len(names), len(names))
        if maps.control:
            yield from [subject.method] * count
            return
        method = subject.once("copy", copied, subject)
        restore(method.model, subject.method.model)
        ends = [round(step * len(names) / count) for step in range(count + 1)]
        for begin, end in pairwise(ends):
            if self.order == "independent":
                restore(method.model, subject.method.model)
            randomise(method.model, names[begin:end], subject.seed, draw)
            yield method


class RandomLogit(MethodMetric):
    """Drop in the similarity of the map when another class is explained; higher is better.

    For a box, a region or a joint, it is another class of the same box, of the same pixels, or another joint.

    Args:
        compare: The similarity of two maps: "spearman" (rank correlation), "absolute" (of magnitudes) or "ssim".
        draws: The number of other classes, drawn at random, for the standard error.
        of: "class"; or "box" for the other detections in the image instead of other classes, in descending order of
            their probability.

    Values: (N,), the similarity of the map to a repeated computation, minus the mean similarity to the maps of other
    classes. The curve has the similarities: the first for the same class.

    Raises:
        TargetError: The explained target is not a class, or the model has no other class or found no other box.

    Source: Sixt et al., "When Explanations Lie: Why Many Modified BP Attributions Fail" (2020),
        https://arxiv.org/abs/1912.09818.
    """

    name = "random_logit"
    higher_is_better = True

    compare: Option[SimilarityKind] = Option("spearman", check_choice, SIMILARITIES)
    draws: Option[int] = Option(5, check_integer)
    of: Option[Literal["class", "box"]] = Option("class", check_choice, ("class", "box"))

    def measure_maps(self, maps: Maps) -> Outcome:
        """Compute the drops of the images."""
        others = maps.subject.once(("others", self.of, self.draws), self._others, maps.subject)
        again = [maps.again(), *(maps(maps.subject.images, target=other) for other in others)]
        curve = similarities(maps.original, again, self.compare)
        falls = curve[:, :1] - curve[:, 1:]
        return Outcome(falls.mean(1), standard_error(falls), curves=curve)

    def _others(self, subject: Subject) -> list[TargetLike]:
        """Return other targets for all images."""
        images, classes, names = subject.images, subject.explanation.target, subject.explanation.target_names
        others = subject.others(self.of)
        if all(others):
            numbers = torch.randperm(max(map(len, others)), generator=generator(subject.seed), device="cpu").tolist()
            picks = (range(len(numbers)) if self.of == "box" else numbers)[: self.draws]
            return [[questions[pick % len(questions)] for questions in others] for pick in picks]
        if self.of == "box" or None in classes:
            problem = "has no other box in the image" if self.of == "box" else "is not a class with others to compare"
            raise TargetError(f'the explained target, "{names[[*map(bool, others)].index(False)]}", {problem}')
        scores = class_scores(subject.output)
        count = Images(categories=subject.method.categories).class_count(scores.shape[1])
        if count < 2:
            raise TargetError("the model returns one number per image, so there are no other classes")
        draws = torch.rand(count, generator=generator(subject.seed), dtype=torch.float64, device="cpu")
        ranks = draws.repeat(len(images), 1)
        ranks[torch.arange(len(images), device="cpu"), torch.tensor(classes, dtype=torch.int64, device="cpu")] = 2
        lowest = ranks.argsort(1)[:, : min(self.draws, count - 1)]  # the explained class comes last
        return [column.tolist() for column in lowest.T]


def copied(subject: Subject) -> Attribution:
    """Return a copy of the method and its model, which reads the layer of the explanation."""
    model, layer = subject.method.model, subject.explanation.layer
    other = subject.shared.once(("copy", id(model)), copy.deepcopy, model)  # of all methods on the image
    method = copy.deepcopy(subject.method, {id(model): other})
    if getattr(method, "layer", layer) is None and layer in dict(method.model.named_modules()):
        vars(method)["layer"] = layer
    return method


def standard_error(samples: Tensor) -> Tensor:
    """Return the standard error of the mean of samples (N, k): (N,); 0 for one sample."""
    count = samples.shape[1]
    return samples.std(1) / count**0.5 if count > 1 else torch.zeros_like(samples[:, 0])


def layers_from_the_top(method: Attribution, x: Tensor) -> list[str]:
    """Return the names of the modules that have parameters or buffers themselves, from the last to start.

    A module that is not called, such as the output projection of `nn.MultiheadAttention`, is treated as its parent.

    Raises:
        MethodError: The model has no parameters or buffers.
    """
    model, began = method.model, list[str]()
    require_weights(model)
    with prepared_for_attribution(model), torch.no_grad(), HookManager() as hooks:
        for name, module in model.named_modules():
            hooks.around(module, lambda *_, name=name: began.append(name), lambda *_: None)
        run_model(model, x)
    starts = {name: index for index, name in reversed(list(enumerate(began)))}
    names = [name for name, module in model.named_modules() if tensors_of(module)]

    def start(name: str) -> int:
        while name not in starts and name:
            name = name.rpartition(".")[0]
        return starts.get(name, 0)

    return sorted(names, key=start, reverse=True)


def randomise(model: nn.Module, names: list[str], *seed: int) -> None:
    """Permute the values of all parameters and buffers of some modules in place, by a seed and numbers of a draw."""
    for name in names:
        for number, tensor in enumerate(tensors_of(model.get_submodule(name))):
            source = generator(*seed, *name.encode(), number)
            order = torch.randperm(tensor.numel(), generator=source, device="cpu").to(tensor.device)
            with torch.no_grad():
                tensor.copy_(tensor.flatten().index_select(0, order).view_as(tensor))


def restore(copied: nn.Module, model: nn.Module) -> None:
    """Copy the values of a model back into its copy, including buffers that are not saved."""
    with torch.no_grad():
        for tensor, value in zip(tensors_of(copied, recurse=True), tensors_of(model, recurse=True), strict=True):
            tensor.copy_(value)


def require_weights(model: nn.Module) -> None:
    """Raise MethodError if a model has no parameters or buffers, such as a quantised model."""
    if not tensors_of(model, recurse=True):
        problem = "has no parameters or buffers, so nothing can be randomised"
        raise MethodError(f"{type(model).__name__} {problem}; explain the model before it was quantised or exported")


def tensors_of(module: nn.Module, *, recurse: bool = False) -> list[Tensor]:
    """Return the parameters and buffers of a module itself, or also of its children."""
    return [*module.parameters(recurse), *module.buffers(recurse)]


SMALLEST = 1e-6
"""Relative changes are divided by at least this number."""


class RobustnessMetric(MethodMetric):
    """Base class of the metrics that add noise to the image; they share the maps of noisy images. Lower is better.

    Args:
        radius: The largest change of a value of the normalised input.
        passes: The number of noisy images, uniform within the radius.
    """

    higher_is_better = False

    radius: Option[float] = Option(0.02, check_number, above=0)
    passes: Option[int] = Option(10, check_integer, least=2)

    def noisy(self, maps: Maps) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield noisy images (N, C, H, W) and their maps (N, C, h, w). All images of a draw have the same noise."""
        x = maps.subject.images
        for number in range(self.passes):
            source = generator(maps.subject.seed, number)
            draws = torch.rand(x.shape[1:], generator=source, dtype=torch.float64, device="cpu")
            images = x + (self.radius * (2 * draws - 1)).to(x)
            yield images, maps.once((self.radius, number), maps, images)

    def changes(self, maps: Maps) -> Tensor:
        """Return the change of each map, relative to the map: (N, passes)."""
        size = norm(maps.original)
        return torch.stack([relative(norm(values - maps.original), size) for _, values in self.noisy(maps)], 1)


class MaxSensitivity(RobustnessMetric):
    """Largest relative change of the map under noise; lower is better.

    Values: (N,), the norm of the change divided by the norm of the map: a lower bound of the largest ratio within the
    radius.

    Source: Yeh et al., "On the (In)fidelity and Sensitivity of Explanations" (2019), https://arxiv.org/abs/1901.09392.
    """

    name = "max_sensitivity"

    def measure_maps(self, maps: Maps) -> Outcome:
        """Compute the largest changes."""
        return Outcome(self.changes(maps).amax(1))


class AvgSensitivity(RobustnessMetric):
    """Mean relative change of the map under noise; lower is better.

    Values: (N,), the norm of the change divided by the norm of the map.

    Source: Yeh et al., "On the (In)fidelity and Sensitivity of Explanations" (2019), https://arxiv.org/abs/1901.09392.
    """

    name = "avg_sensitivity"

    def measure_maps(self, maps: Maps) -> Outcome:
        """Compute the mean changes."""
        changes = self.changes(maps)
        return Outcome(changes.mean(1), standard_error(changes))


class LocalLipschitz(RobustnessMetric):
    """Largest ratio of the change of the map to the change of the image; lower is better.

    Values: (N,), a ratio of Euclidean norms, in units of the map per unit of the normalised input: a lower bound of the
    Lipschitz constant within the radius.

    Source: Alvarez-Melis and Jaakkola, "On the Robustness of Interpretability Methods" (2018),
        https://arxiv.org/abs/1806.08049.
    """

    name = "local_lipschitz"

    def measure_maps(self, maps: Maps) -> Outcome:
        """Compute the largest ratios."""
        x = maps.subject.images
        ratios = [norm(values - maps.original) / norm(images - x) for images, values in self.noisy(maps)]
        return Outcome(torch.stack(ratios, 1).amax(1))


class RelativeStability(RobustnessMetric):
    """Base class of the metrics that divide the relative change of the map by a change in the model; lower is better.

    Only noisy images of the same predicted class are used; the value is NaN if there is none.
    """

    @abstractmethod
    def model_change(self, subject: Subject, images: Tensor, rises: Tensor) -> Tensor:
        """Return the change in the model (N,) from the images to noisy images, whose scores rise by (N, classes)."""

    def measure_maps(self, maps: Maps) -> Outcome:
        """Compute the largest ratios."""
        ratios = []
        for number, (images, values) in enumerate(self.noisy(maps)):
            change = norm(_elementwise_relative(values - maps.original, maps.original))
            below = maps.subject.once((self, number), self._model_change, maps.subject, images)
            ratios.append(change / below)
        largest = torch.stack(ratios, 1).nan_to_num(-1.0).amax(1)
        return Outcome(torch.where(largest < 0, torch.nan, largest))

    def _model_change(self, subject: Subject, images: Tensor) -> Tensor:
        """Return the change in the model; NaN if the predicted class changes."""
        before, after = map(class_scores, (subject.output, subject.output_for(images)))
        is_same = before.argmax(1) == after.argmax(1)
        return torch.where(is_same, self.model_change(subject, images, after - before).clamp(min=SMALLEST), torch.nan)


class RelativeInputStability(RelativeStability):
    """Largest relative change of the map over the relative change of the image; lower is better.

    Values: (N,), a ratio of the norms of two changes; each value changes relative to its unchanged value. See
    `RelativeStability`.

    Source: Agarwal et al., "Rethinking Stability for Attribution-based Explanations" (2022),
        https://arxiv.org/abs/2203.06877.
    """

    name = "relative_input_stability"

    def model_change(self, subject: Subject, images: Tensor, rises: Tensor) -> Tensor:
        """Return the relative change of the images."""
        return norm(_elementwise_relative(images - subject.images, subject.images))


class RelativeOutputStability(RelativeStability):
    """Largest relative change of the map over the change of the model's scores; lower is better.

    Values: (N,), per unit of the scores. See `RelativeStability`.

    Source: Agarwal et al., "Rethinking Stability for Attribution-based Explanations" (2022),
        https://arxiv.org/abs/2203.06877.
    """

    name = "relative_output_stability"

    def model_change(self, subject: Subject, images: Tensor, rises: Tensor) -> Tensor:
        """Return the change of all scores."""
        return norm(rises)


class RelativeRepresentationStability(RelativeStability):
    """Largest relative change of the map over the relative change of a layer's output; lower is better.

    Args:
        layer: The name of the layer; by default the layer that CAMs read.

    Values: (N,), a ratio of the norms of two changes; each value changes relative to its unchanged value. See
    `RelativeStability`.

    Source: Agarwal et al., "Rethinking Stability for Attribution-based Explanations" (2022),
        https://arxiv.org/abs/2203.06877.
    """

    name = "relative_representation_stability"

    layer: Option[str | None] = Option(None)

    def model_change(self, subject: Subject, images: Tensor, rises: Tensor) -> Tensor:
        """Return the relative change of the layer's output."""
        model = subject.method.model
        with prepared_for_attribution(model), subject.bound(images):
            name, _ = find(model, self.layer or default_layer(model, subject.images[:1]))
            needs = Needs("none", layers=(name,))
            forwards = [SharedForward(model, batch, needs) for batch in (subject.images, images)]
        before, after = (forward.layers[name] for forward in forwards)
        return norm(_elementwise_relative(after - before, before))


def norm(tensor: Tensor) -> Tensor:
    """Return the Euclidean norm of each image's values (N,)."""
    return tensor.flatten(1).square().sum(1).sqrt()


def relative(change: Tensor, size: Tensor) -> Tensor:
    """Return a change (N,) as a fraction of a size; 0 for no change, NaN if there is a change and the size is 0."""
    return torch.where(change > 0, torch.where(size > 0, change / size, torch.nan), 0.0)


def _elementwise_relative(change: Tensor, values: Tensor) -> Tensor:
    """Return each change as a fraction of its value, or of `SMALLEST` for smaller values."""
    return change / values.abs().clamp(min=SMALLEST)


class ADCC(MethodMetric):
    """Harmonic mean of coherency, low complexity and low average drop; higher is better.

    Values: (N,), 0 to 1: the harmonic mean of (r + 1) / 2, 1 minus the mean of the map scaled to 0..1, and 1 minus
    `AverageDrop`. r is Pearson's correlation of the map with the map of the image multiplied by it. 0 if one of the
    three is 0.

    Source: Poppi et al., "Revisiting The Evaluation of Class Activation Mapping for Explainability" (2021),
        https://arxiv.org/abs/2104.10252.
    """

    name = "adcc"
    higher_is_better = True

    def measure_maps(self, maps: Maps) -> Outcome:
        """Compute the means of the images."""
        subject = maps.subject
        size = subject.explanation.input_size
        original = resized(maps.original.sum(1), size)
        scaled = scaled_to_one(original)
        masked = subject.images * scaled[:, None]
        again = resized(maps(masked).sum(1), size)
        is_equal = (original == again).flatten(1).all(1)
        coherency = torch.where(is_equal, 1.0, (correlation(original.flatten(1), again.flatten(1)) + 1) / 2)
        before, after = (subject.scores_of(images).cpu().double() for images in (subject.images, masked))
        drop = ((before - after) / before.abs().clamp(min=1e-30)).clamp(0, 1)
        parts = torch.stack([coherency.cpu(), 1 - scaled.flatten(1).mean(1).cpu().double(), 1 - drop])
        return Outcome(torch.where((parts > 0).all(0), 3 / (1 / parts.clamp(min=1e-30)).sum(0), 0.0))


UNTIL = 0.25
"""The fraction of the pixels that are deleted or inserted: a map marks about that many."""

CURVES = (Deletion(steps=2, until=UNTIL), Insertion(steps=2, until=UNTIL))
"""The curves of the statistic. More steps gave little on the photos for choosing, and take twice the time."""

OBJECTS = 4
"""The number of classes, boxes or words: of their 24 assignments, the right one has a p-value of 1/24."""

TRIES = 3
"""The largest number of permuted networks for each draw. If too few of them have a map, the missing maps are ties."""

KEPT = 2**25
"""The largest size of the weights of a network, in bytes, whose permutations all methods on an image share."""


class ExactTest(Metric):
    """Base class of tests by ranks. The p-value is at most a with probability a, whatever the images and methods.

    Their null hypothesis takes the place of controls. Higher values are better.
    """

    higher_is_better = True

    @abstractmethod
    def test(self, subject: Subject) -> tuple[float, float, float]:
        """Return the value of one image, its standard error, and the p-value."""

    def outcome(self, subject: Subject) -> Outcome:
        """Compute the values of all images, (1, N)."""
        with torch.no_grad():
            rows = [self.test(subject.single(index)) for index in range(len(subject.explanation))]
        values, errors, p = torch.tensor(rows, dtype=torch.float64, device="cpu").T[:, None]
        return Outcome(values, errors, p, controls=())


def effects(subject: Subject, maps: Tensor) -> Tensor:
    """Return how well maps (M, H, W) order the pixels of the image of a subject: (M,), higher is better.

    It is the mean root of the score while the first quarter of the pixels is inserted, minus the same while they are
    deleted. The root makes the variances of small and large probabilities similar; a score below 0 becomes minus the
    root of its magnitude. Each map is scored alone, not relative to the others: else their ranks would not be exact if
    the draws stop early.
    """
    outcomes = CURVES[0].together(CURVES, subject.of_maps(maps[:, None]))
    curves = (cast("Tensor", outcomes[curve].curves)[:, 0] for curve in CURVES)  # (M, steps)
    deletion, insertion = (area(curve.sign() * curve.abs().sqrt()) for curve in curves)
    return insertion - deletion


def slack(value: float) -> float:
    """Return the difference up to which another value is tied with a value."""
    return RELATIVE * abs(value) + ABSOLUTE


def reached(own: float, others: Sequence[float]) -> list[int]:
    """Return the numbers, counted from 1, of the scores that are better than the score of the map, or tied with it."""
    return [number for number, score in enumerate(others, 1) if not score < own - slack(own)]


def is_worst(own: float, others: Sequence[float]) -> bool:
    """Return whether all other scores are better than the score of the map."""
    return all(score > own + slack(own) for score in others)


class WeightsTest(ExactTest):
    """Rank of a map among maps of the same method on networks with permuted weights; higher is better.

    If the learned weights do not matter, the map and the other maps are exchangeable, whatever their structure: all are
    scored by the unchanged model, each alone. So each rank is equally likely. Ties count against the map, so a method
    that ignores the weights has a p-value of 1. So does a constant map. A network whose map is constant is replaced by
    another: among maps that are not constant, each rank is still equally likely.

    Args:
        draws: The number of networks: 19 for a level of 5 %, 99 for 1 %.
        stop: The number of better or tied maps after which no further map is drawn; None to draw all. The p-value stays
            exact; it is then `stop` divided by the number of draws.
        seconds: The time after which no further map is drawn. With fewer draws, the p-value is larger, but still exact.

    Values: (N,), the fraction of the networks whose map is worse: 1 is the best value, and 0.5 is expected by chance.
    The weights are permuted within each parameter. Batch norms then use the statistics of the image, without which
    activations vanish or explode.

    Raises:
        MethodError: The model has no parameters or buffers.

    Source: Besag and Clifford, "Sequential Monte Carlo p-values" (1991), https://doi.org/10.1093/biomet/78.2.301.
    """

    name = "weights"

    draws: Option[int] = Option(19, check_integer)
    stop: Option[int | None] = Option(None, check_integer)
    seconds: Option[float | None] = Option(None, check_number, above=0)

    def test(self, subject: Subject) -> tuple[float, float, float]:
        """Return the fraction of worse maps, its standard error, and the p-value."""
        own, others, _ = self.scores(subject)
        numbers = reached(own, others)
        worse, p = 1 - len(numbers) / len(others), (len(numbers) + 1) / (len(others) + 1)
        if self.stop is not None and len(numbers) >= self.stop:
            p = self.stop / numbers[self.stop - 1]
        return worse, math.sqrt(worse * (1 - worse) / len(others)), p

    def scores(self, subject: Subject) -> tuple[float, list[float], int]:
        """Return the score of the map of one image, of the maps of permuted networks, and how many had no map."""
        return subject.once(self, self._scores, subject)

    def _scores(self, subject: Subject) -> tuple[float, list[float], int]:
        require_weights(subject.method.model)
        began, map_, others = time.perf_counter(), full_size(subject.explanation), list[float]()
        own, tries = float(effects(subject, map_)), 0 if _is_constant(map_) else TRIES * self.draws
        for draw in range(tries):
            if not _is_constant(map_ := untrained_map(subject, draw)):
                others.append(float(effects(subject, map_)))
            is_late = self.seconds is not None and time.perf_counter() - began > self.seconds
            # A map that is worse than all others also has a verdict: continue drawing until it is certain.
            is_decided = self.stop is not None and len(reached(own, others)) >= self.stop and not is_worst(own, others)
            if len(others) == self.draws or is_decided or is_late:
                return own, others or [own], draw + 1 - len(others)
        return own, others + (self.draws - len(others)) * [own], tries - len(others)  # networks without a map are tied


def _is_constant(map_: Tensor) -> bool:
    return bool(map_.amax() == map_.amin())


def untrained_map(subject: Subject, draw: int) -> Tensor:
    """Return the map of the image of a subject by its method on a network with permuted weights (1, H, W).

    It is zero if the network has no map, because its output is not finite or its target does not exist.
    """
    return subject.once(("map", draw), _untrained_map, subject, draw)


def _untrained_map(subject: Subject, draw: int) -> Tensor:
    method = untrained(subject, draw)
    try:
        with bound(warns=False):  # do not warn about maps that are zero
            return full_size(method.attribute(subject.inputs_for(method, subject.images), subject.explained_target))
    except SaliencyError:
        return torch.zeros_like(subject.images[:, 0])


def untrained(subject: Subject, draw: int) -> Attribution:
    """Return the method on a copy of its model with permuted weights, until the next call.

    Each image has different permutations, so that the ranks of several images are independent, given the model. The
    permuted weights are kept for other methods on the image, unless they are larger than `KEPT`.
    """
    method, model = subject.once("copy", copied, subject), subject.method.model
    numbers = subject.seed, draw, int.from_bytes(digest(subject.images)[:4])
    weights = tensors_of(method.model, recurse=True)
    is_kept = sum(weight.nbytes for weight in weights) <= KEPT

    def permuted() -> list[Tensor]:
        restore(method.model, model)
        randomise(method.model, [name for name, _ in model.named_modules()], *numbers)
        with subject.bound(subject.images):
            normalise(method.model, subject.images)
        return [weight.clone() for weight in weights] if is_kept else weights

    with torch.no_grad():
        results = subject.shared if is_kept else SharedResults()
        values = results.once(("permuted", id(model), *numbers), permuted)
        for weight, value in zip(weights, values, strict=True):
            weight.copy_(value)
    return method


def normalise(model: nn.Module, x: Tensor) -> None:
    """Set the running statistics of batch norms to those of the activations for images x."""
    norms = [module for module in model.modules() if getattr(module, "running_mean", None) is not None]

    def replace(norm: nn.Module, args: tuple[Tensor, ...], kwargs: object) -> None:
        values = args[0].transpose(0, 1).flatten(1)  # (C, n)
        cast("Tensor", norm.running_mean).copy_(values.mean(1))
        cast("Tensor", norm.running_var).copy_(values.var(1, correction=0))

    with prepared_for_attribution(model), torch.no_grad(), HookManager() as hooks:
        for norm in norms:
            hooks.around(norm, partial(replace, norm), lambda *_: None)
        if norms:
            run_model(model, x)


class ClassTest(ExactTest):
    """Fraction of a map of a class that lies on the image of the class, in a mosaic of four images; higher is better.

    Four images of different classes fill the quarters of a mosaic, and the method explains the class of each image. If
    the class does not matter, the four maps are exchangeable, so each of the 24 assignments of maps to images is
    equally likely. The p-value is the fraction of the assignments in which the maps lie on their images at least as
    much.

    For a box, a region, a joint or words of an answer, other boxes, classes, joints or words of the same image take the
    place of classes. The relevance in each box is compared, or the scores of each region, joint or word while the
    pixels of each map are inserted and deleted.

    Values: (N,), the mean fraction of the positive relevance, 0.25 by chance. For boxes, regions, joints and words, the
    fraction of the maps of others that are worse for each, 0.5 by chance.

    Raises:
        MethodError: There are fewer than three images of other classes, or than three other boxes, regions, joints or
            words.

    Source: The mosaic is from Arias-Duart et al., "Focus! Rating XAI Methods and Finding Biases" (2022),
        https://arxiv.org/abs/2109.15035; the test is ours.
    """

    name = "class"

    def test(self, subject: Subject) -> tuple[float, float, float]:
        """Return the mean fraction, its standard error over the four maps, and the p-value."""
        is_class = None not in subject.explanation.target and not subject.fixed_target
        table = mosaic_shares(subject) if is_class else object_effects(subject)  # (4, 4) of a map, on an image
        orders = torch.tensor(list(permutations(range(OBJECTS))), device="cpu")
        sums = table[torch.arange(OBJECTS, device="cpu"), orders].sum(1)
        p = float((sums >= sums[0] - slack(float(sums[0]))).double().mean())
        fractions = table.diagonal() if is_class else (table < table.diagonal()).double().sum(0) / (OBJECTS - 1)
        return float(fractions.mean()), float(fractions.std()) / math.sqrt(OBJECTS), p


def mosaic_shares(subject: Subject) -> Tensor:
    """Return the fraction of the positive relevance of each class on each image of a mosaic (classes, images)."""
    method, label = subject.method, subject.explanation.target[0]
    others, labels = subject.shared.once(("others", id(method.model)), _other_images, subject)
    chosen = {other: number for number, other in reversed([*enumerate(labels)]) if other != label}
    numbers = sorted(chosen.values())[: OBJECTS - 1]
    if len(numbers) < OBJECTS - 1:
        found = f"the model finds {len(numbers)}"
        raise MethodError(f"the test needs images of three other classes, and {found}: pass others=[...]")
    height, width = subject.images.shape[2:]
    half = (height + 1) // 2, (width + 1) // 2
    first, second, third, fourth = (
        interpolate(image.float(), half, mode="bilinear", antialias=True).to(image)  # not defined for halves
        for image in (subject.images, *(others[number] for number in numbers))
    )
    mosaic = torch.cat([torch.cat([first, second], 3), torch.cat([third, fourth], 3)], 2)[..., :height, :width]
    explanations = method.attribute_classes(subject.inputs_for(method, mosaic), [label, *(labels[n] for n in numbers)])
    maps = torch.cat([full_size(explanation) for explanation in explanations]).cpu().double().clamp(min=0)
    even = pad(maps, (0, width % 2, 0, height % 2))
    quarters = even.view(OBJECTS, 2, half[0], 2, half[1]).sum((2, 4)).flatten(1)
    totals = quarters.sum(1, keepdim=True)
    return torch.where(totals > 0, quarters / totals, 1 / OBJECTS)


def _other_images(subject: Subject) -> tuple[list[Tensor], list[int]]:
    """Return the images of other classes as the model's inputs (1, C, H, W), which may differ in size; and classes."""
    others, method = subject.other_images, subject.method
    if others is None:
        if class_scores(subject.output).shape[1] != 1000 or method.preprocess is None:
            raise MethodError("the test needs images of three other classes: pass others=[...]")
        others = sorted(str(photo) for photo in files(__package__).joinpath("photos").iterdir())
    images = [row[None] for image in split_images(others) for row in method.read(image).inputs]
    scores = torch.cat([class_scores(subject.output_for(image)) for image in images])
    return images, scores.argmax(1).tolist()


def object_effects(subject: Subject) -> Tensor:
    """Return how well the map of each of four boxes, regions, joints or words fits each of them (maps, objects)."""
    method, explained = subject.method, subject.explained_target
    inputs = subject.inputs_for(method, subject.images)
    explained = explained[0] if isinstance(explained, list | tuple) else explained
    if isinstance(inputs, Answer):
        rest = [span for word, span in inputs.words if word not in subject.explanation.target_names[0]]
        questions: list[Any] = [words(at=span) for span in sorted(rest, key=lambda span: span.start - span.stop)]
    else:
        questions = [*subject.others("box")[0]] or [*subject.others()[0]]
    targets = [explained, *questions[: OBJECTS - 1]]
    if len(targets) < OBJECTS:
        found = f"and the image has {len(targets) - 1}"
        raise MethodError(f"the test needs three other boxes, regions, joints or words, {found}")
    explanations = [subject.explanation, *method.attribute_classes(inputs, targets[1:])]
    maps = torch.cat([full_size(explanation) for explanation in explanations])
    boxes = [getattr(target, "box", None) for target in targets]
    if None not in boxes:
        positive = maps.cpu().double().clamp(min=0)
        fractions = positive / positive.sum((1, 2), keepdim=True).clamp(min=1e-30)
        corners = [[max(0, round(edge)) for edge in cast("Box", box)] for box in boxes]
        return torch.stack([fractions[:, top:end, left:right].sum((1, 2)) for left, top, right, end in corners], 1)
    pairs = zip(explanations, targets, strict=True)
    return torch.stack([effects(subject.of(each, target=target), maps) for each, target in pairs], 1)
