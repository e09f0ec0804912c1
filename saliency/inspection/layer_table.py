"""Table of the layers of a model: output shapes, parameters, multiply-adds and times, in the order of execution."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..hooks.autograd_graph import DispatchMode
from ..hooks.manager import HookManager
from ..hooks.model_state import prepared_for_attribution, unique_modules, unwrap
from ..hooks.pytree import first_tensor, tree_tensors
from ..validation import check_integer
from .arguments import LayersLike, ModelCall, model_call, require_hookable, select_layers
from .tables import Column, Table, listed, shape_text, share, si

_TIMED_FORWARDS = 3


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer in one forward pass.

    Attributes:
        name: The dotted name; "" for the model itself.
        kind: The class of the module.
        depth: The depth in the tree of called modules: 1 for the outermost layers. A container that is not called, such
            as a ModuleList, does not count.
        output: The shape of the output of its last call; nested shapes for several tensors.
        parameters: The number of parameters, including those of submodules. Shared parameters count once.
        trainable: The number of parameters that require a gradient.
        multiply_adds: The multiply-adds of convolutions, matrix products and attention, for all calls and including
            submodules.
        time_share: The share of the model's time, including submodules, from 0 to 1; None without times.
        calls: The number of calls.
        functional: The functions that the module calls directly, outside its submodules, with their number of calls:
            `{"add": 1}`.
    """

    name: str
    kind: str
    depth: int
    output: Any
    parameters: int
    trainable: int
    multiply_adds: int
    time_share: float | None
    calls: int
    functional: dict[str, int]


class LayerTable(Table[LayerRow]):
    """Table of the layers of a model in the order of execution; see `layer_table`.

    Attributes:
        model: The row of the model itself, with the totals and the functions outside its outermost layers.
        not_called: The names of the layers that did not run. Layers inside one of these are omitted.
        seconds: The time of the fastest forward pass; None without times.
    """

    model: LayerRow
    not_called: tuple[str, ...] = ()
    seconds: float | None = None


def _columns(rows: list[LayerRow], model: LayerRow) -> list[Column[LayerRow]]:
    """Return the columns. Names are indented relative to the outermost row."""
    outermost = min((row.depth for row in rows), default=0)
    of_time = "share of the time of one forward pass, including submodules"
    of_functions = "functions that the layer calls directly, outside its submodules, with their number of calls"
    return [
        Column("layer", lambda row: "  " * (row.depth - outermost) + (row.name or row.kind), "left"),
        Column("kind", lambda row: row.kind, "left"),
        Column("output", lambda row: shape_text(row.output), "left", "shape of the output of its last call"),
        _count_column("parameters", model, "including those of submodules"),
        _count_column("multiply_adds", model, "of convolutions, matrix products and attention, for the whole batch"),
        Column("time", lambda row: share(row.time_share), hint=of_time, bar=lambda row: row.time_share),
        Column("calls", lambda row: "" if row.calls == 1 else str(row.calls), hint="number of calls"),
        Column("functions", lambda row: _functions_text(row.functional), "left", of_functions),
    ]


def _count_column(field_name: str, model: LayerRow, hint: str) -> Column[LayerRow]:
    def count(row: LayerRow) -> int:
        return int(getattr(row, field_name))

    title = field_name.replace("_", "-")
    return Column(title, lambda row: si(count(row)), hint=hint, bar=lambda row: count(row) / (count(model) or 1))


def _functions_text(functions: Mapping[str, int]) -> str:
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in functions.items())


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
    called several times has one row, with the output of its last call. Functions called between layers are counted by
    name and included in the multiply-adds. Functions inside modules of torch.nn belong to these modules.

    Args:
        model: Any model; it is left unchanged.
        example: A float tensor, a shape such as (10, 3, 224, 224) for noise, images, a tuple of arguments or a mapping
            of keyword arguments.
        layers: The layers to show, by name, pattern, class or as modules. By default all layers that run, or the model
            itself if none does.
        depth: The largest depth in the tree of modules: 1 for the outermost layers that run.
        times: Whether to measure times, or the number of timed forward passes, 3 by default. The fastest pass of each
            layer is used. On an accelerator each layer is synchronised, which makes the shares correct but slows down
            the model.

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
    rounds = _TIMED_FORWARDS if times is True else check_integer("times", int(times), least=0)
    network = unwrap(model)
    call, model = model_call(model, example), network
    names = {module: name for name, module in model.named_modules()}
    require_hookable(model, {name: module for module, name in names.items()})
    chosen = select_layers(model, "*" if layers is None else layers).values()
    with prepared_for_attribution(model):
        profiles = _profile(model, call)
        called = {names[module] for module in profiles}
        depths = {module: _depth(name, called) for module, name in names.items()}
        wanted = {module: None for module in chosen if depth is None or depths[module] <= depth}
        running = [module for module in profiles if module in wanted]
        seconds = _timed(model, call, running, rounds) if rounds else {}
    if layers is None:
        running = running or [model]  # no submodule was called, as in nn.MultiheadAttention
    rows = [_row(module, names[module], depths[module], profiles[module], seconds, model) for module in running]
    total = _row(model, "", 0, profiles[model], seconds, model)
    notes = [_totals(total, call.size, seconds.get(model))]
    if total.functional and model not in running:
        notes.append(f"functions between the outermost layers: {_functions_text(total.functional)}")
    not_called = _not_called(names, wanted, called)
    notes += listed("not called:", not_called)
    title = f"{total.kind} on {', '.join(shape_text(tuple(tensor.shape)) for tensor in tree_tensors(call[:2]))}"
    table = LayerTable(rows, _columns(rows, total), title, notes)
    table.model, table.not_called, table.seconds = total, tuple(not_called), seconds.get(model)
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
        functional=dict(profile.functional),
    )


def _not_called(names: dict[nn.Module, str], wanted: Iterable[nn.Module], called: set[str]) -> list[str]:
    """Return the names of the layers that did not run, without layers inside one of these."""
    # Attention uses the weights of its projection without calling it.
    running = [module for module, name in names.items() if name in called]
    used = {child for module in running if isinstance(module, nn.MultiheadAttention) for child in module.children()}
    idle: list[str] = []
    for module in wanted:
        name = names[module]
        is_known = name in called or module in used
        is_inside = bool(idle) and name.startswith(f"{idle[-1]}.")
        if not is_known and not is_inside and not any(other.startswith(f"{name}.") for other in called):
            idle.append(name)
    return idle


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
    # Take the minimum per module: the minima of nested modules sum to at most that of their parent.
    return {module: min(taken[module] for taken in passes) for module in seconds}


def _synchronize(tensor: Tensor | None) -> Callable[[], None]:
    """Return a function that synchronises the device of the input, which is that of the model."""
    if tensor is None or tensor.device.type in ("cpu", "meta"):
        return lambda: None
    return partial(torch.accelerator.synchronize, tensor.device)


@dataclass
class _Profile:
    """Measurements of one module in one forward pass.

    Attributes:
        is_leaf: Whether the module belongs to torch.nn and has no submodules. Its functions are not listed.
    """

    is_leaf: bool
    calls: int = 0
    output: Any = None
    multiply_adds: int = 0
    functional: Counter[str] = field(default_factory=Counter)


def _profile(model: nn.Module, call: ModelCall) -> dict[nn.Module, _Profile]:
    """Profile one forward pass of a prepared model, and return the modules that were called, in the order of execution.

    User hooks are disabled.
    """
    profiler = _Profiler()
    with HookManager(exclusive=True) as hooks, torch.no_grad():
        for module in unique_modules(model):
            hooks.around(module, partial(profiler.begin, module), profiler.end)
        hooks.enter_context(profiler.operations)
        hooks.enter_context(profiler)
        output = call.run(model)
    profiles = {module: profile for module, profile in profiler.profiles.items() if profile.calls}
    if model not in profiles:  # a model with its own `__call__`
        total = profiler.operations.multiply_adds
        profiles[model] = _Profile(False, calls=1, output=_shapes_of(output), multiply_adds=total)
    return profiles


class _Profiler(TorchFunctionMode):
    """Counts the functions that each module calls. Functions called inside a function do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = MultiplyAdds()
        self.profiles: dict[nn.Module, _Profile] = {}  # in the order of the first calls
        self._running: list[_Profile] = []  # the innermost last

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[int, int, int]:
        if module not in self.profiles:
            is_own = type(module).__module__.startswith("torch.nn.") and "forward" not in vars(module)
            self.profiles[module] = _Profile(is_own and not any(True for _ in module.children()))
        self._running.append(self.profiles[module])
        return len(self._running) - 1, self.profiles[module].multiply_adds, self.operations.multiply_adds

    def end(self, begun: tuple[int, int, int], output: Any) -> None:
        depth, own, total = begun
        profile = self._running[depth]
        # Overwrite the count that a nested call of the same module has added.
        profile.multiply_adds = own + self.operations.multiply_adds - total
        profile.calls += 1
        profile.output = _shapes_of(output)
        # Also drop nested calls that raised, for which `end` was not called.
        del self._running[depth:]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self._running and not self._running[-1].is_leaf:
            name = function_name(func)
            # Skip functions that return no tensor, such as `size`.
            if name and (name == "setitem" or first_tensor(output) is not None):
                self._running[-1].functional[name] += 1
        return output


def _shapes_of(tree: Any) -> Any:
    """Replace the tensors of a tree by their shapes, and other leaves by None or the name of their type."""
    if isinstance(tree, Tensor):
        return tuple(tree.shape)
    if isinstance(tree, Mapping):
        return {key: _shapes_of(child) for key, child in tree.items()}
    if isinstance(tree, tuple | list):
        shapes = [_shapes_of(child) for child in tree]
        return shapes if isinstance(tree, list) else tuple(shapes)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {entry.name: _shapes_of(getattr(tree, entry.name)) for entry in dataclasses.fields(tree)}
    return None if tree is None else type(tree).__name__


@cache
def function_name(function: Any) -> str | None:
    """Return the name of a function of torch: "add" for `+`, `+=` and `add_`; None for attribute access."""
    name = getattr(function, "__name__", None) or str(function)
    if name in ("__get__", "__set__", "__delete__", "requires_grad_", "retain_grad", "as_subclass"):
        return None
    name = name.partition(".")[0].strip("_")
    return _OPERATOR_NAMES.get(name, name)


_REFLECTED = {"rsub": "sub", "rdiv": "div", "rfloordiv": "floor_divide", "rpow": "pow", "rmatmul": "matmul"}
_OPERATOR_NAMES = {**_REFLECTED, "floordiv": "floor_divide", "mod": "remainder", "invert": "bitwise_not"}


class MultiplyAdds(DispatchMode):
    """Counts the multiply-adds of the operations of a block in this thread."""

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
_FORMULAS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("aten.addbmm", "aten.addbmm_", "aten._addmm_activation", "aten._int_mm"), _matrix_product),
    **dict.fromkeys(("aten.mv", "aten.addmv", "aten.addmv_", "aten.dot", "aten.vdot"), _vector_product),
    **dict.fromkeys(("aten._trilinear", "torchvision.deform_conv2d"), _weighted),
    **dict.fromkeys(("aten.mkldnn_rnn_layer", "aten._cudnn_rnn", "aten.miopen_rnn"), _recurrent),
    **dict.fromkeys(
        ("aten.scaled_dot_product_attention", "aten._scaled_dot_product_flash_attention_for_cpu"), _attention
    ),
}
