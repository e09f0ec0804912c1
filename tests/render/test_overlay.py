"""The promises of a map in colours: it lies where it should, on a scale that means something."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import interpolate

import saliency
from saliency import GradCAM, VanillaGradient, contact_sheet, cutout, figure, overlay
from saliency.attribution.explanation import Explanation
from saliency.batch import batch
from saliency.errors import NonFiniteError, RenderError, SaliencyWarning
from saliency.io.geometry import Box, Frame, ImageBox
from saliency.io.preprocess import Preprocess
from saliency.render.overlay import CENTRE, Opacity, box_pixels, resize_to_pixels
from saliency.render.scaling import color_table, shared_limit
from saliency.validation import Sign
from tests.batchwork import Tiny, quick
from tests.batchwork import noise as blocks
from tests.drawing import explained, hot, noise, pixels_of, whole

# Geometry ------------------------------------------------------------------------------------------------------

WIDE, TALL, TINY = (640, 120), (90, 500), (17, 11)


@pytest.mark.parametrize("size", [WIDE, TALL, TINY, (224, 224), (333, 250)])
@pytest.mark.parametrize("corner", [(0, 0), (0, 6), (6, 0), (6, 6), (2, 4)])
def test_the_hot_cell_lands_where_the_model_saw_it(size: tuple[int, int], corner: tuple[int, int]) -> None:
    preprocess = Preprocess(size=(224, 224), resize=256, mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bicubic")
    frame = Frame(Image.new("RGB", size), preprocess.box(size))
    drawn = pixels_of(overlay(explained(hot(7, 7, *corner), frame), opacity=1)).sum(axis=2).astype(float)
    left, top, right, bottom = frame.box
    row, column = corner
    expected = left + (column + 0.5) * (right - left) / 7 - 0.5, top + (row + 0.5) * (bottom - top) / 7 - 0.5
    peak_row, peak_column = np.nonzero(drawn >= drawn.max())
    # At a border the colour is flat from the cell's centre outwards, so the nearest of the hottest pixels counts.
    assert np.abs(peak_column - expected[0]).min() <= 1
    assert np.abs(peak_row - expected[1]).min() <= 1


@pytest.mark.parametrize("size", [WIDE, TALL, TINY])
def test_a_coloured_corner_of_the_crop_is_a_coloured_corner_of_the_box(size: tuple[int, int]) -> None:
    preprocess = Preprocess(size=(64, 64), resize=64, mean=(0.0,) * 3, std=(1.0,) * 3, interpolation="bilinear")
    left, top, right, _ = preprocess.box(size)
    pixels = np.zeros((size[1], size[0], 3), np.uint8)
    patch = max(2, round((right - left) / 4))
    pixels[int(top) : int(top) + patch, int(left) : int(left) + patch] = 255
    photo = Image.fromarray(pixels)
    frame = Frame(photo, preprocess.box(size))
    seen = preprocess(photo)[:1]  # the model's own view serves as its map
    shares = resize_to_pixels(seen[0].numpy(), frame, box_pixels(frame))
    area = pixels[box_pixels(frame)][..., 0] / 255
    assert np.abs(shares - area).mean() < 0.06  # the resampling blurs the patch's edges, and nothing else
    assert np.abs(np.argwhere(shares > 0.5).max(axis=0) - np.argwhere(area > 0.5).max(axis=0)).max() <= 1


@pytest.mark.parametrize("cells", [(7, 7), (1, 1), (3, 5), (14, 2)])
def test_on_a_whole_photo_the_map_is_torchs_bilinear_resize(cells: tuple[int, int]) -> None:
    values = torch.randn(cells, generator=torch.Generator().manual_seed(2))
    frame = whole(Image.new("RGB", (200, 130)))
    expected = interpolate(values[None, None], size=(130, 200), mode="bilinear", align_corners=False)[0, 0]
    assert np.abs(resize_to_pixels(values.numpy(), frame, box_pixels(frame)) - expected.numpy()).max() < 1e-5


def test_a_map_finer_than_the_photo_is_averaged_as_torch_does() -> None:
    values = torch.randn(64, 48, generator=torch.Generator().manual_seed(3))
    frame = whole(Image.new("RGB", (10, 17)))
    expected = interpolate(values[None, None], size=(17, 10), mode="bilinear", align_corners=False, antialias=True)[
        0, 0
    ]
    assert np.abs(resize_to_pixels(values.numpy(), frame, box_pixels(frame)) - expected.numpy()).max() < 1e-5


def test_a_box_moves_the_map_by_fractions_of_a_pixel() -> None:
    """A linear ramp is its own interpolation, so each value follows from its pixel's centre."""
    frame = Frame(Image.new("RGB", (100, 10)), (20.25, 0.0, 70.75, 10.0))
    ramp = np.arange(10, dtype=np.float32)[None]
    inside = box_pixels(frame)
    assert inside[1] == slice(20, 71)
    cells = (np.arange(20, 71) + 0.5 - 20.25) * 10 / 50.5 - 0.5
    assert np.abs(resize_to_pixels(ramp, frame, inside)[4] - np.clip(cells, 0, 9)).max() < 1e-5


def test_a_box_beyond_the_photo_shows_the_part_on_it() -> None:
    values = torch.zeros(1, 4, 4)
    values[0, :, 0] = 1.0
    photo = Image.new("RGB", (40, 20), (9, 9, 9))
    drawn = pixels_of(overlay(explained(values, Frame(photo, (0.0, -10.0, 40.0, 30.0))), opacity=1))
    assert (drawn[:, 0] == color_table("inferno")[255]).all()
    assert (drawn[:, -1] == color_table("inferno")[0]).all()


def test_a_box_thinner_than_a_pixel_colours_the_one_under_its_middle() -> None:
    photo = noise(12, 12)
    drawn = overlay(explained(hot(7, 7, 3, 3), Frame(photo, (4.6, 3.1, 5.3, 3.2))), opacity=1)
    changed = (pixels_of(drawn) != pixels_of(photo)).any(axis=2)
    assert np.argwhere(changed).tolist() == [[3, 4]]


@pytest.mark.parametrize("box", [(50.0, 0.0, 60.0, 9.0), (5.0, 20.0, 6.0, 21.0), (-9.0, -9.0, 0.0, 0.0)])
def test_a_box_beside_the_photo_is_an_error(box: Box) -> None:
    with pytest.raises(RenderError, match="40x20"):
        overlay(explained(torch.rand(1, 4, 4), Frame(Image.new("RGB", (40, 20)), box)))


def test_the_map_of_a_tensor_covers_an_image_of_its_proportions(tmp_path: Path) -> None:
    photo = noise(33, 33)
    photo.save(tmp_path / "photo.png")
    explanation = explained(torch.rand(1, 4, 4), None)
    from_path = overlay(explanation, image=tmp_path / "photo.png")
    assert from_path.size == photo.size
    assert np.array_equal(pixels_of(from_path), pixels_of(overlay(replace(explanation, frames=(whole(photo),)))))


def test_on_a_larger_copy_of_the_image_the_map_keeps_its_position() -> None:
    small, large = noise(40, 20), noise(80, 40)
    explanation = explained(torch.rand(1, 4, 4), Frame(small, (10.0, 0.0, 30.0, 20.0)))
    placed = replace(explanation, frames=(Frame(large, (20.0, 0.0, 60.0, 40.0)),))
    assert overlay(explanation, large).tobytes() == overlay(placed).tobytes()
    assert cutout(explanation, large).tobytes() == cutout(placed).tobytes()


def resized_by_torchvision(image: Image.Image, shorter: int) -> Image.Image:
    from torchvision.transforms.functional import resize

    return resize(image, shorter)  # type: ignore[no-any-return]


def thumbnail(image: Image.Image, longest: int) -> Image.Image:
    small = image.copy()
    small.thumbnail((longest, longest))
    return small


def draft(image: Image.Image, longest: int) -> Image.Image:
    """A copy as the decoder of JPEG makes it: edges are divided and rounded up."""
    file = io.BytesIO()
    image.save(file, "JPEG")
    opened = Image.open(file)
    opened.draft("RGB", (longest, longest))
    opened.load()
    return opened


COPIES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "floor": lambda image: image.resize((image.width // 2, image.height // 2)),
    "ceil": lambda image: image.resize((-(-image.width // 2), -(-image.height // 2))),
    "thumbnail": lambda image: thumbnail(image, 300),
    "torchvision": lambda image: resized_by_torchvision(image, 224),
    "draft": lambda image: draft(image, 160),
    "tiny": lambda image: thumbnail(image, 11),
}


@pytest.mark.parametrize("size", [(1000, 667), (667, 1000), (801, 799), (1007, 61)])
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_may_have_its_edges_rounded_in_any_way(name: str, size: tuple[int, int]) -> None:
    photo = noise(*size)
    copy = COPIES[name](photo)
    left, top, right, bottom = box = (size[0] / 4, size[1] / 4, size[0] / 2, size[1] / 2)
    x, y = copy.width / size[0], copy.height / size[1]
    explanation = explained(torch.rand(1, 4, 4), Frame(photo, box))
    placed = replace(explanation, frames=(Frame(copy, (left * x, top * y, right * x, bottom * y)),))
    assert overlay(explanation, copy).tobytes() == overlay(placed).tobytes()
    back = replace(explanation, frames=(Frame(copy, (left * x, top * y, right * x, bottom * y)),))
    drawn = pixels_of(overlay(back, photo)) != pixels_of(photo)
    assert drawn[int(top) : int(bottom), int(left) : int(right)].any()
    assert not drawn[: int(top) - 1].any()
    assert not drawn[:, int(right) + 2 :].any()


@pytest.mark.parametrize("draw", [overlay, cutout])
def test_an_image_of_other_proportions_is_refused(draw: Any) -> None:
    explanation = explained(torch.rand(1, 4, 4), whole(noise(400, 200)))
    for size in ((30, 30), (200, 400), (400, 204), (800, 404)):
        with pytest.raises(RenderError, match=r"image has 400 x 200.*other proportions; pass a copy of it in any size"):
            draw(explanation, noise(*size))


def test_the_map_of_a_letterboxed_tensor_is_not_stretched_over_the_image() -> None:
    photo = noise(333, 222)
    letterbox = saliency.Preprocess.letterbox(64, stride=None)
    method = VanillaGradient(Tiny(), preprocess=letterbox)
    with pytest.raises(RenderError, match=r"tensor has 64 x 64.*333 x 222.*preprocess=.*letterbox"):
        overlay(method.attribute(letterbox(photo), 0), photo)
    assert overlay(method.attribute(photo, 0)).size == photo.size


# Colours -------------------------------------------------------------------------------------------------------


def test_zero_is_the_centre_colour_of_a_signed_map_and_its_ends_are_as_far() -> None:
    import matplotlib as mpl

    photo = Image.new("RGB", (3, 1))
    values = torch.tensor([[[-2.0, 0.0, 2.0]]])
    drawn = pixels_of(overlay(explained(values, whole(photo), "signed"), opacity=1))[0]
    expected = mpl.colormaps["bwr"]([0.0, 0.5, 1.0], bytes=True)[:, :3]
    assert np.array_equal(drawn, expected)


def test_a_signed_map_is_symmetric_also_where_one_side_is_weaker() -> None:
    photo = Image.new("RGB", (3, 1))
    drawn = pixels_of(overlay(explained(torch.tensor([[[-1.0, 1.0, 2.0]]]), whole(photo), "signed"), opacity=1))[0]
    colors = color_table("bwr", centred=True)
    # Half of 127 steps is 63.5: one side rounds to 63 and the other to 64.
    assert min(np.abs(drawn[0].astype(int) - colors[CENTRE - step]).max() for step in (63, 64)) == 0
    assert np.array_equal(drawn[1], colors[CENTRE + 64])


def test_a_table_is_matplotlibs_own() -> None:
    import matplotlib as mpl

    expected = mpl.colormaps["viridis"](np.arange(256), bytes=True)[:, :3]
    assert np.array_equal(color_table("viridis"), expected)
    assert not color_table("viridis").flags.writeable


@pytest.mark.parametrize("name", ["inferno", "viridis", "jet", "RdBu_r", "tab10", "gist_ncar", "twilight_shifted"])
@pytest.mark.parametrize("sign", ["positive", "signed"])
def test_any_colour_map_of_matplotlib_is_taken(name: str, sign: Sign) -> None:
    photo = noise(16, 16)
    drawn = overlay(explained(torch.randn(1, 4, 4), whole(photo), sign), colormap=name)
    assert drawn.size == photo.size


def test_an_unknown_colour_map_is_an_error_with_the_closest_names() -> None:
    with pytest.raises(RenderError, match='did you mean "viridis"'):
        overlay(explained(torch.rand(1, 4, 4), whole(noise(9, 9))), colormap="virids")


# Limits --------------------------------------------------------------------------------------------------------


def test_one_limit_gives_equal_values_equal_colours() -> None:
    photo = Image.new("RGB", (2, 1))
    weak, strong = (explained(torch.tensor([[[0.0, top]]]), whole(photo)) for top in (1.0, 4.0))
    limit = shared_limit([weak, strong])
    assert limit == 4.0
    drawn = [pixels_of(overlay(each, opacity=1, limit=limit))[0, 1] for each in (weak, strong)]
    assert np.array_equal(drawn[0], color_table("inferno")[64])
    assert np.array_equal(drawn[1], color_table("inferno")[255])


@pytest.mark.parametrize("sign", ["positive", "absolute"])
def test_a_map_without_zeros_is_drawn_above_its_minimum(sign: Sign) -> None:
    values, picture = hot(7, 7, 2, 4), noise(70, 70)
    plain, raised = (replace(explained(each, whole(picture)), sign=sign) for each in (values, values + 0.5))
    assert np.array_equal(pixels_of(overlay(raised, percentile=None)), pixels_of(overlay(plain, percentile=None)))
    first, second = (pixels_of(contact_sheet([[each]], percentile=None)) for each in (raised, plain))
    assert np.array_equal(first, second)
    bars = [figure(each).axes[1].child_axes[0].get_xlim() for each in (raised, plain)]
    assert bars == [(0.5, pytest.approx(1.5)), (0, 1)]


def test_signed_maps_and_maps_of_one_scale_are_drawn_from_zero() -> None:
    picture = noise(70, 70)
    raised = explained(hot(7, 7, 2, 4) + 0.5, whole(picture))
    full = overlay(raised, limit=shared_limit(raised))
    signed = overlay(replace(raised, sign="signed"), colormap="inferno")
    sheet = pixels_of(contact_sheet([[raised]], shared=True, thumb=70))
    alone = pixels_of(contact_sheet([[raised]], thumb=70))
    assert np.abs(sheet.astype(int) - alone).max() > 30
    for drawing in (full, signed):
        corner = pixels_of(drawing)[60:, :10].astype(int) - pixels_of(picture)[60:, :10]
        assert np.abs(corner).max() > 30  # the lowest values are coloured too


@pytest.mark.parametrize("value", [1.0, -1.0])
def test_contours_surround_the_values_above_a_share_of_the_full_colour(value: float) -> None:
    values = torch.zeros(1, 10, 10)
    values[0, 3:7, 3:7] = value
    picture = noise(200, 100)
    explanation = explained(values, Frame(picture, (50.0, 0.0, 150.0, 100.0)), sign="signed")
    drawn = overlay(explanation, opacity=0, smoothing=0, contours=(0.25, 0.5))
    changed = (pixels_of(drawn) != pixels_of(picture)).any(2)
    rows, columns = np.nonzero(changed)
    # Between the centres of two cells, 35 and 25, the value falls linearly from 1 to 0: to 0.25 at 27.5.
    assert abs(rows.min() - 27.5) <= 2
    assert abs(rows.max() - 72.5) <= 2
    assert abs(columns.min() - 77.5) <= 2
    assert abs(columns.max() - 122.5) <= 2
    assert not changed[36:64, 86:114].any()
    at_the_edge = explained(torch.ones(1, 4, 4) - hot(4, 4, 3, 3)[0], whole(picture))
    assert (pixels_of(overlay(at_the_edge, opacity=0, contours=(0.5,))) != pixels_of(picture)).any(2)[0].all()


@pytest.mark.parametrize("contours", [0.5, "0.5", (0,), (1,), (0.5, None)])
def test_contours_are_levels_between_0_and_1(contours: Any) -> None:
    with pytest.raises(RenderError, match="contours"):
        overlay(explained(hot(4, 4, 1, 1), whole(noise(9, 9))), contours=contours)


def test_below_a_threshold_the_image_is_unchanged() -> None:
    values = torch.linspace(-1, 1, 40).expand(20, 40)[None]
    photo = noise(40, 20)
    explanation = replace(explained(values, whole(photo)), sign="signed")
    drawn = pixels_of(overlay(explanation, opacity=1, smoothing=0, threshold=0.5))
    everywhere = pixels_of(overlay(explanation, opacity=1, smoothing=0))
    is_hidden = (values[0].abs() < 0.5).numpy()
    assert (drawn == np.where(is_hidden[..., None], pixels_of(photo), everywhere)).all()
    with pytest.raises(RenderError, match=r"threshold=1\.5"):
        overlay(explanation, threshold=1.5)


@pytest.mark.parametrize(
    "style", [{}, {"opacity": 0.5}, {"contours": (0.5,)}, {"threshold": 0.5, "opacity": 1}], ids=str
)
def test_without_its_background_an_overlay_is_a_layer_that_gives_the_overlay(style: dict[str, Any]) -> None:
    photo = noise(120, 90)
    values = torch.rand(1, 7, 7, generator=torch.Generator().manual_seed(1)) * 2 - 1
    explanation = explained(values, Frame(photo, (15.0, 0.0, 105.0, 90.0)), sign="signed")
    layer = overlay(explanation, background=False, **style)
    assert (layer.mode, layer.size) == ("RGBA", photo.size)
    assert (pixels_of(layer)[:, :10] == 0).all()  # outside the crop
    composite = Image.alpha_composite(photo.convert("RGBA"), layer).convert("RGB")
    difference = np.abs(pixels_of(composite).astype(int) - pixels_of(overlay(explanation, **style)))
    assert difference.max() <= 3


def test_speckled_maps_saturate_below_their_peak_and_smooth_ones_at_it() -> None:
    values = torch.linspace(0, 1, 10000).view(1, 100, 100)
    photo = Image.new("RGB", (100, 100))
    full = color_table("inferno")[255]

    def saturated(explanation: Explanation) -> int:
        return int((pixels_of(overlay(explanation, opacity=1)) == full).all(axis=2).sum())

    assert saturated(explained(values, whole(photo))) < 30
    assert 100 <= saturated(explained(values.expand(3, 100, 100), whole(photo), "absolute")) < 140


@pytest.mark.parametrize("limit", [-1.0, float("nan"), float("inf")])
def test_a_limit_that_is_no_value_is_an_error(limit: float) -> None:
    with pytest.raises(RenderError, match="limit"):
        overlay(explained(torch.rand(1, 4, 4), whole(noise(9, 9))), limit=limit)


def test_a_map_of_tiny_or_huge_values_is_drawn_like_any_other() -> None:
    values, photo = torch.rand(1, 4, 4, dtype=torch.float64), whole(noise(20, 20))
    plain = pixels_of(overlay(explained(values, photo)))
    for scale in (2.0**-900, 2.0**900):
        assert np.array_equal(pixels_of(overlay(explained(values * scale, photo))), plain)


# Degenerate maps -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opacity", [0.5, "map"])
@pytest.mark.parametrize("sign", ["positive", "signed", "absolute"])
def test_a_map_of_zeros_is_drawn_in_the_colour_of_zero_with_a_word(sign: Sign, opacity: Opacity) -> None:
    photo = noise(20, 10)
    with pytest.warns(SaliencyWarning, match="made_up map for espresso is zero everywhere"):
        drawn = pixels_of(overlay(explained(torch.zeros(1, 4, 4), whole(photo), sign), opacity=opacity))
    if opacity == "map":
        assert np.array_equal(drawn, pixels_of(photo))


def test_a_map_of_zeros_has_one_warning_in_a_call_and_its_drawing_and_in_a_run(tmp_path: Path) -> None:
    model = Tiny()
    torch.nn.init.zeros_(next(module for module in model.modules() if isinstance(module, nn.Linear)).weight)
    noise(40, 30).save(tmp_path / "a.png")
    for run in (
        lambda: overlay(GradCAM(model).attribute(tmp_path / "a.png", 0)),
        lambda: batch(tmp_path / "a.png", tmp_path / "maps", model, target=0),
    ):
        with pytest.warns(SaliencyWarning) as caught:
            run()
        (warning,) = caught
        assert "is 0 everywhere" in str(warning.message)


def test_a_map_that_the_relu_emptied_names_the_cure() -> None:
    with pytest.warns(SaliencyWarning, match='sign="signed"'):
        overlay(explained(-torch.rand(1, 4, 4) - 1, whole(noise(9, 9))))


@pytest.mark.parametrize("sign", ["positive", "signed", "absolute"])
@pytest.mark.parametrize(
    ("spread", "text"), [(0.0, r"constant \(0.25\)"), (0.01, r"nearly even \(0.25 to 0.26\), so it highlights nothing")]
)
def test_a_nearly_even_map_is_drawn_as_zero_with_a_word(sign: Sign, spread: float, text: str) -> None:
    picture = noise(70, 70)
    even = explained(0.25 + spread * hot(7, 7, 2, 4), whole(picture), sign)
    with pytest.warns(SaliencyWarning, match=text):
        drawn = overlay(even)
    assert np.array_equal(pixels_of(drawn), pixels_of(picture))
    with pytest.warns(SaliencyWarning, match="so it highlights nothing"):
        shared = pixels_of(overlay(even, opacity=1, limit=0.25))  # equal values have equal colours
    assert (shared == color_table("bwr" if sign == "signed" else "inferno", sign == "signed")[255]).all()


def test_a_map_of_one_cell_names_the_cure() -> None:
    with pytest.warns(SaliencyWarning, match="earlier layer"):
        overlay(explained(torch.ones(1, 1, 1), whole(noise(9, 9))))


def test_the_warning_points_at_the_line_that_drew() -> None:
    explanation = explained(torch.zeros(1, 4, 4), whole(noise(9, 9)))
    for draw in (
        lambda: overlay(explanation),
        lambda: cutout(explanation),
        lambda: figure(explanation),
        lambda: contact_sheet([[explanation]]),
    ):
        with pytest.warns(SaliencyWarning) as caught:
            draw()
        assert [each.filename for each in caught] == [__file__]


# Rounding errors -----------------------------------------------------------------------------------------------


def network(kind: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)).eval().to(kind)


def similarity(image: Tensor, model: nn.Module) -> Callable[[Tensor], Tensor]:
    """How like the model's output for an image another output is."""
    with torch.no_grad():
        own = model(image)
    return lambda output: nn.functional.cosine_similarity(output, own)


def saturated(model: nn.Module, image: Tensor, rest: float) -> Callable[[Tensor], Tensor]:
    """The probability of the top class, as sharpened as leaves `rest` to the others."""
    with torch.no_grad():
        first, second = model(image)[0].double().topk(2)[0].tolist()
    sharpness = -math.log(rest) / (first - second)
    return lambda output: (sharpness * output).softmax(1).amax(1)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", [saliency.InputXGradient, saliency.GradCAM])
def test_the_gradient_of_an_images_similarity_to_itself_is_drawn_as_zero_with_a_word(
    method: type[saliency.Attribution], kind: torch.dtype
) -> None:
    model, x, photo = network(kind), torch.randn(1, 3, 32, 32, dtype=kind), noise(32, 32)
    with pytest.warns(SaliencyWarning, match=f"{method.name} map for .*, below the rounding error of a score of 1$"):
        explanation = method(model).attribute(x, similarity(x, model))
    assert explanation.values.any()  # rounding errors
    explanation = replace(explanation, frames=(whole(photo),))
    nothing = replace(explanation, values=torch.zeros_like(explanation.values)).with_evidence(notes=None)
    for draw in (overlay, cutout, lambda each: contact_sheet([[each]]), lambda each: overlay(each, limit=1e-30)):
        with pytest.warns(SaliencyWarning, match=f"{method.name} map for .* is drawn as zero.*score of 1$") as caught:
            drawn = draw(explanation)
        assert [each.filename for each in caught] == [__file__]
        with pytest.warns(SaliencyWarning, match="zero everywhere"):
            assert np.array_equal(pixels_of(drawn), pixels_of(draw(nothing)))


def test_a_gradient_as_small_as_rounding_is_drawn_with_a_warning() -> None:
    """In other units of the input, or on a larger image, it may be right."""
    model, x = network(torch.float32), torch.randn(1, 3, 32, 32)
    with pytest.warns(SaliencyWarning, match="vanilla_gradient map for .*, below the rounding error of a score of 1$"):
        explanation = saliency.VanillaGradient(model).attribute(x, similarity(x, model))
    explanation = replace(explanation, frames=(whole(noise(32, 32)),))
    with pytest.warns(SaliencyWarning, match="vanilla_gradient map for .* may show rounding errors only"):
        drawn = overlay(explanation)
    larger = replace(explanation, values=explanation.values * 2**20)
    assert np.array_equal(pixels_of(drawn), pixels_of(overlay(larger)))


def test_relevance_below_the_rounding_error_of_the_score_is_drawn() -> None:
    """Biases absorb most of the score on deep networks, and the rest is still right."""
    explanation = saliency.LRP(network()).attribute(torch.rand(1, 3, 32, 32))
    explanation = replace(explanation, frames=(whole(noise(32, 32)),))
    smaller = replace(explanation, values=explanation.values * 2**-40)
    assert np.array_equal(pixels_of(overlay(smaller)), pixels_of(overlay(explanation)))


def test_a_low_limit_is_no_rounding_error() -> None:
    overlay(explained(torch.rand(1, 4, 4), whole(noise(9, 9)), method="grad_cam"), limit=1e-12)


@pytest.mark.parametrize(("kind", "rest"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
@pytest.mark.parametrize("method", [saliency.VanillaGradient, saliency.InputXGradient, saliency.GradCAM])
def test_the_small_gradient_of_a_saturated_probability_is_drawn(
    method: type[saliency.Attribution], kind: torch.dtype, rest: float
) -> None:
    model, x = network(kind), torch.randn(1, 3, 32, 32, dtype=kind)
    target = saturated(model, x, rest)
    explanation = method(model).attribute(x, target)
    assert 1 - 20 * rest < float(explanation.scores) < 1
    overlay(replace(explanation, frames=(whole(noise(32, 32)),)))


def test_small_values_of_a_small_score_and_in_other_units_are_drawn() -> None:
    small = explained(torch.rand(1, 4, 4) * 1e-12, whole(noise(9, 9)), method="grad_cam")
    with pytest.warns(SaliencyWarning, match="drawn as zero"):
        overlay(small)
    overlay(replace(small, scores=torch.full((1,), 1e-6)))
    overlay(replace(small, values=small.values.double()))
    overlay(replace(small, units=saliency.RefineCAM.units))


def test_nan_is_an_error() -> None:
    with pytest.raises(NonFiniteError):
        overlay(explained(torch.full((1, 4, 4), float("nan")), whole(noise(9, 9))))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_every_floating_type_is_drawn(kind: torch.dtype) -> None:
    photo = noise(20, 20)
    values = torch.arange(16.0).view(1, 4, 4)
    assert np.array_equal(
        pixels_of(overlay(explained(values.to(kind), whole(photo)))),
        pixels_of(overlay(explained(values, whole(photo)))),
    )


def test_values_that_need_gradients_are_drawn() -> None:
    assert overlay(explained(torch.rand(1, 4, 4, requires_grad=True), whole(noise(9, 9)))).size == (9, 9)


def test_a_map_of_a_batch_lies_at_its_crop_of_the_image(tmp_path: Path) -> None:
    image = blocks(tmp_path / "photos" / "00.png", 1, (90, 40))
    model = Tiny()
    quick(tmp_path / "photos", tmp_path / "run", model=model, methods=("grad_cam",), maps=True)
    loaded = Explanation.load(tmp_path / "run" / "maps" / "00.grad_cam.safetensors")
    direct = GradCAM(model).attribute(image, int(loaded.target[0] or 0))
    assert loaded.frames == (None,)
    assert loaded.boxes[0] == ImageBox((90, 40), direct.frames[0].box, None)  # type: ignore[union-attr]
    # The file has float16 values, so compare with the same values on the frame of the direct call.
    expected = overlay(replace(direct, values=loaded.values))
    for saved in (loaded, Explanation.load(loaded.save(tmp_path / "again.safetensors")), loaded[:1]):
        assert overlay(saved, image).tobytes() == expected.tobytes()
        assert cutout(saved, image).tobytes() == cutout(replace(direct, values=loaded.values)).tobytes()
    with pytest.raises(RenderError, match="90 x 40 pixels and the image 40 x 90"):
        overlay(loaded, noise(40, 90))


def test_a_map_of_a_16_bit_image_is_drawn_in_its_range(tmp_path: Path) -> None:
    deep = Image.fromarray(np.random.default_rng(0).integers(0, 4096, (40, 90), dtype=np.uint16))
    (tmp_path / "photos").mkdir()
    deep.save(tmp_path / "photos" / "00.png")
    model = Tiny()
    model.preprocess = replace(model.preprocess, range=(0, 4095))
    quick(tmp_path / "photos", tmp_path / "run", model=model, methods=("grad_cam",), maps=True)
    loaded = Explanation.load(tmp_path / "run" / "maps" / "00.grad_cam.safetensors")
    direct = GradCAM(model).attribute(deep, int(loaded.target[0] or 0))
    assert overlay(loaded, deep).tobytes() == overlay(replace(direct, values=loaded.values)).tobytes()
