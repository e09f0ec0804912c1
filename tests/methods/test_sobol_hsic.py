"""Sobol indices and kernel dependence against closed forms, and what their own standard errors claim."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from saliency import MethodError
from saliency.methods.sobol_hsic import (
    HSIC,
    Dependence,
    GridAttribution,
    Sobol,
    TotalOrder,
    criterion,
    hypercube_bits,
    sobol_masks,
)
from saliency.testing import tiny_model

BOTH: list[type[GridAttribution]] = [Sobol, HSIC]


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


def test_half_of_each_block_shows_a_cell() -> None:
    design = partial(hypercube_bits, 5, 1)
    bits = design(0, 256)
    assert set(bits.flatten().tolist()) == {0.0, 1.0}
    assert torch.equal(bits.reshape(4, 64, 5).mean(1), torch.full((4, 5), 0.5, dtype=torch.float64))
    assert torch.equal(torch.cat([design(0, 30), design(30, 200), design(200, 256)]), bits)
    correlation = torch.corrcoef(design(0, 64 * 60).T)
    assert float((correlation - torch.eye(5)).abs().max()) < 0.06


def test_dependence_finds_what_the_score_reads_and_nothing_else() -> None:
    """Cells 1 and 3 count only together: no cell by itself moves the mean of the score."""

    def score(cells: Tensor) -> Tensor:
        return 2 * cells[:, 4] + (2 * cells[:, 1] - 1) * (2 * cells[:, 3] - 1) * cells[:, 4]

    found = HSIC(Cells(score), grid=3, passes=1500, chunk=100).attribute(ones(), 0)
    values = of_cells(found.values)
    assert found.error is not None
    error = of_cells(found.error)
    assert int(values.argmax()) == 4
    assert float(values[4] / error[4]) > 20
    idle = [0, 2, 5, 6, 7, 8]
    assert float((values[idle].abs() / error[idle]).max()) < 3
    assert float(values[idle].abs().max()) < 0.01 * float(values[4])


def test_the_criterion_is_the_one_written_out() -> None:
    bits, scores = hypercube_bits(3, 5, 0, 50), torch.randn(50, dtype=torch.float64)
    scores = scores + 2 * bits[:, 1]
    found = criterion(bits, scores, 0.7)
    kernel = torch.exp(-(scores[:, None] - scores).square() / (2 * 0.7**2))
    centring = torch.eye(50, dtype=torch.float64) - 1 / 50
    permutation = torch.Generator().manual_seed(3)
    for cell in range(3):
        same = (bits[:, cell, None] == bits[:, cell]).double() - 0.5
        traced = [float(torch.trace(same @ centring @ kernel @ centring))]
        for _ in range(2000):
            order = torch.randperm(50, generator=permutation)
            traced.append(float((same[order][:, order] * (centring @ kernel @ centring)).sum()))
        chance = torch.tensor(traced[1:], dtype=torch.float64)
        expected = (traced[0] - float(chance.mean())) / (50 * 49)
        assert float(found[0][cell]) == pytest.approx(expected, abs=4 * float(chance.std()) / 2000**0.5 / (50 * 49))


def test_blocks_of_the_kernel_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    bits, scores = hypercube_bits(3, 5, 0, 130), torch.randn(130, dtype=torch.float64)
    whole = criterion(bits, scores, 1.0)
    monkeypatch.setattr("saliency.methods.sobol_hsic._BLOCK", 37)
    parts = criterion(bits, scores, 1.0)
    assert torch.allclose(whole[0], parts[0])
    assert torch.allclose(whole[1], parts[1])


@pytest.mark.slow
def test_the_error_of_the_criterion_covers_a_long_run() -> None:
    def score(bits: Tensor) -> Tensor:
        return 2 * bits[:, 0] + 1.5 * bits[:, 1] * bits[:, 2] + 0.3 * bits[:, 3]

    bits = hypercube_bits(6, 4242, 0, 6000)
    truth = criterion(bits, score(bits), 1.0)[0]
    truth[4:] = 0
    covered = []
    for seed in range(100):
        bits = hypercube_bits(6, seed, 0, 320)
        found = criterion(bits, score(bits), 1.0)
        covered.append((found[0] - truth).abs() <= 1.96 * found[1])
    share = torch.stack(covered).double().mean(0)
    assert float(share.min()) > 0.88
    assert 0.9 <= float(share.mean()) <= 0.99


@pytest.mark.parametrize("cls", BOTH)
def test_a_score_that_never_changes_has_an_empty_map(cls: type[GridAttribution]) -> None:
    constant = Cells(lambda cells: 0 * cells.sum(1) + 3)
    found = cls(constant, grid=3, passes=44).attribute(ones(), 0)
    assert not found.values.any()
    assert found.run_stats[0].note == "the score varied by no more than rounding"
    # Hidden pixels that look like the rest leave nothing but rounding.
    same = cls(tiny_model(), grid=3, passes=44, fill=0.3).attribute(torch.full((1, 3, 16, 16), 0.3), 0)
    assert not same.values.any()


class Halved(Cells):
    """A score of half precision around 11, handed on as `out`."""

    def __init__(self, score: Callable[[Tensor], Tensor], out: torch.dtype) -> None:
        super().__init__(score)
        self.out = out

    def forward(self, x: Tensor) -> Tensor:
        return (11 + super().forward(x.double())).to(x.dtype).to(self.out)


@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head", ["same", "float32"])
def test_half_precision_hides_no_effect_above_its_rounding(
    cls: type[GridAttribution], half: torch.dtype, head: str
) -> None:
    """The scores of the bundled network spread by about 4 % of the largest, 5 eps of bfloat16."""
    out = half if head == "same" else torch.float32

    def found(score: Callable[[Tensor], Tensor]) -> Tensor:
        method = cls(Halved(score, out), grid=3, passes=11 * 64, chunk=352)
        return of_cells(method.attribute(ones().to(half), 0).values).double()

    def precise(score: Callable[[Tensor], Tensor]) -> Tensor:
        method = cls(Cells(lambda cells: 11 + score(cells)), grid=3, passes=11 * 64, chunk=352)
        return of_cells(method.attribute(ones(), 0).values)

    expected = precise(lambda cells: weighted(cells) / 3)
    assert torch.allclose(found(lambda cells: weighted(cells) / 3), expected, atol=0.05 * float(expected.max()))
    last_bit = 0.4 * 11 * torch.finfo(half).eps
    assert not found(lambda cells: last_bit * (cells.sum(1) * 1e4).sin()).any()


@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize("fill", ["blur", "mean", 0.5, [0.0, 1.0, 2.0]])
def test_any_fill_serves(cls: type[GridAttribution], fill: Any) -> None:
    found = cls(tiny_model(), grid=2, passes=24, fill=fill).attribute(torch.randn(1, 3, 16, 16), 0)
    assert found.values.any()


@pytest.mark.parametrize("cls", BOTH)
def test_seeds_repeat_and_differ(cls: type[GridAttribution]) -> None:
    model, x = tiny_model(), torch.randn(1, 3, 16, 16)

    def values(seed: int) -> Tensor:
        return cls(model, grid=3, passes=44, seed=seed, chunk=4).attribute(x, 0).values

    assert torch.equal(values(1), values(1))
    assert not torch.equal(values(1), values(2))
    assert values(-3).isfinite().all()


@pytest.mark.parametrize(("cls", "used"), [(Sobol, 32 * 11), (HSIC, 1500)])
def test_the_passes_are_those_of_the_papers_unless_asked_otherwise(cls: type[GridAttribution], used: int) -> None:
    model, x = tiny_model(), torch.randn(1, 3, 16, 16)
    assert cls(model, grid=3).attribute(x, 0).run_stats[0].passes == used
    assert cls(model, grid=3, passes=50).attribute(x, 0).run_stats[0].passes == (44 if cls is Sobol else 50)
    loose = cls(Cells(weighted), grid=3, tolerance=0.3).attribute(ones(), 0)
    assert loose.run_stats[0].stopped == "tolerance"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Sobol(tiny_model(), grid=0),
        lambda: HSIC(tiny_model(), grid=2.5),  # type: ignore[arg-type]
        lambda: Sobol(tiny_model(), fill="inpaint"),
        lambda: HSIC(tiny_model(), fill="blurred"),
        lambda: Sobol(tiny_model(), grid=3, passes=21).attribute(torch.randn(1, 3, 16, 16), 0),
        lambda: HSIC(tiny_model(), passes=3).attribute(torch.randn(1, 3, 16, 16), 0),
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
    design = partial(hypercube_bits, 3, 0)
    bits = Dependence(design, 1e-9)
    bits.add((design(0, 400) @ torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))[:, None])
    assert bits.agreement == pytest.approx(1)
