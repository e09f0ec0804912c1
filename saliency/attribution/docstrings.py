"""Docstrings of methods and metrics: add options and errors of base classes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Set
from functools import cache

_BEFORE = {"Args:": ("Values:", "Warns:", "Raises:", "Source:", "Example:"), "Raises:": ("Source:", "Example:")}
"""The paragraphs before which a missing section is inserted."""


def complete_docstring(cls: type, options: Set[str]) -> str | None:
    """Return the docstring of a class with the options and errors that only its bases describe.

    So `help` of a method lists all entries, while the source has each entry once. The entries of the class itself come
    first, after the model.

    Args:
        cls: The class, whose bases have complete docstrings.
        options: The options of the class. Others of the bases are not inherited.
    """
    own = cls.__dict__.get("__doc__")
    if not own:
        return None
    own = inspect.cleandoc(own)
    paragraphs = own.split("\n\n")
    for title, later in _BEFORE.items():
        entries = dict(_entries(own, title))
        for base in cls.__bases__:
            for name, entry in _entries(base.__doc__ or "", title).items():
                if title == "Raises:" or options >= {*name.split(", ")}:
                    entries.setdefault(name, entry)
        texts = sorted(entries.values(), key=lambda entry: not entry.startswith("    model: "))
        known = [at for at, paragraph in enumerate(paragraphs) if paragraph.startswith(f"{title}\n")]
        places = [*known, *(at for at, paragraph in enumerate(paragraphs) if paragraph.startswith(later))]
        place = (*places, len(paragraphs))[0]
        paragraphs[place : place + len(known)] = ["\n".join([title, *texts])] if texts else []
    return "\n\n".join(paragraphs)


@cache
def _entries(docstring: str, title: str) -> Mapping[str, str]:
    """Return the entries of a section by name, with their indentation."""
    section = next((paragraph for paragraph in docstring.split("\n\n") if paragraph.startswith(f"{title}\n")), "")
    return {entry[1]: entry[0] for entry in re.finditer(r"^ {4}(\S[^:\n]*): .*(?:\n {8}.*)*", section, re.MULTILINE)}
