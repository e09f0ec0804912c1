"""LRP on whole networks: zennit, captum, and every spelling of one network."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saliency
from saliency import LRP, ExcitationBackprop, Preprocess
from saliency.errors import SaliencyWarning
from saliency.hooks.autograd_graph import DispatchMode
from saliency.hooks.operations import OperationRecord
from saliency.relevance import (
    COMPOSITES,
    AlphaBeta,
    Epsilon,
    Flat,
    Gamma,
    LinearOperation,
    Rule,
    WSquare,
    ZBox,
    ZPlus,
)
from tests.models import Checkpointed, OwnForward, Packed
from tests.relevance import textbook

Model = TypeVar("Model", bound=nn.Module)
BOX = {"first": ZBox(-3.0, 3.0), "conv": Gamma(0.25), "linear": Epsilon(1e-6)}


def lived_in(model: Model) -> Model:
    """A model in evaluation mode whose batch norms are no identity, and whose activations keep their size."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight)
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.weight, 1, 0.3)
            nn.init.normal_(layer.bias, 0, 0.2)
            assert isinstance(layer.running_mean, Tensor)
            assert isinstance(layer.running_var, Tensor)
            nn.init.normal_(layer.running_mean, 0, 0.2)
            nn.init.uniform_(layer.running_var, 0.5, 1.5)
    return model.double().eval()


def vgg16_bn() -> nn.Module:
    """VGG-16 with batch norm and an eighth of its channels."""
    from torchvision.models.vgg import VGG, cfgs, make_layers

    with torch.device("meta"):
        model: nn.Module = VGG(nn.Identity(), init_weights=False)
    widths = [width if width == "M" else width // 8 for width in cfgs["D"]]
    model.features = make_layers(widths, batch_norm=True)
    model.classifier = nn.Sequential(
        nn.Linear(64 * 7 * 7, 64), nn.ReLU(True), nn.Dropout(), nn.Linear(64, 64), nn.ReLU(True), nn.Linear(64, 10)
    )
    return lived_in(model)


def resnet50() -> nn.Module:
    """ResNet-50 whose convolutions of 3 x 3 have an eighth of their channels."""
    from torchvision.models.resnet import Bottleneck, ResNet

    model: nn.Module = ResNet(Bottleneck, [3, 4, 6, 3], num_classes=10, width_per_group=8)
    return lived_in(model)


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


# --- other libraries


OF_ZENNIT = (
    "epsilon_plus",
    "epsilon_plus_flat",
    "epsilon_alpha2_beta1",
    "epsilon_alpha2_beta1_flat",
    "epsilon_gamma_box",
)


@pytest.mark.parametrize(
    ("composite", "network"),
    [
        pytest.param(
            name, network, marks=() if network is vgg16_bn or name == "epsilon_plus_flat" else pytest.mark.slow
        )
        for network in (vgg16_bn, resnet50)
        for name in OF_ZENNIT
    ],
)
def test_composites_are_those_of_zennit_with_its_canonisers(composite: str, network: Callable[[], nn.Module]) -> None:
    zennit = pytest.importorskip("zennit.composites")
    canonisers = pytest.importorskip("zennit.torchvision")
    gradient = pytest.importorskip("zennit.attribution").Gradient
    model, target = network(), torch.tensor([1, 7])
    x = torch.randn(2, 3, 48, 48, dtype=torch.float64).clamp(-3, 3)
    is_box = composite == "epsilon_gamma_box"
    options = {"low": torch.full((1, 3, 1, 1), -3.0), "high": torch.full((1, 3, 1, 1), 3.0)} if is_box else {}
    canoniser = canonisers.VGGCanonizer if network is vgg16_bn else canonisers.ResNetCanonizer
    found = LRP(model, composite=BOX if is_box else composite).attribute(x, target.tolist())
    seed = torch.zeros(2, 10, dtype=torch.float64)
    seed[[0, 1], target] = found.scores
    with gradient(model, zennit.COMPOSITES[composite](canonizers=[canoniser()], **options)) as attributor:
        _, expected = attributor(x.clone(), seed)
    for mine, theirs in zip(found.values, expected, strict=True):
        assert correlation(mine, theirs) >= 0.9999
        assert float(mine.sum()) == pytest.approx(float(theirs.sum()), rel=1e-3)


def chain() -> nn.Sequential:
    """A plain chain with biases (N, 3, 12, 12) -> (N, 5)."""
    return nn.Sequential(
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
    ).double()


def images(count: int = 2, size: int = 12) -> Tensor:
    return torch.randn(count, 3, size, size, dtype=torch.float64)


@pytest.mark.parametrize("rule", ["epsilon", "gamma", "z_plus"])
def test_a_plain_chain_is_that_of_captum(rule: str) -> None:
    """Without biases in convolutions, which captum adds to the positive parts whatever their sign."""
    captum = pytest.importorskip("captum.attr")
    rules = pytest.importorskip("captum.attr._utils.lrp_rules")
    theirs = {"epsilon": rules.EpsilonRule, "gamma": rules.GammaRule, "z_plus": rules.Alpha1_Beta0_Rule}[rule]
    mine = {"epsilon": Epsilon(1e-9, relative=False), "gamma": Gamma(0.25), "z_plus": ZPlus()}[rule]
    net, x = chain().eval(), images().abs()
    for layer in net:
        if isinstance(layer, nn.Conv2d):
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
            layer.rule = theirs()
    found = LRP(net, composite={"conv": mine, "linear": Epsilon(1e-9, relative=False)}).attribute(x, 2).values
    # captum has no rule for nn.Flatten.
    twin = OwnForward(lambda m, x: m.top(m.bottom(x).flatten(1)), bottom=net[:6], top=net[7:]).eval()
    assert_same(found, captum.LRP(twin).attribute(x.requires_grad_(), target=2), 1e-5)


@pytest.mark.parametrize("composite", ["epsilon", "gamma", "epsilon_plus", "epsilon_alpha2_beta1"])
def test_composites_are_their_textbook_sums_on_a_chain(composite: str) -> None:
    net, x = chain().eval(), images()
    conv, linear = {
        "epsilon": (textbook.epsilon(0.25), textbook.epsilon(0.25)),
        "gamma": (textbook.gamma(0.25), textbook.gamma(0.25)),
        "epsilon_plus": (textbook.z_plus(), textbook.epsilon(1e-6)),
        "epsilon_alpha2_beta1": (textbook.alpha_beta(2, 1), textbook.epsilon(1e-6)),
    }[composite]
    expected = textbook.lrp(list(net), x, 3, {0: conv, 3: conv, 7: linear, 9: linear})
    found = LRP(net, composite=composite).attribute(x, 3)
    torch.testing.assert_close(found.values, expected[0], rtol=1e-5, atol=1e-7)


# --- spellings


class Block(nn.Module):
    """Modules, each called once: batch norms merged and not merged, a residual, a pool, a linear classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.bn2 = nn.BatchNorm2d(8)
        self.relu2 = nn.ReLU()
        self.bn3 = nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(2)
        self.mean = nn.AdaptiveAvgPool2d(1)
        self.hidden = nn.Linear(8, 12)
        self.relu3 = nn.ReLU()
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu1(self.bn1(self.conv1(x)))
        x = self.relu2(x + self.bn2(self.conv2(x)))
        x = self.mean(self.pool(self.bn3(x))).flatten(1)
        out: Tensor = self.head(self.relu3(self.hidden(x)))
        return out


def norm(x: Tensor, layer: nn.BatchNorm2d) -> Tensor:
    return F.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias, eps=layer.eps)


def functional(m: Block, x: Tensor) -> Tensor:
    x = F.relu(norm(F.conv2d(x, m.conv1.weight, padding=1), m.bn1))
    x = F.relu(x + norm(F.conv2d(x, m.conv2.weight, m.conv2.bias, padding=1, groups=2), m.bn2))
    x = F.adaptive_avg_pool2d(F.max_pool2d(norm(x, m.bn3), 2), 1).flatten(1)
    return F.linear(F.relu(F.linear(x, m.hidden.weight, m.hidden.bias)), m.head.weight, m.head.bias)


def in_place(m: Block, x: Tensor) -> Tensor:
    x = m.bn1(m.conv1(x)).relu_()
    y = m.bn2(m.conv2(x))
    y += x
    x = m.pool(m.bn3(y.relu_())).mean((2, 3))
    out: Tensor = m.head(F.relu(m.hidden(x), inplace=True))
    return out


def reused(m: Block, x: Tensor) -> Tensor:
    x = m.relu1(m.bn1(m.conv1(x)))
    x = m.relu1(x + m.bn2(m.conv2(x)))
    x = m.mean(m.pool(m.bn3(x))).squeeze(-1).squeeze(-1)
    out: Tensor = m.head(m.relu1(m.hidden(x)))
    return out


def primitive(m: Block, x: Tensor) -> Tensor:
    """Matrix products and sums in place of layers, and rectifiers by `clamp` and `maximum`."""
    x = m.bn1(m.conv1(x)).clamp(min=0)
    x = torch.add(x, m.bn2(m.conv2(x))).clamp_min(0)
    x = m.pool(m.bn3(x)).sum((2, 3)) / 36
    x = torch.addmm(m.hidden.bias, x, m.hidden.weight.T)
    x = torch.nn.functional.threshold(x, 0, 0)
    return torch.addmm(m.head.bias, x, m.head.weight.t())


FORWARDS = {"functional": functional, "in place": in_place, "reused": reused, "primitive": primitive}
BY_NAME = ["epsilon", "gamma", "epsilon_plus", "epsilon_plus_flat", "epsilon_alpha2_beta1", "excitation_backprop"]


def block() -> Block:
    model = lived_in(Block())
    assert isinstance(model, Block)
    return model


def respelled(model: Block, forward: Callable[..., Tensor]) -> nn.Module:
    return OwnForward(forward, **dict(model.named_children())).double().eval()


def explained(model: nn.Module, x: Tensor, composite: Any, target: Any = (0, 3)) -> Tensor:
    return LRP(model, composite=composite).attribute(x, list(target)).values


def assert_same(found: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    size = float(expected.detach().abs().max())
    assert size > 0
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=tolerance, atol=tolerance * size)


@pytest.mark.parametrize("composite", BY_NAME)
@pytest.mark.parametrize("spelling", FORWARDS)
def test_a_network_has_the_same_relevance_however_it_is_spelled(spelling: str, composite: str) -> None:
    model, x = block(), images()
    twin = respelled(model, FORWARDS[spelling])
    assert_same(twin(x), model(x))
    assert_same(explained(twin, x, composite), explained(model, x, composite))


def _conv(m: Any, x: Tensor, channels: slice = slice(None)) -> Tensor:
    return F.conv2d(x, m.conv.weight[channels], m.conv.bias[channels])


_NORMED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "flattened": lambda m, x: norm(m.conv(x).flatten(2), m.norm).reshape(-1, 8, 10, 10),
    "channels last": lambda m, x: (
        norm(m.conv(x).permute(0, 2, 3, 1).flatten(0, 2), m.norm).view(-1, 10, 10, 8).mT.mT.permute(0, 3, 1, 2)
    ),
    "another dimension": lambda m, x: norm(m.conv(x)[:, :, None], m.norm)[:, :, 0],
    "slice": lambda m, x: norm(m.conv(F.pad(x, (0, 0, 0, 1)))[:, :, :-1], m.norm),
    "slice of the channels": lambda m, x: norm(
        F.conv2d(x, torch.cat([m.conv.weight] * 2), torch.cat([m.conv.bias] * 2))[:, 8:], m.norm
    ),
    "cat": lambda m, x: norm(torch.cat([_conv(m, x, slice(3)), _conv(m, x, slice(3, 8))], 1), m.norm),
    "cat of rows": lambda m, x: norm(torch.cat([m.conv(x[:, :, :7]), m.conv(x[:, :, 5:])], -2), m.norm),
    "full backward hooks": lambda m, x: m.norm(m.conv(x)),
}


def _normed(forward: Callable[[Any, Tensor], Tensor], sign: float, conv: nn.Module | None = None) -> Any:
    torch.manual_seed(0)
    top = nn.Sequential(nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5, dtype=torch.float64))
    layers = {"conv": nn.Conv2d(3, 8, 3), "norm": nn.BatchNorm2d(8), "top": top}
    net = OwnForward(lambda m, x: m.top(forward(m, x)), **(layers | ({} if conv is None else {"conv": conv}))).double()
    net.eval()(torch.zeros(2, 3, 12, 12).double())
    lived_in(net)
    net.get_parameter("norm.weight").data[:4] *= sign
    return net.double().eval()


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("method", [*(partial(LRP, composite=name) for name in BY_NAME[1:]), saliency.AttnLRP])
@pytest.mark.parametrize("spelling", _NORMED)
def test_a_batch_norm_is_merged_through_operations_that_move_numbers(
    spelling: str, method: Callable[..., saliency.Attribution], sign: float
) -> None:
    usual, net = (_normed(forward, sign) for forward in (lambda m, x: m.norm(m.conv(x)), _NORMED[spelling]))
    if spelling == "full backward hooks":
        for layer in net.modules():
            layer.register_full_backward_hook(lambda *_: None)
            layer.register_full_backward_pre_hook(lambda *_: None)
    x = images()
    torch.testing.assert_close(net(x), usual(x))
    found, expected = (method(each).attribute(x, [1, 3]) for each in (net, usual))
    assert_same(found.values, expected.values, 1e-6)
    assert "by |z|" not in str(found.coverage)


def test_a_batch_norm_is_merged_through_a_cast() -> None:
    def cast(m: Any, x: Tensor) -> Tensor:
        return F.batch_norm(
            m.conv(x).double(), *(own.double() for own in (m.norm.running_mean, m.norm.running_var))
        ).float()

    def usual(m: Any, x: Tensor) -> Tensor:
        return F.batch_norm(m.conv(x), m.norm.running_mean, m.norm.running_var)

    nets = [_normed(forward, 1.0) for forward in (usual, usual)]
    nets[1]._forward = lambda m, x: m.top(cast(m, x))
    nets = [net.float() for net in nets]
    x = images().float()
    for composite in BY_NAME:
        found, expected = (explained(net, x, composite) for net in nets)
        assert_same(found, expected, 1e-4)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("composite", BY_NAME)
def test_a_batch_norm_is_merged_with_a_transposed_convolution(composite: str, groups: int, sign: float) -> None:
    conv = nn.ConvTranspose2d(4, 8, 3, stride=2, padding=1, output_padding=1, groups=groups)
    net = _normed(lambda m, x: m.norm(m.conv(F.pad(x, (0, 0, 0, 0, 0, 1), value=0.5))), sign, conv)
    folded = _normed(lambda m, x: m.conv(F.pad(x, (0, 0, 0, 0, 0, 1), value=0.5)), sign, copy.deepcopy(conv))
    folded.load_state_dict(net.state_dict())
    scale = net.norm.weight / (net.norm.running_var + net.norm.eps).sqrt()
    of_rows = scale.view(groups, 1, -1).expand(-1, 4 // groups, -1).reshape(4, 8 // groups, 1, 1)
    folded.conv.weight.data *= of_rows
    folded.conv.bias.data = (net.norm.bias + scale * (net.conv.bias - net.norm.running_mean)).detach()
    x = images()
    torch.testing.assert_close(net(x), folded(x))
    assert_same(explained(net, x, composite), explained(folded, x, composite), 1e-6)


_SPELLED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "mul": lambda m, x: m.norm(m.conv(x) * 2),
    "add": lambda m, x: m.norm(m.conv(x) + 1),
    "split": lambda m, x: torch.cat([m.norm(part) for part in m.conv(x).split(5, 2)], 2),
    "view": lambda m, x: torch.vmap(lambda one: m.norm(m.conv(one[None]))[0])(x),
}


@pytest.mark.parametrize("spelling", _SPELLED)
def test_a_batch_norm_that_another_spelling_would_merge_warns(spelling: str) -> None:
    net = _normed(_SPELLED[spelling], 1.0)
    for count in (1, 2):
        obstacle = "vmap" if spelling == "view" and count == 1 else spelling
        with pytest.warns(
            SaliencyWarning, match=rf"not merged .* because of .*{obstacle} \(.* how the model is written"
        ):
            LRP(net).attribute(images(count), 1)


@pytest.mark.parametrize("layer", ["conv", "norm"])
@pytest.mark.parametrize("composite", BY_NAME)
def test_relevance_of_a_layer_before_views_is_that_of_the_merged_output(layer: str, composite: str) -> None:
    usual, net = (_normed(forward, -1.0) for forward in (lambda m, x: m.norm(m.conv(x)), _NORMED["flattened"]))
    x = images()
    expected = LRP(usual, layer, composite=composite).attribute(x, 3)
    assert_same(LRP(net, "conv", composite=composite).attribute(x, 3).values, expected.values)
    chosen = LRP(net, composite=composite, through={"conv": [1, 5]}).attribute(x, 3)
    assert_same(chosen.values, LRP(usual, composite=composite, through={"conv": [1, 5]}).attribute(x, 3).values)


def test_the_norms_of_levit_are_merged() -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    coverage = (
        LRP(timm.create_model("levit_128s", num_classes=5).eval()).attribute(torch.randn(1, 3, 224, 224), 1).coverage
    )
    assert coverage is not None
    assert coverage.handled["batch_norm merged"] == 50
    assert coverage.handled["batch_norm by |z|"] == 2  # of the two classifiers, after the mean over tokens


@pytest.mark.parametrize("composite", BY_NAME)
@pytest.mark.parametrize("frozen", ["all", "weights", "first", "linear"])
def test_frozen_parameters_change_nothing(frozen: str, composite: str) -> None:
    model, x = block(), images()
    expected = explained(model, x, composite)
    for name, parameter in model.named_parameters():
        parts = {
            "weights": name.endswith("weight"),
            "first": "1" in name,
            "linear": name.startswith(("hidden", "head")),
        }
        parameter.requires_grad_(not parts.get(frozen, True))
    assert_same(explained(model, x, composite), expected)


@pytest.mark.parametrize("composite", BY_NAME)
def test_a_checkpoint_changes_nothing(composite: str) -> None:
    model, x = block(), images()
    assert_same(explained(Checkpointed(model), x, composite), explained(model, x, composite))


@pytest.mark.parametrize("composite", BY_NAME)
def test_outputs_in_containers_and_nested_modules_change_nothing(composite: str) -> None:
    model, x = block(), images()
    nested = nn.Sequential(nn.Sequential(nn.Identity(), nn.Sequential(model)))
    packed = Packed(lambda scores: {"logits": scores}, nested).eval()
    assert_same(explained(packed, x, composite), explained(model, x, composite))


@pytest.mark.parametrize("composite", BY_NAME)
def test_a_batch_of_different_targets_is_its_images(composite: str) -> None:
    model, x = block(), images(4)
    singles = [explained(model, x[i : i + 1], composite, [target]) for i, target in enumerate([4, 0, 2, 2])]
    assert_same(explained(model, x, composite, [4, 0, 2, 2]), torch.cat(singles))


@pytest.mark.parametrize("composite", BY_NAME)
def test_memory_format_and_precision_change_nothing_but_rounding(composite: str) -> None:
    model, x = block(), images()
    expected = explained(model, x, composite)
    model.to(memory_format=torch.channels_last)
    assert_same(explained(model, x.to(memory_format=torch.channels_last), composite), expected)
    found = explained(model.float(), x.float(), composite)
    assert found.dtype == torch.float32
    assert_same(found.double(), expected, 2e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaliencyWarning)  # of the share that is lost to rounding
        half = explained(model.bfloat16(), x.bfloat16(), composite).double()
    assert correlation(half, expected) > 0.9


@pytest.mark.parametrize("composite", BY_NAME)
def test_no_grad_and_inference_mode_change_nothing(composite: str) -> None:
    model, x = block(), images()
    expected = explained(model, x, composite)
    with torch.no_grad():
        assert_same(explained(model, x, composite), expected)
    with torch.inference_mode():
        assert_same(explained(model, x, composite), expected)


@pytest.mark.parametrize("composite", [*BY_NAME, {"conv": Epsilon(0.3), "linear": Epsilon(0.3)}], ids=str)
@pytest.mark.parametrize("frozen", [True, False])
def test_a_value_may_be_read_before_a_relu_overwrites_it(composite: Any, frozen: bool) -> None:
    """By a layer that keeps it as its operand, and as the result of a layer."""

    def forward(m: Any, x: Tensor, *, inplace: bool) -> Tensor:
        x = m.conv(x)
        y = x * 2 + m.other(x) if frozen else x * 2
        x = m.hidden((F.relu(x, inplace=inplace) + y).flatten(1))
        y = m.head(x) if frozen else x[:, :5] * 3
        out: Tensor = y + m.head(F.relu(x, inplace=inplace))
        return out

    parts = {
        "conv": nn.Conv2d(3, 4, 3),
        "other": nn.Conv2d(4, 4, 1),
        "hidden": nn.Linear(64, 6),
        "head": nn.Linear(6, 5),
    }
    models = [OwnForward(partial(forward, inplace=inplace), **parts).double().eval() for inplace in (False, True)]
    for model in models:
        model.requires_grad_(not frozen)
    x = images(2, 6)
    assert_same(explained(models[1], x, composite), explained(models[0], x, composite))


def test_a_layer_that_is_called_twice_has_its_rule_twice() -> None:
    conv = nn.Conv2d(3, 3, 3, padding=1).double()
    head = nn.Sequential(nn.Flatten(), nn.Linear(108, 5)).double()
    x = images(2, 6)
    loop = OwnForward(lambda m, x: m.head(F.relu(m.conv(F.relu(m.conv(x))))), conv=conv, head=head).eval()
    plain = [conv, nn.ReLU(), conv, nn.ReLU(), nn.Flatten(), head[1]]
    rules = {0: textbook.z_plus(), 2: textbook.z_plus(), 5: textbook.epsilon(1e-6)}
    assert_same(explained(loop, x, "epsilon_plus", [1, 1]), textbook.lrp(plain, x, 1, rules)[0])


def test_the_first_layer_is_the_first_that_runs() -> None:
    """Not the first that is registered; of two parallel first layers both are."""
    a, b, c = (nn.Conv2d(3, 4, 3, padding=1).double() for _ in range(3))
    c = nn.Conv2d(4, 4, 3, padding=1).double()
    head = nn.Sequential(nn.Flatten(), nn.Linear(4 * 36, 5)).double()
    x = images(2, 6)
    net = OwnForward(lambda m, x: m.head(F.relu(m.c(F.relu(m.a(x) + m.b(x))))), c=c, a=a, b=b, head=head).eval()
    composite = {"first": Flat(), "conv": ZPlus(), "linear": Epsilon(1e-6)}
    hidden = (a(x) + b(x)).detach()
    top = [nn.ReLU(), c, nn.ReLU(), nn.Flatten(), head[1]]
    r = textbook.lrp(top, hidden, 1, {1: textbook.z_plus(), 4: textbook.epsilon(1e-6)})[0]
    parts = [textbook.through(each, x, each(x).detach() / hidden * r, textbook.flat()) for each in (a, b)]
    assert_same(explained(net, x, composite, [1, 1]), parts[0] + parts[1])


def test_a_residual_shares_in_proportion() -> None:
    a, b = (nn.Conv2d(3, 3, 3, padding=1).double() for _ in range(2))
    head = nn.Sequential(nn.Flatten(), nn.Linear(108, 5)).double()
    x = images(2, 6)
    net = OwnForward(lambda m, x: m.head(m.a(x) + m.b(F.relu(m.a(x)))), a=a, b=b, head=head).eval()
    low = a(x).detach()
    high = b(F.relu(low)).detach()
    r = textbook.lrp([nn.Flatten(), head[1]], low + high, 1, {1: textbook.epsilon(1e-6)})[0]
    r_low = low / (low + high) * r
    r_high = textbook.through(b, F.relu(low), high / (low + high) * r, textbook.alpha_beta(2, 1))
    expected = textbook.through(a, x, r_low, textbook.alpha_beta(2, 1))
    expected += textbook.through(a, x, r_high, textbook.alpha_beta(2, 1))
    composite = {"conv": AlphaBeta(2, 1), "linear": Epsilon(1e-6)}
    assert_same(explained(net, x, composite, [1, 1]), expected)


@pytest.mark.parametrize("layer", [0, 2, 4])
def test_relevance_at_a_layer_is_that_of_its_output(layer: int) -> None:
    net, x = chain().eval(), images()
    conv, linear = textbook.alpha_beta(2, 1), textbook.epsilon(1e-6)
    expected = textbook.lrp(list(net), x, 3, {0: conv, 3: conv, 7: linear, 9: linear})[layer + 1]
    found = LRP(net, layer=str(layer), composite="epsilon_alpha2_beta1").attribute(x, 3)
    assert_same(found.values, expected.sum(1, keepdim=True), 1e-6)


def test_concept_relevance_passes_through_the_chosen_channels_only() -> None:
    net, x = chain().eval(), images()
    conv, linear = textbook.z_plus(), textbook.epsilon(1e-6)
    top = textbook.lrp(list(net), x, 3, {0: conv, 3: conv, 7: linear, 9: linear})[2]
    kept = torch.zeros_like(top)
    kept[:, [1, 4]] = top[:, [1, 4]]
    expected = textbook.propagate(list(net[:2]), x, kept, {0: conv})[0]
    found = LRP(net, composite="epsilon_plus", through={"1": [1, 4]}).attribute(x, 3)
    assert_same(found.values, expected, 1e-6)
    assert found.ledger is not None
    lost = found.ledger[:, found.ledger_names.index("other channels")]
    assert_same(lost, (top - kept).sum((1, 2, 3)), 1e-6)


@pytest.mark.parametrize("contrastive", [False, True])
def test_excitation_backprop_is_its_textbook_sums(contrastive: bool) -> None:
    net, x = chain().eval(), images().abs()
    rule = textbook.z_plus(biased=False)
    last = textbook.contrast() if contrastive else rule
    winner = torch.zeros(2, 5, dtype=torch.float64)
    winner[:, 3] = 1
    expected = textbook.propagate(list(net), x, winner, {0: rule, 3: rule, 7: rule, 9: last})[3]
    expected = expected.sum(1, keepdim=True)
    found = ExcitationBackprop(net, layer="2", contrastive=contrastive).attribute(x, 3)
    assert_same(found.values, expected.clamp(min=0) if contrastive else expected)
    if not contrastive:
        torch.testing.assert_close(found.values.sum((1, 2, 3)), torch.ones(2, dtype=torch.float64))


def test_all_composites_have_a_test_here() -> None:
    tested = {*BY_NAME, "epsilon_alpha2_beta1_flat", "epsilon_gamma_box"}
    assert {*COMPOSITES} - tested == {"deep_taylor", "attn_lrp", "cp_lrp"}


def test_coverage_counts_operations_by_kind_and_rule() -> None:
    found = LRP(resnet50(), composite="epsilon_plus").attribute(images(1, 32), 0)
    assert found.coverage is not None
    assert found.coverage.handled == {"conv by z+": 53, "batch_norm merged": 53, "linear by epsilon": 1}
    assert "53 conv by z+" in str(found.coverage)


@pytest.mark.parametrize("composite", [*BY_NAME, "epsilon_alpha2_beta1_flat", "deep_taylor"])
@pytest.mark.parametrize("network", [vgg16_bn, resnet50, block])
def test_the_ledger_and_the_input_sum_to_the_score(network: Callable[[], nn.Module], composite: str) -> None:
    found = LRP(network(), composite=composite, preprocess=Preprocess()).attribute(images(2, 32), [1, 3])
    assert found.ledger is not None
    assert found.residual is not None
    torch.testing.assert_close(found.ledger.sum(1) + found.residual, found.scores)
    shares = dict(zip(found.ledger_names, found.ledger.unbind(1), strict=True))
    torch.testing.assert_close(shares["input"], found.values.sum((1, 2, 3)))
    assert float((found.residual / found.scores).abs().max()) < 1e-4


def test_negative_parts_lose_no_digits_in_single_precision() -> None:
    network = saliency.load("efficientnet_lite0")
    x = torch.randn(1, 3, 64, 64)
    values = LRP(network, composite="epsilon_alpha2_beta1").attribute(x, 3).values
    expected = explained(copy.deepcopy(network).double(), x.double(), "epsilon_alpha2_beta1", [3])
    assert float((values - expected).abs().max() / expected.abs().max()) < 1e-3


class Dispatches:
    """Number of operations that records have seen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, original = 0, OperationRecord.__torch_dispatch__

        def counted(record: OperationRecord, *arguments: Any) -> Any:
            self.count += 1
            return original(record, *arguments)

        monkeypatch.setattr(OperationRecord, "__torch_dispatch__", counted)

    def of(self, run: Callable[[], object]) -> int:
        before = self.count
        run()
        return self.count - before


class Gated(nn.Module):
    """Residual network with a padding, and on request with a gate, whose node does not hold what its rule reads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.head = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Linear(4, 3)
        self.padding, self.has_gate = 0.0, False

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.bn(self.conv(F.pad(x, [1, 1, 1, 1], value=self.padding))))
        x = x + F.relu(x)
        x = (x * torch.sigmoid(x) if self.has_gate else x).mean((2, 3))
        out: Tensor = self.head(x)
        return out


@pytest.mark.parametrize("composite", ["epsilon", "epsilon_plus", "gamma", "epsilon_alpha2_beta1"])
def test_a_graph_that_holds_all_values_is_recorded_once(composite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, dispatches = lived_in(Gated()), images(), Dispatches(monkeypatch)
    method = LRP(model, composite=composite)
    first = method.attribute(x, 1)
    assert dispatches.count > 0
    assert dispatches.of(lambda: method.attribute(x, 1)) == 0
    second = method.attribute(x, [1, 2])
    assert torch.equal(first.values[0], second.values[0])
    assert first.ledger is not None
    assert second.ledger is not None
    torch.testing.assert_close(first.ledger[0], second.ledger[0], rtol=1e-12, atol=1e-12)


class Convolutions(DispatchMode):
    """Number of convolutions, of the model and of rules."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.convolution.default
        return func(*args, **(kwargs or {}))


def test_several_targets_share_the_forward_and_the_sums_of_positive_parts() -> None:
    method, x = LRP(block(), composite="epsilon_plus"), images()
    with Convolutions() as alone:
        singles = [method.attribute(x, target) for target in range(4)]
    with Convolutions() as together:
        shared = method.attribute_classes(x, [0, 1, 2, 3])
    # Two convolutions in the forward and two in the walk, of which the first one reads signed numbers.
    assert (alone.count, together.count) == (16, 2 + 1 + 4)
    for single, own in zip(singles, shared, strict=True):
        assert torch.equal(single.values, own.values)


@pytest.mark.parametrize("change", ["gate", "frozen", "padding"])
def test_a_graph_that_does_not_hold_all_values_is_recorded(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, dispatches = lived_in(Gated()), images(), Dispatches(monkeypatch)
    if change == "padding":
        model.padding = 1.0
    LRP(model).attribute(x, 1)
    if change == "gate":
        model.has_gate = True
    elif change == "frozen":
        model.requires_grad_(False)
    found = []
    assert dispatches.of(lambda: found.append(LRP(model).attribute(x, 1))) > 0
    expected = LRP(copy.deepcopy(model)).attribute(x, 1)
    assert torch.equal(found[0].values, expected.values)
    assert found[0].ledger is not None
    assert expected.ledger is not None
    assert torch.equal(found[0].ledger, expected.ledger)


@pytest.mark.parametrize("assign", ["data", "load_state_dict", "set_", "step"])
def test_changed_weights_are_noticed(assign: str) -> None:
    model, x = lived_in(Gated()), images()
    before = LRP(model).attribute(x, 1).values
    other = torch.randn_like(model.conv.weight)
    if assign == "data":
        model.conv.weight.data.copy_(other)
    elif assign == "load_state_dict":
        model.load_state_dict(model.state_dict() | {"conv.weight": other})
    elif assign == "set_":
        with torch.no_grad():
            model.conv.weight.set_(other.untyped_storage(), 0, other.size(), other.stride())
    else:
        model.conv.weight.grad = model.conv.weight.detach() - other
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        model.conv.weight.grad = None
    after = LRP(model).attribute(x, 1).values
    assert not torch.equal(before, after)
    assert torch.equal(after, LRP(copy.deepcopy(model)).attribute(x, 1).values)


def _first_layers() -> dict[str, nn.Module]:
    """First layers that do not read (N, C, ...): the same function of the image as a convolution over it all."""
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, (5, 6)).double()
    flat = nn.Linear(90, 4).double()
    scaled = nn.Conv2d(3, 4, (5, 6)).double()
    norm = nn.BatchNorm2d(3).double()
    assert conv.bias is not None
    assert scaled.bias is not None
    with torch.no_grad():
        scale, shift = torch.tensor([0.5, -2, 3]).double(), torch.tensor([0.1, 0.2, -0.3]).double()
        norm.weight.copy_(scale * (1 + norm.eps) ** 0.5)
        norm.bias.copy_(shift)
        flat.weight.copy_(conv.weight.flatten(1))
        flat.bias.copy_(conv.bias)
        scaled.weight.copy_(conv.weight / scale[:, None, None])
        scaled.bias.copy_(conv.bias - (scaled.weight * shift[:, None, None]).sum((1, 2, 3)))
    return {
        "conv": nn.Sequential(conv, nn.Flatten()),
        "flat": nn.Sequential(nn.Flatten(), flat),
        "batch norm": nn.Sequential(norm, scaled, nn.Flatten()),
    }


@pytest.mark.parametrize("name", ["flat", "batch norm"])
def test_bounds_per_channel_are_carried_to_the_first_layer(name: str) -> None:
    x, networks = torch.rand(2, 3, 5, 6, dtype=torch.float64) - 0.5, _first_layers()
    composite = {"first": ZBox([-1, -2, -3], [1, 2, 4])}
    maps = {key: LRP(network.eval(), composite=composite).attribute(x, 1).values for key, network in networks.items()}
    torch.testing.assert_close(maps[name], maps["conv"], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rule", [Flat(), WSquare()])
def test_a_batch_norm_before_the_first_layer_passes_its_relevance(rule: Rule) -> None:
    x, network = torch.rand(2, 3, 5, 6, dtype=torch.float64) - 0.5, _first_layers()["batch norm"].eval()
    assert isinstance(network, nn.Sequential)
    found = LRP(network, composite={"first": rule}).attribute(x, 1)
    alone = LRP(network[1:], composite={"first": rule}).attribute(network[0](x).detach(), 1)
    torch.testing.assert_close(found.values, alone.values)


class _Misshapen(Rule):
    def relevance(self, op: LinearOperation, relevance: Tensor) -> Tensor:
        return relevance


@pytest.mark.parametrize(
    ("key", "place"), [("1", 'layer "1"'), ("linear", r"an operation addmm with weights \(90, 4\)")]
)
def test_a_rule_of_a_wrong_shape_is_named_with_its_layer_and_shapes(key: str, place: str) -> None:
    network = _first_layers()["flat"]
    message = rf"_Misshapen\(\) at {place} returned \(2, 4\) for an input \(2, 90\)"
    with pytest.raises(saliency.errors.MethodError, match=message):
        LRP(network, composite={key: _Misshapen()}).attribute(torch.rand(2, 3, 5, 6).double(), 1)


def test_an_image_that_is_put_into_a_canvas_has_the_relevance_of_a_padded_one() -> None:
    torch.manual_seed(0)
    x, last = torch.rand(2, 3, 5, 6, dtype=torch.float64), nn.Sequential(nn.Conv2d(3, 4, 5), nn.Flatten()).double()

    class Canvas(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = last

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.last(x.new_zeros(len(x), 3, 5, 7).slice_scatter(x, 3, 1))
            return y

    found, padded = (
        LRP(network, composite={"first": Flat()}).attribute(x, 1).values
        for network in (Canvas(), nn.Sequential(nn.ZeroPad2d((1, 0, 0, 0)), last))
    )
    torch.testing.assert_close(found, padded)
