"""Measure the time of methods of this and other toolkits against the passes that they need at least.

This lower limit is one forward and one backward pass to the input for a gradient method. For a CAM, it is one forward
pass and a backward pass to the layer only; for Eigen-CAM, one forward pass. Parameters are not frozen.
"""

from __future__ import annotations

import cProfile
import pstats
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import saliency
from benchmarks.timing import Contender, interleaved, ratio, verdict, wall_ratio


@dataclass(frozen=True, slots=True)
class Case:
    """Network that is split at the layer of its CAM."""

    name: str
    model: nn.Module
    layer: str
    body: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor]


def cases() -> list[Case]:
    """Return ResNet-50 with random weights and the bundled network."""
    resnet: Any = saliency.load("resnet50", weights=None)

    def body(x: Tensor) -> Tensor:
        stem = resnet.maxpool(resnet.relu(resnet.bn1(resnet.conv1(x))))
        out: Tensor = resnet.layer4(resnet.layer3(resnet.layer2(resnet.layer1(stem))))
        return out

    def head(a: Tensor) -> Tensor:
        out: Tensor = resnet.fc(torch.flatten(resnet.avgpool(a), 1))
        return out

    lite: Any = saliency.load("efficientnet_lite0")
    return [
        Case("resnet50", resnet, "layer4", body, head),
        Case("efficientnet_lite0", lite, "bn2", lite.forward_features, lite.forward_head),
    ]


def gradient_limit(case: Case, x: Tensor, target: Tensor) -> Contender:
    """Return a function that runs one forward pass and one backward pass to the input."""

    def run() -> Tensor:
        leaf = x.detach().requires_grad_()
        score = case.model(leaf).gather(1, target[:, None]).sum()
        return torch.autograd.grad(score, leaf)[0]

    return run


def cam_limit(case: Case, x: Tensor, target: Tensor) -> Contender:
    """Return a function that runs one forward pass, one backward pass to the layer, and one weighted sum."""

    def run() -> Tensor:
        with torch.no_grad():
            activation = case.body(x)
        activation.requires_grad_()
        score = case.head(activation).gather(1, target[:, None]).sum()
        (gradient,) = torch.autograd.grad(score, activation)
        with torch.no_grad():
            return (gradient.mean((2, 3), keepdim=True) * activation).sum(1)

    return run


def forward_limit(case: Case, x: Tensor) -> Contender:
    """Return a function that runs one forward pass without a graph."""

    def run() -> Tensor:
        with torch.no_grad():
            out: Tensor = case.model(x)
            return out

    return run


FIVE = ("grad_cam", "grad_cam_plus_plus", "xgrad_cam", "hires_cam", "layer_cam")

# Measured methods, each with its limit and the target ratio to it.
OURS = {
    "vanilla_gradient": ("gradient", 1.03),
    "guided_backprop": ("gradient", 1.06),
    "guided_grad_cam": ("gradient", 1.08),
    "grad_cam": ("cam", 1.05),
    "eigen_cam": ("forward", 1.05),
}


def ours(case: Case, x: Tensor, target: Tensor) -> dict[str, Contender]:
    """Return functions that run the methods of this project."""
    labels = target.tolist()
    built = {name: saliency.METHODS[name](case.model) for name in (*OURS, *FIVE)}
    functions: dict[str, Contender] = {name: lambda name=name: built[name].attribute(x, labels) for name in OURS}  # type: ignore[misc]
    together = [built[name] for name in FIVE]
    functions["five CAMs together"] = lambda: saliency.Together(*together).attribute(x, labels)
    return functions


def peers(case: Case, x: Tensor, target: Tensor) -> Iterator[tuple[str, str, Contender]]:
    """Yield the name, the limit and the function of each method of the installed other toolkits."""
    layer = case.model.get_submodule(case.layer)
    try:
        from captum.attr import GuidedBackprop, LayerGradCam, Saliency

        yield "captum Saliency", "gradient", lambda: Saliency(case.model).attribute(x, target, abs=False)
        yield "captum GuidedBackprop", "gradient", lambda: GuidedBackprop(case.model).attribute(x, target)
        yield "captum LayerGradCam", "cam", lambda: LayerGradCam(case.model, layer).attribute(x, target)
    except ImportError:
        pass
    try:
        from pytorch_grad_cam import EigenCAM, GradCAM
        from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

        targets = [ClassifierOutputTarget(int(index)) for index in target]

        def grad_cam() -> object:
            with GradCAM(model=case.model, target_layers=[layer]) as cam:
                return cam(input_tensor=x, targets=targets)

        def eigen_cam() -> object:
            with EigenCAM(model=case.model, target_layers=[layer]) as cam:
                return cam(input_tensor=x, targets=targets)

        yield "grad-cam GradCAM", "cam", grad_cam
        if len(x) == 1:  # it takes seconds per image
            yield "grad-cam EigenCAM", "forward", eigen_cam
    except ImportError:
        pass
    try:
        from torchcam.methods import GradCAM as TorchcamGradCAM

        def torchcam() -> object:
            with TorchcamGradCAM(case.model, case.layer) as cam:
                return cam(target.tolist(), case.model(x.detach().requires_grad_()))

        yield "torchcam GradCAM", "cam", torchcam
    except ImportError:
        pass


def measure(case: Case, batch: int) -> list[str]:
    """Return the lines of the table of one network at one batch size."""
    x = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    target = torch.arange(batch) % 1000
    limits = {
        "gradient": gradient_limit(case, x, target),
        "cam": cam_limit(case, x, target),
        "forward": forward_limit(case, x),
    }
    others = list(peers(case, x, target))
    contenders = limits | ours(case, x, target) | {name: contender for name, _, contender in others}
    timings = interleaved(contenders)
    rows = [f"\n### {case.name}, batch {batch}\n", "| method | limit | ratio to limit (CPU) | (wall) | target |"]
    rows.append("|---|---|---|---|---|")
    baselines: dict[str, tuple[str, float | None]] = {**OURS, "five CAMs together": ("grad_cam", 1.08)}
    baselines |= {name: (limit, None) for name, limit, _ in others}
    for name, (limit, goal) in baselines.items():
        measured = ratio(timings[name], timings[limit])
        walls = wall_ratio(timings[name], timings[limit])
        rows.append(f"| {name} | {limit} | {measured:.3f} | {walls:.3f} | {verdict(measured, goal)} |")
    rows.append("")
    rows.append(", ".join(f"{name} limit {timings[name].seconds * 1000:.0f} ms" for name in limits))
    return rows


def shares(run: Contender, calls: int = 30) -> Counter[str]:
    """Return the percentages of the time of calls outside the network, by file of this package.

    The time of other code, such as operations of PyTorch, belongs to the files that called it.
    """
    run()
    profile = cProfile.Profile()
    for _ in range(calls):
        profile.runcall(run)
    stats: dict[Any, Any] = vars(pstats.Stats(profile))["stats"]
    package = Path(saliency.__file__).parent

    def files(function: tuple[str, int, str], inner: tuple[object, ...] = ()) -> Mapping[str, float]:
        path = Path(function[0])
        if path.is_relative_to(package):
            return {str(path.relative_to(package)): 1.0}
        if {"timm", "modules"} & set(path.parts) or "run_backward" in function[2]:
            return {"network": 1.0}
        callers = {each: row[3] for each, row in stats[function][4].items() if each not in (function, *inner)}
        found: Counter[str] = Counter()
        for caller, seconds in callers.items():
            for file, share in files(caller, (function, *inner)).items():
                found[file] += share * seconds / max(sum(callers.values()), 1e-12)
        return found

    totals: Counter[str] = Counter()
    for function, (_, _, seconds, _, _) in stats.items():
        for file, share in files(function).items():
            totals[file] += share * seconds
    del totals["network"]
    return Counter({file: 100 * seconds / totals.total() for file, seconds in totals.items()})


def print_shares(case: Case) -> None:
    """Print where a call spends its time outside the network."""
    names = ("grad_cam", "guided_backprop", "vanilla_gradient")
    x = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    found = [shares(partial(saliency.METHODS[name](case.model).attribute, x, 0)) for name in names]
    print(f"\n### {case.name}, batch 1: percentages of the time outside the network, by a profiler\n")
    print(f"| file | {' | '.join(names)} |\n|---|---|---|---|")
    for file, total in sum(found, Counter[str]()).most_common():
        if total >= 3 * len(names):
            print(f"| saliency/{file} | {' | '.join(f'{column[file]:.0f}' for column in found)} |")


def main() -> None:
    """Print the tables."""
    warnings.simplefilter("ignore")
    print("## Speed: one thread, contenders in turn, median of the ratios per round")
    for case in cases():
        for batch in (1, 16):
            print("\n".join(measure(case, batch)), flush=True)
    print_shares(cases()[1])


if __name__ == "__main__":
    main()
