"""Targets on the command line, and the answers to the options that were targets before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from saliency.cli import main
from saliency.testbed.shapes import Scenes, draw_scenes
from tests.commandline import share_models

SCALE = 4  # pixels of the photo for a pixel of the model's input
DETECTOR = ("--model", "shapes_detector", "--layer", "backbone.layer2")
UNET = ("--model", "shapes_unet", "--layer", "bottleneck")
JOINTS = ("--model", "shapes_keypoints", "--layer", "bottleneck")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _one_model_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    share_models(monkeypatch)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def go(*words: object) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        return (code, *capsys.readouterr())

    return go


@pytest.fixture(scope="module")
def scenes() -> Scenes:
    return draw_scenes(2, seed=1_000_009, task="corners")


@pytest.fixture
def photo(scenes: Scenes, tmp_path: Path) -> Path:
    image = Image.fromarray(scenes.images[0].permute(1, 2, 0).numpy())
    image.resize((64 * SCALE, 64 * SCALE), 0).save(tmp_path / "scene.png")
    return tmp_path / "scene.png"


def place(scenes: Scenes) -> list[float]:
    """The box of the only triangle in pixels of the photo."""
    box: list[float] = (SCALE * scenes.boxes[0, 0]).tolist()
    return box


@pytest.mark.parametrize("way", ["box", "point", "box of a class", "rank of a class", "class"])
def test_a_detection_is_named_in_the_table_and_keeps_the_file_name(
    way: str, run: Run, photo: Path, scenes: Scenes
) -> None:
    x0, y0, x1, y1 = place(scenes)
    target = {
        "box": f"box:{x0},{y0},{x1},{y1}",
        "point": f"box:{(x0 + x1) / 2},{(y0 + y1) / 2}",
        "box of a class": f"box:triangle:{x0},{y0},{x1},{y1}",
        "rank of a class": "box:triangle:0",
        "class": "box:triangle",
    }[way]
    code, out, err = run("explain", *DETECTOR, "--target", target, photo, "--out", photo.parent / "maps")
    assert (code, err) == (0, "")
    found = [float(edge) for edge in out.partition("triangle at (")[2].partition(")")[0].split(", ")]
    assert np.abs(np.subtract(found, place(scenes))).max() < 8
    assert "green: the explained box" in out
    assert [file.name for file in (photo.parent / "maps").iterdir()] == ["scene.grad_cam.png"]


def test_a_region_is_a_mask_a_border_or_the_predicted_pixels(run: Run, photo: Path, scenes: Scenes) -> None:
    mask = Image.fromarray(255 * scenes.masks[0, 0].byte().numpy()).resize((64 * SCALE, 64 * SCALE), 0)
    mask.save(photo.parent / "mask.png")
    x0, y0, x1, y1 = place(scenes)
    scores = {}
    for where in ("predicted", "border", photo.parent / "mask.png", f"{x0},{y0},{x1},{y1}", "200,9"):
        out = photo.parent / "maps"
        words = ("--target", f"region:triangle:{where}", "--maps", "--restart", "--out", out)
        code, _, err = run("batch", photo, *UNET, *words)
        assert (code, err) == (0, "")
        row = json.loads((out / "manifest.jsonl").read_text())
        scores[str(where)] = row["score"]
        kind = "border of triangle" if where == "border" else "region of triangle"
        assert row["name"].startswith(kind)
        assert (out / "overlays" / "scene.grad_cam.png").is_file()
    predicted, _, masked, boxed, elsewhere = scores.values()
    assert masked == pytest.approx(predicted, rel=0.05)
    assert masked > boxed > elsewhere


def test_a_joint_is_named(run: Run, photo: Path) -> None:
    code, out, err = run("explain", photo, *JOINTS, "-t", "keypoint:top", "--out", photo.parent / "maps")
    assert (code, err) == (0, "")
    assert " top " in out


@pytest.mark.slow
def test_the_card_and_the_comparison_are_of_the_box(run: Run, photo: Path) -> None:
    code, out, err = run("trust", photo, *DETECTOR, "-t", "box:triangle:0", "--seconds", 1, "-o", "-")
    assert (code, err) == (0, "")
    assert "Trust card of grad_cam for triangle at (" in json.loads(out)["title"]
    words = ("-t", "box:0", "--metrics", "gini", "--out", photo.parent / "measured")
    assert run("evaluate", photo, *DETECTOR, *words)[0] == 0


def test_all_detections_of_a_folder_are_drawn_and_an_empty_photo_is_no_failure(run: Run, photo: Path) -> None:
    Image.new("RGB", (64, 64), (128, 128, 128)).save(photo.parent / "empty.png")
    out = photo.parent / "maps"
    code, said, err = run("batch", photo, photo.parent / "empty.png", *DETECTOR, "--detections", "all", "--out", out)
    assert code == 0
    assert "5 of 5 detections done" in said
    assert err == f"saliency: {photo.parent / 'empty.png'} by grad_cam: " + (
        "there is no detection with the index 0; the model found nothing\n"
    )
    names = [f"scene.{rank}.grad_cam.png" for rank in range(4)]
    assert sorted(file.name for file in (out / "overlays").iterdir()) == names


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("-t box:1,2,3", 'got the target "box:1,2,3"; expected box:PLACE, box:CLASS or box:CLASS:PLACE'),
        ("-t box:30,2,10,40", "left,top,right,bottom in pixels of the image, with left < right and top < bottom"),
        ("-t region:cat:boarder", 'got the target "region:cat:boarder"; expected region:CLASS or region:CLASS:PIXELS'),
        ("-t region:cat:missing.png", "an existing mask file"),
        ("-t keypoint:nose:left", "expected keypoint:NAME or keypoint:NAME:PERSON, where PERSON is a rank from 0"),
        ("-t text:", 'got the target "text:"; expected text: before a text'),
        ("-t box:0 -t box:1", "got the targets box:0, box:1; several targets are possible only as texts"),
        ("-t text:cat -t box:1", "got the targets text:cat, box:1; several"),
        ("--detections 0", "detections=0 is not a whole number of at least 1"),
        ("--detections every", "argument --detections: every"),
        ("--detections all -t box:0", "detections= explains boxes of all detections; target= can only be their class"),
    ],
)
def test_wrong_targets_are_named_before_a_model_is_loaded(
    words: str, why: str, run: Run, photo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saliency.batch.network.load", None)
    code, out, err = run("batch", photo, *DETECTOR, *words.split(), "--out", photo.parent / "maps")
    assert (code, out) == (2, "")
    assert why in err
    assert err.count("saliency: ") == 1
    assert not (photo.parent / "maps").exists()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((*DETECTOR, "-t", "box:900,2"), "the point (900, 2) is outside the image of 256 x 256 pixels"),
        ((*DETECTOR, "-t", "box:pentagon:10,10"), 'no class "pentagon" among 3 classes'),
        ((*UNET, "-t", "region:pentagon"), 'no class "pentagon" among 4 classes'),
        ((*UNET, "-t", "region:circle:mask.png"), "the region has shape (9, 9); expected (256, 256)"),
        ((*JOINTS, "-t", "keypoint:nose"), 'no class "nose" among 3 classes'),
        (("--model", "shapes_cnn", "-t", "box:0"), "no adapter reads boxes from this output"),
    ],
)
def test_a_target_that_a_model_or_photo_does_not_have_is_one_clear_line(
    words: tuple[str, ...], why: str, run: Run, photo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(photo.parent)
    Image.new("L", (9, 9), 255).save("mask.png")
    code, _, err = run("explain", photo, *words, "--out", photo.parent / "maps")
    assert code in (1, 2)
    assert why in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("explain --box 1,2,3,4", "--box 1,2,3,4 is written --target box:1,2,3,4"),
        ("batch --point=1,2", "--point 1,2 is written --target box:1,2"),
        ("evaluate --index 0", "--index 0 is written --target box:0"),
        ("trust --region cat", "--region cat is written --target region:cat"),
        ("explain --where border", "--where border is written --target region:CLASS:border"),
        ("serve --whole-aspect", "--whole-aspect is written --whole aspect"),
        ("batch --colormap bwr", "--colormap bwr is written --set colormap=bwr"),
        ("evaluate --set-metric steps=2", "--set-metric steps=2 is written --set metric.steps=2"),
        ("evaluate --masks folder", "--masks folder is written --objects folder"),
        ("trust --html card.html", "--html card.html is written --out card.html"),
        ("trust --json", "--json is written --out -"),
        ("explain --class tabby", "--class tabby is written --target tabby"),
        ("explain --alpha .5", "--alpha .5 is written --set opacity=.5"),
        ("explain --cmap bwr", "--cmap bwr is written --set colormap=bwr"),
        ("explain --range 0,1", "--range 0,1 is written --preprocess range=0,1"),
        ("explain --target-layer layer3", "--target-layer layer3 is written --layer layer3"),
        ("batch --checkpoint best.pt", "--checkpoint best.pt is written --weights best.pt"),
        ("batch --cuda", "--cuda is written --device cuda"),
        ("layers --model resnet50", "--model resnet50 is written resnet50"),
        ("trust --image cat.jpg", "--image cat.jpg is written cat.jpg"),
        ("methods --cuda", 'no option "--cuda"'),
        ("explain --html card.html", 'no option "--html"'),
        ("models --box 1,2", 'no option "--box"'),
    ],
)
def test_an_option_of_an_earlier_version_is_answered_by_the_new_spelling(words: str, answer: str, run: Run) -> None:
    code, out, err = run(*words.split(), "photo.jpg")
    assert (code, out) == (2, "")
    assert err.startswith(f"saliency: {answer}")


def test_a_text_with_spaces_is_quoted_in_the_new_spelling(run: Run) -> None:
    assert "--text 'a cat' is written --target 'text:a cat'" in run("explain", "photo.jpg", "--text", "a cat")[2]


def test_an_image_after_whole_or_a_target_is_an_image(run: Run, photo: Path) -> None:
    out = photo.parent / "maps"
    for whole, value in ((("--whole",), True), (("--whole", "aspect"), "aspect")):
        words = ("--model", "shapes_cnn", "-t", "circle", *whole, photo, "--restart", "--out", out)
        assert run("batch", *words)[0] == 0
        assert json.loads((out / "manifest.json").read_text())["fingerprint"]["whole"] == value
