"""Measure the time of relevance methods against one forward pass and one backward pass to the input.

zennit and captum run in the same rounds, where they are installed. Parameters are not frozen.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import saliency
from benchmarks.speed import Contender
from benchmarks.timing import interleaved, ratio, verdict, wall_ratio

TARGETS = {
    "attn_lrp": 1.15,
    "lrp epsilon": 1.15,
    "lrp epsilon_plus": 1.6,
    "lrp epsilon_gamma_box": 2.1,
    "lrp epsilon_alpha2_beta1": 2.1,
    "deep_lift": 2.3,
}
CONVOLUTIONAL = ("resnet50", "efficientnet_lite0", "vgg16")
TRANSFORMERS = ("vit_b_16", "timm/vit_small_patch16_224", "timm/swin_tiny_patch4_window7_224")


def plain(model: nn.Module, x: Tensor) -> Contender:
    """Return a function that runs one forward pass and one backward pass to the input."""

    def run() -> Tensor:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(model(leaf)[:, 3].sum(), leaf)[0]

    return run


def ours(model: nn.Module, x: Tensor, name: str) -> Contender:
    """Return a function that runs a method of this project, given as "name" or "lrp composite"."""
    method, _, composite = name.partition(" ")
    explainer = saliency.METHODS[method](model, **({"composite": composite} if composite else {}))
    return lambda: explainer.attribute(x, 3)


def zennit(model: nn.Module, x: Tensor, name: str) -> Contender | None:
    """Return a function that runs a composite of zennit, with the canoniser of the network; None if it has none."""
    try:
        from zennit import composites
        from zennit.attribution import Gradient
    except ImportError:
        return None
    classes = {
        "lrp epsilon": None,
        "lrp epsilon_plus": composites.EpsilonPlus,
        "lrp epsilon_gamma_box": composites.EpsilonGammaBox,
        "lrp epsilon_alpha2_beta1": composites.EpsilonAlpha2Beta1,
    }
    merging = {"ResNet": "torchvision.ResNetCanonizer", "VGG": ""}
    kind = type(model).__name__
    if kind not in merging or classes.get(name) is None:
        return None
    import zennit.torchvision as networks

    own = [networks.ResNetCanonizer()] if kind == "ResNet" else [networks.VGGCanonizer()]
    options: dict[str, Any] = {"canonizers": own}
    if name == "lrp epsilon_gamma_box":
        options |= {"low": x.amin(), "high": x.amax()}
    composite = classes[name](**options)
    target = torch.zeros(len(x), 1000)
    target[:, 3] = 1

    def run() -> Tensor:
        with Gradient(model, composite) as attributor:
            relevance: Tensor = attributor(x.detach().requires_grad_(), target)[1]
            return relevance

    return run


def measure(name: str, batch: int, rounds: int, methods: list[str]) -> None:
    """Print the ratios of all methods on one network."""
    model = saliency.load(name, weights=None) if name != "efficientnet_lite0" else saliency.load(name)
    torch.manual_seed(0)
    x = torch.randn(batch, 3, 224, 224)
    contenders: dict[str, Contender] = {"plain": plain(model, x)}
    for method in methods:
        contenders[method] = ours(model, x, method)
        if other := zennit(model, x, method):
            contenders[f"zennit {method.partition(' ')[2]}"] = other
    times = interleaved(contenders, rounds)
    base = times.pop("plain")
    for contender, timing in times.items():
        value = ratio(timing, base)
        best = min(timing.cpu) / min(base.cpu)
        aim = verdict(value, TARGETS.get(contender))
        print(
            f"| {name} | {batch} | {contender} | {value:.2f} | {wall_ratio(timing, base):.2f} | {best:.2f} | {aim} |",
            flush=True,
        )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", default=[*CONVOLUTIONAL, *TRANSFORMERS])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    print(
        "| network | batch | method | CPU ratio | wall ratio | best to best | target |\n|---|---|---|---|---|---|---|"
    )
    for name in arguments.networks:
        is_transformer = name in TRANSFORMERS
        methods = [m for m in TARGETS if m.partition(" ")[0] in saliency.METHODS]
        chosen = ["attn_lrp", "deep_lift"] if is_transformer else [m for m in methods if m != "attn_lrp"]
        measure(name, arguments.batch, arguments.rounds, [m for m in chosen if m in methods])


if __name__ == "__main__":
    main()
