"""`saliency batch`: a folder of photos becomes a folder of overlays. The work is `saliency.batch.batch`.

What the help needs is imported at once, and that is little; the rest where the command is run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import look_options, whole

if TYPE_CHECKING:
    from ...batch import Look, Progress, Summary
    from ..console import Screen

EVERYTHING = "all"
EXAMPLES = """\
examples:
  saliency batch photos/ --out maps
  saliency batch photos/ --recursive -m grad_cam layer_cam --format jpg --maps
  saliency batch list.csv --out maps           (columns: path, target)
  saliency batch 'shards/*.tar' --out maps     (WebDataset)

The same command again does what is missing: it may be interrupted at any time.

files:
  DIR/index.html       the page to look through
  DIR/overlays/        cat.jpg by grad_cam is overlays/cat.grad_cam.png
  DIR/manifest.jsonl   a row for each photo and method, also for what failed
  DIR/maps/            with --maps: the raw values; see saliency render

exit codes:
  0  done
  1  some photo failed, and the others are written; or the disk is full
  2  what was typed cannot be done, or the folder is in use
  130  interrupted by Ctrl-C or SIGTERM; the same command goes on
"""


def options(parser: argparse.ArgumentParser, model: str, method: str) -> None:
    """What may be typed behind `saliency batch`."""
    parser.add_argument(
        "sources", metavar="SOURCE", nargs="+", help="folders, files, patterns, lists (csv, jsonl, txt), tar shards"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing but errors")
    parser.add_argument("-r", "--recursive", action="store_true", help="also folders inside of folders")
    parser.add_argument("--limit", metavar="N", type=whole, help="only the first N photos")
    what = parser.add_argument_group("what is explained, and how")
    what.add_argument("--model", metavar="NAME", default=model, help=f"see saliency models (default: {model})")
    what.add_argument("--weights", metavar="NAME|FILE", default="default", help="others, or none for random ones")
    what.add_argument(
        "-m",
        "--method",
        metavar="NAME",
        dest="methods",
        nargs="+",
        action="extend",
        help=f"one or more, or all; see saliency methods (default: {method})",
    )
    classes = what.add_mutually_exclusive_group()
    classes.add_argument("-t", "--target", metavar="CLASS", help="name or index (default: each photo's top class)")
    classes.add_argument("--targets", metavar="FILE", help="a csv with path and target of each photo")
    what.add_argument("--layer", metavar="NAME", help="that CAMs read; see saliency layers")
    what.add_argument("--set", metavar="OPTION=VALUE", dest="settings", action="append", default=[])
    files = parser.add_argument_group("what is written")
    files.add_argument("-o", "--out", metavar="DIR", type=Path, default=Path("out"), help="where to (default: out)")
    files.add_argument("--maps", action="store_true", help="also the raw values, to be drawn again")
    files.add_argument("--restart", action="store_true", help="remove what an earlier run made, and begin anew")
    files.add_argument("--resume", action="store_true", help="go on with an earlier run, which is the default")
    files.add_argument("--retry", action="store_true", help="try again what failed in an earlier run")
    files.add_argument("--strict", action="store_true", help="stop at the first photo that fails")
    drawing_options(parser)
    speed = parser.add_argument_group("where it is done")
    speed.add_argument(
        "--engine", choices=("local", "ray"), default="local", help="local, or ray for a cluster (RAY_ADDRESS)"
    )
    speed.add_argument("--device", metavar="NAME", default="auto", help="cpu, cuda, or cuda:0,cuda:1 for several")
    speed.add_argument("--batch-size", metavar="N", type=size, help="photos at once (default: auto, which finds out)")
    speed.add_argument("--workers", metavar="N", type=whole, help="threads (default: one per core)")


def drawing_options(parser: argparse.ArgumentParser) -> None:
    """How overlays are drawn, and in which format."""
    from ...batch import FORMATS

    looks = parser.add_argument_group("how it is drawn")
    looks.add_argument("--format", metavar="NAME", choices=FORMATS, default="png", help="png, jpg or webp")
    look_options(looks)


def size(text: str) -> int | None:
    """A batch size; None for "auto"."""
    return None if text == "auto" else whole(text)


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Do it, say what became of it, and return the exit code."""
    from ...batch import StoppedError, batch
    from ..console import UsageError

    if arguments.restart and arguments.resume:
        raise UsageError("--restart begins anew and --resume goes on; choose one")
    methods, everything = _methods(arguments.methods)
    with _bar(screen) as on_progress:
        try:
            summary = batch(
                arguments.sources,
                arguments.out,
                arguments.model,
                methods,
                weights=None if arguments.weights == "none" else arguments.weights,
                layer=arguments.layer,
                options=_settings(arguments.settings),
                target=arguments.target,
                targets=arguments.targets,
                recursive=arguments.recursive,
                look=look_of(arguments),
                maps=arguments.maps,
                engine=arguments.engine,
                device=arguments.device,
                workers=arguments.workers,
                batch_size=arguments.batch_size,
                restart=arguments.restart,
                retry=arguments.retry,
                limit=arguments.limit,
                strict=arguments.strict,
                command=["saliency", *sys.argv[1:]],
                on_progress=on_progress,
            )
        except StoppedError as error:
            screen.error(error)
            return 1
    tell(summary, screen)
    return 1 if has_failed(summary, everything) else 0


def has_failed(summary: Summary, everything: bool) -> bool:
    """Whether a photo failed; where every method was asked for, one that does not apply is no failure."""
    expected = {"NotApplicableError"} if everything else set()
    return any(number for kind, number in summary.kinds.items() if kind not in expected)


def tell(summary: Summary, screen: Screen) -> None:
    """The summary: what failed, how much was done and how fast, and where it is."""
    from rich.text import Text

    from ..console import Column, visible

    if summary.failures and screen.is_terminal and not screen.quiet:
        columns = (Column("photo", "bold"), Column("method"), Column("why", "red", wraps=True))
        screen.table(columns, [(visible(source), method, visible(why)) for source, method, why in summary.failures])
        screen.say("")
    else:
        for source, method, why in summary.failures:
            screen.error(f"{visible(source)}{f' by {method}' if method else ''}: {visible(why)}")
    done = f"{summary.done} of {summary.photos} photos"
    if summary.fresh:
        speed = summary.fresh / max(summary.seconds, 1e-9)
        screen.say(f"{done}; {summary.fresh} of them now, {speed:.1f} per second, in {_clock(summary.seconds)}")
    else:
        screen.say(f"{done} were done already; nothing was missing")
    if summary.changed:
        screen.say(f"{summary.changed} photos had changed since they were listed; what was made of them is made anew")
    if summary.removed:
        named = ", ".join(map(visible, summary.removed[:3])) + (", ..." if len(summary.removed) > 3 else "")
        screen.say(f"{len(summary.removed)} photos are not there any more, and their overlays are kept: {named}")
    if summary.failed:
        kinds = ", ".join(f"{number} {kind}" for kind, number in summary.kinds.most_common())
        screen.say(Text(f"{summary.failed} photos with failures: {kinds}; --retry tries them again", "red"))
    if summary.page is not None:
        screen.say(f"the page: {visible(summary.page)}")


@contextmanager
def _bar(screen: Screen) -> Iterator[Callable[[Progress], None] | None]:
    """A bar with photos per second, time left and failures, on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(file=sys.stderr, highlight=False, markup=False, emoji=False, force_jupyter=False)
    if screen.quiet or not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}", markup=False),
        TimeRemainingColumn(),
        TextColumn("{task.fields[failures]}", style="red", markup=False),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None, rate="", failures="")
        began: list[tuple[float, int]] = []

        def show(progress: Progress) -> None:
            now = time.monotonic()
            began.append((now, progress.fresh))
            del began[1:-50]
            (first, before), passed = began[0], now - began[0][0]
            rate = f"{(progress.fresh - before) / passed:.1f}/s" if passed > 0 and first < now else ""
            failures = f"{progress.failed} failed" if progress.failed else ""
            bar.update(
                task,
                description="photos",
                completed=progress.done,
                total=progress.total,
                rate=rate,
                failures=failures,
            )

        yield show


def look_of(arguments: argparse.Namespace) -> Look:
    """How the overlays are drawn, from the options of that name."""
    from ...batch import Look

    return Look(
        format=arguments.format,
        opacity=arguments.opacity,
        colormap=arguments.colormap,
        sign=arguments.sign,
        percentile=arguments.percentile,
    )


def _methods(words: list[str] | None) -> tuple[list[str], bool]:
    """The names behind --method, and whether all were asked for."""
    names = list(dict.fromkeys(words or ["grad_cam"]))
    if EVERYTHING not in names:
        return names, False
    from ...methods import METHODS

    return list(METHODS), True


def _settings(words: list[str]) -> dict[str, Any]:
    from ..console import UsageError

    options: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise UsageError(f"--set {word}: expected NAME=VALUE, for example --set smooth=positive")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    return options


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
