"""Preprocess an image for the model, and locate the model's input on the image.

A `Preprocess` describes resizing, cropping and normalisation. Any other callable from an image to a tensor becomes a
`TransformPreprocess`, whose crop is detected.
"""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from PIL import Image, ImageCms
from torch import Tensor

from ..errors import ImageError, NonFiniteError, warn
from ..validation import check_choice, described, is_integer, is_pair, is_real
from .geometry import Box, Range
from .probe import Highest, Probe, require_repeatable

Fit = Literal["stretch", "cover", "contain"]
Whole = bool | Literal["aspect"]
WHOLE: tuple[Whole, ...] = (False, True, "aspect")

_FILTERS = {choice.name.lower(): choice for choice in Image.Resampling}
_FILTERS["nearest-exact"] = Image.Resampling.NEAREST  # torchvision's name
_TIMM_FITS: dict[str, Fit] = {"center": "cover", "squash": "stretch", "border": "contain"}  # by timm's crop_mode
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_MAX_RESIZED = 178_956_970  # pixels; a strip of 1 x 60000 would otherwise be enlarged to 256 x 15 million


# Images of one channel with more than 8 bits

_DEEPEST = 65535
_DARK = _DEEPEST // 8  # an image with a lower maximum has at most 13 of its 16 bits, and is almost black


def is_deep(image: Image.Image) -> bool:
    """Return whether an image has one channel of 16 or 32 bits."""
    return image.mode.startswith("I") or image.mode == "F"


def scaled_grey(image: Image.Image, range: Range | None) -> Image.Image:
    """Scale a deep image from its range, by default 0..65535, to 0..255; in mode F, the values are clamped.

    Raises:
        ImageError: There is no range, and a pixel is a floating-point number or outside 0..65535.
        NonFiniteError: A pixel is NaN.

    Warns:
        SaliencyWarning: There is no range, and the image uses less than an eighth of 0..65535.
    """
    values = np.array(image, np.float32)
    least, most = float(values.min()), float(values.max())
    if math.isnan(least):
        raise NonFiniteError("the image holds NaN")
    limits: Range | None = range or image.info.get("range")  # of a DICOM file
    if limits is None:
        hint = "state the range of the pixels, preprocess=saliency.Preprocess(range=(low, high))"
        if image.mode == "F":
            raise ImageError(f"the image has floating-point pixels, which have no agreed range; {hint}")
        if least < 0 or most > _DEEPEST:
            raise ImageError(f"the image has pixels in {least:.0f}..{most:.0f}, expected 0..{_DEEPEST}; {hint}")
        warn_if_dark(least, most, f"{hint}, for example range=(0, {_highest(most)})")
    low, high = limits or (0, _DEEPEST)
    low, high = (high, low) if image.info.get("inverted") else (low, high)
    scaled = ((values - low) * (255 / (high - low))).clip(0, 255)
    return Image.fromarray(scaled)


def warn_if_dark(least: float, most: float, hint: str) -> None:
    """Warn of an image whose values from `least` to `most` use less than an eighth of 0..65535."""
    if least < most < _DARK:
        warn(f"a 16-bit image lies below {_DARK} of {_DEEPEST}, so the model sees it almost black; {hint}")


def drawable(image: Image.Image, range: Range | None = None) -> Image.Image:
    """Return an image to draw on, in sRGB. A deep image is scaled by its range, as for the model.

    Without a range, an image of floating-point numbers, or that exceeds 0..65535 or uses less than an eighth of it, is
    stretched to its minimum and maximum.
    """
    if not is_deep(image):
        return _as_srgb(image) if "icc_profile" in image.info else image
    values = np.asarray(image)
    least, most = float(values.min()), float(values.max())
    is_bright = image.mode != "F" and least >= 0 and _DARK <= most <= _DEEPEST
    if range is None and "range" not in image.info and not is_bright:
        return _rounded(scaled_grey(image, (least, most if most > least else least + 1)))
    return _rounded(scaled_grey(image, range))


def _as_srgb(image: Image.Image) -> Image.Image:
    """Convert an image to sRGB, without its profile. A profile that is damaged or of other channels is ignored."""
    converted = image.copy()
    converted.info.clear()
    with suppress(OSError, ImportError, ImageCms.PyCMSError):
        profile = ImageCms.ImageCmsProfile(io.BytesIO(image.info["icc_profile"]))
        if (profile.profile.profile_description or "").startswith("sRGB"):
            return converted
        is_grey = profile.profile.xcolor_space.strip() == "GRAY"
        source = image.convert("L") if is_grey else image.info.get("cmyk", image)
        convert = ImageCms.buildTransform(profile, ImageCms.createProfile("sRGB"), source.mode, "RGB")
        converted = convert.apply(source)
        converted.info.clear()
    return converted


def _rounded(grey: Image.Image) -> Image.Image:
    """Return an image of mode F, with values in 0..255, in RGB."""
    return Image.fromarray(np.uint8(np.asarray(grey) + 0.5)).convert("RGB")


def _highest(value: float, *, is_float: bool = False) -> float:
    """Return the highest value with the bit length of `value`, at least 8 and at most 16 bits; a power of 2 of floats.

    The float 1 gives 1, so that functions that clip to 0..1 can be probed.
    """
    if is_float:
        return 2.0 ** math.ceil(math.log2(value)) if 0 < value < math.inf else 1.0
    return int(min(max(2 ** int(value).bit_length() - 1, 255), _DEEPEST))


@dataclass(frozen=True, slots=True)
class Preprocess:
    """Preprocessing of most image models: resize, centre crop, scale to 0..1, normalise.

    It resamples with Pillow, and agrees bit for bit with the evaluation transforms of torchvision and timm.

    Args:
        size: (h, w) of the model's input; None keeps the whole resized image. A smaller image is padded.
        resize: The length of the shorter edge, or (h, w); by default `size`. False keeps the size of the image, so that
            `size` is a pure crop.
        mean, std: One number per channel, for values in 0..1: three for RGB, or one for greyscale. Images are then
            converted to greyscale, and overlays still show them in colour.
        interpolation: One of nearest, box, bilinear, hamming, bicubic, lanczos.
        fit: How an image is resized if `resize` is (h, w): "stretch" changes its aspect ratio; "cover" keeps it and
            covers (h, w); "contain" keeps it and fits into (h, w). By default "stretch", or "cover" without `resize`.
        fill: The colour of the padding.
        centre: Whether the padding is on both sides. False pads at the right and at the bottom only.
        stride: Without `size`, each edge is padded to a multiple of this number of pixels.
        range: The pixel values that become 0 and 1 in images of one channel with more than 8 bits, such as (0, 4095)
            for 12 bits; values outside are clamped. It is applied before resizing, in floating point. By default
            (0, 65535). Images of 8 bits always have 0..255.

    Raises:
        ImageError: An option is invalid.
    """

    size: tuple[int, int] | None = None
    resize: int | tuple[int, int] | Literal[False] | None = None
    mean: tuple[float, ...] = _IMAGENET_MEAN
    std: tuple[float, ...] = _IMAGENET_STD
    interpolation: str = "bilinear"
    fit: Fit | None = None
    fill: tuple[int, ...] = (0, 0, 0)
    range: Range | None = None
    centre: bool = True
    stride: int | None = None

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            values = getattr(self, name)
            values = values.tolist() if isinstance(values, np.ndarray | Tensor) else values
            if not _are_numbers(values, (1, 3), is_real):
                raise ImageError(
                    f"{name}={described(values)}: expected one finite number per channel, for RGB or greyscale"
                )
            object.__setattr__(self, name, tuple(map(float, values)))
        if len(self.mean) != len(self.std):
            raise ImageError(f"mean={self.mean} and std={self.std}: expected the same number of channels")
        if 0 in self.std:
            raise ImageError(f"std={self.std}: a standard deviation of 0 would divide by zero")
        if not _are_numbers(self.fill, (3,), lambda value: is_integer(value, least=0)) or max(self.fill) > 255:
            raise ImageError(f"fill={described(self.fill)}: expected three whole numbers from 0 to 255, as RGB")
        check_choice("interpolation", self.interpolation, tuple(_FILTERS), error=ImageError)
        if self.range is not None:
            if not _are_numbers(self.range, (2,), is_real) or self.range[0] == self.range[1]:
                raise ImageError(f"range={described(self.range)}: expected two different values, such as (0, 4095)")
            object.__setattr__(self, "range", tuple(map(float, self.range)))
        if self.stride is not None and (self.size is not None or not is_integer(self.stride)):
            raise ImageError(f"stride={described(self.stride)}: expected a positive whole number, and no `size`")
        for name, edge in (("size", ""), ("resize", "the length of the shorter edge, or ")):
            edges = getattr(self, name)
            if is_pair(edges):
                edges = tuple(map(int, edges))
            elif edge and is_integer(edges):
                edges = int(edges)
            elif edges is not None and not (edge and edges is False):
                expected = f"{edge}(height, width), at least one pixel each, or None"
                raise ImageError(f"{name}={described(edges)}: expected {expected}{', or False' * bool(edge)}")
            object.__setattr__(self, name, edges)  # without lists and NumPy's integers
        fit: Fit = "stretch"
        if self.resize is None and self.size is not None:
            object.__setattr__(self, "resize", self.size)
            fit = "cover"
        chosen = fit if self.fit is None else check_choice("fit", self.fit, get_args(Fit), error=ImageError)
        object.__setattr__(self, "fit", chosen)

    @classmethod
    def letterbox(
        cls, size: int | tuple[int, int] = 640, stride: int | None = 32, *, centre: bool = True
    ) -> Preprocess:
        """Return the preprocessing of YOLO detectors: fit into `size`, pad with grey 114, scale to 0..1.

        Ultralytics pads to the smallest multiple of the stride for single images, and to the whole `size` (stride=None)
        for batches. It resizes with OpenCV, without antialiasing, so that pixels differ slightly.

        Args:
            size: The length of the longer edge, or (h, w).
            stride: The largest stride of the model; None pads to the whole size.
            centre: Whether the padding is on both sides, as in Ultralytics, or at the right and bottom, as in YOLOX.
        """
        edges = (size, size) if isinstance(size, int) else size
        options: Any = {"mean": (0, 0, 0), "std": (1, 1, 1), "fill": (114, 114, 114), "centre": centre}
        return cls(edges if stride is None else None, edges, fit="contain", stride=stride, **options)

    @classmethod
    def from_torchvision(cls, transform: Any) -> Preprocess:
        """Convert `weights.transforms()` of a torchvision classification, segmentation or detection model.

        Raises:
            ImageError: `transform` is not one of these presets.
        """
        if not _is_torchvision_preset(transform):
            hint = "pass weights.transforms(), or any callable from an image to a tensor as preprocess="
            raise ImageError(f"{type(transform).__name__} is not a torchvision image preset; {hint}")
        resize, crop = getattr(transform, "resize_size", None), getattr(transform, "crop_size", None)
        return cls(
            size=None if crop is None else (crop[0], crop[-1]),
            resize=False if resize is None else resize[0] if len(resize) == 1 else resize,
            # A detection preset only scales to 0..1.
            mean=getattr(transform, "mean", (0.0, 0.0, 0.0)),
            std=getattr(transform, "std", (1.0, 1.0, 1.0)),
            interpolation=_filter_name(getattr(transform, "interpolation", "bilinear")),
        )

    @classmethod
    def from_timm(cls, config: Mapping[str, Any]) -> Preprocess:
        """Convert timm's `pretrained_cfg` or a resolved data config to its evaluation transform.

        The size is `input_size`; for the test size, first resolve the config with `use_test_size=True`.

        Raises:
            ImageError: The config is neither for RGB nor for greyscale, or has no `input_size`.
        """
        if config.get("input_size") is None:
            hint = f"fields of saliency.Preprocess: {', '.join(option.name for option in fields(cls))}"
            raise ImageError(f'{[*config]} has no "input_size"; pass model.pretrained_cfg of timm, or {hint}')
        channels, *size = (3, *config["input_size"])[-3:]
        if channels not in (1, 3):
            raise ImageError(f"the model takes {channels} channels, an image has 3 or 1; pass a float tensor")
        crop = config.get("crop_pct") or 0.875
        scaled = (math.floor(size[0] / crop), math.floor(size[1] / crop))
        mode = check_choice("crop_mode", config.get("crop_mode") or "center", tuple(_TIMM_FITS), error=ImageError)
        mean, std = config.get("mean") or _IMAGENET_MEAN, config.get("std") or _IMAGENET_STD
        mean, std = (tuple(values) * (channels if len(values) == 1 else 1) for values in (mean, std))
        if len(mean) != channels:
            raise ImageError(f"the timm config has {channels} channels and mean={mean}; expected one mean per channel")
        is_square = mode == "center" and scaled[0] == scaled[1]
        return cls(
            size=(size[0], size[1]),
            resize=scaled[0] if is_square else scaled,
            mean=mean,
            std=std,
            interpolation=_filter_name(config.get("interpolation") or "bicubic"),
            fit="stretch" if is_square else _TIMM_FITS[mode],
            fill=tuple(round(255 * value) for value in mean * (3 // channels)) if mode == "border" else (0, 0, 0),
        )

    def without_crop(self, whole: Whole) -> Preprocess:
        """Return a preprocessing that shows the model the whole image.

        Args:
            whole: True resizes the image to the input's size, which changes its aspect ratio. "aspect" resizes it as
                before and leaves the crop out, so the model's input differs in size and shape between images.
        """
        if self.size is None or not whole:
            return self
        if whole != "aspect":
            return replace(self, resize=self.size, fit="stretch")
        if isinstance(self.resize, tuple) and self.fit == "stretch":
            return replace(self, size=None, resize=min(self.resize))
        return replace(self, size=None)

    @property
    def input_range(self) -> tuple[float, float]:
        """Lowest and highest value of preprocessed black and white images."""
        ends = [(end - mean) / std for mean, std in zip(self.mean, self.std, strict=True) for end in (0, 1)]
        return min(ends), max(ends)

    def __call__(self, image: Image.Image) -> Tensor:
        """Return the model's input for one image: (3, H, W), or (1, H, W) for greyscale, float32 on the CPU.

        Raises:
            ImageError: Resizing the long, thin image would take all memory. Or its pixels have no agreed range, and
                there is no `range`.
            NonFiniteError: A pixel is NaN.

        Warns:
            SaliencyWarning: A 16-bit image uses less than an eighth of its range, and there is no `range`.
        """
        mode = "RGB" if len(self.mean) == 3 else "L"
        if not isinstance(image, Image.Image):
            raise ImageError(f"expected a PIL image, got {described(image)}; a path is opened by PIL.Image.open(path)")
        if is_deep(image):
            image, mode = scaled_grey(image, self.range), "F"
        image = image if image.mode == mode else image.convert(mode)
        resized = self._resized(image.size)
        if resized != image.size:
            image = image.resize(resized, _FILTERS[self.interpolation])
        size = self._canvas(image.size)
        if size != image.size:
            canvas = Image.new("RGB", size, self.fill).convert(mode)
            canvas.paste(image, (-self._offset(image.width, size[0]), -self._offset(image.height, size[1])))
            image = canvas
        pixels = torch.from_numpy(np.array(image)).view(image.height, image.width, -1)  # (H, W, C)
        tensor = pixels.permute(2, 0, 1).to(torch.float32, memory_format=torch.contiguous_format)
        return self.normalise(tensor.div_(255))

    def box(self, image_size: tuple[int, int]) -> Box:
        """Return the box of the model's input on an image of (w, h) pixels."""
        width, height = image_size
        resized_width, resized_height = resized = self._resized(image_size)
        crop_width, crop_height = self._canvas(resized)
        left, top = self._offset(resized_width, crop_width), self._offset(resized_height, crop_height)
        x, y = width / resized_width, height / resized_height
        return (left * x, top * y, (left + crop_width) * x, (top + crop_height) * y)

    def normalise(self, x: Tensor) -> Tensor:
        """Normalise values in 0..1, (..., C, H, W), for the model."""
        return x.sub(self._channels(self.mean, x)).div_(self._channels(self.std, x))

    def denormalise(self, x: Tensor) -> Tensor:
        """Convert the model's input, (..., C, H, W), to values in 0..1."""
        return x * self._channels(self.std, x) + self._channels(self.mean, x)

    def _channels(self, values: tuple[float, ...], like: Tensor) -> Tensor:
        return torch.tensor(values, dtype=like.dtype, device=like.device).view(-1, 1, 1)

    def _canvas(self, resized: tuple[int, int]) -> tuple[int, int]:
        """Return the size (w, h) of the input for the size (w, h) of a resized image."""
        if self.size is not None:
            return self.size[1], self.size[0]
        width, height = (math.ceil(edge / (self.stride or 1)) * (self.stride or 1) for edge in resized)
        return width, height

    def _offset(self, resized: int, crop: int) -> int:
        """Return the start of a crop, negative for padding, rounded as in torchvision and timm."""
        if crop > resized:
            return -((crop - resized) // 2) if self.centre else 0
        return round((resized - crop) / 2.0)

    def _resized(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """Return the size (w, h) of an image after resizing, rounded as in torchvision and timm."""
        width, height = image_size
        if not self.resize:
            return image_size
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
            new = " x ".join(map(str, resized))
            raise ImageError(f"an image of {width} x {height} pixels would be resized to {new}; crop it first")
        return resized


_box_lock = threading.RLock()


@dataclass(frozen=True)
class TransformPreprocess:
    """Any callable from a PIL image to a tensor, used as preprocessing.

    Its crop is detected once per image size, by transforming coordinate ramps: images whose grey value is a coordinate
    of the pixel. Therefore a callable that resizes, crops, pads and normalises needs no description.

    Args:
        transform: Takes an RGB image and returns a float tensor (C, H, W), or an image processor of Hugging Face. It
            must be deterministic. Images of one channel with more than 8 bits are passed unchanged, in the mode I;16,
            I or F of Pillow. For a volume, it takes and returns a tensor (C, D, H, W); see `preprocess_volume`.
    """

    range: ClassVar[None] = None  # the function decides the range of a deep image

    transform: Callable[[Any], Tensor]
    _boxes: dict[tuple[object, ...], Box] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __call__(self, image: Image.Image) -> Tensor:
        """Return the model's input for one image: (C, H, W), floating point.

        Raises:
            ImageError: The callable did not return one tensor (C, H, W).
        """
        transform: Any = self.transform
        if self.takes_8_bits(image):
            image = _rounded(scaled_grey(image, None))
        is_processor = self.is_processor
        x = transform(images=image, return_tensors="pt")["pixel_values"][0] if is_processor else transform(image)
        if not isinstance(x, Tensor) or x.ndim != 3 or x.numel() == 0 or not x.is_floating_point():
            came = f"a {x.dtype} tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            expected = "floating-point values of shape (C, H, W), as ToTensor returns"
            raise ImageError(f"the preprocessing returned {came}; expected {expected}")
        return x.detach()

    @property
    def is_processor(self) -> bool:
        """Whether this is an image processor of Hugging Face."""
        return "pixel_values" in getattr(self.transform, "model_input_names", ())

    def takes_8_bits(self, image: Image.Image) -> bool:
        """Return whether a deep image is scaled to 8 bits: for processors, and by the window of a DICOM file."""
        return is_deep(image) and (self.is_processor or "range" in image.info)

    @cached_property
    def input_range(self) -> tuple[float, float]:
        """Lowest and highest value of transformed black and white images; NaN if the callable takes no images."""
        with suppress(Exception):  # a network may have a method `preprocess` of its own, which takes tensors
            ends = torch.stack([self(Image.new("RGB", (256, 256), color)) for color in ("black", "white")])
            return float(ends.min()), float(ends.max())
        return math.nan, math.nan

    def box(self, image_size: tuple[int, int], highest: Highest | None = None) -> Box:
        """Return the box of the model's input on an image of (w, h) pixels, accurate to one pixel.

        Args:
            image_size: The size of the image.
            highest: The highest pixel value of deep images, in the type of their pixels; None for RGB images.

        Raises:
            ImageError: The callable is random, flips, rotates or warps the image, or changes its colours other than by
                a scale and an offset.
        """
        with _box_lock:
            if (image_size, highest) not in self._boxes:
                require_repeatable(self, image_size, highest)
                # In transformed grey ramps, each output pixel gives a coordinate of the image.
                self._boxes[image_size, highest] = Probe(self, image_size, highest).box()
            return self._boxes[image_size, highest]


def locate(prepare: Preprocess | TransformPreprocess, image: Image.Image) -> Box:
    """Return the box of the model's input on an image.

    Warns:
        SaliencyWarning: A crop keeps less than half of the image's shorter edge.
    """
    if isinstance(prepare, TransformPreprocess) and is_deep(image) and not prepare.takes_8_bits(image):
        values = np.asarray(image)
        highest = _highest(float(values.max()), is_float=image.mode == "F")
        box = prepare.box(image.size, values.dtype.type(highest))
    else:
        box = prepare.box(image.size)
    left, top, right, bottom = box
    if min(right - left, bottom - top) < min(image.size) / 2:
        warn(
            "the preprocessing keeps less than half of the image's shorter edge: a crop around the centre, without "
            "resizing. To show the model more of the image, resize it first, or use whole=True (--whole)"
        )
    return box


Prepare = Preprocess | TransformPreprocess | None
PreprocessLike = Preprocess | TransformPreprocess | Callable[[Any], Tensor] | Mapping[str, Any]


def as_preprocess(like: PreprocessLike) -> Preprocess | TransformPreprocess:
    """Convert a torchvision preset, a timm config, the fields of a `Preprocess` or any callable to a preprocessing.

    Raises:
        ImageError: `like` is none of these.
    """
    if isinstance(like, Preprocess | TransformPreprocess):
        return like
    if isinstance(like, Mapping):
        names = {option.name for option in fields(Preprocess)}
        if any(isinstance(prepare, Preprocess | TransformPreprocess) for prepare in like.values()):
            inputs, first = " and ".join(map(str, like)), next(iter(like))
            named = f'{{"{first}": image, ...}}, on the command line {first}=FILE'
            raise ImageError(f"the model has a preprocessing for each input, {inputs}; name the inputs: {named}")
        return Preprocess(**like) if names.issuperset(like) else Preprocess.from_timm(like)
    if _is_torchvision_preset(like):
        return Preprocess.from_torchvision(like)
    if callable(like):
        return TransformPreprocess(like)
    raise ImageError(
        f"got {type(like).__name__} as preprocess; expected a saliency.Preprocess, a callable from an image to a "
        "tensor (3, H, W), weights.transforms() of torchvision or the pretrained_cfg of a timm model"
    )


def without_crop(like: PreprocessLike | None, whole: Whole) -> Preprocess:
    """Return a preprocessing without its crop; see `Preprocess.without_crop`.

    Raises:
        ImageError: There is no preprocessing; or it is a function, and `whole` is "aspect", or the function does not
            give inputs of one size, or does more than resize, crop and normalise.
    """
    return _described(like, f"whole={whole!r}", is_function=whole == "aspect").without_crop(whole)


def only_normalised(like: PreprocessLike | None) -> Preprocess:
    """Return a preprocessing that neither resizes nor crops, for tiles. Raises ImageError as `without_crop` does."""
    return replace(_described(like, "tiles"), size=None, resize=False, stride=None)


def _described(like: PreprocessLike | None, option: str, *, is_function: bool = False) -> Preprocess:
    """Return a preprocessing as a `Preprocess`. Raises ImageError if it cannot be converted."""
    prepare = None if like is None else as_preprocess(like)
    if isinstance(prepare, TransformPreprocess) and not is_function:
        prepare = _stretched(prepare)
    if isinstance(prepare, Preprocess):
        return prepare
    came = "this model has no preprocessing" if prepare is None else "the preprocessing is a function"
    hint = "describe it: preprocess=saliency.Preprocess(size=..., resize=..., mean=..., std=...)"
    raise ImageError(f"{option}: {came}, so its crop cannot be removed; {hint}")


def _stretched(function: TransformPreprocess) -> Preprocess | TransformPreprocess:
    """Return a preprocessing with the size and the normalisation of a function; the function if results differ."""
    images = [Image.new("RGB", (256, 256), color) for color in ("black", "white")]
    images.append(Image.new("RGB", (400, 256), "rgb(20, 100, 200)"))
    black, white, mixed = map(function, images)
    size, scale = (black.shape[1], black.shape[2]), 1 / (white - black).mean((1, 2))
    # Image processors of Hugging Face have an attribute `resample`.
    resample = Image.Resampling(getattr(function.transform, "resample", Image.Resampling.BILINEAR))
    mean = -black.mean((1, 2)) * scale
    stretched = Preprocess(size, size, tuple(mean.tolist()), tuple(scale.tolist()), resample.name.lower())
    is_equal = mixed.shape[1:] == size and torch.allclose(stretched(images[2]), mixed, atol=1e-3)
    return stretched if is_equal else function


def _is_torchvision_preset(transform: object) -> bool:
    """Detect an image preset without importing torchvision. The video preset has no `antialias`."""
    kind = type(transform)
    is_detection = kind.__name__ == "ObjectDetection" and kind.__module__.startswith("torchvision.")
    names = ("resize_size", "mean", "std", "interpolation", "antialias")
    return is_detection or all(hasattr(transform, name) for name in names)


def _are_numbers(values: object, channels: tuple[int, ...], is_valid: Callable[[object], bool]) -> bool:
    """Return whether these are valid values, one per channel."""
    return isinstance(values, list | tuple) and len(values) in channels and all(map(is_valid, values))


def _filter_name(interpolation: Any) -> str:
    name = str(getattr(interpolation, "value", interpolation))
    return "bilinear" if name == "random" else name  # timm's name for a random choice in training
