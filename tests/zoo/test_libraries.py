"""Models in Python code of the user."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import saliency
from saliency import zoo
from saliency.errors import ModelError
from tests.batchwork import Tiny

CODE = """
import saliency
from parts import broken
from torch import nn

class Net(nn.Sequential):
    preprocess = saliency.Preprocess(size=(16, 16), resize=16)
    categories = {1: "bee", 0: "ant"}

    def __init__(self):
        super().__init__(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())

def make():
    saliency.load("shufflenet_v2_x0_5", weights=None)
    return Net()

net = Net()
number = 3
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(CODE)
    (tmp_path / "parts.py").write_text("def broken():\n    raise OSError('no disk')\n")
    monkeypatch.delitem(sys.modules, "parts", raising=False)
    return tmp_path / "mine.py"


@pytest.mark.parametrize("attribute", ["make", "Net", "net"])
def test_a_file_gives_a_model_with_its_attributes(mine: Path, attribute: str) -> None:
    before = list(sys.path), torch.get_rng_state()
    model: Any = zoo.load(f"{mine}:{attribute}")
    assert type(model).__name__ == "Net"
    assert not model.training
    assert (model.categories, model.preprocess.size) == (("ant", "bee"), (16, 16))
    assert sys.path == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert torch.equal(model[0].weight, zoo.load(f"{mine}:{attribute}")[0].weight)  # type: ignore[index]


def test_the_preprocessing_of_a_model_may_be_a_module(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch, torchvision\n"
        "net = torch.nn.Conv2d(3, 2, 3)\n"
        "net.preprocess = torchvision.models.ResNet18_Weights.IMAGENET1K_V1.transforms()\n"
    )
    model: Any = zoo.load(f"{tmp_path}/own.py:net")
    assert model.preprocess.size == (224, 224)
    assert list(model.children()) == []


def test_a_module_gives_a_model_and_a_checkpoint_its_weights(tmp_path: Path) -> None:
    other = Tiny()
    torch.nn.init.ones_(other.head.weight)
    torch.save(other.state_dict(), tmp_path / "tiny.pt")
    model: Any = zoo.load("tests.batchwork:Tiny", weights=tmp_path / "tiny.pt", categories=list("abcde"))
    assert bool((model.head.weight == 1).all())
    assert model.categories == tuple("abcde")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mine.py:broken", r"parts\.py, line 2: OSError: no disk"),
        ("mine.py:mak", 'no model "mak" .*; did you mean "make"'),
        ("mine.py:number", "it is a int"),
        ("mine.py", "pass FILE.py:NAME"),
        ("gone.py:make", "there is no file"),
        ("no.such.module:make", "No module named 'no'"),
    ],
)
def test_what_gives_no_model_is_an_error(mine: Path, name: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        zoo.load(str(mine.parent / name) if ".py" in name else name)


def test_the_classes_of_a_file_are_not_looked_up_in_another_process(mine: Path) -> None:
    model = zoo.load(f"{mine}:make")
    assert type(model).__module__ not in sys.modules  # so that Ray sends the code
    with pytest.raises((pickle.PicklingError, ImportError)):
        pickle.dumps(model)


def test_weights_by_name_are_refused(mine: Path) -> None:
    with pytest.raises(ModelError, match='has no weights "v2"; pass the path of a checkpoint'):
        zoo.load(f"{mine}:make", weights="v2")


def test_a_batch_notices_that_the_code_has_changed(mine: Path, tmp_path: Path) -> None:
    from saliency.batch import BatchError, batch
    from tests.batchwork import photos

    photos(tmp_path / "in", 2)
    options: dict[str, Any] = {"model": f"{mine}:make", "workers": 1}
    assert batch(tmp_path / "in", tmp_path / "out", **options).fresh == 2
    assert batch(tmp_path / "in", tmp_path / "out", **options).fresh == 0
    with pytest.raises(BatchError, match="classes was None and is now 'sha256"):
        batch(tmp_path / "in", tmp_path / "out", categories=["a", "b"], **options)
    with pytest.raises(BatchError, match=r"preprocess was None and is now .Preprocess"):
        batch(tmp_path / "in", tmp_path / "out", preprocess=saliency.Preprocess(), **options)
    mine.write_text(f"{CODE}\n")
    os.utime(mine)
    with pytest.raises(BatchError, match="model source was 'sha256"):
        batch(tmp_path / "in", tmp_path / "out", **options)
