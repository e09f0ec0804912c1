"""Options of methods, and the budget and statistics of methods of many passes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import Signature
from typing import Any, Generic, Literal, Self, TypeVar, dataclass_transform, overload

Chunk = int | Literal["auto"]
Precision = Literal["exact", "fast", "bf16"]
OnInterrupt = Literal["raise", "return"]
Stopped = Literal["complete", "passes", "seconds", "tolerance", "interrupt"]


_Given = TypeVar("_Given", contravariant=True)
_Stored = TypeVar("_Stored", covariant=True)
_Same = TypeVar("_Same")


class ConvertedOption(Generic[_Given, _Stored]):
    """Option of a method, declared as a class attribute, whose stored value has another type than the given one.

    Args:
        default: The value if none is given. If it is None, None is never checked.
        check: A function of the option's name and a value that returns the stored value, or raises MethodError.
        *arguments: Further arguments of `check`.
        **keywords: Further keywords of `check`.
    """

    is_positional = False

    def __init__(self, default: _Given, check: Callable[..., _Stored], *arguments: Any, **keywords: Any) -> None:
        self.default: Any = default
        self.__doc__ = f"Option of the constructor, by default {default!r}."
        self._check, self._arguments, self._keywords = check, arguments, keywords

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = self.parameter = name

    @overload
    def __get__(self, method: None, owner: type) -> Self: ...

    @overload
    def __get__(self, method: object, owner: type) -> _Stored: ...

    def __get__(self, method: Any, owner: type) -> Any:
        if method is not None and self.name not in vars(method):
            raise AttributeError(f"{owner.__name__}.{self.name} is not set; call super().__init__ first")
        return self if method is None else vars(method)[self.name]

    def __set__(self, method: Any, value: _Given) -> None:
        vars(method)[self.name] = None if value is None and self.default is None else self.convert(method, value)

    def convert(self, method: Any, value: Any) -> _Stored:
        """Return the value that a method stores for a given one."""
        return self._check(self.name, value, *self._arguments, **self._keywords)


class Option(ConvertedOption[_Same, _Same]):
    """Option of a method, declared as a class attribute: `grid: Option[int] = Option(7, check_integer)`.

    Args:
        default: The value if none is given. If it is None, None is never checked.
        check: A function of the option's name and a value that returns the value, or raises MethodError.
        *arguments: Further arguments of `check`.
        **keywords: Further keywords of `check`.
    """

    def __init__(
        self, default: _Same, check: Callable[..., _Same] = lambda name, value: value, *arguments: Any, **keywords: Any
    ) -> None:
        super().__init__(default, check, *arguments, **keywords)


class PositionalOption(ConvertedOption[_Given, _Stored]):
    """Option that may be given by position: the model, and the layer.

    Args:
        check: A function of the method and a value that returns the stored value.
        default: The value if none is given; without it, the option is required.
        kw_only: For type checkers.
        alias: The name of the parameter, if it is not that of the attribute.
    """

    is_positional = True

    def __init__(
        self,
        *,
        check: Callable[[Any, Any], _Stored],
        default: Any = inspect.Parameter.empty,
        kw_only: Literal[False],
        alias: str = "",
    ) -> None:
        super().__init__(default, check)
        self.__doc__ = "Parameter of the constructor, also by position."
        self._alias = alias

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.parameter = name, self._alias or name

    def convert(self, method: Any, value: Any) -> _Stored:
        """Return the value that a method stores for a given one."""
        return self._check(method, value)


@dataclass_transform(eq_default=False, kw_only_default=True, field_specifiers=(PositionalOption,))
class HasOptions:
    """Base class that lets type checkers read the declared options as parameters of the constructor."""


def declared(cls: type) -> dict[str, ConvertedOption[Any, Any]]:
    """Return the options of a class by attribute, those of its base classes first."""
    options: dict[str, ConvertedOption[Any, Any]] = {}
    for base in reversed(cls.__mro__):
        options |= {name: option for name, option in vars(base).items() if isinstance(option, ConvertedOption)}
    return options


def signature_of(cls: type, own: Iterable[inspect.Parameter] = ()) -> Signature:
    """Return the signature of a constructor: its own parameters and the options; the model first, and nearest class."""
    options = declared(cls)
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = {parameter.name: parameter for parameter in own}
    for option in (options[name] for base in cls.__mro__ for name in vars(base) if name in options):
        parameter = inspect.Parameter(option.parameter, kinds[option.is_positional], default=option.default)
        parameters.setdefault(option.parameter, parameter)
    return Signature(sorted(parameters.values(), key=lambda p: (p.kind, p.name != "model")))


@dataclass(frozen=True, slots=True)
class RunStats:
    """Passes and time that a method took for one image.

    Attributes:
        passes: The number of passes of the model.
        seconds: The time of these passes, in seconds.
        stopped: Why the passes ended: "complete" (all that the method needs), a limit that was set ("passes",
            "seconds", "tolerance"), or an "interrupt".
        precision: The precision of the passes.
        note: Remarks, such as the part of the model that was run; empty if there are none.
    """

    passes: int
    seconds: float
    stopped: Stopped
    precision: str = "exact"
    note: str = ""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of the computation for one image."""

    passes: int | None = None
    seconds: float | None = None
    tolerance: float | None = None
