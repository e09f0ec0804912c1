"""Metrics of complexity have their closed forms, and defined answers for zero maps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from saliency.metrics import measure
from tests.evaluation.maps import explanation_of

NAMES = ["gini", "entropy"]
PIXELS = 12 * 15


def values(maps: Tensor) -> list[list[float]]:
    return [each.values.tolist() for each in measure(NAMES, explanation_of(maps))]


@pytest.mark.parametrize(
    ("maps", "expected"),
    [
        (torch.full((1, 12, 15), 0.3), [0, math.log(PIXELS)]),
        (torch.full((1, 12, 15), -0.3), [0, math.log(PIXELS)]),
        (torch.zeros(1, 12, 15), [0, math.log(PIXELS)]),
        (torch.eye(PIXELS)[7].view(1, 12, 15), [(PIXELS - 1) / PIXELS, 0]),
        (-torch.eye(PIXELS)[7].view(1, 12, 15), [(PIXELS - 1) / PIXELS, 0]),
    ],
    ids=["uniform", "negative", "zero", "one pixel", "one negative pixel"],
)
def test_closed_forms(maps: Tensor, expected: list[float]) -> None:
    assert [value for (value,) in values(maps)] == pytest.approx(expected, abs=1e-12)


def test_gini_is_the_mean_difference_of_all_pairs() -> None:
    maps = torch.randn(1, 12, 15, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    magnitudes = maps.abs().flatten()
    expected = (magnitudes[:, None] - magnitudes).abs().mean() / (2 * magnitudes.mean())
    assert measure("gini", explanation_of(maps))[0].values.item() == pytest.approx(float(expected))


def test_scale_sign_places_and_batches_do_not_matter() -> None:
    maps = torch.randn(2, 12, 15, generator=torch.Generator().manual_seed(0))
    expected = values(maps)
    for same in (-maps, 7 * maps, maps.flip(1), maps.mT):
        for own, other in zip(values(same), expected, strict=True):
            assert own == pytest.approx(other)
    assert [first + second for first, second in zip(values(maps[:1]), values(maps[1:]), strict=True)] == expected


def test_random_controls_of_pixels_have_the_complexity_of_the_map_and_no_direction_is_better() -> None:
    maps = torch.randn(1, 12, 15, generator=torch.Generator().manual_seed(0))
    for result in measure(NAMES, explanation_of(maps)):
        assert torch.allclose(result.controls["random"].values, result.values)
        assert result.higher_is_better is None
        assert not result.beats_controls.any()


def test_entropy_is_that_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    maps = torch.randn(3, 12, 15, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = stats.entropy(maps.abs().flatten(1).numpy(), axis=1)
    assert measure("entropy", explanation_of(maps))[0].values.tolist() == pytest.approx(expected.tolist(), abs=1e-12)
