"""Does a method keep the promises of this toolkit? Checks for any subclass of `Attribution`, also your own.

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
from .contract import CONTRACT_CHECKS
from .inputs import INPUT_CHECKS
from .subject import Check, Subject, tiny_model
from .untouched import untouched_checks
from .values import VALUE_CHECKS

__all__ = ["check_method", "checks", "tiny_model"]


def checks(
    method: type[Attribution], *, model: Callable[[], nn.Module] = tiny_model, **options: Any
) -> list[tuple[str, Callable[[], None]]]:
    """The promises that apply to a method, each with a function that raises AssertionError where it is broken.

    Args:
        method: The class.
        model: Builds the classifier that the checks run on, from batches (N, 3, 16, 16) to scores (N, 2 classes or
            more), in float32 on the CPU and the same at every call. By default a small convolutional network with
            several kinds of ReLU, global average pooling and a linear head.
        options: Options of the method's constructor; layers by name. Where a method makes many passes, they add to its
            own `trial`.

    """
    subject = Subject(method, {**method.quick_options, **options}, model)
    found = {**CONTRACT_CHECKS, **VALUE_CHECKS, **INPUT_CHECKS, **untouched_checks(subject)}
    return [(name, partial(_without_warnings, check, subject)) for name, check in found.items()]


def _without_warnings(check: Check, subject: Subject) -> None:
    """Run a check on inputs that a method may well warn about: the result is what counts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaliencyWarning)
        check(subject)


def check_method(method: type[Attribution], *, model: Callable[[], nn.Module] = tiny_model, **options: Any) -> None:
    """Put every promise of the toolkit to the test on a method.

    Args:
        method: The class.
        model: As for `checks`.
        options: Options of the method's constructor; layers by name.

    Raises:
        AssertionError: Promises are broken; the message lists all of them, and how. Its cause is an ExceptionGroup of
            the single failures with their tracebacks.

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
