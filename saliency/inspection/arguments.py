"""Convert arguments of users: select layers by name or pattern, and read data as calls of a prepared model."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ..errors import ImageError, LayerError, NotApplicableError
from ..hooks.manager import is_hookable
from ..hooks.pytree import tree_map_tensors, tree_tensors
from ..io.inputs import read
from ..model.call import call, model_attribute, reference_tensor
from ..model.layers import find, named_layers

LayersLike = str | nn.Module | type[nn.Module] | Iterable[str | nn.Module | type[nn.Module]]
"""A dotted name, a pattern as in "layer4.*.conv?" (`*` also matches dots), a module, a class of modules, or several."""


def select_layers(model: nn.Module, layers: LayersLike = "*") -> dict[str, nn.Module]:
    """Return the selected layers by name, in the order of the model; "*" selects every layer.

    A model without submodules is a layer with the name "".

    Raises:
        LayerError: A name, pattern or class matches no layer; the closest names are given.
    """
    if isinstance(layers, str | nn.Module | type) or not isinstance(layers, Iterable):
        layers = [layers]
    wanted: list[Any] = list(layers)
    if not wanted:
        raise LayerError('no layer was given; "*" selects every layer')
    modules = named_layers(model)
    names = {name for selector in wanted for name in _matching_names(model, modules, selector)}
    first_names: dict[nn.Module, str] = {}
    for name, module in modules.items():
        if name in names:
            first_names.setdefault(module, name)
    return {name: module for module, name in first_names.items()}


def is_pattern(wanted: Any) -> bool:
    """Return whether a selector is a pattern rather than a name."""
    return isinstance(wanted, str) and any(character in wanted for character in "*?[")


def require_hookable(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Raise NotApplicableError if hooks do not run on the calls of a layer."""
    hidden = next((name for name, layer in layers.items() if not is_hookable(model, name, layer)), None)
    if hidden is not None:
        label = f'layer "{hidden}"' if hidden else "the model"
        reason = "is scripted or inside a TorchScript module, which runs no hooks"
        raise NotApplicableError(f"{label} {reason}; choose a layer that contains it, or do not use torch.jit")


def _matching_names(model: nn.Module, modules: dict[str, nn.Module], wanted: Any) -> list[str]:
    if isinstance(wanted, type) and issubclass(wanted, nn.Module):
        names = [name for name, module in modules.items() if isinstance(module, wanted) and name]
        if not names and not isinstance(model, wanted):
            kinds = sorted({type(module).__name__ for name, module in modules.items() if name})
            raise LayerError(f"no {wanted.__name__} in {type(model).__name__}; its layers are {', '.join(kinds)}")
        return names or [""]
    if is_pattern(wanted):
        names = [name for name in modules if name and fnmatch.fnmatchcase(name, wanted)]
        if not names and len(modules) > 1:
            raise LayerError(f'no layer of {type(model).__name__} matches "{wanted}"; try "layer4.*.conv?"')
        return names or [""]
    return [find(model, wanted)[0]]


class ModelCall(NamedTuple):
    """Arguments of one call of a model, with labels if the data have labels."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: Any = None  # the labels in a pair (input, labels) of a data loader

    @property
    def size(self) -> int:
        """Number of images: the length of the first tensor, or 1 for a scalar."""
        first = next((arg for arg in (*self.args, *self.kwargs.values()) if isinstance(arg, Tensor)), None)
        return len(first) if first is not None and first.dim() else 1

    def run(self, model: nn.Module, change: Callable[[Tensor], Tensor] = torch.clone) -> Any:
        """Return the output of a prepared model. Raises ModelError if the model rejects its arguments.

        Args:
            model: The model.
            change: Function applied to each tensor. By default a clone, since the model may change its input in place.
        """
        return call(model, tree_map_tensors(self.args, change), tree_map_tensors(self.kwargs, change))


def model_call(model: nn.Module, example: Any) -> ModelCall:
    """Return the call of a model on an example.

    Args:
        model: The model. Images are read with `model.preprocess`.
        example: A tensor as the model takes it, not of uint8; a shape such as (10, 3, 224, 224), for noise; a path, PIL
            image or uint8 array, or a list of these; a tuple of arguments with tensors; or a mapping from names to
            tensors for keyword arguments. Tensors are moved to the device of the model.

    Raises:
        ImageError: The example has another type, or an image cannot be read.
    """
    like = reference_tensor(model)
    if isinstance(example, tuple) and example and all(type(size) is int for size in example):
        noise = torch.randn(example, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
        return ModelCall((noise if like is None else noise.to(like),), {})
    if isinstance(example, Mapping):
        return ModelCall((), {str(name): _moved(value, like) for name, value in example.items()})
    if isinstance(example, tuple) and any(True for _ in tree_tensors(example)):
        return ModelCall(tuple(_moved(value, like) for value in example), {})
    if isinstance(example, Tensor) and example.dtype is not torch.uint8:
        return ModelCall((_moved(example, like),), {})
    preprocess = model_attribute("preprocess", model)
    return ModelCall((read(example, preprocess, like=like).inputs,), {})


def model_calls(model: nn.Module, data: Any) -> Iterator[ModelCall]:
    """Yield the calls of a model on some data, lazily.

    Args:
        model: As for `model_call`.
        data: One example, as for `model_call`, or any iterable of batches, such as a data loader. A batch is a tensor,
            a mapping of keyword arguments, a list of images, or a pair of such a batch and labels.

    Raises:
        ImageError: A batch cannot be read.
    """
    is_example = hasattr(data, "__fspath__") or isinstance(
        data, Tensor | tuple | Mapping | str | Image.Image | np.ndarray
    )
    if is_example or (isinstance(data, list) and data and not isinstance(data[0], Tensor | tuple | list | Mapping)):
        yield model_call(model, data)
        return
    if not isinstance(data, Iterable):
        raise ImageError(f"expected a tensor, images, or an iterable of batches, got {type(data).__name__}")
    like = reference_tensor(model)
    for batch in data:
        if isinstance(batch, tuple | list) and batch and isinstance(batch[0], Tensor | Mapping | list | tuple):
            labels = tuple(_moved(value, like) for value in batch[1:])
            yield model_call(model, batch[0])._replace(labels=labels[0] if len(labels) == 1 else labels or None)
        else:
            yield model_call(model, batch)


def _moved(tree: Any, like: Tensor | None) -> Any:
    """Move tensors to the device of the model, and floating-point tensors to its dtype."""
    if like is None:
        return tree
    return tree_map_tensors(tree, lambda t: t.to(like) if t.is_floating_point() else t.to(like.device))
