"""CAMs that read a layer of one image once, and then run the model many times."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ..attribution.forward import at_least_float32
from ..attribution.options import PositionalOption
from ..engine.multi_pass import MultiPassAttribution
from ..engine.runner import PassRunner
from ..errors import LayerError
from ..hooks.manager import HookManager
from ..hooks.model_state import run_model
from ..layers.find import LayerLike, layout_of
from ..layers.layout import Layout
from .cam import default_layer, layer_name, warn_if_signed


class LayerOutput:
    """Output of a layer for one image, and the channel and location of each of its values.

    Attributes:
        layer: The layer's name.
        raw: (1, ...) the output as it lies in memory.
        maps: (K, h, w) the output as maps; half precision as float32.
        output: The output of the model.
        calls: How often the model calls the layer; the last call counts.
    """

    def __init__(self, layer: str, raw: Tensor, layout: Layout, output: Any, calls: int) -> None:
        self.layer, self.raw, self.output, self.calls = layer, raw, output, calls
        self.maps = at_least_float32(layout(raw)[0])
        positions = torch.arange(raw.numel(), device=raw.device).view(raw.shape)
        self._positions = layout(positions)[0].flatten(1)  # (K, h * w) the index of each value in the raw output

    def without(self, channels: Tensor) -> Tensor:
        """Return the raw output (k, ...), where the channels (k, m) of each row are set to 0."""
        rows = self.raw.flatten()[None].repeat(len(channels), 1)
        rows.scatter_(1, self._positions[channels].flatten(1), 0)
        return rows.view(-1, *self.raw.shape[1:])

    def scaled(self, factors: Tensor) -> Tensor:
        """Return the raw output (k, ...), where the locations of each row are scaled by factors (k, h, w).

        Values without a location, such as class tokens, stay.
        """
        rows = self.raw.flatten()[None].repeat(len(factors), 1)
        rows[:, self._positions] *= factors.to(rows).flatten(1)[:, None]
        return rows.view(-1, *self.raw.shape[1:])

    def weighted(self, weights: Tensor) -> Tensor:
        """Return the map (1, h, w): the sum over the channels of weight (K,) times activation."""
        return torch.einsum("k,khw->hw", weights.to(self.maps), self.maps)[None]


class LayerPasses(MultiPassAttribution):
    """Base class of methods that read a layer and make many passes.

    Args:
        model: As for every method.
        layer: As for `GradCAM`.
        **options: The options of the method's other base class.
    """

    sign = "positive"
    assumes_unsigned: ClassVar[bool] = True
    """Whether large activations count as evidence, so that signed ones need a warning."""

    layer: PositionalOption[LayerLike, str | None] = PositionalOption(check=layer_name, default=None, kw_only=False)

    def read_layer(self, passes: PassRunner) -> LayerOutput:
        """Read the layer in one forward of the image.

        Raises:
            LayerError: The layer is not run, or has no spatial output.
        """
        name = self.layer or default_layer(self.model, passes.x, passes.target(1))
        with HookManager() as hooks, torch.no_grad():
            calls = hooks.capture(self.model.get_submodule(name))
            output = run_model(self.model, passes.x)
        if not calls or not calls[-1].is_floating_point():
            raise LayerError(
                f'layer "{name}" was not run in this forward, or returned no floating-point tensor '
                "(a scripted part does not call its layers)"
            )
        layout = layout_of(self.model, name, calls[-1], passes.x)
        result = LayerOutput(name, calls[-1], layout, output, len(calls))
        if self.assumes_unsigned:
            warn_if_signed(self.name, result.maps[None])
        return result


def strongest(strength: Tensor, limit: int | None) -> Tensor:
    """Return the channels by falling strength (K,), at most `limit` of them; ties by number."""
    return torch.sort(strength, descending=True, stable=True).indices[:limit]
