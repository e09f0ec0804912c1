"""FullGrad: the gradient at the input, and at the bias of every operation."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from ..attribution.base import Attribution, BatchAttribution
from ..attribution.forward import at_least_float32
from ..attribution.options import RunStats
from ..attribution.resolved_target import ResolvedTarget, output_rows
from ..engine.multi_pass import ImageAttribution, gradients_at, stack_images
from ..errors import NotApplicableError, warn
from ..hooks.autograd_graph import next_functions
from ..hooks.forward_args import bind_image
from ..hooks.model_state import leaf, run_model
from ..hooks.pytree import tree_map_tensors, tree_tensors
from ..layers.find import scan_layers
from ..layers.layout import layout_from

MAX_MISSING_SHARE = 1e-3
"""The share of the score that may be missing from the sum of all terms without a warning."""

# Names of functions, without underscores at their ends.

# Functions of degree one: they equal their derivative applied to their input.
_WITHOUT_BIAS = {
    *("get", "getitem", "size", "dim", "numel", "is_floating_point", "detach", "clone", "contiguous", "to", "float"),
    *("double", "half", "bfloat16", "type_as", "reshape", "view", "view_as", "permute", "transpose", "swapaxes"),
    *("movedim", "t", "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "expand_as", "repeat", "roll", "flip"),
    *("repeat_interleave", "unbind", "chunk", "split", "narrow", "select", "index_select", "gather", "pixel_shuffle"),
    *("pixel_unshuffle", "channel_shuffle", "interpolate", "mean", "sum", "neg", "abs", "amax", "amin", "relu"),
    *("leaky_relu", "prelu", "dropout", "alpha_dropout", "feature_dropout", "max_pool2d", "avg_pool2d"),
    *("adaptive_avg_pool2d", "adaptive_max_pool2d"),
}
# Functions that are of degree one if every operand depends on the image.
_JOINS = {"cat", "concat", "concatenate", "stack", "hstack", "vstack"}
_SUMS = {"add", "sub", "iadd", "radd", "isub"}
# Functions of each number by itself.
_POINTWISE = {
    *("relu6", "hardtanh", "hardswish", "hardsigmoid", "silu", "gelu", "elu", "selu", "celu", "mish", "softplus"),
    *("tanh", "sigmoid"),
}
_CONVOLUTIONS = {"conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
_CHANNELS_FIRST = {"conv2d", "conv_transpose2d", "batch_norm", "group_norm", "instance_norm"}
# Operations with locations, whose biases are in the map.
_IN_THE_MAP = _POINTWISE | _CHANNELS_FIRST | {"linear", "layer_norm", "rms_norm"}
# Names of these after the decompositions of torch.export. A decomposed linear layer has no locations.
_DECOMPOSED = {"convolution", "native_layer_norm", "native_group_norm", "native_batch_norm_legit_no_training"}


class FullGrad(Attribution):
    """The gradient times the input plus, for every operation, its gradient times its bias.

    The bias of an operation is its output less its derivative applied to its input: the bias of a convolution;
    beta - gamma * mean / deviation of a batch norm; f(z) - f'(z) z of a smooth activation; nothing for a ReLU, a
    pooling or a sum. So score = <gradient, input> + the sum over all operations of <gradient, bias>, exactly, also
    through layer norms, gates and attention. The difference between the two sides is the residual.

    The map adds up magnitudes, for the input and for each convolution, linear layer, norm and activation with
    locations: gradient times bias, scaled to 0..1 over the whole layer, summed over its channels and resized bilinearly
    to the input. Operations without locations, products and attention count in the sum but not in the map.

    The map depends little on the class: it hardly changes when the classifier is randomised.

    Values: (N, 1, H, W), shares of each layer's largest value, summed over channels and layers; their sum has no
        meaning. `residual` is in score units: the score less the sum of all terms.

    Warns:
        SaliencyWarning: More than a thousandth of the score is missing from the sum: an operation is not visible, as in
            scripted parts, or has no second derivative.

    Raises:
        NotApplicableError: The model was exported and decomposed (`run_decompositions`).
        TargetError: The target does not fit the model's output, or the score has no gradient at the input.

    Source: Srinivas and Fleuret, "Full-Gradient Representation for Neural Network Visualization" (2019),
        https://arxiv.org/abs/1905.00780.
    """

    name = "full_grad"
    cost = "1 forward, 1 backward"
    units = "shares of each layer's largest"
    sign = "absolute"
    is_complete = False
    """The residual is that of the unscaled terms, not of the values of the map."""

    def explain(self, x: Tensor, target: ResolvedTarget) -> BatchAttribution:
        """Compute the maps of a batch."""
        return self.explain_targets(x, [target])[0]

    def explain_targets(self, x: Tensor, targets: Sequence[ResolvedTarget]) -> list[BatchAttribution]:
        """Compute the maps for several targets, from one forward of each image."""
        if len(x) > 1:
            with torch.no_grad():
                output = run_model(self.model, x)
            for target in targets:
                target(output)
        rows = cache(lambda: output_rows(self.model, x[:1]))
        results: list[list[tuple[ImageAttribution, Tensor, RunStats]]] = [[] for _ in targets]
        for image in range(len(x)):
            start = time.perf_counter()
            with bind_image(image):
                forward = _BiasForward(self.model, x[image : image + 1])
                for number, target in enumerate(targets):
                    own = target if len(x) == 1 else target.repeated(image, 1, rows)
                    score, values, residual = forward.map(own, keep_graph=number + 1 < len(targets))
                    note = forward.note(residual, float(score))
                    stats = RunStats(1, time.perf_counter() - start, "complete", note=note)
                    results[number].append((ImageAttribution(values, residual=residual), score, stats))
        columns = (zip(*rows, strict=True) for rows in results)
        return [stack_images(maps, torch.stack(scores), stats) for maps, scores, stats in columns]


class _BiasForward:
    """One forward of one image (1, C, H, W), with the bias of every operation."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.x, self._model = leaf(x), model
        with BiasRecorder(self.x) as recorder:
            self.output = run_model(model, self.x)
        self.biases, self.missed = recorder.biases, recorder.missed
        if decomposed := _DECOMPOSED.intersection(bias.name for bias in self.biases):
            raise NotApplicableError(
                f"full_grad: the model calls {', '.join(sorted(decomposed))}, so it was exported and decomposed, and "
                "the locations of its biases are lost; pass the exported model as it was before run_decompositions"
            )

    def map(self, target: ResolvedTarget, *, keep_graph: bool) -> tuple[Tensor, Tensor, float]:
        """Return the score (), the map (1, H, W) and the residual for one target."""
        score = target(self.output)
        outputs = [tensor for tensor in tree_tensors(self.output) if tensor.requires_grad]
        at = [*map(get_gradient_edge, (self.x, *outputs)), *(bias.edge for bias in self.biases)]
        gradients = gradients_at(score, at, keep_graph=keep_graph)
        # The target is an operation too: its bias is zero for the score of a class.
        total = float(score.detach())
        for gradient, output in zip(gradients[1:], outputs, strict=False):
            total -= 0.0 if gradient is None else float(_product(gradient, output).sum())
        values = torch.zeros((), device=self.x.device, dtype=at_least_float32(self.x).dtype)
        terms = zip(gradients[1 + len(outputs) :], self.biases, strict=True)
        for gradient, bias in ((gradients[0], Bias("", at[0], self.x, self.x.shape)), *terms):
            if gradient is not None:
                product = _product(gradient, bias.values)
                total += float(product.sum())
                values = values + self._resized(product, bias)
        return score.detach()[0], values[0], float(score.detach()) - total

    def _resized(self, product: Tensor, bias: Bias) -> Tensor | float:
        """The magnitudes of a product in the size of the input (1, 1, H, W); 0 if it is not in the map."""
        size = (int(self.x.shape[-2]), int(self.x.shape[-1]))
        if not bias.name:
            return _scaled(product)
        if bias.name not in _IN_THE_MAP:
            return 0.0
        grids = scan_layers(self._model, self.x.detach()).grids if len(bias.shape) == 3 else ()
        layout = layout_from(bias.shape, 1, size, grids, channels_first=bias.name in _CHANNELS_FIRST)
        if layout is None or layout.grid == (1, 1):
            return 0.0
        return F.interpolate(_scaled(layout(product)), size, mode="bilinear", align_corners=False)

    def note(self, residual: float, score: float) -> str:
        """Describe the terms and the residual. Warns if too much is missing."""
        share = abs(residual) / max(abs(score), 1e-12)
        note = f"{len(self.biases)} biases; with them the terms miss {share:.1g} of the score"
        if self.missed:
            note += "; no bias of " + ", ".join(f"{name} ({count})" for name, count in self.missed.items())
        if share > MAX_MISSING_SHARE and abs(residual) > MAX_MISSING_SHARE:
            hint = "" if self.biases else ", and the map is the input times the gradient alone"
            warn(f"full_grad: {note}{hint} (scripted parts and custom autograd functions are not visible)")
        return note


def _product(gradient: Tensor, values: Tensor) -> Tensor:
    return at_least_float32(gradient) * at_least_float32(values.detach())


def _scaled(product: Tensor) -> Tensor:
    """The magnitudes of (1, C, h, w), scaled to 0..1 over the whole layer and summed over the channels (1, 1, h, w)."""
    size = product.abs()
    low, high = size.aminmax()
    summed = size.sum(1, keepdim=True) - size.shape[1] * low
    return (summed / torch.where(high > low, high - low, torch.ones_like(high))).clamp(min=0)


class Bias(NamedTuple):
    """The bias of one operation."""

    name: str  # of the function
    edge: GradientEdge  # of its output
    values: Tensor  # broadcasts to its output
    shape: tuple[int, ...]  # of its output


class BiasRecorder(TorchFunctionMode):
    """Record the bias of each operation of this thread that depends on the image. The model is not changed.

    Args:
        x: (1, C, H, W) the image, a leaf with a gradient.

    Attributes:
        biases: The biases that are not zero, in the order of the calls.
        missed: The number of calls of each function with an unknown bias.
    """

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.biases: list[Bias] = []
        self.missed: Counter[str] = Counter()
        # The nodes of the graph that depend on the image, and those that do not.
        self._dependent: set[Node] = {get_gradient_edge(x).node}
        self._independent: set[Node] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function, and record its bias."""
        options = dict(kwargs or {})
        # An exported model calls overloads, whose names have a suffix.
        name = getattr(getattr(func, "overloadpacket", func), "__name__", "").strip("_")
        if name in _WITHOUT_BIAS or not torch.is_grad_enabled():
            return func(*args, **options)
        tensors = list(tree_tensors((args, options)))
        signals = sum(map(self._is_signal, tensors))
        is_sum = signals == len(tensors) and (name in _JOINS or (name in _SUMS and signals == 2))
        if not signals or is_sum:
            return func(*args, **options)
        biases = self._biases(func, name, args, options, signals)
        output = func(*args, **options)
        changed = [tensor for tensor in tree_tensors(args[0] if output is None else output) if self._is_signal(tensor)]
        if len(biases) == len(changed):
            self.biases += [
                Bias(name, get_gradient_edge(tensor), bias, tuple(tensor.shape))
                for tensor, bias in zip(changed, biases, strict=True)
                if bool(bias.any())
            ]
        elif changed:
            self.missed[name] += 1
        return output

    def _is_signal(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on the image."""
        if not tensor.requires_grad or not tensor.is_floating_point():
            return False
        node, seen = get_gradient_edge(tensor).node, set[Node]()
        waiting = [node]
        while waiting:
            at = waiting.pop()
            if at in self._dependent:
                self._dependent.add(node)
                return True
            if at not in self._independent and at not in seen:
                seen.add(at)
                waiting += [function for function, _ in next_functions(at) if function is not None]
        self._independent |= seen
        return False

    def _biases(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], options: dict[str, Any], signals: int
    ) -> list[Tensor]:
        """The bias of each output of a call; none if they are not known."""
        if signals == 1 and (name == "linear" or name in _CONVOLUTIONS) and self._is_signal(args[0]):
            bias = options.get("bias", args[2] if len(args) > 2 else None)
            if bias is None:
                return [args[0].new_zeros(1)]
            return [bias.detach().view(1, -1, *[1] * (0 if name == "linear" else int(name[-2])))]
        if func is F.batch_norm and signals == 1 and not options.get("training", False):
            with torch.no_grad():
                return [func(torch.zeros_like(args[0][:1, :, :1, :1]), *args[1:], **options)]
        try:
            return self._computed_biases(func, args, options, pointwise=name in _POINTWISE and signals == 1)
        except (RuntimeError, NotImplementedError):
            return []

    def _computed_biases(
        self, func: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], *, pointwise: bool
    ) -> list[Tensor]:
        """The output of a function less its derivative applied to its operands, for each tensor of the output."""
        operands: list[Tensor] = []

        def copied(tensor: Tensor) -> Tensor:
            """A copy that the function may change in place."""
            if self._is_signal(tensor):
                operands.append(tensor.detach().requires_grad_())
                return operands[-1].clone()
            return tensor.detach().clone()

        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            own_args, own_options = tree_map_tensors((args, options), copied)
            result = func(*own_args, **own_options)
            result = own_args[0] if result is None else result
            outputs = [tensor for tensor in tree_tensors(result) if tensor.requires_grad]
            if pointwise:
                (slope,) = torch.autograd.grad(outputs[0].sum(), operands)
                return [torch.addcmul(outputs[0].detach(), slope, operands[0].detach(), value=-1)]
            # J^T u is linear in u, so the gradient of <J^T u, v> with respect to u is J v.
            directions = [torch.zeros_like(tensor, requires_grad=True) for tensor in outputs]
            back: tuple[Tensor | None, ...] = torch.autograd.grad(
                outputs, operands, directions, create_graph=True, allow_unused=True
            )
            pairs = [
                (grad, at.detach())
                for grad, at in zip(back, operands, strict=True)
                if grad is not None and grad.requires_grad
            ]
            if not pairs:
                return [tensor.detach() for tensor in outputs]
            gradients, points = zip(*pairs, strict=True)
            moved: tuple[Tensor | None, ...] = torch.autograd.grad(gradients, directions, points, allow_unused=True)
        return [y.detach() if jvp is None else y.detach() - jvp for y, jvp in zip(outputs, moved, strict=True)]
