"""Operations that can be done on the changed rectangles of maps alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .patches import Kernel, Patch, Rectangles, cut
from .recording import Op, argument
from .replay import ReplayStep

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor that is the same in all windows: a weight, or a map that does not depend on the picture."""

    value: Tensor


@dataclass(frozen=True, slots=True)
class Call:
    """One operation whose arguments are patches, maps that stand still, and constants.

    Attributes:
        move: The operation.
        args: Its arguments.
        kwargs: Its arguments by name.
        clean: The map (1, C, H, W) that a patch is a change of, where it is an argument.
    """

    move: ReplayStep
    args: list[Any]
    kwargs: dict[str, Any]
    clean: Callable[[Patch], Tensor]

    def get(self, name: str, default: Any = None) -> Any:
        """An argument by name; a tensor that stands still as itself."""
        found = argument(self.move.op, self.args, name, self.kwargs.get(name, default))
        return found.value if isinstance(found, Constant) else found

    @property
    def size(self) -> tuple[int, int]:
        """The height and width of the resulting map."""
        return self.move.shapes[0][-2], self.move.shapes[0][-1]

    def cut(self, patch: Patch, at: Rectangles, beyond: float = 0.0) -> Tensor:
        """What an argument holds in other rectangles."""
        if patch.place == at:
            return patch.rows
        return cut(self.clean(patch), patch, at, beyond)


Result = list[Patch | None] | None
PatchRule = Callable[[Call], Result]
"""From a call to its results, None for one that nobody reads; None altogether where it takes whole maps."""


def _slid(call: Call, kernels: tuple[Kernel, Kernel], beyond: float, then: Callable[[Tensor], Tensor]) -> Result:
    """A sliding operation on what it needs for all that it changes."""
    patch = call.args[0]
    down, across = kernels
    height, tops = down.reached(patch.place.height, patch.place.tops, call.size[0])
    width, lefts = across.reached(patch.place.width, patch.place.lefts, call.size[1])
    place = Rectangles(height, width, tops, lefts)
    if place.nearly_fill(call.size):
        return None
    high, from_top = down.needed(height, tops)
    wide, from_left = across.needed(width, lefts)
    return [Patch(then(call.cut(patch, Rectangles(high, wide, from_top, from_left), beyond)), place, call.size)]


def _pairs(*options: Sequence[int]) -> tuple[Kernel, Kernel]:
    """The kernels of both axes from options of one number for both, or one for each."""
    down, across = ([option[0] for option in options], [option[-1] for option in options])
    return Kernel(*down), Kernel(*across)


def _convolved(call: Call) -> Result:
    weight, bias = call.args[1:3]
    if not isinstance(weight, Constant) or call.get("transposed"):
        return None
    values, shift = weight.value, bias.value if isinstance(bias, Constant) else bias
    stride, dilation, groups = call.get("stride"), call.get("dilation"), call.get("groups")
    kernels = _pairs(values.shape[-2:], stride, call.get("padding"), dilation)
    return _slid(
        call,
        kernels,
        0.0,
        lambda x: aten.convolution(x, values, shift, stride, [0, 0], dilation, False, [0, 0], groups),
    )


def _max_pooled(call: Call) -> Result:
    if len(call.move.results) > 1 and call.move.results[1] not in call.move.last:  # somebody reads the places
        return None
    kernel, dilation = call.get("kernel_size"), call.get("dilation", [1])
    stride = call.get("stride", []) or kernel
    kernels = _pairs(kernel, stride, call.get("padding", [0]), dilation)
    pooled = _slid(
        call,
        kernels,
        -torch.inf,
        lambda x: torch.nn.functional.max_pool2d(x, list(kernel), list(stride), 0, list(dilation)),
    )
    return pooled and [*pooled, None][: len(call.move.results)]


def _mean_pooled(call: Call) -> Result:
    kernel, padding = call.get("kernel_size"), call.get("padding", [0])
    stride, divisor = call.get("stride", []) or kernel, call.get("divisor_override")
    # Where a mean leaves out what lies beyond the map, it depends on the place.
    if call.get("ceil_mode", False) or (any(padding) and not call.get("count_include_pad", True) and not divisor):
        return None
    kernels = _pairs(kernel, stride, padding, [1])
    return _slid(call, kernels, 0.0, lambda x: aten.avg_pool2d(x, kernel, stride, [0, 0], False, True, divisor))


def _padded(call: Call) -> Result:
    patch, pads = call.args[:2]
    if any(pads[4:]) or min(pads) < 0:
        return None
    left, top = pads[0], pads[2] if len(pads) > 2 else 0
    place = patch.place
    moved = Rectangles(
        place.height, place.width, tuple(each + top for each in place.tops), tuple(each + left for each in place.lefts)
    )
    return [Patch(patch.rows.clone(), moved, call.size)]


def _normalised(call: Call) -> Result:
    if any(call.get(name) is True for name in ("training", "train")):
        return None
    stills = [each.value if isinstance(each, Constant) else each for each in call.args[1:]]
    result = call.move.op(call.args[0].rows, *stills, **call.kwargs)
    first = result if call.move.single else result[0]
    read = [at for at in call.move.results[1:] if at is not None and at not in call.move.last]
    return None if read else [Patch(first, call.args[0].place, call.size), *[None] * (len(call.move.results) - 1)]


def _within_channels(call: Call) -> Result:
    """What takes some channels and leaves places alone."""
    patch = call.args[0]
    if call.get("dim", 0) not in (1, -3):
        return None
    result = call.move.op(patch.rows, *call.args[1:], **call.kwargs)
    return [Patch(each, patch.place, call.size) for each in ([result] if call.move.single else result)]


def _joined(call: Call) -> Result:
    parts = call.args[0]
    if call.get("dim", 0) not in (1, -3):
        return None
    place = _around(parts, call.size)
    if place is None:
        return None
    return [Patch(torch.cat([_aligned(call, each, place) for each in parts], 1), place, call.size)]


def pointwise(call: Call) -> Result:
    """Any operation in which each place depends on the same place of the others only."""
    tensors = [each for each in [*call.args, *call.kwargs.values()] if isinstance(each, Patch | Constant)]
    place = _around(tensors, call.size) if len(call.move.shapes[0]) == 4 else None
    if place is None:
        return None
    args = [_aligned(call, each, place) for each in call.args]
    kwargs = {name: _aligned(call, each, place) for name, each in call.kwargs.items()}
    result = call.move.op(*args, **kwargs)
    return [Patch(result, place, call.size)] if isinstance(result, Tensor) else None


def _around(parts: Sequence[Any], size: tuple[int, int]) -> Rectangles | None:
    """The rectangles that hold those of all patches; None where these lie in maps of other sizes, or nearly fill it."""
    patches = [each for each in parts if isinstance(each, Patch)]
    if any(each.size != size for each in patches):
        return None
    places = [each.place for each in patches]
    if all(each == places[0] for each in places):
        return places[0]
    tops = [min(each) for each in zip(*(place.tops for place in places), strict=True)]
    lefts = [min(each) for each in zip(*(place.lefts for place in places), strict=True)]
    rows = range(len(tops))
    height = max(place.tops[row] + place.height - tops[row] for place in places for row in rows)
    width = max(place.lefts[row] + place.width - lefts[row] for place in places for row in rows)
    around = Rectangles(
        height,
        width,
        tuple(min(top, size[0] - height) for top in tops),
        tuple(min(left, size[1] - width) for left in lefts),
    )
    return None if around.nearly_fill(size) else around


def _aligned(call: Call, part: Any, place: Rectangles) -> Any:
    """An argument as it is in some rectangles."""
    if isinstance(part, Patch):
        return call.cut(part, place)
    if not isinstance(part, Constant):
        return part
    value = part.value
    if value.dim() == 0 or (value.shape[-1] == 1 and (value.dim() == 1 or value.shape[-2] == 1)):
        return value
    full = value[:1] if value.dim() == 4 else value[(None,) * (4 - value.dim())]
    return cut(full.expand(-1, -1, *call.size), None, place)


PATCH_RULES: dict[Op, PatchRule] = {
    aten.convolution.default: _convolved,
    aten.max_pool2d_with_indices.default: _max_pooled,
    aten.max_pool2d.default: _max_pooled,
    aten.avg_pool2d.default: _mean_pooled,
    aten.constant_pad_nd.default: _padded,
    aten.cat.default: _joined,
    aten.slice.Tensor: _within_channels,
    aten.split.Tensor: _within_channels,
    aten.split_with_sizes.default: _within_channels,
    aten.native_batch_norm.default: _normalised,
    aten._native_batch_norm_legit_no_training.default: _normalised,
    aten.cudnn_batch_norm.default: _normalised,
    aten.miopen_batch_norm.default: _normalised,
}
"""What is done on patches, by operation."""

_ALSO_POINTWISE = {
    aten.hardswish_.default,
    aten.hardtanh_.default,
    aten.silu_.default,
    aten.detach.default,
    aten.alias.default,
    aten._to_copy.default,
}


def patch_rule(op: Op) -> PatchRule | None:
    """How an operation is done on patches; None where it takes whole maps."""
    if op in PATCH_RULES:
        return PATCH_RULES[op]
    return pointwise if torch.Tag.pointwise in op.tags or op in _ALSO_POINTWISE else None
