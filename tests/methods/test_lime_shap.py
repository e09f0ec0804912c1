"""LIME: against scikit-learn on its own design, against closed forms, and within the errors that it claims.

Shapley values: against their definition, against captum, and within the errors that they claim.
"""

from __future__ import annotations

import re
import warnings
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from saliency.errors import MethodError, SaliencyWarning
from saliency.methods.lime_shap import LIME, KernelSHAP, ShapleySampling
from saliency.testing import tiny_model
from tests.games import SIZE, Game, Linear, coverage, interplay, noise, per_cell, picture, shapley_values

ONES = torch.ones(1, 3, *SIZE, dtype=torch.float64)


@pytest.mark.parametrize("passes", [30, 200])
def test_a_linear_model_has_weight_times_input_without_error(passes: int) -> None:
    model, x = Linear(), picture(2)
    found = LIME(model, segments=(4, 5), fill=0.2, passes=passes).attribute(x, 0)
    effect = ((x - 0.2) * model.weight).sum(1, keepdim=True).detach()
    for i in range(2):
        torch.testing.assert_close(per_cell(found.values[i : i + 1], (4, 5)), per_cell(effect[i : i + 1], (4, 5)))
    assert found.error is not None
    assert float(found.error.max()) < 1e-11
    assert "explains 100%" in found.run_stats[0].note


@pytest.mark.parametrize(("penalty", "width"), [(0.0, 0.25), (1.0, 0.25), (1.0, 0.4)])
def test_the_coefficients_are_those_of_a_weighted_regression_near_the_picture(penalty: float, width: float) -> None:
    seen: list[Tensor] = []
    model = Game(interplay(10), (2, 5))
    handle = model.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    # One by one: larger chunks are compared with single passes, which the hook would see as well.
    found = LIME(model, segments=(2, 5), passes=120, penalty=penalty, width=width, chunk=1).attribute(ONES, 0)
    handle.remove()
    shown = torch.nn.functional.adaptive_avg_pool2d(torch.cat(seen)[:, 0], (2, 5)).flatten(1)  # the picture first
    with torch.no_grad():
        scores = model.value(shown)
    ones = torch.ones(10, dtype=torch.float64)
    similar = [float(torch.cosine_similarity(each, ones, 0)) for each in shown]
    weights = np.exp(-((1 - np.array(similar)) ** 2) / (2 * width**2))
    peer = pytest.importorskip("sklearn.linear_model")
    oracle = peer.Ridge(alpha=max(penalty, 1e-10), solver="svd").fit(shown.numpy(), scores.numpy(), weights)
    torch.testing.assert_close(per_cell(found.values, (2, 5)), torch.from_numpy(oracle.coef_), rtol=1e-6, atol=1e-8)
    left = 1 - oracle.score(shown.numpy(), scores.numpy(), weights)
    assert f"explains {1 - left * (121 - 1) / (121 - 11):.0%}" in found.run_stats[0].note
    assert 0.4 < float(shown[1:].mean()) < 0.6


@pytest.mark.slow
def test_the_intervals_hold_a_long_run_as_often_as_they_claim() -> None:
    model, x = Game(interplay(8), (2, 4)), torch.ones(1, 3, 4, 8, dtype=torch.float64)
    long = LIME(model, segments=(2, 4), passes=10_000, chunk=5000, seed=10**6).attribute(x, 0)
    truth = per_cell(long.values, (2, 4))
    runs = [LIME(model, segments=(2, 4), passes=200, chunk=200, seed=seed).attribute(x, 0) for seed in range(60)]
    values = torch.stack([per_cell(run.values, (2, 4)) for run in runs])
    errors = torch.stack([per_cell(run.error, (2, 4)) for run in runs if run.error is not None])
    assert 0.91 <= coverage(values, errors, truth) <= 0.98


@pytest.mark.parametrize("passes", [1, 3, 10, 11, 12])
def test_few_passes_give_values_and_a_warning_until_there_are_more_than_unknowns(passes: int) -> None:
    few = passes + 1 <= 11
    with pytest.warns(SaliencyWarning, match="10 segments; allow for at least 11") if few else nullcontext():
        found = LIME(Linear(), segments=(2, 5), passes=passes).attribute(picture(), 0)
    assert torch.isfinite(found.values).all()
    assert (found.error is None) == few
    assert ("explains" in found.run_stats[0].note) != few


def test_the_explained_variance_does_not_grow_with_fewer_samples() -> None:
    def explained(passes: int, seed: int = 0) -> float:
        model, x = Game(interplay(8), (2, 4)), torch.ones(1, 3, 4, 8, dtype=torch.float64)
        note = LIME(model, segments=(2, 4), passes=passes, chunk=passes, seed=seed).attribute(x, 0).run_stats[0].note
        return float(re.search(r"explains (-?\d+)%", note)[1]) / 100  # type: ignore[index] # no match is a failure

    expected = explained(5000)
    assert 0.1 < expected < 0.5
    # The mean of 60 seeds has a standard error of 0.04; unadjusted, it is 0.64.
    assert sum(explained(18, seed) for seed in range(60)) / 60 == pytest.approx(expected, abs=0.25)


@pytest.mark.slow
def test_a_tolerance_ends_the_work_at_the_same_pass_whatever_the_chunk() -> None:
    model = Game(interplay(10), (2, 5))
    found = [LIME(model, segments=(2, 5), tolerance=0.1, chunk=chunk).attribute(ONES, 0) for chunk in (1, 7, 16)]
    assert {each.run_stats[0].stopped for each in found} == {"tolerance"}
    assert len({each.run_stats[0].passes for each in found}) == 1


@pytest.mark.parametrize(
    "options",
    [{"width": 0}, {"width": float("inf")}, {"penalty": -1}, {"penalty": "l2"}, {"segments": 0}, {"passes": 0}],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(MethodError):
        LIME(Linear(), **options)


METHODS = (KernelSHAP, ShapleySampling)


@pytest.mark.parametrize("method", METHODS)
def test_in_an_and_of_two_each_has_half(method: Any) -> None:
    model = Game(lambda shown: shown[:, 0] * shown[:, 1], (1, 2))
    found = method(model, segments=(1, 2)).attribute(ONES, 0)
    torch.testing.assert_close(per_cell(found.values, (1, 2)), torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert not found.error.any()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fill", [0.0, (0.4, 1.0, -1.0)])
def test_a_linear_model_has_weight_times_input_without_error_by_shapley(method: Any, fill: Any) -> None:
    model, x = Linear(), picture(2)
    found = method(model, segments=(4, 5), fill=fill, passes=1 + 2 * 19 * 2).attribute(x, 0)
    baseline = torch.tensor(fill, dtype=torch.float64).view(1, -1, 1, 1)
    effect = ((x - baseline) * model.weight).sum(1, keepdim=True).detach()
    for i in range(2):
        torch.testing.assert_close(per_cell(found.values[i : i + 1], (4, 5)), per_cell(effect[i : i + 1], (4, 5)))
    assert float(found.error.max()) < 1e-12
    assert float(found.residual.abs().max()) < 1e-12


@pytest.mark.parametrize("many", [1, 2, 3, 6])
def test_with_all_combinations_kernel_shap_is_the_definition(many: int) -> None:
    value = interplay(many)
    x = torch.ones(1, 3, 4, many, dtype=torch.float64)
    found = KernelSHAP(Game(value, (1, many)), segments=(1, many)).attribute(x, 0)
    torch.testing.assert_close(per_cell(found.values, (1, many)), shapley_values(value, many))
    assert found.run_stats[0].passes == 2**many - 1
    assert found.run_stats[0].stopped == "complete"
    assert "all combinations" in found.run_stats[0].note
    assert found.error is not None
    assert not found.error.any()


@pytest.mark.slow
def test_the_errors_of_kernel_shap_are_right_for_few_pairs_too() -> None:
    """19 pairs for 12 parts: the fit takes more than half of what the residuals were."""
    model, x = Game(interplay(12), (3, 4)), torch.ones(1, 3, 6, 8, dtype=torch.float64)
    runs = [KernelSHAP(model, segments=(3, 4), passes=39, chunk=39, seed=seed).attribute(x, 0) for seed in range(150)]
    values = torch.stack([per_cell(run.values, (3, 4)) for run in runs])
    errors = torch.stack([per_cell(run.error, (3, 4)) for run in runs if run.error is not None])
    assert float((errors.square().mean() / values.var(0).mean()).sqrt()) == pytest.approx(1, abs=0.08)


@pytest.mark.filterwarnings("ignore:.* do not determine")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("passes", [1, 2, 3, 7, 12, 13, 40, 101])
def test_however_many_passes_the_values_sum_to_what_the_picture_adds(method: Any, passes: int) -> None:
    model, x = tiny_model().double(), noise(2, 3, 16, 16)
    found = method(model, segments=(3, 4), passes=passes).attribute(x, [1, 2])
    with torch.no_grad():
        gap = (model(x) - model(torch.zeros_like(x)))[[0, 1], [1, 2]]
    torch.testing.assert_close(found.values.sum((1, 2, 3)), gap)
    assert float(found.residual.abs().max()) < 1e-9
    assert all(each.passes <= passes for each in found.run_stats)


def test_the_errors_shrink_with_the_root_of_the_passes() -> None:
    model = Game(interplay(10), (2, 5))
    for method in METHODS:
        few, many = (method(model, segments=(2, 5), passes=passes).attribute(ONES, 0) for passes in (217, 865))
        assert few.error is not None
        assert many.error is not None
        ratio = float(few.error.square().mean().sqrt() / many.error.square().mean().sqrt())
        assert 1.6 < ratio < 2.5  # four times the pairs: 2


@pytest.mark.parametrize(("method", "passes"), [(KernelSHAP, 221), (ShapleySampling, 1 + 20 * 14)])
@pytest.mark.slow
def test_the_intervals_hold_the_exact_values_as_often_as_they_claim(method: Any, passes: int) -> None:
    value = interplay(8)
    truth = shapley_values(value, 8)
    model = Game(value, (2, 4))
    options = {"segments": (2, 4), "chunk": passes, "passes": passes}
    x = torch.ones(1, 3, 4, 8, dtype=torch.float64)
    runs = [method(model, **options, seed=seed).attribute(x, 0) for seed in range(100)]
    values = torch.stack([per_cell(run.values, (2, 4)) for run in runs])
    errors = torch.stack([per_cell(run.error, (2, 4)) for run in runs])
    assert 0.91 <= coverage(values, errors, truth) <= 0.98
    for part in range(8):
        assert coverage(values[:, part], errors[:, part], truth[part]) >= 0.85
    # The mean over the seeds has no bias that shows.
    assert float(((values.mean(0) - truth) / (values.std(0) / 100**0.5)).abs().max()) < 4


def test_drawn_combinations_come_with_their_complements_and_in_proportion_to_the_kernel() -> None:
    seen: list[Tensor] = []
    model = Game(interplay(6), (1, 6))
    model.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0][:, 0, 0] > 0.5))
    x = torch.ones(1, 3, 2, 6, dtype=torch.float64)
    KernelSHAP(model, segments=(1, 6), passes=60, chunk=1).attribute(x, 0)
    shown = torch.cat(seen[2:])  # behind the picture as it is, and the pass with nothing
    assert torch.equal(shown[0:-1:2][:29], ~shown[1::2][:29])
    seen.clear()
    x = torch.ones(1, 3, 2, 12, dtype=torch.float64)
    model = Game(interplay(12), (1, 12))
    model.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0][:, 0, 0] > 0.5))
    KernelSHAP(model, segments=(1, 12), passes=4001, chunk=500).attribute(x, 0)
    sizes = torch.cat(seen[1:])[1:].sum(1).bincount(minlength=13)[1:12].double()
    wanted = torch.tensor([1 / (k * (12 - k)) for k in range(1, 12)], dtype=torch.float64)
    torch.testing.assert_close(sizes / sizes.sum(), wanted / wanted.sum(), rtol=0, atol=0.02)


@pytest.mark.slow
def test_captum_finds_the_same_by_other_draws() -> None:
    peer = pytest.importorskip("captum.attr")
    model, x = tiny_model().double(), noise(1, 3, 16, 16)
    labels = (torch.arange(16)[:, None] // 8 * 2 + torch.arange(16) // 8).repeat(1, 3, 1, 1)
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        kernel = peer.KernelShap(model).attribute(x, target=1, feature_mask=labels, n_samples=1000)
        sampled = peer.ShapleyValueSampling(model).attribute(x, target=1, feature_mask=labels, n_samples=100)
    for method, theirs in ((KernelSHAP, kernel), (ShapleySampling, sampled)):
        found = method(model, segments=(2, 2)).attribute(x, 1)
        expected = theirs[0, 0, ::8, ::8].flatten().double()
        torch.testing.assert_close(
            per_cell(found.values, (2, 2)), expected, rtol=0, atol=0.03 * float(expected.abs().max())
        )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_a_tolerance_ends_the_work_at_the_same_pass_whatever_the_chunk_by_shapley(method: Any) -> None:
    model = Game(interplay(12), (3, 4))
    x = torch.ones(1, 3, 9, 8, dtype=torch.float64)
    found = [method(model, segments=(3, 4), tolerance=0.05, chunk=chunk).attribute(x, 0) for chunk in (1, 5, 16)]
    assert {each.run_stats[0].stopped for each in found} == {"tolerance"}
    assert len({each.run_stats[0].passes for each in found}) == 1
    assert found[0].run_stats[0].passes < 3000
    torch.testing.assert_close(found[1].values, found[0].values)


@pytest.mark.parametrize(("method", "least"), [(KernelSHAP, 41), (ShapleySampling, 39)])
def test_passes_that_do_not_determine_the_values_are_said_to_be_too_few(method: Any, least: int) -> None:
    with pytest.warns(SaliencyWarning, match=f"20 segments; allow for at least {least}"):
        found = method(Linear(), segments=(4, 5), passes=least - 1).attribute(picture(), 0)
    assert "far too few" in found.run_stats[0].note
    enough = method(Linear(), segments=(4, 5), passes=least).attribute(picture(), 0)
    assert "far too few" not in enough.run_stats[0].note
    if method is KernelSHAP:
        assert found.error is None
        assert enough.error is not None
