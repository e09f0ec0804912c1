"""Record every call of every layer: arguments, outputs, and gradients at both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, overload

from torch import Tensor, nn

from ..errors import LayerError, MethodError, did_you_mean
from ..hooks.manager import HookManager, is_hookable
from ..hooks.model_state import eager, unwrap
from .call_recorder import PARTS, Call, CallRecorder, TensorStatistics
from .layer_selection import LayersLike, require_seen, selected
from .moments import Moments, moments
from .tables import Column, Table, number, shape_text, share

Keep = str | Callable[[Tensor], Any]
"""One of "full", "cpu", "statistics" and "sample", or a function of the tensor."""

_KEEP: dict[str, Callable[[Tensor], Any]] = {
    "full": Tensor.clone,
    "cpu": lambda tensor: tensor.detach().to("cpu", copy=True),
    "statistics": TensorStatistics,
    "sample": partial(TensorStatistics, sample=True),
}


@dataclass(frozen=True, slots=True)
class CallSummary:
    """Summary of one call; unknown values are None.

    The summary covers the first tensor in the output, and its gradient in the last backward pass.
    """

    name: str
    kind: str
    index: int
    output: tuple[int, ...] | None  # shape
    mean: float | None
    std: float | None
    zero_share: float | None
    nonfinite: int | None
    grad_norm: float | None
    backwards: int


def summarise(calls: Iterable[Call]) -> Table[CallSummary]:
    """Return a table with one row per call."""
    calls = list(calls)
    statistics = (kept for call in calls for kept in call.outputs if isinstance(kept, TensorStatistics))
    notes = ["estimated from a sample of each tensor"] if any(kept.is_estimate for kept in statistics) else []
    return Table([_summary(call) for call in calls], _COLUMNS, title="recorded calls", notes=notes)


def _summary(call: Call) -> CallSummary:
    output = next((kept for kept in call.outputs if isinstance(kept, Tensor | TensorStatistics)), None)
    known, of_gradient = _moments(output), _moments(next(iter(call.grad_outputs), None))
    return CallSummary(
        name=call.layer,
        kind=call.kind,
        index=call.index,
        output=None if output is None else tuple(output.shape),
        mean=None if known is None else known.mean,
        std=None if known is None else known.std,
        zero_share=None if known is None else known.zero_share,
        nonfinite=None if known is None else known.nan + known.inf,
        grad_norm=None if of_gradient is None else of_gradient.norm,
        backwards=len(call.backwards),
    )


def _moments(kept: Any) -> Moments | None:
    if isinstance(kept, TensorStatistics):
        return kept.moments
    return moments(kept) if isinstance(kept, Tensor) else None


_COLUMNS: list[Column[CallSummary]] = [
    Column("layer", lambda row: row.name or "(the model)", "left"),
    Column("call", lambda row: str(row.index), hint="number of earlier calls of the layer"),
    Column("kind", lambda row: row.kind, "left"),
    Column("output", lambda row: "" if row.output is None else shape_text(row.output), "left"),
    Column("mean", lambda row: number(row.mean)),
    Column("std", lambda row: number(row.std)),
    Column("zeros", lambda row: share(row.zero_share)),
    Column("NaN, Inf", lambda row: str(row.nonfinite or ""), alert=lambda row: bool(row.nonfinite)),
    Column("gradient norm", lambda row: number(row.grad_norm), hint="at the output, in the last backward pass"),
]


class Recording(Sequence[Call]):
    """Sequence of recorded calls, and the context manager that records them; see `record`."""

    def __init__(self, model: nn.Module, layers: LayersLike, keep: Keep, parts: Sequence[str]) -> None:
        unknown = next((part for part in parts if part not in PARTS), None)
        if isinstance(parts, str) or unknown is not None:
            hint = "" if isinstance(parts, str) else did_you_mean(str(unknown), PARTS)
            raise MethodError(f"parts={parts!r}: expected a tuple of some of {', '.join(PARTS)}{hint}")
        if not callable(keep) and keep not in _KEEP:
            hint = did_you_mean(str(keep), _KEEP)
            raise MethodError(f"keep={keep!r} is not one of {', '.join(map(repr, _KEEP))} or a function{hint}")
        network = unwrap(model)
        self._modules = selected(network, layers)
        if not any(is_hookable(network, name, module) for name, module in self._modules.items()):
            require_seen(network, self._modules)
        self._recorder = CallRecorder(keep if callable(keep) else _KEEP[keep], parts)
        self._open: ExitStack | None = None

    def __enter__(self) -> Self:
        """Start or resume recording.

        Raises:
            MethodError: The recording is already running.
        """
        if self._open is not None:
            raise MethodError("this recording is already running; open another one with record(...)")
        with ExitStack() as stack:
            hooks = stack.enter_context(HookManager(persistent=True))
            stack.enter_context(eager())
            for name, module in self._modules.items():
                self._recorder.attach(hooks, name, module)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop recording and keep the recorded calls."""
        stack, self._open = self._open, None
        if stack is not None:
            stack.__exit__(*error)

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers that were called, in the order of their first call."""
        return tuple(dict.fromkeys(call.layer for call in self))

    def clear(self) -> None:
        """Remove all recorded calls."""
        self._recorder.clear()

    def __len__(self) -> int:
        return sum(1 for _ in self._recorder)

    def __iter__(self) -> Iterator[Call]:
        return iter(self._recorder)

    @overload
    def __getitem__(self, key: int) -> Call: ...
    @overload
    def __getitem__(self, key: slice | str | nn.Module) -> list[Call]: ...
    def __getitem__(self, key: int | slice | str | nn.Module) -> Call | list[Call]:
        """Return a call by its index, or all calls of a layer, in order.

        Raises:
            LayerError: The layer is not recorded.
        """
        if isinstance(key, int | slice):
            return list(self)[key]
        name = key if isinstance(key, str) else next((n for n, module in self._modules.items() if module is key), None)
        if name not in self._modules:
            hint = did_you_mean(str(name), self._modules)
            raise LayerError(f'no layer "{name}" among the {len(self._modules)} recorded layers{hint}')
        return [call for call in self if call.layer == name]

    def table(self) -> Table[CallSummary]:
        """Return a table with one row per call: shape and moments of its output, and the norm of the gradient at it."""
        return summarise(self)

    def __repr__(self) -> str:
        return f"<Recording of {len(self)} calls of {len(self.layers)} layers; .table() shows them>"


def record(
    model: nn.Module, layers: LayersLike = "*", *, keep: Keep = "full", parts: Sequence[str] = PARTS
) -> Recording:
    """Record the calls of layers and their gradients while the user runs the model.

    The result is a context manager and the sequence of the recorded calls:

        with record(model, "layer4.*", keep="statistics") as recording:
            loss(model(x), y).backward()
        recording["layer4.0.conv1"][0].grad_outputs

    Each call of a layer is one entry, in the order in which the calls began. In-place layers, functions between layers,
    and nested, tuple, dict and None results are supported. The results of the model are bit for bit unchanged.

    Only calls of the thread that opened the block are recorded, including those of explanations inside it. Calls that
    raise are not recorded. Calls that checkpointing repeats in the backward pass are not recorded either, so layers
    inside a reentrant checkpoint have no gradients. An edit that was opened before the recording is included in it.
    The hooks are removed when the block ends.

    Args:
        model: Any module, in any mode. Compiled parts run uncompiled.
        layers: Names, patterns as in "layer4.*.conv?", modules, classes of modules, or several of these; all layers by
            default. A module that has several names in the model is recorded under the first.
        keep: Recorded form of each tensor, which determines the memory use: "full" is a copy on its device, part of the
            graph in the forward pass; "cpu" is a detached copy on the CPU; "statistics" is shape and moments, a few
            hundred bytes; "sample" is the same, estimated from 8192 values in a third of the time. A function of the
            tensor returns any other form.
        parts: Some of "inputs", "outputs", "grad_inputs", "grad_outputs"; all by default.

    Raises:
        LayerError: A name or pattern matches no layer.
        MethodError: An unknown value of `keep` or `parts`.
        NotApplicableError: All the layers are inside TorchScript, where hooks do not run; or (while the model runs) a
            tensor is nested, quantised, or belongs to a transformation such as `torch.vmap`.
    """
    return Recording(model, layers, keep, parts)
