"""What is known of each call of each layer, while batch after batch goes by."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from torch import Tensor

from ..hooks.autograd_graph import tensor_version
from .moments import Moments, moments

_Kept = TypeVar("_Kept")

Call = tuple[str, int]
"""The name of a layer, and which of its calls in a forward pass it is, from 0, those included that show nothing."""


class Calls(Generic[_Kept]):
    """Something for each call of each layer in a forward pass, in the order in which the calls begin.

    Args:
        make: What there is for a call that has not been seen before.
    """

    def __init__(self, make: Callable[[], _Kept]) -> None:
        self._make = make
        self._kept: dict[Call, _Kept] = {}
        self._order: list[Call] = []
        self._known: set[Call] = set()  # of those in order
        self._counts: Counter[str] = Counter()
        self._last: Call | None = None

    def begin(self) -> None:
        """Another forward pass begins."""
        self._counts.clear()
        self._last = None

    def next(self, name: str) -> Call:
        """A call of a layer begins.

        One that comes up in a later pass only has its place behind what began before it there.
        """
        call = (name, self._counts[name])
        self._counts[name] += 1
        if call not in self._known:
            self._known.add(call)
            self._order.insert(self._order.index(self._last) + 1 if self._last is not None else 0, call)
        self._last = call
        return call

    def of(self, call: Call) -> _Kept:
        """What there is for a call that has ended with something to show."""
        if call not in self._kept:
            self._kept[call] = self._make()
        return self._kept[call]

    def __iter__(self) -> Iterator[tuple[str, int, int, _Kept]]:
        """For each call the name of its layer, its number, how many calls the layer has, and what there is."""
        ended = [call for call in self._order if call in self._kept]
        counts, so_far = Counter(name for name, _ in ended), Counter[str]()
        for call in ended:
            name = call[0]
            yield name, so_far[name], counts[name], self._kept[call]
            so_far[name] += 1


class Heap:
    """What is known so far of one call of one layer: its moments, and which of its channels are alive."""

    def __init__(self) -> None:
        self.moments = Moments()
        self.alive: Tensor | None = None  # for each channel, whether it was ever above zero
        self._is_known = False

    def add(self, found: Moments, alive: Tensor | None) -> None:
        """One more batch.

        Args:
            found: Its moments.
            alive: For each channel, whether it was above zero; None where there are no channels.
        """
        self.moments = self.moments + found
        if not found.count:
            return
        if not self._is_known:
            self.alive, self._is_known = alive, True
        elif self.alive is None or alive is None or len(alive) != len(self.alive):
            self.alive = None
        else:
            self.alive = self.alive | alive

    def dead(self) -> tuple[int, ...]:
        """The channels that were never above zero, and never NaN."""
        return () if self.alive is None else tuple((~self.alive).nonzero().flatten().tolist())


class Seen:
    """What was found of a tensor that may come by once more. The tensor itself is not kept."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._version = tensor_version(tensor)
        self._alive: dict[int, Tensor] = {}
        self.moments = moments(tensor)

    def is_still(self, tensor: Tensor) -> bool:
        """Whether it is this tensor, and nobody has worked on it in place."""
        return self._tensor() is tensor and tensor_version(tensor) == self._version

    def alive(self, tensor: Tensor, axis: int | None) -> Tensor | None:
        """For each channel, whether any of its numbers is above zero, or NaN; None where there are no channels.

        Args:
            tensor: The very tensor, while it is at hand.
            axis: Of the channels.
        """
        if axis is None or not tensor.numel():
            return None
        if axis not in self._alive:
            tensor = tensor.detach().abs() if tensor.is_complex() else tensor.detach()
            most = tensor.amax([each for each in range(tensor.dim()) if each != axis])
            self._alive[axis] = ~(most <= 0)
        return self._alive[axis]
