"""The plain gradient against finite differences and captum, and captum's guided maps where captum is right."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from saliency import DeconvNet, GuidedBackprop, InputXGradient, TargetError, VanillaGradient
from saliency.attribution.base import TracedAttribution


def network(activation: Callable[[], nn.Module]) -> nn.Sequential:
    """Three layers, each with a module of its own."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1),
        activation(),
        nn.MaxPool2d(2),
        nn.Conv2d(5, 6, 3, stride=2),
        nn.BatchNorm2d(6),
        activation(),
        nn.Flatten(),
        nn.Linear(6, 8),
        activation(),
        nn.Linear(8, 4),
    ).eval()


def images(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(3, 3, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


TARGETS = [2, 0, 3]


def differences(model: nn.Module, x: Tensor, targets: list[int], step: float = 1e-5) -> Tensor:
    """Central differences of each image's score in each of its values."""
    one = torch.eye(x[0].numel(), dtype=x.dtype).reshape(-1, *x.shape[1:]) * step
    rows = []
    with torch.no_grad():
        for image, target in zip(x, targets, strict=True):
            slope = (model(image + one) - model(image - one))[:, target] / (2 * step)
            rows.append(slope.reshape(image.shape))
    return torch.stack(rows)


@pytest.mark.parametrize("activation", [nn.Tanh, nn.Softplus, nn.GELU, nn.ReLU])
def test_the_gradient_is_the_limit_of_finite_differences(activation: Callable[[], nn.Module]) -> None:
    model, x = network(activation).double(), images()
    found = VanillaGradient(model).attribute(x, TARGETS)
    expected = differences(model, x, TARGETS)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(found.values, expected, rtol=1e-6, atol=1e-8)
    with torch.no_grad():
        assert torch.equal(found.scores, model(x)[range(3), TARGETS])


def test_input_x_gradient_is_the_product_and_finds_a_linear_models_score() -> None:
    model, x = network(nn.GELU).double(), images()
    product = x * differences(model, x, TARGETS)
    torch.testing.assert_close(InputXGradient(model).attribute(x, TARGETS).values, product, rtol=1e-6, atol=1e-8)
    layer = nn.Linear(108, 4, bias=False)
    linear = nn.Sequential(nn.Flatten(), layer).double()
    found = InputXGradient(linear).attribute(x, TARGETS)
    torch.testing.assert_close(found.values.sum((1, 2, 3)), found.scores, rtol=1e-12, atol=1e-12)
    assert torch.equal(VanillaGradient(linear).attribute(x, 1).values[2].flatten(), layer.weight[1])


def test_a_function_of_the_output_is_differentiated() -> None:
    model, x = network(nn.Tanh).double(), images()
    found = VanillaGradient(model).attribute(x, lambda output: output[:, 0] - 2 * output[:, 3])
    expected = differences(model, x, [0] * 3) - 2 * differences(model, x, [3] * 3)
    torch.testing.assert_close(found.values, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("method", [VanillaGradient, InputXGradient, GuidedBackprop, DeconvNet])
def test_a_score_without_gradient_is_an_error(method: type[TracedAttribution]) -> None:
    with pytest.raises(TargetError, match="gradient"):
        method(network(nn.ReLU)).attribute(images(torch.float32), lambda output: output[:, 0].detach())
    weight = torch.ones(3, requires_grad=True)
    with pytest.raises(TargetError, match="depend"):
        method(network(nn.ReLU)).attribute(images(torch.float32), lambda output: weight * 2)


@pytest.mark.parametrize(
    ("method", "peer"),
    [
        (VanillaGradient, "Saliency"),
        (InputXGradient, "InputXGradient"),
        (GuidedBackprop, "GuidedBackprop"),
        (DeconvNet, "Deconvolution"),
    ],
)
def test_captum_agrees_on_a_plain_chain_of_relu_modules(method: type[TracedAttribution], peer: str) -> None:
    """Where each ReLU is a module of its own, out of place, and nothing else reads its input, captum is right."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        captum = pytest.importorskip("captum.attr")
        model, x = network(nn.ReLU), images(torch.float32)
        options = {"abs": False} if peer == "Saliency" else {}
        oracle = getattr(captum, peer)(model)
        expected = oracle.attribute(x.clone().requires_grad_(), target=torch.tensor(TARGETS), **options).detach()
    found = method(model).attribute(x, TARGETS).values
    assert expected.abs().max() > 1e-4
    assert torch.equal(found, expected)
    if method in (GuidedBackprop, DeconvNet):
        assert not torch.equal(found, VanillaGradient(model).attribute(x, TARGETS).values)
