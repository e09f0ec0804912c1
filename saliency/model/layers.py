"""Find the layers of a model: by name, or by one forward that also finds the default layer of class activation maps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import dropwhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks

from ..errors import LayerError, MethodError, TargetError, closest, warn
from ..hooks.autograd_graph import combines_channels, differentiate, reached_nodes, source_edge, unique_modules
from ..hooks.manager import HookManager
from ..hooks.pytree import first_tensor, tree_tensors
from ..io.axes import as_text
from ..targets.classes import output_tensor
from ..validation import described
from .call import Reading, bind_image, bound, cached, current_call, leaf, run_model
from .inputs import InputBatch
from .positions import Grid, PositionTrace, grid_of, is_misplaced

LayerLike = str | nn.Module | list[str | nn.Module] | Mapping[Any, str | nn.Module] | None
"""A dotted name, the module itself, a list of these, or None for the default layer."""


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
    """Return the layout of a layer's output: from the user's function, or recognised.

    Args:
        model: The model, inside `prepared_for_attribution`.
        name: The name of the layer.
        tensor: The output of the layer for the batch.
        x: (N, C, H, W) the batch.

    Raises:
        LayerError: The output has no spatial extent, or is computed from other arguments of the model's forward alone.
    """
    call = current_call()
    if call.caches is not None and name not in trace_layers(model, x).sources:
        cure = 'pass no layer, or a layer of each input: layer={"rgb": "colour.2", "depth": "depth.0"}'
        raise LayerError(f'layer "{name}" does not depend on the explained image; {cure}')
    if call.caches is not None and len(tensor) != len(x) and (rows := trace_layers(model, x).rows.get(name)):
        return replace(layout_of(model, name, tensor[list(rows)], x), rows=rows)
    shape, size = tuple(tensor.shape), tuple(x.shape[2:])
    channels_first = isinstance(model.get_submodule(name), CHANNELS_FIRST) and tensor.dim() == x.dim()
    if not channels_first and call.layout is not None:
        return given_layout(call.layout, tensor.detach())
    layout = layout_from(shape, len(x), size, channels_first=channels_first)
    if layout is None or layout.kind != "NCHW":
        spatial = {layer.name: layer for layer in trace_layers(model, x).spatial if layer.shape[1:] == shape[1:]}
        if name in spatial and shape[0] != len(x):
            problem = f'layer "{name}" returns {shape[0]} rows for {len(x)} images, so the model runs them in parts'
            raise LayerError(f"{problem}; explain one image at a time")
        layout = spatial[name].layout if name in spatial else None
    if layout is None:
        problem = f'the output of layer "{name}" has shape {shape}, which has no spatial extent'
        hint = "choose a layer with an output (N, K, h, w), (N, h, w, K) or (N, tokens, K)"
        if len(shape) > 2:
            problem, hint = f'the output of layer "{name}" has shape {shape}, {_UNKNOWN_ORDER}', _FIX_ORDER
        raise LayerError(f"{problem} for an input of {as_text(size)}; {hint}, or {GIVE_LAYOUT}")
    return layout


def attention_layout(model: nn.Module, tokens: int, x: Tensor) -> Layout:
    """Return the layout of the tokens that attend to each other, as for a layer.

    Args:
        model: The model, inside `prepared_for_attribution`.
        tokens: The number of tokens.
        x: (N, C, H, W) the batch.

    Raises:
        LayerError: The tokens are not a grid of patches that covers the image.
    """
    if (function := current_call().layout) is not None:
        return given_layout(function, x.new_zeros(len(x), tokens, 1))
    layout = trace_layers(model, x).attention.get(tokens)
    if layout is None:
        problem = f"the attention of {type(model).__name__} has {tokens} tokens, {_UNKNOWN_ORDER}"
        raise LayerError(f"{problem} for an input of {as_text(x.shape[2:])}; {_FIX_ORDER}, or {GIVE_LAYOUT}")
    return layout


_UNKNOWN_ORDER = "which its operations do not show to be one for each patch of the image"
_FIX_ORDER = 'do not drop or shuffle patches (ViTMAE: mask_ratio=0 and forward_args={"noise": ...} in ascending order)'

_Score = Callable[[Any], Tensor]

_POOLING_OR_INACTIVE = (
    *(nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d),
    *(nn.Identity, nn.Dropout, nn.Dropout2d, nn.Dropout3d, nn.Softmax),
)


@dataclass(frozen=True, slots=True)
class SpatialLayer:
    """Layer whose output has a spatial extent."""

    name: str
    shape: tuple[int, ...]  # of its output, for one image
    layout: Layout

    @property
    def is_single(self) -> bool:
        """Whether the output has one channel, like a gate. Such a layer is read only if there is no other layer."""
        return self.shape[1 if self.layout.kind == "NCHW" else -1] == 1


_Layers = tuple[SpatialLayer, ...]


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """Layers of a model and tokens of its attention, with their positions in the image, from one forward."""

    spatial: _Layers  # in the order in which they finished
    candidates: _Layers  # for the default layer, from the least preferred
    misplaced: _Layers  # candidates that are mirrored or show a part of the image
    features: str | None  # the last layer of features, also if the score has no gradient there
    attention: Mapping[int, Layout | None]  # by the number of tokens; None if the tokens are not patches
    sources: Mapping[str, frozenset[str]]  # by layer that reads the image, the layers from which it is computed
    ends: frozenset[str]  # the layers after which the model only resizes or reduces their values
    calls: Mapping[str, int]  # by layer, the number of its last call that reads the image
    rows: Mapping[str, tuple[int, ...]]  # by layer, the rows of its output that read the image; empty for all rows
    shared: frozenset[str]  # the layers that also read other images, in later calls or in other rows

    @property
    def reading(self) -> frozenset[Reading]:
        """The layers that read the image, with their calls and rows."""
        return frozenset((name, self.calls.get(name, -1), self.rows.get(name, ())) for name in self.sources)


@dataclass(frozen=True, slots=True)
class LayerScan:
    """The default layer of a model, and its candidates."""

    spatial: _Layers  # in the order in which they finished
    candidates: _Layers  # for the default layer, from the least preferred
    default: str | None  # None also if it depends on the target, as for a detector
    has_gradient: bool  # whether the score has a gradient at the default layer, or its layer depends on the target
    branch: str | None = None  # the last layer of another branch of the network, which joins after the default layer

    def last_per_resolution(self) -> tuple[str, ...]:
        """Return one layer for each of the last three resolutions, finest first: the last of the outermost layers."""
        if self.default is None:
            return ()
        last: dict[Grid, SpatialLayer] = {}
        names = [layer.name for layer in self.candidates]
        for layer in self.candidates[: names.index(self.default) + 1]:
            previous = last.get(layer.layout.grid)
            is_outer = previous is None or layer.name.count(".") <= previous.name.count(".")
            if layer.name == self.default or (is_outer and not layer.is_single):
                last[layer.layout.grid] = layer
        coarse_first = sorted(last.items(), key=lambda pair: math.prod(pair[0]))
        return tuple(layer.name for _, layer in reversed(coarse_first[:3]))


def scan_layers(model: nn.Module, x: Tensor, target: _Score | None = None) -> LayerScan:
    """Find the default layer of a model; the result is cached per model and input shape.

    The forward runs on noise in the shape of `x`, so that the default layer does not depend on the first image. A
    detector finds nothing in noise, and its output does not show which tensor holds the scores. For such an output, the
    layer is chosen with `target` on `x`, in up to three more forwards. The model must be in `prepared_for_attribution`.

    Raises:
        TargetError: The target has no gradient at any layer, or does not fit the model's output.
    """
    # Do not cache a scan without gradients, such as for a zero head: a later call may find a better layer.
    scan: LayerScan = cached(model, ("scan", x.shape[1:]), partial(_scan, model, x), lambda scan: scan.has_gradient)
    if scan.default is not None or target is None or not (scan.has_gradient and scan.candidates):
        return scan
    last = _last_with_gradient(model, x, scan.candidates, target)
    if last is None:
        raise TargetError(
            "the score has no gradient at any layer with a spatial extent: the target or the model detaches it, uses "
            "argmax or .item(), or nothing was detected in an image"
        )
    return replace(scan, default=last.name)


def default_layers(model: nn.Module, x: Tensor, target: _Score | None = None) -> tuple[str, ...]:
    """Return the layers of all levels that enter a detector's head if the target is a box, else `default_layer`."""
    levels = head_inputs(model, x, target)
    return tuple(layer.name for layer in levels) if levels else (str(_default_scan(model, x, target).default),)


def default_layer(model: nn.Module, x: Tensor, target: _Score | None = None) -> str:
    """Return the last layer with spatial output at which the score has a gradient. Raises LayerError if there is none.

    If the target is a box, return the last of the layers that enter the head.

    Warns:
        SaliencyWarning: Another branch of the network joins after this layer.
    """
    levels = head_inputs(model, x, target)
    if target is not None and levels and (last := _last_with_gradient(model, x, levels, target)):
        return last.name
    return str(_default_scan(model, x, target).default)


def layers_by_resolution(model: nn.Module, x: Tensor, target: _Score | None = None) -> tuple[str, ...]:
    """Return the last layers of three resolutions, finest first, or the levels of a box. Errors as `default_layer`."""
    levels = tuple(layer.name for layer in head_inputs(model, x, target))
    return levels or _default_scan(model, x, target).last_per_resolution()


def _default_scan(model: nn.Module, x: Tensor, target: _Score | None) -> LayerScan:
    scan = scan_layers(model, x, target)
    if scan.default is None and target is not None:
        target(run_model(model, x))  # if the target does not fit the output, this error comes first
    if scan.default is None:
        _require_layer(None, model, x)
    if scan.branch:
        problem = f'the score also depends on layer "{scan.branch}", in a branch beside the default "{scan.default}"'
        warn(f"{problem}, so the map shows a part of the network; pass layer= to see the other branch")
    return scan


def feature_layer(model: nn.Module, x: Tensor) -> str:
    """Return the last layer of features with spatial output. Raises LayerError if there is none.

    The score need not have a gradient at this layer: for a vision transformer, it is the final norm, even if this norm
    returns the output of the model. Maps of class scores, which are finer than the coarsest features, are not treated
    as features.
    """
    return _require_layer(trace_layers(model, x).features, model, x)


def _require_layer(layer: str | None, model: nn.Module, x: Tensor) -> str:
    if layer is None:
        raise LayerError(
            f"no layer of {type(model).__name__} has a spatial output, not mirrored, that covers the whole image, "
            f"for an input of {as_text(x.shape[2:])}; "
            "pass layer=, a larger image, or the network inside a model that flips images"
        )
    return layer


def head_inputs(model: nn.Module, x: Tensor, target: _Score | None) -> _Layers:
    """Return the layers that enter the head of a detector, from fine to coarse; none if the target is not a box.

    The head is each outermost module whose output reaches the score without passing another outermost module. A layer
    enters the head if its output reaches an argument of the head without passing another layer. So the layers are the
    same for all boxes, and are cached as in `scan_layers`, by the part of a box.
    """
    part = getattr(getattr(target, "target", None), "part", None)
    if target is None or part is None:
        return ()
    return cached(model, ("head", x.shape[1:], part), partial(_find_head_inputs, model, x, target))


_GRAPH_ONLY = partial(saved_tensors_hooks, lambda tensor: None, lambda packed: packed)
"""A block whose autograd graph saves no tensors."""


def _nodes(tree: Any) -> list[Node]:
    """Return the operations that computed the tensors of a tree."""
    tensors = (tensor for tensor in tree_tensors(tree) if tensor.requires_grad and not tensor.is_nested)
    return [source_edge(tensor)[0] for tensor in tensors]


def _find_head_inputs(model: nn.Module, x: Tensor, target: _Score) -> _Layers:
    candidates = trace_layers(model, x).candidates
    calls: list[tuple[nn.Module, int, list[Node], list[Node]]] = []  # with depth, arguments and results
    depth = [0]

    def begin(*arguments: Any) -> tuple[int, list[Node]]:
        depth[0] += 1
        return depth[0], _nodes(arguments)

    def end(module: nn.Module, token: tuple[int, list[Node]], output: Any) -> None:
        depth[0] -= 1
        calls.append((module, *token, _nodes(output)))

    with HookManager(exclusive=True) as hooks, torch.enable_grad(), _GRAPH_ONLY():
        for module in unique_modules(model)[1:]:
            hooks.around(module, begin, partial(end, module))
        score = target(run_model(model, leaf(x)))
    outer = [call for call in calls if next(call[0].parameters(), None) is not None]
    depths = [depth for _, depth, *_ in outer]
    level = next((depth for depth in sorted(set(depths)) if depths.count(depth) > 1), 1)
    heads = [(arguments, results) for _, depth, arguments, results in outer if depth == level]
    last = reached_nodes(_nodes(score), {node for _, results in heads for node in results}.__contains__)
    entering = [node for arguments, results in heads if not last.isdisjoint(results) for node in arguments]
    # Only the last result of a module that all blocks share is stored. The outermost layer with a result names it.
    results = {module: results for module, _, _, results in calls}
    modules = [(model.get_submodule(layer.name), layer) for layer in candidates]
    by_node = {nodes[0]: layer for module, layer in modules if len(nodes := results.get(module, [])) == 1}
    levels = {by_node[node] for node in reached_nodes(entering, by_node.__contains__) & by_node.keys()}
    return tuple(sorted(levels, key=lambda layer: -math.prod(layer.layout.grid)))


def trace_layers(model: nn.Module, x: Tensor) -> LayerTrace:
    """Trace the positions of the layers and of the attention in one forward of noise, cached as in `scan_layers`."""
    return cached(model, ("trace", x.shape[1:]), partial(_trace, model, x))


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")


def _trace(model: nn.Module, like: Tensor) -> LayerTrace:
    has_others = current_call().caches is not None
    # Extra arguments, such as an order of the patches, may differ between the images.
    x = _noise(len(like) if has_others else 1, *like.shape[1:]).to(like)
    modules = {name: module for name, module in model.named_modules() if name}
    outputs: dict[str, tuple[tuple[int, ...], Tensor | None, list[Node]]] = {}
    misplaced, unrelated = dict[str, bool](), set[str]()
    counts, reading, rows = Counter[str](), dict[str, int](), dict[str, tuple[int, ...]]()

    def store(name: str, result: Any) -> None:
        output = first_tensor(result)
        if output is None or output.is_nested:  # as layers of nn.TransformerEncoder return for a padding mask
            return
        positions = trace.positions(output)
        if has_others and positions is not None and output.dim() == x.dim() and bool(positions.isnan().all()):
            positions = None  # a part of a stack of images that holds another image
        counts[name] += 1
        if positions is None and name in reading and has_others:
            return  # an encoder that then reads another image
        outputs.pop(name, None)  # the last call counts
        reading[name] = counts[name] - 1
        (unrelated.add if positions is None else unrelated.discard)(name)
        rows[name] = _rows_reading(positions, len(output), len(x)) if positions is not None and output.dim() else ()
        shape = tuple(output.shape)
        if positions is not None and rows[name]:
            positions, shape = positions[:, list(rows[name])], (len(x), *shape[1:])
        positions = positions if output.dim() in (3, x.dim()) else None
        centres = None if positions is None else positions.nanmean(-1).expand(x.dim() - 2, *shape[:-1])
        outputs[name] = shape, centres, _nodes(output)
        misplaced[name] = output.dim() == x.dim() and positions is not None and is_misplaced(positions, x.shape[2:])

    # With gradients, as in the call itself: without, nn.TransformerEncoder runs fused kernels. The graph saves nothing.
    with PositionTrace(x) as trace, HookManager(exclusive=True) as hooks, torch.enable_grad(), _GRAPH_ONLY():
        for name, module in modules.items():
            hooks.observe(module, partial(store, name))
        final = run_model(model, leaf(x))
    # A model that reads the image as an array hides all relations.
    outputs = {name: output for name, output in outputs.items() if name not in unrelated} or outputs
    # The output of a convolution is channels first, and so is every output of the same shape.
    channels_first = {shape for name, (shape, *_) in outputs.items() if isinstance(modules[name], CHANNELS_FIRST)}
    layers = tuple(
        SpatialLayer(name, shape, replace(layout, rows=rows[name]))
        for name, (shape, positions, _) in outputs.items()
        if (layout := traced_layout(shape, x, positions, channels_first=shape in channels_first))
    )
    spatial = tuple(layer for layer in layers if not (layer.layout.kind == "NCHW" and misplaced[layer.name]))
    layers = _candidates(model, layers)
    candidates = tuple(layer for layer in layers if layer in spatial)
    elsewhere = tuple(layer for layer in layers if layer not in spatial)
    after = _result_nodes(list(tree_tensors(final)))
    ends = frozenset(name for name, (*_, nodes) in outputs.items() if not after.isdisjoint(nodes))
    first = first_tensor(final)
    coarsest = min((cells for layer in spatial if (cells := math.prod(layer.layout.grid)) > 1), default=0)
    is_map_of_scores = first is not None and first.dim() == x.dim() and first.shape[2:].numel() > coarsest
    features = [layer.name for layer in candidates if not (is_map_of_scores and layer.name in ends)]
    attention: dict[int, Layout | None] = {}
    for queries in trace.queries:  # (axes, ..., tokens), of all heads
        tokens = queries.shape[-1]
        layout = token_layout(queries.reshape(len(queries), len(x), -1, tokens)[:, :, 0], x)
        attention[tokens] = layout if attention.get(tokens, layout) == layout else None
    graph = reached_nodes(_nodes(final), lambda node: False)
    sources = _sources({name: nodes for name, (*_, nodes) in outputs.items()}, graph)
    feature = features[-1] if features else None
    shared = frozenset(name for name in outputs if rows[name] or reading[name] < counts[name] - 1)
    return LayerTrace(spatial, candidates, elsewhere, feature, attention, sources, ends, reading, rows, shared)


def _rows_reading(positions: Tensor, rows: int, images: int) -> tuple[int, ...]:
    """Return the rows of an output that read the images, if it has more rows, such as views that share the batch."""
    if rows == images or positions.shape[1:2] != (rows,):
        return ()
    reading = (~positions[0].flatten(1).isnan().all(1)).nonzero()[:, 0].tolist()
    return tuple(reading) if len(reading) == images else ()


def _sources(nodes: Mapping[str, list[Node]], graph: set[Node]) -> dict[str, frozenset[str]]:
    """Return each layer's sources: the layer, or the first layer with the same result, and all layers before it.

    The layers are in the order in which they finished. Of two layers on one path, one has all sources of the other. A
    layer whose result is not part of the graph of the output, as after a change in place, has no sources.
    """
    sources: dict[Node, frozenset[str]] = {}
    for name, results in nodes.items():
        reached = reached_nodes(results, sources.__contains__) & sources.keys()
        origins = frozenset({name}).union(*map(sources.__getitem__, reached))
        sources |= {node: origins for node in results if node not in sources}
    return {name: frozenset().union(*(sources[node] for node in graph & {*results})) for name, results in nodes.items()}


def _result_nodes(tensors: Sequence[Tensor]) -> set[Node]:
    """Return the nodes of results that are maps of scores, back to the operations that combine channels."""
    maps = [tensor for tensor in tensors if tensor.dim() > 2 and tensor.shape[2:].numel() > 1]
    return reached_nodes(_nodes(maps), combines_channels)


def layers_reading(model: nn.Module, batch: InputBatch) -> frozenset[Reading]:
    """Return the calls of layers that read other images than a batch, in a call of the batch."""
    reading = frozenset[Reading]()
    for other in batch.others:
        with bound(batch=other, caches={}, other_layers=None):
            reading |= trace_layers(model, other.inputs[:1]).reading
    return reading


def _scan(model: nn.Module, like: Tensor) -> LayerScan:
    with bind_image(0):
        x, trace = _noise(1, *like.shape[1:]).to(like), trace_layers(model, like[:1])
        return _scan_of(model, x, trace)


def _scan_of(model: nn.Module, x: Tensor, trace: LayerTrace) -> LayerScan:
    candidates, other_layers = trace.candidates, current_call().other_layers
    if other_layers is not None:
        taken = other_layers()
        read = {layer: (layer.name, trace.calls.get(layer.name, -1), layer.layout.rows) for layer in candidates}
        candidates = tuple(layer for layer in candidates if read[layer] not in taken)
        if trace.candidates and not candidates:
            warn(
                "the images are joined before the first layer with a spatial output: all have its map, and equal shares"
            )
    candidates = candidates or trace.candidates

    def top_score(output: Any) -> Tensor:
        return output_tensor(output).flatten().max(0).values

    try:
        last = _last_with_gradient(model, x, candidates, top_score)
    except TargetError:
        return LayerScan(trace.spatial, candidates, None, has_gradient=True)
    if last is None:
        inner = [layer.name for layer in candidates if layer.name not in trace.ends]
        return LayerScan(trace.spatial, candidates, inner[-1] if inner else None, has_gradient=False)
    others, path = (*candidates, *trace.misplaced), trace.sources[last.name]
    apart = tuple(layer for layer in others if not (path <= (sources := trace.sources[layer.name]) or path >= sources))
    branch = _last_with_gradient(model, x, apart, top_score)
    return LayerScan(trace.spatial, candidates, last.name, has_gradient=True, branch=branch.name if branch else None)


def _candidates(model: nn.Module, spatial: _Layers) -> _Layers:
    """Return the candidates for the default layer: layers of one channel, then others, both in their order.

    Excluded are layers before the first with parameters, layers without effect in evaluation mode, pooling before the
    head, queries and keys. Also excluded are outputs that are a single cell, or attention (tokens by tokens).
    """
    tokens = {layer.shape[1] for layer in spatial if layer.layout.kind == "NTC"}

    def is_candidate(layer: SpatialLayer) -> bool:
        cells = math.prod(layer.layout.grid)
        module = model.get_submodule(layer.name)
        if layer.layout.kind == "NTC":
            return cells > 1 and _is_block_or_norm(module)
        return cells > 1 and not isinstance(module, _POOLING_OR_INACTIVE) and not {*layer.layout.grid} & tokens

    weighted = dropwhile(lambda layer: next(model.get_submodule(layer.name).parameters(), None) is None, spatial)
    return tuple(sorted(filter(is_candidate, tuple(weighted) or spatial), key=lambda layer: not layer.is_single))


def _is_block_or_norm(module: nn.Module) -> bool:
    """Return whether a layer of tokens has submodules, or all its parameters are vectors, as in a normalisation."""
    parameters = list(module.parameters())
    return any(module.children()) or (bool(parameters) and all(parameter.dim() == 1 for parameter in parameters))


def _last_with_gradient(model: nn.Module, x: Tensor, candidates: _Layers, target: _Score) -> SpatialLayer | None:
    """Return the last candidate at which the score of every image has a gradient.

    In a vision transformer with a class token, the patch tokens have no gradient after the last block, but have a
    gradient before its attention. Usually one more forward is enough: recording begins near the last candidate, and
    begins earlier only if no candidate there has a gradient.
    """
    # Disable recordings and edits of the user: the default layer must not depend on them.
    with HookManager(exclusive=True), torch.enable_grad():
        for part in (candidates[-4:], candidates[-24:-4], candidates[:-24]):
            if part and (layers := _layers_with_gradient(model, x, part, target)):
                return layers[-1]
    return None


def _layers_with_gradient(model: nn.Module, x: Tensor, candidates: _Layers, target: _Score) -> list[SpatialLayer]:
    """Return the candidates with a gradient from which features are read, without maps of the scores themselves."""
    with HookManager() as hooks:
        captured = [(layer, hooks.capture(model.get_submodule(layer.name), record=True)) for layer in candidates]
        with torch.no_grad():
            output = run_model(model, x)
    score = target(output).sum()
    results = {source_edge(tensor)[0]: tensor for tensor in tree_tensors(output) if tensor.requires_grad}
    read = reached_nodes(_nodes(score), results.__contains__)
    after = _result_nodes([tensor for node, tensor in results.items() if node in read])
    outputs = {
        layer: output
        for layer, calls in captured
        if calls
        and not after.issuperset(_nodes(output := read_call(model, x, layer.name, calls)))
        and not _is_one_of_parallel_calls(calls)
    }
    if not outputs or not score.requires_grad:
        return []
    grads = differentiate(score, list(outputs.values()))
    gradients = [(layer, layer.layout(grad)) for layer, grad in zip(outputs, grads, strict=True) if grad is not None]
    return [layer for layer, maps in gradients if bool(maps.flatten(1).any(1).all())]


def read_call(model: nn.Module, x: Tensor, name: str, calls: Sequence[Tensor]) -> Tensor:
    """Return the output of the last call that reads the image, from the outputs of all calls of a layer."""
    has_others = len(calls) > 1 and current_call().caches is not None
    return calls[trace_layers(model, x).calls.get(name, -1) if has_others else -1]


def read_calls(model: nn.Module, x: Tensor, name: str, calls: Sequence[Tensor], *, all_calls: bool) -> Sequence[Tensor]:
    """Return the outputs of the calls of a layer that are read: the last, or all calls.

    For several inputs, and for an answer, it is the call that reads the explained image.

    Warns:
        SaliencyWarning: The layer has parameters and is called several times, but only the last call is read.
    """
    batch = current_call().batch
    if batch is None or batch.arguments is None:
        if all_calls:
            return calls
        if next(model.get_submodule(name).parameters(), None) is not None:
            problem = f'layer "{name}" is called {len(calls)} times in a forward, and the last call is read'
            cure = 'if no call sees a flipped or cropped image, calls="sum" of a CAM adds the maps of all calls'
            warn(f"{problem}; {cure}")
    return [read_call(model, x, name, calls)]


def _is_one_of_parallel_calls(calls: list[Tensor]) -> bool:
    """Return whether the last call does not depend on the first, like the calls of a detector's head by resolution."""
    first, last = calls[0], calls[-1]
    if first.shape == last.shape or not first.requires_grad:
        return False
    return torch.autograd.grad(last.sum(), first, retain_graph=True, allow_unused=True)[0] is None


LayoutFunction = Callable[[Tensor], Tensor]
"""A function from the output of a layer to maps (N, K, h, w), which only selects and rearranges its values."""

CHANNELS_FIRST = (
    *(nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d, nn.InstanceNorm2d),
    *(nn.Conv3d, nn.ConvTranspose3d, nn.BatchNorm3d, nn.InstanceNorm3d),
    *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
    *(nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d, nn.InstanceNorm1d, nn.MaxPool1d, nn.AvgPool1d),
    *(nn.MaxPool3d, nn.AvgPool3d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d),
)
"""Layers that return channels first by definition: convolutions, their norms and pooling."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a layer's output in memory, and its conversion to maps.

    `kind` is "NCHW" or "NHWC" (also of volumes), "NTC" (tokens), or "given", with the user's `function`; `tokens` are
    the indices of the tokens of all cells, in rows. Other tokens have no position, such as class, distillation and
    register tokens, and prompts. `rows` are the rows of the output that read the image, if other rows read other
    images, such as other views that the model folds into the batch.
    """

    kind: str
    grid: Grid
    tokens: Sequence[int] = ()
    function: LayoutFunction | None = None
    rows: tuple[int, ...] = ()

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the tensor as maps (N, K, h, w), or (N, K, d, h, w) of a volume."""
        tensor = tensor[list(self.rows)] if self.rows else tensor
        if self.function is not None:
            return self.function(tensor)
        if self.kind == "NCHW":
            return tensor
        if self.kind == "NHWC":
            return tensor.movedim(-1, 1)
        if isinstance(self.tokens, range):
            cells = tensor[:, self.tokens.start : self.tokens.stop]
        else:
            cells = tensor[:, torch.tensor(self.tokens, device=tensor.device)]
        return cells.transpose(1, 2).reshape(len(cells), -1, *self.grid)  # (N, K, h, w)


GIVE_LAYOUT = "pass layout=, a function from this output to maps (N, K, h, w)"
"""The advice in errors about an output whose layout is not recognised."""


def as_layout(option: str, function: object) -> LayoutFunction:
    """Return a function as a layout. Raises MethodError if it is not a function."""
    if not callable(function):
        raise MethodError(
            f"{option}={described(function)}: expected a function from a layer's output to maps (N, K, h, w)"
        )
    return function


def given_layout(function: LayoutFunction, tensor: Tensor) -> Layout:
    """Return the layout of a layer's output by the user's function.

    Raises:
        LayerError: The function does not return maps.
    """
    maps = function(tensor)
    if maps.dim() not in (4, 5) or len(maps) != len(tensor):
        raise LayerError(
            f"layout: expected maps ({len(tensor)}, K, h, w) of {tuple(tensor.shape)}, got {tuple(maps.shape)}"
        )
    return Layout("given", tuple(maps.shape[2:]), function=function)


def layout_from(shape: tuple[int, ...], images: int, size: Grid, *, channels_first: bool = False) -> Layout | None:
    """Return the layout of an output of this shape; None if it is not the shape of maps.

    Args:
        shape: The shape of the output.
        images: The number of images in the batch.
        size: (H, W) or (D, H, W) of the input; the last two axes of the grid must have its aspect ratio.
        channels_first: Whether the layer is channels first by definition, regardless of the aspect ratio.
    """
    if len(shape) != len(size) + 2 or shape[0] != images or 0 in shape:
        return None
    if channels_first:
        return Layout("NCHW", tuple(shape[2:]))
    first, last = _misfit(shape[2:], size), _misfit(shape[1:-1], size)
    if first <= last:
        return Layout("NCHW", tuple(shape[2:])) if first <= 2 else None
    return Layout("NHWC", tuple(shape[1:-1])) if last <= 2 else None


def traced_layout(
    shape: tuple[int, ...], x: Tensor, positions: Tensor | None, *, channels_first: bool
) -> Layout | None:
    """Return the layout of an output in a traced forward; None if it has no spatial extent.

    Args:
        shape: The shape of the output.
        x: (N, C, H, W) the batch.
        positions: The positions of the output, (axes, N, tokens) or (axes, N, h, w), or None.
        channels_first: As for `layout_from`.
    """
    layout = layout_from(shape, len(x), tuple(x.shape[2:]), channels_first=channels_first)
    if (layout is not None and layout.kind == "NCHW") or positions is None or shape[0] != len(x):
        return layout if layout is not None and layout.kind == "NCHW" else None
    tokens = token_layout(positions.flatten(2), x)
    if len(shape) == 3 or tokens is None:
        return tokens
    is_in_rows = tokens.grid == shape[1:-1] and tokens.tokens == range(math.prod(tokens.grid))
    return Layout("NHWC", tokens.grid) if is_in_rows else None


def token_layout(positions: Tensor, x: Tensor) -> Layout | None:
    """Return the layout of tokens at positions (axes, N, tokens); None unless they cover the image in a grid."""
    grid = grid_of(positions, tuple(x.shape[2:]))
    return None if grid is None else Layout("NTC", *grid)


def _misfit(grid: tuple[int, ...], size: Grid) -> float:
    """Return by how many cells a grid differs from the aspect ratio of the input."""
    for cells, edge in zip(grid, size, strict=True):
        if cells > edge:
            return math.inf
    (h, w), (height, width) = grid[-2:], size[-2:]
    return min(abs(h - w * height / width), abs(w - h * width / height))
