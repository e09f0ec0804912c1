"""The docstring of a method or metric has the options and errors of its bases, which the source has once."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from saliency import METHODS, Attribution
from saliency.attribution.options import Option, declared_options
from saliency.metrics import METRICS

CLASSES: dict[str, Any] = {**METHODS, **METRICS}


class Base(Attribution):
    """A base.

    Args:
        width: The width
            of the base.
        height, depth: Of the base.

    Raises:
        LayerError: Of the base.
    """

    width: Option[int] = Option(1)
    height: Option[int] = Option(1)
    depth: Option[int] = Option(1)


class Derived(Base):
    """A method.

    Args:
        colour: Its own.
        width: Its own.

    Values: (N, 1, h, w).

    Source: Somebody (2026).
    """

    colour: Option[str] = Option("red")


class Compact(Base):
    """A method.

    Values: (N, 1, h, w).
    Source: Somebody (2026).
    """


@pytest.mark.parametrize("name", CLASSES)
def test_each_option_is_described_once(name: str) -> None:
    sections = re.findall(r"^Args:\n((?:    .*\n?)*)", CLASSES[name].__doc__ + "\n", re.MULTILINE)
    described = re.findall(r"^ {4}(\w+): ", "".join(sections), re.MULTILINE)
    assert len(sections) <= 1
    assert sorted(described) == sorted(declared_options(CLASSES[name]))


@pytest.mark.parametrize("name", METHODS)
def test_errors_of_every_method_are_described_once_and_written_once(name: str) -> None:
    document = METHODS[name].__doc__ or ""
    assert document.count("\nRaises:\n") == document.count("\n    TargetError: ") == 1
    assert "TargetError: The target does not fit the model's output." not in inspect.getsource(METHODS[name])


def test_own_descriptions_come_first_and_replace_those_of_the_base() -> None:
    document = Derived.__doc__ or ""
    args, errors = (document.split(f"{title}:\n")[1].split("\n\n")[0] for title in ("Args", "Raises"))
    names = re.findall(r"^    (\S.*?): ", args, re.MULTILINE)
    assert names == ["model", "colour", "width", "height, depth", "preprocess", "categories", "whole", "layout"]
    assert "    width: Its own.\n" in args
    assert re.findall(r"^    (\w+): ", errors, re.MULTILINE) == ["LayerError", "MethodError", "TargetError"]
    places = [document.index(f"\n\n{title}:") for title in ("Args", "Values", "Raises", "Source")]
    assert places == sorted(places)


def test_sections_in_one_paragraph_stay_together() -> None:
    document = Compact.__doc__ or ""
    assert "\n\nValues: (N, 1, h, w).\nSource: Somebody (2026).\n\nRaises:\n" in document
    assert "        of the base.\n" in document


def test_a_class_without_a_docstring_has_none() -> None:
    assert type("Plain", (Base,), {}).__doc__ is None
