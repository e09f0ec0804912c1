"""The walk, and relevance propagation, on a sample of the architectures of `make zoo`."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import saliency
from saliency.attribution.explanation import BatchAttribution
from saliency.attribution.forward import Needs, TargetGradients
from saliency.hooks.operations import SavedValues
from tests.reference import error
from tests.relevance.plain_walk import PlainWalk
from tests.relevance.vision_transformers import drawn

TARGETS = [1, 3]

# Small networks of distinct families: in-place operations on parts of tensors, scaled sums, gates, hand-written norms,
# global response norms, standardised weights, relative positions, pooled queries, mixers and state spaces.
NETWORKS = (
    "test_byobnet",
    "test_coatnet",
    "test_convnext2",
    "test_efficientnet_evos",
    "test_efficientnet_gn",
    "test_mambaout",
    "test_maxvit",
    "test_nfnet",
    "test_resnet",
    "test_vit3",
    "efficientvim_m1",
    "ghostnet_050",
    "starnet_s050",
)


@cache
def _network(name: str) -> tuple[nn.Module, Tensor]:
    timm = pytest.importorskip("timm")
    options = {"img_size": 64} if "vit" in name or "coat" in name else {}
    model, x = drawn(lambda: timm.create_model(name, num_classes=5, **options), 64)
    return model.double(), x.double()


@pytest.mark.parametrize("name", NETWORKS)
def test_the_plain_walk_is_the_gradient(name: str) -> None:
    model, x = _network(name)
    methods = [PlainWalk(model), saliency.InputXGradient(model)]
    walked, expected = saliency.Together(*methods).attribute(x, TARGETS)
    assert error(walked.values, expected.values) < 1e-9


@pytest.mark.parametrize("name", NETWORKS)
def test_relevance_is_conserved_and_a_batch_is_its_images(name: str) -> None:
    model, x = _network(name)
    methods = [saliency.LRP(model), saliency.AttnLRP(model)]
    batch = saliency.Together(*methods).attribute(x, TARGETS)
    single = saliency.Together(*methods).attribute(x[1:], TARGETS[1])
    for whole, one in zip(batch, single, strict=True):
        assert whole.ledger is not None
        assert one.ledger is not None
        torch.testing.assert_close(whole.ledger.sum(1), whole.scores, rtol=1e-6, atol=0)
        assert error(whole.values[1:], one.values) < 1e-6
        shares = dict(zip(one.ledger_names, one.ledger[0], strict=True))
        for name, share in zip(whole.ledger_names, whole.ledger[1], strict=True):
            assert abs(share - shares.get(name, 0)) < 1e-6 * one.ledger.abs().max()


class _Network(nn.Module):
    """A network with some function of its activations."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)
        self.weight = nn.Parameter(torch.rand(4, 1, 1))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Return five scores."""
        y: Tensor = self.last(self.function(self.first(x), self.weight).mean((2, 3)))
        return y


def _norm_by_deviation(y: Tensor, weight: Tensor) -> Tensor:
    return (y - y.mean(1, keepdim=True)) / (y.std(1, keepdim=True) + 1e-6) * weight + weight


def _norm_by_variance(y: Tensor, weight: Tensor) -> Tensor:
    variance, mean = torch.var_mean(y, 1, keepdim=True)
    return (y - mean) * torch.rsqrt(variance + 1e-6) * weight + weight


def _assigned(y: Tensor, weight: Tensor) -> Tensor:
    y[:, :2] = y[:, 2:].clone() ** 2
    return y[:, :2].repeat(1, 2, 1, 1) * weight


def _rectified_in_place(y: Tensor, weight: Tensor) -> Tensor:
    y[:, 1:3] += y[:, 2:].clone()
    y[:, 2:] *= weight[2:]
    y[:, :2].relu_()
    return y


def _write(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    def function(y: Tensor, weight: Tensor) -> Tensor:
        operands = {"add_": (weight[:2],), "mul_": (y[:, 2:].clone(),), "copy_": (weight[:2].expand(2, 6, 6),)}
        getattr(y[:, :2], name)(*operands.get(name, ()))
        return y

    return function


_CONSERVED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mask from the image": lambda y, weight: y.masked_fill(y < 0, 1.5),
    "choice by the image": lambda y, weight: torch.where(y < 0, weight, y),
    "addcmul with a constant": lambda y, weight: torch.addcmul(weight, weight, y),
    "addcmul of two signals": lambda y, weight: torch.addcmul(weight, y, y.sigmoid()),
    "addcmul of three signals": lambda y, weight: torch.addcmul(y, y, y.sigmoid(), value=0.7),
    "log-softmax": lambda y, weight: y.log_softmax(1) * weight,
    "log-sum-exp": lambda y, weight: y + y.logsumexp((1, 3), keepdim=True),
    "median": lambda y, weight: y + y.median(1, keepdim=True).values,
    "variance": lambda y, weight: y * y.var((2, 3), keepdim=True),
    "norm by its deviation": _norm_by_deviation,
    "norm by its variance": _norm_by_variance,
    "clamp by constants": lambda y, weight: y.clamp(min=weight),
    "assignment to a part": _assigned,
    "linear operations in place on parts": _rectified_in_place,
    # A view without gradient shares the memory of the signal.
    "signal after a detached view": lambda y, weight: y.detach().view_as(y).sigmoid() + y * weight,
    "padding with a value": lambda y, weight: nn.functional.pad(y, (1, 1, 1, 1), value=0.5),
    "values in places of a constant": lambda y, weight: torch.masked_scatter(
        weight.expand_as(y).clone(), torch.arange(4)[:, None, None] > 1, y[:, 2:].contiguous()
    ),
    "filter of frequencies": lambda y, weight: torch.fft.irfft2(torch.fft.rfft2(y) * (weight + 1j)),
    "random ReLU": lambda y, weight: nn.functional.rrelu(y) * weight,
    "chunks": lambda y, weight: torch.cat(torch.unsafe_chunk(y, 2, 1)[::-1], 1),
    "maximum of two signals": lambda y, weight: torch.maximum(y, y * weight),
    "log-sigmoid": lambda y, weight: nn.functional.logsigmoid(y) * weight,
    "logarithm of a softmax": lambda y, weight: y.softmax(1).clamp(1e-9).log() * weight,
    "logit of a sigmoid": lambda y, weight: y.sigmoid().logit() * weight,
    "lerp of two signals": lambda y, weight: torch.lerp(y, y.sigmoid(), weight),
    "lerp from a constant": lambda y, weight: torch.lerp(weight.expand_as(y), y, 0.3),
    "lerp to a constant": lambda y, weight: torch.lerp(y, weight.expand_as(y), 0.3),
    "power with a constant base": lambda y, weight: torch.pow(weight.abs() + 1, y),
    "product of many": lambda y, weight: y.prod(1, keepdim=True) + weight,
    "sums at indices": lambda y, weight: weight.expand_as(y).scatter_add(
        1, torch.arange(4).view(4, 1, 1).expand_as(y), y
    ),
    "sums at an index": lambda y, weight: weight.expand_as(y).index_add(1, torch.tensor([0, 1, 1, 0]), y),
}
_REFUSED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add in place on a part": _write("add_"),
    "copy in place on a part": _write("copy_"),
    "mul in place on a part": _write("mul_"),
    "sigmoid in place on a part": _write("sigmoid_"),
    "maximum": lambda y, weight: torch.maximum(y, weight),
    "lerp": lambda y, weight: torch.lerp(y, y.sigmoid(), y),
    "abs of complex numbers": lambda y, weight: torch.fft.rfft2(y).abs(),
    "log": lambda y, weight: (y.exp() + weight.abs()).log(),
    "logit": lambda y, weight: y.tanh().abs().logit(),
    "_cdist_forward": lambda y, weight: torch.cdist(y, weight.expand(4, 6, 6)),
}


def _drawn(function: Callable[[Tensor, Tensor], Tensor]) -> tuple[nn.Module, Tensor]:
    model, x = drawn(lambda: _Network(function), 8)
    return model.double(), x.double()


@pytest.mark.parametrize("method", [saliency.LRP, saliency.AttnLRP, saliency.CPLRP])
@pytest.mark.parametrize("name", _CONSERVED)
def test_an_operation_keeps_the_ledger_complete(name: str, method: type[saliency.LRP]) -> None:
    model, x = _drawn(_CONSERVED[name])
    explanation = method(model).attribute(x, TARGETS)
    single = method(model).attribute(x[1:], TARGETS[1])
    assert explanation.residual is not None
    assert explanation.residual.abs().max() < 1e-9
    assert error(explanation.values[1:], single.values) < 1e-9


class _WalkWithAllValues(PlainWalk):
    needs = Needs(values=SavedValues.ALL)


@pytest.mark.parametrize("name", _CONSERVED)
def test_the_ledger_does_not_depend_on_the_methods_that_share_the_forward(name: str) -> None:
    model, x = _drawn(_CONSERVED[name])
    alone = saliency.AttnLRP(model).attribute(x, TARGETS)
    _, shared = saliency.Together(_WalkWithAllValues(model), saliency.AttnLRP(model)).attribute(x, TARGETS)
    assert shared.ledger_names == alone.ledger_names
    torch.testing.assert_close(shared.ledger, alone.ledger)


_IN_PLACE: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "relu": lambda y, inplace: F.relu(y, inplace=inplace),
    "relu6": lambda y, inplace: F.relu6(y, inplace=inplace),
    "leaky_relu": lambda y, inplace: F.leaky_relu(y, 0.1, inplace=inplace),
    "silu": lambda y, inplace: F.silu(y, inplace=inplace),
    "elu": lambda y, inplace: F.elu(y, inplace=inplace),
    "hardswish": lambda y, inplace: F.hardswish(y, inplace=inplace),
    "sigmoid": lambda y, inplace: y.sigmoid_() if inplace else y.sigmoid(),
    "linear": lambda y, inplace: y.neg_().add_(0.3).mul_(2).relu_() if inplace else ((0.3 - y) * 2).relu(),
}
_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "instance norm": nn.InstanceNorm2d(4),
    "flatten": lambda y: y.flatten(1),
    "view": lambda y: y.view(len(y), -1, 3),
    "squeeze": lambda y: y.unsqueeze(1).squeeze(1),
    "permute": lambda y: y.permute(0, 2, 3, 1),
}
_WALKS = [
    *(saliency.LRP, saliency.AttnLRP, saliency.DeepLIFT, saliency.FullGrad),
    partial(saliency.LRP, composite={"conv": saliency.relevance.ZPlus(), "activation": saliency.relevance.Pass()}),
]


@pytest.mark.parametrize("method", _WALKS)
@pytest.mark.parametrize("name", _IN_PLACE)
@pytest.mark.parametrize("view", _VIEWS)
def test_an_operation_in_place_on_a_view_of_a_whole_tensor_is_the_operation(
    view: str, name: str, method: Callable[[nn.Module], saliency.Attribution]
) -> None:
    def function(y: Tensor, weight: Tensor, inplace: bool) -> Tensor:
        changed = _IN_PLACE[name](_VIEWS[view](y), inplace)
        return (changed.permute(0, 3, 1, 2) if view == "permute" else changed.reshape(y.shape)) * weight

    model, x = _drawn(partial(function, inplace=True))
    found, expected = (
        method(each).attribute(x, TARGETS) for each in (model, _drawn(partial(function, inplace=False))[0])
    )
    assert found.residual is not None
    assert found.residual.abs().max() < 1e-9
    has_map = view not in ("flatten", "view") or method is not saliency.FullGrad  # flat values have no locations
    assert not has_map or error(found.values, expected.values) < 1e-9


class _Straight(torch.autograd.Function):
    """The identity, whose forward computes its result by operations that have no nodes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, way: Callable[[Tensor], Tensor]) -> Tensor:
        return way(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


_WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "cast": lambda x: x.to(torch.complex128).real.clone(),
    "division": lambda x: (2 * x) / 2,
    "stack": lambda x: torch.stack([x, x]).mean(0),
    "numpy": lambda x: torch.from_numpy(x.detach().numpy().copy()),
}
_FUNCTIONS: dict[str, Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor, Tensor], Tensor]]] = {
    "once": lambda step: lambda y, weight: F.gelu(step(y)) * weight,
    "twice": lambda step: lambda y, weight: step(F.gelu(step(y) + 1)) * weight + 1,
    "chained": lambda step: lambda y, weight: F.gelu(step(step(y))) * weight,
    "before a view": lambda step: lambda y, weight: F.gelu(step(y).flatten(1)).view_as(y) * weight,
    "after a write": lambda step: lambda y, weight: step(y.flatten(1).relu_()).view_as(y).tanh() * weight,
    "weights": lambda step: lambda y, weight: F.gelu(y) * step(weight * 1) + step(weight),
}


@pytest.mark.parametrize("method", [saliency.LRP, saliency.AttnLRP, saliency.DeepLIFT, saliency.FullGrad])
@pytest.mark.parametrize("name", _FUNCTIONS)
@pytest.mark.parametrize("way", _WAYS)
def test_operations_after_a_custom_function_have_their_rules(
    way: str, name: str, method: type[saliency.Attribution]
) -> None:
    model, x = _drawn(_FUNCTIONS[name](lambda y: _Straight.apply(y, _WAYS[way])))
    plain, _ = _drawn(_FUNCTIONS[name](lambda y: y * 1.0))
    is_walk = method is not saliency.FullGrad
    if is_walk and name != "weights":
        with pytest.raises(saliency.errors.NotApplicableError, match="no rule for the operation _StraightBackward"):
            method(model).attribute(x, TARGETS)
    options = {"unknown": "gradient"} if is_walk else {}
    found, expected = (method(each, **options).attribute(x, TARGETS).values for each in (model, plain))
    assert error(found, expected) < 1e-9


@pytest.mark.parametrize("method", [saliency.LRP, saliency.AttnLRP, saliency.DeepLIFT])
def test_what_runs_in_a_thread_of_the_model_is_never_passed_by_gradient(method: type[saliency.Attribution]) -> None:
    def function(y: Tensor, weight: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(F.gelu, y).result() * weight

    model, x = _drawn(function)
    with pytest.raises(saliency.errors.NotApplicableError, match=r"was not recorded.*thread"):
        method(model, unknown="gradient").attribute(x, TARGETS)


@pytest.mark.parametrize("name", _REFUSED)
def test_an_operation_without_a_rule_is_refused_with_its_name(name: str) -> None:
    model, x = _drawn(_REFUSED[name])
    with pytest.raises(saliency.errors.NotApplicableError, match=f"no rule for the operation {name}"):
        saliency.LRP(model).attribute(x, TARGETS)
    by_gradient = saliency.LRP(model, unknown="gradient").attribute(x, TARGETS)
    assert " by gradient" in str(by_gradient.coverage)


def _scored() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 6))
    return net.double().eval(), torch.randn(2, 3, 6, 6, dtype=torch.float64)


_METHODS = [partial(saliency.LRP, composite="gamma"), saliency.LRP, saliency.AttnLRP, saliency.CPLRP]
_VECTOR = torch.linspace(-1, 2, 6, dtype=torch.float64)
_SCORES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "@": (lambda y: y @ _VECTOR, lambda y: (y @ _VECTOR[:, None])[:, 0]),
    "@ from the left": (lambda y: _VECTOR @ y.T, lambda y: (y @ _VECTOR[:, None])[:, 0]),
    "matrix times a signal": (lambda y: torch.stack([(_VECTOR[None] @ r)[0] for r in y]), lambda y: y @ _VECTOR),
    "dot": (lambda y: torch.stack([torch.dot(row, _VECTOR) for row in y]), lambda y: y @ _VECTOR),
    "vdot": (lambda y: torch.stack([torch.vdot(_VECTOR, row) for row in y]), lambda y: y @ _VECTOR),
    "addmv": (
        lambda y: torch.addmv(torch.ones(len(y)).double(), y, _VECTOR, beta=2, alpha=3),
        lambda y: torch.addmm(torch.ones(len(y), 1).double(), y, _VECTOR[:, None], beta=2, alpha=3)[:, 0],
    ),
    "addmv of two signals": (
        lambda y: torch.addmv(y[:, 0], y, _VECTOR, beta=2),
        lambda y: 2 * y[:, 0] + y @ _VECTOR,
    ),
    "addmm of two signals": (
        lambda y: torch.addmm(y[:, :1], y, _VECTOR[:, None], beta=2)[:, 0],
        lambda y: 2 * y[:, 0] + y @ _VECTOR,
    ),
    "lerp": (lambda y: torch.lerp(y[:, 0], y[:, 1], 0.3), lambda y: 0.7 * y[:, 0] + 0.3 * y[:, 1]),
    "trace": (lambda y: torch.stack([row.view(2, 3).trace() for row in y]), lambda y: y[:, 0] + y[:, 4]),
    "take": (lambda y: y.take(torch.tensor([1, 7])[: len(y)]), lambda y: y[:, 1]),
    "nansum": (lambda y: y.nansum(1), lambda y: y.sum(1)),
    "prod of two": (lambda y: y[:, :2].prod(1), lambda y: y[:, 0] * y[:, 1]),
    "third smallest": (lambda y: y.kthvalue(3, 1).values, lambda y: y.sort(1).values[:, 2]),
    "scatter_add": (
        lambda y: y.new_zeros(len(y), 2).scatter_add(1, torch.tensor([[0, 1, 0, 1, 0, 1]] * len(y)), y)[:, 1],
        lambda y: y[:, 1::2].sum(1),
    ),
    "logarithm of a softmax": (lambda y: y.softmax(1)[:, 1].log(), lambda y: y.log_softmax(1)[:, 1]),
    "contrast of logarithms": (
        lambda y: y.softmax(1)[:, 1].log() - y.softmax(1)[:, 2].log(),
        lambda y: y.log_softmax(1)[:, 1] - y.log_softmax(1)[:, 2],
    ),
    "logit of a sigmoid": (lambda y: y.sigmoid().logit()[:, 2:5].mean(1), lambda y: y[:, 2:5].mean(1)),
    "safe logit of a sigmoid": (lambda y: y.sigmoid().logit(1e-6)[:, 2:5].mean(1), lambda y: y[:, 2:5].mean(1)),
    # Increasing functions of a score have its map.
    "sigmoid": (lambda y: y.sigmoid()[:, 1], lambda y: y[:, 1]),
    "sigmoids one by one": (lambda y: torch.stack([row.sigmoid()[1] for row in y]), lambda y: y[:, 1]),
    "logarithm of a sigmoid": (lambda y: y[:, 1].sigmoid().log(), lambda y: y[:, 1]),
    "log-sigmoid": (lambda y: nn.functional.logsigmoid(y[:, 1]), lambda y: y[:, 1]),
    "saturated sigmoid": (lambda y: (y[:, 1] * 1e4).sigmoid() / 1e4, lambda y: y[:, 1]),
    "negative logarithm": (lambda y: -(1 - y[:, 1].sigmoid()).log(), lambda y: y[:, 1]),
    "largest probability": (lambda y: y.sigmoid().amax(1).logit(), lambda y: y.amax(1)),
}


@pytest.mark.parametrize("method", _METHODS)
@pytest.mark.parametrize("name", _SCORES)
def test_a_score_has_the_map_of_another_spelling(name: str, method: Callable[..., saliency.Attribution]) -> None:
    net, x = _scored()
    found, expected = (method(net).attribute(x, score) for score in _SCORES[name])
    assert float(expected.values.abs().max()) > 0
    assert error(found.values, expected.values) < 1e-6
    assert found.residual is not None
    assert float(found.residual.abs().max()) < 1e-6 * float(found.scores.abs().max())
    if name != "take":
        single = method(net).attribute(x[1:], _SCORES[name][0])
        assert error(found.values[1:], single.values) < 1e-9


def test_each_factor_of_a_product_has_the_same_relevance() -> None:
    linear, x = nn.Linear(12, 6, bias=False).double(), torch.rand(1, 3, 2, 2).double()
    net = nn.Sequential(nn.Flatten(), linear)
    found = saliency.AttnLRP(net).attribute(x, lambda y: y[:, :3].prod(1))
    y, weight = net(x)[0].detach(), linear.weight.detach()
    expected = (x.flatten() * weight[:3] / y[:3, None]).sum(0) * y[:3].prod() / 3
    assert error(found.values.flatten(), expected) < 1e-9


class _Rows(nn.Module):
    """A recurrent network over the rows of an image."""

    def __init__(self, cell: type[nn.GRU | nn.LSTM | nn.RNN]) -> None:
        super().__init__()
        self.cell = cell(18, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the last state."""
        y: Tensor = self.cell(x.transpose(1, 2).flatten(2))[0][:, -1]
        return y


@pytest.mark.parametrize(
    "method", [saliency.LRP, saliency.AttnLRP, saliency.CPLRP, saliency.DeepLIFT, saliency.DeepSHAP, saliency.FullGrad]
)
@pytest.mark.parametrize("cell", [nn.GRU, nn.LSTM, nn.RNN])
def test_recurrent_networks_are_complete(
    cell: type[nn.GRU | nn.LSTM | nn.RNN], method: type[saliency.Attribution]
) -> None:
    explanation = method(_Rows(cell).double().eval()).attribute(torch.randn(2, 3, 5, 6, dtype=torch.float64), TARGETS)
    assert explanation.residual is not None
    assert float(explanation.residual.abs().max()) < 1e-12


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_a_fused_lstm_is_refused_with_its_cure() -> None:
    model, x = _Rows(nn.LSTM).eval(), torch.randn(1, 3, 5, 6)
    with pytest.raises(saliency.errors.NotApplicableError, match=r"backends\.mkldnn\.flags\(enabled=False\)"):
        saliency.LRP(model).attribute(x, 1)
    with torch.backends.mkldnn.flags(enabled=False):
        assert bool(saliency.LRP(model).attribute(x, 1).values.any())


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("method", [saliency.LRP, saliency.DeepLIFT, saliency.FullGrad])
def test_a_loss_is_a_score(method: type[saliency.Attribution], reduction: str) -> None:
    model, x = _drawn(lambda y, weight: y * weight)

    def score(output: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, torch.tensor([1]), reduction=reduction).reshape(1)

    explanation = method(model).attribute(x[:1], score)
    assert explanation.residual is not None
    assert float(explanation.residual.abs().max()) < 1e-9


@pytest.mark.parametrize(
    "method", [saliency.LRP, saliency.AttnLRP, saliency.DeepLIFT, saliency.FullGrad, saliency.ExcitationBackprop]
)
def test_a_reentrant_checkpoint_is_named(method: type[saliency.Attribution]) -> None:
    model, x = _drawn(
        lambda y, weight: torch.utils.checkpoint.checkpoint(lambda y: y.tanh() * weight, y, use_reentrant=True)
    )
    with pytest.raises(saliency.errors.NotApplicableError, match="use_reentrant"):
        method(model).attribute(x[:1], 1)


@pytest.mark.skipif(torch.__version__ < "2.7", reason="roi_align of torchvision 0.21 is a C++ node, which is refused")
def test_a_detector_with_roi_align_is_conserved() -> None:
    detection = pytest.importorskip("torchvision").models.detection
    torch.manual_seed(0)
    sizes = {"min_size": 96, "max_size": 96, "rpn_post_nms_top_n_test": 20, "box_score_thresh": 0.0}
    model = detection.fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, **sizes).eval()

    def score(output: list[dict[str, Tensor]]) -> Tensor:
        return output[0]["scores"][:1]

    class Stacked(nn.Module):
        def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
            y: list[dict[str, Tensor]] = model(list(x))
            return y

    explanation = saliency.LRP(Stacked()).attribute(torch.rand(1, 3, 96, 96), score)
    assert explanation.residual is not None
    assert float(explanation.residual.abs()) < 1e-3 * float(explanation.scores.abs())


def test_constants_per_channel_are_biases_and_others_are_tokens() -> None:
    bias, _ = _drawn(lambda y, weight: y + weight)
    tokens, x = _drawn(lambda y, weight: y + torch.ones(4, 6, 6))
    assert saliency.AttnLRP(bias).attribute(x, TARGETS).ledger_names == ("input", "biases")
    assert set(saliency.AttnLRP(tokens).attribute(x, TARGETS).ledger_names) == {"input", "biases", "tokens"}


def test_a_batch_that_the_model_takes_apart_is_refused_and_one_image_is_not() -> None:
    model, x = _drawn(lambda y, weight: torch.stack([torch.cat([part[:3] + weight[:3], part[3:]]) for part in y]))
    with pytest.raises(saliency.errors.NotApplicableError, match=r"\(3, 6, 6\).* 2 images"):
        saliency.AttnLRP(model).attribute(x, TARGETS)
    explanation = saliency.AttnLRP(model).attribute(x[:1], 1)
    assert explanation.residual is not None
    assert explanation.residual.abs().max() < 1e-9


class _Leaf(saliency.AttnLRP):
    """Keeps a weak reference to the leaf of the graph."""

    def explain_gradients(self, grads: TargetGradients, layers: tuple[str, ...]) -> BatchAttribution:
        self.leaf = weakref.ref(grads.forward.x)
        return super().explain_gradients(grads, layers)


def test_the_graph_is_freed_with_the_call() -> None:
    model, x = _drawn(lambda y, weight: torch.cat([y[:, :2], weight[2:].expand(2, 2, 6, 6)], 1) + torch.ones(4, 6, 6))
    method = _Leaf(model)
    gc.disable()
    try:
        method.attribute(x, TARGETS)
        assert method.leaf() is None
    finally:
        gc.enable()


class _Watched(saliency.AttnLRP):
    """Keeps weak references to the activations that a forward has recorded."""

    def explain_gradients(self, grads: TargetGradients, layers: tuple[str, ...]) -> BatchAttribution:
        held = [grads.forward.operations.operation(node) for node in grads.nodes]
        self.values = [weakref.ref(op.args["input"]) for op in held if op and op.name == "native_batch_norm"]
        del held
        result = super().explain_gradients(grads, layers)
        self.alive = sum(value() is not None for value in self.values)
        return result


def test_the_last_walk_frees_the_values_of_the_forward() -> None:
    model, x = _network("test_resnet")
    method = _Watched(model)
    method.attribute(x, TARGETS)
    assert len(method.values) > 4
    assert not method.alive
    saliency.Together(method, saliency.IntegratedGradients(model, steps=2)).attribute(x, TARGETS)
    assert not method.alive
    method.attribute_classes(x, [1, 2])
    assert not method.alive
    saliency.Together(method, saliency.VanillaGradient(model)).attribute(x, TARGETS)
    assert method.alive == len(method.values)


def test_a_vision_language_model_is_conserved() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(**sizes, image_size=14, patch_size=7)
    text = transformers.LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=20, max_position_embeddings=16)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=19, vision_feature_layer=-1
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    prompt = torch.tensor([[1, 19, 19, 19, 19, 2]])

    class Answer(nn.Module):
        """The logits of the next token."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = model(pixel_values=x, input_ids=prompt).logits[:, -1]
            return y

    for method in (saliency.AttnLRP, saliency.CPLRP, saliency.DeepLIFT):
        explanation = method(Answer()).attribute(torch.randn(1, 3, 14, 14), 5)
        assert explanation.residual is not None
        assert bool(explanation.values.any())
        assert float(explanation.residual.abs()) < 1e-5
