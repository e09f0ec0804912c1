"""Occlusion, and the values of hidden pixels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from saliency.attribution import passes
from saliency.errors import MethodError
from saliency.methods.baselines import Filler, resolve_fill
from saliency.methods.occlusion import FeatureAblation, Occlusion
from saliency.methods.segments import resolve_segments, segmented
from saliency.testing import check_method, tiny_model
from tests.games import Linear, noise, per_cell, picture


def by_hand(model: nn.Module, x: Tensor, window: tuple[int, int], stride: tuple[int, int], fill: Tensor) -> Tensor:
    """The definition, pixel by pixel: (H, W)."""
    height, width = x.shape[2:]
    tops = sorted({*range(0, height - window[0] + 1, stride[0]), height - window[0]})
    lefts = sorted({*range(0, width - window[1] + 1, stride[1]), width - window[1]})
    total, times = torch.zeros(height, width, dtype=torch.float64), torch.zeros(height, width, dtype=torch.float64)
    with torch.no_grad():
        for top in tops:
            for left in lefts:
                where = (..., slice(top, top + window[0]), slice(left, left + window[1]))
                occluded = x.clone()
                occluded[where] = fill.expand_as(x)[where]
                total[where] += float(model(x)[0, 0] - model(occluded)[0, 0])
                times[where] += 1
    return total / times


@pytest.mark.parametrize(
    ("window", "stride"), [(3, 2), ((2, 5), (1, 3)), ((8, 4), (5, 4)), (3, 3), ((1, 1), (1, 1)), ((8, 10), (8, 10))]
)
def test_a_pixel_has_the_mean_fall_over_the_windows_that_cover_it(window: Any, stride: Any) -> None:
    model, x = Linear(), picture()
    found = Occlusion(model, window=window, stride=stride, fill=0.3).attribute(x, 0)
    window, stride = ((each, each) if isinstance(each, int) else each for each in (window, stride))
    expected = by_hand(model, x, window, stride, torch.full_like(x, 0.3))
    torch.testing.assert_close(found.values[0, 0], expected, rtol=1e-9, atol=1e-12)


def test_a_window_of_one_pixel_gives_gradient_times_input_of_a_linear_model() -> None:
    model, x = Linear(), picture(2)
    found = Occlusion(model, window=1, stride=1).attribute(x, 0)
    torch.testing.assert_close(found.values, (x * model.weight).sum(1, keepdim=True).detach())


def test_a_window_that_covers_the_picture_is_one_pass_and_a_larger_one_is_refused() -> None:
    model, x = Linear(), picture()
    with pytest.raises(MethodError, match="window=32 is larger than the input of 8 x 10 pixels"):
        Occlusion(model, window=32).attribute(x, 0)
    found = Occlusion(model, window=10, stride=8).attribute(x, 0)
    torch.testing.assert_close(found.values, (model(x)[0, 0] - model.bias).detach().expand(1, 1, 8, 10))
    assert found.run_stats[0].passes == 1


@pytest.mark.parametrize(
    ("size", "window", "stride", "windows"),
    [
        ((28, 28), 4, 2, 169),
        ((32, 32), 4, 2, 225),
        ((64, 48), 6, 3, 315),
        ((225, 224), 32, 16, 182),
        ((3, 5), 1, 1, 15),
        ((6, 12, 12), 4, 2, 50),
    ],
)
def test_the_default_window_fits_the_image(size: tuple[int, ...], window: int, stride: int, windows: int) -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * weight).flatten(1).sum(1, keepdim=True)

    x, weight = noise(1, 1, *size), noise(1, 1, *size, seed=1)
    found = Occlusion(Sum()).attribute(x, 0)
    expected = Occlusion(Sum(), window=window, stride=stride).attribute(x, 0)
    assert torch.equal(found.values, expected.values)
    assert found.run_stats[0].passes == windows
    assert torch.equal(Occlusion(Sum(), window=window).attribute(x, 0).values, expected.values)


def test_the_default_window_is_not_shorter_than_the_stride() -> None:
    model, x = Linear(), picture()
    expected = Occlusion(model, window=3, stride=3).attribute(x, 0)
    assert torch.equal(Occlusion(model, stride=3).attribute(x, 0).values, expected.values)


def test_it_is_captums_where_the_windows_fit_the_picture() -> None:
    model, x = tiny_model().double(), noise(2, 3, 16, 16)
    oracle = pytest.importorskip("captum.attr").Occlusion(model)
    for fill in (0.0, -0.4):
        found = Occlusion(model, window=4, stride=2, fill=fill).attribute(x, [0, 3])
        expected = oracle.attribute(
            x, sliding_window_shapes=(3, 4, 4), strides=(3, 2, 2), target=torch.tensor([0, 3]), baselines=fill
        )
        torch.testing.assert_close(found.values, expected[:, :1].detach().double(), rtol=1e-5, atol=1e-6)


class Residual(nn.Module):
    """Strides, a skip, an in-place ReLU and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, padding=1)
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(4, 3)
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters()):
                parameter.copy_(noise(*parameter.shape, seed=i) / 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.stem(x))
        scores: Tensor = self.head(self.relu(x + self.body(x)).mean((2, 3)))
        return scores


@pytest.mark.parametrize("fill", [0.0, (0.1, -1.0, 2.0), "mean", "blur", "inpaint"])
def test_recomputed_where_the_window_reaches_it_is_the_same_as_by_whole_forwards(
    fill: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Residual().double(), noise(1, 3, 40, 33)
    method = Occlusion(model, window=8, stride=5, fill=fill)
    local = method.attribute(x, 1)
    assert "only where the window reaches" in local.run_stats[0].note
    monkeypatch.setattr(passes, "MIN_WINDOWS", 10**9)
    whole = method.attribute(x, 1)
    assert whole.run_stats[0].note == ""
    assert whole.run_stats[0].passes == local.run_stats[0].passes == 8 * 6
    torch.testing.assert_close(local.values, whole.values, rtol=1e-9, atol=1e-12)


def test_score_and_passes_have_the_precision_of_the_callers_autocast() -> None:
    model = nn.Sequential(convolution := nn.Conv2d(3, 1, 1, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    nn.init.constant_(convolution.weight, 1 + 2**-9)  # 1 in bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        found = Occlusion(model, window=2, stride=2).attribute(torch.ones(1, 3, 16, 16), 0)
    assert "only where the window reaches" in found.run_stats[0].note
    assert torch.equal(found.values, torch.full_like(found.values, 3 / 64))


@pytest.mark.slow
def test_the_promises_hold_recomputed_locally_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "MIN_WINDOWS", 2)
    check_method(Occlusion)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 0},
        {"window": 2.5},
        {"window": (3, 3, 3), "stride": (1, 1)},
        {"stride": 0},
        {"window": 4, "stride": 5},
        {"stride": True},
    ]
    + [
        {"fill": each}
        for each in ("blurr", float("nan"), (), None, True, torch.zeros(8, 10), torch.zeros(3, 8, 10).int())
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(MethodError):
        Occlusion(Linear(), **options)


@pytest.mark.parametrize("fill", [(1.0, 2.0), torch.zeros(3, 4, 4)])
def test_a_fill_that_does_not_fit_the_image_is_refused(fill: Any) -> None:
    with pytest.raises(MethodError, match=r"channels|size"):
        Occlusion(Linear(), window=4, stride=4, fill=fill).attribute(picture(), 0)


# Fills.


def test_hidden_pixels_hold_the_fill_and_the_others_the_picture() -> None:
    x = picture()
    hidden = torch.zeros(2, 1, 8, 10, dtype=torch.bool)
    hidden[0, 0, 2:5, 3:6] = hidden[1, 0, 0] = True
    other = noise(3, 8, 10, seed=9)
    expected: dict[Any, Tensor | None] = {
        0.5: torch.full_like(x, 0.5),
        "mean": x.mean((2, 3), keepdim=True).expand_as(x),
        "blur": None,
    }
    for fill, still in {
        **expected,
        (1.0, 2.0, 3.0): torch.tensor([1.0, 2, 3]).view(1, 3, 1, 1).expand(1, 3, 8, 10),
    }.items():
        filler = Filler(x, resolve_fill("fill", fill))
        made = filler(hidden)
        assert torch.equal(made[~hidden.expand_as(made)], x.expand_as(made)[~hidden.expand_as(made)])
        if still is not None:
            assert torch.equal(filler.background, still.double())
        assert torch.equal(made[0, :, 2:5, 3:6], filler.background[0, :, 2:5, 3:6])
    assert torch.equal(Filler(x, resolve_fill("fill", other))(hidden)[1, :, 0], other[:, 0])
    assert torch.equal(Filler(x, resolve_fill("fill", other[None]))(hidden)[1, :, 0], other[:, 0])


def test_a_blur_keeps_a_constant_and_a_picture_its_mean_roughly() -> None:
    constant = torch.full((1, 3, 40, 60), 1.7, dtype=torch.float64)
    torch.testing.assert_close(Filler(constant, "blur").background, constant)
    ramp = torch.linspace(-1, 1, 60, dtype=torch.float64).expand(1, 3, 40, 60)
    blurred = Filler(ramp, "blur").background
    torch.testing.assert_close(blurred[..., 14:-14], ramp[..., 14:-14], rtol=0, atol=1e-9)
    rough = Filler(noise(1, 3, 40, 60), "blur").background
    assert float(rough.std()) < 0.3


def test_what_is_painted_in_goes_on_from_around_it_whatever_the_scale() -> None:
    rows = torch.linspace(-2, 3, 40, dtype=torch.float64)[:, None].expand(40, 50)
    x = torch.stack([rows, 100 * rows, torch.full_like(rows, -0.4)])[None]
    filler = Filler(x, "inpaint")
    hidden = torch.zeros(1, 1, 40, 50, dtype=torch.bool)
    hidden[0, 0, 10:16, 20:28] = True
    made = filler(hidden)
    assert torch.equal(made[~hidden.expand_as(made)], x[~hidden.expand_as(x)])
    assert float((made - x)[0, 0].abs().max()) < 0.4  # of a picture that spans 5
    torch.testing.assert_close(made[0, 1], 100 * made[0, 0], rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(made[0, 2], x[0, 2], rtol=1e-6, atol=1e-6)
    everything = torch.ones_like(hidden)
    assert torch.equal(filler(everything), filler.background)


def test_a_fill_is_kept_as_what_it_was_and_settings_name_it() -> None:
    assert Occlusion(Linear(), fill=np.float64(0.25).item()).settings["fill"] == 0.25
    assert Occlusion(Linear(), fill=[0, 1, 2]).settings["fill"] == [0.0, 1.0, 2.0]
    kept = Occlusion(Linear(), fill=noise(3, 8, 10))
    assert kept.settings["fill"] == "image"
    assert Occlusion(Linear(), fill=kept.fill).fill is kept.fill


# Feature ablation.


def test_segments_of_a_linear_model_have_the_sum_of_weight_times_input() -> None:
    model, x = Linear(), picture(2)
    for fill in (0.0, 1.5):
        found = FeatureAblation(model, segments=(4, 5), fill=fill).attribute(x, 0)
        effect = ((x - fill) * model.weight).sum(1, keepdim=True).detach()
        for i in range(2):
            torch.testing.assert_close(per_cell(found.values[i : i + 1], (4, 5)), per_cell(effect[i : i + 1], (4, 5)))
        assert len(set(found.values[0, 0, :2, :2].flatten().tolist())) == 1


def test_it_is_captums_shared_out_among_the_pixels() -> None:
    model, x = tiny_model().double(), noise(1, 3, 16, 16)
    labels = torch.tensor([[0, 0, 7, 7], [0, 3, 3, 7], [5, 5, 3, 3], [5, 5, 5, 5]]).repeat_interleave(4, 0)
    labels = labels.repeat_interleave(4, 1)
    found = FeatureAblation(model, segments=labels, fill=-0.2).attribute(x, 2)
    numbered = segmented(x, resolve_segments("segments", labels)).labels
    peer = pytest.importorskip("captum.attr")
    expected = peer.FeatureAblation(model).attribute(x, target=2, feature_mask=numbered[None, None], baselines=-0.2)
    sizes = torch.bincount(numbered.flatten())[numbered]
    torch.testing.assert_close(found.values[0, 0], expected[0, 0].double() / sizes, rtol=1e-5, atol=1e-7)
    assert found.run_stats[0].note == "4 segments"
    assert found.run_stats[0].passes == 4


def test_what_is_painted_in_is_painted_in_for_each_segment() -> None:
    model, x = Linear(), picture()
    found = FeatureAblation(model, segments=(2, 2), fill="inpaint").attribute(x, 0)
    assert len(set(found.values.flatten().tolist())) == 4
