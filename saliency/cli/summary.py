"""What became of each photo and method, told as a table."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.cells import cell_len
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..errors import SaliencyError
from .console import GAP, Column, Screen, as_typed, one_line, visible

_COLUMNS = (
    Column("photo", "bold"),
    Column("class", wraps=True),
    Column("prob.", justify="right"),
    Column("method"),
    Column("file", wraps=True),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one photo and method: a file, or the reason why there is none."""

    photo: Path
    method: str = ""  # none, where the photo could not be read
    target: str = ""  # what is explained, in words
    probability: str = ""
    layer: str | None = None
    file: Path | None = None
    error: Exception | None = None
    expected: bool = False  # with `--method all`, a method that says nothing about the model

    @property
    def reason(self) -> str:
        """The error in words, without the names that stand beside it in the table."""
        text = str(self.error)
        for beginning in (f"{os.fspath(self.photo)!r}", f"{self.method}:"):
            text = text.removeprefix(beginning).removeprefix(":").strip()
        if isinstance(self.error, OSError):
            text = f"cannot be written: {self.error.strerror or text}"
        elif not isinstance(self.error, SaliencyError):
            text = f"{type(self.error).__name__}: {text}"
        return as_typed(one_line(text))


def tell(outcomes: Sequence[Outcome], out: Path, sheet: Path | None, screen: Screen) -> None:
    """The table, where everything is, and which layer was read; errors on stderr where nobody sees the table."""
    if screen.quiet or not screen.is_terminal:
        for outcome in outcomes:
            if outcome.error and not outcome.expected:
                subject = " by ".join(part for part in (visible(outcome.photo), outcome.method) if part)
                screen.error(f"{subject}: {outcome.reason}")
    if not outcomes:
        return
    if screen.is_terminal and _least_width(outcomes) > screen.width:
        _tell_by_photo(outcomes, screen)
    else:
        screen.table(_COLUMNS, _rows(outcomes, grouped=screen.is_terminal))
    _tell_where(outcomes, out, sheet, screen)


def _rows(outcomes: Sequence[Outcome], grouped: bool) -> list[list[str | Text]]:
    """One row per outcome; on a terminal what is said of the photo is not said again in the rows below."""
    said: tuple[str, ...] = ()
    rows: list[list[str | Text]] = []
    for outcome in outcomes:
        about = _about(outcome)
        rows.append([*(("", "", "") if grouped and about == said else about), outcome.method, _result(outcome)])
        said = about
    return rows


def _about(outcome: Outcome) -> tuple[str, str, str]:
    return visible(outcome.photo.name), one_line(outcome.target), outcome.probability


def _result(outcome: Outcome) -> Text:
    return Text(visible(outcome.file)) if outcome.file else Text(outcome.reason, "dim" if outcome.expected else "red")


def _least_width(outcomes: Sequence[Outcome]) -> int:
    """What the table takes at least, with class names and reasons wrapped at their words."""
    names = [
        (photo, max(target.split(), key=len, default=""), probability, outcome.method, visible(outcome.file or ""))
        for outcome in outcomes
        for photo, target, probability in [_about(outcome)]
    ]
    return sum(max(map(cell_len, column)) for column in zip(*names, strict=True)) + GAP * (len(_COLUMNS) - 1)


def _tell_by_photo(outcomes: Sequence[Outcome], screen: Screen) -> None:
    """For narrow terminals: each photo and its class stand over its methods and files."""
    width = max(cell_len(outcome.method) for outcome in outcomes)
    said: tuple[str, ...] = ()
    for outcome in outcomes:
        about = _about(outcome)
        if about != said:
            screen.say(Text.assemble((about[0], "bold"), *((f"  {each}", "cyan") for each in about[1:] if each)))
        line = Table.grid(padding=(0, GAP, 0, 0))
        line.add_column(width=width)
        line.add_column(overflow="fold")
        line.add_row(outcome.method, _result(outcome))
        screen.show(Padding(line if outcome.method else _result(outcome), (0, 0, 0, GAP)))
        said = about


def _tell_where(outcomes: Sequence[Outcome], out: Path, sheet: Path | None, screen: Screen) -> None:
    made = [outcome for outcome in outcomes if outcome.file]
    failures = sum(outcome.error is not None and not outcome.expected for outcome in outcomes)
    screen.say("")
    if made:
        count = len({outcome.photo for outcome in made})
        where = "" if out == Path() else f" in {visible(out)}{os.sep}"
        screen.say(f"{_count(len(made), 'overlay')} of {_count(count, 'photo')}{where}")
    if sheet:
        screen.say(f"contact sheet: {visible(sheet)}")
    if made:
        screen.say(Text("bright: evidence for the class; the tinted rectangle: the crop that the network saw", "dim"))
    if any(outcome.layer for outcome in made):
        screen.say(Text(f"layer read by the CAMs: {_layers(made)}", "dim"))
    if failures:
        screen.say(Text(_count(failures, "failure"), "red"))


def _layers(made: Sequence[Outcome]) -> str:
    """The layer that was read, and the methods that read others."""
    read = list(dict.fromkeys((outcome.layer, outcome.method) for outcome in made if outcome.layer))
    usual = Counter(layer for layer, _ in read).most_common(1)[0][0]
    return "; ".join([str(usual), *(f"{method} at {layer}" for layer, method in read if layer != usual)])


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
