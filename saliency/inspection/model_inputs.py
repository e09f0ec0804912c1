"""What the user hands over to run a model on, as the arguments of its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ..errors import ImageError
from ..hooks.model_state import call, is_categories, is_preprocess, model_attribute, reference_tensor
from ..hooks.pytree import tree_map_tensors, tree_tensors
from ..io.inputs import read
from ..targets.class_names import Categories, as_categories


class Feed(NamedTuple):
    """One call of a model, and what came along with its input."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: Any = None
    """The rest of a pair (input, labels), as data loaders give them; None where there is none."""

    @property
    def size(self) -> int:
        """How many images there are: the length of the first tensor; 1 where that has none."""
        first = next((each for each in (*self.args, *self.kwargs.values()) if isinstance(each, Tensor)), None)
        return len(first) if first is not None and first.dim() else 1


def feed(model: nn.Module, example: Any) -> Feed:
    """One call of the model on an example.

    Args:
        model: Where it is a model for pictures, `model.preprocess` reads them.
        example: A tensor as the model takes it, not of uint8; a shape such as (10, 3, 224, 224), for noise; a path, PIL
            picture or uint8 array, or a list of these; a tuple of arguments, some of which are or hold tensors; a
            mapping of names to tensors for keyword arguments. Tensors are brought to the model's device.

    Raises:
        ImageError: It is none of these, or cannot be read.
    """
    like = reference_tensor(model)
    if isinstance(example, tuple) and example and all(type(each) is int for each in example):
        return Feed((_noise(example, like),), {})
    if isinstance(example, Mapping):
        return Feed((), {str(name): _moved(each, like) for name, each in example.items()})
    if isinstance(example, tuple) and any(True for _ in tree_tensors(example)):
        return Feed(tuple(_moved(each, like) for each in example), {})
    return Feed((_input(model, example, like),), {})


def feeds(model: nn.Module, data: Any) -> Iterator[Feed]:
    """The calls of the model on some data, made as they are asked for.

    Args:
        model: As for `feed`.
        data: One example as for `feed`, or any iterable of batches: tensors, mappings of keyword arguments, lists of
            pictures, or pairs of one of these and labels as data loaders give them.

    Raises:
        ImageError: A batch cannot be read.
    """
    if _is_one(data):
        yield feed(model, data)
        return
    if not isinstance(data, Iterable):
        raise ImageError(f"expected a tensor, pictures, or an iterable of batches, got {type(data).__name__}")
    like = reference_tensor(model)
    for item in data:
        if isinstance(item, tuple | list) and item and isinstance(item[0], Tensor | Mapping | list | tuple):
            rest = tuple(_moved(each, like) for each in item[1:])
            yield feed(model, item[0])._replace(labels=rest[0] if len(rest) == 1 else rest or None)
        else:
            yield feed(model, item)


def called(model: nn.Module, feed: Feed, change: Callable[[Tensor], Tensor] = torch.clone) -> Any:
    """What a model returns for a batch. Raises ModelError where it refuses it.

    Args:
        model: Borrowed by the caller.
        feed: The batch.
        change: What the model gets for each tensor: a clone, for it may work on its input in place.
    """
    return call(model, tree_map_tensors(feed.args, change), tree_map_tensors(feed.kwargs, change))


def _is_one(data: Any) -> bool:
    """Whether it is one example, and not an iterable of batches."""
    if isinstance(data, list):
        return bool(data) and not isinstance(data[0], Tensor | tuple | list | Mapping)
    return isinstance(data, Tensor | tuple | Mapping | str | Image.Image | np.ndarray) or hasattr(data, "__fspath__")


def _input(model: nn.Module, example: Any, like: Tensor | None) -> Tensor:
    """A tensor as it is, such as one of token indices; bytes, and anything else, are pictures."""
    if isinstance(example, Tensor) and example.dtype is not torch.uint8:
        moved: Tensor = _moved(example, like)
        return moved
    preprocess = model_attribute("preprocess", is_preprocess, model)
    return read(example, preprocess, like=like).tensor


def _moved(nest: Any, like: Tensor | None) -> Any:
    """The tensors on the model's device, those of real numbers also in its type."""

    def move(tensor: Tensor) -> Tensor:
        if like is None:
            return tensor
        return tensor.to(like) if tensor.is_floating_point() else tensor.to(like.device)

    return tree_map_tensors(nest, move)


def _noise(shape: tuple[int, ...], like: Tensor | None) -> Tensor:
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    return noise if like is None else noise.to(like)


def categories_of(model: nn.Module) -> Categories:
    """The class names that a model carries; None where it carries none."""
    names = model_attribute("categories", is_categories, model)
    return None if names is None else as_categories(names)
