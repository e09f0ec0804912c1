"""Metrics of localisation have their closed forms and defined answers for degenerate input."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from saliency.errors import MethodError
from saliency.evaluation.metrics.map_metrics import (
    IoU,
    LocalisationMetric,
    PointingGame,
)
from saliency.metrics import METRICS, measure
from tests.evaluation.maps import explanation_of

NAMES = [name for name, metric in METRICS.items() if issubclass(metric, LocalisationMetric)]
BY_RANK = ["pointing_game", "relevance_rank", "roc_auc"]


@pytest.fixture(scope="module")
def maps() -> Tensor:
    return torch.randn(3, 40, 50, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def masks() -> Tensor:
    """Rectangles of 8 x 10, a twenty-fifth of the area."""
    masks = torch.zeros(3, 40, 50, dtype=torch.bool)
    for mask, top, left in zip(masks, (0, 15, 32), (0, 20, 40), strict=True):
        mask[top : top + 8, left : left + 10] = True
    return masks


def values(name: str, maps: Tensor, masks: Tensor) -> Tensor:
    return METRICS[name]().measure(explanation_of(maps), masks=masks).values


@pytest.mark.parametrize("name", NAMES)
def test_the_mask_as_map_has_the_highest_value(name: str, masks: Tensor) -> None:
    assert torch.allclose(values(name, masks.float(), masks), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("fill", [0.3, 0.0, -0.3])
@pytest.mark.parametrize("name", NAMES)
def test_a_constant_map_has_the_share_of_the_area(name: str, fill: float, masks: Tensor) -> None:
    metric = PointingGame(tolerance=0) if name == "pointing_game" else METRICS[name]()
    result = metric.measure(explanation_of(torch.full(masks.shape, fill)), masks=masks)
    expected = torch.full((3,), 0.5 if name == "roc_auc" else 1 / 25, dtype=torch.float64)
    assert torch.allclose(result.values, expected)
    assert torch.allclose(result.controls["constant"].values, expected)
    assert not result.beats_controls.any()


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_mask_has_no_value_and_leaves_the_other_images_alone(name: str, maps: Tensor, masks: Tensor) -> None:
    emptied = masks.clone()
    emptied[1] = False
    result, whole = values(name, maps, emptied), values(name, maps, masks)
    assert result.isnan().tolist() == [False, True, False]
    assert torch.equal(result[[0, 2]], whole[[0, 2]])


@pytest.mark.parametrize("name", NAMES)
def test_a_mask_of_the_whole_image_is_always_hit(name: str, maps: Tensor) -> None:
    result = values(name, maps.abs() + 5, torch.ones(maps.shape, dtype=torch.bool))
    if name == "roc_auc":
        assert result.isnan().all()
    else:
        assert torch.allclose(result, torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("name", NAMES)
def test_a_constant_map_of_cells_is_constant_after_resizing(name: str, masks: Tensor) -> None:
    cells = replace(explanation_of(torch.full((3, 7, 7), 0.1)), input_size=(40, 50))
    pixels = explanation_of(torch.full((3, 40, 50), 0.1))
    first, second = (measure(name, each, masks=masks)[0].values for each in (cells, pixels))
    assert torch.allclose(first, second)


@pytest.mark.parametrize("name", BY_RANK)
def test_monotone_transforms_leave_rank_metrics_alone(name: str, maps: Tensor, masks: Tensor) -> None:
    expected = values(name, maps, masks)
    for transformed in (3 * maps + 7, maps.double().exp(), maps.double() ** 3 - 100):
        assert torch.equal(values(name, transformed, masks), expected)


def test_the_scale_and_the_negative_part_leave_the_energy_alone(maps: Tensor, masks: Tensor) -> None:
    expected = (maps.clamp(min=0) * masks).sum((1, 2)) / maps.clamp(min=0).sum((1, 2))
    for same in (maps, 5 * maps, torch.where(maps < 0, 9 * maps, maps)):
        assert torch.allclose(values("energy_pointing_game", same, masks).float(), expected)


@pytest.mark.parametrize("name", NAMES)
def test_flips_and_batches_commute(name: str, maps: Tensor, masks: Tensor) -> None:
    expected = values(name, maps, masks)
    assert torch.allclose(values(name, maps.flip(1), masks.flip(1)), expected)
    assert torch.allclose(values(name, maps.mT, masks.mT), expected)
    alone = [values(name, maps[i : i + 1], masks[i : i + 1]) for i in range(3)]
    assert torch.allclose(torch.cat(alone), expected)


@pytest.mark.slow
def test_roc_auc_is_that_of_scikit_learn_also_with_ties(maps: Tensor, masks: Tensor) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    for given in (maps, maps.round()):
        pairs = zip(masks.flatten(1), given.flatten(1), strict=True)
        expected = [metrics.roc_auc_score(mask, scores) for mask, scores in pairs]
        assert values("roc_auc", given, masks).tolist() == pytest.approx(expected, abs=1e-12)


def test_the_pointing_game_counts_hits_up_to_its_tolerance_and_ties_by_expectation() -> None:
    mask = torch.zeros(1, 40, 40, dtype=torch.bool)
    mask[0, 10, 10] = True
    for (row, column), hit in {(10, 25): 1, (10, 26): 0, (22, 19): 1, (22, 20): 0, (1, 22): 1, (0, 22): 0}.items():
        points = torch.zeros(1, 40, 40)
        points[0, row, column] = 1
        assert PointingGame().measure(explanation_of(points), masks=mask).values.item() == hit, (row, column)
    points[0, 10, 10] = points[0, 39, 39] = points[0, 39, 0] = points[0, 0, 22] = 1
    assert PointingGame(tolerance=0).measure(explanation_of(points), masks=mask).values.item() == 1 / 4


def test_tied_pixels_at_the_last_place_count_by_expectation() -> None:
    mask = torch.zeros(1, 10, 10, dtype=torch.bool)
    mask[0, 0, :4] = True
    relevance = torch.zeros(1, 10, 10)
    relevance[0, 0, 0] = 2  # the first of the four places is on the object, the other three are drawn from six
    relevance[0, 0, 1:3] = relevance[0, 5, :4] = 1
    given = explanation_of(relevance)
    expected = (1 + 3 * 2 / 6) / 4
    assert measure("relevance_rank", given, masks=mask)[0].values.item() == pytest.approx(expected)


def test_iou_takes_the_pixels_above_its_threshold() -> None:
    mask = torch.zeros(1, 10, 10, dtype=torch.bool)
    mask[0, 0, :4] = True
    relevance = torch.zeros(1, 10, 10)
    relevance[0, 0, :8] = torch.tensor([1.0, 0.8, 0.5, 0.4, 0.5, 0.2, 0.1, -3.0])
    for threshold, expected in {0.9: 1 / 4, 0.5: 3 / 5, 0.2: 4 / 6, "area": 3 / 5}.items():
        metric = IoU(threshold=threshold)  # type: ignore[arg-type] # a mixture of keys
        assert metric.measure(explanation_of(relevance), masks=mask).values.item() == pytest.approx(expected)
    one = explanation_of((relevance == 1).float())
    assert IoU(threshold="area").measure(one, masks=mask).values.item() == 1 / 4  # zeros are not high
    with pytest.raises(MethodError, match='above 0 and of at most 1, or "area"'):
        IoU(threshold=1.5)


def test_masks_that_are_missing_or_of_another_size_are_an_error(maps: Tensor, masks: Tensor) -> None:
    with pytest.raises(MethodError, match=r"pass masks=\.\.\. of shape \(N, H, W\)"):
        measure("iou", explanation_of(maps))
    with pytest.raises(MethodError, match=r"\(3, 20, 50\); expected \(3, 40, 50\)"):
        measure("iou", explanation_of(maps), masks=masks[:, ::2])
    with pytest.raises(MethodError, match=r"\(3, 50, 40\); expected \(3, 40, 50\)"):
        measure("iou", explanation_of(maps), masks=masks.mT)
    assert torch.equal(values("iou", maps, masks[:, None]), values("iou", maps, masks))


def test_a_mask_has_one_value_inside_and_others_are_not_guessed(maps: Tensor, masks: Tensor) -> None:
    for inside in (masks.float(), masks.byte() * 255, masks.long() * 7):
        assert torch.equal(values("iou", maps, inside), values("iou", maps, masks))
    labels, soft = masks.long() * torch.tensor([1, 2, 3]).view(3, 1, 1), masks * 0.8 + 0.1
    for mask, span in ((labels, "0 to 3"), (labels.to(torch.uint16), "0 to 3"), (soft, "0.1 to 0.9")):
        with pytest.raises(MethodError, match=rf"values from {span}; expected 0 and one other: .* probabilities > 0.5"):
            values("iou", maps, mask)


def test_masks_that_are_no_numbers_are_an_error() -> None:
    explanation = explanation_of(torch.rand(1, 4, 4))
    for masks in ("a.png", ["a.png"], [None]):
        with pytest.raises(MethodError, match=r"masks=.*: expected a tensor or an array \(N, H, W\) of bool"):
            measure("pointing_game", explanation, masks=masks)
