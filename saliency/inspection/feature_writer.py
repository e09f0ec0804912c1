"""Writing features, file by file: into memory, or into a folder that never claims more than there is."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ImageError, LayerError, MethodError, warn
from ..io.atomic_write import atomic_write, save_tensors
from .feature_store import INDEX, LABELS, Features, Labels, Rows, type_name

_SHARD = re.compile(r"shard-\d{5,}\.safetensors")
_BYTES = 1 << 28  # in one file, where the caller does not say how many images


class Store:
    """A folder that features are written to, file by file. Its index never claims more than there is.

    Args:
        folder: Made where it is missing. What an interrupted run left in it is taken away.
        images: How many images go into one file; None takes as many as fill 256 MiB.

    Raises:
        MethodError: It holds finished features, or files of others by the names of its own.
    """

    def __init__(self, folder: Path, images: int | None) -> None:
        self.folder = folder
        self.images = images
        self._shards: list[dict[str, Any]] = []
        if folder.exists() and not folder.is_dir():
            raise MethodError(f"features go into a folder, and {folder} is a file")
        folder.mkdir(parents=True, exist_ok=True)
        files = [each for each in folder.iterdir() if each.name == INDEX or _SHARD.fullmatch(each.name)]
        known = _is_complete(folder / INDEX)
        if known:
            raise MethodError(f"{folder} holds features already; open them with Features.open, or take another")
        if files and known is None:
            raise MethodError(f"{folder} holds {files[0].name}, which no run of this made; take another folder")
        for each in sorted(files):  # the index first
            each.unlink()

    def write(self, rows: Mapping[str, Tensor], labels: Labels) -> None:
        """One more file, and the index that knows of it. Raises OSError where there is no place for it."""
        file = f"shard-{len(self._shards):05d}.safetensors"
        tensors = dict(rows)
        metadata = {}
        if isinstance(labels, Tensor):
            tensors[LABELS] = labels
        elif labels is not None:
            metadata[LABELS] = json.dumps(labels)
        contiguous = {name: each.contiguous() for name, each in tensors.items()}
        save_tensors(self.folder / file, contiguous, metadata or None)
        self._shards.append({"file": file, "images": len(next(iter(rows.values())))})
        self._layers = {
            name: {"shape": list(each.shape[1:]), "dtype": type_name(each.dtype)} for name, each in rows.items()
        }
        self._labels = "tensor" if isinstance(labels, Tensor) else None if labels is None else "list"
        self._write_index(complete=False)

    def finish(self) -> Features[Rows]:
        """The features, now that they are whole."""
        self._write_index(complete=True)
        return Features.open(self.folder)

    def _write_index(self, *, complete: bool) -> None:
        index = {
            "format": 1,
            "complete": complete,
            "images": sum(each["images"] for each in self._shards),
            "layers": self._layers,
            "labels": self._labels,
            "shards": self._shards,
        }
        with atomic_write(self.folder / INDEX) as path:
            path.write_text(json.dumps(index, indent=1), "utf-8")


class Sink:
    """Where the rows of one batch after the other go: into memory, or into files whenever there are enough for one.

    Args:
        store: The folder; None keeps everything.
    """

    def __init__(self, store: Store | None) -> None:
        self._store = store
        self._waiting: dict[str, list[Tensor]] = {}
        self._labels: list[Any] = []
        self._images = 0  # that wait
        self._has_labels: bool | None = None

    def take(self, rows: Mapping[str, Tensor], labels: Any, batch: int) -> None:
        """The rows and labels of one more batch.

        Raises:
            ImageError: Some batches come with labels and some without, or with labels of another kind.
            LayerError: A layer's rows have another shape, or type, than before.
        """
        for name, each in rows.items():
            before = self._waiting.setdefault(name, [])
            if before and (before[0].shape[1:], before[0].dtype) != (each.shape[1:], each.dtype):
                raise LayerError(
                    f'layer "{name}" gives rows {tuple(each.shape[1:])} of {type_name(each.dtype)} in batch {batch}, '
                    f"and before {tuple(before[0].shape[1:])} of {type_name(before[0].dtype)}; let pool make them alike"
                )
            before.append(each)
        images = len(next(iter(rows.values())))
        kept = _kept(labels, images, tell=self._has_labels is None)
        if self._has_labels not in (None, kept is not None):
            raise ImageError(
                f"batch {batch} comes {'with' if kept is not None else 'without'} labels, unlike the first"
            )
        self._has_labels = kept is not None
        if kept is not None:
            first = self._labels[0] if self._labels else kept
            if _label_kind(first) != _label_kind(kept):
                raise ImageError(
                    f"the labels of batch {batch} are {_label_kind(kept)}, and those before {_label_kind(first)}"
                )
            self._labels.append(kept)
        self._images += images
        if self._store is not None:
            size = self._store.images or _images_in(rows)
            while self._images > size:
                # What fits exactly waits: there may be no more, and the shape of the rows is to be remembered.
                self._flush(self._store, size)

    def finish(self) -> Features[Tensor] | Features[Rows]:
        """All that was taken."""
        if self._store is not None:
            self._flush(self._store, self._images)
            return self._store.finish()
        return Features({name: torch.cat(each) for name, each in self._waiting.items()}, self._images, self._joined())

    def _flush(self, store: Store, size: int) -> None:
        whole = {name: torch.cat(each) for name, each in self._waiting.items()}
        labels = self._joined()
        store.write({name: each[:size] for name, each in whole.items()}, None if labels is None else labels[:size])
        self._waiting = {name: [each[size:]] for name, each in whole.items()}
        self._labels = [] if labels is None else [labels[size:]]
        self._images -= size

    def _joined(self) -> Labels:
        if not self._labels:
            return None
        if isinstance(self._labels[0], Tensor):
            return torch.cat(self._labels)
        return [each for batch in self._labels for each in batch]


def _kept(labels: Any, images: int, *, tell: bool) -> Labels:
    """The labels of a batch as they can be kept: one for each image; None where there are none, or no such ones."""
    if isinstance(labels, Tensor) and labels.dim() and len(labels) == images:
        return labels.detach().cpu().clone()
    is_row = isinstance(labels, list | tuple) and len(labels) == images
    if is_row and all(isinstance(each, str | int | float) for each in labels):
        return list(labels)
    if labels is not None and tell:
        warn(f"what comes along with the batches ({type(labels).__name__}) is not kept: it is not one label per image")
    return None


def _label_kind(labels: Tensor | list[Any]) -> str:
    """What the labels of all batches have in common, in words."""
    if isinstance(labels, list):
        return "a list"
    return f"a tensor of {type_name(labels.dtype)} with {tuple(labels.shape[1:])} for each image"


def _images_in(rows: Mapping[str, Tensor]) -> int:
    """How many images fill one file."""
    each = sum(rows.nbytes // len(rows) for rows in rows.values())
    return max(1, _BYTES // max(1, each))


def _is_complete(index: Path) -> bool | None:
    """Whether a folder's features are whole; None where there is no index of features."""
    try:
        known = json.loads(index.read_text("utf-8"))
        return bool(known["complete"]) if known["format"] == 1 and "shards" in known else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
