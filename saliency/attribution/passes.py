"""Passes of the model on variants of one image, and the base classes of the methods that run many passes.

A subclass implements `explain_image`, which gets scores or gradients from `Passes` and combines them. The base class
handles batches, limits, chunk sizes and progress. Passes run in chunks that fit into memory.
"""

from __future__ import annotations

import copy
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property, partial
from itertools import count
from typing import Any, ClassVar, NamedTuple, Self, TypedDict, TypeVar, Unpack, cast

import torch
from torch import Tensor, nn

from ..errors import MethodError, NotApplicableError, TargetError
from ..hooks.autograd_graph import INDEPENDENT, NO_GRADIENT, differentiate
from ..hooks.manager import HookManager
from ..hooks.rectifiers import Coverage
from ..io.axes import at_least_float32
from ..model.call import bind_image, bound, current_call, is_out_of_memory, leaf, run_model, shown_images
from ..model.layers import trace_layers
from ..validation import check_integer, check_number
from .base import Attribution
from .estimates import Estimate
from .explanation import BatchAttribution
from .forward import Needs, SharedForward
from .options import LARGEST_PASSES, MOST_PASSES, Chunk, Option, PerImage, RunStats, Stopped
from .questions import Questions
from .replay import TailForward
from .window import WindowForward

MIN_WINDOWS = 16
"""With fewer windows, whole forwards are faster than the preparation of `WindowForward`."""

CHUNK_CPU, CHUNK_FORWARD_CPU, CHUNK_WINDOW_CPU, CHUNK_ACCELERATOR = 4 * 224**2, 2 * 224**2, 16 * 224**2, 64 * 224**2
"""Pixels of an automatic chunk. They are fixed, so that the same call gives the same bits.

Larger chunks are not reliably faster on a CPU: glibc maps blocks above 32 MiB, such as an activation of 16 images of
resnet50, again at each pass, and the system clears their pages. That took 86 of 323 ms per pass, and none after
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


LEAST_SAMPLES = 4
"""Number of samples at which listeners get a first estimate."""

_T = TypeVar("_T")

MakeInputs = Callable[[int, int], Tensor]
"""Creates the inputs (stop - start, C, H, W) of the passes `start` to `stop` - 1."""


class ChunkResult(NamedTuple):
    """The results of one chunk of passes."""

    start: int
    scores: Tensor  # (k,)
    gradients: Tensor  # (k, C, H, W); no rows if only forwards were asked for


class Stopping(TypedDict, total=False):
    """When the passes of an image end early, and how to compute the result of the passes so far.

    Keys:
        least: The number of passes that a map needs; a time limit takes effect after them. By default 1.
        estimate: The estimate to which the caller adds each result. The passes end once it meets the tolerance.
        partial: Returns the attribution of the passes so far, for listeners; None if there is no attribution yet. By
            default the mean of the estimate, if given.
    """

    least: int
    estimate: Estimate
    partial: Callable[[], ImageAttribution | None]


class Passes(ExitStack):
    """Forward and backward passes of the model on variants of one image, in chunks, within a budget.

    Use it as a context manager: leaving it removes the progress bar.

    Args:
        model: The model, in `prepared_for_attribution`.
        x: (1, C, H, W) the image.
        target: The questions about the batch.
        image: The image's index in the batch.
        score: () the score of the image.
        chunk: The number of passes that run at once; "auto" chooses it by the device and the size of the image.
        budget: The limits; by default no limits.
        label: The text of the progress bar.
        progress: Whether a progress bar is drawn; None draws one on a terminal after a second.
        forward: The forward that gave the score, if it kept layers.

    Attributes:
        x: The image.
        budget: The limits, and the passes and the time so far.
        forward: See above.
    """

    def __init__(
        self,
        model: nn.Module,
        x: Tensor,
        target: Questions,
        image: int,
        score: Tensor,
        *,
        chunk: Chunk = "auto",
        budget: Budget | None = None,
        label: str = "",
        progress: bool | None = None,
        forward: SharedForward | None = None,
    ) -> None:
        super().__init__()
        self.x, self.budget, self.forward = x, budget or Budget(), forward
        self._model, self._target, self._image, self._score = model, target, image, score
        self._chunk, self._most = chunk, sys.maxsize  # the largest chunk that fits into memory
        self._label, self._is_shown, self._bar = label, progress, cast("Any", None)  # the bar comes with the first pass
        self._listener: Listener | None = current_call().listener
        self._partial: Callable[[], ImageAttribution | None] = lambda: None
        self._notes: list[str] = []
        self._compiled = current_call().compiled
        device = x.device.type
        # The caller's autocast. A context is not reentrant, so each use creates a new one.
        self._autocast = partial(
            torch.autocast, device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        )

    def __enter__(self) -> Self:
        for context in (bind_image(self._image), no_autocast(self.x)):
            self.enter_context(context)
        if self._listener is not None:  # the passes of a wrapped method report the progress of this one
            self.enter_context(listening(lambda *_: self.report()))
        return self

    def _result(self) -> BatchAttribution | None:
        """Return the result of the passes so far; None if there is no result yet."""
        image = self._partial()
        return image and stack_images([image], self._score.reshape(-1)[:1], (self.stats(image.notes),))

    def stats(self, notes: Sequence[str] = ()) -> RunStats:
        """Return the statistics of the passes so far, with the notes of a method."""
        note = "; ".join(dict.fromkeys([*self._notes, *notes]))
        return RunStats(self.budget.used, self.budget.elapsed, self.budget.stopped, note)

    def target(self, count: int, *, mirrored: bool = False) -> Questions:
        """Return the question for an output of `count` passes of the image, mirrored from left to right or not."""
        return self._target.variants(self._image, count, mirrored=mirrored)

    @cached_property
    def _is_single(self) -> bool:
        """Return whether passes must run one at a time."""
        with torch.no_grad(), self._autocast():
            reason = self._target.serial_reason(self._image, self._model, self.x)
        if reason:
            self._notes.append(reason)
        return bool(reason)

    def _size(self, pixels: int = CHUNK_CPU) -> int:
        """Return the size of chunks, by default with this number of pixels on a CPU."""
        return chunk_size(self.x, pixels) if self._chunk == "auto" else self._chunk

    def scores(self, make: MakeInputs, count: int, *, local: bool = False, **stopping: Unpack[Stopping]) -> Tensor:
        """Return the scores (k,) of `count` inputs; k < `count` if a limit was met. See `forwards`."""
        chunks = self.forwards(make, count, local=local, **stopping)
        return torch.cat([self._score[None][:0], *(chunk.scores for chunk in chunks)])

    def forwards(
        self, make: MakeInputs, count: int, *, local: bool = False, **stopping: Unpack[Stopping]
    ) -> Iterator[ChunkResult]:
        """Yield the scores of `count` inputs, chunk by chunk.

        Args:
            make: Creates the inputs from `start` to `stop`. It may be called again for the same numbers, for example
                after memory ran out, and must return the same inputs. They are moved to the image's device and type.
            count: The number of inputs.
            local: Whether each input differs from the image in one window. If possible, only the part of each forward
                that depends on the window is computed; the scores are equal up to rounding.
            **stopping: See `Stopping`.

        Raises:
            MethodError: `make` does not return one input of the image's shape per pass.
        """
        if local and self.x.dim() == 4 and count >= MIN_WINDOWS:
            windows = self._windows
            pixels = CHUNK_WINDOW_CPU if windows.how == windows.part else CHUNK_CPU
            return self.chunks(self._scoring(make, windows.of_images), count, self._size(pixels), **stopping)
        return self.chunks(self._scoring(make), count, self._size(CHUNK_FORWARD_CPU), **stopping)

    @cached_property
    def _windows(self) -> WindowForward:
        with self._autocast():
            windows = WindowForward(self._model, self.x)
        if windows.how == windows.part:
            self._notes.append(windows.how)
        return windows

    def gradients(
        self, make: MakeInputs, count: int, *, size: int | None = None, **stopping: Unpack[Stopping]
    ) -> Iterator[ChunkResult]:
        """Yield the scores and the gradients at `count` inputs, chunk by chunk. See `forwards`.

        Args:
            make: As for `forwards`.
            count: The number of inputs.
            size: The largest chunk, such as 1 if each input depends on the previous result.
            **stopping: See `Stopping`.

        Raises:
            MethodError: As for `forwards`.
            TargetError: The score has no gradient, or does not depend on the input.
        """
        return self.chunks(self._scoring(make, has_gradient=True), count, size, **stopping)

    def _scoring(
        self, make: MakeInputs, run: Callable[[Tensor], Any] | None = None, *, has_gradient: bool = False
    ) -> Callable[[int, int], ChunkResult]:
        """Return a function that computes the scores of the inputs that `make` creates, and their gradients."""

        def compute(start: int, stop: int) -> ChunkResult:
            with torch.no_grad(), no_autocast(self.x):
                inputs: object = make(start, stop)
                expected = (stop - start, *self.x.shape[1:])
                if not isinstance(inputs, Tensor) or inputs.shape != expected:
                    came = f"shape {tuple(inputs.shape)}" if isinstance(inputs, Tensor) else type(inputs).__name__
                    text = f"the inputs of passes {start} to {stop - 1}"
                    raise MethodError(f"{text}: expected a tensor {expected}, got {came}")
                inputs = leaf(inputs.to(self.x)) if has_gradient else inputs.to(self.x)
            compiled = None if run else self._compiled
            if compiled and (result := compiled[has_gradient](inputs, self.target(len(inputs)))):
                return ChunkResult(start, result.scores, result.values if has_gradient else inputs[:0])
            # Not inference_mode: its tensors fail in worker threads of the model and in tensors that the model caches.
            with torch.set_grad_enabled(has_gradient):
                scores = self.target(len(inputs))(run(inputs) if run else run_model(self._model, inputs))
                gradients = gradient_at(scores, inputs) if has_gradient else inputs[:0]
            return ChunkResult(start, scores.detach(), gradients)

        return compute

    def tail_scores(self, layer: str, make: MakeInputs, count: int, **stopping: Unpack[Stopping]) -> Tensor:
        """Return the scores (k,) for outputs (k, ...) of a layer that `make` creates; k < `count` after a time limit.

        Only the part of the model after the layer runs, where that is possible. It runs without the caller's autocast,
        whose rounding is often larger than the effect of one channel or location.

        Raises:
            NotApplicableError: The layer also reads other images of the call.
        """
        if current_call().caches is not None and layer in trace_layers(self._model, self.x).shared:
            problem = f'layer "{layer}" also reads other inputs, and its output for this one cannot be replaced alone'
            raise NotApplicableError(f"{problem}; pass a layer of this input only, or use grad_cam or score_cam")
        tail = TailForward(self._model, layer, self.x)
        is_part = self._chunk == "auto" and self.x.device.type == "cpu" and tail.row_bytes
        size = min(MAX_CHUNK_CPU, max(1, CHUNK_BYTES_CPU // tail.row_bytes)) if is_part else self._size()

        def compute(start: int, stop: int) -> Tensor:
            with torch.no_grad(), no_autocast(self.x):
                return self.target(stop - start)(tail(make(start, stop)))

        scores = list(self.chunks(compute, count, size, **stopping))
        self._notes.append(tail.how)
        return torch.cat(scores)

    def chunks(
        self,
        compute: Callable[[int, int], _T],
        count: int,
        size: int | None = None,
        *,
        least: int = 1,
        estimate: Estimate | None = None,
        partial: Callable[[], ImageAttribution | None] | None = None,
    ) -> Iterator[_T]:
        """Yield the results of `compute(start, stop)` for the passes 0 to `count` - 1, until a limit is met.

        Args:
            compute: Runs the passes from `start` to `stop`. It may be called again with a smaller chunk.
            count: The number of passes.
            size: The largest chunk.
            least: See `Stopping`.
            estimate: See `Stopping`.
            partial: See `Stopping`.
        """
        budget, start, size = self.budget, 0, size or self._size()
        like = at_least_float32(self.x)
        self._partial = partial or (lambda: _mean_so_far(estimate, like))
        most = count if budget.passes is None else min(count, budget.passes - budget.used)
        if self._bar is None:
            self._bar = self.enter_context(progress_bar(self._label, most, "pass", self._is_shown))
        else:
            self._bar.total += most
        while start < most and not (start >= least and budget.is_over()):
            now = budget.fitting(min(most - start, size, self._most), start, least)
            if now > 1 and self._is_single:
                now = 1
            try:
                with torch.enable_grad(), self._autocast():
                    result = compute(start, start + now)
                if self.x.is_cuda:  # only a finished chunk can be timed, and shows that it fits into memory
                    torch.cuda.synchronize(self.x.device)
            except (RuntimeError, MemoryError) as error:
                if now == 1 or not is_out_of_memory(error):
                    raise
                result = None
            if result is None:  # outside of the handler, whose traceback keeps the memory alive
                self._most = now // 2
                torch.cuda.empty_cache()
                continue
            start += now
            budget.used += now
            yield result
            if estimate is not None and budget.is_met(estimate):
                return
            self.report(now)
        if start >= most and (most < count or budget.used == budget.passes):
            budget.stopped = "passes"

    def report(self, passes: int = 0) -> None:
        """Call the listener, which may end the call, after some passes or in a long step of a method between them."""
        if self._bar is not None:
            self._bar.update(passes)
        if self._listener is not None:
            self._listener(self.budget.used / self._bar.total if self._bar is not None else 0.0, self._result)

    def in_time(self, run: Callable[[int], _T], steps: int) -> _T:
        """Return the result of `run(steps)`, with fewer steps if more do not fit into the remaining time.

        Args:
            run: Runs a number of steps. The time limit must not end its passes, because the first steps of a path alone
                would be misleading: pass the number of the passes as their `least`.
            steps: The number of steps without a time limit.
        """
        fitting = self.budget.affordable(run, steps)
        if fitting < steps:
            self.budget.stopped = "seconds"
            self._notes.append(f"{fitting} of {steps} steps fit into the time")
        return run(fitting)


def no_autocast(x: Tensor) -> torch.autocast:
    """Return a context without autocast for the arithmetic of a method. The caller's autocast is for the model only."""
    return torch.autocast(x.device.type, enabled=False)


def gradient_at(scores: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of the summed scores at the input. Raises TargetError if there is no gradient."""
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
    agreement: float | Sequence[float] | None = None  # of all channels, or of each channel
    residual: float | None = None
    layer: str | None = None
    coverage: Coverage | None = None
    notes: Sequence[str] = ()  # remarks for `RunStats`


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
    limits: ClassVar[tuple[str, ...]] = ()
    """The options that limit the passes of an image, of `Budget`."""

    chunk: Option[Chunk] = Option("auto", check_chunk)
    progress: Option[bool | None] = Option(None)
    seed: Option[int] = Option(0, check_integer, least=None)

    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        """Explain the images of a batch one by one."""
        batch, images, stats = Budget(), list[ImageAttribution](), list[RunStats]()
        per_image = {name: values for name, values in vars(self).items() if isinstance(values, PerImage)}
        with HookManager(), torch.no_grad():  # a separate manager: hooks of an outer call do not act on this one
            layers = self.layers_for(x, target)
            forward = SharedForward(self.model, x, Needs("none", layers=layers)) if layers else None
            scores = target(forward.output if forward else run_model(self.model, x))
            spent = batch.elapsed / len(x)
            for image, score in enumerate(scores):
                method = self
                if per_image:
                    method, number = copy.copy(self), shown_images(x)[image]
                    vars(method).update({name: values[number] for name, values in per_image.items()})
                with Passes(
                    self.model,
                    x[image : image + 1],
                    target,
                    image,
                    score,
                    chunk=method.chunk,
                    budget=Budget(**{name: getattr(method, name) for name in self.limits}, spent=spent),
                    label=self.name or type(self).__name__,
                    progress=method.progress,
                    forward=forward,
                ) as passes:
                    images.append(_checked(method.explain_image(passes, score)))
                    stats.append(passes.stats(images[-1].notes))
        return stack_images(images, scores, tuple(stats))

    def layers_for(self, x: Tensor, target: Questions) -> tuple[str, ...]:
        """Return the names of the layers to keep from the forward of the batch; by default no layers."""
        return ()

    @abstractmethod
    def explain_image(self, passes: Passes, score: Tensor) -> ImageAttribution:
        """Explain one image. This is the only method that a subclass must implement.

        Gradients are disabled; `passes.gradients` enables them.

        Args:
            passes: Runs variants of the image `passes.x` (1, C, H, W), and is not changed. Passes are numbered 0, 1, 2,
                ... A chunk is the passes that run at once. Results must depend on the number of a pass, not on its
                chunk.
            score: () the score of the image itself.
        """


class TimedAttribution(MultiPassAttribution):
    """Base of the methods that can run fewer passes to meet a time limit.

    Args:
        seconds: The maximum time per image, in seconds. The method runs as many steps, channels or other passes as fit.
            `run_stats` reports passes that were left out.
    """

    draft_options: ClassVar[Mapping[str, Any]] = {"seconds": 1.0}

    limits: ClassVar[tuple[str, ...]] = ("seconds",)

    seconds: Option[float | None] = Option(None, check_number, above=0)


class SampledAttribution(TimedAttribution):
    """Base of the methods that draw samples, and can stop after any number of samples.

    The first limit that is met ends the sampling.

    Args:
        passes: The maximum number of passes per image; by default the method's own number, or 100 000 if a tolerance or
            a time is set.
        seconds: The maximum time per image, in seconds.
        tolerance: The relative error at which sampling stops: the root mean square of the standard errors, divided by
            the root mean square of the values.
    """

    passes: Option[int | None] = Option(None, check_integer, most=LARGEST_PASSES)
    tolerance: Option[float | None] = Option(None, check_number, above=0)
    default_passes: ClassVar[int] = 50
    """The number of passes if no limit is set."""
    limits: ClassVar[tuple[str, ...]] = ("passes", "seconds", "tolerance")
    draft_options: ClassVar[Mapping[str, Any]] = {}

    @property
    def most_passes(self) -> int:
        """The largest number of passes of an image."""
        return self.passes or (MOST_PASSES if self.seconds or self.tolerance else self.default_passes)


def from_estimate(estimate: Estimate, like: Tensor, layer: str | None = None) -> ImageAttribution:
    """Return the mean and the standard error of an estimate as an attribution, in the type of `like`."""
    error = None if estimate.error is None else estimate.error.to(like.dtype)
    return ImageAttribution(estimate.mean.to(like.dtype), error, estimate.agreement, layer=layer, notes=estimate.notes)


def _mean_so_far(estimate: Estimate | None, like: Tensor) -> ImageAttribution | None:
    """Return an estimate as an attribution, or None if it has few samples."""
    return None if estimate is None or estimate.count < LEAST_SAMPLES else from_estimate(estimate, like)


def stack_images(images: Sequence[ImageAttribution], scores: Tensor, stats: tuple[RunStats, ...]) -> BatchAttribution:
    """Stack the attributions of single images into the attribution of a batch."""
    values, errors, agreements, residuals, layers, coverages, _ = zip(*images, strict=True)
    evidence = {
        "coverage": coverages[0],
        "residual": _row(residuals, scores),
        "error": None if any(error is None for error in errors) else torch.stack(errors),
        "agreement": _row(agreements, scores),
        "run_stats": stats,
    }
    return BatchAttribution(torch.stack(values), scores, layers[0], evidence)


def _row(numbers: Sequence[float | Sequence[float] | None], like: Tensor) -> Tensor | None:
    return None if None in numbers else torch.tensor(numbers, dtype=like.dtype, device=like.device)


def _checked(image: object) -> ImageAttribution:
    """Return the attribution of an image. Raises MethodError if a method returned something else."""
    if isinstance(image, ImageAttribution) and image.values.dim() in (3, 4):
        return image
    got = f"values {tuple(image.values.shape)}" if isinstance(image, ImageAttribution) else type(image).__name__
    expected = "saliency.extending.ImageAttribution(values) with values (C, H, W), or (1, h, w) at a layer"
    raise MethodError(f"explain_image returned {got}; expected {expected}")


Partial = Callable[[], BatchAttribution | None]
"""Returns the result of the passes so far, of one image and one target; None if there is no result yet."""
Listener = Callable[[float, Partial], None]
"""Called between the chunks with the fraction of passes that are done, and the result so far. It may raise."""


class Budget:
    """Limits of the passes of one image, and the passes and time so far. The first limit that is met ends the passes.

    Args:
        passes: The maximum number of passes; None for no limit.
        seconds: The maximum time in seconds; None for no limit.
        tolerance: The relative error at which an estimate is precise enough; None for no tolerance.
        spent: The time in seconds that the image has taken already.

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

    def is_met(self, estimate: Estimate) -> bool:
        """Return whether an estimate meets the tolerance.

        A check takes longer with more samples, so the next check waits until there are 1/16 more samples.
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
        """Return how many steps fit into the remaining time, from trials that take about a tenth of that time.

        Args:
            run: Runs a number of steps, regardless of the limits.
            most: The number of steps without a time limit. The result is at most `most`, and at least two, or one if
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


def chunk_size(x: Tensor, on_cpu: int = CHUNK_CPU) -> int:
    """Return how many inputs like `x` (1, C, H, W) run in one chunk; on a CPU, a chunk has about `on_cpu` pixels."""
    is_cpu = x.device.type == "cpu"
    pixels, most = (on_cpu, MAX_CHUNK_CPU) if is_cpu else (CHUNK_ACCELERATOR, MAX_CHUNK_ACCELERATOR)
    return max(1, min(most, pixels // x.shape[2:].numel()))


def progress_bar(label: str, total: int, unit: str, progress: bool | None) -> Any:
    """Return a progress bar. By default, terminals and notebooks show it after `BAR_DELAY`."""
    from tqdm.auto import tqdm

    delay, disable = 0 if progress else BAR_DELAY, None if progress is None else not progress
    return tqdm(desc=label, total=total, disable=disable, delay=delay, unit=unit, leave=False, dynamic_ncols=True)


def listening(listener: Listener) -> AbstractContextManager[None]:
    """Call a listener between the chunks of all passes in a block, in this thread.

    An error that it raises ends the call, and the model is left as after any other error.
    """
    return bound(listener=listener)
