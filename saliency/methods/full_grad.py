"""Full gradients: the gradient at the input, and at every bias of the network."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ..attribution.base import Attribution, BatchAttribution
from ..attribution.explanation import Sign
from ..attribution.forward import at_least_float32
from ..attribution.options import RunStats
from ..attribution.output_rows import output_rows
from ..attribution.resolved_target import ResolvedTarget
from ..errors import NotApplicableError, TargetError, warn
from ..hooks.model_state import leaf, run_model
from ..hooks.pytree import tree_tensors
from ..hooks.rectifiers import INDEPENDENT, refuse_checkpoints
from ..layers.default_layer import scan_layers
from ..layers.layout import Layout, layout_from
from .bias_terms import POINTWISE, BiasWatch

TOLERATED = 1e-3
"""The share of the score that may be missing from the sum of all terms before it is said aloud."""

# Operations with places whose biases are in the map.
_IN_THE_MAP = POINTWISE | {
    "conv2d",
    "conv_transpose2d",
    "linear",
    "batch_norm",
    "layer_norm",
    "group_norm",
    "instance_norm",
    "rms_norm",
}
_CHANNELS_FIRST = ("conv2d", "conv_transpose2d", "batch_norm", "group_norm", "instance_norm")

# What torch.export's decompositions make of those. Of a decomposed linear layer nothing tells the places.
_DECOMPOSED = {"convolution", "native_layer_norm", "native_group_norm", "_native_batch_norm_legit_no_training"}


class FullGrad(Attribution):
    """The gradient times the input, and at every operation its gradient times its bias, laid over each other.

    The bias of an operation is what it returns less its derivative applied to what it was given: the bias of a
    convolution; beta - gamma * mean / deviation of a batch norm; f(z) - f'(z) z of a smooth activation; nothing for a
    ReLU, a pooling or a sum. So score = <gradient, input> + the sum over all operations of <gradient, bias>, exactly,
    also through layer norms, gates and attention. The difference between the two sides is the residual.

    The map adds up, for the input and for each convolution, linear layer, norm and activation with places, the
    magnitudes of its products, stretched to 0..1 over the whole layer, summed over its channels and resized bilinearly
    to the input. What has no places, products and attention count in the sum and not in the map.

    It reacts little to the class: with a randomised classifier its maps stay nearly the same.

    Values: (N, 1, H, W), shares of each layer's largest, summed over channels and layers: they add up to nothing.
        `residual` is in score units: the score less the sum of all terms.

    Warns:
        SaliencyWarning: More than a thousandth of the score is missing from the sum: an operation could not be seen, as
            those of scripted parts, or has no second derivative.

    Raises:
        NotApplicableError: The model was exported and decomposed (`run_decompositions`).
        TargetError: The target does not fit the model's output, or the score has no gradient at the input.

    Source: Srinivas and Fleuret, "Full-Gradient Representation for Neural Network Visualization" (2019),
        https://arxiv.org/abs/1905.00780.
    """

    name = "full_grad"
    cost = "1 forward, 1 backward"
    units = "shares of each layer's largest"
    sign: ClassVar[Sign] = "absolute"
    is_complete: ClassVar[bool] = False
    """The residual is that of the terms behind the map; the map is stretched, and has no sum."""

    def explain(self, x: Tensor, target: ResolvedTarget) -> BatchAttribution:
        """The maps of a batch."""
        return self.explain_each(x, [target])[0]

    def explain_each(self, x: Tensor, targets: Sequence[ResolvedTarget]) -> list[BatchAttribution]:
        """The maps for several targets, from one forward of each image."""
        if len(x) > 1:
            with torch.no_grad():
                output = run_model(self.model, x)
            for target in targets:
                target(output)
        rows = cache(lambda: output_rows(self.model, x[:1]))
        found: list[list[_Found]] = [[] for _ in targets]
        for image in range(len(x)):
            began = time.perf_counter()
            terms = _Terms(self.model, x[image : image + 1])
            for at, target in enumerate(targets):
                own = target if len(x) == 1 else target.rows(image, 1, rows)
                found[at].append(terms.read(own, keep=at + 1 < len(targets), began=began))
        return [_gathered(each) for each in found]


class _Found(NamedTuple):
    values: Tensor  # (1, H, W)
    score: Tensor  # ()
    residual: float
    effort: RunStats


def _gathered(found: list[_Found]) -> BatchAttribution:
    scores = torch.stack([each.score for each in found])
    return BatchAttribution(
        torch.stack([each.values for each in found]),
        scores,
        residual=torch.tensor([each.residual for each in found], dtype=scores.dtype, device=scores.device),
        effort=tuple(each.effort for each in found),
    )


class _Terms:
    """One forward of one image (1, C, H, W), with the bias of every operation on the way."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.x = leaf(x)
        self._model = model
        with BiasWatch(self.x) as watch:
            self.output = run_model(model, self.x)
        self.biases, self.missed = watch.biases, watch.missed
        if decomposed := _DECOMPOSED.intersection(each.name for each in self.biases):
            raise NotApplicableError(
                f"full_grad: the model calls {', '.join(sorted(decomposed))}, so it was exported and decomposed, and "
                "the places of its biases are lost; hand over the exported model as it was before run_decompositions"
            )
        self._layouts = [self._layout(each.shape, each.name) for each in self.biases]

    def _layout(self, shape: tuple[int, ...], name: str) -> Layout | None:
        """How the places of an operation's result lie in memory; None where it has none, or is not for the map."""
        if name not in _IN_THE_MAP:
            return None
        size = (int(self.x.shape[-2]), int(self.x.shape[-1]))
        grids = scan_layers(self._model, self.x.detach()).grids if len(shape) == 3 else ()
        found = layout_from(shape, 1, size, grids, channels_first=name in _CHANNELS_FIRST)
        return found if found is not None and found.grid != (1, 1) else None

    def read(self, target: ResolvedTarget, *, keep: bool, began: float) -> _Found:
        """The map for one target; `keep` the graph for more."""
        score = target(self.output)
        if not score.requires_grad:
            raise TargetError(
                "the score has no gradient: the target or the model detaches it, or takes an argmax or a number of it"
            )
        outputs = [each for each in tree_tensors(self.output) if each.requires_grad]
        at = [get_gradient_edge(self.x), *map(get_gradient_edge, outputs), *(each.edge for each in self.biases)]
        try:
            gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
                score.sum(), at, retain_graph=keep, allow_unused=True
            )
        except RuntimeError:
            refuse_checkpoints(score)
            raise
        first, rest = gradients[0], gradients[1 + len(outputs) :]
        if first is None:
            raise TargetError(INDEPENDENT)
        size = (int(self.x.shape[-2]), int(self.x.shape[-1]))
        product = at_least_float32(first) * at_least_float32(self.x.detach())
        values, total = _stretched(product), float(product.sum())
        # What the target itself adds: nothing for a class's score.
        ends = zip(gradients[1 : 1 + len(outputs)], outputs, strict=True)
        reached = sum(
            float((at_least_float32(g) * at_least_float32(o.detach())).sum()) for g, o in ends if g is not None
        )
        total += float(score.detach()) - reached
        for gradient, each, layout in zip(rest, self.biases, self._layouts, strict=True):
            if gradient is None:
                continue
            product = at_least_float32(gradient) * at_least_float32(each.bias)
            total += float(product.sum())
            if layout is not None:
                seen = _stretched(layout(product))
                values = values + F.interpolate(seen, size, mode="bilinear", align_corners=False)
        residual = float(score.detach()) - total
        effort = RunStats(1, time.perf_counter() - began, "complete", note=self._note(residual, float(score.detach())))
        return _Found(values[0], score.detach()[0], residual, effort)

    def _note(self, residual: float, score: float) -> str:
        """What the identity is made of and how well it holds."""
        share = abs(residual) / max(abs(score), 1e-12)
        note = f"{len(self.biases)} biases; with them the terms miss {share:.1g} of the score"
        if self.missed:
            note += "; no bias of " + ", ".join(f"{name} ({count})" for name, count in self.missed.items())
        if share > TOLERATED and abs(residual) > TOLERATED:
            note_of_map = "" if self.biases else ", and the map is the input times the gradient alone"
            warn(f"full_grad: {note}{note_of_map} (scripted parts and functions of one's own are not seen)")
        return note


def _stretched(product: Tensor) -> Tensor:
    """The sum over the channels (1, 1, h, w) of magnitudes (1, C, h, w), stretched to 0..1 over the whole layer."""
    size = product.abs()
    low, high = size.aminmax()
    summed = size.sum(1, keepdim=True) - size.shape[1] * low
    return (summed / torch.where(high > low, high - low, torch.ones_like(high))).clamp(min=0)
