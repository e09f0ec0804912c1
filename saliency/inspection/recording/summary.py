"""One line for each recorded call: what came out of it, and what came back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..moments import Moments, moments
from ..structure.rows import shape_text
from ..tabular import Column, Table, number, share
from .keeping import TensorStatistics


@dataclass(frozen=True, slots=True)
class CallSummary:
    """One call in figures; None where nothing is known.

    The figures are of the first tensor in the output, and of the gradient that the last backward pass brought to it.
    """

    name: str
    kind: str
    index: int
    output: tuple[int, ...] | None  # the shape
    mean: float | None
    std: float | None
    zero_share: float | None
    nonfinite: int | None
    grad_norm: float | None
    backwards: int


def summarise(calls: Iterable[Any]) -> Table[CallSummary]:
    """The table of some calls of a recording."""
    calls = list(calls)
    kept = (each for call in calls for each in call.outputs)
    estimated = any(isinstance(each, TensorStatistics) and each.is_estimate for each in kept)
    notes = ["estimated from a sample of each tensor"] if estimated else []
    return Table([_summary(each) for each in calls], _COLUMNS, title="recorded calls", notes=notes)


def _summary(call: Any) -> CallSummary:
    output = next((each for each in call.outputs if isinstance(each, Tensor | TensorStatistics)), None)
    gradient = next(iter(call.grad_outputs), None)
    found, known = _moments(output), _moments(gradient)
    return CallSummary(
        name=call.layer,
        kind=call.kind,
        index=call.index,
        output=None if output is None else tuple(output.shape),
        mean=None if found is None else found.mean,
        std=None if found is None else found.std,
        zero_share=None if found is None else found.zero_share,
        nonfinite=None if found is None else found.nan + found.inf,
        grad_norm=None if known is None else known.norm,
        backwards=len(call.backwards),
    )


def _moments(kept: Any) -> Moments | None:
    if isinstance(kept, TensorStatistics):
        return kept.moments
    return moments(kept) if isinstance(kept, Tensor) else None


def _figure(value: float | None) -> str:
    return "" if value is None else number(value)


_COLUMNS: list[Column[CallSummary]] = [
    Column("layer", lambda row: row.name or "(the model)", "left"),
    Column("call", lambda row: str(row.index), hint="how many calls of the layer came before"),
    Column("kind", lambda row: row.kind, "left"),
    Column("output", lambda row: "" if row.output is None else shape_text(row.output), "left"),
    Column("mean", lambda row: _figure(row.mean)),
    Column("std", lambda row: _figure(row.std)),
    Column("zeros", lambda row: share(row.zero_share)),
    Column("NaN, Inf", lambda row: str(row.nonfinite or ""), alert=lambda row: bool(row.nonfinite)),
    Column("gradient norm", lambda row: _figure(row.grad_norm), hint="at the output, in the last backward pass"),
]
