"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary name beside `path`; what the block writes there is moved to `path` if the block ends well."""
    path = Path(path)
    temporary = path.with_name(f".{uuid4().hex}.part")
    try:
        # Made here, with the permissions that new files have: some writers would keep theirs to themselves.
        temporary.touch()
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
