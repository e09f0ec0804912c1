"""DeepLIFT and DeepSHAP against closed forms, captum, and Shapley values by enumeration."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saliency import DeepLIFT, DeepSHAP, GradCAM, Together
from tests.games import shapley_values
from tests.models import Checkpointed, FunctionModel, OwnForward, Packed, PooledNet, small_vit
from tests.relevance import differences
from tests.relevance.differences import Pair
from tests.relevance.test_lrp import Dispatches

SIZE = (6, 7)


def images(count: int = 2) -> Tensor:
    return torch.randn(count, 3, *SIZE, dtype=torch.float64)


def baseline() -> Tensor:
    return torch.randn(3, *SIZE, dtype=torch.float64) / 2


def lifted(model: nn.Module, x: Tensor, x0: Tensor, target: Any = 0, **options: Any) -> Tensor:
    return DeepLIFT(model.eval(), baseline=x0, **options).attribute(x, target).values


def assert_same(found: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    assert float(expected.abs().max()) > 0
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def assert_complete(model: nn.Module, x: Tensor, x0: Tensor, found: Tensor, target: int = 0) -> None:
    rise = (model(x) - model(x0[None]))[:, target]
    torch.testing.assert_close(found.sum((1, 2, 3)), rise.detach(), rtol=1e-8, atol=1e-8)


# --- chains


def chain(activation: Callable[[], nn.Module], *, pool: nn.Module | None = None) -> nn.Sequential:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        pool or nn.Identity(),
        activation(),
        nn.Conv2d(4, 6, 2),
        activation(),
        nn.Flatten(),
    )
    net = nn.Sequential(*(layer for layer in net if not isinstance(layer, nn.Identity))).double()
    return net.append(nn.Linear(net(images(1)).shape[1], 3).double())


ACTIVATIONS: list[Callable[[], nn.Module]] = [
    nn.ReLU,
    nn.LeakyReLU,
    nn.Sigmoid,
    nn.Tanh,
    nn.GELU,
    nn.SiLU,
    nn.Softplus,
    nn.ELU,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.Mish,
    nn.ReLU6,
]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_rescale_is_difference_over_difference(activation: Callable[[], nn.Module]) -> None:
    net, x, x0 = chain(activation), images(), baseline()
    found = lifted(net, x, x0, 1)
    assert_same(found, differences.contributions(list(net), x, x0.expand_as(x), 1))
    assert_complete(net, x, x0, found, 1)


@pytest.mark.parametrize(("size", "stride"), [(2, 2), (3, 1), (3, 2)])
def test_a_max_pool_pays_the_winners_of_each_window(size: int, stride: int) -> None:
    net, x, x0 = chain(nn.ReLU, pool=nn.MaxPool2d(size, stride)), images(), baseline()
    found = lifted(net, x, x0, 2)
    assert_same(found, differences.contributions(list(net), x, x0.expand_as(x), 2))
    assert_complete(net, x, x0, found, 2)


def test_a_relu_chain_is_that_of_captum() -> None:
    captum = pytest.importorskip("captum.attr")
    net, x, x0 = chain(nn.ReLU), images(), baseline()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = captum.DeepLift(net).attribute(x.clone(), x0.expand_as(x), target=1).detach()
    assert_same(lifted(net, x, x0, 1), expected, 1e-6)


def test_pixels_equal_to_the_baseline_get_nothing() -> None:
    net, x, x0 = chain(nn.ReLU), images(), baseline()
    x[:, :, ::2] = x0[:, ::2]
    found = lifted(net, x, x0, 1)
    assert bool(found.isfinite().all())
    assert not found[:, :, ::2].any()
    assert_complete(net, x, x0, found, 1)


def test_an_image_equal_to_the_baseline_has_values_of_zero() -> None:
    net, x0 = chain(nn.GELU), baseline()
    assert not lifted(net, x0[None], x0).any()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_value_that_does_not_change_has_its_derivative(activation: Callable[[], nn.Module]) -> None:
    function = activation()
    # In eighths, sums are exact.
    x, step = (images() * 16).round() / 8, torch.rand(SIZE, dtype=torch.float64).mul(8).ceil() / 8
    x0 = x[0].clone()
    x0[:2] += step  # the difference of both does not change
    found = lifted(FunctionModel(lambda x: function(x[:, 2] + x[:, 0] - x[:, 1]).sum((1, 2))), x[:1], x0)
    point = (x0[2] + x0[0] - x0[1]).requires_grad_()
    (slope,) = torch.autograd.grad(function(point).sum(), point)
    torch.testing.assert_close(found[0, 0], -step * slope)
    torch.testing.assert_close(found[0, 1], step * slope)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", [1, 4])
def test_a_prelu_in_half_precision_is_near_that_in_single(weights: int, dtype: torch.dtype) -> None:
    slopes, x, x0 = torch.rand(weights), images().to(dtype), baseline().to(dtype)

    def model(x: Tensor) -> Tensor:
        return F.prelu(F.conv2d(x, weight.to(x), padding=1), slopes.to(x)).square().mean((1, 2, 3))

    weight = torch.randn(4, 3, 3, 3)
    expected = lifted(FunctionModel(model), x.float(), x0.float())
    assert_same(lifted(FunctionModel(model), x, x0).float(), expected, 0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_maximum_in_half_precision_is_near_that_in_single(dtype: torch.dtype) -> None:
    weight, x, x0 = torch.randn(4, 3, 3, 3), images().to(dtype), baseline().to(dtype)
    model = FunctionModel(lambda x: F.conv2d(x, weight.to(x), padding=1).relu().amax((2, 3)).sum(1))
    assert_same(lifted(model, x, x0).float(), lifted(model, x.float(), x0.float()), 0.05)


def test_the_kernel_of_a_convolution_may_depend_on_the_image_alone() -> None:
    z, x, x0 = torch.randn(1, 3, 8, 9, dtype=torch.float64), images(1), baseline()
    values = lifted(FunctionModel(lambda x: F.conv2d(z, x.sin()).mean((1, 2, 3))), x, x0)
    expected = (F.conv2d(z, x.sin()) - F.conv2d(z, x0[None].sin())).mean()
    torch.testing.assert_close(values.sum(), expected)


# --- parts


def weighted(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[nn.Module, Tensor]:
    """A model whose score is a weighted sum of a function of the image, and the weights."""
    m = torch.randn_like(function(x))
    return FunctionModel(lambda x: (function(x) * m).flatten(1).sum(1)), m


def mix(x: Tensor, weight: Tensor) -> Tensor:
    """Other channels."""
    mixed: Tensor = torch.einsum("nchw,cd->ndhw", x, weight)
    return mixed


def through_mix(m: Tensor, weight: Tensor) -> Tensor:
    return mix(m, weight.T)


def two_mixtures() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)


def test_a_product_counts_each_factor_at_the_mean_of_the_other() -> None:
    a, b = two_mixtures()
    x, x0 = images(), baseline()
    model, m = weighted(lambda x: mix(x, a) * torch.sigmoid(mix(x, b)), x)
    pair = Pair(x, x0.expand_as(x))
    signal, inner = pair.map(lambda x: mix(x, a)), pair.map(lambda x: mix(x, b))
    m_signal, m_gate = differences.through_product(signal, inner.map(torch.sigmoid), m)
    expected = through_mix(m_signal, a) + through_mix(m_gate * differences.slope(torch.sigmoid, inner), b)
    found = lifted(model, x, x0)
    assert_same(found, expected * pair.difference, 1e-7)
    assert_complete(model, x, x0, found)


def test_a_quotient_is_a_product_with_the_inverse() -> None:
    a, b = two_mixtures()
    x, x0 = images(), baseline()
    model, m = weighted(lambda x: mix(x, a) / mix(x, b).exp(), x)
    pair = Pair(x, x0.expand_as(x))
    upper, inner = pair.map(lambda x: mix(x, a)), pair.map(lambda x: mix(x, b))
    lower = inner.map(torch.exp)
    m_upper, m_inverse = differences.through_product(upper, lower.map(torch.reciprocal), m)
    m_inner = -m_inverse / (lower.x * lower.x0) * differences.slope(torch.exp, inner)
    expected = through_mix(m_upper, a) + through_mix(m_inner, b)
    assert_same(lifted(model, x, x0), expected * pair.difference, 1e-7)


@pytest.mark.parametrize("size", [1, 30])
def test_a_softmax_is_its_closed_form(size: float) -> None:
    x, x0 = images() * size, baseline() * size
    model, m = weighted(lambda x: x.softmax(-1), x)
    pair = Pair(x, x0.expand_as(x))
    found = lifted(model, x, x0)
    assert_same(found, differences.through_softmax(pair, m) * pair.difference, 1e-7)
    assert_complete(model, x, x0, found)


def test_a_layer_norm_is_its_closed_form() -> None:
    x, x0, weight = images(), baseline(), torch.randn(7, dtype=torch.float64)
    model, m = weighted(lambda x: F.layer_norm(x, (7,), weight, weight), x)
    pair = Pair(x, x0.expand_as(x))
    found = lifted(model, x, x0)
    assert_same(found, differences.through_layer_norm(weight, 1e-5, pair, m) * pair.difference, 1e-7)
    assert_complete(model, x, x0, found)


def spelled_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


@pytest.mark.parametrize("attend", [F.scaled_dot_product_attention, spelled_out])
def test_attention_is_its_closed_form(attend: Callable[..., Tensor]) -> None:
    weights = [torch.randn(7, 5, dtype=torch.float64) for _ in range(3)]
    x, x0 = images(), baseline()
    model, m = weighted(lambda x: attend(*(x @ weight for weight in weights)), x)
    pair = Pair(x, x0.expand_as(x))
    q, k, v = (pair.map(lambda x, weight=weight: x @ weight) for weight in weights)  # type: ignore[misc]
    transposed = k.map(lambda k: k.mT / math.sqrt(5))
    z = q.dot(transposed)
    m_s, m_v = differences.through_matmul(z.map(lambda z: z.softmax(-1)), v, m)
    m_q, m_k = differences.through_matmul(q, transposed, differences.through_softmax(z, m_s))
    parts = zip((m_q, m_k.mT / math.sqrt(5), m_v), weights, strict=True)
    expected = sum((each @ weight.T for each, weight in parts), torch.zeros_like(x))
    found = lifted(model, x, x0)
    assert_same(found, expected * pair.difference, 1e-7)
    assert_complete(model, x, x0, found)


COMPLETE: dict[str, Callable[[Tensor], Tensor]] = {
    "group_norm": lambda x: F.group_norm(x, 3),
    "rms_norm": lambda x: F.rms_norm(x, (7,)),
    "normalize": lambda x: F.normalize(x, dim=1),
    "square": lambda x: x**2,
    "product with itself": lambda x: x * x,
    "exp of a mean": lambda x: x.mean((2, 3)).exp(),
    "variance": lambda x: x.var((2, 3)),
    "masked attention": lambda x: F.scaled_dot_product_attention(x, x * 2, x + 1, is_causal=False),
    "glu": lambda x: F.glu(x[..., :6], -1),
    "squeeze and excite": lambda x: x * torch.sigmoid(x.mean((2, 3), keepdim=True)),
    "average pool": lambda x: F.avg_pool2d(x, 2).tanh(),
    "interpolation": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear").tanh(),
    "maximum of two": lambda x: torch.maximum(x[..., :3], x[..., 3:6]),
    "clamp": lambda x: x.clamp(-0.5, 0.7),
    "slices written in place": lambda x: _with_slices(x),
    "in place": lambda x: (x * 1).tanh_().mul_(2).add_(x),
}


def _with_slices(x: Tensor) -> Tensor:
    out = x * 2
    out[:, :, 1:3] = torch.sigmoid(x[:, :, 2:4])
    return out * x


@pytest.mark.parametrize("name", COMPLETE)
def test_contributions_sum_to_the_difference_of_the_scores(name: str) -> None:
    x, x0 = images(), baseline()
    model, _ = weighted(COMPLETE[name], x)
    found = DeepLIFT(model, baseline=x0).attribute(x, 0)
    assert_complete(model, x, x0, found.values)
    assert found.residual is not None
    assert float(found.residual.abs().max()) < 1e-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # on a CPU, each has its own operation
def test_an_lstm_over_the_rows_is_complete(dtype: torch.dtype) -> None:
    lstm = nn.LSTM(SIZE[1], 5, batch_first=True, dtype=dtype)
    x, x0 = images().to(dtype), baseline().to(dtype)
    model, _ = weighted(lambda x: lstm(x.flatten(1, 2))[0], x)
    found = lifted(model, x, x0)
    rise = (model(x) - model(x0[None]))[:, 0].detach()
    torch.testing.assert_close(found.sum((1, 2, 3)), rise, rtol=1e-4, atol=1e-4)


def test_a_vision_transformer_is_complete() -> None:
    model = small_vit().double().eval()
    x, x0 = (torch.randn(count, 3, 32, 32, dtype=torch.float64) for count in (2, 1))
    found = lifted(model, x, x0[0], 1)
    torch.testing.assert_close(found.sum((1, 2, 3)), (model(x) - model(x0))[:, 1].detach(), rtol=1e-8, atol=1e-8)


# --- DeepSHAP


def linear_score(x: Tensor) -> Tensor:
    weight = torch.linspace(-1, 2, x[0].numel(), dtype=x.dtype).view(x.shape[1:])
    return (x * weight).sum((1, 2, 3)) + 0.3


def additive_score(x: Tensor) -> Tensor:
    return torch.sigmoid(x[:, 0]).sum((1, 2)) + torch.tanh(2 * x[:, 1]).sum((1, 2)) - F.relu(x[:, 2]).sum((1, 2))


@pytest.mark.parametrize("score", [linear_score, additive_score])
def test_deep_shap_of_an_additive_model_is_its_shapley_values(score: Callable[[Tensor], Tensor]) -> None:
    x, references = (torch.randn(count, 3, 1, 2, dtype=torch.float64) for count in (1, 4))

    def value(shown: Tensor) -> Tensor:
        """The mean score over the references, with the shown pixels of the image."""
        return score(torch.where(shown.bool().view(1, 3, 1, 2), x, references)).mean(0, keepdim=True)

    found = DeepSHAP(FunctionModel(score), baseline=references).attribute(x, 0)
    torch.testing.assert_close(found.values.flatten(), shapley_values(value, 6))


def test_deep_shap_is_the_mean_over_its_references_and_has_its_standard_error() -> None:
    net, x = chain(nn.ReLU), images()
    references = torch.stack([baseline() for _ in range(5)])
    each = torch.stack([lifted(net, x, x0, 1) for x0 in references])
    found = DeepSHAP(net.eval(), baseline=references).attribute(x, 1)
    assert_same(found.values, each.mean(0))
    assert found.error is not None
    assert_same(found.error, each.std(0) / 5**0.5)


# --- spellings


def test_a_network_has_the_same_contributions_however_it_is_spelled() -> None:
    net, x, x0 = chain(nn.ReLU), images(), baseline()
    expected = lifted(net, x, x0, [1, 2])
    reused = nn.Sequential(net[0], net[1], net[2], net[1], *net[4:])
    twin = OwnForward(lambda m, x: functional(m.net, x), net=net).eval()
    packed = Packed(lambda scores: {"logits": scores}, nn.Sequential(nn.Sequential(net)))
    frozen = chain(nn.ReLU)
    frozen.load_state_dict(net.state_dict())
    for model in (reused, twin, packed, frozen.requires_grad_(False), Checkpointed(net)):
        assert_same(lifted(model, x, x0, [1, 2]), expected)
    channels_last = x.to(memory_format=torch.channels_last)
    assert_same(lifted(net, channels_last, x0, [1, 2]), expected)
    assert_same(lifted(net.to(memory_format=torch.channels_last), channels_last, x0, [1, 2]), expected)
    assert_same(torch.cat([lifted(net, x[:1], x0, 1), lifted(net, x[1:], x0, 2)]), expected)
    assert_same(lifted(net.float(), x.float(), x0.float(), [1, 2]).double(), expected, 1e-4)
    half = lifted(net.bfloat16(), x.bfloat16(), x0.bfloat16(), [1, 2]).double()
    assert float(torch.corrcoef(torch.stack([half.flatten(), expected.flatten()]))[0, 1]) > 0.98


def test_a_graph_that_saves_all_operands_is_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU6(True), nn.Conv2d(4, 3, 2), nn.Flatten()
    ).double()
    head = nn.Linear(36, 3).double()
    net, x, x0, dispatches = net.append(head).eval(), images(), baseline(), Dispatches(monkeypatch)
    first = lifted(net, x, x0, [1, 2])
    assert dispatches.count > 0
    assert dispatches.of(lambda: torch.testing.assert_close(lifted(net, x, x0, [1, 2]), first)) == 0
    together = DeepLIFT(net, baseline=x0).attribute_classes(x, [1, 2])
    assert_same(torch.stack([single.values[i] for i, single in enumerate(together)]), first)
    kernel = FunctionModel(lambda x: F.conv2d(F.relu6(x), x.view(1, 3, *SIZE), padding=1).mean((1, 2, 3)))
    assert torch.equal(lifted(kernel, x[:1], x0), lifted(kernel, x[:1], x0))  # a convolution of two signals
    net[2] = nn.ReLU()  # its node saves no operand
    expected = lifted(copy.deepcopy(net), x, x0, [1, 2])
    assert_same(lifted(net, x, x0, [1, 2]), expected)


def functional(net: Any, x: Tensor) -> Tensor:
    x = F.conv2d(x, net[0].weight, net[0].bias, padding=1).relu_()
    x = F.relu(F.conv2d(x, net[2].weight, net[2].bias), inplace=True)
    out: Tensor = x.flatten(1) @ net[5].weight.T + net[5].bias
    return out


def test_a_class_activation_map_that_shares_the_forward_changes_nothing() -> None:
    model, x = PooledNet().eval(), torch.randn(2, 3, 16, 16)
    _, found = Together(GradCAM(model, "features"), DeepLIFT(model)).attribute(x, 1)
    torch.testing.assert_close(found.values, DeepLIFT(model).attribute(x, 1).values)
