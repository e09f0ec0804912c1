"""Read images of any kind as one batch, and keep the position of the model's input on each original image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from ..errors import ImageError, NonFiniteError, warn
from .image_io import ImageLike, open_picture
from .preprocess import Frame, Preprocess, PreprocessLike, TransformPreprocess, as_preprocess

ImagesLike = ImageLike | Sequence[ImageLike]
Prepare = Preprocess | TransformPreprocess | None


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Batch of images, with the position of each on its original image."""

    tensor: Tensor  # (N, C, H, W), normalised
    frames: tuple[Frame | None, ...]  # None for an image that was given as a float tensor


def read(images: ImagesLike, preprocess: PreprocessLike | None = None, *, like: Tensor | None = None) -> Batch:
    """Read images as one batch.

    Paths, PIL images, arrays and uint8 tensors go through `preprocess`. Floating-point tensors, (C, H, W) or
    (N, C, H, W), are the model's own normalised input. They are used unchanged, and copied only if their device or
    dtype differs.

    Args:
        images: One image, or a sequence of images.
        preprocess: The preprocessing, from a PIL image to a tensor; not used for float tensors.
        like: A tensor that sets the device and floating-point dtype of the batch; by default the first float tensor.

    Raises:
        ImageError: An input is not an image, cannot be read, or differs from the others in size.
        NonFiniteError: A float tensor holds NaN or infinity.

    Warns:
        SaliencyWarning: A float tensor lies in 0..255 or 0..1, unlike the output of the preprocessing.
    """
    items = _as_items(images)
    prepare = None if preprocess is None else as_preprocess(preprocess)
    like = next(filter(_is_input, items), None) if like is None else like
    tensors: list[Tensor] = []
    frames: list[Frame | None] = []
    for item in items:
        if _is_input(item):
            tensor = _check_tensor(item, prepare, first=len(frames))
            frames += [None] * len(tensor)
        else:
            frame, tensor = _preprocess_image(item, prepare, name=f"image {len(frames)}: " if len(items) > 1 else "")
            frames.append(frame)
        if like is not None:
            tensor = tensor.to(like.device, like.dtype if like.is_floating_point() else tensor.dtype)
        tensors.append(tensor)
    _require_one_size(tensors)
    return Batch(tensors[0] if len(tensors) == 1 else torch.cat(tensors), tuple(frames))


def _as_items(images: ImagesLike) -> list[ImageLike]:
    """Split the images into items: a uint8 tensor (N, C, H, W) is N items, a float tensor is one item."""
    if isinstance(images, Sequence) and not isinstance(images, str | bytes):
        if any(isinstance(image, list | tuple) for image in images):
            raise ImageError("a list inside the list of images; expected one flat list")
        items = [item for image in images for item in _as_items(image)]
    elif isinstance(images, Tensor) and images.ndim == 4 and not images.is_floating_point():
        items = list(images)
    else:
        items = [images]
    if not items:
        raise ImageError("there is no image: the list or batch is empty")
    return items


def _is_input(image: ImageLike) -> TypeGuard[Tensor]:
    """Return whether an image is the model's own input."""
    return isinstance(image, Tensor) and image.is_floating_point()


def _preprocess_image(image: ImageLike, prepare: Prepare, name: str) -> tuple[Frame, Tensor]:
    """Return the frame of one image, and its tensor (1, 3, H, W)."""
    try:
        picture = open_picture(image)
        if prepare is None:
            raise ImageError(
                "this model has no preprocessing; pass preprocess=... or set model.preprocess, or pass a float tensor"
            )
        return Frame(picture, prepare.box(picture.size)), prepare(picture)[None]
    except ImageError as error:
        raise ImageError(f"{name}{error}") from error


def _check_tensor(image: Tensor, prepare: Prepare, first: int) -> Tensor:
    """Return the user's float tensor as a plain detached tensor (N, C, H, W)."""
    label = f"a {image.dtype} tensor of shape {tuple(image.shape)}"
    if image.ndim not in (3, 4):
        raise ImageError(f"{label}; expected (C, H, W) or (N, C, H, W)")
    if image.numel() == 0:
        raise ImageError(f"{label} is empty; expected at least one image of at least one pixel")
    if image.shape[-1] in (1, 3, 4) and min(image.shape[-3:-1]) > 4:
        raise ImageError(f"{label} looks like (H, W, C); expected (C, H, W): permute its axes")
    is_plain = type(image).__torch_dispatch__ is Tensor.__torch_dispatch__
    if not is_plain or image.layout != torch.strided or image.is_meta or image.itemsize == 1:
        kind = f"{type(image).__name__} ({image.layout}, on {image.device})"
        raise ImageError(f"{label} is a {kind}; expected a plain torch.Tensor with values")
    # Some data loaders create subclasses of Tensor, which would add views to the graph in every operation.
    tensor = image.detach().as_subclass(Tensor)
    tensor = tensor if tensor.ndim == 4 else tensor[None]
    # NaN and infinity show in the minimum or maximum. Checking these needs one transfer from the device for all images.
    extremes = torch.stack([torch.stack(torch.aminmax(_axes_in_memory_order(row))) for row in tensor]).tolist()
    for index, (low, high) in enumerate(extremes, start=first):
        if not (math.isfinite(low) and math.isfinite(high)):
            raise NonFiniteError(f"image {index} holds NaN or infinity; it cannot be explained")
    if tensor.shape[1] in (1, 3, 4):
        _warn_of_range(extremes, prepare, first)
    return tensor


def _warn_of_range(extremes: Sequence[tuple[float, float]], prepare: Prepare, first: int) -> None:
    """Warn of the first float tensor whose range is that of an image and not of the model's input."""
    for index, (low, high) in enumerate(extremes, start=first):
        white = _white_value(low, high, prepare)
        if white:
            std = "(1 / 255,) * 3" if white == 255 else "(1, 1, 1)"
            gives = "" if prepare is None else ", but preprocessing gives {:.3g}..{:.3g}".format(*prepare.input_range)
            warn(
                f"image {index} is a float tensor in {low:.3g}..{high:.3g}{gives}: it looks like 0..{white} without "
                "normalisation, and is used as the model's own input. Pass a uint8 image, or normalise the tensor. "
                f"If the model takes 0..{white}, declare it: preprocess=saliency.Preprocess(mean=(0, 0, 0), std={std})"
            )
            return


def _white_value(low: float, high: float, prepare: Prepare) -> int | None:
    """Return the value of white in an image of that range, 1 or 255; None for the range of a normalised input."""
    if low >= 0 and 20 < high <= 255 and (prepare is None or high > 1.001 * prepare.input_range[1]):
        return 255
    return 1 if 0 <= low < high <= 1 and prepare is not None and prepare.input_range[0] < 0 else None


def _axes_in_memory_order(tensor: Tensor) -> Tensor:
    """Return a tensor with its axes in memory order, so that a reduction does not copy a channels_last tensor."""
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))


def _require_one_size(tensors: list[Tensor]) -> None:
    sizes = [tuple(tensor.shape[1:]) for tensor in tensors for _ in tensor]
    index = next((index for index, size in enumerate(sizes) if size != sizes[0]), None)
    if index is not None:
        first, other = (" x ".join(map(str, size)) for size in (sizes[0], sizes[index]))
        raise ImageError(
            f"the images of one batch must have the same size: image 0 is {first} and image {index} is {other}; "
            "explain them one by one, or crop or resize them to one size"
        )
