"""Contact sheets: one row per image, one column per method, with titles."""

from __future__ import annotations

import itertools
import math
import string
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from ..attribution.explanation import Explanation, method_titles
from ..errors import RenderError
from ..validation import check_integer
from .overlay import HATCHED, Opacity, as_drawing, frame_of, overlay, probability, require_one, shrink
from .scaling import SMOOTHING, Percentile, shared_limit

PAPER = "#ffffff"
INK = "#1d1f23"
SOFT_INK = "#767b84"

SMALLEST_THUMB = 32
ELLIPSIS = "…"


def contact_sheet(
    rows: Sequence[Sequence[Explanation]],
    *,
    thumb: int = 240,
    opacity: Opacity = "map",
    colormap: str | None = None,
    percentile: Percentile = "auto",
    smoothing: float = SMOOTHING,
    shared: bool = False,
) -> Image.Image:
    """Draw one row per image and one column per method, the original image first: RGB on white.

    The class and its probability are to the left of the row, the method is above the column. If a row explains several
    classes, the class is below each overlay instead. If outliers are hatched, a line at the bottom explains them.

    Args:
        rows: One row per image, of explanations of one image by the same methods in the same order.
        thumb: The longer edge of the thumbnails in pixels, at least 32; everything else scales with it.
        opacity: As in `overlay`.
        colormap: As in `overlay`.
        percentile: As in `overlay`.
        smoothing: As in `overlay`.
        shared: Use one scale per column, so that its colours are comparable. By default each overlay has its own scale.

    Raises:
        NonFiniteError: A value is NaN or infinite.
        RenderError: The rows are empty or do not match, an explanation has no image, or an option is invalid.

    Warns:
        SaliencyWarning: A map is nearly even, or below the rounding error, and is drawn as zero.
    """
    thumb = check_integer("thumb", thumb, least=SMALLEST_THUMB, error=RenderError)
    require_columns(rows, "contact_sheet")
    scale: dict[str, Any] = {"percentile": percentile, "smoothing": smoothing}
    style: dict[str, Any] = {"opacity": opacity, "colormap": colormap, **scale}
    limits = [shared_limit(column, **scale) if shared else None for column in zip(*rows, strict=True)]
    drawn = []
    for row in rows:
        small = [replace(explanation, frames=(shrink(frame_of(explanation), thumb),)) for explanation in row]
        overlays = [overlay(part, limit=limit, **style) for part, limit in zip(small, limits, strict=True)]
        drawn.append(_SheetRow(row, [frame_of(small[0]).image, *overlays]))
    return _Sheet(drawn, thumb).draw(["image", *method_titles(rows[0])])


def require_columns(rows: Sequence[Sequence[Explanation]], name: str) -> None:
    """Raise RenderError unless all rows are explanations of one image by the same methods, for the function `name`."""
    if not isinstance(rows, list | tuple) or not all(isinstance(row, list | tuple) for row in rows):
        raise RenderError(f"{name} takes rows of explanations; write [[e] for e in explanation] for one method")
    if not rows or not rows[0]:
        raise RenderError(f"{name} got nothing to draw; pass one row per image, one explanation per method")
    for explanation in itertools.chain(*rows):
        require_one(explanation, name)
    for kind in ("method", "title"):  # the titles of methods are classes, or the keys of a mapping
        first, *others = ([getattr(explanation, kind) for explanation in row] for row in rows)
        for index, names in enumerate(others, start=1):
            if names != first:
                differ = f"row {index} has the {kind}s {', '.join(names) or '(none)'} and row 0 has {', '.join(first)}"
                raise RenderError(f"{differ}; all rows need the same {kind}s")


class _SheetRow:
    """Explanations of one image, the thumbnails of the image and the overlays, and the lines to their left."""

    def __init__(self, explanations: Sequence[Explanation], thumbs: Sequence[Image.Image]) -> None:
        self.explanations, self.thumbs = explanations, thumbs
        self.height = max(thumb.height for thumb in thumbs)
        self.has_one_class = len({explanation.target_names[0] for explanation in explanations}) == 1
        self.names: list[str] = []
        self.numbers = probability(explanations[0]) if self.has_one_class else []

    def wrap_class(self, font: ImageFont.FreeTypeFont, width: int, line: int) -> None:
        """Wrap the name of the class, and make the row as high as its lines and its probability."""
        self.names = wrapped(self.explanations[0].target_names[0], font, width)
        self.height = max(self.height, line * len(self.names + self.numbers))


class _Sheet:
    """Contact sheet with dimensions in proportion to its thumbnails."""

    def __init__(self, rows: Sequence[_SheetRow], thumb: int) -> None:
        self.rows, self.thumb = rows, thumb
        font_size = max(10, thumb / 15)
        explanations = [explanation for row in rows for explanation in row.explanations]
        self.font = font_for((explanation.target_names[0] for explanation in explanations), font_size)
        self.line = round(font_size * 1.35)
        self.gap, self.margin, self.indent = max(4, thumb // 20), max(8, thumb // 9), thumb // 12
        titles = [row.explanations[0].target_names[0] for row in rows if row.has_one_class]
        longest = max(map(self.font.getlength, [*titles, "100.0 %"]))
        # The width of the class names to the left of the images.
        self.gutter = min(math.ceil(longest), thumb * 3 // 4) + self.indent if titles else 0
        for row in rows:
            if row.has_one_class:
                row.wrap_class(self.font, self.gutter - self.indent, self.line)
        self.head = self.margin + self.line + self.gap
        width = self._column_start(len(rows[0].thumbs)) - self.gap + self.margin
        marks = (explanation.outliers for explanation in explanations)
        self.legend = HATCHED if any(mark is not None and mark.any() for mark in marks) else ""
        below = self.margin + self.line if self.legend else self.margin - self.gap
        height = self.head + sum(self._height(row) + self.gap for row in rows) + below
        self.image = as_drawing(Image.new("RGB", (width, height), PAPER))
        self.pen = ImageDraw.Draw(self.image)

    def draw(self, heads: Sequence[str]) -> Image.Image:
        """Draw everything, with a head above each column."""
        for column, head in enumerate(heads):
            text = ellipsised(head, self.font, self.thumb)
            self._write(text, self._centre(column), self.margin, "mm", INK if column else SOFT_INK)
        top = self.head
        for row in self.rows:
            for column, thumb in enumerate(row.thumbs):
                x = self._column_start(column) + (self.thumb - thumb.width) // 2
                self.image.paste(thumb, (x, top + (row.height - thumb.height) // 2))
            self._write_classes(row, top)
            top += self._height(row) + self.gap
        legend = ellipsised(self.legend, self.font, self.image.width - 2 * self.margin)
        self._write(legend, self.margin, top, "lm", SOFT_INK)
        return self.image

    def _column_start(self, column: int) -> int:
        """Return the left edge of a column of thumbnails; column 0 is the image."""
        return self.margin + self.gutter + column * (self.thumb + self.gap)

    def _centre(self, column: int) -> int:
        return self._column_start(column) + self.thumb // 2

    def _height(self, row: _SheetRow) -> int:
        return row.height + (0 if row.has_one_class else self.gap // 2 + 2 * self.line)

    def _write_classes(self, row: _SheetRow, top: int) -> None:
        """Write the class to the left of the row, or below each overlay if the classes differ."""
        if row.has_one_class:
            middle = top + (row.height - self.line * len(row.names + row.numbers)) // 2
            self._write_lines(row.names, row.numbers, self._column_start(0) - self.indent, middle, "rm")
            return
        below = top + row.height + self.gap // 2
        for column, explanation in enumerate(row.explanations, start=1):
            name = ellipsised(explanation.target_names[0], self.font, self.thumb)
            self._write_lines([name], probability(explanation), self._centre(column), below, "mm")

    def _write_lines(self, names: Sequence[str], numbers: Sequence[str], x: int, top: int, anchor: str) -> None:
        """Write lines from the top downwards: names in ink, numbers in soft ink."""
        for index, text in enumerate([*names, *numbers]):
            ink = INK if index < len(names) else SOFT_INK
            self._write(text, x, top + index * self.line, anchor, ink)

    def _write(self, text: str, x: int, top: int, anchor: str, ink: str) -> None:
        self.pen.text((x, top + self.line // 2), text, fill=ink, font=self.font, anchor=anchor)


def font_for(texts: Iterable[str], size: float) -> ImageFont.FreeTypeFont:
    """Return DejaVu Sans; if it lacks letters of the texts, such as Chinese, the installed font with most of them."""
    return ImageFont.truetype(_font_file(frozenset("".join(texts) + string.printable + ELLIPSIS)), size)


@lru_cache
def _font_file(letters: frozenset[str]) -> str:
    from matplotlib import get_data_path
    from matplotlib.ft2font import FT2Font

    visible = [ord(letter) for letter in letters if letter.isprintable()]

    def missing(file: str) -> int:
        font = FT2Font(file)
        return sum(font.get_char_index(code) == 0 for code in visible)

    default = str(Path(get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"))
    if not missing(default):
        return default
    from matplotlib.font_manager import fontManager

    regular = [font for font in fontManager.ttflist if font.style == "normal" and font.weight in (400, "normal")]
    # Fonts of last resort have a box for every letter.
    files = [font.fname for font in regular if "lastresort" not in font.name.replace(" ", "").lower()]
    return min([default, *sorted(file for file in files if Path(file).exists())], key=missing)


def ellipsised(text: str, font: ImageFont.FreeTypeFont, width: float) -> str:
    """Return the text, or the longest beginning of it that fits into the width with an ellipsis."""
    text = " ".join(text.split())
    if font.getlength(text) <= width:
        return text
    length = len(text)
    while length and font.getlength(text[:length].rstrip() + ELLIPSIS) > width:
        length -= 1
    return text[:length].rstrip() + ELLIPSIS


def wrapped(text: str, font: ImageFont.FreeTypeFont, width: float, max_lines: int = 3) -> list[str]:
    """Return the text in at most `max_lines` lines that fit into the width; the last line may end in an ellipsis."""
    lines: list[str] = []
    for columns in range(min(len(text), int(width)), 0, -1):  # a letter is at least a pixel wide
        lines = textwrap.wrap(text, columns, max_lines=max_lines, placeholder=ELLIPSIS, break_on_hyphens=False)
        if all(font.getlength(line) <= width for line in lines):
            break
    return lines
