"""The output folder of a run: lock, manifest.json (the head), listing, file names and removal."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from ..io.atomic_write import atomic_write
from .errors import BatchError, writing_to
from .listing import ImageEntry, absolute
from .manifest import MANIFEST, PARQUET, Manifest
from .run_options import FORMATS

LOCK = ".lock"
FORMAT = "saliency batch 1"
ABOUT = "manifest.json"
LISTING = "listing.jsonl"
PAGE = "index.html"

OVERLAYS, PREVIEWS, HEAT, MAPS = "overlays", "photos", "heat", "maps"
FOLDERS = (OVERLAYS, PREVIEWS, HEAT, MAPS)
FILES = (PAGE, PARQUET, MANIFEST, LISTING, ABOUT)
MAP_SUFFIX = "safetensors"

_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.part")
_HEAD_TYPES = {"fingerprint": dict, "counts": dict, "methods": list, "finished": bool}


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder against other runs until the block or the process ends.

    Raises:
        BatchError: Another run has locked the folder, or it cannot be written to.
    """
    with writing_to(folder):
        file = open(folder / LOCK, "a+b")  # noqa: PTH123, SIM115 - closed below
    with file:
        try:
            if sys.platform == "win32":
                import msvcrt

                file.seek(1 << 30)  # beyond the process id, which other runs read
                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK):
                raise BatchError(f"{folder} cannot be locked: {error.strerror}; choose a local folder") from error
            holder = (folder / LOCK).read_bytes().decode("ascii", "replace").partition(" ")[0]
            who = f"process {holder}" if holder else "another process"
            raise BatchError(f"{folder} is in use by another run ({who}); wait for it, or choose another") from error
        with writing_to(folder):
            file.truncate(0)
            file.write(f"{os.getpid()} {uuid4().hex}".encode())
            file.flush()
        try:
            yield
        finally:
            with suppress(OSError):
                file.truncate(0)  # tells workers on other machines that the run has ended


def file_names(image: ImageEntry, method: str, format: str) -> dict[str, str]:
    """Return the path of each file of an image and method, relative to the folder."""
    name = f"{image.name}.{method}"
    return {
        "overlay": f"{OVERLAYS}/{name}.{format}",
        "heat": f"{HEAT}/{name}.webp",
        "map": f"{MAPS}/{name}.{MAP_SUFFIX}",
        "photo": f"{PREVIEWS}/{image.name}.jpg",
    }


def _all_names(images: Iterable[ImageEntry], methods: Sequence[str]) -> Iterator[str]:
    for image in images:
        files = [file_names(image, method, suffix) for method in methods for suffix in FORMATS]
        yield from dict.fromkeys(name for names in files for name in names.values())


class OutputFolder:
    """The output folder of a run.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read_head(self, *, damaged: bool = False) -> dict[str, Any] | None:
        """Return the content of `manifest.json`; None if there is no run.

        Args:
            damaged: Whether a damaged file is accepted, to clear its run. The result then contains only the methods of
                the rows.

        Raises:
            BatchError: The file is not a manifest of this format, or is damaged.
        """
        try:
            head = json.loads((self.path / ABOUT).read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError:
            head = {"format": FORMAT} if self.read_listing(damaged=True) else None  # a valid listing: the file is ours
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            raise BatchError(f"{self.path / ABOUT} is not of this version of saliency batch; choose another folder")
        size = head.get("batch_size")
        if (
            all(isinstance(head.get(name), kind) for name, kind in _HEAD_TYPES.items())
            and all(isinstance(method, dict) and isinstance(method.get("name"), str) for method in head["methods"])
            and (type(size) is int and size >= 1)
        ):
            return head
        if not damaged:
            raise BatchError(
                f"{self.path / ABOUT} is damaged; choose another folder, or start again with --restart (restart=True)"
            )
        return {
            "methods": [{"name": name} for name in {row["method"] for row in Manifest(self.path, ()).rows()} - {None}]
        }

    def write_head(self, head: dict[str, Any]) -> None:
        """Replace `manifest.json`."""
        self._replace(ABOUT, json.dumps(head, indent=1) + "\n")

    def read_listing(self, *, damaged: bool = False) -> list[ImageEntry]:
        """Return the numbered images of earlier runs.

        Args:
            damaged: Whether damaged lines are skipped.

        Raises:
            BatchError: The file is damaged.
        """
        try:
            lines = (self.path / LISTING).read_bytes().splitlines()
        except FileNotFoundError:
            return []
        images = []
        for line in lines:
            try:
                images.append(ImageEntry.from_json(line))
            except (TypeError, ValueError) as error:
                if not damaged:
                    raise BatchError(
                        f"{self.path / LISTING} is damaged: {error}; start again with --restart"
                    ) from error
        return images

    def write_listing(self, images: Sequence[ImageEntry]) -> None:
        """Replace the listing."""
        self._replace(LISTING, "".join(f"{image.to_json()}\n" for image in images))

    def _replace(self, name: str, text: str) -> None:
        with atomic_write(self.path / name) as temporary:
            temporary.write_text(text, "ascii", newline="\n")

    def has_rows(self) -> bool:
        """Return whether a run has written its first row."""
        path = self.path / MANIFEST
        return path.is_file() and path.stat().st_size > 0

    def remove_temporary_files(self) -> None:
        """Remove the temporary files of writers that were killed."""
        for folder, _, files in self._walk():
            for name in filter(_TEMPORARY.fullmatch, files):
                (Path(folder) / name).unlink(missing_ok=True)

    def clear(self, images: Sequence[ImageEntry], methods: Sequence[str]) -> None:
        """Remove all files that a run writes, and no others."""
        self.remove(images, methods)
        for folder, _, _ in reversed(list(self._walk())[1:]):
            with suppress(OSError):  # a folder with other files is not empty, and is kept
                Path(folder).rmdir()
        # manifest.json is removed last: without it, an interrupted removal could not be repeated.
        for name in FILES:
            (self.path / name).unlink(missing_ok=True)

    def remove(self, images: Iterable[ImageEntry], methods: Sequence[str]) -> None:
        """Remove the files of some images."""
        for name in _all_names(images, methods):
            with suppress(OSError):
                os.unlink(f"{self.path}/{name}")  # noqa: PTH108 - called for every file

    def require_free(self, images: Sequence[ImageEntry], methods: Sequence[str]) -> None:
        """Raise BatchError if a new run would replace an existing file."""
        is_used = any((self.path / name).is_dir() for name in FOLDERS)
        for name in (*FILES, *(_all_names(images, methods) if is_used else ())):
            if os.path.lexists(f"{self.path}/{name}"):
                raise BatchError(
                    f"{self.path} contains other files: {name} would be replaced; choose another folder for --out"
                )

    def _walk(self) -> Iterator[tuple[str, list[str], list[str]]]:
        yield str(self.path), [], [entry.name for entry in os.scandir(self.path)]
        for name in FOLDERS:
            yield from os.walk(self.path / name)


def output_test(out: Path | None) -> Callable[[str], bool]:
    """Return a function that returns whether the run in `out` wrote a path.

    The function raises BatchError for an existing file in a folder that a new run writes to. Later it could not be
    distinguished from a file of the run.
    """
    top = None if out is None else os.path.realpath(out)
    is_resumed = top is not None and os.path.lexists(f"{top}/{ABOUT}")

    def is_own(path: str) -> bool:
        if top is None:
            return False
        inside = os.path.relpath(os.path.realpath(path), top)
        first = next(iter(Path(inside).parts), "")
        if first in FOLDERS and not is_resumed and os.path.lexists(path):
            raise BatchError(
                f"{os.path.join(top, first)} exists, and the run would write there; choose another folder for --out"  # noqa: PTH118
            )
        return is_resumed and (first in FOLDERS or inside in FILES)

    return is_own


def is_run_output(path: str, top: str) -> bool:
    """Return whether the path belongs to the output of any run in a folder below `top`."""
    end, inside = absolute(top), absolute(path)
    is_last = True
    while inside != end and os.path.dirname(inside) != inside:  # noqa: PTH120
        folder, name = os.path.split(inside)
        if (name in FOLDERS or (is_last and name in FILES)) and all(
            os.path.isfile(f"{folder}/{file}")  # noqa: PTH113
            for file in (ABOUT, LISTING)
        ):
            return True
        inside, is_last = folder, False
    return False
