"""The gradients of one forward and one backward pass after the other, as they arrive, and what is kept of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ImageError
from ..hooks.manager import HookManager
from ..hooks.model_state import leaf
from ..hooks.pytree import first_tensor, tree_map_tensors, tree_tensors
from ..hooks.rectifiers import refuse_checkpoints
from .accumulators import Call, Calls
from .batches import is_finite
from .gradient_objective import Objective
from .model_inputs import Feed, called
from .moments import Moments, moments


class Arrivals:
    """The gradients of the mean objective over all batches: moments of those at layers, sums of those of parameters.

    Args:
        modules: The layers by name.
        parameters: By name.
        objective: What the gradients are of.
    """

    def __init__(self, modules: dict[str, nn.Module], parameters: dict[str, Tensor], objective: Objective) -> None:
        self._modules = modules
        self._parameters = {name: each for name, each in parameters.items() if each.requires_grad}
        self._objective = objective
        self._calls = Calls(_Arrived)
        self._sums: dict[str, Tensor] = {}
        self._first_size = 0
        self._weight = 0.0  # of the batches so far, each by its number of images over that of the first
        self._sum = 0.0
        self._batches = 0
        self._batch_weight = 1.0
        self._is_backward = False
        self._is_noted = False
        self.first: str | None = None
        self.notes: list[str] = []

    def run(self, model: nn.Module, feed: Feed) -> None:
        """One batch, through a model that is borrowed by the caller. Raises ImageError where it is empty."""
        self._batches += 1
        if not feed.size:
            raise ImageError(f"batch {self._batches} is empty, so there is no mean over its images")
        self._first_size = self._first_size or feed.size
        self._batch_weight = feed.size / self._first_size
        self._weight += self._batch_weight
        self._calls.begin()
        starts: list[Tensor] = []
        with HookManager() as arriving:
            with HookManager() as hooks:
                for name, module in self._modules.items():
                    hooks.around(module, partial(self._begin, name), partial(self._see, arriving))
                output = called(model, feed, partial(_started, starts))
            # From here on a part that is checkpointed calls its layers once more, which is no call of the model's.
            objective = self._objective(output, feed)
            gradients = self._gradients(objective, [*starts, *self._parameters.values()])[len(starts) :]
        value = float(objective.detach())
        self._sum += self._batch_weight * value
        for name, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is not None:
                self._add(name, gradient)
        self._note(feed, value)

    @property
    def mean(self) -> float:
        """The mean of the objective over all images."""
        return self._sum / self._weight

    def layers(self) -> list[tuple[str, int, int, Moments | None]]:
        """For each call of each layer its name, its number, how many there are, and what arrived; None for nothing."""
        return [
            (name, call, calls, None if each.moments is None else each.moments.scaled(1 / self._weight))
            for name, call, calls, each in self._calls
        ]

    @property
    def breaks_a_parameter(self) -> bool:
        """Whether there is NaN or infinity in the gradient of a parameter."""
        return not all(map(is_finite, self._sums.values()))

    def parameter(self, name: str) -> Moments | None:
        """The moments of a parameter's gradient; None where it has none."""
        gradient = self._sums.get(name)
        return None if gradient is None else moments(gradient).scaled(1 / self._weight)

    def _begin(self, name: str, args: Any, kwargs: Any) -> Call:
        return self._calls.next(name)

    def _see(self, arriving: HookManager, call: Call, output: Any) -> Any:
        """A layer has returned: what flows on is a copy, whose gradient is that of what it returned, and no more."""
        tensor = first_tensor(output)
        if tensor is None:
            return None
        arrived = self._calls.of(call)
        if not tensor.requires_grad:
            return None
        flows_on = tensor.clone()
        arriving.at_gradient(flows_on, partial(self._arrive, call[0], arrived))
        return tree_map_tensors(output, lambda each: flows_on if each is tensor else each)

    def _arrive(self, name: str, arrived: _Arrived, gradient: Tensor | None) -> None:
        # A loss may take gradients of its own before.
        if gradient is None or not self._is_backward:
            return
        found = moments(gradient)
        if self.first is None and (found.nan or found.inf):
            self.first = name
            self.notes.append(f"NaN or infinity first comes to {_label(name)} on the way back{self._where()}")
        found = found.scaled(self._batch_weight)
        arrived.moments = found if arrived.moments is None else arrived.moments + found

    def _gradients(self, objective: Tensor, at: list[Tensor]) -> tuple[Tensor | None, ...]:
        self._is_backward = True
        try:
            return torch.autograd.grad(objective, at, allow_unused=True)
        except RuntimeError:
            refuse_checkpoints(objective)
            raise
        finally:
            self._is_backward = False

    def _add(self, name: str, gradient: Tensor) -> None:
        gradient = gradient.to_dense() if gradient.layout != torch.strided else gradient
        if self._batches == 1:
            self._sums[name] = gradient
            return
        known, part = self._sums.get(name), _wide(gradient) * self._batch_weight
        self._sums[name] = part if known is None else _wide(known) + part

    def _note(self, feed: Feed, value: float) -> None:
        """Say where NaN comes from, once."""
        if self._is_noted or math.isfinite(value):
            return
        self._is_noted = True
        if not all(map(is_finite, tree_tensors((feed.args, feed.kwargs)))):
            self.notes.append(f"the input itself holds NaN or infinity{self._where()}")
        self.notes.append(f"the {self._objective.name} is {value}{self._where()}")

    def _where(self) -> str:
        return f", in batch {self._batches}" if self._batches > 1 else ""


def ratio_of(norm: float, weight_norm: float, learning_rate: float | None) -> float | None:
    """The norm of the update, or of the gradient, over that of the weight; None for a weight of zeros."""
    return (1.0 if learning_rate is None else learning_rate) * norm / weight_norm if weight_norm else None


def ratios_of_layers(
    modules: Mapping[str, nn.Module], norms: Mapping[int, tuple[float, float]], learning_rate: float | None
) -> dict[str, float | None]:
    """For each layer the ratio of all its parameters as of one, those of its parts included.

    Args:
        modules: The layers by name.
        norms: Of the gradient of each parameter that has one, and of the parameter itself, by its `id`.
        learning_rate: None leaves it out.
    """
    ratios = {}
    for name, module in modules.items():
        own = [norms[id(each)] for each in module.parameters() if id(each) in norms]
        norm, weight_norm = (math.hypot(*(pair[at] for pair in own)) for at in (0, 1))
        ratios[name] = ratio_of(norm, weight_norm, learning_rate)
    return ratios


class _Arrived:
    """What has arrived so far at one call of one layer."""

    def __init__(self) -> None:
        self.moments: Moments | None = None


def _started(starts: list[Tensor], tensor: Tensor) -> Tensor:
    """What the model gets for a tensor: a copy that gradients come back to, so that they pass by frozen layers too."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.clone()
    starts.append(leaf(tensor))
    return starts[-1].clone()


def _wide(tensor: Tensor) -> Tensor:
    """In double precision, where there is such a thing."""
    return tensor if tensor.device.type == "mps" else tensor.to(torch.promote_types(tensor.dtype, torch.float64))


def _label(name: str) -> str:
    return f'"{name}"' if name else "the model's output"
