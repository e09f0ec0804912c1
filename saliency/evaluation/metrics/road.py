"""ROAD: impute removed pixels from their neighbours, so that the mask adds no edges."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

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

    The linear equations are solved by conjugate gradients with a multigrid preconditioner. On a CPU, the masks follow
    one another, so that the values of one mask stay in the cache. If all pixels are missing, the result is 0.

    Source: Tatebe, "The Multigrid Preconditioned Conjugate Gradient Method" (1993),
        https://ntrs.nasa.gov/citations/19940017002.
    """
    values, groups = at_least_float32(x), missing.chunk(len(missing) if x.device.type == "cpu" else 1)
    equations = _PixelEquations(values.expand(len(groups[0]), -1, -1, -1))
    return torch.cat([_solved(equations, values, masks) for masks in groups]).to(x)


def _solved(equations: _PixelEquations, x: Tensor, missing: Tensor) -> Tensor:
    """Return the solution (k, C, H, W) of the equations of some masks (k, 1, H, W)."""
    known = pad((~missing).to(x), (0, 1, 0, 1))
    equations.hide(known)
    present = pad(x, (0, 1, 0, 1)) * known
    right = equations.residual(present)
    goal = TOLERANCE**2 * _products(right, right)
    solution = torch.where(goal > 0, equations.interpolated(present), present)  # among zeros, the solution is zero
    residual = equations.residual(solution).clone()
    step, old = torch.zeros_like(residual), torch.ones_like(goal)
    # A solved system does not change, so that its result does not depend on the other systems.
    while bool((active := _products(residual, residual) > goal).any()):
        descent = equations.descent(residual)
        new = _products(residual, descent)
        step.mul_(torch.where(active, new / old, 0)).add_(descent)
        change = equations.residual(step)
        length = torch.where(active, -new / _products(step, change), 0)
        solution.addcmul_(length, step)
        residual.addcmul_(length, change)
        old = new
    return solution[..., :-1, :-1]


def _products(first: Tensor, second: Tensor) -> Tensor:
    """Return the scalar products (k, C, 1, 1) of images (k, C, H, W)."""
    return (first * second).sum((2, 3), keepdim=True)


def _halved(images: Tensor) -> Tensor:
    """Return the sums of blocks of 2 x 2 pixels, (k, C, H + 1, W + 1) with a last row and column of zeros."""
    rows = images[..., :-1:2, :] + images[..., 1::2, :]
    return pad(rows[..., :-1:2] + rows[..., 1::2], (0, 1, 0, 1))


class _PixelEquations:
    """The equations of the missing pixels of images (k, C, H, W), and the equations at half the resolution.

    At half the resolution, a pixel is missing if all of its pixels are. All images have a last row and column of zeros,
    (k, C, H + 1, W + 1): so the sums over neighbours are sums of shifted memory, regardless of rows. The result of each
    operation is overwritten by the next one.
    """

    def __init__(self, images: Tensor) -> None:
        self.size, row = images.shape[2:], images.shape[3] + 1
        inside = pad(torch.ones_like(images), (0, 1, 0, 1))
        memory = inside.new_zeros(3, inside.numel() + 2 * row + 2)
        parts = memory[0], memory[1, :-1], memory[2, :-2], memory[1, : -2 - row], memory[2, : -2 - 2 * row]
        self._additions = [(source[: len(sum_)], source[-len(sum_) :], sum_) for source, sum_ in pairwise(parts)]
        self._values, self._sums = memory[0, row + 1 : -row - 1].view_as(inside), parts[-1].view_as(inside)
        self._values.copy_(inside)
        self._inside, self._total = inside[:1, :1], self._summed()[:1, :1].clone()
        self._coarse = _PixelEquations(images[..., ::2, ::2]) if max(self.size) > 3 else None

    def hide(self, counts: Tensor) -> None:
        """Set which pixels are missing, from the number of present pixels in each (k, 1, H + 1, W + 1)."""
        self._counts, self._missing = counts.clamp(min=1), (counts == 0) * self._inside
        self._weights, self._any_missing = self._missing / self._total, bool(self._missing.any())
        if self._coarse:
            self._coarse.hide(_halved(counts))

    def residual(self, images: Tensor) -> Tensor:
        """Return, for each missing pixel, the weighted sum of its neighbours minus the weighted pixel; 0 elsewhere."""
        self._values.copy_(images)
        return self._summed().addcmul_(self._total, images, value=-1).mul_(self._missing)

    def descent(self, residual: Tensor) -> Tensor:
        """Return an approximate solution, by one multigrid cycle.

        It smooths twice before and after the correction at half the resolution, with steps of 2 and 1. The error in
        each eigenvector shrinks by (1 - 2 a) (1 - a), where a is between 0 and 1.
        """
        right = self._weights * residual
        torch.mul(right, 2, out=self._values)
        self._smooth(right)
        if self._coarse and self._coarse._any_missing:
            self._add_doubled(self._coarse.descent(_halved(self._step(right).mul_(self._total))))
        self._smooth(right)
        return self._values.add_(self._step(right), alpha=2)

    def interpolated(self, sums: Tensor) -> Tensor:
        """Return images with missing pixels from half the resolution, from the sums of the present pixels."""
        self._values.zero_()
        if self._coarse and self._any_missing:
            self._add_doubled(self._coarse.interpolated(_halved(sums)))
        return self._smooth(sums / self._counts)

    def _summed(self) -> Tensor:
        """Return the sum of each value and its neighbours, with 4 for itself, 2 for edges and 1 for corners."""
        for first, second, out in self._additions:
            torch.add(first, second, out=out)
        return self._sums

    def _smooth(self, right: Tensor) -> Tensor:
        """Replace the values by a Jacobi step."""
        return torch.addcmul(right, self._weights, self._summed(), out=self._values)

    def _step(self, right: Tensor) -> Tensor:
        """Return the change by a Jacobi step."""
        return torch.addcmul(right, self._weights, self._summed(), out=self._sums).sub_(self._values)

    def _add_doubled(self, images: Tensor) -> None:
        """Add images of half the resolution to the values: each pixel to a block of 2 x 2 pixels."""
        height, width = self.size
        rows = images.new_empty(*images.shape[:2], images.shape[2] - 1, width)
        rows[..., ::2], rows[..., 1::2] = images[..., :-1, :-1], images[..., :-1, : width // 2]
        self._values[..., :height:2, :width].add_(rows)
        self._values[..., 1:height:2, :width].add_(rows[..., : height // 2, :])
