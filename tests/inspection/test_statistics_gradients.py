"""Gradient statistics: those of torch's own backward pass over everything at once, with nothing touched."""

from __future__ import annotations

import copy
import functools
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saliency
from saliency.errors import ImageError, LayerError, ModelError, NotApplicableError, TargetError
from saliency.inspection import edit_gradients
from saliency.inspection.recording import record
from saliency.inspection.statistics import (
    GradientStatistics,
    LayerGradients,
    gradient_statistics,
)
from saliency.testing import Snapshot, images, tiny_model
from tests.models import Checkpointed, OwnForward, sigmoid_net
from tests.threads import in_threads

LABELS = torch.tensor([3, 0, 4, 1, 1, 2])


def precise() -> nn.Module:
    return tiny_model().double()


def photos(n: int = 6, seed: int = 1) -> Tensor:
    return images(n, seed=seed, dtype=torch.float64)


def assert_is(row: LayerGradients, gradient: Tensor, rounding: float = 1e-9) -> None:
    """That a row is what numpy says of a gradient."""
    flat = gradient.detach().double().numpy().reshape(-1)
    size = float(np.sqrt(np.square(flat).sum()))
    assert row.norm == pytest.approx(size, rel=rounding)
    assert row.rms == pytest.approx(size / math.sqrt(len(flat)), rel=rounding)
    for name, wanted in (("mean", flat.mean()), ("std", flat.std()), ("min", flat.min()), ("max", flat.max())):
        assert getattr(row, name) == pytest.approx(float(wanted), rel=rounding, abs=rounding * size), name
    assert row.zero_share == (flat == 0).mean()
    assert (row.nan, row.inf) == (0, 0)


def by_full_hooks(model: nn.Module, x: Tensor, loss: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    """The gradients at the outputs of layers by full backward hooks; for models without in-place operations."""
    found: dict[str, Tensor] = {}

    def hook_of(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
            found[name] = grad_output[0].clone()

        return hook

    handles = [each.register_full_backward_hook(hook_of(name)) for name, each in model.named_modules() if name]
    x = x.clone().requires_grad_()
    torch.autograd.grad(loss(model(x)), [x, *model.parameters()], allow_unused=True)
    for each in handles:
        each.remove()
    return found


def plain_model() -> nn.Module:
    """Without in-place operations: full backward hooks serve."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.Tanh())
    return nn.Sequential(body, nn.Identity(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(6 * 49, 5)).double().eval()


# The numbers ---------------------------------------------------------------------------------------------------------


def test_the_two_layer_sigmoid_network_has_the_gradients_that_are_derived_by_hand() -> None:
    found = gradient_statistics(sigmoid_net(), torch.tensor([[0.05, 0.10]]), lambda output: output.sum())

    def extremes(row: LayerGradients) -> tuple[float | None, ...]:
        return row.min, row.max

    assert found.loss == pytest.approx(0.7569 + 0.7677, abs=1e-4)
    assert extremes(found["3"]) == (1.0, 1.0)
    assert extremes(found["2"]) == pytest.approx((0.1783, 0.1840), abs=5e-5)
    assert extremes(found["1"]) == pytest.approx((0.1538, 0.1901), abs=5e-5)
    assert extremes(found["0"]) == pytest.approx((0.0371, 0.0458), abs=5e-5)
    assert [row.name for row in found] == ["0", "1", "2", "3"]


def test_layers_have_the_gradients_of_full_backward_hooks() -> None:
    model, x = plain_model(), photos()

    def loss(output: Tensor) -> Tensor:
        return F.cross_entropy(output, LABELS)

    wanted = by_full_hooks(model, x, loss)
    found = gradient_statistics(model, x, loss)
    assert {row.name for row in found} == set(wanted)
    for row in found:
        assert_is(row, wanted[row.name])
        assert row.count == wanted[row.name].numel()


@pytest.mark.slow
def test_a_layer_in_place_and_called_again_has_the_gradient_of_each_of_its_outputs() -> None:
    model, x = precise(), photos(2)
    out_of_place = copy.deepcopy(model)
    out_of_place.get_submodule("relu").inplace = False  # type: ignore[assignment]
    found = gradient_statistics(model, x, 1)
    # By finite differences: what each output adds to the score.
    for row, wanted in zip(found, gradient_statistics(out_of_place, x, 1), strict=True):
        assert row == wanted or row.norm == pytest.approx(wanted.norm, rel=1e-12), row.name
    relus = [row for row in found if row.name == "relu"]
    assert [(row.call, row.calls) for row in relus] == [(0, 2), (1, 2)]
    for call, row in enumerate(relus):
        assert_is(row, differences(out_of_place, "relu", call, x), 1e-5)


def differences(model: nn.Module, layer: str, call: int, x: Tensor) -> Tensor:
    """The gradient of the mean score of class 1 at the output of one call of a layer, by finite differences."""
    step, found = 1e-6, []
    calls = 0
    shape = torch.Size()
    shift: Tensor | None = None

    def add(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        nonlocal calls, shape
        calls += 1
        if calls - 1 != call:
            return None
        shape = output.shape
        return None if shift is None else output + shift.view(shape)

    def score() -> float:
        nonlocal calls
        calls = 0
        with torch.no_grad():
            return float(model(x)[:, 1].mean())

    handle = model.get_submodule(layer).register_forward_hook(add)
    score()
    whole = torch.Size(shape).numel()
    for at in range(whole):
        ends = []
        for way in (step, -step):
            shift = torch.zeros(whole, dtype=torch.float64)
            shift[at] = way
            ends.append(score())
        found.append((ends[0] - ends[1]) / (2 * step))
    handle.remove()
    gradient = torch.tensor(found, dtype=torch.float64)
    return torch.where(gradient.abs() < 1e-9, 0.0, gradient)


def test_an_output_that_the_next_layer_overwrites_keeps_its_own_gradient() -> None:
    class Scales(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(3.0)

    model = nn.Sequential(nn.Identity(), nn.Flatten(), Scales(), nn.Identity()).eval()
    found = gradient_statistics(model, torch.randn(2, 4, 1), lambda output: output.sum())
    assert [(row.name, row.min, row.max) for row in found] == [
        ("0", 3.0, 3.0),
        ("1", 3.0, 3.0),
        ("2", 1.0, 1.0),
        ("3", 1.0, 1.0),
    ]


def test_a_row_is_of_what_flows_on_behind_the_users_own_hooks() -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity())
    model[0].register_forward_hook(lambda module, inputs, output: 3 * output)
    found = gradient_statistics(model, torch.randn(2, 3), lambda output: (2 * output).sum())
    assert (found["0"].max, found["1"].max) == (2.0, 2.0)


def test_a_skip_around_a_layer_is_not_counted_at_its_output() -> None:
    skip = OwnForward(lambda model, x: 5 * x + 2 * model.inner(x), inner=nn.Identity())
    found = gradient_statistics(skip, torch.randn(2, 3), lambda output: output.sum())
    assert (found["inner"].min, found["inner"].max) == (2.0, 2.0)


# Several batches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["loss", "labels", "score", "probability"])
def test_several_batches_of_any_size_count_as_one(kind: str) -> None:
    model, x = precise(), photos()
    of: Any = {
        "loss": lambda output, labels: output.square().mean(),
        "labels": nn.CrossEntropyLoss(),
        "score": 2,
        "probability": saliency.probability(2),
    }[kind]
    whole = gradient_statistics(model, [(x, LABELS)], of)
    cuts = [(x[:1], LABELS[:1]), (x[1:5], LABELS[1:5]), (x[5:], LABELS[5:])]
    parts = gradient_statistics(model, iter(cuts), of)
    assert (parts.batches, parts.images) == (3, 6)
    assert parts.loss == pytest.approx(whole.loss)
    for found, wanted in zip(parts, whole, strict=True):
        assert found.name == wanted.name
        for field in ("norm", "rms", "mean", "std", "min", "max", "zero_share"):
            value, rounding = getattr(wanted, field), 1e-9 * (wanted.norm or 0)
            assert getattr(found, field) == pytest.approx(value, rel=1e-9, abs=rounding), (found.name, field)


# Parameters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[(0, 6)], [(0, 1), (1, 5), (5, 6)]], ids=["one batch", "three batches"])
def test_parameters_have_the_gradient_of_the_mean_loss_over_all_images(cuts: list[tuple[int, int]]) -> None:
    model, x = precise(), photos()
    whole = copy.deepcopy(model).eval()
    expected = torch.autograd.grad(F.cross_entropy(whole(x), LABELS), list(whole.parameters()))
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    before = Snapshot(model=model)
    pairs = [(x[start:end], LABELS[start:end]) for start, end in cuts]
    found = gradient_statistics(model, pairs, F.cross_entropy, of="parameters")
    assert [row.name for row in found] == list(dict(whole.named_parameters()))
    for row, own in zip(found, expected, strict=True):
        assert_is(row, own)
        assert row.kind == type(model.get_submodule(row.name.rpartition(".")[0])).__name__
        assert (row.call, row.calls, row.count) == (0, 1, own.numel())
    assert not before.changes()
    assert str(found).splitlines()[2].split()[:3] == ["parameter", "kind", "norm"]
    assert "at the parameters of" in found.title
    assert saliency.figure(found).axes[0].get_xlabel() == "parameters, from the input to the output"


def test_parameters_are_those_of_the_selected_layers_and_the_frozen_ones_have_none() -> None:
    model = plain_model()
    model.get_parameter("4.bias").requires_grad_(False)
    found = gradient_statistics(model, photos(), 2, of="parameters", layers=["0.3", nn.Linear])
    assert [(row.name, row.kind) for row in found] == [
        ("0.3.weight", "Conv2d"),
        ("0.3.bias", "Conv2d"),
        ("4.weight", "Linear"),
        ("4.bias", "Linear"),
    ]
    assert [row.norm is None for row in found] == [False] * 3 + [True]
    assert gradient_statistics(model, photos(), 2, of="parameters", layers="0")[0].name == "0.0.weight"
    with pytest.raises(LayerError, match="the selected layers of Sequential have no parameters"):
        gradient_statistics(model, photos(), 2, of="parameters", layers=nn.Tanh)
    with pytest.raises(saliency.errors.MethodError, match="of='weights' is not one of 'layers', 'parameters'"):
        gradient_statistics(model, photos(), 2, of="weights")  # type: ignore[arg-type]


def test_parameters_of_the_model_itself_tied_ones_and_nan_have_rows() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.first, self.second, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            x = self.second(self.first(self.scale * x))
            out: Tensor = self.head((x - x).sqrt() + x)
            return out

    found = gradient_statistics(Root(), torch.randn(2, 3), 0, of="parameters")
    names = ["scale", "first.weight", "first.bias", "second.bias", "head.weight", "head.bias"]
    assert [row.name for row in found] == names
    assert found["scale"].kind == "Root"
    assert [row.nan > 0 for row in found] == [True] * 4 + [False] * 2
    assert found.first_nonfinite == "second.bias"


# What it is a gradient of --------------------------------------------------------------------------------------------


def norms(model: nn.Module, data: Any, of: Any) -> list[float | None]:
    return [row.norm for row in gradient_statistics(model, data, of)]


def test_a_loss_takes_the_labels_that_the_data_have() -> None:
    model, x = precise(), photos()
    pairs = [(x, LABELS)]
    wanted = norms(model, x, lambda output: F.cross_entropy(output, LABELS))

    def named(output: Tensor, target: Tensor | None = None) -> Tensor:
        return F.cross_entropy(output, LABELS if target is None else target)

    def scaled(output: Tensor, labels: Tensor, scale: float = 1.0) -> Tensor:
        return scale * F.cross_entropy(output, labels)

    losses: list[Any] = [
        nn.CrossEntropyLoss(),
        F.cross_entropy,
        functools.partial(F.cross_entropy, reduction="mean"),
        nn.CrossEntropyLoss(reduction="none"),
        named,
        scaled,
    ]
    for each in losses:
        assert norms(model, pairs, each) == pytest.approx(wanted), each
    assert norms(model, x, named) == pytest.approx(wanted)


def test_a_target_is_the_mean_score_over_the_images() -> None:
    model, x = precise(), photos()
    model.categories = ["a", "b", "c", "d", "e"]  # type: ignore[assignment]
    wanted = norms(model, x, lambda output: output[:, 2].mean())
    for target in (2, "c", [2] * 6, saliency.value(2), lambda output: output[:, 2]):
        found = gradient_statistics(model, x, target)
        assert [row.norm for row in found] == pytest.approx(wanted)
        assert found.loss == pytest.approx(model(x)[:, 2].mean().item())
    assert norms(model, x, None) == pytest.approx(norms(model, x, lambda output: output.amax(1).mean()))
    assert gradient_statistics(model, x).objective == "score"
    assert gradient_statistics(model, x, lambda output: output.sum()).objective == "loss"


@pytest.mark.parametrize(
    ("of", "message"),
    [
        (7, "class 7 is outside 0..4"),
        ("espresso", "cannot be looked up"),
        (lambda output: output, "the loss is torch.float32 of shape"),
        (lambda output: 1.0, "the loss is float"),
        (lambda output: output.argmax(1), "the loss is torch.int64"),
        (lambda output: output[:2, 0], "one for each of 3 images"),
        (lambda output: output.detach().sum(), "has no gradient"),
        (lambda output: torch.tensor(1.0), "has no gradient"),
        (nn.CrossEntropyLoss, "the loss is CrossEntropyLoss"),
    ],
)
def test_what_is_no_loss_and_no_target_is_an_error_that_says_so(of: Any, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        gradient_statistics(tiny_model(), images(3), of)


# Where there is no gradient ------------------------------------------------------------------------------------------


def test_layers_of_a_frozen_network_get_the_gradient_that_flows_through_them() -> None:
    model, x = tiny_model(), images(2)
    wanted = gradient_statistics(model, x, 1)
    for each in model.parameters():
        each.requires_grad_(False)
    found = gradient_statistics(model, x, 1)
    assert list(found) == list(wanted)


def test_layers_that_no_gradient_comes_to_have_rows_of_none() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.behind, self.aside = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.before(x)
            self.aside(x)
            out: Tensor = self.behind(x)
            return out

    found = gradient_statistics(Cut(), torch.randn(2, 3))
    assert [(row.name, row.norm is None) for row in found] == [("before", True), ("aside", True), ("behind", False)]
    assert "-" in str(found)


def test_nan_is_found_where_it_first_comes_up_on_the_way_back() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.second(self.first(x))
            out: Tensor = self.head((x - x).sqrt() + x)
            return out

    found = gradient_statistics(Root(), [torch.randn(2, 3), torch.randn(1, 3)])
    assert found.first_nonfinite == "second"
    assert "NaN or infinity first in second" in found.notes
    assert found["head"].nan == 0
    assert found["second"].nan > 0
    assert math.isfinite(found.loss)
    assert "NaN" in str(found)


def test_nan_in_the_loss_is_shown_and_no_error() -> None:
    x = images(2)
    x[0, 0, 0, 0] = math.nan
    found = gradient_statistics(tiny_model(), [images(1), x], 0)
    assert math.isnan(found.loss)
    assert found.title == "Gradients of a score of nan at the layers of TinyNet"
    overflown = gradient_statistics(tiny_model(), images(1), lambda output: output.sum() * math.inf)
    assert overflown.first_nonfinite == "head"
    assert gradient_statistics(tiny_model(), images(1)).first_nonfinite is None


# Nothing is touched --------------------------------------------------------------------------------------------------


def raising(output: Tensor) -> Tensor:
    raise ValueError("on purpose")


class Fussy(nn.Module):
    """Raises on the way back."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            raise ValueError("on purpose")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.Function.apply(x)
        return out


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_everything_is_left_bit_for_bit_also_when_something_raises(mode: Callable[[], Any]) -> None:
    model, x = tiny_model().train(), images(3)
    fussy = nn.Sequential(tiny_model(), Fussy()).train()
    for parameter in list(model.parameters())[::2]:
        parameter.grad = torch.ones_like(parameter)
    model.get_parameter("stem.weight").requires_grad_(False)
    with mode():
        labels = torch.tensor([1, 2, 3])
        before = Snapshot(model=model, fussy=fussy, x=x, labels=labels)
        gradient_statistics(model, [(x, labels)] * 2, nn.CrossEntropyLoss())
        gradient_statistics(model, x, 1)
        for network, of in ((model, raising), (fussy, 0), (model, 99)):
            with pytest.raises((ValueError, TargetError)):
                gradient_statistics(network, x, of)
        with pytest.raises(ImageError):
            gradient_statistics(model, iter(()))
        assert before.changes() == []


def test_the_input_of_the_user_gets_no_gradient_and_its_graph_is_left_alone() -> None:
    start = images(2).requires_grad_()
    x = start * 2
    gradient_statistics(tiny_model(), x)
    gradient_statistics(tiny_model(), start)
    assert start.grad is None
    x.sum().backward()  # type: ignore[no-untyped-call]
    assert start.grad is not None
    assert start.grad.unique().tolist() == [2.0]


@pytest.mark.slow
def test_no_activation_and_no_gradient_outlives_its_batch() -> None:
    model = tiny_model()
    alive: list[weakref.ref[Tensor]] = []

    def note(module: nn.Module, inputs: Any, output: Tensor) -> None:
        alive.append(weakref.ref(output))
        if output.requires_grad:
            output.register_hook(lambda gradient: alive.append(weakref.ref(gradient)))  # type: ignore[no-untyped-call]

    handles = [module.register_forward_hook(note) for module in model.modules()]
    most = 0

    def batches() -> Iterator[Tensor]:
        nonlocal most
        for seed in range(40):
            most = max(most, sum(each() is not None for each in alive))
            yield images(2, seed=seed)

    gc.collect()
    gc.disable()
    try:
        gradient_statistics(model, batches(), 0)
    finally:
        gc.enable()
        for handle in handles:
            handle.remove()
    assert len(alive) > 700
    assert most == 0


def test_threads_on_one_model_find_what_each_finds_alone() -> None:
    model = tiny_model()
    wanted = {n: gradient_statistics(model, images(n), 0).rows for n in (1, 2, 3, 4)}
    assert in_threads(lambda n: gradient_statistics(model, images(n), 0).rows, wanted) == wanted


# Checkpoints, other models ----------------------------------------------------------------------------


def two_convolutions() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3))


def test_a_checkpointed_part_is_counted_once_and_exactly() -> None:
    body, x = Checkpointed(two_convolutions()), images(2)
    model = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    found = gradient_statistics(model, x, 0)
    body.reentrant = None
    wanted = gradient_statistics(model, x, 0)
    assert found.rows == wanted.rows


def test_a_part_that_is_checkpointed_reentrantly_is_refused_with_the_cure() -> None:
    body = Checkpointed(two_convolutions(), reentrant=True)
    model = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    with pytest.raises(NotApplicableError, match="use_reentrant"):
        gradient_statistics(model, images(2), 0)


def test_a_loss_that_takes_gradients_of_its_own_is_counted_once() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(2, 3, dtype=torch.float64)
    weight = model.get_parameter("2.weight")

    def penalty(output: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(output.square().sum(), weight, create_graph=True)
        return slope.square().sum()

    found = gradient_statistics(model, x, penalty)
    hidden = model[0](x)
    (wanted,) = torch.autograd.grad(penalty(model[2](model[1](hidden))), hidden)
    assert_is(found["0"], wanted)
    assert [row.count for row in found] == [8, 8, 4]


def test_a_model_made_under_inference_mode_is_refused_with_the_cure() -> None:
    with torch.inference_mode():
        model = nn.Linear(3, 2)
    with pytest.raises(ModelError, match="inference_mode"):
        gradient_statistics(model, torch.randn(2, 3))


def test_half_precision_under_autocast_is_counted_in_double() -> None:
    model, x = tiny_model(), images(2)
    wanted = gradient_statistics(model, x, 0)["last"].norm
    with torch.autocast("cpu", torch.bfloat16):
        found = gradient_statistics(model, x, 0)["last"].norm
    assert found == pytest.approx(wanted, rel=0.05)


def test_layers_are_chosen_and_a_wrong_name_is_an_error() -> None:
    found = gradient_statistics(tiny_model(), images(1), layers=["relu", "head"])
    assert [row.name for row in found] == ["relu", "relu", "head"]
    with pytest.raises(LayerError, match="the closest are stem"):
        gradient_statistics(tiny_model(), images(1), layers="stam")


def test_inside_an_edit_the_statistics_are_those_of_the_edited_gradients() -> None:
    model, x = tiny_model(), images(2)
    plain = gradient_statistics(model, x, 0)
    with edit_gradients(model, "last", lambda tensor: 0 * tensor):
        edited = gradient_statistics(model, x, 0)
    assert edited["last"].norm == pytest.approx(plain["last"].norm)
    assert edited["down"].norm == 0
    assert gradient_statistics(model, x, 0).rows == plain.rows


def test_a_recording_around_it_changes_no_row() -> None:
    model, x = tiny_model(), images(2)
    plain = gradient_statistics(model, x, 0)
    with record(model, keep="statistics") as recording:
        found = gradient_statistics(model, x, 0)
    assert found.rows == plain.rows
    assert recording["stem"][0].grad_outputs[0].moments.norm == pytest.approx(plain["stem"].norm, rel=1e-5)


def test_an_empty_batch_is_an_error_that_says_which() -> None:
    with pytest.raises(ImageError, match="batch 2 is empty"):
        gradient_statistics(nn.Linear(4, 2), [torch.randn(2, 4), torch.randn(0, 4)], lambda output: output.sum())


def test_the_table_says_of_which_model_it_is() -> None:
    found = gradient_statistics(tiny_model(), images(2), 0)
    assert isinstance(found, GradientStatistics)
    assert "at the layers of TinyNet" in str(found)
    assert found.to_html().count("<table") == 1
    assert "at the layers of TinyNet': 9 rows" in repr(found)
