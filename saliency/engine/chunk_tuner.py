"""How many rows to run at once: measured while running, and remembered."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Hashable

import torch
from torch import nn

MAX_CHUNK_CPU = 16
"""Larger chunks are not faster on a CPU, and take more memory."""
MAX_CHUNK_ACCELERATOR = 256


class ChunkTuner:
    """Finds the fastest chunk size: the sizes 1, 2, 4, ... are tried once each, then the fastest is kept.

    Every trial is real work, so nothing is thrown away. Rates stay up to date: if the fastest size becomes slower than
    another one was, the other one is used. Threads may share one tuner.

    Args:
        most: The largest size.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._rates: dict[int, float] | None = None  # rows per second by size; None before the first chunk

    @property
    def best(self) -> int | None:
        """The fastest size; None while sizes are still to be tried."""
        rates = {size: rate for size, rate in (self._rates or {}).items() if size <= self.most}
        if not rates:
            return None
        fastest = max(rates, key=rates.__getitem__)
        last_two = sorted(rates)[-2:]
        # After two slower sizes in a row, no larger size is faster.
        is_falling = len(last_two) == 2 and all(rates[size] < 0.9 * rates[fastest] for size in last_two)
        return None if 2 * last_two[-1] <= self.most and not is_falling else fastest

    def size(self) -> int:
        """Return the size of the next chunk."""
        tried = [size for size in self._rates or {} if size <= self.most]
        return self.best or (2 * max(tried) if tried else 1)

    def record(self, size: int, seconds: float) -> None:
        """Add the time of a chunk. The very first chunk is warm-up and is ignored."""
        if self._rates is None:
            self._rates = {}
        elif size & (size - 1) == 0:  # the last chunk of a run may have any size
            rate = size / max(seconds, 1e-9)
            # A new dict: another thread may be reading the old one.
            self._rates = {**self._rates, size: (self._rates.get(size, rate) + rate) / 2}

    def too_large(self, size: int) -> None:
        """Limit all later chunks to half of a size that ran out of memory."""
        self.most = max(1, size // 2)


_tuners: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, ChunkTuner]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def chunk_tuner_for(model: nn.Module, kind: Hashable, x: torch.Tensor) -> ChunkTuner:
    """Return this process's tuner for a model, one kind of pass and inputs like `x` (1, C, H, W)."""
    key = kind, tuple(x.shape[1:]), x.dtype, x.device, torch.get_num_threads()
    most = MAX_CHUNK_CPU if x.device.type == "cpu" else MAX_CHUNK_ACCELERATOR
    with _lock:
        return _tuners.setdefault(model, {}).setdefault(key, ChunkTuner(most))


class MemoryGrowth:
    """Limits chunks on a CPU to the free memory, by how much the process has grown per row so far.

    A CPU does not raise an error that could be caught: the system ends the process.
    """

    def __init__(self) -> None:
        self._first = _peak_memory()
        self._per_row = 0

    def record(self, size: int) -> None:
        """Measure the growth of the process after a chunk."""
        self._per_row = max(self._per_row, (_peak_memory() - self._first) // size)

    def most(self) -> int:
        """Return the largest chunk that fits into half of the free memory; no limit where it is unknown."""
        free = _free_memory()
        return sys.maxsize if free is None or not self._per_row else max(1, free // 2 // self._per_row)


def _peak_memory() -> int:
    """Return the largest size of this process so far, in bytes; 0 where the system does not report it."""
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _free_memory() -> int | None:
    """Return the bytes that Linux can still allocate; None on other systems."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:  # noqa: PTH123 - not a path of the user
            fields = dict(line.split(":", 1) for line in file)
        return 1024 * int(fields["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return None
