"""Private copies of a model that run in one way, faster and less exactly than it, and what they are measured with."""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..hooks.model_state import leaf, run
from ..hooks.pytree import mapped, tensors_in
from .folding import Pair, fold, fold_exactly, private_copy

Precision = Literal["exact", "fast", "bf16"]
"""How exactly passes are run: as the model is; to 2e-2 with a cosine above 0.999; or in 16 bits."""

ROWS = 4
"""How many rows a trial takes at most."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a model faster."""

    precision: Precision
    weights: torch.dtype | None = None
    autocast: bool = False
    least_cosine: float = 0.999
    most_error: float = 2e-2

    def serves(self, error: float, cosine: float, gradient: float) -> bool:
        """Whether outputs with this error and cosine, and a gradient with this cosine, are exact enough."""
        least = self.least_cosine
        return error <= self.most_error and cosine >= least and (gradient >= least or self.precision == "bf16")

    def says(self, folded: int, norms: int) -> str:
        """What it does, for the note."""
        how = ["bf16 weights" * (self.weights is not None), "bf16 autocast" * self.autocast, "channels_last"]
        how.append(f"{folded} of {norms} batch norms folded" if norms else "")
        return ", ".join(filter(None, how))


FAST = Way("fast")
WEIGHTS = Way("bf16", torch.bfloat16, least_cosine=0.99, most_error=0.2)
AUTOCAST = Way("bf16", autocast=True, least_cosine=0.99, most_error=0.2)


def ways_for(precision: Precision, backward: bool) -> list[Way]:
    """The ways to be tried for a precision, the most promising first."""
    if precision == "fast":
        return [FAST]
    return [AUTOCAST, FAST] if backward else [WEIGHTS, AUTOCAST, FAST]


@dataclass(frozen=True, slots=True)
class Trial:
    """A few rows, and what is done with them to see how fast and how exact a way is."""

    x: Tensor
    backward: bool
    score: Callable[[Any], Tensor] | None

    def __call__(self, model: nn.Module) -> tuple[Any, Tensor | None]:
        """The output and, where it is wanted, the gradient at the input."""
        if not self.backward:
            with torch.no_grad():
                return run(model, self.x), None
        with torch.enable_grad():  # the caller may have them off
            x = leaf(self.x)
            output = run(model, x)
            score = self.score(output).sum() if self.score else _sum(output)
            return mapped(output, Tensor.detach), torch.autograd.grad(score, x)[0]

    def seconds(self, model: nn.Module) -> float:
        """How long that takes."""
        _wait(self.x.device)
        begin = time.perf_counter()
        self(model)
        _wait(self.x.device)
        return time.perf_counter() - begin

    def ratio(self, ours: nn.Module, theirs: nn.Module) -> float:
        """The time of one model as a part of the other's, of the better of two rounds; of one where that is plain."""
        our, their = self.seconds(ours), self.seconds(theirs)
        if 0.8 < our / their < 1.25:
            our, their = min(our, self.seconds(ours)), min(their, self.seconds(theirs))
        return our / their


def tuned(
    model: nn.Module, way: Way, trial: Trial, *, keep: Collection[str] = (), pairs: tuple[Pair, ...] | None = None
) -> tuple[nn.Module, tuple[Pair, ...]]:
    """A private copy that runs in one way, and what is folded in it: these pairs, or those that are found."""
    made = private_copy(model)
    if pairs is None:
        pairs = fold_exactly(made, model, trial.x[:1], keep)
    else:
        with torch.no_grad():
            fold(made, pairs)
    nn.Module.to(made, memory_format=torch.channels_last)
    if way.weights is not None:
        nn.Module.to(made, dtype=way.weights)
    if trial.backward:
        # Backward passes past frozen weights are slower, in 16 bits through a transformer twenty times.
        for each in made.parameters():
            each.requires_grad = each.is_floating_point()
    vars(made)["forward"] = _Adapted(made, vars(made).get("forward"), way)
    return made, pairs


class _Adapted:
    """The forward of a private copy: takes and gives what the model does, and works in its own layout and type."""

    def __init__(self, module: nn.Module, own: Callable[..., Any] | None, way: Way) -> None:
        # A copy that held itself would keep its memory until the collector of cycles comes by.
        self.module = weakref.ref(module)
        self.own = own
        self.way = way

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        layout = torch.channels_last if x.dim() == 4 else torch.preserve_format
        suited = x.to(dtype=self.way.weights or x.dtype, memory_format=layout)
        module = self._held()
        forward = self.own or partial(type(module).forward, module)
        with torch.autocast(x.device.type, torch.bfloat16) if self.way.autocast else nullcontext():
            output = forward(suited, *args, **kwargs)
        if self.way.precision == "fast":
            return output
        return mapped(output, lambda each: each.to(x.dtype) if each.dtype == torch.bfloat16 else each)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Adapted:
        return _Adapted(copy.deepcopy(self._held(), memo), copy.deepcopy(self.own, memo), self.way)

    def _held(self) -> nn.Module:
        module = self.module()
        if module is None:
            raise ReferenceError("the private copy that this forward belongs to is gone; keep the Runner itself")
        return module


def _sum(output: Any) -> Tensor:
    tensors = [each for each in tensors_in(output) if each.is_floating_point() and each.requires_grad]
    return torch.stack([each.float().sum() for each in tensors]).sum()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
