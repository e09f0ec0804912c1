"""Every method keeps every promise, and the registry knows each by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import saliency
from saliency import METHODS, Attribution, GradCAM
from saliency.attribution.base import get_method
from saliency.testing import checks, images, tiny_model_for
from saliency.testing.guarantees import CHECKS
from tests.methods.model_checks import model_checks
from tests.selection import case, of_each_family

pytestmark = pytest.mark.usefixtures("_registry_restored")

# What a method computes decides over these, so they run on every method by default. The base classes keep the others,
# which run on one method of each family.
OF_EACH_METHOD = {
    *("documented", "result", "residual", "settings", "batch_equals_single_images", "signed_layer", "non_square"),
    *("global_seed_does_not_matter", "chunk_size_does_not_matter", "constant_image", "zero_gradient", "one_pixel"),
}

CASES = [
    case(check, id=f"{name}-{check_name}", by_default=check_name in OF_EACH_METHOD or not marks)
    for (name,), marks, _ in of_each_family()
    for check_name, check in checks(METHODS[name]) + model_checks(METHODS[name])
]


@pytest.mark.parametrize("check", CASES)
def test_every_method_keeps_every_promise(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (saliency.RectGrad, {"percentile": 50.0}),
        (saliency.GuidedBackprop, {"smooth": "positive"}),
        (saliency.FusedCAM, {"layers": ["norm", "last"], "cam": "grad_cam", "gamma": 1.0}),
        (saliency.HiResCAM, {"layer": "down"}),
        (saliency.LRP, {"layer": "down", "composite": "gamma"}),
        (saliency.LRP, {"layer": "stem", "through": {"stem": [1, 2], "last": [0]}}),
        (saliency.ExcitationBackprop, {"contrastive": True}),
    ],
)
@pytest.mark.slow
def test_the_promises_hold_for_other_options_too(cls: type[Attribution], options: dict[str, Any]) -> None:
    for _, check in checks(cls, **options) + model_checks(cls, **options):
        check()


@pytest.mark.filterwarnings("ignore::saliency.errors.SaliencyWarning")
@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_gives_a_contrast_and_its_opposite_one_map_says_so(name: str) -> None:
    cls = METHODS[name]
    method = cls(tiny_model_for(cls)(), **cls.preview_options)
    try:
        one, opposite = (method.attribute(images(2), saliency.contrast(*pair)) for pair in ((0, 1), (1, 0)))
    except saliency.errors.NotApplicableError:
        return
    if "rounding error" in one.notes[0]:
        return
    is_same = torch.allclose(one.values, opposite.values, rtol=1e-3, atol=1e-3 * float(one.values.abs().max()))
    assert is_same == cls.ignores_sign
    same = f"{name} gives a contrast and its opposite the same map"
    assert [note == same for note in one.notes] == [is_same] * 2
    assert same not in method.attribute(images(2), 1).notes


class Flat(nn.Module):
    """A model whose classes have a constant score, or nearly so."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.features = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = 1000 + self.scale * self.features(x).relu().mean((2, 3))
        return scores


@pytest.mark.parametrize("name", ["grad_cam", "vanilla_gradient", "input_x_gradient", "layer_cam", "hires_cam"])
@pytest.mark.parametrize(
    ("scale", "message"), [(0.0, "is 0 everywhere"), (1e-9, r"is at most .*, below the rounding error")]
)
def test_a_map_of_rounding_errors_or_zeros_warns(scale: float, message: str, name: str) -> None:
    method = METHODS[name](Flat(scale).eval(), **METHODS[name].preview_options)
    with pytest.warns(saliency.errors.SaliencyWarning, match=f"the {name} map for class 1 {message}"):
        explanation = method.attribute(images(1), 1)
    assert f"the {name} map for class 1" in explanation.notes[0]
    assert explanation[0].notes == explanation.notes


@pytest.mark.filterwarnings("error::saliency.errors.SaliencyWarning")
@pytest.mark.filterwarnings("ignore:.*(no ReLU|biases|the fractions|converge|varied|steps|residual)")
@pytest.mark.parametrize("target", [1, saliency.probability(1)], ids=["class", "probability"])
@pytest.mark.parametrize("name", of_each_family())
def test_a_map_of_a_normal_network_is_not_called_rounding(target: Any, name: str) -> None:
    cls = METHODS[name]
    method = cls(tiny_model_for(cls)(), **cls.preview_options)
    try:
        explanation = method.attribute(images(2), target)
    except saliency.errors.NotApplicableError:
        return
    assert not any("rounding" in note for note in explanation.notes)


class TinyTokens(nn.Module):
    """Attention over the patches of a picture of any size, behind a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.token = nn.Parameter(torch.ones(1, 1, 8))
        self.norm = nn.LayerNorm(8)
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm2 = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1)
        normed = self.norm(tokens)
        tokens = tokens + self.mix(normed, normed, normed, need_weights=False)[0]
        scores: Tensor = self.head(self.norm2(tokens)[:, 0].relu())
        return scores


def tiny_tokens() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return TinyTokens().eval()


@pytest.mark.parametrize("cls", [saliency.GuidedBackprop, GradCAM, saliency.EigenCAM, saliency.GuidedGradCAM])
@pytest.mark.slow
def test_the_promises_hold_on_a_model_of_tokens(cls: type[Attribution]) -> None:
    for _, check in checks(cls, model=tiny_tokens):
        check()


@pytest.mark.parametrize("cls", [saliency.AttnLRP, saliency.CPLRP])
@pytest.mark.slow
def test_the_promises_hold_at_patches(cls: type[Attribution]) -> None:
    for _, check in checks(cls, model=tiny_tokens, at="patches"):
        check()


# The registry.


def test_a_second_class_of_one_name_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r'"grad_cam" belongs to saliency\.methods\.cam\.GradCAM'):
        type("Another", (saliency.VanillaGradient,), {"name": "grad_cam"})
    assert METHODS["grad_cam"] is GradCAM


def test_the_same_class_may_be_defined_again() -> None:
    def define() -> type[Attribution]:
        class Again(saliency.VanillaGradient):
            name = "again"

        return Again

    first, second = define(), define()
    assert first is not second
    assert METHODS["again"] is second


def test_a_class_without_a_name_stays_out_of_the_registry() -> None:
    class Helper(saliency.VanillaGradient):
        pass

    assert Helper not in METHODS.values()


def test_an_unknown_method_gets_the_closest() -> None:
    with pytest.raises(saliency.errors.MethodError, match='no method "gradcam"; did you mean "grad_cam"'):
        get_method("gradcam")
    with pytest.raises(saliency.errors.MethodError, match=r"the methods are .*guided_backprop"):
        get_method("zzzz")


def test_the_promises_of_each_method_are_among_the_checks() -> None:
    assert CHECKS.keys() >= OF_EACH_METHOD


def test_keywords_without_types_go_on_to_the_base_class() -> None:
    class Mine(saliency.RISE):
        def __init__(self, model: nn.Module, *, mine: int = 1, **kwargs: Any) -> None:
            super().__init__(model, **kwargs)
            self.mine = mine

    assert Mine.options() == ("mine", *saliency.RISE.options())
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert Mine(model, passes=3, grid=2).attribute(torch.rand(1, 3, 8, 8), 0).values.shape == (1, 1, 8, 8)
    with pytest.raises(TypeError, match='Mine has no option "gird"'):
        Mine(model, gird=2)

    class Mixed:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    class Both(Mixed, saliency.RISE):
        pass

    assert Both(model, passes=3, grid=2).attribute(torch.rand(1, 3, 8, 8), 0).values.shape == (1, 1, 8, 8)
