"""Record the operations of a forward that depend on one tensor, and replay them for any number of rows.

`PartialForward` uses this to run a part of a model again; `TailForward` runs the part after a layer.

Operations are recorded by a dispatch mode of the calling thread; nothing is attached to the model.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import LayerError
from ..hooks.autograd_graph import MemoryMode
from ..hooks.manager import HookManager
from ..hooks.operations import Op, as_results, written
from ..hooks.pytree import first_tensor, tree_leaves, tree_map_tensors, tree_tensors, trees_agree
from ..model.call import is_out_of_memory, run_model
from ..model.layers import find

_T = TypeVar("_T")


def _is_plain(part: Any) -> bool:
    return type(part) in (Tensor, nn.Parameter, nn.Buffer) and part.layout is torch.strided


class ReplayMismatch(Exception):  # noqa: N818
    """A forward cannot be replayed, or the output of a replay differs from the model's."""


@dataclass(frozen=True)
class TensorRef:
    """Placeholder for a tensor, by its index."""

    index: int


class ReplaySlot(TensorRef):
    """Placeholder for a tensor that depends on the source; the source itself is slot 0."""


class ExternalTensor(TensorRef):
    """Placeholder for a tensor that does not depend on the source, such as a weight."""


@dataclass(frozen=True, slots=True)
class RowCount:
    """Placeholder for a number that is proportional to the number of rows."""

    per_row: int


@dataclass(frozen=True, slots=True)
class ReplayStep:
    """One operation, with placeholders for tensors in its arguments.

    Attributes:
        op: The operation.
        args: The positional arguments, with tuples as lists.
        kwargs: The keyword arguments.
        results: The slot of each result; None for a result that is not a tensor.
        shape: The shape of the first result in the forward of the fewest rows.
        last: The slots that no later step reads; set in a `Program`.
    """

    op: Op
    args: list[Any]
    kwargs: dict[str, Any]
    results: tuple[int | None, ...]
    shape: tuple[int, ...]
    last: frozenset[int] = frozenset()

    @property
    def slots(self) -> set[int]:
        """The slots among the arguments."""
        return {slot.index for slot in tree_leaves((self.args, self.kwargs), ReplaySlot)}


def _map(part: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to each value in nested arguments. Tuples become lists."""
    if isinstance(part, tuple | list):
        return [_map(child, change) for child in part]
    if isinstance(part, dict):
        return {name: _map(child, change) for name, child in part.items()}
    return change(part)


class UntracedAccess(TorchFunctionMode):
    """Detector of calls that read the values of tensors without an operation visible to a dispatch mode.

    Attributes:
        reason: The first such access; empty without such an access.
    """

    _functions = (Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr)

    def __init__(self) -> None:
        super().__init__()
        self.reason = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, and record whether it reads values."""
        if func in self._functions and not isinstance(args[0], nn.Parameter):
            self.reason = self.reason or f"the model reads the values of tensors by {func.__name__}()"
        return func(*args, **(kwargs or {}))


class _MemoryState:
    """The state of one block of memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.depends = False  # on the source
        self.writes = 0
        self.external: list[int] = []  # indices in `Tape.external`


class Tape(MemoryMode[_MemoryState]):
    """Recorder of the operations that one forward computes from one tensor, the source.

    Attributes:
        steps: The operations that depend on the source, in order.
        external: The other tensors that the steps read, with the values that were read.
        overwritten: The indices in `external` of the tensors that the steps write to.
        slots: The number of tensors that depend on the source, including the source.
        refusal: Why this forward cannot be replayed; empty if it can.
        aliased: Whether a tensor is read after its memory was written to through another tensor. A replay is then
            correct only if its tensors share memory as in this forward.
        output: The forward's output, with empty tensors.
        outputs: The placeholders of the output's tensors, in order.
        shapes: Their shapes.
    """

    def __init__(self) -> None:
        super().__init__(_MemoryState)
        self.steps: list[ReplayStep] = []
        self.external: list[Tensor] = []
        self.overwritten: set[int] = set()
        self.slots = 0
        self.refusal = ""
        self.aliased = False
        self.output: Any = None
        self.outputs: list[TensorRef] = []
        self.shapes: list[list[int]] = []
        self._slots: MutableMapping[Tensor, tuple[int, int]] = WeakTensorKeyDictionary()  # slot, earlier writes
        self._indices: dict[int, int] = {}  # in `external`, by id

    def end(self, output: Any) -> None:
        """Record the forward's output, and release its memory."""
        tensors = list(tree_tensors(output))
        self.refusal = self.refusal or self._unreadable(tensors)
        if not self.refusal:
            self.outputs = [self._placeholder(tensor) for tensor in tensors]
            self.shapes = [list(tensor.shape) for tensor in tensors]
            self.output = tree_map_tensors(output, lambda tensor: torch.empty(0, dtype=torch.float32, device="cpu"))
        self._slots.clear()
        self._indices.clear()
        self._memories.clear()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and record it if it depends on the source."""
        kwargs = kwargs or {}
        tensors = list(tree_tensors((args, kwargs)))
        dependent = [tensor for tensor in tensors if tensor in self._slots]
        self.refusal = self.refusal or _value_dependence(op, dependent) or self._unreadable(tensors)
        if self.refusal:
            return op(*args, **kwargs)
        placeholders = _map([args, kwargs], self._placeholder) if dependent else None
        targets = written(op, args, kwargs)
        if dependent:
            self.overwritten |= {self._indices[id(tensor)] for tensor in targets if tensor not in self._slots}
        for tensor in targets:
            self._before_write(tensor)
        result = op(*args, **kwargs)
        if placeholders:
            results = as_results(result)
            slots = tuple(self.add_slot(part) if _is_plain(part) else None for part in results)
            shape = next((tuple(part.shape) for part in results if isinstance(part, Tensor)), ())
            self.steps.append(ReplayStep(op, placeholders[0], placeholders[1], slots, shape))
        return result

    def _unreadable(self, tensors: list[Tensor]) -> str:
        for tensor in tensors:
            if not _is_plain(tensor):
                return "the model uses sparse, quantised or otherwise special tensors"
            recorded, memory = self._slots.get(tensor), self.memory(tensor)
            if recorded is None and memory.depends:
                return "a tensor is read whose memory was written to through another tensor"
            self.aliased |= recorded is not None and recorded[1] != memory.writes
        return ""

    def add_slot(self, tensor: Tensor) -> int:
        """Return a new slot for a tensor, the source or a result. That of an in-place operation gets another slot."""
        memory = self.memory(tensor)
        memory.depends = True
        self._slots[tensor] = (self.slots, memory.writes)
        self.slots += 1
        return self.slots - 1

    def _placeholder(self, part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        if part in self._slots:
            return ReplaySlot(self._slots[part][0])
        if id(part) not in self._indices:
            self._indices[id(part)] = len(self.external)
            self.memory(part).external.append(len(self.external))
            self.external.append(part)
        return ExternalTensor(self._indices[id(part)])

    def _before_write(self, tensor: Tensor) -> None:
        """Copy the external tensors in the memory that is about to be written to."""
        memory = self.memory(tensor)
        memory.writes += 1
        for index in memory.external:
            self._indices.pop(id(self.external[index]), None)
            self.external[index] = self.external[index].clone()
        memory.external.clear()


def _value_dependence(op: Op, dependent: list[Tensor]) -> str:
    """Return why an operation whose numbers or shapes depend on tensor values cannot be replayed; empty if it can."""
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    if op is torch.ops.aten.index.Tensor:  # only indexing with a mask has results of varying shape
        dependent = [tensor for tensor in dependent if tensor.dtype in (torch.bool, torch.uint8)]
    return f"{op} turns tensor values into a number or a shape" if dependent and tags & set(op.tags) else ""


@dataclass(frozen=True, slots=True)
class _External:
    """An external tensor for any number of rows: one part per row along an axis, or the same for all rows.

    A tensor that the steps overwrite is copied for each run.
    """

    value: Tensor
    axis: int | None
    overwritten: bool

    def for_rows(self, rows: int) -> Tensor:
        value = self.value
        if self.axis is not None and rows != 1:
            value = value.repeat([rows if axis == self.axis else 1 for axis in range(value.dim())])
        return value.clone(memory_format=torch.contiguous_format) if self.overwritten else value


class Program:
    """The part of a forward that depends on the source, for any number of rows.

    Args:
        first: The tape of a forward of a few rows.
        second: The tape of a forward of one more row, with other values in the source. Numbers that grow in proportion
            to the rows are row counts.
        rows: The number of rows of the first forward.

    Attributes:
        steps: The operations.
        outputs: The placeholders of the tensors in the output.
        shapes: Their shapes, with row counts.
        external: The other tensors that they read, for any number of rows.
        aliased: As for `Tape`.
        slots: The number of slots.
        output: The forward's output, with empty tensors.
        largest: The number of values of the largest result for one row.

    Raises:
        ReplayMismatch: The two forwards do not run the same operations, or a forward cannot be replayed.
    """

    def __init__(self, first: Tape, second: Tape, rows: int = 1) -> None:
        if first.refusal or second.refusal:
            raise ReplayMismatch(first.refusal or second.refusal)
        counts = [(tape.slots, len(tape.steps), len(tape.external), tape.outputs) for tape in (first, second)]
        if counts[0] != counts[1]:
            raise ReplayMismatch(f"the model runs different operations for {rows} and {rows + 1} rows")
        self.outputs, self.shapes = first.outputs, _merged(first.shapes, second.shapes, rows)
        self.aliased = first.aliased or second.aliased
        self.slots, self.output = first.slots, first.output
        self.largest = max((math.prod(step.shape) for step in first.steps), default=0) // rows
        pairs = enumerate(zip(first.external, second.external, strict=True))
        changed = first.overwritten
        self.external = [_merged_external(*pair, rows, overwritten=index in changed) for index, pair in pairs]
        steps = zip(first.steps, second.steps, _last_reads(first), strict=True)
        self.steps = [_merged_step(*step, rows) for step in steps]


class Replay:
    """One run of a program.

    Args:
        program: The program.
        source: The value of slot 0, which may be overwritten.
        rows: The number of rows.

    Attributes:
        computed: The number of values that were computed so far.
    """

    def __init__(self, program: Program, source: Any, rows: int) -> None:
        self.program, self.rows, self.computed = program, rows, 0
        self.external = [tensor.for_rows(rows) for tensor in program.external]
        self.values: list[Any] = [source] + [None] * (program.slots - 1)

    def run(self, step: ReplayStep) -> list[Any]:
        """Return the results of a step."""
        args, kwargs = self.arguments(step)
        results = list(as_results(step.op(*args, **kwargs)))
        self.computed += sum(part.numel() for part in results if isinstance(part, Tensor))
        return results

    def arguments(self, step: ReplayStep) -> list[Any]:
        """Return the positional and the keyword arguments of a step."""
        return _map([step.args, step.kwargs], self._value)  # type: ignore[no-any-return]

    def _value(self, part: Any) -> Any:
        if isinstance(part, ReplaySlot):
            return self.values[part.index]
        if isinstance(part, ExternalTensor):
            return self.external[part.index]
        return part.per_row * self.rows if isinstance(part, RowCount) else part

    def read(self, slot: int) -> Tensor:
        """Return the whole tensor in a slot."""
        return self.values[slot]  # type: ignore[no-any-return]

    def output(self) -> Any:
        """Run all steps, and return the output of the forward.

        Raises:
            ReplayMismatch: A tensor of the output has another number of rows than in a forward.
        """
        with torch.no_grad():
            for step in self.program.steps:
                for slot, result in zip(step.results, self.run(step), strict=False):
                    if slot is not None:
                        self.values[slot] = result
                for slot in step.last:
                    self.values[slot] = None
            # Other runs need the external tensors, so copies are returned.
            copied = partial(torch.clone, memory_format=torch.contiguous_format)
            parts = self.program.outputs
            tensors = [self.read(p.index) if type(p) is ReplaySlot else copied(self.external[p.index]) for p in parts]
            if [list(tensor.shape) for tensor in tensors] != _map(self.program.shapes, self._value):
                # The trials have two rows, and a part of the batch may be larger.
                raise ReplayMismatch(f"the model runs different operations for {self.rows} rows, as if in parts")
            remaining = iter(tensors)
            return tree_map_tensors(self.program.output, lambda empty: next(remaining))


class PartialForward(ABC):
    """Runner of a part of a model for variants of one image, or of the whole model if that is not possible.

    Forwards of one and of two rows are recorded, and the operations that depend on the variant are replayed for each
    call. If this is not possible, or its output differs from the model's, each call runs the whole model. The model's
    parameters must not change, and its code must run the same operations for any number of rows above two.

    Args:
        model: The model, prepared by the caller.
        x: One image (1, C, H, W).

    Attributes:
        output: The model's output for the image.
        why: Why whole forwards are run; empty if only the part is run.
    """

    part: ClassVar[str]
    """Description of the passes that replace whole forwards."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self._model, self._x = model, x.detach()
        self.why = ""
        self._program: Program | None = None
        access = UntracedAccess()
        with torch.no_grad():
            # Attention may be computed differently in this mode, so the values of this forward are not used.
            with access:
                self._first_forward()
            tape, self.output = self._record(None)
            tape.refusal = access.reason or tape.refusal
            self._program = self._attempt(lambda: self._prepare(tape))

    def _first_forward(self) -> None:
        """Run the model on the image, before any other forward."""
        self._run(None)

    @abstractmethod
    def _variants(self) -> Tensor:
        """Return three other rows (3, ...), for trials."""

    @abstractmethod
    def _run(self, rows: Tensor | None, tape: Tape | None = None) -> Any:
        """Return the model's output for `rows`, or for the image itself if None. Begin the tape, if given."""

    @abstractmethod
    def _try(self, program: Program, rows: Tensor | None) -> Any:
        """Return the output of a program for the rows of a trial, or for the image itself if None."""

    def _record(self, rows: Tensor | None) -> tuple[Tape, Any]:
        tape = Tape()
        with tape:
            output = self._run(rows, tape)
        tape.end(output)
        return tape, output

    def _prepare(self, first: Tape) -> Program:
        """Return the program, after comparing its outputs with the model's.

        Args:
            first: The tape of the forward of the image itself.

        Raises:
            ReplayMismatch: The forward cannot be replayed.
        """
        if first.refusal:
            raise ReplayMismatch(first.refusal)
        rows = self._variants()
        second, expected = self._record(rows[:2])
        try:
            program = Program(first, second)
        except ReplayMismatch:
            # For one row, PyTorch skips some operations, such as copies that make memory contiguous.
            program = Program(second, self._record(rows)[0], rows=2)
        trials = ((None, self.output), (rows[:2], expected))
        if not all(trees_agree(self._try(program, trial), output) for trial, output in trials):
            raise ReplayMismatch("the output of the replayed operations differs from the model's")
        return program

    @property
    def how(self) -> str:
        """Description of the passes of each call."""
        return "whole forwards" if self._program is None else self.part

    def _attempt(self, compute: Callable[[], _T]) -> _T | None:
        """Return the result of `compute`; if it fails, return None and run whole forwards from now on."""
        try:
            return compute()
        except (ReplayMismatch, RuntimeError, ValueError, TypeError, LookupError) as error:
            if self._program is not None and is_out_of_memory(error):
                raise
            self.why, self._program = str(error), None
            return None


class TailForward(PartialForward):
    """Forward for variants of one layer's output, with the part before the layer computed once.

    Args:
        model: As for `PartialForward`.
        layer: The name of the layer, or the module. If it is called several times, the last call is replaced;
            if it returns several tensors, the first one.
        x: One image (1, C, H, W).

    Attributes:
        activation: The layer's output for the image, (1, ...) as the layer returns it; a copy.
        output: As for `PartialForward`.
        why: As for `PartialForward`.

    Raises:
        LayerError: The layer is not run, or does not return a floating-point tensor with one row for the image.
    """

    part = "only the part after the layer"

    def __init__(self, model: nn.Module, layer: str | nn.Module, x: Tensor) -> None:
        self._name, self._layer = find(model, layer)
        self._calls = 0
        self.activation: Tensor
        super().__init__(model, x)

    def __call__(self, activations: Tensor) -> Any:
        """Return the model's output for the image, with k other outputs of the layer.

        Args:
            activations: (k, ...), in the layout of `activation`. They are not changed.
        """
        with torch.no_grad():
            rows, program = self._laid_out(activations.detach()), self._program
            output = program and self._attempt(lambda: self._try(program, rows))
            return self._run(rows) if output is None else output

    @property
    def row_bytes(self) -> int:
        """The bytes of the largest result of an operation for one row; 0 if whole forwards are run."""
        return self._program.largest * self.activation.element_size() if self._program else 0

    def _laid_out(self, rows: Tensor) -> Tensor:
        """Return rows of the type, on the device and with the memory layout of the layer's output."""
        like = self.activation
        layout = torch.contiguous_format
        if like.dim() == 4 and not like.is_contiguous() and like.is_contiguous(memory_format=torch.channels_last):
            layout = torch.channels_last
        return rows.to(like).contiguous(memory_format=layout)

    def _first_forward(self) -> None:
        with HookManager() as hooks:
            calls = hooks.capture(self._layer)
            run_model(self._model, self._x)
        if not calls or not calls[-1].is_floating_point() or calls[-1].shape[:1] != (1,):
            raise LayerError(
                f'layer "{self._name}" was not run in this forward, or did not return a floating-point tensor with one '
                "row for the one image (a scripted part does not call its layers)"
            )
        self._calls = len(calls)

    def _run(self, rows: Tensor | None, tape: Tape | None = None) -> Any:
        """Run the whole model on copies of the image, with the layer's last output replaced.

        Args:
            rows: The other outputs; None to keep and store the output of the layer.
            tape: The tape that records the following operations.
        """
        seen, count = 0, 1 if rows is None else len(rows)

        def change(output: Any) -> Any:
            nonlocal seen
            first = first_tensor(output)
            if first is None:
                return None
            seen += 1
            if seen != self._calls:
                return None
            if rows is None:
                self.activation = first.detach().clone()
            replaced = (self.activation if rows is None else rows).clone()
            if tape is not None:
                tape.add_slot(replaced)
            return tree_map_tensors(output, lambda tensor: replaced if tensor is first else tensor)

        with HookManager() as hooks:
            hooks.revise(self._layer, change)
            output = run_model(self._model, self._x.expand(count, *self._x.shape[1:]))
        if seen != self._calls:
            raise LayerError(
                f'layer "{self._name}" is called {self._calls} times for one image and {seen} times for {count}'
            )
        return output

    def _try(self, program: Program, rows: Tensor | None) -> Any:
        source = self.activation if rows is None else rows
        return Replay(program, source.clone(), len(source)).output()

    def _variants(self) -> Tensor:
        activation, random = self.activation, torch.Generator().manual_seed(0)
        scale = activation.abs().max().clamp(min=torch.finfo(activation.dtype).tiny)
        draws = torch.rand(4, *activation.shape, generator=random, dtype=torch.float64, device="cpu").to(activation)
        dropped = activation * (draws[0] < 0.5).to(activation) + 0.1 * scale * draws[1]
        rows = torch.cat([activation * draws[2], dropped, activation * draws[3] - 0.1 * scale * draws[1]])
        return self._laid_out(rows)


def _last_reads(tape: Tape) -> list[frozenset[int]]:
    """Return, for each step, its slots that no later step reads."""
    needed = {part.index for part in tape.outputs if isinstance(part, ReplaySlot)}
    last: list[frozenset[int]] = []
    for step in reversed(tape.steps):
        last.append(frozenset(step.slots.union(slot for slot in step.results if slot is not None) - needed))
        needed |= last[-1]
    return last[::-1]


def _merged_step(first: ReplayStep, second: ReplayStep, last: frozenset[int], rows: int) -> ReplayStep:
    if first.op is not second.op or first.results != second.results:
        raise ReplayMismatch(f"the model runs {first.op} for {rows} rows, but {second.op} for {rows + 1}")
    args, kwargs = _merged([first.args, first.kwargs], [second.args, second.kwargs], rows)
    return replace(first, args=args, kwargs=kwargs, last=last)


def _merged(first: Any, second: Any, rows: int) -> Any:
    """Return arguments for any number of rows, from the arguments for some rows and for one more row."""
    if type(first) is type(second):
        if isinstance(first, list) and len(first) == len(second):
            return [_merged(*pair, rows) for pair in zip(first, second, strict=True)]
        if isinstance(first, dict) and first.keys() == second.keys():
            return {name: _merged(part, second[name], rows) for name, part in first.items()}
        if first == second:
            return first
        if type(first) is int and first * (rows + 1) == second * rows and first % rows == 0:
            return RowCount(first // rows)
    raise ReplayMismatch(f"an argument is {first!r} for {rows} rows and {second!r} for {rows + 1}")


def _merged_external(first: Tensor, second: Tensor, rows: int, *, overwritten: bool) -> _External:
    """Return an external tensor for any number of rows, from the tensors for some rows and for one more row."""
    external = _External(first, None, overwritten)
    if first.shape == second.shape and first.data_ptr() == second.data_ptr() and first.stride() == second.stride():
        return external
    if first.dim() == second.dim():
        grown = [axis for axis in range(first.dim()) if first.shape[axis] != second.shape[axis]]
        if len(grown) == 1 and first.shape[grown[0]] % rows == 0:
            external = _External(first.narrow(grown[0], 0, first.shape[grown[0]] // rows), grown[0], overwritten)
        if trees_agree(external.for_rows(rows), first) and trees_agree(external.for_rows(rows + 1), second):
            return external
    raise ReplayMismatch("a tensor that the replayed operations read is not the same for each row")
