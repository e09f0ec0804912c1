"""CAMs from the score after parts of a layer's output are removed: single channels, or all locations but one."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attribution.options import Option
from ..engine.multi_pass import ImageAttribution
from ..engine.runner import MakeInputs, PassRunner
from ..engine.tail import TailForward
from ..errors import NotApplicableError, TargetError
from ..hooks.manager import HookManager
from ..hooks.model_state import run_model
from ..hooks.pytree import first_tensor, tree_map_tensors, tree_tensors
from ..validation import check_flag, check_integer
from .cam import linear_head
from .layer_passes import LayerOutput, LayerPasses, strongest


class _TailCAM(LayerPasses):
    """Base class of methods that change the output of a layer and run the rest of the model."""

    def tail_scores(self, passes: PassRunner, layer: LayerOutput, make: MakeInputs, count: int) -> Tensor:
        """Return the scores (k,) for the layer's outputs (k, ...) that `make` creates; k < `count` after an interrupt.

        Only the part of the model after the layer runs, where that is possible.
        """
        tail = TailForward(self.model, layer.layer, passes.x)
        passes.notes.append(tail.how)

        def compute(start: int, stop: int) -> Tensor:
            with torch.no_grad():
                return passes.target(stop - start)(tail(make(start, stop)))

        return torch.cat(list(passes.chunks(compute, count, f"behind {layer.layer}")))


class AblationCAM(_TailCAM):
    """Activations weighted by the fall of the score when the channel is set to zero.

    The weight of a channel is y - y_k, where y is the score and y_k the score without the channel: positive if the
    channel supports the target, also for a negative score. (The paper divides by y, which is the same for all channels
    and inverts the map if y is negative.)

    Only the part of the model after the layer runs for each channel. If that is pooling and one linear layer, which
    each call checks, the weights are known without these runs. Channels that are zero everywhere change nothing. The
    part runs exactly, whatever `precision` is.

    Args:
        model: As for every method.
        layer: As for `GradCAM`.
        channels: How many channels to remove, by falling energy; None for all.
        **options: As for `saliency.MultiPassAttribution`.

    Values: (N, 1, h, w), signed, in units of score times activation.

    Warns:
        SaliencyWarning: The activations are signed. Use `GradCAM`, or choose a layer after a ReLU.

    Raises:
        LayerError: The layer does not exist, is not run, or has no spatial output.
        MethodError: An option is invalid.
        TargetError: The target does not fit the model's output.

    Source: Desai and Ramaswamy, "Ablation-CAM" (2020), https://doi.org/10.1109/WACV45572.2020.9093360.
    """

    name = "ablation_cam"
    cost = "2 forwards, 1 pass from the layer on for each channel; 3 forwards before pooling and a linear layer"
    units = "score times activation"

    channels: Option[int | None] = Option(None, check_integer)

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """Compute the map of one image."""
        layer = self.read_layer(passes)
        energy = layer.maps.square().flatten(1).sum(1)
        channels = strongest(energy, self.channels)
        channels = channels[energy[channels] > 0]
        weights = torch.zeros_like(energy)
        if len(channels):
            scores = self._scores_in_closed_form(passes, layer, channels)
            if scores is None:
                scores = self.tail_scores(
                    passes, layer, lambda start, stop: layer.without(channels[start:stop, None]), len(channels)
                )
            weights[channels[: len(scores)]] = (score - scores).to(weights)
        return ImageAttribution(layer.weighted(weights), layer=layer.layer)

    def _scores_in_closed_form(self, passes: PassRunner, layer: LayerOutput, channels: Tensor) -> Tensor | None:
        """The scores (m,) without each channel if only pooling and a linear layer follow; else None.

        One forward without half of the channels tests the formula.
        """
        tensors = list(tree_tensors(layer.output))
        if len(tensors) != 1:
            return None
        try:
            weight = linear_head(self.model, layer.maps[None], layer.output, layer.layer)  # (classes, K)
        except (NotApplicableError, TargetError):  # the latter if only the target knows the scores in the output
            return None
        clean = tensors[0]
        losses = (weight * layer.maps.mean((1, 2)))[:, channels]  # (classes, m)

        def check(start: int, stop: int) -> bool:
            with torch.no_grad():
                output = self._run_with(passes.x, layer, layer.without(channels[None, ::2]))
            changed = first_tensor(output)
            return changed is not None and _agree(changed, clean - losses[:, ::2].sum(1))

        if not all(list(passes.chunks(check, 1, "check"))):
            return None
        passes.notes.append("in closed form: only pooling and one linear layer follow the layer")
        rows = (clean - losses.T).to(clean)  # (m, classes)
        return passes.target(len(channels))(tree_map_tensors(layer.output, lambda _: rows))

    def _run_with(self, x: Tensor, layer: LayerOutput, raw: Tensor) -> Any:
        """The model's output when the last call of the layer returns `raw`."""
        calls = 0

        def replace(output: Any) -> Any:
            nonlocal calls
            calls += 1
            first = first_tensor(output)
            if calls != layer.calls or first is None:
                return None
            return tree_map_tensors(output, lambda tensor: raw.clone() if tensor is first else tensor)

        with HookManager() as hooks:
            hooks.revise(self.model.get_submodule(layer.layer), replace)
            return run_model(self.model, x)


class ReciproCAM(_TailCAM):
    """The score when the layer shows only one location.

    Each pass scales the layer's output to zero, except for one location and its neighbours. These are scaled to 1/4
    (the location), 1/8 (beside it) and 1/16 (diagonally). Values without a location, such as a class token, stay. The
    value of a location is the resulting score, less the score of a layer without any location. (The paper takes class
    probabilities, and stretches them to 0..1 for display: the target `saliency.probability(...)`.)

    Only the part of the model after the layer runs for each location, exactly, whatever `precision` is.

    Args:
        model: As for every method.
        layer: As for `GradCAM`.
        alone: Whether to show each location unscaled and without its neighbours. If only pooling and one linear layer
            follow, the values are then those of `CAM` divided by the number of locations.
        **options: As for `saliency.MultiPassAttribution`.

    Values: (N, 1, h, w), signed, in score units.

    Raises:
        LayerError: The layer does not exist, is not run, or has no spatial output.
        TargetError: The target does not fit the model's output.

    Source: Byun and Lee, "Recipro-CAM" (2022), https://arxiv.org/abs/2209.14074; for class tokens Byun and Lee,
        "ViT-ReciproCAM" (2023), https://arxiv.org/abs/2310.02588.
    """

    name = "recipro_cam"
    cost = "2 forwards, 1 pass from the layer on for each location"
    units = "score"
    quick_options: ClassVar = {"chunk": 16}
    assumes_unsigned = False

    alone: Option[bool] = Option(False, check_flag)

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """Compute the map of one image."""
        layer = self.read_layer(passes)
        height, width = layer.maps.shape[1:]
        near = layer.maps.new_tensor([0.25, 0.5, 0.25])

        def make(start: int, stop: int) -> Tensor:
            """Pass 0 shows no location, pass 1 + i location i."""
            numbers = torch.arange(start, stop, device=near.device)
            shares = F.one_hot(numbers, 1 + height * width)[:, 1:].to(near).view(-1, 1, height, width)
            if not self.alone:
                shares = F.conv2d(shares, torch.outer(near, near)[None, None], padding=1)
            return layer.scaled(shares[:, 0])

        scores = self.tail_scores(passes, layer, make, 1 + height * width)
        values = layer.maps.new_zeros(height * width)  # zero where an interrupt came first
        values[: len(scores) - 1] = (scores[1:] - scores[0]).to(values)
        return ImageAttribution(values.view(1, height, width), layer=layer.layer)


def _agree(output: Tensor, expected: Tensor) -> bool:
    rounding = 1e-6 if output.dtype == torch.float64 else 1e-3 if output.dtype == torch.float32 else 3e-2
    return bool(torch.allclose(output, expected.to(output), rtol=rounding, atol=rounding * float(expected.abs().max())))
