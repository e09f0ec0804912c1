"""Every call of every layer: what went in and came out, and the gradients that came back through it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self, overload

from torch import Tensor, nn

from ..errors import LayerError, MethodError, did_you_mean
from ..hooks.manager import HookManager, is_seen
from ..hooks.model_state import eager, unwrap
from .call_recorder import PARTS, Call, Tape
from .layer_selection import LayersLike, require_seen, selected
from .layer_table import shape_text
from .moments import Moments, moments
from .retention import Keep, Keeper, TensorStatistics
from .tables import Column, Table, number, share


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


class Recording(Sequence[Call]):
    """See `record`."""

    def __init__(self, model: nn.Module, layers: LayersLike, keep: Keep, parts: Sequence[str]) -> None:
        unknown = next((each for each in parts if each not in PARTS), None)
        if isinstance(parts, str) or unknown is not None:
            hint = "" if isinstance(parts, str) else did_you_mean(str(unknown), PARTS)
            raise MethodError(f"parts={parts!r}: expected some of {', '.join(PARTS)}, in a tuple{hint}")
        whole = unwrap(model)
        self._modules = selected(whole, layers)
        if not any(is_seen(whole, name, module) for name, module in self._modules.items()):
            require_seen(whole, self._modules)
        self._tape = Tape(Keeper(keep), parts)
        self._open: ExitStack | None = None

    def __enter__(self) -> Self:
        """Begin, or go on, recording.

        Raises:
            MethodError: It is running already.
        """
        if self._open is not None:
            raise MethodError("this recording is running already; open another one with record(...)")
        with ExitStack() as stack:
            hooks = stack.enter_context(HookManager(persistent=True))
            stack.enter_context(eager())
            for name, module in self._modules.items():
                self._tape.attach(hooks, name, module)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop recording; what was recorded stays."""
        stack, self._open = self._open, None
        if stack is not None:
            stack.__exit__(*error)

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers that were called, in the order of their first call."""
        return tuple(dict.fromkeys(call.layer for call in self))

    def clear(self) -> None:
        """Forget all calls."""
        self._tape.clear()

    def __len__(self) -> int:
        return sum(1 for _ in self._tape)

    def __iter__(self) -> Iterator[Call]:
        return iter(tuple(self._tape))  # more may come while somebody goes through them

    @overload
    def __getitem__(self, which: int) -> Call: ...
    @overload
    def __getitem__(self, which: slice | str | nn.Module) -> list[Call]: ...
    def __getitem__(self, which: int | slice | str | nn.Module) -> Call | list[Call]:
        """A call by its place, or all calls of a layer, in order.

        Raises:
            LayerError: The layer is not among those that are recorded.
        """
        if isinstance(which, int | slice):
            return list(self)[which]
        name = (
            next((n for n, module in self._modules.items() if module is which), None)
            if not isinstance(which, str)
            else which
        )
        if name not in self._modules:
            hint = did_you_mean(str(name), self._modules)
            raise LayerError(f'no layer "{name}" among the {len(self._modules)} that are recorded{hint}')
        return [call for call in self if call.layer == name]

    def table(self) -> Table[CallSummary]:
        """One line for each call: shape and moments of its output, and the norm of the gradient that came back."""
        return summarise(self)

    def __repr__(self) -> str:
        """How much there is."""
        return f"<Recording of {len(self)} calls of {len(self.layers)} layers; .table() shows them>"


def record(
    model: nn.Module, layers: LayersLike = "*", *, keep: Keep = "full", parts: Sequence[str] = PARTS
) -> Recording:
    """Record what flows through the layers of a model while the user runs it, forth and back.

    A context manager, and at the same time the sequence of the recorded calls:

        with record(model, "layer4.*", keep="statistics") as recording:
            loss(model(x), y).backward()
        recording["layer4.0.conv1"][0].grad_outputs

    A layer that is called n times has n calls, in the order in which they began. Layers that work in place, functions
    between layers, nested, tuple, dict and None results are recorded as they are, and what the model computes is bit
    for bit what it would be without. Only calls of the thread that opened the block are recorded, also those that an
    explanation makes inside it; a call that raised is not, nor are those that a backward pass repeats for a checkpoint:
    inside one that is reentrant, layers have no gradients. Of gradients that are edited, what is recorded is edited
    where the edit was opened before the recording. Nothing stays on the model when the block ends.

    Args:
        model: Any module, in whatever mode it is. Compiled parts run as they are written.
        layers: Names, patterns as in "layer4.*.conv?", modules, classes of modules, or several of these; all layers by
            default. A module that stands in the model under several names has the first.
        keep: What is kept of each tensor, which decides how much memory is needed: "full", a copy on its device, and
            in the forward pass still a part of the graph; "cpu", a detached copy on the CPU; "statistics", shape and
            moments only, a few hundred bytes; "sample", the same estimated from 8192 numbers of each tensor, in a
            third of the time; or a function of the tensor.
        parts: Some of "inputs", "outputs", "grad_inputs", "grad_outputs"; all by default.

    Raises:
        LayerError: A name or pattern fits no layer.
        MethodError: There is no such way to keep a tensor, or no such part.
        NotApplicableError: All the layers are inside TorchScript, where no hook sees them.
    """
    return Recording(model, layers, keep, parts)
