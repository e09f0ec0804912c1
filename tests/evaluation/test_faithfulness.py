"""Metrics of faithfulness against closed forms, and the relations that every metric of perturbed images keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from saliency import Explanation, InputXGradient, IntegratedGradients, PerImage
from saliency.attribution import passes
from saliency.errors import MethodError
from saliency.evaluation.metrics.base import Metric
from saliency.evaluation.metrics.faithfulness import (
    ABPC,
    AOPC,
    IROF,
    AverageDrop,
    Deletion,
    FaithfulnessCorrelation,
    Increase,
    Infidelity,
    Insertion,
    SensitivityN,
)
from saliency.evaluation.metrics.road import ROAD, CombinedROAD, imputed, removed
from saliency.metrics import METRICS, Measurement, PerturbationMetric, measure
from saliency.testing import Snapshot, images, tiny_model
from tests.models import FunctionModel
from tests.selection import case

QUICK: dict[str, dict[str, Any]] = {
    "deletion": {"steps": 8},
    "insertion": {"steps": 8},
    "abpc": {"steps": 8},
    "aopc": {"patch": 2, "steps": 5, "draws": 3},
    "irof": {"segments": (4, 4)},
    "road": {"shares": (0.3, 0.7)},
    "combined_road": {"shares": (0.3, 0.7)},
    "infidelity": {"passes": 20},
    "faithfulness_correlation": {"segments": (4, 4), "passes": 20},
    "sensitivity_n": {"segments": (4, 4), "sizes": 3, "passes": 10},
}
SAMPLED = ("aopc", "infidelity", "faithfulness_correlation", "sensitivity_n")
NOISY = ("road", "combined_road")
BY_RANK = ("deletion", "insertion", "abpc", *NOISY)
SHARED = [name for name, cls in METRICS.items() if issubclass(cls, PerturbationMetric)]


def quick(name: str) -> Metric:
    return METRICS[name](**QUICK.get(name, {}))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


WEIGHT = random(3, 8, 8, seed=1)
IMAGE = random(1, 3, 8, 8, seed=2)
CONTRIBUTIONS = (WEIGHT * IMAGE).sum(1)[0]


def linear(x: Tensor) -> Tensor:
    return (x * WEIGHT).sum((1, 2, 3))


def one_pixel(x: Tensor) -> Tensor:
    return x[:, 0, 2, 5]


def curved(x: Tensor) -> Tensor:
    """A function that is the same for a flipped image, and lower for a blurred one."""
    weight = WEIGHT.square() + WEIGHT.square().flip(2)
    return (x.tanh().square() * weight).sum((1, 2, 3)).log1p() - 4


def explained(model: nn.Module, x: Tensor, values: Tensor | None = None) -> Explanation:
    """Input times gradient, or the given map (H, W), of the first class."""
    if values is None:
        return InputXGradient(model).attribute(x, 0)
    explanation = InputXGradient(FunctionModel(lambda x: x.sum((1, 2, 3)))).attribute(x, 0)
    return replace(explanation, values=values.expand(len(x), 1, -1, -1))


def measured(
    metric: Metric, function: Any, x: Tensor = IMAGE, values: Tensor | None = None, **context: Any
) -> Measurement:
    model = FunctionModel(function)
    options = {"inputs": x, "model": model, "score": "explained"} | context
    return metric.measure(explained(model, x, values), **options)


def one_hot() -> Tensor:
    values = torch.zeros(8, 8, dtype=torch.float64)
    values[2, 5] = 1
    return values


# Closed forms.


def test_the_areas_of_one_pixel_that_matters_have_closed_forms() -> None:
    full, blurred = 3.0, 1.5
    x = torch.zeros(1, 1, 8, 8, dtype=torch.float64)
    x[..., 2, 5] = full
    deletion, insertion = (measured(metric, one_pixel, x, one_hot()) for metric in (Deletion(steps=64), Insertion()))
    assert deletion.values.tolist() == pytest.approx([full / 128])
    assert deletion.curve is not None
    assert deletion.curve[0].tolist() == [full] + 64 * [0]
    weights = torch.exp(-0.5 * (torch.arange(-5, 6, dtype=torch.float64) / 5).square())
    blurred = float(full * (weights[5] / weights.sum()) ** 2)
    assert insertion.values.tolist() == pytest.approx([full - (full - blurred) / 128])


def test_a_curve_until_half_of_the_pixels_is_the_first_half_of_the_curve() -> None:
    for cls in (Deletion, Insertion):
        whole, half = (measured(cls(steps=steps, until=until), curved) for steps, until in ((8, 1), (4, 0.5)))
        assert whole.curve is not None
        assert half.curve is not None
        assert half.at is not None
        assert torch.equal(half.curve, whole.curve[:, :5])
        assert half.at.tolist() == [0, 0.125, 0.25, 0.375, 0.5]
        assert float(half.values) == pytest.approx(float(torch.trapezoid(half.curve[0], dx=1 / 4)))
    with pytest.raises(MethodError, match="until=0"):
        Deletion(until=0)


def test_a_constant_map_is_as_good_as_a_random_order() -> None:
    for metric in (Deletion(steps=64), Deletion(order="lerf", steps=64), ROAD()):
        controls = measured(metric, linear).controls
        assert controls["random"].low < controls["constant"].values < controls["random"].high


def test_the_areas_of_a_linear_model_follow_from_its_contributions() -> None:
    parts = CONTRIBUTIONS.flatten().sort(descending=True).values
    curve = torch.cat([parts.sum()[None], parts.sum() - parts.cumsum(0)])
    most, least = (measured(Deletion(order=order), linear).values[0] for order in ("morf", "lerf"))
    assert most == pytest.approx(float(torch.trapezoid(curve, dx=1 / 64)))
    assert measured(ABPC(), linear).values[0] == pytest.approx(float(least - most))


def test_least_relevant_first_is_most_relevant_first_of_the_negative_map() -> None:
    values = random(8, 8, seed=3)
    for cls in (Deletion, ROAD):
        first, second = (
            measured(cls(order="morf"), curved, values=-values),
            measured(cls(order="lerf"), curved, values=values),
        )
        assert torch.equal(first.values, second.values)
        assert (first.higher_is_better, second.higher_is_better) == (False, True)


def test_combined_road_is_the_difference_of_both_orders() -> None:
    values = random(8, 8, seed=3)
    least, most = (measured(ROAD(order=order), curved, values=values) for order in ("lerf", "morf"))
    both = measured(CombinedROAD(), curved, values=values)
    assert torch.allclose(both.values, least.values - most.values)
    assert torch.allclose(measured(CombinedROAD(), curved, values=-values).values, -both.values)


def test_the_fitted_factor_of_infidelity_is_not_negative() -> None:
    right, zero, wrong = (measured(Infidelity(), linear, values=sign * CONTRIBUTIONS).values for sign in (1, 0, -1))
    assert right < 1e-20 < zero
    assert torch.equal(wrong, zero)


def test_aopc_of_a_linear_model_is_that_of_the_mean_noise() -> None:
    middle = IMAGE.flatten(2).aminmax(dim=2)
    fall = (WEIGHT * (IMAGE[0] - ((middle.min + middle.max) / 2)[0, :, None, None])).sum(0)
    patches = fall.view(4, 2, 4, 2).sum((1, 3)).flatten()
    order = CONTRIBUTIONS.view(4, 2, 4, 2).sum((1, 3)).flatten().argsort(descending=True)
    result = measured(AOPC(patch=2, steps=5, draws=50), linear)
    assert result.error is not None
    assert abs(result.values - patches[order[:5]].cumsum(0).sum() / 6) < 4 * result.error
    plain = measured(AOPC(patch=2), linear, torch.ones_like(IMAGE))
    assert plain.values.tolist() == [0]


def test_irof_with_one_segment_does_not_depend_on_the_map() -> None:
    result = measured(IROF(segments=(1, 1)), linear)
    share = linear(IMAGE.mean((2, 3), keepdim=True).expand_as(IMAGE)) / linear(IMAGE)
    assert torch.allclose(result.values, (1 - share) / 2)
    assert all(torch.allclose(control.values, result.values) for control in result.controls.values())


def test_contributions_of_a_linear_model_have_correlation_1() -> None:
    model, mean = FunctionModel(linear), IMAGE.mean((2, 3), keepdim=True)
    fills: list[tuple[float | str, float | Tensor]] = [(0.0, 0.0), (0.5, 0.5), ("mean", mean)]
    for fill, background in fills:
        values = (WEIGHT * (IMAGE - background)).sum(1)[0]
        metrics = [
            FaithfulnessCorrelation(segments=(4, 4), passes=20, fill=fill),
            SensitivityN(segments=(4, 4), sizes=3, passes=10, fill=fill),
        ]
        explanation = explained(model, IMAGE, values)
        for result in measure(metrics, explanation, model=model, inputs=IMAGE, score="explained"):
            assert result.values.tolist() == pytest.approx([1])
            assert result.curve is None or result.curve.flatten().tolist() == pytest.approx([1] * 3)


def test_the_score_drops_to_what_the_map_shows() -> None:
    def with_harm(x: Tensor) -> Tensor:
        return 2 + one_pixel(x) - x[:, 0, 0, 0]

    x = torch.ones_like(IMAGE)
    for values, drop, increase in ((one_hot(), 0, 1), (-one_hot(), 0.5, 0), (torch.ones(8, 8), 0, 0)):
        shown = with_harm(x * (values - values.min()) if values.std() else x)
        assert measured(AverageDrop(), with_harm, x, values).values.tolist() == [max(0, 1 - float(shown) / 2)] == [drop]
        assert measured(Increase(), with_harm, x, values).values.tolist() == [increase]


def changed_pixels(x: Tensor) -> Tensor:
    return (x != IMAGE).any(1).double().sum((1, 2))


def test_the_noise_of_road_is_a_share_of_the_range_of_the_image() -> None:
    x = torch.rand(1, 3, 40, 40, dtype=torch.float64)
    order = torch.arange(1600).view(40, 40)
    clean, noisy = (removed(x, order, (1.0,), noise, seed=0) for noise in (0.0, 0.05))
    deviation = float((noisy - clean).std() / (x.max() - x.min()))
    assert deviation == pytest.approx(0.05, rel=0.05)
    torch.testing.assert_close(removed(7 * x, order, (1.0,), 0.05, seed=0), 7 * noisy)


def test_road_removes_exactly_the_share_of_pixels_also_with_ties() -> None:
    for values in (random(8, 8), torch.ones(8, 8), one_hot()):
        result = measured(ROAD(shares=(0.1, 0.25, 0.4, 0.9)), changed_pixels, values=values)
        assert result.curve is not None
        assert result.curve.tolist() == [[6, 16, 26, 58]]
        assert result.values.tolist() == [26.5]


@pytest.mark.parametrize("size", [(1, 1), (3, 3), (9, 14), (40, 33)], ids=str)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_road_solves_the_linear_equations_of_each_mask(size: tuple[int, int], share: float) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    linalg = pytest.importorskip("scipy.sparse.linalg")
    x, scattered = random(1, 2, *size), random(*size, seed=1) < 2 * share - 1
    masks = torch.stack([scattered, torch.arange(size[0] * size[1]).view(size) < int(share * size[0] * size[1])])
    for mask, result in zip(masks, imputed(x, masks[:, None]), strict=True):
        near = {
            offset: 1 / 12 if all(offset) else 1 / 6
            for offset in ((i, j) for i in (-1, 0, 1) for j in (-1, 0, 1))
            if any(offset)
        }
        missing = [tuple(at) for at in mask.nonzero().tolist()]
        matrix, right = (
            sparse.lil_matrix((len(missing), len(missing))),
            torch.zeros(len(missing), 2, dtype=torch.float64),
        )
        for row, (top, left) in enumerate(missing):
            for (down, across), weight in near.items():
                at = (top + down, left + across)
                if 0 <= at[0] < size[0] and 0 <= at[1] < size[1]:
                    matrix[row, row] += weight
                    if mask[at]:
                        matrix[row, missing.index(at)] -= weight
                    else:
                        right[row] += weight * x[0, :, at[0], at[1]]
        assert torch.equal(result[:, ~mask], x[0][:, ~mask])
        if missing and not mask.all():
            expected = torch.from_numpy(linalg.spsolve(matrix.tocsr(), right.numpy())).view(-1, 2).T
            assert torch.allclose(result[:, mask], expected, atol=2e-3)


def test_pixels_without_a_known_one_become_0() -> None:
    assert not imputed(IMAGE, torch.ones(1, 1, 8, 8, dtype=torch.bool)).any()


def test_road_leaves_a_region_of_zeros_at_zero() -> None:
    image, missing = torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 8, 8, dtype=torch.bool)
    image[..., 7, 7], missing[..., :4, :4] = 1, True  # the only light is far from all missing pixels
    assert torch.equal(imputed(image, missing), image)


# Relations of all metrics of perturbed images.


@pytest.mark.parametrize(
    "metric", [Infidelity(passes=20), SensitivityN(segments=(4, 4), sizes=1, passes=20)], ids=["square", "feature"]
)
def test_scores_of_hidden_windows_are_the_same_by_whole_forwards(
    metric: Metric, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double().eval()
    x, rows = random(1, 3, 24, 24), list[int]()
    net.register_forward_hook(lambda net, args, output: rows.append(len(output)))
    explanation = explained(net, x)
    local = metric.measure(explanation, model=net, inputs=x)
    assert sum(rows) < 16
    rows.clear()
    monkeypatch.setattr(passes, "MIN_WINDOWS", 10**9)
    same(local, metric.measure(explanation, model=net, inputs=x))
    assert sum(rows) > 16


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return FunctionModel(curved)


@pytest.fixture(scope="module")
def x() -> Tensor:
    return random(3, 3, 8, 8, seed=5)


def same(first: Measurement, second: Measurement, rows: slice = slice(None)) -> None:
    pairs = [(first.values, second.values), (first.error, second.error), (first.curve, second.curve)]
    pairs += [(control.values, second.controls[name].values) for name, control in first.controls.items()]
    for one, other in pairs:
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.allclose(one[rows], other, atol=1e-5, equal_nan=True)


# test_all_metrics.py compares the values of every metric.
@pytest.mark.parametrize("name", [case(name, by_default=name in ("deletion", "infidelity")) for name in SHARED])
def test_a_batch_is_its_images_in_chunks_of_any_size(name: str, model: nn.Module, x: Tensor) -> None:
    explanation, metric = explained(model, x), quick(name)
    together = metric.measure(explanation, model=model, inputs=x, chunk=3)
    for index in range(len(x)):
        alone = metric.measure(explanation[index], model=model, inputs=x[index : index + 1], chunk=1)
        same(together, alone, slice(index, index + 1))


@pytest.mark.parametrize("name", [case(name, by_default=name != "combined_road") for name in SHARED])
def test_a_seed_fixes_the_result_and_the_model_stays_as_it_is(name: str, model: nn.Module, x: Tensor) -> None:
    explanation, metric = explained(model, x), quick(name)
    before = Snapshot(model=model, x=x, values=explanation.values)
    first, second, other = (metric.measure(explanation, model=model, inputs=x, seed=seed) for seed in (1, 1, 2))
    same(first, second)
    assert torch.equal(first.values, other.values) == (name not in (*SAMPLED, *NOISY))
    assert not before.changes()


@pytest.mark.parametrize("name", BY_RANK)
def test_metrics_of_the_order_are_the_same_for_a_monotone_function_of_the_map(name: str, model: nn.Module) -> None:
    values = random(8, 8, seed=6)
    first, second = (measured(quick(name), curved, values=own) for own in (values, values.exp()))
    same(first, second)


@pytest.mark.parametrize("name", [name for name in SHARED if name not in (*SAMPLED, *NOISY)])
def test_flipping_the_image_and_the_map_changes_nothing(name: str) -> None:
    values = random(8, 8, seed=7)
    first = measured(quick(name), curved, IMAGE, values)
    second = measured(quick(name), curved, IMAGE.flip(3), values.flip(1))
    assert torch.allclose(first.values, second.values)


@pytest.mark.parametrize("name", SHARED)
def test_a_negated_map_is_rated_worse_than_the_map(name: str) -> None:
    x, weight, metric = IMAGE.abs() / 9, random(8, 8, seed=4).abs() / 9, quick(name)
    x[..., 1:3, 1:3], x[..., 5:7, 5:7] = 5, 3
    weight[1:3, 1:3], weight[5:7, 5:7] = 1, -1

    def score(x: Tensor) -> Tensor:
        return (x * weight).sum((1, 2, 3))

    right, wrong = (measured(metric, score, x, sign * (x * weight).sum(1)[0]).values for sign in (1, -1))
    assert (right > wrong) if metric.higher_is_better else (right < wrong)


CALIBRATED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "infidelity": ({"passes": 200}, {"passes": 20_000}),
    "faithfulness_correlation": ({"segments": (8, 8), "passes": 200}, {"passes": 20_000}),
    "sensitivity_n": ({"segments": (8, 8), "sizes": 3, "passes": 100}, {"passes": 8000}),
    "aopc": ({"patch": 2, "steps": 3}, {"draws": 1500}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
def test_the_interval_of_two_errors_covers_the_value_of_many_samples(name: str) -> None:
    inner, outer = random(12, 192, seed=8) / 6, random(12, seed=9)
    model = FunctionModel(lambda x: torch.tanh(x.flatten(1) @ inner.T) @ outer)
    explanation = explained(model, IMAGE)
    few, many = CALIBRATED[name]

    def sample(seed: int, **more: Any) -> Measurement:
        metric = METRICS[name](**few | more)
        options: dict[str, Any] = {"score": "explained", "chunk": 256, "controls": False}
        return metric.measure(explanation, model=model, inputs=IMAGE, seed=seed, **options)

    truth = sample(-1, **many).values
    results = [sample(seed) for seed in range(100)]
    errors = [result.error for result in results if result.error is not None]
    hits = [abs(float(a.values - truth)) < 1.96 * float(b) for a, b in zip(results, errors, strict=True)]
    assert 0.9 <= sum(hits) / 100 <= 0.99


@pytest.mark.parametrize(
    ("cls", "options", "words"),
    [
        (Deletion, {"steps": 0}, "not a whole number of at least 1"),
        (Deletion, {"fill": "grey"}, "grey"),
        (Deletion, {"order": "mrof"}, 'did you mean "morf"'),
        (ROAD, {"shares": ()}, "expected a list of numbers"),
        (ROAD, {"shares": (0.5, 1.5)}, "above 0 and of at most 1"),
        (Infidelity, {"side": 2}, "of at most 1"),
        (Infidelity, {"passes": 1}, "of at least 2"),
        (SensitivityN, {"segments": "all"}, "segments='all' is invalid"),
        (FaithfulnessCorrelation, {"share": 1}, "below 1"),
    ],
)
def test_bad_options_are_errors(cls: type[Metric], options: dict[str, Any], words: str) -> None:
    with pytest.raises(MethodError, match=words):
        cls(**options)


def test_one_image_of_a_method_with_options_for_each_image_is_measured() -> None:
    method = IntegratedGradients(tiny_model(), steps=2, baseline=PerImage([0.0, 1.0]))
    x = images(2)
    explanation = method.attribute(x, [0, 1])
    both = measure("deletion", explanation, method=method, inputs=x)[0]
    one = measure("deletion", explanation[1], method=method, inputs=x[1:])[0]
    torch.testing.assert_close(one.values, both.values[1:])
