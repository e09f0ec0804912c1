"""Encode RGB images as PNG, several times faster than Pillow.

Pillow tries five filters per row and searches for long matches. One filter and quick compression give files of
photographs that are about as large.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

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
