"""Open image files, arrays and tensors as upright RGB images."""

from __future__ import annotations

import importlib
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import ExifTags, Image
from torch import Tensor

from ..errors import ImageError

ImageLike = str | os.PathLike[str] | Image.Image | np.ndarray[Any, Any] | Tensor

MAX_PIXELS = 178_956_970  # half a gigabyte of decoded pixels

_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
for _plugin in ("Avif", "Bmp", "Gif", "Jpeg", "Jpeg2K", "Png", "Ppm", "Tiff", "WebP"):
    importlib.import_module(f"PIL.{_plugin}ImagePlugin")  # registers the format in Image.OPEN

_HEIC = re.compile(rb"....ftyp(heic|heix|heim|heis|hevc|hevx)", re.DOTALL)
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def open_picture(image: ImageLike, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Open an image as a new upright RGB image.

    The EXIF orientation is applied, transparency is composited over white, and 16 bits are scaled to 8. Of an animation
    the first frame is read. The format of a file is detected from its content, not from its name: AVIF, BMP, GIF, JPEG,
    JPEG 2000, PNG, PPM, TIFF or WebP.

    Args:
        image: A path, a PIL image, a uint8 or uint16 array (H, W, 3), (H, W, 4), (H, W, 1) or (H, W), or a uint8 tensor
            (C, H, W).
        max_pixels: A larger image is refused before it is decoded.

    Raises:
        ImageError: `image` is none of these, or the file is missing, damaged, too large or not an image.
    """
    if isinstance(image, str | os.PathLike):
        return _open_path(image, max_pixels)
    if isinstance(image, Image.Image):
        return _decode_checked(image, "the PIL image", max_pixels)
    if isinstance(image, np.ndarray):
        return _decode_checked(_array_to_image(image), "the array", max_pixels)
    if isinstance(image, Tensor):
        return _decode_checked(_array_to_image(_tensor_to_array(image)), "the tensor", max_pixels)
    raise ImageError(
        f"{type(image).__name__} is not an image; expected a path, a PIL image, a uint8 array (H, W, 3), a tensor, or "
        "a list of these"
    )


def _open_path(path: str | os.PathLike[str], max_pixels: int) -> Image.Image:
    name = os.fsdecode(path)
    try:
        # Check before opening, since a FIFO would block and a device may have side effects.
        path = Path(name)
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
            raise ImageError(f"{name!r} is {kind}; expected an image file")
        with path.open("rb") as file:
            return decode(file, name, max_pixels)
    except (OSError, ValueError) as error:
        if isinstance(error, ImageError):
            raise
        raise ImageError(f"{name!r} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def decode(file: BinaryIO, name: str, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode an open file as an upright RGB image.

    Pillow's readers are called directly, so that the size is checked before anything is decoded. `Image.open` only
    warns above a global limit, and warnings cannot be configured for a single thread.

    Raises:
        ImageError: The file is empty, damaged, too large or not an image.
    """
    head = file.read(32)
    readers = [Image.OPEN[name] for name in _FORMATS if name in Image.OPEN]
    accepting = [reader for reader, accepts in readers if accepts is None or accepts(head.ljust(32, b"\0")) is True]
    if not accepting:
        problem = "is not an AVIF, BMP, GIF, JPEG, JPEG 2000, PNG, PPM, TIFF or WebP image" if head else "is empty"
        hint = " but HEIC, the photo format of many phones; save it as JPEG or PNG" if _HEIC.match(head) else ""
        raise ImageError(f"{name!r} {problem}{hint}")
    file.seek(0)
    try:
        image = accepting[0](file, name)
    except Exception as error:
        raise ImageError(f"{name!r} is damaged: {str(error) or type(error).__name__}") from error
    return _decode_checked(image, repr(name), max_pixels)


def _decode_checked(image: Image.Image, name: str, max_pixels: int) -> Image.Image:
    """Check the size, then decode and convert to upright RGB. Every Pillow error becomes an ImageError."""
    width, height = image.size
    if width < 1 or height < 1:
        raise ImageError(f"{name} has no pixels: it is {width} x {height}")
    if width * height > max_pixels:
        raise ImageError(f"{name} has {width} x {height} pixels, more than the limit of {max_pixels}; resize it first")
    try:
        return _as_rgb(_apply_orientation(image))
    except ImageError as error:
        raise ImageError(f"{name}: {error}") from error
    except Exception as error:
        raise ImageError(f"{name} is damaged: {str(error) or type(error).__name__}") from error


# Orientation and colour


def _apply_orientation(image: Image.Image) -> Image.Image:
    image.load()
    try:
        turn = _UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # noqa: BLE001 - pixels can be intact although the metadata is damaged
        turn = None
    return image if turn is None else image.transpose(turn)


def _as_rgb(image: Image.Image) -> Image.Image:
    """Return a new RGB image without metadata, so that its orientation is not applied twice."""
    if image.mode.startswith("I"):
        image = _to_8_bits(image)
    if image.mode == "F":
        raise ImageError("floating-point pixels have no agreed range; save it with 8 bits, or pass a uint8 array")
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        colour = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", colour.size, "white"), colour)
    rgb = image.convert("RGB")  # a copy, even if it is RGB already
    rgb.info.clear()
    return rgb


def _to_8_bits(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.int64)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 65535:
        raise ImageError(f"its pixels lie in {low}..{high}, expected 0..65535; save the image with 8 bits")
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        values[values == transparent] = 65535
    return Image.fromarray(_scale_16_to_8_bits(values))


def _scale_16_to_8_bits(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Scale 0..65535 to 0..255, rounded."""
    return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)


# Arrays and tensors


def _array_to_image(array: np.ndarray[Any, Any]) -> Image.Image:
    has_image_shape = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3, 4))
    if not has_image_shape or array.dtype not in (np.uint8, np.uint16):
        raise ImageError(
            f"an array of shape {array.shape} and type {array.dtype} is not an image; expected uint8 in 0..255 or "
            "uint16 in 0..65535, of shape (H, W), (H, W, 1), (H, W, 3) or (H, W, 4). Move the channels with "
            "array.transpose(1, 2, 0), pass several images as list(array), scale and round other types. Or pass the "
            "model's own normalised input as a float tensor (C, H, W)"
        )
    array = _scale_16_to_8_bits(array) if array.dtype == np.uint16 else array
    return Image.fromarray(np.ascontiguousarray(array[..., 0] if array.shape[2:] == (1,) else array))


def _tensor_to_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return a uint8 tensor (C, H, W) as an array (H, W, C)."""
    if tensor.dtype != torch.uint8 or tensor.ndim != 3 or tensor.shape[0] not in (1, 3, 4):
        raise ImageError(
            f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)} is not an image; expected uint8 in 0..255, of "
            "shape (1, H, W), (3, H, W) or (4, H, W). Move the channels with tensor.permute(2, 0, 1), convert other "
            "types. Or pass the model's own normalised input as a float tensor"
        )
    array: np.ndarray[Any, Any] = tensor.detach().cpu().permute(1, 2, 0).numpy()
    return array
