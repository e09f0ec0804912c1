"""`saliency report --fiftyone` writes the saved maps as heatmaps of FiftyOne, whose database is replaced here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import saliency
from saliency.batch import batch
from saliency.cli import main


@dataclass
class Heatmap:
    """The fields of `fiftyone.Heatmap`."""

    map: np.ndarray[Any, np.dtype[np.float32]]
    range: Sequence[float]


class Sample(dict[str, Heatmap]):
    """A sample, which is saved when it is in a dataset."""

    def __init__(self, filepath: str) -> None:
        self.filepath, self.saves = filepath, 0

    def save(self) -> None:
        self.saves += 1


class Dataset(dict[str, Sample]):
    """Samples by the path of the image."""

    persistent = False

    def add_sample(self, sample: Sample) -> None:
        self[sample.filepath] = sample


@pytest.fixture
def dataset(monkeypatch: pytest.MonkeyPatch) -> Dataset:
    created = Dataset()

    def load_dataset(name: str, create_if_necessary: bool) -> Dataset:
        if name != "scans":
            raise ConnectionError("no database")
        return created

    public = SimpleNamespace(load_dataset=load_dataset, Sample=Sample, Heatmap=Heatmap)
    monkeypatch.setitem(sys.modules, "fiftyone", public)
    return created


def test_each_map_is_a_heatmap_of_the_whole_image_in_the_field_of_its_method(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenes = saliency.testbed.draw_scenes(2, seed=0).images
    for index, scene in enumerate(scenes):
        Image.fromarray(scene.permute(1, 2, 0).numpy()).resize((96, 64)).save(tmp_path / f"{index}.png")
    known = Sample(str(tmp_path / "1.png"))
    dataset.add_sample(known)
    run = str(tmp_path / "run")
    batch([tmp_path / "0.png", tmp_path / "1.png"], run, "shapes_cnn", ["grad_cam", "lrp"], maps=True)
    assert main(["report", run, "--fiftyone", "scans"]) == 0
    assert "written: 4 maps to the dataset scans of FiftyOne" in capsys.readouterr().out
    assert (dataset.persistent, list(dataset)) == (True, [str(tmp_path / "1.png"), str(tmp_path / "0.png")])
    assert set(known) == {"grad_cam", "lrp"}
    label, explanation = known["grad_cam"], saliency.Explanation.load(Path(run, "maps", "1.grad_cam.safetensors"))
    inner = label.map[:, 43:213]  # the model saw 64 of 96 columns
    expected = torch.nn.functional.interpolate(saliency.heatmap(explanation)[None], inner.shape, mode="bilinear")[0, 0]
    assert torch.nn.functional.cosine_similarity(torch.tensor(inner).ravel(), expected.ravel(), dim=0) > 0.999
    assert not label.map[:, :42].any()
    assert label.range[0] == 0 < label.range[1]
    assert known["lrp"].range[0] == -known["lrp"].range[1]


def test_each_detection_has_a_field(dataset: Dataset, tmp_path: Path) -> None:
    scene = saliency.testbed.draw_scenes(1, seed=1_000_003, task="several").images[0]
    Image.fromarray(scene.permute(1, 2, 0).numpy()).save(tmp_path / "scene.png")
    model = saliency.load("shapes_detector")
    batch(tmp_path / "scene.png", tmp_path / "run", model, ["layer_cam"], maps=True, detections=2)
    assert main(["report", str(tmp_path / "run"), "--fiftyone", "scans", "--quiet"]) == 0
    assert set(dataset[str(tmp_path / "scene.png")]) == {"layer_cam_0", "layer_cam_1"}


def test_several_images_of_one_file_are_refused_instead_of_replaced(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
    (tmp_path / "list.csv").write_text("path,target\nred.png,0\nred.png,1\n")
    batch(tmp_path / "list.csv", tmp_path / "run", "shapes_cnn", maps=True)
    assert main(["report", str(tmp_path / "run"), "--fiftyone", "scans"]) == 2
    assert "several images of one file" in capsys.readouterr().err
    assert not dataset


@pytest.mark.slow
def test_the_public_classes_have_what_is_replaced_here() -> None:
    fiftyone = pytest.importorskip("fiftyone")  # 1.22.1, without a database
    assert "create_if_necessary" in signature(fiftyone.load_dataset).parameters
    sample = fiftyone.Sample(filepath="/photos/cat.png")
    sample["grad_cam"] = fiftyone.Heatmap(map=np.zeros((2, 2), np.float32), range=[-1, 1])
    assert (sample.filepath, sample["grad_cam"].map.shape) == ("/photos/cat.png", (2, 2))
    assert {"add_sample", "persistent", "__getitem__"} < set(dir(fiftyone.Dataset))


def test_without_a_database_the_error_says_so(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
    batch(tmp_path / "red.png", tmp_path / "run", "shapes_cnn", maps=True)
    assert main(["report", str(tmp_path / "run"), "--fiftyone", "other"]) == 2
    assert "the dataset other of FiftyOne cannot be opened: no database" in capsys.readouterr().err
