"""Trees of tensors, which modules take and return: nested tuples, lists, dicts and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

_Leaf = TypeVar("_Leaf")


def tree_tensors(tree: Any) -> Iterator[Tensor]:
    """Iterate over the tensors of a tree, in order."""
    return tree_leaves(tree, Tensor)


def first_tensor(tree: Any) -> Tensor | None:
    """Return the first tensor of a tree; None if there is none."""
    return next(tree_tensors(tree), None)


def tree_leaves(tree: Any, kind: type[_Leaf]) -> Iterator[_Leaf]:
    """Iterate over the leaves of one type in a tree, in order."""
    if isinstance(tree, kind):
        yield tree
    else:
        for child in tree_children(tree) or ():
            yield from tree_leaves(child, kind)


def tree_children(tree: Any) -> list[Any] | None:
    """Return the direct children of a container, in order; None for anything else."""
    if isinstance(tree, Mapping):
        return list(tree.values())
    if isinstance(tree, tuple | list):
        return list(tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    return None


def tree_with_children(tree: Any, new: list[Any]) -> Any:
    """Return a container of the same type with other children; the same object if none of them changed.

    Containers keep their types: named tuples, ordered dicts, dataclasses and subclasses of these.
    """
    old = tree_children(tree) or []
    if len(old) == len(new) and all(map(operator.is_, old, new)):
        return tree
    if isinstance(tree, tuple | list):
        return tree._make(new) if hasattr(tree, "_make") else type(tree)(new)
    changed = copy.copy(tree)
    if isinstance(tree, Mapping):
        for key, child in zip(tree, new, strict=True):
            changed[key] = child
        return changed
    for field, child in zip(dataclasses.fields(tree), new, strict=True):
        object.__setattr__(changed, field.name, child)
    return changed


def tree_map_tensors(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a tree with each tensor changed, in the order of `tree_tensors`; unchanged parts stay the same object.

    Containers keep their types, as in `tree_with_children`.
    """
    if type(tree) is tuple and len(tree) == 1 and isinstance(tree[0], Tensor):  # shortcut for the most common arguments
        return (change(tree[0]),)
    return tree_map(tree, Tensor, change)


def tree_map(tree: Any, kind: type[_Leaf] | tuple[type[_Leaf], ...], change: Callable[[_Leaf], Any]) -> Any:
    """Return a tree with each leaf of one type changed, as in `tree_map_tensors`."""
    if isinstance(tree, kind):
        return change(tree)
    old = tree_children(tree)
    return tree if old is None else tree_with_children(tree, [tree_map(child, kind, change) for child in old])


def trees_agree(first: Any, second: Any, *, coarsest: float = 0.0) -> bool:
    """Return whether two trees hold the same tensors up to rounding, relative to the largest value of each tensor.

    Args:
        first: The first tree.
        second: The second tree.
        coarsest: The rounding error of the dtype in which they were computed, if it exceeds the rounding error of the
            tensors.
    """
    tensors, others = list(tree_tensors(first)), list(tree_tensors(second))
    return len(tensors) == len(others) and all(_agree(*pair, coarsest) for pair in zip(tensors, others, strict=True))


def _agree(first: Tensor, second: Tensor, coarsest: float) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype or first.device != second.device:
        return False
    if not first.is_floating_point() or not first.numel():
        return torch.equal(first, second)
    allowed = max(rounding(second.dtype, second.device), coarsest)
    first, second = first.to(torch.float64), second.to(torch.float64)
    largest = float(second.nan_to_num(nan=0, posinf=0, neginf=0).abs().max())
    return torch.allclose(first, second, rtol=0, atol=allowed * largest, equal_nan=True)


def rounding(dtype: torch.dtype, device: torch.device) -> float:
    """Return how far two computations of the same value may differ, relative to the largest value."""
    eps = torch.finfo(dtype).eps
    if device.type == "cuda" and dtype is torch.float32:  # convolutions and products may round to ten bits
        eps = 2.0**-11
    return float(4 * eps ** (2 / 3))
