"""CAMs against their closed forms, against the papers' formulas written out, and against captum and grad-cam.

Eigen-CAM against the singular value decomposition that it stands for.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from saliency import (
    CAM,
    METHODS,
    AblationCAM,
    Attribution,
    EigenCAM,
    EigenGradCAM,
    FinerCAM,
    GradCAM,
    GradCAMPlusPlus,
    HiResCAM,
    LayerCAM,
    Together,
    VanillaGradient,
    XGradCAM,
    contrast,
    probability,
    value,
)
from saliency.attribution.options import declared_options
from saliency.errors import LayerError, MethodError, NotApplicableError, SaliencyWarning
from saliency.methods.cam import LayerCombination, principal_map
from saliency.testing import images, tiny_model, tiny_transformer
from saliency.testing.case import tiny_model_for
from tests.models import OwnForward, PooledNet, small_vit
from tests.selection import of_each_family

CLASSES = [3, 0]


class Flattened(nn.Module):
    """Features, flattened, one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 8, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(8 * 7 * 5, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x).flatten(1))
        return out


class Deep(nn.Module):
    """A head with a ReLU of its own, so that the gradient differs from place to place. Keeps the size of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 8, 3, padding=1), nn.ReLU()
        )
        self.tail = nn.Sequential(nn.Conv2d(8, 6, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 9 * 7, 5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.tail(self.features(x))
        return out


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, 9, 7, dtype=torch.float64)


def deep() -> Deep:
    return Deep().double()


def at_the_layer(model: Any, x: Tensor, classes: list[int]) -> tuple[Tensor, Tensor]:
    """Activation and gradient (N, K, h, w), by the shortest way there is: the model cut in two by hand."""
    activation = model.features(x).detach().requires_grad_()
    if isinstance(model, Deep):
        logits = model.tail(activation)
    elif isinstance(model, Flattened):
        logits = model.head(activation.flatten(1))
    else:
        logits = model.head(activation.mean((2, 3)))
    score = sum(logits[i, c] for i, c in enumerate(classes))
    (gradient,) = torch.autograd.grad(score, activation)
    return activation.detach(), gradient


# Closed forms.


def test_grad_cam_is_the_mean_gradient_times_the_activation(x: Tensor) -> None:
    model = deep()
    a, g = at_the_layer(model, x, CLASSES)
    expected = torch.zeros(2, 1, 9, 7, dtype=torch.float64)
    for n in range(2):
        for k in range(8):
            expected[n, 0] += g[n, k].sum() / 63 * a[n, k]
    found = GradCAM(model, "features").attribute(x, CLASSES)
    assert torch.allclose(found.values, expected, rtol=1e-12, atol=0)
    assert (expected < 0).any(), "a map that is clipped could not be told from this one"
    assert torch.equal(found.scores, model(x)[[0, 1], CLASSES])


def test_an_output_of_one_number_per_image_has_a_default_layer(x: Tensor) -> None:
    model = deep()
    number = OwnForward(lambda self, x: self.model(x)[:, 1], model=model)
    found = GradCAM(number).attribute(x, value())
    assert torch.equal(found.values, GradCAM(model).attribute(x, value(1)).values)


def test_behind_pooling_and_a_linear_head_grad_cam_is_cam_over_the_number_of_places(x: Tensor) -> None:
    model = PooledNet().double()
    cam = CAM(model, "features").attribute(x, CLASSES).values
    grad_cam = GradCAM(model, "features").attribute(x, CLASSES).values
    places = 7 * 5
    assert torch.allclose(cam, grad_cam * places, rtol=1e-12, atol=1e-15)
    by_hand = torch.einsum("nk,nkhw->nhw", model.head.weight[CLASSES], model.features(x))[:, None]
    assert torch.allclose(cam, by_hand, rtol=1e-12, atol=1e-15)


def test_the_mean_of_a_cam_and_the_bias_are_the_logit(x: Tensor) -> None:
    model = PooledNet().double()
    found = CAM(model, "features").attribute(x, CLASSES)
    assert torch.allclose(found.values.mean((1, 2, 3)) + model.head.bias[CLASSES], found.scores, rtol=1e-12)


def test_cam_reads_a_head_that_is_a_convolution_of_single_points(x: Tensor) -> None:
    class Convolved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Conv2d(3, 8, 3)
            self.head = nn.Conv2d(8, 5, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.features(x).mean((2, 3), keepdim=True))
            return out.flatten(1)

    model = Convolved().double()
    found = CAM(model, "features").attribute(x, 2)
    grad_cam = GradCAM(model, "features").attribute(x, 2).values
    assert torch.allclose(found.values, grad_cam * 35, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", [CAM, AblationCAM])
def test_cam_reads_the_head_in_half_precision(
    method: type[CAM | AblationCAM], dtype: torch.dtype, autocast: bool, x: Tensor
) -> None:
    model, x = PooledNet(), x.float()
    expected = method(model, "features").attribute(x, CLASSES).values
    with torch.autocast("cpu", dtype, enabled=autocast):
        given = (model, x) if autocast else (model.to(dtype), x.to(dtype))
        found = method(given[0], "features").attribute(given[1], CLASSES)
    assert torch.allclose(found.values.float(), expected, atol=0.03 * float(expected.abs().max()))
    assert all("closed form" in each.note for each in found.run_stats)  # the linear head was found


@pytest.mark.parametrize("make", [Flattened, Deep])
def test_cam_refuses_another_head(make: type[nn.Module]) -> None:
    model = make().double()
    with pytest.raises(NotApplicableError, match="use grad_cam"):
        CAM(model, "features").attribute(torch.randn(1, 3, 9, 7, dtype=torch.float64), 1)


def test_cam_refuses_a_head_whose_output_goes_on(x: Tensor) -> None:
    model = nn.Sequential()
    model.add_module("body", PooledNet().double())
    model.add_module("scale", nn.Softmax(1))
    with pytest.raises(NotApplicableError):
        CAM(model, "body.features").attribute(x, 1)


@pytest.mark.parametrize(
    "target", [lambda output: output.sum(1), contrast(1, 2), probability(1), [1, contrast(1, 2)], [probability(1), 1]]
)
@pytest.mark.parametrize("method", [CAM, FinerCAM])
def test_cam_and_finer_cam_refuse_what_is_not_the_score_of_a_class(method: Any, target: Any, x: Tensor) -> None:
    with pytest.raises(NotApplicableError, match="class"):
        method(PooledNet().double(), "features").attribute(x, target)


def test_cam_of_a_model_of_one_number_has_opposite_maps_of_its_two_classes(x: Tensor) -> None:
    model = PooledNet().double()
    model.head = nn.Linear(8, 1).double()
    cam, grad_cam = (method(model, "features", categories=["no", "yes"]) for method in (CAM, GradCAM))
    for target in (0, 1, [1, 0], None):
        expected = grad_cam.attribute(x, target).values * 35
        torch.testing.assert_close(cam.attribute(x, target).values, expected, rtol=1e-12, atol=1e-15)


def test_hires_cam_and_the_bias_sum_to_the_logit_with_a_flattened_linear_head(x: Tensor) -> None:
    model = Flattened().double()
    found = HiResCAM(model, "features").attribute(x, CLASSES)
    total = found.values.sum((1, 2, 3)) + model.head.bias[CLASSES]
    assert torch.allclose(total, found.scores, rtol=1e-12, atol=1e-14)


def test_behind_pooling_and_a_linear_head_hires_cam_is_grad_cam(x: Tensor) -> None:
    model = PooledNet().double()
    hires = HiResCAM(model, "features").attribute(x, CLASSES).values
    assert torch.allclose(hires, GradCAM(model, "features").attribute(x, CLASSES).values, rtol=1e-12, atol=1e-16)


def test_hires_cam_differs_from_grad_cam_where_the_gradient_differs_by_place(x: Tensor) -> None:
    model = deep()
    a, g = at_the_layer(model, x, CLASSES)
    hires = HiResCAM(model, "features").attribute(x, CLASSES).values
    assert torch.allclose(hires, (a * g).sum(1, keepdim=True), rtol=1e-12)
    assert not torch.allclose(hires, GradCAM(model, "features").attribute(x, CLASSES).values, rtol=0.1)


def derivatives_of_exp(head: nn.Module, a: Tensor, c: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """exp(y) and its first, second and third derivatives by each single activation, by differentiating three times."""
    first, second, third = torch.zeros_like(a), torch.zeros_like(a), torch.zeros_like(a)
    for index in np.ndindex(*a.shape):
        single = a[index].clone().requires_grad_()
        changed = a.clone()
        changed[index] = single
        whole = head(changed[None])[0, c].exp()
        (d1,) = torch.autograd.grad(whole, single, create_graph=True)
        (d2,) = torch.autograd.grad(d1, single, create_graph=True)
        (d3,) = torch.autograd.grad(d2, single)
        first[index], second[index], third[index] = d1.detach(), d2.detach(), d3
    return head(a[None])[0, c].exp().detach(), first, second, third


def test_grad_cam_plus_plus_is_equation_19_with_the_true_derivatives_of_the_exponential() -> None:
    model = nn.Sequential()
    model.add_module("features", nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()))
    tail = nn.Sequential(nn.Conv2d(4, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 3 * 2, 4))
    model.add_module("tail", tail)
    model.double()
    x = torch.randn(1, 3, 6, 5, dtype=torch.float64)
    a = model[0](x)[0].detach()  # (K, 4, 3)
    whole, first, second, third = derivatives_of_exp(tail, a, 2)
    expected = torch.zeros(4, 3, dtype=torch.float64)
    counted = 0
    for k in range(4):
        weight = torch.zeros((), dtype=torch.float64)
        for i in range(4):
            for j in range(3):
                if second[k, i, j] == 0:
                    continue
                alpha = second[k, i, j] / (2 * second[k, i, j] + a[k].sum() * third[k, i, j])
                weight += alpha * first[k, i, j].clamp(min=0)
                counted += int(first[k, i, j] > 0)
        expected += weight / whole * a[k]  # the exponential itself is a factor of the whole map
    found = GradCAMPlusPlus(model, "features").attribute(x, 2).values[0, 0]
    assert 0 < counted < 4 * 12
    assert torch.allclose(found, expected, rtol=1e-10)


def test_grad_cam_plus_plus_is_the_powers_of_the_gradient(x: Tensor) -> None:
    model = deep()
    a, g = at_the_layer(model, x, CLASSES)
    alpha = torch.where(g == 0, 0, g**2 / (2 * g**2 + a.sum((2, 3), keepdim=True) * g**3))
    expected = ((alpha * g.clamp(min=0)).sum((2, 3), keepdim=True) * a).sum(1, keepdim=True)
    assert torch.allclose(GradCAMPlusPlus(model, "features").attribute(x, CLASSES).values, expected, rtol=1e-10)


SMALL: dict[str, dict[str, Any]] = {"score_cam": {}}
SMALL |= {"ablation_cam": {}, "xgrad_cam": {}, "grad_cam_plus_plus": {}, "smooth_grad_cam_plus_plus": {"passes": 2}}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("layer", ["encoder.layers.encoder_layer_0", None])
def test_what_takes_activations_for_evidence_warns_at_the_tokens_of_a_transformer(name: str, layer: str | None) -> None:
    with pytest.warns(SaliencyWarning, match=rf"^{name}: .*signed.*use grad_cam") as caught:
        found = METHODS[name](small_vit().eval(), layer=layer, **SMALL[name]).attribute(torch.randn(1, 3, 32, 32), 1)
    assert len(caught) == 1
    assert found.values.isfinite().all()


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("act", [nn.ReLU, nn.SiLU, nn.GELU, nn.ELU])
def test_slightly_negative_activations_of_a_convolution_are_not_worth_a_warning(
    name: str, act: type[nn.Module]
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), act(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with torch.no_grad():
        model[1].weight.fill_(3)  # type: ignore[operator]
    METHODS[name](model, layer="2", **SMALL[name]).attribute(torch.randn(1, 3, 9, 9), 1)


def test_xgrad_cam_is_the_gradient_weighted_by_the_share_of_the_activation(x: Tensor) -> None:
    model = deep()
    a, g = at_the_layer(model, x, CLASSES)
    expected = torch.zeros(2, 9, 7, dtype=torch.float64)
    for n in range(2):
        for k in range(8):
            if a[n, k].sum() > 0:
                expected[n] += (g[n, k] * a[n, k] / a[n, k].sum()).sum() * a[n, k]
    found = XGradCAM(model, "features").attribute(x, CLASSES).values[:, 0]
    assert torch.allclose(found, expected, rtol=1e-11, atol=1e-16)
    assert torch.allclose(found.sum((1, 2)), (g * a).sum((1, 2, 3))), "the paper's axioms: the map sums to g times a"


@pytest.mark.filterwarnings("ignore:.*activations of this layer are signed")
def test_xgrad_cam_does_not_explode_where_the_activations_of_a_channel_cancel() -> None:
    a = torch.tensor([[1.0, -1.0], [2.0, -2.0 + 1e-9]], dtype=torch.float64)
    b = torch.tensor([[1.0, -2.0], [3.0, -2.0 - 1e-9]], dtype=torch.float64)
    weight = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[7.0, 0.0], [1.0, 5.0]], [[1.0, 1.0], [1.0, 1.0]]]).double()
    x = torch.stack([a, b, torch.zeros_like(a)])[None]
    model = OwnForward(lambda model, x: (model.layer(x) * weight).sum((1, 2, 3))[:, None], layer=nn.Identity())
    found = XGradCAM(model, "layer").attribute(x, 0).values[0, 0]
    # Sums of +1e-9 and -1e-9 are taken for +1 % and -1 % of the sum of magnitudes; a channel of zeros counts nothing.
    for_a = (a * weight[0]).sum() / (0.01 * a.abs().sum())
    for_b = (b * weight[1]).sum() / (-0.01 * b.abs().sum())
    assert torch.allclose(found, for_a * a + for_b * b, rtol=1e-9)


def test_layer_cam_is_the_positive_gradient_times_the_activation(x: Tensor) -> None:
    model = deep()
    a, g = at_the_layer(model, x, CLASSES)
    expected = sum(torch.where(g[:, k] > 0, g[:, k], 0) * a[:, k] for k in range(8))
    assert isinstance(expected, Tensor)
    found = LayerCAM(model, "features").attribute(x, CLASSES).values
    assert torch.allclose(found[:, 0], expected, rtol=1e-12)
    assert not torch.allclose(found, HiResCAM(model, "features").attribute(x, CLASSES).values, rtol=0.1)


# Any target, any layer.


def test_a_probability_changes_the_gradient_and_so_the_map(x: Tensor) -> None:
    model = deep()
    a = model.features(x).detach().requires_grad_()
    (g,) = torch.autograd.grad(model.tail(a).softmax(1)[:, 3].sum(), a)
    expected = (g.mean((2, 3), keepdim=True) * a.detach()).sum(1, keepdim=True)
    found = GradCAM(model, "features").attribute(x, probability(3))
    assert torch.allclose(found.values, expected, rtol=1e-11)


def test_a_negated_target_gives_the_counterfactual_map(x: Tensor) -> None:
    model = deep()
    against = GradCAM(model, "features").attribute(x, lambda output: -output[:, 1]).values
    assert torch.equal(against, -GradCAM(model, "features").attribute(x, 1).values)


def test_a_score_that_does_not_depend_on_the_layer_is_an_error(x: Tensor) -> None:
    class Fork(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.aside = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            self.aside(x)
            return super().forward(x)

    with pytest.raises(LayerError, match="does not depend on layer"):
        GradCAM(Fork().double(), "aside").attribute(x, 1)


# Peers, where they are right.


@contextmanager
def their_warnings_are_theirs() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_grad_cam_equals_captum() -> None:
    with their_warnings_are_theirs():
        attr = pytest.importorskip("captum.attr")
        model, x = Deep().eval(), torch.randn(2, 3, 9, 7)
        theirs = attr.LayerGradCam(model, model.features).attribute(x, CLASSES, relu_attributions=False)
    ours = GradCAM(model, "features").attribute(x, CLASSES).values
    assert torch.allclose(ours, theirs.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("ours", "theirs", "tolerance"),
    [
        (GradCAM, "GradCAM", 1e-5),
        (HiResCAM, "HiResCAM", 1e-5),
        (XGradCAM, "XGradCAM", 1e-5),
        (LayerCAM, "LayerCAM", 1e-5),
        (GradCAMPlusPlus, "GradCAMPlusPlus", 1e-2),  # theirs adds 1e-6 to the denominator
    ],
)
def test_a_cam_equals_grad_cam_the_package(ours: type[Attribution], theirs: str, tolerance: float) -> None:
    with their_warnings_are_theirs():
        peer = pytest.importorskip("pytorch_grad_cam")
        targets = pytest.importorskip("pytorch_grad_cam.utils.model_targets")
        model, x = Deep().eval(), torch.randn(2, 3, 9, 7)
        with torch.no_grad():
            model.get_parameter("tail.3.weight").mul_(
                20
            )  # so that their absolute constants are small beside the gradients
        with getattr(peer, theirs)(model=model, target_layers=[model.features]) as cam:
            wanted = cam(x, [targets.ClassifierOutputTarget(c) for c in CLASSES])  # (N, H, W), each 0 to 1
    map_ = ours(model, layer=model.features).attribute(x, CLASSES).values[:, 0].clamp(min=0)
    low, high = map_.amin((1, 2), keepdim=True), map_.amax((1, 2), keepdim=True)
    assert (high > 0).all()
    assert np.abs(((map_ - low) / (high - low)).numpy() - wanted).max() < tolerance


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
    with pytest.warns(SaliencyWarning, match=r"correlates weakly.*grad_cam"):
        EigenCAM(model, "features").attribute(model.image, 0)
    for act in (nn.ReLU(), nn.Softplus()):  # no activation is negative
        model = Signed(1.5, act=act)
        assert (EigenCAM(model, "features").attribute(model.image, 0).values >= 0).all()


def test_eigen_cam_on_tokens_always_warns() -> None:
    """On photos it showed the background, also where the sign was certain."""
    with pytest.warns(SaliencyWarning, match=r"are tokens.*background.*grad_cam"):
        EigenCAM(tiny_transformer()).attribute(images(1), 0)


class InParts(nn.Module):
    """A model that runs two images at a time, as in micro-batches."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.inner(part) for part in x.chunk(2)])


@pytest.mark.parametrize("name", of_each_family())
@pytest.mark.filterwarnings("ignore::saliency.errors.SaliencyWarning")
def test_a_model_that_runs_a_batch_in_parts_gets_a_map_for_each_image_or_an_error(name: str) -> None:
    method, targets = METHODS[name], [0, 1, 2, 0]
    inner = tiny_model_for(method)()
    in_parts = method(InParts(inner), **method.preview_options)
    if issubclass(method, LayerCombination):
        with pytest.raises(LayerError, match="2 rows for 4 images, so the model runs them in parts; explain one image"):
            in_parts.attribute(images(4), targets)
        return
    with suppress(LayerError, NotApplicableError):
        found = in_parts.attribute(images(4), targets).values
        wanted = method(inner, **method.preview_options).attribute(images(4), targets).values
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("name", [name for name, cls in METHODS.items() if "layer" in declared_options(cls)])
def test_the_whole_model_is_not_a_layer(name: str) -> None:
    model = tiny_model()
    for layer in ("", model, [""]):
        with pytest.raises(LayerError, match=r'layer "" is the whole .*; its outermost layers are '):
            METHODS[name](model, layer)


def test_a_method_of_the_users_must_return_a_map_for_each_image() -> None:
    class One(LayerCombination):
        def combine(self, activation: Tensor, gradient: Tensor) -> Tensor:
            return activation[:1, :1]

    with pytest.raises(MethodError, match=r"One returned values \(1, 1, 8, 8\) and scores \(4,\) for 4 images"):
        One(tiny_model(), "relu").attribute(images(4), 0)


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


@pytest.mark.parametrize(
    ("kernel", "size", "grid"), [((8, 3), (8, 32), "1x30"), ((1, 3), (1, 32), ""), ((3, 3), (8, 32), "")]
)
def test_a_note_says_that_a_grid_of_one_row_shows_no_position_along_the_other_axis(
    kernel: tuple[int, int], size: tuple[int, int], grid: str
) -> None:
    torch.manual_seed(0)
    features = nn.Sequential(nn.Conv2d(1, 4, kernel), nn.ReLU())
    reader = nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).eval()
    [note] = GradCAM(reader).attribute(torch.rand(1, 1, *size), 1).notes
    start = f"layer 0 has a grid of {grid}, so the map shows no position"
    assert note.partition(" along")[0] == (start if grid else "")
    assert VanillaGradient(reader).attribute(torch.rand(1, 1, *size), 1).notes == ("",)


class Recurrent(nn.Module):
    """A convolution that runs three times on its own output and the image."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.head = nn.Conv2d(6, 3, 3, padding=1), nn.Linear(3, 4)

    def states(self, x: Tensor) -> list[Tensor]:
        states = [torch.zeros_like(x)]
        for _ in range(3):
            states.append(self.step(torch.cat([x, states[-1].relu()], 1)))
        return states[1:]

    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        out: Tensor = self.head(self.states(x)[-1].mean((2, 3))) * scale
        return out


def test_calls_of_a_recurrent_step_are_summed_and_a_warning_counts_them() -> None:
    torch.manual_seed(0)
    model, x = Recurrent().eval(), torch.rand(2, 3, 8, 8)
    states = model.states(x)
    gradients = torch.autograd.grad(model.head(states[-1].mean((2, 3)))[:, 1].sum(), states)
    maps = [
        (gradient.mean((2, 3), keepdim=True) * state).sum(1, keepdim=True).detach()
        for gradient, state in zip(gradients, states, strict=True)
    ]
    summed = GradCAM(model, "step", calls="sum").attribute(x, 1)
    torch.testing.assert_close(summed.values, sum(maps, torch.zeros(())))
    with pytest.warns(SaliencyWarning, match='"step" is called 3 times'):
        last = GradCAM(model, "step").attribute(x, 1)
    torch.testing.assert_close(last.values, maps[-1])
    scaled = GradCAM(model, "step", calls="sum").attribute(x, 1, forward_args=(torch.full((2, 1), 3.0),))
    torch.testing.assert_close(scaled.values, 3 * summed.values)
    together = Together(GradCAM(model, "step", calls="sum"), LayerCAM(model, "step", calls="sum"))
    assert torch.equal(together.attribute(x, 1)[0].values, summed.values)
    with pytest.raises(MethodError, match="calls='all' is not one of 'sum'"):
        GradCAM(model, calls="all")  # type: ignore[arg-type]


def test_a_shared_activation_is_read_at_its_last_call_without_a_warning() -> None:
    relu = nn.ReLU()
    model = nn.Sequential(nn.Conv2d(3, 4, 3), relu, nn.Conv2d(4, 4, 3), relu, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert GradCAM(model.eval(), "3").attribute(torch.rand(1, 3, 9, 9), 1).values.shape == (1, 1, 5, 5)
