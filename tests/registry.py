"""The registries, for tests that define methods and metrics of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from saliency import METHODS
from saliency.metrics import METRICS


@contextmanager
def restored_registry() -> Iterator[None]:
    """Remove the methods and metrics that the block defines."""
    before: list[tuple[Any, Any]] = [(registry, dict(registry)) for registry in (METHODS, METRICS)]
    try:
        yield
    finally:
        for registry, entries in before:
            registry.clear()
            registry.update(entries)
