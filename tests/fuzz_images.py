"""A coverage-guided fuzzer of the image reader: any bytes give an RGB picture or an ImageError, nothing else.

Run it with libFuzzer's options, as in `python tests/fuzz_images.py -max_total_time=20 CORPUS_FOLDER`; the folder is
filled with a tiny picture of each format and mode first.
"""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import atheris
import torch  # noqa: F401  not of interest, so it is imported before what is watched

with atheris.instrument_imports(include=["PIL", "saliency"]):
    from PIL import Image

    from saliency.errors import ImageError, SaliencyWarning
    from saliency.io.inputs import open_image
    from saliency.io.preprocess import drawable

MODES = {
    "png": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "gif": ("1", "L", "P", "RGB"),
    "jpeg": ("L", "RGB", "CMYK", "YCbCr"),
    "webp": ("RGB", "RGBA"),
    "bmp": ("1", "L", "P", "RGB", "RGBA"),
    "tiff": ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "LAB", "YCbCr", "I;16", "I", "F"),
    "ppm": ("1", "L", "RGB", "I"),
    "jpeg2000": ("L", "LA", "RGB", "RGBA", "I;16"),
    "avif": ("RGB", "RGBA"),
}
OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "tiff": ({}, {"compression": "tiff_lzw"}, {"compression": "tiff_adobe_deflate"}, {"compression": "packbits"}),
    "jpeg": ({}, {"progressive": True}),
    "webp": ({}, {"lossless": True}),
}


def seeds() -> Iterator[bytes]:
    """A tiny picture of each format, mode and compression, with an orientation to apply, and some animations."""
    exif = Image.Exif()
    exif[0x0112] = 6
    for kind, modes in MODES.items():
        for mode in modes:
            for options in OPTIONS.get(kind, ({},)):
                yield encoded(Image.new(mode, (9, 7)), kind, **options, exif=exif)
    frames = [Image.new("RGB", (9, 7), colour) for colour in ("red", "lime")]
    for kind in ("gif", "png", "webp", "tiff", "mpo", "avif"):
        yield encoded(frames[0], kind, save_all=True, append_images=frames[1:])


def encoded(picture: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def open_bytes(data: bytes) -> None:
    try:
        picture = drawable(open_image(data, max_pixels=250_000))
    except ImageError:
        return
    if picture.mode != "RGB" or not 0 < picture.width * picture.height <= 250_000:
        raise AssertionError(f"not an RGB picture within the limit: {picture}")


def main() -> None:
    folders = [Path(argument) for argument in sys.argv[1:] if not argument.startswith("-")]
    for folder in folders[:1]:
        folder.mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(seeds()):
            (folder / f"seed{number}").write_bytes(data)
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", SaliencyWarning)  # the reader warns of animations, and shows their first frame
    atheris.Setup(sys.argv, open_bytes)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
