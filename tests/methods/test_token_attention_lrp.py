"""Chefer's LRP equals the paper's formulas, written out for one image of a small transformer."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saliency
from saliency import CheferAttention, CheferLRP, Together
from saliency.errors import NotApplicableError
from saliency.testing import images, tiny_transformer

X = images(3).double()


class Trace(NamedTuple):
    """The values of one block, without the batch."""

    start: Tensor
    normed: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    weights: Tensor
    mixed: Tensor
    attended: Tensor
    middle: Tensor
    normed2: Tensor
    hidden: Tensor
    active: Tensor
    end: Tensor


def run_block(block: Any, start: Tensor) -> Trace:
    normed, attention = block.norm1(start), block.self_attn
    projected = F.linear(normed, attention.in_proj_weight, attention.in_proj_bias)
    query, key, value = (part.reshape(-1, 2, 4).transpose(0, 1) for part in projected.chunk(3, 1))
    weights = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1).requires_grad_()
    mixed = (weights @ value).transpose(0, 1).flatten(1)
    attended = attention.out_proj(mixed)
    middle = start + attended
    normed2 = block.norm2(middle)
    hidden = block.linear1(normed2)
    active = F.silu(hidden)
    end = block.linear2(active)
    return Trace(start, normed, query, key, value, weights, mixed, attended, middle, normed2, hidden, active, end)


def through_linear(x: Tensor, weight: Tensor, relevance: Tensor) -> Tensor:
    """Equation 5 of the paper: products of inputs and weights share the relevance where they are positive."""
    parts = (x.unsqueeze(-2) * weight).clamp(min=0)  # (..., outputs, inputs)
    return (parts / parts.sum(-1, keepdim=True).clamp(min=1e-30) * relevance.unsqueeze(-1)).sum(-2)


def through_product(a: Tensor, b: Tensor, relevance: Tensor) -> tuple[Tensor, Tensor]:
    """Equation 6: each factor of a product a @ b receives its gradient times itself, and then half of it."""
    ratio = relevance / (a @ b)
    return a * (ratio @ b.mT) / 2, b * (a.mT @ ratio) / 2


def through_sum(a: Tensor, b: Tensor, relevance: Tensor) -> tuple[Tensor, Tensor]:
    """Equations 6, 9 and 10: shares in proportion, scaled to the shares of their absolute sums."""
    ratio = relevance / (a + b)
    at_a, at_b = a * ratio, b * ratio
    total = at_a.sum().abs() + at_b.sum().abs()
    factors = [part.sum().abs() / total * relevance.sum() / part.sum() for part in (at_a, at_b)]
    return at_a * factors[0], at_b * factors[1]


def expected_map(model: Any, x: Tensor, target: int, sign: float = 1) -> Tensor:
    patches = model.patches(x[None])[0].flatten(1).T
    start, traces = torch.cat([model.token.weight, patches]), []
    for block in model.blocks:
        traces.append(run_block(block, start))
        start = traces[-1].middle + traces[-1].end
    normed = model.norm(start)[:1]
    scores = model.head(normed)[0]
    torch.testing.assert_close(scores, model(x[None])[0])
    grads = torch.autograd.grad(sign * scores[target], [trace.weights for trace in traces])
    relevance = torch.zeros_like(start)
    relevance[:1] = through_linear(normed, model.head.weight, F.one_hot(torch.tensor([target]), 5).double())
    product = torch.eye(len(start), dtype=torch.float64)
    for block, trace, grad in reversed(list(zip(model.blocks, traces, grads, strict=True))):
        middle, at_mlp = through_sum(trace.middle, trace.end, relevance)
        at_mlp = through_linear(trace.active, block.linear2.weight, at_mlp)
        middle = middle + through_linear(trace.normed2, block.linear1.weight, at_mlp)
        relevance, at_mixed = through_sum(trace.start, trace.attended, middle)
        at_mixed = through_linear(trace.mixed, block.self_attn.out_proj.weight, at_mixed)
        at_mixed = at_mixed.reshape(-1, 2, 4).transpose(0, 1)
        at_weights, at_value = through_product(trace.weights, trace.value, at_mixed)
        at_query, at_key = through_product(trace.query, trace.key.mT, at_weights)
        joined = torch.cat([part.transpose(0, 1).flatten(1) for part in (at_query, at_key.mT, at_value)], 1)
        relevance = relevance + through_linear(trace.normed, block.self_attn.in_proj_weight, joined)
        product = product @ (torch.eye(len(start)) + (grad * at_weights).clamp(min=0).mean(0))
    return product[0, 1:].reshape(4, 4)


def test_the_map_is_that_of_the_papers_formulas() -> None:
    model, targets = tiny_transformer().double(), [0, 4, 2]
    found = CheferLRP(model).attribute(X, targets)
    wanted = torch.stack([expected_map(model, x, target) for x, target in zip(X, targets, strict=True)])
    torch.testing.assert_close(found.values[:, 0], wanted)


def test_what_lowers_a_score_is_not_what_raises_it() -> None:
    model = tiny_transformer().double()
    found = CheferLRP(model).attribute(X, lambda output: -output[:, 4])
    wanted = torch.stack([expected_map(model, x, 4, sign=-1) for x in X])
    torch.testing.assert_close(found.values[:, 0], wanted)


def log_probability(output: Tensor) -> Tensor:
    return output.log_softmax(1)[:, 1]


@pytest.mark.parametrize(
    "target",
    [saliency.contrast(1, 0), saliency.contrast(0, 1), saliency.probability(1), log_probability, [log_probability] * 3],
)
def test_relevance_that_starts_with_both_signs_is_refused(target: Any) -> None:
    """It cancels: the map would be rounding noise."""
    model = tiny_transformer().double()
    with pytest.raises(NotApplicableError, match=r"both signs.*attn_lrp or chefer_attention"):
        CheferLRP(model).attribute(X, target)
    assert CheferAttention(model).attribute(X, target).values.any()


def test_a_text_against_another_is_refused() -> None:
    towers, scenes = saliency.load("shapes_two_tower"), saliency.testbed.draw_scenes(1, seed=1_000_000)
    one, other = scenes.captions()[0][:2]
    with pytest.raises(NotApplicableError, match=r"both signs.*explain a single class or text"):
        CheferLRP(towers).attribute(scenes.images, saliency.text(one, against=other))
    assert float(CheferLRP(towers).attribute(scenes.images, saliency.text(one)).values.max()) > 1e-4


def test_images_with_targets_of_opposite_signs_are_not_confused() -> None:
    model = tiny_transformer().double()
    targets = [lambda output: output[:, 1], lambda output: -output[:, 1], lambda output: output[:, :2].sum(1)]
    together = CheferLRP(model).attribute(X, targets).values
    alone = [CheferLRP(model).attribute(x[None], target).values for x, target in zip(X, targets, strict=True)]
    torch.testing.assert_close(together, torch.cat(alone))


def test_unfused_attention_gives_the_same_map() -> None:
    timm: Any = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=5, img_size=64).eval()
    x = images(2, (64, 64))
    fused = CheferLRP(model).attribute(x, 1).values
    for block in model.blocks:
        block.attn.fused_attn = False
    torch.testing.assert_close(CheferLRP(model).attribute(x, 1).values, fused, rtol=1e-3, atol=1e-7)


def test_images_that_come_after_the_tokens_are_told_apart() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0), 2, enable_nested_tensor=False)

    class LengthFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = model, nn.Linear(8, 3)
            self.patches = nn.Conv2d(3, 8, 4, stride=4)

        def forward(self, x: Tensor) -> Tensor:
            tokens: Tensor = self.encoder(self.patches(x).flatten(2).permute(2, 0, 1))
            scores: Tensor = self.head(tokens.mean(0))
            return scores

    torch.manual_seed(0)
    network = LengthFirst().double().eval()
    together = CheferLRP(network).attribute(X, 1).values
    alone = torch.cat([CheferLRP(network).attribute(x[None], 1).values for x in X])
    torch.testing.assert_close(together, alone)


def test_it_shares_the_forward_with_other_methods() -> None:
    model, x = tiny_transformer(), images(2)
    methods = [CheferAttention(model), CheferLRP(model), saliency.AttnLRP(model)]
    for method, found in zip(methods, Together(*methods).attribute(x, 1), strict=True):
        torch.testing.assert_close(found.values, method.attribute(x, 1).values)


def test_an_operation_without_a_rule_names_a_method_that_needs_none() -> None:
    model = tiny_transformer()
    model.register_forward_hook(lambda module, args, out: out.cumprod(1))
    with pytest.raises(NotApplicableError, match="chefer_lrp: no rule for the operation cumprod; chefer_attention"):
        CheferLRP(model).attribute(images(1), 1)
    assert CheferAttention(model).attribute(images(1), 1).values.any()
