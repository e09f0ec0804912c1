"""CAMs of the boxes of a detector."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..attribution.options import Option
from ..axes import on_finest_grid
from ..validation import check_number
from .baselines import blurred
from .cam import LayerCombination


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
