"""Draw an explanation over the original image, or show the image only where the map is strong, and save images."""

from __future__ import annotations

import io
import math
import os
import struct
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, overload

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageColor, ImageDraw

from ..attribution.explanation import Explanation, require_explanation, significance, single_images
from ..errors import RenderError
from ..io.atomic_write import SOFTWARE, require_folder, write_by_suffix
from ..io.geometry import Frame, Geometry, resize_box, scaled_size
from ..io.inputs import ImageLike, open_image
from ..io.preprocess import drawable
from ..validation import Sign, check_integer, check_number, described
from .scaling import SMOOTHING, Percentile, Plane, ScaledMap, scale_map

Opacity = float | Literal["map"]
Mask = NDArray[np.bool_]
Area = tuple[slice, slice]
"""Rows and columns, as an index into an array of an image."""
Color = tuple[int, ...]


HATCHED = "hatched: tokens with an outlying norm"  # legend

CENTRE = 128  # the entry of zero in a centred table

BOX_COLOR = (0, 230, 64)  # of the explained box; no default colour map contains it
LINES = ((0, 0, 0, 128), (255, 255, 255, 128))  # around the crop; black or white is visible on any image
MOST_OPACITY = 0.8  # of opacity="map"; the image stays visible under the strongest values
LINES_PER_CROP = 240  # shorter edge of the crop, divided by the thickness of the lines around it
STRIPES_PER_EDGE = 400  # longer edge of the image, divided by the thickness of a stripe
STRIPES = 6  # distance between stripes, in widths of a stripe
CONTOURS_PER_EDGE = 250  # longer edge of the image, divided by the thickness of a contour
CELL_PIXELS = 16  # pixels of a heat image per cell of the map; more pixels add no detail
# Levels of the opacity of a heat image, which WebP then encodes faster; off by 2 of 255 levels at most.
ALPHA_LEVELS = np.float32(64)
MAX_COARSENESS = 3  # largest number of thumbnail pixels per pixel of a heat image, along one side
CONTOUR_TONES = ((3, "black"), (1, "white"))  # widths in lines: white between black is visible on any image


def require_one(explanation: Explanation, name: str) -> None:
    """Raise RenderError unless `explanation` is of one image. `name` is the function that draws it."""
    require_explanation(explanation, name)
    if len(explanation) != 1:
        raise RenderError(f"{name} draws one image and got {len(explanation)}; write [{name}(e) for e in explanation]")


def frame_of(explanation: Explanation, image: ImageLike | None = None) -> Frame:
    """Return the frame to draw on: of the explanation, or of `image`, a copy of the explained image in any size.

    The explained image of a tensor is the tensor itself.

    Raises:
        RenderError: The map is of a volume, there is no image, or `image` has other proportions.
    """
    if len(explanation.input_size) > 2:
        raise RenderError("the map is of a volume or video; draw it by slices(explanation, volume) or montage")
    frame = explanation.frames[0]
    if image is not None:
        saved = explanation.boxes[0] if explanation.boxes else None
        geometry = Geometry.of(frame, explanation.input_size)
        box, size = (geometry.box, geometry.image_size) if saved is None else (saved.box, saved.size)
        image = drawable(open_image(image), getattr(saved or frame, "range", None))
        if not _is_copy(image.size, size):
            what = "the explained image" if frame or saved else "the explained tensor"
            cure = "pass a copy of it in any size. If the tensor is a part of the image, pass preprocess=..., such as "
            sizes = "{} x {} pixels and the image {} x {}, other proportions".format(*size, *image.size)
            raise RenderError(f"{what} has {sizes}; {cure}saliency.Preprocess.letterbox(640) with the image itself")
        return Frame(image, resize_box(box, size, image.size))
    if frame is None:
        raise RenderError(
            "there is no image to draw on: the input was a tensor, or the map was saved without its image; explain a "
            "path or a PIL image, or pass overlay(..., image=image). A map of a tensor then covers the whole image"
        )
    return frame


def _is_copy(size: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return whether an image may be a resized copy of another image: their scales differ by less than a pixel."""
    return abs(size[0] * other[1] - size[1] * other[0]) < max(*size, *other)


def shrink(frame: Frame, thumb: int) -> Frame:
    """Resize a frame so that the longer edge of its image is `thumb`."""
    size = scaled_size(frame.image.size, thumb)
    small = frame.image.resize(size, Image.Resampling.LANCZOS, reducing_gap=3)
    return Frame(small, resize_box(frame.box, frame.image.size, size))


def box_pixels(frame: Frame) -> Area:
    """Return the pixels whose centres lie in the frame's box; at least the one under the middle of the box.

    Raises:
        RenderError: The box is outside the image.
    """
    left, top, right, bottom = frame.box
    width, height = frame.image.size
    rows, columns = _pixel_range(top, bottom, height), _pixel_range(left, right, width)
    if not rows or not columns:
        raise RenderError(f"the box {frame.box} is outside the image of {width}x{height} pixels")
    return slice(rows.start, rows.stop), slice(columns.start, columns.stop)


def _pixel_range(low: float, high: float, length: int) -> range:
    """Return the pixels of the image whose centres lie between two coordinates."""
    first, last = math.ceil(low - 0.5), math.ceil(high - 0.5)
    if first == last:  # thinner than a pixel, between two centres
        first = math.floor((low + high) / 2)
        last = first + 1
    return range(max(first, 0), min(last, length))


def resize_to_pixels(
    values: Plane, frame: Frame, area: Area, method: Image.Resampling = Image.Resampling.BILINEAR
) -> Plane:
    """Resize the map to the pixels of an area, by default bilinearly between the centres of cells: (rows, columns).

    Beyond the centres of the outermost cells the map is constant. If cells are smaller than pixels, all cells under a
    pixel are averaged, so no cell is skipped.
    """
    left, top, right, bottom = frame.box
    rows, columns = area
    height, width = values.shape
    # Where the area begins and ends on the map, in cells.
    x = [(edge - left) * width / (right - left) for edge in (columns.start, columns.stop)]
    y = [(edge - top) * height / (bottom - top) for edge in (rows.start, rows.stop)]
    # A pixel at the border of the box may extend beyond the map.
    pad = max(0, math.ceil(max(-x[0], x[1] - width, -y[0], y[1] - height)))
    cells = Image.fromarray(np.pad(values, pad, mode="edge") if pad else values)
    size = columns.stop - columns.start, rows.stop - rows.start
    box = x[0] + pad, y[0] + pad, x[1] + pad, y[1] + pad
    return np.asarray(cells.resize(size, method, box=box))


def paint(
    frame: Frame,
    scaled: ScaledMap,
    colormap: str | None,
    opacity: Opacity,
    visibility: Plane | None = None,
    contours: Sequence[float] = (),
    threshold: float = 0.0,
) -> Image.Image:
    """Return the frame's image with the map over its box, in RGB; unchanged outside the box and at opacity 0.

    With opacity "map", two thin lines mark the box, unless it covers the image. `visibility` (h, w) scales the opacity
    of each cell, 0 to 1; None leaves it unchanged. Outliers have stripes instead of colours. Lines surround the
    magnitudes above each of `contours`, and a green line the box that the target explains. Pixels of a magnitude below
    `threshold` are unchanged. `contours` and `threshold` are fractions of the value at full colour.
    """
    follows_map = isinstance(opacity, str) and opacity == "map"
    if not follows_map:
        opacity = check_number("opacity", opacity, least=0, most=1, hint=', or "map"', error=RenderError)
    most = np.float32(MOST_OPACITY if follows_map else opacity)
    area = box_pixels(frame)
    values = resize_to_pixels(scaled.values, frame, area)
    weight = most * np.abs(values) if follows_map else np.full_like(values, most)
    if check_number("threshold", threshold, least=0, most=1, error=RenderError):
        weight[np.abs(values) < threshold] = 0
    if visibility is not None:
        weight *= resize_to_pixels(visibility, frame, area)
    stripes = list(hatching(scaled, frame, area))
    for *_, pixels in stripes:
        weight[pixels] = 0
    drawing = as_drawing(frame.image.copy())
    blend(drawing, colorize(values, scaled, colormap), area, weight)
    for tone, strength, pixels in stripes:
        blend(drawing, (tone,) * 3, area, most * strength * pixels)
    if follows_map:
        outline(drawing, area)
    if box := scaled.placed_box(frame):
        left, top, right, bottom = (max(0, round(edge)) for edge in box)
        width = max(drawing.size) / STRIPES_PER_EDGE
        outline(drawing, (slice(top, bottom), slice(left, right)), width, ((0, 0, 0, 255), BOX_COLOR))
    draw_contours(drawing, values, area, contours)
    return drawing


def paint_layer(frame: Frame, *style: Any) -> Image.Image:
    """Return what `paint` draws on an image, without the image: RGBA, from its results on black and on white."""
    black, white = (
        np.asarray(paint(Frame(Image.new("RGB", frame.image.size, tone), frame.box), *style), np.float32)
        for tone in ("black", "white")
    )
    alpha = 255 - (white - black).mean(axis=2, keepdims=True)
    colors = np.minimum(255, black * 255 / np.maximum(alpha, 1))
    return as_drawing(Image.fromarray(np.concatenate([colors, alpha], axis=2).round().astype(np.uint8)))


def colorize(values: Plane, scaled: ScaledMap, colormap: str | None) -> Image.Image:
    """Return the colours of resized values of a scaled map, in RGB: the nearest entries of its table."""
    base, gain = (CENTRE, 127) if scaled.sign == "signed" else (0, 255)  # zero is the centre of a signed table
    colors = Image.fromarray((values * np.float32(gain) + np.float32(base + 0.5)).astype(np.uint8))
    colors.putpalette(scaled.colors(colormap).tobytes())
    return colors.convert("RGB")


def cut_out(frame: Frame, scaled: ScaledMap, keep: float | None, background: str) -> Image.Image:
    """Return the image of a frame where its map is strong, on a plain background.

    Args:
        frame: The image, and the box that the map covers.
        scaled: The map.
        keep: The fraction of the box to show; None to fade the image by the map.
        background: A colour as Pillow writes it.

    Raises:
        RenderError: The background is not a colour.
    """
    area = box_pixels(frame)
    weight = np.abs(resize_to_pixels(scaled.values, frame, area))
    if keep is not None:
        hidden = weight.size - max(1, round(weight.size * keep))
        weight = ((weight >= np.partition(weight, hidden, axis=None)[hidden]) & (weight > 0)).astype(np.float32)
    try:
        color = ImageColor.getcolor(str(background), "RGB")
    except ValueError as error:
        raise RenderError(f'background={described(background)} is not a colour, as a name or "#rrggbb"') from error
    drawing = as_drawing(Image.new("RGB", frame.image.size, color))
    blend(drawing, frame.image.crop(corners(area)), area, weight)
    return drawing


def heat_image(
    scaled: ScaledMap, frame: Frame, thumbnail: tuple[int, int], colormap: str | None, opacity: Opacity
) -> Image.Image:
    """Draw the heatmap without the image, which lies below it on a page: transparent outside the crop.

    Inside the crop, the image is opaque. If the opacity follows the map, the image is as opaque as the scaled map is
    strong, with lines around the crop. The page multiplies this opacity by its setting.

    The image has the proportions of the thumbnail, and a half or a third of its size if the map cells are large enough.
    """
    left, top, right, bottom = frame.box
    cells = (right - left) / scaled.values.shape[1], (bottom - top) / scaled.values.shape[0]
    pitch = min(cells) * thumbnail[0] / frame.image.width
    coarseness = max(1, min(MAX_COARSENESS, int(pitch / CELL_PIXELS)))
    size = math.ceil(thumbnail[0] / coarseness), math.ceil(thumbnail[1] / coarseness)
    plane = Frame(Image.new("RGB", size), resize_box(frame.box, frame.image.size, size))
    area = box_pixels(plane)
    values = resize_to_pixels(scaled.values, plane, area)
    heat = plane.image
    heat.paste(colorize(values, scaled, colormap), corners(area))
    alpha = Image.new("L", size)
    visibility = np.round(np.abs(values) * ALPHA_LEVELS) / ALPHA_LEVELS
    blend(alpha, (255,), area, visibility if opacity == "map" else np.ones_like(visibility))
    heat.putalpha(alpha)
    for tone, strength, pixels in hatching(scaled, plane, area):
        blend(heat, (tone, tone, tone, 255 * strength), area, pixels.astype(np.float32))
    if opacity == "map":
        outline(heat, area)
    return heat


def hatching(scaled: ScaledMap, frame: Frame, area: Area) -> Iterator[tuple[int, int, Mask]]:
    """Yield the tone, the opacity and the pixels of an area where outliers are hatched.

    First all pixels of outliers, transparent; then diagonal stripes, black (0) next to white (255). Black or white is
    visible on any image.
    """
    if scaled.outliers is None:
        return
    marked = resize_to_pixels(scaled.outliers, frame, area, Image.Resampling.NEAREST) > 0
    rows, columns = marked.shape
    width = max(1, round(max(frame.image.size) / STRIPES_PER_EDGE))
    diagonals = sliding_window_view(np.arange(rows + columns) // width % STRIPES, columns)[:rows]
    yield 0, 0, marked
    yield 0, 1, marked & (diagonals == 0)
    yield 255, 1, marked & (diagonals == 1)


def outline(image: Image.Image, area: Area, width: float | None = None, colors: Sequence[Color] = LINES) -> None:
    """Draw two lines inside the border of an area, by default black and half transparent, with white inside.

    Black or white is visible on any image. Nothing is drawn if the area covers the image.
    """
    left, top, right, bottom = corners(area)
    right, bottom = min(right, image.width), min(bottom, image.height)
    if (left, top, right, bottom) == (0, 0, *image.size):
        return
    width = max(1, round(min(right - left, bottom - top) / LINES_PER_CROP if width is None else width))
    draw = ImageDraw.Draw(image, "RGBA")
    for color in colors:
        thickness = min(width, right - left, bottom - top)
        if thickness > 0:
            draw.rectangle((left, top, right - 1, bottom - 1), outline=color, width=thickness)
        left, top, right, bottom = left + width, top + width, right - width, bottom - width


def draw_contours(image: Image.Image, values: Plane, area: Area, levels: object) -> None:
    """Draw the lines at which the magnitude of a scaled map crosses some levels, on an RGB image in place.

    Args:
        image: The image.
        values: (h, w) the scaled map, at the pixels of the area.
        area: The rows and columns of the image that the map covers.
        levels: The magnitudes, above 0 and below 1.

    Raises:
        RenderError: The levels are not numbers in this range.
    """
    if isinstance(levels, str) or not isinstance(levels, Sequence):
        raise RenderError(f"contours={described(levels)} is not a list of levels, such as (0.5, 0.8)")
    if not levels:
        return
    from contourpy import contour_generator  # a part of matplotlib, which loads where it is used

    # A margin of zeros closes the lines of regions at the edge of the map.
    contours = contour_generator(z=np.pad(np.abs(values), 1))
    draw, width = ImageDraw.Draw(image), max(1, round(max(image.size) / CONTOURS_PER_EDGE))
    corner = np.array(corners(area)[:2]) - 1
    hint = ", a fraction of the value at full colour"
    for level in levels:
        magnitude = check_number("contours", level, above=0, below=1, hint=hint, error=RenderError)
        lines = [np.asarray(line) + corner for line in contours.lines(magnitude)]
        for times, tone in CONTOUR_TONES:
            for line in lines:
                draw.line([(x, y) for x, y in line.tolist()], fill=tone, width=times * width, joint="curve")


class Drawing(Image.Image):
    """Image whose `save` compresses PNG lightly by default: several times faster than Pillow, and about 10 % larger."""

    def save(self, fp: Any, format: str | None = None, **params: Any) -> None:
        """Write the image as `PIL.Image.Image.save` does, with `compress_level=1` unless another level is given."""
        if isinstance(fp, str | Path):
            require_folder(Path(fp))
        super().save(fp, format, **{"compress_level": 1, **params})


def as_drawing(image: Image.Image) -> Drawing:
    """Return the same image as a Drawing. Pillow has no public constructor for subclasses."""
    drawing = Drawing()
    vars(drawing).update(vars(image))
    return drawing


def blend(image: Image.Image, colors: Image.Image | Color, area: Area, weight: Plane) -> None:
    """Mix an area of an image with `colors`: weight 0 keeps the pixels, weight 1 replaces them.

    The result is at most one level from the rounded mean, and equals it at 0 and 1.
    """
    mask = Image.fromarray((weight * np.float32(255) + np.float32(0.5)).astype(np.uint8))
    image.paste(colors, corners(area), mask)


def corners(area: Area) -> tuple[int, int, int, int]:
    """Return the left, upper, right and lower edge of an area."""
    rows, columns = area
    return columns.start, rows.start, columns.stop, rows.stop


def probability(explanation: Explanation) -> list[str]:
    """Return the probability of the class of one image as text, ["95.1 %"]; [] if the target is not one class."""
    if explanation.probabilities is None or any(explanation.contrasts):
        return []
    return [f"{100 * float(explanation.probabilities[0]):.1f} %"]


DRAWING_SUFFIXES = (".jpeg", ".jpg", ".png", ".webp")
QUALITY = 90  # of JPEG and WebP


class _Style(TypedDict, total=False):
    size: int | None
    opacity: Opacity
    colormap: str | None
    sign: Sign | None
    percentile: Percentile
    smoothing: float
    limit: float | None
    min_significance: float | None
    contours: Sequence[float]
    threshold: float
    background: bool


@overload
def overlay(explanations: Explanation, image: ImageLike | None = ..., **style: Unpack[_Style]) -> Image.Image | Any: ...
@overload
def overlay(
    explanations: Sequence[Explanation], image: ImageLike | None = ..., **style: Unpack[_Style]
) -> list[Image.Image]: ...
def overlay(
    explanations: Explanation | Sequence[Explanation],
    image: ImageLike | None = None,
    *,
    size: int | None = None,
    opacity: Opacity = "map",
    colormap: str | None = None,
    sign: Sign | None = None,
    percentile: Percentile = "auto",
    smoothing: float = SMOOTHING,
    limit: float | None = None,
    min_significance: float | None = None,
    contours: Sequence[float] = (),
    threshold: float = 0.0,
    background: bool = True,
) -> Image.Image | list[Image.Image]:
    """Draw the map in colours over the original, uncropped image: RGB, in the size of the image.

    Outside the model's crop, and everywhere at opacity 0, the result equals the image bit for bit. Two thin lines mark
    the crop if the opacity follows the map. A green line marks the box that a target such as `saliency.box` explains.
    The values of the explanation never change.

    Args:
        explanations: An explanation of one image. Several images, or a list of explanations, give a list of overlays,
            one per image. For a list that type checkers know, pass `list(explanation)`.
        image: An image to draw on instead of the explanation's image: a copy of the explained image in
            any size, on which the map keeps its position. The map of a tensor covers all of an image of its
            proportions. A map of `saliency batch` needs the image, because it is saved without it.
        size: The longer edge of the result in pixels; by default the size of the image. A small overlay of a large
            image is drawn and saved much faster.
        opacity: "map" for 0.8 times the magnitude of the scaled map, so that pixels at zero stay unchanged; or 0..1
            everywhere in the crop.
        colormap: Any name of matplotlib; by default inferno, and bwr (blue, white, red) for signed maps, with zero in
            the middle.
        sign: As in `heatmap`; by default as in the paper of the method.
        percentile: Colours saturate at this percentile of the map's magnitudes. None is the largest magnitude; "auto"
            is 99 for gradients at the input, for maps of a layer and for positive maps (drawn above their minimum).
            Otherwise it is the largest magnitude.
        smoothing: Each drawn value is an average with a Gaussian, whose standard deviation is this fraction of the
            map's longer edge: 0.005 is about one pixel of an input of 224. Coarse maps do not change. 0 draws the
            values.
        limit: The map value at full colour, instead of a percentile, such as a `shared_limit`. The colours begin at 0.
        min_significance: Fade pixels whose value is within this many standard errors of zero. With 2, pixels that may
            be due to chance are faded. Only for methods that sample; see `significance`.
        contours: Draw lines around the regions whose magnitude exceeds these fractions of the value at full colour,
            such as (0.5, 0.8); with `opacity=0` only the lines, for print.
        threshold: Leave the image unchanged where the magnitude is below this fraction of the value at full colour.
        background: Whether the image is drawn below the map. False gives only what is drawn on it, in RGBA, to place
            over the image yourself: `image.convert("RGBA").alpha_composite` of it is the overlay, up to rounding.

    Raises:
        NonFiniteError: A value is NaN or infinite.
        RenderError: There is no explanation, no image to draw on, an image whose proportions differ from the explained
            image, or an invalid option.

    Warns:
        SaliencyWarning: A map is nearly even, or below the rounding error, and is drawn as zero.
    """
    drawn: list[Image.Image] = []
    for explanation in single_images(explanations, "overlay"):
        frame = frame_of(explanation, image)
        scaled = scale_map(explanation, sign, percentile, limit, smoothing)
        frame = frame if size is None else shrink(frame, check_integer("size", size, least=1, error=RenderError))
        visibility = None if min_significance is None else _visibility(explanation, sign, min_significance)
        draw = paint if background else paint_layer
        drawn.append(draw(frame, scaled, colormap, opacity, visibility, contours, threshold))
    return drawn[0] if isinstance(explanations, Explanation) and len(drawn) == 1 else drawn


def _visibility(explanation: Explanation, sign: Sign | None, min_significance: float) -> Plane:
    """Return the factor of the opacity of each cell, 0 to 1: (h, w)."""
    hint = "; it is a number of standard errors, such as 2"
    errors = check_number("min_significance", min_significance, above=0, hint=hint, error=RenderError)
    visibility: Plane = (significance(explanation, sign=sign)[0] / errors).clamp(max=1).float().cpu().numpy()
    return visibility


def cutout(
    explanation: Explanation,
    image: ImageLike | None = None,
    *,
    keep: float | None = 0.2,
    background: str = "black",
    sign: Sign | None = None,
) -> Image.Image:
    """Show the image only where the map is strong, on a plain background: RGB, in the size of the image.

    Outside the model's crop everything is background: the model did not see it.

    Args:
        explanation: An explanation of one image.
        image: As in `overlay`.
        keep: The fraction of the crop's pixels to show, in descending order of magnitude. Ties are shown, pixels at
            zero are not. None fades the image by the map.
        background: A colour: a name ("white"), "#rrggbb", or another format of Pillow.
        sign: As in `heatmap`; by default as in the paper of the method.

    Raises:
        NonFiniteError: A value is NaN or infinite.
        RenderError: There is more than one image, no image to draw on, or an invalid option.

    Warns:
        SaliencyWarning: The map is nearly even, or below the rounding error, and is treated as zero.
    """
    require_one(explanation, "cutout")
    if keep is not None:
        keep = check_number("keep", keep, above=0, most=1, hint=", a fraction of pixels, or None", error=RenderError)
    frame = frame_of(explanation, image)
    scaled = scale_map(explanation, sign, "auto" if keep is None else None, from_zero=keep is not None)
    return cut_out(frame, scaled, keep, background)


def save_drawing(image: Image.Image, path: str | os.PathLike[str]) -> Path:
    """Write an RGB image in the format of the path's suffix, and return the path.

    The file is written atomically: under a temporary name, and then renamed. PNG is lossless, and written several
    times faster than by Pillow; JPEG and WebP have quality 90. The metadata name the toolkit; see `is_drawing`.

    Raises:
        MethodError: The suffix is not .png, .jpg, .jpeg or .webp.
        OSError: The folder is missing, or not writable.
    """
    return write_by_suffix(path, {suffix: partial(encode_drawing, image, suffix) for suffix in DRAWING_SUFFIXES})


def encode_drawing(image: Image.Image, suffix: str) -> bytes:
    """Return an RGB image as the content of a file with a suffix; see `save_drawing`."""
    if suffix == ".png":
        return encode_png(np.asarray(image), SOFTWARE)
    exif = Image.Exif()
    exif[ExifTags.Base.Software] = SOFTWARE
    file = io.BytesIO()
    image.save(file, format="WEBP" if suffix == ".webp" else "JPEG", quality=QUALITY, exif=exif)
    return file.getvalue()


try:  # Compresses a photograph in a third of the time of zlib. The extra `cli` installs it.
    from isal.isal_zlib import compress, crc32
except ImportError:
    from zlib import compress, crc32

RGB = 2  # the colour type in the header
UP = 2  # the filter: differences from the row above


def encode_png(pixels: NDArray[np.uint8], software: str) -> bytes:
    """Return a PNG file.

    Args:
        pixels: The image, (H, W, 3) RGB.
        software: The software that the metadata name, in ASCII.
    """
    height, width = pixels.shape[:2]
    rows = pixels.reshape(height, 3 * width)
    lines = np.empty((height, 1 + 3 * width), np.uint8)  # each row after the byte of its filter
    lines[:, 0] = UP
    lines[0, 1:] = rows[0]
    np.subtract(rows[1:], rows[:-1], out=lines[1:, 1:])
    header = struct.pack(">2I5B", width, height, 8, RGB, 0, 0, 0)
    text = f"Software\0{software}".encode()
    parts = [b"\x89PNG\r\n\x1a\n"]
    for kind, data in ((b"IHDR", header), (b"tEXt", text), (b"IDAT", compress(lines.data, 1)), (b"IEND", b"")):
        parts += [struct.pack(">I", len(data)), kind, data, struct.pack(">I", crc32(data, crc32(kind)))]
    return b"".join(parts)
