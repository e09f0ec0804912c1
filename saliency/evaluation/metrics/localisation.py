"""Metrics of localisation: does the map lie on the object?"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from ...attribution.options import ConvertedOption, Option
from ...engine.estimates import precise_type
from ...validation import check_integer, check_number
from .base import Metric, Outcome, Subject
from .changed_images import row_ranks

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

    Values: (N,), 1 for a hit and 0 for a miss. If several pixels share the maximum, the share of them that are hits.

    Source: Zhang et al., "Top-down Neural Attention by Excitation Backprop" (2016), https://arxiv.org/abs/1608.00507.
    """

    name = "pointing_game"

    tolerance: Option[int] = Option(15, check_integer, least=0)

    def compare(self, maps: Tensor, masks: Tensor) -> Tensor:
        """Compute the values (M, N) of maps (M, N, H, W) for masks (N, H, W)."""
        offsets = torch.arange(-self.tolerance, self.tolerance + 1, device=masks.device).square()
        disc = (offsets[:, None] + offsets <= self.tolerance**2).float()
        close = conv2d(masks[:, None].float(), disc[None, None], padding=self.tolerance)[:, 0] > 0.5
        return _share_of_highest(maps, close, torch.ones_like(masks[:, 0, 0], dtype=torch.int64))


class EnergyPointingGame(LocalisationMetric):
    """Share of the positive relevance that lies on the object.

    Values: (N,), from 0 to 1. A map without positive values counts as constant: its value is the object's share of the
    area. Also called relevance mass accuracy (Arras et al. 2022).

    Source: Wang et al., "Score-CAM: Score-Weighted Visual Explanations for Convolutional Neural Networks" (2020),
        https://arxiv.org/abs/1910.01279.
    """

    name = "energy_pointing_game"

    def compare(self, maps: Tensor, masks: Tensor) -> Tensor:
        """Compute the values (M, N) of maps (M, N, H, W) for masks (N, H, W)."""
        positive = _positive_part(maps)
        return (positive * masks).sum((2, 3)) / positive.sum((2, 3))


class RelevanceRank(LocalisationMetric):
    """Relevance rank accuracy: the share of the K highest pixels that lie on an object of K pixels.

    Values: (N,), from 0 to 1. Ties at the K-th value count by expectation.

    Source: Arras et al., "CLEVR-XAI: A Benchmark Dataset for the Ground Truth Evaluation of Neural Network
        Explanations" (2022), https://arxiv.org/abs/2003.07258.
    """

    name = "relevance_rank"

    def compare(self, maps: Tensor, masks: Tensor) -> Tensor:
        """Compute the values (M, N) of maps (M, N, H, W) for masks (N, H, W)."""
        return _share_of_highest(maps, masks, masks.sum((1, 2)))


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
        threshold: The lowest of the high pixels, as a share of the map's maximum; or "area", for as many pixels as the
            object has. Pixels at the threshold are high; pixels without positive relevance are not.

    Values: (N,), from 0 to 1. A map without positive values counts as constant.

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
    """Return the positive part of maps (M, N, H, W), or ones where a map has none."""
    positive = maps.clamp(min=0)
    return torch.where(positive.amax((2, 3), keepdim=True) > 0, positive, 1.0)


def _kth_highest(maps: Tensor, counts: Tensor) -> Tensor:
    """Return the values (M, N) of maps (M, N, H, W) that `counts` (N,) pixels reach; a count of 0 counts as 1."""
    places = (counts - 1).clamp(min=0).expand(maps.shape[:2])[..., None]
    return maps.flatten(2).sort(2, descending=True).values.gather(2, places)[..., 0]


def _share_of_highest(maps: Tensor, masks: Tensor, counts: Tensor) -> Tensor:
    """Return the share of the `counts` (N,) highest pixels that lie in masks (N, H, W), ties by expectation: (M, N)."""
    limits = _kth_highest(maps, counts)[..., None, None]
    higher, tied = maps > limits, maps == limits
    places = counts - higher.sum((2, 3))  # that tied pixels take
    hits = (higher & masks).sum((2, 3)) + places * (tied & masks).sum((2, 3)) / tied.sum((2, 3)).to(maps)
    return hits / counts
