"""Check `saliency.features` on backbones of timm, transformers and torchvision, with and without heads.

The networks have random weights and small images, not square if they allow it; those of `saliency.testbed` have their
own weights. The features of two images must be finite, vary between the cells, and equal the features of the second
image alone. The similarity to a point must be 1 at its cell, the colours must be finite, and the model unchanged. Or
the network is refused with the reason.

    python -m benchmarks.zoo_features               check all, and write benchmarks/results/zoo_features.md
    python -m benchmarks.zoo_features swin clip     check some networks, and print the table
"""

from __future__ import annotations

import argparse
import gc
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
import transformers
from torch import Tensor, nn

import saliency
from benchmarks.zoo import fingerprint
from benchmarks.zoo_attention import SIZE, TOWER, WINDOWS, of_timm, of_torchvision, usable
from tests.reference import error

RESULTS = Path(__file__).parent / "results" / "zoo_features.md"
MAX_DIFFERENCE = 1e-4  # of the features alone from those in a batch, relative to the largest value
SQUARE = (64, 64)

TIMM = """resnet18 efficientnet_lite0 mobilenetv3_small_100 convnext_atto densenet121 regnetx_002
    swin_tiny_patch4_window7_224 maxvit_rmlp_pico_rw_256 pvt_v2_b0 xcit_nano_12_p16_224 caformer_s18
    vit_tiny_patch16_224 deit3_small_patch16_224 vit_small_patch14_reg4_dinov2 vit_tiny_patch16_dinov3_qkvb
    vit_base_patch16_siglip_224 vit_base_patch16_clip_quickgelu_224 eva02_tiny_patch14_224 beit_base_patch16_224
    samvit_base_patch16 hiera_tiny_224 mixer_s32_224"""
SIZED = ("vit", "deit", "dino", "eva", "beit", "swin", "maxvit", "xcit")
TORCHVISION: dict[str, Any] = {
    name: {"image_size": 64} if name == "vit_b_16" else {}
    for name in ("resnet18", "vgg11", "efficientnet_b0", "convnext_tiny", "swin_t", "swin_v2_t", "vit_b_16")
}
CONVOLUTIONS: dict[str, Any] = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("ViT", "Dinov2", "Dinov2WithRegisters", "Beit", "ViTMAE"), TOWER),
    "DINOv3ViT": {**TOWER, "num_register_tokens": 4},
    **dict.fromkeys(("CLIPVision", "SiglipVision"), TOWER),
    **dict.fromkeys(("Swin", "Swinv2"), WINDOWS),
    **dict.fromkeys(("ConvNext", "ConvNextV2", "DINOv3ConvNext"), CONVOLUTIONS),
    "ResNet": {**CONVOLUTIONS, "embedding_size": 8, "layer_type": "basic"},
    "Segformer": {},
}

Build = Callable[[], tuple[nn.Module, Tensor]]


def builders() -> dict[str, Build]:
    """Return a function for each network that builds it with two images."""
    networks: dict[str, Build] = {}
    for name in TIMM.split():
        edge = 14 if "patch14" in name else 16
        size = (224, 224) if name.startswith(("hiera", "mixer")) else (4 * edge, 6 * edge)
        options = {"img_size": size} if name.startswith(SIZED) else {}
        networks[f"timm {name}"] = partial(of_timm, name, size, **options)
    headless: dict[str, Any] = {"num_classes": 0, "global_pool": ""}
    networks["timm resnet18, maps only"] = lambda: usable(timm.create_model("resnet18", **headless), SIZE)
    networks["timm resnet18, features_only"] = lambda: usable(timm.create_model("resnet18", features_only=True), SIZE)
    networks |= {f"torchvision {name}": partial(of_torchvision, name, own) for name, own in TORCHVISION.items()}
    networks["torchvision resnet18, without pool and head"] = lambda: usable(
        nn.Sequential(*list(torchvision.models.resnet18().children())[:-2]), SIZE
    )
    networks |= {f"transformers {name}Model": partial(of_transformers, name, own) for name, own in TRANSFORMERS.items()}
    networks |= {name: partial(of_testbed, name) for name in ("shapes_cnn", "shapes_vit", "shapes_unet")}
    networks["a network without maps"] = lambda: usable(nn.Sequential(nn.Flatten(), nn.Linear(12288, 8)), SQUARE)
    return networks


def of_transformers(kind: str, options: dict[str, Any]) -> tuple[nn.Module, Tensor]:
    """Build a backbone of transformers without a head."""
    module: Any = transformers
    return usable(getattr(module, f"{kind}Model")(getattr(module, f"{kind}Config")(**options)), SQUARE)


def of_testbed(name: str) -> tuple[nn.Module, Tensor]:
    """Load a network of the testbed."""
    return saliency.load(name), saliency.testbed.draw_scenes(2, seed=1_000_000).images / 127.5 - 1


def verdict(name: str) -> tuple[str, str, str]:
    """Return the layer, the shape, and "works", "refused" or "FAILED" with the reason."""
    torch.manual_seed(0)
    model, x = builders()[name]()
    before = fingerprint(model)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", saliency.errors.SaliencyWarning)
            found, alone = saliency.features(model, x), saliency.features(model, x[1:])
            height, width = x.shape[2:]
            point = 0.6 * width, 0.3 * height
            similar, colors = found.similarity(point, 1).values[1, 0], found.pca()
    except saliency.errors.SaliencyError as refusal:
        return "", "", f"refused: {refusal}"
    h, w = similar.shape
    at_point = float(similar[int(0.3 * h), int(0.6 * w)])
    checks = {
        "the batch differs": error(found.values[1:], alone.values) < MAX_DIFFERENCE,
        "constant": float(found.values.std((2, 3)).max()) > 0,
        "the similarity at the point is not 1": abs(at_point - 1) < 1e-4,
        "the colours are not finite": bool(colors.isfinite().all()) and bool(colors.any()),
        "the model was changed": fingerprint(model) == before,
    }
    wrong = ", ".join(problem for problem, right in checks.items() if not right)
    tokens = "" if found.outliers is None else ", outlier tokens known"
    return found.layer, f"{found.values.shape[1]} x {h} x {w}", f"FAILED: {wrong}" if wrong else f"works{tokens}"


def page(rows: dict[str, tuple[str, str, str]]) -> str:
    """Return the Markdown page."""
    words = [verdict.partition(":")[0].partition(",")[0] for *_, verdict in rows.values()]
    head = [
        "# Features of backbones",
        "",
        f"Generated by `make zoo` with torch {torch.__version__}, torchvision {torchvision.__version__}, timm",
        f"{timm.__version__} and transformers {transformers.__version__}. The networks have random weights. The layer",
        "is the default one. Works: the features of two images are finite, vary, equal those of each image alone, and",
        "the model is unchanged. Outlier tokens are masked where they are known.",
        f"Of {len(rows)} networks, {words.count('works')} work, {words.count('refused')} are refused with the reason,",
        f"and {words.count('FAILED')} fail.",
        "",
        "| backbone | layer | features | verdict |",
        "|---|---|---|---|",
    ]
    lines = [
        f"| {name} | {f'`{layer}`' if layer else ''} | {shape} | {text} |"
        for name, (layer, shape, text) in rows.items()
    ]
    return "\n".join([*head, *lines]) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Check the networks, and write or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names of networks (default: all)")
    parts = [name.lower() for name in parser.parse_args(arguments).names]
    rows = {}
    for name in builders():
        if not parts or any(part in name.lower() for part in parts):
            try:
                rows[name] = verdict(name)
            except Exception as failure:  # noqa: BLE001 - the table has every network, whatever it raises
                rows[name] = ("", "", f"FAILED: {type(failure).__name__}: {failure}"[:300].replace("\n", " "))
            gc.collect()
            print(name, *rows[name], sep=" | ", flush=True)
    if parts:
        print(page(rows))
    else:
        RESULTS.write_text(page(rows))


if __name__ == "__main__":
    main()
