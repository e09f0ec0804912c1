"""What all metrics have in common: the registry, the shared forwards, the controls and the errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from saliency import InputXGradient, VanillaGradient, metrics
from saliency.errors import MethodError
from saliency.evaluation.metrics import base
from saliency.evaluation.metrics.base import Subject, control_maps, edges
from saliency.evaluation.metrics.faithfulness import ABPC, Deletion, FaithfulnessCorrelation, Infidelity
from saliency.metrics import METRICS, Control, measure
from tests.evaluation.maps import explanation_of
from tests.models import FunctionModel


class Linear(nn.Module):
    """Two linear scores of an image (3, 8, 8), in float64."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.rand(2, 192, generator=generator, dtype=torch.float64) - 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.weight.T


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return Linear()


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_metrics_of_one_call_share_the_forwards_of_equal_images(model: nn.Module, x: Tensor) -> None:
    method = InputXGradient(model)
    explanation = method.attribute(x, [0, 1])
    metrics = [Deletion(steps=4), Deletion(steps=4, until=1.0), ABPC(steps=4)]
    deletion, flipping, between = measure(metrics, explanation, method=method, inputs=x)
    # 3 steps of the map and 21 controls, and the empty image; the whole image is known.
    assert (deletion.passes, flipping.passes, between.passes) == (67, 0, 66)
    assert torch.equal(deletion.values, flipping.values)
    alone = ABPC(steps=4).measure(explanation, method=method, inputs=x)
    assert torch.allclose(alone.values, between.values)


def test_equal_images_with_other_targets_share_nothing(model: nn.Module, x: Tensor) -> None:
    method, twice = InputXGradient(model), x[:1].expand(2, -1, -1, -1)
    functions = [lambda output: output[:, 0], lambda output: -output[:, 0]]
    explanation = method.attribute(twice, functions)
    assert explanation.target == (None, None)
    result = Deletion(steps=4).measure(explanation, method=method, inputs=twice, target=functions)
    constant = result.controls["constant"].values
    assert torch.allclose(constant[0], -constant[1])


def test_the_gradient_of_a_linear_model_has_no_infidelity(model: nn.Module, x: Tensor) -> None:
    for method in (VanillaGradient(model), InputXGradient(model)):
        metric = Infidelity(passes=200, scaled=False)
        result = metric.measure(method.attribute(x, 1), method=method, inputs=x, score="explained")
        assert result.values.abs().max() < 1e-20
        assert all(control.values.min() > 0.01 for control in result.controls.values())


def test_a_control_is_worse_than_the_true_map_and_does_not_beat_itself(model: nn.Module, x: Tensor) -> None:
    method = InputXGradient(model)
    metric = FaithfulnessCorrelation(segments=(8, 8))
    true = metric.measure(method.attribute(x, 0), method=method, inputs=x, score="explained")
    assert torch.allclose(true.values, torch.ones(2, dtype=torch.float64))
    assert true.beats_controls.all()


def test_controls_can_be_left_out(model: nn.Module, x: Tensor) -> None:
    method = InputXGradient(model)
    explanation = method.attribute(x, [0, 1])
    names = ["deletion", "infidelity", "mprt", "entropy"]
    alone = measure(names, explanation, method=method, inputs=x, controls=False)
    usual = measure(names, explanation, method=method, inputs=x)
    assert all(torch.equal(one.values, other.values) for one, other in zip(alone, usual, strict=True))
    assert [dict(one.controls) for one in alone] == [{}] * 4
    assert (alone[0].passes - 1) * 22 == usual[0].passes - 1  # the empty image is shared
    assert not alone[0].beats_controls.any()


def test_controls_are_chosen_by_name_and_the_edges_are_those_of_the_image(model: nn.Module, x: Tensor) -> None:
    explanation = explanation_of(edges(x))
    chosen = ("centre", "edges", "random")
    for metric in ("deletion", "infidelity"):
        result = measure(metric, explanation, model=model, inputs=x, controls=chosen)[0]
        assert tuple(result.controls) == chosen
        assert torch.allclose(result.controls["edges"].values, result.values)
        assert not result.beats_controls.any()  # the map is a control
    grey = x.mean(1)
    across = grey[:, 3, 2] - grey[:, 3, 4]
    down = grey[:, 2, 3] - grey[:, 4, 3]
    assert torch.allclose(edges(x)[:, 3, 3], (across.square() + down.square()).sqrt())
    plain = torch.ones_like(x)
    assert measure("deletion", explanation, model=model, inputs=plain, controls=chosen)[0].values.isfinite().all()
    assert list(measure("deletion", explanation, model=model, inputs=x, controls="edges")[0].controls) == ["edges"]
    with pytest.raises(MethodError, match='did you mean "edges"'):
        measure("deletion", explanation, model=model, inputs=x, controls=["edge"])


def test_errors_name_what_is_missing(model: nn.Module, x: Tensor) -> None:
    explanation = VanillaGradient(model).attribute(x, 0)
    with pytest.raises(MethodError, match=r"pass method=\.\.\. or model=\.\.\."):
        measure("deletion", explanation, inputs=x)
    with pytest.raises(MethodError, match=r"does not keep it: pass it as inputs=\.\.\."):
        measure("deletion", explanation, model=model)
    with pytest.raises(MethodError, match='no metric "delet"; did you mean "deletion"'):
        measure("delet", explanation, model=model, inputs=x)
    with pytest.raises(KeyError, match="did you mean"):
        METRICS["delet"]


def test_random_controls_are_the_map_at_other_places_and_depend_on_the_seed_and_the_draw(x: Tensor) -> None:
    cells = x[:, 0]
    drawn = [control_maps(cells, seed)[2:] for seed in (0, 1)]
    for controls in drawn:
        assert len(controls) == 19
        for moved in controls:
            assert torch.equal(moved.flatten(1).sort().values, cells.flatten(1).sort().values)
            assert not torch.equal(moved, cells)
            neighbours = [each.diff(dim=2).abs().mean() for each in (cells, moved)]  # the structure stays
            assert neighbours[1] == pytest.approx(float(neighbours[0]), rel=0.15)
    first, second = ([each.numpy().tobytes() for each in controls] for controls in drawn)
    assert len(set(first) & set(second)) < 5  # of 19, by chance
    half = [each[..., ::2, ::2] for each in control_maps(cells.repeat_interleave(2, 1).repeat_interleave(2, 2), 0)[2:]]
    same = sum(torch.equal(one, other) for one, other in zip(half, drawn[0], strict=True))
    assert same >= 5  # maps of another resolution move by the same fractions, up to whole cells


def test_a_map_that_does_not_differ_from_a_control_beyond_rounding_does_not_beat_it(model: nn.Module) -> None:
    explanation = explanation_of(torch.ones(1, 8, 8))
    (result,) = measure([Deletion(steps=4)], explanation, model=model, inputs=torch.ones(1, 3, 8, 8).double())
    assert not result.beats_controls.any()
    for factor, beyond in ((1 + 1e-8, False), (1 + 1e-4, True)):
        low, high = torch.ones(1).double(), torch.full((1,), 2.0).double()
        one = replace(result, controls={"constant": Control(low, low, high)}, higher_is_better=True)
        assert replace(one, values=high * factor).beats_controls.item() is beyond
        assert replace(one, values=low / factor, higher_is_better=False).beats_controls.item() is beyond


def test_a_control_has_the_range_of_its_draws(model: nn.Module, x: Tensor) -> None:
    method = InputXGradient(model)
    deletion = Deletion(steps=4).measure(method.attribute(x, [0, 1]), method=method, inputs=x)
    for name in ("constant", "centre"):
        assert torch.equal(deletion.controls[name].low, deletion.controls[name].high)
    random = deletion.controls["random"]
    assert (random.low < random.values).all()
    assert (random.values < random.high).all()


def test_controls_of_the_image_are_its_edges_the_same_smoothed_and_the_distance_to_its_mean_colour() -> None:
    image = torch.zeros(1, 3, 32, 32)
    image[:, :, 8:24, 8:24] = 1
    names = ("edges", "smoothed edges", "colour contrast")
    sharp, smooth, contrast = control_maps(torch.ones(1, 32, 32), 0, names=names, images=image)
    assert torch.equal(sharp > 0, edges(image) > 0)
    assert ((smooth > 0).sum(), float(smooth.max())) > ((sharp > 0).sum(), 0)
    assert (contrast[0, 8:24, 8:24] > contrast[0, 0, 0]).all()


def test_random_blocks_are_seldom_better_than_all_controls() -> None:
    def score(x: Tensor) -> Tensor:
        return x[:, :, 14:, 14:].mean((1, 2, 3))

    blocks = torch.randn(50, 4, 4, generator=torch.Generator().manual_seed(0))
    explanation = explanation_of(blocks.repeat_interleave(6, 1).repeat_interleave(6, 2))
    x = torch.ones(50, 1, 24, 24)
    result = Deletion(steps=4).measure(explanation, model=FunctionModel(score), inputs=x, score="explained")
    assert result.beats_controls.double().mean() <= 0.08  # 0.4 if the controls are shuffled pixels


def test_an_explanation_from_the_cpu_is_measured_where_the_model_is(
    model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    explanation = VanillaGradient(model).attribute(x, 0)
    assert not Subject(explanation, model=model).explanation.values.is_meta
    monkeypatch.setattr(base, "reference_tensor", lambda model: torch.empty(0, device="meta"))
    for network in ({"model": model}, {"method": VanillaGradient(model)}):
        moved = Subject(explanation, **network).explanation
        assert moved.values.is_meta
        assert moved.scores.is_meta


def test_every_metric_has_a_public_name() -> None:
    public = [getattr(metrics, name) for name in dir(metrics)]
    assert all(metric in public for metric in METRICS.values())


def test_wrong_names_are_answered(model: nn.Module, x: Tensor) -> None:
    with pytest.raises(TypeError, match=r'a metric has no argument "random_control"; did you mean "random_controls"'):
        measure("gini", VanillaGradient(model).attribute(x, 0), random_control=3)
    with pytest.raises(AttributeError, match='did you mean "Deletion"'):
        metrics.Delection  # type: ignore[attr-defined]  # noqa: B018
