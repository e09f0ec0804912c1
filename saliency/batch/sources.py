"""What a run was given -> the listing of its photos, in an order that is always the same.

Folders, files, patterns, lists (CSV, TSV, JSON lines, plain lines) and WebDataset shards (tar).
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from ..io.atomic_write import PICTURES
from .folder import Own, is_made
from .lists import LISTS, read_list
from .photos import Photo, absolute, label_of
from .problems import BatchError
from .shards import read_shard


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
                if os.path.splitext(entry.name)[1].lower() in PICTURES:  # noqa: PTH122
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
