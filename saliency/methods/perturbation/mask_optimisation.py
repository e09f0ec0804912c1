"""Extremal perturbations: of all smooth masks of a given area, the one that keeps the score highest."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...attribution.forward import at_least_float32
from ...attribution.options import EngineOptions
from ...attribution.resolved_target import ResolvedTarget
from ...engine.multi_pass import ImageAttribution, MultiPassAttribution, generator
from ...engine.runner import PassRunner
from ...errors import MethodError
from ...hooks.model_state import leaf
from ...validation import check_choice, check_whole_number, real_number
from .fills import Filler, FillLike, as_fill

Render = Callable[[Tensor, tuple[int, int]], Tensor]
"""From the numbers that are optimised, and a shift in pixels, to the image (1, C, H, W) that the model is shown."""

AUTHORS = 224
"""The edge in pixels of the pictures that the papers give their lengths for; lengths go along with the picture."""


class OptimisedMask(MultiPassAttribution):
    """A method that optimises masks step by step. The steps of an image come one after the other, whatever `chunk` is.

    The score is counted in units of what is at stake: the difference that it makes to hide the whole image. So the
    weights of what a mask costs mean the same for logits, probabilities and any other score.

    Args:
        model: As for every method.
        steps: How many steps of gradient descent each mask takes.
        **running: See `saliency.attribution.options.EngineOptions`.
    """

    sign = "positive"
    quick_options: ClassVar[Mapping[str, Any]] = {"steps": 2}
    rate: float
    """How far a step moves a mask's numbers, at most."""

    def __init__(self, model: nn.Module, *, steps: int, **running: Unpack[EngineOptions]) -> None:
        super().__init__(model, **running)
        self.steps = check_whole_number("steps", steps)

    def passes_of(self, x: Tensor, target: ResolvedTarget, image: int) -> PassRunner:
        """The passes of one image, one at a time: each step begins where the one before has ended."""
        single = copy.copy(self)
        single.chunk = 1
        return super(OptimisedMask, single).passes_of(x, target, image)

    def descend(self, passes: PassRunner, at: Tensor, stake: float, render: Render) -> tuple[Tensor, bool]:
        """Some masks' numbers (k, g, g) after all steps, and whether the score ever had a gradient at them.

        Args:
            passes: The passes of the image.
            at: (k, g, g) where to begin; each of the k is optimised for itself.
            stake: What the score is divided by; negative to raise it.
            render: See `Render`.
        """
        states = [Descent.begin(each) for each in at]
        reach = round(2 * min(passes.x.shape[2:]) / AUTHORS)
        alive = False
        passes.least = passes.used + len(at)

        def shift(step: int) -> tuple[int, int]:
            drawn = torch.randint(-reach, reach + 1, (2,), generator=generator(self.seed, step), device="cpu").tolist()
            return int(drawn[0]), int(drawn[1])

        def make(start: int, stop: int) -> Tensor:
            return render(states[start % len(at)].at, shift(start // len(at))).to(passes.x.dtype)

        for done in passes.gradients(make, self.steps * len(at)):
            step, which = divmod(done.start, len(at))
            alive = alive or bool(done.gradients.any())
            with torch.enable_grad():
                numbers = leaf(states[which].at)
                shown = render(numbers, shift(step))
                aim = (shown * done.gradients.to(shown.dtype)).sum() / stake + self.cost_of(numbers, which, step)
                (gradient,) = torch.autograd.grad(aim, numbers)
            states[which] = states[which].step(gradient, self.rate)
        return torch.stack([state.at for state in states]), alive

    @abstractmethod
    def cost_of(self, at: Tensor, which: int, step: int) -> Tensor:
        """() what the numbers (g, g) of mask `which` cost at a step, besides the score."""

    def stake(self, passes: PassRunner, score: Tensor, hidden: Tensor) -> float:
        """What hiding the whole image, which leaves `hidden` (1, C, H, W), does to the score: a positive number."""
        full = float(score)
        least = 1e-3 * abs(full)
        for done in passes.forwards(lambda start, stop: hidden, 1):
            rest = float(done.scores[0])
            stake = abs(full - rest)
            return stake if stake > least else max(least, 1e-3 * abs(rest)) or 1.0
        return 1.0


class Descent(NamedTuple):
    """The state of a gradient descent by Adam on numbers between 0 and 1.

    Source: Kingma and Ba, "Adam" (2014), https://arxiv.org/abs/1412.6980.
    """

    at: Tensor
    mean: Tensor
    square: Tensor
    taken: int

    @staticmethod
    def begin(at: Tensor) -> Descent:
        """The descent before its first step."""
        return Descent(at, torch.zeros_like(at), torch.zeros_like(at), 0)

    def step(self, gradient: Tensor, rate: float) -> Descent:
        """The descent one step further."""
        taken = self.taken + 1
        mean = 0.9 * self.mean + 0.1 * gradient
        square = 0.999 * self.square + 0.001 * gradient.square()
        root = (square / (1 - 0.999**taken)).sqrt()
        # A number without a gradient stays; Adam's usual constant would be large for a small score.
        off = torch.where(root > 0, mean / (1 - 0.9**taken) / root, torch.zeros_like(root))
        return Descent((self.at - rate * off).clamp(0, 1), mean, square, taken)


class MeaningfulPerturbation(OptimisedMask):
    """The smallest part of the image that has to be hidden for the score to fall.

    A mask m on a coarse grid, 1 where the image is hidden, is optimised to make score / stake + sparsity * mean(m)
    + smoothness * (sum of cubed steps of m) small; the stake is what hiding the whole image costs. So with a sparsity
    of 1 a place is hidden where its share in the score is larger than its share of the area. The optimisation begins
    with nothing hidden, and not from the paper's disc; masks are shifted by up to 2 of 224 pixels at each step.

    Args:
        model: As for every method.
        steps: Steps of gradient descent; the paper's are 300.
        sparsity: What it costs to hide, as above; the paper's 0.08 is meant for probabilities.
        smoothness: What edges cost; the paper's is 0.01.
        fill: What stands where the image is hidden: see `saliency.methods.perturbation.fills.FillLike`; not "inpaint".
        **running: See `saliency.attribution.options.EngineOptions`.

    Values: (N, 1, H, W), 0 to 1: how far each pixel was hidden.

    Raises:
        MethodError: An option that is no positive number, or a fill that depends on what is hidden.
        TargetError: The target does not fit the model's output, or does not depend on the input.

    Source: Fong and Vedaldi, "Interpretable Explanations of Black Boxes by Meaningful Perturbation" (2017),
        https://arxiv.org/abs/1704.03296.
    """

    name = "meaningful_perturbation"
    units = "share that is hidden"
    cost = "302 forwards, 300 backwards"
    rate = 0.1

    def __init__(
        self,
        model: nn.Module,
        *,
        steps: int = 300,
        sparsity: float = 1.0,
        smoothness: float = 0.01,
        fill: FillLike = "blur",
        **running: Unpack[EngineOptions],
    ) -> None:
        super().__init__(model, steps=steps, **running)
        self.sparsity = real_number("sparsity", sparsity, least=0)
        self.smoothness = real_number("smoothness", smoothness, least=0)
        self.fill = still_fill(fill, self.name)

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """What the mask hides in the end."""
        x = passes.x.clone()  # an inference tensor cannot be kept for a gradient
        hidden = Filler(x, self.fill).hidden_entirely()
        x, hidden = at_least_float32(x), at_least_float32(hidden)
        down, across = (enlarging(min(28, edge), edge, x) for edge in x.shape[2:])

        def render(mask: Tensor, shift: tuple[int, int]) -> Tensor:
            return torch.lerp(x, hidden, shifted(down @ mask @ across.T, shift))

        stake = self.stake(passes, score, hidden.to(passes.x.dtype))
        start = x.new_zeros(1, down.shape[1], across.shape[1])
        (mask,), _ = self.descend(passes, start, stake, render)
        return ImageAttribution((down @ mask @ across.T).clamp(0, 1)[None])

    def cost_of(self, at: Tensor, which: int, step: int) -> Tensor:
        """What is hidden, and the edges."""
        edges = at.diff(dim=0).abs().pow(3).sum() + at.diff(dim=1).abs().pow(3).sum()
        return self.sparsity * at.mean() + self.smoothness * edges


def still_fill(fill: FillLike, name: str) -> Any:
    """A fill that does not depend on what is hidden. Raises MethodError for one that does."""
    kept = as_fill(fill)
    if kept == "inpaint":
        raise MethodError(
            f'{name} hides pixels by degrees, which fill="inpaint" cannot; use "blur", "mean" or a number'
        )
    return kept


def enlarging(cells: int, pixels: int, like: Tensor) -> Tensor:
    """(pixels, cells) the linear map from a row of cells to a row of pixels: interpolation behind a slight blur."""
    rows = F.interpolate(torch.eye(cells, dtype=like.dtype, device=like.device)[None], pixels, mode="linear")[0].T
    return blurring(pixels, 5 * pixels / AUTHORS, like) @ rows


def blurring(pixels: int, sigma: float, like: Tensor) -> Tensor:
    """(pixels, pixels) a Gaussian blur as a linear map; at the border only what is there is averaged."""
    if sigma <= 0:
        return torch.eye(pixels, dtype=like.dtype, device=like.device)
    at = torch.arange(pixels, dtype=like.dtype, device=like.device)
    weights = torch.exp(-((at[:, None] - at) / sigma).square() / 2)
    return weights / weights.sum(1, keepdim=True)


def shifted(image: Tensor, by: tuple[int, int]) -> Tensor:
    """An image or a mask (..., H, W) moved down and to the right; what stands at the border goes on."""
    for axis, step in zip((-2, -1), by, strict=True):
        if step:
            edge = image.shape[axis]
            at = (torch.arange(edge, device=image.device) - step).clamp(0, edge - 1)
            image = image.index_select(axis, at)
    return image


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
        **running: See `saliency.attribution.options.EngineOptions`.

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
        **running: Unpack[EngineOptions],
    ) -> None:
        super().__init__(model, steps=steps, **running)
        self.rate = max(self.rate, min(0.25, 1.5 / self.steps))
        shares = areas if isinstance(areas, list | tuple) else (areas,)
        self.areas = [real_number("areas", share, above=0, below=1) for share in shares]
        if not self.areas:
            raise MethodError("areas is empty; expected at least one share of the image, such as 0.1")
        self.weight = real_number("weight", weight, above=0)
        self.keep = check_choice("keep", keep, ("best", "worst"))

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
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
            return ImageAttribution(x.new_zeros(1, height, width))
        return ImageAttribution(torch.stack([enlarged(smooth_mask(each)) for each in found]).mean(0)[None].clamp(0, 1))

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
