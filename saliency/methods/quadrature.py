"""Rules for integrals over 0..1: fixed nodes and weights, and weights that are read off the function itself."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from ..validation import check_choice, check_whole_number

Rule = Literal["gauss_legendre", "midpoint", "trapezoid", "riemann_left", "riemann_right"]

RULES: tuple[Rule, ...] = get_args(Rule)

FIRST_NODES = 9
"""How many evenly spaced nodes an adaptive integral begins with."""
SPLIT_AT_ONCE = 4
"""How many intervals it halves in a round, at most. A fixed number: the result must not depend on chunks."""


class Nodes(NamedTuple):
    """Where an integrand over 0..1 is asked, and what each answer counts."""

    at: Tensor  # (n,) float64, rising
    weights: Tensor  # (n,) float64, of sum 1


def rule(name: str, count: int) -> Nodes:
    """The nodes of a rule for integrals over 0..1, in float64 on the CPU.

    Gauss and Legendre's is exact for polynomials of degree 2n - 1, the midpoint and the trapezoid rule for degree 1,
    the Riemann sums, which ask the left or the right end of each of n intervals, for constants.

    Args:
        name: One of `RULES`.
        count: The number of nodes; the trapezoid rule takes at least two, since both ends are among them.

    Raises:
        MethodError: There is no such rule, or the number is none.

    Source: Golub and Welsch, "Calculation of Gauss Quadrature Rules" (1969),
        https://doi.org/10.1090/S0025-5718-69-99647-1.
    """
    check_choice("rule", name, RULES)
    least = 2 if name == "trapezoid" else 1
    count = check_whole_number("steps", count, least=least)
    if name == "gauss_legendre":
        nodes, weights = np.polynomial.legendre.leggauss(count)
        return Nodes(torch.from_numpy((nodes + 1) / 2), torch.from_numpy(weights / weights.sum()))
    if name == "trapezoid":
        even = torch.full((count,), 1 / (count - 1), dtype=torch.float64, device="cpu")
        even[[0, -1]] /= 2
        return Nodes(torch.linspace(0, 1, count, dtype=torch.float64, device="cpu"), even)
    shift = {"riemann_left": 0.0, "midpoint": 0.5, "riemann_right": 1.0}[name]
    at = (torch.arange(count, dtype=torch.float64, device="cpu") + shift) / count
    return Nodes(at, torch.full((count,), 1 / count, dtype=torch.float64, device="cpu"))


class Adaptive:
    """The mean slope of a function over 0..1, from its values and slopes at nodes that come as they are needed.

    In each interval between two nodes, the slopes at both ends are mixed so that their mean is the secant, which is
    known from the values. For a piecewise linear function with one kink in the interval this is exact, wherever the
    kink lies, and the networks with ReLUs that this is for are piecewise linear on a straight path. Where the secant
    is not between the two slopes, the nearer one is taken whole, and a residual stays. The intervals with the largest
    residuals are halved next; every node that was ever asked is kept.

    The weights of the slopes are never negative, and their sum is 1, so what is made with them is a mean.
    """

    def __init__(self) -> None:
        self.at: list[float] = []
        self._values: list[float] = []
        self._slopes: list[float] = []

    def wanted(self) -> list[float]:
        """The nodes to ask next: evenly spaced ones at first, then the middles of the worst intervals."""
        if not self.at:
            return [i / (FIRST_NODES - 1) for i in range(FIRST_NODES)]
        order, residuals = self._order(), self._mixed()[1].abs()
        worst = residuals.sort(descending=True, stable=True).indices[:SPLIT_AT_ONCE].tolist()
        worst = [i for i in worst if residuals[i] > 0.1 * residuals.max()]
        return sorted((self.at[order[i]] + self.at[order[i + 1]]) / 2 for i in worst)

    def add(self, at: float, value: float, slope: float) -> None:
        """Take in the function's value and slope at a node."""
        self.at.append(at)
        self._values.append(value)
        self._slopes.append(slope)

    @property
    def weights(self) -> Tensor:
        """What the slope at each node counts (n,), in the order in which they came; float64, of sum 1."""
        order = self._order()
        if len(order) == 1:
            return torch.ones(1, dtype=torch.float64, device="cpu")
        shares, _ = self._mixed()
        widths = torch.tensor([self.at[i] for i in order], dtype=torch.float64, device="cpu").diff()
        sorted_weights = torch.zeros(len(order), dtype=torch.float64, device="cpu")
        sorted_weights[:-1] += widths * shares
        sorted_weights[1:] += widths * (1 - shares)
        weights = torch.empty_like(sorted_weights)
        weights[order] = sorted_weights / widths.sum()  # an interrupted run has not come to the end
        return weights

    @property
    def rise(self) -> float:
        """How much the function rises from the first node to the last."""
        order = self._order()
        return self._values[order[-1]] - self._values[order[0]]

    @property
    def residual(self) -> float:
        """What the weighted slopes miss of the rise: they and this make it up."""
        return float(self._mixed()[1].sum()) if len(self.at) > 1 else 0.0

    @property
    def rounding(self) -> float:
        """A residual below this says nothing, for values in float32."""
        return 1e-6 * max(abs(each) for each in self._values)

    def _order(self) -> list[int]:
        return sorted(range(len(self.at)), key=self.at.__getitem__)

    def _mixed(self) -> tuple[Tensor, Tensor]:
        """For each interval, the share of the slope at its left end (n - 1,), and what it misses (n - 1,)."""
        order = self._order()
        at, values, slopes = (
            torch.tensor([numbers[i] for i in order], dtype=torch.float64, device="cpu")
            for numbers in (self.at, self._values, self._slopes)
        )
        left, right, widths, rises = slopes[:-1], slopes[1:], at.diff(), values.diff()
        apart = left - right
        bent = apart.abs() > 1e-9 * slopes.abs().max()
        shares = torch.where(bent, (rises / widths - right) / torch.where(bent, apart, 1.0), 0.5).clamp(0, 1)
        return shares, rises - widths * (shares * left + (1 - shares) * right)
