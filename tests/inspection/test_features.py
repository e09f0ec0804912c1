"""Activations of named layers, in memory and on disk."""

from __future__ import annotations

import resource
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from saliency.errors import ExplanationError, ImageError, LayerError, MethodError, NotApplicableError, SaliencyWarning
from saliency.inspection import rules
from saliency.inspection.edit import edit_activations
from saliency.inspection.features import Features, extract_features
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
    features = extract_features(model, x, LAYERS)
    assert not before.changes()
    assert list(features) == LAYERS
    assert (features.images, features.labels) == (3, None)
    for name, rows in expected(model, x).items():
        assert torch.allclose(features[name], rows, atol=1e-6), name
        assert not features[name].requires_grad
        assert not features[name].is_inference()


@pytest.mark.parametrize("shard", [1, 4, 5, 7, 23, 100, None])
def test_a_loader_gives_the_same_on_disk_as_in_memory_however_it_is_cut(tmp_path: Path, shard: int | None) -> None:
    model = Net()
    memory = extract_features(model, loader(), LAYERS)
    disk = extract_features(model, loader(batch=4), LAYERS, out=tmp_path / "f", shard_images=shard)
    assert list(disk) == list(memory) == LAYERS
    again = Features.open(tmp_path / "f")
    size = shard or 23
    for name in LAYERS:
        rows, whole = again[name], memory[name]
        assert torch.allclose(rows[:], whole, atol=1e-6)
        assert (len(rows), rows.shape, rows.dtype) == (23, tuple(whole.shape), torch.float32)
        for index in (slice(3, 19), slice(20, None), slice(None, None, 7), slice(9, 2, -3), slice(5, 5), [7, 0, 22, 7]):
            picked = list(range(23))[index] if isinstance(index, slice) else index
            assert torch.equal(rows[index], rows[:][picked]), index
        assert torch.equal(rows[-1], rows[:][22])
        assert torch.equal(rows[torch.tensor([4, 2])], rows[:][[4, 2]])
        assert torch.equal(rows[torch.arange(23) > 20], rows[:][21:])
        assert torch.equal(torch.cat(list(rows.shards())), rows[:])
        assert [len(each) for each in rows.shards()] == [size] * (23 // size) + [23 % size] * (23 % size > 0)
        with pytest.raises(IndexError, match="23 is out of bounds"):
            rows[23]
    assert isinstance(again.labels, Tensor)
    assert again.labels.tolist() == list(range(23))


def test_the_folder_holds_plain_safetensors_files_only(tmp_path: Path) -> None:
    extract_features(Net(), loader(5), ["fc", "conv"], out=tmp_path, shard_images=3, dtype=torch.float16)
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "shard-00000.safetensors",
        "shard-00001.safetensors",
    ]
    assert load_file(tmp_path / "shard-00001.safetensors")["fc"].shape == (2, 5)


def test_memory_holds_no_more_than_a_shard_and_a_batch(tmp_path: Path) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(40):
            # All but what a shard still waits for has been written, and no older batch is held.
            written = sum(len(load_file(each)["fc"]) for each in tmp_path.glob("shard-*.safetensors"))
            assert written >= 2 * number - 3
            assert sum(each() is not None for each in alive[:-2]) == 0
            x = torch.randn(2, 3, 6, 6)
            alive.append(weakref.ref(x))
            yield x, torch.tensor([number, number])

    features = extract_features(Net(), batches(), "fc", out=tmp_path, shard_images=3)
    assert features.images == 80
    assert isinstance(features.labels, Tensor)
    assert features.labels.tolist() == [each for number in range(40) for each in (number, number)]


def test_an_interrupted_run_leaves_whole_files(tmp_path: Path) -> None:
    model, (x, _) = Net(), data(8)
    halves = [x[at : at + 2] for at in range(0, 8, 2)]

    def interrupted() -> Iterator[Tensor]:
        yield from halves
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        extract_features(model, interrupted(), "fc", out=tmp_path, shard_images=3)
    assert not list(tmp_path.glob("*.part"))
    with pytest.warns(SaliencyWarning, match="first 6 images; the run that wrote them was interrupted"):
        part = Features.open(tmp_path)
    assert torch.allclose(part["fc"][:], expected(model, x[:6])["fc"], atol=1e-6)
    halves.clear()
    with pytest.raises(KeyboardInterrupt):
        extract_features(model, interrupted(), "fc", out=tmp_path)
    with pytest.raises(ExplanationError, match="there are no features"):
        Features.open(tmp_path)
    halves += [x[at : at + 2] for at in range(0, 8, 2)]
    with pytest.raises(KeyboardInterrupt):
        extract_features(model, interrupted(), "fc", out=tmp_path, shard_images=3)
    # It can be made again, and then no more.
    whole = extract_features(model, x, "fc", out=tmp_path)
    assert len(whole["fc"]) == 8
    assert len(list(tmp_path.glob("shard-*"))) == 1
    with pytest.raises(MethodError, match="complete features"):
        extract_features(model, x, "fc", out=tmp_path)


def test_labels_in_words_are_kept_and_others_are_told_of(tmp_path: Path) -> None:
    x, _ = data(4)
    batches = [(x[:2], ["cat", "dog"]), (x[2:], ["owl", "cat"])]
    for out in (None, tmp_path / "words"):
        features: Any = extract_features(Net(), batches, "fc", out=out, shard_images=3)
        assert features.labels == ["cat", "dog", "owl", "cat"]
    with pytest.warns(SaliencyWarning, match=r"labels \(dict\) are not kept") as told:
        assert extract_features(Net(), [(x, {"a": 1}), (x, {"a": 2})], "fc").labels is None
    assert len(told) == 1
    with pytest.raises(ImageError, match="labels are missing in batch 1"):
        extract_features(Net(), [(x, torch.arange(4)), x], "fc")


def test_pool_makes_rows_of_what_has_none() -> None:
    class Tokens(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(2).permute(2, 0, 1)  # (T, N, C)

    x, _ = data(2)
    model = nn.Sequential(Tokens())
    with pytest.raises(LayerError, match=r'"0" returns \(36, 2, 3\) for 2 images, not one row per image; use pool'):
        extract_features(model, x, "0")
    rows = extract_features(model, x, "0", pool=lambda tokens: tokens.mean(0))["0"]
    assert torch.allclose(rows, x.mean((2, 3)))


def test_the_features_of_an_edited_network_are_the_edited_ones() -> None:
    model, (x, _) = Net(), data(2)
    with edit_activations(model, "conv", rules.zero_channels(1)):
        edited = extract_features(model, x, "conv")["conv"]
    plain = extract_features(model, x, "conv")["conv"]
    assert not edited[:, 1].any()
    assert torch.equal(edited[:, [0, 2, 3]], plain[:, [0, 2, 3]])


def test_what_does_not_fit_is_an_error_that_says_so(tmp_path: Path) -> None:
    model, (x, _) = Net(), data(2)
    with pytest.raises(LayerError, match='"unused" was not called'):
        extract_features(model, x, "unused")
    with pytest.raises(LayerError, match='no layer "fd"'):
        extract_features(model, x, "fd")
    with pytest.raises(LayerError, match=r'"conv" returns rows \(4, 5, 5\) of float32 in batch 1.*\(4, 6, 6\)'):
        extract_features(model, [x, x[..., :5, :5]], "conv", out=tmp_path / "s", shard_images=2)
    with pytest.raises(LayerError, match="returns no floating-point tensor"):
        extract_features(nn.Sequential(nn.Flatten(), Argmax()), x, "1")
    with pytest.raises(ImageError, match="no image"):
        extract_features(model, iter([]), "fc")
    with pytest.raises(ImageError, match="no image"):
        extract_features(model, x[:0], "fc")
    with pytest.raises(LayerError, match='no features of a layer "cnv"; did you mean "conv"'):
        extract_features(model, x, "conv")["cnv"]
    for option in ({"shard_images": 0}, {"shard_images": 1.5}, {"dtype": torch.int8}, {"dtype": "half"}):
        with pytest.raises(MethodError, match=next(iter(option))):
            extract_features(model, x, "fc", **option)
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        extract_features(model, x, "fc", out=tmp_path / "file")


def test_a_folder_without_features_or_with_damaged_ones_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ExplanationError, match="there are no features"):
        Features.open(tmp_path)
    extract_features(Net(), data(5)[0], "fc", out=tmp_path / "gap", shard_images=2)
    (tmp_path / "gap" / "shard-00001.safetensors").unlink()
    with pytest.raises(ExplanationError, match=r"shard-00001\.safetensors is missing"):
        Features.open(tmp_path / "gap")
    features = extract_features(Net(), data(2)[0], "fc", out=tmp_path / "f")
    (tmp_path / "f" / "shard-00000.safetensors").write_bytes(b"short")
    with pytest.raises(ExplanationError, match="cannot be read"):
        features["fc"][:]
    (tmp_path / "f" / "shard-00000.safetensors").unlink()
    with pytest.raises(ExplanationError, match="cannot be read"):
        features["fc"][0]


def test_files_of_others_are_left_where_they_are(tmp_path: Path) -> None:
    name = "shard-00000.safetensors"
    (tmp_path / name).write_text("{}")
    with pytest.raises(MethodError, match="not a features file"):
        extract_features(Net(), data()[0], "conv", out=tmp_path)
    assert (tmp_path / name).read_text() == "{}"


def test_rows_on_disk_are_indexed_like_a_tensor_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(3, 2)), torch.randn(5, 3)
    whole = extract_features(model, x, "0")["0"]
    monkeypatch.chdir(tmp_path)
    rows = extract_features(model, x, "0", out="features", shard_images=2)["0"]
    monkeypatch.chdir(Path(tmp_path.root))
    mask = whole[:, 0] > 0
    for index in (mask, mask.numpy(), mask.tolist(), [4, 0, -1], torch.tensor(3), torch.arange(2), []):
        assert torch.equal(rows[index], whole[index])
    for wrong in ((1, 1), 5, mask[:3], [True], True, False):
        with pytest.raises(IndexError):
            rows[wrong]


def test_all_files_have_the_same_permissions(tmp_path: Path) -> None:
    extract_features(nn.Linear(3, 2), torch.randn(5, 3), "", out=tmp_path, shard_images=2)
    modes = {each.stat().st_mode for each in tmp_path.iterdir()}
    assert len(modes) == 1
    assert len(list(tmp_path.iterdir())) == 3


def test_a_file_that_cannot_be_written_is_an_error_of_the_system_and_leaves_what_is_whole(tmp_path: Path) -> None:
    model, x = nn.Linear(3, 400), torch.randn(6, 3)

    def batches() -> Iterator[Tensor]:
        yield x[:4]
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        yield x[4:]

    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(OSError, match=r"shard-00001\.safetensors cannot be written"):
            extract_features(model, batches(), "", out=tmp_path, shard_images=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["shard-00000.safetensors"]
    with pytest.warns(SaliencyWarning, match="first 2 images"):
        assert torch.allclose(Features.open(tmp_path)[""][:], model(x[:2]), atol=1e-6)


@pytest.mark.parametrize(
    ("later", "came"),
    [
        (["a", "b"], "a list"),
        (torch.ones(2, 3), r"\(3,\) of float32"),
        (torch.ones(2, dtype=torch.int), r"\(\) of int32"),
    ],
)
def test_labels_of_another_kind_are_an_error_when_they_come(later: Any, came: str) -> None:
    x = torch.randn(2, 3)
    with pytest.raises(ImageError, match=f"the labels are {came} in batch 1, but .* of float32 in earlier batches"):
        extract_features(nn.Linear(3, 2), [(x, torch.ones(2)), (x, later)], "")


def test_layers_inside_torchscript_are_refused_and_not_said_to_be_idle() -> None:
    x = torch.randn(2, 3)
    trace: Any = torch.jit.trace
    model = nn.Sequential(trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), x), nn.Linear(3, 1))
    with pytest.raises(NotApplicableError, match=r'layer "0\.0" is scripted or inside a TorchScript module'):
        extract_features(model, x, "0.0")
    assert torch.equal(extract_features(model, x, "0")["0"], model[0](x))


def test_the_data_is_left_as_it_was_and_no_gradient_is_recorded() -> None:
    class Greedy(nn.Module):
        def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
            self.records = torch.is_grad_enabled()
            return x.mul_(2).add_(mask.mul_(2))

    model, x, mask = Greedy(), torch.ones(2, 3), torch.ones(2, 3)
    assert extract_features(model, {"x": x, "mask": mask}, "")[""].tolist() == [[4, 4, 4]] * 2
    assert not model.records
    assert x.tolist() == mask.tolist() == [[1, 1, 1]] * 2
    plain = nn.Sequential(nn.ReLU(inplace=True))
    extract_features(plain, -x, "0")
    negative = -x
    extract_features(plain, [negative], "0")
    assert negative.tolist() == [[-1, -1, -1]] * 2
