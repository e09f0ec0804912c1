"""Guided backpropagation, DeconvNet and RectGrad a second time, from their definitions.

Every spelling of a rectifier is caught as the model calls it, by a `TorchFunctionMode`, and an `autograd.Function` that
has the rule as its backward takes its place. Nothing here knows of the library or reads the autograd graph.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

RULES = ("guided_backprop", "deconvnet", "rectgrad")

Highest = Tensor | float | None


class Call(NamedTuple):
    """One call of a rectifier, as the model spelled it."""

    kind: str
    x: Tensor
    lowest: Any
    highest: Any
    inplace: bool


class _Rectify(torch.autograd.Function):
    """A rectifier, flat below 0 and above `highest`, whose backward is one of the three rules."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, highest: Highest, rule: str, percentile: float, like: Tensor) -> Tensor:
        ctx.open = x > 0 if highest is None else (x > 0) & (x < highest)
        top = torch.full_like(x, float("inf")) if highest is None else torch.as_tensor(highest, dtype=x.dtype)
        ctx.y = torch.minimum(torch.where(x > 0, x, torch.zeros_like(x)), top)
        ctx.saturated = None if highest is None else x >= highest
        ctx.rule, ctx.percentile, ctx.shape, ctx.dtype = rule, percentile, x.shape, x.dtype
        # The shape and type that the call has where it broadcasts.
        return ctx.y.to(like.dtype).expand_as(like).clone()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        signal = gradients[0].sum_to_size(ctx.shape).to(ctx.dtype)
        if ctx.rule == "deconvnet":
            keep = signal > 0
        elif ctx.rule == "guided_backprop":
            keep = (signal > 0) & ctx.open
        else:
            product = ctx.y * signal
            rows = product.reshape(product.shape[0], -1)
            tau = np.percentile(rows.double().cpu().numpy(), ctx.percentile, axis=1, method="nearest")
            keep = (rows.double() > torch.from_numpy(tau).to(rows.device)[:, None]).reshape(product.shape)
            keep = keep if ctx.saturated is None else keep & ~ctx.saturated
        return torch.where(keep, signal, torch.zeros_like(signal)), None, None, None, None


class _Smooth(torch.autograd.Function):
    """A smooth activation that lets only a positive signal through, times the derivative written out by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, slope: Tensor) -> Tensor:
        ctx.slope = slope
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return torch.where(gradients[0] > 0, gradients[0] * ctx.slope, torch.zeros_like(ctx.slope)), None, None


class Interceptor(TorchFunctionMode):
    """Puts the rule into every rectifier that is called on something with a gradient, and counts the calls.

    Args:
        rule: One of `RULES`; "" only counts.
        percentile: For RectGrad.
        smooth: Also keep only the positive signal at smooth activations.

    """

    def __init__(self, rule: str, percentile: float = 98.0, *, smooth: bool = False) -> None:
        super().__init__()
        self.rule, self.percentile, self.smooth = rule, percentile, smooth
        self.calls: Counter[str] = Counter()
        self.smooth_calls: Counter[str] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        call = _rectifier_call(func, args, given)
        if call is not None and call.x.requires_grad and torch.is_grad_enabled():
            self.calls[call.kind] += 1
            if self.rule:
                return self._rectified(call)
        kind = _SMOOTH.get(func)
        if kind is not None and args[0].requires_grad and torch.is_grad_enabled():
            self.smooth_calls[kind] += 1
            if self.smooth:
                return self._smoothed(func, args, given, kind)
        return func(*args, **given)

    def _rectified(self, call: Call) -> Tensor:
        like = call.x.detach()
        if isinstance(call.lowest, Tensor):
            like = torch.maximum(like, call.lowest)
        y: Tensor = _Rectify.apply(call.x, call.highest, self.rule, self.percentile, like)
        return call.x.copy_(y) if call.inplace else y

    def _smoothed(self, func: Any, args: tuple[Any, ...], given: dict[str, Any], kind: str) -> Tensor:
        x: Tensor = args[0]
        before = x.detach().clone()
        inplace = given.get("inplace", False) or getattr(func, "__name__", "").endswith("_")
        with torch.no_grad():
            outplace = {name: each for name, each in given.items() if name != "inplace"}
            plain = getattr(F, getattr(func, "__name__", "").removesuffix("_")) if inplace else func
            value = plain(before, *args[1:], **outplace)
            slope = _SLOPES["selu" if func in (F.selu, F.selu_) else kind](before, *args[1:], **outplace)
        y: Tensor = _Smooth.apply(x, value, slope)
        return x.copy_(y) if inplace else y


def _argument(args: tuple[Any, ...], given: dict[str, Any], at: int, name: str, default: Any = None) -> Any:
    return args[at] if len(args) > at else given.get(name, default)


def _rectifier_call(func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Call | None:
    """What a call rectifies, or None where it is something else or clips elsewhere than at 0."""
    kind, inplace = _SPELLINGS.get(func, ("", False))
    if not kind:
        return None
    x = args[0] if args else given["input"]
    inplace = inplace or bool(given.get("inplace"))
    lowest: Any = 0
    highest: Any = None
    if kind == "relu6" and func is not F.relu6:
        lowest = _argument(args, given, 1, "min_val", -1.0)
        highest = _argument(args, given, 2, "max_val", 1.0)
        inplace = inplace or bool(_argument(args, given, 3, "inplace", False))
    elif kind == "relu6":
        highest = 6.0
        inplace = inplace or bool(_argument(args, given, 1, "inplace", False))
    elif kind == "threshold":
        lowest = _argument(args, given, 1, "threshold")
        inplace = inplace or bool(_argument(args, given, 3, "inplace", False))
    elif kind == "clamp":
        lowest = _argument(args, given, 1, "min")
        highest = _argument(args, given, 2, "max")
    elif kind == "maximum":
        other = _argument(args, given, 1, "other")
        if not isinstance(other, Tensor) or (other.requires_grad and x.requires_grad):
            return None
        x, lowest = (x, other) if x.requires_grad else (other, x)
    elif func is F.relu:
        inplace = inplace or bool(_argument(args, given, 1, "inplace", False))
    at_zero = lowest is not None and bool((torch.as_tensor(lowest) == 0).all())
    return Call(kind, x, lowest, highest, inplace) if at_zero else None


def _spellings() -> dict[Any, tuple[str, bool]]:
    """Each function that may be a rectifier -> (its kind, whether it works in place)."""
    named: dict[str, Iterable[tuple[Any, str]]] = {
        "relu": [(torch, "relu"), (torch, "relu_"), (Tensor, "relu"), (Tensor, "relu_"), (F, "relu"), (F, "relu_")],
        "relu6": [(F, "relu6"), (F, "hardtanh"), (F, "hardtanh_")],
        "threshold": [(F, "threshold"), (F, "threshold_"), (torch, "threshold"), (torch, "threshold_")],
        "clamp": [
            (place, name + end)
            for place in (torch, Tensor)
            for name in ("clamp", "clamp_min", "clip")
            for end in ("", "_")
        ],
        "maximum": [(torch, "maximum"), (torch, "max"), (Tensor, "maximum"), (Tensor, "max")],
    }
    return {
        getattr(place, name): (kind, name.endswith("_")) for kind, places in named.items() for place, name in places
    }


_SPELLINGS = _spellings()

_SMOOTH: dict[Any, str] = {
    getattr(place, name): kind
    for kind, names in {
        "leaky_relu": ("leaky_relu", "leaky_relu_"),
        "prelu": ("prelu",),
        "elu": ("elu", "elu_", "selu", "selu_"),
        "celu": ("celu", "celu_"),
        "gelu": ("gelu",),
        "silu": ("silu",),
        "mish": ("mish",),
        "hardswish": ("hardswish",),
        "softplus": ("softplus",),
    }.items()
    for name in names
    for place in (F, torch)
    if hasattr(place, name)
}


def _gelu_slope(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "none":
        return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * torch.exp(-x * x / 2) / math.sqrt(2 * torch.pi)
    inner = math.sqrt(2 / torch.pi) * (x + 0.044715 * x**3)
    bend = math.sqrt(2 / torch.pi) * (1 + 3 * 0.044715 * x**2)
    return 0.5 * (1 + torch.tanh(inner)) + 0.5 * x * (1 - torch.tanh(inner) ** 2) * bend


def _elu_slope(x: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    return torch.where(x > 0, torch.ones_like(x), alpha * torch.exp(x))


def _selu_slope(x: Tensor, inplace: bool = False) -> Tensor:
    return SELU_SCALE * torch.where(x > 0, torch.ones_like(x), SELU_ALPHA * torch.exp(x))


def _celu_slope(x: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    return torch.where(x > 0, torch.ones_like(x), torch.exp(x / alpha))


def _leaky_slope(x: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    return torch.where(x > 0, torch.ones_like(x), torch.full_like(x, negative_slope))


def _prelu_slope(x: Tensor, weight: Tensor) -> Tensor:
    shape = [1, -1] + [1] * (x.dim() - 2)
    return torch.where(x > 0, torch.ones_like(x), weight.detach().reshape(shape).expand_as(x))


def _silu_slope(x: Tensor, inplace: bool = False) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


def _mish_slope(x: Tensor, inplace: bool = False) -> Tensor:
    t = torch.tanh(torch.log1p(torch.exp(x)))
    return t + x * (1 - t * t) * torch.sigmoid(x)


def _hardswish_slope(x: Tensor, inplace: bool = False) -> Tensor:
    return torch.where(x <= -3, torch.zeros_like(x), torch.where(x >= 3, torch.ones_like(x), x / 3 + 0.5))


def _softplus_slope(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    return torch.where(x * beta > threshold, torch.ones_like(x), torch.sigmoid(beta * x))


_SLOPES: dict[str, Callable[..., Tensor]] = {
    "leaky_relu": _leaky_slope,
    "prelu": _prelu_slope,
    "elu": _elu_slope,
    "selu": _selu_slope,
    "celu": _celu_slope,
    "gelu": _gelu_slope,
    "silu": _silu_slope,
    "mish": _mish_slope,
    "hardswish": _hardswish_slope,
    "softplus": _softplus_slope,
}

SELU_ALPHA, SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


class Reference(NamedTuple):
    """What a rule leaves at the input, what the plain gradient is there, and how many calls there were."""

    values: Tensor  # (N, C, H, W)
    plain: Tensor  # (N, C, H, W)
    calls: dict[str, int]
    smooth_calls: dict[str, int]


def reference(
    model: nn.Module, x: Tensor, target: int, rule: str, percentile: float = 98.0, *, smooth: bool = False
) -> Reference:
    """One of `RULES` on an eager model in evaluation mode, for one class."""
    plain, _ = _backward(model, x, target, Interceptor(""))
    values, seen = _backward(model, x, target, Interceptor(rule, percentile, smooth=smooth))
    if rule == "rectgrad":
        values, plain = x * values, x * plain
    return Reference(values, plain, dict(seen.calls), dict(seen.smooth_calls))


def _backward(model: nn.Module, x: Tensor, target: int, seen: Interceptor) -> tuple[Tensor, Interceptor]:
    leaf = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        with seen:
            score = model(leaf.clone())[:, target].sum()
        (gradient,) = torch.autograd.grad(score, leaf)
    return gradient, seen


def error(values: Tensor, expected: Tensor) -> float:
    """The largest difference, in units of the largest expected magnitude."""
    scale = float(expected.detach().abs().max())
    return float((values.detach() - expected.detach()).abs().max()) / (scale or 1.0)


__all__ = ["RULES", "Interceptor", "Reference", "error", "reference"]
