"""Metrics of agreement: how similar is the map to another explanation of the same images?"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from ...attribution.heatmap import reduced_maps
from ...attribution.options import Option
from ...engine.estimates import precise_type
from ...errors import MethodError
from ...validation import check_number
from .base import Metric, Outcome, Subject, resized_within
from .changed_images import correlation, ranks_of, row_ranks

WINDOW = 11
"""The edge of the window of structural similarity, in pixels."""


class AgreementMetric(Metric):
    """Base class of the metrics that compare a map with the reference, another explanation. Higher is more similar."""

    higher_is_better = True

    @abstractmethod
    def compare(self, maps: Tensor, reference: Tensor) -> Tensor:
        """Compute the values (M, N) of maps (M, N, H, W) for reference maps (N, H, W)."""

    def outcome(self, subject: Subject) -> Outcome:
        """Compute the values of all images, (M, N)."""
        maps = subject.maps.to(precise_type(subject.maps))
        reference = resized_within(reduced_maps(subject.reference, None), subject.explanation.input_size).to(maps)
        return Outcome(self.compare(maps, reference).cpu().double())


class FeatureAgreement(AgreementMetric):
    """Share of the k pixels of largest magnitude that both maps have in common.

    Args:
        share: The k pixels, as a share of all pixels.

    Values: (N,), from 0 to 1; random maps reach the share. Ties keep the order of the pixels.

    Source: Krishna et al., "The Disagreement Problem in Explainable Machine Learning: A Practitioner's Perspective"
        (2022), https://arxiv.org/abs/2202.01602.
    """

    name = "feature_agreement"

    share: Option[float] = Option(0.05, check_number, above=0, most=1)

    def compare(self, maps: Tensor, reference: Tensor) -> Tensor:
        """Compute the values (M, N) of maps (M, N, H, W) for reference maps (N, H, W)."""
        count = max(1, round(self.share * reference[0].numel()))
        other = ranks_of(reference.abs().flatten(1))  # (N, H * W)
        own = ranks_of(maps.abs().flatten(0, 1).flatten(1)).view(len(maps), *other.shape)
        return ((own < count) & (other < count)).sum(2) / count


class RankCorrelation(AgreementMetric):
    """Spearman's rank correlation over all pixels.

    Values: (N,), from -1 to 1; 0 if one map is constant, and 1 if both are equal.

    Source: Krishna et al., "The Disagreement Problem in Explainable Machine Learning: A Practitioner's Perspective"
        (2022), https://arxiv.org/abs/2202.01602.
    """

    name = "rank_correlation"

    def compare(self, maps: Tensor, reference: Tensor) -> Tensor:
        """Compute the values (M, N) of maps (M, N, H, W) for reference maps (N, H, W)."""
        own = row_ranks(maps.flatten(0, 1).flatten(1)).view(*maps.shape[:2], -1)
        other = row_ranks(reference.flatten(1))
        return torch.where((own == other).all(2), 1.0, correlation(own, other))


class StructuralSimilarity(AgreementMetric):
    """Structural similarity (SSIM) of both maps, each divided by its largest magnitude.

    Values: (N,), from -1 to 1, as for `ssim`.

    Raises:
        MethodError: The model's input is smaller than the window of 11 pixels.

    Source: Wang et al., "Image Quality Assessment: From Error Visibility to Structural Similarity" (2004),
        https://doi.org/10.1109/TIP.2003.819861.
    """

    name = "ssim"

    def compare(self, maps: Tensor, reference: Tensor) -> Tensor:
        """Compute the values (M, N) of maps (M, N, H, W) for reference maps (N, H, W)."""
        return ssim(maps, reference)


def ssim(first: Tensor, second: Tensor) -> Tensor:
    """Return the structural similarity (...) of maps (..., H, W), each divided by its largest magnitude.

    Leading axes are broadcast. The window is a Gaussian of 11 pixels with a standard deviation of 1.5, and lies within
    the map. The range of the values is -1 to 1 for all maps, so the constants of the formula are 0.02² and 0.06².

    Raises:
        MethodError: The maps are smaller than the window.
    """
    if min(first.shape[-2:]) < WINDOW:
        size = " x ".join(map(str, first.shape[-2:]))
        raise MethodError(f"structural similarity needs maps of at least {WINDOW} x {WINDOW} pixels; got {size}")
    a, b = (maps / maps.abs().amax((-2, -1), keepdim=True).clamp(min=1e-30) for maps in (first, second))
    mean_a, mean_b = _smoothed(a), _smoothed(b)
    variances = (_smoothed(a.square()) - mean_a.square()) + (_smoothed(b.square()) - mean_b.square())
    covariance = _smoothed(a * b) - mean_a * mean_b
    luminance = (2 * mean_a * mean_b + 0.02**2) / (mean_a.square() + mean_b.square() + 0.02**2)
    return (luminance * (2 * covariance + 0.06**2) / (variances + 0.06**2)).mean((-2, -1))


def _smoothed(maps: Tensor) -> Tensor:
    """Return the weighted means of all windows within maps (..., H, W)."""
    distances = torch.arange(WINDOW, device=maps.device).to(maps) - WINDOW // 2
    weights = (-0.5 * (distances / 1.5).square()).softmax(0)
    rows = conv2d(maps.reshape(-1, 1, *maps.shape[-2:]), weights.view(1, 1, -1, 1))
    means = conv2d(rows, weights.view(1, 1, 1, -1))
    return means.view(*maps.shape[:-2], *means.shape[-2:])
