"""Read attention from the autograd graph: a fused kernel's operands, or a softmax between two matrix products.

Fused kernels never form the attention probabilities, but they save query, key and value. The probabilities and their
gradient follow from these and from the gradient at the kernel's result. Nothing in the model is replaced.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node

from ..errors import NotApplicableError
from ..io.axes import at_least_float32
from .autograd_graph import is_tracing, next_functions, reached_nodes, saved, sequence_nr
from .rectifiers import require_visible

_SOFTMAX = frozenset({"SoftmaxBackward0", "SafeSoftmaxBackward0"})
_PRODUCTS = frozenset({"BmmBackward0", "BaddbmmBackward0"})
# No operation with weights runs between the product of query and key and the softmax.
_WEIGHTED = frozenset({"AddmmBackward0", "MmBackward0", "ConvolutionBackward0"})


@dataclass(eq=False, slots=True)
class AttentionCall:
    """One call of attention in a forward.

    Attributes:
        node: The operation that multiplies by the values.
        images: The number of images.
        value: The values (..., keys, d).
        softmax: The softmax of the model that computed the probabilities; None for a fused kernel.
        weights: The result of the softmax, or None.
        query: The queries (N, heads, queries, d) of a fused kernel.
        key: The keys (N, heads, keys, d) of a fused kernel; with grouped keys, fewer heads.
        bias: The tensor that a fused kernel adds to the logits, or its mask of bool, or None.
        scale: The factor of a fused kernel's logits.
        is_causal: Whether a query of a fused kernel sees only keys up to its own position.
        reads_image: Whether the queries depend on the image. The learned queries of a decoder do not.
        is_transposed: Whether the node's result is (..., d, queries), from the values as the first factor.
    """

    node: Node
    images: int
    value: Tensor
    softmax: Node | None = None
    weights: Tensor | None = None
    query: Tensor | None = None
    key: Tensor | None = None
    bias: Tensor | None = None
    scale: float = 1.0
    is_causal: bool = False
    reads_image: bool = True
    is_transposed: bool = False

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of the probabilities: (N, heads, queries, keys)."""
        like = self.value if self.query is None else self.query
        rows = like if self.weights is None else self.weights  # (..., queries, d or keys)
        images = self.images if rows.dim() == 3 else math.prod(rows.shape[:-3])
        return images, math.prod(rows.shape[:-2]) // images, rows.shape[-2], self.value.shape[-2]

    def logits(self) -> Tensor:
        """Return the logits (N, heads, queries, keys) of a fused kernel."""
        query, key = cast("Tensor", self.query), cast("Tensor", self.key)
        return masked_logits(query, key, self.scale, self.bias, is_causal=self.is_causal)

    def probabilities(self) -> Tensor:
        """Return the attention probabilities (N, heads, queries, keys). For windows, N counts windows."""
        return self.softmax_of(self.logits()) if self.weights is None else self.by_head(at_least_float32(self.weights))

    def mean_heads(self) -> Tensor:
        """Return the mean over the heads of the probabilities (N, queries, keys)."""
        return torch.cat([call.probabilities().mean(1) for call in self._by_image()])

    def _by_image(self) -> Iterator[AttentionCall]:
        """Yield a fused call on a CPU one image at a time, which fits into its cache; else the call itself."""
        query, key, bias = self.query, self.key, self.bias
        if query is None or key is None or not query.is_cpu or len(query) != len(key):
            yield self
            return
        for image in (slice(index, index + 1) for index in range(len(query))):
            image_bias = bias if bias is None or bias.dim() < 4 or len(bias) == 1 else bias[image]
            yield replace(self, images=1, bias=image_bias, query=query[image], key=key[image], value=self.value[image])

    def softmax_of(self, logits: Tensor) -> Tensor:
        """Return the probabilities of the logits of a fused kernel."""
        probabilities = logits.softmax(-1)
        # A query that sees no key has a sum of zero.
        return probabilities if self.bias is None else probabilities.nan_to_num_(0)

    def operand_gradients(self, at_logits: Tensor, grad: Tensor, probabilities: Tensor) -> list[Tensor]:
        """Return the gradients at query, key and value of a fused kernel, from the gradients at logits and result."""
        query, key = cast("Tensor", self.query), cast("Tensor", self.key)
        at_query = at_logits @ (grouped(key, query) * self.scale)
        at_keys = (at_logits.mT @ (at_least_float32(query) * self.scale), probabilities.mT @ at_least_float32(grad))
        # Several heads share grouped keys and values.
        return [at_query, *(part.reshape(len(key), key.shape[1], -1, *part.shape[2:]).sum(2) for part in at_keys)]

    def gradient(self, grad: Tensor) -> Tensor:
        """Return the gradient at the probabilities (N, heads, queries, keys), from the gradient at the result."""
        return self.by_head(at_least_float32(self.by_query(grad)) @ grouped(self.value, grad).mT)

    def cosines(self) -> Tensor:
        """Return the cosine of each query and key of a fused kernel, over all heads (N, queries, keys)."""
        query = at_least_float32(cast("Tensor", self.query))
        both = (query, grouped(cast("Tensor", self.key), query))
        queries, keys = (F.normalize(part.transpose(1, 2).flatten(2), dim=-1) for part in both)
        return queries @ keys.mT

    def by_query(self, result: Tensor) -> Tensor:
        """Return values in the shape of the node's result as (..., queries, d), or the reverse."""
        return result.mT if self.is_transposed else result

    def by_head(self, values: Tensor) -> Tensor:
        """Return values of all heads (..., a, b) as (N, heads, a, b)."""
        return values.reshape(*self.shape[:2], *values.shape[-2:])


def masked_logits(query: Tensor, key: Tensor, scale: float, mask: Tensor | None, *, is_causal: bool) -> Tensor:
    """Return the logits (..., queries, keys) of fused attention in at least float32.

    Args:
        query: The queries (..., queries, d).
        key: The keys (..., keys, d); with grouped keys, of fewer heads.
        scale: The factor of the logits.
        mask: The tensor that is added to the logits, or a mask of bool, or None.
        is_causal: Whether a query sees only keys up to its own position.
    """
    query = at_least_float32(query)
    logits = (query * scale) @ grouped(key, query).mT
    if is_causal:
        logits.masked_fill_(logits.new_ones(logits.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    if mask is None:
        return logits
    return logits.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else logits.add_(mask)


def fuse_heads(maps: Tensor, how: str) -> Tensor:
    """Return the "mean", "max" or "min" over the heads (N, queries, keys) of maps (N, heads, queries, keys)."""
    return maps.mean(1) if how == "mean" else getattr(maps, f"a{how}")(1)


def find_attention(nodes: Iterable[Node], images: int) -> tuple[list[AttentionCall], list[Node]]:
    """Find the attention calls of a forward, before a backward pass frees its graph.

    Args:
        nodes: The nodes of the graph in the order of the backward pass.
        images: The number of images.

    Returns:
        The calls in the order of the forward, and the softmaxes before the last call that belong to no call.

    Raises:
        NotApplicableError: A part of the model is compiled, scripted or checkpointed so that its nodes are not visible;
            or a fused kernel has operands (N, tokens, d) of several images.
    """
    calls, softmaxes, others = list[AttentionCall](), set[Node](), list[Node]()
    nodes = dict.fromkeys(nodes)
    for node in nodes:
        require_visible(node)
        if saved(node, "query", None) is not None:
            calls.append(_fused(node, images, reads_image=next_functions(node)[0][0] in nodes))
        elif node.name() == "BmmBackward0" and (parts := _softmax_of(node)) is not None:
            softmax, product, is_transposed = parts
            softmaxes.add(softmax)
            reads_image = next_functions(product)[-2][0] in nodes  # the operand before it, if any, is a bias
            values = _read(node, "self").mT if is_transposed else _read(node, "mat2")
            call = AttentionCall(node, images, values, softmax, _read(softmax, "result"), reads_image=reads_image)
            call.is_transposed = is_transposed
            calls.append(call)
        elif node.name() in _SOFTMAX and node not in softmaxes and calls:
            others.append(node)
    return sorted(calls, key=lambda call: sequence_nr(call.node)), others


def is_chain(calls: Iterable[AttentionCall]) -> bool:
    """Return whether each call depends on the previous one, as in a network without parallel branches."""

    def depends(later: Node, earlier: Node) -> bool:
        oldest = sequence_nr(earlier)
        return earlier in reached_nodes([later], lambda node: sequence_nr(node) <= oldest)

    return all(depends(later.node, earlier.node) for earlier, later in pairwise(calls))


def find_passages(nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes on every path of a graph, in the order of the backward pass.

    Between two blocks of a transformer, this node adds the last branch to the tokens.
    """
    inside, open_paths, passages = {*nodes}, set[Node](), list[Node]()
    for node in nodes:
        open_paths.discard(node)
        if not open_paths:
            passages.append(node)
        open_paths.update(operand for operand, _ in next_functions(node) if operand in inside)
    return passages


def _fused(node: Node, images: int, *, reads_image: bool) -> AttentionCall:
    query, bias = _read(node, "query"), saved(node, "attn_mask", saved(node, "attn_bias", None))
    scale = saved(node, "scale", None)
    if query.shape[0] == 1 < images and reads_image:  # the kernel treated the images as heads
        hint = "pass one image at a time, or give its operands a dimension of heads: query[:, None]"
        raise NotApplicableError(f"a fused attention of the model does not keep its {images} images apart; {hint}")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    key, value, bias = _read(node, "key"), _read(node, "value"), None if bias is None else bias.detach()
    is_causal = saved(node, "is_causal", False)
    return AttentionCall(
        node, images, value, query=query, key=key, bias=bias, scale=scale, is_causal=is_causal, reads_image=reads_image
    )


def _read(node: Node, name: str) -> Tensor:
    values: Tensor = saved(node, name)
    return values.detach()


def _softmax_of(product: Node) -> tuple[Node, Node, bool] | None:
    """Return the softmax over keys in a product, the product of its logits, and whether it is the second factor."""
    for number, name in enumerate(("self", "mat2")):  # the second factor is transposed
        node = next_functions(product)[number][0]
        while node is not None and node.name() not in _SOFTMAX:
            operands = [operand for operand, _ in next_functions(node) if operand is not None]
            node = operands[0] if len(operands) == 1 else None
        logits = None if node is None else _product_before(node)
        if node is None or logits is None:
            continue
        weights, factor = saved(node, "result"), saved(product, name)
        is_last = saved(node, "dim") in (weights.dim() - 1, 2**64 - 1)  # -1, as an unsigned number
        # Under autocast, and in models in half precision, a softmax is often computed in float32.
        weights, rows = weights.to(factor.dtype).reshape(-1), (factor.mT if number else factor).reshape(-1)
        if is_last and (is_tracing() or torch.equal(weights, rows)):
            return node, logits, bool(number)
    return None


def _product_before(softmax: Node) -> Node | None:
    """Return the product of two signals that gives the logits of a softmax, perhaps with a bias; else None."""
    above = [softmax]
    while above:
        for operand, _ in next_functions(above.pop()):
            if operand is not None and operand.name() in _PRODUCTS:
                return operand
            if operand is not None and operand.name() not in _WEIGHTED:
                above.append(operand)
    return None


def grouped(values: Tensor, query: Tensor) -> Tensor:
    """Return keys or values with as many heads as the queries."""
    values = at_least_float32(values)
    heads = query.shape[1] // values.shape[1] if query.dim() == 4 else 1
    return values if heads == 1 else values.repeat_interleave(heads, 1)
