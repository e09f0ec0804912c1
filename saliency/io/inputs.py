"""Read images of any kind, upright, and as one batch with the position of each on its original image."""

from __future__ import annotations

import importlib
import io
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any, Self, TypeGuard

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from torch import Tensor

from ..errors import ImageError, NonFiniteError, errors_as, warn
from ..validation import check_mask
from .atomic_write import ADDRESS, is_address, is_volume
from .dicom import SUFFIX, holds_frames, holds_series, read_dicom
from .geometry import Frame
from .preprocess import Prepare, Preprocess, PreprocessLike, as_preprocess, drawable, is_deep, locate, warn_if_dark
from .volumes import preprocess_volume, read_volume

Bytes = bytes | bytearray | memoryview
ImageLike = str | os.PathLike[str] | Bytes | IO[bytes] | Image.Image | np.ndarray[Any, Any] | Tensor
ImagesLike = ImageLike | Sequence[ImageLike] | Mapping[str, Any]
"""One or several images, or a BatchFeature of Hugging Face."""
Later = Callable[..., None]  # of a check, and of tensors () whose numbers it checks, later or at once

MAX_PIXELS = 178_956_970  # half a gigabyte of decoded pixels

_FORMATS = ("AVIF", "BMP", "DIB", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
for _plugin in ("Avif", "Bmp", "Gif", "Jpeg", "Jpeg2K", "Png", "Ppm", "Tiff", "WebP"):
    importlib.import_module(f"PIL.{_plugin}ImagePlugin")  # registers the format in Image.OPEN

_UNSUPPORTED = re.compile(r"unknown pixel mode|cannot handle|unsupported|not identified|\d+$", re.IGNORECASE)
"""Errors of Pillow for healthy files of a kind that it does not read. A number is the compression of a TIFF file."""
_HEIC = re.compile(rb"....ftyp(heic|heix|heim|heis|hevc|hevx|(mif1|msf1)(?!.*avi[fs]))", re.DOTALL)
_XML = re.compile(rb"(\xef\xbb\xbf)?\s*<(svg|\?xml)")


def open_image(image: ImageLike, *, max_pixels: int = MAX_PIXELS, draft: int | None = None) -> Image.Image:
    """Open an image as a new upright image: RGB, or one unchanged channel of 16 or 32 bits (mode I;16, I or F).

    The EXIF orientation is applied, and transparency of 8 bits is composited over white. Animations give their first
    frame, with a warning. A colour profile is kept for `drawable`. The format of a file is detected from its content,
    not from its name: AVIF, BMP, GIF, JPEG, JPEG 2000, PNG, PPM, TIFF or WebP.

    Args:
        image: A path, the bytes of a file, a file open in binary mode, a PIL image, a uint8 or uint16 array (H, W, 3),
            (H, W, 4), (H, W, 1) or (H, W), an array (H, W, 1) or (H, W) of int16, int32, float32 or float64, or a uint8
            tensor (C, H, W). A file is read from its start if it is seekable, and keeps its position; it is not closed.
        max_pixels: A larger image is refused before it is decoded.
        draft: A path to a JPEG is decoded in a half, a quarter or an eighth of its size, but not smaller than this.

    Raises:
        ImageError: `image` is none of these, or the file is missing, damaged, too large or not an image.

    Warns:
        SaliencyWarning: The file is an animation, or the colours of a uint16 array use less than an eighth of 0..65535.
    """
    if isinstance(image, str | os.PathLike):
        return _open_path(image, max_pixels, draft)
    if isinstance(image, Bytes):
        return decode(io.BytesIO(image), "the bytes", max_pixels)
    if isinstance(image, Image.Image):
        return _decode_checked(image, "the PIL image", max_pixels)
    if isinstance(image, np.ndarray):
        return _decode_checked(_array_to_image(image), "the array", max_pixels)
    if isinstance(image, Tensor):
        return _decode_checked(_array_to_image(_tensor_to_array(image)), "the tensor", max_pixels)
    if hasattr(image, "read"):
        return _open_file(image, max_pixels)
    kinds = "a path, an open file, bytes, a PIL image, a uint8 array (H, W, 3), a tensor, or a list of these"
    raise ImageError(f"{type(image).__name__} is not an image; expected {kinds}")


def read_mask(image: ImageLike) -> np.ndarray[Any, Any]:
    """Return where a mask is not black (H, W), or where it is not transparent if it has transparent pixels.

    Raises:
        ImageError: The image holds labels: several values of a deep channel, several colours, or greys that are mostly
            dark (median below 128), also with 255 for ignored pixels. Other greys are a mask with soft edges.
    """
    opened = open_image(image)
    mask: np.ndarray[Any, Any] = np.array(opened)
    if mask.ndim == 3:
        alpha = np.broadcast_to(np.asarray(opened.info.get("alpha", 255)), mask.shape[:2])
        inside = mask.any(-1) if alpha.all() else alpha > 0
        marked = mask[inside & (alpha == 255)]  # (pixels, 3)
        if (marked != marked[:1]).any() and ((marked != marked[:, :1]).any() or np.median(marked) < 128):
            expected = "expected black and one other: save labels == 3 of one object, or mask > 127 of a soft mask"
            count = len(np.unique(marked, axis=0))
            raise ImageError(f"the mask has {count} colours besides black, as labels have; {expected}")
        return np.asarray(inside)
    check_mask(torch.as_tensor(mask, device="cpu"), ImageError)
    return np.asarray(mask != 0)


def _open_path(path: str | os.PathLike[str], max_pixels: int, draft: int | None) -> Image.Image:
    name = os.fsdecode(path)
    with errors_as(ImageError, f"{name!r} cannot be read"):
        # Check before opening, since a FIFO would block and a device may have side effects.
        path = Path(name)
        if is_address(name):
            raise ImageError(f"{name!r} {ADDRESS}")
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
            raise ImageError(f"{name!r} is {kind}; expected an image file")
        with path.open("rb") as file:
            return decode(file, name, max_pixels, draft)


def _open_file(file: IO[bytes], max_pixels: int) -> Image.Image:
    name = str(getattr(file, "name", type(file).__name__))
    with errors_as(ImageError, f"{name!r} cannot be read, expected a file open in binary mode"):
        position = file.tell() if file.seekable() else None
        if position is not None:
            file.seek(0)
        content = io.BytesIO(file.read())
        if position is not None:
            file.seek(position)
    return decode(content, name, max_pixels)


def decode(file: IO[bytes], name: str, max_pixels: int = MAX_PIXELS, draft: int | None = None) -> Image.Image:
    """Decode an open file as `open_image` does.

    Pillow's readers are called directly, so that the size is checked before anything is decoded. `Image.open` only
    warns above a global limit, and warnings cannot be configured for a single thread.

    Raises:
        ImageError: The file is empty, damaged, too large or not an image.
    """
    head = file.read(132)
    if head[128:] == b"DICM":
        file.seek(0)
        return read_dicom(file, name, max_pixels)
    head = head[:32]
    readers = [Image.OPEN[name] for name in _FORMATS if name in Image.OPEN]
    accepting = [reader for reader, accepts in readers if accepts is None or accepts(head.ljust(32, b"\0")) is True]
    if not accepting or _HEIC.match(head):  # the reader of AVIF accepts mif1
        problem = "is not an AVIF, BMP, GIF, JPEG, JPEG 2000, PNG, PPM, TIFF or WebP image" if head else "is empty"
        hint = " but HEIC, the photo format of many phones; save it as JPEG or PNG" if _HEIC.match(head) else ""
        hint = " but XML, as SVG drawings are; save it as PNG" if _XML.match(head) else hint
        raise ImageError(f"{name!r} {problem}{hint}")
    file.seek(0)
    with _decoding(repr(name)):
        image = accepting[0](file, name)
        # TIFF has pages, and MPO views of one photo.
        is_animation = image.format in ("AVIF", "GIF", "PNG", "WEBP") and getattr(image, "is_animated", False)
    decoded = _decode_checked(image, repr(name), max_pixels, draft)
    if is_animation:
        warn("of an animation, the first frame is explained")
    return decoded


def encode(image: Image.Image, format: str, **options: int) -> bytes:
    """Return an image as a file in a format of Pillow."""
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


@contextmanager
def _decoding(name: str) -> Iterator[None]:
    """Raise ImageError for any error of Pillow: the file is of a kind that it does not read, or is damaged."""
    with errors_as(ImageError, f"{name} is damaged"):
        try:
            yield
        except (SyntaxError, OSError) as error:
            if _UNSUPPORTED.match(str(error)):
                raise ImageError(f"{name} is of a kind that Pillow cannot read ({error}); convert it to PNG") from error
            raise


def _decode_checked(image: Image.Image, name: str, max_pixels: int, draft: int | None = None) -> Image.Image:
    """Check the size, then decode and convert."""
    width, height = image.size
    if width < 1 or height < 1:
        raise ImageError(f"{name} has no pixels: it is {width} x {height}")
    if width * height > max_pixels:
        raise ImageError(f"{name} has {width} x {height} pixels, more than the limit of {max_pixels}; resize it first")
    with _decoding(name):
        if draft is not None:
            image.draft(None, (draft, draft))
        return _without_metadata(_apply_orientation(image))


# Orientation and colour


def _apply_orientation(image: Image.Image) -> Image.Image:
    image.load()
    with suppress(Exception):  # pixels can be intact although the metadata is damaged
        if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
            return ImageOps.exif_transpose(image)
    return image


def _without_metadata(image: Image.Image) -> Image.Image:
    """Return a new image, in RGB unless it is deep, without metadata, so that its orientation is not applied twice.

    The colour profile is kept for `drawable`, a CMYK image, whose profile does not apply to RGB, and transparency for
    `read_mask`.
    """
    metadata: Any = {
        name: image.info[name] for name in ("icc_profile", "cmyk", "range", "inverted") if name in image.info
    }
    metadata |= {"cmyk": image} if image.mode == "CMYK" and metadata else {}
    is_transparent = image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info
    if is_transparent and not is_deep(image):
        image = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        metadata["alpha"] = image.getchannel("A")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.copy() if is_deep(image) else image.convert("RGB")  # a copy, even if it is RGB already
    image.info = metadata
    return image


# Arrays and tensors


_GREY_TYPES = (np.int16, np.int32, np.float32, np.float64)
_OR_INPUT = "Or pass the model's own normalised input as a float tensor, (C, H, W) or (N, C, D, H, W)"


def _array_to_image(array: np.ndarray[Any, Any]) -> Image.Image:
    array = array[..., 0] if array.shape[2:] == (1,) else array
    has_image_shape = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))
    if not has_image_shape or array.dtype not in (np.uint8, np.uint16, *(_GREY_TYPES if array.ndim == 2 else ())):
        expected = (
            "uint8 in 0..255 or uint16 in 0..65535, of shape (H, W), (H, W, 1), (H, W, 3) or (H, W, 4), or one channel "
            "of int16, int32 or floats with Preprocess(range=(low, high))"
        )
        hint = "array.transpose(1, 2, 0) moves the channels, list(array) is several images; scale and round other types"
        came = f"an array of shape {array.shape} and type {array.dtype}"
        raise ImageError(f"{came} is not an image; expected {expected}. {hint}. {_OR_INPUT}")
    if array.ndim == 3 and array.dtype == np.uint16:  # scale 0..65535 to 0..255, rounded
        least, most = array[..., :3].min(initial=65535), array[..., :3].max(initial=0)
        warn_if_dark(least, most, "scale its colours to 0..65535, such as 16 * array for 12 bits")
        array = ((array.astype(np.uint32) + 128) // 257).astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(array))


def _tensor_to_array(image: Tensor) -> np.ndarray[Any, Any]:
    """Return a uint8 tensor (C, H, W) as an array (H, W, C)."""
    if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[0] not in (1, 3, 4):
        came = f"a {image.dtype} tensor of shape {tuple(image.shape)}"
        expected = (
            "uint8 in 0..255, of shape (1, H, W), (3, H, W) or (4, H, W); tensor.permute(2, 0, 1) moves the channels"
        )
        raise ImageError(f"{came} is not an image; expected {expected}. {_OR_INPUT}")
    array: np.ndarray[Any, Any] = image.detach().cpu().permute(1, 2, 0).numpy()
    return array


# Batches


Arguments = Callable[[Tensor, int], dict[str, Any]]
"""A function from variants (k, C, H, W) of one image, and the number of the image, to all arguments of the model."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Inputs of the model, with the position of each on its original image."""

    inputs: Tensor  # (N, C, H, W), or (N, C, D, H, W) for volumes and videos; normalised
    frames: tuple[Frame | None, ...]  # None for an image that was given as a float tensor
    arguments: Arguments | None = field(default=None, kw_only=True)

    def of(self, model: Any) -> Self:
        """Return the batch for a model."""
        return self


def at_once(check: Callable[..., None], *numbers: Tensor) -> None:
    """Check the numbers of tensors () or (n,), after one transfer from the device."""
    rows = [*map(torch.flatten, numbers)]
    check(*(torch.cat(rows).tolist() if rows else ()))


def read(
    images: ImagesLike, preprocess: PreprocessLike | None = None, *, like: Tensor | None = None, later: Later = at_once
) -> Batch:
    """Read images as one batch.

    Paths, files, bytes, PIL images, arrays and uint8 tensors go through `preprocess`. Floating-point tensors,
    (C, H, W), (N, C, H, W) or (N, C, D, H, W), are the model's own normalised input. They are used unchanged, and
    copied only if their device or dtype differs. Paths of volumes (.nii, .nii.gz, .dcm of a series or of several
    frames) become such a tensor; see `read_volume` and `preprocess_volume`.

    Args:
        images: One image, or a sequence of images.
        preprocess: The preprocessing, from a PIL image to a tensor; not used for float tensors.
        like: A tensor that sets the device and floating-point dtype of the batch; by default the first float tensor.
        later: The function that checks the range of float tensors.

    Raises:
        ImageError: An input is not an image, cannot be read, or differs from the other images in size.
        NonFiniteError: A float tensor holds NaN or infinity.

    Warns:
        SaliencyWarning: A float tensor lies in 0..255 or 0..1, unlike the output of the preprocessing.
    """
    images = split_images(images)
    prepare = None if preprocess is None else as_preprocess(preprocess)
    like = next(filter(_is_input, images), None) if like is None else like
    inputs: list[Tensor] = []  # (n, C, H, W)
    frames: list[Frame | None] = []
    for image in images:
        if isinstance(image, str | os.PathLike) and _is_volume(os.fsdecode(image), prepare):
            image = preprocess_volume(read_volume(image).values, prepare)[None]  # noqa: PLW2901
        if _is_input(image):
            x = _check_input(image, prepare, len(frames), later)
            frames += [None] * len(x)
        else:
            frame, x = _preprocess_image(image, prepare, name=f"image {len(frames)}: " if len(images) > 1 else "")
            frames.append(frame)
        if like is not None:
            x = x.to(like.device, like.dtype if like.is_floating_point() else x.dtype)
        inputs.append(x)
    if len(inputs) == 1:
        return Batch(inputs[0], tuple(frames))
    _require_one_size(inputs)
    return Batch(torch.cat(inputs), tuple(frames))


def split_images(images: ImagesLike) -> list[ImageLike]:
    """Split into single images and inputs: a uint8 tensor (N, C, H, W) is N images, a float tensor is one input.

    Raises:
        ImageError: There is no image, or a list in the list.
    """
    if isinstance(images, Mapping):
        return [_pixel_values(images)]
    if isinstance(images, Sequence) and not isinstance(images, str | Bytes):
        if any(isinstance(image, list | tuple) for image in images):
            raise ImageError("a list inside the list of images; expected one flat list")
        flat = [image for entry in images for image in split_images(entry)]
    elif isinstance(images, Tensor) and images.ndim == 4 and not images.is_floating_point():
        flat = list(images)
    else:
        flat = [images]
    if not flat:
        raise ImageError("there is no image: the list or batch is empty")
    return flat


def _pixel_values(features: Mapping[str, Any]) -> Tensor:
    """Return the model's input of a BatchFeature, which processors of Hugging Face return."""
    if "pixel_values" not in features:
        raise ImageError(
            f"a {type(features).__name__} is not an image; `attribute` explains several inputs by their names, and "
            "this call takes one image, of a model that holds its other inputs"
        )
    others = [name for name in features if name != "pixel_values"]
    if others:
        hint = "pass pixel_values as the image, and the rest that the model needs as forward_args={name: value}"
        raise ImageError(f"a {type(features).__name__} that also has {', '.join(others)}; {hint}")
    values = features["pixel_values"]
    return values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values), device="cpu")


def _is_volume(path: str, prepare: Prepare) -> bool:
    """Return whether a path is of a volume, or of a slice of one, unless the preprocessing is of images."""
    is_dicom = path.lower().endswith(SUFFIX) and not isinstance(prepare, Preprocess)
    return is_volume(path) or (is_dicom and (holds_frames(path) or holds_series(os.path.dirname(path) or ".")))  # noqa: PTH120


def _is_input(image: ImageLike) -> TypeGuard[Tensor]:
    """Return whether an image is the model's own input."""
    return isinstance(image, Tensor) and image.is_floating_point()


def _preprocess_image(image: ImageLike, prepare: Prepare, name: str) -> tuple[Frame, Tensor]:
    """Return the frame of one image, and its input (1, 3, H, W)."""
    stem = Path(os.fsdecode(image)).stem if isinstance(image, str | os.PathLike) else ""
    try:
        image = open_image(image)
        if prepare is None:
            described = "saliency.Preprocess(size=..., resize=..., mean=..., std=...)"
            examples = f"weights.transforms() of torchvision, an image processor of Hugging Face, or {described}"
            wanted = f"pass a float tensor, or the preprocessing of its training as preprocess=: {examples}"
            raise ImageError(f"this model has no preprocessing; {wanted}")
        box, x = locate(prepare, image), prepare(image)
        return Frame(drawable(image, prepare.range), box, stem, prepare.range), x[None]
    except ImageError as error:
        raise ImageError(f"{name}{error}") from error


def _check_input(image: Tensor, prepare: Prepare, first: int, later: Later) -> Tensor:
    """Return the user's float tensor as a plain detached tensor (N, C, H, W) or (N, C, D, H, W)."""
    label = f"a {image.dtype} tensor of shape {tuple(image.shape)}"
    if image.ndim not in (3, 4, 5):
        raise ImageError(f"{label}; expected (C, H, W), (N, C, H, W) or, for volumes and videos, (N, C, D, H, W)")
    if image.numel() == 0:
        raise ImageError(f"{label} is empty; expected at least one image of at least one pixel")
    is_plain = type(image).__torch_dispatch__ is Tensor.__torch_dispatch__
    if not is_plain or image.layout != torch.strided or image.is_meta or image.itemsize == 1:
        kind = f"{type(image).__name__} ({image.layout}, on {image.device})"
        raise ImageError(f"{label} is a {kind}; expected a plain torch.Tensor with values")
    # Some data loaders create subclasses of Tensor, which would add views to the graph in every operation.
    x = image.detach().as_subclass(Tensor)
    x = x[None] if x.ndim == 3 else x

    is_image = x.ndim == 4 and x.shape[1] in (1, 3, 4)
    check = partial(_check_ranges, first, prepare, is_image)
    later(check, *chain.from_iterable(map(torch.aminmax, map(axes_in_memory_order, x))))
    return x


def _check_ranges(first: int, prepare: Prepare, is_image: bool, *extremes: float) -> None:
    """Raise NonFiniteError for NaN in images, and warn of the first image that seems not to be normalised.

    Args:
        first: The number of the first image.
        prepare: The preprocessing.
        is_image: Whether the tensors have the channels of an image.
        extremes: The minimum and maximum of each tensor, in which NaN and infinity show.
    """
    ranges = list(enumerate(zip(extremes[::2], extremes[1::2], strict=True), start=first))
    for index, (low, high) in ranges:
        if not (math.isfinite(low) and math.isfinite(high)):
            hint = "replace them, as x.nan_to_num() does, for a file in its preprocessing"
            raise NonFiniteError(f"image {index} holds NaN or infinity; {hint}")
    for index, (low, high) in ranges if is_image else ():
        white = 0  # the value of white in such an image
        if low >= 0 and 20 < high <= 255 and (prepare is None or high > 1.001 * prepare.input_range[1]):
            white = 255
        elif 0 <= low < high <= 1 and prepare is not None and prepare.input_range[0] < 0:
            white = 1
        if not white:
            continue
        std = "(1 / 255,) * 3" if white == 255 else "(1, 1, 1)"
        gives = "" if prepare is None else ", but preprocessing gives {:.3g}..{:.3g}".format(*prepare.input_range)
        warn(
            f"image {index} is a float tensor in {low:.3g}..{high:.3g}{gives}: it looks like 0..{white} without "
            "normalisation, and is used as the model's own input. Pass a uint8 image, or normalise the tensor. "
            f"If the model takes 0..{white}, declare it: preprocess=saliency.Preprocess(mean=(0, 0, 0), std={std})"
        )
        return


def axes_in_memory_order(tensor: Tensor) -> Tensor:
    """Return a tensor with its axes in memory order, so that a reduction does not copy a channels_last tensor."""
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))


def _require_one_size(inputs: list[Tensor]) -> None:
    sizes = [tuple(x.shape[1:]) for x in inputs for _ in x]
    index = next((index for index, size in enumerate(sizes) if size != sizes[0]), None)
    if index is not None:
        first, other = (" x ".join(map(str, size)) for size in (sizes[0], sizes[index]))
        hint = "explain them one by one, or crop or resize them to one size"
        raise ImageError(f"a batch needs images of one size: image 0 is {first} and image {index} is {other}; {hint}")
