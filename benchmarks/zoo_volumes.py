"""Check methods on networks of volumes and videos, as in `benchmarks.zoo_cells`.

python -m benchmarks.zoo_volumes                 check all, and write benchmarks/results/zoo_volumes.md; resumes
python -m benchmarks.zoo_volumes densenet rise   check some networks or methods, and print the table
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import monai
import monai.networks.nets
import torch
import torchvision
from torch import nn

import saliency
from benchmarks.zoo_cells import Case, Table
from benchmarks.zoo_places import METHODS

networks: Any = monai.networks.nets
videos: Any = torchvision.models.video


def volume(build: Callable[[], nn.Module], *size: int, region: bool = False) -> Callable[[], Case]:
    """Return a builder of a network with noise (1, C, D, H, W), and of a class, or of its mean over all voxels."""
    target = saliency.region(1, torch.ones(size[1:], dtype=torch.bool)) if region else 1
    return lambda: Case(build(), torch.rand(1, *size, generator=torch.Generator().manual_seed(1)), target)


def mvit() -> nn.Module:
    """Return a MViT of three blocks, for smaller clips than its builders allow."""
    edges = {"kernel_q": [3, 3, 3], "kernel_kv": [3, 3, 3]}
    blocks = [
        videos.mvit.MSBlockConfig(heads, channels, wider, stride_q=[1, stride, stride], stride_kv=[1, 2, 2], **edges)
        for heads, channels, wider, stride in ((1, 16, 16, 1), (2, 16, 32, 2), (2, 32, 32, 1))
    ]
    options: Any = {"residual_pool": True, "residual_with_cls_embed": False, "proj_after_attn": True}
    model: nn.Module = videos.MViT((64, 64), 8, blocks, rel_pos_embed=True, num_classes=5, **options)
    return model


SIZE = (1, 32, 48, 64)
CLIP = (3, 8, 48, 64)
SMALL: dict[str, Any] = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}

KINDS: dict[str, Callable[[], Case]] = {
    "MONAI DenseNet121": volume(lambda: networks.DenseNet121(**SMALL), *SIZE),
    "MONAI resnet10": volume(lambda: networks.resnet10(spatial_dims=3, n_input_channels=1, num_classes=2), *SIZE),
    "MONAI EfficientNet-B0": volume(
        lambda: networks.EfficientNetBN("efficientnet-b0", spatial_dims=3, in_channels=1, num_classes=2), *SIZE
    ),
    "MONAI UNet": volume(lambda: networks.UNet(**SMALL, channels=(4, 8, 16), strides=(2, 2)), *SIZE, region=True),
    "MONAI BasicUNet": volume(lambda: networks.BasicUNet(**SMALL, features=(4, 4, 8, 8, 8, 4)), *SIZE, region=True),
    "MONAI SegResNet": volume(lambda: networks.SegResNet(**SMALL, init_filters=8), *SIZE, region=True),
    "torchvision r3d_18": volume(lambda: videos.r3d_18(num_classes=5), *CLIP),
    "torchvision mc3_18": volume(lambda: videos.mc3_18(num_classes=5), *CLIP),
    "torchvision r2plus1d_18": volume(lambda: videos.r2plus1d_18(num_classes=5), *CLIP),
    "torchvision s3d": volume(lambda: videos.s3d(num_classes=5), 3, 16, 224, 224),
    "torchvision MViT, as v2": volume(mvit, 3, 8, 64, 64),
    "torchvision swin3d_t": volume(lambda: videos.swin3d_t(num_classes=5), 3, 4, 32, 64),
}

OPTIONS: dict[str, Any] = {
    "rise": {"passes": 4, "grid": 3},
    "occlusion": {"window": (16, 48, 48), "stride": (16, 48, 48)},
    "kernel_shap": {"segments": (2, 2, 2), "passes": 6},
    "xrai": {},
}
VOLUMES = Table(
    "zoo_volumes",
    "Methods on volumes and videos",
    ("torchvision", "monai"),
    KINDS,
    {name: options for name, options in {**METHODS, **OPTIONS}.items() if name not in ("d_rise", "odam")},
)

if __name__ == "__main__":
    VOLUMES.main()
