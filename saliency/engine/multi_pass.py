"""Methods that make many passes of one image: what they have in common.

A subclass writes `explain_image`, which asks the `PassRunner` for scores or gradients and adds them up. Batches,
limits, chunk sizes, precision, progress and interrupts are handled by the base class.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from ..attribution.base import Attribution, BatchAttribution
from ..attribution.options import Budget, Chunk, EngineOptions, RunStats, SamplingOptions
from ..attribution.resolved_target import ResolvedTarget
from ..errors import MethodError
from ..hooks.manager import HookManager
from ..hooks.model_state import run_model
from ..validation import check_choice, is_whole
from .estimates import Estimate
from .runner import PassRunner, no_autocast

MOST_PASSES = 100_000
"""Where a tolerance or a time ends the work, it ends here at the latest."""


class ImageAttribution(NamedTuple):
    """What a method found on one image."""

    values: Tensor  # (C, H, W) at the input or (1, h, w) at a layer
    error: Tensor | None = None  # as the values
    agreement: float | None = None
    residual: float | None = None
    layer: str | None = None


class MultiPassAttribution(Attribution):
    """A method that makes many passes of each image, one image after the other.

    Args:
        model: As for every method.
        **running: See `saliency.attribution.options.EngineOptions`.
    """

    def __init__(self, model: nn.Module, **running: Unpack[EngineOptions]) -> None:
        super().__init__(model, preprocess=running.get("preprocess"), categories=running.get("categories"))
        self.precision = check_choice("precision", running.get("precision", "exact"), ("exact", "fast", "bf16"))
        self.progress = running.get("progress")
        self.on_interrupt = check_choice("on_interrupt", running.get("on_interrupt", "raise"), ("raise", "return"))
        chunk, seed = running.get("chunk", "auto"), running.get("seed", 0)
        if chunk != "auto" and not is_whole(chunk):
            raise MethodError(f'chunk={chunk!r} is neither "auto" nor a whole number of at least 1')
        if not is_whole(seed, least=None):
            raise MethodError(f"seed={seed!r} is not a whole number")
        self.chunk: Chunk = "auto" if chunk == "auto" else int(chunk)
        self.seed = int(seed)
        unknown = sorted(set(running) - set(self.parameters()))
        if unknown:
            raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {unknown[0]!r}")

    def explain(self, x: Tensor, target: ResolvedTarget) -> BatchAttribution:
        """The findings of all images, put together."""
        # What another call does to the model that this one is made in is not done to this one.
        with HookManager():
            return self._explained(x, target)

    def _explained(self, x: Tensor, target: ResolvedTarget) -> BatchAttribution:
        with torch.no_grad():
            scores = target(run_model(self.model, x))
        found: list[ImageAttribution] = []
        efforts: list[RunStats] = []
        interrupted = False
        for image in range(len(x)):
            with self.passes_of(x[image : image + 1], target, image) as passes, torch.no_grad(), no_autocast(x):
                passes.interrupted = passes.interrupted or interrupted  # one Ctrl-C is for all images
                found.append(self.explain_image(passes, scores[image]))
                efforts.append(passes.effort)
                interrupted = passes.interrupted
        return stack_images(found, scores, tuple(efforts))

    def passes_of(self, x: Tensor, target: ResolvedTarget, image: int) -> PassRunner:
        """The passes of one image (1, C, H, W) of a batch, under this method's options."""
        return PassRunner(
            self.model,
            x,
            target,
            image,
            self.limits(),
            chunk=self.chunk,
            precision=self.precision,
            progress=self.progress,
            on_interrupt=self.on_interrupt,
            label=self.name or type(self).__name__,
        )

    def limits(self) -> Budget:
        """When the work on an image ends before the method is through; by default not at all."""
        return Budget()

    @abstractmethod
    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """What the method finds on one image: the only thing that it writes.

        Gradients are off; `passes` turns them on where it computes them.

        Args:
            passes: The image `passes.x` (1, C, H, W), and the means to run variants of it.
            score: () the score of the image as it is.
        """


class SampledAttribution(MultiPassAttribution):
    """A method that draws samples, and may stop after any number of them.

    Args:
        model: As for every method.
        **sampling: See `saliency.attribution.options.SamplingOptions`.
    """

    samples: ClassVar[int] = 50
    """The passes that are made where no limit is set."""

    def __init__(self, model: nn.Module, **sampling: Unpack[SamplingOptions]) -> None:
        limits = Budget(sampling.get("passes"), sampling.get("seconds"), sampling.get("tolerance"))
        super().__init__(model, **sampling)  # type: ignore[misc] # a Sampling is a Running
        self.passes, self.seconds, self.tolerance = limits.passes, limits.seconds, limits.tolerance

    def limits(self) -> Budget:
        """The limits that were set; where only a tolerance or a time was, `MOST_PASSES`."""
        return Budget(self.most_passes, self.seconds, self.tolerance)

    @property
    def most_passes(self) -> int:
        """The most passes of an image."""
        if self.passes is not None:
            return self.passes
        return self.samples if self.seconds is None and self.tolerance is None else MOST_PASSES


def from_estimate(estimate: Estimate, like: Tensor, **more: object) -> ImageAttribution:
    """An estimate as a finding, in the type of `like`."""
    error = estimate.error
    return ImageAttribution(
        estimate.mean.to(like.dtype),
        None if error is None else error.to(like.dtype),
        estimate.agreement,
        **more,  # type: ignore[arg-type]
    )


def generator(seed: int, *numbers: int) -> torch.Generator:
    """A generator for one sample: the same numbers give the same draws, in whatever order and chunks they come.

    It draws on the CPU, so that every device gets the same.
    """
    mixed = seed & _MASK
    for number in numbers:
        mixed = _mixed(mixed ^ _mixed(number + 1))
    return torch.Generator().manual_seed(_mixed(mixed) >> 1)


_MASK = (1 << 64) - 1


def _mixed(state: int) -> int:
    """Steele et al.'s SplitMix64: near numbers become far ones (2014), https://doi.org/10.1145/2714064.2660195."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def stack_images(found: Sequence[ImageAttribution], scores: Tensor, efforts: tuple[RunStats, ...]) -> BatchAttribution:
    """The findings of single images as that of a batch."""
    errors = [each.error for each in found if each.error is not None]
    return BatchAttribution(
        torch.stack([each.values for each in found]),
        scores,
        layer=found[0].layer,
        residual=_row([each.residual for each in found], scores),
        error=torch.stack(errors) if len(errors) == len(found) else None,
        agreement=_row([each.agreement for each in found], scores),
        effort=efforts,
    )


def _row(numbers: Sequence[float | None], like: Tensor) -> Tensor | None:
    known = [each for each in numbers if each is not None]
    return torch.tensor(known, dtype=like.dtype, device=like.device) if len(known) == len(numbers) else None
