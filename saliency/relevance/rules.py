"""Rules of layer-wise relevance propagation for linear operations: convolutions and matrix products.

For an input a, weights W, bias b and output z = W a + b, a rule divides the relevance R = z * G of each output among
the inputs. Products of single inputs and weights are never formed: with t = |W| |a|, their positive parts sum to
(W a + t) / 2 and their negative parts to (W a - t) / 2.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from ..errors import MethodError
from ..hooks.operations import norms_over
from ..validation import check_number

_ROUNDING = 64  # sums of parts below this many units of rounding of |W| |a| + |b| count as zero


@dataclass
class LinearOperation:
    """A convolution or matrix product of one call, with the batch norm that is merged into it.

    Attributes:
        input: The input a, in the shape of the call: (N, C, H, W) or (rows, features).
        raw_weight: The weights without the batch norm.
        raw_bias: The bias without the batch norm, in a shape that broadcasts to the output; None without a bias.
        raw_output: The output without the batch norm; None if the record does not keep it. A ReLU in place may have
            written to it where G is 0.
        run: The operation: from an input, weights, and optionally a bias, to an output.
        transposed: Its transpose in the input: from a tensor like the output, and weights, to one like the input.
        scale: The factor of the batch norm for each output channel; None if nothing is merged.
        shift: The constant of the batch norm.
        weight_shape: The shape in which a factor per output channel broadcasts to the weights.
        dims: The dimensions of the output over which a relative epsilon takes the root mean square.
        norms: The norms of the output over these dimensions; None to compute them.
    """

    input: Tensor
    raw_weight: Tensor
    raw_bias: Tensor | None
    raw_output: Tensor | None
    run: Callable[..., Tensor]
    transposed: Callable[[Tensor, Tensor], Tensor]
    scale: Tensor | None = None
    shift: Tensor | None = None
    weight_shape: tuple[int, ...] = ()
    dims: tuple[int, ...] = (-1,)
    norms: Tensor | None = None

    @cached_property
    def weight(self) -> Tensor:
        """The weights, with the batch norm."""
        return self.raw_weight if self.scale is None else self.raw_weight * self.scale.view(self.weight_shape)

    @cached_property
    def bias(self) -> Tensor | None:
        """The bias, with the batch norm."""
        if self.scale is None or self.shift is None:
            return self.raw_bias
        return self.shift if self.raw_bias is None else torch.addcmul(self.shift, self.raw_bias, self.scale)

    @cached_property
    def output(self) -> Tensor:
        """The output z, with the batch norm."""
        raw = self.raw_output
        if raw is None:
            raw = self.run(self.input, self.raw_weight)
            raw = raw if self.raw_bias is None else raw + self.raw_bias
        if self.scale is None or self.shift is None:
            return raw
        return torch.addcmul(self.shift, raw, self.scale)

    def relevance(self, grad: Tensor) -> Tensor:
        """Return the relevance of the output, given G at the output, as a new tensor."""
        if self.scale is None or self.shift is None or self.raw_output is None:
            return self.output * grad
        return torch.addcmul(self.shift, self.raw_output, self.scale).mul_(grad)

    @property
    def positive_weight(self) -> Tensor:
        """The positive weights, with the batch norm; the others are 0."""
        if self.scale is None:
            return self.raw_weight.clamp(min=0)
        return (self.raw_weight * self.scale.view(self.weight_shape)).clamp_(min=0)

    @property
    def unbiased(self) -> Tensor:
        """W a."""
        if self.scale is not None and self.raw_output is not None and self.raw_bias is None:
            return self.raw_output * self.scale
        return self.output if self.bias is None else self.output - self.bias

    @property
    def root_mean_square(self) -> Tensor:
        """The root mean square of the output, for each image (row of a matrix product)."""
        total = norms_over(self.output, self.dims) if self.norms is None else self.norms
        return total / math.sqrt(math.prod(self.output.shape[dim] for dim in self.dims))

    def back(self, grad: Tensor) -> Tensor:
        """Return the transposed weights applied to a tensor like the output: the plain gradient."""
        return self.transposed(grad if self.scale is None else grad * self.scale, self.raw_weight)

    @cached_property
    def is_nonnegative(self) -> bool:
        """Whether all inputs are at least zero, as after a ReLU."""
        return bool(self.input.amin() >= 0)

    def bias_share(self, shares: Tensor, bias: Tensor) -> Tensor:
        """Return shares times a bias, summed at least over the channels."""
        if bias.numel() == bias.shape[-1] == shares.shape[-1]:  # of a matrix product
            return shares @ bias.flatten()
        if bias.dim() > 2 and bias.numel() == bias.shape[1]:  # of a convolution
            return shares.flatten(2).sum(2) @ bias.flatten()
        return shares * bias


class Passed(NamedTuple):
    """Result of a rule for the input of an operation.

    Attributes:
        grad: G at the input, where the relevance is input * G; None if the rule returns relevance.
        relevance: The relevance of the input, of rules that also give relevance to an input of zero.
        biases: The relevance that the bias absorbs, by `LinearOperation.bias_share`; None if it is zero.
        lost: G of relevance that nothing receives, like the output; None if it is zero.
    """

    grad: Tensor | None = None
    relevance: Tensor | None = None
    biases: Tensor | None = None
    lost: Tensor | None = None


class Rule(ABC):
    """Base class of the rules of convolutions and matrix products.

    A rule is a class with `relevance`. In layers after the first one, relevance of an input of zero goes no further;
    the ledger holds it as "inputs of zero".

        class Uniform(Rule):
            name = "uniform"

            def relevance(self, op, relevance):
                ones = torch.ones_like(op.weight)
                return op.transposed(relevance / op.run(torch.ones_like(op.input), ones), ones)
    """

    name: ClassVar[str] = "own rule"

    def __repr__(self) -> str:
        """Return the name of the class."""
        return f"{type(self).__name__}()"

    @abstractmethod
    def relevance(self, op: LinearOperation, relevance: Tensor) -> Tensor:
        """Return the relevance of the input, given the relevance of the output."""

    def propagate(self, op: LinearOperation, grad: Tensor) -> Passed:
        """Return what the rule passes to the input, given G at the output."""
        return Passed(relevance=self.relevance(op, op.output * grad))


class _GradientRule(Rule):
    """Base class of the rules that give no relevance to an input of zero."""

    def relevance(self, op: LinearOperation, relevance: Tensor) -> Tensor:
        """Return the relevance of the input, given the relevance of the output."""
        return op.input * cast("Tensor", self.propagate(op, divided(relevance, op.output)).grad)


@dataclass(frozen=True)
class Epsilon(_GradientRule):
    """Each input receives its share a w / (z + epsilon sign z); epsilon absorbs relevance where z is small.

    Args:
        epsilon: At least 0. With 0, the rule is the plain gradient.
        relative: Whether epsilon is in units of the root mean square of z, for each image (row of a matrix product).

    Raises:
        MethodError: epsilon is negative.

    Source: Bach et al., "On Pixel-Wise Explanations for Non-Linear Classifier Decisions by Layer-Wise Relevance
        Propagation" (2015), https://doi.org/10.1371/journal.pone.0130140.
    """

    name: ClassVar[str] = "epsilon"
    epsilon: float = 1e-6
    relative: bool = True

    def __post_init__(self) -> None:
        check_number("epsilon", self.epsilon, least=0)

    def propagate(self, op: LinearOperation, grad: Tensor) -> Passed:
        """Return what the rule passes to the input, given G at the output."""
        if not self.epsilon:
            return Passed(op.back(grad), biases=None if op.bias is None else op.bias_share(grad, op.bias))
        unit = op.root_mean_square.clamp_(min=torch.finfo(grad.dtype).tiny) if self.relative else 1.0
        lost = grad / op.output.abs().div_(self.epsilon * unit).add_(1)
        kept = grad - lost
        biases = None if op.bias is None else op.bias_share(kept, op.bias)
        return Passed(op.back(kept), biases=biases, lost=lost)


@dataclass(frozen=True)
class Gamma(_GradientRule):
    """Like `Epsilon` with 0, but parts a w with the sign of the output count 1 + gamma times.

    Inputs of any sign are allowed.

    Args:
        gamma: At least 0.

    Raises:
        MethodError: gamma is negative.

    Source: Andeol et al., "Learning Domain Invariant Representations by Joint Wasserstein Distance Minimization"
        (2021), https://arxiv.org/abs/2106.04923; Montavon et al., "Layer-Wise Relevance Propagation: An Overview"
        (2019), https://doi.org/10.1007/978-3-030-28954-6_10.
    """

    name: ClassVar[str] = "gamma"
    gamma: float = 0.25

    def __post_init__(self) -> None:
        check_number("gamma", self.gamma, least=0)

    def propagate(self, op: LinearOperation, grad: Tensor) -> Passed:
        """Return what the rule passes to the input, given G at the output."""
        z, relevance = op.output, op.output * grad
        if op.is_nonnegative and not bool(((z < 0) & (relevance != 0)).any()):
            return self._after_relu(op, relevance)
        positive, negative = _parts(op, op.bias)
        shares = divided(relevance, torch.where(z > 0, positive, negative).mul_(self.gamma).add_(z))
        signed = torch.where(z > 0, shares, -shares)
        passed = op.back(shares).mul_(1 + self.gamma / 2)
        passed += op.input.sign() * op.transposed(signed, op.weight.abs()).mul_(self.gamma / 2)
        if op.bias is None:
            return Passed(passed)
        agreeing = torch.where((op.bias > 0) == (z > 0), (1 + self.gamma) * shares, shares)
        return Passed(passed, biases=op.bias_share(agreeing, op.bias))

    def _after_relu(self, op: LinearOperation, relevance: Tensor) -> Passed:
        """Return what the rule passes if neither inputs nor outputs with relevance are negative."""
        weight = op.positive_weight.mul_(self.gamma).add_(op.weight)
        bias = None if op.bias is None else op.bias + self.gamma * op.bias.clamp(min=0)
        shares = relevance.div_(op.run(op.input, weight, bias)).nan_to_num_(0, 0, 0)
        return Passed(op.transposed(shares, weight), biases=None if bias is None else op.bias_share(shares, bias))


@dataclass(frozen=True)
class AlphaBeta(_GradientRule):
    """Positive parts a w share alpha times the relevance, and negative parts minus beta times.

    Inputs of any sign are allowed.

    Args:
        alpha: At least 1.
        beta: alpha - 1.
        bias: Whether the bias is a part that receives relevance.

    Raises:
        MethodError: alpha - beta is not 1, or beta is negative.

    Source: Bach et al., "On Pixel-Wise Explanations for Non-Linear Classifier Decisions by Layer-Wise Relevance
        Propagation" (2015), https://doi.org/10.1371/journal.pone.0130140.
    """

    name: ClassVar[str] = "alpha-beta"
    alpha: float = 2.0
    beta: float = 1.0
    bias: bool = True

    def __post_init__(self) -> None:
        check_number("beta", self.beta, least=0)
        if self.alpha - self.beta != 1:
            raise MethodError(f"alpha={self.alpha} and beta={self.beta}: expected alpha - beta = 1")

    def propagate(self, op: LinearOperation, grad: Tensor) -> Passed:
        """Return what the rule passes to the input, given G at the output."""
        if not self.beta and op.is_nonnegative:
            return self._of_nonnegative(op, grad)
        bias = op.bias if self.bias else None
        positive, negative = _parts(op, bias)
        half = op.relevance(grad).mul_(self.alpha / 2)
        up, down = half / positive, half.div_(negative).mul_(self.beta / self.alpha)
        dead = [_remove_infinite(shares) for shares in (up, down)]
        passed = op.back(up - down)
        magnitudes = op.transposed(up + down, op.weight.abs())
        passed += magnitudes if op.is_nonnegative else magnitudes.mul_(op.input.sign())
        biases = None
        if bias is not None:
            biases = 2 * (op.bias_share(up, bias.clamp(min=0)) - op.bias_share(down, bias.clamp(max=0)))
        lost = None
        if any(dead):
            lost = grad * (self.alpha * (positive == 0) - self.beta * (negative == 0))
        return Passed(passed, biases=biases, lost=lost)

    def _of_nonnegative(self, op: LinearOperation, grad: Tensor) -> Passed:
        """Return what the rule passes to inputs of at least zero, for alpha 1 and beta 0."""
        weight = op.positive_weight
        bias = op.bias.clamp(min=0) if self.bias and op.bias is not None else None
        positive = op.run(op.input, weight, bias)
        shares = op.relevance(grad).div_(positive)
        lost = grad * (positive == 0) if _remove_infinite(shares) else None
        biases = None if bias is None else op.bias_share(shares, bias)
        return Passed(op.transposed(shares, weight), biases=biases, lost=lost)


@dataclass(frozen=True)
class ZPlus(AlphaBeta):
    """Only positive parts a w receive relevance: `AlphaBeta` with alpha 1 and beta 0.

    With `bias=False`, this is the rule of excitation backpropagation.

    Source: Montavon et al., "Explaining Nonlinear Classification Decisions with Deep Taylor Decomposition" (2017),
        https://arxiv.org/abs/1512.02479.
    """

    name: ClassVar[str] = "z+"
    alpha: float = 1.0
    beta: float = 0.0


@dataclass(frozen=True)
class Contrast(AlphaBeta):
    """Positive parts a w share the relevance, and negative parts its negative, so that nothing passes in total.

    This is the rule of the top layer in contrastive excitation backpropagation.

    Source: Zhang et al., "Top-down Neural Attention by Excitation Backprop" (2016), https://arxiv.org/abs/1608.00507.
    """

    name: ClassVar[str] = "contrast"
    alpha: float = 1.0
    beta: float = 1.0
    bias: bool = False

    def __post_init__(self) -> None:
        """Accept alpha = beta."""

    def propagate(self, op: LinearOperation, grad: Tensor) -> Passed:
        """Return what the rule passes to the input, given G at the output."""
        passed = super().propagate(op, grad)
        return passed._replace(lost=grad if passed.lost is None else passed.lost + grad)


@dataclass(frozen=True)
class ZBox(Rule):
    """The rule of pixels between two bounds: the parts are a w - low w+ - high w-.

    Args:
        low, high: The bounds of the model's input: a number, or one per channel. By default, those of black and white
            under the method's preprocessing.

    Source: Montavon et al., "Explaining Nonlinear Classification Decisions with Deep Taylor Decomposition" (2017),
        https://arxiv.org/abs/1512.02479.
    """

    name: ClassVar[str] = "z-box"

    low: float | Sequence[float] | None = None
    high: float | Sequence[float] | None = None

    def relevance(self, op: LinearOperation, relevance: Tensor) -> Tensor:
        """Return the relevance of the input, given the relevance of the output."""
        if self.low is None or self.high is None:
            raise MethodError(
                "the rule z-box needs the bounds of the input: pass ZBox(low, high), or a model with a preprocessing"
            )
        low, high = (_per_channel(bound, op.input) for bound in (self.low, self.high))
        up, down = op.weight.clamp(min=0), op.weight.clamp(max=0)
        z = op.unbiased - op.run(low, up) - op.run(high, down)
        shares = divided(relevance, z)
        passed = op.input * op.back(shares)
        return passed - low * op.transposed(shares, up) - high * op.transposed(shares, down)


@dataclass(frozen=True)
class WSquare(Rule):
    """The relevance is shared in proportion to the squared weights, regardless of the input.

    Source: Montavon et al., "Explaining Nonlinear Classification Decisions with Deep Taylor Decomposition" (2017),
        https://arxiv.org/abs/1512.02479.
    """

    name: ClassVar[str] = "w2"

    def weights(self, op: LinearOperation) -> Tensor:
        """Return the weights of the shares."""
        return op.weight.square()

    def relevance(self, op: LinearOperation, relevance: Tensor) -> Tensor:
        """Return the relevance of the input, given the relevance of the output."""
        weights = self.weights(op)
        return op.transposed(divided(relevance, op.run(torch.ones_like(op.input), weights)), weights)


@dataclass(frozen=True)
class Flat(WSquare):
    """The relevance is shared equally among the inputs of each output.

    Source: Lapuschkin et al., "Unmasking Clever Hans Predictors and Assessing What Machines Really Learn" (2019),
        https://arxiv.org/abs/1902.10178.
    """

    name: ClassVar[str] = "flat"

    def weights(self, op: LinearOperation) -> Tensor:
        """Return the weights of the shares."""
        return torch.ones_like(op.weight)


@dataclass(frozen=True)
class Pass(Rule):
    """The relevance passes unchanged. Input and output have the same shape.

    Raises:
        MethodError: They have different shapes.
    """

    name: ClassVar[str] = "pass"

    def relevance(self, op: LinearOperation, relevance: Tensor) -> Tensor:
        """Return the relevance of the input, given the relevance of the output."""
        if relevance.shape != op.input.shape:
            shapes = f"{tuple(op.input.shape)} to {tuple(relevance.shape)}"
            raise MethodError(f"the rule pass needs an output like the input, but this operation maps {shapes}")
        return relevance


def divided(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Divide two tensors; 0 where the denominator is 0."""
    return torch.where(denominator == 0, 0, numerator / denominator)


def _remove_infinite(shares: Tensor) -> bool:
    """Set quotients by zero to 0 in place. Return whether there are any."""
    if bool(torch.isfinite(shares.sum())):
        return False
    shares.nan_to_num_(0, 0, 0)
    return True


def _parts(op: LinearOperation, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the sums of the positive and of the negative parts, with a bias."""
    inputs = op.input if op.is_nonnegative else op.input.abs()
    magnitudes = op.run(inputs, op.weight.abs())
    unbiased = op.unbiased
    positive, negative = (unbiased + magnitudes).div_(2), (unbiased - magnitudes).div_(2)
    rounding = (magnitudes if bias is None else magnitudes + bias.abs()) * (_ROUNDING * torch.finfo(unbiased.dtype).eps)
    positive.masked_fill_(positive <= rounding, 0)
    negative.masked_fill_(negative >= -rounding, 0)
    if bias is None:
        return positive, negative
    return positive.add_(bias.clamp(min=0)), negative.add_(bias.clamp(max=0))


def _per_channel(bound: float | Sequence[float], like: Tensor) -> Tensor:
    values = torch.as_tensor(bound, dtype=like.dtype, device=like.device)
    return values.reshape(-1, *[1] * (like.dim() - 2)).expand_as(like)
