"""A model as a table: what each layer gives, holds and costs, in the order in which the layers run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ...errors import MethodError
from ...hooks.model_state import borrowed, unwrap
from ...hooks.pytree import tensors_in
from ..feeding import feed
from ..selecting import LayersLike, selected
from ..tabular import listed, si
from .costs import Holding, holdings, timed
from .rows import LayerRow, LayerTable, functions_text, shape_text
from .watching import Layer, shapes_of, watched

TIMED = 3  # forwards, of which each layer's fastest counts


def layer_table(
    model: nn.Module,
    example: Any,
    *,
    layers: LayersLike | None = None,
    depth: int | None = None,
    times: bool | int = True,
) -> LayerTable:
    """What each layer of a model gives, holds and costs, in the order in which the layers begin.

    It takes one forward in evaluation mode, without a graph, and a few more for the times. A layer that is called
    many times is one row, with the output of its last call. The functions that run between the layers are counted by
    their names and with their multiply-adds; those inside of torch.nn's own modules are these modules themselves.

    Args:
        model: Any model; it is left as it was.
        example: What it is run on: a float tensor, a shape such as (10, 3, 224, 224) for noise, pictures, a tuple of
            arguments or a mapping of keyword arguments, as for the other functions of `saliency.inspection`.
        layers: Which layers have a row, by name, pattern, kind or as modules; by default all that run, or the model
            itself where none does.
        depth: How deep in the tree of modules the rows go: 1 for the outermost layers that run.
        times: Whether the layers' shares of the time are measured, or how many forwards that takes; by default 3, of
            which each layer's fastest counts. On an accelerator each layer waits for the ones before it, so that the
            shares are right and the whole takes longer.

    Returns:
        A sequence of rows that prints as a table, shows as one in a notebook, and has a `dataframe()`.

    Raises:
        ImageError: The example is nothing to run a model on.
        LayerError: A name or pattern in `layers` fits no layer.
        MethodError: `depth` or `times` is no such number.
        ModelError: It is no module, or it has lazy parameters.
    """
    if depth is not None and depth < 1:
        raise MethodError(f"depth={depth}: expected 1 for the outermost layers, or more")
    rounds = TIMED if times is True else int(times)
    if rounds < 0:
        raise MethodError(f"times={times}: expected how many forwards are timed, or False")
    inside = unwrap(model)
    given, model = feed(model, example), inside
    named = _named(model)
    wanted = _wanted(model, named, layers)
    with borrowed(model):
        seen = watched(model, given)
        depths = _depths(named, seen)
        shown = [each for each in wanted if depth is None or depths[each] <= depth]
        seconds = timed(model, given, [each for each in shown if each in seen], rounds)
    held = holdings(model)
    in_order = sorted((each for each in shown if each in seen), key=lambda module: seen[module].order)
    if layers is None:
        in_order = in_order or [model]  # which does all of it itself, as attention does
    whole_time = seconds.get(model, 0.0)
    shares = {module: each / whole_time for module, each in seconds.items() if whole_time}
    rows = [_row(each, named[each], depths[each], seen[each], held[each], shares.get(each)) for each in in_order]
    whole = _row(model, "", 0, seen[model], held[model], shares.get(model))
    not_called = _not_called(named, shown, seen)
    return LayerTable(
        rows,
        whole,
        title=f"{whole.kind} on {', '.join(shape_text(shapes_of(each)) for each in tensors_in(given[:2]))}",
        notes=[
            _totals(whole, given.size, seconds.get(model)),
            *_functions_note(whole, rows),
            *_varying_note(rows, {named[module] for module, layer in seen.items() if layer.varies}),
            *_scripted_note(named),
            *listed("not called:", not_called),
        ],
        not_called=not_called,
        seconds=seconds.get(model),
    )


_Seen = dict[nn.Module, Layer]
_Names = dict[nn.Module, str]


def _named(model: nn.Module) -> _Names:
    """All modules by their first names, but those inside of TorchScript, which are not called as modules."""
    named: _Names = {}
    scripted: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if not (name.startswith(scripted) and scripted):
            named[module] = name
            if isinstance(module, torch.jit.ScriptModule):
                scripted = (*scripted, f"{name}." if name else "")
    return named


def _wanted(model: nn.Module, named: _Names, layers: LayersLike | None) -> list[nn.Module]:
    """The modules that have a row if they run; of a model without parts that is the model itself."""
    if layers is None:
        return list(named)[1:] or [model]
    return [each for each in selected(model, layers).values() if each in named]


def _depths(named: _Names, seen: _Seen) -> dict[nn.Module, int]:
    """How many modules that ran each one lies in: 0 for the model itself."""
    behind = {"": -1}  # how deep the parts of each module lie, less one
    depths = {}
    for module, name in named.items():
        depths[module] = depth = behind[name.rpartition(".")[0]] + 1 if name else 0
        behind[name] = depth if module in seen else depth - 1
    return depths


def _row(
    module: nn.Module, name: str, depth: int, layer: Layer, holding: Holding, time_share: float | None
) -> LayerRow:
    return LayerRow(
        name=name,
        kind=_kind(module),
        depth=depth,
        output=layer.output,
        parameters=holding.parameters,
        trainable=holding.trainable,
        multiply_adds=layer.multiply_adds,
        time_share=time_share,
        calls=layer.calls,
        functional=dict(layer.functional),
    )


def _kind(module: nn.Module) -> str:
    return str(module.original_name) if isinstance(module, torch.jit.ScriptModule) else type(module).__name__


def _not_called(named: _Names, shown: list[nn.Module], seen: _Seen) -> list[str]:
    """The names of the layers of which nothing ran, the outermost only."""
    ran = {named[module] for module in seen if module in named}
    above = {name.rpartition(".")[0] for name in ran} - ran
    while above:
        ran |= above
        above = {name.rpartition(".")[0] for name in above} - ran
    # The attention multiplies by the weights of its projection itself.
    used = {child for module in seen if isinstance(module, nn.MultiheadAttention) for child in module.children()}
    names: list[str] = []
    for module in shown:
        name = named[module]
        if isinstance(module, torch.jit.ScriptModule):
            continue
        if name not in ran and module not in used and not (names and name.startswith(f"{names[-1]}.")):
            names.append(name)
    return names


def _totals(whole: LayerRow, size: int, seconds: float | None) -> str:
    if whole.trainable == whole.parameters:
        trainable = ", all trainable" if whole.parameters else ""
    else:
        trainable = f", {whole.trainable:,} of them trainable" if whole.trainable else ", none trainable"
    each = f" ({si(whole.multiply_adds / size)} for each of {size})" if size > 1 else ""
    time = "" if seconds is None else f"; {si(seconds, 's')} for one forward"
    return f"{whole.parameters:,} parameters{trainable}; {si(whole.multiply_adds)} multiply-adds{each}{time}"


def _functions_note(whole: LayerRow, rows: Iterable[LayerRow]) -> list[str]:
    """What the model itself calls between its layers, where it has no row to say so."""
    if not whole.functional or any(row.name == "" for row in rows):
        return []
    return [f"functions between the outermost layers: {functions_text(whole.functional)}"]


def _varying_note(rows: Iterable[LayerRow], varying: set[str]) -> list[str]:
    names = [row.name or row.kind for row in rows if row.name in varying]
    return listed("of several shapes, of which the last is shown:", names)


def _scripted_note(named: _Names) -> list[str]:
    names = [name for module, name in named.items() if isinstance(module, torch.jit.ScriptModule) and name]
    return listed("scripted, so no layers that can be seen, but counted in what calls them:", names)
