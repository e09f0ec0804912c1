"""PNG files of our own encoder: lossless, and about as large as those of zlib."""

from __future__ import annotations

import io
import zlib
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from saliency.io import png
from saliency.io.png import END, MOST_BITS, encode_png

ASSETS = Path(__file__).parents[2] / "assets"


def decoded(file: bytes) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(file)) as image:
        assert (image.format, image.info["Software"]) == ("PNG", "tests")
        return np.array(image)


def smooth(width: int, height: int) -> NDArray[np.uint8]:
    """Pixels whose differences from their neighbours are small, as in a photograph."""
    steps = np.random.default_rng(0).integers(-1, 2, (height, width, 3))
    return steps.cumsum(0).cumsum(1).astype(np.uint8)


@pytest.mark.parametrize("size", [(1, 1), (1, 40), (40, 1), (33, 17), (34, 17), (35, 17), (36, 70)])
@pytest.mark.parametrize("quads", [1, 7, 1 << 15])
def test_every_image_is_read_back_by_other_decoders(
    size: tuple[int, int], quads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    width, height = size
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    images = (noise, smooth(width, height), np.full_like(noise, 9))
    for pixels in images:
        assert np.array_equal(decoded(encode_png(pixels, "tests")), pixels)
    monkeypatch.setattr(png, "QUADS", quads)
    for name, value in (("LEAST_BYTES", 0), ("MOST_ZEROS", 1), ("ROWS", 3)):
        monkeypatch.setattr(png, name, value)
    for pixels in images:
        assert np.array_equal(decoded(encode_png(pixels, "tests")), pixels)


def test_a_photograph_is_about_as_large_as_with_zlib_and_runs_are_compressed() -> None:
    with Image.open(ASSETS / "coffee.jpg") as image:
        pixels = np.array(image.convert("RGB"))
    rows = pixels.reshape(len(pixels), -1)
    encoder = zlib.compressobj(1, strategy=zlib.Z_RLE)
    compressed = len(encoder.compress((rows[1:] - rows[:-1]).tobytes()) + encoder.flush())
    assert len(encode_png(pixels, "tests")) < 1.03 * compressed
    assert len(encode_png(np.zeros_like(pixels), "tests")) < 0.01 * pixels.size


@pytest.mark.parametrize("kind", ["even", "one", "fibonacci"])
def test_the_codes_are_complete_and_short_enough(kind: str) -> None:
    counts = np.ones(END + 1, np.int64)
    if kind == "one":
        counts[0] = 10**6
    elif kind == "fibonacci":  # one more bit for each
        for index in range(2, 60):
            counts[index] = counts[index - 1] + counts[index - 2]
    sizes = png._code_sizes(counts)
    assert max(sizes) <= MOST_BITS
    assert sum(2.0**-size for size in sizes) == 1
