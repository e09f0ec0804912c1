"""Errors of batch runs: errors that stop the run, and failures of single images."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ..errors import USER_CODE_ERRORS, SaliencyError


class BatchError(SaliencyError, RuntimeError):
    """The output folder cannot be created or resumed as requested."""


class StoppedError(BatchError):
    """The run stopped early. Finished images are kept; the same call resumes."""


def error_columns(error: BaseException, *names: str) -> dict[str, str]:
    """Return an error as in the manifest: its message in one line, and its class.

    The given names are removed from the start of the message.
    """
    text = " ".join(str(error).split())
    for name in names:
        text = text.removeprefix(repr(name)).removeprefix(name).removeprefix(":").strip()
    kind = type(error).__name__
    if not isinstance(error, SaliencyError):
        text = f"{kind}: {text}" if text else kind
    return {"error": printable(text), "error_kind": kind}


T = TypeVar("T")


def attempt(function: Callable[..., T], *args: Any, **options: Any) -> T | BaseException:
    """Return the result of a function that runs code of the user, or its error, which concerns one image only."""
    try:
        return function(*args, **options)
    except USER_CODE_ERRORS as error:
        return error


def sentence(source: str, method: str | None, reason: str) -> str:
    """Return a failure in one line, such as "cat.jpg is damaged: ..." or "cat.jpg by cam: no linear layer"."""
    colon = "" if not method and reason.startswith(("is ", "has ", "cannot ")) else ":"
    return f"{source}{f' by {method}' if method else ''}{colon} {reason}"


def printable(text: str) -> str:
    """Return the text in valid UTF-8: undecodable bytes of a file name become escapes."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # JSON may contain surrogates, which no file name contains
        return text.encode("utf-8", "backslashreplace").decode("utf-8")


@contextmanager
def writing_to(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Convert an OSError of the block into a StoppedError that says how to fix the folder."""
    try:
        yield
    except OSError as error:
        raise unwritable(folder, error) from error


def require_writable(folder: Path) -> None:
    """Create a folder if it does not exist. Raises StoppedError if no file can be created in it."""
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def unwritable(folder: str | os.PathLike[str], error: OSError) -> StoppedError:
    """Return the error for a folder that cannot be written to, with a hint how to fix it."""
    hint = "free disk space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check the folder"
    return StoppedError(
        f"{os.fspath(folder)} cannot be written to: {error.strerror or error}; finished images are kept: {hint}, and "
        "run the command again"
    )
