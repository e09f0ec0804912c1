"""Class activation maps by the principal direction of a layer's features."""

from __future__ import annotations

import torch
from torch import Tensor

from .cam import LayerCombination


class EigenCAM(LayerCombination):
    """What the activations of a layer have most in common, whatever the class.

    The places' activations are projected on their first right singular vector, without centring, as in the paper. The
    sign of a singular vector is arbitrary: here the map goes along with the summed activations.

    Values: (N, 1, h, w), in units of activation, the same for every class: the target changes the score only.

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
        return principal_map(activation)


class EigenGradCAM(LayerCombination):
    """What gradient times activation have most in common over the places of a layer: Eigen-CAM that knows the class.

    Values: (N, 1, h, w), in score units.

    Raises:
        LayerError: The layer does not exist, is not run, or has no extent in space.
        TargetError: The target does not fit the model's output.

    Source: Gildenblat and contributors, "PyTorch library for CAM methods" (2021),
        https://github.com/jacobgil/pytorch-grad-cam; the projection is that of Muhammad and Yeasin (2020).
    """

    name = "eigen_grad_cam"

    def combine(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """The projection of gradient times activation on their first singular vector."""
        return principal_map(gradient * activation)


def principal_map(features: Tensor) -> Tensor:
    """The places of (N, K, h, w) projected on the first right singular vector of (h * w, K): (N, 1, h, w).

    By the eigenvectors of the smaller Gram matrix, hundreds of times cheaper than a decomposition of the whole.
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
    along = (projection * places.sum(2)).sum(1, keepdim=True)
    projection = torch.where(along < 0, -projection, projection) * scale[:, 0]
    return projection.reshape(features.shape[0], 1, *features.shape[2:]).to(features.dtype)
