"""The RevealCancel rule of DeepLIFT, which passes the positive and the negative parts of differences apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..attribution.forward import TargetGradients
from ..errors import NotApplicableError
from ..hooks.autograd_graph import next_functions, source_edge
from ..hooks.operations import Operation, is_pointwise
from ..hooks.pytree import tree_map_tensors, tree_tensors
from .propagation import OF_DEGREE_ONE, batch_norm_scale, kind_of, linear_operation
from .rules import divided
from .walk import Edge

# Linear operations with coefficients of both signs, or in place on a part of a tensor.
_REFUSED = {"upsample_bicubic2d", "_upsample_bicubic2d_aa", "copy"}
# The operand that is subtracted.
_NEGATIVE = {"neg": 0, "rsub": 0, "sub": 1}


class Parts(NamedTuple):
    """The positive and the negative part of the difference of a value between the image and the baseline."""

    rise: Tensor
    fall: Tensor


def reveal_cancel(grads: TargetGradients, base: TargetGradients) -> tuple[Tensor, dict[str, int]]:
    """Return the values (N, C, H, W) of the images against the baselines, and the number of operations by kind.

    The parts are followed from the input to the scores; the gradients of this calculation are the multipliers.

    Raises:
        NotApplicableError: The model has an operation other than convolutions and matrix products with constant
            weights, batch norms, functions of one number, and sums and differences.
    """
    change = grads.x - base.x
    parts = Parts(change.clamp(min=0).requires_grad_(), change.clamp(max=0).requires_grad_())
    known: dict[Edge, Parts] = {source_edge(grads.forward.x): parts}
    records = grads.forward.operations, base.forward.operations
    treated = Counter[str]()
    for node, other in zip(reversed(grads.nodes), reversed(base.nodes), strict=True):
        operands = [known.get((function, at)) if function else None for function, at in next_functions(node)]
        operation, base_operation = records[0].operation(node), records[1].operation(other)
        results = _results(operation, base_operation, operands) if operation and base_operation else []
        if not operation or not results:
            name = operation.name if operation else node.name()
            raise NotApplicableError(f'reveal_cancel has no rule for the operation {name}; use rule="rescale"')
        if kind_of(operation.op) != "plain" or is_pointwise(operation.op):
            treated[operation.name.removeprefix("_")] += 1
        known |= {(node, at): result for at, result in enumerate(results)}
    total = torch.stack(known[source_edge(grads.scores_in_graph)]).sum()
    multipliers = torch.autograd.grad(total, parts)
    return torch.addcmul(parts.rise * multipliers[0], parts.fall, multipliers[1]).detach(), dict(treated)


def _results(operation: Operation, base: Operation, operands: list[Parts | None]) -> list[Parts]:
    """Return the parts of the results of an operation; none if it has no rule."""
    kind, places = kind_of(operation.op), [at for at, parts in enumerate(operands) if parts is not None]
    inside = [parts for parts in operands if parts is not None]
    if is_pointwise(operation.op) and places == [0]:
        return [_rescaled(operation, base, inside[0])]
    scale = batch_norm_scale(operation, inside[0].rise) if kind == "batch_norm" else None
    if scale is not None:
        return [_weighted(torch.mul, scale, inside[0])]
    factor = places[0] - (operation.name in ("addmm", "baddbmm"))
    if kind == "linear" and len(places) == 1 and factor >= 0:
        op = linear_operation(operation, factor)
        return [_weighted(op.run, op.weight, inside[0])]
    if kind != "plain" or is_pointwise(operation.op) or operation.name in _REFUSED | OF_DEGREE_ONE:
        return []
    negative = [at == _NEGATIVE.get(operation.name) for at in range(len(operands))]
    pairs = zip(operands, negative, strict=True)
    signed = [Parts(parts.fall, parts.rise) if parts and minus else parts for parts, minus in pairs]
    both = (_linear(operation, [parts and parts[sign] for parts in signed]) for sign in (0, 1))
    return [Parts(*results) for results in zip(*both, strict=True)]


def _rescaled(operation: Operation, base: Operation, parts: Parts) -> Parts:
    """Return the mean change of a function of one number by each part, before and after the other part."""
    name = next(iter(operation.args))
    start, rise, fall = base.args[name], parts.rise.detach(), parts.fall.detach()
    points = (start, start + rise, start + fall, start + rise + fall)
    y, y_rise, y_fall, y_both = (operation.repeat(**{name: point}) for point in points)
    changes = (y_rise - y + y_both - y_fall) / 2, (y_fall - y + y_both - y_rise) / 2
    return Parts(*(part * divided(change, part.detach()) for part, change in zip(parts, changes, strict=True)))


def _weighted(run: Callable[[Tensor, Tensor], Tensor], weight: Tensor, parts: Parts) -> Parts:
    """Return the parts of a product with weights of any sign."""
    up, down = weight.detach().clamp(min=0), weight.detach().clamp(max=0)
    rise, fall = parts
    return Parts(run(rise, up) + run(fall, down), run(fall, up) + run(rise, down))


def _linear(operation: Operation, operands: Iterable[Tensor | None]) -> list[Tensor]:
    """Return the results of a linear operation of some operands; 0 takes the place of constants."""
    left = iter(operands)

    def filled(tensor: Tensor) -> Tensor:
        own = next(left, None) if tensor.is_floating_point() else tensor
        return torch.zeros_like(tensor) if own is None else own

    args = tree_map_tensors(operation.args, filled)
    numbers = {name: 0 for name in ("other", "value") if isinstance(args.get(name), int | float)}
    return list(tree_tensors(operation.repeat(**args | numbers)))
