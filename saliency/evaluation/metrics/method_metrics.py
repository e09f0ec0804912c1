"""Metrics that call the method again: on another model, for another target, or on other images.

They are metrics of randomisation, of robustness, and a mean that combines three metrics.

`MPRT` and `RandomLogit` measure a drop in similarity: similarity of the map to a repeated computation, minus similarity
to the map after the change. A map that ignores the model has a value of 0, whether it is constant or noise.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ...attribution.base import Attribution
from ...attribution.estimates import generator
from ...attribution.forward import Needs, SharedForward
from ...attribution.heatmap import resized
from ...attribution.options import Option
from ...errors import MethodError, TargetError
from ...hooks.manager import HookManager
from ...model.call import prepared_for_attribution, run_model
from ...model.layers import default_layer, find
from ...targets.classes import TargetLike, class_scores
from ...targets.question import Images
from ...validation import check_choice, check_integer, check_number
from .base import Metric, Outcome, SharedResults, Subject, edges, stacked
from .faithfulness import correlation, row_ranks, scaled_to_one
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
    maps = values.sum(1).double()
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
        before, after = (subject.scores_of(images).double() for images in (subject.images, masked))
        drop = ((before - after) / before.abs().clamp(min=1e-30)).clamp(0, 1)
        parts = torch.stack([coherency, 1 - scaled.flatten(1).mean(1).double(), 1 - drop])
        return Outcome(torch.where((parts > 0).all(0), 3 / (1 / parts.clamp(min=1e-30)).sum(0), 0.0))
