"""Targets: from the model's output to one score per image.

A target is any function from the model's output to scores of shape (N,). The targets defined here also take class
names, check their arguments before the model runs, and have a name for display.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import TargetError, did_you_mean, plural
from ..io.preprocess import Box, Geometry
from ..validation import is_integer
from .answer_text import AnswerText

Categories = Sequence[str] | None
"""Class names in the order of the output; None if the model has none."""

NO_FLIPS = "pass flips=False"
"""What helps if `Augmented` mirrors an image for a target that has no mirror image."""

Target = Callable[[Any], Tensor]
"""Model output -> scores (N,)."""

TargetLike = int | str | Sequence[int | None] | Sequence[str | None] | Tensor | Target | Sequence[Target] | None
"""A class index or name, None for the top class, a function of the output, or one of them per image."""

Prompt = str | tuple[str, ...]
"""A text, or texts whose embeddings are averaged."""

EncodeText = Callable[[Sequence[Prompt]], tuple[Tensor, float]]
"""Texts -> their embeddings (K, D), and the model's factor from cosine similarities to logits."""

EncodeImage = Callable[[Any], Any]
"""An image -> the model's output."""

Link = Literal["softmax", "sigmoid", "identity"] | None
"""Function from scores to probabilities; None for a single number per image that may mean anything."""

_EMBEDDINGS = ("image_embeds", "image_features", "pooler_output")  # names of transformers and open_clip
_MOST_LISTED = 20  # class names in an error, if no name is similar
_MOST_OFFERED = 6  # similar class names in an error


@dataclass(frozen=True, slots=True)
class OutputFacts:
    """Facts about an output that a target needs besides the values.

    Attributes:
        categories: The class names.
        is_probability: Returns whether the last operation of an output with values of 0 to 1 is a sigmoid or softmax.
        answer: The answer that is explained; None for an image.
        last_operation: Returns "sigmoid" or "softmax" for scores that are the values before it; else an empty text.
    """

    categories: Categories = None
    is_probability: Callable[[Any], bool] = lambda output: False
    answer: AnswerText | None = None
    last_operation: Callable[[Tensor], str] = lambda scores: ""

    def class_count(self, outputs: int) -> int:
        """Return the number of classes of an output with this many scores: two for a single one with two names.

        Raises:
            TargetError: The number of class names differs.
        """
        names = outputs if self.categories is None else len(self.categories)
        if (outputs, names) == (1, 2):
            return 2
        if names != outputs and not (names < outputs and isinstance(self.categories, PartialNames)):
            classes = f"{outputs} classes" if outputs > 1 else "1 class"
            hint = "pass one name per class, or a mapping {index: name}, which may have gaps"
            raise TargetError(f"got {plural(names, 'class name')} for a model of {classes}; {hint}")
        return outputs

    def link(self, output: Any, scores: Tensor) -> Link:
        """Return the function from the scores (N, classes, ...) of an output to probabilities."""
        if last := self.last_operation(scores):
            return cast("Link", last)
        known = scores.detach().float()
        if known.numel() and float(known.min()) >= 0:
            sums_to_one = scores.shape[1] > 1 and bool(((known.sum(1) - 1).abs() < 1e-3).all())
            if sums_to_one or (float(known.max()) <= 1 and self.is_probability(output)):
                return "identity"
        if scores.shape[1] > 1:
            return "softmax" if scores.is_floating_point() else "identity"
        return "sigmoid" if self.class_count(1) == 2 else None


class OutputTarget(ABC):
    """Base class of the toolkit's targets, which resolve class names and have a name for display."""

    def resolve(self, images: int, categories: Categories) -> OutputTarget:
        """Return the target with class indices instead of names, one per image.

        Raises:
            TargetError: A class is unknown, or the number of classes is wrong.
        """
        return self

    def bind(self, encode_text: EncodeText, encode_image: EncodeImage) -> OutputTarget:
        """Return the target with the embeddings of its texts and reference images, if it has any."""
        return self

    def locate(self, geometries: Sequence[Geometry]) -> OutputTarget:
        """Return the target with the position of each image, for places in pixels of the images. The first call counts.

        Raises:
            TargetError: A place is outside the image.
        """
        return self

    def resolve_from(self, output: Any, facts: OutputFacts) -> OutputTarget:
        """Return the target with everything fixed that depends on the output, such as the top class."""
        return self

    @abstractmethod
    def __call__(self, output: Any) -> Tensor:
        """Return the scores (N,) of an output."""

    def part(self, output: Any, image: int) -> Any:
        """Return the part of an output that the target reads, as an output for one image."""
        return output_tensor(output)[image : image + 1]

    def probabilities(self, output: Any) -> Tensor | None:
        """Return the probabilities (N,) of the classes; None without classes, or if they are unknown."""
        return None

    def repeated(self, image: int, count: int) -> OutputTarget:
        """Return the resolved target of one image, for an output whose rows are `count` passes of that image."""
        return self

    def others(self, output: Any, of: Literal["class", "box"]) -> Sequence[OutputTarget]:
        """Return the resolved targets of one image for the other classes of its place, or the other boxes."""
        return ()

    def mirrored(self) -> Self:
        """Return the resolved target for images that are mirrored from left to right.

        Raises:
            TargetError: The target is not the same in a mirrored image.
        """
        return self

    @abstractmethod
    def names(self, images: int, categories: Categories) -> tuple[str, ...]:
        """Return the names of the target, one per image."""

    def indices(self, images: int) -> tuple[int | None, ...]:
        """Return the class indices, one per image; None if the target is not a class."""
        return (None,) * images

    def contrasts(self, images: int) -> tuple[bool, ...]:
        """Return whether the score of each image is a difference, as of two classes or texts."""
        return (False,) * images

    def boxes(self) -> tuple[Box | None, ...]:
        """Return the explained box of each image in pixels of the input, None if there is none; empty without boxes."""
        return ()


@dataclass(frozen=True, slots=True)
class ClassScore(OutputTarget):
    """The model's output for a class: a logit, if the model returns logits.

    If the model returns one number per image and has two class names, the number is the score of class 1, and its
    negative the score of class 0.

    Attributes:
        classes: A class index or name, None for the top class, or one of them per image.
        link: The function from the scores of all classes to probabilities.
        is_binary: Whether the two classes have one number.
    """

    classes: Any = None
    link: Link = field(default=None, repr=False)
    is_binary: bool = field(default=False, repr=False)

    def resolve(self, images: int, categories: Categories) -> ClassScore:
        """Return the target with class indices instead of names.

        Raises:
            TargetError: A class is unknown, or the number of classes is wrong.
        """
        labels = per_image(self.classes, images)
        classes = tuple(None if label is None else class_index(label, categories) for label in labels)
        return replace(self, classes=classes)

    def resolve_from(self, output: Any, facts: OutputFacts) -> ClassScore:
        """Return the target, with the top class of each image for which no class was given.

        Raises:
            TargetError: The output does not fit the classes, the class names or the number of images.
        """
        scores = class_scores(output)
        if len(scores) != len(self.classes):
            rows = f"{len(scores)} rows of scores for {plural(len(self.classes), 'image')}"
            raise TargetError(f"the model returned {rows}; pass a function of the output as the target")
        count, link = facts.class_count(scores.shape[1]), facts.link(output, scores)
        is_binary = count > scores.shape[1]
        top = self.classes
        if None in top:
            best = scores.detach()[:, 0] > threshold(link) if is_binary else scores.detach().argmax(1)
            top = best.long().tolist()
        classes = tuple(best if index is None else index for index, best in zip(self.classes, top, strict=True))
        for index in classes:
            require_class(index, count)
        return ClassScore(classes, link, is_binary)

    def __call__(self, output: Any) -> Tensor:
        """Return the scores (N,), in the units of the model's output."""
        scores = class_scores(output)
        if self.is_binary:
            return scores[:, 0] if all(self.classes) else scores[:, 0] * (2 * self._index(scores) - 1)
        return scores.gather(1, self._index(scores)[:, None]).squeeze(1)

    def _index(self, scores: Tensor) -> Tensor:
        return torch.tensor(self.classes, device=scores.device)

    def probability(self, output: Any) -> Tensor:
        """Return the probabilities (N,) of the classes, with their graph; in float32 if the scores are in half."""
        scores = class_scores(output)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if self.link == "softmax":
            return self(scores.softmax(1))
        if self.link == "sigmoid":
            return self(scores).sigmoid()
        is_plain = not self.is_binary or all(self.classes)
        return self(scores) if is_plain else self(scores) + (1 - self._index(scores))

    def probabilities(self, output: Any) -> Tensor | None:
        """Return the probabilities (N,) of the classes; None for a single number that may mean anything."""
        return None if self.link is None else self.probability(output).detach().float()

    def repeated(self, image: int, count: int) -> ClassScore:
        """Return the target for the class of one image."""
        return replace(self, classes=(self.classes[image],) * count)

    def names(self, images: int, categories: Categories) -> tuple[str, ...]:
        """Return the class names; `class 7` if the model has none."""
        return tuple("top class" if index is None else class_name(index, categories) for index in self.classes)

    def indices(self, images: int) -> tuple[int | None, ...]:
        """Return the class indices, one per image."""
        return tuple(self.classes)


@dataclass(frozen=True, slots=True)
class _ClassTarget(OutputTarget):
    """Target that is computed from the scores of one or more classes; the first is the explained one."""

    scores: tuple[ClassScore, ...]

    def resolve(self, images: int, categories: Categories) -> Self:
        """Return the target with class indices instead of names."""
        return replace(self, scores=tuple(score.resolve(images, categories) for score in self.scores))

    def resolve_from(self, output: Any, facts: OutputFacts) -> OutputTarget:
        """Return the target, with the top class if no class was given."""
        return replace(self, scores=tuple(score.resolve_from(output, facts) for score in self.scores))

    def probabilities(self, output: Any) -> Tensor | None:
        """Return the probabilities (N,) of the explained class."""
        return self.scores[0].probabilities(output)

    def repeated(self, image: int, count: int) -> Self:
        """Return the target for the classes of one image."""
        return replace(self, scores=tuple(score.repeated(image, count) for score in self.scores))

    def indices(self, images: int) -> tuple[int | None, ...]:
        """Return the indices of the explained class, one per image."""
        return self.scores[0].indices(images)


class Probability(_ClassTarget):
    """Probability of a class; see `probability`."""

    def resolve_from(self, output: Any, facts: OutputFacts) -> OutputTarget:
        """Return the target, with the top class if no class was given. Raises TargetError without a probability."""
        score = self.scores[0].resolve_from(output, facts)
        if score.link is None:
            problem = "the model returns one number per image, whose probability is unknown"
            hint = "pass the names of both classes as categories= if it is the logit of the second"
            raise TargetError(
                f"{problem}; {hint}, or explain the number itself: saliency.value(0), or saliency.value()"
            )
        return replace(self, scores=(score,))

    def __call__(self, output: Any) -> Tensor:
        """Return the probabilities (N,), 0 to 1."""
        return self.scores[0].probability(output)

    def names(self, images: int, categories: Categories) -> tuple[str, ...]:
        """Return names such as `probability of espresso`."""
        return tuple(f"probability of {name}" for name in self.scores[0].names(images, categories))


class Contrast(_ClassTarget):
    """Difference of the scores of two classes; see `contrast`."""

    def resolve_from(self, output: Any, facts: OutputFacts) -> OutputTarget:
        """Return the target, with the top class if no class was given. Raises TargetError if both classes are equal."""
        first, second = (score.resolve_from(output, facts) for score in self.scores)
        for index, other in zip(first.classes, second.classes, strict=True):
            if index == other:
                raise TargetError(f"contrast compares class {index} with itself; pass another class as `against`")
        return replace(self, scores=(first, second))

    def __call__(self, output: Any) -> Tensor:
        """Return the differences (N,) of the two scores."""
        return self.scores[0](output) - self.scores[1](output)

    def names(self, images: int, categories: Categories) -> tuple[str, ...]:
        """Return names such as `tiger cat rather than tabby`."""
        names = (score.names(images, categories) for score in self.scores)
        return tuple(f"{name} rather than {other}" for name, other in zip(*names, strict=True))

    def contrasts(self, images: int) -> tuple[bool, ...]:
        """Return True for each image."""
        return (True,) * images


@dataclass(frozen=True, slots=True)
class Value(OutputTarget):
    """One number of the output; see `value`."""

    index: tuple[int, ...]

    def resolve_from(self, output: Any, facts: OutputFacts) -> Value:
        """Return the target unchanged. Raises TargetError if the index is outside the output."""
        shape = tuple(output_tensor(output).shape[1:])
        inside = len(self.index) == len(shape) and all(0 <= i < n for i, n in zip(self.index, shape, strict=True))
        if not inside:
            raise TargetError(f"there is no value {self.index} in an output of shape {shape} per image")
        return self

    def __call__(self, output: Any) -> Tensor:
        """Return the values (N,), in the units of the model's output."""
        values = output_tensor(output)
        for index in reversed(self.index):
            values = values[..., index]
        return values

    def names(self, images: int, categories: Categories) -> tuple[str, ...]:
        """Return names such as `value 3`."""
        return (" ".join(["value", *map(str, self.index)]),) * images


@dataclass(frozen=True, slots=True)
class LayerOutput:
    """Output of a model that was run for the output of one of its layers."""

    values: Tensor


@dataclass(frozen=True, slots=True)
class Neuron(OutputTarget):
    """Activation of a channel of a layer; see `neuron`."""

    layer: str | nn.Module
    channel: int
    at: tuple[int, ...] | None = None
    axis: int | None = None  # of the channels in outputs of more than two axes; None if unknown

    def __call__(self, output: Any) -> Tensor:
        """Return the activations (N,). Raises TargetError without such a channel or position, or a known axis."""
        if not isinstance(output, LayerOutput):
            raise TargetError("a neuron is a target of methods only")
        values = output.values
        if values.dim() > 2 and self.axis is None:
            problem = f"the output {tuple(values.shape)} of the layer {self.layer} does not show its axis of channels"
            raise TargetError(f"{problem}; choose a convolution, a linear layer, or a layer of maps or patches")
        values = values.movedim(self.axis or 1, 1) if values.dim() > 2 else values
        shape = tuple(values.shape[1:])
        if not shape or self.channel >= shape[0]:
            raise TargetError(f"there is no channel {self.channel} in the layer {self.layer} with outputs of {shape}")
        values = values[:, self.channel]
        if self.at is None:
            return values.flatten(1).mean(1) if values.dim() > 1 else values
        if len(self.at) != len(shape) - 1 or any(i >= n for i, n in zip(self.at, shape[1:], strict=True)):
            raise TargetError(f"there is no position {self.at} in a channel of {shape[1:]}")
        return values.flatten(1)[:, int(np.ravel_multi_index(self.at, shape[1:]))]

    def mirrored(self) -> Neuron:
        """Return the same neuron. Raises TargetError if it has a position."""
        if self.at:
            raise TargetError(f"the position {self.at} of a neuron is another one in a mirrored image; {NO_FLIPS}")
        return self

    def part(self, output: Any, image: int) -> Any:
        """Return the layer's output for one image."""
        return LayerOutput(output.values[image : image + 1]) if isinstance(output, LayerOutput) else output

    def names(self, images: int, categories: Categories) -> tuple[str, ...]:
        """Return names such as `channel 12 of layer4`."""
        return (f"channel {self.channel} of {self.layer}" + (f" at {self.at}" if self.at else ""),) * images


@dataclass(frozen=True, slots=True)
class FunctionTarget(OutputTarget):
    """Function of the output that the user wrote."""

    function: Target

    def __call__(self, output: Any) -> Tensor:
        """Return the result of the function."""
        return self.function(output)

    def part(self, output: Any, image: int) -> Any:
        """Return the whole output."""
        return output

    def names(self, images: int, categories: Categories) -> tuple[str, ...]:
        """Return the name of the function, or of its class."""
        return (getattr(self.function, "__name__", type(self.function).__name__).strip("<>"),) * images


@dataclass(frozen=True, slots=True)
class TargetList(OutputTarget):
    """One target per image, none of which is a plain class."""

    targets: tuple[OutputTarget, ...]  # each resolved for one image

    def bind(self, encode_text: EncodeText, encode_image: EncodeImage) -> TargetList:
        """Return the targets with the embeddings of their texts and reference images."""
        return TargetList(tuple(target.bind(encode_text, encode_image) for target in self.targets))

    def locate(self, geometries: Sequence[Geometry]) -> TargetList:
        """Return the targets, each with the position of its image."""
        return TargetList(tuple(own.locate([geometry]) for own, geometry in zip(self.targets, geometries, strict=True)))

    def resolve_from(self, output: Any, facts: OutputFacts) -> TargetList:
        """Return the targets with everything fixed that depends on the output."""
        own = (target.resolve_from(target.part(output, image), facts) for image, target in enumerate(self.targets))
        return TargetList(tuple(own))

    def __call__(self, output: Any) -> Tensor:
        """Return the score of each image (N,) by its own target.

        Each target reads the rows of all images, so that relevance finds N rows in every operation.
        """
        images = len(self.targets)
        own = (target.repeated(0, images)(output) for target in self.targets)
        return torch.stack([one_score_each(scores, images)[image] for image, scores in enumerate(own)])

    def probabilities(self, output: Any) -> Tensor | None:
        """Return the probabilities (N,), if each target has one."""
        parts = [target.probabilities(target.part(output, image)) for image, target in enumerate(self.targets)]
        known = [part for part in parts if part is not None]
        return torch.cat(known) if len(known) == len(parts) else None

    def repeated(self, image: int, count: int) -> OutputTarget:
        """Return the target of one image."""
        return self.targets[image].repeated(0, count)

    def names(self, images: int, categories: Categories) -> tuple[str, ...]:
        """Return the name of each image's target."""
        return tuple(own.names(1, categories)[0] for own in self.targets)

    def indices(self, images: int) -> tuple[int | None, ...]:
        """Return the class index of each image; None if its target is not a class."""
        return tuple(own.indices(1)[0] for own in self.targets)

    def contrasts(self, images: int) -> tuple[bool, ...]:
        """Return whether each image's target is a difference."""
        return tuple(own.contrasts(1)[0] for own in self.targets)

    def boxes(self) -> tuple[Box | None, ...]:
        """Return the explained box of each image; empty without boxes."""
        boxes = tuple((*own.boxes(), None)[0] for own in self.targets)
        return boxes if any(boxes) else ()


def located(target: Any, geometries: Sequence[Geometry]) -> Any:
    """Return a target for the same images as tensors, with its places on the images; other targets unchanged."""
    if isinstance(target, list | tuple) and len(target) == len(geometries):
        return [located(own, [geometry]) for own, geometry in zip(target, geometries, strict=True)]
    return target.locate(geometries) if isinstance(target, OutputTarget) else target


def one_score_each(scores: Any, images: int) -> Tensor:
    """Return the scores of a target. Raises TargetError unless they are a float tensor (N,)."""
    if isinstance(scores, Tensor) and scores.shape == (images,) and scores.is_floating_point():
        return scores
    got = f"{scores.dtype} of shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
    raise TargetError(f"the target returned {got}; expected one score per image, a float tensor ({images},)")


def probability(target: Any = None) -> Target:
    """Explain the probability of a class, 0 to 1, instead of its logit.

    It is the softmax of the scores; or the score itself, if the model's last operation is a sigmoid or a softmax. If
    the model returns one number per image and has two class names, it is the sigmoid of that number for class 1. Unlike
    the logit, a softmax compares the class with all others. Its gradient vanishes if the model is certain.

    Args:
        target: A class index or name, one of them per image, or None for the top class.
    """
    return Probability((ClassScore(target),))


def contrast(target: Any, against: Any) -> Target:
    """Explain one class rather than another: the difference of their scores, in the units of the model's output.

    Args:
        target: A class index or name, one of them per image, or None for the top class.
        against: The other class, in the same form.
    """
    return Contrast((ClassScore(target), ClassScore(against)))


def value(*index: int) -> Target:
    """Explain one number of the output, as in regression: `value(3)` is `output[:, 3]`; `value()` is an output (N,).

    Raises:
        TargetError: An index is not a non-negative integer.
    """
    for number in index:
        class_number(number)
    return Value(index)


def neuron(layer: str | nn.Module, channel: int, at: int | Sequence[int] | None = None) -> Target:
    """Explain the activation of a channel of a layer, instead of the model's output.

    All targets of one call must be neurons of one layer. The layer of a CAM must be before it.

    Args:
        layer: The name of the layer, as in `model.named_modules()`, or the module itself. Its first output tensor is
            read: (N, K); (N, K, h, w) or (N, h, w, K); or tokens (N, T, K). Convolutions, linear layers and the
            positions of maps and patches in the image show which axis holds the channels.
        channel: The index of the channel.
        at: The position in the other axes of the output, (row, column) or the index of a token. By default the mean
            over all.

    Raises:
        TargetError: An index is not a non-negative integer. In `attribute`: there is no such channel or
            position, or the axis of the channels is unknown.
        LayerError: In `attribute`: the model has no such layer, or `layer` is neither a name nor a module.
    """
    place = None if at is None else tuple(map(class_number, at if isinstance(at, Sequence) else (at,)))
    return Neuron(layer, class_number(channel), place)


def as_target(target: TargetLike, images: int, categories: Categories = None) -> OutputTarget:
    """Convert classes or a function to a target, and check class names and counts.

    Raises:
        TargetError: An unknown class name, an index that is not a non-negative integer, or a wrong number of targets.
    """
    if isinstance(target, OutputTarget):
        return target.resolve(images, categories)
    if callable(target) and not isinstance(target, Tensor):
        return FunctionTarget(target)
    if isinstance(target, list | tuple) and any(map(callable, target)):
        if not all(map(callable, target)):
            raise TargetError("got a list of classes and functions; write each class as saliency.value(index)")
        return TargetList(tuple(as_target(own, 1, categories) for own in per_image(target, images)))
    return ClassScore(target).resolve(images, categories)


# Scores of classes, and class names


def output_tensor(output: Any) -> Tensor:
    """Return the tensor of scores: the output itself, its `.logits`, `["out"]`, or its only tensor.

    Raises:
        TargetError: There are several tensors, and none has such a name.
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        parts = dict(output)
    elif isinstance(output, tuple | list):
        parts = dict(zip(getattr(output, "_fields", None) or map(str, range(len(output))), output, strict=True))
    else:
        parts = {name: getattr(output, name) for name in ("logits", "out") if hasattr(output, name)}
    tensors: dict[str, Tensor] = {name: part for name, part in parts.items() if isinstance(part, Tensor)}
    if "image_embeds" in tensors and "logits" not in tensors:
        hint = 'pass saliency.text("a photo of a cat"), --text, or saliency.similarity(reference) as the target'
        raise TargetError(f"the model returns an embedding and no scores of classes; {hint}")
    name = next((name for name in ("logits", "out", *tensors) if name in tensors), None)
    if name is not None and (name in ("logits", "out") or len(tensors) == 1):
        return tensors[name]
    maps = [tensor for tensor in tensors.values() if tensor.dim() == 4]
    if isinstance(output, tuple) and len(maps) == 1:  # masks and labels, of segmentation_models_pytorch
        return maps[0]
    kinds = ", ".join(f"{name!r}: {type(part).__name__}" for name, part in parts.items()) or "empty"
    problem = f"the model returned a {type(output).__name__} ({kinds}); it is not clear which tensor holds the scores"
    hint = f"pass a target that reads it, for example {_example_target(output)}"
    raise TargetError(f"{problem}; {hint}")


def embedding(output: Any) -> Tensor:
    """Return the embeddings (N, D): `.image_embeds` or `.pooler_output` of an output, or its scores.

    Raises:
        TargetError: They have another shape.
    """
    parts = output if isinstance(output, Mapping) else {name: getattr(output, name, None) for name in _EMBEDDINGS}
    values = next((parts[name] for name in _EMBEDDINGS if isinstance(parts.get(name), Tensor)), None)
    values = output_tensor(output) if values is None else values
    values = values.flatten(1) if values.shape[2:].numel() == 1 else values  # (N, D, 1, 1)
    if values.dim() != 2:
        shape = tuple(values.shape)
        hint = "wrap the model in a module that returns (N, D), or pass a function as the target"
        raise TargetError(f"an embedding has shape (N, D); this model's is {shape}; {hint}")
    return values


def _example_target(output: Any) -> str:
    """Return the code of a target: a box for detections, else a function that sums the scores of each image."""
    if isinstance(output, list | tuple) and output and isinstance(output[0], Mapping):  # one entry per image
        return "target=saliency.box(index=0)"
    key = 0 if isinstance(output, list | tuple) else "scores"
    return f"target=lambda output: output[{key!r}].flatten(1).sum(1), or saliency.box(index=0) for a detector"


class PartialNames(tuple[str, ...]):
    """Class names from a mapping with gaps. The names of other classes are as `class 7`."""


def as_categories(like: Any) -> tuple[str, ...]:
    """Convert a sequence of names, or a mapping of index to name, to class names in the order of the output.

    Raises:
        TargetError: `like` is neither, or contains something other than names.
    """
    if isinstance(like, PartialNames):
        return like
    kind: type[tuple[str, ...]] = tuple
    if isinstance(like, Mapping) and like and all(is_integer(key, least=0) for key in like):
        size = max(like) + 1
        kind = tuple if len(like) == size else PartialNames
        like = [like.get(index, f"class {index}") for index in range(size)]
    if isinstance(like, str) or not isinstance(like, Sequence) or not all(isinstance(name, str) for name in like):
        raise TargetError(f"expected a list of class names, or a mapping {{index: name}}, got {type(like).__name__}")
    return kind(like)


def class_scores(output: Any) -> Tensor:
    """Return the scores (N, classes) of an output; an output (N,) has one class.

    Raises:
        TargetError: The output has another shape.
    """
    scores = output_tensor(output)
    if scores.dim() == 1:
        return scores[:, None]
    if scores.dim() == 2 and scores.shape[1] > 0:
        return scores
    region = "saliency.region(label), or "
    hints = {3: "saliency.box(index=0) for a detector, or ", 4: region, 5: region}
    target = f"{hints.get(scores.dim(), '')}a function of the output"
    raise TargetError(f"the output has shape {tuple(scores.shape)}, not (N, classes); pass {target} as the target")


def threshold(link: Link) -> float:
    """Return the score above which a single number per image or pixel indicates its class."""
    return 0.5 if link == "identity" else 0.0


def per_image(classes: Any, images: int) -> list[Any]:
    """Return one class per image; a single one applies to all. Raises TargetError for a wrong number or shape."""
    if isinstance(classes, Tensor | np.ndarray):
        if classes.ndim > 1:
            raise TargetError(f"got a target of shape {tuple(classes.shape)}; expected (N,), one class per image")
        classes = classes.tolist()
    if isinstance(classes, str) or not isinstance(classes, Sequence):
        return [classes] * images
    if len(classes) != images:
        hint = "pass one for all, or one per image (several classes of one image: attribute_classes)"
        raise TargetError(f"got {len(classes)} targets for {plural(images, 'image')}; {hint}")
    return list(classes)


def class_index(label: Any, categories: Categories) -> int:
    """Return the index of a class, given by index, name, or the digits of the index.

    For an unknown name, TargetError lists the closest names. Digits are a name if a class is called so.
    """
    if not isinstance(label, str):
        index = class_number(label)
        if categories is not None and not isinstance(categories, PartialNames):
            require_class(index, len(categories), "the model's class names")
        return index
    matches = _named(label, categories or ())
    if not matches and re.fullmatch(r"[+-]?\d+", label):
        return class_index(int(label), categories)
    if categories is None:
        hint = "pass an index, set model.categories to the list of names, or pass saliency.text(...) for a text"
        raise TargetError(f'class "{label}" cannot be looked up: the model has no class names; {hint}')
    if not matches:
        hint = did_you_mean(label, categories, _MOST_OFFERED)
        if not hint and len(categories) <= _MOST_LISTED:
            hint = f"; the classes are {', '.join(categories)}"
        raise TargetError(f'no class "{label}" among {len(categories)} classes{hint}')
    if len(matches) > 1:
        raise TargetError(f'several classes are named "{label}": {", ".join(map(str, matches))}; pass the index')
    return matches[0]


def _named(label: str, categories: Sequence[str]) -> list[int]:
    """Return the classes of a name, in its case or another, or with it as one of the names in "tabby, tabby cat"."""
    folded = label.casefold()
    return (
        [i for i, name in enumerate(categories) if name == label]
        or [i for i, name in enumerate(categories) if name.casefold() == folded]
        or [i for i, name in enumerate(categories) if folded in re.split(r",\s*", name.casefold())]
    )


def class_name(index: int, categories: Categories) -> str:
    """Return the name of a class; `class 7` if it has no name."""
    return categories[index] if categories is not None and index < len(categories) else f"class {index}"


def class_number(label: Any) -> int:
    """Return a class index as an int. Raises TargetError unless it is a non-negative integer."""
    label = label.item() if isinstance(label, Tensor) and label.numel() == 1 else label
    if not is_integer(label, least=None):
        raise TargetError(f"expected a class index or a class name, got {label!r} ({type(label).__name__})")
    if int(label) < 0:
        raise TargetError(f"class {label} is negative; classes are numbered from 0")
    return int(label)


def require_class(index: int, classes: int, of: str = "the classes of the model's output") -> None:
    """Raise TargetError unless a class index is less than the number of classes."""
    if index >= classes:
        raise TargetError(f"class {index} is outside 0..{classes - 1}, {of}")
