"""Metrics that combine three others: ADCC and ARCC, harmonic means with coherency and complexity."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from ...attribution.options import Option
from ...validation import check_number, check_numbers
from .base import Outcome, Subject
from .changed_images import correlation, ranks_of, scaled_to_one
from .repeated_maps import Maps, MethodMetric
from .road import NOISE, removed


class CombinedMetric(MethodMetric):
    """Base class of harmonic means of coherency, low complexity and an effect on the score. Higher is better.

    Coherency is (r + 1) / 2 for Pearson's correlation r of the map with the map of the image multiplied by it.
    Complexity is the mean of the map. Both read the map scaled to 0..1.
    """

    higher_is_better = True

    @abstractmethod
    def effect(self, subject: Subject, maps: Tensor, masked: Tensor) -> Tensor:
        """Compute the effect on the score (N,), from 0 to 1.

        Args:
            subject: The explanation to measure.
            maps: (N, H, W) the maps in the size of the images.
            masked: (N, C, H, W) the images multiplied by their maps, scaled to 0..1.
        """

    def measure_maps(self, maps: Maps) -> Outcome:
        """Compute the means of the images."""
        subject = maps.subject
        own = subject.resized(maps.own)
        scaled = scaled_to_one(own)
        masked = subject.images * scaled[:, None]
        again = subject.resized(maps.once("masked", maps, masked))
        is_equal = (own == again).flatten(1).all(1)
        coherency = torch.where(is_equal, 1.0, (correlation(own.flatten(1), again.flatten(1)) + 1) / 2)
        parts = torch.stack([coherency, 1 - scaled.flatten(1).mean(1).double(), self.effect(subject, own, masked)])
        return Outcome(torch.where((parts > 0).all(0), 3 / (1 / parts.clamp(min=1e-30)).sum(0), 0.0))


class ADCC(CombinedMetric):
    """Harmonic mean of coherency, low complexity and low average drop; higher is better.

    Values: (N,), 0 to 1: the harmonic mean of (r + 1) / 2, 1 minus the mean of the map scaled to 0..1, and 1 minus
    `AverageDrop`. r is Pearson's correlation of the map with the map of the image multiplied by it. 0 if one of the
    three is 0.

    Source: Poppi et al., "Revisiting The Evaluation of Class Activation Mapping for Explainability" (2021),
        https://arxiv.org/abs/2104.10252.
    """

    name = "adcc"

    def effect(self, subject: Subject, maps: Tensor, masked: Tensor) -> Tensor:
        """Compute 1 minus the average drop."""
        before, after = (subject.scores_of(images).double() for images in (subject.images, masked))
        return 1 - ((before - after) / before.abs().clamp(min=1e-30)).clamp(0, 1)


class ARCC(CombinedMetric):
    """Harmonic mean of coherency, low complexity and combined ROAD; higher is better.

    Args:
        shares: As for `ROAD`.
        noise: As for `ROAD`.

    Values: (N,), 0 to 1: the harmonic mean of the first two parts of `ADCC`, and `CombinedROAD` of the probability.
    0 if one of the three is not above 0.

    Source: Domeniconi et al., "How to Evaluate and Refine your CAM" (2026), https://arxiv.org/abs/2605.14641.
    """

    name = "arcc"

    shares: Option[tuple[float, ...]] = Option((0.2, 0.4, 0.6, 0.8), check_numbers, above=0, most=1)
    noise: Option[float] = Option(NOISE, check_number, least=0)

    def effect(self, subject: Subject, maps: Tensor, masked: Tensor) -> Tensor:
        """Compute the combined ROAD."""
        ranks = ranks_of(maps.flatten(1)).view_as(maps)
        least, most = (self._mean_scores(subject, places) for places in (maps[0].numel() - 1 - ranks, ranks))
        return (least - most).clamp(0, 1)

    def _mean_scores(self, subject: Subject, places: Tensor) -> Tensor:
        """Return the mean scores of the images (N,) without the first shares of their orders (N, H, W)."""
        pairs = zip(subject.images[:, None], places, strict=True)
        images = [removed(x, place, self.shares, self.noise, subject.seed) for x, place in pairs]
        scores = [subject.scores_of(batch).double() for batch in torch.stack(images, 1)]  # of (k, N, C, H, W)
        return torch.stack(scores).mean(0)
