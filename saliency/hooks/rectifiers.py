"""Classify the nodes of an autograd graph: rectifiers, other nonlinearities, and nodes that may hide a ReLU.

The classes of nodes are taken from probes, `type(torch.relu(t).grad_fn)`, because their names are private to PyTorch.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node

from ..errors import NotApplicableError
from . import autograd_graph as graph

_IN_PLACE = "so its gradient cannot be rewritten; use inplace=False"


@dataclass(frozen=True, slots=True)
class Coverage:
    """Number of operations that a rule treated, and of nonlinearities whose gradient it rewrote or left, by kind.

    A hidden nonlinearity is a multiplication or selection by a fixed mask, or a custom operation. It may be a ReLU
    written by hand, which the graph does not show. A treated operation is named with its rule, such as "conv by z+".
    `rules` are the rules of convolutions and matrix products, by the module that holds the weights.
    """

    rewritten: Mapping[str, int] = field(default_factory=dict)
    passed: Mapping[str, int] = field(default_factory=dict)
    hidden: Mapping[str, int] = field(default_factory=dict)
    handled: Mapping[str, int] = field(default_factory=dict)
    rules: Mapping[str, str] = field(default_factory=dict)

    def table(self) -> str:
        """Return a table of modules and their rules."""
        return table(self.rules)

    def __str__(self) -> str:
        """Return a summary such as `17 relu rewritten, 2 silu passed through`."""
        parts = [f"{n} {operation}" for operation, n in self.handled.items()]
        parts += [f"{n} {kind} rewritten" for kind, n in self.rewritten.items()]
        parts += [f"{n} {kind} passed through" for kind, n in self.passed.items()]
        parts += [f"{n} {kind} that may hide a ReLU" for kind, n in self.hidden.items()]
        return ", ".join(parts) or "no rectifier"


def table(rows: Mapping[str, str]) -> str:
    """Return the lines of a table of two columns."""
    width = max(map(len, rows), default=0)
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows.items())


class Nonlinearity(NamedTuple):
    """Nonlinearity in the graph of one call."""

    node: Node
    kind: str


class Nonlinearities(NamedTuple):
    """Nonlinearities between a score and an input."""

    rectifiers: list[Nonlinearity]
    others: list[Nonlinearity]
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


def _tracked(node: Any) -> list[bool]:
    """Return which operands of an operation have a gradient."""
    return [function is not None for function, _ in graph.next_functions(node)]


def _constant_operand(node: Any) -> Any:
    """Return the only operand of two that has no gradient; else None."""
    tracked = _tracked(node)
    return graph.saved(node, "other" if tracked[0] else "self") if sorted(tracked) == [False, True] else None


def _is_constant_zero(node: Any) -> bool:
    return _is_zero(_constant_operand(node))


def _is_threshold_zero(node: Any) -> bool:
    return bool(graph.saved(node, "threshold") == 0)


def _is_clamp_from_zero(node: Any) -> bool:
    return _is_zero(graph.saved(node, "min"))


def _is_clamp_to_zero(node: Any) -> bool:
    return graph.saved(node, "min") is None and _is_zero(graph.saved(node, "max"))


def _is_assignment_by_mask(node: Any) -> bool:
    masks = [index for index in graph.saved(node, "indices") if index is not None and index.dtype == torch.bool]
    return _tracked(node) == [True, False] and bool(masks)


def _is_product_with_mask(node: Any) -> bool:
    mask = _constant_operand(node)
    # Unlike a scale or a gate, a mask has the shape of the masked tensor and holds only 0 and 1.
    if not isinstance(mask, Tensor) or tuple(mask.shape) != graph.result_shape(node) or mask.numel() < 2:
        return False
    zeros, ones = mask == 0, mask == 1
    return mask.dtype == torch.bool or bool((zeros | ones).all() and zeros.any() and ones.any())


class _Kind(NamedTuple):
    """Kind of nonlinearity: an operation that creates its node class, and a test of the nodes of that class."""

    name: str
    probe: Callable[[Tensor], Tensor]
    test: Callable[[Any], bool] | None = None


_RECTIFIERS = (
    _Kind("relu", torch.relu),
    _Kind("relu6", F.relu6, lambda node: graph.saved(node, "min_val") == 0),
    _Kind("threshold", lambda t: F.threshold(t, 0, 0), _is_threshold_zero),
    _Kind("threshold", lambda t: torch.threshold_(t, 0, 0), _is_threshold_zero),
    _Kind("clamp", lambda t: t.clamp(min=0), _is_clamp_from_zero),
    _Kind("clamp", lambda t: t.clamp(min=torch.zeros_like(t)), _is_clamp_from_zero),
    _Kind("clamp", lambda t: t.clamp_min(0), _is_clamp_from_zero),
    _Kind("clamp", lambda t: torch.clamp_min(t, torch.zeros_like(t)), _is_clamp_from_zero),
    _Kind("maximum", lambda t: torch.maximum(t, torch.zeros_like(t)), _is_constant_zero),
    _Kind("maximum", lambda t: torch.fmax(t, torch.zeros_like(t)), _is_constant_zero),
)

# Some nodes have another class if the operation works in place.
_OTHER_PROBES = (
    *(F.leaky_relu, F.leaky_relu_, F.rrelu, F.rrelu_, F.elu, F.elu_, F.celu, F.celu_),
    *(F.gelu, F.silu, F.mish, F.hardswish, F.softplus),
)
_OTHERS = (
    _Kind("prelu", lambda t: F.prelu(t, torch.full_like(t, 0.25))),
    *(_Kind(probe.__name__.rstrip("_"), probe) for probe in _OTHER_PROBES),
)

# Selections by a mask, and products with a mask, that is fixed in the backward pass, as in a hand-written ReLU.
_HIDDEN = (
    _Kind("where", lambda t: torch.where(t > 0, t, 0.0), lambda node: sum(_tracked(node)) == 1),
    _Kind("masked_fill", lambda t: t.masked_fill(t < 0, 0.0)),
    # `t[t < 0] = torch.tensor(0.0)`; before PyTorch 2.14 also `t[t < 0] = 0`.
    _Kind("masked_fill", lambda t: t.index_put_((t < 0,), torch.zeros_like(t[0])), _is_assignment_by_mask),
    # Not counted: image features that replace embeddings of words, because they have a gradient.
    _Kind("masked_scatter", lambda t: t.masked_scatter(t < 0, torch.zeros_like(t)), lambda node: not _tracked(node)[1]),
    _Kind("minimum with 0", lambda t: torch.minimum(t, torch.zeros_like(t)), _is_constant_zero),
    _Kind("fmin with 0", lambda t: torch.fmin(t, torch.zeros_like(t)), _is_constant_zero),
    _Kind("clamp from above at 0", lambda t: t.clamp(max=0), _is_clamp_to_zero),
    _Kind("product with a mask", lambda t: t * (t > 0), _is_product_with_mask),
)


@cache
def _kinds_by_class() -> dict[type, list[_Kind]]:
    kinds: defaultdict[type, list[_Kind]] = defaultdict(list)
    for kind in (*_RECTIFIERS, *_OTHERS, *_HIDDEN):
        kinds[_node_type(kind.probe)].append(kind)
    return kinds


def _kind_of(node: Any) -> _Kind | None:
    for kind in _kinds_by_class().get(type(node), ()):
        if kind.test is None or kind.test(node):
            return kind
    return None


def output_of(node: Any) -> Tensor:
    """Return the output of a rectifier's node in the forward pass, in the shape in which a rule gets its gradient."""
    node = graph.inner_node(node)
    result: Tensor | None = graph.saved(node, "result", None)  # of a ReLU
    if result is not None:
        return result
    x = graph.saved(node, "self") if graph.next_functions(node)[0][0] is not None else graph.saved(node, "other")
    highest: Any = saturation_of(node)
    return torch.clamp(x, min=torch.zeros_like(highest) if isinstance(highest, Tensor) else 0, max=highest)


def saturation_of(node: Any) -> Tensor | float | None:
    """Return the level above which a rectifier is flat (6 for a ReLU6), or None."""
    node = graph.inner_node(node)
    highest: Tensor | float | None = graph.saved(node, "max_val", graph.saved(node, "max", None))
    return highest


def find_nonlinearities(score: Tensor, x: Tensor) -> Nonlinearities:
    """Find the nonlinearities between `score` and `x`: rectifiers, others, and nodes that may hide one.

    Raises:
        NotApplicableError: A part of the model is compiled, fused or checkpointed so that its nodes are not in the
            graph.
        TargetError: The score does not depend on the input.
    """
    rectifiers: list[Nonlinearity] = []
    others: list[Nonlinearity] = []
    hidden: Counter[str] = Counter()
    for node in graph.nodes_between(score, x):
        if type(node) in _transparent:
            continue
        kind = _kind_of(graph.wrapped_node(node) or node)
        if kind in _HIDDEN:
            hidden[kind.name] += 1
        elif kind is not None:
            (rectifiers if kind in _RECTIFIERS else others).append(Nonlinearity(node, kind.name))
        elif opaque := _opaque(node):
            if smooth := re.search("swish|silu|gelu|mish", opaque, re.IGNORECASE):
                others.append(Nonlinearity(node, smooth[0].lower()))
            else:
                hidden[opaque] += 1
    return Nonlinearities(rectifiers, others, hidden)


def require_whole(nonlinearity: Nonlinearity) -> None:
    """Raise NotApplicableError if a nonlinearity works in place on a part of a tensor."""
    if type(nonlinearity.node).__name__ == "CopySlices" and graph.inner_node(nonlinearity.node) is nonlinearity.node:
        raise NotApplicableError(f"a {nonlinearity.kind} works in place on a part of a tensor, {_IN_PLACE}")


def require_visible(node: Node) -> None:
    """Raise NotApplicableError if a node represents a part of the model: checkpointed, compiled or scripted."""
    name = node.name()
    if isinstance(node, graph.CHECKPOINT_NODE):
        raise NotApplicableError(graph.REENTRANT)
    if name.startswith("CompiledFunction"):
        raise NotApplicableError(
            "a part of the model is compiled, which hides its operations; pass it without torch.compile"
        )
    if name.startswith("torch::jit"):
        hint = "pass the eager model, or run it under torch.jit.optimized_execution(False) from its first call on"
        raise NotApplicableError(f"TorchScript has fused a part of the model, which hides its operations; {hint}")


def _opaque(node: Any) -> str:
    """Return the name of an operation that the graph shows as a whole; "" for operations of PyTorch and torchvision.

    Most of these kinds have no public class to probe, so the C++ name of the node decides.
    """
    require_visible(node)
    name = node.name()
    if graph.is_python_function(node):
        return "" if "_torchvision_" in name else name.removesuffix("Backward")
    if graph.hides_operation(node):
        hint = f"torch>=2.14 shows which one it is (this is {torch.__version__})"
        raise NotApplicableError(f"an operation, possibly a ReLU, works in place on a view, {_IN_PLACE}; {hint}")
    if wrapped := graph.wrapped_node(node):
        return _opaque(wrapped)
    if type(node).__name__ == "CppFunction":
        return "" if "vision::ops" in name or "torchvision" in name else name
    if type(node).__name__ != "CopySlices" and type(node) not in _kinds_by_class():
        _transparent.add(type(node))
    return ""


# Node classes whose operations are neither nonlinearities nor opaque. Some other classes represent many operations.
_transparent: set[type] = set()
