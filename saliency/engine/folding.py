"""Batch norms folded into the convolutions before them, on a private copy of a model, wherever that is exact."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torch.overrides import TorchFunctionMode

from ..hooks.autograd_graph import (
    DispatchMode,
    child_modules,
    has_global_module_hooks,
    module_hooks,
    own_parameters,
)
from ..hooks.manager import HookManager
from ..hooks.model_state import run_model, unique_modules
from ..hooks.pytree import tree_leaves, tree_tensors

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_PLAIN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)

MOST_ERROR = 1e-3
"""The most that folding may change the outputs, relative to their norm. Rounding alone is a thousandth of that."""

_MOST_CHECKS = 24

# Functions that take numbers out of tensors.
_NUMBERS_OF = {
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__array__",
    "item",
    "tolist",
    "numpy",
    "equal",
    "nonzero",
}


@dataclass(frozen=True, slots=True)
class Pair:
    """A convolution or linear layer, and the batch norm that reads its output and nothing else does: two names."""

    convolution: str
    norm: str


def private_copy(model: nn.Module) -> nn.Module:
    """A deep copy of a model in evaluation mode, on which the user's hooks are the very same objects.

    Raises:
        Exception: Whatever a part of the model that cannot be copied raises.
    """
    # What the memo knows is not copied: a hook may be a method of an object in which it collects.
    memo = {id(hook): hook for module in unique_modules(model) for hook in module_hooks(module)}
    made: nn.Module = copy.deepcopy(model, memo)
    for module in unique_modules(made):
        if getattr(module, "training", False):
            module.training = False
    return made


def hooked(model: nn.Module) -> tuple[str, ...]:
    """The names of the modules that carry hooks."""
    return tuple(name for name, module in model.named_modules() if module_hooks(module))


def fold_exactly(made: nn.Module, model: nn.Module, x: Tensor, keep: Collection[str] = ()) -> tuple[Pair, ...]:
    """Fold what can be folded exactly, and say which pairs that were.

    Pairs are found by a call, and the copy is compared with the original on `x`. Where they differ, the pairs at fault
    are looked for by halves and left alone. Modules with hooks are left alone too: what their hooks see stays the same.

    Args:
        made: A private copy of `model`, which is changed.
        model: The original.
        x: A batch (N, C, H, W); one row is enough.
        keep: Names of modules whose outputs will be read, and which therefore stay what they are.
    """
    with torch.no_grad():
        found = foldable(made, x, keep)
        expected = run_model(model, x) if found else None
        checks = 0

        def settle(pairs: Sequence[Pair]) -> tuple[Pair, ...]:
            nonlocal checks
            if not pairs or checks == _MOST_CHECKS:
                return ()
            checks += 1
            undo = fold(made, pairs)
            if _same(made, x, expected):
                return tuple(pairs)
            for each in reversed(undo):
                each()
            half = len(pairs) // 2
            return (*settle(pairs[:half]), *settle(pairs[half:])) if half else ()

        return settle(found)


def foldable(made: nn.Module, x: Tensor, keep: Collection[str] = ()) -> tuple[Pair, ...]:
    """The pairs of one forward: each called once, and the output of the convolution read by the batch norm alone.

    There are none where the forward takes numbers out of tensors: it may call other layers for other images.
    """
    if has_global_module_hooks():
        return ()
    kept = {id(made.get_submodule(name)) for name in keep}
    free = {name: each for name, each in made.named_modules() if id(each) not in kept and not module_hooks(each)}
    convolutions = {name: each for name, each in free.items() if _is_convolution(each)}
    norms = {name: each for name, each in free.items() if _is_norm(each)}
    if not convolutions or not norms:
        return ()
    reads, numbers = _Reads(each.weight for each in convolutions.values()), _Numbers()
    gave: dict[str, list[Tensor]] = {name: [] for name in convolutions}
    took: dict[str, list[Any]] = {name: [] for name in norms}
    with HookManager(alone=True) as hooks, torch.no_grad(), reads, numbers:
        for name, each in convolutions.items():
            hooks.observe(each, partial(_see, gave[name], reads))
        for name, each in norms.items():
            hooks.around(each, partial(_note, took[name]), _end)
        run_model(made, x)
    if numbers.are_taken:
        return ()
    by_input = {id(given[0]): name for name, given in took.items() if len(given) == 1}
    return tuple(
        Pair(name, by_input[id(given[0])])
        for name, given in gave.items()
        if len(given) == 1
        and id(given[0]) in by_input
        and reads.exactly_one(given[0])
        and reads.exactly_one(convolutions[name].weight)
        and (type(convolutions[name]) in _PLAIN or reads.convolved.get(id(convolutions[name].weight)) is given[0])
        and _fits(convolutions[name], norms[by_input[id(given[0])]], given[0])
    )


def fold(made: nn.Module, pairs: Iterable[Pair]) -> list[Callable[[], None]]:
    """Fold some pairs of a private copy, and say how each step is undone."""
    undo: list[Callable[[], None]] = []
    for pair in pairs:
        convolution: Any = made.get_submodule(pair.convolution)
        norm: Any = made.get_submodule(pair.norm)
        weight, bias = fuse_conv_bn_weights(
            convolution.weight,
            convolution.bias,
            norm.running_mean,
            norm.running_var,
            norm.eps,
            norm.weight,
            norm.bias,
            isinstance(convolution, _TRANSPOSED),
        )
        undo.append(partial(_put, convolution, convolution.weight, convolution.bias))
        _put(convolution, weight, bias)
        rest = _what_is_left(norm)
        for parent in unique_modules(made):
            for name in [name for name, child in child_modules(parent).items() if child is norm]:
                undo.append(partial(setattr, parent, name, norm))
                setattr(parent, name, rest)
    return undo


def agreement(output: Any, expected: Any) -> tuple[float, float]:
    """The relative error and the cosine of the worst tensor of an output; (inf, -1) where they cannot be compared."""
    ours = [each.detach() for each in tree_tensors(output) if each.is_floating_point()]
    theirs = [each.detach() for each in tree_tensors(expected) if each.is_floating_point()]
    if not theirs or [each.shape for each in ours] != [each.shape for each in theirs]:
        return float("inf"), -1.0
    error, cosine = 0.0, 1.0
    for our, their in zip(ours, theirs, strict=True):
        a, b = (each.flatten().to(torch.promote_types(each.dtype, torch.float32)) for each in (our, their))
        difference, norm = float((a - b).norm()), float(b.norm())
        if not (difference < float("inf") and norm < float("inf")):  # also not a number
            return float("inf"), -1.0
        if difference:
            error = max(error, difference / norm if norm else float("inf"))
            cosine = min(cosine, float(F.cosine_similarity(a, b, dim=0)))
    return error, cosine


class _Reads(DispatchMode):
    """How often the operations of a forward read some tensors, and what convolutions made of which weights."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self.watched = {id(each): each for each in weights}  # held, so that no id is given out twice
        self.counts: Counter[int] = Counter()
        self.convolved: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs or {}), Tensor):
            if id(each) in self.watched:
                self.counts[id(each)] += 1
        if func is torch.ops.aten.convolution.default:
            self.convolved[id(args[1])] = output
        return output

    def watch(self, tensor: Tensor) -> None:
        """Count what reads a tensor from now on."""
        self.watched[id(tensor)] = tensor

    def exactly_one(self, tensor: Tensor) -> bool:
        """Whether one operation has read the tensor, and no other."""
        return self.counts[id(tensor)] == 1


class _Numbers(TorchFunctionMode):
    """Whether numbers are taken out of tensors, by which a forward may choose what it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.are_taken = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.are_taken |= getattr(func, "__name__", "") in _NUMBERS_OF
        return func(*args, **(kwargs or {}))


def _see(gave: list[Tensor], reads: _Reads, output: Any) -> None:
    gave.append(output)
    if isinstance(output, Tensor):
        reads.watch(output)


def _note(took: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    took.append(args[0] if args else next(iter(kwargs.values()), None))


def _end(token: None, output: Any) -> None:
    """Nothing is to be done after the call."""


def _is_convolution(module: nn.Module) -> bool:
    if not isinstance(module, _PLAIN) or type(own_parameters(module).get("weight")) is not nn.Parameter:
        return False
    return "bias" in own_parameters(module) and not (isinstance(module, _TRANSPOSED) and module.groups > 1)


def _is_norm(module: nn.Module) -> bool:
    """Whether it is a batch norm with statistics of its own, and nothing else but perhaps an activation."""
    if not isinstance(module, NORMS) or module.running_mean is None or module.running_var is None or module.training:
        return False
    return type(module) in NORMS or set(child_modules(module)) == {"drop", "act"}


def _fits(convolution: nn.Module, norm: nn.Module, output: Tensor) -> bool:
    """Whether the channels of the output are what the batch norm counts as channels, in numbers of one type."""
    weight, mean = convolution.weight, norm.running_mean
    return (
        isinstance(weight, Tensor)
        and isinstance(mean, Tensor)
        and output.dim() == weight.dim()
        and output.dtype == weight.dtype == mean.dtype
    )


def _what_is_left(norm: nn.Module) -> nn.Module:
    """What a batch norm does apart from normalising: nothing, or an activation."""
    rest = nn.Sequential() if child_modules(norm) else nn.Identity()
    for name in ("drop", "act"):
        if name in child_modules(norm):
            rest.add_module(name, child_modules(norm)[name])
    rest.training = False
    return rest


def _put(convolution: Any, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
    convolution.weight, convolution.bias = weight, bias


def _same(made: nn.Module, x: Tensor, expected: Any) -> bool:
    """Whether a folded copy gives what the original does; not where a part of it misses its batch norm."""
    try:
        return agreement(run_model(made, x), expected)[0] <= MOST_ERROR
    except Exception:  # noqa: BLE001 - whatever it is, these pairs stay as they were
        return False
