"""Answers of vision-language models as inputs of methods."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import saliency
from saliency.attribution.explanation import joined
from saliency.errors import LayerError
from saliency.io.geometry import Geometry
from saliency.model.answer import find_canvas
from saliency.testing.unchanged import Snapshot
from tests.models import PooledNet
from tests.reference import error
from tests.vision_language import (
    FAMILIES,
    QUESTION,
    answered,
    build,
    byte_tokenizer,
    florence_2,
    llava,
    mllama,
    qwen3_vl,
    scene,
)

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
    pytest.mark.filterwarnings("ignore:the image has only:saliency.errors.SaliencyWarning"),  # random weights
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # of PaliGemmaProcessor
]

SIZE = (140, 90)
RESIZED = {"llava_next", "internvl", "idefics3", "smolvlm"}  # families with a resized view of the whole image


def logits(model: nn.Module, answer: saliency.Answer, x: Tensor) -> Tensor:
    """The logits of the answer's tokens for canvases of its first image."""
    values: Tensor = model(**answer.arguments(x, 0)).logits
    return values


def odds(rows: Tensor, token: int) -> Tensor:
    """The log-odds of a token in logits (N, V)."""
    p = rows.softmax(1)[:, token]
    return (p / (1 - p)).log()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_canvas_gives_the_pixel_values_of_the_processor(family: str) -> None:
    _, _, answer = answered(family)
    forward: Any = answer.arguments
    expected, found = forward.fixed["pixel_values"], forward(answer.inputs, 0)["pixel_values"]
    assert found.shape == expected.shape
    views = (
        (found - expected)
        .abs()
        .reshape(-1, *found.shape[-3:] if found.dim() > 2 else found.shape)
        .mean((1, 2, 3) if found.dim() > 2 else (1, 2))
    )
    assert int((views > 0).sum()) == (family in RESIZED)
    assert float(views.max()) < 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_change_of_the_image_is_where_the_frame_says(family: str) -> None:
    model, processor, answer = answered(family)
    changed = scene()
    changed.paste((255, 255, 255), (88, 14, 108, 34))  # right of the middle, above it
    other = saliency.generate(model, processor, changed, QUESTION, answer="a red car")
    difference = (other.inputs - answer.inputs).abs().sum((0, 1)) > 0.3  # (H, W)
    rows, columns = difference.nonzero().unbind(1)
    geometry = Geometry.of(answer.frames[0], (answer.inputs.shape[2], answer.inputs.shape[3]))
    left, top, right, bottom = geometry.to_input((88, 14, 108, 34))
    found = (int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1)
    assert found == pytest.approx((left, top, right, bottom), abs=2)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"blip_2"}))
def test_a_change_of_a_cell_changes_its_token_most(family: str) -> None:
    model, _, answer = answered(family)
    reader = model.get_submodule(str(answer.reader))

    def embeddings(x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        hook = reader.register_forward_pre_hook(
            lambda _, args, kwargs: kept.append(kwargs["inputs_embeds"]), with_kwargs=True
        )
        with torch.no_grad(), hook:
            logits(model, answer, x)
        return kept[0][0]  # (L, D)

    before = embeddings(answer.inputs)
    positions = torch.cat([tokens.positions.flatten() for tokens in answer.image_tokens])
    assert len(set(positions.tolist())) == len(positions)
    assert answer.is_image[positions].all()
    for tokens in answer.image_tokens:
        assert tokens.box is not None
        (height, width), (left, top, right, bottom) = tokens.positions.shape, tokens.box
        y, x = (bottom - top) / height, (right - left) / width
        own = tokens.positions.flatten()
        for row, column in ((0, width - 1), (height - 1, 0), (height // 2, width // 2)):
            changed = answer.inputs.clone()
            area = changed[
                ...,
                max(round(top + row * y), 0) : round(top + (row + 1) * y),
                max(round(left + column * x), 0) : round(left + (column + 1) * x),
            ]
            if not area.numel():
                continue
            area += 3 * torch.randn(area.shape, generator=torch.Generator().manual_seed(0))
            moved = (embeddings(changed) - before)[own].norm(dim=1)
            assert int(own[moved.argmax()]) == int(tokens.positions[row, column]), (tokens.box, row, column)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_is_that_of_the_bare_model(family: str) -> None:
    model, _, answer = answered(family)
    arguments = answer.arguments(answer.inputs, 0)
    pixels = arguments["pixel_values"].clone().requires_grad_()
    rows = model(**{**arguments, "pixel_values": pixels}).logits[:, 1]
    score = odds(rows, answer.answer_text.ids[1])
    (gradient,) = torch.autograd.grad(score.sum(), pixels)
    x = answer.inputs.clone().requires_grad_()
    (expected,) = torch.autograd.grad(answer.arguments(x, 0)["pixel_values"], x, gradient)
    explanation = saliency.VanillaGradient(model).attribute(answer, saliency.words("red"))
    torch.testing.assert_close(explanation.scores, score, rtol=1e-4, atol=1e-4)
    assert error(explanation.values, expected) < 1e-4
    assert explanation.target_names == ("red",)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_rows_of_a_batch_do_not_affect_each_other(family: str) -> None:
    model, _, answer = answered(family)
    x = answer.inputs + torch.randn(3, *answer.inputs.shape[1:], generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        alone = torch.cat([logits(model, answer, row[None]) for row in x])
        assert error(logits(model, answer, x), alone) < 1e-4
    assert error(alone[0], alone[1]) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_would_give_the_answer_that_it_generated(family: str) -> None:
    model, processor, _ = answered(family)
    answer = saliency.generate(model, processor, scene(), QUESTION, max_new_tokens=4)
    forward: Any = answer.arguments
    with torch.no_grad():
        rows = model(**{**forward.fixed, **forward.options}).logits[0]
    assert tuple(rows.argmax(1).tolist()) == answer.answer_text.ids
    assert len(answer.tokens) == len(answer.output_positions) == rows.shape[0] <= 4


def test_fused_attention_gives_the_maps_of_eager_attention() -> None:
    for family in ("llava", "qwen2_5_vl", "paligemma"):
        model: Any
        model, processor = build(family)
        for cls in (saliency.InputXGradient, saliency.AttnLRP, saliency.CPLRP):
            maps = []
            for kind in ("sdpa", "eager"):
                model.set_attn_implementation(kind)
                answer = saliency.generate(model, processor, scene(), QUESTION, answer="a red car")
                maps.append(cls(model).attribute(answer, saliency.words("red")).values)
            assert error(*maps) < 1e-4, (family, cls)


def test_methods_of_many_passes_explain_an_answer() -> None:
    model, _, answer = answered("llava")
    with torch.no_grad():
        scores = [
            odds(logits(model, answer, x)[:, 1], answer.answer_text.ids[1]) for x in (answer.inputs, 0 * answer.inputs)
        ]
    path = saliency.IntegratedGradients(model, steps=32).attribute(answer, saliency.words("red"))
    torch.testing.assert_close(path.values.sum(), (scores[0] - scores[1])[0], rtol=1e-2, atol=1e-3)
    hidden = saliency.Occlusion(model, window=14, stride=14).attribute(answer, saliency.words("red"))
    changed = answer.inputs.clone()
    changed[..., :14, 14:] = 0
    with torch.no_grad():
        drop = scores[0] - odds(logits(model, answer, changed)[:, 1], answer.answer_text.ids[1])
    assert float(hidden.values[0, 0, 7, 21]) == pytest.approx(float(drop), abs=1e-4)
    shown = saliency.RISE(model, passes=16, grid=4).attribute(answer, saliency.words("red"))
    assert shown.values.shape[2:] == answer.inputs.shape[2:]
    assert shown.token_shares is None
    assert saliency.overlay(shown).size == SIZE


def test_all_words_share_one_forward() -> None:
    model, _, answer = answered("llava")
    assert [word for word, _ in answer.words] == ["a", "red", "car"]
    maps = saliency.AttnLRP(model).attribute_classes(answer, [saliency.words(at=at) for _, at in answer.words])
    assert [own.target_names[0] for own in maps] == ["a", "red", "car"]
    whole = saliency.VanillaGradient(model).attribute(answer)
    parts = saliency.VanillaGradient(model).attribute_classes(answer, [saliency.words(at=at) for _, at in answer.words])
    assert error(whole.values, sum(own.values for own in parts)) < 1e-5  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["llava", "blip_2"])
def test_the_ledger_has_the_share_of_the_text(family: str) -> None:
    model, _, answer = answered(family)
    explanation = saliency.AttnLRP(model).attribute(answer, saliency.words("red"))
    assert explanation.ledger is not None
    assert explanation.residual is not None
    assert explanation.token_shares is not None
    assert float(explanation.residual.abs()) < 1e-4
    is_image = answer.is_image
    assert tuple(token is None for token in explanation.tokens) == tuple(is_image.tolist())
    text = float(explanation.token_shares[0, ~is_image].sum())
    assert float(explanation.ledger[0, explanation.ledger_names.index("text")]) == pytest.approx(text, abs=1e-6)
    later = dict(zip(explanation.ledger_names, explanation.ledger[0].tolist(), strict=True))
    assert sum(later.values()) == pytest.approx(float(explanation.scores), abs=1e-4)
    share = float(explanation.token_shares[0, is_image].abs().sum() / explanation.token_shares.abs().sum())
    assert explanation.image_share is not None
    assert float(explanation.image_share) == pytest.approx(share, abs=1e-6)
    assert f"{100 * share:.1f} % is the image's" in str(saliency.ledger_table(explanation))


@pytest.mark.parametrize("method", [saliency.InputXGradient, saliency.AttnLRP])
@pytest.mark.parametrize("family", [qwen3_vl, mllama], ids=lambda family: family.__name__)
@pytest.mark.filterwarnings("error")
def test_an_image_that_enters_after_the_embeddings_has_no_share(
    family: Callable[[], tuple[nn.Module, Any]], method: type[saliency.Attribution]
) -> None:
    torch.manual_seed(0)
    model, processor = family()
    answer = saliency.generate(model.eval(), processor, scene(), QUESTION, answer="a red car")
    projections = [own for name, own in model.named_parameters() if "visual.merger.linear_fc2" in name]
    with torch.no_grad():
        for projection in projections:  # what is left enters later layers
            projection.mul_(1e-4)
    explanation = method(model).attribute(answer, saliency.words("red"))
    assert explanation.values.any()
    assert explanation.image_share is explanation.token_shares is None
    assert explanation.notes == ("",)
    assert explanation.tokens == ()
    if explanation.ledger is not None:
        torch.testing.assert_close(explanation.ledger.sum(1), explanation.scores, rtol=0, atol=1e-4)
        assert "image's" not in str(saliency.ledger_table(explanation))
    saliency.word_sheet(answer, method(model))


def test_the_tokens_of_an_answer_read_the_image_by_cross_attention() -> None:
    torch.manual_seed(0)
    model, processor = mllama()
    prompt = f"<|image|> {QUESTION}"
    answer = saliency.generate(model.eval(), processor, scene(), prompt, answer="a red car")
    score = saliency.InputXGradient(model).attribute(answer, saliency.words("car")).scores
    inputs = processor(images=[scene()], text=[f"{prompt} a red"], return_tensors="pt")
    torch.testing.assert_close(score, odds(model(**inputs).logits[:, -1], answer.answer_text.ids[2]).detach())
    greedy = saliency.generate(model, processor, scene(), prompt, max_new_tokens=3)
    rows = logits(model, greedy, greedy.inputs)[0].argmax(1)
    assert tuple(rows.tolist()) == greedy.answer_text.ids


@pytest.mark.parametrize("size", [(28, 28), (56, 28), (28, 80)])
def test_empty_tiles_after_those_of_the_image_have_no_place(size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model, processor = mllama()
    answer = saliency.generate(model.eval(), processor, scene(size=size), f"<|image|> {QUESTION}", answer="a red car")
    fixed = answer.arguments.fixed["pixel_values"]
    assert not fixed[0, 0, -1].any()
    assert torch.equal(answer.arguments(answer.inputs, 0)["pixel_values"], fixed)
    for cell in ((2, 3), (20, 25)):
        with torch.no_grad():
            x = answer.inputs.clone()
            x[..., cell[0], cell[1]] += 1
            changed = answer.arguments(x, 0)["pixel_values"]
        assert int((changed != fixed).sum()) == 3  # one pixel of one tile
    assert saliency.overlay(saliency.AttnLRP(model).attribute(answer, saliency.words("red"))).size == size


def test_an_encoder_decoder_is_refused() -> None:
    model, processor = florence_2()
    with pytest.raises(saliency.errors.ModelError, match="Florence2ForConditionalGeneration is an encoder-decoder"):
        saliency.generate(model.eval(), processor, scene(), "<CAPTION>", answer="a red car")


def test_an_output_of_another_length_is_refused() -> None:
    class Last(_Plain):
        def forward(self, input_ids: Tensor, pixel_values: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
            return {"logits": super().forward(input_ids, pixel_values, attention_mask)["logits"][:, -1:]}

    message = r"the output is \(1, 1, 12\); expected logits \(1, 6, V\) of the sequence"
    with pytest.raises(saliency.errors.ModelError, match=message):
        saliency.generate(Last(), _Processor(), scene(), "3 4", answer="5 6 7", canvas=_halves)


def test_a_character_of_several_tokens_is_one_character() -> None:
    torch.manual_seed(0)
    model, processor = llava(words=byte_tokenizer("<image>"))
    text = "ein 🚗 ist grün"
    answer = saliency.generate(model.eval(), processor, scene(), "<image> wie heißt 🚗?", answer=text)
    assert answer.text == "".join(answer.tokens) == text
    assert len(answer.tokens) == len(text.encode())
    assert "".join(token or "" for token in answer.sequence) == " wie heißt 🚗?ein 🚗 ist grü"  # without the last token
    explanation = saliency.InputXGradient(model).attribute(answer, saliency.words("grün"))
    rows, ids = logits(model, answer, answer.inputs)[0], answer.answer_text.ids
    expected = sum(odds(rows[at, None], ids[at]) for at in range(len(ids) - len("grün".encode()), len(ids)))
    torch.testing.assert_close(explanation.scores, expected, rtol=1e-4, atol=1e-4)


def test_shares_are_the_gradient_times_the_embeddings() -> None:
    model, _, answer = answered("llava")
    explanation = saliency.InputXGradient(model).attribute(answer, saliency.words("red"))
    language: Any = model
    arguments = answer.arguments(answer.inputs, 0)
    ids, pixels = arguments.pop("input_ids"), arguments.pop("pixel_values")
    embeddings = language.get_input_embeddings()(ids)
    features = torch.cat(language.get_image_features(pixels).pooler_output)
    embeddings = embeddings.masked_scatter(answer.is_image[None, :, None], features).detach().requires_grad_()
    score = odds(model(inputs_embeds=embeddings, **arguments).logits[:, 1], answer.answer_text.ids[1])
    (gradient,) = torch.autograd.grad(score.sum(), embeddings)
    assert explanation.token_shares is not None
    assert error(explanation.token_shares, (gradient * embeddings).sum(-1)) < 1e-4


@pytest.mark.filterwarnings("default")
def test_an_answer_from_the_text_warns() -> None:
    model, processor = build("llava")
    answer = saliency.generate(model, processor, scene(), QUESTION, answer="a red car")
    with torch.no_grad():
        model.get_parameter("model.multi_modal_projector.linear_2.weight").mul_(1e-4)
    with pytest.warns(saliency.errors.SaliencyWarning, match="the image has only .* of the relevance of all tokens"):
        explanation = saliency.InputXGradient(model).attribute(answer, saliency.words("red"))
    assert "from the text" in explanation.notes[0]


@pytest.mark.parametrize("family", ["llava", "llava_next", "qwen2_vl", "internvl", "idefics3"])
def test_each_of_several_images_has_a_map(family: str) -> None:
    model, processor, _ = answered(family)
    images = [scene(1), scene(2, (80, 120))]
    answer = saliency.generate(model, processor, images, QUESTION, answer="a red car")
    assert [len(answer.inputs), len(answer.frames)] == [2, 2]
    assert {tokens.image for tokens in answer.image_tokens} == {0, 1}
    explanation = saliency.VanillaGradient(model).attribute(answer, saliency.words("red"))
    torch.testing.assert_close(explanation.scores[0], explanation.scores[1])
    forward: Any = answer.arguments
    for number in (0, 1):
        x = answer.inputs[number, None].clone().requires_grad_()
        rows = model(**forward(x, number)).logits[:, 1]
        (expected,) = torch.autograd.grad(odds(rows, answer.answer_text.ids[1]).sum(), x)
        assert error(explanation.values[number, None], expected) < 1e-4
        assert saliency.overlay(explanation[number]).size == images[number].size
        assert expected.abs().sum() > 0


@pytest.mark.parametrize("family", ["llava", "llava_next", "qwen2_5_vl", "internvl", "idefics3"])
def test_each_of_several_images_has_its_ledger_and_its_attention(family: str) -> None:
    model, processor, _ = answered(family)
    answer = saliency.generate(model, processor, [scene(1), scene(2, (80, 120))], QUESTION, answer="a red car")
    relevance = saliency.AttnLRP(model).attribute(answer, [saliency.words("red"), saliency.words("car")])
    assert relevance.target_names == ("red", "car")
    assert relevance.residual is not None
    assert float(relevance.residual.abs().max()) < 1e-5
    attention = saliency.CheferAttention(model).attribute(answer, saliency.words("red"))
    assert attention.values.flatten(1).any(1).all()
    both = saliency.Together(saliency.CheferAttention(model), saliency.VanillaGradient(model)).attribute(answer)
    assert [len(explanation) for explanation in both] == [2, 2]
    layers = saliency.attention(model, answer)
    maps = layers[-1].maps(answer.output_positions[1])
    assert maps.shape[0] == 2
    if not layers[0].layer.startswith(str(answer.reader)):  # the rows of the images in the vision model are not known
        with pytest.raises(LayerError, match="not one for each patch"):
            layers[0].maps()
    assert not torch.equal(maps[0], maps[1])


def test_images_without_standard_errors_have_none_together() -> None:
    model, x = PooledNet().eval(), torch.randn(1, 3, 16, 16)
    many, single = (saliency.SmoothGrad(model, passes=passes).attribute(x, 0) for passes in (4, 1))
    assert many.error is not None
    together = joined([many, single])
    assert (len(together), together.error) == (2, None)


def test_each_of_several_images_may_have_a_baseline_and_a_layer() -> None:
    model, processor, _ = answered("llava")
    answer = saliency.generate(model, processor, [scene(1), scene(2)], QUESTION, answer="a red car")
    methods: list[Callable[[Any], saliency.Attribution]] = [
        lambda colour: saliency.DeepLIFT(model, baseline=colour),
        lambda colour: saliency.Occlusion(model, window=14, stride=14, fill=colour),
    ]
    for method in methods:
        one, other = (method(colour).attribute(answer).values for colour in (0.0, 1.0))
        both = method(saliency.PerImage([0.0, 1.0])).attribute(answer).values
        torch.testing.assert_close(both, torch.stack([one[0], other[1]]))
    cells = saliency.GradCAM(model).attribute(answer, saliency.words("red")).values
    assert cells.shape == (2, 1, 4, 4)
    assert not torch.equal(cells[0], cells[1])


def test_a_chat_of_several_turns_is_continued() -> None:
    model, processor, _ = answered("llava")
    image = {"type": "image"}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": [image, {"type": "text", "text": "what is left"}]},
        {"role": "assistant", "content": "a red circle"},
        {"role": "user", "content": [{"type": "text", "text": "what is right"}, image]},
    ]
    answer = saliency.generate(model, processor, [scene(1), scene(2)], turns, answer="a square")
    assert "assistant a red circle user what is right" in answer.prompt
    assert [tokens.positions.flatten()[0].item() for tokens in answer.image_tokens] == [1, 28]
    assert saliency.InputXGradient(model).attribute(answer).target_names == ("a square",) * 2


class _Plain(nn.Module):
    """A model without `generate`, which reads each image in two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.see = nn.Linear(3 * 8 * 4, 8)
        self.read = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 12)

    def forward(self, input_ids: Tensor, pixel_values: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        halves = self.see(pixel_values.flatten(2))  # (N, 2, 8)
        x = self.embed(input_ids).masked_scatter((input_ids == 1)[..., None], halves)
        return {"logits": self.head(self.read(x).cumsum(1))}


class _Processor:
    """Its processor: the left and the right half of an image, mirrored."""

    image_token_id, eos_token_id, image_token = 1, 2, "<image>"

    def __call__(self, images: list[Image.Image], text: list[str], return_tensors: str) -> dict[str, Tensor]:
        arrays = [np.asarray(image.resize((8, 8))).transpose(2, 0, 1) / 255 for image in images]
        halves = torch.tensor(np.stack(arrays), dtype=torch.float32).reshape(len(images), 3, 8, 2, 4)
        ids = torch.tensor([[1, 1, *map(int, text[0].split())]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": halves.movedim(3, 1).flip(-1)}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def _halves(image: Image.Image) -> saliency.Canvas:
    canvas = _Processor()([image], ["3"], "pt")["pixel_values"][0].flip(-1).movedim(0, 2).reshape(3, 8, 8)
    return saliency.Canvas(
        canvas, (0, 0, *image.size), lambda x: x.reshape(-1, 3, 8, 2, 4).movedim(3, 1).flip(-1).flatten(1, 1)
    )


def test_a_model_of_ones_own_is_decoded_by_plain_forwards() -> None:
    torch.manual_seed(0)
    model = _Plain()
    with pytest.raises(
        saliency.errors.ImageError, match=r"how _Processor divides an image is not recog.*; pass canvas="
    ):
        saliency.generate(model, _Processor(), scene(), "3 4")
    answer = saliency.generate(model, _Processor(), scene(), "3 4", max_new_tokens=3, canvas=_halves)
    ids = torch.tensor([[1, 1, 3, 4]])
    for token in answer.answer_text.ids:
        pixels = _Processor()([scene()], ["3"], "pt")["pixel_values"]
        assert int(model(ids, pixels, torch.ones_like(ids))["logits"][0, -1].argmax()) == token
        ids = torch.cat([ids, torch.tensor([[token]])], 1)
    explanation = saliency.AttnLRP(model).attribute(answer, saliency.words(at=0))
    assert explanation.values.shape == (1, 3, 8, 8)
    assert explanation.residual is not None
    assert float(explanation.residual.abs()) < 1e-4


def test_a_wrong_canvas_is_refused() -> None:
    model, processor, _ = answered("llava")
    canvas = saliency.Canvas(torch.zeros(3, 28, 28), (0, 0, 1, 1), lambda x: x[:, None])
    with pytest.raises(
        saliency.errors.ImageError, match="canvas of image 0 does not give the processor's pixel values"
    ):
        saliency.generate(model, processor, scene(), QUESTION, answer="a", canvas=lambda image: canvas)


@pytest.mark.parametrize("lefts", [(0, 80), (0, 50, 150), (0, 160)])
def test_tiles_that_are_not_the_rows_of_a_grid_are_refused(lefts: tuple[int, ...]) -> None:
    image = scene(size=(lefts[-1] + 100, 90))

    def encode(own: Image.Image) -> dict[str, Tensor]:
        tiles = [own.crop((left, 0, left + 100, 90)).resize((28, 28)) for left in lefts]
        arrays = [np.asarray(tile, dtype=np.float32).transpose(2, 0, 1) for tile in tiles]
        return {"pixel_values": torch.tensor(np.stack(arrays))}

    with pytest.raises(saliency.errors.ImageError, match=f"{len(lefts)} tiles of an image are not the rows of a grid"):
        find_canvas(encode, image, None)


def test_an_answer_belongs_to_its_model() -> None:
    _, _, answer = answered("llava")
    other, _ = build("llava")
    with pytest.raises(saliency.errors.ModelError, match="from another model than the method's"):
        saliency.VanillaGradient(other).attribute(answer)


def test_a_prompt_without_an_image_is_refused() -> None:
    model, processor, _ = answered("llava")
    processor = type(processor)(processor.image_processor, processor.tokenizer, patch_size=7)
    with pytest.raises(saliency.errors.ModelError, match="<image>"):
        saliency.generate(model, processor, scene(), "what color is the car", answer="red")
    with pytest.raises(saliency.errors.ModelError, match="no chat template"):
        saliency.generate(model, processor, scene(), [{"role": "user", "content": "what"}], answer="red")


def test_an_empty_answer_is_refused() -> None:
    model, processor, _ = answered("llava")
    with pytest.raises(saliency.errors.ModelError, match="the answer is empty"):
        saliency.generate(model, processor, scene(), QUESTION, answer="")


def test_the_model_is_left_as_found() -> None:
    model, processor = build("llava")
    saliency.generate(model, processor, scene(), QUESTION, answer="red")  # the first forward of transformers adds hooks
    model.train()
    before = Snapshot(model=model)
    answer = saliency.generate(model, processor, scene(), QUESTION, max_new_tokens=2)
    saliency.AttnLRP(model).attribute(answer)
    assert not before.changes()


def test_shares_are_saved(tmp_path: Path) -> None:
    model, _, answer = answered("llava")
    explanation = saliency.InputXGradient(model).attribute(answer, saliency.words("red"))
    loaded = saliency.Explanation.load(explanation.save(tmp_path / "red.safetensors"))
    assert loaded.tokens == explanation.tokens
    assert loaded.token_shares is not None
    assert explanation.token_shares is not None
    assert torch.equal(loaded.token_shares, explanation.token_shares)
    assert not math.isnan(float(loaded.image_share))  # type: ignore[arg-type]


def test_features_of_an_image_hide_no_relu() -> None:
    model, _, answer = answered("llava")
    with pytest.raises(saliency.errors.NotApplicableError, match="no ReLU was called") as caught:
        saliency.GuidedBackprop(model).attribute(answer, saliency.words("red"))
    assert "masked_scatter" not in str(caught.value)


@pytest.mark.parametrize("family", ["llava_next", "qwen2_5_vl", "blip_2"])
def test_maps_in_bfloat16_are_those_in_float32(family: str) -> None:
    (half, processor), (model, _) = build(family), build(family)
    model.load_state_dict({name: own.to(torch.float32) for name, own in half.bfloat16().state_dict().items()})
    answers = [saliency.generate(own, processor, scene(), QUESTION, answer="a red car") for own in (half, model)]
    for method in (saliency.VanillaGradient, saliency.AttnLRP, saliency.CheferAttention):
        maps = [method(own.model).attribute(own, saliency.words("red")).values.float() for own in answers]
        assert float(torch.corrcoef(torch.stack(maps).flatten(1))[0, 1]) > 0.99, method


def test_views_are_resized_in_half_precision() -> None:
    model, processor = build("internvl")
    expected = saliency.generate(model, processor, scene(), QUESTION, answer="a red car")
    answer = saliency.generate(model.bfloat16(), processor, scene(), QUESTION, answer="a red car")
    assert answer.inputs.dtype == torch.bfloat16
    pixels = [own.arguments(own.inputs, 0)["pixel_values"] for own in (answer, expected)]
    torch.testing.assert_close(pixels[0].float(), pixels[1], rtol=0, atol=0.02)
    saliency.AttnLRP(model).attribute(answer, saliency.words("red"))


def test_images_that_the_prompt_does_not_show_are_refused() -> None:
    model, processor, _ = answered("blip_2")
    with pytest.raises(
        saliency.errors.ModelError, match="the tokens of image 0 are not in the prompt, or have no position"
    ):
        saliency.generate(model, processor, [scene(1), scene(2)], QUESTION, answer="red")
    model, processor = saliency.load("shapes_caption"), saliency.testbed.CaptionProcessor()
    scenes = saliency.testbed.draw_scenes(2, seed=0, task="two_objects")
    with pytest.raises(saliency.errors.ModelError, match="the tokens of image 1 are not in the prompt"):
        saliency.generate(model, processor, list(scenes.images), "caption")


OF_IMAGES = (saliency.contrast(1, 2), saliency.probability("red"), saliency.box(index=0), saliency.similarity(scene()))


@pytest.mark.parametrize("target", [3, "red", *OF_IMAGES])
def test_classes_of_an_answer_are_refused(target: Any) -> None:
    model, _, answer = answered("llava")
    with pytest.raises(saliency.errors.TargetError, match="an answer has words and no classes"):
        saliency.VanillaGradient(model).attribute(answer, target)


def test_pairs_and_programs_refuse_an_answer_in_words(tmp_path: Path) -> None:
    model, _, answer = answered("llava")
    api, method = cast("Any", saliency), saliency.VanillaGradient(model)
    for call in (api.pair, api.matches):
        with pytest.raises(saliency.errors.MethodError, match="a pair is of two images, got an answer"):
            call(method, answer, answer)
    with pytest.raises(saliency.errors.MethodError, match="the example is an answer"):
        api.export(method, tmp_path / "a.pt2", answer)


def test_metrics_change_the_image_of_an_answer() -> None:
    model, processor, answer = answered("llava")
    red, steps, method = saliency.words("red"), 4, saliency.InputXGradient(model)
    explanation = method.attribute(answer, red)
    options: dict[str, Any] = {"inputs": answer, "target": red, "controls": False}
    metric = saliency.metrics.Deletion(steps=steps, fill=0.0)
    (measured,) = saliency.metrics.measure(metric, explanation, model=model, **options)
    order = explanation.values.sum(1).flatten().argsort(descending=True, stable=True)
    scores = []
    for step in range(steps + 1):
        x = answer.inputs.clone()
        x.flatten(2)[:, :, order[: step * len(order) // steps]] = 0
        with torch.no_grad():
            scores.append(float(odds(logits(model, answer, x)[:, 1], answer.answer_text.ids[1])))
    assert measured.curve is not None
    assert measured.curve[0].tolist() == pytest.approx(scores, abs=1e-4)
    several = saliency.generate(model, processor, [scene(1), scene(2)], QUESTION, answer="a red car")
    explanation, options["inputs"] = method.attribute(several, red), several
    names = ["deletion", "insertion", "mprt"]
    assert [m.values.shape for m in saliency.metrics.measure(names, explanation, method=method, **options)] == [
        (2,)
    ] * 3
    with pytest.raises(saliency.errors.MethodError, match="answers about one image"):
        saliency.metrics.measure("adcc", explanation, method=method, **options)
    with pytest.raises(saliency.errors.MethodError, match="does not keep it: pass it as inputs="):
        saliency.metrics.measure("deletion", explanation, method=method, target=red)


def test_a_word_has_a_trust_card() -> None:
    model, _, answer = answered("llava")
    card = saliency.trust(saliency.InputXGradient(model), answer, saliency.words("red"))
    assert {"weights", "deletion", "insertion", "rank_correlation"} <= set(card.measurements)
    assert card["class"].verdict.endswith("joints or words, and the image has 2")
    assert card.title == "Trust card of input_x_gradient for red"


def test_an_image_without_a_prompt_is_refused() -> None:
    model, _, answer = answered("llava")
    with pytest.raises(saliency.errors.ModelError, match=r"pass an answer of saliency\.generate"):
        saliency.AttnLRP(model).attribute(answer.inputs, saliency.words(at=0))


def test_decoding_is_greedy_whatever_the_model_prefers() -> None:
    model: Any
    model, processor = build("llava")
    expected = saliency.generate(model, processor, scene(), QUESTION, max_new_tokens=3)
    for name, value in {"num_beams": 3, "do_sample": True, "return_dict_in_generate": True}.items():
        setattr(model.generation_config, name, value)
    assert saliency.generate(model, processor, scene(), QUESTION, max_new_tokens=3).tokens == expected.tokens


def test_wrong_arguments_are_refused() -> None:
    model, processor, _ = answered("llava")
    for prompts in ([QUESTION, QUESTION], [], {"input_ids": [1]}):
        with pytest.raises(saliency.errors.MethodError, match="expected one question, or the messages of one chat"):
            saliency.generate(model, processor, scene(), prompts)  # type: ignore[arg-type]
    with pytest.raises(saliency.errors.ImageError, match="there is no image"):
        saliency.generate(model, processor, [], QUESTION)
    with pytest.raises(saliency.errors.MethodError, match="max_new_tokens=0"):
        saliency.generate(model, processor, scene(), QUESTION, max_new_tokens=0)
