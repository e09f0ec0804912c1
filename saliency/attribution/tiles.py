"""Explain an image that is larger than the model's input in overlapping tiles, as one map.

Each pixel of the map is a weighted mean over the tiles that hold it. In the middle half of an overlap, the weights move
linearly from one tile to the next. In the quarter next to the border of a tile, its weight is 0, since the tile cuts
off the surroundings of these pixels. A gradient depends on pixels at a distance of at most the receptive field minus 1:
on the outputs that a pixel reaches, and on the pixels that these outputs read. So the map equals the map without tiles
if the receptive field is at most 1 + a quarter of the overlap, and the score is a sum over positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..axes import require_two_axes
from ..errors import ImageError, MethodError, NotFoundError, TargetError, each_warning_once
from ..io.inputs import MAX_PIXELS, Batch, ImagesLike, Prepare, open_image, read, split_images
from ..io.preprocess import Frame, Geometry, drawable, only_normalised
from ..targets.box import BoxScore
from ..targets.region import Keypoint, Region
from ..targets.targets import Contrast, Probability, per_image
from ..validation import check_integer
from .explanation import BatchAttribution, Sign
from .heatmap import reduce_channels, resized
from .passes import chunk_size, progress_bar
from .resolved_target import ResolvedTarget

Window = tuple[slice, ...]
Explained = tuple[BatchAttribution, ResolvedTarget]
ExplainBatch = Callable[[Batch, list[Any]], list[Explained]]


@dataclass(frozen=True, slots=True, eq=False)
class TiledImage(Batch):
    """Image that is read tile by tile. `inputs` (1, 1, H, W) has no values, only the size of the image.

    Attributes:
        read: Function that returns the model's input (1, C, h, w) for a window of the image.
        axes: The tiles along each axis, with the weights of their pixels.
    """

    read: Callable[[Window], Tensor]
    axes: tuple[list[tuple[slice, Tensor]], ...]


def read_tiles(image: ImagesLike, prepare: Prepare, tiles: int, overlap: int) -> TiledImage:
    """Divide an image into tiles.

    Args:
        image: One image as for `attribute`. Arrays of more than `MAX_PIXELS`, also on disk, are read tile by tile.
        prepare: The preprocessing. The tiles are neither resized nor cropped.
        tiles: The length of the edges of a tile in pixels.
        overlap: The width of the overlap of neighbouring tiles in pixels.

    Raises:
        ImageError: There are several images, or the image or the preprocessing is invalid.
        MethodError: The overlap is not smaller than the tile.
    """
    if check_integer("overlap", overlap, least=0) >= check_integer("tiles", tiles):
        raise MethodError(f"overlap={overlap} is not smaller than tiles={tiles}")
    size, frame, read_window = _open(image, prepare)
    axes = tuple(_along_axis(length, min(tiles, length), overlap) for length in size)
    return TiledImage(torch.empty((1, 1, *size), dtype=torch.float32, device="meta"), (frame,), read_window, axes)


def _open(image: Any, prepare: Prepare) -> tuple[Sequence[int], Frame | None, Callable[[Window], Tensor]]:
    """Return the size of an image, the frame to draw on if it is kept, and a function that reads a window."""
    images: Any = split_images(image)
    is_input = isinstance(images[0], Tensor) and images[0].is_floating_point()
    if is_input:
        images = read(images, prepare).inputs
    if len(images) != 1:
        raise ImageError(f"got {len(images)} images; with tiles=, explain them one by one")
    if is_input:
        return images.shape[2:], None, lambda window: images[:, :, *window]
    (image,), normalise = images, only_normalised(prepare)
    is_array = hasattr(image, "shape") and not isinstance(image, Tensor)
    if is_array and math.prod(image.shape[:2]) > MAX_PIXELS:
        return image.shape[:2], None, lambda window: normalise(open_image(np.asarray(image[window])))[None]
    whole = open_image(np.asarray(image) if is_array else image)
    frame = Frame(drawable(whole, normalise.range), (0, 0, *whole.size))
    return (whole.height, whole.width), frame, lambda window: normalise(whole.crop(_box(window)))[None]


def _box(window: Window) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom of a window."""
    rows, columns = window
    return columns.start, rows.start, columns.stop, rows.stop


def _along_axis(length: int, tile: int, overlap: int) -> list[tuple[slice, Tensor]]:
    """Return the tiles along an axis, with weights (tile,) that sum to 1 at each pixel."""
    starts = [*range(0, length - tile, tile - overlap), length - tile]
    middles = [-math.inf, *((start + after + tile) / 2 for start, after in pairwise(starts)), math.inf]
    at = torch.arange(length, dtype=torch.float64, device="cpu") + 0.5
    ramps = [((at - middle) / max(overlap / 2, 0.5) + 0.5).clamp(0, 1) for middle in middles]  # in the overlaps
    windows = [slice(start, start + tile) for start in starts]
    return [(own, (before - after)[own]) for own, (before, after) in zip(windows, pairwise(ramps), strict=True)]


def explain_tiles(
    image: TiledImage, target: Any, explain: ExplainBatch, sign: Sign, like: Tensor | None, progress: bool | None
) -> Explained:
    """Explain an image tile by tile, and return one map (1, 1, H, W), on the CPU.

    Args:
        image: The image.
        target: The target.
        explain: Function that explains targets of a batch of tiles.
        sign: The sign with which the channels are reduced.
        like: A tensor that sets the device and type of the tiles.
        progress: Whether a progress bar is drawn; None draws one on a terminal.

    Raises:
        NotApplicableError: The target is a region of a volume.
        NotFoundError: No tile has a pixel of the target's region, or its mask has another size than the image.
        TargetError: The target would differ from tile to tile.
    """
    target, size = _same_in_all_tiles(per_image(target, 1)[0]), image.inputs.shape[2:]
    tiles = list(product(*image.axes))
    if isinstance(target, Region):
        require_two_axes(image.inputs, "a region with tiles=")
        _require_mask(target.where, size)
    scores, values = [math.nan] * len(tiles), torch.empty(0, dtype=torch.float32, device="cpu")
    found: list[Explained] = []
    at, count = 0, 1  # the first tile alone
    with closing(progress_bar("tiles", len(tiles), "tile", progress)) as bar, each_warning_once():
        while at < len(tiles):
            windows, weights = zip(*(zip(*tile, strict=True) for tile in tiles[at : at + count]), strict=True)
            x = torch.cat([image.read(window) for window in windows])
            x, own = x if like is None else x.to(like), target
            if isinstance(target, Region):
                own = target.locate([Geometry(_box(windows[0]), (size[1], size[0]), (x.shape[2], x.shape[3]))])
            try:
                ((result, resolved),) = explain(Batch(x, (None,) * len(x)), [own])
                maps = reduce_channels(result.values, sign)
                maps = resized(maps.clamp(min=0) if sign == "positive" else maps, tuple(x.shape[2:])).cpu()
                if not found:
                    found, values = [(result, resolved)], torch.zeros((1, 1, *size), dtype=maps.dtype, device="cpu")
                for part, window, by_axis in zip(maps, windows, weights, strict=True):
                    values[0, 0][window] += part * reduce(lambda rows, row: rows[..., None] * row, by_axis).to(part)
                scores[at : at + len(x)] = result.scores.tolist()
            except NotFoundError:  # the tile has no pixel of the region
                if not found and at + 1 == len(tiles):
                    raise
            bar.update(len(x))
            at, count = at + len(x), 1 if isinstance(target, Region) else chunk_size(x)
    ((result, resolved),) = found
    of_tiles = torch.tensor(scores, dtype=result.scores.dtype, device="cpu").view(1, *map(len, image.axes))
    mean = of_tiles.nanmean().view(1)
    return BatchAttribution(values, mean, result.coverage, result.layer, tile_scores=of_tiles), resolved


def _require_mask(where: Any, size: Sequence[int]) -> None:
    """Raise NotFoundError, before the first tile is explained, if a mask has another size or no pixel."""
    if isinstance(where, Tensor) and where.shape not in (size, (1, *size)):
        raise NotFoundError(
            f"the region has shape {tuple(where.shape)}; with tiles=, expected {tuple(size)}, the image"
        )
    if isinstance(where, Tensor) and not where.any():
        raise NotFoundError("the region has no pixel of the image")


def _same_in_all_tiles(target: Any) -> Any:
    """Return the target of every tile. Raises TargetError if it would differ from tile to tile."""
    classes = [score.classes for score in target.scores] if isinstance(target, Probability | Contrast) else [target]
    if any(per_image(own, 1)[0] is None for own in classes):
        raise TargetError("with tiles=, pass a class as the target: the top class differs from tile to tile")
    if isinstance(target, BoxScore | Keypoint):
        raise TargetError("a box or a joint lies in one tile; crop the image around it, and leave tiles= out")
    return replace(target, is_sum=True) if isinstance(target, Region) else target
