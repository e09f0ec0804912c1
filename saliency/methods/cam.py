"""Class activation maps: sums of a layer's activations, weighted by what the score makes of them.

A new one is a class with a `name` and a `combine`, or only `weights`; reading, layers, sharing and registry come by
themselves.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attribution.base import BatchAttribution, TracedAttribution
from ..attribution.explanation import Sign
from ..attribution.forward import TargetGradients
from ..errors import LayerError, MethodError, NotApplicableError, warn
from ..io.preprocess import PreprocessLike
from ..layers.default_layer import scan_layers
from ..layers.find import LayerLike, find
from ..targets.class_names import output_tensor


class LayerAttribution(TracedAttribution):
    """A method that reads one layer.

    Args:
        model: As for every method.
        layer: A dotted name, the module itself, or None for the last layer with an extent in space at which the score
            has a gradient, found by one forward of noise, or, where only a target finds the scores in the output (a
            detector), by forwards of the images. In a module that is used many times the last use is read. Tokens
            (vision transformers with any number of leading tokens) and channels-last layouts (Swin) are read as maps
            by themselves.
        preprocess: As for every method.
        categories: As for every method.
    """

    gradients = "layers"
    sign: ClassVar[Sign] = "positive"
    cost = "1 forward, 1 backward to the layer"

    def __init__(
        self,
        model: nn.Module,
        layer: LayerLike = None,
        *,
        preprocess: PreprocessLike | None = None,
        categories: Sequence[str] | None = None,
    ) -> None:
        super().__init__(model, preprocess=preprocess, categories=categories)
        self.layer = None if layer is None else find(self.model, layer)[0]

    def layers(self, x: Tensor, target: Callable[[Any], Tensor]) -> tuple[str, ...]:
        """The layer that was named, or the one that is found by itself."""
        if self.layer is not None:
            return (self.layer,)
        chosen = scan_layers(self.model, x, target).chosen
        if chosen is None:
            raise LayerError(
                f"no layer of {type(self.model).__name__} has an output with an extent in space for an input of "
                f"{x.shape[-2]}x{x.shape[-1]}; name one with layer=..., or use a larger picture"
            )
        return (chosen,)


class LayerCombination(LayerAttribution):
    """A map made of one layer's activations and the gradients there."""

    backwards = 1

    def read_evidence(self, evidence: TargetGradients, layers: tuple[str, ...]) -> BatchAttribution:
        """The map of the layer."""
        (layer,) = layers
        gradient = evidence.gradient(layer) if self.gradients != "none" else evidence.activation(layer)
        values = self.combine(evidence.activation(layer), gradient)
        return BatchAttribution(values, evidence.scores, layer=layer)

    @abstractmethod
    def combine(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """The map (N, 1, h, w), signed, from activations (N, K, h, w) and gradients of the same shape."""


class WeightedCAM(LayerCombination):
    """A map that gives each channel one weight: the sum over channels of weight times activation.

    A new CAM is mostly a subclass with a `name`, a docstring and `weights`:

        class MeanCAM(WeightedCAM):
            name = "mean_cam"

            def weights(self, activation, gradient):  # both (N, K, h, w)
                return gradient.mean((2, 3))
    """

    def combine(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """The weighted sum over the channels."""
        weights: Any = self.weights(activation, gradient)  # (N, K)
        if not isinstance(weights, Tensor) or weights.shape != activation.shape[:2]:
            came = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
            expected = f"a tensor (N, K), here {tuple(activation.shape[:2])}"
            raise MethodError(f"{type(self).__name__}.weights gave {came}; expected {expected}")
        return torch.einsum("nk,nkhw->nhw", weights, activation)[:, None]

    @abstractmethod
    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """The weights (N, K), from activations (N, K, h, w) and gradients of the same shape."""


SIGNED = 0.3
"""The share of negative activations in a layer's energy from which it counts as signed."""


def is_signed(activation: Tensor) -> Tensor:
    """Whether negative activations hold a large share of the energy (sum of squares) of each image (N,).

    None behind a ReLU, and at most 0.06 was seen behind trained SiLUs and GELUs; 0.3 to 0.9 in front of activations, at
    linear bottlenecks, and at the tokens of transformers.
    """
    flat = activation.flatten(1)
    negative, whole = flat.clamp(max=0).norm(dim=1), flat.norm(dim=1)
    signed: Tensor = negative > math.sqrt(SIGNED) * whole
    return signed


def warn_if_signed(name: str, activation: Tensor) -> None:
    """Warn that a method takes activations (N, K, h, w) for evidence where they are signed."""
    if bool(is_signed(activation).any()):
        warn(
            f"{name}: the activations of this layer are signed, as in the tokens of a transformer, and {name} takes "
            "large values for evidence, so its map may show the background; use grad_cam, or choose a layer behind a "
            "ReLU"
        )


class GradCAM(WeightedCAM):
    """Activations weighted by the mean gradient of their channel.

    Values: (N, 1, h, w), signed, in score units: behind the layer only pooling and one linear layer, they and the bias
    sum to the logit. The paper keeps what is positive, and so does `heatmap`.

    Raises:
        LayerError: The layer does not exist, is not run, or has no extent in space.
        TargetError: The target does not fit the model's output.

    Source: Selvaraju et al., "Grad-CAM" (2016), https://arxiv.org/abs/1610.02391.
    """

    name = "grad_cam"

    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """The mean gradient of each channel."""
        return gradient.mean((2, 3))


class GradCAMPlusPlus(WeightedCAM):
    """Activations weighted by their positive gradients, each counted for what the channel as a whole contributes.

    Equation 19 of the paper, on the exponential of the score: the weight of a channel is the sum of g / (2 + g * s)
    over its positive gradients g, with s the channel's summed activation. The further division by the channel's summed
    coefficients, in the authors' code but not in the paper, is left out.

    It reacts little to the class: with a randomised classifier its maps stay nearly the same.

    Values: (N, 1, h, w), in score units up to a factor: the coefficients have no unit of their own.

    Warns:
        SaliencyWarning: The activations are signed. Where a channel's sum is negative the paper's coefficients have a
            pole, and it counts as 0. Use `GradCAM`, or choose a layer behind a ReLU.

    Raises:
        LayerError: The layer does not exist, is not run, or has no extent in space.
        TargetError: The target does not fit the model's output.

    Source: Chattopadhay et al., "Grad-CAM++" (2017), https://arxiv.org/abs/1710.11063.
    """

    name = "grad_cam_plus_plus"
    units = "score, up to a factor"

    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """The sum over each channel's positive gradients g of g / (2 + g * summed activation)."""
        warn_if_signed(self.name, activation)
        mass = activation.sum((2, 3), keepdim=True)
        positive = gradient.clamp(min=0)
        return (positive / (2 + positive * mass.clamp(min=0))).sum((2, 3))


class XGradCAM(WeightedCAM):
    """Activations weighted by the mean gradient of their channel, each gradient counted by its activation.

    Channels whose activations cancel, with a sum under 1 % of the sum of magnitudes, are divided by that 1 %: the
    paper's weight has a pole there, on layers with signed activations.

    Values: (N, 1, h, w), signed, in score units.

    Warns:
        SaliencyWarning: The activations are signed. Use `GradCAM`, or choose a layer behind a ReLU.

    Raises:
        LayerError: The layer does not exist, is not run, or has no extent in space.
        TargetError: The target does not fit the model's output.

    Source: Fu et al., "Axiom-based Grad-CAM" (2020), https://arxiv.org/abs/2008.02312.
    """

    name = "xgrad_cam"

    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """The sum of gradient times activation of each channel, over its summed activation."""
        warn_if_signed(self.name, activation)
        contribution = (gradient * activation).sum((2, 3))
        mass = activation.sum((2, 3))
        least = 0.01 * activation.abs().sum((2, 3))
        guarded = torch.where(mass.abs() < least, torch.where(mass < 0, -least, least), mass)
        return torch.where(guarded == 0, torch.zeros_like(mass), contribution / guarded)


class HiResCAM(LayerCombination):
    """The gradient times the activation in each place, summed over the channels.

    Exact where the rest of the network is linear: with a flattened linear head, the map and the bias sum to the logit.

    Values: (N, 1, h, w), signed, in score units.

    Raises:
        LayerError: The layer does not exist, is not run, or has no extent in space.
        TargetError: The target does not fit the model's output.

    Source: Draelos and Carin, "Use HiResCAM instead of Grad-CAM" (2020), https://arxiv.org/abs/2011.08891.
    """

    name = "hires_cam"

    def combine(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """The sum over the channels of gradient times activation."""
        return (gradient * activation).sum(1, keepdim=True)


class LayerCAM(LayerCombination):
    """The positive gradient times the activation in each place, summed over the channels. Serves shallow layers too.

    It reacts little to the class: with a randomised classifier its maps stay nearly the same.

    Values: (N, 1, h, w), in score units.

    Raises:
        LayerError: The layer does not exist, is not run, or has no extent in space.
        TargetError: The target does not fit the model's output.

    Source: Jiang et al., "LayerCAM" (2021), https://doi.org/10.1109/TIP.2021.3089943.
    """

    name = "layer_cam"

    def combine(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """The sum over the channels of positive gradient times activation."""
        return (gradient.clamp(min=0) * activation).sum(1, keepdim=True)


class CAM(LayerCombination):
    """Activations weighted by the linear head's own weights for the class.

    For networks that end in global average pooling and one linear layer. Whether this one does is checked on the call
    itself: the head's weights, on the mean activations, must give the model's output.

    Values: (N, 1, h, w), signed; their mean and the head's bias sum to the logit.

    Raises:
        NotApplicableError: The head is another, or the target is no class.
        LayerError: The layer does not exist, is not run, or has no extent in space.

    Source: Zhou et al., "Learning Deep Features for Discriminative Localization" (2015),
        https://arxiv.org/abs/1512.04150.
    """

    name = "cam"
    gradients = "none"
    cost = "1 forward"

    def read_evidence(self, evidence: TargetGradients, layers: tuple[str, ...]) -> BatchAttribution:
        """The activations weighted by the head's weights for the class."""
        (layer,) = layers
        activation = evidence.activation(layer)
        weight = _linear_head(self.model, activation, evidence.trace.output, layer)
        if None in evidence.selection.indices:
            raise NotApplicableError(
                "cam explains classes; for another target use grad_cam, which is the same for a logit"
            )
        of_class = weight[torch.tensor(evidence.selection.indices, device=weight.device)]  # (N, K)
        values = torch.einsum("nk,nkhw->nhw", of_class, activation)[:, None]
        return BatchAttribution(values, evidence.scores, layer=layer)

    def combine(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """Not in use: the weights come from the head."""
        raise NotImplementedError


def _linear_head(model: nn.Module, activation: Tensor, output: Any, layer: str) -> Tensor:
    """The weights (classes, K) of the linear layer that makes the output from the layer's mean activations."""
    scores, pooled = output_tensor(output).detach(), activation.mean((2, 3))
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Linear | nn.Conv2d) and isinstance(weight, Tensor):
            flat = weight.detach().flatten(1)
            if scores.dim() == 2 and flat.shape == (scores.shape[1], pooled.shape[1]):
                flat = flat.to(pooled)
                made = F.linear(pooled, flat, None if module.bias is None else module.bias.detach().to(pooled))
                tolerance = 1e-3 if scores.dtype in (torch.float32, torch.float64) else 3e-2
                if torch.allclose(made, scores.to(pooled), rtol=tolerance, atol=tolerance * float(scores.abs().max())):
                    return flat
    raise NotApplicableError(
        f'cam: no linear layer makes the output of {type(model).__name__} from the mean activations of "{layer}"; '
        "use grad_cam, which is the same where cam applies"
    )
