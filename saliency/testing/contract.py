"""What a method says of itself, and what its result holds: documentation, settings, copies, completeness, memory."""

from __future__ import annotations

import copy
import gc
import inspect
import json
import pickle
import re
import sys
import weakref
from tempfile import TemporaryDirectory
from typing import get_args

import torch
from torch import Tensor

from ..attribution.base import METHODS
from ..attribution.explanation import Explanation, Sign
from ..attribution.registry import source, summary
from .subject import SIZE, Check, Subject, images, require, require_same, require_same_explanation


def _documented(subject: Subject) -> None:
    cls = subject.method
    text = inspect.getdoc(cls) or ""
    own = cls.__dict__.get("__doc__")
    require(bool(cls.name), f'{cls.__name__} has no name; give the class one: name = "my_cam"')
    require(bool(own), f"{cls.__name__} has no docstring of its own")
    require(summary(cls).endswith("."), f"the docstring begins with no sentence: {summary(cls)!r}")
    missing = [part for part in ("Values:", "Raises:", "Source:") if not re.search(rf"^{part}", text, re.MULTILINE)]
    require(not missing, f"the docstring has no line that begins with {', '.join(missing)}")
    require(bool(source(cls)), "the docstring names no source")
    require(bool(cls.cost), "`cost` says nothing of what a call takes")
    require(bool(cls.units), "`units` does not say what the values are in")
    require(cls.sign in get_args(Sign), f"`sign` is {cls.sign!r}, which is none of {get_args(Sign)}")
    require(bool(re.fullmatch(r"[a-z][a-z0-9_]*", cls.name)), f"`name` is {cls.name!r}; expected one like grad_cam")
    require(METHODS.get(cls.name) is cls, f'METHODS["{cls.name}"] is {METHODS.get(cls.name)}')


def _result(subject: Subject) -> None:
    model, x = subject.model(), images(2)
    method = subject.on(model)
    found = method.attribute(x, [0, 1])
    with torch.no_grad():
        output = model(x)
    by_probability = all(name.startswith("probability of ") for name in found.target_names)
    explained = output.softmax(1) if by_probability else output
    require_same(found.scores, explained[[0, 1], [0, 1]], "the scores against the model's output")
    probabilities = found.probabilities
    require(probabilities is not None, "no probabilities for classes")
    if probabilities is not None:
        require_same(probabilities, output.softmax(1)[[0, 1], [0, 1]], "the probabilities")
    _require_shape(found)
    for name, tensor in (("values", found.values), ("scores", found.scores)):
        require(not tensor.requires_grad, f"the {name} hang on to their graph")
        require(tensor.dtype == output.dtype, f"the {name} are {tensor.dtype}, the model's output {output.dtype}")
    expected = (method.name, (0, 1), method.settings, SIZE, (None, None))
    came = (found.method, found.target, found.settings, found.input_size, found.frames)
    require(came == expected, f"the explanation says {came}, expected {expected}")
    _require_kept(found)


def _require_shape(found: Explanation) -> None:
    shape = tuple(found.values.shape)
    at_input, at_layer = shape == (2, 3, *SIZE), len(shape) == 4 and shape[:2] == (2, 1)
    require(at_input or at_layer, f"values of shape {shape}; expected (N, C, H, W) or (N, 1, h, w)")
    require(bool(found.values.any()), "values that are zero everywhere on an ordinary image")
    require(found.scores.shape == (2,), f"scores of shape {tuple(found.scores.shape)}; expected (N,)")


def _require_kept(found: Explanation) -> None:
    """A saved explanation comes back as it was."""
    with TemporaryDirectory() as folder:
        again = Explanation.load(found.save(f"{folder}/kept.safetensors"))
    require_same_explanation(again, found, "saved and loaded")
    require(again.coverage == found.coverage, "saved and loaded: another coverage")


def _residual(subject: Subject) -> None:
    x = images(4, dtype=torch.float64)
    found = subject.on(subject.precise_model()).attribute(x, 0)
    if found.residual is None:
        return
    require(found.residual.shape == (4,), f"a residual of shape {tuple(found.residual.shape)}; expected (N,)")
    require(bool(torch.isfinite(found.residual).all()), "a residual that is NaN or infinite")
    if not subject.method.is_complete:
        return
    # The sum that values should have is the score over that of a baseline, or less a bias: a constant for one class.
    missed = found.scores - found.values.flatten(1).sum(1)
    spread = float((missed - found.residual).std())
    rounding = 1e-5 * float(found.scores.abs().max() + missed.abs().max())
    require(
        spread <= rounding,
        f"values and residual do not make up the score: what is missing varies by {spread:.3g} between images",
    )


def _settings(subject: Subject) -> None:
    model = subject.model()
    method = subject.on(model)
    missing = [name for name in subject.method.options() if not hasattr(method, name)]
    require(not missing, f"the options {missing} are not kept under the names that the constructor gives them")
    kept = dict(method.settings)
    require(json.loads(json.dumps(kept)) == kept, f"the settings are not what JSON gives back: {kept}")
    plain = {name: each for name, each in kept.items() if getattr(method, name) == each}
    again = dict(subject.on(model, **plain).settings)
    require(again == kept, f"built anew from its settings, it has others: {again}, expected {kept}")
    require(subject.method.__name__ in repr(method), f"repr() does not name the class: {method!r}")


def _copies(subject: Subject) -> None:
    method, x = subject.on(subject.model()), images(2)
    expected = method.attribute(x, [0, 1])
    require_same_explanation(copy.deepcopy(method).attribute(x, [0, 1]), expected, "a deep copy")
    home = vars(sys.modules.get(subject.method.__module__, object))
    if home.get(subject.method.__qualname__) is subject.method:  # pickle finds classes by name
        again = pickle.loads(pickle.dumps(method))  # noqa: S301 - made in this line
        require_same_explanation(again.attribute(x, [0, 1]), expected, "a pickled copy")


def _memory(subject: Subject, calls: int = 50) -> None:
    # What lives already is not looked through again and again: a process that has imported much takes seconds for that.
    ours = gc.get_freeze_count() == 0
    if ours:
        gc.collect()
        gc.freeze()
    try:
        _lets_go(subject, calls)
    finally:
        if ours:
            gc.unfreeze()


def _lets_go(subject: Subject, calls: int) -> None:
    model = subject.model()
    method = subject.on(model)
    for _ in range(2):
        method.attribute(images(1), 0)
    before = _live_tensors()
    for _ in range(calls):
        method.attribute(images(1), 0)
    grown = _live_tensors() - before
    require(grown < calls // 2, f"{grown} more tensors are alive after {calls} calls")
    held, x = weakref.ref(model), images(1)
    batch = weakref.ref(x)
    found = method.attribute(x, 0)
    del model, method, x
    gc.collect()
    require(held() is None, "the model is kept alive when nobody holds the method any more")
    require(batch() is None, "the input is kept alive by what came back")
    del found


def _live_tensors() -> int:
    gc.collect()
    # The type is asked and not the object: some objects warn when their class is looked up.
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())


CONTRACT_CHECKS: dict[str, Check] = {
    "documented": _documented,
    "result": _result,
    "residual": _residual,
    "settings": _settings,
    "copies": _copies,
    "memory": _memory,
}
