"""What is explained: every way to say it, its closed form, and what a mistake gets to hear."""

from __future__ import annotations

import re
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import saliency
from saliency import (
    METHODS,
    Explanation,
    SmoothGrad,
    VanillaGradient,
    contrast,
    probability,
    region,
    similarity,
    text,
    value,
)
from saliency.attribution.questions import Questions
from saliency.errors import NonFiniteError, SaliencyError, TargetError
from saliency.render.overlay import probability as probability_text
from saliency.targets.classes import as_categories, as_target, output_tensor
from saliency.targets.question import Images
from saliency.testing import tiny_model, tiny_model_for
from saliency.testing.case import images
from tests import dual_encoders
from tests.models import LinearModel, Packed
from tests.selection import of_each_family

NAMES = ["ant", "crane", "tiger cat", "crane", "Tabby"]


class Segmenter(nn.Module):
    """A linear classifier of every pixel: (N, 3, H, W) -> {"out": (N, 4, H, W)}."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, generator=torch.Generator().manual_seed(2)))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = torch.einsum("nchw,kc->nkhw", x, self.weight)
        return {"out": scores, "aux": scores}


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, 2, 2, generator=torch.Generator().manual_seed(0))


def rows(model: LinearModel, *classes: int) -> Tensor:
    """The gradients of some classes' scores."""
    return model.weight.detach()[list(classes)].reshape(-1, 3, 2, 2)


# A class by index.


@pytest.mark.parametrize(
    "target",
    [
        3,
        np.int64(3),
        np.uint8(3),
        np.array(3),
        torch.tensor(3),
        torch.tensor(3, dtype=torch.uint8),
        [3, 3],
        (3, 3),
        range(3, 4),
        [np.int32(3), torch.tensor(3)],
        np.array([3, 3]),
        torch.tensor([3, 3]),
    ],
    ids=repr,
)
def test_a_class_index_in_any_spelling_gives_the_gradient_of_its_score(target: Any, x: Tensor) -> None:
    model = LinearModel()
    x = x[:1] if isinstance(target, range) else x
    found = VanillaGradient(model).attribute(x, target)
    assert torch.equal(found.values, rows(model, 3).expand_as(x))
    assert torch.equal(found.scores, model(x)[:, 3].detach())
    assert found.target == (3,) * len(x)
    assert found.target_names == ("class 3",) * len(x)


@pytest.mark.parametrize("target", [[4, 0], (4, 0), np.array([4, 0]), torch.tensor([4, 0]), range(4, -1, -4)], ids=repr)
def test_one_class_per_image(target: Any, x: Tensor) -> None:
    model = LinearModel()
    found = VanillaGradient(model).attribute(x, target)
    assert torch.equal(found.values, rows(model, 4, 0))
    assert found.target == (4, 0)


def test_without_a_target_the_top_class_of_each_image_is_explained(x: Tensor) -> None:
    model = LinearModel()
    top = model(x).argmax(1).tolist()
    found = VanillaGradient(model).attribute(x)
    assert found.target == tuple(top)
    assert torch.equal(found.values, rows(model, *top))


def test_none_in_a_list_is_the_top_class_of_its_image(x: Tensor) -> None:
    model = LinearModel()
    top = model(x).argmax(1).tolist()
    other = (top[1] + 1) % 5
    for target in ([None, other], [None, f"class {other}"]):
        found = VanillaGradient(model, categories=[f"class {i}" for i in range(5)]).attribute(x, target)
        assert found.target == (top[0], other)
        assert torch.equal(found.values, rows(model, top[0], other))


def test_the_probability_of_the_class_comes_with_it(x: Tensor) -> None:
    model = LinearModel()
    found = VanillaGradient(model).attribute(x, [4, 0])
    torch.testing.assert_close(found.probabilities, model(x).softmax(1)[[0, 1], [4, 0]].detach())
    settled = VanillaGradient(LinearModel(lambda scores: scores.softmax(1))).attribute(x, [4, 0])
    torch.testing.assert_close(settled.probabilities, found.probabilities)


def test_several_classes_of_one_image(x: Tensor) -> None:
    model = LinearModel()
    found = VanillaGradient(model, categories=NAMES).attribute_classes(x[0], [0, "Tabby", None, contrast(0, 4)])
    assert [each.target for each in found] == [(0,), (4,), (int(model(x[:1]).argmax()),), (0,)]
    torch.testing.assert_close(found[3].values, rows(model, 0) - rows(model, 4))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (-1, "class -1 is negative"),
        ([0, -2], "class -2 is negative"),
        (2.5, r"got 2\.5 \(float\)"),
        (1.0, r"got 1\.0 \(float\)"),
        (float("nan"), r"got nan \(float\)"),
        (True, r"got True \(bool\)"),
        ([True, False], r"got True \(bool\)"),
        (np.bool_(True), r"got .*True.* \(bool"),
        ([np.bool_(True), 0], r"got .*True.* \(bool"),
        (torch.tensor(True), r"got True \(bool\)"),
        ([torch.tensor(True), 0], r"got .*True"),
        (torch.tensor([0.0, 1.0]), r"got 0\.0 \(float\)"),
        (5, r"class 5 is outside 0\.\.4, the classes of the model's output"),
        (5000, r"class 5000 is outside 0\.\.4"),
        (2**70, r"is outside 0\.\.4"),
        ([0, 5], r"class 5 is outside 0\.\.4"),
        ([0], "got 1 targets for 2 images; pass one for all, or one per image"),
        ([0, 1, 2], "got 3 targets for 2 images"),
        ([], "got 0 targets for 2 images"),
        (torch.zeros(3, dtype=torch.long), "got 3 targets for 2 images"),
        (torch.zeros(2, 1), r"got a target of shape \(2, 1\); expected \(N,\), one class per image"),
        ([[0], [1]], r"got \[0\] \(list\)"),
        ({0: 1}, "got {0: 1}"),
        ({0, 1}, "got {0, 1}"),
        (1j, "got 1j"),
    ],
    ids=repr,
)
def test_what_is_no_class_is_refused_with_the_reason(target: Any, message: str, x: Tensor) -> None:
    with pytest.raises(TargetError, match=message):
        VanillaGradient(LinearModel()).attribute(x, target)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("names", [None, ["ill", "healthy"]], ids=["softmax", "sigmoid"])
def test_a_probability_of_logits_in_half_precision_is_computed_in_float32(
    x: Tensor, dtype: torch.dtype, names: list[str] | None
) -> None:
    class Half(nn.Module):
        """Logits in half precision: two, or one with two class names."""

        categories = names

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([x.sum((1, 2, 3)), x.mean((1, 2, 3))], 1)[:, : 2 if names is None else 1].to(dtype)

    model = Half()
    logits = model(x).float()
    expected = logits.softmax(1)[:, 1] if names is None else logits[:, 0].sigmoid()
    found = VanillaGradient(model).attribute(x, probability(1))
    for numbers in (found.scores, found.probabilities):
        assert numbers is not None
        torch.testing.assert_close(numbers.float(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("target", [-1, 2.5, True, [0, 1, 2], "ant", contrast(0, -1), probability([0])], ids=repr)
def test_what_can_be_refused_before_the_model_runs_is(target: Any, x: Tensor) -> None:
    def fail(scores: Tensor) -> Tensor:
        raise AssertionError("the model was run")

    with pytest.raises(TargetError):
        VanillaGradient(LinearModel(fail)).attribute(x, target)


# A class by name.


@pytest.mark.parametrize(
    "target", ["tiger cat", "Tiger Cat", ["tiger cat", "TIGER CAT"], ["tiger cat", 2], np.array(["tiger cat"] * 2)]
)
def test_a_class_name_is_looked_up(target: Any, x: Tensor) -> None:
    model = LinearModel()
    found = VanillaGradient(model, categories=NAMES).attribute(x, target)
    assert found.target == (2, 2)
    assert found.target_names == ("tiger cat", "tiger cat")
    assert torch.equal(found.values, rows(model, 2, 2))


def test_the_exact_spelling_comes_before_another_case(x: Tensor) -> None:
    method = VanillaGradient(LinearModel(), categories=["Jay", "jay", "JAY", "b", "c"])
    assert [method.attribute(x, name).target for name in ("Jay", "jay", "JAY")] == [(0, 0), (1, 1), (2, 2)]
    with pytest.raises(TargetError, match=r'several classes are named "jAY": 0, 1, 2; pass the index'):
        method.attribute(x, "jAY")


def test_a_name_that_two_classes_share_is_refused_with_their_indices(x: Tensor) -> None:
    method = VanillaGradient(LinearModel(), categories=NAMES)
    with pytest.raises(TargetError, match='several classes are named "crane": 1, 3; pass the index'):
        method.attribute(x, "crane")
    assert method.attribute(x, 3).target_names == ("crane", "crane")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tabi", r'no class "tabi" among 5 classes; did you mean "Tabby"\?'),
        ("tiger", r'did you mean "tiger cat"'),
        ("tgier cat", r'did you mean "tiger cat"'),
        ("zzz", r'no class "zzz" among 5 classes; the classes are ant, crane'),
        ("", r'no class "" among 5 classes; the classes are ant, crane'),
        ("3.0", r'no class "3.0" among 5 classes; the classes are ant, crane'),
        ("12", r"class 12 is outside 0\.\.4"),
        ("-1", "class -1 is negative"),
    ],
)
def test_an_unknown_name_gets_the_closest(name: str, message: str, x: Tensor) -> None:
    with pytest.raises(TargetError, match=message):
        VanillaGradient(LinearModel(), categories=NAMES).attribute(x, name)


def test_a_word_that_several_names_contain_is_refused_with_them(x: Tensor) -> None:
    method = VanillaGradient(LinearModel(), categories=["crate", "tiger cat", "Egyptian cat", "catamaran", "b"])
    with pytest.raises(
        TargetError, match=r'no class "cat" .*; did you mean "tiger cat" or "Egyptian cat" or "catamaran"'
    ):
        method.attribute(x, "cat")
    with pytest.raises(TargetError, match=r'no class "Egyptian" .*; did you mean "Egyptian cat"'):
        method.attribute(x, "Egyptian")


def test_one_of_the_names_of_a_class_is_enough(x: Tensor) -> None:
    names = ["tabby, tabby cat", "tiger cat", "crane", "crane, bird", "c"]
    method = VanillaGradient(LinearModel(), categories=names)
    assert [method.attribute(x, name).target for name in ("Tabby cat", "bird", "crane")] == [
        (0,) * 2,
        (3,) * 2,
        (2,) * 2,
    ]
    twice = VanillaGradient(LinearModel(), categories=["crane, bird", "crane, machine", "a", "b", "c"])
    with pytest.raises(TargetError, match='several classes are named "crane": 0, 1; pass the index'):
        twice.attribute(x, "crane")


@pytest.mark.parametrize("categories", [None, NAMES])
def test_digits_are_a_class(categories: list[str] | None, x: Tensor) -> None:
    method = VanillaGradient(LinearModel(), categories=categories)
    assert method.attribute(x, "3").target == (3, 3)
    assert method.attribute(x, ["0", "3"]).target == (0, 3)
    assert [found.target for found in method.attribute_classes(x, ["1", 2])] == [(1, 1), (2, 2)]


def test_digits_are_a_name_if_a_class_is_called_so(x: Tensor) -> None:
    method = VanillaGradient(LinearModel(), categories=["4", "3", "2", "1", "zero"])
    assert [method.attribute(x, label).target[0] for label in ("4", "1", 4, "0")] == [0, 3, 4, 0]


def test_a_name_without_categories_says_how_to_bring_them(x: Tensor) -> None:
    with pytest.raises(TargetError, match=r'class "ant" cannot be looked up.*set model\.categories.*saliency\.text'):
        VanillaGradient(LinearModel()).attribute(x, "ant")


def test_the_models_own_categories_count(x: Tensor) -> None:
    model = LinearModel()
    model.categories = NAMES  # type: ignore[assignment]
    assert VanillaGradient(model).attribute(x, "ant").target == (0, 0)
    assert VanillaGradient(model, categories=list("vwxyz")).attribute(x, "z").target == (4, 4)


def test_more_names_than_outputs_are_refused_for_every_class(x: Tensor) -> None:
    method = VanillaGradient(LinearModel(), categories=["background", *NAMES])
    for target in (None, 1, "ant", "Tabby", 5):
        with pytest.raises(TargetError, match="6 class names for a model of 5 classes"):
            method.attribute(x, target)


@pytest.mark.parametrize("target", [None, 1, "ant", probability(1), contrast(0, 1)], ids=repr)
def test_fewer_names_than_outputs_are_refused(target: Any, x: Tensor) -> None:
    with pytest.raises(TargetError, match=r"2 class names for a model of 5 classes; pass one name per class"):
        VanillaGradient(LinearModel(), categories=["ant", "crane"]).attribute(x, target)


def test_a_mapping_of_names_may_have_gaps(x: Tensor) -> None:
    method = VanillaGradient(LinearModel(), categories={3: "crane", 1: "ant"})
    assert method.attribute(x, "crane").target == (3, 3)
    assert [method.attribute(x, index).target_names[0] for index in (1, 2, 4)] == ["ant", "class 2", "class 4"]
    assert SmoothGrad(method, passes=2).attribute(x, "ant").target == (1, 1)
    with pytest.raises(TargetError, match="7 class names for a model of 5 classes"):
        VanillaGradient(LinearModel(), categories={6: "crane"}).attribute(x, 0)


def test_names_are_not_compared_with_numbers_that_are_no_classes(x: Tensor) -> None:
    assert VanillaGradient(LinearModel(), categories=["ant"]).attribute(x, value(4)).target_names[0] == "value 4"


# One number for two classes.

PACKS: dict[str, Callable[[Tensor], Any]] = {
    "(N, 1)": lambda scores: scores[:, :1],
    "(N,)": lambda scores: scores[:, 0],
    "logits": lambda scores: {"logits": scores[:, :1], "hidden": scores},
}
TWO_NAMES = ["healthy", "sick"]


@pytest.mark.parametrize("pack", PACKS.values(), ids=PACKS)
def test_a_number_with_two_names_is_the_logit_of_the_second(pack: Callable[[Tensor], Any], x: Tensor) -> None:
    model = LinearModel(pack)
    logit = LinearModel()(x)[:, 0].detach()
    method = VanillaGradient(model, categories=TWO_NAMES)
    for target, sign, index in (("sick", 1, 1), ("healthy", -1, 0), (0, -1, 0)):
        found = method.attribute(x, target)
        assert torch.equal(found.scores, sign * logit)
        assert torch.equal(found.values, sign * rows(model, 0, 0))
        assert found.target_names == (TWO_NAMES[index],) * 2
        torch.testing.assert_close(found.probabilities, (sign * logit).sigmoid())
        likely = method.attribute(x, probability(target))
        torch.testing.assert_close(likely.scores, (sign * logit).sigmoid())
        torch.testing.assert_close(likely.probabilities, likely.scores)
    top = method.attribute(x)
    assert top.target == tuple((logit > 0).long().tolist())
    assert torch.equal(top.scores, logit.abs())


@pytest.mark.filterwarnings("ignore:full_grad. 7 biases")  # a sigmoid is not piecewise linear
@pytest.mark.parametrize("pack", PACKS.values(), ids=PACKS)
@pytest.mark.parametrize(
    "name", ["vanilla_gradient", "rise", "eigen_cam", "occlusion", "input_x_gradient", "full_grad"]
)
def test_a_sigmoid_is_a_probability_with_and_without_a_graph(name: str, pack: Callable[[Tensor], Any]) -> None:
    x, model = images(2), Packed(lambda scores: pack((scores - 0.3).sigmoid())).eval()
    expected = (tiny_model()(x)[:, 0] - 0.3).sigmoid().detach()
    method = METHODS[name](model, categories=TWO_NAMES, **METHODS[name].preview_options)
    first, second = method.attribute(x, "healthy"), method.attribute(x, "sick")
    torch.testing.assert_close(second.scores, expected)
    torch.testing.assert_close(first.scores, -expected)
    torch.testing.assert_close(second.probabilities, expected)
    torch.testing.assert_close(first.probabilities, 1 - expected)
    torch.testing.assert_close(method.attribute(x, probability("healthy")).scores, 1 - expected)
    assert method.attribute(x).target == tuple((expected > 0.5).long().tolist())
    nameless = METHODS[name](model, **METHODS[name].preview_options).attribute(x, probability())
    torch.testing.assert_close(nameless.scores, expected)


def test_a_logit_of_0_to_1_is_no_probability() -> None:
    x, model = images(2), Packed(lambda scores: (scores - 0.3)[:, :1].sigmoid() * 1.0)
    for name in ("vanilla_gradient", "rise"):
        found = METHODS[name](model.eval(), categories=TWO_NAMES, **METHODS[name].preview_options).attribute(x, 1)
        torch.testing.assert_close(found.probabilities, found.scores.sigmoid())


def test_sigmoids_of_several_classes_are_their_probabilities() -> None:
    x, model = images(2), Packed(Tensor.sigmoid)
    expected = tiny_model()(x).sigmoid()[:, 2].detach()
    for name in ("vanilla_gradient", "rise"):
        method = METHODS[name](model.eval(), **METHODS[name].preview_options)
        torch.testing.assert_close(method.attribute(x, 2).probabilities, expected)
        torch.testing.assert_close(method.attribute(x, [probability(2), probability(2)]).scores, expected)


@pytest.mark.parametrize("categories", [None, ["sick"]])
def test_the_probability_of_a_number_without_two_names_is_refused(categories: Any, x: Tensor) -> None:
    method = VanillaGradient(LinearModel(lambda scores: scores[:, 0]), categories=categories)
    assert method.attribute(x).probabilities is None
    with pytest.raises(TargetError, match=r"one number per image.*names of both classes.*saliency\.value\(0\)"):
        method.attribute(x, probability())


def test_three_names_for_one_number_are_refused(x: Tensor) -> None:
    with pytest.raises(TargetError, match="3 class names for a model of 1 class;"):
        VanillaGradient(LinearModel(lambda scores: scores[:, 0]), categories=list("abc")).attribute(x)


# A function of the output.


def test_a_function_of_the_output_is_the_score(x: Tensor) -> None:
    model = LinearModel()

    def spread(output: Tensor) -> Tensor:
        return output[:, 0] - output[:, 1:].mean(1)

    found = VanillaGradient(model).attribute(x, spread)
    expected = rows(model, 0) - rows(model, 1, 2, 3, 4).mean(0, keepdim=True)
    torch.testing.assert_close(found.values, expected.expand_as(x))
    assert found.target == (None, None)
    assert found.target_names == ("spread", "spread")
    assert found.probabilities is None
    assert VanillaGradient(model).attribute(x, lambda output: output[:, 0]).target_names == ("lambda", "lambda")


def test_the_output_reaches_the_function_as_the_model_gave_it(x: Tensor) -> None:
    seen: list[Any] = []

    def target(output: Any) -> Tensor:
        seen.append(output)
        scores: Tensor = output["scores"][:, 1]
        return scores

    model = LinearModel(lambda scores: {"scores": scores, "boxes": scores * 2})
    found = VanillaGradient(model).attribute(x, target)
    assert set(seen[0]) == {"scores", "boxes"}
    torch.testing.assert_close(found.values, rows(model, 1, 1))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (lambda o: o.sum(), r"torch\.float32 of shape \(\); expected one score per image, a float tensor \(2,\)"),
        (lambda o: o[:, :1], r"of shape \(2, 1\)"),
        (lambda o: o[:1, 0], r"of shape \(1,\)"),
        (lambda o: o.argmax(1), r"torch\.int64 of shape \(2,\)"),
        (lambda o: 1.0, "the target returned float"),
        (lambda o: None, "the target returned NoneType"),
        (lambda o: o[:, 0].detach(), "has no gradient: the target or the model detaches it"),
        (lambda o: torch.ones(2, requires_grad=True), "does not depend on the input"),
        (probability, r"the target is probability itself; call it: probability\(\.\.\.\)"),
    ],
)
def test_a_function_that_gives_no_score_per_image_is_told_what_came(target: Any, message: str, x: Tensor) -> None:
    with pytest.raises(TargetError, match=message):
        VanillaGradient(LinearModel()).attribute(x, target)


def test_an_error_in_the_function_comes_out_as_it_is(x: Tensor) -> None:
    with pytest.raises(ZeroDivisionError):
        VanillaGradient(LinearModel()).attribute(x, lambda output: output[:, 0] * (1 // 0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_is_named_by_its_image(bad: float, x: Tensor) -> None:
    torch.set_warn_always(True)  # a warning that comes once a process would show in one test only
    try:
        with pytest.raises(NonFiniteError, match=f"the score of image 1 is {bad}"):
            VanillaGradient(LinearModel()).attribute(x, lambda output: output[:, 0] * 0 + torch.tensor([1, bad]))
    finally:
        torch.set_warn_always(False)


# Ready-made targets, against their closed forms.


def test_a_probability_is_the_softmax_of_the_scores(x: Tensor) -> None:
    model = LinearModel()
    found = VanillaGradient(model, categories=NAMES).attribute(x, probability(["ant", 4]))
    p = model(x).softmax(1).detach()  # (N, 5)
    torch.testing.assert_close(found.scores, p[[0, 1], [0, 4]])
    mean = (p @ model.weight.detach()).reshape(2, 3, 2, 2)
    expected = p[[0, 1], [0, 4]].reshape(2, 1, 1, 1) * (rows(model, 0, 4) - mean)
    torch.testing.assert_close(found.values, expected)
    assert found.target == (0, 4)
    assert found.target_names == ("probability of ant", "probability of Tabby")


def test_a_probability_of_the_top_class(x: Tensor) -> None:
    model = LinearModel()
    found = VanillaGradient(model).attribute(x, probability())
    assert found.target == tuple(model(x).argmax(1).tolist())
    torch.testing.assert_close(found.scores, model(x).softmax(1).amax(1).detach())


def test_a_contrast_is_the_difference_of_two_scores(x: Tensor) -> None:
    model = LinearModel()
    found = VanillaGradient(model, categories=NAMES).attribute(x, contrast(["ant", "Tabby"], "tiger cat"))
    torch.testing.assert_close(found.values, rows(model, 0, 4) - rows(model, 2, 2))
    assert found.target == (0, 4)
    assert found.target_names == ("ant rather than tiger cat", "Tabby rather than tiger cat")
    worst = model(x).argmin(1).tolist()
    top = VanillaGradient(model).attribute(x, contrast(None, worst))
    torch.testing.assert_close(top.scores, (model(x).amax(1) - model(x).amin(1)).detach())


def test_a_contrast_is_known_from_the_target_and_not_from_its_name(x: Tensor, tmp_path: Path) -> None:
    method = VanillaGradient(LinearModel(), categories=["ant rather than bee", "b", "c", "d", "e"])
    found = method.attribute(x, [saliency.contrast(0, 1), saliency.value(0)])
    assert found.contrasts == (True, False)
    assert found[1].contrasts == (False,)
    assert saliency.Explanation.load(found.save(tmp_path / "map.safetensors")).contrasts == (True, False)
    plain, difference = method.attribute(x[:1], 0), method.attribute(x[:1], saliency.contrast(0, 1))
    assert probability_text(plain)[0].endswith("%")
    assert probability_text(difference) == []


def test_a_contrast_of_a_class_with_itself_is_refused(x: Tensor) -> None:
    with pytest.raises(TargetError, match="class 3 with itself"):
        VanillaGradient(LinearModel()).attribute(x, contrast(3, [0, 3]))


@pytest.mark.parametrize("make", [lambda c: contrast(0, c), lambda c: contrast(c, 0), probability])
@pytest.mark.parametrize(("label", "message"), [(99, r"class 99 is outside 0\.\.4"), ("tabi", 'did you mean "Tabby"')])
def test_a_ready_made_target_refuses_what_is_no_class(
    make: Callable[[Any], Any], label: Any, message: str, x: Tensor
) -> None:
    with pytest.raises(TargetError, match=message):
        VanillaGradient(LinearModel(), categories=NAMES if isinstance(label, str) else None).attribute(x, make(label))


def test_a_region_is_the_mean_score_of_its_pixels(x: Tensor) -> None:
    model = Segmenter()
    where = torch.tensor([[True, False], [True, True]])
    for marked in (where, where.numpy(), where.tolist(), where.float(), where.expand(2, 2, 2)):
        found = VanillaGradient(model).attribute(x, region(1, marked))
        torch.testing.assert_close(found.scores, model(x)["out"][:, 1][:, where].mean(1).detach())
        expected = model.weight.detach()[1].reshape(1, 3, 1, 1) * where / 3
        torch.testing.assert_close(found.values, expected.expand_as(x))
        assert found.target_names == ("region of class 1",) * 2
        assert found.target == (None, None)


def test_a_region_may_differ_between_images(x: Tensor) -> None:
    model = Segmenter()
    where = torch.zeros(2, 2, 2)
    where[0, 0, 0] = where[1, 1, 1] = 1
    found = VanillaGradient(model, categories=["sky", "cat", "dog", "sea"]).attribute(x, region("cat", where))
    torch.testing.assert_close(found.scores, model(x)["out"][[0, 1], 1, [0, 1], [0, 1]].detach())
    assert found.target_names == ("region of cat", "region of cat")


def test_a_region_without_pixels_is_where_the_model_sees_the_class() -> None:
    model, x = Segmenter(), torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    output = model(x)["out"].detach()
    won = output.argmax(1) == 2
    assert won.flatten(1).any(1).all()
    found = VanillaGradient(model).attribute(x, region(2))
    expected = torch.stack([output[i, 2][won[i]].mean() for i in range(2)])
    torch.testing.assert_close(found.scores, expected)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (region(9), r"class 9 is outside 0\.\.3"),
        (region(1, torch.ones(3, 3)), r"the region has shape \(3, 3\); expected \(2, 2\) as the image, or \(2, 2\)"),
        (region(1, torch.zeros(2, 2)), "the region has no pixel"),
        (region(-1), "class -1 is negative"),
        (region(1.5), "got 1.5"),  # type: ignore[arg-type]
        (1, r"shape \(2, 4, 2, 2\), not \(N, classes\); pass saliency\.region"),
        (None, r"pass saliency\.region"),
    ],
)
def test_a_region_that_cannot_be_is_refused(target: Any, message: str, x: Tensor) -> None:
    with pytest.raises(TargetError, match=message):
        VanillaGradient(Segmenter()).attribute(x, target)


def test_a_class_that_the_model_sees_nowhere_has_no_region_of_its_own() -> None:
    model, x = Segmenter(), torch.zeros(1, 3, 2, 2)
    with pytest.raises(TargetError, match=r"assigns no pixel to class 3 in image 0; pass .*region\(3, where\)"):
        VanillaGradient(model).attribute(x, region(3))


@pytest.mark.parametrize("name", ["vanilla_gradient", "occlusion"])
@pytest.mark.parametrize("is_sigmoid", [False, True])
@pytest.mark.parametrize("categories", [None, ["ground", "road"]])
def test_the_region_of_one_channel_is_its_foreground(categories: Any, is_sigmoid: bool, name: str) -> None:
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))

    def mask(scores: Any) -> Tensor:
        logits: Tensor = scores["out"][:, :1] + 0.2
        return logits.sigmoid() if is_sigmoid else logits

    model = Packed(mask, Segmenter()).eval()
    output = model(x)[:, 0].detach()
    foreground = output > (0.5 if is_sigmoid else 0)
    assert foreground.any()
    assert not foreground.all()
    method = METHODS[name](model, categories=categories, **METHODS[name].preview_options)
    output = output.logit() if is_sigmoid else output  # the score is the value before the sigmoid
    found = method.attribute(x, region("road" if categories else 0))
    means = [rows[where].mean() for rows, where in zip(output, foreground, strict=True)]
    torch.testing.assert_close(found.scores, torch.stack(means))
    if categories:
        rest = [-rows[~where].mean() for rows, where in zip(output, foreground, strict=True)]
        torch.testing.assert_close(method.attribute(x, region("ground")).scores, torch.stack(rest))


def test_names_of_a_region_are_counted(x: Tensor) -> None:
    with pytest.raises(TargetError, match="3 class names for a model of 4 classes"):
        VanillaGradient(Segmenter(), categories=list("abc")).attribute(x, region(1))


def test_a_region_of_a_classifier_is_refused(x: Tensor) -> None:
    with pytest.raises(TargetError, match=r"needs an output of shape \(N, classes, H, W\); this model's is \(2, 5\)"):
        VanillaGradient(LinearModel()).attribute(x, region(1))


@pytest.mark.parametrize(
    "where", [torch.ones(2, 2, requires_grad=True), "left", object()], ids=["grad", "str", "object"]
)
def test_pixels_of_any_tensor_are_taken_and_what_is_none_is_a_target_error(where: Any, x: Tensor) -> None:
    if isinstance(where, Tensor):
        assert VanillaGradient(Segmenter()).attribute(x, region(1, where)).scores.shape == (2,)
        return
    with pytest.raises(TargetError):
        VanillaGradient(Segmenter()).attribute(x, region(1, where))


def test_a_value_is_one_number_of_the_output(x: Tensor) -> None:
    model = LinearModel()
    found = VanillaGradient(model).attribute(x, value(3))
    assert torch.equal(found.values, rows(model, 3, 3))
    assert (found.target, found.target_names) == ((None, None), ("value 3", "value 3"))
    deep = LinearModel(lambda scores: scores[:, :4].reshape(-1, 2, 2))
    assert torch.equal(VanillaGradient(deep).attribute(x, value(1, 0)).values, rows(deep, 2, 2))
    assert VanillaGradient(deep).attribute(x, value(1, 0)).target_names[0] == "value 1 0"
    flat = LinearModel(lambda scores: scores[:, 1])
    assert torch.equal(VanillaGradient(flat).attribute(x, value()).values, rows(flat, 1, 1))


@pytest.mark.parametrize("target", [value(5), value(), value(0, 0), value(10**9)], ids=repr)
def test_a_value_that_is_not_there_is_refused_with_the_shape(target: Any, x: Tensor) -> None:
    with pytest.raises(TargetError, match=r"there is no value \(.*\) in an output of shape \(5,\) per image"):
        VanillaGradient(LinearModel()).attribute(x, target)


@pytest.mark.parametrize("index", [-1, 1.5, True, "a", None])
def test_a_value_is_named_by_whole_numbers(index: Any) -> None:
    with pytest.raises(TargetError):
        value(index)


# What models return.

Pair = namedtuple("Pair", ["logits", "hidden"])


@dataclass
class ModelOutput:
    logits: Tensor
    hidden: Any = None


@pytest.mark.parametrize(
    "pack",
    [
        lambda s: (s,),
        lambda s: [s],
        lambda s: (s, None, "text"),
        lambda s: {"logits": s, "hidden": s * 2},
        lambda s: {"out": s, "aux": s * 2},
        lambda s: OrderedDict(anything=s),
        lambda s: {0: s},
        lambda s: {"logits": None, "scores": s},
        lambda s: Pair(s, s * 2),
        lambda s: ModelOutput(s),
    ],
)
def test_the_scores_are_found_in_what_the_model_returns(pack: Callable[[Tensor], Any], x: Tensor) -> None:
    model = LinearModel(pack)
    found = VanillaGradient(model).attribute(x, [1, 2])
    assert torch.equal(found.values, rows(model, 1, 2))


@pytest.mark.parametrize(
    ("pack", "message"),
    [
        (lambda s: (s, s), r"returned a tuple \('0': Tensor, '1': Tensor\); it is not clear which"),
        (lambda s: {"a": s, "b": s}, r"returned a dict \('a': Tensor, 'b': Tensor\).*pass a target that reads it"),
        (lambda s: [{"scores": s[0]}, {"scores": s[1]}], r"for example target=saliency\.box\(index=0\)$"),
        (lambda s: {"a": 1}, r"\('a': int\)"),
        (lambda s: None, r"returned a NoneType \(empty\)"),
        (lambda s: "scores", "returned a str"),
        (lambda s: s[:, :0], r"shape \(2, 0\), not \(N, classes\)"),
        (lambda s: s.sum(), r"shape \(\), not \(N, classes\)"),
        (
            lambda s: s[:, None],
            r"shape \(2, 1, 5\), not \(N, classes\); pass saliency\.box\(index=0\) for a detector, or a f",
        ),
        (lambda s: s.long(), r"torch\.int64"),
        (lambda s: s.detach(), "has no gradient"),
        (lambda s: s[:1], r"1 .*2|2 .*1"),
        (lambda s: torch.cat([s, s]), r"4 .*2|2 .*4"),
    ],
)
def test_an_output_without_scores_is_a_target_error(pack: Callable[[Tensor], Any], message: str, x: Tensor) -> None:
    with pytest.raises(TargetError, match=message):
        VanillaGradient(LinearModel(pack)).attribute(x, 0)


def test_the_tensor_of_scores_is_not_copied() -> None:
    scores = torch.ones(2, 3)
    assert output_tensor(scores) is scores
    assert output_tensor({"logits": scores}) is scores


def test_a_single_value_per_image_counts_as_one_class(x: Tensor) -> None:
    for pack in (lambda s: s[:, 0], lambda s: s[:, :1]):
        model = LinearModel(pack)
        found = VanillaGradient(model).attribute(x)
        assert torch.equal(found.values, rows(model, 0, 0))
        assert found.target == (0, 0)
        assert found.probabilities is None


# Settling.


def test_a_target_settles_on_the_first_output_and_keeps_to_it() -> None:
    selection = Questions(None, Images(2))
    first = torch.tensor([[0.0, 1.0], [3.0, 2.0]])
    assert selection(first).tolist() == [1.0, 3.0]
    assert selection(first.flip(1)).tolist() == [0.0, 2.0]
    assert selection.indices == (1, 0)
    kept = selection[0]
    selection(first * 5)
    assert selection[0] is kept


def test_a_ready_made_target_serves_many_calls(x: Tensor) -> None:
    target = probability()
    method, before = VanillaGradient(LinearModel()), repr(target)
    one, other = method.attribute(x, target), method.attribute(-x, target)
    assert repr(target) == before
    assert one.target == tuple(LinearModel()(x).argmax(1).tolist())
    assert other.target == tuple(LinearModel()(-x).argmax(1).tolist())


def test_a_target_that_knows_what_it_is_says_so() -> None:
    (question,), _ = as_target(3).prepared(Images()).ask(torch.eye(4)[:1] * 7, Images())
    assert torch.equal(question.score(torch.eye(4)[:2] * 7), torch.zeros(2))
    assert re.fullmatch(r"ClassTarget\(classes=3\)", repr(as_target(3)))


@pytest.mark.parametrize("targets", ["ant", 3, None, [], {}, torch.tensor([0, 1])], ids=repr)
def test_several_targets_come_as_a_list(targets: Any, x: Tensor) -> None:
    with pytest.raises(ValueError, match="expected a list of targets"):
        VanillaGradient(LinearModel()).attribute_classes(x, targets)


# One function per image.


def first_probability(output: Tensor) -> Tensor:
    return output.softmax(1)[:, 0]


def total(output: Tensor) -> Tensor:
    return output.sum(1)


class Halves(nn.Module):
    """A small classifier of two classes, one for each half of an output (N, 2, 4, 4)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.weights = torch.linspace(0.5, 1, 16).reshape(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.inner(x)[:, :2, None, None] * self.weights
        return scores


def each_row_alone(output: Tensor) -> Tensor:
    """The probability of class 0 of each image, by operations on single numbers."""
    return torch.stack([1 / (1 + (row[1] - row[0]).exp()) for row in output])


LEFT = torch.tensor([1, 1, 0, 0]).expand(4, 4)
# Two images, and an output of two classes: the number of rows does not tell one from the other.
TWO = partial(Packed, lambda scores: scores[:, :2])
LISTS: dict[str, tuple[Callable[[nn.Module], nn.Module], list[Any]]] = {
    "values": (TWO, [value(0), value(1)]),
    "functions": (TWO, [first_probability, total]),
    "functions of single rows": (TWO, [each_row_alone, each_row_alone]),
    "contrasts": (TWO, [contrast(0, 1), contrast(1, 0)]),
    "probabilities": (TWO, [probability(0), probability(1)]),
    "probabilities of five classes": (nn.Sequential, [probability(0), probability(1)]),
    "a mixture": (TWO, [probability(0), contrast(1, 0)]),
    "regions": (Halves, [region(0, LEFT), region(1, 1 - LEFT)]),
    "texts": (nn.Sequential, [text("a cat", "a dog"), text("a red bus", "a cat")]),
    "similarities": (nn.Sequential, [similarity(torch.arange(8.0)), similarity(torch.arange(8.0), torch.ones(8))]),
}


# Each method with every other kind, and each kind with every other method.
@pytest.mark.filterwarnings("ignore::saliency.errors.SaliencyWarning")
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, *method.values, marks=method.marks)
        for i, kind in enumerate(LISTS)
        for j, method in enumerate(of_each_family())
        if (i + j) % 2 == 0
    ],
)
def test_each_image_has_its_own_target_in_every_method(kind: str, name: str) -> None:
    cls, (wrap, targets) = METHODS[name], LISTS[kind]
    if kind in ("texts", "similarities"):
        model, x = dual_encoders.MODELS["open_clip ViT"]()
    else:
        model, x = wrap(tiny_model_for(cls)()).eval(), images(2)
    method = cls(model, **cls.preview_options)
    try:
        batch = method.attribute(x, targets)
    except SaliencyError as error:
        with pytest.raises(type(error)):  # the reason is not the list
            [method.attribute(image, target) for image, target in zip(x, targets, strict=True)]
        return
    for own, image, target in zip(batch, x, targets, strict=True):
        alone = method.attribute(image, target)
        rounding = 1e-4 * float(alone.values.abs().max()) + 1e-7 * float(alone.scores.abs())
        torch.testing.assert_close(own.values, alone.values, atol=rounding, rtol=0)
        assert own.target_names == alone.target_names
        shares, expected = shares_of(own), shares_of(alone)
        for share in {*shares, *expected}:
            difference = shares.get(share, 0.0) - expected.get(share, 0.0)
            assert abs(difference) < 1e-5 * (1 + abs(float(alone.scores))), share


def shares_of(explanation: Explanation) -> dict[str, float]:
    """The ledger and the residual of one image; a batch also names shares that other images have."""
    ledger, residual = explanation.ledger, explanation.residual
    shares = dict(zip(explanation.ledger_names, () if ledger is None else ledger[0].tolist(), strict=True))
    return shares if residual is None else {**shares, "residual": float(residual[0])}


def test_a_list_may_mix_the_toolkits_targets_each_of_which_sees_its_image_only() -> None:
    x = torch.zeros(2, 3, 2, 2)
    x[0, 0], x[1, 1] = 1.0, 1.0
    model = Segmenter()
    model.weight.data = torch.eye(4, 3)
    targets: list[Any] = [region(0), lambda output: output["out"][:, 1].mean((1, 2))]
    batch = VanillaGradient(model).attribute(x, targets)
    assert batch.target_names == ("region of class 0", "lambda")
    for image in range(2):
        assert set(batch.values[image].nonzero()[:, 0].tolist()) == {image}
    names = VanillaGradient(LinearModel(), categories=NAMES).attribute(x, [probability(0), contrast("ant", "Tabby")])
    assert names.target_names == ("probability of ant", "ant rather than Tabby")
    assert names.probabilities is not None


def test_a_list_mixes_classes_and_other_targets(x: Tensor) -> None:
    targets: list[Any] = [2, probability(0)]
    both = VanillaGradient(LinearModel()).attribute(x, targets)
    for image, target in enumerate(targets):
        alone = VanillaGradient(LinearModel()).attribute(x[image], target)
        torch.testing.assert_close(both.values[image], alone.values[0])
        assert both.target_names[image] == alone.target_names[0]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ([total], "got 1 targets for 2 images"),
        ([total] * 3, "got 3 targets for 2 images"),
        ([total, lambda output: output.sum()], r"expected one score per image, a float tensor \(2,\)"),
    ],
)
def test_a_list_of_functions_that_does_not_fit_is_refused(target: Any, message: str, x: Tensor) -> None:
    with pytest.raises(TargetError, match=message):
        VanillaGradient(LinearModel()).attribute(x, target)


class Detector(nn.Module):
    """A detector: one dictionary per image, with as many boxes as the image has bright rows."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        scores = self.features(x).mean((3,))  # (N, 4, H)
        counts = [1 + int(image.sum() > 0) for image in x]
        return [
            {"boxes": torch.zeros(n, 4), "scores": own[0, :n].sigmoid()} for n, own in zip(counts, scores, strict=True)
        ]


def surest(output: list[dict[str, Tensor]]) -> Tensor:
    return torch.stack([image["scores"].max() for image in output])


def all_boxes(output: list[dict[str, Tensor]]) -> Tensor:
    return torch.stack([image["scores"].sum() for image in output])


@pytest.mark.parametrize("name", ["grad_cam", "vanilla_gradient", "rise", "full_grad", "occlusion"])
def test_a_detector_takes_several_functions_and_one_for_each_image(name: str) -> None:
    x, options = images(2), METHODS[name].preview_options
    method = METHODS[name](Detector().eval(), **options)
    first, second, mixed = method.attribute_classes(x, [surest, all_boxes, [all_boxes, surest]])
    for explanation, target in ((first, surest), (second, all_boxes)):
        torch.testing.assert_close(explanation.values, method.attribute(x, target).values)
    torch.testing.assert_close(mixed.values, torch.stack([second.values[0], first.values[1]]))
    assert mixed.target_names == ("all_boxes", "surest")


def test_class_to_idx_of_a_dataset_is_taken_as_class_names() -> None:
    assert as_categories({"dog": 1, "cat": 0}) == ("cat", "dog")
    assert as_categories({"dog": 2})[2] == "dog"
