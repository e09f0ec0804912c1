"""Explanations with given maps, for tests of metrics."""

from __future__ import annotations

from torch import Tensor

from saliency import Explanation


def explanation_of(maps: Tensor) -> Explanation:
    """A signed explanation with the maps (N, H, W) as its values."""
    count = len(maps)
    return Explanation(
        values=maps[:, None],
        scores=maps.new_zeros(count),
        method="vanilla_gradient",
        settings={},
        target=(0,) * count,
        target_names=("class 0",) * count,
        probabilities=None,
        layer=None,
        input_size=(int(maps.shape[1]), int(maps.shape[2])),
        frames=(None,) * count,
        sign="signed",
    )
