"""Many random masks, and how the score goes with each pixel being shown."""

from __future__ import annotations

import math
from typing import ClassVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...attribution.explanation import Sign
from ...attribution.options import SamplingOptions
from ...engine.estimates import Estimate, precise_type, rank_correlation
from ...engine.multi_pass import ImageAttribution, SampledAttribution, from_estimate, generator
from ...engine.runner import PassRunner
from ...errors import MethodError
from ...validation import check_choice, check_whole_number, real_number
from .fills import Filler, FillLike, as_fill

TOGETHER = 16
"""So many masks are added up at once."""


class RISE(SampledAttribution):
    """How the score goes with each pixel being shown, over pictures behind random masks.

    A mask M is a grid of cells, each shown with probability p, enlarged bilinearly and moved by less than a cell. The
    paper's map is the mean of f(x M) M / p: the mean score under the condition that the pixel is shown. A large part of
    that is the same everywhere, the score of half a picture, and where few masks were drawn the map is a picture of
    how often a pixel happened to be shown. So by default the map is debiased: at each pixel the covariance of score and
    mask over the variance of the mask, in other words the slope of the score as the pixel goes from hidden to shown.
    It is 0 where nothing depends on the pixel, and can be negative. For masks of 0 and 1 the variance is p (1 - p), and
    the map that of Hatakeyama et al., the mean score where the pixel is shown less that where it is not; that of
    enlarged masks is smaller, the least in the middle of the picture. `debiased=False` gives the paper's map.

    The paper takes probabilities: `attribute(image, saliency.probability("espresso"))`. They keep the paper's map
    positive, and saturate; a logit, which any plain class target means, does neither.

    Args:
        model: As for every method.
        grid: How many cells a mask has, along each edge.
        shown: The probability p with which a cell is shown.
        debiased: See above.
        fill: What stands where the mask hides: a number, or one per channel, in the model's normalised space (0, the
            mean colour of its training pictures, as in the paper), "mean" (the picture's own), "blur", or a picture
            (C, H, W) as the model takes it.
        **sampling: See `saliency.attribution.options.SamplingOptions`.

    Values: (N, 1, H, W), in score units; signed where debiased. The standard errors are those of a mean over
    independent masks; where debiased, they take the mean score as known, which is right to first order in 1 / N.

    Raises:
        MethodError: An option that makes no sense, or does not fit the image.
        TargetError: The target does not fit the model's output.

    Source: Petsiuk et al., "RISE" (2018), https://arxiv.org/abs/1806.07421; debiased as in Hatakeyama et al.,
        "Visualizing Color-wise Saliency of Black-Box Image Classification Models" (2020),
        https://arxiv.org/abs/2010.02468.
    """

    name = "rise"
    cost = "4000 forwards"
    sign: ClassVar[Sign] = "positive"
    samples = 4000
    quick_options: ClassVar = {"passes": 12, "grid": 3}

    def __init__(
        self,
        model: nn.Module,
        *,
        grid: int = 7,
        shown: float = 0.5,
        debiased: bool = True,
        fill: FillLike = 0.0,
        **sampling: Unpack[SamplingOptions],
    ) -> None:
        super().__init__(model, **sampling)
        self.grid, self.shown = check_whole_number("grid", grid), real_number("shown", shown, above=0, below=1)
        self.debiased = bool(check_choice("debiased", debiased, (True, False)))
        self.fill = as_fill(fill)
        if self.fill == "inpaint":
            raise MethodError(
                'fill="inpaint" does not go with masks that show a pixel in part; take a number, "mean" or "blur"'
            )

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """The weighted sum of the masks."""
        x, drawn = passes.x, Masks(passes.x, self.grid, self.shown, self.seed)
        still = Filler(x, self.fill).still
        plain = self.fill == 0 or still is None
        masks: dict[int, Tensor] = {}  # those of the chunk under way

        def make(start: int, stop: int) -> Tensor:
            masks.clear()
            masks[start] = drawn(start, stop)  # (k, 1, H, W)
            return x * masks[start] if plain or still is None else torch.lerp(still, x, masks[start])

        # Scores are counted from that of the whole picture, which leaves the covariance as it is.
        level, scale = (
            (float(score), drawn.variance) if self.debiased else (None, torch.full_like(x[0, :1], self.shown))
        )
        estimate = MaskedScores(self.shown, scale, level)
        for done in passes.forwards(make, self.most_passes):
            estimate.take(done.scores, masks[done.start])
            if passes.enough(estimate):
                break
        return from_estimate(estimate, x)


class Masks:
    """Random masks for one image, by number.

    Args:
        x: (1, C, H, W) the image.
        grid: How many cells a mask has, along each edge.
        shown: The probability with which a cell is shown.
        seed: What all draws come from.

    Attributes:
        variance: (1, H, W) the variance of a mask at each pixel.
    """

    def __init__(self, x: Tensor, grid: int, shown: float, seed: int) -> None:
        self._size = (int(x.shape[2]), int(x.shape[3]))
        self._grid, self._shown, self._seed = grid, shown, seed
        self._cell = tuple(math.ceil(edge / grid) for edge in self._size)
        # Enlarging is linear along each edge: one matrix (enlarged, grid) for each.
        unit = torch.eye(grid, dtype=torch.float64, device="cpu")[None]
        enlarged = [F.interpolate(unit, size=(grid + 1) * cell, mode="linear")[0].T for cell in self._cell]
        self._down, self._across = (each.to(x) for each in enlarged)
        spread = [
            each.square().sum(1).unfold(0, edge, 1)[:cell].mean(0)
            for each, edge, cell in zip(enlarged, self._size, self._cell, strict=True)
        ]
        self.variance = (shown * (1 - shown) * spread[0][:, None] * spread[1]).to(x)[None]

    def __call__(self, start: int, stop: int) -> Tensor:
        """The masks (k, 1, H, W) from `start` to `stop`, 0 (hidden) to 1 (shown); each pixel's mean is the same."""
        height, width = self._size
        cells, down, across = [], [], []
        for number in range(start, stop):
            drawn_from = generator(self._seed, number)
            draws = torch.rand(self._grid**2 + 2, generator=drawn_from, dtype=torch.float32, device="cpu")
            top, left = (int(draws[i - 2] * self._cell[i]) for i in range(2))
            cells.append(draws[:-2] < self._shown)
            down.append(self._down[top : top + height])
            across.append(self._across[left : left + width])
        shown = torch.stack(cells).view(-1, self._grid, self._grid).to(self._down)
        rows = torch.stack(down) @ shown  # (k, H, grid)
        return (rows @ torch.stack(across).mT)[:, None]


class MaskedScores(Estimate):
    """The sum of masks weighted by their scores, in constant memory.

    Args:
        shown: The mean of a mask.
        scale: (1, H, W) what the sum is divided by.
        level: A constant near the scores to count them from, for the debiased form; None for the paper's.
    """

    def __init__(self, shown: float, scale: Tensor, level: float | None) -> None:
        super().__init__()
        self._debiased, self._level = level is not None, level or 0.0
        self._centre = shown if self._debiased else 0.0
        self._scale = scale.to(precise_type(scale))
        self._scores = [0.0, 0.0]  # the sum of all, and of every other
        # With d a mask less its mean, and s a score: the sums of s d, d; these of every other; of s s d d, s d d, d d.
        self._sums = torch.zeros(7, *scale.shape, dtype=precise_type(scale), device=scale.device)
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._summed = 0

    def take(self, scores: Tensor, masks: Tensor) -> None:
        """Take in the scores (k,) of masks (k, 1, H, W)."""
        self._waiting.append((scores, masks))
        self.count += len(scores)
        if self.count - self._summed >= TOGETHER:
            self._add_up()

    def _add_up(self) -> None:
        """Add what waits: together, because a map takes as long to add as many."""
        if not self._waiting:
            return
        scores, masks = (torch.cat(each) for each in zip(*self._waiting, strict=True))
        self._waiting = []
        masks = masks.to(torch.promote_types(masks.dtype, torch.float32))  # half of it would not add up
        exact = scores.to(masks) - self._level
        even = torch.zeros_like(exact)
        even[self._summed % 2 :: 2] = 1
        self._summed += len(scores)
        self._scores[0] += float(exact.double().sum())
        self._scores[1] += float((exact * even).double().sum())
        one = torch.ones_like(exact)
        off = (masks - self._centre if self._centre else masks).flatten(1)  # (k, H W)
        first = torch.stack([exact, one, exact * even, even]) @ off
        second = torch.stack([exact.square(), exact, one]) @ off.square()
        self._sums += torch.cat([first, second]).view_as(self._sums)

    @property
    def mean(self) -> Tensor:
        """The map (1, H, W)."""
        known = self._known()
        scored, bare = known[0], known[1]
        if not self._debiased:
            return scored / (self._scale * self.count)
        return (scored - bare * (self._scores[0] / self.count)) / (self._scale * max(self.count - 1, 1))

    @property
    def variance(self) -> Tensor:
        """The variance (1, H, W) of what one mask adds."""
        scored, bare, _, _, squares, mixed, alone = self._known()
        mean = self._scores[0] / self.count if self._debiased else 0.0
        total = scored - mean * bare
        spread: Tensor = squares - 2 * mean * mixed + mean * mean * alone - total.square() / self.count
        return spread.clamp(min=0) / (self._scale.square() * max(self.count - 1, 1))

    @property
    def agreement(self) -> float | None:
        """The rank correlation of the maps of every other mask and of those between; None below four."""
        if self.count < 4:
            return None
        all_scored, all_bare, scored, bare = self._known()[:4]
        evens = (self.count + 1) // 2
        if not self._debiased:
            return rank_correlation(scored, all_scored - scored)
        odd_mean = (self._scores[0] - self._scores[1]) / (self.count - evens)
        odd = all_scored - scored - (all_bare - bare) * odd_mean
        return rank_correlation(scored - bare * (self._scores[1] / evens), odd)

    def _known(self) -> Tensor:
        self._add_up()
        return self._sums
