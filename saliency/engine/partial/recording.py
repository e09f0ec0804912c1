"""The operations of one forward that depend on one tensor in it, written down as they come.

The dispatcher of PyTorch shows them to the thread that asks; nothing is attached to the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from ...hooks.autograd_graph import DispatchMode, OpOverload, operator_schema, storage_id
from ...hooks.pytree import tree_map_tensors, tree_tensors

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
    arguments = list(enumerate(operator_schema(op).arguments))
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


class UntracedAccess(TorchFunctionMode):
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


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a tensor that depends on the source; the source's own is 0."""

    at: int


@dataclass(frozen=True, slots=True)
class ExternalTensor:
    """The place of a tensor that does not depend on the source: a weight, or what was computed of other things."""

    at: int


@dataclass(frozen=True, slots=True)
class Step:
    """One operation, with places and constants as its arguments.

    Attributes:
        op: The operation.
        args: Its arguments, lists where there are tuples.
        kwargs: Its arguments by name.
        results: The slot of each result, None where it is no tensor.
        single: The operation returns a tensor, not a tuple or list of them.
        shapes: The shape of each result.
        overwritten: The places of the tensors that the operation writes to.
    """

    op: Op
    args: list[Any]
    kwargs: dict[str, Any]
    results: tuple[int | None, ...]
    single: bool
    shapes: tuple[tuple[int, ...], ...]
    overwritten: tuple[Slot | ExternalTensor, ...]


@dataclass
class _Memory:
    """What is known of a block of memory. The weak reference keeps its address from being given out again."""

    ref: StorageWeakRef
    born: bool = False
    depends: bool = False
    writes: int = 0
    given: list[int] = field(default_factory=list)


class Tape(DispatchMode):
    """What one forward does with one tensor, the source, and what it makes of it.

    Attributes:
        steps: The operations that depend on the source, in order.
        given: The tensors that these use beside it, as they were when they were used.
        slots: How many tensors depend on the source, itself included.
        refusal: Why this forward cannot be done again from the tape; empty where it can.
        aliased: A tensor was read under another name than the one it was written to under, so that the steps are right
            only where they share memory as they did here.
        source_overwritten: An operation writes to the source.
        output: The forward's output, with an empty tensor for each of its tensors.
        outputs: The places of these, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.given: list[Tensor] = []
        self.slots = 0
        self.refusal = ""
        self.aliased = False
        self.source_overwritten = False
        self.output: Any = None
        self.outputs: list[Slot | ExternalTensor] = []
        self._source: _Memory | None = None
        self._known: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}
        self._held: dict[int, int] = {}
        self._memories: dict[int, _Memory] = {}

    def begin(self, source: Tensor) -> None:
        """Follow this tensor from here on."""
        self._source = self._memory(source)
        self._source.born = True
        self._keep(source)

    def end(self, output: Any) -> None:
        """Write down what the forward returned, and let go of what is known of its memory."""
        tensors = list(tree_tensors(output))
        if not self._source:
            self.refusal = self.refusal or "the forward came to its end before the tensor that is followed"
        self.refusal = self.refusal or self._objection_to_reading(tensors)
        if not self.refusal:
            self.outputs = [self._place(each) for each in tensors]
            self.output = tree_map_tensors(output, lambda each: torch.empty(0, dtype=torch.float32, device="cpu"))
        self._known.clear()
        self._held.clear()
        self._memories.clear()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do an operation, and write it down where it depends on the source."""
        kwargs = kwargs or {}
        tensors = list(tensors_among((args, kwargs)))
        self.refusal = self.refusal or self._objection(op, args, kwargs, tensors)
        if self.refusal:
            return op(*args, **kwargs)
        depends = any(self._slot(each) is not None for each in tensors)
        places = (self._places(args), self._places(kwargs)) if depends else None
        written = written_by(op, args, kwargs)
        overwritten = tuple(self._place(each) for each in written) if depends else ()
        for each in written:
            self._before_write(each)
        result = op(*args, **kwargs)
        if places is not None:
            self._write_down(op, *places, overwritten, result)
        else:
            self._note_new_memory(result, tensors)
        return result

    def _objection(self, op: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> str:
        """Why an operation cannot be done again from the tape; empty where it can."""
        if not isinstance(op, OpOverload):
            return f"{op} is no plain operation"
        if is_random(op, args):
            return f"{op} draws random numbers"
        if keeps_statistics(op, args):
            return f"{op} updates running statistics"
        objection = self._objection_to_reading(tensors)
        if objection:
            return objection
        if any(self._slot(each) is None and not self._memory(each).born for each in written_by(op, args, kwargs)):
            return f"{op} writes to what the model keeps"
        if reads_values(op, [each for each in tensors if self._slot(each) is not None]):
            return f"{op} makes numbers or shapes of values"
        return ""

    def _objection_to_reading(self, tensors: list[Tensor]) -> str:
        if not all(map(is_plain, tensors)):
            return "the model uses sparse, quantised or otherwise special tensors"
        for each in tensors:
            known = self._slot(each)
            memory = self._memory(each)
            if known is None and memory.depends:
                return "a tensor is read under a name that it had before it was written to"
            self.aliased = self.aliased or (known is not None and self._known[id(each)][2] != memory.writes)
        return ""

    def _write_down(self, op: Op, args: Any, kwargs: Any, overwritten: Any, result: Any) -> None:
        single = not isinstance(result, tuple | list)
        results = [result] if single else list(result)
        if not all(each is None or (isinstance(each, Tensor) and is_plain(each)) for each in results):
            self.refusal = f"{op} gives something else than plain tensors"
            return
        slots = tuple(None if each is None else self._keep(each) for each in results)
        shapes = tuple(() if each is None else tuple(each.shape) for each in results)
        self.steps.append(Step(op, args, kwargs, slots, single, shapes, overwritten))

    def _keep(self, tensor: Tensor) -> int:
        """A new slot for a tensor. What an in-place operation has written to gets one more."""
        memory = self._memory(tensor)
        memory.depends = True
        self._known[id(tensor)] = (weakref.ref(tensor), self.slots, memory.writes)
        self.slots += 1
        return self.slots - 1

    def _slot(self, tensor: Tensor) -> int | None:
        known = self._known.get(id(tensor))
        return None if known is None or known[0]() is not tensor else known[1]

    def _places(self, part: Any) -> Any:
        """Arguments with places for their tensors; tuples become lists."""
        if isinstance(part, Tensor):
            return self._place(part)
        if isinstance(part, tuple | list):
            return [self._places(each) for each in part]
        if isinstance(part, dict):
            return {name: self._places(each) for name, each in part.items()}
        return part

    def _place(self, tensor: Tensor) -> Slot | ExternalTensor:
        slot = self._slot(tensor)
        if slot is not None:
            return Slot(slot)
        at = self._held.get(id(tensor))
        if at is None:
            at = self._held[id(tensor)] = len(self.given)
            self.given.append(tensor)
            self._memory(tensor).given.append(at)
        return ExternalTensor(at)

    def _before_write(self, tensor: Tensor) -> None:
        """Copy what the tape holds of the memory that is about to be written to."""
        memory = self._memory(tensor)
        memory.writes += 1
        self.source_overwritten = self.source_overwritten or memory is self._source
        for at in memory.given:
            self._held.pop(id(self.given[at]), None)
            self.given[at] = self.given[at].clone()
        memory.given.clear()

    def _note_new_memory(self, result: Any, tensors: list[Tensor]) -> None:
        """What an operation has made is the forward's own, unless it is another name for what went in."""
        found = [each for each in tensors_among(result) if is_plain(each)]
        before = {storage_id(each) for each in tensors} if found else set()
        for each in found:
            if storage_id(each) not in before:
                self._memory(each).born = True

    def _memory(self, tensor: Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        key = storage_id(tensor)
        memory = self._memories.get(key)
        if memory is None:
            memory = self._memories[key] = _Memory(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
        return memory
