"""No method waits for the device once per layer or once per pass.

On a GPU, PyTorch reports these waits. Elsewhere, the operations are counted that read a number of a tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

from saliency import IDGI, METHODS, RISE, Attribution, IntegratedGradients, SmoothGrad
from saliency.errors import NotApplicableError
from saliency.extending import TracedAttribution
from tests.models import torchvision_models
from tests.selection import of_each_family

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAITING = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero")
TRACED = [name for name, cls in METHODS.items() if issubclass(cls, TracedAttribution)]
PER_LAYER = {"full_grad": 1, "lrp": 2, "excitation_backprop": 2, "deep_lift": 1, "deep_shap": 2, "chefer_lrp": 24}
"""The known waits per layer: `full_grad` reads whether a bias is 0, the others what a rule depends on."""
if DEVICE == "cpu":
    PER_LAYER["le_grad"] = 9  # the rows of zeros that its products skip


def waits(run: Callable[[], object]) -> int:
    """Count how often a call waits for the device."""
    if DEVICE == "cpu":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            run()
        return sum(event.count for event in profile.key_averages() if event.key in WAITING)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def convolutional(layers: int) -> nn.Module:
    """Return a network of some convolutions with biases and ReLUs, all of which are active."""
    widths = [3, *[4] * layers]
    blocks = [nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU()) for a, b in pairwise(widths)]
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    for parameter in model.parameters():  # no ReLU is dead: a warning that a map is 0 reads numbers
        nn.init.uniform_(parameter, 0.1, 0.3)
    return model


def transformer(layers: int) -> nn.Module:
    """Return a vision transformer of some blocks."""
    model: nn.Module = torchvision_models().VisionTransformer(32, 8, layers, 2, 8, 16, num_classes=3)
    nn.init.normal_(model.get_parameter("heads.head.weight"))  # 0 by default
    return model


def waits_of(name: str, layers: int) -> int:
    """Count the waits of a second call of a method on a network of some layers."""
    torch.manual_seed(0)
    x = torch.randn(1, 3, 32, 32).to(DEVICE)
    for network in (convolutional, transformer):
        method = METHODS[name](network(layers).to(DEVICE).eval(), **METHODS[name].preview_options)
        try:
            method.attribute(x, 1)
        except NotApplicableError:
            continue
        return waits(partial(method.attribute, x, 1))
    pytest.skip("needs another network")


@pytest.mark.parametrize("name", of_each_family([*TRACED, "full_grad"]))
def test_no_method_waits_once_per_layer(name: str) -> None:
    assert waits_of(name, 5) - waits_of(name, 2) <= 3 * PER_LAYER.get(name, 0)


@pytest.mark.parametrize(
    ("method", "number"),
    [(SmoothGrad, "passes"), (IntegratedGradients, "steps"), (IDGI, "steps"), (RISE, "passes")],
)
def test_no_method_waits_once_per_pass(method: type[Attribution], number: str) -> None:
    model, x = convolutional(2).to(DEVICE).eval(), torch.randn(1, 3, 32, 32).to(DEVICE)

    def waits_in(passes: int) -> int:
        own = method(model, chunk=64, **{number: passes})
        own.attribute(x, 1)
        return waits(lambda: own.attribute(x, 1))

    assert waits_in(48) == waits_in(24)
