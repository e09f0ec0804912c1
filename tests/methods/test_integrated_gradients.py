"""Path methods against closed forms, captum and their own axioms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import saliency
from saliency import METHODS, GradCAM, SmoothGrad, Together, contrast, probability, similarity, value
from saliency.errors import MethodError, NonFiniteError, NotApplicableError, SaliencyWarning
from saliency.methods.baselines import blurred
from saliency.methods.integrated_gradients import (
    FIRST_NODES,
    IDGI,
    RULES,
    AdaptiveIntegral,
    BlurIG,
    ExpectedGradients,
    GuidedIG,
    IntegratedGradients,
    QuadratureRule,
    quadrature,
)
from saliency.testing import tiny_model
from tests.models import Checkpointed, FunctionModel, OwnForward

SHAPE = (3, 8, 8)


def image(seed: int = 0, count: int = 1) -> Tensor:
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def linear(seed: int = 5) -> tuple[nn.Module, Tensor]:
    weight = image(seed)[0]
    return FunctionModel(lambda x: (weight * x).sum((1, 2, 3)) + 0.7), weight


# --- quadrature


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("count", [2, 3, 8, 50, 301])
def test_the_weights_of_a_rule_sum_to_one(name: QuadratureRule, count: int) -> None:
    nodes, weights = quadrature(name, count)
    assert nodes.shape == weights.shape == (count,)
    assert float(weights.sum()) == pytest.approx(1, abs=1e-14)
    assert bool((nodes.diff() > 0).all())
    assert 0 <= float(nodes[0]) <= float(nodes[-1]) <= 1


@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_gauss_and_legendre_are_exact_to_degree_2n_minus_1_and_no_further(count: int) -> None:
    nodes, weights = quadrature("gauss_legendre", count)
    for degree in range(2 * count):
        assert float(weights @ nodes**degree) == pytest.approx(1 / (degree + 1), abs=1e-13)
    assert abs(float(weights @ nodes ** (2 * count)) - 1 / (2 * count + 1)) > 1e-16


@pytest.mark.parametrize(("name", "degree"), [("midpoint", 1), ("trapezoid", 1)])
def test_midpoints_and_trapezoids_are_exact_for_straight_lines(name: QuadratureRule, degree: int) -> None:
    nodes, weights = quadrature(name, 7)
    assert float(weights @ nodes**degree) == pytest.approx(1 / (degree + 1), abs=1e-14)


def test_riemann_sums_take_the_side_that_they_say() -> None:
    assert quadrature("riemann_left", 4)[0].tolist() == [0, 0.25, 0.5, 0.75]
    assert quadrature("riemann_right", 4)[0].tolist() == [0.25, 0.5, 0.75, 1]


def integrated(value: Callable[[float], float], slope: Callable[[float], float], rounds: int) -> AdaptiveIntegral:
    adaptive = AdaptiveIntegral()
    for _ in range(rounds):
        for at in adaptive.wanted():
            adaptive.add(at, value(at), slope(at))
    return adaptive


@pytest.mark.parametrize("kink", [0.13, 0.5, 0.9])
def test_one_kink_is_integrated_exactly_wherever_it_lies(kink: float) -> None:
    adaptive = integrated(lambda a: 2 * a + 5 * max(a - kink, 0), lambda a: 2 + 5.0 * (a > kink), 1)
    weights = adaptive.weights
    assert adaptive.residual == pytest.approx(0, abs=1e-13)
    above = torch.tensor([float(at > kink) for at, _, _ in adaptive.nodes], dtype=torch.float64)
    assert float(weights @ above) == pytest.approx(1 - kink)


def test_adaptive_weights_are_those_of_a_mean_and_the_residual_is_what_they_miss() -> None:
    adaptive = integrated(lambda a: a**3 + (a > 0.3) * 0.5, lambda a: 3 * a * a, 3)  # a jump has no gradient
    weights = adaptive.weights
    assert float(weights.sum()) == pytest.approx(1)
    assert bool((weights >= 0).all())
    slopes = torch.tensor([3 * at * at for at, _, _ in adaptive.nodes], dtype=torch.float64)
    assert adaptive.rise - float(weights @ slopes) == pytest.approx(adaptive.residual)
    assert len(adaptive.nodes) == len({node[0] for node in adaptive.nodes}) > FIRST_NODES


def test_new_nodes_come_where_the_residual_is() -> None:
    adaptive = integrated(lambda a: (a > 0.3) * 1.0, lambda a: 0.0, 6)
    assert all(0.25 < at < 0.375 for at, _, _ in adaptive.nodes[FIRST_NODES:])
    assert min(abs(at - 0.3) for at, _, _ in adaptive.nodes) < 0.01


# --- integrated gradients


@pytest.mark.parametrize("options", [{"rule": each, "steps": 3} for each in RULES] + [{"tolerance": 0.01}])
def test_a_linear_model_gives_weight_times_way_under_every_rule(options: dict[str, Any]) -> None:
    model, weight = linear()
    x, baseline = image(), image(1)[0]
    found = IntegratedGradients(model, baseline=baseline, **options).attribute(x, 0)
    torch.testing.assert_close(found.values[0], weight * (x[0] - baseline))
    assert found.residual is not None
    assert abs(float(found.residual)) < 1e-12


@pytest.mark.parametrize("options", [{"steps": 1}, {"tolerance": 1e-6}])
def test_a_product_of_two_features_is_shared_by_halves(options: dict[str, Any]) -> None:
    model = FunctionModel(lambda x: x[:, 0, 0, 0] * x[:, 0, 0, 1])
    x = image()
    found = IntegratedGradients(model, **options).attribute(x, 0).values[0]
    half = x[0, 0, 0, 0] * x[0, 0, 0, 1] / 2
    torch.testing.assert_close(found[0, 0, :2], torch.stack([half, half]))
    assert float(found.abs().sum()) == pytest.approx(2 * abs(float(half)))


def test_the_minimum_of_two_features_is_the_smaller_ones_doing() -> None:
    model = FunctionModel(lambda x: torch.minimum(x[:, 0, 0, 0], x[:, 0, 0, 1]))
    x = torch.zeros(1, *SHAPE, dtype=torch.float64)
    x[0, 0, 0, 0], x[0, 0, 0, 1] = 0.4, 1.0
    found = IntegratedGradients(model, steps=8).attribute(x, 0).values[0]
    assert found[0, 0, :2].tolist() == pytest.approx([0.4, 0.0])


@pytest.mark.parametrize("degree", [3, 9])
def test_a_polynomial_along_the_path_needs_half_its_degree_in_nodes(degree: int) -> None:
    model = FunctionModel(lambda x: x.flatten(1).sum(1) ** degree / 1e3)
    found = IntegratedGradients(model, steps=(degree + 1) // 2).attribute(image(), 0)
    assert found.residual is not None
    assert abs(float(found.residual)) < 1e-10 * abs(float(found.scores))


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        ("gausslegendre", "gauss_legendre"),
        ("riemann_left", "riemann_left"),
        ("riemann_right", "riemann_right"),
        ("riemann_middle", "midpoint"),
    ],
)
def test_it_is_captums(method: str, rule: QuadratureRule) -> None:
    model, x, baseline = tiny_model().double(), image(count=2), image(7)
    peer = pytest.importorskip("captum.attr")
    expected = peer.IntegratedGradients(model).attribute(
        x, baseline.expand_as(x), target=[0, 1], n_steps=20, method=method
    )
    found = IntegratedGradients(model, baseline=baseline[0], rule=rule, steps=20).attribute(x, [0, 1])
    torch.testing.assert_close(found.values, expected)


def test_several_baselines_give_the_mean_of_their_maps() -> None:
    model, x, others = tiny_model().double(), image(count=2), image(7, 2)
    together = IntegratedGradients(model, baseline=others, steps=6).attribute(x, 0)
    single = [IntegratedGradients(model, baseline=each, steps=6).attribute(x, 0) for each in others]
    torch.testing.assert_close(together.values, (single[0].values + single[1].values) / 2)
    assert together.residual is not None
    assert single[0].residual is not None
    assert single[1].residual is not None
    torch.testing.assert_close(together.residual, (single[0].residual + single[1].residual) / 2)


@pytest.mark.parametrize("levels", [[0.0], [0.0, 0.5, -1.0]])
def test_a_tolerance_is_met_by_the_true_residual(levels: list[float]) -> None:
    model, x = tiny_model().double(), image(count=3)
    with torch.no_grad():
        start = torch.stack([model(torch.full_like(x, each)) for each in levels]).mean(0)
        rise = (model(x) - start)[:, 1]
    for tolerance in (0.1, 1e-3, 1e-6):
        found = IntegratedGradients(model, baseline=levels, tolerance=tolerance).attribute(x, 1)
        residual = rise - found.values.sum((1, 2, 3))
        assert bool((residual.abs() <= tolerance * rise.abs() + 1e-5 * found.scores.abs()).all())
        assert found.residual is not None
        torch.testing.assert_close(found.residual, residual, atol=1e-9, rtol=0)


def test_a_tolerance_that_cannot_be_met_ends_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saliency.methods.integrated_gradients.MOST_NODES", 20)
    model = FunctionModel(lambda x: (x[:, 0, 0, 0] > 0.1).double() + 1e-9 * x[:, 0, 0, 0])  # a jump has no gradient
    x = torch.ones(1, *SHAPE, dtype=torch.float64)
    found = IntegratedGradients(model, tolerance=0.01).attribute(x, 0)
    assert "not met" in found.run_stats[0].note
    assert 20 <= found.run_stats[0].passes <= 24


@pytest.mark.parametrize("function", [lambda x: x.sum() / x.sum(), lambda x: x.sqrt().sum()])
def test_a_score_or_gradient_that_is_not_finite_ends_an_adaptive_integral(
    function: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, counts = AdaptiveIntegral.wanted, list[int]()

    def count(path: AdaptiveIntegral) -> list[float]:
        counts.append(len(nodes := wanted(path)))
        assert nodes, "a round without new nodes, which would repeat forever"
        return nodes

    monkeypatch.setattr(AdaptiveIntegral, "wanted", count)
    model = FunctionModel(lambda x: torch.stack([function(row) for row in x]))  # NaN, or an infinite slope, at 0
    with pytest.raises(NonFiniteError):
        IntegratedGradients(model, tolerance=0.01).attribute(torch.ones(1, *SHAPE), value(0))
    assert all(counts)


@pytest.mark.parametrize("options", [{"steps": 0}, {"steps": 2.5}, {"rule": "simpson"}, {"tolerance": 0.0}])
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(MethodError):
        IntegratedGradients(tiny_model(), **options)


# --- the other paths


@pytest.mark.parametrize("name", ["integrated_gradients", "guided_ig"])
def test_the_residual_is_what_the_values_miss(name: str) -> None:
    model, x = tiny_model().double(), image(count=2)
    with torch.no_grad():
        rise = (model(x) - model(torch.full_like(x, 0.3)))[:, 1]
    found = METHODS[name](model, baseline=0.3, steps=7).attribute(x, 1)
    assert found.residual is not None
    torch.testing.assert_close(found.residual, rise - found.values.sum((1, 2, 3)), atol=1e-12, rtol=0)


def test_idgi_is_complete() -> None:
    model, x = tiny_model().double(), image(count=2)
    found = IDGI(model, steps=7, baseline=[0.0, -1.0]).attribute(x, 1)
    with torch.no_grad():
        baseline = sum(model(torch.full_like(x, each)).softmax(1)[:, 1] for each in (0.0, -1.0)) / 2
        torch.testing.assert_close(found.scores, model(x).softmax(1)[:, 1])
    rise = found.scores - baseline
    assert bool(((found.values.sum((1, 2, 3)) - rise).abs() < 1e-4 * rise.abs()).all())
    assert found.residual is not None
    assert bool((found.residual.abs() < 1e-12).all())


def test_idgi_of_a_linear_model_deals_out_by_the_squared_weight() -> None:
    model, weight = linear()
    x = image()
    found = IDGI(model, steps=5).attribute(x, value(0)).values[0]
    torch.testing.assert_close(found, weight.square() / weight.square().sum() * (weight * x[0]).sum())


def test_idgi_explains_a_class_by_its_probability_and_any_other_target_as_it_is() -> None:
    model, x = tiny_model().double(), image(count=2)
    method = IDGI(model, steps=4)
    expected = method.attribute(x, probability([1, 3]))
    for found in (method.attribute(x, [1, 3]), Together(GradCAM(model), method).attribute(x, [1, 3])[1]):
        assert found.target_names == ("probability of class 1", "probability of class 3")
        assert found.target == (1, 3)
        assert torch.equal(found.scores, expected.scores)
        assert found.probabilities is not None
        assert torch.equal(found.scores.float(), found.probabilities)
        torch.testing.assert_close(found.values, expected.values)
    assert method.attribute(x).target_names == expected_names(model, x)
    with torch.no_grad():
        output = model(x)
    for target, score in (
        (value(1), output[:, 1]),
        (contrast(1, 3), output[:, 1] - output[:, 3]),
    ):
        torch.testing.assert_close(method.attribute(x, target).scores, score)
    targets: Any = [3, value(1)]
    mixed = method.attribute(x, targets)
    assert mixed.target_names == ("probability of class 3", "value 1")
    torch.testing.assert_close(mixed.scores, torch.stack([output.softmax(1)[0, 3], output[1, 1]]))
    with pytest.warns(SaliencyWarning, match="stripes at the border"):
        torch.testing.assert_close(method.attribute(x, lambda output: output[:, 1]).scores, output[:, 1])
    with pytest.warns(SaliencyWarning, match="stripes at the border"):
        method.attribute(x, similarity(x[:1]))


def expected_names(model: nn.Module, x: Tensor) -> tuple[str, ...]:
    with torch.no_grad():
        return tuple(f"probability of class {each}" for each in model(x).argmax(1).tolist())


def test_expected_gradients_of_a_linear_model_are_exact_for_a_single_reference() -> None:
    model, weight = linear()
    x, reference = image(), image(3)
    found = ExpectedGradients(model, baseline=reference, passes=5).attribute(x, 0)
    torch.testing.assert_close(found.values[0], weight * (x - reference)[0])
    assert found.error is not None
    assert float(found.error.max()) < 1e-12


def test_expected_gradients_have_the_expectation_of_integrated_gradients_over_the_references() -> None:
    model, x, references = tiny_model().double(), image(), image(11, 4)
    expected = IntegratedGradients(model, baseline=references, steps=200).attribute(x, 1).values
    found = ExpectedGradients(model, baseline=references, passes=1500).attribute(x, 1)
    assert found.error is not None
    off = ((found.values - expected) / found.error).flatten()
    assert 0.7 < float(off.square().mean().sqrt()) < 1.3
    assert float((off.abs() < 1.96).double().mean()) > 0.9


def test_expected_gradients_agree_with_captums_gradient_shap() -> None:
    model, x, references = tiny_model().double(), image(), image(11, 4)
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 - captum draws from the global state
    peer = pytest.importorskip("captum.attr")
    expected = peer.GradientShap(model).attribute(x, references, n_samples=300, stdevs=0.0, target=1)
    found = ExpectedGradients(model, baseline=references, passes=300).attribute(x, 1)
    assert found.error is not None
    off = ((found.values - expected) / (2**0.5 * found.error)).flatten()
    assert 0.5 < float(off.square().mean().sqrt()) < 1.6


def test_expected_gradients_draw_colours_and_noise() -> None:
    model, x = tiny_model().double(), image()
    maps = [ExpectedGradients(model, baseline=each, passes=6).attribute(x, 1).values for each in ("colours", "noise")]
    assert not torch.equal(*maps)


def test_guided_ig_that_may_not_leave_the_straight_path_is_integrated_gradients() -> None:
    model, x = tiny_model().double(), image()
    guided = GuidedIG(model, max_distance=0, steps=16).attribute(x, 1).values
    straight = IntegratedGradients(model, rule="riemann_left", steps=16).attribute(x, 1).values
    torch.testing.assert_close(guided, straight)


def test_guided_ig_of_a_linear_model_is_weight_times_way_whatever_the_path() -> None:
    model, weight = linear()
    x = image()
    for distance, fraction in ((1.0, 0.1), (0.1, 0.25)):
        found = GuidedIG(model, steps=9, max_distance=distance, fraction=fraction).attribute(x, 0)
        torch.testing.assert_close(found.values[0], weight * x[0], atol=1e-7, rtol=1e-7)


# On random images and this tiny model in float64, Guided IG and PAIR's `saliency` 0.2.1 agree to 7e-15 of the largest
# value (steps 200, 50, 30; max_dist .02, .1, 1). On the bundled network, in float32 here and in float64 there, small
# differences grow as the order of the values changes: cosine .87 and .85 on coffee and chelsea.
def test_guided_ig_moves_the_smallest_gradients_first_and_exactly_as_far_as_a_step() -> None:
    method = GuidedIG(tiny_model(), max_distance=0.3, fraction=0.25)
    length, slopes = torch.ones(1, 1, 2, 4).double(), torch.arange(8.0).double().view(1, 1, 2, 4)
    moved = method.moved(torch.zeros_like(length), slopes, length, 0.1).flatten()
    assert float(moved.mean()) == pytest.approx(0.1)
    assert moved.tolist() == pytest.approx([0.4, 0.4] + [0.0] * 6)
    later = method.moved(moved.view_as(length), slopes.flip(2, 3), length, 0.5).flatten()
    assert float(later.mean()) == pytest.approx(0.5)
    assert float(later.min()) >= 0.2 - 1e-12
    assert float(later.max()) <= 0.8 + 1e-12


def test_blur_ig_is_complete_between_the_image_and_its_blur() -> None:
    model, x = tiny_model().double(), image()
    found = BlurIG(model, max_sigma=4.0, steps=400).attribute(x, 1)
    with torch.no_grad():
        rise = float((model(x) - model(blurred(x, 4.0)))[0, 1])
    assert float(found.values.sum()) == pytest.approx(rise, rel=0.05)
    assert found.residual is not None
    assert float(found.residual) == pytest.approx(rise - float(found.values.sum()), abs=1e-9)


def test_blur_ig_of_a_linear_model_is_weight_times_detail() -> None:
    model, weight = linear()
    x = image()
    found = BlurIG(model, max_sigma=3.0, steps=30).attribute(x, 0).values
    torch.testing.assert_close(found, weight * (x - blurred(x, 3.0)))


def test_half_precision_and_its_neighbours_come_out_in_float32() -> None:
    model, x = tiny_model().bfloat16(), image().bfloat16()
    for method in (IntegratedGradients(model, steps=3), IDGI(model, steps=3), GuidedIG(model, steps=3)):
        assert method.attribute(x, 0).values.dtype == torch.float32


# --- the mean gradient


class Gated(nn.Module):
    """A convolution of the image, and optionally a second way from the image to the score."""

    def __init__(self, ahead: Callable[[Tensor], Tensor], *, skip: bool = False, **options: Any) -> None:
        super().__init__()
        self.ahead, self.skip = ahead, skip
        self.conv = nn.Conv2d(3, 6, 3, dtype=torch.float64, **options)
        self.head = nn.Linear(6, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.relu(self.conv(self.ahead(x))).square().mean((2, 3)))
        return scores + x.square().mean((1, 2, 3))[:, None] if self.skip else scores


@pytest.mark.parametrize(
    ("ahead", "skip", "options"),
    [
        (lambda x: x, False, {"stride": 2, "dilation": 2, "groups": 3}),
        (lambda x: nn.functional.pad(x, (0, 1, 2, 3)), False, {"stride": 2}),
        (lambda x: nn.functional.pad(x, (-2, 1)), False, {"stride": 2}),
        (lambda x: x.relu_(), False, {}),
        (lambda x: x, True, {"padding": 1}),
        (lambda x: x, False, {"padding": 1, "padding_mode": "reflect"}),
    ],
)
def test_the_map_is_the_weighted_sum_of_the_gradients_at_the_nodes_of_all_baselines(
    ahead: Callable[[Tensor], Tensor], skip: bool, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model, x = Gated(ahead, skip=skip, **options), image(count=2)
    baselines = image(7, 2)
    found = IntegratedGradients(model, baseline=baselines, steps=5, chunk=3).attribute(x, 1).values
    (nodes, weights), expected = quadrature("gauss_legendre", 5), torch.zeros_like(x)
    for baseline in baselines:
        for at, weight in zip(nodes.tolist(), weights.tolist(), strict=True):
            here = torch.lerp(baseline.expand_as(x), x, at).requires_grad_()
            (gradient,) = torch.autograd.grad(model(here.clone())[:, 1].sum(), here)
            expected += weight / 2 * gradient * (x - baseline)
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_is_named() -> None:
    again = Checkpointed(nn.Conv2d(4, 2, 3), reentrant=True)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), again, nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    with pytest.raises(NotApplicableError, match="use_reentrant"):
        IntegratedGradients(model, steps=2).attribute(image(), 0)


def test_idgi_explains_the_only_output_of_a_model_as_it_is() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 1)).eval()
    x = torch.randn(1, 3, 8, 8)
    found = IDGI(model, steps=5, chunk=2).attribute(x)
    assert found.target_names == ("class 0",)
    assert torch.equal(found.values, IDGI(model, steps=5, chunk=2).attribute(x, value(0)).values)


def test_a_wrapped_idgi_says_that_it_explains_the_probability() -> None:
    model, x = tiny_model(), torch.randn(1, 3, 16, 16)
    found = SmoothGrad(model, inner="idgi", inner_options={"steps": 3}, passes=2).attribute(x, 2)
    with torch.no_grad():
        expected = model(x).softmax(1)[:, 2]
    assert found.target_names == ("probability of class 2",)
    torch.testing.assert_close(found.scores, expected)


class _Reversed(torch.autograd.Function):
    """The identity, with the gradient reversed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


@pytest.mark.parametrize(
    "method",
    [
        saliency.IntegratedGradients,
        saliency.GuidedIG,
        saliency.BlurIG,
        partial(saliency.IntegratedGradients, tolerance=0.1),
    ],
)
def test_a_residual_of_more_than_half_of_the_increase_is_noted(method: Any) -> None:
    linear = nn.Sequential(nn.Flatten(), nn.Linear(48, 3)).double()
    reverse = OwnForward(lambda m, x: m.linear(_Reversed.apply(x)), linear=linear)
    x = torch.rand(2, 3, 4, 4, dtype=torch.float64)
    plain, reversed_ = (method(net.eval()).attribute(x, 1) for net in (linear, reverse))
    assert plain.notes == ("", "")
    torch.testing.assert_close(reversed_.values, -plain.values)
    for note, rise in zip(reversed_.notes, plain.values.flatten(1).sum(1).tolist(), strict=True):
        assert note == f"the values miss {2 * rise:.2g} of an increase of the score by {rise:.2g}"
