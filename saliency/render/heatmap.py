"""Convert an explanation to one number per pixel, in the method's own units, and measure its significance.

The order is fixed: channels are reduced, the sign is applied, outliers are clipped, and then the map is resized.
Nothing is normalised. All drawing takes its maps and limits from here. The defaults are:

    sign        `Explanation.sign`, as in the paper of the method
    channels    their sum; for magnitudes the largest of them (Simonyan 2013)
    smoothing   none here; drawing averages values over about 0.5 % of the map's longer edge (`smoothed`)
    saturation  `resolve_percentile`: 99 with a value per colour channel, at a layer or with a floor, otherwise none
    floor       none here; drawing begins at the minimum of a positive map (`scale_map`)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from ..attribution.explanation import Explanation, Sign
from ..attribution.forward import at_least_float32
from ..errors import NonFiniteError, RenderError
from ..validation import check_choice, check_number, is_pair

Percentile = float | Literal["auto"] | None

SIGNS: tuple[Sign, ...] = get_args(Sign)

SPECKLED_PERCENTILE = 99.0
SMOOTHING = 0.005
LEAST_SIGMA = 0.3  # cells; a narrower Gaussian takes less than 1 % from the neighbours of a cell


def heatmap(
    explanation: Explanation,
    *,
    size: tuple[int, int] | None = None,
    sign: Sign | None = None,
    percentile: float | None = None,
) -> Tensor:
    """Return one number per pixel of the model's input: (N, H, W), on the device of the values and in their units.

    Half and bfloat16 values are reduced in float32; other types are kept. The resize is bilinear by pixel centres
    (`align_corners=False`), with antialiasing if the map shrinks.

    Args:
        explanation: The result of a method; it does not change.
        size: (H, W) of the map; by default the size of the model's input.
        sign: "positive" keeps values above zero, "signed" keeps all values, "absolute" takes the largest magnitude of
            the channels; by default as in the paper of the method. Otherwise channels are summed.
        percentile: Clip the magnitudes of each image at this percentile of them (99 suits gradients); by default
            nothing is clipped. The units do not change.

    Raises:
        NonFiniteError: A value is NaN or infinite; the message names the image.
        RenderError: `explanation` is not an explanation, or an option is invalid.
    """
    require_explanation(explanation, "heatmap")
    maps = reduced_maps(explanation, sign)
    if percentile is not None:
        limit = limits(maps, percentile)[:, None, None]
        maps = maps.clamp(-limit, limit)
    return resized(maps, explanation.input_size if size is None else size)


def require_explanation(value: object, name: str) -> None:
    """Raise RenderError unless a value is an explanation. `name` is the function that takes it."""
    if not isinstance(value, Explanation):
        raise RenderError(f"{name} takes an Explanation, the result of attribute(...); got {type(value).__name__}")


def reduced_maps(explanation: Explanation, sign: Sign | None) -> Tensor:
    """Return the values with their channels reduced and the sign applied: (N, h, w).

    Raises:
        NonFiniteError: A value, or the sum of finite ones, is NaN or infinite.
        RenderError: The sign is unknown.
    """
    used = check_choice("sign", explanation.sign if sign is None else sign, SIGNS, error=RenderError)
    values = at_least_float32(explanation.values.detach())
    maps = values.abs().amax(dim=1) if used == "absolute" else values.sum(dim=1)
    _require_finite(maps, explanation)
    return maps.clamp(min=0) if used == "positive" else maps


def drawn_maps(explanation: Explanation, sign: Sign | None) -> Tensor:
    """Return the maps that are drawn, (N, h, w): as `reduced_maps`, but zero at the outliers, which are no evidence."""
    maps = reduced_maps(explanation, sign)
    return maps if explanation.outliers is None else maps.masked_fill(explanation.outliers, 0)


def limits(maps: Tensor, percentile: float | None) -> Tensor:
    """Return the magnitude that `percentile` % of each map's pixels do not exceed: (N,); the largest for None.

    The limit is always the magnitude of a pixel. If it would be zero for a map with a few nonzero pixels, the largest
    magnitude is returned: clipping must not erase a map.

    Raises:
        RenderError: The percentile is not above 0 and at most 100.
    """
    magnitudes = maps.abs().flatten(1)  # (N, h * w)
    largest = magnitudes.amax(dim=1)
    if percentile is None:
        return largest
    hint = "; 99 clips the highest 1 % of a map"
    percentile = check_number("percentile", percentile, above=0, most=100, hint=hint, error=RenderError)
    pixels = magnitudes.shape[1]
    rank = max(1, math.ceil(pixels * percentile / 100 - 1e-9))
    limit = magnitudes.topk(pixels - rank + 1, dim=1).values[:, -1]
    return torch.where(limit > 0, limit, largest)


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
    """Average maps (N, h, w) with a Gaussian whose standard deviation is `smoothing` times their longer edge.

    Maps with cells larger than the Gaussian are returned unchanged.

    Raises:
        RenderError: The smoothing is not between 0 and 0.1.
    """
    hint = ", a share of the map's longer edge"
    smoothing = check_number("smoothing", smoothing, least=0, most=0.1, hint=hint, error=RenderError)
    sigma = smoothing * max(maps.shape[1:])
    if sigma < LEAST_SIGMA:
        return maps
    rows, columns = (_gaussian(length, sigma, maps) for length in maps.shape[1:])
    return rows @ maps @ columns.T


def _gaussian(length: int, sigma: float, like: Tensor) -> Tensor:
    """Return the weights of all cells of a line in the average at each of them: (length, length)."""
    cells = torch.arange(length, dtype=like.dtype, device=like.device)
    return (-0.5 * ((cells - cells[:, None]) / sigma) ** 2).softmax(dim=1)


def several(explanations: Explanation | Iterable[Explanation], name: str) -> list[Explanation]:
    """Return one explanation, or any number of them, as a list. Raises RenderError if it is empty."""
    is_one = isinstance(explanations, Explanation | Tensor) or not isinstance(explanations, Iterable)
    items: list[Any] = [explanations] if is_one else list(explanations)
    for item in items:
        require_explanation(item, name)
    if not items:
        raise RenderError(f"{name} got no explanation; pass at least one")
    return items


def single_images(explanations: Explanation | Iterable[Explanation], name: str) -> list[Explanation]:
    """Return the explanations of single images, in order. Raises RenderError if there is none."""
    return [image for explanation in several(explanations, name) for image in explanation]


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


def _require_finite(maps: Tensor, explanation: Explanation) -> None:
    bad = (~torch.isfinite(maps)).flatten(1).sum(dim=1).tolist()
    for image, count in enumerate(bad):
        if count:
            raise NonFiniteError(
                f"the {explanation.method} map of image {image} is NaN or infinite at {count} of "
                f"{maps[image].numel()} pixels; check the score, the model's weights and the dtype"
            )


def resized(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize maps (N, h, w) to a size (H, W), as `heatmap` does. Raises RenderError if it is not a size."""
    if not is_pair(size):
        raise RenderError(f"size={size!r} is not (height, width) in pixels, both at least 1")
    height, width = map(int, size)
    shrinks = height < maps.shape[-2] or width < maps.shape[-1]
    resized = interpolate(maps[:, None], (height, width), mode="bilinear", align_corners=False, antialias=shrinks)
    return resized[:, 0]


def standard_error(explanation: Explanation) -> Explanation:
    """Return the standard errors of an explanation as an explanation, which can be drawn and measured like any other.

    With `overlay(e, limit=shared_limit(e))`, the colours begin at zero; otherwise at the smallest error.

    Args:
        explanation: An explanation by a method that samples.

    Raises:
        RenderError: The explanation has no standard error.
    """
    error = _require_error(explanation, "standard_error")
    return replace(
        explanation,
        values=error,
        error=None,
        residual=None,
        agreement=None,
        ledger=None,
        ledger_names=(),
        sign="positive",
        target_names=tuple(f"standard error of {name}" for name in explanation.target_names),
    )


def significance(explanation: Explanation, *, sign: Sign | None = None) -> Tensor:
    """Return how many standard errors each pixel of the map is away from zero: (N, h, w), without a unit.

    About 95 % of the pixels of a random map lie below 2. If channels are summed, their errors are summed too, as for
    fully correlated errors: the true significance is not smaller. A nonzero value without error counts as infinitely
    far, and a zero value as 0.

    Args:
        explanation: An explanation by a method that samples.
        sign: As in `heatmap`.

    Raises:
        NonFiniteError: A value is NaN or infinite.
        RenderError: The explanation has no standard error, or the sign is unknown.
    """
    error = _require_error(explanation, "significance").to(explanation.values.dtype)
    shown = reduced_maps(explanation, sign).abs()
    if (explanation.sign if sign is None else sign) == "absolute":
        strongest = explanation.values.abs().argmax(1, keepdim=True)
        errors = error.gather(1, strongest)[:, 0]
    else:
        errors = error.sum(1)
    distance = shown / errors.to(shown.dtype)
    return torch.where(shown == 0, torch.zeros_like(distance), distance)


def _require_error(explanation: Explanation, name: str) -> Tensor:
    require_explanation(explanation, name)
    if explanation.error is None:
        raise RenderError(
            f"the explanation by {explanation.method} has no standard error; methods that draw two samples or more, "
            "such as smooth_grad, rise and kernel_shap, have one"
        )
    return explanation.error
