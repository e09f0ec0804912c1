"""The target of one call: resolved from the first output, checked, and named."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..errors import NonFiniteError, TargetError
from ..hooks.autograd_graph import tensor_version
from ..hooks.pytree import tree_tensors
from ..targets.class_names import Categories, class_probabilities, class_scores
from ..targets.targets import ClassScore, OutputTarget, TargetLike, as_target
from .output_rows import OutputRows, repeat_target


class ResolvedTarget:
    """Target of one call, resolved from the first output and constant from then on.

    The top class is chosen only once, on the unmodified image, regardless of the number of passes.
    """

    def __init__(self, target: TargetLike, images: int, categories: Categories = None) -> None:
        self.images = images
        self.categories = categories
        self.target = as_target(target, images, categories)
        self.probabilities: Tensor | None = None
        self._is_resolved = False

    def __call__(self, output: Any) -> Tensor:
        """Return the scores (N,) of an output.

        Raises:
            TargetError: The target does not fit the output.
            NonFiniteError: A score is NaN or infinite.
        """
        if not self._is_resolved:
            if isinstance(self.target, OutputTarget):
                self.target = self.target.resolve_from(output)
            self.probabilities = self._probabilities(output)
            self._is_resolved = True
        before = _versions(output)
        scores = self.target(output)
        if _versions(output) != before:
            raise TargetError("the target changed the model's output in place; use output.clone() in it")
        self._check(scores)
        return scores

    @property
    def indices(self) -> tuple[int | None, ...]:
        """Class indices, one per image; None if the target is not a class."""
        return self.target.indices(self.images) if isinstance(self.target, OutputTarget) else (None,) * self.images

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the target, one per image."""
        if isinstance(self.target, OutputTarget):
            return self.target.names(self.images, self.categories)
        return (getattr(self.target, "__name__", type(self.target).__name__).strip("<>"),) * self.images

    def rows(self, image: int, count: int, rows: Callable[[], OutputRows]) -> ResolvedTarget:
        """Return the resolved target of one image, for an output whose rows are `count` passes of that image.

        Args:
            image: The index of the image in the batch.
            count: The number of passes.
            rows: Returns how the model's output divides into images; called if the target is a function.

        Raises:
            ValueError: The target is not resolved yet.
        """
        if not self._is_resolved:
            raise ValueError("the target is not resolved yet; call it with the output for the batch first")
        resolved = ResolvedTarget(repeat_target(self.target, self.images, image, count, rows), count, self.categories)
        resolved._is_resolved = True
        return resolved

    def _probabilities(self, output: Any) -> Tensor | None:
        """Return the probability of each image's class; None without classes. Outputs may already be probabilities."""
        if None in self.indices:
            return None
        if class_scores(output).shape[1] == 1:
            return None
        return ClassScore(self.indices)(class_probabilities(output).detach().float())

    def _check(self, scores: Any) -> None:
        if not isinstance(scores, Tensor) or scores.shape != (self.images,) or not scores.is_floating_point():
            shape = f"{scores.dtype} of shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else ""
            raise TargetError(
                f"the target returned {shape or type(scores).__name__}; expected one score per image, a float tensor "
                f"({self.images},)"
            )
        for index, score in enumerate(scores.tolist()):
            if not math.isfinite(score):
                raise NonFiniteError(f"the score of image {index} is {score}; the model's output is not finite")


def _versions(output: Any) -> list[int]:
    """Return how often each tensor of an output was changed in place."""
    return [tensor_version(tensor) for tensor in tree_tensors(output)]
