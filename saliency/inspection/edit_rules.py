"""What to make of a gradient or an activation on its way: rules for `edit_gradients` and `edit_activations`.

A rule is any function from a tensor to what takes its place, of the same shape, type and device; None leaves it. Those
below are ready-made. Several in a list are applied in order.
"""

from __future__ import annotations

import math
import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ..errors import MethodError, warn
from ..hooks.autograd_graph import is_wrapped, outside, tensor_version
from .moments import moments

Rule = Callable[[Tensor], Tensor | None]
"""From a gradient, or an activation, to what takes its place; None leaves it."""

RuleLike = Rule | Iterable[Rule]
"""A rule, or several that are applied in order."""


class NamedRule(ABC):
    """A rule with a name. It neither changes nor keeps what it is given, so it can be given the tensor itself."""

    replays: ClassVar[bool] = True
    """Whether it makes the same of the same tensor each time."""

    @abstractmethod
    def __call__(self, tensor: Tensor) -> Tensor | None:
        """What takes the tensor's place; None leaves it."""

    def started(self) -> NamedRule:
        """The rule as a block begins with it."""
        return self


@dataclass(frozen=True, repr=False)
class Chain(NamedRule):
    """Several rules as one."""

    rules: tuple[Rule, ...]

    def __call__(self, tensor: Tensor) -> Tensor | None:
        """What the rules make of it, one after the other."""
        return applied(self.rules, tensor, "a chain")

    def __repr__(self) -> str:
        return f"compose({', '.join(map(rule_name, self.rules))})"


def steps_of(rule: Any) -> tuple[Rule, ...]:
    """The rules that are applied one after the other.

    Raises:
        MethodError: It is neither a rule nor several.
    """
    if isinstance(rule, Chain):
        return rule.rules
    if callable(rule):
        return (rule,)
    if isinstance(rule, Iterable) and not isinstance(rule, str | Tensor):
        return tuple(step for each in rule for step in steps_of(each))
    hint = f"; for a factor, rules.scale({rule!r})" if isinstance(rule, Real) else ""
    raise MethodError(f"a rule is a function from tensor to tensor, or a list of them; got {type(rule).__name__}{hint}")


def started(steps: Iterable[Rule]) -> tuple[Rule, ...]:
    """The rules as a block begins with them."""
    return tuple(each.started() if isinstance(each, NamedRule) else each for each in steps)


def applied(steps: Iterable[Rule], tensor: Tensor, place: str) -> Tensor | None:
    """What the rules make of a tensor, one after the other; None where all leave it.

    A rule of the user's gets a copy, and what it returns is copied: it may work in place, and return what it keeps.

    Args:
        steps: The rules.
        tensor: What they are applied to. It is not changed.
        place: Where, in words, for errors.

    Raises:
        MethodError: A rule returns no tensor, or one of another shape, type or device; or a named one is for other
            kinds of tensors.
    """
    current = tensor
    for step in steps:
        if isinstance(step, NamedRule):
            made = _made_by(step, current, place)
        else:
            copied = current.clone()
            version = tensor_version(copied)
            made = step(copied)
            if made is None and tensor_version(copied) != version:
                warn(
                    f"the rule {rule_name(step)} changed its copy of {place} in place and returned None, which leaves "
                    "all as it was; let it return the tensor"
                )
        if made is None:
            continue
        _check(made, current, step, place)
        current = made if isinstance(step, NamedRule) else made.clone()
    return None if current is tensor else current


def _made_by(rule: NamedRule, tensor: Tensor, place: str) -> Tensor | None:
    """What a rule makes of a tensor. Raises MethodError where it has no meaning for tensors of this kind."""
    try:
        return rule(tensor)
    except RuntimeError as error:
        if is_wrapped(tensor):
            kind = f"which is inside of a transformation such as vmap: {str(error).partition(chr(10))[0]}"
        elif tensor.is_complex():
            kind = "complex numbers"
        elif tensor.layout != torch.strided:
            kind = "a sparse tensor; have it dense (sparse=False)"
        else:
            raise
        raise MethodError(f"the rule {rule_name(rule)} cannot be applied to {place}, {kind}") from error


def _check(made: Any, like: Tensor, rule: Rule, place: str) -> None:
    """Raise MethodError unless a rule returned a tensor like the one it got."""
    fits = isinstance(made, Tensor) and _traits(made) == _traits(like)
    if not fits:
        came = _kind(made) if isinstance(made, Tensor) else type(made).__name__
        raise MethodError(
            f"the rule {rule_name(rule)} returned {came} for {place}; expected a tensor like the one it got, "
            f"{_kind(like)}, or None"
        )


def _traits(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout


def _kind(tensor: Tensor) -> str:
    layout = "" if tensor.layout == torch.strided else f"{str(tensor.layout).removeprefix('torch.')} "
    return f"{layout}{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)} on {tensor.device}"


def rule_name(rule: Rule) -> str:
    """What to call a rule in a sentence."""
    return repr(rule) if isinstance(rule, NamedRule) else getattr(rule, "__name__", type(rule).__name__)


def number(value: Any, what: str, *, least: float = -math.inf, finite: bool = True) -> float:
    """A plain number. Raises MethodError for anything else."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise MethodError(f"{what} is a number; got {value!r} ({type(value).__name__})")
    known = float(value)
    if finite and not math.isfinite(known):
        raise MethodError(f"{what} is a finite number; got {known}")
    if known < least:
        raise MethodError(f"{what} is {least:g} or more; got {known:g}")
    return known


def index_of(value: Any, what: str, least: int | None = None) -> int:
    """An integer. Raises MethodError for anything else."""
    try:
        known = operator.index(value) if not isinstance(value, bool) else None
    except TypeError:
        known = None
    if known is None or (least is not None and known < least):
        raise MethodError(f"{what} is an integer{f' from {least} on' * (least is not None)}; got {value!r}")
    return known


_FEW = 16  # as many numbers as one line can show


class Stream(Protocol):
    """Whatever text can be written to: an open file, `sys.stderr`."""

    def write(self, text: str, /) -> object:
        """Take some text."""


@dataclass(frozen=True, repr=False)
class _Scale(NamedRule):
    factor: float

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor * self.factor

    def __repr__(self) -> str:
        return f"scale({self.factor!r})"


def scale(factor: float) -> NamedRule:
    """The tensor times a number. `scale(0)` is a dead end, `scale(-1)` a gradient reversal.

    Raises:
        MethodError: The factor is no finite number.
    """
    return _Scale(number(factor, "the factor of scale"))


@dataclass(frozen=True, repr=False)
class _Positive(NamedRule):
    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor.clamp(min=0)

    def __repr__(self) -> str:
        return "positive()"


def positive() -> NamedRule:
    """The positive numbers, and 0 in place of the others: at each ReLU, it makes a gradient guided backpropagation's.

    with edit_gradients(model, nn.ReLU, rules.positive()):
        score(model(x)).backward()
    """
    return _Positive()


@dataclass(frozen=True, repr=False)
class _ClipValue(NamedRule):
    limit: float

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor.clamp(-self.limit, self.limit)

    def __repr__(self) -> str:
        return f"clip_value({self.limit!r})"


def clip_value(limit: float) -> NamedRule:
    """Each number within -limit and limit.

    Raises:
        MethodError: The limit is negative, or no finite number.
    """
    return _ClipValue(number(limit, "the limit of clip_value", least=0))


@dataclass(frozen=True, repr=False)
class _ClipNorm(NamedRule):
    limit: float
    per_image: bool

    def __call__(self, tensor: Tensor) -> Tensor:
        wide = torch.promote_types(tensor.dtype, torch.float32)
        over = tuple(range(1, tensor.dim())) if self.per_image else None
        if over == ():
            norm = tensor.to(wide).abs()
        else:
            norm = torch.linalg.vector_norm(tensor, dim=over, keepdim=self.per_image, dtype=wide)
        # A tensor within the limit is multiplied by exactly 1.
        return tensor * torch.where(norm > self.limit, self.limit / norm, 1.0).to(tensor.dtype)

    def __repr__(self) -> str:
        return f"clip_norm({self.limit!r}{', per_image=True' * self.per_image})"


def clip_norm(limit: float, *, per_image: bool = False) -> NamedRule:
    """A tensor that is longer than the limit is shortened to it; its direction stays.

    Args:
        limit: The most that the Euclidean norm may be.
        per_image: The norm is that of each row of the first axis by itself. Without, it is that of the whole tensor:
            all images of the batch together, but each tensor apart from all others.

    Raises:
        MethodError: The limit is negative, or no finite number.
    """
    return _ClipNorm(number(limit, "the limit of clip_norm", least=0), per_image)


@dataclass(frozen=True, repr=False)
class _AddNoise(NamedRule):
    std: float
    seed: int
    generator: torch.Generator = field(init=False, compare=False)

    replays: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "generator", torch.Generator().manual_seed(self.seed))

    def __call__(self, tensor: Tensor) -> Tensor:
        noise = torch.randn(tensor.shape, generator=self.generator, dtype=torch.float32, device="cpu")
        return tensor + (self.std * noise).to(tensor)

    def __repr__(self) -> str:
        return f"add_noise({self.std!r}, seed={self.seed})"

    def started(self) -> NamedRule:
        return _AddNoise(self.std, self.seed)


def add_noise(std: float, seed: int = 0) -> NamedRule:
    """The tensor and Gaussian noise, the same in each run and on each device.

    Each block starts its draws anew and takes them in the order in which the rule is applied. What is added is exactly

        generator = torch.Generator().manual_seed(seed)  # when the block begins
        std * torch.randn(tensor.shape, generator=generator)  # each time

    in float32 on the CPU, then brought to the tensor's type and device.

    Args:
        std: The standard deviation, in the tensor's own units.
        seed: Where the draws start. The global random state is neither read nor moved.

    Raises:
        MethodError: The deviation is negative or no finite number, or the seed is no integer from 0 on.
    """
    return _AddNoise(
        number(std, "the deviation of add_noise", least=0), index_of(seed, "the seed of add_noise", least=0)
    )


@dataclass(frozen=True, repr=False, eq=False)
class _Replace(NamedRule):
    value: float | Tensor

    def __call__(self, tensor: Tensor) -> Tensor:
        if not isinstance(self.value, Tensor):
            return torch.full_like(tensor, self.value)
        try:
            # A copy, since what comes next may work in place.
            return self.value.to(tensor).expand(tensor.shape).clone()
        except RuntimeError as error:
            raise MethodError(f"{self} does not fit: what it should replace has shape {tuple(tensor.shape)}") from error

    def __repr__(self) -> str:
        shown = f"tensor {tuple(self.value.shape)}" if isinstance(self.value, Tensor) else f"{self.value!r}"
        return f"replace({shown})"


def replace(value: float | Tensor) -> NamedRule:
    """Something else in the tensor's place.

    Args:
        value: A number for all of it, or a tensor of its shape, or of one that broadcasts to it. It is brought to the
            device and type of what it replaces. As an activation it keeps its own gradient.

    Raises:
        MethodError: The value is neither; or, when the rule is applied, its shape does not fit.
    """
    return _Replace(value if isinstance(value, Tensor) else number(value, "the value of replace", finite=False))


@dataclass(frozen=True, repr=False)
class _ZeroChannels(NamedRule):
    indices: tuple[int, ...]
    axis: int

    def __call__(self, tensor: Tensor) -> Tensor:
        if not -tensor.dim() <= self.axis < tensor.dim():
            raise MethodError(f"{self}: there is no axis {self.axis} in a tensor of shape {tuple(tensor.shape)}")
        size = tensor.shape[self.axis]
        for index in self.indices:
            if not -size <= index < size:
                raise MethodError(
                    f"{self}: channel {index} is outside 0..{size - 1}, axis {self.axis} of shape {tuple(tensor.shape)}"
                )
        places = torch.tensor([index % size for index in self.indices], dtype=torch.long, device=tensor.device)
        return tensor.index_fill(self.axis, places, 0)

    def __repr__(self) -> str:
        return f"zero_channels({list(self.indices)}{f', axis={self.axis}' * (self.axis != 1)})"


def zero_channels(indices: int | Iterable[int], axis: int = 1) -> NamedRule:
    """Zeros in some channels, whatever stood there, NaN and infinity too.

    Args:
        indices: The channels; negative ones count from the end.
        axis: Where the channels lie: 1 in (N, K, h, w), -1 in tokens (N, T, C) and in (N, h, w, C).

    Raises:
        MethodError: An index is no integer; or, when the rule is applied, there is no such channel or axis.
    """
    if isinstance(indices, Tensor):
        indices = indices.tolist()
    several = indices if isinstance(indices, Iterable) and not isinstance(indices, str) else (indices,)
    channels = tuple(index_of(each, "a channel of zero_channels") for each in several)
    return _ZeroChannels(channels, index_of(axis, "the axis of zero_channels"))


@dataclass(frozen=True, repr=False)
class _Show(NamedRule):
    write: Callable[[Tensor], object] | Stream | None
    label: str

    def __call__(self, tensor: Tensor) -> None:
        outside(self._tell, tensor)

    def _tell(self, tensor: Tensor) -> None:
        if callable(self.write):
            self.write(tensor.detach().clone())
            return
        prefix = f"{self.label}: " if self.label else ""
        # Looked up now: a notebook, or a test, has put its own in place.
        (self.write or sys.stdout).write(f"{prefix}{described(tensor)}\n")

    def __repr__(self) -> str:
        return f'show(label="{self.label}")' if self.label else "show()"


def show(write: Callable[[Tensor], object] | Stream | None = None, label: str = "") -> NamedRule:
    """Tell of the tensor and leave it as it is. Of many gradients at once, as under `torch.vmap`, it tells of all.

    Args:
        write: What gets a copy of the tensor, such as `print` or the `append` of a list; or an open file, which gets a
            line about it. None is the standard output.
        label: What a line begins with.

    Raises:
        MethodError: One can neither call it nor write to it.
    """
    if write is not None and not callable(write) and not callable(getattr(write, "write", None)):
        raise MethodError(f"show tells a function, or writes to an open file; got {type(write).__name__}")
    return _Show(write, label)


def compose(*rules: Rule) -> NamedRule:
    """Several rules as one, applied in this order. A list of rules does the same.

    Raises:
        MethodError: One of them is no function.
    """
    return Chain(steps_of(rules))


def described(tensor: Tensor) -> str:
    """A tensor in one line: its numbers where they are few, else what they are like."""
    shape = tuple(tensor.shape)
    if tensor.numel() <= _FEW and tensor.layout == torch.strided:
        return f"{shape} {tensor.tolist()}"
    known = moments(tensor)
    odd = "".join(f", {count} {name}" for count, name in ((known.nan, "NaN"), (known.inf, "infinite")) if count)
    return (
        f"{shape} mean {known.mean:.4g}, std {known.std:.4g}, from {known.min:.4g} to {known.max:.4g}, "
        f"norm {known.norm:.4g}, {known.zero_share:.1%} zeros{odd}"
    )
