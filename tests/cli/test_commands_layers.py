"""The promises of `saliency layers`: the tables of a model as text, and the layer that CAMs read."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from saliency.cli import commands as inspecting
from saliency.cli import main
from saliency.errors import ModelError
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
    words = ("lraspp_mobilenet_v3_large", "--weights", "none", "--depth", 1, "--image", COFFEE)
    assert "on an input of 520x780" in answer(*words)


# Statistics ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_statistics_are_those_of_the_same_layers(answer: Callable[..., str]) -> None:
    text = answer(*RESNET, "--depth", 1, "--stats", "--gradients", "--target", 281, "--image", COFFEE)
    titles = [line for line in text.splitlines() if re.match(r"(ResNet|Activations|Gradients)", line)]
    assert [re.sub(r"[-.\d]+(e-?\d+)? at", "N at", title) for title in titles] == [
        "ResNet on 1x3x224x224",
        "Activations of ResNet",
        "Gradients of a score of N at the layers of ResNet",
    ]
    assert len(re.findall(r"^(?:-> )? *layer4 ", text, re.MULTILINE)) == 3
    assert "layer4.0" not in text


@pytest.mark.slow
def test_the_gradients_are_those_of_the_top_class_or_of_the_one_that_is_asked_for(answer: Callable[..., str]) -> None:
    top = re.search(r"Gradients of a score of (\S+) at", answer("--image", COFFEE, "--gradients"))
    same = re.search(r"Gradients of a score of (\S+) at", answer("--image", COFFEE, "--gradients", "-t", "espresso"))
    other = re.search(r"Gradients of a score of (\S+) at", answer("--image", COFFEE, "--gradients", "-t", "tabby"))
    assert top is not None
    assert same is not None
    assert other is not None
    assert float(top[1]) == float(same[1]) > float(other[1])


def test_the_gradients_of_parameters_are_those_of_the_layers_that_are_shown(answer: Callable[..., str]) -> None:
    text = answer(*RESNET, "--depth", 1, "--gradients", "parameters", "--target", 281)
    assert re.search(r"Gradients of a score of \S+ at the parameters of ResNet", text)
    found = re.findall(r"^(\S+\.(?:weight|bias)) +(\w+) ", text, re.MULTILINE)
    assert found == [
        ("conv1.weight", "Conv2d"),
        ("bn1.weight", "BatchNorm2d"),
        ("bn1.bias", "BatchNorm2d"),
        ("fc.weight", "Linear"),
        ("fc.bias", "Linear"),
    ]


def test_nothing_is_computed_that_was_not_asked_for(
    answer: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*words: object, **options: object) -> None:
        pytest.fail("not asked for")

    for name in ("activation_statistics", "gradient_statistics"):
        monkeypatch.setattr(inspecting, name, refused)
    answer(*RESNET)


# Slips ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--target", "tabby"], "--target selects the class whose gradients are shown; add --gradients"),
        (["--gradients", "--target", "tabbby"], 'no class "tabbby" among 1000 classes; did you mean "tabby"'),
        (["--gradients", "--target", "5000"], "class 5000 is outside 0..999"),
        (["--gradients", "weights"], "invalid choice: 'weights' (choose from 'layers', 'parameters')"),
        (["--depth", "0"], "--depth=0 is not a whole number of at least 1"),
        (["--depth", "two"], "two: expected a whole number: levels of nested layers"),
        (["--image", "missing.jpg"], "missing.jpg' cannot be read"),
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


@pytest.mark.parametrize("words", [["layers", "plain.py:model"], ["trust", str(COFFEE), "--model", "plain.py:model"]])
def test_a_model_without_preprocessing_gets_the_option_to_pass(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plain.py").write_text("import torch\n\nmodel = torch.nn.Conv2d(3, 4, 3)\n")
    assert main(words) == 2
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
