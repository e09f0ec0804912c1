"""Targets as text: `box:0`, `region:cat:border`. The command line, lists of images and methods read them alike."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, get_args

from ..errors import TargetError
from ..io.inputs import read_mask
from .boxes import box
from .question import Categories, Target
from .regions import RegionChoice, keypoint, region
from .similarity import text


def parse_target(target: Any, categories: Categories = None) -> Any:
    """Return the `Target` that a text such as "box:0" describes. Any other target is returned unchanged.

    A text that is the name of a class is that class. The entries of a list are parsed one by one.

    Args:
        target: A target as for `Attribution.attribute`.
        categories: The class names; None if the model has none.

    Raises:
        TargetError: The text begins like a target, and has another form.
        ImageError: The mask of a region cannot be read.
    """
    if isinstance(target, list | tuple):
        return [parse_target(entry, categories) for entry in target]
    kind, colon, rest = target.partition(":") if isinstance(target, str) else ("", "", "")
    if not colon or kind not in _KINDS or target in (categories or ()):
        return target
    parse, expected = _KINDS[kind]
    try:
        return parse(rest)
    except (LookupError, TargetError, ValueError) as error:
        raise TargetError(f'got the target "{target}"; expected {expected}') from error


def _parse_box(rest: str) -> Target:
    label, place = _split(rest)
    if place is None and _numbers(label) is None:
        return box(cls=label)
    cls, place = (label, place) if place is not None else (None, label)
    numbers = _numbers(place) or ()
    if len(numbers) == 1:
        return box(index=int(place), cls=cls)
    options: dict[str, Any] = {{2: "point", 4: "box"}[len(numbers)]: numbers}
    return box(cls=cls, **options)


def _parse_region(rest: str) -> Target:
    label, where = _split(rest)
    if where is None or where in get_args(RegionChoice):
        return region(label, where)
    if os.path.isfile(where):  # noqa: PTH113 - unlike Path, never raises
        return region(label, read_mask(where))
    if (numbers := _numbers(where)) is None:
        raise ValueError(where)
    return region(label, numbers)


def _parse_keypoint(rest: str) -> Target:
    joint, person = _split(rest)
    return keypoint(joint, int(person or 0))


def _parse_text(rest: str) -> Target:
    if not rest.strip():
        raise ValueError(rest)
    return text(rest.strip())


def _split(rest: str) -> tuple[str, str | None]:
    """Split a text at its last colon. Raises ValueError if a part is empty."""
    first, *others = (part.strip() for part in split_last(rest))
    if not all((first, *others)):
        raise ValueError(rest)
    return first, others[0] if others else None


def split_last(text: str) -> tuple[str, ...]:
    r"""Split a text at its last colon that is not of a drive of Windows: `cat:C:\masks\a.png` after `cat`."""
    match = re.fullmatch(r"(.*?):(\s*(?:[A-Za-z]:[\\/])?[^:]*)", text, re.DOTALL)
    return match.groups() if match else (text,)


def _numbers(text: str) -> tuple[float, ...] | None:
    """Return numbers that are separated by commas; None for other text."""
    parts = text.split(",")
    is_number = (re.fullmatch(r"\s*[+-]?(\d+[.]?|\d*[.]\d+)\s*", part) for part in parts)
    return tuple(map(float, parts)) if all(is_number) else None


_PLACES = "x,y or left,top,right,bottom in pixels of the image, with left < right and top < bottom"
_KINDS: dict[str, tuple[Callable[[str], Target], str]] = {
    "box": (_parse_box, f"box:PLACE, box:CLASS or box:CLASS:PLACE, where PLACE is a rank from 0, {_PLACES}"),
    "region": (
        _parse_region,
        f"region:CLASS or region:CLASS:PIXELS, where PIXELS are predicted, border, an existing mask file, {_PLACES}",
    ),
    "keypoint": (_parse_keypoint, "keypoint:NAME or keypoint:NAME:PERSON, where PERSON is a rank from 0"),
    "text": (_parse_text, "text: before a text"),
}
