"""The model, the user's tensors, the method and the process are left bit for bit as found, however a call ends."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..attribution.base import Attribution
from ..errors import LayerError, TargetError
from .snapshot import Snapshot
from .subject import Check, Subject, images, require

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "training": nullcontext,
    "evaluation": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


class Deliberate(Exception):  # noqa: N818 - it stands for the user's own exception
    """What a target function of the user raises."""


def lived_in(model: nn.Module, *, training: bool) -> nn.Module:
    """The model with everything set that a method might disturb: training flags, gradients, frozen parameters."""
    for i, module in enumerate(model.modules()):
        module.training = training and i % 3 != 2
    for i, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(i % 4 != 3)
        if i % 2 == 0:
            parameter.grad = torch.full_like(parameter, float(i))
    model.register_forward_hook(lambda module, inputs, output: None)
    return model


def _ends_well(subject: Subject, model: nn.Module) -> tuple[Attribution, Any, type[BaseException] | None]:
    return subject.on(model), [0, 1], None


def _bad_target(subject: Subject, model: nn.Module) -> tuple[Attribution, Any, type[BaseException] | None]:
    return subject.on(model), 5000, TargetError


def _error_in_the_target(subject: Subject, model: nn.Module) -> tuple[Attribution, Any, type[BaseException] | None]:
    def target(output: Any) -> Tensor:
        raise Deliberate

    return subject.on(model), target, Deliberate


def _bad_shape(subject: Subject, model: nn.Module) -> tuple[Attribution, Any, type[BaseException] | None]:
    return subject.on(model), 0, Exception


def _layer_never_called(subject: Subject, model: nn.Module) -> tuple[Attribution, Any, type[BaseException] | None]:
    model.add_module("never_called", nn.Conv2d(3, 3, 1, device="meta").to_empty(device="cpu").requires_grad_(False))
    with torch.no_grad():
        for parameter in model.get_submodule("never_called").parameters():
            parameter.fill_(0.5)
    layer: dict[str, Any] = {"layer": "never_called"} if "layer" in takes(subject) else {"layers": ["never_called"]}
    return subject.on(model, **layer), 0, LayerError


def _interrupted(
    subject: Subject, model: nn.Module, *, forward: int
) -> tuple[Attribution, Any, type[BaseException] | None]:
    runs = 0

    def interrupt(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal runs
        runs += 1
        if runs == forward:
            raise KeyboardInterrupt

    _last_leaf(model).register_forward_hook(interrupt)
    return subject.on(model), 0, KeyboardInterrupt if forward == 1 else None


def _last_leaf(model: nn.Module) -> nn.Module:
    """The part that finishes last in a forward, so that an interrupt there comes when the most is under way."""
    called = [model]
    leaves = [module for module in model.modules() if not any(module.children())]
    handles = [module.register_forward_hook(lambda m, i, o: called.append(m)) for module in leaves]
    with torch.no_grad():
        training = [(module, module.training) for module in model.modules()]
        model.eval()(images(1))
        for module, flag in training:
            module.training = flag
    for handle in handles:
        handle.remove()
    return called[-1]


def takes(subject: Subject) -> set[str]:
    """The names of what the method's constructor takes."""
    return set(inspect.signature(subject.method).parameters)


_SCENARIOS: dict[str, Callable[..., tuple[Attribution, Any, type[BaseException] | None]]] = {
    "after a call": _ends_well,
    "after a bad target": _bad_target,
    "after an error in the target": _error_in_the_target,
    "after a bad shape": _bad_shape,
    "after a layer that is never called": _layer_never_called,
    "after an interrupt": partial(_interrupted, forward=1),
    "after a late interrupt": partial(_interrupted, forward=2),
}


def _run(scenario: str, subject: Subject) -> None:
    for mode, context in MODES.items():
        _run_in_mode(scenario, mode, context(), subject)


def _run_in_mode(scenario: str, mode: str, context: AbstractContextManager[Any], subject: Subject) -> None:
    model = lived_in(subject.model(), training=mode != "evaluation")
    method, target, expected = _SCENARIOS[scenario](subject, model)
    where = f"{scenario}, in {mode}"
    with context:
        x = images(2, (16, 16)) if scenario != "after a bad shape" else images(2)[:, :2].clone()
        if mode in ("training", "evaluation"):
            x.requires_grad_()
            x.grad = torch.ones_like(x)
        before = Snapshot(model=model, method=method, input=x)
        _require_outcome(expected, method, x, target, where)
        changed = before.changes()
    require(not changed, f"{where}: {', '.join(changed[:6])}{' and more' * (len(changed) > 6)} changed")


def _require_outcome(
    expected: type[BaseException] | None, method: Attribution, x: Tensor, target: Any, where: str
) -> None:
    try:
        method.attribute(x, target)
    except (Exception, KeyboardInterrupt) as error:
        late = isinstance(error, KeyboardInterrupt) and expected is None
        if not late and (expected is None or not isinstance(error, expected)):
            wanted = expected.__name__ if expected else "no error"
            raise AssertionError(f"{where}: expected {wanted}, got {type(error).__name__}: {error}") from error
        return
    require(expected is None, f"{where}: expected {expected and expected.__name__}, and nothing was raised")


def untouched_checks(subject: Subject) -> dict[str, Check]:
    """One check per way that a call can end."""
    has_layer = bool(takes(subject) & {"layer", "layers"})
    return {
        "untouched_" + scenario.replace(" ", "_"): partial(_run, scenario)
        for scenario in _SCENARIOS
        if has_layer or scenario != "after a layer that is never called"
    }
