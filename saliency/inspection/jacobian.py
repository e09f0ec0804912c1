"""Vector-Jacobian products of the model's output with respect to a layer's output or the input."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ImageError, LayerError, NotApplicableError, TargetError
from ..hooks.manager import HookManager
from ..hooks.model_state import categories_of, leaf, prepared_for_attribution, unwrap
from ..hooks.pytree import tree_map_tensors
from ..hooks.rectifiers import differentiate
from ..layers.find import find
from ..targets.targets import Categories, class_index, output_tensor, per_image, require_class
from .arguments import first_float, model_call, require_hookable


def vector_jacobian_product(model: nn.Module, x: Any, vector: Any, layer: str | nn.Module | None = None) -> Tensor:
    """Return J^T v: the gradient of the model's output, weighted by a vector, at a layer's output or at the input.

    J is the Jacobian of the model's output with respect to the layer's output or the input, at x, in evaluation mode.
    The product requires one forward pass and one backward pass down to the layer.

    Args:
        model: Any module. If its output is not a tensor, `.logits`, `["out"]` or the only tensor is used.
        x: A batch, images, a tuple of arguments or a mapping of keyword arguments. It is not changed.
        vector: A tensor in the shape of the model's output; or a class index or name, or one per image, for a vector of
            1 at the class and 0 elsewhere.
        layer: A name or a module; None for the input. If the input or the layer's output has several tensors, the first
            floating-point tensor is used. If the layer is called several times, the last call is used.

    Returns:
        The product, in the shape of the layer's output or of the input. Its units are units of the model's output per
        unit of that tensor.

    Raises:
        ImageError: x cannot be read, or contains no floating-point tensor.
        LayerError: The layer does not exist, was not called, or returns no floating-point tensor.
        NotApplicableError: The layer is inside TorchScript, or no differentiable operation connects it to the output.
        TargetError: The vector does not fit the model's output.
    """
    network = unwrap(model)
    call = model_call(model, x)
    starts: list[Tensor | None] = []  # one per call of the layer

    def start_at(tree: Any) -> Any:
        first = first_float(tree)
        starts.append(None if first is None else leaf(first))
        # Continue with a copy: later operations may change it in place.
        return tree_map_tensors(tree, lambda tensor: starts[-1].clone() if tensor is first else tensor)  # type: ignore[union-attr]

    with prepared_for_attribution(network), HookManager() as hooks:
        name, module = ("", None) if layer is None else find(network, layer)
        if module is None:
            args, kwargs = start_at(call[:2])
            call = call._replace(args=args, kwargs=kwargs)
            if starts[-1] is None:
                raise ImageError("the input contains no floating-point tensor, so there is no derivative")
        else:
            require_hookable(network, {name: module})
            hooks.observe(module, start_at)
        output = output_tensor(call.run(network))
        if not starts:
            raise LayerError(f'layer "{name}" was not called, so the output does not depend on it')
        if starts[-1] is None:
            raise LayerError(f'layer "{name}" returns no floating-point tensor, so there is no derivative')
        if not (output.is_floating_point() or output.is_complex()):
            raise NotApplicableError("the model returns integers, which have no derivative")
        weights = _vector(vector, output, categories_of(model))
        (gradient,) = differentiate(output, [starts[-1]], weights) if output.requires_grad else (None,)
    if gradient is None:
        raise NotApplicableError("no differentiable operation connects the input, or layer, to the model's output")
    return gradient


def _vector(vector: Any, output: Tensor, categories: Categories) -> Tensor:
    """Return the weights of the output: the given vector, or 1 at the class of each image."""
    shape = tuple(output.shape)
    if isinstance(vector, Tensor) and vector.shape == output.shape and not vector.is_complex():
        return vector.detach().to(output, copy=True)
    if isinstance(vector, Tensor) and (vector.is_floating_point() or vector.is_complex()):
        raise TargetError(f"expected a vector in the shape of the model's output, {shape}; got {tuple(vector.shape)}")
    if output.dim() != 2:
        raise TargetError(f"classes require an output of shape (N, classes), got {shape}; pass a vector of this shape")
    indices = [class_index(label, categories) for label in per_image(vector, len(output))]
    require_class(max(indices, default=0), shape[1])
    return F.one_hot(torch.tensor(indices, device=output.device), shape[1]).to(output)
