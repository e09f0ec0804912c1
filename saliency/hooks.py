"""The hooks of one call: what a layer gave, and gradients that a rule rewrites on their way back. The only hook code.

Captures are forward hooks that act only in the thread that opened their manager. Rewrites are hooks on the nodes of the
autograd graph of the very call that is explained, so that nothing is attached to the model and no other call sees them.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from .interrupts import surely
from .rectifiers import Site

Rule = Callable[[Tensor, Tensor], Tensor]
"""(gradient at the input of an operation, gradient at its output) -> what to pass on instead of the former."""

_Gradients = tuple[Tensor | None, ...]


class _Open(threading.local):
    """The managers that are open in a thread, each by its mark, the innermost last."""

    def __init__(self) -> None:
        self.marks: list[object] = []


_open = _Open()

_Registered = list[tuple[nn.Module, Callable[..., Any]]]


class HookManager(ExitStack[None]):
    """Every hook of one call, taken away when the block ends, however it ends.

    Hooks act only in the thread that opened the manager, since other threads may run the same model at the same time,
    and only while no other manager is open inside it, since a model may ask for an explanation while it runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self._mark = object()
        self._registered: _Registered = []
        # Hooks know the mark and not the manager, so it dies with its block, even where a Ctrl-C keeps __exit__ from
        # running.
        self._last_resort = weakref.finalize(self, surely, partial(_close, self._mark, self._registered))

    def __enter__(self) -> Self:
        """The manager, now the innermost one of this thread."""
        super().__enter__()
        _open.marks.append(self._mark)
        return self

    def __exit__(self, *error: Any) -> None:
        """Take everything away. Errors of the block go on."""
        try:
            super().__exit__(*error)
        finally:
            surely(partial(_close, self._mark, self._registered))
            self._last_resort.detach()

    def observe(self, layer: nn.Module, see: Callable[[Any], Any]) -> None:
        """Call `see(output)` after each call of `layer`; what it returns, if anything, takes the output's place."""
        mark = self._mark

        def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
            return see(output) if _open.marks[-1:] == [mark] else None

        # Written down first, so that an interrupt in between leaves nothing behind.
        self._registered.append((layer, hook))
        # Ahead of the user's own hooks: whatever they keep of the output is what flows on, and has its gradient.
        layer.register_forward_hook(hook, prepend=True)

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
            self.callback(site.node.register_hook(_node_hook(rule_for(site))).remove)


def _close(mark: object, registered: _Registered) -> None:
    """Take away the hooks of a manager, of which the last may not have been registered yet."""
    for layer, hook in registered:
        for key, each in list(layer._forward_hooks.items()):
            if each is hook:
                del layer._forward_hooks[key]
    while mark in _open.marks:
        _open.marks.remove(mark)


def _node_hook(rule: Rule) -> Callable[[_Gradients, _Gradients], _Gradients]:
    def hook(grad_inputs: _Gradients, grad_outputs: _Gradients) -> _Gradients:
        signal = grad_outputs[0]
        # The operand that the network's signal came by is the one that has a gradient; bounds and slopes have none.
        at, operand = next(((i, grad) for i, grad in enumerate(grad_inputs) if grad is not None), (0, None))
        if operand is None or signal is None:
            return grad_inputs
        # Where the operation broadcast or promoted its operand, the signal comes back in another shape or type.
        signal = signal.sum_to_size(operand.shape).to(operand.dtype)
        return (*grad_inputs[:at], rule(operand, signal), *grad_inputs[at + 1 :])

    return hook


def first_tensor(output: Any) -> Tensor | None:
    """The output itself, or the first tensor of a tuple, list or mapping; None where there is none."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple | list):
        return next((each for each in output if isinstance(each, Tensor)), None)
    if isinstance(output, dict):
        return next((each for each in output.values() if isinstance(each, Tensor)), None)
    return None


def _with_first_tensor(output: Any, tensor: Tensor) -> Any:
    """The output with its first tensor replaced; the container keeps its type."""
    if isinstance(output, Tensor):
        return tensor
    if isinstance(output, dict):
        at = next(key for key, each in output.items() if isinstance(each, Tensor))
        changed = copy.copy(output)
        changed[at] = tensor
        return changed
    index = next(i for i, each in enumerate(output) if isinstance(each, Tensor))
    items = [*output[:index], tensor, *output[index + 1 :]]
    if hasattr(output, "_make"):
        return output._make(items)
    return type(output)(items)
