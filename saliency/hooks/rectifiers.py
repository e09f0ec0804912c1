"""Which nodes of an autograd graph are rectifiers, which are other nonlinearities, and which hide what they do.

The classes of the nodes are taken from probes, `type(torch.relu(t).grad_fn)`, because their names belong to PyTorch.
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
from .autograd_graph import CHECKPOINT_NODE, MODULE_HOOK_NODE, next_functions, result_shape, saved, wrapped_node

_REENTRANT = (
    "a part of the model is checkpointed with use_reentrant=True, which hides its operations from the autograd graph; "
    "use torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or switch checkpointing off"
)
CUT = "the gradient is cut on the way, as by a quantised layer, detach, argmax or an operation without a derivative"
INDEPENDENT = (
    f"no gradient of the score reaches the input: the score does not depend on the input, or {CUT}; methods that only "
    "run the model forwards, such as occlusion and rise, need no gradient"
)


@dataclass(frozen=True, slots=True)
class Coverage:
    """How many nonlinearities a rule rewrote, and how many it let through as they are, by kind.

    A hidden site is a multiplication or a selection by a fixed mask, or an operation of somebody's own: it may be a
    ReLU written by hand, which the graph cannot tell.
    """

    rewritten: Mapping[str, int] = field(default_factory=dict)
    passed: Mapping[str, int] = field(default_factory=dict)
    hidden: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """For example `17 relu rewritten, 2 silu passed through`."""
        parts = [f"{n} {kind} rewritten" for kind, n in self.rewritten.items()]
        parts += [f"{n} {kind} passed through" for kind, n in self.passed.items()]
        parts += [f"{n} {kind} that may hide a ReLU" for kind, n in self.hidden.items()]
        return ", ".join(parts) or "no rectifier"


class Site(NamedTuple):
    """One nonlinearity in the graph of one call."""

    node: Node
    kind: str


class Sites(NamedTuple):
    """The nonlinearities between a score and an input."""

    rectifiers: list[Site]
    others: list[Site]
    hidden: Counter[str]


def _node_type(function: Callable[[Tensor], Tensor]) -> type:
    with torch.inference_mode(mode=False), torch.enable_grad():
        # A clone, since the probe may work in place.
        return type(function(torch.ones(1, requires_grad=True, dtype=torch.float32, device="cpu").clone()).grad_fn)


def _is_zero(bound: Any) -> bool:
    """Whether a clamp's bound, a number or a tensor, is 0 everywhere."""
    if isinstance(bound, Tensor):
        return not bound.requires_grad and not bool(bound.any())
    return bound is not None and bound == 0


def _constant_operand_is_zero(node: Any) -> bool:
    """Whether a maximum has exactly one operand with a gradient, and the other is 0."""
    tracked = [function is not None for function, _ in next_functions(node)]
    if tracked == [True, False]:
        return _is_zero(saved(node, "other"))
    return tracked == [False, True] and _is_zero(saved(node, "self"))


_Test = Callable[[Any], bool]

# Each kind of rectifier: an operation whose node shows the class, and what the node must say to be one.
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

# The other nonlinearities. Some have a class of their own where they work in place.
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

# Selections and products whose other operand is a fixed mask: what a ReLU written by hand leaves in the graph.
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
    """Whether a node selects by a mask that is fixed during the backward pass, as a hand-written ReLU does."""
    if kind == "product with a mask":
        tracked = [function is not None for function, _ in next_functions(node)]
        factor = saved(node, "other") if tracked[:1] == [True] and not all(tracked) else None
        factor = saved(node, "self") if tracked == [False, True] else factor
        # A mask has the shape of what it masks, unlike a scale or a gate, and holds only 0 and 1.
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
    """Which spelling of a ReLU the node is: relu, relu6, threshold, clamp or maximum at 0; "" where it is none."""
    kind, test = _rectifier_tests().get(type(node), ("", None))
    return kind if test is not None and test(node) else ""


def output_of(node: Any) -> Tensor:
    """What a rectifier's node gave in the forward pass, in the shape of its gradient."""
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
    """The level above which a rectifier is flat (6 for a ReLU6), or None."""
    highest: Tensor | float | None = saved(node, "max_val", saved(node, "max", None))
    return highest


def nodes_between(score: Tensor, x: Tensor) -> list[Node]:
    """The nodes that a gradient passes on its way from `score` to `x`, in an order that follows the gradient.

    Nodes that lead to parameters only are left out: a ReLU on a weight is no site of the network.

    Raises:
        TargetError: No gradient gets from the one to the other.
    """
    end = get_gradient_edge(x).node
    order = list(_postorder(score))
    reaches = {end}
    for node in order:
        if any(function in reaches for function, _ in next_functions(node)):
            reaches.add(node)
    if score.grad_fn not in reaches:
        raise TargetError(INDEPENDENT)
    return [node for node in reversed(order) if node in reaches and node is not end]


def _postorder(score: Tensor) -> Iterator[Node]:
    """Every node reachable from `score`, each after all those that it feeds its gradient to."""
    if score.grad_fn is None:
        return
    entered: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(score.grad_fn, False)]
    while stack:
        node, done = stack.pop()
        if done:
            yield node
        elif node not in entered:
            entered.add(node)
            stack.append((node, True))
            stack.extend((function, False) for function, _ in next_functions(node) if function is not None)


def find_sites(score: Tensor, x: Tensor) -> Sites:
    """The nonlinearities between `score` and `x`, sorted into rectifiers, others, and what may hide one.

    Raises:
        NotApplicableError: A part of the model is compiled, fused or checkpointed in a way that keeps its nodes from
            the graph, or works in place on a view.
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
    """Raise NotApplicableError where a part of the model is checkpointed so that no gradient can be asked for."""
    for node in _postorder(score):
        if isinstance(node, CHECKPOINT_NODE):
            raise NotApplicableError(_REENTRANT)


def _opaque(node: Any) -> str:
    """The name of an operation whose inside is not in the graph; "" for the operations of PyTorch and torchvision.

    Most of these kinds have no public class to probe, so the C++ name of the node decides.
    """
    name = node.name()
    if isinstance(node, CHECKPOINT_NODE):
        raise NotApplicableError(_REENTRANT)
    if name.startswith("CompiledFunction"):
        raise NotApplicableError(
            "a part of the model is compiled, which keeps its ReLUs out of the autograd graph; hand over the model as "
            "it was before torch.compile"
        )
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        known = isinstance(node, MODULE_HOOK_NODE) or "_torchvision_" in name
        return "" if known else name.removesuffix("Backward")
    if name.startswith("torch::jit"):
        raise NotApplicableError(
            "TorchScript has fused a part of the model, which keeps its ReLUs out of the autograd graph; hand over the "
            "eager model, or run the scripted one under torch.jit.optimized_execution(False) from its first call on"
        )
    if inner := _kind_in_place_on_a_view(node):
        raise NotApplicableError(
            f"a {inner} works in place on a view of another tensor, where its gradient cannot be rewritten; "
            "switch inplace off there, or let it work on the whole tensor"
        )
    return name if type(node).__name__ == "CppFunction" and "torchvision" not in name else ""


def _kind_in_place_on_a_view(node: Any) -> str:
    """The kind of the nonlinearity that a copy into a slice wraps; "" for other nodes."""
    inner = wrapped_node(node)
    return "" if inner is None else _rectifier_kind(inner) or _other_kinds().get(type(inner), "")
