"""What watches and rewrites a call: outputs of layers, and gradients on their way back. The only hook code.

Hooks on modules act only in the thread that opened their manager. Gradients are seen and rewritten by hooks on the
nodes of the autograd graph of the very call, so that nothing stays on the model and no other call sees them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .autograd_graph import (
    GradAccumulator,
    Gradients,
    GradSpec,
    InputEdge,
    forward_hooks,
    next_functions,
    remove_forward_hook,
    sequence_nr,
)
from .model_state import retry_on_interrupt
from .module_hooks import ModuleHook, OutputOverride, call_hooks
from .pytree import first_tensor, tree_map_tensors
from .rectifiers import Site
from .scope import HookScope, active_scopes

Rule = Callable[[Tensor, Tensor], Tensor]
"""(gradient at the input of an operation, gradient at its output) -> what to pass on instead of the former."""


_Registered = list[tuple[nn.Module, ModuleHook]]
_Token = TypeVar("_Token")


class HookManager(ExitStack[None]):
    """Every hook of one call, or of one block of the user's, taken away when the block ends, however it ends.

    Hooks act only in the thread that opened the manager, since other threads may run the same model at the same time.
    Those of a call act only while no other call is open inside it, since a model may ask for an explanation while it
    runs.

    Args:
        standing: The manager is the user's own, and acts also on the calls that are made inside its block.
        alone: Standing managers do not act while this one is open.
    """

    def __init__(self, *, standing: bool = False, alone: bool = False) -> None:
        super().__init__()
        self._mark = HookScope(standing, alone)
        self._registered: _Registered = []
        self._on_graphs: list[RemovableHandle] = []
        self._most_on_graphs = 1024
        # Hooks know the mark and not the manager, so it dies with its block, even where a Ctrl-C keeps __exit__ from
        # running.
        self._last_resort = weakref.finalize(
            self, retry_on_interrupt, partial(_close, self._mark, self._registered, self._on_graphs)
        )

    def __enter__(self) -> Self:
        """The manager, now the innermost one of this thread."""
        super().__enter__()
        self._mark.thread = threading.get_ident()
        active_scopes.add(self._mark)
        return self

    def __exit__(self, *error: Any) -> None:
        """Take everything away. Errors of the block go on."""
        try:
            super().__exit__(*error)
        finally:
            retry_on_interrupt(partial(_close, self._mark, self._registered, self._on_graphs))
            self._last_resort.detach()

    def observe(self, layer: nn.Module, see: Callable[[Any], Any]) -> None:
        """Call `see(output)` after each call of `layer`; what it returns, if anything, takes the output's place."""
        mark = self._mark

        def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
            return see(output) if mark.acts() else None

        self._put_first(layer, ModuleHook(hook))

    def revise(self, layer: nn.Module, change: Callable[[Any], Any]) -> None:
        """Let `change(output)` take the place of the output of each call of `layer`, where it is not None.

        All that observes or captures the layer sees what it is changed to. Of several, the first made acts first.
        """
        mark = self._mark

        def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
            return change(output) if mark.acts() else None

        self._put_first(layer, OutputOverride(hook))

    def _put_first(self, layer: nn.Module, hook: ModuleHook) -> None:
        if not takes_hooks(layer):
            return
        # Written down first, so that an interrupt in between leaves nothing behind.
        self._registered.append((layer, hook))
        # Ahead of the user's own hooks: whatever they keep of the output is what flows on, and has its gradient.
        layer.register_forward_hook(hook, prepend=True)
        hooks = forward_hooks(layer)
        for key in sorted((key for key, each in list(hooks.items()) if isinstance(each, OutputOverride)), reverse=True):
            with suppress(KeyError):  # another thread may have taken its own away by now
                hooks.move_to_end(key, last=False)  # type: ignore[attr-defined]

    def around(
        self,
        layer: nn.Module,
        begin: Callable[[tuple[Any, ...], dict[str, Any]], _Token],
        end: Callable[[_Token, Any], Any],
    ) -> None:
        """Call `begin(args, kwargs)` before each call of `layer` and `end(what begin returned, output)` after it.

        What `end` returns, if anything, takes the output's place. Both come after the user's own hooks: they see what
        goes in and what flows on. A call that raises has no end, and what it began with is kept until the next call of
        the layer at the longest; a scripted part has neither.
        """
        if not takes_hooks(layer):
            return
        first, last = call_hooks(self._mark, begin, end)
        self._registered += [(layer, first), (layer, last)]
        layer.register_forward_pre_hook(first, with_kwargs=True)
        layer.register_forward_hook(last, with_kwargs=True)

    def capture(self, layer: nn.Module, *, record: bool = False) -> list[Tensor]:
        """The outputs of `layer`, one tensor per call, as the calls come.

        A copy is captured, and where gradients are wanted a copy of that flows on: a following in-place operation
        cannot overwrite the capture, and its gradient is that of what the layer returned, not of other names for the
        same memory. Of an output of several tensors the first is captured. With `record`, gradients are recorded from
        here on, also where they were off before.
        """
        captured: list[Tensor] = []

        def keep(output: Any) -> Any:
            tensor = first_tensor(output)
            if tensor is None:
                return None
            if record:
                # Lasts until the no_grad block around the model's forward ends and restores its own state.
                torch.set_grad_enabled(True)
            kept = tensor.clone()
            if record and not kept.requires_grad and kept.is_floating_point():
                kept = kept.detach().requires_grad_()
            captured.append(kept)
            return _with_first_tensor(output, kept.clone()) if kept.requires_grad else None

        self.observe(layer, keep)
        return captured

    def rewrite(self, sites: Iterable[Site], rule_for: Callable[[Site], Rule]) -> None:
        """Let the gradient at each site's input be what its rule makes of it, in the backward passes of this block.

        Only the site's own branch is touched: a skip connection that shares its input keeps its gradient.
        """
        for site in sites:
            self._keep(site.node.register_hook(_node_hook(rule_for(site))))

    def at_gradient(self, tensor: Tensor, see: Callable[[Tensor], Tensor | None]) -> None:
        """Call `see` with the gradient of a tensor in each backward pass; what it returns, if anything, replaces it.

        It is the gradient of what the tensor is now: a later in-place operation on it makes no difference, unless the
        tensor is a view.
        """
        mark, is_leaf = self._mark, tensor.is_leaf

        def hook(gradient: Tensor) -> Tensor | None:
            return see(gradient) if (mark.acts_on_leaves() if is_leaf else not mark.closed) else None

        self._keep(tensor.register_hook(hook))  # type: ignore[no-untyped-call]
        if not is_leaf:
            next_functions(tensor.grad_fn)

    def at_exit(self, tensor: Tensor, at: InputEdge, see: Callable[[Tensor], None]) -> None:
        """Call `see` with what one operation passes on to `tensor`, an operand of it, in each backward pass."""
        # The hook does not hold the node that holds the hook.
        mark, operands, like = self._mark, at.operands, GradSpec(tensor.shape, tensor.dtype)

        def hook(grad_inputs: Gradients, grad_outputs: Gradients) -> None:
            part = None if mark.closed else like.sum_of(grad_inputs, operands)
            if part is not None:
                see(part)

        self._keep(at.node.register_hook(hook))

    def rewrite_input(
        self, tensor: Tensor, exits: Sequence[InputEdge], rule: Callable[[Tensor], Tensor | None]
    ) -> None:
        """Let the gradient that one call of a module passes on to one of its inputs be what `rule` makes of it.

        Other uses of the same input keep their gradient.

        Args:
            tensor: The input, before or after the call.
            exits: The operations that pass on its gradient.
            rule: From the sum of what they pass on to what takes its place; None leaves it.
        """
        mark, meeting = self._mark, GradAccumulator(GradSpec(tensor.shape, tensor.dtype), rule)
        by_age = sorted(exits, key=lambda each: sequence_nr(each.node))
        for at, each in enumerate(by_age):
            # A hook holds operations older than its own only: none leads back to it, so graphs do not hold themselves.
            arrive = partial(meeting.add, each.operands, [older.node for older in by_age[:at]])

            def hook(
                grad_inputs: Gradients, grad_outputs: Gradients, arrive: Callable[[Gradients], Gradients] = arrive
            ) -> Gradients | None:
                return None if mark.closed else arrive(grad_inputs)

            self._keep(each.node.register_hook(hook))

    def _keep(self, handle: RemovableHandle) -> None:
        self._on_graphs.append(handle)
        if len(self._on_graphs) > self._most_on_graphs:
            # Graphs that are gone took their hooks with them.
            self._on_graphs[:] = [each for each in self._on_graphs if each.hooks_dict_ref() is not None]
            self._most_on_graphs = max(1024, 2 * len(self._on_graphs))


def takes_hooks(layer: nn.Module) -> bool:
    """Whether a layer takes hooks. A scripted one refuses them; that and a traced one do not call their parts."""
    return type(layer).register_forward_hook is nn.Module.register_forward_hook


def is_seen(model: nn.Module, name: str, layer: nn.Module) -> bool:
    """Whether hooks see the calls of a layer by the model: not where TorchScript makes them."""
    above = name.rpartition(".")[0]
    scripted = torch.jit.ScriptModule
    # A scripted model has no get_submodule, and all of it is inside.
    inside = bool(name) and (isinstance(model, scripted) or isinstance(model.get_submodule(above), scripted))
    return takes_hooks(layer) and not (inside and isinstance(layer, torch.jit.ScriptModule))


def _close(mark: HookScope, registered: _Registered, on_graphs: list[RemovableHandle]) -> None:
    """Take away the hooks of a manager, of which the last may not have been registered yet."""
    mark.closed = True
    for layer, hook in registered:
        remove_forward_hook(layer, hook)
    while on_graphs:
        on_graphs.pop().remove()
    while mark in active_scopes.marks:
        active_scopes.marks.remove(mark)


def _node_hook(rule: Rule) -> Callable[[Gradients, Gradients], Gradients]:
    def hook(grad_inputs: Gradients, grad_outputs: Gradients) -> Gradients:
        signal = grad_outputs[0]
        # The operand that the network's signal came by is the one that has a gradient; bounds and slopes have none.
        at, operand = next(((i, grad) for i, grad in enumerate(grad_inputs) if grad is not None), (0, None))
        if operand is None or signal is None:
            return grad_inputs
        # Where the operation broadcast or promoted its operand, the signal comes back in another shape or type.
        signal = signal.sum_to_size(operand.shape).to(operand.dtype)
        return (*grad_inputs[:at], rule(operand, signal), *grad_inputs[at + 1 :])

    return hook


def _with_first_tensor(output: Any, tensor: Tensor) -> Any:
    """The output with its first tensor replaced; the container keeps its type."""
    first = first_tensor(output)
    return tree_map_tensors(output, lambda each: tensor if each is first else each)
