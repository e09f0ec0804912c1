"""Methods that follow a path which is not straight: Guided IG by the smallest gradients, Blur IG through scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from ..attribution.options import EngineOptions
from ..engine.multi_pass import ImageAttribution, MultiPassAttribution
from ..engine.runner import PassRunner
from ..validation import real_number
from .baselines import BaselineLike, Diffusion, baselines, resolve_baseline
from .integrated_gradients import residual_of, scores_of, wide
from .quadrature import Rule
from .quadrature import rule as rule_of

CLOSE = 1e-9
"""How near, over the whole way, a step of Guided IG comes to where it should be."""


class GuidedIG(MultiPassAttribution):
    """Integrated gradients on a path that moves the values with the smallest gradients first.

    Where the gradient is large, a straight path collects noise of pixels that just pass by. This one puts those off: a
    step moves the `fraction` of values with the smallest gradients as far as they may go, and further such fractions,
    until the path as a whole is one step nearer to the image. No value may be ahead of the straight path by more than
    `max_distance`, and one that falls behind by more is taken along.

    Each step needs the last one's end, so passes run one by one.

    Args:
        model: As for every method.
        baseline: As for `IntegratedGradients`; of several, the mean over the paths is taken.
        steps: The number of steps.
        fraction: The share of values that a move takes, over 0 to 1.
        max_distance: How far a value may be from the straight path, 0 to 1 as a share of it. 0 is integrated gradients,
            1 a path that is free.
        **running: See `saliency.attribution.options.EngineOptions`.

    Values: (N, C, H, W), signed, in score units; they and the residual make up the score less that of the baseline.

    Raises:
        MethodError: An option that is none, or a baseline that does not fit.
        TargetError: The target does not fit the model's output, or does not depend on the input.

    Source: Kapishnikov et al., "Guided Integrated Gradients" (2021), https://arxiv.org/abs/2106.09788.
    """

    name = "guided_ig"
    cost = "200 forwards and backwards, one by one, 1 forward"
    quick_options: ClassVar[Mapping[str, Any]] = {"steps": 3}

    def __init__(
        self,
        model: nn.Module,
        *,
        baseline: BaselineLike = "mean",
        steps: int = 200,
        fraction: float = 0.25,
        max_distance: float = 0.02,
        **running: Unpack[EngineOptions],
    ) -> None:
        super().__init__(model, **running)
        self.baseline = resolve_baseline("baseline", baseline, self.preprocess)
        rule_of("midpoint", steps)
        self.steps = steps
        self.fraction = real_number("fraction", fraction, above=0, most=1)
        self.max_distance = real_number("max_distance", max_distance, least=0, most=1)

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """The mean over the paths."""
        references = baselines(self.baseline, passes.x, self.preprocess, self.seed)
        values = torch.stack([self.walked(passes, reference[None]) for reference in references]).mean(0)
        return ImageAttribution(values, residual=residual_of(values, score, scores_of(passes, references)))

    def walked(self, passes: PassRunner, reference: Tensor) -> Tensor:
        """What one path (C, H, W) from a baseline (1, C, H, W) collects; of an interrupted run, the part so far."""
        start, end = reference.to(wide(passes.x)), passes.x.to(wide(passes.x))
        # Where each value is on its way, from 0 at the baseline to 1 at the image, and how long that way is.
        place, length = torch.zeros_like(start), (end - start).abs()
        values = torch.zeros_like(start)
        for step in range(1, self.steps + 1):
            here = torch.lerp(start, end, place).to(passes.x.dtype)
            for done in passes.gradients(lambda first, last, here=here: here, 1):  # type: ignore[misc] # bound early
                gradient = done.gradients.to(start.dtype)
                ahead = self.moved(place, gradient.abs(), length, step / self.steps)
                values += gradient * (ahead - place) * (end - start)
                place = ahead
        return values[0]

    def moved(self, place: Tensor, slopes: Tensor, length: Tensor, share: float) -> Tensor:
        """Where each value is after a step that leaves 1 - `share` of the whole way to go.

        Args:
            place: Where each value is, 0 to 1.
            slopes: The magnitude of the gradient there.
            length: How long each value's whole way is.
            share: Where the straight path is.
        """
        whole = float(length.sum(dtype=torch.float64))
        least, most = max(share - self.max_distance, 0.0), min(share + self.max_distance, 1.0)
        place = place.clamp(min=least)
        waiting = torch.where((place < most) & (length > 0), slopes, torch.inf)
        taken = max(1, int(self.fraction * (slopes.numel() - 1)) + 1)
        while True:
            to_go = float(((1 - place) * length).sum(dtype=torch.float64)) - (1 - share) * whole
            bound = waiting.flatten().kthvalue(taken).values
            chosen = (waiting <= bound) & waiting.isfinite()
            if to_go <= CLOSE * whole or not chosen.any():
                return place
            gain = float(((most - place) * length * chosen).sum(dtype=torch.float64))
            part = to_go / gain if gain > to_go else 1.0
            place = torch.where(chosen, torch.lerp(place, torch.full_like(place, most), part), place)
            if part < 1:
                return place
            waiting = torch.where(chosen, torch.inf, waiting)


class BlurIG(MultiPassAttribution):
    """Integrated gradients on the path from a blurred image to the sharp one: which details, at what scale, count.

    No colour is a baseline here: what is missing is detail. The blur is a Gaussian that reflects the image at its
    edges, so that nothing darkens there, and its derivative by the width is exact.

    The baseline is the image under the widest blur, and so another one for each image.

    Args:
        model: As for every method.
        max_sigma: The widest blur's standard deviation, in pixels of the model's input.
        rule: As for `IntegratedGradients`; nodes are placed on the standard deviation.
        steps: The number of nodes.
        **running: See `saliency.attribution.options.EngineOptions`.

    Values: (N, C, H, W), signed, in score units; they sum to the score less that of the blurred image, up to the
    residual.

    Raises:
        MethodError: An option that is none.
        TargetError: The target does not fit the model's output, or does not depend on the input.

    Source: Xu et al., "Attribution in Scale and Space" (2020), https://arxiv.org/abs/2004.03383.
    """

    name = "blur_ig"
    is_complete = False  # to the score over that of a baseline that is another one for each image
    cost = "100 forwards and backwards, 1 forward"
    quick_options: ClassVar[Mapping[str, Any]] = {"steps": 3}

    def __init__(
        self,
        model: nn.Module,
        *,
        max_sigma: float = 50.0,
        rule: Rule = "gauss_legendre",
        steps: int = 100,
        **running: Unpack[EngineOptions],
    ) -> None:
        super().__init__(model, **running)
        rule_of(rule, steps)
        self.max_sigma, self.rule, self.steps = real_number("max_sigma", max_sigma, above=0), rule, steps

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """Minus the integral over the standard deviation of gradient times change of the image."""
        nodes = rule_of(self.rule, self.steps)
        sigmas, image = nodes.at * self.max_sigma, Diffusion(passes.x[0])
        values = torch.zeros_like(passes.x[0], dtype=wide(passes.x))
        for done in passes.gradients(lambda start, stop: image(sigmas[start:stop]), self.steps):
            rows = slice(done.start, done.start + len(done.scores))
            change = image.derivative(sigmas[rows]).to(values.dtype)  # (k, C, H, W)
            weights = (nodes.weights[rows] * self.max_sigma).to(values)
            values -= torch.einsum("k,kchw,kchw->chw", weights, change, done.gradients.to(values.dtype))
        blurred = scores_of(passes, image(torch.tensor([self.max_sigma], dtype=torch.float64, device="cpu")))
        return ImageAttribution(values, residual=residual_of(values, score, blurred))
