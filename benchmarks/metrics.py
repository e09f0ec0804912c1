"""Measure pixel flipping, ROAD and infidelity over images on the bundled network, next to Quantus if it is installed.

Both measure the map alone; one column has ours with the seven controls, for the first image. The floor is as many
forwards of the network alone, 4 images at a time, which is fastest on a CPU. MPRT is measured against calls of the
method. ROAD of Quantus raises for images with channels: its row calls its imputation and the network, without the
metric.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import saliency
from benchmarks.timing import interleaved, ratio
from saliency import Attribution, GradCAM, VanillaGradient
from saliency.attribution.heatmap import heatmap
from saliency.evaluation.metrics.faithfulness import Deletion, Infidelity
from saliency.evaluation.metrics.randomisation import MPRT, layers_from_the_top
from saliency.evaluation.metrics.road import ROAD
from saliency.metrics import Metric

ASSETS = Path(__file__).parent.parent / "assets"
STEPS, PATCH, RUNS = 168, 56, 12
"""The steps of pixel flipping; the edge of the squares of infidelity, and how often they cover the image."""

METRICS: dict[str, Metric] = {
    "pixel flipping, 168 steps": Deletion(steps=STEPS),
    "ROAD, 9 shares": ROAD(),
    "infidelity, 192 squares": Infidelity(side=PATCH / 224, samples=RUNS * (224 // PATCH) ** 2, scaled=False),
}
FORWARDS = dict(zip(METRICS, (STEPS, 9, RUNS * (224 // PATCH) ** 2), strict=True))
"""The forwards of each image that each metric needs."""

TARGET = 20


def photos(count: int) -> list[str]:
    """Return the paths of photos, repeated."""
    paths = sorted(map(str, ASSETS.glob("*.jpg")))
    return [paths[index % len(paths)] for index in range(count)]


def quantus_calls(model: nn.Module, x: Tensor, classes: Sequence[int], maps: Tensor) -> dict[str, Callable[[], object]]:
    """Return what Quantus runs for each metric."""
    quantus: Any = import_module("quantus")
    imputation: Any = import_module("quantus.functions.perturb_func").noisy_linear_imputation
    if not hasattr(np, "trapz"):  # Quantus 0.6.0 calls it, and NumPy 2.4 has removed it
        vars(np)["trapz"] = np.trapezoid
    images, labels, attributions = x.numpy(), np.array(classes), maps[:, None].numpy()
    options: dict[str, Any] = {"disable_warnings": True, "normalise": False, "perturb_baseline": 0.0}

    def run(metric: Any) -> object:
        return metric(model, images, labels, attributions, softmax=True, device="cpu", batch_size=len(images))

    def road() -> None:
        for image, map_ in zip(images, attributions, strict=True):
            order: NDArray[np.int64] = np.argsort(-map_.flatten())
            removed = [imputation(image, order[: k * len(order) // 10]) for k in range(1, 10)]
            with torch.no_grad():
                model(torch.from_numpy(np.stack(removed)).float()).softmax(1)

    flipping = quantus.PixelFlipping(features_in_step=x[0].numel() // STEPS, return_auc_per_sample=True, **options)
    infidelity = quantus.Infidelity(perturb_patch_sizes=[PATCH], n_perturb_samples=RUNS, **options)
    return dict(zip(METRICS, (lambda: run(flipping), road, lambda: run(infidelity)), strict=True))


def floor(model: nn.Module, x: Tensor, forwards: int) -> None:
    """Run the network as often as a metric does for all images."""
    batch = x[:1].repeat(4, 1, 1, 1)
    with torch.no_grad():
        for start in range(0, len(x) * forwards, 4):
            model(batch[: len(x) * forwards - start])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args(arguments)
    model = saliency.load("efficientnet_lite0")
    method = GradCAM(model)
    paths = photos(options.images)
    x, explanation, first = method.read(paths).inputs, method.attribute(paths), method.attribute(paths[0])
    classes = [index for index in explanation.target if index is not None]
    has_quantus = find_spec("quantus") is not None
    theirs = quantus_calls(model, x, classes, heatmap(explanation)) if has_quantus else {}
    print(f"## Metrics of {options.images} photos on EfficientNet-Lite0, one thread\n")
    print("Times are CPU seconds of each image.\n")
    print("| metric | ours, with controls | ours | floor | Quantus | ours / floor | Quantus / floor | Quantus / ours |")
    print("|---|---|---|---|---|---|---|---|")
    for name, metric in METRICS.items():
        contenders: dict[str, Callable[[], object]] = {
            "with controls": partial(metric.measure, first, method=method, progress=False),
            "ours": partial(metric.measure, explanation, method=method, progress=False, controls=False),
            "floor": partial(floor, model, x, FORWARDS[name]),
        }
        if has_quantus:
            contenders["theirs"] = theirs[name]
        timings = interleaved(contenders, options.rounds, warm_up=options.images == 1)
        images = {"with controls": 1}
        cells = [f"{median(timing.cpu) / images.get(who, options.images):.2f}" for who, timing in timings.items()]
        cells += [] if has_quantus else ["not installed"]
        cells += [f"{ratio(timings['ours'], timings['floor']):.2f}"]
        if has_quantus:
            factor = ratio(timings["theirs"], timings["ours"])
            cells += [f"{ratio(timings['theirs'], timings['floor']):.2f}"]
            cells += [f"{factor:.1f} (>= {TARGET} {'holds' if factor >= TARGET else 'MISSED'})"]
        print(f"| {name} | {' | '.join(cells)} |")
    print(f"\n{mprt(VanillaGradient(model), paths[0], options.rounds)}\n{mprt(method, paths[0], options.rounds)}\n")


def mprt(method: Attribution, path: str, rounds: int) -> str:
    """Return a line with the time of MPRT over all layers, against as many calls of the method and one more."""
    explanation = method.attribute(path)
    x, calls = method.read(path).inputs, 1 + len(layers_from_the_top(method, method.read(path).inputs))

    def plain() -> None:
        for _ in range(calls):
            method.attribute(x, explanation.target[0])

    measured = partial(MPRT().measure, explanation, method=method, progress=False)
    timings = interleaved({"plain": plain, "measured": measured}, max(3, rounds))
    share = ratio(timings["measured"], timings["plain"])
    return f"MPRT of {method.name}: {share:.2f} of {calls} calls of the method; target <= 1.05."


if __name__ == "__main__":
    main()
