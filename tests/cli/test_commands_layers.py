"""The promises of `saliency layers`: the tables of a model as text and as a page, and the layer that CAMs read."""

from __future__ import annotations

import base64
import io
import os
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from saliency import ModelError
from saliency._version import __version__
from saliency.cli import layers as inspecting
from saliency.cli import main
from tests.browser import chromium, visit
from tests.cli.test_console import under_terminal
from tests.commandline import COFFEE, loaded, share_models

RESNET = ("resnet18", "--weights", "none")


@pytest.fixture(autouse=True)
def _one_model_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    share_models(monkeypatch)


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What `saliency layers` prints when all goes well."""

    def run(*words: object) -> str:
        code = main(["layers", *map(str, words)])
        said = capsys.readouterr()
        assert (code, said.err) == (0, "")
        return said.out

    return run


def names(text: str) -> list[str]:
    """The first words of the rows of the first table."""
    lines = text.split("\n\n")[1].splitlines()[2:]
    return [line.removeprefix("->").split()[0] for line in lines]


# The layer table -----------------------------------------------------------------------------------------------


def test_a_table_needs_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str | None] = []

    def stop(name: str, weights: str | None) -> nn.Module:
        given.append(weights)
        raise ModelError("enough")

    monkeypatch.setattr(inspecting, "load", stop)
    for options in ((), ("--stats",), ("--gradients",), ("--weights", "mine.pt")):
        assert main(["layers", "resnet18", *options]) == 2
    assert given == [None, "default", "default", "mine.pt"]


def test_the_layer_that_cams_read_is_marked_and_named(answer: Callable[..., str]) -> None:
    text = answer()
    row = r"^-> +(\S+) +BatchNormAct2d +1x1280x7x7 +7x7 +2\.56 k +0 +\S+ %$"
    assert re.findall(row, text, re.MULTILINE) == ["bn2"]
    assert text.count("->") == 2
    assert 'efficientnet_lite0 on an input of 224x224: CAMs read "bn2" by default (->)' in text
    assert text.startswith("EfficientNet on 1x3x224x224\n")
    assert "4,652,008 parameters, all trainable; 385 M multiply-adds; " in text


@pytest.mark.slow
def test_the_tables_go_as_deep_as_there_is_room_or_as_is_asked_for(answer: Callable[..., str]) -> None:
    top = ["conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool", "fc"]
    assert names(answer(*RESNET, "--depth", 1)) == top
    assert "--all lists 57 more nested layers" in answer(*RESNET, "--depth", 1)
    fitting = names(answer(*RESNET))
    assert len(fitting) <= inspecting.DEFAULT_ROWS
    assert {"layer1", "layer1.0"} < set(fitting)
    assert "layer1.0.conv1" not in fitting
    assert "calls" not in answer(*RESNET, "--depth", 1)  # the rows with more than one lie deeper
    everything = answer(*RESNET, "--all")
    assert "calls" in everything
    assert len(names(everything)) == 67 == len(names(answer(*RESNET, "--depth", 9)))
    assert "--all" not in everything


def test_the_layer_that_cams_read_is_shown_however_deep_it_lies(
    answer: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3, stride=8)), nn.Flatten(), nn.LazyLinear(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.body(x)
            return out

    model: Any = Deep()
    model.preprocess = loaded("resnet18", weights=None).preprocess
    model(torch.zeros(1, 3, 224, 224))
    monkeypatch.setattr(inspecting, "load", lambda name, weights: model)
    text = answer("deep", "--depth", 1)
    assert names(text) == ["body", "body.0"]
    assert 'CAMs read "body.0"' in text


@pytest.mark.slow
def test_the_photo_sets_the_size_where_the_model_takes_any(answer: Callable[..., str]) -> None:
    words = ("lraspp_mobilenet_v3_large", "--weights", "none", "--depth", 1, "--photo", COFFEE)
    assert "on an input of 520x780" in answer(*words)


# Statistics ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_statistics_are_those_of_the_same_layers(answer: Callable[..., str]) -> None:
    text = answer(*RESNET, "--depth", 1, "--stats", "--gradients", "--target", 281, "--photo", COFFEE)
    titles = [line for line in text.splitlines() if re.match(r"(ResNet|Activations|Gradients)", line)]
    assert [re.sub(r"[-.\d]+(e-?\d+)? at", "N at", title) for title in titles] == [
        "ResNet on 1x3x224x224",
        "Activations of ResNet",
        "Gradients of a score of N at the layers of ResNet",
        "Gradients of a score of N at the parameters of ResNet",
    ]
    assert len(re.findall(r"^(?:-> )? *layer4 ", text, re.MULTILINE)) == 3
    assert "layer4.0" not in text
    assert re.search(r"^fc\.bias ", text, re.MULTILINE)
    assert "layer1.0.conv1.weight" not in text
    assert "layer1.0.conv1.weight" in answer(*RESNET, "--all", "--gradients")


@pytest.mark.slow
def test_the_gradients_are_those_of_the_top_class_or_of_the_one_that_is_asked_for(
    answer: Callable[..., str], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    answer("--photo", COFFEE, "--gradients", "--depth", 1, "--html", page)
    assert "The class is espresso." in page.read_text()
    top = re.search(r"Gradients of a score of (\S+) at", answer("--photo", COFFEE, "--gradients"))
    same = re.search(r"Gradients of a score of (\S+) at", answer("--photo", COFFEE, "--gradients", "-t", "espresso"))
    other = re.search(r"Gradients of a score of (\S+) at", answer("--photo", COFFEE, "--gradients", "-t", "tabby"))
    assert top is not None
    assert same is not None
    assert other is not None
    assert float(top[1]) == float(same[1]) > float(other[1])


def test_nothing_is_drawn_or_computed_that_was_not_asked_for(
    answer: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(*words: object, **options: object) -> None:
        pytest.fail("not asked for")

    for name in ("activation_statistics", "gradient_statistics", "gradient_flow"):
        monkeypatch.setattr(inspecting, name, refused)
    answer(*RESNET, "--html", tmp_path / "page.html")


# The page ------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """The pieces of a page: headings, tables by rows, pictures, and what it refers to elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.headings: list[str] = []
        self.rows: list[int] = []
        self.pictures: list[str] = []
        self.references: list[str] = []
        self.feed(text)
        assert self.opened == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag not in ("meta", "img"):
            self.opened.append(tag)
        if tag == "img":
            self.pictures.append(str(attributes["src"]))
        if tag == "table":
            self.rows.append(-1)  # the header
        if tag == "tr":
            self.rows[-1] += 1
        self.references += [str(attributes[name]) for name in ("href", "src") if name in attributes]

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.opened and self.opened[-1] in ("h1", "h2"):
            self.headings.append(data)


@pytest.mark.slow
def test_the_page_has_all_that_was_asked_for_and_needs_nothing_else(answer: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "deep.html"
    words = (*RESNET, "--depth", 1, "--photo", COFFEE, "--stats", "--gradients", "--html", file)
    assert f"written: {file}" in answer(*words)
    text = file.read_text(encoding="utf-8")
    page = Page(text)
    assert page.headings == [
        "resnet18: layers",
        "Layers",
        "Activations",
        "Gradients at the layers",
        "Gradients of the parameters",
    ]
    assert page.rows == [10, 10, 10, 5]
    assert all(each.startswith(("data:image/", "#part-")) for each in page.references)
    (figure,) = page.pictures
    assert min(Image.open(io.BytesIO(base64.b64decode(figure.partition(",")[2]))).size) > 400
    for fact in (
        "1x3x224x224 from coffee.jpg",
        "ResNet, random weights",
        f"saliency {__version__}, torch {torch.__version__}",
    ):
        assert fact in text
    assert "color-scheme: light dark" in text
    assert [each.name for each in tmp_path.iterdir()] == ["deep.html"]  # nothing half written stays


def test_what_a_photo_and_a_model_are_called_is_text_on_the_page(answer: Callable[..., str], tmp_path: Path) -> None:
    evil = tmp_path / "<b onload=x>&.jpg"
    evil.write_bytes(COFFEE.read_bytes())
    file = tmp_path / "page.html"
    answer(*RESNET, "--photo", evil, "--html", file)
    assert "<b onload" not in file.read_text()
    assert "&lt;b onload=x&gt;&amp;.jpg" in file.read_text()


@pytest.mark.parametrize("width", [320, 390])
@pytest.mark.slow
def test_on_a_phone_the_page_is_no_wider_than_the_screen_and_its_tables_can_be_moved(
    width: int, answer: Callable[..., str], tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    photo = tmp_path / ("a_photo_with_a_very_long_name_" * 4 + ".jpg")
    photo.write_bytes(COFFEE.read_bytes())
    answer(*RESNET, "--depth", 1, "--photo", photo, "--stats", "--gradients", "--html", file)
    screen = {"width": width, "height": 740}
    with chromium() as browser, visit(browser, viewport=screen, has_touch=True, is_mobile=True) as window:
        window.page.goto(file.as_uri())
        assert window.page.evaluate("document.documentElement.scrollWidth") == width
        for part in ("h1", "body > p", "nav a", "section > img", "section > p"):
            for each in window.page.locator(part).all():
                box = each.bounding_box()
                assert box is not None
                assert box["x"] + box["width"] <= width, part
        frame = window.page.locator(".saliency-table > div").first
        assert frame.evaluate("each => (each.scrollLeft = 1e6, each.scrollLeft)") > 0
        assert window.complaints == []


def test_a_page_that_fails_leaves_the_one_before(
    answer: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "page.html"
    file.write_text("mine")

    def full(self: Path, *words: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert main(["layers", *RESNET, "--depth", "1", "--html", str(file)]) == 2
    assert [each.read_text() for each in tmp_path.iterdir()] == ["mine"]


def test_a_page_takes_the_place_of_no_device_and_no_pipe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert main(["layers", *RESNET, "--depth", "1", "--html", str(pipe)]) == 2
    assert f"--html {pipe} cannot be written" in capsys.readouterr().err
    assert pipe.is_fifo()


def test_a_link_to_a_page_stays_a_link(answer: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    page, link = tmp_path / "pages" / "page.html", tmp_path / "link.html"
    page.write_text("old")
    link.symlink_to(page)
    answer(*RESNET, "--depth", 1, "--html", link)
    assert link.is_symlink()
    assert "resnet18: layers" in page.read_text(encoding="utf-8")


# Slips ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--target", "tabby"], "--target selects the class whose gradients are shown; add --gradients"),
        (["--gradients", "--target", "tabbby"], 'no class "tabbby" among 1000 classes; did you mean "tabby"'),
        (["--gradients", "--target", "5000"], "class 5000 is outside 0..999"),
        (["--depth", "0"], "0 is not a whole number"),
        (["--depth", "two"], "two is not a whole number"),
        (["--depth", "2", "--all"], "not allowed with argument"),
        (["--html", "missing/page.html"], "--html missing/page.html cannot be written; choose a file in an existing"),
        (["--html", "."], "--html . cannot be written; choose a file"),
        (["--photo", "missing.jpg"], "'missing.jpg' cannot be read"),
    ],
)
def test_slips_are_answered_before_any_work_where_that_can_be(
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["layers", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert "Traceback" not in err


def test_a_model_without_preprocessing_gets_the_option_to_pass(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plain.py").write_text("import torch\n\nmodel = torch.nn.Conv2d(3, 4, 3)\n")
    assert main(["layers", "plain.py:model"]) == 2
    assert capsys.readouterr().err == "saliency: plain.py:model has no preprocessing; pass --preprocess\n"


# A terminal ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [60, 200])
@pytest.mark.slow
def test_a_terminal_cuts_the_lines_of_a_table_and_shows_where(columns: int) -> None:
    shown = under_terminal(columns, "layers", *RESNET, "--depth", "2")
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.rpartition("\x1b[2K")[2]).splitlines()
    assert max(map(len, lines)) <= columns
    text = " ".join(" ".join(lines).split())
    assert ("…" in text) == (columns < 120)
    assert 'CAMs read "layer4" by default' in text
    assert any(line.lstrip("-> ").startswith("layer1.0") for line in lines)
