"""The parts of a picture that are hidden and shown as one: superpixels, a grid, or what the user drew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import MethodError
from ...io.preprocess import Preprocess
from ...validation import is_pair, is_whole

COMPACTNESS, SMOOTHING = 10.0, 1.0
"""SLIC's weight of nearness against likeness in colour, and the blur before it in pixels: scikit-image's usual ones."""

Segmenting = Callable[[NDArray[np.float64]], Any]
"""From a picture (H, W, C) in 0..1 to a label (H, W) for each pixel."""


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """A map of labels (H, W), one whole number for each part of the picture."""

    tensor: Tensor
    name: str = "labels"


SegmentsLike = int | Sequence[int] | NDArray[Any] | Tensor | Labels | Segmenting
"""About how many superpixels, the (rows, columns) of a grid, a map of labels (H, W) in the size of the model's input,
or a function from the picture (H, W, C) in 0..1 to such a map."""

SegmentsBy = int | tuple[int, int] | Labels | Segmenting


def as_segments(like: SegmentsLike) -> SegmentsBy:
    """A way to segment that can be kept. Raises MethodError where it is none."""
    made: Any = like
    if isinstance(made, Labels):
        return made
    if isinstance(made, np.ndarray | Tensor):
        labels = made.detach().cpu() if isinstance(made, Tensor) else torch.from_numpy(np.ascontiguousarray(made))
        return Labels(_checked(labels))
    if callable(made):
        by: Segmenting = made
        return by
    if is_whole(made):
        return int(made)
    if is_pair(made):
        return (int(made[0]), int(made[1]))
    raise MethodError(
        f"segments={made!r} is no number of superpixels of at least 1, no (rows, columns) of a grid, no map of whole "
        "numbers (H, W), and no function from a picture (H, W, C) to one"
    )


def _checked(labels: Tensor) -> Tensor:
    if labels.dim() != 2 or not labels.numel() or labels.is_floating_point() or labels.is_complex():
        came = f"{labels.dtype} of shape {tuple(labels.shape)}"
        raise MethodError(f"a map of segments holds one whole number per pixel, (H, W); got {came}")
    return labels.long().clone()


class Segments:
    """The parts of one image, numbered from 0.

    Attributes:
        labels: (H, W) the number of each pixel's part.
        count: How many parts there are, M.
        sizes: (M,) the number of pixels of each.
    """

    def __init__(self, labels: Tensor) -> None:
        numbered: Tensor = torch.unique(labels, return_inverse=True)[1]
        self.labels = numbered
        self.sizes = torch.bincount(numbered.flatten())
        self.count = len(self.sizes)

    def hidden(self, shown: Tensor) -> Tensor:
        """The hidden pixels, a boolean mask (k, 1, H, W), where only the parts `shown`, boolean (k, M), are left."""
        away: Tensor = ~shown.to(self.labels.device)
        return away[:, self.labels][:, None]

    def painted(self, values: Tensor) -> Tensor:
        """A map (1, H, W) in which the value of each part, of (M,), is shared out evenly among its pixels.

        So the map sums to what the values sum to, and a large part does not outweigh a small one of the same value.
        """
        shares = values / self.sizes.to(values.device)
        return shares[self.labels.to(values.device)][None]


def segmented(x: Tensor, by: SegmentsBy, preprocess: object = None) -> Segments:
    """The parts of an image.

    Superpixels are found on the picture as the model sees it: the input, taken back into 0..1 by the preprocessing
    where that is ours, and otherwise stretched to 0..1 from its smallest to its largest value.

    Args:
        x: (1, C, H, W) the image, normalised.
        by: How, as `as_segments` gives it.
        preprocess: What made the input of the picture, where that is known.

    Raises:
        MethodError: A map has another size than the image, or the user's function gives no map.
    """
    size = (int(x.shape[2]), int(x.shape[3]))
    if isinstance(by, Labels):
        labels = by.tensor
    elif isinstance(by, tuple):
        labels = _grid(size, by)
    else:
        picture = _picture(x, preprocess)
        made = _superpixels(picture, by) if isinstance(by, int) else by(picture)
        labels = _checked(made.detach().cpu() if isinstance(made, Tensor) else torch.from_numpy(np.array(made)))
    if tuple(labels.shape) != size:
        raise MethodError(
            f"the map of segments is {labels.shape[0]}x{labels.shape[1]}, and the model's input {size[0]}x{size[1]}; "
            "make it in the size of the input, or pass a function, which gets the picture in that size"
        )
    return Segments(labels.to(x.device))


def _grid(size: tuple[int, int], cells: tuple[int, int]) -> Tensor:
    rows, columns = (
        torch.arange(edge, device="cpu") * min(many, edge) // edge for edge, many in zip(size, cells, strict=True)
    )
    return rows[:, None] * cells[1] + columns[None]


def _picture(x: Tensor, preprocess: object) -> NDArray[np.float64]:
    """The picture as the model sees it, (H, W, C), in 0..1."""
    seen = x[0].detach().cpu().double()
    if isinstance(preprocess, Preprocess) and len(seen) == 3:
        seen = preprocess.denormalise(seen)
    else:
        low, high = float(seen.min()), float(seen.max())
        seen = (seen - low) / (high - low) if high > low else torch.full_like(seen, 0.5)
    picture: NDArray[np.float64] = seen.clamp(0, 1).permute(1, 2, 0).contiguous().numpy()
    return picture


def _superpixels(picture: NDArray[np.float64], count: int) -> Any:
    """Achanta et al., "SLIC Superpixels" (2012), https://doi.org/10.1109/TPAMI.2012.120, by scikit-image."""
    from skimage.segmentation import slic

    colours = picture.shape[2] == 3  # other channels are no colours, and are compared as they are
    return slic(picture, n_segments=count, compactness=COMPACTNESS, sigma=SMOOTHING, convert2lab=colours, start_label=0)
