"""What the commands say: tables and progress on a terminal, plain lines in a pipe or a file, errors on stderr.

On a terminal tables fit its width. In a pipe every row is one line, whole, in columns, without colours: nothing is cut
off and nothing wraps, so that `grep` and `cut` find what they look for.
"""

from __future__ import annotations

import io
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TextIO

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ..errors import SaliencyError, SaliencyWarning

GAP = 2  # the space between columns

_TYPED = {
    r'\b(?:pass|use) smooth="(\w+)"': r"use --set smooth=\1",
    r"\bweights=None": "--weights none",
    r'\bweights="([^"]+)"': r"--weights \1",
    r'\bsign="(\w+)"': r"--sign \1",
    r"\blayer=\.\.\.": "--layer",
}


class UsageError(SaliencyError):
    """What was typed cannot be done; nothing has been done yet."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    title: str
    style: str = ""
    justify: Literal["left", "right"] = "left"
    wraps: bool = False
    """Whether its text may go on in the next line, word by word; names keep to one line as long as there is room."""


@dataclass
class Screen:
    """Where a command speaks.

    Attributes:
        quiet: Nothing is said but errors.
        subject: What is being worked on; warnings are said of it.
    """

    quiet: bool = False
    subject: str = ""
    _warned: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._out = _console(sys.stdout)
        self._err = _console(sys.stderr)

    @property
    def is_terminal(self) -> bool:
        """Whether somebody looks at the tables."""
        return self._out.is_terminal

    @property
    def width(self) -> int:
        """The width of the terminal in characters."""
        return self._out.width

    def say(self, *parts: str | Text) -> None:
        """A line on stdout. It wraps on a terminal and nowhere else."""
        if not self.quiet:
            self._out.print(*(_text(part) for part in parts), soft_wrap=not self.is_terminal)

    def error(self, message: object) -> None:
        """A line on stderr, also when quiet."""
        line = Text.assemble(("saliency: ", "bold red"), as_typed(one_line(message)))
        self._err.print(line, soft_wrap=True)

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[str | Text]]) -> None:
        """Rows under titles."""
        if self.quiet:
            return
        if not self.is_terminal:
            for line in aligned([each.title for each in columns], rows):
                self._out.print(line, soft_wrap=True)
            return
        table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="dim")
        for each, width in zip(columns, _widths(columns, rows, self.width), strict=True):
            table.add_column(each.title, style=each.style, justify=each.justify, width=width, overflow="fold")
        for row in rows:
            table.add_row(*(_text(cell) for cell in row))
        self._out.print(table)

    def show(self, drawing: RenderableType) -> None:
        """What the caller has composed for a terminal."""
        if not self.quiet:
            self._out.print(drawing)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """A sign of life while something takes its time, on a terminal."""
        shown = not self.quiet and self._err.is_terminal
        with self._err.status(what) if shown else nullcontext():
            yield

    @contextmanager
    def progress(self, total: int) -> Iterator[Callable[[str], None]]:
        """A bar on a terminal where there is more than one thing to do; called with the name of the next one."""
        if self.quiet or total < 2 or not self._err.is_terminal:
            yield lambda name: None
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._err, transient=True) as bar:
            task = bar.add_task("", total=total)
            started = False

            def begin(name: str) -> None:
                nonlocal started
                bar.update(task, description=name[:40], advance=1 if started else 0)
                started = True

            yield begin

    @contextmanager
    def noting_warnings(self) -> Iterator[None]:
        """Warnings of the block are said after it, each once, in one line and without source code."""
        with warnings.catch_warnings():
            warnings.simplefilter("always", SaliencyWarning)
            warnings.showwarning = self._note
            try:
                yield
            finally:
                self._say_warnings()

    def _note(self, message: Warning | str, *where: Any, **more: Any) -> None:
        subjects = self._warned.setdefault(as_typed(one_line(message)), [])
        if self.subject not in subjects:
            subjects.append(self.subject)

    def _say_warnings(self) -> None:
        for message, subjects in self._warned.items() if not self.quiet else ():
            named = [each for each in subjects if each]
            others = f" and {len(named) - 2} more" if len(named) > 2 else ""
            of = f"{', '.join(named[:2])}{others}: " if named else ""
            self._err.print(Text.assemble(("warning: ", "bold yellow"), of, message), soft_wrap=True)
        self._warned.clear()


def aligned(titles: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> list[str]:
    """Each row as one line, the columns two spaces apart, nothing cut off, no space at the end."""
    plain = [list(titles), *([_text(cell).plain for cell in row] for row in rows)]
    widths = [max(map(cell_len, column)) for column in zip(*plain, strict=True)]
    return ["  ".join(c + " " * (w - cell_len(c)) for c, w in zip(row, widths, strict=True)).rstrip() for row in plain]


def visible(name: object) -> str:
    """A name as it may be printed: what a terminal would obey, or cannot show, is written out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(name))


def one_line(message: object) -> str:
    """A message of several lines as one."""
    return visible(" ".join(str(message).split()))


def as_typed(message: str) -> str:
    """A message that names options as they are written in Python, with the options of the command line."""
    for pattern, option in _TYPED.items():
        message = re.sub(pattern, option, message)
    return message


def _console(stream: TextIO) -> Console:
    # A name that the stream's encoding lacks is printed with a question mark rather than not at all.
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    # Inside a notebook's kernel, rich would turn each line into a page of its own.
    return Console(file=stream, highlight=False, markup=False, emoji=False, force_jupyter=False)


def _text(part: str | Text) -> Text:
    return part if isinstance(part, Text) else Text(part)


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[str | Text]], width: int) -> list[int]:
    """The columns' widths on a terminal: what they need; where that is too much, the wrapping ones give way first."""
    cells = [[_text(row[i]).plain for row in rows] + [each.title] for i, each in enumerate(columns)]
    needed = [max(map(cell_len, column)) for column in cells]
    least = [
        max(cell_len(word) for cell in column for word in [*cell.split(), ""]) if each.wraps else need
        for each, column, need in zip(columns, cells, needed, strict=True)
    ]
    room = width - GAP * (len(columns) - 1)
    for lowest in (least, [min(need, 10) for need in needed]):
        excess = sum(needed) - room
        if excess > 0:
            needed = _shrunk(needed, lowest, excess)
    return needed


def _shrunk(widths: list[int], lowest: list[int], excess: int) -> list[int]:
    """The widths, less the excess: always the one that is furthest above its lowest gives way."""
    widths = list(widths)
    for _ in range(excess):
        at = max(range(len(widths)), key=lambda i: widths[i] - lowest[i])
        if widths[at] <= lowest[at]:
            break
        widths[at] -= 1
    return widths
