"""Trust cards of a batch run: their files and rows, resuming, and cards that fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import saliency
from saliency.batch import BatchError, network
from saliency.batch.sources import find_images
from saliency.cli import main
from saliency.render.overlay import save_drawing
from tests.batchwork import Tiny, noise, photos, quick, rows

METHODS = ("grad_cam", "vanilla_gradient")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    photos(tmp_path / "in", 2)
    return tmp_path / "in"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The methods of the cards that are measured, with few samples."""
    names = []

    def spy(method: saliency.Attribution, *arguments: Any, **options: Any) -> Any:
        names.append(method.name)
        return saliency.trust(method, *arguments, **options | {"seconds": 0.001})

    monkeypatch.setattr(network, "trust", spy)
    return names


def broken(*arguments: Any, **options: Any) -> Any:
    raise saliency.errors.MethodError("a card is too much to ask")


def test_each_overlay_has_a_card_and_its_row_the_verdicts(tmp_path: Path) -> None:
    image, out = noise(tmp_path / "a.png", 0), tmp_path / "out"
    quick(image, out, trust=True)
    (row,) = rows(out)
    card = saliency.trust(saliency.GradCAM(Tiny()), image)
    assert {name: each["verdict"] for name, each in row["trust"].items()} == {each.name: each.verdict for each in card}
    assert row["trust"]["weights"]["p"] == card["weights"].p
    assert row["trust"]["deletion"]["value"] == pytest.approx(card["deletion"].value)
    assert row["trust"]["deletion"]["controls"] == pytest.approx(card["deletion"].controls)
    written = json.loads((out / "trust" / "a.grad_cam.json").read_text())
    assert [each["name"] for each in written["properties"]] == list(row["trust"])
    assert (out / "trust" / "a.grad_cam.html").read_text().startswith("<!doctype html>")
    assert json.loads((out / "manifest.json").read_text())["batch_sizes"] == [[0, 4]]


def test_cards_of_one_image_share_the_scores_of_equal_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards: dict[str, Any] = {}

    def keep(method: saliency.Attribution, *arguments: Any, **options: Any) -> Any:
        return cards.setdefault(method.name, saliency.trust(method, *arguments, **options))

    monkeypatch.setattr(network, "trust", keep)
    quick(noise(tmp_path / "a.png", 0), tmp_path / "out", methods=["grad_cam", "layer_cam"], trust=True)
    for name, cls in (("grad_cam", saliency.GradCAM), ("layer_cam", saliency.LayerCAM)):
        alone = saliency.trust(cls(Tiny()), tmp_path / "a.png")
        assert [each.value for each in cards[name]] == pytest.approx([each.value for each in alone], nan_ok=True)
    first, second = ({each.metric: each.passes for each in cards[name].measurements.values()} for name in cards)
    assert second["infidelity"] == 0  # the squares
    assert first["deletion"] - second["deletion"] == 8  # the edges, also smoothed, the Gaussian and the contrast


def test_a_batch_is_one_image_unless_its_size_is_given(source: Path, tmp_path: Path, measured: list[str]) -> None:
    quick(source, tmp_path / "out", trust=True, batch_size=None, workers=1)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["batch_sizes"] == [[0, 1]]


def test_a_rerun_measures_only_the_cards_that_are_missing(source: Path, tmp_path: Path, measured: list[str]) -> None:
    out = tmp_path / "out"
    quick(source, out, methods=METHODS, trust=True, limit=1)
    assert measured == list(METHODS)
    (out / "trust" / "00.vanilla_gradient.json").unlink()
    assert quick(source, out, methods=METHODS, trust=True, limit=1).fresh == 1
    assert measured == [*METHODS, "vanilla_gradient"]
    with pytest.raises(BatchError, match=r"trust of grad_cam was \{'seconds': None\} and is now None"):
        quick(source, out)
    quick(source, out, restart=True)
    assert not (out / "trust" / "00.vanilla_gradient.html").exists()


def test_a_card_that_fails_leaves_the_overlay_and_is_retried(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[str]
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(network, "trust", broken)
        summary = quick(source, out, trust=True, limit=1)
    why = "no trust card: a card is too much to ask"
    assert summary.failures == ((str(source / "00.png"), "grad_cam", why),)
    assert (summary.done, summary.failed) == (1, 1)
    assert all((out / row["overlay"]).is_file() and row["trust"] is None for row in rows(out))
    assert quick(source, out, trust=True, retry=True, limit=1).failed == 0
    assert all(row["error"] is None and row["trust"] for row in rows(out))


def test_explain_shows_an_overlay_whose_card_failed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(network, "load", lambda name, weights: Tiny())
    monkeypatch.setattr(network, "trust", broken)
    assert main(["explain", str(source / "00.png"), "--trust", "--out", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "00.png by grad_cam: no trust card: a card is too much to ask" in err
    assert str(tmp_path / "00.grad_cam.png") in out
    assert "1 overlay of 1 image" in out


def test_the_test_of_the_class_takes_images_of_the_folder_unless_the_package_has_photos(tmp_path: Path) -> None:
    photos(tmp_path / "in", 5)
    first, *others = find_images(tmp_path / "in").entries
    model, imagenet = Tiny(), [f"class {number}" for number in range(1000)]
    paths = [Path(entry.path) for entry in others]
    assert network.other_images(saliency.GradCAM(model), first) == paths
    assert network.other_images(saliency.GradCAM(model, categories=imagenet), first) is None
    paths[0].unlink()
    paths[1].unlink()
    assert network.other_images(saliency.GradCAM(model), first) is None


def test_the_test_of_the_class_takes_neither_damaged_files_nor_drawings_nor_shards(tmp_path: Path) -> None:
    photos(tmp_path / "in", 4)
    (tmp_path / "in" / "00a.png").write_bytes(b"no image")
    save_drawing(Image.new("RGB", (40, 30)), tmp_path / "in" / "00.grad_cam.png")
    (entry,), method = find_images(tmp_path / "in" / "00.png").entries, saliency.GradCAM(Tiny())
    assert network.other_images(method, entry) == [tmp_path / "in" / f"0{number}.png" for number in (1, 2, 3)]
    assert network.other_images(method, entry._replace(offset=512)) is None
