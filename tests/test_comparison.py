"""The page that compares toolkits is true: the other toolkits behave as it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saliency
from saliency.testing import images

pytestmark = pytest.mark.filterwarnings("ignore")  # of the other toolkits


class Functional(nn.Module):
    """A network whose ReLU is a function, which hooks on modules do not see."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(F.relu(self.first(x)).mean((2, 3)))
        return scores


def modules(activation: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), activation, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]
    return nn.Sequential(*layers).eval()


X = images(2)


def gradient(model: nn.Module, x: Tensor) -> Tensor:
    return saliency.VanillaGradient(model).attribute(x, 1).values


@pytest.mark.parametrize("model", [Functional().eval(), modules(nn.ReLU6())], ids=["F.relu", "ReLU6"])
def test_guided_backpropagation_of_captum_is_the_plain_gradient(model: nn.Module) -> None:
    captum = pytest.importorskip("captum.attr")
    theirs = captum.GuidedBackprop(model).attribute(X.clone(), target=1)
    torch.testing.assert_close(theirs, gradient(model, X))
    assert not torch.allclose(saliency.GuidedBackprop(model).attribute(X, 1).values, theirs)


@pytest.mark.parametrize("model", [Functional().eval(), modules(nn.ReLU6())], ids=["F.relu", "ReLU6"])
def test_guided_backpropagation_of_zennit_is_the_plain_gradient(model: nn.Module) -> None:
    composites, attribution = (pytest.importorskip(f"zennit.{name}") for name in ("composites", "attribution"))
    with attribution.Gradient(model, composites.GuidedBackprop()) as attributor:
        _, theirs = attributor(X.clone(), F.one_hot(torch.ones(2, dtype=torch.long), 3).float())
    torch.testing.assert_close(theirs, gradient(model, X))


def test_captum_accepts_a_pixel_that_is_not_a_number_and_a_negative_class() -> None:
    captum = pytest.importorskip("captum.attr")
    model, broken = modules(nn.ReLU()), X.clone()
    broken[0, 0, 0, 0] = torch.nan
    assert captum.Saliency(model).attribute(broken, target=1).shape == X.shape
    last = captum.Saliency(model).attribute(X.clone(), target=2)
    assert torch.equal(captum.Saliency(model).attribute(X.clone(), target=-1), last)
    with pytest.raises(saliency.errors.SaliencyError):
        saliency.VanillaGradient(model).attribute(broken, 1)
    with pytest.raises(saliency.errors.TargetError):
        saliency.VanillaGradient(model).attribute(X, -1)


def test_captum_leaves_requires_grad_on_after_a_bad_target() -> None:
    captum = pytest.importorskip("captum.attr")
    x = X.clone()
    with pytest.raises(IndexError):
        captum.Saliency(modules(nn.ReLU())).attribute(x, target=7)
    assert x.requires_grad


def test_the_trapezoid_rule_of_captum_weighs_less_than_one() -> None:
    captum = pytest.importorskip("captum.attr")
    linear = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 2))
    x = images(1, (16, 16))
    theirs = captum.IntegratedGradients(linear).attribute(x, target=0, n_steps=10, method="riemann_trapezoid")
    whole = saliency.IntegratedGradients(linear, rule="trapezoid", steps=10).attribute(x, 0).values
    torch.testing.assert_close(theirs, 0.9 * whole)


def test_deep_lift_of_captum_misses_the_difference_with_a_smooth_activation() -> None:
    captum = pytest.importorskip("captum.attr")
    model, x = modules(nn.SiLU()), 3 * X[:1]
    rise = float((model(x) - model(0 * x))[0, 1].detach())
    assert float(saliency.DeepLIFT(model).attribute(x, 1).values.sum()) == pytest.approx(rise, rel=1e-3)
    assert float(captum.DeepLift(model).attribute(x, target=1).sum()) != pytest.approx(rise, rel=1e-2)


def test_grad_cam_changes_the_mode_and_the_gradients_of_the_model() -> None:
    peer, targets = (pytest.importorskip(f"pytorch_grad_cam{name}") for name in ("", ".utils.model_targets"))
    model = modules(nn.ReLU()).train()
    model(X).sum().backward()
    weight: Any = model[0].weight
    before = weight.grad.clone()
    with peer.GradCAM(model, [model[0]]) as cam:
        cam(X, [targets.ClassifierOutputTarget(1)] * 2)
    assert not model.training
    assert weight.grad is None or not torch.equal(weight.grad, before)


def test_zennit_removes_its_hooks_after_an_error_in_its_context_only() -> None:
    composites, attribution = (pytest.importorskip(f"zennit.{name}") for name in ("composites", "attribution"))

    def hooks(model: nn.Module) -> int:
        return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules())

    model = modules(nn.ReLU())
    with pytest.raises(RuntimeError), attribution.Gradient(model, composites.EpsilonPlus()) as attributor:
        attributor(X.clone(), torch.ones(2, 7))
    assert hooks(model) == 0
    composites.EpsilonPlus().register(model)
    with pytest.raises(IndexError):
        model(X)[0, 7].backward()
    assert hooks(model) > 0
