"""The promises of contact sheets and figures."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from saliency import contact_sheet, figure, overlay, shared_limit
from saliency.attribution.explanation import Explanation
from saliency.errors import RenderError, SaliencyWarning
from saliency.io.geometry import Frame
from saliency.io.inputs import read
from saliency.io.preprocess import Preprocess
from saliency.render.sheet import ellipsised, font_for, wrapped
from saliency.targets.question import QuestionFacts
from tests.drawing import explained, hot, noise, pixels_of, whole


def rows_of(sizes: Sequence[tuple[int, int]], methods: Sequence[str]) -> list[list[Explanation]]:
    return [
        [explained(torch.randn(1, 7, 7), whole(noise(*size)), "signed", method=method) for method in methods]
        for size in sizes
    ]


@pytest.mark.parametrize("thumb", [64, 240])
def test_a_sheet_holds_every_photo_and_every_method(thumb: int) -> None:
    sheet = contact_sheet(rows_of([(60, 40), (40, 60), (50, 50)], ["grad_cam", "layer_cam"]), thumb=thumb)
    assert sheet.mode == "RGB"
    width, height = sheet.size
    assert 3 * thumb < width < 5.5 * thumb
    assert thumb * (2 / 3 + 1 + 1) < height < thumb * (2 / 3 + 1 + 1) + 1.2 * thumb
    filled = (pixels_of(sheet) != 255).any(axis=2).mean()
    assert 0.4 < filled < 0.95


def test_the_first_cell_of_a_sheet_is_the_photo() -> None:
    red = Image.new("RGB", (100, 100), (200, 0, 0))
    sheet = pixels_of(contact_sheet([[explained(torch.rand(1, 7, 7), whole(red))]], thumb=100))
    rows, columns = np.nonzero((sheet == (200, 0, 0)).all(axis=2))
    assert (int(np.ptp(rows)), int(np.ptp(columns))) == (99, 99)
    assert len(rows) == 100 * 100


@pytest.mark.parametrize("size", [(2000, 3), (3, 2000), (1, 1), (5, 4)])
def test_a_sheet_takes_photos_of_any_shape(size: tuple[int, int]) -> None:
    preprocess = Preprocess(size=(64, 64), resize=64, mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bilinear")
    thin = explained(torch.rand(3, 64, 64), Frame(noise(*size), preprocess.box(size)))
    assert contact_sheet([[thin]], thumb=96).width > 2 * 96
    assert contact_sheet(rows_of([size, (40, 30)], ["grad_cam"]), thumb=96).width > 2 * 96


def test_a_column_on_one_scale_shows_the_weaker_photo_darker() -> None:
    photo = whole(Image.new("RGB", (50, 50)))
    ramp = torch.arange(4.0).view(1, 2, 2)
    rows = [[explained(ramp, photo)], [explained(ramp * 100, photo)]]
    own, shared = (pixels_of(contact_sheet(rows, opacity=1, shared=each)).astype(int) for each in (False, True))
    half = own.shape[0] // 2
    assert own[:half].sum() > shared[:half].sum()  # the upper row is the weak one
    assert np.array_equal(own[half + 20 :], shared[half + 20 :])


@pytest.mark.parametrize("shared", [False, True])
def test_a_thumbnail_is_the_overlay_in_its_size(shared: bool) -> None:
    values = torch.randn(3, 224, 224, generator=torch.Generator().manual_seed(0))
    explanation = explained(values, whole(noise(300, 200)), "signed")
    limit = shared_limit(explanation) if shared else None
    expected = pixels_of(overlay(explanation, size=120, limit=limit))
    sheet = pixels_of(contact_sheet([[explanation]], thumb=120, shared=shared))
    left = sheet.shape[1] - 120 - 120 // 9  # without the margin
    assert any(np.array_equal(sheet[top : top + 80, left : left + 120], expected) for top in range(sheet.shape[0] - 80))


def test_a_row_of_several_classes_names_each_below_its_drawing() -> None:
    photo = whole(noise(50, 50))
    same = [explained(torch.rand(1, 7, 7), photo, name="tabby") for _ in range(2)]
    differ = [same[0], replace(same[1], questions=(QuestionFacts("tiger cat", 7),))]
    assert contact_sheet([differ]).height > contact_sheet([same]).height
    assert contact_sheet([differ]).width < contact_sheet([same]).width


def test_a_sheet_without_probabilities_or_with_long_names_stays_in_its_measure() -> None:
    photo = whole(noise(50, 50))
    long = "a very long class name, with commas, and_without_any_space_at_all_for_a_very_long_stretch"
    short = contact_sheet([[explained(torch.rand(1, 7, 7), photo, name="x")]])
    sheet = contact_sheet([[explained(torch.rand(1, 7, 7), photo, name=long, method=long, probability=None)]])
    assert sheet.height == short.height
    assert sheet.width <= short.width + 240


def test_the_classes_of_rows_of_wide_images_do_not_overlap() -> None:
    sheet = pixels_of(contact_sheet(rows_of([(200, 10)] * 2, ["grad_cam"])))
    has_ink = (sheet[:, :100] < 255).any(axis=(1, 2))
    assert np.diff(has_ink.astype(int)).tolist().count(1) == 4  # "espresso" and "95.1 %", twice


def test_titles_name_the_settings_in_which_maps_of_one_method_differ() -> None:
    photo = whole(noise(9, 9))
    first, second, other = (explained(torch.rand(1, 4, 4), photo, method=name) for name in ("lrp", "lrp", "rise"))
    first = replace(first, settings={"composite": "gamma", "steps": 4, "unknown": "refuse"})
    second = replace(second, settings={"composite": None, "steps": 8, "unknown": "refuse"}, layer="features")
    made = figure([first, second, other])
    titles = [each.get_title() for each in made.axes if each.images]
    assert titles[1:] == ["LRP gamma steps=4", "LRP features steps=8", "RISE"]
    made = figure([first, other])
    assert [each.get_title() for each in made.axes if each.images][1:] == ["LRP", "RISE"]


def test_titles_are_shortened_by_an_ellipsis_to_the_width() -> None:
    font = font_for([], 16)
    assert ellipsised("espresso", font, 500) == "espresso"
    cut = ellipsised("Egyptian cat on a mat", font, 80)
    assert cut.endswith("…")
    assert font.getlength(cut) <= 80
    lines = wrapped("great white shark, white shark, man-eater, man-eating shark", font, 110)
    assert len(lines) == 3
    assert all(font.getlength(each) <= 110 for each in lines)


@pytest.mark.parametrize("name", ["Straße", "Ελλάδα", "Жук", "žlutý kůň", "ℊ"])  # the last one is not in DejaVu Sans
def test_letters_of_other_alphabets_are_drawn_on_sheets(name: str) -> None:
    unassigned = "".join("\u0378" if not letter.isascii() else letter for letter in name)  # drawn as boxes

    def drawn(name: str) -> bytes:
        explanation = explained(torch.ones(1, 2, 2).cumsum(2), whole(noise(50, 50)), name=name)
        return contact_sheet([[explanation]]).tobytes()

    assert drawn(name) != drawn(unassigned)
    font = font_for([name], 20)
    masks = {bytes(font.getmask(letter)) for letter in (*name.replace(" ", ""), "\u0378", "R")}
    assert len(masks) == len({*name.replace(" ", ""), "\u0378", "R"})


@pytest.mark.parametrize("name", ["$5 or $6", r"$\frac{1}$ x", "a_b^c", "100 %"])
def test_names_in_figures_are_not_read_as_tex(name: str, tmp_path: Path) -> None:
    explanation = explained(hot(3, 3, 1, 1), whole(noise(40, 30)), name=name, probability=None)
    made = figure([replace(explanation, units=name)], title=name)
    made.savefig(tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").read_text().count(f">{name}</text>") == 3


def test_a_sheet_that_does_not_fit_together_is_an_error() -> None:
    rows = rows_of([(9, 9), (9, 9)], ["grad_cam", "layer_cam"])
    with pytest.raises(RenderError, match="row 1 has the methods layer_cam, grad_cam"):
        contact_sheet([rows[0], rows[1][::-1]])
    with pytest.raises(RenderError, match="nothing to draw"):
        contact_sheet([])
    with pytest.raises(RenderError, match="nothing to draw"):
        contact_sheet([[]])
    with pytest.raises(RenderError, match="rows of explanations"):
        contact_sheet(rows[0])  # type: ignore[arg-type]
    with pytest.raises(RenderError, match="thumb"):
        contact_sheet(rows, thumb=3)


def test_a_figure_has_a_colour_bar_in_the_maps_numbers(tmp_path: Path) -> None:
    photo = whole(noise(40, 30))
    made = figure([explained(torch.tensor([[[0.0, -3.0]]]), photo, "signed"), explained(hot(3, 3, 1, 1), photo)])
    panels = [each for each in made.axes if each.images]
    assert [each.get_title() for each in panels] == ["espresso 95.1 %", "made_up", "made_up"]
    bars = [bar for panel in panels for bar in panel.child_axes]
    assert [bar.get_xlim() for bar in bars] == [(-3.0, 3.0), (0.0, 1.0)]
    made.savefig(tmp_path / "figure.png")


@pytest.mark.parametrize("shared", [False, "method"])
def test_colour_bars_have_one_height_below_images_of_any_shape(shared: Any) -> None:
    for size in ((40, 30), (400, 30), (30, 90)):
        made = figure(explained(hot(3, 3, 1, 1), whole(noise(*size)), name="x", probability=None), shared=shared)
        made.draw_without_rendering()
        [bar] = [bar for axes in made.axes for bar in axes.child_axes]
        assert bar.get_window_extent().height / made.dpi == pytest.approx(0.06, rel=0.1)


def test_a_notebook_shows_a_figure_without_pyplot() -> None:
    drawing: Any = figure(explained(hot(3, 3, 1, 1), whole(noise(40, 30))))
    with Image.open(io.BytesIO(drawing._repr_png_())) as shown:
        assert np.asarray(shown.convert("L")).std() > 10
    assert type(drawing).__mro__[1] is Figure


def test_a_figure_on_one_scale_has_equal_bars() -> None:
    photo = whole(noise(40, 30))
    made = figure([explained(hot(3, 3, 1, 1) * each, photo) for each in (1, 5)], shared=True, label="evidence")
    bars = [bar for panel in made.axes for bar in panel.child_axes]
    assert [bar.get_xlim() for bar in bars] == [(0.0, 5.0)] * 2
    assert [bar.get_xlabel() for bar in bars] == ["evidence"] * 2


def test_a_figure_shows_each_photo_once_and_its_maps_side_by_side_with_equal_gaps() -> None:
    wide, tall = whole(noise(60, 30)), whole(noise(30, 60, seed=1))
    images = [explained(torch.rand(1, 4, 4), frame) for frame in (wide, tall, wide, wide)]
    made = figure([images[0], images[1], replace(images[2], frames=(whole(noise(60, 30)),)), images[3]], columns=3)
    panels = [each for each in made.axes if each.images]
    assert [each.get_title() for each in panels] == ["espresso 95.1 %", *["made_up"] * 3, "espresso 95.1 %", "made_up"]
    places = [each.get_position() for each in panels]
    assert places[1].x0 - places[0].x1 == pytest.approx(places[2].x0 - places[1].x1)
    assert places[3].x0 == pytest.approx(places[0].x0)
    rows = [places[at].y0 for at in (0, 3, 4)]
    assert rows == sorted(rows, reverse=True)
    for panel, place in zip(panels, places, strict=True):
        height, width = np.asarray(panel.images[0].get_array()).shape[:2]
        shown = place.width * made.get_figwidth() / (place.height * made.get_figheight())
        assert shown == pytest.approx(width / height)


def test_a_figure_takes_rows_as_a_sheet_does() -> None:
    photo = whole(noise(30, 30))
    cat, dog = (explained(hot(3, 3, 1, 1), photo, name=name) for name in ("cat", "dog"))
    titles = [each.get_title() for each in figure([[cat, cat], (dog, dog)]).axes if each.images]
    assert titles == ["cat 95.1 %", "made_up", "made_up", "dog 95.1 %", "made_up", "made_up"]


@pytest.mark.parametrize(("scale", "factor"), [(3e-5, "-5"), (0.002, ""), (4e6, "6")])
def test_a_colour_bar_writes_a_power_of_ten_once_before_the_units(scale: float, factor: str) -> None:
    explanation = replace(explained(hot(3, 3, 1, 1) * scale, whole(noise(40, 30))), units="$ per $")
    made = figure(explanation)
    made.draw_without_rendering()
    bar = made.axes[1].child_axes[0]
    label = rf"× 10$^{{{factor}}}$ \$ per \$" if factor else "$ per $"
    assert (bar.get_xlabel(), bar.xaxis.get_offset_text().get_text()) == (label, "")
    for tick, text in zip(bar.get_xticks(), bar.get_xticklabels(), strict=True):
        assert len(text.get_text()) < 7
        assert float(text.get_text()) * 10 ** float(factor or 0) == pytest.approx(tick, rel=1e-2)


def by_method(rows: Any, **options: Any) -> tuple[Figure, list[Any]]:
    made = figure(rows, shared="method", **options)
    made.draw_without_rendering()
    return made, [axes for axes in made.axes if axes.images]


def test_a_figure_by_method_has_one_row_per_image_and_one_scale_and_bar_per_column(tmp_path: Path) -> None:
    photos = [whole(noise(40, 30, seed)) for seed in (0, 1)]
    ramp = torch.arange(4.0).view(1, 2, 2)
    cam, gradient = (
        [explained(ramp * scale * factor, photo, method=name) for photo, scale in zip(photos, (1, 10), strict=True)]
        for name, factor in (("grad_cam", 1), ("input_x_gradient", 1e-7))
    )
    made, panels = by_method([cam[0], gradient[0], cam[1], gradient[1]])
    assert [panel.get_title() for panel in panels] == ["image", "GradCAM", "InputXGradient", "", "", ""]
    assert [[text.get_text() for text in panel.texts] for panel in panels] == [["espresso\n95.1 %"], [], []] * 2
    places = [panel.get_position() for panel in panels]
    assert [place.x0 for place in places[:3]] == pytest.approx([place.x0 for place in places[3:]])
    assert [len(panel.child_axes) for panel in panels] == [0, 0, 0, 0, 1, 1]
    bars = [bar for panel in panels for bar in panel.child_axes]
    assert [bar.get_xlim() for bar in bars] == [(0, shared_limit(cam)), (0, pytest.approx(shared_limit(gradient)))]
    assert [bar.get_xlabel() for bar in bars] == ["score", "× 10$^{-6}$ score"]
    weak = pixels_of(overlay(cam[0], limit=shared_limit(cam)))
    assert np.array_equal(panels[1].images[0].get_array(), weak)
    assert made.get_figwidth() < 6.9
    made.savefig(tmp_path / "figure.pdf")
    assert (tmp_path / "figure.pdf").read_bytes().count(b"/Subtype /Image") == len(panels) + len(bars)


def test_a_figure_by_method_names_columns_by_the_keys_of_a_mapping() -> None:
    photos = [whole(noise(40, 30, seed)) for seed in (0, 1)]
    maps = [explained(torch.rand(1, 4, 4), photo) for photo in photos]
    settings = [replace(each, settings={"steps": 9}) for each in maps]
    _, panels = by_method({"Grad-CAM": maps, "Ours": settings})
    assert [panel.get_title() for panel in panels] == ["image", "Grad-CAM", "Ours", "", "", ""]
    _, panels = by_method({"$w_k$": [replace(maps[0], questions=(QuestionFacts("US$ or A$", 7),))]}, parse_math=True)
    assert panels[1].title.get_parse_math()
    assert not panels[0].texts[0].get_parse_math()
    _, panels = by_method({"A very longLine of a title": maps[0]})
    assert panels[1].get_title() == "A very long Line of a\ntitle"


def test_maps_of_one_image_with_different_crops_share_a_row_and_each_keeps_its_crop() -> None:
    photo = noise(60, 30)
    cropped, other = (explained(hot(3, 3, 1, 1), Frame(photo, (15, 0, 45, 30), name)) for name in ("a", "b"))
    entire = explained(hot(3, 3, 1, 1), whole(photo.copy()))
    _, panels = by_method({"crop": cropped, "whole": entire})
    assert [panel.get_title() for panel in panels] == ["image", "crop", "whole"]
    panels = [axes for axes in figure([cropped, entire]).axes if axes.images]
    for panel, explanation in zip(panels[1:], (cropped, entire), strict=True):
        assert np.array_equal(panel.images[0].get_array(), pixels_of(overlay(explanation)))
    assert len([axes for axes in figure([cropped, other]).axes if axes.images]) == 4  # of two files


def test_a_figure_by_method_files_no_map_under_the_title_of_another() -> None:
    first, second = (explained(torch.rand(1, 4, 4), whole(noise(30, 30, seed))) for seed in (0, 1))
    with pytest.raises(RenderError, match="row 1 has the titles B and row 0 has A; all rows need the same titles"):
        figure({"A": first, "B": second}, shared="method")


def test_a_figure_by_method_names_different_classes_of_a_row_above_each_map() -> None:
    photo = whole(noise(30, 30))
    cat, dog = (explained(torch.rand(1, 4, 4), photo, name=name) for name in ("cat", "dog"))
    _, panels = by_method([[cat, dog], [dog, dog]])
    titles = ["image", "made_up\ncat 95.1 %", "made_up\ndog 95.1 %"]
    assert [panel.get_title() for panel in panels] == [*titles, "", "", ""]
    assert [len(panel.texts) for panel in panels] == [0, 0, 0, 1, 0, 0]


def test_a_figure_by_method_names_the_file_of_each_image(tmp_path: Path) -> None:
    names = ("a_cat.jpg", "an album of all of the summer of the year 2024.png")
    files = [tmp_path / name for name in names]
    for file in files:
        whole(noise(16, 16)).image.save(file)
    frames = [*read([str(files[0]), files[1]], Preprocess(size=(8, 8))).frames]
    maps = [explained(torch.rand(1, 4, 4), frame) for frame in frames]
    _, panels = by_method([[each] for each in maps])
    labels = [panel.texts[0].get_text() for panel in panels[::2]]
    assert labels[0] == "a_cat\nespresso\n95.1 %"
    assert re.fullmatch(r"an album.*…\nespresso\n95.1 %", labels[1])


def test_the_bar_of_a_column_shows_values_beyond_it_and_outliers_of_any_row() -> None:
    photos = [whole(noise(30, 30, seed)) for seed in (0, 1)]
    plain, speckled = (
        explained(torch.rand(3, 20, 20) * scale, photo) for photo, scale in zip(photos, (1, 9), strict=True)
    )
    marked = speckled.with_evidence(outliers=torch.ones(1, 20, 20).tril() > 0)
    _, panels = by_method([[plain], [marked]])
    [bar] = panels[-1].child_axes
    assert bar.get_xlabel().endswith("outlying norm")
    assert len(bar.patches) == 1


def test_a_figure_by_method_of_rows_that_do_not_fit_together_is_an_error() -> None:
    rows = rows_of([(9, 9), (9, 9)], ["grad_cam", "layer_cam"])
    with pytest.raises(RenderError, match="row 1 has the methods layer_cam, grad_cam"):
        figure([rows[0], rows[1][::-1]], shared="method")
    with pytest.raises(RenderError, match="leave out columns=3"):
        figure(rows, shared="method", columns=3)
    with pytest.raises(RenderError, match="shared='row'"):
        figure(rows, shared="row")  # type: ignore[arg-type]


def test_a_figure_of_several_classes_names_each_above_its_map() -> None:
    photo = whole(noise(30, 30))
    made = figure([explained(torch.rand(1, 4, 4), photo, name=each) for each in ("cat", "dog")], title="Two classes")
    titles = [each.get_title() for each in made.axes if each.images]
    assert titles == ["", "made_up\ncat 95.1 %", "made_up\ndog 95.1 %"]
    assert made.get_suptitle() == "Two classes"


def test_a_figure_shows_both_classes_of_a_contrast_and_nothing_of_it_is_cut_off(tmp_path: Path) -> None:
    photo, name = whole(noise(60, 40)), "espresso rather than wooden spoon"
    cat, both, dog = (explained(torch.rand(1, 4, 4), photo, name=each) for each in ("cat", name, "dog"))
    contrast = replace(both, questions=(QuestionFacts(name, 7, is_difference=True),))
    made = figure([cat, contrast, dog], title="Contrast")
    made.savefig(tmp_path / "figure.png", dpi=100)
    panel = next(each for each in made.axes if "rather" in each.get_title())
    assert panel.get_title() == "made_up\nespresso rather than\nwooden spoon"
    with Image.open(tmp_path / "figure.png") as saved:
        ink = np.asarray(saved.convert("L")) < 250
    assert not any(edge.any() for edge in (ink[0], ink[-1], ink[:, 0], ink[:, -1]))
    assert panel.child_axes[0].xaxis.label.get_window_extent().y0 >= 0


def test_the_text_of_a_figure_is_text_in_svg_and_the_settings_of_matplotlib_stay(tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    figure(explained(hot(3, 3, 1, 1), whole(noise(40, 30)))).savefig(tmp_path / "figure.svg")
    assert ">espresso 95.1 %</text>" in (tmp_path / "figure.svg").read_text()
    assert dict(mpl.rcParams) == before


def test_a_figure_of_zeros_is_drawn_with_a_word(tmp_path: Path) -> None:
    with pytest.warns(SaliencyWarning, match="zero everywhere"):
        made = figure(explained(torch.zeros(1, 3, 3), whole(noise(9, 9))))
    made.savefig(tmp_path / "figure.png")


def test_a_figure_of_nothing_is_an_error() -> None:
    with pytest.raises(RenderError, match="no explanation"):
        figure([])


@pytest.mark.slow
def test_a_figure_does_not_import_pyplot() -> None:
    check = (
        "import sys, torch; sys.path.insert(0, 'tests'); from drawing import explained, noise, whole; "
        "from saliency import figure; "
        "figure(explained(torch.rand(1, 3, 3), whole(noise(9, 9)))); print('matplotlib.pyplot' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    found = subprocess.run(  # noqa: S603
        [sys.executable, "-c", check], capture_output=True, text=True, check=True, cwd=root
    )
    assert found.stdout.strip() == "False"
