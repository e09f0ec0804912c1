"""Importance of the tokens of a text, on small models of open_clip and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saliency
from saliency import text, token_importance
from saliency.errors import ImageError, MethodError, ModelError
from saliency.methods.gradient import VanillaGradient
from saliency.methods.pairs import TEXT_METHODS, TextExplanation
from saliency.testing import Snapshot
from tests.dual_encoders import MODELS
from tests.models import PooledNet

BY_NAME = pytest.mark.parametrize("name", MODELS)
PROMPT = "a red cat"


def table_of(model: Any) -> torch.nn.Embedding:
    """The embeddings of the tokens, by their name in the libraries."""
    names = [name for name, _ in model.named_modules() if name.endswith("token_embedding")]
    table: torch.nn.Embedding = model.get_submodule(names[0])
    return table


def score_without_tokens(model: Any, image: Tensor, scale: float) -> float:
    """The similarity when all token embeddings are multiplied with a number."""
    handle = table_of(model).register_forward_hook(lambda module, inputs, output: output * scale)
    with handle, torch.no_grad():
        texts = model.encode_tokens(model.tokenize(PROMPT))
        return float(F.cosine_similarity(model(image[None])["image_embeds"], texts))


@BY_NAME
@pytest.mark.parametrize("method", TEXT_METHODS)
def test_each_method_gives_a_value_per_token_and_the_score_of_the_text(name: str, method: str) -> None:
    model, x = MODELS[name]()
    found = token_importance(model, x[0], PROMPT, method)
    padding = ("<pad>",) if name == "transformers SigLIP" else ()
    assert found.tokens == ("<start>", "a", "red", "cat", "<end>", *padding)
    assert found.values.shape == (len(found.tokens),)
    assert found.score == pytest.approx(float(VanillaGradient(model).attribute(x[0], text(PROMPT)).scores), abs=1e-6)
    assert found.method == method


@BY_NAME
@pytest.mark.parametrize("method", ["integrated_gradients", "deep_lift"])
def test_complete_methods_sum_to_the_change_of_the_score_from_embeddings_of_zero(name: str, method: str) -> None:
    model, x = MODELS[name]()
    found = token_importance(model, x[0], PROMPT, method)
    change = score_without_tokens(model, x[0], 1) - score_without_tokens(model, x[0], 0)
    assert float(found.values.sum()) == pytest.approx(change, abs=1e-4)


@BY_NAME
def test_input_x_gradient_is_the_slope_of_the_score_in_the_embeddings(name: str) -> None:
    model, x = MODELS[name]()
    found = token_importance(model.double(), x[0].double(), PROMPT, "input_x_gradient")
    model.float()
    step = 1e-2
    slope = score_without_tokens(model, x[0], 1 + step) - score_without_tokens(model, x[0], 1 - step)
    assert float(found.values.sum()) == pytest.approx(slope / (2 * step), abs=1e-3)


@pytest.mark.parametrize("method", ["integrated_gradients", "deep_lift"])
def test_on_drawn_shapes_the_name_of_the_shape_matters_more_than_the_article(method: str) -> None:
    scenes = saliency.testbed.draw_scenes(12, seed=1_000_000)
    model = saliency.load("shapes_two_tower")
    values: dict[int, list[float]] = {1: [], 3: []}
    for image, captions in zip(scenes.images, scenes.captions(), strict=True):
        found = token_importance(model, image, captions[0], method)
        assert found.tokens == ("<start>", *captions[0].split(), "<end>")
        for place, own in values.items():
            own.append(float(found.values[place]))
    difference = torch.tensor(values[3]) - torch.tensor(values[1])
    assert difference.mean() > 2 * difference.std() / len(difference) ** 0.5


def test_the_model_is_unchanged_also_after_an_error() -> None:
    model, x = MODELS["open_clip ViT"]()
    before = Snapshot(model=model, x=x)
    token_importance(model, x[0], PROMPT, steps=2)
    with pytest.raises(MethodError, match="steps"):
        token_importance(model, x[0], PROMPT, steps=0)
    assert not before.changes()


def test_a_wrapped_model_is_explained_as_the_model_inside() -> None:
    model, x = MODELS["open_clip ViT"]()
    found, wanted = (token_importance(each, x[0], PROMPT, steps=2) for each in (nn.DataParallel(model), model))
    torch.testing.assert_close(found.values, wanted.values)


def test_a_result_is_lines_and_coloured_words(tmp_path: Path) -> None:
    found = TextExplanation("a <b>", ("a", "<b>"), torch.tensor([0.5, -0.25]), 0.3, "attn_lrp")
    assert str(found) == "  +0.5000  a\n  -0.2500  <b>"
    page = found.save(tmp_path / "words.html").read_text("utf-8")
    assert page == found._repr_html_()
    assert "&lt;b&gt;" in page
    assert [share in page for share in ("hsla(0, 80%, 50%, 1.00)", "hsla(210, 80%, 50%, 0.50)")] == [True, True]


def test_what_cannot_be_explained_is_refused() -> None:
    model, x = MODELS["open_clip ViT"]()
    with pytest.raises(ModelError, match="PooledNet has no text encoder"):
        token_importance(PooledNet(), x[0], PROMPT)
    with pytest.raises(MethodError, match="'rise' is not one of 'integrated_gradients'"):
        token_importance(model, x[0], PROMPT, "rise")
    with pytest.raises(ImageError, match="one image, got 2"):
        token_importance(model, torch.cat([x[:1], x[:1]]), PROMPT)


@pytest.mark.parametrize("given", [3, ["a cat"], None])
def test_what_is_not_one_text_is_an_error(given: Any) -> None:
    model, x = next(iter(MODELS.values()))()
    with pytest.raises(MethodError, match="expected one text"):
        token_importance(model, x[0], given)
