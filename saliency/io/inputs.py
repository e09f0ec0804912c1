"""What the user hands over -> a batch for the model, with the place of each image on its picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from ..errors import ImageError, NonFiniteError, warn
from .crop_detection import TransformPreprocess
from .image_io import ImageLike, open_picture
from .preprocess import Frame, Preprocess, PreprocessLike, as_preprocess

ImagesLike = ImageLike | Sequence[ImageLike]
Prepare = Preprocess | TransformPreprocess | None


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The model's input, and where each image of it lies on its picture."""

    tensor: Tensor  # (N, C, H, W), normalised
    frames: tuple[Frame | None, ...]  # None: it came as a float tensor, and no picture is known


def read(images: ImagesLike, preprocess: PreprocessLike | None = None, *, like: Tensor | None = None) -> Batch:
    """One batch of all that the user hands over.

    Paths, PIL pictures, arrays and uint8 tensors are pictures and go through `preprocess`. Floating point
    tensors, (C, H, W) or (N, C, H, W), are the model's own normalised input and are passed on, uncopied where
    they fit.

    Args:
        images: One image, or a sequence of them.
        preprocess: Picture -> tensor; only pictures need it.
        like: A tensor whose device and floating point type the batch takes.

    Raises:
        ImageError: Something is no image, cannot be read, or does not fit the others.
        NonFiniteError: A float tensor holds NaN or infinity.

    Warns:
        SaliencyWarning: A float tensor lies in 0..255 or 0..1, which the preprocessing does not give.
    """
    items = _as_items(images)
    prepare = None if preprocess is None else as_preprocess(preprocess)
    like = next(filter(_is_input, items), None) if like is None else like
    parts: list[Tensor] = []
    frames: list[Frame | None] = []
    for item in items:
        if _is_input(item):
            tensor = _checked(item, prepare, first=len(frames))
            frames += [None] * len(tensor)
        else:
            frame, tensor = _prepared(item, prepare, name=f"image {len(frames)}: " if len(items) > 1 else "")
            frames.append(frame)
        parts.append(_placed(tensor, like))
    _require_one_size(parts)
    return Batch(parts[0] if len(parts) == 1 else torch.cat(parts), tuple(frames))


def _as_items(images: ImagesLike) -> list[ImageLike]:
    """The single images, where a uint8 tensor (N, C, H, W) is N of them and a float tensor one."""
    if isinstance(images, Sequence) and not isinstance(images, str | bytes):
        items = [each for image in images for each in _as_items(_require_single(image))]
    elif isinstance(images, Tensor) and images.ndim == 4 and not images.is_floating_point():
        items = list(images)
    else:
        items = [images]
    if not items:
        raise ImageError("there is no image: the list or batch is empty")
    return items


def _require_single(image: ImageLike) -> ImageLike:
    if isinstance(image, list | tuple):
        raise ImageError("a list inside the list of images; expected one flat list")
    return image


def _is_input(image: ImageLike) -> TypeGuard[Tensor]:
    """Whether it is the model's own input, and no picture."""
    return isinstance(image, Tensor) and image.is_floating_point()


def _prepared(image: ImageLike, prepare: Prepare, name: str) -> tuple[Frame, Tensor]:
    """The frame of one picture, and its (1, 3, H, W)."""
    try:
        picture = open_picture(image)
        if prepare is None:
            raise ImageError(
                "this model carries no preprocessing; pass preprocess=... or set model.preprocess, or pass a "
                "float tensor"
            )
        return Frame(picture, prepare.box(picture.size)), prepare(picture)[None]
    except ImageError as error:
        raise ImageError(f"{name}{error}") from error


def _checked(image: Tensor, prepare: Prepare, first: int) -> Tensor:
    """The user's float tensor as (N, C, H, W), detached, a plain tensor, and otherwise as it is."""
    came = f"a {image.dtype} tensor of shape {tuple(image.shape)}"
    if image.ndim not in (3, 4):
        raise ImageError(f"{came}; expected (C, H, W) or (N, C, H, W)")
    if image.numel() == 0:
        raise ImageError(f"{came} holds nothing; expected at least one image of at least one pixel")
    if image.shape[-1] in (1, 3, 4) and min(image.shape[-3:-1]) > 4:
        raise ImageError(f"{came} looks like (H, W, C); expected (C, H, W): permute its axes")
    if image.layout != torch.strided or image.is_meta or image.itemsize == 1:
        raise ImageError(f"{came}, {image.layout} on {image.device}; expected an ordinary tensor with values")
    if type(image).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise ImageError(f"{came} is a {type(image).__name__}; expected a plain torch.Tensor")
    # As the subclass that a data loader made of it, every operation would put views of its own into the graph.
    tensor = image.detach().as_subclass(Tensor)
    tensor = tensor if tensor.ndim == 4 else tensor[None]
    # One number pair per image and one transfer for all of them: NaN and infinity show in the extremes.
    extremes = torch.stack([torch.stack(torch.aminmax(_in_memory_order(each))) for each in tensor]).tolist()
    for index, (low, high) in enumerate(extremes, start=first):
        if not (math.isfinite(low) and math.isfinite(high)):
            raise NonFiniteError(f"image {index} holds NaN or infinity; it cannot be explained")
    if tensor.shape[1] in (1, 3, 4):
        _warn_of_range(extremes, prepare, first)
    return tensor


def _warn_of_range(extremes: Sequence[tuple[float, float]], prepare: Prepare, first: int) -> None:
    """Warn of the first float tensor that looks like a picture, by what `prepare` makes of black and white."""
    for index, (low, high) in enumerate(extremes, start=first):
        white = _white_of(low, high, prepare)
        if white:
            std = "(1 / 255,) * 3" if white == 255 else "(1, 1, 1)"
            gives = "" if prepare is None else ", where preprocessing gives {:.3g}..{:.3g}".format(*prepare.input_range)
            warn(
                f"image {index} is a float tensor in {low:.3g}..{high:.3g}{gives}: it looks like 0..{white} without "
                "normalisation, and is taken as the model's own input. Pass the picture or uint8, or normalise it. If "
                f"the model takes 0..{white}, say so: preprocess=saliency.Preprocess(mean=(0, 0, 0), std={std})"
            )
            return


def _white_of(low: float, high: float, prepare: Prepare) -> int | None:
    """What white is in a picture of that range, 1 or 255; None where the range is one of the model's own input."""
    if low >= 0 and 20 < high <= 255 and (prepare is None or high > 1.001 * prepare.input_range[1]):
        return 255
    return 1 if 0 <= low < high <= 1 and prepare is not None and prepare.input_range[0] < 0 else None


def _in_memory_order(tensor: Tensor) -> Tensor:
    """The same values with their axes as they lie in memory, so that a reduction copies no channels_last tensor."""
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))


def _placed(tensor: Tensor, like: Tensor | None) -> Tensor:
    if like is None:
        return tensor
    return tensor.to(device=like.device, dtype=like.dtype if like.is_floating_point() else tensor.dtype)


def _require_one_size(parts: list[Tensor]) -> None:
    sizes = [tuple(part.shape[1:]) for part in parts for _ in part]
    other = next((index for index, size in enumerate(sizes) if size != sizes[0]), None)
    if other is not None:
        raise ImageError(
            f"the images of one batch must agree in size: image 0 is {_times(sizes[0])} and image {other} is "
            f"{_times(sizes[other])}; explain them one by one, or crop or resize them alike"
        )


def _times(size: tuple[int, ...]) -> str:
    return " x ".join(map(str, size))
