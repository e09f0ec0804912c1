"""What users hand over to run a model on becomes the arguments of its calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from saliency import Preprocess
from saliency.errors import ImageError
from saliency.inspection.arguments import ModelCall, model_call, model_calls

PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 9, 3), dtype=np.uint8))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)
        self.preprocess = Preprocess((8, 8), (8, 8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return out


def only(model: nn.Module, data: Any) -> ModelCall:
    found = list(model_calls(model, data))
    assert len(found) == 1
    return found[0]


def test_a_float_tensor_is_passed_on_as_the_models_own_input() -> None:
    x = torch.randn(4, 3, 8, 8)
    for each in (model_call(Model(), x), only(Model(), x)):
        assert len(each.args) == 1
        assert torch.equal(each.args[0], x)
        assert (each.kwargs, each.labels, each.size) == ({}, None, 4)


def test_tensors_come_in_the_type_and_on_the_device_of_the_weights() -> None:
    model = Model().double()
    assert model_call(model, torch.randn(1, 3, 8, 8)).args[0].dtype == torch.float64
    assert model_call(model, {"x": torch.randn(1), "index": torch.tensor([1])}).kwargs["index"].dtype == torch.int64
    assert model_call(nn.ReLU(), torch.randn(1).half()).args[0].dtype == torch.float16
    assert model_call(Model().to("meta"), torch.randn(1, 3, 8, 8)).args[0].device.type == "cpu"


def test_indices_are_what_a_model_takes_and_bytes_are_pictures() -> None:
    tokens = torch.tensor([[1, 2, 3]])
    for each in (model_call(nn.Embedding(9, 2), tokens), only(nn.Embedding(9, 2), [(tokens, torch.tensor([0]))])):
        assert torch.equal(each.args[0], tokens)
        assert each.args[0].dtype == torch.int64
    assert model_call(Model(), torch.zeros((3, 9, 9), dtype=torch.uint8)).args[0].dtype == torch.float32


def test_an_argument_may_be_a_list_of_tensors_as_detectors_take_them() -> None:
    pictures = [torch.rand(3, 8, 8), torch.rand(3, 9, 9)]
    for each in (model_call(Model(), (pictures,)), only(Model(), (pictures, None))):
        assert [picture.shape for picture in each.args[0]] == [(3, 8, 8), (3, 9, 9)]


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), torch.Size((2, 3, 8, 8))])
def test_a_shape_is_noise_the_same_each_time_and_from_no_global_generator(shape: tuple[int, ...]) -> None:
    model = Model()
    before = torch.get_rng_state()
    first, second = model_call(model, shape).args[0], only(model, shape).args[0]
    assert first.shape == (2, 3, 8, 8)
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)
    assert 0.8 < float(first.std()) < 1.2


def test_pictures_are_read_by_the_models_preprocessing(tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    PHOTO.save(path)
    single: list[Any] = [path, str(path), PHOTO, np.asarray(PHOTO), torch.tensor(np.asarray(PHOTO)).permute(2, 0, 1)]
    for example in single:
        assert only(Model(), example).args[0].shape == (1, 3, 8, 8), type(example)
    several: list[Any] = [[path, PHOTO], [str(path), str(path)], (PHOTO, PHOTO)]
    for example in several:
        assert only(Model(), example).args[0].shape == (2, 3, 8, 8)
        assert only(Model(), example).size == 2


def test_the_preprocessing_on_a_wrapper_counts_and_what_only_bears_its_name_does_not() -> None:
    wrapper = nn.DataParallel(nn.Conv2d(3, 2, 1))
    wrapper.preprocess = Preprocess((6, 6), (6, 6))  # type: ignore[assignment]
    assert model_call(wrapper, PHOTO).args[0].shape == (1, 3, 6, 6)
    assert model_call(nn.DataParallel(Model()), PHOTO).args[0].shape == (1, 3, 8, 8)
    model = Model()
    model.preprocess = "imagenet"  # type: ignore[assignment]
    with pytest.raises(ImageError, match="has no preprocessing"):
        model_call(model, PHOTO)


def test_a_tuple_with_tensors_is_several_arguments_and_a_mapping_is_keywords() -> None:
    x, y = torch.randn(2, 3, 8, 8), torch.tensor([1, 2])
    args = only(Model(), (x, y))
    assert torch.equal(args.args[0], x)
    assert torch.equal(args.args[1], y)
    assert args.labels is None
    kwargs = only(Model(), {"x": x, "deep": {"y": [y, None]}})
    assert kwargs.args == ()
    assert torch.equal(kwargs.kwargs["deep"]["y"][0], y)
    assert kwargs.size == 2


def test_a_data_loader_gives_batches_with_labels() -> None:
    x, y = torch.randn(5, 3, 8, 8), torch.arange(5)
    found = list(model_calls(Model(), DataLoader(TensorDataset(x, y), batch_size=2)))
    assert [each.size for each in found] == [2, 2, 1]
    assert torch.equal(torch.cat([each.args[0] for each in found]), x)
    assert torch.equal(torch.cat([each.labels for each in found]), y)
    without = list(model_calls(Model(), DataLoader(TensorDataset(x), batch_size=5)))
    assert without[0].labels is None
    (real,) = model_calls(Model().double(), [(x, y.float())])
    assert real.labels.dtype == real.args[0].dtype == torch.float64
    more = next(model_calls(Model(), DataLoader(TensorDataset(x, y, y + 1), batch_size=5)))
    assert torch.equal(more.labels[1], y + 1)


def test_batches_come_as_tensors_mappings_pictures_and_pairs_of_these_with_labels() -> None:
    x, y = torch.randn(2, 3, 8, 8), torch.tensor([0, 1])
    batches: list[Any] = [x, {"x": x}, [PHOTO, PHOTO], (x, y), [x, y], ([PHOTO, PHOTO], y), ({"x": x}, y)]
    found = list(model_calls(Model(), iter(batches)))
    assert [each.size for each in found] == [2] * 7
    assert [each.labels is not None for each in found] == [False, False, False, True, True, True, True]
    assert [len(each.kwargs) for each in found] == [0, 1, 0, 0, 0, 0, 1]
    assert all(torch.equal(each.labels, y) for each in found[3:])
    # A list of batches is one too.
    assert [each.size for each in model_calls(Model(), [x, (x, y)])] == [2, 2]


def test_batches_are_made_as_they_are_asked_for() -> None:
    asked: list[int] = []

    def batches() -> Iterator[Tensor]:
        for at in range(3):
            asked.append(at)
            yield torch.randn(1, 3, 8, 8)

    found = model_calls(Model(), batches())
    assert asked == []
    next(found)
    assert asked == [0]


def test_an_empty_iterable_has_no_batch() -> None:
    assert list(model_calls(Model(), [])) == []
    assert list(model_calls(Model(), iter(()))) == []


@pytest.mark.parametrize("data", [7, None, 1.5, object()])
def test_what_is_no_data_is_an_error_that_says_what_was_expected(data: Any) -> None:
    with pytest.raises(ImageError, match="expected a tensor, images, or an iterable of batches, got"):
        list(model_calls(Model(), data))


def test_the_users_tensors_are_not_changed() -> None:
    x = torch.randn(1, 3, 8, 8)
    version = x._version
    assert model_call(Model(), x).args[0].data_ptr() == x.data_ptr()
    assert (x._version, x.requires_grad) == (version, False)
