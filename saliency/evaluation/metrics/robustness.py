"""Metrics of robustness: how much does the map change if the image hardly changes?

A constant map never changes, so stability alone is no evidence that a map is right.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from ...attribution.forward import Needs, SharedForward
from ...attribution.options import Option
from ...hooks.model_state import prepared_for_attribution
from ...layers.find import default_layer, find
from ...targets.targets import class_scores
from ...validation import check_integer, check_number
from .base import Outcome, Subject, outputs
from .randomisation import MPRT, standard_error
from .repeated_maps import Maps, MethodMetric, similarities

SMALLEST = 1e-6
"""Relative changes are divided by at least this number."""


class RobustnessMetric(MethodMetric):
    """Base class of the metrics that add noise to the image; they share the maps of noisy images. Lower is better.

    Args:
        radius: The largest change of a value of the normalised input.
        passes: The number of noisy images, uniform within the radius.
    """

    higher_is_better = False

    radius: Option[float] = Option(0.02, check_number, above=0)
    passes: Option[int] = Option(10, check_integer, least=2)

    def noisy(self, maps: Maps) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield noisy images (N, C, H, W) and their maps (N, C, h, w)."""
        for number in range(self.passes):
            images = maps.subject.images + maps.noise(self.radius, number)
            yield images, maps.once((self.radius, number), maps, images)

    def changes(self, maps: Maps) -> Tensor:
        """Return the change of each map, relative to the map: (N, passes)."""
        return torch.stack([relative(norm(values - maps.own), norm(maps.own)) for _, values in self.noisy(maps)], 1)


class MaxSensitivity(RobustnessMetric):
    """Largest relative change of the map under noise; lower is better.

    Values: (N,), the norm of the change divided by the norm of the map: a lower bound of the largest one in the radius.

    Source: Yeh et al., "On the (In)fidelity and Sensitivity of Explanations" (2019), https://arxiv.org/abs/1901.09392.
    """

    name = "max_sensitivity"

    def measure_maps(self, maps: Maps) -> Outcome:
        """Compute the largest changes."""
        return Outcome(self.changes(maps).amax(1))


class AvgSensitivity(RobustnessMetric):
    """Mean relative change of the map under noise; lower is better.

    Values: (N,), the norm of the change divided by the norm of the map.

    Source: Yeh et al., "On the (In)fidelity and Sensitivity of Explanations" (2019), https://arxiv.org/abs/1901.09392.
    """

    name = "avg_sensitivity"

    def measure_maps(self, maps: Maps) -> Outcome:
        """Compute the mean changes."""
        changes = self.changes(maps)
        return Outcome(changes.mean(1), standard_error(changes))


class NoiseMargin(RobustnessMetric):
    """Similarity of the map under noise minus its similarity under random weights; higher is better.

    A map that ignores the model has a value of 0, whether it is constant or noise.

    Args:
        draws: The number of draws of the weights.

    Values: (N,), a difference of means of Spearman's correlations.

    Source: The comparison is ours; its parts are from `AvgSensitivity` and `MPRT`.
    """

    name = "noise_margin"
    higher_is_better = True

    draws: Option[int] = Option(3, check_integer, least=2)

    def measure_maps(self, maps: Maps) -> Outcome:
        """Compute the differences."""
        under_noise = similarities(maps.own, (values for _, values in self.noisy(maps)))
        under_weights = MPRT(layers=1, draws=self.draws).randomised_similarities(maps)[:, :, 0].T
        error = torch.hypot(standard_error(under_noise), standard_error(under_weights))
        return Outcome(under_noise.mean(1) - under_weights.mean(1), error)


class LocalLipschitz(RobustnessMetric):
    """Largest ratio of the change of the map to the change of the image; lower is better.

    Values: (N,), a ratio of Euclidean norms, in units of the map per unit of the normalised input: a lower bound of the
    Lipschitz constant within the radius.

    Source: Alvarez-Melis and Jaakkola, "On the Robustness of Interpretability Methods" (2018),
        https://arxiv.org/abs/1806.08049.
    """

    name = "local_lipschitz"

    def measure_maps(self, maps: Maps) -> Outcome:
        """Compute the largest ratios."""
        x = maps.subject.images
        ratios = [norm(values - maps.own) / norm(images - x) for images, values in self.noisy(maps)]
        return Outcome(torch.stack(ratios, 1).amax(1))


class RelativeStability(RobustnessMetric):
    """Base class of the largest relative change of the map over a relative change in the model. Lower is better.

    Only noisy images of the same predicted class count; the value is NaN if there is none.
    """

    @abstractmethod
    def model_change(self, subject: Subject, images: Tensor, rises: Tensor) -> Tensor:
        """Return the change in the model between the images and noisy images (N, C, H, W): (N,).

        Args:
            subject: The explanation to measure.
            images: The noisy images.
            rises: (N, classes) the scores of the noisy images minus the scores of the images.
        """

    def measure_maps(self, maps: Maps) -> Outcome:
        """Compute the largest ratios."""
        ratios = []
        for number, (images, values) in enumerate(self.noisy(maps)):
            change = norm(_each_relative(values - maps.own, maps.own))
            below = maps.subject.once((self, number), self._model_change, maps.subject, images)
            ratios.append(change / below)
        largest = torch.stack(ratios, 1).nan_to_num(-1.0).amax(1)
        return Outcome(torch.where(largest < 0, torch.nan, largest))

    def _model_change(self, subject: Subject, images: Tensor) -> Tensor:
        """Return the change in the model; NaN if the predicted class changes."""
        before, after = (class_scores(outputs(subject.method, each)) for each in (subject.images, images))
        is_same = before.argmax(1) == after.argmax(1)
        return torch.where(is_same, self.model_change(subject, images, after - before).clamp(min=SMALLEST), torch.nan)


class RelativeInputStability(RelativeStability):
    """Largest relative change of the map over the relative change of the image; lower is better.

    Values: (N,), a ratio of norms of changes, each value relative to itself. See `RelativeStability`.

    Source: Agarwal et al., "Rethinking Stability for Attribution-based Explanations" (2022),
        https://arxiv.org/abs/2203.06877.
    """

    name = "relative_input_stability"

    def model_change(self, subject: Subject, images: Tensor, rises: Tensor) -> Tensor:
        """Return the relative change of the images."""
        return norm(_each_relative(images - subject.images, subject.images))


class RelativeOutputStability(RelativeStability):
    """Largest relative change of the map over the change of the model's scores; lower is better.

    Values: (N,), per unit of the scores. See `RelativeStability`.

    Source: Agarwal et al., "Rethinking Stability for Attribution-based Explanations" (2022),
        https://arxiv.org/abs/2203.06877.
    """

    name = "relative_output_stability"

    def model_change(self, subject: Subject, images: Tensor, rises: Tensor) -> Tensor:
        """Return the change of all scores."""
        return norm(rises)


class RelativeRepresentationStability(RelativeStability):
    """Largest relative change of the map over the relative change of a layer's output; lower is better.

    Args:
        layer: The name of the layer; by default the one that CAMs read.

    Values: (N,), a ratio of norms of changes, each value relative to itself. See `RelativeStability`.

    Source: Agarwal et al., "Rethinking Stability for Attribution-based Explanations" (2022),
        https://arxiv.org/abs/2203.06877.
    """

    name = "relative_representation_stability"

    layer: Option[str | None] = Option(None)

    def model_change(self, subject: Subject, images: Tensor, rises: Tensor) -> Tensor:
        """Return the relative change of the layer's output."""
        model = subject.method.model
        with prepared_for_attribution(model):
            name, _ = find(model, self.layer or default_layer(model, subject.images[:1]))
            needs = Needs("none", layers=(name,))
            forwards = [SharedForward(model, each, needs) for each in (subject.images, images)]
        before, after = (forward.layers[name] for forward in forwards)
        return norm(_each_relative(after - before, before))


def norm(tensor: Tensor) -> Tensor:
    """Return the Euclidean norm of each image's values (N,)."""
    return tensor.flatten(1).square().sum(1).sqrt()


def relative(change: Tensor, size: Tensor) -> Tensor:
    """Return a change (N,) as a share of a size; 0 for no change, NaN if there is a change and the size is 0."""
    return torch.where(change > 0, torch.where(size > 0, change / size, torch.nan), 0.0)


def _each_relative(change: Tensor, values: Tensor) -> Tensor:
    """Return each change as a share of its value; of `SMALLEST` for values below it."""
    return change / values.abs().clamp(min=SMALLEST)
