"""Each kernel against the formula of its rule, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saliency
from saliency.relevance import AlphaBeta, ContrastiveRule, Epsilon, Excitation, Gamma, Rule, ZPlus
from saliency.relevance.kernels import KERNELS

RULES: dict[str, Rule] = {
    "epsilon": Epsilon(0.3),
    "absolute epsilon": Epsilon(0.3, relative=False),
    "gradient": Epsilon(0),
    "gamma": Gamma(0.3),
    "alpha 2 beta 1": AlphaBeta(2, 1),
    "alpha 2 beta 1 without bias": AlphaBeta(2, 1, bias=False),
    "z plus": ZPlus(),
    "z plus without bias": ZPlus(bias=False),
    "excitation": Excitation(),
    "contrast": ContrastiveRule(),
}


def _norm(channels: int, *, is_positive: bool) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels)
    norm.running_mean, norm.running_var = torch.randn(channels), torch.rand(channels) + 0.5
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    if is_positive:
        norm.weight.data.abs_()
    return norm


def _cut(*, bias: bool) -> nn.Sequential:
    """Zero inputs: a ReLU after a shift that cuts most numbers, and padding."""
    return nn.Sequential(nn.Threshold(0.8, 0.0), nn.Conv2d(3, 4, 3, padding=2, bias=bias), nn.ReLU())


class Pools(nn.Module):
    """The mean and the maximum of windows after a ReLU, added or subtracted: rectified, or of both signs."""

    def __init__(self, sign: int) -> None:
        super().__init__()
        self.sign = sign

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(F.avg_pool2d(x.relu(), 2), F.max_pool2d(x.relu(), 2), alpha=self.sign)


NETWORKS: dict[str, Callable[[], nn.Sequential]] = {
    "convolutions": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.SiLU()),
    "without bias": lambda: nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.ReLU(), nn.Conv2d(4, 2, 3, bias=False)),
    "batch norm merged": lambda: nn.Sequential(
        *(nn.Conv2d(3, 4, 3), _norm(4, is_positive=True), nn.ReLU()),
        *(nn.Conv2d(4, 4, 3, bias=False), _norm(4, is_positive=True), nn.SiLU()),
    ),
    "batch norm of both signs merged": lambda: nn.Sequential(
        *(nn.Conv2d(3, 4, 3), _norm(4, is_positive=False), nn.ReLU()),
        *(nn.Conv2d(4, 4, 3, bias=False), _norm(4, is_positive=False), nn.SiLU()),
    ),
    "transposed": lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 3, stride=2), _norm(4, is_positive=True), nn.ReLU()),
    "zero inputs": lambda: _cut(bias=True),
    "zero inputs without bias": lambda: _cut(bias=False),
    "sums of pools": lambda: nn.Sequential(nn.Conv2d(3, 4, 2), Pools(1), nn.Conv2d(4, 4, (1, 2)), nn.ReLU()),
    "differences of pools": lambda: nn.Sequential(nn.Conv2d(3, 4, 2), Pools(-1), nn.Conv2d(4, 4, (1, 2)), nn.ReLU()),
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(90, 7), nn.ReLU(), nn.Linear(7, 5), nn.Tanh()),
    "linear without bias": lambda: nn.Sequential(nn.Flatten(), nn.Linear(90, 7, bias=False), nn.ReLU()),
    "rows": lambda: nn.Sequential(nn.Flatten(2), nn.Linear(30, 7), nn.GELU(), nn.Linear(7, 5, bias=False)),
}


@contextmanager
def formulas(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave the table of kernels empty, so that each rule is computed by its formula."""
    with monkeypatch.context() as patch:
        for rule in list(KERNELS):
            patch.delitem(KERNELS, rule)
        yield


def _drawn(network: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(NETWORKS[network](), nn.Flatten(), nn.LazyLinear(4)).double().eval()
    x = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    model(x)
    return model, x


@pytest.mark.filterwarnings("ignore:.*missing from the ledger")  # rules without bias, and formulas
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("rule", RULES)
def test_a_kernel_equals_the_formula_of_its_rule(rule: str, network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _drawn(network)
    method = saliency.LRP(model, composite={"conv": RULES[rule], "linear": RULES[rule], "last": Epsilon(0)})
    found = method.attribute(x, [1, 3]).values
    with formulas(monkeypatch):
        expected = method.attribute(x, [1, 3]).values
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))


@pytest.mark.filterwarnings("ignore:.*missing from the ledger")
@pytest.mark.parametrize("rule", RULES)
def test_a_kernel_has_the_same_result_when_several_targets_share_its_values(rule: str) -> None:
    model, x = _drawn("batch norm merged")
    method = saliency.LRP(model, composite={"conv": RULES[rule], "linear": RULES[rule], "last": Epsilon(0)})
    together = method.attribute_classes(x, [1, 3, 0])
    for found, target in zip(together, [1, 3, 0], strict=True):
        torch.testing.assert_close(found.values, method.attribute(x, target).values)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if "without" not in rule and rule not in ("excitation", "contrast")]
)
def test_a_kernel_accounts_for_all_relevance(rule: str, network: str) -> None:
    model, x = _drawn(network)
    found = saliency.LRP(model, composite={"conv": RULES[rule], "linear": RULES[rule]}).attribute(x, [1, 3])
    assert found.residual is not None
    torch.testing.assert_close(found.residual, torch.zeros_like(found.residual), rtol=0, atol=1e-9)


def test_a_subclass_of_a_rule_is_computed_by_its_own_formula() -> None:
    class Doubled(ZPlus):
        def relevance(self, op: saliency.relevance.LinearOperation, relevance: Tensor) -> Tensor:
            return 2 * super().relevance(op, relevance)

    model, x = _drawn("convolutions")
    usual = saliency.LRP(model, composite={"0.0": ZPlus()}).attribute(x, 1)
    with pytest.warns(saliency.errors.SaliencyWarning, match="missing from the ledger"):
        doubled = saliency.LRP(model, composite={"0.0": Doubled()}).attribute(x, 1)
    torch.testing.assert_close(doubled.values, 2 * usual.values)


class ClosedGate(nn.Module):
    """A signal times gates of its means, some of which are closed: products of zero whose gates receive relevance."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.mix(x.mean((2, 3), keepdim=True)) - torch.tensor([9.0, 9, 0, 0]).view(4, 1, 1))


@pytest.mark.parametrize("rule", ["gamma", "z plus", "alpha 2 beta 1"])
def test_gates_of_zero_receive_the_same_relevance_beside_an_image_of_negative_signals(rule: str) -> None:
    torch.manual_seed(0)
    first = nn.Conv2d(3, 4, 3, bias=False)
    nn.init.uniform_(first.weight, 0, 1)
    model = nn.Sequential(
        first, ClosedGate(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    ).eval()
    method = saliency.LRP(model, composite={"conv": RULES[rule]})
    x = 3 * torch.rand(1, 3, 8, 8)
    together = method.attribute(torch.cat([x, -x]), 1).values[:1]
    torch.testing.assert_close(together, method.attribute(x, 1).values)
