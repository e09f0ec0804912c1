"""From parsed arguments to a model, methods and a target, or an error before any work."""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..attribution.base import Attribution
from ..attribution.registry import get_method
from ..batch.network import resolved
from ..errors import did_you_mean
from ..io.atomic_write import IMAGE_SUFFIXES
from ..methods import METHODS
from ..targets.class_names import Categories
from ..zoo import load
from .console import Screen, UsageError, one_line
from .options import METHOD

ALL = "all"


def methods_and_photos(words: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Split the words after --method into methods, each once, and the photos that follow them.

    "all" stands for every method. A word that is not a method is a photo if it exists or looks like a path.

    Raises:
        MethodError: A word is neither; the closest names are given.
    """
    words = words or [METHOD]
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


def ready_model(name: str, weights: str | None, device: str, screen: Screen) -> nn.Module:
    """Load a model and move it to its device.

    Raises:
        ModelError: The model or its weights do not exist or cannot be loaded.
        UsageError: The device does not exist.
    """
    chosen = _device(device)
    with screen.waiting(f"loading {name}"):
        model = load(name, weights=weights)
        try:
            return model.to(chosen)
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


def build_methods(
    names: Iterable[str], model: nn.Module, layer: str | None, settings: Sequence[tuple[str, Any]]
) -> list[Attribution]:
    """Build the named methods on the model.

    Args:
        names: Names in the registry.
        model: The model.
        layer: The layer for the methods that read one.
        settings: Names and values of options, for the methods that have them.

    Raises:
        LayerError: The layer does not exist.
        MethodError: An option does not accept its value.
        UsageError: None of the methods reads a layer, or has such an option.
    """
    classes = [get_method(name) for name in names]
    listed = ", ".join(cls.name for cls in classes)
    known = list(dict.fromkeys(option for cls in classes for option in cls.options()))
    for name, _ in settings:
        if name not in known:
            hint = did_you_mean(name, known) or (f"; there are {', '.join(known)}" if known else "")
            raise UsageError(f'--set {name}: no option "{name}" of {listed}{hint}')
    layers = [_layer_options(cls, layer) for cls in classes]
    if layer is not None and not any(layers):
        raise UsageError(f"--layer {layer}: no layer is read by {listed}; leave it out")
    return [_build(cls, model, own, dict(settings)) for cls, own in zip(classes, layers, strict=True)]


def _build(cls: type[Attribution], model: nn.Module, layer: dict[str, Any], options: dict[str, Any]) -> Attribution:
    # The command line shows its own progress bar, over the photos.
    own = {name: value for name, value in ({"progress": False} | options).items() if name in cls.options()}
    try:
        return cls(model, **layer, **own)
    except TypeError as error:
        given = ", ".join(f"{name}={value!r}" for name, value in own.items())
        raise UsageError(f"{cls.name} does not accept {given}: {_first_line(error)}") from error


def _layer_options(cls: type[Attribution], layer: str | None) -> dict[str, Any]:
    parameters = inspect.signature(cls.__init__).parameters
    if layer is None:
        return {}
    return {"layer": layer} if "layer" in parameters else {"layers": [layer]} if "layers" in parameters else {}


def target_of(word: str | None, categories: Categories) -> int | None:
    """Return the index of a class by index or name; None for the top class.

    Raises:
        TargetError: The class does not exist, as far as the model's class names are known.
    """
    return resolved(word, categories)


def require_folder(out: Path) -> None:
    """Create the folder and check that it can be written to.

    Raises:
        UsageError: It cannot.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        reason = "is a file, not a folder" if out.is_file() else f"cannot be written to: {error.strerror}"
        raise UsageError(f"--out {out} {reason}; choose another") from error


def _first_line(error: BaseException) -> str:
    return one_line(str(error).partition("\n")[0]) or type(error).__name__
