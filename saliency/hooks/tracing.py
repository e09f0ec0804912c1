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
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

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
    dependent = _Dependent(name, image)
    with bound_value(_tracing, True), dependent, _HostReads(dependent):
        yield


class _Dependent(DispatchMode):
    """Mode that tracks the tensors that depend on the image, and refuses to read a value of one or a random number."""

    def __init__(self, name: str, image: Tensor) -> None:
        super().__init__()
        self._name, self._tensors = name, WeakIdKeyDictionary({image: True})

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_dependent = self.require_constant(func, (args, kwargs), reads=torch.Tag.data_dependent_output in func.tags)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotApplicableError(f"export: {self._name} draws random numbers ({func}); a program would repeat them")
        result = func(*args, **(kwargs or {}))
        if is_dependent:
            self._tensors.update(dict.fromkeys(tree_tensors(result), True))
        return result

    def require_constant(self, func: Any, arguments: Any, *, reads: bool) -> bool:
        """Return whether an argument depends on the image. Raise NotApplicableError if the operation reads its value."""
        is_dependent = any(tensor in self._tensors for tensor in tree_tensors(arguments))
        if is_dependent and reads:
            raise NotApplicableError(
                f"export: {self._name} decides by a value that depends on the image which operations run ({func}); a "
                "program always runs the same ones"
            )
        return is_dependent


class _HostReads(TorchFunctionMode):
    """Mode for the reads of values that are not operators."""

    def __init__(self, dependent: _Dependent) -> None:
        super().__init__()
        self._dependent = dependent

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._dependent.require_constant(func, args, reads=func in (Tensor.tolist, Tensor.numpy))
        return func(*args, **(kwargs or {}))
