"""Stand-ins for the packages of docs/integrations.md, none of which the tests install."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor


class Recorder:
    """Keeps the arguments of every call of every method, in order, as (method, arguments, keywords)."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.arguments, self.keywords = arguments, keywords
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **keywords: self.calls.append((name, arguments, keywords))


class MeanMetric:
    """The mean of all values so far."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def update(self, value: Tensor) -> None:
        assert not value.requires_grad
        self.values += value.tolist()

    def compute(self) -> float:
        return sum(self.values) / len(self.values)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `import lightning, torchmetrics, wandb` work for one test."""
    for name, cls in (
        ("lightning.Callback", object),
        ("torchmetrics.MeanMetric", MeanMetric),
        ("wandb.Image", Recorder),
    ):
        module, _, attribute = name.partition(".")
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
        setattr(sys.modules[module], attribute, cls)
