"""The manifest of a batch folder, read row by row.

A page is made of what the manifest holds at that moment, so also of a run that still goes on or was interrupted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from ...errors import ExplanationError

FORMAT = "saliency batch 1"

Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Photo:
    """The rows of one photo, one per method, in the order of the manifest."""

    index: int
    rows: tuple[Row, ...]

    @property
    def failed(self) -> bool:
        """Whether some method gave an error, or the photo itself."""
        return any(row.get("error") is not None for row in self.rows)


def read_about(folder: Path) -> Row:
    """What `manifest.json` says of the run: model, versions, methods, command.

    Raises:
        ExplanationError: The folder is none of `saliency batch`, or of a format that this version does not know.
    """
    path = folder / "manifest.json"
    try:
        about = _parsed(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        hint = "the folder that saliency batch --out wrote is expected"
        raise ExplanationError(f"no manifest.json in {folder}; {hint}") from error
    except ValueError as error:
        raise ExplanationError(f"{path} is not JSON in UTF-8: {error}; run saliency batch with --restart") from error
    found = about.get("format") if isinstance(about, dict) else None
    if not isinstance(about, dict) or found != FORMAT:
        raise ExplanationError(
            f'{path} has the format {found!r}, expected "{FORMAT}"; '
            "make the page with the version of saliency that made the folder"
        )
    return about


def read_photos(folder: Path) -> Iterator[Photo]:
    """The photos of `manifest.jsonl` in its order; none where the run has not written any yet.

    Raises:
        ExplanationError: A line other than an unfinished last one is no row.
    """
    for index, rows in groupby(_rows(folder / "manifest.jsonl"), key=_index):
        yield Photo(index, tuple(rows))


def _index(row: Row) -> int:
    index = row["index"]
    return index if isinstance(index, int) else -1


def _rows(path: Path) -> Iterator[Row]:
    if not path.exists():
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            # A run that is killed may leave the beginning of a line, which the next run cuts off.
            if not line.endswith(b"\n"):
                return
            try:
                row = _parsed(line.decode("utf-8"))
            except ValueError as error:
                raise ExplanationError(f"{path}, line {number} is not JSON in UTF-8: {error}") from error
            if not isinstance(row, dict) or not isinstance(row.get("index"), int):
                raise ExplanationError(f'{path}, line {number} is no row of a manifest: it has no number as "index"')
            yield row


def _parsed(text: str) -> object:
    """JSON in which NaN and infinity, which a browser's parser refuses, are null."""
    parsed: object = json.loads(text, parse_constant=lambda name: None, parse_float=_finite)
    return parsed


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None
