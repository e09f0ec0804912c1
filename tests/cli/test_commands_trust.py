"""The trust card on the command line: `saliency trust` and `saliency explain --trust`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from saliency import Preprocess
from saliency.cli import main
from saliency.testing import tiny_model
from tests.commandline import copies, share_models

GRADIENT = ("-m", "vanilla_gradient", "--target", "1")
UNLIMITED = ("--seconds", "1e9")


@pytest.fixture(autouse=True)
def _small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    share_models(monkeypatch)
    model: Any = tiny_model()
    model.preprocess, model.categories = Preprocess(size=(32, 32), resize=32, mean=(0.5,) * 3, std=(0.5,) * 3), None
    monkeypatch.setattr("saliency.batch.network.load", lambda name, weights: model)


@pytest.fixture
def photo(tmp_path: Path) -> str:
    return str(copies(tmp_path / "photos", "coffee.jpg")[0])


@pytest.mark.slow
def test_trust_prints_the_card_and_writes_it_as_a_page_and_a_figure(
    photo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, figure = tmp_path / "card.html", tmp_path / "card.png"
    assert main(["trust", photo, *GRADIENT, *UNLIMITED, "--out", str(page), "-o", str(figure)]) == 0
    said = capsys.readouterr()
    assert "Trust card of vanilla_gradient" in said.out
    assert "marks what the model learned to use" in said.out
    assert (page.stat().st_size > 10_000, figure.read_bytes()[1:4]) == (True, b"PNG")
    assert f"written: {page}\nwritten: {figure}\n" in said.out
    assert said.err == ""


def test_trust_prints_json_of_a_seed_for_programs(photo: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trust", *GRADIENT, photo, "-o", "-", "--seed", "3", *UNLIMITED]) == 0
    card = json.loads(capsys.readouterr().out)
    assert (card["seed"], len(card["properties"])) == (3, 9)


def test_trust_takes_other_images_and_a_number_of_draws(
    photo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = list(map(str, copies(tmp_path / "others", "camera.jpg", "chelsea.jpg", "rocket.jpg")))
    command = ["trust", photo, *GRADIENT, "-o", "-", "--draws", "29", "--others", *others, "--seconds", "1e-3"]
    assert main(command) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["properties"]}
    assert rows["weights"]["settings"]["draws"] == 29
    assert "the model finds" in rows["class"]["verdict"] or rows["class"]["p"] is not None


def test_trust_takes_one_image_and_one_method(photo: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trust", photo, "-m", "vanilla_gradient", "grad_cam"]) == 2
    assert "of one image and one method, got 1 image and 2 methods" in capsys.readouterr().err
    assert main(["trust", photo, "--seconds", "0"]) == 2
    assert "seconds=0.0 is not a finite number above 0" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("trust", "-o", "card.html"), ("explain", "--out", "maps")])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    photo: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("saliency.batch.network.Network.load", lambda *arguments: pytest.fail("the work began"))
    (tmp_path / "file").touch()
    for more in ((), ("-m", "grad_cam", "-q")):
        assert main([words[0], photo, *more, words[1], str(tmp_path / "file" / "maps" / words[2])]) == 1
        line = capsys.readouterr().err
        assert "cannot be written to: Not a directory; finished images are kept: check the folder" in line


def test_the_folder_of_a_card_is_created(photo: str, tmp_path: Path) -> None:
    assert main(["trust", photo, *GRADIENT, "-o", str(tmp_path / "a" / "b" / "card.json"), "--seconds", "0.1"]) == 0
    assert (tmp_path / "a" / "b" / "card.json").is_file()


def test_an_image_that_cannot_be_read_has_no_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.jpg").write_bytes(b"no picture")
    assert main(["trust", str(tmp_path / "broken.jpg"), *GRADIENT]) == 1
    assert "broken.jpg" in capsys.readouterr().err


@pytest.mark.slow
def test_explain_writes_a_card_beside_each_overlay_and_prints_its_verdicts(
    photo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["explain", photo, *GRADIENT, "--trust", "--out", str(out)]) == 0
    name = "coffee.vanilla_gradient"
    assert sorted(file.name for file in out.iterdir()) == [f"{name}.png", f"{name}.trust.html", f"{name}.trust.png"]
    assert "coffee.jpg by vanilla_gradient: " in capsys.readouterr().out


def test_a_card_never_replaces_an_image(photo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(photo).parent
    (taken,) = copies(folder, "coffee.vanilla_gradient.trust.png")
    assert main(["explain", photo, str(taken), *GRADIENT, "--trust", "--out", str(folder)]) == 2
    assert "would replace one of the images" in capsys.readouterr().err
