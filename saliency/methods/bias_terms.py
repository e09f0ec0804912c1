"""The bias of every operation of a forward: what it returns less its derivative applied to what it is given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from ..hooks.autograd_graph import next_functions
from ..hooks.pytree import tree_leaves, tree_map_tensors, tree_tensors


class Bias(NamedTuple):
    """The bias of one operation."""

    name: str  # of the function
    edge: GradientEdge  # where the gradient of what it returned comes by
    bias: Tensor  # broadcasts to what it returned
    shape: tuple[int, ...]  # of what it returned


# Functions of degree one: what they return is their derivative applied to what they are given.
_WITHOUT_BIAS = frozenset(
    {
        "__get__",
        "__getitem__",
        "reshape",
        "view",
        "view_as",
        "permute",
        "transpose",
        "swapaxes",
        "movedim",
        "t",
        "flatten",
        "unflatten",
        "squeeze",
        "unsqueeze",
        "expand",
        "expand_as",
        "repeat",
        "repeat_interleave",
        "clone",
        "contiguous",
        "to",
        "float",
        "double",
        "half",
        "bfloat16",
        "type_as",
        "detach",
        "roll",
        "flip",
        "unbind",
        "chunk",
        "split",
        "narrow",
        "select",
        "index_select",
        "gather",
        "mean",
        "sum",
        "neg",
        "relu",
        "relu_",
        "leaky_relu",
        "leaky_relu_",
        "prelu",
        "abs",
        "amax",
        "amin",
        "dropout",
        "dropout_",
        "alpha_dropout",
        "feature_dropout",
        "max_pool2d",
        "avg_pool2d",
        "adaptive_avg_pool2d",
        "adaptive_max_pool2d",
        "pixel_shuffle",
        "pixel_unshuffle",
        "channel_shuffle",
        "interpolate",
        "size",
        "dim",
        "numel",
        "is_floating_point",
    }
)

# Functions that are so where all that they are given depends on the image.
_WITHOUT_BIAS_TOGETHER = frozenset(
    {
        "cat",
        "concat",
        "concatenate",
        "stack",
        "hstack",
        "vstack",
        "add",
        "add_",
        "sub",
        "sub_",
        "__add__",
        "__iadd__",
        "__radd__",
        "__sub__",
        "__isub__",
    }
)

# Functions of each number by itself.
POINTWISE = frozenset(
    {
        "relu6",
        "relu6_",
        "hardtanh",
        "hardtanh_",
        "hardswish",
        "hardswish_",
        "hardsigmoid",
        "hardsigmoid_",
        "silu",
        "silu_",
        "gelu",
        "gelu_",
        "elu",
        "elu_",
        "selu",
        "selu_",
        "celu",
        "celu_",
        "mish",
        "mish_",
        "softplus",
        "tanh",
        "tanh_",
        "sigmoid",
        "sigmoid_",
    }
)

_AFFINE = ("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")


class BiasWatch(TorchFunctionMode):
    """Notes the bias of each operation that depends on the image, in this thread. Nothing is attached to the model.

    Args:
        x: (1, C, H, W) the image, a leaf with a gradient.

    Attributes:
        biases: Those that are not zero, in the order of the calls.
        missed: How often which function has a bias that cannot be had.
    """

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.biases: list[Bias] = []
        self.missed: Counter[str] = Counter()
        self._x = x
        # Whether a node of the graph depends on the image.
        self._depends: dict[Node, bool] = {get_gradient_edge(x).node: True}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function, and note its bias."""
        given = dict(kwargs or {})
        name = _name(func)
        if name in _WITHOUT_BIAS or not torch.is_grad_enabled():
            return func(*args, **given)
        signals = self._signals((args, given))
        if not signals or (name in _WITHOUT_BIAS_TOGETHER and self._all_signals(args, len(signals))):
            return func(*args, **given)
        biases = self._biases(func, name, args, given, signals)
        output = func(*args, **given)
        changed = [each for each in tree_tensors(args[0] if output is None else output) if self._is_signal(each)]
        if biases is None or len(biases) != len(changed):
            if changed:
                self.missed[name] += 1
            return output
        for tensor, bias in zip(changed, biases, strict=True):
            if bool(bias.any()):
                self.biases.append(Bias(name, get_gradient_edge(tensor), bias, tuple(tensor.shape)))
        return output

    def _signals(self, nest: Any) -> list[Tensor]:
        return [each for each in tree_tensors(nest) if self._is_signal(each)]

    def _all_signals(self, args: tuple[Any, ...], signals: int) -> bool:
        """Whether nothing but signals is added up: no other tensor, and no number."""
        numbers = [each for each in args if isinstance(each, int | float)]
        return not numbers and len(list(tree_leaves(args, Tensor))) == signals

    def _is_signal(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on the image."""
        if not tensor.requires_grad or not tensor.is_floating_point():
            return False
        return tensor is self._x or (tensor.grad_fn is not None and self._reaches(tensor.grad_fn))

    def _reaches(self, node: Node) -> bool:
        waiting = [node]
        while waiting:
            at = waiting[-1]
            if at in self._depends:
                waiting.pop()
                continue
            before = [function for function, _ in next_functions(at) if function is not None]
            unknown = [each for each in before if each not in self._depends]
            if unknown:
                waiting += unknown
                continue
            self._depends[at] = any(self._depends[each] for each in before)
            waiting.pop()
        return self._depends[node]

    def _biases(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], given: dict[str, Any], signals: list[Tensor]
    ) -> list[Tensor] | None:
        """The biases of what a function is about to return; None where they cannot be had."""
        with torch.no_grad():
            if name in _AFFINE and len(signals) == 1 and args and args[0] is signals[0]:
                bias = given.get("bias", args[2] if len(args) > 2 else None)
                if bias is None:
                    return [signals[0].new_zeros(1)]
                return [bias.detach() if name == "linear" else bias.detach().view(1, -1, *[1] * int(name[-2]))]
            if func is F.batch_norm and len(signals) == 1 and not given.get("training", False):
                return [func(torch.zeros_like(args[0][:1, :, :1, :1]), *args[1:], **given)]
        try:
            if name in POINTWISE and len(signals) == 1:
                return _pointwise_bias(func, name, args, given, self._is_signal)
            return _general_biases(func, args, given, self._is_signal)
        except (RuntimeError, NotImplementedError):
            return None


def _name(func: Any) -> str:
    """The name of a function; of an overload, as an exported model calls it, the name without the overload."""
    return getattr(getattr(func, "overloadpacket", func), "__name__", "")


def _pointwise_bias(
    func: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    given: dict[str, Any],
    is_signal: Callable[[Tensor], bool],
) -> list[Tensor]:
    """The same for a function of each number by itself, whose derivative takes one backward pass."""
    at: list[Tensor] = []
    works_in_place = name.endswith("_") or any(each is True for each in (*args, *given.values()))

    def shared(tensor: Tensor) -> Tensor:
        at.append(tensor.detach().requires_grad_())
        return at[-1]

    with torch.enable_grad():
        take = partial(_copied, is_signal, at) if works_in_place else shared
        own_args, own_given = tree_map_tensors((args, given), take)
        made: Tensor = func(*own_args, **own_given)
        (slope,) = torch.autograd.grad(made.sum(), at)
    return [torch.addcmul(made.detach(), slope, at[0].detach(), value=-1)]


def _general_biases(
    func: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any], is_signal: Callable[[Tensor], bool]
) -> list[Tensor]:
    """What a function returns less its derivative applied to what it is given, for each tensor that it returns.

    The derivative J is applied by two backward passes: J^T u is linear in u, and its derivative there is J.
    """
    at: list[Tensor] = []
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        own_args, own_given = tree_map_tensors((args, given), partial(_copied, is_signal, at))
        made = func(*own_args, **own_given)
        outputs = [each for each in tree_tensors(own_args[0] if made is None else made) if each.requires_grad]
        directions = [torch.zeros_like(each, requires_grad=True) for each in outputs]
        back = _applied(outputs, at, directions, create_graph=True)
        pairs = [
            (each, a.detach()) for each, a in zip(back, at, strict=True) if each is not None and each.requires_grad
        ]
        if not pairs:
            return [each.detach() for each in outputs]
        forth = _applied([each for each, _ in pairs], directions, [a for _, a in pairs])
    return [
        output.detach() if moved is None else output.detach() - moved
        for output, moved in zip(outputs, forth, strict=True)
    ]


def _copied(is_signal: Callable[[Tensor], bool], at: list[Tensor], tensor: Tensor) -> Tensor:
    """A copy of an operand that the function may change; where it depends on the image, its leaf is added to `at`."""
    if not is_signal(tensor):
        return tensor.detach().clone()
    at.append(tensor.detach().clone().requires_grad_())
    return at[-1].clone()  # a leaf may not be worked on in place


def _applied(
    outputs: list[Tensor], at: list[Tensor], directions: list[Tensor], *, create_graph: bool = False
) -> tuple[Tensor | None, ...]:
    """The transposed derivatives of outputs at some tensors, applied to directions; None where there is none."""
    return torch.autograd.grad(outputs, at, directions, create_graph=create_graph, allow_unused=True)
