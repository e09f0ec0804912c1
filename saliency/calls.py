"""Answers to wrong calls of public functions: unknown keywords, missing arguments, and values of another type."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import wraps
from inspect import BoundArguments, Parameter
from numbers import Integral, Real
from types import FunctionType, NoneType, SimpleNamespace, UnionType
from typing import Any, NoReturn, ParamSpec, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from .aliases import matches, option_hint
from .errors import SaliencyError
from .validation import described

_P = ParamSpec("_P")
_R = TypeVar("_R")
_RAW = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_STARS: dict[Any, str] = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}
# Functions also take numbers of NumPy, and arrays or sets for sequences.
_TAKEN: dict[Any, type] = {int: Integral, float: Real, Sequence: Iterable}


def answer_calls(value: _R, title: str = "") -> _R:
    """Return a function or class whose errors for wrong calls name the argument.

    An unknown keyword is answered by the right one, as for methods. If the function raises an error that is not of this
    toolkit, a missing argument or a value that is not of the annotated type is named. In a class, this holds for its
    constructor, and for the public functions of results. Decorated functions, which answer wrong calls themselves, are
    returned unchanged.

    Args:
        value: The function or class.
        title: The name of the function in errors; by default its name.
    """
    if not isinstance(value, type):
        return cast("_R", _answering(value, title or getattr(value, "__name__", "")))
    for name in dir(value):
        member = inspect.getattr_static(value, name)
        call: Any = getattr(member, "__func__", member)  # of a class method
        # Methods, metrics and networks have `parameters`; results do not.
        is_answered = name == "__init__" or not (name.startswith("_") or hasattr(value, "parameters"))
        if is_answered and isinstance(call, FunctionType) and call.__module__.startswith(__package__):
            answered: Any = _answering(call, value.__name__ if name == "__init__" else name)
            setattr(value, name, answered if call is member else type(member)(answered))
    return value


def _answering(call: object, title: str) -> object:
    if not isinstance(call, FunctionType) or {"__wrapped__", "__signature__"} & vars(call).keys():
        return call
    signature = inspect.signature(call)
    annotated = [
        parameter for parameter in signature.parameters.values() if parameter.annotation is not Parameter.empty
    ]
    names = [f"{_STARS.get(parameter.kind, '')}{parameter.name}" for parameter in annotated]  # without `self` and `cls`
    takes_any = names[-1:] and names[-1].startswith("**")

    @wraps(call)
    def answered(*arguments: Any, **keywords: Any) -> Any:
        for name in () if takes_any else keywords:
            if name not in names:
                raise TypeError(f'{title} has no argument "{name}"{option_hint(name, names)}')
        try:
            return call(*arguments, **keywords)
        except SaliencyError:
            raise
        except _RAW as error:
            try:
                problem = _wrong_argument(call, signature.bind(*arguments, **keywords))
            except TypeError as unbound:
                problem = f"{unbound}; it takes {', '.join(names) or 'no arguments'}"
            if problem:
                raise TypeError(f"{title}: {problem}") from error
            raise

    return answered


def _wrong_argument(call: FunctionType, bound: BoundArguments) -> str:
    """Return the first argument that is not of the annotated type, and the type; empty if there is none."""
    for name in filter(call.__annotations__.__contains__, bound.arguments):
        value, annotation = bound.arguments[name], call.__annotations__[name]
        is_several = bound.signature.parameters[name].kind is Parameter.VAR_POSITIONAL
        with suppress(NameError):  # a type that only type checkers import
            hint = get_type_hints(SimpleNamespace(__annotations__={name: annotation}), call.__globals__)[name]
            if not all(_fits(entry, hint) for entry in (value if is_several else (value,))):
                return f"{name}={described(value)}: expected {annotation}"
    return ""


def _fits(value: object, hint: Any) -> bool:
    """Return whether a value is of an annotated type; True if this cannot be decided."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if kind in (int, float) and isinstance(value, bool):
        return False
    with suppress(TypeError):  # a protocol, a variable or literals
        return isinstance(value, _TAKEN.get(kind, kind) or NoneType)
    return True


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
