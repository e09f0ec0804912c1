"""ONNX files: the decompositions of backward operations, and programs that ONNX Runtime runs with equal maps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from saliency.program.onnx import DECOMPOSITIONS

ATEN = torch.ops.aten


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def resized(mode: str, size: tuple[int, int] | None = (11, 4), **options: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: F.interpolate(x, size, mode=mode, **options)


def _convolution(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
    return (F.conv1d, F.conv2d, F.conv3d)[x.dim() - 3](x, weight, **options)


def _transposed_convolution(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv_transpose2d(x, weight, stride=3, padding=1, output_padding=2, groups=2, dilation=2)


CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 4, 7, 9), (6, 4, 3, 3), {}),
    "strides, padding, dilation": ((2, 4, 12, 9), (6, 4, 3, 2), {"stride": (3, 2), "padding": (1, 2), "dilation": 2}),
    "groups": ((2, 4, 8, 8), (6, 2, 3, 3), {"groups": 2, "stride": 2, "padding": 1}),
    "depthwise": ((2, 4, 7, 7), (4, 1, 5, 5), {"groups": 4, "padding": 2}),
    "one axis": ((2, 4, 10), (6, 4, 3), {"stride": 2}),
    "three axes": ((2, 4, 5, 6, 7), (3, 4, 3, 3, 3), {"stride": 2}),
}
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "transposed convolution": (
        partial(_transposed_convolution, weight=randn(4, 3, 3, 3, seed=1)),
        (randn(2, 4, 5, 6),),
    ),
    "average pooling": (lambda x: F.avg_pool2d(x, 2), (randn(2, 3, 6, 9),)),
    "average pooling, padded": (
        lambda x: F.avg_pool2d(x, (3, 2), 2, (1, 0), ceil_mode=True, count_include_pad=False),
        (randn(2, 3, 8, 9),),
    ),
    "average pooling, divisor": (lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=5), (randn(2, 3, 8, 9),)),
    "adaptive average pooling": (lambda x: F.adaptive_avg_pool2d(x, (3, 5)), (randn(2, 3, 7, 8),)),
    "attention": (F.scaled_dot_product_attention, tuple(randn(2, 3, 5, 8, seed=seed) for seed in range(3))),
    "attention, causal": (
        partial(F.scaled_dot_product_attention, is_causal=True, scale=0.5),
        tuple(randn(2, 3, 5, 8, seed=seed) for seed in range(3)),
    ),
    "attention, masked": (
        partial(F.scaled_dot_product_attention, attn_mask=randn(4, 6, seed=3)),
        (randn(2, 3, 4, 8), randn(2, 3, 6, 8, seed=1), randn(2, 3, 6, 8, seed=2)),
    ),
    "nearest": (resized("nearest"), (randn(2, 3, 5, 7),)),
    "nearest-exact": (resized("nearest-exact"), (randn(2, 3, 5, 7),)),
    "bilinear": (resized("bilinear"), (randn(2, 3, 5, 7),)),
    "bilinear, scale factor": (resized("bilinear", None, scale_factor=(1.7, 0.6)), (randn(2, 3, 5, 7),)),
    "bilinear, aligned corners": (resized("bilinear", align_corners=True), (randn(2, 3, 5, 7),)),
    "bicubic": (resized("bicubic"), (randn(2, 3, 5, 7),)),
    "adaptive pooling of channels last": (
        lambda x: F.adaptive_avg_pool2d(x.permute(0, 3, 1, 2), 1).flatten(1) ** 2,
        (randn(2, 4, 5, 3),),
    ),
    **{
        f"convolution, {name}": (partial(_convolution, weight=randn(*weight, seed=1), **options), (randn(*shape),))
        for name, (shape, weight, options) in CONVOLUTIONS.items()
    },
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_decomposed_gradients_equal_those_of_autograd(name: str) -> None:
    function, inputs = FUNCTIONS[name]
    at_output = randn(*function(*inputs).shape, seed=9)

    def gradients(*values: Tensor) -> tuple[Tensor, ...]:
        leaves = [value.detach().requires_grad_() for value in values]
        return torch.autograd.grad(function(*leaves), leaves, at_output)

    graph = make_fx(gradients)(*inputs)
    assert {node.target for node in graph.graph.nodes} & set(DECOMPOSITIONS)
    decomposed = make_fx(torch.func.functionalize(graph), decomposition_table=DECOMPOSITIONS)(*inputs)
    assert not {node.target for node in decomposed.graph.nodes} & set(DECOMPOSITIONS)
    for found, expected in zip(decomposed(*inputs), gradients(*inputs), strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def test_strides_that_repeat_elements_are_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"as_strided: sizes .*3, 2.* and strides .*1, 1"):
        DECOMPOSITIONS[ATEN.as_strided.default](randn(4), (3, 2), (1, 1))
