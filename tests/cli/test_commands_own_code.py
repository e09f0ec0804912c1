"""Code of the user that changes the current folder, or calls sys.exit, in every command that runs a model."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from saliency.cli import main
from tests.commandline import copies

MODEL = """
import os, sys
import torch
from torch import nn
from saliency import Preprocess

class Net(nn.Sequential):
    def forward(self, x):
        {in_forward}
        return super().forward(x)

def make():
    {in_make}
    torch.manual_seed(0)
    net = Net(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    net.preprocess = Preprocess(size=(16, 16), resize=16)
    return net
"""
EXITS = "sys.exit(0) if x.mean() > 1.9 else None"  # on a white image
PREPROCESS = """
plain = make

def exits(image):
    if image.size == (50, 50):
        sys.exit(0)
    return Preprocess(size=(16, 16), resize=16)(image)

def make():
    net = plain()
    net.preprocess = exits
    return net
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    copies(tmp_path / "here" / "photos", "cat.png", "dog.png")
    monkeypatch.chdir(tmp_path / "here")


def own_model(in_make: str = "pass", in_forward: str = "pass") -> str:
    Path("mine.py").write_text(MODEL.format(in_make=in_make, in_forward=in_forward))
    return "mine.py:make"


COMMANDS = {
    "explain": (
        ["photos", "--model", "mine.py:make", "-m", "grad_cam", "--sheet"],
        ["out/cat.grad_cam.png", "out/sheet.png"],
    ),
    "batch": (
        ["photos", "--model", "mine.py:make", "-m", "grad_cam"],
        ["out/overlays/cat.grad_cam.png", "out/index.html"],
    ),
    "evaluate": (
        ["photos", "--model", "mine.py:make", "-m", "grad_cam", "--metrics", "gini", "--out", "measured"],
        ["measured/evaluation.html", "measured/results/cat.grad_cam.json"],
    ),
    "trust": (
        [
            "photos/cat.png",
            "--model",
            "mine.py:make",
            "-m",
            "grad_cam",
            "--seconds",
            "0.1",
            "--out",
            "card.html",
            "--out",
            "card.png",
        ],
        ["card.html", "card.png"],
    ),
    "export": (["mine.py:make", "-m", "grad_cam", "--image", "photos/cat.png", "-o", "model.pt2"], ["model.pt2"]),
    "layers": (["mine.py:make", "--image", "photos/cat.png"], []),
}


@pytest.mark.parametrize("where", ["in_make", "in_forward"])
@pytest.mark.parametrize("name", COMMANDS)
def test_paths_are_those_of_the_folder_where_the_command_started(name: str, where: str, tmp_path: Path) -> None:
    words, files = COMMANDS[name]
    own_model(**{where: f"os.chdir({str(tmp_path / 'elsewhere')!r})"})
    assert main([name, *words]) == 0
    assert not list((tmp_path / "elsewhere").iterdir())
    assert [file for file in files if not (tmp_path / "here" / file).is_file()] == []


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("code", ["0", "'why'"])
def test_a_model_that_calls_exit_is_a_failure_of_the_command(
    name: str, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words, _ = COMMANDS[name]
    own_model(in_forward=f"sys.exit({code})")
    assert main([name, *words]) in (1, 2)
    said = capsys.readouterr().err
    assert "SystemExit" in said or "sys.exit" in said
    assert code.strip("'") in said


@pytest.mark.parametrize("name", ["explain", "batch", "evaluate"])
@pytest.mark.parametrize("where", ["forward", "preprocess"])
def test_a_model_that_calls_exit_for_one_image_explains_the_others(
    name: str, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words, files = COMMANDS[name]
    Image.new("RGB", (50, 50), "white").save("photos/white.png")
    if where == "forward":
        own_model(in_forward=EXITS)
    else:
        own_model()
        with Path("mine.py").open("a") as file:
            file.write(PREPROCESS)
    assert main([name, *words]) == 1
    said = capsys.readouterr().err
    assert "white.png" in said
    assert "SystemExit: 0" in said
    assert [file for file in files if not Path(file).is_file()] == []
