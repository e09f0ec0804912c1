"""The trust card of a map: two exact tests, and measured numbers next to those of maps that ignore the prediction."""

from __future__ import annotations

import base64
import copy
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from .. import tables
from ..attribution.base import METHODS, Attribution
from ..attribution.explanation import Explanation, reduced_maps
from ..attribution.options import declared_options
from ..errors import MethodError, SaliencyError
from ..io.atomic_write import write_by_suffix
from ..io.inputs import Batch, ImagesLike
from ..tables import Column, Table, escaped, number, share
from ..targets.classes import TargetLike
from ..targets.similarity import ITSELF
from ..validation import described
from .metrics.base import (
    IMAGE_CONTROLS,
    Measurement,
    SharedResults,
    Subject,
    control_maps,
    full_size,
    measurements,
    resized_within,
)
from .metrics.faithfulness import Infidelity
from .metrics.map_metrics import RankCorrelation
from .metrics.method_metrics import (
    CURVES,
    AvgSensitivity,
    ClassTest,
    ExactTest,
    WeightsTest,
    effects,
    is_worst,
    reached,
    slack,
    untrained_map,
)

LEVEL = 0.05
"""The largest p-value of a clear verdict."""

STOP = 3
"""The number of untrained networks with a better map after which the test of the weights ends."""

UNCLEAR = "cannot be told from chance"
WORSE = "worse than maps of untrained networks"

TITLES = {
    "class": "depends on the class",
    "weights": "marks what the model learned to use",
    "place": "lies where it matters (its own copies)",
    "deletion": "needed for the score (deletion)",
    "insertion": "enough for the score (insertion)",
    "infidelity": "predicts the score (infidelity)",
    "mprt": "changes with the weights (MPRT)",
    "avg_sensitivity": "changes under noise (average sensitivity)",
    "rank_correlation": "agrees with other methods (rank correlation)",
}
"""The title of each row. The first two are tests."""

CONTROLS = {"centre": "a spot at the centre"} | {name: name for name in IMAGE_CONTROLS}
"""The maps with which a map is compared by name, and their names in sentences."""

REFERENCES = ("grad_cam", "input_x_gradient")
"""The methods with which a map is compared, if they are of another family."""

SAME = 0.95
"""The rank correlation above which two methods have the same map, so that their agreement means nothing."""

SLOW = 1.0
"""The seconds of a call above which the tests use fewer passes."""

COPIES = 9
"""The number of shifted and flipped copies among which a map is ranked."""

DRAWS = 5
"""The number of untrained networks, and of noisy images, of the numbers without a test."""


@dataclass(frozen=True, slots=True)
class Property:
    """One row of a card: a test, or a measured number.

    Attributes:
        name: "class", "weights", "place" or the metric.
        title: The property in words, such as "depends on the class".
        value: The value of the metric; of a test, the size of the effect.
        error: The standard error of the value; NaN if it has none.
        higher_is_better: Whether higher values are better.
        verdict: One sentence.
        p: The p-value of a test; None for numbers without a test.
        controls: The values of maps that ignore the prediction.
        strip: For ranks: the score of the map, then of the maps among which it is ranked.
    """

    name: str
    title: str
    value: float
    error: float
    higher_is_better: bool
    verdict: str
    p: float | None = None
    controls: dict[str, float] = field(default_factory=dict)
    strip: tuple[float, ...] = ()

    @property
    def size(self) -> float:
        """The effect size of a test, which equals its value."""
        return self.value

    @property
    def is_clear(self) -> bool:
        """Whether the p-value of a test is at most `LEVEL`."""
        return self.p is not None and self.p <= LEVEL

    @property
    def is_worse(self) -> bool:
        """Whether the map is worse than all maps of untrained networks."""
        return self.verdict == WORSE


def _measured(value: float, before: str = "") -> str:
    return "" if math.isnan(value) else before + number(value)


def _value(row: Property) -> str:
    return _measured(row.value) + _measured(row.error, " ± ")


def _listed(controls: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in controls.items())


_COLUMNS = (
    Column("the map ...", "title", align="left"),
    Column("p", "p", _measured, hint="of a test"),
    Column("value", _value, hint="with its standard error"),
    Column("verdict", "verdict", align="left"),
    Column("compared to", "controls", _listed, "left"),
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
        """One line: the verdicts of both tests."""
        return "; ".join(f"{row.title}: {row.verdict}" for row in self.tests)

    @property
    def tests(self) -> tuple[Property, Property]:
        """The rows of both tests."""
        return self["class"], self["weights"]

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
            row["settings"] = dict(self.measurements[row["name"]].settings) if row["name"] in self.measurements else {}
            if row["p"] is None:
                del row["p"]  # of a number without a test
        card = {name: getattr(self, name) for name in ("title", "summary", "seed", "seconds", "notes")}
        finite = json.loads(json.dumps(card | {"properties": rows}), parse_constant=lambda name: None)
        return json.dumps(finite, indent=2) + "\n"

    def _repr_html_(self) -> str:
        """Return the figure, as data within the text, and the table."""
        data = base64.b64encode(tables.draw_card(self)).decode()
        image = f'<img src="data:image/png;base64,{data}" alt="{escaped(self.title)}" style="max-width: 100%">'
        return f"{image}\n{self.to_html()}"

    def _page(self) -> bytes:
        style = "<style>body { font-family: sans-serif; margin: 2em }</style>"
        head = f'<meta charset="utf-8"><title>{escaped(self.title)}</title>{style}'
        return f"<!doctype html>\n<html lang=en><head>{head}</head><body>{self._repr_html_()}</body></html>\n".encode()


def trust(
    method: Attribution,
    image: ImagesLike | Batch,
    target: TargetLike = None,
    *,
    others: ImagesLike | None = None,
    draws: int = 19,
    seconds: float | None = None,
    seed: int = 0,
    shared: SharedResults | None = None,
) -> TrustCard:
    """Measure whether a map of one image can be trusted.

    Two exact tests have a verdict: whether the map depends on the class, and whether it marks what the model learned to
    use, as `saliency.metrics.ClassTest` and `saliency.metrics.WeightsTest`. All other rows are numbers.

    Args:
        method: The method.
        image: One image, as for `Attribution.attribute`.
        target: As for `Attribution.attribute`.
        others: At least three images of other classes, as for `Attribution.attribute`. By default, photos of the
            package, if the model has as many classes as ImageNet.
        draws: The number of untrained networks: 19 for a level of 5 %, 99 for 1 %. Fewer are drawn if some of their
            maps are better.
        seconds: A time limit. After it, no further network is drawn, which makes the p-value larger, and the numbers
            without a test are left out. Without a limit, the card depends only on the seed.
        seed: The seed of all draws.
        shared: The scores of perturbed images, and the untrained networks, that cards of other methods in the same
            call share with this one.

    Raises:
        MethodError: `method` is not a method, there are several images, or `seconds` is invalid.
    """
    began = time.perf_counter()
    if not isinstance(method, Attribution):
        raise MethodError(f"expected a method, such as GradCAM(model), got {described(method)}")
    method, *_ = getattr(method, "compiled", [method])  # most calls are of changed models or options
    if isinstance(image, Mapping):
        problem = "a trust card is of one image, of a model that holds its other inputs; got a mapping of them"
        raise MethodError(f"{problem}; pass result.hold(NAME) of the result of attribute")
    weights = WeightsTest(draws=draws, stop=STOP, seconds=seconds)
    explanation = method.attribute(image, target)
    is_slow = time.perf_counter() - began > SLOW
    if len(explanation) != 1:
        raise MethodError(f"a trust card is of one image, got {len(explanation)}")
    context: dict[str, Any] = {"seed": seed, "shared": shared, "others": others, "controls": list(CONTROLS)}
    subject = Subject(explanation, method=method, inputs=image, target=target, **context)
    tested = _coarse(subject) if is_slow else subject
    measured = dict[str, Measurement]()
    rows = [_test_row(test, tested, measured) for test in (ClassTest(), weights)]
    for numbers in (_place, _compared, _changed, _agreement):
        if seconds is None or time.perf_counter() - began < seconds:
            rows += numbers(tested if numbers is _changed else subject, measured)
    title = f"Trust card of {explanation.method} for {explanation.target_names[0]}"
    card = TrustCard(rows, _COLUMNS, title, _notes(tested, explanation))
    card.explanation, card.seed, card.measurements = explanation, seed, measured
    why = f"was not measured: it does not fit into seconds={seconds}, or does not apply"
    card.absent = {name: f'"{name}" {why}' for name in TITLES.keys() - {row.name for row in rows}}
    card.seconds = time.perf_counter() - began
    return card


def _coarse(subject: Subject) -> Subject:
    """Return the subject of a faster method on the same image, with fewer passes or larger windows, if it has any."""
    method, side = copy.copy(subject.method), min(subject.explanation.input_size)
    faster = {"window": min(64, max(1, 2 * side // 7)), "stride": min(32, max(1, side // 7))}
    for name, least in (("passes", 100), ("steps", 5)):
        count: Any = getattr(method, name, None) or getattr(method, "default_passes", least)
        faster[name] = min(count, max(least, count // 20))
    options = declared_options(type(method)).keys() & faster.keys()
    if not options:
        return subject
    vars(method).update({name: faster[name] for name in options})
    explanation = method.attribute(subject.inputs_for(method, subject.images), subject.explained_target)
    return subject.of(explanation, method=method)


def _test_row(test: ExactTest, subject: Subject, measured: dict[str, Measurement]) -> Property:
    """Return the row of a test, or the reason why it was not measured."""
    title, strip, chance = TITLES[test.name], tuple[float, ...](), {"chance": 0.25}
    try:
        (result,) = measurements([test], subject)
    except SaliencyError as reason:
        return Property(test.name, title, math.nan, math.nan, True, f"not measured: {reason}", math.nan)
    measured[test.name] = result
    value, error, p = (float(cast("Tensor", part)) for part in (result.values, result.error, result.p))
    sentence = f"{share(value)} of the map lies on the image of its class (25 % by chance)"
    if isinstance(test, WeightsTest):
        own, others, missing = test.scores(subject)
        strip, chance = (own, *others), {}
        sentence = f"better than the maps of {round(value * len(others))} of {len(others)} untrained networks"
        sentence += f", and {missing} others have no map" if missing else ""
        if len(others) < test.draws and len(reached(own, others)) < STOP:
            sentence += f"; seconds={test.seconds:g} allows no more than {len(others)} of {test.draws}"
    elif None in subject.explanation.target:
        chance = {"chance": 0.5}
        sentence = f"better for its object than {share(value)} of the maps of others (50 % by chance)"
    is_worse = len(strip) * LEVEL >= 1 and is_worst(strip[0], strip[1:])
    verdict = sentence if p <= LEVEL else WORSE if is_worse else f"{UNCLEAR}: {sentence}"
    return Property(test.name, title, value, error, True, verdict, p, chance, strip)


def _place(subject: Subject, measured: dict[str, Measurement]) -> list[Property]:
    """Return the rank of the map among copies of itself at other positions."""
    copies = control_maps(reduced_maps(subject.explanation, None), subject.seed, COPIES, names=("random",))
    size = subject.explanation.input_size
    maps = [full_size(subject.explanation), *(resized_within(moved, size) for moved in copies)]
    own, *others = scores = effects(subject, torch.cat(maps)).tolist()
    worse = COPIES - len(reached(own, others))
    verdict = f"better than {worse} of {COPIES} copies of itself at other positions"
    return [Property("place", TITLES["place"], worse / COPIES, math.nan, True, verdict, strip=tuple(scores))]


def _compared(subject: Subject, measured: dict[str, Measurement]) -> list[Property]:
    """Return metrics of faithfulness, compared with maps that ignore the prediction."""
    rows = list[Property]()
    for result in measurements([*CURVES, Infidelity(passes=60)], subject):
        better = 1 if result.higher_is_better else -1
        value = float(result.values)
        others = {name: float(control.values) for name, control in result.controls.items()}
        unbeaten = [CONTROLS[name] for name, other in others.items() if better * (value - other) <= slack(value)]
        verdict = f"no better than {', '.join(unbeaten)}" if unbeaten else f"better than {', '.join(CONTROLS.values())}"
        rows.append(_number_row(result, verdict, others))
        measured[result.metric] = result
    return rows


def _number_row(result: Measurement, verdict: str, controls: Mapping[str, float] = MappingProxyType({})) -> Property:
    value, error = float(result.values), math.nan if result.error is None else float(result.error)
    title, higher = TITLES[result.metric], bool(result.higher_is_better)
    return Property(result.metric, title, value, error, higher, verdict, controls=dict(controls))


def _changed(subject: Subject, measured: dict[str, Measurement]) -> list[Property]:
    """Return how far the map changes with the weights, and under noise."""
    if "weights" not in measured:
        return []
    maps = torch.stack([untrained_map(subject, draw) for draw in range(DRAWS)])
    drops = 1 - RankCorrelation().compare(maps, full_size(subject.explanation))
    drop, error = float(drops.mean()), float(drops.std()) / math.sqrt(DRAWS)
    verdict = f"the rank correlation with the maps of {DRAWS} untrained networks is {number(1 - drop)}"
    (noise,) = measurements([AvgSensitivity(passes=DRAWS)], subject.of(subject.explanation))
    measured["avg_sensitivity"] = noise
    changes = f"small noise changes the map by {share(float(noise.values))}"
    return [Property("mprt", TITLES["mprt"], drop, error, True, verdict), _number_row(noise, changes)]


def _agreement(subject: Subject, measured: dict[str, Measurement]) -> list[Property]:
    """Return the mean rank correlation with methods of other families, if their maps are not the same."""
    if subject.explanation.target_names[0] == ITSELF:  # where gradients are zero
        return []
    method, values, metric = subject.method, dict[str, float](), RankCorrelation()
    for name in REFERENCES:
        cls = METHODS[name]
        if cls.__module__ == type(method).__module__:
            continue
        other = cls(method.model, preprocess=method.preprocess, layout=method.layout)
        with suppress(SaliencyError):  # no layer for CAMs, or no gradient
            inputs = subject.inputs_for(method, subject.images)
            key = name, id(method.model), subject.explanation.target_names
            reference = subject.shared.once(key, other.attribute, inputs, subject.explained_target)
            result = metric.measure(subject.explanation, reference=reference, controls=False)
            if abs(value := float(result.values)) <= SAME:
                values[name] = value
    if not values:
        return []
    mean = torch.full_like(result.values, sum(values.values()) / len(values))
    measured[metric.name] = replace(result, values=mean)
    return [_number_row(measured[metric.name], f"with {', '.join(values)}")]


def _notes(subject: Subject, explanation: Explanation) -> list[str]:
    notes = ["p: the probability of such a rank by chance; it is clear up to 0.05; ±: a standard error"]
    faster = {key: value for key, value in subject.explanation.settings.items() if value != explanation.settings[key]}
    if faster:
        options = ", ".join(f"{name}={value}" for name, value in faster.items())
        notes.append(f"the method is slow, so both tests are of its map with {options}")
    if explanation.coverage is not None:
        notes.append(f"coverage: {explanation.coverage}")
    if explanation.residual is not None:
        fraction = float(explanation.residual[0]) / (float(explanation.scores[0]) or 1.0)
        notes.append(f"residual: {share(abs(fraction))} of the score")
    return notes
