"""Figures of trust cards and of ledgers."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..attribution.explanation import Explanation
from ..attribution.heatmap import single_images
from ..evaluation.ledger import LedgerRow, ledger_table
from ..evaluation.trust import Property, TrustCard
from ..io.atomic_write import SOFTWARE
from .figure import SCREEN_DPI, TEXT_SIZE, TITLE_SIZE, as_png, new_figure
from .notebook import framed
from .overlay import overlay
from .sheet import font_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY, GREEN, RED, INK = "#8a8f98", "#1a8a4a", "#c0392b", "#202430"  # of a card
MARKERS = {"constant": "s", "centre": "o", "random": "x", "edges": "^"}

POSITIVE, NEGATIVE, SCORE = "#c8352b", "#2b62c8", "#222222"  # of a ledger
WIDTH, ROW_HEIGHT = 9.0, 0.36  # inches
LONGEST_HEADING = 80  # characters


def draw_trust(card: TrustCard) -> Figure:
    """Draw a trust card: the overlay, and one axis for each property, with better values to the right.

    The bar of the map shows two standard errors. The grey bars of the controls show their ranges. The map is green
    where it is better than all controls, and red where it is worse.

    Args:
        card: The result of `trust`.

    Returns:
        A matplotlib Figure, which a notebook shows.
    """
    rows = list(card)
    drawing = new_figure(10, 0.6 * len(rows) + 1.4)
    grid = drawing.add_gridspec(len(rows), 2, width_ratios=(1, 2))
    axes = drawing.add_subplot(grid[:, 0])
    axes.imshow(np.asarray(overlay(framed(card.explanation))))
    axes.set_axis_off()
    groups = set[str]()
    for number_of_row, row in enumerate(rows):
        axes = drawing.add_subplot(grid[number_of_row, 1])
        _draw_property(axes, row)
        if row.group not in groups:
            groups.add(row.group)
            title = f"{row.group}: {card.clear_in(row.group)}\n"
            axes.set_title(title, x=0, ha="left", weight="bold", fontsize=TEXT_SIZE + 1)
    drawing.suptitle(card.title, fontsize=TITLE_SIZE + 2, parse_math=False)
    from matplotlib.lines import Line2D  # takes a second to import

    names = dict.fromkeys(name for row in rows for name in row.controls)
    keys = [Line2D([], [], color=GREY, marker=MARKERS[name], linestyle="", label=name) for name in names]
    title = "better values lie to the right; grey: maps that ignore the prediction"
    style: dict[str, Any] = {"fontsize": TEXT_SIZE, "title_fontsize": TEXT_SIZE, "frameon": False}
    drawing.legend(handles=keys, title=title, loc="outside lower right", ncols=len(keys), **style)
    return drawing


def card_png(card: TrustCard) -> bytes:
    """Return the figure of a trust card as the content of a PNG file."""
    return as_png(draw_trust(card), 1.5 * SCREEN_DPI, metadata={"Software": SOFTWARE})


def _draw_property(axes: Axes, row: Property) -> None:
    """Draw the value and the controls of a property on one line."""
    for name, value in row.controls.items():
        axes.plot(row.control_ranges[name], (0, 0), color=GREY, alpha=0.8)
        axes.plot(value, 0, color=GREY, marker=MARKERS[name], markersize=5, alpha=0.8)
    error = 0.0 if math.isnan(row.error) else 2 * row.error
    color = GREEN if row.is_clear else RED if row.is_worse else INK
    axes.errorbar(row.value, 0, xerr=error, color=color, marker="D", markersize=7)
    axes.set_title(f"{row.title}: {row.verdict}", loc="left", fontsize=TEXT_SIZE)
    axes.set_yticks([])
    axes.xaxis.set_major_formatter(lambda value, place: f"{value:.4g}")
    axes.tick_params(labelsize=TEXT_SIZE - 1)
    axes.spines[["left", "right", "top"]].set_visible(False)
    if not row.higher_is_better:
        axes.invert_xaxis()


def draw_ledger(explanations: Explanation | Iterable[Explanation]) -> Figure:
    """Draw the shares of the score as horizontal bars that add up to the score.

    Each bar begins where the previous one ends: positive shares go to the right, in red, and negative ones to the left,
    in blue. The last bar is the score, which begins at zero. The numbers are the shares in score units, and their
    percentages of the score.

    Args:
        explanations: As in `ledger_table`. The bars of several images are below each other, on one scale.

    Returns:
        A matplotlib Figure: `draw_ledger(e).savefig("ledger.png")`. Notebooks display it.

    Raises:
        RenderError: There is no explanation, or an explanation has no ledger.
    """
    table = ledger_table(single_images(explanations, "draw_ledger"))
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
    shares = [row.share for row in ledger]  # the last one is the score
    starts = [0.0, *accumulate(shares[:-2]), 0.0]
    colors = [*(POSITIVE if share > 0 else NEGATIVE for share in shares[:-1]), SCORE]
    axes.barh(range(len(ledger)), shares, left=starts, color=colors, height=0.7)
    axes.invert_yaxis()
    axes.axvline(0.0, color="#d5d8dd", zorder=0)
    heading = textwrap.shorten(f"{ledger[0].method}: {ledger[0].target}", LONGEST_HEADING, placeholder="…")
    font = Path(str(font_for([heading], 1).path))  # of the target's alphabet
    axes.set_title(heading, loc="left", font=font, fontsize="medium", parse_math=False)
