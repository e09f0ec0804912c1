"""What is kept of a tensor that flows by: a copy, a copy on the CPU, its statistics, or what the user makes of it."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ..errors import MethodError, did_you_mean
from ..hooks.autograd_graph import is_wrapped, outside, tensor_version
from .moments import Moments, moments_later, moments_of_sample

Keep = str | Callable[[Tensor], Any]
"""One of "full", "cpu", "statistics" and "sample", or a function of the tensor."""

# How many tensors are remembered: the output of one layer is the input of the next, or of one not far behind.
_REMEMBERED = 64


class TensorStatistics:
    """What is left of a tensor that was not kept.

    Attributes:
        shape: Its shape; -1 where the parts of a nested tensor differ.
        dtype: Its type.
        device: Where it was.
        is_estimate: Whether they come from a sample of its numbers.
    """

    __slots__ = ("_later", "_moments", "device", "dtype", "is_estimate", "shape")

    def __init__(self, tensor: Tensor, *, sample: bool = False) -> None:
        self.shape = _shape(tensor) if tensor.is_nested else tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.is_estimate = sample
        later = moments_of_sample(tensor) if sample else moments_later(tensor)
        self._later: Callable[[], Moments] | None = later
        self._moments = Moments()

    @property
    def moments(self) -> Moments:
        """Mean, standard deviation, extremes, norm, zeros, NaN and infinities, summed in double precision.

        Where `is_estimate`, they are estimates but for small tensors, the extremes are those of the sample, and NaN and
        infinities may be missed.
        """
        if self._later is not None:
            self._moments, self._later = self._later(), None
        return self._moments

    def __getstate__(self) -> object:
        """The figures themselves, for `pickle` and `deepcopy`."""
        self._moments = self.moments
        return object.__getstate__(self)

    def __repr__(self) -> str:
        """For example `(1, 64, 112, 112) float32, mean 0.21, std 0.34`."""
        kind = str(self.dtype).removeprefix("torch.")
        about = "about " if self.is_estimate else ""
        return f"{self.shape} {kind}, mean {about}{self.moments.mean:.3g}, std {about}{self.moments.std:.3g}"


class Keeper:
    """Keeps tensors in one way, and the same tensor once.

    Args:
        keep: "full" for copies on their device, those of the forward pass still a part of the graph; "cpu" for
            detached copies on the CPU; "statistics" for `TensorStatistics`, and "sample" for an estimate of them; or a
            function of the tensor.
    """

    def __init__(self, keep: Keep) -> None:
        if not callable(keep) and keep not in _WAYS:
            hint = did_you_mean(str(keep), _WAYS)
            raise MethodError(f"keep={keep!r} is not one of {', '.join(map(repr, _WAYS))}, nor a function{hint}")
        self._way = keep if callable(keep) else _WAYS[keep]
        self._known: OrderedDict[int, tuple[weakref.ref[Tensor], int, Any]] = OrderedDict()

    def activation(self, tensor: Tensor) -> Any:
        """What is kept of an input or an output."""
        return self._remembered(tensor, self._way)

    def gradient(self, tensor: Tensor) -> Any:
        """What is kept of a gradient. It is detached: a graph that held its own gradients would never die."""
        return self._remembered(tensor, lambda gradient: self._way(gradient.detach()))

    def _remembered(self, tensor: Tensor, make: Callable[[Tensor], Any]) -> Any:
        if tensor.is_inference():  # such a tensor does not count its versions
            return make(tensor)
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == tensor_version(tensor):
            return known[2]
        kept = outside(make, tensor)
        if is_wrapped(tensor):  # it does not outlive its transformation
            return kept
        self._known[id(tensor)] = (weakref.ref(tensor), tensor_version(tensor), kept)
        self._known.move_to_end(id(tensor))
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return kept


def _shape(nested: Tensor) -> tuple[int, ...]:
    sizes = [each.shape for each in nested.unbind()]
    return len(sizes), *(of_all[0] if len(set(of_all)) == 1 else -1 for of_all in zip(*sizes, strict=True))


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone()


def _copy_on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


_WAYS: dict[str, Callable[[Tensor], Any]] = {
    "full": _copy,
    "cpu": _copy_on_cpu,
    "statistics": TensorStatistics,
    "sample": partial(TensorStatistics, sample=True),
}
