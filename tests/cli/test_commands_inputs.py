"""Several inputs on the command line: `saliency explain rgb=scene.png depth=depth.npy`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import saliency
from saliency.cli import main
from saliency.testbed import CLASSES, draw_rgbd


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    scenes = draw_rgbd(1, seed=1_000_003, task="depth")
    Image.fromarray(scenes.inputs["rgb"][0].permute(1, 2, 0).numpy()).save(tmp_path / "scene.png")
    np.save(tmp_path / "depth.npy", scenes.inputs["depth"][0].numpy())
    files = (f"rgb={tmp_path / 'scene.png'}", f"depth={tmp_path / 'depth.npy'}")
    target = CLASSES[int(scenes.answers[0])]
    return ["explain", *files, "--model", "shapes_rgbd", "--target", target, "-o", str(tmp_path / "maps")]


def test_a_case_has_shares_and_one_overlay(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "-m", "occlusion", "attention_rollout"]) == 1
    out, err = capsys.readouterr()
    assert "attention_rollout" in err
    line = next(line for line in out.splitlines() if "by occlusion: " in line)
    shares = {word.split()[0]: int(word.split()[1]) for word in line.partition("by occlusion: ")[2].split(", ")}
    inputs = {"rgb": tmp_path / "scene.png", "depth": np.load(tmp_path / "depth.npy")}
    expected = saliency.Occlusion(saliency.load("shapes_rgbd")).attribute(inputs, words[6]).shares
    assert shares == {name: round(100 * float(share)) for name, share in expected.items()}
    assert [file.name for file in (tmp_path / "maps").iterdir()] == ["scene.occlusion.png"]
    with Image.open(tmp_path / "maps" / "scene.occlusion.png") as overlay:
        assert overlay.size[0] == 64 + 2 + 64


def test_what_is_of_one_image_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--sheet", "--maps", "--trust"):
        assert main([*words, option]) == 2
        assert "are for models of one image, and" in capsys.readouterr().err
    assert main([*words[:2], *words[3:]]) == 1
    assert "missing 1 required positional argument: 'depth'" in capsys.readouterr().err
    assert main(["explain", "rgb=no.png", *words[2:]]) == 1
    assert "no.png cannot be read" in capsys.readouterr().err
