"""Colour tables: 256 entries of RGB for every name that matplotlib knows.

matplotlib is imported when the first table is asked for, and only its tables are taken: nothing is drawn with
it.
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
    """The names that `colormap=` takes, sorted."""
    import matplotlib as mpl

    return tuple(sorted(mpl.colormaps))


@cache
def table(name: str, centred: bool = False) -> NDArray[np.uint8]:
    """256 colours from the lowest value to the highest: (256, 3) RGB, read-only.

    A centred table has the colour map's exact middle at entry 128, and its two ends at 1 and 255, the same
    number of steps away; a table of even length has no middle entry otherwise. Entry 0 is then that of 1.

    Raises:
        RenderError: matplotlib knows no such colour map; the message has the closest names.
    """
    import matplotlib as mpl

    if name not in mpl.colormaps:
        raise RenderError(
            f'no colour map "{name}"; any name of matplotlib works, such as {SEQUENTIAL} or {DIVERGING}'
            f"{did_you_mean(name, colormaps())}"
        )
    steps = np.arange(256)
    places = np.maximum(steps - 1, 0) / 254 if centred else steps / 255
    colors: NDArray[np.uint8] = mpl.colormaps[name](places, bytes=True)[:, :3].copy()
    colors.setflags(write=False)
    return colors
