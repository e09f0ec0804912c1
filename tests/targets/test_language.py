"""Targets as text mean the same in Python, in lists of images and on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import saliency
from saliency.batch import batch
from saliency.errors import NotFoundError, TargetError
from saliency.targets.language import parse_target
from saliency.testbed.shapes import draw_scenes


@pytest.mark.parametrize(
    ("written", "target"),
    [
        ("box:1", {"index": 1}),
        ("box:210,110", {"point": (210, 110)}),
        ("box:120, 80, 300.5, 240", {"box": (120, 80, 300.5, 240)}),
        ("box:cat", {"cls": "cat"}),
        ("box:tabby, tabby cat", {"cls": "tabby, tabby cat"}),
        ("box:cat:1", {"cls": "cat", "index": 1}),
        ("box:7:0", {"cls": "7", "index": 0}),
        ("box:a:b:0", {"cls": "a:b", "index": 0}),
        ("box:cat:210,110", {"cls": "cat", "point": (210, 110)}),
        ("box:cat:120,80,300,240", {"cls": "cat", "box": (120, 80, 300, 240)}),
    ],
)
def test_a_box_has_a_place_a_class_or_both(written: str, target: dict[str, Any]) -> None:
    assert repr(parse_target(written)) == repr(saliency.box(**target))


@pytest.mark.parametrize(
    ("written", "target"),
    [
        ("region:cat", saliency.region("cat")),
        ("region:cat:predicted", saliency.region("cat")),
        ("region:cat:border", saliency.region("cat", "border")),
        ("region:a:b:border", saliency.region("a:b", "border")),
        ("region:cat:3,4", saliency.region("cat", (3, 4))),
        ("region:cat:1,2,3,4", saliency.region("cat", (1, 2, 3, 4))),
        ("keypoint:nose", saliency.keypoint("nose")),
        ("keypoint:nose:1", saliency.keypoint("nose", 1)),
        ("text:a red car", saliency.text("a red car")),
        ("text: time: noon", saliency.text("time: noon")),
    ],
)
def test_regions_joints_and_texts_are_those_of_the_functions(written: str, target: Any) -> None:
    assert repr(parse_target(written)) == repr(target)


def test_a_region_may_be_the_mask_of_a_file(tmp_path: Path) -> None:
    Image.new("L", (4, 3), 9).save(tmp_path / "mask.png")
    mask = parse_target(f"region:cat:{tmp_path / 'mask.png'}").where
    assert torch.equal(mask, torch.ones(3, 4, dtype=torch.bool))


@pytest.mark.parametrize("mask", [r"C:\masks\a.png", "D:/a.png", "/masks/a.png", "a.png"])
def test_the_mask_of_a_region_may_be_on_a_drive_of_windows(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.isfile", lambda path: path == mask)
    monkeypatch.setattr("saliency.targets.language.read_mask", lambda path: torch.full((2, 2), path == mask))
    assert parse_target(f"region:a:cat:{mask}").label == "a:cat"


@pytest.mark.parametrize(
    "written",
    [
        *("box:", "box::0", "box:cat:", "box:cat:dog", "box:1,2,3", "box:1,2,3,4,5", "box:-1", "box:1.5"),
        *("box:3,2,1,4", "box:cat:3,2,1,4", "region:", "region:cat:", "region:cat:boarder", "region:cat:1"),
        *("keypoint:", "keypoint:nose:", "keypoint:nose:-1", "keypoint:nose:left", "text:", "text: "),
    ],
)
def test_a_wrong_target_is_quoted_beside_what_was_expected(written: str) -> None:
    with pytest.raises(TargetError, match="expected") as raised:
        parse_target(written)
    assert str(raised.value).startswith(f'got the target "{written}"; expected {written.partition(":")[0]}:')


def test_a_class_of_the_very_name_wins() -> None:
    names = ["box:0", "text:a cat", "dog"]
    assert parse_target("box:0", names) == "box:0"
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    method = saliency.VanillaGradient(model, categories=names)
    assert method.attribute(torch.rand(1, 3, 16, 16), "text:a cat").target == (1,)


@pytest.mark.parametrize("target", [None, 3, "cat", "box", "Box:0", "boxes:0", "kind: cat"])
def test_other_targets_are_unchanged(target: Any) -> None:
    assert parse_target(target) is target


@pytest.fixture(scope="module")
def scenes() -> torch.Tensor:
    return draw_scenes(2, seed=1_000_009, task="corners").images


def test_methods_and_metrics_read_a_text(scenes: torch.Tensor) -> None:
    detector = saliency.load("shapes_detector")
    method = saliency.LayerCAM(detector)
    first, second = scenes / 127.5 - 1
    expected = method.attribute(first, saliency.box(index=1))
    assert torch.equal(method.attribute(first, "box:1").values, expected.values)
    both = method.attribute(torch.stack([first, second]), ["box:1", "box:0"])
    assert both.target_names[0] == expected.target_names[0]
    (several,) = method.attribute_classes(first, ["box:1"])
    assert torch.equal(several.values, expected.values)
    metric = saliency.metrics.Deletion(steps=2)
    scores = [
        metric.measure(expected, method=method, inputs=first[None], target=t) for t in ("box:1", saliency.box(index=1))
    ]
    assert torch.equal(scores[0].values, scores[1].values)
    unet = saliency.load("shapes_unet")
    region = saliency.LayerCAM(unet, "bottleneck").attribute(first, "region:triangle")
    assert region.target_names == ("region of triangle",)
    with pytest.raises(NotFoundError, match="with the index 99"):
        method.attribute(first, "box:99")


def test_each_row_of_a_list_may_have_a_target_of_its_own(scenes: torch.Tensor, tmp_path: Path) -> None:
    for number, scene in enumerate(scenes):
        Image.fromarray(scene.permute(1, 2, 0).numpy()).save(tmp_path / f"{number}.png")
    (tmp_path / "list.csv").write_text("path,target\n0.png,box:1\n1.png,box:triangle:0\n0.png,box:9\n")
    out = tmp_path / "out"
    summary = batch(tmp_path / "list.csv", out, "shapes_detector", ["layer_cam"])
    assert summary.failed == 1
    rows = [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]
    assert rows[1]["name"].startswith("triangle at (")
    assert "with the index 9" in rows[2]["error"]
    assert '"target": "box:1"' in (out / "listing.jsonl").read_text()
    assert batch(tmp_path / "list.csv", out, "shapes_detector", ["layer_cam"]).fresh == 0


def test_a_region_as_text_is_the_value_before_a_last_sigmoid_also_in_tiles() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3, padding=1), torch.nn.Sigmoid())
    image = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    target = saliency.region("0", (2, 2))
    for method in (saliency.VanillaGradient(model), saliency.Tiled(saliency.VanillaGradient(model), size=8, overlap=0)):
        written, expected = method.attribute(image, "region:0:2,2"), method.attribute(image, target)
        assert torch.equal(written.values, expected.values)
        assert written.notes == expected.notes
    assert "the value before the last sigmoid" in written.notes[0]
