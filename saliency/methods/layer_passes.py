"""Base of methods that read a layer of an image once, and then run the model many times."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..attribution.forward import Needs, SharedForward
from ..attribution.options import PositionalOption
from ..attribution.questions import Questions
from ..axes import at_least_float32, spatial
from ..engine.multi_pass import MultiPassAttribution, Passes
from ..layers.find import LayerLike, default_layer
from .cam import layer_name, warn_if_signed


class LayerOutput:
    """Output of a layer for one image, and the channel and location of each of its values.

    Args:
        forward: A forward of the image (1, C, H, W), with the layer.

    Attributes:
        layer: The layer's name.
        raw: (1, ...) the output in its own layout.
        maps: (K, h, w) the output as maps; half precision as float32.
        output: The output of the model.
    """

    def __init__(self, forward: SharedForward) -> None:
        ((self.layer, self.raw),) = forward.layers.items()
        self.output, layout = forward.output, forward.layout(self.layer)
        self.maps = at_least_float32(layout(self.raw)[0])
        positions = torch.arange(self.raw.numel(), device=self.raw.device).view(self.raw.shape)
        self._positions = layout(positions)[0].flatten(1)  # (K, h * w) the index of each value in the raw output

    def without(self, channels: Tensor) -> Tensor:
        """Return the raw output (k, ...), where the channels (k, m) of each row are set to 0."""
        rows = self.raw.flatten()[None].repeat(len(channels), 1)
        rows.scatter_(1, self._positions[channels].flatten(1), 0)
        return rows.view(-1, *self.raw.shape[1:])

    def scaled(self, factors: Tensor) -> Tensor:
        """Return the raw output (k, ...), where the locations of each row are scaled by factors (k, h, w).

        Values without a location, such as class tokens, are unchanged.
        """
        rows = self.raw.flatten()[None].repeat(len(factors), 1)
        rows[:, self._positions] *= factors.to(rows).flatten(1)[:, None]
        return rows.view(-1, *self.raw.shape[1:])

    def weighted(self, weights: Tensor) -> Tensor:
        """Return the map (1, h, w): the sum over the channels of weight (K,) times activation."""
        return torch.einsum("k,k...->...", weights.to(self.maps), self.maps)[None]


class LayerPasses(MultiPassAttribution):
    """Base class of methods that read a layer of one image once, and then run the model many times.

    Args:
        layer: A dotted name, the module, or None for the last layer with spatial output; see `LayerAttribution`.

    Raises:
        LayerError: The layer does not exist, is not run, or has no spatial output.
    """

    sign = "positive"
    assumes_unsigned: ClassVar[bool] = True
    """As for `LayerCombination`."""

    layer: PositionalOption[LayerLike, str | None] = PositionalOption(check=layer_name, default=None, kw_only=False)

    def layers_for(self, x: Tensor, target: Questions) -> tuple[str, ...]:
        """Return the layer of a single image, unless the caller's autocast would round its output."""
        if len(x) > 1 or torch.is_autocast_enabled(x.device.type):
            return ()
        return (self.layer or default_layer(self.model, x, target),)

    def read_layer(self, passes: Passes) -> LayerOutput:
        """Read the layer, in the forward of the score if possible, else in one forward of the image.

        Raises:
            LayerError: The layer is not run, or has no spatial output.
        """
        if (forward := passes.forward) is None:
            name = self.layer or default_layer(self.model, passes.x, passes.target(1))
            forward = SharedForward(self.model, passes.x, Needs("none", layers=(name,)))
        layer = LayerOutput(forward)
        if self.assumes_unsigned:
            warn_if_signed(self.name, layer.maps[None])
        return layer


def stretched(maps: Tensor) -> Tensor:
    """Return maps (N, K, H, W), each stretched to 0..1; constant ones become 0."""
    low, high = maps.amin(axes := spatial(maps), keepdim=True), maps.amax(axes, keepdim=True)
    return (maps - low) / torch.where(high == low, torch.ones_like(high), high - low)
