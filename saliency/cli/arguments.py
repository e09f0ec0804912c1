"""Pieces of the command line's parsers: help that reads well, errors of one line, numbers within bounds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from ..errors import did_you_mean

SIGNS = ("positive", "signed", "absolute")


class Help(argparse.RawDescriptionHelpFormatter):
    """Help within 80 columns, that says `-m, --method NAME...` where argparse repeats the name for each spelling."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=27, width=80)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        return f"{', '.join(action.option_strings)} {action.metavar}{'...' if action.nargs == '+' else ''}"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with the closest right option."""

    def error(self, message: str) -> NoReturn:
        """Say it, and exit with code 2."""
        self.exit(2, f"saliency: {message}\n          see {self.prog} --help\n")

    def parsed(self, words: Sequence[str]) -> argparse.Namespace:
        """The arguments; options may stand before, between and behind the others."""
        arguments, unknown = self.parse_known_intermixed_args(words)
        if unknown:
            known = [option for action in self._actions for option in action.option_strings]
            option = unknown[0].partition("=")[0]
            self.error(f'no option "{option}"{did_you_mean(option, known)}')
        return arguments


def opacity(text: str) -> float | str:
    """A share, or "map"."""
    return text if text == "map" else _number(text, 0, 1, "a number from 0 to 1, or map")


def percentile(text: str) -> float | str | None:
    """A percentile, "auto", or None for "none"."""
    if text in ("auto", "none"):
        return None if text == "none" else text
    return _number(text, 1e-9, 100, "a number above 0 and at most 100, auto or none")


def whole(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 on")
    return int(text)


def _number(text: str, least: float, most: float, expected: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"{text} is not {expected}")
    return number


def look_options(looks: argparse._ArgumentGroup) -> None:
    """How overlays are drawn, for every command that draws."""
    looks.add_argument(
        "--opacity",
        metavar="NUMBER",
        type=opacity,
        default=0.5,
        help="0 to 1, or map: as strong as the map is (default: 0.5)",
    )
    looks.add_argument("--colormap", metavar="NAME", help="any of matplotlib's (default: inferno, RdBu_r where signed)")
    looks.add_argument("--sign", metavar="SIGN", choices=SIGNS, help=f"{', '.join(SIGNS)} (default: as in the paper)")
    looks.add_argument(
        "--percentile",
        metavar="NUMBER",
        type=percentile,
        default="auto",
        help="where colours saturate, or none (default: 99.5 for gradients)",
    )
