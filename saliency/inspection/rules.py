"""Rules for `edit_gradients` and `edit_activations`.

A rule is a function from a tensor to its replacement, of the same shape, dtype and device; None leaves the tensor
unchanged. A list of rules is applied in order. Simple arithmetic needs no rule of this module:
`lambda gradient: gradient.clamp(min=0)` sets negative values to 0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..errors import MethodError, warn
from ..hooks.autograd_graph import tensor_version
from ..validation import check_integer, check_number, is_integer
from .moments import moments, require_plain

Rule = Callable[[Tensor], Tensor | None]
"""Function from a gradient or an activation to its replacement; None leaves it unchanged."""

RuleLike = Rule | Iterable[Rule]
"""A rule, or several that are applied in order."""

_MAX_PRINTED = 16  # largest number of values printed on one line


@dataclass(frozen=True, eq=False, repr=False)
class NamedRule:
    """Rule with a name for messages. It neither changes its argument in place nor stores it.

    Attributes:
        name: The call that creates it, such as "scale(2.0)".
        function: The rule.
        restart: Function that creates the rule with its initial state for a new block; None if the rule has no state.
    """

    name: str
    function: Rule
    restart: Callable[[], NamedRule] | None = None

    def __call__(self, tensor: Tensor) -> Tensor | None:
        """Return the replacement of a tensor; None leaves it unchanged."""
        return self.function(tensor)

    def __repr__(self) -> str:
        return self.name


def as_rules(rule: Any) -> tuple[Rule, ...]:
    """Return a rule, or nested rules, as a flat tuple in the order of application.

    Raises:
        MethodError: The argument is neither a rule nor an iterable of rules.
    """
    if callable(rule):
        return (rule,)
    if isinstance(rule, Iterable) and not isinstance(rule, str | Tensor):
        return tuple(step for part in rule for step in as_rules(part))
    hint = f"; for a factor, use rules.scale({rule!r})" if isinstance(rule, Real) else ""
    raise MethodError(f"a rule is a function of a tensor, or a list of these; got {type(rule).__name__}{hint}")


def restart_rules(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Return the rules in their initial state, for a new block."""
    return tuple(r.restart() if isinstance(r, NamedRule) and r.restart is not None else r for r in rules)


def apply_rules(rules: Iterable[Rule], tensor: Tensor, place: str) -> Tensor | None:
    """Return the tensor after all rules; None if all leave it unchanged.

    A user function receives a copy, and its result is copied. It may therefore work in place and store its result.

    Args:
        rules: The rules.
        tensor: The tensor, which is not changed.
        place: Description of the tensor for errors, such as "the output of layer4".

    Raises:
        MethodError: A rule returns another object, or a tensor of a different shape, dtype or device.
    """
    current = tensor
    for rule in rules:
        result = rule(current) if isinstance(rule, NamedRule) else _call_function(rule, current, place)
        if result is None:
            continue
        if not isinstance(result, Tensor) or _describe(result) != _describe(current):
            got = _describe(result) if isinstance(result, Tensor) else type(result).__name__
            expected = f"{_describe(current)}, or None"
            raise MethodError(f"the rule {rule_name(rule)} returned {got} for {place}; expected {expected}")
        current = result if isinstance(rule, NamedRule) else result.clone()
    return None if current is tensor else current


def _call_function(rule: Rule, tensor: Tensor, place: str) -> Any:
    copied = tensor.clone()
    version = tensor_version(copied)
    result = rule(copied)
    if result is None and tensor_version(copied) != version:
        hint = "return the changed tensor"
        warn(f"the rule {rule_name(rule)} changed its copy of {place} in place and returned None; {hint}")
    return result


def _describe(tensor: Tensor) -> str:
    layout = "" if tensor.layout == torch.strided else f"{str(tensor.layout).removeprefix('torch.')} "
    return f"{layout}{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)} on {tensor.device}"


def rule_name(rule: Rule) -> str:
    """Return the name of a rule for messages."""
    return rule.name if isinstance(rule, NamedRule) else getattr(rule, "__name__", type(rule).__name__)


def scale(factor: float) -> NamedRule:
    """Multiply the tensor by a number: `scale(0)` stops a gradient, `scale(-1)` reverses it.

    Raises:
        MethodError: The factor is not a finite number.
    """
    factor = check_number("factor", factor)
    return NamedRule(f"scale({factor!r})", lambda tensor: tensor * factor)


def clip_value(limit: float) -> NamedRule:
    """Limit each value to the range from -limit to limit.

    Raises:
        MethodError: The limit is negative or not a finite number.
    """
    limit = check_number("limit", limit, least=0)
    return NamedRule(f"clip_value({limit!r})", lambda tensor: tensor.clamp(-limit, limit))


def clip_norm(limit: float, *, per_image: bool = False) -> NamedRule:
    """Scale a tensor down to a norm of at most the limit. Its direction is unchanged.

    Args:
        limit: The largest Euclidean norm.
        per_image: Whether each image is clipped to the limit. By default, the norm of the whole tensor with all images
            is clipped. Tensors are clipped independently of each other.

    Raises:
        MethodError: The limit is negative or not a finite number.
    """
    limit = check_number("limit", limit, least=0)

    def clip(tensor: Tensor) -> Tensor:
        wide = torch.promote_types(tensor.dtype, torch.float32)
        axes = tuple(range(1, tensor.dim())) if per_image else None
        if axes == ():
            norm = tensor.to(wide).abs()
        else:
            norm = torch.linalg.vector_norm(tensor, dim=axes, keepdim=per_image, dtype=wide)
        # A tensor within the limit is multiplied by exactly 1.
        return tensor * torch.where(norm > limit, limit / norm, 1.0).to(tensor.dtype)

    return NamedRule(f"clip_norm({limit!r}{', per_image=True' if per_image else ''})", clip)


def add_noise(std: float, seed: int = 0) -> NamedRule:
    """Add Gaussian noise, reproducible in each run and on each device.

    Each block restarts the random sequence, and draws in the order in which the rule is applied. The noise is drawn
    in float32 on the CPU, and converted to the dtype and device of the tensor:

        generator = torch.Generator().manual_seed(seed)  # when the block begins
        std * torch.randn(tensor.shape, generator=generator)  # each time

    Args:
        std: The standard deviation, in units of the tensor.
        seed: The seed. The global random state is neither read nor changed.

    Raises:
        MethodError: The deviation is negative or not a finite number, or the seed is not a whole number of at least 0.
    """
    std, seed = check_number("std", std, least=0), check_integer("seed", seed, least=0)
    generator = torch.Generator().manual_seed(seed)

    def add(tensor: Tensor) -> Tensor:
        require_plain(tensor)
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32, device="cpu")
        return tensor + (std * noise).to(tensor)

    return NamedRule(f"add_noise({std!r}, seed={seed})", add, lambda: add_noise(std, seed))


def replace(value: float | Tensor) -> NamedRule:
    """Replace the tensor by a value.

    Args:
        value: A number, or a tensor that broadcasts to the shape. It is converted to the device and dtype of the tensor
            that it replaces. In `edit_activations`, gradients flow to this tensor.

    Raises:
        MethodError: The value is neither; or, when the rule is applied, its shape does not broadcast.
    """
    given: object = value
    if not isinstance(given, Tensor | Real) or isinstance(given, bool):
        raise MethodError(f"replace: expected a number or a tensor, got {value!r}")
    name = f"replace({f'tensor {tuple(value.shape)}' if isinstance(value, Tensor) else repr(value)})"

    def put(tensor: Tensor) -> Tensor:
        try:
            # Copy: later operations may change the tensor in place.
            return torch.as_tensor(value, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape).clone()
        except RuntimeError as error:
            raise MethodError(f"{name} does not broadcast to a tensor of shape {tuple(tensor.shape)}") from error

    return NamedRule(name, put)


def zero_channels(indices: int | Iterable[int], axis: int = 1) -> NamedRule:
    """Set some channels to 0, even where they contain NaN or infinity.

    Args:
        indices: The channels; negative ones count from the end.
        axis: The axis of the channels: 1 in (N, K, h, w), -1 in tokens (N, T, C) and in (N, h, w, C).

    Raises:
        MethodError: An index is not a whole number; or, when the rule is applied, there is no such channel or axis.
    """
    if isinstance(indices, Tensor):
        indices = indices.tolist()
    channels = list(indices) if isinstance(indices, Iterable) else [indices]
    if not all(is_integer(index, None) for index in (axis, *channels)):
        raise MethodError(f"zero_channels: expected whole numbers, got {indices!r} and axis={axis!r}")
    name = f"zero_channels({channels}{f', axis={axis}' if axis != 1 else ''})"

    def zero(tensor: Tensor) -> Tensor:
        shape = tuple(tensor.shape)
        size = shape[axis] if -tensor.dim() <= axis < tensor.dim() else 0
        if not all(-size <= index < size for index in channels):
            raise MethodError(f"{name}: a tensor of shape {shape} has no such channel or axis")
        places = torch.tensor([index % size for index in channels], dtype=torch.long, device=tensor.device)
        return tensor.index_fill(axis, places, 0)

    return NamedRule(name, zero)


def show(label: str = "") -> NamedRule:
    """Print the tensor in one line and leave it unchanged.

    Args:
        label: Text at the beginning of the line.
    """

    def write(tensor: Tensor) -> None:
        require_plain(tensor)
        # Look up sys.stdout at each call, since notebooks and tests replace it.
        sys.stdout.write(f"{label}{': ' if label else ''}{_summary(tensor)}\n")

    return NamedRule(f'show(label="{label}")' if label else "show()", write)


def _summary(tensor: Tensor) -> str:
    """Describe a tensor in one line: its values if there are few, else their statistics."""
    shape = tuple(tensor.shape)
    if tensor.numel() <= _MAX_PRINTED and tensor.layout == torch.strided:
        return f"{shape} {tensor.tolist()}"
    known = moments(tensor)
    odd = "".join(f", {count} {name}" for count, name in ((known.nan, "NaN"), (known.inf, "infinite")) if count)
    text = f"{shape} mean {known.mean:.4g}, std {known.std:.4g}, from {known.min:.4g} to {known.max:.4g}"
    return f"{text}, norm {known.norm:.4g}, {known.zero_share:.1%} zeros{odd}"
