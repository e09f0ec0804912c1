"""Models of open_clip and transformers by name."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

import saliency
from saliency import DualEncoder
from saliency.batch import BatchError, batch
from saliency.errors import DependencyError, ModelError
from tests.dual_encoders import TOWER, tokenizer
from tests.dual_encoders import config as clip_config

PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8))


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[str]:
    """The name of a small architecture of open_clip, for its own tokenizer."""
    open_clip = pytest.importorskip("open_clip")
    factory: Any = open_clip.factory
    before, paths = factory._MODEL_CONFIGS.copy(), factory._MODEL_CONFIG_PATHS.copy()
    vision = {"image_size": 32, "layers": 2, "width": 16, "head_width": 8, "patch_size": 8}
    text = {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
    (tmp_path / "tiny-clip.json").write_text(json.dumps({"embed_dim": 8, "vision_cfg": vision, "text_cfg": text}))
    open_clip.add_model_config(tmp_path / "tiny-clip.json")
    yield "open_clip/tiny-clip"
    factory._MODEL_CONFIGS, factory._MODEL_CONFIG_PATHS = before, paths


def folder_of(model: Any, folder: Path, **processor: Any) -> str:
    """Save a model of transformers and its image processor, and return its name for `load`."""
    transformers = pytest.importorskip("transformers")
    model.save_pretrained(folder)
    transformers.CLIPImageProcessor(**processor).save_pretrained(folder)
    return f"hf/{folder}"


@pytest.fixture
def classifier(tmp_path: Path) -> str:
    transformers = pytest.importorskip("transformers")
    vit = transformers.ViTConfig(**TOWER, image_size=32, patch_size=8, id2label={0: "ant", 1: "bee", 2: "cow"})
    with torch.random.fork_rng(devices=[]):
        model = transformers.ViTForImageClassification(vit)
    return folder_of(model, tmp_path, size={"height": 32, "width": 32}, do_center_crop=False)


@pytest.fixture
def clip(tmp_path: Path) -> str:
    transformers = pytest.importorskip("transformers")
    with torch.random.fork_rng(devices=[]):
        model = transformers.CLIPModel(clip_config())
    tokenizer().save_pretrained(tmp_path)
    return folder_of(model, tmp_path, size={"shortest_edge": 32}, crop_size=32)


def test_open_clip_gives_a_dual_encoder_with_its_preprocessing_and_tokenizer(tiny: str) -> None:
    transform = pytest.importorskip("open_clip.transform")
    before = torch.get_rng_state()
    model: Any = saliency.load(tiny, weights=None)
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(model, DualEncoder)
    assert not model.training
    assert model.categories is None
    config = transform.PreprocessCfg(**model.model.visual.preprocess_cfg)
    expected = transform.image_transform_v2(config, is_train=False)
    assert torch.equal(model.preprocess(PHOTO), expected(PHOTO))
    target = saliency.text("a photo of a cat", against="a photo of a dog")
    found = saliency.GradCAM(model, whole=True).attribute(PHOTO, target)
    assert found.values.shape == (1, 1, 4, 4)
    assert found.frames[0] is not None


def test_a_checkpoint_gives_an_open_clip_model_its_weights(tiny: str, tmp_path: Path) -> None:
    model: Any = saliency.load(tiny, weights=None)
    weights = {name: value + 1 for name, value in model.model.state_dict().items()}
    torch.save(weights, tmp_path / "tiny.pt")
    other: Any = saliency.load(tiny, weights=tmp_path / "tiny.pt")
    assert torch.equal(other.model.text_projection, model.model.text_projection + 1)


@pytest.mark.parametrize("weights", ["default", None])
def test_a_folder_of_transformers_gives_a_classifier_with_its_class_names(classifier: str, weights: Any) -> None:
    model: Any = saliency.load(classifier, weights=weights)
    assert model.categories == ("ant", "bee", "cow")
    found = saliency.GradCAM(model).attribute(PHOTO, "bee")
    assert (found.target_names, found.input_size) == (("bee",), (32, 32))
    saved = saliency.load(classifier)
    same = all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), saved.parameters(), strict=True))
    assert same == (weights == "default")


def test_a_folder_of_transformers_gives_a_dual_encoder(clip: str) -> None:
    model: Any = saliency.load(clip)
    assert isinstance(model, DualEncoder)
    found = saliency.GradCAM(model).attribute(PHOTO, saliency.text("a cat", against="a dog"))
    assert found.target_names == ("a cat rather than a dog",)
    left, top, right, bottom = found.frames[0].box  # type: ignore[union-attr]
    assert (left, top, right, bottom) == pytest.approx((10, 0, 50, 40), abs=1)


def test_a_batch_of_a_folder_of_transformers_resumes(classifier: str, tmp_path: Path) -> None:
    PHOTO.save(tmp_path / "photo.png")
    run = [batch(tmp_path / "photo.png", tmp_path / "out", model=classifier) for _ in range(2)]
    assert [summary.fresh for summary in run] == [1, 0]


def test_a_batch_explains_a_text_and_resumes_for_the_same_text_only(tmp_path: Path) -> None:
    for name in ("one", "two"):
        PHOTO.save(tmp_path / f"{name}.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    sources, out = sorted(tmp_path.glob("*.png")), tmp_path / "out"
    options: dict[str, Any] = {"model": "tests.dual_encoders:for_photos", "methods": ["grad_cam", "attn_lrp"]}
    target = saliency.text("a cat", against="a dog")
    assert batch(sources, out, target=target, **options).failed == 1
    rows = [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]
    explained = [row for row in rows if row["error"] is None]
    assert {row["name"] for row in explained} == {"a cat rather than a dog"}
    assert all(0 < row["probability"] < 1 for row in explained)
    assert batch(sources, out, target=saliency.text("a cat", against="a dog"), **options).fresh == 0
    with pytest.raises(BatchError, match="target was"):
        batch(sources, out, target=saliency.text("a bus", against="a dog"), **options)


def test_what_cannot_be_loaded_names_the_cause(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match='no model "open_clip/ViT-B-33"; did you mean "ViT-B-32"'):
        saliency.load("open_clip/ViT-B-33", weights=None)
    with pytest.raises(ModelError, match=r'no weights "laion" for ViT-B-32; did you mean .*laion'):
        saliency.load("open_clip/ViT-B-32", weights="laion")
    with pytest.raises(ModelError, match='no weights "default" for tiny-clip'):
        saliency.load(tiny)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("open_clip.get_tokenizer", Mock(side_effect=OSError("no tokenizer here")))
        with pytest.raises(ModelError, match="no tokenizer here"):
            saliency.load(tiny, weights=None)
    clip_config().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="names no class of transformers"):
        saliency.load(f"hf/{tmp_path}", weights=None)
    with pytest.raises(ModelError, match=f"no folder {tmp_path}/vit"):
        saliency.load(f"hf/{tmp_path}/vit")


@pytest.mark.parametrize("name", ["open_clip/ViT-B-32", "hf/google/vit-base-patch16-224"])
def test_a_missing_library_is_an_error_with_the_command_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = "open_clip" if name.startswith("open_clip") else "transformers"
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(DependencyError, match=rf'needs {extra}.*pip install "saliency-toolkit\[{extra}\]"'):
        saliency.load(name)
