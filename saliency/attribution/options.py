"""Options of methods, and the statistics of methods of many passes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, fields
from functools import cache
from inspect import Parameter, Signature, getattr_static
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeGuard, TypeVar, dataclass_transform, overload

import torch
from torch import Tensor

from ..aliases import option_hint
from ..errors import MethodError
from ..io.preprocess import Preprocess

Chunk = int | Literal["auto"]
Stopped = Literal["complete", "passes", "seconds", "tolerance"]

LARGEST_PASSES, LARGEST_STEPS = 1_000_000, 5_000
"""Largest values of the options `passes`, and `steps` of a path or a mask."""
MOST_PASSES = 100_000
"""Limit of the passes per image if only a tolerance or a time is set."""

_Given = TypeVar("_Given", contravariant=True)
_Stored = TypeVar("_Stored", covariant=True)
_Same = TypeVar("_Same")


class PerImage(tuple[Any, ...]):
    """Values of an option, one per image of a call: `IntegratedGradients(model, baseline=PerImage([a, b]))`.

    Methods that run many passes of each image take it for each of their options, and `DeepLIFT` for its baseline. A
    tensor (N, C, H, W) has one value per row.
    """

    def __new__(cls, values: Iterable[Any]) -> Self:
        """Create the values from an iterable or a tensor. Raises MethodError for any other value."""
        if not isinstance(values, Iterable):
            raise MethodError(f"PerImage takes a list with a value for each image, got {type(values).__name__}")
        return super().__new__(cls, torch.split(values, 1) if isinstance(values, Tensor) else values)


class PerInput(dict[Any, Any]):
    """Values of an option by the name of an input: `GradCAM(model, {"rgb": "layer4", "depth": "depth.layer2"})`."""


def of_input(value: Any, name: Any, default: Any = None) -> Any:
    """Return the value of an option for an input."""
    return value.get(name, default) if isinstance(value, PerInput) else value


def is_per_input(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Return whether an option is a mapping of inputs, and not the configuration of one preprocessing."""
    if not isinstance(value, Mapping) or any(isinstance(part, tuple | list) for part in value.values()):
        return False
    return not value.keys() <= {option.name for option in fields(Preprocess)}


class ConvertedOption(Generic[_Given, _Stored]):
    """Option of a method, declared as a class attribute. The stored value may differ in type from the argument.

    Args:
        default: The default value. If it is None, None is never checked.
        check: A function of the option's name and a value that returns the stored value, or raises MethodError.
        *arguments: Further arguments of `check`.
        **keywords: Further keywords of `check`.
    """

    is_positional = False

    def __init__(
        self,
        default: _Given,
        check: Callable[..., _Stored] = lambda name, value: value,
        *arguments: Any,
        **keywords: Any,
    ) -> None:
        self.default: Any = default
        self.__doc__ = f"Option of the constructor, by default {default!r}."
        self._check, self._arguments, self._keywords = check, arguments, keywords

    @property
    def choices(self) -> tuple[Any, ...]:
        """The accepted values, if the check has a list of them as its first argument."""
        return self._arguments[0] if self._arguments and isinstance(self._arguments[0], tuple) else ()

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, method: None, owner: type) -> Self: ...

    @overload
    def __get__(self, method: object, owner: type) -> _Stored: ...

    def __get__(self, method: Any, owner: type) -> Any:
        """Return the option of the class. The value of a method is in its attributes, which Python reads first."""
        if method is not None:
            raise AttributeError(f"{owner.__name__}.{self.name} is not set; call super().__init__ first")
        return self

    if TYPE_CHECKING:  # the base class of methods sets options

        def __set__(self, method: Any, value: _Given) -> None: ...

    def stored(self, method: Any, value: Any) -> Any:
        """Return the value that a method stores for a value, or for a value per image or input."""
        is_of_image = self.name in ("preprocess", "whole", "layer", "baseline", "fill") and hasattr(method, "of_input")
        if is_of_image and isinstance(value, Mapping) and (self.name != "preprocess" or is_per_input(value)):
            return PerInput({name: self.stored(method.of_input(name), part) for name, part in value.items()})
        if isinstance(value, PerImage):
            if not {"*", self.name} & {*getattr(method, "per_image", ())}:
                raise MethodError(f"{self.name}: {type(method).__name__} takes one value for all images, not PerImage")
            return PerImage(self.stored(method, image_value) for image_value in value)
        return None if value is None and self.default is None else self.convert(method, value)

    def convert(self, method: Any, value: Any) -> _Stored:
        """Return the value that a method stores for a value."""
        return self._check(self.name, value, *self._arguments, **self._keywords)


class Option(ConvertedOption[_Same, _Same]):
    """Option of a method, declared as a class attribute: `grid: Option[int] = Option(7, check_integer)`.

    The arguments are the same as for `ConvertedOption`. Without a check, any value is stored unchanged.
    """


class PositionalOption(ConvertedOption[_Given, _Stored]):
    """Option that may be given by position: the model, and the layer.

    Args:
        check: A function of the method and a value that returns the stored value.
        default: The default value; without a default, the option is required.
        kw_only: Read by type checkers only; see `typing.dataclass_transform`.
    """

    is_positional = True

    def __init__(
        self, *, check: Callable[[Any, Any], _Stored], default: Any = Parameter.empty, kw_only: Literal[False]
    ) -> None:
        super().__init__(default, check)
        self.__doc__ = "Parameter of the constructor; may be passed by position."

    def convert(self, method: Any, value: Any) -> _Stored:
        """Return the value that a method stores for a value."""
        return self._check(method, value)


@dataclass_transform(eq_default=False, kw_only_default=True, field_specifiers=(PositionalOption,))
class HasOptions:
    """Base class that provides a constructor, which takes all options declared in the class.

    A class may have its own constructor, which passes the options on.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        inherited = getattr_static(cls, "__init__")
        if inherited is object.__init__ or hasattr(inherited, "__signature__"):
            setattr(cls, "__init__", _constructor(cls))  # noqa: B010 - type checkers derive it from the options
        cls.__doc__ = complete_docstring(cls, declared_options(cls).keys())

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, after the check of the option if it is one."""
        option = getattr_static(type(self), name, None)
        super().__setattr__(name, option.stored(self, value) if isinstance(option, ConvertedOption) else value)

    @classmethod
    @cache
    def parameters(cls) -> tuple[str, ...]:
        """Return the names of the constructor's parameters, with the declared options instead of `**keywords`."""
        parameters = inspect.signature(cls).parameters.values()
        names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        passed_on = declared_options(cls) if any(p.kind == p.VAR_KEYWORD for p in parameters) else ()
        return tuple(dict.fromkeys([*names, *passed_on]))

    def set_options(self, values: dict[str, Any]) -> None:
        """Store the values of all options, starting with the base classes."""
        for name in reversed(declared_options(type(self))):
            setattr(self, name, values[name])
        self.__post_init__()

    def __post_init__(self) -> None:
        """Check combinations of options, and set derived attributes. Called after all options are set."""


def declared_options(cls: type) -> dict[str, ConvertedOption[Any, Any]]:
    """Return the options of a class by name, starting with the nearest class."""
    options: dict[str, ConvertedOption[Any, Any]] = {}
    for base in cls.__mro__:
        for name, option in vars(base).items():
            if isinstance(option, ConvertedOption):
                options.setdefault(name, option)
    return options


def _constructor(cls: type) -> Callable[..., None]:
    """Return the constructor of a class. Its parameters are the model, then the options of the nearest class first."""
    options = declared_options(cls)
    kinds = (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [Parameter(n, kinds[options[n].is_positional], default=options[n].default) for n in options]
    parameters.sort(key=lambda parameter: (parameter.kind, parameter.name != "model"))
    signature = Signature([Parameter("self", Parameter.POSITIONAL_OR_KEYWORD), *parameters])

    def initialise(self: HasOptions, *arguments: Any, **values: Any) -> None:
        """Create the method; the class describes the options."""
        names = [parameter.name for parameter in parameters]
        for name in values:
            if name not in options:
                raise TypeError(f'{type(self).__name__} has no option "{name}"{option_hint(name, names)}')
        try:
            call = signature.bind(self, *arguments, **values)
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}() {error}; it takes {', '.join(names)}") from None
        call.apply_defaults()
        self.set_options(call.arguments)

    vars(initialise)["__signature__"] = signature
    initialise.__name__, initialise.__qualname__ = "__init__", f"{cls.__qualname__}.__init__"
    return initialise


@dataclass(frozen=True, slots=True)
class RunStats:
    """Passes and time that a method took for one image.

    Attributes:
        passes: The number of passes of the model.
        seconds: The time of the image, in seconds, from the first forward on.
        stopped: Why the passes ended: "complete" (the method ran all of its passes), or a limit that was set ("passes",
            "seconds", "tolerance").
        note: Remarks, such as the part of the model that was run; empty without remarks.
    """

    passes: int
    seconds: float
    stopped: Stopped
    note: str = ""


_BEFORE = {"Args:": ("Values:", "Warns:", "Raises:", "Source:", "Example:"), "Raises:": ("Source:", "Example:")}
"""The paragraphs before which a missing section is inserted."""


def complete_docstring(cls: type, options: Set[str]) -> str | None:
    """Return the docstring of a class with the options and errors that only its bases describe.

    So `help` of a method lists all entries, while the source has each entry once. The entries of the class itself come
    first, after the model.

    Args:
        cls: The class, whose bases have complete docstrings.
        options: The options of the class. Entries of its bases for other options are not inherited.
    """
    docstring = cls.__dict__.get("__doc__")
    if not docstring:
        return None
    docstring = inspect.cleandoc(docstring)
    paragraphs = docstring.split("\n\n")
    for title, later in _BEFORE.items():
        entries = dict(_entries(docstring, title))
        for base in cls.__bases__:
            for name, entry in _entries(base.__doc__ or "", title).items():
                if title == "Raises:" or options >= {*name.split(", ")}:
                    entries.setdefault(name, entry)
        texts = sorted(entries.values(), key=lambda entry: not entry.startswith("    model: "))
        existing = [index for index, paragraph in enumerate(paragraphs) if paragraph.startswith(f"{title}\n")]
        positions = [*existing, *(index for index, paragraph in enumerate(paragraphs) if paragraph.startswith(later))]
        start = (*positions, len(paragraphs))[0]
        paragraphs[start : start + len(existing)] = ["\n".join([title, *texts])] if texts else []
    return "\n\n".join(paragraphs)


@cache
def _entries(docstring: str, title: str) -> Mapping[str, str]:
    """Return the entries of a section by name, with their indentation."""
    section = next((paragraph for paragraph in docstring.split("\n\n") if paragraph.startswith(f"{title}\n")), "")
    return {entry[1]: entry[0] for entry in re.finditer(r"^ {4}(\S[^:\n]*): .*(?:\n {8}.*)*", section, re.MULTILINE)}
