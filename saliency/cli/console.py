"""Console output: tables and progress on a terminal, plain lines in a pipe or file, errors on stderr.

On a terminal, tables fit its width. In a pipe, each row is one complete line with aligned columns and without colours,
so that `grep` and `cut` work.
"""

from __future__ import annotations

import io
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import PurePath
from typing import Any, NoReturn, TextIO

from rich import progress as bars
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..batch import Progress
from ..errors import CALL, SaliencyError, SaliencyWarning, plural, visible
from ..tables import Table as Measurements

UNLIMITED = 100_000  # width of tables in a pipe or file


class UsageError(SaliencyError):
    """The command line is invalid. Nothing has been written yet."""


class Screen:
    """Standard output and standard error of one command.

    Args:
        quiet: Whether only errors are printed.

    Attributes:
        is_terminal: Whether standard output is a terminal.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self._out = _console(sys.stdout)
        self._out.quiet = quiet
        self._err = _console(sys.stderr)
        self.is_terminal = self._out.is_terminal

    def say(self, line: str | Text = "", *, cut: bool = False) -> None:
        """Print lines. On a terminal they are wrapped, or cut to its width."""
        if cut and self.is_terminal:
            self._out.print(line, no_wrap=True, overflow="ellipsis")
        else:
            self._out.print(line, soft_wrap=not self.is_terminal)

    def error(self, message: object) -> None:
        """Print a message on standard error, even if `quiet`."""
        line = Text.assemble(("saliency: ", "bold red"), one_line(message))
        self._err.print(line, soft_wrap=not self._err.is_terminal)

    def say_left_out(self, images: int, others: Mapping[str, int]) -> None:
        """Print how many images that saliency wrote and other files, by suffix, were left out, if any."""
        if images:
            self.say(f"left out, since saliency wrote them: {plural(images, 'image')}")
        if others:
            most = sorted(others.items(), key=lambda kind: (-kind[1], kind[0]))[:4]
            kinds = ", ".join(f"{visible(kind)} {count}" for kind, count in most) + ", ..." * (len(others) > len(most))
            self.say(f"left out: {plural(sum(others.values()), 'other file')} ({kinds})")

    def table(self, titles: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> None:
        """Print a table with headers, two spaces between its columns, and no trailing spaces."""
        table = Table(*titles, box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        for column in table.columns:
            column.overflow = "fold"
        for row in rows:
            table.add_row(*row)
        if self.is_terminal:
            self._out.print(table)
            return
        for line in self._out.render_lines(table, self._out.options.update_width(UNLIMITED)):
            self.say("".join(segment.text for segment in line).rstrip())

    def show(self, table: Measurements[Any]) -> None:
        """Print a table of the library, whose lines are cut to the width of a terminal, and its notes."""
        if table:
            self.say(str(table.of(table)), cut=True)
        if table.notes:
            self.say("\n".join(["", *map(visible, table.notes)]))

    @contextmanager
    def waiting(self, activity: str) -> Iterator[None]:
        """Show a spinner on a terminal during the block."""
        with nullcontext() if self.quiet or not self._err.is_terminal else self._err.status(activity):
            yield

    @contextmanager
    def progress(self) -> Iterator[Callable[[Progress], None]]:
        """Show a progress bar on a terminal. The yielded function updates it."""
        failures = bars.TextColumn("{task.fields[failures]}", style="red")
        columns = ("images", bars.BarColumn(), bars.MofNCompleteColumn(), bars.TimeRemainingColumn(), failures)
        is_hidden = self.quiet or not self._err.is_terminal
        with bars.Progress(*columns, console=self._err, transient=True, disable=is_hidden) as bar:
            task = bar.add_task("", total=None, failures="")

            def update(now: Progress) -> None:
                text = f"{now.failed} failed" if now.failed else ""
                if now.note and not self.quiet:
                    self._err.print(now.note, soft_wrap=True)
                bar.update(task, completed=now.done, total=now.total, failures=text, visible=now.total > 1)

            yield update

    @contextmanager
    def collected_warnings(self) -> Iterator[None]:
        """Collect the warnings of the block, and print each once at its end, on one line, with its images."""
        subjects: dict[str, list[str]] = {}

        def collect(message: Warning | str, *_: Any, **__: Any) -> None:
            named = subjects.setdefault(one_line(message), [])
            if (subject := visible(getattr(CALL.get(None), "subject", ""))) and subject not in named:
                named.append(subject)

        with warnings.catch_warnings():
            warnings.simplefilter("always", SaliencyWarning)
            warnings.filterwarnings("ignore", module="pydicom")  # warnings about details of the format
            warnings.showwarning = collect
            try:
                yield
            finally:
                for message, named in subjects.items() if not self.quiet else ():
                    others = f" and {len(named) - 2} more" if len(named) > 2 else ""
                    images = f"{', '.join(PurePath(name).name for name in named[:2])}{others}: " if named else ""
                    self._err.print(Text.assemble(("warning: ", "bold yellow"), images, message), soft_wrap=True)


_IN_PYTHON = {
    r'\bpass (\w+)="(\w+)"': r"use --set \1=\2",
    r'\bsign="(\w+)"': r"--set sign=\1",
    r"\btarget=lambda output: .*?, or (?=saliency)|, or a function of the output as the target": "",
    r"(\btarget=)?\bsaliency\.box\(index=(\d+)\)": r"--target box:\2",
    r"\bsaliency\.region\(label\)": "--target region:CLASS",
    r"\bsaliency\.text\(\.\.\.\)": '--target "text:..."',
    r"\brange=\(([-.\w]+), ([-.\w]+)\)": r"range=\1,\2",
    r"\bpreprocess=saliency\.Preprocess\(([^()]*)\)": r"--preprocess \1",
    r"\bset model\.categories to the list of names": "pass --classes FILE",
    r"\bas categories=": "by --classes FILE",
    r"\bpass (layer|preprocess|others)=(\[...\])?": r"pass --\1",
    r"\bpass it as forward_args=.*?, or images by name, .*": "pass each input by its name, as in rgb=FILE depth=FILE",
    r"\bmasks=\.\.\. of shape \(N, H, W\)": "--objects FOLDER",
    r"\bpass layout=, a": "set layout of the model in its file to a",
    r"\bpass read=, a function from .*": "wrap it in a model that returns boxes, scores and labels as torchvision does",
    r", or explain the number: saliency\.value.*| or saliency\.similarity\(reference\) as the target": "",
    r"\bsaliency\.load\('([^']+)'\)": r"--model \1",
}
"""Advice in Python in the messages of the library, and how the command line writes it."""


def one_line(message: object) -> str:
    """Return a message as one printable line, with its advice for the command line."""
    text = visible(" ".join(str(message).split()))
    for pattern, written in _IN_PYTHON.items():
        text = re.sub(pattern, written, text)
    return text


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        """Raise BrokenPipeError; rich exits instead, as the code of a model can."""
        raise BrokenPipeError


def _console(stream: TextIO) -> Console:
    # Print a question mark for characters that the encoding of the stream does not support.
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    # In a notebook kernel, rich would display each line as a separate HTML output.
    return _Console(file=stream, highlight=False, markup=False, emoji=False, force_jupyter=False)
