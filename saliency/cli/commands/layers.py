"""`saliency layers`: print tables of layers, activations and gradients, and write them to an HTML page."""

from __future__ import annotations

import argparse
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.cells import cell_len
from rich.table import Column as ScreenColumn
from rich.text import Text
from torch import nn

from ...attribution.resolved_target import ResolvedTarget
from ...batch.network import find_class
from ...errors import ModelError
from ...hooks.model_state import prepared_for_attribution, reference_tensor, run_model
from ...inspection import activation_statistics, gradient_statistics, layer_table
from ...inspection.gradient_flow import gradient_flow
from ...inspection.layer_table import LayerRow
from ...inspection.tables import Column, Table
from ...io.atomic_write import atomic_write, is_stream
from ...io.inputs import read
from ...layers.find import scan_layers
from ..console import GAP, Screen, UsageError, visible
from ..layers_html import Section, figure_html, image_html, page
from ..parsing import ready_model

DEFAULT_ROWS = 40  # largest number of rows shown by default, unless depth 1 has more

# Columns that are dropped on a narrow terminal, in this order.
_DISPENSABLE = (
    *("functions", "min", "max", "rms", "mean", "kind", "calls", "call", "grid", "weight norm", "std", "time", "zeros"),
)
_LAYERS = "In the order of execution. Nested layers are indented; the numbers of a layer include its nested layers."
_STATS = (
    "The outputs of each layer for this single input. Layers with mostly zeros, and channels that are dead for many "
    "inputs, are useless. NaN and Inf are errors."
)
_GRADIENTS = (
    "The gradient of the score of a class at the output of each layer. Gradients vanish if their norms fall towards "
    "the input, and explode if they grow."
)
_PARAMETERS = "The gradient of the same score with respect to each parameter."


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Run `saliency layers`: print the requested tables, and write them to a page."""
    if arguments.target is not None and not arguments.gradients:
        raise UsageError("--target selects the class whose gradients are shown; add --gradients")
    if arguments.html is not None:
        _check_html_file(arguments.html)
    report = _Report(arguments, screen)
    report.add_layers()
    if arguments.stats:
        report.add_activations()
    if arguments.gradients:
        report.add_gradients()
    report.summarise()
    if arguments.html is not None:
        _write(arguments.html, report.page())
        screen.say(f"written: {visible(arguments.html)}")
    return 0


class _Report:
    """Tables of a model on an image or on noise, printed as they are added."""

    def __init__(self, arguments: argparse.Namespace, screen: Screen) -> None:
        self.arguments, self.screen = arguments, screen
        self.model, self.weights = _load_model(arguments.model, arguments.weights, screen)
        categories = getattr(self.model, "categories", None)
        target = find_class(arguments.target, categories)
        image = _noise() if arguments.photo is None else arguments.photo
        self.batch = read(image, getattr(self.model, "preprocess", None), like=reference_tensor(self.model))
        self.x = self.batch.tensor  # (1, C, H, W)
        with screen.waiting("measuring the layers"):
            with prepared_for_attribution(self.model):
                self.scan = scan_layers(self.model, self.x)
            self.table = layer_table(self.model, self.x)
        depth = _depth(self.table.rows, arguments)
        self.rows = [row for row in self.table if row.depth <= depth or row.name == self.scan.default]
        self.names = {row.name for row in self.rows}
        self.target = ResolvedTarget(target, len(self.x), categories)
        self.sections: list[Section] = []

    def add_layers(self) -> None:
        grids = {layer.name: "x".join(map(str, layer.layout.grid)) for layer in self.scan.spatial}
        chosen, own = self.scan.default, self.table.columns
        output = [column.title for column in own].index("output") + 1
        arrow: Column[LayerRow] = Column("", lambda row: "->" if row.name == chosen else "", "left")
        grid: Column[LayerRow] = Column(
            "grid", lambda row: grids.get(row.name, ""), hint="rows and columns of its feature map"
        )
        text = _LAYERS
        if len(self.rows) < len(self.table):
            text += f" Shown are {len(self.rows)} of {len(self.table)} layers: use --all for all, or --depth."
        if chosen:
            text += f' The arrow marks "{chosen}", which class activation maps read by default.'
        columns = [arrow, *own[:output], grid, *own[output:]]
        self._add("Layers", text, Table(self.rows, columns, self.table.title, self.table.notes), marked=chosen)

    def add_activations(self) -> None:
        with self.screen.waiting("measuring the activations"):
            activations = activation_statistics(self.model, self.x)
        self._add("Activations", _STATS, _only(activations, self.names))

    def add_gradients(self) -> None:
        with self.screen.waiting("measuring the gradients"):
            # The top class is resolved first, so that the page can name it.
            with prepared_for_attribution(self.model), torch.no_grad():
                self.target(run_model(self.model, self.x))
            statistics = gradient_statistics(self.model, self.x, self.target.target)
        flow = ""
        if self.arguments.html is not None:
            flow = figure_html(gradient_flow(statistics), "The norm of the gradient at each layer")
        text = f"{_GRADIENTS} The class is {self.target.names[0]}."
        self._add("Gradients at the layers", text, _only(statistics.layers, self.names), flow)
        shown = {row.name for row in statistics.parameters if row.name.rpartition(".")[0] in self.names | {""}}
        self._add("Gradients of the parameters", _PARAMETERS, _only(statistics.parameters, shown))

    def _add(self, title: str, text: str, table: Table[Any], image: str = "", marked: str | None = None) -> None:
        cells = table.cells()
        columns = [column for at, column in enumerate(table.columns) if not cells or any(row[at] for row in cells)]
        shown = Table(table.rows, columns, table.title, table.notes)
        _print(shown, marked, self.screen)
        self.sections.append(Section(title, text, image + shown.to_html()))

    def summarise(self) -> None:
        size = "x".join(map(str, self.x.shape[-2:]))
        chosen = self.scan.default
        taken = f'CAMs read "{chosen}" by default (->)' if chosen else "CAMs have no default layer"
        self.screen.say(f"{self.arguments.model} on an input of {size}: {taken}")
        more = len(self.table) - len(self.rows)
        if more:
            hint = f"--all lists {more} more nested layers; explain --layer accepts any layer with a grid"
            self.screen.say(Text(hint, "dim"))

    def page(self) -> str:
        """Return the page with all tables."""
        photo = self.arguments.photo
        facts = {
            "model": f"{self.table.model.kind}, {self.weights}",
            "input": "x".join(map(str, self.x.shape)) + (f" from {Path(photo).name}" if photo else " of noise"),
            **({"gradients of": self.target.names[0]} if self.arguments.gradients else {}),
            "created with": f"saliency {version('saliency-toolkit')}, torch {torch.__version__}",
        }
        frame = self.batch.frames[0] if photo else None
        image = image_html(frame.picture, Path(photo).name) if frame else ""
        return page(f"{self.arguments.model}: layers", facts, self.sections, image)


def _only(table: Table[Any], names: set[str]) -> Table[Any]:
    return table.of([row for row in table if row.name in names], table.notes)


def _depth(rows: tuple[LayerRow, ...], arguments: argparse.Namespace) -> int:
    """Return the largest depth to show: as given, or the largest with at most `DEFAULT_ROWS` rows."""
    deepest = max(row.depth for row in rows)
    if arguments.depth is not None or arguments.all:
        return deepest if arguments.depth is None else int(arguments.depth)
    fitting = [depth for depth in range(1, deepest + 1) if sum(row.depth <= depth for row in rows) <= DEFAULT_ROWS]
    return max(fitting, default=1)


def _print(table: Table[Any], marked: str | None, screen: Screen) -> None:
    if not screen.is_terminal:
        for line in [*str(table).splitlines(), ""]:
            screen.say(line)
        return
    dropped = _dropped(table, screen.width)
    kept = [at for at, column in enumerate(table.columns) if column.title not in dropped]
    styles = ["bold green" if marked is not None and row.name == marked else "" for row in table]
    screen.say(Text(table.title, "bold"))
    screen.table(
        [ScreenColumn(table.columns[at].title, justify=table.columns[at].align) for at in kept],
        [[Text(cells[at], style) for at in kept] for cells, style in zip(table.cells(), styles, strict=True)],
    )
    notes = list(table.notes)
    if dropped:
        notes.append(f"columns without room: {', '.join(dropped)}; use a wider terminal, a pipe or --html")
    for note in notes:
        screen.say(Text(note, "dim"))
    screen.say()


def _dropped(table: Table[Any], width: int) -> list[str]:
    """Return the titles of the columns that do not fit the width of the terminal."""
    texts = [[column.title for column in table.columns], *table.cells()]
    widths = {column[0]: max(map(cell_len, column)) for column in zip(*texts, strict=True)}
    dropped: list[str] = []
    for title in _DISPENSABLE:
        if sum(widths.values()) + GAP * (len(widths) - 1) <= width:
            break
        if widths.pop(title, None) is not None:
            dropped.append(title)
    return dropped


def _load_model(name: str, weights: str | None, screen: Screen) -> tuple[nn.Module, str]:
    """Return the model and a description of its weights.

    Weights are random if those of the model are not installed, which does not change the layers.
    """
    try:
        model = ready_model(name, weights, "cpu", screen)
    except ModelError:
        if weights != "default":
            raise
        model = ready_model(name, None, "cpu", screen)
        screen.say(Text(f"using random weights: those of {name} are not installed", "dim"))
        return model, "random weights: those of the model are not installed"
    return model, {"default": "default weights", None: "random weights"}.get(weights, f"weights {weights}")


def _noise() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (512, 512, 3), dtype=np.uint8))


def _check_html_file(file: Path) -> None:
    """Raise UsageError if the page cannot be written, before any computation."""
    folder = file.parent
    if file.is_dir():
        raise UsageError(f"--html {file} is a folder; choose a file in it, such as {file / 'layers.html'}")
    if is_stream(file):
        raise UsageError(f"--html {file} is a device or a pipe; choose a file")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        reason = "cannot be written to" if folder.is_dir() else "does not exist"
        raise UsageError(f"--html {file}: the folder {folder} {reason}")


def _write(file: Path, text: str) -> None:
    try:
        with atomic_write(file) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--html {file} cannot be written: {error.strerror}") from error
