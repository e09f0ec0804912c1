"""Patches of an image: the results of a patch embedding, found in the graph of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from torch import Tensor, nn
from torch.autograd.graph import Node

from ..attribution.forward import TargetGradients
from ..hooks.autograd_graph import next_functions, result_spec
from ..hooks.operations import LINEAR, Operation, is_attention
from ..layers.find import named_layers, trace_layers
from ..layers.layout import given_layout
from .propagation import NONLINEAR, linear_weight


class Patches(NamedTuple):
    """The output of the first convolution or linear layer.

    Attributes:
        node: The operation.
        layer: The name of the module; None if its weights match no composite.
        read: The function from a tensor like the result of the operation to maps (N, K, h, w).
    """

    node: Node
    layer: str | None
    read: Callable[[Tensor], Tensor]


def find_patches(model: nn.Module, grads: TargetGradients, node: Node) -> Patches | None:
    """Return the output of a linear operation as patches; None if it has no spatial extent."""
    operation = cast("Operation", grads.forward.operations.operation(node))
    address, images = linear_weight(operation).data_ptr(), len(grads.x)
    weights = ((name, getattr(module, "weight", None)) for name, module in named_layers(model).items())
    name = next((name for name, own in weights if isinstance(own, Tensor) and own.data_ptr() == address), None)
    if operation.name == "convolution":
        shape = result_spec(node, 0).shape
        is_map = len(shape) == grads.x.dim() and shape[0] == images  # not patches of patches, as in TNT
        return Patches(node, name, lambda maps: maps) if is_map else None
    layer = next((layer for layer in trace_layers(model, grads.x).spatial if layer.name == name), None)
    if layer is None:
        return None
    layout, tokens = given_layout(grads.x.new_zeros(layer.shape)) or layer.layout, layer.shape[1:]
    return Patches(node, name, lambda rows: layout(rows.reshape(images, *tokens)))


def attention_nodes(grads: TargetGradients) -> list[Node]:
    """Return the attention on which the scores depend: fused, or products of two signals. The last one comes first."""
    on_path, record = {*grads.nodes}, grads.forward.operations
    operations = ((node, operation) for node in grads.nodes if (operation := record.operation(node)))
    return [
        node
        for node, operation in operations
        if is_attention(operation.op)
        or (operation.name in ("bmm", "baddbmm") and all(factor in on_path for factor, _ in next_functions(node)[-2:]))
    ]


def first_linear(grads: TargetGradients) -> Node | None:
    """Return the first convolution or matrix product with weights, such as a patch embedding; None if there is none."""
    on_path = {*grads.nodes}
    for node in reversed(grads.nodes):
        operation = grads.forward.operations.operation(node)
        factors = [function in on_path for function, _ in next_functions(node)][-2:]
        if operation is not None and operation.name in LINEAR and not all(factors):
            return node
    return None


def embeds_patches(grads: TargetGradients, first: Node) -> bool:
    """Return whether the first linear operation is a patch embedding, whose results are the tokens of attention.

    All other linear operations come after it, and at least one, but no activation, between it and the attention.
    """
    attention, record = attention_nodes(grads), grads.forward.operations
    if not attention:
        return False
    names = {node: operation.name for node in grads.nodes if (operation := record.operation(node))}
    before, after = {attention[-1]}, {first, *following(grads.nodes, first)}
    for node in grads.nodes:
        if node in before:
            before.update(operand for operand, _ in next_functions(node) if operand is not None)
    linear = {node for node, name in names.items() if name in LINEAR}
    between = before & after - {*attention}
    has_activation = any(names.get(node) in NONLINEAR for node in between)
    return first in between and linear <= after and len(linear & between) > 1 and not has_activation


def following(nodes: Sequence[Node], first: Node) -> set[Node]:
    """Return the nodes, in the order of the backward pass, that depend on the result of one of them."""
    after = {first}
    for node in reversed(nodes):
        if any(operand in after for operand, _ in next_functions(node)):
            after.add(node)
    return after - {first}
