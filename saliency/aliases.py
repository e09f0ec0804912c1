"""Names from other toolkits and their equivalents here, for error messages."""

from __future__ import annotations

import inspect
import sys
import tomllib
from collections.abc import Callable, Collection
from functools import cache, wraps
from importlib import resources
from inspect import CO_VARKEYWORDS
from types import FunctionType
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

from .errors import did_you_mean

_P = ParamSpec("_P")
_R = TypeVar("_R")


@cache
def table(name: str) -> dict[str, list[str]]:
    """Return a table of `aliases.toml`: for each name or advice here, the names of others that it replaces."""
    tables = tomllib.loads(resources.files(__package__).joinpath("aliases.toml").read_text(encoding="utf-8"))
    return {ours: theirs.split() for ours, theirs in tables[name].items()}


def matches(name: str, table_name: str) -> list[str]:
    """Return the names or advice of this toolkit for a name from elsewhere, from a table of `aliases.toml`."""
    return [ours for ours, theirs in table(table_name).items() if name in theirs]


def option_hint(name: str, names: Collection[str]) -> str:
    """Return the end of an error about an unknown option, such as `; it is called steps here`."""
    for ours in matches(name, "options"):
        if ours in names:
            difference = ", as a fraction of the range of each image instead of in units of the input"
            return f"; it is called {ours} here{difference if name == 'stdevs' else ''}"
    for advice in matches(name, "advice"):
        return f"; {advice}"
    return did_you_mean(name, names) or (f"; the options are {', '.join(names)}" if names else "; there are no options")


def answer_keywords(value: _R) -> _R:
    """Return a function or class whose error for an unknown keyword suggests the right one, as for methods.

    In a class, these are its constructor and `attribute`. Functions that take any keyword, and decorated functions, are
    returned unchanged: they report unknown keywords themselves.
    """
    if not isinstance(value, type):
        return cast("_R", _answering(value, getattr(value, "__name__", "")))
    for name, title in (("__init__", value.__name__), ("attribute", "attribute")):
        if name in vars(value):
            setattr(value, name, _answering(vars(value)[name], title))
    return value


def _answering(call: object, title: str) -> object:
    if not isinstance(call, FunctionType) or hasattr(call, "__wrapped__") or call.__code__.co_flags & CO_VARKEYWORDS:
        return call
    names = [name for name in inspect.signature(call).parameters if name != "self"]

    @wraps(call)
    def answered(*arguments: Any, **keywords: Any) -> Any:
        for name in keywords:
            if name not in names:
                raise TypeError(f'{title} has no argument "{name}"{option_hint(name, names)}')
        return call(*arguments, **keywords)

    return answered


def answer_all(module: str) -> None:
    """Let the public functions of a package that does not load them on first use answer unknown keywords."""
    public = vars(sys.modules[module])
    for name, value in [*public.items()]:
        home = getattr(value, "__module__", "")
        if isinstance(value, FunctionType) and home.startswith(module) and not name.startswith("_"):
            vars(sys.modules[home])[name] = public[name] = answer_keywords(value)


def known_keywords(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Hide `**keywords`, which only passes unknown keywords to `refuse_keywords`, from a signature."""
    signature = inspect.signature(function)
    parameters = [parameter for parameter in signature.parameters.values() if parameter.kind != parameter.VAR_KEYWORD]
    vars(function)["__signature__"] = signature.replace(parameters=parameters)
    return function


def answered_on_class(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let calls without required arguments, such as calls on a class, reach the function, which raises a clear error.

    Missing arguments get the value `inspect.Parameter.empty`, with which the signature does not change.
    """
    plain = cast("FunctionType", function)
    defaults = plain.__defaults__ or ()
    plain.__defaults__ = (inspect.Parameter.empty,) * (plain.__code__.co_argcount - len(defaults)) + defaults
    return function


def refuse_keywords(names: Collection[str], function: Callable[..., Any], method: Any) -> NoReturn:
    """Raise TypeError for unknown keywords of a function of a method, which may be options of the method."""
    name, parameters = next(iter(names)), list(inspect.signature(function).parameters)
    raise TypeError(f'{function.__name__} has no argument "{name}"{_argument_hint(name, type(method), parameters)}')


def _argument_hint(name: str, cls: Any, parameters: Collection[str]) -> str:
    options: Collection[str] = getattr(cls, "parameters", tuple)()
    for ours in (name, *matches(name, "options")):
        if ours in options and ours not in parameters:
            hint = ", with saliency.PerImage([...]) for one per image" if name == "baselines" else ""
            return f"; the method takes it: {cls.__name__}(model, {ours}=...){hint}"
    return option_hint(name, parameters)


def public_hint(name: str, names: Collection[str]) -> str:
    """Return the end of an error about an unknown public name, such as `; did you mean "GradCAM"?`."""
    for ours in matches(name, "public"):
        return f"; it is called {ours} here"
    for nearest in matches(name, "absent"):
        return f"; not offered here; nearest: {nearest}"
    return did_you_mean(name, names)


def result_hint(name: str) -> str:
    """Return the end of an error about an unknown attribute of an explanation."""
    return next((f"; {advice}" for advice in matches(name, "result")), "")
