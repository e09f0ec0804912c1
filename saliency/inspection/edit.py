"""Edit gradients and activations inside a `with` block."""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import LayerError, MethodError, NotApplicableError, warn
from ..hooks import autograd_graph as graph
from ..hooks.manager import HookManager, is_hookable
from ..hooks.pytree import tree_map_tensors, tree_tensors
from ..model.call import unwrap
from ..model.layers import named_layers
from ..validation import check_choice
from .arguments import LayersLike, is_pattern, require_hookable, select_layers
from .edit_rules import EditRule, EditRuleLike, apply_rules, as_rules
from .recording import HookBlock

_MOST_LABELS = 12  # in a warning
_EditRules = tuple[EditRule, ...]


@dataclass(eq=False)
class EditTarget:
    """Layer or tensor to edit, and the number of edits so far."""

    name: str
    label: str  # for messages
    layer_or_tensor: Any
    is_named: bool  # selected individually, not by a pattern or class
    edits: int = 0
    edited_pass: int | None = None  # last backward pass through an edited gradient of this target

    def refuse(self, reason: str) -> None:
        """Raise NotApplicableError for a named target. A pattern or class may include layers that cannot be edited."""
        if self.is_named:
            raise NotApplicableError(f"{self.label} cannot be edited: {reason}")


def find_targets(model: nn.Module, layers: Any, *, of_gradients: bool) -> list[EditTarget]:
    """Return the edit targets without duplicates: layers, and for gradients also parameters and other tensors.

    Raises:
        LayerError: A name, pattern or class matches nothing; the closest names are given.
        MethodError: An object that is not a layer.
        NotApplicableError: A layer inside a TorchScript module.
    """
    targets: dict[Any, EditTarget] = {}
    is_single = isinstance(layers, str | nn.Module | type | Tensor) or not isinstance(layers, Iterable)
    for wanted in [layers] if is_single else layers:
        tensors = _tensors(model, wanted, len(targets)) if of_gradients else []
        is_layer = isinstance(wanted, str | nn.Module) or (isinstance(wanted, type) and issubclass(wanted, nn.Module))
        if not is_layer and not tensors:
            expected = "a name, a pattern, a module or a class of modules"
            hint = "; to edit its gradient, use edit_gradients" if isinstance(wanted, Tensor) else ""
            raise MethodError(f"expected {expected} to edit; got {type(wanted).__name__}{hint}")
        for target in tensors or _targets(model, wanted):
            first = targets.setdefault(target.layer_or_tensor, target)
            first.is_named |= target.is_named
    if not targets:
        raise LayerError('no target to edit was given; "*" selects every layer')
    return list(targets.values())


def _tensors(model: nn.Module, wanted: Any, number: int) -> list[EditTarget]:
    """Return a tensor, or the parameters of a name or pattern that matches no layer; empty for other targets."""
    named = list(model.named_parameters(remove_duplicate=False))
    tensors: list[tuple[str, Tensor]]
    if isinstance(wanted, Tensor):
        tensors = [(name, tensor) for name, tensor in named if tensor is wanted] or [(f"tensor {number}", wanted)]
    elif isinstance(wanted, str) and not any(fnmatch.fnmatchcase(name, wanted) for name in named_layers(model)):
        tensors = [(name, tensor) for name, tensor in named if fnmatch.fnmatchcase(name, wanted)]
    else:
        return []
    return [EditTarget(name, f'"{name}"', tensor, not is_pattern(wanted)) for name, tensor in tensors]


def _targets(model: nn.Module, wanted: str | nn.Module | type[nn.Module]) -> list[EditTarget]:
    is_named = isinstance(wanted, nn.Module) or (isinstance(wanted, str) and not is_pattern(wanted))
    layers = select_layers(model, wanted)
    seen = {name: layer for name, layer in layers.items() if is_hookable(model, name, layer)}
    if not seen or is_named:
        require_hookable(model, layers)
    return [EditTarget(name, f'layer "{name}"' if name else "the model", seen[name], is_named) for name in seen]


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class _Inputs(NamedTuple):
    """Distinct tensors with a gradient among the arguments of a call."""

    tensors: Sequence[Tensor]
    edges: Sequence[GradientEdge]
    versions: Sequence[int]  # version counters before the call
    since: int


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Inputs:
    edges = [(tensor, edge) for tensor in tree_tensors((args, kwargs)) if (edge := graph.edge(tensor)) is not None]
    distinct = {(edge.node, edge.output_nr): (tensor, edge) for tensor, edge in edges}.values()
    tensors = [tensor for tensor, _ in distinct]
    versions = list(map(graph.tensor_version, tensors))
    return _Inputs(tensors, [edge for _, edge in distinct], versions, graph.current_sequence_nr())


def _edit_gradient(hooks: HookManager, rules: _EditRules, target: EditTarget, tensor: Tensor) -> Tensor | None:
    if target.edited_pass == graph.this_backward():
        hint = "the rule is part of the graph, so run the second backward pass after the block"
        raise NotApplicableError(f"{target.label} cannot be edited twice with create_graph=True: {hint}")
    changed = apply_rules(rules, tensor, f"the gradient of {target.label}")
    target.edits += 1
    if changed is not None and changed.requires_grad:

        def note_pass(gradient: Tensor) -> None:
            target.edited_pass = graph.this_backward()

        # A second backward pass runs this hook before it reaches the operations of the forward pass.
        hooks.at_gradient(changed, note_pass)
    return changed


def _attach_to_input(hooks: HookManager, rules: _EditRules, target: EditTarget) -> None:
    """Edit the gradients that a layer passes on to its inputs."""

    def end(inputs: _Inputs, output: Any) -> Any:
        if torch.is_grad_enabled() and inputs.tensors:
            return _edit_inputs(hooks, rules, target, inputs, output)
        if torch.is_grad_enabled():
            reason = "no floating-point tensor among its arguments requires a gradient, or torch.func transforms it"
            target.refuse(f'{reason}; use x.requires_grad_() or edit at="output"')
        return None

    hooks.around(target.layer_or_tensor, _inputs, end)


def _edit_inputs(hooks: HookManager, rules: _EditRules, target: EditTarget, inputs: _Inputs, output: Any) -> Any:
    for tensor, version in zip(inputs.tensors, inputs.versions, strict=True):
        if graph.view_base(tensor) is not None and graph.tensor_version(tensor) != version:
            reason = "it changes a view of another tensor in place"
            hint = 'use inplace=False, or edit at="output" of the layer before'
            raise NotApplicableError(f"{target.label} cannot be edited at its input: {reason}; {hint}")
    changed = _with_copies(output, inputs.since)
    # The layer may change arguments in place, so they are treated as outputs too.
    results = [*tree_tensors(changed), *inputs.tensors]
    exits = graph.input_edges(results, inputs.edges, inputs.since)
    if not any(exits) and not any(map(_is_differentiable, tree_tensors(output))):
        target.refuse("it returns no floating-point tensor, so no gradient flows through it")
    for tensor, edges in zip(inputs.tensors, exits, strict=True):
        if edges:
            hooks.rewrite_input(tensor, edges, partial(_edit_gradient, hooks, rules, target))
    return changed


def _attach_to_output(hooks: HookManager, rules: _EditRules, target: EditTarget) -> None:
    """Edit the gradients at the outputs of a layer."""

    def end(since: int, output: Any) -> Any:
        alive = {id(tensor) for tensor in tree_tensors(output) if tensor.requires_grad}
        if not alive and torch.is_grad_enabled():
            reason = "none of its floating-point tensors requires a gradient, or torch.func transforms it"
            target.refuse(f"there is no gradient at its output: {reason}")
        changed = _with_copies(output, since, all_tensors=len(alive) > 1)
        for tensor in {id(tensor): tensor for tensor in tree_tensors(changed) if tensor.requires_grad}.values():
            hooks.at_gradient(tensor, partial(_edit_gradient, hooks, rules, target))
        return changed

    hooks.around(target.layer_or_tensor, lambda args, kwargs: graph.current_sequence_nr(), end)


def _attach_to_activation(hooks: HookManager, rules: _EditRules, target: EditTarget) -> None:
    """Edit the outputs of a layer."""

    def edit(tensor: Tensor) -> Tensor:
        changed = apply_rules(rules, tensor, f"the output of {target.label}") if _is_differentiable(tensor) else None
        return tensor if changed is None else changed

    def change(output: Any) -> Any:
        if not any(map(_is_differentiable, tree_tensors(output))):
            target.refuse("it returns no floating-point tensor")
            return None
        target.edits += graph.this_backward() == -1  # not when a checkpointed part runs again
        return tree_map_tensors(output, cache(edit))  # each tensor is changed once

    hooks.revise(target.layer_or_tensor, change)


def _attach_to_tensor(hooks: HookManager, rules: _EditRules, target: EditTarget) -> None:
    """Edit the gradient of a parameter or of another tensor."""
    if target.layer_or_tensor.requires_grad:
        hooks.at_gradient(target.layer_or_tensor, partial(_edit_gradient, hooks, rules, target))
    else:
        target.refuse("it requires no gradient; use requires_grad_()")


# Copies with separate gradients, created by `_with_copies`. Nested blocks reuse them.
_copies = WeakTensorKeyDictionary()


def _with_copies(output: Any, since: int, *, all_tensors: bool = False) -> Any:
    """Return the output with copies of the tensors that need a copy; the same object if no tensor needs it.

    Views need a copy because a later in-place operation would bypass a hook on them. Arguments that the layer returns,
    and several outputs that may depend on each other, need copies to separate their gradients.
    """

    def copy(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad or tensor in _copies:
            return tensor
        if not all_tensors and graph.view_base(tensor) is None and graph.is_recorded_since(tensor, since):
            return tensor
        result = tensor.clone()
        _copies[result] = None
        return result

    return tree_map_tensors(output, cache(copy))  # each tensor is copied once


_Attach = Callable[[HookManager, _EditRules, EditTarget], None]


class Editing(HookBlock):
    """Context manager that applies an edit inside its block. `edits` counts the edits by name."""

    def __init__(self, targets: list[EditTarget], rule: EditRuleLike, attach: _Attach) -> None:
        self._targets = targets
        self._rules = as_rules(rule)
        self._attach = attach

    @property
    def edits(self) -> dict[str, int]:
        """Number of times that the rule was applied so far, by the name of the layer or parameter."""
        return {target.name: target.edits for target in self._targets}

    def _register(self, stack: ExitStack) -> None:
        for tensor in (target.layer_or_tensor for target in self._targets):
            if isinstance(tensor, Tensor) and graph.tensor_hooks(tensor) is None:
                stack.callback(graph.forget_tensor_hooks, tensor)  # called after the manager has removed its hooks
        # Hooks reference the manager weakly, so that it is freed with its block.
        hooks: HookManager = weakref.proxy(stack.enter_context(HookManager(persistent=True)))
        for target in self._targets:
            attach = _attach_to_tensor if isinstance(target.layer_or_tensor, Tensor) else self._attach
            attach(hooks, self._rules, target)

    def __exit__(self, *error: Any) -> None:
        """Remove the edit. Unless the block raised, warn about targets that were not edited."""
        super().__exit__(*error)
        has_edits = any(target.edits for target in self._targets)
        unedited = [target for target in self._targets if not target.edits and (target.is_named or not has_edits)]
        if unedited and error[:1] == (None,):
            labels = ", ".join(target.label for target in unedited[:_MOST_LABELS])
            more = f" and {len(unedited) - _MOST_LABELS} more" if len(unedited) > _MOST_LABELS else ""
            hint = "run the model inside the block, and for gradients also its backward pass"
            warn(f"nothing was edited at {labels}{more}; {hint}")


def edit_gradients(
    model: nn.Module,
    layers: LayersLike | Tensor | Iterable[str | nn.Module | type[nn.Module] | Tensor],
    rule: EditRuleLike,
    *,
    at: Literal["input", "output"] = "input",
) -> Editing:
    """Change gradients of layers, parameters or other tensors in the backward passes of a block.

        with edit_gradients(model, ["layer3", "fc.bias"], edit_rules.clip_norm(1.0)) as editing:
            loss(model(x)).backward()
        editing.edits  # {"layer3": 1, "fc.bias": 1}

    The edit applies to passes of the user and of explanations, in the thread that opened the block. Both the forward
    and the backward pass must run inside the block; for tensors, the backward pass. Rules of several blocks are applied
    in the order in which the blocks were opened. The hooks are removed when the block ends.

    Each call of a layer is edited. Within a call, each floating-point tensor with a gradient is edited, at any nesting
    depth. Other uses of the same tensors keep their gradient. With `create_graph=True` the rule is part of the graph; a
    backward pass through the edited gradient must run after the block. The output values of the layer stay the same.
    Returned arguments and views are copied, so that a later in-place operation changes only the copy.

    Args:
        model: Any module.
        layers: A name, a pattern, a module, a class of modules, a tensor, or several. A name such as "fc.bias", or a
            pattern such as "*.bias" that matches no layer, selects parameters; their edited gradient is added to their
            `.grad`. A tensor that is not a parameter has the name "tensor 0", by its index among the targets.
        rule: One of `saliency.inspection.edit_rules`, any function from tensor to tensor, or several that are applied
            in order. A result of None leaves the gradient unchanged. Shape, dtype and device must stay the same.
        at: "input" edits the gradient with respect to the arguments, like a full backward hook: the
            gradients of the layer's parameters are unchanged. "output" edits the gradient at the output: the gradients
            of the parameters are computed from the edited gradient. Tensors have one gradient.

    Returns:
        A context manager whose `edits` counts how often the rule was applied.

    Raises:
        LayerError: A name, pattern or class matches nothing.
        MethodError: An unknown rule or `at`; or (in the backward pass) a result that does not fit the gradient.
        NotApplicableError: A layer inside a TorchScript module, or (when the block begins) a tensor that requires no
            gradient; or (in the forward pass) a named layer that takes or returns only integers, has no gradient
            although gradients are enabled, or changes a view of another tensor in place; or (in the backward pass) a
            second backward pass through an edited gradient.
        RuntimeError: (In the backward pass) the rule uses an operation that PyTorch lacks for sparse or complex values.

    Warns:
        SaliencyWarning: The block ended without an exception, and a named target was not edited.
    """
    check_choice("at", at, ("input", "output"))
    targets = find_targets(unwrap(model), layers, of_gradients=True)
    return Editing(targets, rule, _attach_to_input if at == "input" else _attach_to_output)


def edit_activations(model: nn.Module, layers: LayersLike, rule: EditRuleLike) -> Editing:
    """Change the outputs of layers in the forward passes of a block.

        with edit_activations(model, "layer4", lambda maps: maps.index_fill(1, torch.tensor(3), 0)):
            explanation = GradCAM(model).attribute(image)  # explains the edited network

    The edit applies to passes of the user and of explanations, in the thread that opened the block. All other hooks
    receive the edited output, and gradients belong to the edited network. Each floating-point tensor of each output is
    edited, at any nesting depth. Rules of several blocks are applied in the order in which the blocks were opened.

    A checkpointed part runs again in the backward pass, which must therefore run inside the block. There, a rule
    must return the same values again: draw noise before the block.

    Args:
        model: Any module.
        layers: A name, a pattern, a module, a class of modules, or several.
        rule: As for `edit_gradients`.

    Returns:
        A context manager whose `edits` counts how often the rule was applied.

    Raises:
        LayerError: A name, pattern or class matches nothing.
        MethodError: An unknown rule; or (in the forward pass) a result that does not fit the activation.
        NotApplicableError: A layer inside a TorchScript module; or (in the forward pass) a named layer that returns no
            floating-point tensor.
        RuntimeError: (In the forward pass) the rule uses an operation that PyTorch lacks for sparse or complex values.

    Warns:
        SaliencyWarning: The block ended without an exception, and a named layer was not edited.
    """
    return Editing(find_targets(unwrap(model), layers, of_gradients=False), rule, _attach_to_activation)
