"""Operations over any number of spatial axes: two of an image, three of a volume or a video."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import interpolate, max_pool2d, max_pool3d

from ..errors import NotApplicableError

_LINEAR = {3: "linear", 4: "bilinear", 5: "trilinear"}


def spatial(tensor: Tensor, first: int = 2) -> tuple[int, ...]:
    """Return the numbers of the spatial axes of a tensor (N, C, H, W) or (N, C, D, H, W), from `first` on."""
    return tuple(range(first, tensor.dim()))


def as_text(size: Sequence[int]) -> str:
    """Return a size as text, such as `224x224`."""
    return "x".join(map(str, size))


def along_rows(numbers: Tensor, like: Tensor) -> Tensor:
    """Return one number per row (k,) in a shape that broadcasts to a tensor (k, ...)."""
    return numbers.view(-1, *[1] * (like.dim() - 1))


def along_axes(x: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Return a tensor (..., H, W) or (..., D, H, W), multiplied by one matrix along each of its last axes."""
    *outer, rows, columns = matrices
    for axis, matrix in enumerate(outer, -len(matrices)):
        x = (x.movedim(axis, -1) @ matrix.mT).movedim(-1, axis)
    return rows @ x @ columns.mT


def gaussian(length: int, sigma: float, like: Tensor) -> Tensor:
    """Return the weights of all cells of a line in a Gaussian average at each cell: (length, length)."""
    cells = torch.arange(length, dtype=like.dtype, device=like.device)
    return (-0.5 * ((cells - cells[:, None]) / sigma) ** 2).softmax(dim=1)


def require_two_axes(x: Tensor, name: str) -> None:
    """Raise NotApplicableError unless an input (N, C, ...) is a batch of images. `name` is the method or option."""
    if x.dim() != 4:
        axes = len(spatial(x))
        raise NotApplicableError(f"{name} is defined for images of two spatial axes, and the input has {axes}")


def at_least_float32(values: Tensor) -> Tensor:
    """Convert half precision to float32, because sums over a map in half precision overflow or lose digits."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def max_pool(maps: Tensor, edge: int, stride: int | None = None, padding: int = 0, ceil_mode: bool = False) -> Tensor:
    """Return the maxima of maps (N, K, h, w) or (N, K, d, h, w) in windows of one edge."""
    pool = max_pool2d if maps.dim() == 4 else max_pool3d
    return pool(maps, edge, stride, padding, ceil_mode=ceil_mode)


def resize(maps: Tensor, size: Sequence[int], *, align_corners: bool = False, antialias: bool = False) -> Tensor:
    """Resize maps (N, K, h, w) or (N, K, d, h, w) linearly along each spatial axis.

    Args:
        maps: The maps.
        size: The new length of each spatial axis.
        align_corners: Whether the centres of corner cells lie on the corners, instead of their outer corners.
        antialias: Whether cells are averaged if the maps shrink; maps of volumes are interpolated.
    """
    options = {"align_corners": align_corners, "antialias": antialias and maps.dim() == 4}
    return interpolate(maps, tuple(size), mode=_LINEAR[maps.dim()], **options)


def on_finest_grid(maps: Sequence[Tensor]) -> Tensor:
    """Return maps (N, 1, h, w) of several layers on the finest of their grids, (L, N, 1, h, w)."""
    finest = max((values.shape[2:] for values in maps), key=math.prod)
    return torch.stack([resize(values, finest) for values in maps])
