"""Rank all methods on images where the right map is known, against maps that know nothing: `make testbed`.

    python -m benchmarks.testbed                 measure all, and write benchmarks/results/testbed.md; re-run to resume
    python -m benchmarks.testbed shapes_vit xor  only measure some cases, so that several processes can share the work
    python -m benchmarks.testbed distractor      print the table of docs/transformers.md, or its rows of some methods

The values of each image are kept in build/testbed. Delete this folder to measure again.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

import saliency
from benchmarks.train_testbed import HELD_OUT, train_network
from saliency import METHODS, NotApplicableError, SaliencyError
from saliency.inspection.comparison import holm
from saliency.metrics.base import control_maps, resized_within
from saliency.metrics.localisation import EnergyPointingGame, PointingGame, RelevanceRank, RocAuc
from saliency.render.heatmap import reduced_maps
from saliency.testbed import Scenes, Task, draw_scenes

RESULTS = Path(__file__).parent / "results" / "testbed.md"
PROGRESS = Path(__file__).parents[1] / "build" / "testbed"
IMAGES = 50
SLOW_IMAGES = 20
LEVEL = 0.05
DRAWS = 2000  # of the bootstrap

# Options of methods of many passes, which get SLOW_IMAGES. The window of the occlusion fits images of 64 pixels.
SLOW: dict[str, dict[str, Any]] = {
    "deep_lift": {},
    "deep_shap": {"samples": 5},
    "full_grad": {},
    "score_cam": {},
    "gscore_cam": {},
    "is_cam": {"steps": 3},
    "ss_cam": {"draws": 3},
    "ablation_cam": {},
    "recipro_cam": {},
    "integrated_gradients": {"steps": 16},
    "idgi": {"steps": 16},
    "expected_gradients": {"passes": 32},
    "guided_ig": {"steps": 32},
    "blur_ig": {"steps": 32},
    "feature_ablation": {},
    "lime": {"passes": 256},
    "kernel_shap": {"passes": 256},
    "shapley_sampling": {"passes": 256},
    "meaningful_perturbation": {"steps": 60},
    "extremal_perturbation": {"steps": 60},
    "occlusion": {"window": 8, "stride": 4},
    "rise": {"passes": 512},
    "smooth_grad": {"passes": 16},
    "smooth_grad_squared": {"passes": 16},
    "var_grad": {"passes": 16},
    "smooth_grad_cam_plus_plus": {"passes": 16},
    "sobol": {"passes": 256},
    "hsic": {"passes": 256},
    "tis": {"masks": 256},
    "vit_cx": {},
    "xrai": {"steps": 16},
}
CONTROLS = ("random", "constant", "centre", "edges")


@dataclass(frozen=True, slots=True)
class Case:
    """A task, a network that was made for it, and what is compared."""

    task: Task
    network: str

    @property
    def score(self) -> str:
        """The name of the number by which methods are ranked."""
        return {"two_objects": "class sensitivity", "xor": "both parts", "occlusion": "order"}.get(self.task, "energy")

    def __str__(self) -> str:
        """Return a name for titles and files."""
        return f"{self.task}-{self.network}"


CONVOLUTIONAL = (
    Case("planted", "shapes_cnn"),
    Case("planted", "shapes_resnet"),
    Case("sizes", "shapes_cnn"),
    Case("two_objects", "shapes_cnn"),
    Case("two_objects", "shapes_resnet"),
    Case("shortcut", "shapes_shortcut"),
    Case("xor", "shapes_xor"),
    Case("occlusion", "shapes_order"),
)
TRANSFORMERS = (Case("planted", "shapes_vit"), Case("two_objects", "shapes_vit"))


@dataclass(frozen=True, slots=True)
class Row:
    """Values of a method for each image, or the reason why there are none."""

    name: str
    reason: str
    values: dict[str, list[float]]
    seconds: float


# Maps and their values ------------------------------------------------------------------------------------------


@cache
def scenes_of(task: Task, count: int = IMAGES) -> Scenes:
    """Return images that training did not use.

    Those of "shortcut" have a watermark and no circle; in those of "occlusion", not all objects weigh the same.
    """
    if task not in ("shortcut", "occlusion"):
        return draw_scenes(count, seed=HELD_OUT, task=task)
    scenes = draw_scenes(2 * count, seed=HELD_OUT, task=task, watermarked=(0, 1, 1, 1, 1))
    usable = scenes.labels > 0 if task == "shortcut" else scenes.importance.amax(1) > scenes.importance.amin(1)
    return chosen(scenes, usable.nonzero()[:count, 0])


def chosen(scenes: Scenes, images: Any) -> Scenes:
    """Return some of the images."""
    return replace(scenes, **{field.name: getattr(scenes, field.name)[images] for field in fields(scenes)})


def targets_of(task: Task, scenes: Scenes) -> list[list[int]]:
    """Return the explained class of each image; for "two_objects" also that of the second object."""
    if task == "two_objects":
        return scenes.shapes.T.tolist()
    fixed = {"shortcut": 0, "occlusion": 1}  # circle, heavy
    return [[fixed[task]] * len(scenes.labels) if task in fixed else scenes.labels.tolist()]


def maps_of(method: str, model: Any, scenes: Scenes, targets: Iterable[list[Any]], **options: Any) -> Tensor:
    """Return the maps of a method for each list of targets, (T, N, 64, 64), in the sign of its authors.

    Raises:
        SaliencyError: The method does not apply to the model.
    """
    explainer = METHODS[method](model, **options)
    found = [explainer.attribute(scenes.images, target) for target in targets]
    return torch.stack([resized_within(reduced_maps(each, None), each.input_size).double() for each in found])


def controls(scenes: Scenes) -> dict[str, Tensor]:
    """Return maps (N, 64, 64) that know nothing about the prediction."""
    images = scenes.images.double()
    random = torch.rand(images[:, 0].shape, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    constant, centre, *_ = control_maps(torch.ones_like(random), 0)
    edges = torch.stack(torch.gradient(images, dim=(2, 3))).square().sum((0, 2)).sqrt()
    return dict(zip(CONTROLS, (random, constant, centre, edges), strict=True))


def energy(maps: Tensor, masks: Tensor) -> Tensor:
    """Return the shares (...,) of the positive parts of maps (..., N, 64, 64) that lie in masks (N, 64, 64)."""
    return EnergyPointingGame().compare(maps, masks)


def evidence_of(task: Task, scenes: Scenes) -> Tensor:
    """Return where the right map is, (N, 64, 64): for "shortcut", the watermark."""
    return (scenes.watermark if task == "shortcut" else scenes.evidence)[:, 0]


def values_of(case: Case, scenes: Scenes, maps: Tensor) -> dict[str, Tensor]:
    """Return the numbers of maps (T, N, 64, 64): (N,) each."""
    own, masks = maps[:1], evidence_of(case.task, scenes)
    other = scenes.masks[:, 0] if case.task == "shortcut" else scenes.distractor[:, 0]
    metrics = {"pointing": PointingGame(tolerance=0), "rank": RelevanceRank(), "AUC": RocAuc()}
    found = {"energy": energy(own, masks)[0], "other": energy(own, other)[0]}
    found |= {name: metric.compare(own, masks)[0].double() for name, metric in metrics.items()}
    special: dict[str, Callable[[Scenes, Tensor], Tensor]] = {
        "class sensitivity": class_sensitivity,
        "both parts": both_parts,
        "order": right_order,
    }
    return found | ({case.score: special[case.score](scenes, maps)} if case.score in special else {})


def class_sensitivity(scenes: Scenes, maps: Tensor) -> Tensor:
    """Return by how much the share on an object is larger in the map of its class than in that of the other: (N,)."""
    first, second = (energy(maps, scenes.masks[:, each]) for each in range(2))  # (2, N): by class
    return (first[0] - first[1] + second[1] - second[0]) / 2


def both_parts(scenes: Scenes, maps: Tensor) -> Tensor:
    """Return twice the smaller of the shares of the map on the two parts of "xor": (N,)."""
    parts = torch.stack([energy(maps[:1], scenes.masks[:, part])[0] for part in range(2)])
    return 2 * parts.amin(0)


def right_order(scenes: Scenes, maps: Tensor) -> Tensor:
    """Return the share of pairs of objects of different weight whose means are in this order; ties count half: (N,)."""
    means = (maps[0, :, None] * scenes.masks).sum((2, 3)) / scenes.masks.sum((2, 3))  # (N, 4)
    heavier = scenes.importance[:, :, None] > scenes.importance[:, None]
    right = (means[:, :, None] - means[:, None]).sign() / 2 + 0.5
    return (right * heavier).sum((1, 2)) / heavier.sum((1, 2))


def first(scenes: Scenes, maps: Tensor) -> Tensor:
    """Return for each image whether more of the map lies on the watermark than on each object, (N,) of 0 or 1."""
    objects = torch.stack([energy(maps, mask)[0] for mask in scenes.masks.unbind(1)])
    return (energy(maps, scenes.watermark[:, 0])[0] > objects.amax(0)).double()


# Measuring, which resumes ---------------------------------------------------------------------------------------


def measure_method(name: str, case: Case) -> Row:
    """Measure a method on the images of a case."""
    start = time.process_time()
    scenes = scenes_of(case.task)
    if name in SLOW:
        scenes = chosen(scenes, slice(SLOW_IMAGES // len(targets_of(case.task, scenes))))
    model, targets = saliency.load(case.network), targets_of(case.task, scenes)
    try:
        maps = maps_of(name, model, scenes, targets, **SLOW.get(name, {}))
    except SaliencyError as refusal:
        return Row(name, str(refusal), {}, 0.0)
    values = {key: found.tolist() for key, found in values_of(case, scenes, maps).items()}
    return Row(name, "", values, time.process_time() - start)


def measure_controls(case: Case) -> list[Row]:
    """Measure the controls on the images of a case. They are the same for each class."""
    scenes = scenes_of(case.task)
    rows = []
    for name, maps in controls(scenes).items():
        values = values_of(case, scenes, maps.expand(2, -1, -1, -1))
        rows.append(Row(name, "", {key: found.tolist() for key, found in values.items()}, 0.0))
    return rows


def resumed(case: Case) -> dict[str, Row]:
    """Return the rows of all methods. Those of an interrupted run are read."""
    file = PROGRESS / f"{case}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    done = {row["name"]: Row(**row) for row in map(json.loads, file.read_text().splitlines())}
    for name in METHODS:
        if name not in done:
            done[name] = measure_method(name, case)
            with file.open("a") as stream:
                stream.write(json.dumps(asdict(done[name])) + "\n")
            print(f"{case} {name} {done[name].seconds:.1f} s {done[name].reason[:80]}", file=sys.stderr, flush=True)
    return done


# Statistics -----------------------------------------------------------------------------------------------------


def p_value(values: Tensor, other: Tensor) -> float:
    """Return the one-sided p-value of the paired t-test that the mean of `values` exceeds that of `other`."""
    difference = values - other[: len(values)]
    error = standard_error(difference)
    if error < 1e-12:
        return float(difference.mean() <= 0)
    return float(stats.t.sf(float(difference.mean()) / error, len(values) - 1))


def standard_error(values: Tensor) -> float:
    """Return the standard error of the mean."""
    return float(values.std() / len(values) ** 0.5)


def corrected(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return p-values that are corrected by Holm for their number."""
    return dict(zip(p_values, holm(np.array(list(p_values.values()))).tolist(), strict=True))


def verdicts(scores: Mapping[str, Tensor]) -> dict[str, str]:
    """Return "better" than all controls, "worse" than the best one, or "" where neither is significant."""
    baselines = {name: scores[name] for name in CONTROLS}
    best = max(baselines, key=lambda name: float(baselines[name].mean()))
    methods = {name: values for name, values in scores.items() if name not in CONTROLS}
    better = corrected({name: max(p_value(own, each) for each in baselines.values()) for name, own in methods.items()})
    worse = corrected({name: p_value(-own, -baselines[best]) for name, own in methods.items()})
    return {
        name: "better" if better[name] < LEVEL else f"worse than {best}" if worse[name] < LEVEL else ""
        for name in methods
    }


def ranks(scores: Mapping[str, Tensor], weights: Tensor) -> dict[str, Tensor]:
    """Return the ranks of the mean scores, 1 for the best, under weights of the images (B, IMAGES): (B,) each."""
    means = torch.stack(
        [(weights[:, : len(own)] @ own) / weights[:, : len(own)].sum(1).clamp(min=1) for own in scores.values()]
    )  # (M, B)
    higher, tied = (means[:, None] > means).sum(0), (means[:, None] == means).sum(0)
    return dict(zip(scores, higher + (tied.double() + 1) / 2, strict=True))


def bootstrap_weights(case: Case) -> Tensor:
    """Return how often each image is drawn; the first row draws each once: (1 + DRAWS, IMAGES)."""
    generator = torch.Generator().manual_seed(sum(map(ord, str(case))))
    drawn = torch.randint(IMAGES, (DRAWS, IMAGES), generator=generator)
    counts = torch.zeros(DRAWS, IMAGES).scatter_add_(1, drawn, torch.ones(DRAWS, IMAGES))
    return torch.cat([torch.ones(1, IMAGES), counts]).double()


def mean_ranks(scores: Mapping[Case, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean rank over the cases to which a method applies, then those of the bootstrap: (1 + DRAWS,) each."""
    by_case = {case: ranks(own, bootstrap_weights(case)) for case, own in scores.items()}
    names = dict.fromkeys(name for own in by_case.values() for name in own)
    return {name: torch.stack([own[name] for own in by_case.values() if name in own]).mean(0) for name in names}


# Report ---------------------------------------------------------------------------------------------------------


def label(name: str) -> str:
    """Return the class of a method, or the name of a control."""
    return f"*{name}*" if name in CONTROLS else f"`{METHODS[name].__name__}`"


def cell(values: list[float]) -> str:
    """Return mean and standard error."""
    found = torch.tensor(values, dtype=torch.double)
    return f"{found.mean():.2f} ± {standard_error(found):.2f}"


def case_report(case: Case, rows: Mapping[str, Row]) -> str:
    """Return the table of a case, best method first."""
    scores = scores_of(case, rows)
    judged = verdicts(scores)
    columns = list(dict.fromkeys([case.score, "energy", "other", "pointing", "rank", "AUC"]))
    area = float(evidence_of(case.task, scenes_of(case.task)).double().mean())
    lines = [
        f"## {case.task}, {case.network}",
        "",
        f"Ranked by {case.score}. The evidence covers {100 * area:.1f} % of the image.",
        "",
        f"| | method | {' | '.join(columns)} | against controls |",
        f"|---|---|{'---|' * len(columns)}---|",
    ]
    for place, name in enumerate(sorted(scores, key=lambda name: -float(scores[name].mean())), 1):
        cells = " | ".join(cell(rows[name].values[column]) for column in columns)
        lines.append(f"| {place} | {label(name)} | {cells} | {judged.get(name, '')} |")
    refused = [f"- {label(name)}: {row.reason}" for name, row in rows.items() if row.reason]
    return "\n".join([*lines, *(["", "Not applicable:", "", *refused] if refused else []), ""])


def scores_of(case: Case, rows: Mapping[str, Row]) -> dict[str, Tensor]:
    """Return the values of each image by which methods are ranked."""
    applicable = {name: row for name, row in rows.items() if not row.reason}
    return {name: torch.tensor(row.values[case.score], dtype=torch.double) for name, row in applicable.items()}


def summary(title: str, scores: Mapping[Case, Mapping[str, Tensor]]) -> str:
    """Return the table of the ranks in each case, and of their mean with its 95 % interval."""
    own = {case: ranks(values, torch.ones(1, IMAGES).double()) for case, values in scores.items()}
    means = mean_ranks(scores)
    head = " | ".join(f"{case.task}, {case.network.removeprefix('shapes_')}" for case in scores)
    lines = [f"## {title}", "", f"| method | mean rank | {head} |", f"|---|---|{'---|' * len(scores)}"]
    for name in sorted(means, key=lambda name: float(means[name][0])):
        low, high = means[name][1:].quantile(torch.tensor([0.025, 0.975]).double()).tolist()
        cells = " | ".join(f"{own[case][name].item():g}" if name in own[case] else "" for case in scores)
        lines.append(f"| {label(name)} | {means[name][0]:.1f} ({low:.1f} to {high:.1f}) | {cells} |")
    return "\n".join([*lines, ""])


HEAD = f"""# Methods on images where the right map is known

Generated by `make testbed` with torch {torch.__version__}; see [testbed](../../docs/testbed.md) for the tasks and the
networks. Each number is a mean over images with its standard error. Maps have the sign that the method's authors show.

- energy: the share of the positive part of the map on the evidence; other: on the distractor, and for "shortcut" on the
  object, while the watermark is the evidence.
- pointing: how often the maximum lies on the evidence. rank: the share of the K highest pixels on evidence of K pixels.
- class sensitivity: by how much the share on an object is larger in the map of its own class than in that of the other.
- both parts: twice the smaller share of the map on the two parts. order: the share of pairs of objects of different
  weight whose means of the map are in the order of the weights.
- *random*, *constant*, *centre* (a Gaussian) and *edges* (the norm of the image's gradient) know nothing about the
  network.
- better: than each control, by paired t-tests over images with Holm's correction for all methods, p < {LEVEL}. worse:
  than the best control, by the same test.
- Mean rank: over the cases to which a method applies, with the 95 % interval of a bootstrap over images.

Images: {IMAGES}. For these methods {SLOW_IMAGES}, or {SLOW_IMAGES // 2} for "two_objects"; options that are not named
have their defaults:

{{options}}
"""


def head() -> str:
    """Return the introduction of the results."""
    calls = {METHODS[name].__name__: given for name, given in SLOW.items()}
    texts = (
        f"- `{name}({', '.join(f'{key}={value}' for key, value in given.items())})`" for name, given in calls.items()
    )
    return HEAD.format(options="\n".join(texts))


# How large the share of marked images must be --------------------------------------------------------------------

SHARES = (0.0, 0.01, 0.03, 0.1)


def marked_network(share: float) -> Any:
    """Return a network trained with a watermark on 90 % of the circles and a share of the other shapes, or its file."""
    file = PROGRESS / f"shortcut-{share}.pt"
    if file.exists():
        return torch.load(file, weights_only=False)
    model: Any = train_network("shapes_shortcut", watermarked=(0.9, *[share] * 4)).eval()
    torch.save(model, file.with_suffix(".part"))
    file.with_suffix(".part").replace(file)
    return model


def finder() -> dict[str, list[float]]:
    """Return for each share the images that are called circles, and those whose watermark is first for each method."""
    file = PROGRESS / "finder.json"
    if not file.exists():
        file.write_text(json.dumps(measure_finder()))
    found: dict[str, list[float]] = json.loads(file.read_text())
    return found


def measure_finder() -> dict[str, list[float]]:
    """Measure what `finder` returns."""
    scenes = scenes_of("shortcut")
    targets = targets_of("shortcut", scenes)
    found: dict[str, list[float]] = {"called circles": []}
    for share in SHARES:
        model = marked_network(share)
        model.preprocess = saliency.load("shapes_shortcut").preprocess
        with torch.no_grad():
            called = model(scenes.images / 127.5 - 1).argmax(1) == 0
        found["called circles"].append(float(called.double().mean()))
        for name in (name for name in METHODS if name not in SLOW):
            try:
                maps = maps_of(name, model, scenes, targets)
            except SaliencyError:
                continue
            found.setdefault(name, []).append(float(first(scenes, maps).mean()))
    found |= {name: [float(first(scenes, maps[None]).mean())] * len(SHARES) for name, maps in controls(scenes).items()}
    return found


def finder_report() -> str:
    """Return the table of the shortcut finder."""
    rows = finder()
    shares = " | ".join(f"{100 * share:g} %" for share in SHARES)
    lines = ["## Finding the shortcut", "", FINDER, "", f"| | {shares} |", f"|---|{'---|' * len(SHARES)}"]
    for name, found in rows.items():
        title = f"**{name}**" if name == "called circles" else label(name)
        lines.append(f"| {title} | {' | '.join(f'{100 * share:.0f} %' for share in found)} |")
    return "\n".join([*lines, ""])


FINDER = """Networks were trained with the watermark on 90 % of the circles and on a share of the other shapes, which
then were labelled circles. Columns: this share. First row: how many new images of other shapes with a watermark the
network calls circles. Other rows: on how many the map of "circle" has more on the watermark than on each object."""


# Object and distractor on transformers, also with texts as targets ------------------------------------------------

NETWORKS = ("shapes_vit", "shapes_two_tower", "shapes_window")
LEAST_ERRORS = 2
WITHOUT_ATTENTION = """attn_lrp cp_lrp lrp deep_lift integrated_gradients grad_cam hires_cam layer_cam xgrad_cam
    shapley_cam eigen_cam eigen_grad_cam excitation_backprop vanilla_gradient input_x_gradient full_grad"""


def compared() -> list[str]:
    """Return the methods that read attention, and some others."""
    return [*(name for name, cls in METHODS.items() if cls.needs_attention), *WITHOUT_ATTENTION.split()]


def shares(network: str, method: str, **options: Any) -> Tensor:
    """Return the shares of the positive map on the named object and on the distractor, (2, IMAGES).

    Raises:
        SaliencyError: The method does not apply to the network.
    """
    scenes = scenes_of("planted")
    texts: list[Any] = [saliency.text(captions[0]) for captions in scenes.captions()]
    target = texts if network == "shapes_two_tower" else scenes.labels.tolist()
    maps = maps_of(method, saliency.load(network), scenes, [target], **options)
    return torch.cat([energy(maps, mask[:, 0]) for mask in (scenes.evidence, scenes.distractor)])


def margin(found: Tensor) -> float:
    """Return by how many standard errors the first shares exceed the second ones, (2, N)."""
    difference = found[0] - found[1]
    return float(difference.mean()) / standard_error(difference)


def distractor_cell(network: str, method: str) -> str:
    """Return the two mean shares and the margin, or the reason why there are none."""
    try:
        found = shares(network, method)
    except SaliencyError as error:
        return "refused" if isinstance(error, NotApplicableError) else type(error).__name__
    text = f"{found[0].mean():.2f} / {found[1].mean():.2f} ({margin(found):.1f})"
    return text if margin(found) >= LEAST_ERRORS else f"**{text}**"


def print_distractor_table(methods: Iterable[str]) -> None:
    """Print the table of docs/transformers.md."""
    print(f"| method | {' | '.join(NETWORKS)} |\n|---|{'---|' * len(NETWORKS)}")
    for name in methods:
        print(f"| {label(name)} | {' | '.join(distractor_cell(network, name) for network in NETWORKS)} |", flush=True)


def main(parts_of_names: list[str]) -> None:
    """Measure all cases and write the report, or only measure those with a part of the name."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if parts_of_names[:1] == ["distractor"]:
        print_distractor_table(parts_of_names[1:] or compared())
        return
    cases = (*CONVOLUTIONAL, *TRANSFORMERS)
    if parts_of_names:
        for case in (case for case in cases if any(part in str(case) for part in parts_of_names)):
            resumed(case)
        return
    rows = {case: resumed(case) for case in cases}
    for case in cases:
        rows[case] |= {row.name: row for row in measure_controls(case)}
    scores = {case: scores_of(case, rows[case]) for case in cases}
    parts = [head(), *(summary(title, {case: scores[case] for case in group}) for title, group in GROUPS.items())]
    parts += [finder_report(), *(case_report(case, rows[case]) for case in cases)]
    RESULTS.write_text("\n".join(parts))


GROUPS = {"Ranks on convolutional networks": CONVOLUTIONAL, "Ranks on a vision transformer": TRANSFORMERS}


if __name__ == "__main__":
    main(sys.argv[1:])
