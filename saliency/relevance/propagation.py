"""Rules of layer-wise relevance propagation for each kind of operation.

The relevance of a value x is R = x * G. A kind without an entry here has no rule, and its operations are refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from operator import itemgetter
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from ..errors import MethodError, NotApplicableError
from ..hooks import autograd_graph as graph
from ..hooks import operations
from ..hooks.attention import masked_logits
from ..hooks.operations import FACTORS, Operation
from ..hooks.pytree import first_tensor, tree_map, tree_tensors
from ..hooks.rectifiers import require_visible
from ..io.axes import at_least_float32
from . import rules as formulas
from .kernels import KERNELS, Passed, reads_gradient
from .walk import ChannelFactors, Edge, Visit, Walk, is_rectifier

Unknown = Literal["refuse", "gradient"]

aten = torch.ops.aten

# Operations of degree one. Some have a rule even where they are not: an addcmul of two signals, a variance, a product.
OF_DEGREE_ONE = operations.HOMOGENEOUS | {"addcmul", "var", "var_mean", "prod"}
_LOGSUMEXP = frozenset({"logsumexp", "_log_softmax"})
# A factor that one of these computes is treated as constant: the deviation of a normalisation written by hand,
_DEVIATIONS = frozenset({"rsqrt", "reciprocal"})
# and on request the gate of a signal.
_GATES = frozenset({"sigmoid", "hardsigmoid", "tanh", *operations.SOFTMAX})
# Increasing functions that are not 0 at 0.
_INCREASING = frozenset({"sigmoid", "hardsigmoid", "log_sigmoid", "logit", "log", "log2", "log10", "exp", "softplus"})
# Operations that move or select numbers of their first operand, besides views.
_SELECTIONS = frozenset(
    {"clone", "_to_copy", "native_dropout", "index", "index_select", "gather", "amax", "max", "clamp"}
)
# Operations into which a batch norm is merged, and the dimension of the channels of their results.
_CHANNELS = {"convolution": 1, "addmm": -1, "mm": -1}
# The two factors of a product with a vector.
_OF_VECTORS = {"mv": ("self", "vec"), "addmv": ("mat", "vec"), "dot": ("self", "tensor"), "vdot": ("self", "other")}
CONVOLUTION_OPTIONS = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
_GRADIENT = formulas.Epsilon(0)
NONLINEAR = operations.ACTIVATIONS | {"relu", "leaky_relu", "_prelu_kernel"}
# The types of operands in the arguments of an operation, which keep None for some.
_OPERANDS = (Tensor, type(None))
_CURES = {"mkldnn_rnn_layer": ", or call in `torch.backends.mkldnn.flags(enabled=False)`, where an LSTM is not fused"}
# The node that a view gets after an operation in place on it or on its base.
_VIEW_AFTER_WRITE = "AsStridedBackward0"


_KINDS = {
    **dict.fromkeys(operations.PLAIN | OF_DEGREE_ONE, "plain"),
    **dict.fromkeys(operations.LINEAR, "linear"),
    **dict.fromkeys(operations.SOFTMAX, "softmax"),
    **dict.fromkeys(operations.NORMS, "norm"),
    **dict.fromkeys(_LOGSUMEXP, "logsumexp"),
    "mul": "mul",
    "div": "div",
    "log_sigmoid_forward": "activation",
}
_TESTS = {
    "attention": operations.is_attention,
    "batch_norm": operations.is_batch_norm,
    "plain": operations.is_view,
    "activation": operations.is_pointwise,
}


@cache
def kind_of(op: operations.Op) -> str:
    """Return the kind of an operation; "" if it has no rule."""
    name = operations.operator_name(op)
    return _KINDS[name] if name in _KINDS else next((kind for kind, test in _TESTS.items() if test(op)), "")


def linear_weight(operation: Operation) -> Tensor:
    """Return the weights of a convolution or matrix product, perhaps transposed."""
    names = ("weight",) if operation.name == "convolution" else {**FACTORS, **_OF_VECTORS}[operation.name]
    return cast("Tensor", operation.args[names[-1]])


class Propagation:
    """The rule of one walk: a function from a node to G at its operands, under a composite.

    Args:
        composite: The rules.
        layers: The names of the modules of each pattern and type.
        unknown: Whether an operation without a rule is refused ("refuse") or passes its gradient ("gradient").
        first: A linear operation at whose result relevance is read.

    Attributes:
        rules: The rule of each convolution and matrix product, by the address of its weights.
        unmerged: The operations that prevent the merging of a batch norm into the convolution or matrix product before
            it.
        relevance: The relevance of the result of the operation `first`, in its shape.
    """

    shift_receives: ClassVar[bool] = True
    """Whether the shift of a batch norm that is not merged receives relevance."""

    def __init__(
        self,
        composite: formulas.Composite,
        layers: Mapping[formulas.RuleKey, Sequence[str]],
        unknown: Unknown,
        first: Node | None = None,
    ) -> None:
        self.composite, self.layers, self.unknown, self.first = composite, layers, unknown, first
        self.rules: dict[int, formulas.Rule] = {}
        self._has_nonlinear = self._reads_relevance = False
        for rule in composite.rules.values():
            self._has_nonlinear |= isinstance(rule, formulas.NonlinearRule)
            self._reads_relevance |= isinstance(rule, formulas.Rule) and not reads_gradient(rule)
        self._used: set[formulas.RuleKey] = set()  # the keys by which operations got their rules
        self.relevance: Tensor | None = None
        # By linear operation: its result, if that is the input of the batch norm, and the factors of the norm.
        self._merged: dict[Node, tuple[Tensor | None, ChannelFactors]] = {}
        self._paths: dict[Node, dict[Edge, Tensor | None]] = {}  # for each batch norm
        self.unmerged: Counter[str] = Counter()  # batch norms, by what prevents that they are merged
        self._biases: dict[Node, Tensor] = {}
        self._has_product = False  # whether the walk has passed a product of two signals
        self._alone: set[Node | None] = set()  # nodes of whose result the score reads one number for each image

    def __call__(self, visit: Visit) -> graph.Gradients:
        """Return G at the operands of a node."""
        operation = visit.operation
        kind = kind_of(operation.op) if operation else ""
        if operation is None or not kind or not _fits(visit, operation):
            return without_rule(visit, self.unknown)
        if visit.node in self._alone or visit.node is visit.walk.graph.nodes[0]:
            self._follow_score(visit, operation)
        if self._has_nonlinear and (rule := self._nonlinear_rule(visit, operation)):
            return self._nonlinear(visit, operation, rule)
        if is_rectifier(visit.node, operation) and self._passes_relevance(visit):
            if kind == "activation":
                visit.walk.handled[f"{operation.name} by f(x)/x"] += 1
            output = graph.saved(visit.node, "result", None)  # of a ReLU
            return (operation.repeat().mul_(visit.grad) if output is None else visit.grad * output,)
        return RULES[kind](self, visit, operation)

    def _passes_relevance(self, visit: Visit) -> bool:
        """Return whether a rectifier passes relevance: only it reads a linear operation, whose rule reads relevance."""
        walk, (node, index) = visit.walk, cast("Edge", visit.walk.graph.next[visit.node][0])
        is_alone = self._reads_relevance and walk.graph.users[node, index] == 1
        if not is_alone or visit.grad.dtype not in (torch.float32, torch.float64):
            return False
        before, end = walk.graph.operations.get(node), node
        if before is not None and operations.is_batch_norm(before.op):
            is_whole = not operations.uses_batch_statistics(before) and not self._has_nonlinear
            path = self._merged_path(walk, node) if is_whole else {}
            ends = [end for end, _ in path if cast("Operation", walk.graph.operations[end]).name in _CHANNELS]
            end = ends[0] if len(ends) == 1 else node
            before = walk.graph.operations.get(end)
        on_path = walk.graph.reads.get(end, [])
        if before is None or before.name not in operations.LINEAR or sum(on_path) != 1 or end in self._biases:
            return False
        if reads_gradient(self._linear_rule(walk, end)):
            return False
        walk.holds_relevance.add(node)
        return True

    def _follow_score(self, visit: Visit, operation: Operation) -> None:
        """Note the operation, and its operands if the score depends on one number of theirs for each image."""
        is_changed = operations.is_elementwise(operation.op) and sum(visit.on_path) == 1
        is_moved = operations.is_view(operation.op) or operation.name in {*_SELECTIONS, "cat", "stack"}
        self._alone.update({visit.node}, visit.walk.graph.operands[visit.node] if is_changed or is_moved else ())

    def _plain(self, visit: Visit, operation: Operation) -> graph.Gradients:
        """Pass the gradient. Constant operands of sums absorb relevance."""
        constants = _constants(visit, operation) if operation.name in operations.ADDITIVE else None
        if constants and holds_constant(constants) and not self._merge_bias(visit, constants):
            name = "biases" if _adds_bias(constants, visit.grad.dim()) else "tokens"
            part = constant_part(visit.node, constants, visit.grad.device)
            visit.walk.absorb(name, (visit.grad * part).nan_to_num_(0, 0, 0), visit.node)
        if operation.name in ("var", "var_mean"):  # the variance is of degree two
            variance, *mean = visit.grads
            visit = visit._replace(grads=(None if variance is None else variance / 2, *mean))
        if operation.name == "prod":  # a product of n factors is of degree n
            operand = graph.result_spec(*cast("Edge", visit.walk.graph.next[visit.node][0]))
            visit = visit._replace(grads=(visit.grad * (visit.grad.numel() / operand.shape.numel()),))
        is_product = operation.name == "addcmul" and all(visit.on_path[1:])
        return self._product(visit) if is_product else visit.plain()

    def _merge_bias(self, visit: Visit, operation: Operation) -> bool:
        """Make a summand the bias of the matrix product before it, if only the sum reads that, as in `F.linear`."""
        bias, walk = operation.args.get("other"), visit.walk
        if operation.name != "add" or "alpha" in operation.args or not isinstance(bias, Tensor) or bias.dim() != 1:
            return False
        edge = graph.next_functions(visit.node)[0]
        while walk.graph.users[edge] == 1 and edge[0] is not None and (before := walk.graph.operations.get(edge[0])):
            if graph.result_spec(*edge).shape[-1] != len(bias):
                return False
            if before.name in ("mm", "bmm") and graph.next_functions(edge[0])[0][0] in walk.graph.on_path:
                self._biases[edge[0]] = bias
                return True
            if before.name not in ("view", "_unsafe_view"):
                return False
            edge = graph.next_functions(edge[0])[0]
        return False

    def _linear(self, visit: Visit, operation: Operation) -> graph.Gradients:
        """Apply the rule of a convolution or matrix product with constant weights."""
        walk, offset = visit.walk, int(operation.name in ("addmm", "baddbmm", "addmv"))  # the first is a summand
        factors = visit.on_path[offset : offset + 2]
        if all(factors):
            return self._product(visit)
        if operation.name in _OF_VECTORS:
            return self._linear(visit._replace(grads=(visit.grad.reshape(-1, 1),)), _of_matrices(operation))
        index, node = factors.index(True), visit.node
        rule = self._linear_rule(walk, node)
        self.rules[linear_weight(operation).data_ptr()] = rule
        walk.handled[f"{'conv' if operation.name == 'convolution' else 'linear'} by {rule.name}"] += 1
        edge = cast("Edge", walk.graph.next[node][index + offset])
        is_sum = bool(offset and visit.on_path[0])
        is_merged, (op, whole) = node in self._merged, self._with_norm(visit, operation, index, is_sum=is_sum)
        if isinstance(rule, formulas.ZBox) and node in walk.graph.first_and_last[0]:
            op.bound = partial(_bound, walk, edge, op.input)
        if walk.grads.forward.targets > 1:
            key = type(rule), repr(rule), op.bias is None, is_merged, node in self._biases
            op.shared = operation.shared.setdefault(key, {})
        op.is_positive = node in walk.holds_relevance
        op.is_nonnegative = edge[0] in walk.graph.rectified
        op.is_rectified = op.is_nonnegative and op.input.dtype == visit.grad.dtype
        relevance = grad = at_least_float32(visit.grad)
        if not op.is_positive and (node is self.first or not reads_gradient(rule)):
            relevance = op.output * grad if whole is None else whole().mul_(grad)
        if node is self.first:
            self.relevance = relevance
        if reads_gradient(rule):
            relevance = grad if op.unit is None else grad * op.unit
        passed = self.propagate(visit, rule, op, relevance)
        grads: list[Tensor | None] = [None] * len(visit.on_path)
        grads[index + offset] = None if passed.grad is None else passed.grad.to(visit.grad.dtype)
        if passed.relevance is not None and node in walk.graph.first_and_last[0]:
            walk.fix(visit, index + offset, passed.relevance)
        elif passed.relevance is not None:
            grads[index + offset] = formulas.divided(passed.relevance, op.input)
            visit.walk.absorb("inputs of zero", torch.where(op.input == 0, passed.relevance, 0), visit.node)
        if is_sum:
            grads[0] = visit.grad * operation.args.get("beta", 1)
        for name, values, numbers in passed.absorbed:
            walk.absorb(name, values, node, numbers)
        return tuple(grads)

    def _with_norm(
        self, visit: Visit, operation: Operation, index: int, *, is_sum: bool
    ) -> tuple[formulas.LinearOperation, Callable[[], Tensor] | None]:
        """Return a linear operation with the batch norm or the bias after it, and the function for that result.

        The function is None if the output is that result. `is_sum` says whether the operation adds a second signal.
        """
        node, op = visit.node, linear_operation(operation, index)
        # A ReLU in place has overwritten a value that another operation had read.
        is_overwritten = operation.norms is not None and visit.walk.graph.users[node, 0] > 1
        recorded = None if operation.result is None or is_overwritten else at_least_float32(operation.result)
        if is_sum:  # the product alone
            op.bias = recorded = None
        if node in self._merged:
            result, norm = self._merged.pop(node)
            return _merged(op, operation, recorded if result is None else result.to(op.input.dtype), norm)
        if node in self._biases:
            op.bias = at_least_float32(self._biases[node])
            op.find_output = None if recorded is None else partial(torch.add, recorded, op.bias)
        elif recorded is not None:
            op.output = recorded
            if operation.norms is not None and not index:
                op.scale = op.scale_of(operation.norms)
        return op, None

    def propagate(self, visit: Visit, rule: formulas.Rule, op: formulas.LinearOperation, values: Tensor) -> Passed:
        """Return the result of a rule for the input of a linear operation, by its kernel or its formula.

        Args:
            visit: The visit of the operation.
            rule: The rule.
            op: The operation.
            values: The relevance of the output, or G at the output for a rule that `reads_gradient`.
        """
        if (kernel := KERNELS.get(type(rule))) is not None:
            return kernel(rule, op, values)
        relevance = rule.relevance(op, values)
        _check_shape(visit, relevance, rule, op.input)
        return Passed(relevance=relevance)

    def _linear_rule(self, walk: Walk, node: Node) -> formulas.Rule:
        """Return the rule of a convolution or matrix product."""
        kind = "conv" if cast("Operation", walk.graph.operations[node]).name == "convolution" else "linear"
        return cast("formulas.Rule | None", self._rule(walk, node, kind, formulas.Rule)) or _GRADIENT

    def _nonlinear_rule(self, visit: Visit, operation: Operation) -> formulas.NonlinearRule | None:
        """Return the rule of the composite for an activation or a normalisation, or None."""
        is_norm = operation.name in operations.NORMS or operations.is_batch_norm(operation.op)
        kind = "activation" if operation.name in NONLINEAR else "norm" if is_norm else ""
        if not kind or operation.is_part:
            return None
        return cast("formulas.NonlinearRule | None", self._rule(visit.walk, visit.node, kind, formulas.NonlinearRule))

    def _nonlinear(self, visit: Visit, operation: Operation, rule: formulas.NonlinearRule) -> graph.Gradients:
        """Apply the rule of the composite for an activation or a normalisation."""
        operand = _operand(operation)
        x, grad = at_least_float32(operation.args[operand]), at_least_float32(visit.grad)

        def run(x: Tensor) -> Tensor:
            return cast("Tensor", operations.as_results(operation.repeat(**{operand: x.to(visit.grad.dtype)}))[0])

        y = at_least_float32(operations.as_results(operation.result)[0])
        relevance = rule.relevance(formulas.NonlinearOperation(x, y, run), y * grad)
        _check_shape(visit, relevance, rule, x)
        passed = formulas.divided(relevance, x)
        visit.walk.handled[f"{operation.name.removeprefix('native_')} by {rule.name}"] += 1
        visit.walk.absorb("stabiliser", y * grad - x * passed, visit.node)
        return (passed.to(visit.grad.dtype), *[None] * (len(visit.on_path) - 1))

    def _rule(self, walk: Walk, node: Node, kind: str, base: type) -> formulas.AnyRule | None:
        """Return the rule of an operation: by its most specific key, or by its kind."""
        rules, keys = self.composite.rules, list[tuple[tuple[int, ...], formulas.RuleKey]]()
        for name in walk.graph.record.modules(node) if self.layers else ():
            fitting = (key for key, names in self.layers.items() if name in names and isinstance(rules[key], base))
            keys += ((_rank(key, name), key) for key in fitting)
        for index, end in enumerate(("first", "last")):
            if isinstance(rules.get(end), base) and node in walk.graph.first_and_last[index]:
                keys.append(((1, index), end))
        _, key = max(keys, key=itemgetter(0), default=((), kind))
        self._used.add(key)
        return rules.get(key)

    def check_layers(self) -> None:
        """Raise MethodError for a name, pattern or type whose rule no operation got."""
        for key, names in self.layers.items():
            if names and key not in self._used:
                is_linear = isinstance(self.composite.rules[key], formulas.Rule)
                operation = "convolution or matrix product with weights" if is_linear else "activation or normalisation"
                raise MethodError(
                    f'composite: the rule of "{formulas.key_name(key)}" is never used: no {operation} runs there '
                    "between the input and the score, or more specific keys precede it"
                )

    def _batch_norm(self, visit: Visit, operation: Operation) -> graph.Gradients:
        """Merge a batch norm into the linear operation before it, or divide by the magnitudes of x and the constant."""
        walk, y_grad = visit.walk, visit.grad
        factors = walk.graph.channel_factors.get(visit.node)
        if factors is None:
            return self._norm(visit, operation)
        x = operation.args["input"]
        self.unmerged.update(["vmap"] * operation.is_vmapped)
        if path := self._merged_path(walk, visit.node):
            factors = factors if visit.node in walk.graph.positive_norms else factors._replace(relative=None)
            walk.holds_relevance.update(node for node, _ in path if visit.node in walk.holds_relevance)
            for edge, numbers in path.items():
                norm = factors if numbers is None else factors.of_channels(numbers)
                if edge in walk.watched:  # relevance there is the relevance of the merged output
                    scale, shift = (channelwise(values, x) if numbers is None else values for values in norm[:2])
                    walk.merged[edge] = scale, shift
                if cast("Operation", walk.graph.operations[edge[0]]).name in _CHANNELS:
                    self._merged[edge[0]] = x if numbers is None else None, norm
            walk.handled["batch_norm merged"] += 1
            return (y_grad, None, None)
        walk.handled["batch_norm by |z|"] += 1
        scale, shift = channelwise(factors.scale, x), channelwise(factors.shift, x)
        part = x * scale
        relevance = (part + shift) * y_grad
        quotients = formulas.divided(relevance, part.abs() + shift.abs() * self.shift_receives)
        visit.walk.absorb("biases", relevance - quotients * part.abs(), visit.node)
        return (quotients * scale.abs() * x.sign(), None, None)

    def _merged_path(self, walk: Walk, norm: Node) -> dict[Edge, Tensor | None]:
        """Return the edges from a batch norm to the linear operations before it; {} if it is not merged.

        The value of an edge is the channel of the norm, from 1, that reads each number there, and 0 for a number that
        is not read; or None if the numbers lie there as at the norm.
        """
        if norm in self._paths:
            return self._paths[norm]
        self._paths[norm], path, obstacle = {}, dict[Edge, Tensor | None](), ""
        ahead: list[tuple[Edge, Tensor | None]] = [(cast("Edge", walk.graph.next[norm][0]), None)]
        while ahead:
            edge, numbers = ahead.pop()
            node, operation = edge[0], walk.graph.operations.get(edge[0])
            on_path = walk.graph.reads.get(node, [])
            if operation is None or walk.graph.users[edge] != 1:
                return {}
            path[edge], name, specs = numbers, operation.name, walk.graph.specs[node]
            if name in _CHANNELS and sum(on_path) == 1:
                if numbers is not None:
                    others = {*range(numbers.dim())} - {_CHANNELS[name] % numbers.dim()}
                    path[edge] = channels = numbers.amax(tuple(others), keepdim=True)
                    obstacle = obstacle or "view" * (not bool(((numbers == channels) | (numbers == 0)).all()))
                continue
            parts: graph.Gradients = (numbers,)
            if all(on_path) and (name == "cat" or (operations.is_view(operation.op) and name != "expand")):
                obstacle = obstacle or name * (sum(walk.graph.users[node, index] for index in range(len(specs))) != 1)
                if numbers is None:
                    shape = specs[edge[1]].shape
                    counts = torch.arange(1, shape[1] + 1, dtype=torch.float32, device=walk.x.device)
                    numbers = counts.view(1, -1, *[1] * (len(shape) - 2)).expand(shape)
                by_result = tuple(numbers if index == edge[1] else None for index in range(len(specs)))
                parts = Visit(walk, node, operation, by_result, on_path).plain()
            elif name in {"mul", "div", "neg", *operations.ADDITIVE} and on_path[0] and sum(on_path) == 1:
                obstacle = name
            elif name not in ("clone", "_to_copy"):
                return {}
            ahead += zip(cast("tuple[Edge, ...]", walk.graph.next[node]), parts, strict=False)
        self.unmerged.update([obstacle] if obstacle else [])
        self._paths[norm] = {} if obstacle else path
        return self._paths[norm]

    def _norm(self, visit: Visit, operation: Operation) -> graph.Gradients:
        """Pass through the centring, with the deviation as a constant."""
        norm = normalisation(operation)
        visit.walk.handled[f"{operation.name.removeprefix('native_')} with a constant deviation"] += 1
        grad = at_least_float32(visit.grad)
        if norm.bias is not None:
            bias = norm.bias.to(grad)
            visit.walk.absorb("biases", grad @ bias if bias.dim() == 1 else grad * bias, visit.node)
        passed = norm.centred(norm.weighted(grad) * norm.rstd)
        return (passed.reshape(grad.shape).to(visit.grad.dtype), *[None] * (len(visit.on_path) - 1))

    def _activation(self, visit: Visit, operation: Operation) -> graph.Gradients:
        """Pass G * (f(x) - f(0)) / x; f(0) absorbs the rest."""
        on_path = visit.on_path
        if is_rectifier(visit.node, operation):
            visit.walk.handled[f"{operation.name} by f(x)/x"] += 1
            x = operation.args[_operand(operation)]
            return (cast("Tensor", operation.repeat()).div_(x).nan_to_num_(0).mul_(visit.grad),)
        if sum(on_path) > 1:
            is_linear = operation.name == "lerp" and not any(on_path[2:])
            return visit.plain() if is_linear else without_rule(visit, self.unknown)
        operation = _function_of(operation, on_path.index(True))
        x, (at_zero, slope, is_finite, is_shifted) = operation.args[_operand(operation)], _at_zero(operation)
        is_finite = is_finite and operation.name != "logit"
        is_link = not is_finite or (visit.node in self._alone and is_shifted)
        if is_link and (passed := self._through_link(visit, operation.name)) is not None:
            visit.walk.handled[f"{operation.name} of a score"] += 1
            lost = operation.result * visit.grad - x * passed
            visit.walk.absorb("activations", torch.where(visit.grad == 0, 0, lost), visit.node)
            return (passed,)
        if not is_finite:
            return without_rule(visit, self.unknown)
        visit.walk.handled[f"{operation.name} by f(x)/x"] += 1
        result = operation.repeat() if operation.result is None else operation.result  # a node saves the operand alone
        if is_shifted:
            visit.walk.absorb("activations", visit.grad * at_zero, visit.node)
            result = result - at_zero
        ratio = result / x
        ratio = torch.where(x == 0, slope, ratio) if isinstance(slope, Tensor) else ratio.nan_to_num_(slope)
        return tuple(ratio.mul_(visit.grad) if is_own else None for is_own in on_path)

    def _through_link(self, visit: Visit, name: str) -> Tensor | None:
        """Return G at the operand of an increasing function: unchanged if the operand can replace the score.

        So all increasing functions of a score have the map of the score. The logarithm of a softmax has the map of a
        log-softmax.
        """
        walk, source = visit.walk, _origin(visit.walk, visit.walk.graph.next[visit.node][0][0])
        before = getattr(walk.graph.operations.get(cast("Node", source)), "name", "")
        if before in operations.SOFTMAX:
            return torch.where(visit.grad == 0, 0, cast("Tensor", visit.plain()[0]))
        is_inverse = (name, before, walk.graph.users[source, 0]) == ("logit", "sigmoid", 1)
        self._alone.update({source} if is_inverse else ())
        return visit.grad if is_inverse or (visit.node in self._alone and name in _INCREASING) else None

    def _mul(self, visit: Visit, operation: Operation) -> graph.Gradients:
        """Pass the gradient of a product with a constant."""
        return self._product(visit) if visit.on_path == [True, True] else visit.plain()

    def _product(self, visit: Visit) -> graph.Gradients:
        """Give each factor of a product half of the relevance, or all of it if the other factor is a constant.

        In an activation, such as x * sigmoid(x), all factors except x are treated as constant: this is the rule f(x)/x.
        """
        walk, self._has_product = visit.walk, True
        grads = list(visit.plain())
        # The first of three is a summand.
        factors = [index for index, on_path in enumerate(visit.on_path) if on_path][-2:]
        edges = graph.next_functions(visit.node)
        constants = [index for index in factors if self._is_constant_factor(edges[index][0], walk)]
        if len(constants) == 1:
            walk.handled["product with a constant factor"] += 1
            grads[constants[0]] = None
            return tuple(grads)
        if (gate := _gate(visit, factors)) is not None:
            walk.handled["product by f(x)/x"] += 1
            grads[gate] = None
            return tuple(grads)
        walk.handled["product by halves"] += 1
        for index in factors:
            grad = grads[index]
            grads[index] = None if grad is None else grad / 2
        return tuple(grads)

    def _is_constant_factor(self, node: Node | None, walk: Walk) -> bool:
        """Return whether a factor of a product is treated as constant, by the operation that computes it."""
        operation = walk.graph.operations.get(cast("Node", _origin(walk, node)))
        gates = _GATES if self.composite.constant_gates else frozenset()
        return operation is not None and operation.name in _DEVIATIONS | gates

    def _div(self, visit: Visit, operation: Operation) -> graph.Gradients:
        """Give the relevance of a quotient to the numerator."""
        if not visit.on_path[0]:
            return without_rule(visit, self.unknown)
        return (visit.plain()[0], None)

    def _softmax(self, visit: Visit, operation: Operation) -> graph.Gradients:
        """Pass the gradient of a softmax, or nothing if attention weights are treated as constant."""
        s = cast("Tensor", graph.saved(visit.node, "result"))
        is_weight = self.composite.constant_gates and self._has_product  # not the probabilities of the classes
        passed = torch.zeros_like(s) if is_weight else cast("Tensor", visit.plain()[0])
        visit.walk.handled["softmax as a constant" if is_weight else "softmax by gradient"] += 1
        # The passed G sums to zero, so log(s), which differs from the logits by a constant, can replace them.
        weights = at_least_float32(s)
        logits = weights.clamp(min=torch.finfo(weights.dtype).tiny).log()
        visit.walk.absorb("softmax", s * visit.grad - logits.mul_(passed), visit.node)
        return (passed,)

    def _logsumexp(self, visit: Visit, operation: Operation) -> graph.Gradients:
        """Pass the gradient of a log-sum-exp, which is the softmax, or of a log-softmax."""
        grads = visit.plain()
        passed = operation.args["self"] * cast("Tensor", grads[0])
        if operation.name == "logsumexp":
            passed = passed.sum(operation.args["dim"], operation.args.get("keepdim", False))
        visit.walk.absorb("softmax", operation.result * visit.grad - passed, visit.node)
        return grads

    def _attention(self, visit: Visit, operation: Operation) -> graph.Gradients:
        """Give the value half of the relevance, and query and key a quarter each; or all to the value."""
        query, key, value = visit.on_path[:3]
        weighs = (query or key) and not self.composite.constant_gates
        at_value = (0.5 if weighs else 1.0) * value
        at_weights = (1 - at_value) / (query + key) if weighs else 0.0
        factors = zip(visit.plain(), visit.on_path, (at_weights, at_weights, at_value), strict=False)
        grads = [None if grad is None or not on_path else grad * factor for grad, on_path, factor in factors]
        visit.walk.handled["attention"] += 1
        visit.walk.absorb("softmax", operation.result[0] * visit.grad, visit.node)
        for name, grad in zip(("query", "key", "value"), grads, strict=True):
            if grad is not None:
                visit.walk.absorb("softmax", -operation.args[name] * grad, visit.node)
        return tuple(grads)


RULES: dict[str, Callable[[Propagation, Visit, Operation], graph.Gradients]] = {
    "plain": Propagation._plain,
    "linear": Propagation._linear,
    "batch_norm": Propagation._batch_norm,
    "norm": Propagation._norm,
    "activation": Propagation._activation,
    "mul": Propagation._mul,
    "div": Propagation._div,
    "softmax": Propagation._softmax,
    "logsumexp": Propagation._logsumexp,
    "attention": Propagation._attention,
}
"""The rule of each kind of operation."""


def _rank(key: formulas.RuleKey, module: str) -> tuple[int, ...]:
    """Return how specific a key is for a module: an exact name, then a pattern, then (after "last", "first") a type."""
    return (0, len(module), len(key.__mro__)) if isinstance(key, type) else (2 + (key == module), len(key))


def _origin(walk: Walk, node: Node | None) -> Node | None:
    """Return the node that computes a value, without the operations that move or select its numbers."""
    while node is not None and (operation := walk.graph.operations.get(node)):
        if not (operations.is_view(operation.op) or operation.name in _SELECTIONS):
            break
        node = graph.next_functions(node)[0][0]
    return node


def _of_weights(operation: Operation, scale: Tensor) -> Tensor:
    """Return factors (1, C, ...) of the results of a linear operation in a shape that broadcasts to its weights."""
    if not operation.args.get("transposed"):  # a convolution has its outputs first
        return scale.transpose(0, 1) if scale.dim() > 2 else scale
    rows, groups = len(operation.args["weight"]), operation.args["groups"]
    by_row = scale.view(groups, 1, -1).expand(-1, rows // groups, -1)
    return by_row.reshape(rows, -1, *[1] * (scale.dim() - 2))


def _of_matrices(operation: Operation) -> Operation:
    """Return a product with a vector as a product of matrices, without its result."""
    args = operation.args
    first, second = (args[name] for name in _OF_VECTORS[operation.name])
    factors = first.reshape(-1, len(second)), second[:, None]
    if operation.name == "addmv":
        args = {**args, "self": args["self"].reshape(-1, 1)}
        return Operation(aten.addmm.default, "addmm", {**args, **dict(zip(FACTORS["addmm"], factors, strict=True))})
    return Operation(aten.mm.default, "mm", dict(zip(FACTORS["mm"], factors, strict=True)))


def _function_of(operation: Operation, index: int) -> Operation:
    """Return a pointwise operation as a function of one of its tensors, which comes first."""
    name = [name for name, value in operation.args.items() if isinstance(value, Tensor)][index]
    op = aten.log_sigmoid.default if operation.name == "log_sigmoid_forward" else operation.op
    args = {name: operation.kept_args[name], **operation.kept_args}
    return replace(
        operation,
        op=op,
        name=operations.operator_name(op),
        kept_args=args,
        kept_result=operations.as_results(operation.result)[0],
    )


def _gate(visit: Visit, factors: Sequence[int]) -> int | None:
    """Return the index of the gate in an activation that is the product of two pointwise functions of one value.

    The other factor is 0 where the value is 0, such as the value itself. None in a product of two signals.
    """
    walk, edges = visit.walk, [cast("Edge", graph.next_functions(visit.node)[index]) for index in factors]
    above = {*edges}
    while len(above) > 1:
        latest = max(above, key=lambda edge: graph.sequence_nr(edge[0]) if edge[0] in walk.graph.next else -1)
        operands = _pointwise_operands(walk, latest)
        if not operands:
            return None
        above = (above - {latest}).union(operands)
    is_zero = [_is_zero_at_zero(walk, edge, above) for edge in edges]
    return factors[1 - is_zero.index(True)] if any(is_zero) else None


def _pointwise_operands(walk: Walk, edge: Edge) -> list[Edge]:
    """Return the operands of a pointwise operation that depend on the image; [] for other operations."""
    operation = walk.graph.operations.get(edge[0])
    if operation is None or not operations.is_elementwise(operation.op) or operation.is_part:
        return []
    operands = [cast("Edge", operand) for operand in graph.next_functions(edge[0]) if operand[0] in walk.graph.on_path]
    shape = graph.result_spec(*edge).shape
    return operands if all(graph.result_spec(*operand).shape == shape for operand in operands) else []


def _is_zero_at_zero(walk: Walk, edge: Edge, sources: set[Edge]) -> bool:
    """Return whether a pointwise function of a value is 0 where the value is."""
    if edge in sources:
        return True
    operation = cast("Operation", walk.graph.operations.get(edge[0]))
    operands = [_is_zero_at_zero(walk, operand, sources) for operand in _pointwise_operands(walk, edge)]
    if operation.name == "mul":
        return any(operands)
    if holds_constant(_constants(Visit(walk, edge[0], operation, (), walk.graph.reads[edge[0]]), operation)):
        return False
    is_shifted = kind_of(operation.op) == "activation" and _at_zero(operation).is_shifted
    return all(operands) and not is_shifted


def _check_shape(visit: Visit, values: object, rule: formulas.AnyRule, x: Tensor) -> None:
    """Raise MethodError for a rule whose result does not have the shape of the input."""
    shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
    if shape == x.shape:
        return
    names, operation = visit.walk.graph.record.modules(visit.node), cast("Operation", visit.operation)
    weights = f" with weights {tuple(linear_weight(operation).shape)}" if isinstance(rule, formulas.Rule) else ""
    where = f'layer "{max(names, key=len)}"' if names else f"an operation {operation.name}{weights}"
    raise MethodError(
        f"the rule {rule!r} at {where} returned {shape} for an input {tuple(x.shape)} and an output "
        f"{tuple(visit.grad.shape)}; expected the shape of the input"
    )


def _bound(walk: Walk, edge: Edge, values: Tensor, bound: float | Sequence[float]) -> Tensor:
    """Return a bound of the image, one number or one per channel, at an operand of the first operation.

    In between are views and operations that change each number by a constant, so it is the derivative times the
    difference between the bound and the image, plus the operand: by a second derivative of the gradient.
    """
    change, spec = formulas.per_channel(bound, walk.x.detach()) - walk.x.detach(), graph.result_spec(*edge)
    with torch.enable_grad():
        grad = torch.zeros(spec.shape, dtype=spec.dtype, device=values.device).requires_grad_()
        (back,) = torch.autograd.grad([GradientEdge(*edge)], [walk.x], [grad], create_graph=True)
        (moved,) = torch.autograd.grad(back, grad, change)
    return values + moved.reshape(values.shape)


def _operand(operation: Operation) -> str:
    """Return the name of the operand of a pointwise operation: the exponent in 2 ** x."""
    return next(name for name, value in operation.args.items() if isinstance(value, Tensor))


class _AtZero(NamedTuple):
    """A pointwise function at 0: its value, its slope, whether the value is finite, and whether it is not 0."""

    value: Tensor
    slope: Tensor | float
    is_finite: bool
    is_shifted: bool


def _at_zero(operation: Operation) -> _AtZero:
    """Return a pointwise operation at 0, which is computed once for all operations without other tensors."""
    name, args = _operand(operation), operation.args
    others = tuple(part for part in args.items() if part[0] != name)
    is_alone = graph.is_tracing() or first_tensor(others) is not None
    compute = _function_at_zero.__wrapped__ if is_alone else _function_at_zero
    return compute(operation.op, name, others, args[name].dtype, args[name].device)


@cache
def _function_at_zero(
    op: operations.Op, name: str, others: tuple[tuple[str, Any], ...], dtype: torch.dtype, device: torch.device
) -> _AtZero:
    zero = torch.zeros((), dtype=dtype, device=device)
    function = Operation(op, operations.operator_name(op), {name: zero, **dict(others)})
    value = cast("Tensor", function.repeat())
    slope = derivative(function, torch.zeros_like(value))
    is_finite, is_shifted = bool(torch.isfinite(value).all()), bool(value.any())
    return _AtZero(value, slope if slope.dim() else float(slope), is_finite, is_shifted)


def without_rule(visit: Visit, unknown: Unknown) -> graph.Gradients:
    """Pass the gradient of an operation without a rule, or refuse it."""
    if visit.node.name() == _VIEW_AFTER_WRITE:
        return visit.plain()
    for node in visit.walk.graph.nodes:
        if unknown == "refuse" or isinstance(node, graph.CHECKPOINT_NODE):
            require_visible(node)
    name = visit.operation.name if visit.operation else visit.node.name()
    if not (visit.operation or operations.is_custom_function(visit.node)):
        raise NotApplicableError(f"the operation {name} was not recorded; run the whole model in the caller's thread")
    name += " of complex numbers" if visit.operation and refuses_complex(visit, visit.operation) else ""
    is_part = visit.operation is not None and visit.operation.is_part
    name += " in place on a part of a tensor" if is_part else ""
    if unknown == "refuse":
        by_gradient = 'pass unknown="gradient" to pass its gradient, which is right for linear operations'
        cure = "compute it out of place (inplace=False)" if is_part else by_gradient
        raise NotApplicableError(f"no rule for the operation {name}; {cure}{_CURES.get(name, '')}")
    visit.walk.handled[f"{name} by gradient"] += 1
    return visit.plain()


def refuses_complex(visit: Visit, operation: Operation) -> bool:
    """Return whether an operation on complex numbers is not linear, so that no rule fits it."""
    if not visit.walk.graph.is_complex:
        return False
    of_call = visit.walk.graph
    operands = (graph.result_spec(*edge).dtype for edge in of_call.next[visit.node] if edge[0] in of_call.on_path)
    is_linear = (
        operation.name in operations.PLAIN
        or operations.is_view(operation.op)
        or (operation.name in ("mul", "div") and visit.on_path == [True, False])
    )
    return not is_linear and (visit.grad.is_complex() or any(dtype.is_complex for dtype in operands))


def _fits(visit: Visit, operation: Operation) -> bool:
    """Return whether the rule of an operation fits its operands."""
    name, on_path = operation.name, visit.on_path
    if visit.walk.graph.is_complex and refuses_complex(visit, operation):
        return False
    if name in ("maximum", "minimum"):
        return all(on_path)
    if not operation.is_part:
        return True
    # There is no G for a part of a tensor: only operations that just pass their gradient have a rule.
    if name in ("mul", "div"):
        return sum(on_path) == 1
    return on_path[-1] and (name in ("copy", "relu") or (name in ("add", "sub") and all(on_path)))


def _constants(visit: Visit, operation: Operation) -> Operation:
    """Return a sum with None in place of the operands that depend on the image."""
    on_path = iter(visit.on_path)

    def constant(value: Tensor | None) -> Tensor | None:
        is_operand = value is None or value.is_floating_point()
        return None if is_operand and next(on_path, False) else value

    return replace(operation, kept_args=tree_map(operation.args, _OPERANDS, constant))


def holds_constant(operation: Operation) -> bool:
    """Return whether an operation is a sum with a constant operand."""
    return operation.name in operations.ADDITIVE and any(map(_is_constant, operation.args.items()))


def _is_constant(argument: tuple[str, Any]) -> bool:
    """Return whether an argument of a sum is, or holds, a constant summand."""
    name, value = argument
    if isinstance(value, int | float):
        return name in ("self", "other", "value") and bool(value)
    return any(tensor.is_floating_point() for tensor in tree_tensors(value))


def _adds_bias(operation: Operation, dims: int) -> bool:
    """Return whether a sum adds a number, or one per channel, in fewer dimensions than the result has."""
    constants = tree_tensors(list(operation.args.values()))
    return all(constant.dim() < dims and constant.numel() == max(constant.shape, default=1) for constant in constants)


def constant_part(node: Node, operation: Operation, device: torch.device) -> Tensor:
    """Return the result of a sum with zeros in place of the operands that depend on the image."""
    edges = iter(graph.next_functions(node))

    def filled(value: Tensor | None) -> Tensor | None:
        if value is not None and not value.is_floating_point():
            return value
        node, index = next(edges, (None, 0))
        if value is not None or node is None:
            return value
        spec = graph.result_spec(node, index)
        return torch.zeros((), dtype=spec.dtype, device=device).expand(spec.shape)

    return cast("Tensor", operation.repeat(**tree_map(operation.args, _OPERANDS, filled)))


class Normalisation(NamedTuple):
    """A layer, group or RMS norm, or a batch norm with the statistics of the batch: (x - mean) * rstd * weight + bias.

    Attributes:
        shape: The shape in which the statistics are taken over `dims`.
        dims: The dimensions.
        rstd: The inverse deviation, with dimensions of size 1.
        weight: The weights, in a shape that broadcasts to the operand, or None.
        bias: The bias in such a shape, or None.
        has_mean: Whether the mean is subtracted.
    """

    shape: torch.Size
    dims: list[int]
    rstd: Tensor
    weight: Tensor | None
    bias: Tensor | None
    has_mean: bool

    def weighted(self, grad: Tensor) -> Tensor:
        """Return a tensor like the result times the weights, in `shape`."""
        return (grad if self.weight is None else grad * self.weight).reshape(self.shape)

    def centred(self, values: Tensor) -> Tensor:
        """Return values minus their mean, if the norm subtracts it, in `shape`."""
        values = values.reshape(self.shape)
        return values - values.mean(self.dims, keepdim=True) if self.has_mean else values


def normalisation(operation: Operation) -> Normalisation:
    """Return the statistics and parameters of a norm."""
    x, weight, bias = operation.args["input"], operation.args["weight"], operation.args.get("bias")
    if normalized := operation.args.get("normalized_shape"):
        shape, dims = x.shape, list(range(x.dim() - len(normalized), x.dim()))
    elif groups := operation.args.get("group"):
        shape, dims = torch.Size([len(x), groups, x[0].numel() // groups]), [2]
    else:
        shape, dims = x.shape, [0, *range(2, x.dim())]
    sizes = [1 if dim in dims else size for dim, size in enumerate(shape)]
    has_mean = operation.name != "_fused_rms_norm"
    rstd = operation.result[2 if has_mean else 1].reshape(sizes)
    if not normalized:
        weight, bias = (None if parameter is None else channelwise(parameter, x) for parameter in (weight, bias))
    return Normalisation(shape, dims, rstd, weight, bias, has_mean)


def attention_logits(operation: Operation) -> Tensor:
    """Return the logits (..., queries, keys) of fused attention, with its mask, in at least float32."""
    args = operation.args
    scale = args.get("scale") or args["query"].shape[-1] ** -0.5
    mask = args.get("attn_mask", args.get("attn_bias"))
    return masked_logits(args["query"], args["key"], scale, mask, is_causal=bool(args.get("is_causal")))


def derivative(operation: Operation, point: Tensor) -> Tensor:
    """Return the derivative of a pointwise operation."""
    name, args, ones = _operand(operation), operation.kept_args, point.new_ones(())
    if operation.name == "relu":
        return formulas.where_above(ones, point, 0)
    if operation.name == "hardtanh":
        return cast(
            "Tensor",
            aten.hardtanh_backward(ones.expand_as(point), point, args.get("min_val", -1), args.get("max_val", 1)),
        )
    with torch.enable_grad():
        point = point.detach().requires_grad_()
        (slope,) = torch.autograd.grad(operation.repeat(**{name: point}).sum(), point)
    return slope


def linear_operation(operation: Operation, operand: int) -> formulas.LinearOperation:
    """Return a convolution or matrix product as a function of one operand, in at least float32.

    Args:
        operation: The operation, with its operands.
        operand: The index of the factor that depends on the image; the other factor holds the weights.
    """
    is_convolution, args = operation.name == "convolution", operation.args
    names = ("input", "weight") if is_convolution else FACTORS[operation.name]
    x, weight = at_least_float32(args[names[operand]]), at_least_float32(args[names[1 - operand]])
    if (alpha := args.get("alpha", 1)) != 1:
        weight = weight * alpha
    bias = args["bias"] if is_convolution else args["self"] if "self" not in names else None
    if bias is not None:
        bias = at_least_float32(bias)
        bias = channelwise(bias, x) if is_convolution else bias * args.get("beta", 1)
    run, transposed = _convolution(args, x) if is_convolution else _matrix_product(operand)
    dims = tuple(range(1, x.dim())) if is_convolution else (-1 - operand,)
    return formulas.LinearOperation(x, weight, bias, run, transposed, dims)


def _merged(
    op: formulas.LinearOperation, operation: Operation, recorded: Tensor | None, norm: ChannelFactors
) -> tuple[formulas.LinearOperation, Callable[[], Tensor] | None]:
    """Return an operation with the batch norm after it, and the function that computes the result of the norm.

    The function is None if the output is that result.

    Args:
        op: The operation.
        operation: Its record.
        recorded: Its result, without the norm; None if it was not recorded.
        norm: The factors of the norm.
    """
    scale, shift = (channelwise(values, op.input).to(op.input.dtype) for values in norm[:2])
    if norm.relative is None:
        bias = shift if op.bias is None else torch.addcmul(shift, op.bias, scale)
        op = replace(op, bias=bias, weight=op.weight * _of_weights(operation, scale))
        op.find_output = None if recorded is None else partial(torch.addcmul, shift, recorded, scale)
        return op, None
    relative = channelwise(norm.relative, op.input).to(op.input.dtype)
    op = replace(op, bias=relative if op.bias is None else op.bias + relative, unit=scale)
    if recorded is None:
        return op, lambda: op.output * scale
    op.find_output = partial(torch.add, recorded, relative)
    return op, partial(torch.addcmul, shift, recorded, scale)


_TensorFunction = Callable[..., Tensor]


def _convolution(args: Mapping[str, Any], like: Tensor) -> tuple[_TensorFunction, _TensorFunction]:
    """Return a convolution, and its transpose in the input, as functions of a tensor and the weights."""
    options = itemgetter(*CONVOLUTION_OPTIONS)(args)

    def transposed(grad: Tensor, weight: Tensor) -> Tensor:
        mask = [True, False, False]
        return cast("Tensor", aten.convolution_backward.default(grad, like, weight, None, *options, mask)[0])

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return cast("Tensor", aten.convolution.default(x, weight, None if bias is None else bias.flatten(), *options))

    return run, transposed


def _matrix_product(operand: int) -> tuple[_TensorFunction, _TensorFunction]:
    """Return a matrix product with weights on one side, and its transpose, as functions of a tensor and the weights."""

    def run(x: Tensor, weight: Tensor, bias: Tensor | float | None = None) -> Tensor:
        product = x @ weight if operand == 0 else weight @ x
        return product if bias is None else product.add_(bias)

    def transposed(grad: Tensor, weight: Tensor) -> Tensor:
        return grad @ weight.mT if operand == 0 else weight.mT @ grad

    return run, transposed


def channelwise(parameter: Tensor, like: Tensor) -> Tensor:
    """Return one number per channel in a shape that broadcasts to (N, C, ...)."""
    return parameter.view(1, -1, *[1] * (like.dim() - 2))
