"""The listing of a run that goes on: numbers and names stay, what is new comes behind, and changes are noticed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .errors import BatchError
from .image_entry import Photo, exists, names, stamp_of


@dataclass(frozen=True, slots=True)
class Listing:
    """The photos of a run.

    Attributes:
        photos: Those of earlier runs, then those that are new, all with names and with the stamps of now.
        changed: The numbers of those whose file is another one than when it was listed.
        removed: What those are called whose file is not there any more; they keep their numbers and stamps.
        is_new: Whether it differs from the listing of earlier runs.
    """

    photos: list[Photo]
    changed: frozenset[int]
    removed: tuple[str, ...]
    is_new: bool


def joined(listed: Sequence[Photo], found: Sequence[Photo]) -> Listing:
    """The photos of earlier runs, then those that are new.

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
        return Listing(_new(found, names(found)), frozenset(), (), True)
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
    now = [stamp_of(photo) for photo in listed]
    changed = frozenset(at for at, photo in enumerate(listed) if now[at] and now[at] != photo.stamp)
    removed = tuple(photo.source for at, photo in enumerate(listed) if photo.stamp and not now[at])
    known_now = [replace(photo, stamp=now[at]) if at in changed else photo for at, photo in enumerate(listed)]
    given = _new(new, names(new, [photo.name for photo in listed]))
    return Listing([*known_now, *given], changed, removed, bool(new or changed))


def _new(photos: Sequence[Photo], given: Sequence[str]) -> list[Photo]:
    return [replace(photo, name=name, stamp=stamp_of(photo)) for photo, name in zip(photos, given, strict=True)]


def _keys(photos: Sequence[Photo]) -> list[tuple[object, ...]]:
    """What tells each photo from the others; a list may name one several times."""
    times: Counter[tuple[object, ...]] = Counter()
    keys: list[tuple[object, ...]] = []
    for photo in photos:
        times[photo.key] += 1
        keys.append((*photo.key, times[photo.key]))
    return keys
