"""One map of an image that is larger than the model's input."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import saliency
from saliency import METHODS, Preprocess, Tiled
from saliency.errors import ImageError, MethodError, NotApplicableError, NotFoundError, TargetError, warn
from saliency.metrics import measure
from tests.models import OwnForward, PooledNet

PREPARE = Preprocess((16, 16), 20)


def dense(classes: int = 4) -> nn.Module:
    """A network with a receptive field of 7 pixels, which keeps the size of the image."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU()
    return nn.Sequential(*layers, nn.Conv2d(6, classes, 3, padding=1)).double()


class Recorded(PooledNet):
    """A classifier that keeps the shapes of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def forward(self, x: Tensor) -> Tensor:
        self.shapes.append(x.shape)
        return super().forward(x)


def noise(height: int, width: int, images: int = 1) -> Tensor:
    return torch.randn(images, 3, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def pixels(height: int = 70, width: int = 60) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


def class_sum(output: Tensor) -> Tensor:
    return output[:, 1].sum((1, 2))


@pytest.mark.parametrize("method", ["vanilla_gradient", "input_x_gradient", "guided_backprop", "layer_cam"])
def test_tiles_equal_the_whole_if_the_receptive_field_is_a_quarter_of_the_overlap(method: str) -> None:
    options = {"layer": "2"} if method == "layer_cam" else {}
    explainer, x = METHODS[method](dense(), **options), noise(90, 75)
    whole = saliency.heatmap(explainer.attribute(x, class_sum))
    tiled = Tiled(explainer, size=40, overlap=24).attribute(x, class_sum)  # 24 / 4 = 7 - 1
    assert tiled.values.shape == (1, 1, 90, 75)
    assert torch.allclose(saliency.heatmap(tiled), whole, rtol=0, atol=1e-12 * float(whole.abs().max()))
    # Without an overlap, the pixels at the borders of the tiles differ.
    cut = Tiled(explainer, size=40, overlap=0).attribute(x, class_sum)
    assert (saliency.heatmap(cut) - whole).abs().max() > 0.05 * whole.abs().max()


def test_a_network_with_pooling_gives_the_whole_map_up_to_one_factor() -> None:
    model = nn.Sequential(dense(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    explainer, x = saliency.VanillaGradient(model), noise(64, 80)
    whole = saliency.heatmap(explainer.attribute(x, 2))
    tiled = saliency.heatmap(Tiled(explainer, size=32, overlap=24).attribute(x, 2))
    assert torch.allclose(tiled * (32 * 32) / (64 * 80), whole, rtol=0, atol=1e-12 * float(whole.abs().max()))


def test_a_list_of_one_class_is_the_class_also_in_a_contrast() -> None:
    tiled, x = Tiled(saliency.VanillaGradient(PooledNet()), size=16, overlap=4), noise(24, 24).float()
    for given, target in (
        (saliency.contrast([1], [0]), saliency.contrast(1, 0)),
        (saliency.probability([1]), saliency.probability(1)),
    ):
        assert torch.equal(tiled.attribute(x, given).values, tiled.attribute(x, target).values)


def test_a_strided_network_needs_steps_of_its_stride() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.ReLU(), nn.Conv2d(4, 2, 1)).double()
    explainer, x = saliency.VanillaGradient(model), noise(56, 80)
    whole = saliency.heatmap(explainer.attribute(x, class_sum))
    tiled = saliency.heatmap(Tiled(explainer, size=32, overlap=8).attribute(x, class_sum))  # 24, and 80 - 32, of 4
    assert torch.allclose(tiled, whole, rtol=0, atol=1e-13)


@pytest.mark.parametrize("where", ["predicted", "mask", "box"])
def test_a_region_is_cut_to_the_tiles_and_its_score_is_a_sum(where: str) -> None:
    model, x = dense(2), noise(80, 64)
    mask = torch.zeros(80, 64, dtype=torch.bool)
    mask[5:40, 30:60] = True
    predicted = model(x)[0].argmax(0) == 1
    region: Any = {"predicted": "predicted", "mask": mask, "box": (30, 5, 60, 40)}[where]
    own = predicted if where == "predicted" else mask
    expected = saliency.VanillaGradient(model).attribute(x, lambda out: out[:, 1, own].sum(1))
    tiled = Tiled(saliency.VanillaGradient(model), size=40, overlap=24).attribute(x, saliency.region(1, region))
    assert torch.allclose(saliency.heatmap(tiled), saliency.heatmap(expected), rtol=0, atol=1e-12)
    assert tiled.tile_scores is not None
    assert tiled.tile_scores.shape == (1, 4, 3)
    if where != "predicted":  # the tiles of the last row hold no pixel of it
        assert tiled.tile_scores[0, 3].isnan().all()
        assert torch.allclose(tiled.scores, tiled.tile_scores.nanmean().view(1))


def test_the_image_may_be_a_path_an_image_an_array_or_a_map_of_a_file(tmp_path: Path) -> None:
    array = pixels()
    Image.fromarray(array).save(tmp_path / "image.png")
    stored = np.memmap(tmp_path / "image.raw", np.uint8, "w+", shape=array.shape)
    stored[:] = array
    explainer = saliency.VanillaGradient(PooledNet(), preprocess=PREPARE)
    x = Preprocess()(Image.fromarray(array))
    expected = Tiled(explainer, size=32, overlap=8).attribute(x, 1)
    for image in (tmp_path / "image.png", Image.fromarray(array), array, stored):
        tiled = Tiled(explainer, size=32, overlap=8).attribute(image, 1)
        assert torch.equal(tiled.values, expected.values)
        assert tiled.frames[0] is not None
        assert tiled.frames[0].box == (0, 0, 60, 70)
        assert saliency.overlay(tiled).size == (60, 70)


def test_a_larger_array_is_read_window_by_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saliency.attribution.tiles.MAX_PIXELS", 1000)
    array, read = pixels(), []

    class Stored:
        shape = array.shape

        def __getitem__(self, window: Any) -> Any:
            read.append(array[window].shape)
            return array[window]

    explainer = saliency.VanillaGradient(PooledNet(), preprocess=PREPARE)
    tiled = Tiled(explainer, size=32, overlap=8).attribute(Stored(), 1)  # type: ignore[arg-type]
    assert set(read) == {(32, 32, 3)}
    assert tiled.frames == (None,)
    assert torch.equal(
        tiled.values,
        Tiled(explainer, size=32, overlap=8).attribute(Preprocess()(Image.fromarray(array)), 1).values,
    )
    assert saliency.overlay(tiled, array).size == (60, 70)


def test_an_image_smaller_than_a_tile_is_one_tile() -> None:
    explainer, x = saliency.VanillaGradient(PooledNet()), noise(20, 30).float()
    whole, tiled = explainer.attribute(x, 1), Tiled(explainer, size=65).attribute(x, 1)
    assert torch.equal(saliency.heatmap(tiled), saliency.heatmap(whole))
    assert torch.equal(tiled.scores, whole.scores)


def test_a_tile_is_normalised_and_neither_resized_nor_cropped() -> None:
    model = Recorded()
    Tiled(saliency.VanillaGradient(model, preprocess=PREPARE), size=24, overlap=8).attribute(pixels(), 1)
    assert {shape[1:] for shape in model.shapes} == {(3, 24, 24)}
    function = saliency.VanillaGradient(model, preprocess=lambda image: PREPARE(image.convert("L").convert("RGB")))
    with pytest.raises(ImageError, match="tiles: the preprocessing is a function"):
        Tiled(function, size=24, overlap=8).attribute(pixels(), 1)


def test_tiles_run_in_chunks_and_give_the_values_of_single_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Recorded()
    explainer, x = saliency.VanillaGradient(model), noise(70, 60).float()
    several = Tiled(explainer, size=24, overlap=8).attribute(x, 1)
    assert max(shape[0] for shape in model.shapes) == 15  # 16 tiles: the first alone
    monkeypatch.setattr("saliency.attribution.tiles.chunk_size", lambda x: 1)
    assert torch.allclose(several.values, Tiled(explainer, size=24, overlap=8).attribute(x, 1).values, rtol=1e-5)


def test_every_method_explains_a_class_in_tiles() -> None:
    model, x = PooledNet(), noise(36, 30).float()
    for name in ("grad_cam", "integrated_gradients", "smooth_grad", "occlusion", "rise", "lrp", "kernel_shap"):
        cls = METHODS[name]
        tiled = Tiled(cls(model, **cls.preview_options), size=20, overlap=8).attribute(x, 1)
        assert tiled.values.shape == (1, 1, 36, 30)
        assert tiled.values.any()
        assert tiled.method == name
        assert tiled.sign != "positive" or tiled.values.min() >= 0


def test_an_explanation_in_tiles_is_saved(tmp_path: Path) -> None:
    tiled = Tiled(saliency.GradCAM(PooledNet(), preprocess=PREPARE), size=32, overlap=8).attribute(pixels(), 1)
    loaded = saliency.Explanation.load(tiled.save(tmp_path / "map.safetensors"))
    assert tiled.tile_scores is not None
    assert loaded.tile_scores is not None
    assert torch.equal(loaded.tile_scores, tiled.tile_scores)


@pytest.mark.parametrize("metric", ["max_sensitivity", "random_logit", "deletion"])
def test_metrics_that_run_the_model_refuse_an_explanation_in_tiles(metric: str) -> None:
    method, image = saliency.LayerCAM(PooledNet().double()), noise(40, 40)
    tiled = Tiled(method, size=32, overlap=8).attribute(image, 1)
    assert measure("gini", tiled)[0].values.shape == (1,)
    with pytest.raises(MethodError, match="this explanation is of an image in tiles"):
        measure(metric, tiled, method=method, inputs=image)


@pytest.mark.parametrize(
    ("image", "target", "options", "error", "match"),
    [
        (noise(40, 40), 1, {"size": 16, "overlap": 16}, MethodError, "overlap=16 is not smaller than size=16"),
        (noise(40, 40), 1, {"size": 0}, MethodError, "size=0 is not a whole number"),
        (noise(40, 40, 2), 1, {"size": 32, "overlap": 8}, ImageError, "got 2 images; with Tiled, explain them one"),
        (
            [pixels(), pixels()],
            1,
            {"size": 32, "overlap": 8},
            ImageError,
            "got 2 images; with Tiled, explain them one",
        ),
        (noise(40, 40), None, {"size": 32, "overlap": 8}, TargetError, "pass a class as the target"),
        (noise(40, 40), saliency.probability(), {"size": 32, "overlap": 8}, TargetError, "pass a class as the target"),
        (noise(40, 40), saliency.box(index=1), {"size": 32, "overlap": 8}, TargetError, "crop the image around it"),
        (noise(40, 40), saliency.keypoint(1), {"size": 32, "overlap": 8}, TargetError, "crop the image around it"),
    ],
)
def test_one_sentence_for_what_tiles_cannot_do(
    image: Any, target: Any, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        Tiled(saliency.VanillaGradient(PooledNet().double()), **options).attribute(image, target)


def test_a_list_of_one_image_is_the_image() -> None:
    method = saliency.GradCAM(PooledNet(), preprocess=PREPARE)
    values = [Tiled(method, size=32, overlap=8).attribute(given, 1).values for given in (pixels(), [pixels()])]
    assert torch.equal(*values)


def test_volumes_are_explained_in_tiles_but_not_their_regions() -> None:
    method = saliency.InputXGradient(nn.Conv3d(1, 2, 3, padding=1).double())
    volume = torch.randn(1, 1, 13, 14, 15, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def score(output: Tensor) -> Tensor:
        return output[:, 1].square().sum((1, 2, 3))

    tiled = Tiled(method, size=12, overlap=8).attribute(volume, score)
    assert torch.allclose(tiled.values, method.attribute(volume, score).values, atol=1e-12)
    with pytest.raises(NotApplicableError, match="a region with Tiled is defined for images"):
        Tiled(method, size=12, overlap=8).attribute(volume, saliency.region(1))


def test_a_region_that_no_tile_holds_is_an_error() -> None:
    model = nn.Sequential(
        dense(2), OwnForward(lambda self, x: x - torch.tensor([0, 1e6], dtype=x.dtype).view(1, 2, 1, 1))
    )
    with pytest.raises(NotFoundError, match="no pixel to class 1"):
        Tiled(saliency.VanillaGradient(model), size=32, overlap=8).attribute(noise(40, 40), saliency.region(1))


@pytest.mark.parametrize(
    ("mask", "match"),
    [
        (torch.ones(30, 40), r"the region has shape \(30, 40\); with Tiled, expected \(40, 40\)"),
        (torch.zeros(40, 40), "no pixel of the image"),
    ],
)
def test_a_wrong_mask_is_refused_before_the_first_tile(mask: Tensor, match: str) -> None:
    model = Recorded().double()
    with pytest.raises(NotFoundError, match=match):
        Tiled(saliency.VanillaGradient(model), size=32, overlap=8).attribute(noise(40, 40), saliency.region(1, mask))
    assert not model.shapes


def test_a_warning_comes_once_for_all_tiles_whatever_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saliency.attribution.tiles.chunk_size", lambda x: 1)

    class Numbered(saliency.VanillaGradient):
        """A method that warns with a number; without a name, it stays out of the registry."""

        name = ""

        def explain_gradients(self, grads: Any, layers: tuple[str, ...]) -> Any:
            warn(f"the largest score is {grads.scores.max()}")
            return super().explain_gradients(grads, layers)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            Tiled(Numbered(PooledNet().double()), size=24, overlap=8).attribute(noise(60, 60), 1)
    assert len(caught) == 2  # one for each call
