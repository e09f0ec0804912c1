"""Small random networks, explained by the library and by an interpreter that does its own backward pass by hand.

A program is a list of steps over a growing list of values. `Program.forward` runs it as ordinary PyTorch code, with the
rectifiers in all their spellings; `interpret` walks the same steps with the vector-Jacobian product of each step
written out, and with no autograd. A failure names its seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from saliency import METHODS
from saliency.errors import NotApplicableError
from tests.reference import RULES

SHARED, SHARED_IN_PLACE = nn.ReLU(), nn.ReLU(inplace=True)
ZERO = torch.zeros((), dtype=torch.float64)


@dataclass(frozen=True)
class Spelling:
    """A rectifier as code, its kind, where it saturates, and whether it writes into its input."""

    kind: str
    call: Callable[[Tensor], Tensor]
    highest: float = float("inf")
    inplace: bool = False


def recomputed(h: Tensor) -> Tensor:
    y: Tensor = checkpoint(F.relu, h, use_reentrant=False)
    return y


RECTIFIERS = (
    Spelling("relu", SHARED),
    Spelling("relu", SHARED_IN_PLACE, inplace=True),
    Spelling("relu", F.relu),
    Spelling("relu", torch.relu),
    Spelling("relu", lambda h: h.relu()),
    Spelling("relu", recomputed),
    Spelling("relu", lambda h: F.relu(h, inplace=True), inplace=True),
    Spelling("relu", torch.relu_, inplace=True),
    Spelling("relu", lambda h: h.relu_(), inplace=True),
    Spelling("relu6", F.relu6, 6.0),
    Spelling("relu6", nn.ReLU6(inplace=True), 6.0, inplace=True),
    Spelling("relu6", nn.Hardtanh(0.0, 1.0), 1.0),
    Spelling("relu6", lambda h: F.hardtanh_(h, 0.0, 2.0), 2.0, inplace=True),
    Spelling("threshold", lambda h: F.threshold(h, 0.0, 0.0)),
    Spelling("threshold", nn.Threshold(0.0, 0.0, inplace=True), inplace=True),
    Spelling("clamp", lambda h: h.clamp(min=0)),
    Spelling("clamp", lambda h: torch.clip(h, 0.0, 3.0), 3.0),
    Spelling("clamp", lambda h: h.clamp(ZERO, ZERO + 2), 2.0),
    Spelling("clamp", lambda h: h.clamp_min(0)),
    Spelling("clamp", lambda h: h.clamp_min(ZERO)),
    Spelling("clamp", lambda h: h.clamp_(min=0), inplace=True),
    Spelling("clamp", lambda h: h.clamp_min_(0.0), inplace=True),
    Spelling("maximum", lambda h: torch.maximum(h, ZERO)),
    Spelling("maximum", lambda h: torch.maximum(torch.zeros_like(h), h)),
)


@dataclass(frozen=True)
class Curve:
    """A smooth activation: its kind ("" for one that is not counted), code, value and derivative."""

    kind: str
    call: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


def _silu_slope(x: Tensor) -> Tensor:
    s = 1 / (1 + torch.exp(-x))
    return s * (1 + x * (1 - s))


CURVES = (
    Curve("leaky_relu", nn.LeakyReLU(0.25), lambda x: torch.where(x > 0, 1.0, 0.25).to(x)),
    Curve("elu", F.elu, lambda x: torch.where(x > 0, torch.ones_like(x), torch.exp(x))),
    Curve("silu", F.silu, _silu_slope),
    Curve("softplus", F.softplus, lambda x: torch.where(x > 20, 1.0, 1 / (1 + torch.exp(-x)))),
    Curve("hardswish", F.hardswish, lambda x: ((2 * x + 3) / 6).where(x.abs() < 3, (x > 0).to(x))),
    Curve("", torch.tanh, lambda x: 1 - torch.tanh(x) ** 2),
    Curve("", torch.sigmoid, lambda x: torch.sigmoid(x) * (1 - torch.sigmoid(x))),
)


@dataclass
class Step:
    """One step: what it does, to which values, and with what."""

    op: str
    inputs: tuple[int, ...]
    with_: Any = None


@dataclass
class Value:
    """What the generator knows of a value: its channels, and whether it may still be overwritten."""

    channels: int
    free: bool


@dataclass
class Program:
    """A random network on (N, 2, 4, 4); its last value is pooled and mixed into the scores."""

    steps: list[Step] = field(default_factory=list)
    values: list[Value] = field(default_factory=lambda: [Value(2, free=False)])
    head: Tensor = field(default_factory=lambda: torch.empty(0))

    def add(self, op: str, inputs: tuple[int, ...], channels: int, with_: Any = None, *, free: bool = True) -> None:
        self.steps.append(Step(op, inputs, with_))
        self.values.append(Value(channels, free))

    def forward(self, x: Tensor) -> Tensor:
        """The program as PyTorch code."""
        values = [x]
        for step in self.steps:
            a = values[step.inputs[0]]
            b = values[step.inputs[-1]]
            match step.op:
                case "conv":
                    y = F.conv2d(a, step.with_, padding=step.with_.shape[-1] // 2)
                case "conv by relu":
                    y = F.conv2d(a, F.relu(step.with_.clone().requires_grad_()), padding=1)
                case "affine":
                    y = a * step.with_[0] + step.with_[1]
                case "add":
                    y = a + b
                case "product":
                    y = a * b
                case "cat":
                    y = torch.cat([a, b], 1)
                case "max pool":
                    y = F.max_pool2d(a, 3, 1, 1)
                case _:
                    y = step.with_.call(a)
            values.append(y)
        return values[-1].mean((2, 3)) @ self.head


class Network(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    def forward(self, x: Tensor) -> Tensor:
        return self.program.forward(x)


def random_program(seed: int) -> Program:
    """Between 5 and 16 steps: each is likely to read the newest value, and may read any older one."""
    choose = Random(seed)  # noqa: S311
    numbers = torch.Generator().manual_seed(seed)

    def weights(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=numbers, dtype=torch.float64)

    program = Program()
    program.add("conv", (0,), 3, weights(3, 2, 3, 3))
    for _ in range(choose.randrange(4, 16)):
        known = program.values
        last = len(known) - 1
        a = last if choose.random() < 0.7 else choose.randrange(1, last + 1)
        alike = [i for i, value in enumerate(known) if i and value.channels == known[a].channels]
        b = choose.choice(alike)
        channels = known[a].channels
        op = choose.choices(
            ["rectifier", "curve", "conv", "conv by relu", "affine", "add", "product", "cat", "max pool"],
            [10, 3, 5, 1, 1, 3, 1, 1, 1],
        )[0]
        if op == "rectifier":
            spelling = choose.choice(RECTIFIERS)
            if spelling.inplace and not known[a].free:
                continue
            # The old name of an overwritten value now means the new one; a second overwriting would lose its graph.
            program.add(op, (a,), channels, spelling, free=False)
            known[a].free = False
            continue
        if op in (
            "curve",
            "product",
            "max pool",
            "conv",
            "conv by relu",
        ):  # these keep their operands for the backward pass
            known[a].free = known[b].free = False
        if op == "curve":
            program.add(op, (a,), channels, choose.choice(CURVES), free=False)
        elif op.startswith("conv"):
            side = 3 if op == "conv by relu" else choose.choice((1, 3))
            program.add(op, (a,), 3, weights(3, channels, side, side) / channels**0.5)
        elif op == "affine":
            program.add(op, (a,), channels, (weights(1, channels, 1, 1), weights(1, channels, 1, 1)))
        elif op == "cat" and channels + known[b].channels <= 8:
            program.add(op, (a, b), channels + known[b].channels)
        elif op in ("add", "product"):
            program.add(op, (a, b), channels)
        elif op == "max pool":
            program.add(op, (a,), channels)
    program.head = weights(program.values[-1].channels, 2)
    return program


# The interpreter -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """What happens at rectifiers and curves."""

    name: str
    percentile: float = 0.0
    positive: bool = False


class AmbiguousError(Exception):
    """A threshold falls between two numbers that rounding may swap."""


@dataclass
class Result:
    values: Tensor
    rewritten: Counter[str]
    passed: Counter[str]


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    """A convolution as one product of matrices."""
    n, _, height, width = x.shape
    columns = F.unfold(x, weight.shape[-1], padding=weight.shape[-1] // 2)
    return (weight.flatten(1) @ columns).reshape(n, -1, height, width)


def convolved_back(signal: Tensor, weight: Tensor) -> Tensor:
    """The transpose of `convolved`."""
    columns = weight.flatten(1).T @ signal.flatten(2)
    return F.fold(columns, signal.shape[-2:], weight.shape[-1], padding=weight.shape[-1] // 2)


def pooled(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each 3 x 3 neighbourhood, and where it lies among the nine."""
    height, width = x.shape[-2:]
    padded = F.pad(x, (1, 1, 1, 1), value=-float("inf"))
    nine = torch.stack([padded[:, :, i : i + height, j : j + width] for i in range(3) for j in range(3)])
    return nine.amax(0), torch.from_numpy(nine.numpy().argmax(0))  # of several that are equal, the first wins


def pooled_back(signal: Tensor, winner: Tensor) -> Tensor:
    """Each signal goes to the winner of its neighbourhood."""
    n, channels, height, width = signal.shape
    padded = torch.zeros(n, channels, height + 2, width + 2, dtype=signal.dtype)
    for k in range(9):
        i, j = divmod(k, 3)
        padded[:, :, i : i + height, j : j + width] += signal * (winner == k)
    return padded[:, :, 1:-1, 1:-1]


def rectified_back(x: Tensor, y: Tensor, signal: Tensor, highest: float, rule: Rule) -> Tensor:
    inside = (x > 0) & (x < highest)
    if rule.name == "plain":
        return signal * inside
    if rule.name == "guided_backprop":
        return signal * inside * (signal > 0)
    if rule.name == "deconvnet":
        return signal * (signal > 0)
    product = (y * signal).flatten(1).numpy()
    tau = np.percentile(product, rule.percentile, axis=1, method="nearest")[:, None]
    distance = np.abs(product - tau)
    if ((distance > 0) & (distance < 1e-9 * np.abs(product).max())).any():
        raise AmbiguousError
    return signal * torch.from_numpy(product > tau).reshape(signal.shape) * (x < highest)


def interpret(program: Program, x: Tensor, target: int, rule: Rule) -> Result:
    """The program forward, and one signal back through its steps in reverse order."""
    source = list(range(len(program.steps) + 1))  # an overwritten value's name leads to what overwrote it
    values: list[Tensor] = [x]
    reads: list[tuple[int, ...]] = [()]
    winners: dict[int, Tensor] = {}
    for at, step in enumerate(program.steps, 1):
        read = tuple(source[i] for i in step.inputs)
        a, b = values[read[0]], values[read[-1]]
        match step.op:
            case "conv":
                y = convolved(a, step.with_)
            case "conv by relu":
                y = convolved(a, step.with_ * (step.with_ > 0))
            case "affine":
                y = step.with_[0] * a + step.with_[1]
            case "add":
                y = a + b
            case "product":
                y = a * b
            case "cat":
                y = torch.cat([a, b], 1)
            case "max pool":
                y, winners[at] = pooled(a)
            case "rectifier":
                y = torch.where(a > 0, a, 0.0).minimum(torch.full_like(a, step.with_.highest))
                if step.with_.inplace:
                    source[step.inputs[0]] = at
            case _:
                y = step.with_.call(a)
        values.append(y)
        reads.append(read)
    pixels = values[-1].shape[-2] * values[-1].shape[-1]
    signals: list[Tensor | None] = [None] * len(values)
    signals[-1] = (program.head[:, target] / pixels).reshape(1, -1, 1, 1).expand_as(values[-1])
    rewritten: Counter[str] = Counter()
    passed: Counter[str] = Counter()
    for at in range(len(program.steps), 0, -1):
        step, signal, read = program.steps[at - 1], signals[at], reads[at]
        if signal is None:
            continue
        a, b = values[read[0]], values[read[-1]]
        match step.op:
            case "conv":
                back = [convolved_back(signal, step.with_)]
            case "conv by relu":
                back = [convolved_back(signal, step.with_ * (step.with_ > 0))]
            case "affine":
                back = [step.with_[0] * signal]
            case "add":
                back = [signal, signal]
            case "product":
                back = [signal * b, signal * a]
            case "cat":
                back = [signal[:, : a.shape[1]], signal[:, a.shape[1] :]]
            case "max pool":
                back = [pooled_back(signal, winners[at])]
            case "rectifier":
                rewritten[step.with_.kind] += 1
                back = [rectified_back(a, values[at], signal, step.with_.highest, rule)]
            case _:
                slope = step.with_.slope(a)
                if step.with_.kind:
                    (rewritten if rule.positive else passed)[step.with_.kind] += 1
                kept = (signal > 0) if rule.positive and step.with_.kind else torch.ones_like(signal)
                back = [signal * slope * kept]
        for i, each in zip(read, back, strict=True):
            before = signals[i]
            signals[i] = each if before is None else before + each
    assert signals[0] is not None
    return Result(signals[0], rewritten, passed)


# The comparison --------------------------------------------------------------------------------------------------

PROGRAMS, PER_TEST = 240, 40


def image_batch(seed: int) -> Tensor:
    return torch.randn(2, 2, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def differs(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-300))


def explained(model: nn.Module, x: Tensor, target: int, rule: Rule) -> Any:
    options: dict[str, Any] = {} if rule.name == "plain" else {"smooth": "positive" if rule.positive else "leave"}
    if rule.name == "rectgrad":
        options["percentile"] = rule.percentile
    method = METHODS["vanilla_gradient" if rule.name == "plain" else rule.name](model, **options)
    return method.attribute(x, target)


@pytest.mark.parametrize("first", range(0, PROGRAMS, PER_TEST))
def test_random_networks_equal_the_interpreter(first: int) -> None:
    for seed in range(first, first + PER_TEST):
        program, x, target = random_program(seed), image_batch(seed), seed % 2
        model = Network(program).eval()
        percentile = (10.0, 50.0, 80.0, 98.0)[seed % 4]
        for name in ("plain", *RULES):
            rule = Rule(name, percentile, positive=name != "plain" and seed % 3 == 0)
            try:
                expected = interpret(program, x, target, rule)
            except AmbiguousError:
                continue
            if name != "plain" and not expected.rewritten:
                with pytest.raises(NotApplicableError):
                    explained(model, x, target, rule)
                continue
            found = explained(model, x, target, rule)
            values = x * expected.values if name == "rectgrad" else expected.values
            assert differs(found.values, values) <= 1e-12, f"{name}, seed {seed}"
            if name != "plain":
                assert found.coverage.rewritten == expected.rewritten, f"{name}, seed {seed}"
                assert found.coverage.passed == expected.passed, f"{name}, seed {seed}"
                assert not found.coverage.hidden, f"{name}, seed {seed}"


def test_the_random_networks_are_worth_the_trouble() -> None:
    """Most are explained by each rule, unlike by the plain gradient; each spelling is called; few are ambiguous."""
    changed: Counter[str] = Counter()
    ambiguous = 0
    spelled: Counter[int] = Counter()
    for seed in range(PROGRAMS):
        program, x = random_program(seed), image_batch(seed)
        spelled.update(id(step.with_) for step in program.steps if step.op == "rectifier")
        if seed % 4:
            continue
        plain = interpret(program, x, seed % 2, Rule("plain")).values
        for name in RULES:
            try:
                values = interpret(program, x, seed % 2, Rule(name, 50)).values
            except AmbiguousError:
                ambiguous += 1
            else:
                changed[name] += differs(values, plain) > 1e-3
    assert all(changed[name] > 0.6 * PROGRAMS / 4 for name in RULES)
    assert all(spelled[id(each)] >= 10 for each in RECTIFIERS)
    assert ambiguous < 0.1 * PROGRAMS / 4
