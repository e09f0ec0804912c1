"""Known changes of the image, the model or the batch change the map in a known way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

import saliency
import saliency.testing
from saliency import METHODS, Attribution
from tests.selection import case, of_each_family

ASSETS = Path(__file__).parents[2] / "assets"
BUILT_IN = [name for name, cls in METHODS.items() if cls.__module__.startswith("saliency.")]
# What draws, or lays windows and superpixels over the picture, does not do so mirror-wise.
STILL = [name for name in BUILT_IN if "chunk" not in METHODS[name].options()]
STILL += ["integrated_gradients", "idgi", "blur_ig", "ablation_cam", "recipro_cam", "score_cam"]
GRADIENT_MAPS = ["vanilla_gradient", "input_x_gradient", "guided_backprop", "deconvnet", "rectgrad"]
SCALED = [*GRADIENT_MAPS, "cam", "grad_cam", "xgrad_cam", "hires_cam", "layer_cam", "eigen_grad_cam"]


class Net(nn.Module):
    """Ends in global average pooling and one linear layer, so that every method applies."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.ReLU())
        self.third = nn.Sequential(nn.Conv2d(8, 9, 3, stride=2, padding=1), nn.ReLU())
        self.head = nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.third(self.second(self.first(x))).mean((2, 3)))
        return out


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Any:
    """The network, or a small transformer for a method that needs attention."""
    if METHODS[request.getfixturevalue("name")].needs.attention:
        return saliency.testing.tiny_transformer().double()
    torch.manual_seed(0)
    return Net().double()


def batch(height: int, width: int, images: int = 2) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(images, 3, height, width, dtype=torch.float64)


def of(name: str, model: nn.Module) -> Attribution:
    return METHODS[name](model, **METHODS[name].preview_options)


# Mirrors. With odd sizes, a padding of 1 and a stride of 2, the grid of places is its own mirror image. That of patches
# of 4 is so for multiples of 4.


def mirrorable(name: str) -> Tensor:
    return batch(12, 20) if METHODS[name].needs.attention else batch(13, 21)


def symmetric_about(axis: int, model: Net) -> Net:
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.copy_((module.weight + module.weight.flip(axis)) / 2)
    return model


@pytest.mark.parametrize("name", STILL)
@pytest.mark.parametrize(
    "axis", [case(-1, by_default=True, id="left and right"), case(-2, by_default=False, id="top and bottom")]
)
def test_a_mirrored_image_gives_the_mirrored_map_on_a_mirror_symmetric_model(model: Net, name: str, axis: int) -> None:
    x = mirrorable(name)
    method = of(name, symmetric_about(axis, model))
    plain, mirrored = method.attribute(x, [1, 3]), method.attribute(x.flip(axis), [1, 3])
    wanted = plain.values.flip(axis)
    assert wanted.any()
    if name != "deconvnet":  # without a pooling by maximum it takes nothing from the image, and is its own mirror
        assert not torch.allclose(plain.values, wanted, rtol=1e-2)
    assert torch.allclose(mirrored.values, wanted, rtol=1e-9, atol=1e-12 * float(wanted.abs().max()))
    assert torch.allclose(mirrored.scores, plain.scores, rtol=1e-12)


@pytest.mark.parametrize("name", STILL)
def test_a_transposed_image_gives_the_transposed_map_on_a_transposed_model(model: Net, name: str) -> None:
    """Height and width are never taken for one another."""
    x = mirrorable(name)
    plain = of(name, model).attribute(x, [1, 3]).values
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.copy_(module.weight.transpose(2, 3).clone())
    turned = of(name, model).attribute(x.transpose(2, 3), [1, 3]).values
    assert turned.shape == plain.transpose(2, 3).shape
    assert torch.allclose(turned, plain.transpose(2, 3), rtol=1e-9, atol=1e-12 * float(plain.abs().max()))


@pytest.mark.slow
def test_a_mirrored_photo_gives_almost_the_mirrored_map_on_the_bundled_network() -> None:
    model = saliency.load("efficientnet_lite0")
    with Image.open(ASSETS / "chelsea.jpg") as photo:
        picture = photo.convert("RGB")
    for name, least in (("grad_cam", 0.8), ("layer_cam", 0.8), ("eigen_cam", 0.8)):
        plain = of(name, model).attribute(picture, "tabby").values[0, 0]
        mirrored = of(name, model).attribute(ImageOps.mirror(picture), "tabby").values[0, 0].flip(-1)
        agreement = torch.corrcoef(torch.stack([plain.flatten(), mirrored.flatten()]))[0, 1]
        crossed = torch.corrcoef(torch.stack([plain.flatten(), mirrored.flip(-1).flatten()]))[0, 1]
        assert agreement > least
        assert agreement > crossed


# The model's head.


@pytest.mark.parametrize("name", of_each_family(BUILT_IN))
def test_a_shifted_bias_of_the_logits_changes_nothing_but_the_score(model: Net, name: str) -> None:
    x = batch(12, 20)
    plain = of(name, model).attribute(x, [1, 3])
    with torch.no_grad():
        model.head.bias.add_(5)
    shifted = of(name, model).attribute(x, [1, 3])
    # Differences of scores, a softmax, an epsilon of 1e-6, a division by the score, and an output less its bias are not
    # exact.
    inexact = ("shapley_cam", "lrp", "excitation_backprop", "chefer_lrp")
    if "chunk" in METHODS[name].options() or name in inexact:
        assert torch.allclose(shifted.values, plain.values, rtol=1e-5, atol=1e-9 * float(plain.values.abs().max()))
    else:
        assert torch.equal(shifted.values, plain.values)
    risen = 0 if name == "idgi" else 5  # it explains the probability
    assert torch.allclose(shifted.scores, plain.scores + risen, rtol=1e-12)


@pytest.mark.parametrize("name", SCALED)
def test_scaled_logits_scale_the_map(model: Net, name: str) -> None:
    x = batch(12, 20)
    plain = of(name, model).attribute(x, [1, 3]).values
    with torch.no_grad():
        model.head.weight.mul_(8)
        model.head.bias.mul_(8)
    scaled = of(name, model).attribute(x, [1, 3]).values
    assert torch.allclose(scaled, 8 * plain, rtol=1e-9, atol=1e-12 * float(plain.abs().max()))


@pytest.mark.parametrize("name", of_each_family(BUILT_IN))
def test_classes_in_another_order_change_nothing(model: Net, name: str) -> None:
    x, order = batch(12, 20), torch.tensor([4, 2, 0, 1, 3])
    plain = of(name, model).attribute(x, [1, 3]).values
    with torch.no_grad():
        model.head.weight.copy_(model.head.weight[order].clone())
        model.head.bias.copy_(model.head.bias[order].clone())
    again = of(name, model).attribute(x, [3, 4]).values
    assert torch.allclose(again, plain, rtol=1e-12, atol=1e-14)


# The batch.


@pytest.mark.parametrize("name", of_each_family(BUILT_IN))
def test_a_batch_is_its_images_in_any_order(model: Net, name: str) -> None:
    x, targets = batch(12, 20, images=4), [1, 3, 0, 1]
    together = of(name, model).attribute(x, targets).values
    order = [2, 0, 3, 1]
    shuffled = of(name, model).attribute(x[order], [targets[i] for i in order]).values
    scale = 1e-12 * float(together.abs().max())
    assert torch.allclose(shuffled, together[order], rtol=1e-9, atol=scale)
    for i in range(4):
        alone = of(name, model).attribute(x[i], targets[i]).values
        assert torch.allclose(alone[0], together[i], rtol=1e-9, atol=scale)


@pytest.mark.parametrize("name", of_each_family(BUILT_IN))
def test_the_memory_format_of_the_batch_changes_nothing(model: Net, name: str) -> None:
    x = batch(12, 20)
    plain = of(name, model).attribute(x, [1, 3]).values
    again = of(name, model).attribute(x.contiguous(memory_format=torch.channels_last), [1, 3]).values
    # Guided IG goes by thresholds on gradients, step after step, so that its rounding grows.
    close = 1e-5 if name == "guided_ig" else 1e-12
    assert torch.allclose(again, plain, rtol=1e-9, atol=close * float(plain.abs().max()))
