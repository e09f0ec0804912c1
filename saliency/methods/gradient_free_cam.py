"""CAMs without gradients: weights from scores of masked images, or of forwards without parts of a layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attribution.forward import Needs, SharedForward, TargetGradients
from ..attribution.options import Budget, Option
from ..axes import along_rows, resize, spatial
from ..engine.estimates import ScoreEstimate, normal
from ..engine.multi_pass import ImageAttribution, PassRunner, SampledAttribution, TimedAttribution
from ..errors import NotApplicableError, TargetError
from ..hooks.manager import HookManager
from ..hooks.model_state import run_model
from ..hooks.pytree import first_tensor, tree_map_tensors, tree_tensors
from ..validation import check_flag, check_integer, check_number
from .cam import is_close, linear_head
from .layer_passes import LayerOutput, LayerPasses, stretched


def strongest(strength: Tensor, limit: int | None) -> Tensor:
    """Return the channels in descending order of strength (K,), at most `limit`; ties by number."""
    return torch.sort(strength, descending=True, stable=True).indices[:limit]


class ChannelMasks:
    """Masks (H, W) for an image, 0 to 1, from the channels of a layer, and the CAM for the scores of the masked images.

    The map of a channel is resized bilinearly to the image and stretched to 0..1. A constant channel highlights
    nothing, so its mask is 0 everywhere. All constant channels give the same image, so they share one forward.

    Args:
        layer: The layer.
        x: (1, C, H, W) the image.
        score: Its score.
        strength: (K,) the number by which channels are chosen; constant channels come last.
        channels: The number of channels to use; None for all.
        align: As `align_corners` of `ScoreCAM`.

    Attributes:
        varied: (m,) the channels that are not constant, in descending order of strength.
        varied_maps: (m, h, w) their activations.
        flat: The number of constant channels.
        count: The number of different masks: one for each of `varied`, and a last one for all constant channels.
    """

    def __init__(
        self, layer: LayerOutput, x: Tensor, score: Tensor, strength: Tensor, channels: int | None, align: bool
    ) -> None:
        self._layer, self._x, self._score, self._align = layer, x, score, align
        flat = layer.maps.flatten(1)
        is_flat = flat.amax(1) == flat.amin(1)
        chosen = strongest(strength.masked_fill(is_flat, -math.inf), channels)
        self.varied = chosen[~is_flat[chosen]]
        self.flat = len(chosen) - len(self.varied)
        self.count = len(self.varied) + bool(self.flat)
        self.varied_maps = layer.maps[self.varied]

    def __call__(self, numbers: Tensor) -> Tensor:
        """Return the masks (k, 1, H, W) of some numbers (k,), each below `count`."""
        size = self._x.shape[2:]
        masks = self._x.new_zeros(len(numbers), 1, *size)
        varies = numbers < len(self.varied)
        if bool(varies.any()):
            maps = self.varied_maps[numbers[varies]][:, None]  # (k, 1, h, w)
            large = resize(maps, size, align_corners=self._align)
            masks[varies] = stretched(large).to(masks)
        return masks

    def shares(self, scores: Tensor) -> Tensor:
        """Return the softmax over all channels of the scores (count,) of the masks; NaN denotes an unknown score.

        All weights are 0 if no mask changes the score.
        """
        known = ~scores.isnan()
        if not bool((scores[known] != self._score.to(scores)).any()):
            return torch.zeros_like(scores)
        channels = torch.ones_like(scores)
        channels[len(self.varied) :] = self.flat
        return torch.where(known, scores + channels.log(), -math.inf).softmax(0)

    def map(self, scores: Tensor) -> Tensor:
        """Return the map (1, h, w) for the scores (count,) of the masks. Constant channels have no weight."""
        shares = self.shares(scores)
        weights = shares.new_zeros(len(self._layer.maps))
        weights[self.varied.to(weights.device)] = shares[: len(self.varied)]
        return self._layer.weighted(weights)

    @property
    def note(self) -> str:
        """The numbers of used, constant and omitted channels."""
        used, channels = len(self.varied), len(self._layer.maps)
        text = f"{used} of {channels} channels as masks, one forward for the {self.flat} constant channels"
        return f"{text}, {channels - used - self.flat} left out"


class ScoreCAM(LayerPasses, TimedAttribution):
    """Activations weighted by the score of the image masked with each channel.

    Formula: S = Σ_k w_k A_k, with w = softmax_k y(x ⊙ m_k) and m_k = up(A_k) stretched to 0..1.

    Each channel, resized and stretched to 0..1, is multiplied with the normalised image, so hidden pixels become the
    mean colour. The weights are the softmax over the channels of the resulting scores: equation 3 of the paper, whose
    baseline cancels. (The authors' code takes the class probabilities; the target `saliency.probability(...)` is the
    closest to it.) The logits of a confident model differ by much more than 1, so few channels hold most of the weight.

    Constant channels, such as dead ones, highlight nothing and have no weight. In the softmax they count with the score
    of the empty image, which takes one forward for all of them.

    Args:
        channels: The number of channels to use, in descending order of standard deviation; None for all.
        align_corners: Whether masks are resized so that the centres of corner cells lie on the corners of the image, as
            in pytorch-grad-cam. By default the outer corners of these cells do, as in drawn maps and in the authors'
            code.

    Values: (N, 1, h, w), a weighted mean of the channels, in units of activation; zero if no mask changes the score.

    Warns:
        SaliencyWarning: The activations are signed. Use `GradCAM`, or choose a layer after a ReLU.

    Source: Wang et al., "Score-CAM" (2019), https://arxiv.org/abs/1910.01279.
    """

    name = "score_cam"
    units = "activation"
    cost = "1 forward, 1 forward for each channel that is not constant"
    draft_options: ClassVar[Mapping[str, Any]] = {}

    channels: Option[int | None] = Option(None, check_integer)
    align_corners: Option[bool] = Option(False, check_flag)

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """Compute the map of one image."""
        layer = self.read_layer(passes)
        strength = self.strength(passes, layer)
        masks = ChannelMasks(layer, passes.x, score, strength, self.channels, self.align_corners)
        passes.notes.append(masks.note)
        return self.explain_masks(passes, masks)._replace(layer=layer.layer)

    def strength(self, passes: PassRunner, layer: LayerOutput) -> Tensor:
        """Return the number (K,) by which channels are chosen: the standard deviation."""
        return layer.maps.flatten(1).std(1, correction=0)

    def explain_masks(self, passes: PassRunner, masks: ChannelMasks) -> ImageAttribution:
        """Compute the map from one score per mask."""
        return self.combined(passes, masks, masks.count, masks.map)

    @staticmethod
    def combined(
        passes: PassRunner, masks: Callable[[Tensor], Tensor], count: int, combine: Callable[[Tensor], Tensor]
    ) -> ImageAttribution:
        """Return the map (1, h, w) that `combine` makes of the scores (count,) under masks; NaN if not run.

        Args:
            passes: The passes of the image.
            masks: Returns the masks of some numbers, each below `count`.
            count: The number of masks.
            combine: Returns the map for the scores.
        """
        scores = torch.full((count,), math.nan, dtype=torch.float64, device="cpu")

        def make(start: int, stop: int) -> Tensor:
            return passes.x * masks(torch.arange(start, stop, device=passes.x.device))

        passes.partial = lambda: ImageAttribution(combine(scores))
        for done in passes.forwards(make, count):
            scores[done.start : done.start + len(done.scores)] = done.scores.to(scores)
        if bool(scores.isnan().any()):
            passes.notes.append(f"{passes.used} of {count} masks were run")
        return ImageAttribution(combine(scores))


class GScoreCAM(ScoreCAM):
    """Score-CAM with the 300 channels of the largest mean gradient.

    Formula: S = Σ_k w_k A_k over the 300 channels k of largest mean_i ∂y/∂A_ki, with w = softmax_k y(x ⊙ m_k), and m_k
    as for Score-CAM.

    It was proposed for CLIP, whose layers have thousands of channels, with a text as the target. The weights are the
    softmax over the used channels, as in `ScoreCAM`. (The authors' code takes it over all channels, with a score of 0
    for channels without a pass. These then have weight, which they should not.)

    Args:
        channels: The number of channels to use, in descending order of mean gradient.

    Values: (N, 1, h, w), a weighted mean of the channels, in units of activation; zero if no mask changes the score.

    Warns:
        SaliencyWarning: The activations are signed. Use `GradCAM`, or choose a layer after a ReLU.

    Raises:
        LayerError: The layer does not exist, is not run, or has no spatial output, or no gradient reaches it.

    Source: Chen et al., "gScoreCAM: What Objects Is CLIP Looking At?" (2022),
        https://doi.org/10.1007/978-3-031-26316-3_35.
    """

    name = "gscore_cam"
    cost = "2 forwards, 1 backward, 1 forward for each of 300 channels that are not constant"

    channels: Option[int | None] = Option(300, check_integer)

    def strength(self, passes: PassRunner, layer: LayerOutput) -> Tensor:
        """Return the mean gradient (K,) of each channel."""
        with torch.enable_grad():
            forward = SharedForward(self.model, passes.x, Needs("layers", backwards=1, layers=(layer.layer,)))
            gradient = TargetGradients(forward, passes.target(1)).gradient(layer.layer)[0]
            return gradient.mean(spatial(gradient, 1))


class ISCAM(ScoreCAM):
    """Score-CAM with scores averaged over masks of increasing strength.

    Formula: S = Σ_k w_k A_k, with w = softmax_k mean_n y(x ⊙ m_k n/N), n = 1..N, and m_k as for Score-CAM.

    The score of a channel is the mean over i = 1..N of the score of the image times i/N of the mask. The weights are
    the softmax over the channels of these scores, as in `ScoreCAM`. (Other implementations take cumulative sums, which
    multiply masks by up to (N + 1) / 2, far outside the range of an image.)

    Args:
        steps: The number N of strengths of each mask.

    Values: (N, 1, h, w), a weighted mean of the channels, in units of activation; zero if no mask changes the score.

    Warns:
        SaliencyWarning: The activations are signed. Use `GradCAM`, or choose a layer after a ReLU.

    Source: Naidu et al., "IS-CAM" (2020), https://arxiv.org/abs/2010.03023.
    """

    name = "is_cam"
    cost = "1 forward, 10 forwards for each channel that is not constant"
    preview_options: ClassVar = {"steps": 2}

    steps: Option[int] = Option(10, check_integer)

    def explain_masks(self, passes: PassRunner, masks: ChannelMasks) -> ImageAttribution:
        """Compute the map from the mean over the steps of the scores of each mask."""
        steps, varied = self.steps, len(masks.varied)

        def faded(numbers: Tensor) -> Tensor:
            shares = ((numbers % steps + 1) / steps).to(passes.x)
            return masks(numbers // steps) * along_rows(shares, passes.x)

        def combine(scores: Tensor) -> Tensor:
            means = scores[: varied * steps].view(varied, steps).mean(1)
            return masks.map(torch.cat([means, scores[varied * steps :]]))

        # Channel by channel, so that a time limit leaves complete channels. The empty image is the same in every step.
        return self.combined(passes, faded, varied * steps + bool(masks.flat), combine)


class SSCAM(ScoreCAM, SampledAttribution):
    """Score-CAM with scores averaged over masks with added noise.

    Formula: S = Σ_k w_k A_k, with w = softmax_k mean_z y(x ⊙ (m_k + z)), normal noise z, and m_k as for Score-CAM.

    The score of a channel is its mean over masks to which normal noise is added at every pixel. The weights are the
    softmax over the channels of these scores, as in `ScoreCAM`. The standard error of the map follows from the standard
    errors of the scores, to first order.

    Args:
        noise: The standard deviation of the noise; masks without noise range from 0 to 1. The paper uses 2.
        draws: The number of noisy masks of each channel, if no limit is set.

    Values: (N, 1, h, w), a weighted mean of the channels, in units of activation; zero if no mask changes the score.

    Warns:
        SaliencyWarning: The activations are signed. Use `GradCAM`, or choose a layer after a ReLU.

    Source: Wang et al., "SS-CAM" (2020), https://arxiv.org/abs/2006.14255.
    """

    name = "ss_cam"
    cost = "1 forward, 10 forwards for each channel that is not constant"
    preview_options: ClassVar = {"draws": 2}

    noise: Option[float] = Option(2.0, check_number, above=0, hint="; without noise it is score_cam")
    draws: Option[int] = Option(10, check_integer)

    def explain_masks(self, passes: PassRunner, masks: ChannelMasks) -> ImageAttribution:
        """Compute the map from the mean scores, in rounds over all masks."""
        x, estimate = passes.x, _MaskScores(masks)

        def make(start: int, stop: int) -> Tensor:
            noise = [normal((1, *x.shape[2:]), self.seed, i) for i in range(start, stop)]
            clean = masks(torch.arange(start, stop, device=x.device) % masks.count)
            return x * (clean + self.noise * torch.stack(noise).to(x))

        # One more than the limit, so that the limit ends the passes.
        count = self.draws * masks.count if self.limits() == Budget() else self.most_passes + 1
        for done in passes.until_precise(estimate, passes.forwards(make, count)):
            estimate.add(done.scores)
        if estimate.count < masks.count:
            passes.notes.append(f"{estimate.count} of {masks.count} masks were run")
        return ImageAttribution(*estimate.solve(slice(None)), estimate.agreement)


class _MaskScores(ScoreEstimate):
    """Map from the mean scores of masks, with its standard error to first order.

    Pass i shows mask i modulo the number of masks. A sample is a round over all masks.
    """

    def __init__(self, masks: ChannelMasks) -> None:
        super().__init__()
        self._masks, self.passes_per_sample = masks, masks.count

    def solve(self, part: slice) -> tuple[Tensor, Tensor | None]:
        """Return the map (1, h, w), and its error if each mask has at least two scores."""
        masks = self._masks
        missing = -self.count % masks.count
        table = F.pad(self.scores, (0, missing), value=math.nan).view(-1, masks.count)[part]  # (rounds, masks)
        means, counts = table.nanmean(0), (~table.isnan()).sum(0)
        values = masks.map(means)
        if int(counts.min()) < 2:
            return values, None
        variance = (table - means).square().nansum(0) / (counts - 1) / counts  # of the mean scores
        # The slope of the map by the score of a channel is share * (channel - map).
        maps = torch.zeros(len(means), *values.shape[1:], dtype=torch.float64, device="cpu")
        maps[: len(masks.varied)] = masks.varied_maps.double().cpu()
        slopes = along_rows(masks.shares(means), maps) * (maps - values.double().cpu())
        return values, (slopes.square() * along_rows(variance, maps)).sum(0).sqrt()[None].to(values)


class AblationCAM(LayerPasses, TimedAttribution):
    """Activations weighted by the drop in the score when the channel is set to zero.

    Formula: S = Σ_k w_k A_k, with w_k = y − y(A without channel k).

    The weight of a channel is y - y_k, where y is the score and y_k the score without the channel: positive if the
    channel supports the target, also for a negative score. (The paper divides by y, which is the same for all channels
    and inverts the map if y is negative.)

    Only the part of the model after the layer runs for each channel, exactly, regardless of `precision`. If this part
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
            if len(scores) < len(channels):
                passes.notes.append(f"{len(scores)} of {len(channels)} channels, in descending order of energy")
        return ImageAttribution(layer.weighted(weights), layer=layer.layer)

    def _scores_in_closed_form(self, passes: PassRunner, layer: LayerOutput, channels: Tensor) -> Tensor | None:
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
        passes.notes.append("in closed form: only pooling and one linear layer follow the layer")
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

    Only the part of the model after the layer runs for each location, exactly, regardless of `precision`.

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

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
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

        scores = self.tail_scores(passes, layer, make, 1 + size.numel())
        values = (scores[1:] - scores[0]).to(layer.maps)
        return ImageAttribution(values.view(1, *size), layer=layer.layer)
