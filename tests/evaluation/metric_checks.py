"""Checks of a metric: its documentation, its results, and that it leaves everything as it was."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from saliency.attribution.base import source, summary
from saliency.attribution.explanation import Explanation
from saliency.attribution.options import declared_options
from saliency.errors import NonFiniteError
from saliency.evaluation.metrics.base import Measurement, Metric
from saliency.methods.gradient import InputXGradient, VanillaGradient
from saliency.testing.case import SIZE, images, require, require_raises, require_same, tiny_model
from saliency.testing.unchanged import Snapshot

FEW: dict[str, Any] = {"steps": 4, "passes": 4, "draws": 2, "sizes": 3, "segments": (3, 3), "patch": 8}
FEW["shares"] = (0.3, 0.7)
"""Options that make metrics fast."""

METRIC_CHECKS: dict[str, Callable[[type[Metric]], None]] = {}


def _check(function: Callable[[type[Metric]], None]) -> Callable[[type[Metric]], None]:
    METRIC_CHECKS[function.__name__.lstrip("_")] = function
    return function


def metric_checks(metric: type[Metric]) -> list[tuple[str, Callable[[], None]]]:
    """Return the name of each check of a metric, with a function that raises AssertionError if the metric fails it."""
    return [(name, partial(check, metric)) for name, check in METRIC_CHECKS.items()]


def _explanation(x: Tensor | None = None) -> Explanation:
    x = images(2) if x is None else x
    return InputXGradient(tiny_model()).attribute(x, list(range(len(x))))


def _measure(metric: type[Metric], explanation: Explanation, x: Tensor, **changed: Any) -> Measurement:
    options = {name: value for name, value in FEW.items() if name in declared_options(metric)}
    method = InputXGradient(tiny_model())
    masks = torch.zeros(len(x), *SIZE, dtype=torch.bool, device="cpu")
    masks[:, 4:12, 4:12] = True
    reference = VanillaGradient(method.model).attribute(x, list(explanation.target))
    colours = torch.randn(64, 3, 1, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    others = colours.expand(-1, -1, *SIZE)  # of four classes
    context: dict[str, Any] = {"method": method, "inputs": x, "masks": masks, "reference": reference, "others": others}
    return metric(**options).measure(explanation, **{**context, **changed})


@cache
def _of_two_images(metric: type[Metric]) -> Measurement:
    """The measurement that several checks compare with another one."""
    return _measure(metric, _explanation(), images(2), chunk=7)


@_check
def _documented(metric: type[Metric]) -> None:
    """The docstring has a summary, the shape and units of the values, and a source."""
    require(bool(summary(metric)), "the docstring has no summary")
    require("Values: (N,)" in (metric.__doc__ or ""), 'the docstring has no paragraph "Values: (N,), ..."')
    require(bool(source(metric)), 'the docstring has no paragraph "Source: ..."')


@_check
def _shapes(metric: type[Metric]) -> None:
    """There is one value per image, and the error, the controls and the curve have the shapes that are documented."""
    result = _of_two_images(metric)
    rows = [result.values, *(part for control in result.controls.values() for part in control)]
    rows += [] if result.error is None else [result.error]
    require(all(row.shape == (2,) and row.dtype == torch.float64 for row in rows), "expected (N,) of float64")
    require(not result.values.isinf().any(), f"a value is infinite: {result.values}")
    json.dumps(dict(result.settings))
    if result.curve is not None and result.at is not None:
        require(result.curve.shape == (2, len(result.at)), f"the curve has shape {tuple(result.curve.shape)}")


@_check
def _images_alone(metric: type[Metric]) -> None:
    """The values of a batch equal the values of its images, measured one at a time."""
    x, together = images(2), _explanation()
    values = [_measure(metric, together[i], x[i : i + 1]).values for i in range(2)]
    require_same(torch.cat(values), _of_two_images(metric).values, "images measured alone", rounding=1e-4)


@_check
def _seeded(metric: type[Metric]) -> None:
    """The same seed gives the same values."""
    first, second = _of_two_images(metric).values, _measure(metric, _explanation(), images(2), chunk=7).values
    require(torch.equal(first.nan_to_num(), second.nan_to_num()), "two calls differ")


@_check
def _chunks(metric: type[Metric]) -> None:
    """The values do not depend on the number of passes per chunk."""
    first, second = _measure(metric, _explanation(), images(2), chunk=1).values, _of_two_images(metric).values
    require_same(second.nan_to_num(), first.nan_to_num(), "chunks of 7 instead of 1", rounding=1e-4)


@_check
def _unchanged(metric: type[Metric]) -> None:
    """The model, the method, the image, the map and the global random states are left as they were."""
    explanation, x, method = _explanation(), images(2), InputXGradient(tiny_model().train())
    before = Snapshot(model=method.model, method=method, x=x, values=explanation.values)
    _measure(metric, explanation, x, method=method)
    require(not before.changes(), f"changed: {', '.join(before.changes())}")


@_check
def _degenerate_maps(metric: type[Metric]) -> None:
    """Zero and constant maps give a defined result, and NaN is an error."""
    explanation = _explanation()
    for value in (0.0, 1.0):
        flat = replace(explanation, values=torch.full_like(explanation.values, value))
        values = _measure(metric, flat, images(2)).values
        require(not values.isinf().any(), f"a map of {value} has the value {values}")
    bad = replace(explanation, values=torch.full_like(explanation.values, math.nan))
    require_raises((NonFiniteError,), partial(_measure, metric, bad, images(2)), "a map of NaN")
