"""The folder of a run: what it is called, what earlier runs left in it, and how it is cleared."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from ..io.atomic_write import atomic_write
from .errors import BatchError, unwritable
from .image_entry import Photo, absolute
from .manifest import MANIFEST, Manifest
from .run_options import FORMATS

LOCK = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The folder, held against other runs until the block or the process ends, however it ends.

    Raises:
        BatchError: Another run holds it, or it cannot be written to.
    """
    try:
        file = open(folder / LOCK, "a+b")  # noqa: PTH123, SIM115 - closed below
    except OSError as error:
        raise unwritable(folder, error) from error
    with file:
        try:
            _hold(file)
        except OSError as error:
            raise _refusal(folder, error) from error
        try:
            file.truncate(0)
            file.write(str(os.getpid()).encode())
            file.flush()
        except OSError as error:
            raise unwritable(folder, error) from error
        yield


def _hold(file: BinaryIO) -> None:
    if sys.platform == "win32":
        import msvcrt

        file.seek(1 << 30)  # far from the number of the process, which others read
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _refusal(folder: Path, error: OSError) -> BatchError:
    if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK):
        return BatchError(f"{folder} cannot be locked against other runs: {error.strerror}; choose a local folder")
    holder = (folder / LOCK).read_bytes().decode("ascii", "replace").strip()
    who = f"process {holder}" if holder else "another process"
    return BatchError(f"{folder} is being written to by another run ({who}); wait for it, or choose another folder")


FORMAT = "saliency batch 1"
ABOUT = "manifest.json"
LISTING = "listing.jsonl"
PARQUET = "manifest.parquet"
PAGE = "index.html"

OVERLAYS, PHOTOS, HEAT, MAPS = "overlays", "photos", "heat", "maps"
FOLDERS = (OVERLAYS, PHOTOS, HEAT, MAPS)
FILES = (PAGE, PARQUET, MANIFEST, LISTING, ABOUT)
PREVIEW_SUFFIX, HEAT_SUFFIX, MAP_SUFFIX = "jpg", "webp", "safetensors"

_LEFT_OVER = re.compile(r"\.[0-9a-f]{32}\.part")


class Folder:
    """The folder of a run.

    Args:
        path: Where it is, or is to be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def about(self, *, damaged: bool = False) -> dict[str, Any] | None:
        """What `manifest.json` says; None where there is no run yet.

        Args:
            damaged: Whether one that is damaged is taken too, for the run to be cleared, with the methods of its rows.

        Raises:
            BatchError: It is no manifest of ours, or of another format, or damaged.
        """
        try:
            found = json.loads((self.path / ABOUT).read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError:
            found = {"format": FORMAT} if self.listing(damaged=True) else None  # what lies beside it is ours
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise BatchError(f"{self.path / ABOUT} is none of this version of saliency batch; choose another folder")
        if _is_whole(found):
            return found
        if not damaged:
            raise BatchError(
                f"{self.path / ABOUT} is damaged; choose another folder, or begin anew with --restart (restart=True)"
            )
        named = {row["method"] for row in Manifest(self.path, ()).rows()} - {None}
        return {"methods": [{"name": name} for name in named]}

    def write_about(self, about: dict[str, Any]) -> None:
        """Replace `manifest.json`."""
        with atomic_write(self.path / ABOUT) as temporary:
            temporary.write_text(json.dumps(about, indent=1, ensure_ascii=True) + "\n", "utf-8", newline="\n")

    def listing(self, *, damaged: bool = False) -> list[Photo]:
        """The photos that earlier runs have numbered.

        Args:
            damaged: Whether lines that are none are passed over.

        Raises:
            BatchError: The file is damaged.
        """
        try:
            lines = (self.path / LISTING).read_bytes().splitlines()
        except FileNotFoundError:
            return []
        found = []
        for line in lines:
            try:
                found.append(Photo.from_json(line))
            except (TypeError, ValueError) as error:
                if not damaged:
                    raise BatchError(f"{self.path / LISTING} is damaged: {error}; begin anew with --restart") from error
        return found

    def write_listing(self, photos: Sequence[Photo]) -> None:
        """Replace the listing."""
        with atomic_write(self.path / LISTING) as temporary:
            temporary.write_text("".join(f"{photo.to_json()}\n" for photo in photos), "ascii", newline="\n")

    def has_rows(self) -> bool:
        """Whether a run has got as far as its first row."""
        path = self.path / MANIFEST
        return path.is_file() and path.stat().st_size > 0

    def tidy(self) -> None:
        """Remove what writers that were killed have left under temporary names."""
        for folder, _, files in self._walk():
            for name in files:
                if _LEFT_OVER.fullmatch(name):
                    (Path(folder) / name).unlink(missing_ok=True)

    def clear(self, photos: Sequence[Photo], methods: Sequence[str]) -> None:
        """Remove what a run has made, or may have made when it was stopped, and nothing else."""
        self.remove(photos, methods)
        for folder, _, _ in reversed(list(self._walk())):
            if Path(folder) != self.path:
                with suppress(OSError):  # what is not empty holds files of others
                    Path(folder).rmdir()
        # The head goes last: a run that is stopped before can be cleared again.
        for name in FILES:
            (self.path / name).unlink(missing_ok=True)

    def remove(self, photos: Iterable[Photo], methods: Sequence[str]) -> None:
        """Remove what was made of some photos."""
        for photo in photos:
            for name in _all_names(photo, methods):
                with suppress(OSError):
                    os.unlink(f"{self.path}/{name}")  # noqa: PTH108 - as many as there are files

    def require_free(self, photos: Sequence[Photo], methods: Sequence[str]) -> None:
        """Raise BatchError where a new run would replace a file that is not its own."""
        there = [each for each in FOLDERS if (self.path / each).is_dir()]
        names: Iterator[str] = (name for photo in photos for name in _all_names(photo, methods)) if there else iter(())
        for name in (*FILES, *names):
            if os.path.lexists(f"{self.path}/{name}"):
                raise BatchError(
                    f"{self.path} holds files of others: {name} would be replaced; choose another folder for --out"
                )

    def _walk(self) -> Iterator[tuple[str, list[str], list[str]]]:
        yield str(self.path), [], [each.name for each in os.scandir(self.path)]
        for name in FOLDERS:
            yield from os.walk(self.path / name)


class Own:
    """What the run itself has made, or is to make.

    Args:
        out: The folder of the run; None for none.
    """

    def __init__(self, out: Path | None) -> None:
        self._out = None if out is None else os.path.realpath(out)
        self._goes_on = self._out is not None and os.path.lexists(f"{self._out}/{ABOUT}")

    def has_made(self, path: str) -> bool:
        """Whether the run has made a file or a folder.

        Raises:
            BatchError: It has not, but would write there, so that later its files could not be told from what is there.
        """
        if self._out is None:
            return False
        inside = os.path.relpath(os.path.realpath(path), self._out)
        first = next(iter(Path(inside).parts), "")
        if first in FOLDERS and not self._goes_on and os.path.lexists(path):
            raise BatchError(
                f"{os.path.join(self._out, first)} is there already, and the run would write there; "  # noqa: PTH118
                "choose another folder for --out"
            )
        return self._goes_on and (first in FOLDERS or inside in FILES)


def is_made(path: str, named: str) -> bool:
    """Whether some run has made a file or a folder, as far as the folders below `named` tell."""
    top = absolute(named)
    inside = absolute(path)
    is_last = True
    while inside != top:
        folder, name = os.path.split(inside)
        if folder == inside:
            break
        if (name in FOLDERS or (is_last and name in FILES)) and _holds_a_run(folder):
            return True
        inside, is_last = folder, False
    return False


def overlay_file(photo: Photo, method: str, format: str) -> str:
    """Where the overlay of a photo lies in the folder."""
    return f"{OVERLAYS}/{photo.name}.{method}.{format}"


def preview_file(photo: Photo) -> str:
    """Where the plain photo lies, small."""
    return f"{PHOTOS}/{photo.name}.{PREVIEW_SUFFIX}"


def heat_file(photo: Photo, method: str) -> str:
    """Where the map alone lies, in colours."""
    return f"{HEAT}/{photo.name}.{method}.{HEAT_SUFFIX}"


def map_file(photo: Photo, method: str) -> str:
    """Where the raw values lie."""
    return f"{MAPS}/{photo.name}.{method}.{MAP_SUFFIX}"


def _all_names(photo: Photo, methods: Sequence[str]) -> Iterator[str]:
    yield preview_file(photo)
    for method in methods:
        yield heat_file(photo, method)
        yield map_file(photo, method)
        yield from (overlay_file(photo, method, each) for each in FORMATS)


def _is_whole(about: dict[str, Any]) -> bool:
    """Whether a head has all that a run reads of it."""
    kinds = {"fingerprint": dict, "counts": dict, "batches": list, "methods": list, "finished": bool}
    if not all(isinstance(about.get(name), kind) for name, kind in kinds.items()):
        return False
    pieces = all(
        isinstance(each, list) and len(each) == 2 and all(type(number) is int and number >= 0 for number in each)
        for each in about["batches"]
    )
    size = about.get("batch_size", 0)
    methods = all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in about["methods"])
    return pieces and methods and (size is None or (type(size) is int and size >= 1))


def _holds_a_run(folder: str) -> bool:
    return all(os.path.isfile(f"{folder}/{name}") for name in (ABOUT, LISTING))  # noqa: PTH113
