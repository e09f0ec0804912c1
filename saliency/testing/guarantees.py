"""Checks of a method: its documentation, its results, and that equal inputs give equal results in all circumstances."""

from __future__ import annotations

import copy
import gc
import inspect
import json
import math
import pickle
import random
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, cast, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attribution.base import METHODS, Attribution, Together, source, summary
from ..attribution.explanation import Explanation
from ..errors import (
    MethodError,
    NonFiniteError,
    NotApplicableError,
    SaliencyError,
    SaliencyWarning,
    TargetError,
    plural,
)
from ..methods.gradient import VanillaGradient
from ..targets.classes import as_target
from ..validation import Sign, described
from .case import (
    SIZE,
    Check,
    MethodCase,
    images,
    require,
    require_raises,
    require_same,
    require_same_explanation,
    tiny_model_for,
)
from .unchanged import UNCHANGED_CHECKS, with_user_state

CHECKS: dict[str, Check] = dict(UNCHANGED_CHECKS)  # all checks by name


def check(function: Check) -> Check:
    """Register a check under the name of its function."""
    CHECKS[function.__name__] = function
    return function


# One result in all circumstances -------------------------------------------------------------------------------

# Function that explains `images(2)` for the classes 0 and 1 under circumstances that must not change the result.
Variant = Callable[[MethodCase], Explanation]


def _under(context: Callable[[], AbstractContextManager[Any]], case: MethodCase) -> Explanation:
    model = case.model()
    with context():
        return case.explain(model)


def _returning(pack: Callable[[Tensor], Any], case: MethodCase) -> Explanation:
    model = case.model()
    model.register_forward_hook(lambda module, inputs, output: pack(output))
    return case.explain(model)


def _other_default_dtype() -> ExitStack:
    undo = ExitStack()
    undo.callback(torch.set_default_dtype, torch.get_default_dtype())
    torch.set_default_dtype(torch.float64)
    return undo


_VARIANTS: dict[str, dict[str, Variant]] = {
    "frozen_model": {"frozen parameters": lambda case: case.explain(case.model().requires_grad_(False))},
    "callers_modes": {
        "under no_grad": partial(_under, torch.no_grad),
        "under inference_mode": partial(_under, torch.inference_mode),
        "a model in training mode": lambda case: case.explain(with_user_state(case.model(), training=True)),
    },
    # Like torch.set_default_device; meta tensors have no values.
    "default_device": {"a default device other than the model's": partial(_under, lambda: torch.device("meta"))},
    "default_dtype": {"a default dtype other than the model's": partial(_under, _other_default_dtype)},
    "named_outputs": {
        "a dictionary with logits": partial(_returning, lambda y: {"logits": y, "hidden": y[:, :1]}),
        "a dictionary with one tensor": partial(_returning, lambda y: {"anything": y, "loss": None}),
        "a tuple of one tensor": partial(_returning, lambda y: (y,)),
    },
}


def _check_variants(name: str, case: MethodCase) -> None:
    for circumstances, explain in _VARIANTS[name].items():
        require_same_explanation(explain(case), case.expected, circumstances)


CHECKS |= {name: partial(_check_variants, name) for name in _VARIANTS}


@check
def copies(case: MethodCase) -> None:
    """Deep copies and pickled copies give the same explanation."""
    method, x = case.on(case.model()), images(2)
    require_same_explanation(copy.deepcopy(method).attribute(x, [0, 1]), case.expected, "a deep copy")
    module = vars(sys.modules.get(case.method.__module__, object))
    if module.get(case.method.__qualname__) is case.method:  # pickle finds classes by name
        pickled = pickle.loads(pickle.dumps(method))  # noqa: S301 - pickled in the same line
        require_same_explanation(pickled.attribute(x, [0, 1]), case.expected, "a pickled copy")


@check
def half_precision(case: MethodCase) -> None:
    """Half precision changes a map by rounding only, in a 16-bit model and under the caller's autocast."""
    maps = {"under autocast": _under(lambda: torch.autocast("cpu", torch.bfloat16), case).values}
    for dtype in (torch.bfloat16, torch.float16):
        maps[f"a model in {dtype}"] = case.explain(case.model().to(dtype), images(2).to(dtype)).values
    for what, values in maps.items():
        cosine = float(F.cosine_similarity(values.flatten(1).float(), case.expected.values.flatten(1).float()).min())
        require(cosine > 0.95, f"{what}: cosine {cosine:.3f} with the map in float32")


def _require_images_alone(method: Attribution, x: Tensor, targets: list[int], what: str) -> None:
    batch = method.attribute(x, targets)
    for i, target in enumerate(targets):
        alone = method.attribute(x[i], target)
        require_same_explanation(batch[i], alone, f"image {i} of {what} against the image alone")


@check
def batch_equals_single_images(case: MethodCase) -> None:
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


def _works(call: Callable[[], Any], *errors: type[Exception]) -> bool:
    """Return False if a call raises one of these errors, else True."""
    with suppress(*errors):
        call()
        return True
    return False


def _explains(method: Attribution, x: Tensor, target: Any) -> bool:
    return _works(lambda: method.attribute(x, target), NotApplicableError)


@check
def global_seed_does_not_matter(case: MethodCase) -> None:
    """The global random states do not affect the result."""
    model, x = case.model(), images(2)
    method = case.on(model)
    first = method.attribute(x, [0, 1])
    with ExitStack() as undo:
        undo.enter_context(torch.random.fork_rng(devices=[]))
        undo.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002 - the global one
        undo.callback(random.setstate, random.getstate())
        torch.rand(3, dtype=torch.float32, device="cpu"), np.random.rand(3), random.random()  # noqa: NPY002, S311
        repeated, rebuilt = method.attribute(x, [0, 1]), case.on(model).attribute(x, [0, 1])
    for explanation, what in ((repeated, "the same call again"), (rebuilt, "a new object with the same options")):
        equal = torch.equal(explanation.values, first.values) and torch.equal(explanation.scores, first.scores)
        require(equal, f"{what}, after the global random states changed, gave different values")


@check
def chunk_size_does_not_matter(case: MethodCase) -> None:
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
    what += " (make(start, stop) must return the same inputs for the same passes; see saliency.extending.generator)"
    scale = float(expected.values.abs().max())
    require_same(explanation.values, expected.values, f"values {what}")
    for name in ("error", "agreement", "residual"):
        value, wanted = getattr(explanation, name), getattr(expected, name)
        require((value is None) == (wanted is None), f"{name} {what}: {value}, expected {wanted}")
        if value is not None:
            require_same(value + scale, wanted + scale, f"{name} {what}")


@check
def several_targets(case: MethodCase) -> None:
    """`attribute_classes` gives the same results as `attribute` for each target."""
    method, x = case.on(case.model()), images(2)
    targets: list[Any] = [0, [1, 0], None]
    for explanation, target in zip(method.attribute_classes(x, targets), targets, strict=True):
        expected = method.attribute(x, target)
        require_same_explanation(explanation, expected, f"attribute_classes against attribute, target {target}")


@check
def explained_together(case: MethodCase) -> None:
    """`Together` gives the same results as separate calls, for this method and for other methods."""
    model, x = case.model(), images(2)
    method, plain = case.on(model), VanillaGradient(model)
    before, shared, after = Together(plain, method, plain).attribute(x, [0, 1])
    require_same_explanation(shared, case.expected, "Together against attribute")
    for explanation in (before, after):
        what = "the plain gradient, explained together with this method"
        require_same_explanation(explanation, plain.attribute(x, [0, 1]), what)


@check
def top_class(case: MethodCase) -> None:
    """Without a target, the top class of each image is explained, or another target that the method declares."""
    model, x = case.model(), images(3)
    none = as_target(None)
    if case.on(model).explained_target(none) is not none:  # such as a probability
        return
    with torch.no_grad():
        top = model(x).argmax(1).tolist()
    explanation = case.explain(model, x, None)
    require(explanation.target == tuple(top), f"without a target, {explanation.target} was explained, expected {top}")
    require_same_explanation(explanation, case.explain(model, x, top), "no target against the top classes by index")


@check
def nested_in_the_target(case: MethodCase) -> None:
    """A call inside the target function of another call affects neither result."""
    method, x, other = case.on(case.model()), images(2), images(1, seed=9)
    inner = method.attribute(other, 1)

    def nesting(output: Tensor) -> Tensor:
        require_same_explanation(method.attribute(other, 1), inner, "a call inside the target of another")
        return output[:, 0]

    if _explains(method, x, lambda output: output[:, 0]):  # some methods explain classes only
        expected = method.attribute(x, lambda output: output[:, 0]).values
        require_same(method.attribute(x, nesting).values, expected, "a call with another call inside its target")


@check
def parallel_threads(case: MethodCase) -> None:
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
        what = "a plain gradient in a thread parallel to this method"
        require_same(_plain_gradient(model, batches[i]), plain[i], what)

    run_in_threads([explain, differentiate] * 4)


def _plain_gradient(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x)[:, 0].sum(), x)
    return gradient


def run_in_threads(jobs: Sequence[Callable[[int], None]], rounds: int = 2) -> None:
    """Run each job in its own thread, all in parallel, and raise the first failure."""
    start = threading.Barrier(len(jobs))

    def run(number: int, job: Callable[[int], None]) -> None:
        start.wait()
        for i in range(rounds):
            job((number + i) % 4)

    with ExitStack() as undo, ThreadPoolExecutor(len(jobs)) as pool:
        undo.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(1e-5)
        list(pool.map(run, range(len(jobs)), jobs))


# Documentation, settings and results ---------------------------------------------------------------------------


@check
def documented(case: MethodCase) -> None:
    """The class has a name, a complete docstring, `cost`, `units` and `sign`, and is in the registry."""
    cls = case.method
    text = inspect.getdoc(cls) or ""
    missing = [part for part in ("Values:", "Source:") if not re.search(rf"^{part}", text, re.MULTILINE)]
    for holds, failure in (
        (cls.name, f'{cls.__name__} has no name; give the class one: name = "my_cam"'),
        (cls.__dict__.get("__doc__"), f"{cls.__name__} has no docstring of its own"),
        (summary(cls).endswith("."), f"the docstring does not begin with a sentence: {summary(cls)!r}"),
        (not missing, f"the docstring has no line that begins with {', '.join(missing)}"),
        (source(cls), "the docstring has an empty source"),
        (cls.cost, "`cost` is empty; give the number of passes per call"),
        (cls.units, "`units` is empty; give the units of the values"),
        (cls.sign in get_args(Sign), f"`sign` is {cls.sign!r}, which is not one of {get_args(Sign)}"),
        (re.fullmatch(r"[a-z][a-z0-9_]*", cls.name), f"`name` is {cls.name!r}; expected a name like grad_cam"),
        (METHODS.get(cls.name) is cls, f'METHODS["{cls.name}"] is {METHODS.get(cls.name)}'),
    ):
        require(bool(holds), failure)


@check
def result(case: MethodCase) -> None:
    """The explanation contains correct values, scores, probabilities and metadata, and can be saved and loaded."""
    model, x = case.model(), images(2)
    method = case.on(model)
    explanation = method.attribute(x, [0, 1])
    with torch.no_grad():
        output = model(x)
    by_probability = all(name.startswith("probability of ") for name in explanation.target_names)
    explained = output.softmax(1) if by_probability else output
    require_same(explanation.scores, explained[[0, 1], [0, 1]], "the scores against the model's output")
    probabilities = explanation.probabilities
    require(probabilities is not None, "the explanation of classes has no probabilities")
    if probabilities is not None:
        require_same(probabilities, output.softmax(1)[[0, 1], [0, 1]], "the probabilities")
    shape = tuple(explanation.values.shape)
    at_input, at_layer = shape == (2, 3, *SIZE), len(shape) == 4 and shape[:2] == (2, 1)
    require(at_input or at_layer, f"values of shape {shape}; expected (N, C, H, W) or (N, 1, h, w)")
    require(bool(explanation.values.any()), "the values are zero everywhere on an ordinary image")
    for name, tensor in (("values", explanation.values), ("scores", explanation.scores)):
        require(not tensor.requires_grad, f"the {name} require gradients; detach them")
        require(tensor.dtype == output.dtype, f"the {name} are {tensor.dtype}, the model's output {output.dtype}")
    facts = ("method", "target", "settings", "input_size", "frames")
    expected = (method.name, (0, 1), method.settings, SIZE, (None, None))
    actual = tuple(getattr(explanation, name) for name in facts)
    require(actual == expected, f"the explanation has {facts} = {actual}, expected {expected}")
    with TemporaryDirectory() as folder:
        loaded = Explanation.load(explanation.save(f"{folder}/saved.safetensors"))
    require_same_explanation(loaded, explanation, "saved and loaded")
    require(loaded.coverage == explanation.coverage, "saved and loaded: the coverage differs")


@check
def residual(case: MethodCase) -> None:
    """Ledger plus residual equals the score; without a ledger, values plus residual do, up to a constant per class."""
    explanation = case.explain(case.precise_model(), images(4, dtype=torch.float64), 0)
    stated = explanation.residual
    if stated is None:
        return
    require(stated.shape == (4,), f"a residual of shape {tuple(stated.shape)}; expected (N,)")
    require(bool(torch.isfinite(stated).all()), "the residual is NaN or infinite")
    if explanation.ledger is not None:
        require_same(explanation.ledger.sum(1) + stated, explanation.scores, "ledger plus residual against the score")
    elif case.method.is_complete:
        # The values should sum to the score minus the score of a baseline or a bias, which is constant per class.
        missing = explanation.scores - explanation.values.flatten(1).sum(1)
        spread = float((missing - stated).std())
        rounding = 1e-5 * float(explanation.scores.abs().max() + missing.abs().max())
        failure = "values plus residual do not equal the score: the difference varies by"
        require(spread <= rounding, f"{failure} {spread:.3g} between images")


@check
def settings(case: MethodCase) -> None:
    """Options are stored as attributes, and a method built from its settings has the same settings."""
    model = case.model()
    method = case.on(model)
    missing = [name for name in case.method.options() if not hasattr(method, name)]
    require(not missing, f"the options {missing} are not attributes; store each under its name in the constructor")
    options = dict(method.settings)
    require(json.loads(json.dumps(options)) == options, f"the settings change in a JSON round trip: {options}")
    plain = {name: value for name, value in options.items() if getattr(method, name) == value}
    rebuilt = dict(case.on(model, **plain).settings)
    require(rebuilt == options, f"rebuilt from its settings, the method has {rebuilt}, expected {options}")
    require(case.method.__name__ in repr(method), f"repr() does not name the class: {method!r}")


@check
def memory(case: MethodCase) -> None:
    """Calls leak no tensors, and hold neither model nor input."""
    # Exclude existing objects from garbage collection, which takes seconds in a large process.
    with ExitStack() as undo:
        if gc.get_freeze_count() == 0:
            gc.collect()
            gc.freeze()
            undo.callback(gc.unfreeze)
        model, x = case.model(), images(1)
        method = case.on(model)
        for _ in range(2):
            method.attribute(images(1), 0)
        before = _live_tensors()
        for _ in range(12):
            method.attribute(images(1), 0)
        growth = _live_tensors() - before
        require(growth < 6, f"{growth} more tensors are alive after 12 calls")
        model_reference, x_reference = weakref.ref(model), weakref.ref(x)
        explanation = method.attribute(x, 0)
        del model, method, x
        gc.collect()
        require(model_reference() is None, "the model stays alive after the method is deleted")
        require(x_reference() is None, "the explanation keeps the input alive")
        del explanation


def _live_tensors() -> int:
    gc.collect()
    # Use the type instead of isinstance: some objects warn when `__class__` is accessed.
    return sum(issubclass(type(value), Tensor) for value in gc.get_objects())


# Degenerate input ----------------------------------------------------------------------------------------------


def _finite_explanation(method: Attribution, x: Tensor, what: str) -> Explanation | None:
    """Return the explanation, which must be finite, or None if the call raises a SaliencyError with a message."""
    try:
        explanation = method.attribute(x, [0, 1])
    except SaliencyError as error:
        require(bool(str(error)), f"{what}: {type(error).__name__} without a message")
        return None
    require(bool(torch.isfinite(explanation.values).all()), f"{what}: the values are NaN or infinite")
    require(len(explanation.values) == len(x), f"{what}: {len(explanation.values)} maps for {len(x)} images")
    return explanation


@check
def constant_image(case: MethodCase) -> None:
    """A constant image gives finite values or a SaliencyError."""
    for level in (0.0, 0.5, -2.0):
        _finite_explanation(case.on(case.model()), torch.full_like(images(2), level), f"an image of {level} everywhere")


@check
def zero_gradient(case: MethodCase) -> None:
    """A head of zeros gives zero values, unless the method does not use the head."""
    model, x = case.model(), images(2)
    normal = case.explain(model, x).values  # this call also finds the default layer
    with torch.no_grad():
        classes = model(x).shape[1]
        heads = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
        for module in [module for module in heads if module.weight.shape[0] == classes] or heads[-1:]:
            module.weight.zero_()
    explanation = _finite_explanation(case.on(model), x, "a head of zeros")
    if explanation is None or not explanation.values.any():
        return
    # A map of activations alone is the same for any head.
    same = explanation.values.shape == normal.shape and torch.allclose(explanation.values, normal)
    require(same, "with a head of zeros, the values are neither zero nor equal to the values with the original head")


@check
def one_pixel(case: MethodCase) -> None:
    """Tiny images give finite values or a SaliencyError."""
    for size in ((1, 1), (2, 2), (1, 9)):
        model = case.model()
        if _runs(model, size):
            _finite_explanation(case.on(model), images(2, size), f"an input of {size[0]}x{size[1]}")


@check
def non_square(case: MethodCase) -> None:
    """Height and width are not confused."""
    for height, width in ((12, 20), (20, 12)):
        model = case.model()
        if not _runs(model, (height, width)):
            continue
        explanation = case.explain(model, images(2, (height, width)))
        size = explanation.input_size
        require(size == (height, width), f"input_size {size} of a {height}x{width} input")
        h, w = explanation.values.shape[-2:]
        has_shape = h <= height and w <= width and abs(h * width - w * height) <= max(height, width)
        require(has_shape, f"a map of {h}x{w} for an input of {height}x{width}")


def _runs(model: nn.Module, size: tuple[int, int]) -> bool:
    """Return whether a model takes images of that size; some models take one size only."""
    return _works(lambda: model(images(1, size)), RuntimeError, ValueError, AssertionError)


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


@check
def bad_targets(case: MethodCase) -> None:
    """A target that does not fit the output raises TargetError."""
    model, x = case.model(), images(2)
    bad: list[Any] = [-1, 2.5, math.nan, 10**6, [0, 10**6], [0], [0, 1, 0], [], "espresso", True, b"a", {"a": 1}]
    bad += [torch.tensor([0.5, 1.0], device="cpu")]
    bad += [lambda output: output.sum(), lambda output: output.argmax(1), lambda output: 1.0]
    for target in bad:
        what = "a target function that does not give one score per image" if callable(target) else f"target {target!r}"
        require_raises((TargetError,), partial(case.explain, model, x, target), what)


def checks(
    method: type[Attribution], *, model: Callable[[], nn.Module] | None = None, **options: Any
) -> list[tuple[str, Callable[[], None]]]:
    """Return the name of each check, with a function that raises AssertionError if the method fails it.

    Args:
        method: The class.
        model: Function that creates the classifier to test, the same at every call. It maps batches (N, 3, 16, 16) to
            scores (N, classes) with at least 2 classes, in float32 on the CPU. By default a small convolutional network
            with several kinds of ReLU, global average pooling and a linear head; for a method that needs attention, a
            small transformer.
        options: Options of the method's constructor, with layers by name. They extend the method's `preview_options`.

    Raises:
        MethodError: `method` is not the class of a method.
    """
    if not isinstance(cast("object", method), type):
        raise MethodError(f"expected the class of a method, such as MyCAM, got {described(method)}")
    case = MethodCase(method, {**method.preview_options, **options}, model or tiny_model_for(method))
    return [(name, partial(_without_warnings, check, case)) for name, check in CHECKS.items()]


def _without_warnings(check: Check, case: MethodCase) -> None:
    """Run a check without the warnings of the toolkit, which test inputs may cause."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaliencyWarning)
        check(case)


def check_method(method: type[Attribution], *, model: Callable[[], nn.Module] | None = None, **options: Any) -> None:
    """Run all checks on a method.

    Args:
        method: The class.
        model: As for `checks`.
        options: Options of the method's constructor, with layers by name.

    Raises:
        AssertionError: The method fails checks. The message lists all failed checks with the reasons. The cause is an
            ExceptionGroup of the failures with their tracebacks.
    """
    failures: list[Exception] = []
    report: list[str] = []
    for title, check in checks(method, model=model, **options):
        try:
            check()
        except Exception as error:  # noqa: BLE001 - reported below, with its traceback
            failures.append(error)
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            report.append(f"{title}: {kind}{error}")
    if failures:
        count = plural(len(failures), "failed check")
        raise AssertionError("\n  ".join([f"{method.__name__}: {count}", *report])) from ExceptionGroup(count, failures)
