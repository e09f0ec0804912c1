"""The same question gets the same answer: in a batch, in any order, in threads, nested, wrapped, frozen, twice."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attribution.base import explain_together
from ..errors import NotApplicableError
from ..methods.gradient import VanillaGradient
from .snapshot import Snapshot
from .subject import Check, Subject, images, require, require_same, require_same_explanation
from .untouched import lived_in


def _batch_is_its_images(subject: Subject) -> None:
    model, targets = subject.precise_model(), [1, 0, 1]
    method, x = subject.on(model), images(3, dtype=torch.float64)
    together = method.attribute(x, targets)
    for i, target in enumerate(targets):
        alone = method.attribute(x[i], target)
        require_same_explanation(together[i], alone, f"image {i} of a batch against the image alone")


def _order_does_not_matter(subject: Subject) -> None:
    model, order = subject.precise_model(), [2, 0, 1]
    method, x = subject.on(model), images(3, dtype=torch.float64)
    plain, moved = method.attribute(x, [0, 1, 1]), method.attribute(x[order], [1, 0, 1])
    for at, i in enumerate(order):
        require_same_explanation(moved[at], plain[i], f"image {i} in another place of the batch")


def _seed_fixes_the_result(subject: Subject) -> None:
    model, x = subject.model(), images(2)
    # Which chunks "auto" takes is a matter of time, and chunks differ by rounding.
    fixed = {"chunk": 2} if "chunk" in subject.method.options() else {}
    method = subject.on(model, **fixed)
    first = method.attribute(x, [0, 1])
    with _other_random_states():
        again, anew = method.attribute(x, [0, 1]), subject.on(model, **fixed).attribute(x, [0, 1])
    for each, what in ((again, "the same call again"), (anew, "a new object with the same options")):
        equal = torch.equal(each.values, first.values) and torch.equal(each.scores, first.scores)
        require(equal, f"{what}, after the global random states moved, gave other values")


def _chunks_do_not_show(subject: Subject) -> None:
    if "chunk" not in subject.method.options():
        return
    model, x = subject.precise_model(), images(2, dtype=torch.float64)
    expected = subject.on(model, chunk=1).attribute(x, [0, 1])
    for chunk in (3, "auto"):
        found = subject.on(model, chunk=chunk).attribute(x, [0, 1])
        require_same(found.values, expected.values, f"values in chunks of {chunk} against one by one")
        for name in ("error", "agreement", "residual"):
            came, wanted = getattr(found, name), getattr(expected, name)
            require((came is None) == (wanted is None), f"chunks of {chunk}: {name} is {came}, expected {wanted}")
            if came is not None:
                scale = float(expected.values.abs().max())
                require_same(came + scale, wanted + scale, f"{name} in chunks of {chunk} against one by one")


@contextmanager
def _other_random_states() -> Iterator[None]:
    """The global random states elsewhere than they were, and back."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002 - the global one
    torch.rand(3, dtype=torch.float32, device="cpu"), np.random.rand(3), random.random()  # noqa: NPY002, S311
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])


def _several_targets(subject: Subject) -> None:
    model, x = subject.model(), images(2)
    method = subject.on(model)
    several = method.attribute_classes(x, [0, [1, 0], None])
    for found, target in zip(several, (0, [1, 0], None), strict=True):
        expected = method.attribute(x, target)
        require_same_explanation(found, expected, f"attribute_classes against attribute, target {target}")


def _together_with_others(subject: Subject) -> None:
    model, x = subject.model(), images(2)
    method, plain = subject.on(model), VanillaGradient(model)
    shared = explain_together([plain, method, plain], x, [0, 1])
    require_same_explanation(shared[1], method.attribute(x, [0, 1]), "explain_together against attribute")
    expected = plain.attribute(x, [0, 1])
    for each in (shared[0], shared[2]):
        require_same_explanation(each, expected, "the plain gradient, explained together with this method")


def _top_class(subject: Subject) -> None:
    model, x = subject.model(), images(3)
    with torch.no_grad():
        top = model(x).argmax(1).tolist()
    method = subject.on(model)
    found = method.attribute(x)
    require(found.target == tuple(top), f"without a target, classes {found.target} were explained; the top ones: {top}")
    require_same_explanation(found, method.attribute(x, top), "no target against the top classes by index")


def _frozen_model(subject: Subject) -> None:
    model, x = subject.model(), images(2)
    expected = subject.on(model).attribute(x, [0, 1])
    found = subject.on(model.requires_grad_(False)).attribute(x, [0, 1])
    require_same_explanation(found, expected, "frozen parameters against free ones")


def _callers_modes(subject: Subject) -> None:
    model, x = subject.model(), images(2)
    expected = subject.on(model).attribute(x, [0, 1])
    with torch.no_grad():
        require_same_explanation(subject.on(model).attribute(x, [0, 1]), expected, "under no_grad")
    with torch.inference_mode():
        require_same_explanation(subject.on(model).attribute(images(2), [0, 1]), expected, "under inference_mode")
    found = subject.on(lived_in(subject.model(), training=True)).attribute(x, [0, 1])
    require_same_explanation(found, expected, "a model in training mode")


def _default_device(subject: Subject) -> None:
    model, x = subject.model(), images(2)
    expected = subject.on(subject.model()).attribute(x, [0, 1])
    with torch.device("meta"):  # what torch.set_default_device sets; a tensor made there holds no numbers
        found = subject.on(model).attribute(x, [0, 1])
    require_same_explanation(found, expected, "under another default device than the model's")


def _default_dtype(subject: Subject) -> None:
    model, x = subject.model(), images(2)
    expected = subject.on(subject.model()).attribute(x, [0, 1])
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = subject.on(model).attribute(x, [0, 1])
    finally:
        torch.set_default_dtype(before)
    require_same_explanation(found, expected, "under another default type than the model's")


def _named_outputs(subject: Subject) -> None:
    model, x = subject.model(), images(2)
    expected = subject.on(model).attribute(x, [0, 1])
    shapes: dict[str, Callable[[Tensor], Any]] = {
        "a dictionary with logits": lambda scores: {"logits": scores, "hidden": scores[:, :1]},
        "a dictionary with one tensor": lambda scores: {"anything": scores, "loss": None},
        "a tuple of one tensor": lambda scores: (scores,),
    }
    for name, pack in shapes.items():
        handle = model.register_forward_hook(lambda module, inputs, output, pack=pack: pack(output))
        found = subject.on(model).attribute(x, [0, 1])
        handle.remove()
        require_same_explanation(found, expected, f"a model that returns {name}")


def _function_targets(subject: Subject) -> None:
    """A function of any output means the same as a class, whatever lengths the constants in the output have."""
    model, x = subject.model(), images(2)
    method = subject.on(model)
    try:
        expected = method.attribute(x, lambda output: output[[0, 1], [0, 1]])
    except NotApplicableError:  # it explains classes only
        return
    for name, pack, target in _packed_outputs():
        handle = model.register_forward_hook(lambda module, inputs, output, pack=pack: pack(output))
        try:
            found = subject.on(model).attribute(x, target)
        finally:
            handle.remove()
        require_same(found.values, expected.values, f"a function of {name} against the same of a tensor")


def _packed_outputs() -> Iterator[tuple[str, Callable[[Tensor], Any], Callable[[Any], Tensor]]]:
    """Outputs that hold scores: the name, how it is made, and a target that reads class 0 and 1 of two images."""
    yield (
        "a list of one dictionary per image",
        lambda scores: [{"scores": each, "size": each[:2]} for each in scores],
        lambda output: torch.stack([output[0]["scores"][0], output[1]["scores"][1]]),
    )
    yield (
        "a tensor with the images second",
        lambda scores: torch.stack([scores, -scores]).contiguous(),
        lambda output: output[0, [0, 1], [0, 1]],
    )
    for length in (1, 2, 3, 4, 8, 16):
        # All rows of the constant count, so one that is cut shows.
        constant = torch.full((length, 3), 1 / length, dtype=torch.float32, device="cpu")
        yield (
            f"a dictionary with a constant of {length} rows",
            partial(_with_constant, constant),
            lambda output: output["scores"][[0, 1], [0, 1]] * output["constant"][:, 0].sum(),
        )


def _with_constant(constant: Tensor, scores: Tensor) -> dict[str, Tensor]:
    return {"scores": scores, "constant": constant.to(scores)}


def _images_that_affect_each_other(subject: Subject) -> None:
    """Passes of one image run one by one where the images of a batch change each other's scores."""
    if "chunk" not in subject.method.options():
        return
    model, x = subject.precise_model(), images(1, dtype=torch.float64)
    model.register_forward_hook(lambda module, inputs, output: output - output.mean(0) / 2)
    expected = subject.on(model, chunk=1).attribute(x, 0)
    for chunk in (3, "auto"):
        found = subject.on(model, chunk=chunk).attribute(x, 0)
        require_same(found.values, expected.values, f"chunks of {chunk} on a model whose images affect each other")


def _signed_layer(subject: Subject) -> None:
    """A layer with signed activations is read image by image too, sign and all."""
    model, x = subject.precise_model(), images(2, dtype=torch.float64)
    layer = next((name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)), None)
    if layer is None or "layer" not in subject.method.parameters() or "layer" in subject.options:
        return
    method = subject.on(model, layer=layer)
    try:
        together = method.attribute(x, [1, 0])
    except NotApplicableError:  # it reads the last layer only
        return
    for i, target in enumerate([1, 0]):
        alone = method.attribute(x[i], target)
        require_same_explanation(together[i], alone, f"image {i} of a batch at a signed layer against the image alone")


def _half_precision(subject: Subject) -> None:
    """Half precision changes a map by rounding only: a model in 16 bits, and one under the caller's autocast."""
    x = images(2)
    expected = subject.on(subject.model()).attribute(x, [0, 1]).values
    with torch.autocast("cpu", torch.bfloat16):
        _require_similar(subject.on(subject.model()).attribute(x, [0, 1]).values, expected, "under autocast")
    for dtype in (torch.bfloat16, torch.float16):
        found = subject.on(subject.model().to(dtype)).attribute(x.to(dtype), [0, 1])
        _require_similar(found.values, expected, f"a model in {dtype}")


def _require_similar(found: Tensor, expected: Tensor, what: str) -> None:
    cosines = F.cosine_similarity(found.flatten(1).float(), expected.flatten(1).float())
    require(float(cosines.min()) > 0.95, f"{what}: cosine {float(cosines.min()):.3f} with the map in float32")


def _wrapped_model(subject: Subject) -> None:
    model, x = subject.model(), images(2)
    expected = subject.on(model).attribute(x, [0, 1])
    compiled: Any = torch.compile(subject.model(), backend="eager")
    for name, wrapped in (("torch.compile", compiled), ("DataParallel", nn.DataParallel(subject.model()))):
        found = subject.on(wrapped).attribute(x, [0, 1])
        require_same_explanation(found, expected, f"a model wrapped by {name}")


def _nested_in_the_target(subject: Subject) -> None:
    model, x = subject.model(), images(2)
    method, other = subject.on(model), images(1, seed=9)
    inside = method.attribute(other, 1)

    def plain(output: Tensor) -> Tensor:
        return output[:, 0]

    def nesting(output: Tensor) -> Tensor:
        require_same_explanation(method.attribute(other, 1), inside, "a call inside the target of another")
        return output[:, 0]

    try:
        expected = method.attribute(x, plain)
    except NotApplicableError:  # it explains classes only
        return
    found = method.attribute(x, nesting)
    require_same(found.values, expected.values, "a call with another one inside its target")


def _nested_in_the_model(subject: Subject) -> None:
    model, x = subject.model(), images(2)
    method, other = subject.on(model), images(1, seed=9)
    outside, inside = method.attribute(x, [0, 1]), method.attribute(other, 1)
    busy = False

    def explain(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal busy
        if not busy:
            busy = True
            require_same_explanation(method.attribute(other, 1), inside, "a call inside the model of another")
            busy = False

    model.register_forward_hook(explain)
    found = method.attribute(x, [0, 1])
    require_same_explanation(found, outside, "a call with another one inside the model's forward")


def _threads_do_not_see_each_other(subject: Subject) -> None:
    model = subject.model()
    method = subject.on(model)
    batches = [images(2, seed=seed) for seed in range(4)]
    # The expected values come from a twin, so that the threads are the first to run this model.
    twin = subject.model()
    explained = [subject.on(twin).attribute(x, [i % 2, 0]) for i, x in enumerate(batches)]
    plain = [_plain_gradient(twin, x) for x in batches]

    def explain(i: int) -> None:
        found = method.attribute(batches[i], [i % 2, 0])
        require_same_explanation(found, explained[i], "a call beside others in threads")

    def differentiate(i: int) -> None:
        require_same(_plain_gradient(model, batches[i]), plain[i], "a plain gradient beside this method in threads")

    _run_in_threads([explain, differentiate] * 4)


def _threads_share_a_training_model(subject: Subject) -> None:
    model, x = lived_in(subject.model(), training=True), images(2)
    method = subject.on(model)
    expected = method.attribute(x, [0, 1])
    before = Snapshot(model=model, method=method, input=x)

    def explain(i: int) -> None:
        require_same_explanation(method.attribute(x, [0, 1]), expected, "a call beside others on a training model")

    _run_in_threads([explain] * 8)
    changed = before.changes()
    require(not changed, f"after 8 threads: {', '.join(changed[:6])} changed")


def _plain_gradient(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x)[:, 0].sum(), x)
    return gradient


def _run_in_threads(jobs: list[Callable[[int], None]], rounds: int = 4) -> None:
    """Each job in a thread of its own, all at once; the first failure is raised here."""
    failures: list[BaseException] = []
    start = threading.Barrier(len(jobs))

    def work(at: int, job: Callable[[int], None]) -> None:
        try:
            start.wait()
            for i in range(rounds):
                job((at + i) % 4)
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that asked
            failures.append(error)

    threads = [threading.Thread(target=work, args=each) for each in enumerate(jobs)]
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


VALUE_CHECKS: dict[str, Check] = {
    "batch_is_its_images": _batch_is_its_images,
    "order_does_not_matter": _order_does_not_matter,
    "seed_fixes_the_result": _seed_fixes_the_result,
    "chunks_do_not_show": _chunks_do_not_show,
    "several_targets": _several_targets,
    "together_with_others": _together_with_others,
    "top_class": _top_class,
    "frozen_model": _frozen_model,
    "callers_modes": _callers_modes,
    "default_device": _default_device,
    "default_dtype": _default_dtype,
    "named_outputs": _named_outputs,
    "function_targets": _function_targets,
    "images_that_affect_each_other": _images_that_affect_each_other,
    "signed_layer": _signed_layer,
    "half_precision": _half_precision,
    "wrapped_model": _wrapped_model,
    "nested_in_the_target": _nested_in_the_target,
    "nested_in_the_model": _nested_in_the_model,
    "threads_do_not_see_each_other": _threads_do_not_see_each_other,
    "threads_share_a_training_model": _threads_share_a_training_model,
}
