"""Sensitivity analysis of the score under random masks of a grid: Sobol indices and kernel dependence."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attribution.options import Budget, Option
from ..axes import at_least_float32, resize
from ..engine.estimates import ScoreEstimate, generator
from ..engine.multi_pass import ChunkResult, ImageAttribution, PassRunner, SampledAttribution
from ..errors import MethodError, optional_import
from ..validation import check_integer
from .baselines import Filler, FillOption

_BLOCK = 1024  # rows of a kernel matrix that are computed at once, and scores that its width is taken from

ROWS_IN_TIME = 4
"""With a time limit, the grid of Sobol indices is made coarser until this number of rows of the design fits."""


class TotalOrder(ScoreEstimate):
    """Total-order Sobol indices (cells,) by Jansen's estimator; zero if the score does not vary.

    A sample holds the scores of A, of B, and, for each number, of A with this number taken from B.

    Args:
        cells: The number of cells.
        rounding: The standard deviation, as a share of the largest score, up to which scores count as constant.

    Source: Jansen, "Analysis of variance designs for model output" (1999),
        https://doi.org/10.1016/S0010-4655(98)00154-4.
    """

    least_samples = 32

    def __init__(self, cells: int, rounding: float) -> None:
        super().__init__()
        self.passes_per_sample, self._rounding = cells + 2, rounding

    def solve(self, part: slice) -> tuple[Tensor, Tensor | None]:
        """Return the indices, and their errors by the delta method over the samples; None for a single one."""
        length = self.passes_per_sample
        rows = self.scores[: self.samples * length].view(-1, length)[part]
        effects = (rows[:, 2:] - rows[:, :1]).square() / 2  # (n, cells)
        both = rows[:, :2]
        variances = (both - both.mean()).square().sum(1) / 2 * (both.numel() / (both.numel() - 1))  # (n,)
        variance = variances.mean()
        if variance <= (self._rounding * rows.abs().max()).square():
            return torch.zeros_like(effects[0]), torch.zeros_like(effects[0])
        indices = effects.mean(0) / variance
        deviation = (effects - indices * variances[:, None]) / variance
        return indices, (deviation.var(0) / len(rows)).sqrt() if len(rows) > 1 else None


class Dependence(ScoreEstimate):
    """Hilbert-Schmidt independence criterion (cells,) of each cell's bit and the score; zero for a constant score.

    Args:
        bits: A function that returns the bits (k, cells) of samples `start` to `stop`.
        rounding: As for `TotalOrder`.
    """

    def __init__(self, bits: Callable[[int, int], Tensor], rounding: float) -> None:
        super().__init__()
        self._bits, self._rounding = bits, rounding

    def solve(self, part: slice) -> tuple[Tensor, Tensor | None]:
        """Return the criterion, and the errors of a U-statistic; None below four scores."""
        values, errors = criterion(self._bits(0, self.count)[part], self.scores[part], self._width())
        return values, errors if self.count >= 4 else None

    def _width(self) -> float:
        """Return the median distance of two scores, or the mean distance if most are equal; 0 if they do not vary."""
        if float(self.scores.std(correction=0)) <= self._rounding * float(self.scores.abs().max()):
            return 0.0
        distances = torch.pdist(self.scores[:_BLOCK, None])
        return float(distances.median()) or float(distances.mean())


def criterion(bits: Tensor, scores: Tensor, width: float) -> tuple[Tensor, Tensor]:
    """Return the independence criterion (cells,) under a Gaussian kernel of a width, and its standard error (cells,).

    With centred signs s and the centred kernel matrix L of the scores, the criterion is (s' L s minus its mean over all
    orders of s) / (2 n (n - 1)). The matrix is computed block by block, so memory does not grow with its size.

    Args:
        bits: (n, cells)
        scores: (n,)
        width: The width of the kernel; 0 for scores that do not vary.

    Source: Gretton et al., "Measuring Statistical Dependence with Hilbert-Schmidt Norms" (2005),
        https://doi.org/10.1007/11564089_7; Song et al., "Feature Selection via Dependence Maximization" (2012),
        https://jmlr.org/papers/v13/song12a.html.
    """
    n = len(scores)
    if not width:
        return torch.zeros_like(bits[0]), torch.zeros_like(bits[0])
    signs = 2 * bits - 1
    signs = signs - signs.mean(0)
    products, means, squares = [], [], []
    for start in range(0, n, _BLOCK):
        kernel = torch.exp(-((scores[start : start + _BLOCK, None] - scores) / width).square() / 2)  # (b, n)
        products.append(kernel @ signs)
        means.append(kernel.mean(1))
        squares.append(kernel.square().sum())
    mean = torch.cat(means)  # (n,) of each row of the kernel
    whole = mean.mean()
    terms = signs * (torch.cat(products) - mean @ signs)  # (n, cells): s times L s
    by_chance = signs.square().sum(0) * n * (1 - whole) / (n - 1)
    value = (terms.sum(0) - by_chance) / (2 * n * (n - 1))
    # The mean square of the centred kernel off its diagonal, times the same for the bits' kernel.
    centred = sum(squares) / n**2 - 2 * mean.square().mean() + whole**2
    diagonal = (1 - 2 * mean + whole).square().mean() / n
    second = (centred - diagonal).clamp(min=0) / 4 * signs.square().mean(0).square()
    first = ((terms / (2 * n)).var(0) - second / n).clamp(min=0)
    return value, (4 * first / n + 2 * second / n**2).sqrt()


class GridAttribution(SampledAttribution):
    """Base class of methods that hide the cells of a grid at random.

    Args:
        grid: The number of cells along each edge.
        fill: As for `FeatureAblation`.
    """

    sign = "positive"
    interpolation: ClassVar[str]
    """Interpolation from cells to pixels: "linear" along each axis, or a mode of `torch.nn.functional.interpolate`."""

    grid: Option[int] = Option(8, check_integer)
    fill: FillOption = FillOption()

    def cells_of(self, x: Tensor) -> tuple[int, ...]:
        """Return the number of cells along each axis; a cell has at least one pixel."""
        return tuple(min(self.grid, edge) for edge in x.shape[2:])

    def enlarged(self, cells: Tensor, x: Tensor) -> Tensor:
        """Enlarge numbers (k, cells) to the pixels (k, 1, H, W) of an image, at least float32."""
        maps = cells.view(-1, 1, *self.cells_of(x)).to(at_least_float32(x))
        if self.interpolation == "linear":
            return resize(maps, x.shape[2:])
        return F.interpolate(maps, x.shape[2:], mode=self.interpolation)

    def estimated(
        self, passes: PassRunner, estimate: ScoreEstimate, forwards: Iterator[ChunkResult]
    ) -> ImageAttribution:
        """Return an estimate from the scores of forwards as a map. Raises MethodError for fewer than the least."""

        def so_far() -> ImageAttribution | None:
            return self.result(passes, estimate) if passes.used >= passes.least else None

        for done in passes.until_precise(estimate, forwards, so_far):
            estimate.add(done.scores)
        return self.result(passes, estimate)

    def result(self, passes: PassRunner, estimate: ScoreEstimate) -> ImageAttribution:
        """Return an estimate of one number per cell as a map. Raises MethodError after fewer than the least passes."""
        if passes.used < passes.least:
            needed = f"{self.name} needs {passes.least} passes for a grid of {self.grid}"
            raise MethodError(f"{needed}, and {passes.used} ran before the limit was met; allow more")
        cells, errors = estimate.solve(slice(None))
        if not cells.any():
            passes.notes.append("the score varied by no more than rounding")
        error = None if errors is None else self.enlarged(errors, passes.x)[0]
        return ImageAttribution(self.enlarged(cells, passes.x)[0], error, estimate.agreement)


class Sobol(GridAttribution):
    """Total-order Sobol index of each cell: the fraction of the score's variance, under random masks, that involves it.

    Formula: S_i = E(Var(y | all cells but i)) / Var y, over random masks.

    Every cell fades out by a random degree, 0 to 1. The total-order Sobol index of a cell counts all of its effects,
    alone and together with other cells. So the indices sum to 1 if the score is a sum over cells, and to more if cells
    interact. Jansen's estimator is used on scrambled Sobol points: each row of the design takes one pass per cell and
    two more. Passes after the last complete row are not used.

    Args:
        fill: As for `RISE`.

    Values: (N, 1, H, W), not negative, without a unit: the index of a cell, interpolated like the masks. The error is
    the standard error of a ratio of means over the rows, by the delta method, as if rows were independent. Sobol points
    are more even, so the true error tends to be smaller.

    Raises:
        DependencyError: SciPy is not installed.
        MethodError: Fewer passes than two rows of the design, or the fill "inpaint".

    Source: Fel et al., "Look at the Variance! Efficient Black-box Explanations with Sobol-based Sensitivity Analysis"
        (2021), https://arxiv.org/abs/2111.04138.
    """

    name = "sobol"
    ignores_sign = True
    units = "share of the score's variance"
    cost = "2112 forwards"
    rows: ClassVar[int] = 32
    preview_options: ClassVar = {"grid": 2, "passes": 24}
    draft_options: ClassVar = {"grid": 4, "passes": 36}
    interpolation = "linear"  # as in the authors' code; hard edges would change the score

    fill: FillOption = FillOption(partial="sobol")

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """Compute the total effect of each cell, on a coarser grid if too few passes fit into the time."""
        x, coarser = passes.x, copy.copy(self)

        def trial(count: int) -> None:
            list(passes.forwards(lambda start, stop: x.expand(stop - start, *x.shape[1:]), count))

        fitting = passes.affordable(trial, ROWS_IN_TIME * self._length(x))
        while coarser.grid > 2 and ROWS_IN_TIME * coarser._length(x) > fitting:
            coarser.grid -= 1
        if coarser.grid < self.grid:
            passes.notes.append(f"a grid of {coarser.grid} cells along each edge, to fit into the time")
        return coarser._explain_grid(passes, score)

    def _length(self, x: Tensor) -> int:
        """Return the number of passes of a row."""
        return math.prod(self.cells_of(x)) + 2

    def _explain_grid(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """Compute the total effect of each cell."""
        x = passes.x
        length = self._length(x)
        rows = self.rows if self.limits() == Budget() else self.most_passes // length
        design = sobol_masks(length - 2, rows, self.seed)
        background = Filler(x, self.fill).background

        def make(start: int, stop: int) -> Tensor:
            return torch.lerp(background, x, self.enlarged(design(start, stop), x).to(x.dtype))

        passes.least = passes.used + 2 * length
        estimate = TotalOrder(length - 2, _rounding(x, score))
        return self.estimated(passes, estimate, passes.forwards(make, rows * length))


class HSIC(GridAttribution):
    """The statistical dependence of the score on whether a cell is shown, under random masks.

    Formula: S_i = (sᵀ L s − its mean over orders of s) / (2n (n − 1)) over n masks, with s_m = ±1 as mask m shows or
    hides cell i, minus their mean, and L_mm′ = exp(−(y_m − y_m′)² / (2w²)).

    The value of a cell is the Hilbert-Schmidt independence criterion of the score and the cell's bit: shown or hidden,
    with equal probability. It detects any kind of dependence. The kernel of the bit is delta - 1/2. The kernel of the
    score is a Gaussian whose width is the median distance of scores. Bits come from Latin hypercubes of 64 samples,
    half of which show each cell.

    Values: (N, 1, H, W), without a unit: the criterion minus its expectation by chance, so it is about 0, of either
    sign, for a cell that does not affect the score. The error is the standard error of a U-statistic, from the first
    two terms of its Hoeffding decomposition; the width of the kernel is treated as known.

    Raises:
        MethodError: Fewer than four passes.

    Source: Novello et al., "Making Sense of Dependence: Efficient Black-box Explanations Using Dependence Measure"
        (2022), https://arxiv.org/abs/2206.06219.
    """

    name = "hsic"
    ignores_sign = True
    units = "dependence, 0 for none"
    cost = "1500 forwards"
    samples = 1500
    preview_options: ClassVar = {"grid": 3, "passes": 16}
    interpolation = "nearest-exact"

    grid: Option[int] = Option(7, check_integer)

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """Compute the dependence of the score on each cell."""
        x = passes.x
        design = partial(hypercube_bits, math.prod(self.cells_of(x)), self.seed)
        filler = Filler(x, self.fill)
        passes.least = 4
        estimate = Dependence(design, _rounding(x, score))
        forwards = passes.forwards(lambda i, j: filler(self.enlarged(design(i, j), x) < 0.5), self.most_passes)
        return self.estimated(passes, estimate, forwards)


def sobol_masks(cells: int, rows: int, seed: int) -> Callable[[int, int], Tensor]:
    """Return a function that gives the masks (k, cells) of passes `start` to `stop` of a design by Saltelli.

    A row of the design is A, B, A with its first number from B, A with its second from B, and so on.

    Source: Saltelli et al., "Variance based sensitivity analysis of model output" (2010),
        https://doi.org/10.1016/j.cpc.2009.09.018.
    """
    qmc = optional_import("scipy.stats", "perturbation", "Sobol").qmc
    engine = qmc.Sobol(2 * cells, scramble=True, rng=seed & (2**63 - 1))
    count = 1 << max(31, rows - 1).bit_length()  # the points are most even for powers of two
    points = torch.from_numpy(engine.random(count))
    first, second = points[:, :cells], points[:, cells:]

    def masks(start: int, stop: int) -> Tensor:
        at = torch.arange(start, stop, device="cpu")
        row, place = at // (cells + 2), (at % (cells + 2))[:, None]
        swapped = (torch.arange(cells, device="cpu") == place - 2) | (place == 1)
        return torch.where(swapped, second[row], first[row])

    return masks


def hypercube_bits(cells: int, seed: int, start: int, stop: int) -> Tensor:
    """Return the bits (k, cells), 1 for shown, of samples `start` to `stop`.

    In each block of 64 samples every cell is shown in half of them, in an independent order. This is a Latin hypercube
    with values rounded to 0 or 1.
    """
    blocks = []
    for number in range(start // 64, (stop - 1) // 64 + 1):
        numbers = torch.rand(64, cells, generator=generator(seed, number), dtype=torch.float64, device="cpu")
        blocks.append((numbers.argsort(0) < 32).double())
    return torch.cat(blocks)[start % 64 : start % 64 + stop - start]


def _rounding(x: Tensor, score: Tensor) -> float:
    """Return the standard deviation of scores, relative to the largest, that rounding alone may cause.

    In half precision, sums run in single precision and each layer's output is rounded once. When the last bit of the
    input changed, the top scores of four networks varied by up to 0.45 eps in half precision, and 1.8 eps in float32.
    """
    coarsest = max(x.dtype, score.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    summed = torch.promote_types(coarsest, torch.float32)
    return max(torch.finfo(coarsest).eps, 64 * torch.finfo(summed).eps)
