"""Calls as they are put down while they happen, and the hooks that follow their gradients."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

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
from .backward_log import Backward, Inbox, View
from .retention import Keeper

PARTS = ("inputs", "outputs", "grad_inputs", "grad_outputs")


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of one layer.

    Where nothing is kept of a part, it is None, or () where it is flat. A tensor stands in its place as it was kept: as
    itself, or as its statistics.
    """

    layer: str
    kind: str  # the module's class
    index: int  # how many calls of the layer came before
    inputs: tuple[Any, ...] | None  # the positional arguments, nested as they were given
    kwargs: dict[str, Any] | None
    output: Any  # nested as it was returned
    flat_inputs: tuple[Any, ...]  # of each tensor among the arguments, keywords included, as in `grad_inputs`
    outputs: tuple[Any, ...]  # of each tensor in the output, as in `grad_outputs`
    backwards: Sequence[Backward]
    """What each backward pass through this call brought, in their order."""

    @property
    def grad_inputs(self) -> tuple[Any, ...]:
        """What the call passed on to each tensor among its arguments in the last backward pass.

        None for a tensor that got none, () where no backward pass came by. Only this call's part: other uses of the
        same tensor are not in it. A tensor that the call was given twice has the sum in both places.
        """
        return self.backwards[-1].grad_inputs if self.backwards else ()

    @property
    def grad_outputs(self) -> tuple[Any, ...]:
        """The gradient of each tensor in the output in the last backward pass; None and () as for `grad_inputs`."""
        return self.backwards[-1].grad_outputs if self.backwards else ()

    def __repr__(self) -> str:
        """For example `Call(layer1.0.relu: ReLU, index=1, backwards=1)`."""
        return f"Call({self.layer or '(the model)'}: {self.kind}, index={self.index}, backwards={len(self.backwards)})"


class _Viewed(NamedTuple):
    """An argument that is a view, and what it is a view of."""

    at: int
    version: int  # of the argument
    base: Tensor
    edge: GradientEdge | None  # of the base


@dataclass(slots=True)
class _Begun:
    """A call that has not ended yet."""

    number: int
    layer: str
    kind: str
    inputs: tuple[Any, ...] | None
    kwargs: dict[str, Any] | None
    flat_inputs: tuple[Any, ...]
    since: int
    before: int  # how many calls of the layer had ended
    tensors: Sequence[Tensor] = ()
    edges: Sequence[GradientEdge | None] = ()
    views: Sequence[_Viewed] = ()


class Tape:
    """What the hooks write to. It does not hold their manager, which so dies with its block at the latest."""

    def __init__(self, keeper: Keeper, parts: Sequence[str]) -> None:
        self._keeper = keeper
        self._parts = frozenset(parts)
        self._gradients = bool(self._parts & {"grad_inputs", "grad_outputs"})
        self._calls: dict[int, Call | None] = {}  # by when they began
        self._begun = self._forgotten = 0  # how many calls have begun, and how many of them are forgotten
        self._counts: dict[str, int] = {}

    def __iter__(self) -> Iterator[Call]:
        """The calls that have ended, in the order in which they began."""
        return (call for call in list(self._calls.values()) if call is not None)

    def clear(self) -> None:
        """Forget all calls, those too that have not ended."""
        self._forgotten = self._begun
        self._calls.clear()
        self._counts.clear()

    def attach(self, hooks: HookManager, name: str, module: nn.Module) -> None:
        """Put down every call of a module from now on."""
        manager: HookManager = weakref.proxy(hooks)
        hooks.around(module, partial(self._begin, name, type(module).__name__), partial(self._end, manager))

    def _begin(self, name: str, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Begun | None:
        # What a backward pass calls again, under checkpointing, has been recorded already.
        if this_backward() != -1:
            return None
        keeps = "inputs" in self._parts
        inputs, flat = self._kept(args) if keeps else (None, ())
        if keeps and kwargs:
            kept_kwargs, more = self._kept(kwargs)
            flat += more
        else:
            kept_kwargs = kwargs if keeps else None
        begun = _Begun(
            number=self._begun,
            since=current_sequence_nr(),
            before=self._counts.get(name, 0),
            layer=name,
            kind=kind,
            inputs=inputs,
            kwargs=kept_kwargs,
            flat_inputs=flat,
        )
        self._calls[begun.number] = None
        self._begun += 1
        if self._gradients and torch.is_grad_enabled():
            begun.tensors = list(tree_tensors((args, kwargs)))
            begun.edges = [edge(each) for each in begun.tensors]
            begun.views = [
                _Viewed(at, tensor_version(each), base, edge(base))
                for at, each in enumerate(begun.tensors)
                if (base := view_base(each)) is not None
            ]
        return begun

    def _end(self, hooks: HookManager, begun: _Begun | None, output: Any) -> Any:
        if begun is None or begun.number < self._forgotten:
            return None
        kept, flat = self._kept(output) if "outputs" in self._parts else (None, ())
        backwards: Sequence[Backward] = ()
        given_back: set[int] = set()
        if self._gradients and torch.is_grad_enabled():
            given_back = {
                id(t) for t in tree_tensors(output) if t.requires_grad and not is_recorded_since(t, begun.since)
            }
            if given_back:
                # The layer returned what it was given, or a parameter. Another name for the same memory has a gradient
                # of its own: what comes through this layer.
                output = tree_map_tensors(output, lambda t: t.view_as(t) if id(t) in given_back else t)
            backwards = self._follow(hooks, begun, output)
        ended = self._counts.get(begun.layer, 0)
        if ended > begun.before:
            self._count_after(begun)
        self._calls[begun.number] = Call(
            layer=begun.layer,
            kind=begun.kind,
            index=begun.before,
            inputs=begun.inputs,
            kwargs=begun.kwargs,
            output=kept,
            flat_inputs=begun.flat_inputs,
            outputs=flat,
            backwards=backwards,
        )
        self._counts[begun.layer] = ended + 1
        return output if given_back else None

    def _count_after(self, begun: _Begun) -> None:
        """Let the calls that a layer made of itself come after the one that made them."""
        for number, call in self._calls.items():
            if call is not None and call.layer == begun.layer and number > begun.number:
                self._calls[number] = replace(call, index=call.index + 1)

    def _kept(self, nest: Any) -> tuple[Any, tuple[Any, ...]]:
        """What is kept of a nest, as it is nested, and flat."""
        keep = self._keeper.activation
        if isinstance(nest, Tensor):
            kept = keep(nest)
            return kept, (kept,)
        if type(nest) is tuple and len(nest) == 1 and isinstance(nest[0], Tensor):  # as nearly all arguments are
            alone = (keep(nest[0]),)
            return alone, alone
        flat: list[Any] = []

        def keep_both(tensor: Tensor) -> Any:
            flat.append(keep(tensor))
            return flat[-1]

        return tree_map_tensors(nest, keep_both), tuple(flat)

    def _follow(self, hooks: HookManager, begun: _Begun, output: Any) -> Inbox:
        """Hooks where gradients come into the call and where they leave it."""
        outputs = list(tree_tensors(output))
        # An argument that was worked on in place is a result too.
        leave = input_edges([*outputs, *begun.tensors], begun.edges, begun.since)
        past = _past_the_views(outputs, begun) if begun.views else {}
        inbox = Inbox(
            [len(past.get(at, each) if past else each) for at, each in enumerate(leave)],
            len(outputs),
            self._keeper.gradient,
        )
        if "grad_outputs" in self._parts:
            for at, tensor in enumerate(outputs):
                if tensor.requires_grad:
                    hooks.at_gradient(tensor, partial(inbox.put_output, at))
                    if view_base(tensor) is not None:
                        _mind_the_view(hooks, tensor, inbox, at, _viewed_by(tensor, begun.tensors, leave))
        if "grad_inputs" in self._parts:
            for at, places in enumerate(leave):
                for each in places if at not in past else ():
                    hooks.at_exit(begun.tensors[at], each, partial(inbox.put_input, at))
            for viewed in begun.views:
                for each in past.get(viewed.at, ()):
                    see = partial(_put_part, inbox, viewed.at, View(begun.tensors[viewed.at], viewed.base))
                    hooks.at_exit(viewed.base, each, see)
        return inbox


def _past_the_views(outputs: Sequence[Tensor], begun: _Begun) -> dict[int, list[InputEdge]]:
    """For each argument that was a view and was worked on in place: where its gradient leaves, past the view itself."""
    worked_on = [each for each in begun.views if tensor_version(begun.tensors[each.at]) != each.version]
    if not worked_on:
        return {}
    found = input_edges([*outputs, *begun.tensors], [each.edge for each in worked_on], begun.since)
    return {each.at: places for each, places in zip(worked_on, found, strict=True) if places}


def _put_part(inbox: Inbox, at: int, view: View, whole: Tensor) -> None:
    part = view.gradient(whole)
    if part is not None:
        inbox.put_input(at, part)


def _viewed_by(output: Tensor, given: Sequence[Tensor], leave: Sequence[Sequence[InputEdge]]) -> dict[int, Tensor]:
    """The arguments that an output is a view of, by their places."""
    return {
        at: tensor
        for at, (tensor, places) in enumerate(zip(given, leave, strict=True))
        if (view_base(output) is tensor or view_base(output) is view_base(tensor))
        and any(each.node is output.grad_fn for each in places)
    }


def _mind_the_view(hooks: HookManager, tensor: Tensor, inbox: Inbox, at: int, viewed: dict[int, Tensor]) -> None:
    """Take the gradient from what an output is a view of, where an operation in place leads past the view.

    Args:
        hooks: Of the recording.
        tensor: The output.
        inbox: Of the call.
        at: The place of the output.
        viewed: The arguments that the output is a view of, by their places.
    """
    base = view_base(tensor)
    if base is None or base.is_leaf or not base.requires_grad:
        return
    view = View(tensor, base)
    sources = {place: view.place_of(each) for place, each in viewed.items()}

    def see(whole: Tensor) -> None:
        if not inbox.has_output(at) and view.is_overwritten() and (part := view.gradient(whole)) is not None:
            inbox.put_output(at, part)
            for place, source in sources.items():
                inbox.put_input(place, view.passed_on(part, source))

    hooks.at_gradient(base, see)
