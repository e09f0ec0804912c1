"""The output folder of a run: lock, manifest.json (the head), listing, file names and removal."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any
from uuid import uuid4

from ..io.atomic_write import durable_write, inside
from .failures import BatchError, writing_to
from .listing import ImageEntry
from .manifest import CSV, MANIFEST
from .options import FORMATS

LOCK = ".lock"
FORMAT = "saliency batch 3"
ABOUT = "manifest.json"
LISTING = "listing.jsonl"
PAGE = "index.html"
EVALUATION, EVALUATION_PAGE, RESULTS = "evaluation.json", "evaluation.html", "results"  # of saliency evaluate

OVERLAYS, THUMBNAILS, HEAT, MAPS, CARDS = "overlays", "thumbnails", "heat", "maps", "trust"
FOLDERS = (OVERLAYS, THUMBNAILS, HEAT, MAPS, CARDS)
FILES = (PAGE, CSV, MANIFEST, LISTING, ABOUT)
CARD_FILES = {"card": ".html", "card_json": ".json", "card_image": ".png"}

HEAD: dict[str, Any] = {
    "format": re.compile(json.dumps(FORMAT)),
    "methods": [re.compile(r'"[\w .-]+"')],  # parts of the names of files, which a restart removes
    "batch_sizes": re.compile(r"\[\[0, [1-9]\d*\](, \[\d+, [1-9]\d*\])*\]"),
    "model": {"name": str, "weights": str | None},
    "fingerprint": {"opacity": str | float | int},
}
HEAD |= {"command": [str], "versions": dict, "finished": bool}
"""The shape of the keys of `manifest.json` that are read again; see `fits`."""

_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.part")


@contextmanager
def locked(folder: Path) -> Iterator[Path]:
    """Create the folder, and lock it against other runs until the block or the process ends. Yield its absolute path.

    A new folder in which an error left nothing is removed.

    Raises:
        BatchError: The folder is a file, another run has locked it, it cannot be written to, or a link has the name of
            a file or folder of a run.
    """
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


def write_head(folder: Path, head: dict[str, Any]) -> None:
    """Replace `manifest.json`."""
    durable_write(folder / ABOUT, [f"{json.dumps(head, indent=1)}\n".encode()])


def read_listing(folder: Path) -> list[ImageEntry]:
    """Return the numbered images of earlier runs. Raises BatchError if the file is damaged."""
    try:
        lines = (folder / LISTING).read_text("ascii").splitlines()
        return [ImageEntry.from_fields(fields) for fields in json.loads(f"[{','.join(lines)}]")]
    except FileNotFoundError:
        return []
    except (AttributeError, TypeError, ValueError) as error:
        raise BatchError(f"{folder / LISTING} is damaged: {error}; choose another folder") from error


def write_listing(folder: Path, entries: Sequence[ImageEntry]) -> None:
    """Replace the listing."""
    durable_write(folder / LISTING, (f"{entry.to_json()}\n".encode() for entry in entries))


def remove_temporary_files(folder: Path, subfolders: Iterable[str] = (*FOLDERS, RESULTS)) -> None:
    """Remove the temporary files of writers that were killed, from the folder itself and from some in it."""
    below = (found for name in subfolders for found in os.walk(folder / name))
    for place, _, files in chain([next(os.walk(folder))], below):
        for name in filter(_TEMPORARY.fullmatch, files):
            (Path(place) / name).unlink(missing_ok=True)


def clear(folder: Path, entries: Iterable[ImageEntry], methods: Sequence[str]) -> None:
    """Remove all files that a run writes, and no others. Empty folders stay."""
    remove_files(folder, entries, methods)
    # manifest.json is removed last: without it, an interrupted removal could not be repeated.
    for name in FILES:
        (folder / name).unlink(missing_ok=True)


def remove_files(folder: Path, entries: Iterable[ImageEntry], methods: Sequence[str]) -> None:
    """Remove the files of some images. Files in linked folders stay."""
    checked = cache(partial(inside, folder))
    for entry in entries:
        files = [file_names(entry, method, suffix) for method in methods for suffix in FORMATS]
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
        return isinstance(value, dict) and all(key in value and fits(value[key], of) for key, of in shape.items())
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(one, shape[0]) for one in value)
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
    inside = any(each.name in FOLDERS and _is_run(each.parent) for each in (whole, *whole.parents))
    return inside or (whole.name in FILES and _is_run(whole.parent))


def _is_run(folder: Path) -> bool:
    try:
        return b'"saliency batch ' in (folder / ABOUT).read_bytes()  # of any version
    except OSError:
        return False
