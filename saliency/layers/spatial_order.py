"""Whether a layer's places lie where the picture's do: change a patch of the input, and see where the layer changes.

Some networks keep their tokens in another order than the rows of the picture, and some layers hold no places at all but
look as if they did. Shapes cannot tell; this can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..hooks.manager import HookManager
from ..hooks.model_state import run_model
from ..hooks.pytree import first_tensor
from .layout import Layout

# The centres of the patches that are changed, as shares of height and width: no two in one row, column or quarter.
_CENTRES = ((0.2, 0.3), (0.3, 0.8), (0.7, 0.15), (0.85, 0.65))
_PATCH = 1 / 8  # of the height and width
_PROJECTIONS = 3
_COMPARABLE = 0.75


@dataclass(frozen=True, slots=True)
class LayerCandidate:
    """A layer to check, by name, and how its output is read."""

    name: str
    layout: Layout


def scrambled_layers(model: nn.Module, x: Tensor, places: Sequence[LayerCandidate]) -> frozenset[str]:
    """The names of the layers in which the strongest change does not lie where the picture was changed.

    One forward of one image, and one for each of four patches. The model is expected to be borrowed.

    Args:
        model: The model.
        x: (1, C, H, W) one image.
        places: The layers to check; each is expected to be run.
    """
    if not places:
        return frozenset()
    before = _signatures(model, x, places)
    wrong: set[str] = set()
    for centre in _CENTRES:
        after = _signatures(model, _changed(x, centre), places)
        for place in places:
            if not _lies_at(after[place.name] - before[place.name], centre):
                wrong.add(place.name)
    return frozenset(wrong)


def _changed(x: Tensor, centre: tuple[float, float]) -> Tensor:
    """The image with a patch of noise, as strong as the image itself."""
    height, width = x.shape[-2:]
    rows, columns = max(1, round(height * _PATCH)), max(1, round(width * _PATCH))
    top, left = round(centre[0] * height - rows / 2), round(centre[1] * width - columns / 2)
    noise = torch.randn(
        *x.shape[:2], rows, columns, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu"
    )
    changed = x.clone()
    strength = x.std() if x.numel() > 1 and bool(x.std() > 0) else 1.0
    changed[..., top : top + rows, left : left + columns] += strength * noise.to(x)
    return changed


def _signatures(model: nn.Module, x: Tensor, places: Sequence[LayerCandidate]) -> dict[str, Tensor]:
    """A few random projections (P, h, w) of each layer's channels: enough to see a change, and small to keep."""
    found: dict[str, Tensor] = {}

    def project(place: LayerCandidate, output: Any) -> None:
        tensor = first_tensor(output)
        if tensor is not None:
            maps = place.layout(tensor.detach())[0].float()  # (K, h, w)
            directions = torch.randn(
                _PROJECTIONS, len(maps), generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu"
            )
            found[place.name] = torch.einsum("pk,khw->phw", directions.to(maps), maps)

    with HookManager() as hooks, torch.no_grad():
        for place in places:
            hooks.observe(model.get_submodule(place.name), partial(project, place))
        run_model(model, x)
    return found


def _lies_at(change: Tensor, centre: tuple[float, float]) -> bool:
    """Whether a change about as strong as the strongest lies within a cell, or an eighth of the picture, of the patch.

    Networks that mix all places spread a change; one that keeps its places in another order shows none at the patch.
    """
    strength = change.square().sum(0).sqrt()
    height, width = strength.shape
    rows = (torch.arange(height, device=strength.device) + 0.5) / height - centre[0]
    columns = (torch.arange(width, device=strength.device) + 0.5) / width - centre[1]
    near = (rows.abs() <= max(1.6 / height, 0.125))[:, None] & (columns.abs() <= max(1.6 / width, 0.125))
    strongest = strength.max()
    return bool(strongest > 0) and bool(strength[near].max() >= _COMPARABLE * strongest)
