"""Metrics that call the method again: on other images, another model, or another target."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor

from ...attribution.base import Attribution
from ...attribution.heatmap import resized
from ...engine.estimates import generator
from ...targets.targets import TargetLike
from .agreement import WINDOW, ssim
from .base import Metric, Outcome, SharedResults, Subject, edges, stacked
from .changed_images import correlation, row_ranks

Similarity = Literal["spearman", "absolute", "ssim"]
SIMILARITIES: tuple[Similarity, ...] = get_args(Similarity)

METHOD_CONTROLS = ("constant", "random", "edges")
"""The controls of metrics that call the method: a constant, new noise for each call, and the edges of the image."""


class Maps(SharedResults):
    """Maps of any images, by the method or by a control, which ignores the model and the target.

    Args:
        subject: The explanation to measure.
        control: One of `METHOD_CONTROLS`, or "" for the method.

    Attributes:
        subject: The explanation to measure.
        control: The name of the control.
        calls: The number of calls of the method so far.
    """

    def __init__(self, subject: Subject, control: str = "") -> None:
        self.subject, self.control, self.calls = subject, control, 0

    @cached_property
    def own(self) -> Tensor:
        """The maps of the explained images (N, C, h, w)."""
        return self._control_maps(self.subject.images, 0) if self.control else self.subject.explanation.values

    def __call__(self, images: Tensor, method: Attribution | None = None, target: TargetLike = None) -> Tensor:
        """Return the maps (N, C, h, w) of images as the model's input (N, C, H, W).

        Args:
            images: The images.
            method: The method, if it differs from the explanation's method.
            target: The target, if it differs from the explanation's target.
        """
        self.calls += 1
        if self.control:
            is_own = images is self.subject.images and self.control != "random"
            return self.own if is_own else self._control_maps(images, self.calls)
        target = self.subject.explained_target if target is None else target
        method = method or self.subject.method
        return method.attribute(self.subject.inputs_for(method, images), target).values

    def again(self) -> Tensor:
        """Return the maps of the explained images, computed again."""
        return self.once("again", self, self.subject.images)

    def _control_maps(self, images: Tensor, number: int) -> Tensor:
        shape = (1, *self.subject.explanation.values.shape[2:])
        if self.control == "constant":
            return images.new_ones(len(images), *shape)
        if self.control == "random":
            source = generator(self.subject.seed, number)
            noise = torch.randn(shape, generator=source, dtype=torch.float32, device="cpu")
            return noise.to(images).expand(len(images), *shape)
        return edges(images)[:, None]

    def noise(self, radius: float, number: int) -> Tensor:
        """Return the draw `number` of uniform noise up to `radius`, the same for all images: (N, C, H, W)."""
        images = self.subject.images
        source = generator(self.subject.seed, number)
        draws = torch.rand(images.shape[1:], generator=source, dtype=torch.float64, device="cpu")
        return (radius * (2 * draws - 1)).to(images).expand_as(images)


class MethodMetric(Metric):
    """Base class of the metrics that call the method again. The controls are methods that ignore the model."""

    @abstractmethod
    def measure_maps(self, maps: Maps) -> Outcome:
        """Compute the values (N,) of the images, for the maps of the method or of one control."""

    def outcome(self, subject: Subject) -> Outcome:
        """Compute the values of all images, (M, N)."""
        controls = METHOD_CONTROLS if subject.controls else ()
        sources = subject.once("maps", lambda: [Maps(subject, control) for control in ("", *controls)])
        before = sources[0].calls
        with torch.no_grad():
            rows = [self.measure_maps(maps) for maps in sources]
        outcome = stacked(rows, 0)
        difference = None if outcome.error is None else torch.hypot(outcome.error, outcome.error[:1])
        passes = sources[0].calls - before
        return outcome._replace(difference_error=difference, passes=passes, controls=METHOD_CONTROLS)


def similarities(first: Tensor, others: Iterable[Tensor], kind: Similarity = "spearman") -> Tensor:
    """Return the similarity of maps (N, C, h, w), summed over the channels, to k others: (N, k). Equal maps have 1.

    Args:
        first: The maps.
        others: The other maps.
        kind: "spearman" is the rank correlation, "absolute" the rank correlation of magnitudes, and "ssim" the
            structural similarity, for which maps of fewer than 11 cells are enlarged.
    """
    own, columns = None, []
    for other in others:
        is_equal = (first == other).flatten(1).all(1).cpu()
        if is_equal.all():
            columns.append(torch.ones_like(is_equal, dtype=torch.float64))
            continue
        own = _comparable(first, kind) if own is None else own
        values = (ssim if kind == "ssim" else correlation)(own, _comparable(other, kind))
        columns.append(torch.where(is_equal, 1.0, values.cpu()))
    return torch.stack(columns, 1)


def _comparable(values: Tensor, kind: Similarity) -> Tensor:
    """Return the maps (N, 1, h, w) of which `ssim` is taken, or the ranks (N, h * w) that are correlated."""
    maps = values.sum(1).double()
    if kind == "ssim":
        return resized(maps, (max(WINDOW, maps.shape[1]), max(WINDOW, maps.shape[2])))
    return row_ranks((maps.abs() if kind == "absolute" else maps).flatten(1))
