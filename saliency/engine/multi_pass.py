"""Base classes of the methods that run many passes of each image, and the runner of these passes.

A subclass implements `explain_image`, which gets scores or gradients from a `PassRunner` and combines them. The base
class handles batches, limits, chunk sizes and progress. Passes run in chunks that fit into memory.
"""

from __future__ import annotations

import copy
import itertools
import math
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from ..attribution.base import Attribution
from ..attribution.explanation import BatchAttribution
from ..attribution.forward import Needs, SharedForward
from ..attribution.options import Budget, Chunk, Option, PerImage, RunStats, Stopped
from ..attribution.passes import (
    CHUNK_CPU,
    CHUNK_FORWARD_CPU,
    CHUNK_WINDOW_CPU,
    chunk_size,
    current_listener,
    listening,
    progress_bar,
)
from ..attribution.questions import Questions
from ..axes import at_least_float32
from ..errors import MethodError, TargetError
from ..hooks.call import bind_image, shown_images
from ..hooks.manager import HookManager
from ..hooks.model_state import is_out_of_memory, leaf, run_model
from ..hooks.rectifiers import INDEPENDENT, NO_GRADIENT, Coverage, differentiate
from ..validation import check_integer, check_number
from .estimates import Estimate
from .window import WindowForward

CHECK_INTERVAL = 16
"""A tolerance is checked after multiples of this many passes, so that it does not depend on the chunk size."""

MIN_WINDOWS = 16
"""With fewer windows, whole forwards are faster than the preparation of `WindowForward`."""

LEAST_SAMPLES = 4
"""Number of samples at which listeners get a first estimate."""

MOST_PASSES = 100_000
"""Limit of the passes per image if only a tolerance or a time is set."""

_T = TypeVar("_T")

MakeInputs = Callable[[int, int], Tensor]
"""Creates the inputs (stop - start, C, H, W) of the passes `start` to `stop` - 1."""


class ChunkResult(NamedTuple):
    """The results of one chunk of passes."""

    start: int
    inputs: Tensor  # (k, C, H, W)
    scores: Tensor  # (k,)
    gradients: Tensor  # (k, C, H, W); no rows if only forwards were asked for


class PassRunner(ExitStack):
    """Runner of the forward and backward passes of one image, in chunks, with limits and interrupts.

    Use it as a context manager: leaving it removes the progress bar.

    Args:
        method: The method, with its options and a prepared model.
        x: (1, C, H, W) the image.
        batch_target: The resolved target of the batch.
        image: The image's index in the batch.

    Attributes:
        x: The image.
        chunk: The number of passes that run at once.
        began: The start of the time limit, as returned by `time.perf_counter`.
        layer_forward: The forward that gave the score, if it kept the layers of `layers_for`.
        used: The number of passes so far.
        stopped: The reason why the passes ended; "complete" until a limit is met.
        least: The number of passes that a map needs; a time limit takes effect after them.
        notes: Texts that are added to the note of `RunStats`.
        partial: Returns the attribution of the passes so far, for listeners; None if there is none yet.
    """

    def __init__(self, method: MultiPassAttribution, x: Tensor, batch_target: Questions, image: int) -> None:
        super().__init__()
        self.x, self.least, self.used = x, 1, 0
        self.chunk = chunk_size(x) if method.chunk == "auto" else method.chunk
        self.stopped: Stopped = "complete"
        self.notes: list[str] = []
        self.partial: Callable[[], ImageAttribution | None] = lambda: None
        self._listener = current_listener()
        self._method, self._model, self._budget = method, method.model, method.limits()
        self._batch_target, self._image = batch_target, image
        self._bar: Any = None
        self.score = x.new_zeros(())
        self.layer_forward: SharedForward | None = None
        self.began = time.perf_counter()
        self._next_check = 2 * CHECK_INTERVAL  # the number of samples at which a tolerance is checked next
        device = x.device.type
        dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        self._autocast: dict[str, Any] = {"device_type": device, "dtype": dtype, "enabled": enabled}

    def __enter__(self) -> PassRunner:
        self.enter_context(bind_image(self._image))
        if self._listener is not None:  # the passes of a wrapped method report the progress of this one
            self.enter_context(listening(lambda *_: self._report()))
        return self

    def _report(self) -> None:
        """Call the listener, if there is one."""
        if self._listener is not None and self._bar is not None:
            self._listener(self.used / self._bar.total, self._result)

    def _result(self) -> BatchAttribution | None:
        """Return the result of the passes so far; None without one."""
        image = self.partial()
        return image and stack_images([image], self.score.reshape(-1)[:1], (self.run_stats,))

    @property
    def run_stats(self) -> RunStats:
        """The passes, the time and how the passes were run, so far."""
        seconds = time.perf_counter() - self.began
        return RunStats(self.used, seconds, self.stopped, "; ".join(dict.fromkeys(self.notes)))

    def target(self, count: int, *, mirrored: bool = False) -> Questions:
        """Return the question for an output of `count` passes of the image, mirrored from left to right or not."""
        return self._batch_target.variants(self._image, count, mirrored=mirrored)

    @cached_property
    def _is_single(self) -> bool:
        """Return whether passes must run one at a time."""
        with torch.no_grad(), torch.autocast(**self._autocast):
            reason = self._batch_target.serial_reason(self._image, self._model, self.x)
        if reason:
            self.notes.append(reason)
        return bool(reason)

    def set_chunk(self, passes: int) -> None:
        """Set the number of passes that run at once, unless the option `chunk` is set."""
        if self._method.chunk == "auto":
            self.chunk = passes

    def _extend_bar(self, passes: int) -> None:
        if self._bar is not None:
            self._bar.total += passes
            return
        method = self._method
        self._bar = progress_bar(method.name or type(method).__name__, passes, "pass", method.progress)
        self.callback(self._bar.close)

    def forwards(self, make: MakeInputs, count: int, *, local: bool = False) -> Iterator[ChunkResult]:
        """Yield the scores of `count` inputs, chunk by chunk.

        Args:
            make: Creates the inputs from `start` to `stop`. It may be called again for the same numbers, for example
                after memory ran out, and must return the same inputs. They are moved to the image's device and type.
            count: The number of inputs.
            local: Whether each input differs from the image in one window. If possible, only the part of each forward
                that depends on the window is computed; the scores are equal up to rounding.

        Raises:
            MethodError: `make` does not return one input of the image's shape per pass.
        """
        is_local = local and self.x.dim() == 4 and count >= MIN_WINDOWS
        return self._passes(make, count, backward=False, run=self._windows.of_images if is_local else None)

    @cached_property
    def _windows(self) -> WindowForward:
        windows = WindowForward(self._model, self.x)
        if windows.how == windows.part:
            self.notes.append(windows.how)
            self.set_chunk(chunk_size(self.x, CHUNK_WINDOW_CPU))
        return windows

    def gradients(self, make: MakeInputs, count: int) -> Iterator[ChunkResult]:
        """Yield the scores and the gradients at `count` inputs, chunk by chunk. See `forwards`.

        Raises:
            MethodError: As for `forwards`.
            TargetError: The score has no gradient, or does not depend on the input.
        """
        return self._passes(make, count, backward=True)

    def _passes(
        self, make: MakeInputs, count: int, *, backward: bool, run: Callable[[Tensor], Any] | None = None
    ) -> Iterator[ChunkResult]:
        def compute(start: int, stop: int) -> ChunkResult:
            inputs = self._inputs(make, start, stop)
            at = leaf(inputs) if backward else inputs
            # Not inference_mode: its tensors fail in worker threads of the model and in tensors that the model caches.
            with torch.set_grad_enabled(backward):
                scores = self.target(len(inputs))(run(at) if run else run_model(self._model, at))
                gradients = gradient_at(scores, at) if backward else inputs[:0]
            return ChunkResult(start, inputs, scores.detach(), gradients)

        is_automatic = self._method.chunk == "auto" and run is None
        largest = chunk_size(self.x, CHUNK_CPU if backward else CHUNK_FORWARD_CPU)
        yield from self.chunks(compute, count, largest if is_automatic else None)

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

    def chunks(self, compute: Callable[[int, int], _T], count: int, largest: int | None = None) -> Iterator[_T]:
        """Yield the results of `compute(start, stop)` for the passes 0 to `count` - 1, until a limit is met.

        Args:
            compute: Runs the passes from `start` to `stop`. It may be called again with a smaller chunk.
            count: The number of passes.
            largest: The largest chunk, if it is smaller than `chunk`.
        """
        limit, tolerance = self._budget.passes, self._budget.tolerance
        most = count if limit is None else min(count, limit - self.used)
        self._extend_bar(most)
        at = 0
        while at < most and not self.is_over(at):
            size = min(most - at, self.chunk, largest or self.chunk, self._in_time())
            if tolerance is not None:
                size = min(size, CHECK_INTERVAL - at % CHECK_INTERVAL)
            if size > 1 and self._is_single:
                size = 1
            try:
                with torch.enable_grad(), torch.autocast(**self._autocast):
                    result = compute(at, at + size)
                if self.x.is_cuda:  # only a finished chunk can be timed, or be known to fit into memory
                    torch.cuda.synchronize(self.x.device)
            except (RuntimeError, MemoryError) as error:
                if size == 1 or not is_out_of_memory(error):
                    raise
                result = None
            if result is None:  # outside of the handler, whose traceback keeps the memory alive
                self.chunk = size // 2
                torch.cuda.empty_cache()
                continue
            at += size
            self.used += size
            self._bar.update(size)
            yield result
            self._report()
        if at >= most and (most < count or self.used == limit):
            self.stopped = "passes"

    def is_over(self, at: int) -> bool:
        """Return whether the time limit ends the passes, of which `at` were run."""
        is_over = self.used >= self.least and at > 0 and self._left <= 0
        if is_over:
            self.stopped = "seconds"
        return is_over

    @property
    def _left(self) -> float:
        """The remaining time in seconds."""
        seconds = math.inf if self._budget.seconds is None else self._budget.seconds
        return seconds - (time.perf_counter() - self.began)

    def _in_time(self) -> int:
        """Return how many passes fit into the remaining time; at least one, and those that a map needs."""
        if self._budget.seconds is None:
            return sys.maxsize
        elapsed = max(time.perf_counter() - self.began, 1e-9)
        return max(1, self.least - self.used, int(self._left * self.used / elapsed))

    def affordable(self, run: Callable[[int], object], most: int) -> int:
        """Return how many steps fit into the remaining time, from trials that take about a tenth of it.

        Args:
            run: Runs a number of steps.
            most: The number of steps without a time limit. The result is at most that, and at least two, or one if
                `most` is one.
        """
        budget = self._budget
        if budget.seconds is None:
            return most
        began, steps = time.perf_counter(), min(2, most)
        self._budget = Budget()
        for trial in itertools.count():
            start = time.perf_counter()
            run(steps)
            now = time.perf_counter()
            # The first trial is warm-up: repeat it, unless it took too long.
            if now - began > budget.seconds / (8 if trial else 2) or (trial and 2 * steps > most):
                break
            steps *= 2 if trial else 1
        self._budget = budget
        return min(most, max(2, int(self._left * steps / max(now - start, 1e-9))))

    def in_time(self, run: Callable[[int], _T], steps: int) -> _T:
        """Return the result of `run(steps)`, with fewer steps if more do not fit into the remaining time.

        The time limit then ends no pass, since the first steps of a path alone would be misleading.
        """
        fitting = self.affordable(run, steps)
        if fitting < steps:
            self.stopped = "seconds"
            self.notes.append(f"{fitting} of {steps} steps fit into the time")
        if self._budget.seconds is not None:
            self._budget, self.least = Budget(), self.used + 1
        return run(fitting)

    def until_precise(
        self, estimate: Estimate, results: Iterator[_T], partial: Callable[[], ImageAttribution | None] | None = None
    ) -> Iterator[_T]:
        """Yield results, which the caller adds to an estimate, until the estimate meets the tolerance.

        Args:
            estimate: The estimate.
            results: The results.
            partial: Returns the attribution of the estimate so far; by default its mean.
        """
        convert = partial or (lambda: from_estimate(estimate, at_least_float32(self.x)))
        self.partial = lambda: convert() if estimate.count >= LEAST_SAMPLES else None
        for result in results:
            yield result
            if self.enough(estimate):
                return

    def enough(self, estimate: Estimate) -> bool:
        """Return whether an estimate meets the tolerance, which ends the passes.

        A check takes longer with more samples, so the next check waits until there are a sixteenth more.
        """
        tolerance = self._budget.tolerance
        if tolerance is None or estimate.count < self._next_check or estimate.count % CHECK_INTERVAL:
            return False
        self._next_check = estimate.count + max(1, estimate.count // 16)
        if estimate.relative_error > tolerance:
            return False
        self.stopped = "tolerance"
        return True


def no_autocast(x: Tensor) -> torch.autocast:
    """Return a context without autocast for the arithmetic of a method. The caller's autocast is for the model only."""
    return torch.autocast(x.device.type, enabled=False)


def gradient_at(scores: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of the summed scores at the input. Raises TargetError if they have none there."""
    if not scores.requires_grad:
        raise TargetError(NO_GRADIENT)
    (gradient,) = differentiate(scores.sum(), [x])
    if gradient is None:
        raise TargetError(INDEPENDENT)
    return gradient


class ImageAttribution(NamedTuple):
    """Attribution of one image."""

    values: Tensor  # (C, H, W) at the input or (1, h, w) at a layer
    error: Tensor | None = None  # of the same shape
    agreement: float | Sequence[float] | None = None  # of all channels, or of each
    residual: float | None = None
    layer: str | None = None
    coverage: Coverage | None = None


def check_chunk(option: str, value: object) -> Chunk:
    """Return the checked option `chunk`. Raises MethodError if it is neither "auto" nor a number of passes."""
    return "auto" if value == "auto" else check_integer(option, value, hint=', or "auto"')


class MultiPassAttribution(Attribution):
    """Base of the methods that run many passes of each image, image by image.

    The options change the speed, the rounding and the random draws, but not the estimated quantity.

    Args:
        chunk: The number of passes that run at once; "auto" chooses it by the device and the size of the image.
            Chunks of different sizes round differently. For bfloat16, call the method in `torch.autocast`.
        progress: Whether a progress bar is drawn; None draws one on a terminal after a second.
        seed: The seed of all random draws of a call. Every image gets the same draws.
    """

    per_image: ClassVar[tuple[str, ...]] = ("*",)

    chunk: Option[Chunk] = Option("auto", check_chunk)
    progress: Option[bool | None] = Option(None)
    seed: Option[int] = Option(0, check_integer, least=None)

    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        """Explain the images of a batch one by one."""
        images: list[ImageAttribution] = []
        stats: list[RunStats] = []
        with HookManager(), torch.no_grad():  # a separate manager: hooks of an outer call do not act on this one
            began = time.perf_counter()
            forward = SharedForward(self.model, x, Needs("none", layers=self.layers_for(x, target)))
            scores = target(forward.output)
            spent = (time.perf_counter() - began) / len(x)
            for image in range(len(x)):
                method = self._for_image(shown_images(x)[image])
                with PassRunner(method, x[image : image + 1], target, image) as passes, no_autocast(x):
                    passes.began -= spent
                    passes.score = scores[image]
                    passes.layer_forward = forward if forward.layers else None
                    images.append(method.explain_image(passes, scores[image]))
                    stats.append(passes.run_stats)
        return stack_images(images, scores, tuple(stats))

    def layers_for(self, x: Tensor, target: Questions) -> tuple[str, ...]:
        """Return the names of the layers to keep from the forward of the batch; none by default."""
        return ()

    def _for_image(self, image: int) -> Self:
        """Return the method with the options of one image; the method itself if all images have the same."""
        method = copy.copy(self)
        vars(method).update({name: own[image] for name, own in vars(self).items() if isinstance(own, PerImage)})
        return method

    def limits(self) -> Budget:
        """Return the limits per image; none by default."""
        return Budget()

    @abstractmethod
    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """Explain one image. This is the only method that a subclass must implement.

        Gradients are disabled; `passes.gradients` enables them.

        Args:
            passes: Runs variants of the image `passes.x` (1, C, H, W). Passes are numbered 0, 1, 2, ... A chunk is the
                passes that run at once. Results must depend on the number of a pass, not on its chunk.
            score: () the score of the image itself.
        """


class TimedAttribution(MultiPassAttribution):
    """Base of the methods that can run fewer passes to meet a time limit.

    Args:
        seconds: The maximum time per image, in seconds. The method runs as many steps, channels or other passes as fit.
            `run_stats` reports passes that were left out.
    """

    draft_options: ClassVar[Mapping[str, Any]] = {"seconds": 1.0}

    seconds: Option[float | None] = Option(None, check_number, above=0)

    def limits(self) -> Budget:
        """Return the limits that were set."""
        return Budget(seconds=self.seconds)


class SteppedAttribution(TimedAttribution):
    """Base of the methods that take a number of steps, which must be known before the first one.

    Args:
        steps: The number of steps; with `seconds`, as many of them as fit.
    """

    steps: Option[int] = Option(50, check_integer)

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """Explain one image in as many steps as fit into the time."""

        def run(steps: int) -> ImageAttribution:
            shorter = copy.copy(self)
            shorter.steps = steps
            shorter.__post_init__()
            return shorter.explain_steps(passes, score)

        return passes.in_time(run, self.steps)

    @abstractmethod
    def explain_steps(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """Explain one image in `self.steps` steps. See `MultiPassAttribution.explain_image`."""


class SampledAttribution(TimedAttribution):
    """Base of the methods that draw samples, and can stop after any number of them.

    The first limit that is met ends the sampling.

    Args:
        passes: The maximum number of passes per image; by default the method's own number, or 100 000 if a tolerance or
            a time is set.
        seconds: The maximum time per image, in seconds.
        tolerance: The relative error at which sampling stops: the root mean square of the standard errors, divided by
            the root mean square of the values.
    """

    passes: Option[int | None] = Option(None, check_integer)
    tolerance: Option[float | None] = Option(None, check_number, above=0)
    default_passes: ClassVar[int] = 50
    """The number of passes if no limit is set."""
    draft_options: ClassVar[Mapping[str, Any]] = {}

    def limits(self) -> Budget:
        """Return the limits that were set."""
        return Budget(self.passes, self.seconds, self.tolerance)

    @property
    def most_passes(self) -> int:
        """The largest number of passes of an image."""
        return self.passes or (self.default_passes if self.limits() == Budget() else MOST_PASSES)


def from_estimate(estimate: Estimate, like: Tensor, layer: str | None = None) -> ImageAttribution:
    """Return the mean and the standard error of an estimate as an attribution, in the type of `like`."""
    error = None if estimate.error is None else estimate.error.to(like.dtype)
    return ImageAttribution(estimate.mean.to(like.dtype), error, estimate.agreement, layer=layer)


def stack_images(images: Sequence[Any], scores: Tensor, stats: tuple[RunStats, ...]) -> BatchAttribution:
    """Stack the attributions of single images into the attribution of a batch."""
    for image in images:
        if not isinstance(image, ImageAttribution) or image.values.dim() not in (3, 4):
            is_other = not isinstance(image, ImageAttribution)
            got = type(image).__name__ if is_other else f"values {tuple(image.values.shape)}"
            expected = "saliency.ImageAttribution(values) with values (C, H, W), or (1, h, w) at a layer"
            raise MethodError(f"explain_image returned {got}; expected {expected}")
    values, errors = torch.stack([image.values for image in images]), [image.error for image in images]
    evidence = {
        "coverage": images[0].coverage,
        "residual": _row([image.residual for image in images], scores),
        "error": None if any(own is None for own in errors) else torch.stack(errors),
        "agreement": _row([image.agreement for image in images], scores),
        "run_stats": stats,
    }
    return BatchAttribution(values, scores, images[0].layer, evidence)


def _row(numbers: Sequence[float | Sequence[float] | None], like: Tensor) -> Tensor | None:
    known = [number for number in numbers if number is not None]
    return torch.tensor(known, dtype=like.dtype, device=like.device) if len(known) == len(numbers) else None
