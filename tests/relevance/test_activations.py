"""An activation that is spelled out has the relevance of the fused one. Gates of other values stay products."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saliency
from tests.reference import error

Function = Callable[[Tensor], Tensor]


def _tanh_part(x: Tensor) -> Tensor:
    return torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def _tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


# The spelling, and the fused form.
ACTIVATIONS: dict[str, tuple[Function, Function]] = {
    "x * sigmoid(x)": (lambda x: x * x.sigmoid(), F.silu),
    "sigmoid(x) * x": (lambda x: x.sigmoid() * x, F.silu),
    "x / (1 + exp(-x))": (lambda x: x / (1 + torch.exp(-x)), F.silu),
    "in place": (lambda x: (x * 1).mul_(x.sigmoid()), F.silu),
    "addcmul": (lambda x: torch.addcmul(x.new_zeros(1), x, x.sigmoid()), F.silu),
    "QuickGELU": (lambda x: x * torch.sigmoid(1.702 * x), lambda x: F.silu(1.702 * x) / 1.702),
    "NewGELU": (lambda x: 0.5 * x * (1.0 + _tanh_part(x)), _tanh_gelu),
    "NewGELU, factors in another order": (lambda x: x * (0.5 * (1.0 + _tanh_part(x))), _tanh_gelu),
    "NewGELU by two products": (lambda x: 0.5 * x + 0.5 * x * _tanh_part(x), _tanh_gelu),
    "NewGELU by products": (
        lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608 * x * (1 + 0.044715 * x * x))),
        _tanh_gelu,
    ),
    "GELU by erf": (lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), F.gelu),
    "hard-swish": (lambda x: x * F.relu6(x + 3) / 6, F.hardswish),
    "hard-swish by hard-sigmoid": (lambda x: x * F.hardsigmoid(x), F.hardswish),
    "Mish": (lambda x: x * torch.tanh(F.softplus(x)), F.mish),
    "square": (lambda x: x * x, torch.square),
}


class Network(nn.Module):
    """Two convolutions and a linear layer, with an activation after each convolution."""

    def __init__(self, activation: Function) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.Conv2d(6, 4, 3, stride=2)
        self.last = nn.Linear(4, 3)
        self.activation = activation
        generator = torch.Generator().manual_seed(0)
        for parameter in self.double().parameters():
            nn.init.normal_(parameter, 0, 0.4, generator)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.second(self.activation(self.first(x))))
        y: Tensor = self.last(x.mean((2, 3)))
        return y


CASES: list[tuple[str, dict[str, Any]]] = [
    *(("lrp", {"composite": name}) for name in ("epsilon", "epsilon_plus", "gamma", "epsilon_alpha2_beta1")),
    ("attn_lrp", {}),
    ("cp_lrp", {}),
    ("excitation_backprop", {"layer": "first"}),
    ("deep_lift", {}),
]


def images() -> Tensor:
    """Two images. In a part of them, the first activations are those of 0."""
    x = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[:, :, :6] = 0
    return x


@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{name} {options}" for name, options in CASES])
@pytest.mark.parametrize("spelling", ACTIVATIONS)
@pytest.mark.filterwarnings("ignore:excitation_backprop. the fractions")
def test_a_spelling_has_the_map_of_the_fused_activation(spelling: str, name: str, options: dict[str, Any]) -> None:
    x, models = images(), [Network(function).eval() for function in ACTIVATIONS[spelling]]
    found, expected = (saliency.METHODS[name](model, **options).attribute(x, [0, 2]) for model in models)
    assert error(found.values, expected.values) < 1e-9
    assert found.ledger is None or error(found.ledger.sum(1), found.scores) < 1e-9


class Watched(nn.Module):
    """A function between two layers at which relevance is read."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.before, self.after, self.head = nn.Conv2d(3, 4, 1), nn.Identity(), nn.Linear(4, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.after(self.function(self.before(x))).mean((2, 3)))
        return y


def relevance(function: Function, layer: str) -> Tensor:
    model = Watched(function).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0, 0.5, torch.Generator().manual_seed(parameter.numel()))
    return saliency.AttnLRP(model, layer).attribute(images(), [0, 2]).values


@pytest.mark.parametrize(
    "function",
    [
        *(spelling for spelling, _ in ACTIVATIONS.values()),
        lambda x: x.tanh() * (2 * x).sigmoid(),
        lambda x: (2 * x).sigmoid() * (x + x**3),
        lambda x: x.relu() * (x.abs() + 1),
    ],
)
def test_all_relevance_of_a_self_gated_activation_goes_to_its_operand(function: Function) -> None:
    assert error(relevance(function, "before"), relevance(function, "after")) < 1e-9


_CELL = nn.LSTMCell(4, 4).double()


@pytest.mark.parametrize(
    "gated",
    [
        lambda x: x[:, :2].repeat(1, 2, 1, 1) * x[:, 2:].sigmoid().repeat(1, 2, 1, 1),
        lambda x: torch.mul(*x.chunk(2, 1)).repeat(1, 2, 1, 1),
        lambda x: x * x.flip(2).sigmoid(),
        lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(),
        lambda x: x[:, :1] * x.sigmoid(),
        lambda x: _CELL(x.flatten(2).mT.reshape(-1, 4))[1].view(2, 144, 4).mT.view(2, 4, 12, 12),
    ],
)
def test_gates_of_other_values_are_products_by_halves(gated: Function) -> None:
    explanation = saliency.AttnLRP(Watched(gated).double().eval()).attribute(images(), 0)
    assert "by halves" in str(explanation.coverage)
    assert "product by f(x)/x" not in str(explanation.coverage)


def test_an_exponent_is_the_operand_of_a_power() -> None:
    assert error(relevance(lambda x: 2**x, "before"), relevance(torch.exp2, "before")) < 1e-9
