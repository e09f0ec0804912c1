"""Targets for classes, numbers and functions of the output, and how a caller writes targets."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import TargetError, did_you_mean, plural
from ..io.geometry import Geometry
from ..validation import described, is_integer
from .question import Asked, Categories, Images, Link, PartialNames, Question, Score, Target, one_score_each

TargetLike: TypeAlias = (
    int | str | Sequence[int | None] | Sequence[str | None] | Tensor | Target | Score | Sequence[Target | Score] | None
)
"""A class index or name, None for the top class, a function of the output, or a list with one of these per image."""

PROBABILITY_OF = "probability of "
"""The start of the name of a probability."""

_EMBEDDINGS = ("image_embeds", "image_features", "pooler_output")  # names of transformers and open_clip
_MOST_LISTED = 20  # class names in an error, if no name is similar
_MOST_OFFERED = 6  # similar class names in an error


@dataclass(frozen=True, slots=True)
class ClassScore:
    """Score of a class in an output: a logit, if the model returns logits.

    If the model returns one number per image and has two class names, the number is the score of class 1, and its
    negative the score of class 0.

    Attributes:
        classes: The class index of each row of the output, or a single index for all rows.
        link: The function from the scores of all classes to probabilities.
        is_binary: Whether one number is the score of both classes.
    """

    classes: tuple[int, ...]
    link: Link
    is_binary: bool

    def __call__(self, output: Any) -> Tensor:
        """Return the scores (N,), in the units of the model's output."""
        return self._of_class(class_scores(output))

    def _of_class(self, scores: Tensor) -> Tensor:
        if len({*self.classes}) == 1 and (self.classes[0] or not self.is_binary):
            return scores.select(1, 0 if self.is_binary else self.classes[0])  # one operation, also in PyTorch 2.6
        index = torch.tensor(self.classes, device=scores.device).expand(len(scores))
        return scores[:, 0] * (2 * index - 1) if self.is_binary else scores.gather(1, index[:, None]).squeeze(1)

    def probability(self, output: Any) -> Tensor:
        """Return the probabilities (N,) of the classes, with their graph; in float32 if the scores are in half."""
        scores = class_scores(output)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if self.link == "softmax":
            return self._of_class(scores.softmax(1))
        if self.link == "sigmoid":
            return self._of_class(scores).sigmoid()
        values = self._of_class(scores)
        return values + (1 - torch.tensor(self.classes, device=values.device)) if self.is_binary else values


def is_probability(question: Question) -> bool:
    """Return whether the score is the probability of a class, whose gradient vanishes near 0 and 1."""
    score: Any = question.score
    owner = getattr(score, "__self__", score)  # the object, if the score is its method `ClassScore.probability`
    return isinstance(owner, ClassScore) and (owner is not score or owner.link == "identity")


@dataclass(frozen=True, slots=True)
class ClassTarget(Target):
    """Score of a class; see `ClassScore`.

    Attributes:
        classes: A class index or name, None for the top class, or a list with one of these per image.
    """

    classes: Any = None

    def prepared(self, images: Images) -> ClassTarget:
        """Return the target with class indices instead of names, one per image."""
        labels = per_image(self.classes, len(images.numbers))
        for index, label in enumerate(labels):
            labels[index] = None if label is None else class_index(label, images.categories)
        return ClassTarget(tuple(labels))

    def ask(self, output: Any, images: Images) -> Asked:
        """Return the questions, with the top class of each image for which no class was given."""
        return _questions(output, images, None, "{}", self.find(output, images))

    def find(self, output: Any, images: Images) -> ClassScore:
        """Return the scores of the images' classes.

        Raises:
            TargetError: The output does not fit the classes, the class names or the number of images.
        """
        scores = class_scores(output)
        if len(scores) != images.count:
            rows = f"{len(scores)} rows of scores for {plural(images.count, 'image')}"
            raise TargetError(f"the model returned {rows}; pass a function of the output as the target")
        count, classes = images.class_count(scores.shape[1]), self.classes
        is_binary = count > scores.shape[1]
        numbers = scores.detach()
        parts = [numbers.min()[None].float()]
        if None in classes:
            parts.append((numbers[:, 0] if is_binary else numbers.argmax(1)).float())
        smallest, *top = images.read_numbers(*parts)
        link = images.link(scores, smallest)
        if top:
            top = [row > threshold(link) for row in top] if is_binary else top
            classes = tuple(int(top[n]) if cls is None else cls for n, cls in zip(images.numbers, classes, strict=True))
        for index in classes:
            require_class(index, count)
        return ClassScore(classes, link, is_binary)


def _questions(
    output: Any, images: Images, derive: Callable[..., Score] | None, name: str, *scores: ClassScore
) -> Asked:
    """Return questions about the scores of classes, or about scores derived from them; the first class is explained."""
    first, asked = scores[0], []
    probabilities = None if first.link is None else first.probability(output).detach().float()
    for row, image in enumerate(images.numbers):
        parts, names = list[ClassScore](), list[str]()
        for score in scores:
            parts.append(ClassScore((score.classes[row],), score.link, score.is_binary))
            names.append(class_name(score.classes[row], images.categories))
        derived, label = derive(*parts) if derive else parts[0], name.format(*names)
        probability, is_difference = None if probabilities is None else probabilities[image], len(scores) > 1
        asked.append(Question(derived, label, first.classes[row], probability, is_difference, mirrored=derived))
    return asked, derive(*scores) if derive else first


@dataclass(frozen=True, slots=True)
class Probability(Target):
    """Probability of a class; see `probability`."""

    target: ClassTarget
    or_score: bool = False  # instead of an error, the score itself if the class has no probability

    def prepared(self, images: Images) -> Probability:
        """Return the target with class indices instead of names."""
        return replace(self, target=self.target.prepared(images))

    def ask(self, output: Any, images: Images) -> Asked:
        """Return the questions. Raises TargetError if the class has no probability."""
        score = self.target.find(output, images)
        if score.link is None and self.or_score:
            return self.target.ask(output, images)
        if score.link is None:
            problem = "the model returns one number per image, whose probability is unknown"
            hint = "pass the names of both classes as categories= if it is the logit of the second"
            raise TargetError(f"{problem}; {hint}, or explain the number: saliency.value(0), or saliency.value()")
        return _questions(output, images, lambda score: score.probability, PROBABILITY_OF + "{}", score)


@dataclass(frozen=True, slots=True)
class Contrast(Target):
    """Difference of the scores of two classes; see `contrast`."""

    target: ClassTarget
    against: ClassTarget

    def prepared(self, images: Images) -> Contrast:
        """Return the target with class indices instead of names."""
        return Contrast(self.target.prepared(images), self.against.prepared(images))

    def ask(self, output: Any, images: Images) -> Asked:
        """Return the questions. Raises TargetError if both classes are equal."""
        first, second = self.target.find(output, images), self.against.find(output, images)
        for index, other in zip(first.classes, second.classes, strict=True):
            if index == other:
                raise TargetError(f"contrast compares class {index} with itself; pass another class as `against`")
        return _questions(output, images, partial(partial, _difference), "{} rather than {}", first, second)


def _difference(first: Score, second: Score, output: Any) -> Tensor:
    return first(output) - second(output)


@dataclass(frozen=True, slots=True)
class Value(Target):
    """One number of the output; see `value`."""

    index: tuple[int, ...]

    def ask(self, output: Any, images: Images) -> Asked:
        """Return the questions. Raises TargetError if the index is outside the output."""
        shape = tuple(output_tensor(output).shape[1:])
        inside = len(self.index) == len(shape) and all(0 <= i < n for i, n in zip(self.index, shape, strict=True))
        if not inside:
            raise TargetError(f"there is no value {self.index} in an output of shape {shape} per image")
        name = " ".join(["value", *map(str, self.index)])
        return Question(self.score, name, mirrored=self.score).ask(output, images)

    def score(self, output: Any) -> Tensor:
        """Return the values (N,), in the units of the model's output."""
        values = output_tensor(output)
        for index in reversed(self.index):
            values = values[..., index]
        return values


@dataclass(frozen=True, slots=True)
class ModuleOutput:
    """Output of a model that was run for the output of one of its layers."""

    values: Tensor


@dataclass(frozen=True, slots=True)
class Neuron(Target):
    """Activation of a channel of a layer; see `neuron`."""

    layer: str | nn.Module
    channel: int
    position: tuple[int, ...] | None = None
    axis: int | None = None  # of the channels in outputs of more than two axes, or None

    def prepared(self, images: Images) -> Neuron:
        """Return the target with the name of the layer and the axis of its channels."""
        layer, axis = images.channel_axis(self.layer)
        return replace(self, layer=layer, axis=axis)

    def ask(self, output: Any, images: Images) -> Asked:
        """Return the questions. Mirroring an image moves its positions, so they have no mirrored question."""
        name = f"channel {self.channel} of {self.layer}" + (f" at {self.position}" if self.position else "")
        return Question(self.score, name, mirrored=None if self.position else self.score).ask(output, images)

    def score(self, output: Any) -> Tensor:
        """Return the activations (N,). Raises TargetError without such a channel or position, or without an axis."""
        if not isinstance(output, ModuleOutput):
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
        if self.position is None:
            return values.flatten(1).mean(1) if values.dim() > 1 else values
        if len(self.position) != len(shape) - 1 or any(i >= n for i, n in zip(self.position, shape[1:], strict=True)):
            raise TargetError(f"there is no position {self.position} in a channel of {shape[1:]}")
        return values.flatten(1)[:, int(np.ravel_multi_index(self.position, shape[1:]))]


@dataclass(frozen=True, slots=True)
class FunctionTarget(Target):
    """Function of the output that the user wrote."""

    function: Score

    def ask(self, output: Any, images: Images) -> Asked:
        """Return the questions, named after the function or its class."""
        name = getattr(self.function, "__name__", type(self.function).__name__).strip("<>")
        scores = [images.score_of(self.function, number) for number in images.numbers]
        return [Question(score, name, mirrored=score) for score in scores], images.score_of(self.function)


@dataclass(frozen=True, slots=True)
class TargetList(Target):
    """One target per image."""

    targets: tuple[Target, ...]

    @property
    def part(self) -> Hashable:
        """The part that the first target explains."""
        return self.targets[0].part

    @property
    def reads_logits(self) -> bool:
        """Whether all targets read values before a last sigmoid or softmax."""
        return all(target.reads_logits for target in self.targets)

    def prepared(self, images: Images) -> TargetList:
        """Return the targets with everything computed that does not depend on the output."""
        return TargetList(tuple(target.prepared(images.only(number)) for number, target in enumerate(self.targets)))

    def ask(self, output: Any, images: Images) -> Asked:
        """Return the question of each image's target."""
        asked = [self.targets[number].ask(output, images.only(number)) for number in images.numbers]

        def score(output: Any) -> Tensor:
            # Each function reads the rows of all images, so that relevance finds N rows in every operation.
            rows = (one_score_each(part(output), len(asked))[image] for image, (_, part) in enumerate(asked))
            return torch.stack(list(rows))

        return [question for (question,), _ in asked], score

    def others(self, output: Any, images: Images, kind: Literal["class", "box"]) -> Sequence[Question]:
        """Return the other questions of the image's target."""
        return self.targets[images.numbers[0]].others(output, images, kind)


@dataclass(frozen=True, slots=True)
class Located(Target):
    """Target on images whose positions the batch does not hold, as on tensors that were read from files."""

    target: Target
    geometries: tuple[Geometry, ...]  # one for each image, or one for all images

    @property
    def part(self) -> Hashable:
        """The part that the target explains."""
        return self.target.part

    @property
    def reads_logits(self) -> bool:
        """Whether the target reads values before a last sigmoid or softmax."""
        return self.target.reads_logits

    def prepared(self, images: Images) -> Target:
        """Return the target with everything computed that does not depend on the output."""
        return Located(self.target.prepared(images.located(self.geometries)), self.geometries)

    def ask(self, output: Any, images: Images) -> Asked:
        """Return the questions of the target."""
        return self.target.ask(output, images.located(self.geometries))

    def others(self, output: Any, images: Images, kind: Literal["class", "box"]) -> Sequence[Question]:
        """Return the other questions of the target."""
        return self.target.others(output, images.located(self.geometries), kind)


def probability(target: Any = None) -> Target:
    """Explain the probability of a class, 0 to 1, instead of its logit.

    The probability is the softmax of the scores, or the score itself if the model's last operation is a sigmoid or a
    softmax. If the model returns one number per image and has two class names, it is the sigmoid of that number for
    class 1. Unlike the logit, a softmax compares the class with all others. Its gradient vanishes if the model is
    certain.

    Args:
        target: A class index or name, None for the top class, or a list with one of these per image.
    """
    return Probability(ClassTarget(target))


def contrast(target: Any, against: Any) -> Target:
    """Explain one class rather than another: the difference of their scores, in the units of the model's output.

    Args:
        target: A class index or name, None for the top class, or a list with one of these per image.
        against: The other class, in the same form.
    """
    return Contrast(ClassTarget(target), ClassTarget(against))


def of_image(target: TargetLike, number: int, images: int, top: int | None) -> Any:
    """Return the target of one of several images, with its class `top` if it is the top class."""
    entry = per_image(target, images)[number]
    if entry is not target:  # of a list
        number, images = 0, 1
    if isinstance(entry, Probability):
        return probability(of_image(entry.target.classes, number, images, top))
    if isinstance(entry, Contrast):
        against = per_image(entry.against.classes, images)[number]
        return contrast(of_image(entry.target.classes, number, images, top), against)
    return top if entry is None else entry


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

    All targets of one call must be neurons of one layer. The layer of a CAM must be before that layer.

    Args:
        layer: The name of the layer, as in `model.named_modules()`, or the module itself. Its first output tensor is
            read: (N, K); (N, K, h, w) or (N, h, w, K); or tokens (N, T, K). Convolutions, linear layers and the
            positions of maps and patches in the image show which axis holds the channels.
        channel: The index of the channel.
        at: The position in the other axes of the output, (row, column) or the index of a token. By default the mean
            over all positions.

    Raises:
        TargetError: An index is not a non-negative integer. In `attribute`: there is no such channel or
            position, or the axis of the channels cannot be determined.
        LayerError: In `attribute`: the model has no such layer, or `layer` is neither a name nor a module.
    """
    position = None if at is None else tuple(map(class_number, at if isinstance(at, Sequence) else (at,)))
    return Neuron(layer, class_number(channel), position)


def as_target(target: TargetLike, images: int = 1) -> Target:
    """Convert classes or a function to a target. Raises TargetError for a wrong number of targets."""
    if isinstance(target, Target):
        return target
    name = getattr(target, "__name__", "")
    is_public = isinstance(target, FunctionType) and str(target.__module__).startswith(f"{__package__}.")
    if is_public or isinstance(target, type):
        raise TargetError(f"the target is {name} itself; call it: {name}(...)")
    if callable(target) and not isinstance(target, Tensor):
        return FunctionTarget(target)
    if isinstance(target, list | tuple) and any(isinstance(part, Target) or callable(part) for part in target):
        return TargetList(tuple(map(as_target, per_image(target, images))))
    return ClassTarget(target)


# Scores of classes, and class names


def output_tensor(output: Any) -> Tensor:
    """Return the tensor of scores: the output itself, its `.logits`, `["out"]`, or its only tensor.

    Raises:
        TargetError: There are several tensors, and none of them has such a name.
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
        hint = 'pass "text:a photo of a cat" or saliency.similarity(reference) as the target'
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
        TargetError: The embeddings have another shape.
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


def as_categories(like: Any) -> tuple[str, ...]:
    """Convert a sequence of names, or a mapping of index to name or back, to class names in the order of the output.

    Raises:
        TargetError: `like` is neither of these, or contains something other than names.
    """
    if isinstance(like, PartialNames):
        return like
    kind: type[tuple[str, ...]] = tuple
    if isinstance(like, Mapping) and all(is_integer(index, least=0) for index in like.values()):
        like = {index: name for name, index in like.items()}  # class_to_idx of torchvision's datasets
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
    """Return one class per image; a single class applies to all. Raises TargetError for a wrong number or shape."""
    if isinstance(classes, Tensor | np.ndarray):
        if classes.ndim > 1:
            hint = "; for scores or one-hot rows, pass target.argmax(1)" if classes.ndim == 2 else ""
            raise TargetError(f"got a target of shape {tuple(classes.shape)}; expected (N,), one class per image{hint}")
        classes = classes.tolist()
    if isinstance(classes, str) or not isinstance(classes, Sequence):
        return [classes] * images
    if len(classes) != images:
        hint = "pass one for all, or one per image (several classes of one image: attribute_classes)"
        is_one_hot = len(classes) > 2 and max(map(str, classes)) in ("1", "1.0") and sum(map(bool, classes)) == 1
        if images == 1 and is_one_hot:
            hint = f"it looks one-hot; pass the class, {[*map(bool, classes)].index(True)}"
        raise TargetError(f"got {len(classes)} targets for {plural(images, 'image')}; {hint}")
    return list(classes)


def class_index(label: Any, categories: Categories) -> int:
    """Return the index of a class, given by index, name, or the digits of the index.

    For an unknown name, TargetError lists the closest names. Digits are a name if a class has that name.
    """
    if not isinstance(label, str):
        index = label if type(label) is int and label >= 0 else class_number(label)
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
    """Return the classes with a name, in its case, in another case, or as a part of "tabby, tabby cat"."""
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
        raise TargetError(f"expected a class index or a class name, got {described(label)} ({type(label).__name__})")
    if int(label) < 0:
        raise TargetError(f"class {label} is negative; classes are numbered from 0")
    return int(label)


def require_class(index: int, classes: int, owner: str = "the classes of the model's output") -> None:
    """Raise TargetError unless a class index is less than the number of classes."""
    if index >= classes:
        raise TargetError(f"class {index} is outside 0..{classes - 1}, {owner}")
