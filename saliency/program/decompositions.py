"""Decompositions of operations that ONNX or the export of any batch size cannot express, into forward operations.

They are applied while a program is captured. `torch.export` would fail on resizing if the batch size varies, and would
ignore decompositions of operations that PyTorch can also decompose, such as `silu_backward`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..io.axes import at_least_float32

ATEN: Any = torch.ops.aten


def convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, *options: Any
) -> tuple[Tensor | None, None, None]:
    """Return the gradient at the input: a convolution transposed once more, which restores the size of the input.

    The gradient of a grouped convolution of stride 1 is a convolution with the flipped kernel, which runtimes compute
    faster. Without groups, flipping the larger kernel in each call would cost more.
    """
    _, stride, padding, dilation, is_transposed, _, groups, mask = options
    axes = range(len(stride))
    missing, transpose = [0 for axis in axes], not is_transposed
    if not is_transposed:
        reach = [dilation[axis] * (weight.shape[2 + axis] - 1) for axis in axes]
        sizes = [(gradient.shape[2 + axis] - 1) * stride[axis] + reach[axis] - 2 * padding[axis] + 1 for axis in axes]
        missing = [x.shape[2 + axis] - sizes[axis] for axis in axes]
        if groups > 1 and all(stride[axis] == 1 and reach[axis] >= padding[axis] for axis in axes):
            weight = weight.reshape(groups, -1, *weight.shape[1:]).transpose(1, 2).flatten(0, 1)
            weight = weight.flip([2 + axis for axis in axes])
            padding, transpose = [reach[axis] - padding[axis] for axis in axes], False
    into = ATEN.convolution.default(gradient, weight, None, stride, padding, dilation, transpose, missing, groups)
    return into if mask[0] else None, None, None


def separable_backward(gradient: Tensor, size: Sequence[int], forward: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the gradient (N, C, H, W) at the input of a linear operation that acts along each axis alone.

    Args:
        gradient: (N, C, h, w) the gradient at the output.
        size: H and W.
        forward: The operation. It is applied to images with a row of ones, and with a column of ones.
    """
    height, width = size
    units = [torch.eye(edge, dtype=gradient.dtype, device=gradient.device) for edge in size]
    rows = forward(units[0][:, None, :, None].expand(-1, -1, -1, width))[:, 0, :, 0]  # (H, h)
    columns = forward(units[1][:, None, None, :].expand(-1, -1, height, -1))[:, 0, 0, :]  # (W, w)
    result: Tensor = rows @ gradient @ columns.mT / rows[:, 0].sum()  # the corner of the output for an image of ones
    return result


def avg_pool2d_backward(gradient: Tensor, x: Tensor, *options: Any) -> Tensor:
    """Return the gradient at the input of average pooling."""
    return separable_backward(gradient, x.shape[2:], lambda units: ATEN.avg_pool2d.default(units, *options))


def adaptive_avg_pool2d_backward(gradient: Tensor, x: Tensor) -> Tensor:
    """Return the gradient at the input of adaptive average pooling."""
    forward = torch.nn.AdaptiveAvgPool2d(tuple(gradient.shape[2:]))
    return separable_backward(gradient, x.shape[2:], forward)


def upsample_backward(name: str) -> Callable[..., Tensor]:
    """Return the function that gives the gradient at the input of an operation that resizes images."""
    resize = getattr(ATEN, name).default
    flags = 0 if "nearest" in name else 1  # align_corners

    def backward(gradient: Tensor, output_size: Sequence[int], input_size: Sequence[int], *options: Any) -> Tensor:
        scales = (*options[flags:], None, None)
        rows, columns = (torch.eye(edge, dtype=gradient.dtype, device=gradient.device) for edge in input_size[2:])
        rows = resize(rows[:, None, :, None], (output_size[0], 1), *options[:flags], scales[0], None)[:, 0, :, 0]
        columns = resize(columns[:, None, None], (1, output_size[1]), *options[:flags], None, scales[1])[:, 0, 0]
        result: Tensor = rows @ gradient @ columns.mT
        return result

    return backward


def silu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    """Return the gradient at the input of SiLU."""
    gate = x.sigmoid()
    return gradient * gate * (1 + x * (1 - gate))


def mish_backward(gradient: Tensor, x: Tensor) -> Tensor:
    """Return the gradient at the input of Mish."""
    gate = F.softplus(x).tanh()
    return gradient * (gate + x * x.sigmoid() * (1 - gate * gate))


def as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Any:
    """Return all elements in their order as a tensor of another shape. Other strides are not decomposed.

    `adaptive_avg_pool2d` and its gradient set the strides of axes of size 1.
    """
    view = torch.empty_strided(size, stride, dtype=x.dtype, device="meta")
    is_whole = view.numel() == x.numel() and offset in (None, x.storage_offset())
    return x.reshape(size) if is_whole and x.is_contiguous() and view.is_contiguous() else NotImplemented


def scatter_add(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Any:
    """Return `scatter_add` of one value along an axis. ONNX Runtime does not have it in half precision."""
    if index.shape[dim] != 1 or source.shape != index.shape or x.select(dim, 0).shape != index.select(dim, 0).shape:
        return NotImplemented
    positions = torch.arange(x.shape[dim], device=x.device).reshape(-1, *[1] * (x.dim() - 1)).movedim(0, dim)
    return x + torch.where(positions == index, source, 0)


def copysign(x: Tensor, other: Tensor) -> Tensor:
    """Return the magnitudes of `x` with the signs of other values. ONNX cannot read the sign of -0: it is positive."""
    return torch.where(other < 0, -x.abs(), x.abs())


def copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Return the source in the shape and type of `x`."""
    return source.to(x).expand_as(x)


def slice_scatter(
    x: Tensor, source: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    """Return `slice_scatter` with positions counted from the start, because PyTorch cannot map negative positions."""
    first, last, _ = slice(start, end, step).indices(x.shape[dim])
    if (first, last) == (start, end):
        return NotImplemented
    return ATEN.slice_scatter.default(x, source, dim, first, last, step)


def batch_norm(x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *options: float) -> Any:
    """Return `native_batch_norm` with constant statistics."""
    if training:
        return NotImplemented
    result = (at_least_float32(x) - _per_channel(mean, x)) * _per_channel(_scale(weight, variance, options[1]), x)
    result = result if bias is None else result + _per_channel(bias, x)
    return result.to(x.dtype), mean[:0], mean[:0]


def batch_norm_backward(gradient: Tensor, x: Tensor, weight: Any, mean: Any, variance: Any, *options: Any) -> Any:
    """Return the gradient at the input of `native_batch_norm` with constant statistics."""
    _, _, training, eps, _ = options
    if training:
        return NotImplemented
    return (_per_channel(_scale(weight, variance, eps), x) * gradient).to(x.dtype), None, None


def _scale(weight: Tensor | None, variance: Tensor, eps: float) -> Tensor:
    """Return the factor (C,) of a batch norm."""
    scale = (at_least_float32(variance) + eps).rsqrt()
    return scale if weight is None else scale * weight


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    """Return values (C,) in the shape (C, 1, 1), for (N, C, H, W)."""
    return values.reshape(-1, *[1] * (x.dim() - 2))


RESIZING = "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d", "upsample_bicubic2d"
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    ATEN.as_strided.default: as_strided,
    ATEN.copy.default: copy,
    ATEN.copysign.Tensor: copysign,
    ATEN.silu_backward.default: silu_backward,
    ATEN.mish_backward.default: mish_backward,
    ATEN.scatter_add.default: scatter_add,
    ATEN.slice_scatter.default: slice_scatter,
    ATEN.convolution_backward.default: convolution_backward,
    **{getattr(ATEN, f"{name}_backward").default: upsample_backward(name) for name in RESIZING},
}
FOR_ONNX: dict[Any, Callable[..., Any]] = DECOMPOSITIONS | {
    ATEN.avg_pool2d_backward.default: avg_pool2d_backward,
    ATEN._adaptive_avg_pool2d_backward.default: adaptive_avg_pool2d_backward,
}
BEFORE_MAPPING: dict[Any, Callable[..., Any]] = DECOMPOSITIONS | {
    ATEN.native_batch_norm.default: batch_norm,
    ATEN.native_batch_norm_backward.default: batch_norm_backward,
}
"""Also for operations that PyTorch would map over a batch with dozens of operations."""
