"""Small models that several test files use. A model that only one test needs stands next to that test."""

from __future__ import annotations

import importlib
import signal
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import saliency
from saliency.testing import tiny_model


class OwnForward(nn.Module):
    """Modules of one's own choice, and a forward of one's own, which is called with the model and its inputs."""

    def __init__(self, forward: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)
        self._forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self, *args, **kwargs)


# Classifiers.


class PooledNet(nn.Module):
    """Two convolutions, each with a ReLU, then global average pooling and one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 8, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x).mean((2, 3)))
        return out


class LinearModel(nn.Module):
    """A linear classifier of flattened images, whose gradients are its weights; `pack` changes the output."""

    def __init__(self, pack: Callable[[Tensor], Any] = lambda scores: scores, *, inputs: int = 12) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, inputs, generator=torch.Generator().manual_seed(1)))
        self.pack = pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(x.flatten(1) @ self.weight.T)


class FunctionModel(nn.Module):
    """Any function from images (N, C, H, W) to scores (N,), as two classes: itself and its negative."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        score = self.function(x)
        return torch.stack([score, -score], 1)


def torchvision_models() -> Any:
    """The models of torchvision, whose import takes two seconds: too long for tests that do not need it."""
    return importlib.import_module("torchvision.models")


def small_vit(classes: int = 5, size: int = 32, patch: int = 8) -> nn.Module:
    """A vision transformer of torchvision with two layers, whose head, zero by default, is drawn."""
    from torchvision.models import VisionTransformer

    model: nn.Module = VisionTransformer(size, patch, 2, 2, 16, 32, num_classes=classes)
    nn.init.normal_(model.get_parameter("heads.head.weight"))
    return model


def small_vgg(classes: int = 10) -> nn.Module:
    """VGG-11 of torchvision with a small classifier: nine of ten parameters are in that of the original."""
    from torchvision.models import VGG
    from torchvision.models.vgg import cfgs, make_layers

    with torch.device("meta"):
        model: nn.Module = VGG(nn.Identity(), init_weights=False)
    model.features = make_layers(cfgs["A"])
    model.classifier = nn.Sequential(nn.Linear(512 * 7 * 7, 32), nn.ReLU(True), nn.Dropout(), nn.Linear(32, classes))
    return model


def sigmoid_net() -> nn.Sequential:
    """The network of the textbooks: two inputs, two hidden units, two outputs, and known weights."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Sigmoid(), nn.Linear(2, 2), nn.Sigmoid())
    for layer, weight, bias in (
        (net[0], [[0.15, 0.25], [0.20, 0.30]], 0.35),
        (net[2], [[0.40, 0.50], [0.45, 0.55]], 0.6),
    ):
        assert isinstance(layer, nn.Linear)
        with torch.no_grad():
            layer.weight.copy_(torch.tensor(weight))
            layer.bias.fill_(bias)
    return net


# Detectors and poses, with random weights.


def _block(inputs: int, stride: int, activation: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, 8, 3, stride, 1), nn.BatchNorm2d(8), activation)


def cells(maps: Tensor, stride: int) -> Tensor:
    """The boxes (4, h * w) of all cells of maps, each four cells wide: centre, width and height in pixels."""
    rows, columns = (torch.arange(size) * stride + stride / 2 for size in maps.shape[2:])
    y, x = torch.meshgrid(rows, columns, indexing="ij")
    return torch.stack([x.flatten(), y.flatten(), *torch.full((2, x.numel()), 4.0 * stride)])


class LevelDetector(nn.Module):
    """A detector with a head for each level, which returns the levels too; all blocks may share one activation."""

    def __init__(self, *, shared: bool = False) -> None:
        super().__init__()
        one = nn.SiLU()
        self.b1, self.b2, self.b3 = (_block(*sizes, one if shared else nn.SiLU()) for sizes in ((3, 4), (8, 2), (8, 2)))
        self.head = nn.ModuleList(
            nn.Sequential(_block(8, 1, one if shared else nn.SiLU()), nn.Conv2d(8, 2, 1)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        fine = self.b2(self.b1(x))
        levels = [fine, self.b3(fine)]
        maps = [head(level) for head, level in zip(self.head, levels, strict=True)]
        scores = torch.cat([own.flatten(2) for own in maps], 2)
        boxes = torch.cat([cells(own, stride) for own, stride in zip(maps, (8, 16), strict=True)], 1)
        y = torch.cat([boxes.expand(len(x), -1, -1), scores.sigmoid()], 1)
        return y, {"scores": scores, "feats": levels}


class HeadsDetector(nn.Module):
    """Two levels with a classifier and a regressor each, which run after both levels, as in BlazeFace."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone1, self.backbone2 = _block(3, 4, nn.ReLU()), _block(8, 2, nn.ReLU())
        self.classifier_8, self.classifier_16 = nn.Conv2d(8, 1, 1), nn.Conv2d(8, 1, 1)
        self.regressor_8, self.regressor_16 = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        fine = self.backbone1(x)
        coarse = self.backbone2(fine)
        scores = [self.classifier_8(fine).flatten(2), self.classifier_16(coarse).flatten(2)]
        shifts = [self.regressor_8(fine).flatten(2), self.regressor_16(coarse).flatten(2)]
        boxes = torch.cat([cells(fine, 4), cells(coarse, 8)], 1) + torch.cat(shifts, 2)
        return boxes, torch.cat(scores, 2)

    @staticmethod
    def read(output: tuple[Tensor, Tensor]) -> list[saliency.Candidates]:
        """The candidates of each image."""
        centres, sizes = output[0].mT.chunk(2, -1)
        corners = torch.cat([centres - sizes / 2, centres + sizes / 2], -1)
        return [saliency.Candidates(*image) for image in zip(corners, output[1].mT, strict=True)]


class PoseNet(nn.Module):
    """Heatmaps of three joints, and a head of offsets that runs after them on deeper features."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.deeper = _block(3, 4, nn.ReLU()), _block(8, 2, nn.ReLU())
        self.heatmaps, self.offsets = nn.Conv2d(8, 3, 1), nn.Conv2d(8, 6, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.trunk(x)
        return {"heatmaps": self.heatmaps(features), "offsets": self.offsets(self.deeper(features))}


# Models around another model, by default the small classifier.


class Packed(nn.Module):
    """A model whose output is packed into something else, such as a dictionary."""

    def __init__(self, pack: Callable[[Tensor], Any], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = tiny_model() if inner is None else inner
        self.pack = pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(self.inner(x))


class Checkpointed(nn.Module):
    """A model that is computed again in the backward pass, unless `reentrant` is None."""

    def __init__(self, inner: nn.Module, *, reentrant: bool | None = False) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            plain: Tensor = self.inner(x)
            return plain
        again: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return again


class Interrupting(nn.Module):
    """A model in which Ctrl-C is pressed at one of its forwards."""

    def __init__(self, at: int, inner: nn.Module | None = None, *, by_signal: bool = True) -> None:
        super().__init__()
        self.inner = tiny_model() if inner is None else inner
        self.left, self.by_signal = at, by_signal

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            if not self.by_signal:
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGINT)
        out: Tensor = self.inner(x)
        return out


# Single layers.


class Argmax(nn.Module):
    """The index of the largest score, which has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(1)


class Fork(nn.Module):
    """Two outputs: twice and three times the input."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 3


class Raises(nn.Module):
    """Raises the given error in its forward."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error
