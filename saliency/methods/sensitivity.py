"""Sensitivity analysis: how much of what the score does, under random masks, goes back to each cell of a grid."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NoReturn, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attribution.options import Sampling
from ..engine.dependence import Dependence, TotalOrder
from ..engine.estimates import Estimate
from ..engine.multi_pass import Found, SampledAttribution, generator
from ..engine.runner import Make, Passes
from ..errors import MethodError
from ..validation import whole_number
from ..variants.fills import Filler, FillLike, as_fill


class GridAttribution(SampledAttribution):
    """A method that hides the cells of a grid at random.

    Args:
        model: As for every method.
        grid: The number of cells along each edge.
        fill: What stands where the image is hidden: see `saliency.variants.fills.FillLike`.
        **sampling: See `saliency.attribution.options.Sampling`.
    """

    sign = "positive"

    def __init__(self, model: nn.Module, *, grid: int = 8, fill: FillLike = 0.0, **sampling: Unpack[Sampling]) -> None:
        super().__init__(model, **sampling)
        self.grid = whole_number("grid", grid)
        self.fill = as_fill(fill)

    def cells_of(self, x: Tensor) -> tuple[int, int]:
        """The number of cells down and across, no smaller than a pixel each."""
        return min(self.grid, int(x.shape[2])), min(self.grid, int(x.shape[3]))

    def painted(self, estimate: Estimate, passes: Passes, cells: tuple[int, int]) -> Found:
        """An estimate of one number per cell, painted on the pixels (1, H, W), with its error."""
        mean, error = estimate.mean, estimate.error
        if not mean.any():
            passes.notes.append("the score varied by no more than rounding")
        return Found(
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
        fill: What an image fades into: see `saliency.variants.fills.FillLike`, without "inpaint".
        **sampling: See `saliency.attribution.options.Sampling`.

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
    trial: ClassVar[Mapping[str, Any]] = {"grid": 2, "passes": 24}

    def __init__(self, model: nn.Module, *, grid: int = 8, fill: FillLike = 0.0, **sampling: Unpack[Sampling]) -> None:
        super().__init__(model, grid=grid, fill=fill, **sampling)
        if self.fill == "inpaint":
            raise MethodError('sobol hides by degrees, which fill="inpaint" cannot; use "blur", "mean" or a number')

    @property
    def most_passes(self) -> int:
        """The most passes of an image; by default those of 32 rows of the design."""
        return super().most_passes if self._is_limited() else self.rows * (self.grid**2 + 2)

    def _is_limited(self) -> bool:
        return (self.passes, self.seconds, self.tolerance) != (None, None, None)

    def explain_image(self, passes: Passes, score: Tensor) -> Found:
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
        fill: What stands where a cell is hidden: see `saliency.variants.fills.FillLike`.
        **sampling: See `saliency.attribution.options.Sampling`.

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
    trial: ClassVar[Mapping[str, Any]] = {"grid": 3, "passes": 16}

    def __init__(self, model: nn.Module, *, grid: int = 7, fill: FillLike = 0.0, **sampling: Unpack[Sampling]) -> None:
        super().__init__(model, grid=grid, fill=fill, **sampling)

    def explain_image(self, passes: Passes, score: Tensor) -> Found:
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


def _taken(passes: Passes, make: Make, count: int, estimate: Estimate, together: int) -> Iterator[None]:
    """Run the passes and let the estimate take in their scores, `together` at a time; a rest that is no row is left."""
    waiting: list[float] = []
    for done in passes.forwards(make, count):
        for score in done.scores.tolist():
            waiting.append(score)
            if len(waiting) == together:
                estimate.add(torch.tensor([waiting], dtype=torch.float64, device="cpu"))
                waiting = []
                yield


def _give_up(passes: Passes, why: str) -> NoReturn:
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
