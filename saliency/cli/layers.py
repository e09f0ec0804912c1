"""`saliency layers`: print tables of layers, activations and gradients, and write them to an HTML page."""

from __future__ import annotations

import argparse
import base64
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from rich.text import Text
from torch import Tensor, nn

from .._version import __version__
from ..attribution.resolved_target import ResolvedTarget
from ..errors import visible
from ..hooks.model_state import categories_of, prepared_for_attribution, reference_tensor, run_model
from ..inspection import activation_statistics, gradient_statistics, layer_table
from ..inspection.layer_table import LayerRow, LayerTable
from ..inspection.statistics import GradientStatistics, gradient_flow
from ..inspection.tables import Column, Table, escaped
from ..io.atomic_write import atomic_write, is_stream
from ..io.inputs import read
from ..layers.find import LayerScan, scan_layers
from ..targets.targets import as_categories
from ..zoo import load
from .console import Screen, UsageError

DEFAULT_ROWS = 40  # largest number of rows shown by default, unless depth 1 has more

_STATS = (
    "The outputs of each layer for this single input. Layers with mostly zeros, and channels that are dead for many "
    "inputs, are useless. NaN and Inf are errors."
)
_GRADIENTS = (
    "The gradient of the score of a class at the output of each layer. Gradients vanish if their norms fall towards "
    "the input, and explode if they grow."
)
_PARAMETERS = "The gradient of the same score with respect to each parameter."


class Section(NamedTuple):
    """Part of the output: a table, and on the page also a heading, an explanation and a figure as HTML."""

    title: str
    text: str
    table: Table[Any]
    figure: str = ""


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Print the requested tables, and write them to a page."""
    if arguments.target is not None and not arguments.gradients:
        raise UsageError("--target selects the class whose gradients are shown; add --gradients")
    html: Path | None = arguments.html
    if html and (html.is_dir() or is_stream(html) or not os.access(html.parent, os.W_OK)):
        raise UsageError(f"--html {html} cannot be written; choose a file in an existing, writable folder")
    with screen.waiting(f"loading {arguments.model}"):
        reads_values = arguments.weights != "default" or arguments.stats or arguments.gradients
        model = load(arguments.model, weights=arguments.weights if reads_values else None)  # a table needs no download
    categories = as_categories(arguments.categories) if arguments.categories else categories_of(model)
    target = ResolvedTarget(arguments.target, 1, categories)
    preprocess = arguments.preprocess or getattr(model, "preprocess", None)
    if preprocess is None:
        raise UsageError(f"{arguments.model} has no preprocessing; pass --preprocess")
    batch = read(arguments.photo or _noise(), preprocess, like=reference_tensor(model))
    x = batch.tensor  # (1, C, H, W)
    with screen.waiting("measuring the layers"):
        with prepared_for_attribution(model):
            scan = scan_layers(model, x)
        table = layer_table(model, x)
    rows = _rows(table, scan.default, arguments)
    names = {row.name for row in rows}
    sections = [_layer_section(table, rows, scan)]
    if arguments.stats:
        with screen.waiting("measuring the activations"):
            activations = activation_statistics(model, x)
        sections.append(Section("Activations", _STATS, _select_rows(activations, names)))
    if arguments.gradients:
        with screen.waiting("measuring the gradients"):
            sections += _gradient_sections(model, x, target, names, has_figure=html is not None)
    for section in sections:
        _print(section.table, screen)
    read_by_cams = f'CAMs read "{scan.default}" by default (->)' if scan.default else "CAMs have no default layer"
    screen.say(f"{arguments.model} on an input of {x.shape[2]}x{x.shape[3]}: {read_by_cams}")
    if len(rows) < len(table):
        hidden = f"--all lists {len(table) - len(rows)} more nested layers"
        screen.say(Text(f"{hidden}; explain --layer accepts any layer with a grid", "dim"))
    if html is not None:
        source = f"from {Path(arguments.photo).name}" if arguments.photo else "of noise"
        weights = "random weights" if arguments.weights is None else f"weights: {arguments.weights}"
        measured = f"{table.model.kind}, {weights}; input {'x'.join(map(str, x.shape))} {source}"
        versions = f"saliency {__version__}, torch {torch.__version__}"
        _write_page(html, f"{arguments.model}: layers", f"{measured}; {versions}", sections)
        screen.say(f"written: {visible(html)}")
    return 0


def _noise() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (512, 512, 3), dtype=np.uint8))


def _rows(table: LayerTable, chosen: str | None, arguments: argparse.Namespace) -> list[LayerRow]:
    """Return the rows to show: to the given depth, or to the largest one with at most `DEFAULT_ROWS` rows."""
    depths = sorted(row.depth for row in table)
    depth = depths[-1] if len(depths) <= DEFAULT_ROWS or arguments.all else max(1, depths[DEFAULT_ROWS] - 1)
    if arguments.depth is not None:
        depth = arguments.depth
    return [row for row in table if row.depth <= depth or row.name == chosen]


def _layer_section(table: LayerTable, rows: Sequence[LayerRow], scan: LayerScan) -> Section:
    """Return the table of layers with a mark at the default layer of CAMs, and with the grids of feature maps."""
    grids = {layer.name: "x".join(map(str, layer.layout.grid)) for layer in scan.spatial}
    arrow: Column[LayerRow] = Column("", lambda row: "->" if row.name == scan.default else "", "left")
    grid: Column[LayerRow] = Column(
        "grid", lambda row: grids.get(row.name, ""), hint="rows and columns of the feature map"
    )
    output = [column.title for column in table.columns].index("output") + 1
    columns = [arrow, *table.columns[:output], grid, *table.columns[output:]]
    text = "In the order of execution. Nested layers are indented; the numbers of a layer include its nested layers."
    if len(rows) < len(table):
        text += f" Shown are {len(rows)} of {len(table)} layers: use --all for all, or --depth."
    if scan.default:
        text += f' The arrow marks "{scan.default}", which class activation maps read by default.'
    return Section("Layers", text, Table(rows, columns, table.title, table.notes))


def _gradient_sections(
    model: nn.Module, x: Tensor, target: ResolvedTarget, names: set[str], has_figure: bool
) -> list[Section]:
    """Return the gradients at the layers and parameters with these names.

    Without a given class, `target` becomes the top class.
    """
    with prepared_for_attribution(model), torch.no_grad():
        target(run_model(model, x))
    statistics = gradient_statistics(model, x, target.target)
    text = f"{_GRADIENTS} The class is {target.names[0]}."
    figure = _flow_html(statistics) if has_figure else ""
    parameters = {row.name for row in statistics.parameters if row.name.rpartition(".")[0] in names | {""}}
    return [
        Section("Gradients at the layers", text, _select_rows(statistics.layers, names), figure),
        Section("Gradients of the parameters", _PARAMETERS, _select_rows(statistics.parameters, parameters)),
    ]


def _select_rows(table: Table[Any], names: set[str]) -> Table[Any]:
    """Return the table with only the rows with these names."""
    return table.of((row for row in table if row.name in names), table.notes)


def _print(table: Table[Any], screen: Screen) -> None:
    """Print a table and its notes. On a terminal, the lines of the table are cut to its width."""
    screen.say(str(table.of(table)), cut=True)
    if table.notes:
        screen.say("\n".join(["", *map(visible, table.notes)]))
    screen.say()


def _write_page(file: Path, title: str, facts: str, sections: Sequence[Section]) -> None:
    """Write all tables to one HTML page without external references. Raises OSError if it cannot be written."""
    links = "".join(f'<a href="#part-{at}">{escaped(section.title)}</a>' for at, section in enumerate(sections))
    parts = "\n".join(
        f'<section id="part-{at}"><h2>{escaped(section.title)}</h2><p>{escaped(section.text)}</p>\n'
        f"{section.figure}{section.table.to_html()}</section>"
        for at, section in enumerate(sections)
    )
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{escaped(title)}</h1><p>{escaped(facts)}</p><nav>{links}</nav>\n{parts}\n</body></html>\n"
    )
    with atomic_write(file) as temporary:
        temporary.write_text(page, encoding="utf-8")


def _flow_html(statistics: GradientStatistics) -> str:
    buffer = io.BytesIO()
    gradient_flow(statistics).savefig(buffer, format="png", dpi=160, facecolor="white")
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img src="data:image/png;base64,{data}" alt="The norm of the gradient at each layer">'


_STYLE = """
:root { color-scheme: light dark; --saliency-ground: Canvas; }
body { margin: 2rem clamp(1rem, 3vw, 3rem) 4rem; font: 15px/1.5 system-ui, sans-serif; }
h1, p { overflow-wrap: anywhere; }
nav { display: flex; flex-wrap: wrap; gap: .3rem 2rem; }
section > p { opacity: .7; max-width: 60rem; }
section > img { max-width: 100%; }
@media print { .saliency-table > div { max-height: none !important; } .saliency-table thead th { position: static; } }
"""
