"""Shapley-CAM, Finer-CAM and Refine-CAM, against closed forms and the CAMs that they are made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import saliency
from saliency import GradCAM, HiResCAM, LayerCAM, LayerError, MethodError, NotApplicableError, TargetError
from saliency.methods.combined_cam import FinerCAM, RefineCAM, ShapleyCAM


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Net(nn.Module):
    """Convolutions with one kind of activation, and a head of two layers."""

    def __init__(self, act: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), act())
        self.second = nn.Sequential(nn.Conv2d(6, 8, 3, stride=2, padding=1), act())
        self.head = nn.Sequential(nn.Conv2d(8, 7, 3), act(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(7, 6))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.second(self.first(x)))
        return out


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, 12, 8, dtype=torch.float64)


def test_shapley_is_grad_cam_behind_a_piecewise_linear_network(x: Tensor) -> None:
    model = Net().double()
    found, plain = (
        ShapleyCAM(model, "second", utility="score").attribute(x, 2),
        GradCAM(model, "second").attribute(x, 2),
    )
    torch.testing.assert_close(found.values, plain.values)
    smooth = Net(nn.SiLU).double()
    found = ShapleyCAM(smooth, "second", utility="score").attribute(x, 2)
    plain = GradCAM(smooth, "second").attribute(x, 2)
    assert not torch.allclose(found.values, plain.values)


def test_shapley_values_of_a_quadratic_score(x: Tensor) -> None:
    class Quadratic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Conv2d(3, 4, 3)
            self.matrix = nn.Parameter(torch.randn(4, 4))
            self.linear = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            pooled = self.body(x).mean((2, 3))
            out: Tensor = pooled @ self.linear + torch.einsum("nk,kl,nl->n", pooled, self.matrix, pooled)
            return out[:, None]

    model = Quadratic().double()
    found = ShapleyCAM(model, "body").attribute(x, 0)
    with torch.no_grad():
        maps = model.body(x)
        pooled, places = maps.mean((2, 3)), maps[0, 0].numel()
        both = model.matrix + model.matrix.T
        # g = (l + B p) / n and H A = B p / n: the channel's share of the score, as the quadratic part is halved.
        weights = (model.linear + pooled @ both - pooled @ both / 2) / places
        torch.testing.assert_close(found.values[:, 0], torch.einsum("nk,nkhw->nhw", weights, maps))
    torch.testing.assert_close(found.values.sum((1, 2, 3)), found.scores)


def test_the_utility_of_a_class_adds_its_log_probability(x: Tensor) -> None:
    model = Net(nn.GELU).double()

    def rest(output: Tensor) -> Tensor:
        return output[:, 4] + output.log_softmax(1)[:, 4]

    found = ShapleyCAM(model, "second").attribute(x, 4)
    torch.testing.assert_close(found.values, ShapleyCAM(model, "second", utility="score").attribute(x, rest).values)
    torch.testing.assert_close(found.scores, model(x)[:, 4].detach())
    settled = ShapleyCAM(nn.Sequential(model, nn.Softmax(1)), "0.second").attribute(x, 4)
    assert settled.values.isfinite().all()


@pytest.mark.filterwarnings("ignore")
def test_shapley_is_pytorch_grad_cams() -> None:
    oracle = pytest.importorskip("pytorch_grad_cam")
    targets = pytest.importorskip("pytorch_grad_cam.utils.model_targets")
    model, x = Net(nn.SiLU).eval(), torch.randn(1, 3, 12, 8)
    expected = oracle.ShapleyCAM(model, [model.second])(x, [targets.ClassifierOutputTarget(1)])
    found = ShapleyCAM(model, "second", utility="score").attribute(x, 1).values.clamp(min=0)
    shown = F.interpolate(found / found.max(), (12, 8), mode="bilinear")[0, 0]
    assert np.corrcoef(shown.numpy().ravel(), expected[0].ravel())[0, 1] > 0.999


def test_shapley_passes_through_attention() -> None:
    model = torchvision.models.VisionTransformer(16, 4, 2, 2, 8, 16, num_classes=5).eval()
    nn.init.normal_(model.heads[0].weight)
    x = torch.randn(1, 3, 16, 16)
    found = ShapleyCAM(model, "encoder.layers.encoder_layer_0").attribute(x, 2)
    precise = ShapleyCAM(model.double(), "encoder.layers.encoder_layer_0").attribute(x.double(), 2)
    torch.testing.assert_close(found.values.double(), precise.values, rtol=1e-3, atol=1e-5)


def test_finer_behind_a_linear_head_is_the_difference_of_class_weights(x: Tensor) -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 6)).double()
    found = FinerCAM(model, "0", references=2, gamma=0.5).attribute(x, [1, 4])
    weight, maps = model[3].weight.detach(), model[0](x).detach()  # type: ignore[operator]
    scores = model(x).detach()
    for image, own in enumerate((1, 4)):
        others = [each for each in (scores[image] - scores[image, own]).abs().argsort().tolist() if each != own][:2]
        apart = weight[own] - 0.5 * weight[others].mean(0)
        expected = torch.einsum("k,khw->hw", apart, maps[image]) / maps[0, 0].numel()
        torch.testing.assert_close(found.values[image, 0], expected)
    torch.testing.assert_close(found.scores, scores[[0, 1], [1, 4]])


@pytest.mark.parametrize(("cam", "plain"), [("grad_cam", GradCAM), ("hires_cam", HiResCAM), ("layer_cam", LayerCAM)])
def test_finer_is_its_cam_of_the_contrast(cam: str, plain: Any, x: Tensor) -> None:
    model = Net(nn.SiLU).double()
    found = FinerCAM(model, "second", references=[0, 3], gamma=0.6, cam=cam).attribute(x, 5)
    expected = plain(model, "second").attribute(x, lambda s: s[:, 5] - 0.3 * s[:, 0] - 0.3 * s[:, 3])
    torch.testing.assert_close(found.values, expected.values)
    whole = FinerCAM(model, "second", gamma=0, cam=cam).attribute(x, 5)
    torch.testing.assert_close(whole.values, plain(model, "second").attribute(x, 5).values)


def test_finer_against_one_class_is_pytorch_grad_cams() -> None:
    oracle = pytest.importorskip("pytorch_grad_cam.utils.model_targets")
    model, x = Net().double(), torch.randn(1, 3, 12, 8, dtype=torch.float64)
    # With a single reference their weights by probability are the mean, but for an epsilon in the divisor.
    theirs = oracle.FinerWeightedTarget(2, [4], 0.6)
    expected = GradCAM(model, "second").attribute(x, lambda output: torch.stack([theirs(each) for each in output]))
    found = FinerCAM(model, "second", references=[4]).attribute(x, 2)
    torch.testing.assert_close(found.values, expected.values, rtol=1e-6, atol=1e-9)


def test_finer_names_references_and_refuses_what_it_cannot_compare(x: Tensor) -> None:
    model = Net().double()
    names = ["ant", "bee", "cat", "dog", "elk", "fox"]
    by_name = FinerCAM(model, "second", references=["cat", "dog"], categories=names).attribute(x, "ant")
    torch.testing.assert_close(by_name.values, FinerCAM(model, "second", references=[2, 3]).attribute(x, 0).values)
    most = FinerCAM(model, "second", references=50).attribute(x, 0)
    torch.testing.assert_close(most.values, FinerCAM(model, "second", references=5).attribute(x, 0).values)
    with pytest.raises(NotApplicableError, match="must be a class"):
        FinerCAM(model).attribute(x, saliency.probability(1))
    with pytest.raises(TargetError, match="with itself"):
        FinerCAM(model, references=[1]).attribute(x, 1)
    with pytest.raises(TargetError, match=r"outside 0\.\.5"):
        FinerCAM(model, references=[6]).attribute(x, 1)
    with pytest.raises(MethodError, match="references"):
        FinerCAM(model, references=[])
    with pytest.raises(MethodError, match="gamma"):
        FinerCAM(model, gamma=-1)
    with pytest.raises(NotApplicableError, match="one number"):
        FinerCAM(nn.Sequential(model, nn.Linear(6, 1).double())).attribute(x, 0)


def test_refine_is_the_product_of_the_scaled_layers(x: Tensor) -> None:
    model = Net().double()
    found = RefineCAM(model, ["first", "second"]).attribute(x, 3)
    fine, coarse = (LayerCAM(model, layer).attribute(x, 3).values.clamp(min=0) for layer in ("first", "second"))
    fine, coarse = (each / each.amax((1, 2, 3), keepdim=True) for each in (fine, coarse))
    expected = fine * F.interpolate(coarse, fine.shape[-2:], mode="bilinear")
    torch.testing.assert_close(found.values, expected)
    assert found.layer == "first, second"
    assert dict(found.settings) == {"cam": "layer_cam"}
    with pytest.raises(LayerError):
        RefineCAM(model, [])


def test_one_forward_and_one_backward_serve_all_layers(x: Tensor) -> None:
    model = Net().double()
    calls: list[int] = []
    method = RefineCAM(model)
    method.attribute(x, 1)
    model.register_forward_hook(lambda *_: calls.append(1))
    method.attribute(x, 1)
    assert len(calls) == 1
