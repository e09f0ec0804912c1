from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from saliency import zoo
from saliency.errors import ModelError
from saliency.io.preprocess import as_preprocess
from saliency.zoo.libraries import Torchvision, downloading
from tests.weights import SMALL, differing, same_weights


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No way out, and nothing downloaded earlier, whatever machine this runs on."""
    constants = pytest.importorskip("huggingface_hub.constants")
    for variable in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
        monkeypatch.setenv(variable.upper(), "http://127.0.0.1:9")
    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tmp_path


def test_random_weights_need_no_network_even_where_a_backbone_comes_pretrained(offline: Path) -> None:
    zoo.load("fasterrcnn_mobilenet_v3_large_320_fpn", weights=None)
    assert not list(offline.rglob("*.pth"))


@pytest.mark.parametrize("name", ["resnet18", "timm/resnet18", "timm/resnet18.a1_in1k", "fcn_resnet50"])
def test_without_a_network_the_error_comes_fast_and_names_the_cures(offline: Path, name: str) -> None:
    with pytest.raises(ModelError) as caught:
        zoo.load(name)
    for told in ("no network", "weights=None", "--weights none", ".safetensors", "efficientnet_lite0"):
        assert told in str(caught.value)


def test_a_host_that_never_answers_is_waited_for_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saliency.zoo.libraries._TIMEOUT", 0.05)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/models/resnet18.pth"
        with pytest.raises(ModelError, match="no network"), downloading("resnet18", address):
            pass


def test_the_hubs_offline_switch_counts_as_no_network(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("saliency.zoo.libraries._require_answer", lambda host: None)
    with pytest.raises(ModelError, match="no network"):
        zoo.load("timm/resnet18")


def test_what_a_library_raises_while_it_downloads_is_a_model_error(
    offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saliency.zoo.libraries._require_answer", lambda host: None)
    with pytest.raises(ModelError, match="pretrained weights of resnet18 could not be loaded: URLError"):
        zoo.load("resnet18")


def test_weights_downloaded_earlier_need_no_network(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models, timm = pytest.importorskip("torchvision.models"), pytest.importorskip("timm")
    vision = differing("squeezenet1_1")
    url = models.get_model_weights("squeezenet1_1").DEFAULT.url
    folder = offline / "torch" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    torch.save(vision.state_dict(), folder / url.rpartition("/")[2])
    assert same_weights(zoo.load("squeezenet1_1"), vision)
    assert same_weights(zoo.load("squeezenet1_1", weights="IMAGENET1K_V1"), vision)

    small = differing()
    repository = offline / "hub" / f"models--{timm.get_pretrained_cfg('test_resnet').hf_hub_id.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123abc", "utf-8")
    (repository / "snapshots" / "0123abc").mkdir(parents=True)
    save_file(small.state_dict(), repository / "snapshots" / "0123abc" / "model.safetensors")
    monkeypatch.setattr("timm.models._hub.hf_hub_download", None)  # not even asked for a newer one
    assert same_weights(zoo.load(SMALL), small)


@pytest.mark.parametrize(
    ("name", "weights", "told"),
    [
        (
            "resnet50",
            "IMAGENET1K_V9",
            'torchvision has no weights "IMAGENET1K_V9" for resnet50; did you mean .*V2',
        ),
        ("resnet50", "ResNet18_Weights.IMAGENET1K_V1", "torchvision has no weights"),
        ("timm/resnet50", "a1_in1", 'timm has no weights "a1_in1" for resnet50; did you mean .*"a1_in1k"'),
        ("timm/efficientnet_b0_gn", "default", "timm has no pretrained weights for efficientnet_b0_gn"),
        ("efficientnet_lite0", "IMAGENET1K_V1", 'has only the weights "default"'),
    ],
)
def test_unknown_weights_get_the_closest_ones(name: str, weights: str, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        zoo.load(name, weights=weights)


def test_torchvision_weights_by_name_bring_their_own_preprocessing() -> None:
    first, second = (
        Torchvision().facts(nn.Identity(), "resnet50", f"ResNet50_Weights.IMAGENET1K_V{n}") for n in (1, 2)
    )
    assert [as_preprocess(facts.preprocess or {}).resize for facts in (first, second)] == [256, 232]  # type: ignore[union-attr]


def run(code: str, *, first_on_path: Path | None = None) -> str:
    path = [str(first_on_path)] if first_on_path else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*path, str(Path(__file__).parents[2])])}
    return subprocess.run(  # noqa: S603  this interpreter on a literal of this file
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.slow
def test_a_torchvision_built_for_another_torch_is_said_in_words(tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')", "utf-8"
    )
    code = """
import os
from saliency.zoo import load
from saliency.errors import ModelError
for name in ("resnet18", "efficientnet_lite0", "timm/resnet18"):
    if os.fork():  # a process for each name, as the first import differs from later ones
        os.wait()
        continue
    for attempt in range(2):
        try:
            load(name, weights=None)
        except ModelError as error:
            print(error, flush=True)
    os._exit(0)
"""
    lines = run(code, first_on_path=tmp_path).splitlines()
    assert len(lines) == 6
    for line in lines:
        assert "a CPU torch and a CUDA torchvision" in line
        assert f"torch {torch.__version__.partition('+')[0]}" in line
        assert "pip install --upgrade torch torchvision" in line
    for line in lines[::2]:
        assert "operator torchvision::nms does not exist" in line
