"""Products of a Jacobian with a vector: how a layer's output moves the model's output, and back. On `torch.func`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import ImageError, LayerError, NotApplicableError, TargetError
from ..hooks.autograd_graph import attention_by_formula, load_forward_derivatives
from ..hooks.manager import HookManager
from ..hooks.model_state import prepared_for_attribution, unwrap
from ..hooks.pytree import tree_map_tensors, tree_tensors
from ..layers.find import find
from ..targets.class_names import Categories, class_index, output_tensor, per_image
from .layer_selection import require_seen
from .model_inputs import Feed, categories_of, feed

_Function = Callable[[Tensor], Tensor]
"""From a layer's output, or the input, to the model's output."""


def vector_jacobian_product(model: nn.Module, x: Any, vector: Any, layer: str | nn.Module | None = None) -> Tensor:
    """J^T v: the gradient of the model's output, weighted by a vector, at a layer's output or at the input.

    J is the Jacobian of the model's output with respect to the layer's output, at x, in evaluation mode. It is computed
    by `torch.func.vjp`: two forward passes (one where no layer is named) and one backward pass down to the layer.

    Args:
        model: Any module. Of an output of several tensors it is `.logits`, `["out"]`, or the only one.
        x: The batch, or whatever else `feed` reads: a picture, a tuple of tensors. Nothing is changed.
        vector: A tensor in the shape of the model's output; or a class index or name, or one for each image, which
            stands for 1 at the class and 0 elsewhere.
        layer: A name or a module. None takes the input, of several the first with floating-point numbers. Of a layer's
            output of several tensors it is the first; of several calls of a layer the last.

    Returns:
        In the shape of the layer's output, or of the input. In units of the output per unit of the layer's output.

    Raises:
        ImageError: x cannot be read, or holds no floating-point numbers.
        LayerError: No such layer, or it was not called, or it gives no floating-point tensor.
        NotApplicableError: The model does something that `torch.func` cannot follow, the layer is inside TorchScript,
            or no operation with a derivative leads from it to the output.
        TargetError: The vector does not fit the model's output.
    """
    with _prepared(model, x, layer) as (function, primal):
        output, pull = _following(lambda: torch.func.vjp(function, primal))
        weights = _vector(vector, output, categories_of(model))
        product: Tensor = _following(lambda: pull(weights))[0]
        if not product.any() and weights.any():
            _check_connected(function, primal, layer)
    return product.detach()


def jacobian_vector_product(model: nn.Module, x: Any, tangent: Tensor, layer: str | nn.Module | None = None) -> Tensor:
    """J t: how the model's output moves when a layer's output, or the input, moves along a tangent.

    J is the Jacobian of the model's output with respect to the layer's output, at x, in evaluation mode. It is computed
    by `torch.func.jvp`, forward, along with the pass itself; where an operation has no such derivative, by the
    derivative of the vector-Jacobian product, which is linear in its vector.

    Args:
        model: As for `vector_jacobian_product`.
        x: The same.
        tangent: In the shape of the layer's output, or of the input.
        layer: As for `vector_jacobian_product`.

    Returns:
        In the shape of the model's output.

    Raises:
        ImageError: x cannot be read, or holds no floating-point numbers; or the tangent does not fit it.
        LayerError: No such layer, it was not called, or it gives no floating-point tensor; or the tangent does not fit
            its output.
        NotApplicableError: The model does something that `torch.func` cannot follow, the layer is inside TorchScript,
            or no operation with a derivative leads from it to the output.
        TargetError: It is not clear which tensor of the model's output is meant.
    """
    with _prepared(model, x, layer) as (function, primal):
        along = _tangent(tangent, primal, layer)
        load_forward_derivatives()
        with _PlainAttention():
            try:
                product: Tensor = _following(lambda: torch.func.jvp(function, (primal,), (along,))[1])
            except NotImplementedError:
                product = _following(lambda: _by_two_backward_passes(function, primal, along))
        if not product.any() and along.any():
            _check_connected(function, primal, layer)
    return product.detach()


@contextmanager
def _prepared(model: Any, x: Any, layer: str | nn.Module | None) -> Iterator[tuple[_Function, Tensor]]:
    """The model's output as a function of a layer's output or of the input, and where its derivative is taken."""
    network = unwrap(model)
    called = feed(model, x)
    where = None if layer is None else find(network, layer)
    if where is not None:
        require_seen(network, dict([where]))
    with prepared_for_attribution(network):
        yield _of_input(network, called) if where is None else _of_layer(network, called, *where)


def _of_input(model: nn.Module, called: Feed) -> tuple[_Function, Tensor]:
    old = _first_number((called.args, called.kwargs))
    if old is None:
        raise ImageError("the input holds no floating-point tensor, so there is no derivative by it")
    return lambda value: _run(model, called, old, value), old.detach().clone()


def _of_layer(model: nn.Module, called: Feed, name: str, layer: nn.Module) -> tuple[_Function, Tensor]:
    """Both passes see the same calls of the layer; the output of the last is replaced."""
    last, primal = _last_call(model, called, name, layer)

    def function(value: Tensor) -> Tensor:
        calls = 0

        def substitute(output: Any) -> Any:
            nonlocal calls
            calls += 1
            replaced = _first_number(output)
            # A copy flows on: what follows may work in place.
            return (
                tree_map_tensors(output, lambda each: value.clone() if each is replaced else each)
                if calls == last
                else None
            )

        with HookManager() as hooks:
            hooks.observe(layer, substitute)
            # The arguments are copied in here: what is made inside a transformation may be changed in place by it.
            return _run(model, called)

    return function, primal


def _check_connected(function: _Function, primal: Tensor, layer: str | nn.Module | None) -> None:
    """Raise NotApplicableError where a product is 0 since nothing carries a derivative, and not since it is 0."""
    value = primal.clone().requires_grad_()
    output = function(value)
    ones = torch.ones_like(output)
    if not output.requires_grad or torch.autograd.grad(output, value, ones, allow_unused=True)[0] is None:
        what = "the input" if layer is None else "the layer"
        raise NotApplicableError(
            f"no operation with a derivative leads from {what} to the model's output: it is detached, "
            "quantised or turned into integers on the way, or not used at all"
        )


def _last_call(model: nn.Module, called: Feed, name: str, layer: nn.Module) -> tuple[int, Tensor]:
    """How often a layer is called, and what it gives the last time."""
    calls = 0
    kept: Tensor | None = None

    def keep(output: Any) -> None:
        nonlocal calls, kept
        calls += 1
        number = _first_number(output)
        kept = None if number is None else number.detach().clone()

    with HookManager() as hooks, torch.no_grad():
        hooks.observe(layer, keep)
        _run(model, called)
    if not calls:
        raise LayerError(f'layer "{name}" was not called, so the output does not depend on it')
    if kept is None:
        raise LayerError(f'layer "{name}" gives no floating-point tensor, so there is no derivative by it')
    return calls, kept


def _run(model: nn.Module, called: Feed, old: Tensor | None = None, new: Tensor | None = None) -> Tensor:
    """The model's output for copies of its arguments, one of them replaced."""

    def argument(each: Tensor) -> Tensor:
        return new.clone() if new is not None and each is old else each.detach().clone()

    args, kwargs = tree_map_tensors((called.args, called.kwargs), argument)
    return output_tensor(model(*args, **kwargs))


def _first_number(nest: Any) -> Tensor | None:
    return next((each for each in tree_tensors(nest) if each.is_floating_point()), None)


def _tangent(tangent: Any, primal: Tensor, layer: str | nn.Module | None) -> Tensor:
    """The tangent on the device and in the type of what moves along it."""
    if isinstance(tangent, Tensor) and tangent.shape == primal.shape and not tangent.is_complex():
        return _normal(tangent.detach().to(primal))
    where = "the input" if layer is None else "the layer's output"
    came = f"a tensor of shape {tuple(tangent.shape)}" if isinstance(tangent, Tensor) else type(tangent).__name__
    message = f"a tangent has the shape of {where}, {tuple(primal.shape)}; got {came}"
    raise ImageError(message) if layer is None else LayerError(message)


def _vector(vector: Any, output: Tensor, categories: Categories) -> Tensor:
    """The weights of the output's numbers: as given, or 1 at a class of each image."""
    shape = tuple(output.shape)
    if isinstance(vector, Tensor) and vector.shape == output.shape and not vector.is_complex():
        return _normal(vector.detach().to(output))
    if isinstance(vector, Tensor) and (vector.is_floating_point() or vector.is_complex()):
        raise TargetError(f"a vector has the shape of the model's output, {shape}; got {tuple(vector.shape)}")
    if output.dim() != 2:
        raise TargetError(f"classes need an output (N, classes), and this one is {shape}; pass a vector in its shape")
    indices = [class_index(each, categories) for each in per_image(vector, len(output))]
    for index in indices:
        if index >= shape[1]:
            raise TargetError(f"class {index} is outside 0..{shape[1] - 1}, the classes of the model's output")
    weights = torch.zeros(shape, dtype=output.dtype, device=output.device)
    weights[range(len(output)), indices] = 1
    return weights


def _normal(tensor: Tensor) -> Tensor:
    """A tensor that autograd can keep, also where it was made under `inference_mode`."""
    return tensor.clone() if tensor.is_inference() else tensor


def _following(step: Callable[[], Any]) -> Any:
    """What a step of `torch.func` gives. Raises NotApplicableError where the model does what it cannot follow."""
    try:
        return step()
    except NotImplementedError:
        raise
    except RuntimeError as error:
        if any(each in str(error) for each in ("functorch", "torch.func", "captured Tensor", "must be floating-point")):
            raise NotApplicableError(
                "the model does something that torch.func cannot follow, such as a checkpoint, a change of its own "
                "buffers, integers as its output, or an autograd.Function without setup_context: "
                f"{str(error).splitlines()[0]}"
            ) from error
        raise


def _by_two_backward_passes(function: _Function, primal: Tensor, along: Tensor) -> Tensor:
    """J t as the derivative of J^T v by v, which is J, along t."""
    forward: Any = torch.func.vjp(function, primal)
    output, pull = forward
    backward: Any = torch.func.vjp(lambda vector: pull(vector)[0], torch.zeros_like(output))
    product: Tensor = backward[1](along)[0]
    return product


class _PlainAttention(TorchFunctionMode):
    """Attention by its formula: its fused kernels have no forward derivative."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return attention_by_formula(*args, **kwargs)
        if func is F.multi_head_attention_forward and not kwargs.get("need_weights", True):
            # To give the weights it has to follow the formula.
            return func(*args, **{**kwargs, "need_weights": True})[0], None
        return func(*args, **kwargs)
