"""Budgets of passes: the time by a clock of the test, the tolerance at fixed numbers of samples, and steps that fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from saliency.attribution import passes
from saliency.attribution.passes import CHECK_INTERVAL, Budget


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    state = SimpleNamespace(now=0.0)
    state.perf_counter = lambda: state.now
    monkeypatch.setattr(passes, "time", state)
    return state


def test_the_time_before_the_first_pass_counts(clock: SimpleNamespace) -> None:
    budget = Budget(seconds=2, spent=0.5)
    assert budget.elapsed == 0.5
    clock.now = 1.4
    assert not budget.is_over()
    clock.now = 1.5
    assert budget.is_over()
    assert budget.stopped == "seconds"


def test_without_limits_nothing_ends(clock: SimpleNamespace) -> None:
    budget, estimate = Budget(), cast("Any", SimpleNamespace(count=2 * CHECK_INTERVAL, relative_error=0.0))
    clock.now = 1e9
    assert not budget.is_over()
    assert not budget.is_met(estimate)
    assert budget.fitting(100, 3, 1) == 100
    assert budget.stopped == "complete"


def test_as_many_passes_fit_as_the_rate_so_far_allows(clock: SimpleNamespace) -> None:
    budget = Budget(seconds=10)
    clock.now, budget.used = 4.0, 8
    assert budget.fitting(100, 8, 1) == 12
    assert budget.fitting(5, 8, 1) == 5
    assert budget.fitting(100, 8, 50) == 42  # the least number of passes runs anyway
    clock.now = 11.0
    assert budget.fitting(100, 8, 1) == 1


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_a_tolerance_is_checked_after_the_same_numbers_of_samples(chunk: int) -> None:
    checked: list[int] = []

    class Recorded:
        count = 0

        @property
        def relative_error(self) -> float:
            checked.append(self.count)
            return 1.0

    budget, estimate = Budget(tolerance=0.5), cast("Any", Recorded())
    while estimate.count < 400:
        estimate.count += budget.fitting(chunk, estimate.count, 1)
        budget.is_met(estimate)
    assert checked == [*range(32, 273, 16), 304, 336, 368, 400]  # a sixteenth more each time


@pytest.mark.parametrize(("most", "expected"), [(1, 1), (3, 3), (10_000, 64)])
def test_trials_leave_most_of_the_time_to_the_steps_that_fit(most: int, expected: int, clock: SimpleNamespace) -> None:
    budget = Budget(seconds=10)

    def run(steps: int) -> None:
        clock.now += 0.125 * steps

    assert budget.affordable(run, most) == expected
    assert budget.elapsed + 0.125 * expected <= 10


def test_a_trial_runs_without_the_limit_of_passes_which_holds_afterwards(clock: SimpleNamespace) -> None:
    budget, limits = Budget(passes=3, seconds=10), []

    def run(steps: int) -> None:
        limits.append(budget.passes)
        clock.now += 0.125 * steps

    budget.affordable(run, 64)
    assert set(limits) == {None}
    assert budget.passes == 3
