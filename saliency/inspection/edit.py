"""Gradients and activations changed on their way, for as long as a block lasts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import MethodError, NotApplicableError, warn
from ..hooks.autograd_graph import (
    current_sequence_nr,
    edge,
    forget_empty_hooks,
    input_edges,
    is_recorded_since,
    is_transformed,
    is_view,
    tensor_hooks,
    tensor_version,
    this_backward,
)
from ..hooks.manager import HookManager
from ..hooks.model_state import eager, unwrap
from ..hooks.pytree import tree_map_tensors, tree_tensors
from .edit_rules import NamedRule, Rule, RuleLike, applied, rule_name, started, steps_of
from .edit_targets import Place, Where, places
from .layer_selection import LayersLike

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
    numbers = [each for each in tree_tensors((args, kwargs)) if _has_numbers(each)]
    edges = [(each, at) for each in numbers if (at := edge(each)) is not None]
    different = {(at.node, at.output_nr): (each, at) for each, at in edges}.values()
    tensors = [each for each, _ in different]
    return _Given(
        tensors=tensors,
        edges=[at for _, at in different],
        versions=[tensor_version(each) for each in tensors],
        has_numbers=bool(numbers),
        transformed=any(map(is_transformed, numbers)),
        recording=torch.is_grad_enabled(),
        since=current_sequence_nr(),
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
        if is_view(tensor) and tensor_version(tensor) != version:
            raise NotApplicableError(
                f"{place.words} cannot be edited at its input: it works in place on a view of another tensor, whose "
                'gradient has no place of its own; make it work on a copy (inplace=False), or edit at="output" of the '
                "layer before"
            )
    changed = _with_own(output, lambda each: is_view(each) or not is_recorded_since(each, given.since))
    # What it takes and works on in place is a result too.
    results = [*tree_tensors(output if changed is None else changed), *given.tensors]
    found = input_edges(results, given.edges, given.since)
    if any(found):
        place.obstacle = _NO_BACKWARD
    elif not any(map(_has_numbers, tree_tensors(output))):
        kind = "floating-point tensor" if any(True for _ in tree_tensors(output)) else f"tensor, but {_kind(output)}"
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
        numbers = _different(each for each in tree_tensors(output) if _has_numbers(each))
        alive = [each for each in numbers if each.requires_grad]
        if not numbers:
            place.refuse("it gives no floating-point tensor, so no gradient arrives at it")
        elif not alive and not recording:
            place.obstacle = _NOT_RECORDED
        elif not alive and any(map(is_transformed, numbers)):
            place.refuse(_TRANSFORMED)
        elif not alive:
            place.refuse("no gradient arrives at it, since neither its parameters nor what it takes require one")
        else:
            place.obstacle = _NO_BACKWARD
            several = len(alive) > 1
            changed = _with_own(output, lambda each: several or is_view(each) or not is_recorded_since(each, since))
            for each in _different(tree_tensors(output if changed is None else changed)):
                if each.requires_grad:
                    hooks.at_gradient(each, partial(_edit, hooks, steps, place))
            return changed
        return None

    hooks.around(place.at, lambda args, kwargs: (current_sequence_nr(), torch.is_grad_enabled()), end)


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
        if not any(map(_has_numbers, tree_tensors(output))):
            place.refuse("it gives no floating-point tensor")
            return None
        runs_again = this_backward() != -1
        if runs_again:
            _refuse_new_draws(steps, place)
        edited = tree_map_tensors(output, _once(edit))
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

    changed = tree_map_tensors(output, _once(own))
    return changed if made else None


_MOST_NAMED = 3  # in one warning

_Attach = Callable[[HookManager, tuple[Rule, ...], Place], None]


class Editing:
    """An edit that acts while its block is open. `edits` says how often it took place, by name."""

    def __init__(self, found: list[Place], rule: RuleLike, attach: _Attach) -> None:
        self._places = found
        self._steps = steps_of(rule)
        self._attach = attach
        self._stack: ExitStack | None = None

    @property
    def edits(self) -> dict[str, int]:
        """How often the rule was applied so far, for each layer, parameter or tensor; 0 where it was not."""
        return {each.name: each.edits for each in self._places}

    def __enter__(self) -> Self:
        """Begin to edit.

        Raises:
            MethodError: The block is open already.
        """
        if self._stack is not None:
            raise MethodError("this edit is open already; make another one for a block inside")
        steps = started(self._steps)
        with ExitStack() as stack:
            stack.callback(_forget_hooks, [each.at for each in self._places if _is_unhooked_leaf(each.at)])
            hooks = stack.enter_context(HookManager(persistent=True))
            stack.enter_context(eager())
            for place in self._places:
                # What hangs on the model does not hold the manager, which so dies with its block at the latest.
                self._attach(weakref.proxy(hooks), steps, place)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        """Leave everything as it was. Warns of places where nothing was edited. Errors of the block go on."""
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.__exit__(*error)
        if error[:1] == (None,):
            self._warn_of_idle()

    def __repr__(self) -> str:
        counts = ", ".join(f"{each.words}: {each.edits}" for each in self._places[:8])
        return f"Editing({counts}{', ...' * (len(self._places) > 8)})"

    def _warn_of_idle(self) -> None:
        nowhere = not any(each.edits for each in self._places)
        idle = [each for each in self._places if not each.edits and (each.named or nowhere)]
        if not idle:
            return
        told = "; ".join(f"{each.words}: {each.obstacle}" for each in idle[:_MOST_NAMED])
        more = f"; and {len(idle) - _MOST_NAMED} more" if len(idle) > _MOST_NAMED else ""
        warn(f"nothing was edited at {told}{more}")


def _is_unhooked_leaf(at: nn.Module | Tensor) -> bool:
    return isinstance(at, Tensor) and at.is_leaf and tensor_hooks(at) is None


def _forget_hooks(tensors: list[Any]) -> None:
    """Tensors that never had hooks have none again, rather than an empty dictionary of them."""
    for each in tensors:
        forget_empty_hooks(each)


def edit_gradients(
    model: nn.Module | None, where: Where, rule: RuleLike, *, at: Literal["input", "output"] = "input"
) -> Editing:
    """Gradients changed on their way back, in the backward passes of a block.

        with edit_gradients(model, "layer3", rules.clip_norm(1.0)) as editing:
            loss(model(x)).backward()
        editing.edits  # {"layer3": 1}

    It acts on the user's own passes and on those of explanations, in the thread that opened the block: on graphs that
    are recorded inside the block, in backward passes that run inside it. Rules of several blocks are applied in the
    order in which the blocks were opened. Nothing stays behind.

    Of a layer, each call is edited, and of a call each floating-point tensor that has a gradient, however they are
    nested, one by one. Other uses of the same tensors keep their gradient. Under `create_graph=True` the rule is a part
    of the graph; a backward pass through the edited gradient belongs after the block. What a layer computes stays as it
    is, but where it returns what it was given, or a view, it returns a copy of that: a later operation in place changes
    the copy only.

    Args:
        model: Any module; None where all places are tensors.
        where: Layers by name, pattern, class or themselves; parameters by name ("fc.bias"), themselves, or by a pattern
            that fits no layer ("*.bias"); any tensor that requires a gradient; or several of these.
        rule: What to make of a gradient: one of `saliency.inspection.rules`, any function from tensor to tensor, or
            several that are applied in order. None leaves it. Shape, type and device must stay.
        at: For layers. "input" is what the layer passes on to what it was given, as a full backward hook may return
            it: its own parameters do not notice. "output" is what arrives at what it gave: its parameters' gradients
            follow from what the rule makes of that. For a parameter or a tensor it is its whole gradient of one
            backward pass, before it is added to `.grad`.

    Returns:
        A context manager, whose `edits` count how often the rule was applied.

    Raises:
        LayerError: A name, pattern or class fits nothing.
        MethodError: The rule is none, `at` is something else, or (in the backward pass) what a rule returns is no
            gradient.
        NotApplicableError: It cannot be edited: a frozen parameter, a tensor without gradient, a layer inside a
            TorchScript module; or (in the forward pass) a named layer that takes or gives integers only, that has no
            gradient although gradients are on, or that works in place on a view of another tensor; or (in the backward
            pass) one that goes through an edited gradient.

    Warns:
        SaliencyWarning: At the end of a block that nothing interrupted, a named place was not edited.
    """
    if at not in ("input", "output"):
        raise MethodError(f'gradients are edited at "input" or at "output"; got {at!r}')
    found = places(None if model is None else unwrap(model), where, parameters=True)
    return Editing(found, rule, attach_to_input if at == "input" else attach_to_output)


def edit_activations(model: nn.Module, layers: LayersLike, rule: RuleLike) -> Editing:
    """What layers give, changed before it flows on, in the forward passes of a block.

        with edit_activations(model, "layer4", rules.zero_channels([3])):
            explanation = GradCAM(model).attribute(image)  # explains the edited network

    It acts on the user's own passes and on those of explanations, in the thread that opened the block. All that watches
    the layer sees what it was changed to, and gradients are those of the changed network. Each floating-point tensor of
    each call's output is edited, however they are nested. Rules of several blocks are applied in the order in which the
    blocks were opened.

    A checkpointed part runs again in the backward pass, which therefore belongs into the block.

    Args:
        model: Any module.
        layers: A name, a pattern, a module, a class of modules, or several.
        rule: As for `edit_gradients`.

    Returns:
        A context manager, whose `edits` count how often the rule was applied.

    Raises:
        LayerError: A name, pattern or class fits nothing.
        MethodError: The rule is none, or (in the forward pass) what a rule returns is no such activation.
        NotApplicableError: A layer is inside a TorchScript module; or (in the forward pass) a named layer gives no
            floating-point tensor, or noise would have to be drawn again for a checkpointed part.

    Warns:
        SaliencyWarning: At the end of a block that nothing interrupted, a named layer was not edited.
    """
    return Editing(places(unwrap(model), layers, parameters=False), rule, attach_to_activation)
