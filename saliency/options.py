"""What an option may be: one of several choices, or a whole number."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import SupportsInt, TypeGuard, TypeVar

from .errors import MethodError, did_you_mean

_Choice = TypeVar("_Choice")


def chosen(option: str, choice: _Choice, choices: Sequence[_Choice]) -> _Choice:
    """The choice, if it is one of the choices. Raises MethodError, with the closest, where it is not."""
    if choice not in choices:
        raise MethodError(
            f"{option}={choice!r} is not one of {', '.join(map(repr, choices))}"
            + did_you_mean(str(choice), map(str, choices))
        )
    return choice


def whole_number(option: str, given: object, *, least: int = 1) -> int:
    """An option that counts something. Raises MethodError for what is no whole number, or one below `least`."""
    if not is_whole(given, least):
        raise MethodError(f"{option}={given!r} is not a whole number of at least {least}")
    return int(given)


def is_whole(given: object, least: int | None = 1) -> TypeGuard[SupportsInt]:
    """Whether something is a whole number, of Python's or NumPy's, of at least `least`. True and False are none."""
    if isinstance(given, bool) or not isinstance(given, Integral):
        return False
    return least is None or int(given) >= least
