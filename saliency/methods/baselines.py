"""Baselines of path methods, and values of hidden pixels."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..attribution.estimates import normal
from ..attribution.options import ConvertedOption, is_per_input, of_input
from ..errors import MethodError, did_you_mean, optional_import
from ..io.axes import along_axes, at_least_float32, require_two_axes, spatial
from ..io.inputs import ImageLike, read
from ..io.preprocess import Prepare
from ..model.inputs import Key, by_input, requires_several
from ..validation import check_number, described, is_real

BASELINES = ("mean", "black", "white", "blur", "noise")
BASELINE_BLUR = 0.1
"""The standard deviation of the "blur" baseline, as a fraction of the image's shorter edge."""

BY_NAME = '{0} of several inputs is a mapping: {0}={{"rgb": ..., "depth": ...}}'

FILLS = ("mean", "blur", "inpaint")
FILL_BLUR = 1 / 20
"""The standard deviation of the "blur" fill, as a fraction of the image's shorter edge: 11 pixels at 224."""
INPAINT_RADIUS = 3


@dataclass(frozen=True, slots=True, eq=False)
class GivenImages:
    """Images or tensors of the user, as the model takes them."""

    name: str
    values: Tensor  # (K, C, H, W)

    def as_input(self, x: Tensor) -> Tensor:
        """Return the images in the type of an input (1, C, H, W). Raises MethodError if they have another size."""
        if self.values.shape[1:] != x.shape[1:]:
            got, expected = ("x".join(map(str, images.shape[1:])) for images in (self.values, x))
            raise MethodError(f"the {self.name} is {got}, and the model's input {expected}; expected the same size")
        return self.values.to(x)


ResolvedBaseline = str | float | GivenImages
BaselineLike = ImageLike | float | Sequence[ImageLike | float] | Mapping[Any, ImageLike | float]
"""One of `BASELINES`, a number, a float tensor (C, H, W) or (K, C, H, W), an image or its path; or several of them."""


def resolve_baseline(option: str, like: object, preprocess: Prepare) -> ResolvedBaseline | list[ResolvedBaseline]:
    """Return a checked baseline, or several. Images are read here, once.

    Args:
        option: The name of the option.
        like: See `BaselineLike`. A number is in units of the normalised input.
        preprocess: How images become the model's input. It also defines "black" and "white".

    Raises:
        MethodError: The value is invalid, or "black" or "white" for a model without preprocessing.
        ImageError: An image cannot be read.
    """
    if not isinstance(like, list | tuple):
        return _resolved(option, like, preprocess)
    if not like:
        raise MethodError(f"{option} is an empty list; expected at least one baseline")
    return [_resolved(option, item, preprocess) for item in like]


def _resolved(option: str, like: object, preprocess: Prepare) -> ResolvedBaseline:
    if isinstance(like, GivenImages):
        return like
    if isinstance(like, Real):
        return check_number(option, like)
    if isinstance(like, str) and like in BASELINES:
        if like in ("black", "white") and preprocess is None:
            raise MethodError(
                f'{option}="{like}": this model has no preprocessing, so the value of {like} in its input is '
                f'unknown; pass preprocess=..., a number in units of the input, or {option}="mean", which is 0'
            )
        return like
    is_missing = isinstance(like, str) and not os.path.exists(like)  # noqa: PTH110 - it may not be a path
    if is_missing or not isinstance(like, str | os.PathLike | Image.Image | np.ndarray | Tensor):
        raise MethodError(
            f"{option}={described(like)} is invalid; expected one of {', '.join(BASELINES)}, a number, a "
            f"tensor, an image, the path of one, or a list of these{did_you_mean(described(like), BASELINES)}"
        )
    if is_per_input(preprocess):
        raise MethodError(BY_NAME.format(option))
    values = read(like, preprocess).inputs
    shape = "x".join(map(str, values.shape))
    name = os.fsdecode(like) if isinstance(like, str | os.PathLike) else f"{type(like).__name__} {shape}"
    return GivenImages(name, values.clone())


class BaselineOption(ConvertedOption[BaselineLike, ResolvedBaseline | list[ResolvedBaseline]]):
    """Option for one or several baselines."""

    def convert(self, method: Any, value: Any) -> ResolvedBaseline | list[ResolvedBaseline]:
        """Return the checked baselines, or the default."""
        if isinstance(value, tuple) and requires_several(method.model):  # a tuple of baselines, as in captum
            raise MethodError(BY_NAME.format(self.name))
        is_default = isinstance(value, str) and value == self.default
        return self.default if is_default else resolve_baseline(self.name, value, method.preprocess)


def baselines(
    resolved: ResolvedBaseline | list[ResolvedBaseline], x: Tensor, preprocess: Prepare, seed: int = 0
) -> Tensor:
    """Return the baselines (K, C, H, W) of one image (1, C, H, W).

    Args:
        resolved: The result of `resolve_baseline`.
        x: The image.
        preprocess: As for `resolve_baseline`.
        seed: The seed of "noise", which is the same for all images.

    Raises:
        MethodError: A given tensor or image has a different size than the image.
    """
    if x.shape[1:3] == (1, 1):  # inputs that are explained together are rows of numbers
        return by_input(x, partial(_of_one_input, resolved, preprocess, seed))
    several = resolved if isinstance(resolved, list) else [resolved]
    return torch.cat([_baseline(baseline, x, preprocess, seed, number) for number, baseline in enumerate(several)])


def _of_one_input(resolved: Any, preprocess: Any, seed: int, name: Key | None, x: Tensor) -> Tensor:
    """Return the baselines of one of several inputs. Of a state, which is not an image, only numbers apply; else 0."""
    like = of_input(resolved, name, "mean")
    like = like if x.dim() > 3 or isinstance(like, float) else "mean"
    several = like if isinstance(like, list) else [like]
    return torch.cat([_baseline(one, x, of_input(preprocess, name), seed, at) for at, one in enumerate(several)])


def _baseline(resolved: ResolvedBaseline, x: Tensor, preprocess: Prepare, seed: int, number: int) -> Tensor:
    if isinstance(resolved, GivenImages):
        return resolved.as_input(x)
    if resolved == "blur":
        return blurred(x, BASELINE_BLUR * min(x.shape[2:]))
    if resolved == "noise":
        return normal(x.shape, seed, number).to(x)
    if resolved not in ("black", "white"):
        return torch.full_like(x, 0.0 if resolved == "mean" else float(resolved))
    if preprocess is None:
        raise MethodError(f'"{resolved}" is unknown for an input without preprocessing; pass a number in its units')
    height, width = x.shape[-2:]
    prepared = preprocess(Image.new("RGB", (width, height), resolved))  # (C, H, W)
    return prepared[:, height // 2, width // 2].to(x).view(1, -1, *[1] * (x.dim() - 2)).expand_as(x).clone()


FillLike = float | str | Sequence[float] | Tensor | GivenImages | Mapping[Any, Any]
"""The value of hidden pixels: a number, or one per channel, in the model's normalised space (0 is the mean colour of
its training images), "mean" (of the image), "blur", "inpaint" (from the surrounding pixels), an image (C, H, W) as the
model takes it, or a mapping by input."""

Fill = float | str | tuple[float, ...] | GivenImages


def resolve_fill(option: str, like: object, *, partial: str = "") -> Fill:
    """Return a checked fill.

    Args:
        option: The name of the option.
        like: See `FillLike`.
        partial: The name of a method that hides pixels partially, which "inpaint" does not support; empty for others.

    Raises:
        MethodError: The value is invalid.
    """
    if isinstance(like, GivenImages) or (isinstance(like, str) and like in FILLS):
        if like == "inpaint" and partial:
            problem = f'{partial} hides pixels partially, which {option}="inpaint" does not support'
            raise MethodError(f'{problem}; use "blur", "mean" or a number')
        return like
    if is_real(like):
        return float(like)
    if isinstance(like, list | tuple) and like and all(map(is_real, like)):
        return tuple(map(float, like))
    got = described(like)
    if isinstance(like, Tensor):
        image = like[0] if like.dim() in (4, 5) and len(like) == 1 else like
        if image.dim() == (4 if like.dim() == 5 else 3) and image.is_floating_point() and torch.isfinite(image).all():
            return GivenImages("image", image.detach().clone()[None])
        got = f"a {like.dtype} tensor of shape {tuple(like.shape)}"
    raise MethodError(
        f"{option}={got} is invalid; expected a finite number, one number per channel, one of {', '.join(FILLS)}, or a "
        f"finite float tensor (C, H, W) as the model takes it, or a mapping by input{did_you_mean(str(like), FILLS)}"
    )


class FillOption(ConvertedOption[FillLike, Fill]):
    """Option for the value of hidden pixels."""

    def __init__(self, default: FillLike = 0.0, *, partial: str = "") -> None:
        super().__init__(default, resolve_fill, partial=partial)


class Filler:
    """Variants of one image with some of its pixels hidden.

    Args:
        x: (1, C, H, W) the image.
        fill: The value of hidden pixels.

    Attributes:
        background: (1, C, H, W) the image with all pixels hidden; 0 for "inpaint", which needs visible pixels.

    Raises:
        MethodError: The channels or the size of the fill differ from the image.
    """

    def __init__(self, x: Tensor, fill: Fill) -> None:
        self.x = x
        self._inpaints = fill == "inpaint"
        if self._inpaints:
            require_two_axes(x, 'fill="inpaint"')
        self.background = by_input(x, lambda name, image: _background(image, of_input(fill, name, 0.0)))

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the images (k, C, H, W) in which the pixels of a boolean mask (k, 1, H, W) are replaced."""
        if not self._inpaints:
            return torch.where(hidden, self.background, self.x)
        return torch.stack([self._inpainted(mask[0]) for mask in hidden])

    def _inpainted(self, hidden: Tensor) -> Tensor:
        """Return the image (C, H, W) with the pixels `hidden` (H, W) inpainted from their surroundings.

        Source: Bertalmio et al., "Navier-Stokes, Fluid Dynamics, and Image and Video Inpainting" (2001),
            https://doi.org/10.1109/CVPR.2001.990497. OpenCV's implementation depends on a range of 0 to 255.
        """
        cv2 = optional_import("cv2", "all", 'fill="inpaint"')
        image = self.x[0]
        if bool(hidden.all()):
            return torch.zeros_like(image)
        low, high = (extreme.cpu().double()[:, None, None] for extreme in image.flatten(1).aminmax(dim=1))
        scale = (high - low).clamp(min=1e-30) / 255
        mask = hidden.cpu().numpy().astype(np.uint8)
        channels = ((image.cpu().double() - low) / scale).float().numpy()
        inpainted = np.stack([cv2.inpaint(channel, mask, INPAINT_RADIUS, cv2.INPAINT_NS) for channel in channels])
        result = torch.from_numpy(inpainted).double() * scale + low
        return torch.where(hidden.to(image.device), result.to(image), image)


def _background(x: Tensor, fill: Fill) -> Tensor:
    """Return the image (1, C, H, W) with all pixels hidden."""
    if fill == "mean":
        return x.mean(spatial(x), keepdim=True).expand_as(x)
    if fill == "blur":
        return blurred(x, FILL_BLUR * min(x.shape[2:]))
    if isinstance(fill, GivenImages):
        return fill.as_input(x)
    numbers = fill if isinstance(fill, tuple) else (0.0 if fill == "inpaint" else float(fill),)
    if len(numbers) not in (1, x.shape[1]):
        raise MethodError(f"the fill has {len(numbers)} numbers for {x.shape[1]} channels; expected one each")
    return torch.tensor(numbers, dtype=x.dtype, device=x.device).view(1, -1, *[1] * (x.dim() - 2)).expand_as(x)


def blurred(x: Tensor, sigma: float) -> Tensor:
    """Blur an image (1, C, ...) by a Gaussian with a standard deviation of `sigma` pixels; see `Diffusion`."""
    return Diffusion(x, x.dim() - 2)(torch.tensor([sigma], dtype=torch.float64, device="cpu"))[0]


class Diffusion:
    """An image under Gaussian blurs of any width, reflected at its edges.

    Reflection keeps the brightness, so no edge darkens. In the cosine basis, a Gaussian only scales each coefficient.
    So the time does not depend on the width, and the derivative with respect to the width is exact.

    Args:
        x: (..., H, W) or (..., D, H, W) the image.
        axes: The number of its spatial axes.

    Source: Strang, "The Discrete Cosine Transform" (1999), https://doi.org/10.1137/S0036144598336745.
    """

    def __init__(self, x: Tensor, axes: int = 2) -> None:
        self._like = x
        wide = at_least_float32(x)
        self._bases = [_cosine_basis(size).to(wide) for size in x.shape[-axes:]]
        self._coefficients = along_axes(wide, self._bases)
        self._decay = torch.zeros((), dtype=torch.float64, device="cpu")  # (H, W) or (D, H, W)
        for edge in x.shape[-axes:]:
            frequencies = torch.pi / edge * torch.arange(edge, dtype=torch.float64, device="cpu")
            self._decay = self._decay[..., None] + frequencies.square() / 2

    def __call__(self, sigmas: Tensor) -> Tensor:
        """Return the image under each Gaussian, (k, ..., H, W), for standard deviations (k,) in pixels."""
        sigmas = sigmas.view(-1, *[1] * len(self._bases))
        return self._scaled(torch.exp(-self._decay * sigmas.square()))

    def derivative(self, sigmas: Tensor) -> Tensor:
        """Return the derivative of each image by its standard deviation in pixels, (k, ..., H, W)."""
        sigmas = sigmas.view(-1, *[1] * len(self._bases))
        return self._scaled(-2 * sigmas * self._decay * torch.exp(-self._decay * sigmas.square()))

    def _scaled(self, factors: Tensor) -> Tensor:
        leading = self._like.dim() - len(self._bases)
        factors = factors.to(self._coefficients).view(-1, *[1] * leading, *factors.shape[1:])
        return along_axes(factors * self._coefficients, [basis.mT for basis in self._bases]).to(self._like.dtype)


def _cosine_basis(size: int) -> Tensor:
    """Return the orthonormal matrix (size, size) of the discrete cosine transform, float64."""
    positions = torch.arange(size, dtype=torch.float64, device="cpu")
    matrix = torch.cos(torch.pi / size * positions[:, None] * (positions + 0.5)) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix
