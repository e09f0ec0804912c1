"""Values of segments, from scores of images that show some of them: LIME, KernelSHAP and Shapley sampling."""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..attribution.estimates import ScoreEstimate, generator
from ..attribution.options import Option
from ..attribution.passes import ImageAttribution, Passes, SampledAttribution
from ..errors import warn
from ..validation import check_number
from .baselines import Filler
from .segments import SegmentAttribution, Segments


class Regression(NamedTuple):
    """Coefficients of a weighted least-squares fit."""

    coefficients: Tensor  # (K,)
    residuals: Tensor  # (n,)
    errors: Tensor  # (K,)


def regression(
    design: Tensor, scores: Tensor, weights: Tensor, penalty: float = 0.0, leverage: Tensor | float = 0.0
) -> Regression:
    """Fit scores by a linear function; if the solution is not unique, with the smallest coefficients.

    The standard errors hold under any distribution of the residuals: White's sandwich, with each residual divided by
    the root of 1 minus its leverage (HC2). This corrects for residuals that the fit makes too small.

    Args:
        design: (n, K) the variables.
        scores: (n,)
        weights: (n,) the weight of each sample.
        penalty: The weight of the squared coefficients.
        leverage: The leverage (n,) of an intercept that was removed before.

    Source: MacKinnon and White, "Some Heteroskedasticity-consistent Covariance Matrix Estimators with Improved Finite
        Sample Properties" (1985), https://doi.org/10.1016/0304-4076(85)90158-7.
    """
    ridge = penalty * torch.eye(design.shape[1], dtype=design.dtype, device=design.device)
    normal = design.T @ (weights[:, None] * design) + ridge
    inverse = torch.linalg.pinv(normal, hermitian=True, rtol=1e-10)
    influence = weights[:, None] * (design @ inverse)  # (n, K)
    coefficients = influence.T @ scores
    residuals = scores - design @ coefficients
    corrected = residuals / (1 - leverage - (influence * design).sum(1)).clamp(min=1e-6).sqrt()
    return Regression(coefficients, residuals, (corrected[:, None] * influence).square().sum(0).sqrt())


class Coalitions(ScoreEstimate):
    """Map (1, H, W) of segments, from the scores of images of which only some segments are shown.

    The segments that a pass shows depend only on its number. A subclass implements `row` and `fit`.

    Args:
        segments: The segments.
        filler: The filler of hidden segments.
        score: () the score of the whole image.
        seed: The seed of all draws.
    """

    def __init__(self, segments: Segments, filler: Filler, score: Tensor, seed: int) -> None:
        super().__init__()
        self.segments, self.seed, self.notes = segments, seed, [segments.note]
        self.full = float(score)
        self.rows = torch.zeros(0, segments.count, dtype=torch.bool, device="cpu")  # segments shown in each pass
        self._filler = filler

    @abstractmethod
    def row(self, number: int) -> Tensor:
        """Return which segments a pass shows, boolean (M,)."""

    @abstractmethod
    def fit(self, part: slice) -> tuple[Tensor, Tensor | None]:
        """Return the values (M,) from some of the samples so far, and their standard errors or None."""

    def _rows(self, start: int, stop: int) -> Tensor:
        return torch.stack([self.row(number) for number in range(start, stop)])

    def run(self, passes: Passes, count: int) -> None:
        """Run up to `count` passes, until a limit is reached."""

        def make(start: int, stop: int) -> Tensor:
            return self._filler(self.segments.hidden(self._rows(start, stop)))

        for done in passes.forwards(make, count, estimate=self):
            self.rows = torch.cat([self.rows, self._rows(self.count, self.count + len(done.scores))])
            self.add(done.scores)

    def solve(self, part: slice) -> tuple[Tensor, Tensor | None]:
        """Return the maps of the values and of their standard errors."""
        values, errors = self.fit(part)
        return self.segments.painted(values), None if errors is None else self.segments.painted(errors)


class CoalitionSampling(SegmentAttribution, SampledAttribution):
    """Base class of methods that show many combinations of segments."""

    def result(self, estimate: Coalitions, like: Tensor, least: int, *, is_complete: bool) -> ImageAttribution:
        """Return the attribution of an estimate; warn about fewer than the `least` passes that determine the values.

        Args:
            estimate: The estimate.
            like: A tensor of the type of the result.
            least: The number of passes that determine the values.
            is_complete: Whether the values sum to the score minus the score of the first pass.
        """
        count, notes = estimate.segments.count, [*estimate.notes]
        if estimate.count < least:
            notes.append(f"far too few passes for {count} segments")
            warn(
                f"{self.name}: {estimate.count} passes do not determine the values of {count} segments; allow for at "
                f"least {least}, and several times that number for precise values, or use fewer segments"
            )
        values, error = estimate.solve(slice(None))
        residual = estimate.full - float(estimate.scores[0]) - float(values.sum()) if is_complete else None
        error = None if error is None else error.to(like)
        return ImageAttribution(values.to(like), error, estimate.agreement, residual, notes=notes)


class LIME(CoalitionSampling):
    """Coefficients of a linear model that predicts the score from the visible segments, near the whole image.

    Formula: S_i = β_s / |s|, with s the segment of pixel i, and β = argmin Σ_T exp(−d² / (2w²)) (y(T) − β_0 − Σ_s∈T
    β_s)² over sets T of k of the M segments, with d = 1 − √(k/M).

    Each pass shows every segment with probability 1/2. The scores are regressed on the shown segments, with an
    intercept and with weights exp(-d^2 / (2 width^2)), where d = 1 - sqrt(k / M) is the cosine distance between k shown
    segments and all M. The image itself is one more sample, of weight 1. (The 2 is in the authors' code, not in the
    paper.)

    `run_stats[0].note` gives the weighted variance that the linear model explains, adjusted for the number of its
    coefficients (for n samples, the residual variance has n - M - 1 degrees of freedom). The standard errors hold for a
    weighted regression under any distribution of its residuals (White's sandwich, each residual divided by the root of
    1 minus its leverage). In simulations with at least 1.6 times as many samples as coefficients, they were accurate to
    7 %. With no more samples than coefficients, M + 1, they are None and a warning is issued; the values are then the
    smallest coefficients that fit.

    Args:
        width: The width of the weights, in units of the cosine distance.
        penalty: The weight of the squared coefficients in a ridge regression, in units of a sample of weight 1. The
            penalty shrinks the coefficients by about 4 penalty / (sum of weights), which the errors do not include. The
            authors' code uses 1; with 0, the default, an additive model is recovered exactly.

    Values: (N, 1, H, W), signed, in score units per pixel: the coefficient of a segment, divided evenly among its
    pixels.

    Source: Ribeiro et al., "Why Should I Trust You?" (2016), https://arxiv.org/abs/1602.04938.
    """

    name = "lime"
    cost = "1000 forwards"
    default_passes = 1000
    preview_options: ClassVar = {"segments": (2, 2), "passes": 16}

    width: Option[float] = Option(0.25, check_number, least=1e-3)
    penalty: Option[float] = Option(0.0, check_number, least=0)

    def explain_image(self, passes: Passes, score: Tensor) -> ImageAttribution:
        """Compute the coefficients of the regression."""
        estimate = _LimeRegression(*self.segmented(passes.x), score, self.seed)
        estimate.width, estimate.penalty = self.width, self.penalty
        estimate.run(passes, self.most_passes)
        result = self.result(estimate, passes.x, estimate.segments.count + 1, is_complete=False)
        if estimate.samples <= estimate.segments.count + 1:
            return result
        note = f"the linear model explains {estimate.explained():.0%} of the weighted variance"
        return result._replace(notes=[*result.notes, note])


class _LimeRegression(Coalitions):
    """The weighted regression, with the whole image as its first sample."""

    width: float
    penalty: float

    @property
    def samples(self) -> int:
        return self.count + 1

    def row(self, number: int) -> Tensor:
        draws = generator(self.seed, number)
        return torch.rand(self.segments.count, generator=draws, dtype=torch.float32, device="cpu") < 0.5

    def fit(self, part: slice) -> tuple[Tensor, Tensor | None]:
        fit, _, _ = self._fit(part)
        return fit.coefficients, fit.errors if len(fit.residuals) > self.segments.count + 1 else None

    def explained(self) -> float:
        """Return the fraction of the weighted variance that the model explains, adjusted for its coefficients."""
        fit, scores, weights = self._fit(slice(None))
        free = len(scores) - self.segments.count - 1
        total = float(weights @ scores.square()) / (len(scores) - 1)
        return 1 - float(weights @ fit.residuals.square()) / free / total if total else 1.0

    def _fit(self, part: slice) -> tuple[Regression, Tensor, Tensor]:
        """Return the fit of some samples, and their scores minus the weighted mean (n,) and weights (n,)."""
        visible = torch.cat([self.rows.new_ones(1, self.segments.count), self.rows])[part].double()
        scores = torch.cat([self.scores.new_zeros(1), self.scores - self.full])[part]
        weights = torch.exp(-(1 - visible.mean(1).sqrt()).square() / (2 * self.width**2))
        # After subtracting the weighted means, no intercept is needed.
        fractions = weights / weights.sum()
        visible, scores = visible - fractions @ visible, scores - fractions @ scores
        return regression(visible, scores, weights, self.penalty, fractions), scores, weights


class KernelSHAP(CoalitionSampling):
    """Shapley values of segments, from a weighted linear regression of the score on the visible segments.

    Formula: S_i = φ_s / |s|, with s the segment of pixel i, and φ = argmin Σ_T w_T (y(T) − y(∅) − Σ_s∈T φ_s)² over sets
    T of k of the M segments, with w_T = (M − 1) / (C(M, k) k (M − k)) and Σ_s φ_s = y(x) − y(∅).

    If all combinations are included, each with the weight (M - 1) / (C(M, k) k (M - k)) for k of M shown segments, the
    coefficients of the regression are the Shapley values. If `passes` (by default 2000) allow for all 2^M - 1, all are
    run and the values are exact. Otherwise combinations are drawn in proportion to these weights, each with its
    complement (Covert and Lee), which cancels interactions of any even order. The regression fixes the sum of the
    values at f(x) - f(x'), where x' is the image with all segments hidden.

    The standard errors hold for any distribution of the regression's residuals (White's sandwich, each residual divided
    by the root of 1 minus its leverage). In simulations with at least 1.6 times as many pairs as segments, they were
    accurate to 7 %. With fewer pairs than segments they are None and a warning is issued; the values are then the
    smallest that fit.

    Values: (N, 1, H, W), signed, in score units per pixel: the value of a segment, divided evenly among its pixels.
    They sum to f(x) - f(x').

    Source: Lundberg and Lee, "A Unified Approach to Interpreting Model Predictions" (2017),
        https://arxiv.org/abs/1705.07874; Covert and Lee, "Improving KernelSHAP" (2020),
        https://arxiv.org/abs/2012.01536.
    """

    name = "kernel_shap"
    cost = "2000 forwards"
    default_passes = 2000
    preview_options: ClassVar = {"segments": (2, 3), "passes": 21}

    def explain_image(self, passes: Passes, score: Tensor) -> ImageAttribution:
        """Solve the regression."""
        estimate = _KernelRegression(*self.segmented(passes.x), score, self.seed)
        count = estimate.segments.count
        most = min(self.most_passes, max(self.default_passes, self.passes or 0))
        estimate.includes_all = count < 30 and 2**count - 1 <= most
        estimate.run(passes, 2**count - 1 if estimate.includes_all else self.most_passes)
        result = self.result(estimate, passes.x, 0 if estimate.is_exact else 2 * count + 1, is_complete=True)
        return result._replace(notes=[*result.notes, "all combinations"]) if estimate.is_exact else result


class _KernelRegression(Coalitions):
    """The regression, on pairs of a combination and its complement. Pass 0 shows nothing.

    The sum of the values is fixed, so the sum of a pair's scores carries no information. Half the difference of the
    scores is regressed on half the difference of the shown segments, +1/2 or -1/2 for each segment.
    """

    includes_all = False

    @property
    def is_exact(self) -> bool:
        """Whether all combinations were run."""
        return self.includes_all and self.count == 2**self.segments.count - 1

    @property
    def samples(self) -> int:
        return 0 if self.includes_all else (self.count - 1) // 2

    @cached_property
    def _order(self) -> Tensor:
        """All pairs in random order, so that a time limit leaves a random part of them."""
        return torch.randperm(2 ** (self.segments.count - 1) - 1, generator=generator(self.seed), device="cpu")

    @cached_property
    def _size_limits(self) -> Tensor:
        """The cumulative weights (M - 1,) of the combinations of 1 to M - 1 segments."""
        sizes = torch.arange(1, self.segments.count, dtype=torch.float64, device="cpu")
        return (1 / (sizes * (self.segments.count - sizes))).cumsum(0)

    def row(self, number: int) -> Tensor:
        count, row = self.segments.count, torch.zeros(self.segments.count, dtype=torch.bool, device="cpu")
        if not number:
            return row
        pair, is_complement = divmod(number - 1, 2)
        if self.includes_all:  # all combinations without the last segment; their complements contain it
            row = (self._order[pair] + 1 >> torch.arange(count, device="cpu")) & 1 == 1
        else:
            draws = generator(self.seed, pair)
            draw = torch.rand((), generator=draws, dtype=torch.float64, device="cpu") * self._size_limits[-1]
            size = min(int(torch.searchsorted(self._size_limits, draw, right=True)), count - 2) + 1
            row[torch.randperm(count, generator=draws, device="cpu")[:size]] = True
        return ~row if is_complement else row

    def fit(self, part: slice) -> tuple[Tensor, Tensor | None]:
        count, pairs = self.segments.count, (self.count - 1) // 2
        rows = self.rows[1 : 2 * pairs : 2][part]
        mean = (self.full - float(self.scores[0])) / count
        visible = rows.double() - 0.5
        scores = self.scores[1 : 2 * pairs + 1].view(-1, 2)[part]
        halves = (scores[:, 0] - scores[:, 1]) / 2 - visible.sum(1) * mean
        sizes = rows.sum(1).tolist() if self.includes_all else []
        weights = [1 / (math.comb(count, k) * k * (count - k)) for k in sizes] or [1.0] * len(rows)
        # Subtract the fixed sum: the regression then determines the differences between segments.
        fit = regression(visible - visible.mean(1, keepdim=True), halves, halves.new_tensor(weights))
        errors = fit.errors if len(rows) >= count and not self.includes_all else None
        return fit.coefficients + mean, torch.zeros_like(fit.coefficients) if self.is_exact else errors


class ShapleySampling(CoalitionSampling):
    """Shapley values of segments, by showing them one by one in random orders.

    Formula: S_i = φ_s / |s|, with s the segment of pixel i, and φ_s the mean over orders of y(T and s) − y(T), with T
    the segments before s.

    The value of a segment is the gain of the score when it is added, averaged over orders. Orders are drawn in pairs,
    an order and its reverse (Mitchell et al.), so a segment that is early in one is late in the other. Each order sums
    to f(x) - f(x'), where x' is the image with all segments hidden, and takes M - 1 passes for M segments. A pair that
    a limit cuts short is left out, unless it is the only pair. Then the remaining difference is divided evenly among
    the segments that were not reached.

    The standard errors are computed for a mean over independent pairs; None for fewer than two.

    Values: (N, 1, H, W), signed, in score units per pixel: the value of a segment, divided evenly among its pixels.
    They sum to f(x) - f(x').

    Source: Castro et al., "Polynomial Calculation of the Shapley Value Based on Sampling" (2009),
        https://doi.org/10.1016/j.cor.2008.04.004; Mitchell et al., "Sampling Permutations for Shapley Value
        Estimation" (2021), https://arxiv.org/abs/2104.12199.
    """

    name = "shapley_sampling"
    cost = "2000 forwards"
    default_passes = 2000
    preview_options: ClassVar = {"segments": (2, 2), "passes": 25}

    def explain_image(self, passes: Passes, score: Tensor) -> ImageAttribution:
        """Compute the mean gains over the pairs of orders."""
        estimate = _Orders(*self.segmented(passes.x), score, self.seed)
        length = estimate.pair_length
        pairs = (self.most_passes - 1) // max(length, 1)
        estimate.run(passes, 1 + pairs * length if pairs else self.most_passes)
        return self.result(estimate, passes.x, 1 + length, is_complete=True)


class _Orders(Coalitions):
    """Gains of the segments in pairs of opposite orders. Pass 0 shows nothing, later passes show begun orders."""

    least_samples = 8

    @property
    def pair_length(self) -> int:
        """The number of passes of a pair of orders."""
        return 2 * (self.segments.count - 1)

    @property
    def samples(self) -> int:
        return (self.count - 1) // self.pair_length if self.pair_length else 0

    def row(self, number: int) -> Tensor:
        row = torch.zeros(self.segments.count, dtype=torch.bool, device="cpu")
        if number:
            pair, step = divmod(number - 1, self.pair_length)
            order, half = self._order(pair), self.pair_length // 2
            row[order[: step + 1] if step < half else order[half - step - 1 :]] = True
        return row

    def _order(self, pair: int) -> Tensor:
        return torch.randperm(self.segments.count, generator=generator(self.seed, pair), device="cpu")

    def fit(self, part: slice) -> tuple[Tensor, Tensor | None]:
        if not self.samples:
            values = self._first_order()
            return values, torch.zeros_like(values) if self.segments.count == 1 else None
        orders = torch.stack([self._order(pair) for pair in range(self.samples)])  # (n, M)
        ends = self.scores.new_tensor([float(self.scores[0]), self.full]).expand(self.samples, 2)
        paths = self.scores[1 : 1 + self.samples * self.pair_length].view(self.samples, 2, -1)
        gains, reverse = (torch.cat([ends[:, :1], paths[:, i], ends[:, 1:]], 1).diff(dim=1) for i in range(2))
        means = torch.empty_like(gains).scatter_(1, orders, (gains + reverse.flip(1)) / 2)[part]
        return means.mean(0), means.std(0) / len(means) ** 0.5 if len(means) > 1 else None

    def _first_order(self) -> Tensor:
        """Return the gains (M,) along an incomplete first order. The other segments get equal parts of the rest."""
        path = self.scores[: self.segments.count]  # nothing shown, then the beginnings of the order
        reached = len(path) - 1
        rest = (self.full - float(path[-1])) / (self.segments.count - reached)
        gains = path.new_full((self.segments.count,), rest)
        gains[self._order(0)[:reached]] = path.diff()
        return gains
