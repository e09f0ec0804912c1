"""Degenerate input has a defined answer: finite values, or an error that says what is wrong."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..attribution.base import Attribution
from ..attribution.explanation import Explanation
from ..errors import ImageError, NonFiniteError, SaliencyError, TargetError
from .subject import Check, Subject, images, require, require_raises


def _answer(method: Attribution, x: Tensor, target: Any, what: str) -> Explanation | None:
    """The explanation, of finite values; None for an error of the toolkit, which has to say something."""
    try:
        found = method.attribute(x, target)
    except SaliencyError as error:
        require(bool(str(error)), f"{what}: {type(error).__name__} without a message")
        return None
    require(bool(torch.isfinite(found.values).all()), f"{what}: values that are NaN or infinite")
    require(len(found.values) == len(x), f"{what}: {len(found.values)} maps for {len(x)} images")
    return found


def _constant_image(subject: Subject) -> None:
    for level in (0.0, 0.5, -2.0):
        method = subject.on(subject.model())
        _answer(method, torch.full_like(images(2), level), [0, 1], f"an image of {level} everywhere")


def _zero_gradient(subject: Subject) -> None:
    model, x = subject.model(), images(2)
    sighted = subject.on(model).attribute(x, [0, 1])
    head = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    head = [module for module in head if module.weight.shape[0] == subject.classes(model)] or head[-1:]
    with torch.no_grad():
        for module in head:
            module.weight.zero_()
    found = _answer(subject.on(model), x, [0, 1], "a head of zeros")
    if found is None or not found.values.any():
        return
    # A map of activations alone is the same whatever the head.
    blind = found.values.shape == sighted.values.shape and torch.allclose(found.values, sighted.values)
    require(blind, "a head of zeros, on which no score depends: values that are neither zero nor blind to the head")


def _one_pixel(subject: Subject) -> None:
    for size in ((1, 1), (2, 2), (1, 9)):
        model = subject.model()
        if _runs(model, size):
            _answer(subject.on(model), images(2, size), [0, 1], f"an input of {size[0]}x{size[1]}")


def _non_square(subject: Subject) -> None:
    for height, width in ((12, 20), (20, 12)):
        model = subject.model()
        if not _runs(model, (height, width)):
            continue
        found = subject.on(model).attribute(images(2, (height, width)), [0, 1])
        require(found.input_size == (height, width), f"input_size {found.input_size} of a {height}x{width} input")
        h, w = found.values.shape[-2:]
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


def _not_finite_input(subject: Subject) -> None:
    method = subject.on(subject.model())
    for bad in (math.nan, math.inf, -math.inf):
        x = images(2)
        x[1, 0, 3, 3] = bad
        require_raises(NonFiniteError, partial(method.attribute, x, 0), f"{bad} in the input")


def _not_finite_output(subject: Subject) -> None:
    model, x = subject.model(), images(2)
    model.register_forward_hook(lambda module, inputs, output: output * math.nan)
    require_raises(NonFiniteError, lambda: subject.on(model).attribute(x, 0), "a model that returns NaN")


def _unscaled_input(subject: Subject) -> None:
    method, x = subject.on(subject.model()), images(2)
    x = (x - x.min()) / (x.max() - x.min()) * 255
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        method.read(x)
    require(any("0..255" in str(each.message) for each in caught), "no warning of a float tensor in 0..255")


def _empty_batch(subject: Subject) -> None:
    method = subject.on(subject.model())
    require_raises(ImageError, lambda: method.attribute(images(1)[:0], 0), "a batch of no images")
    require_raises(ImageError, lambda: method.attribute([], 0), "a list of no images")


def _bad_targets(subject: Subject) -> None:
    method, x = subject.on(subject.model()), images(2)
    bad: list[Any] = [-1, 2.5, math.nan, 10**6, [0, 10**6], [0], [0, 1, 0], [], "espresso", True, b"a", {"a": 1}]
    bad += [
        torch.tensor([0.5, 1.0], device="cpu"),
        lambda output: output.sum(),
        lambda output: output.argmax(1),
        lambda output: 1.0,
    ]
    for target in bad:
        what = "a target function that gives no score per image" if callable(target) else f"target {target!r}"
        require_raises(TargetError, partial(method.attribute, x, target), what)


INPUT_CHECKS: dict[str, Check] = {
    "constant_image": _constant_image,
    "zero_gradient": _zero_gradient,
    "one_pixel": _one_pixel,
    "non_square": _non_square,
    "not_finite_input": _not_finite_input,
    "not_finite_output": _not_finite_output,
    "unscaled_input": _unscaled_input,
    "empty_batch": _empty_batch,
    "bad_targets": _bad_targets,
}
