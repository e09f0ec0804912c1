"""Which cases of a test run by default. `pytest --all` runs every case."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import pytest

from saliency import METHODS


def of_each_family(names: Iterable[str] = METHODS) -> list[Any]:
    """Parametrise over methods, of which one of each family runs by default.

    The method with the most base classes stands for its family, because base classes keep the promises that hold for
    every method.
    """
    order = list(METHODS)
    names = sorted(names, key=lambda name: (family_of(name), order.index(name)))
    families = [list(family) for _, family in groupby(names, family_of)]
    chosen = {max(family, key=lambda name: len(METHODS[name].__mro__)) for family in families}
    return [case(name, by_default=name in chosen) for name in names]


def family_of(name: str) -> str:
    """Return the file under `saliency/methods` that the base class of a method is from."""
    files = [cls.__module__ for cls in METHODS[name].__mro__ if cls.__module__.startswith("saliency.methods.")]
    return files[-1]


def case(value: Any, *, by_default: bool, id: str | None = None) -> Any:
    """Return a case of a parametrised test."""
    return pytest.param(value, id=id, marks=() if by_default else pytest.mark.slow)
