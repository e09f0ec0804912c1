"""Many passes of one model on variants of one image, in chunks that fit the machine."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cached_property
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ..attribution.options import Budget, Chunk, OnInterrupt, Precision, RunStats, Stopped
from ..attribution.output_rows import COUPLED, OutputRows, one_by_one, output_rows, warn_of_coupling
from ..attribution.resolved_target import ResolvedTarget
from ..errors import TargetError
from ..hooks.model_state import is_out_of_memory, leaf, run_model
from ..hooks.rectifiers import INDEPENDENT, refuse_checkpoints
from .chunk_tuner import MemoryGrowth, chunk_tuner_for
from .estimates import Estimate
from .progress import Bar

CHECKED_EVERY = 16
"""A tolerance is asked after whole multiples of so many passes, so that the chunk size cannot show."""

_T = TypeVar("_T")

MakeInputs = Callable[[int, int], Tensor]
"""From the numbers of the first pass and of the one behind the last to their inputs (k, C, H, W)."""


class ChunkResult(NamedTuple):
    """A chunk of passes that were run."""

    start: int
    inputs: Tensor  # (k, C, H, W)
    scores: Tensor  # (k,)
    gradients: Tensor  # (k, C, H, W); of no rows where only forwards were asked for


class PassRunner:
    """The passes of one image: made chunk by chunk, run at the best size, counted, limited, and interruptible.

    Used as a context: leaving it ends the progress bar.

    Args:
        model: The model, borrowed by the caller.
        x: (1, C, H, W) the image.
        selection: The settled target of the batch.
        image: The image's place in the batch.
        limits: When to stop.
        chunk: A number of passes, or "auto".
        precision: See `saliency.attribution.options.EngineOptions`.
        progress: See there.
        on_interrupt: See there.
        label: What the progress bar says.
    """

    def __init__(
        self,
        model: nn.Module,
        x: Tensor,
        selection: ResolvedTarget,
        image: int,
        limits: Budget,
        *,
        chunk: Chunk = "auto",
        precision: Precision = "exact",
        progress: bool | None = None,
        on_interrupt: OnInterrupt = "raise",
        label: str = "",
    ) -> None:
        self.model, self.x = model, x
        self.limits = limits
        self.used = 0
        self.stopped: Stopped = "complete"
        self.notes: list[str] = []
        self._selection, self._image = selection, image
        self._chunk = chunk
        self._precision: Precision = precision
        self._ran: dict[str, str] = {}  # how each kind of pass was run
        self._began = time.perf_counter()
        self._bar = Bar(label, progress)
        self._on_interrupt = on_interrupt
        self.interrupted = False
        """Whether Ctrl-C was pressed: then the work ends behind the chunk under way."""
        kind = x.device.type
        self._autocast: dict[str, Any] = {
            "device_type": kind,
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
        }
        self.least = 1
        """How many passes a map takes at least: an interrupt waits for them."""
        self._undo = ExitStack()

    def __enter__(self) -> PassRunner:
        self._undo.callback(self._bar.close)
        if self._on_interrupt == "return" and threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            self._undo.callback(signal.signal, signal.SIGINT, before)
            signal.signal(signal.SIGINT, self._take_note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._undo.close()

    def _take_note(self, number: int, frame: object) -> None:
        """The first Ctrl-C ends the work behind the chunk that is under way; a second one does not wait for that."""
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True

    @property
    def effort(self) -> RunStats:
        """What was spent so far."""
        seconds = time.perf_counter() - self._began
        ran = dict.fromkeys(self._ran.values())
        said = [*ran] if len(ran) < 2 else [f"{how} ({kind})" for kind, how in self._ran.items()]
        return RunStats(self.used, seconds, self.stopped, "; ".join(said) or "exact", "; ".join(self.notes))

    def ran(self, kind: str, how: str) -> None:
        """Take note of how a kind of pass is run: see `RunStats.precision`."""
        self._ran[kind] = how

    def target(self, count: int) -> ResolvedTarget:
        """The target, for an output of `count` passes of the image."""
        return self._selection.rows(self._image, count, lambda: self._rows)

    @cached_property
    def _rows(self) -> OutputRows:
        """How the model's output divides into images: run where a chunk or a function as the target needs it."""
        with torch.no_grad(), torch.autocast(**self._autocast):
            return output_rows(self.model, self.x)

    @cached_property
    def _single(self) -> bool:
        """Whether passes must run one by one."""
        with torch.no_grad(), torch.autocast(**self._autocast):
            reason = one_by_one(self._selection.target, self.model, self.x, lambda: self._rows)
        if reason:
            self.notes.append(reason)
        if reason == COUPLED and self._selection.images > 1:
            warn_of_coupling()
        return bool(reason)

    def forwards(self, make: MakeInputs, count: int) -> Iterator[ChunkResult]:
        """The scores of `count` inputs, chunk by chunk. They are made as they are needed.

        Args:
            make: Makes the inputs from `start` to `stop`; it may be asked again for the same ones, where memory ran
                out, and has to give the same.
            count: How many inputs there are.
        """
        runner = self._runner(backward=False)

        def compute(start: int, stop: int) -> ChunkResult:
            with torch.no_grad(), no_autocast(self.x):
                inputs = make(start, stop)
            # Not inference_mode: neither worker threads of the model nor what it caches could use such tensors.
            with torch.no_grad():
                scores = self.target(len(inputs))(runner(inputs))
            return ChunkResult(start, inputs, scores.detach(), inputs[:0])

        yield from self.chunks(compute, count, "forward")

    def gradients(self, make: MakeInputs, count: int) -> Iterator[ChunkResult]:
        """The scores and the gradients at `count` inputs, chunk by chunk. See `forwards`.

        Raises:
            TargetError: The score has no gradient, or does not depend on the input.
        """
        runner = self._runner(backward=True)

        def compute(start: int, stop: int) -> ChunkResult:
            with torch.no_grad(), no_autocast(self.x):
                inputs = make(start, stop)
            at = leaf(inputs)
            scores = self.target(len(inputs))(runner(at))
            return ChunkResult(start, inputs, scores.detach(), gradient_at(scores, at))

        yield from self.chunks(compute, count, "gradient")

    def chunks(self, compute: Callable[[int, int], _T], count: int, kind: str) -> Iterator[_T]:
        """What `compute(start, stop)` gives for passes 0 to `count`, in chunks, until a limit is met.

        Args:
            compute: Runs the passes from `start` to `stop`. It may be called again with a smaller chunk.
            count: How many passes there are.
            kind: What kind of pass this is; the best size is remembered by it.
        """
        pace = chunk_tuner_for(self.model, (kind, self._precision), self.x)
        at, grown, most = 0, MemoryGrowth(), count
        if self.limits.passes is not None:
            most = min(count, self.limits.passes - self.used)
        self._bar.extend(most)
        while at < most and not self._is_over(at):
            size = self._size(pace.size() if self._chunk == "auto" else self._chunk, at, most, grown)
            start = time.perf_counter()
            try:
                with torch.enable_grad(), torch.autocast(**self._autocast):
                    made: _T | None = compute(at, at + size)
                _finish(self.x.device)
            except KeyboardInterrupt:
                if self._on_interrupt != "return" or self.used < self.least:
                    raise
                self.interrupted, self.stopped = True, "interrupt"
                return
            except (RuntimeError, MemoryError) as error:
                if size == 1 or not is_out_of_memory(error):
                    raise
                made = None
            if made is None:  # behind the handler, whose traceback holds on to the memory
                pace.too_large(size)
                if self._chunk != "auto":
                    self._chunk = size // 2
                _release(self.x.device)
                continue
            pace.record(size, time.perf_counter() - start)
            grown.record(size)
            at += size
            self.used += size
            self._bar.advance(size)
            yield made
        if at >= most and most < count:
            self.stopped = "passes"

    def enough(self, estimate: Estimate) -> bool:
        """Whether an estimate is as good as the tolerance asks; then the work is over."""
        tolerance = self.limits.tolerance
        if tolerance is None or estimate.count < 2 * CHECKED_EVERY or estimate.count % CHECKED_EVERY:
            return False
        if estimate.relative_error > tolerance:
            return False
        self.stopped = "tolerance"
        return True

    def _is_over(self, at: int) -> bool:
        if self.used < self.least:
            return False
        late = self.limits.seconds is not None and time.perf_counter() - self._began >= self.limits.seconds
        if self.interrupted:
            self.stopped = "interrupt"
        elif late and at:
            self.stopped = "seconds"
        return self.stopped in ("interrupt", "seconds")

    def _size(self, wanted: int, at: int, most: int, grown: MemoryGrowth) -> int:
        size = min(wanted, most - at)
        if size > 1 and self._single:
            return 1
        if self._chunk == "auto":
            size = min(size, grown.most())
        if self.limits.tolerance is not None:
            size = min(size, CHECKED_EVERY - at % CHECKED_EVERY)
        return size

    def _runner(self, *, backward: bool) -> Callable[[Tensor], Any]:
        if self._precision == "exact":
            return lambda inputs: run_model(self.model, inputs)
        from .fast_copy import runner

        chosen = runner(self.model, self.x, self._precision, backward=backward)
        self.ran("gradients" if backward else "forwards", chosen.note)
        return chosen


def no_autocast(x: Tensor) -> torch.autocast:
    """A context for arithmetic of our own: the caller's autocast is for the model."""
    return torch.autocast(x.device.type, enabled=False)


def gradient_at(scores: Tensor, at: Tensor | GradientEdge) -> Tensor:
    """The gradient of the sum of some scores at an input, or behind it. Raises TargetError where there is none."""
    if not scores.requires_grad:
        raise TargetError(
            "the score has no gradient: the target or the model detaches it, or takes an argmax or a number of it"
        )
    try:
        (gradient,) = torch.autograd.grad(scores.sum(), at, allow_unused=True)
    except RuntimeError:
        refuse_checkpoints(scores)
        raise
    if gradient is None:
        raise TargetError(INDEPENDENT)
    return gradient


def _finish(device: torch.device) -> None:
    """Wait for an accelerator: only what is done can be timed, and only then does a lack of memory show."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _release(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
