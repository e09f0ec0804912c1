"""The hook manager: the only code that registers hooks on modules, tensors and autograd nodes.

Hooks on modules act only in the thread that opened their manager. Gradients are observed and rewritten by hooks on the
nodes of the autograd graph of one call. Nothing remains on the model, and no other call is affected.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import filterfalse
from operator import attrgetter
from types import FrameType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from . import autograd_graph as graph
from .pytree import first_tensor, tree_map_tensors

# (gradient at the input of an operation, gradient at its output) -> the gradient that replaces the former
GradientRule = Callable[[Tensor, Tensor], Tensor]

_Change = Callable[[Tensor], Tensor | None]
_Token = TypeVar("_Token")
_Begin = Callable[[tuple[Any, ...], dict[str, Any]], _Token]
_End = Callable[[_Token, Any], Any]


@dataclass(eq=False)
class HookScope:
    """State of one `HookManager` that its hooks share. They do not hold the manager, so it can be freed."""

    persistent: bool
    exclusive: bool
    thread: int = field(default_factory=threading.get_ident)
    closed: bool = False

    def acts(self) -> bool:
        """Return whether hooks on modules act: this scope is active in this thread, and no inner scope disables it."""
        for scope in reversed(active_scopes.scopes):  # from the innermost one
            if scope is self:
                return True
            if not scope.closed and (scope.exclusive if self.persistent else not scope.persistent):
                return False
        return False

    def acts_on_leaves(self) -> bool:
        """Return whether hooks on leaves act. Threads share leaves, but hooks ignore backward passes of other threads.

        On an accelerator, threads of the autograd engine run the backward pass. Hooks act in all of them, since these
        threads do not show which thread started the pass.
        """
        is_engine_thread = isinstance(threading.current_thread(), threading._DummyThread)
        return not self.closed and (is_engine_thread or threading.get_ident() == self.thread)


class _ActiveScopes(threading.local):
    """Scopes that are open in a thread, the innermost last."""

    def __init__(self) -> None:
        self.scopes: list[HookScope] = []


active_scopes = _ActiveScopes()


class ModuleHook(partial[Any]):
    """Hook on one module. A copy that `deepcopy` or `pickle` creates together with the module does nothing."""

    def __reduce__(self) -> Any:
        return ModuleHook, (_do_nothing,)


def _do_nothing(*args: Any) -> None:
    pass


class OutputOverride(ModuleHook):
    """Hook that replaces the output of a layer before any other hook sees it."""


_Registered = list[tuple[nn.Module, ModuleHook]]


class HookManager(ExitStack[None]):
    """All hooks of one call, or of one `with` block of the user; they are removed when the block ends.

    Hooks act only in the thread that opened the manager, since other threads may run the same model at the same time.
    Hooks of a call do not act during a nested call: a model may itself compute an explanation in its forward.

    Args:
        persistent: The manager belongs to a `with` block of the user. Its hooks also act on calls inside that block.
        exclusive: Hooks of persistent managers do not act while this one is open.
    """

    def __init__(self, *, persistent: bool = False, exclusive: bool = False) -> None:
        super().__init__()
        self._scope = HookScope(persistent, exclusive)
        self._registered: _Registered = []
        self._handles: list[RemovableHandle] = []  # of hooks on graphs
        self._most_handles = 1024
        self.callback(_close, self._scope, self._registered, self._handles)
        # Hooks hold the scope, not the manager. Therefore a manager that is freed without __exit__ removes its hooks.
        weakref.finalize(self, _close, self._scope, self._registered, self._handles)

    def __enter__(self) -> Self:
        """Make the manager the innermost one of this thread and return it."""
        self._scope.thread = threading.get_ident()
        # Another thread may have closed some scopes.
        active_scopes.scopes = [*filterfalse(attrgetter("closed"), active_scopes.scopes), self._scope]
        return self

    def observe(self, layer: nn.Module, callback: Callable[[Any], Any], *, kind: type[ModuleHook] = ModuleHook) -> None:
        """Call `callback(output)` after each call of `layer`; a result other than None replaces the output.

        The hook runs before the user's hooks, so that outputs stored by them have a gradient.
        """
        if not takes_hooks(layer):
            return
        scope = self._scope

        def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
            return callback(output) if scope.acts() else None

        # Append before registering, so that the hook is removed even after Ctrl-C in between.
        self._registered.append((layer, kind(hook)))
        hooks: Any = layer.register_forward_hook(self._registered[-1][1], prepend=True).hooks_dict_ref()
        if len(hooks) == 1:
            return
        overrides = [key for key, value in list(hooks.items()) if isinstance(value, OutputOverride)]
        for key in sorted(overrides, reverse=True):
            with suppress(KeyError):  # another thread may have removed its hook in the meantime
                hooks.move_to_end(key, last=False)

    def revise(self, layer: nn.Module, change: Callable[[Any], Any]) -> None:
        """Replace the output of each call of `layer` by `change(output)`, unless that is None.

        Everything that observes or captures the layer sees the replaced output. Several replacements act in the order
        of registration.
        """
        self.observe(layer, change, kind=OutputOverride)

    def revise_input(self, layer: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the first argument of each call of `layer` by `change(argument)`."""
        scope = self._scope

        def hook(module: nn.Module, args: tuple[Any, ...]) -> Any:
            return (change(args[0]), *args[1:]) if scope.acts() else None

        self._registered.append((layer, ModuleHook(hook)))
        layer.register_forward_pre_hook(self._registered[-1][1])

    def around(self, layer: nn.Module, begin: _Begin[_Token], end: _End[_Token]) -> None:
        """Call `begin(args, kwargs)` before each call of `layer`, and `end(result of begin, output)` after it.

        A result of `end` other than None replaces the output. Both run after the user's own hooks, and get the final
        arguments and output. `end` is not called for a call that raises. The result of `begin` is then dropped, at the
        next call of the layer at the latest. Neither is called inside a scripted module.
        """
        if not takes_hooks(layer):
            return
        first, last = _call_hooks(self._scope, begin, end)
        self._registered += [(layer, first), (layer, last)]
        layer.register_forward_pre_hook(first, with_kwargs=True)
        layer.register_forward_hook(last, with_kwargs=True)

    def capture(self, layer: nn.Module, *, record: bool = False) -> list[Tensor]:
        """Return a list that receives the output of `layer`, one tensor per call.

        The captured tensor is a clone. If it requires a gradient, the model continues with a second clone. Therefore a
        following in-place operation cannot overwrite the captured tensor. Its gradient is the gradient of the layer's
        output, not of other views of the same memory. If the output has several tensors, the first is captured. With
        `record`, gradients are recorded from this layer on, even if they are disabled.
        """
        captured: list[Tensor] = []

        def keep(output: Any) -> Any:
            tensor = output if isinstance(output, Tensor) else first_tensor(output)
            if tensor is None:
                return None
            if record:
                # Gradients stay enabled until the no_grad block around the model's forward ends.
                torch.set_grad_enabled(True)
            clone = tensor.clone()
            if record and not clone.requires_grad and clone.is_floating_point():
                clone = clone.detach().requires_grad_()
            captured.append(clone)
            if not clone.requires_grad:
                return None
            passed_on = clone.clone()
            if tensor is output:
                return passed_on
            return tree_map_tensors(output, lambda other: passed_on if other is tensor else other)

        self.observe(layer, keep)
        return captured

    def rewrite(self, rules: Iterable[tuple[Node, GradientRule]]) -> None:
        """Replace the gradient at the input of each nonlinearity by the result of its rule, within this block.

        Only the nonlinearity's own branch changes: a skip connection that shares its input keeps its gradient.
        """
        for node, rule in rules:
            self._keep(node.register_hook(_node_hook(rule, node)))

    def at_node(self, node: Node, callback: Callable[[graph.Gradients, graph.Gradients], None]) -> None:
        """Call `callback` with the gradients of the operands and results of an operation, in each backward pass."""
        self._keep(node.register_hook(callback))

    def at_gradient(self, tensor: Tensor, callback: _Change) -> None:
        """Call `callback` with the gradient of a tensor in each backward pass; a result other than None replaces it.

        It is the gradient of the tensor's current value. A later in-place operation has no effect, unless the tensor is
        a view.
        """
        scope, is_leaf = self._scope, tensor.is_leaf

        def hook(gradient: Tensor) -> Tensor | None:
            return callback(gradient) if (scope.acts_on_leaves() if is_leaf else not scope.closed) else None

        self._keep(tensor.register_hook(hook))  # type: ignore[no-untyped-call]
        if not is_leaf:
            graph.next_functions(tensor.grad_fn)

    def at_input_edge(self, tensor: Tensor, edge: graph.InputEdge, callback: Callable[[Tensor], None]) -> None:
        """Call `callback` with the gradient that an operation passes to its operand `tensor`, in each backward pass."""
        # The hook must not hold its node, because the node holds the hook.
        operands, like = edge.operands, graph.GradSpec(tensor.shape, tensor.dtype)

        def hook(grad_inputs: graph.Gradients, grad_outputs: graph.Gradients) -> None:
            part = like.sum_of(grad_inputs, operands)
            if part is not None:
                callback(part)

        self._keep(edge.node.register_hook(hook))

    def rewrite_input(self, tensor: Tensor, edges: Sequence[graph.InputEdge], rule: _Change) -> None:
        """Replace the gradient that one call of a module passes to one of its inputs by the result of `rule`.

        Other uses of the same input keep their gradient.

        Args:
            tensor: The input, before or after the call.
            edges: The operations of the call that pass gradient to the input.
            rule: The function from the sum of their gradients to its replacement; a result of None keeps the sum.
        """
        accumulator = graph.GradAccumulator(graph.GradSpec(tensor.shape, tensor.dtype), rule)
        by_age = sorted(edges, key=lambda edge: graph.sequence_nr(edge.node))
        for age, edge in enumerate(by_age):
            # A hook holds only operations older than its own. None of them leads back to it, so there is no cycle.
            older = [older.node for older in by_age[:age]]
            self._keep(edge.node.register_hook(partial(accumulator.add, edge.operands, older)))

    def _keep(self, handle: RemovableHandle) -> None:
        self._handles.append(handle)
        if len(self._handles) > self._most_handles:
            # Drop the handles of graphs that have been freed.
            self._handles[:] = [handle for handle in self._handles if handle.hooks_dict_ref() is not None]
            self._most_handles = max(1024, 2 * len(self._handles))


def takes_hooks(layer: nn.Module) -> bool:
    """Return whether a layer takes hooks. Scripted layers refuse them; scripted and traced layers do not call them."""
    return type(layer).register_forward_hook is nn.Module.register_forward_hook


def is_hookable(model: nn.Module, name: str, layer: nn.Module) -> bool:
    """Return whether hooks on a layer run when the model calls it. TorchScript does not run them."""
    above = name.rpartition(".")[0]
    scripted = torch.jit.ScriptModule
    # A scripted model has no get_submodule, and all its layers are inside it.
    inside = bool(name) and (isinstance(model, scripted) or isinstance(model.get_submodule(above), scripted))
    return takes_hooks(layer) and not (inside and isinstance(layer, scripted))


def _close(scope: HookScope, registered: _Registered, handles: list[RemovableHandle]) -> None:
    scope.closed = True
    for layer, hook in registered:
        graph.remove_forward_hook(layer, hook)
    registered.clear()  # only now: if Ctrl-C stops this function, the finalizer calls it again
    while handles:
        handles[-1].remove()
        handles.pop()
    if scope in active_scopes.scopes:
        active_scopes.scopes.remove(scope)


def _call_hooks(scope: HookScope, begin: _Begin[_Token], end: _End[_Token]) -> tuple[ModuleHook, ModuleHook]:
    """Return a hook before and a hook after the calls of a layer: `end` gets the result of `begin` for that call."""
    begun: dict[int, _Token] = {}  # by the id of the frame of the call

    # If another thread registers or removes a hook meanwhile, PyTorch may leave out the keyword arguments.
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if scope.acts():
            frame = sys._getframe(1)
            if begun:
                # Remove the entries of calls that raised.
                for raised in begun.keys() - _callers(frame):
                    del begun[raised]
            begun[id(frame)] = begin(args, kwargs or {})

    def after(module: nn.Module, args: tuple[Any, ...], *kwargs_and_output: Any) -> Any:
        frame = id(sys._getframe(1))
        # Inner calls may have raised, and this call may have begun before the scope was active.
        if frame not in begun or not scope.acts():
            return None
        key, token = begun.popitem()
        while key != frame:
            key, token = begun.popitem()
        return end(token, kwargs_and_output[-1])

    return ModuleHook(before), ModuleHook(after)


def _callers(frame: FrameType) -> set[int]:
    """Return the ids of the frames that called a frame. Ids, unlike frames, do not keep the variables alive."""
    callers = set()
    caller = frame.f_back
    while caller is not None:
        callers.add(id(caller))
        caller = caller.f_back
    return callers


def _node_hook(rule: GradientRule, node: Node) -> Callable[[graph.Gradients, graph.Gradients], graph.Gradients]:
    view = graph.view_layout(node)  # the hook must not hold its node

    def hook(grad_inputs: graph.Gradients, grad_outputs: graph.Gradients) -> graph.Gradients:
        signal = grad_outputs[0]
        # Only the operand that carries the network's signal has a gradient; bounds and slopes have none.
        index, operand = -1, None
        while operand is None and index + 1 < len(grad_inputs):
            index += 1
            operand = grad_inputs[index]
        if operand is None or signal is None:
            return grad_inputs
        # If the operation broadcast or promoted its operand, the signal has another shape or type.
        if signal.shape != operand.shape or signal.dtype != operand.dtype:
            signal = signal.sum_to_size(operand.shape).to(operand.dtype)
        if view is None:
            return (*grad_inputs[:index], rule(operand, signal), *grad_inputs[index + 1 :])
        # The gradient of the viewed tensor has its memory layout.
        signal, result = (operand.new_empty_strided(operand.shape, operand.stride()).copy_(signal) for _ in range(2))
        result.as_strided(*view).copy_(rule(operand.as_strided(*view), signal.as_strided(*view)))
        return (*grad_inputs[:index], result, *grad_inputs[index + 1 :])

    return hook
