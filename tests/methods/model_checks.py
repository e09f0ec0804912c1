"""Promises for unusual models, which the base classes and the engine keep: observed, wrapped and nested ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from saliency import Attribution
from saliency.attribution.explanation import Explanation
from saliency.errors import NotApplicableError, SaliencyWarning
from saliency.testing import Snapshot, images, tiny_model_for
from saliency.testing.case import MethodCase, require, require_same, require_same_explanation
from saliency.testing.guarantees import run_in_threads
from saliency.testing.unchanged import with_user_state


def model_checks(method: type[Attribution], **options: Any) -> list[tuple[str, Callable[[], None]]]:
    """Return the name of each check, with a function that raises AssertionError if the method fails it."""
    case = MethodCase(method, {**method.preview_options, **options}, tiny_model_for(method))
    return [(check.__name__, partial(_without_warnings, check, case)) for check in MODEL_CHECKS]


def _without_warnings(check: Callable[[MethodCase], None], case: MethodCase) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaliencyWarning)
        check(case)


def observers(case: MethodCase) -> None:
    """Hooks of the user that change nothing do not affect the result."""
    for what, observe in {
        "full backward hooks on all layers": lambda layer: layer.register_full_backward_hook(_ignore),
        "full backward pre-hooks on all layers": lambda layer: layer.register_full_backward_pre_hook(_ignore),
        "forward hooks on all layers": lambda layer: layer.register_forward_hook(_ignore),
        "saved-tensor hooks on all layers": _with_saved_tensor_hooks,
    }.items():
        require_same_explanation(_observed(observe, case), case.expected, what)


def _observed(observe: Callable[[nn.Module], object], case: MethodCase) -> Explanation:
    model = case.model()
    for module in model.modules():
        if "inplace" in vars(module):
            vars(module)["inplace"] = False  # PyTorch refuses backward hooks on modules in place
        observe(module)
    before = Snapshot(model=model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        explanation = case.explain(model)
    require(not before.changes(), f"observers changed: {', '.join(before.changes())}")
    return explanation


def _ignore(*_: object) -> None:
    """Observe nothing."""


def _with_saved_tensor_hooks(module: nn.Module) -> None:
    opened: list[saved_tensors_hooks] = []

    def open_hooks(*_: object) -> None:
        opened.append(saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor))
        opened[-1].__enter__()

    module.register_forward_pre_hook(open_hooks)
    module.register_forward_hook(lambda *_: opened.pop().__exit__(None, None, None))


def wrapped_model(case: MethodCase) -> None:
    """Wrappers of a model do not affect the result."""
    compiled: Any = torch.compile(case.model(), backend="eager")
    require_same_explanation(case.explain(compiled), case.expected, "a model wrapped by torch.compile")
    parallel = case.explain(nn.DataParallel(case.model()))
    require_same_explanation(parallel, case.expected, "a model wrapped by DataParallel")


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


def parallel_threads_in_training_mode(case: MethodCase) -> None:
    """Parallel calls on a model in training mode restore the model when all calls are done."""
    model, x = with_user_state(case.model(), training=True), images(2)
    method = case.on(model)
    before = Snapshot(model=model, method=method, input=x)

    def explain(_: int) -> None:
        what = "a call in parallel threads on a training model"
        require_same_explanation(method.attribute(x, [0, 1]), case.expected, what)

    run_in_threads([explain] * 4)
    changed = before.changes()
    require(not changed, f"after 4 threads: {', '.join(changed[:6])} changed")


def _returning(pack: Callable[[Tensor], Any], target: Any) -> Callable[[MethodCase], Explanation]:
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


_FUNCTION_TARGETS: dict[str, Callable[[MethodCase], Explanation]] = {
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


def function_targets(case: MethodCase) -> None:
    """A target function gives the same result for any structure of the output, with constants of any length."""
    try:
        expected = case.explain(target=_two_classes)
    except NotApplicableError:  # some methods explain classes only
        return
    for output, explain in _FUNCTION_TARGETS.items():
        require_same(explain(case).values, expected.values, f"a function of {output} against a function of a tensor")


MODEL_CHECKS = (
    function_targets,
    observers,
    wrapped_model,
    images_that_affect_each_other,
    nested_in_the_model,
    parallel_threads_in_training_mode,
)
