"""The function that draws an explanation in a notebook. `saliency` sets it, since results do not import drawing."""

from __future__ import annotations

from collections.abc import Callable

draw_png: Callable[[object], bytes | None]
