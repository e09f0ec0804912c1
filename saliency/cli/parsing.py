"""Convert parsed arguments to methods, photos, a model and an output folder, or raise an error."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from ..attribution.base import get_method
from ..batch.network import find_devices, move_model
from ..io.atomic_write import IMAGE_SUFFIXES
from ..methods import METHODS
from ..zoo import load
from .console import Screen, UsageError
from .options import ALL, METHOD


def methods_and_photos(words: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Split the words after --method into methods without duplicates, and photos that follow them.

    "all" stands for every method. A word that is not a method is a photo if it exists or looks like a path.

    Raises:
        MethodError: A word is neither a method nor a photo; the closest names are given.
        UsageError: There is no method.
    """
    words = words or [METHOD]
    photos = [word for word in words if word not in METHODS and word != ALL and _is_path(word)]
    names: list[str] = []
    for word in words:
        if word not in photos:
            names += list(METHODS) if word == ALL else [get_method(word).name]
    if not names:
        raise UsageError(
            f"--method expects methods, got only photos: {', '.join(photos)}; `saliency methods` lists the methods"
        )
    return list(dict.fromkeys(names)), photos


def _is_path(word: str) -> bool:
    return "/" in word or "\\" in word or Path(word).suffix.lower() in IMAGE_SUFFIXES or os.path.exists(word)  # noqa: PTH110 - unlike Path, never raises


def ready_model(name: str, weights: str | None, device: str, screen: Screen) -> nn.Module:
    """Load a model and move it to its device.

    Raises:
        ModelError: The model or its weights do not exist or cannot be loaded.
        BatchError: The device does not exist.
        UsageError: Several devices were given.
    """
    chosen, *others = find_devices(device, name)
    if others:
        raise UsageError(f"--device {device}: only saliency batch uses several devices")
    with screen.waiting(f"loading {name}"):
        return move_model(load(name, weights=weights), chosen)


def require_folder(out: Path) -> None:
    """Create the folder and check that it can be written to.

    Raises:
        UsageError: The folder cannot be created or written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        reason = "is a file, not a folder" if out.is_file() else f"cannot be written to: {error.strerror}"
        raise UsageError(f"--out {out} {reason}; choose another folder") from error
