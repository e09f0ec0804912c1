"""ROAD: impute removed pixels from their neighbours, so that the mask adds no edges."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.linalg import vecdot
from torch.nn.functional import max_pool2d, pad

from ...attribution.estimates import generator
from ...attribution.options import Option
from ...io.axes import at_least_float32
from ...validation import check_number, check_numbers
from .base import Outcome
from .faithfulness import OrderDifference, OrderedMetric, PerturbedImage, digest

TOLERANCE = 1e-4
"""The norm of the residual of the linear equations, relative to the norm of their right side."""

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""The fractions of the pixels that are removed by default."""

NOISE = 0.002
"""The standard deviation of the noise by default: about 0.01 in the normalised input of a photo, as by the authors."""


class ROAD(OrderedMetric):
    """Mean score without the most relevant pixels, replaced by noisy linear imputation; lower is better.

    Each removed pixel becomes the weighted mean of its eight neighbours, 1/6 for neighbours at an edge and 1/12 at
    a corner. At the border of the image, the weights of the existing neighbours are scaled to a sum of 1. So the shape
    of the mask adds no edges that the model could see.

    Args:
        order: "morf" removes the most relevant pixels first, where lower is better; "lerf" the least relevant first,
            where higher is better.
        shares: The fractions of the pixels that are removed.
        noise: The standard deviation of the Gaussian noise on removed pixels, as a fraction of the range of the image's
            values.

    Values: (N,), in units of the score: the mean over the fractions. The noise is drawn once for each fraction,
    and is the same for all maps.

    Source: Rong et al., "A Consistent and Efficient Evaluation Strategy for Attribution Methods" (2022),
        https://arxiv.org/abs/2202.00449.
    """

    name = "road"

    shares: Option[tuple[float, ...]] = Option(SHARES, check_numbers, above=0, most=1)
    noise: Option[float] = Option(NOISE, check_number, least=0)

    def measure_image(self, image: PerturbedImage) -> Outcome:
        """Compute the mean scores of one image."""
        curves = []
        for row in image.ranks:
            ranks = image.pixels - 1 - row if self.order == "lerf" else row

            def make(start: int, stop: int, ranks: Tensor = ranks) -> Tensor:
                return removed(image.x, ranks, self.shares[start:stop], self.noise, image.seed, start)

            key = "imputed", digest(ranks), self.shares, self.noise
            curves.append(image.scores(key, len(self.shares), make))
        scores, at = torch.stack(curves), torch.tensor(self.shares, dtype=torch.float64, device="cpu")
        return Outcome(scores.mean(1), curves=scores, at=at)


class CombinedROAD(OrderDifference):
    """Mean score without the least relevant pixels minus the score without the most relevant pixels; higher is better.

    Args:
        shares: As for `ROAD`.
        noise: As for `ROAD`.

    Values: (N,), in units of the score: the difference of `ROAD` in both orders. The curve is the difference of both.

    Source: Rong et al. (2022), as for `ROAD`; Gildenblat and contributors (2022),
        https://github.com/jacobgil/pytorch-grad-cam, who take half of the difference.
    """

    name = "combined_road"
    ordered = ROAD

    shares: Option[tuple[float, ...]] = Option(SHARES, check_numbers, above=0, most=1)
    noise: Option[float] = Option(NOISE, check_number, least=0)


def removed(x: Tensor, ranks: Tensor, shares: Sequence[float], noise: float, seed: int, first: int = 0) -> Tensor:
    """Return an image (1, C, H, W) without the first pixels of an order (H, W), for each fraction: (k, C, H, W).

    The noise depends on the number of each fraction, from `first` on.
    """
    limits = torch.tensor([round(share * ranks.numel()) for share in shares], dtype=torch.int64, device=x.device)
    missing = (ranks < limits[:, None, None])[:, None]
    sources = (generator(seed, first + number) for number in range(len(shares)))
    drawn = [torch.randn(x.shape, generator=source, dtype=torch.float32, device="cpu") for source in sources]
    return imputed(x, missing) + missing * noise * (x.max() - x.min()) * torch.cat(drawn).to(x)


def imputed(x: Tensor, missing: Tensor) -> Tensor:
    """Return an image (1, C, H, W) without some pixels (k, 1, H, W): each is the weighted mean of its neighbours.

    The linear equations of all masks are solved at once, by conjugate gradients with a multigrid preconditioner. If all
    pixels are missing, the result is 0.

    Source: Tatebe, "The Multigrid Preconditioned Conjugate Gradient Method" (1993),
        https://ntrs.nasa.gov/citations/19940017002.
    """
    grid = _PixelEquations(missing.to(at_least_float32(x)))
    present = torch.where(missing, 0, x).to(grid.missing)  # (k, C, H, W)
    residual = grid.missing * _neighbours(present)
    goal = TOLERANCE**2 * _products(residual, residual)
    solution, step, old = torch.zeros_like(residual), torch.zeros_like(residual), torch.ones_like(goal)
    # A solved system does not change, so that its result does not depend on the other systems.
    while bool((active := _products(residual, residual) > goal).any()):
        descent = grid.descent(residual)
        new = _products(residual, descent)
        step.mul_(torch.where(active, new / old, 0)).add_(descent)
        image = grid.applied(step)
        length = torch.where(active, new / _products(step, image), 0)
        solution.addcmul_(length, step)
        residual.addcmul_(length, image, value=-1)
        old = new
    return (present + solution).to(x)


def _products(first: Tensor, second: Tensor) -> Tensor:
    """Return the scalar products (k, C, 1, 1) of images (k, C, H, W)."""
    products: Tensor = vecdot(first.flatten(2), second.flatten(2))
    return products[..., None, None]


def _neighbours(images: Tensor) -> Tensor:
    """Return the sum of the neighbours of each pixel of images (k, C, H, W), with 2 for edges and 1 for corners.

    Along each axis, the weights are 1, 2 and 1. On a CPU, these sums take half the time of a depthwise convolution.
    """
    total = images
    for axis in (2, 3):
        inner, total = total.shape[axis] - 1, 2 * (source := total)
        total.narrow(axis, 1, inner).add_(source.narrow(axis, 0, inner))
        total.narrow(axis, 0, inner).add_(source.narrow(axis, 1, inner))
    return total.sub_(images, alpha=4)


class _PixelEquations:
    """The equations of the missing pixels (k, 1, H, W), 1 or 0, and the equations at half the resolution.

    At half the resolution, a pixel is missing if all of its pixels are.
    """

    def __init__(self, missing: Tensor) -> None:
        self.missing = missing
        self.total = _neighbours(torch.ones_like(missing[:1]))
        self.inverse = missing / self.total
        self.coarse: _PixelEquations | None = None
        if min(missing.shape[2:]) > 3 and bool(missing.any()):
            self.coarse = _PixelEquations(1 - max_pool2d(1 - missing, 2, ceil_mode=True))

    def applied(self, values: Tensor) -> Tensor:
        """Return the left side of the equations."""
        return (self.total * values).sub_(_neighbours(values).mul_(self.missing))

    def descent(self, residual: Tensor) -> Tensor:
        """Return an approximate solution, by one multigrid cycle."""
        values = self.inverse * residual
        if self.coarse is None:
            return values
        rest = _neighbours(values).mul_(self.missing)
        correction = self.coarse.descent(_halved(rest).mul_(self.coarse.missing))
        values.addcmul_(self.missing, _doubled(correction, residual))
        return _neighbours(values).add_(residual).mul_(self.inverse)


def _halved(images: Tensor) -> Tensor:
    """Return the sums of blocks of 2 x 2 pixels; blocks at the right and bottom edge may be smaller."""
    height, width = images.shape[2:]
    even = pad(images, (0, width % 2, 0, height % 2)) if height % 2 or width % 2 else images
    rows = even[..., ::2, :] + even[..., 1::2, :]
    return rows[..., ::2] + rows[..., 1::2]


def _doubled(images: Tensor, like: Tensor) -> Tensor:
    """Return images of the size of others in which each pixel fills a block of 2 x 2 pixels."""
    blocks = images[..., None, :, None].expand(*images.shape[:3], 2, images.shape[3], 2)
    return blocks.flatten(4).flatten(2, 3)[..., : like.shape[2], : like.shape[3]]
