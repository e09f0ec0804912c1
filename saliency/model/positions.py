"""Trace the image positions of all numbers of a forward, so that no layout is guessed from a shape.

A dispatch mode follows positions through the operations of a model: an operation moves numbers (a reshape, a
concatenation, a gather), combines numbers of one position (a sum), or mixes positions (a matrix product).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import partial, reduce
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..hooks import operations
from ..hooks.autograd_graph import MemoryMode, memory_id
from ..hooks.pytree import tree_map_tensors, tree_tensors

Grid = tuple[int, ...]

_PADS = {"reflection_pad3d", "replication_pad3d"}
_MOVING = operations.MOVES | _PADS | {"gather", "scatter", "index_put", "native_channel_shuffle"}
_IN_PLACE = operations.NORMS | operations.SOFTMAX | {"clone", "_to_copy", "_log_softmax", "native_dropout"}
_REDUCTIONS = {"mean", "sum", "amax", "amin", "max", "min", "logsumexp", "var", "std", "var_mean", "linalg_vector_norm"}
_RESAMPLING = ("convolution", "max_pool", "avg_pool", "adaptive", "_adaptive", "upsample", "_upsample")
SAME = 0.25  # in pixels: closer positions are the same
PART = 0.6  # of the height or width of an image: maps that cover less show only a part of the image


class _MemoryPart(NamedTuple):
    """Part of a memory that a tensor holds. A complex number is two numbers with one position."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> _MemoryPart:
        shape, strides, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        if tensor.is_complex():
            return cls((*shape, 2), (*(2 * stride for stride in strides), 1), 2 * offset)
        return cls(shape, strides, offset)

    def view(self, memory: Tensor) -> Tensor:
        """Return the part (axes, *shape) of a memory (axes, numbers)."""
        return memory.as_strided((len(memory), *self.shape), (memory.shape[1], *self.strides), self.offset)


class _MemoryPositions:
    """Positions of the numbers in the memory of a tensor and its views.

    They are stored by tensor, without dimensions along which they are constant, such as the channels.
    """

    def __init__(self, tensor: Tensor, axes: int) -> None:
        size = tensor.element_size() // (2 if tensor.is_complex() else 1)
        self._numbers, self._device = tensor.untyped_storage().nbytes() // size, tensor.device
        self._positions: dict[_MemoryPart, Tensor] = {}
        self._axes = axes
        self._whole: Tensor | None = None  # (axes, numbers), once a tensor without stored positions is read

    def read(self, part: _MemoryPart) -> Tensor:
        """Return the positions of a tensor in this memory, which expand to (axes, *shape)."""
        return self._positions[part] if part in self._positions else part.view(self._all())

    def write(self, part: _MemoryPart, positions: Tensor) -> None:
        """Change the positions of a tensor in this memory."""
        if self._whole is None and self._positions.keys() <= {part}:
            self._positions = {part: _compact(positions)}
            return
        self._whole = self._all().clone()  # results may be views of it
        part.view(self._whole).copy_(positions.expand(self._axes, *part.shape))
        self._positions = {}

    def add_view(self, part: _MemoryPart, positions: Tensor) -> None:
        """Keep the positions of a view."""
        self._positions.setdefault(part, positions)

    def _all(self) -> Tensor:
        if self._whole is None:
            self._whole = torch.full((self._axes, self._numbers), torch.nan, device=self._device, dtype=torch.float32)
            for part, positions in list(self._positions.items())[:1]:  # the others are its views
                part.view(self._whole).copy_(positions.expand(self._axes, *part.shape))
        return self._whole


class PositionTrace(MemoryMode[_MemoryPositions]):
    """Mode that follows the positions of an image's pixels through the operations of this thread.

    A position is a row and a column in pixels, after a depth in volumes, of one pixel or of the centre of several. A
    parameter, such as a class token, has no position. Neither do numbers whose order depends on the values of the
    image or on random numbers.

    Args:
        x: The batch (N, C, H, W).
        follows_values: Whether an order that depends on the values of the image is followed. The positions then hold
            for this image alone.

    Attributes:
        queries: The positions (2, ..., queries) of the queries of each attention call.
    """

    def __init__(self, x: Tensor, *, follows_values: bool = False) -> None:
        self._axes = x.dim() - 2
        super().__init__(lambda tensor: _MemoryPositions(tensor, self._axes))
        self.queries: list[Tensor] = []
        self._follows_values = follows_values
        edges = [torch.arange(length, device=x.device, dtype=torch.float32) for length in x.shape[2:]]
        self._store(x, torch.stack(torch.meshgrid(edges, indexing="ij"))[:, None, None])

    def positions(self, tensor: Tensor) -> Tensor | None:
        """Return the positions (axes, ...) of the numbers of a tensor; None for constants.

        Numbers without a position have NaN. A dimension along which all positions are equal may have length 1.
        """
        memory = self.known_memory(tensor)
        if memory is None:
            return None
        positions = memory.read(_MemoryPart.of(tensor))
        return positions[..., 0] if tensor.is_complex() else positions

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and store the positions of its results."""
        kwargs = kwargs or {}
        result = op(*args, **kwargs)
        tensors = list(tree_tensors((args, kwargs)))
        operands = list(filter(_is_plain, tensors))
        memories = {memory_id(tensor) for tensor in operands}
        # Fused attention has the tag of random operations for its dropout. Tokens of text after it are traced, so that
        # the layers after a cross-attention are not mistaken for the layer that reads the embeddings of an answer.
        is_random = torch.Tag.nondeterministic_seeded in op.tags
        is_random = is_random and (self._follows_values or not operations.is_attention(op))
        is_traced = is_random or len(operands) < len(tensors) or any(map(self.known_memory, operands))
        named = operations.named_arguments(op, args, kwargs)
        for number, tensor in enumerate(operations.as_results(result)):
            if not isinstance(tensor, Tensor) or not _is_plain(tensor):
                continue
            if memory_id(tensor) in memories and not operations.writes_operand(op):
                self._view(op, named, number, tensor)
            elif is_traced:
                self._store(tensor, None if number else self._of_result(op, named, tensor.shape))
        return result

    def _store(self, tensor: Tensor, positions: Tensor | None) -> None:
        """Store the positions of a result; None if they cannot be determined."""
        self.forget_freed()
        positions = _unknown(tensor) if positions is None else positions
        self.memory(tensor).write(_MemoryPart.of(tensor), positions[..., None] if tensor.is_complex() else positions)

    def _view(self, op: operations.Op, named: dict[str, Any], number: int, view: Tensor) -> None:
        """Store the positions of a view, if they need no copy of the positions of the viewed tensor."""
        operand = next(tree_tensors(named))
        memory = self.known_memory(operand)
        has_real = not (operand.is_complex() or view.is_complex())  # operations on complex numbers refuse positions
        if memory is not None and has_real and "stride" not in named:  # the stride describes the memory
            positions = memory.read(_MemoryPart.of(operand))
            planes = positions.expand(self._axes, *operand.shape)
            with suppress(RuntimeError):  # the view needs a dimension that the positions lack
                views = [operations.as_results(op(**{**named, next(iter(named)): plane}))[number] for plane in planes]
                memory.add_view(_MemoryPart.of(view), torch.stack(list(map(_compact, views))))

    def _of_result(self, op: operations.Op, named: dict[str, Any], shape: torch.Size) -> Tensor | None:
        """Return the positions of the first result of an operation, which expand to (axes, *shape), or None."""
        name = operations.operator_name(op)
        positions = [part for part in map(self.positions, filter(_is_plain, tree_tensors(named))) if part is not None]
        if not positions or name in ("fill", "zero"):
            return None
        if name == "copy":
            return self.positions(named["src"])
        if name in _MOVING:
            return self._moved(op, named)
        if name in operations.FACTORS or name.startswith(("linear", "mkldnn_linear")):
            keys = operations.FACTORS.get(name)
            return self._of_product([named[key] for key in keys] if keys else [next(tree_tensors(named))])
        if operations.is_attention(op):
            query = self.positions(named["query"])
            return None if query is None else self._of_queries(query, named["query"].shape)
        if name in operations.SOFTMAX:
            self._of_queries(positions[0], shape)
        if name in _REDUCTIONS:
            return _reduced(positions[0], named.get("dim"), keeps=len(shape) == positions[0].dim() - 1)
        if name.startswith(_RESAMPLING) and len(shape) == positions[0].dim() - 1 > 2:
            return _several(_resampled(positions[0].nanmean(2, keepdim=True), shape[2:]))
        if name in _IN_PLACE or operations.is_batch_norm(op) or operations.is_elementwise(op):
            return reduce(_merged, [_ranked(part, len(shape)) for part in positions])
        return None

    def _of_queries(self, positions: Tensor, shape: torch.Size) -> Tensor:
        """Return the positions of the results of attention, which are the positions of its queries."""
        rows = positions.nanmean(-1, keepdim=True)
        self.queries.append(rows[..., 0].expand(self._axes, *shape[:-1]))
        return rows

    def _moved(self, op: operations.Op, named: dict[str, Any]) -> Tensor | None:
        """Return the positions after an operation that moves numbers, by running it on the positions."""
        indices = (part for part in tree_tensors(named) if not part.is_floating_point())
        if not self._follows_values and any(self.positions(part) is not None for part in indices):
            return None  # the order depends on the image
        if not any(part.is_floating_point() for part in tree_tensors(named)):
            return None
        if operations.operator_name(op) == "constant_pad_nd":
            named = {**named, "value": torch.nan}

        def axis(number: int, operand: Tensor) -> Tensor:
            if not operand.is_floating_point():
                return operand
            stored = self.positions(operand)
            positions = stored if stored is not None else _unknown(operand)
            return positions.expand(self._axes, *operand.shape)[number]

        axes = (tree_map_tensors(named, partial(axis, number)) for number in range(self._axes))
        return torch.stack([operations.out_of_place(op)(**operands) for operands in axes])

    def _of_product(self, factors: Sequence[Tensor]) -> Tensor | None:
        """Return the positions of a matrix product: from the rows of the first factor, else from the columns."""
        for factor, mixed in zip(factors, (-1, -2), strict=False):
            positions = self.positions(factor)
            ends = None if positions is None else _several(positions.nanmean(mixed, keepdim=True))
            if ends is not None:
                return ends
        return None


def grid_of(positions: Tensor, size: Grid) -> tuple[Grid, Sequence[int]] | None:
    """Return the grid of tokens, and the token of each cell in rows; None if the tokens do not cover the image.

    Args:
        positions: (axes, N, tokens) of all images; tokens without a position are left out.
        size: (H, W) or (D, H, W) of the image.
    """
    first = positions[:, 0]
    tokens = (~first[0].isnan()).nonzero()[:, 0]
    is_shared = torch.allclose(positions, first[:, None].expand_as(positions), rtol=0, atol=SAME, equal_nan=True)
    if len(tokens) < 2 or not is_shared:
        return None  # there are no patches, or the order depends on the image
    axes = [_cells(values, length) for values, length in zip(first[:, tokens], size, strict=True)]
    if any(cells is None for cells in axes):
        return None
    numbers, grid = torch.zeros_like(tokens), tuple[int, ...]()
    for cells, count in cast("list[tuple[Tensor, int]]", axes):
        numbers, grid = numbers * count + cells, (*grid, count)
    order = numbers.argsort()
    if math.prod(grid) != len(tokens) or not torch.equal(
        numbers[order], torch.arange(len(tokens), device=numbers.device)
    ):
        return None
    listed = tokens[order].tolist()
    is_range = listed == list(range(listed[0], listed[0] + len(listed)))
    return grid, range(listed[0], listed[-1] + 1) if is_range else tuple(listed)


def is_misplaced(positions: Tensor, size: Sequence[int]) -> bool:
    """Return whether maps at positions (axes, N, K, h, w) run against the image along an axis, or show only a part."""
    centres = positions.nanmean(2)  # (axes, N, h, w), or (1, N, h, w) without positions
    shown = [float(row.diff(dim=1 + axis).nanmean()) * row.shape[1 + axis] for axis, row in enumerate(centres)]
    return any(length < PART * whole for length, whole in zip(shown, size, strict=False))


def _cells(values: Tensor, length: int) -> tuple[Tensor, int] | None:
    """Return the cell of each position along an axis, and the number of cells; None if they do not cover the image."""
    ordered, order = values.sort()
    cell = torch.cat([ordered.new_zeros(1), (ordered.diff() > SAME).float()]).cumsum(0).long()
    count = int(cell[-1]) + 1
    even = (cell + 0.5) * (length / count) - 0.5
    if float((ordered - even).abs().max()) > 0.5 * length / count:
        return None
    return torch.empty_like(cell).scatter_(0, order, cell), count


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _unknown(like: Tensor) -> Tensor:
    return torch.full([1] * (like.dim() + 1), torch.nan, device=like.device, dtype=torch.float32)


def _ranked(positions: Tensor, dims: int) -> Tensor:
    """Return positions for a tensor with more dimensions."""
    return positions.reshape(len(positions), *[1] * (dims + 1 - positions.dim()), *positions.shape[1:])


def _compact(positions: Tensor) -> Tensor:
    """Return positions without repetitions along the dimensions that were expanded."""
    return positions[tuple(slice(None if stride else 1) for stride in positions.stride())]


def _several(positions: Tensor) -> Tensor | None:
    """Return the positions if they differ; None for a single position, as after a mean over the image."""
    flat = positions.reshape(len(positions), -1)
    finite = flat[:, ~flat[0].isnan()]
    return positions if finite.shape[1] and bool((finite.amax(1) - finite.amin(1) > SAME).any()) else None


def _reduced(positions: Tensor, dims: int | Sequence[int] | None, *, keeps: bool) -> Tensor | None:
    """Return the mean positions over some dimensions."""
    listed = [dims] if isinstance(dims, int) else dims or range(positions.dim() - 1)
    reduced = [dim % (positions.dim() - 1) + 1 for dim in listed]
    return _several(positions.nanmean(reduced, keepdim=keeps))


def _resampled(positions: Tensor, size: Sequence[int]) -> Tensor:
    """Return positions (axes, N, 1, ...) on another grid of the same extent, such as the result of a convolution."""
    for dim, count in enumerate(size, 3):
        old = positions.shape[dim]
        if old == count or old == 1:
            continue
        coordinates = (torch.arange(count, device=positions.device) + 0.5) * (old / count) - 0.5
        lower = coordinates.floor().clamp(0, old - 2).long()
        fraction = (coordinates - lower).view(-1, *[1] * (positions.dim() - dim - 1))
        low, high = positions.index_select(dim, lower), positions.index_select(dim, lower + 1)
        between = low + (high - low) * fraction
        between = torch.where(between.isnan(), low, between)  # at a padding
        positions = torch.where(between.isnan(), high, between)
    return positions


def _merged(first: Tensor, second: Tensor) -> Tensor:
    """Return the positions of a combination of two operands (axes, ...).

    If they differ by more than a cell, the operand with more positions decides: a gate or a mean has fewer. If both
    have the same number of positions, the result is NaN.
    """
    merged = torch.where(first.isnan(), second, first)
    distance = (first - second).abs().amax(0).nan_to_num(0)
    if not bool((distance > SAME).any()):
        return merged
    counts, cells = zip(*map(_resolution, (first, second)), strict=True)
    if counts[0] == counts[1]:
        return torch.where(distance > max(cells), torch.nan, merged)
    return torch.where(second.isnan(), first, second) if counts[1] > counts[0] else merged


def _resolution(positions: Tensor) -> tuple[int, float]:
    """Return the number of different positions, and the length of a cell in pixels."""
    finite = positions.flatten(1)[:, ~positions[0].isnan().flatten()]
    numbers = reduce(lambda above, axis: above * 2**17 + axis, (finite / SAME).round().double())
    count = len(numbers.unique())
    extent = float((finite.amax(1) - finite.amin(1) + 1).prod())
    return count, (extent / count) ** (1 / len(finite))
