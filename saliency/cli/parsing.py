"""From the words of a command line to a model, methods, a target and a folder, or to an error before any work."""

from __future__ import annotations

import inspect
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..attribution.base import Attribution
from ..attribution.registry import get_method
from ..errors import did_you_mean
from ..io.atomic_write import IMAGE_SUFFIXES
from ..methods import METHODS
from ..targets.class_names import Categories, class_index
from ..zoo import load
from .console import Screen, UsageError, one_line

ALL = "all"


def methods_and_photos(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The methods among the words behind --method, each once; and the photos, which may follow them.

    `all` is every method. A word that is no method is a photo if it is a file or a folder, or looks
    like one.

    Raises:
        MethodError: A word is neither; the closest names are given.
    """
    photos = [word for word in words if word not in METHODS and word != ALL and _is_path(word)]
    names: list[str] = []
    for word in words:
        if word not in photos:
            names += list(METHODS) if word == ALL else [get_method(word).name]
    if not names:
        raise UsageError(f"--method names no method, but {', '.join(photos)}; `saliency methods` lists them")
    return list(dict.fromkeys(names)), photos


def _is_path(word: str) -> bool:
    return "/" in word or "\\" in word or Path(word).suffix.lower() in IMAGE_SUFFIXES or os.path.exists(word)  # noqa: PTH110 - unlike Path, never raises


def ready_model(name: str, weights: str, device: str, screen: Screen) -> nn.Module:
    """The model, loaded and on its device; `weights` "none" for random ones.

    Raises:
        ModelError: No such model or weights, or they cannot be had.
        UsageError: No such device.
    """
    place = _device(device)
    with screen.waiting(f"loading {name}"):
        model = load(name, weights=None if weights == "none" else weights)
        try:
            return model.to(place)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise UsageError(f"--device {device} cannot be used: {_first_line(error)}") from error


def _device(word: str) -> torch.device:
    if word == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(word)
    except RuntimeError as error:
        raise UsageError(f'no device "{word}"; try auto, cpu, cuda, cuda:1 or mps') from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device {word}: torch finds {torch.cuda.device_count()} CUDA devices here; try cpu")
    return device


def built(names: Iterable[str], model: nn.Module, layer: str | None, settings: Sequence[str]) -> list[Attribution]:
    """The methods of those names on the model.

    Args:
        names: Names in the registry.
        model: The model.
        layer: The layer for the methods that read one.
        settings: Options as `name=value`, for the methods that have them.

    Raises:
        LayerError: No such layer.
        MethodError: A value that an option does not take.
        UsageError: None of the methods reads a layer, or has such an option.
    """
    classes = [get_method(name) for name in names]
    options = _options(classes, settings)
    places = [_layer_options(cls, layer) for cls in classes]
    if layer is not None and not any(places):
        raise UsageError(f"--layer {layer}: no layer is read by {_names(classes)}; leave it out")
    return [_made(cls, model, place | _own(cls, options)) for cls, place in zip(classes, places, strict=True)]


def _made(cls: type[Attribution], model: nn.Module, options: Mapping[str, Any]) -> Attribution:
    try:
        return cls(model, **options)
    except TypeError as error:
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise UsageError(f"{cls.name} does not take {given}: {_first_line(error)}") from error


def _layer_options(cls: type[Attribution], layer: str | None) -> dict[str, Any]:
    parameters = inspect.signature(cls.__init__).parameters
    if layer is None:
        return {}
    return {"layer": layer} if "layer" in parameters else {"layers": [layer]} if "layers" in parameters else {}


def _options(classes: Sequence[type[Attribution]], settings: Sequence[str]) -> dict[str, Any]:
    known = list(dict.fromkeys(option for cls in classes for option in cls.options()))
    options = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise UsageError(f"--set {setting}: expected NAME=VALUE, for example --set smooth=positive")
        if name not in known:
            hint = did_you_mean(name, known) or (f"; there are {', '.join(known)}" if known else "")
            raise UsageError(f'--set {setting}: no option "{name}" of {_names(classes)}{hint}')
        options[name] = _value(value)
    return options


def _own(cls: type[Attribution], options: Mapping[str, Any]) -> dict[str, Any]:
    # The command line has a progress bar of its own, over the photos.
    silent = {"progress": False} if "progress" in cls.options() else {}
    return silent | {name: value for name, value in options.items() if name in cls.options()}


def _names(classes: Iterable[type[Attribution]]) -> str:
    return ", ".join(cls.name for cls in classes)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def target_of(word: str | None, categories: Categories) -> int | None:
    """The index of the class that was typed, by index or name; None for the top class.

    Raises:
        TargetError: There is no such class, as far as the model's class names tell.
    """
    if word is None:
        return None
    is_name = categories is not None and word in categories
    is_index = re.fullmatch(r"[+-]?\d+", word) and not is_name
    return class_index(int(word) if is_index else word, categories)


def require_folder(out: Path) -> None:
    """Make the folder, and try whether it can be written to.

    Raises:
        UsageError: It cannot.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        what = "is a file, not a folder" if out.is_file() else f"cannot be written to: {error.strerror}"
        raise UsageError(f"--out {out} {what}; choose another") from error


def _first_line(error: BaseException) -> str:
    return one_line(str(error).partition("\n")[0]) or type(error).__name__
