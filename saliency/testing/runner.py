"""Run the checks of a method, with one error for all that fail."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from torch import nn

from ..attribution.base import Attribution
from ..errors import MethodError, SaliencyWarning, plural
from ..validation import described
from .case import Check, MethodCase, tiny_model_for
from .guarantees import CHECKS


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
