"""The checks accept a correct method, and name the promise that another one breaks."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import saliency
from saliency import METHODS, Attribution, GradCAM
from saliency.attribution.base import get_method, source, summary
from saliency.attribution.explanation import BatchAttribution
from saliency.attribution.questions import Questions
from saliency.errors import NotApplicableError, TargetError
from saliency.methods.cam import WeightedCAM
from saliency.metrics import Metric, Outcome
from saliency.model.call import leaf, run_model
from saliency.targets.classes import ClassTarget
from saliency.testing import check_method, checks, images, tiny_model

pytestmark = pytest.mark.usefixtures("_registry_restored")


def test_a_check_for_every_way_that_a_call_can_end() -> None:
    endings = ["a_call", "a_bad_target", "an_error_in_the_target", "a_bad_shape", "an_interrupt", "a_late_interrupt"]
    names = [name for name, _ in checks(saliency.VanillaGradient)]
    assert {f"untouched_after_{ending}" for ending in endings} <= set(names)
    assert "untouched_after_a_layer_that_is_never_called" in dict(checks(GradCAM))
    assert len(names) == len(set(names))


# A method by a stranger.


class Honest(Attribution):
    """The plain gradient, as a stranger might write it.

    Values: (N, C, H, W), signed, in score units per unit of the input.

    Raises:
        TargetError: The target does not fit the model's output.

    Source: Somebody, "A gradient" (2024), https://example.org.

    """

    cost = "1 forward, 1 backward"

    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        values, scores = self.gradient(x, target)
        return BatchAttribution(values, scores)

    def gradient(self, x: Tensor, target: Questions) -> tuple[Tensor, Tensor]:
        x = leaf(x)
        scores = target(run_model(self.model, x))
        if not scores.requires_grad:
            raise TargetError("the score has no gradient")
        (values,) = torch.autograd.grad(scores.sum(), x)
        return values, scores


def named(cls: type[Attribution], **namespace: Any) -> type[Attribution]:
    """A class of the same documentation with a name, which puts it into METHODS."""
    return type(cls.__name__, (cls,), {"name": "strangers", "__doc__": cls.__doc__ or Honest.__doc__} | namespace)


def test_a_method_by_a_stranger_passes_and_enters_the_registry() -> None:
    class SquaredCAM(WeightedCAM):
        """Activations weighted by the mean squared gradient of their channel.

        Values: (N, 1, h, w), in squared score units.

        Raises:
            LayerError: The layer does not exist, is not run, or has no extent in space.

        Source: A stranger, "Squares" (2024), https://example.org.
        """

        name = "squared_cam"

        def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
            return gradient.square().mean((2, 3))

    assert METHODS["squared_cam"] is get_method("squared_cam") is SquaredCAM
    check_method(SquaredCAM)
    dict(checks(SquaredCAM, layer="last"))["result"]()
    assert summary(SquaredCAM).startswith("Activations weighted by the mean squared")
    assert source(SquaredCAM) == 'A stranger, "Squares" (2024), https://example.org.'


def test_an_honest_method_written_from_nothing_passes() -> None:
    check_method(named(Honest))


# Methods that break a promise, each with the checks that find out.


class LeavesAHook(Honest):
    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        next(self.model.children()).register_forward_hook(lambda module, inputs, output: None)
        return super().explain(x, target)


class LeavesAHookAfterAnError(Honest):
    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        handle = self.model.register_forward_hook(lambda module, inputs, output: None)
        finding = super().explain(x, target)
        handle.remove()
        return finding


class MovesTorchsRandomState(Honest):
    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        torch.rand(1)
        return super().explain(x, target)


class MovesNumPysRandomState(Honest):
    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        np.random.rand()  # noqa: NPY002
        return super().explain(x, target)


class MovesPythonsRandomState(Honest):
    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        random.random()  # noqa: S311
        return super().explain(x, target)


class SetsTheSeed(Honest):
    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        torch.manual_seed(0)
        return super().explain(x, target)


class IsNoisy(Honest):
    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        return super().explain(x + 0.1 * torch.randn(x.shape, dtype=x.dtype), target)


class ChangesATrainingFlag(Honest):
    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        finding = super().explain(x, target)
        self.model.get_submodule("drop").train()
        return finding


class RunsInTrainingMode(Honest):
    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        self.model.train()
        finding = super().explain(x, target)
        self.model.eval()
        return finding


class FillsGradients(Honest):
    def gradient(self, x: Tensor, target: Questions) -> tuple[Tensor, Tensor]:
        x = leaf(x)
        scores = target(run_model(self.model, x))
        torch.autograd.backward(scores.sum())
        assert x.grad is not None
        return x.grad, scores


class FreezesParameters(Honest):
    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        self.model.requires_grad_(False)
        return super().explain(x, target)


class WritesParametersAnew(Honest):
    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        finding = super().explain(x, target)
        for module in self.model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
        return finding


class WritesIntoTheInput(Honest):
    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        x.mul_(1)
        return super().explain(x, target)


class ChangesItself(Honest):
    def gradient(self, x: Tensor, target: Questions) -> tuple[Tensor, Tensor]:
        self.seen: Tensor = x
        return super().gradient(x, target)


class ChangesTheDefaultType(Honest):
    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        torch.set_default_dtype(torch.float64)
        return super().explain(x, target)


class SwallowsErrors(Honest):
    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        try:
            return super().explain(x, target)
        except Exception:  # noqa: BLE001
            return BatchAttribution(torch.zeros_like(x), torch.zeros(len(x)))


class SwallowsInterrupts(Honest):
    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        try:
            return super().explain(x, target)
        except KeyboardInterrupt:
            return BatchAttribution(torch.zeros_like(x), torch.zeros(len(x)))


class MixesTheBatch(Honest):
    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        values, scores = self.gradient(x, target)
        return BatchAttribution(values / values.abs().max(), scores)


class CountsTheImages(Honest):
    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        values, scores = self.gradient(x, target)
        return BatchAttribution(values + torch.arange(len(x))[:, None, None, None], scores)


class ReturnsNaN(Honest):
    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        values, scores = self.gradient(x, target)
        return BatchAttribution(values.log(), scores)


class NeverReturnsZero(Honest):
    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        values, scores = self.gradient(x, target)
        return BatchAttribution(values + 1e-3 * scores[:, None, None, None].exp().detach(), scores)


class Transposes(Honest):
    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        values, scores = self.gradient(x, target)
        return BatchAttribution(values.transpose(2, 3), scores)


class FailsOnSmallInput(Honest):
    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        values, scores = self.gradient(x, target)
        return BatchAttribution(nn.functional.avg_pool2d(values, 3, 1), scores)


class NeedsNoise(Honest):
    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        if float(x.std()) == 0:
            raise ZeroDivisionError
        return super().explain(x, target)


class KeepsTheGraph(Honest):
    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        values, scores = self.gradient(x, target)
        return BatchAttribution(values.requires_grad_(), scores)


class Collects(Honest):
    kept: ClassVar[list[Any]] = []

    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        self.kept.append((self.model, x))
        return super().explain(x, target)


class ReportsAnotherScore(Honest):
    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        values, scores = self.gradient(x, target)
        return BatchAttribution(values, scores.exp())


class PretendsToBeComplete(Honest):
    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        values, scores = self.gradient(x, target)
        return BatchAttribution(values, scores, evidence={"residual": torch.zeros_like(scores)})


class HidesAResidual(Honest):
    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        values, scores = self.gradient(x, target)
        return BatchAttribution(values, scores, evidence={"residual": torch.zeros(len(x), 1)})


class KeepsAFalseLedger(Honest):
    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        values, scores = self.gradient(x, target)
        ledger = torch.stack([scores / 2, scores / 3], 1)
        shares = {"ledger": ledger, "ledger_names": ("input", "biases"), "residual": torch.zeros_like(scores)}
        return BatchAttribution(values, scores, evidence=shares)


class ReadsTheTensorItself(Honest):
    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        x = leaf(x)
        scores = target(run_model(self.model, x) * 1)
        (values,) = torch.autograd.grad(scores.sum(), x)
        return BatchAttribution(values, scores)


class NeedsFreeParameters(Honest):
    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        scores = target(run_model(self.model, x))
        torch.autograd.grad(scores.sum(), self.model.get_parameter("head.weight"))
        return super().explain(x, target)


class PicksTheLowestClass(Honest):
    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        if target.target == ClassTarget((None,) * len(x)):
            target.target = ClassTarget(tuple(run_model(self.model, x).argmin(1).tolist()))
        return super().explain(x, target)


class AnswersOneTargetForAll(Honest):
    def explain_targets(self, x: Tensor, targets: Sequence[Questions]) -> list[BatchAttribution]:
        return [self.explain(x, target) for target in targets][:1] * len(targets)


class KeepsItsInputInTheClass(Honest):
    seen: ClassVar[list[Tensor]] = []

    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        self.seen[:] = [x]
        values, scores = self.gradient(x, target)
        return BatchAttribution(values * self.seen[0].abs().amax(), scores)


class ActsOnOtherThreads(Honest):
    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        handle = self.model.register_forward_hook(lambda module, inputs, output: output * 2)
        try:
            time.sleep(0.001)
            values, scores = self.gradient(x, target)
        finally:
            handle.remove()
        return BatchAttribution(values / 2, scores / 2)


class ForgetsAnOption(Honest):
    def __init__(self, model: nn.Module, *, strength: float = 1.0) -> None:
        super().__init__(model)


class ChangesAnOption(Honest):
    def __init__(self, model: nn.Module, *, strength: float = 1.0) -> None:
        super().__init__(model)
        self.strength = strength + 1


class CannotBeCopied(Honest):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.lock = threading.Lock()


class IsUndocumented(Honest):
    def explain(self, x: Tensor, target: Questions) -> BatchAttribution:
        return super().explain(x, target)


class HasNoCost(Honest):
    cost = ""


BROKEN: list[tuple[type[Attribution], str, str]] = [
    (LeavesAHook, "untouched_after_a_call", "model.stem: forward_hooks"),
    (LeavesAHookAfterAnError, "untouched_after_an_error_in_the_target", "model: forward_hooks"),
    (LeavesAHookAfterAnError, "untouched_after_a_bad_target", "model: forward_hooks"),
    (LeavesAHookAfterAnError, "untouched_after_a_bad_shape", "model: forward_hooks"),
    (LeavesAHookAfterAnError, "untouched_after_an_interrupt", "model: forward_hooks"),
    (MovesTorchsRandomState, "untouched_after_a_call", "torch's random state changed"),
    (MovesNumPysRandomState, "untouched_after_a_call", "NumPy's random state changed"),
    (MovesPythonsRandomState, "untouched_after_a_call", "Python's random state changed"),
    (SetsTheSeed, "untouched_after_a_call", "torch's random state changed"),
    (IsNoisy, "global_seed_does_not_matter", "the same call again"),
    (ChangesATrainingFlag, "untouched_after_a_call", "model.drop: training changed"),
    (RunsInTrainingMode, "untouched_after_a_call", "model.norm.running_mean: values"),
    (RunsInTrainingMode, "callers_modes", "differs by up to"),
    (FillsGradients, "untouched_after_a_call", r"model.stem.weight: \.grad"),
    (FreezesParameters, "untouched_after_a_call", "model.stem.weight: requires_grad"),
    (WritesParametersAnew, "untouched_after_a_call", "model.stem: parameters"),
    (WritesIntoTheInput, "untouched_after_a_call", "input: version counter changed"),
    (ChangesItself, "untouched_after_a_call", "method changed"),
    (SwallowsErrors, "untouched_after_an_error_in_the_target", "expected UserError, but nothing was raised"),
    (SwallowsErrors, "bad_targets", "target 1000000: expected TargetError"),
    (SwallowsInterrupts, "untouched_after_an_interrupt", "expected KeyboardInterrupt"),
    (MixesTheBatch, "batch_equals_single_images", r"image \d of a batch against the image alone: values: differs by"),
    (CountsTheImages, "batch_equals_single_images", "image 1 of a batch against the image alone: values: differs by"),
    (CountsTheImages, "zero_gradient", "neither zero nor equal"),
    (NeverReturnsZero, "zero_gradient", "neither zero nor equal"),
    (Transposes, "non_square", "a map of 20x12 for an input of 12x20"),
    (Collects, "memory", "more tensors are alive"),
    (ReportsAnotherScore, "result", "the scores against the model's output: differs by"),
    (PretendsToBeComplete, "residual", "do not equal the score"),
    (KeepsAFalseLedger, "residual", "ledger plus residual against the score: differs by up to"),
    (HidesAResidual, "residual", r"a residual of shape \(4, 1\)"),
    (PicksTheLowestClass, "top_class", "without a target"),
    (AnswersOneTargetForAll, "several_targets", "attribute_classes against attribute"),
    (KeepsItsInputInTheClass, "nested_in_the_target", "differs by"),
    (ActsOnOtherThreads, "parallel_threads", "differs by"),
    (ForgetsAnOption, "settings", r"\['strength'\] are not attributes"),
    (ChangesAnOption, "settings", "rebuilt from its settings"),
    (IsUndocumented, "documented", "no line that begins with Values:, Source:"),
    (HasNoCost, "documented", "`cost` is empty"),
]

# These end in an exception of their own, which pytest and check_method report as it is.
FAILING: list[tuple[type[Attribution], str, type[Exception]]] = [
    (ReturnsNaN, "result", saliency.errors.NonFiniteError),
    (NeedsNoise, "constant_image", ZeroDivisionError),
    (FailsOnSmallInput, "one_pixel", RuntimeError),
    (ReadsTheTensorItself, "named_outputs", TypeError),
    (NeedsFreeParameters, "frozen_model", RuntimeError),
    (CannotBeCopied, "copies", TypeError),
]


@pytest.mark.parametrize(("cls", "check", "message"), BROKEN, ids=lambda each: getattr(each, "__name__", None))
def test_a_broken_promise_is_found_and_named(cls: type[Attribution], check: str, message: str) -> None:
    broken = named(cls) if cls is not IsUndocumented else named(cls, __doc__="Nothing much.")
    try:
        with pytest.raises(AssertionError, match=message):
            dict(checks(broken))[check]()
    finally:
        Collects.kept.clear()


@pytest.mark.parametrize(("cls", "check", "error"), FAILING, ids=lambda each: getattr(each, "__name__", None))
def test_an_error_where_a_value_was_promised_is_found(
    cls: type[Attribution], check: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        dict(checks(named(cls)))[check]()


def test_a_process_wide_setting_that_moved_is_found() -> None:
    try:
        with pytest.raises(AssertionError, match="default dtype changed"):
            dict(checks(named(ChangesTheDefaultType)))["untouched_after_a_call"]()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.slow
def test_all_broken_promises_are_listed_at_once_with_their_tracebacks() -> None:
    with pytest.raises(AssertionError) as caught:
        check_method(named(LeavesAHook))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("LeavesAHook: ")
    assert any(line.startswith("  untouched_after_a_call: after a call, in training: model.stem") for line in lines)
    cause = caught.value.__cause__
    assert isinstance(cause, ExceptionGroup)
    assert f"{len(cause.exceptions)} failed checks" in lines[0]


@pytest.mark.slow
def test_an_error_of_the_methods_own_is_listed_by_its_name() -> None:
    with pytest.raises(AssertionError, match="constant_image: ZeroDivisionError"):
        check_method(named(NeedsNoise))


@pytest.mark.slow
def test_a_method_that_does_not_apply_to_the_model_is_told_so() -> None:
    def headless() -> nn.Module:
        model = tiny_model()
        model.register_forward_hook(lambda module, inputs, output: output.tanh())
        return model

    with pytest.raises(AssertionError, match="NotApplicableError: cam: no linear layer"):
        check_method(saliency.CAM, model=headless)
    with pytest.raises(NotApplicableError):
        saliency.CAM(headless()).attribute(torch.ones(1, 3, 16, 16))


@pytest.mark.slow
def test_the_checks_do_not_move_the_random_state_themselves() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]  # noqa: NPY002
    check_method(saliency.VanillaGradient)
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_inputs_drawn_from_a_generator_that_moves_are_found_without_a_lack_of_memory() -> None:
    class MovingGenerator(saliency.extending.SampledAttribution):
        """The mean gradient over copies with a random brightness, drawn one after the other."""

        name = "moving_generator"
        preview_options: ClassVar = {"passes": 4}

        def explain_image(self, passes: Any, score: Tensor) -> Any:
            estimate, source = saliency.extending.Estimate(), saliency.extending.generator(self.seed, 0)
            x: Tensor = passes.x

            def make(start: int, stop: int) -> Tensor:
                brightness: Tensor = torch.rand(stop - start, 1, 1, 1, generator=source)
                return brightness.to(x) + x

            for done in passes.gradients(make, self.most_passes):
                estimate.add(done.gradients)
            return saliency.extending.from_estimate(estimate, x)

    with pytest.raises(AssertionError, match="must return the same inputs for the same passes"):
        dict(checks(MovingGenerator))["chunk_size_does_not_matter"]()


def test_more_backward_passes_than_declared_are_named() -> None:
    class TwoBackwards(saliency.extending.TracedAttribution):
        """The gradient, computed twice."""

        name = "two_backwards"
        needs = saliency.extending.Needs(backwards=1)

        def explain_gradients(self, grads: Any, layers: tuple[str, ...]) -> Any:
            grads.rewritten_gradient([])
            return saliency.extending.BatchAttribution(grads.input_gradient(), grads.scores)

    with pytest.raises(AssertionError, match=r"result: MethodError: more backward passes than .* `needs` declare"):
        check_method(TwoBackwards)


# Methods and metrics that return something else.


class Returns(saliency.VanillaGradient):
    """A gradient method whose result is changed by `change`."""

    name = ""
    change: ClassVar[Any] = None

    def explain_gradients(self, grads: Any, layers: tuple[str, ...]) -> Any:
        return type(self).change(super().explain_gradients(grads, layers))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda result: result.values, "Returns returned Tensor; expected saliency.extending.BatchAttribution"),
        (lambda result: replace(result, values=result.values.sum(1)), r"values \(2, 16, 16\) and scores \(2,\) for 2"),
        (lambda result: replace(result, values=result.values[:1]), r"values \(1, 3, 16, 16\)"),
        (lambda result: replace(result, scores=result.scores.sum()), r"scores \(\) for 2 images"),
        (
            lambda result: result.with_evidence(residual=result.scores.sum()),
            r"residual \(\) for 2 images; expected one row",
        ),
    ],
)
def test_a_method_that_returns_something_else_is_told_what_to_return(
    change: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Returns, "change", staticmethod(change))
    with pytest.raises(saliency.errors.MethodError, match=message):
        Returns(tiny_model()).attribute(images(2), 1)
    with pytest.raises(saliency.errors.MethodError, match=message):
        saliency.Together(Returns(tiny_model())).attribute(images(2), 1)


def test_a_method_of_many_passes_that_returns_a_tensor_is_told_what_to_return() -> None:
    class OnePass(saliency.extending.MultiPassAttribution):
        def explain_image(self, passes: Any, score: Tensor) -> Any:
            return passes.x[0]

    with pytest.raises(saliency.errors.MethodError, match="explain_image returned Tensor"):
        OnePass(tiny_model()).attribute(images(2), 1)


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (torch.zeros(22, 2), "Constant.outcome returned Tensor; expected saliency.metrics.Outcome"),
        (Outcome(torch.zeros(())), r"returned values \(\); expected \(22, 2\), a row for the map and for each control"),
        (Outcome(torch.zeros(2)), r"returned values \(2,\); expected \(22, 2\)"),
    ],
)
def test_a_metric_that_returns_something_else_is_told_what_to_return(outcome: Any, message: str) -> None:
    class Constant(Metric):
        def outcome(self, subject: Any) -> Any:
            return outcome

    explanation = saliency.VanillaGradient(tiny_model()).attribute(images(2), 1)
    with pytest.raises(saliency.errors.MethodError, match=message):
        Constant().measure(explanation)
