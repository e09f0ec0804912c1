"""Convert an explanation to one number per pixel, in the method's own units, and measure its significance.

The order is fixed: channels are reduced, the sign is applied, outliers are clipped, and then the map is resized.
Nothing is normalised. By default, the sign is `Explanation.sign`, as in the paper of the method, and channels are
summed; for magnitudes, the largest of the channels is taken (Simonyan 2013).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ..errors import NonFiniteError, RenderError
from ..io.axes import along_rows, at_least_float32, resize
from ..validation import SIGNS, Sign, check_choice, check_number, described, is_integer
from .explanation import Explanation


def heatmap(
    explanation: Explanation,
    *,
    size: tuple[int, ...] | None = None,
    sign: Sign | None = None,
    percentile: float | None = None,
) -> Tensor:
    """Return one number per pixel of the model's input: (N, H, W), on the device of the values and in their units.

    For volumes and videos, return one number per voxel: (N, D, H, W).

    Half and bfloat16 values are reduced in float32; other types are unchanged. The resize is bilinear by pixel centres
    (`align_corners=False`), with antialiasing if the map shrinks; trilinear without antialiasing for a volume.

    Args:
        explanation: The result of a method; it does not change.
        size: (H, W) or (D, H, W) of the map; by default the size of the model's input.
        sign: "positive" keeps values above zero, "signed" keeps all values, "absolute" takes the largest magnitude of
            the channels; by default as in the paper of the method. Otherwise channels are summed.
        percentile: Clip the magnitudes of each image at this percentile (99 suits gradients); by default nothing is
            clipped. The units do not change.

    Raises:
        NonFiniteError: A value is NaN or infinite; the message names the image.
        RenderError: `explanation` is not an explanation, or an option is invalid.
    """
    require_explanation(explanation, "heatmap")
    maps = reduced_maps(explanation, sign)
    if percentile is not None:
        limit = along_rows(limits(maps, percentile), maps)
        maps = maps.clamp(-limit, limit)
    return resized(maps, explanation.input_size if size is None else size)


def require_explanation(value: object, name: str) -> None:
    """Raise RenderError unless a value is an explanation. `name` is the function that takes it."""
    if not isinstance(value, Explanation):
        hint = "; take the one of an input, result[NAME]" if isinstance(value, Mapping) else ""
        if isinstance(value, str | os.PathLike | Image.Image):
            hint = "; the explanation comes first, as in overlay(explanation, image)"
        raise RenderError(
            f"{name} takes an Explanation, the result of attribute(...); got {type(value).__name__}{hint}"
        )


def reduced_maps(explanation: Explanation, sign: Sign | None) -> Tensor:
    """Return the values with their channels reduced and the sign applied: (N, h, w).

    Raises:
        NonFiniteError: A value, or the sum of finite values, is NaN or infinite.
        RenderError: The sign is unknown.
    """
    used = check_choice("sign", explanation.sign if sign is None else sign, SIGNS, error=RenderError)
    maps = reduce_channels(explanation.values, used)
    _require_finite(maps, explanation)
    return maps.clamp(min=0) if used == "positive" else maps


def reduce_channels(values: Tensor, sign: Sign) -> Tensor:
    """Return values (N, C, h, w) as maps (N, h, w): the largest magnitudes of the channels, or their sums."""
    values = at_least_float32(values.detach())
    return values.abs().amax(dim=1) if sign == "absolute" else values.sum(dim=1)


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


def several(explanations: Explanation | Iterable[Explanation], name: str) -> list[Explanation]:
    """Return one or several explanations as a list. Raises RenderError if there is none."""
    is_one = isinstance(explanations, Explanation | Tensor | Mapping) or not isinstance(explanations, Iterable)
    listed: list[Any] = [explanations] if is_one else list(explanations)
    for explanation in listed:
        require_explanation(explanation, name)
    if not listed:
        raise RenderError(f"{name} got no explanation; pass at least one")
    return listed


def single_images(explanations: Explanation | Iterable[Explanation], name: str) -> list[Explanation]:
    """Return the explanations of single images, in order. Raises RenderError if there is none."""
    return [image for explanation in several(explanations, name) for image in explanation]


def method_titles(explanations: Sequence[Explanation]) -> list[str]:
    """Return the title of each method, with the layer and the settings that distinguish explanations by one method."""
    facts = [{"layer": explanation.layer, **explanation.settings} for explanation in explanations]
    titles = []
    for explanation, settings in zip(explanations, facts, strict=True):
        same = [other for other, peer in zip(facts, explanations, strict=True) if peer.title == explanation.title]
        words = [
            value if isinstance(value, str) else f"{name}={value}"
            for name, value in settings.items()
            if value is not None and any(other.get(name) != value for other in same)
        ]
        titles.append(" ".join([explanation.title, *words]))
    return titles


def _require_finite(maps: Tensor, explanation: Explanation) -> None:
    bad = (~torch.isfinite(maps)).flatten(1).sum(dim=1).tolist()
    for image, count in enumerate(bad):
        if count:
            raise NonFiniteError(
                f"the {explanation.method} map of image {image} is NaN or infinite at {count} of "
                f"{maps[image].numel()} pixels; check the score, the model's weights and the dtype"
            )


def resized(maps: Tensor, size: Sequence[int]) -> Tensor:
    """Resize maps (N, h, w) to a size (H, W), as `heatmap` does. Raises RenderError if `size` is invalid."""
    axes = ("depth", "height", "width")[1 - maps.dim() :]
    if not isinstance(size, list | tuple) or len(size) != len(axes) or not all(map(is_integer, size)):
        raise RenderError(f"size={described(size)} is not ({', '.join(axes)}) in pixels, each at least 1")
    shrinks = any(new < old for new, old in zip(size, maps.shape[1:], strict=True))
    return resize(maps[:, None], list(map(int, size)), antialias=shrinks)[:, 0]


def standard_error(explanation: Explanation) -> Explanation:
    """Return the standard errors of an explanation as an explanation, which can be drawn and measured.

    Its colours begin at zero.

    Args:
        explanation: An explanation by a method that samples.

    Raises:
        RenderError: The explanation has no standard error.
    """
    error = _require_error(explanation, "standard_error")
    questions = tuple(replace(asked, name=f"standard error of {asked.name}") for asked in explanation.questions)
    about_values = dict.fromkeys(("error", "residual", "agreement", "ledger", "ledger_names"))
    explanation = explanation.with_evidence(**about_values, from_zero=True)
    return replace(explanation, values=error, sign="positive", questions=questions)


def significance(explanation: Explanation, *, sign: Sign | None = None) -> Tensor:
    """Return how many standard errors each pixel of the map is away from zero: (N, h, w), dimensionless.

    About 95 % of the pixels of a random map lie below 2. If channels are summed, their errors are summed too, as for
    fully correlated errors. The true significance is not smaller. A nonzero value without error has infinite
    significance, and a zero value has significance 0.

    Args:
        explanation: An explanation by a method that samples.
        sign: As in `heatmap`.

    Raises:
        NonFiniteError: A value is NaN or infinite.
        RenderError: The explanation has no standard error, or the sign is unknown.
    """
    error = _require_error(explanation, "significance").to(explanation.values.dtype)
    magnitudes = reduced_maps(explanation, sign).abs()
    if (explanation.sign if sign is None else sign) == "absolute":
        strongest = explanation.values.abs().argmax(1, keepdim=True)
        errors = error.gather(1, strongest)[:, 0]
    else:
        errors = error.sum(1)
    distance = magnitudes / errors.to(magnitudes.dtype)
    return torch.where(magnitudes == 0, torch.zeros_like(distance), distance)


def _require_error(explanation: Explanation, name: str) -> Tensor:
    require_explanation(explanation, name)
    if explanation.error is None:
        count = f" (passes: {stats[0].passes})" if (stats := explanation.run_stats) else ""
        raise RenderError(
            f"the explanation by {explanation.method} has no standard error{count}; methods that sample, such as "
            "smooth_grad and kernel_shap, have one after at least two samples, except in tiles"
        )
    return explanation.error
