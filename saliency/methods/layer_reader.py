"""One layer of one image, read for methods that change it, or the image, many times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import LayerError
from ..hooks.manager import HookManager
from ..hooks.model_state import run_model
from ..layers.find import LayerLike, layout_of
from ..layers.layout import Layout
from ..validation import check_whole_number
from .cam import GradCAM


class Reading:
    """The output of a layer for one image, and which of its numbers are which channel and place.

    Attributes:
        layer: The layer's name.
        raw: (1, ...) its output as it lies in memory.
        maps: (K, h, w) the same as maps; half precision as float32.
        output: What the model returned.
        calls: How often the model calls the layer; the last call is read.
    """

    def __init__(self, layer: str, raw: Tensor, layout: Layout, output: Any, calls: int) -> None:
        self.layer, self.raw, self.output, self.calls = layer, raw, output, calls
        maps = layout(raw)[0]
        self.maps = maps.float() if maps.dtype in (torch.float16, torch.bfloat16) else maps
        numbers = torch.arange(raw.numel(), device=raw.device).view(raw.shape)
        self._numbers = layout(numbers)[0].flatten(1)  # (K, h * w) where in the raw output each value lies

    def without(self, channels: Tensor) -> Tensor:
        """The raw output (k, ...), in each row of which one of the channels (k,) is 0 everywhere."""
        return self.without_groups(channels[:, None])

    def without_groups(self, channels: Tensor) -> Tensor:
        """The raw output (k, ...), in each row of which all channels of that row (k, m) are 0 everywhere."""
        rows = self.raw.flatten()[None].repeat(len(channels), 1)
        rows.scatter_(1, self._numbers[channels].flatten(1), 0)
        return rows.view(-1, *self.raw.shape[1:])

    def at_places(self, shares: Tensor) -> Tensor:
        """The raw output (k, ...), in each row of which all channels are scaled place by place by shares (k, h, w).

        What stands for no place, as a class token, stays.
        """
        factors = self.raw.new_ones(len(shares), self.raw.numel())
        every = self._numbers.flatten()  # (K * h * w)
        factors[:, every] = shares.to(factors).flatten(1).repeat(1, len(self._numbers))
        return (self.raw.flatten() * factors).view(-1, *self.raw.shape[1:])

    def weighted(self, weights: Tensor) -> Tensor:
        """The map (1, h, w): the sum over the channels of weight (K,) times activation."""
        return torch.einsum("k,khw->hw", weights.to(self.maps), self.maps)[None]


class LayerReader:
    """Reads the layer that was named, or the one that is found by itself.

    Args:
        model: The model.
        layer: As for `GradCAM`.
    """

    def __init__(self, model: nn.Module, layer: LayerLike) -> None:
        self._model = model
        self._finder = GradCAM(model, layer)
        self.layer = self._finder.layer

    def __call__(self, x: Tensor, target: Callable[[Any], Tensor]) -> Reading:
        """What one forward of one image (1, C, H, W) shows of the layer.

        Args:
            x: The image.
            target: The scores (1,) of an output.

        Raises:
            LayerError: The layer is not run, or has no extent in space.
        """
        (name,) = self._finder.layers(x, target)
        with HookManager() as hooks, torch.no_grad():
            calls = hooks.capture(self._model.get_submodule(name))
            output = run_model(self._model, x)
        if not calls or not calls[-1].is_floating_point():
            raise LayerError(
                f'layer "{name}" was not run in this forward, or returned no floating-point tensor '
                "(a scripted part does not call its layers)"
            )
        raw = calls[-1]
        return Reading(name, raw, layout_of(self._model, name, raw, x), output, len(calls))


class Masks:
    """The masks (H, W), 0 to 1, that a layer's channels put on an image.

    A channel's map is resized bilinearly to the image and stretched to 0..1. A channel that is the same everywhere
    shows no place: its mask is 0 everywhere. All of these leave the same image, so that one forward serves them all.

    Attributes:
        varied: The channels that show places, those that vary most first.
        flat: How many channels are the same everywhere.
    """

    def __init__(self, reading: Reading, x: Tensor, channels: int | None, *, align_corners: bool) -> None:
        self._x, self._maps, self._align = x, reading.maps, align_corners
        deviation = self._maps.flatten(1).std(1, correction=0)
        is_flat = self._maps.flatten(1).amax(1) == self._maps.flatten(1).amin(1)
        chosen = strongest(deviation.masked_fill(is_flat, 0), channels, range(len(self._maps)))
        flat = set(is_flat.nonzero().flatten().tolist())
        self.varied = [each for each in chosen if each not in flat]
        self.flat = len(chosen) - len(self.varied)
        self._order = torch.tensor(self.varied, device=x.device, dtype=torch.long)

    @property
    def groups(self) -> int:
        """How many different masks there are: those of the channels in `varied`, and one last for all flat ones."""
        return len(self.varied) + bool(self.flat)

    def __call__(self, groups: Tensor) -> Tensor:
        """The masks (k, 1, H, W) of some groups (k,), by number."""
        masks = self._x.new_zeros(len(groups), 1, *self._x.shape[-2:])
        shown = groups < len(self.varied)
        if not bool(shown.any()):
            return masks
        maps = self._maps[self._order[groups[shown]]][:, None]  # (k, 1, h, w)
        large = F.interpolate(maps, self._x.shape[-2:], mode="bilinear", align_corners=self._align)
        low, high = large.amin((2, 3), keepdim=True), large.amax((2, 3), keepdim=True)
        span = torch.where(high == low, torch.ones_like(high), high - low)
        masks[shown] = ((large - low) / span).to(masks)
        return masks

    def weights(self, scores: Tensor, clean: Tensor) -> Tensor:
        """The groups' shares (g,): the softmax over all channels of the scores (g,), of which NaN means unknown.

        Where no mask changes the score there is nothing to tell channels apart by, and all are 0.
        """
        known = ~scores.isnan()
        if not bool((scores[known] != clean.to(scores)).any()):
            return torch.zeros_like(scores)
        counts = torch.ones_like(scores)
        counts[len(self.varied) :] = self.flat
        return torch.where(known, scores + counts.log(), -math.inf).softmax(0)

    def spread(self, shares: Tensor, channels: int) -> Tensor:
        """The weights (K,) of all channels, from the groups' shares (g,); flat channels get none."""
        weights = shares.new_zeros(channels)
        weights[self._order.to(weights.device)] = shares[: len(self.varied)]
        return weights

    @property
    def note(self) -> str:
        """Which channels were used."""
        left = len(self._maps) - len(self.varied) - self.flat
        said = [f"{len(self.varied)} of {len(self._maps)} channels as masks"]
        said += [f"one forward for the {self.flat} that are the same everywhere"] if self.flat else []
        return ", ".join(said + ([f"{left} left out"] if left else []))


def strongest(strength: Tensor, most: int | None, among: Iterable[int]) -> list[int]:
    """The channels with the greatest strength (K,), at most so many, the strongest first; ties by number."""
    found = list(among)
    order = torch.sort(strength[found], descending=True, stable=True).indices.tolist()
    return [found[at] for at in order][:most]


def channel_count(channels: int | None) -> int | None:
    """The option `channels`, checked. Raises MethodError for what is no number of channels."""
    return None if channels is None else check_whole_number("channels", channels)
