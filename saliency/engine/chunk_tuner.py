"""How many passes to run at once: measured while running, and remembered."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Hashable

import torch
from torch import nn

MOST_ON_A_PROCESSOR = 16
"""Beyond it a processor gains nothing, and memory grows: a long run needs no more of it than a short one."""
MOST_ON_AN_ACCELERATOR = 256


class ChunkTuner:
    """The chunk size of one kind of pass: the sizes 1, 2, 4, ... are tried once each, and then the fastest is kept.

    Every try is real work, so nothing is thrown away. Rates are kept up to date: where the fastest size falls behind
    what another one once did, the other is taken.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._rates: dict[int, float] = {}  # passes per second
        self._warm = False
        self._lock = threading.Lock()

    def size(self) -> int:
        """The size of the next chunk."""
        with self._lock:
            if not self._rates:
                return 1
            largest, best = max(self._rates), max(self._rates.values())
            # Two sizes in a row that fall behind: larger ones do not come back.
            late = sorted(self._rates)[-2:]
            falling = len(late) == 2 and all(self._rates[each] < 0.9 * best for each in late)
            if 2 * largest <= self.most and not falling:
                return 2 * largest
            return max((each for each in self._rates if each <= self.most), key=self._rates.__getitem__, default=1)

    def record(self, size: int, seconds: float) -> None:
        """Take note of what a chunk took. The very first one pays for what is done only once, and does not count."""
        with self._lock:
            if not self._warm:
                self._warm = True
                return
            if size & (size - 1):  # the rest of a run: no size of ours
                return
            rate = size / max(seconds, 1e-9)
            self._rates[size] = (self._rates[size] + rate) / 2 if size in self._rates else rate

    def too_large(self, size: int) -> None:
        """A chunk of this size ran out of memory: half of it is the most from now on."""
        with self._lock:
            self.most = max(1, size // 2)
            self._rates = {each: rate for each, rate in self._rates.items() if each <= self.most}


_known: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, ChunkTuner]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def chunk_tuner_for(model: nn.Module, kind: Hashable, x: torch.Tensor) -> ChunkTuner:
    """What this process knows of the pace of a model, for one kind of pass and inputs like `x` (1, C, H, W)."""
    key = kind, tuple(x.shape[1:]), x.dtype, x.device, torch.get_num_threads()
    with _lock:
        paces = _known.setdefault(model, {})
        if key not in paces:
            paces[key] = ChunkTuner(MOST_ON_A_PROCESSOR if x.device.type == "cpu" else MOST_ON_AN_ACCELERATOR)
        return paces[key]


def passes_that_fit(bytes_per_pass: int) -> int:
    """How many passes fit into half of the memory that is free, where the system says how much that is."""
    free = _free_memory()
    return sys.maxsize if free is None or bytes_per_pass <= 0 else max(1, free // 2 // bytes_per_pass)


def _free_memory() -> int | None:
    """The bytes that this machine can still give, as Linux counts them; None elsewhere."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:  # noqa: PTH123 - no path of the user's
            fields = dict(line.split(":", 1) for line in file)
        return 1024 * int(fields["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return None
