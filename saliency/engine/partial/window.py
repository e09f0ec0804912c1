"""Changes of a picture within a window, recomputed only where the window reaches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import MethodError
from ...hooks.model_state import is_out_of_memory, run_model
from ...hooks.pytree import trees_agree
from .patch_rules import Call, Constant, patch_rule, pointwise
from .patches import Patch, Rectangles, whole
from .recording import ExternalTensor, Slot, Tape, UntracedAccess
from .replay import Program, ReplayMismatch, ReplayStep, Rows, slots_among

ONLY_WHERE_REACHED = "only where the window reaches"
WHOLE_FORWARDS = "whole forwards"

_WRONG = (ReplayMismatch, RuntimeError, ValueError, TypeError, LookupError)
_WORTH_IT = 0.95


class WindowForward:
    """What a model makes of copies of a picture that differ from it in one window each.

    The forward of the picture is written down as the operations it consists of. For each call these are done on the
    rectangles that depend on the windows, as far as operations look at neighbours only; where they look at all, or a
    rectangle nearly fills its map, whole maps go on. Where that is not possible or does not give what the model gives,
    each call is a forward of the whole model for each copy.

    The model's parameters must stay as they are, and its code must do the same for any number of rows above two.

    Args:
        model: The model, borrowed by the caller.
        x: One picture (1, C, H, W).

    Attributes:
        how: "only where the window reaches" or "whole forwards".
        why: Why it is whole forwards; empty otherwise.
        share: The multiply-adds of the last call over those of whole forwards; 1 before the first call.
    """

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self._model, self._x = model, x.detach()
        self.share = 1.0
        self._maps: dict[int, Tensor] = {}
        self._program: Program | None = None
        with torch.no_grad():
            self.why = self._prepare()
        if self.why:
            self._give_up(self.why)
        self.share = 1.0

    @property
    def how(self) -> str:
        """What is computed for each call."""
        return WHOLE_FORWARDS if self._program is None else ONLY_WHERE_REACHED

    def __call__(self, patches: Tensor, tops: Sequence[int], lefts: Sequence[int]) -> Any:
        """The model's output for k copies of the picture, in each of which one window holds something else.

        Args:
            patches: What the windows hold (k, C, h, w). They are not changed.
            tops: The first row of each window, in pixels; windows lie within the picture.
            lefts: The first column of each.

        Raises:
            MethodError: A window does not fit the picture.
        """
        self._require_fit(patches, tops, lefts)
        patches = patches.detach().to(self._x.device, self._x.dtype)
        with torch.no_grad():
            if self._program is not None:
                try:
                    return self._local(self._program, patches, tops, lefts)
                except _WRONG as error:
                    if is_out_of_memory(error):
                        raise
                    self._give_up(str(error))
            return run_model(self._model, self._pasted(patches, tops, lefts))

    def _give_up(self, why: str) -> None:
        self.why, self.share = why, 1.0
        self._program = None
        self._maps = {}

    def _require_fit(self, patches: Tensor, tops: Sequence[int], lefts: Sequence[int]) -> None:
        x = self._x
        inside = patches.dim() == 4 and patches.shape[1] == x.shape[1] and len(patches) == len(tops) == len(lefts) > 0
        for starts, axis in ((tops, -2), (lefts, -1)):
            inside = inside and min(starts) >= 0 and max(starts) + patches.shape[axis] <= x.shape[axis]
        if not inside:
            raise MethodError(
                f"{len(tops)} tops, {len(lefts)} lefts and patches {tuple(patches.shape)} do not fit a picture "
                f"{tuple(x.shape)}; expected one top and left for each patch (k, C, h, w), and windows within it"
            )

    def _pasted(self, patches: Tensor, tops: Sequence[int], lefts: Sequence[int]) -> Tensor:
        """The changed copies of the picture (k, C, H, W)."""
        place = Rectangles(patches.shape[-2], patches.shape[-1], tuple(tops), tuple(lefts))
        return whole(self._x, Patch(patches, place, self._size))

    @property
    def _size(self) -> tuple[int, int]:
        return self._x.shape[-2], self._x.shape[-1]

    def _recorded(self, rows: Tensor) -> tuple[Tape, Any]:
        tape = Tape()
        with tape:
            tape.begin(rows)
            output = run_model(self._model, rows)
        tape.end(output)
        return tape, output

    def _prepare(self) -> str:
        """Make the program, where it gives the same as the model; else say why it does not."""
        escapes = UntracedAccess()
        with escapes:
            run_model(self._model, self._x)
        if escapes.found:
            return escapes.found
        one, clean = self._recorded(self._x.clone())
        patches, tops, lefts = _trial(self._x)
        rows = self._pasted(patches, tops, lefts)  # (3, C, H, W)
        try:
            if one.refusal:
                return one.refusal
            two, expected = self._recorded(rows[:2])
            try:
                program = Program(one, two)
            except ReplayMismatch:
                three, _ = self._recorded(rows)
                program = Program(two, three, rows=2)
            if not program.pure:
                return "the model reads tensors under several names while it writes to them"
            self._know(program)
            if not trees_agree(self._kept(program), clean):
                return "the operations on the picture do not give again what the model gave"
            if not trees_agree(self._local(program, patches[:2], tops[:2], lefts[:2]), expected):
                return "the operations on parts of the picture do not give what the model gave"
            if self.share > _WORTH_IT:
                return "the model looks at the whole picture from the start"
        except _WRONG as error:
            return str(error)
        self._program = program
        return ""

    def _know(self, program: Program) -> None:
        """What all calls go by: the shapes of the maps, what is read beyond rectangles, and what each step costs."""
        shapes = {0: tuple(self._x.shape)}
        self._wanted = {place.at for place in program.outputs if isinstance(place, Slot)}
        self._costs = []
        given = program.given(1)
        for move in program.moves:
            self._costs.append(_multiply_adds(move, shapes, given))
            shapes.update({at: shape for at, shape in zip(move.results, move.shapes, strict=True) if at is not None})
            slots = set(slots_among(move.args) + slots_among(move.kwargs))
            if not (patch_rule(move.op) is pointwise and len(slots) == 1):
                self._wanted |= slots
        self._plain_cost = sum(self._costs)

    def _kept(self, program: Program, everything: bool = False) -> Any:
        """The output for the picture itself, with the maps on the way kept where they are wanted."""

        def keep(at: int, value: Tensor) -> None:
            if value.dim() == 4 and (everything or at in self._wanted):
                self._maps[at] = value.clone()

        return program(self._x.clone(), 1, keep)

    def _clean(self, program: Program, at: int) -> Tensor:
        """The map of the picture itself at some slot (1, C, H, W)."""
        if at not in self._maps:
            self._kept(program, everything=True)
        return self._maps[at]

    def _local(self, program: Program, patches: Tensor, tops: Sequence[int], lefts: Sequence[int]) -> Any:
        """The output from rectangles, and from whole maps where these are needed."""
        rows = len(patches)
        place = Rectangles(patches.shape[-2], patches.shape[-1], tuple(tops), tuple(lefts))
        values: list[Any] = [None] * program.slots
        values[0] = Patch(patches, place, self._size)
        given = program.given(rows)
        spent = 0.0
        for move, cost in zip(program.moves, self._costs, strict=True):
            slots = set(slots_among(move.args) + slots_among(move.kwargs))
            found = self._on_patches(program, move, slots, values, given, rows)
            if found is None:
                for at in slots:
                    self._widen(program, at, values)
                program.do(move, values, given, rows)
                spent += cost
            else:
                for slot, each in zip(move.results, found, strict=True):
                    if slot is not None:
                        values[slot] = each
                spent += cost and cost * _covered(found)
            for at in move.last:
                values[at] = None
        for output in program.outputs:
            if isinstance(output, Slot):
                self._widen(program, output.at, values)
        self.share = spent / self._plain_cost if self._plain_cost else 1.0
        return program.output(values, given)

    def _widen(self, program: Program, at: int, values: list[Any]) -> None:
        """Let whole maps take the place of a patch."""
        if isinstance(values[at], Patch):
            values[at] = whole(self._clean(program, at), values[at])

    def _on_patches(
        self, program: Program, move: ReplayStep, slots: set[int], values: list[Any], given: list[Tensor], rows: int
    ) -> list[Patch | None] | None:
        """The results of a step as patches; None where it takes whole maps."""
        way = patch_rule(move.op)
        if way is None or not all(isinstance(values[at], Patch) for at in slots):
            return None

        def clean(patch: Patch) -> Tensor:
            return self._clean(program, next(at for at in slots if values[at] is patch))

        args, kwargs = _parts([move.args, move.kwargs], values, given, rows)
        return way(Call(move, args, kwargs, clean))


def _parts(part: Any, values: list[Any], given: list[Tensor], rows: int) -> Any:
    """Arguments with patches and still tensors in their places."""
    if isinstance(part, Slot):
        return values[part.at]
    if isinstance(part, ExternalTensor):
        return Constant(given[part.at])
    if isinstance(part, Rows):
        return part.each * rows
    if isinstance(part, list):
        return [_parts(each, values, given, rows) for each in part]
    if isinstance(part, dict):
        return {name: _parts(each, values, given, rows) for name, each in part.items()}
    return part


def _covered(found: list[Patch | None]) -> float:
    """The share of a map that its rectangles cover."""
    patch = next(each for each in found if each is not None)
    return patch.place.height * patch.place.width / math.prod(patch.size)


def _multiply_adds(move: ReplayStep, shapes: dict[int, tuple[int, ...]], given: list[Tensor]) -> float:
    """The multiplications of one row in a convolution or a matrix product; 0 for other steps."""

    def shape(part: Any) -> tuple[int, ...]:
        return shapes[part.at] if isinstance(part, Slot) else tuple(given[part.at].shape)

    name = move.op.overloadpacket.__name__
    if name == "convolution":
        weight = shape(move.args[1])
        made = shape(move.args[0]) if move.args[6] else move.shapes[0]
        return float(math.prod(made) * math.prod(weight[1:]))
    if name in ("mm", "bmm", "addmm", "baddbmm"):
        left = move.args[1 if "add" in name else 0]
        return float(math.prod(move.shapes[0]) * shape(left)[-1])
    return 0.0


def _trial(x: Tensor) -> tuple[Tensor, list[int], list[int]]:
    """Three windows with something else in them: in the first corner, inside, and in the last corner."""
    high, wide = max(1, x.shape[-2] // 7), max(1, x.shape[-1] // 7)
    down, across = x.shape[-2] - high, x.shape[-1] - wide
    random = torch.Generator().manual_seed(0)
    noise = torch.rand(3, x.shape[1], high, wide, generator=random, dtype=torch.float64, device="cpu").to(x)
    scale = x.abs().max().clamp(min=torch.finfo(x.dtype).tiny)
    return (2 * noise - 1) * scale, [0, down // 2 + down % 2, down], [0, across // 3, across]
