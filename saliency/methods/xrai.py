"""XRAI: regions ranked by integrated gradients."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..attribution.options import Option
from ..axes import at_least_float32, require_two_axes
from ..engine.multi_pass import ImageAttribution, Passes, TimedAttribution
from ..errors import optional_import
from ..validation import check_integer
from .integrated_gradients import mean_gradients

AREA = 224 * 224
"""The number of pixels for which the authors give areas, scales and lengths. Areas and scales are proportional to the
number of pixels of an image, lengths to its square root."""
SCALES = (50.0, 100.0, 150.0, 250.0, 500.0, 1200.0)
"""Felzenszwalb's scales, from small segments to large ones, for `AREA` pixels."""
SIGMA = 0.8
LEAST_SEGMENT = 150
MIN_SEGMENT = 9
"""The minimum number of pixels of a segment in images of any size."""
LEAST_GAIN = 50
RADIUS = 5


class XRAI(TimedAttribution):
    """The mean integrated gradient of whole regions, from segmentations of the image at six scales.

    Formula: S_i = mean_j max_c G_cj over the new pixels j of the region of i, with G the integrated gradients, averaged
    over a dark and a bright baseline.

    Integrated gradients start from the darkest and from the brightest value of the image, so that black and white
    regions both get values; the map takes the largest channel of their mean. Segments, dilated a little to include
    their edges, are then taken one by one. The next segment is the one whose remaining pixels have the largest mean;
    this mean becomes their value. A segment that adds only a few pixels is dropped, and pixels outside all segments get
    their own mean.

    Args:
        steps: The number of Gauss-Legendre nodes on each of the two paths.

    Values: (N, 1, H, W), in score units per pixel, constant within a region; only their order is meaningful.

    Raises:
        DependencyError: scikit-image is not installed.

    Source: Kapishnikov et al., "XRAI: Better Attributions Through Regions" (2019), https://arxiv.org/abs/1906.02825;
        segments: Felzenszwalb and Huttenlocher, "Efficient Graph-Based Image Segmentation" (2004),
        https://doi.org/10.1023/B:VISI.0000022288.19776.77.
    """

    name = "xrai"
    cost = "100 forwards and backwards"
    sign = "positive"
    preview_options: ClassVar = {"steps": 2}

    steps: Option[int] = Option(50, check_integer)

    def explain_image(self, passes: Passes, score: Tensor) -> ImageAttribution:
        """Compute the means of the regions."""
        x = passes.x
        require_two_axes(x, self.name)
        references = torch.cat([torch.full_like(x, float(extreme)) for extreme in x.aminmax()])  # (2, C, H, W)
        regions = multiscale_regions(x[0].to("cpu", torch.float64).permute(1, 2, 0).numpy())
        gradients = passes.in_time(partial(mean_gradients, passes, references, "gauss_legendre"), self.steps)
        pixels = ((x - references) * gradients).mean(0).amax(0)  # (H, W)
        least = LEAST_GAIN * pixels.numel() / AREA
        values = ranked(pixels.to("cpu", torch.float64).numpy(), regions, least)
        return ImageAttribution(torch.from_numpy(values)[None].to(at_least_float32(x)))


class Regions(NamedTuple):
    """Regions that may overlap: pixels `pixels[starts[i]:starts[i + 1]]` belong to region i."""

    pixels: NDArray[np.int64]  # flat indices in the image
    starts: NDArray[np.int64]


def multiscale_regions(image: NDArray[np.float64]) -> Regions:
    """Segment an image (H, W, C) at six scales, and dilate each segment by a few pixels."""
    felzenszwalb = optional_import("skimage.segmentation", "perturbation", "XRAI").felzenszwalb

    from scipy.ndimage import find_objects
    from skimage.morphology import isotropic_dilation

    low, high = float(image.min()), float(image.max())
    image = (image - low) * (2 / (high - low)) - 1 if high > low else np.zeros_like(image)
    height, width = image.shape[:2]
    ratio = height * width / AREA
    radius = round(RADIUS * ratio**0.5)
    least = max(MIN_SEGMENT, round(LEAST_SEGMENT * ratio))
    pixels: list[NDArray[np.int64]] = []
    for scale in SCALES:
        labels = felzenszwalb(image, scale * ratio, SIGMA, least, channel_axis=-1) + 1  # 0 is the background
        for label, (down, across) in enumerate(find_objects(labels), start=1):
            top, left = max(down.start - radius, 0), max(across.start - radius, 0)
            mask = labels[top : down.stop + radius, left : across.stop + radius] == label
            rows, columns = np.nonzero(isotropic_dilation(mask, radius))
            pixels.append((rows + top) * width + columns + left)
    return Regions(np.concatenate(pixels), np.cumsum([0, *map(len, pixels)]))


def ranked(values: NDArray[np.float64], regions: Regions, least: float) -> NDArray[np.float64]:
    """Average values over regions: first the region with the largest mean, then others by their remaining pixels.

    When a pixel is taken, the mean of every region that contains it is updated.

    Args:
        values: (H, W).
        regions: The regions, which may overlap.
        least: A region that would add fewer pixels is dropped.
    """
    from scipy.sparse import csr_matrix

    flat, count = values.ravel(), len(regions.starts) - 1
    members = csr_matrix((np.ones(len(regions.pixels)), regions.pixels, regions.starts), (count, flat.size))
    remaining, sums = members @ np.ones(flat.size), members @ flat  # the pixels not yet taken, and their sum
    members = members.tocsc()
    result, taken = np.zeros_like(flat), np.zeros(flat.size, bool)
    while True:
        means = np.where(remaining >= max(least, 1), sums / np.maximum(remaining, 1), -np.inf)
        best = int(means.argmax())
        if means[best] == -np.inf:
            break
        own = regions.pixels[regions.starts[best] : regions.starts[best + 1]]
        own = own[~taken[own]]
        result[own], taken[own] = flat[own].mean(), True
        touched = members[:, own]
        remaining -= touched @ np.ones(len(own))
        sums -= touched @ flat[own]
    if not taken.all():
        result[~taken] = flat[~taken].mean()
    return result.reshape(values.shape)
