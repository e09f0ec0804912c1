"""Eigen-CAM against the singular value decomposition that it stands for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from saliency import EigenCAM, EigenGradCAM, GradCAM, HiResCAM
from saliency.methods.eigen import principal_map


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Net(nn.Module):
    """`width` channels on the places of the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU())
        self.tail = nn.Sequential(nn.Conv2d(width, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.tail(self.features(x))
        return out.mean((2, 3))


def by_svd(features: Tensor) -> Tensor:
    """The places projected on the first right singular vector, going along with the summed features: (N, h, w)."""
    maps = []
    for each in features.double():  # (K, h, w)
        places = each.flatten(1).T  # (hw, K)
        _, _, right = torch.linalg.svd(places, full_matrices=False)
        projection = places @ right[0]
        if projection @ places.sum(1) < 0:
            projection = -projection
        maps.append(projection.reshape(each.shape[1:]))
    return torch.stack(maps)


MORE_CHANNELS, MORE_PLACES = 90, 6  # the map has 7 * 9 places: each branch of the Gram matrix is taken


@pytest.mark.parametrize("width", [MORE_CHANNELS, MORE_PLACES, 63])
@pytest.mark.parametrize("shift", [0.3, 0.0, -0.3])
def test_the_map_is_the_projection_on_the_first_singular_vector(width: int, shift: float) -> None:
    features = torch.randn(3, width, 7, 9) + shift
    found = principal_map(features)
    assert found.shape == (3, 1, 7, 9)
    assert torch.allclose(found[:, 0].double(), by_svd(features), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [MORE_CHANNELS, MORE_PLACES])
def test_the_map_goes_along_with_the_summed_activations(width: int) -> None:
    features = torch.randn(4, width, 7, 9) - torch.tensor([1.0, -1.0, 0.1, -0.1])[:, None, None, None]
    along = (principal_map(features)[:, 0] * features.sum(1)).sum((1, 2))
    assert (along > 0).all()
    assert torch.allclose(principal_map(-features), -principal_map(features), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [MORE_CHANNELS, MORE_PLACES])
def test_features_of_zeros_give_a_map_of_zeros(width: int) -> None:
    assert torch.equal(principal_map(torch.zeros(2, width, 7, 9)), torch.zeros(2, 1, 7, 9))


@pytest.mark.parametrize("width", [MORE_CHANNELS, MORE_PLACES])
def test_eigen_cam_reads_the_activations_and_no_class(width: int) -> None:
    model, x = Net(width).eval(), torch.randn(2, 3, 7, 9)
    found = EigenCAM(model, "features").attribute(x, 0)
    assert torch.allclose(found.values[:, 0].double(), by_svd(model.features(x).detach()), rtol=1e-4, atol=1e-5)
    other = EigenCAM(model, "features").attribute(x, 3)
    assert torch.equal(found.values, other.values)
    assert not torch.equal(found.scores, other.scores)


def test_eigen_cam_takes_no_gradient() -> None:
    model, x = Net(6), torch.randn(1, 3, 7, 9)
    recorded: list[bool] = []
    model.tail.register_forward_hook(lambda module, inputs, output: recorded.append(output.requires_grad))
    EigenCAM(model, "features").attribute(x, 0)
    assert recorded == [False]
    GradCAM(model, "features").attribute(x, 0)
    assert recorded == [False, True]


@pytest.mark.parametrize("width", [MORE_CHANNELS, MORE_PLACES])
def test_eigen_grad_cam_reads_gradient_times_activation(width: int) -> None:
    model, x = Net(width).eval(), torch.randn(2, 3, 7, 9)
    a = model.features(x).detach().requires_grad_()
    (g,) = torch.autograd.grad(model.tail(a).mean((2, 3))[:, 2].sum(), a)
    found = EigenGradCAM(model, "features").attribute(x, 2).values
    wanted = by_svd((a * g).detach())
    assert torch.allclose(found[:, 0].double(), wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))
    assert not torch.allclose(found, EigenGradCAM(model, "features").attribute(x, 3).values, rtol=0.1)


def test_features_of_one_pattern_give_that_pattern() -> None:
    """With one pattern in all channels the projection is the pattern times the length of its channel weights."""
    pattern, weights = torch.rand(1, 1, 7, 9), torch.rand(1, 20, 1, 1)
    assert torch.allclose(principal_map(pattern * weights), pattern * weights.norm(), rtol=1e-4)
    model, x = Net(8).eval(), torch.randn(1, 3, 7, 9)
    one = HiResCAM(model, "features").attribute(x, 1).values  # summed over channels, so only near to the eigenvector
    principal = EigenGradCAM(model, "features").attribute(x, 1).values
    assert (one * principal).sum() > 0


@pytest.mark.parametrize("width", [MORE_CHANNELS, MORE_PLACES])
def test_double_precision_is_kept(width: int) -> None:
    features = torch.rand(1, width, 7, 9, dtype=torch.float64)
    found = principal_map(features)
    assert found.dtype == torch.float64
    assert torch.allclose(found[:, 0], by_svd(features), rtol=1e-9)


@pytest.mark.parametrize("width", [MORE_CHANNELS, MORE_PLACES])
@pytest.mark.parametrize("scale", [1e-25, 1e-12, 1e12, 1e25])
def test_the_map_scales_with_the_features_however_small_or_large(width: int, scale: float) -> None:
    """The gradient of a small probability is tiny, and its square is less than float32 can hold."""
    features = torch.rand(1, width, 7, 9)
    assert torch.allclose(principal_map(features * scale) / scale, principal_map(features), rtol=1e-3)


@contextmanager
def their_warnings_are_theirs() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_on_centred_channels_eigen_cam_equals_grad_cam_the_package_up_to_the_sign() -> None:
    """The package centres the channels over the places and leaves the sign to chance; the paper does not centre."""
    model = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.InstanceNorm2d(12), nn.Flatten(), nn.Linear(12 * 63, 4))
    model.eval()
    x = torch.randn(2, 3, 7, 9)
    with their_warnings_are_theirs():
        peer = pytest.importorskip("pytorch_grad_cam")
        with peer.EigenCAM(model=model, target_layers=[model[1]]) as cam:
            wanted = cam(x, None)  # (N, H, W), each 0 to 1
    ours = EigenCAM(model, "1").attribute(x, 0).values[:, 0]
    for map_, theirs in zip(ours, wanted, strict=True):
        fits = [
            np.abs((sign * map_).clamp(min=0).numpy() / float((sign * map_).max()) - theirs).max() for sign in (1, -1)
        ]
        assert min(fits) < 1e-4
