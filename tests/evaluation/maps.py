"""Explanations with given maps, for tests of metrics."""

from __future__ import annotations

from torch import Tensor

from saliency import Explanation
from saliency.targets.question import QuestionFacts


def explanation_of(maps: Tensor) -> Explanation:
    """A signed explanation with the maps (N, H, W) as its values."""
    count = len(maps)
    return Explanation(
        maps[:, None],
        maps.new_zeros(count),
        questions=(QuestionFacts("class 0", 0),) * count,
        frames=(None,) * count,
        input_size=(int(maps.shape[1]), int(maps.shape[2])),
        method="vanilla_gradient",
        title="vanilla_gradient",
        units="vanilla_gradient value",
        sign="signed",
    )
