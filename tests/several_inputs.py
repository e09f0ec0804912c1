"""Networks with several inputs: late, middle and early fusion, a shared encoder, views, a state, and a mapping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def stream(channels: int, width: int = 6) -> nn.Sequential:
    """Two convolutions and a pooling, without biases."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, width, 3, padding=1, bias=False),
        nn.ReLU(),
    )


class Late(nn.Module):
    """Each image has its own encoder; the pooled features are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.rgb_stream, self.depth_stream = stream(3), stream(1)
        self.head = nn.Linear(12, 5, bias=False)

    def forward(self, rgb: Tensor, depth: Tensor) -> Tensor:
        pooled = [self.rgb_stream(rgb).mean((2, 3)), self.depth_stream(depth).mean((2, 3))]
        out: Tensor = self.head(torch.cat(pooled, 1))
        return out


class Middle(nn.Module):
    """The features are added, and convolved together."""

    def __init__(self) -> None:
        super().__init__()
        self.rgb_stream, self.depth_stream, self.fused = stream(3), stream(1), stream(6)
        self.head = nn.Linear(6, 5, bias=False)

    def forward(self, rgb: Tensor, depth: Tensor) -> Tensor:
        out: Tensor = self.head(self.fused(self.rgb_stream(rgb) + self.depth_stream(depth)).mean((2, 3)))
        return out


class Early(nn.Module):
    """The images are channels of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.head = stream(4), nn.Linear(6, 5, bias=False)

    def forward(self, rgb: Tensor, depth: Tensor) -> Tensor:
        out: Tensor = self.head(self.fused(torch.cat([rgb, depth], 1)).mean((2, 3)))
        return out


class Shared(nn.Module):
    """One encoder for the left and the right view."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = stream(3), nn.Linear(12, 5, bias=False)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        pooled = [self.encoder(view).mean((2, 3)) for view in (left, right)]
        out: Tensor = self.head(torch.cat(pooled, 1))
        return out


class Gated(nn.Module):
    """The tokens of one image attend to the tokens of another."""

    def __init__(self) -> None:
        super().__init__()
        self.rgb_stream, self.depth_stream = stream(3), stream(1)
        self.attention = nn.MultiheadAttention(6, 2, bias=False, batch_first=True)
        self.head = nn.Linear(6, 5, bias=False)

    def forward(self, rgb: Tensor, depth: Tensor) -> Tensor:
        queries = self.rgb_stream(rgb).flatten(2).mT
        keys = self.depth_stream(depth).flatten(2).mT
        out: Tensor = self.head((queries + self.attention(queries, keys, keys)[0]).mean(1))
        return out


class WithState(nn.Module):
    """An image and the state of a robot."""

    def __init__(self) -> None:
        super().__init__()
        self.camera, self.joints = stream(3), nn.Linear(4, 6, bias=False)
        self.head = nn.Linear(12, 5, bias=False)

    def forward(self, image: Tensor, state: Tensor, gripper: bool = False) -> Tensor:
        out: Tensor = self.head(torch.cat([self.camera(image).mean((2, 3)), torch.relu(self.joints(state))], 1))
        return -out if gripper else out


class MultiView(nn.Module):
    """Views (N, V, C, H, W), folded into the batch case by case, or view by view; and their maximum."""

    def __init__(self, *, is_transposed: bool = False) -> None:
        super().__init__()
        self.encoder, self.head, self.is_transposed = stream(3), nn.Linear(6, 5, bias=False), is_transposed

    def forward(self, views: Tensor) -> Tensor:
        folded = views.transpose(0, 1) if self.is_transposed else views
        pooled = self.encoder(folded.flatten(0, 1)).mean((2, 3)).unflatten(0, folded.shape[:2])
        out: Tensor = self.head(pooled.amax(0 if self.is_transposed else 1))
        return out


class Policy(nn.Module):
    """A policy that takes one mapping of cameras and a state, as LeRobot's, and returns actions (N, chunk, d)."""

    def __init__(self) -> None:
        super().__init__()
        self.top, self.wrist, self.joints = stream(3), stream(3), nn.Linear(4, 6, bias=False)
        self.head = nn.Linear(18, 8, bias=False)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        cameras = zip(("top", "wrist"), (self.top, self.wrist), strict=True)
        features = [encoder(batch[f"observation.images.{name}"]).mean((2, 3)) for name, encoder in cameras]
        state = torch.relu(self.joints(batch["observation.state"]))
        out: Tensor = self.head(torch.cat([*features, state], 1)).unflatten(1, (4, 2))
        return out


class Three(nn.Module):
    """Three images of three sizes, multiplied and added."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = nn.ModuleList(stream(1) for _ in range(3))
        self.head = nn.Linear(6, 5, bias=False)

    def forward(self, t1: Tensor, t2: Tensor, flair: Tensor) -> Tensor:
        first, second, third = (own(x).mean((2, 3)) for own, x in zip(self.streams, (t1, t2, flair), strict=True))
        out: Tensor = self.head(first + second + third)
        return out


def scene(size: int, channels: int = 3, rows: int = 2) -> Tensor:
    """Return noise (N, C, H, W)."""
    return torch.randn(rows, channels, size, size + 4, generator=torch.Generator().manual_seed(size + channels))


CASES: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "late": (Late, {"rgb": scene(16), "depth": scene(12, 1)}),
    "middle": (Middle, {"rgb": scene(16), "depth": scene(16, 1)}),
    "early": (Early, {"rgb": scene(16), "depth": scene(16, 1)}),
    "shared": (Shared, {"left": scene(16), "right": scene(20)}),
    "attention": (Gated, {"rgb": scene(16), "depth": scene(8, 1)}),
    "state": (WithState, {"image": scene(16), "state": torch.linspace(-1, 1, 8).view(2, 4), "gripper": True}),
    "three": (Three, {"t1": scene(16, 1), "t2": scene(12, 1), "flair": scene(8, 1)}),
    "policy": (
        Policy,
        {
            "observation.images.top": scene(16),
            "observation.images.wrist": scene(12),
            "observation.state": torch.linspace(-1, 1, 8).view(2, 4),
        },
    ),
}


def case(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return a network in double precision and its inputs."""
    kind, inputs = CASES[name]
    torch.manual_seed(0)
    model = kind().double().eval()
    return model, {key: own.double() if isinstance(own, Tensor) else own for key, own in inputs.items()}
