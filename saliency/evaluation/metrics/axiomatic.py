"""Metrics of axioms: completeness, non-sensitivity and input invariance."""

from __future__ import annotations

import copy

from ...attribution.options import Option
from ...hooks.manager import HookManager
from ...methods.baselines import FillOption
from ...validation import check_number
from .base import Outcome
from .changed_images import PerturbationMetric, PerturbedImage
from .faithfulness import MonotonicityCorrelation
from .repeated_maps import Maps, MethodMetric
from .robustness import norm, relative


class Completeness(PerturbationMetric):
    """Relative difference between the sum of the map and the drop in the score to a baseline; lower is better.

    Args:
        fill: The baseline, as for `Deletion`.

    Values: (N,), |sum - (f(x) - f(baseline))| / |f(x) - f(baseline)|, of the explained score. Values in score units per
    unit of the input are multiplied by the difference to the baseline.

    Source: Sundararajan et al., "Axiomatic Attribution for Deep Networks" (2017), https://arxiv.org/abs/1703.01365.
    """

    name = "completeness"
    higher_is_better = False
    of_explained_score = True

    fill: FillOption = FillOption()

    def measure_image(self, image: PerturbedImage) -> Outcome:
        """Compute the differences of one image."""
        change = image.full - image.empty(self.fill)
        sums = image.contributions(self.fill).flatten(1).sum(1).cpu().double()
        return Outcome((sums - change).abs() / (abs(change) or 1.0))


class NonSensitivity(MonotonicityCorrelation):
    """Fraction of features to which either the map or the score is insensitive, but not both; lower is better.

    Args:
        segments: As for `MonotonicityCorrelation`.
        tolerance: The largest change of the score, relative to the score, and the largest relevance, relative to the
            highest, that count as zero.

    Values: (N,), from 0 to 1.

    Source: Nguyen and Martinez, "On Quantitative Aspects of Model Interpretability" (2020),
        https://arxiv.org/abs/2007.07584.
    """

    name = "non_sensitivity"
    higher_is_better = False

    tolerance: Option[float] = Option(1e-5, check_number, least=0)

    def measure_image(self, image: PerturbedImage) -> Outcome:
        """Compare the features of one image."""
        relevance, squares = self.relevance_and_squares(image)
        is_irrelevant = relevance <= self.tolerance * relevance.amax(1, keepdim=True)
        is_constant = squares.amax(1).sqrt() <= self.tolerance * abs(image.full)
        return Outcome((is_irrelevant != is_constant).double().mean(1))


class InputInvariance(MethodMetric):
    """Relative change of the map if a constant is added to the input and subtracted in the model; lower is better.

    Args:
        shift: The constant, in units of the normalised input.

    Values: (N,), the norm of the change divided by the norm of the map. The shifted model returns the same scores.

    Source: Kindermans et al., "The (Un)reliability of Saliency Methods" (2017), https://arxiv.org/abs/1711.00867.
    """

    name = "input_invariance"
    higher_is_better = False

    shift: Option[float] = Option(1.0, check_number)

    def measure_maps(self, maps: Maps) -> Outcome:
        """Compute the changes."""
        method = copy.deepcopy(maps.subject.method)
        with HookManager(persistent=True) as hooks:
            hooks.revise_input(method.model, lambda x: x - self.shift)
            shifted = maps(maps.subject.images + self.shift, method)
        return Outcome(relative(norm(shifted - maps.own), norm(maps.own)))
