"""Options of all commands in one table, and their parser.

Nothing here imports torch, so that help and usage errors are printed without delay.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..batch import FORMATS, SIGNS, OverlayStyle
from ..errors import did_you_mean

MODEL = "efficientnet_lite0"
METHOD = "grad_cam"
ALL = "all"  # every method


@dataclass(frozen=True, slots=True)
class Option:
    """One option or positional argument.

    Attributes:
        name: The long flag, such as "--model", or the metavar of a positional argument.
        flags: Positional arguments of `add_argument`.
        exclusive: Name of a group of mutually exclusive options; empty without a group.
        keywords: Keyword arguments of `add_argument`.
    """

    name: str
    flags: tuple[str, ...]
    exclusive: str
    keywords: dict[str, Any]


def add_options(parser: argparse.ArgumentParser, names: Collection[str]) -> None:
    """Add the named options in the order of `OPTIONS`."""
    for title, options in OPTIONS.items():
        chosen = [option for option in options if option.name in names]
        if not chosen:
            continue
        group: Any = parser.add_argument_group(title) if title else parser
        parents = {"": group}
        for option in chosen:
            if option.exclusive not in parents:
                parents[option.exclusive] = group.add_mutually_exclusive_group()
            parents[option.exclusive].add_argument(*option.flags, **option.keywords)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Formatter for 80 columns that prints `-m, --method NAME...` instead of repeating NAME for each flag."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=27, width=80)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        return f"{', '.join(action.option_strings)} {action.metavar}{'...' if action.nargs == '+' else ''}"


class Parser(argparse.ArgumentParser):
    """Argument parser with one-line errors that suggest the closest option."""

    def __init__(self, prog: str, **keywords: Any) -> None:
        super().__init__(prog, formatter_class=HelpFormatter, allow_abbrev=False, **keywords)

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with code 2."""
        self.exit(2, f"saliency: {message}\n          see {self.prog} --help\n")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse arguments. Options may precede, separate and follow positional arguments."""
        arguments, unknown = self.parse_known_intermixed_args(words)
        if unknown:
            known = [flag for action in self._actions for flag in action.option_strings]
            flag = unknown[0].partition("=")[0]
            self.error(f'no option "{flag}"{did_you_mean(flag, known)}')
        return arguments


# Converting arguments ------------------------------------------------------------------------------------------


def overlay_style(arguments: argparse.Namespace) -> OverlayStyle:
    """Return the overlay style of the parsed arguments."""
    names = ("format", "opacity", "colormap", "sign", "percentile")
    return OverlayStyle(**{name: getattr(arguments, name) for name in names if hasattr(arguments, name)})


def _number(text: str, least: float, most: float, expected: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"{text} is not {expected}")
    return number


def _opacity(text: str) -> float | str:
    return text if text == "map" else _number(text, 0, 1, "a number from 0 to 1, or map")


def _percentile(text: str) -> float | str | None:
    if text in ("auto", "none"):
        return None if text == "none" else text
    return _number(text, 1e-9, 100, "a number above 0 and at most 100, auto or none")


def _positive_integer(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def _batch_size(text: str) -> int | None:
    return None if text == "auto" else _positive_integer(text)


def _setting(text: str) -> tuple[str, Any]:
    """Parse `NAME=VALUE`. The value is JSON, or text if it is not valid JSON."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text}: expected NAME=VALUE, for example --set smooth=positive")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _weights(text: str) -> str | None:
    return None if text == "none" else text


# The table -----------------------------------------------------------------------------------------------------


def _option(typed: str, metavar: str, text: str, exclusive: str = "", dest: str = "", **keywords: Any) -> Option:
    """Create an option with the flags `typed`, such as "-o --out".

    Without a metavar it is a switch. If `typed` equals the metavar, it is a positional argument.
    """
    flags = (dest,) if typed == metavar else tuple(typed.split())
    if typed != metavar and dest:
        keywords["dest"] = dest
    keywords |= {"metavar": metavar} if metavar else {"action": "store_true"}
    return Option(typed.split()[-1], flags, exclusive, {"help": text, **keywords})


OPTIONS: dict[str, list[Option]] = {
    "": [
        _option("PHOTO", "PHOTO", "image files, or folders of images", dest="photos", nargs="*"),
        _option(
            "SOURCE",
            "SOURCE",
            "folders, files, patterns, lists (csv, jsonl, txt), tar shards",
            dest="sources",
            nargs="+",
        ),
        _option("MAPS", "MAPS", "folders written by saliency batch --maps, or files in them", dest="maps", nargs="+"),
        _option("DIR", "DIR", "folder written by saliency batch", dest="folder", type=Path),
        _option("MODEL", "MODEL", f"see saliency models (default: {MODEL})", dest="model", nargs="?", default=MODEL),
        _option("PATTERN", "PATTERN", "part of a name, or a pattern such as 'vit_*_384'", dest="pattern", nargs="?"),
        _option("-q --quiet", "", "print errors only"),
        _option("-r --recursive", "", "include subfolders"),
        _option("--limit", "N", "only the first N photos", type=_positive_integer),
        _option("--photo", "PHOTO", "run the model on this photo (default: noise)"),
        _option("--all", "", "list everything", "depth"),
        _option("--depth", "N", "levels of nested layers (default: as many as fit)", "depth", type=_positive_integer),
        _option("--stats", "", "also print activation statistics: means, zeros, dead channels, NaN"),
        _option("--gradients", "", "also print gradients of the score of one class"),
        _option("--html", "FILE", "also write everything to an HTML page", type=Path),
    ],
    "model, method and target": [
        _option("--model", "NAME", f"see saliency models (default: {MODEL})", default=MODEL),
        _option(
            "--weights",
            "NAME|FILE",
            "name of weights, a checkpoint file, or none for random weights",
            type=_weights,
            default="default",
        ),
        _option(
            "-m --method",
            "NAME",
            f"one or more, or all; see saliency methods (default: {METHOD}; render: all)",
            dest="methods",
            nargs="+",
            action="extend",
        ),
        _option("-t --target", "CLASS", "class name or index (default: the top class of each photo)", "target"),
        _option("--targets", "FILE", "csv file with the columns path and target", "target"),
        _option("--layer", "NAME", "layer that CAMs read; see saliency layers (default: automatic)"),
        _option(
            "--set",
            "OPTION=VALUE",
            "option of all methods that have it, such as smooth=positive",
            dest="settings",
            type=_setting,
            action="append",
            default=[],
        ),
    ],
    "output": [
        _option("-o --out", "DIR", "output folder (default: out)", type=Path, default=Path("out")),
        _option("--sheet", "", "also write a contact sheet of photos and methods, sheet.png"),
        _option("--save", "", "also save the values as .safetensors, for Explanation.load"),
        _option("--maps", "", "also save the attribution values, for saliency render"),
        _option("--restart", "", "delete the results of an earlier run and start again", "resume"),
        _option("--resume", "", "resume an earlier run (the default)", "resume"),
        _option("--retry", "", "retry photos that failed in an earlier run"),
        _option("--strict", "", "stop at the first photo that fails"),
    ],
    "overlay style": [
        _option("--format", "NAME", "png, jpg or webp (default: png)", choices=FORMATS, default="png"),
        _option(
            "--opacity",
            "NUMBER",
            "0 to 1, or map for opacity proportional to the heatmap (default: 0.5)",
            type=_opacity,
            default=0.5,
        ),
        _option("--colormap", "NAME", "any matplotlib colormap (default: inferno, or RdBu_r if signed)"),
        _option("--sign", "SIGN", f"{', '.join(SIGNS)} (default: that of the method)", choices=SIGNS),
        _option(
            "--percentile",
            "NUMBER",
            "percentile at which colours saturate, or none (default: 99.5 for gradients)",
            type=_percentile,
            default="auto",
        ),
    ],
    "execution": [
        _option(
            "--engine",
            "NAME",
            "local, or ray for a cluster at RAY_ADDRESS (default: local)",
            choices=("local", "ray"),
            default="local",
        ),
        _option(
            "--device",
            "NAME",
            "cpu, cuda:1, mps or auto; several for batch, as in cuda:0,cuda:1 (default: auto)",
            default="auto",
        ),
        _option("--batch-size", "N", "photos per batch (default: auto: 8 on CPUs, 64 on GPUs)", type=_batch_size),
        _option("--workers", "N", "number of threads (default: one per core)", type=_positive_integer),
    ],
}
