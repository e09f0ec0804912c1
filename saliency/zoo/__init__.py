"""Models by name, with the preprocessing and the class names that belong to their weights."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ..attribution.options import is_per_input
from ..calls import answer_calls
from ..errors import ModelError, did_you_mean
from ..io.preprocess import PreprocessLike, as_preprocess
from ..model.dual_encoder import DualEncoder
from ..validation import described
from .checkpoints import SUFFIXES, load_checkpoint
from .libraries import Bundled, HuggingFace, OpenClip, PythonModel, ShapesNetworks, Source, Timm, Torchvision

__all__ = ["ModelListing", "load", "models"]

_LIBRARIES = (Bundled(), ShapesNetworks(), Torchvision(), Timm())  # in the order in which a bare name is looked up
_SEED = 0
_RANDOM_LOCK = threading.RLock()  # the random state is shared by all threads; the user's code may call `load`


@dataclass(frozen=True, slots=True)
class ModelListing:
    """One line of the table of models."""

    name: str  # as `load` takes it
    source: Source


@answer_calls
def load(
    name: str,
    *,
    weights: str | os.PathLike[str] | None = "default",
    preprocess: PreprocessLike | None = None,
    categories: Sequence[str] | None = None,
) -> nn.Module:
    """Load a model by name, in evaluation mode, on the CPU.

    It is a plain module with two attributes: `preprocess`, a `Preprocess` (or a `TransformPreprocess` around your
    callable), and `categories`, a tuple of class names, or None if there are no names. The global random state does not
    change; random weights are the same at every call.

    Args:
        name: "efficientnet_lite0" or "shapes_vit", whose weights need no download, or any model of torchvision or timm,
            looked up in that order; "torchvision/resnet50" and "timm/resnet50.a1_in1k" choose the library.
            "open_clip/ViT-B-32" is a `DualEncoder`; "hf/google/vit-base-patch16-224" is a model of transformers, in a
            repository of its hub or, as in "hf//folder/of/mine", in a folder; of images and texts, it is a
            `DualEncoder`. Or a model in Python code that is run: "mine.py:make" or "package.module:make", the name of
            a model or of a function that returns one. Its attributes `preprocess` and `categories` are used.
        weights: "default" for the library's best weights; None for random weights; the name of another set of the
            library ("IMAGENET1K_V2", "a1_in1k", "laion2b_s34b_b79k"); or the path of a checkpoint, which runs no code.
        preprocess: Replaces the library's preprocessing: torchvision's `weights.transforms()`, timm's `pretrained_cfg`,
            any callable from an image to a tensor, or a mapping with one of these for each input of a model with
            several inputs.
        categories: Replaces the library's class names.

    Raises:
        DependencyError: The library, or the package of bundled weights, is not installed.
        ModelError: The model or its weights do not exist or cannot be downloaded. The checkpoint is missing, damaged,
            unsafe or of another model. The library cannot be imported, or the number of categories is wrong. The
            user's code raises an error; the message names its file and line.

    Example:
        >>> import saliency
        >>> model = saliency.load("efficientnet_lite0")
        >>> model.categories[967]
        'espresso'
    """
    library, bare = _find(name)
    if isinstance(chosen := cast("object", weights), Enum):  # of torchvision
        weights = chosen.name
    file = None if weights is None else _checkpoint_path(weights)
    named = "default" if weights is None or file is not None else str(weights)
    classes = None
    # Draw random weights on the CPU from a fixed seed, outside inference mode so that gradients are possible.
    with _RANDOM_LOCK, torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.device("cpu"):
        torch.default_generator.manual_seed(_SEED)
        if file is not None:
            model, classes = load_checkpoint(lambda number: library.build(bare, number), file)
        else:
            model = library.build(bare) if weights is None else library.pretrained(bare, named)
        facts = library.facts(model, bare, named)
    if classes is not None:
        facts = replace(facts, categories=None, classes=classes)
    if facts.tokenizer is not None:
        model = DualEncoder(model, facts.tokenizer)
    plain: Any = model.eval()
    chosen = facts.preprocess if preprocess is None else preprocess
    if isinstance(getattr(plain, "preprocess", None), nn.Module):  # such as torchvision's weights.transforms()
        del plain.preprocess
    plain.preprocess = chosen if chosen is None or is_per_input(chosen) else as_preprocess(chosen)
    plain.categories = facts.categories if categories is None else _check_categories(categories, facts.classes)
    return model


@answer_calls
def models() -> list[ModelListing]:
    """Return every model that `load` can load, bundled models first, under the name that `load` takes."""
    listings: dict[str, ModelListing] = {}
    for library in _LIBRARIES:
        for bare in library.names():
            name = f"{library.source}/{bare}" if bare in listings else bare
            listings[name] = ModelListing(name, library.source)
    return list(listings.values())


def _check_categories(categories: Sequence[str], classes: int | None) -> tuple[str, ...]:
    if isinstance(categories, str) or classes not in (None, len(categories)):
        got = f'the string "{categories}"' if isinstance(categories, str) else f"{len(categories)} names"
        raise ModelError(f"categories: expected {classes or 'some'} names, one per class of the model; got {got}")
    return tuple(categories)


def _checkpoint_path(weights: str | os.PathLike[str]) -> Path | None:
    """Return the path of a checkpoint, or None for the name of a library's weights."""
    if not isinstance(weights, str | os.PathLike):
        expected = 'the name of weights, such as "default", or the path of a checkpoint'
        raise ModelError(f"weights={described(weights)}: expected {expected}")
    path = Path(weights).expanduser()
    if not isinstance(weights, str):
        return path
    is_path = path.suffix in SUFFIXES or path.name != weights or (weights != "default" and path.is_file())
    return path if is_path else None


def _find(name: str) -> tuple[ShapesNetworks | Torchvision | Timm | OpenClip | HuggingFace | PythonModel, str]:
    """Return the library that has a model, and the name of the model in it."""
    if not isinstance(name, str):
        raise ModelError(f'expected the name of a model, such as "efficientnet_lite0", got {type(name).__name__}')
    if Path(name).suffix in SUFFIXES:
        cure = f"name the code that builds the network, and its weights: --model mine.py:make --weights {name}"
        if "yolo" in name.lower():
            lines = f'"from ultralytics import YOLO" and "model = YOLO({name!r})"'
            cure = f"write two lines into mine.py, {lines}, and pass mine.py:model as the model"
        raise ModelError(f"{name} holds weights; {cure}")
    if ":" in name or name.endswith(".py"):
        return PythonModel(), name
    source, slash, bare = name.partition("/")
    if slash and source == "hf":
        return HuggingFace(), bare
    libraries = (OpenClip(),) if slash and source == "open_clip" else _LIBRARIES
    for library in libraries:
        sought = bare if slash and source == library.source else name
        if sought in library.names(tags=True):
            return library, sought
    bare = name.rpartition("/")[2]
    names = [bare_name for library in libraries for bare_name in library.names(tags="." in bare)]
    raise ModelError(f'no model "{name}"{did_you_mean(bare, names) or "; `saliency models` lists them"}')
