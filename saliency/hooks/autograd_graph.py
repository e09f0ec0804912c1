"""All access to private names of PyTorch, such as the edges of one module call in the autograd graph.

This is the only file with private names of PyTorch (`tests/test_architecture.py` checks it). Why each is needed, and
the test that fails first when PyTorch changes it:

- `Node._saved_*`, `_input_metadata`, `_wrapped_node`, `Function._backward_cls`, `torch._C._functions` distinguish a
  ReLU from other operations and from leaves: `methods/test_gradient.py`. PyTorch before 2.14 has no `_wrapped_node`.
- `Node._raw_saved_*` free the saved tensors of a node: `relevance/test_walk.py`.
- `Node._sequence_nr`, `_get_sequence_nr` limit a traversal to the operations of one call;
  `_will_engine_execute_node` and `_current_graph_task_id` show when all parts of one gradient are summed:
  `inspection/test_edit.py`.
- `Tensor._version`, `_base`, `_backward_hooks` detect in-place operations and restore the state of
  tensors: `inspection/test_record.py`, `inspection/test_edit.py`.
- `Module._forward_hooks` and similar dicts list and order hooks; `_modules` also lists entries that are None or have
  two names: `hooks/test_hooks.py`.
- `TorchDispatchMode`, `OpOverload._schema`, `UntypedStorage._cdata` record a forward to run parts of it again:
  `engine/test_tail.py`.
- `torch._C._functorch` detects tensors inside `torch.func` transformations: `inspection/test_record.py`.
- `_parameters` and `_buffers` list the tensors of a module in a tenth of the time of `parameters()`;
  `torch._inductor.compile` compiles a graph with frozen weights, without the guards of `torch.compile`, which would
  run eagerly in a call of a method: `program/test_compiled.py`.
- `_scaled_dot_product_attention_math` makes second derivatives possible: `methods/test_combined_cam.py`.

An edge is where the gradient enters or leaves a module. Nothing is inserted into the graph. The operations that pass
gradient to an input are found by traversing the graph from the module's outputs. Therefore in-place modules and
functions between modules keep working.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _functorch
from torch._ops import OpOverload as OpOverload
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.fx import GraphModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as _nn_module
from torch.nn.modules._functions import BackwardHookFunction
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction

from ..errors import CALL, ModelError, NotApplicableError, TargetError

State = TypeVar("State")

REENTRANT = "a checkpoint with use_reentrant=True hides operations of the model; pass use_reentrant=False"
CUT = "the gradient is cut in between, for example by a quantised layer, detach or argmax"
_FORWARD_ONLY = "methods that only run the model forwards, such as occlusion and rise, need no gradient"
NO_GRADIENT = "the score has no gradient: the target or the model detaches it, or uses argmax or .item()"
INDEPENDENT = f"no gradient of the score reaches the input: it does not depend on the input, or {CUT}; {_FORWARD_ONLY}"

# Tensors.


def is_tracing() -> bool:
    """Return whether this call is traced into a program, in which values cannot be checked."""
    return bool(getattr(CALL.get(None), "is_tracing", False))


def tensor_version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; -1 for inference tensors, which have no counter."""
    return -1 if tensor.is_inference() else tensor._version


def view_base(tensor: Tensor) -> Tensor | None:
    """Return the tensor of which a tensor is a view; None if it is not a view."""
    return tensor._base


def tensor_hooks(tensor: Tensor) -> Mapping[int, Any] | None:
    """Return the gradient hooks of a tensor by their ids; None if no hook was ever registered."""
    return cast("Mapping[int, Any] | None", tensor._backward_hooks)


def forget_tensor_hooks(tensor: Tensor) -> None:
    """Restore the state of a tensor that never had a gradient hook, if no hook is left."""
    if not tensor_hooks(tensor):
        tensor._backward_hooks = None


# Modules.


def remove_forward_hook(module: nn.Module, hook: object) -> None:
    """Remove a forward hook or forward pre-hook by identity, if it is registered."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for key, value in list(hooks.items()):
            if value is hook:
                hooks.pop(key, None)
                module._forward_hooks_with_kwargs.pop(key, None)
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def modules_and_hooks(model: nn.Module) -> tuple[int, ...]:
    """Return the id of each module of a model, followed by the ids of its forward hooks, unique in the process."""
    ids: list[int] = []
    for module in unique_modules(model):
        ids += (id(module), *module._forward_hooks, *module._forward_pre_hooks)
    return tuple(ids)


def module_tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the parameters and buffers of modules."""
    parts = [part for module in modules for part in (module._parameters, module._buffers)]
    return [tensor for part in parts for tensor in part.values() if tensor is not None]


def frozen(graph: GraphModule, inputs: Sequence[Any], mode: str | None) -> Callable[..., Sequence[Tensor]]:
    """Compile a graph for inputs, or inputs of symbolic sizes, with its weights as constants.

    Args:
        graph: The graph.
        inputs: The inputs, as real or fake tensors.
        mode: As for `torch.compile`.
    """
    from torch import _inductor

    options = _inductor.list_mode_options(mode) if mode else {}
    compiled: Callable[..., Sequence[Tensor]] = _inductor.compile(graph, list(inputs), {**options, "freezing": True})
    return compiled


def global_module_hooks() -> Iterator[tuple[str, Mapping[int, Any]]]:
    """Yield the hooks that are registered for all modules of the process, by kind."""
    for name, hooks in vars(_nn_module).items():
        if name.startswith("_global_") and isinstance(hooks, dict):
            yield name[1:], hooks


def unique_modules(model: nn.Module) -> list[nn.Module]:
    """Return each module of a model once, the model first. Much faster than `model.modules()`."""
    modules = {model: None}
    stack = [model]
    while stack:
        for child in stack.pop()._modules.values():
            if child is not None and child not in modules:
                modules[child] = None
                if child._modules:
                    stack.append(child)
    return list(modules)


# Nodes of the autograd graph.

# Class of the node of a part that is checkpointed with `use_reentrant=True`.
CHECKPOINT_NODE: type = CheckpointFunction._backward_cls
# Class of the nodes of leaf tensors, such as parameters.
LEAF_NODE: type = torch._C._functions.AccumulateGrad
# Class of a node that only calls the full backward hooks of a module, and passes on the gradient of each tensor.
_HOOK_NODE: type = BackwardHookFunction._backward_cls


def saved(node: Any, name: str, *default: Any) -> Any:
    """Return a tensor or option that an operation has saved for its gradient.

    Raises:
        AttributeError: The operation saves nothing of that name, and no default is given.
    """
    return getattr(node, f"_saved_{name}", *default)


def result_shape(node: Any) -> tuple[int, ...]:
    """Return the shape of the first result of an operation."""
    return tuple(node._input_metadata[0].shape)


def result_specs(nodes: Iterable[Any]) -> dict[Node, list[GradSpec]]:
    """Return the shape and type of the gradient of each result of some operations."""
    specs: defaultdict[Node, list[GradSpec]] = defaultdict(list)
    for node in nodes:
        for part in node._input_metadata:
            specs[node].append(GradSpec(torch.Size(part.shape), part.dtype))
    return specs


def result_spec(node: Any, index: int) -> GradSpec:
    """Return the shape and type of the gradient of a result of an operation."""
    metadata = node._input_metadata[index]
    return GradSpec(torch.Size(metadata.shape), metadata.dtype)


@functools.cache
def _saved_names(node_class: type) -> list[str]:
    constants = {"_raw_saved_weight", "_raw_saved_bias", "_raw_saved_running_mean", "_raw_saved_running_var"}
    if "BatchNorm" in node_class.__name__:  # the results after the first are one number per channel
        constants |= {"_raw_saved_result1", "_raw_saved_result2"}
    return [name for name in dir(node_class) if name.startswith("_raw_saved_") and name not in constants]


def free_saved(
    node: Any, pack: Callable[[Tensor], Any] = lambda _: None, unpack: Callable[[Any], Any] = lambda _: None
) -> None:
    """Free the tensors that an operation saved for its gradient, except for weights, biases and statistics.

    Args:
        node: The operation.
        pack: The function from each tensor to the value that is stored instead.
        unpack: The function from that value to the tensor that is read. Without it, no gradient can be computed.
    """
    for name in _saved_names(node.__class__):
        saved = getattr(node, name)
        for tensor in saved if isinstance(saved, tuple) else (saved,):
            with suppress(RuntimeError):  # there is no tensor, or hooks hold it
                tensor.register_hooks(pack, unpack)


def is_python_function(node: Any) -> bool:
    """Return whether a node belongs to a `torch.autograd.Function`."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def wrapped_node(node: Any) -> Node | None:
    """Return the in-place operation on a view whose result this node copies into the viewed tensor; else None."""
    return cast("Node | None", getattr(node, "_wrapped_node", None))


def inner_node(node: Any) -> Node:
    """Return the operation of a node; for an in-place operation on a view of a whole tensor, the wrapped operation."""
    inner = wrapped_node(node) if type(node).__name__ == "CopySlices" else None
    is_whole = inner is not None and result_spec(inner, 0).shape.numel() == result_spec(node, 0).shape.numel()
    return cast("Node", inner if is_whole else node)


def view_layout(node: Any) -> tuple[Sequence[int], Sequence[int]] | None:
    """Return the shape and strides of the view on which an activation works in place; None if there is no view."""
    if (inner := inner_node(node)) is node:
        return None
    values: Any = saved(inner, "result", saved(inner, "self", None))
    return values.shape, values.stride()


def hides_operation(node: Any) -> bool:
    """Return whether a node hides an in-place operation on a view that may be an activation, as before PyTorch 2.14.

    An operation with exactly one other operand, which has a gradient, is an assignment or a sum.
    """
    if hasattr(node, "_wrapped_node") or type(node).__name__ != "CopySlices":
        return False
    others = node.next_functions[1:]
    return len(others) != 1 or others[0][0] is None


_PROBABILITIES = ("Sigmoid", "Softmax", "SafeSoftmax")
# Operations that do not change numbers from 0 to 1.
_TRANSPARENT = (
    *("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Select", "Slice", "Split", "Unbind", "Alias"),
    *("Clone", "ToCopy", "Permute", "Transpose", "T", "Expand", "Index", "Cat", "Stack"),
    *("Clamp", "ClampMin", "ClampMax", "UpsampleBilinear2D", "UpsampleNearest2D"),
)


_COMBINING = {"Convolution", "Addmm", "Mm", "Mv", "Bmm", "Baddbmm", "Linear", "NativeLayerNorm", "NativeGroupNorm"}


def ends_in_probability(tensor: Tensor) -> bool:
    """Return whether a sigmoid or softmax computed all numbers of a tensor, and later operations only moved them."""
    if not tensor.requires_grad:
        return False
    ends = [source_edge(tensor)[0]]
    while ends:
        node = ends.pop()
        kind = node.name().partition("Backward")[0]
        if kind in _TRANSPARENT:
            ends += [function for function, _ in next_functions(node) if function is not None]
        elif kind not in _PROBABILITIES:
            return False
    return True


# Operators.


def memory_id(tensor: Tensor) -> int:
    """Return the id of the memory of a tensor, the same for all its views."""
    return int(tensor.untyped_storage()._cdata)


class DispatchMode(TorchDispatchMode):
    """Dispatch mode that is not hidden from the compiler: hiding it would import the compiler, which takes seconds."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class MemoryMode(DispatchMode, Generic[State]):
    """Dispatch mode that keeps a state for each block of memory, which a tensor shares with its views.

    Args:
        new_state: Function from a tensor to the first state of its memory.
    """

    def __init__(self, new_state: Callable[[Tensor], State]) -> None:
        super().__init__()
        self._new_state = new_state
        # While a weak reference exists, no other memory gets its id.
        self._memories: dict[int, tuple[StorageWeakRef, State]] = {}

    def known_memory(self, tensor: Tensor) -> State | None:
        """Return the state of the memory of a tensor, or None."""
        entry = self._memories.get(memory_id(tensor))
        return entry and entry[1]

    def memory(self, tensor: Tensor) -> State:
        """Return the state of the memory of a tensor, created by the first call."""
        number = memory_id(tensor)
        if number not in self._memories:
            reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self._memories[number] = reference, self._new_state(tensor)
        return self._memories[number][1]

    def forget_freed(self) -> None:
        """Free the states of memories that no tensor uses any more."""
        entries = self._memories.items()
        self._memories = {number: entry for number, entry in entries if not entry[0].expired()}  # type: ignore[no-untyped-call]


def operator_schema(op: OpOverload[..., Any]) -> Any:
    """Return the schema of an operator: the names and types of its arguments, and which of them it writes to."""
    return op._schema


class PlainAttention(TorchFunctionMode):
    """Mode that computes attention by its formula in this thread, since fused kernels have no second derivative."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return torch.ops.aten._scaled_dot_product_attention_math(*args, **kwargs)[0]
        if func is F.multi_head_attention_forward and not kwargs.get("need_weights", True):
            # With need_weights=True, PyTorch does not use fused kernels.
            return func(*args, **{**kwargs, "need_weights": True})[0], None
        return func(*args, **kwargs)


def compiler_is_loaded() -> bool:
    """Return whether this process has imported the compiler; if not, no part of any model is compiled."""
    return "torch._dynamo" in sys.modules


# Transformed tensors.


def is_wrapped(tensor: Tensor) -> bool:
    """Return whether a tensor is inside `torch.func` or `is_grads_batched=True`, and so has no values to read."""
    return _functorch.is_functorch_wrapped_tensor(tensor) or _functorch.is_legacy_batchedtensor(tensor)


# Edges of one call.

Gradients = tuple[Tensor | None, ...]  # of the operands, or of the results, of one operation


def next_functions(node: Any) -> tuple[tuple[Node | None, int], ...]:
    """Return the operations to which a node passes its gradient, with the index of their result.

    Full backward hooks of modules are stepped over.

    Call this for every node that Python code accesses. PyTorch frees a graph without recursion, except for nodes with a
    Python object: a deep graph of these would overflow the stack. Therefore the metadata of a node holds the next
    nodes: Python frees nested dictionaries and tuples of any depth.
    """
    functions: tuple[tuple[Node | None, int], ...] = node.metadata.get("saliency.next_functions", ())
    if not functions and (functions := node.next_functions):
        for function, _ in functions:
            if type(function) is _HOOK_NODE:
                functions = tuple(_without_hook(*edge) for edge in functions)
                break
        node.metadata["saliency.next_functions"] = functions
    return functions


def _without_hook(node: Node | None, index: int) -> tuple[Node | None, int]:
    return next_functions(node)[index] if isinstance(node, _HOOK_NODE) else (node, index)


def source_edge(tensor: Tensor) -> tuple[Node, int]:
    """Return the operation that computed a tensor, with the index of its result. The tensor requires a gradient.

    Full backward hooks of modules are stepped over.
    """
    node, index = get_gradient_edge(tensor)[:2]
    if isinstance(node, _HOOK_NODE):
        node, index = cast("tuple[Node, int]", next_functions(node)[index])
    next_functions(node)
    return node, index


def reached_nodes(starts: Iterable[Node], is_end: Callable[[Node], bool]) -> set[Node]:
    """Return the nodes that a backward pass from some nodes reaches, in its order, up to nodes that end the search."""
    reached, stack = set[Node](), list(starts)
    while stack:
        if (node := stack.pop()) not in reached:
            reached.add(node)
            functions = next_functions(node)
            stack += [function for function, _ in functions if function is not None and not is_end(node)]
    return reached


def combines_channels(node: Any) -> bool:
    """Return whether an operation combines the channels of an input, like a convolution or a norm of tokens."""
    return node.name().partition("Backward")[0] in _COMBINING


class InputEdge(NamedTuple):
    """Operation that passes gradient to an input: its node, and the operands that are that input."""

    node: Node
    operands: tuple[int, ...]


def edge(tensor: Tensor) -> GradientEdge | None:
    """Return the gradient edge of a tensor; None if the tensor requires no gradient."""
    if not tensor.requires_grad:
        return None
    result = get_gradient_edge(tensor)
    next_functions(result.node)
    return result


def current_sequence_nr() -> int:
    """Return the sequence number of the next operation in this thread; later operations have no smaller number."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def is_recorded_since(tensor: Tensor, since: int) -> bool:
    """Return whether a tensor is the result of an operation with a sequence number of at least `since`."""
    node = tensor.grad_fn
    if node is None:
        return False
    next_functions(node)
    return sequence_nr(node) >= since


def input_edges(outputs: Iterable[Tensor], inputs: Sequence[GradientEdge | None], since: int) -> list[list[InputEdge]]:
    """Return, for each input of a call, the operations of the call that pass gradient to it.

    Args:
        outputs: The outputs of the call.
        inputs: The edges of its inputs, taken before the call.
        since: `current_sequence_nr()` before the call: older operations do not belong to it.
    """
    edges: list[list[InputEdge]] = [[] for _ in inputs]
    wanted: dict[tuple[Node, int], list[int]] = {}
    for index, source in enumerate(inputs):
        if source is not None:
            wanted.setdefault((source.node, source.output_nr), []).append(index)
    seen: set[Node] = set()
    roots = (output.grad_fn for output in outputs)
    stack = [root for root in roots if root is not None and sequence_nr(root) >= since]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        operands_of: dict[int, list[int]] = {}
        next_functions(node)
        for operand, (function, number) in enumerate(node.next_functions):  # the call may begin with a hook
            if function is None:
                continue
            for index in wanted.get((function, number), ()):
                operands_of.setdefault(index, []).append(operand)
            if function not in seen and since <= sequence_nr(function) < _LEAF:
                stack.append(function)
        for index, operands in operands_of.items():
            edges[index].append(InputEdge(node, tuple(operands)))
    return edges


# The sequence number of all nodes of leaf tensors.
_LEAF = 2**64 - 1


def sequence_nr(node: Any) -> int:
    """Return the sequence number of an operation. It increases with each operation of a thread."""
    return int(node._sequence_nr())


class GradSpec(NamedTuple):
    """Shape and type of a tensor's gradient, regardless of broadcasts and promotions inside an operation."""

    shape: torch.Size
    dtype: torch.dtype

    def fitted(self, grad: Tensor) -> Tensor:
        """Return a gradient in this shape and type."""
        if grad.shape != self.shape:
            is_view = grad.numel() == self.shape.numel()
            grad = grad.reshape(self.shape) if is_view else grad.sum_to_size(self.shape)
        return grad if grad.dtype == self.dtype else grad.to(self.dtype)

    def sum_of(self, grads: Gradients, operands: Iterable[int]) -> Tensor | None:
        """Return the sum of the gradients of some operands; None if none has a gradient."""
        parts = [self.fitted(grad) for grad in (grads[i] for i in operands) if grad is not None]
        return functools.reduce(torch.add, parts) if parts else None


class GradAccumulator:
    """Sum of the gradients that several operations pass to one input, changed by a rule.

    The last operation passes the changed sum; all earlier operations pass nothing. A backward pass runs from the newest
    operation to the oldest.
    """

    def __init__(self, like: GradSpec, rule: Callable[[Tensor], Tensor | None]) -> None:
        self.like, self.rule = like, rule
        self.backward = -1
        self.sum: Tensor | None = None

    def add(
        self, operands: tuple[int, ...], older: Iterable[Node], grad_inputs: Gradients, grad_outputs: Gradients
    ) -> Gradients:
        """Add the gradients of one operation, and return what it passes. The `older` operations run after it."""
        if self.backward != (backward := this_backward()):
            self.backward, self.sum = backward, None
        part = self.like.sum_of(grad_inputs, operands)
        if part is not None:
            self.sum = part if self.sum is None else self.sum + part
        if any(map(torch._C._will_engine_execute_node, older)):
            return _with_gradient(grad_inputs, operands, None)
        total, self.sum = self.sum, None
        changed = None if total is None else self.rule(total)
        return _with_gradient(grad_inputs, operands, total if changed is None else changed)


def _with_gradient(grads: Gradients, operands: tuple[int, ...], gradient: Tensor | None) -> Gradients:
    """Replace the gradients of some operands by one gradient, at the first operand that has one."""
    changed = list(grads)
    for operand in operands:
        changed[operand] = None
    # An operand without gradient cannot receive a gradient.
    first = next((i for i in operands if grads[i] is not None), operands[0])
    changed[first] = gradient
    return tuple(changed)


def this_backward() -> int:
    """Return the unique number of the backward pass that runs in this thread; -1 outside a backward pass."""
    return int(torch._C._current_graph_task_id())


# Traversals and gradients of a whole call.


def nodes_between(score: Tensor, x: Tensor) -> list[Node]:
    """Return the nodes between `score` and `x` in the order of the backward pass.

    Nodes that lead to parameters only are left out: a ReLU on a weight is not a nonlinearity of the network.

    Raises:
        TargetError: No gradient reaches `x`.
    """
    end = get_gradient_edge(x).node
    reaching = {end}
    order = []
    for node, successors in _postorder(score):
        if not reaching.isdisjoint(successors):
            reaching.add(node)
            order.append(node)
    if not order:
        raise TargetError(INDEPENDENT)
    return order[::-1]


def _postorder(score: Tensor) -> list[tuple[Node, list[Node]]]:
    """Return the nodes reachable from `score`, with their successors, which come first; leaves are left out."""
    order: list[tuple[Node, list[Node]]] = []
    entered: set[Node] = set()
    stack: list[tuple[Node, list[Node] | None]] = []
    if score.grad_fn is not None:
        stack.append((source_edge(score)[0], None))
    while stack:
        node, successors = stack.pop()
        if successors is not None:
            order.append((node, successors))
        elif node not in entered:
            entered.add(node)
            successors = []
            stack.append((node, successors))
            for function, _ in next_functions(node):
                if function is not None:
                    successors.append(function)
                    if type(function) is not LEAF_NODE and function not in entered:
                        stack.append((function, None))
    return order


def differentiate(
    output: Tensor | GradientEdge,
    inputs: Sequence[Tensor | GradientEdge],
    weights: Tensor | None = None,
    **options: bool,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of an output at some tensors or edges; None where the output does not depend on them.

    Args:
        output: A tensor that requires a gradient, or an edge.
        inputs: The tensors or edges.
        weights: The weights of the values of the output; None for a single value.
        **options: As for `torch.autograd.grad`.

    Raises:
        NotApplicableError: A part of the model is checkpointed with use_reentrant=True.
        ModelError: cuDNN ran a recurrent layer in evaluation mode.
    """
    ends: Any = inputs  # PyTorch declares tensors or edges, and takes both
    try:
        grads: tuple[Tensor | None, ...] = torch.autograd.grad(output, ends, weights, allow_unused=True, **options)
    except RuntimeError as error:
        nodes = _postorder(output) if isinstance(output, Tensor) else ()
        if any(isinstance(node, CHECKPOINT_NODE) for node, _ in nodes):
            raise NotApplicableError(REENTRANT) from error
        if "RNN backward" in str(error):  # of cuDNN and MIOpen
            cure = "call the method in a block: with torch.backends.cudnn.flags(enabled=False)"
            raise ModelError(f"cuDNN has no backward pass of recurrent layers in evaluation mode; {cure}") from error
        raise
    return grads
