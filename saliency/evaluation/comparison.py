"""Comparison of methods by several metrics over many images: means, ranks and significant differences."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ..attribution.base import Attribution, require_methods
from ..attribution.estimates import tied_ranks
from ..attribution.explanation import Explanation
from ..errors import ImageError, MethodError, errors_as, plural
from ..io.atomic_write import write_by_suffix
from ..io.inputs import ImageLike, ImagesLike, read_mask, split_images
from ..model.answer import Answer
from ..tables import Column, Table, number
from ..targets.classes import TargetLike
from ..validation import described
from .metrics.base import ABSOLUTE, METRICS, RELATIVE, Measurement, Metric, SharedResults, measure, resolve_metrics

LEVEL = 0.05
"""Probability that a comparison calls any difference significant although the methods are equal."""

DRAWS = 2000
"""Bootstrap draws of the images for the ranges of ranks."""

RANDOM_CONTROLS = 3
"""Random controls of each map. The mean over the images needs fewer controls than the verdict on one image."""

CURVE_POINTS = 49
"""Points of a curve in a result, so that curves of images of any size have a mean."""

EXACT, FLIPS, BLOCK = 14, 20_000, 1000
"""Largest number of images for which all changes of signs are counted; else, the number of draws, and draws at once."""

GRID = 120
"""The p-values of images are rounded up to multiples of 1/120 before they are combined; those of 20 or 24 ranks are."""

_Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MetricResult:
    """Value of one metric for one method and image.

    Attributes:
        image: The image.
        method: The method.
        metric: The metric.
        value: The value; None where the metric is not defined.
        controls: The values of maps that ignore the prediction, by their names; None if not defined.
        higher_is_better: None if neither is better.
        seconds: Duration of the method.
        curves: The scores on which the value is based: of the map ("map") and of each control, at the positions "at".
            Interpolated to `CURVE_POINTS` points; empty if the metric has no curve, or any of the values is None.
        p: The p-value of an exact test.
    """

    image: str
    method: str
    metric: str
    value: float | None
    controls: Mapping[str, float | None]
    higher_is_better: bool | None
    seconds: float
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)
    p: float | None = None


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One method, or one control, by one metric.

    Attributes:
        name: The method, or a control such as "constant" or "centre": the mean over the controls of all methods.
        metric: The metric.
        mean: The mean over the images.
        error: The standard error of the mean over the images; None for one image.
        random: The mean of the method's own random controls; None for controls.
        better: "higher" or "lower"; empty if neither is better.
        rank: The rank among the methods, from 1; None for controls, and if neither is better.
        rank_low, rank_high: The range that contains 95 % of the ranks if the images are drawn again (bootstrap).
        better_than: The methods, and the controls of this method, that this method is significantly better than.
        images: The number of images for which all methods have a value.
        seconds: The median duration of the method for one image; None for controls.
        p: The p-value of all images together, of exact tests.
    """

    name: str
    metric: str
    mean: float
    error: float | None
    random: float | None
    better: str
    rank: int | None = None
    rank_low: int | None = None
    rank_high: int | None = None
    better_than: tuple[str, ...] = ()
    images: int = 0
    seconds: float | None = None
    p: float | None = None


@dataclass(frozen=True, slots=True)
class DifferenceRow:
    """Paired difference between a method and another method, or a control of the method.

    Attributes:
        name: The method.
        other: The subtracted method or control.
        metric: The metric.
        mean: The mean difference over the images.
        error: The standard error of the mean; None for one image.
        p: The p-value of the sign-flip test over the images, corrected by Holm for all differences of the comparison.
    """

    name: str
    other: str
    metric: str
    mean: float
    error: float | None
    p: float

    @property
    def is_significant(self) -> bool:
        """Whether the corrected p-value is at most `LEVEL`."""
        return self.p <= LEVEL


def _range(row: ComparisonRow) -> str:
    return "" if row.rank is None else f"{row.rank_low} to {row.rank_high}"


def _beaten(better_than: Sequence[str], most: int = 4) -> str:
    more = f" and {len(better_than) - most} more" if len(better_than) > most else ""
    return ", ".join(better_than[:most]) + more


_ROW = (
    Column("metric", "metric", align="left"),
    Column("better", "better", align="left"),
    Column("method", "name", align="left"),
    Column("mean", "mean", number, hint="over the images"),
    Column("error", "error", number, hint="standard error over the images"),
    Column("p", "p", number, hint="of an exact test, of all images together"),
    Column("random", "random", number, hint="mean of the method's own random controls"),
    Column("rank", "rank"),
    Column("95 %", _range, hint="range of the rank if the images are drawn again"),
    Column("better than", "better_than", _beaten, "left", hint="significantly"),
    Column("images", "images"),
    Column("seconds", "seconds", number, hint="of the method, for one image (median)"),
)
_DIFFERENCE = (
    Column("metric", "metric", align="left"),
    Column("method", "name", align="left"),
    Column("minus", "other", align="left"),
    Column("difference", "mean", number, hint="mean over the images"),
    Column("error", "error", number, hint="standard error over the images"),
    Column("p", "p", number, hint="corrected for all differences"),
    Column("", "is_significant", "significant".format, "left"),
)


class Comparison(Table[ComparisonRow]):
    """Table of methods and controls by metrics, best first. It prints as text and displays as HTML.

    Args:
        results: The values of all methods, images and metrics. A metric uses an image if all methods and their
            controls have a value for it.
        seed: The seed of the tests and of the ranges of ranks.
        model: The name of the model, for the section of a model card.

    Attributes:
        differences: The paired differences between methods, and of methods from their controls, with p-values. Metrics
            without a better direction have no differences.
        agreement: Kendall's W of the metrics, as in `concordance`.
        results: The values of all methods, images and metrics.

    Source: Holm, "A Simple Sequentially Rejective Multiple Test Procedure" (1979), https://www.jstor.org/stable/4615733.
    """

    def __init__(self, results: Iterable[MetricResult], seed: int = 0, model: str = "the model") -> None:
        self.results, self.model = tuple(results), model
        names = dict.fromkeys(result.metric for result in self.results)
        metrics = [_MetricValues([result for result in self.results if result.metric == name]) for name in names]
        measured = [metric for metric in metrics if metric.images]
        ranked = [metric for metric in measured if metric.higher is not None]
        differences = _tested(ranked, seed)
        rows = [row for metric in measured for row in metric.rows(differences, seed)]
        means = [(1 if metric.higher else -1) * metric.values.mean(1) for metric in ranked]
        self.agreement = concordance(np.stack(means)) if len(means) > 1 else None
        notes = _notes(metrics, len(differences), self.agreement)
        super().__init__(rows, _ROW, "Comparison of methods", notes)
        self.differences = Table(differences, _DIFFERENCE, "Paired differences")
        self._curves = [row for metric in measured for row in metric.mean_curves()]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the comparison atomically, in the format of the suffix, and return the path.

        Args:
            path: A file that ends in .json (with the differences, the mean curves and the value of each image), .html
                (a page with sortable tables) or .md (a section of a model card). For other formats, use `dataframe()`,
                such as `dataframe().to_csv()`.

        Raises:
            MethodError: The suffix is not supported.
            OSError: The file cannot be written.
        """
        return write_by_suffix(path, {".json": self._json, ".html": self._page, ".md": self._card})

    def _json(self) -> bytes:
        results = [asdict(result) for result in self.results]
        for result in results:
            del result["curves"]
        content = {
            "rows": [asdict(row) for row in self],
            "differences": [asdict(row) | {"is_significant": row.is_significant} for row in self.differences],
            "notes": self.notes,
            "curves": self._curves,
            "agreement": self.agreement,
            "results": results,
        }
        return (json.dumps(content, indent=1) + "\n").encode()

    def _page(self) -> bytes:
        page = files(__package__).joinpath("comparison.html").read_text("utf-8")
        tables = Table(self.rows, self.columns, notes=self.notes).to_html(), self.differences.to_html()
        return page.replace("<!-- tables -->", "\n".join(tables)).encode()

    def _card(self) -> bytes:
        """Return a section of a model card, in Markdown."""
        titles = ["", *(column.title for column in self.columns), ""]
        table = [titles, ["", *("---" for _ in self.columns), ""], *(["", *cells, ""] for cells in self.cells())]
        measured = {row.metric.partition("(")[0] for row in self}  # names, or classes of metrics with options
        left_out = [name for name, metric in METRICS.items() if not {name, metric.__name__} & measured]
        lines = [
            "## Explanations",
            f"Attribution methods on {self.model}, and maps that ignore it (without a rank), measured on images. "
            "Errors are standard errors over the images.",
            "\n".join(" | ".join(cells).strip() for cells in table),
            "### Limits",
            "\n".join(f"- {note}" for note in self.notes),
            "- These figures hold for these images and this model, and not for images of another kind.\n"
            "- A metric measures one property. A good value does not show that people understand the map.",
            "### Not measured",
            f"- By these metrics: {', '.join(left_out)}.\n- Whether the model relies on the right evidence, unless the "
            "position of the object was given.\n- Whether people decide better with these maps.",
        ]
        return ("\n\n".join(lines) + "\n").encode()


class _MetricValues:
    """Values of one metric.

    Attributes:
        images: The images for which all methods and their controls have a value.
        results: The n results of each of K methods for these images.
        values: (K, n) their values.
        controls: (K, n) the values of the controls of each method, by their names.
    """

    def __init__(self, results: Sequence[MetricResult]) -> None:
        self.name, self.higher = results[0].metric, results[0].higher_is_better
        methods = dict.fromkeys(result.method for result in results)
        complete = [result for result in results if None not in (result.value, *result.controls.values())]
        cells = {(result.method, result.image): result for result in complete}
        self.measured = list(dict.fromkeys(result.image for result in results))
        self.images = [image for image in self.measured if all((name, image) in cells for name in methods)]
        self.results = {name: [cells[name, image] for image in self.images] for name in methods}
        rows = self.results.values()
        self.values = np.array([[result.value for result in row] for row in rows], dtype=np.float64)
        self.controls = {
            control: np.array([[result.controls[control] for result in row] for row in rows], dtype=np.float64)
            for control in results[0].controls
        }

    def mean_curves(self) -> list[dict[str, Any]]:
        """Return the curves of each method, and of its controls, as means over the images."""
        rows = []
        for method, results in self.results.items():
            curves = [result.curves for result in results]
            means = {name: np.mean([curve[name] for curve in curves], 0).tolist() for name in curves[0]}
            rows.append({"method": method, "metric": self.name, "curves": means})
        return rows

    def pairs(self) -> list[tuple[str, str, _Array]]:
        """Return pairs of methods, and of methods and their controls, with the differences of their values (n,)."""
        named = dict(zip(self.results, self.values, strict=True))
        pairs = [(a, b, _difference(named[a], named[b])) for a, b in combinations(named, 2)]
        for control, values in self.controls.items():
            pairs += [(name, control, _difference(named[name], row)) for name, row in zip(named, values, strict=True)]
        return pairs

    def rows(self, differences: Sequence[DifferenceRow], seed: int) -> list[ComparisonRow]:
        """Return the rows of the methods, best first, and of the controls."""
        better = {None: "", True: "higher", False: "lower"}[self.higher]
        sign = -1 if self.higher else 1
        wins = [
            (difference.name, difference.other) if sign * difference.mean < 0 else (difference.other, difference.name)
            for difference in differences
            if better and difference.metric == self.name and difference.is_significant
        ]
        ranks = rank_ranges(sign * self.values, seed) if better else [(None, None, None)] * len(self.results)
        rows, count = [], len(self.images)
        random = self.controls["random"].mean(1).tolist() if "random" in self.controls else [None] * len(self.results)
        for results, values, control, rank in zip(self.results.values(), self.values, random, ranks, strict=True):
            name, seconds = results[0].method, float(np.median([result.seconds for result in results]))
            beaten = tuple(worse for winner, worse in wins if winner == name)
            tested = [result.p for result in results if result.p is not None]
            p = combined_p(np.array(tested)) if tested else None
            rows.append(
                ComparisonRow(name, self.name, *_mean(values), control, better, *rank, beaten, count, seconds, p)
            )
        rows.sort(key=lambda row: row.rank or 0)
        for name, values in self.controls.items():
            if name != "random":
                rows.append(ComparisonRow(name, self.name, *_mean(values.mean(0)), None, better, images=count))
        return rows


def _tested(metrics: Sequence[_MetricValues], seed: int) -> list[DifferenceRow]:
    """Return the differences of all pairs by all metrics, with corrected p-values."""
    groups = [(metric.name, metric.pairs()) for metric in metrics]
    named = [(name, other, metric, *_mean(values)) for metric, pairs in groups for name, other, values in pairs]
    # The smallest p-value is small enough to remain significant after the correction.
    flips = max(FLIPS, round(5 * len(named) / LEVEL))
    tests = [sign_flip_test(np.stack([values for *_, values in pairs], 1), seed, flips) for _, pairs in groups if pairs]
    corrected = holm(np.concatenate([*tests, np.empty(0)]))
    return [DifferenceRow(*about, float(p)) for about, p in zip(named, corrected, strict=True)]


def _difference(first: _Array, second: _Array) -> _Array:
    """Return the difference of values (n,), and zero where they differ only by rounding."""
    return np.where(np.isclose(first, second, rtol=RELATIVE, atol=ABSOLUTE), 0.0, first - second)


def _mean(values: _Array) -> tuple[float, float | None]:
    """Return the mean of values (n,) and its standard error, None for one value."""
    error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
    return float(values.mean()), error


def concordance(values: _Array) -> float | None:
    """Return Kendall's coefficient of concordance W of m metrics for n methods: 1 if all rank the methods alike.

    The mean over unrelated metrics is 1 / m. None if there is only one method, or no metric distinguishes them.

    Args:
        values: (m, n) the values of the methods by each metric, higher is better.

    Source: Kendall and Babington Smith, "The Problem of m Rankings" (1939), https://doi.org/10.1214/aoms/1177732186.
    """
    metrics, methods = values.shape
    ranks = np.stack([tied_ranks(torch.from_numpy(row)).numpy() for row in values])
    ties = sum(
        float((counts**3 - counts).sum()) for counts in (np.unique(row, return_counts=True)[1] for row in values)
    )
    most = metrics**2 * (methods**3 - methods) - metrics * ties
    total = ranks.sum(0)
    return float(12 * np.square(total - total.mean()).sum() / most) if most else None


def _notes(metrics: Sequence[_MetricValues], count: int, agreement: float | None) -> list[str]:
    """Return the meaning of the numbers, and the images and metrics that are left out."""
    notes = [
        f"{metric.name}: {plural(missing, 'image')} left out, for which not all methods and controls have a value"
        for metric in metrics
        if (missing := len(metric.measured) - len(metric.images))
    ]
    notes.append(
        f"significant: sign-flip test over the images at {100 * LEVEL:g} %, corrected by Holm for "
        f"{plural(count, 'difference')} between methods, and from their own controls"
    )
    images = max((len(metric.images) for metric in metrics), default=0)
    if count and count * 2.0 ** (1 - images) > LEVEL:
        least = math.ceil(1 + math.log2(count / LEVEL))
        notes.append(f"with {plural(images, 'image')} no difference can be significant; {least} or more are needed")
    if agreement is not None:
        ranked = sum(metric.higher is not None and bool(metric.images) for metric in metrics)
        notes.append(
            f"agreement of the {ranked} metrics on the order of the methods: Kendall's W = {number(agreement)} (1 if "
            f"equal, {number(1 / ranked)} on average if unrelated)"
        )
    return notes


def sign_flip_test(differences: _Array, seed: int = 0, flips: int = FLIPS) -> _Array:
    """Return the p-values (m,) of paired differences (n, m): two-sided, with a mean of zero as the hypothesis.

    If two methods are equally good, each difference is as likely as its negative. The p-value is the fraction of
    changes of signs that give a mean at least as large: of all changes up to `EXACT` differences, else of a sample.

    Args:
        differences: The differences between two methods for n images, for m pairs.
        seed: The seed of the random changes.
        flips: The number of random changes.

    Source: Good, "Permutation, Parametric and Bootstrap Tests of Hypotheses" (2005), https://doi.org/10.1007/b138696.
    """
    count, random = len(differences), np.random.default_rng(seed)
    is_exact = count <= EXACT
    total = 2**count if is_exact else flips
    rounding = 1e-12 * np.abs(differences).sum(0)
    least = np.abs(differences.sum(0)) - rounding
    extreme = np.zeros(differences.shape[1])
    for start in range(0, total, BLOCK):
        numbers = np.arange(start, min(start + BLOCK, total))[:, None]
        signs = (numbers >> np.arange(count)) & 1 if is_exact else random.integers(0, 2, (len(numbers), count))
        extreme += (np.abs((1 - 2.0 * signs) @ differences) >= least).sum(0)
    # The observed signs are one of the equally likely changes.
    return extreme / total if is_exact else (extreme + 1) / (total + 1)


def holm(p: _Array) -> _Array:
    """Return p-values (m,) corrected for m tests: if nothing differs, the probability that any is at most 5 % is 5 %.

    Source: Holm, "A Simple Sequentially Rejective Multiple Test Procedure" (1979), https://www.jstor.org/stable/4615733.
    """
    order = p.argsort()
    corrected = np.empty_like(p)
    corrected[order] = np.maximum.accumulate((len(p) - np.arange(len(p))) * p[order]).clip(max=1)
    return corrected


def combined_p(p: _Array) -> float:
    """Return the p-value of the mean of exact p-values (n,) of n images.

    Under the null hypothesis, each p-value is uniform or larger. So their sum is compared with the distribution of the
    sum of n uniform numbers on a grid.

    Source: Edgington, "An Additive Method for Combining Probability Values from Independent Experiments" (1972),
        https://doi.org/10.1080/00223980.1972.9924813.
    """
    total, mass = int(np.ceil(GRID * p - 1e-9).sum()), np.ones(1)
    for _ in p:
        mass = np.convolve(mass, np.full(GRID, 1 / GRID))
    return float(mass[: total - len(p) + 1].sum())


def rank_ranges(values: _Array, seed: int = 0) -> list[tuple[int, int, int]]:
    """Return for each row of values (K, n) its rank by the mean, 1 for the lowest, and the range of 95 % of its ranks.

    The range is taken over `DRAWS` bootstrap draws of the n columns.

    Args:
        values: The values of K methods for n images.
        seed: The seed of the draws.

    Source: Efron, "Bootstrap Methods: Another Look at the Jackknife" (1979), https://doi.org/10.1214/aos/1176344552.
    """
    count = values.shape[1]
    draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), DRAWS)
    means = np.concatenate([np.ones((1, count)), draws]) @ values.T  # (1 + DRAWS, K)
    ranks = 1 + (means[:, None, :] < means[:, :, None]).sum(2)
    low, high = np.quantile(ranks[1:], [0.025, 0.975], axis=0, method="inverted_cdf")
    return list(zip(ranks[0].tolist(), low.tolist(), high.tolist(), strict=True))


def compare(
    methods: Sequence[Attribution],
    images: ImagesLike | Answer,
    target: TargetLike = None,
    metrics: str | Metric | Sequence[str | Metric] = ("deletion", "insertion"),
    *,
    masks: Any = None,
    boxes: Sequence[Any] | Tensor | None = None,
    seed: int = 0,
    **options: Any,
) -> Comparison:
    """Compare methods by several metrics over images: which method suits this model?

    The metrics of an image and method share their passes. The methods share the passes that do not depend on the map:
    random patches, the image without any pixel, and the controls "constant" and "centre".

    Args:
        methods: Methods, such as `GradCAM(model)`. Methods of equal name are named with their options, and numbered if
            these are equal, as for one method on two models.
        images: One image or several, as for `Attribution.attribute`; or an answer about one image.
        target: One target for all images, a list with one for each image, or None for the top class of each image.
        metrics: Metrics, or their names in `METRICS`. Metrics of equal name are named with their options. Deletion and
            insertion each run about 1,340 forwards per image, and 890 for each further method; `Deletion(steps=28)`
            runs about 160 and 110.
        masks: The object in each image, for metrics of localisation: a path or a PIL image of the size of the
            image, in which the object is not black; or a tensor (H, W) as the model sees it. None without an object.
        boxes: Instead of a mask, the box of the object in each image, (x0, y0, x1, y1) in pixels of the upright image;
            or several boxes, (K, 4). None without an object. The box (0, 0, 1, 1) is the first pixel.
        seed: The seed of all draws.
        **options: As for `saliency.metrics.measure`: `score`, `chunk`, `progress`, `others`.

    Returns:
        A table of methods and controls by metrics, with errors, ranks and significant differences.

    Raises:
        MethodError: `methods` is not a list of methods, a metric is unknown or lacks data, an image has a mask
            and a box, or the numbers of targets, masks, boxes and images differ.
        ImageError: The size of a mask differs from the size of its image, or a box is empty or exceeds the image.
        SaliencyError: A method fails, or an image cannot be read.
    """
    require_methods(methods, "[GradCAM(model), LayerCAM(model)]")
    resolved = resolve_metrics(metrics)
    inputs: list[Any] = []
    for image in split_images(cast("ImagesLike", images)):
        inputs += image[:, None] if isinstance(image, Tensor) and image.dim() > 3 else [image]
    targets: Any = target.tolist() if isinstance(target, Tensor | np.ndarray) else target
    targets = targets if isinstance(targets, list | tuple) else [targets] * len(inputs)
    masks = [masks] if isinstance(masks, str | os.PathLike | Image.Image) else masks
    regions = [[None] * len(inputs) if values is None else values for values in (masks, boxes)]
    for what, values in zip(("targets", "masks", "boxes"), (targets, *regions), strict=True):
        if not isinstance(values, Sized):
            raise MethodError(f"{what}={described(values)}: expected a list, with an entry for each image")
        if len(values) != len(inputs):
            raise MethodError(f"got {len(values)} {what} for {plural(len(inputs), 'image')}")
    results: list[MetricResult] = []
    for index, (image, image_target, *region) in enumerate(zip(inputs, targets, *regions, strict=True)):
        others = (inputs[:index] + inputs[index + 1 :])[:12]
        context = {"seed": seed, "shared": SharedResults(), "others": others if len(others) > 2 else None, **options}
        for name, method in zip(unique_names(methods), methods, strict=True):
            results += measure_image(str(index), name, method, image, image_target, resolved, *region, **context)
    return Comparison(results, seed, type(methods[0].model).__name__)


def unique_names(parts: Sequence[Attribution] | Sequence[Metric]) -> list[str]:
    """Return the names of methods or metrics. Equal names get their options added, or a number."""
    names = [part.name for part in parts]
    names = [name if names.count(name) == 1 else repr(part) for name, part in zip(names, parts, strict=True)]
    return [
        name if names.count(name) == 1 else f"{name} {names[: index + 1].count(name)}"
        for index, name in enumerate(names)
    ]


def measure_image(
    name: str,
    method_name: str,
    method: Attribution,
    image: ImageLike | Answer,
    target: Any,
    metrics: Sequence[Metric],
    mask: Any = None,
    boxes: Any = None,
    **options: Any,
) -> list[MetricResult]:
    """Explain one image, and measure the explanation by all metrics.

    Args:
        name: The name of the image in the results.
        method_name: The name of the method in the results.
        method: The method.
        image: The image.
        target: The target.
        metrics: The metrics.
        mask: The mask of the object, as for `compare`.
        boxes: One or several boxes of the object, as for `compare`.
        **options: As for `saliency.metrics.measure`.

    Raises:
        SaliencyError: As for `compare`.
    """
    start = time.perf_counter()
    explanation = method.attribute(image, target)
    explanation.values.cpu()  # waits for a GPU
    seconds = time.perf_counter() - start
    if len(explanation) != 1:
        raise MethodError(f"a comparison is of single images; this answer is about {len(explanation)}")
    if mask is not None and boxes is not None:
        raise MethodError("got a mask and a box of the same image; expected one of them")
    on_image = mask if boxes is None else _box_mask(boxes, explanation)
    seen = None if on_image is None else _mask_as_seen(on_image, explanation)
    context = {"method": method, "inputs": image, "target": target, "masks": seen, **options}
    measurements = measure(metrics, explanation, **{"random_controls": RANDOM_CONTROLS, **context})
    results = []
    for metric, measured in zip(unique_names(metrics), measurements, strict=True):
        value = _number(measured.values)
        controls = {key: _number(control.values) for key, control in measured.controls.items()}
        curves = {} if None in (value, *controls.values()) else _curves(measured)
        higher = measured.higher_is_better
        p = None if measured.p is None else float(measured.p)
        results.append(MetricResult(name, method_name, metric, value, controls, higher, seconds, curves, p))
    return results


def _number(values: Tensor) -> float | None:
    """Return the value (1,) of one image, or None for NaN, which JSON does not have."""
    return None if values.isnan() else float(values)


def _curves(measurement: Measurement) -> dict[str, list[float]]:
    """Return the curves of a measurement of one image, as in a `MetricResult`."""
    if measurement.curve is None:
        return {}
    count = measurement.curve.shape[1]
    positions = torch.arange(count, device="cpu") if measurement.at is None else measurement.at
    controls = {name: curve[0] for name, curve in (measurement.control_curves or {}).items()}
    points, curves = np.linspace(0, count - 1, CURVE_POINTS), {"at": positions, "map": measurement.curve[0], **controls}
    return {name: np.interp(points, np.arange(count), values.cpu().numpy()).tolist() for name, values in curves.items()}


def _mask_as_seen(mask: Any, explanation: Explanation) -> Tensor:
    """Return a mask as the model sees it, from an image of the size of the image or a tensor (H, W).

    Raises:
        ImageError: The mask and the image differ in size, or the image was given as a tensor.
    """
    if not isinstance(mask, str | os.PathLike | Image.Image):
        return torch.as_tensor(mask, device="cpu")
    drawn, frame = Image.fromarray(read_mask(mask)), explanation.frames[0]
    if frame is None or frame.image.size != drawn.size:
        size = "a tensor" if frame is None else "x".join(map(str, frame.image.size))
        raise ImageError(
            f"the mask has {'x'.join(map(str, drawn.size))} pixels; expected the size of the image, {size}"
        )
    height, width = explanation.input_size
    seen = drawn.transform((width, height), Image.Transform.EXTENT, frame.box)
    return torch.as_tensor(np.array(seen), device="cpu")


def _box_mask(boxes: Any, explanation: Explanation) -> Image.Image | Tensor:
    """Return the mask of the boxes of an image: in the size of the image, or a tensor if the image is a tensor.

    Raises:
        ImageError: The boxes are invalid, or one is empty or exceeds the image.
    """
    frame, (height, width) = explanation.frames[0], explanation.input_size
    mask = Image.new("L", (width, height) if frame is None else frame.image.size)
    within = f"0 <= x0 < x1 <= {mask.width} and 0 <= y0 < y1 <= {mask.height}, the size of the image"
    problem = f"got the box {described(boxes)}; expected (x0, y0, x1, y1), or several, with {within}"
    with errors_as(ImageError, problem):
        rows = torch.as_tensor(boxes, dtype=torch.float64, device="cpu")
    rows = rows if rows.dim() > 1 else rows.view(1, -1)
    first, last = rows[:, :2], rows[:, 2:]
    size = torch.tensor(mask.size, dtype=torch.float64, device="cpu")
    if rows.shape[1:] != (4,) or not len(rows) or not ((first >= 0) & (first < last) & (last <= size)).all():
        raise ImageError(problem)
    for left, top, right, bottom in rows.tolist():
        mask.paste(255, (math.floor(left), math.floor(top), math.ceil(right), math.ceil(bottom)))
    return mask if frame is not None else torch.as_tensor(np.array(mask), device="cpu")
