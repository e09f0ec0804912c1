"""Layout of a layer's output in memory: channels first, channels last, or tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import LayerError, MethodError
from ..hooks.forward_args import bound_value
from .positions import Grid, grid_of

LayoutFunction = Callable[[Tensor], Tensor]
"""A function from the output of a layer to maps (N, K, h, w), which only selects and rearranges its values."""

_CONVOLUTIONS_AND_NORMS = (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d, nn.InstanceNorm2d)
_POOLING = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a layer's output in memory, and its conversion to maps.

    `kind` is "NCHW", "NHWC", "NTC" (tokens) or "given", with the user's `function`; `tokens` are the numbers of the
    tokens of all cells, in rows. Others have no position (class, distillation and register tokens, prompts).
    """

    kind: str
    grid: Grid
    tokens: Sequence[int] = ()
    function: LayoutFunction | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the tensor as maps (N, K, h, w)."""
        if self.function is not None:
            return self.function(tensor)
        if self.kind == "NCHW":
            return tensor
        if self.kind == "NHWC":
            return tensor.permute(0, 3, 1, 2)
        if isinstance(self.tokens, range):
            cells = tensor[:, self.tokens.start : self.tokens.stop]
        else:
            cells = tensor[:, torch.tensor(self.tokens, device=tensor.device)]
        return cells.transpose(1, 2).reshape(len(cells), -1, *self.grid)  # (N, K, h, w)


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


def layout_from(shape: tuple[int, ...], images: int, size: Grid, *, channels_first: bool = False) -> Layout | None:
    """Return the layout of an output of this shape; None if it is not a shape of maps.

    Args:
        shape: The shape of the output.
        images: The number of images in the batch.
        size: (H, W) of the input; the grid must have its aspect ratio.
        channels_first: Whether the layer is known to be channels first, regardless of the aspect ratio.
    """
    if len(shape) != 4 or shape[0] != images or 0 in shape:
        return None
    first, last = _misfit(shape[2:], size), _misfit(shape[1:3], size)
    if channels_first or first <= last:
        return Layout("NCHW", (shape[2], shape[3])) if channels_first or first <= 2 else None
    return Layout("NHWC", (shape[1], shape[2])) if last <= 2 else None


def traced_layout(
    shape: tuple[int, ...], x: Tensor, positions: Tensor | None, *, channels_first: bool
) -> Layout | None:
    """Return the layout of an output in a traced forward; None if it has no spatial extent.

    Args:
        shape: The shape of the output.
        x: (N, C, H, W) the batch.
        positions: The positions of the output, (2, N, tokens) or (2, N, h, w); None if they are not known.
        channels_first: As for `layout_from`.
    """
    layout = layout_from(shape, len(x), (int(x.shape[-2]), int(x.shape[-1])), channels_first=channels_first)
    if (layout is not None and layout.kind == "NCHW") or positions is None or shape[0] != len(x):
        return layout if layout is not None and layout.kind == "NCHW" else None
    tokens = token_layout(positions.flatten(2), x)
    if len(shape) == 3 or tokens is None:
        return tokens
    is_in_rows = tokens.grid == shape[1:3] and tokens.tokens == range(math.prod(tokens.grid))
    return Layout("NHWC", tokens.grid) if is_in_rows else None


def token_layout(positions: Tensor, x: Tensor) -> Layout | None:
    """Return the layout of tokens at positions (2, N, tokens); None if they are not a grid that covers the image."""
    grid = grid_of(positions, (int(x.shape[-2]), int(x.shape[-1])))
    return None if grid is None else Layout("NTC", *grid)


def is_channels_first(module: nn.Module) -> bool:
    """Return whether a layer returns channels first by definition, like convolutions, their norms and pooling."""
    return isinstance(module, (*_CONVOLUTIONS_AND_NORMS, *_POOLING))


def _misfit(grid: tuple[int, ...], size: Grid) -> float:
    """Return by how many cells a grid differs from the aspect ratio of the input."""
    (h, w), (height, width) = grid, size
    if h > height or w > width:
        return math.inf
    return min(abs(h - w * height / width), abs(w - h * width / height))
