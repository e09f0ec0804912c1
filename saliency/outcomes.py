"""What became of each photo and method, told as a table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from saliency.console import Column, Screen, as_typed, one_line, visible
from saliency.errors import SaliencyError

_COLUMNS = (
    Column("photo", "bold"),
    Column("class", wraps=True),
    Column("prob.", right=True),
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
    screen.table(_COLUMNS, list(_rows(outcomes, grouped=screen.is_terminal)))
    _tell_where(outcomes, out, sheet, screen)


def _rows(outcomes: Sequence[Outcome], grouped: bool) -> list[list[str | Text]]:
    """One row per outcome; on a terminal what is said of the photo is not said again in the rows below."""
    rows: list[list[str | Text]] = []
    said: list[str] = []
    for outcome in outcomes:
        about = [visible(outcome.photo.name), one_line(outcome.target), outcome.probability]
        result = Text(visible(outcome.file)) if outcome.file else Text(outcome.reason, _style(outcome))
        rows.append([*([""] * 3 if grouped and about == said else about), outcome.method, result])
        said = about
    return rows


def _style(outcome: Outcome) -> str:
    return "dim" if outcome.expected else "red"


def _tell_where(outcomes: Sequence[Outcome], out: Path, sheet: Path | None, screen: Screen) -> None:
    made = [outcome for outcome in outcomes if outcome.file]
    photos = len({outcome.photo for outcome in made})
    failed = len({outcome.photo for outcome in outcomes if outcome.error and not outcome.expected})
    if made:
        screen.say(f"{_count(len(made), 'overlay')} of {_count(photos, 'photo')} in {visible(out)}{os.sep}")
    if sheet:
        screen.say(f"contact sheet: {visible(sheet)}")
    layers = dict.fromkeys(outcome.layer for outcome in made if outcome.layer)
    if layers:
        screen.say(Text(f"layer: {'; '.join(layers)}", "dim"))
    if failed:
        screen.say(Text(f"{_count(failed, 'photo')} with a failure", "red"))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
