"""How a layer's output lies in memory: channels first, channels last, or tokens with some in front."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

Grid = tuple[int, int]

_CHANNELS_FIRST = (
    nn.Conv2d,
    nn.ConvTranspose2d,
    nn.BatchNorm2d,
    nn.InstanceNorm2d,
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d,
)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a layer's output lies in memory, and how to read it as maps.

    `kind` is "NCHW", "NHWC" or "NTC" (tokens); `prefix` counts the tokens that stand for no place (class, distillation
    and register tokens).
    """

    kind: str
    grid: Grid
    prefix: int = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor as maps (N, K, h, w)."""
        if self.kind == "NCHW":
            return tensor
        if self.kind == "NHWC":
            return tensor.permute(0, 3, 1, 2)
        places = tensor[:, self.prefix :].transpose(1, 2)  # (N, K, h * w)
        return places.reshape(*places.shape[:2], *self.grid)


def layout_from(
    shape: tuple[int, ...], images: int, size: Grid, grids: Iterable[Grid], *, channels_first: bool = False
) -> Layout | None:
    """How an output of this shape lies in memory; None where it has no extent in space.

    Args:
        shape: The shape of the output.
        images: The number of images in the batch.
        size: (H, W) of the input: the grid must have its proportions.
        grids: Grids that the model was seen to use, for tokens.
        channels_first: Whether it is known to be channels first, so that its proportions need not tell.
    """
    if len(shape) < 3 or shape[0] != images or 0 in shape:
        return None
    if len(shape) == 4:
        first, last = _misfit(shape[2:], size), _misfit(shape[1:3], size)
        if channels_first or first <= last:
            return Layout("NCHW", (shape[2], shape[3])) if channels_first or first <= 2 else None
        return Layout("NHWC", (shape[1], shape[2])) if last <= 2 else None
    return _token_layout(shape[1], size, grids) if len(shape) == 3 else None


def is_channels_first(module: nn.Module) -> bool:
    """Whether a layer gives channels first by its definition, as convolutions, their norms and pooling do."""
    return isinstance(module, _CHANNELS_FIRST)


def is_plain(shape: tuple[int, ...], size: Grid) -> bool:
    """Whether the proportions of an output fit channels first, and no worse than channels last."""
    return len(shape) == 4 and _misfit(shape[2:], size) <= min(2, _misfit(shape[1:3], size))


def _misfit(grid: tuple[int, ...], size: Grid) -> float:
    """By how many cells a grid differs from the input's proportions."""
    (h, w), (height, width) = grid, size
    if h > height or w > width:
        return math.inf
    return min(abs(h - w * height / width), abs(w - h * width / height))


def is_map(shape: tuple[int, ...], size: Grid) -> bool:
    """Whether an output of this shape is channels first, with an extent in the proportions of the input."""
    return len(shape) == 4 and shape[2] * shape[3] > 1 and _misfit(shape[2:], size) <= 2


def _token_layout(tokens: int, size: Grid, grids: Iterable[Grid]) -> Layout | None:
    """The grid whose cells, with a few tokens in front, make up the number of tokens.

    A grid that the model was seen to use comes first; else the one with square cells and the fewest tokens in front.
    """
    seen = [(tokens - h * w, (h, w)) for h, w in grids if 0 <= tokens - h * w <= 16]
    if seen:
        prefix, grid = min(seen)
        return Layout("NTC", grid, prefix)
    for prefix in range(min(17, tokens)):
        cells = tokens - prefix
        divisors = [h for h in range(1, math.isqrt(cells) + 1) if cells % h == 0]
        pairs = [(h, cells // h) for h in divisors] + [(cells // h, h) for h in divisors]
        grid = min(pairs, key=lambda pair: _misfit(pair, size))
        if cells > 1 and _misfit(grid, size) < 1:
            return Layout("NTC", grid, prefix)
    return None
