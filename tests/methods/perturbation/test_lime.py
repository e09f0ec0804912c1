"""LIME: against scikit-learn on its own design, against closed forms, and within the errors that it claims."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from saliency.errors import MethodError, SaliencyWarning
from saliency.methods.perturbation.lime_shap import LIME
from tests.games import SIZE, Game, Linear, coverage, interplay, per_cell, picture

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
    assert "explains 100%" in found.effort[0].note


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
    assert f"explains {1 - left * (121 - 1) / (121 - 11):.0%}" in found.effort[0].note
    assert 0.4 < float(shown[1:].mean()) < 0.6


@pytest.mark.slow
def test_the_intervals_hold_a_long_run_as_often_as_they_claim() -> None:
    model, x = Game(interplay(8), (2, 4)), torch.ones(1, 3, 4, 8, dtype=torch.float64)
    long = LIME(model, segments=(2, 4), passes=20_000, chunk=5000, seed=10**6).attribute(x, 0)
    truth = per_cell(long.values, (2, 4))
    runs = [LIME(model, segments=(2, 4), passes=200, chunk=200, seed=seed).attribute(x, 0) for seed in range(100)]
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
    assert ("explains" in found.effort[0].note) != few


def test_the_explained_variance_does_not_grow_with_fewer_samples() -> None:
    def explained(passes: int, seed: int = 0) -> float:
        model, x = Game(interplay(8), (2, 4)), torch.ones(1, 3, 4, 8, dtype=torch.float64)
        note = LIME(model, segments=(2, 4), passes=passes, chunk=passes, seed=seed).attribute(x, 0).effort[0].note
        return float(re.search(r"explains (-?\d+)%", note)[1]) / 100  # type: ignore[index] # no match is a failure

    expected = explained(5000)
    assert 0.1 < expected < 0.5
    assert sum(explained(18, seed) for seed in range(60)) / 60 == pytest.approx(expected, abs=0.15)  # unadjusted: .64


@pytest.mark.slow
def test_a_tolerance_ends_the_work_at_the_same_pass_whatever_the_chunk() -> None:
    model = Game(interplay(10), (2, 5))
    found = [LIME(model, segments=(2, 5), tolerance=0.1, chunk=chunk).attribute(ONES, 0) for chunk in (1, 7, 16)]
    assert {each.effort[0].stopped for each in found} == {"tolerance"}
    assert len({each.effort[0].passes for each in found}) == 1


@pytest.mark.parametrize(
    "options",
    [{"width": 0}, {"width": float("inf")}, {"penalty": -1}, {"penalty": "l2"}, {"segments": 0}, {"passes": 0}],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(MethodError):
        LIME(Linear(), **options)
