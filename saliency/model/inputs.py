"""Several inputs of a model in one call, such as colours and depth, or the views of a scene."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ..errors import ImageError, MethodError, NonFiniteError, plural
from ..hooks.pytree import tree_children, tree_with_children
from ..io.atomic_write import is_image
from ..io.axes import as_text
from ..io.geometry import Frame, Geometry
from ..io.inputs import Batch
from .call import current_call, reference_tensor, rows_of_states, shown_images

Key = str | int
"""The name of an input: a key of the mapping, a parameter of `forward`, or the number of a view."""
Group = tuple[Key, ...]
"""Names of images that are explained as one."""


class Views:
    """Mark images of one case as views: `method.attribute(saliency.Views(x))` gives a map for each view.

    It may also be an entry of a mapping, if an argument of the model is a tensor of views.

    Args:
        images: (N, V, C, H, W) the model's own input of N cases; or a list of V images of one case, as for
            `Attribution.attribute`.

    Raises:
        ImageError: A tensor has another number of axes.
    """

    def __init__(self, images: Tensor | np.ndarray[Any, Any] | Sequence[Any]) -> None:
        if isinstance(images, np.ndarray) and images.dtype.kind == "f":
            images = torch.from_numpy(images)
        if isinstance(images, Tensor) and images.dim() != 5:
            raise ImageError(f"views of shape {tuple(images.shape)}; expected (N, V, C, H, W), or a list of V images")
        self.images: Any = images.unbind(1) if isinstance(images, Tensor) else images


SeveralInputs = Mapping[Any, Any] | tuple[Any, ...] | Views
"""Inputs by name, in the order of the model's arguments, or as views."""


@dataclass(frozen=True, slots=True, eq=False)
class InputBatch(Batch):
    """Batch of some of the inputs of a model with several inputs.

    Attributes:
        names: The inputs that `inputs` holds: one; or several, as channels of one image or as rows of numbers.
        source: All inputs of the call. Inputs that are not in `names` stay unchanged while the model runs variants of
            `inputs`.
    """

    names: tuple[Key, ...] = field(kw_only=True)
    source: ModelInputs = field(kw_only=True, repr=False)

    @property
    def shapes(self) -> list[torch.Size]:
        """The shape of one row of each input."""
        return [self.source.values[name].shape[1:] for name in self.names]

    @property
    def others(self) -> list[InputBatch]:
        """Each of the other images."""
        return [self.source.batch(name) for name in self.source.frames.keys() - {*self.names}]

    @property
    def is_rows(self) -> bool:
        """Whether `inputs` holds several inputs as rows of numbers (N, 1, 1, numbers)."""
        return len(self.names) > 1 and self.inputs.shape[2:] != self.shapes[0][1:]

    def method(self, method: Any) -> Any:
        """Return a method with its options for this input."""
        return method if self.is_rows else method.of_input(self.names[0])

    def parts(self, x: Tensor) -> dict[Key, Tensor]:
        """Divide variants of `inputs`, or values, into the inputs that it holds."""
        if len(self.names) == 1:
            return {self.names[0]: x}
        rows, sizes = x, [shape[0] for shape in self.shapes]
        if self.is_rows:
            rows, sizes = x.flatten(1), [shape.numel() for shape in self.shapes]
        parts = zip(self.names, torch.split(rows, sizes, 1), self.shapes, strict=True)
        return {name: part.reshape(len(x), *shape) for name, part, shape in parts}


def as_rows(parts: Iterable[Tensor]) -> Tensor:
    """Return tensors with N rows as rows of numbers (N, 1, 1, numbers)."""
    return torch.cat([part.flatten(1) for part in parts], 1)[:, None, None]


def by_input(x: Tensor, compute: Callable[[Key | None, Tensor], Tensor]) -> Tensor:
    """Return a function of an image (1, C, H, W), or of each of several joined inputs, with the results joined.

    Args:
        x: The image, or the joined inputs of a call, as a method sees them.
        compute: Takes the name of an input, None for the only one, and its values (1, ...), and returns (K, ...).
    """
    batch = current_call().batch
    if not isinstance(batch, InputBatch) or not batch.is_rows:
        return compute(None, x)
    parts = [compute(name, part) for name, part in batch.parts(x).items()]
    most = max(map(len, parts))
    return as_rows(part if len(part) == most else part.expand(most, *part.shape[1:]) for part in parts)


def input_labels() -> Tensor:
    """Return the number of the input to which each number of joined inputs belongs, (1, numbers).

    Raises:
        MethodError: The call has one input.
    """
    batch = current_call().batch
    if not isinstance(batch, InputBatch) or not batch.is_rows:
        raise MethodError('segments="inputs" is for models with several inputs; pass them as {"rgb": image, ...}')
    sizes = torch.tensor([shape.numel() for shape in batch.shapes], device="cpu")
    return torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), sizes)[None]


class ModelInputs:
    """All inputs of a call of a model with several inputs, by name.

    Attributes:
        values: The inputs as the model takes them.
        frames: The images among them, with the position of each on its original image.
        joined: The floating-point tensors among them, which gradients reach.
        first: The first photo, or the first image if there is no photo, to which targets refer.
        geometries: The position of this image of each case.
    """

    def __init__(self, model: nn.Module, given: SeveralInputs, read: Callable[[Key], Callable[[Any], Batch]]) -> None:
        entries, self._tree, self._filled = _entries(model, given)
        self._parameters = _parameters(model)
        self.values: dict[Key, Any] = {}
        self.joined: tuple[Key, ...] = ()
        self.frames: dict[Key, tuple[Frame | None, ...]] = {}
        like = reference_tensor(model)
        rows = {len(entry) for entry in entries.values() if isinstance(entry, list) or getattr(entry, "ndim", 0) > 3}
        for name, entry in entries.items():
            if _is_image(entry, rows):
                try:
                    if isinstance(entry, list) and getattr(entry[0], "ndim", 0) == 4:
                        cure = "pass a tuple if they are images of one case, or torch.cat(images) for a batch"
                        raise ImageError(f"got a list of tensors (N, C, H, W); {cure}")
                    image = entry[None] if isinstance(entry, Tensor) and entry.ndim == 2 else entry
                    batch = read(name)(image)
                except (ImageError, NonFiniteError) as error:
                    raise type(error)(f"{name}: {error}") from error
                self.values[name], self.frames[name] = batch.inputs, batch.frames
            elif isinstance(entry, Tensor):
                value = entry.detach()[None] if entry.ndim == 1 and entry.is_floating_point() and not rows else entry
                target = value if like is None else like
                self.values[name] = value.to(target.device, (target if value.is_floating_point() else value).dtype)
            else:
                self.values[name] = entry
        if not self.frames:
            raise ImageError(f"no image among the inputs {', '.join(map(str, entries))}; expected at least one")
        self.count = max(map(len, self.frames.values()))
        for name, frames in self.frames.items():
            if len(frames) not in (1, self.count):
                raise ImageError(f"{name} has {plural(len(frames), 'image')}; expected {self.count} as others, or 1")
            self.frames[name] = frames * (self.count // len(frames))
        for name, value in self.values.items():  # one row serves all images
            if isinstance(value, Tensor) and value.is_floating_point() and value.shape[:1] in ((1,), (self.count,)):
                self.values[name] = value.expand(self.count, *value.shape[1:])
                self.joined += (name,)
        photos = (name for name, frames in self.frames.items() if frames[0] is not None)
        self.first = next(photos, next(iter(self.frames)))
        size = tuple(self.values[self.first].shape[2:])
        self.geometries = tuple(Geometry.of(frame, size) for frame in self.frames[self.first])

    def named(self, arguments: Any) -> Any:
        """Return further arguments of the model by name; ordered ones belong to the parameters that no input fills."""
        names = [name for name in self._parameters if name not in self._filled]
        return dict(zip(names, arguments, strict=False)) if isinstance(arguments, tuple | list) else arguments

    def batch(self, *names: Key, as_channels: bool = False) -> InputBatch:
        """Return a batch of some inputs. The model runs variants of them, with the other inputs unchanged.

        Args:
            names: The inputs.
            as_channels: Whether several inputs are channels of one image, so that the same places change in all of
                them.

        Raises:
            ImageError: The inputs are to be channels, but differ in size.
        """
        values = [self.values[name] for name in names]
        if as_channels and len({value.shape[2:] for value in values}) > 1:
            sizes = ", ".join(f"{name} {as_text(value.shape[2:])}" for name, value in zip(names, values, strict=True))
            raise ImageError(f"images that are explained as one need one size, got {sizes}")
        is_one = as_channels or len(names) == 1
        x = torch.cat(values, 1) if is_one else as_rows(values)
        frames = self.frames[names[0]] if is_one else (None,) * self.count
        batch = InputBatch(x, frames, names=names, source=self)
        return replace(batch, arguments=partial(self._arguments, batch))

    def only(self, case: int) -> ModelInputs:
        """Return the inputs of one case."""
        inputs = copy.copy(self)
        inputs.values = {name: self._rows(value, [case]) for name, value in self.values.items()}
        inputs.frames = {name: frames[case : case + 1] for name, frames in self.frames.items()}
        inputs.count, inputs.geometries = 1, self.geometries[case : case + 1]
        return inputs

    def _arguments(self, batch: InputBatch, variants: Tensor, _: int | None) -> Any:
        """Return all arguments of the model for variants of the inputs of a batch."""
        rows = shown_images(variants)
        others = {name: self._rows(value, rows) for name, value in self.values.items()}
        return _joined(self._tree, others | {name: part.clone() for name, part in batch.parts(variants).items()})

    def _rows(self, value: Any, rows: Sequence[int]) -> Any:
        """Return the rows of an input for variants of images; other arguments unchanged."""
        if isinstance(value, Tensor) and value.dim() and len(value) in (1, self.count):
            return value.expand(len(rows), *value.shape[1:]) if len(value) == 1 else value[rows]
        if not isinstance(value, list) or not value:
            return rows_of_states(value, rows, self.count)
        have_rows = all(isinstance(part, Tensor) and part.shape[:1] == (self.count,) for part in value)
        if have_rows and (value[0].dim() == 1 or len(value) != self.count):  # such as a mask (N,) of each camera
            return [self._rows(part, rows) for part in value]
        is_by_case = len(value) == self.count and (self.count > 1 or isinstance(value[0], Tensor))
        return [value[row] for row in rows] if is_by_case else value


def has_several_inputs(model: nn.Module, given: Any, arguments: Any = ()) -> bool:
    """Return whether images are inputs of one call by name or order, and not a batch of images.

    Args:
        model: The model.
        given: What the user passed as images.
        arguments: The further arguments that the user passed, in order or by name.
    """
    if isinstance(given, Mapping):
        return set(given) != {"pixel_values"}
    if isinstance(given, tuple) and len(given) > 1:
        required = [name for name, is_required in _parameters(model).items() if is_required]
        others = [name for name in required if name in arguments] if isinstance(arguments, Mapping) else arguments
        return len(required) > 1 and len(required) <= len(given) + len(others) <= len(_parameters(model))
    return isinstance(given, Views)


def requires_several(model: nn.Module) -> bool:
    """Return whether a model requires more arguments than one image."""
    return [*_parameters(model).values()].count(True) > 1


def require_volumes(model: nn.Module, x: Tensor) -> None:
    """Raise ImageError if a model of images gets five axes, which are the views of several cases."""
    kinds = {kind for module in model.modules() for kind in (nn.Conv2d, nn.Conv3d) if isinstance(module, kind)}
    if kinds == {nn.Conv2d}:
        raise ImageError(
            f"got {tuple(x.shape)}, a batch of volumes or videos, and {type(model).__name__} convolves images; for "
            "views or frames (N, V, C, H, W), pass saliency.Views(x)"
        )


def _parameters(model: nn.Module) -> dict[str, bool]:
    """Return the arguments of a model's forward, and whether each is required; none if it takes any, or is traced."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except ValueError:  # of a traced module
        return {}
    named = [
        parameter for parameter in parameters if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    has_any = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    return {} if has_any else {parameter.name: parameter.default is parameter.empty for parameter in named}


_Tree = Key | tuple[Any, list[Any]]
"""The name of an input; or an entry that was divided, and the trees of its parts."""


def _divided(entry: Any, inputs: dict[Key, Any], name: Key | None = None) -> _Tree:
    """Add an entry to the inputs, and return its tree."""
    if name is not None and not _is_divided(entry):
        inputs[name] = _as_tensor(entry)
        return name
    if isinstance(entry, Mapping) and not isinstance(entry, MutableMapping):
        entry = {**entry}
    parts = entry.images if isinstance(entry, Views) else tree_children(entry) or []
    keys = entry if isinstance(entry, Mapping) else range(len(parts))
    names = [key if name is None else f"{name}.{key}" for key in keys]
    return entry, [_divided(part, inputs, key) for key, part in zip(names, parts, strict=True)]


def _joined(tree: _Tree, values: Mapping[Key, Any], *, stacks_views: bool = True) -> Any:
    """Return values of inputs as the entry that was divided, in a new container of the same type."""
    if not isinstance(tree, tuple):
        return values[tree]
    entry, parts = tree
    joined = [_joined(part, values, stacks_views=stacks_views) for part in parts]
    if isinstance(entry, Views):
        return torch.stack(joined, 1) if stacks_views else Views(joined)
    return tree_with_children(copy.copy(entry), joined)


def with_image(inputs: Mapping[Any, Any], name: Key, image: Any) -> Any:
    """Return the inputs of a call with another image of this name, which may be in a nested entry."""
    entries = dict[Key, Any]()
    tree = _divided(inputs, entries)
    return _joined(tree, entries | {name: image}, stacks_views=False)


def _is_divided(entry: Any) -> bool:
    """Return whether the parts of an entry are inputs, as of mappings, lists of mappings, and tuples with images.

    A list of images is a batch. In a tuple, a float tensor of three axes may be a state (layers, N, H).
    """
    if isinstance(entry, list):
        return any(isinstance(part, Mapping) for part in entry)
    if isinstance(entry, tuple):
        return any(_is_divided(part) or (_is_image(part) and not _is_state(part)) for part in entry)
    return isinstance(entry, Mapping | Views)


def _is_state(part: Any) -> bool:
    return isinstance(part, Tensor) and part.is_floating_point() and part.ndim < 4


def _entries(model: nn.Module, given: SeveralInputs) -> tuple[dict[Key, Any], _Tree, Collection[str]]:
    """Return inputs by name, the tree of the model's arguments, and the names of the arguments."""
    parameters, inputs = _parameters(model), dict[Key, Any]()
    first = list(parameters)[:1]
    if isinstance(given, Views):
        return inputs, ({0: None}, [_divided(given, inputs)]), first
    if isinstance(given, tuple):
        given = dict(zip(parameters, given, strict=False))
    is_named = all(isinstance(name, str) for name in given)
    if is_named and (not parameters or parameters.keys() >= given.keys() or _takes_any_name(model)):
        return inputs, _divided({**given}, inputs), frozenset(given)
    if [*parameters.values()].count(True) == 1:
        is_tuple = [*given] == [*range(len(given))]
        return inputs, ({0: None}, [_divided(tuple(given.values()) if is_tuple else given, inputs)]), first
    raise MethodError(
        f"{type(model).__name__}.forward takes {', '.join(parameters)}, got a mapping of {', '.join(map(str, given))}; "
        'name its arguments, as in {"rgb": image, "depth": depth}, or pass a tuple in their order'
    )


def _takes_any_name(model: nn.Module) -> bool:
    return any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in inspect.signature(model.forward).parameters.values()
    )


def _as_tensor(entry: Any) -> Any:
    """Return an array that is no image of 8 or 16 bits as a tensor; any other entry unchanged."""
    is_array = isinstance(entry, np.ndarray) and entry.dtype.kind in "biuf" and not _is_image(entry)
    return torch.from_numpy(entry) if is_array else entry


def _is_image(entry: Any, rows: Collection[int] = ()) -> bool:
    """Return whether an input is an image, or a list of images, and not another argument.

    Args:
        entry: The input.
        rows: The numbers of rows of other inputs. A float tensor of two or three axes with as many rows is a state, or
            a sequence, and so is one that is too small for an image.
    """
    if isinstance(entry, list):
        return bool(entry) and all(map(_is_image, entry))
    if isinstance(entry, Tensor) and entry.is_floating_point():
        is_large = entry.ndim > 1 and (min(entry.shape[-2:]) > 4 or (entry.ndim == 3 and len(entry) in (1, 3, 4)))
        return entry.ndim in (4, 5) or (is_large and entry.ndim < 4 and len(entry) not in rows)
    if isinstance(entry, Tensor | np.ndarray):
        has_channels = entry.ndim > 2 and ({entry.shape[-1], entry.shape[-3]} & {1, 3, 4})
        return entry.dtype in (torch.uint8, np.uint8, np.uint16) and (entry.ndim == 2 or bool(has_channels))
    is_path = isinstance(entry, str) and (is_image(entry) or os.path.isfile(entry))  # noqa: PTH113 - never raises
    return is_path or isinstance(entry, os.PathLike | bytes | Image.Image) or hasattr(entry, "read")
