"""Everything about a model, a method, some tensors and the process that a call must leave as it was."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..attribution.base import Attribution
from ..hooks.autograd_graph import global_module_hooks, tensor_hooks, tensor_version

State = dict[str, object]
"""What each thing was, by what it is called."""


class Snapshot:
    """The state of some things at one moment.

    Args:
        things: Models, methods and tensors, by what they are to be called.

    """

    def __init__(self, **things: Any) -> None:
        self.things = things  # kept alive, so that an identity cannot be given away twice
        self.state = _state(things)

    def changes(self) -> list[str]:
        """What is no longer as it was: `model.norm.running_mean: values`. Empty where nothing changed."""
        now = _state(self.things)
        names = [*self.state, *(name for name in now if name not in self.state)]
        missing = object()
        return [name for name in names if self.state.get(name, missing) != now.get(name, missing)]


def _state(things: Mapping[str, Any]) -> State:
    state: State = dict(_of_the_process())
    for name, thing in things.items():
        if isinstance(thing, nn.Module):
            state.update(_of_model(name, thing))
        elif isinstance(thing, Tensor):
            state.update(_of_tensor(name, thing))
        else:
            state[name] = _of_value(thing)
    return state


def _of_model(name: str, model: nn.Module) -> Iterator[tuple[str, object]]:
    for path, module in model.named_modules(prefix=name, remove_duplicate=False):
        for key, each in vars(module).items():
            # The registers of parameters, buffers, parts and hooks are dictionaries; what counts is who is in them.
            yield f"{path}: {key.lstrip('_')}", _identities(each)
    for path, tensor in (*model.named_parameters(prefix=name), *model.named_buffers(prefix=name)):
        yield from _of_tensor(path, tensor)


def _identities(value: Any) -> object:
    if isinstance(value, Mapping):
        return tuple((key, id(each)) for key, each in value.items())
    if isinstance(value, list | tuple | set):
        return tuple(id(each) for each in value)
    return value if isinstance(value, str | int | float | bool | None) else id(value)


def _of_tensor(name: str, tensor: Tensor) -> Iterator[tuple[str, object]]:
    # Asked of a non-leaf, `.grad` warns; and a tensor made under inference_mode counts no versions.
    grad = tensor.grad if tensor.is_leaf else None
    yield f"{name}: identity", id(tensor)
    yield f"{name}: values", _content(tensor)
    yield f"{name}: version counter", tensor_version(tensor)
    yield f"{name}: requires_grad", tensor.requires_grad
    yield f"{name}: grad_fn", id(tensor.grad_fn) if tensor.grad_fn is not None else None
    yield f"{name}: .grad", None if grad is None else (id(grad), _content(grad))
    yield f"{name}: tensor hooks", _identities(tensor_hooks(tensor))


def _content(tensor: Tensor) -> object:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return tuple(tensor.shape), tensor.dtype, tensor.stride(), flat.view(torch.uint8).numpy().tobytes()


def _of_value(value: Any) -> object:
    """The state of an object's attribute, as far down as it consists of containers, tensors and methods."""
    if isinstance(value, Attribution):
        return id(value), tuple((key, _of_value(each)) for key, each in vars(value).items())
    if isinstance(value, Tensor):
        return tuple(_of_tensor("", value))
    if isinstance(value, torch.Generator):
        return id(value), _content(value.get_state())
    if isinstance(value, Mapping):
        return tuple((key, _of_value(each)) for key, each in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return tuple(_of_value(each) for each in value)
    return value if isinstance(value, str | bytes | int | float | bool | None) else id(value)


def _of_the_process() -> Iterator[tuple[str, object]]:
    yield "torch's random state", _content(torch.get_rng_state())
    if torch.cuda.is_available():
        yield "CUDA's random states", tuple(map(_content, torch.cuda.get_rng_state_all()))
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 - the global state is what must not move
    yield "NumPy's random state", (kind, np.asarray(keys).tobytes(), *rest)
    yield "Python's random state", random.getstate()
    yield "grad mode", torch.is_grad_enabled()
    yield "inference mode", torch.is_inference_mode_enabled()
    yield "autocast", (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"))
    yield "default dtype", torch.get_default_dtype()
    yield "deterministic algorithms", torch.are_deterministic_algorithms_enabled()
    yield "number of threads", torch.get_num_threads()
    for name, hooks in global_module_hooks():
        yield f"torch's {name}", _identities(hooks)
