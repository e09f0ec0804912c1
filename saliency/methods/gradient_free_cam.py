"""CAMs without gradients: weights from scores of masked images, or of forwards without parts of a layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attribution.forward import Needs, SharedForward, TargetGradients
from ..attribution.options import Option
from ..axes import resize, spatial
from ..engine.multi_pass import ImageAttribution, Passes, TimedAttribution
from ..errors import NotApplicableError, TargetError
from ..hooks.call import run_model
from ..hooks.manager import HookManager
from ..hooks.pytree import first_tensor, tree_map_tensors, tree_tensors
from ..validation import check_choice, check_flag, check_integer
from .cam import is_close, linear_head
from .layer_passes import LayerOutput, LayerPasses, stretched

Order = Literal["deviation", "gradient"]


def strongest(strength: Tensor, limit: int | None) -> Tensor:
    """Return the channels in descending order of strength (K,), at most `limit`; ties by number."""
    return torch.sort(strength, descending=True, stable=True).indices[:limit]


class ScoreCAM(LayerPasses, TimedAttribution):
    """Activations weighted by the score of the image masked with each channel.

    Formula: S = Σ_k w_k A_k, with w = softmax_k y(x ⊙ m_k) and m_k = up(A_k) stretched to 0..1.

    Each channel, resized and stretched to 0..1, is multiplied with the normalised image, so hidden pixels become the
    mean colour. The weights are the softmax over the channels of the resulting scores: equation 3 of the paper, whose
    baseline cancels. (The authors' code takes the class probabilities; the target `saliency.probability(...)` is the
    closest to it.) The logits of a confident model differ by much more than 1, so few channels hold most of the weight.

    Constant channels, such as dead ones, highlight nothing and have no weight. In the softmax they count with the score
    of the empty image, which takes one forward for all of them. All weights are 0 if no mask changes the score.

    Args:
        channels: The number of channels to use; None for all.
        order: The number by which channels are chosen: "deviation", the standard deviation of their activations, or
            "gradient", their mean gradient, with one more forward and a backward. `channels=300, order="gradient"` is
            gScoreCAM, proposed for the thousands of channels of CLIP. (Its authors' code also gives weight to channels
            without a pass.)
        align_corners: Whether masks are resized so that the centres of corner cells lie on the corners of the image, as
            in pytorch-grad-cam. By default the outer corners of these cells do, as in drawn maps and in the authors'
            code.

    Values: (N, 1, h, w), a weighted mean of the channels, in units of activation; zero if no mask changes the score.

    Raises:
        LayerError: No gradient reaches the layer, and `order` is "gradient".

    Warns:
        SaliencyWarning: The activations are signed. Use `GradCAM`, or choose a layer after a ReLU.

    Source: Wang et al., "Score-CAM" (2019), https://arxiv.org/abs/1910.01279; the order by gradients of Chen et al.,
        "gScoreCAM: What Objects Is CLIP Looking At?" (2022), https://doi.org/10.1007/978-3-031-26316-3_35.
    """

    name = "score_cam"
    units = "activation"
    cost = "1 forward, 1 forward for each channel that is not constant"
    draft_options: ClassVar[Mapping[str, Any]] = {}

    channels: Option[int | None] = Option(None, check_integer)
    order: Option[Order] = Option("deviation", check_choice, get_args(Order))
    align_corners: Option[bool] = Option(False, check_flag)

    def explain_image(self, passes: Passes, score: Tensor) -> ImageAttribution:
        """Compute the map of one image."""
        x, layer = passes.x, self.read_layer(passes)
        is_flat = layer.maps.flatten(1).amax(1) == layer.maps.flatten(1).amin(1)
        chosen = strongest(self._strength(passes, layer).masked_fill(is_flat, -math.inf), self.channels)
        varied = chosen[~is_flat[chosen]]  # (m,) in descending order of strength
        flat = len(chosen) - len(varied)
        used, left_out = f"{len(varied)} of {len(is_flat)} channels as masks", len(is_flat) - len(chosen)
        notes = [f"{used}, one forward for the {flat} constant channels, {left_out} left out"]
        count = len(varied) + bool(flat)  # the last mask is empty, for all constant channels
        scores = torch.full((count,), math.nan, dtype=torch.float64, device="cpu")  # NaN: not known yet

        def make(start: int, stop: int) -> Tensor:
            large = resize(layer.maps[varied[start:stop]][:, None], x.shape[2:], align_corners=self.align_corners)
            masks = x.new_zeros(stop - start, 1, *x.shape[2:])
            masks[: len(large)] = stretched(large).to(masks)
            return x * masks

        def combined() -> ImageAttribution:
            weights, known = scores.new_zeros(len(is_flat)), ~scores.isnan()
            if bool((scores[known] != score.to(scores)).any()):
                channels = torch.ones_like(scores)
                channels[len(varied) :] = flat
                shares = torch.where(known, scores + channels.log(), -math.inf).softmax(0)
                weights[varied.cpu()] = shares[: len(varied)]
            return ImageAttribution(layer.weighted(weights), layer=layer.layer, notes=notes)

        for done in passes.forwards(make, count, partial=combined):
            scores[done.start : done.start + len(done.scores)] = done.scores.to(scores)
        if bool(scores.isnan().any()):
            notes.append(f"{int((~scores.isnan()).sum())} of {count} masks were run")
        return combined()

    def _strength(self, passes: Passes, layer: LayerOutput) -> Tensor:
        """Return the number (K,) by which channels are chosen."""
        if self.order == "deviation":
            return layer.maps.flatten(1).std(1, correction=0)
        with torch.enable_grad():
            forward = SharedForward(self.model, passes.x, Needs("layers", backwards=1, layers=(layer.layer,)))
            gradient = TargetGradients(forward, passes.target(1)).gradient(layer.layer)[0]
            return gradient.mean(spatial(gradient, 1))


class AblationCAM(LayerPasses, TimedAttribution):
    """Activations weighted by the drop in the score when the channel is set to zero.

    Formula: S = Σ_k w_k A_k, with w_k = y − y(A without channel k).

    The weight of a channel is y - y_k, where y is the score and y_k the score without the channel: positive if the
    channel supports the target, also for a negative score. (The paper divides by y, which is the same for all channels
    and inverts the map if y is negative.)

    Only the part of the model after the layer runs for each channel. If this part
    is pooling and one linear layer, which each call checks, the weights are computed in closed form. Channels that are
    zero everywhere have no effect, and are not run.

    Args:
        channels: The number of channels to remove, in descending order of energy; None for all.

    Values: (N, 1, h, w), signed, in units of score times activation.

    Warns:
        SaliencyWarning: The activations are signed. Use `GradCAM`, or choose a layer after a ReLU.

    Source: Desai and Ramaswamy, "Ablation-CAM" (2020), https://doi.org/10.1109/WACV45572.2020.9093360.
    """

    name = "ablation_cam"
    cost = "1 forward, 1 pass from the layer on for each channel; 2 forwards before pooling and a linear layer"
    units = "score times activation"

    channels: Option[int | None] = Option(None, check_integer)

    def explain_image(self, passes: Passes, score: Tensor) -> ImageAttribution:
        """Compute the map of one image."""
        layer = self.read_layer(passes)
        energy = layer.maps.square().flatten(1).sum(1)
        channels = strongest(energy, self.channels)
        channels = channels[energy[channels] > 0]
        weights, count, notes = torch.zeros_like(energy), len(channels), list[str]()
        if count:
            scores = self._scores_in_closed_form(passes, layer, channels)
            if scores is not None:
                notes.append("in closed form: only pooling and one linear layer follow the layer")
            else:
                scores = passes.tail_scores(layer.layer, lambda i, j: layer.without(channels[i:j, None]), count)
            weights[channels[: len(scores)]] = (score - scores).to(weights)
            if len(scores) < count:
                notes.append(f"{len(scores)} of {count} channels, in descending order of energy")
        return ImageAttribution(layer.weighted(weights), layer=layer.layer, notes=notes)

    def _scores_in_closed_form(self, passes: Passes, layer: LayerOutput, channels: Tensor) -> Tensor | None:
        """Return the scores (m,) without each channel if only pooling and a linear layer follow; else None.

        One forward without half of the channels tests the formula.
        """
        tensors = list(tree_tensors(layer.output))
        if len(tensors) != 1:
            return None
        try:
            weight = linear_head(self.model, layer.maps[None], layer.output, layer.layer)  # (classes, K)
        except (NotApplicableError, TargetError):  # TargetError: only the target can read the scores from the output
            return None
        losses = (weight * layer.maps.mean(spatial(layer.maps, 1)))[:, channels]  # (classes, m)

        raw = layer.without(channels[None, ::2])

        def replace(output: Any) -> Any:
            first = first_tensor(output)
            if first is None or first.shape != raw.shape:
                return None
            return tree_map_tensors(output, lambda tensor: raw.clone() if tensor is first else tensor)

        def is_right(start: int, stop: int) -> bool:
            with torch.no_grad(), HookManager() as hooks:
                hooks.revise(self.model.get_submodule(layer.layer), replace)
                changed = first_tensor(run_model(self.model, passes.x))
            return changed is not None and is_close(changed, tensors[0] - losses[:, ::2].sum(1))

        if not all(list(passes.chunks(is_right, 1))):
            return None
        rows = (tensors[0] - losses.T).to(tensors[0])  # (m, classes)
        return passes.target(len(channels))(tree_map_tensors(layer.output, lambda _: rows))


class ReciproCAM(LayerPasses):
    """The score when only one location of the layer is kept.

    Formula: S_i = y(A ⊙ b_i) − y(A ⊙ 0), with b_i = 1/4 at i, 1/8 next to i, 1/16 diagonal to i, 0 elsewhere.

    Each pass scales the layer's output to zero, except for one location and its neighbours. These are scaled to 1/4
    (the location), 1/8 (direct neighbours) and 1/16 (diagonal neighbours). Values without a location, such as a class
    token, are unchanged. The value of a location is the resulting score minus the score of a layer without any
    location. (The paper takes class probabilities, and stretches them to 0..1 for display: the target
    `saliency.probability(...)`.)

    Only the part of the model after the layer runs for each location.

    Args:
        alone: Whether to keep each location unscaled and without its neighbours. If only pooling and one linear layer
            follow, the values then equal the values of `CAM` divided by the number of locations.

    Values: (N, 1, h, w), signed, in score units.

    Source: Byun and Lee, "Recipro-CAM" (2022), https://arxiv.org/abs/2209.14074; for class tokens Byun and Lee,
        "ViT-ReciproCAM" (2023), https://arxiv.org/abs/2310.02588.
    """

    name = "recipro_cam"
    cost = "1 forward, 1 pass from the layer on for each location"
    units = "score"
    preview_options: ClassVar = {"chunk": 16}
    assumes_unsigned = False

    alone: Option[bool] = Option(False, check_flag)

    def explain_image(self, passes: Passes, score: Tensor) -> ImageAttribution:
        """Compute the map of one image."""
        layer = self.read_layer(passes)
        size = layer.maps.shape[1:]
        kernel = near = layer.maps.new_tensor([0.25, 0.5, 0.25])
        for _ in size[1:]:
            kernel = kernel[..., None] * near

        def make(start: int, stop: int) -> Tensor:
            """Pass 0 shows no location; pass 1 + i shows location i."""
            numbers = torch.arange(start, stop, device=near.device)
            shares = F.one_hot(numbers, 1 + size.numel())[:, 1:].to(near).view(-1, 1, *size)
            if not self.alone:
                shares = (F.conv2d if len(size) == 2 else F.conv3d)(shares, kernel[None, None], padding=1)
            return layer.scaled(shares[:, 0])

        scores = passes.tail_scores(layer.layer, make, 1 + size.numel())
        values = (scores[1:] - scores[0]).to(layer.maps)
        return ImageAttribution(values.view(1, *size), layer=layer.layer)
