"""What a run was given -> the listing of its photos, in an order that is always the same.

Folders, files, patterns, lists (CSV, TSV, JSON lines, plain lines) and WebDataset shards (tar).
"""

from __future__ import annotations

import csv
import glob
import json
import os
import posixpath
import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from ..io.atomic_write import IMAGE_SUFFIXES
from .errors import BatchError
from .image_entry import Photo, absolute, label_of
from .output_folder import Own, is_made

_PICTURES = frozenset(("avif", "bmp", "gif", "jpeg", "jpg", "png", "tif", "tiff", "webp"))
_CLASSES = ("target", "cls", "class", "label")
_LONGEST_NOTE = 1 << 20  # bytes of a .cls or .json member


def read_shard(file: str) -> Iterator[Photo]:
    """The photos of a tar file, in its order; its members are never written to disk.

    What belongs together has one name up to the first dot of its file name: 0001.jpg, 0001.cls (a class index or
    name), 0001.json (an object with "cls", "label", "class" or "target").
    """
    stem = Path(file).stem
    waiting: list[Photo] = []
    target: int | str | None = None
    key = None
    try:
        with tarfile.open(file, "r:") as shard:
            for member in shard:
                if not member.isfile():
                    continue
                folder, label = posixpath.split(member.name)
                name, _, suffix = label.partition(".")
                if (folder, name) != key:
                    yield from (replace(photo, target=target) for photo in waiting)
                    key, waiting, target = (folder, name), [], None
                kind = suffix.rpartition(".")[2].lower()
                if kind in _PICTURES:
                    waiting.append(_tar_photo(file, stem, folder, label, member))
                elif kind in ("cls", "json") and member.size <= _LONGEST_NOTE:
                    noted = shard.extractfile(member)
                    target = _class(noted.read() if noted else b"", kind) if target is None else target
    except (OSError, tarfile.TarError, ValueError) as error:
        yield from (replace(photo, target=target) for photo in waiting)
        problem = f"the shard cannot be read to its end: {error}"
        yield Photo(absolute(file), file, label=label_of(file), problem=problem)
        return
    yield from (replace(photo, target=target) for photo in waiting)


def _tar_photo(file: str, stem: str, folder: str, label: str, member: tarfile.TarInfo) -> Photo:
    return Photo(
        absolute(file),
        f"{file}/{member.name}",
        folder=(stem, *(part for part in folder.split("/") if part)),
        label=label,
        offset=member.offset_data,
        size=member.size,
        problem="a sparse member of the shard, which is not read" if member.sparse is not None else "",
    )


def _class(data: bytes, kind: str) -> int | str | None:
    text = data.decode("utf-8", "replace").strip()
    if kind == "cls":
        return target_from(text)
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    found = next((fields[name] for name in _CLASSES if name in fields), None) if isinstance(fields, dict) else None
    return target_from(found) if isinstance(found, int | str) else None


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


def find(
    words: Iterable[str | os.PathLike[str]],
    *,
    recursive: bool = False,
    targets: str | os.PathLike[str] | None = None,
    out: Path | None = None,
) -> list[Photo]:
    """The photos of all sources: of each source in its order, in a folder by their names.

    A photo that several folders, files or patterns lead to is taken once; in a list, each row counts.

    Args:
        words: The sources.
        recursive: Whether folders inside of folders are searched too. Links to folders are followed, each folder once.
        targets: A list of paths and targets, for photos that are found otherwise.
        out: The folder of the run. What it has made there is passed over, as is what patterns and recursion find of
            other runs.

    Raises:
        BatchError: A list or a shard cannot be read, the targets fit none of the photos, or photos lie where the run
            is to write.
    """
    own = Own(out)
    found: dict[tuple[object, ...], Photo] = {}
    for word in map(os.fsdecode, words):
        counts_each = Path(word).suffix.lower() in LISTS
        for at, photo in enumerate(_of_word(word, recursive, own)):
            found.setdefault((*photo.key, *((word, at) if counts_each else ())), photo)
    photos = list(found.values())
    return photos if targets is None else _with_targets(photos, os.fsdecode(targets))


def _of_word(word: str, recursive: bool, own: Own) -> Iterator[Photo]:
    if own.has_made(word):
        return
    if os.path.isdir(word):  # noqa: PTH112 - unlike Path, never raises
        yield from _Folder(word, recursive, own).photos()
    elif os.path.isfile(word):  # noqa: PTH113
        suffix = Path(word).suffix.lower()
        yield from read_list(word) if suffix in LISTS else read_shard(word) if suffix == ".tar" else [_photo(word)]
    elif glob.has_magic(word) and not os.path.lexists(word):
        matches = sorted(glob.glob(word, recursive=True))  # noqa: PTH207 - of a path with surrogates, too
        if not matches:
            yield replace(_photo(word), problem="no file matches this pattern")
        named = _literal(word)
        for match in matches:
            if not is_made(match, named):
                yield from _of_word(match, recursive, own)
    else:
        yield _photo(word)


def _photo(path: str, folder: tuple[str, ...] = (), problem: str = "") -> Photo:
    return Photo(absolute(path), path, folder=folder, label=label_of(path), problem=problem)


def _literal(pattern: str) -> str:
    """The folders at the beginning of a pattern in which there is nothing to expand."""
    while glob.has_magic(pattern):
        pattern = os.path.dirname(pattern)  # noqa: PTH120
    return pattern


class _Folder:
    """The pictures of one folder."""

    def __init__(self, root: str, recursive: bool, own: Own) -> None:
        self._root, self._recursive, self._own = root, recursive, own
        self._seen: set[tuple[int, int]] = set()

    def photos(self) -> Iterator[Photo]:
        any_of_them = False
        for photo in self._inside(self._root, ()):
            any_of_them = True
            yield photo
        if not any_of_them:
            hint = "" if self._recursive else " (folders inside of it are searched with --recursive)"
            yield _photo(self._root, problem=f"the folder has no pictures in it{hint}")

    def _inside(self, folder: str, below: tuple[str, ...]) -> Iterator[Photo]:
        """The photos of a folder, without recursion in Python: a tree may be deeper than its limit."""
        waiting = [(folder, below)]
        while waiting:
            folder, below = waiting.pop()
            here = _identity(folder)
            if here is None or here in self._seen:
                continue
            self._seen.add(here)
            if folder != self._root and (is_made(folder, os.path.dirname(folder)) or self._own.has_made(folder)):  # noqa: PTH120
                continue
            try:
                with os.scandir(folder) as listed:
                    entries = sorted((each for each in listed if not each.name.startswith(".")), key=lambda e: e.name)
            except OSError as error:
                yield _photo(folder, below, f"the folder cannot be listed: {error.strerror}")
                continue
            folders = []
            for entry in entries:
                path = os.path.join(folder, entry.name)  # noqa: PTH118
                if os.path.splitext(entry.name)[1].lower() in IMAGE_SUFFIXES:  # noqa: PTH122
                    yield _photo(path, below)
                if self._recursive and _is_folder(entry):
                    folders.append((path, (*below, entry.name)))
            waiting += reversed(folders)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads back to itself
        return False


def _identity(folder: str | os.PathLike[str]) -> tuple[int, int] | None:
    """What a folder is, however it is reached; None where there is none."""
    try:
        found = os.stat(folder)  # noqa: PTH116
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _with_targets(photos: list[Photo], file: str) -> list[Photo]:
    """The photos with the targets of a list: by path, or by file name where no other photo is called so."""
    if not os.path.isfile(file):  # noqa: PTH113
        raise BatchError(f"the list of targets {file} is not there")
    by_path: dict[str, int | str | None] = {}
    by_name: dict[str, set[int | str | None]] = {}
    for entry in read_list(file):
        if not entry.problem:
            by_path[entry.path] = by_path[absolute(entry.source)] = entry.target
            by_name.setdefault(entry.label, set()).add(entry.target)
    labels = Counter(photo.label for photo in photos)
    given: list[Photo] = []
    fitting = 0
    for photo in photos:
        named = by_name.get(photo.label, set()) if labels[photo.label] == 1 else set()
        known = photo.path in by_path or len(named) == 1
        fitting += known
        target = by_path[photo.path] if photo.path in by_path else next(iter(named)) if known else photo.target
        given.append(replace(photo, target=target))
    if not fitting:
        raise BatchError(f"the list of targets {file} names none of the {len(photos)} photos; it needs path and target")
    return given
