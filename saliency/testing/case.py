"""The method under test, small models and images, and assertions. The global random states do not change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attribution.base import Attribution
from ..attribution.explanation import Explanation

# Function that raises AssertionError if a method fails the check.
Check = Callable[["MethodCase"], None]

SIZE = (16, 16)


class TinyNet(nn.Module):
    """Classifier that most methods support, with an in-place and reused ReLU, a functional ReLU and a linear head.

    BatchNorm and dropout detect methods that run the model in training mode.
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

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, classes)."""
        x = self.relu(self.norm(self.stem(x)))
        x = self.drop(F.relu(self.down(x)))
        x = self.relu(self.last(x))
        scores: Tensor = self.head(self.pool(x).flatten(1))
        return scores


class TinyTransformer(nn.Module):
    """Classifier by attention among patches of 4 x 4 pixels and a class token, for images of any size.

    Dropout detects methods that run the model in training mode. With SiLU, PyTorch runs the same kernels with and
    without gradients.
    """

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.token = nn.Embedding(1, 8)
        options: dict[str, Any] = {"activation": F.silu, "batch_first": True, "norm_first": True}
        self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16, 0.5, **options) for _ in range(2)))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, classes)."""
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.weight.expand(len(x), 1, -1), patches], 1)
        scores: Tensor = self.head(self.norm(self.blocks(tokens))[:, 0])
        return scores


def tiny_model(seed: int = 0) -> nn.Module:
    """Return a `TinyNet` with fixed weights, in evaluation mode."""
    return _with_fixed_weights(TinyNet, seed)


def tiny_transformer(seed: int = 0) -> nn.Module:
    """Return a `TinyTransformer` with fixed weights, in evaluation mode."""
    return _with_fixed_weights(TinyTransformer, seed)


def tiny_model_for(method: type[Attribution]) -> Callable[[], nn.Module]:
    """Return the function that creates a small model on which a method is defined."""
    return tiny_transformer if method.needs.attention else tiny_model


def _with_fixed_weights(kind: type[nn.Module], seed: int) -> nn.Module:
    # Initialisation draws from the global random state, except on the meta device.
    with torch.device("meta"):
        model = kind()
    model.to_empty(device="cpu").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not tensor.is_floating_point():
                tensor.zero_()
            elif name.endswith("running_var"):
                tensor.uniform_(0.5, 2, generator=generator)
            else:
                width = tensor[0].numel() if tensor.dim() > 1 else 10
                tensor.normal_(0, (2 / width) ** 0.5, generator=generator)
                if "norm" in name and name.endswith("weight"):
                    tensor.add_(1)
    return model


def images(count: int, size: tuple[int, int] = SIZE, *, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a batch of noise (N, 3, H, W), identical at every call."""
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(seed), dtype=dtype, device="cpu")


@dataclass(frozen=True)
class MethodCase:
    """The method under test, its options, and the model that it runs on."""

    method: type[Attribution]
    options: Mapping[str, Any]
    build: Callable[[], nn.Module]

    def on(self, model: nn.Module, **changed: Any) -> Attribution:
        """Create the method for a model. `changed` overrides options."""
        return self.method(model, **{**self.options, **changed})

    def model(self) -> nn.Module:
        """Return a new model in evaluation mode, identical at every call."""
        return self.build().eval()

    def precise_model(self) -> nn.Module:
        """Return the model in float64, so that rounding is not mistaken for an error."""
        return self.model().double()

    def explain(self, model: nn.Module | None = None, x: Tensor | None = None, target: Any = (0, 1)) -> Explanation:
        """Explain a batch with a new method, by default two images on a new model."""
        method = self.on(self.model() if model is None else model)
        return method.attribute(images(2) if x is None else x, target)

    @cached_property
    def expected(self) -> Explanation:
        """The explanation of `images(2)` for the classes 0 and 1, shared by the checks."""
        return self.explain()

    @property
    def has_chunks(self) -> bool:
        """Whether the method runs many passes in chunks."""
        return "chunk" in self.method.options()


def require(holds: bool, failure: str) -> None:
    """Raise AssertionError with the message `failure` unless `holds`."""
    if not holds:
        raise AssertionError(failure)


def require_same(values: Tensor, expected: Tensor, what: str, *, rounding: float = 1e-5) -> None:
    """Raise AssertionError unless two tensors agree, up to `rounding` times the largest expected magnitude."""
    require(values.shape == expected.shape, f"{what}: shape {tuple(values.shape)}, expected {tuple(expected.shape)}")
    values, expected = values.detach().cpu().double(), expected.detach().cpu().double()
    difference = float((values - expected).abs().max()) if values.numel() else 0.0
    limit = rounding * max(float(expected.abs().max()) if expected.numel() else 0.0, 1e-12)
    # This comparison is false for NaN.
    require(difference <= limit, f"{what}: differs by up to {difference:.3g}; rounding allows {limit:.3g}")


def require_same_explanation(explanation: Explanation, expected: Explanation, what: str) -> None:
    """Raise AssertionError unless two explanations agree in values, scores, target, layer, method and settings."""
    require_same(explanation.values, expected.values, f"{what}: values")
    require_same(explanation.scores, expected.scores, f"{what}: scores")
    for name in ("target", "layer", "method", "settings"):
        value, wanted = getattr(explanation, name), getattr(expected, name)
        require(value == wanted, f"{what}: {name} is {value!r}, expected {wanted!r}")


def require_raises(expected: tuple[type, ...], call: Callable[[], Any], what: str) -> None:
    """Raise AssertionError unless the call raises one of the expected errors. NoneType expects no error."""
    error: BaseException | None = None
    try:
        call()
    except (Exception, KeyboardInterrupt) as raised:  # noqa: BLE001 - compared with the expected errors
        error = raised
    if not isinstance(error, expected):
        outcome = f"got {type(error).__name__}: {error}" if error else "nothing was raised"
        raise AssertionError(f"{what}: expected {expected[0].__name__}, but {outcome}") from error
