"""Performance information curve: the score of blurred images in which a map reveals pixels, against their file size."""

from __future__ import annotations

import io

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ...attribution.options import Option
from ...io.preprocess import Preprocess
from ...methods.baselines import Filler, FillOption
from .base import Outcome
from .changed_images import PerturbationMetric, PerturbedImage, area, check_shares

POINTS = 1001
"""The number of equally spaced sizes at which a curve is computed."""


class PIC(PerturbationMetric):
    """Area under the curve of the score of revealed images against their compressed size; higher is better.

    A blurred image is revealed from the most relevant pixels on. Its score and its size are scaled to 0 for the blurred
    image and 1 for the image itself, and limited to 0..1. In the order of their size, no score is lower than one before
    it. The points (0, 0) and (1, 1) are added, and the curve is linear between points.

    Args:
        shares: The shares of the pixels that are revealed.
        fill: The blurred image, as for `Deletion`.

    Values: (N,), from 0 to 1; NaN if the blurred image has no lower score or no smaller size than the image. The size
    is the size of a lossless WebP file of the image in 8 bits, denormalised. If the preprocessing is not known, the
    image is scaled by its smallest and largest value. Channels other than three are saved as grey, one below the other.

    Source: Kapishnikov et al., "XRAI: Better Attributions Through Regions" (2019), https://arxiv.org/abs/1906.02825.
        There, the blur interpolates between 1 % of the pixels and the revealed pixels.
    """

    name = "pic"
    higher_is_better = True

    shares: Option[tuple[float, ...]] = Option(
        (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.07, 0.1, 0.13, 0.21, 0.34, 0.5, 0.75), check_shares
    )
    fill: FillOption = FillOption("blur")

    def measure_image(self, image: PerturbedImage) -> Outcome:
        """Compute the areas of one image."""
        counts = [0, *(round(share * image.pixels) for share in self.shares)]
        scores = image.curves(counts, self.fill, insert=True)
        largest = _file_size(image, image.x[0])
        limits = torch.tensor(counts, dtype=torch.int64, device=image.x.device)[:, None, None]
        filler = Filler(image.x, self.fill)
        curves = []
        for ranks, row in zip(image.ranks, scores, strict=True):
            sizes = [_file_size(image, revealed) for revealed in filler((ranks >= limits)[:, None])]
            curves.append(_curve(np.array([*sizes, largest], float), np.array([*row.tolist(), image.full])))
        values = torch.from_numpy(np.stack(curves))
        return Outcome(area(values), curves=values, at=torch.linspace(0, 1, POINTS, dtype=torch.float64, device="cpu"))


def _file_size(image: PerturbedImage, values: Tensor) -> int:
    """Return the size of an image (C, H, W) as a file, in bytes."""
    if isinstance(image.preprocess, Preprocess):
        values = image.preprocess.denormalise(values)
    else:
        low, high = image.x.aminmax()
        values = (values - low) / (high - low).clamp(min=1e-30)
    pixels = values.clamp(0, 1).mul(255).round().byte().cpu().numpy()
    file = io.BytesIO()
    array = pixels.transpose(1, 2, 0) if len(pixels) == 3 else pixels.reshape(-1, pixels.shape[2])
    Image.fromarray(np.ascontiguousarray(array)).save(file, "webp", lossless=True, quality=0, method=0)
    return file.tell()


def _curve(sizes: NDArray[np.float64], scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the curve of points from the blurred image to the image itself, at equally spaced sizes."""
    if sizes[0] >= sizes[-1] or scores[0] >= scores[-1]:
        return np.full(POINTS, np.nan)
    size, score = (np.clip((values - values[0]) / (values[-1] - values[0]), 0, 1) for values in (sizes, scores))
    order = np.argsort(size, kind="stable")
    return np.interp(np.linspace(0, 1, POINTS), size[order], np.maximum.accumulate(score[order]))
