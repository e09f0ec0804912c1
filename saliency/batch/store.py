"""The store of a run: its images, which of them have results, and the output folder with the results.

The folder has a lock, manifest.json (the head), the listing of the images, the manifest and the files of the images.
The manifest has one row per image and method, as JSON lines.
"""

from __future__ import annotations

import csv
import fcntl
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate, chain, compress, islice
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from .._version import DISTRIBUTION
from ..io.atomic_write import atomic_write, durable_write, inside
from ..validation import check_path
from .failures import BatchError, require_writable, writing_to
from .listing import LISTING, MOST_PER_FOLDER, ImageEntry, merge_listing, read_listing, with_names
from .options import FORMATS, NetworkOptions, OutputOptions, RunOptions, Summary, fingerprint, without_address
from .plan import Plan

if TYPE_CHECKING:
    from .network import Network


Row = dict[str, Any]

MANIFEST = "manifest.jsonl"
CSV = "manifest.csv"
LINES = 100  # decoded at once
_ERRORS = "backslashreplace"  # for undecodable bytes of paths

IMAGE_FILES = ("overlay", "thumbnail", "heat", "map", "card", "card_json")
_SIZES = tuple(f"{name}_bytes" for name in IMAGE_FILES)
COLUMNS = (
    *("index", "source", "id", "method", "target", "target_box", "name", "probability", "score", "layer"),
    *("width", "height", "input_width", "input_height", "box", "range", "settings", "coverage", "residual"),
    *("ledger", "shares", "trust", "sign", "units", "floor", "limit", *IMAGE_FILES, "colormap", "seconds", "repeated"),
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
        out, files, sizes = str(self.path.parent), itemgetter(*IMAGE_FILES), itemgetter(*_SIZES)
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


LOCK = ".lock"
FORMAT = "saliency batch 5"
ABOUT = "manifest.json"
PAGE = "index.html"
GROUPS, GROUPS_CSV = "groups.html", "groups.csv"  # of saliency groups
EVALUATION, EVALUATION_PAGE, RESULTS = "evaluation.json", "evaluation.html", "results"  # of saliency evaluate

OVERLAYS, THUMBNAILS, HEAT, MAPS, CARDS = "overlays", "thumbnails", "heat", "maps", "trust"
FOLDERS = (OVERLAYS, THUMBNAILS, HEAT, MAPS, CARDS)
FILES = (PAGE, GROUPS, GROUPS_CSV, CSV, MANIFEST, LISTING, ABOUT)

HEAD: dict[str, Any] = {
    "format": re.compile(json.dumps(FORMAT)),
    "methods": [re.compile(r'"[\w .-]+"')],  # parts of the names of files, which a restart removes
    "batch_sizes": re.compile(r"\[\[0, [1-9]\d*\](, \[\d+, [1-9]\d*\])*\]"),
    "model": {"name": str, "weights": str | None},
    "fingerprint": {"opacity": str | float | int},
}
HEAD |= {"command": [str], "folder": str, "versions": dict, "finished": bool}
"""The shape of the keys of `manifest.json` that are read again; see `fits`."""

FAILURES_SHOWN = 20
"""Largest number of failures that a summary lists."""

_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.part")


@contextmanager
def locked(out: str | os.PathLike[str]) -> Iterator[Path]:
    """Create the folder, and lock it against other runs until the block or the process ends. Yield its absolute path.

    A new folder in which an error left nothing is removed.

    Raises:
        MethodError: `out` is not a path.
        BatchError: The folder is a file, another run has locked it, it cannot be written to, or a link has the name of
            a file or folder of a run.
    """
    folder = check_path("out", out)
    if re.match(r"[a-z][a-z0-9+.-]+:/", str(folder)):  # Path has removed a slash
        hint = "choose a local or mounted folder, and copy it afterwards"
        raise BatchError(f"{folder} is an address, where files cannot be locked or appended to: {hint}")
    folder = folder.absolute()  # code of the user may change the current folder
    is_new = not os.path.lexists(folder)
    if not is_new and not os.path.isdir(folder):  # noqa: PTH112 - unlike Path, never raises
        raise BatchError(f"{folder} is a file, not a folder; choose another one for --out")
    with ExitStack() as undo:
        with writing_to(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for name in (LOCK, EVALUATION, EVALUATION_PAGE, RESULTS, *FOLDERS, *FILES):
                inside(folder, name)
            file = undo.enter_context((folder / LOCK).open("a+b"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = (folder / LOCK).read_bytes().decode("ascii", "replace").partition(" ")[0]
                who = f"process {holder}" if holder else "another process"
                raise BatchError(f"{folder} is in use by another run ({who}); choose another folder") from error
            undo.callback(file.truncate, 0)  # an empty lock file shows workers on other machines that the run has ended
            file.truncate(0)
            file.write(f"{os.getpid()} {uuid4().hex}".encode())
            file.flush()
        try:
            yield folder
        except BaseException:
            if is_new and [file.name for file in folder.iterdir()] == [LOCK]:
                (folder / LOCK).unlink()
                folder.rmdir()
            raise


def file_names(entry: ImageEntry, method: str, format: str, with_manifest: bool) -> dict[str, str]:
    """Return the path of each file of an image and method, relative to the folder."""
    name = f"{entry.name}.{method}"
    map_suffix = "nii.gz" if entry.is_volume else "safetensors"
    if not with_manifest:
        card = {"card": f"{name}.trust.html", "card_image": f"{name}.trust.png"}
        return {"overlay": f"{name}.{format}", "map": f"{name}.{map_suffix}", **card}
    return {
        "overlay": f"{OVERLAYS}/{name}.{format}",
        "heat": f"{HEAT}/{name}.webp",
        "map": f"{MAPS}/{name}.{map_suffix}",
        "card": f"{CARDS}/{name}.html",
        "card_json": f"{CARDS}/{name}.json",
        "thumbnail": f"{THUMBNAILS}/{entry.name}.jpg",
    }


def read_head(folder: Path) -> dict[str, Any] | None:
    """Return the content of `manifest.json`; None if there is no run.

    Raises:
        BatchError: The file is not a manifest of this format, or is damaged; or there is no run, and the folder
            contains files where a run would write.
    """
    if os.path.lexists(folder / ABOUT):
        head: dict[str, Any] | None = read_json(folder / ABOUT, HEAD)
        if head is None:
            raise BatchError(f"{folder / ABOUT} is damaged, or from another version; choose another folder")
        return head
    remove_temporary_files(folder)
    used = [name for name in FILES if os.path.lexists(folder / name)]
    used += [name for name in FOLDERS if any(files for *_, files in os.walk(folder / name))]
    if used:
        raise BatchError(f"{used[0]} exists in {folder}, without a run; choose another folder for --out")
    return None


def read_run(folder: Path) -> dict[str, Any]:
    """Return the content of `manifest.json`. Raises BatchError if there is no run, or the file is damaged."""
    head = read_head(folder) if (folder / ABOUT).is_file() else None
    if head is None:
        raise BatchError(f"no {ABOUT} in {folder}; expected the folder that saliency batch --out wrote")
    return head


def write_head(folder: Path, head: dict[str, Any]) -> None:
    """Replace `manifest.json`."""
    durable_write(folder / ABOUT, [f"{json.dumps(head, indent=1)}\n".encode()])


def write_listing(folder: Path, entries: Sequence[ImageEntry]) -> None:
    """Replace the listing."""
    durable_write(folder / LISTING, (f"{entry.to_json()}\n".encode() for entry in entries))


def remove_temporary_files(folder: Path, subfolders: Iterable[str] = (*FOLDERS, RESULTS)) -> None:
    """Remove the temporary files of writers that were killed, from the folder and some of its subfolders."""
    below = (walked for name in subfolders for walked in os.walk(folder / name))
    for path, _, files in chain([next(os.walk(folder))], below):
        for name in filter(_TEMPORARY.fullmatch, files):
            (Path(path) / name).unlink(missing_ok=True)


def clear(folder: Path, entries: Iterable[ImageEntry], methods: Sequence[str]) -> None:
    """Remove all files that a run writes, and no others. Empty folders stay."""
    remove_files(folder, entries, methods)
    # manifest.json is removed last: without it, an interrupted removal could not be repeated.
    for name in FILES:
        (folder / name).unlink(missing_ok=True)


def remove_files(folder: Path, entries: Iterable[ImageEntry], methods: Sequence[str]) -> None:
    """Remove the files of some images. Files in linked folders are not removed."""
    checked = cache(partial(inside, folder))
    for entry in entries:
        files = [file_names(entry, method, suffix, with_manifest=True) for method in methods for suffix in FORMATS]
        for name in {name for names in files for name in names.values()}:
            subfolder, _, file = name.rpartition("/")
            with suppress(OSError):
                os.unlink(f"{checked(subfolder)}/{file}")  # noqa: PTH108 - called for every file


def fits(value: object, shape: Any) -> bool:
    """Return whether a JSON value has a shape.

    A shape is a type, a pattern of the value as JSON, `[shape]` for a list, or `{key: shape}` for an object, which may
    have other keys.
    """
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(key in value and fits(value[key], part) for key, part in shape.items())
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(entry, shape[0]) for entry in value)
    if isinstance(shape, re.Pattern):
        return shape.fullmatch(json.dumps(value, ensure_ascii=False)) is not None
    return isinstance(value, shape)


def read_json(path: Path, shape: Any) -> Any:
    """Return the content of a file; None if there is no file, or it is damaged or has another shape."""
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return content if fits(content, shape) else None


def is_output(path: str) -> bool:
    """Return whether a run writes this file or folder."""
    whole = Path(os.path.realpath(path))
    inside = any(folder.name in FOLDERS and _is_run(folder.parent) for folder in (whole, *whole.parents))
    return inside or (whole.name in FILES and _is_run(whole.parent))


def _is_run(folder: Path) -> bool:
    try:
        return b'"saliency batch ' in (folder / ABOUT).read_bytes()  # the marker of any version
    except OSError:
        return False


class Store:
    """Images of a run and counts of their results. It reads and writes no rows; subclasses keep them in files.

    Args:
        out: The output folder.
        entries: The images.
        methods: Names of the methods.
        limit: Largest number of images to explain, with all their detections; None for all.

    Attributes:
        total: Number of entries to explain, from the first on.
        missing: Methods without results, by the number of the image; images with all results are absent.
        sizes: Pairs of the first image and the size of its batch and of the following batches.
        failed: Numbers of the images with an error.
        failures: The rows of errors of this run.
        fresh: Number of images that this run explained.
        repeated: Number of images whose batch was repeated in parts, by the error.
    """

    resumes = False

    def __init__(
        self, out: Path, entries: Sequence[ImageEntry], methods: Sequence[str], limit: int | None = None
    ) -> None:
        self.out, self.entries, self.methods, self._limit = out, entries, methods, limit
        self.sizes: Sequence[tuple[int, int]] = [(0, 1)]
        self.failed: set[int] = set()
        self.failures: list[Row] = []
        self.fresh = 0
        self.repeated: Counter[str] = Counter()
        self._find_missing()

    def _find_missing(self) -> None:
        images = accumulate(not entry.detection for entry in self.entries)
        self.total = sum(self._limit is None or number <= self._limit for number in images)
        lacking = {index: self.lacking(index, self.methods) for index in range(self.total)}
        self.missing = {index: methods for index, methods in lacking.items() if methods}

    @property
    def done(self) -> int:
        """Number of images with results of all methods, or with an error."""
        return self.total - len(self.missing)

    def lacking(self, index: int, methods: Sequence[str]) -> tuple[str, ...]:
        """Return the methods that have no stored results for an image."""
        return tuple(methods)

    def plan(self) -> Plan:
        """Return the plan of the missing results."""
        return Plan(self.entries, dict(self.missing), self.sizes)

    def prepare(self, network: Network, batch_size: int, parallel: int) -> None:
        """Prepare the output folder before the first image.

        Args:
            network: A network of the run.
            batch_size: Default number of images per batch of the engine.
            parallel: Number of batches that run in parallel.

        Raises:
            StoppedError: The folder cannot be written to.
        """
        require_writable(self.out)

    def write_sizes(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Store other batch sizes, before the first results of these sizes."""
        self.sizes = sizes

    def append(self, rows: Sequence[Row]) -> None:
        """Store the rows of an image: a row per method, or a single row without a method for an error of the image."""
        index, methods = rows[0]["index"], {row["method"] for row in rows}
        unfinished = tuple(method for method in self.missing.pop(index) if method not in methods)
        if unfinished and None not in methods:  # interrupted between two methods
            self.missing[index] = unfinished
        failed = [row for row in rows if row["error"] is not None]
        self.failed |= {index} if failed else set()
        self.failures += failed
        self.fresh += 1
        self.repeated.update({row["repeated"] for row in rows if row.get("repeated")})


class ManifestStore(Store):
    """Store in a locked folder with a manifest, which resumes.

    Args:
        out: The output folder.
        entries: Images that the sources contain now.
        options: The model, the methods and the target.
        output: The files of each image.
        run: Options of the run.
    """

    resumes = True

    def __init__(
        self,
        out: Path,
        entries: Sequence[ImageEntry],
        options: NetworkOptions,
        output: OutputOptions,
        run: RunOptions,
    ) -> None:
        self._start = time.monotonic()
        self._options, self._output, self._run = options, output, run
        remove_temporary_files(out, ())  # left by a run that was killed while it wrote its page
        head, self._replaced = read_head(out), None
        if head is not None and (run.restart or next(read_rows(out / MANIFEST), None) is None):
            self._replaced = read_listing(out), head["methods"]
            head = None
        listed = read_listing(out) if head is not None else []
        if head is not None and not listed:
            raise BatchError(f"{out / LISTING} is missing or empty; start again with --restart (restart=True)")
        self.listing = merge_listing(listed, entries, MOST_PER_FOLDER)
        self.head = self._new_head() if head is None else self._checked_head(out, head)
        # The methods of the folder: methods of earlier runs, then new ones.
        self.head["methods"] = list(dict.fromkeys([*self.head.get("methods", ()), *options.methods]))
        self.manifest = Manifest(out, self.head["methods"])
        # Write the listing with new stamps later, so that changes are detected again after an interruption.
        retry = (None, *options.methods) if run.retry else ()
        if head is not None:
            self.manifest.read(retry=retry, changed=self.listing.changed)
        remove_files(out, [self.listing.entries[index] for index in self.listing.changed], self.head["methods"])
        # A removed image keeps the results that it has.
        self._kept = self.listing.removed & {index for index, _ in self.manifest.rows}
        super().__init__(out, self.listing.entries, options.methods, run.limit)
        self.failed = {index for index, _ in self.manifest.failures(options.methods)}

    def _new_head(self) -> dict[str, Any]:
        values, weights = fingerprint(self._options, self._output), self._options.weights
        model = {"name": self._options.model_name, "weights": values["weights"]}
        if isinstance(self._options.model, str) and weights not in (None, values["weights"]):  # a file, by its digest
            model["file"] = str(Path(weights).absolute())
        versions = {"python": sys.version.split()[0]}
        for name, distribution in (("saliency", DISTRIBUTION), ("torch", "torch"), ("torchvision", "torchvision")):
            with suppress(PackageNotFoundError):
                versions[name] = version(distribution)
        return {
            "format": FORMAT,
            "versions": versions,
            "model": model,
            "command": list(self._run.command),
            "folder": str(Path.cwd()),
            "fingerprint": values,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }

    def _checked_head(self, out: Path, head: dict[str, Any]) -> dict[str, Any]:
        """Return the head with the new methods of this run. Raises BatchError if the results have other options."""
        old, new = head["fingerprint"], fingerprint(self._options, self._output)
        different = [name for name in new if old.get(name, new[name]) != new[name]]
        if different:
            # A method without rows, such as a method with an invalid option, may have other options now.
            explained = {"", *(row["method"] for row, _ in read_rows(out / MANIFEST))}
            different = [name for name in different if name.partition(" of ")[2] in explained]
        if different:
            reasons = "; ".join(f"{name} was {old[name]!r} and is now {new[name]!r}" for name in different)
            raise BatchError(
                f"{out} contains a run with other options: {reasons}; choose another folder, "
                "or start again with --restart (restart=True), which removes the files of that run"
            )
        command, added = head["command"], list(self._run.command)
        if new.keys() - old.keys():
            command = [*command, "&&", *added] if command else added
        return head | {"fingerprint": old | new, "command": command}

    def lacking(self, index: int, methods: Sequence[str]) -> tuple[str, ...]:
        """Return the methods that have no row for an image."""
        is_done = self.manifest.is_done
        return () if index in self._kept else tuple(method for method in methods if not is_done(index, method))

    def prepare(self, network: Network, batch_size: int, parallel: int) -> None:
        """Remove files of killed runs, and store the description of the run, its batch sizes and its images.

        A restart removes the earlier run here, where the model and the options are known to be valid.
        """
        remove_temporary_files(self.out)
        self.head["preprocess"] = without_address(network.preprocess)
        if self._options.detections is not None:
            self._list_detections(network, self._options.detections)
        # With trust cards, which take longer than all else, progress is reported, and a run can be interrupted, after
        # each image. Volumes are large.
        is_slow = self._output.trust or any(entry.is_volume for entry in self.entries)
        chosen = self._run.batch_size
        size = chosen or max(1, min(1 if is_slow else batch_size, len(self.entries) // parallel))
        # A resumed run keeps its batch sizes. Only a smaller size is accepted, for machines with less memory.
        stored = self.head.get("batch_sizes", [(0, size)])
        with writing_to(self.out):
            if self._replaced is not None:
                clear(self.out, *self._replaced)
            # Write manifest.json first: without it, a listing is treated as a file without a run.
            self.write_sizes([(first, min(size, chosen or size)) for first, size in stored])
            write_listing(self.out, self.entries)

    def _list_detections(self, network: Network, detections: int | str) -> None:
        """Replace each new image by an entry for each of its detections, with names such as `cat.0`.

        The new images come last. An image without detections keeps one entry, whose row says so.
        """
        new = [entry for entry in self.entries[: self.total] if entry.detection is None]
        first = self.total - len(new)
        most = detections if isinstance(detections, int) else sys.maxsize
        detected: list[ImageEntry] = []
        for entry in new:
            stem, suffix = os.path.splitext(entry.label)  # noqa: PTH122
            ranks = range(max(1, min(network.count_detections(entry), most)))
            detected += [entry._replace(label=f"{stem}.{rank}{suffix}", detection=rank) for rank in ranks]
        listed, rest = self.entries[:first], self.entries[self.total :]
        self.entries = [*listed, *with_names(detected, [*listed, *rest], MOST_PER_FOLDER), *rest]
        self._find_missing()

    def write_sizes(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Write the head with the batch sizes."""
        self.sizes = sizes
        self.head |= {"batch_sizes": sizes, "finished": False}
        with writing_to(self.out):
            write_head(self.out, self.head)

    def append(self, rows: Sequence[Row]) -> None:
        """Append the rows of an image to the manifest."""
        with writing_to(self.out):
            self.manifest.append(rows)
        super().append(rows)
        del self.failures[FAILURES_SHOWN:]

    def finish(self, write_page: Callable[[Path], object]) -> Summary:
        """Sort the manifest, write the page of the folder by a function, and return the summary."""
        manifest, methods = self.manifest, self.head["methods"]
        unfinished = Counter(method for index in range(self.total) for method in self.lacking(index, methods))
        failed = {index for index, _ in manifest.failures(methods)}
        counts = {"images": len(self.entries), "rows": len(manifest.rows), "failed": len(failed)}
        state = {"counts": counts, "finished": not unfinished}
        page = self.out / PAGE
        if not (manifest.is_sorted() and self.head | state == self.head and page.is_file()):
            with writing_to(self.out):
                manifest.sort()
                write_page(self.out)
                # Write this last: an interrupted update is then repeated.
                write_head(self.out, self.head | state)
        return Summary(
            folder=self.out,
            page=page,
            images=self.total,
            done=self.done,
            fresh=self.fresh,
            failed=len(self.failed),
            kinds=Counter(manifest.failures(self.methods).values()),
            failures=tuple((row["source"], row["method"] or "", row["error"]) for row in self.failures),
            seconds=time.monotonic() - self._start,
            changed=len(self.listing.changed),
            removed=tuple(self.listing.entries[index].source for index in sorted(self.listing.removed)),
            unfinished=unfinished,
            repeated=self.repeated,
        )
