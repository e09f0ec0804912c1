"""Base classes of the methods that run many passes of each image.

A subclass writes `explain_image`, which asks a `PassRunner` for scores or gradients and combines them. The base class
handles batches, limits, chunk sizes, precision, progress and interrupts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, get_args

import torch
from torch import Tensor

from ..attribution.base import Attribution, BatchAttribution
from ..attribution.options import Budget, Chunk, OnInterrupt, Option, Precision, RunStats
from ..attribution.resolved_target import ResolvedTarget
from ..errors import MethodError
from ..hooks.manager import HookManager
from ..hooks.model_state import run_model
from ..hooks.rectifiers import Coverage
from ..validation import check_choice, check_integer, check_number, is_integer
from .estimates import Estimate
from .runner import PassRunner, no_autocast

MOST_PASSES = 100_000
"""Limit of the passes per image if only a tolerance or a time is set."""


class ImageAttribution(NamedTuple):
    """Attribution of one image."""

    values: Tensor  # (C, H, W) at the input or (1, h, w) at a layer
    error: Tensor | None = None  # of the same shape
    agreement: float | None = None
    residual: float | None = None
    layer: str | None = None
    coverage: Coverage | None = None


def check_chunk(option: str, value: object) -> Chunk:
    """Return the checked option `chunk`. Raises MethodError if it is neither "auto" nor a number of passes."""
    if value != "auto" and not is_integer(value):
        raise MethodError(f'{option}={value!r} is neither "auto" nor a whole number of at least 1')
    return int(value) if is_integer(value) else "auto"


class MultiPassAttribution(Attribution):
    """Base of the methods that run many passes of each image, one image after the other.

    None of the options but the seed changes the estimated quantity.

    Args:
        model: As for every method.
        chunk: The number of passes that run at once; "auto" measures the fastest number and remembers it for the
            process. Chunks of different sizes round differently, so two calls with "auto" agree to rounding only. With
            a number, calls on one machine agree bit for bit.
        precision: "exact" runs the model itself. "fast" runs a private copy with batch norms folded into convolutions
            and channels last in memory (equal to about 1 %). "bf16" runs this copy in bfloat16, for passes without
            gradients; others run "fast". Both are timed on the first passes, and not used if they are slower.
        progress: Whether a progress bar is drawn; None draws one on a terminal after a second.
        on_interrupt: "raise" propagates Ctrl-C; "return" returns what was computed so far; for images that were not
            begun, only their first chunk is computed.
        seed: The seed of all random draws of a call. Every image gets the same draws.
        preprocess: As for every method.
        categories: As for every method.
    """

    chunk: Option[Chunk] = Option("auto", check_chunk)
    precision: Option[Precision] = Option("exact", check_choice, get_args(Precision))
    progress: Option[bool | None] = Option(None)
    on_interrupt: Option[OnInterrupt] = Option("raise", check_choice, get_args(OnInterrupt))
    seed: Option[int] = Option(0, check_integer, least=None)

    def explain(self, x: Tensor, target: ResolvedTarget) -> BatchAttribution:
        """Explain the images of a batch one by one."""
        images: list[ImageAttribution] = []
        stats: list[RunStats] = []
        interrupted = False
        with HookManager(), torch.no_grad():  # a manager of its own: hooks of an outer call do not act on this one
            scores = target(run_model(self.model, x))
            for image in range(len(x)):
                with self.passes_of(x[image : image + 1], target, image) as passes, no_autocast(x):
                    passes.interrupted |= interrupted  # one Ctrl-C is for all images
                    images.append(self.explain_image(passes, scores[image]))
                    stats.append(passes.effort)
                    interrupted = passes.interrupted
        return stack_images(images, scores, tuple(stats))

    def passes_of(self, x: Tensor, target: ResolvedTarget, image: int) -> PassRunner:
        """Return the runner of one image (1, C, H, W) of a batch, with the options of this method."""
        options = {name: getattr(self, name) for name in ("chunk", "precision", "progress", "on_interrupt")}
        label = self.name or type(self).__name__
        return PassRunner(self.model, x, target, image, self.limits(), label=label, **options)

    def limits(self) -> Budget:
        """Return the limits per image; none by default."""
        return Budget()

    @abstractmethod
    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """Explain one image. This is the only method that a subclass must write.

        Gradients are off; `passes.gradients` turns them on.

        Args:
            passes: Runs variants of the image `passes.x` (1, C, H, W). Passes have the numbers 0, 1, 2, ...; a chunk is
                the passes that run at once, so results must depend on the number of a pass, and not on its chunk.
            score: () the score of the image itself.
        """


class SampledAttribution(MultiPassAttribution):
    """Base of the methods that draw samples, and can stop after any number of them.

    The first limit that is met ends the sampling.

    Args:
        model: As for every method.
        passes: The maximum number of passes per image; by default the method's own number, or 100 000 if a tolerance or
            a time is set.
        seconds: The maximum time per image, in seconds.
        tolerance: The sufficient relative error: the root mean square of the standard errors, divided by that
            of the values.
        **options: As for `MultiPassAttribution`.
    """

    passes: Option[int | None] = Option(None, check_integer)
    seconds: Option[float | None] = Option(None, check_number, above=0)
    tolerance: Option[float | None] = Option(None, check_number, above=0)
    samples: ClassVar[int] = 50
    """The number of passes if no limit is set."""

    def limits(self) -> Budget:
        """Return the limits that were set."""
        return Budget(self.passes, self.seconds, self.tolerance)

    @property
    def most_passes(self) -> int:
        """The largest number of passes of an image."""
        if self.passes is not None:
            return self.passes
        return self.samples if self.seconds is None and self.tolerance is None else MOST_PASSES


def from_estimate(estimate: Estimate, like: Tensor, layer: str | None = None) -> ImageAttribution:
    """Return the mean and the standard error of an estimate as an attribution, in the type of `like`."""
    error = None if estimate.error is None else estimate.error.to(like.dtype)
    return ImageAttribution(estimate.mean.to(like.dtype), error, estimate.agreement, layer=layer)


def generator(seed: int, *numbers: int) -> torch.Generator:
    """Return the random generator of one sample.

    The same numbers give the same draws, regardless of the order and the chunks of the samples. It draws on the CPU, so
    every device gets the same draws.

    Args:
        seed: The seed of the method.
        *numbers: The number of the sample, and of the draw within it if there are several.
    """
    mixed = seed & _MASK
    for number in numbers:
        mixed = _mixed(mixed ^ _mixed(number + 1))
    return torch.Generator().manual_seed(_mixed(mixed) >> 1)


_MASK = (1 << 64) - 1


def _mixed(state: int) -> int:
    """Hash a number by SplitMix64: Steele et al. (2014), https://doi.org/10.1145/2714064.2660195."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def stack_images(images: Sequence[ImageAttribution], scores: Tensor, stats: tuple[RunStats, ...]) -> BatchAttribution:
    """Stack the attributions of single images to that of a batch."""
    for image in images:
        if image.values.dim() != 3:
            shape = tuple(image.values.shape)
            raise MethodError(f"explain_image returned values {shape}; expected (C, H, W), or (1, h, w) at a layer")
    errors = [image.error for image in images if image.error is not None]
    return BatchAttribution(
        torch.stack([image.values for image in images]),
        scores,
        images[0].coverage,
        images[0].layer,
        residual=_row([image.residual for image in images], scores),
        error=torch.stack(errors) if len(errors) == len(images) else None,
        agreement=_row([image.agreement for image in images], scores),
        effort=stats,
    )


def _row(numbers: Sequence[float | None], like: Tensor) -> Tensor | None:
    known = [number for number in numbers if number is not None]
    return torch.tensor(known, dtype=like.dtype, device=like.device) if len(known) == len(numbers) else None
