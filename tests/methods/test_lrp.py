"""Relevance at layers and patches, through channels, by own rules and composites, and excitation backpropagation."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saliency
from saliency import CPLRP, LRP, AttnLRP, ExcitationBackprop, Explanation, Preprocess
from saliency.cli import main
from saliency.methods import lrp
from saliency.relevance import (
    COMPOSITES,
    Epsilon,
    Flat,
    Gamma,
    NonlinearOperation,
    NonlinearRule,
    Pass,
    Rule,
    ZBox,
    ZPlus,
)
from saliency.relevance.kernels import KERNELS, Passed
from saliency.relevance.walk import Walk
from saliency.testing import tiny_model
from tests.commandline import COFFEE, copies, share_models
from tests.models import OwnForward, small_vit
from tests.relevance import textbook
from tests.relevance.vision_transformers import MODELS


def images(count: int = 2, size: int = 12) -> Tensor:
    return torch.randn(count, 3, size, size, dtype=torch.float64)


def chain() -> nn.Sequential:
    """A plain chain with biases (N, 3, 12, 12) -> (N, 5), with maps of 12, 6, 4 and 2 cells a side."""
    return (
        nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32, 16),
            nn.ReLU(),
            nn.Linear(16, 5),
        )
        .double()
        .eval()
    )


LINEAR = (0, 3, 7, 9)  # the convolutions and linear layers of the chain


class Residual(nn.Module):
    """A convolution with its batch norm, a residual block, another batch norm that is not merged, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.relu, self.bn3, self.head = nn.ReLU(), nn.BatchNorm2d(8), nn.Linear(8, 5)
        for layer in (self.bn1, self.bn2, self.bn3):
            nn.init.normal_(layer.bias)
            nn.init.normal_(cast("Tensor", layer.running_mean))

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(x + self.bn2(self.conv2(x)))
        out: Tensor = self.head(self.bn3(x).mean((2, 3)))
        return out


def residual() -> Residual:
    return Residual().double().eval()


def shares(explanation: Explanation) -> dict[str, Tensor]:
    assert explanation.ledger is not None
    return dict(zip(explanation.ledger_names, explanation.ledger.unbind(1), strict=True))


def assert_same(found: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    size = float(expected.abs().max())
    assert size > 0
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * size)


# --- layers


def test_the_relevance_at_each_layer_of_a_chain_is_that_of_the_textbook() -> None:
    net, x = chain(), images()
    rules = dict.fromkeys(LINEAR[:2], textbook.z_plus()) | dict.fromkeys(LINEAR[2:], textbook.epsilon(1e-6))
    expected = textbook.lrp(list(net), x, 3, rules)
    for number in range(6):
        found = LRP(net, layer=str(number)).attribute(x, 3)
        assert found.layer == str(number)
        assert_same(found.values, expected[number + 1].sum(1, keepdim=True), 1e-5)


def test_the_ledger_of_a_layer_holds_what_the_operations_after_it_absorb() -> None:
    net, x = chain(), images()
    whole = [shares(LRP(net, layer=str(number)).attribute(x, 3)) for number in range(6)]
    scores = net(x)[:, 3].detach()
    for number, ledger in enumerate(whole):
        assert list(ledger) == ["layer", "biases", "stabiliser", "other paths"]
        torch.testing.assert_close(sum(ledger.values()), scores)
        assert float(ledger["other paths"].abs().max()) < 1e-9, number
    for (low, low_number), (high, high_number) in pairwise(zip(whole, range(6), strict=True)):
        absorbs = high_number in LINEAR  # with a bias
        assert torch.allclose(low["biases"], high["biases"]) != absorbs, (low_number, high_number)
    shares_of_input = shares(LRP(net).attribute(x, 3))
    assert not torch.allclose(whole[0]["biases"], shares_of_input["biases"])


def test_the_rest_of_the_score_takes_other_paths_than_the_layer() -> None:
    net, x = residual(), images()
    branch, block, stem = (shares(LRP(net, layer=layer).attribute(x, 1)) for layer in ("bn2", "relu", "bn1"))
    assert float(block["other paths"].abs().max()) < 1e-9
    # The skip connection carries what the block receives and its branch does not.
    assert_same(branch["other paths"] + branch["layer"], block["layer"])
    assert float(branch["other paths"].abs().min()) > 1e-3
    # What the branch absorbs is on one of the paths from the stem to the score.
    assert_same(stem["layer"] + stem["biases"] + stem.get("stabiliser", 0), net(x)[:, 1].detach(), 1e-6)


def test_a_module_that_is_called_twice_is_read_at_its_last_call() -> None:
    net, x = residual(), images()

    def forward(m: Any, x: Tensor) -> Tensor:
        y = F.relu(m.net.bn1(m.net.conv1(x)))
        out: Tensor = m.net.head(m.net.bn3(m.last(y + m.net.bn2(m.net.conv2(y)))).mean((2, 3)))
        return out

    twin = OwnForward(forward, net=net, last=nn.ReLU())
    assert_same(LRP(net, layer="relu").attribute(x, 1).values, LRP(twin.eval(), layer="last").attribute(x, 1).values)


def test_a_convolution_has_the_relevance_of_the_batch_norm_merged_into_it() -> None:
    """Also where the convolution is exactly zero, and all its relevance is that of the batch norm's constant."""
    net, x = residual(), images()
    with torch.no_grad():
        net.conv1.weight[2] = 0
    for composite in ("epsilon", "epsilon_plus"):
        at_conv, at_norm = (LRP(net, composite=composite, layer=layer).attribute(x, 1) for layer in ("conv1", "bn1"))
        assert_same(at_conv.values, at_norm.values)
        assert_same(cast("Tensor", at_conv.ledger), cast("Tensor", at_norm.ledger))
        assert_same(cast("Tensor", at_conv.residual) + 1, cast("Tensor", at_norm.residual) + 1)


@pytest.mark.parametrize(
    "layer", ["conv_proj", "encoder.layers.encoder_layer_0", "encoder.layers.encoder_layer_1.ln_2"]
)
def test_tokens_without_a_position_are_in_the_ledger(layer: str) -> None:
    model = small_vit().eval()
    found = LRP(model, layer=layer).attribute(torch.randn(2, 3, 32, 32), 1)
    assert found.values.shape == (2, 1, 4, 4)
    ledger = shares(found)
    torch.testing.assert_close(ledger["layer"], found.values.sum((1, 2, 3)))
    assert bool((ledger["tokens"].abs() > 1e-4).all())
    torch.testing.assert_close(sum(ledger.values()) + cast("Tensor", found.residual), found.scores)
    is_whole = layer != "encoder.layers.encoder_layer_1.ln_2"  # which the residual connection goes around
    assert (float(ledger["other paths"].abs().max()) < 1e-5) == is_whole


def test_layers_and_classes_share_a_forward_and_layers_a_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    walks = []

    def counted(*arguments: Any, **keywords: Any) -> Walk:
        walks.append(Walk(*arguments, **keywords))
        return walks[-1]

    net, x = residual(), images()
    names = [None, "relu", "bn1", "conv1", "bn2"]
    expected = [LRP(net, layer=name).attribute(x, 2) for name in names]
    monkeypatch.setattr(lrp, "Walk", counted)
    found = saliency.Together(*[LRP(net, layer=name) for name in names]).attribute(x, 2)
    assert len(walks) == 1
    for own, shared in zip(expected, found, strict=True):
        assert own.layer == shared.layer
        assert own.ledger_names == shared.ledger_names
        assert_same(shared.values, own.values)
        assert_same(cast("Tensor", shared.ledger), cast("Tensor", own.ledger))
    saliency.Together(
        LRP(net, composite="gamma"), LRP(net, composite="gamma", layer="relu"), LRP(net, composite="epsilon")
    ).attribute(x, 2)
    assert len(walks) == 3


@pytest.mark.parametrize("composite", ["epsilon", "epsilon_plus", "gamma", "epsilon_alpha2_beta1_flat"])
@pytest.mark.parametrize("build", [residual, lambda: tiny_model().double(), chain], ids=["residual", "tiny", "chain"])
def test_a_captured_layer_changes_nothing(build: Callable[[], nn.Module], composite: str) -> None:
    """Even a convolution before its batch norm, or a tensor that a ReLU overwrites."""
    net, x = build(), images()
    expected = LRP(net, composite=composite).attribute(x, 2)
    spatial = [name for name, module in net.named_modules() if isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.ReLU)]
    spatial = [name for name in spatial if name != "8"]  # of the classifier
    for name in spatial:
        found, _ = saliency.Together(LRP(net, composite=composite), saliency.GradCAM(net, name)).attribute(x, 2)
        assert_same(found.values, expected.values)
        assert found.coverage == expected.coverage
        assert_same(cast("Tensor", found.ledger), cast("Tensor", expected.ledger))


def test_deep_lift_and_relevance_at_a_layer_share_a_forward() -> None:
    net, x = residual(), images()
    methods = [saliency.DeepLIFT(net), LRP(net, layer="conv1"), saliency.GradCAM(net, "relu")]
    for own, shared in zip(
        [m.attribute(x, 1) for m in methods], saliency.Together(*methods).attribute(x, 1), strict=True
    ):
        assert_same(shared.values, own.values)


def test_a_layer_without_a_map_or_without_influence_is_an_error() -> None:
    net, x = residual(), images()
    with pytest.raises(saliency.errors.LayerError, match=r'"head" has shape \(2, 5\), which has no spatial extent'):
        LRP(net, layer="head").attribute(x, 1)
    with pytest.raises(saliency.errors.LayerError, match='no layer "bn4"'):
        LRP(net, layer="bn4")
    aside = OwnForward(lambda m, x: (m.net(x), m.aside(x))[0], net=net, aside=nn.Conv2d(3, 2, 1).double()).eval()
    for options in ({"layer": "aside"}, {"through": {"aside": [0]}}):
        with pytest.raises(saliency.errors.LayerError, match='score does not depend on layer "aside"'):
            LRP(aside, **cast("Any", options)).attribute(x, 1)


# --- patches


@pytest.mark.parametrize("cls", [AttnLRP, CPLRP])
@pytest.mark.parametrize("name", MODELS)
def test_patches_are_the_output_of_the_first_linear_operation(name: str, cls: type[AttnLRP]) -> None:
    model, x = MODELS[name]()
    found = cls(model, at="patches", unknown="gradient").attribute(x, 1)
    size = found.values.shape[-1]
    assert found.values.shape == (2, 1, size, size)
    assert found.settings["at"] == "patches"
    assert isinstance(model.get_submodule(str(found.layer)), nn.Conv2d | nn.Linear)
    assert x.shape[-1] // size == {"timm ConvNeXt": 4, "timm MaxViT": 2, "timm Swin v2": 4}.get(
        name, x.shape[-1] // size
    )


@pytest.mark.parametrize("cls", [LRP, AttnLRP, pytest.param(CPLRP, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_a_patch_embedding_are_the_default(name: str, cls: type[LRP | AttnLRP]) -> None:
    """Convolutional networks, and those whose attention reads features of convolutions, are read at pixels."""
    model, x = MODELS[name]()
    found, patches, pixels = (
        cls(model, at=at, unknown="gradient").attribute(x, 1) for at in (None, "patches", "pixels")
    )
    is_convolutional = name in ("timm ConvNeXt", "timm MaxViT")
    expected = pixels if is_convolutional else patches
    assert pixels.values.shape == x.shape
    assert (found.layer is None) == is_convolutional
    assert torch.equal(found.values, expected.values)
    assert torch.equal(cast("Tensor", found.ledger), cast("Tensor", expected.ledger))
    assert found.ledger_names == expected.ledger_names


def token_network(embedding: Callable[[Any, Tensor], Tensor], **modules: nn.Module) -> nn.Module:
    """A network of attention among the tokens (N, 16, 8) of an embedding of (N, 3, 16, 16)."""

    def forward(m: Any, x: Tensor) -> Tensor:
        tokens = embedding(m, x)
        out: Tensor = m.head((tokens + m.mix(tokens, tokens, tokens, need_weights=False)[0]).mean(1))
        return out

    mix = nn.MultiheadAttention(8, 2, batch_first=True)
    return OwnForward(forward, mix=mix, head=nn.Linear(8, 5), **modules).double().eval()


def unfolded(m: Any, x: Tensor) -> Tensor:
    return cast("Tensor", m.embed(F.unfold(x, 4, stride=4).mT))


def stemmed(m: Any, x: Tensor) -> Tensor:
    return cast("Tensor", m.second(m.first(x).relu()).flatten(2).mT)


def projected(m: Any, x: Tensor) -> Tensor:
    return x.flatten(2).mT[:, :16].repeat(1, 1, 3)[..., :8]


def two_scales(m: Any, x: Tensor) -> Tensor:
    return torch.cat([m.coarse(x).flatten(2).mT, m.fine(x).flatten(2).mT[:, :12]], 1)


def test_a_linear_patch_embedding_is_one() -> None:
    model, x = token_network(unfolded, embed=nn.Linear(48, 8)), images(2, 16)
    nn.init.zeros_(cast("Any", model).embed.bias)
    patches, pixels = (AttnLRP(model, at=at).attribute(x, 1) for at in (None, "pixels"))
    assert patches.layer == "embed"
    assert_same(patches.values, F.avg_pool2d(pixels.values.sum(1, keepdim=True), 4) * 16)
    given = AttnLRP(model, layout=lambda tokens: tokens.mT.reshape(len(tokens), -1, 4, 4).flip(3)).attribute(x, 1)
    assert_same(given.values, patches.values.flip(3))


@pytest.mark.parametrize(
    ("embedding", "modules"),
    [
        (stemmed, {"first": nn.Conv2d(3, 6, 2, 2), "second": nn.Conv2d(6, 8, 2, 2)}),
        (projected, {}),
        (two_scales, {"coarse": nn.Conv2d(3, 8, 8, 8), "fine": nn.Conv2d(3, 8, 4, 4)}),
    ],
    ids=["a stem with an activation", "no embedding", "two embeddings"],
)
def test_tokens_of_anything_else_are_read_at_pixels(embedding: Any, modules: dict[str, nn.Module]) -> None:
    model, x = token_network(embedding, **modules), images(2, 16)
    found = AttnLRP(model).attribute(x, 1)
    assert found.layer is None
    assert found.values.shape == x.shape


def test_patches_and_pixels_run_the_model_once() -> None:
    model, x = small_vit().eval(), torch.randn(1, 3, 32, 32)
    calls = []
    model.register_forward_hook(lambda module, args, output: calls.append(1))
    patches, pixels = saliency.Together(AttnLRP(model), AttnLRP(model, at="pixels")).attribute(x, 1)
    assert patches.values.shape == (1, 1, 4, 4)
    assert pixels.values.shape == x.shape
    assert len(calls) == 1


def test_patches_without_a_spatial_output_are_an_error() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))
    with pytest.raises(
        saliency.errors.LayerError, match='at="patches": the first convolution or linear layer has no spatial'
    ):
        LRP(net, at="patches").attribute(torch.randn(1, 3, 2, 2), 1)


def test_a_patch_has_the_relevance_of_its_pixels() -> None:
    model = cast("Any", small_vit().double().eval())
    nn.init.zeros_(model.conv_proj.bias)
    x = images(2, 32)
    pixels, patches = (AttnLRP(model, at=at).attribute(x, 1) for at in ("pixels", "patches"))
    assert_same(patches.values, F.avg_pool2d(pixels.values.sum(1, keepdim=True), 8) * 64)
    assert_same(shares(patches)["layer"], shares(pixels)["input"])
    assert AttnLRP(model, at="patches", layer="encoder.layers.encoder_layer_0").attribute(x, 1).layer != "conv_proj"
    with pytest.raises(saliency.errors.MethodError, match="at='tokens' is not one of 'pixels', 'patches'"):
        AttnLRP(model, at=cast("Any", "tokens"))


# --- concepts


def masked(layer: nn.Module, kept: list[int], channels: int) -> nn.Module:
    """The layer, with a gradient in some of its channels only."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x)
        mask = torch.zeros(y.shape[channels], dtype=y.dtype)
        mask[kept] = 1
        mask = mask.view(-1, *[1] * (y.dim() - 1 - channels))
        return cast("Tensor", mask * y + (1 - mask) * y.detach())

    return OwnForward(forward, layer=layer)


@pytest.mark.filterwarnings("ignore:.* of the score is missing from the ledger")
def test_relevance_through_channels_is_that_of_a_network_without_gradient_in_the_others() -> None:
    net, x = residual(), images()
    through = {"bn2": [0, 5], "bn1": [1, 2, 3]}
    found = LRP(net, through=through).attribute(x, 1)
    for name, kept in through.items():
        setattr(net, name, masked(getattr(net, name), kept, 1))
    expected = LRP(net.eval()).attribute(x, 1)
    assert_same(found.values, expected.values)
    model, x = cast("Any", small_vit().double().eval()), images(2, 32)
    blocks = model.encoder.layers
    found = AttnLRP(model, through={"encoder.layers.encoder_layer_0": [3]}).attribute(x, 1)
    blocks.encoder_layer_0 = masked(blocks.encoder_layer_0, [3], 2)
    assert_same(found.values, AttnLRP(model.eval()).attribute(x, 1).values)


@pytest.mark.parametrize("layer", ["conv1", "bn1", "conv2", "relu", "head"])
@pytest.mark.parametrize("composite", ["epsilon_plus", "epsilon_alpha2_beta1_flat"])
def test_relevance_through_each_channel_sums_to_the_whole(layer: str, composite: str) -> None:
    net, x = residual(), images()
    for norm in (net.bn1, net.bn2, net.bn3):  # what all channels share has to be counted once
        norm.requires_grad_(False)
    whole = LRP(net, composite=composite).attribute(x, 1)
    channels = 5 if layer == "head" else 8
    parts = [LRP(net, composite=composite, through={layer: [channel]}).attribute(x, 1) for channel in range(channels)]
    if layer == "conv2":  # the skip connection goes around it, so it is in each part
        around = LRP(net, composite=composite, through={layer: []}).attribute(x, 1).values
        assert_same(sum(part.values - around for part in parts) + around, whole.values)
        return
    assert_same(cast("Tensor", sum(part.values for part in parts)), whole.values)
    for part in parts:
        torch.testing.assert_close(cast("Tensor", part.ledger).sum(1) + cast("Tensor", part.residual), part.scores)
        assert float(cast("Tensor", part.residual).abs().max()) < 1e-9


def test_relevance_through_each_channel_of_tokens_sums_to_the_whole() -> None:
    model, x = small_vit().double().eval(), images(2, 32)
    layer = "encoder.layers.encoder_layer_0"
    parts = [AttnLRP(model, through={layer: [channel]}).attribute(x, 1).values for channel in range(16)]
    assert_same(cast("Tensor", sum(parts)), AttnLRP(model).attribute(x, 1).values)


def test_concepts_may_be_read_at_a_layer() -> None:
    net, x = residual(), images()
    found = LRP(net, layer="bn1", through={"relu": [1]}).attribute(x, 1)
    others = [LRP(net, layer="bn1", through={"relu": [channel]}).attribute(x, 1).values for channel in range(8)]
    assert_same(cast("Tensor", sum(others)), LRP(net, layer="bn1").attribute(x, 1).values)
    assert_same(found.values, others[1])
    assert "other channels" in found.ledger_names
    at_it = LRP(net, layer="relu", through={"relu": [1]}).attribute(x, 1)
    assert float(shares(at_it)["other paths"].abs().max()) < 1e-9


@pytest.mark.parametrize(
    ("through", "fact"),
    [
        ({"bn1": [8]}, 'layer "bn1" has 8 channels, got channel 8'),
        ({"bn1": 3}, r'expected channels by layer, as in \{"layer4.1": \[12, 40\]\}'),
        ({"bn1": [-1]}, "expected channels by layer"),
        (["bn1"], "expected channels by layer"),
    ],
)
def test_channels_that_do_not_exist_are_an_error(through: Any, fact: str) -> None:
    with pytest.raises(saliency.errors.MethodError, match=fact):
        LRP(residual(), through=through).attribute(images(), 1)


# --- rules and composites


class Uniform(Rule):
    """Relevance in equal parts, whatever weights and inputs."""

    name = "uniform"

    def relevance(self, op: saliency.relevance.LinearOperation, relevance: Tensor) -> Tensor:
        ones = torch.ones_like(op.weight)
        return op.transposed(relevance / op.run(torch.ones_like(op.input), ones), ones)


def test_an_own_rule_of_ten_lines_is_used_in_any_layer() -> None:
    net, x = chain(), images()
    found = LRP(net, composite={"first": Uniform(), "conv": ZPlus(), "linear": Epsilon()}).attribute(x, 3)
    assert_same(
        found.values, LRP(net, composite={"first": Flat(), "conv": ZPlus(), "linear": Epsilon()}).attribute(x, 3).values
    )
    assert found.coverage is not None
    assert found.coverage.handled == {"linear by epsilon": 2, "conv by z+": 1, "conv by uniform": 1}
    inner = LRP(net, composite={"last": Uniform()}).attribute(x, 3)
    rules = {
        0: textbook.epsilon(0),
        3: textbook.epsilon(0),
        7: textbook.epsilon(0),
        9: lambda neuron: textbook.flat()(neuron) * (neuron.a != 0),
    }
    hidden = net[:9](x).detach()
    assert_same(inner.values, textbook.lrp(list(net), x, 3, rules)[0])
    lost = (net(x)[:, 3, None] / 16 * (hidden == 0)).sum(1).detach()  # relevance of zeros cannot go on
    assert_same(shares(inner)["inputs of zero"], lost)


class Half(NonlinearRule):
    """Half of the relevance passes."""

    name = "half"

    def relevance(self, op: NonlinearOperation, relevance: Tensor) -> Tensor:
        assert_same(op.run(op.input), op.output)
        return relevance / 2


class First(NonlinearRule):
    """Returns the relevance of the first image, for all images."""

    def relevance(self, op: NonlinearOperation, relevance: Tensor) -> Tensor:
        return relevance[:1]


def test_a_nonlinear_rule_of_a_wrong_shape_is_an_error() -> None:
    with pytest.raises(saliency.errors.MethodError, match=r"rule First\(\) at .* returned \(1, .* for an input \(2, "):
        LRP(chain(), composite={"activation": First()}).attribute(images(), 1)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("key", ["activation", nn.ReLU, "[148]"])
def test_an_activation_may_have_a_rule(key: Any, inplace: bool) -> None:
    net, x = chain(), images()
    for at in (1, 4, 8):
        cast("nn.ReLU", net[at]).inplace = inplace
    table = {"conv": Gamma(), "linear": Epsilon()}
    found, usual = (LRP(net, composite=each).attribute(x, 3) for each in ({**table, key: Half()}, table))
    assert_same(found.values, usual.values / 8)
    assert float(cast("Tensor", found.residual).abs().max()) < 1e-9
    assert found.coverage is not None
    assert found.coverage.handled["relu by half"] == 3


@pytest.mark.parametrize("key", ["norm", nn.LayerNorm, "1"])
def test_a_norm_may_pass_its_relevance(key: Any) -> None:
    net, x = nn.Sequential(nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, 5)).double().eval(), images(size=2)
    nn.init.normal_(cast("Tensor", net[1].bias))
    found = LRP(net, composite={key: Pass()}).attribute(x, 3)
    inner = net[1](x.flatten(1)).detach()
    assert_same(found.values.flatten(1), (inner * net[2].weight[3]).detach())  # type: ignore[index]


def test_a_batch_norm_with_a_rule_is_not_merged() -> None:
    net, x = residual(), images()
    found = LRP(net, composite={"conv": Epsilon(0), "bn1": Half()}).attribute(x, 3)
    usual = LRP(net, "bn1", composite={"conv": Epsilon(0)}).attribute(x, 3)
    assert found.coverage is not None
    assert found.coverage.handled["batch_norm merged"] == 1
    assert found.coverage.handled["batch_norm by half"] == 1
    inner = net.conv1(x).detach()
    at_conv = LRP(net, "conv1", composite={"conv": Epsilon(0), "bn1": Half()}).attribute(x, 3)
    assert inner.all()
    assert_same(at_conv.values, usual.values / 2)


def test_types_of_modules_follow_names_and_first() -> None:
    net, x = chain(), images()
    table: dict[Any, Any] = {nn.Conv2d: ZPlus(), nn.Linear: Epsilon(), nn.Conv3d: Flat()}
    by_kind = LRP(net, composite={"conv": ZPlus(), "linear": Epsilon()}).attribute(x, 3)
    assert torch.equal(LRP(net, composite=table).attribute(x, 3).values, by_kind.values)
    mixed = {**table, "linear": Flat(), "first": Uniform(), "9": Gamma()}
    coverage = LRP(net, composite=mixed).attribute(x, 3).coverage
    assert coverage is not None
    assert coverage.handled == {"linear by gamma": 1, "linear by epsilon": 1, "conv by z+": 1, "conv by uniform": 1}


def test_composites_and_coverage_print_as_tables() -> None:
    composite = saliency.relevance.Composite({"first": Flat(), nn.Linear: Epsilon(), "conv": ZPlus()})
    assert [line.split()[0] for line in str(composite).splitlines()] == ["first", "Linear", "conv"]
    assert "conv    ZPlus(alpha=1.0, beta=0.0, bias=True)" in str(composite)
    for net, names in ((chain(), ["0", "3", "7", "9"]), (residual(), ["conv1", "conv2", "head"])):
        coverage = LRP(net, composite=composite).attribute(images(), 3).coverage
        assert coverage is not None
        assert [line.split("  ")[0].strip() for line in coverage.table().splitlines()] == names
        assert coverage.rules[names[0]] == "Flat()"
        assert coverage.rules[names[1]] == "ZPlus(alpha=1.0, beta=0.0, bias=True)"
        assert coverage.rules[names[-1]] == "Epsilon(epsilon=1e-06, relative=True)"


@pytest.mark.parametrize("composite", ["gamma", {"conv": Gamma(), nn.Linear: Gamma(0.5)}])
def test_gamma_is_an_option(composite: Any) -> None:
    net, x = chain(), images()
    expected = LRP(net, composite={"conv": Gamma(0.1), "linear": Gamma(0.1)}).attribute(x, 3)
    found = LRP(net, composite=composite, gamma=0.1)
    assert_same(found.attribute(x, 3).values, expected.values)
    assert found.settings["gamma"] == 0.1
    assert str(found.composite).count("Gamma(gamma=0.1)") == str(found.composite).count("Gamma") == 2
    for other in (None, "epsilon_plus"):
        with pytest.raises(
            saliency.errors.MethodError, match="no gamma rule; composites with gamma rules are gamma, epsilon_gamma_box"
        ):
            LRP(net, composite=other, gamma=0.1)


@pytest.mark.parametrize(("layer", "channels"), [("conv2", 8), ("bn1", 8)])
def test_relevance_of_all_channels_takes_one_call(layer: str, channels: int) -> None:
    net, x = residual(), images()
    found = LRP(net, layer, per_channel=True).attribute(x, 3)
    whole = LRP(net, layer).attribute(x, 3)
    assert found.values.shape == (2, channels, 12, 12)
    assert_same(found.values.sum(1, keepdim=True), whole.values)
    assert_same(cast("Tensor", found.ledger), cast("Tensor", whole.ledger))
    assert saliency.heatmap(found).shape == saliency.heatmap(whole).shape
    for channel in found.values.abs().sum((0, 2, 3)).topk(2).indices.tolist():
        alone = LRP(net, layer, through={layer: [channel]}).attribute(x, 3)
        assert_same(found.values[:, channel : channel + 1], alone.values)


def test_relevance_of_channels_at_patches() -> None:
    model, x = small_vit(5, 64, 16).double().eval(), torch.randn(2, 3, 64, 64, dtype=torch.float64)
    found, whole = (AttnLRP(model, per_channel=each).attribute(x, 3) for each in (True, False))
    assert found.values.shape[1] > 1
    assert_same(found.values.sum(1, keepdim=True), whole.values)


def test_names_precede_first_and_last_which_precede_kinds() -> None:
    net, x = chain(), images()
    table = {"conv": ZPlus(), "linear": Epsilon(), "first": Flat(), "last": Gamma(), "0": Pass1(), "[79]": Uniform()}
    handled = LRP(net, composite=table).attribute(x, 3).coverage
    assert handled is not None
    assert handled.handled == {"linear by uniform": 2, "conv by z+": 1, "conv by one": 1}
    table = {"linear": Epsilon(), "first": Flat(), "last": Gamma()}
    handled = LRP(net, composite=table).attribute(x, 3).coverage
    assert handled is not None
    assert handled.handled == {"linear by gamma": 1, "linear by epsilon": 1, "conv by epsilon": 1, "conv by flat": 1}


class Pass1(Flat):
    name = "one"


@pytest.mark.parametrize("in_order", [True, False])
def test_the_most_specific_key_wins_in_any_order(in_order: bool) -> None:
    net = nn.Sequential(chain()).eval()
    tables: list[tuple[dict[Any, Any], dict[str, Any]]] = [
        ({"0.0": ZPlus(), "0.9": Flat(), "*": Epsilon()}, {"0.0": ZPlus(), "0.9": Flat()}),
        ({"0.0": ZPlus(), "0": Epsilon()}, {"0.0": ZPlus()}),
        ({"0.[0-3]": ZPlus(), "*": Epsilon()}, {"0.0": ZPlus(), "0.3": ZPlus()}),
        ({"*.3": ZPlus(), nn.Conv2d: Flat(), "linear": Epsilon()}, {"0.0": Flat(), "0.3": ZPlus()}),
        ({nn.Conv2d: ZPlus(), nn.Module: Epsilon()}, {"0.0": ZPlus(), "0.3": ZPlus()}),
    ]
    for table, expected in tables:
        entries = [*table.items()] if in_order else [*table.items()][::-1]
        coverage = LRP(net, composite=dict(entries)).attribute(images(), 3).coverage
        assert coverage is not None
        linear = {f"0.{i}": repr(expected.get(f"0.{i}", Epsilon())) for i in LINEAR}
        assert dict(coverage.rules) == linear


@pytest.mark.parametrize(
    ("composite", "fact"),
    [
        ("gama", 'did you mean "gamma"'),
        ("zzz", "the composites are epsilon, gamma, .*excitation_backprop"),
        ({"conv": "gamma"}, "expected a composite's name, or a mapping .* to a rule"),
        ({"conv": Gamma}, "expected a composite's name"),
        (
            {"hed": Gamma()},
            r'no layer "hed"; did you mean "head".*the kinds are conv, linear, activation, norm, first',
        ),
        ({"blocks.*": Gamma()}, r'no layer "blocks\.\*"'),
        ({"conv*": ZPlus(), "bn*": ZPlus()}, r'the rule of "bn\*" is never used'),
        ({"conv": ZPlus(), "relu": ZPlus()}, 'the rule of "relu" is never used'),
        ({"conv1": ZPlus(), "conv[1]": Flat()}, r'the rule of "conv\[1\]" is never used.* more specific'),
        ({"conv*": ZPlus(), nn.Conv2d: Flat()}, 'the rule of "Conv2d" is never used'),
        ({nn.ReLU: ZPlus()}, 'the rule of "ReLU" is never used: no convolution'),
        ({"head": Half()}, 'the rule of "head" is never used: no activation or normalisation'),
        ({"norm": ZPlus()}, r'"norm" takes a NonlinearRule, got ZPlus'),
        ({"conv": Half()}, r'"conv" takes a Rule, got Half\(\)'),
        ({int: ZPlus()}, "expected a composite's name, or a mapping from an operation kind, a type of modules"),
        ({3: ZPlus()}, "expected a composite's name"),
    ],
)
def test_a_composite_that_does_not_fit_is_an_error(composite: Any, fact: str) -> None:
    with pytest.raises(saliency.errors.MethodError, match=fact):
        LRP(residual(), composite=composite).attribute(images(), 1)


def test_nan_in_the_ledger_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(rule: Epsilon, op: saliency.relevance.LinearOperation, relevance: Tensor) -> Passed:
        return epsilon(rule, op, relevance)._replace(absorbed=[("biases", relevance * torch.nan, None)])

    epsilon, table = KERNELS[Epsilon], cast("dict[Any, Any]", KERNELS)
    monkeypatch.setitem(table, Epsilon, kernel)
    with pytest.warns(saliency.errors.SaliencyWarning, match="nan of the score is missing from the ledger"):
        found = LRP(residual(), composite={"last": Epsilon()}).attribute(images(), 1)
    assert found.values.isfinite().all()


def test_settings_name_the_composite() -> None:
    assert LRP(residual(), composite="gamma").settings["composite"] == "gamma"
    assert LRP(residual()).settings["composite"] is None
    own = LRP(residual(), composite={"conv": Gamma(0.1), "head": Uniform()}).settings["composite"]
    assert own == "{'conv': Gamma(gamma=0.1), 'head': Uniform()}"


@pytest.mark.parametrize("composite", [None, *COMPOSITES])
@pytest.mark.parametrize("head", ["conv", "linear", "convs of two levels"])
def test_pixels_that_support_a_score_have_positive_relevance_whatever_its_sign(
    composite: str | None, head: str
) -> None:
    heads: dict[str, nn.Module] = {
        "conv": nn.Sequential(nn.Conv2d(8, 2, 1), nn.AdaptiveMaxPool2d(1), nn.Flatten()),
        "linear": nn.Sequential(nn.Flatten(), nn.Linear(8 * 36, 2)),
        "convs of two levels": OwnForward(
            lambda m, y: (m.a(y) + m.b(y[:, :, ::2, ::2]).repeat_interleave(2, 2).repeat_interleave(2, 3)).amax((2, 3)),
            a=nn.Conv2d(8, 2, 1),
            b=nn.Conv2d(8, 2, 3, padding=1),
        ),
    }
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), heads[head]).double().eval()
    x = images(1, 8).abs()
    for parameter in net.parameters():
        parameter.data.abs_()
    last = [layer for layer in net.modules() if isinstance(layer, nn.Conv2d | nn.Linear)][-1]
    assert last.bias is not None
    last.bias.data -= 0.3 + net(x).max()  # all pixels support a score below 0
    method = LRP(net, composite=composite, preprocess=Preprocess(std=(0.3,) * 3, mean=(0.0,) * 3))
    found = method.attribute(x, 1)
    assert float(found.scores) < 0
    assert float(found.values.min()) >= 0
    assert float(found.values.sum()) > 0


def test_deep_taylor_is_z_plus_with_a_box_at_the_pixels() -> None:
    net, preprocess = chain(), Preprocess(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    x = images().clamp(-0.7, 1.6)
    low, high = (
        torch.tensor(
            [(end - m) / s for m, s in zip(preprocess.mean, preprocess.std, strict=True)], dtype=torch.float64
        ).repeat_interleave(144)
        for end in (0, 1)
    )
    rules = dict.fromkeys(LINEAR, textbook.z_plus()) | {0: textbook.z_box(low, high), 9: textbook.epsilon(1e-6)}
    expected = textbook.lrp(list(net), x, 3, rules)[0]
    assert_same(LRP(net, composite="deep_taylor", preprocess=preprocess).attribute(x, 3).values, expected, 1e-6)
    bounds = {
        "first": ZBox(low[::144].tolist(), high[::144].tolist()),
        "conv": ZPlus(),
        "linear": ZPlus(),
        "last": Epsilon(),
    }
    assert_same(LRP(net, composite=bounds).attribute(x, 3).values, expected, 1e-6)
    with pytest.raises(
        saliency.errors.MethodError, match=r"z-box needs the bounds .* pass ZBox\(low, high\), or a model with"
    ):
        LRP(net, composite="deep_taylor").attribute(x, 3)


# --- the command line


def test_the_command_line_sets_composite_and_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share_models(monkeypatch)
    words = ["--method", "lrp", "--set", "composite=gamma", "--layer", "blocks.4", "--out"]
    assert main(["explain", str(COFFEE), "--maps", *words, str(tmp_path / "one")]) == 0
    found = Explanation.load(next((tmp_path / "one").glob("*.safetensors")))
    assert (found.layer, found.settings["composite"]) == ("blocks.4", "gamma")
    assert found.values.shape == (1, 1, 14, 14)
    copies(tmp_path / "photos", "a.png")
    assert main(["batch", str(tmp_path / "photos"), *words, str(tmp_path / "many")]) == 0
    assert '"composite": "gamma"' in (tmp_path / "many" / "manifest.jsonl").read_text()


# --- wrappers


def test_smoothing_averages_relevance() -> None:
    net, x = residual(), images(1)
    plain = LRP(net, composite="gamma", layer="relu").attribute(x, 1)
    still = saliency.SmoothGrad(LRP(net, composite="gamma", layer="relu"), passes=2, noise=0).attribute(x, 1)
    assert_same(still.values, plain.values)
    assert still.coverage == plain.coverage
    by_name = saliency.SmoothGrad(
        net, inner="lrp", inner_options={"composite": "gamma", "layer": "relu"}, passes=2, noise=0
    )
    assert_same(by_name.attribute(x, 1).values, plain.values)
    through = LRP(net, through={"relu": [1]})
    assert_same(saliency.SmoothGrad(through, passes=2, noise=0).attribute(x, 1).values, through.attribute(x, 1).values)


# --- excitation backpropagation


def probabilities(net: nn.Sequential, x: Tensor, top: textbook.Rule) -> list[Tensor]:
    """The winning probabilities of the inputs of each layer, by their definition."""
    rules = dict.fromkeys(LINEAR, textbook.z_plus(biased=False)) | {LINEAR[-1]: top}
    score = net(x)[:, 3].detach()
    return [r / score.view(-1, *[1] * (r.dim() - 1)) for r in textbook.lrp(list(net), x, 3, rules)]


def negated(neuron: textbook.Neuron) -> Tensor:
    return textbook.z_plus(biased=False)(neuron._replace(w=-neuron.w))


def test_excitation_is_the_probability_of_winning() -> None:
    net, x = chain(), images()
    expected = probabilities(net, x, textbook.z_plus(biased=False))
    for number in range(6):
        found = ExcitationBackprop(net, layer=str(number)).attribute(x, 3)
        assert_same(found.values, expected[number + 1].sum(1, keepdim=True))
        torch.testing.assert_close(found.values.sum((1, 2, 3)), torch.ones(2, dtype=torch.float64))
        assert float(found.values.min()) >= 0


def test_the_contrastive_map_is_the_positive_difference_to_negated_weights() -> None:
    net, x = chain(), images()
    dual = [probabilities(net, x, rule) for rule in (textbook.z_plus(biased=False), negated)]
    for number in range(6):
        found = ExcitationBackprop(net, layer=str(number), contrastive=True).attribute(x, 3)
        difference = (dual[0][number + 1] - dual[1][number + 1]).sum(1, keepdim=True)
        assert_same(found.values, difference.clamp(min=0))
    assert found.coverage is not None
    assert found.coverage.handled["linear by contrast"] == 1


def with_head(body: nn.Sequential, weight: Tensor) -> nn.Sequential:
    """The body with a linear layer of these weights (1, 16)."""
    head = nn.Linear(16, 1).double()
    head.weight.data = weight
    return nn.Sequential(*body, head).eval()


@pytest.mark.parametrize("contrastive", [False, True])
@pytest.mark.parametrize(
    "score",
    [
        lambda logits: logits[:, 3] - 20,
        lambda logits: 0.1 * logits[:, 3] + 7,
        lambda logits: logits.log_softmax(1)[:, 3],
        lambda logits: logits.softmax(1)[:, 3],
        lambda logits: logits[:, 3].sigmoid(),
        saliency.probability(3),
    ],
    ids=["minus a constant", "scaled", "log-softmax", "softmax", "sigmoid", "probability"],
)
def test_constants_and_the_last_softmax_do_not_change_an_excitation(score: Any, contrastive: bool) -> None:
    net, x = chain(), images()
    method = ExcitationBackprop(net, layer="2", contrastive=contrastive)
    assert_same(method.attribute(x, score).values, method.attribute(x, 3).values)
    for last in (nn.LogSoftmax(1), nn.Softmax(1)):
        model = nn.Sequential(*net, last).eval()
        found = ExcitationBackprop(model, layer="2", contrastive=contrastive).attribute(x, 3)
        assert_same(found.values, method.attribute(x, 3).values)


@pytest.mark.parametrize("contrastive", [False, True])
def test_the_score_is_one_neuron_above_the_last_layer(contrastive: bool) -> None:
    """So the excitation of a negative score, or of a difference of scores, is that of the weights of this neuron."""
    net, x = chain(), images()
    weight = cast("nn.Linear", net[9]).weight.detach()
    cases: list[tuple[Any, Tensor]] = [
        (lambda output: -output[:, 3], -weight[3:4]),
        (saliency.contrast(3, 1), weight[3:4] - weight[1:2]),
        (saliency.contrast(1, 3), weight[1:2] - weight[3:4]),
    ]
    for target, own in cases:
        alone = with_head(net[:9], own)
        found, expected = (
            ExcitationBackprop(model, layer="2", contrastive=contrastive).attribute(x, score).values
            for model, score in ((net, target), (alone, 0))
        )
        assert_same(found, expected)
        assert not torch.allclose(found, ExcitationBackprop(net, layer="2").attribute(x, 3).values, rtol=0.1)


def test_the_excitations_of_several_heads_are_those_of_one() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        hidden = m.hidden(x)
        out: Tensor = (m.one(hidden) + m.other(hidden)) / 2
        return out

    net, x = chain(), images()
    heads = {name: nn.Linear(16, 5).double() for name in ("one", "other")}
    both = OwnForward(forward, hidden=net[:9], **heads).eval()
    alone = with_head(net[:9], heads["one"].weight.detach()[1:2])
    other = with_head(net[:9], heads["other"].weight.detach()[1:2])
    found = ExcitationBackprop(both, layer="hidden.2").attribute(x, 1).values
    parts = [ExcitationBackprop(model, layer="2").attribute(x, 0).values for model in (alone, other)]
    # Each head has the share of its positive parts.
    hidden = net[:9](x).detach()
    sizes = [(hidden * head.weight[1]).clamp(min=0).sum(1).view(2, 1, 1, 1).detach() for head in heads.values()]
    expected = sum(part * size for part, size in zip(parts, sizes, strict=True)) / sum(sizes)
    assert_same(found, cast("Tensor", expected))
    torch.testing.assert_close(found.sum((1, 2, 3)), torch.ones(2, dtype=torch.float64))


def test_excitation_starts_below_a_last_product_of_two_signals() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        hidden = m.hidden(x).flatten(2)  # (N, 8, 16)
        out: Tensor = (m.scores(hidden.mT).mT @ m.weights(hidden.mT).softmax(1))[..., 0]
        return out

    net = chain()
    parts = {"scores": nn.Linear(8, 5).double(), "weights": nn.Linear(8, 1).double()}
    found = ExcitationBackprop(OwnForward(forward, hidden=net[:5], **parts).eval(), layer="hidden.2")
    assert 0.9 < float(found.attribute(images(), 1).values.sum((1, 2, 3)).min()) < 1.1


def test_the_shift_of_a_batch_norm_receives_no_excitation() -> None:
    norm, x = nn.BatchNorm2d(3), images().abs()
    nn.init.ones_(norm.bias)
    net = nn.Sequential(nn.Identity(), norm, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 5)).double().eval()
    found = ExcitationBackprop(net, layer="0").attribute(x, 1).values
    torch.testing.assert_close(found.sum((1, 2, 3)), torch.ones(2, dtype=torch.float64))


def test_excitation_warns_of_shares_that_are_lost() -> None:
    net, x = saliency.load("efficientnet_lite0"), torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with pytest.warns(saliency.errors.SaliencyWarning, match=r"add up to 0\.\d+, not to 1: the rest stays at neurons"):
        found = ExcitationBackprop(net).attribute(x, 1)
    assert float(found.values.sum()) < 0.5


def test_excitation_is_read_at_the_resolution_before_the_last() -> None:
    net, x = tiny_model(), torch.randn(2, 3, 16, 16)
    assert saliency.GradCAM(net).attribute(x, 1).values.shape == (2, 1, 8, 8)
    assert ExcitationBackprop(net).attribute(x, 1).values.shape == (2, 1, 16, 16)
    with pytest.raises(saliency.errors.LayerError, match="has a spatial output"):
        ExcitationBackprop(nn.Sequential(nn.Flatten(), nn.Linear(12, 5))).attribute(torch.randn(1, 3, 2, 2), 1)


def test_excitation_is_that_of_zennit() -> None:
    composites = pytest.importorskip("zennit.composites")
    gradient = pytest.importorskip("zennit.attribution").Gradient
    net, x = chain(), images()
    found = ExcitationBackprop(net, layer="2").attribute(x, 3).values
    top, hidden = net[3:], net[:3](x).detach()
    with gradient(top, composites.ExcitationBackprop(zero_params="bias")) as attributor:
        _, expected = attributor(hidden, torch.eye(5, dtype=torch.float64)[[3, 3]])
    expected = expected.sum(1, keepdim=True)
    assert_same(found, expected / expected.sum((1, 2, 3), keepdim=True), 1e-5)


def test_excitation_warns_of_shares_that_are_no_probabilities() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        hidden = m.conv(x).relu()
        out: Tensor = m.head((m.part(hidden) - 0.9 * hidden).mean((2, 3)))
        return out

    net = OwnForward(forward, conv=nn.Conv2d(3, 8, 3), part=nn.Identity(), head=nn.Linear(8, 5)).eval()
    for contrastive, most in ((False, 1), (True, 2)):
        with pytest.warns(
            saliency.errors.SaliencyWarning, match=f"the fractions at part add up to .* at most {most}: "
        ):
            ExcitationBackprop(net, layer="part", contrastive=contrastive).attribute(torch.randn(2, 3, 8, 8), 1)
