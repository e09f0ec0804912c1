"""Preprocess an image for the model, and locate the model's input on the image."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..errors import ImageError
from ..validation import check_choice, is_integer, is_pair, is_real
from .crop_detection import Box, TransformPreprocess

Fit = Literal["stretch", "cover", "contain"]

_FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "nearest-exact": Image.Resampling.NEAREST,
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "hamming": Image.Resampling.HAMMING,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_MAX_RESIZED = 178_956_970  # pixels; a strip of 1 x 60000 would otherwise be enlarged to 256 x 15 million


@dataclass(frozen=True, slots=True)
class Frame:
    """Position of the model's input on the original image.

    The box is in pixels of `picture` (RGB, upright), may be fractional, and extends beyond the image where the
    preprocessing padded it.
    """

    picture: Image.Image
    box: Box


@dataclass(frozen=True, slots=True)
class Preprocess:
    """Preprocessing of most image models: resize, centre crop, scale to 0..1, normalise.

    It resamples with Pillow, and agrees bit for bit with the evaluation transforms of torchvision and timm.

    Args:
        size: (h, w) of the model's input; None keeps the whole resized image. A smaller image is padded.
        resize: The length of the shorter edge, or (h, w); None keeps the size of the image.
        mean, std: One number per channel, for values in 0..1.
        interpolation: One of nearest, box, bilinear, hamming, bicubic, lanczos.
        fit: How an image is resized if `resize` is (h, w): "stretch" changes its aspect ratio; "cover" keeps it and
            covers (h, w); "contain" keeps it and fits into (h, w).
        fill: The colour of the padding.

    Raises:
        ImageError: An option is invalid.
    """

    size: tuple[int, int] | None = None
    resize: int | tuple[int, int] | None = None
    mean: tuple[float, ...] = _IMAGENET_MEAN
    std: tuple[float, ...] = _IMAGENET_STD
    interpolation: str = "bilinear"
    fit: Fit = "stretch"
    fill: tuple[int, int, int] = (0, 0, 0)

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            values = getattr(self, name)
            if isinstance(values, np.ndarray | Tensor):
                values = values.tolist()
            if _are_three(values, is_real):
                object.__setattr__(self, name, _three_floats(values))
            else:
                raise ImageError(f"{name}={values!r}: expected three finite numbers, one per channel of RGB")
        if 0 in self.std:
            raise ImageError(f"std={self.std}: a standard deviation of 0 would divide by zero")
        if not _are_three(self.fill, partial(is_integer, least=0)) or max(self.fill) > 255:
            raise ImageError(f"fill={self.fill!r}: expected three whole numbers from 0 to 255, a colour in RGB")
        check_choice("interpolation", self.interpolation, tuple(_FILTERS), error=ImageError)
        check_choice("fit", self.fit, get_args(Fit), error=ImageError)
        if not (self.size is None or is_pair(self.size)):
            raise ImageError(f"size={self.size!r}: expected (height, width), both of at least one pixel, or None")
        if is_integer(self.resize):
            object.__setattr__(self, "resize", int(self.resize))  # NumPy's integers are not int
        elif not (self.resize is None or is_pair(self.resize)):
            raise ImageError(
                f"resize={self.resize!r}: expected the length of the shorter edge or (height, width), both of at "
                "least one pixel, or None"
            )

    @classmethod
    def from_torchvision(cls, transform: Any) -> Preprocess:
        """Convert `weights.transforms()` of a torchvision classification, segmentation or detection model.

        Raises:
            ImageError: `transform` is not one of these presets.
        """
        if type(transform).__name__ == "ObjectDetection":  # only scales to 0..1
            return cls(None, None, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
        if not _is_torchvision_preset(transform):
            raise ImageError(
                f"{type(transform).__name__} is not a torchvision image preset; pass weights.transforms(), or "
                "any callable from an image to a tensor as preprocess="
            )
        crop = getattr(transform, "crop_size", None)
        resize = transform.resize_size
        return cls(
            size=None if crop is None else _pair(crop),
            resize=None if resize is None else _edges(resize),
            mean=_three_floats(transform.mean),
            std=_three_floats(transform.std),
            interpolation=_filter_name(transform.interpolation),
        )

    @classmethod
    def from_timm(cls, config: Mapping[str, Any]) -> Preprocess:
        """Convert timm's `pretrained_cfg` or a resolved data config to its evaluation transform.

        The size is `input_size`; for the test size, first resolve the config with `use_test_size=True`.

        Raises:
            ImageError: The config is not for RGB, or has no `input_size`.
        """
        if config.get("input_size") is None:
            raise ImageError(
                f'the timm config has no "input_size" (only {", ".join(map(str, config)) or "nothing"}); '
                "pass model.pretrained_cfg"
            )
        channels, *size = (3, *config["input_size"])[-3:]
        if channels != 3:
            raise ImageError(f"the model takes {channels} channels, an image has 3; pass a float tensor")
        crop = config.get("crop_pct") or 0.875
        scaled = (math.floor(size[0] / crop), math.floor(size[1] / crop))
        mode = config.get("crop_mode") or "center"
        if mode not in ("center", "squash", "border"):
            raise ImageError(f'unknown crop_mode "{mode}" in the timm config; expected center, squash or border')
        mean = _three_floats(config.get("mean") or _IMAGENET_MEAN)
        red, green, blue = (round(255 * value) for value in mean)
        fits: dict[str, Fit] = {"center": "cover", "squash": "stretch", "border": "contain"}
        square = mode == "center" and scaled[0] == scaled[1]
        return cls(
            size=(size[0], size[1]),
            resize=scaled[0] if square else scaled,
            mean=mean,
            std=_three_floats(config.get("std") or _IMAGENET_STD),
            interpolation=_filter_name(config.get("interpolation") or "bicubic"),
            fit="stretch" if square else fits[mode],
            fill=(red, green, blue) if mode == "border" else (0, 0, 0),
        )

    @property
    def input_range(self) -> tuple[float, float]:
        """Lowest and highest value of preprocessed black and white images."""
        ends = [(end - mean) / std for mean, std in zip(self.mean, self.std, strict=True) for end in (0, 1)]
        return min(ends), max(ends)

    def __call__(self, picture: Image.Image) -> Tensor:
        """Return the model's input for one image: (3, H, W) float32 on the CPU.

        Raises:
            ImageError: The image is so long and thin that resizing it would take all memory.
        """
        picture = picture if picture.mode == "RGB" else picture.convert("RGB")
        resized = self._resized(picture.size)
        if resized != picture.size:
            picture = picture.resize(resized, _FILTERS[self.interpolation])
        if self.size is not None and self.size != (picture.height, picture.width):
            picture = self._crop(picture, self.size)
        bytes_ = torch.from_numpy(np.array(picture))  # (H, W, 3)
        tensor = bytes_.permute(2, 0, 1).to(torch.float32, memory_format=torch.contiguous_format)
        return self._shift(tensor.div_(255))

    def box(self, picture_size: tuple[int, int]) -> Box:
        """Return where the model's input lies on an image of (w, h) pixels."""
        width, height = picture_size
        resized_width, resized_height = self._resized(picture_size)
        crop_height, crop_width = self.size or (resized_height, resized_width)
        left, top = _offset(resized_width, crop_width), _offset(resized_height, crop_height)
        x, y = width / resized_width, height / resized_height
        return (left * x, top * y, (left + crop_width) * x, (top + crop_height) * y)

    def normalise(self, tensor: Tensor) -> Tensor:
        """Normalise values in 0..1, (..., 3, H, W), for the model."""
        return self._shift(tensor.clone())

    def denormalise(self, tensor: Tensor) -> Tensor:
        """Convert the model's input, (..., 3, H, W), to values in 0..1."""
        return tensor * self._channels(self.std, tensor) + self._channels(self.mean, tensor)

    def _shift(self, tensor: Tensor) -> Tensor:
        return tensor.sub_(self._channels(self.mean, tensor)).div_(self._channels(self.std, tensor))

    def _channels(self, values: tuple[float, ...], like: Tensor) -> Tensor:
        return torch.tensor(values, dtype=like.dtype, device=like.device).view(-1, 1, 1)

    def _crop(self, picture: Image.Image, size: tuple[int, int]) -> Image.Image:
        height, width = size
        left, top = _offset(picture.width, width), _offset(picture.height, height)
        if left >= 0 and top >= 0:
            return picture.crop((left, top, left + width, top + height))
        canvas = Image.new("RGB", (width, height), self.fill)
        canvas.paste(picture, (-left, -top))
        return canvas

    def _resized(self, picture_size: tuple[int, int]) -> tuple[int, int]:
        """Return the size (w, h) of an image after resizing, rounded as in torchvision and timm."""
        width, height = picture_size
        if self.resize is None:
            return picture_size
        if isinstance(self.resize, int):
            longer = int(self.resize * max(width, height) / min(width, height))
            resized = (self.resize, longer) if width <= height else (longer, self.resize)
        elif self.fit == "stretch":
            resized = (self.resize[1], self.resize[0])
        else:
            ratios = (height / self.resize[0], width / self.resize[1])
            ratio = min(ratios) if self.fit == "cover" else max(ratios)
            resized = (max(round(width / ratio), 1), max(round(height / ratio), 1))
        if resized[0] * resized[1] > _MAX_RESIZED:
            raise ImageError(
                f"an image of {width} x {height} pixels would be resized to {resized[0]} x {resized[1]}; "
                "crop it before explaining it"
            )
        return resized


PreprocessLike = Preprocess | TransformPreprocess | Callable[[Image.Image], Tensor] | Mapping[str, Any]


def as_preprocess(like: PreprocessLike) -> Preprocess | TransformPreprocess:
    """Convert a torchvision preset, a timm config or any callable to a preprocessing.

    Raises:
        ImageError: `like` is none of these.
    """
    if isinstance(like, Preprocess | TransformPreprocess):
        return like
    if isinstance(like, Mapping):
        return Preprocess.from_timm(like)
    if _is_torchvision_preset(like):
        return Preprocess.from_torchvision(like)
    if callable(like):
        return TransformPreprocess(like)
    raise ImageError(
        f"preprocess is a {type(like).__name__}; expected a callable from an image to a tensor (3, H, W), "
        "weights.transforms() of torchvision or the pretrained_cfg of a timm model"
    )


def _is_torchvision_preset(transform: object) -> bool:
    """Detect an image preset without importing torchvision. The video preset has no `antialias`."""
    described = all(hasattr(transform, name) for name in ("resize_size", "mean", "std", "interpolation", "antialias"))
    return described or (
        type(transform).__name__ == "ObjectDetection" and type(transform).__module__.startswith("torchvision.")
    )


def _are_three(values: object, fits: Callable[[object], bool]) -> bool:
    """Return whether these are three valid values, one per channel of RGB."""
    return isinstance(values, list | tuple) and len(values) == 3 and all(map(fits, values))


def _three_floats(values: Any) -> tuple[float, float, float]:
    numbers = tuple(float(value) for value in values)
    red, green, blue = numbers * 3 if len(numbers) == 1 else numbers
    return red, green, blue


def _pair(edges: Any) -> tuple[int, int]:
    return (int(edges[0]), int(edges[-1]))


def _edges(edges: Any) -> int | tuple[int, int]:
    return int(edges[0]) if len(edges) == 1 else _pair(edges)


def _filter_name(interpolation: Any) -> str:
    name = str(getattr(interpolation, "value", interpolation))
    return "bilinear" if name == "random" else name  # timm's name for a random choice in training


def _offset(resized: int, crop: int) -> int:
    """Return where a centred crop begins, negative for padding, rounded as torchvision and timm round."""
    return -((crop - resized) // 2) if crop > resized else round((resized - crop) / 2.0)
