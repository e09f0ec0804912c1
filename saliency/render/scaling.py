"""Scale maps for drawing: outliers, smoothing, the value at which colours saturate, and colour tables.

smoothing   values are averaged over about 0.5 % of the map's longer edge (`smoothed`)
saturation  `resolve_percentile`: 99 with a value per colour channel or at a layer, otherwise none
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import threshold

from ..attribution.explanation import PER_UNIT, Explanation, limits, reduced_maps, several
from ..errors import RenderError, did_you_mean, warn
from ..io.axes import gaussian
from ..io.geometry import Box, Frame, resize_box
from ..validation import Sign, check_choice, check_number, described

Pixels = NDArray[np.uint8]
Plane = NDArray[np.float32]
SEQUENTIAL = "inferno"
DIVERGING = "bwr"  # its ends are bright, and stay visible on dark images
LEAST_RANGE = 0.05  # of the largest magnitude; a map with a smaller range is nearly even

Percentile = float | Literal["auto"] | None

SPECKLED_PERCENTILE = 99.0
SMOOTHING = 0.005
BLOCK = 256  # cells that are averaged at once, which limits the memory of the weights
LEAST_SIGMA = 0.3  # cells; a narrower Gaussian takes less than 1 % from the neighbours of a cell


def drawn_maps(explanation: Explanation, sign: Sign | None) -> Tensor:
    """Return the maps to draw, (N, h, w): as `reduced_maps`, but zero at outliers, which are not evidence."""
    maps = reduced_maps(explanation, sign)
    return maps if explanation.outliers is None else maps.masked_fill(explanation.outliers, 0)


def shared_limit(
    explanations: Explanation | Iterable[Explanation],
    *,
    sign: Sign | None = None,
    percentile: Percentile = "auto",
    smoothing: float = SMOOTHING,
) -> float:
    """Return one limit for several images: the largest of their map values at full colour, in the maps' units.

    Pass it as `limit=` to several drawings to give them one scale: equal colours then mean equal values.

    Args:
        explanations: Any number of explanations, of one or more images.
        sign: As in `heatmap`; by default the sign of each explanation.
        percentile: As in `heatmap`; "auto" is the default of drawing, `resolve_percentile`.
        smoothing: As in `overlay`.

    Raises:
        NonFiniteError: A value is NaN or infinite.
        RenderError: There is no explanation, or an option is unknown.
    """
    largest = []
    for explanation in several(explanations, "shared_limit"):
        maps = smoothed(drawn_maps(explanation, sign), smoothing)
        largest.append(float(limits(maps, resolve_percentile(explanation, percentile)).max()))
    return max(largest)


def smoothed(maps: Tensor, smoothing: float) -> Tensor:
    """Average maps with a Gaussian whose standard deviation is `smoothing` times their longer edge.

    Maps are (N, h, w), or (N, d, h, w) of volumes. Maps with cells larger than the Gaussian are returned unchanged.

    Raises:
        RenderError: The smoothing is not between 0 and 0.1.
    """
    hint = ", a fraction of the map's longer edge"
    smoothing = check_number("smoothing", smoothing, least=0, most=0.1, hint=hint, error=RenderError)
    sigma = smoothing * max(maps.shape[1:])
    if sigma < LEAST_SIGMA:
        return maps
    for axis in range(1, maps.dim()):
        maps = _smoothed_along(maps.movedim(axis, -1), sigma).movedim(-1, axis)
    return maps


def _smoothed_along(maps: Tensor, sigma: float) -> Tensor:
    """Average along the last axis, in blocks of cells, whose averages read 4 sigma beyond the block."""
    length, reach = maps.shape[-1], math.ceil(4 * sigma)
    blocks = []
    for start in range(0, length, BLOCK):
        first, last = max(0, start - reach), min(length, start + BLOCK + reach)
        weights = gaussian(last - first, sigma, maps)[start - first : start - first + BLOCK]
        # Products with denormal numbers take ten times as long.
        blocks.append(maps[..., first:last] @ threshold(weights, 1e-12, 0).mT)
    return torch.cat(blocks, -1)


def resolve_percentile(explanation: Explanation, percentile: Percentile, floor: float = 0.0) -> float | None:
    """Return the percentile; for "auto", 99 for values per colour channel, at a layer or with a floor, otherwise None.

    Gradients at the input and maps of early layers are far larger at a few positions, which would leave the rest dark.
    A map of 7 x 7 cells is not clipped: its 99th percentile is its largest cell. Other maps with one channel
    (occlusion, RISE) are smooth, and their peak is significant.
    """
    if not isinstance(percentile, str):
        return percentile
    check_choice("percentile", percentile, ("auto",), error=RenderError)
    is_speckled = explanation.values.shape[1] > 1 or explanation.layer is not None or floor > 0
    return SPECKLED_PERCENTILE if is_speckled else None


@cache
def color_table(name: str, centred: bool = False) -> Pixels:
    """Return 256 colours of a matplotlib colour map, from the lowest value to the highest: (256, 3) RGB, read-only.

    In a centred table, entry 128 is the middle of the colour map, and entries 1 and 255 are its ends. Entry 0 equals
    entry 1, because a table of 256 different colours would have no middle entry.

    Raises:
        RenderError: matplotlib has no such colour map; the message lists the closest names.
    """
    import matplotlib as mpl

    if name not in mpl.colormaps:
        raise RenderError(
            f'no colour map "{name}"; use the name of a matplotlib colour map, such as {SEQUENTIAL} or {DIVERGING}'
            f"{did_you_mean(name, sorted(mpl.colormaps))}"
        )
    steps = np.arange(256)
    positions = np.maximum(steps - 1, 0) / 254 if centred else steps / 255
    colors: Pixels = mpl.colormaps[name](positions, bytes=True)[:, :3].copy()
    colors.setflags(write=False)
    return colors


def hex_colors(name: str, *, centred: bool = False) -> list[str]:
    """Return the colours of `color_table` as "#rrggbb"."""
    return ["#{:02x}{:02x}{:02x}".format(*row) for row in color_table(name, centred=centred).tolist()]


@dataclass(frozen=True, slots=True)
class ScaledMap:
    """Map of one image, scaled from its floor to its limit: -1..1 if it is signed, else 0..1."""

    values: Plane  # (h, w), or (d, h, w) of a volume
    sign: Sign
    floor: float  # the map value without colour, in the map's units: 0, or the minimum of a positive map
    limit: float  # the map value at full colour
    is_saturated: bool  # whether a value exceeds the limit
    outliers: Plane | None  # (h, w), 1 at cells that are hatched and 0 at others; None if there are none
    target_box: Box | None = None  # the explained box, as fractions of the map

    def colors(self, colormap: str | None) -> Pixels:
        """Return the 256 colours of this map: (256, 3)."""
        is_signed = self.sign == "signed"
        if not isinstance(colormap, str | None):
            raise RenderError(f"colormap={described(colormap)} is not the name of a colour map, such as {SEQUENTIAL}")
        return color_table(colormap or (DIVERGING if is_signed else SEQUENTIAL), centred=is_signed)

    def placed_box(self, frame: Frame) -> Box | None:
        """Return the explained box in pixels of the frame's image; None if no box is explained."""
        if self.target_box is None:
            return None
        (left, top, right, bottom), (x0, y0, x1, y1) = frame.box, self.target_box
        width, height = right - left, bottom - top
        return left + width * x0, top + height * y0, left + width * x1, top + height * y1


def scale_map(
    explanation: Explanation,
    sign: Sign | None = None,
    percentile: Percentile = "auto",
    limit: float | None = None,
    smoothing: float = 0.0,
    *,
    from_zero: bool = False,
) -> ScaledMap:
    """Return the map of one image, smoothed, scaled from its floor to its limit, and clipped.

    With a given limit, or `from_zero`, the floor is 0, so that several maps can have one scale.

    Raises:
        NonFiniteError: A value is NaN or infinite.
        RenderError: The limit is negative or not finite, or an option is unknown.

    Warns:
        SaliencyWarning: The map is constant or nearly even; or its values are below the rounding error. It is drawn as
            zero, except on a shared scale, and for gradients below the rounding error. The warning states the reason.
    """
    sign = explanation.sign if sign is None else sign
    has_scale = explanation.from_zero  # with a meaningful zero
    maps, marks = drawn_maps(explanation, sign), explanation.outliers
    low, high = map(float, (maps if marks is None or marks.all() else maps[~marks]).aminmax())
    largest = max(-low, high)
    if limit is not None:
        limit = check_number("limit", limit, least=0, hint=", the map value at full colour", error=RenderError)
        has_scale = True
    is_zeroed = False
    if high - low <= LEAST_RANGE * largest:
        is_zeroed = not has_scale
        if explanation.values.any() or not any(explanation.notes):  # `attribute` warns of values of 0, and notes it
            warn(_why_flat(explanation, low, high, sign))
    elif largest <= abs(float(explanation.scores[0])) * explanation.rounding:
        # A gradient depends on the units and the size of the input, so a small one may be correct.
        is_zeroed = explanation.units != PER_UNIT
        warn(
            f"{_map_label(explanation)} {'is drawn as zero' if is_zeroed else 'may show rounding errors only'}: "
            f"{largest:.2g} at most, below the rounding error of a score of {float(explanation.scores[0]):.4g}"
        )
    floor = 0.0 if is_zeroed or has_scale or from_zero or sign == "signed" else low
    if is_zeroed:
        maps = torch.zeros_like(maps)
    elif floor:  # outliers stay zero
        maps = (maps - floor).clamp(min=0)
    maps = smoothed(maps, smoothing)
    if limit is None:
        limit = float(limits(maps, resolve_percentile(explanation, percentile, floor))[0])
    values = maps[0].double().cpu().numpy()
    scaled = np.clip(values, -limit, limit) / limit if limit > 0 else np.sign(values)
    is_saturated = bool((np.abs(values) > limit).any())
    outliers = marks[0].float().cpu().numpy() if marks is not None and marks.any() else None
    box = explanation.target_boxes[0] if explanation.target_boxes else None
    box = box and resize_box(box, (explanation.input_size[1], explanation.input_size[0]), (1, 1))
    return ScaledMap(scaled.astype(np.float32), sign, floor, floor + limit, is_saturated, outliers, box)


def _map_label(explanation: Explanation) -> str:
    return f"the {explanation.method} map for {explanation.target_names[0]}"


def _why_flat(explanation: Explanation, low: float, high: float, sign: Sign) -> str:
    label = _map_label(explanation)
    if sign == "positive" and (reduced_maps(explanation, "signed") < 0).any():
        return f'{label} is zero everywhere: all values are negative; sign="signed" shows them'
    if explanation.values.shape[-2:].numel() == 1:
        return f"{label} is a single cell, like the output of the layer; choose an earlier layer"
    if low == high == 0 and reduced_maps(explanation, sign).any():
        return f"{label} is zero except at tokens with an outlying norm, which are hatched"
    if low == high == 0:
        return f"{label} is zero everywhere: according to this method, no part of the image affects the score"
    even = f"constant ({high:.3g})" if low == high else f"nearly even ({low:.3g} to {high:.3g})"
    return f"{label} is {even}, so it highlights nothing"
