"""The rows of a layer table, and how they are written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..tabular import Column, Table, share, si


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
