"""Extract the activations of layers for a data set, in memory or as safetensors files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ImageError, LayerError, MethodError, plural
from ..hooks.manager import HookManager
from ..hooks.model_state import prepared_for_attribution, unwrap
from ..hooks.pytree import tree_tensors
from ..io.atomic_write import save_tensors
from .arguments import LayersLike, ModelCall, model_calls, require_hookable, select_layers

Pool = Callable[[Tensor], Tensor] | None


def extract_features(model: nn.Module, data: Any, layers: LayersLike, *, pool: Pool = None) -> dict[str, Tensor]:
    """Return the outputs of layers, one row per image.

        features = extract_features(model, loader, ["layer3", "layer4"], pool=lambda maps: maps.mean((2, 3)))
        safetensors.torch.save_file(features, "features.safetensors")

    The model runs once over the data, in evaluation mode and without gradients. The features stay in memory; for more
    than fit there, use `save_features`.

    Args:
        model: Any module.
        data: A batch (a tensor, images), or any iterable of batches, such as a data loader. Labels are ignored; the
            rows have the order of the data.
        layers: Names, patterns, modules, classes of modules, or several of these. If a layer is called several times,
            the last call is used. If its output has several tensors, the first floating-point tensor is used.
        pool: A function that is applied to the output of each layer first, such as `lambda maps: maps.mean((2, 3))` or
            `torch.Tensor.half`. It must return one row per image.

    Returns:
        A mapping from layer names to rows (N, ...) on the CPU.

    Raises:
        ImageError: The data cannot be read or contain no image.
        LayerError: A layer does not exist, was not called, or returns no tensor. Or its rows are not one per image, or
            have different shapes in different batches.
        NotApplicableError: A layer is inside TorchScript, where hooks do not run.
    """
    columns: dict[str, list[Tensor]] = {}
    for rows in _batches(model, data, layers, pool):
        for name, part in rows.items():
            columns.setdefault(name, []).append(part)
            _require_same_shape(name, columns[name])
    return {name: torch.cat(parts) for name, parts in columns.items()}


def save_features(
    model: nn.Module, data: Any, layers: LayersLike, folder: str | os.PathLike[str], *, pool: Pool = None
) -> list[Path]:
    """Write the outputs of layers as safetensors files, one for each batch. Memory holds one batch.

        for path in save_features(model, loader, ["layer3", "layer4"], "features"):
            rows = safetensors.torch.load_file(path)  # by layer

    Args:
        model: As for `extract_features`.
        data: As for `extract_features`.
        layers: As for `extract_features`.
        folder: The folder for the files, created if missing. Each file is written atomically.
        pool: As for `extract_features`.

    Returns:
        The paths of the files, shard-00000.safetensors and so on, in the order of the batches.

    Raises:
        MethodError: The folder contains such files.
        OSError: A file cannot be written. Files written before are complete.
        ImageError: As for `extract_features`.
        LayerError: As for `extract_features`.
        NotApplicableError: As for `extract_features`.
    """
    folder = Path(folder)
    if any(folder.glob("shard-*.safetensors")):
        raise MethodError(f"{folder} contains features; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for rows in _batches(model, data, layers, pool):
        paths.append(folder / f"shard-{len(paths):05d}.safetensors")
        save_tensors(paths[-1], rows, None)
    return paths


def _batches(model: nn.Module, data: Any, layers: LayersLike, pool: Pool) -> Iterator[dict[str, Tensor]]:
    """Yield the rows of each layer, batch by batch."""
    network = unwrap(model)
    modules = select_layers(network, layers)
    require_hookable(network, modules)
    batch = None
    for batch in model_calls(model, data):
        yield _rows_of(network, batch, modules, pool)
    if batch is None:
        raise ImageError("the data contain no image")


def _rows_of(model: nn.Module, batch: ModelCall, layers: Mapping[str, nn.Module], pool: Pool) -> dict[str, Tensor]:
    """Return the rows of each layer for one batch."""
    if not batch.size:
        raise ImageError("a batch contains no image")
    outputs: dict[str, Tensor | None] = {}

    def keep(name: str, output: Any) -> None:
        tensor = next((tensor for tensor in tree_tensors(output) if tensor.is_floating_point()), None)
        outputs[name] = None
        if tensor is not None:
            tensor = tensor.detach() if pool is None else pool(tensor.detach())
            # Copy: later operations may change the tensor in place.
            outputs[name] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)

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


def _require_same_shape(name: str, parts: list[Tensor]) -> None:
    last, first = tuple(parts[-1].shape[1:]), tuple(parts[0].shape[1:])
    if last != first:
        shapes = f"{last} in batch {len(parts) - 1}, but {first} in earlier batches"
        raise LayerError(f'layer "{name}" returns rows {shapes}; use pool to make them equal')
