"""A model of colours and images of one colour each, for tests of classes and of weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EDGE = 16


class ColourClasses(nn.Module):
    """Four scores of an image (4, 16, 16): class c is the weighted mean of channel c."""

    def __init__(self) -> None:
        super().__init__()
        place = torch.rand(EDGE, EDGE, generator=torch.Generator().manual_seed(0))
        self.weight = nn.Parameter(torch.eye(4)[:, :, None, None] * place)

    def forward(self, x: Tensor) -> Tensor:
        return 8 * (x[:, None] * self.weight).mean((2, 3, 4))


def coloured(*colours: int) -> Tensor:
    """Images (N, 4, 16, 16), each of one channel with random values."""
    x = torch.rand(len(colours), 4, EDGE, EDGE, generator=torch.Generator().manual_seed(1))
    return x * torch.eye(4)[list(colours)][:, :, None, None]
