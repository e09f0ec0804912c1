"""Each rule against its textbook sums, one neuron after the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saliency import LRP, InputXGradient
from saliency.relevance import AlphaBeta, Epsilon, Flat, Gamma, Pass, Rule, WSquare, ZBox, ZPlus
from tests.models import OwnForward
from tests.relevance import textbook

LOW, HIGH = -2.5, 3.0

RULES: dict[str, tuple[Rule, textbook.Rule]] = {
    "epsilon relative": (Epsilon(0.3), textbook.epsilon(0.3)),
    "epsilon absolute": (Epsilon(0.3, relative=False), textbook.epsilon(0.3, relative=False)),
    "zero": (Epsilon(0), textbook.epsilon(0)),
    "gamma": (Gamma(0.3), textbook.gamma(0.3)),
    "alpha 2 beta 1": (AlphaBeta(2, 1), textbook.alpha_beta(2, 1)),
    "alpha 1.5 beta 0.5": (AlphaBeta(1.5, 0.5), textbook.alpha_beta(1.5, 0.5)),
    "z plus": (ZPlus(), textbook.z_plus()),
    "z box": (ZBox(LOW, HIGH), textbook.z_box(torch.tensor(LOW), torch.tensor(HIGH))),
    "w square": (WSquare(), textbook.w_square()),
    "flat": (Flat(), textbook.flat()),
}
TERMINAL = ("z box", "w square", "flat")


def batch_norm() -> nn.BatchNorm2d:
    """A batch norm of 4 channels that turns the sign of some."""
    norm = nn.BatchNorm2d(4).eval()
    norm.running_mean, norm.running_var = torch.randn(4), torch.rand(4) + 0.5
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return norm


def conv_and_norm(*, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=bias), batch_norm())


class OverChannels(nn.Module):
    """A linear layer over the channels of each pixel, in one of several spellings."""

    def __init__(self, spelling: Callable[[Tensor, nn.Linear], Tensor], *, frozen: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4).requires_grad_(not frozen)
        self.spelling = spelling

    def forward(self, x: Tensor) -> Tensor:
        return self.spelling(x.permute(0, 2, 3, 1), self.linear)


SPELLINGS: dict[str, Callable[[Tensor, nn.Linear], Tensor]] = {
    "layer": lambda x, linear: linear(x),
    "function of a copy": lambda x, linear: F.linear(x.contiguous(), linear.weight, linear.bias),
    "product and sum": lambda x, linear: x @ linear.weight.T + linear.bias,
    "sum in place": lambda x, linear: (x @ linear.weight.T).add_(linear.bias),
    "einsum": lambda x, linear: torch.einsum("nhwc,dc->nhwd", x, linear.weight),
    "weights first": lambda x, linear: (linear.weight @ x.mT).mT,
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(3, 4, 3),
    "conv without bias": lambda: nn.Conv2d(3, 4, 3, bias=False),
    "conv with stride, padding, dilation and groups": lambda: nn.Conv2d(
        3, 6, 3, stride=2, padding=2, dilation=2, groups=3
    ),
    "conv with two sizes": lambda: nn.Conv2d(3, 2, (2, 3), stride=(1, 2), padding=(1, 0)),
    "conv that skips pixels": lambda: nn.Conv2d(3, 2, 1, stride=3),
    "transposed conv": lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1),
    "transposed conv with groups": lambda: nn.ConvTranspose2d(3, 6, 2, stride=2, groups=3),
    "conv and batch norm": conv_and_norm,
    "conv without bias and batch norm": lambda: conv_and_norm(bias=False),
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(90, 7)),
    "linear without bias": lambda: nn.Sequential(nn.Flatten(), nn.Linear(90, 7, bias=False)),
    "linear over the last axis": lambda: nn.Linear(6, 4),
    "linear over the last axis without bias": lambda: nn.Linear(6, 4, bias=False),
}
SIZE = (5, 6)


class Readout(nn.Module):
    """A layer, and a weighted sum over its outputs as the score."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer.double()
        shape = layer(torch.zeros(1, 3, *SIZE, dtype=torch.float64)).shape[1:]
        self.register_buffer("weight", torch.randn(shape, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        score = (self.layer(x) * self.weight).flatten(1).sum(1)
        return torch.stack([score, -score], 1)


def signed(count: int = 2) -> Tensor:
    """Images with positive and negative pixels, some of which are 0."""
    x = torch.randn(count, 3, *SIZE, dtype=torch.float64)
    x[:, :, 1::3, ::2] = 0
    return x.clamp(LOW, HIGH)


def propagated(model: Readout, x: Tensor, rule: Rule) -> Tensor:
    return LRP(model.eval(), composite={"conv": rule, "linear": rule}).attribute(x, 0).values


def by_the_book(model: Readout, x: Tensor, rule: textbook.Rule) -> Tensor:
    relevance = (model.layer(x) * model.weight).detach()
    if not isinstance(model.layer, nn.Linear):
        return textbook.through(model.layer, x, relevance, rule)
    # A matrix product over the last axis: each row by itself.
    return textbook.through(model.layer, x.flatten(0, -2), relevance.flatten(0, -2), rule).view_as(x)


def assert_equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_its_textbook_sums_for_signed_inputs(layer: str, rule: str) -> None:
    model, x = Readout(LAYERS[layer]()), signed()
    mine, book = RULES[rule]
    assert_equal(propagated(model, x, mine), by_the_book(model, x, book))


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_its_textbook_sums_for_positive_inputs(rule: str) -> None:
    model, x = Readout(nn.Conv2d(3, 4, 3, padding=1)), signed().clamp(min=0)
    mine, book = RULES[rule]
    assert_equal(propagated(model, x, mine), by_the_book(model, x, book))


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.Linear])
@pytest.mark.parametrize("rule", RULES)
def test_a_neuron_with_denominator_zero_passes_nothing(rule: str, kind: type[nn.Module]) -> None:
    layer = nn.Conv2d(3, 4, 3) if kind is nn.Conv2d else nn.Sequential(nn.Flatten(), nn.Linear(90, 4))
    weight, bias = layer.parameters()
    with torch.no_grad():
        weight[0], bias[0] = 0, 0
        weight[1], bias[1] = weight[1].abs(), 0.5  # for negative inputs, no positive contribution but a bias
        weight[2], bias[2] = weight[2].abs(), 0
    mine, book = RULES[rule]
    for x in (signed(), -signed().abs(), torch.zeros(2, 3, *SIZE, dtype=torch.float64)):
        model = Readout(layer)
        found = propagated(model, x, mine)
        assert bool(found.isfinite().all())
        assert_equal(found, by_the_book(model, x, book))


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("rule", ["epsilon relative", "gamma", "alpha 2 beta 1", "z plus"])
def test_a_linear_layer_has_its_rule_however_it_is_spelled(rule: str, spelling: str, frozen: bool) -> None:
    """PyTorch itself spells `nn.Linear` in three ways, by the strides of its input and whether it is frozen."""
    layer = OverChannels(SPELLINGS[spelling], frozen=frozen)
    if spelling in ("einsum", "weights first"):
        layer.linear.bias = None  # type: ignore[assignment]
    model, x = Readout(layer), signed(3)
    mine, book = RULES[rule]
    relevance = (model.layer(x) * model.weight).detach().flatten(0, -2)
    rows = textbook.through(layer.linear, x.permute(0, 2, 3, 1).flatten(0, -2), relevance, book)
    assert_equal(propagated(model, x, mine), rows.view(3, *SIZE, 3).permute(0, 3, 1, 2))


def test_bounds_of_z_box_may_differ_by_channel() -> None:
    model, x = Readout(nn.Conv2d(3, 4, 3)), signed()
    low, high = torch.tensor([-2.5, -3.0, -4.0]).double(), torch.tensor([3.0, 3.5, 5.0]).double()
    each = [bound.view(3, 1, 1).expand(3, *SIZE).flatten() for bound in (low, high)]
    found = propagated(model, x, ZBox(low.tolist(), high.tolist()))
    assert_equal(found, by_the_book(model, x, textbook.z_box(*each)))


def test_pass_hands_relevance_on_unchanged() -> None:
    model, x = Readout(nn.Conv2d(3, 3, 3, padding=1)), signed()
    x[x == 0] = 1
    assert_equal(propagated(model, x, Pass()), (model.layer(x) * model.weight).detach())


@pytest.mark.parametrize("rule", [name for name in RULES if name not in TERMINAL])
def test_a_rule_at_an_inner_layer_is_its_textbook_sums(rule: str) -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 2), nn.ReLU(), nn.Flatten()
    ).double()
    x = signed()
    net.append(nn.Linear(net(x).shape[1], 3).double())
    mine, book = RULES[rule]
    composite = {"0": AlphaBeta(2, 1), "3": mine, "linear": Epsilon(1e-6)}
    books = {0: textbook.alpha_beta(2, 1), 3: book, 6: textbook.epsilon(1e-6)}
    expected = textbook.lrp(list(net), x, 1, books)
    assert_equal(LRP(net.eval(), composite=composite).attribute(x, 1).values, expected[0])
    at_conv = LRP(net, composite=composite, layer="0").attribute(x, 1).values
    assert_equal(at_conv, expected[1].sum(1, keepdim=True))


@pytest.mark.parametrize("rule", TERMINAL)
def test_a_first_rule_below_other_layers_is_its_textbook_sums(rule: str) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.ReLU(), nn.Flatten()).double()
    x = signed()
    net.append(nn.Linear(net(x).shape[1], 3).double())
    mine, book = RULES[rule]
    books = {0: book, 2: textbook.z_plus(), 5: textbook.epsilon(1e-6)}
    composite = {"first": mine, "conv": ZPlus(), "linear": Epsilon(1e-6)}
    expected = textbook.lrp(list(net), x, 1, books)[0]
    assert_equal(LRP(net.eval(), composite=composite).attribute(x, 1).values, expected)


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros around": lambda x: F.pad(x, (1, 0, 2, 1)),
    "mirrored": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "repeated border": lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
    "circular": lambda x: F.pad(x, (1, 1, 1, 1), mode="circular"),
    "blue first": lambda x: x[:, [2, 1, 0]],
    "flipped": lambda x: x.flip(1),
    "slices": lambda x: torch.cat([x[..., :4, ::2], x[..., 1:5, 1::2]], 1),
    "stacked": lambda x: torch.stack([x, x.roll(1, -1)], 1).flatten(1, 2),
    "blocks": lambda x: F.pixel_unshuffle(x[..., :4, :], 2),
    "windows": lambda x: F.unfold(x, 2).view(len(x), 12, 4, 5),
    "repeated": lambda x: x.repeat(1, 2, 1, 1),
    "enlarged": lambda x: F.interpolate(x, scale_factor=2),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("move", MOVES)
def test_relevance_of_the_first_layer_follows_pixels_to_where_they_came_from(move: str) -> None:
    moved, x = MOVES[move], signed()
    conv = nn.Conv2d(moved(x).shape[1], 4, 2).double()
    head = nn.Sequential(nn.Flatten(), nn.LazyLinear(3).double())
    net = OwnForward(lambda m, x: m.head(m.conv(moved(x))), conv=conv, head=head).eval()
    net(x)
    rules = {0: textbook.flat(), 2: textbook.epsilon(1e-6)}
    r = textbook.lrp([conv, *head], moved(x), 1, rules)[0]
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(moved(leaf), leaf, r)  # each pixel gets the sum over its copies
    assert_equal(LRP(net, composite="epsilon_plus_flat").attribute(x, 1).values, expected)


@pytest.mark.parametrize("epsilon", [0, 1e-9])
def test_epsilon_towards_zero_is_gradient_times_input_without_biases(epsilon: float) -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5, bias=False),
    ).double()
    x = signed(3)
    rule = Epsilon(epsilon)
    found = LRP(net.eval(), composite={"conv": rule, "linear": rule}).attribute(x, [0, 3, 4])
    expected = InputXGradient(net).attribute(x, [0, 3, 4])
    torch.testing.assert_close(found.values, expected.values, rtol=0 if epsilon == 0 else 1e-5, atol=1e-12)
    torch.testing.assert_close(found.values.sum((1, 2, 3)), found.scores)


def test_a_batch_norm_that_cannot_be_merged_shares_by_magnitude() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), batch_norm(), nn.ReLU(), nn.Flatten()).double().eval()
    x = signed()
    net.append(nn.Linear(net(x).shape[1], 3).double())
    rules = {0: textbook.z_plus(), 5: textbook.epsilon(1e-6)}
    expected = textbook.lrp(list(net), x, 1, rules)[0]
    assert_equal(LRP(net, composite="epsilon_plus").attribute(x, 1).values, expected)


@pytest.mark.parametrize("rule", ["epsilon relative", "gamma", "alpha 2 beta 1", "z plus"])
def test_a_product_over_no_inputs_has_no_relevance(rule: str) -> None:  # as of a box without candidates near it
    layer = nn.Linear(6, 2).double()
    x = torch.rand(2, 6, 1, 1, dtype=torch.double)
    model = nn.Sequential(nn.Flatten(), layer)

    def target(output: torch.Tensor) -> torch.Tensor:
        return output[:, 0] + F.linear(output[:, :0], output.new_zeros(1, 0))[:, 0]

    method = LRP(model, composite={"linear": RULES[rule][0]})
    torch.testing.assert_close(method.attribute(x, target).values, method.attribute(x, 0).values)


def test_an_expert_without_tokens_has_no_relevance() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 2).double(), nn.Linear(6, 2).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tokens, is_second = x.flatten(1), torch.zeros(len(x), dtype=torch.bool)
            return torch.cat([self.first(tokens[~is_second]), self.second(tokens[is_second])])

    x, model = torch.rand(2, 6, 1, 1, dtype=torch.double), Experts()
    composite = {"linear": ZPlus(bias=False)}
    alone = LRP(nn.Sequential(nn.Flatten(), model.first), composite=composite).attribute(x, 0)
    torch.testing.assert_close(LRP(model, composite=composite).attribute(x, 0).values, alone.values)
