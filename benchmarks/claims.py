"""Measure the figures that the guides state about the five photos and the bundled networks."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import cast
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from captum.attr import IntegratedGradients as CaptumIntegratedGradients
from PIL import Image
from torch import Tensor

import saliency
from saliency.attribution.passes import Passes
from saliency.evaluation.metrics.method_metrics import randomise
from saliency.io.geometry import Frame
from saliency.methods import METHODS
from saliency.render.figure import _centre

PHOTOS = sorted((Path(__file__).parents[1] / "assets").glob("*.jpg"))
COFFEE, CAT = (next(photo for photo in PHOTOS if photo.stem == name) for name in ("coffee", "chelsea"))


def spread() -> Iterator[tuple[str, str]]:
    """Yield the percentage of pixels above half of the maximum; docs/limits.md."""
    model = saliency.load("efficientnet_lite0")
    for method in (saliency.FusedCAM(model), saliency.GradCAM(model)):
        maps = [saliency.heatmap(method.attribute(photo)) for photo in PHOTOS]
        shares = [100 * float((heat > heat.max() / 2).double().mean()) for heat in maps]
        yield f"{type(method).__name__}: pixels above half of the maximum, %", between(shares)


def random_classifier() -> Iterator[tuple[str, str]]:
    """Yield the similarity of maps before and after the classifier is randomised; docs/limits.md."""
    model = saliency.load("efficientnet_lite0")
    changed = copy.deepcopy(model)
    randomise(changed, ["classifier"], 0)
    for name in ("full_grad", "eigen_grad_cam", "layer_cam", "grad_cam_plus_plus", "rectgrad", "grad_cam", "lrp"):
        pairs = []
        for photo in PHOTOS:
            before = METHODS[name](model).attribute(photo)
            after = METHODS[name](changed).attribute(photo, before.target)
            pairs.append(cosine(before.values.sum(1), after.values.sum(1)))
        yield (
            f"{METHODS[name].__name__}: cosine of maps with a random classifier",
            f"mean {mean(pairs):.2f}, {between(pairs)}",
        )


def grid() -> Iterator[tuple[str, str]]:
    """Yield the share of positive relevance on the explained one of two photos side by side; docs/limits.md."""
    model = saliency.load("efficientnet_lite0")
    inputs = [saliency.GradCAM(model).read(photo).inputs for photo in PHOTOS]
    top = [int(model(x).argmax()) for x in inputs]
    for cls in (saliency.RectGrad, saliency.GradCAM):
        method, shares = cls(model, preprocess=None), []
        for pair in combinations(range(len(PHOTOS)), 2):
            both = torch.cat([inputs[number] for number in pair], 3)
            for side, number in enumerate(pair):
                heat = saliency.heatmap(method.attribute(both, top[number])).clamp(min=0)
                shares.append(float(heat.chunk(2, 2)[side].sum() / heat.sum()))
        yield f"{cls.__name__}: grid pointing game of two photos and their classes, all pairs", between(shares)


def edge_detector() -> Iterator[tuple[str, str]]:
    """Yield insertion and deletion of gradients and of the edges of the image; docs/limits.md."""
    model = saliency.load("efficientnet_lite0")
    for cls in (saliency.VanillaGradient, saliency.InputXGradient):
        found: dict[str, list[tuple[float, float]]] = {"insertion": [], "deletion": []}
        for photo in PHOTOS:
            explanation = cls(model).attribute(photo)
            for name in found:
                measured = saliency.metrics.measure(name, explanation, method=cls(model), controls=["edges"])[0]
                found[name].append((float(measured.values), float(measured.controls["edges"].values)))
        for name, pairs in found.items():
            own, edges = (mean(list(column)) for column in zip(*pairs, strict=True))
            yield f"{cls.__name__}: {name}, mean over the photos", f"{own:.3f}; edges of the image {edges:.3f}"


def few_masks() -> Iterator[tuple[str, str]]:
    """Yield how close half of the effects of ViT-CX are to the lowest one; docs/limits.md."""
    model = saliency.load("efficientnet_lite0")
    kept: list[Tensor] = []
    effects = saliency.ViTCX.effects

    def recorded(method: saliency.ViTCX, passes: Passes, masks: Tensor) -> Tensor:
        kept.append(effects(method, passes, masks))
        return kept[-1]

    with patch.object(saliency.ViTCX, "effects", recorded):
        for target in (saliency.probability("espresso"), "espresso"):
            explanation = saliency.ViTCX(model).attribute(COFFEE, target)
            low, high = kept[-1].min(), kept[-1].max()
            share = 100 * float((kept[-1].median() - low) / (high - low))
            score = explanation.target_names[0]
            yield f"ViT-CX, {score}: range of the lower half of {len(kept[-1])} effects, %", f"{share:.0f}"


def captum() -> Iterator[tuple[str, str]]:
    """Yield the difference between integrated gradients of captum and of the toolkit; docs/migration.md."""
    for dtype in (torch.float32, torch.float64):
        model = saliency.load("efficientnet_lite0").to(dtype)
        differences = []
        for photo in PHOTOS:
            x = saliency.GradCAM(model).read(photo).inputs.to(dtype)
            top = int(model(x).argmax())
            ours = saliency.IntegratedGradients(model, steps=32).attribute(x, top).values
            theirs = CaptumIntegratedGradients(model).attribute(x, target=top, n_steps=32, internal_batch_size=4)
            differences.append(float((ours - theirs).abs().max() / theirs.abs().max()))
        title = f"integrated gradients of 32 steps in {dtype}: difference from captum, of the largest value"
        yield title, between(differences)


def ledgers() -> Iterator[tuple[str, str]]:
    """Yield the share of the score that reaches the pixels by composite; docs/relevance.md."""
    model = saliency.load("efficientnet_lite0")
    for composite in ("gamma", "epsilon_plus", "epsilon"):
        explanation = saliency.LRP(model, composite=composite).attribute(COFFEE, "espresso")
        ledger = cast("Tensor", explanation.ledger)[0] / explanation.scores
        shares = dict(zip(explanation.ledger_names, ledger.tolist(), strict=True))
        held = f"; stabiliser {100 * shares['stabiliser']:.0f}" if "stabiliser" in shares else ""
        pixels = 100 * float(explanation.values.sum() / explanation.scores)
        yield f"LRP, {composite}, espresso: % of the score at the pixels", f"{pixels:.1g}{held}"


def residuals() -> Iterator[tuple[str, str]]:
    """Yield the residual of integrated gradients; docs/relevance.md, docs/accuracy.md and the class."""
    model = saliency.load("efficientnet_lite0")
    cases = {
        "1 node": saliency.IntegratedGradients(model, steps=1),
        "32 nodes": saliency.IntegratedGradients(model, steps=32),
        "50 nodes": saliency.IntegratedGradients(model, steps=50),
        "a tolerance of 1 %": saliency.IntegratedGradients(model, tolerance=0.01),
    }
    exact = [saliency.IntegratedGradients(model, steps=256).attribute(photo) for photo in PHOTOS]
    for title, method in cases.items():
        found = [method.attribute(photo) for photo in PHOTOS]
        missing = [float(cast("Tensor", each.residual)) for each in found]
        rises = [float(each.values.sum()) + own for each, own in zip(found, missing, strict=True)]
        shares = [100 * abs(own / rise) for own, rise in zip(missing, rises, strict=True)]
        cosines = [cosine(each.values, best.values) for each, best in zip(found, exact, strict=True)]
        yield f"integrated gradients, {title}: residual, % of the rise of the score", between(shares)
        yield f"integrated gradients, {title}: cosine with 256 nodes", f"{min(cosines):.3f} to {max(cosines):.3f}"
        yield f"integrated gradients, {title}: passes", between([float(each.run_stats[0].passes) for each in found])


def patches() -> Iterator[tuple[str, str]]:
    """Yield how much relevance cancels within a patch; docs/transformers.md."""
    scenes = saliency.testbed.draw_scenes(50, seed=1_000_000)
    for name in ("shapes_window", "shapes_vit"):
        model = saliency.load(name)
        labels = scenes.labels.tolist()
        pixels = saliency.AttnLRP(model, at="pixels").attribute(scenes.images, labels).values.sum(1, keepdim=True)
        tokens = saliency.AttnLRP(model, at="patches").attribute(scenes.images, labels).values
        edge = pixels.shape[2] // tokens.shape[2]
        sums, sizes = (F.avg_pool2d(part, edge) * edge**2 for part in (pixels, pixels.abs()))
        yield (
            f"{name}: magnitudes of the pixels of a patch / magnitude of their sum",
            f"{float(sizes.sum() / sums.abs().sum()):.1f}",
        )
        strong = tokens.abs() > tokens.abs().amax((1, 2, 3), keepdim=True) / 10
        other = 100 * float((sums.sign() != tokens.sign())[strong].double().mean())
        yield f"{name}: strong patches (above 10 % of the largest) of another sign than their pixels, %", f"{other:.0f}"


def half_precision() -> Iterator[tuple[str, str]]:
    """Yield the difference of maps in bfloat16 from maps in float32; docs/transformers.md."""
    scenes = saliency.testbed.draw_scenes(8, seed=1_000_000)
    model = saliency.load("shapes_vit")
    names = [
        name
        for name, cls in METHODS.items()
        if cls.needs.attention or name in ("vit_cx", "attn_lrp", "cp_lrp", "grad_cam")
    ]
    for name in names:
        exact = METHODS[name](model)
        x = exact.read(scenes.images).inputs
        half = METHODS[name](copy.deepcopy(model).bfloat16())
        labels = scenes.labels.tolist()
        maps = [
            method.attribute(x.to(dtype), labels).values.float().flatten(1)
            for method, dtype in ((exact, torch.float32), (half, torch.bfloat16))
        ]
        shares = (maps[1] - maps[0]).norm(dim=1) / maps[0].norm(dim=1)
        yield (
            f"{METHODS[name].__name__}, shapes_vit: difference in bfloat16, % of the norm, median",
            f"{100 * float(shares.median()):.1f}",
        )


def matches() -> Iterator[tuple[str, str]]:
    """Yield how many drawn matches connect the same part of a mirrored photo; docs/pairs.md."""
    model = saliency.load("efficientnet_lite0")
    model.classifier = torch.nn.Identity()
    image = Image.open(CAT)
    mirrored = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).crop((40, 20, 400, 300))
    for method in (saliency.HiResCAM(model, "blocks.4"), saliency.LRP(model)):
        found = saliency.matches(method, image, mirrored, passes=24)
        first, second = cast("tuple[Frame, Frame]", found.frames)
        values = largest = found.values.double().clamp(min=0)
        for _ in range(2):  # the maximum over the neighbours in both images
            largest = F.max_pool2d(largest, 3, 1, 1).permute(2, 3, 0, 1)
        strongest = torch.where(values == largest, values, 0).flatten().topk(20).indices
        cell = (second.box[2] - second.box[0]) / values.shape[3]
        everywhere = [_centre(second, at, values.shape[2:]) for at in np.ndindex(*values.shape[2:])]
        near, by_chance = [], []
        for at in zip(*(index.tolist() for index in torch.unravel_index(strongest, values.shape)), strict=True):
            x, y = _centre(first, at[:2], values.shape[:2])
            same = (image.width - 1 - x - 40, y - 20)
            near.append(float(math.dist(_centre(second, at[2:], values.shape[2:]), same) < 1.5 * cell))
            by_chance.append(mean([float(math.dist(other, same) < 1.5 * cell) for other in everywhere]))
        title = f"{type(method).__name__}: drawn matches within 1.5 cells of the same part, %"
        yield title, f"{100 * mean(near):.0f}; random matches {100 * mean(by_chance):.0f}"


def seconds() -> Iterator[tuple[str, str]]:
    """Yield the time of methods with a limit of 2 seconds; docs/uncertainty.md. Needs an idle machine."""
    model = saliency.load("efficientnet_lite0")
    for name, cls in METHODS.items():
        if hasattr(cls, "seconds") and cls.__module__.startswith("saliency.methods") and not cls.needs.attention:
            own = {"grid": 2} if name == "sobol" else {}
            stats = cls(model, seconds=2, **own).attribute(COFFEE, "espresso").run_stats[0]
            yield f"{cls.__name__}(seconds=2)", f"{stats.seconds:.2f} s ({stats.stopped})"


def cosine(first: Tensor, second: Tensor) -> float:
    """Return the cosine of two maps up to its sign."""
    return abs(float(torch.cosine_similarity(first.flatten(), second.flatten(), 0)))


def mean(values: list[float]) -> float:
    """Return the mean."""
    return math.fsum(values) / len(values)


def between(values: list[float]) -> str:
    """Return the smallest and the largest value."""
    return f"{min(values):.2g} to {max(values):.2g}"


FIGURES = (
    spread,
    random_classifier,
    grid,
    edge_detector,
    few_masks,
    captum,
    ledgers,
    residuals,
    patches,
    half_precision,
    matches,
    seconds,
)


def main() -> None:
    """Print the table."""
    print("| figure | value |\n|---|---|")
    for measure in FIGURES:
        for title, value in measure():
            print(f"| {title} | {value} |", flush=True)


if __name__ == "__main__":
    main()
