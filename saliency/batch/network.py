"""The network's part: a group of prepared photos in; an explanation of each by each method out, or why not."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attribution.base import Attribution, explain_together
from ..attribution.explanation import Explanation
from ..attribution.registry import get_method
from ..errors import LayerError, MethodError, NotApplicableError, TargetError, did_you_mean
from ..hooks.model_state import is_out_of_memory, reference_tensor
from ..targets.class_names import Categories, class_index, class_scores
from ..targets.targets import ClassScore, TargetLike
from .errors import Failure
from .loading import Prepared
from .run_options import Job

Found = Mapping[str, Explanation | Failure]
"""What each method found on one photo."""


CHUNK_ON_A_PROCESSOR, CHUNK_ON_AN_ACCELERATOR = 8, 64
"""How many passes of one photo run at once, where the job does not say."""


class TooLargeError(MemoryError):
    """Memory has no room for a batch of this size."""


@dataclass(frozen=True, slots=True)
class ClassOfEach(ClassScore):
    """The score of a class per image, where None is the image's top class."""

    def resolve(self, images: int, categories: Categories) -> ClassScore:
        """Itself: what was named is resolved photo by photo, so that a wrong one costs its photo only."""
        return self

    def resolve_from(self, output: Any) -> ClassScore:
        """With the top class, where none was named."""
        top = class_scores(output).detach().argmax(1).tolist()
        return ClassScore(
            tuple(own if each is None else each for each, own in zip(self.classes, top, strict=True))
        ).resolve_from(output)


class Network:
    """A model with the methods of a job. May be used by several threads at once.

    Args:
        job: What is to be done.
        model: The model, where it is to be run.

    Raises:
        MethodError: No such method, or an option that it does not take.
        LayerError: No such layer.
        TargetError: The target of all photos does not exist.
    """

    def __init__(self, job: Job, model: nn.Module) -> None:
        self.methods = _built(job, model)
        self.preprocess = self.methods[0].preprocess
        self.categories = self.methods[0].categories
        like = reference_tensor(model)
        self.device = torch.device("cpu") if like is None else like.device
        self._dtype = torch.float32 if like is None else like.dtype
        self._target = resolved(job.target, self.categories)
        self._alone: frozenset[str] = frozenset()

    def explain(self, batch: Sequence[Prepared]) -> list[Found]:
        """What each method finds on each photo, in the order of the photos.

        A photo that could not be prepared leaves a hole in the batch, so that the others keep their places. What fails
        is tried again in parts, down to one method on one photo.

        Raises:
            TooLargeError: Memory has no room for more than one photo at once.
        """
        found: list[dict[str, Explanation | Failure]] = [{} for _ in batch]
        targets: list[int | None] = [None] * len(batch)
        sound: list[int] = []
        for at, each in enumerate(batch):
            if each.tensor is None:
                continue
            try:
                wanted = each.photo.target
                targets[at] = self._target if wanted is None else resolved(wanted, self.categories)
                sound.append(at)
            except TargetError as error:
                found[at] = {one.name: Failure.of(error, each.photo) for one in self.methods}
        shapes = list(dict.fromkeys(tuple(each.tensor.shape) for at in sound if (each := batch[at]).tensor is not None))
        for shape in shapes:
            # Photos of one size run as the group stands; otherwise those of each size run together.
            rows = range(len(batch)) if len(shapes) == 1 else [at for at in sound if _has_shape(batch[at], shape)]
            here = [at for at in rows if at in sound]
            x = torch.stack([_tensor(batch[at], shape, at in here) for at in rows]).to(
                self.device, self._dtype
            )  # (N, C, H, W)
            for name, results in self._by_all(x, [targets[at] for at in rows]).items():
                for at, result in zip(rows, results, strict=True):
                    if at in here:
                        one = result if isinstance(result, Explanation) else Failure.of(result, batch[at].photo)
                        found[at][name] = one
        return [{each.name: row[each.name] for each in self.methods if each.name in row} for row in found]

    def _by_all(self, x: Tensor, targets: list[int | None]) -> dict[str, list[Explanation | Exception]]:
        alone = self._alone
        together = [each for each in self.methods if each.name not in alone]
        found: dict[str, list[Explanation | Exception]] = {}
        for some in (together, *([each] for each in self.methods if each.name in alone)):
            if some:
                found |= self._attempt(some, x, targets)
        failed = {name for name, results in found.items() if all(isinstance(each, Exception) for each in results)}
        # What failed on all photos is asked for by itself the next time, so that the others share their passes again.
        if failed - alone and len(failed) < len(found):
            self._alone = alone | failed
        return found

    def _attempt(
        self, methods: Sequence[Attribution], x: Tensor, targets: list[int | None]
    ) -> dict[str, list[Explanation | Exception]]:
        """What some methods find on the rows of a batch; each row by itself where the batch fails."""
        error = None
        try:
            made = explain_together(methods, x, _target(targets))
            return {one.name: list(each.to("cpu")) for one, each in zip(methods, made, strict=True)}
        except Exception as caught:  # noqa: BLE001 - whatever a model raises is told of its photo, and the next is due
            error = _without_frames(caught)
        # Behind the handler, whose traceback holds on to the memory of the pass.
        if is_out_of_memory(error):
            _release(x)
            if len(x) > 1:
                raise TooLargeError(f"{len(x)} photos at once")
        if len(methods) > 1:
            return {name: rows for one in methods for name, rows in self._attempt([one], x, targets).items()}
        if len(x) > 1 and not isinstance(error, NotApplicableError | LayerError | MethodError):
            singles = [self._attempt(methods, x[at : at + 1], targets[at : at + 1]) for at in range(len(x))]
            return {methods[0].name: [single[methods[0].name][0] for single in singles]}
        return {methods[0].name: [error] * len(x)}


def resolved(target: int | str | None, categories: Categories) -> int | None:
    """The index of a class by index or name. Raises TargetError where there is none, as far as the names tell."""
    if isinstance(target, str) and not (categories is not None and target in categories):
        target = int(target) if re.fullmatch(r"[+-]?\d+", target) else target
    return None if target is None else class_index(target, categories)


def _target(targets: list[int | None]) -> TargetLike:
    if all(each is None for each in targets):
        return None
    return ClassOfEach(tuple(targets))


def _has_shape(each: Prepared, shape: tuple[int, ...]) -> bool:
    return each.tensor is not None and tuple(each.tensor.shape) == shape


def _tensor(each: Prepared, shape: tuple[int, ...], sound: bool) -> Tensor:
    return each.tensor if sound and each.tensor is not None else torch.zeros(shape, dtype=torch.float32, device="cpu")


def _without_frames(error: Exception) -> Exception:
    """An error that holds on to none of the variables of the code that it came through."""
    at: BaseException | None = error
    while at is not None:
        at.__traceback__ = None
        at = at.__cause__ or at.__context__
    return error


def _release(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.empty_cache()


def _built(job: Job, model: nn.Module) -> list[Attribution]:
    """The methods of a job on a model, each with the options that it has."""
    classes = [get_method(name) for name in job.methods]
    known = list(dict.fromkeys(option for cls in classes for option in cls.options()))
    for name in job.options:
        if name not in known:
            hint = did_you_mean(name, known) or (f"; there are {', '.join(known)}" if known else "")
            raise MethodError(f'no option "{name}" of {", ".join(job.methods)}{hint}')
    places = [_layer_options(cls, job.layer) for cls in classes]
    if job.layer is not None and not any(places):
        raise MethodError(f'layer="{job.layer}": no layer is read by {", ".join(job.methods)}; leave it out')
    # "auto" settles the chunk size by the clock, and so the last bits of a map; a resumed run makes the same files.
    options = {"chunk": CHUNK_ON_A_PROCESSOR if _on_a_processor(model) else CHUNK_ON_AN_ACCELERATOR, **job.options}
    own = [{name: value for name, value in options.items() if name in cls.options()} for cls in classes]
    try:
        return [cls(model, **place, **options) for cls, place, options in zip(classes, places, own, strict=True)]
    except TypeError as error:
        raise MethodError(f"an option is not taken: {error}") from error


def _on_a_processor(model: nn.Module) -> bool:
    like = reference_tensor(model)
    return like is None or like.device.type == "cpu"


def _layer_options(cls: type[Attribution], layer: str | None) -> dict[str, Any]:
    parameters = inspect.signature(cls.__init__).parameters
    if layer is None:
        return {}
    return {"layer": layer} if "layer" in parameters else {"layers": [layer]} if "layers" in parameters else {}
