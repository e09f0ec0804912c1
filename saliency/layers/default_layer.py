"""What one forward shows of a model's layers, and which of them a CAM is read at by default."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..errors import TargetError
from ..hooks.manager import HookManager
from ..hooks.model_state import run_model, unique_modules
from ..hooks.pytree import first_tensor
from ..targets.class_names import output_tensor
from .layout import Grid, Layout, is_channels_first, is_map, layout_from
from .spatial_order import LayerCandidate, scrambled_layers


@dataclass(frozen=True, slots=True)
class SpatialLayer:
    """A layer whose output has an extent in space."""

    name: str
    kind: str  # the module's class
    shape: tuple[int, ...]  # of its output, for one image
    layout: Layout


@dataclass(frozen=True, slots=True)
class LayerScan:
    """What one forward of one image shows of a model's layers."""

    modules: tuple[int, ...]  # the identities of the modules: a changed model is surveyed anew
    shapes: dict[str, tuple[int, ...] | None]  # in the order in which the layers finished
    grids: tuple[Grid, ...]
    spatial: tuple[SpatialLayer, ...]
    candidates: tuple[SpatialLayer, ...]  # those that a CAM may be read at by default
    scrambled_layers: frozenset[str]  # layers that look like maps, but whose places are not the picture's
    chosen: str | None  # None also where only a target finds the scores in the output, as for a detector
    alive: bool  # whether the score has a gradient at the chosen layer

    def stages(self, most: int = 3) -> tuple[str, ...]:
        """The outermost layer that ends each of the last resolutions, the finest first."""
        if self.chosen is None:
            return ()
        best: dict[Grid, SpatialLayer] = {}
        for each in self.candidates[: [spatial.name for spatial in self.candidates].index(self.chosen) + 1]:
            known = best.get(each.layout.grid)
            outer = known is None or each.name.count(".") <= known.name.count(".")
            if each.name == self.chosen or (outer and each.name not in self.scrambled_layers):
                best[each.layout.grid] = each
        coarse_first = sorted(best.items(), key=lambda item: item[0][0] * item[0][1])
        return tuple(each.name for _, each in reversed(coarse_first[:most]))


_surveys: WeakKeyDictionary[nn.Module, dict[tuple[int, ...], LayerScan]] = WeakKeyDictionary()
_surveys_lock = threading.Lock()


def scan_layers(model: nn.Module, x: Tensor, target: Callable[[Any], Tensor] | None = None) -> LayerScan:
    """What one forward shows of the model's layers; remembered per model and input shape.

    It is a forward of noise in the shape of `x`, so that the layer that is found does not depend on the image that
    comes first. Only where the output does not say which tensor holds the scores (a detector, which finds nothing in
    noise), the layer is found with `target` on `x` itself, in up to three more forwards. The model is expected to be
    borrowed.

    Raises:
        TargetError: The target has no gradient at any layer, or does not fit the model's output.
    """
    shape = tuple(x.shape[1:])
    modules = tuple(map(id, unique_modules(model)))
    with _surveys_lock:
        known = _surveys.get(model, {}).get(shape)
    if known is not None and known.modules == modules and (known.chosen is not None or target is None):
        return known
    noise = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu").to(x)
    # What the user records or edits meanwhile is not this: the layer that is found is that of the model itself.
    with HookManager(exclusive=True), torch.enable_grad():
        if known is None or known.modules != modules:
            known = _survey(model, noise, modules)
        # Where no layer has a gradient, as under a head of zeros, the next call may know better.
        if known.alive:
            with _surveys_lock:
                _surveys.setdefault(model, {})[shape] = known
        if known.chosen is None and known.candidates and target is not None:
            return _chosen_for(model, x, known, target)
    return known


def _chosen_for(model: nn.Module, x: Tensor, known: LayerScan, target: Callable[[Any], Tensor]) -> LayerScan:
    """The survey with the last layer at which the score of every image has a gradient."""
    chosen = _last_alive(model, x, known.candidates, target)
    if chosen is None:
        raise TargetError(
            "the score has no gradient at any layer with an extent in space: the target or the model detaches it, "
            "takes an argmax or a number of it, or nothing was detected in one of the images"
        )
    return replace(known, chosen=chosen.name)


def _survey(model: nn.Module, x: Tensor, modules: tuple[int, ...]) -> LayerScan:
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
    grids = tuple(dict.fromkeys((s[2], s[3]) for s in shapes.values() if s is not None and is_map(s, size)))
    kinds = {name: type(module).__name__ for module, name in names.items()}
    # What a convolution gives is channels first, and so is what has a shape that one gave.
    channels_first = {shapes.get(name) for module, name in names.items() if is_channels_first(module)}
    spatial = tuple(
        SpatialLayer(name, kinds[name], each, layout)
        for name, each in shapes.items()
        if each is not None
        and (layout := layout_from(each, 1, size, grids, channels_first=each in channels_first)) is not None
    )
    final = first_tensor(output)
    classes = final.shape[1] if final is not None and final.dim() == 4 else None
    candidates = _candidates(model, spatial, classes)
    elsewhere = scrambled_layers(
        model, x, [LayerCandidate(each.name, each.layout) for each in candidates if each.layout.kind != "NCHW"]
    )
    candidates = _in_place(candidates, elsewhere)
    found = LayerScan(modules, shapes, grids, spatial, candidates, elsewhere, None, True)
    try:
        alive = _last_alive(model, x, candidates, _top_score)
    except TargetError:
        return replace(found, candidates=tuple(each for each in candidates if each.name not in elsewhere))
    chosen = alive or (candidates[-1] if candidates else None)
    return replace(found, chosen=chosen.name if chosen else None, alive=alive is not None)


def _top_score(output: Any) -> Tensor:
    return output_tensor(output).flatten(1).max(1).values


def _candidates(model: nn.Module, spatial: tuple[SpatialLayer, ...], classes: int | None) -> tuple[SpatialLayer, ...]:
    """The layers that a CAM may be read at, in the order in which they finished.

    Left out: single points, images themselves, the class scores of a segmentation, pooling in front of the head, layers
    that do nothing in evaluation, and what lies inside an attention: its maps of token by token, its queries and keys.
    """
    tokens = {each.shape[1] for each in spatial if each.layout.kind == "NTC"}

    def serves(each: SpatialLayer) -> bool:
        height, breadth = each.layout.grid
        module = model.get_submodule(each.name)
        if each.layout.kind == "NTC":
            return height * breadth > 1 and _is_block_or_norm(module)
        channels = each.shape[1] if each.layout.kind == "NCHW" else each.shape[3]
        token_by_token = bool({height, breadth} & tokens)
        return (
            height * breadth > 1 and channels > 3 and channels != classes and not (token_by_token or _is_idle(module))
        )

    return tuple(each for each in spatial if serves(each))


def _is_idle(module: nn.Module) -> bool:
    pooling = nn.AdaptiveAvgPool2d | nn.AdaptiveMaxPool2d
    return isinstance(module, pooling | nn.Identity | nn.Dropout | nn.Dropout2d | nn.Softmax)


def _is_block_or_norm(module: nn.Module) -> bool:
    """Whether a layer of tokens is a whole block, or a normalisation, whose parameters are one number per channel."""
    parameters = list(module.parameters())
    return any(module.children()) or (bool(parameters) and all(each.dim() == 1 for each in parameters))


def _in_place(candidates: tuple[SpatialLayer, ...], elsewhere: frozenset[str]) -> tuple[SpatialLayer, ...]:
    """The candidates less those whose places are not the picture's.

    Where that would leave none of the tokens, they all stay: a network with random weights may mix its places so
    thoroughly that a change shows anywhere.
    """
    kept = tuple(each for each in candidates if each.name not in elsewhere)
    return kept if any(each.layout.kind != "NCHW" for each in kept) else candidates


def _last_alive(
    model: nn.Module, x: Tensor, candidates: tuple[SpatialLayer, ...], target: Callable[[Any], Tensor]
) -> SpatialLayer | None:
    """The last candidate at whose places the score of every image has a gradient.

    In a vision transformer with a class token the patches of the last block's output have none: the layer in front of
    its attention has. One more forward decides, mostly: recording begins at the last candidate, and further back only
    where that one fails.
    """
    for part in (candidates[-1:], candidates[-24:-1], candidates[:-24]):
        alive = _with_gradient(model, x, part, target) if part else []
        if alive:
            return alive[-1]
    return None


def _with_gradient(
    model: nn.Module, x: Tensor, candidates: tuple[SpatialLayer, ...], target: Callable[[Any], Tensor]
) -> list[SpatialLayer]:
    with HookManager() as hooks:
        captured = [(each, hooks.capture(model.get_submodule(each.name), record=True)) for each in candidates]
        with torch.no_grad():
            output = run_model(model, x)
    score = target(output).sum()
    last = [
        (each, calls[-1]) for each, calls in captured if calls and calls[-1].requires_grad and not _is_one_of(calls)
    ]
    if not last or not score.requires_grad:
        return []
    grads: tuple[Tensor | None, ...] = torch.autograd.grad(score, [tensor for _, tensor in last], allow_unused=True)
    return [
        each
        for (each, _), grad in zip(last, grads, strict=True)
        if grad is not None and bool(each.layout(grad).flatten(1).any(1).all())
    ]


def _is_one_of(calls: list[Tensor]) -> bool:
    """Whether the last call is one of several side by side, as a detector's head runs at each level of its features."""
    first, last = calls[0], calls[-1]
    if first.shape == last.shape or not first.requires_grad:
        return False
    return torch.autograd.grad(last.sum(), first, retain_graph=True, allow_unused=True)[0] is None
