"""Write files atomically, and recognise names of image files, addresses, and the drawings of the toolkit."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from ..validation import check_choice, check_path

# Suffixes of images in a folder. Formats that cannot be read are included, so that they cause an error. A file that is
# given by its path is read regardless of its suffix.
_SUFFIXES = (
    ".apng .avif .avifs .bmp .dib .gif .heic .heif .j2c .j2k .jfif .jp2 .jpc .jpe .jpeg .jpf .jpg .jpx .jxl .mpo .pbm "
    ".pfm .pgm .png .pnm .ppm .tif .tiff .webp"
)
IMAGE_SUFFIXES = frozenset(_SUFFIXES.split())
_VOLUME_SUFFIXES = (".nii", ".nii.gz")
_ENDINGS = (*IMAGE_SUFFIXES, *_VOLUME_SUFFIXES, ".dcm")

ADDRESS = "is an address, not a file; download it first, as in: curl -s URL | saliency explain -"

SOFTWARE = "saliency-toolkit drawing"
"""The software that the metadata of drawings name."""
_REACH = 1024  # bytes at the start of a file (PNG, JPEG) or at its end (WebP) that contain the metadata


def is_volume(name: str, suffixes: tuple[str, ...] = _VOLUME_SUFFIXES) -> bool:
    """Return whether a file is a volume (NIfTI), from its name. A DICOM file may be an image, or a slice."""
    return name.lower().endswith(suffixes)


def is_image(name: str) -> bool:
    """Return whether a file in a folder is treated as an image or a volume, from its name."""
    return name.lower().endswith(_ENDINGS)


def is_address(name: str) -> bool:
    """Return whether a name is an internet address, such as a URL of a web page."""
    return re.match(r"(https?|ftp|s3|gs)://", name) is not None


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`; its file replaces `path` if the block raises no error.

    If `path` is a symbolic link, its target is replaced. The block creates the temporary file.

    Raises:
        FileExistsError: `path` is a device or a pipe.
    """
    path = Path(path)
    if os.path.lexists(path):  # one query for a new file, as most files of a batch are
        if is_stream(path):
            raise FileExistsError(errno.EEXIST, "a device or a pipe has that name", os.fspath(path))
        if path.is_symlink():
            path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{uuid4().hex}.part")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def durable_write(path: Path, lines: Iterable[bytes]) -> Path:
    """Write a file atomically, so that the old or the new content survives a power cut, and return its path."""
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    with suppress(OSError):  # Windows and some mounted file systems cannot sync a folder, which holds the new name
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    return path


def inside(folder: Path, name: str) -> Path:
    """Return the path of a file or folder that a run writes in its own folder.

    Raises:
        OSError: The path would lie outside: the name contains "..", or a link is on the way.
    """
    if os.path.realpath(folder / name) != os.path.join(os.path.realpath(folder), "") + name:  # noqa: PTH118
        raise OSError(errno.ELOOP, f"{name} is a link, or leads out of the folder; remove it")
    return folder / name


def write_by_suffix(path: str | os.PathLike[str], writers: Mapping[str, Callable[[], bytes]]) -> Path:
    """Write a file atomically, in the format of its suffix, and return its path.

    Args:
        path: The file.
        writers: Functions that return the content, by suffix.

    Raises:
        MethodError: The suffix is not supported.
        OSError: The file cannot be written.
    """
    path = check_path("path", path)
    require_folder(path)
    suffix = check_choice("suffix", path.suffix.lower(), tuple(writers))
    with atomic_write(path) as temporary:
        temporary.write_bytes(writers[suffix]())
    return path


def require_folder(path: Path) -> None:
    """Raise FileNotFoundError if the folder of a file does not exist."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path.name}: there is no folder {path.parent}")


def is_stream(path: Path) -> bool:
    """Return whether a path names a device, a pipe, or a stream such as /dev/stdout."""
    absolute = str(path.absolute())
    is_device = absolute.startswith("/proc/") or os.path.dirname(absolute) in ("/dev", "/dev/fd")  # noqa: PTH120
    return is_device or (path.exists() and not path.is_file() and not path.is_dir())


def is_drawing(path: str) -> bool:
    """Return whether a file is an overlay, a contact sheet, a trust card or the map of a volume, from its metadata.

    Only files with such names, like NAME.METHOD.png or sheet.png, are opened.
    """
    name = path.rpartition("/")[2]
    if (name.count(".") < 2 and not name.startswith("sheet.")) or not os.path.isfile(path):  # noqa: PTH113 - or a FIFO
        return False
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - a path may hold undecodable bytes
            start = file.read(_REACH)
            file.seek(max(0, file.seek(0, os.SEEK_END) - _REACH))
            return SOFTWARE.encode() in start + file.read()
    except OSError:
        return False
