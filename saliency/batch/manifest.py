"""The manifest of a run: one line per photo and method, only ever whole, in the order of the photos."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

from ..io.atomic_write import atomic_write

Row = dict[str, Any]

MANIFEST = "manifest.jsonl"
SYNCED_EVERY = 2.0
"""Seconds between two waits for the disk: a power cut costs no more than that."""

KEYS = (
    *("index", "source", "id", "method", "target", "name", "probability", "score", "layer"),
    *("width", "height", "input_width", "input_height", "box", "settings", "sign", "units", "limit"),
    *("overlay", "photo", "heat", "map", "colormap", "seconds", "error", "error_kind"),
    *("overlay_bytes", "photo_bytes", "heat_bytes", "map_bytes"),
)
FILES = ("overlay", "photo", "heat", "map")
WHOLE = ("index", "target", "width", "height", "input_width", "input_height", *(f"{each}_bytes" for each in FILES))
NUMBERS = ("probability", "score", "limit", "seconds")


def row(**known: Any) -> Row:
    """A row with all its keys, None where nothing is known."""
    return {key: known.get(key) for key in KEYS}


@dataclass(slots=True)
class Standing:
    """What a manifest says is done.

    Attributes:
        done: The methods of each photo that have a row, as bits; -1 where one row speaks for all.
        rows: How many rows there are.
        failed: How many photos have an error, and why.
        lost: Whether there are rows to leave out: their files are gone, or they are to be tried again.
        ordered: Whether the rows stand in the order of the photos and methods.
        end: The bytes of the whole lines.
    """

    done: dict[int, int] = field(default_factory=dict)
    rows: int = 0
    failed: set[int] = field(default_factory=set)
    kinds: Counter[str] = field(default_factory=Counter)
    lost: bool = False
    ordered: bool = True
    end: int = 0
    last: tuple[int, int] = (-1, -1)

    def add(self, row: Row, place: int) -> None:
        """Take note of a row; `place` is its method's place among the methods, -1 for all."""
        index = int(row["index"])
        self.done[index] = self.done.get(index, 0) | (-1 if place < 0 else 1 << place)
        self.rows += 1
        if row["error"] is not None:
            self.failed.add(index)
            self.kinds[str(row["error_kind"])] += 1
        self.ordered = self.ordered and (index, place) > self.last
        self.last = (index, place)

    def is_done(self, index: int, place: int) -> bool:
        """Whether a photo has a row of a method."""
        return bool(self.done.get(index, 0) >> place & 1)


class Manifest:
    """The file with the rows.

    Args:
        folder: The folder of the run.
        methods: The names of the run's methods, in their order.
        photos: How many photos the run has; None for any number.
    """

    def __init__(self, folder: Path, methods: Sequence[str], photos: int | None = None) -> None:
        self.path = folder / MANIFEST
        self._folder = folder
        self._places = {name: place for place, name in enumerate(methods)}
        self._photos = photos
        self._file = -1
        self._synced = time.monotonic()
        self.standing = Standing()

    def place(self, row: Row) -> int:
        """The place of a row's method among the run's methods; -1 for a row that speaks for all of them."""
        return self._places.get(str(row["method"]), -1)

    def read(self, *, again: bool = False, changed: Container[int] = ()) -> None:
        """Read what is there, and leave out what has to be done again, what is none of the run's, and what is damaged.

        Args:
            again: Whether rows with errors are left out too.
            changed: Photos whose rows are left out, because they tell of another file.
        """
        self.standing = standing = Standing()
        seen: dict[str, int] = {}
        told: set[tuple[int, int]] = set()
        kept = bytearray()
        for found, end in self._whole():
            standing.end = end
            good = self._is_ours(found) and not (again and found["error"] is not None) and self._has_files(found, seen)
            good = good and found["index"] not in changed
            kept.append(good and (found["index"], self.place(found)) not in told)
            if kept[-1]:
                told.add((found["index"], self.place(found)))
                standing.add(found, self.place(found))
        standing.lost = not all(kept)
        if standing.lost:
            self._rewrite(compress(self.rows(), kept))
        elif self.path.is_file() and self.path.stat().st_size != standing.end:
            os.truncate(self.path, standing.end)

    def open(self) -> None:
        """Open it for more rows, and cut off what a crash left of a line."""
        flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_BINARY", 0)
        self._file = os.open(self.path, flags, 0o666)
        if os.fstat(self._file).st_size != self.standing.end:
            os.ftruncate(self._file, self.standing.end)
        os.lseek(self._file, 0, os.SEEK_END)

    def append(self, rows: Iterable[Row]) -> None:
        """Add rows: all of them, or none where the disk is full. Raises OSError then."""
        rows = list(rows)
        data = b"".join(map(encoded, rows))
        try:
            _write(self._file, data)
        except BaseException:
            with suppress(OSError):
                os.ftruncate(self._file, self.standing.end)
                os.lseek(self._file, 0, os.SEEK_END)
            raise
        self.standing.end += len(data)
        for each in rows:
            self.standing.add(each, self.place(each))
        if time.monotonic() - self._synced > SYNCED_EVERY:
            self.sync()

    def sync(self) -> None:
        """Wait until the disk has it."""
        os.fsync(self._file)
        self._synced = time.monotonic()

    def sort(self) -> None:
        """Bring the rows into the order of the photos, where what was done again stands behind; no more can follow."""
        self.close()
        if self.standing.ordered:
            return
        rows = [row for row, _ in self._whole()]
        rows.sort(key=lambda row: (int(row["index"]), self.place(row)))
        self._rewrite(rows)
        self.standing.ordered = True

    def close(self) -> None:
        """No more rows come."""
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)

    def rows(self) -> Iterator[Row]:
        """The rows, one by one."""
        return (row for row, _ in self._whole())

    def _whole(self) -> Iterator[tuple[Row, int]]:
        """The rows up to the first that is not whole, each with the number of bytes to its end."""
        end = 0
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            for line in file:
                end += len(line)
                found = _parsed(line)
                if found is None:
                    return
                yield found, end

    def _rewrite(self, rows: Iterable[Row]) -> None:
        with atomic_write(self.path) as temporary, temporary.open("wb") as file:
            for each in rows:
                file.write(encoded(each))
            file.flush()
            os.fsync(file.fileno())
        self.standing.end = self.path.stat().st_size

    def _is_ours(self, row: Row) -> bool:
        """Whether a row is of this run, and such as a run writes; others were put there by hand."""
        if any(key not in row or not _fits(key, row[key]) for key in KEYS) or row["index"] is None:
            return False
        # Only a photo that could not be read has a row without a method.
        is_named = row["method"] in self._places if row["method"] is not None else row["error"] is not None
        return is_named and row["index"] >= 0 and (self._photos is None or row["index"] < self._photos)

    def _has_files(self, row: Row, seen: dict[str, int]) -> bool:
        """Whether the files that a row names are there as they were written. The photo of many is looked up once."""
        for key in FILES:
            name = row[key]
            if name is None:
                continue
            size = seen[name] if name in seen else _size(f"{self._folder}/{name}")
            if key == "photo":
                seen[name] = size
            if size != row[f"{key}_bytes"]:
                return False
        return True


def encoded(row: Row) -> bytes:
    """A row as a line."""
    return (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "backslashreplace")


def _parsed(line: bytes) -> Row | None:
    if not line.endswith(b"\n"):
        return None
    try:
        found = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.keys() >= {"index", "method", "error", "error_kind"} else None


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _fits(key: str, value: object) -> bool:
    """Whether a value of a row is of the kind that its key has."""
    if value is None:
        return True
    if key in WHOLE:
        return type(value) is int
    if key in NUMBERS:
        return type(value) in (int, float)
    if key == "box":
        return isinstance(value, list) and len(value) == 4 and all(type(each) in (int, float) for each in value)
    return isinstance(value, dict if key == "settings" else str)


def _size(path: str) -> int:
    """The bytes of a file; -1 where there is none."""
    try:
        return os.stat(path).st_size  # noqa: PTH116 - tens of thousands of them
    except OSError:
        return -1


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
