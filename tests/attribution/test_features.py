"""Dense features: cosines and principal components by NumPy, the layer, the cell of a point, and outlier tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

import saliency
from saliency import Features
from saliency.errors import ImageError, LayerError, NonFiniteError, NotApplicableError, RenderError, TargetError
from saliency.io.geometry import Frame
from saliency.testbed import draw_scenes
from saliency.testing import Snapshot, images, tiny_model, tiny_transformer

Array = NDArray[np.float64]


def scenes(count: int = 3) -> Any:
    return draw_scenes(count, seed=1_000_003).images


def numpy_colors(values: Tensor, shown: NDArray[np.bool_]) -> Array:
    """The colours (N, h, w, 3) of the cells of a foreground, by an SVD."""
    cells = values.movedim(1, -1).double().numpy()
    centred = cells[shown] - cells[shown].mean(0)
    weights = np.linalg.svd(centred, full_matrices=False)[2][:3]
    weights *= np.sign(weights[np.arange(3), np.abs(weights).argmax(1)])[:, None]
    scores = centred @ weights.T
    colors = np.zeros((*shown.shape, 3))
    colors[shown] = 1 / (1 + np.exp(-2 * scores / scores.std(0)))
    return colors


def numpy_foreground(values: Tensor) -> NDArray[np.bool_]:
    """The part of the first component with fewer cells at the border, by trying every threshold."""
    cells = values.movedim(1, -1).double().numpy()
    flat = cells.reshape(-1, cells.shape[-1])
    centred = flat - flat.mean(0)
    first = (centred @ np.linalg.svd(centred, full_matrices=False)[2][0]).reshape(cells.shape[:3])
    inside = [
        (first <= cut).sum() * first[first <= cut].var() + (first > cut).sum() * first[first > cut].var()
        for cut in np.sort(first, axis=None)[:-1]
    ]
    high = first > np.sort(first, axis=None)[int(np.argmin(inside))]
    border = np.ones(first.shape, bool)
    border[:, 1:-1, 1:-1] = False
    found: NDArray[np.bool_] = high if border[high].mean() <= border[~high].mean() else ~high
    return found


@pytest.mark.parametrize(
    ("name", "layer", "shape"), [("shapes_vit", "norm", (64, 8, 8)), ("shapes_unet", "decoder.2", (16, 64, 64))]
)
def test_similarities_and_components_are_those_of_numpy(name: str, layer: str, shape: tuple[int, ...]) -> None:
    model, pictures = saliency.load(name), scenes()
    before = Snapshot(model=model)
    found = saliency.features(model, pictures)
    assert not before.changes()
    assert (found.layer, tuple(found.values.shape[1:])) == (layer, shape)
    outputs: list[Tensor] = []
    handle = model.get_submodule(layer).register_forward_hook(lambda module, inputs, output: outputs.append(output))
    with torch.no_grad():
        model.eval()(saliency.GradCAM(model).read(pictures).inputs)
    handle.remove()
    by_hand = outputs[0][:, 5:].mT.reshape(3, 64, 8, 8) if name == "shapes_vit" else outputs[0]
    torch.testing.assert_close(found.values, by_hand)

    cells = by_hand.double().numpy()
    row, column = 33 * shape[1] // 64, 20 * shape[2] // 64
    for query, explanation in (
        (cells[1, :, row, column], found.similarity((20, 33), 1)),
        (cells[2].mean((1, 2)), found.similarity(image=2)),
    ):
        cosine = np.einsum("nkhw,k->nhw", cells, query) / np.linalg.norm(cells, axis=1) / np.linalg.norm(query)
        np.testing.assert_allclose(explanation.values[:, 0], cosine, atol=1e-5)
    assert found.similarity((20, 33), 1).target_names[0] == "similarity to (20, 33) of image 1"
    assert float(found.similarity((20, 33), 1).values[1, 0, row, column]) == pytest.approx(1)

    foreground = numpy_foreground(found.values)
    np.testing.assert_allclose(found.pca().movedim(1, -1), numpy_colors(found.values, foreground), atol=1e-4)
    assert 0 < foreground.mean() < 0.5
    whole = numpy_colors(found.values, np.ones_like(foreground))
    np.testing.assert_allclose(found.pca(foreground=False).movedim(1, -1), whole, atol=1e-4)


def test_colours_have_one_scale_over_all_images_and_do_not_depend_on_the_sign_of_the_components() -> None:
    values = torch.randn(4, 6, 5, 7, generator=torch.Generator().manual_seed(1))
    whole = Features(values, "a", (50, 70), (None,) * 4)
    turned = Features(values.flip(0), "a", (50, 70), (None,) * 4)
    torch.testing.assert_close(whole.pca(foreground=False), turned.pca(foreground=False).flip(0))
    split = [Features(part, "a", (50, 70), (None,) * 2).pca(foreground=False) for part in torch.split(values, 2)]
    assert not torch.allclose(torch.cat(split), whole.pca(foreground=False), atol=0.1)


def test_the_foreground_lies_on_the_objects() -> None:
    drawn = draw_scenes(12, seed=1_000_003)
    colors = saliency.features(saliency.load("shapes_unet"), drawn.images).pca()
    shown, objects = colors.any(1), drawn.masks if drawn.masks.dim() == 3 else drawn.masks.any(1)
    assert shown[objects].float().mean() > 2 * shown[~objects].float().mean()


class Headless(nn.Module):
    """A backbone whose output is its coarsest map of features."""

    def __init__(self, pack: Any) -> None:
        super().__init__()
        self.stem, self.body, self.pack = nn.Conv2d(3, 8, 4, 4), nn.Conv2d(8, 12, 2, 2), pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(self.body(self.stem(x).relu()))


@pytest.mark.parametrize("pack", [lambda maps: maps, lambda maps: {"last_hidden_state": maps, "pooled": maps.mean()}])
def test_the_default_layer_is_the_last_of_the_features(pack: Any) -> None:
    found = saliency.features(Headless(pack), images(2, (16, 32)))
    assert (found.layer, tuple(found.values.shape)) == ("body", (2, 12, 2, 4))
    assert saliency.features(tiny_model(), images(2)).layer == "relu"
    assert saliency.features(tiny_transformer(), images(1, (16, 24))).values.shape == (1, 8, 4, 6)
    model = tiny_model()
    assert torch.equal(
        saliency.features(model, images(1), "down").values,
        saliency.features(model, images(1), model.get_submodule("down")).values,
    )


def test_a_point_is_in_pixels_of_the_original_image() -> None:
    picture = Image.new("RGB", (100, 50), "black")
    picture.paste("white", (60, 20, 70, 30))
    preprocess = saliency.Preprocess(size=(16, 16), resize=16)  # sees x 25 to 75
    found = saliency.features(nn.Conv2d(3, 4, 4, 4), picture, "", preprocess=preprocess)
    similar = found.similarity((65, 25))
    assert int(similar.values.flatten().argmax()) == 2 * 4 + 3  # 40 of 50 pixels of the crop, 25 of 50 down
    for point in ((24, 10), (76, 10), (50, 51), (50, -1)):
        with pytest.raises(TargetError, match=r"outside the part of image 0 that the model sees, x 25 to 75 and y 0"):
            found.similarity(point)
    whole = saliency.features(nn.Conv2d(3, 4, 4, 4), picture, "", preprocess=preprocess, whole="aspect")
    assert whole.values.shape == (1, 4, 4, 8)
    assert int(whole.similarity((99.5, 49.5)).values.flatten().argmax()) in range(32)


def test_outlier_tokens_are_masked_as_in_methods_of_attention() -> None:
    model, x = tiny_transformer(), images(2)
    x[0, :, 4:8, 8:12] *= 50
    found = saliency.features(model, x)
    expected = saliency.AttentionRollout(model).attribute(x, 1).outliers
    assert found.outliers is not None
    assert expected is not None
    assert torch.equal(found.outliers, expected)
    assert found.outliers[0, 1, 2]
    assert not found.pca().any(1)[found.outliers].any()
    assert found.similarity((1, 1)).outliers is found.outliers
    shown = numpy_colors(found.values, ~expected.numpy())
    np.testing.assert_allclose(found.pca(foreground=False).movedim(1, -1), shown, atol=1e-5)
    mean = found.values[0][:, ~expected[0]].mean(1)
    cosine = torch.cosine_similarity(found.values, mean[None, :, None, None])
    torch.testing.assert_close(found.similarity().values[:, 0], cosine)
    assert saliency.features(tiny_model(), x).outliers is None


def test_similarities_are_drawn_as_any_explanation() -> None:
    pictures = list(scenes())
    found = saliency.features(saliency.load("shapes_vit"), pictures)
    similar = found.similarity((20, 33), 1)
    assert [drawing.size for drawing in saliency.overlay(list(similar))] == [(64, 64)] * 3
    assert saliency.contact_sheet([[one] for one in similar], shared=True).width > 64
    assert len(saliency.figure(similar).axes) == 6
    assert saliency.heatmap(similar).shape == (3, 64, 64)


def test_the_figure_has_the_image_and_the_components_of_each_image() -> None:
    model, pictures = saliency.load("shapes_vit"), list(scenes(2))
    found = saliency.features(model, pictures)
    drawn = [np.asarray(axes.images[0].get_array()) for axes in saliency.figure(found, foreground=False).axes]
    assert len(drawn) == 4
    cells = (255 * found.pca(foreground=False)).round().byte().movedim(1, -1)
    for number, picture in enumerate(pictures):
        np.testing.assert_array_equal(drawn[number], np.moveaxis(np.asarray(picture), 0, -1))
        np.testing.assert_array_equal(drawn[2 + number], cells[number].repeat_interleave(8, 0).repeat_interleave(8, 1))
    with pytest.raises(RenderError, match="there is no image to draw on"):
        saliency.figure(saliency.features(model, images(1, (64, 64))))


def test_wrong_arguments_are_one_error() -> None:
    model, x = tiny_model(), images(2)
    with pytest.raises(LayerError, match='no layer "layer4"'):
        saliency.features(model, x, "layer4")
    with pytest.raises(LayerError, match="no spatial extent"):
        saliency.features(model, x, "head")
    with pytest.raises(LayerError, match="no layer of Sequential has a spatial output"):
        saliency.features(nn.Sequential(nn.Flatten(), nn.Linear(768, 4)), x)
    with pytest.raises(ImageError, match="no preprocessing"):
        saliency.features(model, Image.new("RGB", (20, 20)))
    broken = tiny_model()
    nn.init.constant_(broken.get_parameter("last.bias"), float("nan"))
    with pytest.raises(NonFiniteError, match='features of layer "relu" are NaN'):
        saliency.features(broken, x)
    with pytest.raises(NotApplicableError, match="images of two spatial axes, and the input has 3"):
        saliency.features(nn.Conv3d(1, 4, 3), torch.zeros(1, 1, 4, 4, 4))
    found = saliency.features(model, x)
    assert repr(found) == f"<Features of 2 images at relu, values {tuple(found.values.shape)}>"
    with pytest.raises(TargetError, match="point="):
        found.similarity((1, 2, 3))
    with pytest.raises(IndexError):
        found.similarity(image=2)
    with pytest.raises(LayerError, match="2 channels and 128 cells; expected at least 3 channels"):
        Features(found.values[:, :2], "last", (16, 16), (None, None)).pca()


def planted_parts(shift: float) -> tuple[Features, torch.Tensor]:
    """Two images whose left, middle and right cells have features of their own, around a shift of any sign."""
    random = torch.Generator().manual_seed(0)
    vectors, labels = torch.randn(3, 16, generator=random) + shift, torch.arange(12) // 4
    labels = torch.stack([labels, labels.flip(0)]).unsqueeze(1).expand(-1, 8, -1)  # (2, 8, 12)
    noise = 0.05 * torch.randn(2, 8, 12, 16, generator=random)
    return Features((vectors[labels] + noise).movedim(-1, 1), "layer", (64, 96), (None, None)), labels


def require_one_to_one(parts: torch.Tensor, labels: torch.Tensor) -> None:
    pairs = set(zip(parts.flatten().tolist(), labels.flatten().tolist(), strict=True))
    assert len(pairs) == len({part for part, _ in pairs}) == len({label for _, label in pairs}) == 3


@pytest.mark.parametrize("shift", [0.0, -1.0])
def test_parts_are_the_cells_with_the_same_features_in_all_images(shift: float) -> None:
    features, labels = planted_parts(shift)
    parts = features.parts(3)
    assert [part.target_names[0] for part in parts] == ["part 1 of 3", "part 2 of 3", "part 3 of 3"]
    maps = torch.stack([part.values[:, 0] for part in parts])  # (3, 2, 8, 12)
    assert maps.min() >= 0
    assert maps.amax((1, 2, 3)).tolist() == pytest.approx([1, 1, 1])
    require_one_to_one(maps.argmax(0), labels)
    assert torch.equal(parts[0].values, features.parts(3)[0].values)
    assert saliency.heatmap(parts[0]).shape == (2, 64, 96)


def test_each_part_is_drawn_in_a_colour_of_its_own() -> None:
    features, labels = planted_parts(0.0)
    gray = Frame(Image.new("RGB", (96, 64)), (0, 0, 96, 64))
    axes = saliency.figure(replace(features, frames=(gray, gray)), parts=3).axes
    drawn = [np.asarray(each.images[0].get_array())[4::8, 4::8] for each in axes[2:]]  # the pixel in each cell's middle
    require_one_to_one(torch.tensor(np.stack(drawn).argmax(-1)), labels)  # red, green and blue


def test_parts_leave_out_outliers_and_need_as_many_cells() -> None:
    features, _ = planted_parts(0.0)
    outliers = torch.zeros(2, 8, 12, dtype=torch.bool)
    outliers[0, 0, 0] = True
    assert all(part.values[0, 0, 0, 0] == 0 for part in replace(features, outliers=outliers).parts(2))
    with pytest.raises(LayerError, match="192 cells for 500 parts"):
        features.parts(500)
