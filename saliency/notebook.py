"""The functions that draw a result as PNG. `saliency` sets them, since results do not import drawing."""

from __future__ import annotations

from collections.abc import Callable

draw_png: Callable[[object], bytes | None]
"""Draw an explanation at the end of a notebook cell."""
draw_card: Callable[[object], bytes]
"""Draw a trust card."""
