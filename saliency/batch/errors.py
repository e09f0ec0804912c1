"""What may go wrong with a folder of photos: what stops the run, and what costs one photo."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from ..errors import SaliencyError
from .image_entry import Photo, shown


class BatchError(SaliencyError, RuntimeError):
    """The folder of overlays cannot be made, or not be gone on with as asked."""


class StoppedError(BatchError):
    """The run has stopped on its way; what it made is kept, and the same call goes on from there."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no overlay of a photo, as it stands in the manifest."""

    kind: str  # the error's class
    reason: str  # one line

    @classmethod
    def of(cls, error: BaseException, photo: Photo) -> Failure:
        """An error in words, without the name of the photo, which stands beside it."""
        text = " ".join(str(error).split())
        for beginning in (repr(photo.path), repr(photo.source), photo.path, photo.source):
            text = text.removeprefix(beginning).removeprefix(":").strip()
        if not isinstance(error, SaliencyError):
            text = f"{type(error).__name__}: {text}" if text else type(error).__name__
        return cls(type(error).__name__, shown(text))


def stops_everything(error: BaseException) -> bool:
    """Whether an error in writing is the folder's and not the photo's: a full disk rather than an odd picture."""
    # Encoders raise OSError too, without a number, for a picture that their format does not take.
    return isinstance(error, OSError) and error.errno not in (None, errno.ENAMETOOLONG)


def unwritable(folder: str | os.PathLike[str], error: OSError) -> StoppedError:
    """A disk or a folder that takes no more, as an error that says what to do."""
    cures = {
        errno.ENOSPC: "make room",
        errno.EDQUOT: "make room",
        errno.ENAMETOOLONG: "choose a shorter name",
        errno.EROFS: "make it writable",
        errno.EACCES: "give yourself permission to write there",
        errno.EPERM: "give yourself permission to write there",
    }
    cure = cures.get(error.errno or 0, "see what is wrong with it")
    why = error.strerror or str(error)
    return StoppedError(
        f"{os.fspath(folder)} cannot be written to: {why}; what is done is kept: {cure}, and the same command goes on"
    )
