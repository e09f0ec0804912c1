"""The tables of `saliency layers`: the layers of a model, what they give, and the gradients that come back."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.cells import cell_len
from rich.table import Column as ScreenColumn
from rich.text import Text
from torch import Tensor, nn

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
from ...layers.default_layer import scan_layers
from ..console import GAP, Screen, UsageError, visible
from ..layers_html import Section, figure_html, page, picture_html
from ..parsing import ready_model

FITTING = 40  # rows that are shown without --all

# Columns that a narrow terminal goes without, the first one first.
_DISPENSABLE = (
    *("functions", "min", "max", "rms", "mean", "kind", "calls", "call", "grid", "weight norm", "std", "time", "zeros"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was typed behind `saliency layers`."""

    model: str
    weights: str | None
    photo: str | None
    all: bool
    depth: int | None
    stats: bool
    gradients: bool
    target: str | None
    html: Path | None
    version: str  # of saliency


@dataclass(frozen=True, slots=True)
class Part:
    """One table as it is told, with a heading, what to see in it, and a picture as HTML, for the page."""

    heading: str
    table: Table[Any]
    text: str
    picture: str = ""
    marked: str | None = None  # the name of a row


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Run `saliency layers`."""
    return layers(Request(**vars(arguments), version=version("saliency-toolkit")), screen)


def layers(request: Request, screen: Screen) -> int:
    """Print the tables that were asked for, and write them on a page."""
    if request.target is not None and not request.gradients:
        raise UsageError("--target names the class whose gradients are shown; add --gradients")
    if request.html is not None:
        _require_place(request.html)
    subject = Subject(request, screen)
    parts = []
    for whole in subject.parts(screen):
        part = replace(whole, table=_filled(whole.table))
        _tell(part, screen)
        parts.append(part)
    screen.say(f"{request.model} on an input of {subject.size}: {subject.taken}")
    more = len(subject.table) - len(subject.shown)
    if more:
        screen.say(Text(f"--all lists {more} more layers inside these; explain --layer takes any with a grid", "dim"))
    if request.html is not None:
        _write(request.html, subject.page(parts))
        screen.say(f"written: {visible(request.html)}")
    return 0


class Subject:
    """A model on a photo, or on noise, and how much is to be shown of it."""

    def __init__(self, request: Request, screen: Screen) -> None:
        self.request = request
        self.model, self.weights = _model_for_its_layers(request.model, request.weights, screen)
        self.categories = getattr(self.model, "categories", None)
        target = find_class(request.target, self.categories)
        self.batch = read(
            _noise() if request.photo is None else request.photo,
            getattr(self.model, "preprocess", None),
            like=reference_tensor(self.model),
        )
        with screen.waiting("looking at the layers"):
            with prepared_for_attribution(self.model):
                self.survey = scan_layers(self.model, self.x)
            self.table = layer_table(self.model, self.x)
        depth = _depth(self.table.rows, request)
        self.shown = [row for row in self.table if row.depth <= depth or row.name == self.survey.chosen]
        self.selection = ResolvedTarget(target, len(self.x), self.categories)

    @property
    def x(self) -> Tensor:
        """The batch (1, C, H, W)."""
        return self.batch.tensor

    @property
    def size(self) -> str:
        """Height and width of the input."""
        return "{}x{}".format(*self.x.shape[-2:])

    @property
    def taken(self) -> str:
        """Which layer CAMs read."""
        chosen = self.survey.chosen
        return f'"{chosen}" is taken by CAMs (->)' if chosen else "CAMs take no layer by themselves"

    def parts(self, screen: Screen) -> Iterator[Part]:
        """The tables that were asked for, each made when it is due."""
        yield self._layers()
        names = {row.name for row in self.shown}
        if self.request.stats:
            with screen.waiting("looking at the activations"):
                activations = activation_statistics(self.model, self.x)
            yield Part("Activations", _only(activations, names), _STATS)
        if self.request.gradients:
            with screen.waiting("looking at the gradients"):
                self._choose_class()
                statistics = gradient_statistics(self.model, self.x, self.selection.target)
            flow = ""
            if self.request.html is not None:
                flow = figure_html(gradient_flow(statistics), "The norm of the gradient at each layer")
            of = f"The class is {self.selection.names[0]}."
            yield Part("Gradients at the layers", _only(statistics.layers, names), f"{_GRADIENTS} {of}", flow)
            owners = names | {""}
            rows = [row for row in statistics.parameters if row.name.rpartition(".")[0] in owners]
            table = statistics.parameters.of(rows, statistics.parameters.notes)
            yield Part("Gradients of the parameters", table, _PARAMETERS)

    def page(self, parts: list[Part]) -> str:
        """The same as a page of HTML."""
        photo = self.request.photo
        facts = {
            "model": f"{self.table.model.kind}, {self.weights}",
            "input": "x".join(map(str, self.x.shape)) + (f" from {Path(photo).name}" if photo else " of noise"),
            **({"gradients of": self.selection.names[0]} if self.request.gradients else {}),
            "made with": f"saliency {self.request.version}, torch {torch.__version__}",
        }
        frame = self.batch.frames[0] if photo else None
        sections = [Section(part.heading, part.text, part.picture + part.table.to_html()) for part in parts]
        picture = picture_html(frame.picture, Path(photo).name) if frame and photo else ""
        return page(f"{self.request.model}: layers", facts, sections, picture)

    def _layers(self) -> Part:
        grids = {each.name: "x".join(map(str, each.layout.grid)) for each in self.survey.spatial}
        chosen, own = self.survey.chosen, self.table.columns
        after = [each.title for each in own].index("output") + 1
        columns: list[Column[LayerRow]] = [
            Column("", lambda row: "->" if row.name == chosen else "", "left"),
            *own[:after],
            Column("grid", lambda row: grids.get(row.name, ""), hint="rows and columns of its map, where it is one"),
            *own[after:],
        ]
        text = _LAYERS
        if len(self.shown) < len(self.table):
            text += f" These are {len(self.shown)} of {len(self.table)}: --all shows all, --depth others."
        if chosen:
            text += f' The arrow marks "{chosen}", which class activation maps read by default.'
        table = Table(self.shown, columns, self.table.title, self.table.notes)
        return Part("Layers", table, text, marked=chosen)

    def _choose_class(self) -> None:
        """The top class where none was typed, so that it can be named."""
        with prepared_for_attribution(self.model), torch.no_grad():
            self.selection(run_model(self.model, self.x))


_LAYERS = (
    "In the order in which they begin; what lies inside another layer is indented below it, and counted in its figures."
)
_STATS = (
    "What each layer gave on this one input. Layers that give almost nothing but zeros, and channels that are dead on "
    "many inputs, have nothing to say; NaN or Inf anywhere is a mistake."
)
_GRADIENTS = (
    "How much the score of a class changes with what each layer gave. Norms that fall from layer to layer towards the "
    "input vanish, those that grow explode."
)
_PARAMETERS = "How much the same score changes with each parameter."


def _only(table: Table[Any], names: set[str]) -> Table[Any]:
    """The rows of some layers, with all the notes."""
    return table.of([row for row in table if row.name in names], table.notes)


def _filled(table: Table[Any]) -> Table[Any]:
    """The table without columns in which nothing stands, now that there are fewer rows."""
    cells = table.cells()
    columns = [each for at, each in enumerate(table.columns) if not cells or any(row[at] for row in cells)]
    return Table(table.rows, columns, table.title, table.notes)


def _depth(rows: tuple[LayerRow, ...], request: Request) -> int:
    """How deep the rows go: as deep as there is room, if it was not said."""
    deepest = max(row.depth for row in rows)
    if request.depth is not None or request.all:
        return deepest if request.depth is None else request.depth
    fitting = [depth for depth in range(1, deepest + 1) if sum(row.depth <= depth for row in rows) <= FITTING]
    return max(fitting, default=1)


def _tell(part: Part, screen: Screen) -> None:
    """Print a table and its notes."""
    table = part.table
    if not screen.is_terminal:
        for line in str(table).splitlines():
            screen.say(line)
        screen.say()
        return
    left_out = _left_out(table, screen.width)
    kept = [at for at, each in enumerate(table.columns) if each.title not in left_out]
    styles = ["bold green" if part.marked is not None and row.name == part.marked else "" for row in table]
    screen.say(Text(table.title, "bold"))
    screen.table(
        [ScreenColumn(table.columns[at].title, justify=table.columns[at].align) for at in kept],
        [[Text(cells[at], style) for at in kept] for cells, style in zip(table.cells(), styles, strict=True)],
    )
    for note in table.notes:
        screen.say(Text(note, "dim"))
    if left_out:
        screen.say(Text(f"no room here for {', '.join(left_out)}: a wider terminal, a pipe or --html has it", "dim"))
    screen.say()


def _left_out(table: Table[Any], width: int) -> list[str]:
    """The columns that a terminal of that width has no room for."""
    cells = table.cells()
    widths = {
        each.title: max(map(cell_len, [each.title, *(row[at] for row in cells)]))
        for at, each in enumerate(table.columns)
    }
    left_out: list[str] = []
    for title in _DISPENSABLE:
        if sum(widths.values()) + GAP * (len(widths) - 1) <= width:
            break
        if widths.pop(title, None) is not None:
            left_out.append(title)
    return left_out


def _model_for_its_layers(name: str, weights: str | None, screen: Screen) -> tuple[nn.Module, str]:
    """The model, and what its weights are; random where its own cannot be had: they do not change the layers."""
    try:
        model = ready_model(name, weights, "cpu", screen)
    except ModelError:
        if weights != "default":
            raise
        model = ready_model(name, None, "cpu", screen)
        screen.say(Text(f"with random weights: those of {name} are not here", "dim"))
        return model, "random weights: its own are not here"
    return model, {"default": "its own weights", None: "random weights"}.get(weights, f"weights {weights}")


def _noise() -> Image.Image:
    """A picture of noise: whatever a model is, it passes something on from every place of it."""
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (512, 512, 3), dtype=np.uint8))


def _require_place(file: Path) -> None:
    """Raise UsageError where no page can be written, before any work is done."""
    folder = file.parent
    if file.is_dir():
        raise UsageError(f"--html {file} is a folder; name a file in it, such as {file / 'layers.html'}")
    if is_stream(file):
        raise UsageError(f"--html {file} is a device or a pipe, in whose place a page would be put; name a file")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        what = "cannot be written to" if folder.is_dir() else "does not exist"
        raise UsageError(f"--html {file}: the folder {folder} {what}")


def _write(file: Path, text: str) -> None:
    try:
        with atomic_write(file) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--html {file} cannot be written: {error.strerror}") from error
