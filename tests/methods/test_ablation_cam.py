"""Ablation-CAM and Recipro-CAM, against closed forms and against one changed forward after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

import saliency
from saliency import CAM, MethodError
from saliency.hooks.manager import HookManager
from saliency.hooks.pytree import first_tensor, tree_map_tensors
from saliency.layers.find import layout_of
from saliency.methods.ablation_cam import AblationCAM, ReciproCAM
from saliency.testing import tiny_model


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Pooled(nn.Module):
    """Nine channels, mean pooling, and one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 9, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).mean((2, 3)))
        return out


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, 6, 8, dtype=torch.float64)


def plainly(model: nn.Module, layer: str, x: Tensor, factors: Tensor, target: int) -> Tensor:
    """The scores (k,) when the layer's maps of one image are multiplied by factors (k, K or 1, h, w), one by one."""
    module, scores = model.get_submodule(layer), []
    for factor in factors:

        def change(output: Any, factor: Tensor = factor) -> Any:
            first = first_tensor(output)
            assert first is not None
            at = layout_of(model, layer, first, x)
            if at.kind == "NCHW":
                changed = first * factor
            elif at.kind == "NHWC":
                changed = first * factor.permute(1, 2, 0)
            else:
                places = factor.flatten(1).T.expand(-1, first.shape[2])
                changed = first * torch.cat([torch.ones(at.prefix, first.shape[2]).to(first), places])
            return tree_map_tensors(output, lambda each: changed if each is first else each)

        with HookManager() as hooks, torch.no_grad():
            hooks.revise(module, change)
            scores.append(model(x)[0, target])
    return torch.stack(scores)


def test_behind_pooling_and_a_linear_layer_the_drop_is_weight_times_mean_activation(x: Tensor) -> None:
    model = Pooled().double()
    found = AblationCAM(model, "body").attribute(x, [4, 1])
    with torch.no_grad():
        activation = model.body(x)
        drops = model.head.weight[[4, 1]] * activation.mean((2, 3))
    torch.testing.assert_close(found.values[:, 0], torch.einsum("nk,nkhw->nhw", drops, activation))
    assert all(each.passes == 1 and "closed form" in each.note for each in found.effort)


@pytest.mark.parametrize("target", [2, saliency.probability(1), lambda output: output[:, 0].square()])
def test_the_closed_form_is_what_running_each_channel_gives(target: Any, x: Tensor) -> None:
    model = Pooled().double()
    found = AblationCAM(model, "body").attribute(x, target)
    measured = AblationCAM(Hidden(model), "body").attribute(x, target)
    assert "closed form" in found.effort[0].note
    assert "closed form" not in measured.effort[0].note
    torch.testing.assert_close(found.values, measured.values)


class Hidden(nn.Module):
    """The same function, with a head that is no layer."""

    def __init__(self, of: Pooled) -> None:
        super().__init__()
        self.body, self.matrix, self.shift = of.body, of.head.weight, of.head.bias

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x).mean((2, 3)) @ self.matrix.T + self.shift
        return out


def test_a_head_that_only_seems_linear_is_run(x: Tensor) -> None:
    class Gated(Pooled):
        def forward(self, x: Tensor) -> Tensor:
            maps = self.body(x)
            # The very same output, until some channel is taken away.
            gate = (maps.flatten(2).amax(2).amin(1) > 0).to(maps)
            out: Tensor = self.head(maps.mean((2, 3))) * gate[:, None]
            return out

    model = Gated().double()
    with torch.no_grad():
        model.body[0].bias.fill_(1)  # type: ignore[operator]
    found = AblationCAM(model, "body").attribute(x[:1], 2)
    assert "closed form" not in found.effort[0].note
    assert found.scores.abs() > 0
    expected = found.scores * model.body(x[:1]).sum(1)  # all of the score is lost with each channel
    torch.testing.assert_close(found.values[:, 0], expected.detach())


def test_a_channel_that_speaks_for_the_class_has_a_positive_weight_also_for_a_negative_score(x: Tensor) -> None:
    model = Pooled().double()
    with torch.no_grad():
        model.head.weight.abs_()
        model.head.bias.fill_(-100)
    found = AblationCAM(model, "body").attribute(x, 0)
    assert (found.scores < 0).all()
    assert (found.values >= 0).all()


def small(name: str) -> tuple[nn.Module, str, Tensor]:
    """A network of torchvision, one of its layers, and an image."""
    size = 32
    if name == "resnet18":
        model, layer = torchvision.models.resnet18(num_classes=7), "layer3"
    elif name == "densenet":
        model = torchvision.models.DenseNet(8, (2, 2, 2), 8, num_classes=7)
        layer = "features.denseblock2"
    elif name == "vit":
        model = torchvision.models.VisionTransformer(32, 8, 2, 2, 12, 24, num_classes=7)
        nn.init.normal_(model.heads[0].weight)
        layer = "encoder.layers.encoder_layer_0"
    else:
        model = torchvision.models.SwinTransformer([4, 4], 8, [2, 2], [2, 2], [4, 4], num_classes=7)
        layer = "features.2"
    return model.double().eval(), layer, torch.randn(1, 3, size, size, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:.*activations of this layer are signed")
@pytest.mark.parametrize("name", ["resnet18", "densenet", "vit", "swin"])
@pytest.mark.slow
def test_both_are_one_changed_forward_after_the_other(name: str) -> None:
    model, layer, x = small(name)
    found = AblationCAM(model, layer, channels=6).attribute(x, 3)
    with HookManager() as hooks, torch.no_grad():
        calls = hooks.capture(model.get_submodule(layer))
        score = model(x)[0, 3]
    maps = layout_of(model, layer, calls[-1], x)(calls[-1])[0]  # (K, h, w)
    energy = maps.square().sum((1, 2))
    strongest = energy.argsort(descending=True, stable=True)[:6]
    without = torch.ones(6, *maps.shape, dtype=torch.float64)
    without[torch.arange(6), strongest] = 0
    drops = score - plainly(model, layer, x, without, 3)
    torch.testing.assert_close(found.values[0, 0], torch.einsum("k,khw->hw", drops, maps[strongest]))

    shown = ReciproCAM(model, layer, alone=True).attribute(x, 3)
    h, w = maps.shape[1:]
    places = torch.cat([torch.zeros(1, h * w), torch.eye(h * w)]).double().view(-1, 1, h, w)
    some = [0, 1, 2 + w, h * w]  # none, the first, one of the second row, the last
    scores = plainly(model, layer, x, places[some], 3)
    torch.testing.assert_close(shown.values.flatten()[[i - 1 for i in some[1:]]], scores[1:] - scores[0])
    assert shown.effort[0].passes == h * w + 1


def test_each_place_alone_is_cam_over_the_number_of_places(x: Tensor) -> None:
    model = Pooled().double()
    found, cam = ReciproCAM(model, "body", alone=True).attribute(x, 3), CAM(model, "body").attribute(x, 3)
    torch.testing.assert_close(found.values, cam.values / 48)


def test_with_neighbours_a_place_stands_for_its_surroundings(x: Tensor) -> None:
    model = Pooled().double()
    found, cam = ReciproCAM(model, "body").attribute(x, 3), CAM(model, "body").attribute(x, 3)
    kernel = torch.tensor([[1, 2, 1], [2, 4, 2], [1, 2, 1]], dtype=torch.float64) / 16
    around = nn.functional.conv2d(cam.values, kernel[None, None], padding=1)
    torch.testing.assert_close(found.values, around / 48)


def test_a_layer_that_is_called_many_times_is_changed_in_its_last_call(x: Tensor) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.act = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 3), nn.ReLU(inplace=True)
            self.head = nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.act(self.second(self.act(self.first(x)))).mean((2, 3)))
            return out

    model = Twice().double()
    found = AblationCAM(model, "act").attribute(x, 1)
    with torch.no_grad():
        maps = model.second(model.first(x).relu()).relu()
        drops = model.head.weight[1] * maps.mean((2, 3))
    torch.testing.assert_close(found.values[:, 0], torch.einsum("nk,nkhw->nhw", drops, maps))
    assert "closed form" in found.effort[0].note


def test_fewer_channels_leave_the_others_at_zero(x: Tensor) -> None:
    model = Pooled().double()
    found = AblationCAM(model, "body", channels=1).attribute(x[:1], 1)
    maps = model.body(x[:1])[0].detach()
    best = int(maps.square().sum((1, 2)).argmax())
    torch.testing.assert_close(found.values[0, 0], maps[best] * maps[best].mean() * model.head.weight[1, best].detach())
    with pytest.raises(MethodError, match="channels=-1"):
        AblationCAM(model, channels=-1)


class Nested(nn.Module):
    """A network whose scores stand where only a target finds them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_model()

    def forward(self, x: Tensor) -> dict[str, dict[str, Tensor]]:
        return {"found": {"scores": self.inner(x)}}


def test_scores_that_only_the_target_finds_are_ablated_all_the_same() -> None:
    model, x = Nested(), torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(5))
    found = AblationCAM(model).attribute(x, lambda output: output["found"]["scores"][:, 1])
    expected = AblationCAM(model.inner).attribute(x, 1)
    torch.testing.assert_close(found.values, expected.values, rtol=1e-3, atol=1e-5)
