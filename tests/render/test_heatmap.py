"""The promises of `heatmap`: reductions, signs, resizing and clipping in closed form, and the units kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from saliency.attribution.explanation import Explanation, heatmap, limits
from saliency.errors import NonFiniteError, RenderError
from saliency.render.scaling import shared_limit
from saliency.targets.question import QuestionFacts
from saliency.validation import Sign


def explained(values: Tensor, sign: Sign = "signed", size: tuple[int, int] | None = None) -> Explanation:
    """An explanation with these values, as if a method had returned it."""
    count = len(values)
    return Explanation(
        values,
        torch.ones(count),
        questions=(QuestionFacts("espresso", 7),) * count,
        frames=(None,) * count,
        input_size=size or (values.shape[-2], values.shape[-1]),
        method="made_up",
        title="made_up",
        units="made_up value",
        sign=sign,
    )


CHANNELS = torch.tensor([1.0, -4.0, 2.0]).view(1, 3, 1, 1)


@pytest.mark.parametrize(("sign", "expected"), [("positive", 0.0), ("signed", -1.0), ("absolute", 4.0)])
def test_channels_are_summed_or_the_largest_magnitude_is_taken(sign: Sign, expected: float) -> None:
    made = heatmap(explained(CHANNELS), sign=sign)
    torch.testing.assert_close(made, torch.tensor([[[expected]]]))


def test_the_sign_is_the_methods_own_unless_another_is_asked_for() -> None:
    values = torch.tensor([[[[-2.0, 3.0]]]])
    assert heatmap(explained(values, "positive")).tolist() == [[[0.0, 3.0]]]
    assert heatmap(explained(values, "absolute")).tolist() == [[[2.0, 3.0]]]
    assert heatmap(explained(values, "positive"), sign="signed").tolist() == [[[-2.0, 3.0]]]


def test_simonyans_map_is_the_largest_magnitude_over_the_channels() -> None:
    values = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(heatmap(explained(values, "absolute")), values.abs().amax(dim=1))


def test_a_row_of_two_becomes_a_row_of_four_by_centres() -> None:
    # Output centres lie at -1/4, 1/4, 3/4 and 5/4 cells.
    made = heatmap(explained(torch.tensor([[[[0.0, 8.0]]]])), size=(1, 4))
    assert made.tolist() == [[[0.0, 2.0, 6.0, 8.0]]]


def test_the_map_is_as_large_as_the_models_input_by_default() -> None:
    assert heatmap(explained(torch.rand(3, 1, 2, 4), size=(6, 20))).shape == (3, 6, 20)


def test_the_resize_comes_after_the_sign() -> None:
    # Read after the resize, the middle would be max(0, 0) and not 2.
    made = heatmap(explained(torch.tensor([[[[-4.0, 4.0]]]]), "positive"), size=(1, 3))
    assert made.tolist() == [[[0.0, 2.0, 4.0]]]


def test_no_evidence_falls_between_pixels_where_the_map_shrinks() -> None:
    values = torch.zeros(1, 1, 32, 32)
    values[0, 0, 13, 22] = 1.0
    made = heatmap(explained(values), size=(4, 4))
    assert made.sum().item() == pytest.approx(1 / 64, rel=0.1)  # weights at the border add up a little differently


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_half_values_are_summed_in_float32(kind: torch.dtype) -> None:
    values = torch.full((1, 4, 1, 1), 30000.0, dtype=kind)  # the sum is infinite in float16
    made = heatmap(explained(values))
    assert made.dtype == torch.float32
    assert made.item() == 4 * values[0, 0].item()


def test_double_values_stay_double() -> None:
    values = torch.rand(1, 3, 2, 2, dtype=torch.float64)
    assert torch.equal(heatmap(explained(values)), values.sum(dim=1))


def test_the_values_are_left_as_they_are() -> None:
    values = torch.randn(1, 1, 4, 4)
    before = values.clone()
    made = heatmap(explained(values), percentile=50.0)
    made.zero_()
    assert torch.equal(values, before)


def test_a_map_is_its_own_memory() -> None:
    values = torch.ones(1, 1, 2, 2)
    heatmap(explained(values)).zero_()
    assert values.sum() == 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("sign", ["positive", "signed", "absolute"])
def test_a_value_that_is_not_finite_is_an_error_that_names_the_image(bad: float, sign: Sign) -> None:
    values = torch.rand(3, 3, 2, 2)
    values[1, 2, 0, 1] = bad
    with pytest.raises(NonFiniteError, match=r"image 1 .* 1 of 4 pixels"):
        heatmap(explained(values, sign))


def test_a_sum_that_overflows_is_an_error() -> None:
    with pytest.raises(NonFiniteError):
        heatmap(explained(torch.full((1, 3, 1, 1), 3e38)))


def test_the_percentile_clips_both_ends_at_the_same_magnitude_and_keeps_the_units() -> None:
    values = torch.arange(-50.0, 50.0).view(1, 1, 10, 10)
    made = heatmap(explained(values), percentile=90.0)
    assert [made.min().item(), made.max().item()] == [-45.0, 45.0]
    inner = values[0].abs() <= 45
    assert torch.equal(made[inner], values[0][inner])


def test_the_percentile_is_each_images_own() -> None:
    values = torch.rand(2, 1, 10, 10) * torch.tensor([1.0, 1000.0]).view(2, 1, 1, 1)
    both = heatmap(explained(values), percentile=80.0)
    each = [heatmap(explained(values[i : i + 1]), percentile=80.0) for i in range(2)]
    assert torch.equal(both, torch.cat(each))


@pytest.mark.parametrize("percentile", [0.1, 20.0, 50.0, 99.5, 100.0])
def test_a_limit_is_the_percentile_by_rank_that_numpy_finds(percentile: float) -> None:
    maps = torch.randn(1, 20, 10, generator=torch.Generator().manual_seed(1))
    expected = np.percentile(maps.abs().numpy(), percentile, method="inverted_cdf")
    assert limits(maps, percentile).item() == pytest.approx(expected)


def test_clipping_does_not_erase_a_map_with_one_hot_pixel() -> None:
    values = torch.zeros(1, 1, 100, 100)
    values[0, 0, 3, 4] = 5.0
    assert heatmap(explained(values), percentile=99.0).max() == 5.0


def test_the_shared_limit_is_that_of_the_strongest_image() -> None:
    weak, strong = torch.tensor([[[[1.0, -2.0]]]]), torch.tensor([[[[4.0, -9.0]]]])
    assert shared_limit(explained(torch.cat([weak, strong]))) == 9.0
    assert shared_limit([explained(weak), explained(strong)], sign="positive") == 4.0
    assert shared_limit(explained(torch.zeros(1, 1, 2, 2))) == 0.0


def test_only_values_per_colour_channel_are_clipped_unasked() -> None:
    smooth = torch.arange(1000.0).view(1, 1, 10, 100)
    assert shared_limit(explained(smooth), smoothing=0) == 999.0
    channels = explained(smooth.expand(1, 3, 10, 100) / 3)
    assert shared_limit(channels, smoothing=0) == pytest.approx(989.0)
    assert shared_limit(channels, percentile=None, smoothing=0) == pytest.approx(999.0)


def test_a_wrong_option_is_an_error_with_the_right_ones() -> None:
    made = explained(torch.rand(1, 3, 4, 4))
    with pytest.raises(RenderError, match='did you mean "positive"'):
        heatmap(made, sign="positiv")  # type: ignore[arg-type]
    with pytest.raises(RenderError, match="above 0 and of at most 100"):
        heatmap(made, percentile=101.0)
    with pytest.raises(RenderError, match="above 0 and of at most 100"):
        heatmap(made, percentile=float("nan"))
    with pytest.raises(RenderError, match="size"):
        heatmap(made, size=(0, 4))
    with pytest.raises(RenderError, match="auto"):
        shared_limit(made, percentile="otto")  # type: ignore[arg-type]
    with pytest.raises(RenderError, match="no explanation"):
        shared_limit([])


def test_gradients_of_the_values_do_not_follow_into_the_map() -> None:
    made = explained(torch.rand(1, 3, 4, 4, requires_grad=True))
    assert not heatmap(replace(made, sign="absolute")).requires_grad
