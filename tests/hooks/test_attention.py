"""Attention that was read from a fused kernel."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from saliency.hooks.attention import AttentionCall


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias", [None, (7, 7), (4, 7, 7), (1, 4, 7, 7), (3, 1, 7, 7)])
def test_the_mean_over_heads_is_the_same_one_image_at_a_time(
    bias: tuple[int, ...] | None, causal: bool, heads: int
) -> None:
    query, key, value = (torch.randn(3, count, 7, 5) for count in (4, heads, heads))
    added: Tensor | None = None if bias is None else torch.randn(bias)
    call = AttentionCall(cast("Any", None), 3, value, query=query, key=key, bias=added, scale=0.4, is_causal=causal)
    assert torch.equal(call.mean_heads(), call.probabilities().mean(1))


def test_a_query_that_sees_no_key_has_probabilities_of_zero() -> None:
    query, key, value = (torch.randn(1, 2, 3, 5) for _ in range(3))
    bias = torch.zeros(3, 3)
    bias[1] = -torch.inf
    call = AttentionCall(cast("Any", None), 1, value, query=query, key=key, bias=bias, scale=0.4)
    assert call.probabilities().sum(3).round(decimals=4).tolist() == [[[1, 0, 1]] * 2]
