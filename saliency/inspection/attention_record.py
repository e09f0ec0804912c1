"""The attention of a transformer: the probabilities of each call, and their gradients."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ..attribution.features import cell_at
from ..attribution.forward import Needs, SharedForward, TargetGradients
from ..attribution.inputs import each_alone
from ..attribution.questions import CallImages, Questions, explained_answer
from ..errors import LayerError, NotApplicableError, TargetError, plural, warn
from ..hooks.attention import AttentionCall, fuse_heads
from ..hooks.autograd_graph import sequence_nr
from ..hooks.manager import HookManager, is_hookable
from ..io.axes import require_two_axes
from ..io.inputs import Batch, ImagesLike, read
from ..model.answer import Answer
from ..model.call import (
    ForwardArgs,
    arguments_of,
    bind_image,
    categories_of,
    model_attribute,
    prepared_for_attribution,
    reference_tensor,
    shown_images,
    unwrap,
)
from ..model.layers import Layout, token_layout
from ..model.positions import PositionTrace
from ..targets.boxes import as_place
from ..targets.classes import TargetLike
from ..validation import check_choice, is_integer

Reduce = Literal["mean_heads", "max_heads", "min_heads"]
Query = int | Sequence[float] | None
"""A query: the number of its token, the point (x, y) of its patch on the image, or None for the mean of all queries."""

_Layouts = tuple[Layout | None, Layout | None]
"""Layouts of the queries and of the keys of a call, in the windows of one image; None for tokens without a grid."""


@dataclass(frozen=True, repr=False, eq=False)
class LayerAttention:
    """The attention of one call, computed from queries and keys when it is read.

    It holds the model and the graph of the call, so it cannot be pickled; its tensors can.

    Attributes:
        layer: The name of the module that ran the call.
        batch: The images as the model's input.
    """

    layer: str
    batch: Batch
    _call: AttentionCall
    _grad: Tensor | None
    _reduce: Reduce | None
    _layouts: Callable[[], list[tuple[Batch, _Layouts]]]  # of all images, or of each image of an answer

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the probabilities: (N, heads, queries, keys), without the heads if they are reduced.

        For attention in windows, N counts the windows of all images. For an answer, N is 1, and in an image tower the
        number of images or tiles.
        """
        images, heads, queries, keys = self._call.shape
        return (images, heads, queries, keys) if self._reduce is None else (images, queries, keys)

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

    def maps(self, query: Query = None) -> Tensor:
        """Return the attention of a query to each patch of the images (N, heads, h, w), or (N, h, w) of reduced heads.

        Tokens without a position, such as a class token or words, are left out. Windows are placed on the image; a
        query pays no attention outside its window. The first call after a forward runs one more forward of the same
        images, to trace the positions of the tokens.

        Args:
            query: The number of a token, such as 0 for a class token; or the point (x, y) of a patch, in pixels of the
                original image, or of the model's input if the image was given as a tensor. By default the mean of all
                queries, which is the attention that each patch receives.

        Raises:
            LayerError: The keys are not a grid of patches; or a point is given for queries that are not a grid, as in
                the language model of an answer.
            TargetError: The query does not exist, or is a number for attention in windows.
        """
        return torch.cat([self._maps(query, batch, *layouts) for batch, layouts in self._layouts()])

    def _maps(self, query: Query, batch: Batch, query_layout: Layout | None, key_layout: Layout | None) -> Tensor:
        images = len(batch.inputs)
        if key_layout is None:
            raise LayerError(f'the keys of "{self.layer}" are not one for each patch of the image')
        heads = self.probabilities if self._reduce is None else self.probabilities[:, None]
        heads = heads.reshape(images, -1, *heads.shape[1:])  # (N, windows, heads, queries, keys)
        windows, queries = heads.shape[1], heads.shape[3]
        if query is None:
            rows = heads.mean(3) / windows
        elif is_integer(query, least=None):
            if windows > 1:
                raise TargetError(f'query {query} of "{self.layer}" is in one of several windows; pass a point (x, y)')
            if not -queries <= int(query) < queries:
                raise TargetError(f'query {query} of "{self.layer}" is outside 0..{queries - 1}')
            rows = heads[..., int(query), :]
        else:
            rows = torch.zeros_like(heads[..., 0, :])
            for image in range(images):
                window, number = divmod(self._query_at(query, query_layout, batch, image), queries)
                rows[image, window] = heads[image, window, :, number]
        maps = key_layout(rows.transpose(2, 3).flatten(1, 2))
        return maps if self._reduce is None else maps[:, 0]

    def _query_at(self, point: Query, layout: Layout | None, batch: Batch, image: int) -> int:
        """Return the number of the query of an image at a point."""
        x, position = batch.inputs, as_place("query", point, 2)
        require_two_axes(x, "the query at a point")
        if layout is None or position is None:
            raise LayerError(f'the queries of "{self.layer}" have no position; pass the number of a query')
        row, column = cell_at(position, batch.frames[image], (x.shape[2], x.shape[3]), layout.grid, image)
        return layout.tokens[row * layout.grid[1] + column]

    def _reduced(self, maps: Tensor) -> Tensor:
        return maps if self._reduce is None else fuse_heads(maps, self._reduce.removesuffix("_heads"))

    def __repr__(self) -> str:
        """Return the layer and the shape."""
        return f'<LayerAttention of "{self.layer}", {self.shape}>'


def attention(
    model: nn.Module,
    image: ImagesLike | Answer,
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
        reduce: "mean_heads", "max_heads" or "min_heads" over the heads; None keeps the heads.
        forward_args: As for `Attribution.attribute`.

    Returns:
        One entry per call of attention on which the scores depend, in call order.

    Warns:
        SaliencyWarning: The attention of some modules cannot be read, because they compute it in another way.

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
    read_batch = image.of(model) if isinstance(image, Answer) else read_images(image)
    is_answer = isinstance(read_batch, Answer)
    batch = read_batch.inputs[:1] if is_answer else read_batch.inputs  # all images of an answer are in one row
    names = tuple(name for name, module in model.named_modules() if is_hookable(model, name, module))
    needs = Needs(backwards=int(target is not None), modules=names, attention=True)
    arguments = arguments_of(forward_args, read_batch)
    with (
        prepared_for_attribution(model, **arguments),
        bind_image(0) if is_answer else nullcontext(),
    ):
        frames = read_batch.frames[: len(batch)]
        resolved = Questions(target, CallImages(model, batch, categories_of(model), frames, read_images))
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

    @cache
    def layouts() -> list[tuple[Batch, list[_Layouts]]]:
        def trace(part: Batch, _targets: object) -> tuple[Batch, list[_Layouts]]:
            return part, _trace_layouts(model, part.inputs, resolved, [*layers.values()])

        with prepared_for_attribution(model, **arguments):
            return each_alone(read_batch, [None], trace)

    def layouts_of(number: int) -> list[tuple[Batch, _Layouts]]:
        return [(part, part_layouts[number]) for part, part_layouts in layouts()]

    return [
        LayerAttention(layers[call], read_batch, call, grad[call], reduce, partial(layouts_of, number))
        for number, call in enumerate(grads.attention)
    ]


def _trace_layouts(model: nn.Module, x: Tensor, target: Questions, names: Sequence[str]) -> list[_Layouts]:
    """Return the layouts of each call, from one more forward of a prepared model, given the layers of the calls."""
    with HookManager(exclusive=True), PositionTrace(x) as trace:
        calls = TargetGradients(SharedForward(model, x, Needs(attention=True)), target).attention

    def layout(operand: Tensor | None, call: AttentionCall) -> Layout | None:
        positions = None if operand is None else trace.positions(operand)
        if operand is None or positions is None or call.shape[0] % len(x):
            return None
        rows = positions.nanmean(-1).expand(-1, *operand.shape[:-1])
        of_one_head = rows.reshape(len(rows), call.shape[0], -1, rows.shape[-1])[:, :, 0]
        return token_layout(of_one_head.reshape(len(rows), len(x), -1), x)

    answer, layouts = explained_answer(), list[_Layouts]()
    for call, name in zip(calls, names, strict=True):
        if answer is not None and f"{name}.".startswith(f"{answer.reader}."):  # the language model
            has_positions = all(tokens.box is not None for tokens in answer.image_tokens)
            layouts.append((None, answer.layout(shown_images(x)[0]) if has_positions else None))
        elif answer is not None and len(answer.inputs) > 1:  # the rows of an image in the vision model are unknown
            layouts.append((None, None))
        else:
            layouts.append(
                (layout(call.query if call.weights is None else call.weights, call), layout(call.value, call))
            )
    return layouts


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
