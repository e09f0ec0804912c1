"""Walk the autograd graph of one call from the score to the input, with a rule for each operation.

The walk carries G, where the relevance of a value x is R = x * G. In this form sums, views, poolings and products with
constants keep their gradient, and only few operations need a rule. A node without a rule is called as a function, so
nothing is computed twice.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain, repeat, starmap
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from ..attribution.forward import TargetGradients
from ..errors import NotApplicableError
from ..hooks import operations
from ..hooks.autograd_graph import Gradients, is_python_function, is_tracing, next_functions, result_specs, source_edge
from ..io.axes import at_least_float32

Edge = tuple[Node, int]
# Fractions of the score below this are rounding errors.
_ROUNDING = 1e-5
# Operations, besides views and `add`, whose result is not negative if no operand is. Where the result is 0, so are the
# elements of operands that it reads.
_POOLS = frozenset(
    {"max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d", "mean", "_adaptive_avg_pool2d"}
    | {"_adaptive_avg_pool3d", "sum", "cat", "stack", "constant_pad_nd", "clone"}
)
_MOVES = operations.MOVES | {"clone", "copy", "_to_copy", "upsample_nearest2d"}


class Visit(NamedTuple):
    """One node of a walk, with G at its results.

    Attributes:
        walk: The walk.
        node: The node.
        operation: The operation of the node; None if it was not recorded.
        grads: G at each result; None for a result without influence.
        on_path: Whether each operand depends on the image.
    """

    walk: Walk
    node: Node
    operation: operations.Operation | None
    grads: Gradients
    on_path: list[bool]

    @property
    def grad(self) -> Tensor:
        """G at the first result that has any."""
        first = self.grads[0]
        return next(grad for grad in self.grads if grad is not None) if first is None else first

    def plain(self) -> Gradients:
        """Return the gradients that the operation passes to its operands."""
        node: Any = self.node
        result: Any = node.apply(*self.grads) if is_python_function(node) else node(*self.grads)
        return result if isinstance(result, tuple) else (result,)


NodeRule = Callable[[Visit], Gradients]


class ChannelFactors(NamedTuple):
    """A batch norm with constant statistics: a factor and a constant (C,) for each channel, in at least float32.

    Attributes:
        scale: The factors.
        shift: The constants.
        relative: The constants divided by the factors; None if the norm is not divided by its factors.
    """

    scale: Tensor
    shift: Tensor
    relative: Tensor | None

    def of_channels(self, numbers: Tensor) -> ChannelFactors:
        """Return the factors of some channels, numbered from 1; for 0, a factor of 1 and a constant of 0."""
        scale, shift = (F.pad(part, (1, 0), value=i)[numbers.long()] for part, i in ((self.scale, 1), (self.shift, 0)))
        return ChannelFactors(scale, shift, None if self.relative is None else shift / scale)


class CallGraph:
    """The autograd graph between the scores and the image of one call, listed once.

    Args:
        grads: The forward, with its record, and the scores.

    Attributes:
        record: The record of the operations.
        nodes: The nodes, in the order of a backward pass.
        end: The edge at the image.
        on_path: The nodes and the node of the image.
        operations: The operation of each node, None if it was not recorded.
        next: The edges to the operands of each node.
        operands: The nodes of these operands.
        reads: Whether each of these operands depends on the image.
        users: For each result, the number of operands that read it.
        specs: The shape and type of each result, by node.
        is_complex: Whether a result is complex.
        linear: The convolutions and matrix products with weights, in the order of a backward pass.
        attention: The attention on which the scores depend, in that order: fused, or products of two signals.
    """

    def __init__(self, grads: TargetGradients) -> None:
        self.record: operations.OperationRecord = grads.forward.operations
        self.nodes = grads.nodes
        self.end: Edge = get_gradient_edge(grads.forward.x)[:2]
        self.on_path = {*self.nodes, self.end[0]}
        self.operations = dict(zip(self.nodes, map(self.record.operation, self.nodes), strict=True))
        self.specs = result_specs(self.on_path)
        self.is_complex = any(map(attrgetter("dtype.is_complex"), chain.from_iterable(self.specs.values())))
        self.next: dict[Node, tuple[tuple[Node | None, int], ...]] = {}
        self.operands: dict[Node, list[Node | None]] = {}
        self.reads: dict[Node, list[bool]] = {}
        self.users: Counter[tuple[Node | None, int]] = Counter()
        self.linear: dict[Node, None] = {}
        self._scales: list[Tensor] = []  # of batch norms with equal options
        self.attention: list[Node] = []
        for node, operation in self.operations.items():
            self.next[node] = edges = next_functions(node)
            self.operands[node] = operands = list(map(itemgetter(0), edges))
            self.reads[node] = reads = list(map(self.on_path.__contains__, operands))
            self.users.update(edges)
            name = "" if operation is None else operation.name
            if name in operations.LINEAR and not all(reads[-2:]):
                self.linear[node] = None
            elif name in ("bmm", "baddbmm") or (operation is not None and operations.is_attention(operation.op)):
                self.attention.append(node)

    @classmethod
    def of(cls, grads: TargetGradients) -> CallGraph:
        """Return the graph of the scores, which is listed once."""
        return grads.shared(cls, partial(cls, grads))

    @cached_property
    def first_and_last(self) -> tuple[set[Node], set[Node]]:
        """The linear operations before which no other runs, and the linear operations after which no other runs."""
        followers: defaultdict[Node | None, list[Node | None]] = defaultdict(list)
        for node, operands in self.operands.items():
            for operand in operands:
                followers[operand].append(node)
        return self._outermost(self.nodes[::-1], followers), self._outermost(self.nodes, self.operands)

    def _outermost(self, nodes: Iterable[Node], following: Mapping[Any, Sequence[Node | None]]) -> set[Node]:
        """Return the linear operations that come before all others on each path, given the nodes after each node."""
        outermost: set[Node] = set()
        covered: set[Node | None] = set()
        for node in nodes:
            if node in self.linear and node not in covered:
                outermost.add(node)
            if node in self.linear or node in covered:
                covered.update(following[node])
        return outermost

    def after(self, first: Node) -> set[Node]:
        """Return the nodes that depend on the result of a node."""
        after = {first}
        for node in reversed(self.nodes):
            if not after.isdisjoint(self.operands[node]):
                after.add(node)
        return after - {first}

    @cached_property
    def rectified(self) -> set[Node | None]:
        """The rectifiers, and the operations that only pool, add or move their results, so that none is negative."""
        rectified: set[Node | None] = set()
        if self.is_complex:  # a conjugate is a view
            return rectified
        for node, operation in reversed(self.operations.items()):
            if operation is None:
                continue
            args, operands = operation.kept_args, self.operands[node]
            is_sum = operation.name == "add" and len(operands) == 2 and args.get("alpha", 1) == 1
            is_pool = is_sum or (operation.name in _POOLS and not args.get("value")) or operations.is_view(operation.op)
            if is_rectifier(node, operation) or (is_pool and rectified.issuperset(operands)):
                rectified.add(node)
        return rectified

    @cached_property
    def channel_factors(self) -> dict[Node, ChannelFactors]:
        """The factors of the batch norms with constant statistics. Norms with equal options are computed at once."""
        groups: defaultdict[Any, dict[Node, list[Tensor]]] = defaultdict(dict)
        for node, operation in self.operations.items():
            if (
                operation is not None
                and operations.is_batch_norm(operation.op)
                and not operations.uses_batch_statistics(operation)
            ):
                args, var = operation.args, operation.args["running_var"]
                weight = torch.ones_like(var) if args["weight"] is None else args["weight"]
                bias = torch.zeros_like(var) if args["bias"] is None else args["bias"]
                options = var.device, var.dtype, args.get("eps", args.get("epsilon"))
                groups[options][node] = [var, args["running_mean"], weight, bias]
        factors = dict[Node, ChannelFactors]()
        for (*_, eps), norms in groups.items():
            var, mean, weight, bias = (at_least_float32(torch.cat(rows)) for rows in zip(*norms.values(), strict=True))
            scale = (var + eps).rsqrt() * weight
            shift = bias - mean * scale
            self._scales.append(scale)
            sizes = [len(var) for var, *_ in norms.values()]
            parts = (whole.split(sizes) for whole in (scale, shift, shift / scale))
            factors |= dict(zip(norms, starmap(ChannelFactors, zip(*parts, strict=True)), strict=True))
        return factors

    @cached_property
    def positive_norms(self) -> set[Node]:
        """The batch norms of `channel_factors` whose factors are all positive."""
        scales = [factors.scale for factors in self.channel_factors.values()]
        if all(float(whole.min()) > 0 for whole in self._scales):
            return {*self.channel_factors}
        lowest = torch.stack([scale.min().to(scales[0].device) for scale in scales]).tolist()
        return {node for node, least in zip(self.channel_factors, lowest, strict=True) if least > 0}


def is_rectifier(node: Node, operation: operations.Operation) -> bool:
    """Return whether a node is a ReLU or ReLU6, whose result is nowhere negative."""
    is_clamp = operation.name == "hardtanh" and operation.kept_args.get("min_val", -1) == 0
    return (operation.name == "relu" or is_clamp) and type(node).__name__ != "CopySlices"


class Walk:
    """One pass from the scores to the image.

    Args:
        grads: The forward, with its record, and the scores.
        rule: The function from a visit to G at the operands of the node.
        watched: Tensors of the forward at which relevance is read, by name.
        changes: Functions that change G at watched tensors, by name, given the walk, the value and G.
        frees: Whether values of the forward are freed as soon as they are used. No other walk can follow.

    Attributes:
        x: The image (N, C, H, W), as the leaf of the graph.
        graph: The graph.
        relevance: The relevance of the image (N, C, H, W), after `balance`.
        gradient: G at the image (N, C, H, W); None if nothing arrives.
        watched_relevance: The relevance of the watched tensors, by name, in their shapes.
        watched: The names of the watched tensors by edge.
        rule: The rule.
        ledger: The parts (N,) of the scores, by name: the input, and each kind of absorbed relevance; after `balance`.
        missing: (N,) the scores minus the sum of the ledger, after `balance`.
        handled: The number of operations by kind and rule.
        holds_relevance: The nodes with a single result at which relevance arrives instead of G.
        merged: The factors and constants that are merged into a watched tensor, by edge.
    """

    def __init__(
        self,
        grads: TargetGradients,
        rule: NodeRule,
        watched: Mapping[str, Tensor] | None = None,
        changes: Mapping[str, Callable[[Walk, Tensor | float, Tensor], Tensor]] | None = None,
        *,
        frees: bool = False,
    ) -> None:
        self.grads, self.rule, self._changes, self._frees = grads, rule, changes or {}, frees
        self.x, self.images = grads.forward.x, len(grads.x)
        self.graph = CallGraph.of(grads)
        self.watched_relevance: dict[str, Tensor] = {}
        self.handled: Counter[str] = Counter()
        self._tensors = watched or {}
        self.watched: dict[Edge, str] = {}
        for name, tensor in self._tensors.items():
            if tensor.requires_grad:
                self.watched[get_gradient_edge(tensor)[:2]] = name
        self.holds_relevance: set[Node] = set()
        self.merged: dict[Edge, tuple[Tensor, Tensor]] = {}
        self._arrived: dict[Edge, Tensor] = {}
        self._fixed: dict[Edge, Tensor] = {}  # relevance that has no G
        self._image: dict[Node, int | None] = {}  # for nodes that compute something for one image alone
        # The ledger is kept for each reading of shapes that may be (N, ...) or (length, N, ...): reading 1 takes them
        # as (length, N, ...).
        is_ambiguous = self.images > 1 and any(map(self._is_ambiguous, self.graph.nodes))
        self._reading, self._readings = 0, range(1 + is_ambiguous)
        self._interleaved: tuple[set[Node], set[Node]] = set(), set()
        self._absorbed: list[tuple[str, Node, list[Tensor], Tensor | float | None]] = []

    def run(self) -> Walk:
        """Walk from the scores to the image, and return this walk."""
        score = self.grads.scores_in_graph
        self._arrived[source_edge(score)] = torch.ones_like(score)
        with torch.no_grad():
            for node in self.graph.nodes:
                self._visit(node)
                if self._frees:
                    self.graph.record.free(node)
        self.gradient = self._arrived.get(self.graph.end)
        return self

    def balance(self) -> Walk:
        """Set the relevance and the ledger, and return this walk.

        If shapes are ambiguous, choose the reading with which the ledger holds the score of each image.
        """
        fixed = self._fixed.get(self.graph.end)
        fixed = torch.zeros_like(self.grads.x) if fixed is None else fixed
        self.relevance = fixed if self.gradient is None else torch.addcmul(fixed, self.grads.x, self.gradient)
        scores, tried = at_least_float32(self.grads.scores), []
        for reading in self._readings:
            self._reading = reading
            ledger = {"input": self.per_image(self.relevance), **self.absorbed(self.graph.nodes)}
            tried.append((ledger, scores - total(ledger.values())))
        if len(tried) > 1 and not is_tracing():  # a program has no ledger
            rounding = _ROUNDING * float(scores.abs().max())
            self._reading = min(self._readings, key=lambda i: max(rounding, float(tried[i][1].abs().max())))
        self.ledger, self.missing = tried[self._reading]
        return self

    def _visit(self, node: Node) -> None:
        edges = list(zip(repeat(node), range(len(self.graph.specs[node]))))
        grads = tuple(map(self._arrived.pop, edges, repeat(None)))
        fixed = tuple(map(self._fixed.pop, edges, repeat(None))) if self._fixed else ()
        if self.watched:
            fixed = tuple(self.watch(edge, part, 1.0) for edge, part in zip(edges, fixed, strict=False))
            value = 1.0 if node in self.holds_relevance else None
            grads = tuple(self.watch(edge, grad, value) for edge, grad in zip(edges, grads, strict=True))
        visit = Visit(self, node, self.graph.operations[node], grads, self.graph.reads[node])
        if grads[0] is not None or any(grad is not None for grad in grads):
            self._pass_on(visit, self.rule(visit), self._arrived)
        if fixed and any(part is not None for part in fixed):
            visit = visit._replace(grads=fixed)
            moved = _moved(visit)
            if visit.operation and visit.operation.name == "constant_pad_nd" and moved[0] is not None:
                self.absorb("padding", visit.grad, node)
                self.absorb("padding", -moved[0], node)
            self._pass_on(visit, moved, self._fixed)

    def watch(self, edge: Edge, grad: Tensor | None, value: Tensor | float | None = None) -> Tensor | None:
        """Read the relevance at an edge if its tensor is watched; return G, which a function may change.

        Args:
            edge: The edge.
            grad: G at the edge.
            value: The value that has this G; None for the watched tensor itself.
        """
        name = self.watched.get(edge)
        if name is None or grad is None:
            return grad
        if value is None:
            scale, shift = self.merged.get(edge, (1, 0))
            value = self._tensors[name] * scale + shift
        if name in self._changes:
            grad = self._changes[name](self, value, grad)
        self.watched_relevance[name] = self.watched_relevance.get(name, 0) + at_least_float32(grad) * value
        return grad

    def _pass_on(self, visit: Visit, grads: Gradients, arrived: dict[Edge, Tensor]) -> None:
        # A target may compute the score of each image alone, and then put the scores together.
        is_join = self.images > 1 and visit.operation is not None and visit.operation.name in ("cat", "stack")
        is_joint = is_join and visit.grad.shape == (self.images,) == (len(grads),)
        edges = zip(self.graph.next[visit.node], visit.on_path, grads, strict=False)
        for operand, ((node, index), on_path, grad) in enumerate(edges):
            if node is None or not on_path or grad is None:
                continue
            # Like the engine of autograd: an operation leaves the sum over broadcast dimensions to its caller.
            fitted = self.graph.specs[node][index].fitted(grad)
            previous = arrived.get((node, index))
            arrived[node, index] = fitted if previous is None else previous + fitted
            if self.images == 1:
                continue
            image = operand if is_joint else self._image.get(visit.node)
            self._image[node] = image if self._image.get(node, image) == image else None
            for reading in self._readings:
                if self._flattens_length_first(visit, fitted.shape, reading):
                    self._interleaved[reading].add(node)

    def fix(self, visit: Visit, operand: int, relevance: Tensor) -> None:
        """Send relevance to an operand that has no G, because the operand may be zero."""
        edge = cast("Edge", self.graph.next[visit.node][operand])
        previous = self._fixed.get(edge)
        self._fixed[edge] = relevance if previous is None else previous + relevance

    def _is_ambiguous(self, node: Node) -> bool:
        """Return whether the shape of the first result of a node differs between the readings."""
        shape = self.graph.specs[node][0].shape
        return self._is_length_first(shape, 1) != self._is_length_first(shape, 0)

    def _is_length_first(self, shape: torch.Size, reading: int) -> bool:
        """Return whether a shape is (length, N, ...), as inside `nn.MultiheadAttention`, instead of (N, ...)."""
        is_either = reading > 0 and len(shape) < 4  # four dimensions are (N, heads, length, d)
        return shape[1:2] == (self.images,) and (is_either or shape[0] % self.images > 0)

    def _flattens_length_first(self, visit: Visit, shape: torch.Size, reading: int) -> bool:
        """Return whether an operand has the images of a batch interleaved along its first dimension."""
        result = visit.grad.shape
        if visit.node in self._interleaved[reading]:
            return shape[:1] == result[:1]
        return self._is_length_first(result, reading) and shape[:1] == (result[:2].numel(),)

    def absorb(self, name: str, values: Tensor, node: Node, factors: Tensor | float | None = None) -> None:
        """Add values, in the shape of the result of a node, to an entry of the ledger.

        Args:
            name: The name of the entry.
            values: The values.
            node: The node.
            factors: The numbers (C,), or the number, that multiply values (rows, C), whose sums over C are added. If
                each row is an image, all entries of this name are multiplied at once when the ledger is computed.
        """
        if factors is not None and (len(values) != self.images or self._image.get(node) is not None):
            values, factors = _products(values, factors), None
        if factors is None:
            readings = list(map(partial(self.per_image, values, node), self._readings))
        else:  # the rows are images in each reading
            readings = [values] * len(self._readings)
        self._absorbed.append((name, node, readings, factors))

    def absorbed(self, nodes: Iterable[Node]) -> dict[str, Tensor]:
        """Return the relevance (N,) that some nodes absorb, by name."""
        groups, parts, chosen = defaultdict[Any, list[Any]](list), defaultdict[str, list[Tensor]](list), set(nodes)
        for name, node, readings, factors in self._absorbed:
            if node in chosen:
                kind = Tensor if isinstance(factors, Tensor) else factors
                groups[name, kind].append((readings[self._reading], factors))
        for (name, kind), group in groups.items():
            values, numbers = map(list, zip(*group, strict=True))
            joint = [] if kind is None else [torch.cat(values, 1), torch.cat(numbers) if kind is Tensor else kind]
            parts[name] += [_products(*joint)] if joint else values
        return dict(zip(parts, map(total, parts.values()), strict=True))

    def ledger_at(self, values: Tensor, later: Iterable[Node], tokens: Tensor | None = None) -> dict[str, Tensor]:
        """Return the parts (N,) of the scores at a layer, by name.

        Args:
            values: The relevance of the layer (N, K, h, w).
            later: The nodes after the layer.
            tokens: The relevance of the tokens without a position (N, tokens, K), or None.
        """
        ledger = {"layer": self.per_image(values), **self.absorbed(later)}
        if tokens is not None:
            ledger["tokens"] = ledger.get("tokens", 0) + self.per_image(tokens)
        ledger["other paths"] = total(self.ledger.values()) - total(ledger.values())
        return ledger

    def per_image(self, values: Tensor, node: Node | None = None, reading: int | None = None) -> Tensor:
        """Return the sums (N,) of values over all positions of each image.

        Args:
            values: The values, in the shape of the result of a node.
            node: The node; None if images come first.
            reading: How ambiguous shapes are interpreted; None to interpret them as the ledger does.
        """
        values, reading = at_least_float32(values), self._reading if reading is None else reading
        if self.images == 1:
            return values if values.shape == (1,) else values.sum().reshape(1)
        if node is not None and (image := self._image.get(node)) is not None:
            return values.new_zeros(self.images).index_fill(0, torch.tensor(image, device=values.device), values.sum())
        if node in self._interleaved[reading]:
            return values.reshape(-1, self.images, values[0].numel()).sum((0, 2))
        if node is not None and self._is_length_first(values.shape, reading):
            values = values.transpose(0, 1)
        if values.shape[:1] == (1,):  # a product of the rows of all images at once, as in einsum
            values = values[0]
        if not values.dim() or len(values) % self.images:
            raise NotApplicableError(
                f"the ledger cannot divide values {tuple(values.shape)} among {self.images} images, as in detectors or "
                "einsum; explain one image at a time"
            )
        return values.reshape(self.images, -1).sum(1)


def _products(values: Tensor, factors: Tensor | float) -> Tensor:
    """Return the sums (rows,) of values (rows, C) times numbers (C,), or times a number."""
    return values @ factors if isinstance(factors, Tensor) else values.sum(1) * factors


def total(parts: Iterable[Tensor]) -> Tensor:
    """Return the sum (N,) of the parts of a ledger, or of one of its entries."""
    return torch.stack(list(parts)).sum(0)


def _moved(visit: Visit) -> Gradients:
    """Return relevance at the operands of an operation that moves numbers, or changes each by a constant."""
    operation = visit.operation
    if operation is not None:
        if operations.is_view(operation.op) or operation.name in _MOVES:
            return visit.plain()
        if (
            visit.node in visit.walk.graph.channel_factors
            or operations.is_pointwise(operation.op)
            or (operation.name in {"mul", "div", *operations.ADDITIVE} and sum(visit.on_path) == 1)
        ):
            return tuple(visit.grad if on_path else None for on_path in visit.on_path)
    name = operation.name if operation else visit.node.name()
    raise NotApplicableError(
        f"the rules flat, w2 and z-box give relevance to the image itself, but {name} lies between; use them for the "
        "first layer only"
    )
