"""Checks that equal inputs give equal results: in a batch, in any order, in threads, nested, wrapped or repeated."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attribution.base import Attribution, explain_together
from ..attribution.explanation import Explanation
from ..errors import NotApplicableError
from ..methods.gradient import VanillaGradient
from .case import MethodCase, check, images, require, require_same, require_same_explanation
from .unchanged import Snapshot, with_user_state


def _require_images_alone(method: Attribution, x: Tensor, targets: list[int], what: str) -> None:
    batch = method.attribute(x, targets)
    for i, target in enumerate(targets):
        require_same_explanation(
            batch[i], method.attribute(x[i], target), f"image {i} of {what} against the image alone"
        )


@check
def batch_is_its_images(case: MethodCase) -> None:
    """A batch gives the same results as its images one by one."""
    x = images(3, dtype=torch.float64)
    _require_images_alone(case.on(case.precise_model()), x, [1, 0, 1], "a batch")


@check
def signed_layer(case: MethodCase) -> None:
    """A layer with signed activations gives the same results for a batch and for its images one by one."""
    model = case.precise_model()
    layer = next((name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)), None)
    if layer is None or "layer" not in case.method.parameters() or "layer" in case.options:
        return
    method, x = case.on(model, layer=layer), images(2, dtype=torch.float64)
    if _explains(method, x, [1, 0]):  # some methods read the last layer only
        _require_images_alone(method, x, [1, 0], "a batch at a signed layer")


def _explains(method: Attribution, x: Tensor, target: Any) -> bool:
    try:
        method.attribute(x, target)
    except NotApplicableError:
        return False
    return True


@check
def order_does_not_matter(case: MethodCase) -> None:
    """An image gives the same result at any position in the batch."""
    order, x = [2, 0, 1], images(3, dtype=torch.float64)
    method = case.on(case.precise_model())
    expected, moved = method.attribute(x, [0, 1, 1]), method.attribute(x[order], [1, 0, 1])
    for place, i in enumerate(order):
        require_same_explanation(moved[place], expected[i], f"image {i} at another position in the batch")


@check
def seed_fixes_the_result(case: MethodCase) -> None:
    """The global random states do not affect the result."""
    model, x = case.model(), images(2)
    # "auto" chooses the chunk size by timing, and chunk sizes differ by rounding.
    options = {"chunk": 2} if case.has_chunks else {}
    method = case.on(model, **options)
    first = method.attribute(x, [0, 1])
    with _other_random_states():
        repeated, rebuilt = method.attribute(x, [0, 1]), case.on(model, **options).attribute(x, [0, 1])
    for explanation, what in ((repeated, "the same call again"), (rebuilt, "a new object with the same options")):
        equal = torch.equal(explanation.values, first.values) and torch.equal(explanation.scores, first.scores)
        require(equal, f"{what}, after the global random states changed, gave different values")


@contextmanager
def _other_random_states() -> Iterator[None]:
    """Change the global random states, and restore them afterwards."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002 - the global one
    torch.rand(3, dtype=torch.float32, device="cpu"), np.random.rand(3), random.random()  # noqa: NPY002, S311
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])


@check
def chunks_do_not_show(case: MethodCase) -> None:
    """Any chunk size gives the same result, also after a chunk runs out of memory and is repeated in halves."""
    if not case.has_chunks:
        return
    x = images(2, dtype=torch.float64)
    expected = case.on(case.precise_model(), chunk=1).attribute(x, [0, 1])
    for chunk in (3, "auto"):
        explanation = case.on(case.precise_model(), chunk=chunk).attribute(x, [0, 1])
        _require_same_estimates(explanation, expected, f"in chunks of {chunk} against one by one")
    model, failed = case.precise_model(), False

    def fail_once(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        nonlocal failed
        if not failed and len(inputs[0]) == 3:
            failed = True
            raise torch.OutOfMemoryError("simulated by saliency.testing")

    model.register_forward_hook(fail_once)
    explanation = case.on(model, chunk=3).attribute(x[:1], 0)
    _require_same_estimates(explanation, expected[0], "of a chunk repeated after memory ran out")


def _require_same_estimates(explanation: Explanation, expected: Explanation, what: str) -> None:
    scale = float(expected.values.abs().max())
    try:
        require_same(explanation.values, expected.values, f"values {what}")
        for name in ("error", "agreement", "residual"):
            value, wanted = getattr(explanation, name), getattr(expected, name)
            require((value is None) == (wanted is None), f"{name} {what}: {value}, expected {wanted}")
            if value is not None:
                require_same(value + scale, wanted + scale, f"{name} {what}")
    except AssertionError as error:
        raise AssertionError(
            f"{error}; make(start, stop) must return the same inputs for the same pass numbers at every call: draw "
            "pass i from saliency.generator(seed, i)"
        ) from error


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


@check
def several_targets(case: MethodCase) -> None:
    """`attribute_classes` gives the same results as `attribute` for each target."""
    method, x = case.on(case.model()), images(2)
    targets: list[Any] = [0, [1, 0], None]
    for explanation, target in zip(method.attribute_classes(x, targets), targets, strict=True):
        expected = method.attribute(x, target)
        require_same_explanation(explanation, expected, f"attribute_classes against attribute, target {target}")


@check
def together_with_others(case: MethodCase) -> None:
    """`explain_together` gives the same results as separate calls, for this method and for others."""
    model, x = case.model(), images(2)
    method, plain = case.on(model), VanillaGradient(model)
    before, shared, after = explain_together([plain, method, plain], x, [0, 1])
    require_same_explanation(shared, method.attribute(x, [0, 1]), "explain_together against attribute")
    for explanation in (before, after):
        what = "the plain gradient, explained together with this method"
        require_same_explanation(explanation, plain.attribute(x, [0, 1]), what)


@check
def top_class(case: MethodCase) -> None:
    """Without a target, the top class of each image is explained."""
    model, x = case.model(), images(3)
    with torch.no_grad():
        top = model(x).argmax(1).tolist()
    explanation = case.explain(model, x, None)
    require(explanation.target == tuple(top), f"without a target, {explanation.target} was explained, expected {top}")
    require_same_explanation(explanation, case.explain(model, x, top), "no target against the top classes by index")


@check
def frozen_model(case: MethodCase) -> None:
    """Frozen parameters do not change the result."""
    frozen = case.explain(case.model().requires_grad_(False))
    require_same_explanation(frozen, case.explain(), "frozen against trainable parameters")


@check
def callers_modes(case: MethodCase) -> None:
    """`no_grad`, `inference_mode` and training mode do not change the result."""
    expected = case.explain()
    with torch.no_grad():
        require_same_explanation(case.explain(), expected, "under no_grad")
    model = case.model()
    with torch.inference_mode():
        require_same_explanation(case.explain(model), expected, "under inference_mode")
    training = with_user_state(case.model(), training=True)
    require_same_explanation(case.explain(training), expected, "a model in training mode")


@check
def default_device(case: MethodCase) -> None:
    """The user's default device is ignored: the method creates tensors on the device of the model."""
    model, x = case.model(), images(2)
    with torch.device("meta"):  # like torch.set_default_device; meta tensors have no values
        explanation = case.explain(model, x)
    require_same_explanation(explanation, case.explain(), "with a default device other than the model's")


@check
def default_dtype(case: MethodCase) -> None:
    """The user's default dtype is ignored: the method creates tensors in the dtype of the model."""
    model, x, before = case.model(), images(2), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        explanation = case.explain(model, x)
    finally:
        torch.set_default_dtype(before)
    require_same_explanation(explanation, case.explain(), "with a default dtype other than the model's")


@contextmanager
def _packed_output(model: nn.Module, pack: Callable[[Tensor], Any]) -> Iterator[None]:
    handle = model.register_forward_hook(lambda module, inputs, output: pack(output))
    try:
        yield
    finally:
        handle.remove()


@check
def named_outputs(case: MethodCase) -> None:
    """Scores in a dictionary or tuple are found."""
    model, expected = case.model(), case.explain()
    outputs: dict[str, Callable[[Tensor], Any]] = {
        "a dictionary with logits": lambda scores: {"logits": scores, "hidden": scores[:, :1]},
        "a dictionary with one tensor": lambda scores: {"anything": scores, "loss": None},
        "a tuple of one tensor": lambda scores: (scores,),
    }
    for name, pack in outputs.items():
        with _packed_output(model, pack):
            require_same_explanation(case.explain(model), expected, f"a model that returns {name}")


@check
def function_targets(case: MethodCase) -> None:
    """A function of any output gives the same result as a function of a tensor, with constants of any length."""
    model, x = case.model(), images(2)

    def classes(output: Tensor) -> Tensor:
        return output[[0, 1], [0, 1]]

    if not _explains(case.on(model), x, classes):  # some methods explain classes only
        return
    expected = case.explain(model, x, classes)
    for name, pack, target in _packed_targets():
        with _packed_output(model, pack):
            values = case.explain(model, x, target).values
        require_same(values, expected.values, f"a function of {name} against a function of a tensor")


def _packed_targets() -> Iterator[tuple[str, Callable[..., Any], Callable[[Any], Tensor]]]:
    """Yield outputs that contain scores: name, function that packs scores, target for class 0 and 1 of two images."""
    yield (
        "a list of one dictionary per image",
        lambda scores: [{"scores": row, "size": row[:2]} for row in scores],
        lambda output: torch.stack([output[0]["scores"][0], output[1]["scores"][1]]),
    )
    yield (
        "a tensor with the images second",
        lambda scores: torch.stack([scores, -scores]).contiguous(),
        lambda output: output[0, [0, 1], [0, 1]],
    )
    for length in (1, 2, 3, 4, 8, 16):
        # The target sums all rows of the constant, so it fails if the constant is sliced like a batch.
        constant = torch.full((length, 3), 1 / length, dtype=torch.float32, device="cpu")
        yield (
            f"a dictionary with a constant of {length} rows",
            partial(lambda constant, scores: {"scores": scores, "constant": constant.to(scores)}, constant),
            lambda output: output["scores"][[0, 1], [0, 1]] * output["constant"][:, 0].sum(),
        )


@check
def half_precision(case: MethodCase) -> None:
    """Half precision changes a map by rounding only, in a 16-bit model and under the caller's autocast."""
    expected = case.explain().values

    def require_similar(values: Tensor, what: str) -> None:
        cosine = float(F.cosine_similarity(values.flatten(1).float(), expected.flatten(1).float()).min())
        require(cosine > 0.95, f"{what}: cosine {cosine:.3f} with the map in float32")

    with torch.autocast("cpu", torch.bfloat16):
        require_similar(case.explain().values, "under autocast")
    for dtype in (torch.bfloat16, torch.float16):
        require_similar(case.explain(case.model().to(dtype), images(2).to(dtype)).values, f"a model in {dtype}")


@check
def wrapped_model(case: MethodCase) -> None:
    """Wrapping the model by `torch.compile` or `DataParallel` does not change the result."""
    expected = case.explain()
    compiled: Any = torch.compile(case.model(), backend="eager")
    for name, wrapped in (("torch.compile", compiled), ("DataParallel", nn.DataParallel(case.model()))):
        require_same_explanation(case.explain(wrapped), expected, f"a model wrapped by {name}")


@check
def nested_in_the_target(case: MethodCase) -> None:
    """A call inside the target function of another call affects neither result."""
    method, x, other = case.on(case.model()), images(2), images(1, seed=9)
    inner = method.attribute(other, 1)

    def plain(output: Tensor) -> Tensor:
        return output[:, 0]

    def nesting(output: Tensor) -> Tensor:
        require_same_explanation(method.attribute(other, 1), inner, "a call inside the target of another")
        return output[:, 0]

    if _explains(method, x, plain):  # some methods explain classes only
        expected = method.attribute(x, plain).values
        require_same(method.attribute(x, nesting).values, expected, "a call with another one inside its target")


@check
def nested_in_the_model(case: MethodCase) -> None:
    """A call inside the model's forward of another call affects neither result."""
    model, x, other = case.model(), images(2), images(1, seed=9)
    method = case.on(model)
    outer, inner = method.attribute(x, [0, 1]), method.attribute(other, 1)
    busy = False

    def explain(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal busy
        if not busy:
            busy = True
            require_same_explanation(method.attribute(other, 1), inner, "a call inside the model of another")
            busy = False

    model.register_forward_hook(explain)
    what = "a call with another one inside the model's forward"
    require_same_explanation(method.attribute(x, [0, 1]), outer, what)


@check
def threads_do_not_see_each_other(case: MethodCase) -> None:
    """Parallel calls on one model give the same results as single calls, and so do plain gradients in other threads."""
    model, twin = case.model(), case.model()
    method, reference = case.on(model), case.on(twin)
    batches = [images(2, seed=seed) for seed in range(4)]
    # Compute the expected values with a twin model, so that the threads are the first to run this model.
    explained = [reference.attribute(x, [i % 2, 0]) for i, x in enumerate(batches)]
    plain = [_plain_gradient(twin, x) for x in batches]

    def explain(i: int) -> None:
        explanation = method.attribute(batches[i], [i % 2, 0])
        require_same_explanation(explanation, explained[i], "a call in parallel threads")

    def differentiate(i: int) -> None:
        require_same(
            _plain_gradient(model, batches[i]), plain[i], "a plain gradient in a thread parallel to this method"
        )

    _run_in_threads([explain, differentiate] * 4)


@check
def threads_share_a_training_model(case: MethodCase) -> None:
    """Calls in threads on a model in training mode restore it once all are done."""
    model, x = with_user_state(case.model(), training=True), images(2)
    method = case.on(model)
    expected = method.attribute(x, [0, 1])
    before = Snapshot(model=model, method=method, input=x)

    def explain(_: int) -> None:
        require_same_explanation(
            method.attribute(x, [0, 1]), expected, "a call in parallel threads on a training model"
        )

    _run_in_threads([explain] * 8)
    changed = before.changes()
    require(not changed, f"after 8 threads: {', '.join(changed[:6])} changed")


def _plain_gradient(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x)[:, 0].sum(), x)
    return gradient


def _run_in_threads(jobs: Sequence[Callable[[int], None]], rounds: int = 4) -> None:
    """Run each job in its own thread, all in parallel, and raise the first failure."""
    failures: list[BaseException] = []
    start = threading.Barrier(len(jobs))

    def run(number: int, job: Callable[[int], None]) -> None:
        try:
            start.wait()
            for i in range(rounds):
                job((number + i) % 4)
        except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
            failures.append(error)

    threads = [threading.Thread(target=run, args=numbered) for numbered in enumerate(jobs)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if failures:
        raise failures[0]
