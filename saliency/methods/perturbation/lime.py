"""A linear model of the score near the picture, in terms of which of its parts are shown."""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch
from torch import Tensor, nn

from ...attribution.options import SamplingOptions
from ...engine.multi_pass import ImageAttribution, generator
from ...engine.runner import PassRunner
from ...validation import real_number
from .feature_ablation import SUPERPIXELS, Coalitions, CoalitionSampling, Parts, Solution, standard_errors
from .fills import FillLike
from .segments import SegmentsLike


class LIME(CoalitionSampling):
    """How the score goes with each part of the picture being shown, by a linear regression near the whole picture.

    Each pass shows every part with probability 1/2. The scores are regressed on what is shown, with an intercept and
    with weights exp(-d^2 / (2 width^2)), where d is the cosine distance of what is shown to all parts, 1 - sqrt(k / M)
    for k of M; the picture itself is one more sample, of weight 1. (The paper has no 2 there, the authors' code has.)

    The effort's note says how much of the weighted variance the linear model explains, adjusted for the number of its
    coefficients (for n samples, the residual variance has n - M - 1 degrees of freedom). The standard errors are those
    of a weighted regression under any distribution of its residuals (White's sandwich, each residual over the root of 1
    less its leverage). In simulations they were right to 7 % from 1.6 times as many samples as coefficients on. For no
    more samples than coefficients, M + 1, they are None and a warning says so; then the smallest of all coefficients
    that fit are given.

    Args:
        model: As for every method.
        segments: As for `FeatureAblation`.
        fill: As for `FeatureAblation`.
        width: How far from the whole picture a sample still counts, in units of the cosine distance.
        penalty: The weight of the squared coefficients in a ridge regression, in units of a sample of weight 1. It
            shrinks them, by about 4 penalty / (sum of weights), which the errors do not include. The authors' code
            takes 1; at 0, the default, an additive model is found exactly.
        **sampling: See `saliency.attribution.options.SamplingOptions`.

    Values: (N, 1, H, W), signed, in score units per pixel: a part's coefficient shared out evenly among its pixels.

    Raises:
        MethodError: An option that makes no sense, or does not fit the image.
        TargetError: The target does not fit the model's output.

    Source: Ribeiro et al., "Why Should I Trust You?" (2016), https://arxiv.org/abs/1602.04938.
    """

    name = "lime"
    cost = "1000 forwards"
    samples = 1000
    quick_options: ClassVar = {"segments": (2, 2), "passes": 16}

    def __init__(
        self,
        model: nn.Module,
        *,
        segments: SegmentsLike = SUPERPIXELS,
        fill: FillLike = 0.0,
        width: float = 0.25,
        penalty: float = 0.0,
        **sampling: Unpack[SamplingOptions],
    ) -> None:
        super().__init__(model, segments=segments, fill=fill, **sampling)
        self.width = real_number("width", width, least=1e-3)
        self.penalty = real_number("penalty", penalty, least=0)

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """The coefficients of the regression."""
        parts = self.parts(passes)
        estimate = _Regression(parts, score, self.seed, self.width, self.penalty)
        self.fill_in(estimate, passes, self.most_passes)
        found = parts.found(estimate, score)
        if estimate.explained is not None:
            passes.notes.append(f"the linear model explains {estimate.explained:.0%} of the weighted variance")
        self.warn_of_few(passes, parts, parts.count + 1)
        return found


class _Regression(Coalitions):
    """The weighted regression.

    Attributes:
        explained: The share of the weighted variance of the scores that the last fit explains, adjusted for the number
            of coefficients; None for no more samples than these.
    """

    def __init__(self, parts: Parts, score: Tensor, seed: int, width: float, penalty: float) -> None:
        super().__init__(parts, score, seed)
        self._width, self._penalty = width, penalty
        self.explained: float | None = None
        self._rows = [torch.ones(1, parts.count, dtype=torch.bool, device="cpu")]

    def shown(self, start: int, stop: int) -> Tensor:
        """Every part with probability 1/2."""
        draws = [
            torch.rand(self.parts.count, generator=generator(self.seed, each), dtype=torch.float32, device="cpu")
            for each in range(start, stop)
        ]
        return torch.stack(draws) < 0.5

    def take(self, scores: Tensor) -> None:
        """Take in scores, and what was shown."""
        self._rows.append(self.shown(self.count, self.count + len(scores)))
        super().take(scores)

    def solve(self) -> Solution:
        """The coefficients, and their standard errors where there are samples enough; `explained` on the way."""
        shown, scores, weights = self._samples()
        coefficients, intercept = self._fitted(shown, scores, weights)
        left = scores - shown @ coefficients - intercept
        count, many = shown.shape
        free = count - many - 1
        if free <= 0:
            return Solution(coefficients, None)
        total = float(weights @ (scores - (weights @ scores) / weights.sum()).square()) / (count - 1)
        self.explained = 1 - float(weights @ left.square()) / free / total if total else 1.0
        design = torch.cat([shown, torch.ones(count, 1, dtype=torch.float64, device="cpu")], 1)
        ridge = torch.diag(torch.tensor([self._penalty] * many + [0.0], dtype=torch.float64, device="cpu"))
        inverse = torch.linalg.pinv(design.T @ (weights[:, None] * design) + ridge, hermitian=True, rtol=1e-10)
        return Solution(coefficients, standard_errors(design, weights, left, inverse)[:many])

    def halves(self) -> tuple[Tensor, Tensor] | None:
        """The coefficients from every other sample, and from those between."""
        shown, scores, weights = self._samples()
        if len(shown) < 4:
            return None
        first, second = (self._fitted(shown[i::2], scores[i::2], weights[i::2])[0] for i in range(2))
        return first, second

    def _samples(self) -> tuple[Tensor, Tensor, Tensor]:
        """What is shown (n, M), the scores less that of the picture (n,), and the weights (n,); the picture first."""
        shown = torch.cat(self._rows).double()
        self._rows = [shown.bool()]
        scores = torch.cat([torch.zeros(1, dtype=torch.float64, device="cpu"), self.scores - self.full])
        distance = 1 - shown.mean(1).sqrt()
        return shown, scores, torch.exp(-distance.square() / (2 * self._width**2))

    def _fitted(self, shown: Tensor, scores: Tensor, weights: Tensor) -> tuple[Tensor, float]:
        """The coefficients (M,) and the intercept."""
        from sklearn.linear_model import LinearRegression, Ridge

        model = Ridge(alpha=self._penalty) if self._penalty else LinearRegression()
        model.fit(shown.numpy(), scores.numpy(), sample_weight=weights.numpy())
        return torch.from_numpy(model.coef_), float(model.intercept_)
