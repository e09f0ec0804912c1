"""Score-CAM, its smoothed and its integrated form, against loops from their definitions and pytorch-grad-cam."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saliency import MethodError
from saliency.methods.score_cam import ISCAM, SSCAM, ScoreCAM


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Net(nn.Module):
    """Twelve channels at 4 x 6 behind a ReLU, of which three are dead and one is 0.7 everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 12, 3, 1, 1))
        self.features = nn.ReLU()
        self.head = nn.Sequential(nn.Conv2d(12, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 8, 5))
        with torch.no_grad():
            last = self.body[3]
            assert isinstance(last, nn.Conv2d)
            assert last.bias is not None
            last.bias[[1, 4, 9]] = -100
            last.weight[6] = 0
            last.bias[6] = 0.7

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(self.body(x)))
        return out


@pytest.fixture
def model() -> Net:
    return Net().double()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, 8, 12, dtype=torch.float64)


def activation_of(model: Net, image: Tensor) -> Tensor:
    with torch.no_grad():
        return F.relu(model.body(image[None]))[0]


def by_definition(model: Net, image: Tensor, target: int, score: Callable[[Tensor], Tensor]) -> Tensor:
    """One forward after the other; `score` takes a mask (H, W)."""
    activation = activation_of(model, image)
    scores = []
    for channel in activation:
        large = F.interpolate(channel[None, None], image.shape[-2:], mode="bilinear", align_corners=False)[0, 0]
        span = large.max() - large.min()
        scores.append(score((large - large.min()) / span if span > 0 else torch.zeros_like(large)))
    weights = torch.stack(scores).softmax(0)
    weights[[1, 4, 6, 9]] = 0  # those that show no place
    return (weights[:, None, None] * activation).sum(0)[None]


def test_one_forward_for_all_constant_channels_is_the_plain_loop(model: Net, x: Tensor) -> None:
    found = ScoreCAM(model, "features").attribute(x, [3, 0])
    for image, target, values, effort in zip(x, (3, 0), found.values, found.effort, strict=True):
        with torch.no_grad():
            expected = by_definition(model, image, target, lambda mask: model((image * mask)[None])[0, target])  # noqa: B023
        torch.testing.assert_close(values, expected)
        assert effort.passes == 9  # eight channels and the empty image
        assert "one forward for the 4" in effort.note


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", [0, 2])
def test_with_aligned_corners_it_is_pytorch_grad_cams_map(target: int) -> None:
    oracle = pytest.importorskip("pytorch_grad_cam")
    targets = pytest.importorskip("pytorch_grad_cam.utils.model_targets")
    model, x = Net().eval(), torch.randn(1, 3, 8, 12)
    # A constant that is not zero is added to theirs: it has a weight there.
    with torch.no_grad():
        model.body[3].bias[6] = -1  # type: ignore[operator]
    cam: Any = oracle.ScoreCAM(model, [model.features])
    weights = cam.get_cam_weights(
        x, None, [targets.ClassifierOutputTarget(target)], activation_of(model, x[0])[None].numpy(), None
    )
    expected = np.einsum("nk,nkhw->nhw", weights, activation_of(model, x[0])[None].numpy())
    found = ScoreCAM(model, "features", align_corners=True).attribute(x, target)
    np.testing.assert_allclose(np.asarray(found)[:, 0], expected, rtol=1e-5, atol=1e-7)


def test_the_integrated_form_is_the_mean_over_its_steps(model: Net, x: Tensor) -> None:
    found = ISCAM(model, "features", steps=4).attribute(x[0], 2)

    def score(mask: Tensor) -> Tensor:
        return torch.stack([model((x[0] * mask * i / 4)[None])[0, 2] for i in (1, 2, 3, 4)]).mean()

    with torch.no_grad():
        torch.testing.assert_close(found.values[0], by_definition(model, x[0], 2, score))
    assert found.effort[0].passes == 8 * 4 + 1


def test_one_step_is_score_cam(model: Net, x: Tensor) -> None:
    plain, integrated = ScoreCAM(model).attribute(x, 1), ISCAM(model, steps=1).attribute(x, 1)
    torch.testing.assert_close(integrated.values, plain.values)


def test_little_noise_is_score_cam(model: Net, x: Tensor) -> None:
    plain, noisy = ScoreCAM(model).attribute(x, 1), SSCAM(model, noise=1e-7, draws=4).attribute(x, 1)
    torch.testing.assert_close(noisy.values, plain.values, rtol=1e-5, atol=1e-6)
    assert noisy.effort[0].passes == 4 * plain.effort[0].passes


def test_the_error_of_the_smoothed_form_is_what_other_seeds_differ_by(model: Net, x: Tensor) -> None:
    found = [SSCAM(model, "features", noise=0.5, draws=24, seed=seed).attribute(x[0], 1) for seed in range(24)]
    values = torch.stack([each.values for each in found])
    errors = [each.error for each in found if each.error is not None]
    claimed = torch.stack(errors).square().mean().sqrt()
    seen = values.std(0).square().mean().sqrt()
    assert len(errors) == 24
    assert 0.75 < float(claimed / seen) < 1.33
    assert found[0].agreement is not None


def test_a_tolerance_ends_after_whole_rounds_whatever_the_chunks(model: Net, x: Tensor) -> None:
    found = [
        SSCAM(model, "features", noise=0.5, tolerance=0.02, chunk=chunk).attribute(x[0], 1) for chunk in (1, 5, 16)
    ]
    assert all(each.effort[0].stopped == "tolerance" for each in found)
    for each in found[1:]:
        torch.testing.assert_close(each.values, found[0].values)
        torch.testing.assert_close(each.error, found[0].error)
    error = found[0].error
    assert error is not None
    assert float(error.norm() / found[0].values.norm()) <= 0.02


def test_a_limit_below_one_round_takes_the_channels_that_vary_most(model: Net, x: Tensor) -> None:
    found = SSCAM(model, "features", passes=3).attribute(x[0], 1)
    strongest = activation_of(model, x[0]).flatten(1).std(1).argsort(descending=True)[:3]
    zeroed = activation_of(model, x[0])[strongest]
    weights = torch.linalg.lstsq(zeroed.flatten(1).T, found.values[0].flatten()[:, None]).solution
    torch.testing.assert_close(torch.einsum("k,khw->hw", weights[:, 0], zeroed), found.values[0, 0])
    assert float(weights.sum()) == pytest.approx(1)
    assert found.effort[0].stopped == "passes"
    assert found.error is None


def test_fewer_channels_are_those_that_vary_most(model: Net, x: Tensor) -> None:
    found = ScoreCAM(model, "features", channels=2).attribute(x[0], 1)
    kept = activation_of(model, x[0]).flatten(1).std(1).argsort(descending=True)[:2]
    activation = activation_of(model, x[0])[kept]
    large = F.interpolate(activation[:, None], x.shape[-2:], mode="bilinear")
    low, high = large.amin((2, 3), keepdim=True), large.amax((2, 3), keepdim=True)
    with torch.no_grad():
        weights = model(x[0] * (large - low) / (high - low))[:, 1].softmax(0)
    torch.testing.assert_close(found.values[0, 0], torch.einsum("k,khw->hw", weights, activation))
    assert "10 left out" in found.effort[0].note


def test_where_no_mask_changes_the_score_nothing_is_said(model: Net, x: Tensor) -> None:
    found = ScoreCAM(model, "features").attribute(x, lambda output: output.detach()[:, 0] * 0 + 1)
    assert not found.values.any()


@pytest.mark.filterwarnings("ignore:.*activations of this layer are signed")
@pytest.mark.parametrize("kind", ["tokens", "channels last"])
def test_tokens_and_channels_last_are_read_as_maps(kind: str, x: Tensor) -> None:
    model = Turned(kind).double()
    plain = ScoreCAM(model, "conv").attribute(x, 1)
    torch.testing.assert_close(ScoreCAM(model, "turned").attribute(x, 1).values, plain.values)


class Turned(nn.Module):
    """A layer whose output is handed on as tokens behind a class token, or with its channels last."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.conv, self.turned, self.head = nn.Conv2d(3, 7, 3, 2, 1), nn.Identity(), nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.conv(x)
        if self.kind == "tokens":
            tokens = self.turned(torch.cat([torch.zeros_like(maps[:, :, 0, :1]), maps.flatten(2)], 2).transpose(1, 2))
            out: Tensor = self.head(tokens.relu().mean(1))
        else:
            out = self.head(self.turned(maps.permute(0, 2, 3, 1)).relu().mean((1, 2)))
        return out


def test_options_that_are_none_are_refused(model: Net) -> None:
    for make in (
        lambda: ScoreCAM(model, channels=0),
        lambda: ISCAM(model, steps=0),
        lambda: SSCAM(model, noise=0),
        lambda: SSCAM(model, draws=True),
    ):
        with pytest.raises(MethodError, match="="):
            make()
