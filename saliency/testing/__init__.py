"""Checks that any subclass of `Attribution`, also your own, keeps the promises of this toolkit.

    from saliency.testing import check_method

    check_method(MyCAM)

or, one test for each promise:

    @pytest.mark.parametrize(("name", "check"), checks(MyCAM))
    def test_my_cam(name, check):
        check()
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from ..attribution.base import Attribution
from ..errors import SaliencyWarning
from . import consistency, results  # noqa: F401 - register their checks
from .case import CHECKS, Check, MethodCase, images, tiny_model
from .unchanged import Snapshot

__all__ = ["Snapshot", "check_method", "checks", "images", "tiny_model"]


def checks(
    method: type[Attribution], *, model: Callable[[], nn.Module] = tiny_model, **options: Any
) -> list[tuple[str, Callable[[], None]]]:
    """Return the name of each promise with a function that raises AssertionError if the method breaks it.

    Args:
        method: The class.
        model: Builds the classifier that the checks run on, from batches (N, 3, 16, 16) to scores (N, classes) with at
            least 2 classes, in float32 on the CPU, and the same at every call. By default a small convolutional network
            with several kinds of ReLU, global average pooling and a linear head.
        options: Options of the method's constructor; layers by name. They extend the method's `quick_options`.
    """
    case = MethodCase(method, {**method.quick_options, **options}, model)
    return [(name, partial(_without_warnings, check, case)) for name, check in CHECKS.items()]


def _without_warnings(check: Check, case: MethodCase) -> None:
    """Run a check; only its result counts, and a method may warn about such inputs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaliencyWarning)
        check(case)


def check_method(method: type[Attribution], *, model: Callable[[], nn.Module] = tiny_model, **options: Any) -> None:
    """Check every promise of the toolkit on a method.

    Args:
        method: The class.
        model: As for `checks`.
        options: Options of the method's constructor; layers by name.

    Raises:
        AssertionError: The method breaks promises; the message lists all of them with the reason. The cause is an
            ExceptionGroup of the single failures with their tracebacks.
    """
    failures: list[Exception] = []
    report: list[str] = []
    for name, check in checks(method, model=model, **options):
        try:
            check()
        except Exception as error:  # noqa: BLE001 - reported below, with its traceback
            failures.append(error)
            report.append(f"{name}: {'' if isinstance(error, AssertionError) else type(error).__name__ + ': '}{error}")
    if failures:
        count = f"{len(failures)} broken promise{'s' * (len(failures) != 1)}"
        raise AssertionError("\n  ".join([f"{method.__name__}: {count}", *report])) from ExceptionGroup(count, failures)
