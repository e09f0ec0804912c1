"""Extract the activations of layers for a data set, in memory or as safetensors files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypedDict, TypeVar, Unpack, overload

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..errors import ExplanationError, ImageError, LayerError, MethodError, did_you_mean, warn
from ..hooks.manager import HookManager
from ..hooks.model_state import prepared_for_attribution, unwrap
from ..io.atomic_write import save_tensors
from ..validation import check_integer
from .arguments import LayersLike, ModelCall, first_float, model_calls, require_seen, selected
from .tables import plural

Labels = Tensor | list[Any] | None
T = TypeVar("T")

_LABELS, _LAYERS, _IS_LAST = "@labels", "saliency.layers", "saliency.is_last"  # reserved names in the files
_SHARD = re.compile(r"shard-\d{5,}\.safetensors")
_SHARD_BYTES = 1 << 28  # size of a file if `shard_images` is None


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
        raise ExplanationError(f"the features in {path} cannot be read: {error}") from error


class Rows:
    """Features of one layer on disk, one row per image. Indexing reads only the files and spans with requested rows."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, shards: list[tuple[Path, range]]) -> None:
        self.name = name
        self.shape = shape  # (N, ...)
        self.dtype = dtype
        self._shards = shards  # files with the positions of their rows

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
        positions = np.arange(len(self))[index]
        wanted = np.atleast_1d(positions)
        rows = torch.empty((len(wanted), *self.shape[1:]), dtype=self.dtype, device="cpu")
        for path, held in self._shards:
            (places,) = np.nonzero((wanted >= held.start) & (wanted < held.stop))
            if places.size:
                local = torch.from_numpy(wanted[places] - held.start)
                first, last = int(local.min()), int(local.max())
                with _opened(path) as file:
                    rows[torch.from_numpy(places)] = file.get_slice(self.name)[first : last + 1][local - first]
        return rows if np.ndim(positions) else rows[0]

    def shards(self) -> Iterator[Tensor]:
        """Yield the rows file by file."""
        for _, held in self._shards:
            yield self[held.start : held.stop]

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
            ExplanationError: The folder contains no features, or a file is damaged or missing.

        Warns:
            SaliencyWarning: The run that wrote the features was interrupted, so some images of the data are missing.
        """
        folder = Path(folder).absolute()  # also valid after a change of directory
        paths = _shard_paths(folder)
        if not paths:
            raise ExplanationError(f"there are no features in {folder}: it has no shard-00000.safetensors")
        shards: list[tuple[Path, range]] = []
        labels: list[Any] = []
        count = 0
        for number, path in enumerate(paths):
            if path.name != f"shard-{number:05d}.safetensors":
                raise ExplanationError(f"shard-{number:05d}.safetensors is missing in {folder}")
            with _opened(path) as file:
                metadata = file.metadata()
                # Empty tensors with the shape and dtype of rows.
                heads = {name: file.get_slice(name)[:0] for name in json.loads(metadata[_LAYERS])}
                images = file.get_slice(next(iter(heads))).get_shape()[0]
                if _LABELS in metadata:
                    labels.append(json.loads(metadata[_LABELS]))
                elif _LABELS in file.keys():  # noqa: SIM118
                    labels.append(file.get_tensor(_LABELS))
            shards.append((path, range(count, count + images)))
            count += images
        if metadata[_IS_LAST] != "true":
            warn(f"{folder} has only the first {count} images; the run that wrote them was interrupted")
        layers = {name: Rows(name, (count, *head.shape[1:]), head.dtype, shards) for name, head in heads.items()}
        return Features(layers, count, _joined(labels))

    def __getitem__(self, layer: str) -> T:
        """Return the features of a layer. Raises LayerError, with the closest names, if there are none."""
        if layer not in self._layers:
            hint = did_you_mean(str(layer), self._layers) or f"; they are {', '.join(self._layers)}"
            raise LayerError(f'no features of a layer "{layer}"{hint}')
        return self._layers[layer]

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
    """Concatenate the labels of several batches."""
    if not labels:
        return None
    return torch.cat(labels) if isinstance(labels[0], Tensor) else [label for batch in labels for label in batch]


class _Writer:
    """Collects the rows of batches in memory, or in a folder of files that are written atomically.

    Args:
        folder: Folder for the files, created if missing. Files of an interrupted run are removed. None keeps the rows
            in memory.
        shard_images: The number of images per file; None for files of about 256 MiB.

    Raises:
        MethodError: The folder contains complete features, or other files with the same names.
    """

    def __init__(self, folder: Path | None, shard_images: int | None) -> None:
        self._folder = folder
        self._shard_images = shard_images
        self._shards = 0
        self._rows: dict[str, list[Tensor]] = {}
        self._labels: list[Any] = []
        self._images = 0  # number of images that are not written yet
        self._label_kind: str | None = None
        if folder is not None:
            self._prepare(folder)

    def _prepare(self, folder: Path) -> None:
        if folder.exists() and not folder.is_dir():
            raise MethodError(f"expected a folder for the features; {folder} is a file")
        folder.mkdir(parents=True, exist_ok=True)
        paths = _shard_paths(folder)
        for path in paths:
            state = None
            with suppress(ExplanationError), _opened(path) as file:
                state = (file.metadata() or {}).get(_IS_LAST)
            if state is None:
                raise MethodError(f"{folder} contains {path.name}, which is not a features file; choose another folder")
            if state == "true":
                raise MethodError(f"{folder} already contains features; use Features.open, or choose another folder")
        for path in paths[::-1]:  # last first, so that the remaining files are readable at any time
            path.unlink()

    def add(self, rows: Mapping[str, Tensor], labels: Any, batch: int) -> None:
        """Add the rows and labels of one batch.

        Raises:
            ImageError: Labels are missing, or of a different kind than in earlier batches.
            LayerError: The rows of a layer have a different shape or dtype than in earlier batches.
        """
        for name, more in rows.items():
            known = self._rows.setdefault(name, [])
            if known and _kind(known[0]) != _kind(more):
                kinds = f"rows {_kind(more)} in batch {batch}, but {_kind(known[0])} before"
                raise LayerError(f'layer "{name}" returns {kinds}; use pool to make them equal')
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
        is_sequence = isinstance(labels, list | tuple) or (isinstance(labels, Tensor) and labels.dim() > 0)
        fits = is_sequence and len(labels) == images
        if fits and isinstance(labels, Tensor):
            kind, labels = f"a tensor {_kind(labels)}", labels.detach().cpu().clone()
        elif fits and all(isinstance(label, str | int | float) for label in labels):
            kind, labels = "a list", list(labels)
        elif labels is not None and self._label_kind is None:
            warn(f"labels ({type(labels).__name__}) are not kept: expected one label per image")
        if self._label_kind not in (None, kind):
            raise ImageError(f"the labels of batch {batch} are {kind}; those of earlier batches are {self._label_kind}")
        self._label_kind = kind
        if kind != "without labels":
            self._labels.append(labels)

    def _write(self, folder: Path, size: int, *, is_last: bool = False) -> None:
        """Write the next file with `size` images. Raises OSError if that fails."""
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

    The model runs once over the data, in evaluation mode and without gradients. With `out`, memory use is limited to a
    few files and batches. The files are plain safetensors files with one tensor per layer.

    Args:
        model: Any module.
        data: A batch (a tensor, images), or any iterable of batches, such as a data loader; labels are kept.
        layers: Names, patterns, modules, classes of modules, or several of these. If a layer is called several times,
            the last call is used. If its output has several tensors, the first floating-point tensor is used.
        out: A folder for the features, created if missing; None keeps them in memory, on the CPU. Files of an
            interrupted run are replaced; complete features are not.
        shard_images: The number of images per file; None for files of about 256 MiB.
        dtype: The dtype of the features, such as `torch.float16`; None for that of the layer.
        pool: A function that is applied to the output of each layer first, such as `lambda maps: maps.mean((2, 3))`. It
            must return one row per image.

    Returns:
        A mapping from layer names to rows (N, ...), with `labels`: tensors, or `Rows` that read from disk.

    Raises:
        ImageError: The data cannot be read or contain no image, or labels are of different kinds.
        LayerError: A layer does not exist, was not called, returns no tensor or not one row per image, or returns rows
            of a different shape in a later batch.
        MethodError: An option is invalid, or the folder contains complete features.
        NotApplicableError: A layer is inside TorchScript, where hooks do not run.
        OSError: A file cannot be written, for example on a full disk. Files written before are complete.
    """
    folder: object = out
    if folder is not None and (not isinstance(folder, str | os.PathLike) or not os.fspath(folder)):
        raise MethodError(f"out={out!r}: expected a folder for the features, or None for memory")
    if shard_images is not None:
        check_integer("shard_images", shard_images)
    given: object = dtype
    if given is not None and not (isinstance(given, torch.dtype) and given.is_floating_point):
        raise MethodError(f"dtype={dtype!r}: expected a floating-point type such as torch.float16")
    if pool is not None and not callable(pool):
        raise MethodError(f"pool: expected a function from a layer's output to rows; got {type(pool).__name__}")
    network = unwrap(model)
    modules = selected(network, layers)
    require_seen(network, modules)
    reserved = next((name for name in modules if name in (_LABELS, "__metadata__")), None)
    if out is not None and reserved is not None:
        raise LayerError(f'a layer "{reserved}" cannot be written to a file: the name is reserved there')
    writer = _Writer(None if out is None else Path(out), shard_images)
    number = -1
    for number, batch in enumerate(model_calls(model, data)):
        writer.add(_rows_of(network, batch, modules, pool, dtype), batch.labels, number)
    if number < 0:
        raise ImageError("the data contain no image")
    return writer.finish()


def _rows_of(
    model: nn.Module,
    batch: ModelCall,
    layers: Mapping[str, nn.Module],
    pool: Callable[[Tensor], Tensor] | None,
    dtype: torch.dtype | None,
) -> dict[str, Tensor]:
    """Return the rows of each layer for one batch."""
    if not batch.size:
        raise ImageError("a batch contains no image")
    outputs: dict[str, Tensor | None] = {}

    def keep(name: str, output: Any) -> None:
        tensor: Any = first_float(output)
        outputs[name] = None
        if tensor is not None:
            tensor = tensor.detach() if pool is None else pool(tensor.detach())
            if not isinstance(tensor, Tensor):
                raise MethodError(f'pool returned {type(tensor).__name__} for layer "{name}"; expected a tensor')
            # Copy: later operations may change the tensor in place.
            copied = torch.empty_like(tensor, dtype=dtype, device="cpu", memory_format=torch.contiguous_format)
            outputs[name] = copied.copy_(tensor)

    # no_grad rather than inference_mode: tensors that a model caches must support gradients later.
    with prepared_for_attribution(model), HookManager() as hooks, torch.no_grad():
        for name, layer in layers.items():
            hooks.observe(layer, partial(keep, name))
        batch.run(model)
    rows: dict[str, Tensor] = {}
    for name in layers:
        output = outputs.get(name)
        if output is None:
            reason = "returns no floating-point tensor" if name in outputs else "was not called"
            raise LayerError(f'layer "{name}" {reason}')
        if not output.dim() or len(output) != batch.size:
            got = f"{tuple(output.shape)} for {plural(batch.size, 'image')}"
            raise LayerError(f'layer "{name}" returns {got}, not one row per image; use pool to create rows')
        rows[name] = output
    return rows
