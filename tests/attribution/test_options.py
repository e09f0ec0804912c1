"""What an option may be: NumPy's numbers count as Python's do, and the error names the option."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import warnings
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import saliency
import saliency.testing
from saliency import METHODS
from saliency.attribution.options import Option
from saliency.errors import MethodError, RenderError, SaliencyError, SaliencyWarning
from saliency.validation import check_choice, check_integer, check_number, is_integer
from tests.models import PooledNet, small_vit

NO_NUMBERS: list[Any] = [
    "many", None, [None], math.nan, math.inf, True, np.True_, object(), torch.tensor(1), np.array([1.0])
]  # fmt: skip


@pytest.mark.parametrize("given", [1, 7, np.int64(3), np.uint8(200)])
def test_whole_numbers_are_those_of_python_and_numpy(given: Any) -> None:
    found = check_integer("passes", given)
    assert (type(found), found) == (int, int(given))


@pytest.mark.parametrize(
    "given", [0, -1, True, np.True_, 2.0, np.float32(2), "2", None, np.array([2]), torch.tensor(2)]
)
def test_what_is_no_count_is_refused_by_name(given: Any) -> None:
    assert not is_integer(given)
    with pytest.raises(MethodError, match=r"passes=.* is not a whole number of at least 1"):
        check_integer("passes", given)


def test_the_least_number_is_an_option() -> None:
    assert check_integer("steps", 2, least=2) == 2
    with pytest.raises(MethodError, match="of at least 2"):
        check_integer("steps", 1, least=2)
    assert is_integer(-3, least=None)


def test_a_choice_is_named_with_the_closest() -> None:
    assert check_choice("rule", "zero", ("zero", "one")) == "zero"
    with pytest.raises(MethodError, match=r"rule='zeros' is not one of 'zero', 'one'; did you mean \"zero\"\?"):
        check_choice("rule", "zeros", ("zero", "one"))


@pytest.mark.parametrize("given", [0.5, 1, np.float32(0.5), np.int64(1), Fraction(1, 2)])
def test_real_numbers_are_those_of_python_and_numpy(given: Any) -> None:
    found = check_number("gamma", given, above=0, most=1)
    assert (type(found), found) == (float, float(given))


@pytest.mark.parametrize("given", [0, 1.01, *NO_NUMBERS])
def test_what_is_no_number_within_bounds_is_refused_by_name(given: Any) -> None:
    with pytest.raises(MethodError, match=r"gamma=.* is not a finite number above 0 and of at most 1; usual"):
        check_number("gamma", given, above=0, most=1, hint="; usual")


def test_the_bounds_and_the_error_are_the_callers() -> None:
    assert check_number("limit", 0, least=0) == 0
    for bounds in ({"least": 0.1}, {"above": 0}, {"most": -0.1}, {"below": 0}):
        with pytest.raises(RenderError, match="limit=0 is not a finite number"):
            check_number("limit", 0, **bounds, error=RenderError)


SMALL = PooledNet().eval()
COUNTED = {"passes", "seconds", "tolerance", "chunk", "channels"}  # by default none, or found by trying


def refused(method: type[saliency.Attribution], option: str, given: Any) -> str:
    """The message of the error about an option; empty where it is taken."""
    try:
        method(SMALL, **{**method.preview_options, option: given})
    except SaliencyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", METHODS)
def test_every_option_of_a_method_is_checked_when_it_is_made(name: str) -> None:
    method = METHODS[name]
    for option, default in method(SMALL, **method.preview_options).settings.items():
        is_number = isinstance(default, int | float) or option in COUNTED
        taken = [given for given in NO_NUMBERS if not refused(method, option, given).startswith(option)]
        if isinstance(default, bool):
            assert all(given in (True, False) for given in taken), (option, taken)
        elif is_number:
            takes_none = option != "chunk" and getattr(method, option).default is None
            assert taken == [None] * takes_none, (option, taken)


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
    model = PooledNet().eval()
    found = MADE[made](model).attribute(torch.rand(1, 3, 16, 16), 2)
    assert found.values.isfinite().all()
    assert torch.equal(saliency.Explanation.load(found.save(tmp_path / "kept.safetensors")).values, found.values)


class Shifted(saliency.VanillaGradient):
    """The gradient with two options."""

    name = ""
    shift: Option[int] = Option(2, check_integer)
    limit: Option[float | None] = Option(None, check_number, above=0)

    def __post_init__(self) -> None:
        self.sum = self.shift + (self.limit or 0)


class Written(Shifted):
    """A subclass with a constructor of its own."""

    def __init__(self, model: nn.Module, *, own: int = 1, **options: Any) -> None:
        super().__init__(model, **options)
        self.own = own


def test_declared_options_are_the_keywords_of_the_constructor() -> None:
    about_the_model = "preprocess=None, categories=None, whole=False, layout=None"
    assert str(inspect.signature(Shifted)) == f"(model, *, shift=2, limit=None, {about_the_model})"
    assert str(inspect.signature(saliency.SmoothGrad.__init__)).startswith("(self, model, *, noise=0.15, inner=")
    assert Shifted.options() == ("shift", "limit")
    method = Shifted(SMALL, shift=np.int64(3).item(), limit=0.5)
    assert (method.shift, method.limit, method.sum) == (3, 0.5, 3.5)
    assert dict(method.settings) == {"shift": 3, "limit": 0.5}
    assert "shift=3, limit=0.5" in repr(method)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda method: pickle.loads(pickle.dumps(method))])
def test_copies_keep_the_options(duplicate: Callable[[Any], Any]) -> None:
    method = duplicate(Shifted(SMALL, shift=3))
    assert (method.shift, method.limit, method.sum) == (3, None, 3)


def test_wrong_options_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match='Shifted has no option "shfit"; did you mean "shift"'):
        Shifted(SMALL, shfit=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"Shifted\(\) missing a required argument: 'model'"):
        Shifted()  # type: ignore[call-arg]
    with pytest.raises(MethodError, match="shift=0 is not a whole number"):
        Shifted(SMALL, shift=0)
    with pytest.raises(MethodError, match="limit=0 is not a finite number above 0"):
        Shifted(SMALL, limit=0)


def test_a_constructor_of_a_subclass_passes_keywords_on() -> None:
    assert Written.options() == ("own", "shift", "limit")
    method = Written(SMALL, own=5, shift=7)
    assert (method.own, method.shift, method.sum) == (5, 7, 7)
    with pytest.raises(MethodError, match="shift=0"):
        Written(SMALL, shift=0)


def test_an_option_without_its_constructor_names_the_cause() -> None:
    class Forgetful(Shifted):
        def __init__(self, model: nn.Module) -> None:
            self.anything = 1

    assert Forgetful.options() == ()
    with pytest.raises(AttributeError, match=r"call super\(\).__init__"):
        Forgetful(SMALL).shift  # noqa: B018


# The whole image.


def photo_model(method: type[saliency.Attribution] = saliency.GradCAM) -> nn.Module:
    model: Any = saliency.testing.tiny_model_for(method)()
    model.preprocess = saliency.Preprocess(size=(16, 16), resize=20)
    return cast("nn.Module", model)


PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 60, 3), dtype=np.uint8))


@pytest.mark.parametrize(
    ("name", "whole", "size"), [("grad_cam", True, (16, 16)), *((name, "aspect", (20, 40)) for name in METHODS)]
)
def test_every_method_explains_the_whole_image(name: str, whole: Any, size: tuple[int, int]) -> None:
    quick = METHODS[name].preview_options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaliencyWarning)
        found = METHODS[name](photo_model(METHODS[name]), **quick, whole=whole).attribute(PHOTO, 1)
    assert found.input_size == size
    assert [frame.box for frame in found.frames if frame] == [(0, 0, 60, 30)]
    assert found.settings["whole"] == whole
    assert saliency.overlay(found).size == PHOTO.size
    assert "whole" not in METHODS[name](photo_model(METHODS[name]), **quick).settings


def test_a_wrapped_method_and_its_wrapper_see_the_same_whole_image() -> None:
    inside = saliency.SmoothGrad(saliency.GradCAM(photo_model(), whole=True), passes=2)
    named = saliency.SmoothGrad(photo_model(), inner="grad_cam", passes=2, whole=True)
    also = saliency.SmoothGrad(photo_model(), inner="grad_cam", inner_options={"whole": True}, passes=2)
    assert inside.settings == named.settings == also.settings
    assert inside.preprocess == named.preprocess == also.preprocess
    maps = [method.attribute(PHOTO, 1).values for method in (inside, named, also)]
    assert torch.equal(maps[0], maps[1])
    assert torch.equal(maps[0], maps[2])


def test_a_whole_image_that_the_model_does_not_take_is_an_error_with_its_size() -> None:
    model: Any = small_vit(size=16)
    model.preprocess = saliency.Preprocess(size=(16, 16), resize=20)
    assert saliency.VanillaGradient(model, whole=True).attribute(PHOTO, 1).values.shape == (1, 3, 16, 16)
    with pytest.raises(saliency.errors.ModelError, match="1x3x20x40"):
        saliency.VanillaGradient(model, whole="aspect").attribute(PHOTO, 1)
    with pytest.raises(MethodError, match="whole='no' is not one of False, True, 'aspect'"):
        saliency.VanillaGradient(model, whole="no")  # type: ignore[arg-type]
