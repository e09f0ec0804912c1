"""Checks of options: choices, integers, and numbers within bounds."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, NoReturn, SupportsFloat, SupportsInt, TypeGuard, TypeVar, get_args

from .aliases import matches
from .errors import MethodError, SaliencyError, did_you_mean

Sign = Literal["positive", "signed", "absolute"]
SIGNS: tuple[Sign, ...] = get_args(Sign)
"""The signs with which a map is drawn: its positive values, all values, or magnitudes."""

_LONGEST = 80  # characters of a value in an error
_OBJECT = re.compile(r"^<|\n|\b(tensor|array)\(")
_Choice = TypeVar("_Choice")
_Entry = TypeVar("_Entry")


class Registry(dict[str, _Entry]):
    """Registered classes by name. A missing name raises KeyError with the closest names.

    Args:
        noun: The noun for the classes in errors: "method". In its plural, `aliases.toml` has a table of the nearest
            classes for names that other toolkits or earlier versions have.
    """

    def __init__(self, noun: str) -> None:
        super().__init__()
        self._noun = noun

    def __missing__(self, name: object) -> NoReturn:
        raise KeyError(self._missing(name))

    def find(self, name: object) -> _Entry:
        """Return the class with this name. Raises MethodError for another name, with the closest names."""
        if isinstance(name, type):
            raise MethodError(f"got the class {name.__name__}; create an object of it, {name.__name__}(...)")
        if type(name) in self.values():
            kind, own = type(name).__name__, getattr(name, "name", "")
            raise MethodError(f'got a {kind}; pass its name, "{own}", and its options apart')
        if not isinstance(name, str) or name not in self:
            raise MethodError(self._missing(name))
        return self[name]

    def _missing(self, value: object) -> str:
        name = value if isinstance(value, str) else described(value)
        for nearest in matches(name, f"{self._noun}s"):
            return f'no {self._noun} "{name}"; not offered here; nearest: {nearest}'
        hint = did_you_mean(name, self) or f"; the {self._noun}s are {', '.join(self)}"
        return f'no {self._noun} "{name}"{hint}'


def check_choice(
    option: str, choice: _Choice, choices: Sequence[_Choice], *, error: type[SaliencyError] = MethodError
) -> _Choice:
    """Return `choice` if it is one of `choices`; otherwise raise `error` with the closest choices."""
    if not isinstance(choice, str | int | float) or choice not in choices:
        hint = did_you_mean(str(choice), map(str, choices))
        raise error(f"{option}={described(choice)} is not one of {', '.join(map(repr, choices))}{hint}")
    return choice


def check_integer(
    option: str,
    value: object,
    *,
    least: int | None = 1,
    most: int | None = None,
    hint: str = "",
    error: type[SaliencyError] = MethodError,
) -> int:
    """Return `value` as an int if it is an integer within the bounds; otherwise raise `error`, ending in `hint`."""
    if not is_integer(value, least) or (most is not None and int(value) > most):
        bound = "" if least is None else f" of at least {least}"
        bound += "" if most is None else f" and at most {most}"
        raise error(f"{option}={described(value)} is not a whole number{bound}{hint}")
    return int(value)


def check_number(
    option: str,
    value: object,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    hint: str = "",
    error: type[SaliencyError] = MethodError,
) -> float:
    """Return `value` as a float if it is finite and within the bounds; otherwise raise `error`, ending in `hint`."""
    number = float(value) if is_real(value) else math.nan
    bounds = (
        ("of at least", least, least is None or number >= least),
        ("above", above, above is None or number > above),
        ("of at most", most, most is None or number <= most),
        ("below", below, below is None or number < below),
    )
    if math.isnan(number) or not all(holds for _, _, holds in bounds):
        wanted = " and ".join(f"{words} {bound:g}" for words, bound, _ in bounds if bound is not None)
        raise error(f"{option}={described(value)} is not a finite number {wanted}".rstrip() + hint)
    return number


def check_numbers(option: str, values: object, **bounds: Any) -> tuple[float, ...]:
    """Return a list of numbers, each checked as in `check_number`. Raises MethodError for any other value."""
    if not isinstance(values, list | tuple) or not values:
        raise MethodError(f"{option}={described(values)}: expected a list of numbers, such as (0.1, 0.2)")
    return tuple(check_number(option, value, **bounds) for value in values)


def check_flag(option: str, value: object) -> bool:
    """Return `value` if it is True or False; otherwise raise MethodError."""
    return bool(check_choice(option, value, (True, False)))


def check_mask(mask: Any, error: type[SaliencyError]) -> None:
    """Raise `error` if a tensor has several values other than 0, so that it does not say which pixels are inside."""
    marked = mask[mask != 0]
    if bool((marked != marked[:1]).any()):
        expected = "expected 0 and one other: pass labels == 3, or probabilities > 0.5"
        low, high = mask.double().aminmax()  # PyTorch finds no minimum of uint16
        raise error(f"the mask has values from {low:.4g} to {high:.4g}; {expected}")


def check_path(option: str, value: object) -> Path:
    """Return `value` as a path. Raises MethodError if it is not a path."""
    if not isinstance(value, str | os.PathLike):
        raise MethodError(f"{option}={described(value)}: expected a path")
    return Path(value)


def described(value: object) -> str:
    """Return a value for an error message: an object or a long text as its type, and its shape if it has one."""
    text, name = repr(value), type(value).__name__
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if shape := getattr(value, "shape", ()):
        return f"{name} of shape {tuple(shape)}"
    return name if len(text) > _LONGEST or _OBJECT.search(text) else text


def is_integer(value: object, least: int | None = 1) -> TypeGuard[SupportsInt]:
    """Return whether a value is a Python or NumPy integer of at least `least`. A bool is not an integer here."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return least is None or int(value) >= least


def is_real(value: object) -> TypeGuard[SupportsFloat]:
    """Return whether a value is a finite Python or NumPy number. A bool is not a number here."""
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


def is_pair(value: object) -> TypeGuard[Sequence[SupportsInt]]:
    """Return whether a value is two integers of at least 1, such as a height and a width."""
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(is_integer, value))
