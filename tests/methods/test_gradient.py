"""The plain gradient against finite differences and captum, and captum's guided maps where captum is right.

Guided backpropagation, DeconvNet and RectGrad equal an independent reference, or say why they cannot.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import saliency
from saliency import METHODS, DeconvNet, Explanation, GuidedBackprop, InputXGradient, VanillaGradient
from saliency.attribution.base import TracedAttribution
from saliency.errors import ModelError, NotApplicableError, SaliencyWarning, TargetError
from saliency.io.preprocess import as_preprocess
from tests.models import FunctionModel, small_vgg
from tests.reference import RULES, error, reference
from tests.versions import exact_or_needs_torch


def network(activation: Callable[[], nn.Module]) -> nn.Sequential:
    """Three layers, each with a module of its own."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1),
        activation(),
        nn.MaxPool2d(2),
        nn.Conv2d(5, 6, 3, stride=2),
        nn.BatchNorm2d(6),
        activation(),
        nn.Flatten(),
        nn.Linear(6, 8),
        activation(),
        nn.Linear(8, 4),
    ).eval()


def images(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(3, 3, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


TARGETS = [2, 0, 3]


def differences(model: nn.Module, x: Tensor, targets: list[int], step: float = 1e-5) -> Tensor:
    """Central differences of each image's score in each of its values."""
    one = torch.eye(x[0].numel(), dtype=x.dtype).reshape(-1, *x.shape[1:]) * step
    rows = []
    with torch.no_grad():
        for image, target in zip(x, targets, strict=True):
            slope = (model(image + one) - model(image - one))[:, target] / (2 * step)
            rows.append(slope.reshape(image.shape))
    return torch.stack(rows)


@pytest.mark.parametrize("activation", [nn.Tanh, nn.Softplus, nn.GELU, nn.ReLU])
def test_the_gradient_is_the_limit_of_finite_differences(activation: Callable[[], nn.Module]) -> None:
    model, x = network(activation).double(), images()
    found = VanillaGradient(model).attribute(x, TARGETS)
    expected = differences(model, x, TARGETS)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(found.values, expected, rtol=1e-6, atol=1e-8)
    with torch.no_grad():
        assert torch.equal(found.scores, model(x)[range(3), TARGETS])


def test_input_x_gradient_is_the_product_and_finds_a_linear_models_score() -> None:
    model, x = network(nn.GELU).double(), images()
    product = x * differences(model, x, TARGETS)
    torch.testing.assert_close(InputXGradient(model).attribute(x, TARGETS).values, product, rtol=1e-6, atol=1e-8)
    layer = nn.Linear(108, 4, bias=False)
    linear = nn.Sequential(nn.Flatten(), layer).double()
    found = InputXGradient(linear).attribute(x, TARGETS)
    torch.testing.assert_close(found.values.sum((1, 2, 3)), found.scores, rtol=1e-12, atol=1e-12)
    assert torch.equal(VanillaGradient(linear).attribute(x, 1).values[2].flatten(), layer.weight[1])


def test_a_function_of_the_output_is_differentiated() -> None:
    model, x = network(nn.Tanh).double(), images()
    found = VanillaGradient(model).attribute(x, lambda output: output[:, 0] - 2 * output[:, 3])
    expected = differences(model, x, [0] * 3) - 2 * differences(model, x, [3] * 3)
    torch.testing.assert_close(found.values, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("method", [VanillaGradient, InputXGradient, GuidedBackprop, DeconvNet])
def test_a_score_without_gradient_is_an_error(method: type[TracedAttribution]) -> None:
    with pytest.raises(TargetError, match="gradient"):
        method(network(nn.ReLU)).attribute(images(torch.float32), lambda output: output[:, 0].detach())
    weight = torch.ones(3, requires_grad=True)
    with pytest.raises(TargetError, match="depend"):
        method(network(nn.ReLU)).attribute(images(torch.float32), lambda output: weight * 2)


@pytest.mark.parametrize(
    ("method", "peer"),
    [
        (VanillaGradient, "Saliency"),
        (InputXGradient, "InputXGradient"),
        (GuidedBackprop, "GuidedBackprop"),
        (DeconvNet, "Deconvolution"),
    ],
)
def test_captum_agrees_on_a_plain_chain_of_relu_modules(method: type[TracedAttribution], peer: str) -> None:
    """Where each ReLU is a module of its own, out of place, and nothing else reads its input, captum is right."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        captum = pytest.importorskip("captum.attr")
        model, x = network(nn.ReLU), images(torch.float32)
        options = {"abs": False} if peer == "Saliency" else {}
        oracle = getattr(captum, peer)(model)
        expected = oracle.attribute(x.clone().requires_grad_(), target=torch.tensor(TARGETS), **options).detach()
    found = method(model).attribute(x, TARGETS).values
    assert expected.abs().max() > 1e-4
    assert torch.equal(found, expected)
    if method in (GuidedBackprop, DeconvNet):
        assert not torch.equal(found, VanillaGradient(model).attribute(x, TARGETS).values)


Form = Callable[[Tensor], Tensor]
ASSETS = Path(__file__).parents[2] / "assets"

rules = pytest.mark.parametrize("rule", RULES)


class Net(nn.Module):
    """Two convolutions with a rectifier behind each, a skip from one to the other, and one ReLU in the head."""

    def __init__(self, form: Form, second: Form | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.second = nn.Conv2d(6, 6, 3, padding=1)
        self.hidden = nn.Linear(6, 8)
        self.last = nn.Linear(8, 4)
        self.form = form
        self.other = second or form
        with torch.no_grad():
            self.first.weight.mul_(6)  # some values lie beyond 6

    def forward(self, x: Tensor) -> Tensor:
        h = self.form(self.first(x))
        h = h + self.other(self.second(h))
        return self.last(torch.relu(self.hidden(h.mean((2, 3)))))  # type: ignore[no-any-return]


def noisy_images(n: int = 2, size: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(2)).to(dtype)


def options(rule: str, percentile: float) -> dict[str, Any]:
    return {"percentile": percentile} if rule == "rectgrad" else {}


def explained(
    model: nn.Module, x: Tensor, rule: str, percentile: float = 60.0, target: int = 1, **more: Any
) -> Explanation:
    return METHODS[rule](model, **options(rule, percentile), **more).attribute(x, target)


def check(
    model: nn.Module,
    x: Tensor,
    rule: str,
    twin: nn.Module | None = None,
    *,
    percentile: float = 60.0,
    target: int = 1,
    most: float = 0.0,
    **more: Any,
) -> Explanation:
    """The values are the reference's on the model, or on its eager twin; so is the count; and both mean something."""
    model.eval()
    expected = reference((twin or model).eval(), x, target, rule, percentile, smooth=more.get("smooth") == "positive")
    found = explained(model, x, rule, percentile, target, **more)
    assert found.values.dtype == expected.values.dtype
    if most:
        assert error(found.values, expected.values) <= most
    else:
        assert torch.equal(found.values, expected.values)
    assert error(found.values, expected.plain) > 1e-3
    assert found.values.any()
    assert found.coverage is not None
    assert not found.coverage.hidden
    rewritten, passed = expected.calls, expected.smooth_calls
    if more.get("smooth") == "positive":
        rewritten, passed = rewritten | passed, {}
    assert found.coverage.rewritten == rewritten
    assert found.coverage.passed == passed
    return found


@contextmanager
def or_refused(reason: str) -> Iterator[None]:
    """The block holds, or the method refuses the model for this reason."""
    try:
        yield
    except NotApplicableError as refusal:
        if reason not in str(refusal):
            raise


# Every spelling --------------------------------------------------------------------------------------------------

SPELLINGS: Mapping[str, Form] = {
    "module": nn.ReLU(),
    "module in place": nn.ReLU(inplace=True),
    "F.relu": F.relu,
    "F.relu in place": lambda h: F.relu(h, inplace=True),
    "F.relu_": F.relu_,
    "torch.relu": torch.relu,
    "torch.relu_": torch.relu_,
    "Tensor.relu": lambda h: h.relu(),
    "Tensor.relu_": lambda h: h.relu_(),
    "relu6": F.relu6,
    "relu6 in place": nn.ReLU6(inplace=True),
    "hardtanh from 0": nn.Hardtanh(0.0, 1.5),
    "hardtanh_ from 0": lambda h: F.hardtanh_(h, 0.0, 1.5),
    "threshold": nn.Threshold(0.0, 0.0),
    "threshold in place": nn.Threshold(0.0, 0.0, inplace=True),
    "threshold_": lambda h: torch.threshold_(h, 0.0, 0.0),
    "clamp": lambda h: h.clamp(min=0),
    "clamp of a float": lambda h: torch.clamp(h, 0.0),
    "clamp by a tensor": lambda h: h.clamp(min=torch.zeros(())),
    "clamp by one tensor per channel": lambda h: h.clamp(min=torch.zeros(1, 6, 1, 1)),
    "clamp_": lambda h: h.clamp_(min=0),
    "clip": lambda h: torch.clip(h, min=0),
    "clamp_min": lambda h: h.clamp_min(0),
    "clamp_min by a tensor": lambda h: torch.clamp_min(h, torch.zeros(())),
    "clamp_min_": lambda h: h.clamp_min_(0),
    "clamp to 0..2": lambda h: h.clamp(0, 2),
    "clamp_ to 0..2": lambda h: h.clamp_(0, 2),
    "clamp to tensors": lambda h: h.clamp(torch.zeros(()), torch.full((1, 6, 1, 1), 2.0)),
    "maximum": lambda h: torch.maximum(h, torch.zeros(())),
    "maximum, zero first": lambda h: torch.maximum(torch.zeros_like(h), h),
    "max": lambda h: torch.max(h, torch.zeros_like(h)),
}


@rules
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_a_rectifier_equals_the_reference(spelling: str, rule: str) -> None:
    found = check(Net(SPELLINGS[spelling]), noisy_images(), rule)
    assert found.coverage is not None
    assert sum(found.coverage.rewritten.values()) == 3


@rules
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_a_rectifier_equals_the_reference_in_float64(spelling: str, rule: str) -> None:
    form = SPELLINGS[spelling]

    def in_double(h: Tensor) -> Tensor:
        return form(h).double()

    check(Net(in_double).double(), noisy_images(dtype=torch.float64), rule, most=1e-12)


@pytest.mark.parametrize("spelling", ["module", "F.relu", "threshold", "threshold_", "clamp", "clamp_min", "maximum"])
def test_where_a_rectifier_meets_exactly_0_its_spelling_makes_no_difference(spelling: str) -> None:
    """A black region behind a convolution without bias gives zeros, where PyTorch's derivatives of a clamp differ."""
    model = Net(SPELLINGS[spelling])
    model.first.bias = None
    x = noisy_images()
    x[:, :, 2:] = 0
    assert torch.equal(explained(model, x, "guided_backprop").values, reference(model, x, 1, "guided_backprop").values)


@rules
def test_a_module_used_many_times_counts_each_call(rule: str) -> None:
    class Reused(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.form(self.first(x))
            for _ in range(5):
                h = self.form(self.second(h))
            return self.last(self.form(self.hidden(h.mean((2, 3)))))  # type: ignore[no-any-return]

    found = check(Reused(nn.ReLU(inplace=True)), noisy_images(), rule)
    assert found.coverage is not None
    assert found.coverage.rewritten == {"relu": 7}


@rules
def test_control_flow_that_depends_on_the_data_is_followed(rule: str) -> None:
    class Branching(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.first(x))
            while h.shape[-1] > 2 and float(x.detach().sum()) < 0:
                h = F.avg_pool2d(F.relu6(self.second(h)), 2)
            return self.last(torch.relu(self.hidden(h.mean((2, 3)))))  # type: ignore[no-any-return]

    model = Branching(F.relu)
    x = noisy_images().abs()
    for batch, calls in ((x, {"relu": 2}), (-x, {"relu": 2, "relu6": 2})):
        found = check(model, batch, rule)
        assert found.coverage is not None
        assert found.coverage.rewritten == calls


@rules
def test_a_relu_over_one_number_per_image_is_a_relu(rule: str) -> None:
    class Scalar(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.first(x))
            return torch.stack([h.sum((1, 2, 3)), F.relu(self.second(h).mean((1, 2, 3)) + 1)], 1)

    x = noisy_images(3)
    model = Scalar(F.relu).eval()
    found = explained(model, x, rule, percentile=0)
    assert torch.equal(found.values, reference(model, x, 1, rule, 0).values)


@rules
def test_broadcast_and_promoted_rectifiers_keep_the_shape_and_type_of_their_input(rule: str) -> None:
    def broadcast(h: Tensor) -> Tensor:
        return torch.maximum(h.mean(3, keepdim=True), torch.zeros(8)) * torch.arange(8)

    check(Net(broadcast), noisy_images(), rule)
    check(Net(lambda h: h.mean(3, keepdim=True).clamp(min=torch.zeros(8)) * torch.arange(8)), noisy_images(), rule)

    def promoted(h: Tensor) -> Tensor:
        return torch.maximum(h, torch.zeros(1)).bfloat16()

    check(Net(promoted).bfloat16(), noisy_images(dtype=torch.bfloat16), rule)


@rules
def test_a_relu_whose_gradient_is_cut_off_behind_it_is_no_obstacle(rule: str) -> None:
    class First(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            return a + b

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
            return gradients[0], None

    def form(h: Tensor) -> Tensor:
        y: Tensor = First.apply(F.relu(h), F.relu(h + 1))
        return y

    model = Net(form).eval()
    with pytest.warns(SaliencyWarning, match="First"):
        found = explained(model, noisy_images(), rule)
    assert torch.equal(found.values, reference(model, noisy_images(), 1, rule, 60).values)


# Every way to run a model ----------------------------------------------------------------------------------------

torch.manual_seed(3)  # made when the file is read, and the same each time
MIXED = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(6, 6, 1), nn.ReLU6(), nn.Threshold(0.0, 0.0))


@rules
@pytest.mark.parametrize("calls", [0, 4])
@pytest.mark.parametrize("how", ["script", "trace", "freeze", "part"])
def test_scripted_and_traced_models_equal_their_eager_twin(how: str, calls: int, rule: str) -> None:
    """After a few calls TorchScript's executor fuses operations; a model that was used before is explained as well."""
    x = noisy_images()
    twin = Net(nn.ReLU(inplace=True), nn.ReLU6()).eval()
    model: nn.Module
    if how == "part":
        model = Net(MIXED)
        twin = Net(MIXED)
        model.other = torch.jit.script(MIXED)
    else:
        compiler: Any = torch.jit
        model = compiler.trace(twin, x) if how == "trace" else compiler.script(twin)
        model = torch.jit.freeze(model) if how == "freeze" else model
    for _ in range(calls):
        leaf = x.clone().requires_grad_()
        torch.autograd.grad(model(leaf).sum(), leaf)
    with or_refused("TorchScript has fused") if calls else nullcontext():
        check(model, x, rule, twin)


@rules
def test_a_scripted_function_that_was_fused_is_exact_or_refused(rule: str) -> None:
    def plain(h: Tensor) -> Tensor:
        return torch.relu(h) * 0.5 + 0.25

    fused = torch.jit.script(plain)
    model, x = Net(fused), noisy_images()
    for _ in range(4):
        leaf = x.clone().requires_grad_()
        torch.autograd.grad(model(leaf).sum(), leaf)
    with or_refused("TorchScript has fused"):
        check(model, x, rule, Net(plain))


@rules
def test_non_reentrant_checkpoints_equal_the_network_without_them(rule: str) -> None:
    inner = nn.Sequential(nn.ReLU(), nn.Conv2d(6, 6, 1), nn.ReLU6(), nn.Conv2d(6, 6, 1), nn.Threshold(0.0, 0.0))

    def whole(h: Tensor) -> Tensor:
        y: Tensor = inner(h)
        return torch.maximum(y, torch.zeros(1)) + h.clamp(min=torch.zeros(()))

    def recomputed(h: Tensor) -> Tensor:
        y: Tensor = checkpoint(whole, h, use_reentrant=False)
        return y

    check(Net(recomputed), noisy_images(), rule, Net(whole))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@rules
def test_a_compiled_part_runs_eagerly_and_is_exact(rule: str, compiler: str) -> None:
    twin = Net(MIXED).eval()
    model = Net(torch.compile(MIXED, backend=compiler)).eval()
    model(noisy_images().requires_grad_())
    check(model, noisy_images(), rule, twin)
    compiled: Any = torch.compile(twin, backend=compiler)
    check(compiled, noisy_images(), rule, twin)


@rules
def test_frozen_parameters_change_nothing(rule: str) -> None:
    check(Net(F.relu6).requires_grad_(requires_grad=False), noisy_images(), rule)


@rules
def test_bfloat16_is_exact(rule: str) -> None:
    check(Net(nn.ReLU(inplace=True)).bfloat16(), noisy_images(dtype=torch.bfloat16), rule)
    check(Net(F.relu6).bfloat16(), noisy_images(dtype=torch.bfloat16), rule)


@rules
def test_channels_last_is_exact(rule: str) -> None:
    model = Net(F.relu, nn.ReLU6(inplace=True)).to(memory_format=torch.channels_last)
    check(model, noisy_images().to(memory_format=torch.channels_last), rule)


@rules
def test_autocast_inside_the_model_and_around_the_call_is_exact(rule: str) -> None:
    class Mixed(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x).float()

    check(Mixed(nn.ReLU(inplace=True), F.relu6), noisy_images(), rule)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(Net(nn.ReLU(inplace=True), F.relu6), noisy_images(), rule)


@rules
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_without_gradients_around_the_call_are_no_obstacle(mode: Callable[[], Any], rule: str) -> None:
    model, x = Net(F.relu, F.relu6).eval(), noisy_images()
    expected = explained(model, x, rule)
    with mode():
        assert torch.equal(explained(model, x.clone(), rule).values, expected.values)


@rules
def test_the_steps_of_a_recurrent_relu_are_rectifiers(rule: str) -> None:
    """They are called inside PyTorch, so the twin writes the recurrence out."""

    class Recurrent(nn.Module):
        def __init__(self, *, unrolled: bool) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.cells = nn.RNN(24, 5, nonlinearity="relu", batch_first=True)
            self.last = nn.Linear(5, 3)
            self.unrolled = unrolled

        def forward(self, x: Tensor) -> Tensor:
            rows = x.transpose(1, 2).flatten(2)
            if not self.unrolled:
                return self.last(self.cells(rows)[0].mean(1))  # type: ignore[no-any-return]
            cells: Any = self.cells
            state, states = torch.zeros(len(x), 5, dtype=x.dtype), []
            for row in rows.unbind(1):
                inside = F.linear(row, cells.weight_ih_l0, cells.bias_ih_l0)
                state = F.relu(inside + F.linear(state, cells.weight_hh_l0, cells.bias_hh_l0))
                states.append(state)
            return self.last(torch.stack(states, 1).mean(1))  # type: ignore[no-any-return]

    twin = Recurrent(unrolled=True).double()
    found = check(Recurrent(unrolled=False).double(), noisy_images(dtype=torch.float64), rule, twin, most=1e-12)
    assert found.coverage is not None
    assert found.coverage.rewritten == {"relu": 8}


# Real networks ---------------------------------------------------------------------------------------------------

NETWORKS = {
    "resnet18": (32, {}),
    "vgg11": (32, {}),
    "densenet121": (32, {}),
    "googlenet": (32, {"init_weights": False, "aux_logits": True}),
    "inception_v3": (75, {"init_weights": False}),
    "mobilenet_v2": (32, {}),
    "mobilenet_v3_small": (32, {}),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.filterwarnings("ignore:the deconvnet map .* below the rounding error")  # with random weights
@pytest.mark.slow
def test_torchvision_networks_equal_the_reference(name: str) -> None:
    models = pytest.importorskip("torchvision.models")
    size, more = NETWORKS[name]
    torch.manual_seed(0)
    model = small_vgg() if name == "vgg11" else models.get_model(name, weights=None, num_classes=10, **more)
    for rule in RULES:
        check(model, noisy_images(1 if size > 32 else 2, size), rule, percentile=80)


@pytest.mark.slow
def test_the_bundled_network_equals_the_reference_on_a_photo() -> None:
    model = saliency.load("efficientnet_lite0").eval()
    with Image.open(ASSETS / "coffee.jpg") as photo:
        x = as_preprocess(model.preprocess)(photo.convert("RGB"))[None]  # type: ignore[arg-type]
    for rule in RULES:
        found = check(model, x, rule, percentile=90, target=967)
        assert found.coverage is not None
        assert set(found.coverage.rewritten) == {"relu6"}


@pytest.mark.parametrize("name", ["swin_t", "convnext_tiny", "regnet_y_400mf", "efficientnet_b0", "shufflenet_v2_x0_5"])
def test_torchvision_networks_raise_no_false_alarm(name: str) -> None:
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    model = models.get_model(name, weights=None, num_classes=4).requires_grad_(requires_grad=False)
    found = explained(model, noisy_images(1, 32), "guided_backprop", smooth="positive")
    assert found.coverage is not None
    assert found.coverage.rewritten
    assert not found.coverage.hidden


# Only the rectifier's own branch ---------------------------------------------------------------------------------


def summed(function: Callable[[Tensor], Tensor]) -> FunctionModel:
    """The sum of a function of the first three inputs."""
    return FunctionModel(lambda x: function(x.flatten(1)).sum(1))


def vector(*values: float) -> Tensor:
    """One image (1, 3, 1, 1) with these values."""
    return torch.tensor(values, dtype=torch.float64).reshape(1, 3, 1, 1)


@pytest.mark.parametrize("form", [F.relu, F.relu6, nn.ReLU(), lambda t: t.clamp(min=0)])
def test_a_skip_around_a_rectifier_keeps_its_gradient(form: Form) -> None:
    """y = w relu(x) + v x: guided is max(w, 0) where x > 0, DeconvNet max(w, 0) everywhere, and both plus v."""
    w, v = torch.tensor([2.0, -3.0, 5.0], dtype=torch.float64), torch.tensor([-1.0, -1.0, -7.0], dtype=torch.float64)
    model, x = summed(lambda t: w * form(t) + v * t), vector(1.0, 2.0, -3.0)
    assert explained(model, x, "guided_backprop", target=0).values.flatten().tolist() == [1.0, -1.0, -7.0]
    assert explained(model, x, "deconvnet", target=0).values.flatten().tolist() == [1.0, -1.0, -2.0]


@rules
def test_networks_full_of_skips_equal_the_reference(rule: str) -> None:
    class Skips(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            h = F.relu(h) + h - F.relu6(h) * 0.5
            h = torch.cat([h[:, :3], (h + self.second(h).relu_())[:, 3:]], 1)
            h = h + F.relu(F.relu(h).neg() + 1)
            return self.last(torch.relu(self.hidden(h.mean((2, 3)))))  # type: ignore[no-any-return]

    check(Skips(F.relu), noisy_images(), rule)


@rules
def test_relus_on_weights_and_off_the_path_are_left_alone(rule: str) -> None:
    class Weighted(Net):
        def forward(self, x: Tensor) -> Tensor:
            F.relu(self.second(F.relu(self.first(x)))).sum()  # leads nowhere
            h = F.relu(F.conv2d(x, F.relu(self.first.weight).clamp(min=0), self.first.bias, padding=1))
            return self.last(h.mean((2, 3)).repeat(1, 2)[:, :8])  # type: ignore[no-any-return]

    model = Weighted(F.relu).eval()
    found = explained(model, noisy_images(), rule)
    assert found.coverage is not None
    assert found.coverage.rewritten == {"relu": 1}
    with torch.no_grad():
        twin = Weighted(F.relu).requires_grad_(requires_grad=False).eval()
    assert torch.equal(found.values, reference(twin, noisy_images(), 1, rule, 60).values)


# Smooth activations ----------------------------------------------------------------------------------------------

SMOOTH: Mapping[str, tuple[Form, str]] = {
    "leaky relu": (nn.LeakyReLU(0.2), "leaky_relu"),
    "leaky relu in place": (nn.LeakyReLU(0.2, inplace=True), "leaky_relu"),
    "prelu": (nn.PReLU(6, 0.3).double(), "prelu"),
    "elu": (nn.ELU(0.7), "elu"),
    "elu in place": (nn.ELU(0.7, inplace=True), "elu"),
    "selu": (F.selu, "elu"),
    "selu in place": (nn.SELU(inplace=True), "elu"),
    "celu": (nn.CELU(0.5), "celu"),
    "celu in place": (nn.CELU(0.5, inplace=True), "celu"),
    "gelu": (F.gelu, "gelu"),
    "gelu by tanh": (nn.GELU("tanh"), "gelu"),
    "silu": (F.silu, "silu"),
    "silu in place": (nn.SiLU(inplace=True), "silu"),
    "mish": (F.mish, "mish"),
    "mish in place": (nn.Mish(inplace=True), "mish"),
    "hardswish": (F.hardswish, "hardswish"),
    "hardswish in place": (nn.Hardswish(inplace=True), "hardswish"),
    "softplus": (nn.Softplus(2.0), "softplus"),
}


@rules
@pytest.mark.parametrize("name", SMOOTH)
def test_positive_lets_the_positive_signal_through_times_the_true_derivative(name: str, rule: str) -> None:
    form, kind = SMOOTH[name]
    found = check(Net(form).double(), noisy_images(dtype=torch.float64), rule, most=1e-12, smooth="positive")
    assert found.coverage is not None
    assert found.coverage.rewritten == {"relu": 1, kind: 2}
    assert found.coverage.passed == {}


@rules
@pytest.mark.parametrize("name", SMOOTH)
def test_leave_keeps_the_derivative_and_counts_it(name: str, rule: str) -> None:
    form, kind = SMOOTH[name]
    found = check(Net(form, F.relu6).double(), noisy_images(dtype=torch.float64), rule, most=1e-12)
    assert found.coverage is not None
    assert found.coverage.rewritten == {"relu": 1, "relu6": 1}
    assert found.coverage.passed == {kind: 1}


@rules
def test_leave_is_the_default_and_differs_from_positive(rule: str) -> None:
    model, x = Net(F.gelu).eval(), noisy_images()
    default = explained(model, x, rule)
    assert torch.equal(default.values, explained(model, x, rule, smooth="leave").values)
    assert error(default.values, explained(model, x, rule, smooth="positive").values) > 1e-3


class Smooth(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.other(self.second(self.form(self.first(x))))
        return self.last(self.form(self.hidden(h.mean((2, 3)))))  # type: ignore[no-any-return]


@rules
def test_a_network_without_rectifiers_is_refused_and_the_option_named(rule: str) -> None:
    with pytest.raises(NotApplicableError, match=r'smooth="positive".*(2 silu, 1 gelu|1 gelu, 2 silu)'):
        explained(Smooth(F.silu, F.gelu), noisy_images(), rule)
    with pytest.raises(NotApplicableError, match="no ReLU"):
        explained(Smooth(torch.tanh), noisy_images(), rule)
    with pytest.raises(NotApplicableError, match="no ReLU"):
        explained(Smooth(torch.tanh), noisy_images(), rule, smooth="positive")
    found = explained(Smooth(F.silu, F.gelu), noisy_images(), rule, smooth="positive")
    assert found.coverage is not None
    assert found.coverage.rewritten == {"silu": 2, "gelu": 1}


class SwishImplementation(torch.autograd.Function):
    """The Swish that efficientnet_pytorch writes to save memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,), (grad,) = ctx.saved_tensors, grads
        return grad * x.sigmoid() * (1 + x * (1 - x.sigmoid()))


def test_a_swish_with_its_own_backward_is_a_swish_and_no_relu() -> None:
    model, twin, x = Smooth(SwishImplementation.apply), Smooth(F.silu), noisy_images()
    twin.load_state_dict(model.state_dict())
    with pytest.raises(NotApplicableError, match=r'no ReLU was called.*smooth="positive" to rewrite its \d swish$'):
        GuidedBackprop(model).attribute(x, 0)
    found, expected = (GuidedBackprop(m, smooth="positive").attribute(x, 0) for m in (model, twin))
    torch.testing.assert_close(found.values, expected.values)


class CudnnRNN(SwishImplementation):
    """The backward of a recurrent layer of cuDNN in evaluation mode."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("cudnn RNN backward can only be called in training mode")


def test_the_missing_backward_of_cudnn_names_its_cure() -> None:
    with pytest.raises(ModelError, match=r"torch\.backends\.cudnn\.flags\(enabled=False\)"):
        VanillaGradient(Smooth(CudnnRNN.apply)).attribute(noisy_images(), 0)


@rules
def test_clips_elsewhere_than_at_0_are_no_rectifiers(rule: str) -> None:
    for form in (nn.Hardtanh(), lambda h: h.clamp(min=-1), lambda h: h.clamp(max=1), lambda h: F.threshold(h, 0.5, 0)):
        with pytest.raises(NotApplicableError, match="no ReLU"):
            explained(Smooth(form), noisy_images(), rule)
    with pytest.raises(NotApplicableError, match="no ReLU"):
        explained(Smooth(lambda h: torch.maximum(h, -h)), noisy_images(), rule)


# What the graph cannot show --------------------------------------------------------------------------------------


class OwnReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return gradients[0] * (x > 0)


class JitterReLU(OwnReLU):
    """Has "jit" in its name, and nothing to do with TorchScript."""


def masked_in_place(h: Tensor) -> Tensor:
    h[h < 0] = 0
    return h


def zero_in_place(h: Tensor) -> Tensor:
    h[h < 0] = torch.tensor(0.0)
    return h


def own(function: type[torch.autograd.Function]) -> Form:
    return lambda h: function.apply(h)


HIDDEN: Mapping[str, tuple[Form, str]] = {
    "where": (lambda h: torch.where(h > 0, h, 0.0), "where"),
    "where with zeros": (lambda h: torch.where(h > 0, h, torch.zeros_like(h)), "where"),
    "product with a bool": (lambda h: h * (h > 0), "mask"),
    "product with a float": (lambda h: (h > 0).float() * h, "mask"),
    "product with an int": (lambda h: h * (h > 0).int(), "mask"),
    "product in place": (lambda h: h.clone().mul_(h > 0), "mask"),
    "masked_fill": (lambda h: h.masked_fill(h < 0, 0), "masked_fill"),
    "masked_fill_": (lambda h: h.masked_fill_(h < 0, 0), "masked_fill"),
    "assignment": (masked_in_place, "masked_fill"),
    "assignment of a tensor": (zero_in_place, "masked_fill"),
    "a function of its own": (own(OwnReLU), "OwnReLU"),
    "a function with jit in its name": (own(JitterReLU), "JitterReLU"),
}


@rules
@pytest.mark.parametrize("name", HIDDEN)
def test_a_relu_written_by_hand_is_named_in_a_warning(name: str, rule: str) -> None:
    form, word = HIDDEN[name]
    with pytest.warns(SaliencyWarning, match=f"2 .*{word}"):
        found = explained(Net(form), noisy_images(), rule)
    assert found.coverage is not None
    assert sum(found.coverage.hidden.values()) == 2
    assert any(word in kind for kind in found.coverage.hidden)
    assert found.coverage.rewritten == {"relu": 1}


@rules
@pytest.mark.parametrize("name", HIDDEN)
def test_nothing_but_relus_written_by_hand_is_refused(name: str, rule: str) -> None:
    form, word = HIDDEN[name]
    with pytest.raises(NotApplicableError, match=word):
        explained(Smooth(form), noisy_images(), rule)


def relu_of_a_part(h: Tensor) -> Tensor:
    h[:, :3].relu_()
    return h


def relu_of_the_base(h: Tensor) -> Tensor:
    F.relu(h.flatten(1), inplace=True)
    return h


VIEWS: Mapping[str, Form] = {
    # The norm has no gradient of a sum, so positions have weights.
    "instance norm": lambda h: F.relu_(F.instance_norm(h)) * torch.linspace(0.5, 1.5, h.shape[-1]),
    "flatten": lambda h: F.relu_(h.flatten(1)),
    "view": lambda h: F.relu6(h.view(len(h), -1, 4), inplace=True),
    "permute": lambda h: F.relu_(h.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
    "squeeze": lambda h: F.threshold(h.unsqueeze(1).squeeze(1), 0, 0, inplace=True),
    "channels last": lambda h: h.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1).clamp_(0, 2).mT.mT,
    "twice": lambda h: h.flatten(1).mul_(0.5).relu_(),
    "base": relu_of_the_base,
    "leaky relu": lambda h: F.leaky_relu_(h.flatten(1), 0.1),
    "silu": lambda h: F.silu(F.instance_norm(h), inplace=True),
    "elu": lambda h: F.elu_(h.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
    "hardswish": lambda h: F.hardswish(h.view(len(h), -1, 4), inplace=True),
}


@rules
@pytest.mark.parametrize("name", VIEWS)
def test_an_activation_in_place_on_a_view_of_a_whole_tensor_equals_the_reference(name: str, rule: str) -> None:
    """PyTorch puts it inside another node, with the gradients of the viewed tensor."""
    with exact_or_needs_torch("2.14"):
        check(Net(lambda h: VIEWS[name](h).reshape(h.shape)), noisy_images(), rule, most=1e-5, smooth="positive")


@rules
def test_a_relu_in_place_on_a_part_is_refused_with_its_cure(rule: str) -> None:
    shown = torch.__version__ >= "2.14"
    with pytest.raises(NotApplicableError, match="part of a tensor.*inplace=False" if shown else "torch>=2.14"):
        explained(Net(relu_of_a_part), noisy_images(), rule)


def silu_of_a_part(h: Tensor) -> Tensor:
    h = h * 1
    F.silu(h[:, :1], inplace=True)
    return F.relu(h)


def test_a_silu_in_place_on_a_part_keeps_its_derivative_but_cannot_be_rewritten() -> None:
    x, whole = noisy_images(), Net(lambda h: F.relu(torch.cat([F.silu(h[:, :1]), h[:, 1:]], 1)))
    with exact_or_needs_torch("2.14"):
        values = GuidedBackprop(Net(silu_of_a_part)).attribute(x, 0).values
        torch.testing.assert_close(values, GuidedBackprop(whole).attribute(x, 0).values)
        with pytest.raises(NotApplicableError, match=r"a silu works in place on a part of a tensor.*inplace=False"):
            GuidedBackprop(Net(silu_of_a_part), smooth="positive").attribute(x, 0)


@rules
def test_a_reentrant_checkpoint_is_refused_with_the_cure(rule: str) -> None:
    model = Net(lambda h: checkpoint(F.relu, h, use_reentrant=True))
    with pytest.raises(NotApplicableError, match="use_reentrant=False"):
        explained(model, noisy_images(), rule)


@rules
def test_ordinary_products_and_selections_raise_no_alarm(rule: str) -> None:
    scale, ones = torch.rand(1, 6, 1, 1), torch.ones(1, 6, 1, 1)

    def form(h: Tensor) -> Tensor:
        h = F.dropout(h * 0.5, training=False) * scale * torch.tensor(2.0)
        h = h * ones * torch.ones(8, 8)  # a layer scale or a norm's weight that was never trained
        h = F.pad(F.relu(h), (1, 1, 1, 1))[:, :, 1:-1, 1:-1] / torch.full((6, 1, 1), 3.0)
        h = torch.where(h > 1, h, 2 * h) + (h - h.mean((2, 3), keepdim=True)) * torch.sigmoid(h)
        h[:, :2] = h[:, 2:4] * 2
        h[:, 3:5] += h[:, :2]
        return h

    check(Net(form), noisy_images(), rule)


class OwnReLUInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x > 0)
        ctx.mark_dirty(x)
        return x.clamp_(min=0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * ctx.saved_tensors[0]  # type: ignore[no-any-return]


PARTS: Mapping[str, tuple[Callable[[Tensor], Any], str]] = {
    "product": (lambda part: part.mul_(2), ""),
    "number": (lambda part: part.fill_(0.5), ""),
    "assignment by a mask": (masked_in_place, "masked_fill"),
    "product with a mask": (lambda part: part.mul_(part > 0), "mask"),
    "own function": (OwnReLUInPlace.apply, "OwnReLUInPlace"),
}


@rules
@pytest.mark.parametrize("name", PARTS)
def test_an_operation_in_place_on_a_part_is_exact_or_named(name: str, rule: str) -> None:
    operation, word = PARTS[name]

    def form(h: Tensor) -> Tensor:
        h = F.relu(h)
        part = (h - 0.5)[:, :3]
        operation(part)
        return h + part.mean(1, keepdim=True)

    shown = torch.__version__ >= "2.14"
    alarm = pytest.warns(SaliencyWarning, match=word) if word and shown else nullcontext()
    with exact_or_needs_torch("2.14"), alarm:
        found = explained(Net(form), noisy_images(), rule)
        expected = reference(Net(form).eval(), noisy_images(), 1, rule, 60)
        assert torch.equal(found.values, expected.values)


@rules
def test_hooks_of_the_user_raise_no_alarm(rule: str) -> None:
    model = Net(F.relu)
    model.first.register_full_backward_hook(lambda module, before, after: None)
    check(model, noisy_images(), rule)


def test_torchvisions_own_operations_raise_no_alarm() -> None:
    ops = pytest.importorskip("torchvision.ops")
    boxes = [torch.tensor([[0.0, 0.0, 5.0, 5.0]])] * 2
    check(Net(lambda h: ops.roi_align(F.relu(h), boxes, 8)), noisy_images(), "guided_backprop", target=3)


# RectGrad by hand ------------------------------------------------------------------------------------------------


def test_rectgrad_on_two_layers_equals_the_closed_form() -> None:
    """Three units relu(Ux) with weights v: a = (5, 0, 2), R = (2, 3, -4), a R = (10, 0, -8), tau = 0: only R_0 passes.

    At q = 0 tau is -8, so the shut unit passes its 3 too: its product 0 exceeds tau.
    """
    upper = torch.tensor([[1.0, 2.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float64)
    weights = torch.tensor([2.0, 3.0, -4.0], dtype=torch.float64)
    model, x = summed(lambda t: F.relu(t @ upper.T) * weights), vector(1.0, 2.0, 3.0)
    at_half = explained(model, x, "rectgrad", 50, target=0).values.flatten()
    assert at_half.tolist() == [1.0 * (1 * 2), 2.0 * (2 * 2), 0.0]
    at_0 = explained(model, x, "rectgrad", 0, target=0).values.flatten()
    assert at_0.tolist() == [1.0 * (1 * 2 - 1 * 3), 2.0 * (2 * 2), 0.0]
    assert not explained(model, x, "rectgrad", 100, target=0).values.any()


@pytest.mark.parametrize("percentile", [0, 0.1, 10, 12.5, 25, 37.5, 50, 62.5, 75, 87.5, 98, 99.9, 100])
@pytest.mark.parametrize("units", [1, 2, 3, 4, 5, 9, 11, 21])
def test_the_threshold_is_the_nearest_rank_of_each_image(units: int, percentile: float) -> None:
    """Halves included: 25 % of 3 units is rank 0.5, which goes to the even one. Images differ in scale and order."""
    random = torch.Generator().manual_seed(units)
    x = torch.rand(3, 3, 1, 7, generator=random, dtype=torch.float64) * torch.tensor([1.0, 10.0, 0.1]).view(3, 1, 1, 1)
    weights = torch.randn(21, generator=random, dtype=torch.float64)[:units]
    model = summed(lambda t: F.relu(t[:, :units]) * weights)
    found = explained(model, x, "rectgrad", percentile, target=0).values.flatten(1)
    product = x.flatten(1)[:, :units] * weights
    tau = np.percentile(product.numpy(), percentile, axis=1, method="nearest")
    expected = torch.where(product > torch.from_numpy(tau)[:, None], product, torch.zeros_like(product))
    assert torch.equal(found[:, :units], expected)
    assert not found[:, units:].any()
    alone = [explained(model, x[i : i + 1], "rectgrad", percentile, target=0).values.flatten(1) for i in range(3)]
    assert torch.equal(found, torch.cat(alone))


def test_rectgrad_passes_nothing_at_a_saturated_relu6() -> None:
    model = summed(lambda t: F.relu6(t) * torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    assert explained(model, vector(5.0, 4.0, 7.0), "rectgrad", 0, target=0).values.flatten().tolist() == [0.0, 8.0, 0.0]
