"""WebDataset shards: tar files in which a photo and its class lie side by side under one name."""

from __future__ import annotations

import json
import posixpath
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from .lists import target_from
from .photos import Photo, absolute, label_of

_PICTURES = frozenset(("avif", "bmp", "gif", "jpeg", "jpg", "png", "tif", "tiff", "webp"))
_CLASSES = ("target", "cls", "class", "label")
_LONGEST_NOTE = 1 << 20  # bytes of a .cls or .json member


def read_shard(file: str) -> Iterator[Photo]:
    """The photos of a tar file, in its order; its members are never written to disk.

    What belongs together has one name up to the first dot of its file name: 0001.jpg, 0001.cls (a class index or
    name), 0001.json (an object with "cls", "label", "class" or "target").
    """
    stem = Path(file).stem
    waiting: list[Photo] = []
    target: int | str | None = None
    key = None
    try:
        with tarfile.open(file, "r:") as shard:
            for member in shard:
                if not member.isfile():
                    continue
                folder, label = posixpath.split(member.name)
                name, _, suffix = label.partition(".")
                if (folder, name) != key:
                    yield from (replace(photo, target=target) for photo in waiting)
                    key, waiting, target = (folder, name), [], None
                kind = suffix.rpartition(".")[2].lower()
                if kind in _PICTURES:
                    waiting.append(_tar_photo(file, stem, folder, label, member))
                elif kind in ("cls", "json") and member.size <= _LONGEST_NOTE:
                    noted = shard.extractfile(member)
                    target = _class(noted.read() if noted else b"", kind) if target is None else target
    except (OSError, tarfile.TarError, ValueError) as error:
        yield from (replace(photo, target=target) for photo in waiting)
        problem = f"the shard cannot be read to its end: {error}"
        yield Photo(absolute(file), file, label=label_of(file), problem=problem)
        return
    yield from (replace(photo, target=target) for photo in waiting)


def _tar_photo(file: str, stem: str, folder: str, label: str, member: tarfile.TarInfo) -> Photo:
    return Photo(
        absolute(file),
        f"{file}/{member.name}",
        folder=(stem, *(part for part in folder.split("/") if part)),
        label=label,
        offset=member.offset_data,
        size=member.size,
        problem="a sparse member of the shard, which is not read" if member.sparse is not None else "",
    )


def _class(data: bytes, kind: str) -> int | str | None:
    text = data.decode("utf-8", "replace").strip()
    if kind == "cls":
        return target_from(text)
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    found = next((fields[name] for name in _CLASSES if name in fields), None) if isinstance(fields, dict) else None
    return target_from(found) if isinstance(found, int | str) else None
