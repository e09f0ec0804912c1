"""The one interface of all methods, and their registry.

`attribute` reads the images, settles the target, borrows the model and checks the result: once, here. A method writes
`explain`, and nothing else.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, ClassVar, NamedTuple, get_args, get_type_hints

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import MethodError, NonFiniteError
from ..hooks.model_state import (
    is_categories,
    is_preprocess,
    model_attribute,
    prepared_for_attribution,
    reference_tensor,
    unwrap,
)
from ..hooks.rectifiers import Coverage
from ..io.inputs import Batch, ImagesLike, read
from ..io.preprocess import PreprocessLike, as_preprocess
from ..targets.class_names import as_categories
from ..targets.targets import TargetLike
from .explanation import Explanation, Setting, Sign
from .forward import SharedForward, TargetGradients
from .options import RunStats
from .output_rows import has_batch_statistics, warn_of_coupling
from .resolved_target import ResolvedTarget

METHODS: dict[str, type[Attribution]] = {}
"""Every method by its name. Classes enter by themselves when they are defined."""


class BatchAttribution(NamedTuple):
    """What a method found on a batch, for one target."""

    values: Tensor  # (N, C, H, W) at the input or (N, 1, h, w) at a layer
    scores: Tensor  # (N,)
    coverage: Coverage | None = None
    layer: str | None = None
    residual: Tensor | None = None
    error: Tensor | None = None  # as the values
    agreement: Tensor | None = None  # (N,)
    effort: tuple[RunStats, ...] = ()


class Attribution(ABC):
    """A method that gives every pixel its part in a score.

    A subclass with a `name` enters the registry, and with it the command line, the tables and the tests.

    Args:
        model: Any `torch.nn.Module`. It is left bit for bit as it was.
        preprocess: How a picture becomes the model's input: a `Preprocess`, a torchvision preset, timm's pretrained
            configuration, or any function from picture to tensor. By default `model.preprocess`.
        categories: The class names in the order of the output. By default `model.categories`.
    """

    name: ClassVar[str] = ""
    cost: ClassVar[str] = ""
    """What one call takes, in passes of the model."""
    sign: ClassVar[Sign] = "signed"
    """How the method's authors read the values."""
    units: ClassVar[str] = "score"
    """The units of the values. Those in units of the score are drawn as zero below its rounding error."""
    is_complete: ClassVar[bool] = True
    """Whether values and residual, where there is one, make up the score less something that is the same for every
    image: a baseline's score, or nothing."""
    quick_options: ClassVar[Mapping[str, Any]] = {}
    """Options under which one call is quick, where the defaults take many passes: for tests, and for a first look."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        name = cls.__dict__.get("name", "")
        if not name:
            return
        known = METHODS.get(name)
        # A notebook cell that is run again defines the same class once more.
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(f'{cls.__qualname__}: the name "{name}" belongs to {known.__module__}.{known.__qualname__}')
        METHODS[name] = cls

    def __init__(
        self,
        model: nn.Module,
        *,
        preprocess: PreprocessLike | None = None,
        categories: Sequence[str] | None = None,
    ) -> None:
        self.model = unwrap(model)
        # What stands on a wrapper counts as on the model within.
        if preprocess is None:
            preprocess = model_attribute("preprocess", is_preprocess, model)
        self.preprocess = None if preprocess is None else as_preprocess(preprocess)
        if categories is None:
            categories = model_attribute("categories", is_categories, model)
        self.categories = None if categories is None else as_categories(categories)

    @property
    def settings(self) -> Mapping[str, Setting]:
        """The options of this method: the arguments of its constructor that are not about the model."""
        return {name: _plain(getattr(self, name)) for name in type(self).options()}

    @classmethod
    @cache
    def options(cls) -> list[str]:
        """The names of the options, in the order of the constructor."""
        about_the_model = ("self", "model", "layer", "layers", "preprocess", "categories")
        return [name for name in cls.parameters() if name not in about_the_model]

    @classmethod
    @cache
    def parameters(cls) -> list[str]:
        """The names of the constructor's parameters.

        Typed keywords (`**running: Unpack[Running]`) stand one by one; others are taken to go on to the base class.
        """
        found: list[str] = []
        for name, parameter in inspect.signature(cls.__init__).parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                found += cls._keywords(name)
            elif parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
                found.append(name)
        return list(dict.fromkeys(found))

    @classmethod
    def _keywords(cls, name: str) -> list[str]:
        """What may be given as `**name` to the constructor."""
        with suppress(NameError):  # a name in some annotation that is known to type checkers only
            typed = get_args(inspect.signature(cls.__init__, eval_str=True).parameters[name].annotation)
            if typed:
                return list(get_type_hints(typed[0]))
        makers = [each for each in cls.__mro__ if "__init__" in vars(each)]
        handed_on = next((each for each in makers[1:] if issubclass(each, Attribution)), None)
        return [] if handed_on is None else handed_on.parameters()

    def attribute(self, image: ImagesLike, target: TargetLike = None) -> Explanation:
        """Explain one image or several.

        Args:
            image: A path, PIL picture, uint8 array (H, W, 3), or a list of these; or the model's own normalised input
                as a float tensor (C, H, W) or (N, C, H, W).
            target: A class index or name, one of them per image, a function of the model's output, or None for the
                top class of each image.

        Raises:
            ImageError: The image cannot be read or is not what the model takes.
            TargetError: The target does not fit the model's output.
            LayerError: The layer does not exist, is not run, or has no spatial output.
            NotApplicableError: The method says nothing about this model.
            NonFiniteError: NaN or infinity in the input, the score or the values.

        Warns:
            SaliencyWarning: A float tensor looks like a picture that was not normalised.
        """
        return self.attribute_classes(image, [target])[0]

    def attribute_classes(self, image: ImagesLike, targets: Sequence[TargetLike]) -> list[Explanation]:
        """One explanation for each of several targets of the same image or images, where possible from one forward.

        Args:
            image: As for `attribute`.
            targets: Several targets, each as for `attribute`.
        """
        if isinstance(targets, str) or not isinstance(targets, list | tuple) or not targets:
            raise MethodError(f"expected a list of targets, got {targets!r}; for a single one use attribute")
        batch = self.read(image)
        selections = [
            self.explained_target(ResolvedTarget(target, len(batch.tensor), self.categories)) for target in targets
        ]
        with prepared_for_attribution(self.model):
            findings = self.explain_each(batch.tensor, selections)
        return [self.explanation(*pair, batch) for pair in zip(findings, selections, strict=True)]

    @abstractmethod
    def explain(self, x: Tensor, target: ResolvedTarget) -> BatchAttribution:
        """The values and scores of a batch: the only thing a method writes.

        The model is in evaluation mode, gradients are enabled, and `target(output)` gives the scores.

        Args:
            x: (N, C, H, W) the model's input. Not to be changed.
            target: The function from the model's output to scores (N,).
        """

    def explained_target(self, target: ResolvedTarget) -> ResolvedTarget:
        """Return the target that the method explains: the given one, unless its authors explain another."""
        return target

    def explain_each(self, x: Tensor, targets: Sequence[ResolvedTarget]) -> list[BatchAttribution]:
        """The findings for several targets; methods that can share a forward among them do it here."""
        return [self.explain(x, target) for target in targets]

    def read(self, image: ImagesLike) -> Batch:
        """The image or images as the model's input, on the model's device."""
        return read(image, self.preprocess, like=reference_tensor(self.model))

    def explanation(self, finding: BatchAttribution, selection: ResolvedTarget, batch: Batch) -> Explanation:
        """A finding, checked, with what is needed to read it. Raises NonFiniteError for NaN and infinity."""
        values = finding.values.detach()
        # The sum is finite unless a value is not, or unless it overflows: then a closer look decides.
        if not math.isfinite(float(values.sum())) and not torch.isfinite(values).all():
            bad = int((~torch.isfinite(values)).sum())
            raise NonFiniteError(f"{self.name} gave {bad} values that are NaN or infinite, of {values.numel()}")
        return Explanation(
            values=values,
            scores=finding.scores.detach(),
            method=self.name or type(self).__name__,
            settings=self.settings,
            target=selection.indices,
            target_names=selection.names,
            probabilities=selection.probabilities,
            layer=finding.layer,
            input_size=(int(batch.tensor.shape[-2]), int(batch.tensor.shape[-1])),
            frames=batch.frames,
            sign=self.sign,
            coverage=finding.coverage,
            residual=finding.residual,
            error=finding.error,
            agreement=finding.agreement,
            effort=finding.effort,
        )

    def __repr__(self) -> str:
        """The method, the model and the options."""
        options = "".join(f", {name}={each!r}" for name, each in self.settings.items())
        return f"{type(self).__name__}({type(self.model).__name__}{options})"


class TracedAttribution(Attribution):
    """A method that reads one forward: any number of them, and of targets, share it.

    A subclass says what it needs in `gradients` and `layers`, and reads it in `read_evidence`.
    """

    gradients: ClassVar[str] = "input"
    """How far back gradients are needed: to the "input", to the "layers" only, or "none"."""
    backwards: ClassVar[int | None] = None
    """How many backward passes the method asks for, at most; None where it does not say."""

    def layers(self, x: Tensor, target: ResolvedTarget) -> tuple[str, ...]:
        """The names of the layers that the method reads on a batch, for a target; none by default."""
        return ()

    @abstractmethod
    def read_evidence(self, evidence: TargetGradients, layers: tuple[str, ...]) -> BatchAttribution:
        """The finding, from what one forward says of one target."""

    def explain(self, x: Tensor, target: ResolvedTarget) -> BatchAttribution:
        """One forward, read for one target."""
        return self.explain_each(x, [target])[0]

    def explain_each(self, x: Tensor, targets: Sequence[ResolvedTarget]) -> list[BatchAttribution]:
        """One forward, read for each target."""
        return [findings[0] for findings in read_one_forward([self], x, targets)]


def read_one_forward(
    methods: Sequence[TracedAttribution], x: Tensor, targets: Sequence[ResolvedTarget]
) -> list[list[BatchAttribution]]:
    """What several methods find in one forward, for each of several targets."""
    if len(x) > 1 and has_batch_statistics(methods[0].model):
        warn_of_coupling()
    layers = [method.layers(x, targets[0]) for method in methods]
    depths = {method.gradients for method in methods}
    deepest = next(depth for depth in ("input", "layers", "none") if depth in depths)
    backwards = [method.backwards for method in methods]
    most = None if None in backwards else len(targets) * sum(each for each in backwards if each is not None)
    trace = SharedForward(methods[0].model, x, (name for names in layers for name in names), deepest, most)
    findings = []
    for target in targets:
        evidence = trace.evidence(target)
        # The methods' own arithmetic is not the model's: it keeps its precision under the caller's autocast.
        with torch.autocast(x.device.type, enabled=False):
            findings.append([m.read_evidence(evidence, names) for m, names in zip(methods, layers, strict=True)])
    return findings


def explain_together(methods: Sequence[Attribution], image: ImagesLike, target: TargetLike = None) -> list[Explanation]:
    """What several methods say of the same image and target, from one forward wherever that is enough.

    All CAMs of one layer share one forward and one backward; the gradient methods share the forward. The values are
    those of separate calls.

    Args:
        methods: Methods on one and the same model.
        image: As for `Attribution.attribute`; read once.
        target: As for `Attribution.attribute`.

    Returns:
        One explanation per method, in their order.

    Raises:
        MethodError: There is no method, or they differ in model, preprocessing or class names.
    """
    methods = list(methods) if isinstance(methods, list | tuple) else []
    if not methods or not all(isinstance(method, Attribution) for method in methods):
        raise MethodError("explain_together takes a list of methods first, as in [GradCAM(model), LayerCAM(model)]")
    first = methods[0]
    if any(method.model is not first.model for method in methods):
        raise MethodError("explain_together takes methods on one and the same model")
    if any((each.preprocess, each.categories) != (first.preprocess, first.categories) for each in methods):
        raise MethodError("explain_together takes methods with the same preprocessing and the same class names")
    batch = first.read(image)
    selection = ResolvedTarget(target, len(batch.tensor), first.categories)
    selections = [method.explained_target(selection) for method in methods]
    pairs = list(zip(methods, selections, strict=True))
    traced = [method for method, own in pairs if isinstance(method, TracedAttribution) and own is selection]
    with prepared_for_attribution(first.model):
        shared = read_one_forward(traced, batch.tensor, [selection])[0] if traced else []
        found = dict(zip(map(id, traced), shared, strict=True))
        findings = [found[id(m)] if id(m) in found else m.explain(batch.tensor, own) for m, own in pairs]
    return [m.explanation(finding, own, batch) for finding, (m, own) in zip(findings, pairs, strict=True)]


def _plain(setting: Any) -> Setting:
    """An option as a value that JSON can hold."""
    if isinstance(setting, np.generic | np.ndarray | Tensor):
        setting = setting.tolist()
    if isinstance(setting, tuple | list):
        return [_plain(each) for each in setting]
    if setting is None or isinstance(setting, str | int | float | bool):
        return setting
    return str(getattr(setting, "name", "") or getattr(setting, "__name__", "") or type(setting).__name__)
