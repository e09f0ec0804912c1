"""What is explained: from the model's output to one score per image.

A target is any function from the model's output to scores of shape (N,). The ready-made ones also take class names,
check what can be checked before the model is run, and know what to call themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import TargetError
from .class_names import (
    Categories,
    class_index,
    class_name,
    class_number,
    class_probabilities,
    class_scores,
    output_tensor,
    per_image,
)

Target = Callable[[Any], Tensor]
"""Model output -> scores (N,)."""

TargetLike = int | str | Sequence[int] | Sequence[str] | Tensor | Target | None
"""A class index or name, one of them per image, a function of the output, or None for the top class."""


class OutputTarget(ABC):
    """A target that the toolkit knows: it resolves class names, settles on the first output, and has a name."""

    @abstractmethod
    def resolve(self, images: int, categories: Categories) -> OutputTarget:
        """The same with indices for names, one per image. Raises TargetError where that cannot be."""

    def resolve_from(self, output: Any) -> OutputTarget:
        """The same with everything fixed that depends on the output, such as the top class."""
        return self

    @abstractmethod
    def __call__(self, output: Any) -> Tensor:
        """The scores (N,) of an output."""

    @abstractmethod
    def repeated(self, image: int, count: int) -> OutputTarget:
        """The settled target of one image, for an output whose rows are `count` passes of that image."""

    @abstractmethod
    def names(self, images: int, categories: Categories) -> tuple[str, ...]:
        """What is explained, in words, one per image."""

    def indices(self, images: int) -> tuple[int | None, ...]:
        """The class indices, one per image; None where the target is no class."""
        return (None,) * images


@dataclass(frozen=True, slots=True)
class ClassScore(OutputTarget):
    """The model's own output for a class: a logit, where the model returns logits.

    `classes` is an index or name, one of them per image, or None for the top class of each image.
    """

    classes: Any = None

    def resolve(self, images: int, categories: Categories) -> ClassScore:
        """Raises TargetError for unknown names, indices that are no integers, and a wrong number of them."""
        if self.classes is None:
            return self
        return ClassScore(tuple(class_index(each, categories) for each in per_image(self.classes, images)))

    def resolve_from(self, output: Any) -> ClassScore:
        """The top class of each image, where none was named. Raises TargetError for a class that is not there."""
        scores = class_scores(output)
        if self.classes is None:
            return ClassScore(tuple(scores.detach().argmax(1).tolist()))
        if len(scores) != len(self.classes):
            raise TargetError(
                f"the model gave {len(scores)} rows of scores for {len(self.classes)} image"
                f"{'s' * (len(self.classes) != 1)}; pass a function of the output as the target"
            )
        for index in self.classes:
            if index >= scores.shape[1]:
                raise TargetError(
                    f"class {index} is outside 0..{scores.shape[1] - 1}, the classes of the model's output"
                )
        return self

    def __call__(self, output: Any) -> Tensor:
        """The scores (N,), in the units of the model's output."""
        scores = class_scores(output)
        index = torch.tensor(self.classes, device=scores.device)
        return scores.gather(1, index[:, None]).squeeze(1)

    def repeated(self, image: int, count: int) -> ClassScore:
        """The class of one image."""
        return ClassScore((self.classes[image],) * count)

    def names(self, images: int, categories: Categories) -> tuple[str, ...]:
        """The class names; `class 7` where the model carries none."""
        if self.classes is None:
            return ("top class",) * images
        return tuple(class_name(index, categories) for index in self.classes)

    def indices(self, images: int) -> tuple[int | None, ...]:
        """The class indices, one per image."""
        return (None,) * images if self.classes is None else tuple(self.classes)


@dataclass(frozen=True, slots=True)
class Probability(OutputTarget):
    """See `probability`."""

    score: ClassScore

    def resolve(self, images: int, categories: Categories) -> Probability:
        """With indices for names."""
        return replace(self, score=self.score.resolve(images, categories))

    def resolve_from(self, output: Any) -> OutputTarget:
        """With the top class, where none was named."""
        return replace(self, score=self.score.resolve_from(output))

    def __call__(self, output: Any) -> Tensor:
        """The probabilities (N,), 0 to 1."""
        return self.score(class_probabilities(output))

    def repeated(self, image: int, count: int) -> Probability:
        """The probability of the class of one image."""
        return replace(self, score=self.score.repeated(image, count))

    def names(self, images: int, categories: Categories) -> tuple[str, ...]:
        """For example `probability of espresso`."""
        return tuple(f"probability of {name}" for name in self.score.names(images, categories))

    def indices(self, images: int) -> tuple[int | None, ...]:
        """The class indices, one per image."""
        return self.score.indices(images)


@dataclass(frozen=True, slots=True)
class Contrast(OutputTarget):
    """See `contrast`."""

    score: ClassScore
    against: ClassScore

    def resolve(self, images: int, categories: Categories) -> Contrast:
        """With indices for names."""
        return Contrast(self.score.resolve(images, categories), self.against.resolve(images, categories))

    def resolve_from(self, output: Any) -> Contrast:
        """With the top class, where none was named."""
        settled = Contrast(self.score.resolve_from(output), self.against.resolve_from(output))
        for index, other in zip(settled.score.classes, settled.against.classes, strict=True):
            if index == other:
                raise TargetError(f"contrast compares class {index} with itself; name another class to speak against")
        return settled

    def __call__(self, output: Any) -> Tensor:
        """The differences (N,) of the two scores."""
        return self.score(output) - self.against(output)

    def repeated(self, image: int, count: int) -> Contrast:
        """The two classes of one image."""
        return Contrast(self.score.repeated(image, count), self.against.repeated(image, count))

    def names(self, images: int, categories: Categories) -> tuple[str, ...]:
        """For example `tiger cat rather than tabby`."""
        pairs = zip(self.score.names(images, categories), self.against.names(images, categories), strict=True)
        return tuple(f"{name} rather than {other}" for name, other in pairs)

    def indices(self, images: int) -> tuple[int | None, ...]:
        """The indices of the class that is explained, one per image."""
        return self.score.indices(images)


@dataclass(frozen=True, slots=True, eq=False)
class Region(OutputTarget):
    """See `region`."""

    label: int | str
    where: Tensor | None = None

    def resolve(self, images: int, categories: Categories) -> Region:
        """With an index for the name."""
        return replace(self, label=class_index(self.label, categories))

    def resolve_from(self, output: Any) -> Region:
        """With the pixels that the model itself gives to the class, where none were named."""
        scores = self._scores(output)
        index = int(self.label)
        if index >= scores.shape[1]:
            raise TargetError(f"class {index} is outside 0..{scores.shape[1] - 1}, the classes of the model's output")
        if self.where is None:
            where = scores.detach().argmax(1) == index
            if not where.flatten(1).any(1).all():
                empty = (~where.flatten(1).any(1)).nonzero().flatten().tolist()
                raise TargetError(
                    f"the model gives no pixel to class {index} in image {empty[0]}; "
                    f"name the pixels: region({index}, where)"
                )
            return replace(self, where=where)
        where = self.where.to(scores.device).bool()
        shape = (scores.shape[0], *scores.shape[2:])
        if where.shape not in (shape, shape[1:]):
            raise TargetError(
                f"the region has shape {tuple(where.shape)}; expected {shape[1:]}, or {shape} for one per image"
            )
        where = where.expand(shape)
        if not where.flatten(1).any(1).all():
            raise TargetError("the region holds no pixel; mark at least one with True")
        return replace(self, where=where)

    def __call__(self, output: Any) -> Tensor:
        """The mean scores (N,) of the class over its pixels."""
        scores = self._scores(output)[:, int(self.label)]
        assert self.where is not None  # noqa: S101 - settle() comes first
        # Picked rather than multiplied by a mask, which would look like a ReLU written by hand.
        return torch.stack([each[where].mean() for each, where in zip(scores, self.where, strict=True)])

    def repeated(self, image: int, count: int) -> Region:
        """The pixels of one image."""
        assert self.where is not None  # noqa: S101 - settle() comes first
        return replace(self, where=self.where[image].expand(count, *self.where.shape[1:]))

    def names(self, images: int, categories: Categories) -> tuple[str, ...]:
        """For example `region of cat`."""
        return (f"region of {class_name(int(self.label), categories)}",) * images

    @staticmethod
    def _scores(output: Any) -> Tensor:
        scores = output_tensor(output)
        if scores.dim() != 4:
            raise TargetError(
                f"a region needs an output of shape (N, classes, H, W); this model's is {tuple(scores.shape)}"
            )
        return scores


@dataclass(frozen=True, slots=True)
class Value(OutputTarget):
    """See `value`."""

    index: tuple[int, ...]

    def resolve(self, images: int, categories: Categories) -> Value:
        """Itself: there is no name to look up."""
        return self

    def resolve_from(self, output: Any) -> Value:
        """Itself, once the index is known to lie in the output. Raises TargetError where it does not."""
        shape = tuple(output_tensor(output).shape[1:])
        inside = len(self.index) == len(shape) and all(0 <= i < n for i, n in zip(self.index, shape, strict=True))
        if not inside:
            raise TargetError(f"there is no value {self.index} in an output of shape {shape} per image")
        return self

    def __call__(self, output: Any) -> Tensor:
        """The values (N,), in the units of the model's output."""
        values = output_tensor(output)
        for index in reversed(self.index):
            values = values[..., index]
        return values

    def repeated(self, image: int, count: int) -> Value:
        """Itself: the place is the same in every row."""
        return self

    def names(self, images: int, categories: Categories) -> tuple[str, ...]:
        """For example `value 3`."""
        return (" ".join(["value", *map(str, self.index)]),) * images


def probability(target: Any = None) -> Target:
    """The softmax probability of a class, 0 to 1, in place of its logit.

    Its gradient vanishes where the model is sure, and it speaks for a class against all others.

    Args:
        target: A class index or name, one of them per image, or None for the top class.
    """
    return Probability(ClassScore(target))


def contrast(target: Any, against: Any) -> Target:
    """Why this class rather than that one: the difference of their scores, in the units of the model's output.

    Args:
        target: A class index or name, one of them per image, or None for the top class.
        against: The same, for the class that is spoken against.
    """
    return Contrast(ClassScore(target), ClassScore(against))


def region(label: int | str, where: Any = None) -> Target:
    """The mean score of a class over some pixels of a segmentation output (N, classes, H, W).

    Args:
        label: The class, by index or name.
        where: (H, W) or (N, H, W), true at the pixels that count, in the size of the output. None takes the pixels that
            the model itself gives to the class.

    Source: Vinogradova et al., "Towards Interpretable Semantic Segmentation via Gradient-weighted Class Activation
        Mapping" (2020), https://arxiv.org/abs/2002.11434, who take the sum in place of the mean.
    """
    if where is None:
        return Region(label)
    try:
        given = where.detach() if isinstance(where, Tensor) else torch.as_tensor(np.asarray(where), device="cpu")
        return Region(label, given)
    except TypeError as error:
        raise TargetError(f"the region's pixels are an array of true and false, got {type(where).__name__}") from error


def value(*index: int) -> Target:
    """One number of the output, as of a regression: `value(3)` is `output[:, 3]`, `value()` an output of shape (N,)."""
    for each in index:
        class_number(each)
    return Value(index)


def as_target(target: TargetLike, images: int, categories: Categories = None) -> Target:
    """Whatever the user named, as a function from output to scores, with names and counts checked.

    Raises:
        TargetError: An unknown class name, an index that is no integer or negative, or a wrong number of targets.
    """
    if isinstance(target, OutputTarget):
        return target.resolve(images, categories)
    if callable(target) and not isinstance(target, Tensor):
        return target
    return ClassScore(target).resolve(images, categories)
