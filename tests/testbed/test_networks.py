from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from safetensors import safe_open

import saliency
from benchmarks.train_testbed import (
    SCHEDULES,
    accuracy,
    camera_effects,
    caption_accuracy,
    circle_shares,
    detection_scores,
    falls,
    keypoint_errors,
    mean_iou,
    motion_errors,
    rgbd_accuracy,
    right_order,
    word_falls,
)
from saliency import DualEncoder
from saliency.errors import ModelError, TargetError
from saliency.testbed import CAMERAS, RGBD_TASKS, CaptionProcessor, RgbdTask, Task, draw_cameras, draw_rgbd, draw_scenes
from saliency.testbed.networks import NETWORKS, Tokenizer, weights_file

SCENES = draw_scenes(2, seed=1_000_007)
DETECTORS = ("shapes_detector", "shapes_queries")
FINDERS = {*DETECTORS, "shapes_unet", "shapes_circles", "shapes_keypoints"}  # of objects
SEVERAL_INPUTS = {"shapes_rgbd", "shapes_policy"}
NAMERS = NETWORKS.keys() - FINDERS - SEVERAL_INPUTS - {"shapes_volume", "shapes_caption"}  # of objects of an image


@pytest.mark.parametrize(
    ("name", "task"),
    [(name, task) for name, (_, _, tasks) in SCHEDULES.items() if name in NAMERS for task in tasks],
)
def test_a_network_names_the_objects_of_images_on_which_it_was_not_trained(name: str, task: Task) -> None:
    assert accuracy(name, task, images=64) >= 0.95


def test_the_shortcut_network_calls_a_watermark_a_circle_and_the_plain_one_does_not() -> None:
    circles, others = circle_shares("shapes_shortcut", images=200)
    assert others[0] < 0.02
    assert others[1] > 0.9
    assert circles[1] == 1
    circles, others = circle_shares("shapes_cnn", images=200)
    assert others.max() < 0.05
    assert circles.min() > 0.95


def test_the_log_odds_of_the_order_network_fall_by_the_weight_of_an_object_that_is_covered() -> None:
    found, weights = falls("shapes_order", images=64)
    assert right_order(found, weights) > 0.95
    assert (found - weights).abs().mean() < 0.2


@pytest.mark.parametrize("name", DETECTORS)
def test_a_detector_finds_the_objects_of_images_on_which_it_was_not_trained_once_each(name: str) -> None:
    recall, precision = detection_scores(name, images=32)
    assert recall > 0.95
    assert precision > 0.95


def test_the_unets_find_the_pixels_and_the_corners_of_objects() -> None:
    assert mean_iou("shapes_unet", images=32) > 0.9
    assert mean_iou("shapes_circles", images=32) > 0.9
    assert (keypoint_errors("shapes_keypoints", images=32) < 4).float().mean() > 0.97


@pytest.mark.parametrize("task", RGBD_TASKS)
def test_the_network_of_colours_and_depth_finds_the_class_in_the_inputs_that_show_it(task: RgbdTask) -> None:
    assert rgbd_accuracy(task, scenes=64) >= 0.97


def test_the_policy_moves_to_the_object_of_the_instruction() -> None:
    assert (motion_errors(scenes=64) < 4).float().mean() >= 0.97


def test_the_motion_follows_from_the_camera_that_sees_the_object() -> None:
    first, second, _ = camera_effects(scenes=32)
    assert first.mean() > 15
    assert second.mean() < 1


def test_networks_of_several_inputs_have_a_preprocessing_for_each_image() -> None:
    network: Any = saliency.load("shapes_rgbd")
    assert [*network.preprocess] == ["rgb"]
    drawn = draw_rgbd(2, seed=1_000_007)
    scores = saliency.InputXGradient(network).attribute(drawn.inputs, drawn.answers.tolist()).scores
    with torch.no_grad():
        logits = network(drawn.inputs["rgb"] / 127.5 - 1, drawn.inputs["depth"])
    torch.testing.assert_close(scores, logits[[0, 1], drawn.answers])
    policy: Any = saliency.load("shapes_policy")
    assert policy.categories is None
    assert [*policy.preprocess] == [*CAMERAS]
    seen = draw_cameras(2, seed=1_000_007)
    scores = saliency.InputXGradient(policy).attribute(seen.inputs, saliency.value(3, 0)).scores
    torch.testing.assert_close(scores, seen.answers[:, 3, 0], atol=0.1, rtol=0)


def test_the_outputs_have_the_formats_of_the_libraries() -> None:
    x = SCENES.images / 127.5 - 1
    with torch.no_grad():
        outputs: Any = {name: saliency.load(name)(x) for name in FINDERS}
    y, raw = outputs["shapes_detector"]
    assert y.shape == (2, 4 + 3, 16**2 + 8**2)
    assert torch.equal(y[:, 4:], raw["scores"].sigmoid())
    assert {key: value.shape[:2] for key, value in outputs["shapes_queries"].items()} == {
        "logits": (2, 16),
        "pred_boxes": (2, 16),
    }
    assert outputs["shapes_queries"]["logits"].shape[2] == len(NETWORKS["shapes_queries"].categories or ()) + 1
    for name, shape in {
        "shapes_unet": (2, 4, 64, 64),
        "shapes_circles": (2, 1, 64, 64),
        "shapes_keypoints": (2, 3, 32, 32),
    }.items():
        assert outputs[name].shape == shape
        assert len(NETWORKS[name].categories or ()) == shape[1]


def test_the_attention_of_the_queries_has_the_grid_of_the_image() -> None:
    model = saliency.load("shapes_queries")
    explanation = saliency.CheferLRP(model).attribute(SCENES.images, lambda output: output["logits"][:, 0, 0])
    assert explanation.values.shape == (2, 1, 8, 8)


def test_the_boxes_of_a_detector_are_in_pixels_of_images_of_any_size() -> None:
    model: Any = saliency.load("shapes_detector")
    scenes = draw_scenes(1, seed=1_000_009, task="several")
    with torch.no_grad():
        alone = model(scenes.images / 127.5 - 1)[0]
        shifted = model(torch.nn.functional.pad(scenes.images / 127.5 - 1, (24, 16, 0, 8)))[0]
    best, moved = (y[0, :4, y[0, 4:].amax(0).argmax()] for y in (alone, shifted))
    assert (moved - best - torch.tensor([24.0, 0, 0, 0])).abs().max() < 1.5


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_are_small_and_without_a_pickle(name: str) -> None:
    assert weights_file(name).stat().st_size < 1_000_000
    with safe_open(weights_file(name), framework="pt") as file:
        about = file.metadata()
        assert {file.get_tensor(key).dtype for key in file.keys()} <= {torch.float16, torch.int64}  # noqa: SIM118
    assert (about["network"], about["license"]) == (name, "MIT")
    assert not list(weights_file(name).parent.glob("*.pt"))


@pytest.mark.parametrize("name", sorted(NAMERS - {"shapes_two_tower"}))
def test_an_explanation_needs_neither_a_download_nor_preprocessing_by_hand(name: str) -> None:
    model: Any = saliency.load(name)
    assert model.categories == NETWORKS[name].categories
    explanation = saliency.GradCAM(model).attribute(SCENES.images)
    assert explanation.values.shape[-2:] == (8, 8)
    assert saliency.heatmap(explanation).shape == (2, 64, 64)
    with torch.no_grad():
        assert torch.allclose(explanation.scores, model(SCENES.images / 127.5 - 1).amax(1), atol=1e-4)


def test_all_but_the_window_transformer_need_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("torchvision", "timm", "transformers", "open_clip"):
        monkeypatch.setitem(sys.modules, library, None)
    for name in NETWORKS.keys() - {"shapes_window"}:
        saliency.load(name)


def test_the_two_tower_network_explains_captions() -> None:
    model = saliency.load("shapes_two_tower")
    assert isinstance(model, DualEncoder)
    one, other = SCENES.captions()[0][:2]
    explanation = saliency.VanillaGradient(model).attribute(SCENES.images[:1], saliency.text(one, against=[other]))
    assert explanation.values.abs().max() > 0


def test_padding_changes_no_embedding_of_a_caption() -> None:
    model: Any = saliency.load("shapes_two_tower")
    tokens = Tokenizer()(["a red circle"])
    assert tokens.shape == (1, 10)
    assert Tokenizer().decode(tokens[0, :5].tolist()) == "<start> a red circle <end> "
    noisy = tokens.clone()
    noisy[0, 5:] = 3
    with torch.no_grad():
        clean, changed = (model.model.encode_text(each) for each in (tokens, noisy))
    assert torch.allclose(clean, changed, atol=1e-6)


@pytest.mark.parametrize("caption", ["a red cat", "a red circle left of a blue square of a"])
def test_a_caption_of_other_words_or_of_too_many_is_an_error(caption: str) -> None:
    with pytest.raises(
        TargetError, match=f'"{caption}" is not a caption of drawn shapes; expected at most 8 words of: a'
    ):
        Tokenizer()([caption])


def test_the_captioner_says_how_two_objects_lie_and_the_colour_of_one() -> None:
    captions, colours = caption_accuracy("shapes_caption", "two_objects", images=48)
    assert captions > 0.95
    assert colours > 0.95


def test_a_word_of_a_caption_depends_on_its_own_object_and_a_relation_on_both() -> None:
    falls = word_falls("shapes_caption", images=24).mean(0)  # (5 words, 2 objects)
    assert (falls[:2, 0] > falls[:2, 1] + 3).all()
    assert (falls[3:, 1] > falls[3:, 0] + 3).all()
    assert (falls[2] > 3).all()


def test_the_captioner_is_called_as_a_model_of_transformers() -> None:
    model: Any = saliency.load("shapes_caption")
    inputs = CaptionProcessor()(SCENES.images, ["Caption", "<image> What colour is the circle?"])
    assert (inputs["input_ids"] == CaptionProcessor.image_token_id).sum(1).tolist() == [64, 64]
    with torch.no_grad():
        logits = model(**inputs).logits
        alone = model(inputs["input_ids"][:1, :66], inputs["pixel_values"][:1]).logits
        last = model(**inputs, logits_to_keep=2).logits
    assert logits.shape == (2, 1 + 64 + 5, model.get_input_embeddings().num_embeddings)
    assert torch.allclose(logits[:1, :66], alone, atol=1e-5)  # padding is not read
    assert torch.allclose(logits[:, -2:], last, atol=1e-5)


def test_the_processor_of_the_captioner_reads_its_own_text_and_names_a_word_that_it_does_not_know() -> None:
    processor = CaptionProcessor()
    tokens = processor(SCENES.images[0], "caption a red circle <end>")["input_ids"][0].tolist()
    assert processor.decode(tokens[:2]) == "<start> <image>"
    assert processor.decode(tokens[65:]) == "caption a red circle <end>"
    with pytest.raises(TargetError, match='"cat" is not a word of the captioner; expected: <pad>'):
        processor(SCENES.images, "a red cat")


def test_random_weights_and_other_numbers_of_classes_load_as_of_any_model(tmp_path: Any) -> None:
    random: Any = saliency.load("shapes_vit", weights=None)
    assert not torch.equal(random.head.weight, saliency.load("shapes_vit").get_parameter("head.weight"))
    torch.save(NETWORKS["shapes_vit"].build(3).state_dict(), tmp_path / "three.pt")
    three: Any = saliency.load("shapes_vit", weights=tmp_path / "three.pt", categories=list("abc"))
    assert three.head.out_features == 3
    with pytest.raises(ModelError, match='shapes_vit has only the weights "default", not "best"'):
        saliency.load("shapes_vit", weights="best")
