"""Rules for `edit_gradients` and `edit_activations`.

A rule is a function from a tensor to its replacement, of the same shape, dtype and device; None leaves the tensor
unchanged. A list of rules is applied in order. Simple arithmetic needs no rule of this module:

    lambda gradient: 0.5 * gradient  # scale
    lambda gradient: gradient.clamp(min=0)  # set negative values to 0
    lambda maps: maps.index_fill(1, torch.tensor([3, 5]), 0)  # set channels to 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..errors import MethodError, warn
from ..hooks.autograd_graph import tensor_version
from ..validation import check_number

EditRule = Callable[[Tensor], Tensor | None]
"""Function from a gradient or an activation to its replacement; None leaves the tensor unchanged."""

EditRuleLike = EditRule | Iterable[EditRule]
"""A rule, or several that are applied in order."""


def as_rules(rule: Any) -> tuple[EditRule, ...]:
    """Return a rule, or nested rules, as a flat tuple in the order of application.

    Raises:
        MethodError: The argument is neither a rule nor an iterable of rules.
    """
    if callable(rule):
        return (rule,)
    if isinstance(rule, Iterable) and not isinstance(rule, str | Tensor):
        return tuple(step for part in rule for step in as_rules(part))
    hint = f"; for a factor, use lambda tensor: {rule!r} * tensor" if isinstance(rule, Real) else ""
    raise MethodError(f"a rule is a function of a tensor, or a list of these; got {type(rule).__name__}{hint}")


def apply_rules(rules: Iterable[EditRule], tensor: Tensor, label: str) -> Tensor | None:
    """Return the tensor after all rules; None if all leave it unchanged.

    A rule receives a copy, and its result is copied. It may therefore work in place and store its result.

    Args:
        rules: The rules.
        tensor: The tensor, which is not changed.
        label: Description of the tensor for errors, such as "the output of layer4".

    Raises:
        MethodError: A rule returns another object, or a tensor of a different shape, dtype or device.
    """
    current = tensor
    for rule in rules:
        result = _call(rule, current, label)
        if result is None:
            continue
        if not isinstance(result, Tensor) or _describe(result) != _describe(current):
            got = _describe(result) if isinstance(result, Tensor) else type(result).__name__
            expected = f"{_describe(current)}, or None"
            raise MethodError(f"the rule {rule_name(rule)} returned {got} for {label}; expected {expected}")
        current = result.clone()
    return None if current is tensor else current


def _call(rule: EditRule, tensor: Tensor, label: str) -> Any:
    copied = tensor.clone()
    version = tensor_version(copied)
    result = rule(copied)
    if result is None and tensor_version(copied) != version:
        hint = "return the changed tensor"
        warn(f"the rule {rule_name(rule)} changed its copy of {label} in place and returned None; {hint}")
    return result


def _describe(tensor: Tensor) -> str:
    layout = "" if tensor.layout == torch.strided else f"{str(tensor.layout).removeprefix('torch.')} "
    return f"{layout}{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)} on {tensor.device}"


def rule_name(rule: EditRule) -> str:
    """Return the name of a rule for messages."""
    return getattr(rule, "__name__", type(rule).__name__)


def clip_norm(limit: float) -> EditRule:
    """Scale a tensor down to a norm of at most the limit. Its direction is unchanged.

    Args:
        limit: The largest Euclidean norm of the whole tensor, with all images.

    Raises:
        MethodError: The limit is negative or not a finite number.
    """
    limit = check_number("limit", limit, least=0)

    def clip(tensor: Tensor) -> Tensor:
        wide = torch.promote_types(tensor.dtype, torch.float32)
        norm = torch.linalg.vector_norm(tensor, dtype=wide)
        # A tensor within the limit is multiplied by exactly 1.
        return tensor * torch.where(norm > limit, limit / norm, 1.0).to(tensor.dtype)

    return clip
