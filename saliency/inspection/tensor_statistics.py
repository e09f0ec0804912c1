"""Mean, deviation, extremes and counts of zeros, NaN and infinities, of one tensor or several together."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..errors import MethodError, NotApplicableError
from ..hooks.autograd_graph import is_wrapped
from ..io.inputs import axes_in_memory_order
from ..validation import described

# Small enough to stay in the processor's cache while it is read several times.
_CHUNK = 1 << 17
# The smallest variance, relative to the mean square, for which the difference of two sums is accurate.
_MIN_SPREAD = 1e-4


@dataclass(frozen=True, slots=True)
class Moments:
    """Summary of any number of values.

    Mean, deviations and extremes cover the finite values, and are NaN if there are none. Squares are in double
    precision: they overflow to infinity for values beyond 1e154, and underflow to 0 for values below 1e-162.
    """

    count: int = 0  # all values
    finite: int = 0
    mean: float = math.nan
    deviations: float = 0.0  # sum of the squared deviations from the mean
    min: float = math.nan
    max: float = math.nan
    zeros: int = 0
    nan: int = 0
    inf: int = 0

    @property
    def std(self) -> float:
        """The standard deviation, with the count as divisor."""
        return math.sqrt(self.deviations / self.finite) if self.finite else math.nan

    @property
    def norm(self) -> float:
        """The Euclidean norm of the finite values."""
        return math.hypot(math.sqrt(self.deviations), math.sqrt(self.finite) * self.mean) if self.finite else math.nan

    @property
    def rms(self) -> float:
        """The root mean square of the finite values."""
        return self.norm / math.sqrt(self.finite) if self.finite else math.nan

    @property
    def zero_share(self) -> float:
        """The fraction of values that are exactly 0, from 0 to 1."""
        return self.zeros / self.count if self.count else math.nan

    def scaled(self, factor: float) -> Moments:
        """Return the moments of the values multiplied by a positive factor."""
        mean, low, high = self.mean * factor, self.min * factor, self.max * factor
        return replace(self, mean=mean, deviations=self.deviations * factor * factor, min=low, max=high)

    def __add__(self, other: Moments) -> Moments:
        """Return the moments of the union of both sets of values, exact up to double precision.

        Source: Chan, Golub and LeVeque, "Algorithms for Computing the Sample Variance" (1983),
        https://doi.org/10.1080/00031305.1983.10483115.
        """
        counts = (self.zeros + other.zeros, self.nan + other.nan, self.inf + other.inf)
        count, finite = self.count + other.count, self.finite + other.finite
        if not self.finite or not other.finite:
            source = self if self.finite else other
            return Moments(count, finite, source.mean, source.deviations, source.min, source.max, *counts)
        distance, fraction = other.mean - self.mean, other.finite / finite
        deviations = self.deviations + other.deviations + distance * distance * self.finite * fraction
        low, high = min(self.min, other.min), max(self.max, other.max)
        return Moments(count, finite, self.mean + distance * fraction, deviations, low, high, *counts)


def moments(tensor: Tensor) -> Moments:
    """Return the moments of a tensor's values, or of the magnitudes of complex values, summed in double precision.

    Args:
        tensor: A tensor of any shape, dtype and device. It is not changed.

    Raises:
        MethodError: This is no tensor.
        NotApplicableError: The tensor is nested or quantised, or belongs to a transformation of `torch.func`.
    """
    if not isinstance(tensor, Tensor):
        raise MethodError(f"moments are of a tensor, got {described(tensor)}")
    return TensorStatistics(tensor).moments


def require_plain(tensor: Tensor) -> None:
    """Raise NotApplicableError for tensors without plain values: transformed, nested or quantised tensors."""
    if is_wrapped(tensor) or tensor.is_nested or tensor.is_quantized:
        kinds = "nested and quantised tensors, and tensors in a transformation (torch.func, is_grads_batched=True),"
        raise NotApplicableError(f"{kinds} cannot be recorded or measured; choose other layers")


def real_values(tensor: Tensor) -> Tensor:
    """Return the values as a dense tensor without a graph; the magnitudes if the tensor is complex."""
    tensor = tensor.detach().to_dense()
    return tensor.abs() if tensor.is_complex() else tensor


def _cpu_moments(values: Tensor) -> Moments:
    """Return the moments of a CPU tensor in one pass over memory.

    Two plain passes are 9 lines shorter, but take 8 % longer for 100,000 values and 18 % longer for 800,000.
    """
    if values.is_meta:
        return Moments()
    count, squares, total, low, high, zeros = values.numel(), 0.0, 0.0, math.inf, -math.inf, 0
    chunks = [values[start : start + _CHUNK] for start in range(0, count, _CHUNK)]
    for chunk in chunks:
        wide = chunk.double()
        squares += float(torch.dot(wide, wide))
        total += float(wide.sum())
        row = (chunk if chunk.dtype == torch.float32 else wide).numpy(force=True)
        lowest, highest = float(row.min()), float(row.max())
        if lowest <= 0 <= highest:
            zeros += row.size - int(np.count_nonzero(row != 0))
        low, high = min(low, lowest), max(high, highest)
    if count and math.isfinite(squares):
        if low == high:
            return Moments(count, count, low, 0.0, low, low, zeros)
        mean = total / count
        deviations = squares - total * mean
        if deviations > _MIN_SPREAD * squares:
            return Moments(count, count, mean, deviations, low, high, zeros)
    # Some values are not finite, or the mean is so large that the difference above is mostly rounding error.
    return sum((_from_fields(_fields(chunk)) for chunk in chunks), Moments())


def _fields(values: Tensor) -> Tensor:
    """Return the fields of `Moments` as one tensor, in two passes and without synchronising an accelerator."""
    if values.device.type != "mps":  # MPS has no double precision
        values = values.double()
    is_finite = values.isfinite()
    finite = is_finite.sum()
    mean = torch.where(is_finite, values, 0).sum() / finite
    squares = torch.where(is_finite, values - mean, 0).square().sum()
    low = torch.where(is_finite, values, math.inf).amin() if values.numel() else mean
    high = torch.where(is_finite, values, -math.inf).amax() if values.numel() else mean
    counts = (values == 0).sum(), values.isnan().sum(), values.isinf().sum()
    fields = [torch.full_like(finite, values.numel()), finite, mean, squares, low, high, *counts]
    return torch.stack([field.to(mean.dtype) for field in fields])


def _from_fields(fields: Tensor) -> Moments:
    count, finite, mean, deviations, low, high, zeros, nan, inf = fields.tolist()
    if not finite:
        mean = low = high = math.nan
    return Moments(int(count), int(finite), mean, deviations, low, high, int(zeros), int(nan), int(inf))


class TensorStatistics:
    """Shape and moments of a tensor. The tensor itself is not stored.

    Attributes:
        shape: The shape of the tensor.
        dtype: The dtype of the tensor.
        device: The device of the tensor.
    """

    def __init__(self, tensor: Tensor) -> None:
        require_plain(tensor)
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.device = tensor.device
        values = axes_in_memory_order(real_values(tensor)).reshape(-1)
        # An accelerator is synchronised only when the moments are read.
        measure = _cpu_moments if values.device.type in ("cpu", "meta") else _fields
        self._measured: Moments | Tensor = measure(values)

    @cached_property
    def moments(self) -> Moments:
        """Mean, standard deviation, extremes, norm, zeros, NaN and infinities, summed in double precision."""
        return _from_fields(self._measured) if isinstance(self._measured, Tensor) else self._measured

    def __getstate__(self) -> object:
        """Return the state with the computed moments, for `pickle` and `deepcopy`."""
        return {**vars(self), "_measured": self.moments}

    def __repr__(self) -> str:
        """Return a text such as `(1, 64, 112, 112) float32, mean 0.21, std 0.34`."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.shape} {dtype}, mean {self.moments.mean:.3g}, std {self.moments.std:.3g}"
