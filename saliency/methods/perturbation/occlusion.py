"""A window that moves over the picture, and what the score loses under it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Unpack

import torch
from torch import Tensor, nn

from ...attribution.explanation import Sign
from ...attribution.options import EngineOptions
from ...engine.multi_pass import ImageAttribution, MultiPassAttribution
from ...engine.partial.window import WindowForward
from ...engine.runner import MakeInputs, PassRunner
from ...errors import MethodError
from ...validation import is_pair, is_whole
from .fills import Filler, FillLike, as_fill

Place = tuple[int, int]  # top, left

FEW = 16
"""So many windows or more are recomputed only where they reach; for fewer the preparation does not pay."""


class Occlusion(MultiPassAttribution):
    """How much the score falls when a window around a pixel is hidden.

    The window moves by `stride`; a pixel's value is the mean over the windows that cover it. The last window of a row
    or column lies flush with the border, so every pixel is covered, and none hangs over.

    Where the model allows for it, only what a window reaches is computed anew, which is exact to rounding; what was
    done stands in the effort's note.

    Args:
        model: As for every method.
        window: The window's edge in pixels of the model's input, or (height, width); clipped to the picture.
        stride: How far it moves, or (down, across); not more than the window.
        fill: What stands in the window: a number, or one per channel, in the model's normalised space (0 is the mean
            colour of its training pictures), "mean" (the picture's own), "blur", "inpaint" (from around the window), or
            a picture (C, H, W) as the model takes it.
        **running: See `saliency.attribution.options.EngineOptions`.

    Values: (N, 1, H, W), signed, in score units: what the score loses, positive where the window hides support.

    Raises:
        MethodError: An option that makes no sense, or does not fit the image.
        TargetError: The target does not fit the model's output.

    Source: Zeiler and Fergus, "Visualizing and Understanding Convolutional Networks" (2013),
        https://arxiv.org/abs/1311.2901.
    """

    name = "occlusion"
    cost = "1 forward for each place of the window: 169 at 224x224"
    sign: ClassVar[Sign] = "signed"
    quick_options: ClassVar = {"window": 7, "stride": 5}

    def __init__(
        self,
        model: nn.Module,
        *,
        window: int | Sequence[int] = 32,
        stride: int | Sequence[int] = 16,
        fill: FillLike = 0.0,
        **running: Unpack[EngineOptions],
    ) -> None:
        super().__init__(model, **running)
        self.window = _edges("window", window)
        self.stride = _edges("stride", stride)
        self.fill = as_fill(fill)
        for edge, step in zip(_pair(self.window), _pair(self.stride), strict=True):
            if step > edge:
                raise MethodError(f"stride={step} is longer than the window of {edge}: it would leave pixels out")

    def explain_image(self, passes: PassRunner, score: Tensor) -> ImageAttribution:
        """The mean fall over the windows that cover each pixel; 0 where an interrupt left a pixel uncovered."""
        height, width = passes.x.shape[2:]
        size = (min(_pair(self.window)[0], height), min(_pair(self.window)[1], width))
        steps = _pair(self.stride)
        places = [(y, x) for y in _starts(height, size[0], steps[0]) for x in _starts(width, size[1], steps[1])]
        total = torch.zeros(height, width, dtype=torch.float64, device="cpu")
        covered = torch.zeros_like(total)
        for start, scores in self._runs(passes, places, size):
            falls = (score - scores).tolist()
            for (top, left), fall in zip(places[start : start + len(falls)], falls, strict=True):
                total[top : top + size[0], left : left + size[1]] += fall
                covered[top : top + size[0], left : left + size[1]] += 1
        if not bool(covered.all()):
            passes.notes.append(f"{float((covered > 0).double().mean()):.0%} of the picture were covered")
        return ImageAttribution((total / covered.clamp(min=1))[None].to(passes.x))

    def _runs(self, passes: PassRunner, places: list[Place], size: tuple[int, int]) -> Iterator[tuple[int, Tensor]]:
        """The number of the first place of each chunk, and the scores (k,) with these places hidden."""
        x, filler = passes.x, Filler(passes.x, self.fill)

        def patches(start: int, stop: int) -> Tensor:  # (k, C, h, w)
            return torch.stack([filler.patch(top, left, size) for top, left in places[start:stop]])

        def make(start: int, stop: int) -> Tensor:  # (k, C, H, W)
            images = x.repeat(stop - start, 1, 1, 1)
            for image, patch, (top, left) in zip(images, patches(start, stop), places[start:stop], strict=True):
                image[:, top : top + size[0], left : left + size[1]] = patch
            return images

        if self.precision == "exact" and len(places) >= FEW:
            local = WindowForward(passes.model, x)
            if local.how == WindowForward.part:
                yield from self._local_runs(passes, places, size, local, patches)
                return
        for done in passes.forwards(make, len(places)):
            yield done.start, done.scores

    def _local_runs(
        self, passes: PassRunner, places: list[Place], size: tuple[int, int], local: WindowForward, patches: MakeInputs
    ) -> Iterator[tuple[int, Tensor]]:
        """The same, recomputed only where the windows reach."""

        def compute(start: int, stop: int) -> tuple[int, Tensor]:
            tops, lefts = zip(*places[start:stop], strict=True)
            with torch.no_grad():
                return start, passes.target(stop - start)(local(patches(start, stop), tops, lefts))

        yield from passes.chunks(compute, len(places), f"window of {size[0]}x{size[1]}")
        share = f": {local.share:.0%} of the multiply-adds" if local.how == WindowForward.part else ""
        passes.notes.append(local.how + share)


def _starts(length: int, window: int, stride: int) -> list[int]:
    """Where the windows begin along one edge; the last one ends with the picture."""
    last = length - window
    return [*range(0, last, stride), last]


def _edges(option: str, edges: int | Sequence[int]) -> int | tuple[int, int]:
    """One number of pixels, or two. Raises MethodError for anything else."""
    made: object = edges
    if is_pair(made):
        return int(made[0]), int(made[1])
    if is_whole(made):
        return int(made)
    raise MethodError(f"{option}={made!r} is no whole number of pixels of at least 1, nor two of them")


def _pair(edges: int | tuple[int, int]) -> tuple[int, int]:
    return edges if isinstance(edges, tuple) else (edges, edges)
