"""A forward done again from tapes, for any number of rows, without the model's own code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...hooks.pytree import tree_map_tensors, trees_agree
from .recording import ExternalTensor, Op, Slot, Step, Tape


class ReplayMismatch(Exception):  # noqa: N818
    """Two forwards that should differ in nothing but their number of rows differ in more."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A number that grows with the number of rows: this many for each."""

    each: int


@dataclass(frozen=True, slots=True)
class Part:
    """What the program uses beside its source.

    Attributes:
        value: As it is for one row.
        axis: Where it has one part per row, all alike; None where it is the same for any number of rows.
        overwritten: An operation writes to it, so each run gets a copy.
    """

    value: Tensor
    axis: int | None
    overwritten: bool

    def at(self, rows: int) -> Tensor:
        """As it is for some number of rows."""
        value = self.value
        if self.axis is not None and rows != 1:
            one = value.shape[self.axis] == 1
            sizes = [rows if axis == self.axis else -1 if one else 1 for axis in range(value.dim())]
            value = value.expand(sizes) if one else value.repeat(sizes)
        return value.clone(memory_format=torch.contiguous_format) if self.overwritten else value


@dataclass(frozen=True, slots=True)
class ReplayStep:
    """One step of a program.

    Attributes:
        op: The operation.
        args: Its arguments, with places for tensors and for numbers that grow with the rows.
        kwargs: Those by name.
        results: The slot of each result, None where it is no tensor.
        single: The operation returns a tensor, not a tuple or list of them.
        shapes: The shape of each result for one row.
        last: The slots that nothing reads afterwards.
    """

    op: Op
    args: list[Any]
    kwargs: dict[str, Any]
    results: tuple[int | None, ...]
    single: bool
    shapes: tuple[tuple[int, ...], ...]
    last: tuple[int, ...]


class Program:
    """The part of a forward that depends on one tensor, the source, for any number of rows.

    Args:
        first: The tape of a forward of a few rows.
        second: That of a forward of one more, with other values in the source. Numbers that grow in proportion count
            rows.
        rows: How many rows the first has.

    Attributes:
        moves: The steps.
        slots: How many tensors depend on the source, itself included.
        outputs: The places of the tensors in the output.
        pure: The steps are functions of their arguments' places, whatever memory these share.

    Raises:
        Unlike: The two do not do the same, or one of them cannot be done again.
    """

    def __init__(self, first: Tape, second: Tape, rows: int = 1) -> None:
        for each in (first, second):
            if each.refusal:
                raise ReplayMismatch(each.refusal)
        counts = [(tape.slots, len(tape.steps), len(tape.given), tape.outputs) for tape in (first, second)]
        if counts[0] != counts[1]:
            raise ReplayMismatch(f"{rows} and {rows + 1} rows are not computed alike")
        self.slots = first.slots
        self.outputs = first.outputs
        self.pure = not (first.aliased or second.aliased)
        self._source_overwritten = first.source_overwritten
        self._output = first.output
        overwritten = {
            place.at for step in first.steps for place in step.overwritten if isinstance(place, ExternalTensor)
        }
        self._parts = [
            _part(one, other, at in overwritten, rows)
            for at, (one, other) in enumerate(zip(first.given, second.given, strict=True))
        ]
        self.moves = [
            _move(step, other, last, rows)
            for step, other, last in zip(first.steps, second.steps, _last_uses(first), strict=True)
        ]

    def __call__(self, source: Tensor, rows: int, see: Callable[[int, Tensor], None] | None = None) -> Any:
        """The output of the forward for this source. `see` is shown each tensor on the way, by its slot."""
        values: list[Any] = [None] * self.slots
        values[0] = source.clone() if self._source_overwritten else source
        del source
        given = self.given(rows)
        with torch.no_grad():
            if see is not None:
                see(0, values[0])
            for move in self.moves:
                self.do(move, values, given, rows)
                if see is not None:
                    for at in move.results:
                        if at is not None:
                            see(at, values[at])
                for at in move.last:
                    values[at] = None
        return self.output(values, given)

    def given(self, rows: int) -> list[Tensor]:
        """What is used beside the source, for some number of rows."""
        return [part.at(rows) for part in self._parts]

    def do(self, move: ReplayStep, values: list[Any], given: list[Tensor], rows: int) -> None:
        """One step on real tensors."""
        result = move.op(
            *[filled(each, values, given, rows) for each in move.args],
            **{name: filled(each, values, given, rows) for name, each in move.kwargs.items()},
        )
        for at, each in zip(move.results, (result,) if move.single else result, strict=True):
            if at is not None:
                values[at] = each

    def output(self, values: list[Any], given: list[Tensor]) -> Any:
        """The nest that the model returns, filled. What is kept for other calls is handed out as a copy."""
        tensors = [filled(place, values, given, 1) for place in self.outputs]
        found = (
            each.clone(memory_format=torch.contiguous_format) if isinstance(place, ExternalTensor) else each
            for place, each in zip(self.outputs, tensors, strict=True)
        )
        return tree_map_tensors(self._output, lambda each: next(found))


def filled(part: Any, values: list[Any], given: list[Tensor], rows: int) -> Any:
    """An argument with tensors and numbers in their places."""
    kind = type(part)
    if kind is Slot:
        return values[part.at]
    if kind is ExternalTensor:
        return given[part.at]
    if kind is Rows:
        return part.each * rows
    return [filled(each, values, given, rows) for each in part] if kind is list else part


def slots_among(part: Any) -> list[int]:
    """The slots among arguments."""
    if isinstance(part, Slot):
        return [part.at]
    if isinstance(part, dict):
        part = list(part.values())
    return [at for each in part for at in slots_among(each)] if isinstance(part, list) else []


def _last_uses(tape: Tape) -> list[tuple[int, ...]]:
    """For each step, the slots that nothing reads after it."""
    kept = {place.at for place in tape.outputs if isinstance(place, Slot)}
    last: dict[int, int] = {}
    for at, step in enumerate(tape.steps):
        used = slots_among(step.args) + slots_among(step.kwargs) + [each for each in step.results if each is not None]
        last.update(dict.fromkeys(used, at))
    found: list[list[int]] = [[] for _ in tape.steps]
    for slot, at in last.items():
        if slot not in kept:
            found[at].append(slot)
    return [tuple(each) for each in found]


def _move(one: Step, other: Step, last: tuple[int, ...], rows: int) -> ReplayStep:
    """A step for any number of rows, from what it is for some and for one more."""
    if one.op is not other.op or one.results != other.results or one.overwritten != other.overwritten:
        raise ReplayMismatch(f"where {rows} rows take {one.op}, {rows + 1} take {other.op}")
    shapes = tuple(
        tuple(each if type(each) is int else each.each for each in _joined(list(shape), list(grown), rows))
        for shape, grown in zip(one.shapes, other.shapes, strict=True)
    )
    args, kwargs = _joined(one.args, other.args, rows), _joined(one.kwargs, other.kwargs, rows)
    return ReplayStep(one.op, args, kwargs, one.results, one.single, shapes, last)


def _joined(one: Any, other: Any, rows: int) -> Any:
    """Arguments for any number of rows, from those for some and for one more."""
    if type(one) is type(other):
        if isinstance(one, list) and len(one) == len(other):
            return [_joined(first, second, rows) for first, second in zip(one, other, strict=True)]
        if isinstance(one, dict) and one.keys() == other.keys():
            return {name: _joined(first, other[name], rows) for name, first in one.items()}
        if one == other:
            return one
        if type(one) is int and one * (rows + 1) == other * rows and one % rows == 0:
            return Rows(one // rows)
    raise ReplayMismatch(f"an argument is {one!r} for {rows} rows and {other!r} for {rows + 1}")


def _part(one: Tensor, other: Tensor, overwritten: bool, rows: int) -> Part:
    """What is used beside the source, from what it is for some rows and for one more."""
    if one.dtype == other.dtype and one.dim() == other.dim():
        grown = [axis for axis in range(one.dim()) if one.shape[axis] != other.shape[axis]]
        if not grown:
            if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
                return Part(one, None, overwritten)
            part = Part(one, None, overwritten)
        elif len(grown) == 1 and one.shape[grown[0]] % rows == 0:
            part = Part(one.narrow(grown[0], 0, one.shape[grown[0]] // rows), grown[0], overwritten)
        else:
            raise ReplayMismatch("what is used beside the tensor that is followed grows otherwise than with the rows")
        if trees_agree(part.at(rows), one) and trees_agree(part.at(rows + 1), other):
            return part
    raise ReplayMismatch("what is used beside the tensor that is followed is not the same for each row")
