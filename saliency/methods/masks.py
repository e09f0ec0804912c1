"""Masks that are optimised: what is the least that has to go, or the best that can stay?"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attribution.forward import widened
from ..attribution.options import Running
from ..attribution.resolved_target import Selection
from ..engine.multi_pass import Found, MultiPassAttribution, generator
from ..engine.runner import Passes
from ..errors import MethodError
from ..hooks.model_state import leaf
from ..validation import real_number, whole_number
from ..variants.fills import Filler, FillLike, as_fill

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
        **running: See `saliency.attribution.options.Running`.
    """

    sign = "positive"
    trial: ClassVar[Mapping[str, Any]] = {"steps": 2}
    rate: float
    """How far a step moves a mask's numbers, at most."""

    def __init__(self, model: nn.Module, *, steps: int, **running: Unpack[Running]) -> None:
        super().__init__(model, **running)
        self.steps = whole_number("steps", steps)

    def passes_of(self, x: Tensor, target: Selection, image: int) -> Passes:
        """The passes of one image, one at a time: each step begins where the one before has ended."""
        single = copy.copy(self)
        single.chunk = 1
        return super(OptimisedMask, single).passes_of(x, target, image)

    def descend(self, passes: Passes, at: Tensor, stake: float, render: Render) -> tuple[Tensor, bool]:
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

    def stake(self, passes: Passes, score: Tensor, hidden: Tensor) -> float:
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
        fill: What stands where the image is hidden: see `saliency.variants.fills.FillLike`, without "inpaint".
        **running: See `saliency.attribution.options.Running`.

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
        **running: Unpack[Running],
    ) -> None:
        super().__init__(model, steps=steps, **running)
        self.sparsity = real_number("sparsity", sparsity, least=0)
        self.smoothness = real_number("smoothness", smoothness, least=0)
        self.fill = still_fill(fill, self.name)

    def explain_image(self, passes: Passes, score: Tensor) -> Found:
        """What the mask hides in the end."""
        x = passes.x.clone()  # an inference tensor cannot be kept for a gradient
        hidden = Filler(x, self.fill).hidden_entirely()
        x, hidden = widened(x), widened(hidden)
        down, across = (enlarging(min(28, edge), edge, x) for edge in x.shape[2:])

        def render(mask: Tensor, shift: tuple[int, int]) -> Tensor:
            return torch.lerp(x, hidden, shifted(down @ mask @ across.T, shift))

        stake = self.stake(passes, score, hidden.to(passes.x.dtype))
        start = x.new_zeros(1, down.shape[1], across.shape[1])
        (mask,), _ = self.descend(passes, start, stake, render)
        return Found((down @ mask @ across.T).clamp(0, 1)[None])

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
