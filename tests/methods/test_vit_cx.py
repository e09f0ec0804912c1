"""ViT-CX equals the formula of the paper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saliency import GradCAM, ViTCX
from saliency.errors import LayerError
from saliency.testing import images, tiny_model
from tests.models import OwnForward


def tiny_timm(name: str = "vit_tiny_patch16_224", **options: Any) -> Any:
    torch.manual_seed(0)
    return (
        pytest.importorskip("timm")
        .create_model(name, **{"depth": 2, "num_classes": 5, "img_size": 64, **options})
        .eval()
    )


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
        ViTCX(model, "encoder.layers.0").attribute(images(1, (32, 32)), 0)
    assert GradCAM(model).attribute(images(1, (32, 32)), 0).layer == "encoder"


def test_a_shortage_of_time_leaves_whole_masks() -> None:
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
    grouping = pytest.importorskip("sklearn.cluster").AgglomerativeClustering(
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
    found = ViTCX(model, noise=0.06, chunk=1).attribute(x, 1)
    masked, whole = torch.cat(seen[-found.run_stats[0].passes :]).view(-1, 2, *x.shape[1:]).unbind(1)
    masks = 1 - ((whole - masked) / x).mean(1, keepdim=True)
    torch.testing.assert_close(masks.amax((1, 2, 3)), torch.ones(len(masks)).double())
    noise = (whole - x) / (1 - masks)
    hidden = (masks < 0.9).expand_as(noise)
    assert float(noise[hidden].std() / (x.max() - x.min())) == pytest.approx(0.06, rel=0.1)
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
