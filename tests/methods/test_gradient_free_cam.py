"""Score-CAM against loops from its definition and pytorch-grad-cam.

Ablation-CAM and Recipro-CAM, against closed forms and against one changed forward after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saliency
from saliency import CAM
from saliency.errors import MethodError, TargetError
from saliency.hooks.manager import HookManager
from saliency.hooks.pytree import first_tensor, tree_map_tensors
from saliency.methods.gradient_free_cam import AblationCAM, Order, ReciproCAM, ScoreCAM
from saliency.model.layers import layout_of
from tests.models import Packed, PooledNet, small_vit, torchvision_models


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Net(nn.Module):
    """Twelve channels at 4 x 6 behind a ReLU, of which three are dead and one is 0.7 everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 12, 3, 1, 1))
        self.features = nn.ReLU()
        self.head = nn.Sequential(nn.Conv2d(12, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 8, 5))
        with torch.no_grad():
            last = self.body[3]
            assert isinstance(last, nn.Conv2d)
            assert last.bias is not None
            last.bias[[1, 4, 9]] = -100
            last.weight[6] = 0
            last.bias[6] = 0.7

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(self.body(x)))
        return out


@pytest.fixture
def model() -> Net:
    return Net().double()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, 8, 12, dtype=torch.float64)


def activation_of(model: Net, image: Tensor) -> Tensor:
    with torch.no_grad():
        return F.relu(model.body(image[None]))[0]


def by_definition(model: Net, image: Tensor, target: int, score: Callable[[Tensor], Tensor]) -> Tensor:
    """One forward after the other; `score` takes a mask (H, W)."""
    activation = activation_of(model, image)
    scores = []
    for channel in activation:
        large = F.interpolate(channel[None, None], image.shape[-2:], mode="bilinear", align_corners=False)[0, 0]
        span = large.max() - large.min()
        scores.append(score((large - large.min()) / span if span > 0 else torch.zeros_like(large)))
    weights = torch.stack(scores).softmax(0)
    weights[[1, 4, 6, 9]] = 0  # those that show no place
    return (weights[:, None, None] * activation).sum(0)[None]


def test_one_forward_for_all_constant_channels_is_the_plain_loop(model: Net, x: Tensor) -> None:
    found = ScoreCAM(model, "features").attribute(x, [3, 0])
    for image, target, values, stats in zip(x, (3, 0), found.values, found.run_stats, strict=True):
        with torch.no_grad():
            expected = by_definition(model, image, target, lambda mask: model((image * mask)[None])[0, target])  # noqa: B023
        torch.testing.assert_close(values, expected)
        assert stats.passes == 9  # eight channels and the empty image
        assert "one forward for the 4" in stats.note


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", [0, 2])
def test_with_aligned_corners_it_is_pytorch_grad_cams_map(target: int) -> None:
    oracle = pytest.importorskip("pytorch_grad_cam")
    targets = pytest.importorskip("pytorch_grad_cam.utils.model_targets")
    model, x = Net().eval(), torch.randn(1, 3, 8, 12)
    # A constant that is not zero is added to theirs: it has a weight there.
    with torch.no_grad():
        model.body[3].bias[6] = -1  # type: ignore[operator]
    cam: Any = oracle.ScoreCAM(model, [model.features])
    weights = cam.get_cam_weights(
        x, None, [targets.ClassifierOutputTarget(target)], activation_of(model, x[0])[None].numpy(), None
    )
    expected = np.einsum("nk,nkhw->nhw", weights, activation_of(model, x[0])[None].numpy())
    found = ScoreCAM(model, "features", align_corners=True).attribute(x, target)
    np.testing.assert_allclose(np.asarray(found)[:, 0], expected, rtol=1e-5, atol=1e-7)


def test_fewer_channels_are_those_that_vary_most(model: Net, x: Tensor) -> None:
    found = ScoreCAM(model, "features", channels=2).attribute(x[0], 1)
    kept = activation_of(model, x[0]).flatten(1).std(1).argsort(descending=True)[:2]
    activation = activation_of(model, x[0])[kept]
    large = F.interpolate(activation[:, None], x.shape[-2:], mode="bilinear")
    low, high = large.amin((2, 3), keepdim=True), large.amax((2, 3), keepdim=True)
    with torch.no_grad():
        weights = model(x[0] * (large - low) / (high - low))[:, 1].softmax(0)
    torch.testing.assert_close(found.values[0, 0], torch.einsum("k,khw->hw", weights, activation))
    assert "10 left out" in found.run_stats[0].note


def test_the_order_of_gradients_weighs_only_the_channels_of_the_largest_mean_gradient_as_gscore_cam(
    model: Net, x: Tensor
) -> None:
    for image, target in zip(x, (1, 4), strict=True):
        found = ScoreCAM(model, "features", channels=3, order="gradient").attribute(image, target)
        activation = activation_of(model, image).requires_grad_()
        (gradient,) = torch.autograd.grad(model.head(activation[None])[0, target], activation)
        strength = gradient.mean((1, 2))
        strength[[1, 4, 6, 9]] = -torch.inf  # those that show no place
        chosen = strength.argsort(descending=True)[:3]
        activation = activation.detach()[chosen]
        large = F.interpolate(activation[:, None], image.shape[-2:], mode="bilinear")
        low, high = large.amin((2, 3), keepdim=True), large.amax((2, 3), keepdim=True)
        with torch.no_grad():
            weights = model(image * (large - low) / (high - low))[:, target].softmax(0)
        torch.testing.assert_close(found.values[0, 0], torch.einsum("k,khw->hw", weights, activation))
        assert found.run_stats[0].passes == 3


def test_with_all_channels_the_order_does_not_matter(model: Net, x: Tensor) -> None:
    plain, chosen = (ScoreCAM(model, "features", order=order).attribute(x, 1) for order in get_args(Order))
    torch.testing.assert_close(chosen.values, plain.values)
    with pytest.raises(TargetError, match="no gradient"):
        ScoreCAM(model, "features", order="gradient").attribute(x, lambda output: output.detach()[:, 0])


def test_where_no_mask_changes_the_score_nothing_is_said(model: Net, x: Tensor) -> None:
    found = ScoreCAM(model, "features").attribute(x, lambda output: output.detach()[:, 0] * 0 + 1)
    assert not found.values.any()


@pytest.mark.filterwarnings("ignore:.*activations of this layer are signed")
@pytest.mark.parametrize("kind", ["tokens", "channels last"])
def test_tokens_and_channels_last_are_read_as_maps(kind: str, x: Tensor) -> None:
    model = Turned(kind).double()
    plain = ScoreCAM(model, "conv").attribute(x, 1)
    torch.testing.assert_close(ScoreCAM(model, "turned").attribute(x, 1).values, plain.values)


class Turned(nn.Module):
    """A layer whose output is handed on as tokens behind a class token, or with its channels last."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.conv, self.turned, self.head = nn.Conv2d(3, 7, 3, 2, 1), nn.Identity(), nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.conv(x)
        if self.kind == "tokens":
            tokens = self.turned(torch.cat([torch.zeros_like(maps[:, :, 0, :1]), maps.flatten(2)], 2).transpose(1, 2))
            out: Tensor = self.head(tokens.relu().mean(1))
        else:
            out = self.head(self.turned(maps.permute(0, 2, 3, 1)).relu().mean((1, 2)))
        return out


def test_options_that_are_none_are_refused(model: Net) -> None:
    makers: list[Callable[[], ScoreCAM]] = [
        lambda: ScoreCAM(model, channels=0),
        lambda: ScoreCAM(model, order="mean"),  # type: ignore[arg-type]
    ]
    for make in makers:
        with pytest.raises(MethodError, match="="):
            make()


@pytest.fixture
def small() -> Tensor:
    return torch.randn(2, 3, 6, 8, dtype=torch.float64)


def plainly(model: nn.Module, layer: str, small: Tensor, factors: Tensor, target: int) -> Tensor:
    """The scores (k,) when the layer's maps of one image are multiplied by factors (k, K or 1, h, w), one by one."""
    module, scores = model.get_submodule(layer), []
    for factor in factors:

        def change(output: Any, factor: Tensor = factor) -> Any:
            first = first_tensor(output)
            assert first is not None
            at = layout_of(model, layer, first, small)
            if at.kind == "NCHW":
                changed = first * factor
            elif at.kind == "NHWC":
                changed = first * factor.permute(1, 2, 0)
            else:
                places = factor.flatten(1).T.expand(-1, first.shape[2])
                changed = first * torch.cat([torch.ones(at.tokens[0], first.shape[2]).to(first), places])
            return tree_map_tensors(output, lambda each: changed if each is first else each)

        with HookManager() as hooks, torch.no_grad():
            hooks.revise(module, change)
            scores.append(model(small)[0, target])
    return torch.stack(scores)


def test_behind_pooling_and_a_linear_layer_the_drop_is_weight_times_mean_activation(small: Tensor) -> None:
    model = PooledNet().double()
    found = AblationCAM(model, "features").attribute(small, [4, 1])
    with torch.no_grad():
        activation = model.features(small)
        drops = model.head.weight[[4, 1]] * activation.mean((2, 3))
    torch.testing.assert_close(found.values[:, 0], torch.einsum("nk,nkhw->nhw", drops, activation))
    assert all(each.passes == 1 and "closed form" in each.note for each in found.run_stats)


@pytest.mark.parametrize("images", [1, 2])
def test_the_layer_of_one_image_is_read_in_the_forward_of_its_score(images: int, small: Tensor) -> None:
    model, calls = PooledNet().double(), list[int]()
    model.register_forward_hook(lambda module, given, output: calls.append(len(output)))
    alone = AblationCAM(model, "features").attribute(small[:1], 2)
    calls.clear()
    found = AblationCAM(model, "features").attribute(small[:images], 2)
    assert calls == ([1, 1] if images == 1 else [2, 1, 1, 1, 1])  # the score, the layer, the test of the closed form
    torch.testing.assert_close(found.values[0], alone.values[0])


@pytest.mark.parametrize("target", [2, saliency.probability(1), lambda output: output[:, 0].square()])
def test_the_closed_form_is_what_running_each_channel_gives(target: Any, small: Tensor) -> None:
    model = PooledNet().double()
    found = AblationCAM(model, "features").attribute(small, target)
    measured = AblationCAM(Hidden(model), "features").attribute(small, target)
    assert "closed form" in found.run_stats[0].note
    assert "closed form" not in measured.run_stats[0].note
    torch.testing.assert_close(found.values, measured.values)


@pytest.mark.parametrize(("layer", "is_autocast"), [("features.1", True), ("features", True), ("features", False)])
def test_drops_are_not_rounded_to_half_precision(layer: str, is_autocast: bool, small: Tensor) -> None:
    model, small = PooledNet(), small.float()
    nn.init.constant_(model.head.bias, 20)  # much larger than a drop
    expected = AblationCAM(model, layer).attribute(small, 1).values
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        given = (model, small) if is_autocast else (model.bfloat16(), small.bfloat16())
        found = AblationCAM(given[0], layer).attribute(given[1], 1)
    assert ("closed form" in found.run_stats[0].note) == (layer == "features")
    torch.testing.assert_close(found.values.float(), expected, atol=0.02 * float(expected.abs().max()), rtol=0)


class Hidden(nn.Module):
    """The same function, with a head that is no layer."""

    def __init__(self, of: PooledNet) -> None:
        super().__init__()
        self.features, self.matrix, self.shift = of.features, of.head.weight, of.head.bias

    def forward(self, small: Tensor) -> Tensor:
        out: Tensor = self.features(small).mean((2, 3)) @ self.matrix.T + self.shift
        return out


def test_a_head_that_only_seems_linear_is_run(small: Tensor) -> None:
    class Gated(PooledNet):
        def forward(self, small: Tensor) -> Tensor:
            maps = self.features(small)
            # The very same output, until some channel is taken away.
            gate = (maps.flatten(2).amax(2).amin(1) > 0).to(maps)
            out: Tensor = self.head(maps.mean((2, 3))) * gate[:, None]
            return out

    model = Gated().double()
    with torch.no_grad():
        model.features[2].bias.fill_(1)  # type: ignore[operator]
    found = AblationCAM(model, "features").attribute(small[:1], 2)
    assert "closed form" not in found.run_stats[0].note
    assert found.scores.abs() > 0
    expected = found.scores * model.features(small[:1]).sum(1)  # all of the score is lost with each channel
    torch.testing.assert_close(found.values[:, 0], expected.detach())


def test_a_channel_that_speaks_for_the_class_has_a_positive_weight_also_for_a_negative_score(
    small: Tensor,
) -> None:
    model = PooledNet().double()
    with torch.no_grad():
        model.head.weight.abs_()
        model.head.bias.fill_(-100)
    found = AblationCAM(model, "features").attribute(small, 0)
    assert (found.scores < 0).all()
    assert (found.values >= 0).all()


def torchvision_case(name: str) -> tuple[nn.Module, str, Tensor]:
    """A network of torchvision, one of its layers, and an image."""
    size = 32
    if name == "resnet18":
        model, layer = torchvision_models().resnet18(num_classes=7), "layer3"
    elif name == "densenet":
        model = torchvision_models().DenseNet(8, (2, 2, 2), 8, num_classes=7)
        layer = "features.denseblock2"
    elif name == "vit":
        model, layer = small_vit(7), "encoder.layers.encoder_layer_0"
    else:
        model = torchvision_models().SwinTransformer([4, 4], 8, [2, 2], [2, 2], [4, 4], num_classes=7)
        layer = "features.2"
    return model.double().eval(), layer, torch.randn(1, 3, size, size, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:.*activations of this layer are signed")
@pytest.mark.parametrize("name", ["resnet18", "densenet", "vit", "swin"])
@pytest.mark.slow
def test_both_are_one_changed_forward_after_the_other(name: str) -> None:
    model, layer, small = torchvision_case(name)
    found = AblationCAM(model, layer, channels=6).attribute(small, 3)
    with HookManager() as hooks, torch.no_grad():
        calls = hooks.capture(model.get_submodule(layer))
        score = model(small)[0, 3]
    maps = layout_of(model, layer, calls[-1], small)(calls[-1])[0]  # (K, h, w)
    energy = maps.square().sum((1, 2))
    strongest = energy.argsort(descending=True, stable=True)[:6]
    without = torch.ones(6, *maps.shape, dtype=torch.float64)
    without[torch.arange(6), strongest] = 0
    drops = score - plainly(model, layer, small, without, 3)
    torch.testing.assert_close(found.values[0, 0], torch.einsum("k,khw->hw", drops, maps[strongest]))

    shown = ReciproCAM(model, layer, alone=True).attribute(small, 3)
    h, w = maps.shape[1:]
    places = torch.cat([torch.zeros(1, h * w), torch.eye(h * w)]).double().view(-1, 1, h, w)
    some = [0, 1, 2 + w, h * w]  # none, the first, one of the second row, the last
    scores = plainly(model, layer, small, places[some], 3)
    torch.testing.assert_close(shown.values.flatten()[[i - 1 for i in some[1:]]], scores[1:] - scores[0])
    assert shown.run_stats[0].passes == h * w + 1


def test_each_place_alone_is_cam_over_the_number_of_places(small: Tensor) -> None:
    model = PooledNet().double()
    found, cam = (
        ReciproCAM(model, "features", alone=True).attribute(small, 3),
        CAM(model, "features").attribute(small, 3),
    )
    torch.testing.assert_close(found.values, cam.values / 24)


def test_with_neighbours_a_place_stands_for_its_surroundings(small: Tensor) -> None:
    model = PooledNet().double()
    found, cam = (
        ReciproCAM(model, "features").attribute(small, 3),
        CAM(model, "features").attribute(small, 3),
    )
    kernel = torch.tensor([[1, 2, 1], [2, 4, 2], [1, 2, 1]], dtype=torch.float64) / 16
    around = nn.functional.conv2d(cam.values, kernel[None, None], padding=1)
    torch.testing.assert_close(found.values, around / 24)


def test_a_layer_that_is_called_many_times_is_changed_in_its_last_call(small: Tensor) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.act = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 3), nn.ReLU(inplace=True)
            self.head = nn.Linear(4, 5)

        def forward(self, small: Tensor) -> Tensor:
            out: Tensor = self.head(self.act(self.second(self.act(self.first(small)))).mean((2, 3)))
            return out

    model = Twice().double()
    found = AblationCAM(model, "act").attribute(small, 1)
    with torch.no_grad():
        maps = model.second(model.first(small).relu()).relu()
        drops = model.head.weight[1] * maps.mean((2, 3))
    torch.testing.assert_close(found.values[:, 0], torch.einsum("nk,nkhw->nhw", drops, maps))
    assert "closed form" in found.run_stats[0].note


def test_fewer_channels_leave_the_others_at_zero(small: Tensor) -> None:
    model = PooledNet().double()
    found = AblationCAM(model, "features", channels=1).attribute(small[:1], 1)
    maps = model.features(small[:1])[0].detach()
    best = int(maps.square().sum((1, 2)).argmax())
    torch.testing.assert_close(found.values[0, 0], maps[best] * maps[best].mean() * model.head.weight[1, best].detach())
    with pytest.raises(MethodError, match="channels=-1"):
        AblationCAM(model, channels=-1)


def test_scores_that_only_the_target_finds_are_ablated_all_the_same() -> None:
    model = Packed(lambda scores: {"found": {"scores": scores}})
    small = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(5))
    found = AblationCAM(model).attribute(small, lambda output: output["found"]["scores"][:, 1])
    expected = AblationCAM(model.inner).attribute(small, 1)
    torch.testing.assert_close(found.values, expected.values, rtol=1e-3, atol=1e-5)
