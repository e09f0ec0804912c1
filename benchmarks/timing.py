"""Times that can be compared: contenders take turns in one process on one thread, with ratios per round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Timing:
    """The rounds of one contender: CPU and wall seconds."""

    cpu: tuple[float, ...]
    wall: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The median wall time."""
        return statistics.median(self.wall)


def interleaved(contenders: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
    """Run every contender once per round, after one round that does not count; the order turns by one each round."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    wall: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    try:
        for turn in range(rounds + 1):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                cpu_start, wall_start = time.process_time(), time.perf_counter()
                contenders[name]()
                if turn:
                    cpu[name].append(time.process_time() - cpu_start)
                    wall[name].append(time.perf_counter() - wall_start)
    finally:
        torch.set_num_threads(threads)
    return {name: Timing(tuple(cpu[name]), tuple(wall[name])) for name in names}


def ratio(timing: Timing, baseline: Timing) -> float:
    """The median over the rounds of CPU time over the baseline's CPU time in the same round."""
    return statistics.median(a / b for a, b in zip(timing.cpu, baseline.cpu, strict=True))


def wall_ratio(timing: Timing, baseline: Timing) -> float:
    """The same for wall time."""
    return statistics.median(a / b for a, b in zip(timing.wall, baseline.wall, strict=True))


def verdict(measured: float, target: float | None) -> str:
    """`<= 1.05 holds`, `<= 1.05 MISSED`, or nothing where there is no target."""
    if target is None:
        return ""
    return f"<= {target:.2f} {'holds' if measured <= target else 'MISSED'}"
