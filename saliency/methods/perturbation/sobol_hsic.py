"""Sensitivity analysis: how much of what the score does, under random masks, goes back to each cell of a grid."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, NoReturn, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...attribution.options import SamplingOptions
from ...engine.estimates import Estimate, rank_correlation
from ...engine.multi_pass import ImageAttribution, SampledAttribution, generator
from ...engine.runner import MakeInputs, PassRunner
from ...errors import MethodError
from ...validation import check_whole_number
from .fills import Filler, FillLike, as_fill

_BLOCK = 1024  # rows of a kernel matrix at once, and the scores that the kernel's width is taken from


class TotalOrder(Estimate):
    """Total-order Sobol indices by Jansen's estimator, from rows of a design.

    Each row holds the scores of A, of B, and of A with one of its numbers from B, for each of the numbers.

    Args:
        cells: How many numbers there are.
        rounding: The standard deviation of the scores, as a share of the largest, that counts as none.

    Source: Jansen, "Analysis of variance designs for model output" (1999),
        https://doi.org/10.1016/S0010-4655(98)00154-4.
    """

    def __init__(self, cells: int, rounding: float) -> None:
        super().__init__()
        self._rounding = rounding
        self._rows = torch.zeros(0, cells + 2, dtype=torch.float64, device="cpu")

    def add(self, samples: Tensor) -> None:
        """Take in rows of scores (k, cells + 2)."""
        at, self.count = self.count, self.count + len(samples)
        if self.count > len(self._rows):
            more = self._rows.new_zeros(max(32, self.count), self._rows.shape[1])
            self._rows = torch.cat([self._rows, more])
        self._rows[at : self.count] = samples

    @property
    def mean(self) -> Tensor:
        """The indices (cells,); zero where the score does not vary."""
        return self._indices(self._rows[: self.count])

    @property
    def error(self) -> Tensor | None:
        """The standard errors (cells,) of the ratios, by the delta method over the rows; None for a single row."""
        if self.count < 2:
            return None
        rows = self._rows[: self.count]
        effects, spread = self._parts(rows)
        variance = float(spread.mean())
        if not variance:
            return torch.zeros_like(self.mean)
        off = (effects - self._indices(rows) * spread[:, None]) / variance
        return (off.var(0) / self.count).sqrt()

    @property
    def agreement(self) -> float | None:
        """The rank correlation of the indices of every other row and of those between; None below four rows."""
        if self.count < 4:
            return None
        halves = (self._indices(self._rows[start : self.count : 2])[None] for start in (0, 1))
        return rank_correlation(*halves)

    def _parts(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Of each row the effects (R, cells) and the variance (R,), whose means are in the ratio of the indices."""
        both = rows[:, :2]
        effects = (rows[:, 2:] - rows[:, :1]).square() / 2
        off = both - both.mean()
        spread = off.square().sum(1) / 2 * (both.numel() / (both.numel() - 1))
        least = (self._rounding * rows.abs().max()).square()
        return effects, torch.zeros_like(spread) if spread.mean() <= least else spread

    def _indices(self, rows: Tensor) -> Tensor:
        effects, spread = self._parts(rows)
        variance = spread.mean()
        return effects.mean(0) / variance if variance else torch.zeros_like(effects[0])


class _Criterion(NamedTuple):
    value: Tensor  # (cells,)
    error: Tensor  # (cells,)


class Dependence(Estimate):
    """The Hilbert-Schmidt independence criterion of each cell's bit and the score, with its standard error.

    With centred signs s and the centred kernel matrix L of the scores, (s' L s - what it is on average over all orders
    of s) / (2 n (n - 1)): the matrix is made block by block, so memory does not grow with its size.

    Args:
        bits: Gives the bits (k, cells) of samples `start` to `stop`.
        rounding: The standard deviation of the scores, as a share of the largest, that counts as none.

    Source: Gretton et al., "Measuring Statistical Dependence with Hilbert-Schmidt Norms" (2005),
        https://doi.org/10.1007/11564089_7; Song et al., "Feature Selection via Dependence Maximization" (2012),
        https://jmlr.org/papers/v13/song12a.html.
    """

    def __init__(self, bits: Callable[[int, int], Tensor], rounding: float) -> None:
        super().__init__()
        self._bits, self._rounding = bits, rounding
        self._scores: list[float] = []
        self._known: dict[int, _Criterion] = {}

    def add(self, samples: Tensor) -> None:
        """Take in the scores (k, 1) of the next samples."""
        self._scores += samples.flatten().tolist()
        self.count = len(self._scores)

    @property
    def mean(self) -> Tensor:
        """The criterion (cells,); zero where the score does not vary."""
        return self._criterion().value

    @property
    def error(self) -> Tensor | None:
        """The standard errors (cells,) of a U-statistic; None below four samples."""
        return self._criterion().error if self.count >= 4 else None

    @property
    def agreement(self) -> float | None:
        """The rank correlation of what every other sample says and those between; None below eight samples."""
        if self.count < 8:
            return None
        bits, scores = self._bits(0, self.count), torch.tensor(self._scores, dtype=torch.float64, device="cpu")
        width = self._width(scores)
        halves = (criterion(bits[start::2], scores[start::2], width).value[None] for start in (0, 1))
        return rank_correlation(*halves)

    def _criterion(self) -> _Criterion:
        if self.count not in self._known:
            bits, scores = self._bits(0, self.count), torch.tensor(self._scores, dtype=torch.float64, device="cpu")
            self._known = {self.count: criterion(bits, scores, self._width(scores))}
        return self._known[self.count]

    def _width(self, scores: Tensor) -> float:
        """The median distance of two scores, or the mean one where most are the same; 0 for scores without a spread."""
        if float(scores.std(correction=0)) <= self._rounding * float(scores.abs().max()):
            return 0.0
        first = scores[:_BLOCK]
        distances = torch.pdist(first[:, None])
        return float(distances.median()) or float(distances.mean())


def criterion(bits: Tensor, scores: Tensor, width: float) -> _Criterion:
    """The criterion (cells,) of bits (n, cells) and scores (n,), under a Gaussian kernel of a width, and its error."""
    n = len(scores)
    if not width:
        return _Criterion(torch.zeros_like(bits[0]), torch.zeros_like(bits[0]))
    signs = 2 * bits - 1
    signs = signs - signs.mean(0)
    along, means, squares = [], [], []
    for start in range(0, n, _BLOCK):
        kernel = torch.exp(-((scores[start : start + _BLOCK, None] - scores) / width).square() / 2)  # (b, n)
        along.append(kernel @ signs)
        means.append(kernel.mean(1))
        squares.append(kernel.square().sum())
    mean = torch.cat(means)  # (n,) of each row of the kernel
    whole = mean.mean()
    terms = signs * (torch.cat(along) - mean @ signs)  # (n, cells): s times L s
    trace = n * (1 - whole)
    chance = signs.square().sum(0) * trace / (n - 1)
    value = (terms.sum(0) - chance) / (2 * n * (n - 1))
    # The mean square of the centred kernel off its diagonal, times that of the bits' kernel.
    centred = sum(squares) / n**2 - 2 * mean.square().mean() + whole**2
    diagonal = (1 - 2 * mean + whole).square().mean() / n
    second = (centred - diagonal).clamp(min=0) / 4 * signs.square().mean(0).square()
    first = ((terms / (2 * n)).var(0) - second / n).clamp(min=0)
    return _Criterion(value, (4 * first / n + 2 * second / n**2).sqrt())


class GridAttribution(SampledAttribution):
    """A method that hides the cells of a grid at random.

    Args:
        model: As for every method.
        grid: The number of cells along each edge.
        fill: What stands where the image is hidden: see `saliency.methods.perturbation.fills.FillLike`.
        **sampling: See `saliency.attribution.options.SamplingOptions`.
    """

    sign = "positive"

    def __init__(
        self, model: nn.Module, *, grid: int = 8, fill: FillLike = 0.0, **sampling: Unpack[SamplingOptions]
    ) -> None:
        super().__init__(model, **sampling)
        self.grid = check_whole_number("grid", grid)
        self.fill = as_fill(fill)

    def cells_of(self, x: Tensor) -> tuple[int, int]:
        """The number of cells down and across, no smaller than a pixel each."""
        return min(self.grid, int(x.shape[2])), min(self.grid, int(x.shape[3]))

    def painted(self, estimate: Estimate, passes: PassRunner, cells: tuple[int, int]) -> ImageAttribution:
        """An estimate of one number per cell, painted on the pixels (1, H, W), with its error."""
        mean, error = estimate.mean, estimate.error
        if not mean.any():
            passes.notes.append("the score varied by no more than rounding")
        return ImageAttribution(
            self.paint(mean, passes.x, cells),
            None if error is None else self.paint(error, passes.x, cells),
            estimate.agreement,
        )

    def paint(self, numbers: Tensor, like: Tensor, cells: tuple[int, int]) -> Tensor:
        """Numbers (k * cells,) on pixels (k, H, W) of an image like (1, C, H, W), and of its type."""
        maps = numbers.reshape(-1, 1, *cells).to(like.device, torch.float32 if like.dtype != torch.float64 else None)
        return self.enlarged(maps, (int(like.shape[2]), int(like.shape[3])))[:, 0].to(_type_of(like))

    @abstractmethod
    def enlarged(self, maps: Tensor, size: tuple[int, int]) -> Tensor:
        """Maps of cells (k, 1, g, g) at the size of the image."""


class Sobol(GridAttribution):
    """The share of the score's variance, under random masks, that is lost where a cell is held fixed: its total effect.

    Every cell fades out by a random degree, 0 to 1. The total-order Sobol index of a cell counts all that it does, by
    itself and together with others; so the indices sum to 1 where the score is a sum over cells, and to more where
    cells act together. Jansen's estimator on scrambled Sobol points: each row of the design takes one pass per cell and
    two more, and passes behind the last whole row are not used.

    Args:
        model: As for every method.
        grid: The number of cells along each edge.
        fill: What an image fades into: see `saliency.methods.perturbation.fills.FillLike`, without "inpaint".
        **sampling: See `saliency.attribution.options.SamplingOptions`.

    Values: (N, 1, H, W), not negative, without a unit: the index of a cell, interpolated as the masks are. The error is
    that of a ratio of means over the rows, by the delta method and as if rows were independent; Sobol points are more
    even than that, so the true one tends to be smaller.

    Raises:
        MethodError: Fewer passes than two rows of the design take, or a fill that depends on what is hidden.
        TargetError: The target does not fit the model's output.

    Source: Fel et al., "Look at the Variance! Efficient Black-box Explanations with Sobol-based Sensitivity Analysis"
        (2021), https://arxiv.org/abs/2111.04138.
    """

    name = "sobol"
    units = "share of the score's variance"
    cost = "2112 forwards"
    rows: ClassVar[int] = 32
    quick_options: ClassVar[Mapping[str, Any]] = {"grid": 2, "passes": 24}

    def __init__(
        self, model: nn.Module, *, grid: int = 8, fill: FillLike = 0.0, **sampling: Unpack[SamplingOptions]
    ) -> None:
        super().__init__(model, grid=grid, fill=fill, **sampling)
        if self.fill == "inpaint":
            raise MethodError('sobol hides by degrees, which fill="inpaint" cannot; use "blur", "mean" or a number')

    @property
    def most_passes(self) -> int:
        """The most passes of an image; by default those of 32 rows of the design."""
        return super().most_passes if self._is_limited() else self.rows * (self.grid**2 + 2)

    def _is_limited(self) -> bool:
        return (self.passes, self.seconds, self.tolerance) != (None, None, None)

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """The total effect of each cell."""
        x = passes.x
        cells = self.cells_of(x)
        count = cells[0] * cells[1]
        rows = self.most_passes // (count + 2) if self._is_limited() else self.rows
        if rows < 2:
            raise MethodError(
                f"sobol on a grid of {cells[0]}x{cells[1]} takes {count + 2} passes a row, and at least two rows; "
                f"passes={self.passes} are too few (make them {2 * (count + 2)}, or the grid coarser)"
            )
        design = _SobolDesign(count, self.seed)
        hidden = Filler(x, self.fill).hidden_entirely()

        def make(start: int, stop: int) -> Tensor:
            shown = design(start, stop).reshape(-1, 1, *cells)
            masks = self.enlarged(shown.to(x.device, torch.float32), (int(x.shape[2]), int(x.shape[3])))
            return torch.lerp(hidden, x, masks.to(x.dtype))

        passes.least = 2 * (count + 2)
        estimate = TotalOrder(count, _rounding(x, score))
        for _ in _taken(passes, make, rows * (count + 2), estimate, count + 2):
            if passes.enough(estimate):
                break
        if estimate.count < 2:
            _give_up(passes, f"sobol needs two rows of its design, {passes.least} passes")
        return self.painted(estimate, passes, cells)

    def enlarged(self, maps: Tensor, size: tuple[int, int]) -> Tensor:
        """Interpolated, as by the authors: hard edges would be seen by the model."""
        return F.interpolate(maps, size, mode="bilinear", align_corners=False)


class HSIC(GridAttribution):
    """How far the score depends on whether a cell is shown, in any way whatever, under random masks.

    The Hilbert-Schmidt independence criterion of each cell's bit, which is shown or hidden with even odds, and the
    score. The kernel of the bit is the identity's, delta - 1/2, that of the score a Gaussian whose width is the median
    distance of scores. Bits come from Latin hypercubes of 64 samples: each cell is shown in just half of them.

    Args:
        model: As for every method.
        grid: The number of cells along each edge.
        fill: What stands where a cell is hidden: see `saliency.methods.perturbation.fills.FillLike`.
        **sampling: See `saliency.attribution.options.SamplingOptions`.

    Values: (N, 1, H, W), without a unit: the criterion less what chance alone gives it, so that it is about 0, of
    either sign, for a cell that the score does not depend on. The error is that of a U-statistic, from the first two
    terms of its Hoeffding decomposition; the width of the kernel counts as known.

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
    quick_options: ClassVar[Mapping[str, Any]] = {"grid": 3, "passes": 16}

    def __init__(
        self, model: nn.Module, *, grid: int = 7, fill: FillLike = 0.0, **sampling: Unpack[SamplingOptions]
    ) -> None:
        super().__init__(model, grid=grid, fill=fill, **sampling)

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """The dependence of the score on each cell."""
        if self.most_passes < 4:
            raise MethodError(f"passes={self.passes} are too few for a dependence; hsic takes at least 4")
        x = passes.x
        cells = self.cells_of(x)
        design = _HypercubeDesign(cells[0] * cells[1], self.seed)
        filler = Filler(x, self.fill)

        def make(start: int, stop: int) -> Tensor:
            shown = design(start, stop).reshape(-1, 1, *cells).to(x.device, torch.float32)
            return filler(self.enlarged(shown, (int(x.shape[2]), int(x.shape[3]))) < 0.5)

        passes.least = 4
        estimate = Dependence(design, _rounding(x, score))
        due = 32  # each look at the error takes time with the square of the samples, so looks become rarer
        for _ in _taken(passes, make, self.most_passes, estimate, 1):
            if estimate.count >= due and estimate.count % 16 == 0:
                due = estimate.count * 5 // 4
                if passes.enough(estimate):
                    break
        if estimate.count < 4:
            _give_up(passes, "hsic needs 4 passes")
        return self.painted(estimate, passes, cells)

    def enlarged(self, maps: Tensor, size: tuple[int, int]) -> Tensor:
        """Each pixel belongs to one cell."""
        return F.interpolate(maps, size, mode="nearest-exact")


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
        """The masks (k, cells) of passes `start` to `stop`."""
        at = torch.arange(start, stop, device="cpu")
        row, place = at // (self.cells + 2), at % (self.cells + 2)
        while len(self._points) <= int(row[-1]):  # by powers of two, for which the points are most even
            drawn = torch.from_numpy(self._engine.random(max(32, len(self._points))))
            self._points = torch.cat([self._points, drawn])
        first, second = self._points[row, : self.cells], self._points[row, self.cells :]
        swapped = (torch.arange(self.cells, device="cpu") == place[:, None] - 2) | (place[:, None] == 1)
        return torch.where(swapped, second, first)


class _HypercubeDesign:
    """Bits in blocks: in each, every cell is shown in half of the samples, cell by cell in an order of its own.

    That is a Latin hypercube whose numbers are rounded to 0 or 1.
    """

    block = 64

    def __init__(self, cells: int, seed: int) -> None:
        self.cells, self.seed = cells, seed

    def __call__(self, start: int, stop: int) -> Tensor:
        """The bits (k, cells), 1 for shown, of samples `start` to `stop`."""
        first, last = start // self.block, (stop - 1) // self.block
        blocks = [self._block(number) for number in range(first, last + 1)]
        return torch.cat(blocks)[start - first * self.block : stop - first * self.block]

    def _block(self, number: int) -> Tensor:
        drawn = torch.rand(
            self.block, self.cells, generator=generator(self.seed, number), dtype=torch.float64, device="cpu"
        )
        return (drawn.argsort(0) < self.block // 2).double()


def _taken(passes: PassRunner, make: MakeInputs, count: int, estimate: Estimate, together: int) -> Iterator[None]:
    """Run the passes and let the estimate take in their scores, `together` at a time; a rest that is no row is left."""
    waiting: list[float] = []
    for done in passes.forwards(make, count):
        for score in done.scores.tolist():
            waiting.append(score)
            if len(waiting) == together:
                estimate.add(torch.tensor([waiting], dtype=torch.float64, device="cpu"))
                waiting = []
                yield


def _give_up(passes: PassRunner, why: str) -> NoReturn:
    raise MethodError(f"{why}, and {passes.used} were made before the limit was met; allow for more")


def _rounding(x: Tensor, score: Tensor) -> float:
    """The standard deviation of scores, as a share of the largest, that may be rounding alone.

    In half precision, sums run in single precision and each layer's output is rounded once. Under a last-bit change of
    the input, the top scores of four networks spread by up to 0.45 of an eps there, and by up to 1.8 in float32.
    """
    coarsest = max(x.dtype, score.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    summed = torch.promote_types(coarsest, torch.float32)
    return max(torch.finfo(coarsest).eps, 64 * torch.finfo(summed).eps)


def _type_of(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
