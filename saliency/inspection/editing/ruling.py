"""What a rule is, and how rules are applied: one after the other, without harm, and held to what they return."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...errors import MethodError, warn
from ..wrapped import is_wrapped

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
            version = copied._version if not copied.is_inference() else 0
            made = step(copied)
            if made is None and not copied.is_inference() and copied._version != version:
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
