"""CAMs whose weights come from forwards: each channel is a mask on the image, and the score that it leaves counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from ..attribution.explanation import Sign
from ..attribution.options import Budget, EngineOptions, SamplingOptions
from ..engine.estimates import rank_correlation, relative_error
from ..engine.multi_pass import MOST_PASSES, ImageAttribution, MultiPassAttribution, SampledAttribution, generator
from ..engine.runner import PassRunner
from ..layers.find import LayerLike
from ..validation import check_choice, check_whole_number, real_number
from .cam import warn_if_signed
from .layer_reader import LayerReader, Masks, Reading, channel_count


class ScoreCAM(MultiPassAttribution):
    """Activations weighted by how the score stands when the image shows only where the channel is active.

    Each channel, resized and stretched to 0..1, is multiplied onto the normalised image, so that what it hides becomes
    the mean colour. The weights are the softmax over the channels of the scores that this leaves: equation 3 of the
    paper, whose baseline cancels. (The authors' code takes the class probabilities as they are; the target
    `saliency.probability(...)` is the nearest to that.) The logits of a sure model differ by much more than 1, so few
    channels hold most of the weight.

    Channels that are the same everywhere, such as dead ones, show no place and get no weight; in the softmax they count
    with the score of the empty image, for which one forward serves them all.

    Args:
        model: As for every method.
        layer: As for `GradCAM`.
        channels: How many channels to use, those that vary most; None for all.
        align_corners: Whether the centres of the corner cells are laid onto the corners of the image, as
            pytorch-grad-cam does, or the corners of the cells, as maps are drawn and as the authors do.
        **running: See `saliency.attribution.options.EngineOptions`.

    Values: (N, 1, h, w), a weighted mean of the channels, in units of activation; zero where no mask changes the score.

    Warns:
        SaliencyWarning: The activations are signed. Use `GradCAM`, or choose a layer behind a ReLU.

    Raises:
        LayerError: The layer does not exist, is not run, or has no extent in space.
        MethodError: The number of channels is none.
        TargetError: The target does not fit the model's output.

    Source: Wang et al., "Score-CAM" (2019), https://arxiv.org/abs/1910.01279.
    """

    name = "score_cam"
    cost = "2 forwards, 1 forward for each channel that is not constant"
    units = "activation"
    sign: ClassVar[Sign] = "positive"

    def __init__(
        self,
        model: nn.Module,
        layer: LayerLike = None,
        *,
        channels: int | None = None,
        align_corners: bool = False,
        **running: Unpack[EngineOptions],
    ) -> None:
        super().__init__(model, **running)
        self._reader = LayerReader(self.model, layer)
        self.layer = self._reader.layer
        self.channels = channel_count(channels)
        self.align_corners = bool(check_choice("align_corners", align_corners, (True, False)))

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """The map of one image."""
        reading = self._reader(passes.x, passes.target(1))
        warn_if_signed(self.name, reading.maps[None])
        masks = Masks(reading, passes.x, self.channels, align_corners=self.align_corners)
        passes.notes.append(masks.note)
        scores = torch.full((masks.groups,), math.nan, dtype=torch.float64, device="cpu")

        def make(start: int, stop: int) -> Tensor:
            return passes.x * masks(torch.arange(start, stop, device=passes.x.device))

        for done in passes.forwards(make, masks.groups):
            scores[done.start : done.start + len(done.scores)] = done.scores.to(scores)
        return _found(reading, masks, scores, score)


class ISCAM(MultiPassAttribution):
    """Score-CAM with scores that are averaged while each channel's mask is turned up from nothing to all of it.

    The score of a channel is the mean over i = 1..N of the score of the image times i/N of the mask. The weights are
    the softmax over the channels of these, as in `ScoreCAM`. (A reading by cumulative sums, in use elsewhere,
    multiplies masks by up to (N + 1) / 2, far outside the range of an image.)

    Args:
        model: As for every method.
        layer: As for `GradCAM`.
        steps: N.
        channels: How many channels to use, those that vary most; None for all.
        **running: See `saliency.attribution.options.EngineOptions`.

    Values: (N, 1, h, w), a weighted mean of the channels, in units of activation; zero where no mask changes the score.

    Warns:
        SaliencyWarning: The activations are signed. Use `GradCAM`, or choose a layer behind a ReLU.

    Raises:
        LayerError: The layer does not exist, is not run, or has no extent in space.
        MethodError: The number of channels or of steps is none.
        TargetError: The target does not fit the model's output.

    Source: Naidu et al., "IS-CAM" (2020), https://arxiv.org/abs/2010.03023.
    """

    name = "is_cam"
    cost = "2 forwards, 10 forwards for each channel that is not constant"
    units = "activation"
    sign: ClassVar[Sign] = "positive"
    quick_options: ClassVar[Mapping[str, Any]] = {"steps": 2}

    def __init__(
        self,
        model: nn.Module,
        layer: LayerLike = None,
        *,
        steps: int = 10,
        channels: int | None = None,
        **running: Unpack[EngineOptions],
    ) -> None:
        super().__init__(model, **running)
        self._reader = LayerReader(self.model, layer)
        self.layer = self._reader.layer
        self.steps = check_whole_number("steps", steps)
        self.channels = channel_count(channels)

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """The map of one image."""
        reading = self._reader(passes.x, passes.target(1))
        warn_if_signed(self.name, reading.maps[None])
        masks = Masks(reading, passes.x, self.channels, align_corners=False)
        passes.notes.append(masks.note)
        steps, varied = self.steps, len(masks.varied)
        # Channel by channel, so that what an interrupt leaves is whole; the empty image is the same in every step.
        count = varied * steps + (masks.groups - varied)
        every = torch.full((count,), math.nan, dtype=torch.float64, device="cpu")

        def make(start: int, stop: int) -> Tensor:
            numbers = torch.arange(start, stop, device=passes.x.device)
            shares = ((numbers % steps + 1) / steps).to(passes.x)
            return passes.x * (masks(numbers // steps) * shares[:, None, None, None])

        for done in passes.forwards(make, count):
            every[done.start : done.start + len(done.scores)] = done.scores.to(every)
        scores = torch.cat([every[: varied * steps].view(varied, steps).mean(1), every[varied * steps :]])
        return _found(reading, masks, scores, score)


class SSCAM(SampledAttribution):
    """Score-CAM with scores that are averaged over masks with noise on them.

    The score of a channel is its mean over masks to every pixel of which normal noise is added; the weights are the
    softmax over the channels of these, as in `ScoreCAM`. The standard error of the map follows from those of the
    channels' scores, to first order.

    Args:
        model: As for every method.
        layer: As for `GradCAM`.
        noise: The standard deviation of the noise; a mask reaches from 0 to 1. The paper's is 2.
        draws: How many noisy masks each channel gets, where no limit is set.
        channels: How many channels to use, those that vary most; None for all.
        **sampling: See `saliency.attribution.options.SamplingOptions`.

    Values: (N, 1, h, w), a weighted mean of the channels, in units of activation; zero where no mask changes the score.

    Warns:
        SaliencyWarning: The activations are signed. Use `GradCAM`, or choose a layer behind a ReLU.

    Raises:
        LayerError: The layer does not exist, is not run, or has no extent in space.
        MethodError: The noise is no positive number, or the number of channels or of draws is none.
        TargetError: The target does not fit the model's output.

    Source: Wang et al., "SS-CAM" (2020), https://arxiv.org/abs/2006.14255.
    """

    name = "ss_cam"
    cost = "2 forwards, 10 forwards for each channel that is not constant"
    units = "activation"
    sign: ClassVar[Sign] = "positive"
    quick_options: ClassVar[Mapping[str, Any]] = {"draws": 2}

    def __init__(
        self,
        model: nn.Module,
        layer: LayerLike = None,
        *,
        noise: float = 2.0,
        draws: int = 10,
        channels: int | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> None:
        super().__init__(model, **sampling)
        self._reader = LayerReader(self.model, layer)
        self.layer = self._reader.layer
        self.noise = real_number("noise", noise, above=0, hint="; without noise it is score_cam")
        self.draws = check_whole_number("draws", draws)
        self.channels = channel_count(channels)

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """The map of one image."""
        reading = self._reader(passes.x, passes.target(1))
        warn_if_signed(self.name, reading.maps[None])
        masks = Masks(reading, passes.x, self.channels, align_corners=False)
        passes.notes.append(masks.note)
        around = reading, masks, score
        groups, x = masks.groups, passes.x
        scores: list[float] = []

        def make(start: int, stop: int) -> Tensor:
            noise = [
                torch.randn(1, *x.shape[-2:], generator=generator(self.seed, i), dtype=torch.float64, device="cpu")
                for i in range(start, stop)
            ]
            shown = masks(torch.arange(start, stop, device=x.device) % groups)
            return x * (shown + self.noise * torch.stack(noise).to(x))

        for done in passes.forwards(make, self._count(groups)):
            before = len(scores) // groups
            scores += done.scores.tolist()
            # Whole rounds only: the chunks, which end anywhere, do not show.
            enough = (at for at in range(before + 1, len(scores) // groups + 1) if self._suffices(scores, at, *around))
            rounds = next(enough, None)
            if rounds is not None:
                passes.stopped = "tolerance"
                del scores[rounds * groups :]
                break
        return _estimated(_table(scores, groups), *around)

    def limits(self) -> Budget:
        """The limits that were set. Without any, how many passes there are depends on the layer."""
        return Budget(self.passes, self.seconds, self.tolerance)

    def _count(self, groups: int) -> int:
        if self.passes is not None:
            return self.passes + 1  # the limit, and not the number of draws, ends the work
        return self.draws * groups if self.seconds is None and self.tolerance is None else MOST_PASSES

    def _suffices(self, scores: list[float], rounds: int, reading: Reading, masks: Masks, clean: Tensor) -> bool:
        """Whether the tolerance is met after so many rounds of all channels."""
        if self.tolerance is None or rounds < 2:
            return False
        found = _estimated(_table(scores[: rounds * masks.groups], masks.groups), reading, masks, clean)
        return relative_error(found.values, found.error) <= self.tolerance


def _found(reading: Reading, masks: Masks, scores: Tensor, clean: Tensor) -> ImageAttribution:
    """The map that the groups' scores (g,) make."""
    weights = masks.spread(masks.weights(scores, clean), len(reading.maps))
    return ImageAttribution(reading.weighted(weights), layer=reading.layer)


def _table(scores: list[float], groups: int) -> Tensor:
    """Scores in the order of the passes as a table (draws, groups); NaN for what is not drawn yet."""
    draws = max(1, math.ceil(len(scores) / groups))
    missing = draws * groups - len(scores)
    return torch.tensor(scores + [math.nan] * missing, dtype=torch.float64, device="cpu").view(draws, groups)


def _estimated(table: Tensor, reading: Reading, masks: Masks, clean: Tensor) -> ImageAttribution:
    """The map that the mean scores of a table (draws, groups) make, its standard error and split-half agreement."""
    found = _found(reading, masks, table.nanmean(0), clean)
    counts = (~table.isnan()).sum(0)
    error, agreement = None, None
    if int(counts.min()) > 1:
        variance = (table - table.nanmean(0)).square().nansum(0) / (counts - 1) / counts  # of the mean scores
        shares = masks.weights(table.nanmean(0), clean)
        # A weight's slope: the map moves by share * (channel's map - map) for each unit of the channel's score.
        own = torch.zeros(len(shares), *reading.maps.shape[1:], dtype=torch.float64, device="cpu")
        own[: len(masks.varied)] = reading.maps[masks.varied].double().cpu()
        slopes = shares[:, None, None] * (own - found.values.double().cpu())
        error = (slopes.square() * variance[:, None, None]).sum(0).sqrt()[None].to(found.values)
    if int(counts.min()) > 3:
        halves = [_found(reading, masks, table[at::2].nanmean(0), clean).values for at in (0, 1)]
        agreement = rank_correlation(*halves)
    return found._replace(error=error, agreement=agreement)
