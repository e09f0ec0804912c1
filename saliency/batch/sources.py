"""Find images in folders, files, patterns, lists (CSV, TSV, JSON lines, plain lines) and WebDataset shards (tar)."""

from __future__ import annotations

import csv
import glob
import json
import os
import posixpath
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from ..io.atomic_write import IMAGE_SUFFIXES
from .errors import BatchError
from .listing import ImageEntry, absolute, label_of
from .output_folder import is_run_output, output_test

LISTS = frozenset((".csv", ".tsv", ".jsonl", ".ndjson", ".txt"))

_SHARD_SUFFIXES = frozenset(("avif", "bmp", "gif", "jpeg", "jpg", "png", "tif", "tiff", "webp"))
_SHARD_TARGETS = ("target", "cls", "class", "label")
_MAX_TARGET_BYTES = 1 << 20  # largest .cls or .json member of a shard that is read
_PATHS = ("path", "file", "filename", "image", "photo", "source")
_TARGETS = ("target", "class", "label", "category")


def find_images(
    sources: Iterable[str | os.PathLike[str]],
    *,
    recursive: bool = False,
    targets: str | os.PathLike[str] | None = None,
    out: Path | None = None,
    literal: bool = False,
) -> list[ImageEntry]:
    """Return the images of all sources, in order. Images of a folder are sorted by name.

    An image that occurs in several folders, files or patterns is returned once. In a list, each row is an image.

    Args:
        sources: The sources.
        recursive: Whether subfolders are searched. Links to folders are followed, each folder once.
        targets: File with paths and targets, for images that the sources contain without a target.
        out: Output folder of the run. Its files are skipped. Files of other runs are skipped in patterns and
            subfolders.
        literal: Whether every source is a file or folder, and never a pattern, list or shard.

    Raises:
        BatchError: A list cannot be read, the targets match no image, or a source contains files where the run would
            write.
    """
    is_own = output_test(out)
    found: dict[tuple[object, ...], ImageEntry] = {}
    for source in map(os.fsdecode, sources):
        is_list = Path(source).suffix.lower() in LISTS and not literal
        for number, image in enumerate(_images_of_source(source, recursive, is_own, literal)):
            found.setdefault((*image.key, *((source, number) if is_list else ())), image)
    images = list(found.values())
    return images if targets is None else _with_targets(images, os.fsdecode(targets))


def _images_of_source(
    source: str, recursive: bool, is_own: Callable[[str], bool], literal: bool
) -> Iterator[ImageEntry]:
    if is_own(source):
        return
    suffix = Path(source).suffix.lower()
    if os.path.isdir(source):  # noqa: PTH112 - unlike Path, never raises
        yield from _images_of_folder(source, recursive, is_own, literal)
    elif literal:
        yield _entry(source)
    elif os.path.isfile(source):  # noqa: PTH113
        yield from (
            read_list(source) if suffix in LISTS else read_shard(source) if suffix == ".tar" else [_entry(source)]
        )
    elif glob.has_magic(source) and not os.path.lexists(source):
        matches = sorted(glob.glob(source, recursive=True))  # noqa: PTH207 - accepts paths with surrogates
        if not matches:
            yield _entry(source, problem="no file matches this pattern")
        top = source
        while glob.has_magic(top):
            top = os.path.dirname(top)  # noqa: PTH120
        for match in matches:
            if not is_run_output(match, top):
                yield from _images_of_source(match, recursive, is_own, literal)
    else:
        yield _entry(source)


def _entry(path: str, folder: tuple[str, ...] = (), problem: str = "") -> ImageEntry:
    return ImageEntry(absolute(path), path, folder=folder, label=label_of(path), problem=problem)


def _images_of_folder(root: str, recursive: bool, is_own: Callable[[str], bool], literal: bool) -> Iterator[ImageEntry]:
    """Yield the images of a folder. Iterative, since a tree may be deeper than the recursion limit of Python."""
    seen: set[tuple[int, int]] = set()
    waiting: list[tuple[str, tuple[str, ...]]] = [(root, ())]
    is_empty = True
    while waiting:
        folder, below = waiting.pop()
        try:
            status = os.stat(folder)  # noqa: PTH116
            identity = status.st_dev, status.st_ino
            is_output = folder != root and (is_run_output(folder, os.path.dirname(folder)) or is_own(folder))  # noqa: PTH120
            if identity in seen or is_output:
                continue
            seen.add(identity)
            with os.scandir(folder) as listed:
                entries = sorted((entry for entry in listed if not entry.name.startswith(".")), key=lambda e: e.name)
        except OSError as error:
            is_empty = False
            yield _entry(folder, below, f"the folder cannot be listed: {error.strerror}")
            continue
        subfolders = []
        for entry in entries:
            path = os.path.join(folder, entry.name)  # noqa: PTH118
            if os.path.splitext(entry.name)[1].lower() in IMAGE_SUFFIXES:  # noqa: PTH122
                is_empty = False
                yield _entry(path, below)
            if recursive and os.path.isdir(path):  # noqa: PTH112
                subfolders.append((path, (*below, entry.name)))
        waiting += reversed(subfolders)
    if is_empty:
        hint = "" if recursive or literal else " (--recursive searches its subfolders)"
        yield _entry(root, problem=f"the folder contains no images{hint}")


def read_shard(file: str) -> Iterator[ImageEntry]:
    """Yield the images of a tar file in file order, without extracting to disk.

    Members with the same name up to the first dot belong to one sample: 0001.jpg, 0001.cls (a class index or name),
    0001.json (an object with "cls", "label", "class" or "target").
    """
    stem = Path(file).stem
    waiting: list[ImageEntry] = []
    target: int | str | None = None
    key, problem = None, ""
    try:
        with tarfile.open(file, "r:") as shard:
            for member in shard:
                if not member.isfile():
                    continue
                folder, label = posixpath.split(member.name)
                name, _, suffix = label.partition(".")
                if (folder, name) != key:
                    yield from (replace(image, target=target) for image in waiting)
                    key, waiting, target = (folder, name), [], None
                kind = suffix.rpartition(".")[2].lower()
                if kind in _SHARD_SUFFIXES:
                    waiting.append(
                        ImageEntry(
                            absolute(file),
                            f"{file}/{member.name}",
                            folder=(stem, *(part for part in folder.split("/") if part)),
                            label=label,
                            offset=member.offset_data,
                            size=member.size,
                            problem="" if member.sparse is None else "sparse members of a shard are not supported",
                        )
                    )
                elif kind in ("cls", "json") and member.size <= _MAX_TARGET_BYTES and target is None:
                    target_file = shard.extractfile(member)
                    target = _shard_target(target_file.read() if target_file else b"", kind)
    except (OSError, tarfile.TarError, ValueError) as error:
        problem = f"the shard cannot be read to its end: {error}"
    yield from (replace(image, target=target) for image in waiting)
    if problem:
        yield _entry(file, problem=problem)


def _shard_target(data: bytes, kind: str) -> int | str | None:
    text = data.decode("utf-8", "replace").strip()
    if kind == "cls":
        return parse_target(text)
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    target = (
        next((fields[name] for name in _SHARD_TARGETS if name in fields), None) if isinstance(fields, dict) else None
    )
    return parse_target(target) if isinstance(target, int | str) else None


def read_list(file: str) -> Iterator[ImageEntry]:
    """Yield the images of a list. Relative paths are relative to the folder of the list.

    CSV and TSV have a header with the columns path and target in any order, or no header and path before target. JSON
    lines are objects with "path" and "target", or paths alone. Plain text (.txt) has one path per line.

    Raises:
        BatchError: The list cannot be read.
    """
    suffix = Path(file).suffix.lower()
    try:
        # With surrogateescape, undecodable bytes of a path are restored when the file is opened.
        with open(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:  # noqa: PTH123
            rows = _json_rows(lines) if suffix in (".jsonl", ".ndjson") else _text_rows(lines, suffix)
            for number, path, target in rows:
                if path:
                    whole = os.path.join(os.path.dirname(file), path)  # noqa: PTH118, PTH120 - keeps surrogates
                    yield replace(_entry(whole), source=path, target=parse_target(target))
                else:
                    problem = "the line has no path"
                    yield ImageEntry(absolute(file), f"{file}:{number}", label=f"line {number}", problem=problem)
    except (OSError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise BatchError(f"the list {file} cannot be read: {reason}") from error


def parse_target(text: object) -> int | str | None:
    """Parse a target of a list: an index, a name, or None for an empty text."""
    if text is None or isinstance(text, int):
        return text
    word = str(text).strip()
    return int(word) if re.fullmatch(r"[+-]?\d+", word) else word or None


def _text_rows(lines: TextIO, suffix: str) -> Iterator[tuple[int, str, object]]:
    """Yield (line number, path, target) for every row."""
    if suffix == ".txt":
        yield from ((number, line.strip("\r\n"), None) for number, line in enumerate(lines, 1) if line.strip())
        return
    reader = csv.reader(lines, delimiter="\t" if suffix == ".tsv" else ",")
    path_column, target_column, is_first = 0, 1, True
    for row in reader:
        if not any(row):
            continue
        titles = [cell.strip().casefold() for cell in row]
        is_header = is_first and any(title in _PATHS for title in titles)
        is_first = False
        if is_header:
            path_column = next(column for column, title in enumerate(titles) if title in _PATHS)
            target_column = next((column for column, title in enumerate(titles) if title in _TARGETS), len(titles))
            continue
        path = row[path_column] if path_column < len(row) else ""
        yield reader.line_num, path, row[target_column] if target_column < len(row) else None


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


def _with_targets(images: list[ImageEntry], file: str) -> list[ImageEntry]:
    """Return the images with the targets of a list. Paths are matched first, then file names that are unique."""
    if not os.path.isfile(file):  # noqa: PTH113
        raise BatchError(f"the list of targets {file} does not exist")
    by_path: dict[str, int | str | None] = {}
    by_name: dict[str, set[int | str | None]] = {}
    for entry in read_list(file):
        if not entry.problem:
            by_path[entry.path] = by_path[absolute(entry.source)] = entry.target
            by_name.setdefault(entry.label, set()).add(entry.target)
    labels = Counter(image.label for image in images)
    matched = 0
    for index, image in enumerate(images):
        named = by_name.get(image.label, set()) if labels[image.label] == 1 else set()
        if image.path in by_path or len(named) == 1:
            matched += 1
            target = by_path[image.path] if image.path in by_path else next(iter(named))
            images[index] = replace(image, target=target)
    if not matched:
        raise BatchError(
            f"the list of targets {file} matches none of the {len(images)} images; expected the columns path and target"
        )
    return images
