"""Maps from attention equal the papers' formulas, spelled out with whole matrices."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import saliency
from saliency import AttentionRollout, CheferAttention, CheferLRP, GradECLIP, GradientRollout, Together
from saliency.errors import NotApplicableError
from saliency.testing import images, tiny_transformer


def tiny_timm(name: str = "vit_tiny_patch16_224", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = (
        pytest.importorskip("timm")
        .create_model(name, **{"depth": 3, "num_classes": 5, "img_size": 64, **options})
        .eval()
    )
    return model


X = images(2, (64, 64))


def row_normalised(fused: Tensor) -> Tensor:
    with_self = fused + torch.eye(fused.shape[-1])
    return with_self / with_self.sum(-1, keepdim=True)


def product(matrices: list[Tensor]) -> Tensor:
    whole = matrices[0]
    for matrix in matrices[1:]:
        whole = matrix @ whole
    return whole


@pytest.mark.parametrize("fusion", ["mean", "max", "min"])
def test_rollout_is_the_product_of_the_matrices(fusion: Any) -> None:
    model = tiny_timm()
    reduced = saliency.attention(model, X, reduce=f"{fusion}_heads")  # type: ignore[arg-type]
    wanted = product([row_normalised(item.probabilities) for item in reduced])
    found = AttentionRollout(model, head_fusion=fusion).attribute(X, 1)
    torch.testing.assert_close(wanted.sum(-1), torch.ones(2, 17))
    torch.testing.assert_close(found.values.flatten(1), wanted[:, 0, 1:])


def test_rollout_reads_what_the_head_reads() -> None:
    for name, options, rows in (
        ("vit_tiny_patch16_224", {"global_pool": "avg"}, slice(1, None)),
        ("deit_tiny_distilled_patch16_224", {}, slice(0, 2)),
    ):
        model = tiny_timm(name, **options)
        matrices = [row_normalised(item.probabilities) for item in saliency.attention(model, X, reduce="mean_heads")]
        wanted = product(matrices)[:, rows].mean(1)
        prefix = 2 if "distilled" in name else 1
        torch.testing.assert_close(AttentionRollout(model).attribute(X, 1).values.flatten(1), wanted[:, prefix:])


def test_a_pooling_head_is_the_last_factor_of_rollout() -> None:
    model = tiny_timm("vit_base_patch16_siglip_224")
    *blocks, pooling = saliency.attention(model, X, reduce="mean_heads")
    wanted = pooling.probabilities @ product([row_normalised(item.probabilities) for item in blocks])
    torch.testing.assert_close(AttentionRollout(model).attribute(X, 1).values.flatten(1), wanted[:, 0])


def test_the_smallest_values_of_each_image_are_discarded_but_not_the_diagonal() -> None:
    model = tiny_timm()
    matrices = []
    for item in saliency.attention(model, X, reduce="mean_heads"):
        fused = item.probabilities.clone()
        for image in fused:
            diagonal = image.diagonal().clone()
            image[image < image.flatten().sort().values[int(0.7 * 17 * 17)]] = 0
            image.diagonal().copy_(diagonal)
        matrices.append(row_normalised(fused))
    found = AttentionRollout(model, discard_ratio=0.7).attribute(X, 1)
    torch.testing.assert_close(found.values.flatten(1), product(matrices)[:, 0, 1:])


def test_gradient_rollout_is_the_product_of_attention_times_gradient() -> None:
    model = tiny_timm()
    matrices = [
        row_normalised((item.probabilities * item.gradient).mean(1).clamp(min=0))
        for item in saliency.attention(model, X, 1)
    ]
    found = GradientRollout(model).attribute(X, 1)
    torch.testing.assert_close(found.values.flatten(1), product(matrices)[:, 0, 1:])


def test_chefer_is_the_sum_over_blocks_of_attention_times_gradient() -> None:
    model = tiny_timm()
    relevance = torch.eye(17).expand(2, -1, -1)
    for item in saliency.attention(model, X, 1):
        relevance = relevance + (item.probabilities * item.gradient).clamp(min=0).mean(1) @ relevance
    found = CheferAttention(model).attribute(X, 1)
    torch.testing.assert_close(found.values.flatten(1), relevance[:, 0, 1:])


def test_relevance_far_below_the_share_of_a_patch_keeps_its_digits() -> None:
    method = CheferAttention(tiny_timm(depth=1, global_pool="avg"))
    small = method.attribute(X, lambda output: 1e-6 * output[:, 1])
    torch.testing.assert_close(small.values, 1e-6 * method.attribute(X, 1).values, rtol=1e-4, atol=0)


def last_attention(model: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Query, key, value (N, tokens, heads * d) and the result of the last attention of a timm model, and its scores."""
    kept: list[Tensor] = []
    block = model.blocks[-1].attn
    handles = [
        block.qkv.register_forward_hook(lambda module, args, out: kept.extend(out.chunk(3, -1))),
        block.proj.register_forward_pre_hook(lambda module, args: kept.append(args[0])),
    ]
    kept.append(model(x.clone().requires_grad_()))
    for handle in handles:
        handle.remove()
    return tuple(kept)


def test_grad_eclip_weighs_values_by_gradient_and_cosine() -> None:
    model = tiny_timm()
    query, key, value, result, scores = last_attention(model, X)
    (grad,) = torch.autograd.grad(scores[:, 1].sum(), result)
    cosine = torch.cosine_similarity(query[:, :1], key[:, 1:], dim=-1)
    low, high = cosine.amin(1, keepdim=True), cosine.amax(1, keepdim=True)
    wanted = ((grad[:, :1] * value[:, 1:]).sum(-1) * (cosine - low) / (high - low)).clamp(min=0)
    torch.testing.assert_close(GradECLIP(model).attribute(X, 1).values.flatten(1), wanted.detach())


class Grouped(nn.Module):
    """Two heads of queries for one of keys and values, by a fused kernel that repeats them or by `expand`."""

    def __init__(self, *, expands: bool) -> None:
        super().__init__()
        self.expands = expands
        self.patches, self.qkv, self.head = nn.Conv2d(3, 8, 8, 8), nn.Linear(8, 16), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).mT
        q, k, v = (part.unflatten(2, (-1, 4)).transpose(1, 2) for part in self.qkv(tokens).split([8, 4, 4], 2))
        if self.expands:
            k, v = k.expand_as(q), v.expand_as(q)
        out = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=not self.expands)
        return self.head((tokens + out.transpose(1, 2).flatten(2)).mean(1))  # type: ignore[no-any-return]


@pytest.mark.skipif(torch.__version__ < "2.7", reason="PyTorch 2.6 has no fused kernel for grouped keys on a CPU")
def test_grad_eclip_reads_grouped_keys_and_equal_patches() -> None:
    one, other = (Grouped(expands=expands).eval() for expands in (False, True))
    other.load_state_dict(one.state_dict())
    torch.testing.assert_close(GradECLIP(one).attribute(X, 1).values, GradECLIP(other).attribute(X, 1).values)
    assert not GradECLIP(one).attribute(torch.zeros_like(X), 1).values.any()


def test_grad_eclip_names_the_context_that_turns_off_the_fused_kernel() -> None:
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(NotApplicableError, match=r"sdpa_kernel\(SDPBackend.MATH\)"):
        GradECLIP(tiny_timm()).attribute(X, 1)


def test_grad_eclip_reads_a_text_by_the_image_tower() -> None:
    open_clip = pytest.importorskip("open_clip")
    torch.manual_seed(0)
    tower = {"image_size": 64, "layers": 2, "width": 64, "patch_size": 16}
    text = {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
    network = open_clip.CLIP(embed_dim=32, vision_cfg=tower, text_cfg=text).eval()
    model = saliency.DualEncoder(network, open_clip.SimpleTokenizer(context_length=16))
    found = GradECLIP(model).attribute(X, saliency.text("a cat"))
    assert found.values.shape == (2, 1, 4, 4)
    assert bool((found.values.flatten(1).amax(1) > 0).all())


def test_registers_are_not_patches() -> None:
    model = tiny_timm("vit_small_patch14_reg4_dinov2", img_size=56)
    assert AttentionRollout(model).attribute(images(1, (56, 56)), 0).values.shape == (1, 1, 4, 4)


SWIN = {"img_size": 56, "depths": (1, 1), "embed_dim": 24, "num_heads": (1, 2)}


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("swin_tiny_patch4_window7_224", SWIN, "not among all tokens in each block.*attn_lrp"),
        ("vit_small_patch16_18x2_224", {"depth": 2, "img_size": 64}, "parallel branches.*attn_lrp"),
        (
            "vit_dpwee_patch16_reg1_gap_256",
            {"depth": 2, "img_size": 64},
            "parallel branches.*attn_lrp",
        ),  # a difference of two
        ("cait_xxs24_224", {"img_size": 64}, "cannot be read, because they mix heads.*attn_lrp"),
        ("resnet18", {}, "has no attention that can be read; use grad_cam or lrp"),
    ],
)
@pytest.mark.parametrize("method", [AttentionRollout, GradientRollout, CheferLRP, CheferAttention, GradECLIP])
def test_a_network_for_which_it_is_not_defined_is_refused(
    method: Any, name: str, options: dict[str, Any], problem: str
) -> None:
    model = pytest.importorskip("timm").create_model(name, num_classes=3, **options).eval()
    size = options.get("img_size", 64)
    with pytest.raises(NotApplicableError, match=problem):
        method(model).attribute(images(1, (size, size)), 0)


@pytest.mark.parametrize("name", [name for name, cls in saliency.METHODS.items() if cls.needs.attention])
def test_the_graph_is_freed_with_the_call(name: str) -> None:
    model, outputs = tiny_transformer(), list[weakref.ref[Tensor]]()
    model.get_submodule("blocks.0").register_forward_hook(lambda module, args, out: outputs.append(weakref.ref(out)))
    method = saliency.METHODS[name](model, **saliency.METHODS[name].preview_options)
    gc.collect()
    gc.disable()
    try:
        method.attribute(images(1), 1)
        assert not any(output() is not None for output in outputs)
    finally:
        gc.enable()


def test_all_share_one_forward_and_one_backward() -> None:
    model, x = tiny_transformer(), images(2)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    methods = [CheferAttention(model), AttentionRollout(model), GradientRollout(model)]
    methods[0].attribute(x, 1)  # finds the layout
    calls.clear()
    together = Together(*methods).attribute(x, 1)
    assert len(calls) == 1
    for method, found in zip(methods, together, strict=True):
        torch.testing.assert_close(found.values, method.attribute(x, 1).values)
