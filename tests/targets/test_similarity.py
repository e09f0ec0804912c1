"""Texts, reference images and embeddings as targets, on small models of open_clip and transformers."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import saliency
from saliency import DualEncoder, GradCAM, VanillaGradient, similarity, text
from saliency.errors import ModelError, SaliencyWarning, TargetError
from saliency.evaluation.metrics.base import Subject
from saliency.inspection import gradient_statistics
from saliency.testing import Snapshot
from tests.dual_encoders import MODELS, TOWER, config, tokenizer
from tests.models import Packed, PooledNet
from tests.selection import of_each_family

BY_NAME = pytest.mark.parametrize("name", MODELS)
OTHERS = ["a photo of a dog", "a bus"]


@pytest.fixture
def clip() -> tuple[Any, Tensor]:
    return MODELS["open_clip ViT"]()


def cosines(model: Any, x: Tensor, prompts: list[str]) -> Tensor:
    """The cosine similarities (N, K) of images and prompts, without the toolkit's targets."""
    with torch.no_grad():
        images = model(x)["image_embeds"]
        texts = torch.cat([model.encode_tokens(model.tokenize(prompt)) for prompt in prompts])
    return F.cosine_similarity(images[:, None], texts[None], dim=-1)


# Texts.


@BY_NAME
def test_the_score_of_a_text_is_the_cosine_similarity(name: str) -> None:
    model, x = MODELS[name]()
    found = GradCAM(model).attribute(x, text("a red cat"))
    torch.testing.assert_close(found.scores, cosines(model, x, ["a red cat"])[:, 0])
    assert found.target_names == ("a red cat",) * 2
    assert found.probabilities is None


class OwnTowers(nn.Module):
    """Towers whose arguments have other names, without a scale of logits."""

    def __init__(self, towers: Any) -> None:
        super().__init__()
        self.towers = towers

    def encode_image(self, pictures: Tensor) -> Tensor:
        return self.towers.encode_image(pictures)  # type: ignore[no-any-return]

    def encode_text(self, words: Tensor) -> Tensor:
        return self.towers.encode_text(words)  # type: ignore[no-any-return]


def test_towers_of_the_users_own_need_a_scale_for_log_odds_only(clip: tuple[Any, Tensor]) -> None:
    model, x = clip
    own = DualEncoder(OwnTowers(model.model), model.tokenizer)
    found, wanted = (VanillaGradient(each).attribute(x, text("a red cat")) for each in (own, model))
    torch.testing.assert_close(found.scores, wanted.scores)
    with pytest.raises(ModelError, match="OwnTowers has no logit_scale"):
        VanillaGradient(own).attribute(x, text("a red cat", against=OTHERS))


@BY_NAME
@pytest.mark.parametrize("others", [OTHERS[:1], OTHERS])
def test_against_others_the_score_is_the_log_odds_of_the_softmax(name: str, others: list[str]) -> None:
    model, x = MODELS[name]()
    found = VanillaGradient(model).attribute(x, text("a red cat", against=others))
    scale = model.get_parameter("model.logit_scale").detach().exp()
    expected = (scale * cosines(model, x, ["a red cat", *others])).softmax(1)[:, 0]
    torch.testing.assert_close(found.scores.sigmoid(), expected)
    torch.testing.assert_close(found.probabilities, expected)
    assert found.target_names[0] == f"a red cat rather than {' or '.join(others)}"


def test_two_texts_are_the_contrast_of_their_logits(clip: tuple[Any, Tensor]) -> None:
    model, x = clip
    found = VanillaGradient(model).attribute(x, text("a cat", against="a dog"))
    parts = [VanillaGradient(model).attribute(x, text(prompt)) for prompt in ("a cat", "a dog")]
    difference = model.logit_scale * (parts[0].values - parts[1].values)
    torch.testing.assert_close(found.values, difference)


def test_many_others_are_counted_in_the_name(clip: tuple[Any, Tensor]) -> None:
    model, x = clip
    found = GradCAM(model).attribute(x[0], text("a cat", against=["a dog", "a bus", "a photo", "red"]))
    assert found.target_names == ("a cat rather than 4 other texts",)
    assert found.contrasts == (True,)


@BY_NAME
def test_a_list_of_texts_is_their_mean_direction(name: str) -> None:
    model: Any
    model, x = MODELS[name]()
    dogs = ["a photo of a dog", "a dog"]
    found = GradCAM(model).attribute(x, text(["a photo of a cat", "a cat"], against=[dogs, "a bus"]))
    encoded = {one: model.encode_tokens(model.tokenize(one)) for one in ("a photo of a cat", "a cat", *dogs, "a bus")}
    cat, dog, bus = (
        F.normalize(torch.stack([F.normalize(encoded[one]) for one in several]).sum(0))
        for several in (["a photo of a cat", "a cat"], dogs, ["a bus"])
    )
    logits = model.logit_scale * F.normalize(model(x)["image_embeds"]) @ torch.cat([cat, dog, bus]).mT
    torch.testing.assert_close(found.probabilities, logits.softmax(1)[:, 0].detach(), atol=1e-5, rtol=1e-4)
    names = "a photo of a cat (mean of 2 texts) rather than a photo of a dog (mean of 2 texts) or a bus"
    assert found.target_names[0] == names


@BY_NAME
def test_a_prompt_is_encoded_once_until_the_weights_change(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = copy.deepcopy(MODELS[name]()[0])
    _, x = MODELS[name]()
    spy = Mock(wraps=model.tokenize)
    monkeypatch.setattr(model, "tokenize", spy)
    GradCAM(model).attribute(x, text("a cat", against="a dog"))
    before = GradCAM(model).attribute(x, text("a dog"))
    assert spy.call_count == 2
    with torch.no_grad():
        next(tensor for name, tensor in model.named_parameters() if "token_embedding" in name).mul_(2)
    after = GradCAM(model).attribute(x, text("a dog"))
    assert spy.call_count == 3
    assert not torch.equal(before.scores, after.scores)


@BY_NAME
def test_a_text_that_is_too_long_warns_with_the_number_of_tokens_that_are_cut(name: str) -> None:
    model, x = copy.deepcopy(MODELS[name]())
    fits, too_long = "a photo of a red bus", "a photo of a red bus a cat a"  # six words, a start and an end
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = GradCAM(model).attribute(x, text(fits)).scores
    with pytest.warns(SaliencyWarning, match='ignores the last 3 tokens of the text "a photo of a red bus a cat a"'):
        cut = GradCAM(model).attribute(x, text(too_long)).scores
    torch.testing.assert_close(cut, scores)
    with pytest.warns(SaliencyWarning, match="ignores the last 1 token of"):
        saliency.token_importance(model, x[:1], f"{fits} dog", "input_x_gradient")
    with pytest.warns(SaliencyWarning, match="ignores the last") as caught:
        GradCAM(model).attribute(x, text([fits, f"{fits} a", f"{fits} dog cat"], against=["a dog", [f"{fits} cat"]]))
    assert [str(warning.message).split('"')[1] for warning in caught] == [
        f"{fits} {end}" for end in ("a", "dog cat", "cat")
    ]


@BY_NAME
def test_the_text_tower_gets_no_gradient_and_keeps_its_state(name: str) -> None:
    model, x = MODELS[name]()
    model.train()
    with torch.inference_mode():
        first = VanillaGradient(model).attribute(x, text("a photo", against=OTHERS))
    assert all(module.training for module in model.modules())
    second = VanillaGradient(model.eval()).attribute(x, text("a photo", against=OTHERS))
    assert torch.equal(first.values, second.values)
    assert all(parameter.grad is None for parameter in model.parameters())


@BY_NAME
def test_each_image_of_a_batch_may_have_its_own_text(name: str) -> None:
    model, x = MODELS[name]()
    targets = [text("a cat"), text("a dog", against="a bus")]
    both = GradCAM(model).attribute(x, targets)
    for image, target in enumerate(targets):
        one = GradCAM(model).attribute(x[image], target)
        torch.testing.assert_close(both[image].values, one.values, rtol=1e-4, atol=1e-6)
        assert both.target_names[image] == one.target_names[0]
    assert both.probabilities is None
    contrasts = [text("a cat", against="a dog"), text("a dog", against="a cat")]
    found = GradCAM(model).attribute(x, contrasts)
    torch.testing.assert_close(found.probabilities, found.scores.sigmoid())


NEED_CLASSES = {"cam", "finer_cam"}
NEED_ONE_SIGN = {"chefer_lrp"}
NEED_RELU = {"guided_backprop", "deconvnet", "rectgrad", "guided_grad_cam"}


@pytest.mark.filterwarnings("ignore::saliency.errors.SaliencyWarning")
@pytest.mark.parametrize("method", of_each_family())
@pytest.mark.parametrize("name", ["open_clip ResNet", "transformers CLIP"])
def test_every_method_explains_a_text_and_a_reference(name: str, method: str) -> None:
    model, x = MODELS[name]()
    cls = saliency.METHODS[method]
    options = {**cls.preview_options, **({"progress": False} if "progress" in cls.options() else {})}
    refused = NEED_CLASSES | NEED_ONE_SIGN | (NEED_RELU if name == "transformers CLIP" else set())
    if cls.needs.attention and name == "open_clip ResNet":
        pytest.skip("the image has a single patch there")
    targets: dict[str, Any] = {
        f"a cat rather than {OTHERS[0]} or {OTHERS[1]}": text("a cat", against=OTHERS),
        "similarity to a reference": similarity(x[1], measure="distance"),
    }
    for label, target in targets.items():
        if method in refused:
            with pytest.raises(saliency.errors.NotApplicableError):
                cls(model, **options).attribute(x[0], target)
        else:
            found = cls(model, **options).attribute(x[0], target)
            assert (found.target, found.target_names) == ((None,), (label,))
            assert cls.sign != "signed" or found.values.abs().sum() > 0


@BY_NAME
def test_relevance_and_its_ledger_sum_to_the_log_odds(name: str) -> None:
    model, x = MODELS[name]()
    found = saliency.AttnLRP(model).attribute(x[0], text("a cat", against=OTHERS))
    assert found.ledger is not None
    torch.testing.assert_close(found.ledger.sum(1), found.scores)


def test_several_methods_share_a_forward_for_a_text(clip: tuple[Any, Tensor]) -> None:
    model, x = clip
    methods = [GradCAM(model), VanillaGradient(model)]
    for method, found in zip(methods, saliency.Together(*methods).attribute(x, text("a cat")), strict=True):
        torch.testing.assert_close(found.values, method.attribute(x, text("a cat")).values)


@BY_NAME
def test_nothing_is_changed_also_after_an_error(name: str) -> None:
    model, x = MODELS[name]()
    before = Snapshot(model=model, x=x)
    GradCAM(model).attribute(x, [text("a cat", against=OTHERS), similarity(x[1], measure="distance")])
    with pytest.raises(TargetError):
        GradCAM(model).attribute(x, [text("a cat"), similarity(torch.ones(3))])
    assert not before.changes()


@BY_NAME
def test_targets_and_models_are_pickled(name: str) -> None:
    model, x = MODELS[name]()
    target = text("a cat", against="a dog")
    other: Any = pickle.loads(pickle.dumps(model))
    found = GradCAM(other).attribute(x, pickle.loads(pickle.dumps(target)))
    assert torch.equal(found.values, GradCAM(model).attribute(x, target).values)


# Models of Hugging Face.


def processor(**options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    crop = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    return transformers.CLIPProcessor(transformers.CLIPImageProcessor(**crop), tokenizer())


def test_a_processor_gives_the_tokenizer_and_the_preprocessing() -> None:
    both, photo = processor(), Image.new("RGB", (40, 40), "red")
    network = pytest.importorskip("transformers").CLIPModel(config())
    model: Any = DualEncoder(network, both)
    expected = DualEncoder(network, both.tokenizer)
    x = both.image_processor(images=photo, return_tensors="pt")
    found = [GradCAM(each).attribute(image, text("a cat")) for each, image in ((model, photo), (expected, x))]
    assert torch.equal(found[0].values, found[1].values)


def test_an_image_and_words_are_passed_by_name_to_a_model_that_takes_the_words_first() -> None:
    network, x = pytest.importorskip("transformers").CLIPModel(config()).eval(), torch.randn(2, 3, 32, 32)
    words = tokenizer()(["a cat", "a dog"], return_tensors="pt")["input_ids"]
    expected = VanillaGradient(DualEncoder(network, tokenizer())).attribute(x, [text("a cat"), text("a dog")])
    for args in ((words,), {"input_ids": words}):
        found = VanillaGradient(network).attribute(x, lambda out: out.logits_per_image.diagonal(), forward_args=args)
        scale = float(network.logit_scale.detach().exp())
        torch.testing.assert_close(found.scores, scale * expected.scores, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.values, scale * expected.values, atol=1e-4, rtol=1e-3)


def test_the_text_tower_of_siglip_attends_to_the_padding() -> None:
    model: Any = MODELS["transformers SigLIP"]()[0]
    assert list(model.tokenize("a cat")) == ["input_ids"]


def test_models_that_do_not_take_images_are_refused_with_the_reason() -> None:
    transformers = pytest.importorskip("transformers")
    text_tower = {**TOWER, "vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "projection_size": 16}
    clip_of_videos = transformers.XCLIPConfig(
        text_config=text_tower,
        vision_config={**TOWER, "image_size": 32, "patch_size": 8, "mit_hidden_size": 16, "mit_num_attention_heads": 2},
    )
    naflex = transformers.Siglip2Config(text_config=text_tower, vision_config={**TOWER, "patch_size": 8})
    with pytest.raises(ModelError, match="XCLIPModel has no image encoder, but one of videos"):
        DualEncoder(transformers.XCLIPModel(clip_of_videos), tokenizer())
    with pytest.raises(ModelError, match=r"patches \(NaFlex\).*load weights of one size"):
        DualEncoder(transformers.Siglip2Model(naflex), tokenizer())


# References.


MEASURES: dict[str, Any] = {
    "cosine": F.cosine_similarity,
    "dot": lambda own, other: (own * other).sum(1),
    "distance": lambda own, other: -torch.linalg.vector_norm(own - other, dim=1),
}


@pytest.mark.filterwarnings("ignore:.*below the rounding error")  # of an image that is its own reference
@pytest.mark.parametrize("measure", MEASURES)
def test_the_score_of_a_reference_is_its_measure(clip: tuple[Any, Tensor], measure: Any) -> None:
    model, x = clip
    embeddings = model(x)["image_embeds"].detach()
    first = VanillaGradient(model).attribute(x, similarity(x[1], measure=measure))
    torch.testing.assert_close(first.scores, MEASURES[measure](embeddings, embeddings[1:]))
    forms = (embeddings[1], embeddings[1:], embeddings[1:].numpy())
    found = [VanillaGradient(model).attribute(x, similarity(form, measure=measure)).values for form in forms]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    second = VanillaGradient(model).attribute(x, similarity(torch.ones(8), measure=measure))
    both = VanillaGradient(model).attribute(x, similarity(x[1], against=np.ones(8, np.float32), measure=measure))
    torch.testing.assert_close(both.scores, first.scores - second.scores)
    torch.testing.assert_close(both.values, first.values - second.values)


def test_a_reference_is_read_as_the_image_is(tmp_path: Path) -> None:
    model: Any = PooledNet()
    model.preprocess = saliency.Preprocess(size=(16, 16), resize=16)
    Image.new("RGB", (20, 20), "red").save(tmp_path / "red.png")
    Image.new("RGB", (20, 20), "blue").save(tmp_path / "blue.png")
    paths = [tmp_path / "red.png", tmp_path / "blue.png"]
    found = VanillaGradient(model).attribute(paths, similarity(paths[0], against=str(paths[1])))
    assert found.target_names[0] == "similarity to red.png rather than blue.png"
    assert found.contrasts[0]
    assert float(found.scores[0]) == pytest.approx(-float(found.scores[1]), rel=1e-5)
    assert found.scores[0] > 0


def test_the_similarity_to_itself_is_the_cosine_of_each_changed_image_with_its_own_image() -> None:
    model, x = PooledNet(), torch.randn(3, 3, 16, 16)
    occlusion = saliency.Occlusion(model, window=8, stride=8, fill=0)
    found = occlusion.attribute(x, similarity())
    for image in range(3):
        hidden = x[image].clone()
        hidden[:, 8:, :8] = 0
        own, changed = model(x[image : image + 1]).detach(), model(hidden[None]).detach()
        drop = float(1 - F.cosine_similarity(own, changed))
        assert float(found.values[image, 0, 12, 4]) == pytest.approx(drop, abs=1e-6)
        torch.testing.assert_close(occlusion.attribute(x[image], similarity()).values[0], found.values[image])
    assert found.target_names == ("similarity to itself",) * 3
    # A metric that runs changed images compares them with the image of the explanation.
    subject = Subject(found, method=occlusion, inputs=x)
    torch.testing.assert_close(subject.scores_of(x * 0.3), F.cosine_similarity(model(x), model(x * 0.3)).detach())
    for wrong in ({"against": x[0]}, {"measure": "dot"}):
        with pytest.raises(TargetError, match="to itself is a cosine"):
            similarity(**wrong)


@pytest.mark.parametrize(
    "pack",
    [
        lambda rows: {"last_hidden_state": rows[:, None], "pooler_output": rows},
        lambda rows: {"image_features": rows, "logit_scale": rows.sum()},
        lambda rows: rows[..., None, None],
    ],
)
def test_an_embedding_is_found_in_the_output(pack: Any) -> None:
    model = Packed(pack, PooledNet())
    x = torch.randn(2, 3, 16, 16)
    targets = [similarity(x[1]), similarity(torch.ones(5))]
    found = VanillaGradient(model).attribute(x, targets)
    expected = VanillaGradient(model.inner).attribute(x, targets)
    torch.testing.assert_close(found.values, expected.values)


# Errors.


def test_what_cannot_be_compared_is_refused(clip: tuple[Any, Tensor]) -> None:
    model, x = clip
    plain = PooledNet()
    with pytest.raises(TargetError, match="PooledNet has no text encoder"):
        GradCAM(plain).attribute(x, text("a cat"))
    with pytest.raises(TargetError, match=r"reference has 3 numbers; the model's embedding has 8"):
        GradCAM(model).attribute(x, similarity(torch.ones(3)))
    for target in (None, 3, "cat", saliency.probability(1)):
        with pytest.raises(TargetError, match=r"returns an embedding|no class names"):
            GradCAM(model).attribute(x, target)
    with pytest.raises(TargetError, match=r"\(N, D\); this model's is \(2, 6, 14, 14\)"):
        VanillaGradient(plain.features[0]).attribute(torch.randn(2, 3, 16, 16), similarity(torch.ones(6)))
    with pytest.raises(TargetError, match="expected a text or a list of texts, got 3"):
        text("a cat", against=[3])  # type: ignore[list-item]
    with pytest.raises(TargetError, match="cosine"):
        similarity(torch.ones(3), measure="euclid")  # type: ignore[arg-type]
    with pytest.raises(TargetError, match="only methods and"):
        gradient_statistics(model, x, text("a cat"))
    with pytest.raises(ModelError, match="Linear has no text encoder"):
        DualEncoder(nn.Linear(2, 2), None)
