"""Explain an image that is larger than the model's input in overlapping tiles, as one map.

Each pixel of the map is a weighted mean over the tiles that contain it. In the middle half of an overlap, the weights
move linearly from one tile to the next. In the quarter next to the border of a tile, the weight of the tile is 0,
because the tile cuts off the surroundings of these pixels. The gradient at a pixel depends on the outputs that the
pixel reaches, and on all pixels that these outputs read. These pixels are at a distance of at most the receptive field
minus 1. So the map equals the map without tiles if the receptive field is at most 1 + a quarter of the overlap, and the
score is a sum over positions.
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

from ..errors import ImageError, MethodError, NotFoundError, TargetError
from ..io.axes import require_two_axes
from ..io.geometry import Frame, Geometry
from ..io.inputs import MAX_PIXELS, Batch, ImagesLike, open_image, read, split_images
from ..io.preprocess import Prepare, drawable, only_normalised
from ..model.call import ForwardArgs, bound, reference_tensor
from ..targets.boxes import BoxTarget
from ..targets.classes import ClassTarget, Contrast, Located, Probability, TargetLike, per_image
from ..targets.language import parse_target
from ..targets.regions import Keypoint, Region
from ..validation import check_integer
from .base import Attribution
from .explanation import BatchAttribution, Explanation, reduce_channels, resized
from .passes import chunk_size, progress_bar
from .questions import Questions

Window = tuple[slice, ...]
Explained = tuple[BatchAttribution, Questions]


class Tiled:
    """Explain an image that is larger than the model's input in overlapping tiles, as one map.

        Tiled(GradCAM(model), size=512, overlap=64).attribute("scan.tif", "tumour")

    A tile is normalised, but neither resized nor cropped.

    Args:
        method: The method.
        size: The edge of a tile in pixels.
        overlap: The width in pixels of the overlap of neighbouring tiles.
        progress: Always or never show a progress bar; by default after a second, on a terminal or in a notebook.

    Raises:
        MethodError: `method` is not a method, or the overlap is not smaller than the size.
    """

    def __init__(
        self, method: Attribution, *, size: int = 512, overlap: int = 64, progress: bool | None = None
    ) -> None:
        if not isinstance(method, Attribution):
            raise MethodError(f"expected a method, such as Tiled(GradCAM(model)), got {type(method).__name__}")
        if check_integer("overlap", overlap, least=0) >= check_integer("size", size):
            raise MethodError(f"overlap={overlap} is not smaller than size={size}")
        self.method, self.size, self.overlap, self.progress = method, size, overlap, progress

    def attribute(self, image: ImagesLike, target: TargetLike = None, *, forward_args: ForwardArgs = ()) -> Explanation:
        """Explain one image.

        Args:
            image: One image as for `Attribution.attribute`. Arrays of more than `MAX_PIXELS`, also on disk, are read
                tile by tile.
            target: A class, a region or a function.
            forward_args: As for `Attribution.attribute`.

        Returns:
            The explanation, whose map (1, 1, H, W) is on the CPU, in the size of the image.

        Raises:
            ImageError: There are several images, or the image or the preprocessing is invalid.
            NotApplicableError: The target is a region of a volume.
            NotFoundError: No tile has a pixel of the target's region, or the size of the mask differs from the image.
            TargetError: The target would differ from tile to tile.
        """
        batch, method = read_tiles(image, self.method.preprocess, self.size, self.overlap), self.method
        with method.call(batch, [target], forward_args):
            return method.explanation(*explain_tiles(batch, target, method, self.progress), batch)

    def __repr__(self) -> str:
        """Return the method and the tiles."""
        return f"Tiled({self.method!r}, size={self.size}, overlap={self.overlap})"


@dataclass(frozen=True, slots=True, eq=False)
class TiledImage(Batch):
    """Image that is read tile by tile. `inputs` (1, 1, H, W) has no values, only the size of the image.

    Attributes:
        read: Function that returns the model's input (1, C, h, w) for a window of the image.
        axes: The tiles along each axis, with the weights of their pixels.
    """

    read: Callable[[Window], Tensor]
    axes: tuple[list[tuple[slice, Tensor]], ...]


def read_tiles(image: ImagesLike, prepare: Prepare, tile: int, overlap: int) -> TiledImage:
    """Divide an image into tiles with edges of `tile` pixels. Raises ImageError as `Tiled.attribute`."""
    size, frame, read_window = _open(image, prepare)
    axes = tuple(_along_axis(length, min(tile, length), overlap) for length in size)
    return TiledImage(torch.empty((1, 1, *size), dtype=torch.float32, device="meta"), (frame,), read_window, axes)


def _open(image: Any, prepare: Prepare) -> tuple[Sequence[int], Frame | None, Callable[[Window], Tensor]]:
    """Return the size of an image, its frame or None, and a function that reads a window."""
    images: Any = split_images(image)
    is_input = isinstance(images[0], Tensor) and images[0].is_floating_point()
    if is_input:
        images = read(images, prepare).inputs
    if len(images) != 1:
        raise ImageError(f"got {len(images)} images; with Tiled, explain them one by one")
    if is_input:
        return images.shape[2:], None, lambda window: images[:, :, *window]
    (image,), normalise = images, only_normalised(prepare)
    is_array = hasattr(image, "shape") and not isinstance(image, Tensor)
    if is_array and math.prod(image.shape[:2]) > MAX_PIXELS:
        return image.shape[:2], None, lambda window: normalise(open_image(np.asarray(image[window])))[None]
    whole = open_image(np.asarray(image) if is_array else image)
    frame = Frame(drawable(whole, normalise.range), (0, 0, *whole.size), range=normalise.range)
    return (whole.height, whole.width), frame, lambda window: normalise(whole.crop(_box(window)))[None]


def _box(window: Window) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom of a window."""
    rows, columns = window
    return columns.start, rows.start, columns.stop, rows.stop


def _along_axis(length: int, tile: int, overlap: int) -> list[tuple[slice, Tensor]]:
    """Return the tiles along an axis, with weights (tile,) that sum to 1 at each pixel."""
    starts = [*range(0, length - tile, tile - overlap), length - tile]
    middles = [-math.inf, *((start + after + tile) / 2 for start, after in pairwise(starts)), math.inf]
    centres = torch.arange(length, dtype=torch.float64, device="cpu") + 0.5
    ramps = [((centres - middle) / max(overlap / 2, 0.5) + 0.5).clamp(0, 1) for middle in middles]  # in the overlaps
    spans = [slice(start, start + tile) for start in starts]
    return [(span, (before - after)[span]) for span, (before, after) in zip(spans, pairwise(ramps), strict=True)]


def explain_tiles(image: TiledImage, target: Any, method: Attribution, progress: bool | None) -> Explained:
    """Explain an image tile by tile, in a `call` of the method. Raises as `Tiled.attribute`.

    Returns:
        One map (1, 1, H, W), on the CPU, and the questions of the first tiles.
    """
    sign, like = method.sign, reference_tensor(method.model)
    target, size = _same_in_all_tiles(parse_target(per_image(target, 1)[0], method.categories)), image.inputs.shape[2:]
    tiles = list(product(*image.axes))
    if isinstance(target, Region):
        require_two_axes(image.inputs, "a region with Tiled")
        _require_mask(target.where, size)
    scores, values = [math.nan] * len(tiles), torch.empty(0, dtype=torch.float32, device="cpu")
    first: list[Explained] = []
    start, count = 0, 1  # the first tile alone
    with closing(progress_bar("tiles", len(tiles), "tile", progress)) as bar, bound(warned=set()):
        while start < len(tiles):
            windows, weights = zip(*(zip(*tile, strict=True) for tile in tiles[start : start + count]), strict=True)
            x = torch.cat([image.read(window) for window in windows])
            x = x if like is None else x.to(like)
            asked = target
            if isinstance(target, Region):
                asked = Located(target, (Geometry(_box(windows[0]), (size[1], size[0]), (x.shape[2], x.shape[3])),))
            try:
                resolved = method.questions(asked, x)
                (result,) = method.explain_targets(x, [resolved])
                maps = reduce_channels(result.values, sign)
                maps = resized(maps.clamp(min=0) if sign == "positive" else maps, tuple(x.shape[2:])).cpu()
                if not first:
                    first, values = [(result, resolved)], torch.zeros((1, 1, *size), dtype=maps.dtype, device="cpu")
                for part, window, by_axis in zip(maps, windows, weights, strict=True):
                    values[0, 0][window] += part * reduce(lambda rows, row: rows[..., None] * row, by_axis).to(part)
                scores[start : start + len(x)] = result.scores.tolist()
            except NotFoundError:  # the tile has no pixel of the region
                if not first and start + 1 == len(tiles):
                    raise
            bar.update(len(x))
            start, count = start + len(x), 1 if isinstance(target, Region) else chunk_size(x)
    ((result, resolved),) = first
    of_tiles = torch.tensor(scores, dtype=result.scores.dtype, device="cpu").view(1, *map(len, image.axes))
    mean = of_tiles.nanmean().view(1)
    return BatchAttribution(
        values, mean, result.layer, {"coverage": result.coverage, "tile_scores": of_tiles}
    ), resolved


def _require_mask(where: Any, size: Sequence[int]) -> None:
    """Raise NotFoundError, before the first tile is explained, if a mask has another size or no pixel."""
    if isinstance(where, Tensor) and where.shape not in (size, (1, *size)):
        raise NotFoundError(f"the region has shape {tuple(where.shape)}; with Tiled, expected {tuple(size)}, the image")
    if isinstance(where, Tensor) and not where.any():
        raise NotFoundError("the region has no pixel of the image")


def _same_in_all_tiles(target: Any) -> Any:
    """Return the target of every tile. Raises TargetError if it would differ from tile to tile."""
    classes = [target]
    if isinstance(target, Probability | Contrast):  # a list of one class is treated as the class
        names = [name for name in ("target", "against") if hasattr(target, name)]
        parts: Any = {name: ClassTarget(per_image(getattr(target, name).classes, 1)[0]) for name in names}
        target, classes = replace(target, **parts), [part.classes for part in parts.values()]
    if any(per_image(label, 1)[0] is None for label in classes):
        raise TargetError("with Tiled, pass a class as the target: the top class differs from tile to tile")
    if isinstance(target, BoxTarget | Keypoint):
        raise TargetError("a box or a joint lies in one tile; crop the image around it, and explain it without Tiled")
    return replace(target, is_sum=True) if isinstance(target, Region) else target
