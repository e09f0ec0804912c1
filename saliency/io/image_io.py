"""Files, arrays and tensors of any kind -> upright RGB pictures."""

from __future__ import annotations

import os
import re
import stat
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageFile,
    Jpeg2KImagePlugin,
    JpegImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)
from torch import Tensor

from ..errors import ImageError

ImageLike = str | os.PathLike[str] | Image.Image | np.ndarray[Any, Any] | Tensor

MAX_PIXELS = 178_956_970  # a decoded picture of half a gigabyte

_ORIENTATION = 0x0112  # the EXIF tag
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
    """An upright RGB picture that is the caller's own.

    EXIF orientation is applied, transparency is laid over white, 16 bits are scaled to 8, and of an animation
    the first frame is taken. Files are read by Pillow, whatever their names, if they begin like AVIF, BMP, GIF,
    JPEG, JPEG 2000, PNG, PPM, TIFF or WebP.

    Args:
        image: A path, a PIL picture, a uint8 or uint16 array (H, W, 3), (H, W, 4), (H, W, 1) or (H, W), or a
            uint8 tensor (C, H, W).
        max_pixels: A larger picture is refused before it is decoded.

    Raises:
        ImageError: It is none of these, or the file is missing, damaged, too large or no picture.
    """
    if isinstance(image, str | os.PathLike):
        return _open_path(image, max_pixels)
    if isinstance(image, Image.Image):
        return _guarded(image, "the PIL picture", max_pixels)
    if isinstance(image, np.ndarray):
        return _guarded(_from_array(image), "the array", max_pixels)
    if isinstance(image, Tensor):
        return _guarded(_from_array(_picture_array(image)), "the tensor", max_pixels)
    raise ImageError(
        f"{type(image).__name__} is no image; expected a path, a PIL picture, a uint8 array (H, W, 3), a "
        "tensor, or a list of these"
    )


def _open_path(path: str | os.PathLike[str], max_pixels: int) -> Image.Image:
    name = os.fsdecode(path)
    try:
        # Asked before opening, where a FIFO waits and a device acts, and again of what was opened.
        _require_regular(name, Path(name).stat().st_mode)
        with open(name, "rb", opener=_open_without_waiting) as file:
            _require_regular(name, os.fstat(file.fileno()).st_mode)
            return decode(file, name, max_pixels)
    except (OSError, ValueError) as error:
        if isinstance(error, ImageError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise ImageError(f"{name!r} cannot be read: {reason}") from error


def _open_without_waiting(name: str, flags: int) -> int:
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))


def _require_regular(name: str, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise ImageError(f"{name!r} is {kind}; expected an image file")


class _Jpeg(JpegImagePlugin.JpegImageFile):
    """A JPEG whose resolution Pillow does not look up in EXIF data, warning of damage to them."""

    def getexif(self) -> Image.Exif:
        """Nothing: `_orientation` reads the one entry that matters."""
        return Image.Exif()


def _reader(head: bytes) -> type[ImageFile.ImageFile] | None:
    """Pillow's class for the format that a file begins like."""
    signatures: tuple[tuple[str, type[ImageFile.ImageFile]], ...] = (
        (r"\xff\xd8\xff", _Jpeg),
        (r"\x89PNG\r\n\x1a\n", PngImagePlugin.PngImageFile),
        (r"GIF8[79]a", GifImagePlugin.GifImageFile),
        (r"RIFF....WEBP", WebPImagePlugin.WebPImageFile),
        (r"BM", BmpImagePlugin.BmpImageFile),
        (r"II[*+]\0|MM\0[*+]", TiffImagePlugin.TiffImageFile),
        (r"P[1-6]\s", PpmImagePlugin.PpmImageFile),
        (r"\xff\x4f\xff\x51|\0\0\0\x0cjP  \r\n\x87\n", Jpeg2KImagePlugin.Jpeg2KImageFile),
        (r"....ftyp(avif|avis|mif1|msf1)", AvifImagePlugin.AvifImageFile),
    )
    return next((reader for start, reader in signatures if re.match(start.encode("latin-1"), head, re.DOTALL)), None)


def _known_kind(head: bytes) -> str:
    """What pictures are called that are not read; nothing for what is none."""
    signatures = (
        (r"....ftyp(heic|heix|heim|heis|hevc|hevx)", "HEIC, as phones take photos"),
        (r"\xff\x0a|\0\0\0\x0cJXL ", "JPEG XL"),
        (r"(\xef\xbb\xbf)?\s*<(svg|\?xml)", "XML or SVG"),
        (r"8BPS", "Photoshop's"),
        (r"%PDF", "PDF"),
    )
    return next((kind for start, kind in signatures if re.match(start.encode("latin-1"), head, re.DOTALL)), "")


def decode(file: BinaryIO, name: str, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """An upright RGB picture from an open file.

    Pillow's readers are called directly: the header is read, the size is checked, and only then is anything
    decoded. `Image.open` would try one format after the other, and check the size against a global limit by a
    warning, which cannot be silenced or sharpened in one thread without doing it in all of them.

    Raises:
        ImageError: It is empty, damaged, too large or no picture.
    """
    head = file.read(32)
    reader = _reader(head)
    if reader is None:
        what = "is no AVIF, BMP, GIF, JPEG, JPEG 2000, PNG, PPM, TIFF or WebP picture" if head else "is empty"
        kind = _known_kind(head)
        raise ImageError(f"{name!r} {what}{f' but {kind}; save it as JPEG or PNG' if kind else ''}")
    file.seek(0)
    try:
        picture = reader(file, name)
    except Exception as error:
        raise ImageError(f"{name!r} is damaged: {_reason(error)}") from error
    return _guarded(picture, repr(name), max_pixels)


def _guarded(picture: Image.Image, name: str, max_pixels: int) -> Image.Image:
    """Check the size, then decode and convert; whatever Pillow raises on the way becomes an ImageError."""
    width, height = picture.size
    if width < 1 or height < 1:
        raise ImageError(f"{name} has no pixels: it is {width} x {height}")
    if width * height > max_pixels:
        raise ImageError(
            f"{name} has {width} x {height} pixels, more than the limit of {max_pixels}; "
            "make it smaller, or pass max_pixels= if you trust it"
        )
    try:
        return _as_rgb(_upright(picture))
    except ImageError as error:
        raise ImageError(f"{name}: {error}") from error
    except Exception as error:
        raise ImageError(f"{name} is damaged: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


# Orientation and colour


def _upright(picture: Image.Image) -> Image.Image:
    picture.load()
    turn = _UPRIGHT.get(_orientation(picture))
    return picture if turn is None else picture.transpose(turn)


def _orientation(picture: Image.Image) -> int:
    """The EXIF orientation, or 0. The bytes are read here: Pillow would warn of damage to any other entry."""
    exif, xmp = picture.info.get("exif"), picture.info.get("xmp") or picture.info.get("XML:com.adobe.xmp")
    if not exif and not xmp:
        return int(picture.getexif().get(_ORIENTATION, 0))
    told = re.search(rb'tiff:Orientation(?:="|>)([0-9])', xmp.encode() if isinstance(xmp, str) else xmp or b"")
    return _exif_orientation(exif or b"") or (int(told[1]) if told else 0)


def _exif_orientation(exif: bytes) -> int:
    while exif.startswith(b"Exif\0\0"):
        exif = exif[6:]
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return 0
    try:
        (start,) = struct.unpack_from(f"{order}L", exif, 4)
        (count,) = struct.unpack_from(f"{order}H", exif, start)
        for at in range(start + 2, start + 2 + 12 * count, 12):
            tag, kind = struct.unpack_from(f"{order}HH", exif, at)
            if tag == _ORIENTATION:
                return int(struct.unpack_from(f"{order}{'L' if kind == 4 else 'H'}", exif, at + 8)[0])
    except struct.error:  # damaged metadata say nothing about the picture
        return 0
    return 0


def _as_rgb(picture: Image.Image) -> Image.Image:
    """A new RGB picture without metadata, so that nobody turns it a second time."""
    if picture.mode.startswith("I"):
        picture = _eight_bits(picture)
    if picture.mode == "F":
        raise ImageError("floating point pixels have no agreed range; save it as 8 bit, or pass a uint8 array")
    if picture.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in picture.info:
        picture = _over_white(picture)
    rgb = picture.convert("RGB")  # a copy where it is RGB already
    rgb.info.clear()
    return rgb


def _eight_bits(picture: Image.Image) -> Image.Image:
    values = np.asarray(picture).astype(np.int64)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 65535:
        raise ImageError(f"its pixels lie in {low}..{high}, expected 0..65535; save it as 8 bit")
    transparent = picture.info.get("transparency")
    if isinstance(transparent, int):
        values[values == transparent] = 65535
    return Image.fromarray(_scaled(values))


def _scaled(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """0..65535 -> 0..255, rounded."""
    return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)


def _over_white(picture: Image.Image) -> Image.Image:
    straight = picture.convert("LA") if picture.mode == "La" else picture
    colour = straight.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", colour.size, "white"), colour)


# Arrays and tensors


def _from_array(array: np.ndarray[Any, Any]) -> Image.Image:
    came = f"an array of shape {array.shape} and type {array.dtype}"
    if array.dtype not in (np.uint8, np.uint16):
        raise ImageError(
            f"{came} is no picture; expected uint8 in 0..255 or uint16 in 0..65535: scale and round it, or "
            "pass the model's own normalised input as a float tensor (C, H, W)"
        )
    if array.ndim == 3 and array.shape[0] in (1, 3, 4) and array.shape[2] not in (1, 3, 4):
        raise ImageError(f"{came} looks like (C, H, W); expected (H, W, C): pass array.transpose(1, 2, 0)")
    if array.ndim == 4:
        raise ImageError(f"{came} looks like several pictures; pass list(array)")
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        raise ImageError(f"{came} is no picture; expected (H, W, 3), (H, W, 4), (H, W, 1) or (H, W)")
    if array.size == 0:
        raise ImageError(f"{came} has no pixels")
    array = _scaled(array) if array.dtype == np.uint16 else array
    return Image.fromarray(np.ascontiguousarray(array[..., 0] if array.shape[2:] == (1,) else array))


def _picture_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A uint8 tensor (C, H, W) as an array (H, W, C)."""
    came = f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)}"
    if tensor.dtype != torch.uint8:
        hint = "a float tensor is the model's own normalised input" if tensor.is_floating_point() else "convert it"
        raise ImageError(f"{came} is no picture, expected uint8 (C, H, W) in 0..255; {hint}")
    if tensor.ndim == 3 and tensor.shape[2] in (1, 3, 4) and tensor.shape[0] not in (1, 3, 4):
        raise ImageError(f"{came} looks like (H, W, C); expected (C, H, W): pass tensor.permute(2, 0, 1)")
    if tensor.ndim != 3 or tensor.shape[0] not in (1, 3, 4):
        raise ImageError(f"{came} is no picture; expected (3, H, W), (4, H, W) or (1, H, W)")
    array: np.ndarray[Any, Any] = tensor.detach().cpu().permute(1, 2, 0).numpy()
    return array
