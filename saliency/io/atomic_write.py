"""What picture files are called, and files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

if TYPE_CHECKING:
    from torch import Tensor

IMAGE_SUFFIXES = frozenset(
    f".{each}"
    for each in "avif bmp gif heic heif j2k jp2 jpeg jpg jxl pbm pgm png pnm ppm tif tiff webp".split()  # noqa: SIM905
)
"""What a picture in a folder is recognised by, also where it is none that is read: then it is said so.

A file that is named itself is read whatever its name.
"""


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary name beside `path`; what the block writes there is moved to `path` if the block ends well.

    A link stays, and the file that it leads to is replaced.

    Raises:
        FileExistsError: A device or a pipe has that name.
    """
    path = Path(path)
    if is_stream(path):
        raise FileExistsError(errno.EEXIST, "a device or a pipe has that name", os.fspath(path))
    if path.is_symlink():
        path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{uuid4().hex}.part")
    try:
        # Made here, with the permissions that new files have: some writers would keep theirs to themselves.
        temporary.touch()
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def is_stream(path: Path) -> bool:
    """Whether a device or a pipe has that name, or a name such as /dev/stdout leads to what others write to."""
    whole = path.absolute()
    is_name_of_one = whole.is_relative_to("/proc") or whole.parent in (Path("/dev"), Path("/dev/fd"))
    return is_name_of_one or (path.exists() and not path.is_file() and not path.is_dir())


def save_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: dict[str, str] | None) -> None:
    """Replace a safetensors file.

    Raises:
        OSError: There is no place for it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with atomic_write(path) as temporary:
        permissions = temporary.stat().st_mode
        try:
            save_file(dict(tensors), temporary, metadata)
        except SafetensorError as error:
            raise OSError(f"{os.fspath(path)} cannot be written: {error}") from error
        # It puts a file of its own there, which nobody else may read.
        temporary.chmod(permissions)
