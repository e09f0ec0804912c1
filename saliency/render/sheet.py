"""Contact sheets: one row per image, one column per method, with titles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from ..attribution.explanation import Explanation
from ..errors import RenderError
from ..io.preprocess import Frame
from ..validation import check_integer
from .blending import (
    Opacity,
    Shade,
    frame_of,
    method_title,
    paint,
    probability,
    require_one,
    rgb,
    shade,
    spread,
    window,
)
from .heatmap import Percentile, limits, resolve_percentile

PAPER = "#ffffff"
INK = "#1d1f23"
SOFT_INK = "#767b84"

SMALLEST_THUMB = 32
ELLIPSIS = "…"

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@dataclass(frozen=True, slots=True)
class _Layout:
    """Dimensions of a sheet, in proportion to its thumbnails."""

    thumb: int
    gutter: int  # the width to the left of the images

    @property
    def gap(self) -> int:
        return max(4, self.thumb // 20)

    @property
    def margin(self) -> int:
        return max(8, self.thumb // 9)

    @property
    def line(self) -> int:
        return round(_font_size(self.thumb) * 1.35)

    @property
    def head(self) -> int:
        return self.margin + self.line + self.gap

    def left(self, column: int) -> int:
        """Return the left edge of a column of thumbnails; column 0 is the image."""
        return self.margin + self.gutter + column * (self.thumb + self.gap)

    def centre(self, column: int) -> int:
        return self.left(column) + self.thumb // 2


@dataclass(frozen=True, slots=True)
class _Row:
    """Explanations of one image, and the thumbnails of the image and the overlays."""

    explanations: Sequence[Explanation]
    thumbs: Sequence[Image.Image]

    @property
    def one_class(self) -> bool:
        return len({explanation.target_names[0] for explanation in self.explanations}) == 1

    @property
    def drawn_height(self) -> int:
        return max(thumb.height for thumb in self.thumbs)

    def height(self, layout: _Layout) -> int:
        return self.drawn_height + (0 if self.one_class else layout.gap // 2 + 2 * layout.line)


def contact_sheet(
    rows: Sequence[Sequence[Explanation]],
    *,
    thumb: int = 240,
    opacity: Opacity = 0.5,
    colormap: str | None = None,
    percentile: Percentile = "auto",
    shared: bool = False,
) -> Image.Image:
    """Draw one row per image and one column per method, the original image first: RGB on white.

    The class and its probability are to the left of the row, the method is above the column. If a row explains several
    classes, the class is below each overlay instead.

    Args:
        rows: One row per image, of explanations of one image by the same methods in the same order.
        thumb: The longer edge of the thumbnails in pixels, at least 32; everything else scales with it.
        opacity: As in `overlay`.
        colormap: As in `overlay`.
        percentile: As in `overlay`, of the values that the thumbnail shows.
        shared: Draw each column on one scale, so that its colours are comparable; otherwise each overlay has its own.

    Raises:
        NonFiniteError: A value is NaN or infinite.
        RenderError: The rows are empty or do not match, an explanation has no image, or an option is invalid.

    Warns:
        SaliencyWarning: A map is constant, or below the rounding error, which is drawn as zero.
    """
    thumb = check_integer("thumb", thumb, least=SMALLEST_THUMB, error=RenderError)
    _require_columns(rows)
    table = [[_make_drawing(explanation, thumb, percentile) for explanation in row] for row in rows]
    column_limits = [max(drawing.limit for drawing in column) for column in zip(*table, strict=True)]
    drawn = []
    for explanations, drawings in zip(rows, table, strict=True):
        limits_ = column_limits if shared else [drawing.limit for drawing in drawings]
        thumbs = [drawing.painted(limit, colormap, opacity) for drawing, limit in zip(drawings, limits_, strict=True)]
        drawn.append(_Row(explanations, [drawings[0].frame.picture, *thumbs]))
    layout = _Layout(thumb, _gutter(drawn, thumb))
    sheet = Image.new("RGB", _size(drawn, layout), PAPER)
    pen = ImageDraw.Draw(sheet)
    _write_heads(pen, layout, ["photo", *map(method_title, rows[0])])
    top = layout.head
    for row in drawn:
        _paste_thumbs(sheet, layout, top, row)
        _write_captions(pen, layout, top, row)
        top += row.height(layout) + layout.gap
    return sheet


def _require_columns(rows: Sequence[Sequence[Explanation]]) -> None:
    """Raise RenderError unless all rows are explanations of one image by the same methods."""
    if not isinstance(rows, list | tuple) or not all(isinstance(row, list | tuple) for row in rows):
        raise RenderError("contact_sheet takes rows of explanations; write [[e] for e in explanation] for one method")
    if not rows or not rows[0]:
        raise RenderError("contact_sheet got nothing to draw; pass one row per image, one explanation per method")
    for explanation in itertools.chain(*rows):
        require_one(explanation, "contact_sheet")
    first, *others = ([explanation.method for explanation in row] for row in rows)
    for index, methods in enumerate(others, start=1):
        if methods != first:
            raise RenderError(
                f"row {index} has the methods {', '.join(methods) or '(none)'} and row 0 has {', '.join(first)}; a "
                "column has one title, so all rows need the same methods"
            )


@dataclass(frozen=True, slots=True)
class _Drawing:
    """Map at the pixels of its thumbnail, and the limit of its own scale."""

    frame: Frame
    shading: Shade  # the share of its largest value at each pixel of the window
    limit: float  # in the map's units

    def painted(self, limit: float, colormap: str | None, opacity: Opacity) -> Image.Image:
        gain = self.shading.limit / limit if limit else 1.0
        values = np.clip(self.shading.values * np.float32(gain), -1, 1)
        return paint(self.frame, replace(self.shading, values=values), colormap, opacity)


def _make_drawing(explanation: Explanation, thumb: int, percentile: Percentile) -> _Drawing:
    """Return the drawing of an explanation. Its limit is that of the values averaged over thumbnail pixels."""
    frame = _shrink(frame_of(explanation), thumb)
    inside = window(frame)
    largest = shade(explanation, percentile=None)
    shares = spread(largest.values, frame, inside)
    limit = largest.limit * float(limits(torch.from_numpy(shares)[None], resolve_percentile(explanation, percentile)))
    return _Drawing(Frame(frame.picture, inside.box), replace(largest, values=shares), limit)


def _shrink(frame: Frame, thumb: int) -> Frame:
    """Resize a frame so that the longer edge of its image is `thumb`."""
    width, height = frame.picture.size
    scale = thumb / max(width, height)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    left, top, right, bottom = frame.box
    across, down = size[0] / width, size[1] / height
    small = rgb(frame.picture).resize(size, Image.Resampling.LANCZOS, reducing_gap=3)
    return Frame(small, (left * across, top * down, right * across, bottom * down))


def _font_size(thumb: int) -> float:
    return max(10, thumb / 15)


def _font(thumb: int) -> Font:
    return ImageFont.load_default(size=_font_size(thumb))


def _gutter(rows: Sequence[_Row], thumb: int) -> int:
    """Return the width of the row titles: that of the longest, up to three quarters of a thumbnail."""
    font = _font(thumb)
    titles = [row.explanations[0].target_names[0] for row in rows if row.one_class]
    if not titles:
        return 0
    longest = max(map(font.getlength, [*titles, "100.0 %"]))
    return min(math.ceil(longest), thumb * 3 // 4) + thumb // 12


def _size(rows: Sequence[_Row], layout: _Layout) -> tuple[int, int]:
    columns = len(rows[0].thumbs)
    height = layout.head + sum(row.height(layout) + layout.gap for row in rows) - layout.gap + layout.margin
    return layout.left(columns) - layout.gap + layout.margin, height


def _write_heads(pen: ImageDraw.ImageDraw, layout: _Layout, heads: Sequence[str]) -> None:
    font = _font(layout.thumb)
    for column, head in enumerate(heads):
        place = layout.centre(column), layout.margin + layout.line // 2
        ink = INK if column else SOFT_INK
        pen.text(place, ellipsised(head, font, layout.thumb), fill=ink, font=font, anchor="mm")


def _paste_thumbs(sheet: Image.Image, layout: _Layout, top: int, row: _Row) -> None:
    """Paste the thumbnails in the middle of their cells."""
    for column, thumb in enumerate(row.thumbs):
        left = layout.left(column) + (layout.thumb - thumb.width) // 2
        sheet.paste(thumb, (left, top + (row.drawn_height - thumb.height) // 2))


def _write_captions(pen: ImageDraw.ImageDraw, layout: _Layout, top: int, row: _Row) -> None:
    """Write the class to the left of the row, or below each overlay if the classes differ."""
    font = _font(layout.thumb)
    if row.one_class:
        first, right = row.explanations[0], layout.left(0) - layout.thumb // 12
        names = wrapped(first.target_names[0], font, layout.gutter - layout.thumb // 12)
        height = layout.line * (len(names) + len(probability(first)))
        _write_lines(pen, layout, (right, top + (row.drawn_height - height) // 2), names, probability(first), "rm")
        return
    below = top + row.drawn_height + layout.gap // 2
    for column, explanation in enumerate(row.explanations, start=1):
        name = ellipsised(explanation.target_names[0], font, layout.thumb)
        _write_lines(pen, layout, (layout.centre(column), below), [name], probability(explanation), "mm")


def _write_lines(
    pen: ImageDraw.ImageDraw,
    layout: _Layout,
    place: tuple[int, int],
    names: Sequence[str],
    numbers: Sequence[str],
    anchor: str,
) -> None:
    """Write lines from `place` downwards: names in ink, numbers in soft ink."""
    inks = [INK] * len(names) + [SOFT_INK] * len(numbers)
    for index, (text, ink) in enumerate(zip([*names, *numbers], inks, strict=True)):
        middle = place[1] + index * layout.line + layout.line // 2
        pen.text((place[0], middle), text, fill=ink, font=_font(layout.thumb), anchor=anchor)


def ellipsised(text: str, font: Font, width: float) -> str:
    """Return the text, or the longest beginning of it that fits into the width with an ellipsis."""
    text = " ".join(text.split())
    if font.getlength(text) <= width:
        return text
    kept = len(text)
    while kept and font.getlength(text[:kept].rstrip() + ELLIPSIS) > width:
        kept -= 1
    return text[:kept].rstrip() + ELLIPSIS


def wrapped(text: str, font: Font, width: float, most: int = 3) -> list[str]:
    """Return the text in at most `most` lines of whole words; a line that is too long ends in an ellipsis."""
    lines: list[str] = []
    words = text.split()
    while words and len(lines) < most - 1:
        taken = 1
        while taken < len(words) and font.getlength(" ".join(words[: taken + 1])) <= width:
            taken += 1
        lines.append(ellipsised(" ".join(words[:taken]), font, width))
        words = words[taken:]
    return [*lines, ellipsised(" ".join(words), font, width)] if words else lines
