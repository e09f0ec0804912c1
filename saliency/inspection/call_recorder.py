"""Record the calls of modules, and the gradients at their inputs and outputs."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils.weak import WeakTensorKeyDictionary

from ..hooks.autograd_graph import (
    InputEdge,
    current_sequence_nr,
    edge,
    input_edges,
    is_recorded_since,
    tensor_version,
    this_backward,
    view_base,
)
from ..hooks.manager import HookManager
from ..hooks.pytree import tree_map_tensors, tree_tensors
from .moments import Moments, moments_later, require_plain

PARTS = ("inputs", "outputs", "grad_inputs", "grad_outputs")


class TensorStatistics:
    """Shape and moments of a tensor. The tensor itself is not stored.

    Attributes:
        shape: The shape of the tensor.
        dtype: The dtype of the tensor.
        device: The device of the tensor.
        is_estimate: Whether the moments come from a sample of the values.
    """

    def __init__(self, tensor: Tensor, *, sample: bool = False) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.is_estimate = sample
        self._later: Callable[[], Moments] | None = moments_later(tensor, sample=sample)

    @cached_property
    def moments(self) -> Moments:
        """Mean, standard deviation, extremes, norm, zeros, NaN and infinities, summed in double precision.

        With `is_estimate`, all of these are estimated unless the tensor is small. The extremes are those of the sample,
        and NaN and infinity can be missed.
        """
        return self._later() if self._later is not None else Moments()

    def __getstate__(self) -> object:
        """Return the state with the computed moments, for `pickle` and `deepcopy`."""
        return {**vars(self), "moments": self.moments, "_later": None}

    def __repr__(self) -> str:
        """Return a text such as `(1, 64, 112, 112) float32, mean 0.21, std 0.34`."""
        dtype = str(self.dtype).removeprefix("torch.")
        about = "about " if self.is_estimate else ""
        return f"{self.shape} {dtype}, mean {about}{self.moments.mean:.3g}, std {about}{self.moments.std:.3g}"


class Backward(NamedTuple):
    """Gradients at one call in one backward pass; None for a tensor without a gradient."""

    grad_inputs: tuple[Any, ...]  # one entry per tensor among the arguments
    grad_outputs: tuple[Any, ...]  # one entry per tensor in the output


@dataclass(frozen=True, slots=True, eq=False)
class Call:
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
    backwards: Sequence[Backward] = ()
    """One entry per backward pass through this call, in order."""

    @property
    def grad_inputs(self) -> tuple[Any, ...]:
        """Gradients with respect to each tensor among the arguments in the last backward pass, through this call only.

        An entry is None for a tensor without a gradient; the tuple is empty without a backward pass. Other uses of the
        same tensor are not included. A tensor that is passed twice has the sum in both positions.
        """
        return self.backwards[-1].grad_inputs if self.backwards else ()

    @property
    def grad_outputs(self) -> tuple[Any, ...]:
        """Gradient of each tensor in the output in the last backward pass; None and () as for `grad_inputs`."""
        return self.backwards[-1].grad_outputs if self.backwards else ()

    def __repr__(self) -> str:
        """Return a text such as `Call(layer1.0.relu: ReLU, index=1, backwards=1)`."""
        return f"Call({self.layer or '(the model)'}: {self.kind}, index={self.index}, backwards={len(self.backwards)})"


class _View(NamedTuple):
    """View of a base tensor, and its position in the memory of the base.

    After an in-place operation on a view, autograd passes the gradient to the base and bypasses the view.
    """

    tensor: weakref.ref[Tensor]
    version: int
    position: tuple[Sequence[int], Sequence[int], int]  # size, stride and offset
    base_size: Sequence[int]
    base_stride: Sequence[int]

    @classmethod
    def of(cls, tensor: Tensor, base: Tensor) -> _View:
        offset = int(tensor.storage_offset() - base.storage_offset())
        position = (tensor.size(), tensor.stride(), offset)
        return cls(weakref.ref(tensor), tensor_version(tensor), position, base.size(), base.stride())

    def is_overwritten(self) -> bool:
        tensor = self.tensor()
        return tensor is None or tensor_version(tensor) != self.version

    def gradient(self, of_base: Tensor) -> Tensor | None:
        """Return the part of the base's gradient that belongs to the view; None for a base with gaps in memory."""
        laid_out = torch.empty_strided(self.base_size, self.base_stride, dtype=of_base.dtype, device=of_base.device)
        if laid_out.untyped_storage().nbytes() != of_base.numel() * of_base.element_size():
            return None
        return laid_out.copy_(of_base).as_strided(*self.position)

    def gradient_of(self, source: _View, gradient: Tensor) -> Tensor:
        """Return the gradient of another view `source` of the base, which contains this view."""
        laid_out = torch.empty_strided(self.base_size, self.base_stride, dtype=gradient.dtype, device=gradient.device)
        laid_out.zero_().as_strided(*self.position).copy_(gradient)
        return laid_out.as_strided(*source.position)


@dataclass(slots=True)
class _Pass:
    """Gradients of one backward pass that may still be running."""

    inputs: list[Any]
    outputs: list[Any]
    sums: dict[int, tuple[int, Tensor]] = field(default_factory=dict)  # by input: number of summands and their sum


class BackwardLog(Sequence[Backward]):
    """Gradients at one call, one entry per backward pass, in order.

    Args:
        summands: For each tensor among the arguments, the number of operations that contribute to its gradient.
        outputs: The number of tensors in the output.
        keep: Function from a gradient to its recorded form.
    """

    def __init__(self, summands: Sequence[int], outputs: int, keep: Callable[[Tensor], Any]) -> None:
        self._summands = tuple(summands)
        self._outputs = outputs
        self._keep = keep
        self._passes: dict[int, _Pass] = {}

    def set_output_grad(self, index: int, gradient: Tensor) -> None:
        """Store the gradient of a tensor in the output."""
        self._current().outputs[index] = self._keep(gradient)

    def add_input_grad(self, index: int, part: Tensor) -> None:
        """Add one summand of the gradient of a tensor among the arguments."""
        require_plain(part)
        current = self._current()
        count, known = current.sums.pop(index, (0, None))
        total = part if known is None else known + part
        if count + 1 < self._summands[index]:
            current.sums[index] = count + 1, total
        else:
            current.inputs[index] = self._keep(total)

    def has_output_grad(self, index: int) -> bool:
        """Return whether the running backward pass has stored the gradient of a tensor in the output."""
        current = self._passes.get(this_backward())
        return current is not None and current.outputs[index] is not None

    def _current(self) -> _Pass:
        number = this_backward()
        if number not in self._passes:
            self._passes[number] = _Pass([None] * len(self._summands), [None] * self._outputs)
        return self._passes[number]

    def __len__(self) -> int:
        return len(self._passes)

    @overload
    def __getitem__(self, index: int) -> Backward: ...
    @overload
    def __getitem__(self, index: slice) -> list[Backward]: ...
    def __getitem__(self, index: int | slice) -> Backward | list[Backward]:
        passes = list(self._passes.values())[index]
        return [self._read(one) for one in passes] if isinstance(passes, list) else self._read(passes)

    def _read(self, one: _Pass) -> Backward:
        # A backward pass that ends at an inner tensor may omit summands.
        for index, (_, total) in one.sums.items():
            one.inputs[index] = self._keep(total)
        one.sums.clear()
        return Backward(tuple(one.inputs), tuple(one.outputs))

    def __reduce__(self) -> Any:
        """Copy as a list of the backward passes so far."""
        return list, (self[:],)


class _ViewInput(NamedTuple):
    """Argument that is a view, and its base."""

    position: int
    version: int  # of the argument
    base: Tensor
    edge: GradientEdge | None  # of the base


class _OpenCall(NamedTuple):
    """Call that has begun but not ended."""

    number: int
    call: Call
    since: int
    tensors: Sequence[Tensor]
    edges: Sequence[GradientEdge | None]
    views: Sequence[_ViewInput]


class CallRecorder:
    """Recorder of the calls of modules.

    The recorder references the hook manager only weakly, so that the manager is freed with its block.

    Args:
        keep: Function from a tensor to its recorded form.
        parts: Some of `PARTS`.
    """

    def __init__(self, keep: Callable[[Tensor], Any], parts: Sequence[str]) -> None:
        self._make = keep
        self._parts = frozenset(parts)
        self._has_gradients = bool(self._parts & {"grad_inputs", "grad_outputs"})
        self._kept: MutableMapping[Tensor, tuple[int, Any]] = (
            WeakTensorKeyDictionary()
        )  # the output of a layer is often the input of another one
        self._calls: dict[int, Call | None] = {}  # in the order in which they began
        self._begun = 0
        self._counts: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Call]:
        """Yield the finished calls, in the order in which they began."""
        return (call for call in list(self._calls.values()) if call is not None)

    def clear(self) -> None:
        """Remove all calls, including unfinished ones."""
        self._calls.clear()
        self._counts.clear()

    def attach(self, hooks: HookManager, name: str, module: nn.Module) -> None:
        """Record every call of a module from now on."""
        manager: HookManager = weakref.proxy(hooks)
        hooks.around(module, partial(self._begin, name, type(module).__name__), partial(self._end, manager))

    def _begin(self, name: str, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _OpenCall | None:
        # Skip calls that checkpointing repeats in the backward pass.
        if this_backward() != -1:
            return None
        since = current_sequence_nr()
        (inputs, named), flat = self._keep_all((args, kwargs)) if "inputs" in self._parts else ((None, None), ())
        call = Call(name, kind, self._counts[name], inputs, named, flat_inputs=flat)
        number = self._begun
        self._calls[number] = None
        self._begun += 1
        self._counts[name] += 1
        if not self._has_gradients or not torch.is_grad_enabled():
            return _OpenCall(number, call, since, (), (), ())
        tensors = list(tree_tensors((args, kwargs)))
        views = [
            _ViewInput(index, tensor_version(tensor), base, edge(base))
            for index, tensor in enumerate(tensors)
            if (base := view_base(tensor)) is not None
        ]
        return _OpenCall(number, call, since, tensors, [edge(tensor) for tensor in tensors], views)

    def _end(self, hooks: HookManager, begun: _OpenCall | None, output: Any) -> Any:
        if begun is None or begun.number not in self._calls:
            return None
        kept, flat = self._keep_all(output) if "outputs" in self._parts else (None, ())
        backwards: Sequence[Backward] = ()
        returned: set[int] = set()
        if self._has_gradients and torch.is_grad_enabled():
            older = (t for t in tree_tensors(output) if t.requires_grad and not is_recorded_since(t, begun.since))
            returned = {id(tensor) for tensor in older}
            if returned:
                # The layer returned an argument or a parameter. An alias separates the gradient through this layer from
                # that of other uses.
                output = tree_map_tensors(output, lambda t: t.view_as(t) if id(t) in returned else t)
            backwards = self._follow(hooks, begun, output)
        self._calls[begun.number] = replace(begun.call, output=kept, outputs=flat, backwards=backwards)
        return output if returned else None

    def _keep_all(self, tree: Any) -> tuple[Any, tuple[Any, ...]]:
        """Return the recorded form of all tensors of a tree, nested and flat."""
        flat: list[Any] = []

        def keep(tensor: Tensor) -> Any:
            flat.append(self._keep(tensor))
            return flat[-1]

        return tree_map_tensors(tree, keep), tuple(flat)

    def _keep(self, tensor: Tensor) -> Any:
        """Return the recorded form of a tensor. An unchanged tensor gives the same object again."""
        require_plain(tensor)
        if tensor.is_inference():  # without a version counter
            return self._make(tensor)
        known = self._kept.get(tensor)
        if known is None or known[0] != tensor_version(tensor):
            known = self._kept[tensor] = (tensor_version(tensor), self._make(tensor))
        return known[1]

    def _keep_gradient(self, gradient: Tensor) -> Any:
        # Detach: a graph that references its own gradients would never be freed.
        return self._keep(gradient.detach()) if gradient.requires_grad else self._keep(gradient)

    def _follow(self, hooks: HookManager, begun: _OpenCall, output: Any) -> BackwardLog:
        """Register hooks for the gradients at the outputs and at the inputs of the call."""
        outputs = list(tree_tensors(output))
        # Arguments may be changed in place, so they are results too.
        results = [*outputs, *begun.tensors]
        exits = input_edges(results, begun.edges, begun.since)
        base_exits = _base_exits(results, begun)
        counts = [len(base_exits.get(index, edges)) for index, edges in enumerate(exits)]
        log = BackwardLog(counts, len(outputs), self._keep_gradient)
        if "grad_outputs" in self._parts:
            for index, tensor in enumerate(outputs):
                if tensor.requires_grad:
                    hooks.at_gradient(tensor, partial(log.set_output_grad, index))
                    _watch_base(hooks, log, index, tensor, begun.tensors, exits)
        if "grad_inputs" in self._parts:
            for index, edges in enumerate(exits):
                for input_edge in edges if index not in base_exits else ():
                    hooks.at_input_edge(begun.tensors[index], input_edge, partial(log.add_input_grad, index))
            for viewed in begun.views:
                for input_edge in base_exits.get(viewed.position, ()):
                    view = _View.of(begun.tensors[viewed.position], viewed.base)
                    hooks.at_input_edge(viewed.base, input_edge, partial(_add_part, log, viewed.position, view))
        return log


def _base_exits(results: Sequence[Tensor], begun: _OpenCall) -> dict[int, list[InputEdge]]:
    """Return the input edges to the base of each argument that is a view and was changed in place."""
    changed = [view for view in begun.views if tensor_version(begun.tensors[view.position]) != view.version]
    edges = input_edges(results, [view.edge for view in changed], begun.since) if changed else []
    return {view.position: exits for view, exits in zip(changed, edges, strict=True) if exits}


def _add_part(log: BackwardLog, index: int, view: _View, of_base: Tensor) -> None:
    part = view.gradient(of_base)
    if part is not None:
        log.add_input_grad(index, part)


def _watch_base(
    hooks: HookManager,
    log: BackwardLog,
    index: int,
    output: Tensor,
    inputs: Sequence[Tensor],
    exits: Sequence[Sequence[InputEdge]],
) -> None:
    """Take the gradient of an output view from its base, if a later in-place operation bypasses the view."""
    base = view_base(output)
    if base is None or base.is_leaf or not base.requires_grad:
        return
    view = _View.of(output, base)
    sources = {
        at: _View.of(tensor, base)
        for at, (tensor, edges) in enumerate(zip(inputs, exits, strict=True))
        if (base is tensor or base is view_base(tensor))
        and any(input_edge.node is output.grad_fn for input_edge in edges)
    }

    def take_part(of_base: Tensor) -> None:
        if log.has_output_grad(index) or not view.is_overwritten():
            return
        part = view.gradient(of_base)
        if part is not None:
            log.set_output_grad(index, part)
            for at, source in sources.items():
                log.add_input_grad(at, view.gradient_of(source, part))

    hooks.at_gradient(base, take_part)
