"""One forward of the model, and the gradients that methods read from it.

Any number of methods and targets share the forward. Each gradient is computed once, when a method first needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any, Literal, TypeVar, cast, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ..errors import LayerError, MethodError, TargetError
from ..hooks import autograd_graph as graph
from ..hooks.attention import AttentionCall, find_attention
from ..hooks.autograd_graph import CUT, INDEPENDENT, NO_GRADIENT, differentiate, nodes_between, reached_nodes
from ..hooks.manager import GradientRule, HookManager
from ..hooks.operations import OperationRecord, SavedValues
from ..hooks.pytree import tree_tensors
from ..hooks.rectifiers import Nonlinearities, find_nonlinearities
from ..io.axes import at_least_float32
from ..model.answer import Answer
from ..model.call import leaf, run_model
from ..model.layers import Layout, find, layout_of, read_calls
from ..validation import check_choice, check_integer
from .questions import Questions, explained_answer

T = TypeVar("T")

_READABLE_VALUES = (SavedValues.ACTIVATIONS, SavedValues.LINEAR, SavedValues.CHANGES)
# For each model, the kinds of values that its graph holds, so that no record is needed.
_NEEDS_NO_RECORD: WeakKeyDictionary[nn.Module, set[SavedValues]] = WeakKeyDictionary()

RecordedFrom = Literal["input", "layers", "none"]  # from the largest graph to the smallest


@dataclass(frozen=True, slots=True)
class Needs:
    """Parts of a forward that a method reads.

    `first | second` combines the needs of two methods that share a forward.

    Attributes:
        gradients: "input" records the autograd graph from the input on. "layers" records it from the first of the
            layers on, which saves the memory for all layers before it. "none" records no graph.
        backwards: The maximum number of backward passes for one target. The last pass frees the graph as it runs,
            which is up to 10 % faster than keeping the graph. None keeps the graph and sets no maximum.
        layers: The names of the layers whose outputs are kept.
        values: The values of operations that are recorded, for methods that walk the graph.
        modules: The names of the modules whose operations such a method distinguishes.
        attention: Whether the attention is read, so that the method only works on networks in which every token attends
            to all tokens.
        all_calls: Whether the outputs of all calls of the layers are kept, instead of only the last call.
    """

    gradients: RecordedFrom = "input"
    backwards: int | None = None
    layers: tuple[str, ...] = ()
    values: SavedValues = SavedValues.NOTHING
    modules: tuple[str, ...] = ()
    attention: bool = False
    all_calls: bool = False

    def __post_init__(self) -> None:
        """Raise MethodError for a value of another kind, which would fail only when the method runs."""
        check_choice("gradients", self.gradients, get_args(RecordedFrom))
        if self.backwards is not None:
            check_integer("backwards", self.backwards, least=0)
        layers: object = self.layers
        if not isinstance(layers, tuple) or not all(isinstance(name, str) for name in layers):
            raise MethodError(f"layers={layers!r} is not a tuple of names of layers")

    def __or__(self, other: Needs) -> Needs:
        """Combine the needs of two methods that share a forward."""
        is_counted = self.backwards is not None and other.backwards is not None
        # If one method stores only changed values, another may still read the values of the graph.
        differ = self.values != other.values and SavedValues.CHANGES in (self.values, other.values)
        return Needs(
            min(self.gradients, other.gradients, key=get_args(RecordedFrom).index),
            (self.backwards or 0) + (other.backwards or 0) if is_counted else None,
            tuple(dict.fromkeys(self.layers + other.layers)),
            SavedValues.ALL if differ else max(self.values, other.values),
            tuple(dict.fromkeys(self.modules + other.modules)),
            self.attention or other.attention,
            self.all_calls or other.all_calls,
        )


@lru_cache
def needs_with(needs: Needs, **changes: Any) -> Needs:
    """Return needs with some values changed."""
    return replace(needs, **changes)


class SharedForward:
    """One forward of a prepared model on a batch, with everything that methods read from it.

    Args:
        model: The model, in `prepared_for_attribution`.
        x: The batch (N, C, H, W).
        needs: The combined needs of the methods.
        targets: The number of targets, each with the backward passes that `needs` allows.

    Attributes:
        recording: Returns a context that records operations, if a method needs them.
    """

    def __init__(self, model: nn.Module, x: Tensor, needs: Needs, targets: int = 1) -> None:
        self.model, self.needs, self.targets = model, needs, targets
        self._backwards_left = None if needs.backwards is None else targets * needs.backwards
        kind = x.device.type
        self.autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        self._other: SharedForward | None = None
        self.x = leaf(x) if needs.gradients == "input" else x.detach()
        self._run(records=needs.values not in _NEEDS_NO_RECORD.get(model, ()))

    def _run(self, *, records: bool) -> None:
        model, needs = self.model, self.needs
        self._records = records and bool(needs.values)
        vars(self).pop("operations", None)
        self.recording: Callable[[], Any] = self.operations.recording if self._records else nullcontext
        with HookManager() as hooks:
            if needs.modules:
                self.operations.trace(hooks, model, needs.modules)
            captured = {}
            for name in dict.fromkeys(needs.layers):
                try:
                    layer = model.get_submodule(name)
                except AttributeError:  # a user's `Needs` may name any layer
                    layer = find(model, name)[1]
                captured[name] = hooks.capture(layer, record=needs.gradients == "layers")
            answer = explained_answer() if needs.gradients == "input" else None
            self.embeddings = _capture_embeddings(hooks, answer, self.x) if answer else []
            with torch.set_grad_enabled(needs.gradients == "input"), self.recording():
                self.output: Any = run_model(model, self.x)
        self.layers: dict[str, Tensor] = {}
        self.earlier_calls: dict[tuple[str, int], Tensor] = {}
        for name, calls in captured.items():
            read = read_calls(model, self.x, name, calls, all_calls=needs.all_calls) if len(calls) > 1 else calls
            self.layers[name] = _readable(name, read[-1] if read else None)
            for index, output in enumerate(read[:-1]):
                self.earlier_calls[name, index] = _readable(name, output)
        self._layouts: dict[str, Layout] = {}

    @cached_property
    def operations(self) -> OperationRecord:
        """The record of the operations, with the values that the methods need."""
        return OperationRecord(self.x, self.needs.values)

    def read_graph(self, nodes: Sequence[Node]) -> bool:
        """Read operations from the graph if they were not recorded. Return False if the model must run with a record.

        The first call of a model records its operations. The nodes between scores and image then show whether later
        calls need a record.
        """
        values, unrecorded = self.needs.values, _NEEDS_NO_RECORD.setdefault(self.model, set())
        if values not in _READABLE_VALUES:
            return True
        is_whole = self.operations.read(nodes, replaces=not self._records)
        (unrecorded.add if is_whole else unrecorded.discard)(values)
        if is_whole or self._records:
            return True
        self._run(records=True)
        return False

    def on(self, x: Tensor) -> SharedForward:
        """Return a forward of another batch with the same layers and record. The last such forward is cached."""
        if self._other is None or not torch.equal(self._other.x, x):
            self._other = None  # free its memory first
            self._other = SharedForward(self.model, x, Needs(layers=self.needs.layers, values=self.needs.values))
        return self._other

    def layout(self, name: str) -> Layout:
        """Return the layout of a stored layer's output. Raises LayerError if it has no spatial extent."""
        if name not in self.layers:
            raise MethodError(
                f'layer "{name}" is not among those that the method needs: Needs(layers={self.needs.layers})'
            )
        if name not in self._layouts:
            self._layouts[name] = layout_of(self.model, name, self.layers[name], self.x)
        return self._layouts[name]

    def count_backward(self) -> bool:
        """Count a backward pass. Return whether it is the last pass, which may free the graph."""
        if self._backwards_left is not None:
            self._backwards_left -= 1
            if self._backwards_left < 0:
                raise MethodError("more backward passes than the methods' `needs` declare: increase `backwards`")
        return self._backwards_left == 0


class TargetGradients:
    """Scores, activations and gradients of one forward for one target.

    Args:
        forward: The forward.
        target: The target.
        reads: Whether methods read the operations of the graph. If the graph does not hold enough of them, the forward
            runs again.

    Attributes:
        forward: The forward.
        target: The target.
        x: (N, C, H, W) the batch.
        scores: (N,) the scores.
        scores_in_graph: The scores, with the graph of the forward.
        attention: The attention calls on which the scores depend, in order, if the forward reads attention.
        unread_softmaxes: Softmaxes before the last of these calls that are not part of an attention call.
        computed: The values that methods share, by key; see `shared`.
    """

    def __init__(self, forward: SharedForward, target: Questions, *, reads: bool = True) -> None:
        self.forward = forward
        self.target = target
        with forward.recording():
            self.scores_in_graph = target(forward.output)
        if reads and forward.needs.values and self.scores_in_graph.requires_grad and not forward.read_graph(self.nodes):
            del self.nodes
            with forward.recording():
                self.scores_in_graph = target(forward.output)
        self.x = forward.x.detach()  # (N, C, H, W)
        self.scores = self.scores_in_graph.detach()  # (N,)
        self.computed: list[tuple[Any, Any]] = []
        self._embedding_gradients: list[Tensor | None] = []
        self.attention: list[AttentionCall] = []
        self.unread_softmaxes: list[Node] = []
        if forward.needs.attention:  # before a backward pass frees the graph
            self.attention, self.unread_softmaxes = find_attention(self.nodes, len(self.x))

    @cached_property
    def nodes(self) -> list[Node]:
        """The nodes of the autograd graph between the scores and the input, in the order of a backward pass."""
        self.require_gradient()
        return nodes_between(self.scores_in_graph, self.forward.x)

    def shared(self, key: Any, compute: Callable[[], T]) -> T:
        """Return a value that methods share, such as a walk, by its key. The first method computes it."""
        for stored, value in self.computed:
            if stored == key:
                return cast("T", value)
        self.computed.append((key, compute()))
        return cast("T", self.computed[-1][1])

    def on(self, x: Tensor) -> TargetGradients:
        """Return the scores of another batch for the same target."""
        with self.forward.autocast:
            return TargetGradients(self.forward.on(x), self.target)

    def activation(self, layer: str, call: int | None = None) -> Tensor:
        """Return the output of a layer as maps (N, K, h, w), of its last call or of one of the earlier calls."""
        layout = self.forward.layout(layer)
        output = self.forward.layers[layer] if call is None else self.forward.earlier_calls[layer, call]
        return at_least_float32(layout(output.detach()))

    def gradient(self, layer: str, call: int | None = None) -> Tensor:
        """Return the gradient of the scores at a layer (N, K, h, w), at its last call or one of the earlier calls."""
        layout = self.forward.layout(layer)
        return at_least_float32(layout(self._shared_gradients[layer if call is None else (layer, call)]))

    def node_gradient(self, node: Node) -> Tensor:
        """Return the gradient at the result of an attention call, in the shape of the result."""
        return self._shared_gradients[node]

    def gradient_at(self, node: Node) -> Tensor:
        """Return the gradient of the scores at the first result of a node, by a separate backward pass."""
        (grad,) = self._gradients([GradientEdge(node, 0)])
        return cast("Tensor", grad)

    @cached_property
    def _shared_gradients(self) -> dict[Any, Tensor]:
        """The gradients at all stored layers, earlier calls of them and attention calls, from one backward pass."""
        layers: dict[Any, Tensor] = {**self.forward.layers, **self.forward.earlier_calls}
        ends: dict[Any, Tensor | GradientEdge] = {end: part for end, part in layers.items() if part.requires_grad}
        for call in self.attention:
            ends[call.node] = GradientEdge(call.node, 0)
        gradients: dict[Any, Any] = dict(zip(ends, self._gradients([*ends.values()]), strict=True))
        if not any(map(torch.is_tensor, gradients.values())):
            raise LayerError(no_gradient_message(*self.forward.layers))
        for end, output in layers.items():
            if gradients.get(end) is None:
                gradients[end] = torch.zeros_like(output)
        return gradients

    def input_gradient(self) -> Tensor:
        """Return the gradient of the scores at the input (N, C, H, W)."""
        return self.shared("input gradient", self._backward_to_input)

    @cached_property
    def nonlinearities(self) -> Nonlinearities:
        """The nonlinearities between the scores and the input."""
        self.require_gradient()
        return find_nonlinearities(self.scores_in_graph, self.forward.x)

    def rewritten_gradient(self, rules: Iterable[tuple[Node, GradientRule]]) -> Tensor:
        """Return the gradient at the input (N, C, H, W), rewritten by rules at some operations."""
        with HookManager() as hooks:
            hooks.rewrite(rules)
            return self._backward_to_input()

    def token_shares(self) -> Tensor | None:
        """Return the gradient times the embedding of each token of an answer (N, L); None for an image.

        It takes part in the backward pass of `input_gradient`. It is None if the embeddings do not hold the image.
        """
        pairs = zip(self.forward.embeddings, self._embedding_gradients, strict=False)
        held = ((tokens, grad) for tokens, grad in pairs if grad is not None and self.embeddings_hold_image)
        return next(((tokens.detach() * grad).sum(-1) for tokens, grad in held), None)

    @cached_property
    def embeddings_hold_image(self) -> bool:
        """Whether every path from the scores to the image passes the embeddings; in Qwen3-VL, some avoid them."""
        passages = {graph.source_edge(tokens)[0] for tokens in self.forward.embeddings}
        return get_gradient_edge(self.forward.x).node not in reached_nodes(self.nodes[:1], passages.__contains__)

    def _backward_to_input(self) -> Tensor:
        if self.forward.needs.gradients != "input":
            self._require_recorded("input")
        gradient, *self._embedding_gradients = self._gradients([self.forward.x, *self.forward.embeddings])
        if gradient is None:
            raise TargetError(INDEPENDENT)
        return gradient

    def _gradients(self, ends: Sequence[Tensor | GradientEdge]) -> Sequence[Tensor | None]:
        """Return the gradients of the scores at recorded results of the forward; None for a result without influence.

        Raises:
            NotApplicableError: A part of the model is checkpointed with use_reentrant=True.
            MethodError: The methods run more backward passes than their `needs` declare.
        """
        self.require_gradient()
        scores, retain = self.scores_in_graph, not self.forward.count_backward()
        return differentiate(scores, ends, torch.ones_like(scores), retain_graph=retain) if ends else ()

    def require_gradient(self) -> None:
        """Check that the scores have a gradient.

        Raises:
            LayerError: The scores have a gradient, but not at the layers from which gradients are recorded.
            TargetError: The scores have no gradient.
        """
        if self.scores_in_graph.requires_grad:
            return
        self._require_recorded("layers")
        if self.forward.needs.gradients == "layers" and self._has_gradient():
            raise LayerError(no_gradient_message(*self.forward.layers))
        raise TargetError(NO_GRADIENT)

    def _require_recorded(self, start: RecordedFrom) -> None:
        """Raise MethodError if the method's `needs` record a smaller graph than from `start` on."""
        recorded, sizes = self.forward.needs.gradients, get_args(RecordedFrom)
        if sizes.index(recorded) > sizes.index(start):
            raise MethodError(f'the method reads gradients that its needs do not record: Needs(gradients="{recorded}")')

    def _has_gradient(self) -> bool:
        """Return whether the scores have a gradient at the input, by running the model again, for an error only."""
        whole = SharedForward(self.forward.model, self.forward.x, Needs())
        scores = self.target(whole.output)
        return scores.requires_grad and differentiate(scores.sum(), [whole.x])[0] is not None


def no_gradient_message(*layers: str) -> str:
    """Return the message for layers that no gradient reaches."""
    names = ", ".join(f'"{layer}"' for layer in layers)
    return (
        f"no gradient of the score reaches layer {names}: the score does not depend on layer {names}, or {CUT}; choose "
        "a layer from which the score is computed, or pass no layer to use the last such layer"
    )


def _capture_embeddings(hooks: HookManager, answer: Answer, x: Tensor) -> list[Tensor]:
    """Return a list that receives the embeddings (N, L, D) of all tokens of an answer."""
    captured = list[Tensor]()
    if answer.reader is None:
        return captured
    shape = (len(x), len(answer.is_image))

    def begin(*arguments: Any) -> None:
        embeddings = (part for part in tree_tensors(arguments) if part.requires_grad and part.shape[:-1] == shape)
        captured[:] = captured or islice(embeddings, 1)

    hooks.around(answer.model.get_submodule(answer.reader), begin, lambda token, output: None)
    return captured


def _readable(name: str, output: Tensor | None) -> Tensor:
    """Return the output of a layer. Raises LayerError without one, or for a tensor that cannot be read."""
    if output is None:
        hint = "(hooks do not run inside a scripted module)"
        raise LayerError(f'layer "{name}" was not run in this forward, or returned no tensor {hint}')
    if output.is_nested:
        problem = f'layer "{name}" returns nested tensors, as nn.TransformerEncoder does for a padding mask'
        raise LayerError(f"{problem}; build the encoder with enable_nested_tensor=False")
    if not output.is_floating_point():
        raise LayerError(f'the output of layer "{name}" is {output.dtype}; expected floating-point activations')
    return output
