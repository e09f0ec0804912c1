"""How sure a map is: the standard error of what methods sample, as a map of its own and as a measure of each pixel."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..attribution.explanation import Explanation, Sign
from ..errors import RenderError
from .heatmap import Channels, read_sign, reduce_channels, require_explanation


def standard_error(explanation: Explanation) -> Explanation:
    """The standard errors of an explanation as an explanation, to be drawn and measured like any other.

    Args:
        explanation: Of a method that samples.

    Raises:
        RenderError: The method gave no standard error.
    """
    error = _require_error(explanation, "standard_error")
    return replace(
        explanation,
        values=error,
        error=None,
        residual=None,
        agreement=None,
        sign="positive",
        target_names=tuple(f"standard error of {name}" for name in explanation.target_names),
    )


def significance(explanation: Explanation, *, sign: Sign | None = None, channels: Channels | None = None) -> Tensor:
    """How many standard errors each pixel of the map is away from zero: (N, h, w), without a unit.

    About 95 % of the pixels of a map of pure chance lie below 2. Where channels are summed, their errors are too, as
    if they always erred together: the true figure is no smaller. A value without any error counts as infinitely far,
    and zero without any as 0.

    Args:
        explanation: Of a method that samples.
        sign: As in `heatmap`.
        channels: As in `heatmap`.

    Raises:
        NonFiniteError: A value is NaN or infinite.
        RenderError: The method gave no standard error, or an option is unknown.
    """
    error = _require_error(explanation, "significance").to(explanation.values.dtype)
    read = explanation.sign if sign is None else sign
    if channels is None:
        channels = "max_abs" if read == "absolute" else "sum"
    maps = reduce_channels(explanation, channels, sign)
    if channels == "max_abs":
        at = explanation.values.abs().argmax(1, keepdim=True)
        errors = error.gather(1, at)[:, 0]
    else:
        errors = error.sum(1) if channels == "sum" else error.mean(1)
    shown = read_sign(maps, read).abs()
    far = shown / errors.to(shown.dtype)
    return torch.where(shown == 0, torch.zeros_like(far), far)


def _require_error(explanation: Explanation, name: str) -> Tensor:
    require_explanation(explanation, name)
    if explanation.error is None:
        raise RenderError(
            f"{explanation.method} gave no standard error: it does not sample, or drew fewer than two samples; "
            "smooth_grad, rise, kernel_shap and their like give one"
        )
    return explanation.error
