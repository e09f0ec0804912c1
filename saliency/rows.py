"""The target of one image of a batch, for any number of passes of that image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import TargetError
from .nests import mapped
from .targets import ClassScore, Contrast, Probability, Target


def for_rows(target: Target, images: int, image: int, count: int) -> Target:
    """The target of one image of a batch, as a function of an output whose rows are `count` passes of that image.

    Args:
        target: The settled target of the batch.
        images: The number of images in the batch.
        image: The image's place in it.
        count: The number of passes.
    """
    if isinstance(target, ClassScore):
        return ClassScore((target.classes[image],) * count)
    if isinstance(target, Probability):
        return Probability(_class_score(target.score, image, count))
    if isinstance(target, Contrast):
        return Contrast(_class_score(target.score, image, count), _class_score(target.against, image, count))
    return RowByRow(target, images, image, count)


def _class_score(score: ClassScore, image: int, count: int) -> ClassScore:
    return ClassScore((score.classes[image],) * count)


@dataclass(frozen=True, slots=True)
class RowByRow:
    """Any function of a batch's output, asked for one of its images.

    What it does with the rows is its own business, so each pass is put before it as a whole batch of its rows.
    """

    target: Target
    images: int
    image: int
    count: int

    def __call__(self, output: Any) -> Tensor:
        """The scores (k,) of an output of k passes. Raises TargetError where it gives no score per image."""
        scores: list[Any] = [self.target(self._batch(output, row)) for row in range(self.count)]
        for each in scores:
            if not isinstance(each, Tensor) or each.shape != (self.images,):
                raise TargetError(f"the target gives no score per image: expected a tensor ({self.images},) every time")
        return torch.stack([each[self.image] for each in scores])

    def _batch(self, output: Any, row: int) -> Any:
        """An output as that of a batch, each image of which is one pass."""

        def repeated(tensor: Tensor) -> Tensor:
            if not tensor.dim() or len(tensor) != self.count:
                return tensor
            return tensor[row : row + 1].expand(self.images, *tensor.shape[1:])

        return mapped(output, repeated)
