"""TIS and ViT-CX equal the papers' formulas, and tokens are removed only where a network allows it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saliency import TIS, GradCAM, LayerError, NotApplicableError, ViTCX, generator
from saliency.testing import images, tiny_model, tiny_transformer
from tests.models import OwnForward

timm: Any = pytest.importorskip("timm")
cluster: Any = pytest.importorskip("sklearn.cluster")


def tiny_timm(name: str = "vit_tiny_patch16_224", **options: Any) -> Any:
    torch.manual_seed(0)
    return timm.create_model(name, **{"depth": 2, "num_classes": 5, "img_size": 64, **options}).eval()


X = images(2, (64, 64))


def outputs_of(model: nn.Module, layers: list[nn.Module], x: Tensor) -> list[Tensor]:
    seen: list[Tensor] = []
    handles = [layer.register_forward_hook(lambda module, inputs, output: seen.append(output)) for layer in layers]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return seen


def inputs_of(layer: nn.Module) -> list[Tensor]:
    seen: list[Tensor] = []
    layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach().clone()))
    return seen


def kept_by_k_means(model: Any, x: Tensor, masks: int, kept: int, prefix: int) -> Tensor:
    """The patches (masks, kept) with the largest values of each centre."""
    maps = torch.cat([output[0, prefix:].T for output in outputs_of(model, list(model.blocks), x)]).numpy()
    first = maps[torch.randperm(len(maps), generator=generator(0))[:masks].numpy()]
    centres = cluster.KMeans(masks, init=first, n_init=1, tol=0).fit(maps).cluster_centers_
    return torch.from_numpy(np.argsort(-centres, 1)[:, :kept].copy())


@pytest.mark.parametrize(("visible", "kept"), [(0.5, 8), (0.2, 3)])
def test_tis_is_the_mean_score_of_the_masks_that_keep_a_patch(visible: float, kept: int) -> None:
    model, x = tiny_timm(), X[:1]
    patches = kept_by_k_means(model, x, 12, kept, 1)
    with torch.no_grad():
        tokens = model.norm_pre(model._pos_embed(model.patch_embed(x)))
        scores = torch.cat(
            [
                model.forward_head(model.norm(model.blocks(tokens[:, [0, *(rows + 1).tolist()]])))[:, 2]
                for rows in patches
            ]
        )
    masks = torch.zeros(12, 16).scatter_(1, patches, 1)
    papers = (scores[:, None] * masks).sum(0) / masks.sum(0)
    found = TIS(model, masks=12, visible=visible).attribute(x, 2)
    torch.testing.assert_close(found.values.flatten(), (papers - scores.mean()).nan_to_num(0), rtol=1e-4, atol=1e-6)
    assert f"12 masks, each of {kept} of 16 patches" in found.run_stats[0].note


@pytest.mark.parametrize(
    ("name", "options", "prefix"),
    [
        ("vit_small_patch14_reg4_dinov2", {"img_size": 56}, 5),
        ("deit_tiny_distilled_patch16_224", {}, 2),
        ("vit_tiny_patch16_224", {"global_pool": "avg"}, 1),
        ("vit_base_patch16_siglip_224", {"embed_dim": 48, "num_heads": 4}, 0),
    ],
)
def test_the_tokens_before_the_patches_stay_and_a_batch_is_its_images(
    name: str, options: dict[str, Any], prefix: int
) -> None:
    model = tiny_timm(name, **options).double()
    x = images(2, (options.get("img_size", 64),) * 2, dtype=torch.float64)
    together = TIS(model, masks=6).attribute(x, [1, 3]).values
    assert together.shape == (2, 1, 4, 4)
    seen = inputs_of(model.blocks[0].norm1)
    alone = TIS(model, masks=6).attribute(x[1], 3).values
    torch.testing.assert_close(alone[0], together[1])
    whole = seen[0][0]
    sampled = [tokens for batch in seen for tokens in batch if len(tokens) == prefix + 8]
    assert len(sampled) == 6
    for tokens in sampled:
        torch.testing.assert_close(tokens[:prefix], whole[:prefix])
        assert all(bool((token - whole[prefix:]).abs().amax(1).min() < 1e-9) for token in tokens[prefix:])


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        (
            "swin_tiny_patch4_window7_224",
            {"img_size": 112, "depth": None, "depths": (1, 1), "num_heads": (2, 2), "embed_dim": 24},
            "windows, stages, channels",
        ),
        ("beit_base_patch16_224", {"embed_dim": 48, "num_heads": 4}, "cannot run on a part of its tokens"),
        ("eva02_tiny_patch14_224", {"img_size": 56}, "cannot run on a part of its tokens"),
        ("samvit_base_patch16_224", {"embed_dim": 48, "num_heads": 4}, r"returns tokens \(N, tokens, C\)"),
        ("resnet18", {"img_size": None, "depth": None}, "has no attention that can be read"),
    ],
)
def test_a_network_that_needs_all_its_tokens_is_refused(name: str, options: dict[str, Any], problem: str) -> None:
    options = {"depth": 2, "img_size": 64, **options}
    model = timm.create_model(name, num_classes=3, **{key: value for key, value in options.items() if value}).eval()
    size = options["img_size"] or 64
    with pytest.raises(NotApplicableError, match=f"tis: .*{problem}"):
        TIS(model, masks=2).attribute(images(1, (size, size)), 0)


def test_blocks_without_a_module_of_their_own_are_refused() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        tokens = model.patches(x).flatten(2).transpose(1, 2)
        for _ in range(2):
            tokens = F.scaled_dot_product_attention(tokens[:, None], tokens[:, None], tokens[:, None])[:, 0]
        scores: Tensor = tokens.mean(1)
        return scores

    with pytest.raises(NotApplicableError, match="has no module for each block"):
        TIS(OwnForward(forward, patches=nn.Conv2d(3, 8, 4, stride=4))).attribute(images(1), 0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_an_encoder_with_padding_are_refused_where_they_are_read() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        tokens = model.patches(x).flatten(2).mT
        padding = torch.zeros(tokens.shape[:2], dtype=torch.bool)
        scores: Tensor = model.encoder(tokens, src_key_padding_mask=padding).mean(1)
        return scores

    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    model = OwnForward(forward, patches=nn.Conv2d(3, 8, 8, 8), encoder=encoder).eval()
    with pytest.raises(LayerError, match=r'"encoder.layers.0" returns nested tensors.*enable_nested_tensor=False'):
        TIS(model, masks=2).attribute(images(1, (32, 32)), 0)
    assert GradCAM(model).attribute(images(1, (32, 32)), 0).layer == "encoder"


def test_a_shortage_of_time_leaves_whole_masks() -> None:
    found = TIS(tiny_transformer(), masks=8, seconds=1e-9, chunk=1).attribute(images(1), 0)
    assert (found.run_stats[0].stopped, found.run_stats[0].passes) == ("seconds", 1)
    found = ViTCX(tiny_model(), seconds=1e-9, chunk=1).attribute(images(1), 0)
    assert (found.run_stats[0].stopped, found.run_stats[0].passes) == ("seconds", 2)


def stretched(maps: Tensor) -> Tensor:
    low, high = maps.amin(1, keepdim=True), maps.amax(1, keepdim=True)
    return (maps - low) / (high - low)


def clusters(model: Any, x: Tensor, distance: float, prefix: int) -> Tensor:
    """The masks (clusters, H, W) of the maps before the last block's attention, in any order."""
    (tokens,) = outputs_of(model, [model.blocks[-1].norm1], x)
    maps = tokens[:, prefix:].transpose(1, 2).reshape(1, -1, 4, 4)
    maps = stretched(F.interpolate(maps, x.shape[-2:], mode="bilinear")[0].flatten(1))
    unlike = 1 - F.cosine_similarity(maps[:, None], maps[None], dim=2)
    grouping = cluster.AgglomerativeClustering(
        None, metric="precomputed", linkage="complete", distance_threshold=distance
    )
    labels = torch.from_numpy(grouping.fit(unlike.numpy()).labels_)
    sums = torch.stack([maps[labels == label].sum(0) for label in range(int(labels.max()) + 1)])
    return stretched(sums).view(-1, *x.shape[-2:])


@pytest.mark.parametrize(
    ("name", "size", "prefix"), [("vit_tiny_patch16_224", 64, 1), ("vit_small_patch14_reg4_dinov2", 56, 5)]
)
@pytest.mark.parametrize("distance", [0.1, 0.2])
def test_vit_cx_is_the_effect_of_each_cluster_corrected_for_coverage(
    name: str, size: int, prefix: int, distance: float
) -> None:
    model = tiny_timm(name, img_size=size, embed_dim=36, num_heads=3).double()
    x = images(1, (size, size), dtype=torch.float64)
    masks = clusters(model, x, distance, prefix)
    with torch.no_grad():
        effects = model(x * masks[:, None])[:, 2] - model(x)[:, 2]
    papers = torch.einsum("k,khw->hw", effects, masks / masks.sum(0))
    found = ViTCX(model, distance=distance, noise=0).attribute(x, 2)
    torch.testing.assert_close(found.values[0, 0], papers - effects.mean())
    assert 2 < len(masks) < 36
    assert found.layer == "blocks.1.norm1"
    assert f"{len(masks)} clusters of 36 feature maps" in found.run_stats[0].note


def test_the_same_noise_is_where_a_mask_hides_and_is_taken_off_again() -> None:
    model, x = tiny_model().double(), images(1, dtype=torch.float64)
    seen = inputs_of(model)
    found = ViTCX(model, noise=0.3, chunk=1).attribute(x, 1)
    masked, whole = torch.cat(seen[-found.run_stats[0].passes :]).view(-1, 2, *x.shape[1:]).unbind(1)
    masks = 1 - ((whole - masked) / x).mean(1, keepdim=True)
    torch.testing.assert_close(masks.amax((1, 2, 3)), torch.ones(len(masks)).double())
    noise = (whole - x) / (1 - masks)
    hidden = (masks < 0.9).expand_as(noise)
    assert float(noise[hidden].std()) == pytest.approx(0.3, rel=0.1)
    with torch.no_grad():
        effects = (model(masked) - model(whole))[:, 1]
    effects = effects - effects.mean()
    torch.testing.assert_close(found.values[0], (effects[:, None, None, None] * masks).sum(0) / masks.sum(0))


def test_equal_feature_maps_are_one_cluster_whatever_the_rounding() -> None:
    model = tiny_model()
    with torch.no_grad():
        for parameter in (model.get_parameter("last.weight"), model.get_parameter("last.bias")):
            parameter.copy_(parameter[:2].repeat_interleave(4, 0))
    found = ViTCX(model, layer="last", distance=1e-5).attribute(images(3, (32, 32)), 0)
    assert ["2 clusters of 8 feature maps" in each.note for each in found.run_stats] == [True] * 3


def test_feature_maps_that_are_constant_highlight_nothing() -> None:
    model, x = tiny_model(), images(2)
    with torch.no_grad():
        model.get_parameter("last.weight").zero_()
    found = ViTCX(model, layer="last").attribute(x, 0)
    assert not found.values.any()
    assert found.values.shape == (2, 1, 16, 16)
    assert found.run_stats[0].passes == 0
