"""Measure how often a row of the trust card is clear for maps that ignore the model, and for maps that do not.

`python -m benchmarks.trust` measures 200 maps of ten kinds that ignore the prediction, those of nine methods, and
altered maps of Grad-CAM. The values of each map and of its controls are stored in build/trust/, so that a second run
resumes, and rules can be compared without the network.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import saliency
from saliency import METHODS, Explanation, generator
from saliency.inspection.trust import OTHERS
from saliency.metrics.agreement import RankCorrelation
from saliency.metrics.base import CONTROLS, Metric, Outcome, SharedResults, Subject
from saliency.metrics.faithfulness import Deletion, Infidelity, Insertion
from saliency.metrics.randomisation import layers_from_the_top, randomise
from saliency.metrics.road import ROAD
from saliency.render.heatmap import smoothed

ASSETS, CACHE = Path(__file__).parent.parent / "assets", Path("build/trust")
PHOTOS = ("camera", "chelsea", "coffee", "rocket", "astronaut")
KNOWN = PHOTOS[:4]
"""The photos whose top class is right."""

METRICS: list[Metric] = [
    Deletion(steps=4),
    Insertion(steps=4),
    ROAD(shares=(0.2, 0.5)),
    Infidelity(samples=60),
]
RIGHT: dict[str, dict[str, Any]] = {
    "grad_cam": {},
    "layer_cam": {},
    "score_cam": {},
    "lrp": {},
    "integrated_gradients": {},
    "input_x_gradient": {},
    "occlusion": {},
    "rise": {"samples": 500},
    "kernel_shap": {"samples": 300},
}
EDGE = 224


class Case(NamedTuple):
    """A map of a photo."""

    group: str  # "null", "right" or "altered"
    kind: str
    photo: str
    seed: int
    explanation: Explanation


class Controlled(Subject):
    """A map with its controls, and the edges of the image."""

    def controlled(self, cells: Tensor) -> Tensor:
        """Return the map, the controls and the edges (M, N, H, W)."""
        return torch.cat([super().controlled(cells), edges(self.images, 0)[None].to(cells)])


@cache
def network() -> torch.nn.Module:
    """Return the bundled network."""
    return saliency.load("efficientnet_lite0")


@cache
def explained(photo: str, name: str) -> Explanation:
    """Return the explanation of the top class of a photo by a method with the options of `RIGHT`."""
    file = CACHE / f"{photo}.{name}.pt"
    method = METHODS[name](network(), **RIGHT[name])
    if not file.exists():
        torch.save(method.attribute(ASSETS / f"{photo}.jpg").values, file)
    return replace(base(photo), values=torch.load(file), method=name, sign=method.sign)


@cache
def base(photo: str) -> Explanation:
    """Return the explanation by Grad-CAM, whose values are replaced."""
    return METHODS["grad_cam"](network()).attribute(ASSETS / f"{photo}.jpg")


def with_map(photo: str, map_: Tensor) -> Explanation:
    """Return an explanation of a photo by a map (h, w) of signed values."""
    return replace(base(photo), values=map_.float()[None, None], method="map", sign="signed")


def edges(images: Tensor, sigma: float) -> Tensor:
    """Return the norm of the gradient of images (N, C, H, W), smoothed by `sigma` pixels: (N, H, W)."""
    grey = images.mean(1)
    down, across = (grey.roll(1, axis) - grey.roll(-1, axis) for axis in (1, 2))
    return smoothed(torch.hypot(down, across), sigma / EDGE)


def blobs(edge: int, count: int, source: torch.Generator) -> Tensor:
    """Return the sum of Gaussians (edge, edge) at random places, of random widths and heights."""
    at = (torch.arange(edge) + 0.5) / edge
    total = torch.zeros(edge, edge)
    for down, across, width, height in torch.rand(count, 4, generator=source).tolist():
        rows, columns = (torch.exp(-0.5 * ((at - place) / (0.05 + 0.15 * width)).square()) for place in (down, across))
        total += (0.2 + height) * rows[:, None] * columns
    return total


@cache
def randomised(seed: int) -> torch.nn.Module:
    """Return the network with random weights."""
    model = saliency.load("efficientnet_lite0")
    method = METHODS["grad_cam"](model)
    images = method.read(ASSETS / "coffee.jpg").tensor
    randomise(model, layers_from_the_top(method, images), seed)
    return model


def null_maps(photo: str, variant: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the kind and the values (h, w) of ten maps that ignore the prediction."""
    source = generator(variant, PHOTOS.index(photo))

    def noise(*size: int) -> Tensor:
        return torch.randn(*size, generator=source)

    yield "pixel noise", noise(EDGE, EDGE)
    yield "coarse noise", noise(*[(7, 14, 28, 56)[variant]] * 2)
    cells = (14, 16)[variant % 2]
    yield "blocks", noise(cells, cells).repeat_interleave(EDGE // cells, 0).repeat_interleave(EDGE // cells, 1)
    yield "smooth noise", smooth(noise(EDGE, EDGE), (4, 8, 16, 32)[variant])
    yield "blobs", blobs(EDGE, (1, 2, 4, 8)[variant], source)
    yield "coarse blobs", blobs((7, 7, 14, 14)[variant], (1, 3, 1, 3)[variant], source)
    image = METHODS["grad_cam"](network()).read(ASSETS / f"{photo}.jpg").tensor
    yield "edges", edges(image, (0, 1, 2, 4)[variant])[0]
    for kind, names in (
        ("CAMs of random weights", ("grad_cam", "layer_cam", "grad_cam", "layer_cam")),
        ("pixels of random weights", ("input_x_gradient", "vanilla_gradient", "guided_backprop", "input_x_gradient")),
    ):
        explanation = METHODS[names[variant]](randomised(variant)).attribute(
            ASSETS / f"{photo}.jpg", base(photo).target[0]
        )
        yield kind, saliency.heatmap(explanation, size=tuple(explanation.values.shape[2:]))[0]
    others = [other for other in PHOTOS if other != photo]
    name = ("grad_cam", "lrp", "occlusion", "layer_cam")[(PHOTOS.index(photo) + variant) % 4]
    yield "other photos", saliency.metrics.base.reduced_maps(explained(others[variant], name), None)[0]


def smooth(map_: Tensor, sigma: float) -> Tensor:
    at = torch.arange(EDGE).float()
    weights = (-0.5 * ((at - at[:, None]) / sigma) ** 2).softmax(1)
    return weights @ map_ @ weights.T


def altered(photo: str) -> Iterator[tuple[str, Tensor]]:
    """Yield maps of Grad-CAM that are made wrong."""
    map_ = explained(photo, "grad_cam").values[0, 0]
    order = torch.randperm(map_.numel(), generator=generator(0))
    yield "shuffled", map_.flatten()[order].view_as(map_)
    yield "negated", -map_
    yield "inverted", map_.max() - map_
    yield "flipped", map_.flip(1)
    yield "upside down", map_.flip(0)


def cases() -> Iterator[Case]:
    """Yield all maps, such that the first ones are of all kinds."""
    for variant in range(4):
        for photo in PHOTOS:
            for kind, map_ in null_maps(photo, variant):
                yield Case("null", kind, photo, variant, with_map(photo, map_))
        photo = KNOWN[variant]
        for name in RIGHT:
            yield Case("right", name, photo, 0, explained(photo, name))
        for kind, map_ in altered(photo):
            yield Case("altered", kind, photo, 0, with_map(photo, map_))


@cache
def references(photo: str) -> list[Explanation]:
    """Return the explanations with which the map is compared."""
    return [METHODS[name](network()).attribute(ASSETS / f"{photo}.jpg") for name in OTHERS]


def values(case: Case, shared: SharedResults, method: saliency.Attribution) -> dict[str, Any]:
    """Return the values of all metrics for the map, its controls and the edges."""
    context = {"method": method, "inputs": ASSETS / f"{case.photo}.jpg", "seed": case.seed}
    subject = Controlled(case.explanation, shared=shared, **context)
    outcomes: dict[Metric, Outcome] = METRICS[0].together(METRICS, subject)
    rows = {
        metric.name: {
            "values": one.values[:, 0].tolist(),
            "errors": None if one.difference_error is None else one.difference_error[:, 0].tolist(),
            "curves": None if one.curves is None else one.curves[:, 0].tolist(),
        }
        for metric, one in outcomes.items()
    }
    others = [other for other in references(case.photo) if other.method != case.explanation.method]
    each = [RankCorrelation().outcome(Controlled(case.explanation, reference=one, **context)).values for one in others]
    rows["rank_correlation"] = {"values": torch.stack(each).mean(0)[:, 0].tolist(), "errors": None, "curves": None}
    return {**case._replace(explanation=None)._asdict(), "controls": [*CONTROLS, "edges"], "rows": rows}
