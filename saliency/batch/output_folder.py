"""The output folder of a run: lock, manifest.json (the head), listing, file names and removal."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any
from uuid import uuid4

from ..io.atomic_write import atomic_write
from .failures import BatchError, writing_to
from .listing import ImageEntry
from .manifest import CSV, MANIFEST
from .run_options import FORMATS

LOCK = ".lock"
FORMAT = "saliency batch 3"
ABOUT = "manifest.json"
LISTING = "listing.jsonl"
PAGE = "index.html"
EVALUATION = "evaluation.json"
RESULTS = "results"  # of saliency evaluate

OVERLAYS, THUMBNAILS, HEAT, MAPS, CARDS = "overlays", "thumbnails", "heat", "maps", "trust"
FOLDERS = (OVERLAYS, THUMBNAILS, HEAT, MAPS, CARDS)
FILES = (PAGE, CSV, MANIFEST, LISTING, ABOUT)
CARD_FILES = ("card", "card_json", "card_image")

_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.part")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create the folder, and lock it against other runs until the block or the process ends.

    A new folder in which an error left nothing is removed.

    Raises:
        BatchError: The folder is a file, another run has locked it, or it cannot be written to.
    """
    if re.match(r"[a-z][a-z0-9+.-]+:/", str(folder)):  # Path has removed a slash
        hint = "choose a local or mounted folder, and copy it afterwards"
        raise BatchError(f"{folder} is an address, where files cannot be locked or appended to: {hint}")
    is_new = not os.path.lexists(folder)
    if not is_new and not os.path.isdir(folder):  # noqa: PTH112 - unlike Path, never raises
        raise BatchError(f"{folder} is a file, not a folder; choose another one for --out")
    with ExitStack() as undo:
        with writing_to(folder):
            folder.mkdir(parents=True, exist_ok=True)
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
            yield
        except BaseException:
            if is_new and [file.name for file in folder.iterdir()] == [LOCK]:
                (folder / LOCK).unlink()
                folder.rmdir()
            raise


def file_names(entry: ImageEntry, method: str, format: str, *, with_manifest: bool = True) -> dict[str, str]:
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


class OutputFolder:
    """The output folder of a run.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read_head(self) -> dict[str, Any] | None:
        """Return the content of `manifest.json`; None if there is no run.

        Raises:
            BatchError: The file is not a manifest of this format, or is damaged; or there is no run, and the folder
                contains files where a run would write.
        """
        try:
            head = json.loads((self.path / ABOUT).read_bytes())
        except FileNotFoundError:
            self.remove_temporary_files()
            self._require_free()
            return None
        except ValueError:
            head = None
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            raise BatchError(f"{self.path / ABOUT} is damaged, or from another version; choose another folder")
        return head

    def _require_free(self) -> None:
        used = [name for name in FILES if os.path.lexists(self.path / name)]
        used += [name for name in FOLDERS if any(files for *_, files in os.walk(self.path / name))]
        if used:
            raise BatchError(f"{used[0]} exists in {self.path}, without a run; choose another folder for --out")

    def write_head(self, head: dict[str, Any]) -> None:
        """Replace `manifest.json`."""
        self._replace(ABOUT, json.dumps(head, indent=1) + "\n")

    def read_listing(self) -> list[ImageEntry]:
        """Return the numbered images of earlier runs. Raises BatchError if the file is damaged."""
        try:
            lines = (self.path / LISTING).read_text("ascii").splitlines()
            return [ImageEntry.from_fields(fields) for fields in json.loads(f"[{','.join(lines)}]")]
        except FileNotFoundError:
            return []
        except (AttributeError, TypeError, ValueError) as error:
            raise BatchError(f"{self.path / LISTING} is damaged: {error}; choose another folder") from error

    def write_listing(self, entries: Sequence[ImageEntry]) -> None:
        """Replace the listing."""
        self._replace(LISTING, "".join(f"{entry.to_json()}\n" for entry in entries))

    def _replace(self, name: str, text: str) -> None:
        with atomic_write(self.path / name) as temporary:
            temporary.write_text(text, "ascii", newline="\n")

    def remove_temporary_files(self) -> None:
        """Remove the temporary files of writers that were killed."""
        below = (entry for name in (*FOLDERS, RESULTS) for entry in os.walk(self.path / name))
        for folder, _, files in chain([next(os.walk(self.path))], below):
            for name in filter(_TEMPORARY.fullmatch, files):
                (Path(folder) / name).unlink(missing_ok=True)

    def clear(self, entries: Sequence[ImageEntry], methods: Sequence[str]) -> None:
        """Remove all files that a run writes, and no others. Empty folders stay."""
        self.remove(entries, methods)
        # manifest.json is removed last: without it, an interrupted removal could not be repeated.
        for name in FILES:
            (self.path / name).unlink(missing_ok=True)

    def remove(self, entries: Iterable[ImageEntry], methods: Sequence[str]) -> None:
        """Remove the files of some images."""
        for entry in entries:
            files = [file_names(entry, method, suffix) for method in methods for suffix in FORMATS]
            for name in {name for names in files for name in names.values()}:
                with suppress(OSError):
                    os.unlink(f"{self.path}/{name}")  # noqa: PTH108 - called for every file


def is_output(path: str) -> bool:
    """Return whether a run writes this file or folder."""
    whole = Path(os.path.realpath(path))
    inside = any(each.name in FOLDERS and _is_run(each.parent) for each in (whole, *whole.parents))
    return inside or (whole.name in FILES and _is_run(whole.parent))


def _is_run(folder: Path) -> bool:
    try:
        return b'"saliency batch ' in (folder / ABOUT).read_bytes()  # of any version
    except OSError:
        return False
