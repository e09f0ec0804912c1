"""The canvas of an image, from which the processors of vision-language models cut tiles, resized views and patches.

It is found by running the processor on ramps, so that no class of processors needs to be known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from ..axes import at_least_float32
from ..errors import ImageError
from .preprocess import Box, boxes_of_views

Encode = Callable[[Image.Image], Mapping[str, Any]]
"""The processor of a model, for one image."""

TOLERANCE = 0.1
"""The largest mean difference of a resized view from the processor's, in units of the normalised input."""


@dataclass(frozen=True, slots=True, eq=False)
class Canvas:
    """Normalised image in its finest resolution, of which the model's pixel values are a differentiable function.

    Attributes:
        values: (C, H, W) the numbers of the canvas.
        box: The part of the image that it covers: left, top, right and bottom in pixels of the image.
        pixels: A function from canvases (N, C, H, W) to the pixel values of N images (N, rows, ...), where `rows` are
            the rows of `pixel_values` that belong to one image: views (C, h, w), or patches.
    """

    values: Tensor
    box: Box
    pixels: Callable[[Tensor], Tensor]


def find_canvas(encode: Encode, image: Image.Image, processor: Any) -> Canvas:
    """Return the canvas of an image, by recognising how a processor divides it.

    It may resize, crop and pad the image; cut it into tiles, in rows, with a resized view of the whole image before or
    after them, and tiles of zeros at the end; or cut it into patches with `image_grid_thw`, as Qwen-VL does.

    Args:
        encode: The processor, for one image.
        image: The image.
        processor: The processor itself. If it cuts patches, its `image_processor` has `patch_size` and `merge_size`.

    Raises:
        ImageError: The pixel values are divided in another way.
    """
    known = encode(image)
    values: Tensor = known["pixel_values"]
    if "image_grid_thw" in known:
        _, *grid = known["image_grid_thw"][0].tolist()
        own = processor.image_processor
        return _divided_in_patches(encode, image, values.shape[1], grid, own.patch_size, own.merge_size)
    if values.dim() < 4:
        raise ImageError(f"pixel_values {tuple(values.shape)} are neither views (..., C, h, w) nor patches of a grid")
    empty = int((values.flatten(0, -4) == 0).flatten(1).all(1).sum())  # tiles that Llama 3.2 Vision appends
    views = values.flatten(0, -4)[: -empty or None]  # (V, C, h, w)
    found = boxes_of_views(lambda own: encode(own)["pixel_values"].flatten(0, -4)[: len(views)], image.size)
    boxes = torch.tensor(found, dtype=torch.float64, device="cpu")  # (V, 4)
    inside = torch.tensor([*image.size], device="cpu") - 0.01 * max(image.size)
    is_whole = ((boxes[:, :2] < 0.01 * max(image.size)) & (boxes[:, 2:] > inside)).all(1)
    is_tile = ~is_whole | is_whole.all()
    tiles, size = boxes[is_tile], torch.tensor(views.shape[:1:-1], device="cpu")  # (w, h)
    box = torch.cat([tiles[:, :2].amin(0), tiles[:, 2:].amax(0)])
    extent = box[2:] - box[:2]
    cell = tiles[0, 2:] - tiles[0, :2]
    steps = (tiles - box[:2].repeat(2)) / cell.repeat(2)  # edges of the tiles on a grid of such cells
    counts = (extent / cell).round().long()  # of columns and rows
    if (steps - steps.round()).abs().max() > 0.1 or len({*map(tuple, steps.round().tolist())}) != counts.prod():
        raise ImageError(f"{len(tiles)} tiles of an image are not the rows of a grid")
    canvas_size = counts * size  # (w, h)
    scale = canvas_size / extent  # pixels of the canvas per pixel of the image, (x, y)
    unit = torch.where(is_tile[:, None], size, 1).repeat(1, 2)  # tiles lie on a grid
    edges = ((boxes - box[:2].repeat(2)) * scale.repeat(2) / unit).round().clamp(min=0).long() * unit
    crops = [(..., slice(top, bottom), slice(left, right)) for left, top, right, bottom in edges.tolist()]
    canvas = values.new_zeros(views.shape[1], *canvas_size.tolist()[::-1])
    for number in is_tile.nonzero()[:, 0].tolist():
        canvas[crops[number]] = views[number]

    def pixels(x: Tensor) -> Tensor:
        return F.pad(torch.stack([resize(x[crop]) for crop in crops], 1), (0,) * 7 + (empty,))

    def resize(x: Tensor) -> Tensor:
        if x.shape[2:] == views.shape[2:]:
            return x
        wide = at_least_float32(x)  # CPUs do not resize in half precision
        return F.interpolate(wide, views.shape[2:], mode="bicubic", antialias=True).to(x.dtype)

    left, top, right, bottom = box.tolist()
    return Canvas(canvas, (left, top, right, bottom), pixels)


def _divided_in_patches(
    encode: Encode, image: Image.Image, numbers: int, grid: Sequence[int], size: int, merged: int
) -> Canvas:
    """Return the canvas of flattened patches (n, numbers), in the order of blocks of `merged` x `merged` patches.

    The numbers of a patch are its pixels (3, repeats, size, size), with equal repetitions in time, as in Qwen-VL.
    """
    rows, columns = grid
    repeats = numbers // (3 * size**2)

    def pixels(x: Tensor) -> Tensor:
        blocks = x.reshape(len(x), 3, rows // merged, merged, size, columns // merged, merged, size)
        patches = blocks.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(len(x), rows * columns, 3, 1, size, size)
        return patches.expand(-1, -1, -1, repeats, -1, -1).flatten(2)

    places = torch.arange(3 * rows * columns * size**2, device="cpu").view(3, rows * size, columns * size)
    order = pixels(places[None]).flatten()  # the number of the pixel that each value shows

    def canvas(own: Image.Image) -> Tensor:
        values: Tensor = encode(own)["pixel_values"]
        return values.new_empty(places.shape).put_(order, values.flatten())

    (box,) = boxes_of_views(lambda own: canvas(own)[None], image.size)
    return Canvas(canvas(image), box, pixels)
