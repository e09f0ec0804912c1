"""Only what lies behind a layer, for many changes of its output."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import LayerError
from ...hooks.manager import HookManager
from ...hooks.model_state import is_out_of_memory, run_model
from ...hooks.pytree import first_tensor, tree_map_tensors, trees_agree
from ...layers.find import find
from .recording import Tape, UntracedAccess
from .replay import Program, ReplayMismatch

ONLY_BEHIND = "behind the layer only"
WHOLE_FORWARDS = "whole forwards"

_WRONG = (ReplayMismatch, RuntimeError, ValueError, TypeError, LookupError)


class TailForward:
    """What a model makes of changes of one layer's output, with the part before the layer computed once.

    Two forwards, of one row and of two, are written down as the operations they consist of. Those that depend on the
    layer's output are done again for each call; all else is kept as it was. Where that is not possible, or does not
    give what the model gives, each call is a forward of the whole model.

    The model's parameters must stay as they are, and its code must do the same for any number of rows above two.

    Args:
        model: The model, borrowed by the caller.
        layer: The name of the layer, or the module. Of a layer that is called many times the last call counts; of an
            output of several tensors the first.
        x: One picture (1, C, H, W).

    Attributes:
        activation: The layer's output for the picture, (1, ...) as the layer returns it; a copy.
        output: The model's output for the picture.
        how: "behind the layer only" or "whole forwards".
        why: Why it is whole forwards; empty otherwise.

    Raises:
        LayerError: The layer is not run, returns no floating-point tensor, or has no row of its own for each picture.
    """

    def __init__(self, model: nn.Module, layer: str | nn.Module, x: Tensor) -> None:
        self._model, self._x = model, x.detach()
        self._name, self._layer = find(model, layer)
        self.activation: Tensor
        with torch.no_grad():
            self._calls, escape = self._counted()
            tape = Tape()
            self.output = self._whole(None, tape)
            self._program, self.why = (None, escape) if escape else self._prepared(tape)

    @property
    def how(self) -> str:
        """What is computed for each call."""
        return WHOLE_FORWARDS if self._program is None else ONLY_BEHIND

    def __call__(self, activations: Tensor) -> Any:
        """The model's output for the picture, k times, each with another output of the layer.

        Args:
            activations: (k, ...), in the layout of `activation`. They are not changed.

        Raises:
            LayerError: They do not have the shape of the layer's output.
        """
        if activations.shape[1:] != self.activation.shape[1:] or activations.dim() != self.activation.dim():
            raise LayerError(
                f'layer "{self._name}" gives {tuple(self.activation.shape)}, got activations '
                f"{tuple(activations.shape)}; expected (k, {', '.join(map(str, self.activation.shape[1:]))})"
            )
        with torch.no_grad():
            rows = self._as_recorded(activations)
            if self._program is not None:
                try:
                    output = self._program(rows, len(rows))
                    return tree_map_tensors(output, lambda each: _apart(each, activations))
                except _WRONG as error:
                    if is_out_of_memory(error):
                        raise
                    self._program, self.why = None, str(error)
            return self._whole(rows)

    def _as_recorded(self, activations: Tensor) -> Tensor:
        like = self.activation
        return activations.detach().to(like.device, like.dtype).contiguous(memory_format=self._format)

    def _counted(self) -> tuple[int, str]:
        """How often the layer is called, and how values get out of tensors unseen.

        What the layer gives and the model gives is not taken from here: attention may be computed otherwise while its
        functions are looked at.
        """
        escapes = UntracedAccess()
        with HookManager() as hooks, escapes:
            calls = hooks.capture(self._layer)
            run_model(self._model, self._x)
        if not calls:
            raise LayerError(
                f'layer "{self._name}" was not run in this forward, or returned no tensor '
                "(a scripted part does not call its layers)"
            )
        if not calls[-1].is_floating_point() or calls[-1].dim() < 2 or len(calls[-1]) != 1:
            raise LayerError(
                f'the output of layer "{self._name}" is {calls[-1].dtype}, {tuple(calls[-1].shape)}; expected floating '
                "point and one row for the one picture"
            )
        return len(calls), escapes.found

    def _whole(self, rows: Tensor | None, tape: Tape | None = None) -> Any:
        """A forward of the whole model for the picture repeated, with the layer's last output replaced.

        Args:
            rows: What takes its place; None for what it is, which is kept.
            tape: What the forward is written down on, if on anything.
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
                self._format = _memory_format(self.activation)
            taken = self.activation.clone() if rows is None else rows.clone()
            if tape is not None:
                tape.begin(taken)
            return tree_map_tensors(output, lambda each: taken if each is first else each)

        with HookManager() as hooks:
            hooks.revise(self._layer, change)
            with nullcontext() if tape is None else tape:
                output = run_model(self._model, self._x.expand(count, *self._x.shape[1:]))
        if seen != self._calls:
            raise LayerError(
                f'layer "{self._name}" is called {self._calls} times for one picture and {seen} times for {count}'
            )
        if tape is not None:
            tape.end(output)
        return output

    def _prepared(self, one: Tape) -> tuple[Program | None, str]:
        """What is done behind the layer, where it gives the same as the model; else why it is not."""
        changed = self._as_recorded(_changed(self.activation))  # (3, ...)
        try:
            if one.refusal:
                raise ReplayMismatch(one.refusal)
            two = Tape()
            expected = self._whole(changed[:2], two)
            try:
                program = Program(one, two)
            except ReplayMismatch:
                # Some operations are left out for one row, as copies that make memory contiguous.
                three = Tape()
                self._whole(changed, three)
                program = Program(two, three, rows=2)
            if trees_agree(program(changed[:2], 2), expected) and trees_agree(program(self.activation, 1), self.output):
                return program, ""
        except _WRONG as error:
            return None, str(error)
        return None, "the operations behind the layer do not give again what the model gave"


def _changed(activation: Tensor) -> Tensor:
    """Three other outputs of a layer (3, ...), about as large as this one."""
    random = torch.Generator().manual_seed(0)
    scale = activation.abs().max().clamp(min=torch.finfo(activation.dtype).tiny)

    def drawn() -> Tensor:
        return torch.rand(activation.shape, generator=random, dtype=torch.float64, device="cpu").to(activation)

    some = activation * (drawn() < 0.5).to(activation) + 0.1 * scale * drawn()
    return torch.cat([activation * drawn(), some, activation * drawn() - 0.1 * scale * drawn()])


def _apart(output: Tensor, activations: Tensor) -> Tensor:
    """An output that is not the memory of what the caller gave."""
    same = output.untyped_storage().data_ptr() == activations.untyped_storage().data_ptr()
    return output.clone() if same else output


def _memory_format(tensor: Tensor) -> torch.memory_format:
    last = tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format
