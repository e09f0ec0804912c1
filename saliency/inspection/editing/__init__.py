"""Gradients and activations changed on their way, for as long as a block lasts."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal, Self

from torch import Tensor, nn

from ...errors import MethodError, warn
from ...hooks.manager import HookManager
from ...hooks.model_state import eager, unwrap
from ..selecting import LayersLike
from .attaching import attach_to_activation, attach_to_input, attach_to_output
from .places import Place, Where, places
from .ruling import Rule, RuleLike, started, steps_of

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
            hooks = stack.enter_context(HookManager(standing=True))
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
    return isinstance(at, Tensor) and at.is_leaf and at._backward_hooks is None


def _forget_hooks(tensors: list[Any]) -> None:
    """Tensors that never had hooks have none again, rather than an empty dictionary of them."""
    for each in tensors:
        if not each._backward_hooks:
            each._backward_hooks = None


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
