"""Capture of a function of a batch as a graph of plain operations with any batch size.

The function runs on two batches of different sizes. Both runs must call the same operations; the sizes among their
arguments that differ depend on the batch size, linearly. So nothing in the function needs symbolic sizes: neither the
methods nor the models, which often compute sizes in Python.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from ..errors import NotApplicableError

BATCHES = (2, 3)
"""The batch sizes of the two runs; not 1, at which broadcasting and views differ."""

Function = Callable[[Tensor], tuple[Tensor, ...]]


def capture(name: str, function: Function, image: Tensor, model: nn.Module, *, one_by_one: bool) -> GraphModule:
    """Return a function of a batch (N, C, H, W) as a graph with any N, whose parameters have the model's own names.

    Args:
        name: The method's name, for errors.
        function: Returns tensors with N rows each. It is called inside `make_fx`.
        image: (1, C, H, W) an image.
        model: The model, whose parameters and buffers the graph reads.
        one_by_one: Whether the function takes one image only. It is then mapped over the batch.

    Raises:
        NotApplicableError: The operations depend on the batch size in another way.
    """
    if one_by_one:
        # Without operations in place, which cannot write one row for each image into a constant.
        single = torch.func.functionalize(_traced(function, image))
        function = torch.vmap(lambda row: tuple(part[0] for part in single(row[None])))
    first, second = (_traced(function, image.repeat(size, *[1] * (image.dim() - 1))) for size in BATCHES)
    for node, other in zip_longest(list(first.graph.nodes), second.graph.nodes):
        if (node is None or other is None) or (node.op, str(node.target)) != (other.op, str(other.target)):
            raise NotApplicableError(
                f"export: {name} calls other operations for {BATCHES[1]} images than for {BATCHES[0]}: {other} instead "
                f"of {node}"
            )
        _free_batch_size(first.graph, node, other)
    first.graph.eliminate_dead_code()
    return _with_names(first, model)


def _traced(function: Function, x: Tensor) -> GraphModule:
    """Return the graph of a function for a batch of one size."""
    # Reads of values are checked by `tracing`, which knows the ones that depend on the image.
    return make_fx(function, _error_on_data_dependent_ops=False)(x)


def _free_batch_size(graph: Graph, node: Node, other: Node) -> None:
    """Replace the sizes in a node's arguments that differ from those of the other run by sizes of the graph's input."""
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    others = pytree.tree_leaves((other.args, other.kwargs))
    for at, (size, larger) in enumerate(zip(leaves, others, strict=True)):
        if type(size) is int and size != larger:
            with graph.inserting_before(node):
                leaves[at] = _size(graph, size, larger)
    node.args, node.kwargs = pytree.tree_unflatten(leaves, spec)


def _size(graph: Graph, size: int, larger: int) -> Node:
    """Return a node of the size that is `size` in the first run and `larger` in the second."""
    factor = (larger - size) // (BATCHES[1] - BATCHES[0])
    constant = size - factor * BATCHES[0]
    result = graph.call_function(torch.ops.aten.sym_size.int, (next(iter(graph.nodes)), 0))
    if factor != 1:
        result = graph.call_function(operator.mul, (result, factor))
    return graph.call_function(operator.add, (result, constant)) if constant else result


def _with_names(program: GraphModule, model: nn.Module) -> GraphModule:
    """Return a graph whose parameters and buffers have their names in the model, in which each occurs once."""
    names = {id(tensor): name for name, tensor in chain(model.named_parameters(), model.named_buffers())}
    constants: dict[str, Any] = {}
    for node in program.graph.nodes:
        if node.op == "get_attr":
            tensor = getattr(program, node.target)
            node.target = names.get(id(tensor), node.target)
            constants[node.target] = tensor
    return GraphModule(constants, program.graph)
