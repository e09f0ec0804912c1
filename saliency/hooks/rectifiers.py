"""Classify the nodes of an autograd graph: rectifiers, other nonlinearities, and nodes that may hide a ReLU.

The classes of nodes are taken from probes, `type(torch.relu(t).grad_fn)`, because their names are private to PyTorch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from ..errors import NotApplicableError, TargetError
from .autograd_graph import (
    CHECKPOINT_NODE,
    MODULE_HOOK_NODE,
    has_wrapped_node,
    next_functions,
    result_shape,
    saved,
    wrapped_node,
)

_REENTRANT = (
    "a part of the model is checkpointed with use_reentrant=True, which hides its operations from the autograd graph; "
    "use torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or disable checkpointing"
)
CUT = "the gradient is cut in between, for example by a quantised layer, detach or argmax"
INDEPENDENT = (
    f"no gradient of the score reaches the input: the score does not depend on the input, or {CUT}; methods that only "
    "run the model forwards, such as occlusion and rise, need no gradient"
)


@dataclass(frozen=True, slots=True)
class Coverage:
    """Number of nonlinearities whose gradient a rule rewrote or left unchanged, by kind.

    A hidden site is a multiplication or selection by a fixed mask, or a custom operation. It may be a ReLU written by
    hand, which the graph does not show.
    """

    rewritten: Mapping[str, int] = field(default_factory=dict)
    passed: Mapping[str, int] = field(default_factory=dict)
    hidden: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return a summary such as `17 relu rewritten, 2 silu passed through`."""
        parts = [f"{n} {kind} rewritten" for kind, n in self.rewritten.items()]
        parts += [f"{n} {kind} passed through" for kind, n in self.passed.items()]
        parts += [f"{n} {kind} that may hide a ReLU" for kind, n in self.hidden.items()]
        return ", ".join(parts) or "no rectifier"


class Site(NamedTuple):
    """Nonlinearity in the graph of one call."""

    node: Node
    kind: str


class Sites(NamedTuple):
    """Nonlinearities between a score and an input."""

    rectifiers: list[Site]
    others: list[Site]
    hidden: Counter[str]


def _node_type(function: Callable[[Tensor], Tensor]) -> type:
    with torch.inference_mode(mode=False), torch.enable_grad():
        # A clone, because the probe may work in place.
        return type(function(torch.ones(1, requires_grad=True, dtype=torch.float32, device="cpu").clone()).grad_fn)


def _is_zero(bound: Any) -> bool:
    """Return whether the bound of a clamp, a number or a tensor, is 0 everywhere."""
    if isinstance(bound, Tensor):
        return not bound.requires_grad and not bool(bound.any())
    return bound is not None and bound == 0


def _constant_operand_is_zero(node: Any) -> bool:
    """Return whether exactly one operand of a maximum has a gradient, and the other is 0."""
    tracked = [function is not None for function, _ in next_functions(node)]
    if tracked == [True, False]:
        return _is_zero(saved(node, "other"))
    return tracked == [False, True] and _is_zero(saved(node, "self"))


_Test = Callable[[Any], bool]

# For each kind of rectifier: operations that create its node class, and a test that a node of it is a rectifier.
_RECTIFIERS: dict[str, list[tuple[Callable[[Tensor], Tensor], _Test]]] = {
    "relu": [(torch.relu, lambda node: True)],
    "relu6": [(F.relu6, lambda node: saved(node, "min_val") == 0)],
    "threshold": [
        (lambda t: F.threshold(t, 0, 0), lambda node: saved(node, "threshold") == 0),
        (lambda t: torch.threshold_(t, 0, 0), lambda node: saved(node, "threshold") == 0),
    ],
    "clamp": [
        (lambda t: t.clamp(min=0), lambda node: _is_zero(saved(node, "min"))),
        (lambda t: t.clamp(min=torch.zeros_like(t)), lambda node: _is_zero(saved(node, "min"))),
        (lambda t: t.clamp_min(0), lambda node: _is_zero(saved(node, "min"))),
        (lambda t: torch.clamp_min(t, torch.zeros_like(t)), lambda node: _is_zero(saved(node, "min"))),
    ],
    "maximum": [
        (lambda t: torch.maximum(t, torch.zeros_like(t)), _constant_operand_is_zero),
        (lambda t: torch.fmax(t, torch.zeros_like(t)), _constant_operand_is_zero),
    ],
}

# Other nonlinearities. Some have another class if they work in place.
_OTHERS: dict[str, list[Callable[[Tensor], Tensor]]] = {
    "leaky_relu": [F.leaky_relu, F.leaky_relu_],
    "prelu": [lambda t: F.prelu(t, torch.full_like(t, 0.25))],
    "rrelu": [F.rrelu, F.rrelu_],
    "elu": [F.elu, F.elu_],
    "celu": [F.celu, F.celu_],
    "gelu": [F.gelu],
    "silu": [F.silu],
    "mish": [F.mish],
    "hardswish": [F.hardswish],
    "softplus": [F.softplus],
}

# Selections by a fixed mask and products with one, as in the graph of a hand-written ReLU.
_MASKED: dict[str, Callable[[Tensor], Tensor]] = {
    "where": lambda t: torch.where(t > 0, t, 0.0),
    "masked_fill": lambda t: t.masked_fill(t < 0, 0.0),
    "masked_scatter": lambda t: t.masked_scatter(t < 0, torch.zeros_like(t)),
    "minimum with 0": lambda t: torch.minimum(t, torch.zeros_like(t)),
    "fmin with 0": lambda t: torch.fmin(t, torch.zeros_like(t)),
    "clamp from above at 0": lambda t: t.clamp(max=0),
    "product with a mask": lambda t: t * (t > 0),
}


@cache
def _rectifier_tests() -> dict[type, tuple[str, _Test]]:
    return {_node_type(probe): (kind, test) for kind, tests in _RECTIFIERS.items() for probe, test in tests}


@cache
def _other_kinds() -> dict[type, str]:
    return {_node_type(probe): kind for kind, probes in _OTHERS.items() for probe in probes}


@cache
def _masked_kinds() -> dict[type, str]:
    return {_node_type(probe): kind for kind, probe in _MASKED.items()}


def _is_masked(node: Any, kind: str) -> bool:
    """Return whether a node selects by a mask that is fixed in the backward pass, as a hand-written ReLU does."""
    if kind == "product with a mask":
        tracked = [function is not None for function, _ in next_functions(node)]
        factor = saved(node, "other") if tracked[:1] == [True] and not all(tracked) else None
        factor = saved(node, "self") if tracked == [False, True] else factor
        # Unlike a scale or a gate, a mask has the shape of the masked tensor and holds only 0 and 1.
        if not isinstance(factor, Tensor) or tuple(factor.shape) != result_shape(node) or factor.numel() < 2:
            return False
        zeros, ones = factor == 0, factor == 1
        return factor.dtype == torch.bool or bool((zeros | ones).all() and zeros.any() and ones.any())
    if kind in ("minimum with 0", "fmin with 0"):
        return _constant_operand_is_zero(node)
    if kind == "clamp from above at 0":
        return saved(node, "min") is None and _is_zero(saved(node, "max"))
    if kind == "where":
        return sum(function is not None for function, _ in next_functions(node)) == 1
    return True


def _rectifier_kind(node: Node) -> str:
    """Return the kind of a rectifier: relu, relu6, threshold, clamp or maximum at 0; "" for other nodes."""
    kind, test = _rectifier_tests().get(type(node), ("", None))
    return kind if test is not None and test(node) else ""


def output_of(node: Any) -> Tensor:
    """Return the output of a rectifier's node in the forward pass, in the shape of its gradient."""
    kind, _ = _rectifier_tests()[type(node)]
    if kind == "relu":
        result: Tensor = saved(node, "result")
        return result
    if kind == "maximum":
        x = saved(node, "self") if next_functions(node)[0][0] is not None else saved(node, "other")
        return torch.clamp(x, min=0)
    highest = saved(node, "max_val", saved(node, "max", None))
    return torch.clamp(
        saved(node, "self"), min=torch.zeros_like(highest) if isinstance(highest, Tensor) else 0, max=highest
    )


def saturation_of(node: Any) -> Tensor | float | None:
    """Return the level above which a rectifier is flat (6 for a ReLU6), or None."""
    highest: Tensor | float | None = saved(node, "max_val", saved(node, "max", None))
    return highest


def nodes_between(score: Tensor, x: Tensor) -> list[Node]:
    """Return the nodes between `score` and `x` in the order of the backward pass.

    Nodes that lead to parameters only are left out: a ReLU on a weight is not a site of the network.

    Raises:
        TargetError: No gradient reaches `x`.
    """
    end = get_gradient_edge(x).node
    reaching = {end}
    order = []
    for node, successors in _postorder(score):
        if not reaching.isdisjoint(successors):
            reaching.add(node)
            order.append(node)
    if score.grad_fn not in reaching:
        raise TargetError(INDEPENDENT)
    return order[::-1]


def _postorder(score: Tensor) -> Iterator[tuple[Node, list[Node]]]:
    """Yield every node reachable from `score`, with its successors; the successors come first."""
    if score.grad_fn is None:
        return
    entered: set[Node] = set()
    stack: list[tuple[Node, list[Node] | None]] = [(score.grad_fn, None)]
    while stack:
        node, successors = stack.pop()
        if successors is not None:
            yield node, successors
        elif node not in entered:
            entered.add(node)
            successors = [function for function, _ in next_functions(node) if function is not None]
            stack.append((node, successors))
            stack += [(function, None) for function in successors if function not in entered]


def find_sites(score: Tensor, x: Tensor) -> Sites:
    """Find the nonlinearities between `score` and `x`: rectifiers, others, and nodes that may hide one.

    Raises:
        NotApplicableError: A part of the model is compiled, fused or checkpointed so that its nodes are not in the
            graph, or works in place on a view.
        TargetError: The score does not depend on the input.
    """
    rectifiers: list[Site] = []
    others: list[Site] = []
    hidden: Counter[str] = Counter()
    for node in nodes_between(score, x):
        if kind := _rectifier_kind(node):
            rectifiers.append(Site(node, kind))
        elif other := _other_kinds().get(type(node)):
            others.append(Site(node, other))
        elif (masked := _masked_kinds().get(type(node))) and _is_masked(node, masked):
            hidden[masked] += 1
        elif opaque := _opaque(node):
            hidden[opaque] += 1
    return Sites(rectifiers, others, hidden)


def refuse_checkpoints(score: Tensor) -> None:
    """Raise NotApplicableError if a part of the model is checkpointed so that no gradient can be computed."""
    for node, _ in _postorder(score):
        if isinstance(node, CHECKPOINT_NODE):
            raise NotApplicableError(_REENTRANT)


def _opaque(node: Any) -> str:
    """Return the name of an operation that the graph shows as a whole; "" for operations of PyTorch and torchvision.

    Most of these kinds have no public class to probe, so the C++ name of the node decides.
    """
    if type(node) in _transparent:
        return ""
    name = node.name()
    if isinstance(node, CHECKPOINT_NODE):
        raise NotApplicableError(_REENTRANT)
    if name.startswith("CompiledFunction"):
        raise NotApplicableError(
            "a part of the model is compiled, which hides its ReLUs from the autograd graph; pass the model "
            "without torch.compile"
        )
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        known = isinstance(node, MODULE_HOOK_NODE) or "_torchvision_" in name
        return "" if known else name.removesuffix("Backward")
    if name.startswith("torch::jit"):
        raise NotApplicableError(
            "TorchScript has fused a part of the model, which hides its ReLUs from the autograd graph; pass the "
            "eager model, or run the scripted one under torch.jit.optimized_execution(False) from its first call on"
        )
    if inner := _kind_in_place_on_a_view(node):
        raise NotApplicableError(
            f"a {inner} works in place on a view of another tensor, where its gradient cannot be rewritten; "
            "set inplace=False there, or apply it to the whole tensor"
        )
    if type(node).__name__ == "CppFunction":
        return "" if "torchvision" in name else name
    if not has_wrapped_node(node):
        _transparent.add(type(node))
    return ""


# Node classes whose operations are never opaque. Some other classes represent many operations.
_transparent: set[type] = set()


def _kind_in_place_on_a_view(node: Any) -> str:
    """Return the kind of nonlinearity that a node applies in place on a view; "" for other nodes."""
    inner = wrapped_node(node)
    return "" if inner is None else _rectifier_kind(inner) or _other_kinds().get(type(inner), "")
