"""The layers of a model by name, and their outputs as maps (N, K, h, w)."""

from __future__ import annotations

from torch import Tensor, nn

from ..errors import LayerError, closest, warn
from .default_layer import scan_layers
from .layout import Layout, is_channels_first, is_plain, layout_from

LayerLike = str | nn.Module | None
"""A dotted name, the module itself, or None for the layer that is found by one forward."""


def find(model: nn.Module, layer: str | nn.Module) -> tuple[str, nn.Module]:
    """The name and the module of a layer.

    Raises:
        LayerError: The model has no such layer; the closest names are given.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    if isinstance(layer, nn.Module):
        name = next((name for name, module in modules.items() if module is layer), None)
        if name is None:
            raise LayerError(f"the layer {type(layer).__name__} is not a part of this {type(model).__name__}")
        return name, layer
    if not isinstance(layer, str):
        raise LayerError(f"a layer is a dotted name or a module, got {type(layer).__name__}")
    # Names read off a wrapped model carry the wrapper's prefix.
    for name in (layer, layer.removeprefix("_orig_mod.").removeprefix("module.")):
        if name in modules:
            return name, modules[name]
    near = closest(layer, [name for name in modules if name], most=4)
    hint = f"the closest are {', '.join(near)}" if near else f"its layers are {_outline(model)}"
    raise LayerError(f'no layer "{layer}" in {type(model).__name__}; {hint}')


def _outline(model: nn.Module, most: int = 12) -> str:
    """The names of the outermost layers."""
    names = [name for name, _ in model.named_children()]
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "") if names else "none: it is one itself"


def layout_of(model: nn.Module, name: str, tensor: Tensor, x: Tensor) -> Layout:
    """How the output of a layer lies in memory.

    Raises:
        LayerError: It has no extent in space.
    """
    shape, size = tuple(tensor.shape), (int(x.shape[-2]), int(x.shape[-1]))
    known = is_channels_first(model.get_submodule(name))
    seen = None if known or is_plain(shape, size) else scan_layers(model, x)
    layout = layout_from(shape, len(x), size, seen.grids if seen else (), channels_first=known)
    if seen is not None:
        same = next((each.layout for each in seen.spatial if each.name == name and each.shape[1:] == shape[1:]), None)
        layout = same or layout
    if layout is None:
        raise LayerError(
            f'the output of layer "{name}" has shape {shape}, which has no extent in space for an input of '
            f"{size[0]}x{size[1]}; choose a layer with an output (N, K, h, w), (N, h, w, K) or (N, tokens, K)"
        )
    if seen is not None and name in seen.scrambled_layers:
        warn(
            f'the places of layer "{name}" do not follow those of the picture: a change of the picture shows '
            "elsewhere, so its map may be scrambled"
        )
    return layout
