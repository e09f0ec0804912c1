"""Use any callable from image to tensor as preprocessing, and detect its crop from transformed coordinate ramps."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ..errors import ImageError

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels of the image


class TransformPreprocess:
    """Any callable from a PIL image to a tensor, used as preprocessing.

    Its crop is detected once per image size, by transforming coordinate ramps: images whose grey value is a coordinate
    of the pixel. Therefore a callable that resizes, crops, pads and normalises needs no description.

    Args:
        transform: Takes an RGB image and returns a float tensor (C, H, W). It must be deterministic.
    """

    def __init__(self, transform: Callable[[Image.Image], Tensor]) -> None:
        self.transform = transform
        self._boxes: dict[tuple[int, int], Box] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes except the lock, which can be neither copied nor pickled."""
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TransformPreprocess) and self.transform == other.transform

    def __hash__(self) -> int:
        return hash(self.transform)

    def __repr__(self) -> str:
        return f"TransformPreprocess({self.transform!r})"

    def __call__(self, picture: Image.Image) -> Tensor:
        """Return the model's input for one image: (C, H, W), floating point.

        Raises:
            ImageError: The callable returned something else.
        """
        tensor: object = self.transform(picture)
        if not isinstance(tensor, Tensor):
            raise ImageError(
                f"the preprocessing returned {type(tensor).__name__}, expected a tensor (3, H, W); append "
                'ToTensor to it, or extract the tensor: lambda p: processor(p, return_tensors="pt")'
                '["pixel_values"][0]'
            )
        if tensor.ndim != 3 or tensor.numel() == 0 or not tensor.is_floating_point():
            raise ImageError(
                f"the preprocessing returned a {tensor.dtype} tensor of shape {tuple(tensor.shape)}; "
                "expected floating-point values of shape (C, H, W)"
            )
        return tensor.detach()

    @cached_property
    def input_range(self) -> tuple[float, float]:
        """Lowest and highest value of transformed black and white images."""
        ends = torch.stack([self(Image.new("RGB", (256, 256), color)) for color in ("black", "white")])
        return float(ends.min()), float(ends.max())

    def box(self, picture_size: tuple[int, int]) -> Box:
        """Return the box of the model's input on an image of (w, h) pixels, accurate to one pixel.

        Raises:
            ImageError: The callable is random, flips, rotates or warps the image, or changes its colours other than by
                a scale and an offset.
        """
        with self._lock:
            if picture_size not in self._boxes:
                self._boxes[picture_size] = _find_box(self, picture_size)
            return self._boxes[picture_size]


_Array = NDArray[np.floating[Any]]
_NO_BOX = "the preprocessing {} the image; only resizing, cropping and padding can be detected"


def _find_box(preprocess: Callable[[Image.Image], Tensor], picture_size: tuple[int, int]) -> Box:
    """Return the box, from the coordinate that each output pixel has in transformed grey ramps."""
    _require_repeatable(preprocess, picture_size)
    probe = _Probe(preprocess, picture_size)
    left, right = _span_of_output(probe, axis=2, length=picture_size[0])
    top, bottom = _span_of_output(probe, axis=1, length=picture_size[1])
    return (left, top, right, bottom)


def _transform_grey(preprocess: Callable[[Image.Image], Tensor], values: Any, size: tuple[int, int]) -> _Array:
    """Transform a grey image of (w, h) pixels with values in 0..1. Returns (C, h, w)."""
    grey = np.round(255 * np.asarray(values, np.float64)).astype(np.uint8)
    picture = np.ascontiguousarray(np.broadcast_to(grey[..., None], (size[1], size[0], 3)))
    output = preprocess(Image.fromarray(picture)).to(device="cpu", dtype=torch.float64)
    return np.asarray(output.numpy())


def _require_repeatable(preprocess: Callable[[Image.Image], Tensor], size: tuple[int, int]) -> None:
    """Raise ImageError if eight transforms of one asymmetric image differ.

    A random flip with probability 1/2 is missed once in 128 times.
    """
    edges = (min(size[0], 640), min(size[1], 640))  # large enough to crop, small enough to be quick
    ramp = np.add.outer(np.linspace(0, 0.3, edges[1]), np.linspace(0, 0.6, edges[0]))
    first = _transform_grey(preprocess, ramp, edges)
    for _ in range(7):
        if not np.array_equal(_transform_grey(preprocess, ramp, edges), first, equal_nan=True):
            raise ImageError(
                "the preprocessing is random: it gives different tensors for one image; pass the transform for "
                "evaluation, without random crops, flips or colours"
            )


class _Probe:
    """Transformed grey images of one size, denormalised.

    A black and a white image give the offset and the scale of each output value. Both are equal in the padding. The
    images are grey, so neither the order of the channels nor a conversion to grey matters.
    """

    def __init__(self, preprocess: Callable[[Image.Image], Tensor], picture_size: tuple[int, int]) -> None:
        self.preprocess, self.picture_size = preprocess, picture_size
        self.black = _transform_grey(preprocess, [[0]], picture_size)
        self.scale = _transform_grey(preprocess, [[1]], picture_size) - self.black
        if not np.isfinite(self.scale).all() or not self.scale.any():
            raise ImageError(
                "the preprocessing gives equal or non-finite values for black and white, so its crop is unknown; "
                "describe it with saliency.Preprocess, or pass float tensors"
            )
        usual = [np.median(channel[channel != 0]) for channel in self.scale]
        deviation = np.abs(self.scale / np.reshape(usual, (-1, 1, 1)) - 1)
        self.content = (deviation < 0.02).all(axis=0)  # (h, w)

    def profile(self, ramp: _Array, axis: int) -> _Array:
        """Return the denormalised values of a transformed ramp along one axis of (C, h, w); NaN in the padding."""
        values = ramp[:, None] if axis == 1 else ramp[None, :]
        with np.errstate(divide="ignore", invalid="ignore"):
            restored = (_transform_grey(self.preprocess, values, self.picture_size) - self.black) / self.scale
        lines = np.ma.masked_array(restored, np.broadcast_to(~self.content, restored.shape))
        if np.ma.max(np.ma.ptp(lines, axis=(0, 3 - axis))) > 0.03:
            raise ImageError(_NO_BOX.format("rotates or warps"))
        return np.asarray(lines.mean(axis=(0, 3 - axis)).filled(np.nan))


def _span_of_output(probe: _Probe, axis: int, length: int) -> tuple[float, float]:
    """Return where the output begins and ends on an axis of the image that is `length` pixels long."""
    centres = (np.arange(length) + 0.5) / length
    positions = length * probe.profile(centres, axis)  # in the image, of the centre of each output pixel
    start, step = _fit_line(positions, length)
    folds = int(min(0.05 * length / step, length / 64))
    if length > 256 and folds > 1:
        # A zigzag of n folds is n times steeper than a ramp, so 256 grey levels resolve single pixels.
        zigzag = probe.profile(np.abs((centres * folds + 1) % 2 - 1), axis)
        start, step = _fit_line(_unfold(zigzag, start + step * np.arange(len(positions)), length / folds), length)
    return (start - step / 2, start + step * (len(positions) - 0.5))


def _unfold(zigzag: _Array, guess: _Array, fold: float) -> _Array:
    """Return the positions that a zigzag encodes, NaN near its corners. A guess of them identifies the fold."""
    fold_index = np.floor(guess / fold)
    inside = np.abs(guess / fold - fold_index - 0.5) < 0.35
    positions = fold * (fold_index + np.where(fold_index % 2 == 0, zigzag, 1 - zigzag))
    return np.asarray(np.where(inside, positions, np.nan))


def _fit_line(positions: _Array, length: int) -> tuple[float, float]:
    """Return the start and the step of positions, fitted by least squares."""
    index = np.flatnonzero(np.isfinite(positions))
    at, position = index.astype(np.float64), positions[index]
    rise = position[-1] - position[0]
    if rise < -0.02 * length:
        raise ImageError(_NO_BOX.format("flips or rotates"))
    if rise == 0 and length == 1:  # the image has one pixel on this axis, so the content covers all of it
        step = length / len(index)
        return (float(step * (0.5 - index[0])), step)
    if rise <= 0:
        raise ImageError(
            "the preprocessing keeps so little of the image that the position of the crop cannot be detected"
        )
    if rise < 0.5 * (len(index) - 1):
        # In an enlarged ramp each pixel is a step or a slope. Both cross the border of two pixels at its position.
        borders = np.arange(math.floor(position[0]) + 1, math.ceil(position[-1]))
        if len(borders) > 1:
            at, position = np.interp(borders, position, at), borders.astype(np.float64)
    else:
        # Resampling bends a ramp near the edges of the image.
        margin = min(3 * max(rise / len(index), 1) + 0.5, 0.3 * length)
        inner = np.abs(position - length / 2) < length / 2 - margin
        at, position = (at[inner], position[inner]) if inner.sum() > 1 else (at, position)
    step, start = np.polyfit(at, position, 1)
    if np.abs(position - start - step * at).max() > 1 + length / 128 + step or step <= 0:
        raise ImageError("the preprocessing warps the image; only resizing, cropping and padding can be detected")
    return (float(start), float(step))
