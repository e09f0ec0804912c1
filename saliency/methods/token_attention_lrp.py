"""Relevance of attention by LRP, weighted by its gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from ..attribution.forward import Needs
from ..errors import NotApplicableError
from ..hooks.attention import AttentionCall
from ..hooks.autograd_graph import Gradients
from ..hooks.operations import NORMS, SOFTMAX, Operation, SavedValues
from ..io.axes import at_least_float32
from ..relevance.kernels import Passed
from ..relevance.propagation import Propagation
from ..relevance.rules import Composite, LinearOperation, Rule, ZPlus, divided
from ..relevance.walk import Visit, Walk
from .token_attention import CheferAttention, TokenAttention


class CheferLRP(CheferAttention):
    """Attention of all blocks, weighted by its gradient and by its relevance from layer-wise relevance propagation.

    Formula: S = r ((I + W_L) ⋯ (I + W_1) − I), with W_l = mean_h (R(A_l) ⊙ ∇A_l)⁺ and R(A_l) the relevance of A_l.

    The product over all blocks of I + mean((gradient * relevance)+), where the mean is over the heads. The relevance of
    attention starts from 1 at the score. Linear layers divide it in proportion to positive parts, without biases;
    norms, activations and the softmax of attention pass it unchanged, and each factor of a product gets half. At a
    residual connection, both branches are scaled so that opposite relevance does not grow. The map is the row of the
    tokens that the head reads, without these tokens themselves.

    Relevance that starts with both signs, as for a contrast or a probability, cancels in this scaling, so that only
    rounding errors are left. Such targets are refused.

    Values: (N, 1, h, w), at least 0, dimensionless.

    Raises:
        NotApplicableError: The network has no attention, or a block without attention among all tokens; an operation
            has no rule; or the score rises with some outputs of the last linear layer and falls with others.

    Source: Chefer et al., "Transformer Interpretability Beyond Attention Visualization" (2021),
        https://arxiv.org/abs/2012.09838.
    """

    name = "chefer_lrp"
    cost = "1 forward, 3 backwards"
    needs = Needs(backwards=3, values=SavedValues.ALL, attention=True)

    def weights(self, attention: TokenAttention) -> Callable[[AttentionCall], Tensor]:
        """Return a function from a call to its weighted attention."""
        rules = _Rules(attention)
        try:
            Walk(attention.grads, rules, frees=attention.grads.forward.count_backward()).run()
        except NotApplicableError as error:
            problem = str(error).partition(";")[0]  # the rest names an option of LRP
            raise NotApplicableError(f"{self.name}: {problem}; chefer_attention needs no rules") from error
        if bool((rules.rises & rules.falls).any()):
            raise NotApplicableError(
                f"{self.name}: relevance starts with both signs, as for a contrast or a probability, and cancels; use "
                "attn_lrp or chefer_attention, or explain a single class or text"
            )
        return rules.weights.pop


class _Rules(Propagation):
    """The rules of the authors, down to the first attention.

    Args:
        attention: The attention of one forward, whose record keeps all values.

    Attributes:
        weights: The positive part of relevance times gradient of each call, averaged over the heads.
        rises: Whether the score of each image (N,) rises with an output of the last linear layers.
        falls: Whether the score of each image (N,) falls with an output of the last linear layers.
    """

    def __init__(self, attention: TokenAttention) -> None:
        linear = ZPlus(bias=False)
        super().__init__(Composite({"conv": linear, "linear": linear}), {}, "refuse")
        self.weights: dict[AttentionCall, Tensor] = {}
        self._calls = {call.node: call for call in attention.calls}
        self._gradients = {call: attention.grads.node_gradient(call.node) for call in attention.calls}
        self._length_first = (attention.tokens, len(attention.grads.x))
        self.rises, self.falls = (torch.zeros_like(attention.grads.scores, dtype=torch.bool) for _ in range(2))

    def __call__(self, visit: Visit) -> Gradients:
        """Return G at the operands of a node; None after the first attention."""
        call, operation = self._calls.get(visit.node), visit.operation
        if call is not None:
            return self._attend(visit, call)
        if len(self.weights) == len(self._calls):
            return (None,)
        if operation is None:
            return super().__call__(visit)
        if operation.name in NORMS or (operation.name in SOFTMAX and self.weights):  # a target's softmax has a gradient
            return self._unchanged(visit, operation)
        if visit.node in visit.walk.graph.first_and_last[1]:
            self.rises |= visit.walk.per_image(visit.grad > 0, visit.node) > 0
            self.falls |= visit.walk.per_image(visit.grad < 0, visit.node) > 0
        # The sum of two heads (N, classes) is not a residual connection: relevance of opposite signs would cancel.
        is_residual = operation.name == "add" and visit.on_path == [True, True] and visit.grad.dim() > 2
        return self._residual(visit, operation) if is_residual else super().__call__(visit)

    def propagate(self, visit: Visit, rule: Rule, op: LinearOperation, values: Tensor) -> Passed:
        """Skip rows without relevance, such as most tokens in the last block. Start with the size of the gradient."""
        if visit.node in visit.walk.graph.first_and_last[1]:
            values = at_least_float32(visit.grad).abs()
        rows = values.any(-1)
        if op.dims != (-1,) or op.input.dim() > 2 or not 0 < int(rows.sum()) < len(rows):
            return super().propagate(visit, rule, op, values)
        part = replace(op, input=op.input[rows], find_output=lambda: op.output[rows], shared=None)
        passed = super().propagate(visit, rule, part, values[rows])
        at_input = torch.zeros_like(op.input)
        at_input[rows] = cast("Tensor", passed.grad)
        return Passed(at_input)

    def _attend(self, visit: Visit, call: AttentionCall) -> Gradients:
        """Weight attention. Pass half of its relevance through its softmax, by halves to query and key."""
        logits = None if call.query is None else call.logits()
        probabilities = call.probabilities() if logits is None else call.softmax_of(logits)
        relevance = call.gradient(visit.grad).mul_(probabilities).div_(2)
        self.weights[call] = call.gradient(self._gradients[call]).mul_(relevance).clamp_(min=0).mean(1)
        if len(self.weights) == len(self._calls):
            return (None,)
        if logits is None:
            return super().__call__(visit)
        at_logits = divided(relevance.div_(2), logits)
        return tuple(call.operand_gradients(at_logits, visit.grad / 2, probabilities))

    def _unchanged(self, visit: Visit, operation: Operation) -> Gradients:
        """Pass the relevance of each number of the result to the same number of the operand."""
        operand, result = next(iter(operation.args.values())), operation.result
        relevance = (result if isinstance(result, Tensor) else result[0]) * visit.grad
        return (divided(relevance, operand), *[None] * (len(visit.on_path) - 1))

    def _residual(self, visit: Visit, operation: Operation) -> Gradients:
        """Scale the relevance of two summands, for each image, by their fractions of the sum of magnitudes."""
        grads = [cast("Tensor", grad) for grad in visit.plain()]
        parts = [operand * grad for operand, grad in zip(operation.args.values(), grads, strict=False)]
        image_dim = int(visit.grad.shape[:2] == self._length_first)
        dims = [dim for dim in range(visit.grad.dim()) if dim != image_dim]
        sums = torch.stack([part.sum(dims, keepdim=True) for part in parts])
        factors = sums.sign() * divided(sums.sum(0), sums.abs().sum(0))
        return tuple(grad * factor for grad, factor in zip(grads, factors, strict=True))
