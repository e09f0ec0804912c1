"""The results of each photo and method, printed as a table."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from .console import GAP, Screen, as_typed, one_line, visible


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one photo and method: a file, or the error.

    Attributes:
        photo: The photo.
        method: The method; empty if the photo could not be read.
        target: The explained class in words.
        probability: Its probability.
        layer: The layer that the method read.
        file: The overlay; None if there is none.
        reason: Why there is no overlay.
        expected: With `--method all`, the method does not apply to the model, which is not a failure.
    """

    photo: Path
    method: str = ""
    target: str = ""
    probability: str = ""
    layer: str | None = None
    file: Path | None = None
    reason: str = ""
    expected: bool = False

    @property
    def result(self) -> Text:
        """The file, or the error in words."""
        return Text(visible(self.file)) if self.file else Text(as_typed(self.reason), "dim" if self.expected else "red")

    @property
    def about(self) -> tuple[str, str, str]:
        """Photo, class and probability, as printed."""
        return visible(self.photo.name), one_line(self.target), self.probability


def print_summary(outcomes: Sequence[Outcome], out: Path, sheet: Path | None, screen: Screen) -> None:
    """Print the table, where the files are, and which layer was read; errors on stderr unless the table shows them."""
    if screen.quiet or not screen.is_terminal:
        for outcome in outcomes:
            if outcome.reason and not outcome.expected:
                subject = " by ".join(part for part in (visible(outcome.photo), outcome.method) if part)
                screen.error(f"{subject}: {outcome.reason}")
    if not outcomes:
        return
    if screen.is_terminal:
        _print_by_photo(outcomes, screen)
    else:
        columns = [Column("photo"), Column("class"), Column("prob."), Column("method"), Column("file")]
        screen.table(columns, [(*outcome.about, outcome.method, outcome.result) for outcome in outcomes])
    _print_totals(outcomes, out, sheet, screen)


def _print_by_photo(outcomes: Sequence[Outcome], screen: Screen) -> None:
    """Print each photo and its class above its methods and files, which fits any width."""
    width = max(len(outcome.method) for outcome in outcomes)
    for (_, (photo, *target)), group in groupby(outcomes, lambda outcome: (outcome.photo, outcome.about)):
        screen.say(Text.assemble((photo, "bold"), *((f"  {part}", "cyan") for part in target if part)))
        table = Table.grid(padding=(0, GAP, 0, 0))
        table.add_column(width=width)
        table.add_column(overflow="fold")
        for outcome in group:
            table.add_row(outcome.method, outcome.result)
        screen.show(Padding(table, (0, 0, 0, GAP)))


def _print_totals(outcomes: Sequence[Outcome], out: Path, sheet: Path | None, screen: Screen) -> None:
    written = [outcome for outcome in outcomes if outcome.file]
    failures = sum(outcome.reason != "" and not outcome.expected for outcome in outcomes)
    screen.say()
    if written:
        photos = len({outcome.photo for outcome in written})
        folder = "" if out == Path() else f" in {visible(out)}{os.sep}"
        screen.say(f"{count(len(written), 'overlay')} of {count(photos, 'photo')}{folder}")
    if sheet:
        screen.say(f"contact sheet: {visible(sheet)}")
    if written:
        screen.say(Text("bright: evidence for the class; tinted rectangle: the crop that the model saw", "dim"))
    layers = list(dict.fromkeys((outcome.layer, outcome.method) for outcome in written if outcome.layer))
    if layers:
        usual = Counter(layer for layer, _ in layers).most_common(1)[0][0]
        others = [f"{method} at {layer}" for layer, method in layers if layer != usual]
        screen.say(Text(f"layer read by the CAMs: {'; '.join([str(usual), *others])}", "dim"))
    if failures:
        screen.say(Text(count(failures, "failure"), "red"))


def count(number: int, noun: str) -> str:
    """Return a number with its noun: "1 photo", "2 photos"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
