"""Tracing of a method into a program: checks of values are left out, and reads of values are refused.

A program has no host: it cannot raise an error or warn, and it cannot decide by a value of the image which operations
run. Checks ask `is_tracing`. Any other read of a value that depends on the image raises an error here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ..errors import NotApplicableError
from .autograd_graph import DispatchMode, OpOverload
from .forward_args import bound_value
from .pytree import tree_tensors

_tracing: ContextVar[bool] = ContextVar("tracing", default=False)


def is_tracing() -> bool:
    """Return whether a method is being traced into a program, so that a check of values has nothing to check."""
    return _tracing.get()


@contextmanager
def tracing(name: str, image: Tensor) -> Iterator[None]:
    """Trace a method in a block, inside `make_fx`.

    Args:
        name: The method's name, for errors.
        image: The traced input.
    """
    with bound_value(_tracing, True), _Refusal(name, image):
        yield


class _Refusal(DispatchMode):
    """Mode that refuses to read a value that depends on the image, and to draw random numbers."""

    def __init__(self, name: str, image: Tensor) -> None:
        super().__init__()
        self._name, self._dependent = name, torch.utils.weak.WeakIdKeyDictionary()
        self._dependent[image] = True

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_dependent = any(tensor in self._dependent for tensor in tree_tensors((args, kwargs)))
        if is_dependent and torch.Tag.data_dependent_output in func.tags:
            raise NotApplicableError(
                f"export: {self._name} decides by a value of the image which operations run ({func}), which no fixed "
                "program can do"
            )
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotApplicableError(f"export: {self._name} draws random numbers ({func}), which a program cannot repeat")
        result = func(*args, **(kwargs or {}))
        if is_dependent:
            self._dependent.update(dict.fromkeys(tree_tensors(result), True))
        return result
