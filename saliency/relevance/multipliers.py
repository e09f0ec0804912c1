"""Rules of DeepLIFT for each kind of operation.

A multiplier m is the effect of a value on the score: m * (x - x0) is its part of the difference of the scores, where x
is the value for the image and x0 the value for the baseline. The parts of the operands of an operation sum to the parts
of its results.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from ..attribution.forward import TargetGradients
from ..errors import NotApplicableError
from ..hooks.attention import grouped
from ..hooks.autograd_graph import Gradients, saved
from ..hooks.operations import Op, Operation, is_pointwise, operator_name
from ..hooks.pytree import tree_map_tensors, tree_tensors
from ..io.axes import at_least_float32
from .propagation import (
    CONVOLUTION_OPTIONS,
    OF_DEGREE_ONE,
    Unknown,
    attention_logits,
    channelwise,
    derivative,
    kind_of,
    normalisation,
    refuses_complex,
    without_rule,
)
from .rules import TINY, divided, where_above
from .walk import Edge, Visit

_WINNERS = {
    *("max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool3d"),
    *("max", "amax", "maximum", "min", "amin", "minimum"),
}
_NODES = (1, 4, 16, 64)


class Pair(NamedTuple):
    """A value for the image and for the baseline."""

    x: Tensor
    x0: Tensor

    @property
    def change(self) -> Tensor:
        """The value for the image minus the value for the baseline."""
        return self.x - self.x0

    @property
    def mean(self) -> Tensor:
        """The mean of both values."""
        return (self.x + self.x0) / 2


class MultiplierStep(NamedTuple):
    """One node of a walk, with its operation for the image and for the baseline."""

    visit: Visit
    operation: Operation
    base: Operation

    @property
    def grad(self) -> Tensor:
        """The multipliers of the first result that has any, in at least float32."""
        return at_least_float32(self.visit.grad)

    def pair(self, name: str) -> Pair:
        """Return an operand by its name."""
        return Pair(*(at_least_float32(operation.args[name]) for operation in self[1:]))


class Multipliers:
    """The rule of one walk: it gives the multipliers of the operands of each operation, from two forwards.

    Args:
        grads: The scores of the images.
        base: The scores of the baselines.
        unknown: Whether an operation without a rule is refused ("refuse") or passes its gradient ("gradient").
        frees: Whether the operands of each operation are freed as soon as they are used. No other walk can follow.

    Raises:
        NotApplicableError: The model runs other operations for the baselines than for the images, or on other sizes.
    """

    def __init__(self, grads: TargetGradients, base: TargetGradients, unknown: Unknown, *, frees: bool = False) -> None:
        names, base_names = ([node.name() for node in scores.nodes] for scores in (grads, base))
        if names != base_names:
            raise NotApplicableError(
                "the model runs other operations for the baseline than for the image; choose another baseline"
            )
        self.unknown: Unknown = unknown
        self._frees = frees
        self._base = dict(zip(grads.nodes, map(base.forward.operations.operation, base.nodes), strict=True))
        self.touching = self._find_touching(grads)

    def _find_touching(self, grads: TargetGradients) -> set[Node]:
        """Return the pointwise functions, except ReLUs, with an operand that is somewhere the same for both inputs."""
        touching = dict[Node, Tensor]()
        for node, base in self._base.items():
            operation = grads.forward.operations.operation(node)
            if operation is None or base is None or not is_pointwise(operation.op) or operation.name == "relu":
                continue
            x, x0 = (next(iter(recorded.args.values())) for recorded in (operation, base))
            if isinstance(x, Tensor) and x.shape == x0.shape:
                touching[node] = (x == x0).any()
        read = torch.stack([*touching.values()]).tolist() if touching else []  # one transfer from the device
        return {node for node, is_touching in zip(touching, read, strict=True) if is_touching}

    def __call__(self, visit: Visit) -> Gradients:
        """Return the multipliers of the operands of a node."""
        operation, base = visit.operation, self._base[visit.node]
        if operation is None or base is None:
            return without_rule(visit, self.unknown)
        operands = ((value, base.args.get(name)) for name, value in operation.args.items())
        if any(
            isinstance(value, Tensor) and isinstance(base_value, Tensor) and value.shape != base_value.shape
            for value, base_value in operands
        ):
            raise NotApplicableError(
                "the model or the target picks other parts of a tensor for the baseline than for the image"
            )
        kind = _kind(operation.op)
        if kind == "plain":
            return visit.plain()
        # A part of a tensor can be multiplied by a constant.
        is_part = operation.is_part and (kind != "mul" or sum(visit.on_path) > 1)
        if operation.op.namespace != "aten" or is_part or refuses_complex(visit, operation):
            return without_rule(visit, self.unknown)
        step = MultiplierStep(visit, operation, base)
        visit.walk.handled[operation.name.removeprefix("_")] += 1
        passed = _RULES.get(kind, _integrated)(step)
        if self._frees:
            operation.args.clear()
            base.args.clear()
            base.kept_result = None
        return passed


def _kind(op: Op) -> str:
    """Return the kind of an operation; "" if it has no rule except its mean gradient."""
    name = operator_name(op)
    if name in _WINNERS:
        return "winners"
    if is_pointwise(op):
        return "activation"
    return "" if name in OF_DEGREE_ONE else kind_of(op)


def _linear(step: MultiplierStep) -> Gradients:
    """Pass the gradient of a convolution or matrix product with constant weights."""
    visit = step.visit
    if visit.on_path == [True, True] and step.operation.name in ("mm", "bmm"):
        return step.grad @ step.pair("mat2").mean.mT, step.pair("self").mean.mT @ step.grad
    if sum(visit.on_path) > 1:
        return _integrated(step)
    index = visit.on_path.index(True)
    if index == 0 and visit.node.name() == "ConvolutionBackward0":
        weight, *options = (saved(visit.node, name) for name in ("weight", *CONVOLUTION_OPTIONS))
        node, result = cast("Edge", visit.walk.graph.next[visit.node][0])
        like, mask = visit.grad.new_empty(visit.walk.graph.specs[node][result].shape), [True, False, False]
        passed = torch.ops.aten.convolution_backward.default(visit.grad, like, weight, None, *options, mask)
        return cast("Gradients", passed)
    # Unlike the node as a function, the engine computes no gradients of weights.
    edges = [GradientEdge(visit.node, 0)], [GradientEdge(*cast("Edge", visit.node.next_functions[index]))]
    return (*[None] * index, *torch.autograd.grad(*edges, [visit.grad], retain_graph=True))


def _batch_norm(step: MultiplierStep) -> Gradients:
    """Pass the gradient of a batch norm with constant statistics."""
    factors = step.visit.walk.graph.channel_factors.get(step.visit.node)
    return _norm(step) if factors is None else (step.grad * channelwise(factors.scale, step.grad), None, None)


def _norm(step: MultiplierStep) -> Gradients:
    """Pass through a normalisation as the product of the centred values and the inverse deviation."""
    x = step.pair("input")
    norm = normalisation(step.operation)
    rstd, rstd0 = norm.rstd, normalisation(step.base).rstd
    centred, centred0 = (norm.centred(value) for value in x)
    grad = norm.weighted(step.grad)
    of_rstd = (grad * (centred + centred0)).sum(norm.dims, keepdim=True) / 2
    size = centred.numel() // rstd.numel()
    # The deviation q = 1 / rstd is the root of a mean of squares.
    of_square = of_rstd * (rstd * rstd0).square() / (size * (rstd + rstd0))
    passed = norm.centred(grad * (rstd + rstd0) / 2 - of_square * (centred + centred0))
    return (passed.reshape(x.x.shape), *[None] * (len(step.visit.on_path) - 1))


def _pointwise(step: MultiplierStep) -> Gradients:
    """Rescale: pass the difference of the results divided by the difference of the operands."""
    visit, operation = step.visit, step.operation
    name = next(iter(operation.args))
    is_function = is_pointwise(operation.op) and isinstance(operation.args[name], Tensor)
    if not is_function or not visit.on_path[0] or any(visit.on_path[1:]):
        return _integrated(step)
    x = step.pair(name)
    if x.x.dtype != visit.grad.dtype:  # the weights of a PReLU too
        operation = replace(operation, kept_args=tree_map_tensors(operation.args, at_least_float32))
    if operation.name == "relu":  # the part of the change above zero; for no change, 1 above zero
        # With a tiny beta, the loss is the size of the change, in one operation.
        size = F.smooth_l1_loss(*x, reduction="none", beta=TINY)
        slope = torch.maximum(*x).div_(size.add_(TINY)).clamp_(0, 1)
    else:
        change = x.change
        y, y0 = (operation.repeat(**{name: value}) for value in x)
        slope = y.sub_(y0)
        if visit.node in cast("Multipliers", visit.walk.rule).touching:  # 0 / 0 becomes the derivative
            slope.add_(derivative(operation, x.x), alpha=TINY)
            change.add_(TINY)
        slope.div_(change)
    return (slope.mul_(step.grad), *[None] * (len(visit.on_path) - 1))


def _winners(step: MultiplierStep) -> Gradients:
    """Pass the gain of a window to its winner for the image, and its loss to its winner for the baseline."""
    if "max_pool" in step.operation.name:
        return _max_pool(step)
    x, x0 = _floats(step.operation.args), _floats(step.base.args)
    change = _floats(step.operation.repeat())[0] - _floats(step.base.repeat())[0]
    part = step.grad * change
    is_gain = change < 0 if "min" in step.operation.name else change > 0
    gains = _gradients(step, x, (torch.where(is_gain, part, 0),))
    losses = _gradients(step, x0, (torch.where(is_gain, 0, part),))
    operands = zip(gains, losses, x, x0, strict=True)
    return tuple(_per_change(gain.add_(loss), a, b) for gain, loss, a, b in operands)


def _max_pool(step: MultiplierStep) -> Gradients:
    """Pass gains and losses of the windows of a max pool to the positions of their winners."""
    start = -3 if "3d" in step.operation.name else -2
    x, x0 = (value.flatten(start) for value in step.pair("self"))
    winners, winners0 = (operation.result[1].flatten(start) for operation in step[1:])
    change = x.gather(-1, winners) - x0.gather(-1, winners0)
    part = step.grad.flatten(start) * change
    gain = where_above(part, change, 0)
    passed = torch.zeros_like(x).scatter_add_(-1, winners, gain).scatter_add_(-1, winners0, part.sub_(gain))
    return (_per_change(passed, x, x0).view_as(step.operation.args["self"]),)


def _per_change(part: Tensor, x: Tensor, x0: Tensor) -> Tensor:
    """Divide parts by the change of an operand, in place. The part of an operand that does not change is 0."""
    return part.div_(at_least_float32(x - x0).add_(TINY))


def _mul(step: MultiplierStep) -> Gradients:
    """Multiply by the mean of the other factor of a product."""
    if step.visit.on_path != [True, True]:
        return step.visit.plain()
    return step.grad * step.pair("other").mean, step.grad * step.pair("self").mean


def _div(step: MultiplierStep) -> Gradients:
    """Pass through a quotient as the product with the inverse of the denominator."""
    if not step.visit.on_path[1]:
        return step.visit.plain()
    numerator, denominator = step.pair("self"), step.pair("other")
    product = denominator.x * denominator.x0
    return step.grad * denominator.mean / product, -step.grad * numerator.mean / product


def _softmax(step: MultiplierStep) -> Gradients:
    """Pass through exp(z - l), where l is the logarithm of the sum of exponentials."""
    return (_through_softmax(step.pair("self"), step.grad, step.operation.args["dim"]),)


def _attention(step: MultiplierStep) -> Gradients:
    """Pass through the two products and the softmax of fused attention."""
    query, key, value = (step.pair(name) for name in ("query", "key", "value"))
    logits = Pair(attention_logits(step.operation), attention_logits(step.base))
    key, value = (Pair(*(grouped(part, query.x) for part in pair)) for pair in (key, value))
    scale = step.operation.args.get("scale") or query.x.shape[-1] ** -0.5
    of_logits = _through_softmax(logits, step.grad @ value.mean.mT, -1) * scale
    weights = Pair(logits.x.softmax(-1), logits.x0.softmax(-1)).mean
    passed = (of_logits @ key.mean, of_logits.mT @ query.mean, weights.mT @ step.grad)
    shapes = (step.operation.args[name].shape for name in ("query", "key", "value"))
    pairs = zip(passed, shapes, strict=True)
    fitted = (grad.unflatten(1, (shape[1], -1)).sum(2) if grad.dim() > 3 else grad for grad, shape in pairs)
    return (*fitted, *[None] * (len(step.visit.on_path) - 3))


def _through_softmax(z: Pair, grad: Tensor, dim: int) -> Tensor:
    """Return the multipliers of the logits of a softmax.

    Each s = exp(z - l) is rescaled. The difference of l is such that the differences of all s sum to zero.
    """
    logs = Pair(z.x.log_softmax(dim), z.x0.log_softmax(dim))
    larger = torch.maximum(*logs).exp().nan_to_num_(0)
    change = logs.change.abs().nan_to_num_(0, torch.inf)  # hidden positions are -inf in both
    # Not a tiny summand instead of the mask: `expm1` of tiny numbers takes six times as long.
    slope = larger * torch.where(change == 0, 1, -torch.expm1(-change) / change)
    total = slope.sum(dim, keepdim=True)
    for _ in range(2):  # the second removes the rounding error of the first, which all logits multiply
        grad = grad - divided((slope * grad).sum(dim, keepdim=True), total)
    return slope * grad


def _integrated(step: MultiplierStep) -> Gradients:
    """Return the mean gradients of an operation on the straight path between both points, by a Gauss-Legendre rule.

    The rule has as many nodes as a complete result needs; one node is exact for products.
    """
    pairs = list(zip(_floats(step.operation.args), _floats(step.base.args), strict=True))
    rounding = torch.finfo(step.grad.dtype).eps ** 0.5 / 100
    passed: Gradients = ()
    for count in _NODES:
        nodes, weights = np.polynomial.legendre.leggauss(count)
        points = ([torch.lerp(x0, x, (1 + float(point)) / 2) for x, x0 in pairs] for point in nodes)
        grads = zip(*(_gradients(step, point, step.visit.grads) for point in points), strict=True)
        passed = tuple(
            sum(w / 2 * grad for w, grad in zip(weights.tolist(), samples, strict=True)) if on_path else None
            for samples, on_path in zip(grads, step.visit.on_path, strict=False)
        )
        lost, size = _lost(step, passed)
        if lost <= rounding * size:
            break
    return passed


def _gradients(step: MultiplierStep, operands: list[Tensor], grads: Gradients) -> list[Tensor]:
    """Return the gradients of an operation at other floating-point operands, from the gradients at its results."""

    def run(*operands: Tensor) -> list[Tensor]:
        remaining = iter(operands)
        args = tree_map_tensors(step.operation.args, lambda arg: next(remaining) if arg.is_floating_point() else arg)
        return _floats(step.operation.repeat(**args))

    with torch.enable_grad():
        leaves = [operand.detach().requires_grad_() for operand in operands]
        weighted = [(y, grad.to(y.dtype)) for y, grad in zip(run(*leaves), grads, strict=False) if grad is not None]
    results, weights = zip(*weighted, strict=True)
    return list(torch.autograd.grad(results, leaves, weights, allow_unused=True, materialize_grads=True))


def _floats(tree: Any) -> list[Tensor]:
    """Return the floating-point tensors of a tree: of results or operands, only tensors with a gradient."""
    return [tensor for tensor in tree_tensors(tree) if tensor.is_floating_point()]


def _lost(step: MultiplierStep, passed: Gradients) -> tuple[float, float]:
    """Return the part of the results that the operands do not receive, and the size of all parts."""
    results = _changes(step.visit.grads, step.operation.repeat(), step.base.repeat())
    operands = _changes(passed, step.operation.args, step.base.args)
    return abs(float(results.sum() - operands.sum())), float(results.abs().sum())


def _changes(grads: Gradients, values: Any, base: Any) -> Tensor:
    """Return the sum of multipliers times differences of each value."""
    triples = zip(grads, _floats(values), _floats(base), strict=False)
    return torch.stack([(grad * (x - x0).nan_to_num(0)).sum() for grad, x, x0 in triples if grad is not None])


_RULES = {
    "linear": _linear,
    "batch_norm": _batch_norm,
    "norm": _norm,
    "activation": _pointwise,
    "winners": _winners,
    "mul": _mul,
    "div": _div,
    "softmax": _softmax,
    "attention": _attention,
}
