"""AttnLRP and CP-LRP against a vision transformer spelled out, and the rules of its parts against closed forms."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from saliency import CPLRP, AttnLRP, probability
from saliency.attribution.explanation import Explanation
from saliency.attribution.forward import SharedForward
from saliency.attribution.questions import Questions
from saliency.errors import SaliencyWarning
from saliency.hooks.autograd_graph import nodes_between
from saliency.relevance.walk import Walk
from saliency.targets.question import Images
from tests.models import Checkpointed, FunctionModel, OwnForward, small_vit
from tests.relevance.explicit_vit import ExplicitViT

METHODS = [AttnLRP, CPLRP]


def vit() -> nn.Module:
    """A small vision transformer of torchvision whose parameters are all drawn."""
    model = small_vit().double().eval()
    for name, parameter in model.named_parameters():
        is_scale = parameter.ndim == 1 and name.endswith("weight")
        nn.init.normal_(parameter, float(is_scale), 0.3)
    return model


def images(count: int = 2, size: int = 32) -> Tensor:
    return torch.randn(count, 3, size, size, dtype=torch.float64)


def shares(explanation: Explanation) -> dict[str, Tensor]:
    assert explanation.ledger is not None
    return dict(zip(explanation.ledger_names, explanation.ledger.unbind(1), strict=True))


def assert_same(found: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


# --- a whole transformer


@pytest.mark.parametrize("method", METHODS)
def test_a_vision_transformer_is_the_one_spelled_out(method: type[AttnLRP]) -> None:
    model, x, target = vit(), images(), [1, 3]
    expected = ExplicitViT(model, constant_attention=method is CPLRP).explain(x, torch.tensor(target))
    found = method(model, at="pixels").attribute(x, target)
    assert_same(found.scores, expected.scores)
    assert_same(found.values, expected.values, 1e-6)


def test_constant_factors_and_logits_keep_no_operands() -> None:
    model = FunctionModel(lambda x: (x * 2).softmax(-1).tanh())
    x = images()
    needs = AttnLRP(model, at="pixels").needs_for(x, Questions(0, Images(len(x))))
    forward = SharedForward(model, x, needs)
    found = map(forward.operations.operation, nodes_between(forward.output, forward.x))
    operands = {operation.name: list(operation.args) for operation in found if operation}
    assert operands["tanh"] == ["self"]
    assert operands["_softmax"] == operands["mul"] == []


@pytest.mark.parametrize("method", METHODS)
def test_the_ledger_of_a_vision_transformer_is_the_one_spelled_out(method: type[AttnLRP]) -> None:
    model, x, target = vit(), images(), [1, 3]
    expected = ExplicitViT(model, constant_attention=method is CPLRP).explain(x, torch.tensor(target))
    total = expected.values.sum((1, 2, 3)) + sum(expected.ledger.values())
    assert_same(total, expected.scores)  # the reference loses nothing
    found = shares(method(model, at="pixels").attribute(x, target))
    for name, share in {"softmax": torch.zeros(2).double(), **expected.ledger}.items():
        torch.testing.assert_close(found[name], share)


@pytest.mark.parametrize("method", METHODS)
def test_relevance_at_patches_is_the_one_spelled_out(method: type[AttnLRP]) -> None:
    model, x, target = vit(), images(), [1, 3]
    expected = ExplicitViT(model, constant_attention=method is CPLRP).explain(x, torch.tensor(target)).patches
    assert_same(method(model, at="patches").attribute(x, target).values, expected.view(2, 1, 4, 4), 1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_attention_need_not_be_fused(method: type[AttnLRP]) -> None:
    model, x = vit(), images()
    expected = method(model).attribute(x, 2).values
    with sdpa_kernel(SDPBackend.MATH):
        assert_same(method(model).attribute(x, 2).values, expected)


@pytest.mark.parametrize("method", METHODS)
def test_frozen_parameters_and_checkpoints_change_nothing(method: type[AttnLRP]) -> None:
    model, x = vit(), images()
    expected = method(model).attribute(x, [1, 2]).values
    assert_same(method(Checkpointed(model)).attribute(x, [1, 2]).values, expected)
    assert_same(method(model.requires_grad_(False)).attribute(x, [1, 2]).values, expected)


@pytest.mark.parametrize("options", [{}, {"gamma": 0.05, "conv_gamma": 0.25}])
@pytest.mark.parametrize("method", METHODS)
def test_a_batch_of_different_targets_is_its_images(method: type[AttnLRP], options: dict[str, Any]) -> None:
    model, x, targets = vit(), images(3), [1, 4, 0]
    found = method(model, **options).attribute(x, targets)
    singles = [method(model, **options).attribute(x[i : i + 1], targets[i]) for i in range(3)]
    assert_same(found.values, torch.cat([each.values for each in singles]))
    for name, share in shares(found).items():
        torch.testing.assert_close(share, torch.cat([shares(each)[name] for each in singles]))


@pytest.mark.parametrize("method", METHODS)
def test_precision_changes_nothing_but_rounding(method: type[AttnLRP]) -> None:
    model, x = vit(), images()
    expected = method(model).attribute(x, [1, 2]).values
    assert_same(method(model.float()).attribute(x.float(), [1, 2]).values.double(), expected, 1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaliencyWarning)  # of the share that is lost to rounding
        half = method(model.bfloat16()).attribute(x.bfloat16(), [1, 2]).values.double()
    assert float(torch.corrcoef(torch.stack([half.flatten(), expected.flatten()]))[0, 1]) > 0.95


# --- attention by itself


class Attention(nn.Module):
    """One layer of attention with several heads over the pixels of an image, and a weighted sum as the score."""

    def __init__(self, attend: Callable[..., Tensor], *, learned: str = "") -> None:
        super().__init__()
        self.qkv = nn.ParameterDict({name: nn.Parameter(torch.randn(3, 8)) for name in "qkv"})
        self.fixed = nn.ParameterDict({name: nn.Parameter(torch.randn(1, 2, 16, 4)) for name in learned})
        self.weight = nn.Parameter(torch.randn(2, 16, 4))
        self.attend = attend
        self.double()

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        tokens = x.flatten(2).transpose(1, 2)
        own = {n: (tokens @ self.qkv[n]).view(-1, 16, 2, 4).transpose(1, 2) for n in "qkv"}
        return tuple(self.fixed[n].expand_as(own[n]) if n in self.fixed else own[n] for n in "qkv")

    def forward(self, x: Tensor) -> Tensor:
        score = (self.attend(*self.heads(x)) * self.weight).sum((1, 2, 3))
        return torch.stack([score, -score], 1)


MASK = torch.ones(16, 16, dtype=torch.bool).tril().roll(3, 1) | torch.eye(16, dtype=torch.bool)
BIAS = torch.linspace(-1, 1, 256, dtype=torch.float64).view(16, 16)


def spelled_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1) @ v


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("nhij,nhjd->nhid", torch.einsum("nhid,nhjd->nhij", q * 0.5, k).softmax(-1), v)


def masked_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / 2).masked_fill(~MASK, -torch.inf).softmax(-1) @ v


def biased_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / 2 + BIAS).softmax(-1) @ v


SPELLINGS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "fused": (F.scaled_dot_product_attention, spelled_out),
    "einsum": (by_einsum, spelled_out),
    "mask": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, MASK), masked_by_hand),
    "bias": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, BIAS), biased_by_hand),
    "causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.ones(16, 16, dtype=torch.bool).tril()),
    ),
    "scale": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3),
        lambda q, k, v: (q @ k.mT * 0.3).softmax(-1) @ v,
    ),
}


def attention_relevance(model: Attention, x: Tensor, shares: tuple[float, float, float]) -> Tensor:
    """Gradients of q, k and v by themselves, weighted, times the image: what the rules come to."""
    total = torch.zeros_like(x)
    for part, share in enumerate(shares):
        if not share:
            continue
        leaf = x.clone().requires_grad_()
        heads = [head if at == part else head.detach() for at, head in enumerate(model.heads(leaf))]
        score = (model.attend(*heads) * model.weight).sum()
        (gradient,) = torch.autograd.grad(score, leaf)
        total += share * gradient * x
    return total


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("method", METHODS)
def test_attention_has_the_same_relevance_however_it_is_spelled(method: type[AttnLRP], spelling: str) -> None:
    model, x = Attention(SPELLINGS[spelling][0]).eval(), images(2, 4)
    found = method(model).attribute(x, 0).values
    shares = (0.25, 0.25, 0.5) if method is AttnLRP else (0.0, 0.0, 1.0)
    assert_same(found, attention_relevance(model, x, shares), 1e-5)
    model.attend = SPELLINGS[spelling][1]
    assert_same(method(model).attribute(x, 0).values, found, 1e-5)


@pytest.mark.parametrize("attend", [F.scaled_dot_product_attention, spelled_out])
@pytest.mark.parametrize(
    ("learned", "shares"),
    [("q", (0, 0.5, 0.5)), ("k", (0.5, 0, 0.5)), ("v", (0.5, 0.5, 0)), ("qk", (0, 0, 1)), ("qv", (0, 1, 0))],
)
def test_learned_operands_of_attention_get_no_share(
    learned: str, shares: tuple[float, float, float], attend: Callable[..., Tensor]
) -> None:
    model, x = Attention(attend, learned=learned).eval(), images(2, 4)
    assert_same(AttnLRP(model).attribute(x, 0).values, attention_relevance(model, x, shares), 1e-5)


# --- parts


def score_of(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[nn.Module, Tensor]:
    """A model whose score is a weighted sum of a function of the image, and the weights."""
    weight = torch.randn_like(function(x))
    return FunctionModel(lambda x: (function(x) * weight).flatten(1).sum(1)), weight


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "silu in place": lambda x: F.silu(x * 1, inplace=True),
    "hardswish": F.hardswish,
    "mish": F.mish,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "tanh": torch.tanh,
    "relu6": F.relu6,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("method", METHODS)
def test_an_activation_passes_its_relevance_on(method: type[AttnLRP], activation: str) -> None:
    x = images(2, 4) * 3
    x[:, :, 0] = 0
    function = ACTIVATIONS[activation]
    model, weight = score_of(function, x)
    assert_same(method(model).attribute(x, 0).values, function(x) * weight)


def test_a_sigmoid_sends_its_value_at_zero_to_the_ledger() -> None:
    x = images(2, 4)
    model, _ = score_of(torch.sigmoid, x)
    found = AttnLRP(model).attribute(x, 0)
    assert found.ledger is not None
    assert found.residual is not None
    torch.testing.assert_close(found.ledger.sum(1) + found.residual, found.scores)


@pytest.mark.parametrize("method", METHODS)
def test_a_product_of_two_signals_gives_half_to_each(method: type[AttnLRP]) -> None:
    a, b = (torch.randn(3, 3, dtype=torch.float64) for _ in range(2))
    x = images(2, 4)
    mix = torch.einsum

    def product(x: Tensor) -> Tensor:
        return mix("nchw,cd->ndhw", x, a) * mix("nchw,cd->ndhw", x, b)

    model, weight = score_of(product, x)
    half = [mix("ndhw,cd->nchw", weight * mix("nchw,cd->ndhw", x, other), each) / 2 for each, other in ((a, b), (b, a))]
    assert_same(method(model).attribute(x, 0).values, x * (half[0] + half[1]), 1e-5)


def test_a_square_keeps_its_relevance() -> None:
    x = images(2, 4)
    for square in (torch.square, lambda x: x * x, lambda x: x**2):
        model, weight = score_of(square, x)
        assert_same(AttnLRP(model).attribute(x, 0).values, x * x * weight)


def scale(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The standard deviation of a norm, as a constant."""
    return (x.var(axes, correction=0, keepdim=True) + 1e-5).sqrt().detach()


def constant(x: Tensor) -> Tensor:
    return x.detach()


RAMP = torch.arange(4.0, dtype=torch.float64)
NORMS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    # The same, with the scale cut off from the graph: then a gradient is the rule.
    "layer_norm": (
        lambda x: F.layer_norm(x, (4, 4)),
        lambda x: (x - x.mean((2, 3), keepdim=True)) / scale(x, (2, 3)),
    ),
    "layer_norm with weights": (
        lambda x: F.layer_norm(x, (4,), RAMP, torch.ones_like(RAMP)),
        lambda x: RAMP * (x - x.mean(3, keepdim=True)) / scale(x, (3,)),
    ),
    "group_norm": (
        lambda x: F.group_norm(x, 1),
        lambda x: (x - x.mean((1, 2, 3), keepdim=True)) / scale(x, (1, 2, 3)),
    ),
    "rms_norm": (
        lambda x: F.rms_norm(x, (4,), eps=1e-5),
        lambda x: x / constant(x.square().mean(3, keepdim=True) + 1e-5).sqrt(),
    ),
    "rms_norm by hand": (
        lambda x: x * (x.square().mean(3, keepdim=True) + 1e-5).rsqrt(),
        lambda x: x * constant(x.square().mean(3, keepdim=True) + 1e-5).rsqrt(),
    ),
    "normalize": (lambda x: F.normalize(x, dim=1), lambda x: x / constant(x.norm(dim=1, keepdim=True))),
    "division by a norm": (
        lambda x: x / x.norm(dim=1, keepdim=True),
        lambda x: x / constant(x.norm(dim=1, keepdim=True)),
    ),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("method", METHODS)
def test_a_norm_divides_by_a_constant(method: type[AttnLRP], norm: str) -> None:
    x = images(2, 4)
    function, cut = NORMS[norm]
    model, weight = score_of(function, x)
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((cut(leaf) * weight).sum(), leaf)
    assert_same(method(model).attribute(x, 0).values, gradient * x)


def test_the_remainder_of_a_softmax_is_in_the_ledger() -> None:
    x = images(2, 4)
    model, weight = score_of(lambda x: x.softmax(-1), x)
    s = x.softmax(-1)
    r = s * weight
    expected = x * (r - s * r.sum(-1, keepdim=True))
    found = AttnLRP(model).attribute(x, 0)
    assert_same(found.values, expected)
    assert_same(shares(found)["softmax"], (r - expected).sum((1, 2, 3)))


def test_the_probability_of_a_class_is_not_an_attention_weight() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)).double(), images(2, 6)
    maps = [method(model).attribute(x, probability(1)).values for method in METHODS]
    assert torch.equal(*maps)
    assert bool(maps[0].any())


@pytest.mark.parametrize("method", METHODS)
def test_gammas_of_zero_are_gradients(method: type[AttnLRP]) -> None:
    model, x = vit(), images()
    plain = method(model, at="pixels").attribute(x, 1).values
    assert_same(method(model, at="pixels", gamma=1e-9, conv_gamma=1e-9).attribute(x, 1).values, plain, 1e-5)


def test_timm_is_the_same_fused_and_not_fused() -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=16, num_heads=2, num_classes=5
    )
    model = model.double().eval()
    x = images()
    for method in METHODS:
        expected = method(model).attribute(x, [0, 1]).values
        for block in model.blocks:
            block.attn.fused_attn = False
        assert_same(method(model).attribute(x, [0, 1]).values, expected, 1e-6)
        for block in model.blocks:
            block.attn.fused_attn = True


def test_cross_attention_of_one_image_with_itself_counts_both_ways() -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True).double()
    patches, queries = nn.Conv2d(3, 4, 2, 2).double(), nn.Conv2d(3, 4, 4, 4).double()

    def forward(m: Any, x: Tensor) -> Tensor:
        tokens, few = m.patches(x).flatten(2).mT, m.queries(x).flatten(2).mT
        out: Tensor = m.attention(few, tokens, tokens, need_weights=False)[0].mean(1)
        return out

    model = OwnForward(forward, attention=attention, patches=patches, queries=queries).eval()
    x = images(2, 8)
    found = AttnLRP(model).attribute(x, 1)
    assert found.ledger is not None
    assert found.residual is not None
    torch.testing.assert_close(found.ledger.sum(1) + found.residual, found.scores)
    assert float((found.residual / found.scores).abs().max()) < 1e-4


@pytest.mark.parametrize("number", [2, 4])  # 16 tokens are a multiple of it; there are 4 heads
def test_the_ledger_of_a_batch_of_tokens_in_the_first_dimension_is_that_of_its_images(number: int) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 4, batch_first=True)
    for bias in (attention.in_proj_bias, attention.out_proj.bias):
        nn.init.normal_(bias)

    def forward(m: Any, x: Tensor) -> Tensor:
        tokens = m.patches(x).flatten(2).mT
        query = m.query.weight.expand(len(x), 1, -1)
        out: Tensor = m.attention(query, tokens, tokens)[0][:, 0]
        return out

    patches, query = nn.Conv2d(3, 8, 2, 2), nn.Embedding(1, 8)
    model, x = OwnForward(forward, attention=attention, patches=patches, query=query).double().eval(), images(number, 8)
    with patch.object(Walk, "run", autospec=True, side_effect=Walk.run) as run:
        found = AttnLRP(model).attribute(x, 1)
    assert run.call_count == 1
    assert found.residual is not None
    assert float(found.residual.abs().max()) < 1e-9
    for own, image in zip(found, x, strict=True):
        torch.testing.assert_close(shares(own), shares(AttnLRP(model).attribute(image, 1)))
