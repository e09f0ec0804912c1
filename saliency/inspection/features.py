"""Extract the activations of layers for a data set, in memory or as safetensors files."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypedDict, TypeVar, Unpack, overload

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..errors import ExplanationError, ImageError, LayerError, MethodError, did_you_mean, plural, warn
from ..hooks.manager import HookManager
from ..hooks.model_state import prepared_for_attribution, unwrap
from ..io.atomic_write import save_tensors
from ..validation import check_integer
from .arguments import LayersLike, ModelCall, first_float, model_calls, require_hookable, select_layers

Labels = Tensor | list[Any]
Pool = Callable[[Tensor], Tensor] | None
T = TypeVar("T")

_LABELS, _LAYERS, _IS_LAST = "@labels", "saliency.layers", "saliency.is_last"  # reserved names in the files
_SHARD_BYTES = 1 << 28  # size of a file if `shard_images` is None


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
        raise ExplanationError(f"the features in {path} cannot be read: {error}") from error


class Rows:
    """Features of one layer on disk, one row per image. Indexing reads only the requested rows."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, shards: list[tuple[Path, range]]) -> None:
        self.name = name
        self.shape = shape  # (N, ...)
        self.dtype = dtype
        self._shards = shards  # files with the positions of their rows

    def __len__(self) -> int:
        """The number of images."""
        return self.shape[0]

    def __getitem__(self, index: Any) -> Tensor:
        """Return rows on the CPU: one row (...) for an integer, or rows (n, ...) for a slice, a list or a Boolean mask.

        Raises:
            ExplanationError: A file is missing or damaged.
            IndexError: There is no such row.
        """
        if isinstance(index, tuple | bool):
            raise IndexError(f"expected one index for the rows; got {index}")
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


class Features(dict[str, T], Generic[T]):
    """Mapping from layers to their features, one row per image: tensors in memory, or `Rows` on disk.

    Attributes:
        images: The number of images.
        labels: (N, ...) or a list, if the data came with labels; else None.
    """

    def __init__(self, layers: Mapping[str, T], images: int, labels: Labels) -> None:
        super().__init__(layers)
        self.images = images
        self.labels = labels if len(labels) else None

    @staticmethod
    def open(folder: str | os.PathLike[str]) -> Features[Rows]:
        """Open the features in a folder. Only headers and labels are read until rows are indexed.

        Raises:
            ExplanationError: The folder contains no features, or a file is damaged or missing.

        Warns:
            SaliencyWarning: The run that wrote the features was interrupted, so some images of the data are missing.
        """
        folder = Path(folder).absolute()  # also valid after a change of directory
        paths = sorted(folder.glob("shard-*.safetensors"))
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

    def __missing__(self, layer: str) -> T:
        """Raise LayerError for a layer without features; the message lists the closest names."""
        hint = did_you_mean(str(layer), self) or f"; the layers are {', '.join(self)}"
        raise LayerError(f'no features of a layer "{layer}"{hint}')

    def __repr__(self) -> str:
        return f"Features({plural(self.images, 'image')}; {', '.join(self)})"


def _joined(parts: list[Any]) -> Any:
    """Concatenate the rows or labels of several batches."""
    if parts and isinstance(parts[0], Tensor):
        return torch.cat(parts)
    return [label for part in parts for label in part]


def _empty_folder(folder: Path) -> None:
    """Create a folder, or remove the files of an interrupted run.

    Raises:
        MethodError: The folder contains complete features, or other files with the same names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = sorted(folder.glob("shard-*.safetensors"))
    for path in paths:
        state = None
        with suppress(ExplanationError), _opened(path) as file:
            state = (file.metadata() or {}).get(_IS_LAST)
        if state != "false":
            content = "is not a features file" if state is None else "belongs to complete features"
            raise MethodError(f"{folder} contains {path.name}, which {content}; choose another folder")
    for path in paths[::-1]:  # last first, so that the remaining files are readable at any time
        path.unlink()


_Columns = dict[str, Any]  # rows by layer, and the labels


def _regrouped(batches: Iterable[tuple[dict[str, Tensor], Any]], size: int | None) -> Iterator[tuple[_Columns, bool]]:
    """Yield the rows and labels of the images in groups of `size`, and whether the group is the last.

    Args:
        batches: The rows by layer and the labels of each batch.
        size: The number of images of a group; None for about 256 MiB of rows.

    Raises:
        ImageError: There is no batch, or labels are missing or of a different kind than in earlier batches.
        LayerError: The rows of a layer have a different shape or dtype than in earlier batches.
    """
    held: dict[str, list[Any]] = {}  # one part per batch
    images = 0
    for number, (rows, labels) in enumerate(batches):
        count = len(next(iter(rows.values())))
        kept = _labels_per_image(labels, count)
        if not len(kept) and labels is not None and not number:
            warn(f"labels ({type(labels).__name__}) are not kept: expected one label per image")
        for name, part in {**rows, _LABELS: kept}.items():
            held.setdefault(name, []).append(part)
            _require_same_kind(name, _kind(part), _kind(held[name][0]), number)
        images += count
        size = size or max(1, _SHARD_BYTES * count // max(1, sum(part.nbytes for part in rows.values())))
        while images > size:  # the last group follows below
            whole = {name: _joined(parts) for name, parts in held.items()}
            held = {name: [column[size:]] for name, column in whole.items()}
            images -= size
            yield {name: column[:size] for name, column in whole.items()}, False
    if not held:
        raise ImageError("the data contain no image")
    yield {name: _joined(parts) for name, parts in held.items()}, True


def _require_same_kind(name: str, kind: str, earlier: str, batch: int) -> None:
    kinds = f"{kind} in batch {batch}, but {earlier} in earlier batches"
    if kind != earlier and name == _LABELS:
        raise ImageError(f"the labels are {kinds}")
    if kind != earlier:
        raise LayerError(f'layer "{name}" returns rows {kinds}; use pool to make them equal')


def _write(path: Path, columns: _Columns, *, is_last: bool) -> None:
    """Write one file. Raises OSError if that fails."""
    metadata = {_LAYERS: json.dumps([name for name in columns if name != _LABELS])}
    metadata[_IS_LAST] = "true" if is_last else "false"
    if isinstance(columns[_LABELS], list):
        metadata[_LABELS] = json.dumps(columns[_LABELS])
    tensors = {name: column.contiguous() for name, column in columns.items() if isinstance(column, Tensor)}
    save_tensors(path, tensors, metadata)


def _labels_per_image(labels: Any, images: int) -> Labels:
    """Return the labels as a tensor on the CPU or as a list, which is empty if there is not one label per image."""
    if isinstance(labels, Tensor) and labels.dim() and len(labels) == images:
        return labels.detach().cpu().clone()
    is_list = isinstance(labels, list | tuple) and len(labels) == images
    return list(labels) if is_list and all(isinstance(label, str | int | float) for label in labels) else []


def _kind(column: Labels) -> str:
    if isinstance(column, Tensor):
        return f"{tuple(column.shape[1:])} of {str(column.dtype).removeprefix('torch.')}"
    return "a list" if column else "missing"


class FeatureOptions(TypedDict, total=False):
    """Options of `extract_features`."""

    shard_images: int | None
    dtype: torch.dtype | None
    pool: Pool


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
    pool: Pool = None,
) -> Features[Any]:
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
        LayerError: A layer does not exist, was not called, or returns no tensor. Or its rows are not one per image, or
            have different shapes in different batches.
        MethodError: An option is invalid, or the folder contains complete features.
        NotApplicableError: A layer is inside TorchScript, where hooks do not run.
        OSError: A file cannot be written, for example on a full disk. Files written before are complete.
    """
    if shard_images is not None:
        check_integer("shard_images", shard_images)
    given: object = dtype
    if given is not None and not (isinstance(given, torch.dtype) and given.is_floating_point):
        raise MethodError(f"dtype={dtype!r}: expected a floating-point type such as torch.float16")
    network = unwrap(model)
    modules = select_layers(network, layers)
    require_hookable(network, modules)
    calls = model_calls(model, data)
    batches = ((_rows_of(network, batch, modules, pool, dtype), batch.labels) for batch in calls)
    if out is None:
        columns, _ = next(_regrouped(batches, sys.maxsize))
        labels = columns.pop(_LABELS)
        return Features(columns, len(next(iter(columns.values()))), labels)
    _empty_folder(Path(out))
    for number, (columns, is_last) in enumerate(_regrouped(batches, shard_images)):
        _write(Path(out, f"shard-{number:05d}.safetensors"), columns, is_last=is_last)
    return Features.open(out)


def _rows_of(
    model: nn.Module, batch: ModelCall, layers: Mapping[str, nn.Module], pool: Pool, dtype: torch.dtype | None
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
