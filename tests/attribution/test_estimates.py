"""Running moments compared with those of all samples at once, and standard errors with observed errors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from saliency import METHODS
from saliency.attribution.base import Attribution
from saliency.attribution.estimates import Estimate, rank_correlation
from saliency.attribution.passes import SampledAttribution
from saliency.testing import images, tiny_model_for


def spearman(first: Any, second: Any) -> float:
    """The rank correlation of SciPy, whose import takes a second."""
    from scipy.stats import spearmanr

    return float(spearmanr(first, second).statistic)


def samples(count: int, seed: int = 0, *, offset: float = 0.0) -> torch.Tensor:
    return torch.randn(count, 2, 5, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + offset


def filled(rows: torch.Tensor, chunk: int) -> Estimate:
    estimate = Estimate()
    for start in range(0, len(rows), chunk):
        estimate.add(rows[start : start + chunk])
    return estimate


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 40])
def test_moments_in_chunks_are_those_of_all_samples_at_once(chunk: int) -> None:
    rows = samples(40, offset=1e3)
    estimate = filled(rows, chunk)
    torch.testing.assert_close(estimate.mean, rows.mean(0), rtol=1e-13, atol=0)
    torch.testing.assert_close(estimate.variance, rows.var(0), rtol=1e-8, atol=0)
    assert estimate.error is not None
    torch.testing.assert_close(estimate.error, rows.var(0).sqrt() / math.sqrt(40), rtol=1e-8, atol=0)


@pytest.mark.parametrize("chunk", [1, 3, 40])
def test_the_halves_are_every_other_sample(chunk: int) -> None:
    rows = samples(41)
    expected = spearman(rows[::2].mean(0).sum(0).flatten(), rows[1::2].mean(0).sum(0).flatten())
    assert filled(rows, chunk).agreement == pytest.approx(expected, abs=1e-12)


def test_float32_samples_are_added_up_in_float64() -> None:
    estimate = filled(torch.full((3000, 1, 1, 1), 0.1, dtype=torch.float32), 7)
    assert estimate.mean.dtype is torch.float64
    assert float(estimate.mean) == pytest.approx(float(torch.tensor(0.1)), abs=1e-8)


def test_one_sample_says_nothing_of_its_error() -> None:
    estimate = filled(samples(1), 1)
    assert estimate.error is None
    assert estimate.agreement is None
    assert estimate.relative_error == math.inf
    with pytest.raises(ValueError, match="no sample"):
        Estimate().mean  # noqa: B018


def test_an_empty_chunk_changes_nothing() -> None:
    estimate = filled(samples(5), 2)
    before = estimate.mean.clone()
    estimate.add(samples(5)[:0])
    assert torch.equal(estimate.mean, before)
    assert estimate.count == 5


def test_the_interval_covers_the_truth_as_often_as_it_claims() -> None:
    covered = []
    for seed in range(200):
        estimate = filled(samples(60, seed, offset=0.3), 16)
        assert estimate.error is not None
        covered.append((estimate.mean - 0.3).abs() < 1.96 * estimate.error)
    share = float(torch.stack(covered).double().mean())
    assert 0.93 < share < 0.96


@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_rank_correlation_is_spearmans_with_ties(levels: int) -> None:
    draw = np.random.default_rng(1)
    first, second = (draw.integers(0, levels, (6, 7)).astype(float) for _ in range(2))
    found = rank_correlation(torch.tensor(first), torch.tensor(second))
    assert found == pytest.approx(spearman(first.ravel(), second.ravel()), abs=1e-12)


@pytest.mark.parametrize("noise", [1e-13, 1e-8])
def test_rounding_ranks_nothing(noise: float) -> None:
    draw = np.random.default_rng(1)
    first, second = (torch.tensor(draw.integers(-3, 4, (40, 30)) / 6) for _ in range(2))
    rounded = (maps + noise * torch.tensor(draw.standard_normal((40, 30))) for maps in (first, second))
    assert rank_correlation(*rounded) == rank_correlation(first, second)


def test_continuous_maps_keep_their_ranks() -> None:
    first, second = (torch.tensor(np.random.default_rng(seed).standard_normal((224, 224))) for seed in range(2))
    second += first / 4
    found = rank_correlation(first, second)
    assert found == pytest.approx(spearman(first.flatten(), second.flatten()), abs=1e-6)


@pytest.mark.filterwarnings("ignore:kernel_shap. 12 passes do not determine")
@pytest.mark.parametrize("method", [cls for cls in METHODS.values() if issubclass(cls, SampledAttribution)])
def test_the_agreement_of_few_passes_does_not_depend_on_the_chunks(method: type[Attribution]) -> None:
    model, x = tiny_model_for(method)().double(), images(2, (32, 32), dtype=torch.float64)
    options = {**method.preview_options, "passes": 12}
    found = [method(model, chunk=chunk, **options).attribute(x, [0, 1]).agreement for chunk in (1, 5)]
    first, second = (agreement if agreement is None else agreement.tolist() for agreement in found)
    assert first == pytest.approx(second, abs=1e-9)


def test_constant_maps_agree() -> None:
    assert rank_correlation(torch.zeros(1, 4, 4), torch.zeros(1, 4, 4)) == 1.0


@pytest.mark.parametrize(
    ("mean", "error", "expected"), [(0, 0, 0), (0, 1, math.inf), (1, None, math.inf), (4, 1, 0.25), (-4, 1, 0.25)]
)
def test_the_relative_error_of_nothing_is_zero_and_of_an_unknown_one_infinite(
    mean: float, error: float | None, expected: float
) -> None:
    class Known(Estimate):
        @property
        def mean(self) -> torch.Tensor:
            return torch.full((3, 3), float(mean))

        @property
        def error(self) -> torch.Tensor | None:
            return None if error is None else torch.full((3, 3), float(error))

    assert Known().relative_error == pytest.approx(expected)
