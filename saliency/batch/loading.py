"""From a photo of the listing to the network's input."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from PIL import Image
from torch import Tensor

from ..errors import ImageError
from ..io.crop_detection import Box, TransformPreprocess
from ..io.preprocess import Preprocess
from .errors import Failure
from .image_entry import Photo, open_photo

KEPT_BYTES = 256 << 20
"""Of decoded pictures that wait for their maps; further ones are decoded again when they are drawn on."""


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A photo on its way through the network.

    Attributes:
        photo: The photo.
        failure: Why it cannot be explained.
        tensor: (C, H, W) the network's input; None where there is a failure.
        size: (w, h) of the picture.
        box: Where the input lies on the picture.
        picture: The picture, where it is kept.
    """

    photo: Photo
    failure: Failure | None = None
    tensor: Tensor | None = None
    size: tuple[int, int] = (0, 0)
    box: Box = (0.0, 0.0, 0.0, 0.0)
    picture: Image.Image | None = None


class MemoryBudget:
    """How many bytes of pictures may wait at once, so that memory does not grow with the photos' size."""

    def __init__(self, total: int = KEPT_BYTES) -> None:
        self._left = total
        self._lock = threading.Lock()

    def keep(self, picture: Image.Image) -> bool:
        """Whether there is room for a picture; then it is counted."""
        with self._lock:
            fits = _bytes(picture.size) <= self._left
            self._left -= _bytes(picture.size) * fits
            return fits

    def release(self, prepared: Prepared) -> None:
        """The picture is drawn on, or not needed any more."""
        if prepared.picture is not None:
            with self._lock:
                self._left += _bytes(prepared.size)


def prepare(
    photo: Photo, preprocess: Preprocess | TransformPreprocess | None, budget: MemoryBudget | None = None
) -> Prepared:
    """A photo, decoded and preprocessed; whatever goes wrong stands in `failure`."""
    try:
        picture = open_photo(photo)
        if preprocess is None:
            raise ImageError("this model carries no preprocessing; set model.preprocess, as saliency.load does")
        box, tensor = preprocess.box(picture.size), preprocess(picture)
        kept = picture if budget is None or budget.keep(picture) else None
        return Prepared(photo, None, tensor, picture.size, box, kept)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with a file or a callable is told of this photo
        return Prepared(photo, Failure.of(error, photo))


def _bytes(size: tuple[int, int]) -> int:
    return 3 * size[0] * size[1]
