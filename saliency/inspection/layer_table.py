"""A model as a table: what each layer gives, holds and costs, in the order in which the layers run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import MethodError
from ..hooks.model_state import prepared_for_attribution, unwrap
from ..hooks.pytree import tree_tensors
from .forward_profile import Layer, shapes_of, watched
from .layer_selection import LayersLike, selected
from .model_inputs import feed
from .tables import Column, Table, listed, share, si
from .timing import Holding, holdings, timed


@dataclass(frozen=True, slots=True)
class LayerRow:
    """What one layer gave, holds and costs in one forward.

    Attributes:
        name: Its dotted name; "" for the model itself.
        kind: The module's class.
        depth: How deep it lies in the tree of modules: 1 for the parts of the model itself. A container that is not
            called, such as a ModuleList, adds nothing.
        output: The shape of what its last call returned; for several tensors a nest of shapes.
        parameters: How many numbers it holds, its parts included, what they share counted once.
        trainable: How many of them require a gradient.
        multiply_adds: Of convolutions, matrix products and attention, of all its calls and its parts.
        time_share: How much of the model's time it took, its parts included: 0 to 1. None where nothing was timed.
        calls: How often it was called.
        functional: The functions that it called itself, between its parts, by name, with how often: `{"add": 1}`.
    """

    name: str
    kind: str
    depth: int
    output: Any
    parameters: int
    trainable: int
    multiply_adds: int
    time_share: float | None
    calls: int
    functional: dict[str, int]


class LayerTable(Table[LayerRow]):
    """The layers of a model in the order in which they begin; see `layer_table`.

    Attributes:
        model: The row of the model itself: the totals, and the functions between its outermost layers.
        not_called: The layers that did not run, the outermost of each such part.
        seconds: How long the fastest forward took; None where none was timed.
    """

    def __init__(
        self,
        rows: Iterable[LayerRow],
        model: LayerRow,
        *,
        title: str = "",
        notes: Iterable[str] = (),
        not_called: Iterable[str] = (),
        seconds: float | None = None,
    ) -> None:
        rows = tuple(rows)
        super().__init__(rows, _columns(rows, model), title, notes)
        self.model = model
        self.not_called = tuple(not_called)
        self.seconds = seconds


def _columns(rows: tuple[LayerRow, ...], model: LayerRow) -> list[Column[LayerRow]]:
    """What the rows have something to say in; indented from the outermost of them on."""
    outermost = min((row.depth for row in rows), default=0)
    columns: list[Column[LayerRow]] = [
        Column("layer", lambda row: "  " * (row.depth - outermost) + (row.name or row.kind), "left"),
        Column("kind", lambda row: row.kind, "left"),
        Column("output", lambda row: shape_text(row.output), "left", "the shape of what its last call returned"),
        Column(
            "parameters",
            lambda row: si(row.parameters),
            hint="the numbers that it holds, its parts included",
            bar=lambda row: row.parameters / (model.parameters or 1),
        ),
        Column(
            "multiply-adds",
            lambda row: si(row.multiply_adds),
            hint="of convolutions, matrix products and attention, for the whole batch and its parts included",
            bar=lambda row: row.multiply_adds / (model.multiply_adds or 1),
        ),
    ]
    if model.time_share is not None:
        hint = "its share of the time of one forward, its parts included"
        columns.append(Column("time", lambda row: share(row.time_share), hint=hint, bar=lambda row: row.time_share))
    if any(row.calls != 1 for row in rows):
        columns.append(
            Column("calls", lambda row: "" if row.calls == 1 else str(row.calls), hint="how often it was called")
        )
    if any(row.functional for row in rows):
        hint = "functions that it calls itself, between the layers inside of it, with how often"
        columns.append(Column("functions", lambda row: functions_text(row.functional), "left", hint))
    return columns


def shape_text(shapes: Any) -> str:
    """The shapes of an output as they are read: "10x64x112x112", or "{out: 1x21, aux: 1x21}"."""
    if isinstance(shapes, dict):
        return f"{{{_some([f'{key}: {shape_text(each)}' for key, each in shapes.items()])}}}"
    if isinstance(shapes, tuple) and all(isinstance(each, int) for each in shapes):
        return "x".join(map(str, shapes)) or "scalar"
    if isinstance(shapes, tuple | list):
        inside = _some([shape_text(each) for each in shapes])
        return f"[{inside}]" if isinstance(shapes, list) else f"({inside})"
    return "none" if shapes is None else str(shapes)


def functions_text(functions: dict[str, int]) -> str:
    """Functions by name, with how often: "2 relu, add"."""
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in functions.items())


def _some(texts: list[str], most: int = 4) -> str:
    return ", ".join(texts[:most]) + (f", ... {len(texts)} in all" if len(texts) > most else "")


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
    with prepared_for_attribution(model):
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
        title=f"{whole.kind} on {', '.join(shape_text(shapes_of(each)) for each in tree_tensors(given[:2]))}",
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
