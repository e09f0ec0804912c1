"""A small network to load, and networks with other weights than it is loaded with."""

from __future__ import annotations

import torch
from torch import nn

from saliency import zoo

SMALL = "timm/test_resnet"  # a third of a million weights


def same_weights(model: nn.Module, other: nn.Module) -> bool:
    mine, theirs = model.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


def differing(name: str = SMALL, seed: int = 7) -> nn.Module:
    """A model whose weights are not the ones that `load(name, weights=None)` draws."""
    model = zoo.load(name, weights=None)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator))
    return model
