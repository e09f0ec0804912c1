"""Segments of an image that are hidden as a whole: superpixels, a grid, or a label map."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..attribution.options import ConvertedOption
from ..attribution.passes import MultiPassAttribution
from ..errors import MethodError, optional_import
from ..io.axes import as_text
from ..io.preprocess import Preprocess
from ..model.inputs import input_labels
from ..validation import described, is_integer
from .baselines import Filler, FillOption

SUPERPIXELS = 50
COMPACTNESS, SMOOTHING = 10.0, 1.0
"""SLIC's weight of distance against colour, and the blur before it in pixels: the defaults of scikit-image."""

Segmenter = Callable[[NDArray[np.float64]], Any]
"""A function from an image (H, W, C) in 0..1 to a label map (H, W)."""


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """A label map (H, W), one integer per pixel."""

    tensor: Tensor
    name: str = "labels"


SegmentsLike = int | str | Sequence[int] | NDArray[Any] | Tensor | Labels | Segmenter
"""The approximate number of superpixels, the cells of a grid along each axis, such as (rows, columns), a label map (H,
W) in the size of the model's input, a function from the image (H, W, C) in 0..1 to a label map, or "inputs"."""

ResolvedSegments = int | str | tuple[int, ...] | Labels | Segmenter


def resolve_segments(option: str, like: object) -> ResolvedSegments:
    """Return the checked option `segments`. Raises MethodError if it is invalid."""
    if isinstance(like, str) and like == "inputs":
        return like
    if isinstance(like, np.ndarray | Tensor):
        return Labels(_checked(like))
    if is_integer(like):
        return int(like)
    if isinstance(like, list | tuple) and len(like) in (2, 3) and all(map(is_integer, like)):
        return tuple(map(int, like))
    if not isinstance(like, Labels) and not callable(like):
        raise MethodError(
            f"{option}={described(like)} is invalid; expected a number of superpixels, the (rows, columns) of a grid, "
            "a label map (H, W) of integers, or a function from an image (H, W, C) to a label map"
        )
    return like


def _checked(labels: Any) -> Tensor:
    tensor = labels.detach().cpu() if isinstance(labels, Tensor) else torch.from_numpy(np.array(labels))
    if tensor.dim() not in (2, 3) or not tensor.numel() or tensor.is_floating_point() or tensor.is_complex():
        raise MethodError(
            f"a map of segments holds one integer per pixel, (H, W); got {tensor.dtype} of shape {tuple(tensor.shape)}"
        )
    return tensor.long().clone()


class Segments:
    """The segments of one image, numbered from 0.

    Attributes:
        labels: (H, W) the number of each pixel's segment.
        count: The number of segments, M.
        sizes: (M,) the number of pixels of each segment.
        note: The number of segments as a text, for `ImageAttribution.notes`.
    """

    def __init__(self, labels: Tensor) -> None:
        self.labels: Tensor = torch.unique(labels, return_inverse=True)[1]
        self.sizes = torch.bincount(self.labels.flatten())
        self.count = len(self.sizes)
        self.note = f"{self.count} segments"

    def hidden(self, visible: Tensor) -> Tensor:
        """Return the mask (k, 1, H, W) of hidden pixels, given which segments are shown, boolean (k, M)."""
        hidden: Tensor = ~visible.to(self.labels.device)
        return hidden[:, self.labels][:, None]

    def painted(self, values: Tensor) -> Tensor:
        """Return a map (1, H, W) in which the value (M,) of each segment is divided evenly among its pixels.

        The map sums to the sum of the values, and a large segment does not outweigh a small segment of the same value.
        """
        return (values / self.sizes.to(values.device))[self.labels.to(values.device)][None]


def segmented(x: Tensor, by: ResolvedSegments, preprocess: object = None) -> Segments:
    """Return the segments of an image.

    Superpixels are computed on the model's input. It is denormalised to 0..1 if the preprocessing is a `Preprocess`,
    and otherwise scaled to 0..1 by its smallest and largest value.

    Args:
        x: (1, C, H, W) the image, normalised.
        by: The result of `resolve_segments`.
        preprocess: The preprocessing that created the input, or None.

    Raises:
        MethodError: A label map has a different size than the image, or the user's function returns no label map.
    """
    size = tuple(x.shape[2:])
    if isinstance(by, str):
        labels = input_labels()
    elif isinstance(by, Labels):
        labels = by.tensor
    elif isinstance(by, tuple):
        if len(by) != len(size):
            raise MethodError(f"a grid of {by} segments, for an input with {len(size)} spatial axes; expected one each")
        labels = torch.zeros((), dtype=torch.long, device="cpu")
        for edge, cells in zip(size, by, strict=True):
            labels = labels[..., None] * cells + torch.arange(edge, device="cpu") * min(cells, edge) // edge
    else:
        pixels = x[0].detach().cpu().double()
        image = in_unit_range(pixels, preprocess).movedim(0, -1).contiguous().numpy()
        labels = _checked(_superpixels(image, by) if isinstance(by, int) else by(image))
    if tuple(labels.shape) != size:
        raise MethodError(
            f"the map of segments is {as_text(labels.shape)}, and the model's input {as_text(size)}; "
            "pass a map in the size of the input, or a function, which gets the image in that size"
        )
    return Segments(labels.to(x.device))


def in_unit_range(values: Tensor, preprocess: object) -> Tensor:
    """Return values (C, H, W) of the model's input as pixels in 0..1.

    They are denormalised if the preprocessing is a `Preprocess`. Otherwise they are scaled by their extremes.
    """
    if isinstance(preprocess, Preprocess) and len(values) == len(preprocess.mean):
        return preprocess.denormalise(values).clamp(0, 1)
    low, high = values.aminmax()
    return ((values - low) / (high - low)).clamp(0, 1) if high > low else torch.full_like(values, 0.5)


def _superpixels(image: NDArray[np.float64], count: int) -> Any:
    """Achanta et al., "SLIC Superpixels" (2012), https://doi.org/10.1109/TPAMI.2012.120, by scikit-image."""
    slic = optional_import("skimage.segmentation", "perturbation", "the choice of superpixels").slic
    is_rgb = image.shape[-1] == 3  # other channels are not colours, and are compared unchanged
    return slic(image, n_segments=count, compactness=COMPACTNESS, sigma=SMOOTHING, convert2lab=is_rgb, start_label=0)


class SegmentAttribution(MultiPassAttribution):
    """Base class of methods that hide segments of the image.

    Args:
        segments: The approximate number of superpixels (SLIC, by scikit-image), the (rows, columns) of a grid, a label
            map (H, W) in the size of the model's input, or a function from the image (H, W, C) in 0..1 to a label map.
            "inputs" hides each input of a model with several as a whole.
        fill: The value of hidden pixels: a number, or one per channel, in the model's normalised space (0 is the mean
            colour of its training images), "mean" (of the image), "blur", "inpaint" (from the surrounding pixels), or
            an image (C, H, W) as the model takes it.

    Raises:
        DependencyError: Superpixels need scikit-image, which is not installed.
        MethodError: An option is invalid, or does not fit the image.
    """

    units = "score per pixel"

    segments: ConvertedOption[SegmentsLike, ResolvedSegments] = ConvertedOption(SUPERPIXELS, resolve_segments)
    fill: FillOption = FillOption()

    def explains_together(self) -> bool:
        """Return whether the segments are the inputs of a model with several inputs."""
        return self.segments == "inputs"

    def segmented(self, x: Tensor) -> tuple[Segments, Filler]:
        """Return the segments of an image (1, C, H, W), and the filler that hides its pixels."""
        return segmented(x, self.segments, self.preprocess), Filler(x, self.fill)
