"""Gradients and activations changed on their way."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saliency
from saliency import GuidedBackprop
from saliency.errors import LayerError, MethodError, NotApplicableError, SaliencyWarning
from saliency.inspection import edit_rules
from saliency.inspection.edit import edit_activations, edit_gradients
from saliency.testing import Snapshot
from tests.models import Argmax, Checkpointed, Fork, OwnForward, small_vgg, torchvision_models


class Plain(nn.Module):
    """No in-place operation, so that torch's own full backward hooks are an oracle."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.act = nn.ReLU()
        self.mid = nn.Conv2d(4, 4, 3, padding=1)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.conv(x))
        h = h + self.act(self.mid(h))
        out: Tensor = self.fc(F.relu(h).mean((2, 3)))
        return out


def images(n: int = 2, *, grad: bool = True) -> Tensor:
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(1)).requires_grad_(grad)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Those of the input and of the parameters, without a trace in `.grad`."""
    wanted = [x, *(each for each in model.parameters() if each.requires_grad)]
    out = model(x)
    out = out if isinstance(out, Tensor) else out[0]
    return list(torch.autograd.grad(out.square().sum(), wanted))


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def double(tensor: Tensor) -> Tensor:
    return tensor * 2


def scaled(factor: float) -> edit_rules.EditRule:
    return lambda tensor: tensor * factor


def zeroed(*channels: int) -> edit_rules.EditRule:
    return lambda maps: maps.index_fill(1, torch.tensor(channels), 0)


@contextmanager
def full_backward_hook(layer: nn.Module, rule: Callable[[Tensor], Tensor]) -> Iterator[None]:
    def hook(module: nn.Module, grad_inputs: Any, grad_outputs: Any) -> Any:
        return tuple(None if each is None else rule(each) for each in grad_inputs)

    handle = layer.register_full_backward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def test_a_chain_of_double_show_halve_show_is_seen_and_applied_in_order() -> None:
    v, model = torch.tensor([1.0, 2.0, 3.0], requires_grad=True), nn.Identity()
    seen: list[Tensor] = []
    chain: list[edit_rules.EditRule] = [double, seen.append, scaled(0.5), seen.append]
    with edit_gradients(model, model, chain) as editing:
        model(v).square().sum().backward()
    assert [each.tolist() for each in seen] == [[4, 8, 12], [2, 4, 6]]
    assert v.grad is not None
    assert v.grad.tolist() == [2, 4, 6]
    assert editing.edits == {"": 1}


def noisy(seed: int, shape: Sequence[int]) -> edit_rules.EditRule:
    noise = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return lambda tensor: tensor + noise


def test_parameters_and_tensors_take_a_chain_of_rules_until_the_block_ends() -> None:
    model, x, hidden = Plain(), images(), torch.ones(3, requires_grad=True)
    before, expected = Snapshot(model=model), gradients(model, x)
    plain = dict(zip(["x", *dict(model.named_parameters())], expected, strict=True))
    seen: list[Tensor] = []
    chain: list[edit_rules.EditRule] = [double, seen.append, scaled(0.5), noisy(7, (5,))]
    inner = hidden * 1
    with (
        edit_gradients(model, "fc.bias", chain) as bias,
        edit_gradients(model, [model.mid.weight, inner], double) as two,
    ):
        edited = dict(zip(plain, gradients(model, x), strict=True))
        (of_inner,) = torch.autograd.grad((inner * hidden).sum(), hidden)
    assert bias.edits == {"fc.bias": 1}
    assert two.edits == {"mid.weight": 1, "tensor 1": 1}
    assert torch.equal(seen[0], 2 * plain["fc.bias"])
    assert torch.equal(edited.pop("fc.bias"), noisy(7, (5,))(plain.pop("fc.bias")))  # type: ignore[arg-type]
    assert torch.equal(edited.pop("mid.weight"), 2 * plain.pop("mid.weight"))
    assert same(list(edited.values()), list(plain.values()))
    assert of_inner.tolist() == [3, 3, 3]  # 1 directly, and twice 1 through the edited tensor
    assert not before.changes()
    assert same(gradients(model, x), expected)


def test_the_edited_gradient_of_a_parameter_is_added_to_its_grad_as_by_register_hook() -> None:
    ours, x = Plain(), images(grad=False)
    theirs = copy.deepcopy(ours)
    for model in (ours, theirs):
        model(x).sum().backward()
    clip = edit_rules.clip_norm(0.01)
    weights = [own for name, own in theirs.named_parameters() if name.endswith("weight")]
    handles = [own.register_hook(clip) for own in weights]  # type: ignore[no-untyped-call]
    theirs(x).square().sum().backward()
    with edit_gradients(ours, "*.weight", clip) as editing:
        ours(x).square().sum().backward()
    for handle in handles:
        handle.remove()
    assert editing.edits == {"conv.weight": 1, "mid.weight": 1, "fc.weight": 1}
    for model in (ours, theirs):
        model(x).sum().backward()
    assert same([own.grad for own in ours.parameters()], [own.grad for own in theirs.parameters()])  # type: ignore[misc]


def test_a_pattern_that_matches_layers_selects_no_parameters() -> None:
    model = Plain()
    with edit_gradients(model, ["f*", "mid.b*"], double) as editing:
        gradients(model, images())
    assert editing.edits == {"fc": 1, "mid.bias": 1}


def test_a_tied_parameter_has_each_of_its_names_and_is_edited_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    with edit_gradients(model, ["1.weight", "0.weight"], double) as editing:
        model(torch.randn(1, 3)).sum().backward()
    assert editing.edits == {"1.weight": 1}


def test_nested_blocks_compose_in_the_order_in_which_they_were_opened() -> None:
    v, model = torch.tensor([1.0, 2.0, 3.0], requires_grad=True), nn.Identity()
    with edit_gradients(model, model, lambda g: g + 1), edit_gradients(model, model, scaled(10)):
        (got,) = torch.autograd.grad((model(v) ** 2).sum(), v)
    assert got.tolist() == [30, 50, 70]


class Outputs(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        if self.kind == "fresh":
            return x * 3
        if self.kind == "itself":
            return x
        if self.kind == "view":
            return x.flatten(1)
        y = x * 3
        return (y, {"doubled": y * 2}) if self.kind == "several" else y.clone().relu_()


@pytest.mark.parametrize("kind", ["fresh", "itself", "view", "several", "in place"])
@pytest.mark.parametrize("at", ["input", "output"])
def test_nested_blocks_compose_in_order_at_layers_of_every_kind(kind: str, at: Any) -> None:
    layer = nn.Sequential(Outputs(kind))
    x = torch.tensor([[1.0, 2.0]], requires_grad=True)
    order: list[str] = []

    def step(name: str, factor: float) -> Callable[[Tensor], Tensor]:
        def rule(gradient: Tensor) -> Tensor:
            order.append(name)
            return gradient * factor + 1

        return rule

    with edit_gradients(layer, "0", step("a", 2), at=at), edit_gradients(layer, "0", step("b", 5), at=at):
        out = layer(x)
        (out[0] if kind == "several" else out).sum().backward()
    assert order == ["a", "b"]
    slope = 1 if kind in ("itself", "view") else 3
    arriving = 1 if at == "output" else slope
    edited = (arriving * 2 + 1) * 5 + 1
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((1, 2), float(edited * (slope if at == "output" else 1))))


@pytest.mark.parametrize("layer", ["conv", "mid", "act", "fc"])
def test_at_the_input_an_edit_is_what_a_full_backward_hook_returns(layer: str) -> None:
    model, x = Plain(), images()
    with full_backward_hook(model.get_submodule(layer), lambda g: g * 3):
        expected = gradients(model, x)
    with edit_gradients(model, layer, scaled(3)) as editing:
        edited = gradients(model, x)
    assert same(edited, expected)
    assert not same(expected, gradients(model, x))
    assert editing.edits == {layer: 2 if layer == "act" else 1}


def test_at_the_output_the_parameters_get_what_the_rule_makes_of_the_gradient() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3, requires_grad=True)
    hidden = model[0](x)
    hidden.register_hook(lambda g: g.clamp(-0.1, 0.1))
    expected = torch.autograd.grad(model[2](model[1](hidden)).square().sum(), [x, *model.parameters()])
    with edit_gradients(model, model[0], lambda gradient: gradient.clamp(-0.1, 0.1), at="output"):
        edited = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    assert same(list(edited), list(expected))


class _Halved(torch.autograd.Function):
    """By hand: nothing on the way forth, a half on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 0.5


def test_in_front_of_an_in_place_module_an_edit_is_a_function_written_by_hand() -> None:
    conv, relu, head = nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 1, 3)
    model, x = nn.Sequential(conv, relu, head), images()
    expected = torch.autograd.grad(head(relu(_Halved.apply(conv(x)))).square().sum(), [x, *model.parameters()])
    with edit_gradients(model, relu, scaled(0.5)):
        edited = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    assert same(list(edited), list(expected))


def test_ones_in_place_of_the_gradient_entering_a_linear_layer_are_ones_at_its_input() -> None:
    layer, x = nn.Linear(4, 3), torch.randn(6, 4, requires_grad=True)
    weight, bias = torch.autograd.grad(layer(x).square().sum(), [layer.weight, layer.bias])
    with edit_gradients(layer, layer, torch.ones_like):
        got = torch.autograd.grad(layer(x).square().sum(), [x, layer.weight, layer.bias])
    assert same(list(got), [torch.ones(6, 4), weight, bias])


@pytest.mark.parametrize("at", ["input", "output"])
def test_the_second_backward_through_a_retained_graph_doubles_the_edited_gradient(at: Any) -> None:
    model, x = Plain(), images()
    with edit_gradients(model, ["mid", "fc"], scaled(3), at=at) as editing:
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        once = [each.grad.clone() for each in (x, *model.parameters()) if each.grad is not None]
        loss.backward()
    twice = [each.grad for each in (x, *model.parameters()) if each.grad is not None]
    assert same(twice, [each * 2 for each in once])
    assert editing.edits == {"mid": 2, "fc": 2}


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": lambda: torchvision_models().resnet18(weights=None),
    "densenet121": lambda: torchvision_models().densenet121(weights=None),
    "mobilenet_v2": lambda: torchvision_models().mobilenet_v2(weights=None),
    "googlenet": lambda: torchvision_models().googlenet(weights=None, init_weights=False, aux_logits=False),
    "vgg11": small_vgg,
    "shufflenet": lambda: torchvision_models().shufflenet_v2_x0_5(weights=None),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.slow
def test_scaling_every_layer_by_one_is_bit_for_bit_no_edit(name: str) -> None:
    model = NETWORKS[name]().eval()
    x = torch.randn(2, 3, 64, 64, requires_grad=True)
    expected = gradients(model, x)
    before = Snapshot(model=model)
    for at in ("input", "output"):
        with edit_gradients(model, "*", scaled(1), at=at) as editing:
            edited = gradients(model, x)
        assert same(edited, expected), at
        idle = {layer for layer, count in editing.edits.items() if not count}
        assert not any(isinstance(model.get_submodule(each), nn.ReLU | nn.ReLU6 | nn.Conv2d) for each in idle)
    with edit_activations(model, "*", scaled(1)):
        assert same(gradients(model, x), expected)
    assert not before.changes()


@pytest.mark.parametrize("name", ["densenet121", "mobilenet_v2", "googlenet"])
def test_a_zero_at_the_first_convolution_ends_the_gradient_in_networks_with_in_place_modules(name: str) -> None:
    model = NETWORKS[name]().eval()
    x = torch.randn(1, 3, 64, 64, requires_grad=True)
    first = next(layer for layer, module in model.named_modules() if isinstance(module, nn.ReLU | nn.ReLU6 | nn.Conv2d))
    assert gradients(model, x)[0].any()
    with edit_gradients(model, first, scaled(0)):
        edited = gradients(model, x)
    assert not edited[0].any()
    assert edited[1].any()  # the layer's own parameters do not notice


def test_only_the_layers_own_branch_is_edited() -> None:
    model = OwnForward(lambda model, x: x * 2 + model.branch(x) + x.sin(), branch=nn.Linear(3, 3))
    x = torch.randn(2, 3, requires_grad=True)
    with edit_gradients(model, "branch", scaled(0)):
        (got,) = torch.autograd.grad(model(x).sum(), x)
    assert torch.allclose(got, 2 + x.cos())


def test_a_layer_that_uses_its_input_several_times_is_edited_once_with_the_sum() -> None:
    a, b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    block = OwnForward(lambda model, x: model.a(x) + model.b(x) * 2 + x, a=a, b=b)
    x = torch.randn(4, 3, requires_grad=True)
    h = x * 1
    seen: list[Tensor] = []
    (expected,) = torch.autograd.grad(block(h).sum(), h)
    with edit_gradients(block, "", [seen.append, edit_rules.clip_norm(0.5)]) as editing:
        (got,) = torch.autograd.grad((block(h) + h * 7).sum(), x)
    assert editing.edits == {"": 1}
    assert torch.allclose(seen[0], expected)
    assert torch.allclose(got - 7, expected * 0.5 / expected.norm(), atol=1e-6)


def test_a_backward_pass_that_failed_midway_leaves_nothing_to_the_next() -> None:
    block = OwnForward(lambda model, x: model.first(x * 2) + x * 3 + x * 4, first=nn.Identity())
    x = torch.ones(2, requires_grad=True)
    failing = [True]

    def fail(gradient: Tensor) -> None:
        if failing.pop():
            raise ZeroDivisionError

    with edit_gradients(block, "", lambda g: g * 10), edit_gradients(block, "first", fail, at="output"):
        out = block(x).sum()
        with pytest.raises(ZeroDivisionError):
            torch.autograd.grad(out, x, retain_graph=True)
        failing.append(False)
        (got,) = torch.autograd.grad(out, x)
    assert got.tolist() == [90, 90]


def test_at_the_output_arrives_what_others_make_of_it_and_not_the_layer_itself() -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x * 1
            return y, y * 2

    model, x = nn.Sequential(Both()), torch.ones(1, requires_grad=True)
    with edit_gradients(model, "0", scaled(10), at="output") as editing:
        y, twice = model(x)
        (got,) = torch.autograd.grad(y + twice, x)
    assert got.item() == 10 * 1 + 10 * 2
    assert editing.edits == {"0": 2}


def test_a_partial_backward_pass_edits_what_comes_by() -> None:
    model, x = nn.Sequential(Fork()), torch.randn(4, requires_grad=True)
    with edit_gradients(model, "0", lambda g: g + 10):
        left, right = model(x)
        for part, slope in ((left, 2), (right, 3), (left + right, 5)):
            (got,) = torch.autograd.grad(part.sum(), x, retain_graph=True)
            assert torch.equal(got, torch.full((4,), slope + 10.0))


def test_each_call_of_a_module_that_is_called_several_times_is_edited() -> None:
    model = OwnForward(lambda model, x: model.act(model.act(x * 1) * 3), act=nn.ReLU(inplace=True))
    x = torch.ones(2, requires_grad=True)
    with edit_gradients(model, "act", scaled(10)) as editing:
        (got,) = torch.autograd.grad(model(x).sum(), x)
    assert got.tolist() == [300, 300]
    assert editing.edits == {"act": 2}


class Nested(nn.Module):
    """Several inputs, by place, by name and in a nest; several outputs; integers among both."""

    def forward(self, x: Tensor, pair: list[Tensor], *, index: Tensor, more: dict[str, Tensor]) -> Any:
        return {"sum": x + pair[0] * 2, "rest": (pair[1] * 3 + more["z"][index], index)}


@pytest.mark.parametrize("at", ["input", "output"])
def test_every_floating_tensor_with_a_gradient_is_edited_however_nested(at: Any) -> None:
    model = nn.ModuleDict({"inner": Nested()})
    x, a, b, z = (torch.ones(3, requires_grad=True) for _ in range(4))
    with edit_gradients(model, "inner", scaled(10), at=at) as editing:
        out = model["inner"](x, [a, b], index=torch.tensor([0, 1, 2]), more={"z": z})
        got = torch.autograd.grad(out["sum"].sum() + out["rest"][0].sum(), [x, a, b, z])
    assert [each[0].item() for each in got] == [10, 20, 30, 10]
    assert editing.edits == {"inner": 4 if at == "input" else 2}
    assert out["rest"][1].dtype == torch.int64


@pytest.mark.parametrize("at", ["input", "output"])
def test_a_layer_that_returns_its_input_is_edited_without_the_other_uses(at: Any) -> None:
    model = nn.Sequential(nn.Identity())
    x = torch.ones(3, requires_grad=True)
    h = x * 1
    with edit_gradients(model, "0", scaled(5), at=at):
        (got,) = torch.autograd.grad((model(h) * 2 + h).sum(), x)
    assert got.tolist() == [11, 11, 11]


@pytest.mark.parametrize("at", ["input", "output"])
@pytest.mark.parametrize("layer", ["0", "1"])
def test_views_that_an_in_place_module_overwrites_are_edited(at: Any, layer: str) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Identity(), nn.Sequential(nn.Tanh()))
    x = torch.ones(2, 3, 1, requires_grad=True)
    with edit_gradients(model, layer, scaled(5), at=at) as editing:
        h = model[1](model[0](x * 1))
        (got,) = torch.autograd.grad(h.mul_(3).sum(), x)
    assert torch.equal(got, torch.full_like(got, 15))
    assert editing.edits == {layer: 1}


def test_a_gradient_at_a_view_that_the_layer_itself_overwrites_is_refused_with_the_cure() -> None:
    model = nn.Sequential(nn.Flatten(), nn.ReLU(inplace=True))
    x = torch.ones(2, 3, 1, requires_grad=True)
    with (
        pytest.raises(NotApplicableError, match="view of another tensor"),
        edit_gradients(model, "1", scaled(5)),
    ):
        model(x * 1)
    with edit_gradients(model, "1", scaled(5), at="output"):
        (got,) = torch.autograd.grad(model(x * 1).sum(), x)
    assert torch.equal(got, torch.full_like(got, 5))


def test_a_rule_that_works_in_place_harms_nobody() -> None:
    model, x = Plain(), images()
    expected = gradients(model, x)
    kept: list[Tensor] = []

    def wild(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor.mul_(1)

    def forgetful(tensor: Tensor) -> None:
        tensor.zero_()

    with edit_gradients(model, ["conv", "mid", "fc"], wild):
        assert same(gradients(model, x), expected)
    for each in kept:
        each.zero_()
    with edit_activations(model, ["conv", "act"], wild):
        assert same(gradients(model, x), expected)
    with (
        pytest.warns(SaliencyWarning, match="forgetful changed its copy"),
        edit_gradients(model, "mid", forgetful),
    ):
        assert same(gradients(model, x), expected)


def test_a_tensor_that_a_rule_keeps_is_not_overwritten_by_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    fixed = torch.tensor([[-1.0, 1.0]])
    with edit_activations(model, "0", lambda h: fixed):
        assert model(torch.zeros(1, 2)).tolist() == [[0, 1]]
    assert fixed.tolist() == [[-1, 1]]


@pytest.mark.parametrize(
    ("made", "came"),
    [
        (lambda g: g[:1], r"float32 of shape \(1, 4\)"),
        (lambda g: g.double(), "float64"),
        (lambda g: g.to("meta"), r"float32 of shape \(2, 4\) on meta"),
        (lambda g: 3.0, "float for"),
    ],
)
def test_a_rule_that_returns_something_else_is_an_error_that_names_rule_and_layer(made: Any, came: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4, requires_grad=True)
    with (
        pytest.raises(MethodError, match=rf'the rule <lambda> returned {came}.*layer "0".*float32 of shape \(2, 4\)'),
        edit_gradients(model, "0", made),
    ):
        model(x).sum().backward()
    with pytest.raises(MethodError, match=rf'returned {came}.*output of layer "0"'), edit_activations(model, "0", made):
        model(x)


def test_what_cannot_be_edited_is_refused_with_the_reason() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
    index = torch.tensor([1, 2])
    with (
        pytest.raises(NotApplicableError, match="no floating-point tensor among its arguments"),
        edit_gradients(model, "0", double),
    ):
        model(index)
    model[0].requires_grad_(False)
    with pytest.raises(NotApplicableError, match="among its arguments requires"), edit_gradients(model, "1", double):
        model(index)
    with (
        pytest.raises(NotApplicableError, match="no gradient at its output"),
        edit_gradients(model, "0", double, at="output"),
    ):
        model(index)

    whole = nn.Sequential(nn.Linear(3, 2), Argmax())
    with (
        pytest.raises(NotApplicableError, match="no gradient at its output"),
        edit_gradients(whole, "1", double, at="output"),
    ):
        whole(torch.randn(1, 3))
    with pytest.raises(NotApplicableError, match="returns no floating-point"), edit_activations(whole, "1", double):
        whole(torch.randn(1, 3))
    whole[0].bias.requires_grad_(False)
    for wanted in ("0.bias", whole[0].bias):
        with (
            pytest.raises(NotApplicableError, match=r'"0.bias" cannot be edited: it requires no gradient; use req'),
            edit_gradients(whole, wanted, double),
        ):
            pass
    for parameter in whole.parameters():
        assert not parameter._backward_hooks


def test_wrong_arguments_are_refused_before_anything_runs() -> None:
    model = Plain()
    with pytest.raises(LayerError, match=r'no layer "fc.bias" in Plain'):
        edit_activations(model, "fc.bias", double)
    with pytest.raises(LayerError, match=r'no layer "fc.bais" in Plain'):
        edit_gradients(model, "fc.bais", double)
    with pytest.raises(LayerError, match="no layer"):
        edit_gradients(model, "nonsense*", double)
    with pytest.raises(LayerError, match="no target to edit was given"):
        edit_gradients(model, [], double)
    with pytest.raises(MethodError, match=r"lambda tensor: 0\.5"):
        edit_gradients(model, "fc", 0.5)  # type: ignore[arg-type]
    with pytest.raises(MethodError, match="at='middle' is not one of"):
        edit_gradients(model, "fc", double, at="middle")  # type: ignore[arg-type]
    with pytest.raises(MethodError, match="expected a name, a pattern"):
        edit_gradients(model, 3, double)  # type: ignore[arg-type]
    for tensor in (model.fc.bias, [model.fc.bias], torch.ones(())):
        with pytest.raises(MethodError, match="to edit its gradient, use edit_gradients"):
            edit_activations(model, tensor, double)  # type: ignore[arg-type]


def test_a_place_that_was_never_edited_is_told_at_the_end() -> None:
    model, unedited = Plain(), 'nothing was edited at layer "fc"'
    with pytest.warns(SaliencyWarning, match=unedited), edit_gradients(model, "fc", double):
        pass
    with pytest.warns(SaliencyWarning, match=unedited), edit_gradients(model, "fc", double) as off, torch.no_grad():
        model(images())
    assert off.edits == {"fc": 0}
    with pytest.warns(SaliencyWarning, match=f"{unedited}; run") as told, edit_gradients(model, "fc", double):
        loss = model(images()).sum()
    loss.backward()
    assert told[0].filename == __file__
    cut = nn.Sequential(Cut())
    with pytest.warns(SaliencyWarning, match='layer "0"'), edit_gradients(cut, "0", double):
        cut(images())


class Cut(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach() * 2


def test_after_the_block_nothing_is_edited_and_nothing_is_left() -> None:
    model, x = Plain(), images()
    expected = gradients(model, x)
    before = Snapshot(model=model)
    with edit_gradients(model, "*", double) as editing:
        graph = model(x).square().sum()
        gradients(model, x)
    assert editing.edits["mid"] == 1
    assert same(list(torch.autograd.grad(graph, [x, *model.parameters()])), expected)
    assert same(gradients(model, x), expected)
    with pytest.raises(ZeroDivisionError), edit_gradients(model, "*", lambda g: 1 / 0):  # type: ignore[arg-type, return-value]
        gradients(model, x)
    with pytest.raises(KeyError), edit_activations(model, "*", double):
        raise KeyError
    assert not before.changes()
    assert same(gradients(model, x), expected)
    for parameter in model.parameters():
        assert parameter._backward_hooks is None


def test_a_block_can_be_opened_again_but_not_inside_itself() -> None:
    model, x = Plain(), images()
    editing = edit_gradients(model, "mid", double)
    for count in (1, 2):
        with editing:
            gradients(model, x)
        assert editing.edits == {"mid": count}
    with editing:
        gradients(model, x)
        with pytest.raises(MethodError, match="already open"):
            editing.__enter__()


def test_another_thread_sees_no_edit() -> None:
    model, x = Plain(), images()
    expected = gradients(model, x)
    # The number of threads of PyTorch, which rounding depends on, is set per Python thread.
    other = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),))
    with (
        other,
        edit_gradients(model, "*", scaled(0)),
        edit_gradients(model, "*.weight", scaled(0)),
        edit_gradients(model, ["mid"], scaled(0), at="output"),
        edit_activations(model, "mid", scaled(0)),
    ):
        in_other = other.submit(gradients, model, images()).result()
        mine = gradients(model, x)
    assert same(in_other, expected)
    assert not same(mine, expected)


def test_edited_activations_are_explained() -> None:
    model, x = Plain().eval(), images(grad=False)
    with edit_activations(model, "conv", zeroed(1, 3)) as editing:
        explanation = saliency.HiResCAM(model, "conv").attribute(x, 2)
        with pytest.warns(saliency.errors.SaliencyWarning, match="sign"):
            eigen = saliency.EigenCAM(model, "conv").attribute(x, 2)
    edited = Plain().eval()
    edited.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in edited.conv.parameters():
            parameter[[1, 3]] = 0
    assert torch.equal(explanation.values, saliency.HiResCAM(edited, "conv").attribute(x, 2).values)
    with pytest.warns(saliency.errors.SaliencyWarning, match="sign"):
        assert torch.equal(eigen.values, saliency.EigenCAM(edited, "conv").attribute(x, 2).values)
    assert editing.edits["conv"] >= 2


def test_edited_gradients_are_those_of_an_explanation() -> None:
    model, x = Plain().eval(), images(grad=False)
    plain = saliency.VanillaGradient(model).attribute(x, 2).values
    cam = saliency.GradCAM(model, "conv").attribute(x, 2).values
    for at in ("input", "output"):
        with edit_gradients(model, "conv", scaled(2), at=at):
            assert torch.equal(saliency.VanillaGradient(model).attribute(x, 2).values, plain * 2)
    with edit_gradients(model, "conv", scaled(2), at="output"):
        assert torch.equal(saliency.GradCAM(model, "conv").attribute(x, 2).values, cam * 2)


def test_nested_edits_of_activations_compose_in_order_and_are_seen_by_users_hooks() -> None:
    model, seen = nn.Sequential(nn.Identity()), []
    handle = model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.item()))
    with edit_activations(model, "0", lambda h: h + 1), edit_activations(model, "0", [double, lambda h: h + 3]):
        assert model(torch.ones(1)).item() == 7
    handle.remove()
    assert seen == [7]


def test_activations_keep_their_nest_and_what_is_no_number() -> None:
    class Many(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"a": (x, [x * 2]), "index": torch.tensor([1]), "name": "b", "none": None}

    model = nn.Sequential(Many())
    with edit_activations(model, "0", scaled(10)) as editing, torch.inference_mode():
        out = model(torch.ones(1))
    assert (out["a"][0].item(), out["a"][1][0].item(), out["index"].item()) == (10, 20, 1)
    assert (out["name"], out["none"]) == ("b", None)
    assert editing.edits == {"0": 1}


def linear_and_tanh() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("layer", ["inner.1", "inner.2", "inner"])
@pytest.mark.parametrize("at", ["input", "output", "activation"])
def test_checkpointed_parts_are_edited_like_any_other(reentrant: bool, layer: str, at: Any) -> None:
    model, x = Checkpointed(linear_and_tanh(), reentrant=reentrant), torch.randn(2, 3, requires_grad=True)

    def edit() -> Any:
        if at == "activation":
            return edit_activations(model, layer, [lambda h: h.sin(), scaled(1.5)])
        return edit_gradients(model, layer, [lambda g: g + 1, scaled(1.5)], at=at)

    def run(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        for each in (x, *model.parameters()):
            each.grad = None
        with edit() as editing:
            call(x).square().sum().backward()  # type: ignore[no-untyped-call]
        assert editing.edits[layer] == 1
        return [each.grad.clone() for each in (x, *model.parameters()) if each.grad is not None]

    if not (reentrant and layer == "inner" and at == "activation"):
        assert same(run(lambda x: model(x * 1)), run(lambda x: model.inner(x * 1)))


def test_layers_inside_torchscript_are_refused_and_the_whole_is_edited() -> None:
    trace: Any = torch.jit.trace
    scripted = trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.randn(1, 3))
    model, x = nn.Sequential(scripted, nn.Linear(3, 1)), torch.randn(2, 3, requires_grad=True)
    for edit in (edit_gradients, edit_activations):
        with pytest.raises(NotApplicableError, match="inside a TorchScript module"):
            edit(model, "0.0", double)
    assert set(edit_gradients(model, "*", double).edits) == {"0", "1"}
    (plain,) = torch.autograd.grad(model(x).sum(), x)
    for at in ("input", "output"):
        with edit_gradients(model, "0", double, at=at):
            assert torch.equal(torch.autograd.grad(model(x).sum(), x)[0], plain * 2)


def test_the_rule_is_part_of_the_graph_of_a_second_derivative() -> None:
    x = torch.tensor([2.0], requires_grad=True)
    layer = nn.Sequential(nn.Identity())
    with edit_gradients(layer, "0", lambda g: g * g):
        (first,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert first.item() == 144  # (3 x^2)^2
    assert second.item() == 36 * 8  # 36 x^3


class Cube(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.pow(3)


@pytest.mark.parametrize("at", ["input", "output"])
def test_a_second_derivative_in_the_block_is_refused_rather_than_edited_twice(at: Any) -> None:
    x = torch.tensor([[2.0]], requires_grad=True)
    linear = nn.Linear(1, 1, bias=False)
    nn.init.constant_(linear.weight, 5)
    model = nn.Sequential(linear, Cube())
    with edit_gradients(model, "0", scaled(10), at=at) as editing:
        score = model(x).sum()
        for _ in range(2):  # two first derivatives of one graph are no second derivative
            (first,) = torch.autograd.grad(score, x, create_graph=True)
            assert first.item() == 15000  # 10 * 5 * 3 * (5 x)^2
        with pytest.raises(NotApplicableError, match="after the block"):
            torch.autograd.grad(first.sum(), x, retain_graph=True)
    assert editing.edits == {"0": 2}
    (second,) = torch.autograd.grad(first.sum(), x)
    assert second.item() == 15000  # 10 * 5 * 6 * (5 x) * 5


def test_a_long_block_keeps_no_graph_alive() -> None:
    model = Plain()
    alive: list[weakref.ref[Any]] = []
    with (
        edit_gradients(nn.Sequential(model), ["0", "0.*"], double),
        edit_gradients(model, ["mid", "act"], double, at="output"),
    ):
        for _ in range(3):
            x = images()
            out = model(x)
            out.sum().backward()
            alive.append(weakref.ref(x))
            del x, out
        gc.collect()
        assert [each() for each in alive] == [None] * 3


def test_without_inputs_that_require_a_gradient_a_pattern_passes_over_the_first_layer() -> None:
    model = Plain()
    with edit_gradients(model, nn.Conv2d, double) as editing:
        model(images(grad=False)).sum().backward()
    assert editing.edits == {"conv": 0, "mid": 1}


def test_a_compiled_model_is_edited() -> None:
    model = Plain()
    compiled = torch.compile(model, backend="eager")
    x = images()
    expected = gradients(model, x)[0]
    assert torch.allclose(gradients(compiled, x)[0], expected)  # type: ignore[arg-type]
    with edit_gradients(compiled, ["conv", "_orig_mod.fc"], double) as editing:  # type: ignore[arg-type]
        assert torch.equal(gradients(compiled, x)[0], expected * 4)  # type: ignore[arg-type]
    assert editing.edits == {"conv": 1, "fc": 1}


def test_rules_are_what_they_say() -> None:
    t = torch.tensor([[3.0, -4.0], [0.0, 0.5]])
    clipped = edit_rules.clip_norm(1)(t)
    assert clipped is not None
    assert math.isclose(clipped.norm().item(), 1, rel_tol=1e-6)
    assert torch.equal(edit_rules.clip_norm(100)(t), t)  # type: ignore[arg-type]
    assert torch.equal(edit_rules.clip_norm(0)(torch.zeros(3)), torch.zeros(3))  # type: ignore[arg-type]
    half = edit_rules.clip_norm(1)(torch.full((100_000,), 100.0, dtype=torch.float16))  # whose square overflows
    assert half is not None
    assert math.isclose(half.double().norm().item(), 1, rel_tol=1e-2)


def test_keeping_what_is_positive_at_each_relu_is_guided_backpropagation() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 2)).eval()
    x = images()
    with edit_gradients(model, nn.ReLU, lambda gradient: gradient.clamp(min=0)):
        (found,) = torch.autograd.grad(model(x)[:, 0].sum(), x)
    assert torch.equal(found, GuidedBackprop(model).attribute(x.detach(), 0).values)


def test_a_rule_that_pytorch_lacks_for_complex_tensors_is_an_error() -> None:
    z, model = torch.ones(2, dtype=torch.complex64, requires_grad=True), nn.Identity()
    clamp = edit_gradients(model, model, lambda gradient: gradient.clamp(-1, 1))
    with pytest.raises(RuntimeError, match="clamp"), clamp:
        torch.autograd.grad(model(z).abs().sum(), z)


@pytest.mark.parametrize("at", ["input", "output"])
def test_a_transformation_without_gradients_of_its_own_is_the_reason_given(at: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    with pytest.raises(NotApplicableError, match=r"torch\.func"), edit_gradients(model, "1", double, at=at):
        torch.vmap(model)(torch.randn(2, 3))


def test_a_layer_whose_gradient_cannot_be_followed_is_refused_with_the_reason() -> None:
    class Opaque(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return type("Box", (), {"value": x * 2})()

    x = torch.randn(2, 3, requires_grad=True)
    for layer, reason in (
        (Argmax(), "returns no floating-point tensor"),
        (Opaque(), "returns no floating-point tensor"),
    ):
        model = nn.Sequential(nn.Linear(3, 3), layer)
        refused = pytest.raises(NotApplicableError, match=f'layer "1" cannot be edited: it {reason}')
        with refused, edit_gradients(model, "1", double):
            model(x)


def test_many_gradients_in_one_backward_are_edited_as_each_alone_would_be() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 2))
    x, seeds = torch.randn(4, 3, requires_grad=True), torch.randn(5, 4, 2)
    for rule in (double, lambda gradient: gradient.clamp(-0.1, 0.1), edit_rules.clip_norm(0.2), zeroed(1)):
        for at in ("input", "output"):
            with edit_gradients(model, "1", rule, at=at):
                many = torch.autograd.grad(model(x), x, seeds, is_grads_batched=True)[0]
                alone = [torch.autograd.grad(model(x), x, seed)[0] for seed in seeds]
            assert torch.allclose(many, torch.stack(alone))


@pytest.mark.parametrize("attach", ["input", "output", "activation"])
@pytest.mark.parametrize("fresh", [True, False])
def test_a_tensor_that_is_returned_twice_stays_one_tensor_and_is_edited_once(attach: str, fresh: bool) -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = x.cos() if fresh else x
            return {"left": y, "right": y}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice = Twice()

        def forward(self, x: Tensor) -> Tensor:
            pair = self.twice(x * 2)
            pair["left"].add_(1)
            out: Tensor = pair["left"].sin() + pair["right"]
            return out

    def written_by_hand(x: Tensor, factor: float) -> Tensor:
        y = (x * 2).cos() if fresh else x * 2
        y = (y * factor if attach == "activation" else y) + 1
        return y.sin() + y

    net, x = Net(), torch.tensor([0.1, -0.4], requires_grad=True)
    edit: Any = (
        edit_activations(net, "twice", double)
        if attach == "activation"
        else edit_gradients(net, "twice", double, at=attach)  # type: ignore[arg-type]
    )
    with edit as editing:
        out = net(x)
        found = torch.autograd.grad(out.sum(), x)[0]
    plain = written_by_hand(x, 2)
    assert torch.equal(out, plain)
    assert torch.allclose(found, torch.autograd.grad(plain.sum(), x)[0] * (1 if attach == "activation" else 2))
    assert editing.edits == {"twice": 1}


def test_a_tensor_that_is_given_twice_is_edited_once_with_its_sum() -> None:
    class Product(nn.Module):
        def forward(self, left: Tensor, *, right: Tensor) -> Tensor:
            return left * right

    model, x = Product(), torch.tensor([2.0, 3.0], requires_grad=True)
    with edit_gradients(model, model, double) as editing:
        found = torch.autograd.grad(model(x, right=x).sum(), x)[0]
    assert found.tolist() == [8, 12]
    assert editing.edits == {"": 1}


def test_a_layer_that_returns_nothing_and_works_in_place_is_edited() -> None:
    class Shift(nn.Module):
        def forward(self, x: Tensor) -> None:
            x.mul_(3)

    model, x = Shift(), torch.tensor([2.0, 3.0], requires_grad=True)
    with edit_gradients(model, model, double) as editing:
        hidden = x * 1
        model(hidden)
        found = torch.autograd.grad(hidden.sum(), x)[0]
    assert found.tolist() == [6, 6]
    assert editing.edits == {"": 1}


def test_an_edit_that_is_lost_while_it_is_open_takes_its_hooks_along() -> None:
    model = nn.Linear(3, 2)
    editing = edit_gradients(model, model, double)
    editing.__enter__()
    assert model._forward_hooks
    del editing
    gc.collect()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_half_precision_is_clipped_though_its_squares_overflow() -> None:
    x, model = torch.ones(4, dtype=torch.float16, requires_grad=True), nn.Identity()
    with edit_gradients(model, model, edit_rules.clip_norm(100)):
        (found,) = torch.autograd.grad(model(x), x, torch.full((4,), 300, dtype=torch.float16))
    assert found.tolist() == [50, 50, 50, 50]


def test_a_row_in_place_of_an_activation_may_be_overwritten_by_what_follows() -> None:
    model, row = nn.Sequential(nn.Linear(3, 2), nn.ReLU(inplace=True)), torch.tensor([-1.0, 2.0])
    with edit_activations(model, "0", lambda output: row.expand_as(output)):
        assert model(torch.ones(2, 3)).tolist() == [[0, 2], [0, 2]]
    assert row.tolist() == [-1, 2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: edit_rules.clip_norm(-1), "finite number of at least 0"),
        (lambda: edit_rules.clip_norm(math.nan), "finite"),
    ],
)
def test_a_rule_with_wrong_arguments_is_an_error_that_says_so(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(MethodError, match=message):
        make()
