"""Extremal perturbations: of all smooth masks of a given area, the one that keeps the score highest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attribution.options import Running
from ..engine.multi_pass import Found
from ..engine.runner import Passes
from ..errors import MethodError
from ..validation import chosen, real_number
from .masks import AUTHORS, OptimisedMask, blurring, shifted

Keep = Literal["best", "worst"]

_LEVELS = 8
_STRONGEST = 20 / AUTHORS
_RADIUS = 21 / AUTHORS
_TEMPERATURE = 1 / 20
_GROWTH = 1.0035**800


class ExtremalPerturbation(OptimisedMask):
    """The part of the image, of an area that is asked for, which keeps the score highest while all else is blurred.

    The mask is the smooth maximum of discs around the numbers that are optimised, on a lattice of 7 pixels; the
    farther it is from 1, the stronger a pixel is blurred, up to a standard deviation of 20 pixels (both for pictures
    of 224, and in proportion for others). The square distance of its sorted values from the ideal ones, `areas` of
    them 1 and the rest 0, is weighed against the score, with a weight that grows step by step.

    Where this differs from the authors' code: the score counts in units of what blurring the whole image costs, and the
    descent is Adam's, so that weight and rate suit any model; the weight grows by a factor of 16 over all steps. Images
    are shifted by up to 2 of 224 pixels at each step. What suffices is looked for from the whole picture on, what is
    worst to lose from one that is half blurred. It finds one of many good parts: another seed may find another.

    Args:
        model: As for every method.
        areas: The shares of the image that are kept, each between 0 and 1; each takes all steps.
        steps: Steps of gradient descent, which go the farther the fewer they are; the paper's are 800.
        weight: What a false area costs at the first step.
        keep: "best" looks for the part that suffices; "worst" for the one whose loss lowers the score the most.
        **running: See `saliency.attribution.options.Running`.

    Values: (N, 1, H, W), 0 to 1: the mask, 1 where a pixel belongs to the part; for several areas their mean. Zero
    everywhere where the score does not depend on the mask.

    Raises:
        MethodError: An area outside 0 to 1, or an option that is no positive number.
        TargetError: The target does not fit the model's output, or does not depend on the input.

    Source: Fong et al., "Understanding Deep Networks via Extremal Perturbations and Smooth Masks" (2019),
        https://arxiv.org/abs/1910.08485.
    """

    name = "extremal_perturbation"
    units = "share that belongs to the part"
    rate = 0.02
    cost = "802 forwards, 800 backwards, for each area"

    def __init__(
        self,
        model: nn.Module,
        *,
        areas: Sequence[float] = (0.1,),
        steps: int = 800,
        weight: float = 10.0,
        keep: Keep = "best",
        **running: Unpack[Running],
    ) -> None:
        super().__init__(model, steps=steps, **running)
        self.rate = max(self.rate, min(0.25, 1.5 / self.steps))
        shares = areas if isinstance(areas, list | tuple) else (areas,)
        self.areas = [real_number("areas", share, above=0, below=1) for share in shares]
        if not self.areas:
            raise MethodError("areas is empty; expected at least one share of the image, such as 0.1")
        self.weight = real_number("weight", weight, above=0)
        self.keep = chosen("keep", keep, ("best", "worst"))

    def explain_image(self, passes: Passes, score: Tensor) -> Found:
        """The mean of the masks of all areas."""
        x = passes.x.clone()  # an inference tensor cannot be kept for a gradient
        x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        height, width = int(x.shape[2]), int(x.shape[3])
        levels = pyramid(x)  # (L, C, H, W)
        lattice = [max(1, min(edge, round(3 * edge / (_RADIUS * min(height, width))))) for edge in (height, width)]
        upward = self.keep == "best"

        def enlarged(mask: Tensor) -> Tensor:
            return F.interpolate(mask[None, None], (height, width), mode="bilinear", align_corners=False)[0, 0]

        def render(numbers: Tensor, shift: tuple[int, int]) -> Tensor:
            mask = enlarged(smooth_mask(numbers))
            return shifted(blurred_where(levels, 1 - mask if upward else mask), shift)

        stake = self.stake(passes, score, levels[-1:].to(passes.x.dtype))
        # What suffices is looked for from the whole picture on: where all is half blurred, the gradient says little.
        start = torch.full((len(self.areas), *lattice), 1.0 if upward else 0.5, dtype=x.dtype, device=x.device)
        found, alive = self.descend(passes, start, -stake if upward else stake, render)
        if not alive:
            passes.notes.append("the score does not depend on what is blurred")
            return Found(x.new_zeros(1, height, width))
        return Found(torch.stack([enlarged(smooth_mask(each)) for each in found]).mean(0)[None].clamp(0, 1))

    def cost_of(self, at: Tensor, which: int, step: int) -> Tensor:
        """How far the sorted mask is from one of the right area."""
        values = smooth_mask(at).flatten().sort().values
        ideal = torch.zeros_like(values)
        ideal[len(values) - round(self.areas[which] * len(values)) :] = 1
        # Sorting places that are equal would choose some of them by chance.
        differs = (values.detach() * 1e6).round().diff(prepend=values.new_full((1,), -1)) != 0
        group = differs.cumsum(0) - 1
        size = torch.zeros_like(values).index_add(0, group, torch.ones_like(values))
        ideal = (torch.zeros_like(values).index_add(0, group, ideal) / size)[group]
        weight: float = self.weight * _GROWTH ** (step / self.steps)
        return weight * (values - ideal).square().mean()


def smooth_mask(numbers: Tensor) -> Tensor:
    """(h, w) the smooth maximum, at each place of a lattice, of discs with soft edges around numbers (h, w) in 0..1.

    The lattice's step is a third of the discs' radius. At the border the last number goes on, so that no place comes
    before another where all numbers are the same. The smooth maximum of values f is their mean under the weights
    exp(f / temperature).
    """
    reach = 5
    at = torch.arange(-reach, reach + 1, dtype=numbers.dtype, device=numbers.device) / 3
    distance = (at[:, None].square() + at.square()).sqrt()
    disc = torch.exp(-2 * (distance - 0.5).clamp(min=0).square())  # (11, 11)
    around = F.unfold(F.pad(numbers[None, None], (reach,) * 4, mode="replicate"), 2 * reach + 1)[0]  # (121, h * w)
    values = around * disc.flatten()[:, None]
    weights = torch.softmax(values / _TEMPERATURE, 0)
    return (values * weights).sum(0).reshape(numbers.shape)


def pyramid(x: Tensor) -> Tensor:
    """(L, C, H, W) an image (1, C, H, W), ever more blurred from the first level, which is itself, to the last."""
    strongest = _STRONGEST * min(x.shape[2:])
    levels = [x[0]]
    for level in range(1, _LEVELS):
        down, across = (blurring(int(edge), strongest * level / (_LEVELS - 1), x) for edge in x.shape[2:])
        levels.append(down @ x[0] @ across.T)
    return torch.stack(levels)


def blurred_where(levels: Tensor, strength: Tensor) -> Tensor:
    """(1, C, H, W) the image with each pixel blurred by a strength (H, W) from 0 to 1, between the nearest levels."""
    depth = strength * (len(levels) - 1)
    nearer = depth.detach().floor().clamp(0, len(levels) - 2)
    at = nearer.long().expand(1, *levels.shape[1:])
    return torch.lerp(levels.gather(0, at), levels.gather(0, at + 1), depth - nearer)
