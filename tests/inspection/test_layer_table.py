"""The promises of the layer table: shapes, parameters and multiply-adds are exact, and the model stays as it was."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import saliency
from saliency.errors import LayerError, MethodError, ModelError, NotApplicableError
from saliency.hooks.manager import HookManager
from saliency.inspection.layers import LayerTable, MultiplyAdds, layer_table
from saliency.testing import Snapshot
from tests.commandline import COFFEE
from tests.models import OwnForward, small_vit, torchvision_models


class Sleep(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return x


def table(model: Any, example: Any, **options: Any) -> LayerTable:
    return layer_table(model, example, **{"times": False, **options})


def of_the_model(forward: Callable[..., Any], example: Any, **modules: nn.Module) -> int:
    return table(OwnForward(forward, **modules), example).model.multiply_adds


# The networks everyone knows -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_resnet50_on_ten_images_has_the_rows_that_its_paper_has() -> None:
    found = table(torchvision_models().resnet50(weights=None), (10, 3, 224, 224), depth=1)
    assert [(row.name, row.kind, row.output) for row in found] == [
        ("conv1", "Conv2d", (10, 64, 112, 112)),
        ("bn1", "BatchNorm2d", (10, 64, 112, 112)),
        ("relu", "ReLU", (10, 64, 112, 112)),
        ("maxpool", "MaxPool2d", (10, 64, 56, 56)),
        ("layer1", "Sequential", (10, 256, 56, 56)),
        ("layer2", "Sequential", (10, 512, 28, 28)),
        ("layer3", "Sequential", (10, 1024, 14, 14)),
        ("layer4", "Sequential", (10, 2048, 7, 7)),
        ("avgpool", "AdaptiveAvgPool2d", (10, 2048, 1, 1)),
        ("fc", "Linear", (10, 1000)),
    ]
    assert all(row.depth == row.calls == 1 for row in found)
    assert found.model.parameters == found.model.trainable == 25_557_032
    assert found.model.multiply_adds == 10 * 4_089_184_256
    assert sum(row.parameters for row in found) == 25_557_032
    assert sum(row.multiply_adds for row in found) == found.model.multiply_adds
    assert found["conv1"].multiply_adds == 10 * 112 * 112 * 64 * 3 * 7 * 7
    assert found["layer1"].parameters == 215_808
    assert "25,557,032 parameters, all trainable; 40.9 G multiply-adds (4.09 G for each of 10)" in found.notes


def test_the_rows_of_resnet50_are_its_tree_in_the_order_of_the_calls() -> None:
    model = torchvision_models().resnet50(weights=None)
    found = table(model, (1, 3, 64, 64))
    order: list[str] = []

    def begins(name: str) -> Callable[..., None]:
        return lambda args, kwargs: order.append(name)

    with HookManager() as hooks, torch.no_grad():
        for name, module in model.named_modules():
            hooks.around(module, begins(name), lambda token, output: None)
        model.eval()(torch.randn(1, 3, 64, 64))
    assert [row.name for row in found] == [name for name in dict.fromkeys(order) if name]
    assert all(row.depth == row.name.count(".") + 1 for row in found)
    assert found["layer1.0.relu"].calls == 3
    lines = str(found).splitlines()
    assert lines[8].startswith("layer1    ")
    assert lines[9].startswith("  layer1.0  ")
    assert lines[10].startswith("    layer1.0.conv1  ")


MODELS: dict[str, tuple[Callable[[], Any], int]] = {
    "resnet18": (lambda: torchvision_models().resnet18(weights=None), 64),
    "googlenet": (lambda: torchvision_models().googlenet(weights=None, init_weights=False), 64),
    "densenet121": (lambda: torchvision_models().densenet121(weights=None), 64),
    "swin_t": (lambda: torchvision_models().swin_t(weights=None), 64),
    "swin_v2_t": (lambda: torchvision_models().swin_v2_t(weights=None), 64),
    "vision transformer": (small_vit, 32),
    "efficientnet_lite0": (lambda: saliency.load("efficientnet_lite0"), 64),
    "timm vit": (lambda: saliency.load("timm/vit_tiny_patch16_224", weights=None), 224),
    "fcn": (lambda: torchvision_models().segmentation.fcn_resnet50(weights=None, weights_backbone=None), 64),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_multiply_adds_are_half_of_what_torch_counts_in_every_layer(name: str) -> None:
    make, size = MODELS[name]
    model, x = make().eval(), torch.randn(1, 3, size, size)
    counter = FlopCounterMode(display=False)
    # The counter of PyTorch 2.6 does not know the attention kernel for CPUs.
    with counter, sdpa_kernel(SDPBackend.MATH):
        model(x)
    flops = {path: sum(each.values()) for path, each in counter.get_flop_counts().items()}
    found = table(model, x)
    assert found.model.multiply_adds * 2 == counter.get_total_flops() > 0
    for row in found:
        assert row.multiply_adds * 2 == flops.get(f"{type(model).__name__}.{row.name}", 0), row.name


@pytest.mark.slow
def test_a_vision_transformer_as_large_as_in_its_paper() -> None:
    found = table(torchvision_models().vit_b_16(weights=None), (1, 3, 224, 224), depth=1)
    assert found.model.multiply_adds == 17_563_828_224
    assert found.model.parameters == 86_567_656


# Multiply-adds by hand -----------------------------------------------------------------------------------------


def test_the_convolutions() -> None:
    assert of_the_model(lambda m, x: m.c(x), (2, 6, 9, 9), c=nn.Conv2d(6, 4, 3, groups=2, bias=True)) == (
        2 * 4 * 7 * 7 * (6 // 2) * 3 * 3
    )
    assert of_the_model(lambda m, x: m.c(x), (6, 9, 9), c=nn.Conv2d(6, 4, 3, stride=2, padding=1)) == 4 * 5 * 5 * 6 * 9
    assert of_the_model(lambda m, x: m.c(x), (2, 4, 10), c=nn.Conv1d(4, 8, 3, dilation=2)) == 2 * 8 * 6 * 4 * 3
    assert of_the_model(lambda m, x: m.c(x), (2, 2, 4, 4, 4), c=nn.Conv3d(2, 3, 2)) == 2 * 3 * 27 * 2 * 8
    circular = nn.Conv2d(3, 5, 3, padding=1, padding_mode="circular")
    assert of_the_model(lambda m, x: m.c(x), (1, 3, 6, 6), c=circular) == 5 * 36 * 3 * 9
    transposed = nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2)
    assert of_the_model(lambda m, x: m.c(x), (2, 4, 5, 5), c=transposed) == 2 * 4 * 25 * (6 // 2) * 9


def test_the_linear_layers() -> None:
    linear = nn.Linear(8, 5)
    assert of_the_model(lambda m, x: m.f(x), (2, 7, 8), f=linear) == 2 * 7 * 8 * 5  # on tokens
    assert of_the_model(lambda m, x: m.f(x), (8,), f=linear) == 8 * 5
    assert of_the_model(lambda m, x: m.f(x), (0, 8), f=linear) == 0
    assert of_the_model(lambda m, x: m.f(x, x), (3, 4), f=nn.Bilinear(4, 4, 5)) == 3 * 5 * 4 * 4


def test_keywords_in_any_order_are_counted_by_the_input() -> None:
    states = torch.zeros(2, 1, 6), torch.zeros(2, 1, 6)
    lstm, x = nn.LSTM(4, 6, num_layers=2), torch.rand(5, 1, 4)
    in_order = of_the_model(lambda net, x: net.lstm(x)[0], x, lstm=lstm)
    assert in_order == of_the_model(lambda net, x: net.lstm(hx=states, input=x)[0], x, lstm=lstm) > 0


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_the_recurrent_layers(kind: type[nn.Module]) -> None:
    gates = {nn.RNN: 1, nn.LSTM: 4, nn.GRU: 3}[kind]
    layer = kind(4, 6, num_layers=2, bidirectional=True, batch_first=True)
    each = gates * 6 * (2 * (4 + 6) + 2 * (12 + 6))
    assert of_the_model(lambda m, x: m.r(x), (3, 5, 4), r=layer) == 3 * 5 * each
    packed = nn.utils.rnn.pack_sequence([torch.randn(5, 4), torch.randn(2, 4)])
    assert of_the_model(lambda m, x: m.r(packed), (1,), r=layer) == (5 + 2) * each


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: F.linear(x, torch.ones(5, 8), torch.ones(5)), 2 * 6 * 8 * 5),
        (lambda x: x @ x.mT, 2 * 6 * 6 * 8),
        (lambda x: torch.matmul(x, torch.ones(8)), 2 * 6 * 8),
        (lambda x: x[0, 0] @ x[0, 1], 8),
        (lambda x: torch.einsum("ntc,nsc->nts", x, x), 2 * 6 * 6 * 8),
        (lambda x: torch.bmm(x, x.mT), 2 * 6 * 6 * 8),
        (lambda x: torch.baddbmm(torch.ones(2, 6, 6), x, x.mT), 2 * 6 * 6 * 8),
        (lambda x: torch.addmv(torch.ones(6), x[0], torch.ones(8)), 6 * 8),
        (lambda x: F.conv1d(x, torch.ones(3, 6, 2)), 2 * 3 * 7 * 6 * 2),
        (lambda x: F.scaled_dot_product_attention(*[x.view(2, 6, 2, 4).transpose(1, 2)] * 3), 2 * 2 * 2 * 6 * 6 * 4),
        (lambda x: torch.ops.aten.bmm(x, x.mT), 2 * 6 * 6 * 8),
        (lambda x: torch.addbmm(torch.ones(6, 6), x, x.mT), 2 * 6 * 6 * 8),
        (lambda x: torch._addmm_activation(torch.ones(6), x[0], torch.ones(8, 6)), 6 * 8 * 6),
        (lambda x: F.bilinear(x, x, torch.ones(3, 8, 8)), 2 * 6 * 3 * 8 * 8),
        (lambda x: nn.LSTM(8, 3, num_layers=2, bidirectional=True)(x)[0], 2 * 6 * 2 * 12 * (8 + 3 + 6 + 3)),
        (lambda x: nn.GRU(8, 3)(x)[0], 2 * 6 * 9 * (8 + 3)),
        (
            lambda x: pytest.importorskip("torchvision").ops.deform_conv2d(
                x[None], torch.zeros(1, 8, 5, 7), torch.ones(4, 2, 2, 2)
            ),
            4 * 5 * 7 * 2 * 2 * 2,
        ),
        (lambda x: torch.add(x, x) * 2 - F.relu(x).sum(), 0),
    ],
)
def test_functions_between_the_layers_are_counted(function: Callable[[Tensor], Tensor], expected: int) -> None:
    assert of_the_model(lambda m, x: function(m.i(x)), (2, 6, 8), i=nn.Identity()) == expected


def test_the_recurrent_layers_that_cudnn_fuses() -> None:
    x, h = torch.empty(5, 3, 4, device="meta"), torch.empty(2, 3, 6, device="meta")
    weights = list(nn.LSTM(4, 6, num_layers=2, device="meta").parameters())
    counter = MultiplyAdds()
    with torch.no_grad(), counter:
        torch.ops.aten._cudnn_rnn(x, weights, 4, None, h, h, 2, 6, 0, 2, False, 0.0, False, False, [], None)
    assert counter.multiply_adds == 5 * 3 * 4 * 6 * (4 + 6 + 6 + 6)


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_layers_with_hooks_are_watched_and_counted_alike(kind: type[nn.Module]) -> None:
    layer, plain = kind(4, 6, num_layers=2), kind(4, 6, num_layers=2)
    layer.register_forward_hook(lambda module, args, output: None)
    found = [of_the_model(lambda m, x: m.r(x), (3, 5, 4), r=each) for each in (layer, plain)]
    assert found[0] == found[1] > 0


def test_functions_belong_to_the_innermost_layer_that_calls_them_and_to_all_around_it() -> None:
    inner = OwnForward(lambda m, x: m.f(x) @ torch.ones(5, 2), f=nn.Linear(4, 5))
    outer = OwnForward(lambda m, x: F.linear(m.inner(x), torch.ones(3, 2)), inner=inner)
    found = table(OwnForward(lambda m, x: m.outer(x).relu(), outer=outer), (7, 4))
    assert [(row.name, row.multiply_adds) for row in found] == [
        ("outer", 7 * (4 * 5 + 5 * 2 + 2 * 3)),
        ("outer.inner", 7 * (4 * 5 + 5 * 2)),
        ("outer.inner.f", 7 * 4 * 5),
    ]


def test_a_subclass_with_a_forward_of_its_own_and_a_module_with_hooks_are_watched_and_not_guessed() -> None:
    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + super().forward(x)

    assert of_the_model(lambda m, x: m.f(x), (3, 4), f=Twice(4, 5)) == 2 * 3 * 4 * 5
    patched: Any = nn.Linear(4, 5)
    patched.forward = lambda x: x @ patched.weight.T @ torch.ones(5, 5)
    assert of_the_model(lambda m, x: m.f(x), (3, 4), f=patched) == 3 * (4 * 5 + 5 * 5)
    hooked = nn.Linear(4, 5)
    hooked.register_forward_pre_hook(lambda module, args: (args[0][:2],))
    hooked.register_forward_hook(lambda module, args, output: output.sum())
    found = table(OwnForward(lambda m, x: m.f(x), f=hooked), (3, 4))
    assert (found["f"].multiply_adds, found["f"].output) == (2 * 4 * 5, ())
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 5))
    assert of_the_model(lambda m, x: m.f(x), (3, 4), f=normed) == 3 * 4 * 5


def test_attention_is_counted_whole() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    found = table(OwnForward(lambda m, x: m.a(x, x, x)[0], a=attention), (2, 6, 8))
    assert found["a"].multiply_adds == 2 * 6 * 8 * 8 * 4 + 2 * 2 * (2 * 6 * 6 * 4)
    assert found["a"].output == [(2, 6, 8), (2, 6, 6)]


def test_functions_of_the_users_own_hooks_and_of_recordings_are_not_those_of_the_layers_around() -> None:
    model = OwnForward(lambda m, x: m.r(m.f(x)), f=nn.Linear(4, 4), r=nn.ReLU())
    expected = table(model, (2, 4)).rows
    with HookManager(persistent=True) as hooks:
        seen: list[Tensor] = []
        hooks.observe(model.get_submodule("f"), lambda output: seen.append(output + 1))
        assert table(model, (2, 4)).rows == expected
    assert seen == []  # the table is about the model, and not about what is done to it meanwhile


# Calls ---------------------------------------------------------------------------------------------------------


def test_a_module_that_is_called_many_times_is_one_row_with_its_last_output() -> None:
    model = OwnForward(lambda m, x: m.f(m.f(x)[:1]), f=nn.Linear(4, 4), unused=nn.Linear(1, 1))
    found = table(model, (3, 4))
    assert [(row.name, row.calls, row.output, row.multiply_adds) for row in found] == [("f", 2, (1, 4), 4 * 16)]
    assert "calls" in str(found)
    assert "calls" not in str(table(nn.Sequential(nn.ReLU()), (1, 2)))


def test_containers_that_are_not_called_do_not_count_as_depth() -> None:
    blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.ReLU())])
    model = OwnForward(lambda m, x: m.blocks[1](m.blocks[0](x)), blocks=blocks)
    assert [(row.name, row.depth) for row in table(model, (1, 2))] == [
        ("blocks.0", 1),
        ("blocks.0.0", 2),
        ("blocks.1", 1),
        ("blocks.1.0", 2),
    ]
    assert [row.name for row in table(model, (1, 2), depth=1)] == ["blocks.0", "blocks.1"]


def test_order_is_that_of_the_first_call_and_a_shared_layer_has_one_row() -> None:
    shared = nn.Linear(3, 3)
    model = OwnForward(lambda m, x: m.a(m.b(x)), a=nn.Sequential(shared, nn.ReLU()), b=nn.Sequential(shared))
    found = table(model, (2, 3))
    assert [row.name for row in found] == ["b", "a.0", "a", "a.1"]
    assert [row.parameters for row in found] == [12, 12, 12, 0]
    assert [row.multiply_adds for row in found] == [18, 36, 18, 0]
    assert (found.model.parameters, found.model.multiply_adds) == (12, 36)


def test_a_module_that_calls_itself_is_counted_once() -> None:
    def forward(model: Any, x: Tensor, left: int = 2) -> Tensor:
        y: Tensor = model.f(x)
        return model(y, left - 1) if left else y

    model = OwnForward(
        lambda m, x: m.again(x), again=OwnForward(forward, f=nn.Sequential(nn.Linear(4, 4), Sleep(0.01)))
    )
    found = layer_table(model, (1, 4))
    assert [(row.name, row.calls, row.multiply_adds) for row in found[:3]] == [
        ("again", 3, 48),
        ("again.f", 3, 48),
        ("again.f.0", 3, 48),
    ]
    assert 0.5 < (found["again"].time_share or 0) <= 1


def test_parameters_are_counted_once_and_frozen_ones_are_not_trainable() -> None:
    tied: Any = OwnForward(lambda m, x: m.b(m.a(x)), a=nn.Linear(3, 3), b=nn.Linear(3, 3))
    tied.b.weight = tied.a.weight
    tied.a.bias.requires_grad_(False)
    found = table(tied, (1, 3))
    assert [(row.parameters, row.trainable) for row in found] == [(12, 9), (12, 12)]
    assert (found.model.parameters, found.model.trainable) == (15, 12)
    assert "15 parameters, 12 of them trainable; 18 multiply-adds" in found.notes
    frozen = table(nn.Linear(3, 3).requires_grad_(False), (1, 3))
    assert "12 parameters, 0 of them trainable; 9 multiply-adds" in frozen.notes


@dataclass
class Result:
    logits: Tensor
    hidden: tuple[Tensor, ...]


def test_outputs_of_any_nesting() -> None:
    outputs: dict[str, tuple[Callable[[Any, Tensor], Any], Any, str]] = {
        "none": (lambda m, x: None, [], ""),
        "pair": (lambda m, x: (x, [x[0], None]), [(2, 3), (3,)], "2x3, 3 "),
        "dict": (lambda m, x: {"out": x, "n": 3}, (2, 3), "2x3"),
        "record": (lambda m, x: Result(x, (x, x)), [(2, 3)] * 3, "2x3, 2x3, 2x3 "),
        "scalar": (lambda m, x: x.sum(), (), "scalar"),
        "many": (lambda m, x: [x] * 9, [(2, 3)] * 9, "2x3, 2x3, 2x3, 2x3, ... 9 in all"),
    }
    modules: dict[str, nn.Module] = {name: OwnForward(forward) for name, (forward, _, _) in outputs.items()}
    found = table(OwnForward(lambda m, x: [getattr(m, name)(x) for name in outputs], **modules), (2, 3))
    for name, (_, shapes, text) in outputs.items():
        assert found[name].output == shapes
        assert text in str(found)


def test_a_model_without_layers_is_its_own_row() -> None:
    (row,) = table(nn.Linear(3, 4), (2, 3))
    assert (row.name, row.kind, row.depth, row.output, row.multiply_adds) == ("", "Linear", 0, (2, 4), 24)
    found = table(OwnForward(lambda m, x: x @ x.T), (2, 3))
    assert "OwnForward  " in str(found)


# What is shown -------------------------------------------------------------------------------------------------


def test_layers_are_chosen_by_name_pattern_and_kind() -> None:
    model = torchvision_models().resnet18(weights=None)
    assert [row.name for row in table(model, (1, 3, 32, 32), layers="layer?")] == [f"layer{i}" for i in range(1, 5)]
    convolutions = table(model, (1, 3, 32, 32), layers=nn.Conv2d, depth=2)
    assert [row.name for row in convolutions] == ["conv1"]
    assert [row.name for row in table(model, (1, 3, 32, 32), layers=[model.fc, "conv1"])] == ["conv1", "fc"]
    some = table(model, (1, 3, 32, 32), layers="layer1.0.conv*")
    assert str(some).splitlines()[4].startswith("layer1.0.conv1")
    assert some.model.parameters == 11_689_512
    with pytest.raises(LayerError, match="closest"):
        table(model, (1, 3, 32, 32), layers="layer5")


@pytest.mark.parametrize(("options", "words"), [({"depth": 0}, "depth=0"), ({"times": -1}, "times=-1")])
def test_impossible_options_are_refused(options: dict[str, int], words: str) -> None:
    with pytest.raises(MethodError, match=words):
        layer_table(nn.ReLU(), (1,), **options)  # type: ignore[arg-type]


def test_lazy_and_foreign_models_are_refused_with_the_reason() -> None:
    with pytest.raises(ModelError, match="lazy parameters"):
        table(nn.Sequential(nn.LazyLinear(3)), (1, 3))
    with pytest.raises(ModelError, match=r"expected a torch\.nn\.Module"):
        table(len, (1, 3))


def scaled(model: Any, x: Tensor, scale: Any = 1) -> Any:
    return model.f(x) * scale


@pytest.mark.slow
def test_wrapped_models_and_examples_of_several_kinds() -> None:
    inner = OwnForward(scaled, f=nn.Linear(3, 4))
    expected = table(inner, (2, 3)).rows
    assert table(nn.DataParallel(inner), torch.randn(2, 3)).rows == expected
    assert table(torch.compile(inner), {"x": torch.randn(2, 3)}).rows == expected
    assert table(inner, (torch.randn(2, 3), torch.ones(4))).title == "OwnForward on 2x3, 4"
    photo = layer_table(saliency.load("efficientnet_lite0"), COFFEE, depth=1, times=False)
    assert photo.title == "EfficientNet on 1x3x224x224"


def test_scripted_models_and_parts_are_refused() -> None:
    block: nn.Module = torch.jit.script(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)))
    for model in (block, nn.Sequential(nn.Linear(4, 4), nn.Sequential(block))):
        with pytest.raises(NotApplicableError, match="TorchScript"):
            layer_table(model, (3, 4))


def test_a_model_whose_call_is_its_own_is_told_without_hooks() -> None:
    class Direct(nn.Linear):
        def __call__(self, x: Tensor) -> Tensor:
            return self.forward(x)

    found = layer_table(Direct(4, 3), (2, 4))
    assert [(row.name, row.output, row.multiply_adds, row.calls) for row in found] == [("", (2, 3), 24, 1)]


def test_a_model_that_calls_none_of_its_parts_is_the_one_row() -> None:
    x = torch.randn(5, 2, 8)
    found = layer_table(nn.MultiheadAttention(8, 2), {"query": x, "key": x, "value": x})
    assert [(row.name, row.kind, row.time_share) for row in found] == [("", "MultiheadAttention", 1)]
    assert found[0].multiply_adds == found.model.multiply_adds == 4 * 10 * 8 * 8 + 2 * 2 * 5 * 5 * 8
    assert not layer_table(nn.MultiheadAttention(8, 2), (x, x, x), layers="out_proj")


# Times ---------------------------------------------------------------------------------------------------------


@dataclass
class Clock:
    """Time that passes only where a layer says so, so that the load of the machine does not matter."""

    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(importlib.import_module("saliency.inspection.layers"), "time", fake)
    return fake


class Ticks(nn.Module):
    """Takes the given seconds in its timed forwards, the last one repeatedly. The first forward is not timed."""

    def __init__(self, clock: Clock, *seconds: float) -> None:
        super().__init__()
        self.clock = clock
        self.seconds = chain((0.0,), seconds, repeat(seconds[-1]))

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += next(self.seconds)
        return x


def test_time_shares_are_of_the_whole_and_include_what_lies_inside(clock: Clock) -> None:
    inner = nn.Sequential(Ticks(clock, 0.02), Ticks(clock, 0.03))
    found = layer_table(nn.Sequential(Ticks(clock, 0.05), inner), (1,), times=2)
    shares = {row.name: row.time_share for row in found}
    assert shares == pytest.approx({"0": 0.5, "1.0": 0.2, "1.1": 0.3, "1": 0.5})
    assert found.model.time_share == 1
    assert found.seconds == pytest.approx(0.1)
    assert found.notes[0].endswith(" ms for one forward")


def test_a_hiccup_in_one_forward_sticks_to_no_layer(clock: Clock) -> None:
    first, second = Ticks(clock, 0.1, 0.0, 0.0), Ticks(clock, 0.0, 0.05, 0.05)
    found = layer_table(nn.Sequential(nn.Sequential(first, second), Ticks(clock, 0.02)), (1,), times=3)
    shares = {row.name: row.time_share or 0.0 for row in found}
    assert shares == pytest.approx({"0.0": 0, "0.1": 0, "0": 5 / 7, "1": 2 / 7})


def test_nested_rows_sum_to_at_most_their_parent() -> None:
    found = layer_table(torchvision_models().resnet18(weights=None), (1, 3, 32, 32))
    shares = {row.name: row.time_share or 0.0 for row in found}
    for name, whole in [("", 1.0), *shares.items()]:
        inside = [each for other, each in shares.items() if other and other.rpartition(".")[0] == name]
        assert sum(inside) <= whole + 1e-12


def test_the_forwards_are_as_many_as_were_asked_for() -> None:
    calls: list[int] = []

    def forward(model: Any, x: Tensor) -> Any:
        calls.append(len(x))
        return model.f(x)

    model = OwnForward(forward, f=nn.ReLU())
    for times, expected in ((False, 1), (0, 1), (1, 2), (5, 6), (True, 4)):
        calls.clear()
        found = layer_table(model, (2, 3), times=times)
        assert len(calls) == expected
        assert (found.seconds is None) == (times in (False, 0))
        assert (found[0].time_share is None) == (times in (False, 0))
        assert ("time" in str(found).splitlines()[2]) == bool(times)


def test_on_an_accelerator_each_layer_waits_for_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[torch.device] = []
    device = torch.device("cuda:1")
    monkeypatch.setattr(
        importlib.import_module("saliency.inspection.layers"),
        "first_tensor",
        lambda tree: SimpleNamespace(device=device),
    )
    monkeypatch.setattr(torch.accelerator, "synchronize", waits.append)
    layer_table(nn.Sequential(nn.ReLU(), nn.ReLU()), torch.ones(1), times=3)
    assert waits == [device] * 3 * (2 + 2 * 2)  # the model and two layers, each before and after
    waits.clear()
    layer_table(nn.Sequential(nn.ReLU(), nn.ReLU()), torch.ones(1), times=False)
    assert waits == []


# Nothing is touched --------------------------------------------------------------------------------------------


def with_everything() -> Any:
    model: Any = torchvision_models().resnet18(weights=None)
    model.train()
    model.layer1.eval()
    model.conv1.weight.grad = torch.ones_like(model.conv1.weight)
    model.fc.weight.requires_grad_(False)
    model.layer2.register_forward_hook(lambda module, args, output: None)
    return model


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_the_model_is_left_bit_for_bit(mode: Callable[[], Any]) -> None:
    model, x = with_everything(), torch.randn(2, 3, 32, 32)
    before = Snapshot(model=model, x=x)
    with mode():
        layer_table(model, x)
    assert before.changes() == []


@pytest.mark.parametrize("times", [0, 2])
def test_the_model_is_left_bit_for_bit_when_its_forward_raises(times: int) -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        calls.append(model.f(x))
        if len(calls) > times:
            raise ValueError("no more")
        out: Tensor = model.f(x)
        return out

    calls: list[Tensor] = []
    model, x = OwnForward(forward, f=nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))).train(), torch.randn(2, 3)
    before = Snapshot(model=model, x=x)
    with pytest.raises(ModelError, match=r"OwnForward\) refused an input of 2x3 .*: no more"):
        layer_table(model, x, times=times)
    assert before.changes() == []
    assert torch.overrides._len_torch_function_stack() == 0  # type: ignore[attr-defined]


def test_a_part_that_raises_what_the_model_catches_upsets_no_count() -> None:
    def risky(model: Any, x: Tensor) -> Tensor:
        model.f(x)
        raise ValueError

    def forward(model: Any, x: Tensor) -> Tensor:
        try:
            model.risky(x)
        except ValueError:
            x = F.relu(x)
        y: Tensor = model.g(x)
        return y + 1

    model = OwnForward(forward, risky=OwnForward(risky, f=nn.Linear(3, 3)), g=nn.Linear(3, 5))
    found = table(model, (2, 3))
    assert [(row.name, row.multiply_adds) for row in found] == [("risky.f", 18), ("g", 30)]
    assert found.model.multiply_adds == 48


def test_an_input_that_the_model_overwrites_stays_the_users() -> None:
    x = torch.randn(2, 3)
    before = x.clone()
    layer_table(OwnForward(lambda m, x: m.r(x).zero_(), r=nn.ReLU(inplace=True)), x)
    assert torch.equal(x, before)


def test_other_threads_are_neither_seen_nor_disturbed() -> None:
    """Another thread runs the same model all the while: its calls are no part of the table, and give what they did."""
    started, stop = threading.Event(), threading.Event()
    failures: list[str] = []

    def forward(model: Any, x: Tensor) -> Tensor:
        started.wait(5)
        out: Tensor = model.r(model.f(x)) @ torch.ones(3, 2)
        return out

    model = OwnForward(forward, f=nn.Linear(3, 3), r=nn.ReLU()).eval()
    x = torch.randn(2, 3)

    def others() -> None:
        expected = None
        while not stop.is_set():
            started.set()
            with torch.no_grad():
                out = model(x)
            if expected is not None and not torch.equal(out, expected):
                failures.append("the output changed")
            expected = out

    thread = threading.Thread(target=others)
    thread.start()
    try:
        for _ in range(30):
            found = layer_table(model, x, times=1)
            assert [(row.name, row.calls, row.multiply_adds) for row in found] == [("f", 1, 18), ("r", 1, 0)]
    finally:
        stop.set()
        thread.join()
    assert failures == []


@pytest.mark.slow
def test_many_tables_leave_nothing_behind() -> None:
    model, x = OwnForward(lambda m, x: m.r(m.f(x)) + 1, f=nn.Linear(3, 3), r=nn.ReLU()), torch.randn(2, 3)

    def tensors() -> Iterator[Tensor]:
        import gc

        gc.collect()
        return (each for each in gc.get_objects() if type(each) is Tensor)

    layer_table(model, x)
    before = sum(1 for _ in tensors())
    for _ in range(50):
        layer_table(model, x, times=1)
    assert sum(1 for _ in tensors()) <= before


# As a table ----------------------------------------------------------------------------------------------------


def test_it_reads_as_a_table_and_shows_as_one() -> None:
    found = layer_table(torchvision_models().resnet18(weights=None), (1, 3, 32, 32), depth=1, times=1)
    lines = str(found).splitlines()
    assert lines[0] == "ResNet on 1x3x32x32"
    assert lines[2].split() == ["layer", "kind", "output", "parameters", "multiply-adds", "time"]
    assert lines[4].split()[:7] == ["conv1", "Conv2d", "1x64x16x16", "9.41", "k", "2.41", "M"]
    assert found._repr_html_().count("<tr>") == 11
    assert found[:3].columns == found.columns
    assert found[:3].model is found.model
    assert "10 rows" in repr(found)
