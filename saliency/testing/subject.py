"""What the checks run on: a method with its options, small models, and images. Nothing here moves a random state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attribution.base import Attribution
from ..attribution.explanation import Explanation

Check = Callable[["Subject"], None]
"""A promise put to the test. Raises AssertionError where it is broken."""

SIZE = (16, 16)


class TinyNet(nn.Module):
    """A classifier that most methods apply to: one ReLU in place and used twice, one as a function, a linear head.

    Its BatchNorm and dropout betray a method that runs it in training mode, and `spare` is a layer that is never run.
    """

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Conv2d(6, 6, 3, stride=2, padding=1)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Conv2d(6, 8, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, classes)
        self.spare = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, classes)."""
        x = self.relu(self.norm(self.stem(x)))
        x = self.drop(F.relu(self.down(x)))
        x = self.relu(self.last(x))
        scores: Tensor = self.head(self.pool(x).flatten(1))
        return scores


def tiny_model(seed: int = 0) -> nn.Module:
    """A `TinyNet` with fixed weights, in evaluation mode."""
    # Modules draw their first weights from the global random state; on the meta device there is nothing to draw.
    with torch.device("meta"):
        model = TinyNet()
    model.to_empty(device="cpu").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not tensor.is_floating_point():
                tensor.zero_()
            elif name == "norm.running_var":
                tensor.uniform_(0.5, 2, generator=generator)
            else:
                width = tensor[0].numel() if tensor.dim() > 1 else 10
                tensor.normal_(0, (2 / width) ** 0.5, generator=generator)
        model.norm.weight.add_(1)
    return model


def images(count: int, size: tuple[int, int] = SIZE, *, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """A batch of noise (N, 3, H, W), the same at every call."""
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(seed), dtype=dtype, device="cpu")


@dataclass(frozen=True)
class Subject:
    """The method under test, how it is made, and the model that it is put on."""

    method: type[Attribution]
    options: Mapping[str, Any]
    build: Callable[[], nn.Module] = tiny_model

    def on(self, model: nn.Module, **changed: Any) -> Attribution:
        """The method on a model."""
        return self.method(model, **{**self.options, **changed})

    def model(self) -> nn.Module:
        """A new model in evaluation mode, the same at every call."""
        return self.build().eval()

    def precise_model(self) -> nn.Module:
        """The same in float64, where rounding cannot be taken for an error."""
        return self.model().double()

    def classes(self, model: nn.Module) -> int:
        """The number of classes of a model."""
        with torch.no_grad():
            return int(model(images(1).to(next(model.parameters()).dtype)).shape[1])


def require(kept: bool, broken: str) -> None:
    """Raise AssertionError with what is `broken`, unless the promise is `kept`."""
    if not kept:
        raise AssertionError(broken)


def require_same(found: Tensor, expected: Tensor, what: str, *, rounding: float = 1e-5) -> None:
    """Raise AssertionError unless two tensors agree, up to `rounding` times the largest expected magnitude."""
    require(found.shape == expected.shape, f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    off = float((found - expected).abs().max()) if found.numel() else 0.0
    most = rounding * max(float(expected.abs().max()) if expected.numel() else 0.0, 1e-12)
    # Written so that NaN fails.
    require(off <= most, f"{what}: off by up to {off:.3g} where {most:.3g} is rounding")


def require_same_explanation(found: Explanation, expected: Explanation, what: str) -> None:
    """Raise AssertionError unless two explanations agree in values, scores, target and layer."""
    require_same(found.values, expected.values, f"{what}: values")
    require_same(found.scores, expected.scores, f"{what}: scores")
    for name in ("target", "layer", "method", "settings"):
        came, wanted = getattr(found, name), getattr(expected, name)
        require(came == wanted, f"{what}: {name} is {came!r}, expected {wanted!r}")


def require_raises(expected: type[BaseException], call: Callable[[], Any], what: str) -> None:
    """Raise AssertionError unless the call raises what is expected."""
    try:
        result = call()
    except expected:
        return
    except Exception as error:
        raise AssertionError(f"{what}: expected {expected.__name__}, got {type(error).__name__}: {error}") from error
    raise AssertionError(f"{what}: expected {expected.__name__}, and {result!r} came back")
