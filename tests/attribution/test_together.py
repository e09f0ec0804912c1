"""Several methods, or several classes, from one forward: the same values as alone, and no pass more than needed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import saliency
from saliency import (
    Attribution,
    EigenCAM,
    EigenGradCAM,
    Explanation,
    FusedCAM,
    GradCAM,
    GradCAMPlusPlus,
    GuidedBackprop,
    GuidedGradCAM,
    HiResCAM,
    LayerCAM,
    RectGrad,
    Together,
    VanillaGradient,
    XGradCAM,
)
from saliency.errors import MethodError, TargetError


class Net(nn.Module):
    """Counts its forwards, and the backward passes that reach into its tail."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.Conv2d(6, 8, 3, stride=2), nn.ReLU(inplace=True))
        self.tail = nn.Sequential(nn.Flatten(), nn.Linear(8 * 25, 9), nn.ReLU(), nn.Linear(9, 6))
        self.forwards = 0
        self.backwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        features: Tensor = self.second(self.first(x))
        out: Tensor = self.tail(features)
        if out.requires_grad:
            out.register_hook(self._count)  # type: ignore[no-untyped-call]
        return out

    def _count(self, gradient: Tensor) -> None:
        self.backwards += 1


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 3, 11, 11)


def passes(model: Net) -> tuple[int, int]:
    counted = model.forwards, model.backwards
    model.forwards = model.backwards = 0
    return counted


def test_methods_that_share_a_forward_may_have_scores_of_their_own() -> None:
    """After a call, relevance reads the graph of the score, which lacks the operations of the other score."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)).eval()
    x = torch.randn(2, 3, 8, 8)
    methods = [saliency.FinerCAM(model), saliency.AttnLRP(model)]
    alone = [method.attribute(x, 1) for method in methods]
    for found, expected in zip(Together(*methods).attribute(x, 1), alone, strict=True):
        assert_same(found, expected)


def gradient_cams(model: Net) -> list[Attribution]:
    return [cls(model, "second") for cls in (GradCAM, GradCAMPlusPlus, XGradCAM, HiResCAM, LayerCAM, EigenGradCAM)]


def assert_same(found: Explanation, alone: Explanation) -> None:
    assert torch.equal(found.values, alone.values)
    assert torch.equal(found.scores, alone.scores)
    assert found.method == alone.method
    assert found.layer == alone.layer
    assert found.target == alone.target
    assert found.target_names == alone.target_names
    assert found.settings == alone.settings
    assert found.coverage == alone.coverage
    assert found.probabilities is not None
    assert alone.probabilities is not None
    assert torch.equal(found.probabilities, alone.probabilities)


def test_any_number_of_cams_on_one_layer_take_one_forward_and_one_backward(model: Net, x: Tensor) -> None:
    methods = gradient_cams(model)
    found = Together(*methods).attribute(x, [2, 5])
    assert passes(model) == (1, 1)
    for method, together in zip(methods, found, strict=True):
        assert_same(together, method.attribute(x, [2, 5]))
    assert passes(model) == (len(methods), len(methods))


def test_cams_of_several_layers_take_one_backward_too(model: Net, x: Tensor) -> None:
    methods = [GradCAM(model, "first"), GradCAM(model, "second"), FusedCAM(model, ["first", "second"])]
    found = Together(*methods).attribute(x, 1)
    assert passes(model) == (1, 1)
    for method, together in zip(methods, found, strict=True):
        assert_same(together, method.attribute(x, 1))


def test_eigen_cam_alone_takes_no_backward(model: Net, x: Tensor) -> None:
    Together(EigenCAM(model, "second")).attribute(x, 1)
    assert passes(model) == (1, 0)


def test_every_method_shares_the_forward_and_gives_what_it_gives_alone(model: Net, x: Tensor) -> None:
    methods: list[Attribution] = [
        VanillaGradient(model),
        GuidedBackprop(model),
        RectGrad(model, percentile=50),
        EigenCAM(model, "second"),
        GuidedGradCAM(model, "second"),
        *gradient_cams(model),
    ]
    found = Together(*methods).attribute(x)
    assert passes(model)[0] == 1
    for method, together in zip(methods, found, strict=True):
        assert_same(together, method.attribute(x))


def test_a_layer_that_is_found_by_itself_is_shared_too(model: Net, x: Tensor) -> None:
    methods = [GradCAM(model), HiResCAM(model)]
    found = Together(*methods).attribute(x, 1)
    assert [each.layer for each in found] == ["second", "second"]
    passes(model)
    Together(*methods).attribute(x, 1)
    assert passes(model) == (1, 1), "the survey is remembered"


def test_the_same_method_twice_gives_two_explanations(model: Net, x: Tensor) -> None:
    once = GradCAM(model, "second")
    found = Together(once, once).attribute(x, 1)
    assert torch.equal(found[0].values, found[1].values)


def test_a_method_that_traces_nothing_takes_part(model: Net, x: Tensor) -> None:
    from saliency.attribution.explanation import BatchAttribution
    from saliency.attribution.questions import Questions

    class Constant(Attribution):
        """No name: it stays out of the registry."""

        def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
            """The score in each place."""
            with torch.no_grad():
                scores = target(self.model(x))
            return BatchAttribution(scores[:, None, None, None].expand(-1, 1, 4, 4), scores)

    found = Together(Constant(model), GradCAM(model, "second")).attribute(x)
    assert [each.method for each in found] == ["Constant", "grad_cam"]
    assert found[0].target == found[1].target
    assert torch.allclose(found[0].scores, found[1].scores)


def test_methods_of_different_models_are_refused(model: Net, x: Tensor) -> None:
    with pytest.raises(MethodError, match="same model"):
        Together(GradCAM(model), GradCAM(Net())).attribute(x)
    for methods in ([], [GradCAM], [[GradCAM(model)]]):
        with pytest.raises(MethodError, match=r"expected methods, such as Together\(GradCAM\(model\), LayerCAM"):
            Together(*methods)


# Several classes.


@pytest.mark.parametrize(
    "cls", [GradCAM, EigenCAM, EigenGradCAM, FusedCAM, GuidedGradCAM, VanillaGradient, GuidedBackprop, RectGrad]
)
def test_several_classes_share_one_forward(model: Net, x: Tensor, cls: type[Attribution]) -> None:
    method = cls(model)
    method.attribute(x, 0)  # the survey, where there is one
    passes(model)
    found = method.attribute_classes(x, [0, [3, 1], None, saliency.probability(2)])
    assert passes(model)[0] == 1
    for target, shared in zip([0, [3, 1], None, saliency.probability(2)], found, strict=True):
        assert_same(shared, method.attribute(x, target))


def test_the_maps_of_different_classes_differ(model: Net, x: Tensor) -> None:
    first, second = GradCAM(model, "second").attribute_classes(x, [0, 1])
    assert not torch.allclose(first.values, second.values)


def test_one_wrong_class_among_several_is_an_error(model: Net, x: Tensor) -> None:
    with pytest.raises(TargetError, match=r"outside 0\.\.5"):
        GradCAM(model, "second").attribute_classes(x, [0, 6])


@pytest.mark.parametrize("targets", [[], "espresso", 3, None])
def test_targets_that_are_no_list_are_refused(model: Net, x: Tensor, targets: object) -> None:
    with pytest.raises(MethodError, match="list of targets"):
        GradCAM(model, "second").attribute_classes(x, targets)  # type: ignore[arg-type]
