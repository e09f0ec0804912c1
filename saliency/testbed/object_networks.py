"""Small networks that find objects: a U-Net, a one-stage detector, a query detector, and a network of keypoints."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .shapes import CLASSES, KEYPOINTS, SIZE

OBJECTS = CLASSES[:3]  # of the task "several"
_STRIDES = (4, 8)  # pixels per cell of the two levels of the detectors


def _convolution(inputs: int, width: int, stride: int = 1) -> nn.Sequential:
    layers = nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
    return nn.Sequential(*layers)


def _pair(inputs: int, width: int) -> nn.Sequential:
    return nn.Sequential(_convolution(inputs, width), _convolution(width, width))


class UNet(nn.Module):
    """U-Net with grids of 64 x 64, 32 x 32, 16 x 16 and, in `bottleneck`, 8 x 8.

    Source: Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image Segmentation" (2015),
    https://arxiv.org/abs/1505.04597.

    Args:
        outputs: The number of maps: the background and one for each class; or 1 for a single class.
        stride: The pixels per cell of the output: 1, or 2 to leave out the last upsampling.
    """

    def __init__(self, outputs: int = 1 + len(OBJECTS), *, stride: int = 1) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([_pair(3, 16), _pair(16, 32), _pair(32, 64)])
        self.bottleneck = _pair(64, 64)
        decoder = [_pair(64 + 64, 32), _pair(32 + 32, 16), _pair(16 + 16, 16)]
        self.decoder = nn.ModuleList(decoder if stride == 1 else decoder[:2])
        self.head = nn.Conv2d(16, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of each pixel, (N, outputs, H / stride, W / stride)."""
        skips = []
        for level in self.encoder:
            skips.append(x := level(x))
            x = F.max_pool2d(x, 2)
        x = self.bottleneck(x)
        for level, skip in zip(self.decoder, reversed(skips), strict=False):
            x = level(torch.cat([F.interpolate(x, scale_factor=2.0), skip], 1))
        logits: Tensor = self.head(x)
        return logits


def keypoint_network(outputs: int = len(KEYPOINTS)) -> nn.Module:
    """Return a U-Net with a heatmap of 32 x 32 cells for each keypoint; the maximum is 1 at its place.

    Source: Xiao et al., "Simple Baselines for Human Pose Estimation and Tracking" (2018),
    https://arxiv.org/abs/1804.06208.
    """
    return UNet(outputs, stride=2)


class Backbone(nn.Module):
    """Convolutions with grids of 16 x 16 and 8 x 8 cells."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(_convolution(3, 16, 2), _convolution(16, 32, 2), _convolution(32, 32))
        self.layer2 = nn.Sequential(_convolution(32, 64, 2), _pair(64, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return features (N, 32, H / 4, W / 4) and (N, 64, H / 8, W / 8)."""
        fine = self.layer1(x)
        return fine, self.layer2(fine)


class Detect(nn.Module):
    """Head of a detector without anchors, one branch of boxes and one of scores for each level.

    In each cell it predicts the distances from the centre of the cell to the four sides of a box.
    """

    def __init__(self, outputs: int, width: int) -> None:
        super().__init__()
        self.boxes, self.scores = (
            nn.ModuleList(nn.Sequential(_convolution(width, width), nn.Conv2d(width, maps, 1)) for _ in _STRIDES)
            for maps in (4, outputs)
        )

    def forward(self, features: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the boxes and scores of all cells, as `Detector` does."""
        boxes, scores = (
            torch.cat([branch(level).flatten(2) for branch, level in zip(branches, features, strict=True)], 2)
            for branches in (self.boxes, self.scores)
        )
        grids = [self._grid(level, stride) for level, stride in zip(features, _STRIDES, strict=True)]
        centres, strides = (torch.cat(parts, 1) for parts in zip(*grids, strict=True))  # (2, M), (1, M)
        before, after = (F.softplus(boxes) * strides).chunk(2, 1)  # (N, 2, M)
        y = torch.cat([centres + (after - before) / 2, before + after, scores.sigmoid()], 1)
        return y, {"boxes": boxes, "scores": scores}

    @staticmethod
    def _grid(level: Tensor, stride: int) -> tuple[Tensor, Tensor]:
        y, x = (torch.arange(size, device=level.device, dtype=level.dtype) + 0.5 for size in level.shape[2:])
        centres = stride * torch.stack([x.expand(len(y), -1), y[:, None].expand(-1, len(x))]).flatten(1)
        return centres, torch.full_like(centres[:1], stride)


class Detector(nn.Module):
    """One-stage detector on grids of 16 x 16 and 8 x 8, with the outputs of Ultralytics in evaluation.

    Sources: Lin et al., "Feature Pyramid Networks" (2017), https://arxiv.org/abs/1612.03144; Tian et al., "FCOS"
    (2019), https://arxiv.org/abs/1904.01355.
    """

    def __init__(self, outputs: int = len(OBJECTS)) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.fine, self.coarse = nn.Conv2d(32, 32, 1), nn.Conv2d(64, 32, 1)
        self.head = Detect(outputs, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (y, raw), for M candidates.

        y (N, 4 + C, M) has the centre, width and height of each box in pixels, and its C probabilities. raw["scores"]
        (N, C, M) has their logits, raw["boxes"] (N, 4, M) the distances before softplus and stride.
        """
        fine, coarse = self.backbone(x)
        coarse = self.coarse(coarse)
        fine = self.fine(fine) + F.interpolate(coarse, scale_factor=2.0)
        result: tuple[Tensor, dict[str, Tensor]] = self.head([fine, coarse])
        return result


class QueryDetector(nn.Module):
    """Detector whose queries attend to a grid of 8 x 8 cells, with the outputs of DETR in transformers.

    Source: Carion et al., "End-to-End Object Detection with Transformers" (2020), https://arxiv.org/abs/2005.12872.
    """

    def __init__(self, outputs: int = len(OBJECTS), *, queries: int = 16, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.positions = nn.Embedding((SIZE // 8) ** 2, width)
        self.encoder = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True)
        self.queries = nn.Embedding(queries, width)
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(width, 4, 2 * width, 0.0, batch_first=True) for _ in range(depth)
        )
        self.classes = nn.Linear(width, outputs + 1)
        self.boxes = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))

    def decode(self, x: Tensor) -> list[dict[str, Tensor]]:
        """Return the outputs after each layer of the decoder."""
        cells = self.backbone(x)[1].flatten(2).transpose(1, 2)  # (N, 64, width)
        tokens = self.encoder(cells + self.positions.weight)
        states = self.queries.weight.expand(len(x), -1, -1)
        outputs = []
        for layer in self.decoder:
            states = layer(states, tokens)
            outputs.append({"logits": self.classes(states), "pred_boxes": self.boxes(states).sigmoid()})
        return outputs

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return "logits" (N, Q, C + 1), the last for no object, and "pred_boxes" (N, Q, 4).

        The boxes have a centre, a width and a height, from 0 to 1 of the edges of the image.
        """
        return self.decode(x)[-1]
