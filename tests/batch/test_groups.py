"""`saliency groups`: images of a class that a network recognises by something else are a group."""

from __future__ import annotations

import csv
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import saliency
from saliency.batch import BatchError, batch
from saliency.batch.groups import groups
from saliency.batch.report import report
from saliency.cli import main
from saliency.errors import MethodError
from saliency.testbed import draw_scenes

MARKED = 6


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 circles, of which the first six have a watermark in the corner farthest from the objects."""
    home = tmp_path_factory.mktemp("groups")
    (home / "photos").mkdir()
    scenes = draw_scenes(600, seed=3_000_000, task="shortcut", watermarked=(0.1, 0, 0, 0, 0))
    circles, marked = scenes.labels == 0, scenes.watermark.flatten(1).any(1)
    chosen = [*(circles & marked).nonzero()[:MARKED, 0], *(circles & ~marked).nonzero()[: 80 - MARKED, 0]]
    for number, index in enumerate(chosen):
        Image.fromarray(scenes.images[index].permute(1, 2, 0).numpy()).save(home / "photos" / f"{number:02}.png")
    batch(home / "photos", home / "run", "shapes_shortcut", maps=True, target=0)
    return home / "run"


def numbers(examples: tuple[str, ...]) -> set[int]:
    return {int(Path(overlay).name[:2]) for overlay in examples}


def test_the_images_with_the_watermark_are_the_first_group_by_channels(run: Path) -> None:
    table = groups(run)
    first, others = table
    assert numbers(first.examples) == set(range(MARKED))
    assert (first.images, others.images) == (MARKED, 80 - MARKED)
    assert first.fraction == pytest.approx(MARKED / 80)
    assert first.p <= 0.05
    assert first.stability > 0.7
    assert (first.probability or 0) > 0.99
    assert torch.tensor(first.mean_map).sum() == pytest.approx(1)
    assert str(table) == str(groups(run))  # the same draws


def test_groups_have_an_accuracy_if_the_targets_are_labels(run: Path, tmp_path: Path) -> None:
    scenes, right = draw_scenes(200, seed=3_000_200), 0
    images = [scenes.images[index] for shape in (0, 1) for index in (scenes.labels == shape).nonzero()[:20, 0]]
    network: Any = saliency.load("shapes_cnn")
    for number, image in enumerate(images):
        photo = Image.fromarray(image.permute(1, 2, 0).numpy())
        photo.save(tmp_path / f"{number}.png")
        right += saliency.VanillaGradient(network).attribute(photo).target[0] == 0
    (tmp_path / "list.csv").write_text("path,target\n" + "".join(f"{number}.png,0\n" for number in range(40)))
    batch(tmp_path / "list.csv", tmp_path / "labelled", "shapes_cnn", maps=True)
    table = groups(tmp_path / "labelled")
    assert sum(group.images for group in table) == 40
    assert 0 < right < 40
    accuracies = [group.accuracy for group in table]
    assert sum(group.images * (accuracy or 0) for group, accuracy in zip(table, accuracies, strict=True)) == right
    assert None not in accuracies
    assert all(group.accuracy == 1 for group in groups(run))  # target=0 for all images
    assert {group.accuracy for group in groups(run, "places")} == {None}
    batch(run.parent / "photos", tmp_path / "tops", "shapes_shortcut", maps=True)
    assert {group.accuracy for group in groups(tmp_path / "tops")} == {None}


def test_a_watermark_at_different_places_is_not_a_group_by_places(run: Path) -> None:
    assert not [group for group in groups(run, "places") if group.images == MARKED]


def test_the_places_are_those_of_the_image_and_not_of_the_crop(run: Path, tmp_path: Path) -> None:
    for photo in (run.parent / "photos").iterdir():
        wide = Image.new("RGB", (128, 64))
        with Image.open(photo) as scene:
            wide.paste(scene, (32, 0))
        wide.save(tmp_path / photo.name)
    batch(tmp_path, tmp_path / "run", "shapes_shortcut", maps=True, target=0)
    table = groups(tmp_path / "run", "places")
    assert len(table) > 1
    for group in table:
        cells = torch.tensor(group.mean_map)
        assert cells.sum() == pytest.approx(1)
        assert not cells[:, [0, 1, 6, 7]].any()  # the model saw the middle half


def test_the_command_writes_a_page_and_a_table(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["groups", str(run), "--view", "places"]) == 0
    assert "written:" in capsys.readouterr().out
    page = (run / "groups.html").read_text()
    overlays = re.findall(r'src="(overlays/[^"]+)"', page)
    assert overlays
    assert all((run / overlay).is_file() for overlay in overlays)
    with (run / "groups.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sum(int(row["images"]) for row in rows) == 80
    assert page.count("<figure") == len(rows)


def test_a_class_without_groups_is_left_out(tmp_path: Path) -> None:
    scenes = draw_scenes(200, seed=3_000_100)
    (tmp_path / "photos").mkdir()
    for index in (scenes.labels == 0).nonzero()[:30, 0].tolist():
        Image.fromarray(scenes.images[index].permute(1, 2, 0).numpy()).save(tmp_path / "photos" / f"{index}.png")
    batch(tmp_path / "photos", tmp_path / "run", "shapes_cnn", maps=True, target=0)
    table = groups(tmp_path / "run")
    assert not [group for group in table if group.p <= 0.05]


@pytest.mark.slow
def test_more_draws_make_groups_of_many_classes_significant(run: Path, tmp_path: Path) -> None:
    methods = ["grad_cam", "layer_cam", "hires_cam", "xgrad_cam", "grad_cam_plus_plus", "fused_cam"]  # several layers
    batch(run.parent / "photos", tmp_path, "shapes_shortcut", methods, maps=True, target=0)
    table = groups(tmp_path)
    first = {group.method: group for group in table if set(range(MARKED)) == numbers(group.examples)}
    assert {*first, "fused_cam"} == set(methods)
    assert all(group.p <= 0.05 for group in first.values())


def test_the_page_of_the_run_leads_to_the_groups(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("groups.*"))
    assert '"groups":null' in report(tmp_path / "run").read_text()
    assert main(["groups", str(tmp_path / "run"), "--view", "places", "--quiet"]) == 0
    assert '"groups":"groups.html"' in (tmp_path / "run" / "index.html").read_text()
    batch(run.parent / "photos", tmp_path / "run", "shapes_cnn", limit=1, restart=True)
    assert not (tmp_path / "run" / "groups.html").exists()  # its images are gone


def test_a_model_that_its_name_does_not_load_is_an_error_with_the_cure(run: Path, tmp_path: Path) -> None:
    batch(run.parent / "photos", tmp_path, saliency.load("shapes_cnn"), maps=True, target=0)
    with pytest.raises(BatchError, match=r"cannot be loaded again \(weights: not stored.*--view places needs no model"):
        groups(tmp_path)


def test_folders_and_seeds_that_do_not_fit_are_refused_before_the_work(run: Path, tmp_path: Path) -> None:
    batch(run.parent / "photos", tmp_path, "shapes_cnn", maps=True, target=0, limit=19)
    with pytest.raises(BatchError, match="no class with 20 maps by one method"):
        groups(tmp_path)
    with pytest.raises(MethodError, match="seed=-1 is not a whole number of at least 0"):
        groups(tmp_path, seed=-1)
