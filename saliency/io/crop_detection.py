"""Any callable from picture to tensor as preprocessing, with its crop found by pushing coordinate ramps through it."""

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

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels of the picture


class TransformPreprocess:
    """Any callable from a picture to a tensor, with its crop found by looking.

    Where the crop lies is found by pushing coordinate ramps through the callable, once per picture size, so a
    callable that resizes, crops, pads and normalises in whatever way needs no description.

    Args:
        transform: Takes an RGB picture and returns a float tensor (C, H, W), the same one each time.
    """

    def __init__(self, transform: Callable[[Image.Image], Tensor]) -> None:
        self.transform = transform
        self._boxes: dict[tuple[int, int], Box] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the lock, which can be neither copied nor pickled."""
        return {name: each for name, each in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TransformPreprocess) and self.transform == other.transform

    def __hash__(self) -> int:
        return hash(self.transform)

    def __repr__(self) -> str:
        return f"TransformPreprocess({self.transform!r})"

    def __call__(self, picture: Image.Image) -> Tensor:
        """The model's input for one picture: (C, H, W), floating point.

        Raises:
            ImageError: The callable returned something else.
        """
        tensor: object = self.transform(picture)
        if not isinstance(tensor, Tensor):
            raise ImageError(
                f"the preprocessing returned {type(tensor).__name__}, expected a tensor (3, H, W); end it "
                'with ToTensor, or take the tensor out: lambda p: processor(p, return_tensors="pt")'
                '["pixel_values"][0]'
            )
        if tensor.ndim != 3 or tensor.numel() == 0 or not tensor.is_floating_point():
            raise ImageError(
                f"the preprocessing returned a {tensor.dtype} tensor of shape {tuple(tensor.shape)}; "
                "expected floating point values of shape (C, H, W)"
            )
        return tensor.detach()

    @cached_property
    def input_range(self) -> tuple[float, float]:
        """The lowest and the highest value that black and white pictures come out with."""
        ends = torch.stack([self(Image.new("RGB", (256, 256), color)) for color in ("black", "white")])
        return float(ends.min()), float(ends.max())

    def box(self, picture_size: tuple[int, int]) -> Box:
        """Where the model's input lies on a picture of (w, h) pixels, to a pixel.

        Raises:
            ImageError: The callable is random, flips, rotates or warps, or does more to colours than to scale
                and shift them.
        """
        with self._lock:
            if picture_size not in self._boxes:
                self._boxes[picture_size] = _find_box(self, picture_size)
            return self._boxes[picture_size]


_Array = NDArray[np.floating[Any]]
_NO_BOX = "the preprocessing {} the picture; only resizing, cropping and padding can be followed"


def _find_box(preprocess: Callable[[Image.Image], Tensor], picture_size: tuple[int, int]) -> Box:
    """Push grey ramps through `preprocess` and read off which coordinate came out where."""
    _require_repeatable(preprocess, picture_size)
    probe = _Probe(preprocess, picture_size)
    left, right = _span(probe, axis=2, length=picture_size[0])
    top, bottom = _span(probe, axis=1, length=picture_size[1])
    return (left, top, right, bottom)


def _push(preprocess: Callable[[Image.Image], Tensor], values: Any, size: tuple[int, int]) -> _Array:
    """(C, h, w): the output for a grey picture of the values 0..1, spread over a picture of (w, h)."""
    grey = np.round(255 * np.asarray(values, np.float64)).astype(np.uint8)
    picture = np.ascontiguousarray(np.broadcast_to(grey[..., None], (size[1], size[0], 3)))
    output = preprocess(Image.fromarray(picture)).to(device="cpu", dtype=torch.float64)
    return np.asarray(output.numpy())


def _require_repeatable(preprocess: Callable[[Image.Image], Tensor], size: tuple[int, int]) -> None:
    """Push a lopsided picture eight times: a flip with probability 1/2 stays hidden once in 128."""
    edges = (min(size[0], 640), min(size[1], 640))  # large enough to crop, small enough to be quick
    ramp = np.add.outer(np.linspace(0, 0.3, edges[1]), np.linspace(0, 0.6, edges[0]))
    first = _push(preprocess, ramp, edges)
    for again in (_push(preprocess, ramp, edges) for _ in range(7)):
        if again.shape != first.shape or not np.array_equal(again, first, equal_nan=True):
            raise ImageError(
                "the preprocessing gives another tensor each time; pass the transform for evaluation, "
                "without random crops, flips or colours"
            )


class _Probe:
    """What becomes of grey pictures of one size, with the normalisation undone.

    Black and white give each output value's offset and scale, whatever they are, and show the padding: there
    the two agree. The probes are grey so that neither the channels' order nor a conversion to grey matters.
    """

    def __init__(self, preprocess: Callable[[Image.Image], Tensor], picture_size: tuple[int, int]) -> None:
        self.preprocess, self.picture_size = preprocess, picture_size
        self.black = _push(preprocess, [[0]], picture_size)
        self.scale = _push(preprocess, [[1]], picture_size) - self.black
        if not np.isfinite(self.scale).all() or not self.scale.any():
            raise ImageError(
                "black and white pictures leave the preprocessing alike or not finite, so its crop cannot be "
                "found; describe it by saliency.Preprocess, or pass float tensors"
            )
        usual = [np.median(channel[channel != 0]) for channel in self.scale]
        deviation = np.abs(self.scale / np.reshape(usual, (-1, 1, 1)) - 1)
        self.content = (deviation < 0.02).all(axis=0)  # (h, w)

    def profile(self, ramp: _Array, axis: int) -> _Array:
        """The ramp as it comes out along an axis of (C, h, w); NaN where there is only padding."""
        values = ramp[:, None] if axis == 1 else ramp[None, :]
        with np.errstate(divide="ignore", invalid="ignore"):
            restored = (_push(self.preprocess, values, self.picture_size) - self.black) / self.scale
        lines = np.ma.masked_array(restored, np.broadcast_to(~self.content, restored.shape))
        if np.ma.max(np.ma.ptp(lines, axis=(0, 3 - axis))) > 0.03:
            raise ImageError(_NO_BOX.format("rotates or warps"))
        return np.asarray(lines.mean(axis=(0, 3 - axis)).filled(np.nan))


def _span(probe: _Probe, axis: int, length: int) -> tuple[float, float]:
    """From where to where on the picture's axis, `length` pixels long, the output reaches."""
    centres = (np.arange(length) + 0.5) / length
    places = length * probe.profile(centres, axis)  # where each output pixel's centre comes from
    start, step = _line(places, length)
    folds = int(min(0.05 * length / step, length / 64))
    if length > 256 and folds > 1:
        # The ramp folded into a zigzag is as many times as steep, so that 256 levels resolve a pixel.
        zigzag = probe.profile(np.abs((centres * folds + 1) % 2 - 1), axis)
        start, step = _line(_unfolded(zigzag, start + step * np.arange(len(places)), length / folds), length)
    return (start - step / 2, start + step * (len(places) - 0.5))


def _unfolded(zigzag: _Array, guess: _Array, fold: float) -> _Array:
    """The places that a zigzag tells of, where the guess says which fold it is; NaN near the corners."""
    which = np.floor(guess / fold)
    inside = np.abs(guess / fold - which - 0.5) < 0.35
    places = fold * (which + np.where(which % 2 == 0, zigzag, 1 - zigzag))
    return np.asarray(np.where(inside, places, np.nan))


def _line(places: _Array, length: int) -> tuple[float, float]:
    """Start and step of the places, by least squares."""
    index = np.flatnonzero(np.isfinite(places))
    at, place = index.astype(np.float64), places[index]
    climb = place[-1] - place[0]
    if climb < -0.02 * length:
        raise ImageError(_NO_BOX.format("flips or rotates"))
    if climb == 0 and length == 1:  # nothing to compare: the content is the whole axis
        step = length / len(index)
        return (float(step * (0.5 - index[0])), step)
    if climb <= 0:
        raise ImageError("the preprocessing keeps so little of the picture that its place cannot be found")
    if climb < 0.5 * (len(index) - 1):
        # Enlarged pixels are steps or slopes; both pass the border between two pixels where it lies.
        borders = np.arange(math.floor(place[0]) + 1, math.ceil(place[-1]))
        if len(borders) > 1:
            at, place = np.interp(borders, place, at), borders.astype(np.float64)
    else:
        # Near the picture's edges resampling bends a ramp.
        margin = min(3 * max(climb / len(index), 1) + 0.5, 0.3 * length)
        inner = np.abs(place - length / 2) < length / 2 - margin
        at, place = (at[inner], place[inner]) if inner.sum() > 1 else (at, place)
    step, start = np.polyfit(at, place, 1)
    if np.abs(place - start - step * at).max() > 1 + length / 128 + step or step <= 0:
        raise ImageError("the preprocessing warps the picture; only resizing, cropping and padding can be drawn")
    return (float(start), float(step))
