"""Measure time and memory of relevance methods against one forward pass and one backward pass to the input.

zennit and captum run in the same rounds at batch 1, if they are installed: zennit on networks for which it has a
canoniser, captum on those on which it does not fail. Parameters are not frozen.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn

import saliency
from benchmarks.memory import growth, in_new_processes
from benchmarks.timing import Contender, interleaved, ratio, verdict, wall_ratio

TARGETS = {  # for resnet50 and vgg16, and for EfficientNet-Lite0
    "attn_lrp": (1.12, 1.30),
    "lrp epsilon": (1.15, 1.35),
    "lrp epsilon_plus": (1.60, 1.85),
    "lrp epsilon_gamma_box": (2.10, 2.20),
    "lrp epsilon_alpha2_beta1": (2.10, 2.20),
    "deep_lift": (1.60, 2.05),
}
TRANSFORMERS = {  # with the target of AttnLRP; DeepLIFT has none
    "vit_b_16": 1.10,
    "timm/vit_small_patch16_224": 1.15,
    "timm/swin_tiny_patch4_window7_224": 1.25,
}
CONVOLUTIONAL = ("resnet50", "efficientnet_lite0", "vgg16")
CLASSES = 10
SEVERAL = f"lrp epsilon_plus, {CLASSES} classes"
SEVERAL_TARGET = (2 + CLASSES) / 2  # relative to one call
# DeepLIFT sums to the difference of the scores. LRP sums to the score minus the relevance that biases absorb.
MAX_MISSES = {"deep_lift": 0.01, "lrp epsilon": 10.0, "lrp epsilon_plus": 10.0}


def plain(model: nn.Module, x: Tensor) -> Contender:
    """Return a function that runs one forward pass and one backward pass to the input."""

    def run() -> Tensor:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(model(leaf)[:, 3].sum(), leaf)[0]

    return run


def ours(model: nn.Module, x: Tensor, name: str) -> Contender:
    """Return a function that runs a method of this project, given as "name" or "lrp composite"."""
    method, _, composite = name.partition(" ")
    options: dict[str, Any] = {"composite": composite.partition(",")[0]} if composite else {}
    explainer = saliency.METHODS[method](model, **options)
    if name == SEVERAL:
        return lambda: explainer.attribute_classes(x, list(range(3, 3 + CLASSES)))
    return lambda: explainer.attribute(x, 3)


def zennit(model: nn.Module, x: Tensor, name: str) -> Contender | None:
    """Return a function that runs a composite of zennit, with the canoniser of the network; None if it has none."""
    try:
        from zennit import composites, torchvision
        from zennit.attribution import Gradient
    except ImportError:
        return None
    canonisers = {"ResNet": torchvision.ResNetCanonizer, "VGG": torchvision.VGGCanonizer}
    classes = {
        "lrp epsilon_plus": composites.EpsilonPlus,
        "lrp epsilon_gamma_box": lambda **keywords: composites.EpsilonGammaBox(x.amin(), x.amax(), **keywords),
        "lrp epsilon_alpha2_beta1": composites.EpsilonAlpha2Beta1,
    }
    canoniser = canonisers.get(type(model).__name__)
    if canoniser is None or name not in classes:
        return None
    composite = classes[name](canonizers=[canoniser()])
    target = torch.zeros(len(x), 1000)
    target[:, 3] = 1

    def run() -> Tensor:
        with Gradient(model, composite) as attributor:
            relevance: Tensor = attributor(x.detach().requires_grad_(), target)[1]
            return relevance

    return run


def captum(model: nn.Module, x: Tensor, name: str) -> Contender | None:
    """Return a function that runs a method of captum on a copy of the network; None if captum does not have it."""
    try:
        from captum.attr import LRP, DeepLift
        from captum.attr._utils.lrp_rules import Alpha1_Beta0_Rule
    except ImportError:
        return None
    model = copy.deepcopy(model)  # captum adds hooks and attributes to modules
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]

    def lrp() -> Tensor:
        for module in convolutions if name == "lrp epsilon_plus" else ():
            module.rule = Alpha1_Beta0_Rule()  # removed after each call
        relevance: Tensor = LRP(model).attribute(x, target=3)
        return relevance

    runs: dict[str, Contender] = {"deep_lift": lambda: DeepLift(model).attribute(x, torch.zeros_like(x), target=3)}
    return (runs | dict.fromkeys(("lrp epsilon", "lrp epsilon_plus"), lrp)).get(name)


def check_sum(model: nn.Module, x: Tensor, name: str, run: Contender) -> tuple[bool, str]:
    """Return whether a method of captum runs, and how its sum differs from the score or why it fails."""
    try:
        total = float(cast("Tensor", run()).sum())
    except Exception as error:  # noqa: BLE001
        return False, f"fails: {type(error).__name__}: {str(error).strip().splitlines()[0][:80]}"
    with torch.no_grad():
        score = float(model(x)[:, 3].sum() - (model(torch.zeros_like(x))[:, 3].sum() if name == "deep_lift" else 0))
    is_wrong = not abs(total - score) <= MAX_MISSES[name] * abs(score)
    return True, f"{'wrong: ' if is_wrong else ''}sum {total:.3g}, expected {score:.3g}"


def methods_for(name: str) -> list[str]:
    """Return the methods that are measured on a network."""
    return ["attn_lrp", "deep_lift"] if name in TRANSFORMERS else list(TARGETS)


def network(name: str) -> nn.Module:
    """Return a network: the bundled one with its weights, others with random weights, none of which are all zero."""
    torch.manual_seed(0)
    if name == "efficientnet_lite0":
        return saliency.load(name)
    model = saliency.load(name, weights=None)
    for parameter in model.parameters():
        if not parameter.any():  # such as the head of torchvision's ViT: all gradients would be zero
            nn.init.normal_(parameter, std=0.02)
    return model


def target(network: str, method: str) -> float | None:
    """Return the target of a method on a network."""
    if network in TRANSFORMERS:
        return TRANSFORMERS[network] if method == "attn_lrp" else None
    return TARGETS[method][network == "efficientnet_lite0"] if method in TARGETS else None


def measure(name: str, batch: int, *, with_peers: bool = True) -> None:
    """Print the time ratios of all methods on one network."""
    model = network(name)
    x = torch.randn(batch, 3, 224, 224)
    notes: dict[str, str] = {}
    contenders: dict[str, Contender] = {"plain": plain(model, x)}
    for method in methods_for(name):
        contenders[method] = ours(model, x, method)
        if batch == 1 and with_peers and (other := zennit(model, x, method)):
            contenders[f"zennit {method.partition(' ')[2]}"] = other
        if batch == 1 and with_peers and (other := captum(model, x, method)):
            runs, notes[f"captum {method}"] = check_sum(model, x, method, other)
            if runs:
                contenders[f"captum {method}"] = other
            else:
                print(f"| {name} | {batch} | captum {method} | | | {notes[f'captum {method}']} |", flush=True)
    if batch == 1 and name in ("resnet50", "efficientnet_lite0"):
        contenders[SEVERAL] = ours(model, x, SEVERAL)
    times = interleaved(contenders, 60 if batch == 1 else 20)
    if SEVERAL in times:
        share = ratio(times[SEVERAL], times["lrp epsilon_plus"])
        notes[SEVERAL] = f"{share:.2f} of one call, {verdict(share, SEVERAL_TARGET)}"
    base = times.pop("plain")
    for contender, timing in times.items():
        value = ratio(timing, base)
        aim = notes.get(contender) or verdict(value, target(name, contender))
        print(f"| {name} | {batch} | {contender} | {value:.2f} | {wall_ratio(timing, base):.2f} | {aim} |", flush=True)


def peak(name: str, batch: int, method: str) -> float:
    """Return the peak of the resident set during a call, minus the resident set before it, in MiB."""
    model = network(name)
    x = torch.randn(batch, 3, 224, 224)
    with torch.no_grad():
        model(x[:1])
    return growth(plain(model, x) if method == "plain" else ours(model, x, method))


def print_memory(name: str, batch: int, limits: Mapping[str, float]) -> None:
    """Print the peak memory of methods on one network, each in its own process, with its limit."""
    base, *peaks = in_new_processes(peak, [(name, batch, method) for method in ("plain", *limits)])
    for method, measured in zip(limits, peaks, strict=True):
        value = measured / base
        print(f"| {name} | {batch} | {method} | {value:.2f} | {verdict(value, limits[method])} |", flush=True)


def memory_limits(name: str) -> dict[str, float]:
    """Return the methods that are measured on a network, with the limit of each."""
    return {method: 1.15 if method in ("attn_lrp", "lrp epsilon") else 1.5 for method in methods_for(name)}


def print_tables(
    networks: Sequence[str],
    measure: Callable[[str, int], None],
    limits_of: Callable[[str], Mapping[str, float]],
) -> None:
    """Print a table of times and one of memory. vgg16, which takes minutes at batch 16, is timed at batch 1."""
    warnings.simplefilter("ignore")
    print("Time:\n\n| network | batch | method | CPU ratio | wall ratio | target |\n|---|---|---|---|---|---|")
    for batch, name in product((1, 16), networks):
        if batch == 1 or name != "vgg16":
            measure(name, batch)
    print("\nPeak memory:\n\n| network | batch | method | ratio | target |\n|---|---|---|---|---|")
    for name in networks:
        print_memory(name, 4, limits_of(name))


def main() -> None:
    """Print the tables, or the times of our methods at batch 1 alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ours", nargs="+", metavar="NETWORK", help="time our methods at batch 1 on these networks")
    if chosen := parser.parse_args().ours:
        print("| network | batch | method | CPU ratio | wall ratio | target |\n|---|---|---|---|---|---|")
        for name in chosen:
            measure(name, 1, with_peers=False)
    else:
        print_tables([*CONVOLUTIONAL, *TRANSFORMERS], measure, memory_limits)


if __name__ == "__main__":
    main()
