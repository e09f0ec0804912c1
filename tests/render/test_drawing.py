"""The promises of drawing on a photo: it stays what it is, and mistakes are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.patches import ConnectionPatch
from matplotlib.text import Text
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

import saliency
from saliency import Matches, contact_sheet, figure, ledger_table
from saliency.attribution.explanation import Explanation, heatmap, joined, significance, standard_error
from saliency.errors import MethodError, RenderError
from saliency.io.axes import along_axes, gaussian
from saliency.io.geometry import Frame
from saliency.render.overlay import Opacity, blend, cutout, overlay, save_drawing
from saliency.render.scaling import color_table, shared_limit, smoothed
from saliency.validation import Sign
from tests.drawing import explained, hot, noise, pixels_of, whole
from tests.several_inputs import case

# The photo -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", ["positive", "signed", "absolute"])
def test_at_opacity_zero_the_overlay_is_the_photo(sign: Sign) -> None:
    photo = noise(60, 40)
    drawn = overlay(explained(torch.randn(3, 8, 8), whole(photo), sign), opacity=0)
    assert np.array_equal(pixels_of(drawn), pixels_of(photo))


def test_opacity_by_the_map_is_four_fifths_of_the_magnitude_on_both_sides_of_zero() -> None:
    photo = Image.new("RGB", (3, 1), (40, 80, 120))
    values = torch.tensor([[[-2.0, 1.0, 2.0]]])
    drawn = pixels_of(overlay(explained(values, whole(photo), "signed"), opacity="map"))[0]
    colors = color_table("bwr", centred=True).astype(float)
    for pixel, entry, weight in zip(drawn, (1, 192, 255), (0.8, 0.4, 0.8), strict=True):
        assert np.abs(pixel - (weight * colors[entry] + (1 - weight) * np.array((40, 80, 120)))).max() <= 1


@pytest.mark.parametrize("sign", ["positive", "signed", "absolute"])
def test_opacity_by_the_map_leaves_pixels_without_evidence_as_they_are(sign: Sign) -> None:
    photo = noise(80, 80)
    drawn = overlay(explained(hot(8, 8, 2, 5), whole(photo), sign), opacity="map")
    same = (pixels_of(drawn) == pixels_of(photo)).all(axis=2)
    assert same[:10].all()
    assert same[40:].all()
    assert not same[20:30, 50:60].any()


@pytest.mark.parametrize("opacity", [0.5, 1, "map"])
def test_outside_the_box_the_overlay_is_the_photo(opacity: Opacity) -> None:
    photo = noise(50, 40)
    drawn = overlay(explained(torch.ones(1, 2, 2) + torch.eye(2), Frame(photo, (10, 5, 30, 25))), opacity=opacity)
    changed = (pixels_of(drawn) != pixels_of(photo)).any(axis=2)
    assert changed[5:25, 10:30].mean() > 0.95
    changed[5:25, 10:30] = False
    assert not changed.any()


def test_the_photo_and_the_explanation_are_left_as_they_are() -> None:
    photo = noise(30, 30)
    before = pixels_of(photo).copy()
    explanation = explained(torch.randn(1, 4, 4), whole(photo))
    values = explanation.values.clone()
    overlay(explanation, opacity=1)
    cutout(explanation)
    contact_sheet([[explanation]])
    assert np.array_equal(pixels_of(photo), before)
    assert torch.equal(explanation.values, values)


def test_half_opacity_is_half_photo_and_half_colour() -> None:
    photo = Image.new("RGB", (8, 8), (100, 200, 0))
    values = hot(2, 2, 0, 0)
    drawn = pixels_of(overlay(explained(values, whole(photo)), opacity=0.5))
    ends = color_table("inferno")[[255, 0]].astype(float)
    assert np.abs(drawn[0, 0] - (ends[0] + (100, 200, 0)) / 2).max() < 1
    assert np.abs(drawn[7, 7] - (ends[1] + (100, 200, 0)) / 2).max() < 1


def test_every_opacity_is_at_most_a_level_off_and_none_and_full_are_exact() -> None:
    photo, colors = noise(40, 70), noise(40, 70, seed=1)
    opacity = np.linspace(0, 1, 40 * 70, dtype=np.float32).reshape(70, 40)
    exact = pixels_of(photo) + opacity[..., None] * (pixels_of(colors).astype(float) - pixels_of(photo))
    blended = photo.copy()
    blend(blended, colors, (slice(0, 70), slice(0, 40)), opacity)
    assert np.abs(pixels_of(blended) - exact).max() < 1
    for weight, expected in ((0, photo), (1, colors)):
        blend(blended := photo.copy(), colors, (slice(0, 70), slice(0, 40)), np.full_like(opacity, weight))
        assert blended.tobytes() == expected.tobytes()


# Mistakes ------------------------------------------------------------------------------------------------------


def test_several_images_are_an_error_that_shows_the_loop() -> None:
    one = explained(torch.rand(1, 4, 4), whole(noise(9, 9)))
    with pytest.raises(RenderError, match=r"\[cutout\(e\) for e in explanation\]"):
        cutout(joined([one, one]))


def test_no_picture_is_an_error_that_says_what_to_pass() -> None:
    with pytest.raises(RenderError, match="image="):
        overlay(explained(torch.rand(1, 4, 4), None))


DRAWN: dict[str, Callable[[Any], object]] = {
    "overlay": overlay,
    "cutout": cutout,
    "heatmap": heatmap,
    "figure": lambda given: figure([given]),
    "ledger_table": ledger_table,
    "shared_limit": shared_limit,
    "contact_sheet": lambda given: contact_sheet([[given]]),
    "significance": significance,
    "standard_error": standard_error,
}


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("given", [torch.rand(1, 1, 4, 4), torch.tensor(1), noise(9, 9), None], ids=lambda x: type(x))
def test_what_is_no_explanation_is_refused_by_every_drawing(name: str, given: Any) -> None:
    with pytest.raises(RenderError, match=f"{name} takes an Explanation.*; got {type(given).__name__}"):
        DRAWN[name](given)


def test_a_picture_in_the_place_of_the_explanation_is_refused() -> None:
    explanation, photo = explained(torch.rand(1, 4, 4), whole(noise(9, 9))), noise(9, 9, seed=1)
    for draw in (overlay, cutout):
        with pytest.raises(RenderError, match=r"takes an Explanation.*; got Image"):
            draw(photo, explanation)  # type: ignore[arg-type, call-overload]
        assert np.array_equal(pixels_of(draw(explanation, photo)), pixels_of(draw(explanation, image=photo)))


OPTIONS: dict[str, Callable[[Explanation, Any], object]] = {
    "opacity": lambda explanation, given: overlay(explanation, opacity=given),
    "percentile": lambda explanation, given: overlay(explanation, percentile=given),
    "limit": lambda explanation, given: overlay(explanation, limit=given),
    "smoothing": lambda explanation, given: overlay(explanation, smoothing=given),
    # Before the map is painted, which is not finite.
    "columns": lambda explanation, given: figure(replace(explanation, values=explanation.values / 0), columns=given),
    "min_significance": lambda explanation, given: overlay(
        explanation.with_evidence(error=explanation.values), min_significance=given
    ),
    "colormap": lambda explanation, given: overlay(explanation, colormap=given),
    "sign": lambda explanation, given: overlay(explanation, sign=given),
    "keep": lambda explanation, given: cutout(explanation, keep=given),
    "background": lambda explanation, given: cutout(explanation, background=given),
    "size": lambda explanation, given: heatmap(explanation, size=given),
    "thumb": lambda explanation, given: contact_sheet([[explanation]], thumb=given),
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("given", ["many", float("nan"), True, [1], (2.5, 1), torch.tensor(1), object()])
def test_every_option_of_drawing_is_checked_by_name(option: str, given: Any) -> None:
    with pytest.raises(RenderError, match=option if option != "colormap" else r"colou?r ?map"):
        OPTIONS[option](explained(torch.rand(1, 4, 4), whole(noise(40, 40))), given)


@pytest.mark.parametrize("opacity", [-0.1, 1.1, float("nan"), "maps", np.ones((9, 9))])
def test_an_impossible_opacity_is_an_error(opacity: Opacity) -> None:
    with pytest.raises(RenderError, match="opacity"):
        overlay(explained(torch.rand(1, 4, 4), whole(noise(9, 9))), opacity=opacity)


# Cut-outs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0.1, 0.2, 0.5, 1.0])
def test_a_cutout_keeps_that_share_of_the_strongest_pixels(keep: float) -> None:
    photo = Image.new("RGB", (100, 100), (200, 200, 200))
    values = torch.linspace(1, 2, 10000).view(1, 100, 100)
    drawn = pixels_of(cutout(explained(values, whole(photo)), keep=keep))[..., 0]
    kept = round(100 * keep)
    assert (drawn[100 - kept :] == 200).all()
    assert (drawn[: 100 - kept] == 0).all()


def test_a_cutout_shows_no_pixel_without_evidence() -> None:
    drawn = cutout(explained(hot(10, 10, 4, 4), whole(noise(10, 10))), keep=0.5, background="#00ff00")
    shown = (pixels_of(drawn) != (0, 255, 0)).any(axis=2)
    assert shown.sum() == 1
    assert shown[4, 4]


def test_a_cutout_hides_what_the_model_did_not_see() -> None:
    photo = Image.new("RGB", (30, 10), "white")
    drawn = pixels_of(cutout(explained(torch.rand(1, 4, 4) + 1, Frame(photo, (10, 0, 20, 10))), keep=1.0))
    assert (drawn[:, 10:20] == 255).all()
    assert (drawn[:, :10] == 0).all()
    assert (drawn[:, 20:] == 0).all()


@pytest.mark.parametrize("keep", [0.2, 1.0, None])
def test_a_cutout_of_a_nearly_even_map_shows_nothing_as_an_overlay(keep: float | None) -> None:
    even = explained(1 + 0.01 * torch.rand(1, 9, 9), whole(noise(9, 9)))
    with pytest.warns(saliency.errors.SaliencyWarning, match="nearly even"):
        drawn = cutout(even, keep=keep)
    assert not pixels_of(drawn).any()


def test_a_smooth_cutout_fades_with_the_map() -> None:
    photo = Image.new("RGB", (3, 1), "white")
    drawn = pixels_of(cutout(explained(torch.tensor([[[0.0, 1.0, 2.0]]]), whole(photo)), keep=None))
    assert drawn[0, :, 0].tolist() == pytest.approx([0, 127.5, 255], abs=0.5)


def test_an_impossible_cutout_is_an_error() -> None:
    explanation = explained(torch.rand(1, 4, 4), whole(noise(9, 9)))
    with pytest.raises(RenderError, match="keep"):
        cutout(explanation, keep=0.0)
    with pytest.raises(RenderError, match="background"):
        cutout(explanation, background="bleu")


# Files ---------------------------------------------------------------------------------------------------------


def test_a_png_loses_nothing(tmp_path: Path) -> None:
    photo = noise(31, 17)
    path = save_drawing(photo, tmp_path / "photo.PNG")
    with Image.open(path) as read:
        assert np.array_equal(pixels_of(read), pixels_of(photo))
    assert [each.name for each in tmp_path.iterdir()] == ["photo.PNG"]


@pytest.mark.parametrize(("suffix", "kind"), [("jpg", "JPEG"), ("jpeg", "JPEG"), ("webp", "WEBP"), ("png", "PNG")])
def test_the_suffix_names_the_format(tmp_path: Path, suffix: str, kind: str) -> None:
    with Image.open(save_drawing(noise(31, 17), str(tmp_path / f"photo.{suffix}"))) as read:
        assert (read.format, read.size) == (kind, (31, 17))


def test_an_unknown_suffix_is_an_error_with_the_known_ones(tmp_path: Path) -> None:
    for name in ("photo.gif", "photo"):
        with pytest.raises(MethodError, match=r"\.png"):
            save_drawing(noise(3, 3), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_picture_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_drawing(Image.new("RGB", (4, 4), "red"), tmp_path / "photo.webp")
    before = path.read_bytes()

    write_bytes = Path.write_bytes

    def half(self: Path, content: bytes) -> int:
        write_bytes(self, content[: len(content) // 2])
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError, match="disk full"):
        save_drawing(noise(4, 4), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


# The crop, the size and several images ---------------------------------------------------------------------------


def test_two_thin_lines_mark_the_crop_if_the_opacity_follows_the_map() -> None:
    photo, box = Image.new("RGB", (60, 60), (90, 90, 90)), (10.0, 20.0, 40.0, 50.0)
    nothing = explained(hot(30, 30, 15, 15), Frame(photo, box))
    drawn = pixels_of(overlay(nothing))[..., 0]
    assert (drawn[20, 11:39] == 45).all()
    assert (drawn[21, 12:38] == 45 + 128).all()
    assert (drawn[22:30, 12:38] == 90).all()
    assert (pixels_of(overlay(nothing, opacity=0)) == 90).all()
    assert (pixels_of(overlay(explained(hot(30, 30, 15, 15), whole(photo))))[:20] == 90).all()


@pytest.mark.parametrize("size", [(4000, 480), (480, 4000), (600, 480)])
def test_the_lines_follow_the_shorter_edge_of_the_crop(size: tuple[int, int]) -> None:
    left, top = ((edge - 480) // 2 for edge in size)
    frame = Frame(Image.new("RGB", size, (90, 90, 90)), (left, top, left + 480.0, top + 480.0))
    drawn = pixels_of(overlay(explained(hot(3, 3, 1, 1), frame)))[top : top + 480, left : left + 480, 0]
    assert (drawn[10, :5] == [45, 45, 173, 173, 90]).all()


def test_smoothing_averages_what_is_drawn_and_leaves_the_values() -> None:
    explanation = explained(hot(200, 200, 100, 100), whole(Image.new("RGB", (200, 200))))
    kept = explanation.values.clone()
    lit = [int((pixels_of(overlay(explanation, smoothing=each)) > 20).any(axis=2).sum()) for each in (0, 0.005, 0.02)]
    assert lit[0] == 1
    assert lit[0] < lit[1] < lit[2]
    assert torch.equal(explanation.values, kept)
    coarse = explained(torch.rand(1, 14, 14), whole(noise(50, 50)))
    assert np.array_equal(pixels_of(overlay(coarse, smoothing=0)), pixels_of(overlay(coarse)))


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The size of the largest result of an operation."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.numbers = max(self.numbers, result.numel() if isinstance(result, torch.Tensor) else 0)
        return result


def test_the_memory_of_smoothing_does_not_grow_with_the_square_of_the_edge() -> None:
    maps = torch.rand(1, 2, 3000, generator=torch.Generator().manual_seed(0))
    with Largest() as largest:  # type: ignore[no-untyped-call]
        found = smoothed(maps, 0.005)
    assert largest.numbers < 500**2
    expected = along_axes(maps, [gaussian(length, 15, maps) for length in (2, 3000)])
    assert (found - expected).abs().max() < 1e-4


def test_a_shared_limit_is_that_of_the_smoothed_map_that_is_drawn() -> None:
    explanation = explained(hot(200, 200, 100, 100), whole(Image.new("RGB", (200, 200))))
    alone, shared = overlay(explanation), overlay(explanation, limit=shared_limit(explanation))
    assert np.array_equal(pixels_of(alone), pixels_of(shared))


@pytest.mark.parametrize(("size", "expected"), [(30, (30, 20)), (240, (240, 160))])
def test_an_overlay_has_the_longer_edge_that_is_asked_for(size: int, expected: tuple[int, int]) -> None:
    assert overlay(explained(torch.rand(1, 4, 4), whole(noise(120, 80))), size=size).size == expected


def test_several_images_give_several_overlays_and_one_gives_one() -> None:
    pair = [explained(torch.rand(1, 4, 4), whole(noise(9, 9, seed=each))) for each in range(2)]
    both = joined(pair)
    expected = [pixels_of(overlay(each)) for each in pair]
    of_both: Any = overlay(both)  # type checkers do not know the number of images of an explanation
    for drawn in (overlay(pair), overlay(tuple(pair)), of_both, overlay(list(both)), overlay([both])):
        assert np.array_equal([pixels_of(each) for each in drawn], expected)
    assert len(overlay(pair[:1])) == 1
    assert isinstance(overlay(both[:1]), Image.Image)


def test_an_overlay_saves_png_with_light_compression_unless_told_otherwise(tmp_path: Path) -> None:
    drawn = overlay(explained(torch.rand(1, 4, 4), whole(Image.linear_gradient("L").convert("RGB"))))
    drawn.save(tmp_path / "default.png")
    drawn.save(tmp_path / "light.png", compress_level=1)
    drawn.save(tmp_path / "small.png", compress_level=9)
    default, light, small = ((tmp_path / f"{name}.png").read_bytes() for name in ("default", "light", "small"))
    with Image.open(tmp_path / "default.png") as read:
        assert np.array_equal(pixels_of(read), pixels_of(drawn))
    assert default == light
    assert len(small) < len(light)
    drawn.save(tmp_path / "drawn.jpg", quality=80)


# Matches -------------------------------------------------------------------------------------------------------


def matches(values: torch.Tensor) -> Matches:
    """Matches of a crop of one image with all of another."""
    left = Frame(Image.new("RGB", (60, 40), "green"), (10.0, 0.0, 50.0, 40.0))
    return Matches(values, 0.8, "cosine", "lrp", (left, whole(Image.new("RGB", (60, 60)))))


def test_lines_join_the_strongest_cells_by_their_magnitude_and_sign() -> None:
    values = torch.zeros(4, 4, 6, 6)
    values[0, 3, 5, 4], values[2, 0, 0, 1], values[0, 0, 0, 5] = 2.0, -1.0, 0.01
    drawn = figure(matches(values), count=2)
    weak, strong = drawn.artists
    assert isinstance(weak, ConnectionPatch)
    assert isinstance(strong, ConnectionPatch)
    assert (strong.xy1, strong.xy2) == ((44.5, 4.5), (44.5, 54.5))
    assert (weak.xy1, weak.xy2) == ((14.5, 24.5), (14.5, 4.5))
    assert strong.get_linewidth() == 2 * weak.get_linewidth()
    red, blue = (to_rgb(patch.get_edgecolor()) for patch in (strong, weak))
    assert red[0] > red[2]
    assert blue[2] > blue[0]
    assert "cosine similarity 0.8" in drawn.get_suptitle()
    assert not figure(matches(0 * values)).artists


def test_of_the_matches_between_neighbours_the_strongest_is_drawn() -> None:
    values = torch.zeros(4, 4, 4, 4)
    values[1, 1, 2, 2], values[0, 1, 3, 3], values[1, 1, 0, 2] = 3.0, -2.0, 1.0
    weak, strong = figure(matches(values)).artists
    assert isinstance(weak, ConnectionPatch)
    assert isinstance(strong, ConnectionPatch)
    assert (weak.xy2, strong.xy2) == ((37.0, 7.0), (37.0, 37.0))


def test_the_lines_of_a_saved_figure_are_on_both_images(tmp_path: Path) -> None:
    values = torch.zeros(1, 1, 1, 1) + 1
    figure(matches(values)).savefig(tmp_path / "matches.png")
    pixels = pixels_of(Image.open(tmp_path / "matches.png").convert("RGB")).astype(int)
    columns = ((pixels[..., 0] - pixels[..., 1:].max(-1)) > 80).any(0).nonzero()[0]
    assert columns[0] < 0.3 * pixels.shape[1]
    assert columns[-1] > 0.7 * pixels.shape[1]
    assert len(columns) > 0.9 * (columns[-1] - columns[0])


def test_matches_without_images_or_with_a_wrong_count_are_refused() -> None:
    values = torch.zeros(2, 2, 2, 2)
    with pytest.raises(RenderError, match="pass their paths or PIL images"):
        figure(Matches(values, 0.8, "cosine", "lrp", (None, None)))
    with pytest.raises(RenderError, match="count"):
        figure(matches(values), count=0)


def test_several_inputs_are_drawn_each_with_its_share_on_one_scale() -> None:
    model, inputs = case("late")
    result = saliency.InputXGradient(model).attribute({key: x[:1] for key, x in inputs.items()}, 1)
    drawing = saliency.figure(result)
    titles = [axes.get_title() for axes in drawing.axes]
    shares = [f"{key}: {round(100 * share)} %" for key, share in result.shares.items()]
    assert [title.split("\n")[0] for title in titles[::2]][:2] == shares
    bars = [axes.child_axes[0].get_xlim() for axes in drawing.axes if axes.child_axes]
    assert len(bars) == 2
    assert len(set(bars)) == 1
    both = saliency.figure(saliency.InputXGradient(model).attribute(inputs, 1))
    assert len(both.axes) == 2 * len(drawing.axes)


@pytest.mark.parametrize("parse_math", [False, True])
def test_only_the_title_and_the_label_of_a_figure_may_contain_formulas(parse_math: bool) -> None:
    explanation = explained(hot(3, 3, 1, 1), whole(noise(9, 9)), name="US$ or A$")
    drawing = figure(explanation, title="$w_k$", label="$s^2$", parse_math=parse_math)
    is_parsed = {text.get_text(): text.get_parse_math() for text in drawing.findobj(Text) if "$" in text.get_text()}
    assert is_parsed == {"$w_k$": parse_math, "$s^2$": parse_math, "US$ or A$ 95.1 %": False}
