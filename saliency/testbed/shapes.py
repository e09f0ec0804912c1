"""Drawn images of two coloured shapes on textured noise, with a mask for each shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CLASSES = ("circle", "square", "triangle", "cross", "ring")
DISTRACTORS = ("dome", "bar", "hourglass")  # never the class of an image
COLOURS = {"red": (0.9, 0.2, 0.2), "green": (0.1, 0.7, 0.2), "blue": (0.2, 0.3, 0.9), "yellow": (0.9, 0.8, 0.1)}
SIZE = 64  # pixels per edge

_NAMES = CLASSES + DISTRACTORS
_RADIUS = 8  # pixels; a shape has the area of a circle of this radius
_STEP = 4  # pixels; centres lie on a grid, so that small networks learn the shapes in a minute
_MARGIN = 12  # pixels from the edge to the closest centre; no shape is larger
_RELATIONS = (("left of", "right of"), ("above", "below"))  # by axis: the smaller coordinate first


@dataclass(frozen=True, slots=True)
class Scenes:
    """Images of two shapes each: first the named object, then the other one. Both have the same area."""

    images: Tensor  # (N, 3, 64, 64), uint8
    masks: Tensor  # (N, 2, 64, 64), bool
    shapes: Tensor  # (N, 2), indices into CLASSES + DISTRACTORS
    colours: Tensor  # (N, 2), indices into COLOURS; the two differ
    axes: Tensor  # (N,), 0 if the shapes are side by side, 1 if one is above the other
    first: Tensor  # (N,), bool: the named object is on the left, or above

    @property
    def labels(self) -> Tensor:
        """The class of each named object, (N,), an index into CLASSES."""
        return self.shapes[:, 0]

    def captions(self) -> list[tuple[str, str, str, str]]:
        """Return the captions that are true of each image: each object, and its place beside the other one."""
        colours = tuple(COLOURS)
        result = []
        for shapes, hues, axis, first in zip(
            self.shapes.tolist(), self.colours.tolist(), self.axes.tolist(), self.first.tolist(), strict=True
        ):
            one, other = (f"a {colours[hue]} {_NAMES[shape]}" for hue, shape in zip(hues, shapes, strict=True))
            here, there = _RELATIONS[axis] if first else _RELATIONS[axis][::-1]
            result.append((one, other, f"{one} {here} {other}", f"{other} {there} {one}"))
        return result


def draw_scenes(count: int, *, seed: int = 0, two_classes: bool = False) -> Scenes:
    """Draw images that hold an object of a class and a distractor of equal size, on textured grey noise.

    Shapes, colours, places and noise are independent of each other, so only the named object tells the class.

    Args:
        count: The number of images.
        seed: Fixes the images; the global random state is neither read nor changed.
        two_classes: Whether the other object is of another class instead of a distractor.
    """
    random = torch.Generator("cpu").manual_seed(seed)
    kinds = _draw_pairs(count, len(CLASSES), random)
    if not two_classes:
        kinds[:, 1] = torch.randint(len(CLASSES), len(_NAMES), (count,), generator=random, device="cpu")
    hues = _draw_pairs(count, len(COLOURS), random)
    axes = torch.randint(2, (count,), generator=random, device="cpu")
    first = torch.randint(2, (count,), generator=random, device="cpu").bool()
    masks = _draw_masks(kinds, _draw_centres(axes, first, random))
    images = _draw_background(count, random)
    palette = torch.tensor(list(COLOURS.values()), device="cpu")
    for each in range(2):
        images = torch.where(masks[:, each, None], palette[hues[:, each], :, None, None], images)
    grain = torch.randn(count, 3, SIZE, SIZE, generator=random, device="cpu", dtype=torch.float32)
    images = (255 * (images + 0.08 * grain)).round().clamp(0, 255).to(torch.uint8)
    return Scenes(images, masks, kinds, hues, axes, first)


def _draw_pairs(count: int, choices: int, random: torch.Generator) -> Tensor:
    """Return two different choices for each image, (N, 2)."""
    first = torch.randint(choices, (count,), generator=random, device="cpu")
    step = torch.randint(1, choices, (count,), generator=random, device="cpu")
    return torch.stack([first, (first + step) % choices], 1)


def _draw_centres(axes: Tensor, first: Tensor, random: torch.Generator) -> Tensor:
    """Return the centres (x, y) of the two objects, (N, 2, 2): one in each half of the image along the axis."""
    count, free, half = len(axes), (SIZE - 2 * _MARGIN) // _STEP + 1, (SIZE // 2 - 2 * _MARGIN) // _STEP + 1
    across = torch.randint(free, (count, 2), generator=random, device="cpu")
    along = torch.randint(half, (count, 2), generator=random, device="cpu")
    along = along + torch.stack([~first, first], 1) * (SIZE // 2 // _STEP)  # the second half
    steps = torch.stack([across, along], 2)  # (N, 2, 2)
    return _MARGIN + _STEP * torch.where(axes[:, None, None] == 0, steps.flip(2), steps)


def _draw_masks(kinds: Tensor, centres: Tensor) -> Tensor:
    """Return the pixels of each object, (N, 2, 64, 64)."""
    pixels = torch.arange(SIZE, device="cpu") + 0.5
    x, y = ((pixels - centres[..., axis, None]) / _RADIUS for axis in range(2))  # (N, 2, 64)
    inside = _inside(x[..., None, :], y[..., None])
    return inside.gather(0, kinds[None, ..., None, None].expand(1, *inside.shape[1:]))[0]


def _inside(x: Tensor, y: Tensor) -> Tensor:
    """Return whether points (..., 1, w) and (..., h, 1) are inside each shape. The area of each is about pi."""
    radius, across, down = torch.hypot(x, y), x.abs(), y.abs()
    longest, shortest = torch.maximum(across, down), torch.minimum(across, down)
    shapes = {
        "circle": radius < 1,
        "square": longest < 0.886,
        "triangle": (across < 0.577 * (y + 1.166)) & (y < 1.166),
        "cross": (longest < 1.182) & (shortest < 0.4),
        "ring": (radius < 1.2) & (radius > 0.663),
        "dome": (torch.hypot(x, y - 0.707) < 1.414) & (y < 0.707),
        "bar": (across < 1.3) & (down < 0.604),
        "hourglass": (across < 1.09 * down) & (down < 1.2),
    }
    return torch.stack([shapes[name] for name in _NAMES])


def _draw_background(count: int, random: torch.Generator) -> Tensor:
    """Return grey noise of two scales, (N, 3, 64, 64)."""
    ground = torch.full((count, 1, SIZE, SIZE), 0.5, device="cpu", dtype=torch.float32)
    for cells in (8, 32):
        noise = torch.randn(count, 1, cells, cells, generator=random, device="cpu", dtype=torch.float32)
        ground += 0.07 * F.interpolate(noise, size=(SIZE, SIZE), mode="bilinear")
    return ground.expand(-1, 3, -1, -1)
