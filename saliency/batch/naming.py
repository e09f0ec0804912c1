"""The names of what is made of the photos: safe in any file system, never the same, never outside of the folder."""

from __future__ import annotations

import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

from .photos import Photo

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
