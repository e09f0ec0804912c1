"""From an explanation to one number per pixel, in the method's own units.

The order is fixed: channels are reduced, the sign is read, outliers are clipped, and only then is the map
resized. Nothing is ever normalised. Everything that draws takes its maps and its limits from here, so that
the defaults of drawing stand in one place:

    how the values are read   `Explanation.sign`, as the method's paper reads them
    how channels are reduced  their sum; for magnitudes the largest of them (Simonyan 2013)
    where colours saturate    `usual_percentile`, by whether there is a value per colour channel
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from ..attribution.explanation import Explanation, Sign
from ..errors import NonFiniteError, RenderError
from ..validation import check_choice, is_pair, real_number

Channels = Literal["sum", "mean", "max_abs"]
Percentile = float | Literal["auto"] | None

SIGNS: tuple[Sign, ...] = get_args(Sign)
CHANNELS: tuple[Channels, ...] = get_args(Channels)

SPECKLED_PERCENTILE = 99.5


def heatmap(
    explanation: Explanation,
    *,
    size: tuple[int, int] | None = None,
    sign: Sign | None = None,
    channels: Channels | None = None,
    percentile: float | None = None,
) -> Tensor:
    """One number per pixel of the model's input: (N, H, W), on the device of the values and in their units.

    Half and bfloat16 values are reduced in float32; other types stay. The resize is bilinear, by pixel
    centres (`align_corners=False`), and averages over the area where it shrinks.

    Args:
        explanation: What a method returned; `explanation.values` are left as they are.
        size: (H, W) of the map; by default the size of the model's input, whatever the layer's was.
        sign: "positive" keeps what is above zero, "signed" keeps everything, "absolute" takes magnitudes; by
            default what the method's paper does.
        channels: "sum", "mean" or "max_abs" (the channel that is furthest from zero, with its sign); by
            default the sum, and "max_abs" where the sign is "absolute".
        percentile: Clips, per image, the magnitudes above this percentile of all magnitudes (99.5 suits
            gradients); by default nothing is clipped. Never a rescaling: the units stay.

    Raises:
        NonFiniteError: A value is NaN or infinite; the message names the image.
        RenderError: No explanation, an unknown name, a size below 1, or a percentile outside 0..100.
    """
    require_explanation(explanation, "heatmap")
    maps = read_sign(reduce_channels(explanation, channels, sign), explanation.sign if sign is None else sign)
    if percentile is not None:
        limit = limits(maps, percentile)[:, None, None]
        maps = maps.clamp(-limit, limit)
    return _resized(maps, explanation.input_size if size is None else size)


def require_explanation(given: object, name: str) -> None:
    """Raise RenderError unless it is an explanation; `name` is what draws or measures it."""
    if not isinstance(given, Explanation):
        raise RenderError(f"{name} takes what attribute(...) returned, an Explanation; got {type(given).__name__}")


def reduce_channels(explanation: Explanation, channels: Channels | None, sign: Sign | None) -> Tensor:
    """The values with their channels reduced, and their signs as they were: (N, h, w).

    Raises:
        NonFiniteError: A value, or the sum of finite ones, is NaN or infinite.
    """
    sign = check_choice("sign", explanation.sign if sign is None else sign, SIGNS, error=RenderError)
    if channels is None:
        channels = "max_abs" if sign == "absolute" else "sum"
    channels = check_choice("channels", channels, CHANNELS, error=RenderError)
    values = explanation.values.detach()
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.float()
    if channels == "max_abs":
        highest, lowest = values.amax(dim=1), values.amin(dim=1)
        maps = torch.where(highest >= -lowest, highest, lowest)
    else:
        maps = values.sum(dim=1) if channels == "sum" else values.mean(dim=1)
    _require_finite(maps, explanation)
    return maps


def read_sign(maps: Tensor, sign: Sign) -> Tensor:
    """The maps as `sign` reads them: what is above zero, everything, or magnitudes."""
    if sign == "positive":
        return maps.clamp(min=0)
    return maps.abs() if sign == "absolute" else maps


def limits(maps: Tensor, percentile: float | None) -> Tensor:
    """The magnitude that `percentile` % of each map's pixels do not exceed: (N,); the largest for None.

    It is always the magnitude of some pixel. Where it would be zero although the map is not (a few hot pixels
    on nothing), it is the largest: clipping must not erase a map.

    Raises:
        RenderError: The percentile is not above 0 and at most 100.
    """
    magnitudes = maps.abs().flatten(1)  # (N, h * w)
    largest = magnitudes.amax(dim=1)
    if percentile is None:
        return largest
    hint = "; 99.5 clips the highest 0.5 % of a map"
    percentile = real_number("percentile", percentile, above=0, most=100, hint=hint, error=RenderError)
    pixels = magnitudes.shape[1]
    rank = max(1, math.ceil(pixels * percentile / 100 - 1e-9))
    limit = magnitudes.topk(pixels - rank + 1, dim=1).values[:, -1]
    return torch.where(limit > 0, limit, largest)


def usual_percentile(explanation: Explanation) -> float | None:
    """Where drawing saturates when nobody says: 99.5 for values per colour channel, nowhere for smooth maps.

    Gradients at the input have a few pixels far above the rest, which would leave all others dark. Maps with
    one channel (CAMs, occlusion) are smooth, and their peak is the message.
    """
    return SPECKLED_PERCENTILE if explanation.values.shape[1] > 1 else None


def shared_limit(
    explanations: Explanation | Iterable[Explanation],
    *,
    sign: Sign | None = None,
    percentile: Percentile = "auto",
) -> float:
    """The map value at which the strongest of these images reaches its full colour, in the maps' units.

    Passed as `limit=` to every drawing, it puts all of them on one scale: equal colours are equal values.

    Args:
        explanations: Any number of explanations, of one or more images each.
        sign: As in `heatmap`; by default each explanation's own.
        percentile: As in `heatmap`; "auto" is what drawing does by itself (see `usual_percentile`).

    Raises:
        NonFiniteError: A value is NaN or infinite.
        RenderError: There is no explanation, or an option is unknown.
    """
    return max(_limit(each, sign, percentile) for each in several(explanations, "shared_limit"))


def several(explanations: Explanation | Iterable[Explanation], name: str) -> list[Explanation]:
    """One explanation, or any number of them, as a list. Raises RenderError where there is none."""
    is_one = isinstance(explanations, Explanation | Tensor) or not isinstance(explanations, Iterable)
    given: list[Any] = [explanations] if is_one else list(explanations)
    for each in given:
        require_explanation(each, name)
    if not given:
        raise RenderError(f"{name} got no explanation; pass at least one")
    return given


def _limit(explanation: Explanation, sign: Sign | None, percentile: Percentile) -> float:
    maps = read_sign(reduce_channels(explanation, None, sign), explanation.sign if sign is None else sign)
    return float(limits(maps, chosen_percentile(explanation, percentile)).max())


def chosen_percentile(explanation: Explanation, percentile: Percentile) -> float | None:
    """The percentile itself, or the usual one of this explanation for "auto"."""
    if isinstance(percentile, str):
        check_choice("percentile", percentile, ("auto",), error=RenderError)
        return usual_percentile(explanation)
    return percentile


def _require_finite(maps: Tensor, explanation: Explanation) -> None:
    bad = (~torch.isfinite(maps)).flatten(1).sum(dim=1).tolist()
    for image, count in enumerate(bad):
        if count:
            raise NonFiniteError(
                f"the {explanation.method} map of image {image} is NaN or infinite at {count} of "
                f"{maps[image].numel()} pixels; look at the score and at the model's weights, and leave "
                "float16 where it overflows"
            )


def _resized(maps: Tensor, size: tuple[int, int]) -> Tensor:
    if not is_pair(size):
        raise RenderError(f"size={size!r} is not (height, width) in pixels, both at least 1")
    height, width = map(int, size)
    if tuple(maps.shape[-2:]) == (height, width):
        return maps
    shrinks = height < maps.shape[-2] or width < maps.shape[-1]
    return interpolate(maps[:, None], size=(height, width), mode="bilinear", align_corners=False, antialias=shrinks)[
        :, 0
    ]
