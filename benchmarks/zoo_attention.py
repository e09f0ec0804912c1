"""Check the attention of transformers of timm, torchvision, transformers and open_clip, and all attention methods.

The networks have random weights, small images and, where an option allows it, two blocks. The probabilities that are
read and their gradients must equal the results of a copy with unfused attention. Each attention method runs on two
images with different classes. The second image must get the same map as alone, with each patch at its position, or the
method must be refused.

    python -m benchmarks.zoo_attention             check all, and write benchmarks/results/zoo_attention.md
    python -m benchmarks.zoo_attention vit swin    check some networks, and print the table
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import open_clip
import timm
import torch
import torch.nn.functional as F
import torchvision
import transformers
from torch import Tensor, nn

import saliency
from benchmarks.zoo import CLASSES, fingerprint, make_usable
from saliency.inspection.attention_record import LayerAttention
from saliency.methods.token_attention import AttentionMap, TokenAttention
from tests.reference import error

RESULTS = Path(__file__).parent / "results" / "zoo_attention.md"
SIZE = (64, 96)  # not square, so that a transposed map is found
WITHOUT_READING = ("vit_cx",)  # a method for tokens that reads no attention
MAX_ERROR = 1e-5  # of attention, relative to the largest value
MAX_DIFFERENCE = 1e-4  # of a map alone from that in a batch, relative to the largest value

# Networks of timm with two blocks, with their own number of blocks, without a setting of the size, and square ones.
BLOCKS = """vit_tiny_patch16_224 vit_base_patch16_clip_quickgelu_224 vit_small_patch16_18x2_224 vit_tiny_r_s16_p8_224
    vit_relpos_small_patch16_224 vit_srelpos_small_patch16_224 vit_little_patch16_reg4_gap_256
    vit_dpwee_patch16_reg1_gap_256 vit_base_patch16_siglip_224 vit_base_patch16_siglip_gap_224
    vit_base_patch16_rope_mixed_224 vit_base_patch16_rope_reg1_gap_256 aimv2_large_patch14_224
    deit_tiny_distilled_patch16_224 deit3_small_patch16_224 vit_small_patch14_reg4_dinov2 vit_tiny_patch16_dinov3_qkvb
    vit_pe_core_tiny_patch16_384 eva02_tiny_patch14_224 beit_base_patch16_224 beitv2_base_patch16_224
    beit3_base_patch16_224 cait_xxs24_224 xcit_nano_12_p16_224 naflexvit_base_patch16_siglip qwen3_vit_88m
    samvit_base_patch16 tnt_s_patch16_224 visformer_tiny vitamin_small_224"""
STAGES = """coat_lite_tiny coat_tiny pit_xs_distilled_224 swin_tiny_patch4_window7_224 swinv2_tiny_window8_256
    swinv2_cr_tiny_224 swin_s3_tiny_224 maxvit_rmlp_pico_rw_256 coatnet_pico_rw_224 levit_128s hiera_tiny_224
    twins_pcpvt_small twins_svt_small volo_d1_224 gcvit_xxtiny efficientformerv2_s0 mobilevit_xxs"""
FREE = """crossvit_tiny_240 pvt_v2_b0 mvitv2_tiny hieradet_small davit_tiny edgenext_xx_small mobilenetv4_hybrid_medium
    caformer_s18"""
SQUARE: dict[str, Any] = {"convit_tiny": {"depth": 2, "img_size": 64}, "nest_tiny": {"img_size": 64}}

# Options of the networks of torchvision and of the configurations of transformers, all on square images.
TORCHVISION: dict[str, Any] = {"vit_b_16": {"image_size": 64}, "swin_t": {}, "swin_v2_t": {}}
TOWER: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
TOWER |= {"image_size": 64, "patch_size": 16}
WINDOWS = {"image_size": 64, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
TRANSFORMERS: dict[str, Any] = {
    **dict.fromkeys(("ViT", "DeiT", "Dinov2", "Dinov2WithRegisters", "Beit", "IJepa", "ViTMSN"), TOWER),
    **{kind: {"vision_config": TOWER} for kind in ("CLIP", "Siglip", "MetaClip2")},
    "Swin": WINDOWS,
    "Swinv2": WINDOWS,
    "PvtV2": {"image_size": 64},
    "Segformer": {},
}
OPEN_CLIP = """ViT-B-32 ViT-B-32-quickgelu coca_ViT-B-32 ViT-H-14-CLIPA ViT-B-16-SigLIP EVA02-B-16 ViTamin-S
    RN50"""


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one network: the attention that is read, and the verdict on each method."""

    name: str
    attention: str
    methods: dict[str, str]
    untouched: bool

    @property
    def passed(self) -> bool:
        """Return whether the attention and each method are right or refused, and the model is unchanged."""
        return self.untouched and not any("WRONG" in verdict for verdict in (self.attention, *self.methods.values()))


class TokenNumbers(AttentionMap):
    """Map of the number of the token that each cell shows."""

    def relevance(self, attention: TokenAttention) -> Tensor:
        """Return the numbers of all tokens."""
        return torch.arange(float(attention.tokens)).expand(len(attention.grads.x), -1)


def builders() -> dict[str, Callable[[], tuple[nn.Module, Tensor]]]:
    """Return a function for each network that builds it with two images."""
    networks: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {}
    for name in BLOCKS.split():
        patch_size = 14 if "patch14" in name else 16
        size = (4 * patch_size, 6 * patch_size)
        networks[f"timm/{name}"] = partial(of_timm, name, size, depth=2, img_size=size)
    networks |= {f"timm/{name}": partial(of_timm, name, SIZE, img_size=SIZE) for name in STAGES.split()}
    networks |= {f"timm/{name}": partial(of_timm, name, SIZE) for name in FREE.split()}
    networks |= {f"timm/{name}": partial(of_timm, name, (64, 64), **options) for name, options in SQUARE.items()}
    networks |= {f"torchvision/{name}": partial(of_torchvision, name, options) for name, options in TORCHVISION.items()}
    networks |= {
        f"transformers/{name}": partial(of_transformers, name, options) for name, options in TRANSFORMERS.items()
    }
    networks |= {f"open_clip/{name}": partial(of_open_clip, name) for name in OPEN_CLIP.split()}
    return networks


def of_timm(name: str, size: tuple[int, int], **options: Any) -> tuple[nn.Module, Tensor]:
    """Build a network of timm."""
    return usable(timm.create_model(name, num_classes=10, **options), size)


def of_torchvision(name: str, options: dict[str, Any]) -> tuple[nn.Module, Tensor]:
    """Build a network of torchvision."""
    return usable(torchvision.models.get_model(name, num_classes=10, **options), (64, 64))


def of_transformers(kind: str, options: dict[str, Any]) -> tuple[nn.Module, Tensor]:
    """Build a classifier of transformers."""
    config = getattr(transformers, f"{kind}Config")(**options, num_labels=10)
    return usable(getattr(transformers, f"{kind}ForImageClassification")(config), (64, 64))


def of_open_clip(name: str) -> tuple[nn.Module, Tensor]:
    """Build an image tower of open_clip with two blocks."""
    vision = open_clip.get_model_config(name)["vision_cfg"] | {"output_tokens": False}
    size = (224, 224)
    if vision.get("patch_size"):
        size = SIZE
        vision |= {"layers": 2, "width": 2 * vision.get("head_width", 64), "patch_size": 16, "image_size": SIZE}
    text = {"width": 16, "heads": 2, "layers": 1, "vocab_size": 10, "context_length": 8}
    tower = open_clip.CLIP(16, vision, text, quick_gelu="quickgelu" in name).visual
    if "timm_model_name" in vision:
        tower.trunk.blocks = tower.trunk.blocks[:2]
    return usable(tower, size)


def usable(model: nn.Module, size: tuple[int, int]) -> tuple[nn.Module, Tensor]:
    """Return the network, with every part of an effect, and two images."""
    x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    make_usable(model.eval(), x)
    return model.eval(), x


class Unfused(ExitStack):
    """Context in which fused attention is computed explicitly, and the results of all softmaxes are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        for owner in (torch, Tensor):
            self.enter_context(patch.object(owner, "softmax", self.keeping(owner.softmax)))
        self.enter_context(patch.object(F, "scaled_dot_product_attention", attend))

    def keeping(self, softmax: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a softmax that keeps its results and their gradients."""

        def keep(values: Tensor, *args: Any, **options: Any) -> Tensor:
            self.kept.append(softmax(values, *args, **options))
            self.kept[-1].retain_grad()
            return self.kept[-1]

        return keep


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return `F.scaled_dot_product_attention` without dropout, causal masks and grouped keys."""
    assert not is_causal
    assert not enable_gqa
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        logits = logits.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        logits = logits + attn_mask
    return logits.softmax(-1) @ value


def unfused(model: Any, x: Tensor, *, switched: bool) -> list[Tensor]:
    """Return the results of all softmaxes, with gradients, of a network with unfused attention."""
    if switched:
        for module in model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = False
        if isinstance(model, transformers.PreTrainedModel):
            model.set_attn_implementation("eager")
    with Unfused() as softmaxes:
        output = model(x.clone().requires_grad_())
    getattr(output, "logits", output)[range(len(x)), CLASSES].sum().backward()
    return softmaxes.kept


def judge(name: str, build: Callable[[], tuple[nn.Module, Tensor]]) -> Row:
    """Check one network."""
    torch.manual_seed(0)
    model, x = build()
    before = fingerprint(model)
    attention, verdicts = judge_attention(model, x), judge_methods(model, x)
    return Row(name, attention, verdicts, fingerprint(model) == before)


def judge_attention(model: nn.Module, x: Tensor) -> str:
    """Return how many softmaxes are read, and how exactly, or why none is.

    The reference is the unfused form of the network itself. If its arithmetic is another one, the fused form is
    computed explicitly. Large errors are measured again in float64.
    """
    verdict = compare_attention(model, x, switched=True)
    if verdict.startswith("WRONG"):
        verdict = compare_attention(model, x, switched=False)
    if verdict.startswith("WRONG"):
        verdict = f"{compare_attention(copy.deepcopy(model).double(), x.double(), switched=True)} in float64"
    return verdict


def compare_attention(model: nn.Module, x: Tensor, *, switched: bool) -> str:
    """Return how many softmaxes are read, and how exactly, or why none is."""
    expected = unfused(copy.deepcopy(model), x, switched=switched)
    try:
        found = saliency.attention(model, x, CLASSES)
    except saliency.errors.SaliencyError as refusal:
        return f"refused: {refusal}"
    worst = 0.0
    rest = iter(expected)
    for item in found:
        own = next((own for own in rest if is_same(own, item)), None)
        if own is None or own.grad is None:
            return f"WRONG: {item} differs from the unfused network"
        worst = max(worst, error(item.gradient.flatten(), own.grad.flatten()))
        worst = max(worst, float((item.probabilities.sum(-1) - 1).abs().max()))
    word = "exact to" if worst < MAX_ERROR else "WRONG by"
    return f"{len(found)} of {len(expected)} softmaxes, {word} {worst:.0e}"


def is_same(own: Tensor, item: LayerAttention) -> bool:
    """Return whether an item has the probabilities of the unfused network."""
    is_alike = own.numel() == math.prod(item.shape) and own.shape[-2:] == item.shape[-2:]
    return is_alike and error(item.probabilities.flatten(), own.flatten()) < MAX_ERROR


def judge_methods(model: nn.Module, x: Tensor) -> dict[str, str]:
    """Return the verdict on each attention method. Large errors are measured again in float64."""
    verdicts = {}
    for name, cls in saliency.METHODS.items():
        if cls.needs.attention or name in WITHOUT_READING:
            verdicts[name] = judge_method(model, x, name)
            if verdicts[name].startswith("WRONG"):
                verdicts[name] = f"{judge_method(copy.deepcopy(model).double(), x.double(), name)}, in float64"
    return verdicts


def judge_method(model: nn.Module, x: Tensor, name: str) -> str:
    """Return "exact" with the grid, "refused" or "WRONG" with details."""
    cls = saliency.METHODS[name]
    try:
        method = cls(model, **cls.preview_options)
        batch, single = method.attribute(x, CLASSES).values, method.attribute(x[1:], CLASSES[1]).values
        return verdict(batch, single, misplaced(model, x))
    except saliency.errors.SaliencyError as refusal:
        return f"refused: {refusal}".replace(f"refused: {name}: ", "refused: ")


def verdict(batch: Tensor, single: Tensor, wrong: str) -> str:
    """Return whether the maps of a batch are right."""
    difference = error(batch[1:], single)
    highest, lowest = batch.amax((1, 2, 3)), batch.amin((1, 2, 3))
    if not batch.isfinite().all() or ((highest == lowest) & (highest != 0)).any():
        return "WRONG: the map is constant or not finite"
    if wrong or difference > MAX_DIFFERENCE:
        return f"WRONG: {wrong or f'the second image differs by {difference:.0e}'}"
    zeros = "" if (highest != lowest).all() else ", without a positive value on one image"
    return f"exact, {batch.shape[-2]}x{batch.shape[-1]}{zeros}"


def misplaced(model: nn.Module, x: Tensor) -> str:
    """Return which corner of the map shows a token that is more than a cell away from where the image changes.

    A change of the image changes the token there most, or the token of a neighbour after convolutions.
    """
    try:
        numbers = TokenNumbers(model).attribute(x[:1], CLASSES[0]).values[0, 0]
    except saliency.errors.SaliencyError:
        return ""  # a method that does not read the tokens of the attention
    exact, x = copy.deepcopy(model).double(), x[:1].double()
    before = saliency.attention(exact, x)[0].probabilities.log()
    height, width = x.shape[-2] // numbers.shape[0], x.shape[-1] // numbers.shape[1]
    for i, j in ((0, numbers.shape[1] - 1), (numbers.shape[0] - 1, 0)):
        changed = x.clone()
        changed[..., i * height : (i + 1) * height, j * width : (j + 1) * width].neg_()
        change = saliency.attention(exact, changed)[0].probabilities.log() - before
        # The logits of other queries and keys are as before, up to a constant for each query.
        token = (change - change.median(-1, keepdim=True).values).abs().sum((0, 1, 2)).argmax()
        place = (numbers == token).nonzero() - torch.tensor([i, j])
        if not len(place) or place.abs().max() > 1:
            return f"cell {i}, {j} is token {token}, not {numbers[i, j]:.0f}"
    return ""


def judge_safely(name: str, build: Callable[[], tuple[nn.Module, Tensor]]) -> Row:
    """Check one network; the row of a failure has its message."""
    gc.collect()
    try:
        return judge(name, build)
    except Exception as failure:  # noqa: BLE001 - the table has every network, whatever it raises
        return Row(name, f"WRONG: {type(failure).__name__}: {failure}"[:300].replace("\n", " "), {}, False)


def table(results: list[Row]) -> str:
    """Return the Markdown page with all rows."""
    read = sum("exact" in row.attention for row in results)
    maps = [row for row in results if any(verdict.startswith("exact") for verdict in row.methods.values())]
    head = [
        "# Attention of every architecture",
        "",
        f"Generated by `make zoo` with torch {torch.__version__}, torchvision {torchvision.__version__},",
        f"timm {timm.__version__}, transformers {transformers.__version__}, open_clip {open_clip.__version__}.",
        f"{len(results)} networks with random weights: attention is read exactly on {read}, and refused with the",
        f"reason on {sum(row.attention.startswith('refused') for row in results)}.",
        f"Attention methods work on {len(maps)}, and are refused with the reason on the others.",
        f"{sum(not row.passed for row in results)} networks are wrong or failed.",
        "",
        "Exact means that the probabilities and their gradients equal the values in a copy with unfused attention, and",
        "that the second image of a batch has the same map as alone, with each patch at its position.",
        "",
        "| network | attention | maps | refused methods | model unchanged |",
        "|---|---|---|---|---|",
    ]
    return "\n".join(head + [line(row) for row in results]) + "\n"


def line(row: Row) -> str:
    """Return the line of the table for one network."""
    names: dict[str, list[str]] = {}
    for name, text in row.methods.items():
        names.setdefault(text, []).append(f"`{name}`")
    cells: tuple[list[str], list[str]] = ([], [])
    for text, same in names.items():
        listed = "all" if len(names) == 1 else ", ".join(same)
        cells[text.startswith("refused")].append(f"{listed}: {text.removeprefix('refused: ')}")
    unchanged = "yes" if row.untouched else "NO"
    return f"| {row.name} | {row.attention} | {'; '.join(cells[0])} | {'; '.join(cells[1])} | {unchanged} |"


def main(arguments: list[str] | None = None) -> None:
    """Check the networks, and write or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names or parts of names (default: all networks)")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    results = []
    for name, build in builders().items():
        if not options.names or any(part in name for part in options.names):
            start = time.perf_counter()
            row = judge_safely(name, build)
            results.append(row)
            print(f"{'ok ' if row.passed else 'BAD'} {time.perf_counter() - start:5.1f} s  {line(row)}", flush=True)
    if options.names:
        print(table(results))
    else:
        RESULTS.write_text(table(results))
        print(f"{sum(row.passed for row in results)} of {len(results)} networks passed; the table is in {RESULTS}")
    if not all(row.passed for row in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
