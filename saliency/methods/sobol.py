"""Sobol indices: the fraction of the variance of the score, under random masks of a grid, that involves a cell."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from ..attribution.estimates import ScoreEstimate
from ..attribution.options import Option
from ..attribution.passes import ImageAttribution, Passes, SampledAttribution
from ..errors import MethodError, optional_import
from ..io.axes import at_least_float32, resize
from ..validation import check_integer
from .baselines import Filler, FillOption

ROWS_IN_TIME = 4
"""With a time limit, the grid of Sobol indices is made coarser until this number of rows of the design fits."""


class TotalOrder(ScoreEstimate):
    """Total-order Sobol indices (cells,) by Jansen's estimator; zero if the score does not vary.

    A sample holds the scores of two masks A and B, and, for each cell, of A with the number of this cell from B.

    Args:
        cells: The number of cells.
        rounding: The standard deviation, as a fraction of the largest score, up to which scores are constant.

    Source: Jansen, "Analysis of variance designs for model output" (1999),
        https://doi.org/10.1016/S0010-4655(98)00154-4.
    """

    least_samples = 32

    def __init__(self, cells: int, rounding: float) -> None:
        super().__init__()
        self.passes_per_sample, self._rounding = cells + 2, rounding

    def solve(self, part: slice) -> tuple[Tensor, Tensor | None]:
        """Return the indices, and their errors by the delta method over the samples; None for a single sample."""
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


class Sobol(SampledAttribution):
    """Total-order Sobol index of each cell: the fraction of the score's variance, under random masks, that involves it.

    Formula: S_i = E(Var(y | all cells but i)) / Var y, over random masks.

    Every cell fades out by a random degree, 0 to 1. The total-order Sobol index of a cell includes all of its effects,
    alone and together with other cells. So the indices sum to 1 if the score is a sum over cells, and to more if cells
    interact. Jansen's estimator is used on scrambled Sobol points: each row of the design takes one pass per cell and
    two more. Passes after the last complete row are not used.

    Args:
        grid: The number of cells along each edge.
        fill: As for `RISE`.

    Values: (N, 1, H, W), not negative, dimensionless: the index of a cell, interpolated like the masks. The error is
    the standard error of a ratio of means over the rows, by the delta method, as if rows were independent. Sobol points
    are more even, so the true error tends to be smaller.

    Raises:
        DependencyError: SciPy is not installed.
        MethodError: Fewer passes than two rows of the design, or the fill "inpaint".

    Source: Fel et al., "Look at the Variance! Efficient Black-box Explanations with Sobol-based Sensitivity Analysis"
        (2021), https://arxiv.org/abs/2111.04138.
    """

    name = "sobol"
    sign = "positive"
    ignores_sign = True
    units = "fraction of the score's variance"
    cost = "2112 forwards"
    rows: ClassVar[int] = 32
    preview_options: ClassVar = {"grid": 2, "passes": 24}
    draft_options: ClassVar = {"grid": 4, "passes": 36}

    grid: Option[int] = Option(8, check_integer)
    fill: FillOption = FillOption(partial="sobol")

    def explain_image(self, passes: Passes, score: Tensor) -> ImageAttribution:
        """Compute the total effect of each cell, on a coarser grid if too few passes fit into the time."""
        x, coarser = passes.x, copy.copy(self)

        def trial(count: int) -> None:
            passes.scores(lambda start, stop: x.expand(stop - start, *x.shape[1:]), count, least=count)

        fitting = passes.budget.affordable(trial, ROWS_IN_TIME * self._length(x))
        while coarser.grid > 2 and ROWS_IN_TIME * coarser._length(x) > fitting:
            coarser.grid -= 1
        is_coarser = coarser.grid < self.grid
        notes = [f"a grid of {coarser.grid} cells along each edge, to fit into the time"] if is_coarser else []
        return coarser._explain_grid(passes, score, notes)

    def _length(self, x: Tensor) -> int:
        """Return the number of passes of a row. A cell has at least one pixel."""
        return math.prod(min(self.grid, edge) for edge in x.shape[2:]) + 2

    def _enlarged(self, cells: Tensor, x: Tensor) -> Tensor:
        """Enlarge numbers (k, cells) to the pixels (k, 1, H, W) of an image, at least float32.

        The interpolation is linear, as in the authors' code; hard edges would change the score.
        """
        grid = [min(self.grid, edge) for edge in x.shape[2:]]
        return resize(cells.view(-1, 1, *grid).to(at_least_float32(x)), x.shape[2:])

    def _explain_grid(self, passes: Passes, score: Tensor, notes: list[str]) -> ImageAttribution:
        """Compute the total effect of each cell."""
        x = passes.x
        length = self._length(x)
        rows = self.most_passes // length if self.passes or self.seconds or self.tolerance else self.rows
        design = sobol_masks(length - 2, rows, self.seed)
        background = Filler(x, self.fill).background

        def make(start: int, stop: int) -> Tensor:
            return torch.lerp(background, x, self._enlarged(design(start, stop), x).to(x.dtype))

        estimate = TotalOrder(length - 2, _rounding(x, score))
        trials, least = passes.budget.used, 2 * length

        def so_far() -> ImageAttribution | None:
            if estimate.count < least:
                return None
            cells, errors = estimate.solve(slice(None))
            warnings = [] if cells.any() else ["the score varied by no more than rounding"]
            error = None if errors is None else self._enlarged(errors, x)[0]
            return ImageAttribution(self._enlarged(cells, x)[0], error, estimate.agreement, notes=notes + warnings)

        for done in passes.forwards(make, rows * length, least=least, estimate=estimate, partial=so_far):
            estimate.add(done.scores)
        if (result := so_far()) is None:
            needed = f"{self.name} needs {trials + least} passes for a grid of {self.grid}"
            raise MethodError(f"{needed}, and {passes.budget.used} ran before the limit was met; allow more")
        return result


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
        numbers = torch.arange(start, stop, device="cpu")
        row, column = numbers // (cells + 2), (numbers % (cells + 2))[:, None]
        swapped = (torch.arange(cells, device="cpu") == column - 2) | (column == 1)
        return torch.where(swapped, second[row], first[row])

    return masks


def _rounding(x: Tensor, score: Tensor) -> float:
    """Return the standard deviation of scores, relative to the largest, that rounding alone may cause.

    In half precision, sums run in single precision and each layer's output is rounded once. When the last bit of the
    input changed, the top scores of four networks varied by up to 0.45 eps in half precision, and 1.8 eps in float32.
    """
    coarsest = max(x.dtype, score.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    summed = torch.promote_types(coarsest, torch.float32)
    return max(torch.finfo(coarsest).eps, 64 * torch.finfo(summed).eps)
