"""Eigen-CAM against the singular value decomposition that it stands for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from saliency import EigenCAM, EigenGradCAM, GradCAM, HiResCAM, SaliencyWarning
from saliency.methods.cam import principal_map


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


def by_svd(features: Tensor, along: Tensor | None = None) -> Tensor:
    """The places projected on the first right singular vector, going along with their norm or a map: (N, h, w)."""
    maps = []
    along = features.double().norm(dim=1) if along is None else along.double()
    for each, wanted in zip(features.double(), along, strict=True):  # (K, h, w)
        places = each.flatten(1).T  # (hw, K)
        _, _, right = torch.linalg.svd(places, full_matrices=False)
        projection = places @ right[0]
        if projection @ wanted.flatten() < 0:
            projection = -projection
        maps.append(projection.reshape(each.shape[1:]))
    return torch.stack(maps)


MORE_CHANNELS, MORE_PLACES = 90, 6  # the map has 7 * 9 places: each branch of the Gram matrix is taken


@pytest.mark.parametrize("width", [MORE_CHANNELS, MORE_PLACES, 63])
@pytest.mark.parametrize("shift", [0.3, 0.0, -0.3])
def test_the_map_is_the_projection_on_the_first_singular_vector(width: int, shift: float) -> None:
    features = torch.randn(3, width, 7, 9) + shift
    found = principal_map(features, features.norm(dim=1))
    assert found.shape == (3, 1, 7, 9)
    assert torch.allclose(found[:, 0].double(), by_svd(features), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [MORE_CHANNELS, MORE_PLACES])
def test_the_projection_goes_along_with_the_map_that_it_is_given(width: int) -> None:
    features = torch.randn(4, width, 7, 9) - torch.tensor([1.0, -1.0, 0.1, -0.1])[:, None, None, None]
    for along in (features.sum(1), features.norm(dim=1), torch.randn(4, 7, 9)):
        found = principal_map(features, along)
        assert ((found[:, 0] * along).sum((1, 2)) > 0).all()
        assert torch.allclose(principal_map(features, -along), -found, rtol=1e-4, atol=1e-5)


class Signed(nn.Module):
    """Channels of both signs: an object in the middle, strong or weak, in front of a background of one direction."""

    def __init__(self, strong: float, *, act: nn.Module | None = None) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 32, 1, bias=False), act or nn.Identity())
        self.head = nn.Linear(32, 5)
        inside = torch.zeros(8, 8)
        inside[2:5, 3:6] = 1
        # The object and the background are different directions of the channels, by two of the input's channels.
        self.image = torch.stack([strong * inside, 1 - inside, 0.01 * torch.randn(8, 8)])[None]
        self.inside = inside.bool()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x).mean((2, 3)))
        return out


def test_the_sign_on_signed_activations_is_that_of_their_strength() -> None:
    """By the sum of the channels, which says nothing where they are signed, half of these come out inverted."""
    for seed in range(8):
        torch.manual_seed(seed)
        model = Signed(6.0)
        values = EigenCAM(model, "features").attribute(model.image, 0).values[0, 0]
        assert values[model.inside].mean() > values[~model.inside].mean() + 0.5 * values.std()


def test_a_sign_that_the_strength_does_not_decide_is_a_warning() -> None:
    torch.manual_seed(1)
    model = Signed(1.5)  # the object is stronger, but the background is larger and has the principal direction
    with pytest.warns(SaliencyWarning, match=r"sign is uncertain.*grad_cam"):
        EigenCAM(model, "features").attribute(model.image, 0)
    for act in (nn.ReLU(), nn.Softplus()):  # no activation is negative
        model = Signed(1.5, act=act)
        assert (EigenCAM(model, "features").attribute(model.image, 0).values >= 0).all()


@pytest.mark.parametrize("width", [MORE_CHANNELS, MORE_PLACES])
def test_features_of_zeros_give_a_map_of_zeros(width: int) -> None:
    assert torch.equal(principal_map(torch.zeros(2, width, 7, 9), torch.zeros(2, 7, 9)), torch.zeros(2, 1, 7, 9))


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
def test_eigen_grad_cam_reads_centred_gradient_times_activation(width: int) -> None:
    model, x = Net(width).eval(), torch.randn(2, 3, 7, 9)
    a = model.features(x).detach().requires_grad_()
    (g,) = torch.autograd.grad(model.tail(a).mean((2, 3))[:, 2].sum(), a)
    found = EigenGradCAM(model, "features").attribute(x, 2).values
    both = (a * g).detach()
    wanted = by_svd(both - both.mean((2, 3), keepdim=True), both.sum(1))
    assert torch.allclose(found[:, 0].double(), wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))
    assert not torch.allclose(found, EigenGradCAM(model, "features").attribute(x, 3).values, rtol=0.1)
    hires = HiResCAM(model, "features").attribute(x, 2).values
    assert ((hires * found).sum((1, 2, 3)) > 0).all()


def test_features_of_one_pattern_give_that_pattern() -> None:
    """With one pattern in all channels the projection is the pattern times the length of its channel weights."""
    pattern, weights = torch.rand(1, 1, 7, 9), torch.rand(1, 20, 1, 1)
    assert torch.allclose(principal_map(pattern * weights, pattern[0]), pattern * weights.norm(), rtol=1e-4)


@pytest.mark.parametrize("width", [MORE_CHANNELS, MORE_PLACES])
def test_double_precision_is_kept(width: int) -> None:
    features = torch.rand(1, width, 7, 9, dtype=torch.float64)
    found = principal_map(features, features.norm(dim=1))
    assert found.dtype == torch.float64
    assert torch.allclose(found[:, 0], by_svd(features), rtol=1e-9)


@pytest.mark.parametrize("width", [MORE_CHANNELS, MORE_PLACES])
@pytest.mark.parametrize("scale", [1e-25, 1e-12, 1e12, 1e25])
def test_the_map_scales_with_the_features_however_small_or_large(width: int, scale: float) -> None:
    """The gradient of a small probability is tiny, and its square is less than float32 can hold."""
    features = torch.rand(1, width, 7, 9)
    found = principal_map(features * scale, features.sum(1) * scale)
    assert torch.allclose(found / scale, principal_map(features, features.sum(1)), rtol=1e-3)


@contextmanager
def their_warnings_are_theirs() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def fits(found: Tensor, theirs: Any) -> bool:
    """Whether the package's map (h, w), of which it shows the positive part, 0 to 1, is ours up to the sign."""
    shown = [(sign * found).clamp(min=0).numpy() / float((sign * found).max()) for sign in (1, -1)]
    return any(np.allclose(each, theirs, rtol=0, atol=1e-4) for each in shown)


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
    assert all(fits(map_, theirs) for map_, theirs in zip(ours, wanted, strict=True))


def test_eigen_grad_cam_equals_grad_cam_the_package_up_to_the_sign() -> None:
    model, x = Net(8).eval(), torch.randn(2, 3, 7, 9)
    with their_warnings_are_theirs():
        peer = pytest.importorskip("pytorch_grad_cam")
        targets = pytest.importorskip("pytorch_grad_cam.utils.model_targets")
        with peer.EigenGradCAM(model=model, target_layers=[model.features]) as cam:
            wanted = cam(x, [targets.ClassifierOutputTarget(2)] * 2)
    ours = EigenGradCAM(model, "features").attribute(x, 2).values[:, 0]
    assert all(fits(map_, theirs) for map_, theirs in zip(ours, wanted, strict=True))
