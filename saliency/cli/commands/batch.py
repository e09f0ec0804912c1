"""`saliency batch`: explain a folder of photos with `saliency.batch.batch`, and print a summary.

Modules that import torch are imported later, since a finished run needs none of them.
"""

from __future__ import annotations

import argparse
import sys

from rich.table import Column
from rich.text import Text

from ...batch import StoppedError, Summary, batch
from ..console import Screen, count, visible
from ..options import ALL, METHOD, overlay_style


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Run the batch, print its summary, and return the exit code."""
    with screen.progress() as show:
        try:
            summary = batch(
                arguments.sources,
                arguments.out,
                arguments.model,
                _methods(arguments.methods),
                weights=arguments.weights,
                layer=arguments.layer,
                options=dict(arguments.settings),
                target=arguments.target,
                targets=arguments.targets,
                recursive=arguments.recursive,
                style=overlay_style(arguments),
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
                on_progress=lambda progress: show(progress.done, progress.total, progress.failed),
            )
        except StoppedError as error:
            screen.error(error)
            return 1
    print_summary(summary, screen)
    # With --method all, a method that does not apply to the model is not a failure.
    expected = {"NotApplicableError"} if ALL in (arguments.methods or ()) else set()
    return 1 if summary.kinds.keys() - expected else 0


def print_summary(summary: Summary, screen: Screen) -> None:
    """Print the failures, the number of photos, the speed and the path of the page."""
    if summary.failures and screen.is_terminal and not screen.quiet:
        columns = (Column("photo", style="bold"), Column("method"), Column("reason", style="red"))
        screen.table(columns, [(visible(source), method, visible(why)) for source, method, why in summary.failures])
        screen.say("")
    else:
        for source, method, why in summary.failures:
            screen.error(f"{visible(source)}{f' by {method}' if method else ''}: {visible(why)}")
    done = f"{summary.done} of {summary.images} photos"
    if summary.fresh:
        speed = f"{_duration(summary.seconds)}, {summary.fresh / max(summary.seconds, 1e-9):.1f} per second"
        screen.say(f"{done} done, {summary.fresh} in this run: {speed}")
    else:
        screen.say(f"{done} done by earlier runs; nothing to do")
    if summary.changed:
        screen.say(f"changed since the last run and explained again: {count(summary.changed, 'photo')}")
    if summary.removed:
        named = ", ".join(map(visible, summary.removed[:3])) + (", ..." if len(summary.removed) > 3 else "")
        screen.say(f"removed since the last run, overlays kept: {count(len(summary.removed), 'photo')}, {named}")
    if summary.failed:
        kinds = ", ".join(f"{number} {kind}" for kind, number in summary.kinds.most_common())
        screen.say(Text(f"{count(summary.failed, 'photo')} with failures: {kinds}; --retry tries them again", "red"))
    screen.say(f"the page: {visible(summary.page)}")


def _methods(words: list[str] | None) -> list[str]:
    """Return the methods given by --method, without duplicates."""
    names = list(dict.fromkeys(words or [METHOD]))
    if ALL not in names:
        return names
    from ...methods import METHODS

    return list(METHODS)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
