"""Layer-wise relevance propagation a second time, from the definitions: one neuron after the other.

An affine layer is written out as its matrix, whose rows are the layer's answers to unit inputs. Each rule is a function
of one neuron: which share of the neuron's relevance each of its inputs gets. Nothing here knows of the library, of
autograd or of convolutions. Everything is in float64.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd


class Neuron(NamedTuple):
    """One output of an affine layer with J inputs."""

    a: Tensor  # (J,) inputs
    w: Tensor  # (J,) weights
    b: Tensor  # () bias
    connected: Tensor  # (J,) 1 where the input has a weight, also if that is 0, else 0
    scale: Tensor  # () root mean square of all outputs of the layer for this image


Rule = Callable[[Neuron], Tensor]  # shares (J,) of the neuron's relevance


def _fraction(parts: Tensor, total: Tensor) -> Tensor:
    """Parts of a total; nobody gets anything of a total of zero."""
    return parts / total if total != 0 else torch.zeros_like(parts)


def _positive(numbers: Tensor) -> Tensor:
    return torch.where(numbers > 0, numbers, torch.zeros_like(numbers))


def _negative(numbers: Tensor) -> Tensor:
    return torch.where(numbers < 0, numbers, torch.zeros_like(numbers))


def epsilon(size: float = 1e-6, *, relative: bool = True) -> Rule:
    def rule(neuron: Neuron) -> Tensor:
        c = neuron.a * neuron.w
        z = c.sum() + neuron.b
        stabiliser = size * (neuron.scale if relative else 1.0)
        return _fraction(c, z + stabiliser if z >= 0 else z - stabiliser)

    return rule


def gamma(size: float = 0.25) -> Rule:
    def rule(neuron: Neuron) -> Tensor:
        c, b = neuron.a * neuron.w, neuron.b
        z = c.sum() + b
        if z == 0:
            return torch.zeros_like(c)
        kept = _positive if z > 0 else _negative
        return _fraction(c + size * kept(c), (c + size * kept(c)).sum() + b + size * kept(b))

    return rule


def alpha_beta(alpha: float = 2.0, beta: float = 1.0, *, biased: bool = True) -> Rule:
    def rule(neuron: Neuron) -> Tensor:
        c, b = neuron.a * neuron.w, neuron.b * biased
        excitation = _fraction(_positive(c), _positive(c).sum() + _positive(b))
        inhibition = _fraction(_negative(c), _negative(c).sum() + _negative(b))
        return alpha * excitation - beta * inhibition

    return rule


def contrast() -> Rule:
    """What `z_plus` without bias gives for the weights, less what it gives for the negated weights."""

    def rule(neuron: Neuron) -> Tensor:
        c = neuron.a * neuron.w
        return _fraction(_positive(c), _positive(c).sum()) - _fraction(_positive(-c), _positive(-c).sum())

    return rule


def z_plus(*, biased: bool = True) -> Rule:
    return alpha_beta(1.0, 0.0, biased=biased)


def z_box(low: Tensor, high: Tensor) -> Rule:
    """Lowest and highest values (J,) of each input."""

    def rule(neuron: Neuron) -> Tensor:
        parts = neuron.a * neuron.w - low * _positive(neuron.w) - high * _negative(neuron.w)
        return _fraction(parts, parts.sum())

    return rule


def w_square() -> Rule:
    return lambda neuron: _fraction(neuron.w**2, (neuron.w**2).sum())


def flat() -> Rule:
    return lambda neuron: _fraction(neuron.connected, neuron.connected.sum())


def matrix(layer: nn.Module, shape: Sequence[int]) -> Tensor:
    """The weights (J, K) of an affine layer with J inputs and K outputs."""
    units = torch.eye(math.prod(shape), dtype=torch.float64).reshape(-1, *shape)
    answers: Tensor = layer(units) - layer(torch.zeros_like(units))
    return answers.flatten(1).detach()


def connections(layer: nn.Module, shape: Sequence[int]) -> Tensor:
    """Which of J inputs each of K outputs is connected to, as a matrix (J, K) of 0 and 1."""
    same = copy.deepcopy(layer)
    for each in same.modules():
        if isinstance(each, nn.Linear | _ConvNd):
            nn.init.ones_(each.weight)
    return (matrix(same, shape) != 0).double()


def through(layer: nn.Module, a: Tensor, relevance: Tensor, rule: Rule) -> Tensor:
    """The relevance (N, ...) of the inputs of an affine layer, from that of its outputs.

    A convolution and the batch norm after it are one affine layer, `nn.Sequential(conv, norm)`.
    """
    weights, connected = matrix(layer, a.shape[1:]), connections(layer, a.shape[1:])
    biases = layer(torch.zeros_like(a[:1])).flatten().detach()
    found = torch.zeros(a.shape, dtype=torch.float64)
    for image, outputs, into in zip(a.flatten(1), relevance.flatten(1), found.flatten(1), strict=True):
        scale = (image @ weights + biases).square().mean().sqrt()
        for k, r in enumerate(outputs):
            into += r * rule(Neuron(image, weights[:, k], biases[k], connected[:, k], scale))
    return found


def through_batch_norm(norm: _BatchNorm, a: Tensor, relevance: Tensor) -> Tensor:
    """The |z| rule, for a batch norm y = s a + c that cannot be merged: magnitudes as shares."""
    shape = (1, -1, *[1] * (a.ndim - 2))
    assert norm.running_mean is not None
    assert norm.running_var is not None
    s = norm.weight / (norm.running_var + norm.eps).sqrt()
    c = norm.bias - s * norm.running_mean
    share = (s.view(shape) * a).abs()
    return (relevance * share / (share + c.view(shape).abs())).detach()


def through_max_pool(pool: nn.MaxPool2d, a: Tensor, relevance: Tensor) -> Tensor:
    """All to the winner of each window."""
    _, winners = nn.functional.max_pool2d(a, pool.kernel_size, pool.stride, pool.padding, return_indices=True)
    found = torch.zeros_like(a).flatten(2)
    return found.scatter_add(2, winners.flatten(2), relevance.flatten(2)).view_as(a)


def lrp(layers: Sequence[nn.Module], x: Tensor, target: int, rules: dict[int, Rule]) -> list[Tensor]:
    """The relevance of the input of each layer of a chain, and of its output: at first, that of one score."""
    scores = nn.Sequential(*layers)(x.double()).detach()
    relevance = torch.zeros_like(scores)
    relevance[:, target] = scores[:, target]
    return propagate(layers, x, relevance, rules)


def propagate(layers: Sequence[nn.Module], x: Tensor, relevance: Tensor, rules: dict[int, Rule]) -> list[Tensor]:
    """The relevance of the input of each layer of a chain, from that of its output.

    Layers have rules by number, or pass relevance on. Average pools without a rule get `epsilon(0)`.
    """
    inputs = [x.double()]
    for layer in layers:
        inputs.append(layer(inputs[-1]).detach())
    found = [relevance]
    for number in reversed(range(len(layers))):
        layer, a = layers[number], inputs[number]
        if number in rules:
            relevance = through(layer, a, relevance, rules[number])
        elif isinstance(layer, nn.MaxPool2d):
            relevance = through_max_pool(layer, a, relevance)
        elif isinstance(layer, _BatchNorm):
            relevance = through_batch_norm(layer, a, relevance)
        elif isinstance(layer, nn.AvgPool2d | nn.AdaptiveAvgPool2d):
            relevance = through(layer, a, relevance, epsilon(0))
        relevance = relevance.reshape_as(a)
        found.append(relevance)
    return found[::-1]
