"""Rectangles of maps: where they lie, what is in them, and what depends on them.

All windows of one call have rectangles of one size, each at its own place: a rectangle may reach further than what has
changed, so that sizes are equal, and what it holds beyond that is what the map holds there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NEARLY_WHOLE = 0.7
"""A rectangle of this share of its map costs as much as the whole map: it has to be cut out and put in."""


@dataclass(frozen=True, slots=True)
class Rectangles:
    """Where rectangles of one size lie in a map, one for each window."""

    height: int
    width: int
    tops: tuple[int, ...]
    lefts: tuple[int, ...]

    def nearly_fill(self, size: Sequence[int]) -> bool:
        """Whether there is little left of a map of size (H, W) beside one of them."""
        return self.height * self.width >= NEARLY_WHOLE * size[0] * size[1]


@dataclass(frozen=True, slots=True)
class Patch:
    """What a map holds in its rectangles: all that is other than in the map of the picture itself."""

    rows: Tensor  # (k, C, h, w)
    place: Rectangles
    size: tuple[int, int]  # of the map


def cut(clean: Tensor, patch: Patch | None, at: Rectangles, beyond: float = 0.0) -> Tensor:
    """What a map holds in some rectangles (k, C, h, w), with a patch put in.

    Args:
        clean: The map of the picture itself (1, C, H, W).
        patch: What is other than that.
        at: The rectangles, which may reach beyond the map.
        beyond: What lies there.
    """
    if patch is not None and patch.place == at:
        return patch.rows
    height, width = clean.shape[-2:]
    made = clean.new_empty(len(at.tops), clean.shape[1], at.height, at.width)
    for row, (top, left) in enumerate(zip(at.tops, at.lefts, strict=True)):
        if top < 0 or left < 0 or top + at.height > height or left + at.width > width:
            made[row].fill_(beyond)
        _put(made[row], top, left, clean[0], 0, 0)
        if patch is not None:
            _put(made[row], top, left, patch.rows[row], patch.place.tops[row], patch.place.lefts[row])
    return made


def whole(clean: Tensor, patch: Patch) -> Tensor:
    """The whole maps (k, C, H, W), with the patch put in."""
    made = clean.expand(len(patch.rows), *clean.shape[1:]).clone(memory_format=torch.contiguous_format)
    for row, (top, left) in enumerate(zip(patch.place.tops, patch.place.lefts, strict=True)):
        _put(made[row], 0, 0, patch.rows[row], top, left)
    return made


def _put(into: Tensor, top: int, left: int, what: Tensor, what_top: int, what_left: int) -> None:
    """Copy where two pieces of a map (C, h, w) overlap, each given by the place of its corner."""
    first, end = max(top, what_top), min(top + into.shape[1], what_top + what.shape[1])
    start, stop = max(left, what_left), min(left + into.shape[2], what_left + what.shape[2])
    if first < end and start < stop:
        target = into.narrow(1, first - top, end - first).narrow(2, start - left, stop - start)
        target.copy_(what.narrow(1, first - what_top, end - first).narrow(2, start - what_left, stop - start))


@dataclass(frozen=True, slots=True)
class Kernel:
    """How a sliding operation goes over one axis."""

    size: int
    stride: int
    padding: int
    dilation: int

    def reached(self, length: int, starts: Sequence[int], outputs: int) -> tuple[int, tuple[int, ...]]:
        """What depends on a stretch of the input: how many outputs, and the first of them for each start."""
        span = (self.size - 1) * self.dilation
        count = min((length - 1 + span) // self.stride + 1, outputs)
        firsts = (-((span - self.padding - start) // self.stride) for start in starts)  # rounded up
        return count, tuple(max(0, min(first, outputs - count)) for first in firsts)

    def needed(self, count: int, firsts: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """What some outputs depend on: how many inputs, and the first of them for each first output."""
        length = (count - 1) * self.stride + (self.size - 1) * self.dilation + 1
        return length, tuple(first * self.stride - self.padding for first in firsts)
