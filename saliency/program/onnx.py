"""ONNX files of exported programs.

The exporter of PyTorch translates or decomposes most operations. `DECOMPOSITIONS` has the rest as forward operations:
backward operations without a decomposition, and changes of strides.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import ExportedProgram

from ..errors import NotApplicableError

OUTPUTS = ("scores", "classes", "map")


def write_onnx(program: ExportedProgram, path: Path, metadata: Mapping[str, str]) -> None:
    """Write a program as an ONNX file with the input `image`, the outputs `OUTPUTS`, and metadata as `metadata_props`.

    Stack traces, which name files of this machine, are left out. Weights of more than 2 GB are in a second file, which
    stays beside the first.

    Raises:
        NotApplicableError: ONNX has no translation of an operation, which the message names.
    """
    try:
        forward = program.run_decompositions(dict(DECOMPOSITIONS))
        translated = torch.onnx.export(forward, input_names=["image"], output_names=OUTPUTS, dynamo=True, verbose=False)
    except (torch.onnx.OnnxExporterError, NotImplementedError) as error:
        named = re.search(r"(aten|prims)\.\w+|as_strided.*", str(error))
        raise NotApplicableError(f"export: ONNX cannot express {named[0] if named else error}") from error
    written = cast("torch.onnx.ONNXProgram", translated)
    model = written.model
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
    model.metadata_props.clear()
    model.metadata_props.update(metadata)
    with TemporaryDirectory(dir=path.parent) as folder:  # a failed write leaves the old file
        written.save(Path(folder) / path.name)
        for file in Path(folder).iterdir():
            file.replace(path.with_name(file.name))


def convolution_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> tuple[Tensor | None, None, None]:
    """Return the gradient at the input: a convolution transposed once more, which restores the size of the input."""
    axes = range(len(stride))
    missing = [0 for axis in axes]
    if not transposed:
        reach = [dilation[axis] * (weight.shape[2 + axis] - 1) - 2 * padding[axis] + 1 for axis in axes]
        missing = [x.shape[2 + axis] - (gradient.shape[2 + axis] - 1) * stride[axis] - reach[axis] for axis in axes]
    into = torch.ops.aten.convolution.default(
        gradient, weight, None, stride, padding, dilation, not transposed, missing, groups
    )
    return into if mask[0] else None, None, None


def attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    normalizer: Tensor,
    dropout: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients at query, key and value (N, heads, tokens, dimension)."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    logits = query @ key.mT * scale
    if is_causal:
        future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(future, -math.inf)
    if attn_mask is not None:
        logits = logits + attn_mask
    attention = logits.softmax(-1)
    at_logits = attention * (gradient @ value.mT - (gradient * output).sum(-1, keepdim=True)) * scale
    return at_logits @ key, at_logits.mT @ query, attention.mT @ gradient


def silu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    """Return the gradient at the input of SiLU."""
    gate = x.sigmoid()
    return gradient * gate * (1 + x * (1 - gate))


def mish_backward(gradient: Tensor, x: Tensor) -> Tensor:
    """Return the gradient at the input of Mish."""
    gate = F.softplus(x).tanh()
    return gradient * (gate + x * x.sigmoid() * (1 - gate * gate))


def copysign(x: Tensor, other: Tensor) -> Tensor:
    """Return the magnitudes of `x` with the signs of other values. ONNX cannot read the sign of -0: it is positive."""
    return torch.where(other < 0, -x.abs(), x.abs())


def as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Tensor:
    """Return all elements in their order as a tensor of another shape, or refuse.

    `adaptive_avg_pool2d` sets the strides of axes of size 1, and its gradient does.
    """
    _require_whole(x, size, stride)
    return x.reshape(size)


def as_strided_scatter(
    x: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Tensor:
    """Return `source`, which replaces all elements of `x`, in the shape of `x`, or refuse."""
    _require_whole(x, size, stride)
    return source.reshape(x.shape)


def _require_whole(x: Tensor, size: Sequence[int], stride: Sequence[int]) -> None:
    """Raise NotImplementedError unless a size with strides has all elements of `x` in their order."""
    step = 1
    in_order = x.is_contiguous()
    for length, distance in reversed([*zip(size, stride, strict=True)]):
        in_order &= length == 1 or distance == step
        step = step * length
    if not in_order or step != x.numel():
        raise NotImplementedError(f"as_strided: sizes {size} and strides {stride} of a tensor {tuple(x.shape)}")


def separable_backward(gradient: Tensor, sizes: Sequence[int], along: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Return the gradient at the input of a linear operation that acts along each spatial axis alone.

    Args:
        gradient: (N, C, *output sizes).
        sizes: The spatial sizes of the input.
        along: The operation along one axis, applied to the unit vectors (size, 1, ..., size, ..., 1).
    """
    for axis, size in enumerate(sizes):
        shape = [1] * len(sizes)
        shape[axis] = size
        units = torch.eye(size, dtype=gradient.dtype, device=gradient.device).reshape(size, 1, *shape)
        matrix = along(units, axis).reshape(size, gradient.shape[2 + axis])
        gradient = (gradient.movedim(2 + axis, -1) @ matrix.mT).movedim(-1, 2 + axis)
    return gradient


def only(values: Sequence[Any], axis: int, other: Any) -> list[Any]:
    """Return `values` of one axis, and another value for all other axes."""
    return [value if number == axis else other for number, value in enumerate(values)]


def avg_pool2d_backward(
    gradient: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> Tensor:
    """Return the gradient at the input of average pooling."""

    def along(units: Tensor, axis: int) -> Tensor:
        options = ceil_mode, count_include_pad, divisor if divisor is None or axis == 0 else 1
        steps = only(stride or kernel, axis, 1)
        pads = only(padding, axis, 0)
        result: Tensor = torch.ops.aten.avg_pool2d.default(units, only(kernel, axis, 1), steps, pads, *options)
        return result

    return separable_backward(gradient, x.shape[2:], along)


def adaptive_avg_pool2d_backward(gradient: Tensor, x: Tensor) -> Tensor:
    """Return the gradient at the input of adaptive average pooling."""

    def along(units: Tensor, axis: int) -> Tensor:
        return F.adaptive_avg_pool2d(units, tuple(only(gradient.shape[2:], axis, 1)))

    return separable_backward(gradient, x.shape[2:], along)


def upsample_backward(name: str) -> Callable[..., Tensor]:
    """Return the function that gives the gradient at the input of an operation that resizes images."""
    resize = getattr(torch.ops.aten, name).default
    flags = 0 if "nearest" in name else 1  # align_corners

    def backward(gradient: Tensor, output_size: Sequence[int], input_size: Sequence[int], *options: Any) -> Tensor:
        scales = (*options[flags:], None, None)

        def along(units: Tensor, axis: int) -> Tensor:
            result: Tensor = resize(units, only(output_size, axis, 1), *options[:flags], *only(scales[:2], axis, None))
            return result

        return separable_backward(gradient, input_size[2:], along)

    return backward


RESIZING = "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d", "upsample_bicubic2d"


def by_operator(functions: Mapping[str, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Return functions by the operator that they replace."""
    return {attrgetter(name)(torch.ops.aten): function for name, function in functions.items()}


BEFORE_EXPORT = by_operator(
    {
        "silu_backward.default": silu_backward,
        "mish_backward.default": mish_backward,
        **{f"{name}_backward.default": upsample_backward(name) for name in RESIZING},
    }
)
"""Decompositions for `capture`, because `torch.export` fails on resizing if the batch size varies, and ignores
decompositions of operations that PyTorch can also decompose, such as `silu_backward`."""

DECOMPOSITIONS = by_operator(
    {
        "convolution_backward.default": convolution_backward,
        "_scaled_dot_product_flash_attention_for_cpu_backward.default": attention_backward,
        "avg_pool2d_backward.default": avg_pool2d_backward,
        "_adaptive_avg_pool2d_backward.default": adaptive_avg_pool2d_backward,
        "copysign.Tensor": copysign,
        "as_strided.default": as_strided,
        "as_strided_scatter.default": as_strided_scatter,
    }
)
