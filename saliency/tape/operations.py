"""What is to be known of an operation before it is written on a tape: what it writes to, draws and depends on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

Op = OpOverload[..., Any]

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


def is_plain(tensor: Tensor) -> bool:
    """Whether it is a dense tensor of no special kind."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided


def tensors_among(part: Any) -> Iterator[Tensor]:
    """The tensors among arguments or results."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, tuple | list):
        for each in part:
            yield from tensors_among(each)
    elif isinstance(part, dict):
        yield from tensors_among(list(part.values()))


@dataclass(frozen=True)
class _Nature:
    writes: tuple[int | str, ...]
    places: dict[str, int]
    random: bool
    a_number: bool
    varying: bool


@cache
def _nature(op: Op) -> _Nature:
    arguments = list(enumerate(op._schema.arguments))
    writes = tuple(
        each.name if each.kwarg_only else at
        for at, each in arguments
        if each.alias_info is not None and each.alias_info.is_write
    )
    return _Nature(
        writes,
        {each.name: at for at, each in arguments},
        torch.Tag.nondeterministic_seeded in op.tags,
        torch.Tag.data_dependent_output in op.tags,
        torch.Tag.dynamic_output_shape in op.tags,
    )


def written_by(op: Op, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation writes to."""
    places = _nature(op).writes
    by_place = [args[at] for at in places if isinstance(at, int) and at < len(args)]
    by_name = [kwargs[name] for name in places if isinstance(name, str) and name in kwargs]
    return list(tensors_among(by_place + by_name))


def argument(op: Op, args: Any, name: str, default: Any = None) -> Any:
    """An argument that is given by place, by its name; the default where it is left out or there is none."""
    at = _nature(op).places.get(name)
    return args[at] if at is not None and at < len(args) else default


def is_random(op: Op, args: Any) -> bool:
    """Whether an operation draws random numbers. Attention counts as such for its dropout, which may be 0."""
    return _nature(op).random and not ("dropout_p" in _nature(op).places and not argument(op, args, "dropout_p"))


def keeps_statistics(op: Op, args: Any) -> bool:
    """Whether an operation is a normalisation that updates running statistics, which no schema tells."""
    training = any(argument(op, args, name) is True for name in ("training", "train", "use_input_stats"))
    return training and isinstance(argument(op, args, "running_mean"), Tensor)


def reads_values(op: Op, depending: list[Tensor]) -> bool:
    """Whether an operation makes Python numbers, or the shape of a tensor, of the values of these arguments of its."""
    nature = _nature(op)
    if nature.varying and op is torch.ops.aten.index.Tensor:  # places have one shape, masks as many as they have values
        return any(each.dtype in (torch.bool, torch.uint8) for each in depending)
    return bool(depending) and (nature.a_number or nature.varying)


class Escapes(TorchFunctionMode):
    """Whether a forward takes values out of tensors in ways that the dispatcher is not shown.

    Attributes:
        found: How it does so first; empty where it does not.
    """

    _ways = (Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr)

    def __init__(self) -> None:
        super().__init__()
        self.found = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what was asked for, and take note of what takes values out."""
        if func in self._ways and not isinstance(args[0], nn.Parameter):
            self.found = self.found or f"the model takes values out of tensors by {func.__name__}()"
        return func(*args, **(kwargs or {}))
