"""Metrics of complexity: on how many pixels is the map concentrated?"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from ...engine.estimates import precise_type
from .base import Metric, Outcome, Subject


class ComplexityMetric(Metric):
    """Base class of the metrics of the distribution of a map's magnitudes, regardless of their positions.

    Neither direction is better: a map on few pixels is easy to read, but not for that reason right.
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
        shares = torch.where(totals > 0, magnitudes / totals, 1 / magnitudes.shape[2])
        entropies: Tensor = torch.special.entr(shares).sum(2)
        return entropies
