"""Promises that need a newer PyTorch: an older one must raise an error that names the version."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from saliency.errors import NotApplicableError


@contextmanager
def exact_or_needs_torch(version: str) -> Iterator[None]:
    """Run a block that must succeed, or raise an error that names `version` if this PyTorch is older."""
    try:
        yield
    except NotApplicableError as refusal:
        if torch.__version__ >= version or f"torch>={version}" not in str(refusal):
            raise
