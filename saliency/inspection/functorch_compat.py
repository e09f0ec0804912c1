"""Tensors as transformations wrap them: those of `torch.func`, and backward passes of many gradients at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

_Made = TypeVar("_Made")
_MOST_BATCHES = 64  # that torch.vmap can nest
_NO_BATCH = 2**31 - 1  # the size of no batch of gradients


def outside(make: Callable[[Tensor], _Made], tensor: Tensor) -> _Made:
    """What a function makes of a tensor's numbers, run outside of all transformations, so that it outlives them.

    Under `torch.vmap` and `is_grads_batched=True` the numbers are those of the whole batch, (B, ...); inside of any
    transformation they are detached. Elsewhere the function gets the tensor itself.
    """
    if _functorch.peek_interpreter_stack() is None and not is_wrapped(tensor):
        return make(tensor)
    # The interpreters would wrap again whatever is made of plain numbers.
    with temporarily_clear_interpreter_stack():
        return make(_numbers(tensor))


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor stands for others inside of a transformation, and has no numbers of its own."""
    return _functorch.is_functorch_wrapped_tensor(tensor) or _functorch.is_legacy_batchedtensor(tensor)


def _numbers(tensor: Tensor) -> Tensor:
    """The numbers behind a tensor, the axes of its batches first, the outermost at the front."""
    axes: list[int] = []
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            axes.append(_functorch.maybe_get_bdim(tensor))
        tensor = _functorch.get_unwrapped(tensor)
    if _functorch.is_legacy_batchedtensor(tensor):
        tensor = _unbatched(tensor)
    tensor = tensor.detach()
    for before, axis in enumerate(reversed(axes)):
        tensor = tensor.movedim(before + axis, before)
    return tensor


def _unbatched(tensor: Tensor) -> Tensor:
    """The numbers of a tensor in a backward pass of many gradients at once, which numbers its batches from 1.

    Which batches there are is known to the thread that asked for the pass only, and gradients of an accelerator come by
    in another one: so each is asked for.
    """
    for level in range(_MOST_BATCHES, 0, -1):
        if _functorch.is_legacy_batchedtensor(tensor):
            # Where there is no such batch, there is one of this size afterwards.
            found = torch._remove_batch_dim(tensor, level, _NO_BATCH, 0)
            tensor = tensor if found.shape[0] == _NO_BATCH else found
    return tensor
