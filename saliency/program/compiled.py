"""Compiled calls of a method: its program with frozen weights, in place of the model in Python."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attribution.base import Attribution
from ..attribution.explanation import BatchAttribution, heatmap
from ..attribution.passes import MultiPassAttribution
from ..attribution.questions import Questions
from ..errors import NonFiniteError, warn
from ..hooks.autograd_graph import frozen, module_tensors, modules_and_hooks, tensor_version
from ..methods.gradient import VanillaGradient
from ..model.call import bound, current_call, modules_of, run_model
from ..model.inputs import Key
from ..targets.classes import ClassScore, ClassTarget
from .export import INPUT, require_close, traced


def compiled(method: Attribution, mode: str | None) -> Attribution:
    """Return a method whose passes are compiled; see `Attribution.compile`."""
    cls, result = type(method), copy.copy(method)
    for name, inner in vars(method).items():
        if isinstance(inner, Attribution):
            vars(result)[name] = compiled(inner, mode)
    of_model = {name: getattr(method, name) for name in ("preprocess", "categories", "layout")}
    is_many = isinstance(method, MultiPassAttribution)
    parts = [kind(method.model, **of_model) for kind in (Scores, VanillaGradient)]
    passes = [Programs(part, method.name, mode) for part in parts]
    programs = passes if is_many else [Programs(method, method.name, mode)]
    passes[0].reasons = programs[0].reasons  # warned of once
    kind = type(cls.__name__, (CompiledAttribution, cls), {"__module__": cls.__module__, "__doc__": None})
    compiled_method: Attribution = copy.copy(result)
    compiled_method.__class__ = kind
    vars(compiled_method).update(compiled=(result, programs), passes_of_model=[part.explain for part in passes])
    return compiled_method


class CompiledAttribution(Attribution):
    """Base of compiled methods. Calls that cannot be compiled run the method itself."""

    is_compiled = True
    compiled: tuple[Attribution, Sequence[Programs]]
    passes_of_model: Sequence[Callable[..., Any]]

    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        """Explain one target."""
        return self.explain_targets(x, [target])[0]

    def explain_targets(self, x: Tensor, targets: Sequence[Questions]) -> list[BatchAttribution]:
        """Explain several targets by the program; of a method of many passes, by programs of its passes."""
        method, programs = self.compiled
        if isinstance(method, MultiPassAttribution):
            with bound(compiled=self.passes_of_model):
                return method.explain_targets(x, targets)
        results = [programs[0].explain(x, target) for target in targets]
        found = [result for result in results if result is not None]
        return found if len(found) == len(targets) else method.explain_targets(x, targets)

    def obstacle(self) -> str:
        """Return why no call has been compiled so far; empty if one has been."""
        _, programs = self.compiled
        return "" if any(program.is_used for program in programs) else next(iter(programs[0].reasons), "")

    def __deepcopy__(self, memo: dict[int, Any]) -> Attribution:
        """Return a copy of the method itself, because changes of the copied model would compile again each time."""
        return copy.deepcopy(self.compiled[0], memo)

    def of_input(self, name: Key) -> Any:
        """Return the method itself for one of several inputs, which a program does not take."""
        return self.compiled[0].of_input(name)


class Scores(Attribution):
    """The scores of an image as values (N, 1, 1, 1): the passes of methods that read no gradients."""

    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        """Compute the scores."""
        scores = target(run_model(self.model, x))
        return BatchAttribution(scores.reshape(-1, *[1] * (x.dim() - 1)), scores)


class CompiledProgram(NamedTuple):
    """A compiled program: its function of images and classes, the layer of its values, and the number of classes."""

    run: Callable[..., Sequence[Tensor]]
    layer: str | None
    classes: int


class Programs:
    """The compiled programs of a method, by shape, type and device of the images, as long as the model is unchanged.

    There is one program for single images, whose batch size is a constant, and one for any batch size.

    Args:
        method: The method.
        name: The name of the method that the caller compiled.
        mode: The mode of `torch.compile`.

    Attributes:
        reasons: Why calls were not compiled.
        is_used: Whether a program has run.
    """

    def __init__(self, method: Attribution, name: str, mode: str | None) -> None:
        self._method, self._name, self._mode = method, name, mode
        self._programs: dict[Any, CompiledProgram | str] = {}
        self._state: list[int] = []
        self._tensors: list[Tensor] = []
        self.reasons, self.is_used = set[str](), False

    def explain(self, x: Tensor, target: Questions) -> BatchAttribution | None:
        """Return the result of a program; None if there is no program, with a warning for each reason."""
        call, classes = current_call(), _classes(target, isinstance(self._method, Scores))
        found: CompiledProgram | str
        if call.is_tracing or not (call.compiles or self._programs):  # the run did not ask for these passes before
            return None
        if classes is None:
            found = "the target is not a class"
        elif call.batch is not None:
            found = "the model has other arguments than the image"
        elif torch.is_autocast_enabled(x.device.type):
            found = "the call is in autocast; convert the model instead"
        else:
            found = self._find(x.detach().contiguous())
        if isinstance(found, str) or classes is None:
            if found not in self.reasons:
                self.reasons.add(str(found))
                warn(f"{self._name}: this call is not compiled: {found}")
            return None
        index = torch.tensor(classes, device=x.device).clamp(max=found.classes - 1)  # the target refuses other classes
        self.is_used = True
        with torch.no_grad():
            scores, _, values = found.run(x.detach().contiguous(), index)
        if self._mode:  # CUDA graphs write the next results into the same memory
            scores, values = scores.clone(), values.clone()
        return BatchAttribution(values, target(scores), found.layer)

    def _find(self, x: Tensor) -> CompiledProgram | str:
        """Return the program for images, or why there is none. The first images of a shape are compiled for."""
        if compiles := current_call().compiles:
            model = self._method.model
            tensors = module_tensors(modules_of(model))
            state = [*modules_and_hooks(model), *map(id, tensors), *map(tensor_version, tensors)]
            if state != self._state:
                self._programs.clear()
                self._state, self._tensors = state, tensors  # kept, so that no id is used again
        key, is_single = (x.shape[1:], x.dtype, x.device), len(x) == 1
        for cached in (False, True)[: 1 + is_single]:
            if (key, cached) in self._programs:
                return self._programs[key, cached]
        if not compiles:
            return "its images differ in size or number from those that were compiled for"
        with warnings.catch_warnings(action="ignore"):
            found = self._programs[key, is_single] = self._compile(x[:1] if is_single else x[:2])
        return found

    def _compile(self, x: Tensor) -> CompiledProgram | str:
        """Return the program for images like these, or the reason why there is none."""
        try:
            program, explanation, inputs = traced(self._method, x, INPUT, is_frozen=True)
            graph = program.module()
            symbols = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
            with torch.no_grad():
                run = frozen(graph, inputs if len(x) == 1 else symbols, self._mode)
                scores, _, values = run(*inputs)
            maps = heatmap(replace(explanation, values=values))
            require_close(self._method, explanation, x, [maps], "the compiled program")
        except NonFiniteError:  # of this image
            raise
        except Exception as error:  # noqa: BLE001 - the compiler of PyTorch raises many types
            reason = str(error).strip().partition("\n")[0].rpartition("cannot be a program: ")[2]
            is_missing = "No working C++ compiler" in str(error)
            return "there is no C++ compiler, such as g++ or clang++" if is_missing else reason or type(error).__name__
        images = self._method.images(x)
        return CompiledProgram(run, explanation.layer, images.class_count(scores.shape[1]))


def _classes(target: Questions, are_scores: bool) -> list[int] | None:
    """Return the class that is asked for each image, -1 for the top class; None for other targets.

    A program of scores takes the probability of a class too, which is computed from its scores of all classes.
    """
    if type(target) is not Questions:  # several targets of one output
        return None
    if target.asked:
        scores: list[Any] = [question.score for question in target.asked]
        scores = [getattr(score, "__self__", score) for score in scores] if are_scores else scores
        classes = [score.classes[0] for score in scores if isinstance(score, ClassScore)]
        return classes if len(classes) == len(scores) else None
    return [-1 if c is None else c for c in target.target.classes] if isinstance(target.target, ClassTarget) else None
