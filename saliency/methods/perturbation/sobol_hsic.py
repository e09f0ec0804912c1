"""Sensitivity analysis of the score under random masks of a grid: Sobol indices and kernel dependence."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ...attribution.forward import at_least_float32
from ...attribution.options import Budget, Option
from ...engine.estimates import Estimate, rank_correlation
from ...engine.multi_pass import ImageAttribution, SampledAttribution, generator
from ...engine.runner import CHECK_INTERVAL, PassRunner
from ...errors import MethodError
from ...validation import check_integer
from ..baselines import Filler, FillOption

_BLOCK = 1024  # rows of a kernel matrix that are computed at once, and scores that its width is taken from


class ScoreEstimate(Estimate):
    """Estimate of one number per cell from scores.

    Args:
        rounding: The standard deviation of the scores, as a share of the largest, that counts as none.
        together: The number of scores of one sample.
    """

    def __init__(self, rounding: float, together: int = 1) -> None:
        super().__init__()
        self._rounding, self._together = rounding, together
        self._scores: list[float] = []

    def add(self, samples: Tensor) -> None:
        """Add the scores (k,) of the next passes."""
        self._scores += samples.flatten().tolist()
        self.count = len(self._scores) // self._together

    @property
    def samples(self) -> Tensor:
        """The scores of all complete samples (count, together)."""
        scores = self._scores[: self.count * self._together]
        return torch.tensor(scores, dtype=torch.float64, device="cpu").view(-1, self._together)


class TotalOrder(ScoreEstimate):
    """Total-order Sobol indices by Jansen's estimator.

    A sample holds the scores of A, of B, and of A with one of its numbers from B, for each of the numbers.

    Args:
        cells: The number of cells.
        rounding: As for `ScoreEstimate`.

    Source: Jansen, "Analysis of variance designs for model output" (1999),
        https://doi.org/10.1016/S0010-4655(98)00154-4.
    """

    def __init__(self, cells: int, rounding: float) -> None:
        super().__init__(rounding, cells + 2)

    @property
    def mean(self) -> Tensor:
        """The indices (cells,); zero if the score does not vary."""
        return self._indices(self.samples)

    @property
    def error(self) -> Tensor | None:
        """The standard errors (cells,) of the ratios, by the delta method over the samples; None for a single one."""
        if self.count < 2:
            return None
        effects, variances = self._terms(self.samples)
        variance = variances.mean()
        deviation = (effects - self.mean * variances[:, None]) / (variance or 1)
        return (deviation.var(0) / self.count).sqrt() * bool(variance)

    @property
    def agreement(self) -> float | None:
        """The rank correlation of the indices of the even and of the odd samples; None below four samples."""
        if self.count < 4:
            return None
        return rank_correlation(*(self._indices(self.samples[start::2])[None] for start in (0, 1)))

    def _terms(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """The effects (R, cells) and the variance (R,) of each sample; the indices are the ratio of their means."""
        effects = (samples[:, 2:] - samples[:, :1]).square() / 2
        both = samples[:, :2]
        variances = (both - both.mean()).square().sum(1) / 2 * (both.numel() / (both.numel() - 1))
        least = (self._rounding * samples.abs().max()).square()
        return effects, variances * bool(variances.mean() > least)

    def _indices(self, samples: Tensor) -> Tensor:
        effects, variances = self._terms(samples)
        variance = variances.mean()
        return effects.mean(0) / variance if variance else torch.zeros_like(effects[0])


class Dependence(ScoreEstimate):
    """Hilbert-Schmidt independence criterion of each cell's bit and the score, with its standard error.

    Args:
        bits: A function that returns the bits (k, cells) of samples `start` to `stop`.
        rounding: As for `ScoreEstimate`.
    """

    def __init__(self, bits: Callable[[int, int], Tensor], rounding: float) -> None:
        super().__init__(rounding)
        self._bits = bits
        self._known = (0, torch.zeros(0, device="cpu", dtype=torch.float64))

    @property
    def mean(self) -> Tensor:
        """The criterion (cells,); zero if the score does not vary."""
        return self._criterion()[0]

    @property
    def error(self) -> Tensor | None:
        """The standard errors (cells,) of a U-statistic; None below four samples."""
        return self._criterion()[1] if self.count >= 4 else None

    @property
    def agreement(self) -> float | None:
        """The rank correlation of the criteria of the even and of the odd samples; None below eight samples."""
        if self.count < 8:
            return None
        bits, scores, width = self._bits(0, self.count), self.samples[:, 0], self._width()
        return rank_correlation(*(criterion(bits[i::2], scores[i::2], width)[0][None] for i in (0, 1)))

    def _criterion(self) -> Tensor:
        """The criterion and its error (2, cells), computed once."""
        if self._known[0] != self.count:
            result = criterion(self._bits(0, self.count), self.samples[:, 0], self._width())
            self._known = (self.count, torch.stack(result))
        return self._known[1]

    def _width(self) -> float:
        """The median distance of two scores, or the mean distance if most are equal; 0 if the scores do not vary."""
        scores = self.samples[:, 0]
        if float(scores.std(correction=0)) <= self._rounding * float(scores.abs().max()):
            return 0.0
        distances = torch.pdist(scores[:_BLOCK, None])
        return float(distances.median()) or float(distances.mean())


def criterion(bits: Tensor, scores: Tensor, width: float) -> tuple[Tensor, Tensor]:
    """Return the independence criterion (cells,) under a Gaussian kernel of a width, and its standard error (cells,).

    With centred signs s and the centred kernel matrix L of the scores, the criterion is (s' L s less its mean over all
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
    # The mean square of the centred kernel off its diagonal, times that of the bits' kernel.
    centred = sum(squares) / n**2 - 2 * mean.square().mean() + whole**2
    diagonal = (1 - 2 * mean + whole).square().mean() / n
    second = (centred - diagonal).clamp(min=0) / 4 * signs.square().mean(0).square()
    first = ((terms / (2 * n)).var(0) - second / n).clamp(min=0)
    return value, (4 * first / n + 2 * second / n**2).sqrt()


class GridAttribution(SampledAttribution):
    """Base class of methods that hide the cells of a grid at random.

    Args:
        model: As for every method.
        grid: The number of cells along each edge.
        fill: The value of hidden pixels: see `saliency.methods.baselines.FillLike`.
        **options: As for `saliency.SampledAttribution`.
    """

    sign = "positive"
    interpolation: ClassVar[str]
    """How cells are enlarged to pixels: see `torch.nn.functional.interpolate`."""

    grid: Option[int] = Option(8, check_integer)
    fill: FillOption = FillOption()

    def cells_of(self, x: Tensor) -> tuple[int, int]:
        """Return the number of cells down and across; a cell has at least one pixel."""
        return min(self.grid, int(x.shape[2])), min(self.grid, int(x.shape[3]))

    def enlarged(self, cells: Tensor, x: Tensor) -> Tensor:
        """Enlarge numbers (k, cells) to the pixels (k, 1, H, W) of an image, at least float32."""
        maps = cells.view(-1, 1, *self.cells_of(x)).to(at_least_float32(x))
        options = {"align_corners": False} if self.interpolation == "bilinear" else {}
        return F.interpolate(maps, x.shape[2:], mode=self.interpolation, **options)

    def result(self, passes: PassRunner, estimate: ScoreEstimate) -> ImageAttribution:
        """Return an estimate of one number per cell as a map. Raises MethodError after fewer than the least passes."""
        if passes.used < passes.least:
            raise MethodError(
                f"{self.name} needs {passes.least} passes, and {passes.used} ran before the limit was met; allow more"
            )
        values, error = self.enlarged(estimate.mean, passes.x)[0], estimate.error
        if not values.any():
            passes.notes.append("the score varied by no more than rounding")
        return ImageAttribution(
            values, None if error is None else self.enlarged(error, passes.x)[0], estimate.agreement
        )


class Sobol(GridAttribution):
    """The share of the score's variance, under random masks, that is lost when a cell is held fixed: its total effect.

    Every cell fades out by a random degree, 0 to 1. The total-order Sobol index of a cell counts all of its effects,
    alone and together with other cells. So the indices sum to 1 if the score is a sum over cells, and to more if cells
    interact. Jansen's estimator is used on scrambled Sobol points: each row of the design takes one pass per cell and
    two more. Passes after the last complete row are not used.

    Args:
        model: As for every method.
        grid: The number of cells along each edge.
        fill: What an image fades into: see `saliency.methods.baselines.FillLike`, without "inpaint".
        **options: As for `saliency.SampledAttribution`.

    Values: (N, 1, H, W), not negative, without a unit: the index of a cell, interpolated like the masks. The error is
    that of a ratio of means over the rows, by the delta method, as if rows were independent. Sobol points are more
    even, so the true error tends to be smaller.

    Raises:
        MethodError: Fewer passes than two rows of the design, or a fill that depends on what is hidden.
        TargetError: The target does not fit the model's output.

    Source: Fel et al., "Look at the Variance! Efficient Black-box Explanations with Sobol-based Sensitivity Analysis"
        (2021), https://arxiv.org/abs/2111.04138.
    """

    name = "sobol"
    units = "share of the score's variance"
    cost = "2112 forwards"
    rows: ClassVar[int] = 32
    quick_options: ClassVar = {"grid": 2, "passes": 24}
    interpolation = "bilinear"  # as by the authors; the model would see hard edges

    fill: FillOption = FillOption(partial="sobol")

    def limits(self) -> Budget:
        """Return the limits that were set. Without any, the number of passes depends on the image."""
        return Budget(self.passes, self.seconds, self.tolerance)

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """Compute the total effect of each cell."""
        x = passes.x
        down, across = self.cells_of(x)
        length = down * across + 2
        rows = self.rows if self.limits() == Budget() else self.most_passes // length
        if rows < 2:
            raise MethodError(
                f"passes={self.passes} is too few: sobol on a grid of {down}x{across} takes {length} passes a row and "
                f"at least two rows; allow {2 * length}, or use a coarser grid"
            )
        design = _SobolDesign(length - 2, self.seed)
        background = Filler(x, self.fill).background

        def make(start: int, stop: int) -> Tensor:
            return torch.lerp(background, x, self.enlarged(design(start, stop), x).to(x.dtype))

        passes.least = 2 * length
        estimate = TotalOrder(length - 2, _rounding(x, score))
        for done in passes.forwards(make, rows * length):
            for row_score in done.scores.cpu():
                count = estimate.count
                estimate.add(row_score)
                if estimate.count > count and passes.enough(estimate):
                    return self.result(passes, estimate)
        return self.result(passes, estimate)


class HSIC(GridAttribution):
    """The dependence of the score on whether a cell is shown, of any kind, under random masks.

    The Hilbert-Schmidt independence criterion of each cell's bit, which is shown or hidden with equal probability, and
    the score. The kernel of the bit is delta - 1/2, that of the score a Gaussian whose width is the median distance of
    scores. Bits come from Latin hypercubes of 64 samples, half of which show each cell.

    Args:
        model: As for every method.
        grid: The number of cells along each edge.
        fill: The value of hidden pixels: see `saliency.methods.baselines.FillLike`.
        **options: As for `saliency.SampledAttribution`.

    Values: (N, 1, H, W), without a unit: the criterion less its expectation by chance, so it is about 0, of either
    sign, for a cell that does not affect the score. The error is that of a U-statistic, from the first two terms of its
    Hoeffding decomposition; the width of the kernel counts as known.

    Raises:
        MethodError: Fewer than four passes.
        TargetError: The target does not fit the model's output.

    Source: Novello et al., "Making Sense of Dependence: Efficient Black-box Explanations Using Dependence Measure"
        (2022), https://arxiv.org/abs/2206.06219.
    """

    name = "hsic"
    units = "dependence, 0 for none"
    cost = "1500 forwards"
    samples = 1500
    quick_options: ClassVar = {"grid": 3, "passes": 16}
    interpolation = "nearest-exact"

    grid: Option[int] = Option(7, check_integer)

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """Compute the dependence of the score on each cell."""
        if self.most_passes < 4:
            raise MethodError(f"passes={self.passes} are too few for a dependence; hsic takes at least 4")
        x = passes.x
        down, across = self.cells_of(x)
        design = _HypercubeDesign(down * across, self.seed)
        filler = Filler(x, self.fill)
        passes.least = 4
        estimate = Dependence(design, _rounding(x, score))
        next_check = 32  # the time of a check grows with the square of the samples, so checks become rarer
        for done in passes.forwards(lambda i, j: filler(self.enlarged(design(i, j), x) < 0.5), self.most_passes):
            estimate.add(done.scores)
            if estimate.count >= next_check and estimate.count % CHECK_INTERVAL == 0:
                next_check = estimate.count * 5 // 4
                if passes.enough(estimate):
                    break
        return self.result(passes, estimate)


class _SobolDesign:
    """The rows of a design by Saltelli: (A, B, A with its first number from B, A with its second from B, ...).

    Source: Saltelli et al., "Variance based sensitivity analysis of model output" (2010),
        https://doi.org/10.1016/j.cpc.2009.09.018.
    """

    def __init__(self, cells: int, seed: int) -> None:
        from scipy.stats import qmc

        self.cells = cells
        self._engine = qmc.Sobol(2 * cells, scramble=True, rng=seed & (2**63 - 1))
        self._points = torch.zeros(0, 2 * cells, dtype=torch.float64, device="cpu")

    def __call__(self, start: int, stop: int) -> Tensor:
        """Return the masks (k, cells) of passes `start` to `stop`."""
        at = torch.arange(start, stop, device="cpu")
        row, place = at // (self.cells + 2), at % (self.cells + 2)
        while len(self._points) <= int(row[-1]):  # by powers of two, for which the points are most even
            drawn = torch.from_numpy(self._engine.random(max(32, len(self._points))))
            self._points = torch.cat([self._points, drawn])
        first, second = self._points[row, : self.cells], self._points[row, self.cells :]
        swapped = (torch.arange(self.cells, device="cpu") == place[:, None] - 2) | (place[:, None] == 1)
        return torch.where(swapped, second, first)


class _HypercubeDesign:
    """Bits in blocks: in each, every cell is shown in half of the samples, in an independent order.

    That is a Latin hypercube whose numbers are rounded to 0 or 1.
    """

    block = 64

    def __init__(self, cells: int, seed: int) -> None:
        self.cells, self.seed = cells, seed

    def __call__(self, start: int, stop: int) -> Tensor:
        """Return the bits (k, cells), 1 for shown, of samples `start` to `stop`."""
        first = start // self.block
        blocks = torch.cat([self._block(number) for number in range(first, (stop - 1) // self.block + 1)])
        return blocks[start - first * self.block : stop - first * self.block]

    def _block(self, number: int) -> Tensor:
        draws = generator(self.seed, number)
        numbers = torch.rand(self.block, self.cells, generator=draws, dtype=torch.float64, device="cpu")
        return (numbers.argsort(0) < self.block // 2).double()


def _rounding(x: Tensor, score: Tensor) -> float:
    """The standard deviation of scores, as a share of the largest, that may be rounding alone.

    In half precision, sums run in single precision and each layer's output is rounded once. When the last bit of the
    input changed, the top scores of four networks varied by up to 0.45 eps there, and by up to 1.8 eps in float32.
    """
    coarsest = max(x.dtype, score.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    summed = torch.promote_types(coarsest, torch.float32)
    return max(torch.finfo(coarsest).eps, 64 * torch.finfo(summed).eps)
