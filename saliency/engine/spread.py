"""A variance over samples that come in chunks, and how far it can be trusted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .estimates import Estimate, rank_correlation


class Variance(Estimate):
    """A variance per pixel over samples that stream by, with its standard error, in constant memory.

    It keeps sums of the first four powers of what each sample is off the first one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._first: Tensor | None = None
        self._sums: list[Tensor] = []
        self._evens: list[Tensor] = []  # the first two of the samples 0, 2, 4, ...

    def add(self, samples: Tensor) -> None:
        """Take in a chunk of samples (k, ...)."""
        if not len(samples):
            return
        samples = samples.detach().to(torch.float32 if samples.device.type == "mps" else torch.float64)
        if self._first is None:
            self._first = samples[0].clone()
            self._sums = [torch.zeros_like(self._first) for _ in range(4)]
            self._evens = [torch.zeros_like(self._first) for _ in range(2)]
        off = samples - self._first
        power = torch.ones_like(off)
        for order in range(4):
            power *= off
            self._sums[order] += power.sum(0)
            if order < 2:
                self._evens[order] += power[self.count % 2 :: 2].sum(0)
        self.count += len(samples)

    @property
    def mean(self) -> Tensor:
        """What is estimated: the unbiased variance of the samples (...); zero for a single one."""
        return _variance(self._sums, self.count)

    @property
    def error(self) -> Tensor | None:
        """The standard error of the variance (...); None for fewer than four samples, which say nothing of it."""
        n = self.count
        if n < 4:
            return None
        m, second, third, fourth = (each / n for each in self._sums)
        central = fourth - 4 * m * third + 6 * m.square() * second - 3 * m**4
        squared = self.mean.square() * ((n - 3) / (n - 1))
        return ((central - squared).clamp(min=0) / n).sqrt()

    @property
    def agreement(self) -> float | None:
        """The rank correlation of the variances of every other sample and of those between; None below four samples."""
        if self.count < 4:
            return None
        evens = (self.count + 1) // 2
        odds = [total - even for total, even in zip(self._sums[:2], self._evens, strict=True)]
        return rank_correlation(_variance(self._evens, evens), _variance(odds, self.count - evens))


def _variance(sums: Sequence[Tensor], count: int) -> Tensor:
    """The unbiased variance, from the sums of samples and of their squares."""
    return ((sums[1] - sums[0].square() / count) / max(count - 1, 1)).clamp(min=0)
