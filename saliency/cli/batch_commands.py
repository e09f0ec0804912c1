"""The commands on batch folders: `saliency batch`, and `report`, which needs no model.

Modules that import torch are imported later, since a finished run needs none of them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from rich.text import Text

from ..batch import Summary, batch
from ..batch.failures import sentence
from ..batch.manifest import write_csv
from ..errors import plural, visible
from .arguments import ALL, METHOD, arguments_of, overlay_style
from .console import Screen, UsageError, one_line

_DETECTION = ("box", "point", "index")
_TOGETHER = (
    *((name, "target") for name in (*_DETECTION, "texts", "targets", "detections")),
    *(("region", "where"), ("keypoint", "index"), ("detections", "targets")),
)
"""Names of arguments that may be given together, besides one alone."""


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Run the batch, print its summary, and return the exit code."""
    given = run_arguments(batch, arguments) | {"style": overlay_style(arguments)}
    with screen.progress() as show:
        summary = batch(**given, command=["saliency", *sys.argv[1:]], on_progress=show)
    expected = expected_errors(arguments)
    _print_summary(summary, screen, "image" if arguments.detections is None else "detection", expected)
    return 1 if summary.kinds.keys() - expected else 0


def run_arguments(function: Callable[..., object], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the parsed arguments of `batch` or `evaluate`. The first text is the target, against the others."""
    methods = select_methods(arguments.methods or [METHOD])
    given = arguments_of(function, arguments) | {"sources": list(read_sources(arguments.sources)), "methods": methods}
    given["target"] = choose_target(arguments)
    if arguments.texts:
        from ..targets.similarity import text

        given["target"] = text(arguments.texts[0], against=arguments.texts[1:])
    return given


def choose_target(arguments: argparse.Namespace) -> Any:
    """Return the class, detection, region or joint of the parsed arguments.

    Raises:
        UsageError: They name several targets.
        SaliencyError: A place is invalid, or the mask of a region cannot be read.
    """
    every = dict.fromkeys(chain.from_iterable(_TOGETHER))
    given = [name for name in every if getattr(arguments, name, None) not in (None, [])]
    if given == ["where"] or not any(together.issuperset(given) for together in map(set, _TOGETHER)):
        flags = ", ".join(f"--{name}" for name in given).replace("--texts", "--text")
        hint = "--point X,Y --target CLASS, --region CLASS --where PLACE or --keypoint NAME --index N"
        raise UsageError(f"{flags} is not one target; pass for example {hint}")
    if not {*_DETECTION, "region", "keypoint"}.intersection(given):
        return arguments.target
    import numpy as np

    from ..io.inputs import open_image
    from ..io.preprocess import drawable
    from ..targets.boxes import box
    from ..targets.regions import keypoint, region

    if "region" in given:
        where = arguments.where
        is_mask = isinstance(where, Path)
        return region(arguments.region, np.asarray(drawable(open_image(where))).any(-1) if is_mask else where)
    if "keypoint" in given:
        return keypoint(arguments.keypoint, arguments.index or 0)
    return box(**{name: getattr(arguments, name) for name in _DETECTION}, cls=arguments.target)


def expected_errors(arguments: argparse.Namespace) -> set[str]:
    """Return the kinds of errors that are not failures: methods that do not apply, and images without detections."""
    kinds = {"NotApplicableError"} if ALL in (arguments.methods or ()) else set()
    return kinds if getattr(arguments, "detections", None) is None else {*kinds, "NotFoundError"}


def read_sources(words: list[str]) -> Iterator[str]:
    """Yield the sources. The word "-" denotes the paths on standard input, one per line or separated by NUL."""
    for word in words:
        if word != "-":
            yield word
            continue
        data = sys.stdin.buffer.read()
        yield from map(os.fsdecode, filter(None, data.split(b"\0") if b"\0" in data else data.splitlines()))


def select_methods(names: list[str]) -> list[str]:
    """Return the methods given by --method, without duplicates."""
    if ALL not in names:
        return list(dict.fromkeys(names))
    from ..methods import METHODS

    return list(METHODS)


def _print_summary(summary: Summary, screen: Screen, counted: str, expected: set[str]) -> None:
    """Print the failures, the number of images or detections, the speed and the path of the page."""
    for source, method, why in summary.failures:
        screen.error(sentence(source, method, why))
    done = f"{summary.done} of {plural(summary.images, counted)} done"
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
    screen.say_left_out(summary.left_out)
    if summary.repeated:
        images, error = plural(summary.repeated.total(), "image"), one_line(next(iter(summary.repeated)))
        screen.say(f"batches repeated in parts after an error: {images} (column repeated of manifest.jsonl), {error}")
    for method, lacking in summary.unfinished.items():
        screen.say(f"{plural(lacking, 'image')} without {method}; to complete: --method {method}")
    if summary.failed:
        kinds = ", ".join(f"{number} {kind}" for kind, number in summary.kinds.most_common())
        text = f"{plural(summary.failed, counted)} with failures: {kinds}; --retry tries them again"
        screen.say(Text(text, "red" if summary.kinds.keys() - expected else ""))
    screen.say(f"gallery page: {visible(summary.page)}")


def report(arguments: argparse.Namespace, screen: Screen) -> int:
    """Rewrite the gallery page of a batch folder, and write its table."""
    from ..batch.report import report as write_page

    with screen.waiting("writing the page"):
        files = [write_page(arguments.folder, title=arguments.title)]
        if arguments.csv:
            files.append(write_csv(arguments.folder))
    for file in files:
        screen.say(f"written: {visible(file)}")
    return 0
