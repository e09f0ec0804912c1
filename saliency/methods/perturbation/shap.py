"""Shapley values of the parts of a picture: what each adds to the score, on average over all orders of showing them."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from ...engine.multi_pass import ImageAttribution, generator
from ...engine.runner import PassRunner
from .feature_ablation import Coalitions, CoalitionSampling, Parts, Solution, standard_errors


class _Shapley(CoalitionSampling):
    """What both estimates of the Shapley values share: the pass with nothing shown comes first."""

    def complete(self, estimate: Coalitions, score: Tensor) -> ImageAttribution:
        """The estimate, and how far its sum misses f(x) - f(x') by rounding."""
        found = estimate.parts.found(estimate, score)
        missed = estimate.full - float(estimate.scores[0]) - float(found.values.double().sum())
        return found._replace(residual=missed)


class KernelSHAP(_Shapley):
    """Shapley values of the parts of a picture, by a weighted regression of the score on which parts are shown.

    The coefficients of that regression are the Shapley values where all combinations are in it and each has the weight
    (M - 1) / (C(M, k) k (M - k)) of the k of M parts that it shows. Where `passes` (by default 2000) allow for all
    2^M - 1, they are all run and the values are exact; else combinations are drawn in proportion to these weights, each
    along with its complement (Covert and Lee), which makes interactions of any even order cancel. The sum is held at
    f(x) - f(x') by the regression itself, with x' the picture of which nothing is shown.

    The standard errors are those of the regression under any distribution of its residuals (White's sandwich, each
    residual over the root of 1 less its leverage). In simulations they were right to 7 % from 1.6 times as many pairs
    as parts on. They are None for fewer pairs than parts, with a warning, where the smallest of all values that fit are
    given.

    Args:
        model: As for every method.
        segments: As for `FeatureAblation`.
        fill: As for `FeatureAblation`.
        **sampling: See `saliency.attribution.options.SamplingOptions`.

    Values: (N, 1, H, W), signed, in score units per pixel: a part's value shared out evenly among its pixels. They sum
    to f(x) - f(x').

    Raises:
        MethodError: An option that makes no sense, or does not fit the image.
        TargetError: The target does not fit the model's output.

    Source: Lundberg and Lee, "A Unified Approach to Interpreting Model Predictions" (2017),
        https://arxiv.org/abs/1705.07874; Covert and Lee, "Improving KernelSHAP" (2020),
        https://arxiv.org/abs/2012.01536.
    """

    name = "kernel_shap"
    cost = "2000 forwards"
    samples = 2000
    quick_options: ClassVar = {"segments": (2, 3), "passes": 21}

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """The solution of the regression."""
        parts = self.parts(passes)
        most = min(self.most_passes, max(self.samples, self.passes or 0))
        every = parts.count < 30 and 2**parts.count - 1 <= most
        estimate = _Kernel(parts, score, self.seed, every)
        self.fill_in(estimate, passes, 2**parts.count - 1 if every else self.most_passes)
        if estimate.is_exact:
            passes.notes.append("all combinations")
        else:
            self.warn_of_few(passes, parts, 2 * parts.count + 1)
        return self.complete(estimate, score)


class _Kernel(Coalitions):
    """The regression, on pairs of a combination and its complement.

    The sum of the values is given, so the regression says nothing of the sum of a pair's scores: what is regressed is
    half the difference of the scores on half the difference of what is shown, +1/2 or -1/2 for each part.
    """

    def __init__(self, parts: Parts, score: Tensor, seed: int, every: bool) -> None:
        super().__init__(parts, score, seed)
        self._every = every
        self._rows: list[Tensor] = []  # what the first of each pair shows
        sizes = torch.arange(1, parts.count, dtype=torch.float64, device="cpu")
        self._until = (1 / (sizes * (parts.count - sizes))).cumsum(0)
        # In any order, so that what comes before an interrupt is a fair part of it.
        pairs = 2 ** (parts.count - 1) - 1 if every else 0
        self._order = torch.randperm(pairs, generator=generator(seed), device="cpu")

    @property
    def is_exact(self) -> bool:
        """Whether all combinations were run."""
        return self._every and self.count == 2**self.parts.count - 1

    def shown(self, start: int, stop: int) -> Tensor:
        """Nothing in pass 0, then combinations and their complements by turns."""
        rows = [self._combination((each - 1) // 2) for each in range(start, stop) if each]
        flipped = [row if each % 2 else ~row for each, row in zip(range(max(start, 1), stop), rows, strict=True)]
        nothing = [torch.zeros(self.parts.count, dtype=torch.bool, device="cpu")] * (start == 0)
        return torch.stack(nothing + flipped)

    def _combination(self, pair: int) -> Tensor:
        many = self.parts.count
        if self._every:  # all without the last part; the complements are all with it
            return (self._order[pair] + 1 >> torch.arange(many, device="cpu")) & 1 == 1
        draws = generator(self.seed, pair)
        at = torch.rand((), generator=draws, dtype=torch.float64, device="cpu") * self._until[-1]
        size = min(int(torch.searchsorted(self._until, at, right=True)), many - 2) + 1
        row = torch.zeros(many, dtype=torch.bool, device="cpu")
        row[torch.randperm(many, generator=draws, device="cpu")[:size]] = True
        return row

    def take(self, scores: Tensor) -> None:
        """Take in scores, and what the first of each new pair has shown."""
        super().take(scores)
        pairs = (self.count - 1) // 2
        self._rows += [self._combination(pair) for pair in range(len(self._rows), pairs)]

    def solve(self) -> Solution:
        """The values, and their standard errors where they are known."""
        shown, halves = self._pairs()
        values, inverse, left = self._fitted(shown, halves)
        many, count = self.parts.count, len(shown)
        if self.is_exact:
            return Solution(values, torch.zeros_like(values))
        if self._every or count < many:
            return Solution(values, None)
        return Solution(values, standard_errors(shown, torch.ones_like(left), left, inverse))

    def halves(self) -> tuple[Tensor, Tensor] | None:
        """The values from every other pair, and from those between."""
        shown, halves = self._pairs()
        if self._every or len(shown) < 4:
            return None
        return self._fitted(shown[::2], halves[::2])[0], self._fitted(shown[1::2], halves[1::2])[0]

    def _pairs(self) -> tuple[Tensor, Tensor]:
        """Half the differences in what is shown (n, M), without their mean over the parts, and in score (n,).

        What the given sum says is taken off the scores; what is left says how the parts differ from each other.
        """
        many, pairs = self.parts.count, len(self._rows)
        scores = self.scores
        if not pairs:
            return scores.new_zeros(0, many), scores.new_zeros(0)
        rows = torch.stack(self._rows)
        shown = rows.double() - 0.5
        scored = scores[1 : 2 * pairs + 1].view(pairs, 2)
        halves = (scored[:, 0] - scored[:, 1]) / 2 - shown.sum(1) * ((self.full - float(scores[0])) / many)
        shown = shown - shown.mean(1, keepdim=True)
        if not self._every:
            return shown, halves
        weights = [1 / (math.comb(many, k) * k * (many - k)) for k in rows.sum(1).tolist()]
        root = scores.new_tensor(weights).sqrt()
        return shown * root[:, None], halves * root

    def _fitted(self, shown: Tensor, halves: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The values (M,), the inverse of the normal equations (M, M), and what the fit leaves of each pair (n,)."""
        many = self.parts.count
        inverse = torch.linalg.pinv(shown.T @ shown, hermitian=True, rtol=1e-10)
        apart = inverse @ (shown.T @ halves)  # sums to 0
        return apart + (self.full - float(self.scores[0])) / many, inverse, halves - shown @ apart


class ShapleySampling(_Shapley):
    """Shapley values of the parts of a picture, by showing them one after the other in random orders.

    A part's value is what the score gains when it is added, on average over orders that are drawn in pairs: one and its
    reverse (Mitchell et al.), so that what comes early in one comes late in the other. Each order sums to
    f(x) - f(x'), with x' the picture of which nothing is shown, and takes M - 1 passes for M parts. A pair that a limit
    cuts short is left out, unless there is no other; then the parts that were not reached share what is left evenly.

    The standard errors are those of a mean over independent pairs; None for fewer than two.

    Args:
        model: As for every method.
        segments: As for `FeatureAblation`.
        fill: As for `FeatureAblation`.
        **sampling: See `saliency.attribution.options.SamplingOptions`.

    Values: (N, 1, H, W), signed, in score units per pixel: a part's value shared out evenly among its pixels. They sum
    to f(x) - f(x').

    Raises:
        MethodError: An option that makes no sense, or does not fit the image.
        TargetError: The target does not fit the model's output.

    Source: Castro et al., "Polynomial Calculation of the Shapley Value Based on Sampling" (2009),
        https://doi.org/10.1016/j.cor.2008.04.004; Mitchell et al., "Sampling Permutations for Shapley Value
        Estimation" (2021), https://arxiv.org/abs/2104.12199.
    """

    name = "shapley_sampling"
    cost = "2000 forwards"
    samples = 2000
    quick_options: ClassVar = {"segments": (2, 2), "passes": 25}

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """The mean gains over the pairs of orders."""
        parts = self.parts(passes)
        estimate = _Orders(parts, score, self.seed)
        whole = (self.most_passes - 1) // max(estimate.per_pair, 1)
        self.fill_in(estimate, passes, 1 + whole * estimate.per_pair if whole else self.most_passes)
        self.warn_of_few(passes, parts, 1 + estimate.per_pair)
        return self.complete(estimate, score)


class _Orders(Coalitions):
    """What each part adds, in pairs of opposite orders: pass 0 shows nothing, then come the orders' beginnings."""

    LEAST = 8
    """The pairs below which their spread says too little to stop by."""

    def __init__(self, parts: Parts, score: Tensor, seed: int) -> None:
        super().__init__(parts, score, seed)
        self.per_pair = 2 * (parts.count - 1)

    def shown(self, start: int, stop: int) -> Tensor:
        """The first 1 to M - 1 parts of an order, then the last 1 to M - 1."""
        shown = torch.zeros(stop - start, self.parts.count, dtype=torch.bool, device="cpu")
        for row, number in zip(shown, range(start, stop), strict=True):
            if number:
                pair, at = divmod(number - 1, self.per_pair)
                order, half = self._order(pair), self.per_pair // 2
                row[order[: at + 1] if at < half else order[-(at - half + 1) :]] = True
        return shown

    def _order(self, pair: int) -> Tensor:
        return torch.randperm(self.parts.count, generator=generator(self.seed, pair), device="cpu")

    def solve(self) -> Solution:
        """The mean over the pairs and its standard error."""
        gains = self._gains()
        if self.per_pair == 0:
            return Solution(gains[0], torch.zeros_like(gains[0]))
        spread = gains.std(0) / len(gains) ** 0.5 if len(gains) > 1 else None
        return Solution(gains.mean(0), spread)

    def halves(self) -> tuple[Tensor, Tensor] | None:
        """The values from every other pair, and from those between."""
        gains = self._gains()
        return (gains[::2].mean(0), gains[1::2].mean(0)) if len(gains) >= 4 else None

    @property
    def relative_error(self) -> float:
        """As for every estimate; infinite for few pairs."""
        enough = self.per_pair == 0 or (self.count - 1) // self.per_pair >= self.LEAST
        return super().relative_error if enough else math.inf

    def _gains(self) -> Tensor:
        """What each part adds, a row (M,) for each pair."""
        scores, many = self.scores, self.parts.count
        pairs = (self.count - 1) // self.per_pair if self.per_pair else 0
        if not pairs:
            return self._first_order(scores)[None]
        orders = torch.stack([self._order(pair) for pair in range(pairs)])  # (n, M)
        ends = torch.tensor([float(scores[0]), self.full], dtype=torch.float64, device="cpu").expand(pairs, 2)
        paths = scores[1 : 1 + pairs * self.per_pair].view(pairs, 2, many - 1)
        forth, back = (torch.cat([ends[:, :1], paths[:, i], ends[:, 1:]], 1).diff(dim=1) for i in range(2))
        return torch.empty_like(forth).scatter_(1, orders, (forth + back.flip(1)) / 2)

    def _first_order(self, scores: Tensor) -> Tensor:
        """The gains (M,) along the first order as far as it goes; the other parts share what is left."""
        many = self.parts.count
        path = scores[:many]  # nothing shown, then the first parts of the order
        reached = len(path) - 1
        gains = torch.full((many,), (self.full - float(path[-1])) / (many - reached), dtype=torch.float64, device="cpu")
        gains[self._order(0)[:reached]] = path.diff()
        return gains
