"""Scale heatmaps for drawing: outliers, smoothing, and the value at which colours saturate.

smoothing   values are averaged over about 0.5 % of the map's longer edge (`smoothed`)
saturation  `resolve_percentile`: 99 with a value per colour channel or at a layer, otherwise none
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from torch import Tensor

from ..attribution.explanation import Explanation, Sign
from ..attribution.heatmap import limits, reduced_maps, several
from ..axes import along_axes, gaussian
from ..errors import RenderError
from ..validation import check_choice, check_number

Percentile = float | Literal["auto"] | None

SPECKLED_PERCENTILE = 99.0
SMOOTHING = 0.005
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
        sign: As in `heatmap`; by default each explanation's own.
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

    They are (N, h, w), or (N, d, h, w) of volumes. Maps with cells larger than the Gaussian are returned unchanged.

    Raises:
        RenderError: The smoothing is not between 0 and 0.1.
    """
    hint = ", a share of the map's longer edge"
    smoothing = check_number("smoothing", smoothing, least=0, most=0.1, hint=hint, error=RenderError)
    sigma = smoothing * max(maps.shape[1:])
    if sigma < LEAST_SIGMA:
        return maps
    return along_axes(maps, [gaussian(length, sigma, maps) for length in maps.shape[1:]])


def resolve_percentile(explanation: Explanation, percentile: Percentile, floor: float = 0.0) -> float | None:
    """Return the percentile; for "auto", 99 for values per colour channel, at a layer or with a floor, otherwise None.

    Gradients at the input and maps of early layers are far larger at a few places, which would leave all others dark.
    A map of 7 x 7 cells is not clipped: its 99th percentile is its largest cell. Other maps with one channel
    (occlusion, RISE) are smooth, and their peak is significant.
    """
    if not isinstance(percentile, str):
        return percentile
    check_choice("percentile", percentile, ("auto",), error=RenderError)
    is_speckled = explanation.values.shape[1] > 1 or explanation.layer is not None or floor > 0
    return SPECKLED_PERCENTILE if is_speckled else None
