"""Mean, deviation, extremes, and the counts of zeros, NaN and infinities: of one tensor, and of many as of one."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# So few numbers that a piece stays in the processor's cache while it is read several times, and so many that the calls
# do not count.
_PIECE = 1 << 20
_RUN = 16
_GLANCE = 2048
_SAMPLED_RUNS, _SAMPLED_RUN = 64, 256
_SMALL = 1e-30


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
        share = count / self.count
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


def moments(tensor: Tensor, *, exact: bool = True) -> Moments:
    """The moments of a tensor's numbers; complex numbers count by their magnitude.

    Args:
        tensor: Of any shape, type and device. It is not changed.
        exact: Sums in double precision. Without, a float32 tensor on the processor is summed as it is: three times
            faster, and right to some six digits.
    """
    return moments_later(tensor, exact=exact)()


def moments_later(tensor: Tensor, *, exact: bool = True) -> Callable[[], Moments]:
    """The same, to be asked for later: an accelerator is not waited for before that.

    What is kept meanwhile is the figures and not the tensor.
    """
    if torch.is_autocast_enabled(tensor.device.type):
        with torch.autocast(tensor.device.type, enabled=False):
            return moments_later(tensor, exact=exact)
    numbers = _in_a_row(tensor.detach())
    if numbers.device.type != "cpu":
        figures = _figures(numbers)
        return lambda: _read(figures)
    narrow = numbers.dtype == torch.float32 and not exact
    whole = Moments()
    for at in range(0, numbers.numel(), _PIECE):
        piece = numbers[at : at + _PIECE]
        part = _of_piece(piece if narrow else piece.double())
        whole = whole + part if at else part
    return lambda: whole


def moments_of_sample(tensor: Tensor) -> Callable[[], Moments]:
    """An estimate of the same from a few thousand numbers in evenly spaced runs, for the price of a small tensor.

    Extremes are those of the sample, and a NaN between the runs is not seen. The same numbers are taken each time.
    """
    numbers = _in_a_row(tensor.detach())
    step = numbers.numel() // _SAMPLED_RUNS
    if step <= _SAMPLED_RUN:
        return moments_later(numbers, exact=False)
    runs = numbers[: _SAMPLED_RUNS * step].view(_SAMPLED_RUNS, step)[:, :_SAMPLED_RUN]
    found, whole = moments_later(runs.reshape(-1), exact=False), numbers.numel()
    return lambda: found().for_as_many_as(whole)


def _in_a_row(tensor: Tensor) -> Tensor:
    """The numbers in whatever order they lie in memory, without a copy where they are dense."""
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    elif tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = tensor.abs()
    if not tensor.is_contiguous():
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return tensor.reshape(-1)


class _Room(threading.local):
    """Where each thread writes what it counts, so that no memory is asked for at each call."""

    def __init__(self) -> None:
        self.rooms: dict[torch.dtype, Tensor] = {}

    def like(self, piece: Tensor) -> Tensor:
        room = self.rooms.get(piece.dtype)
        if room is None:
            with torch.inference_mode(mode=False):
                room = self.rooms[piece.dtype] = torch.empty(_PIECE, dtype=piece.dtype)
        return room[: piece.numel()]


_room = _Room()


def _of_piece(piece: Tensor) -> Moments:
    """The moments of at most `_PIECE` numbers in float32 or float64."""
    count = piece.numel()
    squares = float(piece.dot(piece))
    if not math.isfinite(squares):
        return _read(_figures(piece))
    least, most = float(piece.amin()), float(piece.amax())
    if least == most:
        return Moments(count, count, least, 0.0, least, least, count if least == 0 else 0)
    if squares < _SMALL * count and piece.dtype == torch.float32:
        # The squares of such small numbers are lost in single precision, wholly or in part.
        return _of_piece(piece.double())
    zeros = 0 if least > 0 or most < 0 or _has_no_zero(piece, squares) else _count_zeros(piece)
    mean = float(piece.sum()) / count
    deviations = squares - count * mean * mean
    if deviations < 0.01 * squares:
        # Far from zero for its spread: the difference of two large sums would be little but rounding, and so would a
        # mean in single precision be.
        if piece.dtype == torch.float32:
            return _of_piece(piece.double())
        deviations = float((piece - mean).square_().sum())
    return Moments(count, count, mean, deviations, least, most, zeros)


def _has_no_zero(piece: Tensor, squares: float) -> bool:
    """Whether it is certain that no number is 0, in half of the time that counting them takes.

    A product of a few numbers of the usual size is 0 or not finite if one of them is 0, and hardly ever otherwise.
    """
    runs = piece.numel() // _RUN
    if not 1e-4 * piece.numel() < squares < 1e4 * piece.numel() or not runs or not bool(piece[:_GLANCE].all()):
        return False
    products = piece[: runs * _RUN].view(_RUN, runs).prod(0)
    least = float(products.abs_().amin())
    return least > 0 and math.isfinite(float(products.sum())) and bool(piece[runs * _RUN :].all())


def _count_zeros(piece: Tensor) -> int:
    # Comparing into numbers is several times faster than counting truth values.
    return piece.numel() - round(float(torch.ne(piece, 0.0, out=_room.like(piece)).sum()))


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
