"""The attention of a transformer: the probabilities of each call, and their gradients."""

from __future__ import annotations

import re
from functools import partial
from typing import Literal, get_args

from torch import Tensor, nn

from ..attribution.forward import Needs, SharedForward, TargetGradients
from ..attribution.resolved_target import ResolvedTarget
from ..errors import NotApplicableError, TargetError, plural, warn
from ..hooks.attention import AttentionCall, fuse_heads
from ..hooks.autograd_graph import sequence_nr
from ..hooks.forward_args import ForwardArgs, bind_forward_args
from ..hooks.manager import is_hookable
from ..hooks.model_state import categories_of, model_attribute, prepared_for_attribution, reference_tensor, unwrap
from ..io.inputs import ImagesLike, read
from ..targets.targets import TargetLike
from ..validation import check_choice

Reduce = Literal["mean_heads", "max_heads", "min_heads"]


class LayerAttention:
    """The attention of one call, computed from queries and keys when it is read.

    Attributes:
        layer: The name of the module that ran the call.
        shape: The shape of the probabilities: (N, heads, queries, keys), without the heads if they are reduced. For
            attention in windows, N counts the windows of all images.
    """

    def __init__(self, layer: str, call: AttentionCall, grad: Tensor | None, reduce: Reduce | None) -> None:
        images, heads, queries, keys = call.shape
        self.layer = layer
        self.shape = (images, heads, queries, keys) if reduce is None else (images, queries, keys)
        self._call, self._grad, self._reduce = call, grad, reduce

    @property
    def probabilities(self) -> Tensor:
        """The attention probabilities, which sum to 1 over the keys."""
        return self._reduced(self._call.probabilities())

    @property
    def gradient(self) -> Tensor:
        """The gradient of the score at the probabilities. Raises TargetError if no target was given."""
        if self._grad is None:
            raise TargetError("the gradient of attention needs a target: attention(model, image, target)")
        return self._reduced(self._call.gradient(self._grad))

    def _reduced(self, maps: Tensor) -> Tensor:
        return maps if self._reduce is None else fuse_heads(maps, self._reduce.removesuffix("_heads"))

    def __repr__(self) -> str:
        """Return the layer and the shape."""
        return f'<LayerAttention of "{self.layer}", {self.shape}>'


def attention(
    model: nn.Module,
    image: ImagesLike,
    target: TargetLike = None,
    *,
    reduce: Reduce | None = None,
    forward_args: ForwardArgs = (),
) -> list[LayerAttention]:
    """Read the attention of every layer in one forward, also of fused kernels, without changing the model.

    Fused kernels never form the probabilities. They are computed here from the queries and keys that the kernel saved,
    with masks, biases and rotary positions; their gradient follows from the values and the gradient at the kernel's
    result. Each entry is computed when it is read, so that only one layer at a time takes memory.

    Attention that changes its probabilities by its own formula (talking heads, outlook attention) or that divides each
    key by its sum over the tokens (factorised attention) is not read.

    Args:
        model: A transformer: fused attention of any kernel, `nn.MultiheadAttention`, or a softmax between two matrix
            products, over the last dimension.
        image: As for `Attribution.attribute`.
        target: As for `Attribution.attribute`, for the gradients. None computes no gradients.
        reduce: "mean_heads", "max_heads" or "min_heads" over the heads; None keeps them.
        forward_args: As for `Attribution.attribute`.

    Returns:
        One entry per call of attention on which the scores depend, in call order.

    Warns:
        SaliencyWarning: Some modules named after attention compute it in another way.

    Raises:
        NotApplicableError: No attention was found.
        MethodError: `reduce` is unknown.
        ImageError: The image cannot be read, or the model does not accept it.
        TargetError: The target does not fit the model's output.
    """
    if reduce is not None:
        check_choice("reduce", reduce, get_args(Reduce))
    model = unwrap(model)
    read_images = partial(read, preprocess=model_attribute("preprocess", model), like=reference_tensor(model))
    read_batch = read_images(image)
    batch = read_batch.inputs
    names = tuple(name for name, module in model.named_modules() if is_hookable(model, name, module))
    needs = Needs(backwards=int(target is not None), modules=names, attention=True)
    with prepared_for_attribution(model), bind_forward_args(forward_args, len(batch)):
        resolved = ResolvedTarget(target, len(batch), categories_of(model))
        resolved.bind(model, batch, lambda reference: read_images(reference).inputs, read_batch.frames)
        forward = SharedForward(model, batch, needs)
        grads = TargetGradients(forward, resolved)
        if not grads.attention:
            raise NotApplicableError(
                f"{type(model).__name__} has no attention that can be read: no fused attention, and no softmax between "
                "two matrix products, over the last dimension"
            )
        grad = {call: None if target is None else grads.node_gradient(call.node) for call in grads.attention}
        layers = {call: max(forward.operations.modules(call.node), key=len, default="") for call in grads.attention}
        _warn_of_others(model, forward, grads)
    return [LayerAttention(layers[call], call, grad[call], reduce) for call in grads.attention]


def _warn_of_others(model: nn.Module, forward: SharedForward, grads: TargetGradients) -> None:
    """Warn of innermost modules named after attention on which the scores depend and whose attention is not read."""
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    named = [name for name, kind in kinds.items() if re.search("(?i)att(entio)?n", kind)]
    innermost = [name for name in named if not any(other.startswith(f"{name}.") for other in named)]
    read = {name for call in grads.attention for name in forward.operations.modules(call.node)}
    numbers = {sequence_nr(node) for node in grads.nodes}
    others = [
        name
        for name in innermost
        if name not in read
        and any(number in call for call in forward.operations.calls.get(name, ()) for number in numbers)
    ]
    if others:
        count, total = len(grads.attention), plural(len(others) + len(grads.attention), "layer")
        others_are = f'the others, such as "{others[0]}" ({kinds[others[0]]}), compute it by their own formula'
        warn(f"attention was read in {count} of {total}; {others_are}")
