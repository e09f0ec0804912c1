"""What the modules of a model cost: the numbers that they hold, and the time that they take."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..hooks.manager import HookManager
from ..hooks.model_state import reference_tensor
from ..hooks.pytree import tree_tensors
from .model_inputs import Feed, called


class Holding(NamedTuple):
    """How many numbers a module holds, and how many of them require a gradient."""

    parameters: int
    trainable: int


def holdings(model: nn.Module) -> dict[nn.Module, Holding]:
    """How many numbers each module holds, its parts included and each parameter once."""
    held: dict[nn.Module, dict[int, Tensor]] = {}

    def collect(module: nn.Module) -> dict[int, Tensor]:
        if module not in held:
            held[module] = {id(each): each for each in module.parameters(recurse=False)}
            for child in module.children():
                held[module] |= collect(child)
        return held[module]

    collect(model)
    sizes = {key: (each.numel(), each.requires_grad) for key, each in held[model].items()}
    return {
        module: Holding(sum(sizes[key][0] for key in keys), sum(sizes[key][0] for key in keys if sizes[key][1]))
        for module, keys in held.items()
    }


def timed(model: nn.Module, given: Feed, modules: list[nn.Module], rounds: int) -> dict[nn.Module, float]:
    """The seconds that the model and each module took in several forwards, each in its fastest; nothing without any.

    So a hiccup counts nowhere, and a module never takes less than its parts together.
    """
    fastest: dict[nn.Module, float] = {}
    wait = _waiting(model, given)
    inside = [each for each in modules if each is not model]
    for _ in range(rounds):
        seconds = dict.fromkeys((model, *inside), 0.0)
        with HookManager(exclusive=True) as hooks, torch.no_grad():
            for module in inside:
                hooks.around(module, *_clock(seconds, module, wait))
            wait()
            start = time.perf_counter()
            called(model, given)
            wait()
            seconds[model] = time.perf_counter() - start
        fastest = {module: min(each, fastest.get(module, each)) for module, each in seconds.items()}
    return fastest


def _clock(seconds: dict[nn.Module, float], module: nn.Module, wait: Callable[[], None]) -> tuple[Any, Any]:
    def begin(args: Any, kwargs: Any) -> tuple[float, float]:
        wait()
        return seconds[module], time.perf_counter()

    def end(token: tuple[float, float], output: Any) -> None:
        wait()
        # What a call of the same module inside of this one has added is a part of this.
        seconds[module] = token[0] + time.perf_counter() - token[1]

    return begin, end


def _waiting(model: nn.Module, given: Feed) -> Callable[[], None]:
    """What waits for the model's device to have done its work; on a CPU that is done already."""
    some = next((each for each in (reference_tensor(model), *tree_tensors(given[:2])) if each is not None), None)
    if some is None or some.device.type in ("cpu", "meta"):
        return lambda: None
    return partial(torch.accelerator.synchronize, some.device)
