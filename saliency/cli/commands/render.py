"""`saliency render`: overlays drawn again from kept maps. The work is `saliency.batch.redraw.draw_again`."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from .batch import drawing_options, look_of

if TYPE_CHECKING:
    from ..console import Screen

EXAMPLES = """\
examples:
  saliency batch photos/ --out maps --maps
  saliency render maps --colormap viridis --opacity map --out viridis
  saliency render maps/maps/cat.grad_cam.safetensors --sign signed --out signed
"""


def options(parser: argparse.ArgumentParser) -> None:
    """What may be typed behind `saliency render`."""
    parser.add_argument("maps", metavar="MAPS", nargs="+", help="folders of saliency batch --maps, or their files")
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing but errors")
    parser.add_argument("-m", "--method", metavar="NAME", dest="methods", nargs="+", default=[], help="only these")
    parser.add_argument("-o", "--out", metavar="DIR", type=Path, default=Path("out"), help="where to (default: out)")
    drawing_options(parser)


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Draw them, say what became of it, and return the exit code."""
    from rich.text import Text

    from ...batch import StoppedError
    from ...batch.redraw import draw_again
    from ...render.colors import table
    from ..console import visible

    if arguments.colormap is not None:
        table(arguments.colormap)
    counts: Counter[str] = Counter()
    try:
        for each in draw_again(arguments.maps, arguments.out, look=look_of(arguments), methods=arguments.methods):
            counts["failed" if each.failure else "small" if each.small else "whole"] += 1
            if each.failure is not None:
                screen.error(f"{visible(each.source)} by {each.method}: {visible(each.failure.reason)}")
    except StoppedError as error:
        screen.error(error)
        return 1
    screen.say(f"{counts['whole'] + counts['small']} overlays in {visible(arguments.out)}")
    if counts["small"]:
        screen.say(Text(f"{counts['small']} of them on the small preview: the photo is gone or has changed", "dim"))
    if counts["failed"]:
        screen.say(Text(f"{counts['failed']} failures", "red"))
    return 1 if counts["failed"] or not counts.total() else 0
