"""Methods made of others: guided Grad-CAM and the fusion of layers, against their parts.

Shapley-CAM, Finer-CAM, Refine-CAM and Smooth Grad-CAM++, against closed forms and the CAMs that they are made of.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import saliency
from saliency import FusedCAM, GradCAM, GradCAMPlusPlus, GuidedBackprop, GuidedGradCAM, HiResCAM, LayerCAM, XGradCAM
from saliency.attribution.estimates import generator
from saliency.errors import LayerError, MethodError, NotApplicableError
from saliency.methods.cam import LayerAttribution
from saliency.methods.combined_cam import FinerCAM, RefineCAM, ShapleyCAM, SmoothGradCAMPlusPlus
from saliency.testing import tiny_model
from tests.models import torchvision_models


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Stages(nn.Module):
    """Three resolutions of a 24 x 16 input: 24 x 16, 12 x 8 and 6 x 4."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.ReLU())
        self.third = nn.Sequential(nn.Conv2d(8, 9, 3, stride=2, padding=1), nn.ReLU())
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(9 * 24, 7), nn.ReLU(), nn.Linear(7, 5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.third(self.second(self.first(x))))
        return out


@pytest.fixture
def model() -> Stages:
    return Stages().double()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, 24, 16, dtype=torch.float64)


def count_calls(module: nn.Module) -> list[int]:
    calls: list[int] = []
    module.register_forward_hook(lambda *_: calls.append(1))
    return calls


# Guided Grad-CAM.


def test_guided_grad_cam_is_the_guided_gradient_times_the_bilinear_positive_cam(model: Stages, x: Tensor) -> None:
    guided = GuidedBackprop(model).attribute(x, [1, 4])
    cam = GradCAM(model, "third").attribute(x, [1, 4]).values
    assert (cam < 0).any(), "what is clipped could not be told"
    wanted = guided.values * F.interpolate(cam.clamp(min=0), (24, 16), mode="bilinear", align_corners=False)
    found = GuidedGradCAM(model, "third").attribute(x, [1, 4])
    assert wanted.any()
    assert torch.allclose(found.values, wanted, rtol=1e-12, atol=0)
    assert torch.equal(found.scores, guided.scores)
    assert found.coverage == guided.coverage
    assert found.layer == "third"


def test_guided_grad_cam_runs_the_model_once(model: Stages, x: Tensor) -> None:
    calls = count_calls(model)
    GuidedGradCAM(model, "third").attribute(x, 1)
    assert len(calls) == 1


def test_the_cam_in_guided_grad_cam_is_not_guided(model: Stages, x: Tensor) -> None:
    """The ReLU of the head lies behind the layer: a guided gradient there would weight other channels."""
    found = GuidedGradCAM(model, "third").attribute(x, 1).values
    again = GuidedGradCAM(model, "third").attribute(x, 1).values
    activation = model.third(model.second(model.first(x))).detach().requires_grad_()
    hidden = model.head[1](activation.flatten(1))
    weight = model.get_parameter("head.3.weight")[1]
    guided_at_layer = torch.autograd.grad((hidden.relu() * weight.clamp(min=0)).sum(), activation)[0]
    cam = (guided_at_layer.mean((2, 3), keepdim=True) * activation.detach()).sum(1, keepdim=True).clamp(min=0)
    wrong = GuidedBackprop(model).attribute(x, 1).values * F.interpolate(cam, (24, 16), mode="bilinear")
    assert torch.equal(found, again)
    assert not torch.allclose(found, wrong, rtol=0.01)


def test_guided_grad_cam_without_a_relu_is_refused(x: Tensor) -> None:
    linear = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).double()
    with pytest.raises(NotApplicableError):
        GuidedGradCAM(linear, "0").attribute(x, 1)


def test_guided_grad_cam_passes_its_option_on() -> None:
    silu = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    x = torch.randn(1, 3, 8, 8)
    found = GuidedGradCAM(silu, "1", smooth="positive").attribute(x, 1)
    cam = GradCAM(silu, "1").attribute(x, 1).values.clamp(min=0)
    wanted = GuidedBackprop(silu, smooth="positive").attribute(x, 1).values * F.interpolate(
        cam, (8, 8), mode="bilinear"
    )
    assert torch.allclose(found.values, wanted, rtol=1e-6)
    assert found.settings == {"smooth": "positive"}
    with pytest.raises(MethodError):
        GuidedGradCAM(silu, "1", smooth="positiv")  # type: ignore[arg-type]


def test_guided_grad_cam_equals_captum_where_captum_is_right() -> None:
    """Plain `nn.ReLU` modules, each used once; captum's default resizing is nearest, so bilinear is asked for."""
    model, x = Stages().eval(), torch.randn(2, 3, 24, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attr = pytest.importorskip("captum.attr")
        theirs = attr.GuidedGradCam(model, model.third).attribute(x.clone(), [1, 4], interpolate_mode="bilinear")
    ours = GuidedGradCAM(model, "third").attribute(x, [1, 4]).values
    assert theirs.any()
    assert torch.allclose(ours, theirs.detach(), rtol=1e-4, atol=1e-8)


# Fusion.


@pytest.mark.parametrize("cam", [LayerCAM, GradCAM, GradCAMPlusPlus, XGradCAM, HiResCAM])
def test_fused_cam_is_the_largest_of_the_layers_scaled_maps(cam: type[LayerAttribution], x: Tensor) -> None:
    model = Stages().double()
    wanted = torch.zeros(2, 1, 24, 16, dtype=torch.float64)
    for layer in ("first", "second", "third"):
        single = cam(model, layer).attribute(x, [1, 4]).values.clamp(min=0)
        for n in range(2):
            scaled = torch.tanh(1.5 * single[n] / single[n].max())
            resized = F.interpolate(scaled[None], (24, 16), mode="bilinear", align_corners=False)[0]
            wanted[n] = torch.maximum(wanted[n], resized)
    layers: list[str | nn.Module] = ["third", model.first, "second"]
    found = FusedCAM(model, layers, cam=cam.name, gamma=1.5).attribute(x, [1, 4])
    assert torch.allclose(found.values, wanted, rtol=1e-11, atol=1e-14)
    assert found.layer == "third, first, second"
    assert found.settings == {"cam": cam.name, "gamma": 1.5}


def test_fused_cam_runs_the_model_once(model: Stages, x: Tensor) -> None:
    calls = count_calls(model)
    FusedCAM(model, ["first", "second", "third"]).attribute(x, 1)
    assert len(calls) == 1


def test_fused_cam_takes_the_ends_of_the_last_resolutions_by_itself(model: Stages, x: Tensor) -> None:
    found = FusedCAM(model).attribute(x, 1)
    assert found.layer == "first, second, third"
    named = FusedCAM(model, ["first", "second", "third"]).attribute(x, 1)
    assert torch.equal(found.values, named.values)


def test_a_layer_without_positive_evidence_adds_nothing(x: Tensor) -> None:
    model = Stages().double()
    with torch.no_grad():
        model.get_parameter("head.1.weight").abs_().neg_()
        model.get_parameter("head.1.bias").fill_(1e4)  # the ReLU behind it is open
        model.get_parameter("head.3.weight").abs_()
    found = FusedCAM(model, ["third"]).attribute(x, 1).values
    assert torch.equal(found, torch.zeros_like(found))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"layers": []}, LayerError),
        ({"layers": "third"}, LayerError),
        ({"layers": ["thrid"]}, LayerError),
        ({"layers": [""]}, LayerError),
        ({"gamma": 0.0}, MethodError),
        ({"gamma": float("nan")}, MethodError),
        ({"cam": "layercam"}, MethodError),
        ({"cam": "eigen_cam"}, MethodError),
    ],
)
def test_a_wrong_option_of_fused_cam_is_refused_at_once(
    model: Stages, options: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        FusedCAM(model, **options)  # type: ignore[arg-type]


class Net(nn.Module):
    """Convolutions with one kind of activation, and a head of two layers."""

    def __init__(self, act: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), act())
        self.second = nn.Sequential(nn.Conv2d(6, 8, 3, stride=2, padding=1), act())
        self.head = nn.Sequential(nn.Conv2d(8, 7, 3), act(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(7, 6))

    def forward(self, small: Tensor) -> Tensor:
        out: Tensor = self.head(self.second(self.first(small)))
        return out


@pytest.fixture
def small() -> Tensor:
    return torch.randn(2, 3, 12, 8, dtype=torch.float64)


def test_shapley_is_grad_cam_behind_a_piecewise_linear_network(small: Tensor) -> None:
    model = Net().double()
    found, plain = (
        ShapleyCAM(model, "second").attribute(small, saliency.value(2)),
        GradCAM(model, "second").attribute(small, 2),
    )
    torch.testing.assert_close(found.values, plain.values)
    smooth = Net(nn.SiLU).double()
    found = ShapleyCAM(smooth, "second").attribute(small, saliency.value(2))
    plain = GradCAM(smooth, "second").attribute(small, 2)
    assert not torch.allclose(found.values, plain.values)


def test_shapley_values_of_a_quadratic_score(small: Tensor) -> None:
    class Quadratic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Conv2d(3, 4, 3)
            self.matrix = nn.Parameter(torch.randn(4, 4))
            self.linear = nn.Parameter(torch.randn(4))

        def forward(self, small: Tensor) -> Tensor:
            pooled = self.body(small).mean((2, 3))
            out: Tensor = pooled @ self.linear + torch.einsum("nk,kl,nl->n", pooled, self.matrix, pooled)
            return out[:, None]

    model = Quadratic().double()
    found = ShapleyCAM(model, "body").attribute(small, 0)
    with torch.no_grad():
        maps = model.body(small)
        pooled, places = maps.mean((2, 3)), maps[0, 0].numel()
        both = model.matrix + model.matrix.T
        # g = (l + B p) / n and H A = B p / n: the channel's share of the score, as the quadratic part is halved.
        weights = (model.linear + pooled @ both - pooled @ both / 2) / places
        torch.testing.assert_close(found.values[:, 0], torch.einsum("nk,nkhw->nhw", weights, maps))
    torch.testing.assert_close(found.values.sum((1, 2, 3)), found.scores)


def test_the_utility_of_a_class_adds_its_log_probability(small: Tensor) -> None:
    model = Net(nn.GELU).double()

    def rest(output: Tensor) -> Tensor:
        return output[:, 4] + output.log_softmax(1)[:, 4]

    found = ShapleyCAM(model, "second").attribute(small, 4)
    torch.testing.assert_close(found.values, ShapleyCAM(model, "second").attribute(small, rest).values)
    torch.testing.assert_close(found.scores, model(small)[:, 4].detach())
    settled = ShapleyCAM(nn.Sequential(model, nn.Softmax(1)), "0.second").attribute(small, 4)
    assert settled.values.isfinite().all()


@pytest.mark.parametrize(
    "targets", [[1, saliency.value(0)], [saliency.contrast(1, 0), 1], [2, lambda output: output[:, 3]]]
)
def test_shapley_of_a_list_of_targets_gives_each_image_the_map_of_its_own_target(targets: Any, small: Tensor) -> None:
    method = ShapleyCAM(Net(nn.GELU).double(), "second")
    found = method.attribute(small, targets)
    for image, target in enumerate(targets):
        torch.testing.assert_close(found.values[image], method.attribute(small[image], target).values[0])


@pytest.mark.filterwarnings("ignore")
def test_shapley_is_pytorch_grad_cams() -> None:
    oracle = pytest.importorskip("pytorch_grad_cam")
    targets = pytest.importorskip("pytorch_grad_cam.utils.model_targets")
    model, small = Net(nn.SiLU).eval(), torch.randn(1, 3, 12, 8)
    expected = oracle.ShapleyCAM(model, [model.second])(small, [targets.ClassifierOutputTarget(1)])
    found = ShapleyCAM(model, "second").attribute(small, saliency.value(1)).values.clamp(min=0)
    shown = F.interpolate(found / found.max(), (12, 8), mode="bilinear")[0, 0]
    assert np.corrcoef(shown.numpy().ravel(), expected[0].ravel())[0, 1] > 0.999


def test_shapley_passes_through_attention() -> None:
    model = torchvision_models().VisionTransformer(16, 4, 2, 2, 8, 16, num_classes=5).eval()
    nn.init.normal_(model.heads[0].weight)
    small = torch.randn(1, 3, 16, 16)
    found = ShapleyCAM(model, "encoder.layers.encoder_layer_0").attribute(small, 2)
    precise = ShapleyCAM(model.double(), "encoder.layers.encoder_layer_0").attribute(small.double(), 2)
    torch.testing.assert_close(found.values.double(), precise.values, rtol=1e-3, atol=1e-5)


def test_shapley_replaces_fused_attention_by_its_formula() -> None:
    method, x = ShapleyCAM(saliency.load("shapes_vit"), "blocks.0"), saliency.testbed.draw_scenes(1).images / 127.5 - 1
    with sdpa_kernel(SDPBackend.MATH):  # which has second derivatives
        expected = method.attribute(x, 0)
    torch.testing.assert_close(method.attribute(x, 0).values, expected.values)


def test_shapley_leaves_the_attention_kernels_of_other_threads() -> None:
    model = torchvision_models().VisionTransformer(16, 4, 2, 2, 8, 16, num_classes=5).eval()
    allowed: list[bool] = []
    model.heads.register_forward_hook(lambda *_: allowed.append(torch.backends.cuda.flash_sdp_enabled()))  # type: ignore[no-untyped-call]
    ShapleyCAM(model, "encoder.layers.encoder_layer_0").attribute(torch.randn(1, 3, 16, 16), 2)
    assert all(allowed)


def test_finer_behind_a_linear_head_is_the_difference_of_class_weights(small: Tensor) -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 6)).double()
    found = FinerCAM(model, "0", classes=2, gamma=0.5).attribute(small, [1, 4])
    weight, maps = model[3].weight.detach(), model[0](small).detach()  # type: ignore[operator]
    scores = model(small).detach()
    for image, own in enumerate((1, 4)):
        others = [each for each in (scores[image] - scores[image, own]).abs().argsort().tolist() if each != own][:2]
        apart = weight[own] - 0.5 * weight[others].mean(0)
        expected = torch.einsum("k,khw->hw", apart, maps[image]) / maps[0, 0].numel()
        torch.testing.assert_close(found.values[image, 0], expected)
    torch.testing.assert_close(found.scores, scores[[0, 1], [1, 4]])


@pytest.mark.parametrize(("cam", "plain"), [("grad_cam", GradCAM), ("hires_cam", HiResCAM), ("layer_cam", LayerCAM)])
def test_finer_is_its_cam_of_the_contrast(cam: str, plain: Any, small: Tensor) -> None:
    model = Net(nn.SiLU).double()
    found = FinerCAM(model, "second", classes=5, gamma=0.6, cam=cam).attribute(small, 5)
    expected = plain(model, "second").attribute(small, lambda s: s[:, 5] - 0.6 * s[:, :5].mean(1))
    torch.testing.assert_close(found.values, expected.values)
    whole = FinerCAM(model, "second", gamma=0, cam=cam).attribute(small, 5)
    torch.testing.assert_close(whole.values, plain(model, "second").attribute(small, 5).values)


def test_finer_against_one_class_is_pytorch_grad_cams() -> None:
    oracle = pytest.importorskip("pytorch_grad_cam.utils.model_targets")
    model, small = Net().double(), torch.randn(1, 3, 12, 8, dtype=torch.float64)
    # With a single reference their weights by probability are the mean, but for an epsilon in the divisor.
    found = FinerCAM(model, "second", classes=1).attribute(small, 2)
    scores = model(small)[0].detach()
    closest = int((scores - scores[2]).abs().argsort()[1])
    theirs = oracle.FinerWeightedTarget(2, [closest], 0.6)
    expected = GradCAM(model, "second").attribute(small, lambda output: torch.stack([theirs(each) for each in output]))
    torch.testing.assert_close(found.values, expected.values, rtol=1e-6, atol=1e-9)


def test_finer_refuses_what_it_cannot_compare(small: Tensor) -> None:
    model = Net().double()
    most = FinerCAM(model, "second", classes=50).attribute(small, 0)
    torch.testing.assert_close(most.values, FinerCAM(model, "second", classes=5).attribute(small, 0).values)
    with pytest.raises(NotApplicableError, match="must be a class"):
        FinerCAM(model).attribute(small, saliency.probability(1))
    with pytest.raises(MethodError, match="classes=0"):
        FinerCAM(model, classes=0)
    with pytest.raises(MethodError, match="gamma"):
        FinerCAM(model, gamma=-1)
    with pytest.raises(NotApplicableError, match="one number"):
        FinerCAM(nn.Sequential(model, nn.Linear(6, 1).double())).attribute(small, 0)


def test_refine_is_the_product_of_the_scaled_layers(small: Tensor) -> None:
    model = Net().double()
    found = RefineCAM(model, ["first", "second"]).attribute(small, 3)
    fine, coarse = (LayerCAM(model, layer).attribute(small, 3).values.clamp(min=0) for layer in ("first", "second"))
    fine, coarse = (each / each.amax((1, 2, 3), keepdim=True) for each in (fine, coarse))
    expected = fine * F.interpolate(coarse, fine.shape[-2:], mode="bilinear")
    torch.testing.assert_close(found.values, expected)
    assert found.layer == "first, second"
    assert dict(found.settings) == {"cam": "layer_cam"}
    with pytest.raises(LayerError):
        RefineCAM(model, [])


def test_one_forward_and_one_backward_serve_all_layers(small: Tensor) -> None:
    model = Net().double()
    calls: list[int] = []
    method = RefineCAM(model)
    method.attribute(small, 1)
    model.register_forward_hook(lambda *_: calls.append(1))
    method.attribute(small, 1)
    assert len(calls) == 1


# Smooth Grad-CAM++.


def test_without_noise_it_is_grad_cam_plus_plus() -> None:
    model = tiny_model().double()
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    found = SmoothGradCAMPlusPlus(model, "last", noise=0.0, passes=3)
    with pytest.warns(saliency.errors.SaliencyWarning, match="are signed"):
        values = found.attribute(x, [0, 1]).values
    with pytest.warns(saliency.errors.SaliencyWarning, match="are signed"):
        expected = GradCAMPlusPlus(model, "last").attribute(x, [0, 1]).values
    assert torch.allclose(values, expected)


def test_means_of_powers_meet_the_clean_activations() -> None:
    """Against the formula, written out over the same noisy copies."""
    model = tiny_model().double()
    x = torch.randn(1, 3, 16, 16, dtype=torch.float64)
    found = SmoothGradCAMPlusPlus(model, "relu", passes=7, noise=0.2, seed=3).attribute(x, 1)
    sigma = 0.2 * float(x.max() - x.min())

    def at_layer(image: Tensor) -> tuple[Tensor, Tensor]:
        kept: list[Tensor] = []
        handle = model.get_submodule("last").register_forward_hook(lambda m, i, o: kept.append(o))
        score = model(image)[0, 1]
        handle.remove()
        (gradient,) = torch.autograd.grad(score, kept[0])
        return kept[0].detach(), gradient

    # The layer is the last ReLU, whose derivative with respect to its output is that of the pooled mean.
    activation = at_layer(x)[0].relu()[0]
    weight = model.get_submodule("head").weight[1].detach()  # type: ignore[index]
    gradient = (weight[:, None, None] / activation[0].numel()).expand_as(activation)
    noise = [torch.empty(3, 16, 16).normal_(generator=generator(3, i)).double() for i in range(7)]
    assert all(at_layer(x + sigma * each)[1].isfinite().all() for each in noise)
    mass = activation.sum((1, 2), keepdim=True)
    alpha = gradient**2 / (2 * gradient**2 + mass * gradient.clamp(min=0) ** 3)
    weights = (alpha * gradient.clamp(min=0)).sum((1, 2))
    assert torch.allclose(found.values[0, 0], torch.einsum("k,khw->hw", weights, activation))
    assert found.error is not None
    assert float(found.error.max()) < 1e-12
    assert found.layer == "relu"


def test_the_jackknife_knows_how_much_the_map_varies() -> None:
    model = tiny_model().double()
    x = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    maps, errors = [], []
    for seed in range(30):
        found = SmoothGradCAMPlusPlus(model, "norm", passes=50, seed=seed, chunk=16, noise=0.3)
        with pytest.warns(saliency.errors.SaliencyWarning):
            made = found.attribute(x, 1)
        assert made.error is not None
        maps.append(made.values)
        errors.append(made.error)
    ratio = torch.stack(errors).square().mean(0).sqrt() / torch.stack(maps).std(0)
    assert 0.75 < float(ratio.median()) < 1.35


def test_negative_noise_is_refused() -> None:
    with pytest.raises(MethodError):
        SmoothGradCAMPlusPlus(tiny_model(), noise=-1.0)
