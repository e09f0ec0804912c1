"""`saliency batch`: explain a folder of images with `saliency.batch.batch`, and print a summary.

Modules that import torch are imported later, since a finished run needs none of them.
"""

from __future__ import annotations

import argparse
import sys

from rich.text import Text

from ..batch import Summary, batch
from ..errors import plural, visible
from .console import Screen
from .options import ALL, METHOD, arguments_of, overlay_style


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Run the batch, print its summary, and return the exit code."""
    with screen.progress() as show:
        options = arguments_of(batch, arguments) | {
            "methods": _methods(arguments.methods or [METHOD]),
            "options": dict(arguments.settings),
            "style": overlay_style(arguments),
            "command": ["saliency", *sys.argv[1:]],
            "on_progress": lambda progress: show(progress.done, progress.total, progress.failed),
        }
        summary = batch(**options)
    _print_summary(summary, screen)
    # With --method all, a method that does not apply to the model is not a failure.
    expected = {"NotApplicableError"} if ALL in (arguments.methods or ()) else set()
    return 1 if summary.kinds.keys() - expected else 0


def _methods(names: list[str]) -> list[str]:
    """Return the methods given by --method, without duplicates."""
    if ALL not in names:
        return list(dict.fromkeys(names))
    from ..methods import METHODS

    return list(METHODS)


def _print_summary(summary: Summary, screen: Screen) -> None:
    """Print the failures, the number of images, the speed and the path of the page."""
    for source, method, why in summary.failures:
        screen.error(f"{visible(source)}{f' by {method}' if method else ''}: {visible(why)}")
    done = f"{summary.done} of {summary.images} images done"
    if summary.fresh:
        minutes, seconds = divmod(summary.seconds, 60)
        duration = f"{minutes:.0f} min {seconds:.0f} s" if minutes else f"{seconds:.1f} s"
        speed = f"{summary.fresh / max(summary.seconds, 1e-9):.1f} per second"
        screen.say(f"{done}, {summary.fresh} in this run: {duration}, {speed}")
    else:
        screen.say(f"{done} by earlier runs; nothing to do")
    if summary.changed:
        screen.say(f"changed since the last run and explained again: {plural(summary.changed, 'image')}")
    if summary.removed:
        named = ", ".join(map(visible, summary.removed[:3])) + (", ..." if len(summary.removed) > 3 else "")
        screen.say(f"removed since the last run, overlays kept: {plural(len(summary.removed), 'image')}, {named}")
    if summary.failed:
        kinds = ", ".join(f"{number} {kind}" for kind, number in summary.kinds.most_common())
        screen.say(Text(f"{plural(summary.failed, 'image')} with failures: {kinds}; --retry tries them again", "red"))
    screen.say(f"gallery page: {visible(summary.page)}")
