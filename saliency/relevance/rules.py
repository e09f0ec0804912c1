"""Rules of layer-wise relevance propagation for convolutions and matrix products, and composites of rules.

For an input a, weights W, bias b and output z = W a + b, a rule divides the relevance R = z * G of each output among
the inputs. `relevance` is its formula; `kernels.py` has a faster form of most rules, tested equal to the formula.
"""

from __future__ import annotations

import fnmatch
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import filterfalse
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ..errors import MethodError, did_you_mean
from ..hooks.operations import norms_over
from ..hooks.rectifiers import table
from ..validation import check_number, described

# A tiny number is added to sums of parts that may be zero: quotients by it are large, so that no mask is needed.
TINY = 1e-30


@dataclass
class LinearOperation:
    """A convolution or matrix product of one call, with the batch norm that is merged into it.

    A positive factor of an output channel does not affect how its relevance is divided. So if a batch norm has only
    positive factors, weights, bias and output are divided by these factors.

    Attributes:
        input: The input a, in the shape of the call: (N, C, H, W) or (rows, features).
        weight: The weights.
        bias: The bias, in a shape that broadcasts to the output, or None.
        run: The operation: from an input, weights, and optionally a bias, to a new tensor, the output.
        transposed: Its transpose in the input: from a tensor like the output, and weights, to one like the input.
        dims: The dimensions of the output that belong to one image (row of a matrix product).
        find_output: The function that computes the output from the forward; None to run the operation again.
        unit: The factors of the batch norm by which the operation is divided; None for 1.
        bound: The function from a bound of the model's input, a number or one per channel, to the bound of this input,
            for the rule z-box at the first layer; else None.
        is_nonnegative: Whether no input is negative, because rectifiers, and perhaps sums, pools and views, compute it.
        is_rectified: Whether, in addition, G at inputs of zero may be huge, since it is not rounded to half precision.
        is_positive: Whether the relevance is 0 where the output is not positive, because only a rectifier reads it.
        shared: Values that the walks of several targets share, by name; None for a single target.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    run: Callable[..., Tensor]
    transposed: Callable[[Tensor, Tensor], Tensor]
    dims: tuple[int, ...] = (-1,)
    find_output: Callable[[], Tensor] | None = None
    unit: Tensor | None = None
    bound: Callable[[float | Sequence[float]], Tensor] | None = None
    is_nonnegative: bool = False
    is_rectified: bool = False
    is_positive: bool = False
    shared: dict[str, tuple[Tensor, Tensor]] | None = None

    @cached_property
    def output(self) -> Tensor:
        """The output z. It may be a tensor of the forward."""
        return self.run(self.input, self.weight, self.bias) if self.find_output is None else self.find_output()

    @cached_property
    def scale(self) -> Tensor:
        """The root mean square of the output before its division, for each image, in the unit of the output."""
        norms = norms_over(self.output, self.dims[1:]) if self.unit is not None and self.dims[1:] else self.output
        return self.scale_of(norms_over(norms if self.unit is None else norms * self.unit, self.dims))

    def scale_of(self, norms: Tensor) -> Tensor:
        """Return the scale for the norm of each image before the division of the output."""
        scale = norms / math.sqrt(math.prod(map(self.output.shape.__getitem__, self.dims)))
        scale = scale.clamp_(min=torch.finfo(scale.dtype).tiny)
        return scale if self.unit is None else scale / self.unit


def parts_of(op: LinearOperation, sign: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the sums of the parts a w of one sign, and the function from quotients R / z to their relevance."""
    up, down = op.input.clamp(min=0), op.input.clamp(max=0)
    like, unlike = signed(op.weight, sign), signed(op.weight, -sign)

    def relevance(quotients: Tensor) -> Tensor:
        return up * op.transposed(quotients, like) + down * op.transposed(quotients, unlike)

    return op.run(up, like) + op.run(down, unlike), relevance


def signed(values: Tensor, sign: int) -> Tensor:
    """Return the values of one sign, and 0 elsewhere."""
    return values.clamp(min=0) if sign > 0 else values.clamp(max=0)


class AnyRule:
    """Base class of `Rule` and `NonlinearRule`."""

    name: ClassVar[str] = "custom rule"

    def __repr__(self) -> str:
        """Return the name of the class."""
        return f"{type(self).__name__}()"


class Rule(AnyRule, ABC):
    """Base class of the rules of convolutions and matrix products.

    A rule is a class with `relevance`. In layers after the first one, relevance of an input of zero stops there; the
    ledger holds it as "inputs of zero".

        class Uniform(Rule):
            name = "uniform"

            def relevance(self, op, relevance):
                ones = torch.ones_like(op.weight)
                return op.transposed(relevance / op.run(torch.ones_like(op.input), ones), ones)
    """

    @abstractmethod
    def relevance(self, op: LinearOperation, relevance: Tensor) -> Tensor:
        """Return the relevance of the input, given the relevance of the output."""


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

    Relevance of an input of zero stops there. The ledger holds relevance that is lost in a rule as "stabiliser".

        class Positive(NonlinearRule):
            name = "positive"

            def relevance(self, op, relevance):
                return relevance * (op.input > 0)
    """

    @abstractmethod
    def relevance(self, op: NonlinearOperation, relevance: Tensor) -> Tensor:
        """Return the relevance of the input, given the relevance of the output."""


@dataclass(frozen=True)
class Epsilon(Rule):
    """Each input receives a w / (z + epsilon sign z) of the relevance; epsilon absorbs relevance where z is small.

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

    def relevance(self, op: LinearOperation, relevance: Tensor) -> Tensor:
        """Return the relevance of the input, given the relevance of the output."""
        epsilon = self.epsilon * (op.scale if self.relative else 1)
        z = op.output
        return op.input * op.transposed(divided(relevance, torch.copysign(z.abs() + epsilon, z)), op.weight)


@dataclass(frozen=True)
class Gamma(Rule):
    """Like `Epsilon(0)`, but parts a w with the sign of the output are multiplied by 1 + gamma.

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

    def relevance(self, op: LinearOperation, relevance: Tensor) -> Tensor:
        """Return the relevance of the input, given the relevance of the output."""
        total = torch.zeros_like(op.input)
        for sign in (1, -1):  # of the output
            parts, through = parts_of(op, sign)
            bias = 0 if op.bias is None else signed(op.bias, sign)
            here = torch.where(op.output * sign > 0, relevance, 0)
            quotients = divided(here, op.output + self.gamma * (parts + bias))
            total = total + op.input * op.transposed(quotients, op.weight) + self.gamma * through(quotients)
        return total


@dataclass(frozen=True)
class AlphaBeta(Rule):
    """Positive parts a w receive alpha times the relevance, and negative parts minus beta times.

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

    def relevance(self, op: LinearOperation, relevance: Tensor) -> Tensor:
        """Return the relevance of the input, given the relevance of the output."""
        total = torch.zeros_like(op.input)
        for sign, factor in ((1, self.alpha), (-1, -self.beta)):
            parts, through = parts_of(op, sign)
            bias = signed(op.bias, sign) if self.bias and op.bias is not None else 0
            total = total + factor * through(divided(relevance, parts + bias))
        return total


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
class Excitation(Rule):
    """The rule of the top layer in excitation backpropagation: the score is one neuron above it.

    The weights of this neuron are the gradient of the score at the input of the layer, so that neither constants in the
    score nor its sign matter. The positive parts of the input times these weights are the relevance.

    Source: Zhang et al., "Top-down Neural Attention by Excitation Backprop" (2016), https://arxiv.org/abs/1608.00507.
    """

    name: ClassVar[str] = "excitation"

    def relevance(self, op: LinearOperation, relevance: Tensor) -> Tensor:
        """Return the relevance of the input, given the relevance of the output."""
        parts = op.input * op.transposed(divided(relevance, op.output), op.weight)
        return torch.where(parts > 0, parts, parts * self.inhibition(parts, op.dims))

    def inhibition(self, parts: Tensor, dims: tuple[int, ...]) -> Tensor:
        """Return the factor of negative parts."""
        return parts.new_zeros(())


@dataclass(frozen=True)
class ContrastiveRule(Excitation):
    """The rule of the top layer in contrastive excitation backpropagation: negative parts receive relevance too.

    Negative parts are scaled to the sum of the positive parts, so that the relevance sums to zero.

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
            the method's preprocessing. Views, padding and a batch norm before the first layer change the bounds too.

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
        quotients = divided(relevance, z)
        return (op.input - high) * op.transposed(quotients, op.weight) + width * op.transposed(quotients, up)


@dataclass(frozen=True)
class WSquare(Rule):
    """The relevance is divided in proportion to the squared weights, regardless of the input.

    Source: Montavon et al., "Explaining Nonlinear Classification Decisions with Deep Taylor Decomposition" (2017),
        https://arxiv.org/abs/1512.02479.
    """

    name: ClassVar[str] = "w2"

    def weights(self, op: LinearOperation) -> Tensor:
        """Return the weights by which the relevance is divided."""
        return op.weight.square()

    def relevance(self, op: LinearOperation, relevance: Tensor) -> Tensor:
        """Return the relevance of the input, given the relevance of the output."""
        weights = self.weights(op)
        return op.transposed(divided(relevance, op.run(torch.ones_like(op.input), weights)), weights)


@dataclass(frozen=True)
class Flat(WSquare):
    """The relevance is divided equally among the inputs of each output.

    Source: Lapuschkin et al., "Unmasking Clever Hans Predictors and Assessing What Machines Really Learn" (2019),
        https://arxiv.org/abs/1902.10178.
    """

    name: ClassVar[str] = "flat"

    def weights(self, op: LinearOperation) -> Tensor:
        """Return the weights by which the relevance is divided."""
        return torch.ones_like(op.weight)


@dataclass(frozen=True)
class Pass(Rule, NonlinearRule):
    """The relevance passes unchanged, also through activations and normalisations.

    Raises:
        MethodError: Input and output have different shapes.
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


# Composites.

RuleKey = str | type[nn.Module]
_KINDS = ("conv", "linear", "activation", "norm", "first", "last")


@dataclass(frozen=True)
class Composite:
    """The rules of a walk.

    Attributes:
        rules: From an operation kind, a type of modules, a layer's name, or a pattern of names, to a rule. The kinds
            are "conv", "linear", "first" and "last" for an operation before or after which no convolution or matrix
            product runs, and "activation" and "norm" for a `NonlinearRule`. The most specific key wins: an exact name
            (of the innermost module), then the longest pattern, then "last", then "first", then a type (of the
            innermost module, then the most derived one), then the others. Convolutions and matrix products without an
            entry pass their gradient.
        constant_gates: Whether attention weights and gates are constants, so that the other factor of a product gets
            all relevance. Otherwise each factor gets half.
        name: The name in settings.
    """

    rules: Mapping[RuleKey, AnyRule] = field(default_factory=dict)
    constant_gates: bool = False
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for kind in _KINDS:
            base = NonlinearRule if kind in ("activation", "norm") else Rule
            if kind in self.rules and not isinstance(self.rules[kind], base):
                raise MethodError(f'composite: "{kind}" takes a {base.__name__}, got {self.rules[kind]}')

    def __str__(self) -> str:
        """Return a table of operations and rules."""
        return table({key_name(key): str(rule) for key, rule in self.rules.items()})

    def layers(self, model: nn.Module) -> dict[RuleKey, list[str]]:
        """Return the names of the modules of each pattern and type. Raises MethodError for a pattern that fits none."""
        keys = list(filterfalse(_KINDS.__contains__, self.rules))
        modules = {name: module for name, module in model.named_modules() if name} if keys else {}
        layers: dict[RuleKey, list[str]] = {}
        for key in keys:
            if isinstance(key, type):
                layers[key] = [name for name, module in modules.items() if isinstance(module, key)]
            elif not layers.setdefault(key, fnmatch.filter(modules, key)):
                kinds = ", ".join(_KINDS)
                raise MethodError(f'composite: no layer "{key}"{did_you_mean(key, modules)} (the kinds are {kinds})')
        return layers


def key_name(key: RuleKey) -> str:
    """Return the name of a key of a composite."""
    return key.__name__ if isinstance(key, type) else key


CompositeLike = str | Composite | Mapping[Any, AnyRule]  # names and types, as keys of a dict, have no common type
# A rule of positive parts passes a negative score unchanged, with the wrong sign for pixels that support it. So the
# last operation divides it by epsilon. Operations before it mostly have outputs of at least 0.
_RULES: dict[str, dict[RuleKey, AnyRule]] = {
    # A quarter of the root mean square: with a smaller epsilon, the map approaches the gradient times the input.
    "epsilon": {"conv": Epsilon(0.25), "linear": Epsilon(0.25)},
    "gamma": {"conv": Gamma(), "linear": Gamma()},
    "epsilon_plus": {"conv": ZPlus(), "linear": Epsilon(), "last": Epsilon()},
    "epsilon_plus_flat": {"conv": ZPlus(), "linear": Epsilon(), "first": Flat(), "last": Epsilon()},
    "epsilon_gamma_box": {"conv": Gamma(), "linear": Epsilon(), "first": ZBox(), "last": Epsilon()},
    "epsilon_alpha2_beta1": {"conv": AlphaBeta(), "linear": Epsilon(), "last": Epsilon()},
    "epsilon_alpha2_beta1_flat": {"conv": AlphaBeta(), "linear": Epsilon(), "first": Flat(), "last": Epsilon()},
    "attn_lrp": {},
    "cp_lrp": {},
    "deep_taylor": {"conv": ZPlus(), "linear": ZPlus(), "first": ZBox(), "last": Epsilon()},
    "excitation_backprop": {"conv": ZPlus(bias=False), "linear": ZPlus(bias=False), "last": Epsilon()},
}
COMPOSITES = {name: Composite(rules, constant_gates=name == "cp_lrp", name=name) for name, rules in _RULES.items()}
"""Composites by name."""


def as_composite(option: str, composite: CompositeLike) -> Composite:
    """Return a composite given by name, or as a table of rules. Raises MethodError for anything else."""
    if isinstance(composite, Composite):
        return composite
    if isinstance(composite, str) and composite in COMPOSITES:
        return COMPOSITES[composite]
    if isinstance(composite, Mapping) and all(_is_entry(key, rule) for key, rule in composite.items()):
        return Composite(composite, name=str(dict(composite)))
    hint = did_you_mean(str(composite), COMPOSITES) or "; the composites are " + ", ".join(COMPOSITES)
    raise MethodError(
        f"{option}={described(composite)}: expected a composite's name, or a mapping from an operation kind, a type of "
        f"modules or a layer's name to a rule{hint}"
    )


def _is_entry(key: object, rule: object) -> bool:
    """Return whether a composite may have a rule for a key: an operation kind, a name, or a type of modules."""
    is_type = isinstance(key, type) and issubclass(key, nn.Module)
    return (is_type or isinstance(key, str)) and isinstance(rule, AnyRule)
