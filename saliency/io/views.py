"""Views of an image: the tiles, resized copies and patches in which the processors of vision-language models cut it.

They are found by running the processor on ramps, so that no class of processors needs to be known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from ..errors import ImageError
from .preprocess import Box, boxes_of_views

Encode = Callable[[Image.Image], Mapping[str, Any]]
"""The processor of a model, for one image."""

TOLERANCE = 0.1
"""The largest mean difference of a resized view from the processor's, in units of the normalised input."""


@dataclass(frozen=True, slots=True, eq=False)
class Views:
    """Pixel values of one image, as a differentiable function of one canvas.

    Attributes:
        canvas: (C, H, W) the normalised image in its finest resolution.
        box: The part of the image that the canvas covers: left, top, right and bottom in pixels of the image.
        pixels: A function from canvases (N, C, H, W) to the pixel values of N images (N, rows, ...), where `rows` are
            the rows of `pixel_values` that belong to one image: views (C, h, w), or patches.
    """

    canvas: Tensor
    box: Box
    pixels: Callable[[Tensor], Tensor]


def find_views(encode: Encode, image: Image.Image, sizes: Mapping[str, Any]) -> Views:
    """Recognise how a processor divides an image into views.

    It may resize, crop and pad the image; cut it into tiles, in rows, with a resized view of the whole image before or
    after them; or cut it into patches with `image_grid_thw`, as Qwen-VL does.

    Args:
        encode: The processor.
        image: The image.
        sizes: The sizes of patches: "patch_size" and "merge_size".

    Raises:
        ImageError: The pixel values are divided in another way.
    """
    known = encode(image)
    if "image_grid_thw" in known:
        _, height, width = known["image_grid_thw"][0].tolist()
        grid = _PatchGrid(height, width, sizes["patch_size"], sizes["merge_size"])
        (box,) = boxes_of_views(lambda own: grid.joined(encode(own)["pixel_values"])[None], image.size)
        repeats = known["pixel_values"].shape[1] // (3 * grid.size**2)
        return Views(grid.joined(known["pixel_values"]), box, lambda x: grid.divided(x, repeats))
    views = _views(known)
    boxes = boxes_of_views(lambda own: _views(encode(own)), image.size)
    whole = [number for number, box in enumerate(boxes) if _covers(box, image.size)] if len(boxes) > 1 else []
    tiles = [number for number in range(len(boxes)) if number not in whole]
    lefts, tops, rights, bottoms = zip(*(boxes[number] for number in tiles), strict=True)
    box = (min(lefts), min(tops), max(rights), max(bottoms))
    width, height = rights[0] - lefts[0], bottoms[0] - tops[0]
    columns, rows = round((box[2] - box[0]) / width), round((box[3] - box[1]) / height)
    starts = [(box[0] + column * width, box[1] + row * height) for row in range(rows) for column in range(columns)]
    far = [max(abs(x - a) / width, abs(y - b) / height) for x, y, (a, b) in zip(lefts, tops, starts, strict=False)]
    if len(starts) != len(tiles) or max(far) > 0.1:  # of a tile
        raise ImageError(f"{len(tiles)} tiles of an image are not the rows of a grid")
    canvas = _joined(views[tiles], rows)
    crops = {number: _on_canvas(boxes[number], box, canvas) for number in whole}

    def pixels(x: Tensor) -> Tensor:
        parts = {number: resize(x[..., top:bottom, left:right]) for number, (left, top, right, bottom) in crops.items()}
        parts |= dict(zip(tiles, _split(x, rows, columns), strict=True))
        return torch.stack([parts[number] for number in range(len(boxes))], 1)

    def resize(x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # CPUs do not resize in half precision
        return F.interpolate(wide, views.shape[2:], mode="bicubic", antialias=True).to(x.dtype)

    return Views(canvas, box, pixels)


class _PatchGrid(NamedTuple):
    """Grid of flattened patches, in the order of blocks of `merged` x `merged` patches, as in Qwen-VL."""

    height: int
    width: int
    size: int
    merged: int

    def joined(self, patches: Tensor) -> Tensor:
        """Return patches (n, 3 * repeats * size * size) as one image (3, H, W). Repetitions in time are equal."""
        height, width, size, merged = self
        blocks = patches.view(height // merged, width // merged, merged, merged, 3, -1, size, size)[..., 0, :, :]
        return blocks.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, height * size, width * size)

    def divided(self, x: Tensor, repeats: int) -> Tensor:
        """Return images (N, 3, H, W) as patches (N, n, 3 * repeats * size * size)."""
        height, width, size, merged = self
        blocks = x.reshape(len(x), 3, height // merged, merged, size, width // merged, merged, size)
        patches = blocks.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(len(x), height * width, 3, 1, size, size)
        return patches.expand(-1, -1, -1, repeats, -1, -1).flatten(2)


def _views(encoded: Mapping[str, Any]) -> Tensor:
    """Return the pixel values of one image as views (V, C, h, w)."""
    values: Tensor = encoded["pixel_values"]
    if values.dim() < 4:
        raise ImageError(f"pixel_values {tuple(values.shape)} are neither views (..., C, h, w) nor patches of a grid")
    return values.flatten(0, -4)


def _covers(box: Box, size: tuple[int, int]) -> bool:
    """Return whether a view covers the image."""
    left, top, right, bottom = box
    edge = max(1.0, *size) / 100
    return left < edge and top < edge and right > size[0] - edge and bottom > size[1] - edge


def _on_canvas(own: Box, canvas_box: Box, canvas: Tensor) -> tuple[int, int, int, int]:
    """Return a box of the image in pixels of the canvas."""
    left, top, right, bottom = canvas_box
    x, y = canvas.shape[2] / (right - left), canvas.shape[1] / (bottom - top)
    edges = ((own[0] - left) * x, (own[1] - top) * y, (own[2] - left) * x, (own[3] - top) * y)
    first, second, third, fourth = (max(round(edge), 0) for edge in edges)
    return first, second, third, fourth


def _joined(tiles: Tensor, rows: int) -> Tensor:
    """Return tiles (V, C, h, w), in rows, as one image (C, H, W)."""
    return torch.cat([torch.cat([*row], 2) for row in tiles.chunk(rows)], 1)


def _split(x: Tensor, rows: int, columns: int) -> list[Tensor]:
    """Return the tiles (N, C, h, w) of images (N, C, H, W), in rows."""
    return [tile for row in x.chunk(rows, 2) for tile in row.chunk(columns, 3)]
