"""The target of one call, and which part of a model's output belongs to which image of a batch."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NonFiniteError, TargetError, warn
from ..hooks.autograd_graph import ends_in_probability, forward_hook_ids, tensor_version
from ..hooks.dual_encoder import DualEncoder
from ..hooks.forward_args import bind_image, cache_of, returned_layer, unbind_forward_args
from ..hooks.model_state import last_operation, leaf, return_logits, run_model, unique_modules
from ..hooks.pytree import rounding, tree_children, tree_map_tensors, tree_tensors, tree_with_children, trees_agree
from ..hooks.tracing import is_tracing
from ..io.preprocess import Box, Frame, Geometry
from ..layers.find import trace_layers
from ..layers.layout import is_channels_first
from ..targets.region import Keypoint, Region
from ..targets.targets import (
    Categories,
    FunctionTarget,
    OutputFacts,
    OutputTarget,
    Prompt,
    TargetLike,
    TargetList,
    as_target,
    one_score_each,
    output_tensor,
)
from ..targets.words import words
from .answer import explained_answer

_COUPLED = "one pass at a time: the images of a batch affect each other in this model"
_UNDIVIDED = "one pass at a time: the output does not show which part of it belongs to which image"

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_SHARED = str | bytes | int | float | complex | torch.dtype | torch.device | None


class ResolvedTarget:
    """Target of one call, resolved from the first output and constant from then on.

    The top class is chosen only once, on the unmodified image, regardless of the number of passes.
    """

    def __init__(self, target: TargetLike, images: int, categories: Categories = None) -> None:
        self.images = images
        self.categories = categories
        self._answer = explained_answer()
        if self._answer is not None and isinstance(target, int | str):
            raise TargetError(f'an answer has words and no classes, got {target!r}; pass saliency.words("red")')
        self.target = as_target(words() if target is None and self._answer else target, images, categories)
        self.probabilities: Tensor | None = None
        self._is_resolved = self._reads_logits = False
        self._ends_in_probability: Callable[[Tensor], bool] | None = None

    def bind(
        self, model: nn.Module, x: Tensor, read: Callable[[Any], Tensor], frames: Sequence[Frame | None] = ()
    ) -> None:
        """Locate the target on the images, and encode its texts and reference images, if it has any.

        Args:
            model: The model, in `prepared_for_attribution`.
            x: (N, C, H, W) the batch.
            read: Returns a reference image as the model's input (1, C, H, W).
            frames: The position of the input on each image; by default the input is the image.
        """
        size = tuple(x.shape[2:])
        self.target = self.target.locate([Geometry.of(frame, size) for frame in frames or [None] * len(x)])

        def encode_text(texts: Sequence[Prompt]) -> tuple[Tensor, float]:
            if not isinstance(model, DualEncoder):
                hint = "use a DualEncoder, such as saliency.load('open_clip/ViT-B-32')"
                raise TargetError(f"{type(model).__name__} has no text encoder, so it cannot explain a text; {hint}")
            return model.encode_text(texts), model.logit_scale if len(texts) > 1 else 1.0

        def encode_image(image: Any) -> Any:
            with unbind_forward_args(), torch.no_grad():
                return run_model(model, read(image))

        self.target = self.target.bind(encode_text, encode_image)
        self._ends_in_probability = partial(_ends_in_probability, model, x)
        targets: Any = getattr(self.target, "targets", (self.target,))
        places = [isinstance(own, Region | Keypoint) for own in targets]
        self._reads_logits = all(places)
        if any(places):
            return_logits()
        if (layer := returned_layer()) is not None:
            targets = [replace(neuron, layer=layer, axis=_channel_axis(model, layer, x)) for neuron in targets]
            self.target = TargetList(tuple(targets)) if isinstance(self.target, TargetList) else targets[0]

    def replaced(self, target: OutputTarget) -> ResolvedTarget:
        """Return another target of the same call, which is not resolved yet."""
        other = copy.copy(self)
        other.target, other._is_resolved = target, False
        return other

    def is_probability(self, output: Any) -> bool:
        """Return whether an output ends in a sigmoid or softmax."""
        scores = output_tensor(output)
        if not scores.requires_grad and self._ends_in_probability is not None:
            return self._ends_in_probability(scores)
        return ends_in_probability(scores)

    def __call__(self, output: Any) -> Tensor:
        """Return the scores (N,) of an output.

        Raises:
            TargetError: The target does not fit the output.
            NonFiniteError: A score is NaN or infinite.
        """
        if not self._is_resolved:
            if not self._reads_logits and any(map(last_operation, tree_tensors(output))):
                problem = "regions and joints read the values before the last sigmoid or softmax of this model"
                raise TargetError(f"{problem}; explain them in another call than other targets")
            answer = None if self._answer is None else self._answer.answer_text
            facts = OutputFacts(self.categories, self.is_probability, answer, last_operation)
            self.target = self.target.resolve_from(output, facts)
            self.probabilities = self.target.probabilities(output)
            self._is_resolved = True
        before = _versions(output)
        scores = self.target(output)
        if _versions(output) != before:
            raise TargetError("the target changed the model's output in place; use output.clone() in it")
        if is_tracing():
            return scores
        for index, score in enumerate(one_score_each(scores, self.images).tolist()):
            if not math.isfinite(score):
                raise NonFiniteError(f"the score of image {index} is {score}; the model's output is not finite")
        return scores

    @property
    def indices(self) -> tuple[int | None, ...]:
        """Class indices, one per image; None if the target is not a class."""
        return self.target.indices(self.images)

    def class_index(self, like: Tensor) -> Tensor | None:
        """Return the class indices (N,) on the device of a tensor; None if the target is not a class."""
        if is_tracing():
            return getattr(self.target, "classes", None)
        return None if None in self.indices else torch.tensor(self.indices, device=like.device)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the target, one per image."""
        return self.target.names(self.images, self.categories)

    @property
    def contrasts(self) -> tuple[bool, ...]:
        """Whether the score of each image is a difference, as of two classes or texts."""
        return self.target.contrasts(self.images)

    @property
    def boxes(self) -> tuple[Box | None, ...]:
        """Explained boxes in pixels of the input, one per image; empty without boxes."""
        return self.target.boxes()

    def repeated(self, image: int, count: int, rows: Callable[[], OutputRows]) -> ResolvedTarget:
        """Return the resolved target of one image, for an output whose rows are `count` passes of that image.

        Args:
            image: The index of the image in the batch.
            count: The number of passes.
            rows: Returns how the model's output divides into images; called if the target is a function.
        """
        target = self.target.repeated(image, count)
        if isinstance(target, FunctionTarget):
            target = FunctionTarget(partial(_repeated_scores, target.function, self.images, image, count, rows()))
        resolved = ResolvedTarget(target, count, self.categories)
        resolved._is_resolved = True
        return resolved

    def serial_reason(self, image: int, model: nn.Module, x: Tensor, rows: Callable[[], OutputRows]) -> str:
        """Return why the passes of an image cannot run together; empty if they can.

        Warn if the images of the batch affect each other.

        Args:
            image: The index of the image in the batch.
            model: The model, in `prepared_for_attribution`.
            x: (1, C, H, W) the image.
            rows: As for `repeated`.
        """
        is_function = isinstance(self.target.repeated(image, 1), FunctionTarget)
        reason = rows().serial_reason if is_function else cached_serial_reason(model, x)
        if reason == _COUPLED and self.images > 1:
            warn_of_coupled_images()
        return reason


def _versions(output: Any) -> list[int]:
    """Return how often each tensor of an output was changed in place."""
    return [tensor_version(tensor) for tensor in tree_tensors(output)]


def _repeated_scores(
    function: Callable[[Any], Tensor], images: int, image: int, count: int, rows: OutputRows, output: Any
) -> Tensor:
    """Return the scores (k,) of one image, by a function of the whole batch's output, for an output of k passes.

    The function may combine the rows of a batch. So for each pass it receives a whole batch of copies.
    """
    if images == count == 1:
        return function(output)
    scores = (one_score_each(function(rows.repeated(output, row, images)), images) for row in range(count))
    return torch.stack([score[image] for score in scores])


@dataclass(frozen=True, slots=True)
class OutputRows:
    """Assignment of the parts of a model's output to the images of a batch.

    It is derived from the outputs for one image and for two: a dimension whose size differs is the image
    dimension. A constant tensor is not divided, even if it has as many rows as the batch has images.

    Attributes:
        one: The output for one image; its tensors have shapes but no values.
        two: The output for two images; None if the model rejects two images.
        serial_reason: Why a function of the output cannot be evaluated for several passes at once; empty if it can.
    """

    one: Any
    two: Any
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
        one, two = self.one, self.two
        if isinstance(output, Tensor) and isinstance(one, Tensor) and isinstance(two, Tensor):
            if one.shape == two.shape:
                return output
            sizes = list(zip(one.shape, two.shape, strict=False))
            changed = [dim for dim, (single, double) in enumerate(sizes) if single != double]
            if one.dim() == two.dim() and len(changed) == 1 and sizes[changed[0]] == (1, 2):
                return torch.cat([output.narrow(changed[0], row, 1)] * times, changed[0])
        elif type(one) is type(two) is type(output):
            if isinstance(output, _SHARED):
                return output
            if isinstance(output, tuple | list) and (len(one), len(two)) == (1, 2):
                return type(output)([output[row]] * times)
            children = [tree_children(tree) for tree in (one, two, output)]
            parts = [list_ for list_ in children if list_ is not None]
            if len(parts) == 3 and len({*map(len, parts)}) == 1:
                return tree_with_children(
                    output, [OutputRows(a, b).repeated(part, row, times) for a, b, part in zip(*parts, strict=True)]
                )
        kind = f"tensor {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise TargetError(
            f"a {kind} in the model's output does not show which part of it belongs to which image; explain one image "
            "at a time, or let the model return one row or one list entry per image"
        )


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
            return OutputRows(None, None, f"one pass at a time: the model does not run a batch of two images ({error})")
        rows = OutputRows(*(tree_map_tensors(output, lambda tensor: tensor.to("meta")) for output in (one, two)))
        try:
            first = rows.repeated(two, 0, 1)
        except TargetError:  # outputs that do not divide into images cannot be compared
            return replace(rows, serial_reason=_UNDIVIDED)
        is_alone = trees_agree(one, first, coarsest=rounding(_dtype_of(x), x.device))
    return rows if is_alone else replace(rows, serial_reason=_COUPLED)


def _noise_like(x: Tensor) -> Tensor:
    """Return noise with the mean and the standard deviation of an image; the deviation is 1 for a constant image."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu").to(x)
    deviation = x.std() if x.numel() > 1 else x.new_zeros(())
    return x.mean() + noise * torch.where(deviation > 0, deviation, torch.ones_like(deviation))


def _channel_axis(model: nn.Module, layer: str, x: Tensor) -> int | None:
    """Return the axis of the channels in a layer's output, by the type of the layer or its positions in the image."""
    module = model.get_submodule(layer)
    if is_channels_first(module):
        return 1
    if isinstance(module, nn.Linear):
        return -1
    kinds = [traced.layout.kind for traced in trace_layers(model, x).spatial if traced.name == layer]
    return {"NCHW": 1, "NHWC": -1, "NTC": -1}[kinds[0]] if kinds else None


def _dtype_of(x: Tensor) -> torch.dtype:
    """Return the dtype in which a model computes: the dtype of the image, or of the caller's autocast."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


_serial_reasons: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, str]] = weakref.WeakKeyDictionary()


def cached_serial_reason(model: nn.Module, x: Tensor) -> str:
    """Return why passes cannot run together for a class, cached for the modules, their hooks and the image's shape."""
    key = tuple(x.shape[1:]), x.dtype, x.device, _dtype_of(x), _identity(model)
    known: dict[Hashable, str] = cache_of(_serial_reasons, model)
    if key in known:
        return known[key]
    reason = output_rows(model, x).serial_reason.replace(_UNDIVIDED, "")
    if reason in ("", _COUPLED):  # an error of the model, such as out of memory, may not recur
        known[key] = reason
    return reason


_probabilities: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, bool]] = weakref.WeakKeyDictionary()


def _ends_in_probability(model: nn.Module, x: Tensor, scores: Tensor) -> bool:
    """Return whether scores of a model for images x (N, C, H, W) are an output that ends in a sigmoid or softmax.

    The model runs once on one image; the answer is cached for its modules, their hooks and the shape of the scores.
    """
    key, known = (_identity(model), scores.shape[1:]), cache_of(_probabilities, model)
    if key not in known:
        with bind_image(0), torch.enable_grad():
            outputs = [part for part in tree_tensors(run_model(model, leaf(x[:1]))) if part.shape[1:] == key[1]]
            known[key] = any(map(ends_in_probability, outputs))
    return bool(known[key])


def _identity(model: nn.Module) -> Hashable:
    """Return a key that identifies the modules of a model and their hooks."""
    return tuple((id(module), *forward_hook_ids(module)) for module in unique_modules(model))


def has_batch_statistics(model: nn.Module) -> bool:
    """Return whether a batch norm uses the statistics of the batch in evaluation mode."""
    return any(isinstance(norm, _BATCH_NORMS) and norm.running_mean is None for norm in unique_modules(model))


def warn_of_coupled_images() -> None:
    """Warn that the map of each image depends on the other images of the batch."""
    warn(
        "the images of a batch affect each other in this model, as in a batch norm without running statistics, so each "
        "map depends on the other images; explain them one at a time"
    )
