"""The manifest: one row per image and method, as JSON lines and as Parquet."""

from __future__ import annotations

import importlib
import json
import os
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from itertools import compress, islice
from pathlib import Path
from typing import Any

from ..io.atomic_write import atomic_write

Row = dict[str, Any]

MANIFEST = "manifest.jsonl"
PARQUET = "manifest.parquet"
SYNC_INTERVAL = 2.0
"""Seconds between two syncs to disk, which limit the rows that a power failure loses."""
PARQUET_ROWS = 10_000
"""Rows per Parquet row group."""

FILES = ("overlay", "photo", "heat", "map")
COLUMNS: dict[str, type] = {
    "index": int,
    "source": str,
    "id": str,
    "method": str,
    "target": int,
    "name": str,
    "probability": float,
    "score": float,
    "layer": str,
    "width": int,
    "height": int,
    "input_width": int,
    "input_height": int,
    "box": list,
    "settings": dict,
    "sign": str,
    "units": str,
    "limit": float,
    **dict.fromkeys(FILES, str),
    "colormap": str,
    "seconds": float,
    "error": str,
    "error_kind": str,
    **{f"{name}_bytes": int for name in FILES},
}
"""The columns and their types; every value may be None."""


def make_row(**known: Any) -> Row:
    """Return a row with all columns; unknown values are None."""
    return {column: known.get(column) for column in COLUMNS}


@dataclass(slots=True)
class ManifestState:
    """Summary of the rows of a manifest.

    Attributes:
        done: For each image, the methods that have a row, as bits; -1 if a single row covers all methods.
        rows: Number of rows.
        failed: Numbers of the images with an error.
        kinds: Number of failed rows by class of error.
        is_sorted: Whether the rows are in the order of images and methods.
        end: Total size of the complete lines, in bytes.
        last: Image number and method index of the last row.
    """

    done: dict[int, int] = field(default_factory=dict)
    rows: int = 0
    failed: set[int] = field(default_factory=set)
    kinds: Counter[str] = field(default_factory=Counter)
    is_sorted: bool = True
    end: int = 0
    last: tuple[int, int] = (-1, -1)

    def add(self, row: Row, method: int) -> None:
        """Count a row. `method` is the index of its method, or -1 for a row that covers all methods."""
        index = int(row["index"])
        self.done[index] = self.done.get(index, 0) | (-1 if method < 0 else 1 << method)
        self.rows += 1
        if row["error"] is not None:
            self.failed.add(index)
            self.kinds[str(row["error_kind"])] += 1
        self.is_sorted = self.is_sorted and (index, method) > self.last
        self.last = (index, method)

    def is_done(self, index: int, method: int) -> bool:
        """Return whether an image has a row for a method."""
        return bool(self.done.get(index, 0) >> method & 1)


class Manifest:
    """Manifest file with one JSON line per row.

    Args:
        folder: Folder of the run.
        methods: Names of the methods, in order.
        images: Number of images, to validate row indices; None for no limit.
    """

    def __init__(self, folder: Path, methods: Sequence[str], images: int | None = None) -> None:
        self.path = folder / MANIFEST
        self._folder = folder
        self._methods = {name: index for index, name in enumerate(methods)}
        self._images = images
        self._file = -1
        self._synced = time.monotonic()
        self.state = ManifestState()

    def _method(self, row: Row) -> int:
        """Return the index of a row's method; -1 for a row that covers all methods."""
        return self._methods.get(str(row["method"]), -1)

    def read(self, *, retry: bool = False, changed: Container[int] = ()) -> None:
        """Read the file, and remove damaged rows, rows of other runs and rows whose files are missing.

        Args:
            retry: Whether rows with errors are removed too.
            changed: Numbers of the images whose rows are removed.
        """
        self.state = state = ManifestState()
        size = lru_cache(maxsize=8)(self._size)  # the rows of one image share its preview
        seen: set[tuple[int, int]] = set()
        keep = bytearray()
        for row, end in self._complete():
            state.end = end
            is_good = self._is_valid(row) and not (retry and row["error"] is not None)
            is_good = is_good and all(row[k] is None or size(row[k]) == row[f"{k}_bytes"] for k in FILES)
            key = row["index"], self._method(row)
            keep.append(is_good and row["index"] not in changed and key not in seen)
            if keep[-1]:
                seen.add(key)
                state.add(row, key[1])
        if not all(keep):
            self._rewrite(compress(self.rows(), keep))
        elif self.path.is_file() and self.path.stat().st_size != state.end:
            os.truncate(self.path, state.end)

    def open(self) -> None:
        """Open the file for appending, after its last complete line."""
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        self._rewind()

    def _rewind(self) -> None:
        os.ftruncate(self._file, self.state.end)
        os.lseek(self._file, 0, os.SEEK_END)

    def append(self, rows: Iterable[Row]) -> None:
        """Append all rows. If that fails, such as on a full disk, append none and raise the error."""
        rows = list(rows)
        data = b"".join(map(encode, rows))
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._file, view) :]
        except BaseException:
            with suppress(OSError):
                self._rewind()
            raise
        self.state.end += len(data)
        for row in rows:
            self.state.add(row, self._method(row))
        if time.monotonic() - self._synced > SYNC_INTERVAL:
            os.fsync(self._file)
            self._synced = time.monotonic()

    def sort(self) -> None:
        """Close the file, and sort its rows by image and method, since a retry appends rows at the end."""
        self.close()
        if not self.state.is_sorted:
            self._rewrite(sorted(self.rows(), key=lambda row: (int(row["index"]), self._method(row))))
            self.state.is_sorted = True

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)

    def rows(self) -> Iterator[Row]:
        """Yield the rows."""
        return (row for row, _ in self._complete())

    def _complete(self) -> Iterator[tuple[Row, int]]:
        """Yield the rows before the first damaged line, each with the byte offset of its end."""
        end = 0
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            for line in file:
                end += len(line)
                try:
                    row = json.loads(line, parse_constant=_refuse)
                except (ValueError, RecursionError):
                    return
                if not line.endswith(b"\n") or not isinstance(row, dict):
                    return
                if not row.keys() >= {"index", "method", "error", "error_kind"}:
                    return
                yield row, end

    def _rewrite(self, rows: Iterable[Row]) -> None:
        with atomic_write(self.path) as temporary, temporary.open("wb") as file:
            for row in rows:
                file.write(encode(row))
            file.flush()
            os.fsync(file.fileno())
        self.state.end = self.path.stat().st_size

    def _is_valid(self, row: Row) -> bool:
        """Return whether the columns, types, method and image number of a row are valid."""
        if row["index"] is None or any(name not in row or not _fits(kind, row[name]) for name, kind in COLUMNS.items()):
            return False
        # Only an image that could not be read has a row without a method.
        is_named = row["method"] in self._methods if row["method"] is not None else row["error"] is not None
        return is_named and row["index"] >= 0 and (self._images is None or row["index"] < self._images)

    def _size(self, name: str) -> int:
        """Return the size of a file of the run in bytes; -1 if it does not exist."""
        try:
            return os.stat(f"{self._folder}/{name}").st_size  # noqa: PTH116 - called for every file
        except OSError:
            return -1


def encode(row: Row) -> bytes:
    """Encode a row as a line."""
    return (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "backslashreplace")


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _fits(kind: type, value: object) -> bool:
    """Return whether a value of a row has the type of its column."""
    if value is None:
        return True
    if kind is list:
        return isinstance(value, list) and len(value) == 4 and all(type(edge) in (int, float) for edge in value)
    return type(value) in ((int, float) if kind is float else (kind,))


def write_parquet(rows: Iterable[Row], path: Path) -> bool:
    """Write rows as a Parquet table if pyarrow is installed, and return whether they were written.

    The table has the columns of the manifest: `box` is a list of four numbers, and `settings` is JSON text.
    """
    if find_spec("pyarrow") is None:
        return False
    arrow = importlib.import_module("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    types = {int: arrow.int64(), float: arrow.float64(), list: arrow.list_(arrow.float64())}
    schema = arrow.schema([(name, types.get(kind, arrow.string())) for name, kind in COLUMNS.items()])
    plain = (
        row if row["settings"] is None else row | {"settings": json.dumps(row["settings"], sort_keys=True)}
        for row in rows
    )
    with atomic_write(path) as temporary, parquet.ParquetWriter(temporary, schema) as writer:
        while group := list(islice(plain, PARQUET_ROWS)):
            writer.write_table(arrow.Table.from_pylist(group, schema=schema))
    return True
