"""Class activation maps: sums of a layer's activations, weighted by their gradients.

A new CAM is a class with a `name` and `weights` or `combine`. The base classes find the layer, run the model and
register the method.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attribution.base import Attribution, TracedAttribution
from ..attribution.explanation import BatchAttribution
from ..attribution.forward import Needs, TargetGradients, needs_with
from ..attribution.options import Option, PositionalOption
from ..attribution.questions import Questions
from ..errors import LayerError, MethodError, NotApplicableError, warn
from ..hooks.autograd_graph import is_tracing
from ..io.axes import along_rows, at_least_float32, max_pool, on_finest_grid, spatial
from ..model.call import check_later
from ..model.layers import LayerLike, default_layer, default_layers, find
from ..targets.classes import ClassScore, output_tensor
from ..validation import Sign, check_choice, check_integer, check_number
from .baselines import blurred

SIGNED_SHARE = 0.3
"""Activations are treated as signed if negative values hold more than this fraction of their sum of squares."""
CERTAIN_CORRELATION = 0.5
"""The sign of a principal component is certain if the map correlates this much with the norm of the activations."""

_HEADS = (nn.Linear, nn.Conv2d, nn.Conv3d)


def layer_name(method: Attribution, layer: str | nn.Module | list[str | nn.Module]) -> str:
    """Return the name of a layer of a method's model, also of a list with one layer.

    Raises:
        LayerError: The model has no such layer, the layer is the whole model, or the list has the wrong length.
    """
    if isinstance(layer, list) and len(layer) != 1:
        name = type(method).__name__
        raise LayerError(f"{name} reads one layer, got {len(layer)}; FusedCAM(model, layers=[...]) fuses several")
    if name := find(method.model, layer[0] if isinstance(layer, list) else layer)[0]:
        return name
    outermost = ", ".join(name for name, _ in method.model.named_children())
    raise LayerError(f'layer "" is the whole {type(method.model).__name__}; its outermost layers are {outermost}')


def _level_names(method: LayerAttribution, layer: str | nn.Module | list[str | nn.Module]) -> str | tuple[str, ...]:
    if isinstance(layer, list) and len(layer) > 1 and method.reads_levels:
        return tuple(dict.fromkeys(layer_name(method, level) for level in layer))
    return layer_name(method, layer)


class LayerAttribution(TracedAttribution):
    """Base class of methods that read one layer.

    Args:
        layer: A dotted name, the module itself, or None for the last layer with spatial output at which the score has a
            gradient. That layer is found by one forward of noise, or of the images if only the target can read the
            scores. For a box of a detector, None means all layers that enter its head. A list names such levels; their
            maps are combined, see `summed_levels`. If a module is called several times, the last call is read. Tokens
            (vision transformers with any number of leading tokens) and channels-last layouts (Swin) are read as maps.

    Raises:
        LayerError: The layer does not exist, is not run, or has no spatial output.

    Warns:
        SaliencyWarning: Another branch of the network joins after the default layer, which does not show it; or a layer
            with parameters is called several times.
    """

    needs = Needs("layers")
    sign: ClassVar[Sign] = "positive"
    cost = "1 forward, 1 backward to the layer"

    layer: PositionalOption[LayerLike, str | tuple[str, ...] | None] = PositionalOption(
        check=_level_names, default=None, kw_only=False
    )
    reads_levels: ClassVar[bool] = False
    """Whether the method reads all levels of a detector instead of the last level only."""

    def needs_for(self, x: Tensor, target: Questions) -> Needs:
        """Return the needs of the method at its layer or layers, or at the default layer."""
        layers = (self.layer,) if isinstance(self.layer, str) else self.layer
        if layers is None and self.reads_levels:
            layers = default_layers(self.model, x, target)
        layers = layers or (default_layer(self.model, x, target),)
        all_calls = isinstance(self, LayerCombination) and self.calls == "sum"
        return needs_with(self.needs, layers=layers, all_calls=all_calls)


def summed_levels(maps: Sequence[Tensor]) -> Tensor:
    """Return the sum of the maps (N, 1, h, w) of the levels of a detector, on the finest grid.

    Each map is enlarged with its sum unchanged, so that a level has the weight of its part of the score.
    """
    enlarged = on_finest_grid(maps)
    factors = enlarged.new_tensor([values[0, 0].numel() / enlarged[0, 0, 0].numel() for values in maps])
    return (enlarged * along_rows(factors, enlarged)).sum(0)


class LayerCombination(LayerAttribution):
    """Base class of maps computed from one layer's activations and the gradients there.

    Args:
        calls: For a module that is called several times, as in a recurrent network, "sum" adds the maps of all calls.
            Each call must see the whole image. By default the last call is read.
    """

    needs = Needs("layers", backwards=1)
    calls: Option[Literal["sum"] | None] = Option(None, check_choice, ("sum",))
    reads_levels = True
    assumes_unsigned: ClassVar[bool] = False
    """Whether the weights assume activations of at least zero. If so, the method warns about negative activations."""

    def explain_gradients(self, grads: TargetGradients, layers: tuple[str, ...]) -> BatchAttribution:
        """Compute the map of the layer, or the maps of several levels together."""
        maps = []
        for layer in layers:
            of_calls = list[Tensor]()
            for name, call in [*(grads.forward.earlier_calls if self.calls else ()), (layer, None)]:
                if name == layer:
                    activation = grads.activation(layer, call)
                    if self.assumes_unsigned:
                        warn_if_signed(self.name, activation)
                    gradient = activation if self.needs.gradients == "none" else grads.gradient(layer, call)
                    of_calls.append(self.combine(activation, gradient))
            maps.append(of_calls[0] if len(of_calls) == 1 else summed_levels(of_calls))
        values = maps[0] if len(maps) == 1 else self.combine_levels(maps)
        return BatchAttribution(values, grads.scores, layer=", ".join(layers))

    def combine_levels(self, maps: Sequence[Tensor]) -> Tensor:
        """Combine the maps (N, 1, h, w) of all levels; by default their sum, see `summed_levels`."""
        return summed_levels(maps)

    @abstractmethod
    def combine(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """Return the signed map (N, 1, h, w), given activations (N, K, h, w) and gradients of the same shape."""


class WeightedCAM(LayerCombination):
    """Base class of maps with one weight per channel: the sum over the channels of weight times activation.

    Most CAMs are a subclass with a `name`, a docstring and `weights`:

        class MeanCAM(WeightedCAM):
            name = "mean_cam"

            def weights(self, activation, gradient):  # both (N, K, h, w)
                return gradient.mean((2, 3))
    """

    def combine(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """Return the weighted sum over the channels."""
        weights: Any = self.weights(activation, gradient)  # (N, K)
        if not isinstance(weights, Tensor) or weights.shape != activation.shape[:2]:
            got = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
            expected = f"a tensor (N, K), here {tuple(activation.shape[:2])}"
            raise MethodError(f"{type(self).__name__}.weights returned {got}; expected {expected}")
        return weighted_sum(weights, activation)

    @abstractmethod
    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """Return the weights (N, K), given activations (N, K, h, w) and gradients of the same shape."""


def weighted_sum(weights: Tensor, activation: Tensor) -> Tensor:
    """Return the map (N, 1, h, w) of weights (N, K) and activations (N, K, h, w)."""
    return torch.einsum("nk,nk...->n...", weights, activation)[:, None]


def is_signed(activation: Tensor) -> Tensor:
    """Return whether negative activations hold a large fraction of the sum of squares of each image (N,).

    The fraction is 0 after a ReLU and was at most 0.06 after trained SiLUs and GELUs. It was 0.3 to 0.9 before
    activations, at linear bottlenecks, and at the tokens of transformers.
    """
    flat = activation.flatten(1)
    signed: Tensor = flat.clamp(max=0).norm(dim=1) > math.sqrt(SIGNED_SHARE) * flat.norm(dim=1)
    return signed


def warn_if_signed(name: str, activation: Tensor) -> None:
    """Warn if the activations (N, K, h, w) are signed and the method treats large values as evidence."""
    problem = (
        f"{name}: the activations of this layer are signed, as in the tokens of a transformer, and {name} treats "
        "large values as evidence, so the map may show the background; use grad_cam or a layer after a ReLU"
    )
    check_later(lambda is_any: warn(problem) if is_any else None, is_signed(activation).any())


class GradCAM(WeightedCAM):
    """Activations weighted by the mean gradient of their channel.

    Formula: S = Σ_k w_k A_k, with w_k = mean_i ∂y/∂A_ki.

    With `saliency.region` as the target, and the bottleneck of a segmentation network as the layer, it is Seg-Grad-CAM
    (Vinogradova et al., 2020) divided by the number of pixels of the region.

    Values: (N, 1, h, w), signed, in score units. If only pooling and one linear layer follow, the values and the bias
    sum to the logit. The paper keeps the positive part, and so does `heatmap`.

    Source: Selvaraju et al., "Grad-CAM" (2016), https://arxiv.org/abs/1610.02391.
    """

    name = "grad_cam"

    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """Return the mean gradient of each channel."""
        return gradient.mean(spatial(gradient))


class GradCAMPlusPlus(WeightedCAM):
    """Activations weighted by their positive gradients, with the coefficients of Grad-CAM++.

    Formula: S = Σ_k w_k A_k, with w_k = Σ_i g_ki⁺ / (2 + g_ki⁺ (Σ_j A_kj)⁺) and g = ∂y/∂A.

    Equation 19 of the paper, for the exponential of the score. The weight of a channel is the sum of g / (2 + g * s)
    over its positive gradients g, where s is the summed activation of the channel. The authors' code also divides by
    the summed coefficients of the channel; the paper does not, and neither does this class.

    The map depends little on the class: it hardly changes when the classifier is randomised.

    Values: (N, 1, h, w), in score units up to a factor: the coefficients have no unit.

    Warns:
        SaliencyWarning: The activations are signed. The coefficients have a pole where the sum of a channel is
            negative; such a sum is treated as 0. Use `GradCAM`, or choose a layer after a ReLU.

    Source: Chattopadhay et al., "Grad-CAM++" (2017), https://arxiv.org/abs/1710.11063.
    """

    name = "grad_cam_plus_plus"
    units = "score, up to a factor"
    assumes_unsigned = True

    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """Return the sum of g / (2 + g * summed activation) over the positive gradients g of each channel."""
        mass = activation.sum(axes := spatial(activation), keepdim=True)
        positive = gradient.clamp(min=0)
        return (positive / (2 + positive * mass.clamp(min=0))).sum(axes)


class XGradCAM(WeightedCAM):
    """Activations weighted by the mean gradient of their channel; the mean is weighted by the activations.

    Formula: S = Σ_k w_k A_k, with w_k = Σ_i A_ki ∂y/∂A_ki / Σ_i A_ki.

    The weight of the paper has a pole where the activations of a channel cancel, which happens in layers with signed
    activations. So the divisor is at least 1 % of the sum of magnitudes.

    Values: (N, 1, h, w), signed, in score units.

    Warns:
        SaliencyWarning: The activations are signed. Use `GradCAM`, or choose a layer after a ReLU.

    Source: Fu et al., "Axiom-based Grad-CAM" (2020), https://arxiv.org/abs/2008.02312.
    """

    name = "xgrad_cam"
    assumes_unsigned = True

    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """Return the sum of gradient times activation of each channel, divided by its summed activation."""
        axes = spatial(activation)
        contribution = (gradient * activation).sum(axes)
        mass = activation.sum(axes)
        least = 0.01 * activation.abs().sum(axes)
        divisor = torch.where(mass.abs() < least, torch.where(mass < 0, -least, least), mass)
        return torch.where(divisor == 0, torch.zeros_like(mass), contribution / divisor)


class HiResCAM(LayerCombination):
    """The gradient times the activation at each location, summed over the channels.

    Formula: S_i = Σ_k A_ki ∂y/∂A_ki.

    Exact if the rest of the network is linear: with a flattened linear head, the map and the bias sum to the logit.

    Seg-XRes-CAM explains the pixels of a region, with `saliency.region`, and replaces the gradient by its maximum in
    each block of cells: `block=2`.

    Args:
        block: The edge of the blocks of cells in which the maximum of the gradient is taken. Blocks at the right and
            bottom edge may be smaller.

    Values: (N, 1, h, w), signed, in score units.

    Source: Draelos and Carin, "Use HiResCAM instead of Grad-CAM" (2020), https://arxiv.org/abs/2011.08891; blocks of
        Hasany et al., "Seg-XRes-CAM: Explaining Spatially Local Regions in Image Segmentation" (2023),
        https://openaccess.thecvf.com/content/CVPR2023W/XAI4CV/html/Hasany_Seg-XRes-CAM_Explaining_Spatially_Local_Regions_in_Image_Segmentation_CVPRW_2023_paper.html.
    """

    name = "hires_cam"

    block: Option[int] = Option(1, check_integer)

    def combine(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """Return the sum over the channels of gradient times activation."""
        if self.block > 1:
            blocks = F.interpolate(max_pool(gradient, self.block, ceil_mode=True), scale_factor=self.block)
            inside: Any = (..., *map(slice, gradient.shape[2:]))
            gradient = blocks[inside]
        return (gradient * activation).sum(1, keepdim=True)


class LayerCAM(LayerCombination):
    """The positive gradient times the activation at each location, summed over the channels.

    Formula: S_i = Σ_k A_ki (∂y/∂A_ki)⁺.

    It suits shallow layers too. The map depends little on the class: it hardly changes when the classifier is
    randomised.

    Values: (N, 1, h, w), in score units.

    Source: Jiang et al., "LayerCAM" (2021), https://doi.org/10.1109/TIP.2021.3089943.
    """

    name = "layer_cam"

    def combine(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """Return the sum over the channels of positive gradient times activation."""
        return (gradient.clamp(min=0) * activation).sum(1, keepdim=True)


class EigenCAM(LayerCombination):
    """The first principal component of a layer's activations, independent of the class.

    Formula: S_i = ± Σ_k A_ki v_k, with v the first right singular vector of the matrix A_ik.

    The activations of the locations are projected on their first right singular vector, without centring, as in the
    paper. The sign of a singular vector is arbitrary: here the map is high where the activations are strong, measured
    by their norm at each location. If no activation is negative, the map has no negative values.

    Values: (N, 1, h, w), in units of activation, the same for every class: the target changes only the score.

    Warns:
        SaliencyWarning: The layer returns tokens, or its activations are signed and the map correlates weakly with
            their norm. Then the map may be high at the background. Use `EigenGradCAM` or `GradCAM`, or choose a layer
            after a ReLU.

    Source: Muhammad and Yeasin, "Eigen-CAM" (2020), https://arxiv.org/abs/2008.00299.
    """

    name = "eigen_cam"
    ignores_sign = True
    units = "activation"
    needs = Needs("none", backwards=0)
    cost = "1 forward"

    def explain_gradients(self, grads: TargetGradients, layers: tuple[str, ...]) -> BatchAttribution:
        """Compute the map of the layer, and warn if it may show the background."""
        result = super().explain_gradients(grads, layers)
        finest = max(layers, key=lambda layer: math.prod(grads.forward.layout(layer).grid))
        is_of_tokens = grads.forward.layers[finest].dim() == 3
        reason = "are tokens" if is_of_tokens else "are signed and the map correlates weakly with their norm"
        problem = (
            f"{self.name}: the activations of this layer {reason}, so the map may be high at the background; use "
            "eigen_grad_cam or grad_cam, or choose a layer after a ReLU"
        )
        images, activation = len(result.values), grads.activation(finest)

        def check(*numbers: float) -> None:
            rows = [numbers[image::images] for image in range(images)]
            if is_of_tokens or any(signed and not r >= CERTAIN_CORRELATION * a * b for signed, r, a, b in rows):
                warn(problem)

        check_later(check, *(() if is_of_tokens else self._moments(activation, result.values)))
        return result

    def combine(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """Return the projection of the activations on their first singular vector."""
        return principal_map(activation, torch.linalg.vector_norm(activation, dim=1))

    @staticmethod
    def _moments(activation: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """Return whether activations are signed, the covariance of map and norm, and the deviations of both."""
        rows = torch.stack([values.flatten(1), torch.linalg.vector_norm(activation, dim=1).flatten(1)])
        centred = rows - rows.mean(2, keepdim=True)
        return is_signed(activation), torch.linalg.vecdot(*centred), torch.linalg.vector_norm(centred, dim=2)


class EigenGradCAM(LayerCombination):
    """The first principal component of gradient times activation: a class-specific Eigen-CAM.

    Formula: S_i = ± Σ_k B_ki v_k, with B_ki = A_ki g_ki − mean_j A_kj g_kj, g = ∂y/∂A, and v the first right singular
    vector of the matrix B_ik.

    As in the source, each channel is centred over the locations first, so the map sums to 0: it shows where a location
    differs from the mean. (Eigen-CAM's paper does not centre.) In the source the sign is arbitrary. Here the map
    correlates positively with gradient times activation summed over the channels, which is `HiResCAM`.

    The map depends little on the class: up to its sign, it hardly changes when the classifier is randomised.

    Values: (N, 1, h, w), signed, in score units.

    Source: Gildenblat and contributors, "PyTorch library for CAM methods" (2021),
        https://github.com/jacobgil/pytorch-grad-cam; the projection of Muhammad and Yeasin (2020), centred.
    """

    name = "eigen_grad_cam"

    def combine(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """Return the projection of centred gradient times activation on its first singular vector."""
        contribution = gradient * activation
        return principal_map(contribution - contribution.mean(spatial(contribution), keepdim=True), contribution.sum(1))


def principal_map(features: Tensor, reference: Tensor) -> Tensor:
    """Project the features of each image on their first right singular vector, and return the maps (N, 1, h, w).

    The eigenvectors of the smaller Gram matrix are used, which is hundreds of times faster than a full decomposition.

    Args:
        features: (N, K, h, w), of which each image is a matrix (h * w, K).
        reference: (N, h, w) a map that decides the sign: its product with the result sums to at least 0.
    """
    locations = at_least_float32(features).flatten(2).transpose(1, 2)  # (N, hw, K)
    # A Gram matrix squares its entries. Scaled entries neither overflow nor underflow.
    scale = torch.linalg.vector_norm(locations, math.inf, (1, 2), keepdim=True)
    locations = locations / scale.clamp_(min=torch.finfo(scale.dtype).tiny)
    if locations.shape[1] <= locations.shape[2]:
        values, vectors = torch.linalg.eigh(locations @ locations.transpose(1, 2))  # (N, hw, hw), ascending
        projection = vectors[:, :, -1] * values[:, -1:].clamp(min=0).sqrt()
    else:
        _, vectors = torch.linalg.eigh(locations.transpose(1, 2) @ locations)
        projection = (locations @ vectors[:, :, -1:]).squeeze(2)
    agreement = torch.einsum("np,np->n", projection, reference.flatten(1))
    projection = torch.mul(projection, torch.copysign(scale[:, 0], agreement[:, None]))
    return projection.reshape(features.shape[0], 1, *features.shape[2:]).to(features.dtype)


class CAM(LayerAttribution):
    """Activations weighted by the linear head's weights for the class.

    Formula: S = Σ_k w_k A_k, with w_k the weight of channel k for the class in the linear head.

    For networks that end in global average pooling and one linear layer. Each call checks this: the head's weights,
    applied to the mean activations, must give the model's output.

    Values: (N, 1, h, w), signed; their mean and the head's bias sum to the logit.

    Raises:
        NotApplicableError: The head is different, or the target is not the score of a class.

    Source: Zhou et al., "Learning Deep Features for Discriminative Localization" (2015),
        https://arxiv.org/abs/1512.04150.
    """

    name = "cam"
    needs = Needs("none", backwards=0)
    cost = "1 forward"

    def explain_gradients(self, grads: TargetGradients, layers: tuple[str, ...]) -> BatchAttribution:
        """Weight the activations by the head's weights for the class."""
        (layer,) = layers
        activation = grads.activation(layer)
        classes = grads.target.classes(activation)
        if classes is None:
            raise NotApplicableError("cam explains classes by their scores; use grad_cam, which equals cam for a logit")
        weight = linear_head(self.model, activation, grads.forward.output, layer)
        if cast("ClassScore", grads.target[0].score).is_binary:
            weight = torch.cat([-weight, weight])
        return BatchAttribution(weighted_sum(weight[classes], activation), grads.scores, layer=layer)


def linear_head(model: nn.Module, activation: Tensor, output: Any, layer: str) -> Tensor:
    """Return the weights (classes, K) of the linear layer that maps mean activations to the output.

    Raises:
        NotApplicableError: No layer of the model does this.
    """
    scores, pooled = output_tensor(output).detach(), activation.mean(spatial(activation))
    for module in model.modules():
        if not isinstance(module, _HEADS) or not isinstance(getattr(module, "weight", None), Tensor):
            continue
        weight = module.weight.detach().flatten(1)
        if scores.dim() == 2 and weight.shape == (scores.shape[1], pooled.shape[1]):
            weight = weight.to(pooled)
            expected = F.linear(pooled, weight, None if module.bias is None else module.bias.detach().to(pooled))
            if is_tracing() or is_close(scores, expected):
                return weight
    raise NotApplicableError(
        f'cam: no linear layer maps the mean activations of "{layer}" to the output of {type(model).__name__}; use '
        "grad_cam, which equals cam where cam applies"
    )


def is_close(output: Tensor, expected: Tensor) -> bool:
    """Return whether the output of a model is the expected output up to the rounding of its type."""
    rounding = 1e-6 if output.dtype == torch.float64 else 1e-3 if output.dtype == torch.float32 else 3e-2
    return torch.allclose(output, expected.to(output), rtol=rounding, atol=rounding * float(expected.abs().max()))


class ODAM(LayerCombination):
    """The positive part of activation times blurred gradient, summed over the channels, for one object.

    Formula: S_i = (Σ_k A_ki (b ∗ ∂y/∂A_k)_i)⁺, with b a Gaussian.

    For boxes, explain the class or an edge with `saliency.box(of="x0")`. The maps of all levels that enter the head are
    resized bilinearly to the finest, and their maximum is taken. Other targets are explained at one layer.

    Args:
        blur: The standard deviation of the Gaussian that blurs the gradients, in cells of the layer. 0 does not blur
            them, as in the authors' code.

    Values: (N, 1, h, w), not negative, in score units; for an edge in pixels of the image.

    Source: Zhao and Chan, "ODAM: Gradient-based Instance-specific Visual Explanations for Object Detection" (2023),
        https://arxiv.org/abs/2304.06354.
    """

    name = "odam"

    blur: Option[float] = Option(1.0, check_number, least=0)

    def combine(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """Return the positive part of the sum over the channels of blurred gradient times activation."""
        smooth = blurred(gradient, self.blur) if self.blur else gradient
        return (smooth * activation).sum(1, keepdim=True).clamp(min=0)

    def combine_levels(self, maps: Sequence[Tensor]) -> Tensor:
        """Return the maximum of the maps of all levels."""
        return on_finest_grid(maps).amax(0)
