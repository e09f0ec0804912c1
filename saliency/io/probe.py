"""Find the crop of any callable from an image to the model's input, by transforming grey ramps."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ..errors import ImageError
from .geometry import Box

Transform = Callable[[Image.Image], Tensor]
Highest = np.number[Any]
"""The highest pixel value of images of one channel with more than 8 bits, in the type of their pixels."""
_Array = NDArray[np.floating[Any]]
_NO_BOX = "the preprocessing {} the image; only resizing, cropping and padding can be detected"


def _transform_grey(preprocess: Transform, values: Any, size: tuple[int, int], highest: Highest | None) -> _Array:
    """Transform a grey image of (w, h) pixels with values in 0..1. Returns (C, h, w).

    The image is RGB, or of the mode I;16, I or F if there is a highest pixel value.
    """
    grey = (highest or 255) * np.asarray(values, np.float64)[..., None]
    image = np.broadcast_to(grey, (size[1], size[0], 1 if highest else 3))
    image = image if isinstance(highest, np.floating) else np.round(image)
    image = image[..., 0].astype(highest.dtype) if highest else image.astype(np.uint8)
    x = preprocess(Image.fromarray(np.ascontiguousarray(image)))
    return np.asarray(x.to(device="cpu", dtype=torch.float64).numpy())


def require_repeatable(preprocess: Transform, size: tuple[int, int], highest: Highest | None) -> None:
    """Raise ImageError if eight transforms of one asymmetric image differ.

    A random flip with probability 1/2 is missed in 1 of 128 cases.
    """
    edges = (min(size[0], 640), min(size[1], 640))  # large enough to crop, small enough to be quick
    ramp = np.add.outer(np.linspace(0, 0.3, edges[1]), np.linspace(0, 0.6, edges[0]))
    first, *others = (_transform_grey(preprocess, ramp, edges, highest) for _ in range(8))
    if not all(np.array_equal(other, first, equal_nan=True) for other in others):
        raise ImageError("the preprocessing is random; pass the transform for evaluation, which has no random part")


def boxes_of_views(views: Callable[[Image.Image], Tensor], image_size: tuple[int, int]) -> list[Box]:
    """Return the box of each view on an image of (w, h) pixels, accurate to one pixel.

    Args:
        views: Returns the views (V, C, h, w) of an image, which are resized, cropped, padded and normalised.
        image_size: The size of the image.

    Raises:
        ImageError: A view is flipped, rotated or warped.
    """

    @cache
    def cached_views(pixels: bytes) -> Tensor:
        return views(Image.frombytes("RGB", image_size, pixels))

    def view(number: int, image: Image.Image) -> Tensor:
        return cached_views(image.tobytes())[number]

    count = len(views(Image.new("RGB", image_size)))
    return [Probe(partial(view, number), image_size, None).box() for number in range(count)]


class Probe:
    """Transformed grey images of one size, denormalised.

    A black and a white image give the offset and the scale of each output value. In the padding, both images give the
    same value. The images are grey, so neither the order of the channels nor a conversion to grey matters.
    """

    def __init__(self, preprocess: Transform, image_size: tuple[int, int], highest: Highest | None) -> None:
        self.preprocess, self.image_size, self.highest = preprocess, image_size, highest
        self.black = self._transformed([[0]])
        self.scale = self._transformed([[1]]) - self.black
        if not np.isfinite(self.scale).all() or not self.scale.any():
            problem = "the preprocessing gives equal or non-finite values for black and white, so its crop is unknown"
            raise ImageError(f"{problem}; describe it with saliency.Preprocess, or pass float tensors")
        usual = [np.median(channel[channel != 0]) for channel in self.scale]
        deviation = np.abs(self.scale / np.reshape(usual, (-1, 1, 1)) - 1)
        self.content = (deviation < 0.02).all(axis=0)  # (h, w)

    def _transformed(self, values: Any) -> _Array:
        return _transform_grey(self.preprocess, values, self.image_size, self.highest)

    def box(self) -> Box:
        """Return the box of the output on the image."""
        (left, right), (top, bottom) = self.span(axis=2), self.span(axis=1)
        return left, top, right, bottom

    def span(self, axis: int) -> tuple[float, float]:
        """Return the start and end of the output on the image, along one axis of (C, h, w)."""
        length = self.image_size[2 - axis]
        centres = (np.arange(length) + 0.5) / length
        positions = length * self._profile(centres, axis)  # position in the image of the centre of each output pixel
        start, step = _fit_line(positions, length)
        folds = int(min(0.05 * length / step, length / 64))
        if length > 256 and folds > 1:
            # A zigzag of n folds is n times steeper than a ramp, so 256 grey levels resolve single pixels.
            zigzag = self._profile(np.abs((centres * folds + 1) % 2 - 1), axis)
            start, step = _fit_line(_unfold(zigzag, start + step * np.arange(len(positions)), length / folds), length)
        return (start - step / 2, start + step * (len(positions) - 0.5))

    def _profile(self, ramp: _Array, axis: int) -> _Array:
        """Return the denormalised values of a transformed ramp along an axis; NaN in the padding."""
        values = ramp[:, None] if axis == 1 else ramp[None, :]
        with np.errstate(divide="ignore", invalid="ignore"):
            restored = (self._transformed(values) - self.black) / self.scale
        lines = np.ma.masked_array(restored, np.broadcast_to(~self.content, restored.shape))
        if np.ma.max(np.ma.ptp(lines, axis=(0, 3 - axis))) > 0.03:
            raise ImageError(_NO_BOX.format("rotates or warps"))
        return np.asarray(lines.mean(axis=(0, 3 - axis)).filled(np.nan))


def _unfold(zigzag: _Array, guess: _Array, fold: float) -> _Array:
    """Return the positions that a zigzag encodes, NaN near its corners. `guess` identifies the fold."""
    fold_index = np.floor(guess / fold)
    inside = np.abs(guess / fold - fold_index - 0.5) < 0.35
    positions = fold * (fold_index + np.where(fold_index % 2 == 0, zigzag, 1 - zigzag))
    return np.asarray(np.where(inside, positions, np.nan))


def _fit_line(positions: _Array, length: int) -> tuple[float, float]:
    """Return the start and the step of positions, fitted by least squares."""
    index = np.flatnonzero(np.isfinite(positions))
    if length == 1:  # the content covers the only pixel on this axis
        return (float((0.5 - index[0]) / len(index)), 1 / len(index))
    position = positions[index]
    rise = position[-1] - position[0]
    if rise <= 0:
        raise ImageError(_NO_BOX.format("flips or rotates, or keeps a single pixel of"))
    # Resampling bends a ramp near the edges of the image.
    margin = min(3 * max(rise / len(index), 1) + 0.5, 0.3 * length)
    inner = np.abs(position - length / 2) < length / 2 - margin
    index, position = (index[inner], position[inner]) if inner.sum() > 1 else (index, position)
    step, start = np.polyfit(index, position, 1)
    if np.abs(position - start - step * index).max() > 1 + length / 128 + step or step <= 0:
        raise ImageError(_NO_BOX.format("warps"))
    return (float(start), float(step))
