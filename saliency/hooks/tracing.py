"""Tracing of a method into a program: checks of values are left out, and reads of values are refused.

A program has no host: it cannot raise an error or warn, and it cannot decide by a value of the image which operations
run. Checks ask `is_tracing`. Any other read of a value that depends on the image raises an error here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import NotApplicableError
from .autograd_graph import MemoryMode, OpOverload
from .call import bound
from .operations import is_attention, operator_name, written
from .pytree import tree_tensors


@contextmanager
def tracing(image: Tensor) -> Iterator[None]:
    """Trace a method in a block, inside `make_fx`. `image` is the traced input."""
    dependent = _Dependent(image)
    with bound(is_tracing=True), dependent, _HostReads(dependent):
        yield


class _Dependent(MemoryMode[bool]):
    """Mode that tracks the memory that depends on the image, and refuses to read a value of it or a random number."""

    def __init__(self, image: Tensor) -> None:
        super().__init__(lambda tensor: True)
        self.memory(image)

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_dependent = self.depends((args, kwargs))
        if is_dependent and torch.Tag.data_dependent_output in func.tags:
            refuse_read(func)
        if is_attention(func):  # its tags say that it draws random numbers, whatever its dropout
            raise NotApplicableError(f"the model chooses a fused attention ({func}); remove its sdpa_kernel")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotApplicableError(f"it draws random numbers ({func}), and a program would repeat one draw")
        result = func(*args, **(kwargs or {}))
        if is_dependent and operator_name(func) not in _CONSTANT:
            for tensor in (*written(func, args, kwargs or {}), *tree_tensors(result)):
                self.memory(tensor)
        return result

    def depends(self, arguments: Any) -> bool:
        """Return whether a tensor among some arguments depends on the image."""
        return any(map(self.known_memory, tree_tensors(arguments)))


class _HostReads(TorchFunctionMode):
    """Mode that refuses the reads of values that are not operators."""

    def __init__(self, dependent: _Dependent) -> None:
        super().__init__()
        self._dependent = dependent

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and self._dependent.depends(args):
            refuse_read(func)
        return func(*args, **(kwargs or {}))


# Operations whose result has the shape of an operand, but not its values.
_CONSTANT = {"new_empty", "new_full", "new_ones", "new_zeros", "empty_like", "full_like", "ones_like", "zeros_like"}
_READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__, torch.tensor, torch.as_tensor)


def refuse_read(function: Any) -> NoReturn:
    """Raise NotApplicableError for a function that reads a value of a tensor that depends on the image."""
    name = getattr(function, "__name__", function)
    raise NotApplicableError(
        f"it decides by a value that depends on the image ({name}) which operations run; in a program they are fixed"
    )
