"""One run at a time in a folder, by a lock that dies with its process."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from .problems import BatchError, unwritable

LOCK = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The folder, held against other runs until the block or the process ends, however it ends.

    Raises:
        BatchError: Another run holds it, or it cannot be written to.
    """
    try:
        file = open(folder / LOCK, "a+b")  # noqa: PTH123, SIM115 - closed below
    except OSError as error:
        raise unwritable(folder, error) from error
    with file:
        try:
            _hold(file)
        except OSError as error:
            raise _refusal(folder, error) from error
        try:
            file.truncate(0)
            file.write(str(os.getpid()).encode())
            file.flush()
        except OSError as error:
            raise unwritable(folder, error) from error
        yield


def _hold(file: BinaryIO) -> None:
    if sys.platform == "win32":
        import msvcrt

        file.seek(1 << 30)  # far from the number of the process, which others read
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _refusal(folder: Path, error: OSError) -> BatchError:
    if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK):
        return BatchError(f"{folder} cannot be locked against other runs: {error.strerror}; choose a local folder")
    holder = (folder / LOCK).read_bytes().decode("ascii", "replace").strip()
    who = f"process {holder}" if holder else "another process"
    return BatchError(f"{folder} is being written to by another run ({who}); wait for it, or choose another folder")
