"""What an option may be: NumPy's numbers count as Python's do, and the error names the option."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import saliency
from saliency import MethodError
from saliency.options import chosen, is_whole, whole_number


@pytest.mark.parametrize("given", [1, 7, np.int64(3), np.uint8(200)])
def test_whole_numbers_are_those_of_python_and_numpy(given: Any) -> None:
    found = whole_number("passes", given)
    assert (type(found), found) == (int, int(given))


@pytest.mark.parametrize(
    "given", [0, -1, True, np.True_, 2.0, np.float32(2), "2", None, np.array([2]), torch.tensor(2)]
)
def test_what_is_no_count_is_refused_by_name(given: Any) -> None:
    assert not is_whole(given)
    with pytest.raises(MethodError, match=r"passes=.* is not a whole number of at least 1"):
        whole_number("passes", given)


def test_the_least_number_is_an_option() -> None:
    assert whole_number("steps", 2, least=2) == 2
    with pytest.raises(MethodError, match="of at least 2"):
        whole_number("steps", 1, least=2)
    assert is_whole(-3, least=None)


def test_a_choice_is_named_with_the_closest() -> None:
    assert chosen("rule", "zero", ("zero", "one")) == "zero"
    with pytest.raises(MethodError, match=r"rule='zeros' is not one of 'zero', 'one'; did you mean \"zero\"\?"):
        chosen("rule", "zeros", ("zero", "one"))


def of_numpy(number: int) -> Any:
    return np.int64(number)


MADE: dict[str, Callable[[nn.Module], saliency.Attribution]] = {
    "passes, chunk and seed": lambda model: saliency.RISE(
        model, passes=of_numpy(6), chunk=of_numpy(3), seed=of_numpy(5), grid=of_numpy(2)
    ),
    "steps": lambda model: saliency.IntegratedGradients(model, steps=of_numpy(4)),
    "windows": lambda model: saliency.Occlusion(model, window=of_numpy(8), stride=(of_numpy(8), 8)),
}


@pytest.mark.parametrize("made", MADE)
def test_numbers_of_numpy_count_as_pythons_do(made: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)).eval()
    found = MADE[made](model).attribute(torch.rand(1, 3, 16, 16), 2)
    assert found.values.isfinite().all()
    assert torch.equal(saliency.Explanation.load(found.save(tmp_path / "kept")).values, found.values)
