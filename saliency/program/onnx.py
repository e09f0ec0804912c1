"""ONNX files of exported programs.

The exporter of PyTorch translates or decomposes most operations. The tables here have the rest as forward operations:
backward operations without a decomposition, and changes of strides.
"""

from __future__ import annotations

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
    # The optimizer of onnxscript takes x + 1e-15 for x; ONNX Runtime optimizes the graph when it loads the file.
    options: dict[str, Any] = {"dynamo": True, "optimize": False, "verbose": False}
    try:
        forward = program.run_decompositions(dict(DECOMPOSITIONS))
        _require_contiguous(forward)
        translated = torch.onnx.export(forward, input_names=["image"], output_names=OUTPUTS, **options)
    except torch.onnx.OnnxExporterError as error:
        named = re.search(r"(aten|prims)\.\w+", str(error))
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


def _require_contiguous(program: ExportedProgram) -> None:
    """Raise NotApplicableError if a view depends on strides, which the translation to ONNX ignores."""
    for node in program.graph.nodes:
        if node.target is torch.ops.aten.as_strided.default and not node.args[0].meta["val"].is_contiguous():
            raise NotApplicableError("export: ONNX cannot express aten.as_strided of a tensor that is not contiguous")


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
    return separable_backward(gradient, x.shape[2:], lambda units: torch.ops.aten.avg_pool2d.default(units, *options))


def adaptive_avg_pool2d_backward(gradient: Tensor, x: Tensor) -> Tensor:
    """Return the gradient at the input of adaptive average pooling."""
    forward = torch.nn.AdaptiveAvgPool2d(tuple(gradient.shape[2:]))
    return separable_backward(gradient, x.shape[2:], forward)


def upsample_backward(name: str) -> Callable[..., Tensor]:
    """Return the function that gives the gradient at the input of an operation that resizes images."""
    resize = getattr(torch.ops.aten, name).default
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
    """Return all elements in their order as a tensor of another shape; other strides stay as they are.

    `adaptive_avg_pool2d` sets the strides of axes of size 1, and its gradient does.
    """
    step, in_order = 1, x.is_contiguous() and offset in (None, x.storage_offset())
    for length, distance in reversed([*zip(size, stride, strict=True)]):
        in_order &= length == 1 or distance == step
        step *= length
    if not in_order or step != x.numel():
        return NotImplemented
    return x.reshape(size)


def copysign(x: Tensor, other: Tensor) -> Tensor:
    """Return the magnitudes of `x` with the signs of other values. ONNX cannot read the sign of -0: it is positive."""
    return torch.where(other < 0, -x.abs(), x.abs())


def copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Return the source in the shape and type of `x`."""
    return source.to(x).expand_as(x)


def slice_scatter(
    x: Tensor, source: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    """Return `slice_scatter` with positions counted from the start, because PyTorch cannot map negative ones."""
    first, last, _ = slice(start, end, step).indices(x.shape[dim])
    if (first, last) == (start, end):
        return NotImplemented
    return torch.ops.aten.slice_scatter.default(x, source, dim, first, last, step)


def by_operator(functions: Mapping[str, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Return functions by the operator that they replace."""
    return {attrgetter(name)(torch.ops.aten): function for name, function in functions.items()}


RESIZING = "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d", "upsample_bicubic2d"
BEFORE_EXPORT = by_operator(
    {
        "as_strided.default": as_strided,
        "copy.default": copy,
        "slice_scatter.default": slice_scatter,
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
        "avg_pool2d_backward.default": avg_pool2d_backward,
        "_adaptive_avg_pool2d_backward.default": adaptive_avg_pool2d_backward,
        "copysign.Tensor": copysign,
    }
)
