"""`saliency compare`: what moved between two runs, measured against runs that differ without a reason."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
import torch
from PIL import Image

import saliency
from saliency.batch import BatchError, batch
from saliency.batch.runs import ImageChange, RunComparison, compare_runs
from saliency.cli import main
from tests.commandline import share_models


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Scenes of circles with a watermark and of other shapes, explained by two networks."""
    home = tmp_path_factory.mktemp("runs")
    (home / "photos").mkdir()
    for index, scene in enumerate(saliency.testbed.draw_scenes(40, seed=2_000_000, task="shortcut").images):
        Image.fromarray(scene.permute(1, 2, 0).numpy()).save(home / "photos" / f"{index}.png")
    for name in ("shapes_cnn", "shapes_shortcut"):
        batch(home / "photos", home / name, name, maps=True)
    batch(home / "photos", home / "small", "shapes_cnn", maps=True, limit=3)
    batch(home / "photos", home / "other_method", "shapes_cnn", ["layer_cam"], maps=True, limit=3)
    batch(home / "photos", home / "without_maps", "shapes_cnn", limit=3)
    return {path.name: path for path in home.iterdir()}


def test_a_copy_of_a_model_changes_nothing(runs: dict[str, Path]) -> None:
    comparison = compare_runs(runs["shapes_cnn"], runs["shapes_cnn"], mirrored=True)
    assert len(comparison.images) == 40
    assert {(change.moved, change.is_changed, change.p) for change in comparison.images} == {(0, False, 1)}
    assert all(change.rank == pytest.approx(1) for change in comparison.images)
    assert all(0 < (change.chance or 0) < 0.5 for change in comparison.images)
    assert not any(row.is_changed for row in comparison)


def test_the_class_with_the_watermark_comes_first(runs: dict[str, Path]) -> None:
    comparison = compare_runs(runs["shapes_cnn"], runs["shapes_shortcut"], mirrored=True)
    first = comparison[0]
    assert (first.name, first.is_changed, first.images) == ("circle", True, 6)
    assert first.changed >= 4  # a circle in ten has no watermark
    assert first.moved > 0.3 > 0.1 > (first.chance or 0)
    assert [change.moved for change in comparison.images] == sorted((c.moved for c in comparison.images), reverse=True)
    assert sum(row.images for row in comparison) == 40


def test_without_a_yardstick_nothing_is_called_changed(runs: dict[str, Path]) -> None:
    comparison = compare_runs(runs["shapes_cnn"], runs["shapes_shortcut"])
    assert {(row.chance, row.p, row.is_changed) for row in comparison} == {(None, None, False)}
    assert "by chance" not in str(comparison)
    assert comparison.unchanged == 1


def test_the_yardstick_is_the_largest_change_of_any_run_without_a_reason(runs: dict[str, Path]) -> None:
    same = [runs["shapes_cnn"], runs["shapes_shortcut"]]
    comparison = compare_runs(runs["shapes_cnn"], runs["shapes_shortcut"], same)
    assert all(change.chance == change.moved for change in comparison.images)
    assert not any(row.is_changed for row in comparison)


def change(index: int, moved: float, chance: float, method: str = "grad_cam") -> ImageChange:
    return ImageChange(str(index), method, ("cat", "cat"), 1.0, moved, chance, ("a", "b"))


def test_images_beyond_all_but_five_percent_of_chance_are_changed() -> None:
    changes = [change(index, 0.0, index / 100) for index in range(99)]
    comparison = RunComparison([*changes[1:], replace(changes[0], moved=0.95)])
    (changed,) = (row for row in comparison.images if row.is_changed)
    assert changed.name == "0"
    assert changed.p == pytest.approx(0.05)
    assert comparison.unchanged == pytest.approx(98 / 99)


def test_a_method_is_measured_against_its_own_changes_by_chance() -> None:
    steady = [change(index, 0.0, 0.01, "grad_cam") for index in range(19)]
    noisy = [change(index, 0.5, 0.5, "rise") for index in range(99)]
    images = RunComparison([*noisy, replace(steady[0], moved=0.2), *steady[1:]]).images
    assert [(row.method, row.name) for row in images if row.is_changed] == [("grad_cam", "0")]


def test_with_too_few_images_to_mark_one_of_them_a_note_says_so() -> None:
    changes = [change(index, 0.9, 0.1) for index in range(18)]
    assert RunComparison(changes).notes == ("grad_cam: fewer than 19 images, so none can be marked",)
    enough = RunComparison([*changes, change(18, 0.9, 0.1)])
    assert (enough.notes, enough.unchanged) == ((), 0)


def test_a_small_change_is_not_called_one_even_if_it_is_significant() -> None:
    small, large = ([change(index, moved, 0.1) for index in range(20)] for moved in (0.15, 0.25))
    assert not RunComparison(small)[0].is_changed
    assert RunComparison(large)[0].is_changed
    assert (RunComparison(small)[0].p or 1) < 0.001


def test_another_crop_of_the_same_map_is_compared_in_pixels_of_the_image(runs: dict[str, Path], tmp_path: Path) -> None:
    photo = runs["photos"] / "0.png"
    with Image.open(photo) as small:
        small.resize((96, 64)).save(tmp_path / "wide.png")
    whole = {"size": (64, 64), "resize": (64, 64), "mean": (0.5,) * 3, "std": (0.5,) * 3}
    for name, preprocess in (("crop", None), ("whole", whole)):
        batch(tmp_path / "wide.png", tmp_path / name, "shapes_cnn", maps=True, target=0, preprocess=preprocess)
    (moved,) = compare_runs(tmp_path / "crop", tmp_path / "whole").images
    assert 0.05 < moved.moved < 0.9
    maps = saliency.Explanation.load(tmp_path / "crop" / "maps" / "wide.grad_cam.safetensors")
    assert maps.boxes[0] is not None
    assert maps.boxes[0].box == (16, 0, 80, 64)


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ("photos", r"no manifest\.json in "),
        ("without_maps", "has no maps of images; .* saliency batch --maps"),
        ("other_method", "no image has a map by the same method"),
    ],
)
def test_folders_that_cannot_be_compared_are_refused(runs: dict[str, Path], second: str, reason: str) -> None:
    with pytest.raises(BatchError, match=reason):
        compare_runs(runs["shapes_cnn"], runs[second])


def test_only_common_images_are_compared(runs: dict[str, Path]) -> None:
    comparison = compare_runs(runs["shapes_cnn"], runs["small"])
    assert len(comparison.images) == 3
    assert comparison.notes == (
        f"left: {runs['shapes_cnn']}; right: {runs['small']}",
        "maps that are not in all runs, left out: 37",
    )


def test_a_model_that_its_name_does_not_load_is_not_mirrored(runs: dict[str, Path], tmp_path: Path) -> None:
    batch(runs["photos"] / "0.png", tmp_path / "run", saliency.load("shapes_cnn"), maps=True)
    with pytest.raises(BatchError, match=r"cannot be loaded again \(weights: not stored.* another seed"):
        compare_runs(tmp_path / "run", tmp_path / "run", mirrored=True)


def test_a_model_is_loaded_again_with_its_file_of_weights_and_its_preprocessing(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    file, preprocess = tmp_path / "weights.pt", {"size": (64, 64), "resize": (64, 64), "mean": (0.5,) * 3}
    torch.save(saliency.load("shapes_shortcut").state_dict(), file)
    options: dict[str, Any] = {"weights": file, "preprocess": preprocess, "categories": list("abcde"), "limit": 2}
    batch(runs["photos"], tmp_path / "run", "shapes_cnn", maps=True, **options)
    same = compare_runs(tmp_path / "run", tmp_path / "run", mirrored=True)
    assert all(0 < (change.chance or 0) < 0.3 for change in same.images)
    torch.save(saliency.load("shapes_cnn").state_dict(), file)
    with pytest.raises(BatchError, match="weights: not stored, or changed since"):
        compare_runs(tmp_path / "run", tmp_path / "run", mirrored=True)


def test_a_model_in_a_file_is_loaded_again_from_another_folder(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import saliency\n\n\ndef make():\n    return saliency.load('shapes_cnn')\n"
    for folder in (tmp_path, tmp_path / "package"):
        folder.mkdir(exist_ok=True)
        (folder / "mine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    batch(runs["photos"], "run", "mine.py:make", maps=True, limit=2)
    batch(runs["photos"], "other", "package.mine:make", maps=True, limit=2)
    monkeypatch.chdir(runs["photos"])
    same = compare_runs(tmp_path / "run", tmp_path / "run", mirrored=True)
    assert all(0 < (change.chance or 0) < 0.3 for change in same.images)
    (tmp_path / "mine.py").write_text(code.replace("cnn", "shortcut"))
    for run in (tmp_path / "run", tmp_path / "other"):
        with pytest.raises(BatchError, match=rf"which ran in {tmp_path}, cannot be loaded again \(model source: "):
            compare_runs(run, run, mirrored=True)


@pytest.mark.parametrize("target", ["CIRCLE", 0, "0", saliency.contrast(0, 1), saliency.probability(0)])
def test_only_scores_of_classes_are_mirrored(runs: dict[str, Path], tmp_path: Path, target: Any) -> None:
    batch(runs["photos"] / "0.png", tmp_path, "shapes_cnn", maps=True, target=target)
    if isinstance(target, str | int):
        (change,) = compare_runs(tmp_path, tmp_path, mirrored=True).images
        assert 0 < (change.chance or 0) < 0.5
    else:
        with pytest.raises(BatchError, match=r"explains targets other than classes; give another run"):
            compare_runs(tmp_path, tmp_path, mirrored=True)


def test_mirrored_images_are_read_as_the_run_read_them(tmp_path: Path) -> None:
    scene = saliency.testbed.draw_scenes(1, seed=5).images[0].float().mean(0).numpy()
    options: dict[str, Any] = {"size": (64, 64), "resize": (64, 64), "mean": (0.5,) * 3, "std": (0.5,) * 3}
    for name, values in (("deep", scene), ("mirrored", scene[:, ::-1])):  # 16 bits, with a window
        Image.fromarray((20 * values).astype(np.uint16)).save(tmp_path / f"{name}.png")
        preprocess = options | {"range": (0, 5100)}
        batch(tmp_path / f"{name}.png", tmp_path / name, "shapes_cnn", maps=True, target=0, preprocess=preprocess)
    maps = [
        saliency.heatmap(saliency.Explanation.load(tmp_path / name / "maps" / f"{name}.grad_cam.safetensors"))[0]
        for name in ("deep", "mirrored")
    ]
    expected = (maps[0] / maps[0].sum() - maps[1].flip(-1) / maps[1].sum()).abs().sum() / 2
    (change,) = compare_runs(tmp_path / "deep", tmp_path / "deep", mirrored=True).images
    assert change.chance == pytest.approx(float(expected), abs=2e-3)
    Image.new("RGB", (64, 64)).save(tmp_path / "deep.png")
    with pytest.raises(BatchError, match=r"deep.png changed after the run in .*run saliency batch again"):
        compare_runs(tmp_path / "deep", tmp_path / "deep", mirrored=True)


def test_the_detections_of_a_class_are_one_class(runs: dict[str, Path], tmp_path: Path) -> None:
    scene = saliency.testbed.draw_scenes(1, seed=1_000_003, task="several").images[0]
    Image.fromarray(scene.permute(1, 2, 0).numpy()).save(tmp_path / "scene.png")
    batch(tmp_path / "scene.png", tmp_path / "run", "shapes_detector", ["layer_cam"], maps=True, detections="all")
    comparison = compare_runs(tmp_path / "run", tmp_path / "run")
    assert {row.name for row in comparison} <= {"circle", "square", "triangle"}
    assert sum(row.images for row in comparison) == len(comparison.images) > len(comparison)


def test_the_command_writes_a_page_json_and_junit(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    share_models(monkeypatch)
    out = tmp_path / "compared"
    folders = [str(runs[name]) for name in ("shapes_cnn", "shapes_shortcut")]
    assert main(["compare", *folders, "--null", "--out", str(out)]) == 0
    assert re.search(r"circle +grad_cam +\d+ .* changed\n", capsys.readouterr().out)
    page = (out / "comparison.html").read_text()
    images = re.findall(r'src="([^"]+)"', page)
    assert len(images) == 80
    assert all((out / image).is_file() for image in images)
    assert page.index('class="changed"') < page.index('class=""')
    content = json.loads((out / "comparison.json").read_text())
    assert (content["classes"][0]["name"], content["classes"][0]["is_changed"]) == ("circle", True)
    suite = ET.parse(out / "comparison.xml").getroot()  # noqa: S314 - written by this test
    failed = [case.get("name") for case in suite if len(case)]
    assert failed[0] == "circle"
    assert suite.get("failures") == str(len(failed))


def test_the_exit_code_is_one_below_the_fraction_of_unchanged_maps(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    share_models(monkeypatch)
    words = ["compare", str(runs["shapes_cnn"]), str(runs["shapes_shortcut"]), "--out", str(tmp_path)]
    assert main([*words, "--null", "--fail-under", "0.9", "--quiet"]) == 1
    assert main([words[0], words[1], *words[1:2], *words[3:], "--null", "--fail-under", "1", "--quiet"]) == 0
    assert main([*words, "--fail-under", "0.9"]) == 2
    assert "needs a yardstick" in capsys.readouterr().err
    assert main([*words, "--null", "--fail-under", "90"]) == 2
    assert "of at most 1" in capsys.readouterr().err
    small = [words[0], str(runs["small"]), *words[2:], "--null", "--fail-under", "0.9"]
    assert main(small) == 2
    assert "needs 19 images by each method, of which grad_cam has fewer" in capsys.readouterr().err
