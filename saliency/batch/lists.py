"""Lists of photos: a path and, where there is one, a target in each row."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from .photos import Photo, absolute, label_of
from .problems import BatchError

LISTS = frozenset((".csv", ".tsv", ".jsonl", ".ndjson", ".txt"))

_PATHS = ("path", "file", "filename", "image", "photo", "source")
_TARGETS = ("target", "class", "label", "category")


def read_list(file: str) -> Iterator[Photo]:
    """The photos that a list names. Relative paths begin in the list's own folder.

    CSV and TSV: with a line of titles (path, target), in any order, or without one: the path, then the target. JSON
    lines: an object with "path" and "target", or the path alone. Plain lines (.txt): a path each.

    Raises:
        BatchError: The list cannot be read.
    """
    suffix = Path(file).suffix.lower()
    try:
        # Bytes that are no text may stand in a path, and come back as they were when it is opened.
        with open(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:  # noqa: PTH123
            rows = _json_rows(lines) if suffix in (".jsonl", ".ndjson") else _rows(lines, suffix)
            for number, path, target in rows:
                yield _entry(file, number, path, target)
    except (OSError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise BatchError(f"the list {file} cannot be read: {reason}") from error


def target_from(text: object) -> int | str | None:
    """A target as it is written in a list: an index, a name, or nothing."""
    if text is None or isinstance(text, int):
        return text
    word = str(text).strip()
    return int(word) if re.fullmatch(r"[+-]?\d+", word) else word or None


def _entry(file: str, number: int, path: str, target: object) -> Photo:
    if not path:
        return Photo(absolute(file), f"{file}:{number}", label=f"line {number}", problem="the line names no path")
    whole = os.path.join(os.path.dirname(file), path)  # noqa: PTH118, PTH120 - of a path with surrogates, too
    return Photo(absolute(whole), path, label=label_of(path), target=target_from(target))


def _rows(lines: TextIO, suffix: str) -> Iterator[tuple[int, str, object]]:
    """(number of the line, path, target) of each row."""
    if suffix == ".txt":
        yield from ((number, line.strip("\r\n"), None) for number, line in enumerate(lines, 1) if line.strip())
        return
    reader = csv.reader(lines, delimiter="\t" if suffix == ".tsv" else ",")
    at_path, at_target, first = 0, 1, True
    for row in reader:
        if not any(row):
            continue
        titles = [cell.strip().casefold() for cell in row]
        if first and any(title in _PATHS for title in titles):
            at_path = next(at for at, title in enumerate(titles) if title in _PATHS)
            at_target = next((at for at, title in enumerate(titles) if title in _TARGETS), len(titles))
            first = False
            continue
        first = False
        path = row[at_path] if at_path < len(row) else ""
        yield reader.line_num, path, row[at_target] if at_target < len(row) else None


def _json_rows(lines: TextIO) -> Iterator[tuple[int, str, object]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        fields = {"path": row} if isinstance(row, str) else row if isinstance(row, dict) else {}
        path = next((fields[name] for name in _PATHS if name in fields), "")
        target = next((fields[name] for name in _TARGETS if name in fields), None)
        yield number, path if isinstance(path, str) else "", target
