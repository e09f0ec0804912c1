"""What only a newer PyTorch allows: there it holds, and on an older one it is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from saliency import NotApplicableError


@contextmanager
def exact_or_needs_torch(version: str) -> Iterator[None]:
    """The block holds, or this PyTorch is older than `version` and the refusal says that it takes that one."""
    try:
        yield
    except NotApplicableError as refusal:
        if torch.__version__ >= version or f"torch>={version}" not in str(refusal):
            raise
