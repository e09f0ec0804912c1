"""CAMs combined with guided backpropagation, several layers, similar classes, second derivatives or noise."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attribution.base import Attribution, TracedAttribution
from ..attribution.estimates import Estimate
from ..attribution.explanation import BatchAttribution
from ..attribution.forward import Needs, SharedForward, TargetGradients, needs_with, no_gradient_message
from ..attribution.options import Option, PositionalOption
from ..attribution.passes import ImageAttribution, Passes, SampledAttribution, from_estimate
from ..attribution.questions import Questions
from ..errors import LayerError, NotApplicableError
from ..hooks.autograd_graph import PlainAttention
from ..io.axes import on_finest_grid, resize, spatial
from ..model.layers import layers_by_resolution
from ..targets.classes import ClassScore, class_scores
from ..validation import check_choice, check_integer, check_number, described
from .cam import GradCAM, GradCAMPlusPlus, HiResCAM, LayerAttribution, LayerCAM, XGradCAM, layer_name, weighted_sum
from .gradient import GuidedBackprop, Smooth
from .gradient_free_cam import LayerPasses
from .smoothing import NOISE_HINT, noisy_copies

_CAMS: dict[str, type[LayerAttribution]] = {
    cls.name: cls for cls in (GradCAM, GradCAMPlusPlus, XGradCAM, HiResCAM, LayerCAM)
}


class GuidedGradCAM(LayerAttribution):
    """Guided backpropagation times Grad-CAM: fine detail, restricted to the region of the class.

    Formula: S = G ⊙ up(C⁺), with G the guided gradient and C the Grad-CAM.

    Both come from one forward and one graph. The CAM's positive part is resized bilinearly to the input.

    Args:
        smooth: As for `GuidedBackprop`.

    Values: (N, C, H, W), signed, in the product of both methods' units.

    Raises:
        NotApplicableError: The model calls no ReLU.

    Source: Selvaraju et al., "Grad-CAM" (2016), https://arxiv.org/abs/1610.02391.
    """

    name = "guided_grad_cam"
    units = "product of the guided gradient and the CAM"
    cost = "1 forward, 1 backward"
    needs = Needs(backwards=2)
    sign = "absolute"
    reads_levels = True

    smooth: Option[Smooth] = Option("leave", check_choice, get_args(Smooth))

    def __post_init__(self) -> None:
        self._guided = GuidedBackprop(self.model, smooth=self.smooth)
        self._cam = GradCAM(self.model)

    def explain_gradients(self, grads: TargetGradients, layers: tuple[str, ...]) -> BatchAttribution:
        """Multiply the guided gradient by the CAM, resized to the input."""
        cam = self._cam.explain_gradients(grads, layers).values.clamp(min=0)
        guided, coverage = self._guided.signal(grads)
        cam = resize(cam, guided.shape[2:])
        return BatchAttribution(guided * cam, grads.scores, ", ".join(layers), {"coverage": coverage})


def _layer_names(method: Attribution, layers: Any) -> tuple[str, ...]:
    listed = tuple(layers) if isinstance(layers, Iterable) and not isinstance(layers, str) else ()
    if not listed:
        raise LayerError(f"{method.name} takes a list of layers, got {described(layers)}")
    return tuple(layer_name(method, layer) for layer in listed)


class _LayerFusion(TracedAttribution):
    """Base class of methods that combine the maps of one CAM at several layers."""

    cost = "1 forward, 1 backward to the first layer"
    needs = Needs("layers", backwards=1)
    sign = "positive"
    layers: PositionalOption[Sequence[str | nn.Module] | None, tuple[str, ...] | None] = PositionalOption(
        check=_layer_names, default=None, kw_only=False
    )
    cam: Option[str] = Option("layer_cam", check_choice, tuple(_CAMS))

    def __post_init__(self) -> None:
        self._cam = _CAMS[self.cam](self.model)

    def needs_for(self, x: Tensor, target: Questions) -> Needs:
        """Return the named layers, the layers that enter a detector's head, or the last layer of three resolutions."""
        return needs_with(self.needs, layers=self.layers or layers_by_resolution(self.model, x, target))

    def explain_gradients(self, grads: TargetGradients, layers: tuple[str, ...]) -> BatchAttribution:
        """Combine the scaled maps of the layers."""
        maps = [self._cam.explain_gradients(grads, (layer,)).values.clamp(min=0) for layer in layers]
        tiny = torch.finfo(maps[0].dtype).tiny
        scaled = [self.scaled(F.normalize(values.flatten(1), math.inf, eps=tiny).view_as(values)) for values in maps]
        return BatchAttribution(self.combine(on_finest_grid(scaled)), grads.scores, layer=", ".join(layers))

    def scaled(self, fractions: Tensor) -> Tensor:
        """Scale the map of a layer, given as fractions (N, 1, h, w) of its maximum; unchanged by default."""
        return fractions

    @abstractmethod
    def combine(self, maps: Tensor) -> Tensor:
        """Combine the scaled maps (L, N, 1, h, w) of the layers."""


class FusedCAM(_LayerFusion):
    """The maximum of one CAM over several layers: fine edges of shallow layers within the focus of deep layers.

    Formula: S = max_l up(tanh(γ C_l⁺ / max C_l⁺)), with C_l the CAM of layer l.

    Each layer's positive map M becomes tanh(gamma * M / max M) and is resized bilinearly to the finest of the layers.
    The result is the maximum at each location. All layers share one forward and one backward.

    Args:
        layers: Names or modules; None for the last layer of each of the last three resolutions, found by one forward.
        cam: The CAM to fuse: "layer_cam" as in the paper, "grad_cam", "grad_cam_plus_plus", "xgrad_cam" or "hires_cam".
        gamma: How strongly weak values are raised; 2 in the paper.

    Values: (N, 1, h, w), 0 to tanh(gamma), dimensionless: each layer is scaled by its maximum for each image.

    Raises:
        MethodError: The CAM does not exist, or gamma is not positive.
        LayerError: A layer does not exist, is not run, or has no spatial output.

    Source: Jiang et al., "LayerCAM" (2021), https://doi.org/10.1109/TIP.2021.3089943, section III-C.
    """

    name = "fused_cam"
    units = "fraction of each layer's largest"
    gamma: Option[float] = Option(2.0, check_number, above=0)

    def scaled(self, fractions: Tensor) -> Tensor:
        """Return the hyperbolic tangent of the fractions times gamma."""
        return torch.tanh(self.gamma * fractions)

    def combine(self, maps: Tensor) -> Tensor:
        """Return the maximum of the maps."""
        return maps.amax(0)


class RefineCAM(_LayerFusion):
    """The product of one CAM over several layers: high where all layers agree, at the finest resolution.

    Formula: S = Π_l up(C_l⁺ / max C_l⁺), with C_l the CAM of layer l.

    Each layer's positive map is divided by its maximum and resized bilinearly to the finest of the layers. All layers
    share one forward and one backward.

    Args:
        layers: Names or modules; None for the last layer of each of the last three resolutions, found by one forward.
        cam: "layer_cam", "grad_cam", "grad_cam_plus_plus", "xgrad_cam" or "hires_cam". The authors' code uses
            "grad_cam_plus_plus", which is not defined for the signed channels at the end of many stages. On the bundled
            network and photos it puts 47 % of the map into the objects' boxes, "layer_cam" 77 %.

    Values: (N, 1, h, w), 0 to 1, dimensionless: each layer is scaled by its maximum for each image. Zero everywhere if
        a layer has no positive value.

    Raises:
        MethodError: The CAM does not exist.
        LayerError: A layer does not exist, is not run, or has no spatial output.

    Source: Domeniconi et al., "How to Evaluate and Refine your CAM" (2026), https://arxiv.org/abs/2605.14641.
    """

    name = "refine_cam"
    units = "product of the fractions of each layer's largest"

    def combine(self, maps: Tensor) -> Tensor:
        """Return the product of the maps."""
        return maps.prod(0)


class FinerCAM(LayerAttribution):
    """A CAM of the difference between a class and the classes with the most similar scores.

    Formula: S = the CAM of y_c − γ mean_r y_r, with y_c the score of the class, and r the classes whose scores are
    closest to it.

    Instead of the class's score y_c it explains y_c - gamma * mean(y_r) over the reference classes r whose scores are
    closest to y_c. Shared features, such as fur, cancel; features specific to the class remain. To choose the
    references, pass a function as the target of the CAM: `lambda output: output[:, 281] - 0.6 * output[:, 282]`.

    Args:
        classes: The number of classes to compare with.
        gamma: The weight of the references: 0 is the plain CAM; 0.6 in the paper.
        cam: "grad_cam", "hires_cam", "layer_cam", "grad_cam_plus_plus" or "xgrad_cam".

    Values: (N, 1, h, w), signed, in the units of the CAM.

    Raises:
        NotApplicableError: The target is not a class, or the model has only one class.

    Source: Zhang et al., "Finer-CAM" (2025), https://arxiv.org/abs/2501.11309.
    """

    name = "finer_cam"
    needs = Needs("layers", backwards=1)

    classes: Option[int] = Option(3, check_integer)
    gamma: Option[float] = Option(0.6, check_number, least=0)
    cam: Option[str] = Option("grad_cam", check_choice, tuple(_CAMS))

    def __post_init__(self) -> None:
        self._cam = _CAMS[self.cam](self.model)

    def explain_gradients(self, grads: TargetGradients, layers: tuple[str, ...]) -> BatchAttribution:
        """Compute the CAM of the contrast with the references."""
        classes = grads.target.classes(grads.scores)
        if classes is None:
            raise NotApplicableError("finer_cam compares classes; the target must be a class, by index or name")
        explained = classes[:, None]
        weights = self._reference_weights(class_scores(grads.forward.output).detach(), explained)

        def contrast(output: Any) -> Tensor:
            scores = class_scores(output)
            return scores.gather(1, explained)[:, 0] - self.gamma * (scores * weights).sum(1)

        target = copy.copy(grads.target)
        target.asked, target.score = [target[0]] * len(target), contrast
        result = self._cam.explain_gradients(TargetGradients(grads.forward, target, reads=False), layers)
        return replace(result, scores=grads.scores)

    def _reference_weights(self, scores: Tensor, explained: Tensor) -> Tensor:
        """Return the weight of each class (N, classes) in the mean of the references, for explained classes (N, 1)."""
        if scores.shape[1] < 2:
            raise NotApplicableError("finer_cam compares classes, but the model returns one number per image")
        count = min(self.classes, scores.shape[1] - 1)
        distance = (scores - scores.gather(1, explained)).abs().scatter(1, explained, math.inf)
        closest = torch.sort(distance, dim=1, stable=True).indices[:, :count]
        return torch.zeros_like(scores).scatter_(1, closest, 1 / count)


class ShapleyCAM(LayerAttribution):
    """Activations weighted by the Shapley value of their channel, from the gradient and curvature of the score.

    Formula: S = Σ_k w_k A_k, with w_k = mean_i (g − H A / 2)_ki, and g, H the gradient and Hessian of y + log p, with p
    the probability of the class.

    The weight is the mean over the channel of g - H A / 2, where g is the gradient and H the Hessian of the utility at
    the activations A. This is the Shapley value of the second-order expansion of the utility. If the network after the
    layer is piecewise linear and the utility is a logit, H is 0 and this is `GradCAM`.

    The utility of a class is its score plus the logarithm of its probability, as in the authors' code. For any other
    target, such as `saliency.value(281)` for the logit, and for a model of one class, it is the score.

    Values: (N, 1, h, w), signed, in units of the utility.

    Raises:
        LayerError: The layer does not exist, is not run, or has no spatial output, or the score does not depend on it.
        NotApplicableError: An operation after the layer has no second derivative.

    Source: Cai, "CAMs as Shapley Value-based Explainers" (2025), https://arxiv.org/abs/2501.06261.
    """

    name = "shapley_cam"
    cost = "1 forward, 2 backwards to the layer"
    units = "score and log probability"

    def explain_gradients(self, grads: TargetGradients, layers: tuple[str, ...]) -> BatchAttribution:
        """Weight the activations by the means of g - H A / 2."""
        (layer,) = layers
        activation = grads.activation(layer)
        slopes = grads.forward.layout(layer)(self._slopes(grads, layer)).to(activation)
        return BatchAttribution(weighted_sum(slopes.mean(spatial(slopes)), activation), grads.scores, layer=layer)

    def _slopes(self, grads: TargetGradients, layer: str) -> Tensor:
        """Return the slopes g - H A / 2, in the layout of the layer's output."""
        grads.require_gradient()
        try:
            return self._slopes_of(grads.forward, grads.target, layer)
        except (RuntimeError, NotImplementedError) as error:
            if "derivative" not in str(error) and "double backward" not in str(error):
                raise
        # Fused attention has no second derivative; elementary operations have one.
        with PlainAttention():
            forward = SharedForward(self.model, grads.x, Needs("layers", layers=(layer,)))
            try:
                return self._slopes_of(forward, grads.target, layer)
            except (RuntimeError, NotImplementedError) as error:
                raise NotApplicableError(
                    f"shapley_cam needs second derivatives after the layer; {error}. Use grad_cam"
                ) from error

    def _slopes_of(self, forward: SharedForward, target: Questions, layer: str) -> Tensor:
        activation = forward.layers[layer]
        utility = self._utility(forward.output, target).sum()
        gradient: Tensor | None = torch.autograd.grad(utility, activation, create_graph=True, allow_unused=True)[0]
        if gradient is None:
            raise LayerError(no_gradient_message(layer))
        if not gradient.requires_grad:
            return gradient
        # The gradient of <gradient, A>, with this A held constant, is H A.
        rise = (gradient * activation.detach()).sum()
        product: Tensor | None = torch.autograd.grad(rise, activation, retain_graph=True, allow_unused=True)[0]
        return gradient.detach() if product is None else gradient.detach() - product / 2

    def _utility(self, output: Any, target: Questions) -> Tensor:
        """Return the utility of each image (N,)."""
        score, asked = target(output), [target[image].score for image in range(len(target))]
        first = next((part for part in asked if isinstance(part, ClassScore)), None)
        if first is None or first.link is None:
            return score
        classes = target.classes(score)
        if classes is None:  # a list of classes and other targets
            rows = [*score]
            for image, part in enumerate(asked):
                if isinstance(part, ClassScore):
                    rows[image] = self._utility(output, target.variants(image, len(asked)))[image]
            return torch.stack(rows)
        if first.link == "softmax":
            return score + class_scores(output).log_softmax(1).gather(1, classes[:, None]).squeeze(1)
        probability = score.sigmoid() if first.link == "sigmoid" else score + (1 - classes) * first.is_binary
        return score + probability.clamp(min=torch.finfo(score.dtype).tiny).log()


class SmoothGradCAMPlusPlus(LayerPasses, SampledAttribution):
    """Grad-CAM++ with gradients, their squares and their cubes averaged over noisy copies of the image.

    Formula: S = Σ_k w_k A_k, with w_k = Σ_i D₁⁺ D₂ / (2 D₂ + D₃⁺ (Σ_j A_kj)⁺) and D_n = mean_z (∂y/∂A_ki)ⁿ at x + z.

    With these means D1, D2, D3 and the activations A of the clean image, the weight of a channel is the sum of
    alpha * D1 over the locations where D1 is positive, with alpha = D2 / (2 * D2 + D3 * sum A). The map is the weighted
    sum of A. Without noise it is Grad-CAM++. The coefficient has a pole if D3 or the sum of A is negative; their
    product is then treated as 0.

    Args:
        noise: The standard deviation of the noise, as a fraction of the range of the image's values.

    Values: (N, 1, h, w), in score units up to a factor: the coefficients have no unit. The error is estimated by a
    jackknife over ten groups of samples.

    Warns:
        SaliencyWarning: The activations are signed. Use `GradCAM`, or choose a layer after a ReLU.

    Raises:
        MethodError: The noise is negative.

    Source: Omeiza et al., "Smooth Grad-CAM++" (2019), https://arxiv.org/abs/1908.01224.
    """

    name = "smooth_grad_cam_plus_plus"
    units = "score, up to a factor"
    cost = "51 forwards, 50 backwards to the layer"
    preview_options: ClassVar = {"passes": 6}

    noise: Option[float] = Option(0.15, check_number, least=0, hint=NOISE_HINT)

    def explain_image(self, passes: Passes, score: Tensor) -> ImageAttribution:
        """Weight the clean activations by the noisy gradients."""
        layer = self.read_layer(passes)
        needs = Needs("layers", backwards=1, layers=(layer.layer,))

        def compute(start: int, stop: int) -> Tensor:
            noisy = noisy_copies(passes.x, self.noise, self.seed, start, stop)
            forward = SharedForward(self.model, noisy, needs)
            return TargetGradients(forward, passes.target(len(noisy))).gradient(layer.layer)  # (k, K, h, w)

        estimate = _SmoothMap(layer.maps)
        for chunk in passes.chunks(compute, self.most_passes, estimate=estimate):
            estimate.add(chunk)
        return from_estimate(estimate, layer.maps, layer=layer.layer)


class _SmoothMap(Estimate):
    """Map from the means of the first three powers of the gradients, with a jackknife error over groups."""

    groups = 10

    def __init__(self, activation: Tensor) -> None:
        super().__init__()
        self._activation = activation  # (K, h, w)
        self._mass = activation.sum(spatial(activation, 1), keepdim=True).clamp(min=0)
        self._sums = activation.new_zeros(self.groups, 3, *activation.shape)

    def add(self, samples: Tensor) -> None:
        """Add a chunk of gradients (k, K, h, w); sample i goes to group i modulo the number of groups."""
        for gradient in samples:
            self._sums[self.count % self.groups] += torch.stack([gradient, gradient.square(), gradient**3])
            self.count += 1

    @property
    def mean(self) -> Tensor:
        """The map (1, h, w) of all samples."""
        return self._map(self._sums.sum(0), self.count)

    @property
    def error(self) -> Tensor | None:
        """The standard error of the map (1, h, w), from the maps that each leave out one group."""
        groups = min(self.count, self.groups)
        if groups < 2:
            return None
        total = self._sums.sum(0)
        sizes = [len(range(group, self.count, self.groups)) for group in range(groups)]
        without = [self._map(total - self._sums[group], self.count - size) for group, size in enumerate(sizes)]
        return (torch.stack(without).var(0, correction=0) * (groups - 1)).sqrt()

    def halves(self) -> tuple[Tensor, Tensor]:
        """Return the maps of the even and of the odd groups."""
        evens, even, odd = (self.count + 1) // 2, self._sums[::2].sum(0), self._sums[1::2].sum(0)
        return self._map(even, evens), self._map(odd, self.count - evens)

    def _map(self, sums: Tensor, count: int) -> Tensor:
        first, second, third = sums / count  # (K, h, w) each
        divisor = 2 * second + (third * self._mass).clamp(min=0)
        alpha = torch.where(divisor > 0, second / divisor, torch.zeros_like(divisor))
        weights = (alpha * first.clamp(min=0)).sum(spatial(alpha, 1))  # (K,)
        return torch.einsum("k,k...->...", weights, self._activation)[None]
