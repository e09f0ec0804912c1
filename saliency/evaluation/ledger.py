"""The ledger of an explanation, which accounts for its score, as a table and as bars."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from ..attribution.explanation import Explanation
from ..attribution.heatmap import single_images
from ..errors import RenderError
from ..render.blending import method_titles
from ..render.figure import new_figure
from ..render.sheet import font_for
from ..tables import Column, Table, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POSITIVE, NEGATIVE, SCORE = "#c8352b", "#2b62c8", "#222222"
WIDTH, ROW_HEIGHT = 9.0, 0.36  # inches
LONGEST_HEADING = 80  # characters


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One share of the score of an image. The last two rows of an image are the residual and the score.

    Attributes:
        name: The name of the share, "residual" or "score".
        share: The share in score units.
        percent: The share as a percentage of the score; NaN if the score is zero.
        image: The index of the image in the table.
        target: The name of the target.
        method: The name of the method's class, with the settings in which methods of one name differ.
    """

    name: str
    share: float
    percent: float
    image: int
    target: str
    method: str


_ENTRY: tuple[Column[LedgerRow], ...] = (
    Column("entry", lambda row: row.name, "left"),
    Column("share", lambda row: number(row.share), hint="in score units"),
    Column("percent", lambda row: f"{row.percent:z.1f} %", hint="of the score"),
)
_IMAGE: tuple[Column[LedgerRow], ...] = (
    Column("image", lambda row: str(row.image)),
    Column("target", lambda row: row.target, "left"),
    Column("method", lambda row: row.method, "left"),
)


def ledger_table(explanations: Explanation | Iterable[Explanation]) -> Table[LedgerRow]:
    """Return a table of the shares of the score, such as the shares of the input and of the biases.

    The shares and the residual of an image sum to its score.

    Args:
        explanations: One or more explanations, of one or more images, by methods with a ledger.

    Returns:
        A sequence of rows that prints as text, displays as HTML and converts with `dataframe()`: one row per share,
        then the residual and the score. The notes list the operations that each method treated.

    Raises:
        RenderError: There is no explanation, or an explanation has no ledger.
    """
    images = single_images(explanations, "ledger_table")
    ledgers = _ledgers(images)
    rows = [row for ledger in ledgers for row in ledger]
    is_one = len(images) == 1
    title = f"Ledger of {rows[0].target} by {rows[0].method}" if is_one else "Ledgers"
    covered = zip(ledgers, images, strict=True)
    notes = dict.fromkeys(f"{ledger[0].method}: {image.coverage}" for ledger, image in covered if image.coverage)
    for ledger, image in zip(ledgers, images, strict=True):
        if image.image_share is not None:
            share, text = float(image.image_share), 1 - float(image.image_share)
            shares = f"{share:.0%} is the image's, {text:.0%} the text's"
            notes[f"{ledger[0].method}: of the relevance of all tokens, {shares}"] = None
    return Table(rows, _ENTRY if is_one else _IMAGE + _ENTRY, title, notes)


def _ledgers(images: Sequence[Explanation]) -> list[list[LedgerRow]]:
    """Return the rows of each image."""
    titled = enumerate(zip(images, method_titles(images), strict=True))
    return [_rows(image, index, title) for index, (image, title) in titled]


def _rows(image: Explanation, index: int, title: str) -> list[LedgerRow]:
    if image.ledger is None or image.residual is None:
        raise RenderError(f"the explanation by {image.method} has no ledger; those by lrp, for example, have one")
    score = float(image.scores)
    shares = [*image.ledger[0].tolist(), float(image.residual), score]
    about = (index, image.target_names[0], title)
    entries = zip([*image.ledger_names, "residual", "score"], shares, strict=True)
    return [LedgerRow(name, share, 100 * share / score if score else math.nan, *about) for name, share in entries]


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
    ledgers = _ledgers(single_images(explanations, "draw_ledger"))
    heights = [ROW_HEIGHT * (len(ledger) + 2) for ledger in ledgers]
    drawing = new_figure(WIDTH, sum(heights))
    panels = drawing.subplots(len(ledgers), sharex=True, squeeze=False, height_ratios=heights)
    for axes, ledger in zip(panels.flat, ledgers, strict=True):
        _draw_bars(axes, ledger)
    return drawing


def _draw_bars(axes: Axes, ledger: Sequence[LedgerRow]) -> None:
    shares = [row.share for row in ledger]  # the last one is the score
    starts = [0.0, *accumulate(shares[:-2]), 0.0]
    colors = [*(POSITIVE if share > 0 else NEGATIVE for share in shares[:-1]), SCORE]
    axes.barh(range(len(ledger)), shares, left=starts, color=colors, height=0.7)
    labels = ["   ".join(column.text(row) for column in _ENTRY) for row in ledger]
    axes.set_yticks(range(len(ledger)), labels, parse_math=False)
    axes.invert_yaxis()
    axes.axvline(0.0, color="#d5d8dd", zorder=0)
    heading = textwrap.shorten(f"{ledger[0].method}: {ledger[0].target}", LONGEST_HEADING, placeholder="…")
    font = Path(str(font_for([heading], 1).path))  # of the target's alphabet
    axes.set_title(heading, loc="left", font=font, fontsize="medium", parse_math=False)
