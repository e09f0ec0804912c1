"""Activations of layers for a data set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ImageError, LayerError, plural
from ..hooks.manager import HookManager
from ..hooks.pytree import tree_tensors
from ..model.call import prepared_for_attribution, unwrap
from .arguments import LayersLike, ModelCall, model_calls, require_hookable, select_layers

Pool = Callable[[Tensor], Tensor] | None


def activations(model: nn.Module, data: Any, layers: LayersLike, *, pool: Pool = None) -> dict[str, Tensor]:
    """Return the outputs of layers, one row per image.

        rows = activations(model, loader, ["layer3", "layer4"], pool=lambda maps: maps.mean((2, 3)))
        safetensors.torch.save_file(rows, "features.safetensors")

    The model runs once over the data, in evaluation mode and without gradients. The rows stay in memory; if they do not
    fit, compute and save one batch of the loader after another.

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
    network = unwrap(model)
    modules = select_layers(network, layers)
    require_hookable(network, modules)
    columns: dict[str, list[Tensor]] = {name: [] for name in modules}
    for batch in model_calls(model, data):
        for name, part in _rows_of(network, batch, modules, pool).items():
            columns[name].append(part)
            _require_same_shape(name, columns[name])
    if not all(columns.values()):
        raise ImageError("the data contain no image")
    return {name: torch.cat(parts) for name, parts in columns.items()}


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
