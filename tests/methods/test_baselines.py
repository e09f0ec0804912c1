"""Baselines are what their names say, in the model's own input; blur keeps brightness and follows the heat equation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter
from torch import Tensor, nn

from saliency import IDGI, Attribution, GuidedIG, IntegratedGradients, Occlusion, PerImage
from saliency.errors import MethodError
from saliency.io.preprocess import Preprocess, TransformPreprocess
from saliency.methods.baselines import Diffusion, baselines, blurred, resolve_baseline

PREPROCESS = Preprocess(size=(16, 16), resize=18)


def image(height: int = 16, width: int = 16, seed: int = 0) -> Tensor:
    return torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("name", "level"), [("black", 0.0), ("white", 1.0)])
def test_black_and_white_are_those_of_the_picture(name: str, level: float) -> None:
    x = image()
    found = baselines(resolve_baseline("baseline", name, PREPROCESS), x, PREPROCESS)
    assert found.shape == x.shape
    expected = PREPROCESS.normalise(torch.full((1, 3, 16, 16), level, dtype=torch.float64))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_any_callable_says_what_black_is() -> None:
    from torchvision import transforms

    prepare = TransformPreprocess(
        transforms.Compose([transforms.Resize((20, 24)), transforms.ToTensor(), transforms.Normalize([0.2], [0.5])])
    )
    found = baselines(resolve_baseline("baseline", "black", prepare), image(20, 24), prepare)
    torch.testing.assert_close(found, torch.full_like(found, -0.4), atol=1e-6, rtol=0)


def test_the_mean_is_zero_and_needs_no_preprocessing() -> None:
    assert not baselines(resolve_baseline("baseline", "mean", None), image(), None).any()
    assert (baselines(resolve_baseline("baseline", 0.25, None), image(), None) == 0.25).all()


def test_noise_is_the_same_for_all_images_and_another_for_each_seed_and_place() -> None:
    kept = resolve_baseline("baseline", ["noise", "noise"], None)
    first, second = baselines(kept, image(), None, 3), baselines(kept, image(seed=1), None, 3)
    assert torch.equal(first, second)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, baselines(kept, image(), None, 4))
    assert abs(float(first.std()) - 1) < 0.1


def test_pictures_paths_and_tensors_are_prepared_as_images_are(tmp_path: Path) -> None:
    picture = Image.effect_noise((40, 30), 60).convert("RGB")
    picture.save(tmp_path / "other.png")
    given = torch.full((2, 3, 16, 16), 0.5)
    kept = resolve_baseline(
        "baseline", [picture, tmp_path / "other.png", str(tmp_path / "other.png"), given], PREPROCESS
    )
    found = baselines(kept, image(), PREPROCESS)
    assert found.shape == (5, 3, 16, 16)
    for each in found[:3]:
        torch.testing.assert_close(each, PREPROCESS(picture).double())
    assert (found[3:] == 0.5).all()


def test_a_given_baseline_is_the_methods_own() -> None:
    given = torch.zeros(3, 16, 16)
    kept = resolve_baseline("baseline", given, None)
    given += 1
    assert not baselines(kept, image(), None).any()


@pytest.mark.parametrize(
    ("like", "said"),
    [
        ("blak", 'did you mean "black"'),
        ("black", "has no preprocessing"),
        ("no/such/file.png", "the path of one"),
        (float("nan"), "finite"),
        (True, "not a finite number"),
        (None, "baseline=None is invalid"),
        ([], "empty"),
    ],
)
def test_what_is_no_baseline_is_refused_with_a_reason(like: object, said: str) -> None:
    with pytest.raises(MethodError, match=said):
        resolve_baseline("baseline", like, None)


def test_a_given_baseline_of_another_size_is_refused() -> None:
    with pytest.raises(MethodError, match="3x8x8, and the model's input 3x16x16"):
        baselines(resolve_baseline("baseline", torch.zeros(3, 8, 8), None), image(), None)


@pytest.mark.parametrize("size", [(24, 17), (1, 9), (1, 1)])
def test_blur_keeps_the_brightness_and_ends_in_the_mean(size: tuple[int, int]) -> None:
    x = image(*size)
    for sigma in (0.0, 0.7, 3.0, 1000.0):
        torch.testing.assert_close(blurred(x, sigma).mean((2, 3)), x.mean((2, 3)))
    torch.testing.assert_close(blurred(x, 0.0), x)
    torch.testing.assert_close(blurred(x, 1000.0), x.mean((2, 3), keepdim=True).expand_as(x))


def test_blur_is_scipys_with_reflection() -> None:
    x = image(40, 33)
    expected = gaussian_filter(x.numpy(), 3.0, mode="reflect", axes=(2, 3), truncate=9)
    torch.testing.assert_close(blurred(x, 3.0), torch.from_numpy(expected), atol=1e-6, rtol=0)


def test_two_blurs_are_one_of_the_summed_variance() -> None:
    x = image(12, 20)
    torch.testing.assert_close(blurred(blurred(x, 3.0), 4.0), blurred(x, 5.0))


def test_the_derivative_of_the_blur_is_that_of_finite_differences() -> None:
    sigmas, diffusion = torch.tensor([0.4, 1.5, 6.0], dtype=torch.float64), Diffusion(image(12, 20)[0])
    numerical = (diffusion(sigmas + 1e-5) - diffusion(sigmas - 1e-5)) / 2e-5
    torch.testing.assert_close(diffusion.derivative(sigmas), numerical, atol=1e-8, rtol=1e-6)


# Baselines of one call, as in captum.


def small_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 5)).double().eval()


def test_a_baseline_for_each_image_agrees_with_captum() -> None:
    net, x, given = small_net(), torch.cat([image(8, 8), image(8, 8, 1)]), image(8, 8, 2).repeat(2, 1, 1, 1)
    given[1] *= 0.5
    expected = (
        pytest.importorskip("captum.attr")
        .IntegratedGradients(net)
        .attribute(x, target=[1, 2], baselines=given, n_steps=50, method="gausslegendre")
    )
    found = IntegratedGradients(net, baseline=PerImage(given)).attribute(x, target=[1, 2])
    torch.testing.assert_close(found.values, expected, atol=1e-8, rtol=0)


@pytest.mark.parametrize(
    "method",
    [partial(IntegratedGradients, steps=3), partial(IDGI, steps=3), partial(GuidedIG, steps=3)],
)
def test_a_baseline_for_each_image_equals_single_calls_bit_for_bit(method: Callable[..., Attribution]) -> None:
    net, x = small_net(), torch.cat([image(8, 8), image(8, 8, 1)])
    given = x.flip(0) * 0.3
    for likes in (given, list(given), ["blur", given[1]]):
        batch = method(net, chunk=4, baseline=PerImage(likes)).attribute(x, 1)
        for index, like in enumerate(likes):
            alone = method(net, chunk=4, baseline=like).attribute(x[index], 1)
            assert torch.equal(batch.values[index], alone.values[0])
            names = batch.settings["baseline"]
            assert isinstance(names, list)
            assert names[index] == alone.settings["baseline"]


def test_an_occlusion_has_a_fill_for_each_image() -> None:
    net, x = small_net(), torch.cat([image(8, 8), image(8, 8, 1)])
    occlusion = partial(Occlusion, net, window=4, stride=4, chunk=4)
    batch = occlusion(fill=PerImage([0.5, "mean"])).attribute(x, 1)
    fills: tuple[float | str, ...] = (0.5, "mean")
    for index, fill in enumerate(fills):
        torch.testing.assert_close(batch.values[index], occlusion(fill=fill).attribute(x[index], 1).values[0])
    assert batch.settings["fill"] == [0.5, "mean"]


def test_baselines_that_do_not_fit_are_refused() -> None:
    net, x = small_net(), torch.cat([image(8, 8), image(8, 8, 1)])
    advice = r"IntegratedGradients\(model, baseline=...\), with saliency.PerImage"
    with pytest.raises(TypeError, match=advice):
        IntegratedGradients(net).attribute(x, 0, baselines=0)  # type: ignore[call-overload]
    for given in ([0, 0, 0], torch.zeros(3, 3, 8, 8)):
        with pytest.raises(MethodError, match="baseline has 3 values for 2 images"):
            IntegratedGradients(net, baseline=PerImage(given)).attribute(x, 0)
    with pytest.raises(MethodError, match="expected the same size"):
        IntegratedGradients(net, baseline=PerImage(torch.zeros(2, 3, 4, 4))).attribute(x, 0)
    with pytest.raises(MethodError, match='did you mean "black"'):
        IntegratedGradients(net, baseline=PerImage(["blck", "blur"]))
