"""Small vision transformers and their kin of torchvision, timm, transformers and open_clip, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

CLASSES = 5
Build = Callable[[], tuple[nn.Module, Tensor]]


def drawn(build: Callable[[], Any], size: int) -> tuple[nn.Module, Tensor]:
    """Build a model, and draw two images for it, (2, 3, size, size).

    Noise is added to all weights and statistics. Heads that are zero would have no gradient, layer scales of 1e-5 no
    blocks, and biases and tokens that are zero no share of the score.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model: nn.Module = build().eval()
        for name, value in model.state_dict().items():
            if name.endswith("running_var"):
                value.add_(torch.rand_like(value))
            elif value.is_floating_point():
                value.add_(torch.randn_like(value) * (0.3 if value.dim() < 2 else value[0].numel() ** -0.5))
        return model, torch.randn(2, 3, size, size)


def _timm(name: str, **options: Any) -> tuple[nn.Module, Tensor]:
    timm = pytest.importorskip("timm")
    size = options.get("img_size", 64)
    return drawn(lambda: timm.create_model(name, num_classes=CLASSES, **options), size)


def _open_clip(*, quick_gelu: bool = False, **options: Any) -> tuple[nn.Module, Tensor]:
    """The image tower, whose output is an embedding."""
    transformer = pytest.importorskip("open_clip.transformer")
    options["act_layer"] = transformer.QuickGELU if quick_gelu else nn.GELU
    return drawn(lambda: transformer.VisionTransformer(32, 8, 16, 2, 2, 2.0, output_dim=8, **options), 32)


def _torchvision_vit() -> tuple[nn.Module, Tensor]:
    models = pytest.importorskip("torchvision.models")
    return drawn(lambda: models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=CLASSES), 32)


def _torchvision_swin() -> tuple[nn.Module, Tensor]:
    models = pytest.importorskip("torchvision.models")
    return drawn(lambda: models.SwinTransformer([2, 2], 8, [2, 2], [2, 4], [4, 4], num_classes=CLASSES), 32)


def _transformers_vit() -> tuple[nn.Module, Tensor]:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=32,
        patch_size=8,
        num_labels=CLASSES,
    )
    return drawn(lambda: transformers.ViTForImageClassification(config), 32)


_PLAIN = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
_SWIN = {"img_size": 32, "window_size": 4, "embed_dim": 8, "depths": (2, 2), "num_heads": (2, 4)}
_STAGES = {"depths": (1, 1, 1, 1)}
_MAXVIT = {"img_size": 64, "embed_dim": (8, 8, 16, 16), "stem_width": 8, "transformer_dim_head": 4, **_STAGES}

_BUILDERS: dict[str, Build] = {
    "torchvision ViT": _torchvision_vit,
    "torchvision Swin": _torchvision_swin,
    "timm ViT": partial(_timm, "vit_tiny_patch16_224", **_PLAIN),
    "timm DeiT distilled": partial(_timm, "deit_tiny_distilled_patch16_224", **_PLAIN),
    "timm DINOv2 with registers": partial(_timm, "vit_small_patch14_reg4_dinov2", **_PLAIN),
    "timm EVA-02": partial(_timm, "eva02_tiny_patch14_224", **_PLAIN),
    "timm Swin v2": partial(_timm, "swinv2_tiny_window8_256", **_SWIN),
    "timm ConvNeXt": partial(_timm, "convnext_tiny", dims=(8, 8, 16, 16), **_STAGES),
    "timm MaxViT": partial(_timm, "maxvit_tiny_tf_224", **_MAXVIT),
    "transformers ViT": _transformers_vit,
    "open_clip": _open_clip,
    "open_clip with QuickGELU": partial(_open_clip, quick_gelu=True),
    "open_clip with attention pooling": partial(
        _open_clip, attentional_pool=True, attn_pooler_queries=4, attn_pooler_heads=2
    ),
}

# Name -> function that returns the model in eval mode and two images, the same ones at every call. It skips the test if
# the library is missing.
MODELS: dict[str, Build] = {name: cache(build) for name, build in _BUILDERS.items()}
