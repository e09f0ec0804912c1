"""Table of the layers of a model: output shapes, parameters, multiply-adds and times, in the order of execution."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import MethodError
from ..hooks.autograd_graph import DispatchMode, own_parameters
from ..hooks.manager import HookManager
from ..hooks.model_state import prepared_for_attribution, reference_tensor, unique_modules, unwrap
from ..hooks.pytree import tree_map_tensors, tree_tensors
from .layer_selection import LayersLike, selected
from .model_inputs import ModelCall, model_call
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
    """Return the columns that are not empty. Names are indented relative to the outermost row."""
    outermost = min((row.depth for row in rows), default=0)
    columns: list[Column[LayerRow]] = [
        Column("layer", lambda row: "  " * (row.depth - outermost) + (row.name or row.kind), "left"),
        Column("kind", lambda row: row.kind, "left"),
        Column("output", lambda row: shape_text(row.output), "left", "shape of the output of its last call"),
        _count_column("parameters", model, "including those of submodules"),
        _count_column("multiply_adds", model, "of convolutions, matrix products and attention, for the whole batch"),
    ]
    if model.time_share is not None:
        hint = "share of the time of one forward pass, including submodules"
        columns.append(Column("time", lambda row: share(row.time_share), hint=hint, bar=lambda row: row.time_share))
    if any(row.calls != 1 for row in rows):
        columns.append(Column("calls", lambda row: "" if row.calls == 1 else str(row.calls), hint="number of calls"))
    if any(row.functional for row in rows):
        hint = "functions that the layer calls directly, outside its submodules, with their number of calls"
        columns.append(Column("functions", lambda row: _functions_text(row.functional), "left", hint))
    return columns


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
            layer is used. On an accelerator each layer is synchronised, which gives correct shares but slows down the
            model.

    Returns:
        A sequence of rows that prints as text, displays as HTML and converts with `dataframe()`.

    Raises:
        ImageError: The example is not an input for a model.
        LayerError: A name or pattern in `layers` matches no layer.
        MethodError: `depth` or `times` is out of range.
        ModelError: `model` is not a module, or has lazy parameters.
    """
    if depth is not None and depth < 1:
        raise MethodError(f"depth={depth}: expected 1 for the outermost layers, or more")
    rounds = _TIMED_FORWARDS if times is True else int(times)
    if rounds < 0:
        raise MethodError(f"times={times}: expected the number of timed forward passes, or False")
    network, wrapper = unwrap(model), model
    call, model = model_call(wrapper, example), network
    names = _module_names(model)
    wanted = list(names)[1:] or [model]
    if layers is not None:
        wanted = [module for module in selected(model, layers).values() if module in names]
    with prepared_for_attribution(model):
        profiles = _profile(model, call)
        depths = _depths(names, profiles)
        wanted = [module for module in wanted if depth is None or depths[module] <= depth]
        running = sorted((module for module in wanted if module in profiles), key=lambda module: profiles[module].order)
        seconds = _timed(model, call, running, rounds)
    if layers is None:
        running = running or [model]  # no submodule was called, as in nn.MultiheadAttention
    rows = [_row(module, names[module], depths[module], profiles[module], seconds, model) for module in running]
    total = _row(model, "", 0, profiles[model], seconds, model)
    varying = [names[module] or total.kind for module in running if profiles[module].varies]
    scripted = [name for module, name in names.items() if _is_scripted(module) and name]
    functions = "" if "" in {row.name for row in rows} else _functions_text(total.functional)
    not_called = _not_called(names, wanted, profiles)
    notes = [
        _totals(total, call.size, seconds.get(model)),
        *([f"functions between the outermost layers: {functions}"] if functions else []),
        *listed("output shape varies between calls, the last is shown:", varying),
        *listed("scripted, so their layers are not visible; counted in the calling layer:", scripted),
        *listed("not called:", not_called),
    ]
    title = f"{total.kind} on {', '.join(shape_text(tuple(tensor.shape)) for tensor in tree_tensors(call[:2]))}"
    table = LayerTable(rows, _columns(rows, total), title, notes)
    table.model, table.not_called, table.seconds = total, tuple(not_called), seconds.get(model)
    return table


def _is_scripted(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def _module_names(model: nn.Module) -> dict[nn.Module, str]:
    """Return all modules with their first names, except modules inside TorchScript, which are not called as modules."""
    names: dict[nn.Module, str] = {}
    scripted: list[str] = []
    for name, module in model.named_modules():
        if not any(name.startswith(prefix) for prefix in scripted):
            names[module] = name
            if _is_scripted(module):
                scripted.append(f"{name}." if name else "")
    return names


def _depths(names: dict[nn.Module, str], profiles: Mapping[nn.Module, Any]) -> dict[nn.Module, int]:
    """Return the number of called modules that contain each module."""
    inside: dict[str, int] = {}  # depth of the parts, by the name of the container
    depths = {}
    for module, name in names.items():
        depths[module] = inside[name.rpartition(".")[0]] if name else 0
        inside[name] = depths[module] + (module in profiles or not name)
    return depths


def _row(
    module: nn.Module, name: str, depth: int, profile: _Profile, seconds: dict[nn.Module, float], model: nn.Module
) -> LayerRow:
    own = (own_parameters(part).values() for part in unique_modules(module))
    parameters = {id(tensor): tensor for group in own for tensor in group if tensor is not None}.values()
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in parameters]
    return LayerRow(
        name=name,
        kind=str(getattr(module, "original_name", "")) or type(module).__name__,
        depth=depth,
        output=profile.output,
        parameters=sum(size for size, _ in sizes),
        trainable=sum(size for size, is_trainable in sizes if is_trainable),
        multiply_adds=profile.multiply_adds,
        time_share=seconds[module] / seconds[model] if seconds.get(model) else None,
        calls=profile.calls,
        functional=dict(profile.functional),
    )


def _not_called(names: dict[nn.Module, str], wanted: list[nn.Module], profiles: Mapping[nn.Module, Any]) -> list[str]:
    """Return the names of the layers that did not run, without layers inside one of these."""
    ran = {""}
    for module in profiles:
        name = names.get(module, "")
        while name not in ran:
            ran.add(name)
            name = name.rpartition(".")[0]
    # Attention uses the weights of its projection without calling it.
    used = {child for module in profiles if isinstance(module, nn.MultiheadAttention) for child in module.children()}
    idle: list[str] = []
    for module in wanted:
        name = names[module]
        if not (_is_scripted(module) or name in ran or module in used or (idle and name.startswith(f"{idle[-1]}."))):
            idle.append(name)
    return idle


def _totals(total: LayerRow, size: int, seconds: float | None) -> str:
    if total.trainable == total.parameters:
        trainable = ", all trainable" if total.parameters else ""
    else:
        trainable = f", {total.trainable:,} of them trainable" if total.trainable else ", none trainable"
    per_image = f" ({si(total.multiply_adds / size)} for each of {size})" if size > 1 else ""
    duration = "" if seconds is None else f"; {si(seconds, 's')} for one forward"
    return f"{total.parameters:,} parameters{trainable}; {si(total.multiply_adds)} multiply-adds{per_image}{duration}"


def _timed(model: nn.Module, call: ModelCall, modules: list[nn.Module], rounds: int) -> dict[nn.Module, float]:
    """Return the seconds of the model and of each module, in the fastest of several forward passes."""
    fastest: dict[nn.Module, float] = {}
    synchronize = _synchronize(model, call)
    for _ in range(rounds):
        seconds = dict.fromkeys((model, *modules), 0.0)
        with HookManager(exclusive=True) as hooks, torch.no_grad():

            def begin(module: nn.Module, args: Any, kwargs: Any, seconds: dict[nn.Module, float] = seconds) -> Any:
                synchronize()
                return module, seconds[module], time.perf_counter()

            def end(token: Any, output: Any, seconds: dict[nn.Module, float] = seconds) -> None:
                synchronize()
                module, before, start = token
                # Overwrite the time that a nested call of the same module has added.
                seconds[module] = before + time.perf_counter() - start

            for module in modules:
                if module is not model:
                    hooks.around(module, partial(begin, module), end)
            token = begin(model, (), {})
            call.run(model)
            end(token, None)
        fastest = {module: min(taken, fastest.get(module, taken)) for module, taken in seconds.items()}
    return fastest


def _synchronize(model: nn.Module, call: ModelCall) -> Callable[[], None]:
    """Return a function that synchronises the device of the model."""
    tensor = next(
        (candidate for candidate in (reference_tensor(model), *tree_tensors(call[:2])) if candidate is not None), None
    )
    if tensor is None or tensor.device.type in ("cpu", "meta"):
        return lambda: None
    return partial(torch.accelerator.synchronize, tensor.device)


@dataclass
class _Profile:
    """Measurements of one module in one forward pass.

    Attributes:
        is_leaf: Whether the module belongs to torch.nn and has no submodules. Its functions are not listed.
        order: The position of its first call among those of all modules.
        varies: Whether its calls returned different shapes.
    """

    is_leaf: bool
    order: int = -1
    calls: int = 0
    output: Any = None
    varies: bool = False
    multiply_adds: int = 0
    functional: Counter[str] = field(default_factory=Counter)

    def add_call(self, output: Any) -> None:
        shapes = _shapes_of(output)
        self.varies |= self.calls > 0 and shapes != self.output
        self.calls += 1
        self.output = shapes


def _profile(model: nn.Module, call: ModelCall) -> dict[nn.Module, _Profile]:
    """Profile one forward pass of a prepared model, and return the modules that were called.

    User hooks are disabled. Modules inside TorchScript run no hooks, so their multiply-adds count for the caller.
    """
    profiles = {module: _Profile(_is_leaf(module)) for module in unique_modules(model)}
    profiler = _Profiler()
    with HookManager(exclusive=True) as hooks, torch.no_grad():
        for module, profile in profiles.items():
            hooks.around(module, partial(profiler.begin, profile), partial(profiler.end, profile))
        if any(map(_is_scripted, profiles)):  # the profiler does not see functions of TorchScript
            profiler.counts_all_operations = True
            hooks.enter_context(profiler.operations)
        hooks.enter_context(profiler)
        output = call.run(model)
    if not profiles[model].calls:  # TorchScript, or a `__call__` of its own
        profiles[model].add_call(output)
        profiles[model].multiply_adds = profiler.operations.multiply_adds
    return {module: profile for module, profile in profiles.items() if profile.calls}


def _is_leaf(module: nn.Module) -> bool:
    is_own = type(module).__module__.startswith("torch.nn.") and "forward" not in vars(module)
    return is_own and not any(True for _ in module.children())


class _Profiler(TorchFunctionMode):
    """Counts the functions that each module calls. Functions called inside a function do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = MultiplyAdds()
        self.counts_all_operations = False  # whether operations are counted during the whole forward pass
        self._running: list[_Profile] = []  # the innermost last
        self._begun = 0

    def begin(self, profile: _Profile, args: Any, kwargs: Any) -> tuple[int, int, int]:
        if profile.order < 0:
            profile.order = self._begun
        self._begun += 1
        self._running.append(profile)
        return len(self._running) - 1, profile.multiply_adds, self.operations.multiply_adds

    def end(self, profile: _Profile, token: tuple[int, int, int], output: Any) -> None:
        depth, own, total = token
        # Overwrite the count that a nested call of the same module has added.
        profile.multiply_adds = own + self.operations.multiply_adds - total
        profile.add_call(output)
        # Also drop nested calls that raised, for which `end` was not called.
        del self._running[depth:]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function_name(func)
        is_done = self.counts_all_operations or name is None or name in _WITHOUT_PRODUCTS
        with nullcontext() if is_done else self.operations:
            output = func(*args, **(kwargs or {}))
        profile = self._running[-1] if self._running and not self._running[-1].is_leaf else None
        # Skip queries, such as for the size, which return no tensor.
        if profile is not None and name and (name == "setitem" or any(True for _ in tree_tensors(output))):
            profile.functional[name] += 1
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
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        name = name[1:] if name[:1] in ("r", "i") and name[1:] in _OPERATORS else name
        return _OPERATOR_NAMES.get(name, name)
    return name.partition(".")[0].strip("_")


_OPERATORS = ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_OPERATOR_NAMES = {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "invert": "bitwise_not"}


# Frequent functions without matrix products. Their operations are not counted, to save time.
_WITHOUT_PRODUCTS = frozenset(
    "adaptive_avg_pool2d add avg_pool2d batch_norm cat chunk clone contiguous div dropout expand flatten gelu getitem "  # noqa: SIM905
    "group_norm hardsigmoid hardswish hardtanh interpolate layer_norm max_pool2d mean mul normalize pad permute relu "
    "relu6 reshape sigmoid silu softmax split squeeze stack sub sum tanh transpose unsqueeze view".split()
)


class MultiplyAdds(DispatchMode):
    """Counts the multiply-adds of the operations of a block in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.multiply_adds = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = _formula_of(func)
        if formula is None and func.namespace == "aten":
            # Under inference_mode, composite operations are not decomposed before dispatch.
            with self:
                output = func.decompose(*args, **kwargs)
            if output is not NotImplemented:
                return output
        output = func(*args, **kwargs)
        if formula is not None:
            self.multiply_adds += formula(*args, **kwargs, out_val=output)
        return output


@cache
def _formula_of(func: Any) -> Callable[..., int] | None:
    from torch.utils.flop_counter import flop_registry  # slower to import than all of this package

    flops = flop_registry.get(func.overloadpacket)
    if flops is None:
        return _FORMULAS.get(str(func.overloadpacket))
    of_shapes = getattr(flops, "__wrapped__", None)  # without a slow conversion of the arguments to shapes
    if of_shapes is None:
        return lambda *args, **kwargs: int(flops(*args, **kwargs)) // 2

    def formula(*args: Any, out_val: Any, **kwargs: Any) -> int:
        shapes, named, out_shape = tree_map_tensors((args, kwargs, out_val), lambda tensor: tensor.shape)
        return int(of_shapes(*shapes, out_shape=out_shape, **named)) // 2

    return formula


def _vector_product(*args: Any, out_val: Any, **kwargs: Any) -> int:
    """Return the size of the largest operand: the matrix, or either vector."""
    return max(tensor.numel() for tensor in tree_tensors(args))


def _matrix_product(*args: Any, out_val: Any, **kwargs: Any) -> int:
    """Multiply each value of the first matrix with a row of the second; they are the last two operands."""
    *_, first, second = tree_tensors(args)
    return int(first.numel() * second.shape[-1])


def _weighted(x: Any, weight: Any, *args: Any, out_val: Any, **kwargs: Any) -> int:
    """Count the weights of a channel (the first axis of the weight) for each value of the output."""
    return int(out_val.numel() * math.prod(weight.shape[1:]))


def _weighted_last(x: Any, weight: Any, *args: Any, out_val: Any, **kwargs: Any) -> int:
    return int(out_val.numel() * math.prod(weight.shape[:-1]))


def _recurrent(x: Any, *args: Any, out_val: Any, **kwargs: Any) -> int:
    """Count each weight once per step of each sequence. The weights are the arguments after the input."""
    weights = args[0] if isinstance(args[0], list | tuple) else args[:2]
    return int(x.numel() // x.shape[-1] * sum(weight.numel() for weight in weights if weight.dim() == 2))


# Operations without a formula in torch.utils.flop_counter.
_FORMULAS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("aten.mv", "aten.addmv", "aten.addmv_", "aten.dot", "aten.vdot"), _vector_product),
    **dict.fromkeys(("aten.addbmm", "aten.addbmm_", "aten._addmm_activation", "aten._int_mm"), _matrix_product),
    **dict.fromkeys(("aten._trilinear", "torchvision.deform_conv2d"), _weighted),
    **dict.fromkeys(("aten.mkldnn_rnn_layer", "aten._cudnn_rnn", "aten.miopen_rnn"), _recurrent),
    "aten.conv_tbc": _weighted_last,
}
