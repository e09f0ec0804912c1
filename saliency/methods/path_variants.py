"""Integrated gradients on other paths: Guided IG by the smallest gradients, Blur IG through scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from ..attribution.options import EngineOptions
from ..engine.multi_pass import ImageAttribution, MultiPassAttribution
from ..engine.runner import PassRunner
from ..validation import check_whole_number, real_number
from .baselines import BaselineLike, Diffusion, baselines, resolve_baseline
from .integrated_gradients import Rule, quadrature, residual_of, wide

CLOSE = 1e-9
"""The error of a step of Guided IG, as a share of the whole path."""


class GuidedIG(MultiPassAttribution):
    """Integrated gradients on a path that moves the values with the smallest gradients first.

    Where the gradient is large, a straight path collects noise from pixels that it only passes. This path postpones
    them: a step moves the `fraction` of values with the smallest gradients as far as they may go, then further such
    fractions, until the whole path is one step closer to the image. No value may be ahead of the straight path by more
    than `max_distance`, and a value that is behind by more is moved along.

    Each step starts where the previous one ended, so passes run one by one.

    Args:
        model: As for every method.
        baseline: As for `IntegratedGradients`; for several, the mean over the paths is taken.
        steps: The number of steps.
        fraction: The share of values that move together, above 0 and at most 1.
        max_distance: The largest distance of a value from the straight path, 0 to 1 as a share of it. 0 gives
            integrated gradients, 1 a free path.
        **options: See `saliency.attribution.options.EngineOptions`.

    Values: (N, C, H, W), signed, in score units; they and the residual sum to the score less that of the baseline.

    Raises:
        MethodError: An option is invalid, or a baseline does not fit.
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
        **options: Unpack[EngineOptions],
    ) -> None:
        super().__init__(model, **options)
        self.baseline = resolve_baseline("baseline", baseline, self.preprocess)
        self.steps = check_whole_number("steps", steps)
        self.fraction = real_number("fraction", fraction, above=0, most=1)
        self.max_distance = real_number("max_distance", max_distance, least=0, most=1)

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """Compute the mean over the paths."""
        references = baselines(self.baseline, passes.x, self.preprocess, self.seed)
        values = torch.stack([self._path_values(passes, reference[None]) for reference in references]).mean(0)
        return ImageAttribution(values, residual=residual_of(passes, values, score, references))

    def _path_values(self, passes: PassRunner, reference: Tensor) -> Tensor:
        """The values (C, H, W) of the path from one baseline (1, C, H, W); after an interrupt, of its first part."""
        start, end = reference.to(wide(passes.x)), passes.x.to(wide(passes.x))
        # The position of each value on its path, from 0 at the baseline to 1 at the image, and the path's length.
        position, length = torch.zeros_like(start), (end - start).abs()
        values = torch.zeros_like(start)
        for step in range(1, self.steps + 1):
            inputs = torch.lerp(start, end, position).to(passes.x.dtype)
            for done in passes.gradients(lambda first, last, inputs=inputs: inputs, 1):  # type: ignore[misc] # early
                gradient = done.gradients.to(start.dtype)
                moved = self.moved(position, gradient.abs(), length, step / self.steps)
                values += gradient * (moved - position) * (end - start)
                position = moved
        return values[0]

    def moved(self, position: Tensor, slopes: Tensor, length: Tensor, share: float) -> Tensor:
        """Return the position of each value after a step that leaves 1 - `share` of the whole path.

        Args:
            position: The position of each value, 0 to 1.
            slopes: The magnitude of the gradient there.
            length: The length of each value's whole path.
            share: The position of the straight path.
        """
        whole = float(length.sum(dtype=torch.float64))
        least, most = max(share - self.max_distance, 0.0), min(share + self.max_distance, 1.0)
        position = position.clamp(min=least)
        waiting = torch.where((position < most) & (length > 0), slopes, torch.inf)
        taken = max(1, int(self.fraction * (slopes.numel() - 1)) + 1)
        while True:
            missing = float(((1 - position) * length).sum(dtype=torch.float64)) - (1 - share) * whole
            bound = waiting.flatten().kthvalue(taken).values
            chosen = (waiting <= bound) & waiting.isfinite()
            if missing <= CLOSE * whole or not chosen.any():
                return position
            gain = float(((most - position) * length * chosen).sum(dtype=torch.float64))
            part = missing / gain if gain > missing else 1.0
            position = torch.where(chosen, torch.lerp(position, torch.full_like(position, most), part), position)
            if part < 1:
                return position
            waiting = torch.where(chosen, torch.inf, waiting)


class BlurIG(MultiPassAttribution):
    """Integrated gradients on the path from a blurred image to the sharp one: which details matter, and their scale.

    No colour is the baseline here: what is missing is detail. The Gaussian blur reflects the image at its edges, so
    that nothing darkens there, and its derivative with respect to the width is exact.

    The baseline is the image under the widest blur, so it differs for each image.

    Args:
        model: As for every method.
        max_sigma: The widest blur's standard deviation, in pixels of the model's input.
        rule: As for `IntegratedGradients`; nodes lie on the standard deviation.
        steps: The number of nodes.
        **options: See `saliency.attribution.options.EngineOptions`.

    Values: (N, C, H, W), signed, in score units; they sum to the score less that of the blurred image, up to the
    residual.

    Raises:
        MethodError: An option is invalid.
        TargetError: The target does not fit the model's output, or does not depend on the input.

    Source: Xu et al., "Attribution in Scale and Space" (2020), https://arxiv.org/abs/2004.03383.
    """

    name = "blur_ig"
    is_complete = False  # the baseline differs for each image
    cost = "100 forwards and backwards, 1 forward"
    quick_options: ClassVar[Mapping[str, Any]] = {"steps": 3}

    def __init__(
        self,
        model: nn.Module,
        *,
        max_sigma: float = 50.0,
        rule: Rule = "gauss_legendre",
        steps: int = 100,
        **options: Unpack[EngineOptions],
    ) -> None:
        super().__init__(model, **options)
        quadrature(rule, steps)
        self.max_sigma, self.rule, self.steps = real_number("max_sigma", max_sigma, above=0), rule, steps

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """Compute minus the integral, over the standard deviation, of gradient times change of the image."""
        nodes = quadrature(self.rule, self.steps)
        sigmas, image = nodes.at * self.max_sigma, Diffusion(passes.x[0])
        values = torch.zeros_like(passes.x[0], dtype=wide(passes.x))
        for done in passes.gradients(lambda start, stop: image(sigmas[start:stop]), self.steps):
            rows = slice(done.start, done.start + len(done.scores))
            change = image.derivative(sigmas[rows]).to(values.dtype)  # (k, C, H, W)
            weights = (nodes.weights[rows] * self.max_sigma).to(values)
            values -= torch.einsum("k,kchw,kchw->chw", weights, change, done.gradients.to(values.dtype))
        blurred = image(torch.tensor([self.max_sigma], dtype=torch.float64, device="cpu"))
        return ImageAttribution(values, residual=residual_of(passes, values, score, blurred))
