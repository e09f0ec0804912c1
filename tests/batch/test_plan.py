"""The plan of a run: its batches follow from numbers and sizes alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saliency.batch.listing import ImageEntry
from saliency.batch.plan import Plan

METHODS = ("grad_cam",)


def plan(count: int, missing: Collection[int], sizes: Sequence[tuple[int, int]]) -> Plan:
    return Plan([ImageEntry(str(index), "") for index in range(count)], dict.fromkeys(missing, METHODS), sizes)


def batches(of: Plan) -> list[list[int]]:
    return [[slot.index for slot in batch] for batch in of]


def test_a_batch_is_an_image_number_divided_by_the_size() -> None:
    assert batches(plan(7, range(7), [(0, 3)])) == [[0, 1, 2], [3, 4, 5], [6]]
    assert batches(plan(7, range(7), [(0, 4), (4, 2)])) == [[0, 1, 2, 3], [4, 5], [6]]


def test_only_batches_with_missing_results_are_planned_and_keep_their_images() -> None:
    (batch,) = plan(9, [4], [(0, 3)])
    assert [(slot.index, slot.entry.path, slot.methods) for slot in batch] == [
        (3, "3", ()),
        (4, "4", METHODS),
        (5, "5", ()),
    ]
    assert batches(plan(9, [], [(0, 3)])) == []


@pytest.mark.parametrize(
    ("missing", "sizes", "halved"),
    [
        (range(9), [(0, 8)], [(0, 4)]),
        (range(9), [(0, 3)], [(0, 2)]),
        (range(4, 9), [(0, 4)], [(0, 4), (4, 2)]),
        (range(1, 2), [(0, 4), (4, 2)], [(0, 2), (4, 2)]),
        (range(1, 2), [(0, 4), (4, 8)], [(0, 2), (4, 2)]),
        (range(8, 9), [(0, 9)], [(0, 5)]),
    ],
)
def test_halving_makes_a_new_plan_from_the_first_missing_batch_on(
    missing: range, sizes: list[tuple[int, int]], halved: list[tuple[int, int]]
) -> None:
    before = plan(9, missing, sizes)
    assert list(before.halved().sizes) == halved
    assert before.sizes == sizes


@given(st.integers(1, 30), st.sets(st.integers(0, 29)), st.integers(1, 9))
def test_every_missing_image_is_planned_once_and_earlier_batches_survive_halving(
    count: int, missing: set[int], size: int
) -> None:
    before = plan(count, {index for index in missing if index < count}, [(0, size)])
    while batches(before):
        asked = [slot.index for batch in before for slot in batch if slot.methods]
        assert asked == sorted(before.missing)
        first = batches(before)[0]
        after = before.halved()
        assert len(batches(after)[0]) <= (len(first) + 1) // 2
        everything = [batches(plan(count, range(count), each.sizes)) for each in (before, after)]
        assert [batch for batch in everything[1] if batch[0] < first[0]] == [
            batch for batch in everything[0] if batch[0] < first[0]
        ]
        if len(first) == 1:
            break
        before = after
