"""What an option may be: one of several choices, a whole number, or a number within bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import SupportsFloat, SupportsInt, TypeGuard, TypeVar

from .errors import MethodError, SaliencyError, did_you_mean

_Choice = TypeVar("_Choice")


def check_choice(
    option: str, choice: _Choice, choices: Sequence[_Choice], *, error: type[SaliencyError] = MethodError
) -> _Choice:
    """The choice, if it is one of the choices. Raises `error`, with the closest, where it is not."""
    if not isinstance(choice, str | int | float) or choice not in choices:
        raise error(
            f"{option}={choice!r} is not one of {', '.join(map(repr, choices))}"
            + did_you_mean(str(choice), map(str, choices))
        )
    return choice


def check_whole_number(option: str, given: object, *, least: int = 1, error: type[SaliencyError] = MethodError) -> int:
    """An option that counts something. Raises `error` for what is no whole number, or one below `least`."""
    if not is_whole(given, least):
        raise error(f"{option}={given!r} is not a whole number of at least {least}")
    return int(given)


def real_number(
    option: str,
    given: object,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    hint: str = "",
    error: type[SaliencyError] = MethodError,
) -> float:
    """An option that is a finite number within bounds. Raises `error`, which ends in the hint, for anything else."""
    number = float(given) if is_real(given) else math.nan
    bounds = (
        ("of at least", least, least is None or number >= least),
        ("above", above, above is None or number > above),
        ("of at most", most, most is None or number <= most),
        ("below", below, below is None or number < below),
    )
    if math.isnan(number) or not all(holds for _, _, holds in bounds):
        wanted = " and ".join(f"{words} {bound:g}" for words, bound, _ in bounds if bound is not None)
        raise error(f"{option}={given!r} is not a finite number {wanted}".rstrip() + hint)
    return number


def is_whole(given: object, least: int | None = 1) -> TypeGuard[SupportsInt]:
    """Whether something is a whole number, of Python's or NumPy's, of at least `least`. True and False are none."""
    if isinstance(given, bool) or not isinstance(given, Integral):
        return False
    return least is None or int(given) >= least


def is_real(given: object) -> TypeGuard[SupportsFloat]:
    """Whether something is a finite number, of Python's or NumPy's. True and False are none."""
    if isinstance(given, bool) or not isinstance(given, Real):
        return False
    try:
        return math.isfinite(given)
    except OverflowError:  # a whole number beyond all floats
        return False


def is_pair(given: object) -> TypeGuard[Sequence[SupportsInt]]:
    """Whether something is two whole numbers of at least 1, such as a height and a width."""
    return isinstance(given, list | tuple) and len(given) == 2 and all(map(is_whole, given))
