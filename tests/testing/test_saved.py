"""An explanation equals a saved one up to rounding, or the error says where they differ, and draws both."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import saliency
from saliency.batch import batch
from saliency.errors import ExplanationError
from saliency.testing import assert_same_explanation, images, tiny_model

COFFEE = Path(__file__).parents[2] / "assets" / "coffee.jpg"
RECIPES = Path(__file__).parents[2] / "docs" / "recipes.md"


@pytest.fixture
def explanation() -> saliency.Explanation:
    return saliency.GradCAM(tiny_model()).attribute(images(2), [0, 1])


def changed(explanation: saliency.Explanation, *index: int, by: float) -> saliency.Explanation:
    values = explanation.values.clone()
    values[index] += by
    return replace(explanation, values=values)


def test_an_explanation_equals_itself_and_rounding(explanation: saliency.Explanation, tmp_path: Path) -> None:
    path = explanation.save(tmp_path / "map.safetensors")
    assert_same_explanation(explanation, path)
    assert_same_explanation(changed(explanation, 0, 0, 2, 3, by=1e-6 * float(explanation.values.max())), str(path))
    assert [file.name for file in tmp_path.iterdir()] == ["map.safetensors"]


def test_the_error_states_the_difference_its_place_and_the_rank_correlation(
    explanation: saliency.Explanation, tmp_path: Path
) -> None:
    path = explanation.save(tmp_path / "map.safetensors")
    with pytest.raises(AssertionError, match=r"image 1: .* 2 at \(0, 2, 3\).* rank correlation is 0\.\d{4}") as caught:
        assert_same_explanation(changed(explanation, 1, 0, 2, 3, by=-2.0), path)
    assert "image 0" not in str(caught.value)
    assert not list(tmp_path.glob("*.png"))  # of tensors, nothing is drawn
    with pytest.raises(AssertionError, match="nan"):
        assert_same_explanation(changed(explanation, 0, 0, 0, 0, by=torch.nan), path)


def test_a_larger_difference_is_allowed_unless_it_changes_the_order(
    explanation: saliency.Explanation, tmp_path: Path
) -> None:
    path, largest = explanation.save(tmp_path / "map.safetensors"), float(explanation.values.abs().max())
    assert_same_explanation(replace(explanation, values=1.01 * explanation.values), path, atol=0.011 * largest)
    reverse = replace(explanation, values=-explanation.values)
    with pytest.raises(AssertionError, match=r"rank correlation is -1.0000, at least 0.99"):
        assert_same_explanation(reverse, path, atol=3 * largest)
    assert_same_explanation(reverse, path, atol=3 * largest, rank=-1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"method": "lrp"}, "method is 'lrp', expected 'grad_cam'"),
        ({"layer": "down"}, "layer is 'down', expected 'relu'"),
        ({"values": torch.zeros(2, 1, 4, 4)}, r"shape \(2, 1, 4, 4\), expected \(2, 1, 8, 8\)"),
    ],
)
def test_another_question_is_named(
    explanation: saliency.Explanation, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    path = explanation.save(tmp_path / "map.safetensors")
    with pytest.raises(AssertionError, match=reason):
        assert_same_explanation(replace(explanation, **change), path)
    with pytest.raises(AssertionError, match=r"target_names is \('class 0',\), expected \('class 0', 'class 1'\)"):
        assert_same_explanation(explanation[0], path)


def test_both_overlays_are_drawn_side_by_side(tmp_path: Path) -> None:
    method = saliency.GradCAM(saliency.load("shapes_cnn"))
    path = method.attribute(COFFEE, 0).save(tmp_path / "coffee.safetensors")
    with pytest.raises(AssertionError, match=re.escape(f"overlay: {tmp_path / 'coffee.difference.png'}")):
        assert_same_explanation(changed(method.attribute(COFFEE, 0), 0, 0, 1, 1, by=5.0), path)
    with Image.open(tmp_path / "coffee.difference.png") as drawn:
        assert drawn.width > 3 * 240


def test_a_map_of_a_batch_equals_the_explanation_in_half_precision(tmp_path: Path) -> None:
    batch(COFFEE, tmp_path, "shapes_cnn", ["vanilla_gradient"], maps=True, target=0)
    explanation = saliency.VanillaGradient(saliency.load("shapes_cnn")).attribute(COFFEE, 0)
    path = tmp_path / "maps" / "coffee.vanilla_gradient.safetensors"
    assert_same_explanation(explanation, path)
    with pytest.raises(AssertionError):
        assert_same_explanation(explanation, path, atol=1e-5 * float(explanation.values.abs().max()))


def test_a_missing_file_is_an_error_of_its_own(explanation: saliency.Explanation, tmp_path: Path) -> None:
    with pytest.raises(ExplanationError, match="none"):
        assert_same_explanation(explanation, tmp_path / "none.safetensors")


def test_the_recipe_for_ci_passes_until_the_map_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "assets").symlink_to(COFFEE.parent)
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^## Notice when.*?^```python\n(.*?)^```", RECIPES.read_text(), re.MULTILINE | re.DOTALL)
    recipe: dict[str, Any] = {"__name__": "__main__"}
    exec(code, recipe)  # noqa: S102
    recipe["test_the_espresso_is_found_as_before"]()
    explained = recipe["explain"]()
    recipe["explain"] = lambda: replace(explained, values=explained.values.flip(3))
    with pytest.raises(
        AssertionError, match=r"(?s)espresso.safetensors: another grad_cam map.*espresso.difference.png"
    ):
        recipe["test_the_espresso_is_found_as_before"]()
