"""Metrics of maps alone, which run no model: complexity, localisation, and agreement with another explanation."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from ...attribution.estimates import precise_type
from ...attribution.explanation import reduced_maps
from ...attribution.options import ConvertedOption, Option
from ...errors import MethodError
from ...validation import check_integer, check_number
from .base import Metric, Outcome, Subject, resized_within
from .faithfulness import correlation, row_ranks


class ComplexityMetric(Metric):
    """Base class of the metrics of the distribution of a map's magnitudes, regardless of their positions.

    Neither direction is better: a map on few pixels is easy to read, but not necessarily right.
    """

    @abstractmethod
    def describe(self, magnitudes: Tensor) -> Tensor:
        """Compute the values (M, N) of magnitudes (M, N, n) of n pixels."""

    def outcome(self, subject: Subject) -> Outcome:
        """Compute the values of all images, (M, N)."""
        magnitudes = subject.maps.to(precise_type(subject.maps)).abs().flatten(2)
        return Outcome(self.describe(magnitudes).cpu().double())


class Gini(ComplexityMetric):
    """Gini index of the magnitudes.

    Values: (N,), from 0 for a constant map to (n - 1) / n for one nonzero pixel of n; 0 for a zero map.

    Source: Chalasani et al., "Concise Explanations of Neural Networks using Adversarial Training" (2020),
        https://arxiv.org/abs/1810.06583.
    """

    name = "gini"

    def describe(self, magnitudes: Tensor) -> Tensor:
        """Compute the values (M, N) of magnitudes (M, N, n) of n pixels."""
        count = magnitudes.shape[2]
        weights = torch.arange(1 - count, count, 2, device=magnitudes.device).to(magnitudes)
        totals = magnitudes.sum(2)
        return (magnitudes.sort(2).values * weights).sum(2) / (count * torch.where(totals > 0, totals, 1.0))


class Entropy(ComplexityMetric):
    """Entropy of the magnitudes as fractions of their sum.

    Values: (N,), in nats, from 0 for one nonzero pixel to ln n for a constant map of n pixels; ln n for a zero map.

    Source: Bhatt et al., "Evaluating and Aggregating Feature-based Model Explanations" (2020),
        https://arxiv.org/abs/2005.00631, as the complexity of an explanation.
    """

    name = "entropy"

    def describe(self, magnitudes: Tensor) -> Tensor:
        """Compute the values (M, N) of magnitudes (M, N, n) of n pixels."""
        totals = magnitudes.sum(2, keepdim=True)
        fractions = torch.where(totals > 0, magnitudes / totals, 1 / magnitudes.shape[2])
        entropies: Tensor = torch.special.entr(fractions).sum(2)
        return entropies


Threshold = float | Literal["area"]


class LocalisationMetric(Metric):
    """Base class of the metrics that compare a map with the mask of the object.

    Higher is better. The value is NaN for an empty mask.
    """

    higher_is_better = True

    @abstractmethod
    def compare(self, maps: Tensor, masks: Tensor) -> Tensor:
        """Compute the values (M, N) of maps (M, N, H, W) for masks (N, H, W), which are not empty."""

    def outcome(self, subject: Subject) -> Outcome:
        """Compute the values of all images, (M, N)."""
        masks = subject.masks
        values = self.compare(subject.maps.to(precise_type(subject.maps)), masks)
        return Outcome(torch.where(masks.any(2).any(1), values, math.nan).cpu().double())


class PointingGame(LocalisationMetric):
    """Whether the maximum of the map lies on the object or close to it.

    Args:
        tolerance: The largest distance to the object, in pixels of the model's input.

    Values: (N,), 1 for a hit and 0 for a miss. If several pixels have the maximum, the fraction of them that are hits.

    Source: Zhang et al., "Top-down Neural Attention by Excitation Backprop" (2016), https://arxiv.org/abs/1608.00507.
    """

    name = "pointing_game"

    tolerance: Option[int] = Option(15, check_integer, least=0)

    def compare(self, maps: Tensor, masks: Tensor) -> Tensor:
        """Compute the values (M, N) of maps (M, N, H, W) for masks (N, H, W)."""
        offsets = torch.arange(-self.tolerance, self.tolerance + 1, device=masks.device).square()
        disc = (offsets[:, None] + offsets <= self.tolerance**2).float()
        close = conv2d(masks[:, None].float(), disc[None, None], padding=self.tolerance)[:, 0] > 0.5
        return _fraction_of_highest(maps, close, torch.ones_like(masks[:, 0, 0], dtype=torch.int64))


class EnergyPointingGame(LocalisationMetric):
    """Fraction of the positive relevance that lies on the object.

    Values: (N,), from 0 to 1. A map without positive values is treated as constant: its value is the object's
    fraction of the area. Also called relevance mass accuracy (Arras et al. 2022).

    Source: Wang et al., "Score-CAM: Score-Weighted Visual Explanations for Convolutional Neural Networks" (2020),
        https://arxiv.org/abs/1910.01279.
    """

    name = "energy_pointing_game"

    def compare(self, maps: Tensor, masks: Tensor) -> Tensor:
        """Compute the values (M, N) of maps (M, N, H, W) for masks (N, H, W)."""
        positive = _positive_part(maps)
        return (positive * masks).sum((2, 3)) / positive.sum((2, 3))


class RelevanceRank(LocalisationMetric):
    """Relevance rank accuracy: the fraction of the K highest pixels that lie on an object of K pixels.

    Values: (N,), from 0 to 1. Ties at the K-th value are averaged.

    Source: Arras et al., "CLEVR-XAI: A Benchmark Dataset for the Ground Truth Evaluation of Neural Network
        Explanations" (2022), https://arxiv.org/abs/2003.07258.
    """

    name = "relevance_rank"

    def compare(self, maps: Tensor, masks: Tensor) -> Tensor:
        """Compute the values (M, N) of maps (M, N, H, W) for masks (N, H, W)."""
        return _fraction_of_highest(maps, masks, masks.sum((1, 2)))


class RocAuc(LocalisationMetric):
    """Probability that a pixel of the object is higher than a pixel of the background; ties count as one half.

    Values: (N,), from 0 to 1, 0.5 for a constant map. NaN if the object covers the whole image.

    Source: Fawcett, "An Introduction to ROC Analysis" (2006), https://doi.org/10.1016/j.patrec.2005.10.010.
    """

    name = "roc_auc"

    def compare(self, maps: Tensor, masks: Tensor) -> Tensor:
        """Compute the values (M, N) of maps (M, N, H, W) for masks (N, H, W)."""
        ranks = row_ranks(maps.flatten(0, 1).flatten(1)).view_as(maps)
        inside, outside = (area.sum((1, 2)).to(ranks) for area in (masks, ~masks))
        return ((ranks * masks).sum((2, 3)) - inside * (inside + 1) / 2) / (inside * outside)


def _check_threshold(option: str, value: Threshold) -> Threshold:
    return value if value == "area" else check_number(option, value, above=0, most=1, hint=', or "area"')


class IoU(LocalisationMetric):
    """Intersection over union of the object and the high pixels of the map.

    Args:
        threshold: The lowest of the high pixels, as a fraction of the map's maximum; or "area", for as many pixels as
            the object has. Pixels at the threshold are high; pixels without positive relevance are not.

    Values: (N,), from 0 to 1. A map without positive values is treated as constant.

    Source: Zhou et al., "Learning Deep Features for Discriminative Localization" (2016),
        https://arxiv.org/abs/1512.04150, for the threshold of 20 %.
    """

    name = "iou"

    threshold: ConvertedOption[Threshold, Threshold] = ConvertedOption(0.2, _check_threshold)

    def compare(self, maps: Tensor, masks: Tensor) -> Tensor:
        """Compute the values (M, N) of maps (M, N, H, W) for masks (N, H, W)."""
        positive = _positive_part(maps)
        if self.threshold == "area":
            lowest = _kth_highest(positive, masks.sum((1, 2)))
        else:
            lowest = self.threshold * positive.amax((2, 3))
        high = (positive >= lowest[..., None, None]) & (positive > 0)
        return (high & masks).sum((2, 3)) / (high | masks).sum((2, 3))


def _positive_part(maps: Tensor) -> Tensor:
    """Return the positive part of maps (M, N, H, W), or ones for maps without positive values."""
    positive = maps.clamp(min=0)
    return torch.where(positive.amax((2, 3), keepdim=True) > 0, positive, 1.0)


def _kth_highest(maps: Tensor, counts: Tensor) -> Tensor:
    """Return the values (M, N) of maps (M, N, H, W) that `counts` (N,) pixels reach; a count of 0 is treated as 1."""
    indices = (counts - 1).clamp(min=0).expand(maps.shape[:2])[..., None]
    return maps.flatten(2).sort(2, descending=True).values.gather(2, indices)[..., 0]


def _fraction_of_highest(maps: Tensor, masks: Tensor, counts: Tensor) -> Tensor:
    """Return the fraction of the `counts` (N,) highest pixels in masks (N, H, W), ties by expectation: (M, N)."""
    limits = _kth_highest(maps, counts)[..., None, None]
    higher, tied = maps > limits, maps == limits
    remaining = counts - higher.sum((2, 3))  # how many of the tied pixels are among the highest
    hits = (higher & masks).sum((2, 3)) + remaining * (tied & masks).sum((2, 3)) / tied.sum((2, 3)).to(maps)
    return hits / counts


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


class RankCorrelation(AgreementMetric):
    """Spearman's rank correlation over all pixels.

    Values: (N,), from -1 to 1; 0 if one map is constant, and 1 if both are equal.

    Source: Krishna et al., "The Disagreement Problem in Explainable Machine Learning: A Practitioner's Perspective"
        (2022), https://arxiv.org/abs/2202.01602.
    """

    name = "rank_correlation"

    def compare(self, maps: Tensor, reference: Tensor) -> Tensor:
        """Compute the values (M, N) of maps (M, N, H, W) for reference maps (N, H, W)."""
        ranks = row_ranks(maps.flatten(0, 1).flatten(1)).view(*maps.shape[:2], -1)
        reference_ranks = row_ranks(reference.flatten(1))
        return torch.where((ranks == reference_ranks).all(2), 1.0, correlation(ranks, reference_ranks))


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
