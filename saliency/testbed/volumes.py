"""Drawn volumes of two solid shapes in noise, with a mask for each shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..validation import check_integer
from .shapes import draw_pairs

SOLIDS = ("ball", "cube", "cross", "ring")
VOLUME = (24, 32, 32)  # voxels along depth, height and width
_RADIUS = 4.0  # voxels; a shape has about the volume of a ball of this radius
_MARGIN = 1.4  # radii from the surface to the closest centre; no shape is larger


@dataclass(frozen=True, slots=True)
class Volumes:
    """Volumes of two objects of different classes, which do not overlap. The mean of the background is 0."""

    volumes: Tensor  # (N, 1, 24, 32, 32), float32
    masks: Tensor  # (N, 2, 24, 32, 32), bool
    shapes: Tensor  # (N, 2), indices into SOLIDS

    @property
    def labels(self) -> Tensor:
        """The class of the first object, (N,)."""
        return self.shapes[:, 0]


def draw_volumes(count: int, *, seed: int = 0) -> Volumes:
    """Draw volumes of two solid shapes, such as a ball and a ring, in textured noise.

    The shapes, their brightness and their positions are independent of each other. The classes of both objects are
    correct: the map of one class should highlight the object of this class, and not the other object.

    Args:
        count: The number of volumes.
        seed: Fixes the volumes, with the count. The global random state is neither read nor changed.

    Raises:
        MethodError: The count is below 1.
    """
    count = check_integer("count", count)
    random = torch.Generator("cpu").manual_seed(seed)
    kinds = draw_pairs(count, len(SOLIDS), random)
    masks = _draw_masks(kinds, random)
    brightness = 0.5 + 0.5 * torch.rand(count, 2, 1, 1, 1, generator=random, device="cpu", dtype=torch.float32)
    volumes = 0.1 * torch.randn(count, 1, *VOLUME, generator=random, device="cpu", dtype=torch.float32)
    for cells in (4, 16):
        noise = torch.randn(count, 1, *[cells] * 3, generator=random, device="cpu", dtype=torch.float32)
        volumes += 0.1 * F.interpolate(noise, size=VOLUME, mode="trilinear")
    return Volumes(volumes + (masks * brightness).sum(1, keepdim=True), masks, kinds)


def _draw_masks(kinds: Tensor, random: torch.Generator) -> Tensor:
    """Return the voxels of two objects, one in each half of an axis, (N, 2, 24, 32, 32)."""
    count = len(kinds)
    axes = F.one_hot(torch.randint(3, (count, 1), generator=random, device="cpu"), 3)  # (N, 1, 3)
    first = torch.randint(2, (count, 1), generator=random, device="cpu")
    half = torch.tensor(VOLUME, device="cpu") * axes / 2  # (N, 1, 3)
    room = torch.tensor(VOLUME, device="cpu") - half - 2 * _MARGIN * _RADIUS
    positions = torch.rand(count, 2, 3, generator=random, device="cpu", dtype=torch.float32)
    # Whole numbers, so that a small network learns the shapes in a minute.
    centres = (_MARGIN * _RADIUS + room * positions).round() + half * torch.stack([first, 1 - first], 1)
    offsets = (torch.arange(length, device="cpu") + 0.5 for length in VOLUME)
    z, y, x = ((grid - centre[..., None]) / _RADIUS for grid, centre in zip(offsets, centres.unbind(-1), strict=True))
    inside = _inside(x[..., None, None, :], y[..., None, :, None], z[..., None, None])
    return inside.gather(0, kinds[None, ..., None, None, None].expand(1, *inside.shape[1:]))[0]


def _inside(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Return whether points (..., 1, 1, w), (..., 1, h, 1) and (..., d, 1, 1) are inside each of SOLIDS.

    All solids have about the same volume.
    """
    plane, height = x.square() + y.square(), z.square()

    def near(edge: float) -> Tensor:  # the number of axes along which
        return (x.abs() < edge).byte() + (y.abs() < edge) + (z.abs() < edge)

    ball, cube = plane + height < 1, near(0.806) == 3
    cross, ring = (near(1.05) == 3) & (near(0.437) > 1), (plane.sqrt() - 0.9).square() + height < 0.486**2
    return torch.stack([ball, cube, cross, ring])  # in the order of SOLIDS
