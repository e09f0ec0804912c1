"""Find images in folders, files, patterns, lists (CSV, TSV, JSON lines, plain lines) and WebDataset shards (tar)."""

from __future__ import annotations

import csv
import glob
import json
import os
import posixpath
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from ..errors import ImageError, errors_as
from ..io.atomic_write import ADDRESS, IMAGE_SUFFIXES, is_address, is_drawing, is_image, is_volume
from .failures import BatchError
from .listing import ImageEntry, is_remote, list_files
from .store import EVALUATION, EVALUATION_PAGE, FILES, LOCK, is_output

LISTS = frozenset((".csv", ".tsv", ".jsonl", ".ndjson", ".txt"))

_FILES_OF_RUNS = frozenset((*FILES, LOCK, EVALUATION, EVALUATION_PAGE))
_OWN = "is a file that saliency wrote, so it is left out"
# Without these common names, a list with the header "image,label" would be read as a list without a header, whose first
# image is missing. The JSON files of shards have such names too.
_PATHS = ("path", "file", "filename", "image", "photo", "source")
_TARGETS = ("target", "class", "label", "category", "cls")


class Found(NamedTuple):
    """Images of sources.

    Attributes:
        entries: The images, in order.
        left_out: Number of images that are left out, because the toolkit wrote them.
        others: Number of the other files in folders, by suffix.
    """

    entries: list[ImageEntry]
    left_out: int
    others: Counter[str]


Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""A path, or several."""


def find_images(sources: Paths, *, recursive: bool = False, targets: str | os.PathLike[str] | None = None) -> Found:
    """Return the images of all sources, in order. Images of a folder are sorted by name.

    A NIfTI file is an image. The slices of a DICOM series together are one image.

    An image that occurs in several folders, files or patterns is returned once. In a list, each row is an image.
    Overlays, contact sheets and trust cards, and the files of `saliency batch`, are left out, except from lists. If
    there is nothing else, the first of them is an image with a problem.

    Args:
        sources: The sources.
        recursive: Whether subfolders are searched. Links to folders are followed, each folder once.
        targets: File with paths and targets, for images that the sources contain without a target.

    Raises:
        BatchError: `sources` are not paths, a list cannot be read, or the targets match no image.
    """
    entries_by_key: dict[tuple[object, ...], ImageEntry] = {}
    others: set[str] = set()  # paths of files that are not images
    expected = "expected paths of images; `attribute` and `compare` take images in memory"
    with errors_as(BatchError, f"{type(sources).__name__} is not a path or a list of paths: {expected}"):
        paths = [os.fsdecode(source) for source in ([sources] if isinstance(sources, str | os.PathLike) else sources)]
    for source in paths:
        is_list = Path(source).suffix.lower() in LISTS
        for number, entry in enumerate(_images_of_source(source, recursive, others)):
            entries_by_key.setdefault((*entry.key, source, number) if is_list else entry.key, entry)
    drawings = [entry for entry in entries_by_key.values() if entry.problem == _OWN]
    entries = [entry for entry in entries_by_key.values() if entry.problem != _OWN] or drawings[:1]
    entries = entries if targets is None else _with_targets(entries, os.fsdecode(targets))
    return Found(entries, len(drawings), Counter(map(_kind, others)))


def _kind(path: str) -> str:
    """Return the suffix of a file, or how a file without a suffix or a hidden file is called in a summary."""
    name = os.path.basename(path)  # noqa: PTH119
    return "hidden" if name.startswith(".") else Path(name).suffix.lower() or "no suffix"


def _images_of_source(source: str, recursive: bool, others: set[str]) -> Iterator[ImageEntry]:
    """Yield the images of a source, and add the other files of a folder to `others`."""
    suffix = Path(source).suffix.lower()
    if os.path.isdir(source):  # noqa: PTH112 - unlike Path, never raises
        yield from _images_of_folder(source, recursive, others)
    elif is_remote(source):
        yield from _images_of_address(source, recursive, others)
    elif is_output(source):
        if is_image(source):
            yield _entry(source, problem=_OWN)
    elif os.path.isfile(source) and suffix in LISTS:  # noqa: PTH113
        yield from _require_images(source, list(read_list(source)))
    elif os.path.isfile(source) and suffix == ".tar":  # noqa: PTH113
        yield from read_shard(source)
    elif is_address(source):
        yield _entry(source, problem=ADDRESS)
    elif glob.has_magic(source) and not os.path.lexists(source):
        matches = sorted(glob.glob(source, recursive=True))  # noqa: PTH207 - accepts paths with surrogates
        if not matches:
            yield _entry(source, problem="no file matches this pattern")
        for match in matches:
            yield from _images_of_source(match, recursive, others)
    else:
        yield _entry(source, problem=_OWN if is_drawing(source) else "")


def _entry(path: str, folder: tuple[str, ...] = (), problem: str = "") -> ImageEntry:
    label = os.path.basename(path) or path  # noqa: PTH119
    if is_volume(label, (".dcm",)) and not is_remote(path) and _holds_series(os.path.dirname(path) or "."):  # noqa: PTH120
        # The slices of a DICOM series are one entry: their folder.
        path, folder = os.path.dirname(path) or ".", folder[:-1]  # noqa: PTH120
        label = f"{os.path.basename(os.path.abspath(path))}.dcm"  # noqa: PTH100, PTH119
    # Links are not resolved, and undecodable bytes are kept.
    whole = path if is_remote(path) else os.path.abspath(path)  # noqa: PTH100
    return ImageEntry(whole, path, folder=folder, label=label, problem=problem)


def _holds_series(folder: str) -> bool:
    from ..io.dicom import holds_series  # imports NumPy and Pillow, which usage errors do not need

    return holds_series(folder)


def _images_of_address(source: str, recursive: bool, others: set[str]) -> Iterator[ImageEntry]:
    """Yield the images at an address. Files of the toolkit are not recognised: they would have to be downloaded."""
    if is_volume(source) or Path(source).suffix.lower() in (*LISTS, ".tar"):
        yield _entry(source, problem="is an address; lists, shards and volumes are read from local files: download it")
        return
    try:
        addresses = list_files(source, recursive=recursive)
    except ImageError as error:
        yield _entry(source, problem=str(error))
        return
    entries = [_entry(address, below) for address, below in addresses if is_image(address) and not is_volume(address)]
    others |= {address for address, _ in addresses}.difference(entry.path for entry in entries)
    yield from entries or [_entry(source, problem="there are no images at this address")]


def _images_of_folder(root: str, recursive: bool, others: set[str]) -> Iterator[ImageEntry]:
    """Yield the images of a folder. Iterative, since a tree may be deeper than the recursion limit of Python."""
    seen: set[tuple[int, int]] = set()
    waiting: list[tuple[str, tuple[str, ...]]] = [(root, ())]
    is_empty = True
    while waiting:
        folder, below = waiting.pop()
        try:
            status = os.stat(folder)  # noqa: PTH116
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            names = sorted(os.listdir(folder))  # noqa: PTH208
        except OSError as error:
            is_empty = False
            yield _entry(folder, below, f"the folder cannot be listed: {error.strerror}")
            continue
        subfolders, is_own = [], is_output(folder)
        prefix, whole = (os.path.join(root, "") for root in (folder, os.path.abspath(folder)))  # noqa: PTH100, PTH118
        for name in names:
            path, is_hidden = prefix + name, name.startswith(".")
            if is_image(name) and not is_hidden:
                is_empty = False
                problem = _OWN if is_own or is_drawing(path) else ""
                if is_volume(name, (".dcm",)):
                    yield _entry(path, below, problem)
                else:  # as `_entry` does, in a fraction of its time
                    yield ImageEntry(whole + name, path, folder=below, label=name, problem=problem)
            elif not is_own and name not in _FILES_OF_RUNS and not os.path.isdir(path):  # noqa: PTH112
                others.add(whole + name)
            if recursive and not is_hidden and os.path.isdir(path):  # noqa: PTH112
                subfolders.append((path, (*below, name)))
        waiting += reversed(subfolders)
    if is_empty:
        hint = "" if recursive else " (--recursive searches its subfolders)"
        yield _entry(root, problem=f"the folder contains no images{hint}")


def read_shard(file: str) -> Iterator[ImageEntry]:
    """Yield the images of a tar file in file order, without extracting to disk.

    Members with the same name up to the first dot belong to one sample, such as 0001.jpg with its target. The target is
    in 0001.cls (a class index or name) or in 0001.json (an object with "cls", "label", "class" or "target").
    """
    whole = _entry(file)
    waiting: list[ImageEntry] = []
    target: int | str | None = None
    key, problem = None, ""
    try:
        with tarfile.open(file, "r:") as shard:
            for member in filter(tarfile.TarInfo.isfile, shard):
                folder, label = posixpath.split(member.name)
                name, _, suffix = label.partition(".")
                if (folder, name) != key:
                    yield from (entry._replace(target=target) for entry in waiting)
                    key, waiting, target = (folder, name), [], None
                kind = suffix.rpartition(".")[2].lower()
                if f".{kind}" in IMAGE_SUFFIXES:
                    entry = whole._replace(
                        source=f"{file}/{member.name}",
                        folder=(Path(file).stem, *filter(None, folder.split("/"))),
                        label=label,
                        offset=member.offset_data,
                        size=member.size,
                    )
                    waiting.append(entry)
                elif kind in ("cls", "json") and target is None:
                    target_file = shard.extractfile(member)
                    target = _shard_target(target_file.read() if target_file else b"", kind)
    except (OSError, tarfile.TarError, ValueError) as error:
        problem = f"the shard cannot be read to its end: {error}"
    yield from (entry._replace(target=target) for entry in waiting)
    if problem:
        yield whole._replace(problem=problem)


def _shard_target(data: bytes, kind: str) -> int | str | None:
    text = data.decode("utf-8", "replace").strip()
    if kind == "cls":
        return target_of_row(text)
    target = _first(_fields(text), _TARGETS)
    return target_of_row(target) if isinstance(target, int | str) else None


def read_list(file: str) -> Iterator[ImageEntry]:
    """Yield the images of a list. Relative paths are relative to the folder of the list.

    CSV and TSV have a header with the columns path and target in any order, or no header and path before target. CSV is
    separated by commas or semicolons; lines that start with # are comments. JSON lines are objects with "path" and
    "target", or paths alone. Plain text (.txt) has one path per line.

    Args:
        file: The list.

    Raises:
        BatchError: The list cannot be read, or has no such column.
    """
    try:
        # With surrogateescape, undecodable bytes of a path are restored when the file is opened.
        with open(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:  # noqa: PTH123
            for number, fields in _numbered_fields(lines, Path(file).suffix.lower()):
                path = _first(fields, _PATHS)
                if isinstance(path, str) and path:
                    folder = "" if is_remote(path) else os.path.dirname(file)  # noqa: PTH120
                    whole = os.path.join(folder, path)  # noqa: PTH118 - keeps surrogates
                    yield _entry(whole)._replace(source=path, target=target_of_row(_first(fields, _TARGETS)))
                else:
                    label = f"line {number}"
                    yield _entry(file, (), "the line has no path")._replace(source=f"{file}:{number}", label=label)
    except (OSError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise BatchError(f"the list {file} cannot be read: {reason}") from error


def target_of_row(text: object) -> int | str | None:
    """Parse the target of a row: an index, or a text without spaces around it; None for an empty text."""
    return text if isinstance(text, int) else str(text or "").strip() or None


def _require_images(file: str, entries: list[ImageEntry]) -> list[ImageEntry]:
    """Return the images of a list. Raises BatchError if no row of it names an image, as in other text."""
    if entries and not any(entry.exists() or is_image(entry.path) for entry in entries):
        expected = "one path per line" if Path(file).suffix.lower() == ".txt" else "a column path"
        problem = f"no row of the list {file} names an image, such as {entries[0].source!r}"
        raise BatchError(f"{problem}; expected {expected}, relative to the folder of the list")
    return entries


def _numbered_fields(lines: TextIO, suffix: str) -> Iterator[tuple[int, Mapping[str, object]]]:
    """Yield the line number and the fields, by name, of every row of a list."""
    if suffix in (".csv", ".tsv"):
        names: list[str] = []
        first = next((line for line in lines if line.strip() and not line.startswith("#")), "")
        lines.seek(0)
        separator = ";" if first.count(";") > first.count(",") else ","
        reader = csv.reader(lines, delimiter="\t" if suffix == ".tsv" else separator)
        for row in reader:
            if not any(row) or row[0].startswith("#"):
                continue
            if not names:
                names = [cell.strip().casefold() for cell in row]
                if not set(names).isdisjoint(_PATHS):
                    continue
                names = ["path", "target"]
            yield reader.line_num, dict(zip(names, row, strict=False))
    else:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, {"path": line.strip("\r\n")} if suffix == ".txt" else _fields(line)


def _fields(text: str) -> Mapping[str, object]:
    """Parse a JSON object with the fields of an image, or the path of an image alone; empty for other text."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return {"path": fields} if isinstance(fields, str) else fields if isinstance(fields, dict) else {}


def _first(fields: Mapping[str, object], names: Iterable[str]) -> object:
    """Return the value of the first name that the fields contain."""
    return next((fields[name] for name in names if name in fields), None)


def _with_targets(entries: list[ImageEntry], file: str) -> list[ImageEntry]:
    """Return the images with the targets of a list. Paths are matched first, then file names that are unique."""
    if not os.path.isfile(file):  # noqa: PTH113
        raise BatchError(f"the list of targets {file} does not exist")
    by_path: dict[str, Any] = {}
    by_name: dict[str, set[Any]] = {}
    for entry in read_list(file):
        if not entry.problem:
            by_path[entry.path] = by_path[os.path.abspath(entry.source)] = entry.target  # noqa: PTH100
            by_name.setdefault(entry.label, set()).add(entry.target)
    labels = Counter(entry.label for entry in entries)
    # A file name matches if it is unique among the images, and has one target in the list.
    targets = {label: next(iter(by_name[label])) for label in by_name if len(by_name[label]) == labels[label] == 1}
    if not any(entry.path in by_path or entry.label in targets for entry in entries):
        raise BatchError(f"{file} matches none of the {len(entries)} images; expected the columns path and target")
    return [entry._replace(target=by_path.get(entry.path, targets.get(entry.label, entry.target))) for entry in entries]
