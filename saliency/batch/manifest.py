"""The manifest: one row per image and method, as JSON lines."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import compress, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from ..io.atomic_write import atomic_write, durable_write, inside

Row = dict[str, Any]

MANIFEST = "manifest.jsonl"
CSV = "manifest.csv"
LINES = 100  # decoded at once
_ERRORS = "backslashreplace"  # for undecodable bytes of paths

FILES = ("overlay", "thumbnail", "heat", "map", "card", "card_json")
_SIZES = tuple(f"{name}_bytes" for name in FILES)
COLUMNS = (
    *("index", "source", "id", "method", "target", "target_box", "name", "probability", "score", "layer"),
    *("width", "height", "input_width", "input_height", "box", "range", "settings", "coverage", "residual"),
    *("ledger", "shares", "trust", "sign", "units", "floor", "limit", *FILES, "colormap", "seconds", "repeated"),
    *("error", "error_kind"),
    *_SIZES,
)
"""The columns. The boxes and `range` are lists, `settings`, `ledger`, `shares` and `trust` objects. Every value may be
None."""


def make_row(**values: Any) -> Row:
    """Return a row with all columns; unknown values are None."""
    return {column: values.get(column) for column in COLUMNS}


class Manifest:
    """Manifest file with one JSON line per row.

    Args:
        folder: Folder of the run.
        methods: Names of the methods in the folder, in order.

    Attributes:
        path: The file.
        rows: The kind of error of each row, None for a success, by (image number, index of the method). The index is -1
            in the row of an image that could not be read, which has no method.
    """

    def __init__(self, folder: Path, methods: Sequence[str]) -> None:
        self.path = folder / MANIFEST
        self._methods = {name: index for index, name in enumerate(methods)}
        self.rows: dict[tuple[int, int], str | None] = {}

    def is_done(self, index: int, method: str) -> bool:
        """Return whether an image has a row for a method."""
        return (index, self._methods[method]) in self.rows or (index, -1) in self.rows

    def failures(self, methods: Iterable[str]) -> dict[tuple[int, int], str]:
        """Return the failed rows of some methods, and of images that could not be read, with the kind of error."""
        chosen = {-1, *(self._methods[method] for method in methods)}
        return {key: kind for key, kind in self.rows.items() if kind is not None and key[1] in chosen}

    def is_sorted(self) -> bool:
        """Return whether the rows are in the order of images and methods."""
        return list(self.rows) == sorted(self.rows)

    def read(self, *, retry: Container[str | None] = (), changed: Container[int] = ()) -> None:
        """Read the file. Remove all rows from the first damaged row on, and rows whose files are missing.

        Args:
            retry: Methods whose rows with errors are removed too; None for images that could not be read.
            changed: Numbers of the images whose rows are removed.
        """
        self.rows = {}
        keep = bytearray()
        end = 0
        out, files, sizes = str(self.path.parent), itemgetter(*FILES), itemgetter(*_SIZES)
        for row, line in read_rows(self.path):
            end += len(line)
            is_kept = row["index"] not in changed and (row["error"] is None or row["method"] not in retry)
            for file, size in zip(files(row), sizes(row), strict=True):
                if file is not None and _size(f"{out}/{file}") != size:
                    is_kept = False
            keep.append(is_kept)
            if is_kept:
                self._count(row)
        if self.path.is_file() and self.path.stat().st_size != end:
            os.truncate(self.path, end)
        if not all(keep):
            durable_write(self.path, compress((line for _, line in read_rows(self.path)), keep))

    def append(self, rows: Sequence[Row]) -> None:
        """Append the rows of an image. A line that cannot be written whole is removed by the next `read`."""
        with self.path.open("ab") as file:
            file.write(b"".join(map(encode, rows)))
        for row in rows:
            self._count(row)

    def sort(self) -> None:
        """Sort the rows by image and method, since a retry appends rows at the end."""
        if not self.is_sorted():
            self.rows = dict(sorted(self.rows.items()))
            rows = sorted(read_rows(self.path), key=lambda row: self._key(row[0]))
            durable_write(self.path, (line for _, line in rows))

    def _count(self, row: Row) -> None:
        self.rows[self._key(row)] = None if row["error"] is None else str(row["error_kind"])

    def _key(self, row: Row) -> tuple[int, int]:
        return row["index"], self._methods.get(row["method"], -1)


def _size(path: str) -> int:
    """Return the size of a file in bytes; -1 if it does not exist."""
    try:
        return os.stat(path).st_size  # noqa: PTH116 - called for every file
    except OSError:
        return -1


def read_rows(path: Path) -> Iterator[tuple[Row, bytes]]:
    """Yield the rows before the first damaged line, each with its line; none if there is no file."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        while lines := list(islice(file, LINES)):
            rows = _decode(lines)
            yield from zip(rows, lines, strict=False)
            if len(rows) < len(lines):
                return


def _decode(lines: Sequence[bytes]) -> list[Row]:
    """Return the rows of the lines before the first damaged line. Parsing all lines in one call is fastest."""
    with suppress(ValueError):
        rows: list[Any] = json.loads(f"[{b','.join(lines).decode()}]")
        is_row = [isinstance(row, dict) and tuple(row) == COLUMNS for row in rows]
        if len(rows) == len(lines) and all(is_row) and lines[-1].endswith(b"\n"):
            return rows
    half = len(lines) // 2
    first = _decode(lines[:half]) if half else []
    return [*first, *_decode(lines[half:])] if 0 < half == len(first) else first


def encode(row: Row) -> bytes:
    """Encode a row as a line."""
    return (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", _ERRORS)


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Row]) -> Path:
    """Write columns of rows as CSV, and return the path.

    Lists and dictionaries are JSON text. A text that a spreadsheet would run as a formula begins with an apostrophe.
    """
    with atomic_write(path) as temporary, temporary.open("w", newline="", encoding="utf-8", errors=_ERRORS) as file:
        table = csv.writer(file)
        table.writerow(columns)
        table.writerows([_cell(row[name]) for name in columns] for row in rows)
    return path


def manifest_csv(folder: Path) -> Path:
    """Write the manifest of a folder as CSV, and return its path."""
    return write_csv(inside(folder, CSV), COLUMNS, (row for row, _ in read_rows(folder / MANIFEST)))


def _cell(value: object) -> object:
    cell = json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else value
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell
