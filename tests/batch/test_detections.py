"""Every detection of every photo is explained as an entry of its own, in runs that resume; and targets of a place."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import saliency
from saliency import LayerCAM
from saliency.batch import BatchError, StoppedError, Summary, batch, engines
from saliency.batch.network import Network
from saliency.render.overlay import BOX_COLOR
from saliency.targets.candidates import iou
from saliency.testbed.shapes import Scenes, draw_scenes
from tests.batchwork import assert_same, kinds, rows

LAYER = "backbone.layer2"
SCENES = 3  # with four objects each


@cache
def detector() -> Any:
    return saliency.load("shapes_detector")


@cache
def drawn() -> Scenes:
    return draw_scenes(SCENES, seed=1_000_009, task="several")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three scenes, the second one four times as large, and a grey photo."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number, scene in enumerate(drawn().images):
        image = Image.fromarray(scene.permute(1, 2, 0).numpy())
        (image.resize((256, 256), 0) if number == 1 else image).save(folder / f"{number}.png")
    Image.new("RGB", (64, 64), (128, 128, 128)).save(folder / "grey.png")
    return folder


def run(photos: Path, out: str = "out", **options: Any) -> Summary:
    given: dict[str, Any] = {"model": detector(), "methods": ["layer_cam"], "layer": LAYER, "detections": "all"}
    return batch(photos, photos.parent / out, **given | {"workers": 2, "batch_size": 4} | options)


def test_each_detection_has_a_row_an_overlay_and_its_box(photos: Path) -> None:
    summary = run(photos)
    found = rows(summary.folder)
    assert [row["id"] for row in found] == [f"{number}.{rank}" for number in range(3) for rank in range(4)] + ["grey.0"]
    assert kinds(summary.folder) == [None] * 12 + ["NotFoundError"]
    assert (summary.done, summary.failed) == (13, 1)
    for row in found[:12]:
        number, rank = map(int, row["id"].split("."))
        alone = LayerCAM(detector(), layer=LAYER).attribute(photos / f"{number}.png", saliency.box(index=rank))
        assert row["name"] == alone.target_names[0]
        assert row["probability"] == pytest.approx(float(alone.probabilities[0]), abs=1e-5)  # type: ignore[index]
        assert row["score"] == pytest.approx(float(alone.scores[0]), abs=1e-3)
        scale = 4 if number == 1 else 1  # boxes are in pixels of the photo
        assert iou(torch.tensor(row["target_box"]) / scale, drawn().boxes[number]).amax() > 0.7
        overlay = np.asarray(Image.open(summary.folder / row["overlay"]))
        x0, y0, x1, y1 = (max(0, round(edge)) for edge in row["target_box"])
        assert tuple(overlay[y0 + 1, (x0 + x1) // 2]) == BOX_COLOR
        assert tuple(overlay[(y0 + y1) // 2, x0]) == (0, 0, 0)


def test_a_number_and_a_class_choose_detections(photos: Path) -> None:
    best = rows(run(photos, "best", detections=1).folder)
    assert [row["id"] for row in best] == ["0.0", "1.0", "2.0", "grey.0"]
    circles = rows(run(photos, "circles", target="circle").folder)
    names = [str(row["name"]).partition(" at ")[0] for row in circles if row["error"] is None]
    assert names == ["circle"] * int((drawn().shapes == 0).sum())


def test_an_interrupted_run_writes_the_same_files(photos: Path) -> None:
    assert run(photos, "parts", limit=2).images == 8
    assert run(photos, "parts").fresh == 5
    run(photos, "whole")
    assert_same(photos.parent / "parts", photos.parent / "whole")


@pytest.mark.parametrize("options", [{}, {"detections": None, "target": saliency.box(index=0)}])
def test_a_broken_file_leaves_its_batch_whole(photos: Path, options: dict[str, Any]) -> None:
    (photos / "grey.png").unlink()
    (photos / "1.png").write_bytes(b"no image")
    summary = run(photos, **options)
    assert [kind for kind in kinds(summary.folder) if kind] == ["ImageError"]
    assert summary.repeated == {}


def test_a_photo_that_the_model_refuses_does_not_stop_the_others(photos: Path) -> None:
    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = detector()
            self.preprocess, self.categories = self.network.preprocess, self.network.categories

        def forward(self, x: Tensor) -> Any:
            if bool((x.std((1, 2, 3)) == 0).any()):
                raise RuntimeError("a grey photo")
            return self.network(x)

    summary = run(photos, model=Fragile(), layer=f"network.{LAYER}")
    assert kinds(summary.folder) == [None] * 12 + ["ModelError"]


def test_rows_that_were_lost_are_written_again(photos: Path) -> None:
    whole, parts = run(photos, "whole").folder, run(photos, "parts").folder
    lines = (parts / "manifest.jsonl").read_bytes().splitlines(keepends=True)
    (parts / "manifest.jsonl").write_bytes(b"".join(lines[:6]) + lines[6][:40])
    (parts / "overlays" / "0.2.layer_cam.png").unlink()
    assert run(photos, "parts").fresh == 13 - 5
    assert_same(parts, whole)


def test_a_finished_run_looks_for_nothing(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(photos)
    monkeypatch.setattr(Network, "count_detections", None)
    assert run(photos).fresh == 0


def test_strict_accepts_photos_without_detections_and_some_of_all_methods_that_do_not_apply(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = ["layer_cam", "attention_rollout"]
    monkeypatch.setattr(engines, "METHODS", methods)
    assert run(photos, methods=methods, strict=True).kinds == {"NotApplicableError": 12, "NotFoundError": 2}
    with pytest.raises(StoppedError, match="attention_rollout"):
        run(photos, "other", methods=[*methods, "eigen_cam"], strict=True)


def test_a_new_photo_comes_last(photos: Path) -> None:
    before = rows(run(photos).folder)
    Image.open(photos / "0.png").transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(photos / "added.png")
    assert run(photos).fresh == 4
    after = rows(photos.parent / "out")
    assert after[:13] == before
    assert [row["id"] for row in after[13:]] == [f"added.{rank}" for rank in range(4)]


class Small(nn.Module):
    """A detector whose memory holds two images."""

    def __init__(self) -> None:
        super().__init__()
        self.network = detector()
        self.preprocess, self.categories = self.network.preprocess, self.network.categories

    def forward(self, x: Tensor) -> Any:
        if len(x) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return self.network(x)


def test_a_batch_of_detections_that_does_not_fit_is_halved(photos: Path) -> None:
    given: dict[str, Any] = {"model": Small(), "layer": f"network.{LAYER}"}
    summary = run(photos, "halved", **given)
    assert json.loads((summary.folder / "manifest.json").read_bytes())["batch_sizes"] == [[0, 2]]
    run(photos, "small", **given, batch_size=2)
    assert_same(summary.folder, photos.parent / "small")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"detections": 0}, "detections=0 is not a whole number of at least 1"),
        ({"detections": "every"}, "detections='every' is not a whole number"),
        ({"target": saliency.box(index=1)}, "target= can only be their class"),
    ],
)
def test_wrong_options_are_refused_before_the_folder_exists(photos: Path, options: dict[str, Any], why: str) -> None:
    with pytest.raises(BatchError, match=why):
        run(photos, **options)
    assert not (photos.parent / "out").exists()


def test_detections_of_another_number_are_another_run(photos: Path) -> None:
    run(photos, detections=1)
    with pytest.raises(BatchError, match="detections was 1 and is now 'all'"):
        run(photos)


def test_a_point_is_in_pixels_of_the_photo_and_may_miss_in_some(photos: Path) -> None:
    x0, y0, x1, y1 = (4 * drawn().boxes[1, 0]).tolist()
    target = saliency.box(point=((x0 + x1) / 2, (y0 + y1) / 2))
    summary = run(photos, detections=None, target=target)
    missed, found, *rest = rows(summary.folder)
    assert iou(torch.tensor(found["target_box"]), 4 * drawn().boxes[1, 0]) > 0.7
    assert [row["error_kind"] for row in (missed, *rest)] == ["NotFoundError"] * 3


def test_masks_of_regions_are_different_runs(photos: Path) -> None:
    masks = np.zeros((2, 64, 64), bool)
    masks[0, :40], masks[1, :41] = True, True
    given: dict[str, Any] = {"model": saliency.load("shapes_unet"), "layer": "bottleneck", "detections": None}
    run(photos, **given, target=saliency.region("circle", masks[0]))
    with pytest.raises(BatchError, match=r"where=.sha256:\w+.* and is now .*where=.sha256:"):
        run(photos, **given, target=saliency.region("circle", masks[1]))
