"""Measure how often a row of the trust card is clear for maps that ignore the model, and for maps that do not.

`python -m benchmarks.trust` measures 200 maps of ten kinds that ignore the prediction, those of nine methods, and
altered maps of Grad-CAM. The values of each map and of its controls are stored in build/trust/, so that a second run
resumes, and rules can be compared without the network.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import saliency
from saliency import METHODS, Explanation
from saliency.attribution.heatmap import reduced_maps
from saliency.evaluation.metrics.base import ABSOLUTE, RANDOM_CONTROLS, RELATIVE, SPREAD, SharedResults, Subject, edges
from saliency.evaluation.metrics.faithfulness import Deletion, Infidelity, Insertion
from saliency.evaluation.metrics.map_metrics import RankCorrelation
from saliency.evaluation.metrics.method_metrics import layers_from_the_top, randomise
from saliency.evaluation.metrics.road import ROAD
from saliency.evaluation.trust import CONTROLS, OTHERS, UNTIL
from saliency.extending import generator
from saliency.metrics import Metric
from saliency.render.scaling import smoothed

ASSETS, CACHE = Path(__file__).parent.parent / "assets", Path("build/trust")
PHOTOS = ("camera", "chelsea", "coffee", "rocket", "astronaut")
KNOWN = PHOTOS[:4]
"""The photos whose top class is right."""

CURVES: list[Metric] = [Deletion(steps=2, until=UNTIL), Insertion(steps=2, until=UNTIL), ROAD(shares=(0.2, 0.5))]
"""The metrics of a card that run the network for each map."""

RIGHT: dict[str, dict[str, Any]] = {
    "grad_cam": {},
    "layer_cam": {},
    "score_cam": {},
    "lrp": {},
    "integrated_gradients": {},
    "input_x_gradient": {},
    "occlusion": {},
    "rise": {"passes": 400},
    "kernel_shap": {"passes": 300},
}
"""The methods whose maps are right, with their options."""

ALTERED = ("shuffled", "negated", "inverted", "flipped", "upside down")
"""Changes that make a map of Grad-CAM wrong."""

EDGE = 224
Record = dict[str, Any]


class Case(NamedTuple):
    """A map of a photo."""

    group: str  # "null", "right" or "altered"
    kind: str
    photo: str
    seed: int
    explanation: Explanation


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
    images = method.read(ASSETS / "coffee.jpg").inputs
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
    yield "smooth noise", smoothed(noise(1, EDGE, EDGE), (4, 8, 16, 22)[variant] / EDGE)[0]
    yield "blobs", blobs(EDGE, (1, 2, 4, 8)[variant], source)
    yield "coarse blobs", blobs((7, 7, 14, 14)[variant], (1, 3, 1, 3)[variant], source)
    image = METHODS["grad_cam"](network()).read(ASSETS / f"{photo}.jpg").inputs
    yield "edges", smoothed(edges(image), (0, 1, 2, 4)[variant] / EDGE)[0]
    for kind, names in (
        ("CAMs of random weights", ("grad_cam", "layer_cam", "grad_cam", "layer_cam")),
        ("pixels of random weights", ("input_x_gradient", "vanilla_gradient", "guided_backprop", "input_x_gradient")),
    ):
        explanation = METHODS[names[variant]](randomised(variant)).attribute(
            ASSETS / f"{photo}.jpg", base(photo).target[0]
        )
        yield kind, reduced_maps(explanation, None)[0]
    others = [other for other in PHOTOS if other != photo]
    name = ("grad_cam", "lrp", "occlusion", "layer_cam")[(PHOTOS.index(photo) + variant) % 4]
    yield "other photos", reduced_maps(explained(others[variant], name), None)[0]


def altered_maps(photo: str) -> dict[str, Tensor]:
    """Return maps of Grad-CAM that are made wrong."""
    map_ = explained(photo, "grad_cam").values[0, 0]
    order = torch.randperm(map_.numel(), generator=generator(0))
    maps = (map_.flatten()[order].view_as(map_), -map_, map_.max() - map_, map_.flip(1), map_.flip(0))
    return dict(zip(ALTERED, maps, strict=True))


def cases() -> Iterator[Case]:
    """Yield all maps, such that the first ones are of all kinds."""
    for variant in range(4):
        for photo in PHOTOS:
            for kind, map_ in null_maps(photo, variant):
                yield Case("null", kind, photo, variant, with_map(photo, map_))
        photo = KNOWN[variant]
        for name in RIGHT:
            yield Case("right", name, photo, 0, explained(photo, name))
        for kind, map_ in altered_maps(photo).items():
            yield Case("altered", kind, photo, 0, with_map(photo, map_))


@cache
def references(photo: str) -> list[Explanation]:
    """Return the explanations with which maps of a photo are compared."""
    return [METHODS[name](network()).attribute(ASSETS / f"{photo}.jpg") for name in OTHERS]


def measured(case: Case, shared: SharedResults) -> Record:
    """Return the values of all metrics for the map, and for its controls: a constant and those of a card.

    The random controls of metrics that run the network are left out, as NaN, where the map does not beat the centre.
    For altered maps all are measured.
    """
    context: dict[str, Any] = {
        "method": METHODS["grad_cam"](network()),
        "inputs": ASSETS / f"{case.photo}.jpg",
        "seed": case.seed,
        "shared": shared,
        "controls": ("constant", *CONTROLS),
    }
    few, usual = (Subject(case.explanation, random_controls=count, **context) for count in (0, RANDOM_CONTROLS))
    rows: Record = {}
    for metric, row in _rows(CURVES, few).items():
        own, _, centre, _ = row["values"]
        is_worse = own == centre or (own < centre) == (metric.name in HIGHER)
        if is_worse and case.group != "altered":
            rows[metric.name] = row | {"values": [*row["values"], *[math.nan] * RANDOM_CONTROLS]}
        else:
            rows[metric.name] = _rows([metric], usual)[metric]
    infidelity = Infidelity(passes=60)
    rows["infidelity"] = _rows([infidelity], usual)[infidelity]
    others = [other for other in references(case.photo) if other.method != case.explanation.method]
    subjects = [Subject(case.explanation, reference=other, **context) for other in others]
    each = [RankCorrelation().outcome(subject).values[:, 0] for subject in subjects]
    rows["rank_correlation"] = {"values": torch.stack(each).mean(0).tolist(), "errors": None}
    return {"group": case.group, "kind": case.kind, "photo": case.photo, "seed": case.seed, "rows": rows}


def _rows(metrics: Sequence[Metric], subject: Subject) -> dict[Metric, Record]:
    outcomes = metrics[0].together(metrics, subject)
    return {
        metric: {
            "values": one.values[:, 0].tolist(),
            "errors": None if one.difference_error is None else one.difference_error[:, 0].tolist(),
        }
        for metric, one in outcomes.items()
    }


HIGHER = ("insertion", "rank_correlation")
"""The metrics of which higher values are better."""

RULES = {
    "as on the card": (("centre", "edges"), SPREAD),
    "1.645 standard deviations": (("centre", "edges"), 1.645),
    "1.78 standard deviations": (("centre", "edges"), 1.78),
    "better than all 19 draws": (("centre", "edges"), math.nan),
    "without the edges": (("centre",), SPREAD),
    "the constant instead of the edges": (("centre", "constant"), SPREAD),
}
"""The controls of each rule, and the standard deviations of the random ones; NaN for their range."""


def verdict(metric: str, row: Record, rule: str = "as on the card") -> str:
    """Return "clear", "worse" or "" for the values of a map and its controls, by one of `RULES`."""
    names, spread = RULES[rule]
    values = np.array(row["values"]) * (1 if metric in HIGHER else -1)
    errors = np.zeros(len(values)) if row["errors"] is None else 2 * np.array(row["errors"])
    own, random, fixed = values[0], values[4:], [1 + ("constant", *CONTROLS).index(name) for name in names]
    if math.isnan(spread):
        ends = random.min(), random.max()
    else:
        ends = tuple(random.mean() + sign * spread * random.std(ddof=1) for sign in (-1, 1))
    low, high = min(ends[0], *(values - errors)[fixed]), max(ends[1], *(values + errors)[fixed])
    if np.isnan(random).any() or np.isclose(own, [low, high], rtol=RELATIVE, atol=ABSOLUTE).any():
        return ""
    return "clear" if own > high else "worse" if own < low else ""


def table(records: Sequence[Record]) -> None:
    """Print how often each row is clear, by rule and group, and by kind."""
    names = list(records[0]["rows"])
    print(f"| maps | rule | {' | '.join(names)} | any of the five |\n|---|---|{'---|' * (len(names) + 1)}")
    for group in ("null", "right"):
        own = [record["rows"] for record in records if record["group"] == group]
        for rule in RULES:
            _print_rates(f"{len(own)} {group} | {rule}", names, own, rule)
    print(f"\n| kind | {' | '.join(names)} | any of the five |\n|---|{'---|' * (len(names) + 1)}")
    for kind in dict.fromkeys(record["kind"] for record in records if record["group"] != "altered"):
        _print_rates(kind, names, [record["rows"] for record in records if record["kind"] == kind])
    print("\n| map | clear rows of five | worse rows |\n|---|---|---|")
    for kind in dict.fromkeys(["grad_cam", "lrp", "occlusion", *ALTERED]):
        own = [record["rows"] for record in records if record["kind"] == kind]
        verdicts = [[verdict(name, row) for name, row in rows.items()] for rows in own]
        clear, worse = ([each.count(word) for each in verdicts] for word in ("clear", "worse"))
        print(f"| {kind} | {', '.join(map(str, clear))} | {', '.join(map(str, worse))} |")


def _print_rates(title: str, names: Sequence[str], own: Sequence[Record], rule: str = "as on the card") -> None:
    clear = np.array([[verdict(name, rows[name], rule) == "clear" for name in names] for rows in own])
    rates = [*clear.mean(0), clear.any(1).mean()]
    print(f"| {title} | {' | '.join(f'{rate:.2f}' for rate in rates)} |")


def main() -> None:
    """Measure all maps that are not stored yet, and print the tables."""
    torch.set_num_threads(1)
    CACHE.mkdir(parents=True, exist_ok=True)
    shared: dict[tuple[str, int], SharedResults] = defaultdict(SharedResults)
    for case in cases():
        file = CACHE / f"{case.group}.{case.kind.replace(' ', '_')}.{case.photo}.{case.seed}.json"
        if not file.exists():
            file.write_text(json.dumps(measured(case, shared[case.photo, case.seed])))
    table([json.loads(file.read_text()) for file in sorted(CACHE.glob("*.json"))])


if __name__ == "__main__":
    main()
