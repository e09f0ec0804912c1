"""Table of the layers of a model: output shapes, parameters, multiply-adds and times, in the order of execution."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode

from ..hooks.autograd_graph import DispatchMode, unique_modules
from ..hooks.manager import HookManager
from ..hooks.pytree import first_tensor, tree_tensors
from ..model.call import prepared_for_attribution, unwrap
from ..tables import Column, Shapes, Table, shape_text, share, si
from ..validation import check_integer
from .arguments import LayersLike, ModelCall, model_call, require_hookable, select_layers

_TIMED_FORWARDS = 3


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer in one forward pass.

    Attributes:
        name: The dotted name; "" for the model itself.
        kind: The class of the module.
        depth: The depth in the tree of called modules: 1 for the outermost layers. A container that is not called, such
            as a ModuleList, is not counted.
        output: The shape of the output of its last call; a list of shapes unless it has exactly one tensor.
        parameters: The number of parameters, including parameters of submodules. Shared parameters are counted once.
        trainable: The number of parameters that require a gradient.
        multiply_adds: The multiply-adds of convolutions, matrix products and attention, for all calls and including
            submodules.
        time_share: The fraction of the model's time, including submodules, from 0 to 1; None if not measured.
        calls: The number of calls.
    """

    name: str
    kind: str
    depth: int
    output: Shapes
    parameters: int
    trainable: int
    multiply_adds: int
    time_share: float | None
    calls: int


class LayerTable(Table[LayerRow]):
    """Table of the layers of a model in the order of execution; see `layer_table`.

    Attributes:
        model: The row of the model itself, with the totals.
        seconds: The time of the fastest forward pass; None if times were not measured.
    """

    model: LayerRow
    seconds: float | None = None


def _indented(outermost: int, row: LayerRow) -> str:
    return "  " * (row.depth - outermost) + (row.name or row.kind)


def _several(calls: int) -> str:
    return "" if calls == 1 else str(calls)


_COLUMNS = (
    Column("kind", "kind", align="left"),
    Column("output", "output", shape_text, "left", "shape of the output of its last call"),
    Column("parameters", "parameters", si, hint="including submodules"),
    Column("multiply-adds", "multiply_adds", si, hint="of convolutions, matrix products and attention, for the batch"),
    Column("time", "time_share", share, hint="fraction of the time of one forward pass, including submodules"),
    Column("calls", "calls", _several, hint="number of calls"),
)


def layer_table(
    model: nn.Module,
    example: Any,
    *,
    layers: LayersLike | None = None,
    depth: int | None = None,
    times: bool | int = True,
) -> LayerTable:
    """Return a table of the layers of a model, in the order of execution.

    This requires one forward pass in evaluation mode without gradients, and a few more for the times. A layer that is
    called several times has one row, with the output of its last call. The multiply-adds of a layer include the
    functions that it calls.

    Args:
        model: Any model; it is left unchanged.
        example: A float tensor, a shape such as (10, 3, 224, 224) for noise, images, a tuple of arguments or a mapping
            of keyword arguments.
        layers: The layers to show, by name, pattern, class or as modules. By default all layers that run, or the model
            itself if no layer runs.
        depth: The largest depth in the tree of modules: 1 for the outermost layers that run.
        times: Whether to measure times, or the number of timed forward passes, 3 by default. The fastest pass of each
            layer is used. On an accelerator each layer is synchronised, which makes the fractions correct but slows
            down the model.

    Returns:
        A sequence of rows that prints as text, displays as HTML and converts with `dataframe()`.

    Raises:
        ImageError: The example is not an input for a model.
        LayerError: A name or pattern in `layers` matches no layer.
        MethodError: `depth` or `times` is out of range.
        ModelError: `model` is not a module, or has lazy parameters.
        NotApplicableError: A layer is scripted or inside a TorchScript module, which runs no hooks.
    """
    if depth is not None:
        check_integer("depth", depth)
    rounds = check_integer("times", times * _TIMED_FORWARDS if isinstance(times, bool) else times, least=0)
    network = unwrap(model)
    call, model = model_call(model, example), network
    names = {module: name for name, module in model.named_modules()}
    require_hookable(model, {name: module for module, name in names.items()})
    chosen = set(select_layers(model, "*" if layers is None else layers).values())
    with prepared_for_attribution(model):
        profiles = _profile(model, call)
        called = {names[module] for module in profiles}
        depths = {module: _depth(name, called) for module, name in names.items()}
        running = [module for module in profiles if module in chosen and (depth is None or depths[module] <= depth)]
        seconds = _timed(model, call, running, rounds) if rounds else {}
    if layers is None:
        running = running or [model]  # no submodule was called, as in nn.MultiheadAttention
    rows = [_row(module, names[module], depths[module], profiles[module], seconds, model) for module in running]
    total = _row(model, "", 0, profiles[model], seconds, model)
    notes = [_totals(total, call.size, seconds.get(model))]
    title = f"{total.kind} on {', '.join(shape_text(tuple(tensor.shape)) for tensor in tree_tensors(call[:2]))}"
    indented = partial(_indented, min((row.depth for row in rows), default=0))  # relative to the outermost row
    table = LayerTable(rows, [Column("layer", indented, align="left"), *_COLUMNS], title, notes)
    table.model, table.seconds = total, seconds.get(model)
    return table


def _depth(name: str, called: set[str]) -> int:
    """Return the number of called modules that contain a layer, including the model."""
    *containers, _ = accumulate(name.split("."), "{}.{}".format)
    return sum(container in called for container in containers) + bool(name)


def _row(
    module: nn.Module, name: str, depth: int, profile: _Profile, seconds: dict[nn.Module, float], model: nn.Module
) -> LayerRow:
    parameters = list(module.parameters())
    return LayerRow(
        name=name,
        kind=type(module).__name__,
        depth=depth,
        output=profile.output,
        parameters=sum(parameter.numel() for parameter in parameters),
        trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        multiply_adds=profile.multiply_adds,
        time_share=seconds[module] / seconds[model] if seconds.get(model) else None,
        calls=profile.calls,
    )


def _totals(total: LayerRow, size: int, seconds: float | None) -> str:
    is_all = 0 < total.trainable == total.parameters
    trainable = "all" if is_all else f"{total.trainable:,} of them"
    per_image = f" ({si(total.multiply_adds / size)} for each of {size})" if size > 1 else ""
    duration = "" if seconds is None else f"; {si(seconds, 's')} for one forward"
    counts = f"{total.parameters:,} parameters, {trainable} trainable; {si(total.multiply_adds)} multiply-adds"
    return f"{counts}{per_image}{duration}"


def _timed(model: nn.Module, call: ModelCall, modules: list[nn.Module], rounds: int) -> dict[nn.Module, float]:
    """Return the seconds of the model and of each module, in the fastest of several forward passes."""
    passes: list[dict[nn.Module, float]] = []
    seconds: dict[nn.Module, float] = {}
    synchronize = _synchronize(first_tensor(call[:2]))

    def begin(module: nn.Module, args: Any, kwargs: Any) -> tuple[nn.Module, float, float]:
        synchronize()
        return module, seconds[module], time.perf_counter()

    def end(begun: tuple[nn.Module, float, float], output: Any) -> None:
        synchronize()
        module, before, start = begun
        # Overwrite the time that a nested call of the same module has added.
        seconds[module] = before + time.perf_counter() - start

    with HookManager(exclusive=True) as hooks, torch.no_grad():
        for module in modules:
            if module is not model:
                hooks.around(module, partial(begin, module), end)
        for _ in range(rounds):
            seconds.update(dict.fromkeys((model, *modules), 0.0))
            end(begin(model, (), {}), call.run(model))
            passes.append(dict(seconds))
    # Take the minimum per module: the minima of nested modules sum to at most the minimum of their parent.
    return {module: min(taken[module] for taken in passes) for module in seconds}


def _synchronize(tensor: Tensor | None) -> Callable[[], None]:
    """Return a function that synchronises the device of the input and the model."""
    if tensor is None or tensor.device.type in ("cpu", "meta"):
        return lambda: None
    return partial(torch.accelerator.synchronize, tensor.device)


@dataclass
class _Profile:
    """Measurements of one module in one forward pass."""

    calls: int = 0
    output: Shapes = ()
    multiply_adds: int = 0


def _profile(model: nn.Module, call: ModelCall) -> dict[nn.Module, _Profile]:
    """Profile one forward pass of a prepared model, and return the modules that were called, in the order of execution.

    User hooks are disabled.
    """
    profiles: dict[nn.Module, _Profile] = {}
    operations = MultiplyAdds()

    def begin(module: nn.Module, args: Any, kwargs: Any) -> tuple[_Profile, int, int]:
        profile = profiles.setdefault(module, _Profile())
        return profile, profile.multiply_adds, operations.multiply_adds

    def end(begun: tuple[_Profile, int, int], output: Any) -> None:
        profile, before, total = begun
        # Overwrite the count that a nested call of the same module has added.
        profile.multiply_adds = before + operations.multiply_adds - total
        profile.calls += 1
        profile.output = _shapes_of(output)

    with HookManager(exclusive=True) as hooks, torch.no_grad():
        for module in unique_modules(model):
            hooks.around(module, partial(begin, module), end)
        # With a mode, the transformer layers of torch.nn run their modules instead of one fused operation.
        hooks.enter_context(BaseTorchFunctionMode())
        hooks.enter_context(operations)
        output = call.run(model)
    called = {module: profile for module, profile in profiles.items() if profile.calls}
    if model not in called:  # a model with its own `__call__`
        called[model] = _Profile(1, _shapes_of(output), operations.multiply_adds)
    return called


def _shapes_of(output: Any) -> Shapes:
    shapes = [tuple(tensor.shape) for tensor in tree_tensors(output)]
    return shapes[0] if len(shapes) == 1 else shapes


class MultiplyAdds(DispatchMode):
    """Counter of the multiply-adds of the operations of a block in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.multiply_adds = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flops = _flop_formula(func)
        output = func(*args, **kwargs)
        if flops is not None:
            self.multiply_adds += int(flops(*args, **kwargs, out_val=output)) // 2
        return output


@cache
def _flop_formula(func: Any) -> Callable[..., int] | None:
    from torch.utils.flop_counter import flop_registry  # slower to import than all of this package

    return _FORMULAS.get(str(func.overloadpacket)) or flop_registry.get(func.overloadpacket)


def _vector_product(*args: Any, out_val: Any, **kwargs: Any) -> int:
    """Return twice the size of the largest operand: the matrix, or either vector."""
    return 2 * max(tensor.numel() for tensor in tree_tensors(args))


def _matrix_product(*args: Any, out_val: Any, **kwargs: Any) -> int:
    """Count the columns of the second matrix for each value of the first. They are the last two operands."""
    *_, first, second = tree_tensors(args)
    return int(2 * first.numel() * second.shape[-1])


def _weighted(x: Any, weight: Any, *args: Any, out_val: Any, **kwargs: Any) -> int:
    """Count the weights of a channel (the first axis of the weight) for each value of the output."""
    return int(2 * out_val.numel() * math.prod(weight.shape[1:]))


def _attention(query: Any, key: Any, value: Any, *args: Any, out_val: Any, **kwargs: Any) -> int:
    """Count the products of each query with all keys, and the weighted sum of the values."""
    queries = query.numel() // query.shape[-1]
    return int(2 * queries * key.shape[-2] * (query.shape[-1] + value.shape[-1]))


def _recurrent(x: Any, *args: Any, out_val: Any, **kwargs: Any) -> int:
    """Count each weight once per step of each sequence. The weights are the arguments after the input."""
    weights = args[0] if isinstance(args[0], list | tuple) else args[:2]
    return int(2 * x.numel() // x.shape[-1] * sum(weight.numel() for weight in weights if weight.dim() == 2))


# Floating-point operations, two per multiply-add, of the operations that torch.utils.flop_counter lacks.
# The rare operations take 8 lines. Without them, a bilinear layer or a recurrent network would silently have 0.
_FORMULAS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("aten.addbmm", "aten.addbmm_", "aten._addmm_activation", "aten._int_mm"), _matrix_product),
    **dict.fromkeys(("aten.mv", "aten.addmv", "aten.addmv_", "aten.dot", "aten.vdot"), _vector_product),
    **dict.fromkeys(("aten._trilinear", "torchvision.deform_conv2d"), _weighted),
    **dict.fromkeys(("aten.mkldnn_rnn_layer", "aten._cudnn_rnn", "aten.miopen_rnn"), _recurrent),
    **dict.fromkeys(
        ("aten.scaled_dot_product_attention", "aten._scaled_dot_product_flash_attention_for_cpu"), _attention
    ),
}
