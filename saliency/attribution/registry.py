"""What the registry says of its methods: their names, what they show, and the papers they come from."""

from __future__ import annotations

import inspect
import re

from ..errors import MethodError, did_you_mean
from .base import METHODS, Attribution


def get_method(name: object) -> type[Attribution]:
    """The method of a name. Raises MethodError, with the closest names, where there is none."""
    if not isinstance(name, str) or name not in METHODS:
        hint = did_you_mean(str(name), METHODS) or "; there are " + ", ".join(METHODS)
        raise MethodError(f'no method "{name}"{hint}')
    return METHODS[name]


def summary(cls: type[Attribution]) -> str:
    """The first sentence of a method's documentation."""
    return (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ")


def source(cls: type[Attribution]) -> str:
    """The paper that a method's documentation names, with its address."""
    match = re.search(r"Source: (.*?)(?:\n\n|\Z)", inspect.getdoc(cls) or "", re.DOTALL)
    return " ".join(match[1].split()) if match else ""
