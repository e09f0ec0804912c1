"""Patches whose tokens have an outlying norm are marked in the result of methods of attention."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

import saliency
from saliency import AttentionRollout, CheferAttention, Explanation, GradCAM
from saliency.testbed import draw_scenes
from saliency.testing import images, tiny_model, tiny_transformer


def with_bright_patch() -> Tensor:
    x = images(2)
    x[0, :, 4:8, 8:12] *= 50
    return x


def test_a_token_of_outlying_norm_is_marked() -> None:
    model, x = tiny_transformer(), with_bright_patch()
    captured: list[Tensor] = []
    handle = model.get_submodule("norm").register_forward_pre_hook(lambda _, inputs: captured.append(inputs[0]))
    model(x)
    handle.remove()
    lengths = captured[0][:, 1:].norm(dim=-1)  # without the class token
    median = lengths.median(1, keepdim=True).values
    deviation = (lengths - median).abs().median(1, keepdim=True).values
    expected = (lengths > median + 5 * deviation) & (lengths > 2 * median)
    found = CheferAttention(model).attribute(x, 1)
    assert found.outliers is not None
    assert torch.equal(found.outliers.flatten(1), expected)
    assert found.outliers[0, 1, 2]
    assert str(found.coverage) == f"{int(expected.sum())} outlier tokens (hatched)"


def test_objects_that_a_network_with_registers_recognises_are_not_marked() -> None:
    scenes = draw_scenes(20, seed=1_000_007)
    found = AttentionRollout(saliency.load("shapes_vit")).attribute(scenes.images, scenes.labels.tolist())
    assert found.outliers is not None
    assert not found.outliers.any()


def test_marks_are_saved_and_divided_among_images(tmp_path: Path) -> None:
    found = AttentionRollout(tiny_transformer()).attribute(with_bright_patch(), 1)
    loaded = Explanation.load(found.save(tmp_path / "map.safetensors"))
    assert found.outliers is not None
    assert loaded.outliers is not None
    assert torch.equal(loaded.outliers, found.outliers)
    assert loaded[1].outliers is not None
    assert torch.equal(loaded[1].outliers, found.outliers[1:])


def test_equal_tokens_are_no_outliers() -> None:
    found = AttentionRollout(tiny_transformer()).attribute(torch.zeros(1, 3, 16, 16), 1)
    assert found.outliers is not None
    assert not found.outliers.any()
    assert GradCAM(tiny_model()).attribute(images(1), 1).outliers is None
