"""Record every call of every layer: arguments, outputs, gradients at both, and the statistics of each tensor."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, Self, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import ImageError, LayerError, MethodError, NotApplicableError, did_you_mean, plural
from ..hooks import autograd_graph as graph
from ..hooks.autograd_graph import is_wrapped
from ..hooks.manager import HookManager, is_hookable
from ..hooks.pytree import tree_map_tensors, tree_tensors
from ..io.inputs import axes_in_memory_order
from ..model.call import eager, prepared_for_attribution, unwrap
from ..validation import check_choice, described
from .arguments import LayersLike, ModelCall, model_calls, require_hookable, select_layers

# Small enough to stay in the processor's cache while it is read several times.
_CHUNK = 1 << 17
# The smallest variance, relative to the mean square, for which the difference of two sums is accurate.
_MIN_SPREAD = 1e-4


@dataclass(frozen=True, slots=True)
class Moments:
    """Summary of any number of values.

    Mean, deviations and extremes cover the finite values, and are NaN if there are none. Squares are in double
    precision: they overflow to infinity for values beyond 1e154, and underflow to 0 for values below 1e-162.
    """

    count: int = 0  # all values
    finite: int = 0
    mean: float = math.nan
    deviations: float = 0.0  # sum of the squared deviations from the mean
    min: float = math.nan
    max: float = math.nan
    zeros: int = 0
    nan: int = 0
    inf: int = 0

    @property
    def std(self) -> float:
        """The standard deviation of the population: the squared deviations are divided by the count."""
        return math.sqrt(self.deviations / self.finite) if self.finite else math.nan

    @property
    def norm(self) -> float:
        """The Euclidean norm of the finite values."""
        return math.hypot(math.sqrt(self.deviations), math.sqrt(self.finite) * self.mean) if self.finite else math.nan

    @property
    def rms(self) -> float:
        """The root mean square of the finite values."""
        return self.norm / math.sqrt(self.finite) if self.finite else math.nan

    @property
    def zero_share(self) -> float:
        """The fraction of values that are exactly 0, from 0 to 1."""
        return self.zeros / self.count if self.count else math.nan

    def scaled(self, factor: float) -> Moments:
        """Return the moments of the values multiplied by a positive factor."""
        mean, low, high = self.mean * factor, self.min * factor, self.max * factor
        return replace(self, mean=mean, deviations=self.deviations * factor * factor, min=low, max=high)

    def __add__(self, other: Moments) -> Moments:
        """Return the moments of the union of both sets of values, exact up to double precision.

        Source: Chan, Golub and LeVeque, "Algorithms for Computing the Sample Variance" (1983),
        https://doi.org/10.1080/00031305.1983.10483115.
        """
        counts = (self.zeros + other.zeros, self.nan + other.nan, self.inf + other.inf)
        count, finite = self.count + other.count, self.finite + other.finite
        if not self.finite or not other.finite:
            source = self if self.finite else other
            return Moments(count, finite, source.mean, source.deviations, source.min, source.max, *counts)
        distance, fraction = other.mean - self.mean, other.finite / finite
        deviations = self.deviations + other.deviations + distance * distance * self.finite * fraction
        low, high = min(self.min, other.min), max(self.max, other.max)
        return Moments(count, finite, self.mean + distance * fraction, deviations, low, high, *counts)


def moments(tensor: Tensor) -> Moments:
    """Return the moments of a tensor's values, or of the magnitudes of complex values, summed in double precision.

    Args:
        tensor: A tensor of any shape, dtype and device. It is not changed.

    Raises:
        MethodError: This is no tensor.
        NotApplicableError: The tensor is nested or quantised, or belongs to a transformation of `torch.func`.
    """
    if not isinstance(tensor, Tensor):
        raise MethodError(f"moments are of a tensor, got {described(tensor)}")
    return TensorStatistics(tensor).moments


def require_plain(tensor: Tensor) -> None:
    """Raise NotApplicableError for tensors without plain values: transformed, nested or quantised tensors."""
    if is_wrapped(tensor) or tensor.is_nested or tensor.is_quantized:
        kinds = "nested and quantised tensors, and tensors in a transformation (torch.func, is_grads_batched=True),"
        raise NotApplicableError(f"{kinds} cannot be recorded or measured; choose other layers")


def real_values(tensor: Tensor) -> Tensor:
    """Return the values as a dense tensor without a graph; the magnitudes if the tensor is complex."""
    tensor = tensor.detach().to_dense()
    return tensor.abs() if tensor.is_complex() else tensor


def _cpu_moments(values: Tensor) -> Moments:
    """Return the moments of a CPU tensor in one pass over memory.

    Two plain passes are 9 lines shorter, but take 8 % longer for 100,000 values and 18 % longer for 800,000.
    """
    if values.is_meta:
        return Moments()
    count, squares, total, low, high, zeros = values.numel(), 0.0, 0.0, math.inf, -math.inf, 0
    chunks = [values[start : start + _CHUNK] for start in range(0, count, _CHUNK)]
    for chunk in chunks:
        wide = chunk.double()
        squares += float(torch.dot(wide, wide))
        total += float(wide.sum())
        row = (chunk if chunk.dtype == torch.float32 else wide).numpy(force=True)
        lowest, highest = float(row.min()), float(row.max())
        if lowest <= 0 <= highest:
            zeros += row.size - int(np.count_nonzero(row != 0))
        low, high = min(low, lowest), max(high, highest)
    if count and math.isfinite(squares):
        if low == high:
            return Moments(count, count, low, 0.0, low, low, zeros)
        mean = total / count
        deviations = squares - total * mean
        if deviations > _MIN_SPREAD * squares:
            return Moments(count, count, mean, deviations, low, high, zeros)
    # Some values are not finite, or the mean is so large that the difference above is mostly rounding error.
    return sum((_from_fields(_fields(chunk)) for chunk in chunks), Moments())


def _fields(values: Tensor) -> Tensor:
    """Return the fields of `Moments` as one tensor, in two passes and without synchronising an accelerator."""
    if values.device.type != "mps":  # MPS has no double precision
        values = values.double()
    is_finite = values.isfinite()
    finite = is_finite.sum()
    mean = torch.where(is_finite, values, 0).sum() / finite
    squares = torch.where(is_finite, values - mean, 0).square().sum()
    low = torch.where(is_finite, values, math.inf).amin() if values.numel() else mean
    high = torch.where(is_finite, values, -math.inf).amax() if values.numel() else mean
    counts = (values == 0).sum(), values.isnan().sum(), values.isinf().sum()
    fields = [torch.full_like(finite, values.numel()), finite, mean, squares, low, high, *counts]
    return torch.stack([field.to(mean.dtype) for field in fields])


def _from_fields(fields: Tensor) -> Moments:
    count, finite, mean, deviations, low, high, zeros, nan, inf = fields.tolist()
    if not finite:
        mean = low = high = math.nan
    return Moments(int(count), int(finite), mean, deviations, low, high, int(zeros), int(nan), int(inf))


class TensorStatistics:
    """Shape and moments of a tensor. The tensor itself is not stored.

    Attributes:
        shape: The shape of the tensor.
        dtype: The dtype of the tensor.
        device: The device of the tensor.
    """

    def __init__(self, tensor: Tensor) -> None:
        require_plain(tensor)
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.device = tensor.device
        values = axes_in_memory_order(real_values(tensor)).reshape(-1)
        # An accelerator is synchronised only when the moments are read.
        measure = _cpu_moments if values.device.type in ("cpu", "meta") else _fields
        self._measured: Moments | Tensor = measure(values)

    @cached_property
    def moments(self) -> Moments:
        """Mean, standard deviation, extremes, norm, zeros, NaN and infinities, summed in double precision."""
        return _from_fields(self._measured) if isinstance(self._measured, Tensor) else self._measured

    def __getstate__(self) -> object:
        """Return the state with the computed moments, for `pickle` and `deepcopy`."""
        return {**vars(self), "_measured": self.moments}

    def __repr__(self) -> str:
        """Return a text such as `(1, 64, 112, 112) float32, mean 0.21, std 0.34`."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.shape} {dtype}, mean {self.moments.mean:.3g}, std {self.moments.std:.3g}"


PARTS = ("inputs", "outputs", "grad_inputs", "grad_outputs")

Keep = str | Callable[[Tensor], Any]
"""One of "full", "cpu" and "statistics", or a function of the tensor."""

_KEEP: dict[str, Callable[[Tensor], Any]] = {
    "full": Tensor.clone,
    "cpu": lambda tensor: tensor.detach().to("cpu", copy=True),
    "statistics": TensorStatistics,
}


class Backward:
    """Gradients at one call in one backward pass, which may still be running."""

    def __init__(self, summands: Sequence[int], outputs: int, keep: Callable[[Tensor], Any], number: int) -> None:
        self.number = number  # of the backward pass
        self._summands = summands
        self._keep = keep
        self._inputs: list[Any] = [None] * len(summands)
        self._outputs: list[Any] = [None] * outputs
        self._sums: dict[int, tuple[int, Tensor]] = {}  # by input: number of summands so far and their sum

    @property
    def grad_inputs(self) -> tuple[Any, ...]:
        """One gradient per tensor among the arguments; None for a tensor without a gradient."""
        # A backward pass that ends at an inner tensor may omit summands.
        for index, (_, total) in self._sums.items():
            self._inputs[index] = self._keep(total)
        self._sums.clear()
        return tuple(self._inputs)

    @property
    def grad_outputs(self) -> tuple[Any, ...]:
        """One gradient per tensor in the output; None for a tensor without a gradient."""
        return tuple(self._outputs)

    def set_output(self, index: int, gradient: Tensor) -> None:
        """Store the gradient of a tensor in the output."""
        self._outputs[index] = self._keep(gradient)

    def add_input(self, index: int, part: Tensor) -> None:
        """Add one summand of the gradient of a tensor among the arguments."""
        require_plain(part)
        count, total = self._sums.pop(index, (0, None))
        total = part if total is None else total + part
        if count + 1 < self._summands[index]:
            self._sums[index] = count + 1, total
        else:
            self._inputs[index] = self._keep(total)

    def __getstate__(self) -> object:
        """Return the gradients, for `pickle` and `deepcopy`."""
        return {"_inputs": list(self.grad_inputs), "_outputs": self._outputs, "_sums": {}}


@dataclass(frozen=True, slots=True, eq=False)
class ModuleCall:
    """One call of one layer.

    Each tensor is replaced by its recorded form: a copy, its statistics or the result of the user's function. A part
    that is not recorded is None, or () for flat tuples.
    """

    layer: str
    kind: str  # class of the module
    index: int  # number of earlier calls of the layer
    inputs: tuple[Any, ...] | None  # positional arguments, nested as given
    kwargs: dict[str, Any] | None
    output: Any = None  # nested as returned
    flat_inputs: tuple[Any, ...] = ()  # all tensors among the arguments, keywords included, as in `grad_inputs`
    outputs: tuple[Any, ...] = ()  # all tensors in the output, as in `grad_outputs`
    backwards: Sequence[Backward] = ()  # one entry per backward pass through this call, in order

    @property
    def grad_inputs(self) -> tuple[Any, ...]:
        """Gradients with respect to each tensor among the arguments in the last backward pass, through this call only.

        An entry is None for a tensor without a gradient; the tuple is empty without a backward pass. Other uses of the
        same tensor are not included. A tensor that is passed twice has the sum in both positions.
        """
        return self.backwards[-1].grad_inputs if self.backwards else ()

    @property
    def grad_outputs(self) -> tuple[Any, ...]:
        """Gradient of each tensor in the output in the last backward pass, with None and () as in `grad_inputs`."""
        return self.backwards[-1].grad_outputs if self.backwards else ()

    def __repr__(self) -> str:
        """Return a text such as `ModuleCall(layer1.0.relu: ReLU, index=1, backwards=1)`."""
        layer, backwards = self.layer or "(the model)", len(self.backwards)
        return f"ModuleCall({layer}: {self.kind}, index={self.index}, backwards={backwards})"


class _View(NamedTuple):
    """View of a base tensor, and its position in the memory of the base.

    After an in-place operation on a view, autograd passes the gradient to the base and bypasses the view. Keep this
    class: of 57 networks of torchvision and timm, 25 have layers whose gradients it saves. The recorder returns a view
    for a layer that returns its input, such as an inactive dropout, and an in-place ReLU often follows.
    """

    tensor: weakref.ref[Tensor]
    version: int
    position: tuple[Sequence[int], Sequence[int], int]  # size, stride and offset
    base_position: tuple[Sequence[int], Sequence[int]]  # size and stride

    @classmethod
    def of(cls, tensor: Tensor, base: Tensor) -> _View:
        offset = int(tensor.storage_offset() - base.storage_offset())
        position = (tensor.size(), tensor.stride(), offset)
        return cls(weakref.ref(tensor), graph.tensor_version(tensor), position, (base.size(), base.stride()))

    def is_overwritten(self) -> bool:
        tensor = self.tensor()
        return tensor is None or graph.tensor_version(tensor) != self.version

    def gradient(self, of_base: Tensor) -> Tensor:
        """Return the part of the base's gradient that belongs to the view."""
        return self._zeros(of_base).copy_(of_base).as_strided(*self.position)

    def gradient_of(self, source: _View, gradient: Tensor) -> Tensor:
        """Return the gradient of `source`, another view of the same base, given the gradient of this view."""
        laid_out = self._zeros(gradient)
        laid_out.as_strided(*self.position).copy_(gradient)
        return laid_out.as_strided(*source.position)

    def _zeros(self, like: Tensor) -> Tensor:
        """Return zeros in the layout of the base."""
        return torch.empty_strided(*self.base_position, dtype=like.dtype, device=like.device).zero_()


_Viewed = tuple[_View, Tensor, GradientEdge | None]  # an argument that is a view, its base, and the edge of the base


class _OpenCall(NamedTuple):
    """Call that has begun but not ended."""

    number: int
    call: ModuleCall
    since: int
    tensors: Sequence[Tensor] = ()
    edges: Sequence[GradientEdge | None] = ()
    views: Mapping[int, _Viewed] = {}  # by index in `tensors`


class HookBlock:
    """Base of context managers whose hooks act inside their block. A closed block can be opened again."""

    _stack: ExitStack | None = None

    def __enter__(self) -> Self:
        """Open the block.

        Raises:
            MethodError: The block is already open.
        """
        if self._stack is not None:
            raise MethodError("this block is already open; create another one for a nested block")
        with ExitStack() as stack:
            stack.enter_context(eager())
            self._register(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        """Close the block and remove its hooks."""
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.__exit__(*error)

    def _register(self, stack: ExitStack) -> None:
        """Register the hooks, and push their removal onto the stack."""
        raise NotImplementedError


class Recording(HookBlock, Sequence[ModuleCall]):
    """Sequence of recorded calls, and the context manager that records them; see `record`.

    It holds the layers, so send `list(recording)` to other processes.

    Args:
        layers: The layers by name.
        keep: Function from a tensor to its recorded form.
        parts: Some of `PARTS`.
    """

    def __init__(self, layers: Mapping[str, nn.Module], keep: Callable[[Tensor], Any], parts: Sequence[str]) -> None:
        self._modules = layers
        self._make = keep
        self._parts = frozenset(parts)
        self._has_gradients = bool(self._parts & {"grad_inputs", "grad_outputs"})
        # By tensor: the output of one layer is often the input of another.
        self._cache: MutableMapping[Tensor, tuple[int, Any]] = WeakTensorKeyDictionary()
        self._calls: dict[int, ModuleCall] = {}  # by number, in the order in which they ended
        self._begun = 0  # number of calls so far
        self._counts: Counter[str] = Counter()

    def _register(self, stack: ExitStack) -> None:
        hooks = stack.enter_context(HookManager(persistent=True))
        self.attach(hooks, hooks)

    def attach(self, hooks: HookManager, gradient_hooks: HookManager) -> None:
        """Record every call while `hooks` is open, and its gradients while `gradient_hooks` is open."""
        # Use weak references in the hooks, so that Ctrl-C frees the manager and this object with their frame.
        manager: HookManager = weakref.proxy(gradient_hooks)
        this: Recording = weakref.proxy(self)
        for name, module in self._modules.items():
            begin = partial(Recording._begin, this, name, type(module).__name__)
            hooks.around(module, begin, partial(Recording._end, this, manager))

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers that were called, in the order of their first call."""
        return tuple(dict.fromkeys(call.layer for call in self))

    def in_end_order(self) -> list[ModuleCall]:
        """Return the calls in the order in which they ended."""
        return list(self._calls.values())

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[ModuleCall]:
        return iter([call for _, call in sorted(self._calls.items())])

    @overload
    def __getitem__(self, key: int) -> ModuleCall: ...
    @overload
    def __getitem__(self, key: slice | str | nn.Module) -> list[ModuleCall]: ...
    def __getitem__(self, key: int | slice | str | nn.Module) -> ModuleCall | list[ModuleCall]:
        """Return a call by its index, or all calls of a layer, in order.

        Raises:
            LayerError: The layer is not recorded.
        """
        if isinstance(key, int | slice):
            return list(self)[key]
        name = key if isinstance(key, str) else next((n for n, module in self._modules.items() if module is key), None)
        if name not in self._modules:
            hint = did_you_mean(str(name), self._modules)
            raise LayerError(f'no layer "{name}" among the {len(self._modules)} recorded layers{hint}')
        return [call for call in self if call.layer == name]

    def __repr__(self) -> str:
        return f"<Recording of {len(self)} calls of {len(self.layers)} layers>"

    def _begin(self, name: str, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _OpenCall | None:
        # Skip calls that checkpointing repeats in the backward pass.
        if graph.this_backward() != -1:
            return None
        since = graph.current_sequence_nr()
        (inputs, named), flat = self._keep_all((args, kwargs)) if "inputs" in self._parts else ((None, None), ())
        call = ModuleCall(name, kind, self._counts[name], inputs, named, flat_inputs=flat)
        begun = _OpenCall(self._begun, call, since)
        self._begun += 1
        self._counts[name] += 1
        if not self._has_gradients or not torch.is_grad_enabled():
            return begun
        tensors = list(tree_tensors((args, kwargs)))
        bases = {index: base for index, tensor in enumerate(tensors) if (base := graph.view_base(tensor)) is not None}
        views = {index: (_View.of(tensors[index], base), base, graph.edge(base)) for index, base in bases.items()}
        return begun._replace(tensors=tensors, edges=[graph.edge(tensor) for tensor in tensors], views=views)

    def _end(self, hooks: HookManager, begun: _OpenCall | None, output: Any) -> Any:
        if begun is None:
            return None
        nested, flat = self._keep_all(output) if "outputs" in self._parts else (None, ())
        backwards: Sequence[Backward] = ()
        returned: set[int] = set()
        if self._has_gradients and torch.is_grad_enabled():
            older = (t for t in tree_tensors(output) if t.requires_grad and not graph.is_recorded_since(t, begun.since))
            returned = {id(tensor) for tensor in older}
            if returned:
                # The layer returned an argument or a parameter. An alias separates the gradient through this layer from
                # the gradient of other uses.
                output = tree_map_tensors(output, lambda t: t.view_as(t) if id(t) in returned else t)
            backwards = self._hook_gradients(hooks, begun, output)
        self._calls[begun.number] = replace(begun.call, output=nested, outputs=flat, backwards=backwards)
        return output if returned else None

    def _keep_all(self, tree: Any) -> tuple[Any, tuple[Any, ...]]:
        """Return the recorded form of all tensors of a tree, nested and flat."""
        flat: list[Any] = []

        def keep(tensor: Tensor) -> Any:
            flat.append(self._keep(tensor))
            return flat[-1]

        return tree_map_tensors(tree, keep), tuple(flat)

    def _keep(self, tensor: Tensor) -> Any:
        """Return the recorded form of a tensor. An unchanged tensor returns the same object again."""
        require_plain(tensor)
        if tensor.is_inference():  # without a version counter
            return self._make(tensor)
        cached = self._cache.get(tensor)
        if cached is None or cached[0] != graph.tensor_version(tensor):
            cached = self._cache[tensor] = (graph.tensor_version(tensor), self._make(tensor))
        return cached[1]

    def _keep_gradient(self, gradient: Tensor) -> Any:
        # Detach: a graph that references its own gradients would never be freed.
        return self._keep(gradient.detach()) if gradient.requires_grad else self._keep(gradient)

    def _hook_gradients(self, hooks: HookManager, begun: _OpenCall, output: Any) -> list[Backward]:
        """Register hooks for the gradients at the call. Return the list that receives one entry per backward pass."""
        outputs = list(tree_tensors(output))
        # The layer may change arguments in place, so they are treated as outputs too.
        results = [*outputs, *begun.tensors]
        exits = graph.input_edges(results, begun.edges, begun.since)
        sources: list[_Origin] = [(tensor, None, edges) for tensor, edges in zip(begun.tensors, exits, strict=True)]
        # A view that was changed in place passes its gradient to its base.
        changed = {index: viewed for index, viewed in begun.views.items() if viewed[0].is_overwritten()}
        base_edges = [base_edge for _, _, base_edge in changed.values()]
        base_exits = graph.input_edges(results, base_edges, begun.since) if changed else []
        for (index, (base_view, base, _)), edges in zip(changed.items(), base_exits, strict=True):
            if edges:
                sources[index] = base, base_view, edges
        log: list[Backward] = []
        summands = [len(edges) for _, _, edges in sources]
        running = partial(_running, log, partial(Backward, summands, len(outputs), self._keep_gradient))
        if "grad_outputs" in self._parts:
            arguments = list(zip(begun.tensors, exits, strict=True))
            for index, tensor in enumerate(outputs):
                if tensor.requires_grad:
                    hooks.at_gradient(tensor, partial(_set_output, running, index))
                    _watch_base(hooks, running, index, tensor, arguments)
        if "grad_inputs" in self._parts:
            for index, (tensor, view, edges) in enumerate(sources):
                for input_edge in edges:
                    hooks.at_input_edge(tensor, input_edge, partial(_add_input, running, index, view))
        return log


_Edges = list[graph.InputEdge]
_Origin = tuple[Tensor, _View | None, _Edges]  # tensor with the gradient of an argument, and the view to take from it
_Running = Callable[[], Backward]


def _running(log: list[Backward], new: Callable[[int], Backward]) -> Backward:
    """Return the entry of the backward pass that runs in this thread."""
    number = graph.this_backward()
    entry = next((entry for entry in reversed(log) if entry.number == number), None)
    if entry is None:
        entry = new(number)
        log.append(entry)
    return entry


def _set_output(running: _Running, index: int, gradient: Tensor) -> None:
    running().set_output(index, gradient)


def _add_input(running: _Running, index: int, view: _View | None, part: Tensor) -> None:
    running().add_input(index, part if view is None else view.gradient(part))


def _watch_base(
    hooks: HookManager, running: _Running, index: int, output: Tensor, arguments: Sequence[tuple[Tensor, _Edges]]
) -> None:
    """Take the gradient of an output view from its base, if a later in-place operation bypasses the view."""
    base = graph.view_base(output)
    if base is None or base.is_leaf or not base.requires_grad:
        return
    view = _View.of(output, base)
    sources = {
        number: _View.of(tensor, base)
        for number, (tensor, edges) in enumerate(arguments)
        if (base is tensor or base is graph.view_base(tensor))
        and any(input_edge.node is output.grad_fn for input_edge in edges)
    }

    def take_part(of_base: Tensor) -> None:
        if view.is_overwritten() and (entry := running()).grad_outputs[index] is None:
            part = view.gradient(of_base)
            entry.set_output(index, part)
            for number, source in sources.items():
                entry.add_input(number, view.gradient_of(source, part))

    hooks.at_gradient(base, take_part)


def record(
    model: nn.Module, layers: LayersLike = "*", *, keep: Keep = "full", parts: Sequence[str] = PARTS
) -> Recording:
    """Record the calls of layers and their gradients while the user runs the model.

    The result is a context manager and the sequence of the recorded calls:

        with record(model, "layer4.*", keep="statistics") as recording:
            loss(model(x), y).backward()
        recording["layer4.0.conv1"][0].grad_outputs

    Each call of a layer is one entry, in the order in which the calls began. In-place layers, functions between layers,
    and nested, tuple, dict and None results are supported. The results of the model are bit for bit unchanged.

    Only calls of the thread that opened the block are recorded, including calls by explanations inside it. Calls that
    raise are not recorded. Calls that checkpointing repeats in the backward pass are not recorded either, so layers
    inside a reentrant checkpoint have no gradients. An edit that was opened before the recording is included in it. The
    hooks are removed when the block ends.

    Args:
        model: Any module, in any mode. Compiled parts run uncompiled.
        layers: Names, patterns as in "layer4.*.conv?", modules, classes of modules, or several of these; all layers by
            default. A module that has several names in the model is recorded under its first name.
        keep: Recorded form of each tensor, which determines the memory use. "full" is a copy on its device, which is
            part of the autograd graph if recorded in the forward pass. "cpu" is a detached copy on the CPU.
            "statistics" is shape and moments, a few hundred bytes. A function of the tensor may return any other value.
        parts: Some of "inputs", "outputs", "grad_inputs", "grad_outputs"; all by default.

    Raises:
        LayerError: A name or pattern matches no layer.
        MethodError: An unknown value of `keep` or `parts`.
        NotApplicableError: All the layers are inside TorchScript, where hooks do not run; or (while the model runs) a
            tensor is nested, quantised, or belongs to a transformation such as `torch.vmap`.
    """
    for part in parts:
        check_choice("parts", part, PARTS)
    if not callable(keep):
        keep = _KEEP[check_choice("keep", keep, tuple(_KEEP))]
    network = unwrap(model)
    modules = select_layers(network, layers)
    if not any(is_hookable(network, name, module) for name, module in modules.items()):
        require_hookable(network, modules)
    return Recording(modules, keep, parts)


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
