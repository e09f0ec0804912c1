"""A real detector with its weights: P-Net, the first network of MTCNN, which the package `facenet-pytorch` contains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn


def p_net() -> nn.Module:
    """P-Net in eval mode, without running code of its file; the test is skipped where the package is missing.

    It takes images in -1..1, and returns boxes (N, 4, h, w) and probabilities (N, 2, h, w) of "no face" and "face" in
    windows of 12 x 12 pixels, 2 pixels apart.
    """
    package = pytest.importorskip("facenet_pytorch")
    net: nn.Module = package.models.mtcnn.PNet(pretrained=False)
    weights = Path(package.__file__).parent / "data" / "pnet.pt"
    net.load_state_dict(torch.load(weights, weights_only=True))
    return net.eval()


def face_input(image: Tensor, scale: float = 0.12) -> Tensor:
    """The input of P-Net for an image (3, H, W) in 0..255, smaller by a factor: a face of 100 pixels fills a window."""
    small = torch.nn.functional.interpolate(image[None].float(), scale_factor=scale, mode="area")
    return (small - 127.5) / 128
