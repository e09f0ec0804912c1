"""Only the part of a model after a layer, for many variants of the layer's output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import LayerError
from ..hooks.manager import HookManager
from ..hooks.model_state import run_model
from ..hooks.pytree import first_tensor, tree_map_tensors
from ..layers.find import find
from .recording import PartialForward, Program, Replay, Tape


class TailForward(PartialForward):
    """Computes a model's output for variants of one layer's output, with the part before the layer computed once.

    Args:
        model: As for `PartialForward`.
        layer: The name of the layer, or the module. If it is called several times, its last call is meant; if it
            returns several tensors, the first.
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

    def _laid_out(self, rows: Tensor) -> Tensor:
        """Return rows of the type, on the device and with the memory layout of the layer's output."""
        like = self.activation
        layout = torch.contiguous_format
        if like.dim() == 4 and not like.is_contiguous() and like.is_contiguous(memory_format=torch.channels_last):
            layout = torch.channels_last
        return rows.to(like).contiguous(memory_format=layout)

    def _look(self) -> None:
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
            rows: The other outputs; None to keep the layer's own, which is stored.
            tape: The tape that records what follows.
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
                tape.begin(replaced)
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
