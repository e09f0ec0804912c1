"""Segments of an image, hidden and shown as a whole: the base class of such methods, and feature ablation."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ...attribution.options import ConvertedOption
from ...engine.multi_pass import ImageAttribution, MultiPassAttribution
from ...engine.runner import PassRunner
from ..baselines import Filler, FillOption
from .segments import ResolvedSegments, Segments, SegmentsLike, resolve_segments, segmented

SUPERPIXELS = 50


class SegmentAttribution(MultiPassAttribution):
    """Base class of methods that hide segments of the image.

    Args:
        model: As for every method.
        segments: As for `FeatureAblation`.
        fill: As for `FeatureAblation`.
        **options: The options of the method's other base class.
    """

    units = "score per pixel"
    sign = "signed"

    segments: ConvertedOption[SegmentsLike, ResolvedSegments] = ConvertedOption(
        SUPERPIXELS, lambda name, like: resolve_segments(like)
    )
    fill: FillOption = FillOption()

    def segmented(self, passes: PassRunner) -> tuple[Segments, Filler]:
        """Return the segments of the image, and what hides its pixels."""
        segments = segmented(passes.x, self.segments, self.preprocess)
        passes.notes.append(f"{segments.count} segments")
        return segments, Filler(passes.x, self.fill)


class FeatureAblation(SegmentAttribution):
    """The fall of the score when a single segment of the image is hidden.

    Joint effects, such as two eyes of which one suffices, are not seen, so the values do not add up to anything.
    `KernelSHAP` and `ShapleySampling` share joint effects.

    Args:
        model: As for every method.
        segments: The approximate number of superpixels (SLIC, by scikit-image), the (rows, columns) of a grid, a label
            map (H, W) in the size of the model's input, or a function from the image (H, W, C) in 0..1 to a label map.
        fill: The value of hidden pixels: a number, or one per channel, in the model's normalised space (0 is the mean
            colour of its training images), "mean" (of the image), "blur", "inpaint" (from the surrounding pixels), or
            an image (C, H, W) as the model takes it.
        **options: As for `saliency.MultiPassAttribution`.

    Values: (N, 1, H, W), signed, in score units per pixel: f(x) less the score without the segment, divided evenly
    among the segment's pixels, so that the sum over a segment is the fall of the score.

    Raises:
        MethodError: An option is invalid, or does not fit the image.
        TargetError: The target does not fit the model's output.

    Source: Zeiler and Fergus, "Visualizing and Understanding Convolutional Networks" (2013),
        https://arxiv.org/abs/1311.2901, with superpixels instead of squares.
    """

    name = "feature_ablation"
    cost = f"about {SUPERPIXELS} forwards, one for each segment"
    quick_options: ClassVar = {"segments": (3, 3)}

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """Compute the fall of the score for each segment; 0 for those that an interrupt left out."""
        segments, filler = self.segmented(passes)
        falls = torch.zeros(segments.count, dtype=torch.float64, device="cpu")

        def make(start: int, stop: int) -> Tensor:
            numbers = torch.arange(segments.count, device="cpu")
            return filler(segments.hidden(numbers != torch.arange(start, stop, device="cpu")[:, None]))

        for done in passes.forwards(make, segments.count):
            falls[done.start : done.start + len(done.scores)] = (score - done.scores).cpu().double()
        return ImageAttribution(segments.painted(falls).to(passes.x))
