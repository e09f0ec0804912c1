"""ADCC is the harmonic mean that its authors compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from saliency.attribution.base import Attribution
from saliency.attribution.explanation import BatchAttribution
from saliency.attribution.questions import Questions
from saliency.metrics import METRICS, measure
from saliency.testing import Snapshot

CLASSES = [0, 1]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


WEIGHT = random(3, 10, 10, seed=2)
X = random(2, 3, 10, 10, seed=1).abs() + WEIGHT.clamp(min=0)


class Scaled(Attribution):
    """Fixed weights times the image, scaled to 0..1, as a CAM is."""

    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        return BatchAttribution(self.map(x)[:, None], target(self.model(x)))

    def map(self, x: Tensor) -> Tensor:
        maps = (x.sin() * WEIGHT.to(x)).sum(1)
        low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
        return (maps - low) / (high - low)


class Negative(Scaled):
    """A map of the image by itself that is the opposite of the map of the image times this map."""

    def map(self, x: Tensor) -> Tensor:
        maps = super().map(X.to(x))
        return maps if torch.equal(x, X) else 1 - maps


def network() -> nn.Module:
    head = nn.Linear(300, 3, bias=False).double()
    head.weight.data.copy_(torch.stack([WEIGHT, 0.9 * WEIGHT, -WEIGHT]).flatten(1) / 8)
    return nn.Sequential(nn.Flatten(), head)


def measured(name: str, method: Attribution, **options: Any) -> Tensor:
    metric = METRICS[name](**options)
    return metric.measure(method.attribute(X, CLASSES), method=method, inputs=X).values


def parts(method: Scaled) -> tuple[np.ndarray, np.ndarray]:
    """Coherency and low complexity, by NumPy."""
    own = method.map(X)
    again = method.map(X * own[:, None])
    r = [np.corrcoef(a.flatten(), b.flatten())[0, 1] for a, b in zip(own.numpy(), again.numpy(), strict=True)]
    return (np.array(r) + 1) / 2, 1 - own.mean((1, 2)).numpy()


def probabilities(model: nn.Module, x: Tensor) -> np.ndarray:
    found: np.ndarray = model(x).softmax(1)[range(2), CLASSES].detach().numpy()
    return found


def test_adcc_is_the_harmonic_mean_of_coherency_low_complexity_and_low_drop() -> None:
    model = network()
    method = Scaled(model)
    coherency, sparsity = parts(method)
    before, after = (probabilities(model, x) for x in (X, X * method.map(X)[:, None]))
    drop = np.maximum(before - after, 0) / before
    assert (drop > 0).any()
    expected = 3 / (1 / coherency + 1 / sparsity + 1 / (1 - drop))
    assert measured("adcc", method).tolist() == pytest.approx(expected, rel=1e-12)


def test_a_map_of_opposite_explanations_has_no_coherency() -> None:
    assert measured("adcc", Negative(network())).tolist() == pytest.approx([0, 0], abs=1e-12)


def test_adcc_calls_the_method_once_and_touches_nothing() -> None:
    method = Scaled(network())
    before = Snapshot(model=method.model, method=method, x=X)
    (result,) = measure("adcc", method.attribute(X, CLASSES), method=method, inputs=X)
    assert result.passes == 1
    assert not before.changes()
