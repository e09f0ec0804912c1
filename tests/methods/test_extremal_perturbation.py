"""Optimised masks find the pixels that a model reads, keep the requested area, and stop at limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from saliency.errors import MethodError, TargetError
from saliency.methods.extremal_perturbation import (
    ExtremalPerturbation,
    adam_step,
    blurred_where,
    pyramid,
    shifted,
    smooth_mask,
    step_size,
)
from saliency.testing import tiny_model

ROWS, COLUMNS = slice(16, 32), slice(36, 52)


class OnePatch(nn.Module):
    """The score is how well one patch of a picture of 64 x 64 fits a pattern; all else is not looked at."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor, dtype=torch.float64))
        self.pattern = picture()[:, :, ROWS, COLUMNS]

    def forward(self, x: Tensor) -> Tensor:
        fit = (x[:, :, ROWS, COLUMNS] * self.pattern).mean((1, 2, 3))
        return self.factor * torch.stack([fit, -fit], 1)


def picture() -> Tensor:
    """Blocks of 4 x 4 pixels in random colours, (1, 3, 64, 64)."""
    blocks = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    return blocks.repeat_interleave(4, 2).repeat_interleave(4, 3)


def inside(values: Tensor) -> float:
    """The share of a map that lies in the patch."""
    return float(values[0, 0, ROWS, COLUMNS].sum() / values.sum())


@pytest.mark.parametrize("keep", ["best", "worst"])
@pytest.mark.slow
def test_the_part_that_suffices_holds_the_patch(keep: Any) -> None:
    found = ExtremalPerturbation(OnePatch(), areas=[0.1], steps=120, keep=keep).attribute(picture(), 0)
    assert float(found.values[0, 0, ROWS, COLUMNS].mean()) > 0.75
    assert inside(found.values) > 0.4  # the patch is 1/16 of the picture


@pytest.mark.slow
def test_the_area_is_what_was_asked_for() -> None:
    model, x = tiny_model().double(), picture()
    for area in (0.1, 0.5):
        found = ExtremalPerturbation(model, areas=[area], steps=100).attribute(x, 1)
        # After 100 steps, the area is above what was asked for by up to 0.018 and 0.034 (six seeds).
        assert float(found.values.mean()) == pytest.approx(area, abs=0.04)
        # As good as no pixel is undecided.
        assert float(((found.values > 0.2) & (found.values < 0.8)).double().mean()) < 0.35


def test_fewer_steps_are_larger() -> None:
    assert [step_size(steps) for steps in (800, 15, 2)] == [0.02, 0.1, 0.25]


@pytest.mark.slow
def test_several_areas_are_the_mean_of_their_masks() -> None:
    model, x = tiny_model().double(), picture()
    both = ExtremalPerturbation(model, areas=(0.1, 0.4), steps=20).attribute(x, 1)
    each = [ExtremalPerturbation(model, areas=[area], steps=20).attribute(x, 1).values for area in (0.1, 0.4)]
    assert torch.allclose(both.values, (each[0] + each[1]) / 2)
    assert both.run_stats[0].passes == 41  # one for the range of the score, and 20 for each area


@pytest.mark.slow
def test_the_unit_of_the_score_does_not_matter() -> None:
    found = [
        ExtremalPerturbation(OnePatch(factor), steps=20).attribute(picture(), 0).values for factor in (1.0, 1e-6, 1e6)
    ]
    assert torch.allclose(found[0], found[1], atol=1e-6)
    assert torch.allclose(found[0], found[2], atol=1e-6)


def test_the_same_seed_gives_the_same_mask_and_another_another() -> None:
    model, x = tiny_model(), torch.randn(1, 3, 120, 120, generator=torch.Generator().manual_seed(8))

    def mask(seed: int) -> Tensor:
        return ExtremalPerturbation(model, steps=3, seed=seed).attribute(x, 1).values

    assert torch.equal(mask(0), mask(0))
    assert not torch.equal(mask(0), mask(1))


def test_a_score_that_nothing_changes_has_an_empty_map() -> None:
    found = ExtremalPerturbation(OnePatch(0.0), steps=3).attribute(picture(), 0)
    assert not found.values.any()


def test_half_precision_is_optimised_in_single() -> None:
    found = ExtremalPerturbation(tiny_model().bfloat16(), steps=3).attribute(picture().bfloat16(), 1)
    assert found.values.dtype == torch.float32


def test_a_score_without_a_gradient_is_a_target_error() -> None:
    with pytest.raises(TargetError):
        ExtremalPerturbation(tiny_model(), steps=3).attribute(
            torch.randn(1, 3, 16, 16), lambda output: output[:, 0].detach()
        )


@pytest.mark.parametrize(
    "make",
    [
        lambda: ExtremalPerturbation(tiny_model(), areas=()),
        lambda: ExtremalPerturbation(tiny_model(), areas=[0.1, 1.0]),
        lambda: ExtremalPerturbation(tiny_model(), weight=0.0),
        lambda: ExtremalPerturbation(tiny_model(), keep="most"),  # type: ignore[arg-type]
        lambda: ExtremalPerturbation(tiny_model(), steps=2.5),  # type: ignore[arg-type]
    ],
)
def test_what_makes_no_sense_is_refused(make: Any) -> None:
    with pytest.raises(MethodError):
        make()


# The parts.


def test_a_shift_moves_down_and_to_the_right() -> None:
    image = torch.arange(12.0).reshape(1, 1, 3, 4)
    moved = shifted(image, (1, -1))
    assert torch.equal(moved[0, 0, 1:, :3], image[0, 0, :2, 1:])
    assert torch.equal(moved[0, 0, 0, :3], image[0, 0, 0, 1:])
    assert torch.equal(shifted(image, (0, 0)), image)


def test_the_smooth_mask_is_a_disc_around_a_single_number() -> None:
    numbers = torch.zeros(21, 21, dtype=torch.float64)
    numbers[10, 10] = 1
    mask = smooth_mask(numbers)
    assert float(mask[10, 10]) > 0.999
    assert float(mask[10, 11]) > 0.999  # a third of the radius away
    assert float(mask[10, 13]) > 0.3  # at the radius
    assert float(mask[10, 16:].max()) == 0
    assert torch.allclose(mask, mask.T)
    assert torch.allclose(mask, mask.flip(0))
    # The mean under weights exp(20 f), written out: one value f among 121, the others 0.
    f = torch.exp(torch.tensor(-0.5, dtype=torch.float64))
    assert float(mask[10, 13]) == pytest.approx(float(f * (20 * f).exp() / ((20 * f).exp() + 120)))


def test_no_place_of_the_smooth_mask_comes_first_by_itself() -> None:
    """If the border were preferred, every mask would move to it."""
    for level in (0.0, 0.5, 1.0):
        mask = smooth_mask(torch.full((21, 15), level, dtype=torch.float64))
        assert float(mask.max() - mask.min()) < 1e-12
        assert float(mask.mean()) == pytest.approx(level, abs=0.15)


def test_the_pyramid_goes_from_the_image_to_its_strongest_blur() -> None:
    x = picture()
    levels = pyramid(x)
    none, all_of_it = torch.zeros(64, 64, dtype=torch.float64), torch.ones(64, 64, dtype=torch.float64)
    assert torch.allclose(blurred_where(levels, none), x)
    assert torch.allclose(blurred_where(levels, all_of_it)[0], levels[-1])
    assert torch.allclose(blurred_where(levels, all_of_it / 14)[0], (levels[0] + levels[1]) / 2)
    roughness = [float(level.diff(dim=1).square().mean()) for level in levels]
    assert roughness == sorted(roughness, reverse=True)


def test_the_descent_is_adams() -> None:
    start = torch.rand(3, 4, dtype=torch.float64) * 0.4 + 0.3
    aim = torch.rand(3, 4, dtype=torch.float64)
    reference = start.clone().requires_grad_()
    optimiser = torch.optim.Adam([reference], lr=0.02, eps=0)
    numbers, moments = start, torch.zeros(2, 3, 4, dtype=torch.float64)
    for step in range(1, 11):
        (gradient,) = torch.autograd.grad((reference - aim).square().sum(), reference)
        reference.grad = gradient
        optimiser.step()
        numbers = adam_step(numbers, 2 * (numbers - aim), moments, step, 0.02)
    assert torch.allclose(numbers, reference.detach())
    assert torch.equal(adam_step(start, torch.zeros_like(start), torch.zeros_like(moments), 1, 0.1), start)


def test_places_that_are_equal_are_pulled_alike() -> None:
    numbers = torch.ones(8, 8, dtype=torch.float64)
    numbers[3:5, 3:5] = 0
    numbers.requires_grad_()
    method = ExtremalPerturbation(tiny_model(), areas=(0.3,), steps=10)
    (pull,) = torch.autograd.grad(method.cost_of(numbers, 0, 0), numbers)
    assert bool(pull.any())
    for flipped in (pull.flip(0), pull.flip(1), pull.T):
        torch.testing.assert_close(pull, flipped, atol=1e-12, rtol=1e-9)
