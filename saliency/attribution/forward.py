"""One forward of the model, and every gradient that methods ask of it.

Any number of methods and targets read the same forward. A gradient is computed when it is first asked for, and once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import LayerError, TargetError
from ..hooks.manager import HookManager, Rule
from ..hooks.model_state import leaf, run_model
from ..hooks.rectifiers import CUT, INDEPENDENT, Site, Sites, find_sites, refuse_checkpoints
from ..layers.find import layout_of
from ..layers.layout import Layout
from .resolved_target import ResolvedTarget


class SharedForward:
    """One forward of a borrowed model on a batch, with the outputs of some layers kept.

    Args:
        model: The model, borrowed by the caller.
        x: The batch (N, C, H, W).
        layers: The names of the layers to keep.
        gradients: "input" records from the input on; "layers" from the first of the layers on, which needs no memory
            for what lies before it; "none" records nothing.
        backwards: How many backward passes will be asked for, at most. The last one frees the graph as it goes, which
            is up to a tenth faster than keeping it. None keeps it for any number.
    """

    def __init__(
        self,
        model: nn.Module,
        x: Tensor,
        layers: Iterable[str] = (),
        gradients: str = "input",
        backwards: int | None = None,
    ) -> None:
        self.model = model
        self.recorded = gradients
        self._backwards_left = backwards
        self.x = leaf(x) if gradients == "input" else x.detach()
        with HookManager() as hooks:
            captured = {
                name: hooks.capture(model.get_submodule(name), record=gradients == "layers")
                for name in dict.fromkeys(layers)
            }
            with torch.set_grad_enabled(gradients == "input"):
                self.output: Any = run_model(model, self.x)
        self.layers = {name: _last_call(name, calls) for name, calls in captured.items()}
        self._layouts: dict[str, Layout] = {}

    def layout(self, name: str) -> Layout:
        """How the output of a kept layer lies in memory. Raises LayerError where it has no extent in space."""
        if name not in self._layouts:
            self._layouts[name] = layout_of(self.model, name, self.layers[name], self.x)
        return self._layouts[name]

    def gradients(self, score: Tensor, at: list[Tensor]) -> list[Tensor | None]:
        """The gradients of a score of this forward at some of its tensors; None where it does not depend on one."""
        if self._backwards_left == 0:
            raise RuntimeError(
                "more backward passes than the methods' class attribute `backwards` says; raise it there"
            )
        last = self._backwards_left == 1
        if self._backwards_left is not None:
            self._backwards_left -= 1
        wanted = [each for each in at if each.requires_grad]
        try:
            found = iter(torch.autograd.grad(score, wanted, retain_graph=not last, allow_unused=True) if wanted else ())
        except RuntimeError:
            refuse_checkpoints(score)
            raise
        return [next(found) if each.requires_grad else None for each in at]

    def evidence(self, selection: ResolvedTarget) -> TargetGradients:
        """What this forward says of one target."""
        return TargetGradients(self, selection)


class TargetGradients:
    """What one forward says of one target: scores, activations and gradients."""

    def __init__(self, trace: SharedForward, selection: ResolvedTarget) -> None:
        self.trace = trace
        self.selection = selection
        self._scores = selection(trace.output)
        self._layer_gradients: dict[str, Tensor] | None = None
        self._input_gradient: Tensor | None = None
        self._sites: Sites | None = None

    @property
    def x(self) -> Tensor:
        """The batch (N, C, H, W)."""
        return self.trace.x.detach()

    @property
    def scores(self) -> Tensor:
        """The scores (N,)."""
        return self._scores.detach()

    def activation(self, layer: str) -> Tensor:
        """The output of a layer as maps (N, K, h, w)."""
        return at_least_float32(self.trace.layout(layer)(self.trace.layers[layer].detach()))

    def gradient(self, layer: str) -> Tensor:
        """The gradient of the scores at a layer (N, K, h, w). One backward serves all layers of the trace."""
        layout = self.trace.layout(layer)
        if self._layer_gradients is None:
            kept = self.trace.layers
            gradients = self._gradients(list(kept.values()))
            self._layer_gradients = {
                name: torch.zeros_like(kept[name]) if gradient is None else gradient
                for name, gradient in zip(kept, gradients, strict=True)
            }
            if all(gradient is None for gradient in gradients):
                raise LayerError(independent_of(layer))
        return at_least_float32(layout(self._layer_gradients[layer]))

    def input_gradient(self) -> Tensor:
        """The gradient of the scores at the input (N, C, H, W)."""
        if self._input_gradient is None:
            self._input_gradient = self._backward_to_input()
        return self._input_gradient

    def sites(self) -> Sites:
        """The nonlinearities between the scores and the input."""
        self.require_gradient()
        if self._sites is None:
            self._sites = find_sites(self._scores, self.trace.x)
        return self._sites

    def rewritten_gradient(self, sites: Iterable[Site], rule_for: Callable[[Site], Rule]) -> Tensor:
        """What arrives at the input (N, C, H, W) when a rule rewrites the gradient at some sites."""
        with HookManager() as hooks:
            hooks.rewrite(sites, rule_for)
            return self._backward_to_input()

    def _backward_to_input(self) -> Tensor:
        (gradient,) = self._gradients([self.trace.x])
        if gradient is None:
            raise TargetError(INDEPENDENT)
        return gradient

    def _gradients(self, at: list[Tensor]) -> list[Tensor | None]:
        self.require_gradient()
        return self.trace.gradients(self._scores.sum(), at)

    def require_gradient(self) -> None:
        """Raise where the scores have no gradient.

        Raises:
            LayerError: They have one, but not at the layers that gradients are recorded from.
            TargetError: They have none at all.
        """
        if self._scores.requires_grad:
            return
        if self.trace.recorded == "layers" and self._has_gradient():
            raise LayerError(independent_of(*self.trace.layers))
        raise TargetError(
            "the score has no gradient: the target or the model detaches it, or takes an argmax or a number of it"
        )

    def _has_gradient(self) -> bool:
        """Return whether the scores have a gradient at the input. Runs the model again, only to word an error."""
        whole = SharedForward(self.trace.model, self.trace.x)
        scores = self.selection(whole.output)
        return scores.requires_grad and whole.gradients(scores.sum(), [whole.x])[0] is not None


def independent_of(*layers: str) -> str:
    """Return the message for layers that no gradient reaches."""
    names = ", ".join(f'"{each}"' for each in layers)
    return (
        f"no gradient of the score reaches layer {names}: the score does not depend on layer {names}, or {CUT}; choose "
        "a layer that the score is computed from, or name none, and the last such layer is found"
    )


def at_least_float32(maps: Tensor) -> Tensor:
    """Half precision as float32: a sum over a map overflows or drowns in it."""
    return maps.float() if maps.dtype in (torch.float16, torch.bfloat16) else maps


def _last_call(name: str, calls: list[Tensor]) -> Tensor:
    """The output of the layer's last call; a module that is used many times is read at its last use."""
    if not calls:
        raise LayerError(
            f'layer "{name}" was not run in this forward, or returned no tensor '
            "(a scripted part does not call its layers)"
        )
    if not calls[-1].is_floating_point():
        raise LayerError(f'the output of layer "{name}" is {calls[-1].dtype}; expected floating-point activations')
    return calls[-1]
