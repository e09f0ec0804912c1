"""Activations of named layers for a batch or a whole data loader, in memory or on disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn

from ...errors import ImageError, LayerError, MethodError
from ...hooks.manager import HookManager
from ...hooks.model_state import prepared_for_attribution, unwrap
from ...hooks.pytree import tree_tensors
from ..feature_store import RESERVED, Features, Rows
from ..feature_writer import Sink, Store
from ..layer_selection import LayersLike, require_seen, selected
from ..model_inputs import Feed, called, feeds


@overload
def extract_features(
    model: nn.Module,
    data: Any,
    layers: LayersLike,
    *,
    out: None = None,
    shard_images: int | None = None,
    dtype: torch.dtype | None = None,
    pool: Callable[[Tensor], Tensor] | None = None,
) -> Features[Tensor]: ...


@overload
def extract_features(
    model: nn.Module,
    data: Any,
    layers: LayersLike,
    *,
    out: str | os.PathLike[str],
    shard_images: int | None = None,
    dtype: torch.dtype | None = None,
    pool: Callable[[Tensor], Tensor] | None = None,
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
    """What some layers give for each image, one row for each.

        features = extract_features(model, loader, ["layer3", "layer4"], out="features")
        features["layer4"][100:200]  # read from disk, these rows only
        saliency.inspection.Features.open("features")  # another day

    The model is run in evaluation mode, without gradients, once over the data. With `out`, memory holds a few files and
    batches at most, however long the data is.

    Args:
        model: Any module.
        data: A batch as for `feed` (a tensor, pictures), or any iterable of batches, such as a data loader; labels that
            come along are kept.
        layers: Names, patterns, modules, classes of modules, or several. Of a layer that is called several times it is
            the last call, of several tensors the first with floating-point numbers.
        out: A folder for the features, made where it is missing; None keeps them in memory, on the CPU. What an
            interrupted run left there is replaced; finished features are not.
        shard_images: How many images go into one file; None takes as many as fill 256 MiB.
        dtype: The type to keep, such as `torch.float16`; None keeps that of the layer.
        pool: A function that is applied to each layer's output first, such as `lambda maps: maps.mean((2, 3))`. What
            it returns has one row for each image.

    Returns:
        A mapping from the layers' names to rows (N, ...), with `labels`: tensors, or `Rows` that read from disk.

    Raises:
        ImageError: The data cannot be read, or holds no image; or its labels are of different kinds.
        LayerError: No such layer; or it was not called, or gives no tensor, or not one row for each image, or rows of
            another shape in a later batch.
        MethodError: An option is not what it should be, or the folder holds finished features already.
        NotApplicableError: A layer is inside TorchScript, where no hook sees it.
        OSError: The folder cannot be written to, such as on a full disk. What was written before stays whole.
    """
    _check(out, shard_images, dtype, pool)
    network = unwrap(model)
    watched = selected(network, layers)
    require_seen(network, watched)
    taken = next((each for each in watched if each in RESERVED), None)
    if out is not None and taken is not None:
        raise LayerError(f'a layer "{taken}" cannot be written to a file, where the name means something else')
    sink = Sink(None if out is None else Store(Path(out), shard_images))
    count = -1
    for count, each in enumerate(feeds(model, data)):
        rows = _rows_of(network, each, watched, lambda tensor: tensor if pool is None else pool(tensor), dtype)
        sink.take(rows, each.labels, count)
    if count < 0:
        raise ImageError("the data holds no image")
    return sink.finish()


def _check(out: Any, shard_images: Any, dtype: Any, pool: Any) -> None:
    """Raise MethodError for an option that is not what it should be."""
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
    batch: Feed,
    layers: dict[str, nn.Module],
    pool: Callable[[Tensor], Tensor],
    dtype: torch.dtype | None,
) -> dict[str, Tensor]:
    """The rows of each layer for one batch."""
    if not batch.size:
        raise ImageError("a batch holds no image")
    found: dict[str, Tensor | None] = {}

    def keeper(name: str) -> Callable[[Any], None]:
        def keep(output: Any) -> None:
            tensor = _first_number(output)
            # A copy: what follows may work in place.
            found[name] = None if tensor is None else _copied(pool(tensor.detach()), name, dtype)

        return keep

    # Not under inference_mode: what a model caches there could never be trained on again.
    with prepared_for_attribution(model), HookManager() as hooks, torch.no_grad():
        for name, layer in layers.items():
            hooks.observe(layer, keeper(name))
        called(model, batch)
    rows: dict[str, Tensor] = {}
    for name in layers:
        tensor = found.get(name)
        if name not in found:
            raise LayerError(f'layer "{name}" was not called')
        if tensor is None:
            raise LayerError(f'layer "{name}" gives no floating-point tensor')
        if not tensor.dim() or len(tensor) != batch.size:
            raise LayerError(
                f'layer "{name}" gives {tuple(tensor.shape)} for {batch.size} image{"s" * (batch.size != 1)}, not one '
                "row for each; let pool make rows of it"
            )
        rows[name] = tensor
    return rows


def _copied(tensor: Any, name: str, dtype: torch.dtype | None) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise MethodError(f'pool returned {type(tensor).__name__} for layer "{name}"; expected a tensor')
    return torch.empty_like(tensor, dtype=dtype, device="cpu", memory_format=torch.contiguous_format).copy_(tensor)


def _first_number(output: Any) -> Tensor | None:
    return next((each for each in tree_tensors(output) if each.is_floating_point()), None)
