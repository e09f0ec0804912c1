"""Find the layers of a model by name, and the layout of their outputs."""

from __future__ import annotations

from torch import Tensor, nn

from ..errors import LayerError, closest, warn
from .default_layer import scan_layers
from .layout import Layout, fits_channels_first, is_channels_first, layout_from

LayerLike = str | nn.Module | None
"""A dotted name, the module itself, or None for the default layer."""


def find(model: nn.Module, layer: str | nn.Module) -> tuple[str, nn.Module]:
    """Return the name and the module of a layer.

    Raises:
        LayerError: The model has no such layer; the message has the closest names.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    if isinstance(layer, nn.Module):
        name = next((name for name, module in modules.items() if module is layer), None)
        if name is None:
            raise LayerError(f"the layer {type(layer).__name__} is not part of this {type(model).__name__}")
        return name, layer
    if not isinstance(layer, str):
        raise LayerError(f"a layer is a dotted name or a module, got {type(layer).__name__}")
    # Names of layers in a wrapped model start with the wrapper's prefix.
    for name in (layer, layer.removeprefix("_orig_mod.").removeprefix("module.")):
        if name in modules:
            return name, modules[name]
    near = closest(layer, [name for name in modules if name], most=4)
    hint = f"the closest are {', '.join(near)}" if near else f"its layers are {_outline(model)}"
    raise LayerError(f'no layer "{layer}" in {type(model).__name__}; {hint}')


def _outline(model: nn.Module, most: int = 12) -> str:
    """Return the names of the outermost layers."""
    names = [name for name, _ in model.named_children()]
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "") if names else "none: it is one module"


def layout_of(model: nn.Module, name: str, tensor: Tensor, x: Tensor) -> Layout:
    """Return the layout of a layer's output.

    Args:
        model: The model, inside `prepared_for_attribution`.
        name: The name of the layer.
        tensor: The output of the layer for the batch.
        x: (N, C, H, W) the batch.

    Raises:
        LayerError: The output has no spatial extent.

    Warns:
        SaliencyWarning: The cells of the layer are not in the order of the image.
    """
    shape, size = tuple(tensor.shape), (int(x.shape[-2]), int(x.shape[-1]))
    known = is_channels_first(model.get_submodule(name))
    scan = None if known or fits_channels_first(shape, size) else scan_layers(model, x)
    layout = layout_from(shape, len(x), size, scan.grids if scan else (), channels_first=known)
    if scan is not None:
        spatial = {layer.name: layer for layer in scan.spatial if layer.shape[1:] == shape[1:]}
        layout = spatial[name].layout if name in spatial else layout
    if layout is None:
        raise LayerError(
            f'the output of layer "{name}" has shape {shape}, which has no spatial extent for an input of '
            f"{size[0]}x{size[1]}; choose a layer with an output (N, K, h, w), (N, h, w, K) or (N, tokens, K)"
        )
    if scan is not None and name in scan.scrambled_layers:
        warn(
            f'the cells of layer "{name}" are not in the order of the image: a change of the image appears at another '
            "position, so its map may be scrambled"
        )
    return layout
