"""Fast forms of the rules, by class of rule. The tests compare each of them with the formula of its rule in float64.

Products of single inputs and weights are never formed: with t = |W| |a|, their positive parts sum to (W a + t) / 2 and
their negative parts to (W a - t) / 2. The relevance of a bias needs only the sums of the quotients R / z over all
positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..hooks.autograd_graph import is_tracing
from .rules import (
    TINY,
    AlphaBeta,
    ContrastiveRule,
    Epsilon,
    Excitation,
    Gamma,
    LinearOperation,
    Rule,
    ZPlus,
    signed,
    where_above,
)

_ROUNDING = 128  # sums of parts below this many units of rounding of the other parts are treated as zero
_ONE = torch.ones((), dtype=torch.float32, device="cpu")


# The entry of the ledger, "biases" or "stabiliser", with its values and factors; see `Walk.absorb`.
Absorbed = tuple[str, Tensor, Tensor | float | None]


class Passed(NamedTuple):
    """Result of a rule for the input of an operation.

    Attributes:
        grad: G at the input, where the relevance is input * G; None if the rule returns relevance.
        relevance: The relevance of the input, for rules that also give relevance to an input of zero.
        absorbed: The relevance that does not reach the input.
    """

    grad: Tensor | None = None
    relevance: Tensor | None = None
    absorbed: Sequence[Absorbed] = ()


def reads_gradient(rule: Rule) -> bool:
    """Return whether the kernel of a rule reads G at the output instead of the relevance z * G, so that z may be 0."""
    is_gradient = isinstance(rule, Epsilon) and not rule.epsilon
    return type(rule) in KERNELS and (is_gradient or isinstance(rule, Excitation))


def _epsilon(rule: Epsilon, op: LinearOperation, relevance: Tensor) -> Passed:
    """Divide the relevance by z + epsilon sign z, or pass G if epsilon is 0."""
    if not rule.epsilon:
        return Passed(op.transposed(relevance, op.weight), absorbed=_biases(op, _position_sums(op, relevance), op.bias))
    z = op.output
    epsilon = rule.epsilon * (op.scale if rule.relative else z.new_ones([1] * z.dim()))
    if op.is_positive:
        quotients = _bounded(relevance, z + epsilon)
        size = sums = _position_sums(op, quotients)
    else:
        quotients = relevance / z.abs().add_(epsilon)
        size = _position_sums(op, quotients)
        quotients = quotients * z.sign()
        sums = _position_sums(op, quotients)
    lost = size * (epsilon.flatten(1) if len(op.dims) > 1 else epsilon)
    absorbed = [*_biases(op, sums, op.bias), ("stabiliser", lost.sum(1) if len(op.dims) > 1 else lost, None)]
    return Passed(op.transposed(quotients, op.weight), absorbed=absorbed)


def _gamma(rule: Gamma, op: LinearOperation, relevance: Tensor) -> Passed:
    """Divide the relevance by the parts of both signs, of which the parts with the sign of z are enlarged."""
    if op.is_positive and op.is_nonnegative:
        # Up to the factor 1 + gamma, which cancels, this is the operation with larger positive weights.
        slope = 1 / (1 + rule.gamma)
        bias = None if op.bias is None else F.leaky_relu(op.bias, slope)
        weight, parts = _parts(op, lambda part: F.leaky_relu(part, slope), bias)
        quotients = _bounded(relevance, parts)
        return Passed(op.transposed(quotients, weight), absorbed=_biases(op, _position_sums(op, quotients), bias))
    # The sum of all parts, of which the parts with the sign of z are enlarged, up to a factor.
    z, factor = op.output, rule.gamma / (2 + rule.gamma)
    magnitudes = _magnitudes(op, op.bias).copysign_(z)
    parts = torch.add(z, magnitudes, alpha=factor, out=magnitudes)
    sign = parts.sign()
    quotients = _bounded(relevance, parts)
    of_magnitudes = sign.mul_(quotients).mul_(factor)
    absorbed = _biases(op, _position_sums(op, quotients), op.bias)
    if op.bias is not None:
        absorbed += _biases(op, _position_sums(op, of_magnitudes), op.bias.abs())
    return Passed(_spread(op, quotients, of_magnitudes), absorbed=absorbed)


def _alpha_beta(rule: AlphaBeta, op: LinearOperation, relevance: Tensor) -> Passed:
    """Divide the relevance by the positive parts, and by the negative parts."""
    bias = op.bias if rule.bias else None
    if not rule.beta and op.is_nonnegative:
        positive = _least(op, relevance, bias)
        weight, parts = _parts(op, F.relu, positive)
        quotients, absorbed = _quotients(op, relevance, parts, None if bias is None else positive)
        return Passed(op.transposed(quotients, weight), absorbed=absorbed)
    positive = None if bias is None else bias.clamp(min=0)
    if not rule.beta:
        magnitudes = _magnitudes(op, bias)
        parts, doubled = _without(op, rule, magnitudes) + magnitudes, None if positive is None else 2 * positive
        quotients, absorbed = _sum_quotients(op, rule, relevance, parts, magnitudes, doubled)
        return Passed(_spread(op, quotients, quotients), absorbed=absorbed)
    # The negative parts are summed alone: the sums of positive parts then have no cancellation where the output is
    # positive.
    negative, weight = _least(op, relevance, None if bias is None else -bias), F.relu(-op.weight)
    magnitudes = op.run(op.input if op.is_nonnegative else F.relu(op.input), weight, negative)
    if not op.is_nonnegative:
        magnitudes.add_(op.run(F.relu(-op.input), signed(op.weight, 1)))
    parts = _without(op, rule, magnitudes) + magnitudes
    up, absorbed = _sum_quotients(op, rule, relevance, parts, magnitudes, positive)
    down, unreached = _quotients(op, relevance, magnitudes, None if bias is None else negative)
    absorbed = [(name, rule.alpha * values, numbers) for name, values, numbers in absorbed]
    absorbed += [(name, -rule.beta * values, numbers) for name, values, numbers in unreached]
    if op.is_nonnegative:
        grad = op.transposed(down, weight)
        grad = grad.lerp_(op.transposed(up, signed(op.weight, 1)), rule.alpha)
        return Passed(grad, absorbed=absorbed)
    factor = rule.beta / rule.alpha
    # Not in place: the sums of a matrix product are its quotients.
    grad = _spread(op, torch.add(up, down, alpha=factor), torch.sub(up, down, alpha=factor))
    return Passed(grad.mul_(rule.alpha / 2), absorbed=absorbed)


def _excitation(rule: Excitation, op: LinearOperation, grad: Tensor) -> Passed:
    """Weight the input by its gradient."""
    weights = op.transposed(grad, op.weight)
    parts = op.input * weights
    passed = torch.where(parts > 0, weights, weights * rule.inhibition(parts, op.dims))
    lost = (op.output * grad).sum(op.dims) - (op.input * passed).sum(op.dims)
    return Passed(passed, absorbed=[("stabiliser", lost, None)])


KERNELS: dict[type[Rule], Callable[[Any, LinearOperation, Tensor], Passed]] = {
    Epsilon: _epsilon,
    Gamma: _gamma,
    AlphaBeta: _alpha_beta,
    ZPlus: _alpha_beta,
    Excitation: _excitation,
    ContrastiveRule: _excitation,
}
"""The kernels by class of rule. A rule of another class, such as a subclass, is computed by its formula."""


def _biases(op: LinearOperation, sums: Tensor, bias: Tensor | None) -> list[Absorbed]:
    """Return the relevance of a bias, given the sums of the quotients over all positions."""
    if bias is None:
        return []
    is_vector = len(op.dims) > 1 or bias.numel() == bias.shape[-1] == sums.shape[-1]
    return [("biases", sums, bias.detach().flatten()) if is_vector else ("biases", sums * bias, None)]


def _position_sums(op: LinearOperation, values: Tensor) -> Tensor:
    """Return the sums over all positions (N, channels) of a convolution; for a matrix product, the values."""
    return values.sum(op.dims[1:]) if len(op.dims) > 1 else values


def _bounded(relevance: Tensor, parts: Tensor) -> Tensor:
    """Divide the relevance by sums of parts, which are overwritten and at least the output where it has relevance."""
    return torch.div(relevance, parts, out=parts).nan_to_num_(0, 0, 0)  # 0 / 0 is 0


def _quotients(
    op: LinearOperation, relevance: Tensor, parts: Tensor, bias: Tensor | None
) -> tuple[Tensor, list[Absorbed]]:
    """Divide the relevance of the output by sums of parts of one sign, with the bias of `_least`.

    Args:
        op: The operation.
        relevance: The relevance.
        parts: The magnitudes of the sums, which are overwritten.
        bias: The bias of `_least`; None without a bias.

    Returns:
        The quotients; and the relevance of the bias, and the relevance that nothing receives because there is no part.
    """
    if not _has_least(op):
        return _masked_quotients(op, relevance, parts, bias)
    # Where there is no part, quotients are huge. They need no mask, because they reach only inputs of zero, which have
    # no relevance. Times the tiny number, they are the lost relevance, which the bias does not absorb.
    quotients = torch.div(relevance, parts, out=parts)
    sums = _position_sums(op, quotients)
    biases = [] if bias is None else [*_biases(op, sums, bias), ("biases", sums, -TINY)]
    return quotients, [*biases, ("stabiliser", sums, TINY)]


def _sum_quotients(
    op: LinearOperation, rule: AlphaBeta, relevance: Tensor, parts: Tensor, others: Tensor, bias: Tensor | None
) -> tuple[Tensor, list[Absorbed]]:
    """Divide the relevance by positive parts that are the output plus other parts, with the rounding errors of both."""
    if op.is_positive and rule.bias:
        quotients = _bounded(relevance, parts)
        return quotients, _biases(op, _position_sums(op, quotients), bias)
    rounding = torch.sub(parts, others, alpha=_ROUNDING * torch.finfo(parts.dtype).eps)
    return _masked_quotients(op, relevance, where_above(parts, rounding, 0), bias)


def _masked_quotients(
    op: LinearOperation, relevance: Tensor, parts: Tensor, bias: Tensor | None
) -> tuple[Tensor, list[Absorbed]]:
    """Divide the relevance by positive parts, which are overwritten; 0 where there is no part."""
    torch.threshold_(parts, 2 * TINY, torch.inf)
    lost = where_above(relevance, parts, torch.finfo(parts.dtype).max).sum(op.dims)
    quotients = torch.div(relevance, parts, out=parts)
    return quotients, [*_biases(op, _position_sums(op, quotients), bias), ("stabiliser", lost, None)]


def _has_least(op: LinearOperation) -> bool:
    """Return whether a tiny number is added to sums of parts, so that quotients by them need no mask."""
    return op.is_rectified and len(op.dims) > 1


def _least(op: LinearOperation, relevance: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return the positive part of a bias for sums of parts, and at least a tiny number; None for a number of zero."""
    if bias is None:
        return relevance.new_full(relevance.shape[1:2], TINY) if _has_least(op) else None
    return bias.clamp(min=TINY)


def _parts(op: LinearOperation, part: Callable[[Tensor], Tensor], bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return a part of the weights, and the result of the operation with them and a bias, which may be overwritten."""
    shared = {} if op.shared is None else op.shared
    if "parts" not in shared:
        weight = part(op.weight)
        shared["parts"] = weight, op.run(op.input, weight, bias)
    weight, parts = shared["parts"]
    return weight, parts if op.shared is None else parts.clone()


def _magnitudes(op: LinearOperation, bias: Tensor | None) -> Tensor:
    """Return |W| |a| + |bias| as a new tensor."""
    return op.run(op.input.abs(), op.weight.abs(), None if bias is None else bias.abs())


def _without(op: LinearOperation, rule: AlphaBeta, magnitudes: Tensor) -> Tensor:
    """Return the output, or W a if the bias is not a part; computed again if a large bias would lose digits."""
    if rule.bias or op.bias is None:
        return op.output
    is_read = magnitudes.numel() > 0 and not is_tracing()
    is_small = is_read and float(op.bias.abs().amax()) <= 8 * float(magnitudes.amin())
    return op.output - op.bias if is_small else op.run(op.input, op.weight)


def _spread(op: LinearOperation, quotients: Tensor, of_magnitudes: Tensor) -> Tensor:
    """Return G at the input, for quotients of the parts a w and of their magnitudes |a w|.

    At an input of zero, it is the limit from above, as where no input is negative: a gate of zero receives it.
    """
    magnitudes, signs = op.transposed(of_magnitudes, op.weight.abs()), op.input + 0  # without -0.0
    return op.transposed(quotients, op.weight).addcmul_(magnitudes, torch.copysign(_ONE, signs, out=signs))
