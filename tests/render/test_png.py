"""The PNG encoder, read by Pillow and OpenCV."""

from __future__ import annotations

import io
import zlib
from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from saliency.render import overlay as png
from saliency.render.overlay import encode_png

ASSETS = Path(__file__).parents[2] / "assets"


def photograph() -> NDArray[np.uint8]:
    return np.asarray(Image.open(ASSETS / "coffee.jpg").convert("RGB"))


@pytest.mark.parametrize("library", ["isal", "zlib"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (5, 1), (33, 64), "photograph"])
def test_readers_decode_the_same_pixels(
    shape: tuple[int, int] | str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library == "zlib":
        monkeypatch.setattr(png, "compress", zlib.compress)
        monkeypatch.setattr(png, "crc32", zlib.crc32)
    noise = np.random.default_rng(0)
    pixels = photograph() if isinstance(shape, str) else noise.integers(0, 256, (*shape, 3), np.uint8)
    file = encode_png(pixels, "tests")
    with Image.open(io.BytesIO(file)) as image:
        image.load()
        assert (image.format, image.mode, image.info["Software"]) == ("PNG", "RGB", "tests")
        assert np.array_equal(np.asarray(image), pixels)
    decoded = cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_COLOR)
    assert decoded is not None
    assert np.array_equal(decoded[..., ::-1], pixels)


def test_files_are_about_as_large_as_those_of_pillow() -> None:
    pixels, by_pillow = photograph(), io.BytesIO()
    Image.fromarray(pixels).save(by_pillow, "PNG", compress_level=1)
    assert len(encode_png(pixels, "tests")) < 1.2 * by_pillow.getbuffer().nbytes
    assert len(encode_png(np.zeros_like(pixels), "tests")) < 0.01 * pixels.size
