"""Where the gradients of one call are put as they come by, one backward pass after the other."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from ..hooks.autograd_graph import outside, tensor_version, this_backward

Place = tuple[Sequence[int], Sequence[int], int]
"""Size, stride and offset of a view of another tensor."""


class Backward(NamedTuple):
    """What one backward pass brought to one call; None for a tensor that got no gradient."""

    grad_inputs: tuple[Any, ...]  # one entry for each tensor among the arguments
    grad_outputs: tuple[Any, ...]  # one entry for each tensor in the output


class _Pass:
    """One backward pass while it comes by."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.inputs: list[Any] = [None] * inputs
        self.outputs: list[Any] = [None] * outputs
        self.sums: dict[int, tuple[int, Tensor]] = {}  # by input: how many summands have come, and their sum


class Inbox(Sequence[Backward]):
    """What the backward passes through one call brought, in their order.

    In a backward pass of many gradients at once (`is_grads_batched=True`) they have the axis of the batch first.

    Args:
        inputs: For each tensor among the arguments, how many operations pass gradient on to it.
        outputs: How many tensors there are in the output.
        keep: What is kept of a gradient.
    """

    def __init__(self, inputs: Sequence[int], outputs: int, keep: Callable[[Tensor], Any]) -> None:
        self._summands = tuple(inputs)
        self._outputs = outputs
        self._keep = keep
        self._passes: dict[int, _Pass] = {}

    def put_output(self, at: int, gradient: Tensor) -> None:
        """The gradient of a tensor in the output."""
        self._this().outputs[at] = outside(self._keep, gradient)

    def put_input(self, at: int, part: Tensor) -> None:
        """One summand of the gradient of a tensor among the arguments."""
        outside(partial(self._add, at), part)

    def _add(self, at: int, part: Tensor) -> None:
        this = self._this()
        come, known = this.sums.pop(at, (0, None))
        whole = part if known is None else known + part
        if come + 1 < self._summands[at]:
            this.sums[at] = come + 1, whole
        else:
            this.inputs[at] = self._keep(whole)

    def has_output(self, at: int) -> bool:
        """Whether the gradient of a tensor in the output has come in the backward pass that runs."""
        this = self._passes.get(this_backward())
        return this is not None and this.outputs[at] is not None

    def _this(self) -> _Pass:
        number = this_backward()
        if number not in self._passes:
            self._passes[number] = _Pass(len(self._summands), self._outputs)
        return self._passes[number]

    def __len__(self) -> int:
        return len(self._passes)

    @overload
    def __getitem__(self, at: int) -> Backward: ...
    @overload
    def __getitem__(self, at: slice) -> list[Backward]: ...
    def __getitem__(self, at: int | slice) -> Backward | list[Backward]:
        """A backward pass by its place."""
        passes = list(self._passes.values())[at]
        return [self._read(each) for each in passes] if isinstance(passes, list) else self._read(passes)

    def _read(self, each: _Pass) -> Backward:
        # A pass that went to some inner tensor only left some summands out.
        for at, (_, whole) in each.sums.items():
            each.inputs[at] = self._keep(whole)
        each.sums.clear()
        return Backward(tuple(each.inputs), tuple(each.outputs))

    def __reduce__(self) -> Any:
        """A copy is of the passes so far: no more come to it."""
        return list, (self[:],)


class View:
    """An output that is a view of another tensor, as it was when the call ended.

    An operation that works in place on a view passes its gradient on to what is viewed, past the view itself.
    """

    def __init__(self, tensor: Tensor, base: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._version = tensor_version(tensor)
        self._base_offset = int(base.storage_offset())
        self._own = self.place_of(tensor)
        self._base = base.size(), base.stride()
        self._memory = _span(base)
        self._is_dense = base.numel() == self._memory

    def place_of(self, tensor: Tensor) -> Place:
        """Where another view of the same tensor lies in it."""
        return tensor.size(), tensor.stride(), int(tensor.storage_offset()) - self._base_offset

    def is_overwritten(self) -> bool:
        """Whether somebody has worked in place on it since, as far as can be told."""
        tensor = self._tensor()
        return tensor is None or tensor_version(tensor) != self._version

    def gradient(self, whole: Tensor) -> Tensor | None:
        """Its part of the gradient of what is viewed; None where that does not lie in memory without gaps."""
        return outside(partial(_each, self._cut, len(self._base[0])), whole) if self._is_dense else None

    def _cut(self, whole: Tensor) -> Tensor:
        laid_out = torch.empty_strided(*self._base, dtype=whole.dtype, device=whole.device).copy_(whole)
        return laid_out.as_strided(*self._own)

    def passed_on(self, gradient: Tensor, to: Place) -> Tensor:
        """What its gradient is at the tensor, itself in place, that it was made from: zeros where it does not reach."""

        def spread(part: Tensor) -> Tensor:
            places = torch.arange(self._memory, device=part.device).as_strided(*self._own)
            return part.new_zeros(self._memory).index_add_(0, places.flatten(), part.flatten()).as_strided(*to)

        return outside(partial(_each, spread, len(self._own[0])), gradient)


def _each(change: Callable[[Tensor], Tensor], axes: int, tensor: Tensor) -> Tensor:
    """What a function makes of a tensor of so many axes, or of each of those in a batch of them."""
    return change(tensor) if tensor.dim() == axes else torch.stack([_each(change, axes, each) for each in tensor])


def _span(tensor: Tensor) -> int:
    """How many places of memory a tensor stretches over."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
