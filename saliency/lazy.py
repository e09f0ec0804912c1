"""Public names of a module that load on first use, in the order of its stub file."""

import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from .calls import answer_calls
from .errors import did_you_mean

compiled: Callable[[object, str | None], object]
"""Compile a method, for `Attribution.compile`."""


def attach(
    module: str, file: str, hint: Callable[[str, list[str]], str] = did_you_mean
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a module, which lists and loads the names of its stub file.

    Args:
        module: The name of the module, or package.
        file: The path of the module, with the stub next to it.
        hint: The end of the error about an unknown name, given the name and the public names; by default the closest.
    """
    stub = Path(file).with_suffix(".pyi").read_text("utf-8")
    homes = {name: home for home, name in re.findall(r"^from (\S+) import \w+ as (\w+)$", stub, re.MULTILINE)}
    names, package = list(homes), sys.modules[module].__package__

    def load(name: str) -> object:
        if name not in homes:
            # Tools ask for private names, which need no hint; without an object, the traceback suggests nothing itself.
            ending = "" if name.startswith("_") else hint(name, names)
            raise AttributeError(f'{module} has no "{name}"{ending}', name=name, obj=None)
        if homes[name] == ".":
            return import_module(f".{name}", package)
        home = import_module(homes[name], package)
        value: object = answer_calls(getattr(home, name))
        # Also where it is defined, where `pickle` finds it.
        vars(home)[name] = vars(sys.modules[module])[name] = value
        return value

    return load, names.copy, names
