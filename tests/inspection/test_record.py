"""Recording: what every layer took and gave, and the gradients that came back, whatever the layers do."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saliency import GradCAM
from saliency.errors import LayerError, MethodError, NotApplicableError
from saliency.hooks.pytree import tree_tensors
from saliency.inspection import ModuleCall, Recording, TensorStatistics
from saliency.inspection.recording import record
from saliency.testing import Snapshot
from tests.models import Checkpointed, OwnForward, PooledNet, Raises, sigmoid_net, torchvision_models


def near(found: Any, expected: list[Any], digits: int = 4) -> bool:
    """Whether numbers agree as far as they were printed."""
    return torch.allclose(torch.as_tensor(found), torch.tensor(expected), rtol=0, atol=0.5 * 10**-digits + 1e-9)


def only(calls: list[ModuleCall]) -> ModuleCall:
    (call,) = calls
    return call


# The textbook network.


def test_the_sigmoid_network_of_the_textbook_shows_its_known_numbers() -> None:
    net = sigmoid_net()
    x = torch.tensor([[0.05, 0.1]], requires_grad=True)
    with record(net) as recording:
        net(x).backward(torch.ones(1, 2))
    outputs = [call.output.detach() for call in recording]
    assert near(outputs[0], [[0.3825, 0.3900]])
    assert near(outputs[1], [[0.5945, 0.5963]])
    assert near(outputs[2], [[1.1359, 1.1955]])
    assert near(outputs[3], [[0.7569, 0.7677]])
    passed_on = [only(recording[name]).grad_inputs[0] for name in "3210"]
    assert near(passed_on[0], [[0.1840, 0.1783]])
    assert near(passed_on[1], [[0.1538, 0.1901]])
    assert near(passed_on[2], [[0.0371, 0.0458]])
    assert near(passed_on[3], [[0.0147, 0.0230]])
    first, second = net[0].weight.grad, net[2].weight.grad
    assert first is not None
    assert second is not None
    assert near(second, [[0.1094, 0.1097], [0.1060, 0.1063]])
    assert near(first, [[0.0019, 0.0037], [0.0023, 0.0046]])


def test_the_recorded_gradients_are_the_products_derived_by_hand() -> None:
    net = sigmoid_net()
    x = torch.tensor([[0.05, 0.1]], requires_grad=True)
    with record(net) as recording:
        net(x).backward(torch.ones(1, 2))
    calls = [only(recording[name]) for name in "0123"]
    gradient = torch.ones(1, 2)
    for call, layer in zip(reversed(calls), reversed(net), strict=True):
        assert torch.equal(call.grad_outputs[0], gradient)
        if isinstance(layer, nn.Linear):
            weight_gradient = gradient.T @ call.inputs[0].detach() if call.inputs else None
            assert layer.weight.grad is not None
            assert weight_gradient is not None
            assert torch.allclose(layer.weight.grad, weight_gradient, rtol=1e-6, atol=0)
            gradient = gradient @ layer.weight.detach()
        else:
            gradient = gradient * call.output.detach() * (1 - call.output.detach())
        assert torch.allclose(call.grad_inputs[0], gradient, rtol=1e-6, atol=0)
    assert x.grad is not None
    assert torch.equal(calls[0].grad_inputs[0], x.grad)


def test_a_second_backward_doubles_what_the_first_accumulated_and_is_recorded_as_a_second() -> None:
    net = sigmoid_net()
    with record(net) as recording:
        out = net(torch.tensor([[0.05, 0.1]])).sum()
        out.backward(retain_graph=True)
        once = copy.deepcopy(net.get_parameter("0.weight").grad)
        out.backward()
    twice = net.get_parameter("0.weight").grad
    assert once is not None
    assert twice is not None
    assert torch.equal(twice, 2 * once)
    backwards = only(recording["2"]).backwards
    assert len(backwards) == 2
    assert torch.equal(backwards[0].grad_outputs[0], backwards[1].grad_outputs[0])


# Against PyTorch's own full backward hooks, which need a network without in-place operations.


def full_backward_hooks(model: nn.Module, x: Tensor) -> dict[str, list[tuple[Any, Any]]]:
    """(grad_input, grad_output) of each call of each layer, in forward order."""
    found: dict[str, list[tuple[Any, Any]]] = {}
    handles = [
        module.register_full_backward_hook(lambda _, gi, go, name=name: found.setdefault(name, []).insert(0, (gi, go)))
        for name, module in model.named_modules()
        if name
    ]
    torch.autograd.backward(score_of(model(x)))
    for handle in handles:
        handle.remove()
    return found


def score_of(output: Any) -> Tensor:
    first = (
        output if isinstance(output, Tensor) else next(iter(output.values() if isinstance(output, dict) else output))
    )
    score: Tensor = first.square().sum()
    return score


def out_of_place(model: nn.Module) -> nn.Module:
    made = copy.deepcopy(model)
    for module in made.modules():
        if hasattr(module, "inplace"):
            vars(module)["inplace"] = False
    return made


@pytest.fixture
def adds_are_not_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """`out += identity` in the forward of a residual block adds out of place."""
    monkeypatch.setattr(Tensor, "__iadd__", Tensor.__add__)


class Reused(nn.Module):
    """A ReLU that is used three times, one of them in a branch whose input goes on elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.act = nn.ReLU()
        self.idle = nn.Identity()
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        a = self.act(self.conv(x))
        b = self.act(a - 0.3) + 2 * a + self.idle(a) * 3
        out: Tensor = self.head(self.act(b * b.sigmoid()).mean((2, 3)))
        return out


def vit_with_a_head_of_zeros() -> nn.Module:
    model: nn.Module = torchvision_models().VisionTransformer(
        32, 8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=24
    )
    return model


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "reused": Reused,
    "vit": vit_with_a_head_of_zeros,
    "resnet18": lambda: torchvision_models().resnet18(),
    "mobilenet_v3_small": lambda: torchvision_models().mobilenet_v3_small(),
    "shufflenet": lambda: torchvision_models().shufflenet_v2_x0_5(),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.usefixtures("adds_are_not_in_place")
def test_the_gradients_are_those_of_full_backward_hooks_bit_for_bit(name: str) -> None:
    model = out_of_place(NETWORKS[name]()).eval()
    x = torch.randn(2, 3, 32, 32, requires_grad=True)
    expected = full_backward_hooks(model, x)
    with record(model) as recording:
        torch.autograd.backward(score_of(model(x)))
    assert set(recording.layers) == set(expected)
    compared = 0
    for layer, calls in expected.items():
        for call, (grad_inputs, grad_outputs) in zip(recording[layer], calls, strict=True):
            # PyTorch has a None also for what is no tensor.
            found = [each for each in (*call.grad_inputs, *call.grad_outputs) if each is not None]
            known = [each for each in (*grad_inputs, *grad_outputs) if each is not None]
            assert all(torch.equal(a, b) for a, b in zip(found, known, strict=True)), layer
            compared += len(known)
    assert compared >= 2 * len(expected) - 4


IN_PLACE = {
    "resnet18": lambda: torchvision_models().resnet18(),
    "densenet121": lambda: torchvision_models().densenet121(),
    "mobilenet_v2": lambda: torchvision_models().mobilenet_v2(),
    "squeezenet": lambda: torchvision_models().squeezenet1_1(),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_layers_that_work_in_place_are_recorded_as_those_that_do_not(name: str) -> None:
    model = IN_PLACE[name]().eval()
    x = torch.randn(1, 3, 64, 64, requires_grad=True)
    recordings = []
    for each in (model, out_of_place(model)):
        with record(each) as recording:
            torch.autograd.backward(score_of(each(x)))
        recordings.append(recording)
    there, expected = recordings
    assert any(getattr(module, "inplace", False) for module in model.modules())
    assert len(there) == len(expected)
    for call, known in zip(there, expected, strict=True):
        assert call.layer == known.layer
        for part in ("inputs", "outputs", "grad_inputs", "grad_outputs"):
            pairs = zip(tree_tensors(getattr(call, part)), tree_tensors(getattr(known, part)), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), (call.layer, part)


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.slow
def test_a_recorded_run_computes_what_it_would_without(name: str) -> None:
    model = IN_PLACE[name]().train()
    x = torch.randn(2, 3, 64, 64)
    results = []
    for recorded in (False, True):
        mine = copy.deepcopy(model)
        torch.manual_seed(7)
        with record(mine, keep="statistics") if recorded else torch.enable_grad():
            score = score_of(mine(x))
            torch.autograd.backward(score)
        results.append([score.detach(), *(p.grad for p in mine.parameters()), *mine.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# Where the graph is odd.


USES: dict[str, tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor], Callable[[Tensor], tuple[Tensor, Tensor]]]] = {
    # the layer, how the model uses it, and from x: (what the layer passes on, what arrives at it)
    "an identity that others pass by": (
        nn.Identity(),
        lambda layer, x: layer(x) * 3 + x * 5,
        lambda x: (torch.full_like(x, 3), torch.full_like(x, 3)),
    ),
    "an identity, then an operation in place": (
        nn.Identity(),
        lambda layer, x: layer(x).mul_(3),
        lambda x: (torch.full_like(x, 3), torch.full_like(x, 3)),
    ),
    "dropout in evaluation, then a ReLU in place": (
        nn.Dropout().eval(),
        lambda layer, x: F.relu_(layer(x)) * 2,
        lambda x: (2 * (x > 0).float(), 2 * (x > 0).float()),
    ),
    "a ReLU in place whose result goes two ways": (
        nn.ReLU(inplace=True),
        lambda layer, x: (y := layer(x)) * y + y,
        lambda x: ((2 * x + 1) * (x > 0), 2 * x.clamp(min=0) + 1),
    ),
    "a result that is overwritten": (
        nn.Linear(4, 4, bias=False),
        lambda layer, x: layer(x).exp_(),
        lambda x: (x, x),  # not compared: see below
    ),
}


@pytest.mark.parametrize("use", [use for use in USES if "overwritten" not in use])
def test_identities_and_operations_in_place_around_a_layer_hide_nothing(use: str) -> None:
    layer, forward, expected = USES[use]
    x = torch.randn(3, 4, requires_grad=True)
    model = OwnForward(lambda model, x: forward(model.layer, x * 1), layer=layer)
    with record(model) as recording:
        model(x).sum().backward()
    passed_on, arrived = expected(x.detach())
    call = only(recording["layer"])
    assert torch.allclose(call.grad_outputs[0], arrived)
    assert torch.allclose(call.grad_inputs[0], passed_on)


def test_a_result_that_is_overwritten_has_the_gradient_of_what_it_was() -> None:
    layer, forward, _ = USES["a result that is overwritten"]
    x = torch.randn(3, 4, requires_grad=True)
    model = OwnForward(lambda model, x: forward(model.layer, x * 1), layer=layer)
    with record(model) as recording:
        out = model(x)
        out.sum().backward()
    call = only(recording["layer"])
    assert torch.equal(call.grad_outputs[0], out.detach())
    assert torch.allclose(call.output.exp(), out)


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x + x.sin() + 7


def test_the_parts_that_several_operations_pass_on_are_summed() -> None:
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    model = nn.Sequential(Twice())
    with record(model) as recording:
        (model(x).sum() + 100 * x.sum()).backward()
    assert torch.allclose(only(recording["0"]).grad_inputs[0], 2 * x.detach() + x.detach().cos(), rtol=1e-12)


class Two(nn.Module):
    """Several inputs, one by keyword; several outputs, one of which nobody uses."""

    def forward(self, x: Tensor, more: dict[str, Tensor], *, gate: Tensor) -> dict[str, Any]:
        return {"sum": x + more["y"] * gate, "unused": x * 2, "note": "text", "none": None}


class Holder(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
        found: Tensor = self.layer(x, {"y": y}, gate=gate)["sum"]
        return found


def test_nested_arguments_and_results_are_recorded_as_they_are() -> None:
    x, y, gate = (torch.randn(3, requires_grad=each) for each in (True, True, False))
    model = Holder(Two())
    with record(model) as recording:
        model(x, y, gate).sum().backward()
    call = only(recording["layer"])
    assert call.inputs is not None
    assert call.kwargs is not None
    assert torch.equal(call.inputs[0], x)
    assert torch.equal(call.inputs[1]["y"], y)
    assert torch.equal(call.kwargs["gate"], gate)
    assert torch.equal(call.output["sum"], x + y * gate)
    assert call.output["note"] == "text"
    assert call.output["none"] is None
    assert torch.equal(call.grad_inputs[0], torch.ones(3))
    assert torch.equal(call.grad_inputs[1], gate)
    assert call.grad_inputs[2] is None
    assert torch.equal(call.grad_outputs[0], torch.ones(3))
    assert call.grad_outputs[1] is None


def test_flat_parts_stand_beside_their_gradients() -> None:
    x, y, gate = (torch.randn(3, requires_grad=each) for each in (True, True, False))
    model = Holder(Two())
    with record(model, keep=lambda tensor: (tuple(tensor.shape), float(tensor.detach().sum()))) as recording:
        model(x, y, gate).sum().backward()
        model.layer(x, {"y": y}, gate=gate)
    call = recording["layer"][0]
    shape = (3,)
    assert call.flat_inputs == tuple((shape, float(each.detach().sum())) for each in (x, y, gate))
    assert len(call.flat_inputs) == len(call.grad_inputs)
    assert [each[0] for each in call.outputs] == [(3,)] * len(call.grad_outputs)
    assert call.outputs[0] == call.output["sum"]
    with record(model, parts=("grad_outputs",)) as recording:
        model(x, y, gate)
    assert recording["layer"][0].outputs == recording["layer"][0].flat_inputs == ()


class Halves(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # PyTorch before 2.14 makes two views of `x[:, :4]`, one per axis.
        return x.narrow(1, 0, 4), x.narrow(1, 4, 4)


class Lower(nn.Module):
    def __init__(self, view: nn.Module, change: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.first, self.view, self.change = nn.Linear(4, 8), view, change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.view(self.first(x)))


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.t()


@pytest.mark.parametrize(
    ("view", "in_place", "beside"),
    [
        (Halves(), lambda y: y[0].mul_(2) * y[1].add_(1), lambda y: (y[0] * 2) * (y[1] + 1)),
        (Transposed(), lambda y: y.mul_(2).square(), lambda y: (y * 2).square()),
        (nn.Unflatten(1, (4, 2)), lambda y: y.mul_(2).square(), lambda y: (y * 2).square()),
    ],
)
def test_views_that_are_overwritten_afterwards_have_the_gradients_of_copies(
    view: nn.Module, in_place: Callable[[Any], Tensor], beside: Callable[[Any], Tensor]
) -> None:
    model, x = Lower(view, in_place), torch.randn(3, 4)
    with record(model) as recording:
        model(x).sum().backward()
    found = recording["view"][0]
    model.change = beside
    with record(model) as recording:
        model(x).sum().backward()
    expected = recording["view"][0]
    for part in ("grad_inputs", "grad_outputs"):
        for one, other in zip(getattr(found, part), getattr(expected, part), strict=True):
            torch.testing.assert_close(one, other)


def test_a_layer_that_works_in_place_on_what_an_identity_gave_has_its_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Hardswish(inplace=True), nn.Linear(4, 1))
    x = torch.randn(3, 4)
    with record(model) as recording:
        model(x).sum().backward()
    found = list(recording)
    model[2] = nn.Hardswish()
    with record(model) as recording:
        model(x).sum().backward()
    for call, expected in zip(found, recording, strict=True):
        for part in ("grad_inputs", "grad_outputs"):
            for one, other in zip(getattr(call, part), getattr(expected, part), strict=True):
                assert (one is None) == (other is None)
                assert one is None or torch.equal(one, other)


def test_a_layer_that_works_in_place_on_a_slice_has_the_gradient_of_the_slice() -> None:
    class Slices(nn.Module):
        def __init__(self, act: nn.Module) -> None:
            super().__init__()
            self.act = act

        def forward(self, x: Tensor) -> Tensor:
            h = x * 2
            self.act(h.view(-1)[1:5])
            return h.square()

    model, x = Slices(nn.ReLU(inplace=True)), torch.randn(2, 3, requires_grad=True)
    with record(model, "act") as recording:
        model(x).sum().backward()
    piece = (x.detach() * 2).view(-1)[1:5]
    assert torch.equal(recording[0].grad_outputs[0], 2 * piece.clamp(min=0))
    assert torch.equal(recording[0].grad_inputs[0], 2 * piece.clamp(min=0))


class Pair(NamedTuple):
    left: Tensor
    right: Any


@dataclass
class Bundle:
    value: Tensor
    rest: list[Tensor]


@pytest.mark.parametrize(
    "pack",
    [
        lambda t: Pair(t, None),
        lambda t: Bundle(t, [t * 2]),
        lambda t: OrderedDict(a=t),
        lambda t: [t, (t,)],
        lambda t: None,
        lambda t: 3,
    ],
)
def test_containers_keep_their_type(pack: Callable[[Tensor], Any]) -> None:
    x = torch.randn(2, requires_grad=True)
    layer = OwnForward(lambda model, x: pack(x))
    with record(layer, keep="cpu") as recording:
        returned = layer(x)
    assert type(returned) is type(pack(x))
    assert type(only(recording[""]).output) is type(pack(x))


def test_a_module_called_n_times_has_n_calls_in_order() -> None:
    model = Reused()
    with record(model, "act") as recording:
        model(torch.randn(1, 3, 8, 8))
    assert [call.index for call in recording["act"]] == [0, 1, 2]
    assert [tuple(call.output.shape) for call in recording] == [(1, 4, 8, 8)] * 3
    assert recording[0].inputs is not None
    assert torch.equal(recording[0].output, recording[0].inputs[0].clamp(min=0))


def test_calls_stand_in_the_order_in_which_they_began() -> None:
    model = torchvision_models().resnet18()
    with record(model, keep="statistics", parts=("outputs",)) as recording, torch.no_grad():
        model.eval()(torch.randn(1, 3, 32, 32))
    begun = recording.layers
    assert begun[:6] == ("conv1", "bn1", "relu", "maxpool", "layer1", "layer1.0")
    assert begun.index("layer4") < begun.index("layer4.0.conv1")


def test_a_gradient_to_an_inner_tensor_brings_what_came_that_far() -> None:
    model = Reused()
    x = torch.randn(1, 3, 8, 8)
    with record(model) as recording:
        out = model(x).sum()
        (gradient,) = torch.autograd.grad(out, [model.head.weight])
    assert only(recording["head"]).grad_outputs != ()
    assert len(only(recording["conv"]).backwards) == 0
    assert gradient.shape == model.head.weight.shape


def test_a_checkpointed_layer_is_recorded_once_and_with_its_gradient() -> None:
    model = Checkpointed(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    x = torch.randn(2, 4, requires_grad=True)
    with record(model) as recording:
        model(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(only(recording["inner.0"]).grad_inputs[0], x.grad)
    assert len(recording) == 3


# What is kept.


def test_statistics_keep_no_tensor_and_say_what_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 300), nn.ReLU())
    with record(model, keep="statistics") as recording:
        out = model(torch.randn(50, 4))
        out.sum().backward()
    kept = only(recording["1"]).output
    assert isinstance(kept, TensorStatistics)
    assert kept.shape == (50, 300)
    assert kept.moments.zeros == int((out == 0).sum())
    assert kept.moments.max == float(out.detach().max())
    assert kept.moments.mean == pytest.approx(float(out.detach().double().mean()), rel=1e-5)
    assert kept.moments.std == pytest.approx(float(out.detach().double().std(correction=0)), rel=1e-5)
    died = weakref.ref(out)
    del out
    assert died() is None
    assert "mean" in repr(kept)


def test_a_full_copy_is_a_part_of_the_graph_and_a_copy_on_the_cpu_is_not() -> None:
    linear = nn.Linear(4, 3)
    model = nn.Sequential(linear, nn.ReLU(inplace=True))
    x = torch.randn(2, 4)
    with record(model) as full, record(model, keep="cpu") as detached:
        model(x)
    assert torch.equal(only(full["0"]).output, linear(x))
    assert not torch.equal(only(full["0"]).output, only(full["1"]).output)
    (gradient,) = torch.autograd.grad(only(full["0"]).output.sum(), linear.bias)
    assert torch.equal(gradient, torch.full((3,), 2.0))
    assert not only(detached["0"]).output.requires_grad


def test_what_flows_from_one_layer_to_the_next_is_kept_once() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    with record(model) as recording:
        model(torch.randn(2, 4))
    first, second = only(recording["0"]), only(recording["1"])
    assert second.inputs is not None
    assert first.output is second.inputs[0]


def test_a_function_decides_what_is_kept() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    with record(model, keep=lambda tensor: tuple(tensor.shape), parts=("outputs", "grad_outputs")) as recording:
        model(torch.randn(2, 4)).sum().backward()
    assert [call.output for call in recording] == [(2, 3), (2, 3)]
    assert [call.grad_outputs for call in recording] == [((2, 3),)] * 2
    assert [call.inputs for call in recording] == [None, None]


@pytest.mark.slow
def test_gradients_die_with_their_graph_though_the_block_goes_on() -> None:
    model = nn.Sequential(nn.Linear(4, 3), Twice(), nn.ReLU(inplace=True))
    gc.collect()
    gc.disable()
    try:
        with record(model, keep="statistics") as recording:
            saved = []
            for _ in range(3):
                inner = model[0](torch.randn(2, 4))
                saved.append(weakref.ref(inner))
                out = model[2](model[1](inner)).sum()
                out.backward(retain_graph=True)
                del inner, out
            assert [each() for each in saved] == [None] * 3
    finally:
        gc.enable()
    assert len(recording["2"]) == 3


# Nothing stays.


@pytest.fixture(params=["eval", "train"])
def network(request: pytest.FixtureRequest) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 5),
    )
    return model.train(request.param == "train")


def test_nothing_is_left_on_the_model_nor_on_a_graph_that_lives_on(network: nn.Module) -> None:
    network.eval()
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    before = Snapshot(model=network, x=x)
    with record(network) as recording:
        out = network(x).sum()
    assert before.changes() == []
    out.backward()
    assert all(len(call.backwards) == 0 for call in recording)


@pytest.mark.parametrize("raised", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_the_block_or_in_a_layer_leaves_nothing(
    network: nn.Sequential, raised: type[BaseException]
) -> None:
    network.append(Raises(raised("no"))).eval()
    x = torch.randn(1, 3, 8, 8)
    before = Snapshot(model=network)
    recording = record(network)
    with pytest.raises(raised), recording:
        network(x)
    assert before.changes() == []
    assert recording.layers == ("0", "1", "2", "3", "4", "5")


def test_another_thread_is_not_recorded_and_computes_the_same(network: nn.Module) -> None:
    network.eval()
    x = torch.randn(2, 3, 8, 8)
    expected = network(x)
    found: list[Tensor] = []
    with record(network) as recording:
        thread = threading.Thread(target=lambda: found.append(network(x)))
        thread.start()
        thread.join()
    assert torch.equal(found[0], expected)
    assert len(recording) == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_forward_is_recorded(network: nn.Module, mode: Callable[[], Any]) -> None:
    with mode(), record(network.eval()) as recording:
        out = network(torch.randn(2, 3, 8, 8))
    assert torch.equal(only(recording["5"]).output, out)
    assert only(recording["5"]).grad_outputs == ()


def test_an_explanation_inside_is_recorded_without_the_search_for_its_layer() -> None:
    model, x = PooledNet(), torch.randn(1, 3, 8, 8)
    expected = GradCAM(model).attribute(x, 2)
    fresh = copy.deepcopy(model)
    with record(fresh) as recording:
        found = GradCAM(fresh).attribute(x, 2)
    assert torch.equal(found.values, expected.values)
    assert len(recording["features.0"]) == 1
    assert only(recording["features.0"]).inputs is not None
    assert torch.equal(recording["features.0"][0].inputs[0], x)  # type: ignore[index]
    gradient = only(recording["features"]).grad_outputs[0]
    assert torch.allclose(gradient, model.head.weight[2].view(1, 8, 1, 1).expand(1, 8, 6, 6) / 36)


def test_recordings_stand_inside_each_other_and_go_on_where_they_stopped() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    outer = record(model)
    with outer:
        with record(model) as inner:
            model(torch.ones(1, 2))
        model(torch.ones(1, 2))
    with outer:
        model(torch.ones(1, 2))
    assert (len(outer), len(inner)) == (3, 1)
    assert [call.index for call in outer] == [0, 1, 2]


def test_a_compiled_model_is_recorded_as_it_is_written() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(4, 2)
    compiled(x)
    with record(compiled) as recording:  # type: ignore[arg-type]
        compiled(x)
    assert recording.layers == ("0", "1")


# Which layers, and what cannot be.


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        ("*", ["a", "a.conv", "a.act", "b"]),
        ("a.*", ["a.conv", "a.act"]),
        (["b", "a.act"], ["a.act", "b"]),
        (nn.Conv2d, ["a.conv", "b"]),
        ("?", ["a", "b"]),
    ],
)
def test_layers_are_chosen_by_name_pattern_and_class(layers: Any, names: list[str]) -> None:
    block = nn.Sequential(OrderedDict(conv=nn.Conv2d(3, 3, 1), act=nn.ReLU()))
    model = nn.Sequential(OrderedDict(a=block, b=nn.Conv2d(3, 3, 1)))
    with record(model, layers) as recording:
        model(torch.randn(1, 3, 4, 4))
    assert list(recording.layers) == names
    assert recording[block] == recording["a"] if "a" in names else True


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"layers": "headd"}, LayerError, 'no layer "headd" in Reused; the closest are head'),
        ({"layers": "layer?.*"}, LayerError, 'no layer of Reused matches "layer\\?'),
        ({"layers": nn.LSTM}, LayerError, "no LSTM in Reused; its layers are Conv2d, Identity, Linear, ReLU"),
        ({"layers": []}, LayerError, "no layer was given"),
        ({"keep": "statistic"}, MethodError, "keep='statistic' is not one of .* did you mean \"statistics\""),
        ({"parts": ("grad_output",)}, MethodError, 'grad_output.* is not one of .* did you mean "grad_outputs"'),
        ({"parts": "inputs"}, MethodError, "parts=.* is not one of .*inputs"),
    ],
)
def test_what_cannot_be_recorded_is_said_before_anything_runs(options: Any, error: Any, message: str) -> None:
    model = Reused()
    before = Snapshot(model=model)
    with pytest.raises(error, match=message):
        record(model, **options)
    assert before.changes() == []


def test_layers_inside_torchscript_are_refused_rather_than_silent() -> None:
    trace: Any = torch.jit.trace
    model = nn.Sequential(trace(nn.Sequential(nn.Linear(3, 3)), torch.randn(1, 3)), nn.ReLU())
    with pytest.raises(NotApplicableError, match=r"TorchScript"):
        record(model, "0.0")
    with record(model) as recording:
        model(torch.randn(1, 3))
    assert recording.layers == ("0", "1")


class _HalfInPlace(nn.Module):
    """The left half of its input goes through a module in place, past a view of what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.act(h[:, :2])
        out: Tensor = self.last(h)
        return out


def test_calls_can_be_gone_through_while_more_come() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with record(model) as recording:
        model(torch.ones(1, 2))
        names = []
        for call in recording:
            names.append(call.layer)
            model(torch.ones(1, 2))
    assert names == ["0", "1"]
    assert len(recording) == 6


def test_calls_are_copied_and_pickled_with_their_gradients() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    with record(model, keep="cpu") as recording:
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    for copied in (pickle.loads(pickle.dumps(list(recording))), copy.deepcopy(list(recording))):
        assert [each.layer for each in copied] == ["0", "1"]
        for made, call in zip(copied, recording, strict=True):
            assert torch.equal(made.outputs[0], call.outputs[0])
            assert torch.equal(made.grad_inputs[0], call.grad_inputs[0])
            assert torch.equal(made.backwards[0].grad_outputs[0], call.grad_outputs[0])


def test_a_layer_that_is_not_recorded_is_an_error_and_one_that_was_not_called_is_empty() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2)})
    with record(model) as recording:
        model["used"](torch.ones(1, 2))
    assert recording["idle"] == []
    with pytest.raises(LayerError, match='no layer "usd" among the 2 recorded layers; did you mean "used"'):
        recording["usd"]
    with pytest.raises(MethodError, match="already open"), recording, recording:
        pass
    assert isinstance(recording, Recording)
    assert "1 calls of 1 layers" in repr(recording)
    assert repr(recording[0]) == "ModuleCall(used: Linear, index=0, backwards=0)"


class Recursive(nn.Module):
    """A module that calls itself as often as it is told."""

    def forward(self, x: Tensor, times: int) -> Tensor:
        return self(x + 1, times - 1) if times else x * 2


def test_calls_of_a_module_by_itself_are_numbered_as_they_began() -> None:
    model = Recursive()
    with record(model) as recording:
        model(torch.zeros(1), 2)
        model(torch.zeros(1), 0)
    assert [call.index for call in recording] == [0, 1, 2, 3]
    assert [float(call.inputs[0]) for call in recording if call.inputs] == [0, 1, 2, 0]


def test_a_scripted_model_is_refused_by_the_name_of_a_layer_too() -> None:
    script: Any = torch.jit.script
    scripted = script(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU())))
    for layer in ("0", "1.0"):
        with pytest.raises(NotApplicableError, match="scripted"):
            record(scripted, layer)


def test_statistics_are_pickled_and_copied_as_figures() -> None:
    with record(nn.ReLU(), keep="statistics") as recording:
        recording._modules[""](torch.randn(3, 4))
    (call,) = recording
    for again in (pickle.loads(pickle.dumps(call.output)), copy.deepcopy(call.output)):
        assert again.moments == call.output.moments
        assert (again.shape, again.dtype, again.device) == ((3, 4), torch.float32, torch.device("cpu"))


def test_a_model_without_numbers_has_shapes_and_nothing_else() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU()).to("meta")
    with record(model, keep="statistics") as recording:
        model(torch.empty(4, 3, device="meta"))
    assert [call.output.shape for call in recording] == [(4, 2)] * 2
    assert all(call.output.moments.count == 0 for call in recording)


def _vmapped(model: nn.Module, x: Tensor) -> None:
    torch.vmap(torch.func.grad(lambda row: model(row).sum()))(x)


def _many_gradients(model: nn.Module, x: Tensor) -> None:
    torch.autograd.grad(model(x.requires_grad_()), x, torch.randn(5, 3, 1), is_grads_batched=True)


def _nested(model: nn.Module, x: Tensor) -> None:
    model(torch.nested.nested_tensor([x, x[:2]]))


def _quantised(model: nn.Module, x: Tensor) -> None:
    model[0](torch.quantize_per_tensor(x, 0.1, 0, torch.qint8))  # type: ignore[index]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:.*quantiz")
@pytest.mark.parametrize("run", [_vmapped, _many_gradients, _nested, _quantised])
@pytest.mark.parametrize("keep", ["full", "cpu", "statistics", Tensor.clone])
def test_tensors_without_plain_values_are_refused_with_the_cure(run: Callable[..., None], keep: Any) -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 1))
    with pytest.raises(NotApplicableError, match="cannot be recorded or measured"), record(model, keep=keep):
        run(model, torch.randn(3, 4))
