"""Forwards of changed windows, computed only where they have an effect, equal whole forwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from saliency.attribution.window import PATCH_RULES, Kernel, WindowForward, pointwise
from saliency.hooks.pytree import tree_tensors
from saliency.model.call import prepared_for_attribution
from tests.models import small_vit, torchvision_models


def pasted(x: Tensor, patches: Tensor, tops: list[int], lefts: list[int]) -> Tensor:
    """The definition: copies of the picture with a window each."""
    rows = x.repeat(len(patches), 1, 1, 1)
    height, width = patches.shape[-2:]
    for row, (top, left) in enumerate(zip(tops, lefts, strict=True)):
        rows[row, :, top : top + height, left : left + width] = patches[row]
    return rows


def windows(x: Tensor, height: int, width: int) -> tuple[Tensor, list[int], list[int]]:
    """Windows in all corners, at the borders and inside, with different content in each."""
    down, across = x.shape[-2] - height, x.shape[-1] - width
    places = [(0, 0), (0, across), (down, 0), (down, across), (down // 2, across // 3), (down // 3, across), (1, 2)]
    patches = torch.randn(len(places), x.shape[1], height, width, dtype=x.dtype)
    return patches, [min(top, down) for top, _ in places], [min(left, across) for _, left in places]


def same(one: Any, two: Any) -> None:
    pairs = list(zip(tree_tensors(one), tree_tensors(two), strict=True))
    assert pairs
    for first, second in pairs:
        torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-10)


def drawn(model: nn.Module) -> nn.Module:
    """The model in double precision with other statistics, scales and shifts than 0 and 1."""
    for module in model.double().eval().modules():
        if isinstance(module, nn.BatchNorm2d):
            for each in (module.weight, module.bias, module.running_mean, module.running_var):
                assert each is not None
                each.data = torch.rand_like(each) + 0.5
    return model


def calibrated(model: nn.Module, x: Tensor) -> nn.Module:
    """The model with the statistics of some pictures, so that what a window changes is not lost on the way."""
    for module in model.double().train().modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        model(torch.randn(4, *x.shape[1:], dtype=x.dtype))
    return model.eval()


def picture(height: int = 40, width: int = 52) -> Tensor:
    return torch.randn(1, 3, height, width, dtype=torch.float64)


class Work(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the multiply-adds that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = op(*args, **(kwargs or {}))
        if op.overloadpacket in flop_registry:
            self.total += flop_registry[op.overloadpacket](*args, **(kwargs or {}), out_val=output) // 2
        return output


def share_of(local: Callable[[], Any], whole: Callable[[], Any]) -> float:
    """The multiply-adds of one run over those of another."""
    totals: list[int] = []
    for run in (local, whole):
        with Work() as work:
            run()
        totals.append(work.total)
    return totals[0] / totals[1]


def right(model: nn.Module, x: Tensor, height: int = 5, width: int = 7, share: float = 0.9) -> WindowForward:
    """The model's own answer, given where the window reaches only and with less work than this share."""
    with prepared_for_attribution(model), torch.no_grad():
        local = WindowForward(model, x)
        assert local.how == WindowForward.part, local.why
        patches, tops, lefts = windows(x, height, width)
        before = patches.clone()
        expected = model(pasted(x, patches, tops, lefts))
        first = next(tree_tensors(expected))
        assert not torch.allclose(first[0], first[1], rtol=1e-6)  # the window is seen
        same(local(patches, tops, lefts), expected)
        assert local.how == WindowForward.part, local.why
        assert torch.equal(patches, before)
        whole = pasted(x, patches, tops, lefts)
        same(local.of_images(whole), expected)
        assert share_of(lambda: local.of_images(whole), lambda: model(whole.clone())) < share
        assert share_of(lambda: local(patches, tops, lefts), lambda: model(whole)) < share
        same(local(patches[:1], tops[:1], lefts[:1]), model(pasted(x, patches[:1], tops[:1], lefts[:1])))
    return local


CHAINS: dict[str, Callable[[], nn.Module]] = {
    "odd": lambda: nn.Sequential(
        nn.Conv2d(3, 6, (5, 3), stride=(2, 1), padding=(3, 0)),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 8, 3, dilation=2, padding=1, groups=2, bias=False),
        nn.SiLU(inplace=True),
        nn.Conv2d(8, 4, 1, stride=3),
    ),
    "pools": lambda: nn.Sequential(
        nn.Conv2d(3, 6, 3, padding="same"),
        nn.MaxPool2d(3, 2, 1),
        nn.AvgPool2d(3, 1, 1),
        nn.Hardswish(inplace=True),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.AvgPool2d((2, 1)),
    ),
    "uncounted": lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.AvgPool2d(3, 1, 1, count_include_pad=False)),
    "norms": lambda: nn.Sequential(
        nn.ZeroPad2d((1, 2, 0, 3)),
        nn.Conv2d(3, 6, 4),
        nn.BatchNorm2d(6),
        nn.ReLU6(inplace=True),
        nn.Dropout(),
        nn.GELU(),
    ),
    "other pads": lambda: nn.Sequential(nn.ConstantPad2d(2, 0.7), nn.ReLU(inplace=True), nn.Conv2d(3, 4, 3), nn.ELU()),
    "up": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 3, 3, 2), nn.Sigmoid()),
    "softmax": lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Softmax(1), nn.Conv2d(4, 2, 3)),
    "classes": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 5)
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chains_of_layers_are_right(name: str) -> None:
    right(drawn(CHAINS[name]()), picture(), share=1.01 if name in ("up", "softmax") else 0.9)


class Branches(nn.Module):
    """Branches of several reaches, joined by cat, sum and product, with constants and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, bias=False)
        self.narrow = nn.Conv2d(8, 4, 1)
        self.wide = nn.Conv2d(8, 4, 5, padding=2)
        self.pool = nn.MaxPool2d(3, 1, 1)
        self.last = nn.Conv2d(16, 6, 3, padding=1)
        self.place = nn.Parameter(torch.randn(1, 16, 19, 25))
        self.scale = nn.Parameter(torch.randn(16, 1, 1))

    def branches(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        wide = self.wide(x)
        padded = F.pad(x, (1, 0, 0, 1)).relu_()
        narrow = self.narrow(padded[:, :, :-1, 1:] + x)
        x.tanh_()
        x = torch.cat([narrow, wide, self.pool(x)], 1)
        return (x + self.place) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        x = self.branches(x)
        first, second = x.chunk(2, 1)
        x = torch.cat([torch.where(first > 0.1, second, first), x[:, 8:] * 0.3], 1)
        maps: Tensor = self.last(x)
        return maps.flatten(1).sum(1, keepdim=True).repeat(1, 2)


class Gated(Branches):
    """Squeeze and excitation: from there on each location depends on all others."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.branches(x)
        maps: Tensor = self.last(x * x.mean((2, 3), keepdim=True).sigmoid())
        return maps.mean((2, 3))


class Residual(Branches):
    """Residual blocks with a stride, a shortcut of another reach, and sums in place."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(8, 16, 3, 2, 1)
        self.short = nn.Sequential(nn.Conv2d(8, 16, 1, 2), nn.BatchNorm2d(16))
        self.more = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x -= 0.3
        x = self.stem(x).relu_()
        short = self.short(x)
        x = self.down(x)
        x += short
        x = F.relu(x, inplace=True)
        x = (self.more(x) + x).relu_()
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class SizesAreRead(Branches):
    """Numbers of rows in the model's own code."""

    def forward(self, x: Tensor) -> Any:
        n = x.shape[0]
        x = self.branches(x)
        return {"maps": [x, self.last(x)], "flat": x.reshape(n * 16, -1).view(n, 16, -1).sum(2), "name": "x"}


@pytest.mark.parametrize("kind", [Branches, Gated, Residual, SizesAreRead])
@pytest.mark.parametrize("size", [(5, 7), (1, 1), (14, 3)])
def test_networks_with_branches_are_right(kind: Callable[[], nn.Module], size: tuple[int, int]) -> None:
    right(drawn(kind()), picture(), *size, share=1.01)


@pytest.mark.parametrize("size", [(40, 52), (39, 50), (40, 3)])
def test_windows_as_large_as_the_picture_are_right(size: tuple[int, int]) -> None:
    model, x = drawn(Residual()), picture()
    with prepared_for_attribution(model), torch.no_grad():
        local = WindowForward(model, x)
        patches, tops, lefts = windows(x, *size)
        same(local(patches, tops, lefts), model(pasted(x, patches, tops, lefts)))


ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "resnet": (lambda: torchvision_models().ResNet(torchvision_models().resnet.Bottleneck, [1, 1, 1, 1]), 0.8),
    "densenet": (lambda: torchvision_models().DenseNet(8, (2, 3), 8, num_classes=7), 0.8),
    "shufflenet": (lambda: torchvision_models().shufflenet_v2_x0_5(num_classes=7), 1.0),
    "mobilenet": (lambda: torchvision_models().mobilenet_v2(width_mult=0.25, num_classes=7), 0.9),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_known_architectures_are_right_with_less_work(name: str) -> None:
    kind, share = ARCHITECTURES[name]
    x = picture(96, 128)
    right(calibrated(kind(), x), x, 12, 10, share)


def test_only_what_a_window_reaches_is_multiplied() -> None:
    model = drawn(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)))
    x = picture(20, 30)
    with prepared_for_attribution(model):
        local, patches = WindowForward(model, x), torch.zeros(2, 3, 4, 5, dtype=x.dtype)
        share = share_of(lambda: local(patches, [3, 0], [5, 25]), lambda: model(torch.cat([x, x])))
    costs, reached = (4 * 27, 2 * 36), (6 * 7, 8 * 9)
    assert share == pytest.approx(
        sum(cost * area for cost, area in zip(costs, reached, strict=True)) / (sum(costs) * 600)
    )


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 3), st.integers(1, 3), st.integers(4, 30), st.data())
def test_the_places_that_a_stretch_reaches_hold_all_that_depends_on_it(
    size: int, stride: int, padding: int, dilation: int, length: int, data: st.DataObject
) -> None:
    outputs = (length + 2 * padding - (size - 1) * dilation - 1) // stride + 1
    stretch = data.draw(st.integers(1, length))
    start = data.draw(st.integers(0, length - stretch))
    if outputs < 1:
        return
    count, (first,) = Kernel(size, stride, padding, dilation).reached(stretch, [start], outputs)
    assert 0 <= first <= outputs - count
    x = torch.zeros(1, 1, length, dtype=torch.float64)
    x[..., start : start + stretch] = 1
    weight = torch.ones(1, 1, size, dtype=torch.float64)
    depends = F.conv1d(x, weight, None, stride, padding, dilation)[0, 0].nonzero().flatten().tolist()
    assert all(first <= each < first + count for each in depends)


def test_vision_transformers_are_right() -> None:
    model = drawn(small_vit(7, 64, 16))
    x = picture(64, 64)
    with prepared_for_attribution(model), torch.no_grad():
        local = WindowForward(model, x)
        patches, tops, lefts = windows(x, 9, 9)
        same(local(patches, tops, lefts), model(pasted(x, patches, tops, lefts)))


class LooksAtValues(Branches):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.narrow(x).mean((2, 3)) * (1 if bool(x[0].mean() > 0) else 2)  # type: ignore[no-any-return]


class UnderTwoNames(Branches):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x[:, :2].add_(1)
        return self.wide(x).mean((2, 3))  # type: ignore[no-any-return]


class MixesRows(Branches):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return (x - x.mean(0, keepdim=True)).mean((2, 3)).abs()


class Draws(Branches):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.stem(x), training=True).mean((2, 3))


class AsAList(Branches):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.narrow(x).mean((2, 3)) * (2 if max(x.flatten().tolist()) > 20 else 1)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (LooksAtValues, "a number or a shape"),
        (UnderTwoNames, "several aliases"),
        (AsAList, "tolist"),
    ],
)
def test_what_cannot_be_done_in_parts_is_whole_forwards(kind: Callable[[], nn.Module], why: str) -> None:
    model, x = drawn(kind()), picture()
    with prepared_for_attribution(model), torch.no_grad():
        local = WindowForward(model, x)
        assert local.how == "whole forwards"
        assert why in local.why
        patches, tops, lefts = windows(x, 5, 7)
        same(local(patches, tops, lefts), model(pasted(x, patches, tops, lefts)))


def test_what_draws_random_numbers_is_whole_forwards() -> None:
    model = drawn(Draws())
    with prepared_for_attribution(model):
        assert WindowForward(model, picture()).how == "whole forwards"


def test_rows_that_depend_on_each_other_are_computed_together() -> None:
    model, x = drawn(MixesRows()), picture()
    with prepared_for_attribution(model), torch.no_grad():
        local = WindowForward(model, x)
        patches, tops, lefts = windows(x, 5, 7)
        same(local(patches, tops, lefts), model(pasted(x, patches, tops, lefts)))


def test_numbers_of_rows_among_the_arguments_of_operations_grow_with_the_rows() -> None:
    class Model(Branches):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return torch.split_with_sizes(x.view(-1, 8, 19, 25), [x.shape[0]], 0)[0].mean((2, 3))

    model, x = drawn(Model()), picture()
    with prepared_for_attribution(model), torch.no_grad():
        local = WindowForward(model, x)
        patches, tops, lefts = windows(x, 5, 7)
        same(local(patches, tops, lefts), model(pasted(x, patches, tops, lefts)))


def test_a_wrong_rule_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PATCH_RULES, torch.ops.aten.cumsum.default, pointwise)

    class Model(Branches):
        def forward(self, x: Tensor) -> Tensor:
            return self.stem(x).cumsum(2).mean((2, 3))  # type: ignore[no-any-return]

    model, x = drawn(Model()), picture()
    with prepared_for_attribution(model), torch.no_grad():
        local = WindowForward(model, x)
        assert "differs from the model's" in local.why
        patches, tops, lefts = windows(x, 5, 7)
        same(local(patches, tops, lefts), model(pasted(x, patches, tops, lefts)))


def test_the_model_is_left_as_it_was() -> None:
    model, x = drawn(Residual()), picture()
    patches, tops, lefts = windows(x, 5, 7)
    state = {name: (each.clone(), each._version) for name, each in model.state_dict().items()}
    attributes, random = [sorted(vars(each)) for each in model.modules()], torch.get_rng_state()
    with prepared_for_attribution(model):
        WindowForward(model, x)(patches, tops, lefts)
    assert [sorted(vars(each)) for each in model.modules()] == attributes
    assert torch.equal(torch.get_rng_state(), random)
    for name, each in model.state_dict().items():
        assert torch.equal(each, state[name][0])
        assert each._version == state[name][1]
