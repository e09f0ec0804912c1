"""Extremal perturbations: the part of a given area that keeps the score highest while the rest is blurred."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attribution.estimates import generator
from ..attribution.options import LARGEST_STEPS, ConvertedOption, Option
from ..attribution.passes import ImageAttribution, Passes, TimedAttribution
from ..io.axes import at_least_float32, require_two_axes
from ..model.call import leaf
from ..validation import check_choice, check_integer, check_number, check_numbers
from .baselines import Diffusion

Render = Callable[[Tensor, tuple[int, ...]], Tensor]
"""A function from the numbers that are optimised, and a shift in pixels, to the model's input (1, C, H, W)."""

REFERENCE_EDGE = 224
"""The edge in pixels of the images for which the paper gives lengths. Lengths are scaled with the image."""

Keep = Literal["best", "worst"]

# The number of blur levels, the strongest blur, the radius of the discs (both as fractions of the shorter edge), the
# temperature of the smooth maximum, and the factor by which the weight of the area grows over all steps.
_LEVELS = 8
_STRONGEST = 20 / REFERENCE_EDGE
_RADIUS = 21 / REFERENCE_EDGE
_TEMPERATURE = 1 / 20
_GROWTH = 1.0035**800


class ExtremalPerturbation(TimedAttribution):
    """The part of the image, of a given area, that keeps the score highest while the rest is blurred.

    Formula: S = argmax_m y(x blurred by 1 − m) / range − w mean (sort(m) − r)², with r = (0, ..., 0, 1, ..., 1), in
    which the wanted area is 1.

    The mask is the smooth maximum of discs around the optimised numbers, on a lattice of 7 pixels. The lower
    the mask, the more a pixel is blurred, up to a standard deviation of 20 pixels (for images of 224 pixels, and in
    proportion for others). The squared distance of its sorted values from the ideal values (a fraction `areas` is 1,
    the rest 0) is added to the score, with a weight that grows at each step.

    Differences from the authors' code: the score is divided by the drop from blurring the whole image, and Adam is
    used. So weight and rate suit any model. The weight grows by a factor of 16 over all steps. Images are shifted by up
    to 2 of 224 pixels at each step. "best" starts from the whole image, "worst" from a half blurred image. Many parts
    are good: another seed may give another part. The steps of an image run one by one, regardless of `chunk`.

    Args:
        areas: The fractions of the image that remain, each between 0 and 1; all steps are run for each.
        steps: Steps of gradient descent, which are larger if there are fewer; 800 in the paper.
        weight: The weight of a wrong area at the first step.
        keep: "best" finds the part that suffices; "worst" the part whose removal lowers the score the most.

    Values: (N, 1, H, W), 0 to 1: the mask, 1 where a pixel belongs to the part; for several areas their mean. Zero
    everywhere if the score does not depend on the mask.

    Raises:
        MethodError: An area outside 0 to 1, or an option that is not a positive number.

    Source: Fong et al., "Understanding Deep Networks via Extremal Perturbations and Smooth Masks" (2019),
        https://arxiv.org/abs/1910.08485.
    """

    name = "extremal_perturbation"
    units = "fraction that belongs to the part"
    sign = "positive"
    preview_options: ClassVar = {"steps": 2}
    cost = "802 forwards, 800 backwards, for each area"

    areas: ConvertedOption[Sequence[float], tuple[float, ...]] = ConvertedOption(
        (0.1,), check_numbers, above=0, below=1
    )
    steps: Option[int] = Option(800, check_integer, most=LARGEST_STEPS)
    weight: Option[float] = Option(10.0, check_number, above=0)
    keep: Option[Keep] = Option("best", check_choice, get_args(Keep))

    def explain_image(self, passes: Passes, score: Tensor) -> ImageAttribution:
        """Compute the mean of the masks of all areas."""
        return passes.in_time(partial(self._mean_mask, passes, score), self.steps)

    def _mean_mask(self, passes: Passes, score: Tensor, steps: int) -> ImageAttribution:
        require_two_axes(passes.x, self.name)
        x = at_least_float32(passes.x.clone())  # an inference tensor cannot be saved for a gradient
        size = (int(x.shape[2]), int(x.shape[3]))
        levels = pyramid(x)  # (L, C, H, W)
        lattice = [max(1, min(edge, round(3 * edge / (_RADIUS * min(size))))) for edge in size]
        sign = 1 if self.keep == "best" else -1

        def enlarged(numbers: Tensor) -> Tensor:
            return F.interpolate(smooth_mask(numbers)[None, None], size, mode="bilinear", align_corners=False)[0, 0]

        def render(numbers: Tensor, shift: tuple[int, ...]) -> Tensor:
            mask = enlarged(numbers)
            return shifted(blurred_where(levels, 1 - mask if sign > 0 else mask), shift)

        score_range = self._score_range(passes, score, levels[-1:].to(passes.x.dtype))
        # "best" starts from the whole image: on a half blurred image, the gradient is not informative.
        start = x.new_full((len(self.areas), *lattice), 1.0 if sign > 0 else 0.5)
        numbers, has_gradient = self._descend(passes, start, -sign * score_range, render, steps)
        if not has_gradient:
            return ImageAttribution(x.new_zeros(1, *size), notes=["the score does not depend on the blurred parts"])
        return ImageAttribution(torch.stack(list(map(enlarged, numbers))).mean(0)[None].clamp(0, 1))

    def _descend(
        self, passes: Passes, start: Tensor, score_range: float, render: Render, steps: int
    ) -> tuple[Tensor, bool]:
        """Return the numbers (k, g, g) of some masks after all steps, and whether the score ever had a gradient.

        Args:
            passes: The passes of the image.
            start: (k, g, g) the first numbers; each of the k masks is optimised separately.
            score_range: The divisor of the score; negative to raise the score.
            render: See `Render`.
            steps: The number of steps.
        """
        masks, moments = list(start), torch.zeros(2, *start.shape, dtype=start.dtype, device=start.device)
        reach = round(2 * min(passes.x.shape[2:]) / REFERENCE_EDGE)
        has_gradient, count, rate = False, steps * len(masks), step_size(steps)

        def shift(step: int) -> tuple[int, ...]:
            pixels = torch.randint(-reach, reach + 1, (2,), generator=generator(self.seed, step), device="cpu")
            return tuple(pixels.tolist())

        def make(start: int, stop: int) -> Tensor:
            return render(masks[start % len(masks)], shift(start // len(masks))).to(passes.x.dtype)

        for done in passes.gradients(make, count, size=1, least=count):
            step, number = divmod(done.start, len(masks))
            has_gradient = has_gradient or bool(done.gradients.any())
            with torch.enable_grad():
                numbers = leaf(masks[number])
                image = render(numbers, shift(step))
                loss = (image * done.gradients.to(image.dtype)).sum() / score_range
                (gradient,) = torch.autograd.grad(loss + self.cost_of(numbers, number, step / steps), numbers)
            masks[number] = adam_step(masks[number], gradient, moments[:, number], step + 1, rate)
        return torch.stack(masks), has_gradient

    def cost_of(self, numbers: Tensor, mask: int, progress: float) -> Tensor:
        """Return the distance of the sorted mask from a mask of the right area, after a fraction of all steps."""
        values = smooth_mask(numbers).flatten().sort().values
        ideal = torch.zeros_like(values)
        ideal[len(values) - round(self.areas[mask] * len(values)) :] = 1
        # Equal values get the mean of their ideal values: sorting would choose some of them by chance.
        group: Tensor = torch.unique_consecutive((values.detach() * 1e6).round(), return_inverse=True)[1]
        ideal = torch.zeros_like(ideal).scatter_reduce(0, group, ideal, "mean", include_self=False)[group]
        weight: float = self.weight * _GROWTH**progress
        return weight * (values - ideal).square().mean()

    def _score_range(self, passes: Passes, score: Tensor, background: Tensor) -> float:
        """Return the positive change of the score when the whole image is hidden, as in `background` (1, C, H, W)."""
        least = 1e-3 * abs(float(score))
        hidden = float(passes.scores(lambda start, stop: background, 1))
        score_range = abs(float(score) - hidden)
        return score_range if score_range > least else max(least, 1e-3 * abs(hidden)) or 1.0


def step_size(steps: int) -> float:
    """Return the largest change of a number in one step, given the number of steps."""
    return max(0.02, min(0.25, 1.5 / steps))


def adam_step(numbers: Tensor, gradient: Tensor, moments: Tensor, step: int, rate: float) -> Tensor:
    """Return numbers within 0..1 after a step of Adam; steps count from 1. The two moments (2, ...) change in place.

    `torch.optim.Adam` would import the compiler of PyTorch, which takes seconds.

    Source: Kingma and Ba, "Adam" (2014), https://arxiv.org/abs/1412.6980.
    """
    moments[0].mul_(0.9).add_(gradient, alpha=0.1)
    moments[1].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
    root = (moments[1] / (1 - 0.999**step)).sqrt()
    # A number without a gradient does not change. Adam's epsilon would be too large for a small score.
    direction = torch.where(root > 0, moments[0] / (1 - 0.9**step) / root, torch.zeros_like(root))
    return (numbers - rate * direction).clamp(0, 1)


def shifted(image: Tensor, by: tuple[int, ...]) -> Tensor:
    """Move an image or a mask (..., H, W) along its last axes, to larger numbers; the border is repeated."""
    for axis, step in enumerate(by, -len(by)):
        positions = torch.arange(image.shape[axis], device=image.device) - step
        image = image.index_select(axis, positions.clamp(0, image.shape[axis] - 1)) if step else image
    return image


def smooth_mask(numbers: Tensor) -> Tensor:
    """Return the smooth maximum, at each point of a lattice, of discs with soft edges around numbers (h, w) in 0..1.

    The step of the lattice is a third of the discs' radius. The border is repeated, so that no point is preferred if
    all numbers are equal. The smooth maximum of values f is their mean under the weights exp(f / temperature).
    """
    reach = 5
    offsets = torch.arange(-reach, reach + 1, dtype=numbers.dtype, device=numbers.device) / 3
    distance = (offsets[:, None].square() + offsets.square()).sqrt()
    disc = torch.exp(-2 * (distance - 0.5).clamp(min=0).square())  # (11, 11)
    around = F.unfold(F.pad(numbers[None, None], (reach,) * 4, mode="replicate"), 2 * reach + 1)[0]  # (121, h * w)
    values = around * disc.flatten()[:, None]
    weights = torch.softmax(values / _TEMPERATURE, 0)
    return (values * weights).sum(0).reshape(numbers.shape)


def pyramid(x: Tensor) -> Tensor:
    """Return an image (1, C, H, W) at rising levels of blur (L, C, H, W); the first level is the image itself."""
    strongest = _STRONGEST * min(x.shape[2:])
    return Diffusion(x[0])(torch.linspace(0, strongest, _LEVELS, dtype=torch.float64, device="cpu"))


def blurred_where(levels: Tensor, strength: Tensor) -> Tensor:
    """Blur each pixel of an image by a strength (H, W) from 0 to 1, between the closest levels: (1, C, H, W)."""
    depth = strength * (len(levels) - 1)
    lower = depth.detach().floor().clamp(0, len(levels) - 2)
    level = lower.long().expand(1, *levels.shape[1:])
    return torch.lerp(levels.gather(0, level), levels.gather(0, level + 1), depth - lower)
