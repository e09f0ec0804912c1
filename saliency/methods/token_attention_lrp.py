"""Relevance of attention by LRP, weighted by its gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from ..hooks.attention import AttentionCall
from ..hooks.autograd_graph import Gradients
from ..hooks.operations import NORMS, SOFTMAX, Keep
from ..relevance.propagation import Composite, Propagation
from ..relevance.rules import LinearOperation, Passed, ZPlus, divided
from ..relevance.walk import Visit, Walk
from .token_attention import CheferAttention, TokenAttention


class CheferLRP(CheferAttention):
    """Attention of all blocks, weighted by its gradient and by its relevance from layer-wise relevance propagation.

    The product over all blocks of I + mean((gradient * relevance)+), where the mean is over the heads. The relevance of
    attention starts from 1 at the score. Linear layers share it in proportion to positive parts, without biases; norms,
    activations and the softmax of attention pass it unchanged, and each factor of a product gets half. At a residual
    connection, both branches are scaled so that opposite relevance does not grow. The map is the row of the tokens that
    the head reads, without their own share.

    Args:
        model: As for every method.
        **options: As for `saliency.Attribution`.

    Values: (N, 1, h, w), at least 0, in no unit of their own.

    Raises:
        NotApplicableError: The network has no attention, or not among all tokens in each block; or an operation has no
            rule.
        LayerError: The tokens are not a grid of patches.
        TargetError: The target does not fit the model's output.

    Source: Chefer et al., "Transformer Interpretability Beyond Attention Visualization" (2021),
        https://arxiv.org/abs/2012.09838.
    """

    name = "chefer_lrp"
    cost = "1 forward, 3 backwards"
    keep = Keep.ALL

    def shares(self, attention: TokenAttention) -> Callable[[AttentionCall], Tensor]:
        """Return the relevance of attention, as a function of the call."""
        rules = _Rules(attention)
        Walk(attention.grads, rules)
        return rules.relevance.pop


@dataclass(frozen=True)
class _Start(ZPlus):
    """The rule of the last linear layer: its output has as relevance the gradient of the score."""

    bias: bool = False

    def propagate(self, op: LinearOperation, grad: Tensor) -> Passed:
        """Return what the rule passes to the input, given G at the output."""
        return super().propagate(op, divided(grad, op.output))


class _Rules(Propagation):
    """The rules of the authors, which also keep the relevance of attention, by call.

    Args:
        attention: The attention of one forward, whose record keeps all values.
    """

    def __init__(self, attention: TokenAttention) -> None:
        linear = ZPlus(bias=False)
        super().__init__(Composite({"conv": linear, "linear": linear, "last": _Start()}), {}, "refuse")
        self.relevance: dict[AttentionCall, Tensor] = {}
        self._calls = {call.node: call for call in attention.grads.attention}
        self._length_first = (attention.tokens, len(attention.grads.x))

    def __call__(self, visit: Visit) -> Gradients:
        """Return G at the operands of a node."""
        call, name = self._calls.get(visit.node), visit.known.name if visit.operation else ""
        if call is not None:
            self.relevance[call] = call.gradient(visit.grad).mul_(call.probabilities()).div_(2)
            if call.query is not None:
                return self._fused(visit, call)
        if name in NORMS or (name in SOFTMAX and self.relevance):  # the softmax of a target has a gradient
            return self._unchanged(visit)
        # The sum of two heads (N, classes) is not a residual connection: relevance of opposite signs would cancel.
        is_residual = name == "add" and visit.on_path == [True, True] and visit.grad.dim() > 2
        return self._residual(visit) if is_residual else super().__call__(visit)

    def _fused(self, visit: Visit, call: AttentionCall) -> Gradients:
        """Pass the relevance of attention through its softmax, by halves to query and key; the other half to value."""
        with torch.enable_grad():
            operands = [cast("Tensor", part).clone().requires_grad_() for part in (call.query, call.key)]
            logits = replace(call, query=operands[0], key=operands[1]).logits()
            at_logits = divided(self.relevance[call].div(2), logits.detach())
            query, key = torch.autograd.grad(logits, operands, at_logits)
        value = cast("Tensor", visit.plain()[2]) / 2
        return (query, key, value, *[None] * (len(visit.on_path) - 3))

    def _unchanged(self, visit: Visit) -> Gradients:
        """Pass the relevance of each number of the result to the same number of the operand."""
        operand, result = next(iter(visit.known.args.values())), visit.known.result
        relevance = (result if isinstance(result, Tensor) else result[0]) * visit.grad
        return (divided(relevance, operand), *[None] * (len(visit.on_path) - 1))

    def _residual(self, visit: Visit) -> Gradients:
        """Scale the relevance of two summands, for each image, by their shares of the sum of magnitudes."""
        grads = [cast("Tensor", grad) for grad in visit.plain()]
        parts = [operand * grad for operand, grad in zip(visit.known.args.values(), grads, strict=False)]
        image_dim = int(visit.grad.shape[:2] == self._length_first)
        dims = [dim for dim in range(visit.grad.dim()) if dim != image_dim]
        sums = torch.stack([part.sum(dims, keepdim=True) for part in parts])
        factors = sums.sign() * divided(sums.sum(0), sums.abs().sum(0))
        return tuple(grad * factor for grad, factor in zip(grads, factors, strict=True))
