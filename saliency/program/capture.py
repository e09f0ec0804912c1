"""Capture of a function of a batch as a graph of plain operations with any batch size.

The function runs on two batches of different sizes. Both runs must call the same operations; the sizes among their
arguments that differ depend on the batch size, linearly. So methods and models, which often compute sizes in Python,
need no symbolic sizes.

Operations that ONNX or any batch size cannot express are decomposed into forward operations during the capture.
`torch.export` would fail on resizing if the batch size varies, and would ignore decompositions of operations that
PyTorch can also decompose, such as `silu_backward`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, zip_longest
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from ..errors import NotApplicableError
from ..hooks.autograd_graph import MemoryMode, OpOverload
from ..hooks.operations import is_attention, operator_name, written
from ..hooks.pytree import tree_tensors
from ..io.axes import at_least_float32
from ..model.call import bound

ATEN: Any = torch.ops.aten


def convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, *options: Any, is_frozen: bool = False
) -> tuple[Tensor | None, None, None]:
    """Return the gradient at the input: a convolution transposed once more, which restores the size of the input.

    The gradient of a convolution of stride 1 is a convolution with the flipped kernel, which runtimes compute faster.
    Flipping the larger kernel of a convolution without groups costs more than this saves, unless freezing flips it
    once. Gradients of frozen programs of resnet50 take a tenth less time.
    """
    _, stride, padding, dilation, is_transposed, _, groups, mask = options
    axes = range(len(stride))
    missing, transpose = [0 for axis in axes], not is_transposed
    if not is_transposed:
        reach = [dilation[axis] * (weight.shape[2 + axis] - 1) for axis in axes]
        sizes = [(gradient.shape[2 + axis] - 1) * stride[axis] + reach[axis] - 2 * padding[axis] + 1 for axis in axes]
        missing = [x.shape[2 + axis] - sizes[axis] for axis in axes]
        if (groups > 1 or is_frozen) and all(stride[axis] == 1 and reach[axis] >= padding[axis] for axis in axes):
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
Decompositions = dict[Any, Callable[..., Any]]
DECOMPOSITIONS: Decompositions = {
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
FOR_ONNX: Decompositions = DECOMPOSITIONS | {
    ATEN.avg_pool2d_backward.default: avg_pool2d_backward,
    ATEN._adaptive_avg_pool2d_backward.default: adaptive_avg_pool2d_backward,
}
FROZEN: Decompositions = DECOMPOSITIONS | {
    ATEN.convolution_backward.default: partial(convolution_backward, is_frozen=True),
}
BEFORE_MAPPING: Decompositions = DECOMPOSITIONS | {
    ATEN.native_batch_norm.default: batch_norm,
    ATEN.native_batch_norm_backward.default: batch_norm_backward,
}
"""Also for operations that PyTorch would map over a batch with dozens of operations."""


BATCHES = (5, 7)
"""The batch sizes of the two runs: not 1, at which broadcasting differs."""

INPUTS = "image", "target"
"""The names of the inputs of a program."""

Function = Callable[..., tuple[Tensor, ...]]


def capture(
    function: Function, inputs: Sequence[Tensor], model: nn.Module, table: Decompositions, *, one_by_one: bool
) -> GraphModule:
    """Return a function of a batch (N, C, H, W) as a graph with any N, whose parameters have the model's own names.

    Args:
        function: Returns tensors with N rows each. It is called inside `make_fx`.
        inputs: (1, C, H, W) an image, and perhaps (1,) a class, in the order of `INPUTS`.
        model: The model, whose parameters and buffers the graph reads.
        table: The decompositions of the program.
        one_by_one: Whether the function takes one image only. It is then mapped over the batch.

    Raises:
        NotApplicableError: The operations depend on the batch size in another way.
    """
    mode = "real"
    with sdpa_kernel(SDPBackend.MATH):  # fused attention is bound to one kind of device, and cannot be mapped
        if one_by_one:
            graph, mode = _traced(function, inputs, mode, table), "fake"
            # Without operations in place, which cannot write one row for each image into a constant.
            single = _traced(torch.func.functionalize(graph), inputs, mode, BEFORE_MAPPING)
            function = torch.vmap(lambda *rows: tuple(part[0] for part in single(*(row[None] for row in rows))))
        graph, other = (_traced(function, [torch.cat([x] * size) for x in inputs], mode, table) for size in BATCHES)
    _free_batch_size(graph, other)
    return _with_names(graph, model)


def _traced(function: Function, inputs: Sequence[Tensor], mode: str, table: Decompositions) -> GraphModule:
    """Return the graph of a function for a batch of one size. In the mode "fake", nothing is computed."""
    # `tracing` checks the reads of values, and refuses those that depend on the image.
    options: Any = {
        "tracing_mode": mode,
        "_error_on_data_dependent_ops": False,
        "_allow_non_fake_inputs": True,
        "decomposition_table": table,
    }
    program = make_fx(function, **options)(*inputs)
    program.graph.eliminate_dead_code()
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default  # mapped over a batch, tensors have other strides
    program.recompile()
    return program


def _free_batch_size(program: GraphModule, larger: GraphModule) -> None:
    """Replace the sizes in a graph that differ from the graph of a larger batch by sizes of its input.

    Raises:
        NotApplicableError: Something else differs.
    """
    partners: dict[Node, Node] = {}
    for node, other in zip_longest(list(program.graph.nodes), larger.graph.nodes):
        if node is None or other is None or (node.op, node.target) != (other.op, other.target):
            raise NotApplicableError(f"{BATCHES[1]} images run other operations than {BATCHES[0]}: {other}, not {node}")
        partners[other] = node
        constants = [getattr(graph, node.target) for graph in (program, larger) if node.op == "get_attr"]
        if constants and not (constants[0] is constants[1] or torch.equal(*constants)):
            raise NotApplicableError(f"{BATCHES[1]} images need other constants than {BATCHES[0]}: {node}")
        with program.graph.inserting_before(node):
            node.args, node.kwargs = _freed(node, (node.args, node.kwargs), (other.args, other.kwargs), partners)


def _freed(node: Node, arg: Any, larger: Any, partners: Mapping[Node, Node]) -> Any:
    """Return an argument of a node, with sizes of the input in place of numbers that differ for a larger batch."""
    if isinstance(arg, tuple | list) and len(arg) == len(larger):
        return type(arg)(_freed(node, *pair, partners) for pair in zip(arg, larger, strict=True))
    if isinstance(arg, dict) and arg.keys() == larger.keys():
        return {name: _freed(node, value, larger[name], partners) for name, value in arg.items()}
    if type(arg) is type(larger) is int and arg != larger and (larger - arg) % (BATCHES[1] - BATCHES[0]) == 0:
        return _size(node.graph, arg, larger)
    if arg != (partners[larger] if isinstance(larger, Node) else larger):
        raise NotApplicableError(f"{BATCHES[1]} images run {node} with {larger} instead of {arg} for {BATCHES[0]}")
    return arg


def _size(graph: Graph, size: int, larger: int) -> Node:
    """Return a node of the size that is `size` in the first run and `larger` in the second."""
    factor = (larger - size) // (BATCHES[1] - BATCHES[0])
    constant = size - factor * BATCHES[0]
    result = graph.call_function(torch.ops.aten.sym_size.int, (next(iter(graph.nodes)), 0))
    if factor != 1:
        result = graph.call_function(operator.mul, (result, factor))
    return graph.call_function(operator.add, (result, constant)) if constant else result


def _with_names(program: GraphModule, model: nn.Module) -> GraphModule:
    """Return a graph whose parameters and buffers have their names in the model. Each occurs once."""
    names = {id(tensor): name for name, tensor in chain(model.named_parameters(), model.named_buffers())}
    constants, inputs = dict[str, Tensor](), iter(INPUTS)
    for node in program.graph.nodes:
        if node.op == "get_attr":
            tensor = getattr(program, node.target)
            node.target = names.get(id(tensor), node.target)
            constants[node.target] = tensor.detach()
        elif node.op == "placeholder":
            node.name = node.target = next(inputs)
    return GraphModule(constants, program.graph)


@contextmanager
def tracing(*inputs: Tensor) -> Iterator[None]:
    """Trace a method in a block, inside `make_fx`, with the traced inputs."""
    dependent = _Dependent(inputs)
    with bound(is_tracing=True), dependent, _HostReads(dependent):
        yield


class _Dependent(MemoryMode[bool]):
    """Mode that tracks which memory depends on the inputs, and refuses reads of their values and random numbers."""

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        super().__init__(lambda tensor: True)
        for tensor in inputs:
            self.memory(tensor)

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_dependent = self.depends((args, kwargs))
        if is_dependent and torch.Tag.data_dependent_output in func.tags:
            refuse_read(func)
        if is_attention(func):  # its tags say that it draws random numbers, whatever its dropout
            raise NotApplicableError(f"the model chooses a fused attention ({func}); remove its sdpa_kernel")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotApplicableError(f"it draws random numbers ({func}), and a program would repeat one draw")
        result = func(*args, **(kwargs or {}))
        if is_dependent and operator_name(func) not in _CONSTANT:
            for tensor in (*written(func, args, kwargs or {}), *tree_tensors(result)):
                self.memory(tensor)
        return result

    def depends(self, arguments: Any) -> bool:
        """Return whether a tensor among some arguments depends on the image."""
        return any(map(self.known_memory, tree_tensors(arguments)))


class _HostReads(TorchFunctionMode):
    """Mode that refuses reads of values by functions that are not operators."""

    def __init__(self, dependent: _Dependent) -> None:
        super().__init__()
        self._dependent = dependent

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and self._dependent.depends(args):
            refuse_read(func)
        return func(*args, **(kwargs or {}))


# Operations whose result has the shape of an operand, but not its values.
_CONSTANT = {"new_empty", "new_full", "new_ones", "new_zeros", "empty_like", "full_like", "ones_like", "zeros_like"}
_READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__, torch.tensor, torch.as_tensor)


def refuse_read(function: Any) -> NoReturn:
    """Raise NotApplicableError for a function that reads a value of a tensor that depends on the image."""
    name = getattr(function, "__name__", function)
    raise NotApplicableError(
        f"it decides by a value that depends on the image ({name}) which operations run; in a program they are fixed"
    )
