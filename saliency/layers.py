"""The layers of a model: find one by name or by itself, and read its output as maps (N, K, h, w)."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .classes import output_tensor
from .errors import LayerError, TargetError, closest
from .hooks import HookManager, first_tensor
from .model import run

LayerLike = str | nn.Module | None
"""A dotted name, the module itself, or None for the layer that is found by one forward."""

Grid = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a layer's output lies in memory, and how to read it as maps.

    `kind` is "NCHW", "NHWC" or "NTC" (tokens); `prefix` counts the tokens that stand for no place (class, distillation
    and register tokens).
    """

    kind: str
    grid: Grid
    prefix: int = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor as maps (N, K, h, w)."""
        if self.kind == "NCHW":
            return tensor
        if self.kind == "NHWC":
            return tensor.permute(0, 3, 1, 2)
        places = tensor[:, self.prefix :].transpose(1, 2)  # (N, K, h * w)
        return places.reshape(*places.shape[:2], *self.grid)


@dataclass(frozen=True, slots=True)
class Spatial:
    """A layer whose output has an extent in space."""

    name: str
    kind: str  # the module's class
    shape: tuple[int, ...]  # of its output, for one image
    layout: Layout


@dataclass(frozen=True, slots=True)
class Survey:
    """What one forward of one image shows of a model's layers."""

    modules: tuple[int, ...]  # the identities of the modules: a changed model is surveyed anew
    shapes: dict[str, tuple[int, ...] | None]  # in the order in which the layers finished
    grids: tuple[Grid, ...]
    spatial: tuple[Spatial, ...]
    candidates: tuple[Spatial, ...]  # those that a CAM may be read at by default
    chosen: str | None

    def stages(self, most: int = 3) -> tuple[str, ...]:
        """The outermost layer that ends each of the last resolutions, the finest first."""
        if self.chosen is None:
            return ()
        best: dict[Grid, Spatial] = {}
        for each in self.candidates[: [spatial.name for spatial in self.candidates].index(self.chosen) + 1]:
            known = best.get(each.layout.grid)
            if known is None or each.name.count(".") <= known.name.count("."):
                best[each.layout.grid] = each
            if each.name == self.chosen:
                best[each.layout.grid] = each
        coarse_first = sorted(best.items(), key=lambda item: item[0][0] * item[0][1])
        return tuple(each.name for _, each in reversed(coarse_first[:most]))


_surveys: WeakKeyDictionary[nn.Module, dict[tuple[int, ...], Survey]] = WeakKeyDictionary()
_surveys_lock = threading.Lock()


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
    hint = f"the closest are {', '.join(near)}" if near else "saliency.layers.survey lists them"
    raise LayerError(f'no layer "{layer}" in {type(model).__name__}; {hint}')


def survey(model: nn.Module, x: Tensor) -> Survey:
    """What one forward of the first image of `x` shows of the model's layers; remembered per model and input shape.

    The model is expected to be borrowed.
    """
    shape = tuple(x.shape[1:])
    modules = tuple(map(id, model.modules()))
    with _surveys_lock:
        known = _surveys.get(model, {}).get(shape)
    if known is not None and known.modules == modules:
        return known
    made = _survey(model, x[:1].detach(), modules)
    with _surveys_lock:
        _surveys.setdefault(model, {})[shape] = made
    return made


def _survey(model: nn.Module, x: Tensor, modules: tuple[int, ...]) -> Survey:
    names = {module: name for name, module in model.named_modules() if name}
    shapes: dict[str, tuple[int, ...] | None] = {}

    def note(name: str, output: Any) -> None:
        shapes.pop(name, None)
        tensor = first_tensor(output)
        shapes[name] = None if tensor is None else tuple(tensor.shape)

    with HookManager() as hooks, torch.no_grad():
        for module, name in names.items():
            hooks.observe(module, partial(note, name))
        output = run(model, x)
    size = (int(x.shape[-2]), int(x.shape[-1]))
    grids = tuple(dict.fromkeys((s[2], s[3]) for s in shapes.values() if s is not None and _is_map(s, size)))
    kinds = {name: type(module).__name__ for module, name in names.items()}
    spatial = tuple(
        Spatial(name, kinds[name], each, layout)
        for name, each in shapes.items()
        if each is not None and (layout := _layout(each, 1, size, grids)) is not None
    )
    final = first_tensor(output)
    classes = final.shape[1] if final is not None and final.dim() == 4 else None
    candidates = _candidates(model, spatial, classes)
    chosen = _choose(model, x, [each.name for each in candidates])
    return Survey(modules, shapes, grids, spatial, candidates, chosen)


def _candidates(model: nn.Module, spatial: tuple[Spatial, ...], classes: int | None) -> tuple[Spatial, ...]:
    """The layers that a CAM may be read at, in the order in which they finished.

    Left out: single points, images themselves, the class scores of a segmentation, pooling in front of the head, layers
    that do nothing in evaluation, and what lies inside an attention: its maps of token by token, its queries and keys.
    """
    tokens = {each.shape[1] for each in spatial if each.layout.kind == "NTC"}

    def serves(each: Spatial) -> bool:
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


def _choose(model: nn.Module, x: Tensor, candidates: list[str]) -> str | None:
    """The last candidate at whose places the top score has a gradient.

    In a vision transformer with a class token the patches of the last block's output have none: the layer in front of
    its attention has. One more forward decides, mostly: recording begins at the last candidate, and further back only
    where that one fails.
    """
    for batch in (candidates[-1:], candidates[-24:-1], candidates[:-24]):
        alive = _with_gradient(model, x, batch) if batch else []
        if alive:
            return alive[-1]
    return candidates[-1] if candidates else None


def _with_gradient(model: nn.Module, x: Tensor, names: list[str]) -> list[str]:
    size = (int(x.shape[-2]), int(x.shape[-1]))
    with HookManager() as hooks:
        captured = {name: hooks.capture(model.get_submodule(name), record=True) for name in names}
        with torch.no_grad():
            output = run(model, x)
    try:
        score = output_tensor(output).flatten(1).max(1).values.sum()
    except TargetError:
        return names
    if not score.requires_grad:
        return []
    calls = [(name, calls[-1]) for name, calls in captured.items() if calls and calls[-1].requires_grad]
    grads: tuple[Tensor | None, ...] = torch.autograd.grad(score, [tensor for _, tensor in calls], allow_unused=True)
    alive = []
    for (name, _), grad in zip(calls, grads, strict=True):
        if grad is not None:
            layout = _layout(tuple(grad.shape), 1, size, ())
            alive += [name] if layout is not None and bool(layout(grad).any()) else []
    return alive


def layout_of(model: nn.Module, name: str, tensor: Tensor, x: Tensor) -> Layout:
    """How the output of a layer lies in memory.

    Raises:
        LayerError: It has no extent in space.
    """
    shape, size = tuple(tensor.shape), (int(x.shape[-2]), int(x.shape[-1]))
    grids = () if len(shape) == 4 else survey(model, x).grids
    layout = _layout(shape, len(x), size, grids)
    if layout is None:
        raise LayerError(
            f'the output of layer "{name}" has shape {shape}, which has no extent in space for an input of '
            f"{size[0]}x{size[1]}; choose a layer with an output (N, K, h, w), (N, h, w, K) or (N, tokens, K)"
        )
    return layout


def _layout(shape: tuple[int, ...], images: int, size: Grid, grids: Iterable[Grid]) -> Layout | None:
    if len(shape) < 3 or shape[0] != images or 0 in shape:
        return None
    if len(shape) == 4:
        channels_first, channels_last = _misfit(shape[2:], size), _misfit(shape[1:3], size)
        if channels_first <= channels_last:
            return Layout("NCHW", (shape[2], shape[3])) if channels_first <= 2 else None
        return Layout("NHWC", (shape[1], shape[2])) if channels_last <= 2 else None
    return _token_layout(shape[1], size, grids) if len(shape) == 3 else None


def _misfit(grid: tuple[int, ...], size: Grid) -> float:
    """By how many cells a grid differs from the input's proportions."""
    (h, w), (height, width) = grid, size
    if h > height or w > width:
        return math.inf
    return min(abs(h - w * height / width), abs(w - h * width / height))


def _is_map(shape: tuple[int, ...], size: Grid) -> bool:
    return len(shape) == 4 and shape[2] * shape[3] > 1 and _misfit(shape[2:], size) <= 2


def _token_layout(tokens: int, size: Grid, grids: Iterable[Grid]) -> Layout | None:
    """The grid whose cells, with a few tokens in front, make up the number of tokens.

    A grid that the model was seen to use comes first; else the one with square cells and the fewest tokens in front.
    """
    seen = [(tokens - h * w, (h, w)) for h, w in grids if 0 <= tokens - h * w <= 16]
    if seen:
        prefix, grid = min(seen)
        return Layout("NTC", grid, prefix)
    for prefix in range(min(17, tokens)):
        cells = tokens - prefix
        divisors = [h for h in range(1, math.isqrt(cells) + 1) if cells % h == 0]
        pairs = [(h, cells // h) for h in divisors] + [(cells // h, h) for h in divisors]
        grid = min(pairs, key=lambda pair: _misfit(pair, size))
        if cells > 1 and _misfit(grid, size) < 1:
            return Layout("NTC", grid, prefix)
    return None
