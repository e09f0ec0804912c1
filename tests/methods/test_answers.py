"""Methods of attention on answers of vision-language models equal explicit attention of the language model."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import saliency
from saliency import METHODS
from saliency.errors import LayerError, NotApplicableError
from saliency.testbed import CaptionProcessor
from tests.vision_language import answered, build, scene


@cache
def captioned(caption: str) -> Any:
    """The captioner's answer with a caption."""
    image = saliency.testbed.draw_scenes(1, seed=1_000_000).images[0]
    return saliency.generate(saliency.load("shapes_caption"), CaptionProcessor(), image, "caption", answer=caption)


FAMILIES = ["llava", "qwen2_vl"]  # one crop; merged patches of any size, and grouped keys


def explicit(model: Any, answer: Any) -> tuple[list[Tensor], list[Tensor], int]:
    """The attention of each layer (heads, L, L), its gradient for the log-odds of "red", and the query of "red"."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    arguments = answer.arguments(answer.inputs, 0) | {"output_attentions": True, "logits_to_keep": 0}
    output = model(**arguments)
    model.set_attn_implementation(implementation)
    query = answer.output_positions[1]
    logits, token = output.logits[0, query], int(answer.ids[query + 1])
    others = torch.cat([logits[:token], logits[token + 1 :]])
    grads = torch.autograd.grad(logits[token] - others.logsumexp(0), output.attentions)
    return [own[0].detach() for own in output.attentions], [own[0] for own in grads], query


def on_image(answer: Any, row: Tensor) -> Tensor:
    """The part (h, w) of a row of all tokens at the tokens of the image."""
    (tokens,) = answer.image_tokens
    return row[tokens.positions]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_attention_of_an_answer_is_that_of_the_eager_model(family: str) -> None:
    model, _, answer = answered(family)
    probabilities, gradients, query = explicit(model, answer)
    layers = saliency.attention(model, answer, saliency.words("red"))[-len(probabilities) :]
    for layer, own, grad in zip(layers, probabilities, gradients, strict=True):
        torch.testing.assert_close(layer.probabilities[0], own, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(layer.gradient[0], grad, rtol=1e-3, atol=1e-7)
        wanted = torch.stack([on_image(answer, head[query]) for head in own])
        torch.testing.assert_close(layer.maps(query)[0], wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_rollout_and_relevance_start_at_the_position_that_predicts_the_word(family: str) -> None:
    model, _, answer = answered(family)
    probabilities, gradients, query = explicit(model, answer)
    share = relevance = torch.eye(len(probabilities[0][0]))
    weighted = [(own * grad).clamp(min=0).mean(0) for own, grad in zip(probabilities, gradients, strict=True)]
    by_gradient = torch.eye(len(share))
    for own, grad, weight in zip(probabilities, gradients, weighted, strict=True):
        share = ((own.mean(0) + torch.eye(len(share))) / 2) @ share
        relevance = relevance + weight @ relevance
        mean = (own * grad).mean(0).clamp(min=0) + torch.eye(len(share))
        by_gradient = mean / mean.sum(1, keepdim=True) @ by_gradient
    for method, wanted in (
        (saliency.AttentionRollout, share),
        (saliency.CheferAttention, relevance),
        (saliency.GradientRollout, by_gradient),
    ):
        found = method(model).attribute(answer, saliency.words("red")).values[0, 0]
        torch.testing.assert_close(found, on_image(answer, wanted[query]), rtol=1e-3, atol=1e-7)


def test_an_image_tower_with_as_many_tokens_as_the_language_model_has_its_own_grid() -> None:
    answer = captioned("a red circle left")
    layers = saliency.attention(answer.model, answer)
    tower, decoder = layers[0], layers[-1]
    assert tower.shape == decoder.shape == (1, 4, 69, 69)
    torch.testing.assert_close(tower.maps(0), tower.probabilities[:, :, 0, 5:].reshape(1, 4, 8, 8))
    torch.testing.assert_close(decoder.maps(68), decoder.probabilities[:, :, 68, 1:65].reshape(1, 4, 8, 8))
    with pytest.raises(LayerError, match=r'"decoder.2.attn" have no position; pass the number'):
        decoder.maps((20, 30))


REFUSED = {"chefer_lrp": "relevance starts with both signs"}
ATTENTION = [name for name, method in METHODS.items() if method.needs.attention]


@pytest.mark.parametrize("name", ATTENTION)
def test_each_method_of_attention_explains_an_answer_or_states_the_reason(name: str) -> None:
    model, _, answer = answered("llava")
    method = METHODS[name](model)
    if name in REFUSED:
        with pytest.raises(NotApplicableError, match=REFUSED[name]):
            method.attribute(answer, saliency.words("red"))
        return
    red, car = method.attribute_classes(answer, [saliency.words("red"), saliency.words("car")])
    assert red.values.shape == (1, 1, 4, 4)
    assert red.values.any()
    assert not torch.equal(red.values, car.values)
    torch.testing.assert_close(method.attribute(answer, saliency.words("car")).values, car.values)


def test_tiles_and_a_view_of_the_whole_image_share_one_map() -> None:
    *_, answer = answered("internvl")
    *tiles, thumbnail = answer.image_tokens
    values = torch.zeros(1, len(answer.ids) - 1, 2)
    values[0, tiles[-1].positions[1, 1], 0] = 3.0
    values[0, thumbnail.positions, 1] = 1.0
    maps = answer.layout(0)(values)[0]
    assert maps[0].nonzero().tolist() == [[side - 1 for side in maps[0].shape]]  # the last cell
    assert float(maps[0].sum()) == 3.0
    torch.testing.assert_close(maps[1], torch.full_like(maps[1], 4 / maps[1].numel()))


def bridged() -> tuple[Any, Any, list[Tensor], list[Tensor]]:
    """BLIP-2, its answer, the attention (heads, queries, keys) from the Q-former on, and its gradient for "red"."""
    built, processor = build("blip_2")
    model: Any = built.double()
    answer = saliency.generate(model, processor, scene(), "what color is the car", answer="a red circle")
    probabilities: list[Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        probabilities.append(output[1])

    model.set_attn_implementation("eager")
    names = ("qformer", "language_model")
    layers = [own for name, own in model.named_modules() if name.startswith(names) and hasattr(own, "num_heads")]
    layers += [own for own in model.qformer.modules() if hasattr(own, "num_attention_heads")]
    handles = [layer.register_forward_hook(keep) for layer in layers]
    logits = model(**answer.arguments(answer.inputs, 0) | {"logits_to_keep": 0}).logits[0, answer.output_positions[1]]
    for handle in handles:
        handle.remove()
    model.set_attn_implementation("sdpa")
    probabilities = probabilities[1:]  # the first is among learned queries, before they see the image
    token = int(answer.ids[answer.output_positions[1] + 1])
    score = logits[token] - torch.cat([logits[:token], logits[token + 1 :]]).logsumexp(0)
    grads = torch.autograd.grad(score, probabilities)
    return model, answer, [own[0].detach() for own in probabilities], [own[0] for own in grads]


def mixed(weights: Tensor, size: int) -> Tensor:
    """The attention of a call with its residual connection, among the 8 queries and 17 tokens of the image, or all."""
    whole = torch.eye(size, dtype=weights.dtype)
    columns = slice(8, 25) if weights.shape == (8, 17) else slice(len(weights))
    whole[: len(weights), columns] += weights
    return whole / whole.sum(1, keepdim=True)


def test_attention_continues_from_the_queries_of_blip_2_to_the_patches() -> None:
    model, answer, probabilities, gradients = bridged()
    assert [own.shape[1:] for own in probabilities[:4]] == [(8, 17), (8, 8), (8, 8), (8, 17)]
    products = [own * grad for own, grad in zip(probabilities, gradients, strict=True)]
    means, positive = [own.mean(0) for own in probabilities], [own.mean(0).clamp(min=0) for own in products]
    size, query = len(means[-1]), answer.output_positions[1]

    def rolled(weights: list[Tensor]) -> Tensor:
        text, patches = torch.eye(size).double(), torch.eye(25).double()
        for own in weights[4:]:
            text = mixed(own, size) @ text
        for own in weights[:4]:
            patches = mixed(own, 25) @ patches
        return text[query, :8] @ patches[:8, 8:]

    weighted = [own.clamp(min=0).mean(0) for own in products]
    among, seen, text = torch.eye(8).double(), torch.zeros(8, 17).double(), torch.eye(size).double()
    for own in weighted[:4]:
        if own.shape == (8, 17):
            others = among - torch.eye(8)
            seen = seen + (others / others.sum(1, keepdim=True).clamp(min=1e-300) + torch.eye(8)).T @ own
        else:
            among, seen = among + own @ among, seen + own @ seen
    for own in weighted[4:]:
        text = text + own @ text
    for method, wanted in (
        (saliency.AttentionRollout, rolled(means)),
        (saliency.GradientRollout, rolled(positive)),
        (saliency.CheferAttention, text[query, :8] @ seen),
    ):
        found = method(model).attribute(answer, saliency.words("red")).values
        torch.testing.assert_close(found, wanted[1:].view(1, 1, 4, 4), rtol=1e-5, atol=0)

    read = [layer for layer in saliency.attention(model, answer) if "crossattention" in layer.layer]
    for layer, own in zip(read, [probabilities[0], probabilities[3]], strict=True):
        torch.testing.assert_close(layer.maps(5)[0], own[:, 5, 1:].reshape(2, 4, 4))


@pytest.mark.parametrize("method", [saliency.AttentionRollout, saliency.GradientRollout])
def test_rollout_discards_the_smallest_attention_of_the_queries_of_blip_2(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, answer, probabilities, gradients = bridged()
    seen: list[Tensor] = []
    for own, grad in zip(probabilities[:4], gradients[:4], strict=True):
        fused = own.mean(0) if method is saliency.AttentionRollout else (own * grad).mean(0).clamp(min=0)
        kept = fused.flatten().scatter(0, fused.flatten().topk(int(fused.numel() / 2), largest=False).indices, 0)
        kept = kept.view_as(fused)
        if len(kept) == kept.shape[1]:
            kept.diagonal().copy_(fused.diagonal())
        added = kept @ seen[-1] if len(kept) == kept.shape[1] else kept
        seen.append((added + (seen[-1] if seen else 0)) / (kept.sum(1, keepdim=True) + 1))

    known, found = method.query_relevance, list[Tensor]()

    def keep(self: Any, attention: Any) -> Tensor:
        found.append(known(self, attention))
        return found[0]

    monkeypatch.setattr(method, "query_relevance", keep)
    method(model, discard_ratio=0.5).attribute(answer, saliency.words("red"))
    torch.testing.assert_close(found[0][0], seen[-1], rtol=1e-5, atol=1e-12)


BRIDGED = [name for name in ATTENTION if name not in REFUSED]


@pytest.mark.parametrize("name", BRIDGED)
def test_methods_of_attention_have_a_map_for_each_word_of_blip_2(name: str) -> None:
    model, _, answer = answered("blip_2")
    method = METHODS[name](model)
    red, car = method.attribute_classes(answer, [saliency.words("red"), saliency.words("car")])
    assert red.values.shape == (1, 1, 4, 4)
    assert not torch.equal(red.values, car.values)


def test_what_queries_do_not_define_is_refused() -> None:
    model, _, answer = answered("blip_2")
    with pytest.raises(NotApplicableError, match="no position in the image"):
        saliency.TAM(model).attribute(answer, saliency.words("red"))
    with pytest.raises(LayerError, match="not one for each patch"):
        saliency.attention(model, answer)[-1].maps(0)
    queries: Any = answer.image_tokens[0].positions
    assert queries.shape == (1, 8)


@pytest.mark.filterwarnings("ignore:the image has only")
def test_the_figure_has_a_panel_for_each_word_and_a_table_of_shares() -> None:
    answer = captioned("a red circle")
    model, red = answer.model, saliency.AttnLRP(answer.model).attribute(answer, saliency.words("red"))
    assert red.image_share is not None
    drawing = saliency.word_sheet(answer, saliency.AttnLRP(model))
    titles = [axes.get_title() for axes in drawing.axes]
    assert [title.split()[0] for title in titles[:4]] == ["image", "a", "red", "circle"]
    assert [label.get_text() for label in drawing.axes[-1].get_yticklabels()] == ["a", "red", "circle"]
    assert [label.get_text() for label in drawing.axes[-1].get_xticklabels()][:2] == ["image +", "image −"]
    shares: Any = drawing.axes[-1].images[0].get_array()
    raising, lowering = shares[1, :2]
    assert raising > 0 > lowering
    assert raising - lowering == pytest.approx(float(red.image_share[0]), rel=1e-3)
    without = saliency.word_sheet(answer, saliency.CheferAttention(model), columns=2)
    assert len(without.axes) == 4
