"""The drop in the score when a part of the image is hidden: a sliding window, or a segment."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..attribution.estimates import generator
from ..attribution.options import ConvertedOption
from ..attribution.passes import ImageAttribution, Passes, TimedAttribution
from ..errors import MethodError
from ..validation import described, is_integer
from .baselines import Filler, FillOption
from .segments import SUPERPIXELS, SegmentAttribution

_MOST_EDGE = 32
"""The default window of an image of 224 pixels or more; the largest default stride is half of it."""


def _checked_edges(option: str, edges: object) -> int | tuple[int, ...]:
    """Return one number of pixels, or one per axis. Raises MethodError for other values."""
    if is_integer(edges):
        return int(edges)
    if isinstance(edges, list | tuple) and len(edges) in (2, 3) and all(map(is_integer, edges)):
        return tuple(map(int, edges))
    raise MethodError(f"{option}={described(edges)} is invalid; expected a whole number of pixels, or one per axis")


class Occlusion(TimedAttribution):
    """The drop in the score when a window around a pixel is hidden.

    Formula: S_i = mean_W (y(x) − y(x without W)), over the windows W that cover pixel i.

    The window moves by `stride`; the value of a pixel is the mean over the windows that cover it. The last window of a
    row or column ends at the border, so every pixel is covered and no window reaches outside.

    If possible, only the part of each forward that depends on the window is computed; the result is equal up to
    rounding. `run_stats[0].note` reports this.

    Args:
        window: The edge of the window in pixels of the model's input, or one number for each axis, such as (height,
            width); cropped at axes that are shorter. By default 1/7 of the shorter side of an image, or 1/3 of a
            volume's, and at most 32.
        stride: The step of the window, or one for each axis; not more than the window. By default half of the
            window, and at most 16.
        fill: The value of hidden pixels: a number, or one per channel, in the model's normalised space (0 is the mean
            colour of its training images), "mean" (of the image), "blur", "inpaint" (from the surrounding pixels), or
            an image (C, H, W) as the model takes it.
        seconds: The maximum time per image, in seconds. The first windows cover the image and are always run. The
            other windows follow in random order, so if the time ends, fewer windows are averaged.

    Values: (N, 1, H, W), signed, in score units: the drop in the score, positive where the window hides support.

    Raises:
        MethodError: An option is invalid, or does not fit the image.

    Source: Zeiler and Fergus, "Visualizing and Understanding Convolutional Networks" (2013),
        https://arxiv.org/abs/1311.2901.
    """

    name = "occlusion"
    cost = "1 forward for each position of the window: 169 at 224x224"
    sign = "signed"
    preview_options: ClassVar = {"window": 7, "stride": 5}
    draft_options: ClassVar = {}

    window: ConvertedOption[int | Sequence[int] | None, int | tuple[int, ...] | None] = ConvertedOption(
        None, _checked_edges
    )
    stride: ConvertedOption[int | Sequence[int] | None, int | tuple[int, ...] | None] = ConvertedOption(
        None, _checked_edges
    )
    fill: FillOption = FillOption()

    def __post_init__(self) -> None:
        """Check that the windows leave no pixel out."""
        if self.window is None or self.stride is None:
            return
        axes = max(np.size(self.window), np.size(self.stride), 2)
        for edge, step in zip(_edges(self.window, axes), _edges(self.stride, axes), strict=True):
            if step > edge:
                raise MethodError(f"stride={step} is longer than the window of {edge}: it would leave pixels out")

    def _windows(self, size: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the edges of the window and the strides for an image or a volume of a size."""
        edge = max(1, min(_MOST_EDGE, min(size[-2:]) // (7 if len(size) == 2 else 3)))
        edges = _edges(self.window or edge, len(size))
        strides = _edges(self.stride or tuple(max(1, min(edge, _MOST_EDGE) // 2) for edge in edges), len(size))
        return (edges if self.window else tuple(map(max, edges, strides))), strides

    def explain_image(self, passes: Passes, score: Tensor) -> ImageAttribution:
        """Compute the mean drop over the windows that cover each pixel."""
        x, budget = passes.x, passes.budget
        size = tuple(x.shape[2:])
        edges, strides = self._windows(size)
        if all(edge > length for edge, length in zip(edges, size, strict=True)):
            shape, fits = " x ".join(map(str, size)), max(1, min(size) // 4)
            cure = f"pass smaller ones, such as window={fits}, stride={max(1, fits // 2)}"
            raise MethodError(f"window={self.window or edges} is larger than the input of {shape} pixels; {cure}")
        window = tuple(map(min, edges, size))
        steps = zip(size, window, strides, strict=True)
        starts = [[*range(0, length - edge, step), length - edge] for length, edge, step in steps]  # the last fits in
        first = list(product(*map(_covering, starts, window)))
        others = sorted({*product(*starts)} - {*first})
        order = torch.randperm(len(others), generator=generator(self.seed), device="cpu")
        corners = first + [others[number] for number in order.tolist()]
        filler = Filler(x, self.fill)
        total, covered = torch.zeros(2, *size, dtype=torch.float64, device="cpu")

        def make(start: int, stop: int) -> Tensor:
            masks = torch.zeros(stop - start, 1, *size, dtype=torch.bool, device=x.device)
            for mask, corner in zip(masks, corners[start:stop], strict=True):
                mask[0][_slices(corner, window)] = True
            return filler(masks)

        def mean() -> ImageAttribution:
            notes = [f"{budget.used} of {len(corners)} windows"] if budget.used < len(corners) else []
            return ImageAttribution((total / covered)[None].to(x), notes=notes)

        def so_far() -> ImageAttribution | None:
            return mean() if covered.all() else None

        for done in passes.forwards(make, len(corners), local=True, least=len(first), partial=so_far):
            for corner, fall in zip(corners[done.start :], (score - done.scores).tolist(), strict=False):
                hidden = _slices(corner, window)
                total[hidden] += fall
                covered[hidden] += 1
        return mean()


def _covering(starts: list[int], window: int) -> list[int]:
    """Return the first pixels of the fewest windows that cover one edge."""
    chosen = starts[:1]
    while chosen[-1] < starts[-1]:
        chosen.append(max(start for start in starts if start <= chosen[-1] + window))
    return chosen


def _slices(corner: tuple[int, ...], window: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(start, start + edge) for start, edge in zip(corner, window, strict=True))


def _edges(edges: int | tuple[int, ...], axes: int) -> tuple[int, ...]:
    """Return one number for each axis. Raises MethodError for another count."""
    edges = edges if isinstance(edges, tuple) else (edges,) * axes
    if len(edges) != axes:
        raise MethodError(f"got {len(edges)} numbers for the window or the stride, {edges}; expected {axes}")
    return edges


class FeatureAblation(SegmentAttribution):
    """The drop in the score when a single segment of the image is hidden.

    Formula: S_i = (y(x) − y(x without s)) / |s|, with s the segment of pixel i, of |s| pixels.

    Joint effects are missed, for example if either of two eyes suffices, so the sum of the values has no meaning.
    `KernelSHAP` and `ShapleySampling` divide joint effects among the segments.

    Values: (N, 1, H, W), signed, in score units per pixel: f(x) minus the score without the segment, divided evenly
    among the segment's pixels, so that the sum over a segment is the drop in the score.

    Source: Zeiler and Fergus, "Visualizing and Understanding Convolutional Networks" (2013),
        https://arxiv.org/abs/1311.2901, with superpixels instead of squares.
    """

    name = "feature_ablation"
    cost = f"about {SUPERPIXELS} forwards, one for each segment"
    preview_options: ClassVar = {"segments": (3, 3)}

    def explain_image(self, passes: Passes, score: Tensor) -> ImageAttribution:
        """Compute the drop in the score for each segment."""
        segments, filler = self.segmented(passes.x)

        def make(start: int, stop: int) -> Tensor:
            numbers = torch.arange(segments.count, device="cpu")
            return filler(segments.hidden(numbers != torch.arange(start, stop, device="cpu")[:, None]))

        scores = passes.scores(make, segments.count)
        values = segments.painted((score - scores).cpu().double()).to(passes.x)
        return ImageAttribution(values, notes=[segments.note])
