"""Which photos go through the network together: groups that are fixed before they are run, and written down.

The values of a photo depend, in their last bits, on the size of the batch and on the photo's place in it. So both are
fixed by the photo's number, and a run that was interrupted makes the same groups again.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Sequence

TRIED_FIRST = (1, 1, 2, 4, 8, 16, 32, 64, 128, 256)
"""The sizes of the first groups, up to the largest allowed: real work, by which the best is found. The first pays for
what is done only once."""
GOOD_ENOUGH = 0.97
"""Of the best rate: a smaller batch that comes so close takes less memory."""


class Plan:
    """The groups of a run, one after the other.

    Args:
        total: The number of photos.
        size: The size of each group; None to find the best one while running.
        most: The largest size that is tried.
        lanes: How many groups are run at once; the last groups are smaller, so that all lanes end together.
        pieces: What an earlier run wrote down: (first photo, size of the groups from there on).
        fixed: The photos up to this number stay in the groups of `pieces`.
        settled: The best size, where an earlier run has found it.
    """

    def __init__(
        self,
        total: int,
        size: int | None,
        *,
        most: int = 16,
        lanes: int = 1,
        pieces: Sequence[tuple[int, int]] = (),
        fixed: int = 0,
        settled: int | None = None,
    ) -> None:
        self.total, self.most = total, most
        self.settled = size or settled
        self._asked = size
        self._lanes = max(1, lanes)
        self._rates: dict[int, float] = {}
        self._untried = [] if self.settled else [each for each in TRIED_FIRST if each <= most]
        self._lock = threading.Lock()
        self._starts: list[int] = _starts(pieces, fixed)  # of all groups so far
        self._end = min(self._starts.pop(), total) if self._starts else 0
        self.changes = 0
        """How often `pieces` or `settled` have changed."""
        self._handed_out = 0  # photos

    def next(self) -> range | None:
        """The numbers of the next group's photos; None behind the last one."""
        with self._lock:
            start = self._handed_out
            if start >= self.total:
                return None
            at = bisect_left(self._starts, start)
            if start < self._end:
                stop = self._starts[at + 1] if at + 1 < len(self._starts) else self._end
            else:
                stop = min(start + self._size(self.total - start), self.total)
                if not self._starts or start - self._starts[-1] != stop - start:
                    self.changes += 1
                self._starts.append(start)
                self._end = stop
            self._handed_out = stop
            return range(start, stop)

    def measured(self, size: int, seconds: float) -> None:
        """Take note of what the network took for a group of some size."""
        with self._lock:
            rate = size / max(seconds, 1e-9)
            # Of the first two, of one photo each, the later one counts.
            self._rates[size] = rate
            if self.settled is None and not self._untried and len(self._rates) >= len(self._tried()):
                best = max(self._rates.values())
                self.settled = min(each for each, rate in self._rates.items() if rate >= GOOD_ENOUGH * best)
                self.changes += 1

    def halve(self, group: range) -> tuple[range, range]:
        """The two halves of a group that memory has no room for. No later group is larger than the first half."""
        with self._lock:
            half = (len(group) + 1) // 2
            insort(self._starts, group.start + half)
            self.most = min(self.most, half)
            self._untried = [each for each in self._untried if each <= half]
            self._rates = {each: rate for each, rate in self._rates.items() if each <= half}
            if self.settled is not None:
                self.settled = min(self.settled, half)
            self.changes += 1
            return range(group.start, group.start + half), range(group.start + half, group.stop)

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """The groups so far as (first photo, size of the groups from there on)."""
        with self._lock:
            found: list[tuple[int, int]] = []
            for start, stop in zip(self._starts, [*self._starts[1:], self._end], strict=True):
                if not found or found[-1][1] != stop - start:
                    found.append((start, stop - start))
            return found

    def _tried(self) -> set[int]:
        return {each for each in TRIED_FIRST if each <= self.most}

    def _size(self, left: int) -> int:
        if self._asked is not None:
            return min(self._asked, self.settled or self._asked)
        share = max(1, left // self._lanes)
        even = 1 << (share.bit_length() - 1)
        if self.settled is not None:
            return min(self.settled, even)
        if self._untried:
            return min(self._untried.pop(0), even)
        known = max(self._rates, key=self._rates.__getitem__, default=min(4, self.most))
        return min(known, even)


def _starts(pieces: Sequence[tuple[int, int]], fixed: int) -> list[int]:
    """Where the groups of some pieces begin, up to the one that photo `fixed` - 1 is in, and where that one ends."""
    starts: list[int] = []
    at = 0
    for number, (first, size) in enumerate(pieces):
        at = first
        following = pieces[number + 1][0] if number + 1 < len(pieces) else fixed
        while at < min(following, fixed):
            starts.append(at)
            at += max(1, size)
        if at >= fixed:
            break
    return [*starts, at] if starts else []
