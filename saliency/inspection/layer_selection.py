"""Select layers of a model by name, pattern, class or as modules."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from ..errors import LayerError, NotApplicableError
from ..hooks.manager import is_hookable
from ..layers.find import find

LayersLike = str | nn.Module | type[nn.Module] | Iterable[str | nn.Module | type[nn.Module]]
"""A dotted name, a pattern as in "layer4.*.conv?" (`*` also matches dots), a module, a class of modules, or several."""


def selected(model: nn.Module, layers: LayersLike = "*") -> dict[str, nn.Module]:
    """Return the selected layers by name, in the order of the model; "*" selects every layer.

    A model without submodules counts as a layer with the name "".

    Raises:
        LayerError: A name, pattern or class matches no layer; the closest names are given.
    """
    wanted: list[Any] = [layers] if isinstance(layers, str | nn.Module | type) else list(layers)
    if not wanted:
        raise LayerError('no layer was given; "*" selects every layer')
    modules = dict(model.named_modules(remove_duplicate=False))
    names = {name for selector in wanted for name in _fitting(model, modules, selector)}
    first_names: dict[nn.Module, str] = {}
    for name, module in modules.items():
        if name in names:
            first_names.setdefault(module, name)
    return {name: module for module, name in first_names.items()}


def is_pattern(wanted: Any) -> bool:
    """Return whether a selector is a pattern rather than a name."""
    return isinstance(wanted, str) and any(character in wanted for character in "*?[")


def require_seen(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Raise NotApplicableError if hooks do not run on the calls of a layer."""
    hidden = next((name for name, layer in layers.items() if not is_hookable(model, name, layer)), None)
    if hidden is not None:
        label = f'layer "{hidden}"' if hidden else "the model"
        raise NotApplicableError(
            f"{label} is scripted or inside a TorchScript module, which calls its layers without hooks; choose the "
            "whole traced module or a layer that contains it, or use the model without torch.jit"
        )


def _fitting(model: nn.Module, modules: dict[str, nn.Module], wanted: Any) -> list[str]:
    if isinstance(wanted, type) and issubclass(wanted, nn.Module):
        names = [name for name, module in modules.items() if isinstance(module, wanted) and name]
        if not names and not isinstance(model, wanted):
            kinds = sorted({type(module).__name__ for name, module in modules.items() if name})
            raise LayerError(f"no {wanted.__name__} in {type(model).__name__}; its layers are {', '.join(kinds)}")
        return names or [""]
    if is_pattern(wanted):
        names = [name for name in modules if name and fnmatch.fnmatchcase(name, wanted)]
        if not names and len(modules) > 1:
            raise LayerError(
                f'no layer of {type(model).__name__} matches "{wanted}"; a pattern looks like "layer4.*.conv?"'
            )
        return names or [""]
    return [find(model, wanted)[0]]
