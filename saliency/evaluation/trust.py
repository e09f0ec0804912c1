"""The trust card of a map: its properties, each compared with maps that ignore the prediction."""

from __future__ import annotations

import base64
import json
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .. import tables
from ..attribution.base import METHODS, Attribution, Together
from ..attribution.explanation import Explanation
from ..errors import LayerError, MethodError, NotApplicableError
from ..io.atomic_write import write_by_suffix
from ..io.inputs import ImagesLike
from ..model.answer import Answer
from ..tables import Column, Table, escaped, number
from ..targets.classes import TargetLike
from ..targets.similarity import ITSELF
from ..validation import check_number
from .metrics.base import RANDOM_CONTROLS, Measurement, Metric, Outcome, SharedResults, Subject, measure, measurement
from .metrics.faithfulness import Deletion, Infidelity, Insertion
from .metrics.map_metrics import RankCorrelation
from .metrics.method_metrics import MPRT, NoiseMargin, RandomLogit
from .metrics.road import ROAD

UNCLEAR = "cannot be told from chance"
WORSE = "worse than all controls"
OTHERS = ("grad_cam", "layer_cam", "input_x_gradient")
GRADIENTS = ("input_x_gradient", "vanilla_gradient")
"""The methods with which a map is compared; on models without a layer for CAMs, the first other of `GRADIENTS`."""

GROUPS = {
    "depends on the model": {
        "mprt": ("depends on the weights (MPRT)", "the map changes when the weights are randomised"),
        "random_logit": ("depends on the class (random logit)", "the map changes with the explained class"),
        "random_box": ("depends on the box (random logit)", "the map changes with the explained box"),
        "noise_margin": ("stable under noise (noise margin)", "noise changes the map less than random weights do"),
    },
    "marks what matters": {
        "deletion": ("needed for the score (deletion)", "deleting the marked pixels lowers the score faster"),
        "insertion": ("enough for the score (insertion)", "inserting the marked pixels raises the score faster"),
        "road": ("needed, with imputation (ROAD)", "imputing the marked pixels lowers the score faster"),
        "infidelity": ("predicts the score (infidelity)", "the map predicts how far hidden squares lower the score"),
        "rank_correlation": ("agrees with others (rank correlation)", "other methods mark the same pixels"),
    },
}
"""The groups of a card: the title and the verdict of each metric.

A map of the right model can still be at the wrong position.
"""

CONTROLS = ("centre", "edges", "random")
"""The controls of the second group. A constant map gives pixels no order; ties would mark half of the image."""

UNTIL = 0.25
"""The fraction of the pixels that are deleted or inserted; if all pixels are, right maps are clear less often."""

SLIGHT = 0.05
"""Rank correlations, and drops in them, below this number are called slight, even if they are clear."""


@dataclass(frozen=True, slots=True)
class Property:
    """One property of a map.

    Attributes:
        name: The metric.
        group: The group of `GROUPS`.
        title: The property and its metric in words, such as "depends on the weights (MPRT)".
        value: The value of the metric.
        error: The standard error of the value; NaN if the metric does not sample.
        controls: The mean value of each map that ignores the prediction.
        control_ranges: The range of each control, as in `saliency.metrics.Control`.
        higher_is_better: Whether higher values are better.
        verdict: One sentence; `UNCLEAR` unless the value is outside of the ranges of all controls; `WORSE` if it is
            worse than all ranges.
    """

    name: str
    group: str
    title: str
    value: float
    error: float
    controls: dict[str, float]
    control_ranges: dict[str, tuple[float, float]]
    higher_is_better: bool
    verdict: str

    @property
    def is_clear(self) -> bool:
        """Whether the value is better than the ranges of all controls."""
        return self.verdict not in (UNCLEAR, WORSE)

    @property
    def is_worse(self) -> bool:
        """Whether the value is worse than the ranges of all controls."""
        return self.verdict == WORSE


def _plus_minus(value: float, error: float) -> str:
    return number(value) if math.isnan(error) else f"{number(value)} ± {number(error)}"


def _controls(row: Property) -> str:
    return ", ".join(f"{name} {_range(value, *row.control_ranges[name])}" for name, value in row.controls.items())


def _range(value: float, low: float, high: float) -> str:
    return number(value) if low == high else f"{number(value)} ({number(low)} to {number(high)})"


_COLUMNS: tuple[Column[Property], ...] = (
    Column("the map ...", lambda row: row.title, "left"),
    Column(
        "clear", lambda row: "yes" if row.is_clear else "worse" if row.is_worse else "?", "left", "than all controls"
    ),
    Column("verdict", lambda row: row.verdict, "left"),
    Column("value", lambda row: _plus_minus(row.value, row.error), hint="with its standard error, if it samples"),
    Column("better", lambda row: "higher" if row.higher_is_better else "lower", "left"),
    Column("controls", _controls, "left", "with the ranges of their draws or samples"),
)


class TrustCard(Table[Property]):
    """The properties of one map. It prints as text, displays as HTML and converts with `dataframe()`.

    Attributes:
        explanation: The explanation of the image.
        measurements: The measurement of each metric, with its curve.
        seconds: The time that the card took.
        seed: The seed of all draws.
    """

    explanation: Explanation
    measurements: dict[str, Measurement]
    seconds: float
    seed: int

    @property
    def summary(self) -> str:
        """One line: the number of clear properties per group, then the unclear, worse and unmeasured properties."""
        others = {
            WORSE: [row.title for row in self if row.is_worse],
            UNCLEAR: [row.title for row in self if row.verdict == UNCLEAR],
            "not measured": list(missing_properties(self.measurements).values()),
        }
        rest = [f"{why}: {', '.join(titles)}" for why, titles in others.items() if titles]
        return "; ".join([*(f"{group}: {self.clear_in(group)}" for group in GROUPS), *rest])

    def clear_in(self, group: str) -> str:
        """Return how many of the measured properties of a group of `GROUPS` are clear."""
        rows = [row for row in self if row.group == group]
        return f"{sum(row.is_clear for row in rows)} of {len(rows)} clear"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the card as .json, .html or .png, atomically, and return the path.

        Raises:
            MethodError: The suffix is not supported.
            OSError: The file cannot be written.
        """
        return write_by_suffix(path, self.encoders)

    @property
    def encoders(self) -> dict[str, Callable[[], bytes]]:
        """Functions that return the card as the content of a file, by suffix."""
        return {".json": lambda: self.to_json().encode(), ".html": self._page, ".png": lambda: tables.draw_card(self)}

    def to_json(self) -> str:
        """Return the card as JSON, with the settings of each metric. NaN and infinite numbers are null."""
        rows = [asdict(row) | {"is_clear": row.is_clear, "is_worse": row.is_worse} for row in self]
        for row in rows:
            row["settings"] = dict(self.measurements[row["name"]].settings)
        card = {name: getattr(self, name) for name in ("title", "summary", "seed", "seconds", "notes")}
        return json.dumps(_without_nan(card | {"properties": rows}), indent=2) + "\n"

    def _repr_html_(self) -> str:
        """Return the figure, as data within the text, and the table."""
        data = base64.b64encode(tables.draw_card(self)).decode()
        image = f'<img src="data:image/png;base64,{data}" alt="{escaped(self.title)}" style="max-width: 100%">'
        return f"{image}\n{self.to_html()}"

    def _page(self) -> bytes:
        style = "<style>body { font-family: sans-serif; margin: 2em }</style>"
        head = f'<meta charset="utf-8"><title>{escaped(self.title)}</title>{style}'
        return f"<!doctype html>\n<html lang=en><head>{head}</head><body>{self._repr_html_()}</body></html>\n".encode()


def _without_nan(value: Any) -> Any:
    """Replace NaN and infinite numbers, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {key: _without_nan(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def trust(
    method: Attribution,
    image: ImagesLike | Answer,
    target: TargetLike = None,
    *,
    seconds: float | None = None,
    seed: int = 0,
    shared: SharedResults | None = None,
) -> TrustCard:
    """Measure whether a map of one image can be trusted.

    Each property is compared with maps that ignore the prediction. It is clear only where the map is better than all
    these maps: for deletion, insertion, ROAD, infidelity and agreement, these are the edges of the image, a spot at the
    centre and 19 copies of the map at random positions.

    Args:
        method: The method.
        image: One image, as for `Attribution.attribute`.
        target: As for `Attribution.attribute`.
        seconds: A time limit. Fewer samples are drawn if more would not fit, and metrics that call the method are
            left out if two calls would not fit. Without a limit, the card depends only on the seed, and takes
            about 190 forwards and 20 calls of the method.
        seed: The seed of all draws.
        shared: The scores of perturbed images that cards of other methods in the same call share with this one.

    Raises:
        MethodError: `method` is not a method, there are several images, or `seconds` is invalid.
    """
    began = time.perf_counter()
    if not isinstance(method, Attribution):
        raise MethodError(f"expected a method, such as GradCAM(model), got {method!r}")
    if isinstance(image, Mapping):
        raise MethodError("a trust card is of one image, of a model that holds its other inputs; got a mapping of them")
    explanation = method.attribute(image, target)
    if len(explanation) != 1:
        raise MethodError(f"a trust card is of one image, got {len(explanation)}")
    context: dict[str, Any] = {"method": method, "target": target, "seed": seed, "controls": CONTROLS}
    subject = Subject(explanation, inputs=image, **context)
    context["inputs"] = subject.inputs_for(method, subject.images)
    metrics = _metrics(subject, None if seconds is None else check_number("seconds", seconds, above=0))
    measurements = measure(metrics, explanation, shared=shared, **context)
    measurements = [
        replace(measured, metric="random_box") if measured.settings.get("of") == "box" else measured
        for measured in measurements
    ]
    if explanation.target_names[0] != ITSELF:  # where the gradients of the other methods are zero
        measurements.append(_agreement(subject, context))
    notes = _notes(explanation, {measured.metric for measured in measurements})
    title = f"Trust card of {explanation.method} for {explanation.target_names[0]}"
    card = TrustCard([property_of(measured) for measured in measurements], _COLUMNS, title, notes)
    card.explanation, card.seed = explanation, seed
    card.measurements = {measured.metric: measured for measured in measurements}
    if "mprt" not in card.measurements:
        why = f"was not measured: two calls of the method do not fit into seconds={seconds}; leave it out for all rows"
        card.absent = {name: f'"{name}" {why}' for name in GROUPS["depends on the model"]}
    card.seconds = time.perf_counter() - began
    return card


def _metrics(subject: Subject, seconds: float | None) -> list[Metric]:
    """Return the metrics of a card, with as many passes as fit into the time."""
    draws, steps, passes = 5, 2, 60
    if seconds is not None:
        inputs = subject.inputs_for(subject.method, subject.images)
        call = _seconds_of(lambda: subject.method.attribute(inputs, subject.explained_target))
        forward = _seconds_of(lambda: subject.scores_of(subject.images))
        draws = min(draws, int(0.4 * seconds / call / 5))
        steps = max(1, min(steps, int(0.4 * seconds / forward / (2 * RANDOM_CONTROLS))))
        passes = max(20, min(passes, int(0.1 * seconds / forward)))
    metrics: list[Metric] = []
    if draws >= 2:
        (classes,), (boxes,) = subject.others(), subject.others("box")
        is_class = bool(classes) or None not in subject.explanation.target
        metrics += [MPRT(layers=1, draws=draws), *([RandomLogit(draws=draws)] if is_class else [])]
        metrics += [*([RandomLogit(draws=draws, of="box")] if boxes else []), NoiseMargin(passes=draws, draws=draws)]
    curves = [Deletion(steps=steps, until=UNTIL), Insertion(steps=steps, until=UNTIL)]
    return [*metrics, *curves, ROAD(shares=(0.2, 0.5)), Infidelity(passes=passes)]


def _seconds_of(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _agreement(subject: Subject, context: dict[str, Any]) -> Measurement:
    """Return the mean rank correlation with other methods that share one forward, in the context of the subject."""
    method = subject.method

    def explained(names: Sequence[str]) -> list[Explanation]:
        others = [METHODS[name](method.model, preprocess=method.preprocess, layout=method.layout) for name in names]
        return Together(*others).attribute(subject.inputs_for(method, subject.images), subject.explained_target)

    others, gradients = ([name for name in names if name != method.name] for names in (OTHERS, GRADIENTS))
    try:
        references = explained(others)
    except (LayerError, NotApplicableError):  # no layer for a CAM
        references = explained(gradients[:1])
    metric = RankCorrelation()
    pairs = [Subject(subject.explanation, reference=other, **context) for other in references]
    values = torch.stack([metric.outcome(pair).values for pair in pairs]).mean(0)
    return measurement(metric, subject, Outcome(values))


def property_of(measured: Measurement) -> Property:
    """Return the property that a measurement of one image shows."""
    group = next(group for group, metrics in GROUPS.items() if measured.metric in metrics)
    title, verdict = GROUPS[group][measured.metric]
    if not measured.beats_controls:
        verdict = WORSE if measured.loses_to_controls else UNCLEAR
    elif measured.metric in (*GROUPS["depends on the model"], "rank_correlation") and measured.values < SLIGHT:
        verdict += ", but only slightly"
    value, error = float(measured.values), math.nan if measured.error is None else float(measured.error)
    controls = {name: float(control.values) for name, control in measured.controls.items()}
    ranges = {name: (float(control.low), float(control.high)) for name, control in measured.controls.items()}
    is_higher = bool(measured.higher_is_better)
    return Property(measured.metric, group, title, value, error, controls, ranges, is_higher, verdict)


def missing_properties(measured: Collection[str]) -> dict[str, str]:
    """Return the titles, by metric, of the properties that were not measured, except of boxes."""
    titles = {name: title for metrics in GROUPS.values() for name, (title, _) in metrics.items()}
    return {name: title for name, title in titles.items() if name not in (*measured, "random_box")}


def _notes(explanation: Explanation, measured: Collection[str]) -> list[str]:
    notes = [
        "clear: better than all controls, maps that ignore the prediction: the edges of the image, a spot at the "
        "centre, and the map itself at 19 random positions; for the first group a constant, noise and the edges",
        "worse: worse than all of them; ±: a standard error; in brackets: the range of 90 % of the draws, or two "
        "standard errors of the difference if the metric samples",
    ]
    if missing := missing_properties(measured).values():
        notes.append(f"not measured: {', '.join(missing)}")
    if explanation.coverage is not None:
        notes.append(f"coverage: {explanation.coverage}")
    if explanation.residual is not None:
        fraction = float(explanation.residual[0]) / (float(explanation.scores[0]) or 1.0)
        notes.append(f"residual: {fraction:.2%} of the score")
    return notes
