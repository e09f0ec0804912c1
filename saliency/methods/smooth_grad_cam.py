"""Grad-CAM++ with gradients averaged over noisy copies of the image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from ..attribution.forward import SharedForward, TargetGradients
from ..attribution.options import SamplingOptions
from ..engine.estimates import Estimate, rank_correlation
from ..engine.multi_pass import ImageAttribution, SampledAttribution, from_estimate
from ..engine.runner import PassRunner
from ..layers.find import LayerLike
from ..validation import real_number
from .cam import GradCAM, warn_if_signed
from .smoothing import noisy_copies

_GROUPS = 10


class SmoothGradCAMPlusPlus(SampledAttribution):
    """Grad-CAM++ whose gradients, their squares and their cubes are means over noisy copies of the image.

    With these means D1, D2, D3 and the activations A of the clean image, the weight of a channel is the sum of
    alpha * D1 over the places where D1 is positive, with alpha = D2 / (2 * D2 + D3 * sum A); the map is the weighted
    sum of A. Without noise it is Grad-CAM++. Where D3 is negative, or a channel's summed activation, that product
    counts as 0: the coefficient has a pole there.

    Args:
        model: As for every method.
        layer: As for `GradCAM`.
        noise: The noise's standard deviation, as a share of the range of the image's values.
        **sampling: See `saliency.attribution.options.SamplingOptions`.

    Values: (N, 1, h, w), in score units up to a factor: the coefficients have no unit of their own. The error is the
    jackknife's, over ten groups of samples.

    Warns:
        SaliencyWarning: The activations are signed. Use `GradCAM`, or choose a layer behind a ReLU.

    Raises:
        MethodError: The noise is negative.
        LayerError: The layer does not exist, is not run, or has no extent in space.
        TargetError: The target does not fit the model's output.

    Source: Omeiza et al., "Smooth Grad-CAM++" (2019), https://arxiv.org/abs/1908.01224.
    """

    name = "smooth_grad_cam_plus_plus"
    units = "score, up to a factor"
    cost = "51 forwards, 50 backwards to the layer"
    sign = "positive"
    quick_options: ClassVar[Mapping[str, Any]] = {"passes": 6}

    def __init__(
        self, model: nn.Module, layer: LayerLike = None, *, noise: float = 0.15, **sampling: Unpack[SamplingOptions]
    ) -> None:
        super().__init__(model, **sampling)
        self.noise = real_number("noise", noise, least=0, hint="; 0.1 to 0.2 of the range is usual")
        self._cam = GradCAM(model, layer)
        self.layer = self._cam.layer

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """The clean activations, weighted by what the noisy gradients make of them."""
        x = passes.x
        (layer,) = self._cam.layers(x, passes.target(1))
        activation = self._evidence(passes, x, layer, "none").activation(layer)[0]  # (K, h, w)
        warn_if_signed(self.name, activation[None])

        def compute(start: int, stop: int) -> Tensor:
            noisy = noisy_copies(x, self.noise, self.seed, start, stop)
            return self._evidence(passes, noisy, layer, "layers").gradient(layer)  # (k, K, h, w)

        estimate = _SmoothMap(activation)
        for gradients in passes.chunks(compute, self.most_passes, f"gradient at {layer}"):
            estimate.add(gradients)
            if passes.enough(estimate):
                break
        return from_estimate(estimate, activation, layer=layer)

    def _evidence(self, passes: PassRunner, x: Tensor, layer: str, gradients: str) -> TargetGradients:
        trace = SharedForward(self.model, x, [layer], gradients, 1)
        return trace.evidence(passes.target(len(x)))


class _SmoothMap(Estimate):
    """The map that the means of the gradients and of their powers give, with the jackknife's error over groups."""

    def __init__(self, activation: Tensor) -> None:
        super().__init__()
        self._activation = activation  # (K, h, w)
        self._mass = activation.sum((1, 2), keepdim=True)
        self._sums = activation.new_zeros(_GROUPS, 3, *activation.shape)

    def add(self, samples: Tensor) -> None:
        """Take in a chunk of gradients (k, K, h, w); sample i goes to group i modulo the number of groups."""
        for gradient in samples:
            group = self._sums[self.count % _GROUPS]
            power = gradient.clone()
            group[0] += power
            group[1] += power.mul_(gradient)
            group[2] += power.mul_(gradient)
            self.count += 1

    @property
    def mean(self) -> Tensor:
        """The map (1, h, w) of all samples."""
        return self._map(self._sums.sum(0), self.count)

    @property
    def error(self) -> Tensor | None:
        """The jackknife's standard error of the map: from the maps without one group at a time."""
        groups = min(self.count, _GROUPS)
        if groups < 2:
            return None
        total = self._sums.sum(0)
        sizes = [len(range(group, self.count, _GROUPS)) for group in range(groups)]
        without = [self._map(total - self._sums[at], self.count - size) for at, size in enumerate(sizes)]
        return (torch.stack(without).var(0, correction=0) * (groups - 1)).sqrt()

    @property
    def agreement(self) -> float | None:
        """The rank correlation of the maps of the even and of the odd groups; None below four samples."""
        if self.count < 4:
            return None
        evens = (self.count + 1) // 2
        even, odd = self._map(self._sums[::2].sum(0), evens), self._map(self._sums[1::2].sum(0), self.count - evens)
        return rank_correlation(even, odd)

    def _map(self, sums: Tensor, count: int) -> Tensor:
        first, second, third = sums / count  # (K, h, w) each
        below = 2 * second + (third * self._mass.clamp(min=0)).clamp(min=0)
        alpha = torch.where(below > 0, second / below, torch.zeros_like(below))
        weights = (alpha * first.clamp(min=0)).sum((1, 2))  # (K,)
        return torch.einsum("k,khw->hw", weights, self._activation)[None]
