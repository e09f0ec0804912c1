"""Where the gradient comes into a module and where it leaves, in the autograd graph of one call.

Nothing is put into the graph: the operations through which a gradient leaves for an input are found by a walk from the
module's outputs. So in-place modules keep working, and so do functions between modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients = tuple[Tensor | None, ...]
"""Of the operands, or of the results, of one operation."""


def next_functions(node: Any) -> tuple[tuple[Node | None, int], ...]:
    """The operations that a node passes gradient on to, each with the number of its result.

    Every node that Python code looks at is to be passed through here. PyTorch frees a graph without recursion, but a
    node with a Python object is freed inside the freeing of the node before it, so that a deep graph overflows the
    stack. Here the metadata of a node holds the next ones: Python frees nested dictionaries and tuples of any depth.
    """
    found: tuple[tuple[Node | None, int], ...] = node.next_functions
    if found:
        node.metadata["saliency.next_functions"] = found
    return found


class InputEdge(NamedTuple):
    """An operation that passes gradient on to an input: its node, and the operands that are that input."""

    node: Node
    operands: tuple[int, ...]


def edge(tensor: Tensor) -> GradientEdge | None:
    """Where the gradient of a tensor goes to; None for tensors that have none."""
    if not tensor.requires_grad:
        return None
    found = get_gradient_edge(tensor)
    next_functions(found.node)
    return found


def current_sequence_nr() -> int:
    """The age of the operations to come in this thread: those recorded from here on are not younger."""
    sequence_nr: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return sequence_nr


def is_recorded_since(tensor: Tensor, since: int) -> bool:
    """Whether a tensor is the result of an operation that was recorded after `since`."""
    node = tensor.grad_fn
    if node is None:
        return False
    next_functions(node)
    return sequence_nr(node) >= since


def input_edges(outputs: Iterable[Tensor], inputs: Sequence[GradientEdge | None], since: int) -> list[list[InputEdge]]:
    """For each input, the operations behind it whose gradient it gets, found from the outputs of the same call.

    Args:
        outputs: What the call returned.
        inputs: The edges of what it was given, taken before it ran.
        since: `current_sequence_nr()` before it ran: what is older belongs to others.
    """
    found: list[list[InputEdge]] = [[] for _ in inputs]
    wanted: dict[tuple[Node, int], list[int]] = {}
    for at, each in enumerate(inputs):
        if each is not None:
            wanted.setdefault((each.node, each.output_nr), []).append(at)
    seen: set[Node] = set()
    waiting = [each.grad_fn for each in outputs if each.grad_fn is not None and sequence_nr(each.grad_fn) >= since]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        operands: dict[int, list[int]] = {}
        for operand, (function, number) in enumerate(next_functions(node)):
            if function is None:
                continue
            for at in wanted.get((function, number), ()):
                operands.setdefault(at, []).append(operand)
            if function not in seen and since <= sequence_nr(function) < _LEAF:
                waiting.append(function)
        for at, places in operands.items():
            found[at].append(InputEdge(node, tuple(places)))
    return found


# The age of the nodes of leaves, which are made once and not by an operation.
_LEAF = 2**64 - 1


def sequence_nr(node: Any) -> int:
    """When an operation was recorded in its thread, as a number that grows."""
    number: int = node._sequence_nr()
    return number


class GradSpec(NamedTuple):
    """What the gradient of a tensor looks like, whatever an operation made of the tensor on its way in."""

    shape: torch.Size
    dtype: torch.dtype

    def sum_of(self, grads: Gradients, operands: Iterable[int]) -> Tensor | None:
        """The sum over some operands of an operation; None where none has a gradient."""
        whole: Tensor | None = None
        for grad in (grads[i] for i in operands):
            if grad is not None:
                part = grad.sum_to_size(self.shape).to(self.dtype)
                whole = part if whole is None else whole + part
        return whole


class GradAccumulator:
    """Where the summands of one input's gradient come together: one from each operation that has it as an operand.

    All are kept back but the last, which brings what the rule makes of the sum. Backward passes run from the youngest
    operation to the oldest.
    """

    def __init__(self, like: GradSpec, rule: Callable[[Tensor], Tensor | None]) -> None:
        self.like, self.rule = like, rule
        self.backward = -1
        self.sum: Tensor | None = None

    def add(self, operands: tuple[int, ...], older: Iterable[Node], grad_inputs: Gradients) -> Gradients:
        """One operation has its gradients, and passes on what this returns; those that are older are still to come."""
        if self.backward != (backward := this_backward()):
            self.backward, self.sum = backward, None
        part = self.like.sum_of(grad_inputs, operands)
        if part is not None:
            self.sum = part if self.sum is None else self.sum + part
        if any(torch._C._will_engine_execute_node(each) for each in older):
            return _with_gradient(grad_inputs, operands, None)
        whole, self.sum = self.sum, None
        changed = None if whole is None else self.rule(whole)
        return _with_gradient(grad_inputs, operands, whole if changed is None else changed)


def _with_gradient(grads: Gradients, operands: tuple[int, ...], gradient: Tensor | None) -> Gradients:
    """The gradients of an operation's operands with all that goes to one tensor in the first of its operands."""
    changed = list(grads)
    for at in operands:
        changed[at] = None
    # An operand whose own gradient is None cannot be given one.
    at = next((i for i in operands if grads[i] is not None), operands[0])
    changed[at] = gradient
    return tuple(changed)


def this_backward() -> int:
    """The number of the backward pass that runs in this thread, another one for each; -1 outside of any."""
    number: int = torch._C._current_graph_task_id()
    return number
