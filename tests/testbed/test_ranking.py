"""Orderings of benchmarks/results/testbed.md that hold on a sample by four standard errors."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import saliency
from benchmarks import testbed
from benchmarks.testbed import CONTROLS, Case, p_value, ranks, scenes_of, standard_error
from saliency import METHODS
from tests.selection import case

ERRORS = 4
IMAGES = 16
QUICK: dict[str, dict[str, Any]] = {"integrated_gradients": {"steps": 8}}
PLANTED, TWO = Case("planted", "shapes_cnn"), Case("two_objects", "shapes_cnn")
RESIDUAL = Case("two_objects", "shapes_resnet")
SHORTCUT, XOR, ORDER = Case("shortcut", "shapes_shortcut"), Case("xor", "shapes_xor"), Case("occlusion", "shapes_order")
CAMS = ("grad_cam", "layer_cam", "cam")
RELEVANCE = ("lrp", "integrated_gradients", "input_x_gradient")
BETTER = {
    PLANTED: (*RELEVANCE, *CAMS, "guided_backprop", "excitation_backprop"),
    TWO: (*RELEVANCE, *CAMS, "guided_grad_cam"),
    SHORTCUT: RELEVANCE,
    XOR: ("integrated_gradients",),
    ORDER: (*RELEVANCE, *CAMS),
}
FAILURES = {
    (PLANTED, "full_grad"): "0.06, and 0.06 for a Gaussian at the centre",
    (RESIDUAL, "deconvnet"): "the maps of two classes are alike",
    (TWO, "eigen_cam"): "does not depend on the class",
    (SHORTCUT, "deconvnet"): "0.05, and 0.09 for the edges of the image",
    (XOR, "grad_cam"): "nothing on the parts of most images of one class",
    (ORDER, "eigen_cam"): "does not depend on the class",
}


@cache
def scores(case: Case, method: str) -> Tensor:
    """The numbers (N,) by which methods are ranked in a case, of a method or a control."""
    scenes = scenes_of(case.task, IMAGES)
    if method in CONTROLS:
        maps = testbed.controls(scenes)[method].expand(2, -1, -1, -1)
    else:
        model, targets = saliency.load(case.network), testbed.targets_of(case.task, scenes)
        maps = testbed.maps_of(method, model, scenes, targets, **QUICK.get(method, {}))
    return testbed.values_of(case, scenes, maps)[case.ranked_by("energy")]


def is_better(one: Tensor, other: Tensor) -> bool:
    """Whether the mean of the first exceeds that of the second by four standard errors."""
    difference = one - other
    return float(difference.mean()) > max(ERRORS * standard_error(difference), 0)


def cases() -> list[Any]:
    """The cases of each method, and the failures that are expected."""
    good = [pytest.param(case, method) for case, methods in BETTER.items() for method in methods]
    marks = {key: pytest.mark.xfail(reason=why, strict=True, raises=AssertionError) for key, why in FAILURES.items()}
    return [*good, *(pytest.param(*key, marks=mark) for key, mark in marks.items())]


@pytest.mark.parametrize(("case", "method"), cases(), ids=str)
def test_a_method_is_better_than_all_controls(case: Case, method: str) -> None:
    for control in CONTROLS:
        assert is_better(scores(case, method), scores(case, control)), control


def test_lrp_and_integrated_gradients_find_the_object_better_than_a_cam() -> None:
    for method in ("lrp", "integrated_gradients"):
        assert is_better(scores(PLANTED, method), scores(PLANTED, "grad_cam"))


def test_lrp_finds_the_watermark_first_on_every_image_of_the_network_that_relies_on_it() -> None:
    scenes = scenes_of("shortcut", IMAGES)
    targets = testbed.targets_of("shortcut", scenes)
    assert testbed.first(scenes, testbed.maps_of("lrp", saliency.load("shapes_shortcut"), scenes, targets)).all()
    assert is_better(scores(SHORTCUT, "lrp"), scores(Case("shortcut", "shapes_cnn"), "lrp"))


def test_methods_of_up_to_50_passes_run_with_their_defaults() -> None:
    for name, options in testbed.SLOW.items():
        passes = re.findall(r"\d+", METHODS[name].cost)
        is_many = (
            "for each" in METHODS[name].cost or max(map(int, passes)) > 51
        )  # of the image itself, and of 50 others
        assert is_many or not options, name


def test_only_what_holds_by_all_scores_is_claimed() -> None:
    means = {  # by energy, rank accuracy and AUC
        "lrp": (0.9, 0.9, 0.9),
        "grad_cam": (0.2, 0.7, 0.8),
        "deconvnet": (0.0, 0.0, 0.0),
        **dict.fromkeys(CONTROLS, (0.3, 0.3, 0.5)),
    }
    scores = {
        score: {PLANTED: {name: torch.full((8,), own[number], dtype=torch.float64) for name, own in means.items()}}
        for number, score in enumerate(testbed.SCORES)
    }
    judged = testbed.verdicts_in(PLANTED, scores)
    assert [testbed.agreed(judged[name]) for name in ("lrp", "grad_cam", "deconvnet")] == [
        "better",
        "worse by energy, better by rank, better by AUC",
        "worse",
    ]
    _, _, half, quarter, after, better, case = testbed.claims("Ranks", scores).splitlines()
    assert half.endswith("in the first half of 7: `LRP`.")
    assert quarter.endswith("last quarter: `DeconvNet`.")
    assert after.endswith("best control: `DeconvNet`.")
    assert better.endswith("each case: `LRP`.")
    assert case.endswith("worse than the best control: `DeconvNet`. Better by no score: `DeconvNet`.")


def test_the_results_have_every_method_and_control_and_the_reasons_of_the_refused() -> None:
    text = "".join(file.read_text() for file in testbed.RESULTS.parent.glob("testbed*.md"))
    for name in (*METHODS, *CONTROLS):
        assert testbed.label(name) in text
    assert "has no attention that can be read" in text


def test_the_paired_test_is_one_sided_and_never_better_without_a_difference() -> None:
    values = torch.tensor([1.0, 2.0, 4.0]).double()
    assert p_value(values, torch.zeros(3)) == pytest.approx(0.5 - 7**0.5 / 6)  # two degrees of freedom
    assert p_value(-values, torch.zeros(3)) == pytest.approx(0.5 + 7**0.5 / 6)
    assert p_value(values, values) == 1
    assert p_value(values + 1, values) == 0


def test_equal_means_share_a_rank_and_missing_images_are_left_out() -> None:
    found = ranks({"a": torch.ones(2), "b": torch.ones(3), "c": torch.zeros(3)}, torch.ones(1, 3))
    assert {name: float(rank) for name, rank in found.items()} == {"a": 1.5, "b": 1.5, "c": 3}


@pytest.mark.parametrize("network", ["shapes_detector", "shapes_unet"])
@pytest.mark.parametrize("method", ["layer_cam", "hires_cam", "odam", "vanilla_gradient"])
def test_the_map_of_an_object_lies_on_it_rather_than_on_another_of_its_class(method: str, network: str) -> None:
    margins = testbed.object_margins(method, network, 12)
    assert margins.mean() > 2 * testbed.standard_error(margins)


@pytest.mark.parametrize("network", ["shapes_detector", case("shapes_queries", by_default=False)])
def test_the_map_of_vx_code_lies_on_the_box(network: str) -> None:
    margins = testbed.object_margins("vx_code", network, 6, segments=(6, 6))
    assert margins.mean() > 2 * testbed.standard_error(margins)


@pytest.mark.parametrize(
    ("method", "kinds"),
    [("attn_lrp", ["colour", "shape"]), ("input_x_gradient", ["shape", "relation"]), ("raw attention", ["shape"])],
)
def test_the_map_of_a_word_lies_on_the_object_that_it_is_about(method: str, kinds: list[str]) -> None:
    margins = testbed.word_margins(method, 6)
    for kind in kinds:
        assert margins[kind].mean() > 2 * testbed.standard_error(margins[kind])


def test_a_mean_within_two_standard_errors_is_bold() -> None:
    assert testbed.object_cell([0.1, -0.1, 0.0, 0.1]).startswith("**")
    assert testbed.object_cell([0.5, 0.6, 0.5, 0.4]) == "0.50 ± 0.04"
    assert testbed.object_cell("refused") == "-"
