"""DeepLIFT a second time, from the definitions: multipliers between an image and a baseline, step by step.

Each function takes the operands of one operation at the image and at the baseline, and the multipliers of its result,
and returns the multipliers of its operands. A layer norm is a chain of sums, products and functions of one number.
Nothing here knows of the library or of autograd. Everything is in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .textbook import matrix


class Pair(NamedTuple):
    """A value at the image and at the baseline."""

    x: Tensor
    x0: Tensor

    @property
    def difference(self) -> Tensor:
        return self.x - self.x0

    @property
    def mean(self) -> Tensor:
        return (self.x + self.x0) / 2

    def map(self, function: Callable[[Tensor], Tensor]) -> Pair:
        return Pair(function(self.x).detach(), function(self.x0).detach())

    def times(self, other: Pair) -> Pair:
        return Pair(self.x * other.x, self.x0 * other.x0)

    def dot(self, other: Pair) -> Pair:
        return Pair(self.x @ other.x, self.x0 @ other.x0)


def slope(function: Callable[[Tensor], Tensor], x: Pair) -> Tensor:
    """The Rescale rule: the difference of a function of one number over that of its operand."""
    step = 1e-4
    derivative = (function(x.mean + step) - function(x.mean - step)) / (2 * step)
    rise = function(x.x) - function(x.x0)
    return torch.where(x.difference.abs() > 1e-9, rise / x.difference, derivative).detach()


def through_affine(layer: nn.Module, x: Pair, m: Tensor) -> Tensor:
    return (m.flatten(1) @ matrix(layer, x.x.shape[1:]).T).view_as(x.x)


def through_product(a: Pair, b: Pair, m: Tensor) -> tuple[Tensor, Tensor]:
    return m * b.mean, m * a.mean


def through_matmul(a: Pair, b: Pair, m: Tensor) -> tuple[Tensor, Tensor]:
    return m @ b.mean.transpose(-1, -2), a.mean.transpose(-1, -2) @ m


def _inverse(x: Tensor) -> Tensor:
    return 1 / x


def through_softmax(z: Pair, m: Tensor) -> Tensor:
    """exp(z - l), where l, the logarithm of the sum of exponentials, rises so that the results still sum to 1.

    With exp(z) over its sum as a product, shares would grow with the exponential of the difference of the logits.
    """
    total = z.map(lambda each: each.logsumexp(-1, keepdim=True))
    rate = slope(torch.exp, Pair(z.x - total.x, z.x0 - total.x0))
    return m * rate - rate / rate.sum(-1, keepdim=True) * (m * rate).sum(-1, keepdim=True)


def through_layer_norm(weight: Tensor, eps: float, x: Pair, m: Tensor) -> Tensor:
    """(x - mean) times the inverse root of the variance, times a weight."""

    def inverse_root(variance: Tensor) -> Tensor:
        return (variance + eps) ** -0.5

    c = x.map(lambda each: each - each.mean(-1, keepdim=True))
    variance = c.map(lambda each: each.square().mean(-1, keepdim=True))
    m_c, m_root = through_product(c, variance.map(inverse_root), m * weight)
    m_variance = m_root.sum(-1, keepdim=True) * slope(inverse_root, variance)
    m_c = m_c + m_variance / x.x.shape[-1] * slope(torch.square, c)
    return m_c - m_c.mean(-1, keepdim=True)


def through_max_pool(pool: nn.MaxPool2d, x: Pair, m: Tensor) -> Tensor:
    """The winner in the image receives the gain of a window, the winner in the baseline its loss."""
    assert isinstance(pool.kernel_size, int)
    assert isinstance(pool.stride, int)
    found = torch.zeros_like(x.x)
    for n, c, i, j in product(*map(range, m.shape)):
        top, left = i * pool.stride, j * pool.stride
        window = (n, c, slice(top, top + pool.kernel_size), slice(left, left + pool.kernel_size))
        rise = float(x.x[window].max() - x.x0[window].max())
        if rise == 0:
            continue
        values = x.x[window] if rise > 0 else x.x0[window]
        row, column = divmod(int(values.argmax()), values.shape[1])
        at = (n, c, top + row, left + column)
        found[at] += m[n, c, i, j] * rise / x.difference[at]
    return found


def contributions(layers: Sequence[nn.Module], x: Tensor, x0: Tensor, target: int) -> Tensor:
    """Contributions (N, ...) of a chain of affine layers, max pools and functions of one number, by Rescale."""
    values = [Pair(x, x0)]
    for layer in layers:
        values.append(values[-1].map(layer))
    m = torch.zeros_like(values[-1].x)
    m[:, target] = 1
    for layer, value in zip(reversed(layers), reversed(values[:-1]), strict=True):
        if isinstance(layer, nn.MaxPool2d):
            m = through_max_pool(layer, value, m)
        elif isinstance(layer, nn.Linear | nn.Conv2d | nn.Flatten | nn.AvgPool2d):
            m = through_affine(layer, value, m)
        else:
            m = m * slope(layer, value)
    return m * values[0].difference
