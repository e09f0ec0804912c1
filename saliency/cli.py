"""The command `saliency`: what may be typed, and where it leads.

Nothing here imports torch, so help, version and slips of the keyboard are answered at once. A command is one entry in
`COMMANDS`; what it does is imported when it is run.

Exit codes: 0; 1, some photo failed and the others are written; 2, what was typed cannot be done; 130, interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from saliency.errors import SaliencyError, did_you_mean

if TYPE_CHECKING:
    from saliency.console import Screen

DISTRIBUTION = "saliency-toolkit"
MODEL = "efficientnet_lite0"
METHOD = "grad_cam"
SIGNS = ("positive", "signed", "absolute")


@dataclass(frozen=True, slots=True)
class Command:
    """One command: its line in the help, its options, and what it does, which returns the exit code."""

    summary: str
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Screen], int]
    examples: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words and not words[0].startswith("-"):
            return _run(words[0], words[1:])
        _root_parser().parse_args(words)
    except SystemExit as stop:  # argparse has answered
        return int(stop.code or 0)
    except KeyboardInterrupt:
        return 130
    _root_parser().print_help(sys.stderr)
    return 2


def _run(name: str, words: Sequence[str]) -> int:
    if name not in COMMANDS:
        _root_parser().error(_unknown_command(name))
    arguments = _parsed(_parser(name), words)

    from saliency.console import Screen

    screen = Screen(quiet=getattr(arguments, "quiet", False))
    try:
        with screen.noting_warnings():
            return COMMANDS[name].run(arguments, screen)
    except SaliencyError as error:
        screen.error(error)
        return 2
    except KeyboardInterrupt as interrupt:
        screen.error(f"interrupted{f': {interrupt}' if interrupt.args else ''}")
        return 130


def _explain(arguments: argparse.Namespace, screen: Screen) -> int:
    from saliency.explaining import Request, explain

    options = {name: value for name, value in vars(arguments).items() if name != "quiet"}
    return explain(Request(**options), screen)


def _explain_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("photos", metavar="PHOTO", nargs="*", help="files; a folder means the pictures in it")
    what = parser.add_argument_group("what is explained, and how")
    _model_options(what)
    what.add_argument(
        "--method",
        "-m",
        metavar="NAME",
        nargs="+",
        action="extend",
        help=f"one or more of `saliency methods`, or all of them: all (default: {METHOD})",
    )
    what.add_argument(
        "--target", "-t", metavar="CLASS", help="name or index of a class (default: the top class of each photo)"
    )
    what.add_argument(
        "--layer", metavar="NAME", help="where CAMs are read; see `saliency layers` (default: found by itself)"
    )
    what.add_argument(
        "--set",
        metavar="OPTION=VALUE",
        action="append",
        default=[],
        help="an option of the methods that have it, as in smooth=positive",
    )
    what.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (default: cuda where there is one)")
    files = parser.add_argument_group("what is written")
    files.add_argument("--out", "-o", metavar="DIR", type=Path, default=Path("out"), help="the folder (default: out)")
    files.add_argument("--sheet", action="store_true", help="also a contact sheet, photos by methods: sheet.png")
    files.add_argument("--save", action="store_true", help="also the values, for Explanation.load: .safetensors")
    drawing = parser.add_argument_group("how it is drawn")
    drawing.add_argument(
        "--opacity", metavar="0..1|map", type=_opacity, default=0.5, help="of the map, or as strong as it is (default: 0.5)"
    )
    drawing.add_argument("--colormap", metavar="NAME", help="any of matplotlib (default: inferno; RdBu_r where signed)")
    drawing.add_argument("--sign", choices=SIGNS, help="how values are read (default: as in the method's paper)")
    drawing.add_argument(
        "--percentile",
        metavar="0..100|none",
        type=_percentile,
        default="auto",
        help="where colours saturate (default: 99.5 for gradients, none for CAMs)",
    )
    parser.add_argument("--quiet", "-q", action="store_true", help="print nothing but errors")
    parser.set_defaults(method=None)


def _model_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", metavar="NAME", default=MODEL, help=f"one of `saliency models` (default: {MODEL})")
    _weights_option(group)


def _weights_option(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--weights",
        metavar="NAME|FILE",
        default="default",
        help="other weights of the library, a checkpoint, or none for random ones",
    )


def _opacity(text: str) -> float | str:
    return text if text == "map" else _number(text, 0, 1, 'a number from 0 to 1, or "map"')


def _percentile(text: str) -> float | str | None:
    if text in ("auto", "none"):
        return None if text == "none" else text
    return _number(text, 1e-9, 100, 'a number above 0 and at most 100, "auto" or "none"')


def _number(text: str, least: float, most: float, expected: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
    return number
