"""Moments of tensors: those of numpy in double precision, whatever the numbers are and however they lie and come."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Callable
from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from saliency.inspection.recording import Moments, TensorStatistics, moments

Numbers = NDArray[np.float64]


def expected(tensor: Tensor) -> Moments:
    """The moments by numpy, two passes in double precision."""
    wide = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    flat: Numbers = (wide.abs() if wide.is_complex() else wide).double().numpy().reshape(-1)
    finite = flat[np.isfinite(flat)]
    if not len(finite):
        return Moments(count=len(flat), nan=int(np.isnan(flat).sum()), inf=int(np.isinf(flat).sum()))
    mean = float(np.mean(finite.astype(np.longdouble)))
    return Moments(
        count=len(flat),
        finite=len(finite),
        mean=mean,
        deviations=float(np.square(finite.astype(np.longdouble) - mean).sum()),
        min=float(finite.min()),
        max=float(finite.max()),
        zeros=int((flat == 0).sum()),
        nan=int(np.isnan(flat).sum()),
        inf=int(np.isinf(flat).sum()),
    )


def assert_same(found: Moments, wanted: Moments, rounding: float = 1e-12) -> None:
    for name in ("count", "finite", "zeros", "nan", "inf", "min", "max"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=0, abs=0, nan_ok=True), name
    scale = max(abs(wanted.mean), wanted.std) if wanted.finite else 1.0
    assert found.mean == pytest.approx(wanted.mean, rel=0, abs=rounding * scale, nan_ok=True)
    for name in ("std", "norm"):
        assert getattr(found, name) == pytest.approx(
            getattr(wanted, name), rel=100 * rounding, abs=rounding * scale, nan_ok=True
        ), name


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


LIES: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: noise(2, 3, 4, 5),
    "channels last": lambda: noise(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: noise(7, 5).t(),
    "with gaps": lambda: noise(8, 9)[::2, 1::3],
    "expanded": lambda: noise(3, 1).expand(3, 4),
    "one number": lambda: noise(1)[0],
    "requires a gradient": lambda: noise(4, 4).requires_grad_(),
    "sparse": lambda: noise(4, 4).relu().to_sparse(),
    "conjugated": lambda: torch.complex(noise(3, 3), noise(3, 3).t()).conj(),
    "negated view": lambda: torch.complex(noise(3, 3), noise(3, 3).t()).conj().imag,
    "larger than a piece": lambda: noise(3, 1 << 17) + 2,
    "a little more than a piece": lambda: noise((1 << 17) + 1),
}


@pytest.mark.parametrize("lie", LIES)
def test_moments_are_those_of_numpy_however_the_numbers_lie(lie: str) -> None:
    tensor = LIES[lie]()
    assert_same(moments(tensor), expected(tensor), 1e-12)


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
def test_moments_are_those_of_the_numbers_of_any_type(dtype: torch.dtype) -> None:
    tensor = (100 * noise(1000).abs()).to(dtype)
    assert_same(moments(tensor), expected(tensor), 1e-12)


def test_half_precision_neither_overflows_nor_drowns() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        found = moments(torch.full((1 << 18,), 1000.0, dtype=dtype))
        assert (found.mean, found.std) == (1000.0, 0.0)
        assert found.norm == pytest.approx(1000 * 2**9)


@pytest.mark.parametrize("far", [1e2, 1e4, 1e6])
def test_a_mean_far_above_the_deviation_cancels_nothing(far: float) -> None:
    tensor = far + noise(300_000)
    assert moments(tensor).std == pytest.approx(expected(tensor).std, rel=1e-9)


def test_a_mean_a_hundred_million_deviations_away_cancels_nothing_over_a_stream() -> None:
    parts = [1e8 + noise(1 + 37 * i, dtype=torch.float64) for i in range(100)]
    found = reduce(Moments.__add__, map(moments, parts))
    assert_same(found, expected(torch.cat(parts)), 1e-15)
    assert found.std == pytest.approx(1, rel=0.02)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.floats(-1e6, 1e6, width=32) | st.sampled_from([0.0, math.nan, math.inf, -math.inf, 1e-30]), max_size=60
    ),
    st.lists(st.integers(0, 60), max_size=5),
)
def test_the_sum_of_parts_is_the_whole_wherever_it_is_cut(numbers: list[float], cuts: list[int]) -> None:
    tensor = torch.tensor(numbers, dtype=torch.float64)
    found = reduce(Moments.__add__, map(moments, tensor.tensor_split(sorted(cuts))), Moments())
    assert_same(found, expected(tensor), 1e-12)


def test_nothing_has_no_moments_and_adds_nothing() -> None:
    for nothing in (Moments(), moments(torch.empty(0)), moments(torch.empty(2, 0, 3))):
        assert nothing.count == nothing.zeros == 0
        assert all(
            math.isnan(each) for each in (nothing.mean, nothing.std, nothing.norm, nothing.min, nothing.zero_share)
        )
        some = moments(noise(5))
        assert some + nothing == some
        assert nothing + some == some


def test_numbers_that_are_not_finite_are_counted_and_left_out() -> None:
    tensor = torch.tensor([1.0, math.nan, -3.0, math.inf, 0.0, -math.inf, math.nan])
    found = moments(tensor)
    assert (found.count, found.finite, found.nan, found.inf, found.zeros) == (7, 3, 2, 2, 1)
    assert (found.mean, found.min, found.max) == pytest.approx((-2 / 3, -3, 1))
    assert found.norm == pytest.approx(math.sqrt(10))
    alone = moments(torch.tensor([math.nan, math.inf]))
    assert (alone.count, alone.finite, alone.nan, alone.inf) == (2, 0, 1, 1)
    assert math.isnan(alone.mean)
    assert math.isnan(alone.min)
    assert_same(found + alone, expected(torch.cat([tensor, torch.tensor([math.nan, math.inf])])))


def test_zeros_are_counted_with_either_sign_and_nothing_else_is() -> None:
    found = moments(torch.tensor([0.0, -0.0, 1e-45, -1e-38, 1.0]))
    assert found.zeros == 2
    assert found.zero_share == 0.4
    none = moments(torch.zeros(1 << 18))
    assert (none.zeros, none.mean, none.std, none.norm, none.min, none.max) == (1 << 18, 0, 0, 0, 0, 0)


@pytest.mark.parametrize("size", [1.0, 1e-15, 1e12])
def test_a_single_zero_is_found_wherever_it_is(size: float) -> None:
    for count in (1, 2, 3, 5, 8, 13, 64, 1000, 1001, 4099, (1 << 17) + 3):
        tensor = noise(count) * size
        assert moments(tensor).zeros == 0
        for at in {0, count // 3, count // 2, count - 1}:
            one = tensor.clone()
            one[at] = 0
            assert moments(one).zeros == 1, (count, at)


@pytest.mark.parametrize(
    "size", [1e-44, 1e-38, 1e-30, 1e-25, 1e-22, 1e-21, 1e-20, 1e-19, 1e-15, 1e15, 1e19, 1e30, 3e38]
)
def test_squares_beyond_single_precision_are_not_lost(size: float) -> None:
    tensor = noise(1000).clamp(-1, 1) * size
    assert_same(moments(tensor), expected(tensor), 1e-12)
    assert moments(tensor).norm > 0


def test_squares_beyond_double_precision_are_infinite_or_nothing_and_raise_nothing() -> None:
    huge = moments(torch.tensor([1e200, -1e200, 3e200], dtype=torch.float64))
    assert huge.mean == pytest.approx(1e200)
    assert huge.std == math.inf
    assert huge.norm == math.inf
    assert moments(torch.full((4,), 1e200, dtype=torch.float64)).norm == pytest.approx(2e200)
    assert (huge + huge).max == 3e200
    tiny = moments(torch.tensor([1e-200, 3e-200], dtype=torch.float64))
    assert tiny.mean == pytest.approx(2e-200)
    assert tiny.zeros == 0


def test_scaled_moments_are_those_of_the_scaled_numbers() -> None:
    tensor = torch.cat([noise(100) + 3, torch.tensor([math.nan, math.inf, 0.0])])
    assert_same(moments(tensor).scaled(0.25), expected(tensor * 0.25))
    assert moments(tensor).scaled(1) == moments(tensor)


@pytest.mark.slow
def test_the_tensor_is_left_as_it_is_and_not_kept() -> None:
    tensor = noise(3, 5).t()
    before, version, strides = tensor.clone(), tensor._version, tensor.stride()
    later = TensorStatistics(tensor)
    moments(tensor)
    assert torch.equal(tensor, before)
    assert (tensor._version, tensor.stride()) == (version, strides)
    gone = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert gone() is None
    assert_same(later.moments, expected(before))


def test_the_callers_modes_make_no_difference() -> None:
    tensor = noise(1000)
    wanted = moments(tensor)
    with torch.inference_mode():
        assert moments(tensor) == moments(tensor.clone()) == wanted
    with torch.autocast("cpu", torch.bfloat16):
        assert moments(tensor) == wanted
        assert moments(torch.cat([tensor, torch.tensor([math.nan])])).std == pytest.approx(wanted.std, rel=1e-14)
    with torch.no_grad():
        assert moments(tensor.requires_grad_()) == wanted


def test_threads_do_not_disturb_each_other() -> None:
    tensors = [(noise(1 << 17) > i / 4).float() for i in range(4)]
    wanted = [moments(each) for each in tensors]
    wrong: list[int] = []

    def work(at: int) -> None:
        for _ in range(50):
            wrong.extend([at] * (moments(tensors[at]) != wanted[at]))

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong
