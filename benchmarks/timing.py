"""Measure comparable times: contenders run in turn, in one process and on one thread, and ratios are per round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

ROUNDS = 15
Contender = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timing:
    """CPU and wall seconds of each round of one contender."""

    cpu: tuple[float, ...]
    wall: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Median wall time."""
        return statistics.median(self.wall)


def interleaved(contenders: Mapping[str, Contender], seconds: float = 20, *, warm_up: bool = True) -> dict[str, Timing]:
    """Run every contender once per round, in rotating order, after a round of warm-up that is ignored.

    There are 1 to 15 rounds: another one runs if it is expected to end within `seconds`.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    wall: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    spent = 0.0
    try:
        for turn in range(0 if warm_up else 1, ROUNDS + 1):
            start = time.perf_counter()
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                cpu_start, wall_start = time.process_time(), time.perf_counter()
                contenders[name]()
                if turn:
                    cpu[name].append(time.process_time() - cpu_start)
                    wall[name].append(time.perf_counter() - wall_start)
            spent += time.perf_counter() - start if turn else 0
            if turn and spent * (turn + 1) / turn > seconds:
                break
    finally:
        torch.set_num_threads(threads)
    return {name: Timing(tuple(cpu[name]), tuple(wall[name])) for name in names}


def ratio(timing: Timing, baseline: Timing) -> float:
    """Return the median over the rounds of the CPU time divided by the baseline's CPU time in the same round."""
    return statistics.median(a / b for a, b in zip(timing.cpu, baseline.cpu, strict=True))


def wall_ratio(timing: Timing, baseline: Timing) -> float:
    """Return the median over the rounds of the wall time divided by the baseline's wall time in the same round."""
    return statistics.median(a / b for a, b in zip(timing.wall, baseline.wall, strict=True))


def verdict(measured: float, target: float | None) -> str:
    """Return "<= 1.05 holds" or "<= 1.05 MISSED", or "" without a target."""
    if target is None:
        return ""
    return f"<= {target:.2f} {'holds' if measured <= target else 'MISSED'}"
