"""Extract the activations of layers for a data set, in memory or as safetensors files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar, Unpack, overload

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..errors import ExplanationError, ImageError, LayerError, MethodError, did_you_mean, warn
from ..hooks.manager import HookManager
from ..hooks.model_state import prepared_for_attribution, unwrap
from ..io.atomic_write import save_tensors
from .layer_selection import LayersLike, require_seen, selected
from .model_inputs import ModelCall, first_float, model_calls
from .tables import plural

Labels = Tensor | list[Any] | None
T = TypeVar("T")

_LABELS, _LAYERS, _IS_LAST = "@labels", "saliency.layers", "saliency.is_last"  # names in the files
_SHARD = re.compile(r"shard-\d{5,}\.safetensors")
_SHARD_BYTES = 1 << 28  # without `shard_images`


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
        raise ExplanationError(f"the features in {path} cannot be read: {error}") from error


class _Shard(NamedTuple):
    """One file, and the positions of its rows."""

    path: Path
    start: int
    stop: int

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Read the rows from `start` to before `stop` that are in this file."""
        with _opened(self.path) as file:
            rows: Tensor = file.get_slice(name)[max(start, self.start) - self.start : min(stop, self.stop) - self.start]
        return rows


class Rows:
    """Features of one layer on disk, one row per image. Indexing reads only the requested rows."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, shards: list[_Shard]) -> None:
        self.name = name
        self.shape = shape  # (N, ...)
        self.dtype = dtype
        self._shards = shards

    def __len__(self) -> int:
        """The number of images."""
        return self.shape[0]

    def __getitem__(self, index: Any) -> Tensor:
        """Return rows on the CPU: `rows[3]` (...), `rows[100:200]`, `rows[[5, 2]]` or a mask (n, ...), `rows[:]` all.

        Raises:
            ExplanationError: A file is missing or damaged.
            IndexError: There is no such row.
        """
        if isinstance(index, tuple | bool):
            raise IndexError(f"rows take one index; got {index}")
        positions: Any = range(len(self))[index] if isinstance(index, slice) else np.arange(len(self))[index]
        if isinstance(positions, range) and positions.step == 1:
            return self._read(positions.start, positions.stop)
        if isinstance(positions, range | np.ndarray) and np.ndim(positions):
            return torch.cat([self._read(0, 0), *(self._read(int(at), int(at) + 1) for at in positions)])
        return self._read(int(positions), int(positions) + 1)[0]

    def shards(self) -> Iterator[Tensor]:
        """Yield the rows of one file after the other."""
        for shard in self._shards:
            yield shard.read(self.name, shard.start, shard.stop)

    def _read(self, start: int, stop: int) -> Tensor:
        parts = [s.read(self.name, start, stop) for s in self._shards if start < s.stop and s.start < stop]
        return torch.cat(parts) if parts else torch.empty((0, *self.shape[1:]), dtype=self.dtype, device="cpu")

    def __repr__(self) -> str:
        return f'Rows("{self.name}", shape={self.shape}, dtype={self.dtype}, {plural(len(self._shards), "file")})'


class Features(Mapping[str, T], Generic[T]):
    """Mapping from layers to their features, one row per image: tensors in memory, or `Rows` on disk.

    Attributes:
        images: The number of images.
        labels: (N, ...) or a list, if the data came with labels; else None.
    """

    def __init__(self, layers: Mapping[str, T], images: int, labels: Labels) -> None:
        self._layers = dict(layers)
        self.images = images
        self.labels = labels

    @staticmethod
    def open(folder: str | os.PathLike[str]) -> Features[Rows]:
        """Open the features in a folder. Only headers and labels are read until rows are indexed.

        Raises:
            ExplanationError: The folder holds no features, or a damaged or missing file.

        Warns:
            SaliencyWarning: The run that wrote them was interrupted, and some images of the data are missing.
        """
        folder = Path(folder).absolute()  # also valid after a change of directory
        paths = _shard_paths(folder)
        if not paths:
            raise ExplanationError(f"there are no features in {folder}: it has no shard-00000.safetensors")
        shards: list[_Shard] = []
        heads: list[dict[str, Tensor]] = []  # no rows, but their shape and dtype
        labels: list[Any] = []
        for number, path in enumerate(paths):
            if path.name != f"shard-{number:05d}.safetensors":
                raise ExplanationError(f"shard-{number:05d}.safetensors is missing in {folder}")
            with _opened(path) as file:
                metadata = file.metadata()
                heads.append({name: file.get_slice(name)[:0] for name in json.loads(metadata[_LAYERS])})
                images = file.get_slice(next(iter(heads[0]))).get_shape()[0]
                if _LABELS in metadata:
                    labels += json.loads(metadata[_LABELS])
                elif _LABELS in file.keys():  # noqa: SIM118
                    labels.append(file.get_tensor(_LABELS))
            start = shards[-1].stop if shards else 0
            shards.append(_Shard(path, start, start + images))
        count = shards[-1].stop
        if metadata[_IS_LAST] != "true":
            warn(f"the features in {folder} are of the first {count} images; the run that wrote them was interrupted")
        layers = {name: Rows(name, (count, *head.shape[1:]), head.dtype, shards) for name, head in heads[0].items()}
        return Features(layers, count, _joined([labels] if labels and not isinstance(labels[0], Tensor) else labels))

    def __getitem__(self, layer: str) -> T:
        """Return the features of a layer. Raises LayerError, with the closest names, if there are none."""
        try:
            return self._layers[layer]
        except KeyError:
            hint = did_you_mean(str(layer), self._layers) or f"; they are {', '.join(self._layers)}"
            raise LayerError(f'no features of a layer "{layer}"{hint}') from None

    def __contains__(self, layer: object) -> bool:
        return layer in self._layers

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        """The number of layers."""
        return len(self._layers)

    def __repr__(self) -> str:
        return f"Features({plural(self.images, 'image')}; {', '.join(self._layers)})"


def _shard_paths(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("shard-*") if _SHARD.fullmatch(path.name))


def _joined(labels: list[Any]) -> Labels:
    """The labels of several batches as one."""
    if not labels:
        return None
    return torch.cat(labels) if isinstance(labels[0], Tensor) else [label for batch in labels for label in batch]


class _Writer:
    """Collects the rows of batches, in memory or in a folder of files that are complete or absent.

    Args:
        folder: It is created if missing, and files of an interrupted run are removed; None keeps all rows in memory.
        shard_images: The number of images per file; None fills 256 MiB.

    Raises:
        MethodError: The folder holds complete features, or files of others with the names of ours.
    """

    def __init__(self, folder: Path | None, shard_images: int | None) -> None:
        self._folder = folder
        self._shard_images = shard_images
        self._shards = 0
        self._rows: dict[str, list[Tensor]] = {}
        self._labels: list[Any] = []
        self._images = 0  # that are not written yet
        self._label_kind: str | None = None
        if folder is not None:
            self._prepare(folder)

    def _prepare(self, folder: Path) -> None:
        if folder.exists() and not folder.is_dir():
            raise MethodError(f"features go into a folder, and {folder} is a file")
        folder.mkdir(parents=True, exist_ok=True)
        paths = _shard_paths(folder)
        for path in paths:
            try:
                with _opened(path) as file:
                    state = (file.metadata() or {}).get(_IS_LAST)
            except ExplanationError:
                state = None
            if state is None:
                raise MethodError(f"{folder} holds {path.name}, which is not a file of features; choose another folder")
            if state == "true":
                raise MethodError(f"{folder} holds features already; use Features.open, or choose another folder")
        for path in paths[::-1]:  # what is left is readable at any time
            path.unlink()

    def add(self, rows: Mapping[str, Tensor], labels: Any, batch: int) -> None:
        """Add the rows and labels of one batch.

        Raises:
            ImageError: Labels are missing, or of another kind than before.
            LayerError: The rows of a layer have another shape or dtype than before.
        """
        for name, more in rows.items():
            known = self._rows.setdefault(name, [])
            if known and _kind(known[0]) != _kind(more):
                raise LayerError(
                    f'layer "{name}" gives rows {_kind(more)} in batch {batch}, and before {_kind(known[0])}; let pool '
                    "make them alike"
                )
            known.append(more)
        images = len(next(iter(rows.values())))
        self._add_labels(labels, images, batch)
        self._images += images
        if self._folder is not None:
            row_bytes = sum(more.nbytes // len(more) for more in rows.values())
            size = self._shard_images or max(1, _SHARD_BYTES // max(1, row_bytes))
            while self._images > size:  # the last file is written by `finish`
                self._write(self._folder, size)

    def _add_labels(self, labels: Any, images: int, batch: int) -> None:
        kind = "without labels"
        kept: Labels = None
        if isinstance(labels, Tensor) and labels.dim() and len(labels) == images:
            kind, kept = f"a tensor {_kind(labels)}", labels.detach().cpu().clone()
        elif isinstance(labels, list | tuple) and len(labels) == images and all(map(_is_plain_label, labels)):
            kind, kept = "a list", list(labels)
        if self._label_kind is None and labels is not None and kept is None:
            warn(f"labels ({type(labels).__name__}) are not kept, since there is not one per image")
        if self._label_kind not in (None, kind):
            raise ImageError(f"the labels of batch {batch} are {kind}, and those before {self._label_kind}")
        self._label_kind = kind
        if kept is not None:
            self._labels.append(kept)

    def _write(self, folder: Path, size: int, *, is_last: bool = False) -> None:
        """Write one more file. Raises OSError if that fails."""
        rows = {name: torch.cat(parts) for name, parts in self._rows.items()}
        tensors = {name: whole[:size].contiguous() for name, whole in rows.items()}
        metadata = {_LAYERS: json.dumps(list(rows)), _IS_LAST: "true" if is_last else "false"}
        labels = _joined(self._labels)
        if isinstance(labels, Tensor):
            tensors[_LABELS] = labels[:size].contiguous()
        elif labels is not None:
            metadata[_LABELS] = json.dumps(labels[:size])
        save_tensors(folder / f"shard-{self._shards:05d}.safetensors", tensors, metadata)
        self._shards += 1
        self._images -= size
        self._rows = {name: [whole[size:]] for name, whole in rows.items()}
        self._labels = [] if labels is None else [labels[size:]]

    def finish(self) -> Features[Tensor] | Features[Rows]:
        """Return the features of all batches."""
        if self._folder is not None:
            self._write(self._folder, self._images, is_last=True)
            return Features.open(self._folder)
        rows = {name: torch.cat(parts) for name, parts in self._rows.items()}
        return Features(rows, self._images, _joined(self._labels))


def _is_plain_label(label: object) -> bool:
    return isinstance(label, str | int | float)


def _kind(rows: Tensor) -> str:
    return f"{tuple(rows.shape[1:])} of {str(rows.dtype).removeprefix('torch.')}"


class FeatureOptions(TypedDict, total=False):
    """Options of `extract_features`."""

    shard_images: int | None
    dtype: torch.dtype | None
    pool: Callable[[Tensor], Tensor] | None


@overload
def extract_features(
    model: nn.Module, data: Any, layers: LayersLike, *, out: None = None, **options: Unpack[FeatureOptions]
) -> Features[Tensor]: ...
@overload
def extract_features(
    model: nn.Module, data: Any, layers: LayersLike, *, out: str | os.PathLike[str], **options: Unpack[FeatureOptions]
) -> Features[Rows]: ...
def extract_features(
    model: nn.Module,
    data: Any,
    layers: LayersLike,
    *,
    out: str | os.PathLike[str] | None = None,
    shard_images: int | None = None,
    dtype: torch.dtype | None = None,
    pool: Callable[[Tensor], Tensor] | None = None,
) -> Features[Tensor] | Features[Rows]:
    """Return the outputs of layers, one row per image.

        features = extract_features(model, loader, ["layer3", "layer4"], out="features")
        features["layer4"][100:200]  # reads only these rows from disk
        saliency.inspection.Features.open("features")  # in a later process

    The model runs once over the data, in evaluation mode and without gradients. With `out`, memory holds a few files
    and batches at most. The folder holds plain safetensors files, one tensor per layer.

    Args:
        model: Any module.
        data: A batch (a tensor, images), or any iterable of batches, such as a data loader; labels are kept.
        layers: Names, patterns, modules, classes of modules, or several. Of a layer that is called several times the
            last call counts, of several tensors the first with floating-point numbers.
        out: A folder for the features, created if missing; None keeps them in memory, on the CPU. Files of an
            interrupted run are replaced; complete features are not.
        shard_images: The number of images per file; None fills 256 MiB.
        dtype: The dtype to keep, such as `torch.float16`; None keeps that of the layer.
        pool: A function that is applied to the output of each layer first, such as `lambda maps: maps.mean((2, 3))`. It
            returns one row per image.

    Returns:
        A mapping from layer names to rows (N, ...), with `labels`: tensors, or `Rows` that read from disk.

    Raises:
        ImageError: The data cannot be read or hold no image, or labels are of different kinds.
        LayerError: No such layer; or it was not called, gives no tensor, not one row per image, or rows of another
            shape in a later batch.
        MethodError: An option is invalid, or the folder holds complete features.
        NotApplicableError: A layer is inside TorchScript, where hooks do not act.
        OSError: The folder cannot be written, for example on a full disk. Files that were written before stay complete.
    """
    _check(out, shard_images, dtype, pool)
    network = unwrap(model)
    modules = selected(network, layers)
    require_seen(network, modules)
    reserved = next((name for name in modules if name in (_LABELS, "__metadata__")), None)
    if out is not None and reserved is not None:
        raise LayerError(f'a layer "{reserved}" cannot be written to a file, where that name is reserved')
    writer = _Writer(None if out is None else Path(out), shard_images)
    number = -1
    for number, batch in enumerate(model_calls(model, data)):
        writer.add(_rows_of(network, batch, modules, pool, dtype), batch.labels, number)
    if number < 0:
        raise ImageError("the data hold no image")
    return writer.finish()


def _check(out: Any, shard_images: Any, dtype: Any, pool: Any) -> None:
    if out is not None and (not isinstance(out, str | os.PathLike) or not os.fspath(out)):
        raise MethodError(f"out is a folder for the features, or None for memory; got {out!r}")
    if shard_images is not None and (type(shard_images) is not int or shard_images < 1):
        raise MethodError(f"shard_images is a number of images, 1 or more; got {shard_images!r}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise MethodError(f"dtype is a floating-point type such as torch.float16; got {dtype!r}")
    if pool is not None and not callable(pool):
        raise MethodError(f"pool is a function from a layer's output to rows; got {type(pool).__name__}")


def _rows_of(
    model: nn.Module,
    batch: ModelCall,
    layers: Mapping[str, nn.Module],
    pool: Callable[[Tensor], Tensor] | None,
    dtype: torch.dtype | None,
) -> dict[str, Tensor]:
    """The rows of each layer for one batch."""
    if not batch.size:
        raise ImageError("a batch holds no image")
    outputs: dict[str, Tensor | None] = {}

    def keep(name: str, output: Any) -> None:
        tensor: Any = first_float(output)
        outputs[name] = None
        if tensor is not None:
            tensor = tensor.detach() if pool is None else pool(tensor.detach())
            if not isinstance(tensor, Tensor):
                raise MethodError(f'pool returned {type(tensor).__name__} for layer "{name}"; expected a tensor')
            # A copy: later operations may work in place.
            copied = torch.empty_like(tensor, dtype=dtype, device="cpu", memory_format=torch.contiguous_format)
            outputs[name] = copied.copy_(tensor)

    # Not under inference_mode: tensors that a model caches there have no gradients later.
    with prepared_for_attribution(model), HookManager() as hooks, torch.no_grad():
        for name, layer in layers.items():
            hooks.observe(layer, partial(keep, name))
        batch.run(model)
    return {name: _checked_rows(name, name in outputs, outputs.get(name), batch.size) for name in layers}


def _checked_rows(name: str, is_called: bool, rows: Tensor | None, images: int) -> Tensor:
    if rows is None:
        raise LayerError(f'layer "{name}" {"gives no floating-point tensor" if is_called else "was not called"}')
    if not rows.dim() or len(rows) != images:
        raise LayerError(
            f'layer "{name}" gives {tuple(rows.shape)} for {plural(images, "image")}, not one row for each; let pool '
            "make rows of it"
        )
    return rows
