"""DeepLIFT and DeepSHAP share the difference of the scores completely, on any network, or say what is missing."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saliency import LRP, DeepLIFT, DeepSHAP, PerImage, Together, VanillaGradient
from saliency.attribution.forward import Needs, SharedForward
from saliency.errors import MethodError, NonFiniteError, NotApplicableError, SaliencyWarning
from saliency.hooks.autograd_graph import nodes_between, saved
from saliency.hooks.operations import SavedValues
from saliency.testing.case import images, tiny_model
from tests.models import FunctionModel, small_vgg
from tests.relevance.vision_transformers import MODELS


def relative_residual(model: nn.Module, x: Tensor) -> float:
    """The largest residual relative to the scores, which both are checked against the model."""
    found = DeepLIFT(model).attribute(x, 1)
    base = DeepLIFT(model).attribute(torch.zeros_like(x), 1).scores
    rise = found.scores - base
    assert found.residual is not None
    torch.testing.assert_close(found.values.sum((1, 2, 3)) + found.residual, rise, rtol=1e-3, atol=1e-5)
    return float((found.residual / torch.maximum(found.scores.abs(), base.abs())).abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_values_are_complete_on_every_transformer(name: str) -> None:
    model, x = MODELS[name]()
    assert relative_residual(copy.deepcopy(model).double(), x.double()) < 1e-8
    assert relative_residual(model, x) < 1e-4


@pytest.mark.parametrize("build", [tiny_model, small_vgg])
def test_values_are_complete_on_convolutional_networks(build: Callable[[], nn.Module]) -> None:
    x = images(2, (32, 32))
    assert relative_residual(build().eval().double(), x.double()) < 1e-8
    assert relative_residual(build().eval(), x) < 1e-4


def _set_slice(x: Tensor) -> Tensor:
    x = x * 1
    x[:, 1:] = x[:, :2].tanh()
    return x.mul_(x.sigmoid())


def summed(function: Callable[[Tensor], Tensor]) -> nn.Module:
    """A model whose score is a weighted sum of a function of the image."""

    def score(x: Tensor) -> Tensor:
        y = function(x).flatten(1)
        return y @ torch.linspace(-1, 2, y.shape[1], dtype=y.dtype)

    return FunctionModel(score)


COMPLETE: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda x: x.amax(1),
    "amin": lambda x: x.amin((1, 2)),
    "max": lambda x: x.max(1)[0],
    "adaptive max pool": lambda x: F.adaptive_max_pool2d(x, 2),
    "padded max pool": lambda x: F.max_pool2d(x, 3, 1, 1),
    "minimum": lambda x: torch.minimum(x[:, :1], x),
    "std": lambda x: x.std(1),
    "norm": lambda x: x.norm(dim=1),
    "logsumexp": lambda x: x.logsumexp(1),
    "log-softmax": lambda x: x.log_softmax(1),
    "power": lambda x: (1 + x.abs()) ** x.sigmoid(),
    "base": lambda x: 2**x,
    "instance norm": F.instance_norm,
    "local response norm": lambda x: F.local_response_norm(x, 2),
    "einsum": lambda x: torch.einsum("nchw,nkhw->nck", x, x),
    "kernels from the image": lambda x: F.conv2d(
        x.reshape(1, -1, *x.shape[2:]), x[..., :2, :2].reshape(-1, 1, 2, 2), groups=3 * len(x)
    ).reshape(len(x), -1),
    "bicubic": lambda x: F.interpolate(x, size=9, mode="bicubic"),
    "set slice": _set_slice,
    "filter of frequencies": lambda x: torch.fft.irfft2(torch.fft.rfft2(x.tanh()) * (1 + 2j)),
    "random ReLU": F.rrelu,
    "determinant": lambda x: torch.linalg.slogdet(x @ x.mT + torch.eye(6, dtype=x.dtype))[1],
    "grouped keys": lambda x: F.scaled_dot_product_attention(
        *(torch.cat([x, -x], 1), x[:, :2], x[:, 1:]), enable_gqa=True
    ),
    "shift of all logits": lambda x: (
        (x + 1e6 * x.mean(-1, keepdim=True)).softmax(-1) @ torch.arange(1e4, 1e4 + 6, dtype=x.dtype)
    ),
    "hidden logits": lambda x: x.masked_fill(torch.ones_like(x, dtype=torch.bool).triu(1), -torch.inf).softmax(-1),
}


@pytest.mark.parametrize("name", COMPLETE)
def test_each_operation_is_complete(name: str) -> None:
    found = DeepLIFT(summed(COMPLETE[name]), baseline=0.3).attribute(images(2, (6, 6), dtype=torch.float64), 0)
    assert found.residual is not None
    assert float(found.residual.abs().max()) < 1e-8 * float(found.values.abs().sum())


@pytest.mark.parametrize(
    ("least", "most"),
    [
        (lambda x: x.amin((1, 2)), lambda x: x.amax((1, 2))),
        (lambda x: x.min(3)[0], lambda x: x.max(3)[0]),
        (lambda x: torch.minimum(x[:, :1], x), lambda x: torch.maximum(x[:, :1], x)),
    ],
)
def test_a_minimum_is_the_negative_maximum_of_negatives(
    least: Callable[[Tensor], Tensor], most: Callable[[Tensor], Tensor]
) -> None:
    x = images(2, (6, 6), dtype=torch.float64)
    functions = (least, lambda x: -most(-x))
    values = [DeepLIFT(summed(function), baseline=0.3).attribute(x, 0).values for function in functions]
    torch.testing.assert_close(*values)


def test_a_linear_model_gives_weights_times_difference() -> None:
    linear = nn.Linear(48, 3).double()
    x = images(2, (4, 4), dtype=torch.float64)
    found = DeepLIFT(nn.Sequential(nn.Flatten(), linear), baseline=0.5).attribute(x, [0, 2]).values
    weights = linear.weight.detach()[[0, 2]].view_as(x)
    torch.testing.assert_close(found, weights * (x - 0.5))


# Baselines.


def test_several_baselines_give_the_mean_over_them() -> None:
    model, x = tiny_model().double(), images(2, dtype=torch.float64)
    alone = [DeepLIFT(model, baseline=level).attribute(x, 1).values for level in (-1, 0.5)]
    both = DeepLIFT(model, baseline=[-1, 0.5]).attribute(x, 1)
    torch.testing.assert_close(both.values, (alone[0] + alone[1]) / 2)
    assert both.error is None
    given = DeepLIFT(model, baseline=PerImage([[-1, 0.5], 0.5])).attribute(x, 1)
    torch.testing.assert_close(given.values, torch.stack([both.values[0], alone[1][1]]))


def test_deep_shap_has_the_standard_error_of_its_baselines() -> None:
    model, x = tiny_model().double(), images(2, dtype=torch.float64)
    levels = [-1.0, 0.0, 0.5]
    each = torch.stack([DeepLIFT(model, baseline=level).attribute(x, 1).values for level in levels])
    found = DeepSHAP(model, baseline=levels).attribute(x, 1)
    torch.testing.assert_close(found.values, each.mean(0))
    torch.testing.assert_close(found.error, each.std(0) / 3**0.5)


def test_the_colours_of_deep_shap_follow_the_seed() -> None:
    model, x = tiny_model(), images(2)
    first, again, other = (DeepSHAP(model, passes=3, seed=seed).attribute(x, 1) for seed in (0, 0, 1))
    assert torch.equal(first.values, again.values)
    assert not torch.equal(first.values, other.values)
    assert first.error is not None
    assert DeepSHAP(model, passes=1).attribute(x, 1).error is None


def test_classes_share_both_forwards() -> None:
    model, forwards = tiny_model(), []
    model.register_forward_hook(lambda *arguments: forwards.append(1))
    DeepLIFT(model).attribute_classes(images(2), [0, 1, None])
    assert len(forwards) == 2


@pytest.mark.slow
def test_methods_that_share_the_forward_change_nothing() -> None:
    model, x = small_vgg().eval(), images(2, (32, 32))
    methods = [DeepSHAP(model, passes=2), VanillaGradient(model), DeepLIFT(model), LRP(model)]
    for found in (Together(*methods).attribute(x, 1), Together(*methods[::-1]).attribute(x, 1)[::-1]):
        for explanation, method in zip(found, methods, strict=True):
            torch.testing.assert_close(explanation.values, method.attribute(x, 1).values)


def test_only_operands_of_nonlinear_operations_are_kept() -> None:
    conv, norm, x = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).eval(), images(2)
    model = nn.Sequential(conv, norm, nn.ReLU(inplace=True), nn.MaxPool2d(2))
    forward = SharedForward(model, x, Needs(values=SavedValues.CHANGES))
    pool, relu, batch_norm, convolution = nodes_between(forward.output, forward.x)[:4]
    with pytest.raises(RuntimeError):
        saved(pool, "result1")
    assert bool(saved(relu, "result").isnan().all())
    assert bool(saved(convolution, "input").isnan().all())
    assert torch.equal(saved(convolution, "weight"), conv.weight)
    operations = [forward.operations.operation(node) for node in (relu, batch_norm)]
    assert operations[0] is not None
    torch.testing.assert_close(operations[0].args["self"], norm(conv(x)))
    assert operations[1] is not None
    assert operations[1].args["input"] is None
    assert operations[0].result is operations[1].result is None
    pooled = forward.operations.operation(pool)
    assert pooled is not None
    values, indices = pooled.result
    assert values is None
    assert torch.equal(indices, F.max_pool2d_with_indices(norm(conv(x)).relu(), [2, 2])[1])


# What cannot be shared.


def test_a_large_residual_warns_of_hand_written_relus() -> None:
    model = summed(lambda x: x * (x > 0) + x.tanh())
    with pytest.warns(SaliencyWarning, match=r"miss .* use torch.relu"):
        found = DeepLIFT(model, baseline=-0.5).attribute(images(2, dtype=torch.float64), 0)
    assert found.residual is not None
    assert bool(found.residual.any())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DeepLIFT(model, baseline=-0.5, unknown="gradient").attribute(images(2, dtype=torch.float64), 0)


def test_a_baseline_with_other_operations_is_refused() -> None:
    model = summed(lambda x: x.tanh() if bool(x.mean() > 0) else x.relu())
    with pytest.raises(NotApplicableError, match="runs other operations for the baseline"):
        DeepLIFT(model, baseline=-1).attribute(images(2).abs(), 0)


class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(y := x.exp())
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.saved_tensors[0]


def _in_place_on_a_part(x: Tensor) -> Tensor:
    x = x * 1
    x[:, :2].tanh_()
    return x


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (Exp.apply, 'ExpBackward.*unknown="gradient"'),
        (_in_place_on_a_part, r"tanh in place on a part.*inplace=False\)$"),
        (lambda x: torch.fft.rfft2(x).abs(), 'abs of complex numbers.*unknown="gradient"'),
    ],
)
def test_an_operation_without_a_rule_is_refused_by_name(function: Callable[[Tensor], Tensor], message: str) -> None:
    model, x = summed(function), images(2)
    with pytest.raises(NotApplicableError, match=message):
        DeepLIFT(model).attribute(x, 0)
    assert bool(DeepLIFT(model, unknown="gradient").attribute(x, 0).values.any())


def test_saved_tensors_on_the_cpu_change_nothing() -> None:
    model, x = summed(lambda x: F.max_pool2d(x.tanh() * x.sigmoid(), 2)), images(2)
    plain = DeepLIFT(model).attribute(x, 0)
    with torch.autograd.graph.save_on_cpu():
        assert torch.equal(DeepLIFT(model).attribute(x, 0).values, plain.values)


@pytest.mark.filterwarnings("ignore:deep_lift. the values miss nan")
@pytest.mark.parametrize("pool", [lambda x: F.max_pool2d(x, 2), lambda x: x.amax((2, 3))])
def test_an_infinite_gradient_behind_a_pool_is_an_error(pool: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(NonFiniteError):
        DeepLIFT(summed(lambda x: pool(x).sqrt())).attribute(torch.zeros(1, 3, 8, 8), 0)


def test_options_are_checked() -> None:
    with pytest.raises(MethodError, match="unknown='skip' is not one of 'refuse', 'gradient'"):
        DeepLIFT(tiny_model(), unknown="skip")  # type: ignore[arg-type]
    with pytest.raises(MethodError, match="passes=0"):
        DeepSHAP(tiny_model(), passes=0)


def test_the_model_is_freed_after_the_call() -> None:
    model = tiny_model()
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    DeepLIFT(model).attribute(images(1), 0)
    del model
    gc.collect()
    assert not any(parameter() is not None for parameter in parameters)
