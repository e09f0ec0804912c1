"""Metrics of agreement are 1 for equal maps, have their closed forms, and agree with scipy and scikit-image."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from saliency.errors import MethodError
from saliency.evaluation.metrics.map_metrics import AgreementMetric, ssim
from saliency.metrics import METRICS, measure
from tests.evaluation.maps import explanation_of

NAMES = [name for name, metric in METRICS.items() if issubclass(metric, AgreementMetric)]


@pytest.fixture(scope="module")
def maps() -> Tensor:
    return torch.randn(3, 30, 24, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def others(maps: Tensor) -> Tensor:
    return maps + torch.randn(3, 30, 24, generator=torch.Generator().manual_seed(1))


def values(name: str, maps: Tensor, reference: Tensor) -> Tensor:
    return measure(name, explanation_of(maps), reference=explanation_of(reference))[0].values


@pytest.mark.parametrize("name", NAMES)
def test_the_same_map_agrees_fully_and_random_controls_do_not(name: str, maps: Tensor) -> None:
    for given in (maps, torch.zeros_like(maps), torch.full_like(maps, -0.3)):
        assert values(name, given, given).tolist() == pytest.approx([1, 1, 1])
    (result,) = measure(name, explanation_of(maps), reference=explanation_of(maps))
    assert result.controls["random"].values.abs().max() < 0.15
    assert result.beats_controls.all()


@pytest.mark.parametrize("name", NAMES)
def test_both_maps_may_be_exchanged_and_scaled(name: str, maps: Tensor, others: Tensor) -> None:
    expected = values(name, maps, others)
    assert torch.allclose(values(name, others, maps), expected)
    assert torch.allclose(values(name, 4 * maps, others / 8), expected)
    assert (expected < 0.9).all()


@pytest.mark.parametrize("name", NAMES)
def test_flips_and_batches_commute(name: str, maps: Tensor, others: Tensor) -> None:
    expected = values(name, maps, others)
    assert torch.allclose(values(name, maps.flip(2), others.flip(2)), expected)
    assert torch.allclose(values(name, maps.mT, others.mT), expected)
    alone = [values(name, maps[i : i + 1], others[i : i + 1]) for i in range(3)]
    assert torch.allclose(torch.cat(alone), expected)


def test_a_monotone_transform_leaves_the_rank_correlation_alone(maps: Tensor, others: Tensor) -> None:
    expected = values("rank_correlation", maps, others)
    assert torch.allclose(values("rank_correlation", maps.double().exp(), others**3), expected)
    assert torch.allclose(values("rank_correlation", -maps, others), -expected)


@pytest.mark.slow
def test_rank_correlation_is_that_of_scipy_also_with_ties(maps: Tensor, others: Tensor) -> None:
    stats = pytest.importorskip("scipy.stats")
    for first, second in ((maps, others), (maps.round(), others.round())):
        pairs = zip(first.flatten(1), second.flatten(1), strict=True)
        expected = [stats.spearmanr(own, other).statistic for own, other in pairs]
        assert values("rank_correlation", first, second).tolist() == pytest.approx(expected, abs=1e-12)
    assert values("rank_correlation", torch.ones_like(maps), maps).tolist() == [0, 0, 0]


def test_ssim_is_that_of_scikit_image(maps: Tensor, others: Tensor) -> None:
    metrics = pytest.importorskip("skimage.metrics")
    options = {"data_range": 2, "gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
    for first, second in ((maps.double(), others.double()), (maps.double().abs(), others.double().abs().square())):
        scaled = [(each / each.abs().amax((1, 2), keepdim=True)).numpy() for each in (first, second)]
        expected = [metrics.structural_similarity(*pair, **options) for pair in zip(*scaled, strict=True)]
        assert values("ssim", first, second).tolist() == pytest.approx(expected, abs=1e-12)
        assert ssim(first, second).tolist() == pytest.approx(expected, abs=1e-12)


def test_the_opposite_of_a_map_without_local_means_is_negatively_similar() -> None:
    board = (-1.0) ** (torch.arange(32)[:, None] + torch.arange(32))
    assert ssim(board, -board).item() == pytest.approx(-1, abs=0.01)


def test_maps_of_other_sizes_are_compared_at_the_size_of_the_input(maps: Tensor) -> None:
    cells = torch.rand(3, 6, 8, generator=torch.Generator().manual_seed(2))
    coarse = replace(explanation_of(cells), input_size=(30, 24))
    for result in measure(NAMES, coarse, reference=coarse):
        assert result.values.tolist() == pytest.approx([1, 1, 1]), result.metric


def test_errors_name_what_is_missing(maps: Tensor) -> None:
    with pytest.raises(MethodError, match=r"pass the other one as reference=\.\.\."):
        measure("ssim", explanation_of(maps))
    with pytest.raises(MethodError, match="at least 11 x 11 pixels; got 8 x 24"):
        measure("ssim", explanation_of(maps[:, :8]), reference=explanation_of(maps[:, :8]))
