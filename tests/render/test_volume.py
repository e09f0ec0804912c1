"""Figures of volumes and videos."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import saliency
from saliency import Explanation
from saliency.attribution.explanation import heatmap
from saliency.errors import RenderError
from saliency.render.scaling import color_table, smoothed
from saliency.validation import Sign
from tests.drawing import explained

SIZE = (4, 6, 8)
PEAK = (2, 5, 1)
SLICES: Any = saliency.slices  # also takes arguments of wrong types


def volume_map(values: torch.Tensor, sign: Sign = "positive") -> Explanation:
    """An explanation of one volume of SIZE with values (C, d, h, w)."""
    return replace(explained(values, None, sign), input_size=SIZE)


def hot() -> torch.Tensor:
    values = torch.zeros(1, *SIZE)
    values[(0, *PEAK)] = 3.0
    return values


def panels(drawing: Any) -> list[Any]:
    """The axes with an image, without the colour bar."""
    return [axes for axes in drawing.axes if axes.images and axes.get_title()]


def pixels(axes: Any) -> Any:
    return np.asarray(axes.images[0].get_array())


def grey(volume: torch.Tensor, index: int) -> Any:
    """The grey values of a slice along the first axis, for a volume of few values at the ends of its range."""
    low, high = volume.min(), volume.max()
    return (255 * (volume[index] - low) / (high - low)).round().byte().numpy()


def test_slices_meet_in_the_maximum_and_are_named_and_counted_from_zero() -> None:
    found = panels(saliency.slices(volume_map(hot())))
    names = ["depth, slice 2 of 4", "height, slice 5 of 6", "width, slice 1 of 8"]
    assert [axes.get_title() for axes in found] == names
    brightest = color_table("inferno")[255]
    for axes, (row, column) in zip(found, ((5, 1), (2, 1), (2, 5)), strict=True):
        assert np.argwhere((pixels(axes) == brightest).all(2)).tolist() == [[row, column]]
        across, down = axes.lines
        assert set(across.get_ydata()) == {row}
        assert set(down.get_xdata()) == {column}


def test_the_maximum_of_a_coarse_or_clipped_map_is_the_maximum_of_its_heatmap() -> None:
    values = torch.rand(1, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    for explanation in (volume_map(values), replace(volume_map(values), layer="features")):
        maps = heatmap(explanation)[0]
        point = [int(index) for index in torch.unravel_index(maps.argmax(), maps.shape)]
        titles = [axes.get_title() for axes in panels(saliency.slices(explanation))]
        assert [title.split(" ")[2] for title in titles] == list(map(str, point))


def test_all_slices_have_one_scale_and_one_bar_in_the_units_of_the_map() -> None:
    values = torch.zeros(1, *SIZE)
    values[0, :, 0, 0] = torch.tensor([1.0, -2.0, 4.0, 0.0])
    drawing = saliency.montage(volume_map(values, "signed"))
    colors = color_table("bwr", centred=True)
    for axes, entry in zip(panels(drawing), (160, 64, 255, 128), strict=True):
        assert (pixels(axes)[0, 0].astype(int) - colors[entry]).max() <= 2
    (bar,) = (axes for axes in drawing.axes if not axes.get_title())
    assert bar.get_xlim() == (-4, 4)
    assert bar.get_xlabel() == "made_up value"


def test_the_volume_is_grey_below_the_map_and_unchanged_where_the_map_is_zero() -> None:
    volume = torch.randint(2, SIZE, generator=torch.Generator().manual_seed(0)).double() * 40 - 1000
    for given in (volume, volume.numpy(), volume[None, None]):
        for index, axes in enumerate(panels(saliency.montage(volume_map(hot()), given))):
            same = pixels(axes) == grey(volume, index)[..., None]
            assert same.all(2).sum() == same[..., 0].size - (index == PEAK[0])
    colors = torch.stack([volume, volume.flip(0), volume])
    top = pixels(panels(saliency.montage(volume_map(hot()), colors))[0])
    assert np.array_equal(top, np.stack([grey(part, 0) for part in colors], -1))


def test_voxels_without_a_value_are_black() -> None:
    volume = torch.linspace(0, 1, 192).view(SIZE)
    holed = volume.clone()
    holed[:, 0] = torch.nan  # outside the field of view
    drawn, holed_drawn = (pixels(panels(saliency.slices(volume_map(hot()), v))[0]) for v in (volume, holed))
    assert not holed_drawn[0].any()
    assert np.abs(drawn[1:5].astype(int) - holed_drawn[1:5]).max() < 12  # the window is nearly the same


def test_a_volume_is_any_array_of_a_scan() -> None:
    volume = np.linspace(0, 1, 192, dtype=np.float32).reshape(SIZE)
    expected = pixels(panels(saliency.slices(volume_map(hot()), torch.from_numpy(volume)))[0])
    flipped = volume[::-1].copy()[::-1]  # as after a change of orientation
    fixed = volume.copy()
    fixed.flags.writeable = False  # as of a file in memory
    for given in (flipped, fixed, volume.astype(">f4")):
        assert np.array_equal(pixels(panels(saliency.slices(volume_map(hot()), given))[0]), expected)


def test_a_montage_is_evenly_spaced_with_the_slice_of_the_maximum() -> None:
    def places(**options: Any) -> list[int]:
        drawn = panels(saliency.montage(volume_map(hot()), **options))
        return [int(axes.get_title().split(" ")[1]) for axes in drawn]

    assert places() == [0, 1, 2, 3]
    assert places(axis=2) == list(range(8))
    assert places(axis=2, count=3) == [1, 4, 6]
    assert places(axis=1, count=2) == [1, 5]
    assert places(count=1) == [2]


def test_voxels_have_the_proportions_of_the_spacing() -> None:
    drawing = saliency.slices(
        volume_map(hot()), spacing=(5, 1, 2), index=(0, 0, 0), names=("axial", "coronal", "sagittal")
    )
    assert [axes.get_aspect() for axes in panels(drawing)] == [0.5, 2.5, 5]
    assert panels(drawing)[1].get_title() == "coronal, slice 0 of 6"
    assert panels(saliency.montage(volume_map(hot()), axis=1, spacing=(5, 1, 2)))[0].get_aspect() == 2.5


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda e: saliency.slices(e, torch.zeros(4, 6, 7)), r"\(4, 6, 7\); expected \(4, 6, 8\)"),
        (lambda e: saliency.slices(e, torch.zeros(2, *SIZE)), r"expected \(4, 6, 8\) in grey, or \(3, ...\) in colour"),
        (lambda e: saliency.slices(e, index=(0, 6, 0)), r"index=\(0, 6, 0\) is not one index for each axis"),
        (lambda e: saliency.slices(e, index=(0, 0)), r"index=\(0, 0\) is not one index"),
        (lambda e: SLICES(e, index=(0.5, 0, 0)), r"index=\(0.5, 0, 0\) is not one index"),
        (lambda e: SLICES(e, index=2), "index=2 is not one index"),
        (lambda e: saliency.slices(e, names=("axial", "coronal")), "are not the names of three axes"),
        (lambda e: saliency.slices(e, spacing=(1, 0, 1)), "is not the size of a voxel"),
        (lambda e: SLICES(e, spacing=2.0), "is not the size of a voxel"),
        (lambda e: SLICES([e]), "takes an Explanation, the result of attribute.*; got list"),
        (lambda e: saliency.montage(e, axis=3), "axis=3 is not one of 0, 1, 2"),
        (lambda e: saliency.montage(e, count=0), "count=0 is not a whole number"),
        (lambda e: saliency.montage(replace(e, input_size=(6, 8))), "got 1 explanation of inputs of 6 x 8; .*overlay"),
        *(
            (lambda e, draw=draw: draw(e), r"slices\(explanation, volume\)")
            for draw in (saliency.overlay, saliency.cutout)
        ),
        (lambda e: saliency.overlay(e, Image.new("RGB", (8, 6))), r"slices\(explanation, volume\)"),
        (lambda e: saliency.figure(e, shared=True), r"slices\(explanation, volume\)"),
        (lambda e: saliency.contact_sheet([[e]]), r"slices\(explanation, volume\)"),
    ],
)
def test_a_mistake_is_named_in_one_sentence(draw: Callable[[Explanation], Any], message: str) -> None:
    with pytest.raises(RenderError, match=message):
        draw(volume_map(hot()))


def test_a_notebook_shows_the_slices_of_one_volume() -> None:
    png = volume_map(hot())._repr_png_()
    assert png is not None
    with Image.open(io.BytesIO(png)) as read:
        assert read.width > read.height


def test_maps_of_volumes_are_smoothed_along_all_axes() -> None:
    maps = torch.randn(2, 5, 6, 60, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    flat = torch.stack([smoothed(each, 0.01) for each in maps.unbind(1)], 1)  # along height and width
    deep = smoothed(maps, 0.01)
    assert not torch.allclose(deep, flat)
    constant = maps[:, :1].expand(-1, 5, -1, -1)
    assert torch.allclose(smoothed(constant, 0.01)[:, 0], smoothed(maps[:, 0], 0.01))
