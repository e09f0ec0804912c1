"""The questions of one call, and the assignment of a model's output to the images of a batch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NonFiniteError, TargetError, warn
from ..hooks.autograd_graph import ends_in_probability, modules_and_hooks, tensor_version, unique_modules
from ..hooks.pytree import rounding, tree_children, tree_map_tensors, tree_tensors, tree_with_children, trees_agree
from ..io.geometry import Frame, Geometry
from ..io.inputs import Batch
from ..model.answer import Answer
from ..model.call import (
    bind_image,
    cached,
    check_later,
    current_call,
    leaf,
    read_back,
    run_model,
    run_without_arguments,
)
from ..model.dual_encoder import DualEncoder
from ..model.inputs import InputBatch
from ..model.layers import CHANNELS_FIRST, find, trace_layers
from ..targets.boxes import BoxTarget
from ..targets.classes import ClassScore, ClassTarget, Contrast, Probability, TargetLike, as_target
from ..targets.language import parse_target
from ..targets.question import Categories, Images, Prompt, Question, Score, Target, one_score_each
from ..targets.similarity import Similarity
from ..targets.words import words
from ..validation import described

_COUPLED = "one pass at a time: the images of a batch affect each other in this model"
_UNDIVIDED = "one pass at a time: the output does not show which part of it belongs to which image"

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_OF_IMAGES = (int, str, ClassTarget, Contrast, Probability, BoxTarget, Similarity)
_SHARED = str | bytes | int | float | complex | torch.dtype | torch.device | None


class CallImages(Images):
    """Images of a call of a method, with the facts that targets need, from the batch and the prepared model.

    Args:
        model: The model, in `prepared_for_attribution`.
        x: (N, C, H, W) the batch.
        categories: The class names.
        frames: The position of the input on each image; by default the input is the image.
        read: Reads a reference image as the model's input.
    """

    read_numbers = staticmethod(read_back)

    def __init__(
        self,
        model: nn.Module,
        x: Tensor,
        categories: Categories = None,
        frames: Sequence[Frame | None] = (),
        read: Callable[[Any], Batch] | None = None,
    ) -> None:
        call = current_call()
        super().__init__(len(x), categories, call.batch.answer_text if isinstance(call.batch, Answer) else None)
        self._model, self._x, self._frames, self._read = model, x, frames, read
        self.logits = {} if call.logits is None else call.logits
        self._rows: list[OutputRows] = []

    @property
    def geometries(self) -> tuple[Geometry, ...]:
        """The position of the model's input on each image."""
        if not self.located_at:
            size, frames = tuple(self._x.shape[2:]), self._frames or [None] * self.count
            batch = current_call().batch
            if isinstance(batch, InputBatch):
                self.located_at = batch.source.geometries
            else:
                self.located_at = tuple(Geometry.of(frame, size) for frame in frames)
        return self.located_at

    def encode_text(self, texts: Sequence[Prompt]) -> tuple[Tensor, float]:
        """Return the embeddings (K, D) of texts, and the model's factor from cosine similarities to logits."""
        model = self._model
        if not isinstance(model, DualEncoder):
            hint = "use a DualEncoder, such as saliency.load('open_clip/ViT-B-32')"
            raise TargetError(f"{type(model).__name__} has no text encoder, so it cannot explain a text; {hint}")
        return model.encode_text(texts), model.logit_scale if len(texts) > 1 else 1.0

    def encode_image(self, image: Any) -> Any:
        """Return the model's output for a reference image, without the arguments of the call."""
        if self._read is None:
            return super().encode_image(image)
        return run_without_arguments(self._model, self._read(image).inputs)

    def is_probability(self, scores: Tensor) -> bool:
        """Return whether the scores end in a sigmoid or softmax."""
        is_traced = scores.requires_grad
        return ends_in_probability(scores) if is_traced else _ends_in_probability(self._model, self._x, scores)

    def channel_axis(self, layer: Any) -> tuple[str, int | None]:
        """Return the name of a layer, and the axis of channels in its output, or None if it cannot be determined."""
        name, module = find(self._model, layer)
        if isinstance(module, CHANNELS_FIRST):
            return name, 1
        if isinstance(module, nn.Linear):
            return name, -1
        kinds = [traced.layout.kind for traced in trace_layers(self._model, self._x).spatial if traced.name == name]
        return name, {"NCHW": 1, "NHWC": -1, "NTC": -1}[kinds[0]] if kinds else None

    def rows(self, image: int = 0) -> OutputRows:
        """Return how the model's output divides into images, from two forwards of the first image that needs it."""
        if not self._rows:
            self._rows.append(output_rows(self._model, self._x[image : image + 1]))
        return self._rows[0]

    def score_of(self, function: Score, image: int | None = None) -> Score:
        """Return the score of one image, or of all images, by a user's function of the output of the whole batch."""
        return _unchanged(function) if image is None else FunctionScore(_unchanged(function), self, image)


@dataclass(frozen=True, slots=True, eq=False)
class FunctionScore:
    """Score of one image by a user's function, which takes the output of a whole batch and may combine its rows.

    Therefore it receives a whole batch of copies for each variant of the image.
    """

    function: Score
    images: CallImages
    image: int

    def __call__(self, output: Any, count: int = 1) -> Tensor:
        """Return the scores (count,) of variants of the image."""
        images = self.images.count
        if images == count == 1:
            return self.function(output)
        rows = self.images.rows(self.image)
        scores = (one_score_each(self.function(rows.repeated(output, row, images)), images) for row in range(count))
        return torch.stack([score[self.image] for score in scores])


def _require_finite(*scores: float) -> None:
    for index, score in enumerate(scores):
        if not math.isfinite(score):
            raise NonFiniteError(f"the score of image {index} is {score}; the model's output is not finite")


class Questions:
    """Questions of one call: one for each image, and a function from the output to the scores of all images.

    The questions are derived from the first output, for the unmodified images. They then stay fixed, for example the
    top class, regardless of the number of passes.

    Args:
        target: The target.
        images: The images.

    Attributes:
        asked: The question about each image, after the first output.
        score: The function from an output to the scores (N,) of these questions.
    """

    score: Score

    def __init__(self, target: TargetLike, images: Images) -> None:
        self.images = images
        self.target = (target if isinstance(target, Target) else target_of(target, images)).prepared(images)
        self.asked: list[Question] = []

    def __call__(self, output: Any) -> Tensor:
        """Return the scores (N,) of an output.

        A score that is NaN or infinite raises NonFiniteError once the result is computed.

        Raises:
            TargetError: The target does not fit the output.
        """
        if not self.asked:
            is_other = bool(self.images.logits) and not self.target.reads_logits
            if is_other and any(map(self.images.last_operation, tree_tensors(output))):
                problem = "regions and joints read the values before the last sigmoid or softmax of this model"
                raise TargetError(f"{problem}; explain them in another call than other targets")
            self.asked, self.score = self.target.ask(output, self.images)
        scores = one_score_each(self.score(output), len(self.asked))
        check_later(_require_finite, scores)
        return scores

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.asked) or self.images.count

    def __getitem__(self, image: int) -> Question:
        """Return the question of an image, after the first output."""
        return self.asked[image]

    @property
    def indices(self) -> tuple[int | None, ...]:
        """Class indices, one per image; None if the target is not a class."""
        return tuple([question.index for question in self.asked])

    def classes(self, like: Tensor) -> Tensor | None:
        """Return the class indices (N,) on the device of a tensor; None unless each score is the score of a class."""
        is_class = all(isinstance(question.score, ClassScore) for question in self.asked)
        return torch.tensor(self.indices, device=like.device) if is_class else None

    def variants(self, image: int, count: int, *, mirrored: bool = False) -> Questions:
        """Return the question of one image, for an output whose rows are variants of that image.

        Args:
            image: The index of the image in the batch.
            count: The number of variants.
            mirrored: Whether they are mirrored from left to right.

        Raises:
            TargetError: The question changes in a mirrored image.
        """
        question = self[image]
        score = question.mirrored if mirrored else question.score
        if score is None:
            raise TargetError(f"{question.name} is not the same in a mirrored image; pass flips=False")
        if isinstance(score, FunctionScore):
            score = partial(score, count=count)
        other = copy.copy(self)
        other.asked, other.score = [question] * count, score
        return other

    def serial_reason(self, image: int, model: nn.Module, x: Tensor) -> str:
        """Return why the passes of an image cannot run together; empty if they can.

        Warn if the images of the batch affect each other.

        Args:
            image: The index of the image in the batch.
            model: The model, in `prepared_for_attribution`.
            x: (1, C, H, W) the image.
        """
        score = self[image].score
        if isinstance(score, FunctionScore):
            reason = score.images.rows(image).serial_reason
        else:
            reason = cached_serial_reason(model, x)
        if reason == _COUPLED and len(self) > 1:
            warn_of_coupled_images()
        return reason


def explained_answer() -> Answer | None:
    """Return the answer that is explained; None if it is an image."""
    batch = current_call().batch
    return batch if isinstance(batch, Answer) else None


def target_of(target: TargetLike, images: Images) -> Target:
    """Return the target of a caller; by default the top class, or the whole answer."""
    if images.answer is not None and isinstance(target, _OF_IMAGES):
        raise TargetError(f'an answer has words and no classes, got {described(target)}; pass saliency.words("red")')
    if isinstance(target, str | list | tuple):
        target = parse_target(target, images.categories)
    return as_target(words() if target is None and images.answer else target, images.count)


def _unchanged(function: Score) -> Score:
    """Return a user's function that raises TargetError if it changes the model's output in place."""

    def call(output: Any) -> Tensor:
        before = _versions(output)
        scores = function(output)
        if _versions(output) != before:
            raise TargetError("the target changed the model's output in place; use output.clone() in it")
        return scores

    return call


def _versions(output: Any) -> list[int]:
    """Return how often each tensor of an output was changed in place."""
    return [tensor_version(tensor) for tensor in tree_tensors(output)]


@dataclass(frozen=True, slots=True)
class OutputRows:
    """Assignment of the parts of a model's output to the images of a batch.

    It is derived from the outputs for one image and for two: a dimension whose size differs is the image
    dimension. A constant tensor is not divided, even if it has as many rows as the batch has images.

    Attributes:
        single: The output for one image; its tensors have shapes but no values.
        double: The output for two images; None if the model rejects two images.
        serial_reason: Why a function of the output cannot be evaluated for several passes at once; empty if it can.
    """

    single: Any
    double: Any
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
        single, double = self.single, self.double
        if isinstance(output, Tensor) and isinstance(single, Tensor) and isinstance(double, Tensor):
            if single.shape == double.shape:
                return output
            sizes = list(zip(single.shape, double.shape, strict=False))
            changed = [dim for dim, pair in enumerate(sizes) if pair[0] != pair[1]]
            if single.dim() == double.dim() and len(changed) == 1 and sizes[changed[0]] == (1, 2):
                return torch.cat([output.narrow(changed[0], row, 1)] * times, changed[0])
        elif type(single) is type(double) is type(output):
            if isinstance(output, _SHARED):
                return output
            if isinstance(output, tuple | list) and (len(single), len(double)) == (1, 2):
                return type(output)([output[row]] * times)
            children = [tree_children(tree) for tree in (single, double, output)]
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
    """Find the parts of a model's output that belong to each image.

    The model runs twice: on the image alone, and on the image together with noise of the same mean and deviation.

    Args:
        model: The model, in `prepared_for_attribution`.
        x: (1, C, H, W) one image.
    """
    with torch.no_grad():
        single = run_model(model, x)
        try:
            double = run_model(model, torch.cat([x, _noise_like(x)]))
        except Exception as error:  # noqa: BLE001 - the result states the model's error
            return OutputRows(None, None, f"one pass at a time: the model does not run a batch of two images ({error})")
        rows = OutputRows(*(tree_map_tensors(output, lambda tensor: tensor.to("meta")) for output in (single, double)))
        try:
            first = rows.repeated(double, 0, 1)
        except TargetError:  # outputs that do not divide into images cannot be compared
            return replace(rows, serial_reason=_UNDIVIDED)
        is_alone = trees_agree(single, first, coarsest=rounding(_dtype_of(x), x.device))
    return rows if is_alone else replace(rows, serial_reason=_COUPLED)


def _noise_like(x: Tensor) -> Tensor:
    """Return noise with the mean and the standard deviation of an image; the deviation is 1 for a constant image."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu").to(x)
    deviation = x.std() if x.numel() > 1 else x.new_zeros(())
    return x.mean() + noise * torch.where(deviation > 0, deviation, torch.ones_like(deviation))


def _dtype_of(x: Tensor) -> torch.dtype:
    """Return the dtype in which a model computes: the dtype of the image, or of the caller's autocast."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def cached_serial_reason(model: nn.Module, x: Tensor) -> str:
    """Return why passes cannot run together for a class, cached for the modules, their hooks and the image's shape."""
    key = "serial", tuple(x.shape[1:]), x.dtype, x.device, _dtype_of(x), modules_and_hooks(model)

    def compute() -> str:
        return output_rows(model, x).serial_reason.replace(_UNDIVIDED, "")

    # An error of the model, such as out of memory, may not recur.
    return cached(model, key, compute, keeps=("", _COUPLED).__contains__)


def _ends_in_probability(model: nn.Module, x: Tensor, scores: Tensor) -> bool:
    """Return whether scores of a model for images x (N, C, H, W) are an output that ends in a sigmoid or softmax.

    The model runs once on one image; the answer is cached for its modules, their hooks and the size of the scores.
    """
    size = scores[0].numel()

    def compute() -> bool:
        with bind_image(0), torch.enable_grad():
            outputs = [part for part in tree_tensors(run_model(model, leaf(x[:1]))) if part.numel() == size]
            return any(map(ends_in_probability, outputs))

    return cached(model, ("probability", modules_and_hooks(model), size), compute)


def has_batch_statistics(model: nn.Module) -> bool:
    """Return whether a batch norm uses the statistics of the batch in evaluation mode."""
    return any(isinstance(norm, _BATCH_NORMS) and norm.running_mean is None for norm in unique_modules(model))


def warn_of_coupled_images() -> None:
    """Warn that the map of each image depends on the other images of the batch."""
    warn(
        "the images of a batch affect each other in this model, as in a batch norm without running statistics, so each "
        "map depends on the other images; explain them one at a time"
    )
