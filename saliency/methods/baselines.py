"""What an image is compared with: colours, its own blur, noise, other images, or several of these."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..engine.multi_pass import generator
from ..errors import MethodError, did_you_mean
from ..io.image_io import ImageLike
from ..io.inputs import Prepare, read
from ..validation import real_number

COLOURS = ("mean", "black", "white")
KINDS = (*COLOURS, "blur", "noise")

BLUR = 0.1
"""The standard deviation of the "blur" baseline, over the length of the image's shorter edge."""


@dataclass(frozen=True, slots=True, eq=False)
class GivenBaseline:
    """Baselines that came as a picture or a tensor, as the model takes them."""

    name: str
    values: Tensor  # (K, C, H, W)


ResolvedBaseline = str | float | GivenBaseline
BaselineLike = ImageLike | float | Sequence[ImageLike | float]
"""One of `KINDS`, a number, a float tensor (C, H, W) or (K, C, H, W), a picture or its path; or several of them."""


def resolve_baseline(option: str, like: object, preprocess: Prepare) -> ResolvedBaseline | list[ResolvedBaseline]:
    """A checked baseline, or several, that a method can keep: pictures are read here, once.

    Args:
        option: What the method calls it.
        like: See `BaselineLike`. A number is in units of the normalised input.
        preprocess: How pictures become the model's input, and what "black" and "white" are there.

    Raises:
        MethodError: It is none of these, or black or white of a model without preprocessing.
        ImageError: A picture cannot be read.
    """
    if isinstance(like, list | tuple):
        if not like:
            raise MethodError(f"{option} is an empty list; expected at least one baseline")
        return [_settled(option, each, preprocess) for each in like]
    return _settled(option, like, preprocess)


def _settled(option: str, like: object, preprocess: Prepare) -> ResolvedBaseline:
    if isinstance(like, GivenBaseline):
        return like
    if isinstance(like, Real):
        return real_number(option, like)
    if isinstance(like, str) and like in KINDS:
        if like in ("black", "white") and preprocess is None:
            raise MethodError(
                f'{option}="{like}": this model carries no preprocessing, so what {like} is in its input is not '
                f'known; pass preprocess=..., a number in units of the input, or {option}="mean", which is 0'
            )
        return like
    if isinstance(like, str) and not os.path.exists(like):  # noqa: PTH110 - a string that may be no path
        raise MethodError(
            f"{option}={like!r} is neither a file nor one of {', '.join(KINDS)}{did_you_mean(like, KINDS)}"
        )
    if not isinstance(like, str | os.PathLike | Image.Image | np.ndarray | Tensor):
        raise MethodError(
            f"{option} is a {type(like).__name__}; expected one of {', '.join(KINDS)}, a number, a tensor, a picture, "
            "a path, or a list of these"
        )
    values = read(like, preprocess).tensor
    shape = "x".join(map(str, values.shape))
    name = os.fsdecode(like) if isinstance(like, str | os.PathLike) else f"{type(like).__name__} {shape}"
    return GivenBaseline(name, values.clone())


def baselines(kept: ResolvedBaseline | list[ResolvedBaseline], x: Tensor, preprocess: Prepare, seed: int = 0) -> Tensor:
    """The baselines (K, C, H, W) of one image (1, C, H, W).

    Args:
        kept: What `resolve_baseline` gave.
        x: The image.
        preprocess: What `resolve_baseline` had.
        seed: What "noise" is drawn from; the same for all images.

    Raises:
        MethodError: A given tensor or picture has another size than the image.
    """
    several = kept if isinstance(kept, list) else [kept]
    return torch.cat([_one(each, x, preprocess, seed, place) for place, each in enumerate(several)])


def _one(kept: ResolvedBaseline, x: Tensor, preprocess: Prepare, seed: int, place: int) -> Tensor:
    if isinstance(kept, float):
        return torch.full_like(x, kept)
    if isinstance(kept, GivenBaseline):
        if kept.values.shape[1:] != x.shape[1:]:
            came, wanted = ("x".join(map(str, each.shape[1:])) for each in (kept.values, x))
            raise MethodError(f"the baseline ({kept.name}) is {came}, and the image {wanted}; expected the same size")
        return kept.values.to(x)
    if kept == "mean":
        return torch.zeros_like(x)
    if kept == "blur":
        return blurred(x, BLUR * min(x.shape[-2:]))
    if kept == "noise":
        return torch.randn(x.shape, generator=generator(seed, place), dtype=torch.float64, device="cpu").to(x)
    return colour(kept, x, preprocess).expand_as(x).clone()


def colour(name: str, x: Tensor, preprocess: Prepare) -> Tensor:
    """A colour (1, C, 1, 1) in the model's input, found by sending a picture of it through the preprocessing."""
    if preprocess is None:
        raise MethodError(f"what {name} is cannot be known without preprocessing; pass preprocess=...")
    height, width = x.shape[-2:]
    prepared = preprocess(Image.new("RGB", (width, height), name))  # (C, H, W)
    middle = prepared[:, prepared.shape[1] // 2, prepared.shape[2] // 2]
    return middle.to(x).view(1, -1, 1, 1)


def blurred(x: Tensor, sigma: float) -> Tensor:
    """An image (..., H, W) under a Gaussian of standard deviation `sigma` pixels; see `Diffusion`."""
    return Diffusion(x)(torch.tensor([sigma], dtype=torch.float64, device="cpu"))[0]


class Diffusion:
    """An image under Gaussians of any width: heat that spreads on a plate whose edges let none out.

    The image is reflected at its edges, so that none of its brightness is lost and no dark rim appears. In the basis of
    cosines a Gaussian only scales each coefficient, which makes it as cheap for wide as for narrow ones, and gives the
    exact derivative by the width.

    Args:
        x: (..., H, W) the image.

    Source: Strang, "The Discrete Cosine Transform" (1999), https://doi.org/10.1137/S0036144598336745.
    """

    def __init__(self, x: Tensor) -> None:
        self._like = x
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        self._rows, self._columns = (_cosines(size, wide) for size in x.shape[-2:])
        self._coefficients = self._rows @ wide @ self._columns.mT
        frequencies = [torch.pi / n * torch.arange(n, dtype=torch.float64, device="cpu") for n in x.shape[-2:]]
        self._decay = (frequencies[0][:, None].square() + frequencies[1].square()) / 2  # (H, W)

    def __call__(self, sigmas: Tensor) -> Tensor:
        """The image under each Gaussian: (k, ..., H, W), for standard deviations (k,) in pixels."""
        return self._scaled(torch.exp(-self._decay * _column(sigmas).square()))

    def derivative(self, sigmas: Tensor) -> Tensor:
        """How fast each of these changes with its standard deviation: (k, ..., H, W), per pixel."""
        sigma = _column(sigmas)
        return self._scaled(-2 * sigma * self._decay * torch.exp(-self._decay * sigma.square()))

    def _scaled(self, factors: Tensor) -> Tensor:
        factors = factors.to(self._coefficients).view(-1, *[1] * (self._like.dim() - 2), *factors.shape[-2:])
        return (self._rows.mT @ (factors * self._coefficients) @ self._columns).to(self._like.dtype)


def _column(sigmas: Tensor) -> Tensor:
    return sigmas.detach().to("cpu", torch.float64).view(-1, 1, 1)


def _cosines(size: int, like: Tensor) -> Tensor:
    """The orthonormal matrix (size, size) that takes values to the coefficients of their cosines."""
    at = torch.arange(size, dtype=torch.float64, device="cpu")
    matrix = torch.cos(torch.pi / size * at[:, None] * (at + 0.5)) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix.to(like)
