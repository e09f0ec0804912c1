"""The attention that is read equals that of the same model with unfused attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saliency
from saliency.errors import LayerError, NotApplicableError, TargetError
from saliency.testing import Snapshot, images, tiny_model, tiny_transformer
from tests.models import Checkpointed


def unfused(model: nn.Module, x: Tensor, target: int) -> list[tuple[Tensor, Tensor]]:
    """The probabilities and gradients of a timm model without fused attention."""
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Tensor]) -> None:
        args[0].retain_grad()
        kept.append(args[0])

    handles = []
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False  # type: ignore[assignment]
        if hasattr(module, "fused_attn") and hasattr(module, "attn_drop"):  # a pooling head has no dropout
            handles.append(module.attn_drop.register_forward_pre_hook(keep))  # type: ignore[union-attr]
    model(x.clone().requires_grad_())[:, target].sum().backward()
    for handle in handles:
        handle.remove()
    return [(probabilities.detach(), probabilities.grad) for probabilities in kept]  # type: ignore[misc]


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


TIMM = {
    "vit_tiny_patch16_224": {"img_size": 64},
    "deit_tiny_distilled_patch16_224": {"img_size": 64},
    "vit_small_patch14_reg4_dinov2": {"img_size": 56},
    "eva02_tiny_patch14_224": {"img_size": 56},
    "beit_base_patch16_224": {"depth": 2, "img_size": 64},
    "vit_base_patch16_siglip_224": {"depth": 2, "img_size": 64},
    "vit_small_patch16_18x2_224": {"depth": 2, "img_size": 32},  # two attentions side by side in each block
}


@pytest.mark.parametrize("name", TIMM)
@pytest.mark.parametrize("fused", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["fused", "unfused"])
def test_attention_of_timm_equals_that_of_its_unfused_form(name: str, fused: bool) -> None:
    torch.manual_seed(0)
    model = pytest.importorskip("timm").create_model(name, **{"depth": 3, "num_classes": 7, **TIMM[name]}).eval()
    size = TIMM[name]["img_size"]
    x = torch.randn(2, 3, size, size)
    wanted = unfused(model, x, 3)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
    found = saliency.attention(model, x, 3)
    if "siglip" in name:
        assert found.pop().shape == (2, 12, 1, 16)
    assert [item.shape for item in found] == [tuple(probabilities.shape) for probabilities, _ in wanted]
    for item, (probabilities, gradient) in zip(found, wanted, strict=True):
        close(item.probabilities, probabilities)
        close(item.gradient, gradient)


def test_windows_of_swin_are_read() -> None:
    torch.manual_seed(0)
    model = (
        pytest.importorskip("timm")
        .create_model("swin_tiny_patch4_window7_224", depths=(2, 1, 1, 1), num_classes=4)
        .eval()
    )
    x = torch.randn(1, 3, 224, 224)
    found = saliency.attention(model, x, 1)
    wanted = unfused(model, x, 1)
    assert [item.layer for item in found[:2]] == ["layers.0.blocks.0.attn", "layers.0.blocks.1.attn"]
    for item, (probabilities, gradient) in zip(found, wanted, strict=True):
        close(item.probabilities, probabilities)
        close(item.gradient, gradient)


def test_attention_of_hugging_face_equals_its_own_output() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        image_size=32, patch_size=8, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64
    )
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(config).eval()
    x = torch.randn(2, 3, 32, 32)
    found = saliency.attention(model, x)
    model.set_attn_implementation("eager")
    wanted = model(x, output_attentions=True).attentions
    assert len(found) == len(wanted) == 3
    for item, probabilities in zip(found, wanted, strict=True):
        close(item.probabilities, probabilities.detach())
        with pytest.raises(TargetError, match="needs a target"):
            item.gradient  # noqa: B018
    for item, fused in zip(saliency.attention(model, x, 0), found, strict=True):
        close(item.probabilities, fused.probabilities)


class Block(nn.Module):
    """Attention written by hand, with whatever a test adds to it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.patches = nn.Conv2d(3, 16, 4, stride=4)
        self.qkv = nn.Linear(16, 48)
        self.bias = nn.Parameter(torch.randn(1, 4, 16, 16))
        self.head = nn.Linear(16, 3)
        self.kept = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).mT
        q, k, v = self.qkv(tokens).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)  # (N, heads, tokens, d)
        if self.kind == "grouped":
            k, v = k[:, ::2], v[:, ::2]
        if self.kind.startswith("by hand"):
            logits = q @ k.mT / 2 + self.bias
            dtype = torch.float32 if "float32" in self.kind else None
            weights = logits.masked_fill(self.mask(), -torch.inf).softmax(-1, dtype=dtype).to(v.dtype)
            out = weights @ v if "einsum" not in self.kind else torch.einsum("nhqk,nhkd->nhqd", weights, v)
            out = (v.mT @ weights.mT).mT if "transposed" in self.kind else out
        else:
            out = self.fused(q, k, v)
        return self.head(out.transpose(1, 2).flatten(2).mean(1))  # type: ignore[no-any-return]

    def mask(self) -> Tensor:
        return torch.eye(16, dtype=torch.bool)

    def fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kinds: dict[str, dict[str, Any]] = {
            "plain": {},
            "bias": {"attn_mask": self.bias},
            "mask": {"attn_mask": ~self.mask()},
            "causal": {"is_causal": True},
            "scale": {"scale": 0.3},
            "grouped": {"enable_gqa": True},
        }
        return F.scaled_dot_product_attention(q, k, v, **kinds[self.kind])


def explicit(model: Block, x: Tensor, target: int) -> tuple[Tensor, Tensor]:
    """The probabilities and their gradient, spelled out."""
    tokens = model.patches(x).flatten(2).mT
    q, k, v = model.qkv(tokens).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
    if model.kind == "grouped":
        k, v = (part[:, ::2].repeat_interleave(2, 1) for part in (k, v))
    logits = q @ k.mT * (0.3 if model.kind == "scale" else 0.5)
    if model.kind == "bias" or model.kind.startswith("by hand"):
        logits = logits + model.bias
    if model.kind == "mask" or model.kind.startswith("by hand"):
        logits = logits.masked_fill(model.mask(), -torch.inf)
    if model.kind == "causal":
        logits = logits.masked_fill(torch.ones(16, 16, dtype=torch.bool).triu(1), -torch.inf)
    weights = logits.softmax(-1)
    score = model.head((weights @ v).transpose(1, 2).flatten(2).mean(1))[:, target].sum()
    return weights.detach(), torch.autograd.grad(score, weights)[0]


KINDS = [
    "plain",
    "bias",
    "mask",
    "causal",
    "scale",
    "grouped",
    "by hand",
    "by hand, einsum",
    "by hand, in float32",
    "by hand, transposed",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masks_biases_and_scales_are_part_of_what_is_read(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Block(kind).eval().to(dtype), torch.randn(2, 3, 16, 16, dtype=dtype)
    (found,) = saliency.attention(model, x, 1)
    probabilities, gradient = explicit(model, x, 1)
    close(found.probabilities.to(dtype), probabilities)
    close(found.gradient, gradient)


@pytest.mark.parametrize("need_weights", [True, False])
def test_multi_head_attention_is_read(need_weights: bool) -> None:
    model, x = tiny_transformer(), images(2)
    found = saliency.attention(model, x, 1)
    for block in model.blocks:  # type: ignore[union-attr]
        block.self_attn.forward = partial_forward(block.self_attn, need_weights)
    again = saliency.attention(model, x, 1)
    assert [item.layer for item in again] == [f"blocks.{i}.self_attn" for i in range(2)]
    for item, other in zip(found, again, strict=True):
        assert item.shape == other.shape == (2, 2, 17, 17)
        close(other.probabilities, item.probabilities)
        close(other.gradient, item.gradient)


def partial_forward(module: nn.MultiheadAttention, need_weights: bool) -> Any:
    own = module.forward
    return lambda q, k, v, **_: own(q, k, v, need_weights=need_weights)


def test_heads_are_reduced_on_request() -> None:
    model, x = tiny_transformer(), images(2)
    reductions: dict[Any, Any] = {"mean_heads": torch.mean, "max_heads": torch.amax, "min_heads": torch.amin}
    for reduce, function in reductions.items():
        for whole, reduced in zip(
            saliency.attention(model, x, 0), saliency.attention(model, x, 0, reduce=reduce), strict=True
        ):
            assert reduced.shape == (2, 17, 17)
            close(reduced.probabilities, function(whole.probabilities, 1))
            close(reduced.gradient, function(whole.gradient, 1))


def test_what_is_not_attention_is_not_taken_for_it() -> None:
    def gate(x: Tensor) -> Tensor:
        return x * x.softmax(-1)

    def linear_attention(x: Tensor) -> Tensor:
        tokens = x.flatten(2)
        return tokens.softmax(-1) @ (tokens.mT @ tokens)

    class Net(nn.Module):
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.stem, self.function, self.head = nn.Conv2d(3, 4, 3), function, nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.function(self.stem(x)).flatten(2).mean(2))  # type: ignore[no-any-return]

    for model in (Net(gate), Net(linear_attention), tiny_model()):
        with pytest.raises(NotApplicableError, match="has no attention that can be read"):
            saliency.attention(model.eval(), images(1))


def test_layers_whose_attention_is_not_read_are_counted() -> None:
    model = (
        pytest.importorskip("timm").create_model("cait_xxs24_224", img_size=32, embed_dim=48, depth=3).eval()
    )  # talking heads
    with pytest.warns(saliency.errors.SaliencyWarning, match=r'2 of 5 layers; .* "blocks.0.attn" \(TalkingHeadAttn\)'):
        assert len(saliency.attention(model, torch.randn(1, 3, 32, 32))) == 2


def test_attention_of_transformers_is_read_in_half_precision() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, attn_implementation="eager")
    model, x = transformers.ViTForImageClassification(config).eval(), torch.randn(2, 3, 32, 32)
    wanted = saliency.attention(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = saliency.attention(model, x)
    half = saliency.attention(model.bfloat16(), x.bfloat16())
    for one, other, item in zip(mixed, half, wanted, strict=True):
        torch.testing.assert_close(one.probabilities, item.probabilities, rtol=0.05, atol=1e-3)
        torch.testing.assert_close(other.probabilities, item.probabilities, rtol=0.05, atol=1e-3)


@pytest.mark.parametrize("place", [0, 1])
def test_a_block_that_hides_its_attention_is_refused(place: int) -> None:
    model, x = tiny_transformer(), images(1)
    blocks: Any = model.blocks
    blocks[place] = Checkpointed(blocks[place], reentrant=True)
    with pytest.raises(NotApplicableError, match="use_reentrant"):
        saliency.attention(model, x)
    with pytest.raises(NotApplicableError, match="use_reentrant"):
        saliency.AttentionRollout(model).attribute(x)


def test_nothing_is_left_on_the_model() -> None:
    model, x = tiny_transformer(), images(2)
    before = Snapshot(model=model, x=x)
    items = saliency.attention(model, x, 1)
    assert all(item.gradient.isfinite().all() for item in items)
    assert not before.changes()


def similarity_to(embedding: Tensor, output: dict[str, Tensor]) -> Tensor:
    return F.cosine_similarity(output["image_embeds"], embedding)


def test_the_gradient_of_a_text_and_of_a_reference_is_that_of_its_score() -> None:
    model: Any = saliency.load("shapes_two_tower")
    x = images(2, (64, 64))
    for target, embedding in (
        (saliency.text("a red circle"), model.encode_text(["a red circle"])),
        (saliency.similarity(x[0]), model(x[:1])["image_embeds"].detach()),
    ):
        wanted = saliency.attention(model, x, partial(similarity_to, embedding))
        for found, item in zip(saliency.attention(model, x, target), wanted, strict=True):
            close(found.gradient, item.gradient)


class Plain(nn.Module):
    """A block of attention without heads: fused, or with a softmax over the last dimension but one."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.patches, self.qkv, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 24), nn.Linear(8, 5)
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.patches(x).flatten(2).mT).chunk(3, -1)
        columns = (key @ query.mT / 8**0.5).softmax(-2)
        mixed = F.scaled_dot_product_attention(query, key, value) if self.fused else columns.mT @ value
        scores: Tensor = self.head(mixed.mean(1))
        return scores


@pytest.mark.skipif(torch.__version__ < "2.7", reason="PyTorch 2.6 does not fuse attention without heads on a CPU")
def test_fused_attention_without_heads_is_read_of_one_image_and_refused_of_several() -> None:
    model, x = Plain(fused=True).eval(), images(2)
    (found,) = saliency.attention(model, x[:1], 1)
    query, key, _ = model.qkv(model.patches(x[:1]).flatten(2).mT).chunk(3, -1)
    close(found.probabilities[:, 0], (query @ key.mT / 8**0.5).softmax(-1).detach())
    for call in (saliency.attention, lambda *words: saliency.AttentionRollout(model).attribute(*words[1:])):
        with pytest.raises(
            NotApplicableError, match=r"2 images apart; pass one image at a time, or .* query\[:, None\]"
        ):
            call(model, x, 1)


def test_a_softmax_over_another_dimension_is_refused() -> None:
    with pytest.raises(NotApplicableError, match="over the last dimension"):
        saliency.attention(Plain(fused=False), images(2), 1)


def test_the_maps_of_a_vit_are_the_rows_of_its_attention() -> None:
    model, x = tiny_transformer(), images(2)
    layer = saliency.attention(model, x)[-1]
    patches = layer.probabilities[..., 1:]  # without the class token
    close(layer.maps(0), patches[:, :, 0].reshape(2, -1, 4, 4))
    number: Any = np.int64(0)
    close(layer.maps(number), layer.maps(0))
    close(layer.maps(), patches.mean(2).reshape(2, -1, 4, 4))
    point = x.shape[3] - 1, 0  # the last patch of the first row
    close(layer.maps(point), patches[:, :, 4].reshape(2, -1, 4, 4))
    reduced = saliency.attention(model, x, reduce="max_heads")[-1]
    close(reduced.maps(0), layer.maps(0).amax(1))
    with pytest.raises(TargetError, match=r"query 17 .*outside 0..16"):
        layer.maps(17)


def test_windows_are_put_back_into_the_image() -> None:
    torch.manual_seed(0)
    swin: Any = pytest.importorskip("timm.models.swin_transformer")
    kind = {"embed_dim": 8, "depths": (2, 2), "num_heads": (1, 2), "window_size": 4, "num_classes": 3}
    model, x = swin.SwinTransformer(img_size=32, patch_size=2, **kind).eval(), torch.randn(2, 3, 32, 32)
    shifted = saliency.attention(model, x, 0)[1]
    assert shifted.shape == (32, 1, 16, 16)  # 16 windows of each image
    received = shifted.probabilities.mean(2).mT.reshape(32, 4, 4, 1) / 16
    wanted = swin.window_reverse(received, (4, 4), 16, 16).roll((2, 2), (1, 2)).movedim(-1, 1)
    close(shifted.maps(), wanted)
    numbers = torch.arange(256.0).view(1, 16, 16, 1).roll((-2, -2), (1, 2))
    cells = swin.window_partition(numbers, (4, 4)).flatten(1).long()  # (windows, 16)
    window, query = (cells == 5 * 16 + 9).nonzero()[0].tolist()
    wanted = torch.zeros(2, 1, 256)
    wanted[:, :, cells[window]] = shifted.probabilities.reshape(2, 16, 1, 16, 16)[:, window, :, query]
    close(shifted.maps((9 * 2 + 1, 5 * 2)), wanted.reshape(2, 1, 16, 16))
    with pytest.raises(TargetError, match="several windows; pass a point"):
        shifted.maps(0)


class Decoder(nn.Module):
    """Causal decoder of a begin token, 4 x 4 patches and two words, with grouped keys."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.words = nn.Conv2d(3, 16, 4, 4), nn.Parameter(torch.randn(3, 16))
        self.query, self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.head = nn.Linear(16, 5)

    def operands(self, x: Tensor) -> list[Tensor]:
        words = self.words.expand(len(x), -1, -1)
        tokens = torch.cat([words[:, :1], self.patches(x).flatten(2).mT, words[:, 1:]], 1)
        return [part(tokens).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.query, self.key, self.value)]

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.operands(x)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        scores: Tensor = self.head(mixed.transpose(1, 2).flatten(2))[:, -1]
        return scores


def test_the_patches_of_a_decoder_with_grouped_keys_are_a_grid() -> None:
    torch.manual_seed(0)
    model, x = Decoder().eval(), torch.randn(2, 3, 16, 16)
    (layer,) = saliency.attention(model, x, 1)
    query, key, _ = model.operands(x)
    logits = query @ key.repeat_interleave(2, 1).mT / 2
    seen = torch.ones(19, 19, dtype=torch.bool).tril()
    wanted = logits.masked_fill(~seen, -torch.inf).softmax(-1)[..., 1:17].reshape(2, 4, 19, 4, 4).detach()
    close(layer.maps(-1), wanted[:, :, -1])
    close(layer.maps((6, 2)), wanted[:, :, 2])
    assert not layer.maps((6, 2))[:, :, 0, 2:].any()  # later patches


class Pooling(nn.Module):
    """A learned query that attends to patches, in the order of the image or of their brightness."""

    def __init__(self, *, sorts: bool) -> None:
        super().__init__()
        self.patches, self.query, self.sorts = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.randn(1, 2, 1, 4)), sorts

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2)  # (N, 8, 16)
        tokens = patches[:, :, patches[0, 0].argsort()] if self.sorts else patches
        keys = tokens.unflatten(1, (2, 4)).mT
        return F.scaled_dot_product_attention(self.query.expand(len(x), -1, -1, -1), keys, keys).flatten(1)


def test_maps_without_a_grid_or_a_query_at_a_point_are_refused() -> None:
    x = images(2, (16, 16))
    (layer,) = saliency.attention(Pooling(sorts=False).eval(), x, 1)
    close(layer.maps(0), layer.probabilities[:, :, 0].reshape(2, 2, 4, 4))
    with pytest.raises(LayerError, match="no position; pass the number"):
        layer.maps((3, 3))
    (layer,) = saliency.attention(Pooling(sorts=True).eval(), x, 1)
    with pytest.raises(LayerError, match="not one for each patch"):
        layer.maps()


def test_the_figure_has_a_row_per_layer_and_a_column_per_head() -> None:
    model, image = saliency.load("shapes_vit"), saliency.testbed.draw_scenes(1, seed=1_000_000).images[0]
    layers = saliency.attention(model, image)
    drawing = saliency.figure(layers[2:], query=(20, 30))
    titles = [axes.get_title() for axes in drawing.axes]
    maps = [(head, values) for layer in layers[2:] for head, values in enumerate(layer.maps((20, 30))[0])]
    assert titles == [f"head {head}\nmax {float(values.max()):.2g}" for head, values in maps]
    assert drawing.axes[0].texts[0].get_text() == "blocks.2.attn"
    with pytest.raises(saliency.errors.RenderError, match="got no explanation"):
        saliency.figure([])
