"""Checks that a call leaves the model, the user's tensors, the method and the process bit for bit unchanged.

This includes calls that raise or are interrupted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..attribution.base import Attribution
from ..errors import LayerError, TargetError
from ..hooks.autograd_graph import global_module_hooks, tensor_hooks, tensor_version
from .case import Check, MethodCase, images, require, require_raises


class Snapshot:
    """The state of some objects and of the process at one moment.

    Args:
        objects: Models, methods and tensors by name.
    """

    def __init__(self, **objects: Any) -> None:
        self.objects = objects  # held, so that no `id` is reused
        self.state = dict(_state(objects))

    def changes(self) -> list[str]:
        """Return the names of the states that have changed, such as `model.norm.running_mean: values`."""
        now, missing = dict(_state(self.objects)), object()
        return [name for name in self.state | now if self.state.get(name, missing) != now.get(name, missing)]


def _state(objects: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    yield from _process_state()
    for name, value in objects.items():
        if isinstance(value, nn.Module):
            yield from _model_state(name, value)
        elif isinstance(value, Tensor):
            yield from _tensor_state(name, value)
        else:
            yield name, _value_state(value)


def _model_state(name: str, model: nn.Module) -> Iterator[tuple[str, object]]:
    for path, module in model.named_modules(prefix=name, remove_duplicate=False):
        for key, value in vars(module).items():
            # Parameters, buffers, children and hooks are stored in dictionaries, whose entries are compared.
            yield f"{path}: {key.lstrip('_')}", _entries(value, id)
    for path, tensor in (*model.named_parameters(prefix=name), *model.named_buffers(prefix=name)):
        yield from _tensor_state(path, tensor)


def _entries(value: Any, state: Callable[[Any], object]) -> object:
    """Return the state of each entry of a container, the value of a constant, or the identity of anything else."""
    if isinstance(value, Mapping):
        return tuple((key, state(part)) for key, part in value.items())
    if isinstance(value, list | tuple | set):
        return tuple(map(state, value))
    return value if isinstance(value, str | bytes | int | float | bool | None) else id(value)


def _tensor_state(name: str, tensor: Tensor) -> Iterator[tuple[str, object]]:
    grad = tensor.grad if tensor.is_leaf else None  # `.grad` of a non-leaf warns
    yield f"{name}: identity", id(tensor)
    yield f"{name}: values", _content(tensor)
    yield f"{name}: version counter", tensor_version(tensor)
    yield f"{name}: requires_grad", tensor.requires_grad
    yield f"{name}: grad_fn", id(tensor.grad_fn)
    yield f"{name}: .grad", None if grad is None else (id(grad), _content(grad))
    yield f"{name}: tensor hooks", _entries(tensor_hooks(tensor), id)


def _content(tensor: Tensor) -> object:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return tuple(tensor.shape), tensor.dtype, tensor.stride(), flat.view(torch.uint8).numpy().tobytes()


def _value_state(value: Any) -> object:
    """Return the state of a method or of an attribute, including nested containers, tensors and methods."""
    if isinstance(value, Attribution):
        return id(value), _value_state(vars(value))
    if isinstance(value, Tensor):
        return tuple(_tensor_state("", value))
    if isinstance(value, torch.Generator):
        return id(value), _content(value.get_state())
    return _entries(value, _value_state)


def _process_state() -> Iterator[tuple[str, object]]:
    yield "torch's random state", _content(torch.get_rng_state())
    if torch.cuda.is_available():
        yield "CUDA's random states", tuple(map(_content, torch.cuda.get_rng_state_all()))
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 - the global state must not change
    yield "NumPy's random state", (kind, np.asarray(keys).tobytes(), *rest)
    yield "Python's random state", random.getstate()
    yield "grad mode", torch.is_grad_enabled()
    yield "inference mode", torch.is_inference_mode_enabled()
    yield "autocast", (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"))
    yield "default dtype", torch.get_default_dtype()
    yield "deterministic algorithms", torch.are_deterministic_algorithms_enabled()
    yield "number of threads", torch.get_num_threads()
    for name, hooks in global_module_hooks():
        yield f"torch's {name}", _entries(hooks, id)


# Ways in which a call ends -----------------------------------------------------------------------------------


class UserError(Exception):
    """Raised by the target function of the checks."""


def with_user_state(model: nn.Module, *, training: bool) -> nn.Module:
    """Set user state that a method must preserve: training flags, gradients, frozen parameters and a hook."""
    for i, module in enumerate(model.modules()):
        module.training = training and i % 3 != 2
    for i, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(i % 4 != 3)
        if i % 2 == 0:
            parameter.grad = torch.full_like(parameter, float(i))
    model.register_forward_hook(lambda module, inputs, output: None)
    return model


# Method, target and allowed errors (NoneType: the call may succeed); None if the ending does not apply.
Ending = tuple[Attribution, Any, tuple[type, ...]] | None


def _failing_target(output: Any) -> Tensor:
    raise UserError


def _layer_never_called(case: MethodCase, model: nn.Module) -> Ending:
    model.add_module("never_called", nn.Identity())
    options: dict[str, Any] = {"layer": "never_called", "layers": ["never_called"]}
    name = next((name for name in options if name in case.method.parameters()), None)
    return (case.on(model, **{name: options[name]}), 0, (LayerError,)) if name else None


def _interrupted(case: MethodCase, model: nn.Module, *, forward: int) -> Ending:
    forwards = 0

    def interrupt(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal forwards
        forwards += 1
        if forwards == forward:
            raise KeyboardInterrupt

    model.get_submodule(_last_leaf(case.model())).register_forward_hook(interrupt)
    return case.on(model), 0, (KeyboardInterrupt,) if forward == 1 else (KeyboardInterrupt, NoneType)


def _last_leaf(model: nn.Module) -> str:
    """Return the leaf module that finishes last in a forward pass, when most temporary state exists."""
    called = [""]
    for name, module in model.named_modules():
        if not any(module.children()):
            module.register_forward_hook(lambda module, inputs, output, name=name: called.append(name))
    with torch.no_grad():
        model(images(1))
    return called[-1]


_ENDINGS: dict[str, Callable[[MethodCase, nn.Module], Ending]] = {
    "after a call": lambda case, model: (case.on(model), [0, 1], (NoneType,)),
    "after a bad target": lambda case, model: (case.on(model), 5000, (TargetError,)),
    "after an error in the target": lambda case, model: (case.on(model), _failing_target, (UserError,)),
    "after a bad shape": lambda case, model: (case.on(model), 0, (Exception,)),
    "after a layer that is never called": _layer_never_called,
    "after an interrupt": partial(_interrupted, forward=1),
    "after a late interrupt": partial(_interrupted, forward=2),
}

_MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "training": nullcontext,
    "evaluation": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


def _check_ending(ending: str, case: MethodCase) -> None:
    for mode, context in _MODES.items():
        model = with_user_state(case.model(), training=mode != "evaluation")
        setup = _ENDINGS[ending](case, model)
        if setup is None:
            return
        method, target, expected = setup
        where = f"{ending}, in {mode}"
        with context():
            x = images(2)[:, :2].clone() if ending == "after a bad shape" else images(2)
            if context is nullcontext:
                x.requires_grad_()
                x.grad = torch.ones_like(x)
            before = Snapshot(model=model, method=method, input=x)
            require_raises(expected, partial(method.attribute, x, target), where)
            changed = before.changes()
        require(not changed, f"{where}: {', '.join(changed[:6])}{' and more' * (len(changed) > 6)} changed")


UNCHANGED_CHECKS: dict[str, Check] = {
    f"untouched_{ending.replace(' ', '_')}": partial(_check_ending, ending) for ending in _ENDINGS
}
