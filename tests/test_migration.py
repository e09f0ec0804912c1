"""The page on migration is true: every call of ours runs, and equals the peer's where the page says so."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import saliency
from saliency.aliases import public_hint, table
from tests.models import OwnForward, PooledNet

TEXT = (Path(__file__).parents[1] / "docs" / "migration.md").read_text()
ROWS = [row for row in re.findall(r"^\| (.*) \|$", TEXT, re.MULTILINE) if "`saliency." in row]
PEERS = {"attr": "captum.attr", "cam": "pytorch_grad_cam", "zennit": "zennit.attribution"}
SIZE = (16, 16)


def chain() -> nn.Module:
    """A network without operations outside of modules that change values: zennit and captum treat modules only."""
    net = PooledNet()
    pool = nn.AdaptiveAvgPool2d(1)
    return OwnForward(
        lambda m, x: m.head(m.pool(m.features(x)).flatten(1)), features=net.features, pool=pool, head=net.head
    ).eval()


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """The names that the page uses; the class of each image differs from its top class."""
    torch.manual_seed(0)
    model, photo = chain(), Image.fromarray(np.random.default_rng(0).integers(0, 255, (*SIZE, 3), np.uint8))
    preprocess = saliency.Preprocess(SIZE)
    session = {"saliency": saliency, "model": model, "layer": model.features, "x": torch.randn(2, 3, *SIZE)}
    session |= {
        "onehot": torch.eye(5)[[1, 1]],
        "segments": (torch.arange(16)[:, None] // 4) * 4 + torch.arange(16) // 4,
    }
    session |= {"explanation": saliency.GradCAM(model, preprocess=preprocess).attribute(photo, 1)}
    return session


def scaled(explanation: saliency.Explanation) -> torch.Tensor:
    """The maps as grad-cam returns them: (N, H, W) in 0..1."""
    maps = saliency.heatmap(explanation)
    maps = maps - maps.amin((1, 2), keepdim=True)
    return maps / maps.amax((1, 2), keepdim=True)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_every_row_runs_and_agrees_where_it_says_so(row: str, names: dict[str, Any], tmp_path: Path) -> None:
    theirs, ours, *differences = row.split(" | ")
    found = [
        eval(code.replace('"cam.png"', f'"{tmp_path}/cam.png"'), dict(names))  # noqa: S307
        for code in re.findall(r"`(saliency\.[^`]*)`", ours)
    ]
    assert found
    if not (differences and differences[0].startswith("equal")):
        return
    peer = re.match(r"`(\w+)\.", theirs)
    assert peer
    session = names | {peer[1]: pytest.importorskip(PEERS[peer[1]])}
    if peer[1] == "cam":
        session["ClassifierOutputTarget"] = importlib.import_module(
            "pytorch_grad_cam.utils.model_targets"
        ).ClassifierOutputTarget
    if peer[1] == "zennit":
        session["composites"] = importlib.import_module("zennit.composites")
    expected = torch.as_tensor(eval(theirs.strip("`"), session)).detach()  # noqa: S307
    values = scaled(found[0]) if "scaling" in differences[0] else found[0].values.expand_as(expected)
    torch.testing.assert_close(values, expected, atol=1e-6 if "scaling" in differences[0] else 1e-7, rtol=1e-4)


def test_the_table_covers_the_toolkits_that_are_installed_for_the_tests() -> None:
    for peer in PEERS:
        assert sum(" | equal" in row and row.startswith(f"`{peer}.") for row in ROWS) >= 2


def test_the_section_of_absent_things_is_the_answer_to_absent_names() -> None:
    section = TEXT.split("## Not offered here")[1].split("\n## ")[0]
    rows = {
        text: names.replace("`", "") for names, text in re.findall(r"^\| (`.*?) \| (.*) \|$", section, re.MULTILINE)
    }
    assert rows == {text: ", ".join(names) for text, names in table("absent").items()}
    for text, names in rows.items():
        for name in names.split(", "):
            assert public_hint(name, dir(saliency)) == f"; not offered here; nearest: {text}"


def test_the_function_for_quantus_returns_maps_as_an_array(names: dict[str, Any]) -> None:
    session: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0], session)  # noqa: S102
    maps = session["explain_func"](
        model=names["model"], inputs=names["x"].numpy(), targets=np.array([1, 2]), layer="features"
    )
    assert isinstance(maps, np.ndarray)
    assert maps.shape == (2, 1, *SIZE)


def test_the_map_of_a_word_is_its_mean_cross_attention() -> None:
    (code,) = re.findall(r"^## DAAM.*?^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    session: dict[str, Any] = {"torch": torch, "saliency": saliency}
    exec(code, session)  # noqa: S102
    unet, prompt = session["unet"], session["prompt"]
    (layer,) = session["layers"]
    assert layer.probabilities.shape == (1, 2, 64, 7)
    torch.testing.assert_close(session["word"].flatten(), layer.probabilities[0, :, :, 3].mean(0))
    assert unet(torch.randn(1, 4, 8, 8), prompt).shape == (1, 4, 8, 8)
