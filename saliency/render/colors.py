"""Colour tables of 256 RGB entries, for every colour map of matplotlib.

matplotlib is imported when the first table is created.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from ..errors import RenderError, did_you_mean

SEQUENTIAL = "inferno"
DIVERGING = "RdBu_r"

CENTRE = 128  # the entry of zero in a centred table


def colormaps() -> tuple[str, ...]:
    """Return the names that `colormap=` accepts, sorted."""
    import matplotlib as mpl

    return tuple(sorted(mpl.colormaps))


@cache
def table(name: str, centred: bool = False) -> NDArray[np.uint8]:
    """Return 256 colours from the lowest value to the highest: (256, 3) RGB, read-only.

    In a centred table, entry 128 is the middle of the colour map, and entries 1 and 255 are its ends. Entry 0 equals
    entry 1: a table of even length has no middle entry otherwise.

    Raises:
        RenderError: matplotlib has no such colour map; the message has the closest names.
    """
    import matplotlib as mpl

    if name not in mpl.colormaps:
        raise RenderError(
            f'no colour map "{name}"; use the name of a matplotlib colour map, such as {SEQUENTIAL} or {DIVERGING}'
            f"{did_you_mean(name, colormaps())}"
        )
    steps = np.arange(256)
    places = np.maximum(steps - 1, 0) / 254 if centred else steps / 255
    colors: NDArray[np.uint8] = mpl.colormaps[name](places, bytes=True)[:, :3].copy()
    colors.setflags(write=False)
    return colors
