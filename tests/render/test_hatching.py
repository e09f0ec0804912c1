"""Patches whose tokens have an outlying norm are hatched, and affect neither the scale nor the colours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import saliency
from saliency import Explanation, Preprocess, contact_sheet, cutout, figure, overlay
from saliency.errors import SaliencyWarning
from saliency.io.geometry import Frame
from saliency.methods.token_attention import TokenAttention
from saliency.render.overlay import Opacity
from saliency.render.scaling import shared_limit
from saliency.testing import tiny_transformer
from tests.batchwork import photos, quick
from tests.drawing import explained, noise, pixels_of, whole

ROW, COLUMN = 1, 2


def marks() -> Tensor:
    outliers = torch.zeros(1, 4, 5, dtype=torch.bool)
    outliers[0, ROW, COLUMN] = True
    return outliers


def hatched(frame: Frame, *, zeroed: bool = False) -> Explanation:
    """Return an explanation whose largest value by far is at an outlier; with a plain zero there if `zeroed`.

    Another value is zero, so the colours begin at zero.
    """
    values = torch.rand(1, 4, 5, generator=torch.Generator().manual_seed(1))
    values[0, 0, 0] = 0
    values[0, ROW, COLUMN] = 0 if zeroed else 50
    return explained(values, frame).with_evidence(outliers=None if zeroed else marks())


@pytest.mark.parametrize("opacity", ["map", 0.6])
@pytest.mark.parametrize("tone", [0, 255])
def test_a_marked_cell_has_stripes_and_the_others_the_colours_of_a_map_with_zero_there(
    opacity: Opacity, tone: int
) -> None:
    frame = Frame(Image.new("RGB", (301, 203), (tone,) * 3), (20.3, 11.0, 271.7, 190.5))
    drawn = pixels_of(overlay(hatched(frame), opacity=opacity)).astype(int)
    plain = pixels_of(overlay(hatched(frame, zeroed=True), opacity=opacity)).astype(int)
    y, x = np.mgrid[:203, :301] + 0.5
    rows, columns = np.floor((y - 11.0) / (179.5 / 4)), np.floor((x - 20.3) / (251.4 / 5))
    cell = (rows == ROW) & (columns == COLUMN)
    assert np.array_equal(drawn[~cell], plain[~cell])
    strength = 0.8 if opacity == "map" else float(opacity)
    stripe = abs(tone - round(255 * strength))  # one of black and white is visible on the image
    assert {tuple(color) for color in drawn[cell].tolist()} == {(tone,) * 3, (stripe,) * 3}
    assert 0.1 < (drawn[cell] == stripe).mean() < 0.25


def test_at_opacity_0_a_marked_cell_is_the_image() -> None:
    picture = noise(60, 40)
    assert np.array_equal(pixels_of(overlay(hatched(whole(picture)), opacity=0)), pixels_of(picture))


def test_the_floor_of_a_map_is_that_of_its_other_cells() -> None:
    """The colours equal the colours of the map minus the minimum of its other cells, with zero at the outlier."""
    raised, plain = (hatched(whole(noise(60, 40)), zeroed=zeroed) for zeroed in (False, True))
    raised = replace(raised, values=raised.values + 3)
    y, x = np.mgrid[:40, :60]
    others = (y // 10 != ROW) | (x // 12 != COLUMN)
    assert np.abs(pixels_of(overlay(raised)).astype(int) - pixels_of(overlay(plain)))[others].max() <= 1


def test_marks_that_are_all_false_change_nothing() -> None:
    alone = hatched(whole(noise(60, 40)), zeroed=True)
    unmarked = alone.with_evidence(outliers=torch.zeros(1, 4, 5, dtype=torch.bool))
    assert np.array_equal(pixels_of(overlay(alone)), pixels_of(overlay(unmarked)))
    assert np.array_equal(pixels_of(contact_sheet([[alone]])), pixels_of(contact_sheet([[unmarked]])))


def test_marked_cells_count_as_zero_for_the_scale_and_for_cutouts() -> None:
    marked, zeroed = (hatched(whole(noise(60, 40)), zeroed=zero) for zero in (False, True))
    assert shared_limit(marked) == shared_limit(zeroed) <= 1
    assert np.array_equal(pixels_of(cutout(marked)), pixels_of(cutout(zeroed)))
    assert saliency.heatmap(marked).max() > 10


def test_a_map_of_marked_cells_alone_says_so() -> None:
    alone = replace(hatched(whole(noise(60, 40))), values=50.0 * marks()[None])
    with pytest.warns(SaliencyWarning, match="except at tokens with an outlying norm"):
        overlay(alone)


def test_thumbnails_and_figures_are_hatched_and_say_what_it_means() -> None:
    frame = Frame(Image.new("RGB", (300, 200), "black"), (50.0, 0.0, 250.0, 200.0))
    sheet, plain = (pixels_of(contact_sheet([[hatched(frame, zeroed=zero)]], thumb=240)) for zero in (False, True))
    end = len(plain) - 240 // 9  # the lower margin
    assert (plain[end:] == 255).all()
    assert (sheet[end:] != 255).any()
    rows, columns, _ = np.nonzero(sheet[:end] != plain[:end])
    size = 240 / 300 * np.array([200 / 4, 200 / 5])
    assert np.abs([np.ptp(rows) + 1, np.ptp(columns) + 1] - size).max() <= 2
    bars = [axes.child_axes[0].get_xlabel() for axes in figure(hatched(frame)).axes if axes.child_axes]
    assert bars == ["made_up value\nhatched: tokens with an outlying norm"]


def test_saved_and_stored_maps_are_drawn_again_with_the_same_stripes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    explanation = hatched(whole(noise(60, 40)))
    loaded = Explanation.load(explanation.save(tmp_path / "map.safetensors"))
    assert np.array_equal(pixels_of(overlay(loaded)), pixels_of(overlay(explanation)))

    photos(tmp_path / "photos", 1)
    model: Any = tiny_transformer()
    model.preprocess = Preprocess(size=(16, 20), resize=None, mean=(0.5,) * 3, std=(0.5,) * 3)
    monkeypatch.setattr(TokenAttention, "outliers", marks())
    quick(tmp_path / "photos", tmp_path / "run", model=model, methods=("attention_rollout",), maps=True)
    (drawn,) = (tmp_path / "run").rglob("00.attention_rollout.png")
    (saved,) = (tmp_path / "run").rglob("00.attention_rollout.safetensors")
    second = pixels_of(overlay(Explanation.load(saved), tmp_path / "photos" / "00.png"))
    with Image.open(drawn) as first:
        assert np.abs(pixels_of(first).astype(int) - second).max() <= 3
    assert (second.reshape(-1, 3) >= 204).all(axis=1).any()
    (heat,) = (tmp_path / "run").rglob("00.attention_rollout.webp")
    with Image.open(heat) as picture:
        cell = pixels_of(
            picture.crop((picture.width * 2 // 5, picture.height // 4, picture.width * 3 // 5, picture.height // 2))
        )
        opaque = cell[cell[..., 3] > 200][:, :3]
        assert opaque.max() > 200
        assert opaque.min() < 80
