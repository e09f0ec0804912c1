"""Sobol indices against closed forms, and what their own standard errors claim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from saliency.errors import MethodError
from saliency.methods.sobol import Sobol, TotalOrder, sobol_masks
from saliency.testing import tiny_model


class Cells(nn.Module):
    """A score made of the mean brightness of each cell of a grid of 3 x 3 on 9 x 9 pixels; class 1 is its negative."""

    def __init__(self, score: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.score = score

    def forward(self, x: Tensor) -> Tensor:
        # The pixel in the middle of each cell: interpolated masks have the cell's own number there.
        cells = x.mean(1)[:, 1::3, 1::3].flatten(1)  # (N, 9)
        made = self.score(cells)
        return torch.stack([made, -made], 1)


WEIGHTS = torch.tensor([3.0, 0, 1, 0, 2, 0, 0, 0, -1], dtype=torch.float64)


def weighted(cells: Tensor) -> Tensor:
    return cells @ WEIGHTS


def ones() -> Tensor:
    return torch.ones(1, 3, 9, 9, dtype=torch.float64)


def of_cells(values: Tensor) -> Tensor:
    return values[0, 0, 1::3, 1::3].flatten()


def test_the_indices_of_a_sum_are_the_shares_of_its_variance() -> None:
    found = Sobol(Cells(weighted), grid=3, passes=11 * 1024, chunk=512).attribute(ones(), 0)
    expected = WEIGHTS.square() / WEIGHTS.square().sum()
    assert torch.allclose(of_cells(found.values), expected, atol=0.01)
    assert found.error is not None
    assert float(of_cells(found.values)[1]) < 1e-12
    assert bool(((of_cells(found.values) - expected).abs() <= 3 * of_cells(found.error) + 1e-12).all())


def test_what_cells_do_together_counts_for_each_of_them() -> None:
    """A product of two numbers, uniform on 0..1: each keeps 4/7 of the variance by its total effect."""
    found = Sobol(Cells(lambda cells: cells[:, 0] * cells[:, 4]), grid=3, passes=11 * 1024, chunk=512).attribute(
        ones(), 0
    )
    expected = torch.zeros(9, dtype=torch.float64)
    expected[[0, 4]] = 4 / 7
    assert torch.allclose(of_cells(found.values), expected, atol=0.02)


def test_the_indices_of_ishigamis_function() -> None:
    def ishigami(cells: Tensor) -> Tensor:
        a, b, c = (torch.pi * (2 * cells[:, i] - 1) for i in range(3))
        return a.sin() + 7 * b.sin().square() + 0.1 * c**4 * a.sin()

    found = Sobol(Cells(ishigami), grid=3, passes=11 * 2048, chunk=512).attribute(ones(), 0)
    expected = torch.tensor([0.5576, 0.4424, 0.2437, 0, 0, 0, 0, 0, 0], dtype=torch.float64)
    assert torch.allclose(of_cells(found.values), expected, atol=0.02)


def test_the_error_of_the_indices_is_no_smaller_than_it_ought_to_be() -> None:
    expected = WEIGHTS.square() / WEIGHTS.square().sum()
    covered = []
    for seed in range(60):
        found = Sobol(Cells(weighted), grid=3, passes=11 * 64, seed=seed, chunk=352).attribute(ones(), 0)
        assert found.error is not None
        off, error = (of_cells(found.values) - expected).abs(), of_cells(found.error)
        covered.append((off <= 1.96 * error)[WEIGHTS != 0])
    assert float(torch.stack(covered).double().mean()) > 0.9


def test_a_sum_and_its_negative_have_the_same_indices() -> None:
    found = Sobol(Cells(weighted), grid=3, passes=110).attribute(ones().repeat(2, 1, 1, 1), [0, 1])
    assert torch.allclose(found.values[0], found.values[1])


def test_a_design_row_swaps_one_number_at_a_time() -> None:
    design = sobol_masks(4, 40, 3)
    rows = design(0, 6 * 40).reshape(40, 6, 4)
    first, second = rows[:, 0], rows[:, 1]
    for cell in range(4):
        swapped = first.clone()
        swapped[:, cell] = second[:, cell]
        assert torch.equal(rows[:, 2 + cell], swapped)
    assert torch.equal(sobol_masks(4, 20, 3)(100, 117), rows.reshape(-1, 4)[100:117])
    assert not torch.equal(sobol_masks(4, 2, 4)(0, 6), rows[0])
    assert float((first.mean(0) - 0.5).abs().max()) < 0.05


def test_a_score_that_never_changes_has_an_empty_map() -> None:
    constant = Cells(lambda cells: 0 * cells.sum(1) + 3)
    found = Sobol(constant, grid=3, passes=44).attribute(ones(), 0)
    assert not found.values.any()
    assert found.run_stats[0].note == "the score varied by no more than rounding"
    # Hidden pixels that look like the rest leave nothing but rounding.
    same = Sobol(tiny_model(), grid=3, passes=44, fill=0.3).attribute(torch.full((1, 3, 16, 16), 0.3), 0)
    assert not same.values.any()


class Halved(Cells):
    """A score of half precision around 11, handed on as `out`."""

    def __init__(self, score: Callable[[Tensor], Tensor], out: torch.dtype) -> None:
        super().__init__(score)
        self.out = out

    def forward(self, x: Tensor) -> Tensor:
        return (11 + super().forward(x.double())).to(x.dtype).to(self.out)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head", ["same", "float32"])
def test_half_precision_hides_no_effect_above_its_rounding(half: torch.dtype, head: str) -> None:
    """The scores of the bundled network spread by about 4 % of the largest, 5 eps of bfloat16."""
    out = half if head == "same" else torch.float32

    def found(score: Callable[[Tensor], Tensor]) -> Tensor:
        method = Sobol(Halved(score, out), grid=3, passes=11 * 64, chunk=352)
        return of_cells(method.attribute(ones().to(half), 0).values).double()

    def precise(score: Callable[[Tensor], Tensor]) -> Tensor:
        method = Sobol(Cells(lambda cells: 11 + score(cells)), grid=3, passes=11 * 64, chunk=352)
        return of_cells(method.attribute(ones(), 0).values)

    expected = precise(lambda cells: weighted(cells) / 3)
    assert torch.allclose(found(lambda cells: weighted(cells) / 3), expected, atol=0.05 * float(expected.max()))
    last_bit = 0.4 * 11 * torch.finfo(half).eps
    assert not found(lambda cells: last_bit * (cells.sum(1) * 1e4).sin()).any()


@pytest.mark.parametrize("fill", ["blur", "mean", 0.5, [0.0, 1.0, 2.0]])
def test_any_fill_serves(fill: Any) -> None:
    found = Sobol(tiny_model(), grid=2, passes=24, fill=fill).attribute(torch.randn(1, 3, 16, 16), 0)
    assert found.values.any()


def test_seeds_repeat_and_differ() -> None:
    model, x = tiny_model(), torch.randn(1, 3, 16, 16)

    def values(seed: int) -> Tensor:
        return Sobol(model, grid=3, passes=44, seed=seed, chunk=4).attribute(x, 0).values

    assert torch.equal(values(1), values(1))
    assert not torch.equal(values(1), values(2))
    assert values(-3).isfinite().all()


def test_the_passes_are_those_of_the_papers_unless_asked_otherwise() -> None:
    model, x = tiny_model(), torch.randn(1, 3, 16, 16)
    assert Sobol(model, grid=3).attribute(x, 0).run_stats[0].passes == 32 * 11
    assert Sobol(model, grid=3, passes=50).attribute(x, 0).run_stats[0].passes == 44  # complete rows
    loose = Sobol(Cells(weighted), grid=3, tolerance=0.3).attribute(ones(), 0)
    assert loose.run_stats[0].stopped == "tolerance"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Sobol(tiny_model(), grid=0),
        lambda: Sobol(tiny_model(), grid=2.5),  # type: ignore[arg-type]
        lambda: Sobol(tiny_model(), fill="inpaint"),
        lambda: Sobol(tiny_model(), fill="blurred"),
        lambda: Sobol(tiny_model(), grid=3, passes=21).attribute(torch.randn(1, 3, 16, 16), 0),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any) -> None:
    with pytest.raises(MethodError):
        make()


def test_too_little_time_is_enough_for_the_fewest_passes_that_make_a_map() -> None:
    found = Sobol(tiny_model(), grid=2, seconds=1e-9, chunk=4).attribute(torch.randn(1, 3, 16, 16), 0)
    assert (found.run_stats[0].stopped, found.run_stats[0].passes) == ("seconds", 2 + 12)  # a trial, and two rows


def test_the_agreement_of_halves_is_high_where_the_map_is_clear() -> None:
    rows = TotalOrder(3, 1e-9)
    assert rows.agreement is None
    points = sobol_masks(3, 64, 0)(0, 5 * 64)
    for row in (points @ torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)).reshape(-1, 5):
        rows.add(row[None])
    assert rows.agreement == pytest.approx(1)
