"""Forwards of images that differ within a window, computed only where the window has an effect.

The changed part of a map is a rectangle. All windows of one call have rectangles of one size. Therefore a rectangle may
be larger than the change; outside the change, it equals the map of the unchanged image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..hooks.operations import Op, as_results, named_arguments, operator_name, out_of_place
from ..model.call import run_model
from .replay import PartialForward, Program, Replay, ReplayMismatch, ReplayStep, Tape

aten = torch.ops.aten

NEARLY_WHOLE = 0.7
"""A rectangle of this fraction of its map takes as long as the whole map, since it is cut out and pasted."""

MOST_COMPUTED = 0.85
"""A replay that computes more than this fraction of the values of whole forwards is not faster."""


@dataclass(frozen=True, slots=True)
class Rectangles:
    """Positions of rectangles of one size in a map, one per window."""

    height: int
    width: int
    tops: tuple[int, ...]
    lefts: tuple[int, ...]

    def nearly_fill(self, size: Sequence[int]) -> bool:
        """Return whether a rectangle covers nearly all of a map of size (H, W)."""
        return self.height * self.width >= NEARLY_WHOLE * size[0] * size[1]


class Patch(NamedTuple):
    """The changed rectangles of a map."""

    rows: Tensor  # (k, C, h, w)
    rectangles: Rectangles
    size: tuple[int, ...]  # (H, W) of the map
    clean: Tensor  # (1, C, H, W) the map of the unchanged image

    def cut(self, rectangles: Rectangles, beyond: float = 0.0) -> Tensor:
        """Return the content of other rectangles (k, C, h, w), with `beyond` outside of the map."""
        if self.rectangles == rectangles:
            return self.rows
        content = cut(self.clean, rectangles, beyond)
        patches = zip(self.rows, self.rectangles.tops, self.rectangles.lefts, strict=True)
        for row, top, left, changed in zip(content, rectangles.tops, rectangles.lefts, patches, strict=True):
            _paste(row, top, left, *changed)
        return content

    def whole(self) -> Tensor:
        """Return the whole maps (k, C, H, W)."""
        corner = (0,) * len(self.rows)
        return self.cut(Rectangles(self.size[0], self.size[1], corner, corner))


def cut(clean: Tensor, rectangles: Rectangles, beyond: float = 0.0) -> Tensor:
    """Return the content of rectangles (k, C, h, w) of a map (1, C, H, W), with `beyond` outside of the map."""
    height, width = clean.shape[-2:]
    content = clean.new_empty(len(rectangles.tops), clean.shape[1], rectangles.height, rectangles.width)
    for row, top, left in zip(content, rectangles.tops, rectangles.lefts, strict=True):
        if top < 0 or left < 0 or top + rectangles.height > height or left + rectangles.width > width:
            row.fill_(beyond)
        _paste(row, top, left, clean[0], 0, 0)
    return content


def _paste(into: Tensor, top: int, left: int, source: Tensor, source_top: int, source_left: int) -> None:
    """Copy the overlap of two rectangles of a map (C, h, w), given by their corners."""
    first, end = max(top, source_top), min(top + into.shape[1], source_top + source.shape[1])
    start, stop = max(left, source_left), min(left + into.shape[2], source_left + source.shape[2])
    if first < end and start < stop:
        overlap = source[:, first - source_top : end - source_top, start - source_left : stop - source_left]
        into[:, first - top : end - top, start - left : stop - left] = overlap


class Kernel(NamedTuple):
    """A sliding operation along one axis."""

    size: int
    stride: int
    padding: int
    dilation: int

    def reached(self, length: int, starts: Sequence[int], outputs: int) -> tuple[int, tuple[int, ...]]:
        """Return how many outputs an interval of the input affects, and the first of them for each start."""
        span = (self.size - 1) * self.dilation
        count = min((length - 1 + span) // self.stride + 1, outputs)
        firsts = (-((span - self.padding - start) // self.stride) for start in starts)  # rounded up
        return count, tuple(max(0, min(first, outputs - count)) for first in firsts)

    def needed(self, count: int, firsts: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """Return how many inputs `count` outputs read, and the first of these inputs for each first output."""
        length = (count - 1) * self.stride + (self.size - 1) * self.dilation + 1
        return length, tuple(first * self.stride - self.padding for first in firsts)


class WindowCall(NamedTuple):
    """One operation whose arguments are patches, tensors that are the same in all windows, and constants."""

    step: ReplayStep
    args: list[Any]
    kwargs: dict[str, Any]

    @property
    def named(self) -> dict[str, Any]:
        """The arguments by name."""
        return named_arguments(self.step.op, self.args, self.kwargs)

    @property
    def size(self) -> tuple[int, ...]:
        """The height and width of the resulting map."""
        return self.step.shape[-2:]

    @property
    def is_single(self) -> bool:
        """Whether only the first result is read."""
        return all(slot is None or slot in self.step.last for slot in self.step.results[1:])


Result = tuple[Rectangles, list[Tensor]] | None
PatchRule = Callable[[WindowCall], Result]
"""Returns the rectangles that an operation changes and their content per result; None if it needs whole maps."""


def _slide(
    call: WindowCall, geometry: Sequence[Sequence[int]], beyond: float, operation: Callable[[Tensor], Tensor]
) -> Result:
    """Compute a sliding operation for all outputs that depend on the patch.

    Args:
        call: The operation.
        geometry: Kernel size, stride, padding and dilation: one number for both axes, or two numbers.
        beyond: The value outside of the map.
        operation: The operation without padding.
    """
    patch, rectangles = call.args[0], call.args[0].rectangles
    down, across = Kernel(*(option[0] for option in geometry)), Kernel(*(option[-1] for option in geometry))
    height, tops = down.reached(rectangles.height, rectangles.tops, call.size[0])
    width, lefts = across.reached(rectangles.width, rectangles.lefts, call.size[1])
    reached = Rectangles(height, width, tops, lefts)
    if reached.nearly_fill(call.size):
        return None
    high, from_top = down.needed(height, tops)
    wide, from_left = across.needed(width, lefts)
    return reached, [operation(patch.cut(Rectangles(high, wide, from_top, from_left), beyond))]


def _convolve(call: WindowCall) -> Result:
    _, weight, bias, stride, padding, dilation, transposed, _, groups = call.args
    if transposed or isinstance(weight, Patch) or isinstance(bias, Patch):
        return None
    return _slide(
        call,
        (weight.shape[-2:], stride, padding, dilation),
        0.0,
        lambda x: aten.convolution(x, weight, bias, stride, [0, 0], dilation, False, [0, 0], groups),
    )


def _max_pool(call: WindowCall) -> Result:
    named = call.named
    kernel, dilation = named["kernel_size"], named.get("dilation", [1])
    stride = named.get("stride") or kernel
    geometry = kernel, stride, named.get("padding", [0]), dilation
    if not call.is_single:  # the second result holds indices into the whole map
        return None
    return _slide(call, geometry, -torch.inf, lambda x: F.max_pool2d(x, kernel, stride, 0, dilation))


def _avg_pool(call: WindowCall) -> Result:
    named = call.named
    kernel, padding, divisor = named["kernel_size"], named.get("padding", [0]), named.get("divisor_override")
    stride = named.get("stride") or kernel
    # A mean that excludes the padding depends on the position.
    if named.get("ceil_mode") or (any(padding) and not named.get("count_include_pad", True) and not divisor):
        return None
    geometry = kernel, stride, padding, [1]
    return _slide(call, geometry, 0.0, lambda x: aten.avg_pool2d(x, kernel, stride, [0, 0], False, True, divisor))


def _pad(call: WindowCall) -> Result:
    patch, pads = call.args[:2]
    if any(pads[4:]) or min(pads) < 0:
        return None
    rectangles = patch.rectangles
    tops = tuple(top + (pads[2] if len(pads) > 2 else 0) for top in rectangles.tops)
    lefts = tuple(left + pads[0] for left in rectangles.lefts)
    return Rectangles(rectangles.height, rectangles.width, tops, lefts), [patch.rows.clone()]


def _normalise(call: WindowCall) -> Result:
    training = any(call.named.get(name) is True for name in ("training", "train"))
    if training or not call.is_single:
        return None
    patch = call.args[0]  # each rectangle is computed as if it were a whole map
    return patch.rectangles, list(as_results(call.step.op(patch.rows, *call.args[1:], **call.kwargs)))


def _concatenate(call: WindowCall) -> Result:
    parts = call.args[0]
    rectangles = _enclosing(parts, call.size) if call.named.get("dim", 0) in (1, -3) else None
    if rectangles is None:
        return None
    return rectangles, [torch.cat([_aligned(part, rectangles, call.size) for part in parts], 1)]


def pointwise(call: WindowCall) -> Result:
    """Compute any operation whose result at each location depends only on its arguments at that location."""
    rectangles = _enclosing([*call.args, *call.kwargs.values()], call.size) if len(call.step.shape) == 4 else None
    if rectangles is None:
        return None
    args = [_aligned(part, rectangles, call.size) for part in call.args]
    kwargs = {name: _aligned(part, rectangles, call.size) for name, part in call.kwargs.items()}
    return rectangles, list(as_results(call.step.op(*args, **kwargs)))


def _enclosing(parts: Sequence[Any], size: tuple[int, ...]) -> Rectangles | None:
    """Return rectangles that enclose all patches; None if they nearly fill the map, or if maps differ in size."""
    patches = [part for part in parts if isinstance(part, Patch)]
    if any(patch.size != size for patch in patches):
        return None
    groups = [patch.rectangles for patch in patches]
    if all(group == groups[0] for group in groups):
        return groups[0]
    tops, lefts = _least(group.tops for group in groups), _least(group.lefts for group in groups)
    height = max(start + group.height - top for group in groups for start, top in zip(group.tops, tops, strict=True))
    width = max(start + group.width - left for group in groups for start, left in zip(group.lefts, lefts, strict=True))
    inside_tops = tuple(min(top, size[0] - height) for top in tops)
    around = Rectangles(height, width, inside_tops, tuple(min(left, size[1] - width) for left in lefts))
    return None if around.nearly_fill(size) else around


def _least(starts: Iterable[tuple[int, ...]]) -> list[int]:
    return [min(of_window) for of_window in zip(*starts, strict=True)]


def _aligned(part: Any, rectangles: Rectangles, size: tuple[int, ...]) -> Any:
    """Return the part of an argument within some rectangles."""
    if isinstance(part, Patch):
        return part.cut(rectangles)
    if not isinstance(part, Tensor) or part.dim() == 0:
        return part
    if part.shape[-1] == 1 and (part.dim() == 1 or part.shape[-2] == 1):
        return part
    full = part[:1] if part.dim() == 4 else part[(None,) * (4 - part.dim())]
    return cut(full.expand(-1, -1, *size), rectangles)


PATCH_RULES: dict[Op, PatchRule] = {
    aten.convolution.default: _convolve,
    aten.max_pool2d_with_indices.default: _max_pool,
    aten.avg_pool2d.default: _avg_pool,
    aten.constant_pad_nd.default: _pad,
    aten.cat.default: _concatenate,
}
"""The operations that can be computed on patches, in addition to batch norms and pointwise operations."""


def patch_rule(op: Op) -> PatchRule | None:
    """Return how an operation is computed on patches; None if it needs whole maps."""
    if "batch_norm" in str(op):
        return _normalise
    # Some in-place operations have no tag; which ones depends on the version of PyTorch.
    is_pointwise = torch.Tag.pointwise in out_of_place(op).tags or operator_name(op) in ("hardswish", "_to_copy")
    return PATCH_RULES.get(op, pointwise if is_pointwise else None)


class WindowForward(PartialForward):
    """Forward for copies of an image that differ from it in one window each.

    Local operations are replayed only on the rectangles that depend on the windows. Whole maps are computed after an
    operation that is not local, and where a rectangle nearly fills its map.

    Args:
        model: As for `PartialForward`.
        x: One image (1, C, H, W).

    Attributes:
        output: As for `PartialForward`.
        why: As for `PartialForward`.
    """

    part = "only where the window reaches"

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self._maps: dict[int, Tensor] = {}  # of the unchanged image, by slot
        super().__init__(model, x)

    def __call__(self, patches: Tensor, tops: Sequence[int], lefts: Sequence[int]) -> Any:
        """Return the model's output for k copies of the image, each with other content in one window.

        Args:
            patches: The content of the windows (k, C, h, w). They are not changed.
            tops: The first row of each window, in pixels; windows lie within the image.
            lefts: The first column of each window.
        """
        with torch.no_grad():
            patch, program = self._patch(patches.detach().to(self._x), tops, lefts), self._program
            output = program and self._attempt(lambda: self._replay(program, patch).output())
            return self._run(patch.whole()) if output is None else output

    def of_images(self, images: Tensor) -> Any:
        """Return the model's output for images (k, C, H, W), each of which differs from the image in one window."""
        changed = (images != self._x).any(1)
        height, tops = _spans(changed.any(2))
        width, lefts = _spans(changed.any(1))
        if self._program is None or Rectangles(height, width, tops, lefts).nearly_fill(self._x.shape[-2:]):
            return self._run(images)
        corners = zip(images, tops, lefts, strict=True)
        patches = [image[:, top : top + height, left : left + width] for image, top, left in corners]
        return self(torch.stack(patches), tops, lefts)

    def _patch(self, patches: Tensor, tops: Sequence[int], lefts: Sequence[int]) -> Patch:
        rectangles = Rectangles(patches.shape[-2], patches.shape[-1], tuple(tops), tuple(lefts))
        return Patch(patches, rectangles, tuple(self._x.shape[-2:]), self._x)

    def _replay(self, program: Program, patch: Patch) -> _PatchReplay:
        return _PatchReplay(program, patch._replace(rows=patch.rows.clone()), len(patch.rows), self._maps)

    def _variants(self) -> Tensor:
        return self._trial_windows().whole()

    def _trial_windows(self, count: int = 3) -> Patch:
        """Return three windows with other content: in the first corner, inside, and in the last corner."""
        x = self._x
        height, width = max(1, x.shape[-2] // 7), max(1, x.shape[-1] // 7)
        down, across = x.shape[-2] - height, x.shape[-1] - width
        random = torch.Generator().manual_seed(0)
        noise = torch.rand(3, x.shape[1], height, width, generator=random, dtype=torch.float64, device="cpu").to(x)
        patches = (2 * noise - 1) * x.abs().max().clamp(min=torch.finfo(x.dtype).tiny)
        tops, lefts = [0, down // 2 + down % 2, down], [0, across // 3, across]
        return self._patch(patches[:count], tops[:count], lefts[:count])

    def _run(self, rows: Tensor | None, tape: Tape | None = None) -> Any:
        images = (self._x if rows is None else rows).clone()
        if tape is not None:
            tape.add_slot(images)
        return run_model(self._model, images)

    def _try(self, program: Program, rows: Tensor | None) -> Any:
        if program.aliased:
            raise ReplayMismatch("the model reads tensors through several aliases while it writes to them")
        if rows is None:
            clean = _CleanReplay(program, self._x.clone(), 1)
            self._maps, output, self._whole = clean.maps, clean.output(), clean.computed
            return output
        local = self._replay(program, self._trial_windows(len(rows)))
        output = local.output()
        if local.computed > MOST_COMPUTED * len(rows) * self._whole:
            raise ReplayMismatch("early layers of the model read the whole image")
        return output


def _spans(changed: Tensor) -> tuple[int, tuple[int, ...]]:
    """Return the length of spans that contain the true values of each row (k, n), and their starts."""
    count = changed.shape[1]
    first = changed.int().argmax(1)
    end = torch.where(changed.any(1), count - changed.flip(1).int().argmax(1), first + 1)
    length = int((end - first).max())
    return length, tuple(first.clamp(max=count - length).tolist())


class _CleanReplay(Replay):
    """Replay for the image itself, which keeps a copy of each map."""

    def __init__(self, program: Program, source: Any, rows: int) -> None:
        super().__init__(program, source, rows)
        self.maps: dict[int, Tensor] = {}  # by slot

    def run(self, step: ReplayStep) -> list[Any]:
        """Return the results of a step."""
        results = super().run(step)
        pairs = zip(step.results, results, strict=True)
        self.maps |= {slot: result.clone() for slot, result in pairs if slot is not None and result.dim() == 4}
        return results


class _PatchReplay(Replay):
    """Replay on rectangles, or on whole maps where an operation needs them."""

    def __init__(self, program: Program, source: Patch, rows: int, maps: dict[int, Tensor]) -> None:
        super().__init__(program, source, rows)
        self._maps = maps

    def run(self, step: ReplayStep) -> list[Any]:
        """Return the results of a step: patches if a rule computes them."""
        rule = patch_rule(step.op)
        if rule and all(isinstance(self.values[slot], Patch) for slot in step.slots):
            result = rule(WindowCall(step, *self.arguments(step)))
            if result:
                self.computed += sum(map(torch.numel, result[1]))
                rectangles, size, maps = result[0], step.shape[-2:], self._maps
                pairs = zip(step.results, result[1], strict=False)
                return [Patch(rows, rectangles, size, maps[slot]) if slot in maps else None for slot, rows in pairs]
        for slot in step.slots:
            self.values[slot] = self.read(slot)
        return super().run(step)

    def read(self, slot: int) -> Tensor:
        """Return the whole maps in a slot."""
        value = self.values[slot]
        return value.whole() if isinstance(value, Patch) else value
