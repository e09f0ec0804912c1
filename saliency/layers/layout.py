"""Layout of a layer's output in memory: channels first, channels last, or tokens with a prefix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor, nn

from ..errors import LayerError, MethodError
from ..hooks.forward_args import bound_value

Grid = tuple[int, int]
LayoutFunction = Callable[[Tensor], Tensor]
"""A function from the output of a layer to maps (N, K, h, w), which only selects and rearranges its values."""

_CONVOLUTIONS_AND_NORMS = (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d, nn.InstanceNorm2d)
_POOLING = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a layer's output in memory, and its conversion to maps.

    `kind` is "NCHW", "NHWC", "NTC" (tokens) or "given", with the user's `function`; `prefix` is the number of tokens
    without a position (class, distillation and register tokens).
    """

    kind: str
    grid: Grid
    prefix: int = 0
    function: LayoutFunction | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the tensor as maps (N, K, h, w)."""
        if self.function is not None:
            return self.function(tensor)
        if self.kind == "NCHW":
            return tensor
        if self.kind == "NHWC":
            return tensor.permute(0, 3, 1, 2)
        cells = tensor[:, self.prefix :].transpose(1, 2)  # (N, K, h * w)
        return cells.reshape(*cells.shape[:2], *self.grid)


GIVE_LAYOUT = "pass layout=, a function from this output to maps (N, K, h, w)"
"""The advice in errors about an output whose layout is not recognised."""
_given: ContextVar[LayoutFunction | None] = ContextVar("layout", default=None)


def as_layout(option: str, function: object) -> LayoutFunction:
    """Return a function as a layout. Raises MethodError if it is not a function."""
    if not callable(function):
        raise MethodError(f"{option}={function!r}: expected a function from a layer's output to maps (N, K, h, w)")
    return function


def bind_layout(function: LayoutFunction | None) -> AbstractContextManager[None]:
    """Read all layers by the user's function in a block; None recognises their layouts."""
    return bound_value(_given, function)


def given_layout(tensor: Tensor) -> Layout | None:
    """Return the layout of a layer's output by the user's function; None without one.

    Raises:
        LayerError: The function does not return maps.
    """
    function = _given.get()
    if function is None:
        return None
    maps = function(tensor)
    if maps.dim() != 4 or len(maps) != len(tensor):
        raise LayerError(
            f"layout: expected maps ({len(tensor)}, K, h, w) of {tuple(tensor.shape)}, got {tuple(maps.shape)}"
        )
    return Layout("given", (maps.shape[2], maps.shape[3]), function=function)


def layout_from(
    shape: tuple[int, ...], images: int, size: Grid, grids: Iterable[Grid], *, channels_first: bool = False
) -> Layout | None:
    """Return the layout of an output of this shape; None if it has no spatial extent.

    Args:
        shape: The shape of the output.
        images: The number of images in the batch.
        size: (H, W) of the input; the grid must have its aspect ratio.
        grids: Grids of other layers of the model, for tokens.
        channels_first: Whether the layer is known to be channels first, regardless of the aspect ratio.
    """
    if len(shape) not in (3, 4) or shape[0] != images or 0 in shape:
        return None
    if len(shape) == 4:
        first, last = _misfit(shape[2:], size), _misfit(shape[1:3], size)
        if channels_first or first <= last:
            return Layout("NCHW", (shape[2], shape[3])) if channels_first or first <= 2 else None
        return Layout("NHWC", (shape[1], shape[2])) if last <= 2 else None
    return _token_layout(shape[1], size, grids)


def is_channels_first(module: nn.Module) -> bool:
    """Return whether a layer returns channels first by definition, like convolutions, their norms and pooling."""
    return isinstance(module, (*_CONVOLUTIONS_AND_NORMS, *_POOLING))


def _misfit(grid: tuple[int, ...], size: Grid) -> float:
    """Return by how many cells a grid differs from the aspect ratio of the input."""
    (h, w), (height, width) = grid, size
    if h > height or w > width:
        return math.inf
    return min(abs(h - w * height / width), abs(w - h * width / height))


def is_channels_first_map(shape: tuple[int, ...], size: Grid) -> bool:
    """Return whether an output of this shape is channels first, with the aspect ratio of the input."""
    return len(shape) == 4 and shape[2] * shape[3] > 1 and _misfit(shape[2:], size) <= 2


def _token_layout(tokens: int, size: Grid, grids: Iterable[Grid]) -> Layout | None:
    """Return the layout of a number of tokens: a grid of cells after a short prefix.

    The grid of another layer is preferred; otherwise the cells are square and the prefix is the shortest possible. More
    tokens than the finest grid has, such as those of objects, have no layout.
    """
    sizes = [(tokens - h * w, (h, w)) for h, w in grids]
    known = [(prefix, grid) for prefix, grid in sizes if 0 <= prefix <= 16]
    if known:
        prefix, grid = min(known)
        return Layout("NTC", grid, prefix)
    if sizes and min(sizes)[0] > 16:
        return None
    for prefix in range(min(17, tokens)):
        cells = tokens - prefix
        divisors = [h for h in range(1, math.isqrt(cells) + 1) if cells % h == 0]
        pairs = [(h, cells // h) for h in divisors] + [(cells // h, h) for h in divisors]
        grid = min(pairs, key=lambda pair: _misfit(pair, size))
        if cells > 1 and _misfit(grid, size) < 1:
            return Layout("NTC", grid, prefix)
    return None
