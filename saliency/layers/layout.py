"""Layout of a layer's output in memory: channels first, channels last, or tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import LayerError, MethodError
from .positions import Grid, grid_of

LayoutFunction = Callable[[Tensor], Tensor]
"""A function from the output of a layer to maps (N, K, h, w), which only selects and rearranges its values."""

_CHANNELS_FIRST = (  # by definition
    *(nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d, nn.InstanceNorm2d),
    *(nn.Conv3d, nn.ConvTranspose3d, nn.BatchNorm3d, nn.InstanceNorm3d),
    *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
    *(nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d, nn.InstanceNorm1d, nn.MaxPool1d, nn.AvgPool1d),
    *(nn.MaxPool3d, nn.AvgPool3d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d),
)


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a layer's output in memory, and its conversion to maps.

    `kind` is "NCHW" or "NHWC" (also of volumes), "NTC" (tokens), or "given", with the user's `function`; `tokens` are
    the numbers of the tokens of all cells, in rows. Others have no position (class, distillation and register tokens,
    prompts).
    """

    kind: str
    grid: Grid
    tokens: Sequence[int] = ()
    function: LayoutFunction | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the tensor as maps (N, K, h, w), or (N, K, d, h, w) of a volume."""
        if self.function is not None:
            return self.function(tensor)
        if self.kind == "NCHW":
            return tensor
        if self.kind == "NHWC":
            return tensor.movedim(-1, 1)
        if isinstance(self.tokens, range):
            cells = tensor[:, self.tokens.start : self.tokens.stop]
        else:
            cells = tensor[:, torch.tensor(self.tokens, device=tensor.device)]
        return cells.transpose(1, 2).reshape(len(cells), -1, *self.grid)  # (N, K, h, w)


GIVE_LAYOUT = "pass layout=, a function from this output to maps (N, K, h, w)"
"""The advice in errors about an output whose layout is not recognised."""


def as_layout(option: str, function: object) -> LayoutFunction:
    """Return a function as a layout. Raises MethodError if it is not a function."""
    if not callable(function):
        raise MethodError(f"{option}={function!r}: expected a function from a layer's output to maps (N, K, h, w)")
    return function


def given_layout(function: LayoutFunction, tensor: Tensor) -> Layout:
    """Return the layout of a layer's output by the user's function.

    Raises:
        LayerError: The function does not return maps.
    """
    maps = function(tensor)
    if maps.dim() not in (4, 5) or len(maps) != len(tensor):
        raise LayerError(
            f"layout: expected maps ({len(tensor)}, K, h, w) of {tuple(tensor.shape)}, got {tuple(maps.shape)}"
        )
    return Layout("given", tuple(maps.shape[2:]), function=function)


def layout_from(shape: tuple[int, ...], images: int, size: Grid, *, channels_first: bool = False) -> Layout | None:
    """Return the layout of an output of this shape; None if it is not a shape of maps.

    Args:
        shape: The shape of the output.
        images: The number of images in the batch.
        size: (H, W) or (D, H, W) of the input; the last two axes of the grid must have its aspect ratio.
        channels_first: Whether the layer is known to be channels first, regardless of the aspect ratio.
    """
    if len(shape) != len(size) + 2 or shape[0] != images or 0 in shape:
        return None
    if channels_first:
        return Layout("NCHW", tuple(shape[2:]))
    first, last = _misfit(shape[2:], size), _misfit(shape[1:-1], size)
    if first <= last:
        return Layout("NCHW", tuple(shape[2:])) if first <= 2 else None
    return Layout("NHWC", tuple(shape[1:-1])) if last <= 2 else None


def traced_layout(
    shape: tuple[int, ...], x: Tensor, positions: Tensor | None, *, channels_first: bool
) -> Layout | None:
    """Return the layout of an output in a traced forward; None if it has no spatial extent.

    Args:
        shape: The shape of the output.
        x: (N, C, H, W) the batch.
        positions: The positions of the output, (axes, N, tokens) or (axes, N, h, w); None if they are not known.
        channels_first: As for `layout_from`.
    """
    layout = layout_from(shape, len(x), tuple(x.shape[2:]), channels_first=channels_first)
    if (layout is not None and layout.kind == "NCHW") or positions is None or shape[0] != len(x):
        return layout if layout is not None and layout.kind == "NCHW" else None
    tokens = token_layout(positions.flatten(2), x)
    if len(shape) == 3 or tokens is None:
        return tokens
    is_in_rows = tokens.grid == shape[1:-1] and tokens.tokens == range(math.prod(tokens.grid))
    return Layout("NHWC", tokens.grid) if is_in_rows else None


def token_layout(positions: Tensor, x: Tensor) -> Layout | None:
    """Return the layout of tokens at positions (axes, N, tokens); None if they are not a grid that covers the image."""
    grid = grid_of(positions, tuple(x.shape[2:]))
    return None if grid is None else Layout("NTC", *grid)


def is_channels_first(module: nn.Module) -> bool:
    """Return whether a layer returns channels first by definition, like convolutions, their norms and pooling."""
    return isinstance(module, _CHANNELS_FIRST)


def _misfit(grid: tuple[int, ...], size: Grid) -> float:
    """Return by how many cells a grid differs from the aspect ratio of the input."""
    for cells, edge in zip(grid, size, strict=True):
        if cells > edge:
            return math.inf
    (h, w), (height, width) = grid[-2:], size[-2:]
    return min(abs(h - w * height / width), abs(w - h * width / height))
