"""The promises of `saliency export`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import saliency
from saliency.cli import main
from tests.commandline import share_models


@pytest.fixture(autouse=True)
def _one_model_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    share_models(monkeypatch)


def test_a_file_is_written_with_the_names_of_the_classes(tmp_path: Path) -> None:
    file = tmp_path / "model.pt2"
    words = ["shapes_cnn", "-m", "grad_cam", "--target", "1", "-o", str(file)]
    assert main(["export", *words]) == 0
    extra = {"metadata.json": ""}
    program = torch.export.load(file, extra_files=extra).module()
    scenes = saliency.testbed.draw_scenes(1, seed=1)
    method = saliency.GradCAM(saliency.load("shapes_cnn"))
    batch = method.read(scenes.images)
    torch.testing.assert_close(program(batch.inputs)[2], saliency.heatmap(method.attribute(scenes.images, 1)))
    metadata = json.loads(extra["metadata.json"])
    assert json.loads(metadata["classes"]) == list(method.categories or ())


def test_another_ending_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "shapes_cnn", "-m", "grad_cam", "-o", str(tmp_path / "model.bin")]) == 2
    assert ".pt2 or .onnx" in capsys.readouterr().err
