"""What scores under random masks say of each cell: total-order Sobol indices, and kernel dependence."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .estimates import Estimate, rank_correlation

_BLOCK = 1024  # rows of a kernel matrix at once, and the scores that the kernel's width is taken from


class TotalOrder(Estimate):
    """Total-order Sobol indices by Jansen's estimator, from rows of a design.

    Each row holds the scores of A, of B, and of A with one of its numbers from B, for each of the numbers.

    Args:
        cells: How many numbers there are.
        rounding: The standard deviation of the scores, as a share of the largest, that counts as none.

    Source: Jansen, "Analysis of variance designs for model output" (1999),
        https://doi.org/10.1016/S0010-4655(98)00154-4.
    """

    def __init__(self, cells: int, rounding: float) -> None:
        super().__init__()
        self._rounding = rounding
        self._rows = torch.zeros(0, cells + 2, dtype=torch.float64, device="cpu")

    def add(self, samples: Tensor) -> None:
        """Take in rows of scores (k, cells + 2)."""
        at, self.count = self.count, self.count + len(samples)
        if self.count > len(self._rows):
            more = self._rows.new_zeros(max(32, self.count), self._rows.shape[1])
            self._rows = torch.cat([self._rows, more])
        self._rows[at : self.count] = samples

    @property
    def mean(self) -> Tensor:
        """The indices (cells,); zero where the score does not vary."""
        return self._indices(self._rows[: self.count])

    @property
    def error(self) -> Tensor | None:
        """The standard errors (cells,) of the ratios, by the delta method over the rows; None for a single row."""
        if self.count < 2:
            return None
        rows = self._rows[: self.count]
        effects, spread = self._parts(rows)
        variance = float(spread.mean())
        if not variance:
            return torch.zeros_like(self.mean)
        off = (effects - self._indices(rows) * spread[:, None]) / variance
        return (off.var(0) / self.count).sqrt()

    @property
    def agreement(self) -> float | None:
        """The rank correlation of the indices of every other row and of those between; None below four rows."""
        if self.count < 4:
            return None
        halves = (self._indices(self._rows[start : self.count : 2])[None] for start in (0, 1))
        return rank_correlation(*halves)

    def _parts(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Of each row the effects (R, cells) and the variance (R,), whose means are in the ratio of the indices."""
        both = rows[:, :2]
        effects = (rows[:, 2:] - rows[:, :1]).square() / 2
        off = both - both.mean()
        spread = off.square().sum(1) / 2 * (both.numel() / (both.numel() - 1))
        least = (self._rounding * rows.abs().max()).square()
        return effects, torch.zeros_like(spread) if spread.mean() <= least else spread

    def _indices(self, rows: Tensor) -> Tensor:
        effects, spread = self._parts(rows)
        variance = spread.mean()
        return effects.mean(0) / variance if variance else torch.zeros_like(effects[0])


class _Criterion(NamedTuple):
    value: Tensor  # (cells,)
    error: Tensor  # (cells,)


class Dependence(Estimate):
    """The Hilbert-Schmidt independence criterion of each cell's bit and the score, with its standard error.

    With centred signs s and the centred kernel matrix L of the scores, (s' L s - what it is on average over all orders
    of s) / (2 n (n - 1)): the matrix is made block by block, so memory does not grow with its size.

    Args:
        bits: Gives the bits (k, cells) of samples `start` to `stop`.
        rounding: The standard deviation of the scores, as a share of the largest, that counts as none.

    Source: Gretton et al., "Measuring Statistical Dependence with Hilbert-Schmidt Norms" (2005),
        https://doi.org/10.1007/11564089_7; Song et al., "Feature Selection via Dependence Maximization" (2012),
        https://jmlr.org/papers/v13/song12a.html.
    """

    def __init__(self, bits: Callable[[int, int], Tensor], rounding: float) -> None:
        super().__init__()
        self._bits, self._rounding = bits, rounding
        self._scores: list[float] = []
        self._known: dict[int, _Criterion] = {}

    def add(self, samples: Tensor) -> None:
        """Take in the scores (k, 1) of the next samples."""
        self._scores += samples.flatten().tolist()
        self.count = len(self._scores)

    @property
    def mean(self) -> Tensor:
        """The criterion (cells,); zero where the score does not vary."""
        return self._criterion().value

    @property
    def error(self) -> Tensor | None:
        """The standard errors (cells,) of a U-statistic; None below four samples."""
        return self._criterion().error if self.count >= 4 else None

    @property
    def agreement(self) -> float | None:
        """The rank correlation of what every other sample says and those between; None below eight samples."""
        if self.count < 8:
            return None
        bits, scores = self._bits(0, self.count), torch.tensor(self._scores, dtype=torch.float64, device="cpu")
        width = self._width(scores)
        halves = (criterion(bits[start::2], scores[start::2], width).value[None] for start in (0, 1))
        return rank_correlation(*halves)

    def _criterion(self) -> _Criterion:
        if self.count not in self._known:
            bits, scores = self._bits(0, self.count), torch.tensor(self._scores, dtype=torch.float64, device="cpu")
            self._known = {self.count: criterion(bits, scores, self._width(scores))}
        return self._known[self.count]

    def _width(self, scores: Tensor) -> float:
        """The median distance of two scores, or the mean one where most are the same; 0 for scores without a spread."""
        if float(scores.std(correction=0)) <= self._rounding * float(scores.abs().max()):
            return 0.0
        first = scores[:_BLOCK]
        distances = torch.pdist(first[:, None])
        return float(distances.median()) or float(distances.mean())


def criterion(bits: Tensor, scores: Tensor, width: float) -> _Criterion:
    """The criterion (cells,) of bits (n, cells) and scores (n,), under a Gaussian kernel of a width, and its error."""
    n = len(scores)
    if not width:
        return _Criterion(torch.zeros_like(bits[0]), torch.zeros_like(bits[0]))
    signs = 2 * bits - 1
    signs = signs - signs.mean(0)
    along, means, squares = [], [], []
    for start in range(0, n, _BLOCK):
        kernel = torch.exp(-((scores[start : start + _BLOCK, None] - scores) / width).square() / 2)  # (b, n)
        along.append(kernel @ signs)
        means.append(kernel.mean(1))
        squares.append(kernel.square().sum())
    mean = torch.cat(means)  # (n,) of each row of the kernel
    whole = mean.mean()
    terms = signs * (torch.cat(along) - mean @ signs)  # (n, cells): s times L s
    trace = n * (1 - whole)
    chance = signs.square().sum(0) * trace / (n - 1)
    value = (terms.sum(0) - chance) / (2 * n * (n - 1))
    # The mean square of the centred kernel off its diagonal, times that of the bits' kernel.
    centred = sum(squares) / n**2 - 2 * mean.square().mean() + whole**2
    diagonal = (1 - 2 * mean + whole).square().mean() / n
    second = (centred - diagonal).clamp(min=0) / 4 * signs.square().mean(0).square()
    first = ((terms / (2 * n)).var(0) - second / n).clamp(min=0)
    return _Criterion(value, (4 * first / n + 2 * second / n**2).sqrt())
