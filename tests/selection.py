"""Which cases of a test run by default. `pytest --all` runs every case."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import pytest

from saliency import METHODS


def of_each_family(names: Iterable[str] = METHODS) -> list[Any]:
    """Parametrise over methods, of which one of each family runs by default.

    A family is a file under `saliency/methods`. The method with the most base classes stands for it, because base
    classes keep the promises that hold for every method.
    """
    order = list(METHODS)
    names = sorted(names, key=lambda name: (METHODS[name].__module__, order.index(name)))
    families = [list(family) for _, family in groupby(names, lambda name: METHODS[name].__module__)]
    chosen = {max(family, key=lambda name: len(METHODS[name].__mro__)) for family in families}
    return [case(name, by_default=name in chosen) for name in names]


def case(value: Any, *, by_default: bool, id: str | None = None) -> Any:
    """Return a case of a parametrised test."""
    return pytest.param(value, id=id, marks=() if by_default else pytest.mark.slow)
