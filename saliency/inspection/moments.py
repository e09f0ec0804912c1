"""Mean, deviation, extremes, and the counts of zeros, NaN and infinities: of one tensor, and of many as of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from ..hooks.autograd_graph import outside

# So few numbers that a piece stays in the processor's cache while it is read several times, and so many that the calls
# do not count.
_PIECE = 1 << 17
_SAMPLED_RUNS, _SAMPLED_RUN = 64, 128
_AS_THEY_ARE = (torch.float32, torch.float64)
# A difference of two sums that loses more of its digits than these is not taken.
_LEAST_SPREAD = 1e-4


@dataclass(frozen=True, slots=True)
class Moments:
    """What can be said of a heap of numbers without keeping them.

    Mean, deviations and extremes are of the finite numbers, NaN where there are none. The deviations are squares in
    double precision: those of numbers beyond 1e154 are infinite, and those of numbers below 1e-162 are 0.
    """

    count: int = 0  # of all numbers
    finite: int = 0
    mean: float = math.nan
    deviations: float = 0.0  # the sum of the squared deviations from the mean
    min: float = math.nan
    max: float = math.nan
    zeros: int = 0
    nan: int = 0
    inf: int = 0

    @property
    def std(self) -> float:
        """The standard deviation of these numbers themselves: the squares are divided by their count."""
        return math.sqrt(self.deviations / self.finite) if self.finite else math.nan

    @property
    def norm(self) -> float:
        """The Euclidean norm of the finite numbers."""
        return math.hypot(math.sqrt(self.deviations), math.sqrt(self.finite) * self.mean) if self.finite else math.nan

    @property
    def zero_share(self) -> float:
        """How many of the numbers are exactly 0: 0 to 1."""
        return self.zeros / self.count if self.count else math.nan

    def scaled(self, factor: float) -> Moments:
        """Those of the same numbers, each multiplied by a positive factor."""
        return replace(
            self,
            mean=self.mean * factor,
            deviations=self.deviations * factor * factor,
            min=self.min * factor,
            max=self.max * factor,
        )

    def for_as_many_as(self, count: int) -> Moments:
        """The estimate for a heap of `count` numbers of which these are a sample."""
        share = count / self.count if self.count else 0
        finite, zeros, nan, inf = (round(each * share) for each in (self.finite, self.zeros, self.nan, self.inf))
        return replace(
            self, count=count, finite=finite, deviations=self.deviations * share, zeros=zeros, nan=nan, inf=inf
        )

    def __add__(self, other: Moments) -> Moments:
        """Those of both heaps together, exact but for rounding in double precision.

        Source: Chan, Golub and LeVeque, "Algorithms for Computing the Sample Variance" (1983),
        https://doi.org/10.1080/00031305.1983.10483115.
        """
        counts = (self.zeros + other.zeros, self.nan + other.nan, self.inf + other.inf)
        count, finite = self.count + other.count, self.finite + other.finite
        if not self.finite or not other.finite:
            known = self if self.finite else other
            return Moments(count, finite, known.mean, known.deviations, known.min, known.max, *counts)
        apart, share = other.mean - self.mean, other.finite / finite
        deviations = self.deviations + other.deviations + apart * apart * self.finite * share
        least, most = min(self.min, other.min), max(self.max, other.max)
        return Moments(count, finite, self.mean + apart * share, deviations, least, most, *counts)


def moments(tensor: Tensor) -> Moments:
    """The moments of a tensor's numbers, summed in double precision; complex numbers count by their magnitude.

    Args:
        tensor: Of any shape, type and device. It is not changed.
    """
    return moments_later(tensor)()


def moments_later(tensor: Tensor) -> Callable[[], Moments]:
    """The same, to be asked for later: an accelerator is not waited for before that.

    What is kept meanwhile is the figures and not the tensor.
    """
    return _plainly(tensor, lambda plain: _later(_in_a_row(plain)))


def moments_of_sample(tensor: Tensor) -> Callable[[], Moments]:
    """An estimate of the same from 8192 numbers in evenly spaced runs, for the price of a small tensor.

    Extremes are those of the sample, and a NaN between the runs is not seen. The same numbers are taken each time.
    """
    return _plainly(tensor, _later_of_sample)


_Read = TypeVar("_Read")
_Numbers = TypeVar("_Numbers", Tensor, NDArray[Any])


def _plainly(tensor: Tensor, read: Callable[[Tensor], _Read]) -> _Read:
    """What is read of a tensor outside of the caller's autocast, graph and transformations."""
    device = tensor.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return _plainly(tensor, read)
    return outside(lambda plain: read(plain.detach()), tensor)


def _later_of_sample(tensor: Tensor) -> Callable[[], Moments]:
    numbers = _in_a_row(tensor)
    whole = numbers.numel()
    step = whole // _SAMPLED_RUNS
    if step <= _SAMPLED_RUN:
        return _later(numbers)
    apart = numbers.stride(0)  # 0 where one number was expanded
    found = _later(numbers.as_strided((_SAMPLED_RUNS, _SAMPLED_RUN), (step * apart, apart)))
    return lambda: found().for_as_many_as(whole)


def _later(numbers: Tensor) -> Callable[[], Moments]:
    """The moments of a row of numbers, or of several rows."""
    if numbers.is_meta:  # which holds no numbers
        return Moments
    if numbers.device.type != "cpu":
        figures = _figures(numbers)
        return lambda: _read(figures)
    whole = _on_the_processor(numbers)
    return lambda: whole


def _in_a_row(tensor: Tensor) -> Tensor:
    """The numbers in whatever order they lie in memory, without a copy where they are dense."""
    if tensor.is_nested:
        nothing = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        tensor = torch.cat([nothing, *(each.reshape(-1) for each in tensor.unbind())])
    elif tensor.is_quantized:
        tensor = tensor.dequantize()
    elif tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = tensor.abs()
    if not tensor.is_contiguous():
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return tensor.reshape(-1)


def _on_the_processor(numbers: Tensor) -> Moments:
    """The moments of a row of numbers, or of several rows: from memory once, from the processor's cache five times."""
    import cv2
    import numpy as np

    count, squares, total, least, most, zeros = numbers.numel(), 0.0, 0.0, math.inf, -math.inf, 0
    for rows in _arrays(numbers):
        # OpenCV adds up single precision in double, as fast as others do in single.
        squares += cv2.norm(rows, cv2.NORM_L2SQR)
        total += cv2.sumElems(rows)[0]
        lowest, highest, _, _ = cv2.minMaxLoc(rows)
        if lowest <= 0 <= highest:
            zeros += rows.size - int(np.count_nonzero(rows != 0))
        least, most = min(least, lowest), max(most, highest)
    if count and math.isfinite(squares):
        if least == most:
            return Moments(count, count, least, 0.0, least, least, zeros)
        mean = total / count
        deviations = squares - total * mean
        if deviations > _LEAST_SPREAD * squares:
            return Moments(count, count, mean, deviations, least, most, zeros)
    # Not finite, or so far from zero for its spread that the difference of two large sums would be little but rounding.
    return sum((_read(_figures(piece)) for piece in _pieces(numbers)), Moments())


def _arrays(numbers: Tensor) -> Iterator[NDArray[Any]]:
    """The same, in arrays that OpenCV takes."""
    if numbers.dtype in _AS_THEY_ARE:
        yield from _pieces(numbers.numpy(force=True))
    else:
        yield from (piece.double().numpy(force=True) for piece in _pieces(numbers))


def _pieces(numbers: _Numbers) -> Iterable[_Numbers]:
    """A row in pieces (1, n) of at most `_PIECE` numbers; several rows as they are."""
    if numbers.ndim == 2:
        return (numbers,)
    return (numbers[None, at : at + _PIECE] for at in range(0, len(numbers), _PIECE))


def _figures(numbers: Tensor) -> Tensor:
    """The fields of `Moments` as one tensor, whatever the numbers are, without waiting for an accelerator."""
    if numbers.device.type != "mps":
        numbers = numbers.double()
    finite = numbers.isfinite()
    count = finite.sum()
    mean = torch.where(finite, numbers, 0).sum() / count
    deviations = torch.where(finite, numbers - mean, 0).square().sum()
    some = numbers.numel() > 0
    fields = [
        torch.full_like(count, numbers.numel()),
        count,
        mean,
        deviations,
        torch.where(finite, numbers, math.inf).amin() if some else mean,
        torch.where(finite, numbers, -math.inf).amax() if some else mean,
        (numbers == 0).sum(),
        numbers.isnan().sum(),
        numbers.isinf().sum(),
    ]
    return torch.stack([each.to(mean.dtype) for each in fields])


def _read(figures: Tensor) -> Moments:
    count, finite, mean, deviations, least, most, zeros, nan, inf = figures.tolist()
    if not finite:
        mean = least = most = math.nan
    return Moments(int(count), int(finite), mean, deviations, least, most, int(zeros), int(nan), int(inf))
