"""The interface of all methods, and their registry.

`attribute` reads the images, resolves the target, prepares the model and checks the result. A method only
implements `explain`.
"""

from __future__ import annotations

import copy
import inspect
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from functools import cache, partial, reduce
from itertools import filterfalse, starmap
from operator import attrgetter, or_
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Never, NoReturn, Self, cast, overload

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.weak import WeakTensorKeyDictionary

from .. import lazy
from ..calls import answered_on_class, known_keywords, refuse_keywords
from ..errors import ImageError, MethodError, NonFiniteError, TargetError, plural, warn
from ..io.axes import as_text
from ..io.geometry import Frame
from ..io.inputs import Batch, ImagesLike, read
from ..io.preprocess import WHOLE, Prepare, PreprocessLike, Whole, as_preprocess, without_crop
from ..model.answer import Answer
from ..model.call import (
    ForwardArgs,
    arguments_of,
    bind_image,
    bound,
    check_later,
    model_attribute,
    prepared_for_attribution,
    read_back,
    reference_tensor,
    unwrap,
)
from ..model.inputs import Group, InputBatch, Key, ModelInputs, Views, has_several_inputs, require_volumes
from ..model.layers import LayoutFunction, as_layout, find, layers_reading
from ..targets.classes import Neuron, TargetLike, as_categories, is_probability
from ..targets.language import parse_target
from ..targets.question import Question, QuestionFacts, Target
from ..validation import Registry, Sign, check_choice, described
from .explanation import BatchAttribution, Explanation, Setting, joined
from .forward import Needs, SharedForward, TargetGradients
from .inputs import InputExplanations, each_alone, explain_inputs
from .options import ConvertedOption, HasOptions, Option, PerImage, PerInput, PositionalOption, is_per_input
from .questions import CallImages, Questions, has_batch_statistics, target_of, warn_of_coupled_images

METHODS: Registry[type[Attribution]] = Registry("method")
"""All methods by name. A class with a `name` is registered when it is defined."""

UNSATURATED = (
    "to explain the score before the sigmoid or softmax, pass saliency.neuron(NAME, CLASS) of the layer before it"
)
"""The advice in the warning about a map of 0 for a probability near 0 or 1."""
_FACTS = attrgetter(*(field.name for field in fields(QuestionFacts)))
_RARE = ("whole", "layout", "calls")
"""Options that settings include only if they are set."""
MIN_IMAGE_SHARE = 0.1
"""An answer gets a warning if its image has a smaller fraction of the relevance of all tokens."""


class Attribution(HasOptions, ABC):
    """Base class of all methods, which attribute a score to the pixels.

    A subclass with a `name` is registered, and so appears in the command line, the tables and the tests. Its docstring
    describes its own options and errors. The options and errors below are added to it.

    Args:
        model: Any `torch.nn.Module`. It is unchanged after each call, bit for bit.
        preprocess: The preprocessing of images: a `Preprocess`, a torchvision preset, timm's pretrained
            configuration, an image processor of Hugging Face, or any function from a PIL image to a tensor. By default
            `model.preprocess`.
        categories: The class names in the order of the output, or a mapping of index to name, which may have gaps. By
            default `model.categories`, or `config.id2label` of a Hugging Face model. For a model that returns one
            number per image, pass two names: the number is the score of the second class, and its negative the score of
            the first.
        whole: Whether the model sees the whole image instead of a crop: True resizes it to the model's input, "aspect"
            keeps its aspect ratio, for models that take any size. Float tensors are used unchanged.
        layout: For tokens and channels whose layout is not recognised, a function from the output of the read layer,
            such as (N, tokens, K), to maps (N, K, h, w). It only selects and rearranges. By default `model.layout`.
            Convolutions need no such function.

    Raises:
        MethodError: An option is invalid.
        TargetError: The target does not fit the model's output, or has no gradient and the method needs one.
    """

    name: ClassVar[str] = ""
    cost: ClassVar[str] = ""
    """Cost of one call, in passes of the model."""
    sign: ClassVar[Sign] = "signed"
    """Sign of the values that the method's authors show."""
    units: ClassVar[str] = "score"
    """Units of the values. Values in score units are drawn as zero if the rounding error of the score exceeds them."""
    is_complete: ClassVar[bool] = True
    """Whether the values and the residual, if any, sum to the score minus a constant, such as a baseline's score."""
    ignores_sign: ClassVar[bool] = False
    """Whether a score and its negative have the same map, as for magnitudes and for maps that ignore the target."""
    needs: ClassVar[Needs] = Needs()
    """The parts of a forward that the method reads."""
    is_compiled: ClassVar[bool] = False
    """Whether the method runs a compiled program; see `compile`."""
    joins_inputs: ClassVar[bool] = False
    """Whether one pass explains all inputs of a model with several, whatever the arrangement of their pixels."""
    per_image: ClassVar[tuple[str, ...]] = ()
    """The options that may have one value per image, as a `PerImage`; "*" for all."""
    preview_options: ClassVar[Mapping[str, Any]] = {}
    """Options that reduce the passes of a slow method, for tests and previews; empty if the defaults are fast."""
    draft_options: ClassVar[Mapping[str, Any]] = {}
    """Options for a first map within about a second, if a method has no map before its last pass; see `listening`."""

    model: PositionalOption[nn.Module, nn.Module] = PositionalOption(
        check=lambda method, model: unwrap(model), kw_only=False
    )
    preprocess: ConvertedOption[PreprocessLike | None, Prepare] = ConvertedOption(
        None, lambda name, like: as_preprocess(_called(like))
    )
    categories: ConvertedOption[Sequence[str] | Mapping[int, str] | None, tuple[str, ...] | None] = ConvertedOption(
        None, lambda name, like: as_categories(like)
    )
    whole: Option[Whole | Mapping[Any, Whole]] = Option(False)
    layout: Option[LayoutFunction | None] = Option(None, as_layout)

    if TYPE_CHECKING:  # METHODS[name] takes options that this class does not declare

        def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not isinstance(cls.needs, Needs):
            raise TypeError(f"{cls.__qualname__}.needs is not a saliency.extending.Needs, got {cls.needs!r}")
        name = cls.__dict__.get("name", "")
        if not name:
            return
        other = METHODS.get(name)
        # A notebook cell that runs again defines the same class again.
        if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(f'{cls.__qualname__}: the name "{name}" belongs to {other.__module__}.{other.__qualname__}')
        METHODS[name] = cls

    def set_options(self, values: dict[str, Any]) -> None:
        """Store all options. Preprocessing, class names and layout are taken from the model if not given."""
        for name in ("preprocess", "categories", "layout"):
            if values[name] is None:
                values[name] = model_attribute(name, values["model"])
        whole, like = values["whole"], values["preprocess"]
        if is_per_input(like):
            of_inputs = whole if isinstance(whole, Mapping) else dict.fromkeys(like, whole)
            values["preprocess"] = {
                name: _whole(prepare, of_inputs.get(name, False)) if prepare else None for name, prepare in like.items()
            }
        elif isinstance(whole, Mapping):
            raise MethodError(
                'whole= by input needs preprocess= by input, such as preprocess={"rgb": ..., "depth": ...}'
            )
        else:
            values["preprocess"] = _whole(like, whole)
        super().set_options(values)

    @property
    def settings(self) -> Mapping[str, Setting]:
        """Options of this method by name: the arguments of its constructor, except those about the model.

        Those of `_RARE` are included if they are set.
        """
        names = [*filterfalse(_RARE.__contains__, type(self).options()), *filter(vars(self).get, _RARE)]
        return {name: as_setting(getattr(self, name)) for name in names}

    @classmethod
    @cache
    def options(cls) -> tuple[str, ...]:
        """Return the names of the options, in the order of the constructor."""
        about_the_model = ("model", "layer", "layers", "preprocess", "categories", "whole", "layout")
        return tuple(name for name in cls.parameters() if name not in about_the_model)

    def __call__(self, *arguments: object, **keywords: object) -> NoReturn:
        """Raise TypeError: the call is `attribute`."""
        name = type(self).__name__
        raise TypeError(f"{name} is called by its method attribute: {name}(model).attribute(inputs, target)")

    def __enter__(self) -> NoReturn:
        """Raise TypeError: hooks last for one call."""
        name = type(self).__name__
        raise TypeError(
            f"{name} needs no with block, its hooks last for one call: {name}(model).attribute(inputs, target)"
        )

    def __exit__(self, *error: object) -> None:
        """Do nothing: `__enter__` raises."""

    @overload
    def attribute(
        self,
        inputs: Mapping[Any, Any] | Views,
        target: TargetLike = None,
        *,
        forward_args: ForwardArgs = (),
        explain: Sequence[Key | Group] | None = None,
    ) -> InputExplanations: ...

    @overload  # images, or the inputs of a model that requires as many
    def attribute(
        self,
        inputs: tuple[Any, ...],
        target: TargetLike = None,
        *,
        forward_args: ForwardArgs = (),
        explain: Sequence[Key | Group] | None = None,
    ) -> Any: ...

    @overload
    def attribute(
        self, inputs: ImagesLike | Batch, target: TargetLike = None, *, forward_args: ForwardArgs = ()
    ) -> Explanation: ...

    @known_keywords
    @answered_on_class
    def attribute(
        self: Any,
        inputs: Any,
        target: TargetLike = None,
        *,
        forward_args: ForwardArgs = (),
        explain: Sequence[Key | Group] | None = None,
        **unknown: Never,
    ) -> Any:
        """Explain one image or several.

        Args:
            inputs: A path, open file, bytes of a file, PIL image, uint8 array (H, W, 3), or a list of these; or the
                model's own normalised input as a float tensor (C, H, W), (N, C, H, W), or (N, C, D, H, W) for volumes
                and videos; or an answer of `saliency.generate`. For a model with several inputs, a mapping of the names
                of its arguments, a tuple in their order, or `Views`; see "Several inputs" in the documentation.
            target: A class index or name, None for the top class, a target such as `saliency.box(index=0)` or its text
                "box:0", a function of the model's output, or a list of these with one entry per image.
            forward_args: Arguments of the model's forward after the image: a tuple, or a mapping of names. Tensors,
                arrays and lists with N entries have one for each image, on any device, and so have tuples of states
                (layers, N, H), as of an LSTM; others are passed unchanged.
            explain: For several inputs, the names of the images to explain; by default all. A tuple of names in it
                treats images of one size as a single image, so that a method hides the same place in all of them.

        Returns:
            An `Explanation`; of several inputs, `InputExplanations` with one for each image.

        Raises:
            ImageError: The image cannot be read, or the model does not accept it.
            TargetError: The target does not fit the model's output.
            LayerError: The layer does not exist, is not run, or has no spatial output.
            MethodError: `forward_args` is invalid, or an option has values for another number of images.
            ModelError: The model refused the image or the arguments.
            NotApplicableError: The method does not apply to this model.
            NonFiniteError: NaN or infinity in the input, the score or the values.

        Warns:
            SaliencyWarning: A float tensor looks like an image that was not normalised.
        """
        if inputs is inspect.Parameter.empty or not isinstance(self, Attribution):
            _refuse_call(self, "attribute(image)")
        if unknown:
            refuse_keywords(unknown, self.attribute, self)
        if isinstance(inputs, Mapping | tuple | Views) and has_several_inputs(self.model, inputs, forward_args):
            several = self.read_inputs(inputs)
            attribute: Any = partial(self.attribute, target=target, forward_args=several.named(forward_args))
            return explain_inputs(several, explain, attribute, is_together=self.explains_together())
        method = inputs.method(self) if isinstance(inputs, InputBatch) else self
        try:
            prepared = method.call(inputs, [target], forward_args)
        except ImageError as error:
            if hint := _image_hint(inputs, target):
                raise ImageError(f"{error}; {hint}") from error
            raise
        with prepared as batch:
            return method.explain_batch(batch, [target])[0]

    @known_keywords
    @answered_on_class
    def attribute_classes(
        self,
        inputs: ImagesLike | Batch,
        targets: Sequence[TargetLike],
        *,
        forward_args: ForwardArgs = (),
        **unknown: Never,
    ) -> list[Explanation]:
        """Explain several targets of the same image or images, if possible from one forward.

        Args:
            inputs: As for `attribute`.
            targets: Several targets, as for `attribute`.
            forward_args: As for `attribute`.
        """
        if cast("Any", targets) is inspect.Parameter.empty or not isinstance(self, Attribution):
            _refuse_call(self, "attribute_classes(image, [0, 1])")
        if unknown:
            refuse_keywords(unknown, self.attribute_classes, self)
        if isinstance(targets, str) or not isinstance(targets, list | tuple) or not targets:
            raise MethodError(
                f"expected a list of targets, got {described(targets)}; for a single target use attribute"
            )
        method = inputs.method(self) if isinstance(inputs, InputBatch) else self
        with method.call(inputs, targets, forward_args) as batch:
            return method.explain_batch(batch, targets)

    @answered_on_class
    def compile(self, mode: str | None = None) -> Self:
        """Return this method with a compiled program of the model and the method, which takes less time.

        On a CPU, most calls take 0.46 to 0.86 of the time; see docs/benchmarks.md. The first call of each image size
        compiles, which takes 10 to 90 seconds: once for single images, and once for batches of any size. A change of
        the model compiles again. Results equal those of this method up to rounding, without the evidence that a program
        does not compute, such as coverage, ledger and residual. Calls that cannot be compiled, such as calls for
        targets other than a class, run this method, and a warning states the reason. For methods of many passes, the
        passes are compiled. Each program holds a copy of the weights.

        Args:
            mode: As for `torch.compile`, such as "reduce-overhead" for CUDA graphs.
        """
        if not isinstance(self, Attribution):
            _refuse_call(self, "compile()")
        return cast("Self", lazy.compiled(self, mode))

    def call(
        self, inputs: ImagesLike | Batch, targets: Sequence[Any] = (), forward_args: ForwardArgs = ()
    ) -> AbstractContextManager[Batch]:
        """Read inputs, and return the context of their batch, in which the model is ready to explain targets of it.

        Raises:
            ImageError: The inputs cannot be read.
            MethodError: `forward_args` is invalid, or an option has values for another number of images.
        """
        checks = list[Any]()
        with bound(checks=checks):
            batch = self.read(inputs)
        if self.per_image:
            _require_values(self, len(batch.inputs))
        flat, layer, logits = list[Any](), None, None
        for target in targets:
            flat += target if isinstance(target, list | tuple) else [target]
        for target in flat:
            if isinstance(target, str):
                target = parse_target(target, self.categories)  # noqa: PLW2901
            if layer is None and isinstance(target, Neuron):
                layer = neuron_layer(self.model, flat)
            elif getattr(target, "reads_logits", False):
                logits = WeakTensorKeyDictionary()
        state = arguments_of(forward_args, batch, layer)
        if isinstance(batch, InputBatch):
            state["other_layers"] = partial(layers_reading, self.model, batch)
        return prepared_for_attribution(self.model, batch, **state, layout=self.layout, logits=logits, checks=checks)

    def explain_batch(self, batch: Batch, targets: Sequence[Any]) -> list[Explanation]:
        """Explain several targets of a batch, in a `call`. Each image of an answer is explained alone."""
        if isinstance(batch, Answer) and len(batch.inputs) > 1:
            return list(map(joined, zip(*each_alone(batch, targets, self.explain_batch), strict=True)))
        images = self.images(batch.inputs, batch.frames)
        asked = [Questions(self.explained_target(target_of(target, images)), images) for target in targets]
        results = self.explain_targets(batch.inputs, asked)
        return [self.explanation(result, questions, batch) for result, questions in zip(results, asked, strict=True)]

    def of_input(self, name: Key) -> Self:
        """Return the method with its options for one of several inputs."""
        options = {option: value for option, value in vars(self).items() if isinstance(value, PerInput | Attribution)}
        if not options:
            return self
        method = copy.copy(self)
        for option, value in options.items():
            if isinstance(value, Attribution):
                vars(method)[option] = value.of_input(name)
            else:
                declared = getattr(type(self), option)
                vars(method)[option] = value[name] if name in value else declared.stored(method, declared.default)
        return method

    def _require_inputs(self, names: Collection[Key]) -> None:
        """Raise MethodError if an option of this method, or of the method that it wraps, names another input."""
        for option, value in vars(self).items():
            if isinstance(value, Attribution):
                value._require_inputs(names)
            elif isinstance(value, PerInput) and (unknown := value.keys() - set(names)):
                problem = f"{option} has a value for {', '.join(map(str, unknown))}"
                raise MethodError(f"{problem}; the inputs are {', '.join(map(str, names))}")

    def explains_together(self) -> bool:
        """Return whether one pass explains all inputs of a model with several inputs."""
        return self.joins_inputs

    @abstractmethod
    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        """Compute the values and scores of a batch. This is all that a method implements.

        The model is in evaluation mode, gradients are enabled, and `target(output)` gives the scores.

        Args:
            x: (N, C, H, W) the model's input. Do not change it.
            target: The function from the model's output to scores (N,).
        """

    def questions(self, target: TargetLike, x: Tensor, frames: Sequence[Frame | None] = ()) -> Questions:
        """Return the questions of a call on a prepared model, about the target that the method explains."""
        images = self.images(x, frames)
        return Questions(self.explained_target(target_of(target, images)), images)

    def images(self, x: Tensor, frames: Sequence[Frame | None] = ()) -> CallImages:
        """Return the images of a call on a prepared model, with the facts that targets need."""
        return CallImages(self.model, x, self.categories, frames, self.read)

    def explained_target(self, target: Target) -> Target:
        """Return the target that the method explains. Methods that do not explain the given target override this."""
        return target

    def explain_targets(self, x: Tensor, targets: Sequence[Questions]) -> list[BatchAttribution]:
        """Explain several targets. Methods that explain all of them from one forward override this."""
        return [self.explain(x, target) for target in targets]

    def read(self, inputs: ImagesLike | Batch) -> Batch:
        """Read the image or images as the model's input, on the model's device."""
        if isinstance(inputs, Batch):
            return inputs.of(self.model)
        batch = read(inputs, self.preprocess, like=reference_tensor(self.model), later=check_later)
        if batch.inputs.dim() == 5:
            require_volumes(self.model, batch.inputs)
        return batch

    def read_inputs(self, inputs: Mapping[Any, Any] | tuple[Any, ...] | Views) -> ModelInputs:
        """Read the inputs of one call of a model with several, each with its options."""
        several = ModelInputs(self.model, inputs, lambda name: self.of_input(name).read)
        self._require_inputs(several.values)
        return several

    def explanation(self, result: BatchAttribution, target: Questions, batch: Batch) -> Explanation:
        """Return a checked result as an explanation, with its notes.

        Raises:
            MethodError: The method did not return one map and one score per image.
            NonFiniteError: A value is NaN or infinite.

        Warns:
            SaliencyWarning: A map is 0 everywhere, or below the rounding error of the score.
        """
        label, asked = self.name or type(self).__name__, target.asked
        _require_maps(label, result, batch.inputs)
        if not asked:
            raise MethodError(f"{label} returned a map of a target whose score it did not compute")
        values = result.values.detach()
        evidence = {name: entry for name, entry in result.evidence.items() if entry is not None}
        probabilities = list(map(attrgetter("probability"), asked))
        if None not in probabilities:
            # The probability of a single image is not copied, which saves an operation.
            rows = probabilities[0][None] if len(asked) == 1 else torch.stack(probabilities)
            evidence["probabilities"] = rows.to(values.device)
        if isinstance(batch, Answer) and "token_shares" in evidence:
            evidence["tokens"] = batch.sequence
        explanation = Explanation(
            values,
            result.scores.detach(),
            result.layer,
            evidence,
            questions=tuple(starmap(QuestionFacts, map(_FACTS, asked))),
            frames=batch.frames,
            input_size=tuple(batch.inputs.shape[2:]),
            method=label,
            title=type(self).__name__,
            units=self.units,
            sign=self.sign,
            settings=self.settings,
        )
        # The notes follow from the explanation. Its mapping `evidence` may still change, because no caller has it yet.
        evidence["notes"] = tuple(self._notes(explanation, asked))
        return explanation

    def _notes(self, explanation: Explanation, asked: Sequence[Question]) -> Iterator[str]:
        """Yield a note on the limits of each image's map, and warn if the map shows nothing."""
        values, evidence, cells = explanation.values, explanation.evidence, explanation.values.shape[2:]
        axes = tuple(range(1, values.dim()))
        # NaN and infinity show in the minimum or maximum. Two reductions are faster than `aminmax`.
        rows = [values.amin(axes), values.amax(axes), explanation.scores]
        if self.units == "score" and "residual" in evidence and "ledger" not in evidence:
            rows += [evidence["residual"].flatten(), values.sum(axes)]
        numbers = read_back(*rows)
        if not all(map(math.isfinite, numbers[: 2 * len(asked)])):
            bad = int((~torch.isfinite(values)).sum())
            raise NonFiniteError(f"{bad} of {values.numel()} values of {explanation.method} are NaN or infinite")
        shares = explanation.image_share if "token_shares" in evidence else None
        sizes = zip(cells, explanation.input_size, strict=False)
        has_one_cell = explanation.layer and 1 in cells and any(count == 1 < pixels for count, pixels in sizes)
        for index, question in enumerate(asked):
            low, high, score, *sums = numbers[index :: len(asked)]
            name, last = question.name, getattr(question.score, "last_operation", "")
            note = f"the score is the value before the last {last} of the model" if last else ""
            if (largest := max(-low, high)) <= abs(score) * explanation.rounding:
                below = f"below the rounding error of a score of {score:.4g}"
                what = f"is at most {largest:.2g}, {below}" if largest else "is 0 everywhere"
                if is_probability(question) and not 1e-3 < score < 1 - 1e-3:
                    what += f", since the gradient of a probability vanishes near 0 and 1; {UNSATURATED}"
                with bind_image(index):  # the command line names the image
                    warn(note := f"the {explanation.method} map for {name} {what}")
            elif shares is not None and float(shares[index]) < MIN_IMAGE_SHARE:
                share = f"only {float(shares[index]):.1%} of the relevance of all tokens"
                warn(note := f"the image has {share}, so {name} comes from the text; the map shows the small rest")
            elif sums and 2 * abs(sums[0]) > abs(sum(sums)):
                note = f"the values miss {sums[0]:.2g} of an increase of the score by {sum(sums):.2g}"
            elif self.ignores_sign and question.is_difference:
                note = f"{explanation.method} gives a contrast and its opposite the same map"
            elif has_one_cell:
                grid = f"layer {explanation.layer} has a grid of {as_text(cells)}"
                note = f"{grid}, so the map shows no position along an axis of one cell; an earlier layer= may"
            yield note

    def __repr__(self) -> str:
        """Return the method, the model, the layer or layers if given, and the options."""
        read = {name: value for name in ("layer", "layers") if (value := getattr(self, name, None))}
        options = "".join(f", {name}={value!r}" for name, value in (read | dict(self.settings)).items())
        return f"{type(self).__name__}({type(self.model).__name__}{options})"


def _refuse_call(method: object, call: str) -> NoReturn:
    """Raise TypeError: a call lacks an argument, or is on a class, with its first argument as the method."""
    if isinstance(method, Attribution):
        raise TypeError(f"an argument is missing: {type(method).__name__}(model).{call}")
    raise TypeError(f"{call} belongs to a method of a model: GradCAM(model).{call}")


def _image_hint(image: object, target: object) -> str:
    """Return the cure if swapped arguments, or several images, came as the image; else an empty text."""
    is_file = isinstance(target, str | os.PathLike) and Path(target).is_file()
    if is_file or isinstance(target, Image.Image) or getattr(target, "ndim", 0) > 2:
        return "the target comes second: attribute(image, target)"
    parts = image if isinstance(image, list | tuple) else ()
    channels = {part.shape[-3] if getattr(part, "ndim", 0) > 2 else 0 for part in parts}
    if 0 not in channels and len(channels) > 1:
        return 'for inputs of one call, name them, {"rgb": image, "depth": depth}; of a tuple, by number, {0: a, 1: b}'
    if isinstance(image, DataLoader):
        return "explain each batch: for images, labels in loader: method.attribute(images, labels)"
    if isinstance(image, str) and {*"*?"} & {*image}:
        return f"explain each file: for path in glob.glob({image!r}): method.attribute(path)"
    if isinstance(image, Iterator):
        return "explain each image: for image in images: method.attribute(image)"
    if isinstance(image, str | os.PathLike) and Path(image).is_dir():
        return 'explain a folder by saliency.batch(folder, "maps")'
    return ""


def _whole(like: Any, whole: Whole) -> Any:
    """Return a preprocessing without its crop, if the model sees the whole image."""
    return without_crop(like, whole) if check_choice("whole", whole, WHOLE) else like


def _called(like: Any) -> Any:
    """Return a preprocessing. Raises MethodError for a class, or torchvision's `weights.transforms`: call them."""
    inner = getattr(like, "transform", like)
    maker = inner.func if isinstance(inner, partial) else inner
    if isinstance(maker, type):
        raise MethodError(f"preprocess is the class {maker.__name__}; call it, as in weights.transforms()")
    return like


def _require_values(method: Attribution, images: int) -> None:
    """Raise MethodError if an option of a method, or of the method that it wraps, has values for other images."""
    for name, value in vars(method).items():
        if isinstance(value, Attribution):
            _require_values(value, images)
        elif isinstance(value, PerImage) and len(value) != images:
            raise MethodError(f"{name} has {len(value)} values for {plural(images, 'image')}")


def _require_maps(name: str, result: Any, x: Tensor) -> None:
    """Raise MethodError unless a method returned one map (C, H, W), one score and one row of evidence per image."""
    images = len(x)
    expected = (
        "saliency.extending.BatchAttribution(values, scores) with values (N, C, H, W) or (N, 1, h, w) and scores (N,)"
    )
    if not isinstance(result, BatchAttribution):
        raise MethodError(f"{name} returned {type(result).__name__}; expected {expected}")
    shapes = tuple(getattr(result.values, "shape", ())), tuple(getattr(result.scores, "shape", ()))
    if len(shapes[0]) != x.dim() or shapes[0][0] != images or shapes[1] != (images,):
        got = f"values {shapes[0]} and scores {shapes[1]} for {plural(images, 'image')}"
        raise MethodError(f"{name} returned {got}; expected {expected}")
    for part, rows in result.evidence.items():
        if isinstance(rows, Tensor) and rows.shape[:1] != (images,):
            got = f"{part} {tuple(rows.shape)} for {plural(images, 'image')}"
            raise MethodError(f"{name} returned {got}; expected one row for each")


class TracedAttribution(Attribution):
    """Base class of methods that read one forward, which several methods and targets can share.

    A subclass declares its `needs` of the forward, and reads them in `explain_gradients`.
    """

    def needs_for(self, x: Tensor, target: Questions) -> Needs:
        """Return the needs for the forward of a batch. Override this if they depend on options or layers."""
        return self.needs

    @abstractmethod
    def explain_gradients(self, grads: TargetGradients, layers: tuple[str, ...]) -> BatchAttribution:
        """Return the result for one target, from the gradients of one forward.

        Args:
            grads: The scores, activations and gradients.
            layers: The layers that the method needs.
        """

    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        """Explain one target."""
        return self.explain_targets(x, [target])[0]

    def explain_targets(
        self, x: Tensor, targets: Sequence[Questions], others: Sequence[TracedAttribution] = ()
    ) -> list[BatchAttribution]:
        """Explain several targets from one forward, which other methods of the model may share.

        Returns:
            For each target, the result of this method, and then the results of the others.
        """
        if len(x) > 1 and has_batch_statistics(self.model):
            warn_of_coupled_images()
        methods, needs, results = (self, *others), list[list[Needs]](), list[BatchAttribution]()
        for target in targets:
            needs.append([method.needs_for(x, target) for method in methods])
        together = reduce(or_, needs[0])
        if len(targets) > 1:  # each may read other layers
            layers = dict.fromkeys(layer for method_needs in needs for need in method_needs for layer in need.layers)
            together = replace(together, layers=tuple(layers))
        forward = SharedForward(self.model, x, together, len(targets))
        for target, method_needs in zip(targets, needs, strict=True):
            grads = TargetGradients(forward, target)
            # Methods compute in full precision, even under the caller's autocast.
            with torch.autocast(x.device.type, enabled=False):
                for method, need in zip(methods, method_needs, strict=True):
                    results.append(method.explain_gradients(grads, need.layers))
            grads.computed.clear()  # otherwise a reference cycle keeps the graph in memory for a while
        return results


def get_method(name: object) -> type[Attribution]:
    """Return the method with this name. Raises MethodError for another name, with the closest names."""
    return METHODS.find(name)


def summary(cls: type) -> str:
    """Return the first paragraph of the docstring of a method or metric."""
    return (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ")


def source(cls: type) -> str:
    """Return the paper that the docstring of a method or metric cites, with its URL."""
    match = re.search(r"Source: (.*?)(?:\n\n|\Z)", inspect.getdoc(cls) or "", re.DOTALL)
    return " ".join(match[1].split()) if match else ""


class Together:
    """Methods of the same model that explain the same image and target, from one forward where possible.

    All CAMs of one layer share one forward and one backward; the gradient methods share the forward. The values equal
    the values of separate calls.

    Args:
        methods: Methods of the same model.

    Raises:
        MethodError: There is no method, or the methods differ in model, preprocessing, class names or layout.
    """

    def __init__(self, *methods: Attribution) -> None:
        require_methods(methods, "Together(GradCAM(model), LayerCAM(model))")
        first = methods[0]
        expected = (first.model, first.preprocess, first.categories, first.layout)
        if any((method.model, method.preprocess, method.categories, method.layout) != expected for method in methods):
            raise MethodError("Together: the methods must have the same model, preprocessing, class names and layout")
        self.methods = methods

    def attribute(
        self, inputs: ImagesLike | Batch, target: TargetLike = None, *, forward_args: ForwardArgs = ()
    ) -> list[Explanation]:
        """Return one explanation per method, in their order. Arguments and errors as for `Attribution.attribute`."""
        methods = [inputs.method(method) for method in self.methods] if isinstance(inputs, InputBatch) else self.methods
        with methods[0].call(inputs, [target], forward_args) as batch:
            for method in methods[1:]:
                _require_values(method, len(batch.inputs))
            results = each_alone(batch, [target], partial(_explain_by_all, methods))
            return list(map(joined, zip(*results, strict=True)))


def _explain_by_all(methods: Sequence[Attribution], batch: Batch, targets: Sequence[Any]) -> list[Explanation]:
    """Explain a batch and one target by several methods on a prepared model."""
    images = methods[0].images(batch.inputs, batch.frames)
    target = target_of(targets[0], images)
    explained, common = [(method, method.explained_target(target)) for method in methods], Questions(target, images)
    pairs = [(method, common if other is target else Questions(other, images)) for method, other in explained]
    traced = [
        method
        for method, asked in pairs
        if isinstance(method, TracedAttribution) and not method.is_compiled and asked is common
    ]
    shared = iter(traced[0].explain_targets(batch.inputs, [common], traced[1:]) if traced else [])
    results = [next(shared) if method in traced else method.explain(batch.inputs, asked) for method, asked in pairs]
    return [method.explanation(result, asked, batch) for result, (method, asked) in zip(results, pairs, strict=True)]


def neuron_layer(model: nn.Module, targets: Sequence[TargetLike]) -> str:
    """Return the name of the one layer that contains all targets, which are neurons.

    Raises:
        LayerError: There is no such layer.
        TargetError: A target is not a neuron, or the neurons belong to several layers.
    """
    layers = {find(model, target.layer)[0] for target in targets if isinstance(target, Neuron)}
    if len(layers) > 1 or not all(isinstance(target, Neuron) for target in targets):
        raise TargetError("all targets of one call must be neurons of one layer, or none")
    return layers.pop()


def require_methods(methods: Sequence[Attribution], example: str) -> None:
    """Raise MethodError, with an example of a method, unless these are methods."""
    is_list = isinstance(methods, list | tuple) and bool(methods)
    if not is_list or not all(isinstance(method, Attribution) for method in methods):
        raise MethodError(f"expected methods, such as {example}")


def as_setting(setting: Any) -> Setting:
    """Convert an option to a value that JSON can hold."""
    if isinstance(setting, np.generic | np.ndarray | Tensor):
        setting = setting.tolist()
    if isinstance(setting, tuple | list):
        return [as_setting(value) for value in setting]
    if isinstance(setting, Mapping):
        return {name: as_setting(value) for name, value in setting.items()}
    if setting is None or isinstance(setting, str | int | float | bool):
        return setting
    return str(getattr(setting, "name", "") or getattr(setting, "__name__", "") or type(setting).__name__)
