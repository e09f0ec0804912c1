"""Checks of the documentation, settings and results of a method, and of its behaviour for degenerate input."""

from __future__ import annotations

import copy
import gc
import inspect
import json
import math
import pickle
import re
import sys
import warnings
import weakref
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch
from torch import Tensor, nn

from ..attribution.base import METHODS, Attribution, source, summary
from ..attribution.explanation import Explanation, Sign
from ..errors import ImageError, NonFiniteError, SaliencyError, TargetError
from .case import (
    SIZE,
    MethodCase,
    check,
    images,
    require,
    require_raises,
    require_same,
    require_same_explanation,
)


@check
def documented(case: MethodCase) -> None:
    """The class has a name, a complete docstring, `cost`, `units` and `sign`, and is in the registry."""
    cls = case.method
    text = inspect.getdoc(cls) or ""
    missing = [part for part in ("Values:", "Raises:", "Source:") if not re.search(rf"^{part}", text, re.MULTILINE)]
    for holds, failure in (
        (cls.name, f'{cls.__name__} has no name; give the class one: name = "my_cam"'),
        (cls.__dict__.get("__doc__"), f"{cls.__name__} has no docstring of its own"),
        (summary(cls).endswith("."), f"the docstring does not begin with a sentence: {summary(cls)!r}"),
        (not missing, f"the docstring has no line that begins with {', '.join(missing)}"),
        (source(cls), "the docstring has an empty source"),
        (cls.cost, "`cost` is empty; give the number of passes per call"),
        (cls.units, "`units` is empty; give the units of the values"),
        (cls.sign in get_args(Sign), f"`sign` is {cls.sign!r}, which is not one of {get_args(Sign)}"),
        (re.fullmatch(r"[a-z][a-z0-9_]*", cls.name), f"`name` is {cls.name!r}; expected one like grad_cam"),
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
    require(probabilities is not None, "no probabilities for classes")
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
    """If there is a residual, values plus residual equal the score up to a constant per class."""
    explanation = case.explain(case.precise_model(), images(4, dtype=torch.float64), 0)
    if explanation.residual is None:
        return
    require(
        explanation.residual.shape == (4,), f"a residual of shape {tuple(explanation.residual.shape)}; expected (N,)"
    )
    require(bool(torch.isfinite(explanation.residual).all()), "a residual that is NaN or infinite")
    if not case.method.is_complete:
        return
    # The values should sum to the score minus the score of a baseline or a bias, which is constant per class.
    missing = explanation.scores - explanation.values.flatten(1).sum(1)
    spread = float((missing - explanation.residual).std())
    rounding = 1e-5 * float(explanation.scores.abs().max() + missing.abs().max())
    require(
        spread <= rounding,
        f"values plus residual do not equal the score: the difference varies by {spread:.3g} between images",
    )


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
    require(
        rebuilt == options, f"a method rebuilt from its settings has different settings: {rebuilt}, expected {options}"
    )
    require(case.method.__name__ in repr(method), f"repr() does not name the class: {method!r}")


@check
def copies(case: MethodCase) -> None:
    """Deep copies and pickled copies give the same explanation."""
    method, x = case.on(case.model()), images(2)
    expected = method.attribute(x, [0, 1])
    require_same_explanation(copy.deepcopy(method).attribute(x, [0, 1]), expected, "a deep copy")
    module = vars(sys.modules.get(case.method.__module__, object))
    if module.get(case.method.__qualname__) is case.method:  # pickle finds classes by name
        pickled = pickle.loads(pickle.dumps(method))  # noqa: S301 - pickled in the same line
        require_same_explanation(pickled.attribute(x, [0, 1]), expected, "a pickled copy")


@check
def memory(case: MethodCase) -> None:
    """Calls leak no tensors, and neither model nor input is kept alive."""
    # Exclude existing objects from garbage collection, which takes seconds in a large process.
    frozen = gc.get_freeze_count() > 0
    if not frozen:
        gc.collect()
        gc.freeze()
    try:
        _require_released(case)
    finally:
        if not frozen:
            gc.unfreeze()


def _require_released(case: MethodCase, calls: int = 20) -> None:
    model = case.model()
    method = case.on(model)
    for _ in range(2):
        method.attribute(images(1), 0)
    before = _live_tensors()
    for _ in range(calls):
        method.attribute(images(1), 0)
    growth = _live_tensors() - before
    require(growth < calls // 2, f"{growth} more tensors are alive after {calls} calls")
    x = images(1)
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
    return sum(issubclass(type(item), Tensor) for item in gc.get_objects())


# Degenerate input ----------------------------------------------------------------------------------------------


def _finite_explanation(method: Attribution, x: Tensor, what: str) -> Explanation | None:
    """Return the explanation, and check that it is finite; None for a SaliencyError, which must have a message."""
    try:
        explanation = method.attribute(x, [0, 1])
    except SaliencyError as error:
        require(bool(str(error)), f"{what}: {type(error).__name__} without a message")
        return None
    require(bool(torch.isfinite(explanation.values).all()), f"{what}: values that are NaN or infinite")
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
    normal = case.explain(model, x)
    with torch.no_grad():
        classes = model(x).shape[1]
        heads = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
        for module in [module for module in heads if module.weight.shape[0] == classes] or heads[-1:]:
            module.weight.zero_()
    explanation = _finite_explanation(case.on(model), x, "a head of zeros")
    if explanation is None or not explanation.values.any():
        return
    # A map of activations alone is the same for any head.
    same = explanation.values.shape == normal.values.shape and torch.allclose(explanation.values, normal.values)
    require(same, "with a head of zeros, the values are neither zero nor equal to those of the original head")


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
        require(
            h <= height and w <= width and abs(h * width - w * height) <= max(height, width),
            f"a map of {h}x{w} for an input of {height}x{width}",
        )


def _runs(model: nn.Module, size: tuple[int, int]) -> bool:
    try:
        with torch.no_grad():
            model(images(1, size))
    except (RuntimeError, ValueError, AssertionError):  # models of a fixed input size
        return False
    return True


@check
def not_finite(case: MethodCase) -> None:
    """NaN or infinity in the input or the model's output raises NonFiniteError."""
    model = case.model()
    for bad in (math.nan, math.inf, -math.inf):
        x = images(2)
        x[1, 0, 3, 3] = bad
        require_raises(NonFiniteError, partial(case.explain, model, x), f"{bad} in the input")
    model.register_forward_hook(lambda module, inputs, output: output * math.nan)
    require_raises(NonFiniteError, lambda: case.explain(model), "a model that returns NaN")


@check
def unscaled_input(case: MethodCase) -> None:
    """A float tensor with values in 0..255 gives a warning."""
    x = images(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        case.on(case.model()).read((x - x.min()) / (x.max() - x.min()) * 255)
    require(any("0..255" in str(warning.message) for warning in caught), "no warning for a float tensor in 0..255")


@check
def empty_batch(case: MethodCase) -> None:
    """A batch of no images raises ImageError."""
    method = case.on(case.model())
    require_raises(ImageError, lambda: method.attribute(images(1)[:0], 0), "a batch of no images")
    require_raises(ImageError, lambda: method.attribute([], 0), "a list of no images")


@check
def bad_targets(case: MethodCase) -> None:
    """A target that does not fit the output raises TargetError."""
    model, x = case.model(), images(2)
    bad: list[Any] = [-1, 2.5, math.nan, 10**6, [0, 10**6], [0], [0, 1, 0], [], "espresso", True, b"a", {"a": 1}]
    bad += [torch.tensor([0.5, 1.0], device="cpu")]
    bad += [lambda output: output.sum(), lambda output: output.argmax(1), lambda output: 1.0]
    for target in bad:
        what = "a target function that gives no score per image" if callable(target) else f"target {target!r}"
        require_raises(TargetError, partial(case.explain, model, x, target), what)
