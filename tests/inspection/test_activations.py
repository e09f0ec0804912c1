"""Activations of named layers over a data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from saliency.errors import ImageError, LayerError, NotApplicableError
from saliency.inspection import activations
from saliency.inspection.edit import edit_activations
from saliency.testing import Snapshot
from tests.models import Argmax


class Net(nn.Module):
    """An in-place module behind the layer, one that is called twice, a tuple, a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)
        self.pair = Pair()
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(4, 5)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.norm(self.conv(x)))
        h = self.act(h - 0.5)
        out: Tensor = self.fc(self.drop(self.pair(h)[1].mean((2, 3))))
        return out


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.argmax(1), x * 2


LAYERS = ["conv", "norm", "act", "pair", "fc"]


def expected(model: Net, x: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        conv, norm = model.conv(x), model.norm
        normed = torch.batch_norm(
            conv, norm.weight, norm.bias, norm.running_mean, norm.running_var, False, 0.1, 1e-5, False
        )
        act = (normed.relu() - 0.5).relu()
        return {"conv": conv, "norm": normed, "act": act, "pair": act * 2, "fc": model.fc((act * 2).mean((2, 3)))}


def data(n: int = 23) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(n, 3, 6, 6, generator=generator), torch.arange(n)


def loader(n: int = 23, batch: int = 5) -> Any:
    return DataLoader(TensorDataset(*data(n)), batch_size=batch)


def test_one_batch_gives_the_rows_of_each_layer_in_memory() -> None:
    model, (x, _) = Net(), data(3)
    before = Snapshot(model=model, x=x)
    features = activations(model, x, LAYERS)
    assert not before.changes()
    assert list(features) == LAYERS
    for name, rows in expected(model, x).items():
        assert torch.allclose(features[name], rows, atol=1e-6), name
        assert not features[name].requires_grad
        assert not features[name].is_inference()


def test_a_loader_gives_the_rows_of_one_large_batch() -> None:
    model, (x, _) = Net(), data()
    features = activations(model, loader(), LAYERS)
    for name, rows in expected(model, x).items():
        assert torch.allclose(features[name], rows, atol=1e-6), name


def test_features_are_saved_as_safetensors_as_they_are(tmp_path: Path) -> None:
    features = activations(Net(), loader(), ["fc", "conv"], pool=Tensor.half)
    save_file(features, tmp_path / "features.safetensors")
    read = load_file(tmp_path / "features.safetensors")
    assert all(torch.equal(read[name], rows) for name, rows in features.items())
    assert read["conv"].dtype == torch.float16


def test_pool_makes_rows_of_what_has_none() -> None:
    class Tokens(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(2).permute(2, 0, 1)  # (T, N, C)

    x, _ = data(2)
    model = nn.Sequential(Tokens())
    with pytest.raises(LayerError, match=r'"0" returns \(36, 2, 3\) for 2 images, not one row per image; use pool'):
        activations(model, x, "0")
    rows = activations(model, x, "0", pool=lambda tokens: tokens.mean(0))["0"]
    assert torch.allclose(rows, x.mean((2, 3)))


def test_the_features_of_an_edited_network_are_the_edited_ones() -> None:
    model, (x, _) = Net(), data(2)
    with edit_activations(model, "conv", lambda maps: maps.index_fill(1, torch.tensor(1), 0)):
        edited = activations(model, x, "conv")["conv"]
    plain = activations(model, x, "conv")["conv"]
    assert not edited[:, 1].any()
    assert torch.equal(edited[:, [0, 2, 3]], plain[:, [0, 2, 3]])


def test_what_does_not_fit_is_an_error_that_says_so() -> None:
    model, (x, _) = Net(), data(2)
    with pytest.raises(LayerError, match='"unused" was not called'):
        activations(model, x, "unused")
    with pytest.raises(LayerError, match='no layer "fd"'):
        activations(model, x, "fd")
    with pytest.raises(LayerError, match=r'"conv" returns rows \(4, 5, 5\) in batch 1.*\(4, 6, 6\)'):
        activations(model, [x, x[..., :5, :5]], "conv")
    with pytest.raises(LayerError, match="returns no floating-point tensor"):
        activations(nn.Sequential(nn.Flatten(), Argmax()), x, "1")
    with pytest.raises(ImageError, match="no image"):
        activations(model, iter([]), "fc")
    with pytest.raises(ImageError, match="no image"):
        activations(model, x[:0], "fc")


def test_layers_inside_torchscript_are_refused_and_not_said_to_be_idle() -> None:
    x = torch.randn(2, 3)
    trace: Any = torch.jit.trace
    model = nn.Sequential(trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), x), nn.Linear(3, 1))
    with pytest.raises(NotApplicableError, match=r'layer "0\.0" is scripted or inside a TorchScript module'):
        activations(model, x, "0.0")
    assert torch.equal(activations(model, x, "0")["0"], model[0](x))


def test_the_data_is_left_as_it_was_and_no_gradient_is_recorded() -> None:
    class Greedy(nn.Module):
        def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
            self.records = torch.is_grad_enabled()
            return x.mul_(2).add_(mask.mul_(2))

    model, x, mask = Greedy(), torch.ones(2, 3), torch.ones(2, 3)
    assert activations(model, {"x": x, "mask": mask}, "")[""].tolist() == [[4, 4, 4]] * 2
    assert not model.records
    assert x.tolist() == mask.tolist() == [[1, 1, 1]] * 2
    plain = nn.Sequential(nn.ReLU(inplace=True))
    activations(plain, -x, "0")
    negative = -x
    activations(plain, [negative], "0")
    assert negative.tolist() == [[-1, -1, -1]] * 2
