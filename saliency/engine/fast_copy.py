"""How many passes of one model are run: exactly, or faster on a private copy, where that is measured to be faster."""

from __future__ import annotations

import copy
import threading
import time
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..errors import MethodError
from ..hooks.manager import HookManager
from ..hooks.model_state import leaf, reference_tensor, run_model
from ..hooks.pytree import tree_map_tensors, tree_tensors
from .folding import NORMS, Pair, agreement, fold, fold_exactly, hooked, private_copy

Precision = Literal["exact", "fast", "bf16"]
"""How exactly passes are run: as the model is; to 2e-2 with a cosine above 0.999; or in 16 bits."""

ROWS = 4
"""How many rows a trial takes at most."""


@dataclass(frozen=True, slots=True)
class Variant:
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


FAST = Variant("fast")
WEIGHTS = Variant("bf16", torch.bfloat16, least_cosine=0.99, most_error=0.2)
AUTOCAST = Variant("bf16", autocast=True, least_cosine=0.99, most_error=0.2)


def variants_for(precision: Precision, backward: bool) -> list[Variant]:
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
                return run_model(model, self.x), None
        with torch.enable_grad():  # the caller may have them off
            x = leaf(self.x)
            output = run_model(model, x)
            score = self.score(output).sum() if self.score else _sum(output)
            return tree_map_tensors(output, Tensor.detach), torch.autograd.grad(score, x)[0]

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


def build_variant(
    model: nn.Module, way: Variant, trial: Trial, *, keep: Collection[str] = (), pairs: tuple[Pair, ...] | None = None
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

    def __init__(self, module: nn.Module, own: Callable[..., Any] | None, way: Variant) -> None:
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
        return tree_map_tensors(output, lambda each: each.to(x.dtype) if each.dtype == torch.bfloat16 else each)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Adapted:
        return _Adapted(copy.deepcopy(self._held(), memo), copy.deepcopy(self.own, memo), self.way)

    def _held(self) -> nn.Module:
        module = self.module()
        if module is None:
            raise ReferenceError("the private copy that this forward belongs to is gone; keep the Runner itself")
        return module


def _sum(output: Any) -> Tensor:
    tensors = [each for each in tree_tensors(output) if each.is_floating_point() and each.requires_grad]
    return torch.stack([each.float().sum() for each in tensors]).sum()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


__all__ = ["Precision", "Runner", "runner"]

_GAIN = 0.97
"""A way must take less than this part of the plain time to be worth its rounding."""

_PLAIN_WIN = 0.5
"""A way that takes less than this is taken without trying the next ones."""


@dataclass(frozen=True)
class Runner:
    """How the passes of one call are run.

    Attributes:
        model: The user's own model, or a private copy of it in evaluation mode with the same names. The copy takes and
            gives what the model does: inputs are converted on their way in and outputs on their way out, so it can
            stand wherever the model stands. Outputs of its layers are in bfloat16 for "bf16".
        note: What was done and what it gained, or why not: "fast: channels_last, 53 of 53 batch norms folded; 0.77 of
            the plain time".
        precision: What the passes are run with in the end.
    """

    model: nn.Module
    note: str
    precision: Precision

    def __call__(self, x: Tensor) -> Any:
        """The output for a batch, in the dtype of the model's own; gradients pass.

        The model gets a clone: it may work in place on its input.
        """
        return run_model(self.model, x)


def runner(
    model: nn.Module,
    x: Tensor,
    precision: Precision,
    *,
    backward: bool = False,
    trial: Callable[[Any], Tensor] | None = None,
    keep: Collection[str] = (),
) -> Runner:
    """The fastest way to run a borrowed model on batches like this one that is as exact as asked.

    - "exact": the model itself.
    - "fast": a private copy with its convolutions laid out channels last and batch norms folded into them.
    - "bf16": such a copy with weights in bfloat16, or under autocast where gradients are wanted. Maps of activations
      survive that, gradients at the input do so only roughly: their cosine stands in the note.

    No way is always faster, so each is measured against the model itself on up to 4 rows: 2 or 3 passes of both. One
    that loses is dropped, and the note says so; what is asked for as "bf16" runs as "fast" where that is faster. What
    was found is remembered for the process, per model, shape, dtype, device and number of threads. Weights are copied
    anew at each call.

    Args:
        model: The model, borrowed by the caller. It is run, and otherwise left alone.
        x: The first of the batches (N, C, H, W).
        precision: See above.
        backward: Whether gradients at the input will be asked for.
        trial: What is differentiated in the trial, from the model's output; the sum of the output if None.
        keep: Names of layers whose outputs will be read. Nothing is folded into or out of them, so they are the same
            tensors as in the model itself.

    Raises:
        MethodError: No such precision.
    """
    if precision not in get_args(Precision):
        raise MethodError(f"precision={precision!r}; expected one of {', '.join(map(repr, get_args(Precision)))}")
    if precision == "exact":
        return Runner(model, "exact", "exact")
    reason = _unsuited(model, x, precision)
    if reason is not None:
        return Runner(model, f"exact: {reason}", "exact")
    sample = x[:ROWS].detach()
    autocast = torch.is_autocast_enabled(x.device.type)
    key = (
        *(precision, backward, tuple(sample.shape), x.dtype, x.device, torch.get_num_threads(), autocast),
        *(frozenset(keep), hooked(model)),
    )
    with _isolated(x.device):
        known = _memory.get(model, key)
        attempt = Trial(sample, backward, trial)
        if known is not None:
            return _rebuild(model, attempt, known)
        found, chosen = _measured(model, attempt, variants_for(precision, backward), keep)
        _memory.put(model, key, found)
        return chosen


@dataclass(frozen=True, slots=True)
class _Known:
    """What was found out about a model: the way that won, if any, and what it folded. It does not hold the model."""

    way: Variant | None
    pairs: tuple[Pair, ...]
    note: str


class _Memory:
    """What was found out in this process, for as long as the models live."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.models: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, _Known]] = weakref.WeakKeyDictionary()

    def get(self, model: nn.Module, key: Hashable) -> _Known | None:
        with self.lock:
            return self.models.get(model, {}).get(key)

    def put(self, model: nn.Module, key: Hashable, known: _Known) -> None:
        with self.lock:
            self.models.setdefault(model, {})[key] = known


_memory = _Memory()


@dataclass(frozen=True, slots=True)
class _Winner:
    """A way that works, is exact enough, and is faster than the model itself."""

    made: nn.Module
    way: Variant
    pairs: tuple[Pair, ...]
    ratio: float
    said: str


def _measured(model: nn.Module, trial: Trial, ways: list[Variant], keep: Collection[str]) -> tuple[_Known, Runner]:
    """The fastest of some ways, or the model itself where none wins against it."""
    try:
        expected = trial(model)
    except Exception as error:  # noqa: BLE001 - the pass that is asked for meets it too, and raises it where it belongs
        note = f"exact: the trial of {ways[0].precision} failed ({type(error).__name__})"
        return _Known(None, (), note), Runner(model, note, "exact")
    best: _Winner | None = None
    dropped: list[str] = []
    for way in ways:
        tried = _tried(model, trial, way, keep, expected)
        if isinstance(tried, str):
            dropped.append(f"{way.precision} {tried}")
        elif best is None or tried.ratio < best.ratio:
            best = tried
        if best is not None and best.ratio < _PLAIN_WIN:
            break
    if best is None:
        note = f"exact: {'; '.join(dropped)}"
        return _Known(None, (), note), Runner(model, note, "exact")
    note = "; ".join([f"{best.way.precision}: {best.said}", *dropped])
    return _Known(best.way, best.pairs, note), Runner(best.made, note, best.way.precision)


def _tried(
    model: nn.Module, trial: Trial, way: Variant, keep: Collection[str], expected: tuple[Any, Tensor | None]
) -> _Winner | str:
    """One way, measured; or why it is dropped."""
    try:
        made, pairs = build_variant(model, way, trial, keep=keep)
        output, gradient = trial(made)
        error, cosine = agreement(output, expected[0])
        alike = agreement(gradient, expected[1])[1] if trial.backward else cosine
        if not way.serves(error, cosine, alike):
            return f"was not exact enough here (cosine {min(cosine, alike):.4f})"
        ratio = trial.ratio(made, model)
    except Exception as failure:  # noqa: BLE001 - not every model can be copied or run so: it is run as it is
        return f"failed here ({type(failure).__name__})"
    if ratio > _GAIN:
        return f"was no faster here ({ratio:.2f} of the plain time)"
    parts_said = [way.says(len(pairs), sum(isinstance(each, NORMS) for each in model.modules()))]
    if trial.backward and not all(each.requires_grad for each in model.parameters()):
        parts_said.append("weights unfrozen")
    said = f"{', '.join(parts_said)}; {ratio:.2f} of the plain time"
    if way.precision == "bf16":
        said += f", cosine {cosine:.4f}" + f" and {alike:.4f} of the gradient" * trial.backward
    return _Winner(made, way, pairs, ratio, said)


def _rebuild(model: nn.Module, trial: Trial, known: _Known) -> Runner:
    """What won before, on a copy of the weights as they are now."""
    if known.way is None:
        return Runner(model, known.note, "exact")
    precision, row = known.way.precision, trial.x[:1]
    try:
        made, _ = build_variant(model, known.way, trial, pairs=known.pairs)
        with torch.no_grad():
            error, cosine = agreement(run_model(made, row), run_model(model, row))
    except Exception as failure:  # noqa: BLE001 - memory may be short this time: the model is run as it is
        return Runner(model, f"exact: {precision} failed here ({type(failure).__name__})", "exact")
    if not known.way.serves(error, cosine, cosine):
        return Runner(model, f"exact: {precision} was not exact enough here (cosine {cosine:.4f})", "exact")
    return Runner(made, known.note, precision)


def _unsuited(model: nn.Module, x: Tensor, precision: Precision) -> str | None:
    """Why a model is not run otherwise than as it is, as far as that is known beforehand."""
    like = reference_tensor(model)
    dtype = x.dtype if like is None else like.dtype
    if isinstance(model, torch.jit.ScriptModule):
        return "a scripted model is run as it is"
    if not x.is_floating_point() or not len(x):
        return "the trial needs a batch of floating-point numbers"
    if dtype not in ((torch.float32, torch.float64) if precision == "fast" else (torch.float32,)):
        return f"{precision} is not for models in {str(dtype).removeprefix('torch.')}"
    return None


@contextmanager
def _isolated(device: torch.device) -> Iterator[None]:
    """Trials leave the random state as it was, and what the user watches the model with does not see them."""
    with ExitStack() as stack:
        devices = [device] if device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(HookManager(alone=True))
        yield
