"""The parts of a picture, each hidden and shown as one: what methods over superpixels share, and the simplest one."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from ...attribution.explanation import Sign
from ...attribution.options import EngineOptions, SamplingOptions
from ...engine.estimates import Estimate, rank_correlation
from ...engine.multi_pass import ImageAttribution, MultiPassAttribution, SampledAttribution
from ...engine.runner import PassRunner
from ...errors import warn
from .fills import Filler, FillLike, as_fill
from .segments import SegmentsLike, as_segments, segmented

SUPERPIXELS = 50


class Parts:
    """One image, cut into parts that can be hidden.

    Args:
        method: The method; its `segments`, `fill` and `preprocess` say how.
        x: (1, C, H, W) the image.
    """

    def __init__(self, method: FeatureAblation | CoalitionSampling, x: Tensor) -> None:
        self._segments = segmented(x, method.segments, method.preprocess)
        self._filler = Filler(x, method.fill)
        self._like = x
        self.count = self._segments.count

    def images(self, shown: Tensor) -> Tensor:
        """The images (k, C, H, W) of which only the parts `shown`, boolean (k, M), are left."""
        return self._filler(self._segments.hidden(shown))

    def painted(self, values: Tensor) -> Tensor:
        """A map (1, H, W) in which each part's value, of (M,), is shared out evenly among its pixels."""
        return self._segments.painted(values)

    def found(self, estimate: Coalitions, score: Tensor) -> ImageAttribution:
        """An estimate as a finding, without a residual. Args: see `Coalitions`; `score` () is that of the image."""
        values, error = estimate.mean, estimate.error
        return ImageAttribution(values.to(score), None if error is None else error.to(score), estimate.agreement)


class FeatureAblation(MultiPassAttribution):
    """How much the score falls when a part of the picture is hidden, alone.

    What parts do only together, such as two eyes of which one is enough, is not seen: the values do not add up to
    anything. `KernelSHAP` and `ShapleySampling` share that out.

    Args:
        model: As for every method.
        segments: About how many superpixels there are (SLIC, by scikit-image), the (rows, columns) of a grid, a map of
            labels (H, W) in the size of the model's input, or a function from the picture (H, W, C) in 0..1 to one.
        fill: What stands where a part is hidden: a number, or one per channel, in the model's normalised space (0 is
            the mean colour of its training pictures), "mean" (the picture's own), "blur", "inpaint" (from around the
            part), or a picture (C, H, W) as the model takes it.
        **running: See `saliency.attribution.options.EngineOptions`.

    Values: (N, 1, H, W), signed, in score units per pixel: f(x) less the score without the part, shared out evenly
    among the part's pixels, so that the sum over a part is the fall in the score.

    Raises:
        MethodError: An option that makes no sense, or does not fit the image.
        TargetError: The target does not fit the model's output.

    Source: Zeiler and Fergus, "Visualizing and Understanding Convolutional Networks" (2013),
        https://arxiv.org/abs/1311.2901, with superpixels in the place of squares.
    """

    name = "feature_ablation"
    cost = f"about {SUPERPIXELS} forwards, one for each segment"
    units = "score per pixel"
    sign: ClassVar[Sign] = "signed"
    quick_options: ClassVar = {"segments": (3, 3)}

    def __init__(
        self,
        model: nn.Module,
        *,
        segments: SegmentsLike = SUPERPIXELS,
        fill: FillLike = 0.0,
        **running: Unpack[EngineOptions],
    ) -> None:
        super().__init__(model, **running)
        self.segments = as_segments(segments)
        self.fill = as_fill(fill)

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """The fall in the score for each part; parts that an interrupt kept from being hidden have 0."""
        parts = Parts(self, passes.x)
        passes.notes.append(f"{parts.count} segments")
        falls = torch.zeros(parts.count, dtype=torch.float64, device="cpu")

        def make(start: int, stop: int) -> Tensor:
            every, hidden = (torch.arange(*span, device="cpu") for span in ((parts.count,), (start, stop)))
            return parts.images(every != hidden[:, None])

        for done in passes.forwards(make, parts.count):
            falls[done.start : done.start + len(done.scores)] = (score - done.scores).cpu().double()
        return ImageAttribution(parts.painted(falls).to(passes.x))


class Solution(NamedTuple):
    """What is known of the parts so far."""

    values: Tensor  # (M,) in float64 on the CPU
    errors: Tensor | None  # as the values


def standard_errors(design: Tensor, weights: Tensor, left: Tensor, inverse: Tensor) -> Tensor:
    """The standard errors (K,) of a regression's coefficients, under any distribution of its residuals.

    White's sandwich, with each residual over the root of 1 less its leverage (HC2). That makes up for what the fit took
    from the residual, exactly so where all residuals are spread alike.

    Args:
        design: (n, K) what the scores were regressed on.
        weights: (n,) what each sample counts.
        left: (n,) the residuals.
        inverse: (K, K) the inverse of the normal equations.

    Source: MacKinnon and White, "Some Heteroskedasticity-consistent Covariance Matrix Estimators with Improved Finite
        Sample Properties" (1985), https://doi.org/10.1016/0304-4076(85)90158-7.
    """
    pulled = design @ inverse
    leverage = weights * (pulled * design).sum(1)
    residuals = left / (1 - leverage).clamp(min=1e-6).sqrt()
    return ((weights * residuals)[:, None] * pulled).square().sum(0).sqrt()


class Coalitions(Estimate):
    """The values of parts, from the scores of pictures of which only some parts are shown.

    The passes are numbered; which parts a pass shows depends on its number only. What the values are is the method's
    own: a subclass writes `shown` and `solve`.

    Args:
        parts: The image.
        score: () its score with all parts shown.
        seed: What the draws come from.
    """

    def __init__(self, parts: Parts, score: Tensor, seed: int) -> None:
        super().__init__()
        self.parts, self.seed = parts, seed
        self.full = float(score)
        self._scores: list[Tensor] = []
        self._solved: tuple[int, Solution] | None = None
        self._judged = (0, math.inf)  # at how many passes, and the relative error then

    @abstractmethod
    def shown(self, start: int, stop: int) -> Tensor:
        """Which parts the passes from `start` to `stop` show, boolean (stop - start, M)."""

    @abstractmethod
    def solve(self) -> Solution:
        """The values of the parts from the passes so far."""

    @abstractmethod
    def halves(self) -> tuple[Tensor, Tensor] | None:
        """The values (M,) twice, each from half of the samples; None for too few of them."""

    def make(self, start: int, stop: int) -> Tensor:
        """The pictures (k, C, H, W) of some passes."""
        return self.parts.images(self.shown(start, stop))

    def take(self, scores: Tensor) -> None:
        """Take in the scores (k,) of the next passes."""
        self._scores.append(scores.detach().cpu().double())
        self.count += len(scores)

    @property
    def scores(self) -> Tensor:
        """The scores of all passes so far, in float64 on the CPU."""
        self._scores = [torch.cat(self._scores)]
        return self._scores[0]

    @property
    def solution(self) -> Solution:
        """What `solve` says of the passes so far, computed once."""
        if self._solved is None or self._solved[0] != self.count:
            self._solved = (self.count, self.solve())
        return self._solved[1]

    @property
    def mean(self) -> Tensor:
        """The map (1, H, W) of the values."""
        return self.parts.painted(self.solution.values)

    @property
    def error(self) -> Tensor | None:
        """The map (1, H, W) of their standard errors."""
        errors = self.solution.errors
        return None if errors is None else self.parts.painted(errors)

    @property
    def relative_error(self) -> float:
        """As for every estimate; solved anew when a sixteenth more passes are in, and infinite until then."""
        at, error = self._judged
        if self.count == at:
            return error
        if self.count < at + at // 16:
            return math.inf
        self._judged = (self.count, super().relative_error)
        return self._judged[1]

    @property
    def agreement(self) -> float | None:
        """The rank correlation of the maps of two halves of the samples."""
        halves = self.halves()
        return None if halves is None else rank_correlation(*map(self.parts.painted, halves))


class CoalitionSampling(SampledAttribution):
    """A method that shows some parts of the picture at a time, in many combinations.

    Args:
        model: As for every method.
        segments: As for `FeatureAblation`.
        fill: As for `FeatureAblation`.
        **sampling: See `saliency.attribution.options.SamplingOptions`.
    """

    units = "score per pixel"
    sign: ClassVar[Sign] = "signed"

    def __init__(
        self,
        model: nn.Module,
        *,
        segments: SegmentsLike = SUPERPIXELS,
        fill: FillLike = 0.0,
        **sampling: Unpack[SamplingOptions],
    ) -> None:
        super().__init__(model, **sampling)
        self.segments = as_segments(segments)
        self.fill = as_fill(fill)

    def parts(self, passes: PassRunner) -> Parts:
        """The parts of the image, with a note of how many they are."""
        parts = Parts(self, passes.x)
        passes.notes.append(f"{parts.count} segments")
        return parts

    def warn_of_few(self, passes: PassRunner, parts: Parts, least: int) -> None:
        """Warn of fewer passes than determine the values; `least` are those that do."""
        if passes.used < least:
            passes.notes.append(f"far too few passes for {parts.count} segments")
            warn(
                f"{self.name}: {passes.used} passes do not determine the values of {parts.count} segments; allow for "
                f"at least {least}, and several times as many to be precise, or take fewer segments"
            )

    @staticmethod
    def fill_in(estimate: Coalitions, passes: PassRunner, count: int) -> None:
        """Make up to `count` passes, until a limit is met."""
        for done in passes.forwards(estimate.make, count):
            estimate.take(done.scores)
            if passes.enough(estimate):
                break
