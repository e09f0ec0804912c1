"""Extract the activations of layers for a data set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ImageError, LayerError, did_you_mean, plural, warn
from ..hooks.manager import HookManager
from ..hooks.model_state import prepared_for_attribution, unwrap
from .arguments import LayersLike, ModelCall, first_float, model_calls, require_hookable, select_layers

Labels = Tensor | list[Any]
Pool = Callable[[Tensor], Tensor] | None


class Features(dict[str, Tensor]):
    """Mapping from layers to their features (N, ...), one row per image, on the CPU.

    Attributes:
        images: The number of images, N.
        labels: (N, ...) or a list, if the data came with labels; else None.
    """

    images: int
    labels: Labels | None

    def __missing__(self, layer: str) -> Tensor:
        """Raise LayerError for a layer without features; the message lists the closest names."""
        hint = did_you_mean(str(layer), self) or f"; the layers are {', '.join(self)}"
        raise LayerError(f'no features of a layer "{layer}"{hint}')

    def __repr__(self) -> str:
        return f"Features({plural(self.images, 'image')}; {', '.join(self)})"


def extract_features(model: nn.Module, data: Any, layers: LayersLike, *, pool: Pool = None) -> Features:
    """Return the outputs of layers, one row per image.

        features = extract_features(model, loader, ["layer3", "layer4"], pool=lambda maps: maps.mean((2, 3)))
        safetensors.torch.save_file(features, "features.safetensors")

    The model runs once over the data, in evaluation mode and without gradients. The features stay in memory; for more
    than fit there, call it for each batch and write one file each.

    Args:
        model: Any module.
        data: A batch (a tensor, images), or any iterable of batches, such as a data loader; labels are kept.
        layers: Names, patterns, modules, classes of modules, or several of these. If a layer is called several times,
            the last call is used. If its output has several tensors, the first floating-point tensor is used.
        pool: A function that is applied to the output of each layer first, such as `lambda maps: maps.mean((2, 3))` or
            `torch.Tensor.half`. It must return one row per image.

    Returns:
        A mapping from layer names to rows (N, ...), with `labels`.

    Raises:
        ImageError: The data cannot be read or contain no image.
        LayerError: A layer does not exist, was not called, or returns no tensor. Or its rows are not one per image, or
            have different shapes in different batches.
        NotApplicableError: A layer is inside TorchScript, where hooks do not run.

    Warns:
        SaliencyWarning: The labels are not one per image, so they are not kept.
    """
    network = unwrap(model)
    modules = select_layers(network, layers)
    require_hookable(network, modules)
    columns: dict[str, list[Tensor]] = {name: [] for name in modules}
    labels: list[Labels | None] = []
    for batch in model_calls(model, data):
        for name, rows in _rows_of(network, batch, modules, pool).items():
            columns[name].append(rows)
            _require_same_shape(name, columns[name])
        labels.append(_labels_per_image(batch))
    if not labels:
        raise ImageError("the data contain no image")
    features = Features({name: torch.cat(parts) for name, parts in columns.items()})
    features.images, features.labels = len(next(iter(features.values()))), _joined(labels)
    return features


def _rows_of(model: nn.Module, batch: ModelCall, layers: Mapping[str, nn.Module], pool: Pool) -> dict[str, Tensor]:
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


def _labels_per_image(batch: ModelCall) -> Labels | None:
    """Return the labels as a tensor on the CPU or as a list; None without labels, or with a warning for others."""
    labels = batch.labels
    if isinstance(labels, Tensor) and labels.dim() and len(labels) == batch.size:
        return labels.detach().cpu().clone()
    is_list = isinstance(labels, list | tuple) and len(labels) == batch.size
    if is_list and all(isinstance(label, str | int | float) for label in labels):
        return list(labels)
    if labels is not None:
        warn(f"labels ({type(labels).__name__}) are not kept: expected one label per image")
    return None


def _joined(labels: list[Any]) -> Labels | None:
    """Return the labels of all batches; None if a batch has none."""
    if any(part is None for part in labels):
        return None
    return torch.cat(labels) if isinstance(labels[0], Tensor) else [label for part in labels for label in part]
