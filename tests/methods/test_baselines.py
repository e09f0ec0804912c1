"""Baselines are what their names say, in the model's own input; blur keeps brightness and follows the heat equation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter
from torch import Tensor
from torchvision import transforms

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
        ("no/such/file.png", "neither a file"),
        (float("nan"), "finite"),
        (True, "not a finite number"),
        (None, "NoneType"),
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
