"""How a picture is cut into segments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from saliency.errors import MethodError
from saliency.io.inputs import open_image
from saliency.io.preprocess import Preprocess
from saliency.methods.occlusion import FeatureAblation
from saliency.methods.segments import resolve_segments, segmented
from tests.games import Linear, noise, picture

CAT = Path(__file__).parents[2] / "assets" / "chelsea.jpg"
PREPROCESS = Preprocess(size=(224, 224), resize=256)


def connected(labels: Tensor) -> bool:
    """Whether every part is one piece."""
    from scipy.ndimage import label

    return all(label(labels.numpy() == each)[1] == 1 for each in range(int(labels.max()) + 1))


def test_superpixels_of_a_photo_follow_it_and_are_about_as_many_as_asked() -> None:
    photo = open_image(CAT)
    x = PREPROCESS(photo)[None]
    made = segmented(x, 50, PREPROCESS)
    assert 35 <= made.count <= 65
    assert connected(made.labels)
    colours = PREPROCESS.denormalise(x)[0]  # (3, H, W)
    grid = segmented(x, (7, 7))

    def left(parts: Any) -> float:  # the variance within the parts
        means = torch.stack([colours[:, parts.labels == each].mean(1) for each in range(parts.count)])
        return float((colours - means[parts.labels].permute(2, 0, 1)).square().mean())

    assert left(made) < 0.8 * left(grid)


def test_superpixels_do_not_depend_on_how_the_picture_is_normalised() -> None:
    photo = open_image(CAT)
    other = Preprocess(size=(224, 224), resize=256, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
    first = segmented(PREPROCESS(photo)[None].double(), 30, PREPROCESS)
    second = segmented(other(photo)[None].double(), 30, other)
    assert float((first.labels == second.labels).double().mean()) > 0.97
    plain = segmented(other(photo)[None].double(), 30)  # no preprocessing known: the tensor, stretched
    assert 15 <= plain.count <= 40


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (1, 9), (12, 20)])
@pytest.mark.parametrize("by", [1, 4, 50, (3, 3), (40, 2)])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_every_pixel_of_any_picture_is_in_one_segment(size: tuple[int, int], by: Any, channels: int) -> None:
    for x in (noise(1, channels, *size), torch.zeros(1, channels, *size, dtype=torch.float64)):
        made = segmented(x, resolve_segments("segments", by))
        assert made.labels.shape == size
        assert made.labels.flatten().bincount().tolist() == made.sizes.tolist()
        assert (made.count, bool(made.sizes.all())) == (len(made.sizes), True)
        assert int(made.sizes.sum()) == size[0] * size[1]


def test_a_map_of_values_sums_to_them() -> None:
    made = segmented(picture(), resolve_segments("segments", noise(8, 10).mul(2).long()))
    values = noise(made.count, seed=4)
    painted = made.painted(values)
    for each in range(made.count):
        torch.testing.assert_close(painted[0][made.labels == each].sum(), values[each])


def test_a_function_segments_the_picture_that_the_model_sees() -> None:
    came: list[Any] = []

    def halves(picture: Any) -> Any:
        came.append(picture)
        labels = np.zeros(picture.shape[:2], dtype=np.int32)
        labels[:, 5:] = -3
        return labels

    found = FeatureAblation(Linear(), segments=halves).attribute(picture(), 0)
    assert came[0].shape == (8, 10, 3)
    assert (came[0].min(), came[0].max()) == (0.0, 1.0)
    assert len(set(found.values.flatten().tolist())) == 2
    assert found.settings["segments"] == "halves"
    labels = halves(came[0])
    assert FeatureAblation(Linear(), segments=labels).settings["segments"] == "labels"
    again = FeatureAblation(Linear(), segments=labels).attribute(picture(), 0)
    assert torch.equal(again.values, found.values)


@pytest.mark.parametrize(
    "segments",
    [
        0,
        -1,
        2.5,
        True,
        (3,),
        (0, 3),
        "slic",
        None,
        torch.zeros(8, 10),
        torch.zeros(1, 2, 8, 10).long(),
        np.zeros((0, 3), int),
    ],
)
def test_what_is_no_segmentation_is_refused(segments: Any) -> None:
    with pytest.raises(MethodError, match="segment"):
        FeatureAblation(Linear(), segments=segments)


@pytest.mark.parametrize(
    "segments",
    [
        torch.zeros(8, 9).long(),
        torch.zeros(2, 8, 10).long(),
        (2, 2, 2),
        lambda picture: np.zeros((3, 3), int),
        lambda picture: picture,
    ],
)
def test_a_map_that_does_not_fit_is_refused(segments: Any) -> None:
    with pytest.raises(MethodError, match="segments"):
        FeatureAblation(Linear(), segments=segments).attribute(picture(), 0)
