"""Read DICOM files of one image, and distinguish them from slices and volumes. It needs no torch."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import lru_cache
from typing import IO, Any

import numpy as np
from PIL import Image

from ..errors import DependencyError, ImageError, errors_as, optional_import

SUFFIX = ".dcm"
_HEADERS = 8  # files whose headers are read


def holds_frames(path: str) -> bool:
    """Return whether a DICOM file holds several frames, which are a volume."""
    try:
        return _count_frames(path, os.stat(path).st_mtime_ns) > 1  # noqa: PTH116 - a path may hold undecodable bytes
    except (OSError, DependencyError):
        return False


@lru_cache(4096)
def _count_frames(path: str, _changed: int) -> int:
    dicom = optional_import("pydicom", "volumes", "a DICOM file")
    with suppress(Exception):  # a damaged file is an error when it is opened
        header = dicom.dcmread(path, stop_before_pixels=True, specific_tags=["NumberOfFrames"])
        return int(header.get("NumberOfFrames") or 1)
    return 1


def holds_series(folder: str) -> bool:
    """Return whether a folder holds a volume: two of its first files are slices of one series, with positions."""
    try:
        return _holds_series(folder, os.stat(folder).st_mtime_ns)  # noqa: PTH116 - a path may hold undecodable bytes
    except (OSError, DependencyError):
        return False


@lru_cache(1024)
def _holds_series(folder: str, _changed: int) -> bool:
    dicom = optional_import("pydicom", "volumes", "a DICOM file")
    names = sorted(name for name in os.listdir(folder) if name.lower().endswith(SUFFIX) and name[0] != ".")  # noqa: PTH208
    series = []
    for name in names[:_HEADERS]:
        with suppress(Exception):  # a damaged file is an error when it is opened
            file = dicom.dcmread(os.path.join(folder, name), stop_before_pixels=True)  # noqa: PTH118
            series += [file.SeriesInstanceUID] if "ImagePositionPatient" in file else []
    return len(set(series)) < len(series)


def read_dicom(file: IO[bytes], name: str, max_pixels: int) -> Image.Image:
    """Return the image of a DICOM file: RGB, or mode F in the units of the file (for CT, Hounsfield units).

    Grey images have the key "range" in their `info`: the values that are black and white, from the window of the file,
    else the lowest and highest value. In MONOCHROME1, the highest value is black, and the key "inverted" is true.

    Raises:
        DependencyError: The extra `volumes` is not installed.
        ImageError: The file is damaged, too large, compressed without a decoder, or holds several images or none.
    """
    dicom, pixels = (optional_import(module, "volumes", "a DICOM file") for module in ("pydicom", "pydicom.pixels"))
    with errors_as(ImageError, f"{name!r} is a DICOM file that is damaged or holds no image"):
        data = dicom.dcmread(file)
        frames, size = int(data.get("NumberOfFrames") or 1), (int(data.Columns), int(data.Rows))
    if frames > 1:
        cure = "one frame is an image: pydicom.pixels.pixel_array(file)[0]"
        raise ImageError(f"{name!r} has {frames} frames, a volume, which this model does not take; {cure}")
    if size[0] * size[1] > max_pixels:
        raise ImageError(f"{name!r} has {size[0]} x {size[1]} pixels, more than the limit of {max_pixels}")
    try:
        values = pixels.pixel_array(data)
    except Exception as error:
        syntax = data.file_meta.get("TransferSyntaxUID")
        encoding = getattr(syntax, "name", "of unknown encoding")
        hint = 'pip install "pylibjpeg[all]", or decompress it, as in: gdcmconv --raw IN OUT'
        hint = hint if getattr(syntax, "is_compressed", True) else "the file is damaged"
        raise ImageError(f"{name!r}: its pixels cannot be decoded ({encoding}); {hint}") from error
    kind = data.get("PhotometricInterpretation", "MONOCHROME2")
    if values.ndim == 3 and values.dtype == np.uint8:
        return Image.fromarray(values)
    if kind not in ("MONOCHROME1", "MONOCHROME2") or values.ndim != 2:
        raise ImageError(f"{name!r} is a DICOM image of the kind {kind}; convert it to PNG")
    image = Image.fromarray(np.asarray(pixels.apply_modality_lut(values, data), np.float32))
    image.info |= {"range": _window(data, np.asarray(image)), "inverted": kind == "MONOCHROME1"}
    return image


def _window(data: Any, values: Any) -> tuple[float, float]:
    """Return the values that are black and white: of the window, of 8 bits, or the lowest and highest."""
    first = [np.atleast_1d(data.get(key) or 0.0)[0] for key in ("WindowCenter", "WindowWidth")]
    centre, width = map(float, first)
    if width > 1:
        return centre - width / 2, centre + width / 2 - 1
    low, high = (0.0, 255.0) if data.BitsAllocated == 8 else (float(values.min()), float(values.max()))
    return low, max(high, low + 1)
