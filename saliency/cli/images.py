"""The photos that a command was given, and the names of the files that it makes of them."""

from __future__ import annotations

import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..io.atomic_write import IMAGE_SUFFIXES

_LONGEST = 160  # bytes of a label; a file system takes 255, and method, suffix and a temporary name need theirs


@dataclass(frozen=True, slots=True)
class Photo:
    """A file to be explained, or the reason why there is none."""

    path: Path
    problem: str = ""


def find_photos(words: Iterable[str | os.PathLike[str]]) -> list[Photo]:
    """The files that are named, and for a folder the pictures in it, sorted by name; each once, in their order.

    Sub-folders and hidden files are left out.
    """
    found: dict[Path, Photo] = {}
    for word in words:
        is_folder = os.path.isdir(word)  # noqa: PTH112 - unlike Path, never raises
        for photo in _inside(Path(word)) if is_folder else [Photo(Path(word))]:
            found.setdefault(photo.path.absolute(), photo)
    return list(found.values())


def labels(paths: Sequence[Path]) -> list[str]:
    """What the files made of each photo begin with: its name without the suffix, such that no two are the same.

    Where photos differ in nothing but their suffix, or in capitals, they keep it: a.jpg beside a.png are "a.jpg" and
    "a.png". The rest (same names in several folders) are numbered: "a", "a-2". File systems that take capitals and
    accents for the same do no harm.
    """
    stems = Counter(_folded(path.stem) for path in paths)
    names = Counter(_folded(path.name) for path in paths)
    taken: set[str] = set()
    given = []
    for path in paths:
        same_stem, same_name = stems[_folded(path.stem)], names[_folded(path.name)]
        base = _cut(path.stem if same_stem == same_name else path.name)
        label, number = base, 1
        while _folded(label) in taken:
            number += 1
            label = f"{base}-{number}"
        taken.add(_folded(label))
        given.append(label)
    return given


def _inside(folder: Path) -> list[Photo]:
    try:
        files = sorted(each for each in folder.iterdir() if not each.name.startswith("."))
    except OSError as error:
        return [Photo(folder, f"the folder cannot be listed: {error.strerror}")]
    pictures = [Photo(each) for each in files if each.suffix.lower() in IMAGE_SUFFIXES]
    return pictures or [Photo(folder, "the folder has no pictures in it")]


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


def _cut(name: str) -> str:
    while len(os.fsencode(name)) > _LONGEST:
        name = name[:-1]
    return name
