"""Chunk size, budget and progress of methods with many passes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from typing import Any, Protocol

from torch import Tensor

from ..hooks.call import bound, current_call
from .explanation import BatchAttribution
from .options import Stopped

Partial = Callable[[], BatchAttribution | None]
"""Returns the result of the passes so far, in a call with one image and one target; None if there is none yet."""
Listener = Callable[[float, Partial], None]
"""Called between the chunks of passes with the share that is done, 0 to 1, and the result so far. It may raise."""

CHUNK_CPU, CHUNK_FORWARD_CPU, CHUNK_WINDOW_CPU, CHUNK_ACCELERATOR = 4 * 224**2, 2 * 224**2, 16 * 224**2, 64 * 224**2
"""Pixels of an automatic chunk. They are fixed, so that the same call gives the same bits.

Larger chunks are not reliably faster on a CPU: glibc maps blocks above 32 MiB, such as an activation of 16 images of
resnet50, anew at each pass, and the system clears their pages. That took 86 of 323 ms per pass, and none after
`keep_memory`. Chunks that follow from the largest tensor of the model (8 for resnet50) gained at most 4 %.
Forwards without gradients free each activation at once, and glibc returns what exceeds `keep_small_heap`. RISE on
EfficientNet-Lite0 takes 3.0 s with chunks of 2, and 3.3 to 4.9 s with chunks of 4. Forwards within windows compute a
part of each activation: Occlusion takes 1.77 s with chunks of 16, and 2.23 s with chunks of 4.
"""
CHUNK_BYTES_CPU = 2**24
"""Bytes of the largest activation of a chunk that runs only the last layers of a model.

A pass from layer3 of resnet50 on takes 16.1 ms in chunks of 16 and 20.7 ms in chunks of 4. If the activation is larger,
as after the first blocks of EfficientNet-Lite0 or in ViT-B, chunks of 16 take up to 30 % longer than chunks of 4.
"""
MAX_CHUNK_CPU, MAX_CHUNK_ACCELERATOR = 16, 256
"""Largest automatic number of passes of a chunk, for small images."""

BAR_DELAY = 1.0
"""Delay in seconds before an automatic progress bar appears."""

CHECK_INTERVAL = 16
"""A tolerance is checked after multiples of this many passes, so that it does not depend on the chunk size."""


class Sampled(Protocol):
    """Estimate whose number of samples and error a budget reads."""

    count: int

    @property
    def relative_error(self) -> float:
        """The root mean square of the errors over the root mean square of the means."""


class Budget:
    """Limits of the passes of one image, and how much of them is used. The first limit that is met ends the passes.

    Args:
        passes: The maximum number of passes; None for any number.
        seconds: The maximum time in seconds; None for any time.
        tolerance: The relative error of an estimate that is small enough; None for none.
        spent: The time in seconds that the image took before.

    Attributes:
        used: The number of passes so far.
        stopped: The reason why the passes ended; "complete" until a limit is met.
    """

    def __init__(
        self, passes: int | None = None, seconds: float | None = None, tolerance: float | None = None, spent: float = 0
    ) -> None:
        self.passes, self.seconds, self.tolerance = passes, seconds, tolerance
        self.stopped: Stopped = "complete"
        self.used = 0
        self._began = time.perf_counter() - spent
        self._next_check = 2 * CHECK_INTERVAL  # the number of samples at which the tolerance is checked next

    @property
    def elapsed(self) -> float:
        """The time so far in seconds."""
        return time.perf_counter() - self._began

    def is_over(self) -> bool:
        """Return whether the time is over."""
        is_over = self.seconds is not None and self.elapsed >= self.seconds
        if is_over:
            self.stopped = "seconds"
        return is_over

    def is_met(self, estimate: Sampled) -> bool:
        """Return whether an estimate meets the tolerance.

        A check takes longer with more samples, so the next check waits until there are a sixteenth more.
        """
        if self.tolerance is None or estimate.count < self._next_check or estimate.count % CHECK_INTERVAL:
            return False
        self._next_check = estimate.count + max(1, estimate.count // 16)
        if estimate.relative_error > self.tolerance:
            return False
        self.stopped = "tolerance"
        return True

    def fitting(self, size: int, start: int, least: int) -> int:
        """Return how many passes can run before a limit is checked again.

        Args:
            size: The largest number.
            start: The number of the first pass.
            least: The number of passes that run regardless of the time.
        """
        if self.tolerance is not None:
            size = min(size, CHECK_INTERVAL - start % CHECK_INTERVAL)
        if self.seconds is not None:
            elapsed = max(self.elapsed, 1e-9)
            size = min(size, max(1, least - start, int((self.seconds - elapsed) * self.used / elapsed)))
        return size

    def affordable(self, run: Callable[[int], object], most: int) -> int:
        """Return how many steps fit into the remaining time, from trials that take about a tenth of it.

        Args:
            run: Runs a number of steps, regardless of the limits.
            most: The number of steps without a time limit. The result is at most that, and at least two, or one if
                `most` is one.
        """
        if self.seconds is None:
            return most
        began, steps, passes = self.elapsed, min(2, most), self.passes
        self.passes = None
        for trial in count():
            start = self.elapsed
            run(steps)
            now = self.elapsed
            # The first trial is warm-up: repeat it, unless it took too long.
            if now - began > self.seconds / (8 if trial else 2) or (trial and 2 * steps > most):
                break
            steps *= 2 if trial else 1
        self.passes = passes
        return min(most, max(2, int((self.seconds - now) * steps / max(now - start, 1e-9))))


class PassProgress:
    """Progress of the passes of one image: a bar, and calls of the listener of the call.

    Args:
        label: The text of the bar.
        is_shown: As for `progress_bar`.
        budget: Counts the passes.

    Attributes:
        listener: The listener of the call, or None.
    """

    def __init__(self, label: str, is_shown: bool | None, budget: Budget) -> None:
        self.listener: Listener | None = current_call().listener
        self._label, self._is_shown, self._budget = label, is_shown, budget
        self._bar: Any = None

    def extend(self, passes: int) -> None:
        """Add passes to the total."""
        if self._bar is None:
            self._bar = progress_bar(self._label, passes, "pass", self._is_shown)
        else:
            self._bar.total += passes

    def advance(self, partial: Partial, passes: int = 0) -> None:
        """Move the bar by passes that have run, and call the listener, if there is one, with the result so far."""
        if self._bar is not None:
            self._bar.update(passes)
            if self.listener is not None:
                self.listener(self._budget.used / self._bar.total, partial)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()


def chunk_size(x: Tensor, on_cpu: int = CHUNK_CPU) -> int:
    """Return the number of passes of inputs like `x` (1, C, H, W) in a chunk, with `on_cpu` pixels on a CPU."""
    is_cpu = x.device.type == "cpu"
    pixels, most = (on_cpu, MAX_CHUNK_CPU) if is_cpu else (CHUNK_ACCELERATOR, MAX_CHUNK_ACCELERATOR)
    return max(1, min(most, pixels // x.shape[2:].numel()))


def progress_bar(label: str, total: int, unit: str, progress: bool | None) -> Any:
    """Return a progress bar. By default, terminals and notebooks show one after `BAR_DELAY`."""
    from tqdm.auto import tqdm

    delay, disable = 0 if progress else BAR_DELAY, None if progress is None else not progress
    return tqdm(desc=label, total=total, disable=disable, delay=delay, unit=unit, leave=False, dynamic_ncols=True)


def listening(listener: Listener) -> AbstractContextManager[None]:
    """Call a listener between the chunks of all passes in a block, in this thread.

    An error that it raises ends the call, and the model is left as after any other error.
    """
    return bound(listener=listener)
