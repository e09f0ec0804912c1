"""Wrong names are answered by the right ones: options, arguments of `attribute`, methods and public names."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import saliency
from saliency import METHODS
from saliency.errors import closest
from tests.models import PooledNet

MODEL = PooledNet().eval()
X = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("option", "hint"), [("step", 'did you mean "steps"?'), ("bogus", "there are model, baseline, rule")]
)
def test_an_unknown_option_is_answered_by_the_one_that_is_meant(option: str, hint: str) -> None:
    with pytest.raises(TypeError) as caught:
        METHODS["integrated_gradients"](MODEL, **{option: 1})
    assert str(caught.value).startswith(f'IntegratedGradients has no option "{option}"; {hint}')


@pytest.mark.parametrize("name", METHODS)
def test_an_unknown_option_names_the_class_that_was_called(name: str) -> None:
    with pytest.raises(TypeError, match=rf'^{METHODS[name].__name__} has no option "bogus"; there are model, '):
        METHODS[name](MODEL, bogus=1)


def test_a_method_that_is_called_shows_the_call() -> None:
    with pytest.raises(TypeError, match=r"GradCAM\(model\)\.attribute\(inputs, target\)"):
        saliency.GradCAM(MODEL)(X, 1)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("GradCam", 'did you mean "GradCAM"'),
        ("gradcam", 'did you mean "GradCAM"'),
        ("IntegratedGradient", 'did you mean "IntegratedGradients"'),
    ],
)
def test_an_unknown_public_name_is_answered_by_the_closest(name: str, hint: str) -> None:
    with pytest.raises(AttributeError, match=f'saliency has no "{name}"; {hint}') as caught:
        getattr(saliency, name)
    assert caught.value.name == name
    assert not hasattr(saliency, name)
    assert getattr(saliency, name, None) is None
    with pytest.raises(ImportError, match=name):
        exec(f"from saliency import {name}")  # noqa: S102


def test_the_registry_is_a_dict_whose_missing_names_are_answered() -> None:
    with pytest.raises(KeyError, match='no method "gradcam"; did you mean "grad_cam"'):
        METHODS["gradcam"]
    assert "gradcam" not in METHODS
    assert METHODS.get("gradcam") is None
    assert dict(METHODS) == METHODS


CLOSEST: dict[str, Callable[[], tuple[str, list[str], list[str]]]] = {
    "whole words, the shortest first": lambda: (
        "cat",
        ["crate", "oxcart", "Egyptian cat", "tiger cat", "catamaran", "tabby, tabby cat"],
        ["tiger cat", "Egyptian cat", "tabby, tabby cat", "catamaran"],
    ),
    "all words in any order": lambda: ("cat tiger", ["cat", "tiger cat"], ["tiger cat"]),
    "beginnings before parts": lambda: ("bird", ["hummingbird", "birdhouse"], ["birdhouse", "hummingbird"]),
    "parts before spelling": lambda: ("cam", ["calm", "gradcam"], ["gradcam", "calm"]),
    "no word": lambda: ("", ["a", "b"], []),
}


@pytest.mark.parametrize("case", CLOSEST)
def test_the_closest_words_are_ordered(case: str) -> None:
    word, words, expected = CLOSEST[case]()
    assert closest(word, words, most=4) == expected
