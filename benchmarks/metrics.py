"""Measure pixel flipping, ROAD and infidelity over images on the bundled network, next to Quantus if it is installed.

Both measure the map alone, without controls. The floor is as many forwards of the network alone, 2 images at a time,
which is fastest on a CPU. MPRT is measured against calls of the method. ROAD of Quantus raises for images with
channels: its row calls its imputation and the network, without the metric.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import saliency
from benchmarks.timing import Contender, interleaved, ratio, verdict
from saliency import Attribution, GradCAM, VanillaGradient
from saliency.attribution.explanation import heatmap
from saliency.evaluation.metrics.faithfulness import Deletion, Infidelity
from saliency.evaluation.metrics.method_metrics import MPRT, layers_from_the_top
from saliency.evaluation.metrics.road import ROAD
from saliency.metrics import Metric

ASSETS = Path(__file__).parent.parent / "assets"
IMAGES = 8
STEPS, PATCH, RUNS = 168, 56, 12
"""The steps of pixel flipping; the edge of the squares of infidelity, and how often they cover the image."""

METRICS: dict[str, Metric] = {
    "pixel flipping, 168 steps": Deletion(steps=STEPS),
    "ROAD, 9 shares": ROAD(),
    "infidelity, 192 squares": Infidelity(side=PATCH / 224, passes=RUNS * (224 // PATCH) ** 2, scaled=False),
}
FORWARDS = dict(zip(METRICS, (STEPS, 9, RUNS * (224 // PATCH) ** 2), strict=True))
"""The forwards of each image that each metric needs."""


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
    batch = x[:1].repeat(2, 1, 1, 1)
    with torch.no_grad():
        for start in range(0, len(x) * forwards, 2):
            model(batch[: len(x) * forwards - start])


def main() -> None:
    """Print the table."""
    model = saliency.load("efficientnet_lite0")
    method = GradCAM(model)
    paths = photos(IMAGES)
    x, explanation = method.read(paths).inputs, method.attribute(paths)
    classes = [index for index in explanation.target if index is not None]
    theirs = quantus_calls(model, x, classes, heatmap(explanation)) if find_spec("quantus") else {}
    print(f"## Metrics of {IMAGES} photos on EfficientNet-Lite0, one thread\n")
    print("Times are seconds of each image. The target for Quantus / ours was 20.\n")
    print("| metric | ours | floor | Quantus | ours / floor | Quantus / floor | Quantus / ours |")
    print("|---|---|---|---|---|---|---|")
    for name, metric in METRICS.items():
        contenders: dict[str, Contender] = {
            "ours": partial(metric.measure, explanation, method=method, progress=False, controls=False),
            "floor": partial(floor, model, x, FORWARDS[name]),
        }
        contenders |= {"theirs": theirs[name]} if theirs else {}
        timings = interleaved(contenders, warm_up=False)
        cells = [f"{timing.seconds / IMAGES:.2f}" for timing in timings.values()] + (
            [] if theirs else ["not installed"]
        )
        pairs = (("ours", "floor"), *([("theirs", "floor"), ("theirs", "ours")] if theirs else []))
        cells += [f"{ratio(timings[one], timings[other]):.2f}" for one, other in pairs]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print("\n| MPRT of | calls of the method | ratio to them | target |\n|---|---|---|---|")
    for each in (VanillaGradient(model), method):
        print(mprt(each, paths[0]), flush=True)


def mprt(method: Attribution, path: str) -> str:
    """Return the row of the time of MPRT over all layers, against as many calls of the method and one more."""
    explanation = method.attribute(path)
    x, calls = method.read(path).inputs, 1 + len(layers_from_the_top(method, method.read(path).inputs))

    def plain() -> None:
        for _ in range(calls):
            method.attribute(x, explanation.target[0])

    measured = partial(MPRT().measure, explanation, method=method, progress=False)
    timings = interleaved({"plain": plain, "measured": measured})
    share = ratio(timings["measured"], timings["plain"])
    return f"| {method.name} | {calls} | {share:.2f} | {verdict(share, 1.05)} |"


if __name__ == "__main__":
    main()
