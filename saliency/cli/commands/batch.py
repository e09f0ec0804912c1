"""`saliency batch`: turn a folder of photos into a folder of overlays. `saliency.batch.batch` does it.

Only light modules are imported at once: a finished run is recognised without torch.
"""

from __future__ import annotations

import argparse
import sys

from rich.table import Column
from rich.text import Text

from ...batch import StoppedError, Summary, batch
from ..console import Screen, visible
from ..options import METHOD, overlay_style

ALL = "all"


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Run the batch, print its summary, and return the exit code."""
    methods, everything = _methods(arguments.methods)
    with screen.progress() as show:
        try:
            summary = batch(
                arguments.sources,
                arguments.out,
                arguments.model,
                methods,
                weights=arguments.weights,
                layer=arguments.layer,
                options=dict(arguments.settings),
                target=arguments.target,
                targets=arguments.targets,
                recursive=arguments.recursive,
                look=overlay_style(arguments),
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
    tell(summary, screen)
    return 1 if has_failed(summary, everything) else 0


def has_failed(summary: Summary, everything: bool) -> bool:
    """Whether a photo failed; where every method was asked for, one that does not apply is no failure."""
    expected = {"NotApplicableError"} if everything else set()
    return any(number for kind, number in summary.kinds.items() if kind not in expected)


def tell(summary: Summary, screen: Screen) -> None:
    """The summary: what failed, how much was done and how fast, and where it is."""
    if summary.failures and screen.is_terminal and not screen.quiet:
        columns = (Column("photo", style="bold"), Column("method"), Column("reason", style="red"))
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


def _methods(words: list[str] | None) -> tuple[list[str], bool]:
    """The names behind --method, and whether all were asked for."""
    names = list(dict.fromkeys(words or [METHOD]))
    if ALL not in names:
        return names, False
    from ...methods import METHODS

    return list(METHODS), True


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
