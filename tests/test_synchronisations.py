"""How often a call waits for the device, and how many operations it launches.

On a GPU, PyTorch reports waits. Elsewhere, the operations are counted that read a number of a tensor. `launches.toml`
holds the numbers of each method.
"""

from __future__ import annotations

import tomllib
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import saliency
from saliency import DRISE, IDGI, METHODS, RISE, Attribution, IntegratedGradients, SmoothGrad, VanillaGradient
from saliency.errors import NotApplicableError, SaliencyError
from saliency.extending import TracedAttribution
from saliency.hooks.operations import is_view
from tests.models import torchvision_models
from tests.selection import of_each_family

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAITING = {"_local_scalar_dense", "equal", "nonzero"}
COPYING = {"clone", "contiguous", "copy_", "_to_copy"}
NO_LAUNCH = {"detach", "empty", "empty_like", "empty_strided", "new_empty", "promote_types"}
TRACED = [name for name, cls in METHODS.items() if issubclass(cls, TracedAttribution)]
PER_LAYER = {"chefer_lrp": 12}
"""The known waits per layer: values that a rule depends on."""
LAUNCHES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("launches.toml").read_text(encoding="utf-8"))


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that counts the operations of a call: "launches", "waits", and "copies" of images in channels-last order."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counter[str]()
        read = Tensor.tolist

        def tolist(tensor: Tensor) -> Any:  # no operation
            self.counts["waits"] += 1
            return read(tensor)

        with pytest.MonkeyPatch.context() as patch, self:
            patch.setattr(Tensor, "tolist", tolist)
            call()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if name in WAITING:
            self.counts["waits"] += 1
        elif name not in NO_LAUNCH and not is_view(func):
            self.counts["launches"] += 1
        if name in COPYING and args[0].dim() == 4 and args[0].is_contiguous(memory_format=torch.channels_last):
            self.counts["copies"] += 1
        return result


def waits(run: Callable[[], object]) -> int:
    """Count how often a call waits for the device."""
    if DEVICE == "cpu":
        return Operations(run).counts["waits"]
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


def normed() -> nn.Module:
    """Return a network of convolutions, batch norms and ReLUs in place, with a max pool, in channels-last order."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(width, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        for width in (3, 8, 8)
    ]
    model = nn.Sequential(*blocks[:2], nn.MaxPool2d(2), blocks[2], nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.append(head := nn.Linear(8, 3))
    nn.init.constant_(head.bias, -5)  # scores that may be probabilities are read more often
    return model.to(memory_format=torch.channels_last)


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


def test_the_top_class_waits_no_longer_than_a_given_class() -> None:
    method, x = VanillaGradient(normed().to(DEVICE).eval()), torch.randn(2, 3, 32, 32).to(DEVICE)
    top = method.attribute(x).target
    assert waits(lambda: method.attribute(x)) == waits(lambda: method.attribute(x, list(top)))


def test_boxes_of_masked_images_are_read_together() -> None:
    model, x = saliency.load("shapes_detector").to(DEVICE), torch.randn(1, 3, 32, 32).to(DEVICE)

    def launches_in(passes: int) -> int:
        method = DRISE(model, passes=passes, chunk=passes)
        method.attribute(x, saliency.box())
        return Operations(lambda: method.attribute(x, saliency.box())).counts["launches"]

    assert launches_in(16) - launches_in(8) == 8  # the draws of the masks


def bare(model: nn.Module, x: Tensor) -> None:
    """Compute the gradient of a class without this package."""
    leaf = x.clone().requires_grad_()
    torch.autograd.grad(model(leaf)[:, 1].sum(), leaf)


def measured(name: str) -> dict[str, list[int]]:
    """Return the launches over the bare loop, the waits and the copies of a second call of a method, by network."""
    torch.manual_seed(0)
    x = torch.randn(1, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    rows = {}
    for network, model in {"cnn": normed().eval(), "vit": transformer(2).eval()}.items():
        method = METHODS[name](model, **METHODS[name].preview_options)
        try:
            method.attribute(x, 1)
        except SaliencyError:  # the method does not apply to the network
            continue
        counts = Operations(partial(method.attribute, x, 1)).counts
        over = counts["launches"] - Operations(partial(bare, model, x)).counts["launches"]
        rows[network] = [over, counts["waits"], counts["copies"]]
    return rows


@pytest.mark.filterwarnings("ignore::saliency.errors.SaliencyWarning")
@pytest.mark.parametrize("name", METHODS)
def test_launches_waits_and_copies_do_not_exceed_the_table(name: str) -> None:
    rows, table = measured(name), LAUNCHES[name]
    assert rows.keys() == table.keys()
    assert all(number <= most for network in rows for number, most in zip(rows[network], table[network], strict=True))


if __name__ == "__main__":  # python -m tests.test_synchronisations > tests/launches.toml
    warnings.simplefilter("ignore")
    print("# By method and network: operations over the bare gradient, waits, and copies of channels-last images.")
    for method_name in METHODS:
        cells = ", ".join(f"{network} = {row}" for network, row in measured(method_name).items())
        print(f"{method_name} = {{ {cells} }}")
