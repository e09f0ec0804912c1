"""The images of a run: their paths, the names of their files, and merging with the listing of an earlier run."""

from __future__ import annotations

import io
import json
import os
import re
import stat
import sys
import unicodedata
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ImageError, NotApplicableError, errors_as, optional_import
from ..io.atomic_write import is_volume
from .failures import BatchError, sentence

if TYPE_CHECKING:
    from pathlib import Path

    from PIL import Image

    from ..targets.question import Target

LISTING = "listing.jsonl"

LONGEST = 160
"""Bytes of an image name in file names. File systems allow 255, including the method, suffix and number."""

MOST_PER_FOLDER = 10_000
"""Images of one folder, above which a new run puts their files into numbered subfolders."""

ARRAY = ".npy"
"""The suffix of float arrays (C, H, W), which a model with several inputs takes unchanged."""

_FORBIDDEN = frozenset('\\/:*?"<>|')


class ImageEntry(NamedTuple):
    """One image of the listing.

    Attributes:
        path: Absolute path, or address, of the file that contains the image.
        source: The path as the user named it.
        name: Stem of the output files of this image, relative to the folders of the run: "SUB/cat".
        folder: Folders between the source and the image.
        label: File name of the image.
        detection: Rank of the detection to explain, in a run over all detections; see `RunOptions`.
        target: Class index or name, or a target as text such as "box:0"; in runs without a listing, any target. None
            for the run's target.
        problem: Reason why there is no image to open; empty without a known problem.
        offset: First byte of the image in the file; None for the whole file.
        size: Number of bytes from `offset`.
        stamp: Size and modification time (ns) of the file when it was listed, or of all files of a case; empty if
            there was no file.
        inputs: The inputs of a case of a model with several inputs, by name: absolute paths, of which `path` is the
            first, and other arguments of the model. None for an image.

    The path of a DICOM series is its folder, and its label the name of the folder with the suffix .dcm.
    """

    path: str
    source: str
    name: str = ""
    folder: tuple[str, ...] = ()
    label: str = ""
    target: int | str | Target | None = None
    detection: int | None = None
    problem: str = ""
    offset: int | None = None
    size: int = 0
    stamp: tuple[int, ...] = ()
    inputs: Mapping[str, Any] | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """Path and offset, and the inputs of a case, which identify the image in a later listing."""
        return self.path, self.offset, self.inputs and json.dumps(self.inputs)

    @property
    def is_volume(self) -> bool:
        """Whether this is a NIfTI file, a DICOM series, or a DICOM file with several frames."""
        if not is_volume(self.label, (".dcm",)):
            return is_volume(self.label)
        from ..io.dicom import holds_frames  # imports NumPy and Pillow, which usage errors do not need

        return not is_volume(self.path, (".dcm",)) or holds_frames(self.path)

    def to_json(self) -> str:
        """Return the entry as one line of ASCII, including undecodable bytes of file names."""
        return json.dumps({name: value for name, value in self._asdict().items() if value not in ("", None, ())})

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> ImageEntry:
        """Create an entry from the object that `to_json` wrote, parsed. The entry takes over the dictionary.

        Raises:
            ValueError, TypeError, AttributeError: The object is not an entry.
        """
        name = fields.get("name", "")
        if name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"an entry outside the folder: {name}")
        folder, stamp = tuple(fields.pop("folder", ())), tuple(fields.pop("stamp", ()))
        return cls(**fields, folder=folder, stamp=stamp)

    def open(self, draft: int | None = None) -> Image.Image:
        """Open the image as `saliency.io.inputs.open_image` does. Only a file of its own is decoded as a draft.

        Raises:
            ImageError: It cannot be read.
            NotApplicableError: It is a volume.
        """
        from ..io.inputs import decode, open_image

        if self.problem:
            raise ImageError(self.problem)
        if self.is_volume:
            raise NotApplicableError("metrics, trust cards and the explorer are for images, not for volumes")
        if is_remote(self.path):
            return decode(io.BytesIO(read_bytes(self.path)), self.source)
        if self.offset is None:
            return open_image(self.path, draft=draft)
        problem = f"{self.source!r} cannot be read"
        with errors_as(ImageError, problem), open(self.path, "rb") as file:  # noqa: PTH123 - any bytes
            file.seek(self.offset)
            data = file.read(self.size)
        if len(data) < self.size:
            raise ImageError(f"{self.source!r} is truncated: the shard ends {self.size - len(data)} bytes too early")
        return decode(io.BytesIO(data), self.source)

    def open_inputs(self) -> dict[str, Any]:
        """Return the inputs of a case: images, the arrays of .npy files and lists of numbers, and other arguments.

        Raises:
            ImageError: A file cannot be read.
        """
        import numpy as np

        from ..io.inputs import open_image

        opened = dict(self.inputs or {})
        for name, value in opened.items():
            if is_case_file(value):
                with errors_as(ImageError, f"{name}: {value!r} cannot be read"):
                    opened[name] = np.load(value) if value.endswith(ARRAY) else open_image(value)
            elif isinstance(value, list):
                opened[name] = np.asarray(value)
        return opened

    def current_stamp(self) -> tuple[int, ...]:
        """Return the current stamp of the file, or of all files of a case; empty if a file does not exist."""
        if self.inputs is not None:
            files = filter(is_case_file, self.inputs.values())
            stamps = [self._replace(path=file, inputs=None).current_stamp() for file in files]
            return tuple(chain.from_iterable(stamps)) if all(stamps) else ()
        if is_remote(self.path):
            return () if self.problem else file_stamp(self.path)
        try:
            status = os.stat(self.path)  # noqa: PTH116 - called for every image
        except (OSError, ValueError):
            return ()
        is_file = stat.S_ISREG(status.st_mode) or (self.is_volume and stat.S_ISDIR(status.st_mode))
        return (status.st_size, status.st_mtime_ns) if is_file and not self.problem else ()

    def exists(self) -> bool:
        """Return whether the path exists, as a file, folder or link. An address is taken to exist."""
        return not self.problem and (is_remote(self.path) or os.path.lexists(self.path))


def read_listing(folder: Path) -> list[ImageEntry]:
    """Return the numbered images of earlier runs. Raises BatchError if the file is damaged."""
    with errors_as(BatchError, f"{folder / LISTING} is damaged; choose another folder"), suppress(FileNotFoundError):
        lines = (folder / LISTING).read_text("ascii").splitlines()
        return [ImageEntry.from_fields(fields) for fields in json.loads(f"[{','.join(lines)}]")]
    return []


@dataclass(frozen=True, slots=True)
class Listing:
    """The numbered images of a run.

    Attributes:
        entries: Images of earlier runs, then new images, with names and current stamps.
        changed: Numbers of the images whose file has changed since it was listed.
        removed: Numbers of the images that no longer exist. These keep their numbers and stamps.
    """

    entries: list[ImageEntry]
    changed: frozenset[int]
    removed: frozenset[int]


def merge_listing(
    listed: Sequence[ImageEntry], entries: Sequence[ImageEntry], most_per_folder: int = sys.maxsize
) -> Listing:
    """Append new images to the listing of earlier runs, and find images that changed or were removed.

    Args:
        listed: Listing of earlier runs; empty for a new run.
        entries: Images that the sources contain now.
        most_per_folder: As in `with_names`.

    Raises:
        BatchError: There is no image, the folder contains a run over other images, the target of an image changed, or
            an image of a shard is at another place.
    """
    if not listed and not any(entry.exists() for entry in entries):
        first = entries[0] if entries else None
        why = (
            sentence(first.source, None, first.problem or "no such file or folder") if first else "no source was given"
        )
        raise BatchError(f"there is no image: {why}")
    listed_by_key = dict(zip(_keys(listed), listed, strict=True))
    new: list[ImageEntry] = []
    for entry, key in zip(entries, _keys(entries), strict=True):
        earlier = listed_by_key.get(key)
        target = entry.target if earlier is None else earlier.target
        if target != entry.target and str(target) != str(entry.target):  # 281 and "281" are one class
            raise BatchError(
                f"the target of {entry.source} was {target!r} and is now {entry.target!r}; choose another "
                "folder, or start again with --restart (restart=True)"
            )
        if earlier is None and (entry.exists() or not listed):
            new.append(entry)
    if listed and new and len(new) == len(entries):
        raise BatchError(
            f"the folder contains a run over other images, such as {listed[0].source}; choose another folder, "
            "or start again with --restart (restart=True)"
        )
    stamps = [entry.current_stamp() for entry in listed]
    changed = frozenset(index for index, entry in enumerate(listed) if stamps[index] and stamps[index] != entry.stamp)
    removed = frozenset(index for index, entry in enumerate(listed) if entry.stamp and not stamps[index])
    sizes = {entry.key: entry.size for entry in entries if entry.offset is not None}
    shards = {path for path, *_ in sizes}
    of_shards = (listed[index] for index in changed if listed[index].offset is not None)
    if moved := [entry.path for entry in of_shards if entry.path in shards and sizes.get(entry.key) != entry.size]:
        problem = f"the shard {moved[0]} was written again, so images of the run are at other places"
        raise BatchError(f"{problem}; choose another folder, or start again with --restart (restart=True)")
    current = [entry._replace(stamp=stamps[index]) if index in changed else entry for index, entry in enumerate(listed)]
    return Listing([*current, *with_names(new, listed, most_per_folder)], changed, removed)


def names_in(folder: Path, entries: Sequence[ImageEntry]) -> list[str]:
    """Return the names of images in the run of a folder, and new names for images that are not in a run."""
    listed = read_listing(folder)
    names = {key: entry.name for key, entry in zip(_keys(listed), listed, strict=True) if entry.detection is None}
    new = with_names(entries, listed)
    return [names.get(key, entry.name) for key, entry in zip(_keys(entries), new, strict=True)]


def _keys(entries: Sequence[ImageEntry]) -> list[tuple[object, ...]]:
    """Return a unique key per image. An image that a list contains several times gets several keys."""
    times: Counter[tuple[object, ...]] = Counter()
    keys: list[tuple[object, ...]] = []
    for entry in entries:
        times[entry.key] += 1
        keys.append((*entry.key, times[entry.key]))
    return keys


def with_names(
    entries: Sequence[ImageEntry], listed: Sequence[ImageEntry] = (), most_per_folder: int = sys.maxsize
) -> list[ImageEntry]:
    """Return the images with stamps and with unique names for their files, such as "SUB/cat" without the suffix.

    Images with equal names are numbered: "a", "a-2". Names that differ only in case or Unicode form are treated as
    equal, as on some file systems.

    Args:
        entries: The images, in order.
        listed: Images of earlier runs, whose names are already in use.
        most_per_folder: Number of images of a folder above which their names are in numbered subfolders, such as
            "SUB/0001/cat". A folder of earlier runs has such subfolders if the listed images have them.
    """
    if not entries:
        return []
    sizes, counts = Counter(entry.folder for entry in entries), Counter(entry.folder for entry in listed)
    split = {entry.folder for entry in listed if entry.name.count("/") > len(entry.folder)}
    split |= {folder for folder, size in sizes.items() if size > most_per_folder and not counts[folder]}
    used = {_normalized(entry.name) for entry in listed}
    numbers: Counter[str] = Counter()
    named = []
    for entry in entries:
        # Remove dots from the names of folders: file names contain a dot, so that they never equal a folder name.
        folders = [_safe_name(part).replace(".", "_") for part in entry.folder]
        if entry.folder in split:
            folders.append(f"{counts[entry.folder] // most_per_folder:04d}")
        counts[entry.folder] += 1
        stem = os.path.splitext(entry.label.removesuffix(".gz"))[0]  # noqa: PTH122
        name = "/".join((*folders, _safe_name(stem or entry.label)))
        base, unique = _normalized(name), name
        while _normalized(unique) in used:
            numbers[base] += 1
            unique = f"{name}-{numbers[base] + 1}"
        used.add(_normalized(unique))
        named.append(entry._replace(name=unique, stamp=entry.current_stamp()))
    return named


def _safe_name(text: str) -> str:
    """Return a valid file name: allowed characters only, in composed Unicode form, and at most `LONGEST` bytes."""
    composed = unicodedata.normalize("NFC", text)
    plain = "".join(c if c.isprintable() and c not in _FORBIDDEN else "_" for c in composed)
    plain = plain.encode("utf-8", "replace")[:LONGEST].decode("utf-8", "ignore").strip(" ")
    if plain.startswith((".", "~")):
        plain = f"_{plain[1:]}"
    return plain or "_"


def _normalized(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFKC", name).casefold())


def is_case_file(value: object) -> bool:
    """Return whether an input of a case is a file, and not another argument of the model."""
    return isinstance(value, str) and os.path.isabs(value)  # noqa: PTH117


# Facts of a file that change with its content, in the names of several stores; the first that exists is used.
_VERSIONS = ("ETag", "etag", "md5Hash", "content_md5", "mtime", "LastModified", "last_modified", "updated", "created")

_ADDRESS = re.compile(r"(?!https?:|ftp:)[a-z][a-z0-9+.-]+://")


def is_remote(name: str) -> bool:
    """Return whether a name is an address that fsspec reads: s3://, gs://, memory://, but not the web (http, ftp)."""
    return _ADDRESS.match(name) is not None


def _connect(address: str) -> tuple[Any, str]:
    """Return the file system of an address, and the path on it.

    Raises:
        DependencyError: fsspec is not installed.
        ImageError: fsspec does not know the file system, or lacks its package.
    """
    fsspec = optional_import("fsspec", "remote", f"the address {address}")
    with errors_as(ImageError, "cannot be read"):
        files, path = fsspec.core.url_to_fs(address)
    return files, path


def list_files(address: str, *, recursive: bool = False) -> list[tuple[str, tuple[str, ...]]]:
    """Return the addresses of the files in a folder, or of a file or pattern, sorted, with the folders between.

    Hidden files of a folder, and files of its hidden folders, are left out.

    Args:
        address: The address.
        recursive: Whether subfolders are searched.

    Raises:
        DependencyError: fsspec is not installed.
        ImageError: The address cannot be listed.
    """
    files, root = _connect(address)
    with errors_as(ImageError, "cannot be listed"):
        is_folder = files.isdir(root)
        paths = files.find(root, maxdepth=None if recursive else 1) if is_folder else files.glob(root)
    paths = [path for path in paths if not (is_folder and "/." in f"/{path.removeprefix(root)}")]
    below = len(root.strip("/").split("/"))
    parts = [tuple(path.strip("/").split("/"))[below:-1] if is_folder else () for path in paths]
    return sorted(zip(map(files.unstrip_protocol, paths), parts, strict=True))


def read_bytes(address: str) -> bytes:
    """Return the content of a file. Raises ImageError if it cannot be read."""
    files, path = _connect(address)
    with errors_as(ImageError, "cannot be read"):
        content: bytes = files.cat_file(path)
    return content


def file_stamp(address: str) -> tuple[int, ...]:
    """Return the size and a checksum of the version of a file; empty if there is no file.

    Raises:
        ImageError: The file system cannot be reached.
    """
    files, path = _connect(address)
    with errors_as(ImageError, f"{address} cannot be read"):
        try:
            facts = files.info(path)
        except FileNotFoundError:
            return ()
    version = next((facts[name] for name in _VERSIONS if facts.get(name) is not None), None)
    return int(facts["size"] or 0), zlib.crc32(str(version).encode())
