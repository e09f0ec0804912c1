"""Find the layers of a model: by name, or by one forward that also chooses the default for class activation maps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..errors import LayerError, TargetError, closest, warn
from ..hooks.autograd_graph import unique_modules
from ..hooks.forward_args import bind_image, cache_of
from ..hooks.manager import HookManager
from ..hooks.model_state import run_model
from ..hooks.pytree import first_tensor
from ..targets.targets import output_tensor
from .layout import GIVE_LAYOUT, Grid, Layout, given_layout, is_channels_first, is_channels_first_map, layout_from

LayerLike = str | nn.Module | list[str | nn.Module] | None
"""A dotted name, the module itself, a list with one of these, or None for the default layer."""


def named_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return all modules by name, except a preset of torchvision in `model.preprocess`, which is a module too."""
    modules = dict(model.named_modules(remove_duplicate=False))
    if type(modules.get("preprocess")).__module__.startswith("torchvision.transforms"):
        modules = {name: module for name, module in modules.items() if name.partition(".")[0] != "preprocess"}
    return modules


def find(model: nn.Module, layer: str | nn.Module) -> tuple[str, nn.Module]:
    """Return the name and the module of a layer.

    Raises:
        LayerError: The model has no such layer; the message lists the closest names.
    """
    modules = named_layers(model)
    if isinstance(layer, nn.Module):
        name = next((name for name, module in modules.items() if module is layer), None)
        if name is None:
            raise LayerError(f"the layer {type(layer).__name__} is not part of this {type(model).__name__}")
        return name, layer
    if not isinstance(layer, str):
        raise LayerError(f"expected a layer as a dotted name or a module, got {type(layer).__name__}")
    # Names of layers in a wrapped model start with the wrapper's prefix.
    for name in (layer, layer.removeprefix("_orig_mod.").removeprefix("module.")):
        if name in modules:
            return name, modules[name]
    near = closest(layer, [name for name in modules if name], most=4)
    outermost = [name for name in modules if name and "." not in name][:12]
    others, names = ("the closest", near) if near else ("its outermost layers", outermost or ["none"])
    raise LayerError(f'no layer "{layer}" in {type(model).__name__}; {others} are {", ".join(names)}')


def layout_of(model: nn.Module, name: str, tensor: Tensor, x: Tensor) -> Layout:
    """Return the layout of a layer's output: that of the user's function, or the recognised one.

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
    if not known and (given := given_layout(tensor.detach())) is not None:
        return given
    layout, scan = layout_from(shape, len(x), size, (), channels_first=known), None
    if layout is None or layout.kind != "NCHW":
        scan = scan_layers(model, x)
        layout = layout_from(shape, len(x), size, scan.grids)
        spatial = {layer.name: layer for layer in scan.spatial if layer.shape[1:] == shape[1:]}
        layout = spatial[name].layout if name in spatial else layout
    if layout is None:
        problem = f"has shape {shape}, which has no spatial extent for an input of {size[0]}x{size[1]}"
        hint = "choose a layer with an output (N, K, h, w), (N, h, w, K) or (N, tokens, K)"
        raise LayerError(f'the output of layer "{name}" {problem}; {hint}, or {GIVE_LAYOUT}')
    if scan is not None and name in scan.scrambled_layers:
        warn(f'the cells of layer "{name}" are not in the order of the image, so the map may be scrambled')
    return layout


_Score = Callable[[Any], Tensor]

# Centres of the patches that are changed, as fractions of height and width: no two in the same row, column or quadrant.
_CENTRES = ((0.2, 0.3), (0.3, 0.8), (0.7, 0.15), (0.85, 0.65))
_PATCH = 1 / 8  # of the height and width
_PROJECTIONS = 3
_POOLING_OR_INACTIVE = (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.Identity, nn.Dropout, nn.Dropout2d, nn.Softmax)
_MIN_RELATIVE_CHANGE = 0.75


@dataclass(frozen=True, slots=True)
class SpatialLayer:
    """Layer whose output has a spatial extent."""

    name: str
    shape: tuple[int, ...]  # of its output, for one image
    layout: Layout


_Layers = tuple[SpatialLayer, ...]


@dataclass(frozen=True, slots=True)
class LayerScan:
    """Layers of a model, found in one forward of one image."""

    grids: tuple[Grid, ...]  # (h, w) of all maps with channels first
    spatial: tuple[SpatialLayer, ...]  # in the order in which they finished
    candidates: tuple[SpatialLayer, ...]  # for the default layer
    scrambled_layers: frozenset[str]  # outputs have the shape of maps, but their cells are not in image order
    default: str | None  # None also if it depends on the target, as for a detector
    has_gradient: bool  # whether the score has a gradient at the default layer

    def last_per_resolution(self) -> tuple[str, ...]:
        """Return one layer for each of the last three resolutions, finest first: the last of the outermost layers."""
        if self.default is None:
            return ()
        last: dict[Grid, SpatialLayer] = {}
        names = [layer.name for layer in self.candidates]
        for layer in self.candidates[: names.index(self.default) + 1]:
            known = last.get(layer.layout.grid)
            is_outer = known is None or layer.name.count(".") <= known.name.count(".")
            if layer.name == self.default or (is_outer and layer.name not in self.scrambled_layers):
                last[layer.layout.grid] = layer
        coarse_first = sorted(last.items(), key=lambda item: item[0][0] * item[0][1])
        return tuple(layer.name for _, layer in reversed(coarse_first[:3]))


# By model, then by the shape of an image and the ids of all modules. The ids differ after a module was replaced.
_scans: WeakKeyDictionary[nn.Module, dict[Hashable, LayerScan]] = WeakKeyDictionary()


def scan_layers(model: nn.Module, x: Tensor, target: _Score | None = None) -> LayerScan:
    """Scan the layers of a model; the result is cached per model and input shape.

    The forward runs on noise in the shape of `x`, so that the default layer does not depend on the first image. A
    detector finds nothing in noise, and its output does not show which tensor holds the scores. For such an output, the
    layer is chosen with `target` on `x`, in up to three more forwards. The model must be in `prepared_for_attribution`.

    Raises:
        TargetError: The target has no gradient at any layer, or does not fit the model's output.
    """
    shape, scans = tuple(x.shape[1:]), cache_of(_scans, model)
    key = (shape, tuple(map(id, unique_modules(model))))
    scan: LayerScan | None = scans.get(key)
    if scan is not None and (scan.default is not None or target is None):
        return scan
    # Disable recordings and edits of the user: the default layer must not depend on them.
    with HookManager(exclusive=True), torch.enable_grad():
        if scan is None:
            with bind_image(0):
                scan = _scan(model, _noise(1, *shape).to(x))
        # Do not cache a scan without gradients, such as for a zero head: a later call may find a better layer.
        if scan.has_gradient:
            scans[key] = scan
        if scan.default is None and scan.candidates and target is not None:
            last = _last_with_gradient(model, x, scan.candidates, target)
            if last is None:
                raise TargetError(
                    "the score has no gradient at any layer with a spatial extent: the target or the model detaches "
                    "it, uses argmax or .item(), or nothing was detected in an image"
                )
            return replace(scan, default=last.name)
    return scan


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")


def _observe(model: nn.Module, x: Tensor, names: Iterable[str], callback: Callable[[str, Tensor], None]) -> Any:
    """Run the model, and call `callback(name, output)` after each call of some layers; return the model's output."""

    def on_output(name: str, output: Any) -> None:
        tensor = first_tensor(output)
        if tensor is not None and not tensor.is_nested:  # as layers of nn.TransformerEncoder return for a padding mask
            callback(name, tensor)

    modules = dict(model.named_modules())
    with HookManager() as hooks, torch.no_grad():
        for name in names:
            hooks.observe(modules[name], partial(on_output, name))
        return run_model(model, x)


def _scan(model: nn.Module, x: Tensor) -> LayerScan:
    modules = {name: module for name, module in model.named_modules() if name}
    shapes: dict[str, tuple[int, ...]] = {}

    def store_shape(name: str, output: Tensor) -> None:
        shapes.pop(name, None)  # the last call counts
        shapes[name] = tuple(output.shape)

    output = _observe(model, x, modules, store_shape)
    size = (int(x.shape[-2]), int(x.shape[-1]))
    grids = tuple(dict.fromkeys((s[2], s[3]) for s in shapes.values() if is_channels_first_map(s, size)))
    # The output of a convolution is channels first, and so is every output of the same shape.
    channels_first = {shape for name, shape in shapes.items() if is_channels_first(modules[name])}
    layouts = {
        name: layout_from(shape, 1, size, grids, channels_first=shape in channels_first)
        for name, shape in shapes.items()
    }
    spatial = tuple(SpatialLayer(name, shapes[name], layout) for name, layout in layouts.items() if layout is not None)
    final = first_tensor(output)
    classes = final.shape[1] if final is not None and final.dim() == 4 else None
    candidates = _candidates(model, spatial, classes)
    scrambled = _scrambled_layers(model, x, [layer for layer in candidates if layer.layout.kind != "NCHW"])
    ordered = tuple(layer for layer in candidates if layer.name not in scrambled)
    # With random weights, tokens may be mixed so much that a change appears in any cell. Then keep all candidates.
    candidates = ordered if any(layer.layout.kind != "NCHW" for layer in ordered) else candidates
    scan = LayerScan(grids, spatial, candidates, scrambled, None, True)
    try:
        last = _last_with_gradient(model, x, candidates, lambda output: output_tensor(output).flatten().max(0).values)
    except TargetError:
        return replace(scan, candidates=ordered)
    default = last or (candidates[-1] if candidates else None)
    return replace(scan, default=default.name if default else None, has_gradient=last is not None)


def _candidates(model: nn.Module, spatial: _Layers, classes: int | None) -> _Layers:
    """Return the candidates for the default layer, in the order in which they finished.

    Excluded are layers without effect in evaluation mode, pooling before the head, queries and keys. Also excluded are
    outputs that are a single cell, an image, the class scores of a segmentation, or attention (tokens by tokens).
    """
    tokens = {layer.shape[1] for layer in spatial if layer.layout.kind == "NTC"}

    def is_candidate(layer: SpatialLayer) -> bool:
        height, width = layer.layout.grid
        module = model.get_submodule(layer.name)
        if layer.layout.kind == "NTC":
            return height * width > 1 and _is_block_or_norm(module)
        channels = layer.shape[1] if layer.layout.kind == "NCHW" else layer.shape[3]
        is_excluded = isinstance(module, _POOLING_OR_INACTIVE) or bool({height, width} & tokens)
        return height * width > 1 and channels not in (1, 2, 3, classes) and not is_excluded

    return tuple(filter(is_candidate, spatial))


def _is_block_or_norm(module: nn.Module) -> bool:
    """Return whether a layer of tokens has submodules, or all its parameters are vectors, as in a normalisation."""
    parameters = list(module.parameters())
    return any(module.children()) or (bool(parameters) and all(parameter.dim() == 1 for parameter in parameters))


def _last_with_gradient(model: nn.Module, x: Tensor, candidates: _Layers, target: _Score) -> SpatialLayer | None:
    """Return the last candidate at which the score of every image has a gradient.

    In a vision transformer with a class token, the patch tokens have no gradient after the last block, but do have one
    before its attention. Usually one more forward is enough: recording begins at the last candidate, and begins earlier
    only if that one has no gradient.
    """
    for part in (candidates[-1:], candidates[-24:-1], candidates[:-24]):
        layers = _layers_with_gradient(model, x, part, target) if part else []
        if layers:
            return layers[-1]
    return None


def _layers_with_gradient(model: nn.Module, x: Tensor, candidates: _Layers, target: _Score) -> list[SpatialLayer]:
    with HookManager() as hooks:
        captured = [(layer, hooks.capture(model.get_submodule(layer.name), record=True)) for layer in candidates]
        with torch.no_grad():
            output = run_model(model, x)
    score = target(output).sum()
    outputs = {
        layer: calls[-1]
        for layer, calls in captured
        if calls and calls[-1].requires_grad and not _is_one_of_parallel_calls(calls)
    }
    if not outputs or not score.requires_grad:
        return []
    grads: tuple[Tensor | None, ...] = torch.autograd.grad(score, list(outputs.values()), allow_unused=True)
    known = [(layer, layer.layout(grad)) for layer, grad in zip(outputs, grads, strict=True) if grad is not None]
    return [layer for layer, maps in known if bool(maps.flatten(1).any(1).all())]


def _is_one_of_parallel_calls(calls: list[Tensor]) -> bool:
    """Return whether the last call does not depend on the first, like the calls of a detector's head by resolution."""
    first, last = calls[0], calls[-1]
    if first.shape == last.shape or not first.requires_grad:
        return False
    return torch.autograd.grad(last.sum(), first, retain_graph=True, allow_unused=True)[0] is None


def _scrambled_layers(model: nn.Module, x: Tensor, layers: Sequence[SpatialLayer]) -> frozenset[str]:
    """Return the names of the layers whose strongest change is not at the position where the image was changed.

    Some networks reorder their tokens, and some outputs without positions have the shape of maps. The shapes
    do not show this. The check runs one forward of the image, and one for each of four patches. The model must be in
    `prepared_for_attribution`.

    Args:
        model: The model.
        x: (1, C, H, W) an image of noise.
        layers: The layers to check; the forward runs all of them.
    """
    if not layers:
        return frozenset()
    before = _signatures(model, x, layers)
    scrambled: set[str] = set()
    for centre in _CENTRES:
        after = _signatures(model, _change_patch(x, centre), layers)
        scrambled |= {name for name, maps in after.items() if not _is_near(maps - before[name], centre)}
    return frozenset(scrambled)


def _change_patch(x: Tensor, centre: tuple[float, float]) -> Tensor:
    """Return the noise image with more noise of the same kind added in a patch."""
    height, width = x.shape[-2:]
    rows, columns = max(1, round(height * _PATCH)), max(1, round(width * _PATCH))
    top, left = round(centre[0] * height - rows / 2), round(centre[1] * width - columns / 2)
    changed = x.clone()
    changed[..., top : top + rows, left : left + columns] += _noise(*x.shape[:2], rows, columns).to(x)
    return changed


def _signatures(model: nn.Module, x: Tensor, layers: Sequence[SpatialLayer]) -> dict[str, Tensor]:
    """Return a few random projections (P, h, w) of each layer's channels, which are small but show any change."""
    layouts = {layer.name: layer.layout for layer in layers}
    signatures: dict[str, Tensor] = {}

    def project(name: str, output: Tensor) -> None:
        maps = layouts[name](output.detach())[0].float()  # (K, h, w)
        signatures[name] = torch.einsum("pk,khw->phw", _noise(_PROJECTIONS, len(maps)).to(maps), maps)

    _observe(model, x, layouts, project)
    return signatures


def _is_near(change: Tensor, centre: tuple[float, float]) -> bool:
    """Return whether the change near the patch is comparable to the strongest change.

    Near means within about one cell, or an eighth of the image. Networks that mix all positions spread a change over
    the map; a network that reorders its positions shows no change near the patch.
    """
    strength = change.square().sum(0).sqrt()
    height, width = strength.shape
    rows = (torch.arange(height, device=strength.device) + 0.5) / height - centre[0]
    columns = (torch.arange(width, device=strength.device) + 0.5) / width - centre[1]
    near = (rows.abs() <= max(1.6 / height, 0.125))[:, None] & (columns.abs() <= max(1.6 / width, 0.125))
    strongest = strength.max()
    return bool(strongest > 0) and bool(strength[near].max() >= _MIN_RELATIVE_CHANGE * strongest)
