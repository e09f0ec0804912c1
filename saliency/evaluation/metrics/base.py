"""The interface of all metrics, their registry, and the measurement of several metrics at once."""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, cast, get_args

import torch
from torch import Tensor, nn

from ...aliases import option_hint
from ...attribution.base import Attribution, as_setting
from ...attribution.estimates import generator
from ...attribution.explanation import Explanation, Setting, reduced_maps, require_explanation, resized
from ...attribution.options import Chunk, HasOptions, declared_options
from ...attribution.questions import Questions
from ...calls import answered_on_class
from ...errors import MethodError, errors_as
from ...io.axes import along_axes, gaussian
from ...io.inputs import Batch, ImagesLike
from ...methods.gradient import VanillaGradient
from ...model.answer import Answer
from ...model.call import arguments_of, bound, prepared_for_attribution, reference_tensor, run_model
from ...model.inputs import InputBatch
from ...targets.boxes import BoxTarget
from ...targets.classes import PROBABILITY_OF, TargetLike, of_image, probability
from ...targets.language import parse_target
from ...targets.question import Question
from ...targets.regions import Keypoint, Region
from ...targets.similarity import ITSELF, SelfSimilarity, similarity
from ...targets.words import Words
from ...validation import Registry, check_choice, check_integer, check_mask, described

ScoreKind = Literal["probability", "explained"]
_T = TypeVar("_T")

RANDOM_CONTROLS = 19
"""The number of random controls."""

CONTROLS = ("constant", "centre", "random")
"""The controls by default."""

IMAGE_CONTROLS = ("edges", "smoothed edges", "colour contrast")
"""The controls that are computed from the image, and need the model and the images."""

SMOOTHED = 4 / 224
"""The standard deviation of the Gaussian that smooths the edges, as a fraction of the shorter side."""

CENTRE_WIDTH = 0.25
"""The standard deviation of the Gaussian control, as a fraction of each edge."""

RELATIVE, ABSOLUTE = 1e-6, 1e-12
"""The tolerances of `isclose` at which values are treated as equal."""

METRICS: Registry[type[Metric]] = Registry("metric")
"""All metrics by name. A class with a `name` is registered when it is defined."""


class Control(NamedTuple):
    """Values of a map that ignores the prediction, or of several draws of such a map."""

    values: Tensor  # (N,) the mean over the draws
    low: Tensor  # (N,) the smallest draw
    high: Tensor  # (N,) the largest draw


class Outcome(NamedTuple):
    """Values of one metric for the map and each control: M rows, of which the first is the map."""

    values: Tensor  # (M, ...)
    error: Tensor | None = None  # (M, ...) standard error of each value
    p: Tensor | None = None  # (M, ...) p-value of each value, of exact tests
    curves: Tensor | None = None  # (M, ..., K)
    at: Tensor | None = None  # (K,) where the curve was measured
    passes: int = 0  # of each image: new forwards, or calls of the method
    controls: tuple[str, ...] | None = None  # names of the rows after the first, if they are not the subject's controls


def stacked(outcomes: Sequence[Outcome], dim: int) -> Outcome:
    """Stack outcomes: of each image, at dimension 1, or of the map and each control, at dimension 0.

    Raises MethodError if the curves of the images have different lengths.
    """
    if len({getattr(outcome.curves, "shape", None) for outcome in outcomes}) > 1:
        raise MethodError("the images have different numbers of segments; measure them one by one")
    names = ("values", "error", "p", "curves")
    parts = {name: [getattr(outcome, name) for outcome in outcomes] for name in names}
    stacks: Any = {name: torch.stack(part, dim).cpu().double() for name, part in parts.items() if part[0] is not None}
    return outcomes[0]._replace(**stacks)


@dataclass(frozen=True, slots=True, eq=False)
class Measurement:
    """Values of one metric for the images of an explanation.

    Attributes:
        metric: The metric's name in the registry.
        settings: The metric's options, with the score and the seed.
        values: (N,) one value per image, NaN where the metric is not defined.
        error: (N,) the standard error of each value, if the metric samples.
        controls: The values of maps that ignore the prediction: "constant", "centre", a Gaussian at the centre of the
            image, and "random", the map itself at several random positions, or the controls that were selected. For
            metrics that call the method: "constant", "random", new noise at each call, and "edges" of the image.
        higher_is_better: None if neither is better.
        p: (N,) the p-value of each image, of exact tests.
        curve: (N, K) the scores on which the value is based, if the metric has a curve.
        control_curves: (N, K) the same for each control.
        at: (K,) the positions of the curve's points, such as the fractions of the pixels that were replaced.
        passes: The new forwards of each image, or calls of the method. Passes that an earlier metric or method of the
            same call has run are not counted.
    """

    metric: str
    settings: Mapping[str, Setting]
    values: Tensor
    error: Tensor | None
    controls: Mapping[str, Control]
    higher_is_better: bool | None
    p: Tensor | None = None
    curve: Tensor | None = None
    control_curves: Mapping[str, Tensor] | None = None
    at: Tensor | None = None
    passes: int = 0

    @property
    def beats_controls(self) -> Tensor:
        """(N,) of bool: whether the value is better than every control, and every draw of a control."""
        if self.higher_is_better is None or not self.controls:
            return torch.zeros_like(self.values, dtype=torch.bool)
        best = [control.high if self.higher_is_better else -control.low for control in self.controls.values()]
        values, limit = self.values if self.higher_is_better else -self.values, torch.stack(best).amax(0)
        return (values > limit) & ~torch.isclose(values, limit, rtol=RELATIVE, atol=ABSOLUTE)

    def __repr__(self) -> str:
        """Return one line: the mean over the images, and the means of the controls."""
        controls = ", ".join(f"{name} {_number(control.values)}" for name, control in self.controls.items())
        return f"<Measurement of {self.metric}: {_number(self.values)}{controls and '; controls: '}{controls}>"


def _number(values: Tensor) -> str:
    return f"{float(values.double().mean()):.3g}"


class SharedResults:
    """Results that metrics share, each of which is computed once."""

    def __init__(self) -> None:
        self._results: dict[Hashable, Any] = {}

    def once(self, key: Hashable, compute: Callable[..., _T], *arguments: Any) -> _T:
        """Return `compute(*arguments)`, which runs once for each key."""
        if key not in self._results:
            self._results[key] = compute(*arguments)
        result: _T = self._results[key]
        return result


class Subject(SharedResults):
    """An explanation to measure and its controls, with the images, the model and the method.

    Args:
        explanation: The explanation of N images.
        method: The method of the explanation, for metrics that call it.
        model: The model, if there is no method.
        inputs: The images, for explanations of tensors, which do not keep them; or the answer, for words of an answer;
            or `result.hold(name)`, for an image of a model with several inputs.
        target: The target, if it is not a class.
        masks: (N, H, W), not 0 in the pixels of the object, for metrics of localisation.
        reference: Another explanation of the same images, for metrics of agreement.
        score: The score that perturbed images get.
        seed: The seed of all draws.
        controls: The maps that ignore the prediction and are measured too, which takes most of the passes: names of
            `CONTROLS` and of `IMAGE_CONTROLS`, which need the model and the images; or False for none. Metrics that
            call the method always use their own controls.
        random_controls: The number of random controls.
        shared: The scores of perturbed images that other explanations in the same call share with this one.
        others: At least three images of other classes, for the metric "class". By default, photos of the package, if
            the model has as many classes as ImageNet.
    """

    def __init__(
        self,
        explanation: Explanation,
        *,
        method: Attribution | None = None,
        model: nn.Module | None = None,
        inputs: ImagesLike | Batch | None = None,
        target: TargetLike = None,
        masks: Any = None,
        reference: Explanation | None = None,
        score: ScoreKind = "probability",
        seed: int = 0,
        controls: bool | str | Sequence[str] = True,
        random_controls: int = RANDOM_CONTROLS,
        shared: SharedResults | None = None,
        others: ImagesLike | None = None,
    ) -> None:
        super().__init__()
        require_explanation(explanation, "a metric")
        if explanation.values.dim() > 4:
            raise MethodError(
                "metrics and trust cards are defined for images; this explanation is of a volume or video"
            )
        reduced_maps(explanation, None)  # raises for NaN and infinity
        network = getattr(method, "model", model)
        like = reference_tensor(network) if isinstance(network, nn.Module) else None
        self.explanation = explanation if like is None else explanation.to(like.device)  # a loaded one is on the CPU
        self.seed = check_integer("seed", seed, least=None)
        names = CONTROLS if controls is True else (controls,) if isinstance(controls, str) else controls or ()
        self.controls = [check_choice("controls", name, (*CONTROLS, *IMAGE_CONTROLS)) for name in names]
        self.random_controls = check_integer("random_controls", random_controls, least=0)
        self.shared = shared or SharedResults()
        self.score = check_choice("score", score, get_args(ScoreKind))
        self._method, self._model, self._inputs, self.other_images = method, model, inputs, others
        if method is not None and isinstance(inputs, InputBatch):
            self._method = method.of_input(inputs.names[0])
        self._target: TargetLike = parse_target(target, getattr(method or model, "categories", None))
        count = len(explanation)
        self._targets = [of_image(self._target, n, count, top) for n, top in enumerate(explanation.target)]
        asked = [getattr(entry, "target", entry) for entry in self._targets]
        self._are_located = [isinstance(entry, BoxTarget | Region | Keypoint) for entry in asked]
        self._is_located = any(self._are_located)
        self._masks, self._reference = masks, reference

    @cached_property
    def maps(self) -> Tensor:
        """The map and the controls at the size of the model's input (M, N, H, W)."""
        return self.controlled(reduced_maps(self.explanation, None))

    def controlled(self, cells: Tensor, selection: slice = slice(None)) -> Tensor:
        """Return maps (N, h, w) of some images, and their controls, in the size of the model's input: (M, N, H, W)."""
        images = self.images[selection] if {*IMAGE_CONTROLS} & {*self.controls} else None
        size = self.explanation.input_size
        rows = [cells, *control_maps(cells, self.seed, self.random_controls, self.controls, images, size)]
        return torch.stack([resized_within(row, size) for row in rows])

    def of_maps(self, maps: Tensor) -> Subject:
        """Return this subject with other maps (M, N, H, W) instead of the map and its controls."""
        output = self.output  # once for all copies
        subject = copy.copy(self)
        subject.maps, subject.output = maps, output
        return subject

    def of(self, explanation: Explanation, **changed: Any) -> Subject:
        """Return the subject of another explanation of the same images, without controls, and with other arguments."""
        images: Any = {"inputs": self.inputs_for(self.reader, self.images), "target": self._target}
        network: Any = {"method": self._method, "model": self._model, "score": self.score, "others": self.other_images}
        context = {"seed": self.seed, "shared": self.shared, "controls": False, **images, **network, **changed}
        return Subject(explanation, **context)

    def single(self, index: int) -> Subject:
        """Return the subject of one image, without controls."""
        if len(self.explanation) == 1:
            return self
        target = self.explained_target
        target = target[index] if isinstance(target, list | tuple) else target
        inputs: Any = self._inputs
        if isinstance(inputs, InputBatch):
            inputs = inputs.source.only(index).batch(*inputs.names, as_channels=True)
        else:
            inputs = self.inputs_for(self.method, self.images[index : index + 1])
        return self.of(self.explanation[index], inputs=inputs, target=target)

    def scores_of(self, images: Tensor) -> Tensor:
        """Return the scores of other images (N, C, H, W) for the explained targets: (N,)."""
        reader = self.reader
        scored = self.scored_target
        with reader.call(_batch(images), [scored]), torch.no_grad(), self.bound(images):
            target = Questions(scored, reader.images(images))
            if isinstance(target.target, SelfSimilarity):  # the similarity to the images of the explanation
                target(self.output)
            return target(run_model(reader.model, images))

    def inputs_for(self, method: Attribution, images: Tensor) -> Tensor | Batch:
        """Return images (N, C, H, W) as inputs of a method, with the words of an answer, or the other inputs."""
        if not isinstance(self._inputs, Batch):
            return images
        others: Any = {"model": method.model} if isinstance(self._inputs, Answer) else {}
        return replace(self._inputs, inputs=images, **others)

    def bound(self, images: Tensor) -> AbstractContextManager[None]:
        """Bind the words of an answer, or the other inputs, in a block that runs the model on images.

        Raises:
            MethodError: The answer is about several images.
        """
        inputs = self.inputs_for(self.reader, images)
        if isinstance(inputs, Answer) and len(images) > 1:
            raise MethodError("this metric measures answers about one image; deletion and insertion take several")
        return bound(**arguments_of((), inputs)) if isinstance(inputs, Batch) else nullcontext()

    @property
    def method(self) -> Attribution:
        """The method of the explanation. Raises MethodError if it was not given."""
        if not isinstance(self._method, Attribution):
            raise MethodError("this metric calls the method again: pass it as method=..., such as GradCAM(model)")
        return self._method

    @property
    def reader(self) -> Attribution:
        """A method that reads images for the model: by default, the method of the explanation."""
        if self._method is None and self._model is None:
            raise MethodError("this metric runs the model: pass method=... or model=...")
        return self.method if self._model is None else VanillaGradient(self._model)

    @cached_property
    def images(self) -> Tensor:
        """The images as the model's input (N, C, H, W). Raises MethodError if they were not given, or are tiled."""
        if self.explanation.tile_scores is not None:
            raise MethodError("metrics that run the model measure one input; this explanation is of an image in tiles")
        frames = [frame for frame in self.explanation.frames if frame is not None]
        if self._inputs is None and (len(frames) < len(self.explanation) or isinstance(self._target, Words)):
            raise MethodError("the explanation of a tensor, or of an answer, does not keep it: pass it as inputs=...")
        inputs = [frame.image for frame in frames] if self._inputs is None else self._inputs
        images = self.reader.read(inputs).inputs
        if (len(images), *images.shape[2:]) != (len(self.explanation), *self.explanation.input_size):
            expected = f"{len(self.explanation)} images of {self.explanation.input_size} pixels"
            raise MethodError(f"the inputs have shape {tuple(images.shape)}; the explanation is of {expected}")
        return images

    @property
    def explained_target(self) -> TargetLike:
        """The target of the explanation.

        Raises:
            MethodError: It was not given, and is neither a class, its probability nor `similarity()`.
        """
        if self.fixed_target is not None or self._target is not None:
            is_for_all = all(entry is self._target for entry in self._targets)
            return self.fixed_target or (self._target if is_for_all else self._targets)
        classes, names = list(self.explanation.target), self.explanation.target_names
        if names[0] == ITSELF:
            return similarity()
        for cls, name, is_contrast in zip(classes, names, self.explanation.contrasts, strict=True):
            if cls is None or is_contrast:
                raise MethodError(f'the explained target, "{name}", is not a class: pass it again as target=...')
        named: Any = zip(classes, names, strict=True)
        return [probability(cls) if name.startswith(PROBABILITY_OF) else cls for cls, name in named]

    @cached_property
    def fixed_target(self) -> list[Any] | None:
        """The boxes, regions or joints located in the images, for changed images and models; None for other targets."""
        if not self._is_located:
            return None
        rows = zip(self._are_located, self._located[0].asked, self._targets, strict=True)
        return [question if is_located else target for is_located, question, target in rows]

    @cached_property
    def _located(self) -> tuple[Questions, Any]:
        """The questions about the explained images at their positions, and the output of which they were asked."""
        reader = self.reader
        with reader.call(_batch(self.images), [self._target]), torch.no_grad():
            asked = Questions(self._target, reader.images(self.images, self.explanation.frames))
            asked(output := run_model(reader.model, self.images))
        return asked, output

    @cached_property
    def output(self) -> Any:
        """The output of the model for the images, as the target reads it."""
        return self._located[1] if self._is_located else self.output_for(self.images)

    def output_for(self, images: Tensor) -> Any:
        """Return the output of the model for images (N, C, H, W)."""
        model = self.reader.model
        with prepared_for_attribution(model), self.bound(images), torch.no_grad():
            return run_model(model, images)

    def others(self, kind: Literal["class", "box"] = "class") -> list[Sequence[Question]]:
        """Return questions about other classes, or other boxes, of each image; none if the target has no position."""
        if not self._is_located:
            return [()] * len(self.images)
        (asked, output), numbers = self._located, range(len(self.images))
        return [asked.target.others(output, asked.images.only(number), kind) for number in numbers]

    @property
    def scored_target(self) -> TargetLike:
        """The target whose score perturbed images get: the probability of the class, if the target is one."""
        is_class = None not in self.explanation.target and self.score == "probability"
        return probability(list(self.explanation.target)) if is_class else self.explained_target

    @cached_property
    def masks(self) -> Tensor:
        """The pixels of the object (N, H, W) of bool. Raises MethodError if they were not given or are no masks."""
        if self._masks is None:
            hint = "pass masks=... of shape (N, H, W)"
            note = "; the explained position is not ground truth: take an annotation, or another model"
            raise MethodError(f"this metric needs the position of the object: {hint}{note if self._is_located else ''}")
        size = self.explanation.input_size
        kind = "a tensor or an array (N, H, W) of bool (saliency evaluate --objects reads files)"
        with errors_as(MethodError, f"masks={described(self._masks)}: expected {kind}"):
            masks = torch.as_tensor(self._masks, device=self.explanation.values.device)
        check_mask(masks, MethodError)
        if masks.shape[-2:] != size or masks.numel() != len(self.explanation) * size[0] * size[1]:
            expected = (len(self.explanation), *size)
            raise MethodError(f"the masks have shape {tuple(masks.shape)}; expected {expected}, as the model sees them")
        return masks.bool().view(-1, *size)

    @cached_property
    def reference(self) -> Explanation:
        """The other explanation of the same images. Raises MethodError if it was not given or is of other images."""
        if not isinstance(self._reference, Explanation):
            raise MethodError("this metric compares two explanations: pass the other one as reference=...")
        if len(self._reference) != len(self.explanation):
            counts = f"{len(self._reference)} images, and the explanation {len(self.explanation)}"
            raise MethodError(f"the reference has {counts}; expected the same images")
        return self._reference


def _batch(images: Tensor) -> Batch:
    return Batch(images, (None,) * len(images))


def full_size(explanation: Explanation) -> Tensor:
    """Return the maps of an explanation at the size of the model's input (N, H, W)."""
    return resized_within(reduced_maps(explanation, None), explanation.input_size)


def resized_within(maps: Tensor, size: tuple[int, ...]) -> Tensor:
    """Resize maps (N, h, w) within their ranges, so that rounding does not order the pixels of a constant map."""
    return resized(maps, size).clamp(maps.amin((1, 2), True), maps.amax((1, 2), True))


def control_maps(
    cells: Tensor,
    seed: int,
    count: int = RANDOM_CONTROLS,
    names: Sequence[str] = CONTROLS,
    images: Tensor | None = None,
    size: tuple[int, ...] = (),
) -> list[Tensor]:
    """Return the controls of maps (N, h, w) with these names, in their order.

    They are a constant, a Gaussian of this size (H, W) at the centre, and random draws of `_moved`; for images (N, C,
    H, W), also the edges, the smoothed edges, and the distance of each pixel's colour to the mean colour. All have
    about the mean magnitude of the map, so that metrics of scale are fair. Except for the draws, they are scaled by a
    power of two: rounding does not change the order of their pixels, so that all maps of an image share their scores.
    """
    height, width = size or cells.shape[1:]
    mean = cells.abs().mean((1, 2), keepdim=True)

    def scaled(maps: Tensor) -> Tensor:
        return maps * (mean / maps.mean((1, 2), keepdim=True).clamp(min=1e-30)).log2().round().exp2()

    down, across = (
        torch.exp(-0.5 * ((torch.arange(n, device=cells.device) + 0.5) / n - 0.5).div(CENTRE_WIDTH).square()).to(cells)
        for n in (height, width)
    )
    maps = {
        "constant": [mean.expand_as(cells)],
        "centre": [scaled((down[:, None] * across)[None])],
        "random": [_moved(cells, seed, number) for number in range(count if "random" in names else 0)],
    }
    if images is not None:
        sharp = edges(images).to(cells)
        blurs = [gaussian(edge, SMOOTHED * min(sharp.shape[1:]), sharp) for edge in sharp.shape[1:]]
        contrast = (images - images.mean((2, 3), keepdim=True)).norm(dim=1).to(cells)
        of_image = (sharp, along_axes(sharp, blurs), contrast)
        maps |= {name: [scaled(map_)] for name, map_ in zip(IMAGE_CONTROLS, of_image, strict=True)}
    return [map_ for name in names for map_ in maps[name]]


def edges(images: Tensor) -> Tensor:
    """Return the norm of the gradient of the mean over the channels of images (N, C, H, W): (N, H, W)."""
    grey = images.mean(1)
    down, across = (grey.roll(1, axis) - grey.roll(-1, axis) for axis in (1, 2))
    return torch.hypot(down, across)


def _moved(cells: Tensor, seed: int, number: int) -> Tensor:
    """Return maps (N, h, w) at another position: cyclically shifted by whole cells, and flipped at random.

    All maps get the same shift, as a fraction of the edges. Unless the map is flipped, the shift is at least a
    quarter of an edge, so that the control is not the map itself.
    """
    source = generator(seed, number)
    while True:
        draws = torch.rand(4, generator=source, dtype=torch.float64, device="cpu").tolist()
        flips = [axis for axis, draw in zip((1, 2), draws[2:], strict=True) if draw < 0.5]
        if flips or any(0.25 <= shift <= 0.75 for shift in draws[:2]):
            break
    shifts = [round(shift * edge) for shift, edge in zip(draws[:2], cells.shape[1:], strict=True)]
    return cells.flip(flips).roll(shifts, (1, 2))


class Metric(HasOptions, ABC):
    """Base class of all metrics. A subclass with a `name` is registered; it implements `outcome`."""

    name: ClassVar[str] = ""
    higher_is_better: ClassVar[bool | None] = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__dict__.get("name", ""):
            METRICS[cls.name] = cls

    @property
    def settings(self) -> Mapping[str, Setting]:
        """The options of this metric."""
        return {name: as_setting(getattr(self, name)) for name in declared_options(type(self))}

    @answered_on_class
    def measure(self: Any, explanation: Explanation, **context: Any) -> Measurement:
        """Measure an explanation by this metric.

        Args:
            explanation: The explanation of one image or more.
            **context: As for `saliency.metrics.measure`.
        """
        if not isinstance(self, Metric) or cast("Any", explanation) is inspect.Parameter.empty:
            problem = "the explanation is missing" if isinstance(self, Metric) else "it belongs to an object"
            raise TypeError(f"{problem}: Deletion().measure(explanation)")
        return measure([self], explanation, **context)[0]

    def together(self, metrics: Sequence[Metric], subject: Subject, **passes: Any) -> dict[Metric, Outcome]:
        """Measure by this metric, and by other metrics that share its work; by default, only by this metric."""
        return {self: self.outcome(subject)}

    @abstractmethod
    def outcome(self, subject: Subject) -> Outcome:
        """Compute the values of all images, (M, N), for the map and its controls."""

    def __repr__(self) -> str:
        """Return the metric as a call with its options."""
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.settings.items())})"


def resolve_metrics(metrics: str | Metric | Sequence[str | Metric]) -> list[Metric]:
    """Return metrics that are given by name or as objects, one or several. Raises MethodError for another name."""
    requested = metrics if isinstance(metrics, Iterable) and not isinstance(metrics, str) else [metrics]
    return [metric if isinstance(metric, Metric) else METRICS.find(metric)() for metric in requested]


def measure(
    metrics: str | Metric | Sequence[str | Metric],
    explanation: Explanation,
    *,
    chunk: Chunk = "auto",
    progress: bool | None = None,
    **context: Any,
) -> list[Measurement]:
    """Measure an explanation by several metrics. Metrics that perturb the image share the forwards of equal images.

    Args:
        metrics: Metrics, or their names in `METRICS`.
        explanation: The explanation of one image or more.
        chunk: As for `saliency.extending.MultiPassAttribution`.
        progress: As for `saliency.extending.MultiPassAttribution`.
        **context: Data that the metrics need, as for `Subject`: `method` or `model`, and `inputs`, `target`,
            `masks`, `reference`, `score`, `seed`, `controls`, `random_controls`, `shared`, `others`.

    Returns:
        One measurement per metric, in their order.

    Raises:
        MethodError: A metric is unknown, or needs data that was not given.
    """
    parameters = list(inspect.signature(Subject).parameters)
    for name in context.keys() - parameters:
        raise TypeError(f'a metric has no argument "{name}"{option_hint(name, parameters)}')
    return measurements(resolve_metrics(metrics), Subject(explanation, **context), chunk=chunk, progress=progress)


def measurements(metrics: Sequence[Metric], subject: Subject, **passes: Any) -> list[Measurement]:
    """Measure a subject by several metrics, with options of passes, as `measure`."""
    measured: dict[Metric, Outcome] = {}
    for metric in metrics:
        if metric not in measured:
            measured |= metric.together(metrics, subject, **passes)
    return [measurement(metric, subject, measured[metric]) for metric in metrics]


def measurement(metric: Metric, subject: Subject, outcome: Outcome) -> Measurement:
    """Return an outcome as a measurement: rows of equal name are draws of one control.

    Raises:
        MethodError: The metric did not return one row of values for the map and for each control.
    """
    label, expected = type(metric).__name__, "saliency.metrics.Outcome(values)"
    if not isinstance(outcome, Outcome):
        raise MethodError(f"{label}.outcome returned {type(outcome).__name__}; expected {expected}")
    drawn = [name for name in subject.controls for _ in range(subject.random_controls if name == "random" else 1)]
    names = (drawn if outcome.controls is None else outcome.controls) if subject.controls else ()
    shape = (1 + len(names), len(subject.explanation))
    if tuple(outcome.values.shape) != shape:
        got = f"values {tuple(outcome.values.shape)}"
        raise MethodError(f"{label}.outcome returned {got}; expected {shape}, a row for the map and for each control")
    rows = {name: [row for row, other in enumerate(names, 1) if other == name] for name in names}
    draws = {name: outcome.values[row] for name, row in rows.items()}
    curves = outcome.curves
    return Measurement(
        metric.name or type(metric).__name__,
        {**metric.settings, "score": subject.score, "seed": subject.seed},
        outcome.values[0],
        None if outcome.error is None else outcome.error[0],
        {name: Control(values.mean(0), values.amin(0), values.amax(0)) for name, values in draws.items()},
        metric.higher_is_better,
        None if outcome.p is None else outcome.p[0],
        None if curves is None else curves[0],
        None if curves is None else {name: curves[row].mean(0) for name, row in rows.items()},
        outcome.at,
        outcome.passes,
    )
