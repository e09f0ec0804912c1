"""DeepLIFT and DeepSHAP: the difference from the baseline's score, distributed by multipliers."""

from __future__ import annotations

import math
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor

from ..attribution.base import TracedAttribution
from ..attribution.estimates import Estimate, normal
from ..attribution.explanation import BatchAttribution
from ..attribution.forward import Needs, TargetGradients, needs_with
from ..attribution.options import LARGEST_PASSES, Option, PerImage
from ..attribution.questions import Questions
from ..errors import warn
from ..hooks.operations import SavedValues
from ..hooks.rectifiers import Coverage
from ..io.axes import at_least_float32
from ..model.call import check_later, shown_images
from ..relevance.multipliers import Multipliers
from ..relevance.propagation import Unknown
from ..relevance.walk import Walk
from ..validation import check_choice, check_integer
from .baselines import BaselineOption, baselines

MAX_MISSING_SHARE = 1e-4
"""The fraction of the difference of the scores that may be missing from the values without a warning."""


class DeepLIFT(TracedAttribution):
    """The difference from the baseline's score, distributed among the inputs of each operation.

    Formula: S = (x − x′) ⊙ m, with m = ∂y/∂x where each pointwise function f has the slope (f(z) − f(z′)) / (z − z′).

    A pointwise function passes the ratio of the differences of its result and its operand (the Rescale rule). So the
    values are complete, as in integrated gradients, for two forwards and one backward.

    Works on the autograd graph of the call, so residual connections, functions, reused modules and operations in place
    need no preparation of the model. The slope of a factor of a product is the mean of the other factor; norms,
    quotients and attention are chains of products and pointwise functions. In a max pool, the gain of a window goes to
    its maximum for the image, and the loss to its maximum for the baseline. Any other operation passes its mean
    gradient on the straight path between both points.

    Args:
        baseline: As for `IntegratedGradients`.
        unknown: "refuse" raises NotApplicableError for an operation without a rule; "gradient" passes its gradient.

    Values: (N, C, H, W), signed, in score units; they and the residual sum to the score minus the score of the
    baseline.

    Warns:
        SaliencyWarning: The residual exceeds 1e-4 of the difference of the scores.

    Raises:
        NotApplicableError: An operation of the model has no rule, or the model runs other operations for the baseline.
        MethodError: An option is invalid, or a baseline does not fit.

    Source: Shrikumar et al., "Learning Important Features Through Propagating Activation Differences" (2017),
        https://arxiv.org/abs/1704.02685.
    """

    name = "deep_lift"
    joins_inputs = True
    per_image = ("baseline",)
    cost = "2 forwards, 1 backward"
    needs = Needs(backwards=1)
    has_error: ClassVar[bool] = False
    """Whether the baselines are a sample, so that their mean has a standard error."""

    baseline: BaselineOption = BaselineOption("mean")
    unknown: Option[Unknown] = Option("refuse", check_choice, get_args(Unknown))

    def needs_for(self, x: Tensor, target: Questions) -> Needs:
        """Return the values that the rules read."""
        # Only gradients of unknown operations read the values of linear operations.
        return needs_with(self.needs, values=SavedValues.CHANGES if self.unknown == "refuse" else SavedValues.ALL)

    def references(self, x: Tensor) -> Tensor:
        """Return the baselines (K, N, C, H, W) of a batch."""
        option: Any = self.baseline
        options = [option[image] for image in shown_images(x)] if isinstance(option, PerImage) else [option] * len(x)
        per_image = [baselines(option, x[i : i + 1], self.preprocess) for i, option in enumerate(options)]
        count = math.lcm(*map(len, per_image))
        return torch.stack([values.repeat(count // len(values), *[1] * (x.dim() - 1)) for values in per_image], 1)

    def explain_gradients(self, grads: TargetGradients, layers: tuple[str, ...]) -> BatchAttribution:
        """Compute the mean over the baselines."""
        estimate, residual, references = Estimate(), Estimate(), self.references(grads.x)
        for number, reference in enumerate(references, 1):
            # In the memory format of the images, in which a reshape may be a view or a copy.
            base = grads.on(torch.empty_like(grads.x).copy_(reference))
            values, handled = self._values(grads, base, number == len(references) and grads.forward.count_backward())
            missing = grads.scores.double() - base.scores.double() - values.flatten(1).sum(1, dtype=torch.float64)
            self._check(grads, base, missing)
            if len(references) > 1:
                estimate.add(values[None])
                residual.add(missing[None])
                values, missing = estimate.mean, residual.mean
        values, coverage = values.to(grads.x.dtype), Coverage(handled=handled)
        error = None if estimate.error is None or not self.has_error else estimate.error.to(grads.x.dtype)
        missing = missing.to(at_least_float32(grads.scores).dtype)
        return BatchAttribution(
            values, grads.scores, evidence={"coverage": coverage, "residual": missing, "error": error}
        )

    def _values(self, grads: TargetGradients, base: TargetGradients, frees: bool) -> tuple[Tensor, dict[str, int]]:
        """Return the values (N, C, H, W) against one baseline, and the number of operations by kind."""
        walk = Walk(grads, Multipliers(grads, base, self.unknown, frees=frees)).run()
        change = at_least_float32(grads.x) - at_least_float32(base.x)
        return change * (0 if walk.gradient is None else walk.gradient), dict(walk.handled)

    def _check(self, grads: TargetGradients, base: TargetGradients, missing: Tensor) -> None:
        """Warn if too much of the difference of the scores is missing (N,)."""
        images, eps = len(missing), 64 * torch.finfo(grads.scores.dtype).eps

        def check(*numbers: float) -> None:
            for lost, score, base_score in (numbers[image::images] for image in range(images)):
                rise, rounding = abs(score - base_score), eps * (abs(score) + abs(base_score))
                if abs(lost) <= MAX_MISSING_SHARE * rise + rounding:  # false for NaN
                    continue
                problem = f"the values miss {abs(lost):.1g} of a difference of the scores of {rise:.1g}"
                warn(f"{self.name}: {problem}, as for a ReLU written as x * (x > 0); use torch.relu")

        if self.unknown != "gradient":
            check_later(check, missing, grads.scores, base.scores)


class DeepSHAP(DeepLIFT):
    """The mean of DeepLIFT over many baselines, with its standard error: an approximation of Shapley values.

    Formula: S = mean_x′ (x − x′) ⊙ m, with m the multipliers of DeepLIFT for the baseline x′.

    Because the baselines differ, no colour is left without attribution. By default they are random colours from the
    normal distribution of the normalised input, which need no data; the authors draw training images. For linear and
    additive models, the values are the Shapley values for which missing pixels are taken from the baselines.

    Args:
        baseline: "colours", or several baselines as for `IntegratedGradients`: a list, or a float tensor (K, C, H, W).
        passes: The number of random colours.
        seed: The seed of the colours, which are the same for all images.

    Values: (N, C, H, W), signed, in score units; they and the residual sum to the score minus the baselines' mean
    score.

    Warns:
        SaliencyWarning: As for `DeepLIFT`.

    Raises:
        NotApplicableError: An operation of the model has no rule, or the model runs other operations for a baseline.

    Source: Lundberg and Lee, "A Unified Approach to Interpreting Model Predictions" (2017),
        https://arxiv.org/abs/1705.07874.
    """

    name = "deep_shap"
    joins_inputs = False  # random colours are baselines of an image, not of joined inputs
    cost = "11 forwards, 10 backwards"
    preview_options: ClassVar = {"passes": 2}
    has_error = True

    baseline: BaselineOption = BaselineOption("colours")
    passes: Option[int] = Option(10, check_integer, most=LARGEST_PASSES)
    seed: Option[int] = Option(0, check_integer, least=None)

    def references(self, x: Tensor) -> Tensor:
        """Return the baselines (K, N, C, H, W) of a batch."""
        if self.baseline != "colours":
            return super().references(x)
        shape = (1, x.shape[1], *[1] * (x.dim() - 2))
        draws = [normal(shape, self.seed, i) for i in range(self.passes)]
        return torch.stack(draws).to(x).expand(-1, *x.shape)
