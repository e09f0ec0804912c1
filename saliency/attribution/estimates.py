"""Running means of samples with standard errors, and reproducible random generators."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..validation import check_integer

ROUNDING = 1e-6
"""Values that differ by at most this fraction of the largest magnitude are ties in a rank correlation."""
_ZERO = torch.zeros((), dtype=torch.float32, device="cpu")


class Estimate:
    """Running mean per pixel over samples, with its standard error, in constant memory.

    Chunks are merged by the rule of Chan et al., so only rounding depends on the chunk size.

    Source: Welford, "Note on a Method for Calculating Corrected Sums of Squares and Products" (1962),
        https://doi.org/10.1080/00401706.1962.10490022; Chan et al., "Updating Formulae and a Pairwise Algorithm for
        Computing Sample Variances" (1979), http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf.
    """

    passes_per_sample = 1
    notes: Sequence[str] = ()
    """Remarks for `ImageAttribution`."""

    def __init__(self) -> None:
        self.count = 0
        self._mean = self._even = self._squares = _ZERO  # even: the sum of the samples 0, 2, 4, ...

    def add(self, samples: Tensor) -> None:
        """Add a chunk of samples (k, ...)."""
        if not len(samples):
            return
        mean = samples.mean(0)
        squares = (samples - mean).square_().sum(0)
        even = samples[self.count % 2 :: 2].sum(0)
        mean, squares, even = (moment.detach().to(precise_type(moment)) for moment in (mean, squares, even))
        off, total = mean - self._mean, self.count + len(samples)
        self._squares = self._squares + squares + off.square() * (self.count * len(samples) / total)
        self._mean = self._mean + off * (len(samples) / total)
        self._even = self._even + even
        self.count = total

    @property
    def mean(self) -> Tensor:
        """The mean of all samples (...), in float64 where the device has it."""
        if not self.count:
            raise ValueError("no sample was added yet")
        return self._mean

    @property
    def variance(self) -> Tensor:
        """The unbiased variance of the samples (...); zero for a single sample."""
        return self._squares / max(self.count - 1, 1)

    @property
    def error(self) -> Tensor | None:
        """The standard error of the mean (...); None for fewer than two samples."""
        return (self.variance / self.count).sqrt() if self.count > 1 else None

    @property
    def relative_error(self) -> float:
        """The root mean square of the errors over the root mean square of the means; infinite without errors.

        0 if the errors and the means are all 0.
        """
        error = self.error
        if error is None:
            return math.inf
        above, below = (float(tensor.double().square().mean().sqrt()) for tensor in (error, self.mean))
        return above / below if below else (0.0 if not above else math.inf)

    @property
    def samples(self) -> int:
        """The number of complete samples so far."""
        return self.count // self.passes_per_sample

    @property
    def agreement(self) -> float | None:
        """The rank correlation between the maps of the even and of the odd samples; None below four samples.

        Channels are summed first.
        """
        return rank_correlation(*self.halves()) if self.samples >= 4 else None

    def halves(self) -> tuple[Tensor, Tensor]:
        """Return the maps of the even and of the odd samples."""
        evens = (self.count + 1) // 2
        return self._even / evens, (self.mean * self.count - self._even) / (self.count - evens)


class Squares(Estimate):
    """Running mean of the squares of samples."""

    def add(self, samples: Tensor) -> None:
        """Add a chunk of samples (k, ...)."""
        super().add(samples.square())


class Variance(Estimate):
    """Running variance per pixel with its standard error, in constant memory.

    It keeps the sums of the first four powers of the difference of each sample from the first sample.
    """

    def __init__(self) -> None:
        super().__init__()
        self._first = self._sums = self._even_sums = torch.zeros(0, dtype=torch.float64, device="cpu")

    def add(self, samples: Tensor) -> None:
        """Add a chunk of samples (k, ...)."""
        samples = samples.detach().to(precise_type(samples))
        if not self.count:
            self._first = samples[0].clone()
            self._sums = samples.new_zeros(4, *samples.shape[1:])
            self._even_sums = self._sums[:2].clone()  # of the samples 0, 2, 4, ...
        power = difference = samples - self._first
        for order in range(4):
            self._sums[order] += power.sum(0)
            if order < 2:
                self._even_sums[order] += power[self.count % 2 :: 2].sum(0)
            power = power * difference
        self.count += len(samples)

    @property
    def mean(self) -> Tensor:
        """The unbiased variance of the samples (...); zero for a single sample."""
        return _variance(self._sums, self.count)

    @property
    def error(self) -> Tensor | None:
        """The standard error of the variance (...); None for fewer than four samples."""
        n = self.count
        if n < 4:
            return None
        mean, second, third, fourth = self._sums / n
        central = fourth - 4 * mean * third + 6 * mean.square() * second - 3 * mean**4
        variance: Tensor = (central - self.mean.square() * ((n - 3) / (n - 1))) / n
        return variance.clamp(min=0).sqrt()

    def halves(self) -> tuple[Tensor, Tensor]:
        """Return the variances of the even and of the odd samples."""
        evens, odd_sums = (self.count + 1) // 2, self._sums[:2] - self._even_sums
        return _variance(self._even_sums, evens), _variance(odd_sums, self.count - evens)


class ScoreEstimate(Estimate):
    """Base class of maps that are computed from all scores so far; a subclass implements `solve`.

    Attributes:
        scores: (n,) all scores so far, float64 on the CPU.
    """

    least_samples = 2
    """The smallest number of samples at which a tolerance can end the passes."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = torch.zeros(0, dtype=torch.float64, device="cpu")

    def add(self, samples: Tensor) -> None:
        """Add the scores (k,) of the next passes."""
        self.scores = torch.cat([self.scores, samples.detach().cpu().double().flatten()])
        self.count = len(self.scores)

    @abstractmethod
    def solve(self, part: slice) -> tuple[Tensor, Tensor | None]:
        """Return the map from some of the samples so far, and its standard error, or None."""

    @property
    def mean(self) -> Tensor:
        """The map from all scores."""
        return self.solve(slice(None))[0]

    @property
    def error(self) -> Tensor | None:
        """The standard error of the map."""
        return self.solve(slice(None))[1]

    @property
    def relative_error(self) -> float:
        """As for `Estimate`; infinite for fewer than `least_samples` samples."""
        return super().relative_error if self.samples >= self.least_samples else math.inf

    def halves(self) -> tuple[Tensor, Tensor]:
        """Return the maps of the even and of the odd samples."""
        return self.solve(slice(0, None, 2))[0], self.solve(slice(1, None, 2))[0]


def _variance(sums: Tensor, count: int) -> Tensor:
    """Return the unbiased variance, from the sums of samples and of their squares."""
    return ((sums[1] - sums[0].square() / count) / max(count - 1, 1)).clamp(min=0)


def rank_correlation(first: Tensor, second: Tensor) -> float:
    """Return Spearman's rank correlation of two maps (H, W), or (C, ...) whose channels are summed.

    It is 1 for constant maps. Values that differ by at most `ROUNDING` times the largest magnitude are ties, so that
    rounding does not affect ranks.

    Source: Spearman, "The Proof and Measurement of Association between Two Things" (1904).
    """
    rows = [(maps.sum(0) if maps.dim() > 2 else maps).flatten() for maps in (first, second)]
    ranks = [tied_ranks(row, ROUNDING * float(row.abs().max())) for row in rows]
    first, second = (rank - rank.mean() for rank in ranks)
    norm = float(first.norm() * second.norm())
    return float(first @ second) / norm if norm else 1.0


def tied_ranks(values: Tensor, tolerance: float = 0.0) -> Tensor:
    """Return the rank of each value (n,), from the lowest; ties get their mean rank.

    Neighbouring values that differ by at most the tolerance are ties. A run of ties that spans more than the tolerance
    is split.
    """
    array = values.detach().cpu().numpy()
    order = np.argsort(array)  # four times as fast as PyTorch's
    is_start = ~(np.diff(array[order], prepend=np.nan) <= tolerance)
    if tolerance:
        # Cut from the start of each run: the cells of a fixed grid would separate equal values at their borders.
        starts = np.maximum.accumulate(np.where(is_start, np.arange(len(array)), 0))
        cells = (array[order] - array[order][starts]) // tolerance
        is_start |= np.diff(cells, prepend=0) != 0
    starts = np.flatnonzero(is_start)
    ends = np.append(starts[1:], len(array))
    ranks = np.empty(len(array))
    ranks[order] = np.repeat((starts + ends + 1) / 2, ends - starts)
    return torch.from_numpy(ranks).to(values.device, precise_type(values))


def precise_type(tensor: Tensor) -> torch.dtype:
    """Return the dtype for sums: float64, or float32 on a device without float64."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def generator(seed: int, *numbers: int) -> torch.Generator:
    """Return the random generator of one sample.

    The same numbers give the same draws, regardless of the order and the chunks of the samples. The generator is on
    the CPU, so every device gets the same draws.

    Args:
        seed: The seed of the method.
        *numbers: The number of the sample, and of the draw within it if there are several.
    """
    sequence = np.random.SeedSequence(check_integer("seed", seed, least=None) & (1 << 64) - 1, spawn_key=numbers)
    return torch.Generator().manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> 1))


def normal(shape: Sequence[int], seed: int, *numbers: int) -> Tensor:
    """Return normal draws of one sample, float64 on the CPU; the numbers are as for `generator`."""
    return torch.randn(shape, generator=generator(seed, *numbers), dtype=torch.float64, device="cpu")
