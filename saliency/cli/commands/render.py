"""`saliency render`: redraw overlays from saved maps with `saliency.batch.saved_maps.redraw`."""

from __future__ import annotations

import argparse
from collections import Counter

from rich.text import Text

from ...batch import StoppedError
from ...batch.saved_maps import redraw
from ...render.blending import color_table
from ..console import Screen, count, visible
from ..options import overlay_style


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Redraw the overlays, print their number, and return the exit code."""
    if arguments.colormap is not None:
        color_table(arguments.colormap)
    counts: Counter[str] = Counter()
    try:
        for image in redraw(
            arguments.maps, arguments.out, style=overlay_style(arguments), methods=arguments.methods or []
        ):
            counts["failed" if image.failure else "small" if image.is_small else "large"] += 1
            if image.failure is not None:
                screen.error(f"{visible(image.map)}: {visible(image.failure.reason)}")
    except StoppedError as error:
        screen.error(error)
        return 1
    screen.say(f"{count(counts['large'] + counts['small'], 'overlay')} in {visible(arguments.out)}")
    if counts["small"]:
        screen.say(Text(f"{counts['small']} of them on the small preview: the photo was removed or has changed", "dim"))
    if counts["failed"]:
        screen.say(Text(count(counts["failed"], "failure"), "red"))
    return 1 if counts["failed"] or not counts.total() else 0
