"""CAMs from what the score loses, or keeps, when parts of a layer's output are taken away."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attribution.explanation import Sign
from ..attribution.options import EngineOptions
from ..engine.multi_pass import ImageAttribution, MultiPassAttribution
from ..engine.partial.tail import TailForward
from ..engine.runner import PassRunner
from ..errors import NotApplicableError, TargetError
from ..hooks.manager import HookManager
from ..hooks.model_state import run_model
from ..hooks.pytree import first_tensor, tree_map_tensors, tree_tensors
from ..layers.find import LayerLike
from ..validation import check_choice
from .cam import _linear_head, warn_if_signed
from .layer_reader import LayerReader, Reading, channel_count, strongest


class AblationCAM(MultiPassAttribution):
    """Activations weighted by what the score loses when the channel is set to zero.

    The weight of a channel is y - y_k, with y the score and y_k that without the channel: positive where the channel
    speaks for the target, also for a negative score. (The paper divides by y, which is the same for all channels and
    turns the map around where y is negative.)

    Only the part of the model behind the layer is run for each channel. Where that is pooling and one linear layer,
    which is checked on the call itself, the losses are known without any run. Channels that are zero everywhere lose
    nothing. The part is run exactly, whatever `precision` says.

    Args:
        model: As for every method.
        layer: As for `GradCAM`.
        channels: How many channels to take away, those with the greatest energy; None for all.
        **running: See `saliency.attribution.options.EngineOptions`.

    Values: (N, 1, h, w), signed, in units of score times activation.

    Warns:
        SaliencyWarning: The activations are signed. Use `GradCAM`, or choose a layer behind a ReLU.

    Raises:
        LayerError: The layer does not exist, is not run, or has no extent in space.
        MethodError: The number of channels is none.
        TargetError: The target does not fit the model's output.

    Source: Desai and Ramaswamy, "Ablation-CAM" (2020), https://doi.org/10.1109/WACV45572.2020.9093360.
    """

    name = "ablation_cam"
    cost = "2 forwards, 1 pass from the layer on for each channel; 3 forwards before pooling and a linear layer"
    units = "score times activation"
    sign: ClassVar[Sign] = "positive"

    def __init__(
        self,
        model: nn.Module,
        layer: LayerLike = None,
        *,
        channels: int | None = None,
        **running: Unpack[EngineOptions],
    ) -> None:
        super().__init__(model, **running)
        self._reader = LayerReader(self.model, layer)
        self.layer = self._reader.layer
        self.channels = channel_count(channels)

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """The map of one image."""
        reading = self._reader(passes.x, passes.target(1))
        warn_if_signed(self.name, reading.maps[None])
        energy = reading.maps.square().flatten(1).sum(1)
        order = torch.tensor(
            strongest(energy, self.channels, energy.nonzero().flatten().tolist()),
            device=energy.device,
            dtype=torch.long,
        )
        weights = torch.zeros_like(energy)
        if len(order):
            drops = self._in_closed_form(passes, reading, order, score)
            if drops is None:
                drops = self._measured(passes, reading, order, score)
            weights[order] = drops.to(weights)
        return ImageAttribution(reading.weighted(weights), layer=reading.layer)

    def _measured(self, passes: PassRunner, reading: Reading, order: Tensor, score: Tensor) -> Tensor:
        """What the score loses without each of the channels (m,), by running what lies behind the layer."""
        behind = TailForward(self.model, reading.layer, passes.x)
        passes.notes.append(behind.how)
        drops = score.new_zeros(len(order))

        def compute(start: int, stop: int) -> tuple[int, Tensor]:
            with torch.no_grad():
                scores = passes.target(stop - start)(behind(reading.without(order[start:stop])))
            return start, score - scores

        for start, lost in passes.chunks(compute, len(order), f"behind {reading.layer}"):
            drops[start : start + len(lost)] = lost
        return drops

    def _in_closed_form(self, passes: PassRunner, reading: Reading, order: Tensor, score: Tensor) -> Tensor | None:
        """The same (m,) where all that lies behind the layer is pooling and a linear layer; None where it is not.

        One forward without half of the channels says whether the formula holds.
        """
        tensors = list(tree_tensors(reading.output))
        if len(tensors) != 1:
            return None
        try:
            weight = _linear_head(self.model, reading.maps[None], reading.output, reading.layer)  # (classes, K)
        except (NotApplicableError, TargetError):  # the latter where only the target knows the scores in the output
            return None
        clean = tensors[0]
        losses = (weight * reading.maps.mean((1, 2)))[:, order]  # (classes, m)
        half = order[::2]

        def check(start: int, stop: int) -> bool:
            with torch.no_grad():
                output = self._replaced(passes.x, reading, reading.without_groups(half[None]))
            changed = first_tensor(output)
            expected = clean - losses[:, ::2].sum(1)
            return changed is not None and _agree(changed, expected)

        if not all(list(passes.chunks(check, 1, "check"))):
            return None
        passes.notes.append("in closed form: behind the layer are only pooling and one linear layer")
        rows = (clean - losses.T).to(clean)  # (m, classes)
        scores = passes.target(len(order))(tree_map_tensors(reading.output, lambda each: rows))
        return score - scores

    def _replaced(self, x: Tensor, reading: Reading, raw: Tensor) -> Any:
        """The model's output with another output of the layer, in its last call."""
        calls = 0

        def change(output: Any) -> Any:
            nonlocal calls
            calls += 1
            first = first_tensor(output)
            if calls != reading.calls or first is None:
                return None
            return tree_map_tensors(output, lambda each: raw.clone() if each is first else each)

        with HookManager() as hooks:
            hooks.revise(self.model.get_submodule(reading.layer), change)
            return run_model(self.model, x)


class ReciproCAM(MultiPassAttribution):
    """What the score rises to when the layer shows one place only.

    In each run all of the layer's output is scaled to zero but for one place and its neighbours, which are scaled to
    1/4 (itself), 1/8 (beside it) and 1/16 (at its corners). What stands for no place, as a class token, stays. A
    place's value is the score that this gives, less that of a layer with no place at all. (The paper takes class
    probabilities, and shows them stretched to 0..1: the target `saliency.probability(...)`.)

    Only the part of the model behind the layer is run for each place, exactly, whatever `precision` says.

    Args:
        model: As for every method.
        layer: As for `GradCAM`.
        alone: Whether each place is shown as it is, and without its neighbours. With only pooling and one linear layer
            behind the layer, the values are then those of `CAM` over the number of places.
        **running: See `saliency.attribution.options.EngineOptions`.

    Values: (N, 1, h, w), signed, in score units.

    Raises:
        LayerError: The layer does not exist, is not run, or has no extent in space.
        TargetError: The target does not fit the model's output.

    Source: Byun and Lee, "Recipro-CAM" (2022), https://arxiv.org/abs/2209.14074; for class tokens Byun and Lee,
        "ViT-ReciproCAM" (2023), https://arxiv.org/abs/2310.02588.
    """

    name = "recipro_cam"
    cost = "2 forwards, 1 pass from the layer on for each place"
    units = "score"
    sign: ClassVar[Sign] = "positive"
    quick_options: ClassVar[Mapping[str, Any]] = {"chunk": 16}

    def __init__(
        self, model: nn.Module, layer: LayerLike = None, *, alone: bool = False, **running: Unpack[EngineOptions]
    ) -> None:
        super().__init__(model, **running)
        self._reader = LayerReader(self.model, layer)
        self.layer = self._reader.layer
        self.alone = bool(check_choice("alone", alone, (True, False)))

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """The map of one image."""
        reading = self._reader(passes.x, passes.target(1))
        behind = TailForward(self.model, reading.layer, passes.x)
        passes.notes.append(behind.how)
        height, width = reading.maps.shape[1:]
        count = height * width
        # Pass 0 shows no place, pass 1 + i the place i.
        scores = score.new_zeros(1 + count)

        def compute(start: int, stop: int) -> tuple[int, Tensor]:
            with torch.no_grad():
                shares = torch.zeros(stop - start, 1 + count, device=scores.device, dtype=reading.maps.dtype)
                shares[torch.arange(stop - start, device="cpu"), torch.arange(start, stop, device="cpu")] = 1
                rows = reading.at_places(self._faded(shares[:, 1:].view(-1, height, width)))
                return start, passes.target(stop - start)(behind(rows))

        known = 0
        for start, found in passes.chunks(compute, 1 + count, f"behind {reading.layer}"):
            scores[start : start + len(found)] = found
            known = start + len(found)
        scores[known:] = scores[0]
        values = (scores[1:] - scores[0]).view(1, height, width)
        return ImageAttribution(values.to(reading.maps), layer=reading.layer)

    def _faded(self, shares: Tensor) -> Tensor:
        """The places (k, h, w) with their neighbours, unless each is to be alone."""
        if self.alone:
            return shares
        near = torch.tensor([0.25, 0.5, 0.25], device=shares.device, dtype=shares.dtype)
        return F.conv2d(shares[:, None], torch.outer(near, near)[None, None], padding=1)[:, 0]


def _agree(found: Tensor, expected: Tensor) -> bool:
    rounding = 1e-6 if found.dtype == torch.float64 else 1e-3 if found.dtype == torch.float32 else 3e-2
    return bool(torch.allclose(found, expected.to(found), rtol=rounding, atol=rounding * float(expected.abs().max())))
