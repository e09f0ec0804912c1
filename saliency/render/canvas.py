"""The matplotlib figure that everything here is drawn on, which a notebook shows without being asked."""

from __future__ import annotations

import io
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 100


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of a size in inches. It needs no display and no pyplot, which would keep it alive in a list."""
    made: Figure = _kind()(figsize=(width, height), layout="constrained", dpi=DPI)
    return made


@cache
def _kind() -> Any:
    import matplotlib.figure

    class Figure(matplotlib.figure.Figure):
        """A figure that a notebook can show though nobody has imported pyplot."""

        def _repr_png_(self) -> bytes:
            png = io.BytesIO()
            self.savefig(png, format="png", bbox_inches="tight")
            return png.getvalue()

    return Figure
