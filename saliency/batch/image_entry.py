"""A photo of a run: where it lies, what is to be explained in it, and the name of what is made of it."""

from __future__ import annotations

import io
import json
import os
import stat
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

LONGEST = 160
"""Bytes of a name; a file system takes 255, and the method, the suffix and a number need theirs."""

_FORBIDDEN = frozenset('\\/:*?"<>|')
_RESERVED = frozenset(
    ("con", "prn", "aux", "nul", *(f"{port}{number}" for port in ("com", "lpt") for number in range(1, 10)))
)


def names(photos: Sequence[Photo], taken: Iterable[str] = ()) -> list[str]:
    """What the files made of each photo begin with: "SUB/cat", the photo's name without its suffix.

    Where photos of one folder differ in nothing but the suffix they keep it: a.jpg beside a.png are "a.jpg" and
    "a.png". The rest are numbered: "a", "a-2". Names that differ in capitals or in the way accents are written count as
    the same, so that file systems which think so do no harm.

    Args:
        photos: The photos, in their order.
        taken: Names that are given already, of photos that were listed earlier.
    """
    folders = ["/".join(_folder(part) for part in photo.folder) for photo in photos]
    stems = [_safe(os.path.splitext(photo.label)[0] or photo.label) for photo in photos]  # noqa: PTH122
    wholes = [_safe(photo.label) for photo in photos]
    same_stem = Counter(map(_folded, map(_joined, folders, stems)))
    same_whole = Counter(map(_folded, map(_joined, folders, wholes)))
    used = {_folded(name) for name in taken}
    numbers: Counter[str] = Counter()
    given = []
    for folder, stem, whole in zip(folders, stems, wholes, strict=True):
        name, longer = _joined(folder, stem), _joined(folder, whole)
        alike = same_whole[_folded(longer)]
        if same_stem[_folded(name)] != alike or (alike == 1 and _folded(name) in used):
            name = longer
        given.append(_free(name, used, numbers))
    return given


def _free(name: str, used: set[str], numbers: Counter[str]) -> str:
    """The name, or the first of name-2, name-3, ... that nobody has."""
    base = _folded(name)
    label = name
    while _folded(label) in used:
        numbers[base] = max(numbers[base], 1) + 1
        label = f"{name}-{numbers[base]}"
    used.add(_folded(label))
    return label


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _folder(part: str) -> str:
    """A folder's name; no file of the run is ever called so, since those end in a suffix."""
    safe = _safe(part)
    return safe if "." not in safe else safe.replace(".", "_")


def _safe(text: str) -> str:
    """A file name without what some system or page trips over, composed, and not too long."""
    composed = unicodedata.normalize("NFC", text)
    plain = "".join(c if c.isprintable() and c not in _FORBIDDEN else "_" for c in composed)
    plain = _cut(plain).strip(" ")
    if plain.startswith((".", "~")):
        plain = f"_{plain[1:]}"
    if plain.endswith("."):
        plain = f"{plain[:-1]}_"
    if plain.split(".")[0].casefold() in _RESERVED:
        plain = f"_{plain}"
    return plain or "_"


def _cut(name: str) -> str:
    """The beginning of a name that takes no more than `LONGEST` bytes."""
    return name.encode("utf-8", "replace")[:LONGEST].decode("utf-8", "ignore")


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFKC", name).casefold())


if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True, slots=True)
class Photo:
    """One entry of the listing.

    Attributes:
        path: The absolute path of the file that it lies in.
        source: The same as it was named, for eyes.
        name: What the files made of it begin with, below the folders of the run: "SUB/cat".
        folder: The folders below the source in which it was found.
        label: Its own file name.
        target: The class to explain, by index or name; None for what the run asks for.
        problem: Why there is no photo; empty where there may be one.
        offset: Where in the file it begins; None for the whole file.
        size: How many bytes it takes from there.
        stamp: The bytes and the modification time (ns) of the file when it was listed; empty where there was none.
    """

    path: str
    source: str
    name: str = ""
    folder: tuple[str, ...] = ()
    label: str = ""
    target: int | str | None = None
    problem: str = ""
    offset: int | None = None
    size: int = 0
    stamp: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[str, int | None]:
        """What tells it from other photos in a later listing."""
        return self.path, self.offset

    def to_json(self) -> str:
        """The photo as one line of text; any file name, whatever its bytes, comes back as it was."""
        return json.dumps({name: each for name, each in asdict(self).items() if each not in ("", None, ())})

    @classmethod
    def from_json(cls, line: str | bytes) -> Photo:
        """What `to_json` wrote. Raises ValueError or TypeError for anything else."""
        fields = json.loads(line)
        if not isinstance(fields, dict) or not all(isinstance(fields.get(name), str) for name in ("path", "source")):
            raise ValueError("an entry without a path")
        name = fields.get("name", "")
        if not isinstance(name, str) or leads_out(name):
            raise ValueError(f"an entry that leads out of the folder: {name!r}")
        return cls(**fields | {each: tuple(fields.get(each, ())) for each in ("folder", "stamp")})


def leads_out(name: str) -> bool:
    """Whether a name below a folder leads out of it; none that a run gives does."""
    return os.path.isabs(name) or ".." in name.replace(os.sep, "/").split("/")  # noqa: PTH117


def shown(text: str) -> str:
    """A text that any file can hold: bytes of a file name that are no text are written out."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # halves of surrogate pairs, which JSON can name and no file can
        return text.encode("utf-8", "backslashreplace").decode("utf-8")


def open_photo(photo: Photo) -> Image.Image:
    """The photo as an upright RGB picture.

    Raises:
        ImageError: It cannot be read, or is none.
    """
    from ..errors import ImageError
    from ..io.image_io import decode, open_picture

    if photo.problem:
        raise ImageError(photo.problem)
    if photo.offset is None:
        return open_picture(photo.path)
    try:
        with open(photo.path, "rb") as file:  # noqa: PTH123 - a path may hold bytes that are no text
            file.seek(photo.offset)
            data = file.read(photo.size)
    except OSError as error:
        raise ImageError(f"{photo.source!r} cannot be read: {error.strerror or error}") from error
    if len(data) < photo.size:
        raise ImageError(f"{photo.source!r} is cut off: the shard ends {photo.size - len(data)} bytes too early")
    return decode(io.BytesIO(data), photo.source)


def absolute(path: str) -> str:
    """The path from the root on, with nothing resolved; unlike Path, it takes any bytes and keeps links."""
    return os.path.abspath(path)  # noqa: PTH100


def label_of(path: str) -> str:
    """The file name at the end of a path."""
    return os.path.basename(path) or path  # noqa: PTH119


def stamp_of(photo: Photo) -> tuple[int, ...]:
    """The bytes and the modification time (ns) of a photo's file; empty where there is none."""
    try:
        found = os.stat(photo.path)  # noqa: PTH116 - as many as there are photos
    except (OSError, ValueError):
        return ()
    return (found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) and not photo.problem else ()


def exists(photo: Photo) -> bool:
    """Whether its file is there, of whatever kind."""
    return not photo.problem and os.path.lexists(photo.path)
