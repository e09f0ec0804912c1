"""The engine for many passes: chunks, limits, memory, interrupts, targets and random draws."""

from __future__ import annotations

import gc
import re
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from saliency import METHODS, contrast, probability, region, value
from saliency.attribution import passes as passes_module
from saliency.attribution.estimates import Estimate, generator
from saliency.attribution.options import Option
from saliency.attribution.passes import (
    MAX_CHUNK_CPU,
    Budget,
    ImageAttribution,
    MakeInputs,
    Passes,
    SampledAttribution,
    chunk_size,
    from_estimate,
    listening,
)
from saliency.attribution.questions import CallImages, Questions
from saliency.errors import MethodError, SaliencyWarning, TargetError
from saliency.model.call import is_out_of_memory, prepared_for_attribution
from saliency.targets.question import Images
from saliency.testing import images, tiny_model, tiny_model_for
from tests.models import Interrupting, Packed

named: dict[str, Any] = {**METHODS}


class Noisy(SampledAttribution):
    """The mean gradient over noisy copies."""

    default_passes = 24

    level: Option[float] = Option(0.3)

    def explain_image(self, passes: Passes, score: Tensor) -> ImageAttribution:
        estimate, x = Estimate(), passes.x

        def make(start: int, stop: int) -> Tensor:
            noise = [
                torch.randn(x.shape[1:], generator=generator(self.seed, i), dtype=x.dtype) for i in range(start, stop)
            ]
            return x + self.level * torch.stack(noise)

        for done in passes.gradients(make, self.most_passes, estimate=estimate):
            estimate.add(done.gradients)
        return from_estimate(estimate, x)


def passes_on(model: nn.Module, budget: Budget | None = None, **options: Any) -> Passes:
    """Passes of one image on a borrowed model, whose target has seen the clean image."""
    x = images(1, dtype=next(model.parameters()).dtype)
    selection = Questions(0, Images(1))
    with torch.no_grad():
        score = selection(model(x))[0]
    return Passes(model, x, selection, 0, score, budget=budget, **options)


def brighter(x: Tensor) -> MakeInputs:
    return lambda start, stop: x + torch.arange(start, stop, dtype=x.dtype).view(-1, 1, 1, 1) / 10


def copies(x: Tensor) -> MakeInputs:
    return lambda start, stop: x.expand(stop - start, -1, -1, -1)


# What comes back.


@pytest.mark.parametrize("chunk", [1, 3, "auto"])
def test_scores_and_gradients_are_those_of_single_calls(chunk: Any) -> None:
    model = tiny_model().double()
    with prepared_for_attribution(model), passes_on(model, chunk=chunk) as passes:
        make = brighter(passes.x)
        scores = torch.cat([done.scores for done in passes.forwards(make, 20)])
        done = list(passes.gradients(make, 20))
    for i in range(20):
        x = make(i, i + 1).requires_grad_()
        expected = model(x)[0, 0]
        torch.testing.assert_close(scores[i], expected.detach())
        torch.testing.assert_close(
            torch.cat([each.gradients for each in done])[i], torch.autograd.grad(expected, x)[0][0]
        )
    assert passes.budget.used == 40
    assert [each.start for each in done] == [sum(len(each.scores) for each in done[:at]) for at in range(len(done))]


@pytest.mark.parametrize("count", [0, 1, 20])
def test_scores_are_those_of_all_chunks(count: int) -> None:
    model = tiny_model().double()
    with prepared_for_attribution(model), passes_on(model, chunk=3) as passes:
        make = brighter(passes.x)
        scores = passes.scores(make, count)
        expected = model(make(0, count))[:, 0] if count else torch.zeros(0, dtype=torch.float64)
    torch.testing.assert_close(scores, expected.detach())
    assert passes.budget.used == count


def test_notes_of_a_method_follow_those_of_its_passes() -> None:
    class Noted(Noisy):
        def explain_image(self, passes: Passes, score: Tensor) -> ImageAttribution:
            return super().explain_image(passes, score)._replace(notes=["four draws", "four draws"])

    model = Packed(lambda scores: scores.sum(0))  # one pass at a time
    (stats,) = Noted(model, passes=4).attribute(images(1), lambda output: output[None, 0]).run_stats
    assert re.fullmatch("one pass at a time: .*; four draws", stats.note)


def test_forwards_build_no_graph_and_leave_ordinary_tensors() -> None:
    seen: list[tuple[int, bool]] = []
    model = tiny_model()
    model.register_forward_hook(lambda module, inputs, output: seen.append((len(output), torch.is_grad_enabled())))
    with prepared_for_attribution(model), passes_on(model, chunk=2) as passes:
        seen.clear()
        made = list(passes.forwards(brighter(passes.x), 5))
    one_and_two_images, chunks = seen[:2], seen[2:]
    assert one_and_two_images == [(1, False), (2, False)]
    assert chunks == [(2, False), (2, False), (1, False)]
    for done in made:
        assert not done.scores.is_inference()


def test_inputs_are_made_chunk_by_chunk() -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0
    model = tiny_model()

    def make(start: int, stop: int) -> Tensor:
        nonlocal most
        made = torch.zeros(stop - start, 3, 16, 16)
        alive.append(weakref.ref(made))
        most = max(most, sum(each() is not None for each in alive))
        return made

    with prepared_for_attribution(model), passes_on(model, chunk=4) as passes:
        for done in passes.forwards(make, 400):
            assert len(done.scores) == 4
    assert len(alive) == 100
    assert most <= 3


# Limits.


def test_the_first_limit_that_is_met_ends_the_work() -> None:
    model = tiny_model()
    with prepared_for_attribution(model), passes_on(model, Budget(passes=10), chunk=4) as passes:
        assert sum(len(done.scores) for done in passes.forwards(brighter(passes.x), 50)) == 10
    assert (passes.budget.used, passes.budget.stopped) == (10, "passes")
    assert METHODS["rise"](model, passes=10).attribute(images(1, (24, 24)), 0).run_stats[0].stopped == "passes"
    with prepared_for_attribution(model), passes_on(model, Budget(seconds=1e-9), chunk=4) as passes:
        assert sum(len(done.scores) for done in passes.forwards(brighter(passes.x), 50)) == 1  # at the rate before
    assert passes.budget.stopped == "seconds"


class Clock:
    """Time that passes only where a model says so."""

    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now


class Ticking(nn.Module):
    """A model whose rows take some seconds each, three times as many with a gradient.

    Its forward reads a value, so parts of it cannot be replayed, which would take no time.
    """

    def __init__(self, clock: Clock, seconds: float, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner, self.clock, self.seconds = inner or tiny_model(), clock, seconds

    def forward(self, x: Tensor) -> Tensor:
        float(x.detach().sum())
        self.clock.now += self.seconds * len(x) * (3 if x.requires_grad else 1)
        out: Tensor = self.inner(x)
        return out


TIMED = [name for name, cls in METHODS.items() if "seconds" in cls.options() and name != "recipro_cam"]
COUNTED = ("passes", "steps", "channels", "masks")
SMALL: dict[str, dict[str, Any]] = {"occlusion": {"window": 8, "stride": 2}, "sobol": {"grid": 8}}


def timed(
    name: str, monkeypatch: pytest.MonkeyPatch, inner: nn.Module | None = None, **options: Any
) -> tuple[Any, Clock]:
    """The explanation of one image in two seconds, where a forward takes 20 ms, and the clock."""
    clock = Clock()
    monkeypatch.setattr(passes_module, "time", clock)
    quick = {key: each for key, each in METHODS[name].preview_options.items() if key not in COUNTED}
    method = METHODS[name](
        Ticking(clock, 0.02, inner or tiny_model_for(METHODS[name])()),
        **quick | SMALL.get(name, {}) | options,
        seconds=2,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaliencyWarning)
        return method.attribute(images(1, (32, 32)), 0), clock


@pytest.mark.parametrize("name", TIMED)
def test_seconds_are_kept_and_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, clock = timed(name, monkeypatch)
    (stats,) = found.run_stats
    assert stats.seconds == pytest.approx(clock.now)
    assert clock.now <= 2.4
    if stats.stopped == "complete":
        complete = ("ablation_cam", "score_cam", "kernel_shap", "vit_cx", "vx_code")
        assert name in complete  # all that they need fits
    else:
        assert stats.stopped == "seconds"
        assert clock.now > 1.2


@pytest.mark.parametrize("group_size", [1, 2])
def test_a_selection_that_does_not_fit_is_left_out(group_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found, clock = timed("vx_code", monkeypatch, segments=(8, 8), group_size=group_size, trials=64)
    assert found.run_stats[0].stopped == "seconds"
    assert clock.now < 2.2
    assert 0 < int((found.values != 0).sum()) <= 32 * 32 // 64


def test_fewer_windows_cover_the_image_and_the_note_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    (stats,) = timed("occlusion", monkeypatch)[0].run_stats
    assert f"{stats.passes} of 169 windows" in stats.note
    (stats,) = timed("occlusion", monkeypatch, window=4)[0].run_stats  # 64 windows cover it
    assert f"{stats.passes} of 225 windows" in stats.note
    assert "covered" not in stats.note


def test_fewer_steps_are_a_complete_path(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = timed("integrated_gradients", monkeypatch, steps=1000)
    (stats,) = found.run_stats
    steps = int(stats.note.split(" of 1000 steps")[0])
    assert stats.stopped == "seconds"
    expected = METHODS["integrated_gradients"](tiny_model(), steps=steps).attribute(images(1, (32, 32)), 0)
    torch.testing.assert_close(found.values, expected.values)


def test_nodes_are_added_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    waves = Packed(lambda scores: (4e4 * scores).sin())
    found, clock = timed("integrated_gradients", monkeypatch, waves, tolerance=1e-6, baseline=["mean", 0.5, -0.5])
    assert (found.run_stats[0].stopped, found.run_stats[0].passes > 20) == ("seconds", True)
    assert clock.now <= 2.4


def test_sobol_takes_a_coarser_grid_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = timed("sobol", monkeypatch)
    assert "a grid of 4 cells along each edge" in found.run_stats[0].note
    found, _ = timed("sobol", monkeypatch, grid=3)
    assert "grid" not in found.run_stats[0].note


def test_a_method_that_needs_all_its_passes_refuses_a_time() -> None:
    with pytest.raises(TypeError, match='no option "seconds"'):
        METHODS["recipro_cam"](tiny_model(), seconds=2)


def test_a_tolerance_is_reached_at_the_same_pass_whatever_the_chunk_size() -> None:
    model = tiny_model().double()
    x = images(1, dtype=torch.float64)
    found = [Noisy(model, tolerance=0.05, chunk=chunk).attribute(x, 0) for chunk in (1, 3, 16, "auto")]
    spent = {each.run_stats[0].passes for each in found}
    assert len(spent) == 1
    assert all(each.run_stats[0].stopped == "tolerance" for each in found)
    for each in found:
        assert each.error is not None
        assert float(each.error.square().mean().sqrt() / each.values.square().mean().sqrt()) <= 0.05
    passes = spent.pop()
    less = Noisy(model, passes=passes - 16).attribute(x, 0)
    assert less.error is not None
    assert float(less.error.square().mean().sqrt() / less.values.square().mean().sqrt()) > 0.05


def test_each_image_of_a_batch_says_what_it_took() -> None:
    found = Noisy(tiny_model(), passes=9).attribute(images(3), [0, 1, 2])
    assert [each.passes for each in found.run_stats] == [9, 9, 9]
    assert found[1].run_stats == found.run_stats[1:2]
    assert found.agreement is not None
    assert found.agreement.shape == (3,)


@pytest.mark.parametrize("wrong", [{"passes": 0}, {"passes": 2.5}, {"seconds": -1}, {"tolerance": 0}, {"seconds": "9"}])
def test_a_limit_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(MethodError, match=next(iter(wrong))):
        Noisy(tiny_model(), **wrong)


@pytest.mark.parametrize("wrong", [{"chunk": 0}, {"chunk": "big"}, {"seed": "x"}])
def test_an_option_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(MethodError, match=next(iter(wrong))):
        Noisy(tiny_model(), **wrong)


def test_an_unknown_option_is_a_type_error_that_names_it() -> None:
    with pytest.raises(TypeError, match='Noisy has no option "sample"'):
        Noisy(tiny_model(), sample=3)  # type: ignore[call-arg]


def test_the_removed_fast_precision_is_a_type_error_that_names_autocast() -> None:
    with pytest.raises(TypeError, match=r'has no option "precision".*torch.autocast'):
        Noisy(tiny_model(), precision="fast")  # type: ignore[call-arg]


def test_options_and_settings_list_the_shared_ones_too() -> None:
    options = Noisy.options()
    assert options[0] == "level"
    assert {"passes", "seconds", "tolerance", "seed", "chunk", "progress"} <= set(options)
    assert not {"preprocess", "categories", "sampling"} & set(options)
    assert dict(Noisy(tiny_model(), tolerance=0.1).settings)["tolerance"] == 0.1


# Memory.


@pytest.mark.parametrize("name", ["occlusion", "rise", "score_cam", "sobol", "kernel_shap", "integrated_gradients"])
def test_the_passes_of_an_image_are_freed_with_its_map(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Passes]] = []
    cls = METHODS[name]
    explain: Callable[..., ImageAttribution] = getattr(cls, "explain_image")  # noqa: B009 - only methods of many passes have it

    def watched(self: Any, passes: Passes, score: Tensor) -> ImageAttribution:
        alive.append(weakref.ref(passes))
        return explain(self, passes, score)

    monkeypatch.setattr(cls, "explain_image", watched)
    gc.collect()
    gc.disable()  # a cycle would keep the maps of all layers until Python finds it
    try:
        with _quiet():
            named[name](tiny_model_for(cls)(), **cls.preview_options).attribute(images(1), 0)
        assert [each() for each in alive] == [None]
    finally:
        gc.enable()


class Crammed(nn.Module):
    """A model that runs out of memory above some batch size."""

    def __init__(self, most: int, error: type[Exception] = torch.OutOfMemoryError) -> None:
        super().__init__()
        self.inner, self.most, self.error = tiny_model(), most, error
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        if len(x) > self.most:
            raise self.error("CUDA out of memory. Tried to allocate 20.00 GiB")
        out: Tensor = self.inner(x)
        return out


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError, MemoryError])
def test_a_chunk_that_runs_out_of_memory_is_halved(error: type[Exception]) -> None:
    model = Crammed(3, error)
    found = Noisy(model, passes=60).attribute(images(1), 0)
    assert torch.allclose(
        found.values, Noisy(model.inner, passes=60, chunk=1).attribute(images(1), 0).values, atol=1e-6
    )
    assert {16, 8, 4, 2} <= set(model.sizes)
    assert max(model.sizes[-10:]) == 2


def test_a_chunk_size_of_the_users_that_is_too_large_is_halved_too() -> None:
    model = Crammed(3)
    found = Noisy(model, passes=20, chunk=8).attribute(images(1), 0)
    assert found.run_stats[0].passes == 20
    assert torch.allclose(found.values, Noisy(model.inner, passes=20).attribute(images(1), 0).values, atol=1e-6)


def test_one_pass_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        Noisy(Crammed(0)).attribute(images(1), lambda output: output[:, 0])


def test_what_counts_as_a_lack_of_memory() -> None:
    assert is_out_of_memory(
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory")
    )
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


# Chunk sizes.


def test_the_chunk_size_follows_from_the_size_of_the_image() -> None:
    assert chunk_size(torch.empty(1, 3, 224, 224)) == 4
    assert chunk_size(torch.empty(1, 3, 2000, 2000)) == 1
    assert chunk_size(torch.empty(1, 3, 8, 8)) == MAX_CHUNK_CPU
    assert chunk_size(torch.empty(1, 3, 224, 224, device="meta")) == 64


@pytest.mark.parametrize(("width", "own", "expected"), [(16, None, 16), (16, 4, 4), (600, None, 8)])
def test_passes_of_a_part_of_the_model_run_in_chunks_of_their_own(width: int, own: int | None, expected: int) -> None:
    layers = nn.Conv2d(3, 20, 8, 8), nn.ReLU(), nn.Conv2d(20, width, 3, 1, 1), nn.Flatten(), nn.LazyLinear(3)
    model = nn.Sequential(*layers)
    model(x := images(1, (224, 224)))
    options: dict[str, Any] = {} if own is None else {"chunk": own}
    shares: list[float] = []
    for name, part in (("ablation_cam", {"layer": "1"}), ("occlusion", {"window": 32, "stride": 32})):
        shares.clear()
        with listening(lambda share, partial: shares.append(share)):
            passes = METHODS[name](model, **part, **options).attribute(x, 0).run_stats[0].passes
        assert round(shares[0] * passes) == (expected if name == "ablation_cam" else own or 16)


def test_two_calls_give_the_same_bits() -> None:
    first, second = (Noisy(tiny_model(), passes=50).attribute(images(1), 0) for _ in range(2))
    assert torch.equal(first.values, second.values)


def test_a_processor_never_runs_more_at_once_than_it_gains_from() -> None:
    model = Crammed(10**6)
    Noisy(model, passes=300).attribute(images(1), 0)
    assert max(model.sizes) <= MAX_CHUNK_CPU


# Targets.


@pytest.mark.parametrize(
    "target",
    [
        None,
        [0, 1, 2],
        probability([2, 1, 0]),
        contrast([0, 1, 2], 3),
        value(2),
        lambda output: output[[0, 1, 2], [2, 1, 0]],
        lambda output: output[:, :2].max(1).values,
    ],
)
def test_any_target_means_the_same_in_passes_as_in_the_batch(target: Any) -> None:
    model, x = tiny_model().double(), images(3, dtype=torch.float64)
    with prepared_for_attribution(model), torch.no_grad():
        selection = Questions(target, CallImages(model, x))
        expected = selection(model(x))
        for image in range(3):
            one = x[image : image + 1]
            (done,) = Passes(model, one, selection, image, expected[image]).forwards(copies(one), 1)
            torch.testing.assert_close(done.scores, expected[image : image + 1])


def test_a_region_of_each_image_is_its_own_in_passes_too() -> None:
    model, x = nn.Conv2d(3, 2, 1), images(2)
    where = torch.zeros(2, 16, 16, dtype=torch.bool)
    where[0, :4], where[1, 8:] = True, True
    found = Noisy(model, passes=4, level=0.0).attribute(x, region(1, where))
    hit = found.values.abs().sum(1) > 0
    assert torch.equal(hit, where)


class Remembering(nn.Module):
    """A model that keeps a factor for the size of the batch before, or for each size."""

    def __init__(self, *, most: int) -> None:
        super().__init__()
        self.inner, self.most = tiny_model(), most
        self.kept: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in self.kept:
            while len(self.kept) >= self.most:
                self.kept.popitem()
            self.kept[len(x)] = torch.linspace(0.5, 1, x.shape[-1]).repeat(len(x), 1, 1, 1)
        out: Tensor = self.inner(x * self.kept[len(x)])
        return out


@pytest.mark.parametrize("name", ["rise", "occlusion", "feature_ablation", "ablation_cam", "recipro_cam"])
@pytest.mark.parametrize("most", [1, 99])
def test_what_a_model_keeps_for_a_batch_size_can_be_trained_on_afterwards(name: str, most: int) -> None:
    model, x = Remembering(most=most), images(1)
    options = {**named[name].preview_options, "chunk": 3}
    for _ in range(2):
        named[name](model, **options).attribute(x, 0)
    assert model.kept
    assert not any(each.is_inference() for each in model.kept.values())


def test_a_number_that_stands_before_the_scores_in_the_output_is_not_taken_for_them() -> None:
    model, x = Packed(lambda scores: {"loss": torch.zeros(()), "logits": scores}), images(2)
    found = Noisy(model, passes=6, chunk=4).attribute(x, lambda output: output["logits"][:, 1])
    assert torch.equal(found.values, Noisy(model.inner, passes=6, chunk=4).attribute(x, 1).values)


def test_a_target_without_a_gradient_says_so() -> None:
    with pytest.raises(TargetError, match="no gradient"):
        Noisy(tiny_model()).attribute(images(1), lambda output: output[:, 0].detach())


@pytest.mark.parametrize("name", ["extremal_perturbation", "integrated_gradients", "rise"])
def test_the_callers_autocast_is_for_the_model_alone(name: str) -> None:
    kinds: list[torch.dtype] = []
    model = tiny_model()
    model.get_submodule("stem").register_forward_hook(lambda module, inputs, output: kinds.append(output.dtype))
    cls = METHODS[name]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = cls(model, **cls.preview_options).attribute(images(1), 0)
    assert set(kinds[1:]) == {torch.bfloat16}
    assert found.values.dtype is torch.float32


# Interrupts.


@pytest.mark.usefixtures("_ctrl_c")
@pytest.mark.parametrize("by_signal", [True, False])
def test_an_interrupt_is_passed_on(by_signal: bool) -> None:
    with pytest.raises(KeyboardInterrupt):
        Noisy(Interrupting(6, by_signal=by_signal), chunk=2).attribute(images(1), 0)


# Progress.


def test_short_work_and_work_off_a_terminal_draw_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    Noisy(tiny_model(), passes=40).attribute(images(1), 0)
    assert capsys.readouterr().err == ""


def test_a_bar_is_drawn_when_asked_and_counts_the_passes(capsys: pytest.CaptureFixture[str]) -> None:
    Noisy(tiny_model(), passes=40, progress=True).attribute(images(1), 0)
    shown = capsys.readouterr().err
    assert "/40" in shown
    assert "Noisy" in shown


@pytest.mark.parametrize(("progress", "drawn"), [(None, True), (False, False)])
def test_long_work_on_a_terminal_draws_a_bar_by_itself(
    progress: bool | None, drawn: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("saliency.attribution.passes.BAR_DELAY", 0.2)
    model = tiny_model()
    model.register_forward_hook(lambda *given: time.sleep(0.05))
    Noisy(model, passes=10, chunk=1, progress=progress).attribute(images(1), 0)
    assert ("Noisy" in capsys.readouterr().err) is drawn


# Inputs.


def test_inputs_of_another_type_are_converted() -> None:
    model = tiny_model()
    with prepared_for_attribution(model), passes_on(model, chunk=3) as passes:
        double = list(passes.gradients(lambda start, stop: brighter(passes.x)(start, stop).double(), 6))
        single = list(passes.gradients(brighter(passes.x), 6))
    for first, second in zip(double, single, strict=True):
        assert first.gradients.dtype is torch.float32
        torch.testing.assert_close(first.gradients, second.gradients)


@pytest.mark.parametrize("shape", [(1, 3, 16, 16), (4, 1, 16, 16), (4, 3, 16, 8), (3, 16, 16), ()])
def test_inputs_of_another_shape_are_refused_with_both_shapes(shape: tuple[int, ...]) -> None:
    model = tiny_model()
    with prepared_for_attribution(model), passes_on(model, chunk=4) as passes:
        for run in (passes.forwards, passes.gradients):
            with pytest.raises(MethodError, match=re.escape("(4, 3, 16, 16)")) as error:
                list(run(lambda start, stop: torch.zeros(shape), 8))
            assert str(shape) in str(error.value)


# Random draws.


def test_each_sample_has_draws_of_its_own_and_every_call_the_same() -> None:
    draws = {(seed, i): torch.randn(4, generator=generator(seed, i)) for seed in (0, 1, -1) for i in range(50)}
    again = torch.randn(4, generator=generator(1, 7))
    assert torch.equal(again, draws[1, 7])
    rows = torch.stack(list(draws.values()))
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)
    many = torch.stack([torch.randn(1, generator=generator(0, i)) for i in range(4000)])
    assert abs(float(many.mean())) < 0.06
    assert abs(float(many.std()) - 1) < 0.05
    lag = (many[1:] * many[:-1]).mean()
    assert abs(float(lag)) < 0.06


def test_several_numbers_name_one_sample() -> None:
    first = [torch.randn(3, generator=generator(0, i, j)) for i in range(4) for j in range(4)]
    assert len({tuple(each.tolist()) for each in first}) == 16


# All methods of many passes.


def many_pass_methods() -> Sequence[str]:
    return [name for name, cls in METHODS.items() if "chunk" in cls.options()]


@pytest.mark.parametrize("name", many_pass_methods())
def test_what_was_spent_stands_in_the_explanation(name: str) -> None:
    cls = METHODS[name]
    with _quiet():
        found = cls(tiny_model_for(cls)(), **cls.preview_options).attribute(images(2), [0, 1])
    assert len(found.run_stats) == 2
    for each in found.run_stats:
        assert each.passes >= 1
        assert each.seconds > 0


@pytest.mark.parametrize("name", [name for name in many_pass_methods() if "passes" in METHODS[name].options()])
def test_every_sampling_method_takes_the_same_three_limits(name: str) -> None:
    cls = METHODS[name]
    options = {key: each for key, each in cls.preview_options.items() if key not in ("passes", "seconds", "tolerance")}
    assert {"passes", "seconds", "tolerance"} <= set(cls.options())
    options["seconds"] = 0.05
    with _quiet():
        found = cls(tiny_model(), **options).attribute(images(1), 0)
    assert found.run_stats[0].stopped in ("seconds", "complete")


@contextmanager
def _quiet() -> Iterator[None]:
    """A method may well warn of a tiny model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaliencyWarning)
        yield
