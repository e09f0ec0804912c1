"""Read files at addresses of object stores and other file systems, such as s3://bucket/cat.jpg, by fsspec."""

from __future__ import annotations

import re
import zlib
from typing import Any

from ..errors import ImageError, errors_as, optional_import

# Facts of a file that change with its content, in the names of several stores; the first known one is used.
_VERSIONS = ("ETag", "etag", "md5Hash", "content_md5", "mtime", "LastModified", "last_modified", "updated", "created")

_ADDRESS = re.compile(r"(?!https?:|ftp:)[a-z][a-z0-9+.-]+://")


def is_remote(name: str) -> bool:
    """Return whether a name is an address that fsspec reads: s3://, gs://, memory://, but not the web (http, ftp)."""
    return _ADDRESS.match(name) is not None


def _connect(address: str) -> tuple[Any, str]:
    """Return the file system of an address, and the path on it.

    Raises:
        DependencyError: fsspec is not installed.
        ImageError: fsspec does not know the file system, or lacks its package.
    """
    fsspec = optional_import("fsspec", "remote", f"the address {address}")
    with errors_as(ImageError, "cannot be read"):
        files, path = fsspec.core.url_to_fs(address)
    return files, path


def list_files(address: str, *, recursive: bool = False) -> list[tuple[str, tuple[str, ...]]]:
    """Return the addresses of the files in a folder, or of a file or pattern, sorted, with the folders between.

    Hidden files of a folder, and files of its hidden folders, are left out.

    Args:
        address: The address.
        recursive: Whether subfolders are searched.

    Raises:
        DependencyError: fsspec is not installed.
        ImageError: The address cannot be listed.
    """
    files, root = _connect(address)
    with errors_as(ImageError, "cannot be listed"):
        is_folder = files.isdir(root)
        found = files.find(root, maxdepth=None if recursive else 1) if is_folder else files.glob(root)
    found = [path for path in found if not (is_folder and "/." in f"/{path.removeprefix(root)}")]
    below = len(root.strip("/").split("/"))
    parts = [tuple(path.strip("/").split("/"))[below:-1] if is_folder else () for path in found]
    return sorted(zip(map(files.unstrip_protocol, found), parts, strict=True))


def read_bytes(address: str) -> bytes:
    """Return the content of a file. Raises ImageError if it cannot be read."""
    files, path = _connect(address)
    with errors_as(ImageError, "cannot be read"):
        content: bytes = files.cat_file(path)
    return content


def file_stamp(address: str) -> tuple[int, ...]:
    """Return the size and a checksum of the version of a file; empty if there is no file.

    Raises:
        ImageError: The file system cannot be reached.
    """
    files, path = _connect(address)
    with errors_as(ImageError, f"{address} cannot be read"):
        try:
            facts = files.info(path)
        except FileNotFoundError:
            return ()
    version = next((facts[name] for name in _VERSIONS if facts.get(name) is not None), None)
    return int(facts["size"] or 0), zlib.crc32(str(version).encode())
