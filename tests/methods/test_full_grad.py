"""FullGrad: the terms sum to the score on any network, and the map follows the paper."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saliency
from saliency.errors import SaliencyWarning, TargetError
from saliency.methods.full_grad import FullGrad
from tests.models import OwnForward, small_vit, torchvision_models


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def lived_in(model: nn.Module) -> nn.Module:
    """In float64, with every bias and every statistic away from what it is made with."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean)  # type: ignore[arg-type]
            nn.init.uniform_(module.running_var, 0.5, 2)  # type: ignore[arg-type]
    for parameter in model.parameters():
        if parameter.dim() == 1 or not parameter.any():
            nn.init.normal_(parameter, 0.5, 0.2)
    return model.double().eval()


class Small(nn.Module):
    """Two convolutions with batch norms and an activation of any kind, in place where it can be."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5)
        self.second, self.head = nn.Conv2d(5, 6, 3, stride=2, bias=False), nn.Linear(6, 4)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        maps = self.act(self.norm(self.first(x)))
        out: Tensor = self.head(self.act(self.second(maps)).mean((2, 3)))
        return out


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu in place": F.relu_,
    "silu": F.silu,
    "silu in place": lambda x: F.silu(x, inplace=True),
    "gelu": F.gelu,
    "tanh approximation": lambda x: F.gelu(x, approximate="tanh"),
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "elu in place": F.elu_,
    "mish": F.mish,
    "by hand": lambda x: x * torch.sigmoid(1.7 * x) + 0.3,
    "a gate": lambda x: x * torch.sigmoid(x.mean((2, 3), keepdim=True)),
    "tokens": lambda x: F.layer_norm(x.flatten(2), x.flatten(2).shape[2:]).reshape(x.shape),
    "group norm": lambda x: F.group_norm(x, 1),
    "instance norm": F.instance_norm,
    "in place by hand": lambda x: x.mul_(2).add_(1).sigmoid_(),
    "a constant in front": lambda x: torch.cat([torch.ones_like(x[:, :1]), x[:, 1:]], 1),
    "softmax": lambda x: x.softmax(1) * x,
}


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_the_terms_make_up_the_score(act: str) -> None:
    model, x = lived_in(Small(ACTIVATIONS[act])), torch.randn(3, 3, 9, 8, dtype=torch.float64)
    found = FullGrad(model).attribute(x, [0, 3, 1])
    assert found.residual is not None
    assert (found.residual.abs() < 1e-9 * found.scores.abs().clamp(min=1)).all()
    torch.testing.assert_close(found.scores, model(x)[[0, 1, 2], [0, 3, 1]].detach())


@pytest.mark.parametrize(
    "make",
    [
        lambda: torchvision_models().resnet18(num_classes=5),
        lambda: torchvision_models().DenseNet(4, (2, 2), 6, num_classes=5),
        lambda: torchvision_models().googlenet(num_classes=5, aux_logits=False, init_weights=False),
        lambda: torchvision_models().mobilenet_v3_small(num_classes=5),
        small_vit,
        lambda: torchvision_models().SwinTransformer([4, 4], 8, [2, 2], [2, 2], [4, 4], num_classes=5),
    ],
    ids=["resnet18", "densenet", "googlenet", "mobilenet_v3", "vit", "swin"],
)
def test_the_terms_make_up_the_score_of_known_networks(make: Callable[[], nn.Module]) -> None:
    model, x = lived_in(make()), torch.randn(1, 3, 32, 32, dtype=torch.float64)
    found = FullGrad(model).attribute(x, 3)
    assert found.residual is not None
    assert found.residual.abs() < 1e-9 * found.scores.abs()
    assert found.values.any()
    assert found.run_stats[0].note.endswith("of the score")


@pytest.mark.parametrize("target", [saliency.probability(2), lambda output: output[:, 1].exp() + 3])
def test_any_target_has_its_own_part(target: Callable[[Tensor], Tensor]) -> None:
    model, x = lived_in(Small(F.silu)), torch.randn(2, 3, 9, 8, dtype=torch.float64)
    found = FullGrad(model).attribute(x, target)
    assert found.residual is not None
    assert (found.residual.abs() < 1e-9).all()


def test_the_map_is_the_papers() -> None:
    model, x = lived_in(Small(F.relu)), torch.randn(1, 3, 9, 8, dtype=torch.float64, requires_grad=True)
    assert isinstance(model, Small)
    first = model.first(x)
    normed = model.norm(first)
    second = model.second(F.relu(normed))
    score = model.head(F.relu(second).mean((2, 3)))[0, 2]
    at_x, at_first, at_norm = torch.autograd.grad(score, [x, first, normed])
    norm = model.norm
    assert norm.running_mean is not None
    assert norm.running_var is not None
    shift = norm.bias - norm.weight * norm.running_mean / (norm.running_var + norm.eps).sqrt()

    def psi(product: Tensor) -> Tensor:
        size = product.detach().abs()
        size = (size - size.min()) / (size.max() - size.min())
        return F.interpolate(size.sum(1, keepdim=True), (9, 8), mode="bilinear", align_corners=False)

    assert model.first.bias is not None
    biases = model.first.bias[None, :, None, None], shift[None, :, None, None]
    expected = psi(at_x * x) + psi(at_first * biases[0]) + psi(at_norm * biases[1])
    torch.testing.assert_close(FullGrad(model).attribute(x.detach(), 2).values, expected)


def test_what_does_not_depend_on_the_image_has_no_part() -> None:
    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.head = nn.Parameter(torch.randn(1, 4)), nn.Linear(4, 3)
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.conv(x).mean((2, 3)) + torch.tanh(self.token * 2))
            return out

    x = torch.randn(1, 3, 6, 6, dtype=torch.float64)
    found = FullGrad(Prompted().double()).attribute(x, 1)
    assert found.residual is not None
    assert found.residual.abs() < 1e-12
    assert found.run_stats[0].note.startswith("3 biases")  # of the convolution, the sum and the head


@pytest.mark.parametrize(
    "function",
    [
        partial(F.pad, pad=(1, 1), value=0.5),
        lambda x: x.masked_fill(x < 0, 0.7),
        lambda x: x.slice_scatter(torch.ones_like(x[:, :1]), 1, 0, 1),
    ],
)
def test_constants_have_a_term(function: Callable[[Tensor], Tensor]) -> None:
    found = FullGrad(lived_in(Small(function))).attribute(torch.randn(1, 3, 9, 8, dtype=torch.float64), 2)
    assert found.residual is not None
    assert found.residual.abs() < 1e-12


def _set_part(x: Tensor) -> Tensor:
    x = x * 1
    x[:, :2] = 0.7
    return x


@pytest.mark.parametrize(
    ("function", "name"),
    [(_set_part, "fill"), (lambda x: x.index_put((torch.tensor([0]),), torch.ones_like(x[:1])) + x, "index_put")],
)
def test_a_constant_without_a_term_is_named(function: Callable[[Tensor], Tensor], name: str) -> None:
    with pytest.warns(SaliencyWarning, match=f"no bias of {name}"):
        FullGrad(lived_in(Small(function))).attribute(torch.randn(1, 3, 9, 8, dtype=torch.float64), 2)


def test_what_is_not_seen_is_said_and_is_the_residual() -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x + 2

        @staticmethod
        def backward(ctx: object, *gradients: Tensor) -> Tensor:
            return gradients[0]

    model = lived_in(Small(lambda x: Own.apply(x)))
    x = torch.randn(1, 3, 9, 8, dtype=torch.float64)
    with pytest.warns(SaliencyWarning, match="of the score"):
        found = FullGrad(model).attribute(x, 2)
    assert isinstance(model, Small)
    # The constant of each place of both calls, times the gradient there.
    leaf = x.clone().requires_grad_()
    normed = model.norm(model.first(leaf))
    second = model.second(normed + 2)
    score = model.head((second + 2).mean((2, 3)))[0, 2]
    missing = sum(2 * each.sum() for each in torch.autograd.grad(score, [normed, second]))
    assert found.residual is not None
    torch.testing.assert_close(found.residual[0], torch.as_tensor(missing))


@pytest.mark.parametrize("act", [F.relu, partial(F.silu, inplace=True), F.hardsigmoid])
def test_an_exported_model_has_the_map_of_the_model(act: Callable[[Tensor], Tensor]) -> None:
    model, x = lived_in(Small(act)), torch.randn(1, 3, 9, 8, dtype=torch.float64)
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(FullGrad(exported).attribute(x, 1).values, FullGrad(model).attribute(x, 1).values)


@pytest.mark.parametrize("kind", ["decomposed", "traced"])
def test_a_graph_of_kernels_has_the_map_of_the_model(kind: str) -> None:
    model, x = lived_in(Small(F.relu)), torch.randn(1, 3, 9, 8, dtype=torch.float64)
    if kind == "decomposed":
        graph = torch.export.export(model, (x,)).run_decompositions().module()
    else:
        graph = torch.jit.trace(model, x)  # type: ignore[no-untyped-call]
    found = FullGrad(graph).attribute(x, 1)
    torch.testing.assert_close(found.values, FullGrad(model).attribute(x, 1).values)
    assert found.residual is not None
    assert found.residual.abs() < 1e-12


def test_a_linear_layer_on_tokens_is_in_the_map_in_any_memory_format() -> None:
    class Tokens(nn.Module):
        def __init__(self, copies: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.copies, self.layer, self.head = copies, nn.Linear(3, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            tokens = x.permute(0, 2, 3, 1)
            out: Tensor = self.head(self.layer(tokens.contiguous() if self.copies else tokens).relu().mean((1, 2)))
            return out

    x = torch.randn(1, 3, 6, 6)
    copied, viewed = (FullGrad(Tokens(copies)).attribute(x, 1).values for copies in (True, False))
    torch.testing.assert_close(copied, viewed)


def test_several_targets_share_the_forward() -> None:
    model, x = lived_in(Small(F.relu)), torch.randn(1, 3, 9, 8, dtype=torch.float64)
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    several = FullGrad(model).attribute_classes(x, [0, 1, 2])
    assert len(calls) == 1
    for target, found in enumerate(several):
        torch.testing.assert_close(found.values, FullGrad(model).attribute(x, target).values)


def test_a_score_without_a_gradient_is_refused() -> None:
    model, x = lived_in(Small(F.relu)), torch.randn(1, 3, 9, 8, dtype=torch.float64)
    with pytest.raises(TargetError, match="no gradient"):
        FullGrad(model).attribute(x, lambda output: output.detach()[:, 0])


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
def test_a_model_in_vmap_or_frozen_warns() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval()
    x, scripted = torch.randn(1, 3, 8, 8), torch.jit.script(net)
    usual = saliency.FullGrad(net).attribute(x, 1).values
    torch.testing.assert_close(saliency.FullGrad(scripted).attribute(x, 1).values, usual)
    mapped = OwnForward(lambda m, x: torch.vmap(lambda one: m.net(one[None])[0])(x), net=net).eval()
    for other in (mapped, torch.jit.freeze(scripted)):
        with pytest.warns(saliency.errors.SaliencyWarning, match="vmap and torch.jit.freeze change operations"):
            saliency.FullGrad(other).attribute(x, 1)
