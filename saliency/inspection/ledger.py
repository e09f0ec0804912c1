"""The ledger of an explanation, which accounts for its score, as a table and as bars."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from PIL import Image, ImageDraw

from ..attribution.explanation import Explanation
from ..attribution.heatmap import single_images
from ..errors import RenderError
from ..render.blending import as_drawing, method_titles
from ..render.sheet import INK, PAPER, SOFT_INK, ellipsised, font_for
from .tables import Column, Table, number

POSITIVE, NEGATIVE, RULE = "#c8352b", "#2b62c8", "#d5d8dd"

# Pixels.
WIDTH, LINE, TEXT, MARGIN = 900, 36, 20, 27
BARS = 190, 657  # from the smallest to the largest value
COLUMNS = 171, 774, 873  # right edges of the names, the shares and the percentages


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One share of the score of an image. The last two rows of an image are the residual and the score.

    Attributes:
        name: The name of the share, "residual" or "score".
        share: The share in score units.
        percent: The share as a percentage of the score; NaN if the score is zero.
        image: The index of the image among those of the table.
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
    """Return a table of the shares of the score, such as those of the input and of the biases.

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
    return [
        LedgerRow(name, share, 100 * share / score if score else math.nan, *about)
        for name, share in zip([*image.ledger_names, "residual", "score"], shares, strict=True)
    ]


def draw_ledger(explanations: Explanation | Iterable[Explanation]) -> Image.Image:
    """Draw the shares of the score as horizontal bars that add up to the score: RGB on white, 900 pixels wide.

    Each bar begins where the previous one ends: positive shares go to the right, in red, and negative ones to the left,
    in blue. The last bar is the score, which begins at zero. The numbers are the shares in score units, and their
    percentages of the score.

    Args:
        explanations: As in `ledger_table`. The bars of several images are below each other, on one scale.

    Raises:
        RenderError: There is no explanation, or an explanation has no ledger.
    """
    images = single_images(explanations, "draw_ledger")
    ledgers = _ledgers(images)
    ends = [end for ledger in ledgers for span in _spans(ledger) for end in span]
    picture = Image.new("RGB", (WIDTH, LINE * sum(len(ledger) + 2 for ledger in ledgers)), PAPER)
    pen = ImageDraw.Draw(picture)
    pen.font = font = font_for((ledger[0].target for ledger in ledgers), TEXT)
    y = LINE
    for ledger in ledgers:
        heading = ellipsised(f"{ledger[0].method}: {ledger[0].target}", font, WIDTH - 2 * MARGIN)
        pen.text((MARGIN, y), heading, INK, anchor="lm")
        for row, span in zip(ledger, _spans(ledger), strict=True):
            y += LINE
            _draw_row(pen, row, y, *np.interp([0.0, *span], (min(ends), max(ends)), BARS).tolist())
        y += 2 * LINE
    return as_drawing(picture)


def _spans(ledger: Sequence[LedgerRow]) -> list[tuple[float, float]]:
    """Return the two ends of each bar, in score units."""
    *shares, score = [row.share for row in ledger]
    return [*pairwise(accumulate(shares, initial=0.0)), (0.0, score)]


def _draw_row(pen: ImageDraw.ImageDraw, row: LedgerRow, y: int, zero: float, start: float, end: float) -> None:
    """Draw a row at the height `y`, with its bar from `start` to `end`, in pixels."""
    is_score = row.name == "score"
    for edge, column in zip(COLUMNS, _ENTRY, strict=True):
        pen.text((edge, y), column.text(row), INK if is_score else SOFT_INK, anchor="rm")
    pen.line((zero, y - LINE / 2, zero, y + LINE / 2), RULE)
    color = INK if is_score else POSITIVE if row.share > 0 else NEGATIVE
    pen.rectangle((min(start, end), y - LINE / 3, max(start, end), y + LINE / 3), color)
