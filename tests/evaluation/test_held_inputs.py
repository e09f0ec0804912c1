"""Metrics and trust cards of one of several inputs, which change while the others stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import saliency
from saliency import METHODS
from saliency.evaluation.metrics.base import Subject
from saliency.metrics import METRICS, ClassTest, WeightsTest
from tests.several_inputs import case

# In the order of the modules, which a module around the model changes.
DRAW_WEIGHTS = ("mprt", "noise_margin", "weights")
FAST: dict[str, dict[str, Any]] = {"deletion": {"steps": 4}, "infidelity": {"passes": 4}, "random_logit": {"draws": 2}}


class Holding(nn.Module):
    """A network of one image, which holds the others."""

    def __init__(self, model: nn.Module, others: dict[str, Tensor], name: str) -> None:
        super().__init__()
        self.model, self.others, self.name = model, others, name

    def forward(self, x: Tensor) -> Any:
        rows = {name: own.expand(len(x), *own.shape[1:]) for name, own in self.others.items()}
        return self.model(**rows, **{self.name: x})


def one_case(name: str = "late") -> tuple[nn.Module, dict[str, Tensor]]:
    model, inputs = case(name)
    return model, {key: own[:1] for key, own in inputs.items()}


@pytest.mark.parametrize(
    "metric", ["deletion", "infidelity", "random_logit", "average_drop", "relative_output_stability", "class"]
)
def test_a_metric_of_one_input_equals_that_of_a_network_that_holds_the_others(metric: str) -> None:
    check(metric, FAST.get(metric, {}))


@pytest.mark.slow
@pytest.mark.parametrize("metric", [name for name in METRICS if name not in DRAW_WEIGHTS])
def test_every_metric_of_one_input_equals_that_of_a_network_that_holds_the_others(metric: str) -> None:
    check(metric, {})


def check(metric: str, options: dict[str, Any]) -> None:
    model, inputs = one_case()
    for name, layer in (("rgb", "rgb_stream"), ("depth", "depth_stream")):
        others = {key: own for key, own in inputs.items() if key != name}
        alone = saliency.GradCAM(Holding(model, others, name), f"model.{layer}")
        method = saliency.GradCAM(model, layer)
        result = method.attribute(inputs, 0, explain=[name])
        masks = torch.zeros(1, *result[name].input_size, dtype=torch.bool)
        masks[:, :4, :6] = True
        colours = 5 * torch.randn(200, inputs[name].shape[1], 1, 1, dtype=torch.float64)  # of the classes 1, 2 and 3
        context: dict[str, Any] = {"target": 0, "masks": masks, "reference": result[name]}
        context["others"] = colours.expand(-1, -1, *inputs[name].shape[2:])
        own = METRICS[metric](**options).measure(result[name], method=method, inputs=result.hold(name), **context)
        explanation = alone.attribute(inputs[name], 0)
        expected = METRICS[metric](**options).measure(explanation, method=alone, inputs=inputs[name], **context)
        torch.testing.assert_close(own.values, expected.values, equal_nan=True)


@pytest.mark.parametrize("method", ["input_x_gradient", "integrated_gradients", "layer_cam", "occlusion"])
def test_a_held_image_has_its_map_with_the_options_of_its_input(method: str) -> None:
    model, inputs = one_case()
    baseline: Any = {"rgb": 0.5, "depth": 1.0}
    options: dict[str, dict[str, Any]] = {
        "integrated_gradients": {"baseline": baseline},
        "occlusion": {"window": 6, "stride": 3},
    }
    chosen = METHODS[method](model, **options.get(method, {}))
    result = chosen.attribute(inputs, 1)
    for name, own in result.items():
        torch.testing.assert_close(chosen.attribute(result.hold(name), 1).values, own.values)


def test_random_weights_are_drawn_for_the_whole_network() -> None:
    model, inputs = one_case()
    method = saliency.InputXGradient(model)
    result = method.attribute(inputs, 1)
    inputs_of_depth = result.hold("depth")
    measured = saliency.metrics.MPRT(draws=2).measure(result["depth"], method=method, inputs=inputs_of_depth, target=1)
    assert measured.values.isfinite().all()


def test_an_exact_test_of_each_case_of_a_batch_holds_the_other_inputs_of_the_case() -> None:
    model, inputs = case("late")
    inputs["depth"][1] *= -3
    method = saliency.InputXGradient(model)
    colours = 5 * torch.randn(200, 3, 1, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    context: dict[str, Any] = {"method": method, "others": colours.expand(-1, -1, 16, 20)}
    found = []
    for rows in (slice(None), slice(1, 2)):
        result = method.attribute({name: own[rows] for name, own in inputs.items()}, 0, explain=["rgb"])
        subject = Subject(result["rgb"], inputs=result.hold("rgb"), **context).single(len(result["rgb"]) - 1)
        measured = ClassTest().measure(result["rgb"], inputs=result.hold("rgb"), **context)
        found.append((subject.output, *WeightsTest(draws=3).scores(subject)[1], measured.values[-1]))
    for own, alone in zip(*found, strict=True):
        torch.testing.assert_close(own, alone)


def test_a_trust_card_is_of_the_held_image() -> None:
    model, inputs = one_case("middle")
    method = saliency.GradCAM(model)
    result = method.attribute(inputs, 1)
    held: Any = result.hold("depth")
    card = saliency.trust(method, held, 1)
    assert card.explanation.layer == result["depth"].layer == "depth_stream"
    torch.testing.assert_close(card.explanation.values, result["depth"].values)
    assert {"weights", "deletion", "insertion", "rank_correlation"} <= card.measurements.keys()
