"""Every call of every layer: what went in and came out, and the gradients that came back through it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Self, overload

from torch import nn

from ...errors import LayerError, MethodError, did_you_mean
from ...hooks.manager import HookManager, is_seen
from ...hooks.model_state import eager, unwrap
from ..selecting import LayersLike, require_seen, selected
from ..tabular import Table
from .keeping import Keep, Keeper
from .summary import CallSummary, summarise
from .taping import PARTS, Call, Tape


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
            hooks = stack.enter_context(HookManager(standing=True))
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
