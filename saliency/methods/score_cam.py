"""CAMs whose weights come from forwards: each channel masks the image, and the resulting score gives its weight."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attribution.options import Budget, Option
from ..engine.estimates import Estimate, rank_correlation
from ..engine.multi_pass import MOST_PASSES, ImageAttribution, SampledAttribution, from_estimate, generator
from ..engine.runner import PassRunner
from ..validation import check_flag, check_integer, check_number
from .layer_passes import LayerOutput, LayerPasses, strongest


class ChannelMasks:
    """The masks (H, W), 0 to 1, that the channels of a layer put on an image, and the weights that follow from them.

    The map of a channel is resized bilinearly to the image and stretched to 0..1. A constant channel highlights
    nothing, so its mask is 0 everywhere. All constant channels leave the same image, so they share one forward.

    Attributes:
        varied: (m,) the channels that are not constant, by falling standard deviation.
        varied_maps: (m, h, w) their activations.
        flat: The number of constant channels.
        count: The number of different masks: one for each of `varied`, and a last one for all constant channels.
    """

    def __init__(self, layer: LayerOutput, x: Tensor, score: Tensor, channels: int | None, align: bool = False) -> None:
        self._layer, self._x, self._score, self._align = layer, x, score, align
        flat = layer.maps.flatten(1)
        is_flat = flat.amax(1) == flat.amin(1)
        chosen = strongest(flat.std(1, correction=0).masked_fill(is_flat, 0), channels)
        self.varied = chosen[~is_flat[chosen]]
        self.flat = len(chosen) - len(self.varied)
        self.count = len(self.varied) + bool(self.flat)
        self.varied_maps = layer.maps[self.varied]

    def __call__(self, numbers: Tensor) -> Tensor:
        """Return the masks (k, 1, H, W) of some numbers (k,), each below `count`."""
        size = self._x.shape[-2:]
        masks = self._x.new_zeros(len(numbers), 1, *size)
        shown = numbers < len(self.varied)
        if bool(shown.any()):
            maps = self.varied_maps[numbers[shown]][:, None]  # (k, 1, h, w)
            large = F.interpolate(maps, size, mode="bilinear", align_corners=self._align)
            low, high = large.amin((2, 3), keepdim=True), large.amax((2, 3), keepdim=True)
            span = torch.where(high == low, torch.ones_like(high), high - low)
            masks[shown] = ((large - low) / span).to(masks)
        return masks

    def shares(self, scores: Tensor) -> Tensor:
        """Return the softmax over all channels of the scores (count,) of the masks; NaN stands for an unknown score.

        All shares are 0 where no mask changes the score.
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
        """How many channels are used."""
        channels = len(self._layer.maps)
        parts = [f"{len(self.varied)} of {channels} channels as masks"]
        if self.flat:
            parts.append(f"one forward for the {self.flat} constant channels")
        left = channels - len(self.varied) - self.flat
        return ", ".join(parts + ([f"{left} left out"] if left else []))


class _MaskCAM(LayerPasses):
    """Base class of Score-CAM and its variants."""

    units = "activation"
    cost = "2 forwards, 10 forwards for each channel that is not constant"
    channels: Option[int | None] = Option(None, check_integer)
    align_corners = False

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """Compute the map of one image."""
        layer = self.read_layer(passes)
        masks = ChannelMasks(layer, passes.x, score, self.channels, self.align_corners)
        passes.notes.append(masks.note)
        return self.explain_masks(passes, masks)._replace(layer=layer.layer)

    @abstractmethod
    def explain_masks(self, passes: PassRunner, masks: ChannelMasks) -> ImageAttribution:
        """Compute the map, given the masks."""

    @staticmethod
    def scores(passes: PassRunner, masks: Callable[[Tensor], Tensor], count: int) -> Tensor:
        """Return the scores (count,) of the image under the masks of the numbers 0 to `count`; NaN if not run."""
        scores = torch.full((count,), math.nan, dtype=torch.float64, device="cpu")

        def make(start: int, stop: int) -> Tensor:
            return passes.x * masks(torch.arange(start, stop, device=passes.x.device))

        for done in passes.forwards(make, count):
            scores[done.start : done.start + len(done.scores)] = done.scores.to(scores)
        return scores


class ScoreCAM(_MaskCAM):
    """Activations weighted by the score of the image masked with each channel.

    Each channel, resized and stretched to 0..1, is multiplied with the normalised image, so hidden pixels become the
    mean colour. The weights are the softmax over the channels of the resulting scores: equation 3 of the paper, whose
    baseline cancels. (The authors' code takes the class probabilities; the target `saliency.probability(...)` is the
    closest to it.) The logits of a confident model differ by much more than 1, so few channels hold most of the weight.

    Constant channels, such as dead ones, highlight nothing and have no weight. In the softmax they count with the score
    of the empty image, which takes one forward for all of them.

    Args:
        model: As for every method.
        layer: As for `GradCAM`.
        channels: How many channels to use, by falling standard deviation; None for all.
        align_corners: Whether masks are resized so that the centres of corner cells lie on the corners of the image, as
            in pytorch-grad-cam. By default the corners of the cells do, as in drawn maps and in the authors' code.
        **options: As for `saliency.MultiPassAttribution`.

    Values: (N, 1, h, w), a weighted mean of the channels, in units of activation; zero where no mask changes the score.

    Warns:
        SaliencyWarning: The activations are signed. Use `GradCAM`, or choose a layer after a ReLU.

    Raises:
        LayerError: The layer does not exist, is not run, or has no spatial output.
        MethodError: An option is invalid.
        TargetError: The target does not fit the model's output.

    Source: Wang et al., "Score-CAM" (2019), https://arxiv.org/abs/1910.01279.
    """

    name = "score_cam"
    cost = "2 forwards, 1 forward for each channel that is not constant"

    align_corners: Option[bool] = Option(False, check_flag)

    def explain_masks(self, passes: PassRunner, masks: ChannelMasks) -> ImageAttribution:
        """Compute the map from one score per mask."""
        return ImageAttribution(masks.map(self.scores(passes, masks, masks.count)))


class ISCAM(_MaskCAM):
    """Score-CAM with scores averaged while each channel's mask grows from nothing to its full strength.

    The score of a channel is the mean over i = 1..N of the score of the image times i/N of the mask. The weights are
    the softmax over the channels of these scores, as in `ScoreCAM`. (Other implementations take cumulative sums, which
    multiply masks by up to (N + 1) / 2, far outside the range of an image.)

    Args:
        model: As for every method.
        layer: As for `GradCAM`.
        steps: N.
        channels: How many channels to use, by falling standard deviation; None for all.
        **options: As for `saliency.MultiPassAttribution`.

    Values: (N, 1, h, w), a weighted mean of the channels, in units of activation; zero where no mask changes the score.

    Warns:
        SaliencyWarning: The activations are signed. Use `GradCAM`, or choose a layer after a ReLU.

    Raises:
        LayerError: The layer does not exist, is not run, or has no spatial output.
        MethodError: An option is invalid.
        TargetError: The target does not fit the model's output.

    Source: Naidu et al., "IS-CAM" (2020), https://arxiv.org/abs/2010.03023.
    """

    name = "is_cam"
    quick_options: ClassVar = {"steps": 2}

    steps: Option[int] = Option(10, check_integer)

    def explain_masks(self, passes: PassRunner, masks: ChannelMasks) -> ImageAttribution:
        """Compute the map from the mean over the steps of the scores of each mask."""
        steps, varied = self.steps, len(masks.varied)

        def faded(numbers: Tensor) -> Tensor:
            shares = ((numbers % steps + 1) / steps).to(passes.x)
            return masks(numbers // steps) * shares[:, None, None, None]

        # Channel by channel, so that an interrupt leaves whole channels. The empty image is the same in every step.
        scores = self.scores(passes, faded, varied * steps + bool(masks.flat))
        means = scores[: varied * steps].view(varied, steps).mean(1)
        return ImageAttribution(masks.map(torch.cat([means, scores[varied * steps :]])))


class SSCAM(_MaskCAM, SampledAttribution):
    """Score-CAM with scores averaged over masks with added noise.

    The score of a channel is its mean over masks to which normal noise is added at every pixel. The weights are the
    softmax over the channels of these scores, as in `ScoreCAM`. The standard error of the map follows from those of the
    scores, to first order.

    Args:
        model: As for every method.
        layer: As for `GradCAM`.
        noise: The standard deviation of the noise; a mask reaches from 0 to 1. The paper uses 2.
        draws: The number of noisy masks of each channel, if no limit is set.
        channels: How many channels to use, by falling standard deviation; None for all.
        **options: As for `saliency.SampledAttribution`.

    Values: (N, 1, h, w), a weighted mean of the channels, in units of activation; zero where no mask changes the score.

    Warns:
        SaliencyWarning: The activations are signed. Use `GradCAM`, or choose a layer after a ReLU.

    Raises:
        LayerError: The layer does not exist, is not run, or has no spatial output.
        MethodError: An option is invalid.
        TargetError: The target does not fit the model's output.

    Source: Wang et al., "SS-CAM" (2020), https://arxiv.org/abs/2006.14255.
    """

    name = "ss_cam"
    quick_options: ClassVar = {"draws": 2}

    noise: Option[float] = Option(2.0, check_number, above=0, hint="; without noise it is score_cam")
    draws: Option[int] = Option(10, check_integer)

    def explain_masks(self, passes: PassRunner, masks: ChannelMasks) -> ImageAttribution:
        """Compute the map from the mean scores, in rounds over all masks."""
        x, estimate = passes.x, _MaskScores(masks)

        def make(start: int, stop: int) -> Tensor:
            noise = [
                torch.randn(1, *x.shape[-2:], generator=generator(self.seed, i), dtype=torch.float64, device="cpu")
                for i in range(start, stop)
            ]
            shown = masks(torch.arange(start, stop, device=x.device) % masks.count)
            return x * (shown + self.noise * torch.stack(noise).to(x))

        is_limited = self.limits() != Budget()
        count = max(MOST_PASSES, (self.passes or 0) + 1) if is_limited else self.draws * masks.count
        for done in passes.forwards(make, count):
            estimate.add(done.scores)
            if passes.enough(estimate):
                break
        return from_estimate(estimate, estimate.mean)

    def limits(self) -> Budget:
        """Return the limits that were set. Without any, the number of passes depends on the layer."""
        return Budget(self.passes, self.seconds, self.tolerance)


class _MaskScores(Estimate):
    """Map from the mean scores of masks, with its standard error. Pass i shows mask i modulo their number."""

    def __init__(self, masks: ChannelMasks) -> None:
        super().__init__()
        self._masks = masks
        self._scores: list[float] = []

    def add(self, samples: Tensor) -> None:
        """Add the scores (k,) of the next passes."""
        self._scores += samples.tolist()
        self.count = len(self._scores)

    def _table(self) -> Tensor:
        """The scores (draws, masks), NaN where none is known yet."""
        draws = max(1, math.ceil(self.count / self._masks.count))
        missing = [math.nan] * (draws * self._masks.count - self.count)
        return torch.tensor(self._scores + missing, dtype=torch.float64, device="cpu").view(draws, -1)

    @property
    def mean(self) -> Tensor:
        """The map (1, h, w)."""
        return self._masks.map(self._table().nanmean(0))

    @property
    def error(self) -> Tensor | None:
        """The standard error of the map (1, h, w), to first order; None before the second round is complete."""
        table = self._table()
        counts = (~table.isnan()).sum(0)
        if int(counts.min()) < 2:
            return None
        means = table.nanmean(0)
        variance = (table - means).square().nansum(0) / (counts - 1) / counts  # of the mean scores
        shares, values = self._masks.shares(means), self._masks.map(means).double().cpu()
        # The slope of the map by the score of a channel is share * (channel - map).
        maps = torch.zeros(len(shares), *values.shape[1:], dtype=torch.float64, device="cpu")
        maps[: len(self._masks.varied)] = self._masks.varied_maps.double().cpu()
        slopes = shares[:, None, None] * (maps - values)
        return (slopes.square() * variance[:, None, None]).sum(0).sqrt()[None]

    @property
    def agreement(self) -> float | None:
        """The rank correlation of the maps of the even and of the odd rounds; None below four rounds."""
        table = self._table()
        if int((~table.isnan()).sum(0).min()) < 4:
            return None
        return rank_correlation(*(self._masks.map(table[at::2].nanmean(0)) for at in (0, 1)))
