"""Record the operations of one forward, so that the nodes of its autograd graph can be read as operations.

A node of the graph computes the gradient of its operation, but does not always store its arguments and result. A
dispatch mode of the calling thread sees arguments and results; the sequence number of a node connects them with the
node.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from itertools import chain, compress
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils.weak import TensorWeakRef

from . import autograd_graph as graph
from .manager import HookManager
from .pytree import tree_leaves, tree_map, tree_map_tensors, tree_tensors

Op = graph.OpOverload
# Checked for each argument: a union would be built each time.
_LISTS = (list, tuple)
_CLONE = torch.ops.aten.clone.default


class SavedValues(IntEnum):
    """Values that a record stores."""

    NOTHING = 0
    """No record."""
    ACTIVATIONS = 1
    """Constants in sums, operands of matrix products, and operands and results of activations, norms and attention."""
    CONSTANTS = 2
    """Also the values of products and softmax, and so of all operations not of degree one."""
    LINEAR = 3
    """Also the results of convolutions and matrix products."""
    CHANGES = 4
    """Operands of nonlinear operations, and results other than the first; constants of others. The graph saves none."""
    ALL = 5
    """The operands and results of all operations. Values that the graph does not save are computed again when read."""


@dataclass(slots=True)
class Operation:
    """One operation of a forward.

    Attributes:
        op: The operator.
        name: The name of the operator, the same for an operation in place.
        kept_args: The stored arguments by name, some as `WeakResult`.
        kept_result: The stored result.
        norms: The norms of the result of a linear operation, before an in-place ReLU wrote to it: one per image for a
            convolution, one per row for a matrix product. None without such a ReLU.
        is_weak: Whether operands and result may be stored as `WeakResult`.
        is_part: Whether the operation writes in place to a part of a tensor. An operation on a view of all numbers of a
            tensor is stored as an operation on that tensor.
        shared: Values that rules compute from the operation, for the walks of other targets.
    """

    op: Op
    name: str
    kept_args: dict[str, Any] = field(default_factory=dict)
    kept_result: Any = None
    norms: Tensor | None = None
    is_weak: bool = False
    is_part: bool = False
    shared: dict[Any, Any] = field(default_factory=dict)

    @property
    def args(self) -> dict[str, Any]:
        """The arguments by name. Tensors that are not stored are None."""
        return self._values(self.kept_args) if self.is_weak else self.kept_args

    @property
    def result(self) -> Any:
        """The result; None if it is not stored. An in-place ReLU may have written to it."""
        if not self.is_weak:
            return self.kept_result
        weak = next(tree_leaves(self.kept_result, WeakTensor), None)
        first = weak and weak.alive()
        if first is not None:
            return tree_map(self.kept_result, WeakTensor, lambda _: first)
        if weak is not None or self.kept_result is None:
            with torch.no_grad():
                self.kept_result = self.repeat()
        return self.kept_result

    @property
    def is_vmapped(self) -> bool:
        """Whether this is a batch norm in `vmap`, where later operations multiply by its weights and add its bias."""
        weight = self.args.get("weight") if is_batch_norm(self.op) else None
        return weight is not None and not isinstance(weight, nn.Parameter) and bool((weight == 1).all())

    def repeat(self, /, **changed: Any) -> Any:
        """Run the operation again with some other arguments, not in place."""
        args = {**self.kept_args, **changed}
        return out_of_place(self.op)(**(self._values(args) if self.is_weak else args))

    def _values(self, args: dict[str, Any]) -> dict[str, Any]:
        return cast("dict[str, Any]", tree_map(args, WeakResult, WeakResult.value))


class WeakTensor:
    """Tensor of the forward, held only as long as the graph or other code holds it."""

    __slots__ = ("_count", "_reference")

    def __init__(self, tensor: Tensor) -> None:
        self._reference, self._count = TensorWeakRef(tensor), graph.tensor_version(tensor)

    def alive(self) -> Tensor | None:
        """Return the tensor; None if it was freed, or written to."""
        tensor: Tensor | None = self._reference()
        return tensor if tensor is not None and graph.tensor_version(tensor) == self._count else None


class WeakResult(WeakTensor):
    """Weak reference to one result of an operation that can compute it again."""

    __slots__ = ("_index", "_source")

    def __init__(self, tensor: Tensor, source: Operation, index: int) -> None:
        super().__init__(tensor)
        self._source, self._index = source, index

    def value(self) -> Tensor:
        """Return the tensor."""
        tensor = self.alive()
        return cast("Tensor", as_results(self._source.result)[self._index]) if tensor is None else tensor


def as_results(result: Any) -> Sequence[Any]:
    """Return the results of an operation, which returns one tensor or several."""
    return result if isinstance(result, _LISTS) else (result,)


@cache
def operator_name(op: Op) -> str:
    """Return the name of an operator without its overload, the same for an operation in place."""
    name: str = op.overloadpacket.__name__
    return "convolution" if name == "_convolution" else name.rstrip("_")  # the former in TorchScript


@cache
def _schema(op: Op) -> dict[str, bool]:
    """Return for each argument of an operation, by name, whether it is written to."""
    arguments = graph.operator_schema(op).arguments
    return {part.name: part.alias_info is not None and part.alias_info.is_write for part in arguments}


def named_arguments(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operation by name, without arguments that have their default."""
    return {**dict(zip(_schema(op), args, strict=False)), **kwargs}


@cache
def writes_operand(op: Op) -> bool:
    """Return whether an operation writes to one of its arguments."""
    return any(_schema(op).values())


def written(op: Op, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operation writes to."""
    if not writes_operand(op):
        return []
    writes = _schema(op)
    return list(tree_tensors([value for name, value in named_arguments(op, args, kwargs).items() if writes[name]]))


def uses_batch_statistics(operation: Operation) -> bool:
    """Return whether a batch norm uses the statistics of the batch."""
    args = operation.args
    return args.get("running_var") is None or bool(args.get("training"))


LINEAR = frozenset({"convolution", "addmm", "mm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot"})
"""Convolutions and matrix products."""
FACTORS = {"mm": ("self", "mat2"), "bmm": ("self", "mat2"), "addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2")}
"""The two factors of the products of matrices."""
ADDITIVE = frozenset(
    {"add", "sub", "rsub", "cat", "stack", "where", "masked_fill", "masked_scatter", "addcmul", "constant_pad_nd"}
    | {"slice_scatter", "select_scatter", "scatter", "scatter_add", "index_add"}
)
"""Operations in which a constant may be added to a signal."""
NORMS = frozenset({"native_layer_norm", "native_group_norm", "_fused_rms_norm"})
"""Layer, group and RMS norms."""
SOFTMAX = frozenset({"_softmax", "_safe_softmax"})
"""Softmax over one dimension."""
ACTIVATIONS = frozenset(
    {"hardtanh", "hardswish", "hardsigmoid", "silu", "gelu", "elu", "celu", "mish", "softplus", "tanh", "sigmoid"}
)
"""Activation functions that are not of degree one."""
MOVES = {
    *("cat", "stack", "index", "index_select", "roll", "flip", "repeat", "constant_pad_nd", "select_scatter", "im2col"),
    *("slice_scatter", "masked_scatter", "pixel_shuffle", "pixel_unshuffle", "reflection_pad2d", "replication_pad2d"),
}
"""Operations that move or repeat numbers without changing them, besides views."""
PLAIN = {
    *MOVES,
    *("add", "sub", "rsub", "neg", "sum", "mean", "clone", "_to_copy", "copy", "reflection_pad3d", "replication_pad3d"),
    *("avg_pool3d", "_adaptive_avg_pool3d", "upsample_nearest3d", "upsample_trilinear3d", "_upsample_nearest_exact3d"),
    *("avg_pool2d", "_adaptive_avg_pool2d", "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d"),
    *(
        "gather",
        "_upsample_nearest_exact2d",
        "_upsample_bicubic2d_aa",
        "_upsample_bilinear2d_aa",
        "index_put",
        "where",
        "col2im",
    ),
    *("masked_fill", "unfold", "cumsum", "channel_shuffle", "native_channel_shuffle", "as_strided", "tril", "triu"),
    *("native_dropout", "roi_align", "ps_roi_align", "unsafe_split", "unsafe_chunk", "nll_loss_forward"),
    *("nll_loss2d_forward", "_fft_r2c", "_fft_c2r", "_fft_c2c", "trace", "take", "scatter", "scatter_add", "index_add"),
}
"""Linear operations without weights that are not views."""
HOMOGENEOUS = {
    *("abs", "relu", "leaky_relu", "_prelu_kernel", "max_pool2d_with_indices", "adaptive_max_pool2d", "max", "min"),
    *("max_pool3d_with_indices", "adaptive_max_pool3d", "rrelu_with_noise", "nansum", "kthvalue", "cummax", "cummin"),
    *("amax", "amin", "maximum", "minimum", "linalg_vector_norm", "norm", "topk", "sort", "median", "std", "std_mean"),
}
"""Other operations of degree one: the result is the derivative applied to the operands."""


def is_custom_function(node: Node | None) -> bool:
    """Return whether a node belongs to a custom function in Python or C++, inside which operations have no nodes."""
    return graph.is_python_function(node) or type(node).__name__ == "CppFunction"


@cache
def out_of_place(op: Op) -> Op:
    """Return the out-of-place form of an operation; the operation itself if there is no such form."""
    return cast("Op", getattr(getattr(torch.ops.aten, operator_name(op), None), op._overloadname, op))


@cache
def is_elementwise(op: Op) -> bool:
    """Return whether an operation computes each number of its result from one number of each operand."""
    # PyTorch does not tag these.
    untagged = ("hardswish", "leaky_relu", "_prelu_kernel", "rrelu_with_noise", "_to_copy")
    return torch.Tag.pointwise in out_of_place(op).tags or operator_name(op) in untagged


@cache
def is_pointwise(op: Op) -> bool:
    """Return whether an operation computes each number of its result from one number of its first operand."""
    others = ("mul", "div", "clone", "_to_copy", "neg", "addcdiv", "maximum", "minimum", *ADDITIVE)
    return is_elementwise(op) and operator_name(op) not in others


@cache
def is_view(op: Op) -> bool:
    """Return whether an operation returns a view of its operand, or the same numbers in another shape."""
    aliases = [part.alias_info for part in graph.operator_schema(op).returns]
    is_alias = any(alias is not None and not alias.is_write for alias in aliases)
    return is_alias or torch.Tag.inplace_view in op.tags or operator_name(op) == "_unsafe_view"


@cache
def is_fixed(op: Op) -> bool:
    """Return whether an operation writes to an argument or draws random numbers, so that it is not run again."""
    return writes_operand(op) or torch.Tag.nondeterministic_seeded in op.tags


@cache
def is_attention(op: Op) -> bool:
    """Return whether an operation is a fused attention, of any kernel."""
    return {"query", "key", "value"} <= _schema(op).keys()


@cache
def is_batch_norm(op: Op) -> bool:
    """Return whether an operation is a batch norm, of any kernel."""
    return "running_var" in _schema(op)


@cache
def _is_stored(op: Op, keep: SavedValues) -> bool:
    """Return whether a record stores the operands of an operation."""
    # For `others`, the operands need not be stored: rules read only their gradient and constants.
    others = PLAIN if keep == SavedValues.CHANGES else PLAIN | HOMOGENEOUS | ADDITIVE
    others = others | SOFTMAX | {"mul", "div"} if keep == SavedValues.ACTIVATIONS else others
    return keep == SavedValues.ALL or not (is_view(op) or operator_name(op) in others)


def _is_linear(op: Op, args: Sequence[Any], dependent: Sequence[bool]) -> bool:
    """Return whether an operation is linear in the only operand that depends on the image."""
    name = operator_name(op)
    if sum(dependent) != 1 or name == "mul" or name in LINEAR:
        return sum(dependent) == 1
    named = named_arguments(op, args, {})
    return (name == "div" and dependent[0]) or (named.get("running_var") is not None and not named.get("training"))


def _linear_of_torchvision(node: Node) -> Operation | None:
    """Return the linear operation, such as roi_align, whose gradient torchvision has registered; else None."""
    name = node.name().removeprefix("GeneratedBackwardFor_torchvision_").removesuffix("_defaultBackward")
    is_known = name in ("roi_align", "ps_roi_align")
    return Operation(getattr(torch.ops.torchvision, name).default, name) if is_known else None


_aten = torch.ops.aten
# Nodes that save, or lead to, all values that rules read, besides parameters. Rules read only the constants of sums.
_SELF_CONTAINED: dict[str, Op] = {
    "AdaptiveAvgPool2DBackward0": _aten._adaptive_avg_pool2d.default,
    "AddBackward0": _aten.add.Tensor,
    "AddmmBackward0": _aten.addmm.default,
    "AvgPool2DBackward0": _aten.avg_pool2d.default,
    "CatBackward0": _aten.cat.default,
    "CloneBackward0": _aten.clone.default,
    "ConstantPadNdBackward0": _aten.constant_pad_nd.default,
    "ConvolutionBackward0": _aten.convolution.default,
    "GatherBackward0": _aten.gather.default,
    "HardtanhBackward0": _aten.hardtanh.default,
    "MaxPool2DWithIndicesBackward0": _aten.max_pool2d_with_indices.default,
    "MeanBackward1": _aten.mean.dim,
    "MmBackward0": _aten.mm.default,
    "NativeBatchNormBackward0": _aten.native_batch_norm.default,
    "ReluBackward0": _aten.relu.default,
    "SelectBackward0": _aten.select.int,
    "SqueezeBackward1": _aten.squeeze.dim,
    "SumBackward1": _aten.sum.dim_IntList,
    "ViewBackward0": _aten.view.default,
}


# Nodes that save the positions at which the gradient passes, but not the operand.
_SAVE_NO_OPERAND = {"MaxPool2DWithIndicesBackward0", "ReluBackward0"}


@cache
def _holds_tensors(op: Op) -> dict[str, bool]:
    """Return for each argument of an operation, by name, whether it is or holds tensors."""
    return {part.name: "Tensor" in str(part.type) for part in graph.operator_schema(op).arguments}


def operation_of(node: Node, on_path: Container[Node | None]) -> Operation | None:
    """Return the operation of a node from the tensors that the graph holds; None if some are missing."""
    op = _SELF_CONTAINED.get(node.name())
    if op is None:
        return None
    operands, args = iter(graph.next_functions(node)), {}
    is_linear = operator_name(op) in LINEAR
    for name, is_tensor in _holds_tensors(op).items():
        value = graph.saved(node, name, None)
        if is_tensor and (edge := next(operands, None)) is not None:
            value = getattr(edge[0], "variable", None) if value is None else value
            is_absent = name == "bias" and graph.saved(node, "bias_sym_sizes_opt", None) == (0,)
            if value is None and not is_absent and (is_linear or edge[0] not in on_path):
                return None
        if is_tensor or value is not None:
            args[name] = value
    # All operands of a concatenation are one argument.
    is_known = all(function in on_path for function, _ in operands)
    return Operation(op, operator_name(op), args) if is_known else None


class _MemoryRecord:
    """State of one block of memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.depends = False  # on the image
        self.holders: list[Operation] = []  # operations that store values in it


class OperationRecord(graph.MemoryMode[_MemoryRecord]):
    """Recorder of this thread's operations, by the sequence numbers of their nodes. It can be entered several times.

    Args:
        source: The image. Operations on it are recorded.
        keep: The values to store.

    Attributes:
        calls: For each named module of `trace`, the range of sequence numbers of each of its calls.
    """

    def __init__(self, source: Tensor, keep: SavedValues) -> None:
        super().__init__(_MemoryRecord)
        self.keep = keep
        self.calls: defaultdict[str, list[range]] = defaultdict(list)
        self.memory(source).depends = True
        self._operations: dict[int, Operation] = {}
        self._clone: tuple[int, Tensor, Tensor] | None = None  # the last operation, if it was a clone
        self._chunks: dict[int, Tensor] = {}  # constants that share their memory with signals, by id

    def operation(self, node: Node) -> Operation | None:
        """Return the operation of a node; None if it was not recorded."""
        if graph.is_python_function(node):
            return _linear_of_torchvision(node)  # other functions may run any operations
        number = graph.sequence_nr(node)
        # An operation in place on a view has two nodes: its own, and one that copies the result into the whole.
        return self._operations.get(number - (type(node).__name__ == "CopySlices"))

    def read(self, nodes: Sequence[Node], *, replaces: bool) -> bool:
        """Return whether the graph holds all that rules read, so that no record is needed.

        Args:
            nodes: The nodes between the scores and the image, in the order of a backward pass.
            replaces: Whether nothing was recorded, so that the operations of the nodes are taken from the graph.
        """
        on_path = {*nodes, graph.next_functions(nodes[-1])[0][0]}
        of_changes = self.keep == SavedValues.CHANGES
        if self.keep == SavedValues.LINEAR:  # the result of a convolution is only in the graph as input of a batch norm
            normalised = set[Node | None]()
            for node in nodes:
                if node.name() == "NativeBatchNormBackward0":
                    normalised.add(graph.next_functions(node)[0][0])
                elif node.name() == "ConvolutionBackward0" and node not in normalised:
                    return False
        for node in nodes:
            from_graph, operation = operation_of(node, on_path), self.operation(node)
            if of_changes and node.name() in _SAVE_NO_OPERAND:
                return False
            # Only a record has the value of a padding.
            if from_graph is None or (operation and operation.args.get("value")):
                return False
            if replaces:
                self._operations.setdefault(graph.sequence_nr(node), from_graph)
            is_linear = from_graph.name == "convolution" or from_graph.args.get("training") is False
            reads_path = [successor in on_path for successor, _ in graph.next_functions(node)]
            if of_changes and replaces and is_linear and reads_path[0] and sum(reads_path) == 1:
                from_graph.kept_args["input"] = None  # only gradients of weights read it
                graph.free_saved(node, _shape, _unread)
        return True

    def free(self, node: Node) -> None:
        """Free the stored values of a node's operation, and the tensors that the node saved for its gradient."""
        if (operation := self._operations.pop(graph.sequence_nr(node), None)) is not None:
            # A walk, or an operation off the path, may still reference the operation.
            operation.kept_args, operation.kept_result, operation.shared = {}, None, {}
        graph.free_saved(node)

    def trace(self, hooks: HookManager, model: nn.Module, modules: Iterable[str]) -> None:
        """Record the sequence numbers of each call of some modules."""
        for name in modules:

            def end(begin: int, output: Any, name: str = name) -> None:
                self.calls[name].append(range(begin, graph.current_sequence_nr()))

            hooks.around(model.get_submodule(name), lambda args, kwargs: graph.current_sequence_nr(), end)

    def modules(self, node: Node) -> list[str]:
        """Return the traced modules whose calls ran the operation of a node."""
        number = graph.sequence_nr(node)
        return [name for name, calls in self.calls.items() if any(number in call for call in calls)]

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and record it if it depends on the image."""
        kwargs, name = kwargs or {}, operator_name(op)
        operands = list(compress(args, _holds_tensors(op).values()))
        dependent = list(map(self._depends, operands))
        if True not in dependent:
            result = op(*args, **kwargs)
            if name in ("unsafe_split", "unsafe_chunk"):  # the model may write to each chunk separately, as in a GRU
                self._chunks.update((id(chunk), chunk) for chunk in result)
            self._clone = (graph.current_sequence_nr() - 1, args[0], result) if op is _CLONE else None
            return result
        number = graph.current_sequence_nr() - 1
        # Without gradients, for example in a hook of saved tensors inside another operation, no node is created.
        has_node, writes = torch.is_grad_enabled(), writes_operand(op)
        stores = has_node and _is_stored(op, self.keep)
        stores = stores and not (self.keep == SavedValues.CHANGES and _is_linear(op, args, dependent))
        base = graph.view_base(args[0]) if writes else None
        is_alone = base is not None and is_elementwise(op) and not any(isinstance(part, Tensor) for part in args[1:])
        target = base if base is not None and is_alone and base.numel() == args[0].numel() else args[0]
        is_weak = self.keep == SavedValues.ALL
        operation = Operation(op, name, is_weak=is_weak, is_part=base is not None and target is not base)
        if stores or is_weak or name in ADDITIVE or is_batch_norm(op):
            named = named_arguments(op, (target, *args[1:]), kwargs)
            constant = None if stores else lambda tensor: None if self._depends(tensor) else tensor
            change = self._weak if is_weak else constant
            operation.kept_args = named if change is None else tree_map_tensors(named, change)
        if writes:
            number = self._before_write(operation, target, number)
        result = op(*args, **kwargs)
        memories = [] if is_view(op) else list(map(self.memory, _tensors(result)))
        for memory in memories:
            memory.depends = True
        if stores:
            operation.kept_result = self._kept_result(operation, base if target is base else result)
            for memory in (*memories, *map(self.memory, _tensors(operands))):
                memory.holders.append(operation)
        if has_node:
            self._clone = (graph.current_sequence_nr() - 1, args[0], result) if op is _CLONE else None
            self._operations.setdefault(number, operation)
        return result

    def _kept_result(self, operation: Operation, result: Any) -> Any:
        """Return the part of a result that rules read: for some operations, the results other than the first."""
        if operation.is_weak:
            return result if is_fixed(operation.op) else _weak_result(operation, result)
        is_part = self.keep == SavedValues.CHANGES or operation.name in NORMS or is_batch_norm(operation.op)
        if is_part and isinstance(result, _LISTS):
            return (None, *result[1:])
        is_linear = operation.name in LINEAR
        is_read = self.keep == SavedValues.LINEAR or (self.keep <= SavedValues.CONSTANTS and not is_linear)
        return result if is_read else None

    def recording(self) -> ExitStack:
        """Return a context that records, in which the graph saves no values of the image if none are to be stored."""
        stack, record = ExitStack(), weakref.proxy(self)
        stack.enter_context(self)
        if self.keep == SavedValues.CHANGES:
            # The graph holds the hooks, and is only freed if the hooks do not hold its tensors.
            hooks = saved_tensors_hooks(
                lambda tensor: _shape(tensor) if record._is_unread(tensor) else tensor,
                lambda packed: packed if isinstance(packed, Tensor) else _unread(packed),
            )
            stack.enter_context(hooks)
        return stack

    def _is_unread(self, tensor: Tensor) -> bool:
        """Return whether no rule reads a tensor from the graph: it depends on the image, or the record stores it."""
        running = self._operations.get(graph.current_sequence_nr() - 1)  # None until its results are saved
        return self._depends(tensor) or (running is not None and bool(running.args))

    def _weak(self, tensor: Tensor) -> Tensor | WeakResult:
        """Return an operand to store: a weak reference if it is the unchanged result of a recorded operation."""
        if tensor.is_leaf or graph.tensor_version(tensor) or not self._depends(tensor):
            return tensor
        node, index = graph.source_edge(tensor)
        source = self.operation(node)
        return tensor if source is None or is_fixed(source.op) else WeakResult(tensor, source, index)

    def _depends(self, argument: Any) -> bool:
        """Return whether an argument is or holds a tensor that depends on the image."""
        if not isinstance(argument, Tensor):
            return isinstance(argument, _LISTS) and any(map(self._depends, argument))
        if not argument.requires_grad or id(argument) in self._chunks:
            return False
        memory = self.known_memory(argument)
        if memory is not None and memory.depends:
            return True
        node = argument.grad_fn
        return node is not None and is_custom_function(node) and self._follows_image(argument)

    def _follows_image(self, tensor: Tensor) -> bool:
        """Return whether the result of a custom function, whose operations have no nodes, depends on the image."""
        # Do not read the gradient edge: for a function in Python, PyTorch would create a node for it, and shift the
        # numbers.
        nodes: list[Any] = [tensor.grad_fn]
        for node in nodes:
            if self.operation(node):
                self.memory(tensor).depends = True
                return True
            nodes += {function for function, _ in graph.next_functions(node)} - {None, *nodes}
        return False

    def _before_write(self, operation: Operation, target: Tensor, number: int) -> int:
        """Copy stored values in the memory of a tensor that is about to be written; return the node's number."""
        memory = graph.memory_id(target)
        self._chunks.pop(id(target), None)
        clone = self._clone if self._clone and self._clone[0] == number else None
        # An operation that needs its operand later clones it first, and this clone takes the next number.
        is_own = clone is not None and graph.memory_id(clone[1]) == memory
        args = operation.kept_args
        is_stored = any(value is target for value in args.values())
        copied = clone[2] if clone and clone[1] is target else target.clone() if is_stored else target
        operation.kept_args = {name: copied if value is target else value for name, value in args.items()}

        def kept_copy(stored: Tensor) -> Tensor:
            if graph.memory_id(stored) != memory:
                return stored
            return copied if stored is target and copied is not target else stored.clone()

        # A ReLU has gradient zero at each value that it changes, so results need no copy.
        is_rectified = operation.name == "relu" and self.keep != SavedValues.ALL
        for holder in self.memory(target).holders:
            holder.kept_args = tree_map_tensors(holder.kept_args, kept_copy)
            result = holder.kept_result
            if not is_rectified:
                holder.kept_result = tree_map_tensors(result, kept_copy)
            elif holder.name in LINEAR and result is not None and graph.memory_id(result) == memory:
                dims = tuple(range(1, result.dim())) if holder.name == "convolution" else (-1,)
                holder.norms = norms_over(result, dims) if holder.norms is None else holder.norms
        if is_own:
            self._operations[number] = operation
        return number - is_own


def _weak_result(operation: Operation, result: Any) -> Any:
    """Return a result with a weak reference to its first tensor. Other tensors, such as statistics, are unchanged."""
    first = as_results(result)[0]
    weak = None if is_view(operation.op) else WeakTensor(first)
    return weak and tree_map_tensors(result, lambda tensor: weak if tensor is first else tensor)


def norms_over(values: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the Euclidean norms over some dimensions, which remain with length 1."""
    return cast("Tensor", torch.linalg.vector_norm(values, dim=dims, keepdim=True))


def _shape(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _unread(spec: tuple[torch.Size, torch.dtype, torch.device]) -> Tensor:
    """Return a placeholder for a tensor that should not be read, with NaN so that a mistake shows."""
    shape, dtype, device = spec
    return torch.full((), math.nan, dtype=dtype, device=device).expand(shape)


def _tensors(values: Any) -> list[Tensor]:
    """Return a tensor, or the tensors of a list, as a list."""
    if isinstance(values, Tensor):
        return [values]
    return list(chain.from_iterable(map(_tensors, values))) if isinstance(values, _LISTS) else []
