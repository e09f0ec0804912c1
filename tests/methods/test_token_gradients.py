"""Maps from gradients at attention and tokens equal the papers' formulas, spelled out on timm's unfused attention."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import saliency
from saliency import AGCAM, CheferAttention, CheferLRP, GradientRollout, LeGrad, Together
from saliency.attribution.forward import TargetGradients
from saliency.errors import NotApplicableError
from saliency.testing import images, tiny_transformer
from tests.models import OwnForward, torchvision_models

METHODS = [LeGrad, AGCAM]
TARGETS = [1, 3]
# The model, the number of tokens before the patches, and those that the head reads.
MODELS: dict[str, tuple[str, dict[str, Any], int, slice]] = {
    "class token": ("vit_tiny_patch16_224", {"img_size": (64, 96)}, 1, slice(0, 1)),
    "mean of the patches": ("vit_tiny_patch16_224", {"img_size": (64, 96), "global_pool": "avg"}, 1, slice(1, None)),
    "distilled": ("deit_tiny_distilled_patch16_224", {"img_size": (64, 96)}, 2, slice(0, 2)),
    "registers": ("vit_small_patch14_reg4_dinov2", {"img_size": (56, 84)}, 5, slice(0, 1)),
}


def timm_model(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return trained(pytest.importorskip("timm").create_model(name, **{"depth": 3, "num_classes": 5, **options}))


def trained(model: Any) -> Any:
    with torch.no_grad():
        for weight in model.parameters():  # else, random blocks hardly change the tokens
            weight.add_(torch.randn_like(weight), alpha=0.05)
    return model.eval()


class Unfused:
    """A timm model without fused attention: its tokens, its attention with gradients, and what its methods need."""

    def __init__(self, kind: str) -> None:
        name, options, self.prefix, self.rows = MODELS[kind]
        self.model: Any = timm_model(name, **options)
        self.x = images(2, options["img_size"])
        self.inputs: list[Tensor] = []
        self.attention: list[Tensor] = []
        handles = []
        for block in self.model.blocks:
            handles.append(block.register_forward_pre_hook(lambda _, args: self.inputs.append(args[0])))
            handles.append(block.attn.attn_drop.register_forward_pre_hook(self._keep))
            block.attn.fused_attn = False
        handles.append(self.model.norm.register_forward_pre_hook(lambda _, args: self.inputs.append(args[0])))
        self.x.requires_grad_()
        self.scores = self.model(self.x)[[0, 1], TARGETS].sum()
        for handle in handles:
            handle.remove()
        for block in self.model.blocks:
            block.attn.fused_attn = True

    def _keep(self, module: nn.Module, args: tuple[Tensor]) -> None:
        self.attention.append(args[0])

    def gradients(self, score: Tensor, at: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(score, at, retain_graph=True)

    def qkv(self, block: Any, tokens: Tensor) -> Any:
        attn = block.attn
        qkv = attn.qkv(block.norm1(tokens))
        return qkv.reshape(*tokens.shape[:2], 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4)

    def read(self, maps: Tensor) -> Tensor:
        """The mean over the queries that the head reads."""
        return maps[..., self.rows, :].mean(-2)

    def patches(self, relevance: Tensor) -> Tensor:
        return relevance[:, self.prefix :].detach()

    def map_by(self, method: type[saliency.Attribution], **options: Any) -> Tensor:
        found = method(self.model, **options).attribute(self.x.detach(), TARGETS)
        assert found.values.shape == (2, 1, 4, 6)
        return found.values.flatten(1)


@pytest.fixture(params=MODELS)
def unfused(request: pytest.FixtureRequest) -> Unfused:
    return Unfused(request.param)


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-5 * float(wanted.abs().max()))


def head_of(model: Any, tokens: Tensor) -> Tensor:
    return cast("Tensor", model.forward_head(model.norm(tokens))[[0, 1], TARGETS].sum())


def test_le_grad_is_the_positive_gradient_of_each_layers_own_score(unfused: Unfused) -> None:
    maps = []
    for attention, after in zip(unfused.attention, unfused.inputs[1:], strict=True):
        own = head_of(unfused.model, after)
        maps.append(unfused.gradients(own, [attention])[0].clamp(min=0).mean((1, 2)))
    close(unfused.map_by(LeGrad), unfused.patches(torch.stack(maps).mean(0)))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
def test_ag_cam_gates_the_positive_gradient_along_skip_connections_by_the_logits(unfused: Unfused, fused: bool) -> None:
    """As in the authors' code, where attention and MLP detach their input.

    Also where a softmax of the model computed the probabilities, from which the logits cannot be computed.
    """
    model = unfused.model
    norms = [norm for block in model.blocks for norm in (block.norm1, block.norm2)]
    detached = [norm.register_forward_hook(lambda module, args, output: output.detach()) for norm in norms]
    attention: list[Tensor] = []
    for block in model.blocks:
        block.attn.fused_attn = False
        detached.append(block.attn.attn_drop.register_forward_pre_hook(lambda _, args: attention.append(args[0])))
    gradients = torch.autograd.grad(model(unfused.x)[[0, 1], TARGETS].sum(), attention)
    for handle in detached:
        handle.remove()
    total = torch.zeros(())
    for block, tokens, gradient in zip(model.blocks, unfused.inputs, gradients, strict=False):
        query, key, _ = unfused.qkv(block, tokens)
        gates = (query @ key.mT * block.attn.scale).sigmoid()
        total = total + unfused.read(gradient.clamp(min=0) * gates).sum(1)
        block.attn.fused_attn = fused
    close(unfused.map_by(AGCAM), unfused.patches(total))


# Own scores of layers, on any model: those of the model without the blocks after the layer.


class PostNorm(nn.Module):
    """Blocks of PyTorch that normalise after each sum, with tokens in the first dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, stride=8)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32) for _ in range(3))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).permute(2, 0, 1)
        for block in self.blocks:
            tokens = block(tokens)
        return cast("Tensor", self.head(tokens.mean(0)))


def from_torchvision() -> tuple[Any, Any, str]:
    model: Any = trained(torchvision_models().VisionTransformer(32, 8, 3, 2, 16, 32, num_classes=5))
    return model, model.encoder, "layers"


def from_transformers() -> tuple[Any, Any, str]:
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    model: Any = trained(
        transformers.ViTForImageClassification(
            transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=5)
        )
    )
    return model, model.vit, "layers"


def with_pooling_head() -> tuple[Any, Any, str]:
    model = timm_model("vit_base_patch16_siglip_224", img_size=32, patch_size=8, embed_dim=24, num_heads=2)
    return model, model, "blocks"


def post_norm() -> tuple[Any, Any, str]:
    model = trained(PostNorm())
    return model, model, "blocks"


@pytest.mark.parametrize("build", [from_torchvision, from_transformers, with_pooling_head, post_norm])
def test_the_own_score_of_a_layer_is_that_of_the_model_without_later_blocks(build: Any) -> None:
    torch.manual_seed(0)
    model, parent, name = build()
    x = images(2, (32, 32))
    found = LeGrad(model).attribute(x, TARGETS).values.flatten(1)
    blocks, maps = getattr(parent, name), []
    for count in (1, 2, 3):
        setattr(parent, name, blocks[:count])
        maps.append(saliency.attention(model, x, TARGETS)[-1].gradient.clamp(min=0).mean((1, 2)))
    close(found, torch.stack(maps).mean(0)[:, -16:])


@pytest.mark.parametrize("method", METHODS)
def test_a_pooling_head_and_tokens_in_the_first_dimension_are_read(method: Any) -> None:
    for build in (with_pooling_head, post_norm):
        values = method(build()[0]).attribute(images(2, (32, 32)), TARGETS).values
        assert values.shape == (2, 1, 4, 4)
        assert values.abs().sum() > 0


@pytest.mark.parametrize("method", METHODS)
def test_windows_and_stages_are_refused(method: Any) -> None:
    small = {"img_size": 56, "depths": (1, 1), "embed_dim": 24, "num_heads": (1, 2)}
    model = pytest.importorskip("timm").create_model("swin_tiny_patch4_window7_224", num_classes=3, **small).eval()
    with pytest.raises(NotApplicableError, match=r"not among all tokens in each block.*attn_lrp"):
        method(model).attribute(images(1, (56, 56)), 0)


@pytest.mark.parametrize("method", [AGCAM, LeGrad])
def test_layers_that_bypass_all_blocks_are_refused(method: Any) -> None:
    bypass, vit = nn.Conv2d(3, 5, 8, 8), timm_model("vit_tiny_patch16_224", img_size=32)
    model = OwnForward(lambda m, x: m.vit(x) + m.bypass(x).mean((2, 3)), vit=vit, bypass=bypass)
    with pytest.raises(NotApplicableError, match="bypass its blocks"):
        method(model.eval()).attribute(images(1, (32, 32)), 1)


@pytest.mark.parametrize("method", [AGCAM, LeGrad])
def test_a_head_that_reads_several_blocks_is_refused(method: Any) -> None:
    """Such as the linear heads of DINOv2 on four blocks: the tokens before the later ones are not the only way."""
    vit = timm_model("vit_tiny_patch16_224", img_size=32, num_classes=0)
    model = OwnForward(lambda m, x: sum(m.vit.get_intermediate_layers(x, 3)).mean(1), vit=vit)
    with pytest.raises(NotApplicableError, match="bypass its blocks"):
        method(model.eval()).attribute(images(1, (32, 32)), 1)


def test_own_scores_need_two_blocks_that_are_alike() -> None:
    model: Any = trained(PostNorm())
    model.blocks[-1] = nn.TransformerEncoderLayer(16, 2, 32, norm_first=True)
    x = images(1, (32, 32))
    for blocks in (model.blocks, model.blocks[:1]):
        model.blocks = blocks
        with pytest.raises(NotApplicableError, match="two equal blocks"):
            LeGrad(model.eval()).attribute(x, 0)


class Doubled(torch.autograd.Function):
    """A function in Python, which cannot be run again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * grads[0]


def test_a_head_that_cannot_be_run_again_is_an_error() -> None:
    def write_to_part(scores: Tensor) -> Tensor:
        scores[:, :2] *= 2
        return scores

    def double_part(scores: Tensor) -> Tensor:
        scores[:, 0].mul_(2)
        return scores

    for change in (Doubled.apply, write_to_part, double_part):
        model: Any = trained(PostNorm())
        model.register_forward_hook(lambda module, args, out, change=change: change(out))
        with pytest.raises(NotApplicableError, match="of the model cannot be run again"):
            LeGrad(model).attribute(images(1, (32, 32)), 0)


def test_methods_that_share_a_softmax_of_the_model_leave_it_as_it_was() -> None:
    model = timm_model("vit_tiny_patch16_224", img_size=32)
    for block in model.blocks:
        block.attn.fused_attn = False
    methods = [method(model) for method in (GradientRollout, CheferAttention, CheferLRP, *METHODS)]
    separate = [method.attribute(images(2, (32, 32)), 1).values for method in methods]
    for found, wanted in zip(Together(*methods).attribute(images(2, (32, 32)), 1), separate, strict=True):
        close(found.values, wanted)


class ValuesFirst(nn.Module):
    """The attention of a model of timm, with the values as the first factor, as in EfficientViT and SHViT."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads, self.scale = (
            attention.qkv,
            attention.proj,
            attention.num_heads,
            attention.scale,
        )

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (q * self.scale @ k.mT).softmax(-1)
        return self.proj((v.mT @ weights.mT).permute(0, 3, 1, 2).flatten(2))  # type: ignore[no-any-return]


def test_values_may_be_the_first_factor() -> None:
    model, x = timm_model("vit_tiny_patch16_224", img_size=32), images(2, (32, 32))
    methods = [method(model) for method in (GradientRollout, CheferAttention, CheferLRP, *METHODS)]
    wanted = [method.attribute(x, 1).values for method in methods]
    for block in model.blocks:
        block.attn = ValuesFirst(block.attn)
    for method, values in zip(methods, wanted, strict=True):
        close(method.attribute(x, 1).values, values)


def test_all_share_one_forward_and_one_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = tiny_transformer(), images(2)
    methods = [method(model) for method in (CheferAttention, *METHODS)]
    separate = [method.attribute(x, 1).values for method in methods]
    calls = list[str]()
    shared: Any = vars(TargetGradients)["_shared_gradients"]
    compute = shared.func

    def counted(grads: TargetGradients) -> Any:
        calls.append("backward")
        return compute(grads)

    monkeypatch.setattr(shared, "func", counted)
    model.register_forward_hook(lambda *_: calls.append("forward"))
    together = Together(*methods).attribute(x, 1)
    assert sorted(calls) == ["backward", "forward"]
    for found, wanted in zip(together, separate, strict=True):
        close(found.values, wanted)
