"""Captures hold the output of a layer regardless of later operations, and leave no hooks."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saliency import GradCAM, GuidedBackprop, GuidedGradCAM, HiResCAM
from saliency.attribution.forward import Needs, RecordedFrom, SharedForward, TargetGradients
from saliency.errors import LayerError, ModelError, TargetError
from saliency.hooks.manager import HookManager
from saliency.model.call import prepared_for_attribution
from tests.models import Checkpointed, OwnForward, Packed


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Cut(nn.Module):
    """A body, an operation of the subclass on its output, and a head."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 6, 3))
        self.head = nn.Linear(6, 4)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.between(self.body(x)).mean((2, 3)))
        return out


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class Unpacked(nn.Module):
    """A layer that returns a container, and a model that takes its tensor out of it."""

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.layer = Packed(pack, nn.Conv2d(3, 6, 3))
        self.unpack = unpack
        self.head = nn.Linear(6, 4)
        self.seen: list[type] = []

    def forward(self, x: Tensor) -> Tensor:
        packed = self.layer(x)
        self.seen.append(type(packed))
        out: Tensor = self.head(self.unpack(packed).relu().mean((2, 3)))
        return out


def hooks_of(model: nn.Module) -> list[int]:
    """How many hooks of each kind each module has."""
    return [
        len(each)
        for module in model.modules()
        for name, each in sorted(vars(module).items())
        if name.endswith("_hooks") and each is not None
    ]


# What is captured.


@pytest.mark.parametrize(
    "between",
    [torch.relu_, nn.ReLU(inplace=True), lambda t: t.mul_(2).add_(1), lambda t: F.dropout(t.sub_(0.1), 0.0)],
    ids=["relu_", "ReLU(inplace)", "mul_add_", "sub_"],
)
def test_an_in_place_operation_behind_the_layer_does_not_reach_the_capture(
    between: Callable[[Tensor], Tensor],
) -> None:
    model, x = Cut(between).double(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    plain = model.body(x)
    activation = plain.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model.head(between(activation.clone()).mean((2, 3)))[:, 1].sum(), activation)
    found = HiResCAM(model, "body").attribute(x, 1).values
    assert torch.allclose(found, (plain * gradient).sum(1, keepdim=True).detach(), rtol=1e-12, atol=1e-15)
    assert torch.equal(model(x)[:, 1], GradCAM(model, "body").attribute(x, 1).scores)


def test_a_capture_without_gradients_is_not_overwritten_in_place() -> None:
    model, x = Cut(torch.relu_), torch.randn(1, 3, 8, 8)
    with torch.no_grad(), HookManager() as hooks:
        captured = hooks.capture(model.body)
        model(x)
    assert torch.equal(captured[0], model.body(x))


def test_hooks_of_the_user_see_an_output_with_a_gradient() -> None:
    model, seen = Cut(), list[bool]()
    model.body.register_forward_hook(lambda module, inputs, output: seen.append(output.requires_grad))
    with torch.no_grad(), HookManager() as hooks:
        hooks.capture(model.body, record=True)
        model(torch.randn(1, 3, 8, 8))
    assert seen == [True]


def test_a_module_that_is_used_many_times_gives_one_entry_per_call_and_is_read_at_its_last_use() -> None:
    class Reused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.relu = nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(inplace=True)
            nn.init.uniform_(self.conv.weight, -0.1, 0.3)  # so that something is left after three ReLUs

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.relu(self.conv(x))
            return x.mean((2, 3))

    model, x = Reused().double(), torch.randn(1, 3, 6, 6, dtype=torch.float64)
    wanted = [model.conv(x).relu()]
    wanted += [model.conv(wanted[0]).relu()]
    wanted += [model.conv(wanted[1]).relu()]
    with HookManager() as hooks:
        captured = hooks.capture(model.relu)
        model(x)
    assert len(captured) == 3
    assert all(torch.equal(*pair) for pair in zip(captured, wanted, strict=True))
    found = GradCAM(model, "relu").attribute(x, 2).values
    assert all(each.any() for each in wanted), "maps of zeros could not be told apart"
    assert torch.allclose(found[:, 0], wanted[-1].detach()[:, 2] / 36, rtol=1e-12)


PACKS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda t: (t, None), lambda p: p[0]),
    "tuple with something in front": (lambda t: (None, t, t.sum()), lambda p: p[1]),
    "list": (lambda t: [t, t + 1], lambda p: p[0]),
    "named tuple": (lambda t: Pair(t, t + 1), lambda p: p.left),
    "dict": (lambda t: {"aux": 3, "out": t}, lambda p: p["out"]),
    "ordered dict": (lambda t: OrderedDict(out=t, aux=t.sum()), lambda p: p["out"]),
    "default dict": (lambda t: defaultdict(list, out=t), lambda p: p["out"]),
    "nested": (lambda t: ("maps", [None, t]), lambda p: p[1][1]),
    "what torch.max returns": (lambda t: t[..., None].max(-1), lambda p: p.values),
}


@pytest.mark.parametrize("name", PACKS)
def test_a_layer_that_returns_a_container_is_read_and_its_container_keeps_its_type(name: str) -> None:
    pack, unpack = PACKS[name]
    model, x = Unpacked(pack, unpack).double(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    activation = model.layer.inner(x).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model.head(activation.relu().mean((2, 3)))[:, 1].sum(), activation)
    wanted = (gradient * activation.detach()).sum(1, keepdim=True)
    model(x)
    found = HiResCAM(model, "layer").attribute(x, 1).values
    assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-15)
    assert len(set(model.seen)) == 1


def test_a_layer_without_a_tensor_in_its_output_is_an_error() -> None:
    model = Unpacked(lambda t: ("maps", lambda: t), lambda p: p[1]())
    with pytest.raises(LayerError, match="returned no tensor"):
        GradCAM(model, "layer").attribute(torch.randn(1, 3, 8, 8), 1)


def test_a_layer_of_whole_numbers_is_an_error() -> None:
    class Rounded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.round(x * 100).long()

    model = OwnForward(
        lambda model, x: (model.conv(x) + model.layer(x).sum()).mean((2, 3)), layer=Rounded(), conv=nn.Conv2d(3, 4, 3)
    )
    with pytest.raises(LayerError, match=r"torch\.int64"):
        GradCAM(model, "layer").attribute(torch.randn(1, 3, 8, 8), 1)


# Threads.


def test_another_thread_running_the_same_model_is_not_captured() -> None:
    model, x = Cut(), torch.randn(1, 3, 8, 8)
    seen_grad: list[bool] = []

    def elsewhere() -> None:
        with torch.no_grad():
            seen_grad.append(model(x + 1).requires_grad)

    with HookManager() as hooks:
        captured = hooks.capture(model.body, record=True)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert captured == []
        assert seen_grad == [False]
        with torch.no_grad():
            model(x)
    assert len(captured) == 1


def test_a_backward_pass_of_another_thread_is_not_observed() -> None:
    x, seen = torch.ones(2, requires_grad=True), list[Tensor]()

    def differentiate() -> None:
        torch.autograd.grad(x.sum(), x)

    with HookManager() as hooks:
        hooks.at_gradient(x, seen.append)
        thread = threading.Thread(target=differentiate)
        thread.start()
        thread.join()
        assert seen == []
        differentiate()
    assert len(seen) == 1


def test_a_forward_in_another_thread_during_a_call_changes_nothing() -> None:
    model, x = Cut().double(), torch.randn(1, 3, 8, 8, dtype=torch.float64)
    alone = GradCAM(model, "body").attribute(x, 1).values
    other = torch.randn(1, 3, 8, 8, dtype=torch.float64)

    def target(output: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: model(other))
        thread.start()
        thread.join()
        return output[:, 1]

    def busy(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=lambda: model(other))
            thread.start()
            thread.join()

    handle = model.body[0].register_forward_hook(busy)
    assert torch.equal(GradCAM(model, "body").attribute(x, target).values, alone)
    handle.remove()


# What stays.


def test_every_hook_is_gone_after_a_call_and_after_an_error() -> None:
    model, x = Cut(), torch.randn(1, 3, 8, 8)
    before = hooks_of(model)
    assert sum(before) == 0
    for method in (GradCAM(model), GradCAM(model, "body"), GuidedGradCAM(model, "body")):
        method.attribute(x, 1)
        with pytest.raises(TargetError):
            method.attribute(x, 400)
        with pytest.raises(ModelError, match="channels"):
            method.attribute(torch.randn(1, 7, 8, 8), 1)
        with pytest.raises(ZeroDivisionError):
            method.attribute(x, lambda output: 1 / 0)  # type: ignore[arg-type, return-value]
        assert hooks_of(model) == before

    def interrupted() -> None:
        with HookManager() as hooks:
            hooks.capture(model.body)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert hooks_of(model) == before


def test_the_hooks_of_a_graph_are_gone_after_a_guided_pass() -> None:
    """The same graph asked for its plain gradient after the guided one, as guided Grad-CAM does."""
    model, x = Cut(), torch.randn(1, 3, 8, 8, requires_grad=True)
    score = model(x)[:, 1].sum()
    (plain,) = torch.autograd.grad(score, x, retain_graph=True)
    with HookManager() as hooks:
        from saliency.hooks.rectifiers import find_nonlinearities

        hooks.rewrite((own.node, lambda grad_in, grad_out: grad_in * 0) for own in find_nonlinearities(score, x)[0])
        assert not torch.autograd.grad(score, x, retain_graph=True)[0].any()
    assert torch.equal(torch.autograd.grad(score, x)[0], plain)


def test_a_hook_of_the_users_that_changes_the_output_is_respected_and_left() -> None:
    model, x = Cut().double(), torch.randn(1, 3, 8, 8, dtype=torch.float64)
    plain = HiResCAM(model, "body").attribute(x, 1).values
    handle = model.body.register_forward_hook(lambda module, inputs, output: output * 2)
    first = model.body.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 0.5,))
    before = hooks_of(model)
    activation = (model.body(x)).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model.head(activation.relu().mean((2, 3)))[:, 1].sum(), activation)
    wanted = (activation.detach() * gradient).sum(1, keepdim=True)
    found = HiResCAM(model, "body").attribute(x, 1)
    assert torch.allclose(found.values, wanted, rtol=1e-12, atol=1e-15)
    assert not torch.allclose(found.values, plain)
    assert torch.equal(found.scores, model(x)[:, 1])
    assert hooks_of(model) == before
    handle.remove()
    first.remove()
    assert torch.equal(HiResCAM(model, "body").attribute(x, 1).values, plain)


def test_backward_hooks_of_the_users_do_not_change_the_map() -> None:
    model, x = Cut().double(), torch.randn(1, 3, 8, 8, dtype=torch.float64)
    plain = GradCAM(model, "body.0").attribute(x, 1).values
    handle = model.body.register_full_backward_hook(lambda module, grad_in, grad_out: None)
    with warnings.catch_warnings():
        # PyTorch tells the owner of such a hook where recording starts behind the module's input.
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        found = GradCAM(model, "body.0").attribute(x, 1).values
    assert torch.equal(found, plain)
    handle.remove()


# Recording starts at the layer.


def trace(model: nn.Module, x: Tensor, gradients: RecordedFrom) -> tuple[int, SharedForward]:
    """How many tensors the forward saved for its graph, and the forward."""
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(1)
        return tensor

    with prepared_for_attribution(model), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made = SharedForward(model, x, Needs(gradients, layers=("body",)))
    return len(saved), made


def test_recording_starts_at_the_layer() -> None:
    """The last layer of the body saves nothing more than a graph of the head needs."""
    model, x = Cut(), torch.randn(1, 3, 8, 8)
    activation = model.body(x).detach().requires_grad_()
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(1), lambda t: t):
        model.head(torch.relu(activation.clone()).mean((2, 3)))
    from_the_layer, made = trace(model, x, "layers")
    from_the_input, _ = trace(model, x, "input")
    nothing, plain = trace(model, x, "none")
    assert from_the_layer == len(saved)
    assert from_the_input > from_the_layer
    assert nothing == 0
    assert not plain.output.requires_grad
    used: tuple[Tensor | None, ...] = torch.autograd.grad(
        made.output.sum(), list(model.parameters()), allow_unused=True
    )
    names = [name for (name, _), each in zip(model.named_parameters(), used, strict=True) if each is not None]
    assert names == ["head.weight", "head.bias"]


def test_a_cam_records_nothing_in_front_of_its_layer() -> None:
    model, x = Cut(), torch.randn(1, 3, 8, 8)
    recorded: dict[str, bool] = {}
    for name in ("body.0", "body.1", "head"):
        module = model.get_submodule(name)
        module.register_forward_hook(lambda module, inputs, out, name=name: recorded.update({name: out.requires_grad}))
    GradCAM(model, "body").attribute(x, 1)
    assert recorded == {"body.0": False, "body.1": False, "head": True}


def test_recording_from_the_layer_gives_the_same_values_bit_for_bit() -> None:
    from saliency.attribution.questions import Questions
    from saliency.targets.question import Images

    model, x = Cut(nn.ReLU(inplace=True)), torch.randn(2, 3, 8, 8)
    found = {}
    for gradients in ("layers", "input"):
        with prepared_for_attribution(model):
            forward = SharedForward(model, x, Needs(gradients, layers=("body",)))
            grads = TargetGradients(forward, Questions([1, 2], Images(2)))
            found[gradients] = grads.scores, grads.activation("body"), grads.gradient("body")
    assert all(torch.equal(*pair) for pair in zip(found["layers"], found["input"], strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_callers_gradient_mode_is_as_it_was(mode: Callable[[], Any]) -> None:
    model, x = Cut(), torch.randn(1, 3, 8, 8)
    wanted = GradCAM(model, "body").attribute(x, 1).values
    with mode():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        found = GradCAM(model, "body").attribute(x, 1).values
        with pytest.raises(TargetError):
            GradCAM(model, "body").attribute(x, 400)
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
    assert torch.equal(found, wanted)
    assert torch.is_grad_enabled()


def test_a_model_that_keeps_its_own_part_off_the_graph_is_told_so() -> None:
    class Frozen(Cut):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                features = self.body(x)
                pooled = features.relu().mean((2, 3))
            out: Tensor = self.head(pooled)
            return out

    with pytest.raises(TargetError, match="detaches"):
        GradCAM(Frozen(), "body").attribute(torch.randn(1, 3, 8, 8), 1)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_layer_inside_a_checkpoint_is_read(frozen: bool) -> None:
    plain = Cut().double()
    model = Checkpointed(copy.deepcopy(plain)).requires_grad_(not frozen)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    for method in (GradCAM, HiResCAM, GuidedGradCAM):
        found = method(model, "inner.body").attribute(x, 1)
        assert torch.equal(found.values, method(plain, "body").attribute(x, 1).values)
    assert torch.equal(GuidedBackprop(model).attribute(x, 1).values, GuidedBackprop(plain).attribute(x, 1).values)


_DEEP = """
import threading
import torch
from torch import nn
import saliency
from saliency.inspection import edit_gradients, gradient_statistics, record

class Step(nn.Module):
    def forward(self, x):
        return torch.relu(x + 1e-6)

class Loop(nn.Module):  # without a module for each step
    def forward(self, x):
        for _ in range(1000):
            x = torch.relu(x + 1e-6)
        return x

def head():
    return nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()

convolution, *end = head()
loop = nn.Sequential(convolution, Loop(), *end).eval()
many = nn.Sequential(convolution, *[Step() for _ in range(1000)], *end).eval()
image = torch.rand(1, 3, 6, 6)

def edited(at):
    with edit_gradients(many, "*", lambda tensor: 1.0 * tensor, at=at):
        many(image.clone().requires_grad_()).sum().backward()

def recorded():
    with record(many, "*"):
        many(image.clone().requires_grad_()).sum().backward()

work = [
    *(method(loop).attribute for method in (saliency.GuidedBackprop, saliency.DeconvNet, saliency.RectGrad)),
    saliency.IntegratedGradients(loop, steps=2).attribute,
    saliency.FullGrad(loop).attribute,
]

def run():
    for attribute in work:
        attribute(image, 0)
    edited("input")
    edited("output")
    recorded()
    gradient_statistics(many, image, 0)
    print("done")

threading.stack_size(256 * 1024)
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


@pytest.mark.slow
def test_a_deep_graph_is_freed_within_a_small_stack() -> None:
    """PyTorch frees nodes that Python has seen within each other, and a segmentation fault ends the process."""
    done = subprocess.run([sys.executable, "-c", _DEEP], capture_output=True, text=True, check=False)  # noqa: S603
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
