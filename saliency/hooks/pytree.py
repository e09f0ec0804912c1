"""What modules take and return: tensors in tuples, lists, dicts and dataclasses, nested as one likes."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

_Leaf = TypeVar("_Leaf")


def tree_tensors(nest: Any) -> Iterator[Tensor]:
    """The tensors of a nest, in order."""
    return tree_leaves(nest, Tensor)


def first_tensor(nest: Any) -> Tensor | None:
    """The first tensor of a nest; None where there is none."""
    return next(tree_tensors(nest), None)


def tree_leaves(nest: Any, kind: type[_Leaf]) -> Iterator[_Leaf]:
    """The things of one kind in a nest, in order."""
    if isinstance(nest, kind):
        yield nest
    else:
        for child in tree_children(nest) or ():
            yield from tree_leaves(child, kind)


def tree_children(nest: Any) -> list[Any] | None:
    """The direct children of a container, in order; None for anything else."""
    if isinstance(nest, Mapping):
        return list(nest.values())
    if isinstance(nest, tuple | list):
        return list(nest)
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        return [getattr(nest, field.name) for field in dataclasses.fields(nest)]
    return None


def tree_with_children(nest: Any, new: list[Any]) -> Any:
    """A container of the same type with other children; the same object where none of them changed.

    Containers keep their types: named tuples, ordered dicts, dataclasses and subclasses of these.
    """
    old = tree_children(nest) or []
    if len(old) == len(new) and all(map(operator.is_, old, new)):
        return nest
    if isinstance(nest, tuple | list):
        return nest._make(new) if hasattr(nest, "_make") else type(nest)(new)
    if isinstance(nest, Mapping):
        return _refilled(nest, dict(zip(nest, new, strict=True)))
    made = copy.copy(nest)
    for field, child in zip(dataclasses.fields(nest), new, strict=True):
        object.__setattr__(made, field.name, child)
    return made


def tree_map_tensors(nest: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a tree with each tensor changed, in the order of `tree_tensors`; unchanged parts stay the same object.

    Containers keep their types, as in `tree_with_children`.
    """
    if isinstance(nest, Tensor):
        return change(nest)
    if type(nest) is tuple and len(nest) == 1 and isinstance(nest[0], Tensor):  # as nearly all arguments are
        return (change(nest[0]),)
    old = tree_children(nest)
    return nest if old is None else tree_with_children(nest, [tree_map_tensors(child, change) for child in old])


def _refilled(mapping: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    """A copy of a mapping of any type, with other values."""
    if not hasattr(mapping, "__setitem__"):
        return entries
    made: Any = copy.copy(mapping)
    for key, each in entries.items():
        made[key] = each
    return made


def trees_agree(one: Any, two: Any, *, coarsest: float = 0.0) -> bool:
    """Whether two nests hold the same tensors up to rounding, which is taken relative to the largest value of each.

    Args:
        one: The first nest.
        two: The second nest.
        coarsest: The rounding of what they were computed in, where that is coarser than the tensors are.
    """
    first, second = list(tree_tensors(one)), list(tree_tensors(two))
    return len(first) == len(second) and all(_agree(*pair, coarsest) for pair in zip(first, second, strict=True))


def _agree(one: Tensor, two: Tensor, coarsest: float) -> bool:
    if one.shape != two.shape or one.dtype != two.dtype or one.device != two.device:
        return False
    if not one.is_floating_point() or not one.numel():
        return torch.equal(one, two)
    finite = torch.isfinite(two)
    if not torch.equal(finite, torch.isfinite(one)):
        return False
    if not finite.all():
        odd = ~finite
        if not torch.equal(one[odd].nan_to_num(nan=0.5), two[odd].nan_to_num(nan=0.5)):
            return False
    first, second = (torch.where(finite, each, 0).to(torch.float64) for each in (one, two))
    allowed = max(rounding(two.dtype, two.device), coarsest)
    return bool((first - second).abs().max() <= allowed * second.abs().max())


def rounding(dtype: torch.dtype, device: torch.device) -> float:
    """How far two ways to compute the same may lie apart, relative to the largest value."""
    eps = torch.finfo(dtype).eps
    if device.type == "cuda" and dtype is torch.float32:  # convolutions and products may round to ten bits
        eps = 2.0**-11
    return float(4 * eps ** (2 / 3))
