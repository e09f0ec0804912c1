"""Rules of layer-wise relevance propagation for linear operations: convolutions and matrix products.

For an input a, weights W, bias b and output z = W a + b, a rule divides the relevance R = z * G of each output among
the inputs. Products of single inputs and weights are never formed: with t = |W| |a|, their positive parts sum to
(W a + t) / 2 and their negative parts to (W a - t) / 2.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import MethodError
from ..hooks.call import is_tracing
from ..hooks.operations import norms_over
from ..validation import check_number

_ROUNDING = 128  # sums of parts below this many units of rounding of the other parts count as zero
# A tiny number is added to sums of parts that may be zero: quotients by it are large, so that no mask is needed.
TINY = 1e-30
_LARGE = 1e15


@dataclass
class LinearOperation:
    """A convolution or matrix product of one call, with the batch norm that is merged into it.

    A positive factor of an output channel changes no share. So if a batch norm has only positive factors, weights, bias
    and output are divided by these factors. G is at the output with the factors, and so has the relevance as its
    product with that output.

    Attributes:
        input: The input a, in the shape of the call: (N, C, H, W) or (rows, features).
        weight: The weights.
        bias: The bias, in a shape that broadcasts to the output; None without a bias.
        run: The operation: from an input, weights, and optionally a bias, to a new tensor, the output.
        transposed: Its transpose in the input: from a tensor like the output, and weights, to one like the input.
        recorded: The output without the batch norm; None if the record does not keep it. A ReLU in place may have
            written to it where G is 0.
        scale: The factor from the recorded output to the output with the batch norm; None for 1.
        shift: The constant that is added then; None for 0.
        unit: The factors of the batch norm by which the operation is divided; None for 1.
        dims: The dimensions of the output over which a relative epsilon takes the root mean square.
        norms: The norms of the output over these dimensions; None to compute them.
        grad: G at the output; None if its relevance is known instead.
        output_relevance: The relevance of the output, if only a rectifier reads the output. It is 0 where the output is
            not positive.
        is_rectified: Whether the input is the result of a rectifier, so that no number is negative.
        shared: Values that the walks of several targets share, by name; None for a single target.
        bound: From a bound of the model's input, a number or one per channel, to the bound of this input; None for a
            layer that is not the first one, or a rule other than z-box.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    run: Callable[..., Tensor]
    transposed: Callable[[Tensor, Tensor], Tensor]
    recorded: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    unit: Tensor | None = None
    dims: tuple[int, ...] = (-1,)
    norms: Tensor | None = None
    grad: Tensor | None = None
    output_relevance: Tensor | None = None
    is_rectified: bool = False
    shared: dict[str, tuple[Tensor, Tensor]] | None = None
    bound: Callable[[float | Sequence[float]], Tensor] | None = None

    def merge(self, scale: Tensor, shift: Tensor, relative: Tensor | None, of_weights: Tensor) -> None:
        """Add a factor and a constant for each channel, in the shape (1, C, ...), after the operation.

        Args:
            scale: The factors.
            shift: The constants.
            relative: The constants divided by the factors, if these are all positive; else None.
            of_weights: The factors, in a shape that broadcasts to the weights.
        """
        self.norms = None
        if relative is not None:
            self.bias = relative if self.bias is None else self.bias + relative
            self.shift, self.unit = relative, scale
            return
        self.bias = shift if self.bias is None else torch.addcmul(shift, self.bias, scale)
        self.weight = self.weight * of_weights
        self.scale, self.shift = scale, shift

    @cached_property
    def output(self) -> Tensor:
        """The output z. It may be a tensor of the forward."""
        if self.recorded is None:
            return self.run(self.input, self.weight, self.bias)
        scaled = self.recorded if self.scale is None else self.recorded * self.scale
        return scaled if self.shift is None else scaled + self.shift

    def output_plus(self, values: Tensor, sign: int) -> Tensor:
        """Return the output plus or minus values. This is faster than a sum with `output`, which has to be stored."""
        if self.recorded is None or self.scale is not None:
            return torch.add(self.output, values, alpha=sign)
        total = torch.add(self.recorded, values, alpha=sign)
        return total if self.shift is None else total.add_(self.shift)

    def unbiased(self, magnitudes: Tensor) -> Tensor:
        """Return W a, given |W| |a|. It is computed again if the output minus a large bias would lose digits."""
        if self.bias is None:
            return self.output
        is_small = not is_tracing() and float(self.bias.abs().amax()) <= 8 * float(magnitudes.amin())
        return self.output - self.bias if is_small else self.run(self.input, self.weight)

    @property
    def root_mean_square(self) -> Tensor:
        """The root mean square of the output before its division, for each image (row of a matrix product)."""
        norms = self.norms
        if norms is None:
            norms = self.output if self.unit is None or len(self.dims) == 1 else norms_over(self.output, self.dims[1:])
            norms = norms_over(norms if self.unit is None else norms * self.unit, self.dims)
        return norms / math.sqrt(math.prod(self.output.shape[dim] for dim in self.dims))

    def back(self, grad: Tensor) -> Tensor:
        """Return the transposed weights applied to a tensor like the output: the plain gradient."""
        return self.transposed(grad, self.weight)

    @cached_property
    def is_nonnegative(self) -> bool:
        """Whether all inputs are at least 0, as after a ReLU. True without inputs, as for a box without candidates.

        In a program, whose inputs are not known, only the result of a rectifier is.
        """
        if self.is_rectified or is_tracing():
            return self.is_rectified
        return self.input.numel() == 0 or float(self.input.amin()) >= 0

    @cached_property
    def absolute_weight(self) -> Tensor:
        """|W|."""
        return self.weight.abs()

    def magnitudes(self, bias: Tensor | None) -> Tensor:
        """Return |W| |a| + |bias| as a new tensor."""
        inputs = self.input if self.is_nonnegative else self.input.abs()
        return self.run(inputs, self.absolute_weight, None if bias is None else bias.abs())

    @cached_property
    def negative_weight(self) -> Tensor:
        """The weights, clamped to at most 0."""
        return self.weight.clamp(max=0)

    def negative_parts(self, bias: Tensor | None) -> Tensor:
        """Return the sum of the negative parts as a new tensor, with a negative bias."""
        if self.is_nonnegative:
            return self.run(self.input, self.negative_weight, bias)
        parts = self.run(self.input.clamp(min=0), self.negative_weight, bias)
        return parts.add_(self.run(self.input.clamp(max=0), self.weight.clamp(min=0)))

    @cached_property
    def relevance(self) -> Tensor:
        """The relevance of the output."""
        if self.output_relevance is not None or self.grad is None:
            return cast("Tensor", self.output_relevance)
        if self.recorded is not None and self.unit is not None and self.shift is not None:
            return torch.addcmul(self.shift * self.unit, self.recorded, self.unit).mul_(self.grad)
        return self.scaled(self.output * self.grad)

    def scaled(self, grad: Tensor) -> Tensor:
        """Multiply G at the output, or a tensor proportional to it, in place by the factors of the batch norm."""
        return grad if self.unit is None else grad.mul_(self.unit)

    def quotients(self, parts: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Divide the relevance of the output by sums of parts, which are overwritten.

        Returns:
            The quotients; their sums over all positions; and the relevance that nothing receives because no part has
            the right sign, None if there is none.
        """
        shares = torch.div(self.relevance, parts, out=parts)
        if is_tracing():
            shares.nan_to_num_(0, torch.inf, -torch.inf)
        else:
            sums = self.channel_sums(shares)
            total = float(sums.abs().sum())
            if not math.isfinite(total):  # 0 / 0 is 0
                sums = self.channel_sums(shares.nan_to_num_(0, torch.inf, -torch.inf))
                total = float(sums.abs().sum())
            if total <= _LARGE:  # false for NaN
                return shares, sums, None
        sizes = shares.abs()
        lost = where_above(self.relevance, sizes, _LARGE)
        shares = where_above(shares, sizes.neg_(), -_LARGE)
        return shares, self.channel_sums(shares), lost

    def one_sign_quotients(self, parts: Tensor, tiny: float) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return `quotients` by exact sums of parts of one sign, to which a tiny number was added.

        Where there is no part, quotients are huge. If a rectifier computes the inputs, they need no mask: they reach
        only inputs of zero, which have no relevance. Times the tiny number, they are the lost relevance.
        """
        if not self.is_rectified or len(self.dims) < 2:
            return self.quotients(parts)
        shares = torch.div(self.relevance, parts, out=parts)
        sums = self.channel_sums(shares)
        return shares, sums, sums.sum(1).mul_(tiny)

    def channel_sums(self, shares: Tensor) -> Tensor:
        """Return the sums over all positions (N, channels) of a convolution; of a matrix product, the shares."""
        return shares.sum(self.dims[1:]) if len(self.dims) > 1 else shares

    def bias_share(self, sums: Tensor, bias: Tensor) -> Tensor:
        """Return the relevance of a bias, given the `channel_sums` of shares, summed at least over the channels."""
        is_vector = len(self.dims) > 1 or bias.numel() == bias.shape[-1] == sums.shape[-1]
        return sums @ bias.flatten() if is_vector else sums * bias

    def divide(self, part: Callable[[Tensor], Tensor], bias: Tensor | None, *, has_one_sign: bool) -> Passed:
        """Divide the relevance of the output by parts with some of the weights and of the bias, perhaps of one sign."""
        bias = None if bias is None else part(bias)
        known = {} if self.shared is None else self.shared
        if "parts" not in known:
            weight = part(self.weight)
            known["parts"] = weight, self.run(self.input, weight, None if bias is None else bias + TINY)
        weight, parts = known["parts"]
        parts = parts if self.shared is None else parts.clone()
        shares, sums, lost = (
            self.one_sign_quotients(parts, TINY) if has_one_sign and bias is not None else self.quotients(parts)
        )
        biases = None if bias is None else self.bias_share(sums, bias)
        return Passed(self.transposed(shares, weight), biases=biases, lost=lost)

    def spread(self, shares: Tensor, signed: Tensor) -> Tensor:
        """Return G at the input for shares of the parts a w, and other shares of their magnitudes |a w|."""
        magnitudes = self.transposed(signed, self.absolute_weight)
        return self.back(shares).add_(magnitudes if self.is_nonnegative else magnitudes.mul_(self.input.sign()))


class Passed(NamedTuple):
    """Result of a rule for the input of an operation.

    Attributes:
        grad: G at the input, where the relevance is input * G; None if the rule returns relevance.
        relevance: The relevance of the input, of rules that also give relevance to an input of zero.
        biases: The relevance that the bias absorbs, by `LinearOperation.bias_share`; None if it is zero.
        lost: The relevance that nothing receives, like the output; None if it is zero.
    """

    grad: Tensor | None = None
    relevance: Tensor | None = None
    biases: Tensor | None = None
    lost: Tensor | None = None


class AnyRule:
    """Base class of `Rule` and `NonlinearRule`."""

    name: ClassVar[str] = "own rule"

    def __repr__(self) -> str:
        """Return the name of the class."""
        return f"{type(self).__name__}()"


class Rule(AnyRule, ABC):
    """Base class of the rules of convolutions and matrix products.

    A rule is a class with `relevance`. In layers after the first one, relevance of an input of zero goes no further;
    the ledger holds it as "inputs of zero".

        class Uniform(Rule):
            name = "uniform"

            def relevance(self, op, relevance):
                ones = torch.ones_like(op.weight)
                return op.transposed(relevance / op.run(torch.ones_like(op.input), ones), ones)
    """

    reads_gradient: ClassVar[bool] = False
    """Whether the rule needs G at the output instead of its relevance."""

    @abstractmethod
    def relevance(self, op: LinearOperation, relevance: Tensor) -> Tensor:
        """Return the relevance of the input, given the relevance of the output."""

    def propagate(self, op: LinearOperation) -> Passed:
        """Return the result of the rule for the input, given G or the relevance at the output."""
        return Passed(relevance=self.relevance(op, op.relevance))


@dataclass
class NonlinearOperation:
    """An activation or a normalisation of one call.

    Attributes:
        input: The input.
        output: The output, in the shape of the input.
        run: The operation: from a tensor like the input to a new tensor.
    """

    input: Tensor
    output: Tensor
    run: Callable[[Tensor], Tensor]


class NonlinearRule(AnyRule, ABC):
    """Base class of the rules of activations and normalisations.

    Relevance of an input of zero goes no further. The ledger holds relevance that is lost in a rule as "stabiliser".

        class Positive(NonlinearRule):
            name = "positive"

            def relevance(self, op, relevance):
                return relevance * (op.input > 0)
    """

    @abstractmethod
    def relevance(self, op: NonlinearOperation, relevance: Tensor) -> Tensor:
        """Return the relevance of the input, given the relevance of the output."""


class _GradientRule(Rule):
    """Base class of the rules that give no relevance to an input of zero."""

    def relevance(self, op: LinearOperation, relevance: Tensor) -> Tensor:
        """Return the relevance of the input, given the relevance of the output."""
        grad = divided(relevance, op.scaled(op.output.clone()))
        return op.input * cast("Tensor", self.propagate(replace(op, grad=grad, output_relevance=None)).grad)


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

    @property
    def reads_gradient(self) -> bool:  # type: ignore[override]
        """Whether the rule is the plain gradient."""
        return not self.epsilon

    def propagate(self, op: LinearOperation) -> Passed:
        """Return the result of the rule for the input, given G or the relevance at the output."""
        grad = op.grad
        if grad is not None and not self.epsilon:
            kept = grad if op.unit is None else grad * op.unit
            biases = None if op.bias is None else op.bias_share(op.channel_sums(kept), op.bias)
            return Passed(op.back(kept), biases=biases)
        z = op.output
        size = op.root_mean_square.clamp_(min=torch.finfo(z.dtype).tiny) if self.relative else z.new_ones([1] * z.dim())
        epsilon = self.epsilon * size
        own = epsilon if op.unit is None else epsilon / op.unit
        if grad is None:  # the relevance is 0 where the output is not positive
            is_stored = op.recorded is not None and op.shift is None  # a tensor of the forward
            shares, sums, _ = op.quotients(z + own if is_stored else z.add_(own))
            lost = sums * (own.flatten(1) if len(op.dims) > 1 else own)
        else:
            denominator = z.abs().add_(own)
            shares = torch.div(z, denominator, out=denominator).mul_(grad)
            lost = op.channel_sums(shares) * (epsilon.flatten(1) if len(op.dims) > 1 else epsilon)
            shares = op.scaled(shares.copysign_(grad))
            sums = op.channel_sums(shares)
        lost = lost.sum(1) if len(op.dims) > 1 else lost
        return Passed(op.back(shares), biases=None if op.bias is None else op.bias_share(sums, op.bias), lost=lost)


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

    def propagate(self, op: LinearOperation) -> Passed:
        """Return the result of the rule for the input, given G or the relevance at the output."""
        is_known = op.grad is None or (not is_tracing() and not bool(op.output.clamp(max=0).mul_(op.grad).any()))
        if op.is_nonnegative and is_known:
            # Up to the factor 1 + gamma, which cancels, this is the operation with larger positive weights.
            return op.divide(self._reduced, op.bias, has_one_sign=False)
        # The sum of both parts of which the one with the sign of z counts more, up to a factor.
        z, factor = op.output, self.gamma / (2 + self.gamma)
        magnitudes = op.magnitudes(op.bias).copysign_(z)
        parts = torch.add(z, magnitudes, alpha=factor, out=magnitudes)
        sign = parts.sign()
        shares, sums, lost = op.quotients(parts)
        signed = sign.mul_(shares).mul_(factor)
        biases = None
        if op.bias is not None:
            biases = op.bias_share(sums, op.bias) + op.bias_share(op.channel_sums(signed), op.bias.abs())
        return Passed(op.spread(shares, signed), biases=biases, lost=lost)

    def _reduced(self, part: Tensor) -> Tensor:
        """Divide the negative numbers by 1 + gamma."""
        return F.leaky_relu(part, 1 / (1 + self.gamma))


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

    def propagate(self, op: LinearOperation) -> Passed:
        """Return the result of the rule for the input, given G or the relevance at the output."""
        bias = op.bias if self.bias else None
        if not self.beta and op.is_nonnegative:
            return op.divide(F.relu, bias, has_one_sign=True)
        positive = None if bias is None else bias.clamp(min=0)
        if not self.beta:
            parts = magnitudes = op.magnitudes(bias)
            if op.grad is None and self.bias:
                parts = op.output_plus(magnitudes, 1)
            else:
                output = op.output if self.bias else op.unbiased(magnitudes)
                parts = self._cleared(output + magnitudes, magnitudes, 1)
            shares, sums, lost = op.quotients(parts)
            biases = None if positive is None else op.bias_share(sums, 2 * positive)
            return Passed(op.spread(shares, shares), biases=biases, lost=lost)
        # The negative parts are summed for themselves: the positive ones are then sums without cancellation, as long as
        # the output is positive.
        negative = None if bias is None else bias.clamp(max=0)
        parts = op.negative_parts(None if negative is None else negative - TINY)
        if op.grad is None and self.bias:
            up = op.output_plus(parts, -1)
        else:
            up = self._cleared((op.output if self.bias else op.unbiased(-parts)) - parts, parts, -1)
        up, sums, lost = op.quotients(up)
        lost = None if lost is None else lost.mul_(self.alpha).sum(op.dims)
        biases = None if positive is None else op.bias_share(sums, self.alpha * positive)
        down, sums, unreached = op.quotients(parts) if negative is None else op.one_sign_quotients(parts, -TINY)
        if unreached is not None:
            unreached = -self.beta * (unreached.sum(op.dims) if unreached.dim() == parts.dim() else unreached)
            lost = unreached if lost is None else lost + unreached
        if biases is not None and negative is not None:
            biases = biases - op.bias_share(sums, self.beta * negative)
        if op.is_nonnegative:
            passed = op.transposed(down, op.negative_weight)
            return Passed(passed.lerp_(op.transposed(up, op.weight.clamp(min=0)), self.alpha), biases=biases, lost=lost)
        factor = self.beta / self.alpha
        passed = op.spread(torch.sub(up, down, alpha=factor), up.add_(down, alpha=factor))
        return Passed(passed.mul_(self.alpha / 2), biases=biases, lost=lost)

    def _cleared(self, parts: Tensor, others: Tensor, sign: int) -> Tensor:
        """Return sums of positive parts; 0 where they may be rounding errors of others, which have one sign."""
        least = sign * _ROUNDING * torch.finfo(parts.dtype).eps
        return where_above(parts, torch.sub(parts, others, alpha=least), 0)


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
class Excitation(_GradientRule):
    """The rule of the top layer in excitation backpropagation: the score is one neuron above it.

    The weights of this neuron are the gradient of the score at the input of the layer, so that constants in the score
    and its sign at a photo do not matter. The positive parts of the input times these weights are the relevance.

    Source: Zhang et al., "Top-down Neural Attention by Excitation Backprop" (2016), https://arxiv.org/abs/1608.00507.
    """

    name: ClassVar[str] = "excitation"
    reads_gradient: ClassVar[bool] = True

    def propagate(self, op: LinearOperation) -> Passed:
        """Return the result of the rule for the input, given G at the output."""
        weights = op.back(op.scaled(cast("Tensor", op.grad).clone()))
        parts = op.input * weights
        passed = torch.where(parts > 0, weights, weights * self.inhibition(parts, op.dims))
        lost = op.relevance.sum(op.dims, keepdim=True) - (op.input * passed).sum(op.dims, keepdim=True)
        return Passed(passed, lost=lost)

    def inhibition(self, parts: Tensor, dims: tuple[int, ...]) -> Tensor:
        """Return the factor of negative parts."""
        return parts.new_zeros(())


@dataclass(frozen=True)
class ContrastiveRule(Excitation):
    """The rule of the top layer in contrastive excitation backpropagation: negative parts receive relevance too.

    They are scaled to the sum of the positive ones, so that nothing passes in total.

    Source: Zhang et al., "Top-down Neural Attention by Excitation Backprop" (2016), https://arxiv.org/abs/1608.00507.
    """

    name: ClassVar[str] = "contrast"

    def inhibition(self, parts: Tensor, dims: tuple[int, ...]) -> Tensor:
        """Return the factor of negative parts."""
        up, down = (signed.clamp(min=0).sum(dims, keepdim=True) for signed in (parts, -parts))
        return divided(up, down)


@dataclass(frozen=True)
class ZBox(Rule):
    """The rule of pixels between two bounds: the parts are a w - low w+ - high w-.

    Args:
        low, high: The bounds of the model's input: a number, or one per channel. By default, black and white under
            the method's preprocessing. Views, padding and a batch norm before the first layer change them too.

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
        carried = partial(per_channel, like=op.input) if op.bound is None else op.bound
        ends = [carried(bound) for bound in (self.low, self.high)]
        low, high = torch.minimum(*ends), torch.maximum(*ends)  # a factor in between may be negative
        width, up = high - low, op.weight.clamp(min=0)
        z = op.run(op.input, op.weight) - op.run(high, op.weight) + op.run(width, up)
        shares = divided(relevance, z)
        return (op.input - high) * op.back(shares) + width * op.transposed(shares, up)


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
class Pass(Rule, NonlinearRule):
    """The relevance passes unchanged, also through activations and normalisations. Input and output have one shape.

    Raises:
        MethodError: They have different shapes.
    """

    name: ClassVar[str] = "pass"

    def relevance(self, op: LinearOperation | NonlinearOperation, relevance: Tensor) -> Tensor:
        """Return the relevance of the input, given the relevance of the output."""
        if relevance.shape != op.input.shape:
            shapes = f"{tuple(op.input.shape)} to {tuple(relevance.shape)}"
            raise MethodError(f"the rule pass needs an output like the input, but this operation maps {shapes}")
        return relevance


def divided(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Divide two tensors; 0 where the denominator is 0."""
    return where_above(numerator / denominator, denominator.abs(), 0)


def where_above(values: Tensor, others: Tensor, least: float) -> Tensor:
    """Return values where others are above a number or NaN, and 0 elsewhere. A mask takes twenty times as long."""
    return cast("Tensor", torch.ops.aten.threshold_backward(values, others, least))


def per_channel(bound: float | Sequence[float], like: Tensor) -> Tensor:
    """Return one number, or one per channel, in the shape (N, C, ...) of a tensor."""
    return like.new_tensor(bound).reshape(-1, *[1] * (like.dim() - 2)).expand_as(like)
