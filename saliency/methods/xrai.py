"""XRAI: regions ranked by integrated gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..attribution.options import EngineOptions
from ..engine.multi_pass import ImageAttribution, MultiPassAttribution
from ..engine.runner import PassRunner
from ..errors import MethodError
from .integrated_gradients import mean_gradients, wide
from .quadrature import Rule
from .quadrature import rule as rule_of

SCALES = (50.0, 100.0, 150.0, 250.0, 500.0, 1200.0)
"""Felzenszwalb's scales, from small segments to large ones, for an image of `AREA` pixels."""
SIGMA = 0.8
LEAST_SEGMENT = 150
LEAST_OF_ALL = 9
"""Fewer pixels are no region, however small the image."""
LEAST_GAIN = 50
RADIUS = 5
AREA = 224 * 224
"""The pixels of the images that the authors' numbers are for. For others, areas and scales are multiplied by the ratio
of the areas, and lengths by its root."""


class XRAI(MultiPassAttribution):
    """The mean integrated gradient of whole regions, from segmentations of the image at six scales.

    Integrated gradients are taken from the darkest and from the brightest value of the image, so that neither black nor
    white is blind, and the largest channel of their mean counts. Segments, grown a little to hold their edges, are then
    taken one by one: always the one whose pixels not taken yet have the largest mean, which they get as their value. A
    segment that adds hardly a pixel is dropped, and pixels in no segment share their own mean.

    Args:
        model: As for every method.
        rule: As for `IntegratedGradients`.
        steps: The number of nodes on each of the two paths.
        **running: See `saliency.attribution.options.EngineOptions`.

    Values: (N, 1, H, W), in score units per pixel, the same all over a region: what counts is their order.

    Raises:
        MethodError: An option that is none, or scikit-image or OpenCV is missing.
        TargetError: The target does not fit the model's output, or does not depend on the input.

    Source: Kapishnikov et al., "XRAI: Better Attributions Through Regions" (2019), https://arxiv.org/abs/1906.02825;
        segments: Felzenszwalb and Huttenlocher, "Efficient Graph-Based Image Segmentation" (2004),
        https://doi.org/10.1023/B:VISI.0000022288.19776.77.
    """

    name = "xrai"
    cost = "100 forwards and backwards"
    sign = "positive"
    quick_options: ClassVar[Mapping[str, Any]] = {"steps": 2}

    def __init__(
        self, model: nn.Module, *, rule: Rule = "gauss_legendre", steps: int = 50, **running: Unpack[EngineOptions]
    ) -> None:
        super().__init__(model, **running)
        rule_of(rule, steps)
        self.rule, self.steps = rule, steps

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """The regions' means."""
        x = passes.x
        references = torch.cat([torch.full_like(x, float(each)) for each in x.aminmax()])  # (2, C, H, W)
        gradients = mean_gradients(passes, references, self.rule, self.steps)
        pixels = ((x - references) * gradients).mean(0).amax(0)  # (H, W)
        regions = segments(x[0].to("cpu", torch.float64).permute(1, 2, 0).numpy())
        least = LEAST_GAIN * pixels.numel() / AREA
        values = ranked(pixels.to("cpu", torch.float64).numpy(), regions, least)
        return ImageAttribution(torch.from_numpy(values)[None].to(x.device, wide(x)))


class Segments(NamedTuple):
    """Regions that may overlap: pixels `pixels[starts[i]:starts[i + 1]]` are those of region i."""

    pixels: NDArray[np.int64]  # flat places in the image
    starts: NDArray[np.int64]


def segments(image: NDArray[np.float64]) -> Segments:
    """Segments of an image (H, W, C) at six scales, each grown by a few pixels.

    Raises:
        MethodError: scikit-image or OpenCV is missing.
    """
    try:
        import cv2
        from skimage.segmentation import felzenszwalb
    except ImportError as error:
        raise MethodError(
            f"xrai needs scikit-image and OpenCV: {error}; pip install scikit-image opencv-python"
        ) from error
    low, high = float(image.min()), float(image.max())
    image = (image - low) * (2 / (high - low)) - 1 if high > low else np.zeros_like(image)
    height, width = image.shape[:2]
    ratio = height * width / AREA
    disk = _disk(round(RADIUS * ratio**0.5))
    found: list[NDArray[np.int64]] = []
    for scale in SCALES:
        labels = felzenszwalb(
            image, scale * ratio, SIGMA, max(LEAST_OF_ALL, round(LEAST_SEGMENT * ratio)), channel_axis=-1
        )
        for box, mask in _boxed(labels, len(disk) // 2):
            grown = cv2.dilate(mask, disk)
            rows, columns = np.nonzero(grown)
            found.append((rows + box[0]) * width + columns + box[1])
    return Segments(np.concatenate(found), np.cumsum([0, *map(len, found)]))


def _boxed(labels: NDArray[np.int64], margin: int) -> Iterator[tuple[tuple[int, int], NDArray[np.uint8]]]:
    """Each segment as a mask of the box around it, with a margin inside the image, and that box's corner."""
    rows, columns = np.indices(labels.shape)
    order = np.argsort(labels, axis=None, kind="stable")
    starts = np.flatnonzero(np.diff(labels.ravel()[order], prepend=-1))
    edges = [
        bound.reduceat(axis.ravel()[order], starts)
        for bound, axis in ((np.minimum, rows), (np.maximum, rows), (np.minimum, columns), (np.maximum, columns))
    ]
    for label, top, bottom, left, right in np.stack([labels.ravel()[order][starts], *edges], 1).tolist():
        corner = max(top - margin, 0), max(left - margin, 0)
        box = labels[corner[0] : bottom + margin + 1, corner[1] : right + margin + 1]
        yield corner, (box == label).astype(np.uint8)


def _disk(radius: int) -> NDArray[np.uint8]:
    """The pixels no further than `radius` from the one in the middle (2 * radius + 1, 2 * radius + 1)."""
    away = np.arange(-radius, radius + 1)
    return (away[:, None] ** 2 + away**2 <= radius**2).astype(np.uint8)


def ranked(values: NDArray[np.float64], regions: Segments, least: float) -> NDArray[np.float64]:
    """Values (H, W) averaged over regions: those of the largest mean come first, and later ones get what is left.

    A pixel is looked at once for each region that it is in: when it is taken.

    Args:
        values: (H, W).
        regions: The regions to choose from.
        least: A region that would add fewer pixels is dropped.
    """
    flat, count = values.ravel(), len(regions.starts) - 1
    sizes = np.diff(regions.starts)
    owner = np.repeat(np.arange(count), sizes)
    # The other way round: the regions of each pixel.
    order = np.argsort(regions.pixels, kind="stable")
    owners, owner_starts = owner[order], np.searchsorted(regions.pixels[order], np.arange(flat.size + 1))
    fresh = sizes.astype(np.float64)  # how many pixels of each region are not taken yet, and their sum
    sums = np.bincount(owner, flat[regions.pixels], count)
    result, taken = np.zeros_like(flat), np.zeros(flat.size, bool)
    means = np.where(fresh >= max(least, 1), sums / fresh, -np.inf)
    while means.max(initial=-np.inf) > -np.inf:
        best = int(means.argmax())
        own = regions.pixels[regions.starts[best] : regions.starts[best + 1]]
        own = own[~taken[own]]
        result[own], taken[own] = flat[own].mean(), True
        spans = [owners[owner_starts[each] : owner_starts[each + 1]] for each in own.tolist()]
        touched = np.concatenate(spans)
        lost = np.repeat(flat[own], [len(each) for each in spans])
        fresh -= np.bincount(touched, minlength=count)
        sums -= np.bincount(touched, lost, count)
        means = np.where(fresh >= max(least, 1), sums / np.maximum(fresh, 1), -np.inf)
    if not taken.all():
        result[~taken] = flat[~taken].mean()
    return result.reshape(values.shape)
