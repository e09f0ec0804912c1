"""Scan a model's layers with one forward, and choose the default layer for class activation maps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..errors import TargetError
from ..hooks.autograd_graph import unique_modules
from ..hooks.manager import HookManager
from ..hooks.model_state import run_model
from ..hooks.pytree import first_tensor
from ..targets.class_names import output_tensor
from .layout import Grid, Layout, is_channels_first, is_channels_first_map, layout_from

_Score = Callable[[Any], Tensor]

# Centres of the patches that are changed, as fractions of height and width: no two in the same row, column or quadrant.
_CENTRES = ((0.2, 0.3), (0.3, 0.8), (0.7, 0.15), (0.85, 0.65))
_PATCH = 1 / 8  # of the height and width
_PROJECTIONS = 3
_MIN_RELATIVE_CHANGE = 0.75


@dataclass(frozen=True, slots=True)
class SpatialLayer:
    """Layer whose output has a spatial extent."""

    name: str
    kind: str  # the class of the module
    shape: tuple[int, ...]  # of its output, for one image
    layout: Layout


@dataclass(frozen=True, slots=True)
class LayerScan:
    """Layers of a model, found in one forward of one image."""

    modules: tuple[int, ...]  # their ids, by which a changed model is detected and scanned again
    shapes: dict[str, tuple[int, ...] | None]  # in the order in which the layers finished
    grids: tuple[Grid, ...]
    spatial: tuple[SpatialLayer, ...]
    candidates: tuple[SpatialLayer, ...]  # for the default layer
    scrambled_layers: frozenset[str]  # outputs have the shape of maps, but their cells are not in image order
    chosen: str | None  # the default layer; None also if it depends on the target, as for a detector
    alive: bool  # whether the score has a gradient at the default layer

    def stages(self, most: int = 3) -> tuple[str, ...]:
        """Return the last of the outermost layers of each of the last `most` resolutions, the finest first."""
        if self.chosen is None:
            return ()
        best: dict[Grid, SpatialLayer] = {}
        names = [layer.name for layer in self.candidates]
        for layer in self.candidates[: names.index(self.chosen) + 1]:
            known = best.get(layer.layout.grid)
            is_outer = known is None or layer.name.count(".") <= known.name.count(".")
            if layer.name == self.chosen or (is_outer and layer.name not in self.scrambled_layers):
                best[layer.layout.grid] = layer
        coarse_first = sorted(best.items(), key=lambda item: item[0][0] * item[0][1])
        return tuple(layer.name for _, layer in reversed(coarse_first[:most]))


_scans: WeakKeyDictionary[nn.Module, dict[tuple[int, ...], LayerScan]] = WeakKeyDictionary()
_scans_lock = threading.Lock()


def scan_layers(model: nn.Module, x: Tensor, target: _Score | None = None) -> LayerScan:
    """Scan the layers of a model; the result is cached per model and input shape.

    The forward runs on noise in the shape of `x`, so that the default layer does not depend on the first image. A
    detector finds nothing in noise, and its output does not show which tensor holds the scores. For such an output, the
    layer is chosen with `target` on `x`, in up to three more forwards. The model must be in `prepared_for_attribution`.

    Raises:
        TargetError: The target has no gradient at any layer, or does not fit the model's output.
    """
    shape = tuple(x.shape[1:])
    modules = tuple(map(id, unique_modules(model)))
    with _scans_lock:
        scan = _scans.get(model, {}).get(shape)
    if scan is not None and scan.modules == modules and (scan.chosen is not None or target is None):
        return scan
    # Disable recordings and edits of the user: the default layer must not depend on them.
    with HookManager(exclusive=True), torch.enable_grad():
        if scan is None or scan.modules != modules:
            scan = _scan(model, _noise(1, *shape).to(x), modules)
        # Do not cache a scan without gradients, as with a head of zeros: a later call may find a better layer.
        if scan.alive:
            with _scans_lock:
                _scans.setdefault(model, {})[shape] = scan
        if scan.chosen is None and scan.candidates and target is not None:
            chosen = _last_with_gradient(model, x, scan.candidates, target)
            if chosen is None:
                raise TargetError(
                    "the score has no gradient at any layer with a spatial extent: the target or the model detaches "
                    "it, uses argmax or .item(), or nothing was detected in one of the images"
                )
            return replace(scan, chosen=chosen.name)
    return scan


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")


def _scan(model: nn.Module, x: Tensor, modules: tuple[int, ...]) -> LayerScan:
    names = {module: name for name, module in model.named_modules() if name}
    shapes: dict[str, tuple[int, ...] | None] = {}

    def note(name: str, output: Any) -> None:
        shapes.pop(name, None)
        tensor = first_tensor(output)
        shapes[name] = None if tensor is None else tuple(tensor.shape)

    with HookManager() as hooks, torch.no_grad():
        for module, name in names.items():
            hooks.observe(module, partial(note, name))
        output = run_model(model, x)
    size = (int(x.shape[-2]), int(x.shape[-1]))
    grids = tuple(
        dict.fromkeys((s[2], s[3]) for s in shapes.values() if s is not None and is_channels_first_map(s, size))
    )
    kinds = {name: type(module).__name__ for module, name in names.items()}
    # The output of a convolution is channels first, and so is every output of the same shape.
    channels_first = {shapes.get(name) for module, name in names.items() if is_channels_first(module)}
    spatial = tuple(
        SpatialLayer(name, kinds[name], shape, layout)
        for name, shape in shapes.items()
        if shape is not None
        and (layout := layout_from(shape, 1, size, grids, channels_first=shape in channels_first)) is not None
    )
    final = first_tensor(output)
    classes = final.shape[1] if final is not None and final.dim() == 4 else None
    candidates = _candidates(model, spatial, classes)
    scrambled = scrambled_layers(model, x, [layer for layer in candidates if layer.layout.kind != "NCHW"])
    ordered = tuple(layer for layer in candidates if layer.name not in scrambled)
    # With random weights, tokens may be mixed so much that a change appears in any cell. Then keep all candidates.
    candidates = ordered if any(layer.layout.kind != "NCHW" for layer in ordered) else candidates
    scan = LayerScan(modules, shapes, grids, spatial, candidates, scrambled, None, True)
    try:
        last = _last_with_gradient(model, x, candidates, _top_score)
    except TargetError:
        return replace(scan, candidates=ordered)
    chosen = last or (candidates[-1] if candidates else None)
    return replace(scan, chosen=chosen.name if chosen else None, alive=last is not None)


def _top_score(output: Any) -> Tensor:
    return output_tensor(output).flatten(1).max(1).values


def _candidates(model: nn.Module, spatial: tuple[SpatialLayer, ...], classes: int | None) -> tuple[SpatialLayer, ...]:
    """Return the candidates for the default layer, in the order in which they finished.

    These layers are excluded: single cells, images, the class scores of a segmentation, pooling before the head, layers
    without effect in evaluation mode, attention maps (tokens by tokens), queries and keys.
    """
    tokens = {layer.shape[1] for layer in spatial if layer.layout.kind == "NTC"}

    def is_candidate(layer: SpatialLayer) -> bool:
        height, width = layer.layout.grid
        module = model.get_submodule(layer.name)
        if layer.layout.kind == "NTC":
            return height * width > 1 and _is_block_or_norm(module)
        channels = layer.shape[1] if layer.layout.kind == "NCHW" else layer.shape[3]
        is_token_by_token = bool({height, width} & tokens)
        return (
            height * width > 1
            and channels not in (1, 2, 3, classes)
            and not (is_token_by_token or _is_pooling_or_inactive(module))
        )

    return tuple(filter(is_candidate, spatial))


def _is_pooling_or_inactive(module: nn.Module) -> bool:
    pooling = nn.AdaptiveAvgPool2d | nn.AdaptiveMaxPool2d
    return isinstance(module, pooling | nn.Identity | nn.Dropout | nn.Dropout2d | nn.Softmax)


def _is_block_or_norm(module: nn.Module) -> bool:
    """Return whether a layer of tokens is a block, or a normalisation, whose parameters are one number per channel."""
    parameters = list(module.parameters())
    return any(module.children()) or (bool(parameters) and all(parameter.dim() == 1 for parameter in parameters))


def _last_with_gradient(
    model: nn.Module, x: Tensor, candidates: tuple[SpatialLayer, ...], target: _Score
) -> SpatialLayer | None:
    """Return the last candidate at which the score of every image has a gradient.

    In a vision transformer with a class token, the patch tokens have no gradient after the last block, but do have one
    before its attention. Usually one more forward is enough: recording begins at the last candidate, and begins earlier
    only if that one has no gradient.
    """
    for part in (candidates[-1:], candidates[-24:-1], candidates[:-24]):
        alive = _layers_with_gradient(model, x, part, target) if part else []
        if alive:
            return alive[-1]
    return None


def _layers_with_gradient(
    model: nn.Module, x: Tensor, candidates: tuple[SpatialLayer, ...], target: _Score
) -> list[SpatialLayer]:
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
    return [
        layer
        for layer, grad in zip(outputs, grads, strict=True)
        if grad is not None and bool(layer.layout(grad).flatten(1).any(1).all())
    ]


def _is_one_of_parallel_calls(calls: list[Tensor]) -> bool:
    """Return whether the last call is one of several in parallel, as a detector's head runs at several resolutions."""
    first, last = calls[0], calls[-1]
    if first.shape == last.shape or not first.requires_grad:
        return False
    return torch.autograd.grad(last.sum(), first, retain_graph=True, allow_unused=True)[0] is None


def scrambled_layers(model: nn.Module, x: Tensor, layers: Sequence[SpatialLayer]) -> frozenset[str]:
    """Return the names of the layers whose strongest change is not at the position where the image was changed.

    Some networks reorder their tokens, and some outputs without positions have the shape of maps. This cannot be seen
    in the shapes. It takes one forward of the image, and one for each of four patches. The model must be in
    `prepared_for_attribution`.

    Args:
        model: The model.
        x: (1, C, H, W) one image.
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
    """Return the image with noise added in a patch. The noise has the standard deviation of the image."""
    height, width = x.shape[-2:]
    rows, columns = max(1, round(height * _PATCH)), max(1, round(width * _PATCH))
    top, left = round(centre[0] * height - rows / 2), round(centre[1] * width - columns / 2)
    changed = x.clone()
    strength = x.std() if x.numel() > 1 and bool(x.std() > 0) else 1.0
    changed[..., top : top + rows, left : left + columns] += strength * _noise(*x.shape[:2], rows, columns).to(x)
    return changed


def _signatures(model: nn.Module, x: Tensor, layers: Sequence[SpatialLayer]) -> dict[str, Tensor]:
    """Return a few random projections (P, h, w) of each layer's channels, which are small but show any change."""
    signatures: dict[str, Tensor] = {}

    def project(layer: SpatialLayer, output: Any) -> None:
        tensor = first_tensor(output)
        if tensor is not None:
            maps = layer.layout(tensor.detach())[0].float()  # (K, h, w)
            signatures[layer.name] = torch.einsum("pk,khw->phw", _noise(_PROJECTIONS, len(maps)).to(maps), maps)

    with HookManager() as hooks, torch.no_grad():
        for layer in layers:
            hooks.observe(model.get_submodule(layer.name), partial(project, layer))
        run_model(model, x)
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
