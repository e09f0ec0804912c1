"""Late interaction: the score of a text, of one of its words, and the matrix of words and patches."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import saliency
from saliency import LateInteraction
from saliency.errors import LayerError, ModelError, TargetError
from tests.dual_encoders import tokenizer
from tests.models import PooledNet


@cache
def colpali() -> LateInteraction:
    """ColPali with random weights: 4 x 4 patches, and a text of few words."""
    transformers: Any = pytest.importorskip("transformers")
    own = tokenizer("<pad>")
    images = transformers.SiglipImageProcessor(size={"height": 32, "width": 32})
    images.image_seq_length = 16
    processor = transformers.ColPaliProcessor(images, own)
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.PaliGemmaConfig(
        vision_config={"model_type": "siglip_vision_model", **tower, "image_size": 32, "patch_size": 8},
        text_config={"model_type": "gemma", **tower, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": len(own)},
        image_token_index=processor.image_token_id,
        projection_dim=16,
    )
    torch.manual_seed(0)
    model = transformers.ColPaliForRetrieval(transformers.ColPaliConfig(vlm_config=config, embedding_dim=8))
    return LateInteraction(model.eval().double(), processor)


def test_the_score_and_its_gradient_are_the_closed_form() -> None:
    model, x = colpali(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    words = model.encode_text(["a red bus"])
    leaf = x.clone().requires_grad_()
    matrix = torch.einsum("ntd,kd->nkt", model(leaf)["image_embeds"], words)
    for word, wanted in ((None, matrix.amax(2).sum(1)), (3, matrix[:, 3].amax(1))):
        found = saliency.VanillaGradient(model).attribute(x, saliency.max_sim("a red bus", word))
        torch.testing.assert_close(found.scores, wanted.detach())
        (gradient,) = torch.autograd.grad(wanted.sum(), leaf, retain_graph=True)
        torch.testing.assert_close(found.values, gradient)
    processor: Any = model.processor
    (scores,) = processor.score_retrieval(words[None], model(x)["image_embeds"].detach(), output_dtype=torch.float64)
    torch.testing.assert_close(scores, matrix.amax(2).sum(1).detach())


def test_the_map_of_a_word_is_its_similarity_to_each_patch() -> None:
    model, x = colpali(), torch.randn(1, 3, 32, 32, dtype=torch.float64)
    found = saliency.word_similarity(model, x, "a red bus")
    words, tokens = model.encode_text(["a red bus"]), model(x)["image_embeds"].detach()[0]
    assert found.target_names == model.words("a red bus")
    assert " a red bus " in " ".join(found.target_names)
    matrix = words @ tokens.T
    torch.testing.assert_close(found.values[:, 0].flatten(1), matrix[:, :16])
    torch.testing.assert_close(found.scores, matrix.amax(1))


def test_tokens_that_are_not_patches_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = colpali()
    known = LateInteraction.forward
    monkeypatch.setattr(
        LateInteraction, "forward", lambda self, x: {"image_embeds": known(self, x)["image_embeds"][:, 3:]}
    )
    with pytest.raises(LayerError, match="tokens of ColPaliForRetrieval are not one for each patch of the image"):
        saliency.word_similarity(model, torch.randn(1, 3, 32, 32, dtype=torch.float64), "a red bus")


def test_methods_of_several_kinds_explain_a_batch_with_a_text_each() -> None:
    model, x = colpali(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    targets = [saliency.max_sim("a red bus"), saliency.max_sim("a dog", 4)]
    for method in (saliency.AttnLRP(model), saliency.InputXGradient(model), saliency.Occlusion(model, window=16)):
        both = method.attribute(x, targets)
        assert both.target_names == ("a red bus", "word 4 of a dog")
        assert both.values.flatten(1).any(1).all()
        torch.testing.assert_close(method.attribute(x[1:], targets[1]).values, both[1].values)


def test_words_and_models_that_do_not_fit_are_refused() -> None:
    model, x = colpali(), torch.randn(1, 3, 32, 32, dtype=torch.float64)
    with pytest.raises(TargetError, match=r"word 99 is outside 0\.\.\d+"):
        saliency.VanillaGradient(model).attribute(x, saliency.max_sim("a red bus", 99))
    with pytest.raises(ModelError, match="no embedding per word"):
        saliency.word_similarity(PooledNet(), x, "a red bus")
    with pytest.raises(ModelError, match="one embedding per text"):
        saliency.token_importance(model, x, "a red bus")
