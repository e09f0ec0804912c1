"""Smoothed methods against closed forms, captum, and what their own standard errors claim."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import saliency
from saliency import GradCAM, GuidedBackprop, VanillaGradient
from saliency.attribution.estimates import Variance
from saliency.errors import MethodError
from saliency.methods.smoothing import NoisyAttribution, SmoothGrad, SmoothGradSquared, VarGrad
from saliency.testing import check_method, tiny_model
from tests.models import LinearModel

ALL: list[type[NoisyAttribution]] = [SmoothGrad, SmoothGradSquared, VarGrad]


class Square(nn.Module):
    """Class 0 is the sum of the squared inputs, so its gradient is twice the input; class 1 is of cubes."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        return torch.stack([flat.square().sum(1), flat.pow(3).sum(1)], 1)


def picture(count: int = 1, size: int = 6) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def deviation(x: Tensor, noise: float) -> float:
    return noise * float(x.max() - x.min())


def test_a_linear_model_has_its_gradient_and_no_error() -> None:
    model, x = LinearModel(inputs=3 * 6 * 6).double(), picture(2)
    found = SmoothGrad(model, passes=9).attribute(x, [0, 1])
    expected = model.weight[:2].detach().view(2, 3, 6, 6)
    assert torch.allclose(found.values, expected, rtol=1e-12)
    assert found.error is not None
    assert float(found.error.max()) < 1e-15
    assert torch.allclose(SmoothGradSquared(model, passes=9).attribute(x, [0, 1]).values, expected.square(), rtol=1e-12)
    assert float(VarGrad(model, passes=9).attribute(x, [0, 1]).values.max()) < 1e-28


def test_the_gradient_of_a_square_is_known_with_its_error() -> None:
    x, passes = picture(), 4000
    sigma = deviation(x, 0.2)
    mean = SmoothGrad(Square(), noise=0.2, passes=passes).attribute(x, 0)
    assert mean.error is not None
    assert torch.allclose(mean.error, torch.full_like(x, 2 * sigma / passes**0.5), rtol=0.1)
    assert float(((mean.values - 2 * x) / mean.error).abs().max()) < 5

    squared = SmoothGradSquared(Square(), noise=0.2, passes=passes).attribute(x, 0)
    assert squared.error is not None
    # (2 (x + s n))^2 has the mean 4 (x^2 + s^2) and the variance 16 (4 x^2 s^2 + 2 s^4).
    assert torch.allclose(squared.error, 4 * (4 * x.square() * sigma**2 + 2 * sigma**4).sqrt() / passes**0.5, rtol=0.15)
    assert float(((squared.values - 4 * (x.square() + sigma**2)) / squared.error).abs().max()) < 5

    variance = VarGrad(Square(), noise=0.2, passes=passes).attribute(x, 0)
    assert variance.error is not None
    assert torch.allclose(variance.error, torch.full_like(x, 4 * sigma**2 * (2 / passes) ** 0.5), rtol=0.15)
    assert float(((variance.values - 4 * sigma**2) / variance.error).abs().max()) < 5


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.slow
def test_the_error_covers_the_truth_as_often_as_it_claims(cls: type[NoisyAttribution]) -> None:
    """On cubes: the gradient 3 (x + s n)^2 is not normal, and its first two moments are known."""
    x = picture()
    sigma = deviation(x, 0.15)
    mean = 3 * (x.square() + sigma**2)
    variance = 9 * (4 * x.square() * sigma**2 + 2 * sigma**4)
    truth = {SmoothGrad: mean, SmoothGradSquared: mean.square() + variance, VarGrad: variance}[cls]
    covered = []
    passes = 100 if cls is SmoothGrad else 400  # the error of a square is hard to know where tails are heavy
    for seed in range(25):
        found = cls(Square(), noise=0.15, passes=passes, seed=seed).attribute(x, 1)
        assert found.error is not None
        covered.append((found.values - truth).abs() <= 1.96 * found.error)
    share = float(torch.stack(covered).double().mean())
    assert 0.9 <= share <= 0.99


@pytest.mark.slow
def test_the_error_of_the_mean_is_right_on_a_network() -> None:
    """Over repeated seeds the 95 % interval covers a long run."""
    model = tiny_model().double()
    x = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    long = SmoothGrad(model, passes=4000, seed=999, chunk=16).attribute(x, 1).values
    covered = []
    for seed in range(20):
        found = SmoothGrad(model, passes=50, seed=seed, chunk=16).attribute(x, 1)
        assert found.error is not None
        covered.append((found.values - long).abs() <= 1.96 * found.error)
    assert 0.9 <= float(torch.stack(covered).double().mean()) <= 0.99


@pytest.mark.slow
def test_the_mean_is_that_of_captum() -> None:
    peer = pytest.importorskip("captum.attr")
    model = tiny_model().double()
    x = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = SmoothGrad(model, passes=1500, noise=0.1, chunk=16).attribute(x, 1)
    tunnel = peer.NoiseTunnel(peer.Saliency(model))
    expected = tunnel.attribute(
        x.clone().requires_grad_(),
        nt_type="smoothgrad",
        nt_samples=1500,
        nt_samples_batch_size=100,
        stdevs=deviation(x, 0.1),
        target=1,
        abs=False,
    ).detach()
    assert found.error is not None
    far = (found.values - expected) / (2**0.5 * found.error)
    assert float(far.abs().max()) < 5.5
    assert 0.8 < float(far.std()) < 1.2


def test_noise_of_zero_is_the_method_itself() -> None:
    model, x = tiny_model(), torch.randn(2, 3, 16, 16)
    for method in (VanillaGradient(model), GuidedBackprop(model), GradCAM(model)):
        found, plain = SmoothGrad(method, noise=0.0, passes=3).attribute(x, [0, 1]), method.attribute(x, [0, 1])
        assert torch.allclose(found.values, plain.values, atol=1e-6)
        assert (found.layer, found.sign) == (plain.layer, plain.sign)
        assert found.coverage == plain.coverage


@pytest.mark.parametrize(("cls", "inner"), [(SmoothGrad, "guided_backprop"), (VarGrad, "grad_cam")])
@pytest.mark.slow
def test_the_promises_hold_around_other_methods(cls: type[NoisyAttribution], inner: str) -> None:
    check_method(cls, inner=inner, passes=4)


def test_wrapping_by_name_is_wrapping() -> None:
    model, x = tiny_model(), torch.randn(1, 3, 16, 16)
    wrapped = SmoothGrad(saliency.RectGrad(model, percentile=60.0), passes=5, chunk=2)
    named = SmoothGrad(model, inner="rectgrad", inner_options={"percentile": 60.0}, passes=5, chunk=2)
    assert wrapped.settings == named.settings
    assert wrapped.settings["inner"] == "rectgrad"
    assert wrapped.settings["inner_options"] == {"percentile": 60.0, "smooth": "leave"}
    again: Any = dict(wrapped.settings)
    for each in (named, SmoothGrad(model, **again)):
        assert torch.equal(each.attribute(x, 0).values, wrapped.attribute(x, 0).values)


def test_a_layer_is_an_option_of_the_wrapped_method() -> None:
    model, x = tiny_model(), torch.randn(1, 3, 16, 16)
    wrapped = SmoothGrad(GradCAM(model, "down"), passes=4)
    assert wrapped.inner_options == {"layer": "down"}
    assert (
        SmoothGrad(model, inner="grad_cam", inner_options={"layer": "down"}, passes=4).attribute(x, 0).layer == "down"
    )
    assert wrapped.attribute(x, 0).layer == "down"


@pytest.mark.slow
def test_a_smoothed_method_can_be_smoothed() -> None:
    x = picture()
    found = SmoothGrad(SmoothGrad(Square(), noise=0.1, passes=8), noise=0.2, passes=400).attribute(x, 0)
    assert found.error is not None
    # The inner noise is the same in each outer pass, so it stays.
    assert float((found.values - 2 * x).abs().max()) < 2 * deviation(x, 0.1) * 4 / 8**0.5 + 6 * float(found.error.max())
    assert found.run_stats[0].passes == 400


def test_the_noise_goes_with_the_range_of_each_image() -> None:
    x = picture(2)
    x[1] *= 10
    found = VarGrad(Square(), passes=50).attribute(x, 0)
    alone = VarGrad(Square(), passes=50).attribute(x[1:], 0)
    assert torch.allclose(found.values[1:], alone.values)
    assert float(found.values[1].mean() / found.values[0].mean()) == pytest.approx(
        float((x[1].max() - x[1].min()) / (x[0].max() - x[0].min())) ** 2
    )


def test_the_tolerance_ends_the_work_and_is_kept() -> None:
    found = SmoothGrad(Square(), tolerance=0.02).attribute(picture(), 0)
    assert found.run_stats[0].stopped == "tolerance"
    assert found.error is not None
    assert float(found.error.square().mean().sqrt() / found.values.square().mean().sqrt()) <= 0.02
    assert found.run_stats[0].passes % 16 == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: SmoothGrad(tiny_model(), noise=-0.1),
        lambda: SmoothGrad(tiny_model(), noise=float("nan")),
        lambda: SmoothGrad(tiny_model(), inner="guided"),
        lambda: SmoothGrad(GuidedBackprop(tiny_model()), inner="grad_cam"),
        lambda: SmoothGrad(GuidedBackprop(tiny_model()), inner_options={"smooth": "leave"}),
        lambda: VarGrad(tiny_model(), passes=1).attribute(torch.randn(1, 3, 16, 16), 0),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any) -> None:
    with pytest.raises(MethodError):
        make()


def test_the_categories_and_the_preprocessing_of_the_wrapped_method_are_kept() -> None:
    method = GuidedBackprop(tiny_model(), categories=["a", "b", "c", "d", "e"])
    assert SmoothGrad(method, passes=2).attribute(torch.randn(1, 3, 16, 16), "b").target == (1,)


# The variance over chunks.


def test_the_variance_does_not_depend_on_the_chunks() -> None:
    samples = torch.randn(37, 2, 3, dtype=torch.float64) * 1e-3 + 5
    found = []
    for size in (1, 4, 37):
        estimate = Variance()
        for start in range(0, 37, size):
            estimate.add(samples[start : start + size])
        found.append(estimate)
    for each in found:
        assert each.error is not None
        assert found[0].error is not None
        assert torch.allclose(each.mean, samples.var(0), rtol=1e-9)
        assert torch.allclose(each.error, found[0].error, rtol=1e-6)
        assert each.agreement == found[0].agreement
    central = samples - samples.mean(0)
    expected = ((central**4).mean(0) - samples.var(0).square() * 34 / 36) / 37
    assert found[0].error is not None
    assert torch.allclose(found[0].error, expected.sqrt(), rtol=1e-6)
