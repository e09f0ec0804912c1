"""Features of images, one row for each: in memory, or read from a folder of safetensors files with an index."""

from __future__ import annotations

import json
import operator
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import ExplanationError, LayerError, did_you_mean, warn

Labels = Tensor | list[Any] | None

# The file that says what there is, and the name that the labels have among the layers.
INDEX = "index.json"
LABELS = "@labels"
RESERVED = (LABELS, "__metadata__")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a folder of features."""

    path: Path
    images: int


class Rows:
    """The features of one layer on disk, one row for each image. Indexing reads the rows that are asked for."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, shards: tuple[Shard, ...]) -> None:
        self.name = name
        self.shape = shape  # (N, ...)
        self.dtype = dtype
        self._shards = shards
        self._starts = [0, *accumulate(each.images for each in shards)]

    def __len__(self) -> int:
        """How many images there are."""
        return self.shape[0]

    def __getitem__(self, index: Any) -> Tensor:
        """Some rows: `rows[3]` (...), `rows[100:200]` or `rows[[5, 2]]` (n, ...), `rows[:]` all. On the CPU.

        Raises:
            ExplanationError: A file is missing or damaged.
            IndexError: There is no such row.
        """
        if isinstance(index, slice):
            places = range(*index.indices(len(self)))
            return self._span(places.start, places.stop) if places.step == 1 else self._picked(places)
        if isinstance(index, tuple | bool):
            raise IndexError(f"rows take one index, and what they give takes others; got {index}")
        if isinstance(index, Iterable) and not isinstance(index, str):
            wanted = torch.as_tensor(index, device="cpu")
            if wanted.dtype == torch.bool:
                if wanted.shape != (len(self),):
                    raise IndexError(
                        f"a choice among {len(self)} rows has the shape ({len(self)},), not {wanted.shape}"
                    )
                wanted = wanted.nonzero().flatten()
            index = wanted.tolist()
            if wanted.dim():
                return self._picked(self._checked(each) for each in index)
        at = self._checked(index)
        return self._span(at, at + 1)[0]

    def shards(self) -> Iterator[Tensor]:
        """The rows of one file after the other."""
        for start, each in zip(self._starts, self._shards, strict=False):
            yield self._span(start, start + each.images)

    def _checked(self, index: Any) -> int:
        at = operator.index(index)
        if not -len(self) <= at < len(self):
            raise IndexError(f"there is no row {at} among {len(self)}")
        return at % len(self)

    def _picked(self, places: Iterable[int]) -> Tensor:
        rows = [self._span(at, at + 1) for at in places]
        return torch.cat(rows) if rows else self._empty()

    def _span(self, start: int, stop: int) -> Tensor:
        """The rows from `start` to before `stop`."""
        parts = []
        at = start
        while at < stop:
            number = bisect_right(self._starts, at) - 1
            begin = self._starts[number]
            end = min(stop, self._starts[number + 1])
            parts.append(_read(self._shards[number], self.name, at - begin, end - begin))
            at = end
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else self._empty()

    def _empty(self) -> Tensor:
        return torch.empty((0, *self.shape[1:]), dtype=self.dtype, device="cpu")

    def __repr__(self) -> str:
        return f'Rows("{self.name}", shape={self.shape}, dtype={self.dtype}, {len(self._shards)} files)'


class Features(Mapping[str, T], Generic[T]):
    """A mapping from layers to their features, one row for each image: tensors in memory, or `Rows` on disk.

    Attributes:
        images: How many images there are.
        labels: (N, ...) or a list, where the data came with labels; else None.
    """

    def __init__(self, layers: Mapping[str, T], images: int, labels: Labels) -> None:
        self._layers = dict(layers)
        self.images = images
        self.labels = labels

    @staticmethod
    def open(folder: str | os.PathLike[str]) -> Features[Rows]:
        """The features in a folder, of which nothing but the index and the labels is read until it is asked for.

        Raises:
            ExplanationError: The folder holds no features, or its index is damaged.

        Warns:
            SaliencyWarning: The run that made them was interrupted: there are fewer than the data had.
        """
        folder = Path(folder).absolute()  # wherever the process goes
        try:
            index = json.loads((folder / INDEX).read_text("utf-8"))
            shards = tuple(Shard(folder / each["file"], each["images"]) for each in index["shards"])
            images = sum(each.images for each in shards)
            layers = {
                name: Rows(name, (images, *each["shape"]), getattr(torch, each["dtype"]), shards)
                for name, each in index["layers"].items()
            }
            kind, complete = index["labels"], index["complete"]
        except FileNotFoundError as error:
            raise ExplanationError(f"there are no features in {folder}: it has no {INDEX}") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ExplanationError(f"the index of the features in {folder} is damaged: {error}") from error
        if not complete:
            warn(f"the features in {folder} are of the first {images} images; the run that made them was interrupted")
        return Features(layers, images, _labels(kind, shards))

    def __getitem__(self, layer: str) -> T:
        """The features of a layer. Raises LayerError, with the closest names, where there are none."""
        try:
            return self._layers[layer]
        except KeyError:
            hint = did_you_mean(str(layer), self._layers) or f"; they are {', '.join(self._layers)}"
            raise LayerError(f'no features of a layer "{layer}"{hint}') from None

    def __contains__(self, layer: object) -> bool:
        return layer in self._layers

    def __iter__(self) -> Iterator[str]:
        """The names of the layers."""
        return iter(self._layers)

    def __len__(self) -> int:
        """How many layers there are."""
        return len(self._layers)

    def __repr__(self) -> str:
        return f"Features({self.images} images; {', '.join(self._layers)})"


def _read(shard: Shard, name: str, start: int, stop: int) -> Tensor:
    try:
        with safe_open(shard.path, framework="pt") as file:
            rows: Tensor = file.get_slice(name)[start:stop]
    except (OSError, SafetensorError) as error:
        raise ExplanationError(f"the features in {shard.path} cannot be read: {error}") from error
    return rows


def _labels(kind: str | None, shards: Iterable[Shard]) -> Labels:
    if kind == "tensor":
        return torch.cat([_read(each, LABELS, 0, each.images) for each in shards])
    if kind is None:
        return None
    labels: list[Any] = []
    for each in shards:
        try:
            with safe_open(each.path, framework="pt") as file:
                labels += json.loads(file.metadata()[LABELS])
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ExplanationError(f"the labels in {each.path} cannot be read: {error}") from error
    return labels


def type_name(dtype: torch.dtype) -> str:
    """The name of a type: "float16"."""
    return str(dtype).removeprefix("torch.")
