"""A model by its name, with the preprocessing and the class names that belong to it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ModelError, did_you_mean
from ..io.preprocess import PreprocessLike, as_preprocess
from .bundled import Bundled
from .libraries import Facts, Library, Source, Timm, Torchvision, Where
from .weights import SUFFIXES, fit

_LIBRARIES: tuple[Library, ...] = (
    Bundled(),
    Torchvision(),
    Timm(),
)  # in the order in which a bare name is looked up
_SEED = 0
_ONE_AT_A_TIME = threading.Lock()  # the random state that is set aside belongs to all threads


@dataclass(frozen=True, slots=True)
class Listing:
    """One line of the table of models."""

    name: str  # as `load` takes it
    source: Source
    weights: Where  # where the default weights are; "none" where the library has none


def load(
    name: str,
    *,
    weights: str | os.PathLike[str] | None = "default",
    preprocess: PreprocessLike | None = None,
    categories: Sequence[str] | None = None,
) -> nn.Module:
    """The model of that name, in eval mode, on the CPU.

    It is a plain module with two plain attributes: `preprocess`, a `Preprocess` (or a `TransformPreprocess`
    around a callable of yours), and `categories`, a tuple of class names, or None where they are not known.
    The global random state is left alone; random weights are the same ones each time.

    Args:
        name: "efficientnet_lite0" (whose weights need no download), or any model of torchvision or timm,
            looked up in that order; "torchvision/resnet50" and "timm/resnet50.a1_in1k" say which.
        weights: "default" for the library's best ones; None for random ones; the name of others that the
            library has ("IMAGENET1K_V2", "a1_in1k"); or the path of a checkpoint, from which no code is run.
        preprocess: Instead of the library's own: torchvision's `weights.transforms()`, timm's
            `pretrained_cfg`, or any callable from a picture to a tensor.
        categories: Instead of the library's own class names.

    Raises:
        ModelError: No such model or weights, no network to fetch them by, a checkpoint that is missing,
            damaged, unsafe or of another model, a library that does not load, the wrong number of categories.

    Example:
        >>> import saliency
        >>> model = saliency.load("efficientnet_lite0")
        >>> model.categories[967]
        'espresso'
    """
    library, bare = _find(name)
    with _quiet_random():
        model, facts = _make(library, bare, weights)
    plain: Any = model.eval()
    plain.preprocess = as_preprocess(facts.preprocess if preprocess is None else preprocess)
    plain.categories = facts.categories if categories is None else _checked(categories, facts.classes)
    return model


def models() -> list[Listing]:
    """Every model that `load` knows, the bundled ones first, under the name that `load` takes."""
    taken: set[str] = set()
    listings = []
    for library in _LIBRARIES:
        names = library.names()
        for bare in names:
            name = f"{library.source}/{bare}" if bare in taken else bare
            listings.append(Listing(name, library.source, library.where(bare)))
        taken.update(names)
    return listings


def _make(library: Library, name: str, weights: str | os.PathLike[str] | None) -> tuple[nn.Module, Facts]:
    if weights is None:
        model = library.build(name, None)
        return model, library.facts(model, name, "default")
    path = _checkpoint_path(weights)
    if path is None:
        model = library.pretrained(name, str(weights))
        return model, library.facts(model, name, str(weights))
    model, classes = fit(lambda number: library.build(name, number), path, library.native)
    facts = library.facts(model, name, "default")
    return model, facts if classes is None else Facts(facts.preprocess, None, classes)


def _checked(categories: Sequence[str], classes: int | None) -> tuple[str, ...]:
    if isinstance(categories, str) or classes not in (None, len(categories)):
        given = f'the text "{categories}"' if isinstance(categories, str) else f"{len(categories)} names"
        raise ModelError(f"categories: expected {classes or 'some'} names, one per class of the model; got {given}")
    return tuple(categories)


def _checkpoint_path(weights: str | os.PathLike[str]) -> Path | None:
    """The file that is meant, or None for the name of a library's weights."""
    path = Path(weights).expanduser()
    if not isinstance(weights, str):
        return path
    meant = path.suffix in SUFFIXES or path.name != weights or (weights != "default" and path.is_file())
    return path if meant else None


def _find(name: str) -> tuple[Library, str]:
    """The library that a name leads to, and the name there."""
    source, slash, bare = name.partition("/")
    for library in _LIBRARIES:
        sought = bare if slash and source == library.source else name
        if sought in library.names() or sought in library.tagged():
            return library, sought
    raise ModelError(f'no model "{name}"{_hint(name.rpartition("/")[2])}')


def _hint(name: str) -> str:
    known = [each for library in _LIBRARIES for each in (library.tagged() if "." in name else library.names())]
    return did_you_mean(name, known) or "; `saliency models` lists them"


@contextmanager
def _quiet_random() -> Iterator[None]:
    """Draw weights on the CPU from a seed of their own, fit for gradients even under inference mode."""
    with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.device("cpu"):
        torch.default_generator.manual_seed(_SEED)
        yield
