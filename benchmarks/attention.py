"""Measure time and memory of attention methods against a forward pass, and against one forward and one backward pass.

The ratios of methods without a backward pass are to a forward pass without gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import saliency
from benchmarks.relevance import network, ours, plain, print_tables
from benchmarks.timing import Contender, interleaved, ratio, verdict, wall_ratio

NETWORKS = ("vit_b_16", "timm/vit_small_patch16_224")
FORWARD_ONLY = ("attention_rollout",)
LIMITS = {"attention_rollout": 1.12, "chefer_attention": 1.2, "le_grad": 1.6, "all but chefer_lrp together": 1.5}
MANY_PASSES = ("vit_cx", "grad_eclip")
MEMORY_LIMIT = 1.15


def methods() -> list[str]:
    """Return the attention methods of one forward."""
    return [name for name, cls in saliency.METHODS.items() if cls.needs.attention and name not in MANY_PASSES]


def forward(model: nn.Module, x: Tensor) -> Contender:
    """Return a function that runs one forward pass without gradients."""

    def run() -> Tensor:
        with torch.no_grad():
            scores: Tensor = model(x)
            return scores

    return run


def together(model: nn.Module, x: Tensor) -> Contender:
    """Return a function that runs all attention methods on one forward, except the walk of `chefer_lrp`."""
    explainers = [saliency.METHODS[name](model) for name in methods() if name != "chefer_lrp"]
    return lambda: saliency.Together(*explainers).attribute(x, 3)


def measure(name: str, batch: int) -> None:
    """Print the time ratios of all methods on one network."""
    model = network(name)
    torch.manual_seed(0)
    x = torch.randn(batch, 3, 224, 224)
    contenders: dict[str, Contender] = {"forward": forward(model, x), "plain": plain(model, x)}
    contenders |= {method: ours(model, x, method) for method in methods()}
    contenders["all but chefer_lrp together"] = together(model, x)
    times = interleaved(contenders)
    bases = {True: times.pop("forward"), False: times.pop("plain")}
    for contender, timing in times.items():
        base = bases[contender in FORWARD_ONLY]
        value = ratio(timing, base)
        aim = verdict(value, LIMITS.get(contender))
        print(f"| {name} | {batch} | {contender} | {value:.2f} | {wall_ratio(timing, base):.2f} | {aim} |", flush=True)


def memory_limits(name: str) -> dict[str, float]:
    """Return the methods that are measured, with the limit of each, on any network."""
    return dict.fromkeys(methods(), MEMORY_LIMIT)


def main() -> None:
    """Print the tables."""
    print_tables(NETWORKS, measure, memory_limits)


if __name__ == "__main__":
    main()
