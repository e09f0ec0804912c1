"""Methods made of others: guided Grad-CAM and the fusion of layers, against their parts."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saliency import (
    FusedCAM,
    GradCAM,
    GradCAMPlusPlus,
    GuidedBackprop,
    GuidedGradCAM,
    HiResCAM,
    LayerCAM,
    LayerError,
    MethodError,
    NotApplicableError,
    XGradCAM,
)
from saliency.methods.cam import LayerAttribution


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
