"""Display of an explanation at the end of a notebook cell."""

from __future__ import annotations

from dataclasses import replace

from PIL import Image

from ..attribution.explanation import Explanation
from ..io.geometry import Frame
from ..io.inputs import encode
from .figure import SCREEN_DPI, as_png
from .overlay import overlay
from .sheet import contact_sheet
from .volume import slices

SIDE = 480  # longest edge of an overlay, in pixels
MOST_ROWS = 8  # images of a batch that are shown


def notebook_png(explanation: Explanation) -> bytes | None:
    """Return a PNG of the overlay, of a contact sheet for several images, or of the slices of one volume.

    Return None if the explanation cannot be drawn, as for several volumes; a notebook then shows its text. For an image
    given as a tensor, the map is drawn on white.
    """
    try:
        if len(explanation.input_size) > 2:
            return as_png(slices(explanation), SCREEN_DPI, bbox_inches="tight")
        shown = [framed(row) for row in explanation[:MOST_ROWS]]
        image = overlay(shown[0], size=SIDE) if len(shown) == 1 else contact_sheet([[row] for row in shown])
        return encode(image, "PNG")
    except Exception:  # noqa: BLE001 - looking at a result must not fail
        return None


def framed(explanation: Explanation) -> Explanation:
    """Return the explanation of one image with a frame: white in the size of the model's input for a tensor."""
    height, width = explanation.input_size
    blank = Frame(Image.new("RGB", (width, height), "white"), (0.0, 0.0, float(width), float(height)))
    return replace(explanation, frames=(explanation.frames[0] or blank,))
