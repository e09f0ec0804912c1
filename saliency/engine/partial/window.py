"""Changes of an image within a window, computed only where the window reaches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import MethodError
from ...hooks.model_state import run_model
from .patch_rules import Call, Patch, Rectangles, patch_rule, pointwise
from .recording import Op, PartialForward, Program, ReplayMismatch, Slot, Step, Tape, UntracedAccess, run_step

_WORTH_IT = 0.95


class WindowForward(PartialForward):
    """Computes a model's output for copies of an image that differ from it in one window each.

    Forwards of one and of two images are recorded. For each call the operations are replayed on the rectangles that
    depend on the windows, as far as operations are local; after an operation that is not, or where a rectangle nearly
    fills its map, on whole maps. If that is not possible, or does not give what the model gives, each call is a forward
    of the whole model.

    Args:
        model: As for `PartialForward`.
        x: One image (1, C, H, W).

    Attributes:
        why: As for `PartialForward`.
        share: The multiply-adds of the last call over those of whole forwards; 1 before the first call.
    """

    part = "only where the window reaches"

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        super().__init__(model, x)
        self.share = 1.0
        self._clean_cost = 0
        access = UntracedAccess()
        with torch.no_grad():
            with access:
                self._run(None)
            tape, output = self._record(None)
            tape.refusal = access.reason or tape.refusal
            rows = self._patch(*_trial_windows(self._x)).whole()  # (3, C, H, W)
            self._program = self._attempt(lambda: self._prepare(tape, output, rows))
        self.share = 1.0

    def __call__(self, patches: Tensor, tops: Sequence[int], lefts: Sequence[int]) -> Any:
        """Return the model's output for k copies of the image, each with other content in one window.

        Args:
            patches: The content of the windows (k, C, h, w). They are not changed.
            tops: The first row of each window, in pixels; windows lie within the image.
            lefts: The first column of each.

        Raises:
            MethodError: A window does not fit the image.
        """
        x = self._x
        fits = patches.dim() == 4 and patches.shape[1] == x.shape[1] and len(patches) == len(tops) == len(lefts) > 0
        for starts, axis in ((tops, -2), (lefts, -1)):
            fits = fits and min(starts) >= 0 and max(starts) + patches.shape[axis] <= x.shape[axis]
        if not fits:
            raise MethodError(
                f"{len(tops)} tops, {len(lefts)} lefts and patches {tuple(patches.shape)} do not fit an image "
                f"{tuple(x.shape)}; expected one top and left for each patch (k, C, h, w), and windows within it"
            )
        with torch.no_grad():
            patch, program = self._patch(patches.detach().to(x), tops, lefts), self._program
            output = program and self._attempt(lambda: self._run_local(program, patch))
            if output is None:
                self.share = 1.0
                return self._run(patch.whole())
            return output

    def _patch(self, patches: Tensor, tops: Sequence[int], lefts: Sequence[int]) -> Patch:
        place = Rectangles(patches.shape[-2], patches.shape[-1], tuple(tops), tuple(lefts))
        return Patch(patches, place, tuple(self._x.shape[-2:]), self._x)

    def _run(self, rows: Tensor | None, tape: Tape | None = None) -> Any:
        images = (self._x if rows is None else rows).clone()
        if tape is not None:
            tape.begin(images)
        return run_model(self._model, images)

    def _replay(self, program: Program, rows: Tensor | None) -> Any:
        if program.aliased:
            raise ReplayMismatch("the model reads tensors under several names while it writes to them")
        if rows is None:
            return self._run_clean(program)
        patches, tops, lefts = _trial_windows(self._x)
        output = self._run_local(program, self._patch(patches[:2], tops[:2], lefts[:2]))
        if self.share > _WORTH_IT:
            raise ReplayMismatch("the model looks at the whole image from the start")
        return output

    def _run_clean(self, program: Program) -> Any:
        """Return the output for the image itself, and keep the maps that are read beyond rectangles."""
        read = {part.at for part in program.outputs if isinstance(part, Slot)}
        for step in program.steps:
            if patch_rule(step.op) is not pointwise or len(step.slots) > 1:
                read |= step.slots

        def run(step: Step, values: list[Any], fill: Callable[[], Any]) -> list[Any]:
            args, results = fill()[0], run_step(step, values, fill)
            self._clean_cost += _multiply_adds(step.op, args, results[0])
            for at, result in zip(step.results, results, strict=True):
                if at in read and result.dim() == 4:
                    program.maps[at] = result.clone()
            return results

        return program(self._x.clone(), 1, run)

    def _run_local(self, program: Program, patch: Patch) -> Any:
        """Return the output from rectangles, and from whole maps where these are needed."""
        cost = 0

        def run(step: Step, values: list[Any], fill: Callable[[], Any]) -> list[Any]:
            nonlocal cost
            rule = patch_rule(step.op)
            if rule and all(isinstance(values[at], Patch) for at in step.slots):
                args, kwargs = fill()
                result = rule(Call(step, args, kwargs))
                if result:
                    place, contents = result
                    cost += _multiply_adds(step.op, args, contents[0])
                    pairs = zip(step.results, contents, strict=False)
                    return [Patch(rows, place, step.shape[-2:], program.maps.get(at)) for at, rows in pairs]
            for at in step.slots:
                values[at] = read(values, at)
            results = run_step(step, values, fill)
            cost += _multiply_adds(step.op, fill()[0], results[0])
            return results

        def read(values: list[Any], at: int) -> Any:
            return values[at].whole() if isinstance(values[at], Patch) else values[at]

        rows = len(patch.rows)
        output = program(patch._replace(rows=patch.rows.clone()), rows, run, read)
        self.share = cost / (rows * self._clean_cost) if self._clean_cost else 1.0
        return output


_PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm}


def _multiply_adds(op: Op, args: list[Any], result: Tensor) -> int:
    """The number of multiplications of a convolution or a matrix product; 0 for other operations."""
    if op is torch.ops.aten.convolution.default and isinstance(args[1], Tensor):
        places = args[0] if args[6] else result
        return places.numel() * args[1][0].numel()
    return result.numel() * int(args[-2].shape[-1]) if op.overloadpacket in _PRODUCTS else 0


def _trial_windows(x: Tensor) -> tuple[Tensor, list[int], list[int]]:
    """Return three windows with other content: in the first corner, inside, and in the last corner."""
    height, width = max(1, x.shape[-2] // 7), max(1, x.shape[-1] // 7)
    down, across = x.shape[-2] - height, x.shape[-1] - width
    random = torch.Generator().manual_seed(0)
    noise = torch.rand(3, x.shape[1], height, width, generator=random, dtype=torch.float64, device="cpu").to(x)
    scale = x.abs().max().clamp(min=torch.finfo(x.dtype).tiny)
    return (2 * noise - 1) * scale, [0, down // 2 + down % 2, down], [0, across // 3, across]
