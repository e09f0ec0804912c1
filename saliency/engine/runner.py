"""Many passes of one model on variants of one image, in chunks of the fastest size that fits into memory."""

from __future__ import annotations

import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ..attribution.options import Budget, Chunk, OnInterrupt, Precision, RunStats, Stopped
from ..attribution.resolved_target import (
    COUPLED,
    OutputRows,
    ResolvedTarget,
    output_rows,
    serial_reason,
    warn_of_coupled_images,
)
from ..errors import MethodError, TargetError
from ..hooks.model_state import is_out_of_memory, leaf, run_model
from ..hooks.rectifiers import INDEPENDENT, refuse_checkpoints
from .estimates import Estimate

MAX_CHUNK_CPU = 16
"""Larger chunks are not faster on a CPU, and take more memory."""
MAX_CHUNK_ACCELERATOR = 256

CHECK_INTERVAL = 16
"""A tolerance is checked after multiples of this many passes, so that it does not depend on the chunk size."""

BAR_DELAY = 1.0
"""Seconds of work before a progress bar appears by itself."""

_T = TypeVar("_T")

MakeInputs = Callable[[int, int], Tensor]
"""Creates the inputs (stop - start, C, H, W) of the passes `start` to `stop` - 1."""


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


def _linux_memory(file: str, field: str) -> int:
    """Return a field of a file in /proc, in bytes; 0 on other systems."""
    try:
        lines = Path("/proc", file).read_text("ascii").splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), 0)


def _rows_that_fit(rows: int, peak_before: int) -> int:
    """Return how many rows fit into half of the free memory, if so many rows grew the process since a peak in bytes.

    Linux ends a process without free memory, instead of an error that could be caught. Other systems have no limit.
    """
    growth = (_linux_memory("self/status", "VmHWM") - peak_before) // rows
    free = _linux_memory("meminfo", "MemAvailable")
    return max(rows, free // 2 // growth) if free and growth else sys.maxsize


class ChunkResult(NamedTuple):
    """The results of one chunk of passes."""

    start: int
    inputs: Tensor  # (k, C, H, W)
    scores: Tensor  # (k,)
    gradients: Tensor  # (k, C, H, W); no rows if only forwards were asked for


@dataclass(eq=False)
class PassRunner(ExitStack):
    """Runs the passes of one image: in chunks, counted, limited and interruptible.

    Used as a context, which removes the progress bar and restores the handling of Ctrl-C.

    Attributes:
        model: The model, prepared by the caller.
        x: (1, C, H, W) the image.
        batch_target: The resolved target of the batch.
        image: The image's index in the batch.
        budget: When to stop.
        chunk: The number of passes that run at once, or "auto".
        precision: As for `saliency.MultiPassAttribution`.
        progress: See there.
        on_interrupt: See there.
        label: The text of the progress bar.
        used: The number of passes so far.
        stopped: What ended the passes; "complete" until a limit is met.
        precisions: How each kind of pass is run: see `RunStats.precision`.
        least: The number of passes that a map needs: limits and interrupts wait for them.
        interrupted: Ctrl-C was pressed, so the passes end after the current chunk.
        notes: What is added to the note of `RunStats`.
    """

    model: nn.Module
    x: Tensor
    batch_target: ResolvedTarget
    image: int
    budget: Budget
    _: KW_ONLY
    chunk: Chunk = "auto"
    precision: Precision = "exact"
    progress: bool | None = None
    on_interrupt: OnInterrupt = "raise"
    label: str = ""
    used: int = 0
    stopped: Stopped = "complete"
    least: int = 1
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)
    precisions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self._bar: Any = None
        self._began = time.perf_counter()
        self._next_check = 2 * CHECK_INTERVAL  # the samples from which a tolerance is checked again
        device = self.x.device.type
        dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        self._autocast: dict[str, Any] = {"device_type": device, "dtype": dtype, "enabled": enabled}

    def __enter__(self) -> PassRunner:
        if self.on_interrupt == "return" and threading.current_thread() is threading.main_thread():
            self.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, self._interrupt))
        return self

    def _interrupt(self, number: int, frame: object) -> None:
        """End after the current chunk; a second Ctrl-C does not wait for it."""
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True

    @property
    def effort(self) -> RunStats:
        """What was spent so far."""
        seconds = time.perf_counter() - self._began
        precisions = [f"{precision} ({kind})" for kind, precision in self.precisions.items()]
        if len(set(self.precisions.values())) < 2:
            precisions = list(self.precisions.values())[:1] or ["exact"]
        return RunStats(self.used, seconds, self.stopped, "; ".join(precisions), "; ".join(self.notes))

    def target(self, count: int) -> ResolvedTarget:
        """Return the target for an output of `count` passes of the image."""
        return self.batch_target.rows(self.image, count, lambda: self._rows)

    @cached_property
    def _rows(self) -> OutputRows:
        return output_rows(self.model, self.x)

    @cached_property
    def _is_single(self) -> bool:
        """Whether passes must run one by one."""
        with torch.no_grad(), torch.autocast(**self._autocast):
            reason = serial_reason(self.batch_target.target, self.model, self.x, lambda: self._rows)
        if reason:
            self.notes.append(reason)
        if reason == COUPLED and self.batch_target.images > 1:
            warn_of_coupled_images()
        return bool(reason)

    def _extend_bar(self, passes: int) -> None:
        if self._bar is not None:
            self._bar.total += passes
            return
        from tqdm.auto import tqdm

        shown = self.progress
        if shown is None:
            in_notebook = "ipykernel" in sys.modules and find_spec("ipywidgets") is not None
            shown = in_notebook or sys.stderr.isatty()
        delay = 0 if self.progress else BAR_DELAY
        style: dict[str, Any] = {"unit": "pass", "leave": False, "dynamic_ncols": True}
        self._bar = tqdm(desc=self.label, total=passes, disable=not shown, delay=delay, **style)
        self.callback(self._bar.close)

    def forwards(self, make: MakeInputs, count: int) -> Iterator[ChunkResult]:
        """Yield the scores of `count` inputs, chunk by chunk.

        Args:
            make: Creates the inputs from `start` to `stop`. It may be called again for the same numbers, for example
                after memory ran out, and must return the same inputs. They are moved to the image's device and type.
            count: The number of inputs.

        Raises:
            MethodError: `make` does not return one input of the image's shape per pass.
        """
        return self._passes(make, count, backward=False)

    def gradients(self, make: MakeInputs, count: int) -> Iterator[ChunkResult]:
        """Yield the scores and the gradients at `count` inputs, chunk by chunk. See `forwards`.

        Raises:
            MethodError: As for `forwards`.
            TargetError: The score has no gradient, or does not depend on the input.
        """
        return self._passes(make, count, backward=True)

    def _passes(self, make: MakeInputs, count: int, *, backward: bool) -> Iterator[ChunkResult]:
        model, kind = self.model, "gradient" if backward else "forward"
        if self.precision != "exact":
            from .fast_copy import faster_model

            model, self.precisions[f"{kind}s"] = faster_model(self.model, self.x, self.precision, backward=backward)

        def compute(start: int, stop: int) -> ChunkResult:
            inputs = self._inputs(make, start, stop)
            at = leaf(inputs) if backward else inputs
            # Not inference_mode: neither worker threads of the model nor what it caches could use such tensors.
            with torch.set_grad_enabled(backward):
                scores = self.target(len(inputs))(run_model(model, at))
                gradients = gradients_at(scores, [at])[0] if backward else None
            return ChunkResult(start, inputs, scores.detach(), inputs[:0] if gradients is None else gradients)

        yield from self.chunks(compute, count, kind)

    def _inputs(self, make: MakeInputs, start: int, stop: int) -> Tensor:
        with torch.no_grad(), no_autocast(self.x):
            inputs: object = make(start, stop)
            expected = (stop - start, *self.x.shape[1:])
            if not isinstance(inputs, Tensor) or inputs.shape != expected:
                came = f"shape {tuple(inputs.shape)}" if isinstance(inputs, Tensor) else type(inputs).__name__
                raise MethodError(
                    f"the inputs of passes {start} to {stop - 1}: expected a tensor {expected}, got {came}"
                )
            return inputs.to(self.x)

    def chunks(self, compute: Callable[[int, int], _T], count: int, kind: str) -> Iterator[_T]:
        """Yield the results of `compute(start, stop)` for the passes 0 to `count` - 1, until a limit is met.

        Args:
            compute: Runs the passes from `start` to `stop`. It may be called again with a smaller chunk.
            count: The number of passes.
            kind: The kind of pass. The fastest chunk size is remembered for each kind.
        """
        tuner = chunk_tuner_for(self.model, (kind, self.precision), self.x)
        peak, largest, fits = _linux_memory("self/status", "VmHWM"), 0, sys.maxsize
        limit = self.budget.passes
        most = count if limit is None else min(count, limit - self.used)
        self._extend_bar(most)
        at = 0
        while at < most and not self._is_over(at):
            fastest = min(tuner.size(), fits) if self.chunk == "auto" else self.chunk
            size = self._size(min(fastest, most - at), at)
            began = time.perf_counter()
            try:
                with torch.enable_grad(), torch.autocast(**self._autocast):
                    result = compute(at, at + size)
                if self.x.is_cuda:  # only a finished chunk can be timed, or be known to fit into memory
                    torch.cuda.synchronize(self.x.device)
            except KeyboardInterrupt:
                if self.on_interrupt != "return" or self.used < self.least:
                    raise
                self.interrupted, self.stopped = True, "interrupt"
                return
            except (RuntimeError, MemoryError) as error:
                if size == 1 or not is_out_of_memory(error):
                    raise
                result = None
            if result is None:  # outside of the handler, whose traceback holds on to the memory
                tuner.too_large(size)
                if self.chunk != "auto":
                    self.chunk = size // 2
                torch.cuda.empty_cache()
                continue
            tuner.record(size, time.perf_counter() - began)
            if size > largest:
                largest, fits = size, _rows_that_fit(size, peak)
            at += size
            self.used += size
            self._bar.update(size)
            yield result
        if at >= most and most < count:
            self.stopped = "passes"

    def _size(self, wanted: int, at: int) -> int:
        if wanted > 1 and self._is_single:
            return 1
        return wanted if self.budget.tolerance is None else min(wanted, CHECK_INTERVAL - at % CHECK_INTERVAL)

    def _is_over(self, at: int) -> bool:
        if self.used < self.least:
            return False
        seconds = self.budget.seconds
        if self.interrupted:
            self.stopped = "interrupt"
        elif at and seconds is not None and time.perf_counter() - self._began >= seconds:
            self.stopped = "seconds"
        return self.stopped in ("interrupt", "seconds")

    def until_precise(self, estimate: Estimate, results: Iterator[_T]) -> Iterator[_T]:
        """Yield results, which the caller adds to an estimate, until it meets the tolerance."""
        for result in results:
            yield result
            if self.enough(estimate):
                return

    def enough(self, estimate: Estimate) -> bool:
        """Return whether an estimate meets the tolerance, which ends the passes.

        A check takes longer the more samples there are, so the next one waits for a sixteenth more.
        """
        tolerance = self.budget.tolerance
        if tolerance is None or estimate.count < self._next_check or estimate.count % CHECK_INTERVAL:
            return False
        self._next_check = estimate.count + max(1, estimate.count // 16)
        if estimate.relative_error > tolerance:
            return False
        self.stopped = "tolerance"
        return True


def no_autocast(x: Tensor) -> torch.autocast:
    """Return a context for arithmetic of a method: the caller's autocast is for the model."""
    return torch.autocast(x.device.type, enabled=False)


def gradients_at(
    scores: Tensor, at: Sequence[Tensor] | Sequence[GradientEdge], *, keep_graph: bool = False
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the sum of some scores at the input, which comes first, and elsewhere.

    Raises:
        TargetError: The scores have no gradient at the input.
    """
    if not scores.requires_grad:
        raise TargetError(
            "the score has no gradient: the target or the model detaches it, or takes an argmax or a number of it"
        )
    try:
        gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
            scores.sum(), at, retain_graph=keep_graph, allow_unused=True
        )
    except RuntimeError:
        refuse_checkpoints(scores)
        raise
    if gradients[0] is None:
        raise TargetError(INDEPENDENT)
    return gradients
