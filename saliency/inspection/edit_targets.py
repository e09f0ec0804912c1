"""Where an edit takes place: layers, parameters and single tensors, with what became of each."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..errors import LayerError, MethodError, NotApplicableError, closest
from ..hooks.manager import is_seen
from .layer_selection import require_seen, selected

Where = str | nn.Module | type[nn.Module] | Tensor | Iterable[str | nn.Module | type[nn.Module] | Tensor]
"""Layers as for `selected`; parameters by name ("fc.bias"), by pattern or themselves; tensors; or several."""


@dataclass(eq=False)
class Place:
    """A layer, a parameter or a tensor, and how often it was edited."""

    name: str
    words: str  # for sentences
    at: nn.Module | Tensor
    named: bool  # one by one, and not by a pattern or a class
    edits: int = 0
    obstacle: str = "it was never called"  # why it was not edited yet
    passed: int | None = None  # the last backward pass that went through a gradient that was edited here

    def refuse(self, reason: str) -> None:
        """Raise NotApplicableError where the place was named; where it only fitted a pattern, keep the reason."""
        self.obstacle = reason
        if self.named:
            raise NotApplicableError(f"{self.words} cannot be edited: {reason}")


def places(model: nn.Module | None, where: Any, *, parameters: bool) -> list[Place]:
    """Each place that is meant, once.

    Args:
        model: None where all are tensors.
        where: What `Where` says.
        parameters: Parameters and tensors are places too.

    Raises:
        LayerError: A name, pattern or class fits nothing; the closest names are given.
        MethodError: There is no model to look up a name in, or something is no place at all.
        NotApplicableError: It is something that cannot be edited: a frozen parameter, a tensor that has no gradient, a
            layer inside a TorchScript module.
    """
    single = isinstance(where, str | nn.Module | type | Tensor) or not isinstance(where, Iterable)
    wanted: list[Any] = [where] if single else list(where)
    if not wanted:
        raise LayerError('nothing was named to be edited; "*" means every layer')
    found: dict[int, Place] = {}
    tensors = 0
    for each in wanted:
        if isinstance(each, Tensor) and parameters:
            own = _parameters(model)
            name = next((name for name, parameter in own.items() if parameter is each), None)
            label = f"the tensor of shape {tuple(each.shape)}"
            fitting = [_tensor(name, each) if name else Place(f"tensor {tensors}", label, _editable(label, each), True)]
            tensors += name is None
        elif isinstance(each, str | nn.Module) or (isinstance(each, type) and issubclass(each, nn.Module)):
            if model is None:
                raise MethodError(f"there is no model to look up {each!r} in; pass the model, or tensors")
            fitting = _in_model(model, each, _parameters(model) if parameters else {})
        else:
            kinds = "a name, a pattern, a module or a class of modules" + ", a parameter or a tensor" * parameters
            raise MethodError(f"what to edit is {kinds}; got {type(each).__name__}")
        for place in fitting:
            known = found.setdefault(id(place.at), place)
            known.named |= place.named
    return list(found.values())


def _in_model(model: nn.Module, wanted: Any, parameters: Mapping[str, Tensor]) -> list[Place]:
    """The layers that are meant; where none is, the parameters."""
    is_pattern = isinstance(wanted, str) and any(each in wanted for each in "*?[")
    if isinstance(wanted, str) and not is_pattern:
        plain = wanted.removeprefix("_orig_mod.").removeprefix("module.")
        name = next((name for name in (wanted, plain) if name in parameters), None)
        if name is not None:
            return [_tensor(name, parameters[name])]
    if is_pattern and not any(name and fnmatch.fnmatchcase(name, wanted) for name, _ in _layers(model)):
        fitting = {name: each for name, each in parameters.items() if fnmatch.fnmatchcase(name, wanted)}
        if fitting:
            # Those that are frozen are passed over, unless all are.
            alive = {name: each for name, each in fitting.items() if each.requires_grad} or fitting
            return [_tensor(name, each, named=False) for name, each in alive.items()]
    try:
        layers = selected(model, wanted)
    except LayerError:
        near = closest(wanted, parameters, most=4) if isinstance(wanted, str) and not is_pattern else []
        if near and "." in wanted:
            known = closest(wanted, [*parameters, *(name for name, _ in _layers(model) if name)], most=4)
            kind = type(model).__name__
            raise LayerError(
                f'no layer or parameter "{wanted}" in {kind}; the closest are {", ".join(known)}'
            ) from None
        raise
    named = isinstance(wanted, nn.Module) or (isinstance(wanted, str) and not is_pattern)
    found = [Place(name, f'layer "{name}"' if name else "the model", at, named) for name, at in layers.items()]
    seen = [each for each in found if is_seen(model, each.name, layers[each.name])]
    if not seen or (named and len(seen) < len(found)):
        require_seen(model, layers)
    return seen


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(model.named_modules(remove_duplicate=False))


def _parameters(model: nn.Module | None) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) if model is not None else {}


def _tensor(name: str, parameter: Tensor, *, named: bool = True) -> Place:
    words = f'parameter "{name}"'
    return Place(name, words, _editable(words, parameter), named)


def _editable(words: str, tensor: Tensor) -> Tensor:
    """The tensor itself. Raises NotApplicableError where no gradient comes to it."""
    if not tensor.requires_grad:
        kind = str(tensor.dtype).removeprefix("torch.")
        reason = (
            "it does not require a gradient, so none comes to it; call requires_grad_() on it first"
            if tensor.is_floating_point() or tensor.is_complex()
            else f"numbers of type {kind} have no gradient"
        )
        raise NotApplicableError(f"{words} cannot be edited: {reason}")
    return tensor
