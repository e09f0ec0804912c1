"""Maps from the gradients at the attention and the tokens of a vision transformer, with one value per patch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from ..attribution.forward import Needs
from ..axes import at_least_float32
from ..errors import NotApplicableError
from ..hooks.attention import AttentionCall, find_attention, find_passages
from ..hooks.autograd_graph import DispatchMode, differentiate, next_functions, nodes_between, result_shape
from ..hooks.call import leaf
from ..hooks.operations import Operation, SavedValues, WeakResult, as_results
from ..hooks.pytree import tree_map
from .token_attention import AttentionMap, TokenAttention


class TokenStream:
    """The tokens between the blocks of one forward, and its operations, which can be run again on others.

    Args:
        attention: The attention of a forward that keeps all values.
        method: The name of the method, for errors.

    Attributes:
        nodes: The operations in the order of a backward pass. The first one returns the scores.
        inputs: For each block, the operation whose result is the tokens before it.
    """

    def __init__(self, attention: TokenAttention, method: str) -> None:
        self._attention, self._method = attention, method
        self._model = type(attention.grads.forward.model).__name__
        self.nodes = attention.grads.nodes
        self._order = {node: at for at, node in enumerate(self.nodes)}
        self._passages = find_passages(self.nodes)
        before = dict(zip(attention.grads.attention, attention.grads.token_nodes, strict=True))
        self.inputs = [before[call] for call in attention.blocks]
        if attention.tokens not in result_shape(self.inputs[0])[:2] or len({*self.inputs}) < len(self.inputs):
            problem = f"other layers of {self._model} bypass its blocks"
            raise NotApplicableError(f"{method}: {problem}; attn_lrp reads them too")

    @cached_property
    def outputs(self) -> list[Node]:
        """For each block, the operation whose result is the tokens after it.

        The tokens after a block are those before the next one. After the last block, the tokens follow its attention by
        the same number of operations as in the block before it.

        Raises:
            NotApplicableError: The last two blocks differ, or there is only one.
        """
        blocks = dict(zip(self.inputs, self._attention.blocks, strict=True))  # with the last call of each
        if len(blocks) == 1:
            raise self._last_block_error()
        (_, before), (between, last) = list(blocks.items())[-2:]
        end = self._order[last.node]
        start = max(end - self._order[before.node] + self._order[between], 0)
        known, similar = self.nodes[self._order[between] : self._order[before.node]], self.nodes[start:end]
        if [node.name() for node in known] != [node.name() for node in similar] or similar[0] not in self._passages:
            raise self._last_block_error()
        after = dict(zip(blocks, [*list(blocks)[1:], similar[0]], strict=True))
        return [after[node] for node in self.inputs]

    def _last_block_error(self) -> NotApplicableError:
        problem = f"{self._model} does not end in two equal blocks, so the tokens after the last one are unknown"
        return NotApplicableError(f"{self._method}: {problem}; use chefer_attention")

    def skip_gradients(self) -> dict[AttentionCall, Tensor]:
        """Return the gradients at the results of the blocks' attention that run along skip connections only.

        The gradient at the tokens after the last block is the gradient at the sum of each branch, since no branch
        passes it on to earlier tokens. From the sum, it reaches the attention of the branch.

        Raises:
            NotApplicableError: A block has no skip connection from the tokens before it to a sum.
        """
        gradients: dict[AttentionCall, Tensor] = {}
        grad: Tensor | None = None
        for node, before in pairwise(self._passages):
            is_sum = node.name() == "AddBackward0" and before in [operand for operand, _ in next_functions(node)]
            if grad is None and is_sum and self._attention.tokens in result_shape(node)[:2]:
                grad = self._attention.grads.gradient_at(node)
            if grad is None:
                continue  # in the head
            if len(gradients) == len(self._attention.blocks):
                break
            inside = range(self._order[node], self._order[before])
            calls = [call for call in self._attention.blocks if self._order[call.node] in inside and is_sum]
            if calls or not is_sum:
                ends = [GradientEdge(end, 0) for end in ([call.node for call in calls] or [before])]
                passed = differentiate(GradientEdge(node, 0), ends, grad, retain_graph=True)
                gradients |= cast("dict[AttentionCall, Tensor]", dict(zip(calls, passed, strict=False)))
                grad = grad if calls else passed[0]
        if len(gradients) < len(self._attention.blocks):
            problem = f"not every block of {self._model} adds its attention to the tokens before it"
            raise NotApplicableError(f"{self._method}: {problem}; use chefer_attention")
        return gradients

    def result(self, node: Node) -> Tensor:
        """Return the result of an operation, in the shape of the model."""
        result: Tensor = as_results(self._operation(node).result)[0]
        return result.detach()

    def run_again(self, start: Node, result: Tensor, end: Node) -> Tensor:
        """Return the result of an operation after the result of an earlier one is replaced.

        Raises:
            NotApplicableError: An operation between both is a function in Python, or writes to a part of a tensor.
        """
        results: dict[Node, Sequence[Tensor]] = {start: (result,)}
        for node in reversed(self.nodes[self._order[end] : self._order[start]]):
            if any(other in results for other, _ in next_functions(node)):
                results[node] = self._repeat(node, results)
        return results[end][0]

    def _repeat(self, node: Node, results: dict[Node, Sequence[Tensor]]) -> Sequence[Tensor]:
        """Return the results of an operation with other operands."""
        operation, edges = self._operation(node), iter(next_functions(node))

        def operand(value: Any) -> Any:
            is_constant = isinstance(value, Tensor) and not value.is_floating_point()
            other, number = (None, 0) if is_constant else next(edges, (None, 0))
            return results[other][number] if other in results else value

        return as_results(operation.repeat(**tree_map(operation.kept_args, (Tensor, WeakResult), operand)))

    def _operation(self, node: Node) -> Operation:
        """Return an operation. Raises NotApplicableError if it was not recorded, or writes to a part of a tensor."""
        operation = self._attention.grads.forward.operations.operation(node)
        if operation is None or operation.is_part:
            raise NotApplicableError(f"{self._method}: {node.name()} of the model cannot be run again")
        return operation


class LeGrad(AttentionMap):
    """Sensitivity of each layer's score to its attention, averaged over the layers.

    Formula: S = mean_l mean_h mean_q (∂s_l/∂A_l)⁺, with s_l the score that the head gives to the tokens after block l.

    The score of a layer is computed from the tokens after it by the model's pooling, norm and head. Its positive
    gradient at the attention is averaged over heads and queries. The attention itself is not a factor. In a network
    with a pooling head, the attention of the head is used for each layer.

    The authors' code for CLIP reads the mean of all tokens after each layer. Here it is the model's own pooling, such
    as the class token, as in the paper.

    Values: (N, 1, h, w), at least 0, in score units per unit of attention.

    Raises:
        NotApplicableError: The network has no attention, or not among all tokens in each block; its last two blocks
            differ; or its head contains a function in Python.

    Source: Bousselham et al., "LeGrad: An Explainability Method for Vision Transformers via Feature Formation
        Sensitivity" (2024), https://arxiv.org/abs/2404.03214.
    """

    name = "le_grad"
    cost = "1 forward, 1 backward"
    units = "score per attention"
    needs = Needs(values=SavedValues.ALL, attention=True)

    def relevance(self, attention: TokenAttention) -> Tensor:
        """Return the mean over the layers of the positive gradient at all tokens."""
        maps = [gradient.clamp_(min=0).mean((1, 2)) for gradient in self._gradients(attention)]
        return torch.stack(maps).mean(0)

    def _gradients(self, attention: TokenAttention) -> Iterator[Tensor]:
        """Yield the gradient of each layer's own score at its attention (N, heads, queries, keys)."""
        stream = TokenStream(attention, self.name)
        for call, node in zip(attention.blocks, stream.outputs, strict=True):
            source = leaf(stream.result(node))
            score = stream.run_again(stream.outputs[-1], source, stream.nodes[0]).sum()
            if attention.pooling is not None:
                (pooling,) = find_attention(nodes_between(score, source), len(attention.grads.x))[0]
                (grad,) = differentiate(score, [GradientEdge(pooling.node, 0)])
                yield pooling.gradient(cast("Tensor", grad))
            else:
                (at_tokens,) = differentiate(score, [source])
                with _SkipZeroRows():
                    edges = GradientEdge(node, 0), [GradientEdge(call.node, 0)]
                    (grad,) = differentiate(*edges, at_tokens, retain_graph=True)
                yield call.gradient(cast("Tensor", grad))


class _SkipZeroRows(DispatchMode):
    """Mode in which matrix products on a CPU skip rows of zeros, as in gradients of tokens that the head does not read.

    A GPU would wait for the host in each product.
    """

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        rows = args[0].any(1) if op is torch.ops.aten.mm.default and args[0].is_cpu else None
        if rows is None or bool(rows.all()):
            return op(*args, **kwargs or {})
        result = args[0].new_zeros(len(rows), args[1].shape[1])
        result[rows] = args[0][rows] @ args[1]
        return result


class AGCAM(AttentionMap):
    """Positive gradient at the attention times the sigmoid of the attention logits, summed over heads and blocks.

    Formula: S = Σ_l Σ_h r ((∇A_l)⁺ ⊙ sigmoid(q kᵀ / √d)), with the gradient along skip connections only.

    As in the paper, the gradient runs along skip connections only: it passes no attention and no MLP of a later block.
    The sum is taken for the tokens that the head reads, such as the class token. With a pooling head, it is the mean
    over all tokens plus the sum of the pooling head.

    Values: (N, 1, h, w), at least 0, in score units.

    Raises:
        NotApplicableError: The network has no attention, or not among all tokens in each block; or a block has no skip
            connection around its attention.

    Source: Leem and Seo, "Attention Guided CAM: Visual Explanations of Vision Transformer Guided by Self-Attention"
        (2024), https://arxiv.org/abs/2402.04563.
    """

    name = "ag_cam"
    cost = "1 forward, 1 backward"
    needs = Needs(values=SavedValues.ALL, attention=True)

    def relevance(self, attention: TokenAttention) -> Tensor:
        """Return the sum over the blocks of the gated gradient at all tokens."""
        gradients = TokenStream(attention, self.name).skip_gradients()

        def gated(call: AttentionCall, grad: Tensor, read: Tensor) -> Tensor:
            """Return the mean over the queries that are read, and the sum over the heads, of the gated gradient."""
            gates = (call.logits() if call.softmax is None else _logits(attention, call)).sigmoid()
            return (read @ (gates * call.gradient(grad).clamp_(min=0)).sum(1))[:, 0]

        read = attention.read_queries
        if attention.pooling is None:
            return torch.stack([gated(*block, read) for block in gradients.items()]).sum(0)
        own = gated(attention.pooling, attention.grads.gradient_at(attention.pooling.node), read)
        mean = own.new_full((1, 1, attention.tokens), 1 / attention.tokens)
        return own + torch.stack([gated(*block, mean) for block in gradients.items()]).sum(0)


def _logits(attention: TokenAttention, call: AttentionCall) -> Tensor:
    """Return the logits (N, heads, queries, keys) of a softmax of the model that computed the weights of a call."""
    softmax = cast("Operation", attention.grads.forward.operations.operation(cast("Node", call.softmax)))
    return at_least_float32(call.by_head(softmax.args["self"].detach()))
