"""Contour lines around the strongest regions of a map."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from ..errors import RenderError
from ..validation import check_number

WIDTH = 0.004  # of a line, as a fraction of the image's longer edge
TONES = ((3, "black"), (1, "white"))  # widths in lines: white between black is visible on any image and in print


def check_levels(contours: object) -> list[float]:
    """Return the levels of contours. Raises RenderError unless they are numbers above 0 and below 1."""
    if isinstance(contours, str) or not isinstance(contours, Sequence):
        raise RenderError(f"contours={contours!r} is not a list of levels, such as (0.5, 0.8)")
    hint = ", a fraction of the value at full colour"
    return [check_number("contours", level, above=0, below=1, hint=hint, error=RenderError) for level in contours]


def draw_contours(
    image: Image.Image, values: NDArray[np.float32], area: tuple[slice, slice], levels: Sequence[float]
) -> None:
    """Draw the lines at which the magnitude of a scaled map crosses some levels, on an RGB image in place.

    Args:
        image: The image.
        values: (h, w) the scaled map, at the pixels of the area.
        area: The rows and columns of the image that the map covers.
        levels: The magnitudes, above 0 and below 1.
    """
    from contourpy import contour_generator  # a part of matplotlib, which loads where it is used

    rows, columns = area
    # A margin of zeros closes the lines of regions at the edge of the map.
    contours = contour_generator(z=np.pad(np.abs(values), 1))
    draw, width = ImageDraw.Draw(image), max(1, round(WIDTH * max(image.size)))
    corner = np.array([columns.start - 1, rows.start - 1])
    for level in levels:
        lines = [np.asarray(line) + corner for line in contours.lines(level)]
        for times, tone in TONES:
            for line in lines:
                draw.line([(x, y) for x, y in line.tolist()], fill=tone, width=times * width, joint="curve")
