"""`saliency layers`: print tables of layers, activations and gradients."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.text import Text

from ..errors import visible
from ..hooks.model_state import categories_of, prepared_for_attribution, reference_tensor
from ..inspection import activation_statistics, gradient_statistics, layer_table
from ..inspection.layer_table import LayerRow, LayerTable
from ..io.inputs import read
from ..layers.find import LayerScan, scan_layers
from ..tables import Column, Table
from ..targets.question import Images
from ..targets.targets import as_categories, as_target
from ..validation import check_integer
from ..zoo import load
from .console import Screen, UsageError

DEFAULT_ROWS = 40  # largest number of rows shown by default, unless depth 1 has more


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Print the requested tables."""
    if arguments.target is not None and not arguments.gradients:
        raise UsageError("--target selects the class whose gradients are shown; add --gradients")
    if arguments.depth is not None:
        check_integer("--depth", arguments.depth, error=UsageError)
    with screen.waiting(f"loading {arguments.model}"):
        reads_values = arguments.weights != "default" or arguments.stats or arguments.gradients
        model = load(arguments.model, weights=arguments.weights if reads_values else None)  # a table needs no download
    categories = as_categories(arguments.categories) if arguments.categories else categories_of(model)
    target = as_target(arguments.target).prepared(Images(categories=categories))
    preprocess = arguments.preprocess or getattr(model, "preprocess", None)
    if preprocess is None:
        raise UsageError(f"{arguments.model} has no preprocessing; pass --preprocess")
    batch = read(arguments.image or noise(), preprocess, like=reference_tensor(model))
    x = batch.inputs  # (1, C, H, W)
    with screen.waiting("measuring the layers"):
        with prepared_for_attribution(model):
            scan = scan_layers(model, x)
        table = layer_table(model, x)
    rows = _rows(table, scan.default, arguments)
    names = {row.name for row in rows}
    tables: list[Table[Any]] = [_with_grids(table, rows, scan)]
    if arguments.stats:
        with screen.waiting("measuring the activations"):
            tables.append(_select_rows(activation_statistics(model, x), names))
    if arguments.gradients:
        with screen.waiting("measuring the gradients"):
            gradients = gradient_statistics(model, x, target, of=arguments.gradients)
            tables.append(_select_rows(gradients, names, of=arguments.gradients))
    for shown in tables:
        _print(shown, screen)
    read_by_cams = f'CAMs read "{scan.default}" by default (->)' if scan.default else "CAMs have no default layer"
    screen.say(f"{arguments.model} on an input of {x.shape[2]}x{x.shape[3]}: {read_by_cams}")
    if len(rows) < len(table):
        hidden = f"--all lists {len(table) - len(rows)} more nested layers"
        screen.say(Text(f"{hidden}; explain --layer accepts any layer with a grid", "dim"))
    return 0


def noise() -> np.ndarray[Any, Any]:
    """Return an image of noise, for commands without an image."""
    return np.random.default_rng(0).integers(0, 256, (512, 512, 3), dtype=np.uint8)


def _rows(table: LayerTable, chosen: str | None, arguments: argparse.Namespace) -> list[LayerRow]:
    """Return the rows to show: to the given depth, or to the largest one with at most `DEFAULT_ROWS` rows."""
    depths = sorted(row.depth for row in table)
    depth = depths[-1] if len(depths) <= DEFAULT_ROWS or arguments.all else max(1, depths[DEFAULT_ROWS] - 1)
    if arguments.depth is not None:
        depth = arguments.depth
    return [row for row in table if row.depth <= depth or row.name == chosen]


def _with_grids(table: LayerTable, rows: Sequence[LayerRow], scan: LayerScan) -> Table[LayerRow]:
    """Return the table of layers with a mark at the default layer of CAMs, and with the grids of feature maps."""
    grids = {layer.name: "x".join(map(str, layer.layout.grid)) for layer in scan.spatial}
    arrow: Column[LayerRow] = Column("", lambda row: "->" if row.name == scan.default else "", "left")
    grid: Column[LayerRow] = Column("grid", lambda row: grids.get(row.name, ""))
    output = [column.title for column in table.columns].index("output") + 1
    columns = [arrow, *table.columns[:output], grid, *table.columns[output:]]
    return Table(rows, columns, table.title, table.notes)


def _select_rows(table: Table[Any], names: set[str], *, of: str = "layers") -> Table[Any]:
    """Return the table with only the rows of layers with these names, or of their parameters and the model's own."""
    if of == "parameters":
        return table.of((row for row in table if row.name.rpartition(".")[0] in {"", *names}), table.notes)
    return table.of((row for row in table if row.name in names), table.notes)


def _print(table: Table[Any], screen: Screen) -> None:
    """Print a table and its notes. On a terminal, the lines of the table are cut to its width."""
    screen.say(str(table.of(table)), cut=True)
    if table.notes:
        screen.say("\n".join(["", *map(visible, table.notes)]))
    screen.say()
