"""Methods that read the gradient at the input: plain, times the input, and with a rule at each ReLU."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from operator import attrgetter
from typing import Literal, get_args

import torch
from torch import Tensor

from ..attribution.base import TracedAttribution
from ..attribution.explanation import BatchAttribution
from ..attribution.forward import Needs, TargetGradients
from ..attribution.options import Option
from ..errors import NotApplicableError, warn
from ..hooks.manager import GradientRule
from ..hooks.rectifiers import Coverage, Nonlinearities, Nonlinearity, output_of, require_whole, saturation_of
from ..validation import check_choice, check_number

Smooth = Literal["leave", "positive"]


class VanillaGradient(TracedAttribution):
    """The gradient of the score with respect to the input.

    Formula: S = ∂y/∂x.

    In the insertion test it is hardly better than an edge detector, which uses neither the model nor the class.

    Values: (N, C, H, W), signed, in score units per unit of the normalised input. At each pixel, the paper draws the
    largest magnitude over the channels, and so does `heatmap`.

    Source: Simonyan et al., "Deep Inside Convolutional Networks" (2013), https://arxiv.org/abs/1312.6034.
    """

    name = "vanilla_gradient"
    joins_inputs = True
    units = "score per unit of normalised input"
    needs = Needs(backwards=1)
    cost = "1 forward, 1 backward"
    sign = "absolute"

    def explain_gradients(self, grads: TargetGradients, layers: tuple[str, ...]) -> BatchAttribution:
        """Return the gradient at the input."""
        return BatchAttribution(grads.input_gradient(), grads.scores)


class InputXGradient(TracedAttribution):
    """The gradient times the input: the contribution of each value to the score of a linear model.

    Formula: S = x ⊙ ∂y/∂x.

    The input is normalised, as the model sees it, so the implied baseline is the mean colour, not black.

    In the insertion test it is hardly better than an edge detector, which uses neither the model nor the class.

    Values: (N, C, H, W), signed, in score units.

    Source: Shrikumar et al., "Not Just a Black Box" (2016), https://arxiv.org/abs/1605.01713.
    """

    name = "input_x_gradient"
    joins_inputs = True
    needs = Needs(backwards=1)
    cost = "1 forward, 1 backward"

    def explain_gradients(self, grads: TargetGradients, layers: tuple[str, ...]) -> BatchAttribution:
        """Return the input times the gradient at the input."""
        values = grads.x * grads.input_gradient()
        return BatchAttribution(values, grads.scores, evidence={"token_shares": grads.token_shares()})


class RectifiedGradient(TracedAttribution):
    """Base class of backward passes with a rule instead of the derivative at each call of each ReLU.

    Relu, relu6, threshold, clamp and maximum at 0 are rectifiers in all forms: modules, functions, in place, used many
    times, inside scripts and non-reentrant checkpoints. Only the gradient through the rectifier changes.

    Args:
        smooth: The rule of LeakyReLU, PReLU, ELU, GELU, SiLU, Hardswish, Mish and Softplus, which the paper does not
            cover: "leave" keeps their derivative, "positive" passes only a positive incoming gradient, times the true
            derivative. In both cases the explanation's coverage counts them.
    """

    joins_inputs = True
    cost = "1 forward, 1 backward"
    needs = Needs(backwards=1)

    smooth: Option[Smooth] = Option("leave", check_choice, get_args(Smooth))

    @abstractmethod
    def rule_for(self, nonlinearity: Nonlinearity, images: int) -> GradientRule:
        """Return the rule that replaces the derivative at a rectifier, in a batch of `images` images."""

    def explain_gradients(self, grads: TargetGradients, layers: tuple[str, ...]) -> BatchAttribution:
        """Return the gradient that arrives at the input."""
        values, coverage = self.signal(grads)
        return BatchAttribution(values, grads.scores, evidence={"coverage": coverage})

    def signal(self, grads: TargetGradients) -> tuple[Tensor, Coverage]:
        """Return the gradient (N, C, H, W) under the rules, and the number of nonlinearities with a rule."""
        nonlinearities, images = grads.nonlinearities, len(grads.x)
        others = nonlinearities.others if self.smooth == "positive" else []
        passed = [] if self.smooth == "positive" else nonlinearities.others
        rewritten = [*nonlinearities.rectifiers, *others]
        if not rewritten or nonlinearities.hidden:
            self._refuse_or_warn(nonlinearities, rewritten)
        for nonlinearity in rewritten:
            require_whole(nonlinearity)
        rules = [(rectifier.node, self.rule_for(rectifier, images)) for rectifier in nonlinearities.rectifiers]
        rules += [(other.node, _positive_signal) for other in others]
        values = grads.rewritten_gradient(rules)
        return values, Coverage(_by_kind(rewritten), _by_kind(passed), dict(nonlinearities.hidden))

    def _refuse_or_warn(self, nonlinearities: Nonlinearities, rewritten: list[Nonlinearity]) -> None:
        """Raise if no nonlinearity has a rule; warn if a hand-written ReLU may have been missed."""
        hidden = ", ".join(f"{n} {kind}" for kind, n in nonlinearities.hidden.items())
        if not rewritten:
            kinds = ", ".join(f"{n} {kind}" for kind, n in _by_kind(nonlinearities.others).items())
            cure = f'; pass smooth="positive" to rewrite its {kinds}' if kinds else ""
            doubt = f"; its {hidden} may be hand-written ReLUs: use torch.relu for them" if hidden else ""
            raise NotApplicableError(
                f"{self.name}: no ReLU was called, so the result would be the plain gradient{cure}{doubt}"
            )
        warn(
            f"{self.name}: {hidden} may be hand-written ReLUs, which the autograd graph does not show; they keep their "
            "plain derivative (use torch.relu if they are ReLUs)"
        )


class GuidedBackprop(RectifiedGradient):
    """Backpropagation that passes only positive gradients through every ReLU call.

    Formula: S = ∂y/∂x, where each ReLU with the result a passes R_in = R_out⁺ ⊙ [a > 0].

    In-place, reused and functional ReLUs are handled alike. The map shows the features that the network detects rather
    than the evidence for the score. It changes little when the upper layers are randomised (Adebayo et al., "Sanity
    Checks for Saliency Maps", 2018, https://arxiv.org/abs/1810.03292).

    Values: (N, C, H, W), signed, in score units per unit of the normalised input.

    Raises:
        NotApplicableError: The model calls no ReLU, so the result would be the plain gradient.

    Source: Springenberg et al., "Striving for Simplicity" (2014), https://arxiv.org/abs/1412.6806.
    """

    name = "guided_backprop"
    units = "score per unit of normalised input"
    sign = "absolute"

    def rule_for(self, nonlinearity: Nonlinearity, images: int) -> GradientRule:
        """Return the true gradient where it is positive."""
        if nonlinearity.kind not in ("clamp", "maximum"):
            # In place, which halves the time: the derivative of a ReLU is a new tensor that is not used elsewhere.
            return lambda grad_input, grad_output: grad_input.relu_()
        # PyTorch's derivative of clamp and maximum at 0 is 1 or a half; the rule has 0, as for a ReLU.
        activation, saturation = output_of(nonlinearity.node), saturation_of(nonlinearity.node)
        open_ = activation > 0 if saturation is None else (activation > 0) & (activation < saturation)
        return lambda grad_input, grad_output: torch.where(open_, grad_output.clamp(min=0), 0)


class DeconvNet(RectifiedGradient):
    """Backpropagation with each ReLU applied to the gradient, regardless of the forward activation.

    Formula: S = ∂y/∂x, where each ReLU passes R_in = R_out⁺.

    Values: (N, C, H, W), signed, in score units per unit of the normalised input.

    Raises:
        NotApplicableError: The model calls no ReLU, so the result would be the plain gradient.

    Source: Zeiler and Fergus, "Visualizing and Understanding Convolutional Networks" (2013),
        https://arxiv.org/abs/1311.2901.
    """

    name = "deconvnet"
    units = "score per unit of normalised input"
    sign = "absolute"

    def rule_for(self, nonlinearity: Nonlinearity, images: int) -> GradientRule:
        """Return the incoming gradient where it is positive."""
        return lambda grad_input, grad_output: grad_output.clamp(min=0)


class RectGrad(RectifiedGradient):
    """Backpropagation through each ReLU only where activation times gradient is among the largest values of its layer.

    Formula: S = x ⊙ ∂y/∂x, where each ReLU with the result a passes R_in = R_out ⊙ [a R_out > τ], with τ the 98th
    percentile of a R_out.

    A unit with activation a and incoming gradient R passes R if a * R exceeds the `percentile` (nearest rank) of
    all units of the layer, image by image. The gradient at the input is multiplied by the input. A saturated ReLU6
    passes nothing. The authors also set the border to zero at padded convolutions; this class does not.

    The map tells objects of different classes apart, but changes less than the map of Grad-CAM when the classifier is
    randomised.

    Args:
        percentile: The percentage of blocked units, 0 to 100; 98 in the authors' code.

    Values: (N, C, H, W), signed, in score units.

    Raises:
        NotApplicableError: The model calls no ReLU, so the result would be the plain gradient times the input.
        MethodError: The percentile is outside 0 to 100.

    Source: Kim et al., "Why are Saliency Maps Noisy? Cause of and Solution to Noisy Saliency Maps" (2019),
        https://arxiv.org/abs/1902.04893.
    """

    name = "rectgrad"

    percentile: Option[float] = Option(98.0, check_number, least=0, most=100)

    def rule_for(self, nonlinearity: Nonlinearity, images: int) -> GradientRule:
        """Return the incoming gradient where activation times gradient exceeds the layer's threshold."""
        # Read before the backward pass, in which a checkpoint unpacks a saved tensor only once.
        activation, saturation = output_of(nonlinearity.node), saturation_of(nonlinearity.node)

        def rule(grad_input: Tensor, grad_output: Tensor) -> Tensor:
            product = activation * grad_output
            open_ = product > _nearest_percentile(product, self.percentile, images)
            if saturation is not None:
                open_ = open_ & (activation < saturation)
            return torch.where(open_, grad_output, torch.zeros_like(grad_output))

        return rule

    def explain_gradients(self, grads: TargetGradients, layers: tuple[str, ...]) -> BatchAttribution:
        """Return the gradient that arrives at the input, times the input."""
        values, coverage = self.signal(grads)
        return BatchAttribution(grads.x * values, grads.scores, evidence={"coverage": coverage})


def _positive_signal(grad_input: Tensor, grad_output: Tensor) -> Tensor:
    """Return the true derivative times the incoming gradient where that gradient is positive, else 0."""
    return torch.where(grad_output > 0, grad_input, torch.zeros_like(grad_input))


def _nearest_percentile(values: Tensor, percentile: float, images: int) -> Tensor:
    """Return the nearest-rank percentile of the values of each image, in a shape that broadcasts.

    If there are more rows than images, the rows of each image are its windows. Raises NotApplicableError if the rows of
    the images cannot be separated.
    """
    rows = len(values)
    if rows % images or (images > 1 and rows != images and values.dim() > 1 and values.shape[1] == images):
        raise NotApplicableError(
            f"rectgrad: the input of a ReLU has the shape {tuple(values.shape)}, in which the {images} images cannot "
            "be separated; explain them one at a time"
        )
    flat = values.reshape(images, -1)
    rank = 1 + round(percentile / 100 * (flat.shape[1] - 1))
    threshold = flat.kthvalue(rank, dim=1).values.repeat_interleave(rows // images)
    return threshold.reshape(-1, *[1] * (values.dim() - 1))


def _by_kind(nonlinearities: list[Nonlinearity]) -> dict[str, int]:
    return dict(Counter(map(attrgetter("kind"), nonlinearities)))
