"""Weighted sums of gradients at many inputs, taken through the network's first convolution once, at the end.

A convolution is linear: the weighted sum of what it passes back is what it passes back of the weighted sum. So a
backward pass may stop at its output, and the sum alone goes on to the input.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from ..engine.runner import MakeInputs, PassRunner, gradient_at
from ..hooks.autograd_graph import next_functions, saved
from ..hooks.model_state import leaf, run_model


@dataclass(frozen=True, slots=True)
class FirstConv:
    """The first convolution of a call, by which alone its input reaches the score."""

    weight: Tensor
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int
    margins: list[int]
    """How much was padded ahead of it: left, right, top, bottom; negative where it was cropped."""

    def input_gradient(self, signal: Tensor, shape: torch.Size) -> Tensor:
        """The gradient at the inputs (P, C, H, W) = `shape`, of one at the convolution's outputs (P, K, h, w)."""
        left, right, top, bottom = self.margins
        padded = (shape[2] + top + bottom, shape[3] + left + right)
        # Rows and columns at the end that no stride reaches.
        left_over = [
            size - ((reached - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1)
            for size, reached, stride, padding, dilation, kernel in zip(
                padded, signal.shape[2:], self.stride, self.padding, self.dilation, self.weight.shape[2:], strict=True
            )
        ]
        weight = self.weight.to(signal.dtype)
        signal = F.conv_transpose2d(
            signal, weight, None, self.stride, self.padding, left_over, self.groups, self.dilation
        )
        return F.pad(signal, [-margin for margin in self.margins]) if any(self.margins) else signal


def first_conv_of(scores: Tensor, at: Tensor) -> tuple[FirstConv, GradientEdge] | None:
    """The first convolution between an input and its scores, and its output in the graph of the call, if there is one.

    There is one where all that takes the input is a copy, that copy a convolution in the plane, maybe behind a padding
    with constants, and nothing else.

    Args:
        scores: (k,) the scores.
        at: (k, C, H, W) the input, a leaf of their graph.
    """
    users, start = _users(scores, at)
    margins = [0, 0, 0, 0]
    below = start
    above = [] if start is None else users.get(start, [])
    while len(above) == 1:
        (node,) = above
        kind = node.name()
        if kind == "ConvolutionBackward0":
            if next_functions(node)[0][0] is not below:  # the picture is its kernel
                return None
            stem = _first_conv(node, margins)
            return None if stem is None else (stem, GradientEdge(node, 0))
        if kind == "ConstantPadNdBackward0":
            pad = [_signed(each) for each in saved(node, "pad")]
            if any(margins) or len(pad) > 4:
                return None
            margins = pad + [0] * (4 - len(pad))
        elif kind != "CloneBackward0":
            return None
        below, above = node, users.get(node, [])
    return None


def _users(scores: Tensor, at: Tensor) -> tuple[dict[Node, list[Node]], Node | None]:
    """The operations of a graph by each whose result they take, and the node of its leaf."""
    users: dict[Node, list[Node]] = {}
    start: Node | None = None
    waiting = [] if scores.grad_fn is None else [scores.grad_fn]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if getattr(node, "variable", None) is at:
            start = node
        for function, _ in next_functions(node):
            if function is None:
                continue
            users.setdefault(function, []).append(node)
            if function not in seen:
                seen.add(function)
                waiting.append(function)
    return users, start


def _first_conv(node: Any, margins: list[int]) -> FirstConv | None:
    weight = saved(node, "weight")
    if saved(node, "transposed") or not isinstance(weight, Tensor) or weight.dim() != 4:
        return None
    stride, padding, dilation = (
        [int(each) for each in saved(node, name)] for name in ("stride", "padding", "dilation")
    )
    return FirstConv(weight.detach(), stride, padding, dilation, int(saved(node, "groups")), margins)


def _signed(saved: int) -> int:
    """A saved whole number as it was given: PyTorch hands out negative ones as unsigned numbers of 64 bits."""
    return saved - 2**64 if saved >= 2**63 else saved


def weighted_gradients(
    passes: PassRunner, make: MakeInputs, weights: Tensor, *, exact: bool = True
) -> tuple[Tensor, Tensor]:
    """The sums (P, C, H, W) over inputs of weight times gradient, and the sums (P,) of the weights that went in.

    The latter are smaller than they should be where a limit or an interrupt ended the work.

    Args:
        passes: The passes of one image.
        make: Makes the inputs from one number to another.
        weights: (P, n) what the gradient at each of n inputs counts, in each of P sums.
        exact: Whether the model itself is run. Where the passes run a faster copy, each is taken to the input.

    Raises:
        TargetError: The score has no gradient, or does not depend on the input.
    """

    def compute(start: int, stop: int) -> tuple[FirstConv | None, Tensor]:
        with torch.no_grad():
            inputs = make(start, stop)
        at = leaf(inputs)
        scores = passes.target(len(inputs))(run_model(passes.model, at))
        found = first_conv_of(scores, at)
        stem, edge = (None, at) if found is None else found
        return stem, _summed(weights[:, start:stop], gradient_at(scores, edge))

    def plain() -> Iterator[tuple[FirstConv | None, Tensor]]:
        for done in passes.gradients(make, weights.shape[1]):
            yield None, _summed(weights[:, done.start : done.start + len(done.scores)], done.gradients)

    shape = torch.Size((len(weights), *passes.x.shape[1:]))
    at_input = torch.zeros(shape, dtype=weights.dtype, device=weights.device)
    at_stem: Tensor | None = None
    stem: FirstConv | None = None
    before = passes.used
    for found, gradients in passes.chunks(compute, weights.shape[1], "gradient") if exact else plain():
        if found is None:
            at_input += gradients
        elif at_stem is None:
            stem, at_stem = found, gradients
        else:
            at_stem += gradients
    if stem is not None and at_stem is not None:
        at_input += stem.input_gradient(at_stem, shape)
    return at_input, weights[:, : passes.used - before].sum(1)


def _summed(weights: Tensor, gradients: Tensor) -> Tensor:
    """The sums (P, ...) of gradients (k, ...) with weights (P, k)."""
    return torch.einsum("pk,kchw->pchw", weights, gradients.to(weights.dtype))
