"""The manifest's lines, and the plan of its groups."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from saliency.batch.batch_size import Plan
from saliency.batch.manifest import Manifest, encoded, row

METHODS = ("one", "two")


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    (tmp_path / "x.png").write_text("x")
    found = Manifest(tmp_path, METHODS)
    found.read()
    found.open()
    return found


def of(index: int, method: str | None = "one", **more: Any) -> dict[str, Any]:
    return row(index=index, method=method, **more)


def lines(manifest: Manifest) -> list[tuple[int, str]]:
    return [(each["index"], each["method"]) for each in manifest.rows()]


# Lines ---------------------------------------------------------------------------------------------------------------


def test_rows_come_back_as_they_were(manifest: Manifest) -> None:
    given = [of(0, source="é\u2028\n<b>\udc80"), of(0, "two", box=[0.5, 1.0, 2.0, 3.0]), of(1, None, error="no")]
    manifest.append(given)
    assert list(manifest.rows()) == given
    assert manifest.path.read_bytes().count(b"\n") == 3
    assert manifest.standing.failed == {1}


@pytest.mark.parametrize("lost", [1, 5, 100])
def test_a_line_that_is_cut_off_is_left_out_and_written_over(manifest: Manifest, tmp_path: Path, lost: int) -> None:
    manifest.append([of(0), of(0, "two"), of(1)])
    manifest.close()
    os.truncate(manifest.path, manifest.path.stat().st_size - lost)
    again = Manifest(tmp_path, METHODS)
    again.read()
    again.open()
    assert lines(again) == [(0, "one"), (0, "two")]
    assert not again.standing.is_done(1, 0)
    again.append([of(1)])
    again.close()
    assert lines(again) == [(0, "one"), (0, "two"), (1, "one")]


def test_what_follows_a_damaged_line_does_not_count(manifest: Manifest, tmp_path: Path) -> None:
    manifest.append([of(0), of(1)])
    manifest.close()
    data = manifest.path.read_bytes()
    for damage in (b"\0" * 10 + b"\n", b"[]\n", b"{}\n", b"\xff\n"):
        manifest.path.write_bytes(encoded(of(0)) + damage + data)
        again = Manifest(tmp_path, METHODS)
        again.read()
        again.open()
        again.close()
        assert manifest.path.read_bytes() == encoded(of(0))


@pytest.mark.parametrize(
    "odd",
    [
        {"index": "x"},
        {"index": None},
        {"index": -1},
        {"index": 3},
        {"index": True},
        {"method": "three"},
        {"method": None},
        {"probability": "high"},
        {"settings": "none"},
        {"box": [1, 2]},
        {"layer": 4},
    ],
)
def test_a_row_that_no_run_would_write_is_made_again(manifest: Manifest, tmp_path: Path, odd: dict[str, Any]) -> None:
    good = [of(0), of(0, "two"), of(1), of(1, "two"), of(2, None, error="no")]
    manifest.append(good)
    manifest.close()
    lines_now = [encoded({**of(1), **odd} if at == 2 else each) for at, each in enumerate(good)]
    manifest.path.write_bytes(b"".join(lines_now))
    again = Manifest(tmp_path, METHODS, 3)
    again.read()
    assert list(again.rows()) == [good[0], good[1], good[3], good[4]]
    assert not again.standing.is_done(1, 0)
    assert max(again.standing.done) == 2


def test_a_row_that_lacks_a_key_or_comes_twice_is_left_out(manifest: Manifest, tmp_path: Path) -> None:
    short = encoded({key: value for key, value in of(1).items() if key != "settings"})
    manifest.path.write_bytes(encoded(of(0)) + short + encoded(of(0)) + encoded(of(0, None, error="gone")))
    again = Manifest(tmp_path, METHODS)
    again.read()
    assert list(again.rows()) == [of(0), of(0, None, error="gone")]
    assert 1 not in again.standing.done


def test_nan_in_a_line_is_damage(manifest: Manifest, tmp_path: Path) -> None:
    manifest.path.write_bytes(encoded(of(0)) + encoded(of(1, score=0.25)).replace(b"0.25", b"NaN"))
    again = Manifest(tmp_path, METHODS)
    again.read()
    assert list(again.rows()) == [of(0)]


def test_what_lies_behind_the_last_whole_line_is_cut_off_though_nothing_is_missing(
    manifest: Manifest, tmp_path: Path
) -> None:
    manifest.append([of(0), of(0, "two")])
    manifest.close()
    with manifest.path.open("ab") as file:
        file.write(b"\0" * 100)
    Manifest(tmp_path, METHODS).read()
    assert manifest.path.read_bytes() == encoded(of(0)) + encoded(of(0, "two"))


def test_rows_whose_files_are_gone_are_left_out_and_stand_in_order_in_the_end(
    manifest: Manifest, tmp_path: Path
) -> None:
    there: dict[str, Any] = {"overlay": "x.png", "overlay_bytes": 1}
    rows = [of(0, **there), of(0, "two", overlay="y.png", overlay_bytes=1), of(1, **there), of(1, "two", photo="z.png")]
    manifest.append(rows)
    manifest.close()
    again = Manifest(tmp_path, METHODS)
    again.read()
    assert lines(again) == [(0, "one"), (1, "one")]
    assert [again.standing.is_done(0, place) for place in (0, 1)] == [True, False]
    again.open()
    again.append([of(0, "two"), of(1, "two")])
    assert not again.standing.ordered
    again.sort()
    assert lines(again) == [(0, "one"), (0, "two"), (1, "one"), (1, "two")]


def test_failures_are_left_out_where_they_are_tried_again(manifest: Manifest, tmp_path: Path) -> None:
    manifest.append([of(0, None, error="bad", error_kind="ImageError"), of(1), of(1, "two", error="bad")])
    manifest.close()
    again = Manifest(tmp_path, METHODS)
    again.read()
    assert all(again.standing.is_done(0, place) for place in (0, 1))
    assert again.standing.kinds == {"ImageError": 1, "None": 1}
    again.read(again=True)
    assert lines(again) == [(1, "one")]


def test_a_write_that_fails_leaves_only_whole_lines(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest.append([of(0)])
    real = os.write

    def full(file: int, data: Any) -> int:
        if len(data) < 300:
            raise OSError(28, "No space left on device")
        return real(file, bytes(data)[: len(data) - 200])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        manifest.append([of(1), of(2)])
    monkeypatch.setattr(os, "write", real)
    assert manifest.path.read_bytes() == encoded(of(0))
    manifest.append([of(1)])
    assert lines(manifest) == [(0, "one"), (1, "one")]


def test_a_row_is_a_line_of_json_without_nan() -> None:
    with pytest.raises(ValueError, match="Out of range"):
        encoded(of(0, score=float("nan")))
    assert json.loads(encoded(of(0, source="\udcff")))["source"] == "\udcff"


# Groups --------------------------------------------------------------------------------------------------------------


def all_groups(plan: Plan) -> list[range]:
    found = []
    while (group := plan.next()) is not None:
        found.append(group)
    return found


def test_groups_of_a_fixed_size_cover_all_photos() -> None:
    assert all_groups(Plan(10, 4, lanes=3)) == [range(4), range(4, 8), range(8, 10)]
    assert all_groups(Plan(0, 4)) == []


@pytest.mark.parametrize("done", range(71))
def test_wherever_a_run_was_stopped_its_photos_stay_in_their_groups(done: int) -> None:
    first = Plan(70, None, lanes=2)
    groups = []
    while (group := first.next()) is not None and group.start < max(done, 1):
        groups.append(group)
        first.measured(len(group), len(group) ** 0.5)
    again = Plan(70, None, lanes=2, pieces=first.pieces, fixed=done, settled=first.settled)
    found = all_groups(again)
    kept = [group for group in groups if group.start < done]
    assert found[: len(kept)] == kept
    assert [number for group in found for number in group] == list(range(70))


def test_the_smallest_batch_that_is_nearly_the_fastest_is_settled_on() -> None:
    plan = Plan(1000, None)
    rates = {1: 10.0, 2: 15.0, 4: 19.7, 8: 20.0, 16: 18.0}
    for _ in range(6):
        group = plan.next()
        assert group is not None
        plan.measured(len(group), len(group) / rates[len(group)])
    assert plan.settled == 4
    assert {len(group) for group in all_groups(plan)[:-3]} == {4}


def test_the_last_groups_are_small_so_that_all_lanes_end_together() -> None:
    sizes = [len(group) for group in all_groups(Plan(64, None, lanes=2, settled=16))]
    assert sizes == [16, 16, 16, 8, 4, 2, 1, 1]


def test_a_group_that_is_too_large_is_halved_and_no_later_one_is_larger() -> None:
    plan = Plan(40, 8, lanes=2)
    first, second = plan.next(), plan.next()
    assert first is not None
    assert second is not None
    assert plan.halve(first) == (range(4), range(4, 8))
    assert [len(group) for group in all_groups(plan)] == [4] * 6
    assert plan.pieces == [(0, 4), (8, 8), (16, 4)]
    again = Plan(40, 8, lanes=2, pieces=plan.pieces, fixed=30, settled=plan.settled)
    assert [len(group) for group in all_groups(again)][:7] == [4, 4, 8, 4, 4, 4, 4]


def test_changes_are_counted_so_that_they_can_be_written_down() -> None:
    plan = Plan(100, 8)
    seen = []
    for _ in range(5):
        plan.next()
        seen.append(plan.changes)
    assert seen == [1] * 5
