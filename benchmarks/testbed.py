"""Rank all methods on images where the right map is known, against maps that ignore the prediction: `make testbed`.

    python -m benchmarks.testbed                 measure all, and write benchmarks/results/testbed.md; re-run to resume
    python -m benchmarks.testbed shapes_vit xor  only measure some cases
    python -m benchmarks.testbed distractor      print the table of docs/transformers.md, or its rows of some methods
    python -m benchmarks.testbed gamma           print the table of docs/transformers.md on the gamma of AttnLRP
    python -m benchmarks.testbed objects         measure boxes, regions and joints: results/testbed_objects.md
    python -m benchmarks.testbed volumes         measure volumes: results/testbed_volumes.md
    python -m benchmarks.testbed words           measure words of captions: results/testbed_words.md
    python -m benchmarks.testbed inputs          print the tables of docs/testbed.md on several inputs

One process on each core shares the work. The values of each image are kept in build/testbed; delete this folder, or the
rows of some methods, to measure again.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

import saliency
from benchmarks.train_testbed import HELD_OUT, camera_effects, train_network, true_captions
from saliency import METHODS, Attribution
from saliency.attribution.explanation import reduced_maps
from saliency.errors import NotApplicableError, SaliencyError
from saliency.evaluation.comparison import holm
from saliency.evaluation.metrics.base import control_maps, resized_within
from saliency.evaluation.metrics.map_metrics import (
    EnergyPointingGame,
    LocalisationMetric,
    PointingGame,
    RelevanceRank,
    RocAuc,
)
from saliency.methods.token_attention import AttentionMap, TokenAttention
from saliency.testbed import (
    CAMERAS,
    RGBD_TASKS,
    CaptionProcessor,
    RgbdTask,
    Scenes,
    Task,
    draw_cameras,
    draw_rgbd,
    draw_scenes,
    draw_volumes,
)

RESULTS = Path(__file__).parent / "results" / "testbed.md"
PROGRESS = Path(__file__).parents[1] / "build" / "testbed"
IMAGES = 50
SLOW_IMAGES = 20
LEVEL = 0.05
DRAWS = 2000  # of the bootstrap

# Methods that get SLOW_IMAGES. Only those of more than 50 passes get fewer passes, so that no other is ranked too
# low. The window of the occlusion fits images of 64 pixels.
SLOW: dict[str, dict[str, Any]] = {
    "deep_lift": {},
    "deep_shap": {},
    "full_grad": {},
    "score_cam": {},
    "ablation_cam": {},
    "recipro_cam": {},
    "integrated_gradients": {},
    "idgi": {},
    "expected_gradients": {},
    "guided_ig": {"steps": 32},
    "blur_ig": {},
    "feature_ablation": {},
    "lime": {"passes": 256},
    "kernel_shap": {"passes": 256},
    "shapley_sampling": {"passes": 256},
    "extremal_perturbation": {"steps": 60},
    "occlusion": {"window": 8, "stride": 4},
    "rise": {"passes": 512},
    "d_rise": {"passes": 512},
    "vx_code": {},
    "augmented": {},
    "smooth_grad": {},
    "smooth_grad_squared": {},
    "var_grad": {},
    "smooth_grad_cam_plus_plus": {},
    "sobol": {"passes": 256},
    "vit_cx": {},
    "xrai": {},
}
CONTROLS = ("random", "constant", "centre", "edges")

# No score is fair to all maps: energy charges maps without a sign for their floor, and clips signed ones; AUC does not
# reward maps that are sharp. So methods are ranked by each of them.
SCORES: dict[str, LocalisationMetric] = {"energy": EnergyPointingGame(), "rank": RelevanceRank(), "AUC": RocAuc()}


@dataclass(frozen=True, slots=True)
class Case:
    """A task, a network that was trained for it, and the comparison."""

    task: Task
    network: str

    def ranked_by(self, score: str) -> str:
        """Return the name of the number by which methods are ranked with one of `SCORES`."""
        names = {"two_objects": f"class sensitivity, {score}", "xor": f"both parts, {score}", "occlusion": "order"}
        return names.get(self.task, score)

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


ByScore: TypeAlias = Mapping[str, Mapping[Case, Mapping[str, Tensor]]]  # values of each image by score, case and method


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
    """Return the explained class of each image; for "two_objects" also the class of the second object."""
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
    """Return maps (N, 64, 64) that ignore the prediction."""
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
    found = {name: metric.compare(own, masks)[0].double() for name, metric in SCORES.items()}
    found |= {"other": energy(own, other)[0], "pointing": PointingGame(tolerance=0).compare(own, masks)[0].double()}
    special = {"two_objects": class_sensitivity, "xor": both_parts, "occlusion": right_order}.get(case.task)
    if special is not None:
        found |= {case.ranked_by(name): special(scenes, maps, metric) for name, metric in SCORES.items()}
    return found


def class_sensitivity(scenes: Scenes, maps: Tensor, score: LocalisationMetric) -> Tensor:
    """Return the score on an object for the map of its class, minus the score for the other map: (N,)."""
    first, second = (score.compare(maps, scenes.masks[:, each]).double() for each in range(2))  # (2, N): by class
    return (first[0] - first[1] + second[1] - second[0]) / 2


def both_parts(scenes: Scenes, maps: Tensor, score: LocalisationMetric) -> Tensor:
    """Return the lower of the scores of the map on the two parts of "xor": (N,)."""
    return torch.stack([score.compare(maps[:1], scenes.masks[:, part])[0].double() for part in range(2)]).amin(0)


def right_order(scenes: Scenes, maps: Tensor, _: LocalisationMetric) -> Tensor:
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


def file_of(case: Case) -> Path:
    """Return the file with the rows of a case."""
    return PROGRESS / f"{case}.jsonl"


def stored(case: Case) -> dict[str, Row]:
    """Return the rows that were measured so far, in the order of the registry."""
    lines = file_of(case).read_text().splitlines() if file_of(case).exists() else []
    rows = {row["name"]: Row(**row) for row in map(json.loads, lines)}
    return {name: rows[name] for name in METHODS if name in rows}


def prepare_process() -> None:
    """Let a process run on one core and without warnings."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def measure_task(task: tuple[str, Case] | None) -> tuple[Row, Case] | None:
    """Measure a method on the images of a case, or what `finder` returns."""
    if task is None:
        finder()
        return None
    return measure_method(*task), task[1]


def measure_all(cases: Iterable[Case], *, with_finder: bool) -> None:
    """Measure all methods in all cases, and store each row as it is measured."""
    PROGRESS.mkdir(parents=True, exist_ok=True)
    tasks: list[tuple[str, Case] | None] = [None] if with_finder else []
    for case in cases:
        done = stored(case)
        tasks += [(name, case) for name in METHODS if name not in done]
    with get_context("spawn").Pool(os.cpu_count(), prepare_process) as pool:
        for found in pool.imap_unordered(measure_task, tasks):
            if found is not None:
                row, case = found
                with file_of(case).open("a") as stream:
                    stream.write(json.dumps(asdict(row)) + "\n")
                print(f"{case} {row.name} {row.seconds:.1f} s {row.reason[:80]}", file=sys.stderr, flush=True)
        pool.close()
        pool.join()


# Statistics -----------------------------------------------------------------------------------------------------


def p_value(values: Tensor, other: Tensor) -> float:
    """Return the one-sided p-value of the paired t-test that the mean of `values` exceeds that of `other`."""
    difference = values - other[: len(values)]
    error = standard_error(difference)
    if error < 1e-12:
        return float(difference.mean() <= 0)
    from scipy import stats  # takes a second

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
    """Return the mean rank over the cases to which a method applies, then the bootstrap ranks: (1 + DRAWS,) each."""
    by_case = {case: ranks(own, bootstrap_weights(case)) for case, own in scores.items()}
    names = dict.fromkeys(name for own in by_case.values() for name in own)
    return {name: torch.stack([own[name] for own in by_case.values() if name in own]).mean(0) for name in names}


# Report ---------------------------------------------------------------------------------------------------------


def label(name: str) -> str:
    """Return the class of a method, or the name of a control or another map."""
    return f"`{METHODS[name].__name__}`" if name in METHODS else f"*{name}*"


def cell(values: list[float]) -> str:
    """Return mean and standard error."""
    found = torch.tensor(values, dtype=torch.double)
    return f"{found.mean():.2f} ± {standard_error(found):.2f}"


def scores_of(case: Case, rows: Mapping[str, Row], score: str) -> dict[str, Tensor]:
    """Return the values of each image by which methods are ranked with a score."""
    applicable = {name: row for name, row in rows.items() if not row.reason}
    return {name: torch.tensor(row.values[case.ranked_by(score)]).double() for name, row in applicable.items()}


def ranks_in(case: Case, scores: ByScore) -> dict[str, list[float]]:
    """Return the ranks of each method in a case, by each score."""
    by_score = [ranks(own[case], torch.ones(1, IMAGES).double()) for own in scores.values()]
    return {name: [each[name].item() for each in by_score] for name in by_score[0]}


def verdicts_in(case: Case, scores: ByScore) -> dict[str, dict[str, str]]:
    """Return the verdict on each method in a case, by each score: "better", "worse" or ""."""
    by_score = {score: verdicts(own[case]) for score, own in scores.items()}
    return {name: {score: own[name].split(" ")[0] for score, own in by_score.items()} for name in by_score["energy"]}


def case_report(case: Case, rows: Mapping[str, Row], scores: ByScore) -> str:
    """Return the table of a case, in the order of the largest rank by a score."""
    places, judged = ranks_in(case, scores), verdicts_in(case, scores)
    columns = list(dict.fromkeys([*map(case.ranked_by, SCORES), *SCORES, "other", "pointing"]))
    area = float(evidence_of(case.task, scenes_of(case.task)).double().mean())
    lines = [
        f"## {case.task}, {case.network}",
        "",
        f"The evidence covers {100 * area:.1f} % of the image.",
        "",
        f"| | method | {' | '.join(columns)} | against controls |",
        f"|---|---|{'---|' * len(columns)}---|",
    ]
    for place, name in enumerate(sorted(places, key=lambda name: max(places[name])), 1):
        cells = " | ".join(cell(rows[name].values[column]) for column in columns)
        lines.append(f"| {place} | {label(name)} | {cells} | {agreed(judged.get(name, {}))} |")
    refused = [f"- {label(name)}: {row.reason}" for name, row in rows.items() if row.reason]
    return "\n".join([*lines, *(["", "Not applicable:", "", *refused] if refused else []), ""])


def agreed(judged: Mapping[str, str]) -> str:
    """Return the verdict by all scores if they agree, or else the verdict by each."""
    if len(set(judged.values())) < 2:
        return next(iter(judged.values()), "")
    return ", ".join(f"{verdict} by {score}" for score, verdict in judged.items() if verdict)


def summary(title: str, scores: ByScore) -> str:
    """Return the table of the mean ranks by each score with their 95 % intervals, and of the ranks in each case."""
    means = {score: mean_ranks(own) for score, own in scores.items()}
    cases = {case: ranks_in(case, scores) for case in scores["energy"]}
    head = " | ".join(f"{case.task}, {case.network.removeprefix('shapes_')}" for case in cases)
    lines = [f"## {title}", "", f"| method | {' | '.join(SCORES)} | {head} |", f"|---|{'---|' * (3 + len(cases))}"]
    for name in by_largest(means):
        cells = [interval(own[name]) for own in means.values()]
        cells += [" / ".join(f"{place:g}" for place in places.get(name, ())) for places in cases.values()]
        lines.append(f"| {label(name)} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def by_largest(means: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
    """Return the names in the order of the largest of their mean ranks by the scores."""
    return sorted(means["energy"], key=lambda name: max(float(own[name][0]) for own in means.values()))


def interval(means: Tensor) -> str:
    """Return a mean rank with its 95 % interval."""
    low, high = means[1:].quantile(torch.tensor([0.025, 0.975]).double()).tolist()
    return f"{means[0]:.1f} ({low:.1f} to {high:.1f})"


def claims(title: str, scores: ByScore) -> str:
    """Return the findings that hold by all scores, which the documentation may state."""
    means = {score: mean_ranks(own) for score, own in scores.items()}
    places = {name: [float(own[name][0]) for own in means.values()] for name in by_largest(means)}
    best = [min(own) for own in zip(*(places[name] for name in CONTROLS), strict=True)]  # by score
    judged = {case: verdicts_in(case, scores) for case in scores["energy"]}

    methods = [name for name in places if name not in CONTROLS]

    def listed(names: Iterable[str]) -> str:
        return ", ".join(map(label, names)) or "none"

    def is_better(name: str) -> bool:
        return all(set(own[name].values()) == {"better"} for own in judged.values() if name in own)

    count = len(places)
    first = listed(name for name in methods if max(places[name]) <= count / 2)
    last = listed(name for name in methods if min(places[name]) > 0.75 * count)
    after = listed(name for name in methods if all(map(float.__gt__, places[name], best)))
    lines = [
        f"## What holds by all scores: {title[0].lower()}{title[1:]}",
        "",
        f"- Mean rank in the first half of {count}: {first}.",
        f"- Mean rank in the last quarter: {last}.",
        f"- Mean rank after the best control: {after}.",
        f"- Better than all controls in each case: {listed(filter(is_better, methods))}.",
    ]
    for case, own in judged.items():
        worse = listed(name for name in methods if set(own.get(name, {}).values()) == {"worse"})
        never = listed(name for name in methods if name in own and "better" not in own[name].values())
        lines.append(
            f"- {case.task}, {case.network}: worse than the best control: {worse}. Better by no score: {never}."
        )
    return "\n".join([*lines, ""])


HEAD = f"""# Methods on images where the right map is known

Generated by `make testbed` with torch {torch.__version__}; see [testbed](../../docs/testbed.md) for the tasks and the
networks. Each number is a mean over images with its standard error. Maps have the sign that the method's authors show.

Methods are ranked by three scores of the map on the evidence, for "shortcut" on the watermark:

- energy: the share of the positive part of the map on the evidence.
- rank: rank accuracy, the share of the K highest pixels on evidence of K pixels.
- AUC: the probability that a pixel of the evidence is higher than another.

For some tasks the ranks are of other numbers:

- class sensitivity: by how much the score on an object is higher for the map of its own class than for the other map.
- both parts: the lower of the scores on the two parts.
- order: the share of pairs of objects of different weight whose means of the map are in the order of the weights.

Other columns: the energy on the distractor (other), for "shortcut" on the object; how often the maximum lies on the
evidence (pointing).

- *random*, *constant*, *centre* (a Gaussian) and *edges* (the norm of the image's gradient) ignore the network.
- better: than each control, by paired t-tests over images with Holm's correction for all methods, p < {LEVEL}. worse:
  than the best control, by the same test. By all scores, if none is named.
- Mean rank: over the cases to which a method applies, with the 95 % interval of a bootstrap over images. Tables are in
  the order of the largest of the three. Ranks in a case are by energy / rank / AUC.

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


FINDER = """Networks were trained with the watermark on 90 % of the circles and on a fraction of the other shapes, which
were then labelled circles. Columns: this fraction. First row: fraction of new images of other shapes with a watermark
that the network classifies as circles. Other rows: fraction of images on which the map of "circle" has more on the
watermark than on each object."""


# Object and distractor on transformers, also with texts as targets ------------------------------------------------

NETWORKS = ("shapes_vit", "shapes_two_tower", "shapes_window")
LEAST_ERRORS = 2
WITHOUT_ATTENTION = """attn_lrp cp_lrp lrp deep_lift integrated_gradients grad_cam hires_cam layer_cam xgrad_cam
    shapley_cam eigen_cam eigen_grad_cam excitation_backprop vanilla_gradient input_x_gradient full_grad"""


def compared() -> list[str]:
    """Return the methods that read attention, and some others."""
    return [*(name for name, cls in METHODS.items() if cls.needs.attention), *WITHOUT_ATTENTION.split()]


def planted_values(network: str, method: str, **options: Any) -> dict[str, Tensor]:
    """Return the numbers of the maps of the named objects, (IMAGES,) each, and the positive part of their magnitude.

    Raises:
        SaliencyError: The method does not apply to the network.
    """
    scenes = scenes_of("planted")
    texts: list[Any] = [saliency.text(captions[0]) for captions in scenes.captions()]
    target = texts if network == "shapes_two_tower" else scenes.labels.tolist()
    maps = maps_of(method, saliency.load(network), scenes, [target], **options)
    positive = maps[0].clamp(min=0).sum((1, 2)) / maps[0].abs().sum((1, 2))
    return values_of(Case("planted", network), scenes, maps) | {"positive": positive}


def shares(network: str, method: str, **options: Any) -> Tensor:
    """Return the shares of the positive map on the named object and on the distractor, (2, IMAGES).

    Raises:
        SaliencyError: The method does not apply to the network.
    """
    found = planted_values(network, method, **options)
    return torch.stack([found["energy"], found["other"]])


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


def print_gamma_table(gammas: Iterable[float] = (0.0, 0.01, 0.05, 0.25)) -> None:
    """Print the table of docs/transformers.md on the gamma of AttnLRP, with the differences to a gamma of 0."""
    columns = (*SCORES, "other", "positive")
    print(f"| network | gamma | {' | '.join(columns)} |\n|---|---|{'---|' * len(columns)}")
    for network in NETWORKS:
        plain = planted_values(network, "attn_lrp")
        for gamma in gammas:
            found = planted_values(network, "attn_lrp", gamma=gamma)
            pairs = {column: (found[column].mean(), found[column] - plain[column]) for column in columns}
            cells = [f"{mean:.3f} ({by.mean():+.3f} ± {standard_error(by):.3f})" for mean, by in pairs.values()]
            print(f"| `{network}` | {gamma:g} | {' | '.join(cells)} |", flush=True)


# Boxes, regions and joints --------------------------------------------------------------------------------------

OBJECTS_HEAD = """# Boxes, regions and joints

Written by `python -m benchmarks.testbed objects`. The share of the positive part of the map on the explained object,
minus the share on another object: of the same class, or for joints any other. Means over 50 images, or 20 if slow,
with standard errors. Bold means are not above two of them.
"""
OBJECT_NETWORKS = ("shapes_detector", "shapes_queries", "shapes_unet", "shapes_keypoints")
VOLUMES_HEAD = """# Volumes

Written by `python -m benchmarks.testbed volumes`. The share of the positive part of the map of a class on the object of
this class, minus the share on the object of another class. Means over 50 volumes, or 20 if slow, with standard errors.
Bold means are not above two of them.
"""
VOLUME_OPTIONS: dict[str, dict[str, Any]] = {  # of the others: SLOW
    **{key: {"segments": (4, 4, 4), "passes": 256} for key in ("lime", "kernel_shap", "shapley_sampling")},
    "sobol": {"grid": 4, "passes": 256},
    "feature_ablation": {"segments": (6, 8, 8)},
    "vx_code": {"segments": (3, 4, 4)},
}
WORDS_HEAD = """# Words of captions

Written by `python -m benchmarks.testbed words`. `shapes_caption` describes two objects. Each word is explained
given the words before it. Colour and shape: the share of the positive part of the map of the word on its own object,
minus the share on the other one, over both objects. Relation ("left", "right", "above", "below"): the share on each
object minus the share of its pixels in the image, for the object where it is lower. Means over 50 captions, or 20 if
slow, with standard errors. Bold means are not above two of them.
"""
KINDS = ("colour", "shape", "relation")
WORD_OPTIONS: dict[str, dict[str, Any]] = {key: {"passes": 256} for key in ("rise", "d_rise")}  # or SLOW
TABLES = {
    "objects": (OBJECTS_HEAD, OBJECT_NETWORKS),
    "volumes": (VOLUMES_HEAD, ("shapes_volume",)),
    "words": (WORDS_HEAD, KINDS),
}


def object_targets(network: str, scenes: Scenes) -> list[Any]:
    """Return a target for each image that asks for its first object: a box, a region, or the top corner."""
    labels = scenes.labels.tolist()
    if network == "shapes_keypoints":
        return [saliency.keypoint(0)] * len(labels)
    if network == "shapes_unet":  # class 0 is the background
        return [saliency.region(label + 1, mask) for label, mask in zip(labels, scenes.masks[:, 0], strict=True)]
    return [saliency.box(box=own, cls=cls) for own, cls in zip(scenes.boxes[:, 0].tolist(), labels, strict=True)]


def object_margins(method: str, network: str, count: int = IMAGES, **options: Any) -> Tensor:
    """Return the energy of each map on the explained object, minus the energy on the second object: (N,).

    The second object is of the same class, but for joints and in volumes. By default, slow methods get fewer passes.

    Raises:
        SaliencyError: The method does not apply to the network.
    """
    model, options = saliency.load(network), options or SLOW.get(method, {})
    if network == "shapes_volume":
        drawn, options = draw_volumes(count, seed=HELD_OUT), VOLUME_OPTIONS.get(method, {}) | options
        found = METHODS[method](model, **options).attribute(drawn.volumes, drawn.labels.tolist())
        maps, masks = saliency.heatmap(found).double().flatten(1, 2)[None], drawn.masks.flatten(2, 3)
    else:
        scenes = scenes_of("corners" if network == "shapes_keypoints" else "several", count)
        maps, masks = maps_of(method, model, scenes, [object_targets(network, scenes)], **options), scenes.masks
    own, other = (energy(maps, masks[:, at])[0] for at in range(2))
    return (own - other).double()


@cache
def captions(count: int) -> list[tuple[saliency.Answer, Tensor]]:
    """Return true captions of the network, and the pixels (2, 64, 64) of both objects in the order of the caption."""
    model, scenes = saliency.load("shapes_caption"), scenes_of("two_objects", 2 * count)
    found: list[tuple[saliency.Answer, Tensor]] = []
    for image, masks, true in zip(scenes.images, scenes.masks, true_captions(scenes), strict=True):
        answer = saliency.generate(model, CaptionProcessor(), image, "caption")
        if answer.text in true and len(found) < count:
            found.append((answer, masks.flip(0) if true[answer.text] else masks))
    return found


class RawAttention(AttentionMap):
    """Attention to each token from the token that writes the word, as the mean of all heads and layers."""

    def relevance(self, attention: TokenAttention) -> Tensor:
        """Return the attention (N, tokens)."""
        means = torch.stack([call.mean_heads() for call in attention.blocks])
        return (attention.read_queries @ means.mean(0))[:, 0]


OF_WORDS: dict[str, type[Attribution]] = {"TAM": saliency.TAM, "raw attention": RawAttention}  # not in the registry


@cache
def word_margins(method: str, count: int = IMAGES, **options: Any) -> dict[str, Tensor]:
    """Return how much more of the maps of words lies on the right objects, as in the table: (count,) by kind.

    Raises:
        SaliencyError: The method does not apply to the captioner.
    """
    cls = OF_WORDS.get(method) or METHODS[method]
    explainer = cls(captions(count)[0][0].model, **(options or WORD_OPTIONS.get(method) or SLOW.get(method, {})))
    places = (1, -2, 2, -1, 3)  # the colours, the shapes and the relation in "a red circle left of a blue square"
    margins = []
    for answer, masks in captions(count):
        targets = [saliency.words(at=answer.words[place][1]) for place in places]
        found = explainer.attribute_classes(answer, targets)
        maps = torch.cat([resized_within(reduced_maps(each, None), each.input_size).double() for each in found])
        shares = torch.stack([energy(maps[None], mask.expand_as(maps))[0] for mask in masks])  # (2 objects, 5 words)
        own = shares[0, :4] - shares[1, :4]
        relation = (shares[:, 4] - masks.double().mean((1, 2))).amin()
        margins.append(torch.stack([(own[0] - own[1]) / 2, (own[2] - own[3]) / 2, relation]))
    return dict(zip(KINDS, torch.stack(margins, 1), strict=True))


def measure_objects(method: str, table: str) -> None:
    """Measure a method on all networks of a table, and keep the values."""
    file = PROGRESS / table / f"{method}.json"
    if file.exists():
        return
    rows: dict[str, Any] = {}
    count = SLOW_IMAGES if method in SLOW else IMAGES
    for column in TABLES[table][1]:
        try:
            is_word = table == "words"
            margins = word_margins(method, count)[column] if is_word else object_margins(method, column, count)
            rows[column] = margins.tolist()
        except SaliencyError as refusal:
            rows[column] = str(refusal)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(rows))


def object_rows(methods: Iterable[str], table: str) -> dict[str, Any]:
    """Return the stored margins of methods, or why they do not apply, by network."""
    return {method: json.loads((PROGRESS / table / f"{method}.json").read_text()) for method in methods}


def objects_table(rows: Mapping[str, Any], networks: Sequence[str]) -> str:
    """Return the table of the margins, with their standard errors; those within two standard errors of 0 are bold."""
    lines = [f"| method | {' | '.join(f'`{network}`' for network in networks)} |", "|---" * (1 + len(networks)) + "|"]
    for method, own in rows.items():
        lines.append(f"| {label(method)} | {' | '.join(object_cell(own[network]) for network in networks)} |")
    return "\n".join(lines)


def objects_report(rows: Mapping[str, Any], table: str) -> str:
    """Return the results of all methods, with the reasons why some do not apply."""
    head, networks = TABLES[table]
    reasons = dict.fromkeys(
        f"- {'' if table == 'words' else f'`{network}`, '}{label(method)}: {own[network]}"
        for method, own in rows.items()
        for network in networks
        if isinstance(own[network], str)
    )
    return "\n".join([head, objects_table(rows, networks), "\n## Refused\n", *reasons, ""])


def object_cell(values: list[float] | str) -> str:
    """Return a mean margin with its standard error, bold if it is not above two of them."""
    if isinstance(values, str):
        return "-"
    margins = torch.tensor(values, dtype=torch.double)
    return cell(values) if margins.mean() > 2 * standard_error(margins) else f"**{cell(values)}**"


# Several inputs -------------------------------------------------------------------------------------------------

OF_INPUTS: dict[str, dict[str, Any]] = {
    "input_x_gradient": {},
    "integrated_gradients": {},
    "lrp": {},
    "attn_lrp": {},
    "occlusion": SLOW["occlusion"],
    "kernel_shap": {"segments": "inputs"},
}
OF_OBJECT_SIZE = {"window": 20, "stride": 10}  # of the occlusion: the width of the widest objects


def rgbd_values(method: str, task: RgbdTask, count: int = IMAGES) -> dict[str, Tensor]:
    """Return the results of a method for scenes of `shapes_rgbd`: (N,) each.

    "depth" is the share of the depth, minus the share of the colours. "map of rgb" and "map of depth" are the energy on
    the object, minus the energy on the distractor, for inputs that show both and methods that divide an input.
    """
    drawn = draw_rgbd(count, seed=HELD_OUT, task=task)
    explainer = METHODS[method](saliency.load("shapes_rgbd"), **OF_INPUTS[method])
    result = explainer.attribute(drawn.inputs, drawn.answers.tolist())
    shares = {name: torch.tensor(own) for name, own in result.shares.items()}
    values = {"depth": shares["depth"] - shares["rgb"]}
    for name, own in result.items():
        if bool(drawn.importance[name].any()) and method != "kernel_shap":
            maps = reduced_maps(own, None).double()[None]
            on_object, other = (energy(maps, masks[name][:, 0])[0] for masks in (drawn.evidence, drawn.distractor))
            values[f"map of {name}"] = on_object - other
    return values


def policy_values(method: str, count: int = IMAGES, *, seed: int = HELD_OUT, **options: Any) -> dict[str, Tensor]:
    """Return the results of a method for the policy and the larger coordinate of its last point: (N,) each.

    "camera" is the absolute share of the camera that sees the object, minus the absolute share of the other camera.
    "object" is the absolute sum of the values on the object, minus the largest absolute sum on another object, for
    methods that divide an input.
    """
    drawn = draw_cameras(count, seed=seed)
    axes = drawn.answers[:, -1].abs().argmax(1).tolist()
    explainer = METHODS[method](saliency.load("shapes_policy"), **(OF_INPUTS.get(method, {}) | options))
    result = explainer.attribute(drawn.inputs, [saliency.value(3, axis) for axis in axes])
    sizes = torch.stack([result.sums[name].abs() for name in CAMERAS], 1)  # (N, 2)
    sees = torch.stack([drawn.importance[name].any(1) for name in CAMERAS], 1)
    values = {"camera": sizes[sees] - sizes[~sees]}
    if method != "kernel_shap":
        maps = {name: resized_within(own.values.sum(1), own.input_size).double() for name, own in result.items()}
        sums = torch.cat([(maps[name][:, None] * drawn.masks[name]).sum((2, 3)).abs() for name in CAMERAS], 1)
        is_object = torch.cat([drawn.importance[name] > 0 for name in CAMERAS], 1)  # (N, 4)
        values["object"] = sums[is_object] - sums.masked_fill(is_object, 0).amax(1)
    return values


def count_above_zero(values: Tensor | None) -> str:
    """Return the number of values above 0; a dash for none."""
    return "-" if values is None else str(int((values > 0).sum()))


def print_inputs_tables() -> None:
    """Print how often `shapes_rgbd` and `shapes_policy` have the right map, of 50 scenes, and of 200 others."""
    maps: list[tuple[RgbdTask, str]] = [("colour", "rgb"), ("depth", "depth"), ("both", "rgb"), ("both", "depth")]
    heads = ["colour: share", "depth: share", "both: maps", *(f"{task}: map of {name}" for task, name in maps)]
    print(f"| method | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
    for method in OF_INPUTS:
        of_task = {task: rgbd_values(method, task) for task in RGBD_TASKS}
        cells = [count_above_zero(-of_task["colour"]["depth"]), count_above_zero(of_task["depth"]["depth"])]
        margins = [of_task[task].get(f"map of {name}") for task, name in maps]
        both = None if margins[2] is None or margins[3] is None else torch.minimum(margins[2], margins[3])
        cells += [count_above_zero(both), *("-" if own is None else cell(own.tolist()) for own in margins)]
        print(f"| {label(method)} | {' | '.join(cells)} |", flush=True)
    print("\n| method | camera, of 50 | object, of 50 | camera, of 200 others | object, of 200 others |")
    print(f"|{'---|' * 5}")
    rows: list[tuple[str, dict[str, int]]] = [(method, {}) for method in (*OF_INPUTS, "layer_cam", "attention_rollout")]
    for method, options in [*rows, ("occlusion", OF_OBJECT_SIZE)]:
        measured = policy_values(method, **options), policy_values(method, 200, seed=HELD_OUT + 1, **options)
        cells = [count_above_zero(values.get(key)) for values in measured for key in ("camera", "object")]
        name = ", ".join([label(method), *(f"{option} {value}" for option, value in options.items())])
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    moves = ", ".join(f"{float(own.mean()):.1f}" for own in camera_effects())
    print(f"\nPixels by which the motion changes without a camera: {moves}")


def main(parts_of_names: list[str]) -> None:
    """Measure all cases and write the report, or only measure those with a part of the name."""
    prepare_process()
    if parts_of_names[:1] == ["distractor"]:
        print_distractor_table(parts_of_names[1:] or compared())
        return
    if parts_of_names == ["inputs"]:
        print_inputs_tables()
        return
    if parts_of_names == ["gamma"]:
        print_gamma_table()
        return
    if parts_of_names and parts_of_names[0] in TABLES:
        table, *some = parts_of_names
        methods = some or [*METHODS, *(OF_WORDS if table == "words" else ())]
        for method in methods:
            measure_objects(method, table)
        rows = object_rows(methods, table)
        if some:
            print(objects_table(rows, TABLES[table][1]))
        else:
            RESULTS.with_name(f"testbed_{table}.md").write_text(objects_report(rows, table))
        return
    every = (*CONVOLUTIONAL, *TRANSFORMERS)
    cases = [case for case in every if any(part in str(case) for part in parts_of_names or [""])]
    measure_all(cases, with_finder=not parts_of_names)
    if not parts_of_names:
        RESULTS.write_text(report({case: stored(case) for case in cases}))


def report(rows: Mapping[Case, dict[str, Row]]) -> str:
    """Return the results of all cases."""
    rows = {case: own | {row.name: row for row in measure_controls(case)} for case, own in rows.items()}
    scores = {score: {case: scores_of(case, own, score) for case, own in rows.items()} for score in SCORES}
    parts = [head()]
    for title, group in GROUPS.items():
        chosen_scores = {score: {case: own[case] for case in group} for score, own in scores.items()}
        parts += [summary(title, chosen_scores), claims(title, chosen_scores)]
    return "\n".join([*parts, finder_report(), *(case_report(case, own, scores) for case, own in rows.items())])


GROUPS = {"Ranks on convolutional networks": CONVOLUTIONAL, "Ranks on a vision transformer": TRANSFORMERS}


if __name__ == "__main__":
    main(sys.argv[1:])
