"""What modules take and return: tensors in tuples, lists, dicts and dataclasses, nested as one likes."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor

_Leaf = TypeVar("_Leaf")


def tensors_in(nest: Any) -> Iterator[Tensor]:
    """The tensors of a nest, in order."""
    return leaves(nest, Tensor)


def first_tensor(nest: Any) -> Tensor | None:
    """The first tensor of a nest; None where there is none."""
    return next(tensors_in(nest), None)


def leaves(nest: Any, kind: type[_Leaf]) -> Iterator[_Leaf]:
    """The things of one kind in a nest, in order."""
    if isinstance(nest, kind):
        yield nest
    elif isinstance(nest, Mapping):
        for each in nest.values():
            yield from leaves(each, kind)
    elif isinstance(nest, tuple | list):
        for each in nest:
            yield from leaves(each, kind)
    elif _is_record(nest):
        for field in dataclasses.fields(nest):
            yield from leaves(getattr(nest, field.name), kind)


def mapped(nest: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same nest with each tensor changed, in the order of `tensors_in`; what is not changed stays the same object.

    Containers keep their types: named tuples, ordered dicts, dataclasses and subclasses of these.
    """
    if isinstance(nest, Tensor):
        return change(nest)
    if type(nest) is tuple and len(nest) == 1 and isinstance(nest[0], Tensor):  # as nearly all arguments are
        return (change(nest[0]),)
    if isinstance(nest, tuple | list):
        items = [mapped(each, change) for each in nest]
        if all(map(operator.is_, items, nest)):
            return nest
        return nest._make(items) if hasattr(nest, "_make") else type(nest)(items)
    if isinstance(nest, Mapping):
        entries = {key: mapped(each, change) for key, each in nest.items()}
        return nest if all(map(operator.is_, entries.values(), nest.values())) else _refilled(nest, entries)
    if not _is_record(nest):
        return nest
    fields = {field.name: mapped(getattr(nest, field.name), change) for field in dataclasses.fields(nest)}
    if all(each is getattr(nest, name) for name, each in fields.items()):
        return nest
    made = copy.copy(nest)
    for name, each in fields.items():
        object.__setattr__(made, name, each)
    return made


def _refilled(mapping: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    """A copy of a mapping of any type, with other values."""
    if not hasattr(mapping, "__setitem__"):
        return entries
    made: Any = copy.copy(mapping)
    for key, each in entries.items():
        made[key] = each
    return made


def _is_record(nest: Any) -> bool:
    return dataclasses.is_dataclass(nest) and not isinstance(nest, type)
