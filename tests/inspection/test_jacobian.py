"""Vector-Jacobian products of a model's output by a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import saliency
from saliency.errors import ImageError, LayerError, ModelError, NotApplicableError, TargetError
from saliency.inspection.edit import edit_activations
from saliency.inspection.jacobian import vector_jacobian_product
from saliency.testing import Snapshot
from tests.models import Argmax, Checkpointed, OwnForward, small_vit

vjp = vector_jacobian_product


class Net(nn.Module):
    """A residual sum in place, a module that is called twice, a tuple, normalisation: all that can go wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)
        self.branch = nn.Conv2d(4, 4, 1)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.act(self.norm(self.conv(x)))
        out = F.softplus(h)
        out += self.branch(h)
        out = self.act(out) * 1.5
        out.add_(1)
        return {"logits": self.fc((out + h).mean((2, 3))), "other": out}


def net() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    return Net().double(), torch.randn(2, 3, 6, 6, dtype=torch.float64)


LAYERS = [None, "conv", "norm", "act", "branch", "fc"]


def pushed(model: nn.Module, x: Tensor, layer: str | None, tangent: Tensor, step: float) -> Tensor:
    """The logits with the last output of a layer, or the input, moved a step along a tangent."""
    if layer is None:
        out: Tensor = model(x + step * tangent)["logits"]
        return out
    calls = 0
    last = 2 if layer == "act" else 1

    def push(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        nonlocal calls
        calls += 1
        return output + step * tangent if calls == last else None

    handle = model.get_submodule(layer).register_forward_hook(push)
    out = model(x)["logits"]
    handle.remove()
    return out


@pytest.mark.parametrize("layer", LAYERS)
def test_the_product_with_a_tangent_is_the_finite_difference(layer: str | None) -> None:
    model, x = net()
    vector = torch.randn(2, 5, dtype=torch.float64)
    product = vjp(model, x, vector, layer)
    tangent = torch.randn_like(product)
    model.eval()
    step = 1e-6
    with torch.no_grad():
        difference = pushed(model, x, layer, tangent, step) - pushed(model, x, layer, tangent, -step)
    assert torch.allclose((product * tangent).sum(), (vector * difference).sum() / (2 * step), atol=1e-6)
    assert product.any()


@pytest.mark.parametrize("layer", LAYERS)
def test_a_vector_jacobian_product_is_the_gradient_of_autograd(layer: str | None) -> None:
    model, x = net()
    vector = torch.randn(2, 5, dtype=torch.float64)
    product = vjp(model, x, vector, layer)
    model.eval()
    at = torch.zeros_like(product, requires_grad=True)
    (expected,) = torch.autograd.grad((pushed(model, x, layer, at, 1.0) * vector).sum(), at)
    assert torch.allclose(product, expected, rtol=1e-12, atol=1e-14)
    assert not product.requires_grad


def lite0() -> nn.Module:
    model: nn.Module = saliency.load("efficientnet_lite0")
    return model


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, list[str | None]]] = {
    "resnet18": (
        lambda: torchvision.models.resnet18(weights=None),
        64,
        [None, "layer2.0.downsample", "layer1.0.relu", "layer4"],
    ),
    "lite0": (lite0, 64, [None, "blocks.4", "bn1"]),
    "vit": (small_vit, 32, [None, "encoder.layers.encoder_layer_0", "encoder.layers.encoder_layer_1.self_attention"]),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.slow
def test_the_products_of_real_networks_are_the_gradients_at_their_layers(name: str, frozen: bool) -> None:
    make, size, layers = NETWORKS[name]
    model = make().double().requires_grad_(not frozen).eval()
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    vector = torch.randn(2, 5 if name == "vit" else 1000, dtype=torch.float64)
    before = Snapshot(model=model, x=x, vector=vector)
    for layer in layers:
        assert torch.allclose(vjp(model, x, vector, layer), by_hook(model, x, vector, layer), rtol=1e-10)
    assert not before.changes()


def by_hook(model: nn.Module, x: Tensor, vector: Tensor, layer: str | None) -> Tensor:
    """The gradient at the last output of a layer, which a hook replaces by a leaf, or at the input."""
    starts = [x.clone().requires_grad_()]

    def start(module: nn.Module, inputs: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        starts.append(first.detach().clone().requires_grad_())
        return (starts[-1].clone(), *output[1:]) if isinstance(output, tuple) else starts[-1].clone()

    handle = None if layer is None else model.get_submodule(layer).register_forward_hook(start)
    (gradient,) = torch.autograd.grad(model(starts[0].clone()), starts[-1], vector)
    if handle is not None:
        handle.remove()
    return gradient


def test_of_a_linear_layer_the_product_is_that_with_its_weight() -> None:
    layer, x = nn.Linear(4, 3), torch.randn(6, 4)
    vector = torch.randn(6, 3)
    assert torch.equal(vjp(layer, x, vector), vector @ layer.weight.detach())
    assert torch.equal(vjp(layer, x, vector, ""), vector)


def test_a_class_by_index_or_name_stands_for_one_at_the_class() -> None:
    layer, x = nn.Linear(4, 3), torch.randn(2, 4)
    weight = layer.weight.detach()
    assert torch.equal(vjp(layer, x, 1), weight[[1, 1]])
    assert torch.equal(vjp(layer, x, [2, 0]), weight[[2, 0]])
    assert torch.equal(vjp(layer, x, torch.tensor([2, 0])), weight[[2, 0]])
    layer.categories = ["cat", "dog", "owl"]  # type: ignore[assignment]
    assert torch.equal(vjp(layer, x, ["owl", "cat"]), weight[[2, 0]])
    with pytest.raises(TargetError, match='no class "dogg"'):
        vjp(layer, x, "dogg")
    with pytest.raises(TargetError, match="class 3 is outside"):
        vjp(layer, x, 3)


def test_several_arguments_and_keywords_are_handed_on() -> None:
    class Two(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a.mul_(b)

    a, b = torch.randn(2, 3), torch.randn(2, 3)
    kept = a.clone()
    assert torch.equal(vjp(Two(), (a, b), torch.ones(2, 3)), b)
    assert torch.equal(vjp(Two(), {"a": a, "b": b}, torch.ones(2, 3)), b)
    assert torch.equal(a, kept)


def test_the_products_of_an_edited_network_are_of_that_network() -> None:
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), torch.randn(2, 4)
    with edit_activations(model, "0", lambda output: 10 * output):
        edited = vjp(model, x, 0)
    assert torch.allclose(edited, vjp(model, x, 0) * 10)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_products_do_not_depend_on_the_callers_mode(mode: Any) -> None:
    model, x = net()
    expected = vjp(model, x, 1, "branch")
    with mode():
        assert torch.equal(vjp(model, x, 1, "branch"), expected)
        # What is made here is an inference tensor, where the mode is that.
        vector = torch.zeros(2, 5, dtype=torch.float64)
        vector[:, 1] = 1
        assert torch.equal(vjp(model, x.clone(), vector, "branch"), expected)


def test_what_does_not_fit_is_an_error_that_says_so() -> None:
    model, x = net()
    with pytest.raises(TargetError, match=r"shape of the model's output, \(2, 5\); got \(2, 4\)"):
        vjp(model, x, torch.ones(2, 4))
    with pytest.raises(TargetError, match="got 3 targets for 2 images"):
        vjp(model, x, [1, 2, 3])
    with pytest.raises(LayerError, match='no layer "brunch"'):
        vjp(model, x, 0, "brunch")
    model.unused = nn.Linear(2, 2)
    with pytest.raises(LayerError, match='"unused" was not called'):
        vjp(model, x, 0, "unused")
    with pytest.raises(ImageError, match="no floating-point"):
        vjp(nn.Embedding(3, 2), (torch.tensor([1]), torch.tensor([1])), torch.ones(1, 2))


class _Cut(nn.Module):
    """Two layers, and something between."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(3, 3), nn.Linear(3, 2), between

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.between(self.first(x)))
        return out


@pytest.mark.parametrize("layer", [None, "first"])
@pytest.mark.parametrize("between", [Tensor.detach, torch.ones_like, lambda h: F.one_hot(h.argmax(1), 3).float()])
def test_a_derivative_that_nothing_carries_is_an_error_rather_than_zero(
    layer: str | None, between: Callable[[Tensor], Tensor]
) -> None:
    model, x = _Cut(between), torch.randn(2, 3)
    with pytest.raises(NotApplicableError, match="no differentiable operation connects"):
        vjp(model, x, 0, layer)
    assert vjp(model, x, 0, "last").tolist() == [[1, 0], [1, 0]]


@pytest.mark.filterwarnings("ignore:torch.ao.quantization", "ignore:torch.quantize_per_tensor", "ignore:quantized::")
def test_quantised_layers_have_no_derivative_rather_than_zero() -> None:
    quantized: Any = torch.ao.quantization.quantize_dynamic
    model = quantized(nn.Sequential(nn.Linear(3, 3)), {nn.Linear})
    x = torch.randn(2, 3)
    with pytest.raises(NotApplicableError, match="no differentiable operation connects the input"):
        vjp(model, x, 0)


@pytest.mark.parametrize("between", [lambda h: h * 0, torch.round, lambda h: F.relu(-h.abs() - 1)])
def test_a_derivative_that_is_zero_is_zero(between: Callable[[Tensor], Tensor]) -> None:
    model, x = _Cut(between), torch.randn(2, 3)
    for product in (vjp(model, x, 0), vjp(model, x, 0, "first")):
        assert not product.any()


def test_integers_as_the_output_are_refused() -> None:
    x = torch.randn(2, 3)
    with pytest.raises(NotApplicableError, match="integers"):
        vjp(Argmax(), x, torch.ones(2))


def test_layers_inside_torchscript_and_things_that_are_no_model_are_refused() -> None:
    x = torch.randn(2, 3)
    trace: Any = torch.jit.trace
    model = nn.Sequential(trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), x), nn.Linear(3, 1))
    with pytest.raises(NotApplicableError, match=r'layer "0\.0" is scripted or inside a TorchScript module'):
        vjp(model, x, 0, "0.0")
    with pytest.raises(ModelError, match=r"expected a torch\.nn\.Module, got function"):
        vjp(lambda each: each, x, 0)  # type: ignore[arg-type]


def test_a_checkpointed_part_is_differentiated() -> None:
    model, x = Checkpointed(OwnForward(lambda model, x: x.sin())), torch.randn(1, 2)
    assert torch.allclose(vjp(model, x, torch.ones(1, 2)), x.cos())


def test_a_true_zero_of_a_complex_output_is_zero() -> None:
    class Waves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            waves: Tensor = torch.fft.fft(x.relu())
            return waves

    x = -torch.ones(2, 3)
    assert not vector_jacobian_product(Waves(), x, torch.ones(2, 3)).any()
