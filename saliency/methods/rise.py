"""RISE: the expected score when a pixel is visible, estimated with random masks."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attribution.options import Option
from ..engine.estimates import Estimate, generator, precise_type
from ..engine.multi_pass import ImageAttribution, PassRunner, SampledAttribution, from_estimate
from ..validation import check_flag, check_integer, check_number
from .baselines import Filler, FillOption


class RISE(SampledAttribution):
    """The effect of each pixel's visibility on the score, estimated with random masks.

    A mask M is a grid of cells, each shown with probability p, enlarged bilinearly and shifted by less than a cell. The
    paper's map is the mean of f(x M) M / p: the expected score when the pixel is visible. A large part of it is
    constant, the score of half an image, and with few masks the map shows how often a pixel happened to be visible. So
    by default the map is debiased: the covariance of score and mask at each pixel, divided by the variance of the mask.
    This is the slope of the score from hidden to visible. It is 0 if the score does not depend on the pixel, and can be
    negative. For masks of 0 and 1 the variance is p (1 - p). The map then equals the map of Hatakeyama et al., the
    difference of the mean scores with the pixel visible and hidden. The variance of enlarged masks is smaller, and
    smallest in the middle of the image. `debiased=False` gives the paper's map.

    The paper uses probabilities: `attribute(image, saliency.probability("espresso"))`. With them the
    paper's map is positive, but they saturate. A plain class target explains the logit, which does not saturate and may
    be negative.

    Args:
        grid: The number of cells of a mask along each edge.
        visible: The probability p with which a cell is visible.
        debiased: See above.
        fill: The value of hidden pixels: a number, or one per channel, in the model's normalised space (0 is the mean
            colour of its training images), "mean" (of the image), "blur", or an image (C, H, W) as the model takes it.

    Values: (N, 1, H, W), in score units; signed if debiased. The standard errors are computed for a mean over
    independent masks. If debiased, they take the mean score as known, which is correct to first order in 1 / N.

    Raises:
        MethodError: An option is invalid, or does not fit the image.

    Source: Petsiuk et al., "RISE" (2018), https://arxiv.org/abs/1806.07421; debiased as in Hatakeyama et al.,
        "Visualizing Color-wise Saliency of Black-Box Image Classification Models" (2020),
        https://arxiv.org/abs/2010.02468.
    """

    name = "rise"
    cost = "4000 forwards"
    sign = "positive"
    samples = 4000
    preview_options: ClassVar = {"passes": 12, "grid": 3}

    grid: Option[int] = Option(7, check_integer)
    visible: Option[float] = Option(0.5, check_number, above=0, below=1)
    debiased: Option[bool] = Option(True, check_flag)
    fill: FillOption = FillOption(partial="rise")

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """Compute the weighted sum of the masks."""
        x, masks = passes.x, RandomMasks(passes.x, self.grid, self.visible, self.seed)
        background = Filler(x, self.fill).background
        chunk: dict[int, Tensor] = {}  # the masks of the current chunk

        def make(start: int, stop: int) -> Tensor:
            chunk.clear()
            chunk[start] = masks(start, stop)  # (k, 1, H, W)
            return x * chunk[start] if self.fill == 0 else torch.lerp(background, x, chunk[start])

        if self.debiased:  # subtracting the score of the whole image does not change the covariance
            estimate = MaskedScores(self.visible, masks.variance, float(score))
        else:
            estimate = MaskedScores(self.visible, torch.full_like(x[0, :1], self.visible), None)
        for done in passes.until_precise(estimate, passes.forwards(make, self.most_passes)):
            estimate.take(done.scores, chunk[done.start])
        return from_estimate(estimate, x)


class RandomMasks:
    """Random masks for one image. The number of a mask determines its draws.

    Args:
        x: (1, C, H, W) the image.
        grid: The number of cells of a mask along each edge.
        visible: The probability with which a cell is visible.
        seed: The seed of all draws.

    Attributes:
        variance: (1, H, W) the variance of a mask at each pixel.
    """

    def __init__(self, x: Tensor, grid: int, visible: float, seed: int) -> None:
        self._size = (int(x.shape[2]), int(x.shape[3]))
        self._grid, self._visible, self._seed = grid, visible, seed
        self._cell = [math.ceil(edge / grid) for edge in self._size]
        # Enlarging is linear along each edge: one matrix (enlarged, grid) for each.
        unit = torch.eye(grid, dtype=torch.float64, device="cpu")[None]
        enlarging = [F.interpolate(unit, size=(grid + 1) * cell, mode="linear")[0].T for cell in self._cell]
        self._down, self._across = (matrix.to(x) for matrix in enlarging)
        down, across = (
            matrix.square().sum(1).unfold(0, edge, 1)[:cell].mean(0)
            for matrix, edge, cell in zip(enlarging, self._size, self._cell, strict=True)
        )
        self.variance = (visible * (1 - visible) * down[:, None] * across).to(x)[None]

    def __call__(self, start: int, stop: int) -> Tensor:
        """Return masks (k, 1, H, W) from `start` to `stop`, 0 (hidden) to 1 (shown); all pixels have equal means."""
        height, width = self._size
        cells, down, across = [], [], []
        for number in range(start, stop):
            source = generator(self._seed, number)
            draws = torch.rand(self._grid**2 + 2, generator=source, dtype=torch.float32, device="cpu")
            top, left = (int(draw * cell) for draw, cell in zip(draws[-2:], self._cell, strict=True))
            cells.append(draws[:-2] < self._visible)
            down.append(self._down[top : top + height])
            across.append(self._across[left : left + width])
        visible = torch.stack(cells).view(-1, self._grid, self._grid).to(self._down)
        return (torch.stack(down) @ visible @ torch.stack(across).mT)[:, None]


class MaskedScores(Estimate):
    """Sum of masks weighted by their scores, in constant memory.

    Args:
        visible: The mean of a mask.
        scale: (1, H, W) the divisor of the sum.
        level: A constant close to the scores that is subtracted from them, for the debiased map; None for the paper's.
    """

    def __init__(self, visible: float, scale: Tensor, level: float | None) -> None:
        super().__init__()
        self._debiased, self._level = level is not None, level or 0.0
        self._centre = visible if self._debiased else 0.0
        self._scale = scale.to(precise_type(scale))
        self._scores = [0.0, 0.0]  # the sum of all masks, and of the even ones
        # With d a mask minus its mean, and s a score: sums of s d, d; of these over even masks; of s s d d, s d d, d d.
        self._sums = torch.zeros(7, *scale.shape, dtype=precise_type(scale), device=scale.device)

    def take(self, scores: Tensor, masks: Tensor) -> None:
        """Add the scores (k,) of masks (k, 1, H, W)."""
        masks = masks.to(torch.promote_types(masks.dtype, torch.float32))  # sums in half precision are wrong
        scores = scores.to(masks) - self._level
        one, even = torch.ones_like(scores), torch.zeros_like(scores)
        even[self.count % 2 :: 2] = 1
        self.count += len(scores)
        self._scores[0] += float(scores.double().sum())
        self._scores[1] += float((scores * even).double().sum())
        off = (masks - self._centre if self._centre else masks).flatten(1)  # (k, H W)
        first = torch.stack([scores, one, scores * even, even]) @ off
        second = torch.stack([scores.square(), scores, one]) @ off.square()
        self._sums += torch.cat([first, second]).view_as(self._sums)

    def _map(self, scored: Tensor, bare: Tensor, total: float, count: int) -> Tensor:
        """Return the sum of s d, with the mean subtracted from the scores if debiased."""
        return scored - bare * (total / count) if self._debiased else scored

    @property
    def mean(self) -> Tensor:
        """The map (1, H, W)."""
        scored, bare, *_ = self._sums
        divisor = max(self.count - self._debiased, 1)
        return self._map(scored, bare, self._scores[0], self.count) / (self._scale * divisor)

    @property
    def variance(self) -> Tensor:
        """The variance (1, H, W) of the terms of the sum."""
        scored, bare, _, _, squares, mixed, alone = self._sums
        mean = self._scores[0] / self.count if self._debiased else 0.0
        total = scored - mean * bare
        spread: Tensor = squares - 2 * mean * mixed + mean * mean * alone - total.square() / self.count
        return spread.clamp(min=0) / (self._scale.square() * max(self.count - 1, 1))

    def halves(self) -> tuple[Tensor, Tensor]:
        """Return the maps of the even and of the odd masks, up to a factor."""
        both, even = self._sums[:4].view(2, 2, *self._scale.shape)
        odd, evens, (total, of_even) = both - even, (self.count + 1) // 2, self._scores
        odd_map = self._map(odd[0], odd[1], total - of_even, self.count - evens)
        return self._map(even[0], even[1], of_even, evens), odd_map
