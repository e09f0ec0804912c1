"""The registry of methods, for tests that define methods of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from saliency import METHODS


@contextmanager
def restored_registry() -> Iterator[None]:
    """Remove the methods that the block defines."""
    before = dict(METHODS)
    try:
        yield
    finally:
        METHODS.clear()
        METHODS.update(before)
