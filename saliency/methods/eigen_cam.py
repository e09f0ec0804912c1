"""Class activation maps by the principal direction of a layer's features."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import warn
from .cam import LayerCombination, is_signed

CERTAIN = 0.5
"""The correlation of a map with the strength of the activations from which its sign counts as certain."""


class EigenCAM(LayerCombination):
    """What the activations of a layer have most in common, whatever the class.

    The places' activations are projected on their first right singular vector, without centring, as in the paper. The
    sign of a singular vector is arbitrary: here the map is high where the activations are strong, which is measured by
    the norm of each place. Where no activation is negative, that is the only sign without negative values.

    Values: (N, 1, h, w), in units of activation, the same for every class: the target changes the score only.

    Warns:
        SaliencyWarning: The activations are signed, and the map hardly follows their strength, so that the background
            may be what is high. Use `EigenGradCAM` or `GradCAM`, or choose a layer behind a ReLU.

    Raises:
        LayerError: The layer does not exist, is not run, or has no extent in space.

    Source: Muhammad and Yeasin, "Eigen-CAM" (2020), https://arxiv.org/abs/2008.00299.
    """

    name = "eigen_cam"
    units = "activation"
    gradients = "none"
    cost = "1 forward"

    def combine(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """The projection of the activations on their first singular vector."""
        strength = torch.linalg.vector_norm(activation, dim=1)
        values = principal_map(activation, strength)
        astray = ~_follows(values[:, 0], strength)
        if bool(astray.any()) and bool((astray & is_signed(activation)).any()):
            warn(
                f"{self.name}: the activations of this layer are signed and the map hardly follows their strength, so "
                "its sign is uncertain and the background may be what is high; use eigen_grad_cam or grad_cam, or "
                "choose a layer behind a ReLU"
            )
        return values


class EigenGradCAM(LayerCombination):
    """What gradient times activation have most in common over the places of a layer: Eigen-CAM that knows the class.

    As in the source, each channel is centred over the places first, so the map sums to 0: it says where a place differs
    from the mean place. (Eigen-CAM's own paper does not centre.) The source leaves the sign to chance: here the map
    goes along with gradient times activation summed over the channels, which is `HiResCAM`.

    It reacts little to the class: with a randomised classifier its maps stay nearly the same, up to their sign.

    Values: (N, 1, h, w), signed, in score units.

    Raises:
        LayerError: The layer does not exist, is not run, or has no extent in space.
        TargetError: The target does not fit the model's output.

    Source: Gildenblat and contributors, "PyTorch library for CAM methods" (2021),
        https://github.com/jacobgil/pytorch-grad-cam; the projection is that of Muhammad and Yeasin (2020), centred.
    """

    name = "eigen_grad_cam"

    def combine(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """The projection of centred gradient times activation on their first singular vector."""
        contribution = gradient * activation
        return principal_map(contribution - contribution.mean((2, 3), keepdim=True), contribution.sum(1))


def principal_map(features: Tensor, along: Tensor) -> Tensor:
    """The places of (N, K, h, w) projected on the first right singular vector of (h * w, K): (N, 1, h, w).

    By the eigenvectors of the smaller Gram matrix, hundreds of times cheaper than a decomposition of the whole.

    Args:
        features: The places' features.
        along: (N, h, w) the map that the projection goes along with: their product sums to at least 0.
    """
    exact = features if features.dtype in (torch.float32, torch.float64) else features.float()
    places = exact.flatten(2).transpose(1, 2)  # (N, hw, K)
    # A Gram matrix squares its entries: scaled, they neither overflow nor vanish.
    scale = places.abs().amax((1, 2), keepdim=True)
    places = places / torch.where(scale == 0, torch.ones_like(scale), scale)
    if places.shape[1] <= places.shape[2]:
        values, vectors = torch.linalg.eigh(places @ places.transpose(1, 2))  # (N, hw, hw), ascending
        projection = vectors[:, :, -1] * values[:, -1:].clamp(min=0).sqrt()
    else:
        _, vectors = torch.linalg.eigh(places.transpose(1, 2) @ places)
        projection = (places @ vectors[:, :, -1:]).squeeze(2)
    agreement = (projection * along.flatten(1) / scale[:, 0]).sum(1, keepdim=True)
    projection = torch.where(agreement < 0, -projection, projection) * scale[:, 0]
    return projection.reshape(features.shape[0], 1, *features.shape[2:]).to(features.dtype)


def _follows(values: Tensor, strength: Tensor) -> Tensor:
    """Whether two maps (N, h, w) correlate by at least `CERTAIN`, or one is constant, for each image (N,)."""
    one, other = (each.flatten(1) - each.flatten(1).mean(1, keepdim=True) for each in (values, strength))
    return (one * other).sum(1).ge(CERTAIN * one.norm(dim=1) * other.norm(dim=1))
