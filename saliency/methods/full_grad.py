"""FullGrad: the gradient at the input, and at the bias of every operation."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from ..attribution.base import Attribution
from ..attribution.explanation import BatchAttribution
from ..attribution.forward import Needs, SharedForward, TargetGradients
from ..attribution.options import RunStats
from ..attribution.passes import ImageAttribution, stack_images
from ..attribution.questions import Questions
from ..errors import warn
from ..hooks.autograd_graph import Gradients, next_functions, result_shape
from ..hooks.manager import HookManager
from ..hooks.operations import ACTIVATIONS, HOMOGENEOUS, PLAIN, Operation, SavedValues, is_batch_norm, is_view
from ..io.axes import at_least_float32, resize
from ..model.call import bind_image, run_model
from ..model.layers import layout_from, trace_layers
from ..relevance.propagation import channelwise, constant_part, holds_constant, kind_of
from ..relevance.walk import CallGraph

_WITH_SUMMAND = ("addmm", "baddbmm", "addmv")
MAX_MISSING_SHARE = 1e-3
"""The fraction of the score that may be missing from the sum of all terms without a warning."""


class FullGrad(Attribution):
    """The gradient times the input plus, for every operation, its gradient times its bias.

    Formula: S = ψ(x ⊙ ∂y/∂x) + Σ_l up(ψ(b_l ⊙ ∂y/∂z_l)), with z_l and b_l the result and the bias of operation l, and ψ
    the magnitudes, stretched to 0..1 and summed over channels.

    The bias of an operation is its output minus its derivative applied to its input: the bias of a convolution; for a
    batch norm, beta - gamma * mean / deviation; f(z) - f'(z) z for a smooth activation; zero for a ReLU, a pooling or a
    sum. So score = <gradient, input> + the sum over all operations of <gradient, bias>, exactly, also through layer
    norms, gates and attention. The difference between the two sides is the residual.

    The map adds up magnitudes, for the input and for each convolution, linear layer, norm and activation with
    locations: gradient times bias, scaled to 0..1 over the whole layer, summed over its channels and resized bilinearly
    to the input. Operations without locations, products, attention, and activations and RMS norms written as several
    operations are in the sum but not in the map.

    The map depends little on the class: it hardly changes when the classifier is randomised.

    Values: (N, 1, H, W), fractions of each layer's largest value, summed over channels and layers; their sum has no
        meaning. `residual` is in score units: the score minus the sum of all terms.

    Warns:
        SaliencyWarning: More than a thousandth of the score is missing from the sum: an operation is not visible, as in
            fused scripts and functions with a backward pass in Python. Or the map differs from the map of the plain
            model, because it runs in `vmap` or is frozen by TorchScript.

    Raises:
        TargetError: The target does not fit the model's output, or the score has no gradient at the input.

    Source: Srinivas and Fleuret, "Full-Gradient Representation for Neural Network Visualization" (2019),
        https://arxiv.org/abs/1905.00780.
    """

    name = "full_grad"
    ignores_sign = True
    cost = "1 forward, 1 backward"
    units = "fractions of each layer's largest"
    sign = "absolute"
    needs = Needs(backwards=1, values=SavedValues.CONSTANTS)
    is_complete = False
    """The residual belongs to the unscaled terms, not to the values of the map."""

    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        """Compute the maps of a batch."""
        return self.explain_targets(x, [target])[0]

    def explain_targets(self, x: Tensor, targets: Sequence[Questions]) -> list[BatchAttribution]:
        """Compute the maps for several targets, from one forward of each image."""
        if len(x) > 1:
            with torch.no_grad():
                output = run_model(self.model, x)
            for target in targets:
                target(output)
        results: list[list[tuple[ImageAttribution, Tensor, RunStats]]] = [[] for _ in targets]
        for image in range(len(x)):
            start = time.perf_counter()
            with bind_image(image):
                row = x[image : image + 1]
                forward = SharedForward(self.model, row, self.needs, len(targets))
                for number, target in enumerate(targets):
                    questions = target if len(x) == 1 else target.variants(image, 1)
                    grads = TargetGradients(forward, questions)
                    terms = _Terms(self.model, grads)
                    stats = RunStats(1, time.perf_counter() - start, "complete", note=terms.note())
                    attribution = ImageAttribution(terms.values, residual=terms.residual)
                    results[number].append((attribution, grads.scores[0], stats))
        columns = (zip(*rows, strict=True) for rows in results)
        return [stack_images(maps, torch.stack(scores), stats) for maps, scores, stats in columns]


class _Terms:
    """The terms of one score of one image: for each operation, its gradient times its bias.

    Attributes:
        values: (1, H, W) the map.
        residual: The score minus the sum of all terms.
    """

    def __init__(self, model: nn.Module, grads: TargetGradients) -> None:
        self._model, self._grads = model, grads
        self._biases, self._sums, self._missed = 0, list[Tensor](), Counter[str]()
        self._is_vmapped, self._constants = False, _constant_biases(grads)
        # The shape in which the result of an operation is used, because a linear layer flattens its locations.
        self._used_as = {used: result_shape(node) for node in grads.nodes for used, _ in next_functions(node)}
        with HookManager() as hooks:
            self.values = torch.zeros((), device=grads.x.device, dtype=at_least_float32(grads.x).dtype)
            for node in grads.nodes:
                hooks.at_node(node, partial(self._add, node))
            product = _product(grads.input_gradient(), grads.x)
        # One transfer from the device.
        self._score, *sums = torch.stack([grads.scores[0], *self._sums, product.sum()]).tolist()
        self.residual = self._score - sum(sums)
        self.values = (self.values + _scaled(product))[0]

    def _add(self, node: Node, passed: Gradients, arrived: Gradients) -> None:
        """Add the terms of an operation, given the gradients at its operands and results."""
        if all(grad is None for grad in arrived):
            return
        operation = self._grads.forward.operations.operation(node)
        self._is_vmapped |= operation is not None and operation.is_vmapped
        terms = _terms(node, operation, passed, arrived, self._constants) if operation else None
        if terms is None or operation is None:
            self._missed[operation.name if operation else node.name()] += 1
            return
        self._biases += bool(terms)
        for term in terms:
            self._sums.append(term.sum())
            self._draw(term, operation, self._used_as.get(node, ()))

    def _draw(self, term: Tensor, operation: Operation, used_as: tuple[int, ...]) -> None:
        """Add the magnitudes of a term, in the size of the input, to the map if it has locations."""
        if operation.name == "addmm" and used_as[-1:] == term.shape[-1:] and math.prod(used_as) == term.numel():
            term = term.reshape(used_as)
        x = self._grads.x
        size = tuple(x.shape[2:])
        is_channels_first = operation.name in ("convolution", "native_group_norm") or is_batch_norm(operation.op)
        layout = layout_from(term.shape, 1, size, channels_first=is_channels_first)
        if term.dim() == 3:
            layers = trace_layers(self._model, x).spatial
            layouts = {layer.layout for layer in layers if len(layer.shape) == 3 and layer.shape[1] == term.shape[1]}
            layout = layouts.pop() if len(layouts) == 1 else None
        is_own = term.shape[:1] == x.shape[:1]  # not parts of the image as a batch, as in deformable attention
        if is_own and layout is not None and math.prod(layout.grid) > 1:
            self.values = self.values + resize(_scaled(layout(term)), size)

    def note(self) -> str:
        """Describe the terms and the residual. Warns if too much is missing."""
        fraction = abs(self.residual) / max(abs(self._score), 1e-12)
        note = f"{self._biases} biases; with them the terms miss {fraction:.1g} of the score"
        if self._missed:
            note += "; no bias of " + ", ".join(f"{name} ({count})" for name, count in self._missed.items())
        if self._is_vmapped or not all(hasattr(module, "training") for module in self._model.modules()):
            warn("full_grad: vmap and torch.jit.freeze change operations, and so the map; pass the model without them")
        if fraction > MAX_MISSING_SHARE and abs(self.residual) > MAX_MISSING_SHARE:
            hint = "" if self._biases else ", and the map is the input times the gradient alone"
            warn(f"full_grad: {note}{hint} (fused scripts and custom autograd functions are not visible)")
        return note


@torch.no_grad()
def _constant_biases(grads: TargetGradients) -> dict[Node, Tensor | None]:
    """Return the biases of linear operations, and of batch norms with constant statistics; None for biases of zero."""
    graph = CallGraph(grads)
    biases: dict[Node, Tensor | None] = {node: factors.shift for node, factors in graph.channel_factors.items()}
    for node, operation in graph.operations.items():
        if operation is not None and kind_of(operation.op) == "linear":
            biases[node] = operation.args.get("self" if operation.name in _WITH_SUMMAND else "bias")
    tensors = {node: bias for node, bias in biases.items() if bias is not None}
    if tensors:
        is_any = torch.stack([bias.any() for bias in tensors.values()]).tolist()  # one transfer from the device
        biases |= {node: None for node, has_any in zip(tensors, is_any, strict=True) if not has_any}
    return biases


def _terms(
    node: Node, operation: Operation, passed: Gradients, arrived: Gradients, constants: Mapping[Node, Tensor | None]
) -> list[Tensor] | None:
    """Return the gradient times the bias of an operation, as a sum if it is not in the map; None if it has no rule.

    `constants` holds the biases of some nodes; None for biases of zero.
    """
    kind, args = kind_of(operation.op), operation.args
    if any(grad is not None and grad.is_complex() for grad in (*passed, *arrived)):
        is_linear = is_view(operation.op) or operation.name in PLAIN or kind == "mul"
        return [] if is_linear and sum(grad is not None for grad in passed) == 1 else None
    grad = next(grad for grad in arrived if grad is not None)
    if holds_constant(operation) and not operation.is_part:
        term = _product(grad, constant_part(node, operation, grad.device)).nan_to_num_(0, 0, 0)
        # A linear layer adds its bias in a separate step if its input is not contiguous.
        return [term if getattr(args.get("other"), "ndim", 0) == 1 else term.sum()]
    is_constant = operation.name in ("copy", "index_put") and passed[-1] is None
    if is_constant or operation.name == "fill" or holds_constant(operation):
        return None  # the constant that is written to a part is not recorded
    if is_view(operation.op) or operation.name in PLAIN | HOMOGENEOUS:
        return []
    operands = _operands(args)
    pairs = [(grad, operand) for grad, operand in zip(passed, operands, strict=False) if grad is not None]
    if kind == "linear":
        return _linear_terms(operation, passed, grad, constants.get(node))
    if kind in ("norm", "batch_norm"):
        bias = constants[node] if node in constants else _norm_bias(operation)
        terms = [] if bias is None else [_product(grad, channelwise(bias, grad) if node in constants else bias)]
        return terms if len(pairs) == 1 else None
    if len(pairs) == 1 and (kind == "mul" or (kind == "div" and passed[0] is not None)):
        return []
    if operation.is_part or operation.result is None:
        return None
    results = operation.result if isinstance(operation.result, tuple) else [operation.result]
    outputs = [_product(grad, result) for grad, result in zip(arrived, results, strict=False) if grad is not None]
    inputs = [_product(*pair) for pair in pairs]
    if operation.name in ACTIVATIONS:
        return [outputs[0] - inputs[0]]
    return [*(term.nansum() for term in outputs), *(-term.nansum() for term in inputs)]


def _linear_terms(operation: Operation, passed: Gradients, grad: Tensor, bias: Tensor | None) -> list[Tensor]:
    """Return the term of the bias, and the term of a product of two factors that both depend on the image."""
    args, has_summand = operation.args, operation.name in _WITH_SUMMAND
    terms = [] if bias is None else [_product(grad, channelwise(bias, grad) if "groups" in args else bias)]
    _, *second = zip(passed[has_summand:], _operands(args)[has_summand:], strict=False)
    if passed[has_summand] is not None:
        terms += [-_product(grad, factor).sum() for grad, factor in second[:1] if grad is not None]
    return terms


def _norm_bias(operation: Operation) -> Tensor:
    """Return the result of a norm minus its derivative applied to its input."""
    x = operation.args["input"].detach()
    result, derivative, *_ = torch.func.jvp(lambda x: operation.repeat(input=x)[0], (x,), (x,))
    return cast("Tensor", result - derivative)


def _operands(args: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that have a gradient, in order; None for a missing argument."""
    parts = [part for value in args.values() for part in (value if isinstance(value, list | tuple) else [value])]
    return [part for part in parts if part is None or (isinstance(part, Tensor) and part.is_floating_point())]


def _product(gradient: Tensor, values: Tensor) -> Tensor:
    return at_least_float32(gradient) * at_least_float32(values.detach())


def _scaled(product: Tensor) -> Tensor:
    """Return magnitudes (1, C, h, w), scaled to 0..1 over the whole layer and summed over channels (1, 1, h, w).

    The product is overwritten.
    """
    size = product.abs_()
    low, high = size.aminmax()
    summed = size.sum(1, keepdim=True) - size.shape[1] * low
    return (summed / torch.where(high > low, high - low, torch.ones_like(high))).clamp(min=0)
