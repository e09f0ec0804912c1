"""Weights from a local file: read without running anything in it, and fitted to a model key by key."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelError

SUFFIXES = frozenset({".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar"})
Build = Callable[[int | None], nn.Module]  # number of classes, None for the usual one -> a model of random weights
Respell = Callable[[Mapping[str, Tensor], Collection[str]], Mapping[str, Tensor]]  # a file's weights, a model's keys

_NESTED_UNDER = ("state_dict", "model", "model_state_dict")
_WRAPPERS = ("module.", "_orig_mod.", "model.")
_ONLY_FOR_TRAINING = ("aux_classifier.", "aux1.", "aux2.", "AuxLogits.")
_COUNTER = "num_batches_tracked"  # absent from old files; torch itself fills it in


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """The weights in a file, by name. Nothing in the file is run.

    Raises:
        ModelError: The file is missing, empty or damaged, holds code or no weights. The message names it.
    """
    if not path.is_file():
        raise ModelError(f"no checkpoint file at {path}")
    if not path.stat().st_size:
        raise ModelError(f"{path} is empty; was its download or its saving cut short?")
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)
    return _weights_within(content, path)


def fit(build: Build, path: Path, respell: Respell) -> tuple[nn.Module, int | None]:
    """A model with the weights of a file, and its number of classes where that is not the usual one.

    Args:
        build: Makes the model with random weights.
        path: The checkpoint.
        respell: Brings weights that are named otherwise under the model's keys.

    Raises:
        ModelError: As `read_checkpoint`, or keys or shapes do not match; the message names some of each kind.
    """
    found = read_checkpoint(path)
    model = build(None)
    own = model.state_dict()
    unwrapped = {_unwrapped(key, own): value for key, value in found.items()}
    weights = _without_training_heads(respell(unwrapped, own), own)
    classes = _other_number_of_classes(own, weights)
    if classes is not None:
        model = build(classes)
        own = model.state_dict()
    _require_match(own, weights, path)
    model.load_state_dict(weights)
    return model, classes


def _read_safetensors(path: Path) -> object:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is damaged or no safetensors file: {error}") from error


def _read_pickle(path: Path) -> object:
    if _is_torchscript(path):
        raise ModelError(
            f"{path} is a TorchScript program, not a checkpoint; "
            "load it with torch.jit.load and explain the model that you get"
        )
    try:
        with warnings.catch_warnings():  # a pickle of an unusual protocol is warned about, then refused
            warnings.simplefilter("ignore")
            content: object = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ModelError(_why_refused(path, error)) from error
    except Exception as error:
        # Whatever the bytes of an unknown file provoke in the reader says the same: this is no checkpoint.
        reason = str(error).split("\n")[0]
        raise ModelError(f"{path} is damaged or no checkpoint: {type(error).__name__}: {reason}") from error
    return content


def _is_torchscript(path: Path) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())


def _why_refused(path: Path, error: pickle.UnpicklingError) -> str:
    named = re.search(r"GLOBAL ([\w.]*\w)", str(error))
    if named is None and not _starts_as_pickle(path):
        return f"{path} is damaged or no checkpoint"
    reason = f"it calls for {named[1]}" if named else "it is a pickle of other things than weights alone"
    return (
        f"{path} is refused: {reason}, and reading that could run code of the file's maker. "
        "If you trust its source, save the weights alone where it was made: "
        "torch.save(model.state_dict(), path), or safetensors.torch.save_file(model.state_dict(), path)"
    )


def _starts_as_pickle(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(1) == pickle.PROTO


def _weights_within(content: object, path: Path) -> dict[str, Tensor]:
    while isinstance(content, Mapping):
        nested = (content[key] for key in _NESTED_UNDER if isinstance(content.get(key), Mapping))
        inner = next(nested, None)
        if inner is None:
            break
        content = inner
    if not isinstance(content, Mapping):
        raise ModelError(f"{path} holds no weights by name but a {type(content).__name__}")
    weights = {str(key): value for key, value in content.items() if isinstance(value, Tensor)}
    if not weights:
        raise ModelError(f"{path} holds no weights; its keys are {_some(map(str, content))}")
    return weights


def _without_training_heads(weights: Mapping[str, Tensor], own: Collection[str]) -> dict[str, Tensor]:
    return {key: value for key, value in weights.items() if key in own or not key.startswith(_ONLY_FOR_TRAINING)}


def _unwrapped(key: str, own: Collection[str]) -> str:
    while key not in own:
        wrapper = next((each for each in _WRAPPERS if key.startswith(each)), None)
        if wrapper is None:
            break
        key = key.removeprefix(wrapper)
    return key


def _other_number_of_classes(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> int | None:
    """The length of the file's head, where the head is all that differs: one new length for one old one."""
    differing = [(own[key], weights[key]) for key in own.keys() & weights if own[key].shape != weights[key].shape]
    same_behind = all(mine.shape[1:] == given.shape[1:] and given.ndim for mine, given in differing)
    if not differing or not same_behind:
        return None
    old = {mine.shape[0] for mine, _ in differing}
    new = {given.shape[0] for _, given in differing}
    return new.pop() if len(old) == len(new) == 1 else None


def _require_match(own: Mapping[str, Tensor], weights: Mapping[str, Tensor], path: Path) -> None:
    missing = sorted(key for key in own.keys() - weights.keys() if not key.endswith(_COUNTER))
    unexpected = sorted(weights.keys() - own.keys())
    misshaped = [
        f"{key} ({tuple(weights[key].shape)} in the file, {tuple(own[key].shape)} in the model)"
        for key in own
        if key in weights and own[key].shape != weights[key].shape
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": misshaped}
    told = [f"{len(keys)} {kind}: {_some(keys)}" for kind, keys in kinds.items() if keys]
    if told:
        raise ModelError(f"{path} does not fit the model; is it of another architecture? Weights {'; '.join(told)}")


def _some(keys: Iterable[Any], most: int = 3) -> str:
    listed = list(keys)
    return ", ".join(listed[:most]) + (" and so on" if len(listed) > most else "")
