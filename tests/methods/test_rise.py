"""RISE: its masks, its two forms, and the accuracy of its standard errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saliency
from saliency import DRISE, similarity
from saliency.attribution.estimates import generator, rank_correlation
from saliency.errors import MethodError, TargetError
from saliency.methods.rise import RISE, MaskedScores, RandomMasks
from saliency.targets.classes import probability
from saliency.testbed import draw_scenes
from saliency.testing import checks, tiny_model
from tests.games import Linear, coverage, noise, picture


@pytest.mark.parametrize(("size", "grid"), [((8, 10), 3), ((16, 16), 7), ((5, 23), 2), ((1, 1), 4)])
def test_a_mask_is_an_enlarged_grid_moved_by_less_than_a_cell(size: tuple[int, int], grid: int) -> None:
    x = torch.zeros(1, 3, *size, dtype=torch.float64)
    made = RandomMasks(x, grid, 0.4, seed=5)(0, 30)
    cell = [-(-edge // grid) for edge in size]
    for number in range(30):
        draws = torch.rand(grid * grid + 2, generator=generator(5, number))
        cells = (draws[:-2] < 0.4).double().view(1, 1, grid, grid)
        enlarged = F.interpolate(cells, size=[(grid + 1) * each for each in cell], mode="bilinear")
        top, left = int(draws[-2] * cell[0]), int(draws[-1] * cell[1])
        assert 0 <= top < cell[0]
        assert 0 <= left < cell[1]
        expected = enlarged[0, :, top : top + size[0], left : left + size[1]]
        torch.testing.assert_close(made[number], expected)


@pytest.mark.slow
def test_masks_have_the_mean_and_the_variance_that_are_claimed_at_every_pixel() -> None:
    drawn = RandomMasks(picture(), 3, 0.3, seed=0)
    masks = torch.cat([drawn(at, at + 500) for at in range(0, 10_000, 500)])
    torch.testing.assert_close(masks.mean(0), torch.full_like(masks[0], 0.3), rtol=0, atol=0.015)
    torch.testing.assert_close(masks.var(0), drawn.variance, rtol=0.06, atol=0)


def by_hand(model: nn.Module, x: Tensor, masks: Tensor, visible: float) -> tuple[Tensor, Tensor]:
    """The paper's map and the slopes, from all masks at once: (H, W)."""
    with torch.no_grad():
        scores = model(x * masks)[:, 0]
    plain = (scores[:, None, None, None] * masks).mean(0) / visible
    off = scores - scores.mean()
    covariance = (off[:, None, None, None] * (masks - visible)).sum(0) / (len(masks) - 1)
    return plain[0], covariance[0]


def test_both_forms_are_what_they_are_said_to_be() -> None:
    model, x = tiny_model().double(), noise(1, 3, 16, 16)
    drawn = RandomMasks(x, 4, 0.6, 3)
    plain, covariance = by_hand(model, x, drawn(0, 50), 0.6)
    options: dict[str, Any] = {"passes": 50, "grid": 4, "visible": 0.6, "seed": 3, "chunk": 7}
    found = RISE(model, **options, debiased=False).attribute(x, 0)
    torch.testing.assert_close(found.values[0, 0], plain)
    found = RISE(model, **options).attribute(x, 0)
    torch.testing.assert_close(found.values[0, 0], covariance / drawn.variance[0])


def test_the_errors_are_those_of_the_mean_of_what_each_mask_adds() -> None:
    scores, masks = (
        noise(37) + 4,
        torch.rand(37, 1, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
    )
    scale = torch.full((1, 4, 5), 0.2, dtype=torch.float64)
    for level, added in ((None, masks), (3.0, masks - 0.5)):
        estimate = MaskedScores(0.5, scale, level)
        for at in (0, 1, 2, 10, 29):
            step = {0: 1, 1: 2, 2: 10, 10: 29, 29: 37}[at]
            estimate.take(scores[at:step], masks[at:step])
        off = scores if level is None else scores - scores.mean()
        terms = off[:, None, None, None] * added / scale
        assert estimate.error is not None
        torch.testing.assert_close(estimate.error, terms.std(0) / 37**0.5)
        even, odd = terms[::2].sum(0), terms[1::2].sum(0)
        if level is not None:  # each half has a mean score of its own
            even, odd = (
                ((scores[i::2] - scores[i::2].mean())[:, None, None, None] * added[i::2]).sum(0) for i in (0, 1)
            )
        assert estimate.agreement == pytest.approx(rank_correlation(even, odd))


def test_the_slope_of_a_single_pixel_is_its_weight() -> None:
    model, x = Linear(), torch.ones(1, 3, 8, 10, dtype=torch.float64)
    with torch.no_grad():
        model.weight.zero_()
        model.weight[0, 3, 4] = 2.5
    found = RISE(model, passes=4000, grid=4, chunk=500).attribute(x, 0)
    assert found.error is not None
    assert abs(float(found.values[0, 0, 3, 4]) - 2.5) < 3 * float(found.error[0, 0, 3, 4]) < 0.3
    assert int(found.values[0, 0].flatten().argmax()) == 3 * 10 + 4


def test_a_constant_score_is_a_map_of_zeros_where_debiased_and_of_itself_where_not() -> None:
    model, x = Linear(), picture()
    found = RISE(model, passes=50).attribute(x, 1)  # a score of 1
    assert not found.values.any()
    found = RISE(model, passes=400, debiased=False).attribute(x, 1)
    torch.testing.assert_close(found.values, torch.ones_like(found.values), rtol=0, atol=0.25)


@pytest.mark.parametrize(("debiased", "passes"), [(True, 150), (False, 150)])
@pytest.mark.slow
def test_the_intervals_hold_a_long_run_as_often_as_they_claim(debiased: bool, passes: int) -> None:
    model, x = tiny_model().double(), noise(1, 3, 8, 8)
    options: dict[str, Any] = {"grid": 3, "debiased": debiased}
    truth = RISE(model, passes=10_000, chunk=2000, seed=10**6, **options).attribute(x, 0).values[0]
    runs = [RISE(model, passes=passes, chunk=passes, seed=seed, **options).attribute(x, 0) for seed in range(60)]
    errors = [run.error[0] for run in runs if run.error is not None]
    share = coverage(torch.stack([run.values[0] for run in runs]), torch.stack(errors), truth)
    assert 0.92 <= share <= 0.98


def test_a_tolerance_ends_the_work_at_the_same_pass_whatever_the_chunk() -> None:
    model, x = tiny_model().double(), noise(1, 3, 16, 16)
    found = [RISE(model, tolerance=0.3, grid=3, chunk=chunk).attribute(x, 0) for chunk in (5, 16, "auto")]
    assert {each.run_stats[0].stopped for each in found} == {"tolerance"}
    assert len({each.run_stats[0].passes for each in found}) == 1
    assert found[0].error is not None
    assert float(found[0].error.square().mean().sqrt() / found[0].values.square().mean().sqrt()) <= 0.3


def test_what_a_mask_hides_holds_the_fill() -> None:
    model, x = Linear(), picture()
    found = RISE(model, passes=9, fill=(0.5, 1.0, -2.0), debiased=False, grid=2).attribute(x, 0)
    masks = RandomMasks(x, 2, 0.5, 0)(0, 9)
    still = torch.tensor([0.5, 1.0, -2.0], dtype=torch.float64).view(1, 3, 1, 1)
    with torch.no_grad():
        scores = model(still + (x - still) * masks)[:, 0]
    torch.testing.assert_close(found.values[0], (scores[:, None, None, None] * masks).mean(0) / 0.5)


def test_probabilities_are_a_target_as_any_other() -> None:
    model, x = tiny_model().double(), noise(1, 3, 16, 16)
    found = RISE(model, passes=20, debiased=False).attribute(x, probability(2))
    masks = RandomMasks(x, 7, 0.5, 0)(0, 20)
    with torch.no_grad():
        scores = model(x * masks).softmax(1)[:, 2]
    torch.testing.assert_close(found.values[0], (scores[:, None, None, None] * masks).mean(0) / 0.5)


@pytest.mark.parametrize(
    ("name", "check"), [each for each in checks(RISE, debiased=False) if each[0] != "zero_gradient"]
)
@pytest.mark.slow
def test_the_papers_form_keeps_the_promises_too(name: str, check: Any) -> None:
    check()  # but for that of zeros on a constant score


@pytest.mark.parametrize(
    "options", [{"grid": 0}, {"grid": 2.0}, {"visible": 0}, {"visible": 1.0}, {"visible": "half"}, {"fill": "inpaint"}]
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(MethodError):
        RISE(Linear(), **options)


# With a similarity as the target it is RELAX.


def embeddings(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(x)
    return found


def test_the_similarity_to_the_image_is_the_sum_over_masks_of_the_paper_on_relax() -> None:
    model, x = tiny_model().double(), noise(2, 3, 12, 16)
    options: dict[str, Any] = {"passes": 40, "grid": 4, "visible": 0.4, "seed": 3, "chunk": 7}
    found = RISE(model, **options, debiased=False).attribute(x, similarity())
    slopes = RISE(model, **options).attribute(x, similarity())
    spread = RISE(model, **options, uncertainty=True).attribute(x, similarity())
    for image in range(2):
        own, masks = x[image : image + 1], RandomMasks(x[:1], 4, 0.4, 3)
        reference, total, weights, similarities = embeddings(model, own)[0], 0.0, 0.0, list[Tensor]()
        drawn = masks(0, 40)
        for mask in drawn:
            similarities.append(F.cosine_similarity(embeddings(model, own * mask)[0], reference, dim=0))
            total, weights = total + similarities[-1] * mask[0], weights + mask[0]
        torch.testing.assert_close(found.values[image, 0], total / (40 * 0.4), rtol=1e-5, atol=0)
        scores = torch.stack(similarities)[:, None, None]
        covariance = ((scores - scores.mean()) * (drawn[:, 0] - 0.4)).sum(0) / 39
        torch.testing.assert_close(slopes.values[image, 0], covariance / masks.variance[0])
        mean = (scores * drawn[:, 0]).sum(0) / weights
        terms = drawn[:, 0] * (scores - mean) ** 2
        expected = terms.sum(0) / weights
        torch.testing.assert_close(spread.values[image, 0], expected, rtol=1e-5, atol=0)
        assert spread.error is not None
        error = (drawn[:, 0] * ((scores - mean) ** 2 - expected)).square().sum(0).sqrt() / weights
        torch.testing.assert_close(spread.error[image, 0], error, rtol=1e-5, atol=0)
    assert found.target_names == ("similarity to itself",) * 2
    torch.testing.assert_close(found.scores, torch.ones(2, dtype=torch.float64))
    assert (found.units, spread.units) == ("score", "score squared")


def test_the_uncertainties_of_several_boxes_of_a_call_equal_those_of_separate_calls() -> None:
    model, x = saliency.load("shapes_detector"), draw_scenes(1, task="several", seed=1).images / 127.5 - 1
    method = DRISE(model, passes=16, grid=4, uncertainty=True)
    boxes = [saliency.box(index=at) for at in range(2)]
    for box, found in zip(boxes, method.attribute_classes(x, boxes), strict=True):
        alone = method.attribute(x, box)
        torch.testing.assert_close(found.values, alone.values)
        torch.testing.assert_close(found.error, alone.error)
        assert found.units == "similarity squared"


def test_the_intervals_of_the_uncertainty_hold_a_long_run() -> None:
    model, x = tiny_model().double(), noise(1, 3, 8, 8)
    options: dict[str, Any] = {"grid": 3, "uncertainty": True}
    truth = RISE(model, passes=6000, chunk=2000, seed=10**6, **options).attribute(x, similarity()).values[0]
    runs = [RISE(model, passes=300, chunk=300, seed=seed, **options).attribute(x, similarity()) for seed in range(25)]
    errors = torch.stack([run.error[0] for run in runs if run.error is not None])
    assert 0.88 <= coverage(torch.stack([run.values[0] for run in runs]), errors, truth) <= 0.99
    stopped = RISE(model, tolerance=0.3, **options).attribute(x, similarity())
    assert stopped.run_stats[0].stopped == "tolerance"
    assert stopped.agreement is not None


def test_a_model_without_an_embedding_has_no_similarity() -> None:
    with pytest.raises(TargetError, match=r"\(N, D\); this model's is \(1, 6, 16, 16\)"):
        RISE(nn.Conv2d(3, 6, 3, padding=1), passes=5).attribute(torch.randn(1, 3, 16, 16), similarity())
