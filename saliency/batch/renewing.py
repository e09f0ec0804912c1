"""The listing of a run that goes on: numbers and names stay, what is new comes behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from .naming import names
from .photos import Photo, exists
from .problems import BatchError


def joined(listed: Sequence[Photo], found: Sequence[Photo]) -> tuple[list[Photo], bool]:
    """The photos of earlier runs, then those that are new, all with names; and whether there are new ones.

    A photo that has vanished keeps its number.

    Args:
        listed: The listing of earlier runs; empty where a run begins.
        found: What the sources lead to now.

    Raises:
        BatchError: There is no photo at all, the folder holds a run over others, or a photo's target has changed.
    """
    if not listed:
        if not any(map(exists, found)):
            first = found[0] if found else None
            why = f"{first.source}: {first.problem or 'no such file or folder'}" if first else "no source was named"
            raise BatchError(f"there is no photo: {why}")
        given = names(found)
        return [replace(photo, name=name) for photo, name in zip(found, given, strict=True)], True
    known = {key: photo for photo, key in zip(listed, _keys(listed), strict=True)}
    new: list[Photo] = []
    for photo, key in zip(found, _keys(found), strict=True):
        earlier = known.get(key)
        if earlier is None:
            # What has no photos now, or is gone, is no photo that is new.
            if exists(photo):
                new.append(photo)
        elif earlier.target != photo.target:
            raise BatchError(
                f"the target of {photo.source} was {earlier.target!r} and is {photo.target!r}; choose another folder, "
                "or begin anew with --restart (restart=True)"
            )
    if new and len(new) == len(found):
        raise BatchError(
            f"the folder holds a run over other photos, beginning with {listed[0].source}; choose another folder, or "
            "begin anew with --restart (restart=True)"
        )
    given = names(new, [photo.name for photo in listed])
    return [*listed, *(replace(photo, name=name) for photo, name in zip(new, given, strict=True))], bool(new)


def _keys(photos: Sequence[Photo]) -> list[tuple[object, ...]]:
    """What tells each photo from the others; a list may name one several times."""
    times: Counter[tuple[object, ...]] = Counter()
    keys: list[tuple[object, ...]] = []
    for photo in photos:
        times[photo.key] += 1
        keys.append((*photo.key, times[photo.key]))
    return keys
