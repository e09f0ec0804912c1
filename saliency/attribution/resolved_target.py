"""The target of one call: settled on the first output, checked, and able to say its name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ..errors import NonFiniteError, TargetError
from ..hooks.autograd_graph import tensor_version
from ..targets.class_names import Categories, class_probabilities, class_scores
from ..targets.targets import ClassScore, OutputTarget, TargetLike, as_target
from .output_rows import OutputRows, repeat_target


class ResolvedTarget:
    """The target of one call. It settles on the first output that it sees, and keeps to that.

    So the top class is chosen once, on the clean image, however many passes a method makes.
    """

    def __init__(self, target: TargetLike, images: int, categories: Categories = None) -> None:
        self.images = images
        self.categories = categories
        self.target = as_target(target, images, categories)
        self.probabilities: Tensor | None = None
        self._settled = False

    def __call__(self, output: Any) -> Tensor:
        """The scores (N,) of an output.

        Raises:
            TargetError: The target does not fit the output.
            NonFiniteError: A score is NaN or infinite.
        """
        if not self._settled:
            if isinstance(self.target, OutputTarget):
                self.target = self.target.resolve_from(output)
            self.probabilities = self._probabilities(output)
            self._settled = True
        before = _versions(output)
        scores = self.target(output)
        if _versions(output) != before:
            raise TargetError("the target changed the model's output in place; let it work on output.clone()")
        self._check(scores)
        return scores

    @property
    def indices(self) -> tuple[int | None, ...]:
        """The class indices, one per image; None where the target is no class."""
        return self.target.indices(self.images) if isinstance(self.target, OutputTarget) else (None,) * self.images

    @property
    def names(self) -> tuple[str, ...]:
        """What is explained, in words, one per image."""
        if isinstance(self.target, OutputTarget):
            return self.target.names(self.images, self.categories)
        return (getattr(self.target, "__name__", type(self.target).__name__).strip("<>"),) * self.images

    def rows(self, image: int, count: int, rows: Callable[[], OutputRows]) -> ResolvedTarget:
        """The settled target of one image, for an output whose rows are `count` passes of that image.

        Args:
            image: The image's place in the batch.
            count: The number of passes.
            rows: Says how the model's output divides into images; asked where the target is a function.
        """
        if not self._settled:
            raise ValueError("the target has seen no output yet: run the batch as it is first")
        selection = ResolvedTarget(repeat_target(self.target, self.images, image, count, rows), count, self.categories)
        selection._settled = True
        return selection

    def _probabilities(self, output: Any) -> Tensor | None:
        """The probability of each image's class; None without classes. An output that sums to 1 is taken as it is."""
        if None in self.indices:
            return None
        if class_scores(output).shape[1] == 1:
            return None
        return ClassScore(self.indices)(class_probabilities(output).detach().float())

    def _check(self, scores: Any) -> None:
        if not isinstance(scores, Tensor) or scores.shape != (self.images,) or not scores.is_floating_point():
            came = (
                f"{scores.dtype} of shape {tuple(scores.shape)}"
                if isinstance(scores, Tensor)
                else type(scores).__name__
            )
            raise TargetError(
                f"the target returned {came}; expected one score per image, a float tensor ({self.images},)"
            )
        for index, score in enumerate(scores.tolist()):
            if not math.isfinite(score):
                raise NonFiniteError(f"the score of image {index} is {score}; the model's output is not finite")


def _versions(output: Any) -> list[int]:
    """How often each tensor of an output was changed in place."""
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else [output]
    return [tensor_version(each) for each in parts if isinstance(each, Tensor)]
