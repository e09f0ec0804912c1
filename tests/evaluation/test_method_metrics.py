"""Metrics that call the method again: closed forms, controls, and the model as it was found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from saliency import (
    EigenCAM,
    GradCAM,
    GuidedBackprop,
    InputXGradient,
    IntegratedGradients,
    SmoothGrad,
    VanillaGradient,
    contrast,
    probability,
    value,
)
from saliency.attribution.base import Attribution
from saliency.attribution.explanation import BatchAttribution
from saliency.attribution.questions import Questions
from saliency.errors import LayerError, MethodError, TargetError
from saliency.evaluation.metrics.method_metrics import MPRT, layers_from_the_top, randomise, restore
from saliency.metrics import METRICS, Measurement, WeightsTest, measure
from saliency.testing import Snapshot, images, tiny_model

from .test_base import Linear

X = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Constant(Attribution):
    """A method that ignores the model."""

    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        return BatchAttribution(torch.ones_like(x), target(self.model(x)))


def measured(metric: str, method: Attribution, x: Tensor, **options: object) -> Measurement:
    explanation = method.attribute(x, [0, 1])
    return METRICS[metric](**options).measure(explanation, method=method, inputs=x)


@pytest.mark.parametrize("compare", ["spearman", "absolute", "ssim"])
@pytest.mark.parametrize("order", ["cascading", "independent"])
def test_a_constant_method_keeps_its_map_and_a_gradient_does_not(order: str, compare: str) -> None:
    constant = measured("mprt", Constant(tiny_model()), images(2), order=order, compare=compare)
    assert constant.curve is not None
    assert torch.equal(constant.curve, torch.ones_like(constant.curve))
    assert not constant.beats_controls.any()
    gradient = measured("mprt", VanillaGradient(tiny_model()), images(2), order=order, compare=compare)
    assert gradient.beats_controls.all()


def test_seeds_share_no_draw_of_the_weights() -> None:
    method = VanillaGradient(tiny_model())
    explanation = method.attribute(images(1), 0)

    def fall(draws: int, seed: int) -> float:
        metric = MPRT(layers=1, draws=draws)
        return float(metric.measure(explanation, method=method, inputs=images(1), seed=seed, controls=False).values)

    second = 2 * fall(2, seed=0) - fall(1, seed=0)
    assert abs(second - fall(1, seed=1)) > 1e-4  # the first draw of the next seed


def test_guided_backprop_depends_less_on_the_weights_than_the_gradient() -> None:
    guided, gradient = (
        measured("mprt", method(tiny_model()), images(2)) for method in (GuidedBackprop, VanillaGradient)
    )
    assert (guided.values < gradient.values).all()


def test_randomisation_costs_one_call_for_each_layer_and_one_more() -> None:
    method = VanillaGradient(tiny_model())
    layers = layers_from_the_top(method, images(1))
    result = measured("mprt", method, images(2))
    assert result.passes == len(layers) + 1
    assert result.curve is not None
    assert result.curve.shape == (2, len(layers) + 1)
    assert measured("mprt", method, images(2), layers=2, draws=3).passes == 1 + 2 * 3


def test_copies_of_the_model_read_the_layer_of_the_explanation_without_a_search() -> None:
    class Counted(nn.Sequential):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Counted.calls += 1
            for layer in self:
                x = layer(x)
            return x

    model = Counted(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))
    method = GradCAM(model)
    explanation = method.attribute(images(1), 0)
    Counted.calls = 0
    MPRT().measure(explanation, method=method, inputs=images(1), controls=False)
    assert Counted.calls == 1 + 1 + 2  # the order of the layers, the map computed again, and one for each layer


def test_each_draw_begins_with_the_values_of_the_model_also_of_buffers_that_are_not_saved() -> None:
    model = tiny_model()
    model.register_buffer("unsaved", torch.arange(50.0), persistent=False)
    copied = copy.deepcopy(model)
    randomise(copied, [name for name, _ in model.named_modules()], 0)
    assert not torch.equal(copied.get_buffer("unsaved"), model.get_buffer("unsaved"))
    restore(copied, model)
    own = [*model.parameters(), *model.buffers()]
    assert all(map(torch.equal, [*copied.parameters(), *copied.buffers()], own))


def test_layers_are_randomised_from_the_last_that_runs() -> None:
    class Backwards(nn.Module):
        """Registers its layers in the reverse of the order in which they run."""

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 2)
            self.attention = nn.MultiheadAttention(4, 1, batch_first=True)
            self.stem = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            tokens = self.stem(x).flatten(2).mT
            mixed: Tensor = self.attention(tokens, tokens, tokens)[0]
            scores: Tensor = self.head(mixed.mean(1))
            return scores

    layers = layers_from_the_top(VanillaGradient(Backwards()), images(1))
    assert layers[0] == "head"
    assert layers[-1] == "stem"
    assert set(layers[1:-1]) == {"attention", "attention.out_proj"}


@pytest.mark.parametrize("metric", ["mprt", "random_logit", "max_sensitivity"])
@pytest.mark.parametrize("method", [GradCAM, lambda model: SmoothGrad(VanillaGradient(model), passes=2)])
def test_the_model_and_the_method_are_left_as_found(metric: str, method: Callable[[nn.Module], Attribution]) -> None:
    model, x = tiny_model(), images(2)
    explainer = method(model)
    explanation = explainer.attribute(x, [0, 1])
    before = Snapshot(model=model, method=explainer, x=x)
    METRICS[metric]().measure(explanation, method=explainer, inputs=x)
    assert not before.changes()


def test_a_map_of_the_activations_alone_is_the_same_for_every_class() -> None:
    result = measured("random_logit", EigenCAM(tiny_model()), images(2))
    assert result.curve is not None
    assert torch.equal(result.curve, torch.ones_like(result.curve))
    assert measured("random_logit", VanillaGradient(tiny_model()), images(2)).beats_controls.all()


def test_each_random_map_is_independent_of_all_others() -> None:
    shifted, classes = (
        measured(name, VanillaGradient(tiny_model()), images(2)) for name in ("avg_sensitivity", "random_logit")
    )
    assert (shifted.controls["random"].values > 1).all()  # the square root of 2, on average
    assert classes.control_curves is not None
    assert (classes.control_curves["random"].abs() < 0.4).all()


def test_a_model_without_weights_cannot_be_randomised() -> None:
    with pytest.raises(MethodError, match="Sequential has no parameters or buffers"):
        measured("mprt", VanillaGradient(nn.Sequential(nn.AvgPool2d(8), nn.Flatten())), X)


def test_a_target_that_is_not_a_class_has_no_other_classes() -> None:
    method = VanillaGradient(tiny_model())
    explanation = method.attribute(images(1), value(0))
    with pytest.raises(TargetError, match='"value 0", is not a class'):
        measure("random_logit", explanation, method=method, inputs=images(1), target=value(0))


def test_representations_need_a_layer_with_a_spatial_output() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 2)).double()
    with pytest.raises(LayerError, match="no layer of Sequential has a spatial output"):
        measured("relative_representation_stability", VanillaGradient(model), X)


@pytest.mark.parametrize("metric", ["max_sensitivity", "avg_sensitivity", "local_lipschitz"])
def test_the_gradient_of_a_linear_model_is_the_same_everywhere(metric: str) -> None:
    assert torch.equal(measured(metric, VanillaGradient(Linear()), X).values, torch.zeros(2, dtype=torch.float64))


def test_the_lipschitz_constant_of_gradient_times_input_is_the_largest_weight() -> None:
    model = Linear()
    with torch.no_grad():
        model.weight.fill_(0.5)
    result = measured("local_lipschitz", InputXGradient(model), X)
    assert torch.allclose(result.values, torch.full((2,), 0.5, dtype=torch.float64))


def test_metrics_of_robustness_share_the_noisy_maps() -> None:
    method = VanillaGradient(tiny_model())
    names = ["max_sensitivity", "avg_sensitivity", "local_lipschitz", "relative_input_stability"]
    results = measure(names, method.attribute(images(2), 0), method=method, inputs=images(2))
    assert [result.passes for result in results] == [10, 0, 0, 0]
    assert (results[0].values >= results[1].values).all()
    assert results[0].controls["random"].values.min() > 0.5


def test_integrated_gradients_are_complete_and_a_cam_is_not() -> None:
    complete = measured("completeness", IntegratedGradients(tiny_model(), steps=200), images(2))
    assert complete.values.max() < 0.02
    assert measured("completeness", GradCAM(tiny_model()), images(2)).values.min() > 0.1


@pytest.mark.parametrize(
    ("left_open", "pinned"),
    [
        (lambda top: probability(), lambda top: probability(top)),
        (lambda top: contrast(None, [7, 8]), lambda top: contrast(top, [7, 8])),
        (lambda top: [None, 3], lambda top: [top[0], 3]),
        (lambda top: [probability(), contrast(None, 8)], lambda top: [probability(top[0]), contrast(top[1], 8)]),
    ],
)
def test_the_top_class_of_a_target_stays_that_of_the_image_on_other_models(
    left_open: Callable[[list[int]], Any], pinned: Callable[[list[int]], Any]
) -> None:
    torch.manual_seed(0)
    model, values = nn.Sequential(nn.Flatten(), nn.Linear(192, 9).double()), []
    method = InputXGradient(model)
    top = model(X).argmax(1).tolist()
    for target in (left_open(top), pinned(top)):
        result = measure(
            ["mprt", WeightsTest(draws=3)], method.attribute(X, target), method=method, inputs=X, target=target
        )
        values.append([each.values.tolist() for each in result])
    assert values[0] == values[1]


def test_a_target_with_a_class_of_each_image_is_measured_image_by_image() -> None:
    method, values = InputXGradient(Linear()), []
    for target in (probability([0, 1]), [probability(0), probability(1)], torch.tensor([0, 1])):
        explanation = method.attribute(X, target)
        values.append(WeightsTest(draws=3).measure(explanation, method=method, inputs=X, target=target).values.tolist())
    assert values[0] == values[1]


def test_without_a_target_a_probability_is_measured_and_a_contrast_is_refused() -> None:
    method, metrics = InputXGradient(Linear()), ["avg_sensitivity", "completeness"]
    context: dict[str, Any] = {"method": method, "inputs": X, "controls": False}
    target: Any = [probability(0), 1]
    explanation = method.attribute(X, target)
    for one, other in zip(
        measure(metrics, explanation, **context), measure(metrics, explanation, target=target, **context), strict=True
    ):
        assert torch.equal(one.values, other.values)
    with pytest.raises(MethodError, match='"class 0 rather than class 1", is not a class: pass it again as target='):
        measure("avg_sensitivity", method.attribute(X, contrast(0, 1)), **context)
