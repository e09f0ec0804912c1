"""Figures of what is measured: trust cards, ledgers of scores, gradients by layer, and attention."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from ..errors import RenderError
from ..evaluation.ledger import LedgerRow
from ..evaluation.trust import Property, TrustCard
from ..inspection.attention_record import LayerAttention, Query
from ..inspection.statistics import GradientStatistics, LayerGradients, call_label
from ..io.atomic_write import SOFTWARE
from ..io.axes import require_two_axes
from ..io.geometry import Frame
from ..tables import Table
from ..validation import check_integer
from .figure import PRINT_DPI, SCREEN_DPI, TEXT_SIZE, TITLE_SIZE, Panel, as_png, draw_panels, framed, new_figure
from .overlay import overlay, paint, shrink
from .scaling import ScaledMap
from .sheet import font_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY, GREEN, RED, INK = "#8a8f98", "#1a8a4a", "#c0392b", "#202430"  # colours of a card
MARKERS = {"chance": "|", "centre": "o", "edges": "^", "smoothed edges": "v", "colour contrast": "s"}

POSITIVE, NEGATIVE, SCORE = "#c8352b", "#2b62c8", "#222222"  # colours of a ledger
WIDTH, ROW_HEIGHT = 9.0, 0.36  # inches
LONGEST_HEADING, LONGEST_VERDICT = 80, 105  # characters of a line


def draw_trust(card: TrustCard) -> Figure:
    """Draw the overlay, and one axis for each ranked or compared property of a card; see `results.figure`."""
    rows = [row for row in card if row.p is not None or row.strip or row.controls]
    drawing = new_figure(10, 0.6 * len(rows) + 1.4)
    grid = drawing.add_gridspec(len(rows), 2, width_ratios=(1, 2))
    axes = drawing.add_subplot(grid[:, 0])
    axes.imshow(np.asarray(overlay(framed(card.explanation))))
    axes.set_axis_off()
    for number_of_row, row in enumerate(rows):
        _draw_property(drawing.add_subplot(grid[number_of_row, 1]), row)
    drawing.suptitle(card.title, fontsize=TITLE_SIZE + 2, parse_math=False)
    from matplotlib.lines import Line2D  # takes a second to import

    names = {"maps among which it is ranked": "x"} | MARKERS
    keys = [Line2D([], [], color=GREY, marker=marker, linestyle="", label=name) for name, marker in names.items()]
    title = "better values lie to the right; grey: maps that ignore the prediction"
    style: dict[str, Any] = {"fontsize": TEXT_SIZE, "title_fontsize": TEXT_SIZE, "frameon": False}
    drawing.legend(handles=keys, title=title, loc="outside lower right", ncols=len(keys), **style)
    return drawing


def card_png(card: TrustCard) -> bytes:
    """Return the figure of a trust card as the content of a PNG file."""
    return as_png(draw_trust(card), 1.5 * SCREEN_DPI, metadata={"Software": SOFTWARE})


def _draw_property(axes: Axes, row: Property) -> None:
    """Draw the map of a property, and the maps with which it is ranked or compared, on one line."""
    own, *ranked = row.strip or (row.value,)
    for marker, value in [*(("x", score) for score in ranked), *((MARKERS[n], row.controls[n]) for n in row.controls)]:
        axes.plot(value, 0, color=GREY, marker=marker, markersize=5, alpha=0.8)
    error = 0.0 if math.isnan(row.error) or row.strip else 2 * row.error
    color = GREEN if row.is_clear else RED if row.is_worse else INK
    axes.errorbar(own, 0, xerr=error, color=color, marker="D", markersize=7)
    p = "" if row.p is None or math.isnan(row.p) else f" (p = {row.p:.2g})"
    title = textwrap.fill(f"{row.title}{p}: {row.verdict}", LONGEST_VERDICT)
    axes.set_title(title, loc="left", fontsize=TEXT_SIZE, parse_math=False)
    axes.set_yticks([])
    if "chance" in row.controls:  # the axis shows fractions
        axes.set_xlim(-0.02, 1.02)
    axes.xaxis.set_major_formatter(lambda value, position: f"{value:.4g}")
    axes.tick_params(labelsize=TEXT_SIZE - 1)
    axes.spines[["left", "right", "top"]].set_visible(False)
    if not row.higher_is_better and not row.strip:
        axes.invert_xaxis()


def draw_ledger(table: Table[LedgerRow]) -> Figure:
    """Draw the shares of the score as horizontal bars that add up to the score; see `results.figure`."""
    ledgers = [list(rows) for _, rows in groupby(table, lambda row: row.image)]
    heights = [ROW_HEIGHT * (len(ledger) + 2) for ledger in ledgers]
    drawing = new_figure(WIDTH, sum(heights))
    panels = drawing.subplots(len(ledgers), sharex=True, squeeze=False, height_ratios=heights)
    for axes, ledger in zip(panels.flat, ledgers, strict=True):
        _draw_bars(axes, ledger)
        labels = ["   ".join(column.text(row) for column in table.columns[-3:]) for row in ledger]
        axes.set_yticks(range(len(ledger)), labels, parse_math=False)
    return drawing


def _draw_bars(axes: Axes, ledger: Sequence[LedgerRow]) -> None:
    parts = [row.share for row in ledger]  # the last part is the score
    starts = [0.0, *accumulate(parts[:-2]), 0.0]
    colors = [*(POSITIVE if part > 0 else NEGATIVE for part in parts[:-1]), SCORE]
    axes.barh(range(len(ledger)), parts, left=starts, color=colors, height=0.7)
    axes.invert_yaxis()
    axes.axvline(0.0, color="#d5d8dd", zorder=0)
    heading = textwrap.shorten(f"{ledger[0].method}: {ledger[0].target}", LONGEST_HEADING, placeholder="…")
    font = Path(str(font_for([heading], 1).path))  # a font with the letters of the target's name
    axes.set_title(heading, loc="left", font=font, fontsize="medium", parse_math=False)


PANEL, TITLE = 1.1, 0.4  # of `draw_attention`, in inches: the width of an image, and the height of its title
LONGEST_LAYER = 24  # characters of a layer's name in `draw_attention`
LABELS_PER_INCH = 2.8  # for `gradient_flow`
LONGEST_LABEL = 30  # characters


def gradient_flow(statistics: GradientStatistics, *, size: tuple[float, float] = (10.0, 4.8)) -> Figure:
    """Plot the norm of the gradient at each of the innermost layers, without `nn.Identity`; see `results.figure`."""
    rows = _innermost(statistics)
    if not rows:
        raise RenderError("there are no layers in these statistics to draw")
    is_broken = np.array([row.nan + row.inf > 0 for row in rows.values()])
    norms = np.array([row.norm for row in rows.values()], dtype=float)  # None becomes NaN
    norms[is_broken] = math.nan
    drawing = new_figure(*size)
    axes = drawing.subplots()
    positive = norms[norms > 0] if (norms > 0).any() else np.ones(1)
    axes.set(yscale="log", ylim=(positive.min() / 10, 10 * positive.max()))
    axes.plot(norms, "o-", markersize=5)  # zeros are not drawn
    marks = (("zero", "s", 0, norms == 0), ("no gradient", "D", 0, np.isnan(norms) & ~is_broken))
    for label, marker, height, is_marked in (*marks, ("NaN or infinity", "X", 1, is_broken)):
        if is_marked.any():
            positions, edge = np.flatnonzero(is_marked), axes.get_xaxis_transform()
            axes.plot(positions, np.full(len(positions), height), marker, label=label, transform=edge, clip_on=False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    step = math.ceil(len(rows) / (LABELS_PER_INCH * size[0]))
    names = [name[-LONGEST_LABEL:] for name in rows]
    axes.set_xticks(range(0, len(rows), step), names[::step], rotation=90, fontsize="small", parse_math=False)
    axes.set_xlabel(f"{statistics.columns[0].title}s, from the input to the output")
    axes.set_ylabel(f"norm of the gradient of the {statistics.objective}")
    axes.grid(axis="y", alpha=0.3)
    return drawing


def _innermost(table: Iterable[LayerGradients]) -> dict[str, LayerGradients]:
    """Return the innermost layers by label: their name, with the kind if the name contains no letters."""
    # Skip modules that compute a weight, such as weight_norm: activations do not pass through them.
    rows = [row for row in table if "parametrizations" not in row.name.split(".")]
    containers = {row.name[:end] for row in rows for end in range(len(row.name)) if row.name[end] == "."}
    inner = [row for row in rows if row.name not in containers and (row.name or len(rows) == row.calls)]
    labelled = {}
    for row in [row for row in inner if row.kind != "Identity"] or inner:
        label = row.name if any(map(str.isalpha, row.name)) else f"{row.name} {row.kind}".strip()
        labelled[call_label(row, label)] = row
    return labelled


def draw_attention(layers: Sequence[LayerAttention], *, query: Query = None, image: int = 0) -> Figure:
    """Draw one row per layer and one column per head: the attention of a query to each patch; see `results.figure`."""
    batch = layers[0].batch
    require_two_axes(batch.inputs, "the figure of attention")
    check_integer("image", image, least=0, most=len(batch.frames) - 1, error=RenderError)
    height, width = batch.inputs.shape[2:]
    frame = batch.frames[image] or Frame(Image.new("RGB", (width, height)), (0, 0, width, height))
    small, rows = shrink(frame, round(PANEL * PRINT_DPI)), []
    for layer in layers:
        maps = layer.maps(query)[image]
        panels = []
        for head, values in enumerate(maps.reshape(-1, *maps.shape[-2:]).float().cpu().numpy()):
            limit = float(values.max())
            scaled = ScaledMap(values / (limit or 1), "positive", 0.0, limit, is_saturated=False, outliers=None)
            names = [f"head {head}"] * (maps.dim() == 3) + [f"max {limit:.2g}"]
            panels.append(Panel(paint(small, scaled, None, "map"), names))
        rows.append(panels)
    drawing, grid = draw_panels(rows, PANEL, TITLE)
    for layer, row in zip(layers, grid, strict=True):
        label = layer.layer[-LONGEST_LAYER:]
        row[0].text(-0.1, 0.5, label, fontsize=TEXT_SIZE, parse_math=False, ha="right", transform=row[0].transAxes)
        if isinstance(query, Sequence):
            x, y = (coordinate * small.image.width / frame.image.width for coordinate in query)
            for axes in row:
                axes.plot(x, y, "x", color="white", markersize=4)
    return drawing


DRAWINGS: dict[type, Callable[..., Figure]] = {
    TrustCard: draw_trust,
    GradientStatistics: gradient_flow,
    LedgerRow: draw_ledger,
    LayerAttention: draw_attention,
}
"""The function that draws a result of a type, or a sequence of a type."""
