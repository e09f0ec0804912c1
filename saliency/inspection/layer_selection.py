"""Which layers of a model are meant, by name, by pattern, by kind or by the module itself."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from ..errors import LayerError, NotApplicableError
from ..hooks.manager import is_seen
from ..layers.find import find

LayersLike = str | nn.Module | type[nn.Module] | Iterable[str | nn.Module | type[nn.Module]]
"""A dotted name, a pattern as in "layer4.*.conv?" (`*` also crosses dots), a module, a class of modules, or several."""


def selected(model: nn.Module, layers: LayersLike = "*") -> dict[str, nn.Module]:
    """The layers that are meant by their names, in the order of the model; "*" is every layer.

    A model that has no layers is one itself, with the name "".

    Raises:
        LayerError: A name, pattern or class fits no layer; the closest names are given.
    """
    wanted: list[Any] = [layers] if isinstance(layers, str | nn.Module | type) else list(layers)
    if not wanted:
        raise LayerError('no layer was named; "*" means all of them')
    modules = dict(model.named_modules(remove_duplicate=False))
    chosen = {name for each in wanted for name in _fitting(model, modules, each)}
    named: dict[nn.Module, str] = {}
    for name, module in modules.items():
        if name in chosen:
            # A module under several names is one layer.
            named.setdefault(module, name)
    return {name: module for module, name in named.items()}


def require_seen(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Raise NotApplicableError where hooks do not see the calls of a layer."""
    hidden = next((name for name, layer in layers.items() if not is_seen(model, name, layer)), None)
    if hidden is not None:
        words = f'layer "{hidden}"' if hidden else "the model"
        raise NotApplicableError(
            f"{words} is scripted, or inside a TorchScript module, which runs "
            "its parts by itself: no hook sees them; name what is around it, a traced module as a whole, or take the "
            "model as it was before torch.jit"
        )


def _fitting(model: nn.Module, modules: dict[str, nn.Module], wanted: Any) -> list[str]:
    if isinstance(wanted, type) and issubclass(wanted, nn.Module):
        names = [name for name, module in modules.items() if isinstance(module, wanted) and name]
        if not names and not isinstance(model, wanted):
            kinds = sorted({type(module).__name__ for name, module in modules.items() if name})
            raise LayerError(f"no {wanted.__name__} in {type(model).__name__}; its layers are {', '.join(kinds)}")
        return names or [""]
    if isinstance(wanted, str) and any(each in wanted for each in "*?["):
        names = [name for name in modules if name and fnmatch.fnmatchcase(name, wanted)]
        if not names and len(modules) > 1:
            raise LayerError(f'no layer of {type(model).__name__} fits "{wanted}"; a pattern is as in "layer4.*.conv?"')
        return names or [""]
    return [find(model, wanted)[0]]
