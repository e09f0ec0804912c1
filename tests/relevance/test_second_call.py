"""The second call of a method on a model, which may read the graph instead of a record, equals the first.

Each network has one operation between two convolutions whose values the graph holds, so that the operation decides
whether the second call records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saliency
from saliency import METHODS
from saliency.attribution.forward import Needs, SharedForward, TargetGradients
from saliency.attribution.questions import Questions
from saliency.errors import NotApplicableError
from saliency.hooks import operations as tables
from saliency.hooks.operations import SavedValues
from saliency.relevance import propagation
from saliency.targets.question import Images
from tests.relevance.test_lrp import lived_in
from tests.selection import case

Function = Callable[[Tensor], Tensor]

CONSTANT = torch.linspace(-1, 1, 144, dtype=torch.float64).view(1, 4, 6, 6)
WEIGHT = CONSTANT.flatten()[:36].view(6, 6)
aten = torch.ops.aten


def _first(function: Callable[[Tensor], tuple[Tensor, ...]]) -> Function:
    return lambda h: function(h)[0]


def _in_3d(function: Function) -> Function:
    """Apply a function of volumes to the channels of an image as slices."""
    return lambda h: function(h[:, None])


# By the name of the operation; a list for several spellings.
OPERATIONS: Mapping[str, list[Function]] = {
    "_adaptive_avg_pool2d": [lambda h: F.adaptive_avg_pool2d(h, 3)],
    "_adaptive_avg_pool3d": [_in_3d(lambda h: F.adaptive_avg_pool3d(h, 2))],
    "_fft_r2c _fft_c2r": [lambda h: torch.fft.irfft(torch.fft.rfft(h) * 2)],
    "_fft_c2c": [lambda h: torch.fft.irfft(torch.fft.fft(torch.fft.rfft(h), dim=2))],
    "_fused_rms_norm": [lambda h: F.rms_norm(h, (6,))],
    "_log_softmax": [lambda h: h.log_softmax(1)],
    "_prelu_kernel": [lambda h: F.prelu(h, torch.full((4,), 0.2, dtype=torch.float64))],
    "_safe_softmax": [lambda h: aten._safe_softmax(h, -1)],
    "_softmax": [lambda h: h.softmax(1)],
    "_to_copy": [lambda h: h.to(torch.float32).double()],
    "_upsample_bicubic2d_aa": [lambda h: F.interpolate(h, (4, 4), mode="bicubic", antialias=True)],
    "_upsample_bilinear2d_aa": [lambda h: F.interpolate(h, (4, 4), mode="bilinear", antialias=True)],
    "_upsample_nearest_exact2d": [lambda h: F.interpolate(h, (9, 9), mode="nearest-exact")],
    "_upsample_nearest_exact3d": [_in_3d(lambda h: F.interpolate(h, (5, 9, 9), mode="nearest-exact"))],
    "abs": [torch.abs],
    "adaptive_max_pool2d": [lambda h: F.adaptive_max_pool2d(h, 3)],
    "adaptive_max_pool3d": [_in_3d(lambda h: F.adaptive_max_pool3d(h, 2))],
    "add": [lambda h: h + h.tanh(), lambda h: h + 0.3, lambda h: h + CONSTANT, lambda h: (h * 1).add_(CONSTANT)],
    "addcmul": [lambda h: torch.addcmul(CONSTANT, CONSTANT, h), lambda h: torch.addcmul(h, h, h)],
    "addmv": [lambda h: torch.addmv(WEIGHT[0], h[0, 0], WEIGHT[1])],
    "addmm": [lambda h: torch.addmm(WEIGHT[0], h.flatten(0, 2), WEIGHT)],
    "amax": [lambda h: h.amax(1)],
    "amin": [lambda h: h.amin((2, 3))],
    "as_strided": [lambda h: h.as_strided((1, 4, 5), (144, 36, 7))],
    "avg_pool2d": [lambda h: F.avg_pool2d(h, 2)],
    "avg_pool3d": [_in_3d(lambda h: F.avg_pool3d(h, 2))],
    "baddbmm": [lambda h: torch.baddbmm(CONSTANT[0], h[0], WEIGHT.expand(4, 6, 6))],
    "bmm": [lambda h: h[0] @ h[0].mT, lambda h: h[0].bmm(WEIGHT.expand(4, 6, 6))],
    "cat": [lambda h: torch.cat([h, h * 2], 1), lambda h: torch.cat([h, CONSTANT], 1)],
    "celu": [lambda h: F.celu(h, 0.7), lambda h: F.celu_(h * 1, 0.7)],
    "channel_shuffle": [lambda h: aten.channel_shuffle(h, 2)],
    "clamp": [lambda h: h.clamp(-0.5, 0.5), lambda h: h.clamp(0, 0.5)],
    "clone": [torch.clone],
    "col2im": [lambda h: F.fold(F.unfold(h, 2, stride=2), 6, 2, stride=2)],
    "constant_pad_nd": [lambda h: F.pad(h, (1, 1)), lambda h: F.pad(h, (1, 1), value=0.4)],
    "convolution": [lambda h: F.conv2d(h, CONSTANT[:, :, :3, :3]), lambda h: F.conv2d(h, h[:, :, :3, :3])],
    "copy": [lambda h: CONSTANT.clone().copy_(h)],
    "cummax": [_first(lambda h: h.cummax(2))],
    "cummin": [_first(lambda h: h.cummin(2))],
    "cumsum": [lambda h: h.cumsum(2)],
    "div": [lambda h: h / 3, lambda h: h / (CONSTANT + 2), lambda h: h / (h.abs() + 1)],
    "dot": [lambda h: torch.dot(h[0, 0, 0], WEIGHT[0])],
    "elu": [F.elu, lambda h: F.elu_(h * 1)],
    "exp": [torch.exp],
    "expand": [lambda h: h[:, :1].expand(-1, 3, -1, -1)],
    "flip": [lambda h: h.flip(3)],
    "gather": [lambda h: h.flatten(1).gather(1, torch.tensor([[1, 5, 9]]))],
    "gelu": [F.gelu, partial(F.gelu, approximate="tanh")],
    "hardsigmoid": [F.hardsigmoid, lambda h: F.hardsigmoid(h * 1, inplace=True)],
    "hardswish": [F.hardswish, lambda h: F.hardswish(h * 1, inplace=True)],
    "hardtanh": [F.hardtanh, F.relu6, lambda h: F.hardtanh_(h * 1), lambda h: F.hardtanh(h, 0.1, 2)],
    "im2col": [lambda h: F.unfold(h, 2)],
    "index": [lambda h: h[:, [0, 2]]],
    "index_add": [lambda h: torch.zeros_like(h).index_add(1, torch.tensor([0, 2, 1, 2]), h)],
    "index_put": [lambda h: torch.zeros_like(h).index_put((torch.tensor([0]),), h)],
    "index_select": [lambda h: h.index_select(1, torch.tensor([0, 2]))],
    "kthvalue": [_first(lambda h: h.kthvalue(2, 1))],
    "leaky_relu": [F.leaky_relu, lambda h: F.leaky_relu_(h * 1)],
    "linalg_vector_norm": [lambda h: torch.linalg.vector_norm(h, dim=1)],
    "logsumexp": [lambda h: h.logsumexp(1)],
    "masked_fill": [lambda h: h.masked_fill(CONSTANT > 0, 0.3)],
    "masked_scatter": [lambda h: CONSTANT.masked_scatter(CONSTANT > 0, h)],
    "max": [_first(lambda h: h.max(1))],
    "max_pool2d_with_indices": [lambda h: F.max_pool2d(h, 2)],
    "max_pool3d_with_indices": [_in_3d(lambda h: F.max_pool3d(h, 2))],
    "maximum": [lambda h: torch.maximum(h, h.flip(3))],
    "mean": [lambda h: h.mean((2, 3))],
    "median": [_first(lambda h: h.median(1))],
    "min": [_first(lambda h: h.min(1))],
    "minimum": [lambda h: torch.minimum(h, h.flip(3))],
    "mish": [F.mish, lambda h: F.mish(h * 1, inplace=True)],
    "mkldnn": [lambda h: h.to(memory_format=torch.channels_last)],
    "mm": [lambda h: h.flatten(0, 2) @ WEIGHT],
    "mul": [lambda h: h * CONSTANT, lambda h: h * h.sigmoid(), lambda h: h * h.flip(3), lambda h: h * 2],
    "mv": [lambda h: h[0, 0] @ WEIGHT[1]],
    "nansum": [lambda h: h.nansum(1)],
    "native_batch_norm": [lambda h: F.batch_norm(h, None, None, training=True)],
    "native_dropout": [lambda h: aten.native_dropout(h, 0.0, True)[0]],
    "native_group_norm": [lambda h: F.group_norm(h, 2)],
    "native_layer_norm": [lambda h: F.layer_norm(h, (6,))],
    "neg": [torch.neg],
    "nll_loss2d_forward": [lambda h: F.nll_loss(h, torch.ones(1, 6, 6, dtype=torch.long), reduction="none")],
    "nll_loss_forward": [lambda h: F.nll_loss(h.flatten(1), torch.tensor([3]), reduction="none")],
    "norm": [lambda h: aten.norm.ScalarOpt_dim(h, 2, [1])],
    "permute": [lambda h: h.permute(0, 2, 3, 1)],
    "pixel_shuffle": [lambda h: F.pixel_shuffle(h, 2)],
    "pixel_unshuffle": [lambda h: F.pixel_unshuffle(h, 2)],
    "pow": [torch.square],
    "prod": [lambda h: h.prod(1)],
    "reciprocal": [lambda h: h / h.abs().add(1).reciprocal(), lambda h: h * h.square().add(1).rsqrt()],
    "reflection_pad2d": [lambda h: F.pad(h, (1, 1, 1, 1), mode="reflect")],
    "reflection_pad3d": [_in_3d(lambda h: F.pad(h, (1, 1, 1, 1, 1, 1), mode="reflect"))],
    "relu": [F.relu, lambda h: F.relu_(h), lambda h: F.relu(h.flatten(1), inplace=True)],
    "repeat": [lambda h: h.repeat(1, 2, 1, 1)],
    "replication_pad2d": [lambda h: F.pad(h, (1, 1, 1, 1), mode="replicate")],
    "replication_pad3d": [_in_3d(lambda h: F.pad(h, (1, 1, 1, 1, 1, 1), mode="replicate"))],
    "roll": [lambda h: h.roll(2, 3)],
    "rrelu_with_noise": [F.rrelu],
    "rsub": [lambda h: 1 - h],
    "scaled_dot_product_attention": [lambda h: F.scaled_dot_product_attention(h, h * 2, h.flip(3))],
    "scatter scatter_add": [
        lambda h: torch.zeros_like(h).scatter(1, torch.zeros(1, 1, 6, 6, dtype=torch.long), h[:, :1]),
        lambda h: torch.zeros_like(h).scatter_add(1, torch.zeros(1, 4, 6, 6, dtype=torch.long), h),
    ],
    "select": [lambda h: h[:, 1]],
    "select_scatter": [lambda h: h.select_scatter(h[:, 1] * 2, 1, 0)],
    "sigmoid": [torch.sigmoid, lambda h: (h * 1).sigmoid_()],
    "silu": [F.silu, lambda h: F.silu(h, inplace=True), lambda h: F.silu(h.flatten(1), inplace=True)],
    "take": [lambda h: h.take(torch.tensor([1, 8, 30]))],
    "trace": [lambda h: h[0, 0].trace()],
    "vdot": [lambda h: torch.vdot(h[0, 0, 0], WEIGHT[0])],
    "slice_scatter": [lambda h: h.slice_scatter(h[:, :1] * 2, 1, 2, 3)],
    "softplus": [F.softplus],
    "sort": [_first(lambda h: h.sort(1))],
    "squeeze": [lambda h: h[:, :1].squeeze(1)],
    "stack": [lambda h: torch.stack([h, h * 2], 1), lambda h: torch.stack([h, CONSTANT], 1)],
    "std": [lambda h: h.std(1)],
    "std_mean": [lambda h: torch.add(*torch.std_mean(h, 1))],
    "sub": [lambda h: h - h.tanh(), lambda h: h - CONSTANT],
    "sum": [lambda h: h.sum((2, 3))],
    "tanh": [torch.tanh, lambda h: (h * 1).tanh_()],
    "topk": [_first(lambda h: h.topk(2, 1))],
    "tril": [torch.tril],
    "triu": [torch.triu],
    "unfold": [lambda h: h.unfold(2, 3, 1)],
    "unsafe_chunk": [_first(lambda h: aten.unsafe_chunk(h, 2, 1))],
    "unsafe_split": [_first(lambda h: torch.unsafe_split(h, 2, 1))],
    "upsample_bicubic2d": [lambda h: F.interpolate(h, (9, 9), mode="bicubic")],
    "upsample_bilinear2d": [lambda h: F.interpolate(h, (9, 9), mode="bilinear")],
    "upsample_nearest2d": [lambda h: F.interpolate(h, (9, 9))],
    "upsample_nearest3d": [_in_3d(lambda h: F.interpolate(h, (5, 9, 9)))],
    "upsample_trilinear3d": [_in_3d(lambda h: F.interpolate(h, (5, 9, 9), mode="trilinear"))],
    "var": [lambda h: h.var(1)],
    "var_mean": [lambda h: torch.add(*torch.var_mean(h, 1))],
    "where": [lambda h: torch.where(CONSTANT > 0, h, CONSTANT)],
}
# Torchvision's, and those that a CPU computes by other operations.
ELSEWHERE = {"roi_align", "ps_roi_align", "_fused_rms_norm", "native_channel_shuffle", "unsafe_chunk"}


def _reads_graph(method: type[saliency.Attribution]) -> bool:
    needs = getattr(method, "needs", Needs())
    return (bool(needs.values) or issubclass(method, saliency.DeepLIFT)) and not needs.attention


RECORDING = [name for name, method in METHODS.items() if _reads_graph(method)]
# They read what LRP, AttnLRP or DeepLIFT reads.
LIKE_OTHERS = ["deep_shap", "cp_lrp", "excitation_backprop"]
METHODS_OF_A_CASE = [
    case([name for name in RECORDING if name not in LIKE_OTHERS], by_default=True, id="first"),
    case(LIKE_OTHERS, by_default=False, id="like_others"),
]


class Network(nn.Module):
    """Convolutions whose values the graph holds, and a function between them."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))
        self.function = function
        self.head = nn.Linear(function(torch.ones(1, 4, 6, 6, dtype=torch.float64)).numel(), 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return three scores."""
        scores: Tensor = self.head(self.function(self.second(self.first(x))).contiguous().view(1, -1))
        return scores


def _network(function: Function) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = lived_in(Network(function))
    return model, torch.randn(1, 3, 8, 8, dtype=torch.float64)


def _outcome(method: saliency.Attribution, x: Tensor) -> Tensor | str:
    try:
        return method.attribute(x, 1).values
    except NotApplicableError as refusal:
        return str(refusal)


@pytest.mark.filterwarnings("ignore::saliency.errors.SaliencyWarning")
@pytest.mark.parametrize("methods", METHODS_OF_A_CASE)
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_second_call_of_every_method_equals_the_first(name: str, methods: Sequence[str]) -> None:
    for function, method in product(OPERATIONS[name], methods):
        model, x = _network(function)
        first, second = (_outcome(METHODS[method](model, **METHODS[method].preview_options), x) for _ in range(2))
        if isinstance(first, str) or isinstance(second, str):
            assert first == second
        else:
            torch.testing.assert_close(second, first, rtol=1e-9, atol=1e-12)


def test_every_operation_of_the_tables_has_an_example() -> None:
    seen: set[str] = set()
    for functions in OPERATIONS.values():
        for function in functions:
            model, x = _network(function)
            grads = TargetGradients(SharedForward(model, x, Needs(values=SavedValues.ALL)), Questions(1, Images()))
            found = map(grads.forward.operations.operation, grads.nodes)
            seen |= {operation.name for operation in found if operation is not None}
    known = tables.LINEAR | tables.ADDITIVE | tables.NORMS | tables.SOFTMAX | tables.ACTIVATIONS | tables.PLAIN
    known |= tables.HOMOGENEOUS | propagation.OF_DEGREE_ONE | propagation.NONLINEAR
    assert known - seen <= ELSEWHERE
