"""Models of which the effect of every pixel is known, for the methods that hide parts of a picture."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

SIZE = (8, 10)


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float64, the same at every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def picture(count: int = 1, seed: int = 1) -> Tensor:
    """A batch (N, 3, 8, 10)."""
    return noise(count, 3, *SIZE, seed=seed)


class Linear(nn.Module):
    """A score that is a weighted sum over all pixels, and a constant one."""

    def __init__(self, seed: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(noise(3, *SIZE, seed=seed))
        self.bias = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        score = (x * self.weight).sum((1, 2, 3)) + self.bias
        return torch.stack([score, torch.ones_like(score)], 1)


class Game(nn.Module):
    """A score that is a function of which cells of a grid are shown, of pictures that are 1 everywhere."""

    def __init__(self, value: Callable[[Tensor], Tensor], cells: tuple[int, int]) -> None:
        super().__init__()
        self.value, self.cells = value, cells
        self.gain = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        shown = nn.functional.adaptive_avg_pool2d(x.mean(1, keepdim=True), self.cells).flatten(1)  # (N, M)
        score = self.gain * self.value(shown)
        return torch.stack([score, torch.zeros_like(score)], 1)


def interplay(many: int, seed: int = 3) -> Callable[[Tensor], Tensor]:
    """A game with single effects and interactions of two, three and all, tamed by a tanh."""
    one, two = noise(many, seed=seed), noise(many, many, seed=seed + 1) / many
    three = noise(many, seed=seed + 2)

    def value(shown: Tensor) -> Tensor:  # (N, M) -> (N,)
        pairs = torch.einsum("ni,ij,nj->n", shown, two, shown)
        return shown @ one + pairs + 2 * torch.tanh(shown @ three) * shown[:, 0] + 0.3

    return value


def shapley_values(value: Callable[[Tensor], Tensor], many: int) -> Tensor:
    """The Shapley values (M,) of a game, from its definition: a sum over all sets."""
    result = torch.zeros(many, dtype=torch.float64)
    for player in range(many):
        others = [each for each in range(many) if each != player]
        for size in range(many):
            weight = 1 / (many * math.comb(many - 1, size))
            for chosen in itertools.combinations(others, size):
                without = torch.zeros(1, many, dtype=torch.float64)
                without[0, list(chosen)] = 1
                with_player = without.clone()
                with_player[0, player] = 1
                result[player] += weight * float(value(with_player) - value(without))
    return result


def per_cell(values: Tensor, cells: tuple[int, int]) -> Tensor:
    """The sum (M,) of a map (1, 1, H, W) over each cell of a grid that divides it evenly."""
    pooled = nn.functional.adaptive_avg_pool2d(values, cells)
    return pooled.flatten() * (values.numel() / pooled.numel())


def coverage(values: Tensor, errors: Tensor, truth: Tensor) -> float:
    """The share of the 95 % intervals (seeds, ...) that hold the truth (...)."""
    return float(((values - truth).abs() <= 1.96 * errors).double().mean())
