"""`saliency render` and `saliency report`: redraw the overlays or the page of a batch folder, without the model."""

from __future__ import annotations

import argparse
from collections import Counter

from rich.text import Text

from ..batch.drawing import redraw
from ..batch.report import report as write_page
from ..errors import plural, visible
from .console import Screen, UsageError
from .options import overlay_style


def render(arguments: argparse.Namespace, screen: Screen) -> int:
    """Redraw the overlays, print their number, and return the exit code."""
    style, counts = overlay_style(arguments), Counter[str]()
    for image in redraw(arguments.maps, arguments.out, style=style, methods=arguments.methods or []):
        counts["failed" if image.failure else "small" if image.is_small else "large"] += 1
        if image.failure is not None:
            screen.error(f"{visible(image.map)}: {visible(image.failure.reason)}")
    screen.say(f"{plural(counts['large'] + counts['small'], 'overlay')} in {visible(arguments.out)}")
    if counts["small"]:
        screen.say(Text(f"{counts['small']} of them on the small preview: the image was removed or has changed", "dim"))
    if counts["failed"]:
        screen.say(Text(plural(counts["failed"], "failure"), "red"))
    return 1 if counts["failed"] or not counts.total() else 0


def report(arguments: argparse.Namespace, screen: Screen) -> int:
    """Rewrite the gallery page of a batch folder."""
    try:
        with screen.waiting("writing the page"):
            page = write_page(arguments.folder)
    except OSError as error:
        raise UsageError(f"cannot write the page of {arguments.folder}: {error.strerror or error}") from error
    screen.say(f"written: {visible(page)}")
    return 0
