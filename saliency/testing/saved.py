"""Compare an explanation with a saved one, for tests of your own model."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch

from ..attribution.estimates import rank_correlation
from ..attribution.explanation import Explanation, require_explanation
from ..render.overlay import save_drawing
from ..render.sheet import contact_sheet
from ..validation import check_path
from .case import require

ROUNDING = {torch.float64: 1e-7, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}
"""Largest difference by rounding, as a fraction of the largest magnitude; close to those of `torch.testing`."""


def assert_same_explanation(
    explanation: Explanation, saved: str | os.PathLike[str], atol: float | None = None, rank: float = 0.99
) -> None:
    """Raise AssertionError unless an explanation equals a saved one.

    If the values differ, both overlays are drawn side by side next to the saved file: `cat.safetensors` gives
    `cat.difference.png`. Nothing is drawn if neither explanation has its image.

    Args:
        explanation: The explanation.
        saved: A file that `Explanation.save` or `saliency batch --maps` wrote.
        atol: The largest difference of values, in their units; by default, for each image the rounding of the less
            precise dtype of both: 1e-5 of the largest magnitude in float32. Maps of `saliency batch` are in float16.
        rank: The smallest rank correlation of the maps of an image.

    Raises:
        AssertionError: The explanations differ; the message states the largest difference, its position, the rank
            correlation, and the path of the picture.
        ExplanationError: The file is missing, damaged, or of another kind.

    Example:
        >>> explanation.save("cat.safetensors")
        >>> assert_same_explanation(explanation, "cat.safetensors")
    """
    require_explanation(explanation, "assert_same_explanation")
    path, expected = check_path("saved", saved), Explanation.load(saved)
    for name in ("method", "target_names", "layer"):
        found, wanted = getattr(explanation, name), getattr(expected, name)
        require(found == wanted, f"{path}: {name} is {found!r}, expected {wanted!r}")
    shapes = tuple(explanation.values.shape), tuple(expected.values.shape)
    require(shapes[0] == shapes[1], f"{path}: the values have the shape {shapes[0]}, expected {shapes[1]}")
    stored = torch.float16 if expected.boxes else expected.values.dtype
    rounding = max(ROUNDING.get(dtype, 0.0) for dtype in (explanation.values.dtype, stored))
    problems = []
    values = explanation.values.detach().cpu().double(), expected.values.double()
    for image, (new, old) in enumerate(zip(*values, strict=True)):
        differences = (new - old).abs()
        largest, scale = float(differences.max()), float(old.abs().max())
        limit = rounding * scale if atol is None else atol
        correlation = rank_correlation(new, old)
        if largest <= limit and correlation >= rank:  # false for NaN
            continue
        position = tuple(int(index) for index in torch.unravel_index(differences.argmax(), differences.shape))
        problems.append(
            f"image {image}: the largest difference is {largest:.3g} at {position}, where {limit:.3g} is allowed and "
            f"the largest magnitude is {scale:.3g}; the rank correlation is {correlation:.4f}, at least {rank} expected"
        )
    if problems:
        drawn = _draw_both(explanation, expected, path.with_suffix(".difference.png"))
        raise AssertionError("\n".join([f"{path}: another {expected.method} map", *problems, *drawn]))


def _draw_both(explanation: Explanation, expected: Explanation, path: Path) -> list[str]:
    """Draw the saved and the new overlay of each image that is known, and return the line that names the file."""
    rows = []
    for new, old in zip(explanation, expected, strict=True):
        if frame := new.frames[0] or old.frames[0]:
            columns = {"saved": old, "new": new}
            rows.append([replace(e, title=title, frames=(frame,), settings={}) for title, e in columns.items()])
    return [f"saved and new overlay: {save_drawing(contact_sheet(rows), path)}"] if rows else []
