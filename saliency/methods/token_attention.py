"""Maps from the self-attention of a vision transformer, with one value per patch.

A new method is a subclass of `AttentionMap` with a `name` and `relevance`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import dropwhile, pairwise, takewhile
from typing import Any, ClassVar, Literal, cast, get_args

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from ..attribution.base import TracedAttribution
from ..attribution.explanation import BatchAttribution
from ..attribution.features import outlying
from ..attribution.forward import Needs, TargetGradients, needs_with
from ..attribution.options import Option
from ..attribution.questions import Questions, explained_answer
from ..errors import NotApplicableError
from ..hooks.attention import AttentionCall, find_attention, find_passages, fuse_heads, is_chain
from ..hooks.autograd_graph import (
    DispatchMode,
    Gradients,
    differentiate,
    next_functions,
    nodes_between,
    result_shape,
    saved,
)
from ..hooks.operations import NORMS, SOFTMAX, Operation, SavedValues, WeakResult, as_results
from ..hooks.pytree import tree_map
from ..hooks.rectifiers import Coverage
from ..io.axes import at_least_float32
from ..model.answer import Answer
from ..model.call import leaf, shown_images
from ..model.layers import Layout, attention_layout
from ..relevance.kernels import Passed
from ..relevance.propagation import Propagation
from ..relevance.rules import Composite, LinearOperation, Rule, ZPlus, divided
from ..relevance.walk import Visit, Walk
from ..validation import Sign, check_choice, check_number

HeadFusion = Literal["mean", "max", "min"]

_INSTEAD = "attn_lrp works on any transformer"


class TokenAttention:
    """The self-attention among all tokens in one forward, and the gradients of the scores at the attention.

    Args:
        grads: The scores and gradients of one forward that reads attention.
        method: The name of the method, for errors.
        decoders: Whether queries other than the tokens may also attend to each other, and to the tokens several times.

    Attributes:
        grads: The scores and gradients.
        answer: The answer that is explained; None for an image.
        calls: All calls of attention, in order. For an answer, only the calls in the language model.
        blocks: The calls of self-attention, in order.
        crosses: The calls whose queries are not the tokens, in order.
        pooling: The only call of attention in a pooling head after the blocks; else None.
        bridge: The calls between the image tower and the image tokens of an answer, if the tokens are learned queries
            that attend to the tower, as in the Q-former of BLIP-2; else empty.
        tokens: The number of tokens.

    Raises:
        NotApplicableError: The network has no attention, or attention of another form.
    """

    def __init__(self, grads: TargetGradients, method: str, *, decoders: bool = False) -> None:
        self.grads, self.answer = grads, explained_answer()
        model = type(grads.forward.model).__name__
        self.calls, self.bridge = (
            (grads.attention, []) if self.answer is None else _language_model_and_bridge(grads, self.answer)
        )
        calls = self.calls
        if not calls:
            raise NotApplicableError(f"{method}: {model} has no attention that can be read; use grad_cam or lrp")
        if grads.unread_softmaxes:
            count = len(grads.unread_softmaxes)
            parts = f"{count} attentions of {model} cannot be read, because they mix heads or keys"
            raise NotApplicableError(f"{method}: {parts} by their own formula; {_INSTEAD}")
        images, _, _, self.tokens = calls[0].shape
        self.blocks = [call for call in calls if call.shape[2] == call.shape[3]]
        self.crosses = [call for call in calls if call.shape[2] != call.shape[3]]
        self.pooling = self.crosses[0] if self.crosses == calls[-1:] else None
        if not all(call.reads_image for call in self.blocks):
            problem = f"{model} has {self.tokens} tokens and the same number of queries, which cannot be distinguished"
            raise NotApplicableError(f"{method}: {problem}; {_INSTEAD}")
        is_encoder = all(call.shape[3] == self.tokens for call in calls) and self.crosses in ([], [self.pooling])
        is_known = is_encoder or (decoders and self._has_decoder())
        if images != len(grads.x) or not self.blocks or not is_known or not is_chain(calls):
            kinds = "windows, stages, channels, parallel branches, pooling of patches only, images in parts"
            problem = f"the attention of {model} is not among all tokens in each block ({kinds})"
            raise NotApplicableError(f"{method}: {problem}, for which the method is not defined; {_INSTEAD}")

    def _has_decoder(self) -> bool:
        """Return whether all attention is among the tokens, among learned queries, or from queries to tokens."""
        counts = {self.tokens}
        for call in self.calls:
            images, _, queries, keys = call.shape
            is_new = queries not in counts
            if images != len(self.grads.x) or keys not in (queries, self.tokens) or (is_new and call.reads_image):
                return False
            counts.add(queries)
        return True

    @cached_property
    def layout(self) -> Layout:
        """The layout of the tokens: the grid of patches, and the token of each cell; or one row of queries of a bridge.

        Raises:
            LayerError: The tokens are not a grid of patches that covers the image.
            NotApplicableError: The image tokens of an answer have no position in the image, and `bridge` is empty.
        """
        if self.answer is not None and self.bridge:
            (queries,) = self.answer.image_tokens
            return Layout("NTC", tuple(queries.positions.shape), queries.positions.flatten().tolist())
        if self.answer is not None:
            return self.answer.layout(shown_images(self.grads.x)[0])
        return attention_layout(self.grads.forward.model, self.tokens, self.grads.x)

    @cached_property
    def outliers(self) -> Tensor | None:
        """The patches (N, h, w) with an outlying norm before the last layer norm; None if no norm reads all tokens."""
        norms = (node for node in self.grads.nodes if node.name() == "NativeLayerNormBackward0")
        inputs = (at_least_float32(saved(node, "input").detach()) for node in norms)
        shape = (len(self.grads.x), self.tokens)
        tokens = next((values for values in inputs if values.dim() == 3 and values.shape[:2] == shape), None)
        if tokens is None or self.answer is not None:
            return None
        return outlying(self.layout(tokens.norm(dim=-1, keepdim=True))[:, 0])

    def gradient(self, call: AttentionCall) -> Tensor:
        """Return the gradient at the probabilities of a call (N, heads, queries, keys)."""
        return call.gradient(self.grads.node_gradient(call.node))

    @cached_property
    def read_queries(self) -> Tensor:
        """The queries of the last call that the scores read, as weights that sum to 1 (N, 1, queries).

        These are the class token, the two tokens of a distilled network, all patches for a mean, or the tokens of a
        pooling head.
        """
        last = self.calls[-1]
        images, _, queries, _ = last.shape
        after = set(takewhile(lambda node: node is not last.node, self.grads.nodes))
        shapes = {node: result_shape(node) for node in find_passages(self.grads.nodes) if node in after}
        # The end of the last block, if it has a row for each query: the backward pass then covers only the head.
        ends = [node for node, shape in shapes.items() if shape[:2] == (images, queries) and len(shape) == 3]
        grad = self.grads.gradient_at(ends[0] if ends else last.node)
        is_read = (grad != 0).any(-1) if ends else (last.by_head(last.by_query(grad)) != 0).any(-1).any(1)
        weights = is_read[:, None].to(at_least_float32(self.grads.x).dtype)
        return weights / weights.sum(-1, keepdim=True).clamp(min=1)


def _language_model_and_bridge(
    grads: TargetGradients, answer: Answer
) -> tuple[list[AttentionCall], list[AttentionCall]]:
    """Return the attention in the module that reads the tokens of an answer, and in a bridge to these tokens."""
    modules, reader = grads.forward.operations.modules, answer.reader
    calls = [call for call in grads.attention if reader in modules(call.node)]
    before = [call for call in grads.attention if call not in calls]
    bridge = list(dropwhile(lambda call: call.reads_image, before))  # from the learned queries on
    count = sum(tokens.positions.numel() for tokens in answer.image_tokens if tokens.box is None)
    keys = bridge[0].shape[3] if bridge else count
    forms = {(len(grads.x), count, keys), (len(grads.x), count, count)}
    tower = before[: len(before) - len(bridge)]
    reads_tower = keys != count and bool(tower) and tower[-1].shape[2] == keys
    is_known = reads_tower and all((call.shape[0], *call.shape[2:]) in forms for call in bridge)
    return calls, bridge if is_known else []


class AttentionMap(TracedAttribution):
    """Base class of methods that read the self-attention among all tokens of a vision transformer.

    Raises:
        NotApplicableError: The network has no attention, or a block without attention among all tokens.
        LayerError: The tokens are not a grid of patches.
    """

    needs = Needs(backwards=1, attention=True)
    sign: ClassVar[Sign] = "positive"
    is_complete = False
    reads_decoders: ClassVar[bool] = False
    """Whether the method supports decoders whose queries attend to the tokens, as in detectors."""

    def needs_for(self, x: Tensor, target: Questions) -> Needs:
        """Return the needs. For an answer, they name the language model, to find its calls of attention."""
        answer = explained_answer()
        reader = None if answer is None else answer.reader
        return self.needs if reader is None else needs_with(self.needs, modules=(reader,))

    def explain_gradients(self, grads: TargetGradients, layers: tuple[str, ...]) -> BatchAttribution:
        """Return the relevance of the patches."""
        decoders = self.reads_decoders
        attention = grads.shared(("tokens", decoders), lambda: TokenAttention(grads, self.name, decoders=decoders))
        outliers = attention.outliers
        count = 0 if outliers is None else int(outliers.sum())
        values = attention.layout(self.relevance(attention)[:, :, None])
        if attention.bridge:
            tokens = values[:, 0] @ self.query_relevance(attention)  # (N, 1, tokens of the image tower)
            values = attention_layout(grads.forward.model, tokens.shape[2], grads.x)(tokens.mT)
        coverage = Coverage(handled={"outlier tokens (hatched)": count}) if count else None
        return BatchAttribution(values, grads.scores, evidence={"coverage": coverage, "outliers": outliers})

    @abstractmethod
    def relevance(self, attention: TokenAttention) -> Tensor:
        """Return the relevance of all tokens (N, tokens), given the attention of one forward."""

    def fused(self, attention: TokenAttention, call: AttentionCall) -> Tensor:
        """Return the attention of a call, averaged over its heads (N, queries, keys)."""
        return call.mean_heads()

    def query_relevance(self, attention: TokenAttention) -> Tensor:
        """Return the relevance of the tokens of the image tower to the queries of a bridge (N, queries, tokens).

        By default, it is the rollout of the attention, with the identity for the residual connection of a query. Each
        row sums to 1 together with the relevance of the learned queries, which is not returned.
        """
        fractions: Tensor | None = None
        for call in attention.bridge:
            fused = self.fused(attention, call)
            added = fused if call.shape[3] != call.shape[2] else fused @ cast("Tensor", fractions)
            fractions = (added if fractions is None else fractions + added) / (fused.sum(-1, keepdim=True) + 1)
        return cast("Tensor", fractions)


class AttentionRollout(AttentionMap):
    """Contribution of each patch to the tokens that the head reads: the product of the mean attention of all blocks.

    Formula: S = r Â_L ⋯ Â_1, with Â_l = (mean_h A_l + I) / 2.

    The attention of a block is averaged over its heads, then averaged with the identity for the residual connection;
    the product over all blocks is the fraction of each token. It does not depend on the class.

    Args:
        head_fusion: "mean", "max" or "min" over the heads.
        discard_ratio: The fraction of the smallest attention values of each image that are set to 0, except from a
            token to itself; from 0 to less than 1.

    Values: (N, 1, h, w), fractions. With the values of the class token and other tokens, they sum to 1; in
        BLIP-2, a part stays with the learned queries.

    Source: Abnar and Zuidema, "Quantifying Attention Flow in Transformers" (2020), https://arxiv.org/abs/2005.00928.
    """

    name = "attention_rollout"
    ignores_sign = True
    cost = "1 forward"
    units = "fraction"

    head_fusion: Option[HeadFusion] = Option("mean", check_choice, get_args(HeadFusion))
    discard_ratio: Option[float] = Option(0.0, check_number, least=0, below=1)

    def relevance(self, attention: TokenAttention) -> Tensor:
        """Return the fraction of each token in the tokens that the head reads."""
        fractions = attention.read_queries
        if attention.pooling is not None:
            fused = self.over_heads(attention, attention.pooling)
            fractions = (fractions / fused.sum(-1).unsqueeze(1).clamp(min=torch.finfo(fused.dtype).tiny)) @ fused
        for call in attention.blocks[::-1]:
            fused = self.fused(attention, call)
            fused.diagonal(dim1=-2, dim2=-1).add_(1)
            fractions = (fractions / fused.sum(-1).unsqueeze(1)) @ fused
        return fractions[:, 0]

    def fused(self, attention: TokenAttention, call: AttentionCall) -> Tensor:
        """Return the attention of a call, fused over its heads (N, queries, keys), without its smallest values."""
        fused = self.over_heads(attention, call)
        if self.discard_ratio:
            diagonal = fused.diagonal(dim1=-2, dim2=-1).clone()
            flat = fused.flatten(1)
            flat.scatter_(1, flat.topk(int(flat.shape[1] * self.discard_ratio), largest=False).indices, 0)
            if call.shape[2] == call.shape[3]:
                fused.diagonal(dim1=-2, dim2=-1).copy_(diagonal)
        return fused

    def over_heads(self, attention: TokenAttention, call: AttentionCall) -> Tensor:
        """Return the attention of a call, fused over its heads (N, queries, keys)."""
        is_mean = self.head_fusion == "mean"
        return call.mean_heads() if is_mean else fuse_heads(call.probabilities(), self.head_fusion)


class GradientRollout(AttentionRollout):
    """Attention rollout with each attention value multiplied by its gradient, so that it depends on the class.

    Formula: S = r Â_L ⋯ Â_1, with Â_l = (mean_h (A_l ⊙ ∇A_l))⁺ + I, each row divided by its sum.

    The products are averaged over the heads, and negative means are set to 0.

    Values: (N, 1, h, w), fractions. With the values of the class token and other tokens, they sum to 1; in
        BLIP-2, a part stays with the learned queries.

    Source: Gildenblat, "Exploring Explainability for Vision Transformers" (2020),
        https://jacobgil.github.io/deeplearning/vision-transformer-explainability.
    """

    name = "gradient_rollout"
    ignores_sign = False
    cost = "1 forward, 1 backward"
    needs = Needs(backwards=2, attention=True)

    def over_heads(self, attention: TokenAttention, call: AttentionCall) -> Tensor:
        """Return attention times gradient of a call, averaged over its heads (N, queries, keys)."""
        return attention.gradient(call).mul_(call.probabilities()).mean(1).clamp_(min=0)


class CheferAttention(AttentionMap):
    """Relevance that flows through the attention of all blocks, weighted by its gradient.

    Formula: S = r (R_L − I), with R_l = R_l−1 + mean_h (A_l ⊙ ∇A_l)⁺ R_l−1 and R_0 = I.

    Each block adds the positive part of attention times gradient, averaged over the heads, times the relevance so far:
    R = R + mean((A * gradient)+) R, from the identity. The map is the row of the tokens that the head reads, without
    these tokens themselves.

    In a decoder, learned queries attend to the tokens, as in DETR and in pooling heads. The relevance of the tokens to
    the queries grows by S' mean((A * gradient)+) T at each such block, where S and T are the relevance among queries
    and among tokens; each row of S and T is first scaled to a sum of 1 without its identity. The map is the row of the
    queries that the score reads. Attention that does not depend on the image, as in the first block of a decoder among
    its queries, is ignored.

    Values: (N, 1, h, w), at least 0, dimensionless.

    Raises:
        NotApplicableError: The network has no attention, or a block without attention among all tokens; or a decoder
            has as many queries as tokens.

    Source: Chefer et al., "Generic Attention-Model Explainability for Interpreting Bi-Modal and Encoder-Decoder
        Transformers" (2021), https://arxiv.org/abs/2103.15679.
    """

    name = "chefer_attention"
    cost = "1 forward, 1 backward"
    units = "relevance"
    needs = Needs(backwards=2, attention=True)
    reads_decoders = True

    def relevance(self, attention: TokenAttention) -> Tensor:
        """Return the relevance of all tokens to the tokens that the head reads."""
        read, weights = attention.read_queries, self.weights(attention)
        if attention.crosses:
            return (read @ _decoded(attention.calls, weights))[:, 0]
        relevance = torch.zeros_like(read)  # without the part that is read, which may be many orders larger
        for call in attention.blocks[::-1]:
            relevance = torch.baddbmm(relevance, relevance + read, weights(call))
        return relevance[:, 0]

    def query_relevance(self, attention: TokenAttention) -> Tensor:
        """Return the relevance of the tokens of the image tower to the queries of a bridge, as in a decoder."""
        return _decoded(attention.bridge, self.weights(attention))

    def weights(self, attention: TokenAttention) -> Callable[[AttentionCall], Tensor]:
        """Return a function from a call to its weighted attention (N, queries, keys)."""
        return lambda call: attention.gradient(call).mul_(call.probabilities()).clamp_(min=0).mean(1)


class GradECLIP(AttentionMap):
    """Values of the last attention, weighted by the gradient at its output and the similarity of query and key.

    Formula: S_i = (Σ_q λ_qi ⟨∂y/∂o_q, v_i⟩)⁺ over the tokens q that the head reads, with o_q the output of the last
    attention, v_i the value of patch i, and λ_qi the cosine of query q and key i, stretched to 0..1 over i.

    The relevance of a patch is the gradient at the output for the tokens that the head reads, times the value of the
    patch, times the cosine of query and key, scaled to 0..1 over the patches (in BLIP-2, over its queries). The cosine
    replaces the softmax, which is too sparse in CLIP.

    The authors' code for CLIP computes the last attention again with a single head, and takes the cosine of query and
    key after the output projection. Here the attention, query and key are the model's own, per head.

    Values: (N, 1, h, w), at least 0, in score units up to the scale of the cosine.

    Raises:
        NotApplicableError: The network has no fused attention, or a block without attention among all tokens.

    Source: Zhao et al., "Gradient-based Visual Explanation for Transformer-based CLIP" (2024),
        https://proceedings.mlr.press/v235/zhao24p.html.
    """

    name = "grad_eclip"
    cost = "1 forward, 1 backward"
    units = "relevance"
    needs = Needs(backwards=2, attention=True)

    def relevance(self, attention: TokenAttention) -> Tensor:
        """Return the weighted values of all tokens."""
        call = attention.grads.attention[-1]
        if call.query is None:
            raise NotApplicableError(
                f"{self.name}: the last attention is not fused, so its queries cannot be read; if it calls "
                "scaled_dot_product_attention, leave sdpa_kernel(SDPBackend.MATH) or turn on a fused kernel"
            )
        cosines = call.cosines()
        low, high = attention.layout(cosines.mT).flatten(2).aminmax(dim=-1, keepdim=True)  # over the cells
        similar = (cosines - low) / (high - low).clamp(min=torch.finfo(cosines.dtype).tiny)
        weighted = attention.gradient(call).sum(1) * similar * (attention.read_queries > 0).mT
        return weighted.sum(1).clamp(min=0)


def _decoded(calls: Sequence[AttentionCall], weighted: Callable[[AttentionCall], Tensor]) -> Tensor:
    """Return the relevance of the keys of the first call to the queries of the last call (N, queries, tokens)."""
    relevance: dict[tuple[int, int], Tensor] = {}  # by the numbers of queries and tokens
    for call in calls:
        weights, (images, _, queries, keys) = weighted(call), call.shape
        for count in (queries, keys):
            identity = torch.eye(count, dtype=weights.dtype, device=weights.device).expand(images, -1, -1)
            relevance.setdefault((count, count), identity)
        if queries == keys:
            changed = {
                pair: torch.baddbmm(values, weights, values) for pair, values in relevance.items() if pair[0] == keys
            }
            relevance |= changed
        else:
            added = _normalised(relevance[queries, queries]).mT @ weights @ _normalised(relevance[keys, keys])
            relevance[queries, keys] = added + relevance.get((queries, keys), 0)
    return relevance[calls[-1].shape[2], calls[0].shape[3]]


def _normalised(relevance: Tensor) -> Tensor:
    """Return relevance (N, tokens, tokens) whose rows sum to 1 without the identity, plus the identity."""
    identity = torch.eye(relevance.shape[-1], dtype=relevance.dtype, device=relevance.device)
    others = relevance - identity
    return others / others.sum(-1, keepdim=True).clamp(min=torch.finfo(others.dtype).tiny) + identity


class TokenStream:
    """The tokens between the blocks of one forward, and its operations, which can be run again on other tokens.

    Args:
        attention: The attention of a forward that keeps all values.
        method: The name of the method, for errors.

    Attributes:
        nodes: The operations in the order of a backward pass. The first one returns the scores.
        inputs: For each block, the operation whose result is the tokens before the block.
    """

    def __init__(self, attention: TokenAttention, method: str) -> None:
        self._attention, self._method = attention, method
        self._model = type(attention.grads.forward.model).__name__
        self.nodes = attention.grads.nodes
        self._order = {node: position for position, node in enumerate(self.nodes)}
        self._passages = find_passages(self.nodes)
        ends, order = [*self._passages, self.nodes[-1]], self._order  # the last is the first operation
        self.inputs = [next(end for end in ends if order[end] > order[call.node]) for call in attention.blocks]
        if attention.tokens not in result_shape(self.inputs[0])[:2] or len({*self.inputs}) < len(self.inputs):
            problem = f"other layers of {self._model} bypass its blocks"
            raise NotApplicableError(f"{method}: {problem}; attn_lrp reads them too")

    @cached_property
    def outputs(self) -> list[Node]:
        """For each block, the operation whose result is the tokens after the block.

        The tokens after a block are the tokens before the next block. After the last block, the tokens follow its
        attention by the same number of operations as in the block before it.

        Raises:
            NotApplicableError: The last two blocks differ, or there is only one block.
        """
        blocks = dict(zip(self.inputs, self._attention.blocks, strict=True))  # with the last call of each
        if len(blocks) == 1:
            raise self._last_block_error()
        (_, before), (between, last) = list(blocks.items())[-2:]
        end = self._order[last.node]
        start = max(end - self._order[before.node] + self._order[between], 0)
        earlier, similar = self.nodes[self._order[between] : self._order[before.node]], self.nodes[start:end]
        if [node.name() for node in earlier] != [node.name() for node in similar] or similar[0] not in self._passages:
            raise self._last_block_error()
        after = dict(zip(blocks, [*list(blocks)[1:], similar[0]], strict=True))
        return [after[node] for node in self.inputs]

    def _last_block_error(self) -> NotApplicableError:
        problem = f"{self._model} does not end in two equal blocks, so the tokens after the last one cannot be found"
        return NotApplicableError(f"{self._method}: {problem}; use chefer_attention")

    def skip_gradients(self) -> dict[AttentionCall, Tensor]:
        """Return the gradients at the results of the blocks' attention that run along skip connections only.

        No branch passes gradient on to earlier tokens, so the gradient at the sum of each branch equals the gradient at
        the tokens after the last block. From the sum, it reaches the attention of the branch.

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
        """Return the result of an operation after the result of an earlier operation is replaced.

        Raises:
            NotApplicableError: An operation in between is a function in Python, or writes to a part of a tensor.
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
        NotApplicableError: The network has no attention, or a block without attention among all tokens; its last two
            blocks differ; or its head contains a function in Python.

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
        NotApplicableError: The network has no attention, or a block without attention among all tokens; or a block has
            no skip connection around its attention.

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
        pooled = gated(attention.pooling, attention.grads.gradient_at(attention.pooling.node), read)
        mean = pooled.new_full((1, 1, attention.tokens), 1 / attention.tokens)
        return pooled + torch.stack([gated(*block, mean) for block in gradients.items()]).sum(0)


def _logits(attention: TokenAttention, call: AttentionCall) -> Tensor:
    """Return the logits (N, heads, queries, keys) of a softmax of the model that computed the weights of a call."""
    softmax = cast("Operation", attention.grads.forward.operations.operation(cast("Node", call.softmax)))
    return at_least_float32(call.by_head(softmax.args["self"].detach()))


class CheferLRP(CheferAttention):
    """Attention of all blocks, weighted by its gradient and by its relevance from layer-wise relevance propagation.

    Formula: S = r ((I + W_L) ⋯ (I + W_1) − I), with W_l = mean_h (R(A_l) ⊙ ∇A_l)⁺ and R(A_l) the relevance of A_l.

    The product over all blocks of I + mean((gradient * relevance)+), where the mean is over the heads. The relevance of
    attention starts from 1 at the score. Linear layers divide it in proportion to positive parts, without biases;
    norms, activations and the softmax of attention pass it unchanged, and each factor of a product gets half. At a
    residual connection, both branches are scaled so that opposite relevance does not grow. The map is the row of the
    tokens that the head reads, without these tokens themselves.

    Relevance that starts with both signs, as for a contrast or a probability, cancels in this scaling, so that only
    rounding errors are left. Such targets are refused.

    Values: (N, 1, h, w), at least 0, dimensionless.

    Raises:
        NotApplicableError: The network has no attention, or a block without attention among all tokens; an operation
            has no rule; or the score rises with some outputs of the last linear layer and falls with others.

    Source: Chefer et al., "Transformer Interpretability Beyond Attention Visualization" (2021),
        https://arxiv.org/abs/2012.09838.
    """

    name = "chefer_lrp"
    cost = "1 forward, 3 backwards"
    needs = Needs(backwards=3, values=SavedValues.ALL, attention=True)

    def weights(self, attention: TokenAttention) -> Callable[[AttentionCall], Tensor]:
        """Return a function from a call to its weighted attention."""
        rules = _Rules(attention)
        try:
            Walk(attention.grads, rules, frees=attention.grads.forward.count_backward()).run()
        except NotApplicableError as error:
            problem = str(error).partition(";")[0]  # the rest names an option of LRP
            raise NotApplicableError(f"{self.name}: {problem}; chefer_attention needs no rules") from error
        if bool((rules.rises & rules.falls).any()):
            raise NotApplicableError(
                f"{self.name}: relevance starts with both signs, as for a contrast or a probability, and cancels; use "
                "attn_lrp or chefer_attention, or explain a single class or text"
            )
        return rules.weights.pop


class _Rules(Propagation):
    """The rules of the authors, down to the first attention.

    Args:
        attention: The attention of one forward, whose record keeps all values.

    Attributes:
        weights: The positive part of relevance times gradient of each call, averaged over the heads.
        rises: Whether the score of each image (N,) rises with an output of the last linear layers.
        falls: Whether the score of each image (N,) falls with an output of the last linear layers.
    """

    def __init__(self, attention: TokenAttention) -> None:
        linear = ZPlus(bias=False)
        super().__init__(Composite({"conv": linear, "linear": linear}), {}, "refuse")
        self.weights: dict[AttentionCall, Tensor] = {}
        self._calls = {call.node: call for call in attention.calls}
        self._gradients = {call: attention.grads.node_gradient(call.node) for call in attention.calls}
        self._length_first = (attention.tokens, len(attention.grads.x))
        self.rises, self.falls = (torch.zeros_like(attention.grads.scores, dtype=torch.bool) for _ in range(2))

    def __call__(self, visit: Visit) -> Gradients:
        """Return G at the operands of a node; None after the first attention."""
        call, operation = self._calls.get(visit.node), visit.operation
        if call is not None:
            return self._attend(visit, call)
        if len(self.weights) == len(self._calls):
            return (None,)
        if operation is None:
            return super().__call__(visit)
        if operation.name in NORMS or (operation.name in SOFTMAX and self.weights):  # a target's softmax has a gradient
            return self._unchanged(visit, operation)
        if visit.node in visit.walk.graph.first_and_last[1]:
            self.rises |= visit.walk.per_image(visit.grad > 0, visit.node) > 0
            self.falls |= visit.walk.per_image(visit.grad < 0, visit.node) > 0
        # The sum of two heads (N, classes) is not a residual connection: relevance of opposite signs would cancel.
        is_residual = operation.name == "add" and visit.on_path == [True, True] and visit.grad.dim() > 2
        return self._residual(visit, operation) if is_residual else super().__call__(visit)

    def propagate(self, visit: Visit, rule: Rule, op: LinearOperation, values: Tensor) -> Passed:
        """Skip rows without relevance, such as most tokens in the last block. Start with the size of the gradient."""
        if visit.node in visit.walk.graph.first_and_last[1]:
            values = at_least_float32(visit.grad).abs()
        rows = values.any(-1)
        if op.dims != (-1,) or op.input.dim() > 2 or not 0 < int(rows.sum()) < len(rows):
            return super().propagate(visit, rule, op, values)
        part = replace(op, input=op.input[rows], find_output=lambda: op.output[rows], shared=None)
        passed = super().propagate(visit, rule, part, values[rows])
        at_input = torch.zeros_like(op.input)
        at_input[rows] = cast("Tensor", passed.grad)
        return Passed(at_input)

    def _attend(self, visit: Visit, call: AttentionCall) -> Gradients:
        """Weight attention. Pass half of its relevance through its softmax, by halves to query and key."""
        logits = None if call.query is None else call.logits()
        probabilities = call.probabilities() if logits is None else call.softmax_of(logits)
        relevance = call.gradient(visit.grad).mul_(probabilities).div_(2)
        self.weights[call] = call.gradient(self._gradients[call]).mul_(relevance).clamp_(min=0).mean(1)
        if len(self.weights) == len(self._calls):
            return (None,)
        if logits is None:
            return super().__call__(visit)
        at_logits = divided(relevance.div_(2), logits)
        return tuple(call.operand_gradients(at_logits, visit.grad / 2, probabilities))

    def _unchanged(self, visit: Visit, operation: Operation) -> Gradients:
        """Pass the relevance of each number of the result to the same number of the operand."""
        operand, result = next(iter(operation.args.values())), operation.result
        relevance = (result if isinstance(result, Tensor) else result[0]) * visit.grad
        return (divided(relevance, operand), *[None] * (len(visit.on_path) - 1))

    def _residual(self, visit: Visit, operation: Operation) -> Gradients:
        """Scale the relevance of two summands, for each image, by their fractions of the sum of magnitudes."""
        grads = [cast("Tensor", grad) for grad in visit.plain()]
        parts = [operand * grad for operand, grad in zip(operation.args.values(), grads, strict=False)]
        image_dim = int(visit.grad.shape[:2] == self._length_first)
        dims = [dim for dim in range(visit.grad.dim()) if dim != image_dim]
        sums = torch.stack([part.sum(dims, keepdim=True) for part in parts])
        factors = sums.sign() * divided(sums.sum(0), sums.abs().sum(0))
        return tuple(grad * factor for grad, factor in zip(grads, factors, strict=True))
