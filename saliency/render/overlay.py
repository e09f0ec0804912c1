"""Draw an explanation over the original image, or show the image only where the map is strong, and save images."""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack, overload

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image

from ..attribution.explanation import Explanation, Sign
from ..attribution.heatmap import significance, single_images
from ..errors import RenderError
from ..io.atomic_write import SOFTWARE, write_by_suffix
from ..io.inputs import ImageLike
from ..validation import check_integer, check_number
from .blending import Opacity, cut_out, frame_of, paint, paint_layer, require_one, shrink
from .scaling import SMOOTHING, Percentile, Plane, scale_map

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
