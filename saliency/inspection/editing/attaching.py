"""How edits are attached: at what a layer passes on, at what arrives at it, at single tensors, and at what it gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.graph import GradientEdge
from torch.utils.weak import WeakTensorKeyDictionary

from ...errors import NotApplicableError
from ...hooks.autograd_graph import edge, exits, is_recorded_since, now, this_backward
from ...hooks.manager import HookManager
from ...hooks.pytree import mapped, tensors_in
from .places import Place
from .ruling import NamedRule, Rule, applied, rule_name

_NO_BACKWARD = "no backward pass came by before the block ended; run the forward and the backward inside it"
_TRANSFORMED = "it runs inside of torch.func, in a transformation such as vmap or jvp that takes no gradient itself"
_NOT_RECORDED = "gradients were switched off when it was called"


def _edit(hooks: HookManager, steps: tuple[Rule, ...], place: Place, tensor: Tensor) -> Tensor | None:
    if place.passed == this_backward():
        raise NotApplicableError(
            f"{place.words} cannot be edited in a backward pass through its own edited gradient (create_graph=True): "
            "the rule would act a second time; run that pass after the block, where the rule is a part of the graph"
        )
    changed = applied(steps, tensor, f"the gradient of {place.words}")
    place.edits += 1
    if changed is not None and changed.requires_grad:
        # A backward pass comes by here before it comes to the older operations of the forward.
        hooks.at_gradient(changed, partial(_pass, place))
    return changed


def _pass(place: Place, gradient: Tensor) -> None:
    place.passed = this_backward()


class _Given(NamedTuple):
    """What a layer was called with."""

    tensors: list[Tensor]  # the different ones that have a gradient
    edges: list[GradientEdge]
    versions: list[int]  # how often each was changed in place
    has_numbers: bool  # whether any tensor could have a gradient
    transformed: bool  # whether `torch.func` runs it
    recording: bool
    since: int


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Given:
    numbers = [each for each in tensors_in((args, kwargs)) if _has_numbers(each)]
    edges = [(each, at) for each in numbers if (at := edge(each)) is not None]
    different = {(at.node, at.output_nr): (each, at) for each, at in edges}.values()
    tensors = [each for each, _ in different]
    return _Given(
        tensors=tensors,
        edges=[at for _, at in different],
        versions=[each._version for each in tensors],
        has_numbers=bool(numbers),
        transformed=any(map(is_functorch_wrapped_tensor, numbers)),
        recording=torch.is_grad_enabled(),
        since=now(),
    )


def _kind(output: Any) -> str:
    return "None" if output is None else f"something of type {type(output).__name__}"


def _has_numbers(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def attach_to_input(hooks: HookManager, steps: tuple[Rule, ...], place: Place) -> None:
    """Edit the gradients that the calls of a layer pass on, or the gradient of a tensor."""
    if isinstance(place.at, Tensor):
        _attach_to_tensor(hooks, steps, place, place.at)
        return

    def end(given: _Given, output: Any) -> Any:
        if not given.has_numbers:
            place.refuse("it takes no floating-point tensor, so it passes no gradient on")
        elif not given.recording:
            place.obstacle = _NOT_RECORDED
        elif not given.tensors and given.transformed:
            place.refuse(_TRANSFORMED)
        elif not given.tensors:
            place.refuse(
                "it passes no gradient on, since nothing that it takes requires one; give the model an input that does "
                '(x.requires_grad_()), or edit at="output"'
            )
        else:
            return _edit_inputs(hooks, partial(_edit, hooks, steps, place), place, given, output)
        return None

    hooks.around(place.at, _given, end)


def _edit_inputs(
    hooks: HookManager, edit: Callable[[Tensor], Tensor | None], place: Place, given: _Given, output: Any
) -> Any:
    for tensor, version in zip(given.tensors, given.versions, strict=True):
        if tensor._is_view() and tensor._version != version:
            raise NotApplicableError(
                f"{place.words} cannot be edited at its input: it works in place on a view of another tensor, whose "
                'gradient has no place of its own; make it work on a copy (inplace=False), or edit at="output" of the '
                "layer before"
            )
    changed = _with_own(output, lambda each: each._is_view() or not is_recorded_since(each, given.since))
    # What it takes and works on in place is a result too.
    results = [*tensors_in(output if changed is None else changed), *given.tensors]
    found = exits(results, given.edges, given.since)
    if any(found):
        place.obstacle = _NO_BACKWARD
    elif not any(map(_has_numbers, tensors_in(output))):
        kind = "floating-point tensor" if any(True for _ in tensors_in(output)) else f"tensor, but {_kind(output)}"
        place.refuse(f"it gives no {kind}, so no gradient can be followed through it")
    elif not place.edits:
        place.obstacle = "what it gives does not depend on what it takes through any recorded operation"
    for tensor, at in zip(given.tensors, found, strict=True):
        if at:
            hooks.rewrite_input(tensor, at, edit)
    return changed


def attach_to_output(hooks: HookManager, steps: tuple[Rule, ...], place: Place) -> None:
    """Edit the gradients that arrive at the calls of a layer, or the gradient of a tensor."""
    if isinstance(place.at, Tensor):
        _attach_to_tensor(hooks, steps, place, place.at)
        return

    def end(begun: tuple[int, bool], output: Any) -> Any:
        since, recording = begun
        numbers = _different(each for each in tensors_in(output) if _has_numbers(each))
        alive = [each for each in numbers if each.requires_grad]
        if not numbers:
            place.refuse("it gives no floating-point tensor, so no gradient arrives at it")
        elif not alive and not recording:
            place.obstacle = _NOT_RECORDED
        elif not alive and any(map(is_functorch_wrapped_tensor, numbers)):
            place.refuse(_TRANSFORMED)
        elif not alive:
            place.refuse("no gradient arrives at it, since neither its parameters nor what it takes require one")
        else:
            place.obstacle = _NO_BACKWARD
            several = len(alive) > 1
            changed = _with_own(output, lambda each: several or each._is_view() or not is_recorded_since(each, since))
            for each in _different(tensors_in(output if changed is None else changed)):
                if each.requires_grad:
                    hooks.at_gradient(each, partial(_edit, hooks, steps, place))
            return changed
        return None

    hooks.around(place.at, lambda args, kwargs: (now(), torch.is_grad_enabled()), end)


def _attach_to_tensor(hooks: HookManager, steps: tuple[Rule, ...], place: Place, tensor: Tensor) -> None:
    place.obstacle = _NO_BACKWARD
    hooks.at_gradient(tensor, partial(_edit, hooks, steps, place))


def attach_to_activation(hooks: HookManager, steps: tuple[Rule, ...], place: Place) -> None:
    """Edit what the calls of a layer give."""

    def edit(tensor: Tensor) -> Tensor:
        if not _has_numbers(tensor):
            return tensor
        changed = applied(steps, tensor, f"the output of {place.words}")
        return tensor if changed is None else changed

    def change(output: Any) -> Any:
        if not any(map(_has_numbers, tensors_in(output))):
            place.refuse("it gives no floating-point tensor")
            return None
        runs_again = this_backward() != -1
        if runs_again:
            _refuse_new_draws(steps, place)
        edited = mapped(output, _once(edit))
        place.edits += 0 if runs_again else 1
        return edited

    if isinstance(place.at, nn.Module):
        hooks.revise(place.at, change)


def _different(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Each tensor once, also where it is given several times."""
    return list({id(each): each for each in tensors}.values())


def _once(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The change, which makes the same of a tensor that comes several times: what was one tensor stays one."""
    made: dict[int, Tensor] = {}

    def changed(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = change(tensor)
        return made[id(tensor)]

    return changed


def _refuse_new_draws(steps: tuple[Rule, ...], place: Place) -> None:
    """Raise NotApplicableError for rules that make something else of the same tensor the second time."""
    for each in steps:
        if isinstance(each, NamedRule) and not each.replays:
            raise NotApplicableError(
                f"{place.words} is in a checkpointed part, which runs again in the backward pass, and "
                f"{rule_name(each)} would draw other noise for it; draw the noise once, and add it by a function"
            )


# Copies that were made so that a gradient has a place of its own. A block inside another finds them and makes no more.
_own = WeakTensorKeyDictionary()


def _with_own(output: Any, needs: Callable[[Tensor], bool]) -> Any:
    """The output with copies of its tensors that need a place of their own; None where none does.

    Those are views, since a later in-place operation would go past a hook on them; what the layer took and gives back
    as it is; and several that may depend on each other.
    """
    made = 0

    def own(tensor: Tensor) -> Tensor:
        nonlocal made
        if not tensor.requires_grad or tensor in _own or not needs(tensor):
            return tensor
        made += 1
        copied = tensor.clone()
        _own[copied] = None
        return copied

    changed = mapped(output, _once(own))
    return changed if made else None
