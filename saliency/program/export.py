"""Export of a method as one program: the scores and the map of a batch of any size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from ..attribution.base import Attribution
from ..attribution.heatmap import heatmap, reduce_channels, resized
from ..attribution.explanation import Explanation
from ..attribution.resolved_target import ResolvedTarget
from ..engine.multi_pass import MultiPassAttribution, SampledAttribution
from ..errors import NotApplicableError, TargetError
from ..hooks.forward_args import bind_forward_args
from ..hooks.model_state import prepared_for_attribution
from ..hooks.tracing import tracing
from ..io.inputs import ImagesLike
from ..layers.layout import bind_layout
from ..targets.targets import Categories, ClassScore, OutputFacts, OutputTarget, class_scores, threshold
from .capture import capture

MOST_DIFFERENCE = 1e-4
"""The largest difference between the map of a program and the map of `attribute`, as a share of its maximum."""


@dataclass(frozen=True, slots=True)
class ProgramClass(ClassScore):
    """Class of each image as a tensor, which the program computes.

    Attributes:
        classes: (N,) the classes; before the target is resolved, the class index, or None for the top class.
        scores: (N, classes) the scores of all classes.
    """

    scores: Tensor | None = None

    def resolve(self, images: int, categories: Categories) -> ProgramClass:
        """Return the target unchanged."""
        return self

    def resolve_from(self, output: Any, facts: OutputFacts) -> ProgramClass:
        """Return the target with the class of each image."""
        scores = class_scores(output)
        if self.classes is not None:
            classes = torch.full_like(scores[:, 0], self.classes, dtype=torch.int64)
        else:
            classes = (scores[:, 0] > threshold(self.link)).long() if self.is_binary else scores.argmax(1)
        return replace(self, classes=classes, scores=scores)

    def __call__(self, output: Any) -> Tensor:
        """Return the scores (N,)."""
        scores = class_scores(output)
        if self.is_binary:
            return scores[:, 0] * (2 * self.classes - 1)
        return scores.gather(1, self.classes[:, None]).squeeze(1)

    def repeated(self, image: int, count: int) -> ProgramClass:
        """Return the target for the class of one image."""
        return replace(self, classes=self.classes[image : image + 1].expand(count))

    def probabilities(self, output: Any) -> None:
        """Return None: a program returns all scores."""


def exported_program(method: Attribution, example: ImagesLike, target: int | str | None = None) -> ExportedProgram:
    """Return a method as a program: from `image` to the scores, the explained classes and the map.

    The program takes the model's normalised input (N, C, H, W), with any N and the example's size, and returns the
    scores of all classes (N, classes), the explained class of each image (N,), and its heatmap (N, H, W).

    Args:
        method: The method with its model. The model does not change.
        example: An image, as for `attribute`. The program is compared with `attribute` on it.
        target: The index or name of the class that is explained; None for the top class of each image.

    Raises:
        NotApplicableError: The method cannot be a program.
        TargetError: The target is not a class.
    """
    if isinstance(method, SampledAttribution):
        raise NotApplicableError(f"export: {method.name} draws random samples, and a program would repeat one draw")
    batch = method.read(example)
    explanation = method.attribute(batch.inputs, target)
    if not isinstance(target, int | str | None):
        raise TargetError(f"export: expected a class index, a class name or None as the target, got {target!r}")

    one_by_one = isinstance(method, MultiPassAttribution)
    with prepared_for_attribution(method.model), bind_forward_args((), 1), bind_layout(method.layout):
        resolved = method.resolve(target, batch.inputs[:1])
        first = resolved.target
        with torch.no_grad():
            resolved(method.model(batch.inputs[:1]))
        traced = ProgramClass(first.classes[0], resolved.target.link, resolved.target.is_binary)

        def explain(image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            with tracing(method.name, image):
                own = ResolvedTarget(None, len(image), method.categories).replaced(traced)
                result = method.explain(image, own)
                map_ = resized(reduced(result.values, explanation.sign), image.shape[2:])
                return own.target.scores, own.target.classes, map_

        graph = capture(method.name, explain, batch.inputs[:1].detach(), method.model, one_by_one=one_by_one)
        with torch.no_grad():
            program = torch.export.export(
                graph, (batch.inputs[:1].repeat(2, 1, 1, 1),), dynamic_shapes=({0: Dim("batch")},), strict=False
            )
    return program


def reduced(values, sign):
    maps = reduce_channels(values, sign)
    return maps.clamp(min=0) if sign == "positive" else maps
