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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from ..errors import ImageError, errors_as, plural, warn
from ..io.atomic_write import ADDRESS, IMAGE_SUFFIXES, is_address, is_drawing, is_image, is_volume
from ..validation import check_path, described
from .failures import BatchError, sentence
from .listing import ARRAY, ImageEntry, is_remote, list_files
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
NAMED = re.compile(r"[A-Za-z_][\w.]*")
"""The names of inputs on the command line, and in the header of a list."""
NAMED_ALONE = 5  # files without a partner that a warning names


def find_images(
    sources: Paths | Mapping[str, Any], *, recursive: bool = False, targets: str | os.PathLike[str] | None = None
) -> Found:
    """Return the images of all sources, in order. Images of a folder are sorted by name.

    A NIfTI file is an image. The slices of a DICOM series together are one image.

    An image that occurs in several folders, files or patterns is returned once. In a list, each row is an image.
    Overlays, contact sheets and trust cards, and the files of `saliency batch`, are left out, except from lists. If
    there is nothing else, the first of these files is returned as an image with a `problem`.

    Args:
        sources: The sources; or a source for each input of a model with several inputs, see `_cases`.
        recursive: Whether subfolders are searched. Links to folders are followed, each folder once.
        targets: File with paths and targets, for images that the sources contain without a target.

    Raises:
        BatchError: `sources` are not paths, a list cannot be read, no files of several inputs have equal names, or the
            targets match no image.

    Warns:
        SaliencyWarning: Files of an input have no partner, and are left out.
    """
    entries_by_key: dict[tuple[object, ...], ImageEntry] = {}
    others: set[str] = set()  # paths of files that are not images
    expected = "expected paths of images; `attribute` and `compare` take images in memory"
    if isinstance(sources, Mapping):
        entries_by_key, sources = {entry.key: entry for entry in _cases(sources, recursive, others)}, ()
    try:
        paths = [os.fsdecode(source) for source in ([sources] if isinstance(sources, str | os.PathLike) else sources)]
    except TypeError as error:
        raise BatchError(f"{type(sources).__name__} is not a path or a list of paths: {expected}") from error
    for source in paths:
        is_list = Path(source).suffix.lower() in LISTS
        for number, entry in enumerate(_images_of_source(source, recursive, others)):
            entries_by_key.setdefault((*entry.key, source, number) if is_list else entry.key, entry)
    drawings = [entry for entry in entries_by_key.values() if entry.problem == _OWN]
    entries = [entry for entry in entries_by_key.values() if entry.problem != _OWN] or drawings[:1]
    entries = entries if targets is None else _with_targets(entries, str(check_path("targets", targets)))
    return Found(entries, len(drawings), Counter(map(_kind, others)))


def _kind(path: str) -> str:
    """Return the suffix of a file, or how a file without a suffix or a hidden file is called in a summary."""
    name = os.path.basename(path)  # noqa: PTH119
    return "hidden" if name.startswith(".") else Path(name).suffix.lower() or "no suffix"


def _cases(sources: Mapping[str, Any], recursive: bool, others: set[str]) -> Iterator[ImageEntry]:
    """Yield the cases of a model with several inputs: files of equal names, but for the suffix, in all folders.

    A source may also be a pattern or a list. A single file, and what is not a file, is an input of all cases.
    """
    by_stem, constants = dict[str, dict[object, ImageEntry]](), dict[str, Any]()
    files: list[ImageEntry] = []
    for name, source in sources.items():
        path = os.fsdecode(source) if isinstance(source, str | os.PathLike) else ""
        constants[name] = _case_file(path) or source
        is_pattern = glob.has_magic(path) and ("/" in path or path.endswith(ARRAY) or is_image(path))  # not a question
        if is_pattern or os.path.isdir(path) or path.endswith((*LISTS, "/")):  # noqa: PTH112
            entries = [entry for entry in _images_of_source(path, recursive, others, ARRAY) if entry.problem != _OWN]
            if not entries or entries[0].problem:
                problem = entries[0].problem if entries else "there are no images"
                raise BatchError(f"{name}: {sentence(path, None, problem)}")
            by_stem[name] = {(entry.folder, os.path.splitext(entry.label)[0]): entry for entry in entries}  # noqa: PTH122
            files += entries
        else:
            with errors_as(BatchError, f"{name}={described(source)} is not an existing file or folder, or JSON"):
                json.dumps(constants[name])
    if not by_stem:
        if (case := _case(constants)) is None:
            raise BatchError(f"no image among the inputs {', '.join(sources)}; expected files or folders")
        yield case
        return
    first, *rest = by_stem.values()
    stems = [stem for stem in first if all(stem in entries for entries in rest)]
    paired = {entries[stem].path for entries in by_stem.values() for stem in stems}
    alone = [entry.source for entry in files if entry.path not in paired]
    if not stems:
        raise BatchError(f"no name is in all of {', '.join(by_stem)}, such as {alone[0]} and {alone[-1]}")
    if alone:
        named = ", ".join(alone[:NAMED_ALONE]) + (", ..." if len(alone) > NAMED_ALONE else "")
        warn(f"left out {plural(len(alone), 'file')} without a file of the same name in each input: {named}")
    for stem in stems:
        chosen = {name: entries[stem].path for name, entries in by_stem.items()}
        yield first[stem]._replace(inputs=constants | chosen)


def require_images(entries: Iterable[ImageEntry]) -> None:
    """Raise BatchError for a case of several inputs."""
    if case := next((entry for entry in entries if entry.inputs), None):
        refused = "metrics, trust cards, saved maps, contact sheets and detections"
        raise BatchError(f"{refused} are for models of one image, and {case.source} is a case of several")


def _case(inputs: Mapping[str, Any], folder: str = "") -> ImageEntry | None:
    """Return a case of files, relative to a folder, and of other arguments; None if there is no file."""
    files = {name: file for name, value in inputs.items() if (file := _case_file(value, folder))}
    return _entry(next(iter(files.values())))._replace(inputs={**inputs, **files}) if files else None


def _case_file(value: object, folder: str = "") -> str:
    """Return the absolute path of an input that is a file, relative to a folder; empty for another argument."""
    path = os.path.join(folder, value) if isinstance(value, str) and value else ""  # noqa: PTH118
    is_file = is_image(path) or path.endswith(ARRAY) or os.path.isfile(path)  # noqa: PTH113
    return os.path.abspath(path) if is_file else ""  # noqa: PTH100


def _images_of_source(source: str, recursive: bool, others: set[str], more: str = "") -> Iterator[ImageEntry]:
    """Yield the images of a source, and files of a folder with the suffix `more`; add its other files to `others`."""
    suffix = Path(source).suffix.lower()
    if os.path.isdir(source):  # noqa: PTH112 - unlike Path, never raises
        yield from _images_of_folder(source, recursive, others, more)
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
            yield from _images_of_source(match, recursive, others, more)
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


def _images_of_folder(root: str, recursive: bool, others: set[str], more: str) -> Iterator[ImageEntry]:
    """Yield the images of a folder, and of its subfolders if `recursive`. Links are followed, each folder once."""
    seen, failed = set[str](), list[OSError]()
    is_empty = True
    for folder, subfolders, files in os.walk(root, onerror=failed.append, followlinks=True):
        below, is_own = Path(folder).relative_to(root).parts, is_output(folder)
        if os.path.realpath(folder) in seen:
            subfolders.clear()
            continue
        seen.add(os.path.realpath(folder))
        prefix, whole = (os.path.join(root, "") for root in (folder, os.path.abspath(folder)))  # noqa: PTH100, PTH118
        for name in sorted([*subfolders, *files]):
            path = prefix + name
            if (is_image(name) or (more and name.endswith(more))) and not name.startswith("."):
                is_empty = False
                problem = _OWN if is_own or is_drawing(path) else ""
                if is_volume(name, (".dcm",)):
                    yield _entry(path, below, problem)
                else:  # as `_entry` does, in a fraction of its time
                    yield ImageEntry(whole + name, path, folder=below, label=name, problem=problem)
            elif not is_own and name not in subfolders and name not in _FILES_OF_RUNS:
                others.add(whole + name)
        subfolders[:] = sorted(name for name in subfolders if recursive and not name.startswith("."))
    for error in failed:
        is_empty = False
        yield _entry(error.filename, (), f"the folder cannot be listed: {error.strerror}")
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

    CSV and TSV have a header with the columns path and target in any order. Without a header, the path is before the
    target. CSV is separated by commas or semicolons; lines that start with # are comments. JSON lines are objects with
    "path" and "target", or paths alone. Plain text (.txt) has one path per line. Without the column path, each column
    but target is an input of a model with several inputs: a file, or another argument.

    Args:
        file: The list.

    Raises:
        BatchError: The list cannot be read, or has no such column.
    """
    # With surrogateescape, undecodable bytes of a path are restored when the file is opened.
    options: Any = {"encoding": "utf-8-sig", "errors": "surrogateescape", "newline": ""}
    with errors_as(BatchError, f"the list {file} cannot be read"), open(file, **options) as lines:  # noqa: PTH123
        for number, fields in _numbered_fields(lines, Path(file).suffix.lower()):
            path, folder = _first(fields, _PATHS), os.path.dirname(file)  # noqa: PTH120
            target = _target_in(folder, _first(fields, _TARGETS))
            if isinstance(path, str) and path:
                whole = path if is_remote(path) else os.path.join(folder, path)  # noqa: PTH118 - keeps surrogates
                yield _entry(whole)._replace(source=path, target=target)
            elif case := _case({name: value for name, value in fields.items() if name not in _TARGETS}, folder):
                yield case._replace(target=target)
            else:
                label = f"line {number}"
                yield _entry(file, (), "the line has no path")._replace(source=f"{file}:{number}", label=label)


def target_of_row(text: object) -> int | str | None:
    """Parse the target of a row: an index, or a text without spaces around it; None for an empty text."""
    return text if isinstance(text, int) else str(text or "").strip() or None


def _target_in(folder: str, text: object) -> int | str | None:
    """Parse the target of a row of a list. The mask of a region may be a file in the folder of the list."""
    target = target_of_row(text)
    if not str(target).startswith("region:"):  # a finished run with a class does not import torch
        return target
    from ..targets.language import split_last

    region, *mask = split_last(str(target).removeprefix("region:"))
    path = os.path.join(os.path.abspath(folder), *mask)  # noqa: PTH100, PTH118
    return f"region:{region}:{path}" if os.path.isfile(path) else target  # noqa: PTH113


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
                names = _header(row)
                if names:
                    continue
                names = ["path", "target"]
            yield reader.line_num, dict(zip(names, row, strict=False))
    else:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, {"path": line.strip("\r\n")} if suffix == ".txt" else _fields(line)


def _header(row: Sequence[str]) -> list[str]:
    """Return the columns that the first row of a list names: the path, or several inputs; else an empty list."""
    cells = [cell.strip() for cell in row]
    names = [cell.casefold() for cell in cells]
    if not set(names).isdisjoint(_PATHS):
        return names
    inputs = [cell for cell, name in zip(cells, names, strict=True) if name not in _TARGETS]
    is_header = len(inputs) > 1 and all(NAMED.fullmatch(cell) and not _case_file(cell) for cell in cells)
    return [cell if cell in inputs else name for cell, name in zip(cells, names, strict=True)] if is_header else []


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
    return [e._replace(target=by_path.get(e.path, targets.get(e.label))) if e.target is None else e for e in entries]
