"""Checks of what the base classes promise for every method, besides those of `saliency.testing`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from saliency.attribution.explanation import Explanation
from saliency.errors import NonFiniteError
from saliency.testing import Snapshot, images
from saliency.testing.case import Check, MethodCase, require, require_raises, require_same, require_same_explanation
from saliency.testing.checks import Variant, _explains, _run_in_threads
from saliency.testing.unchanged import with_user_state

BASE_CHECKS: dict[str, Check] = {}  # by name


def check(function: Check) -> Check:
    """Register a check under the name of its function."""
    BASE_CHECKS[function.__name__] = function
    return function


@check
def wrapped_model(case: MethodCase) -> None:
    """A model in a wrapper gives the same results as the model."""
    compiled: Any = torch.compile(case.model(), backend="eager")
    require_same_explanation(case.explain(compiled), case.expected, "a model wrapped by torch.compile")
    parallel = nn.DataParallel(case.model())
    require_same_explanation(case.explain(parallel), case.expected, "a model wrapped by DataParallel")


@check
def images_that_affect_each_other(case: MethodCase) -> None:
    """If the images of a batch affect each other's scores, the passes of an image run one by one."""
    if not case.has_chunks:
        return
    model, x = case.precise_model(), images(1, dtype=torch.float64)
    model.register_forward_hook(lambda module, inputs, output: output - output.mean(0) / 2)
    expected = case.on(model, chunk=1).attribute(x, 0)
    for chunk in (3, "auto"):
        values = case.on(model, chunk=chunk).attribute(x, 0).values
        require_same(values, expected.values, f"chunks of {chunk} on a model whose images affect each other")


def _returning(pack: Callable[[Tensor], Any], target: Callable[[Any], Tensor]) -> Variant:
    def explain(case: MethodCase) -> Explanation:
        model = case.model()
        model.register_forward_hook(lambda module, inputs, output: pack(output))
        return case.explain(model, target=target)

    return explain


def _two_classes(output: Tensor) -> Tensor:
    return output[[0, 1], [0, 1]]


def _with_constant(rows: int, scores: Tensor) -> dict[str, Tensor]:
    return {"scores": scores, "constant": scores.new_full((rows, 3), 1 / rows)}


def _times_constant(output: dict[str, Tensor]) -> Tensor:
    # The sum of all rows is 1, unless the constant is sliced like a batch.
    return _two_classes(output["scores"]) * output["constant"][:, 0].sum()


_FUNCTION_TARGETS: dict[str, Variant] = {
    "a list of one dictionary per image": _returning(
        lambda scores: [{"scores": row, "size": row[:2]} for row in scores],
        lambda output: torch.stack([output[0]["scores"][0], output[1]["scores"][1]]),
    ),
    "a tensor with the images on axis 1": _returning(
        lambda scores: torch.stack([scores, -scores]).contiguous(), lambda output: _two_classes(output[0])
    ),
    **{
        f"a dictionary with a constant of {rows} rows": _returning(partial(_with_constant, rows), _times_constant)
        for rows in (1, 2, 3, 4, 8, 16)
    },
}


@check
def function_targets(case: MethodCase) -> None:
    """A target function gives the same result for any structure of the output, with constants of any length."""
    if not _explains(case.on(case.model()), images(2), _two_classes):  # some methods explain classes only
        return
    expected = case.explain(target=_two_classes)
    for output, explain in _FUNCTION_TARGETS.items():
        require_same(explain(case).values, expected.values, f"a function of {output} against a function of a tensor")


@check
def nested_in_the_model(case: MethodCase) -> None:
    """A call inside the model's forward of another call affects neither result."""
    model, other = case.model(), images(1, seed=9)
    method = case.on(model)
    inner = method.attribute(other, 1)
    busy = False

    def explain(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal busy
        if not busy:
            busy = True
            require_same_explanation(method.attribute(other, 1), inner, "a call inside the model of another")
            busy = False

    model.register_forward_hook(explain)
    what = "a call with another one inside the model's forward"
    require_same_explanation(method.attribute(images(2), [0, 1]), case.expected, what)


@check
def parallel_threads_in_training_mode(case: MethodCase) -> None:
    """Parallel calls on a model in training mode restore the model when all calls are done."""
    model, x = with_user_state(case.model(), training=True), images(2)
    method = case.on(model)
    before = Snapshot(model=model, method=method, input=x)

    def explain(_: int) -> None:
        what = "a call in parallel threads on a training model"
        require_same_explanation(method.attribute(x, [0, 1]), case.expected, what)

    _run_in_threads([explain] * 8)
    changed = before.changes()
    require(not changed, f"after 8 threads: {', '.join(changed[:6])} changed")


@check
def not_finite(case: MethodCase) -> None:
    """NaN or infinity in the input or the model's output raises NonFiniteError."""
    model = case.model()
    for bad in (math.nan, math.inf, -math.inf):
        x = images(2)
        x[1, 0, 3, 3] = bad
        require_raises((NonFiniteError,), partial(case.explain, model, x), f"{bad} in the input")
    model.register_forward_hook(lambda module, inputs, output: output * math.nan)
    require_raises((NonFiniteError,), lambda: case.explain(model), "a model that returns NaN")
