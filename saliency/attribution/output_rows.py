"""Assign the parts of a model's output to the images of a batch, and detect whether images affect each other."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import TargetError, warn
from ..hooks.autograd_graph import forward_hook_ids
from ..hooks.model_state import run_model, unique_modules
from ..hooks.pytree import rounding, tree_children, tree_with_children, trees_agree
from ..targets.targets import OutputTarget, Target

COUPLED = "one pass at a time: the images of a batch affect each other in this model"


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_SHARED = str | bytes | int | float | complex | torch.dtype | torch.device | None

# For a tensor, the dimension of the images; for a container, the divisions of its children; "entries" for a list with
# one entry per image; "unclear" for a part that does not divide into images; None for a part that all images share.
_Division = int | list["_Division"] | Literal["entries", "unclear"] | None


@dataclass(frozen=True, slots=True)
class OutputRows:
    """Assignment of the parts of a model's output to the images of a batch.

    It is derived from the outputs for one image and for two: a dimension whose size changes is that of the images. A
    constant tensor is not divided, even if it has as many rows as the batch has images.

    Attributes:
        division: For each part of the output, the dimension of the images.
        serial_reason: Why the model cannot run several images at once without changing the result; empty if it can.
    """

    division: _Division = None
    serial_reason: str = ""

    def repeated(self, output: Any, row: int, times: int) -> Any:
        """Return the output of a batch that holds one image `times` times.

        Args:
            output: An output of the model.
            row: The image's row in it.
            times: The number of copies.

        Raises:
            TargetError: The output does not divide into images.
        """
        return _repeated(self.division, output, row, times)


_known: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, str]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_MOST_KNOWN = 32


def output_rows(model: nn.Module, x: Tensor) -> OutputRows:
    """Find which part of a model's output belongs to which image.

    The model runs twice: on the given image, and on this image together with noise of the same mean and deviation.

    Args:
        model: The model, in `prepared_for_attribution`.
        x: (1, C, H, W) one image.
    """
    with torch.no_grad():
        one = run_model(model, x)
        try:
            two = run_model(model, torch.cat([x, _noise_like(x)]))
        except Exception as error:  # noqa: BLE001 - the result states the model's error
            return OutputRows("unclear", f"one pass at a time: the model does not run a batch of two images ({error})")
        division = _divided(one, two)
        try:
            alone = trees_agree(one, _repeated(division, two, 0, 1), coarsest=rounding(_dtype_of(x), x.device))
        except TargetError:
            alone = True  # an output without division cannot be compared
    return OutputRows(division, "" if alone else COUPLED)


def cached_serial_reason(model: nn.Module, x: Tensor) -> str:
    """Return `OutputRows.serial_reason`, cached for the modules, their hooks and the shape of the image."""
    modules = tuple((id(module), *forward_hook_ids(module)) for module in unique_modules(model))
    key = tuple(x.shape[1:]), x.dtype, x.device, _dtype_of(x), modules
    with _lock:
        known = _known.setdefault(model, {})
        reason = known.get(key)
    if reason is None:
        reason = output_rows(model, x).serial_reason
        if reason not in ("", COUPLED):  # an error of the model, such as out of memory, may not recur
            return reason
        with _lock:
            if len(known) == _MOST_KNOWN:
                known.clear()
            known[key] = reason
    return reason


def _noise_like(x: Tensor) -> Tensor:
    """Return noise with the mean of an image, and its deviation or, for a constant image, 1."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu").to(x)
    deviation = x.std() if x.numel() > 1 else x.new_zeros(())
    return x.mean() + noise * torch.where(deviation > 0, deviation, torch.ones_like(deviation))


def _dtype_of(x: Tensor) -> torch.dtype:
    """Return the type in which a model computes: that of the image, or of the caller's autocast."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _divided(one: Any, two: Any) -> _Division:
    """Compare the output for one image with the output for two."""
    if type(one) is not type(two):
        return "unclear"
    if isinstance(one, Tensor):
        return _dimension(tuple(one.shape), tuple(two.shape))
    first, second = tree_children(one), tree_children(two)
    if first is None or second is None:
        return None if isinstance(one, _SHARED) else "unclear"
    if isinstance(one, tuple | list) and (len(first), len(second)) == (1, 2):
        return "entries"
    if len(first) != len(second):
        return "unclear"
    return [_divided(*pair) for pair in zip(first, second, strict=True)]


def _dimension(one: tuple[int, ...], two: tuple[int, ...]) -> _Division:
    """Return the dimension whose size is 1 for one image and 2 for two; None for a tensor of constant shape."""
    changed = [at for at, sizes in enumerate(zip(one, two, strict=False)) if len({*sizes}) > 1]
    if one == two:
        return None
    is_batch = len(one) == len(two) and len(changed) == 1 and (one[changed[0]], two[changed[0]]) == (1, 2)
    return changed[0] if is_batch else "unclear"


def _repeated(division: _Division, output: Any, row: int, times: int) -> Any:
    if division is None:
        return output
    if isinstance(division, int) and isinstance(output, Tensor):
        return torch.cat([output.narrow(division, row, 1)] * times, division)
    if division == "entries":
        return type(output)([output[row]] * times)
    children = tree_children(output)
    if isinstance(division, list) and children is not None and len(children) == len(division):
        pairs = zip(division, children, strict=True)
        return tree_with_children(output, [_repeated(part, child, row, times) for part, child in pairs])
    kind = f"tensor {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
    raise TargetError(
        f"a {kind} in the model's output does not show which part of it belongs to which image; explain one image at a "
        "time, or let the model return one row or one list entry per image"
    )


def is_divided(division: _Division) -> bool:
    """Return whether every part of an output belongs to one image, or to all of them."""
    if isinstance(division, list):
        return all(map(is_divided, division))
    return division != "unclear"


def serial_reason(target: Target, model: nn.Module, x: Tensor, rows: Callable[[], OutputRows]) -> str:
    """Return why the passes of an image cannot run together for a target; empty if they can.

    Args:
        target: The resolved target.
        model: The model, in `prepared_for_attribution`.
        x: (1, C, H, W) the image.
        rows: Returns how the model's output divides into images; called if the target is a function.
    """
    if isinstance(target, OutputTarget):
        return cached_serial_reason(model, x)
    if rows().serial_reason or is_divided(rows().division):
        return rows().serial_reason
    return "one pass at a time: the output does not show which part of it belongs to which image"


def has_batch_statistics(model: nn.Module) -> bool:
    """Return whether a batch norm uses the statistics of the batch in evaluation mode."""
    return any(isinstance(norm, _BATCH_NORMS) and norm.running_mean is None for norm in unique_modules(model))


def warn_of_coupled_images() -> None:
    """Warn that the maps of a batch are not those of its single images."""
    warn(
        "the images of a batch affect each other in this model, as in a batch norm without running statistics, so each "
        "map depends on the other images; explain them one at a time"
    )


def repeat_target(target: Target, images: int, image: int, count: int, rows: Callable[[], OutputRows]) -> Target:
    """Return the target of one image of a batch, for an output whose rows are `count` passes of that image.

    Args:
        target: The resolved target of the batch.
        images: The number of images in the batch.
        image: The index of the image.
        count: The number of passes.
        rows: Returns how the model's output divides into images; called if the target is a function.
    """
    if isinstance(target, OutputTarget):
        return target.repeated(image, count)
    return RepeatedTarget(target, images, image, count, rows())


@dataclass(frozen=True, slots=True)
class RepeatedTarget:
    """Function of a batch's output, evaluated for one of its images.

    The function may combine the rows of a batch, so for each pass it gets a whole batch of copies.
    """

    target: Target
    images: int
    image: int
    count: int
    rows: OutputRows

    def __call__(self, output: Any) -> Tensor:
        """Return the scores (k,) of an output of k passes. Raises TargetError unless it gives one score per image."""
        if self.images == self.count == 1:
            return self.target(output)
        scores: list[Any] = [self.target(self.rows.repeated(output, row, self.images)) for row in range(self.count)]
        if any(not isinstance(score, Tensor) or score.shape != (self.images,) for score in scores):
            raise TargetError(
                f"the target did not return one score per image: expected a tensor ({self.images},) in each call"
            )
        return torch.stack([score[self.image] for score in scores])
