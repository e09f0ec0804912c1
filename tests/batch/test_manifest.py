"""The rows of the manifest."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from saliency.batch.manifest import Manifest, encode, make_row

METHODS = ("one", "two")


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    (tmp_path / "x.png").write_text("x")
    found = Manifest(tmp_path, METHODS)
    found.read()
    found.open()
    return found


def of(index: int, method: str | None = "one", **more: Any) -> dict[str, Any]:
    return make_row(index=index, method=method, **more)


def lines(manifest: Manifest) -> list[tuple[int, str]]:
    return [(each["index"], each["method"]) for each in manifest.rows()]


# Lines ---------------------------------------------------------------------------------------------------------------


def test_rows_come_back_as_they_were(manifest: Manifest) -> None:
    given = [of(0, source="é\u2028\n<b>\udc80"), of(0, "two", box=[0.5, 1.0, 2.0, 3.0]), of(1, None, error="no")]
    manifest.append(given)
    assert list(manifest.rows()) == given
    assert manifest.path.read_bytes().count(b"\n") == 3
    assert manifest.state.failed == {1}


@pytest.mark.parametrize("lost", [1, 5, 100])
def test_a_truncated_row_is_dropped_and_overwritten(manifest: Manifest, tmp_path: Path, lost: int) -> None:
    manifest.append([of(0), of(0, "two"), of(1)])
    manifest.close()
    os.truncate(manifest.path, manifest.path.stat().st_size - lost)
    again = Manifest(tmp_path, METHODS)
    again.read()
    again.open()
    assert lines(again) == [(0, "one"), (0, "two")]
    assert not again.state.is_done(1, 0)
    again.append([of(1)])
    again.close()
    assert lines(again) == [(0, "one"), (0, "two"), (1, "one")]


def test_rows_after_a_damaged_line_are_dropped(manifest: Manifest, tmp_path: Path) -> None:
    manifest.append([of(0), of(1)])
    manifest.close()
    data = manifest.path.read_bytes()
    for damage in (b"\0" * 10 + b"\n", b"[]\n", b"{}\n", b"\xff\n"):
        manifest.path.write_bytes(encode(of(0)) + damage + data)
        again = Manifest(tmp_path, METHODS)
        again.read()
        again.open()
        again.close()
        assert manifest.path.read_bytes() == encode(of(0))


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
def test_a_row_that_no_run_would_write_is_dropped(manifest: Manifest, tmp_path: Path, odd: dict[str, Any]) -> None:
    good = [of(0), of(0, "two"), of(1), of(1, "two"), of(2, None, error="no")]
    manifest.append(good)
    manifest.close()
    lines_now = [encode({**of(1), **odd} if at == 2 else each) for at, each in enumerate(good)]
    manifest.path.write_bytes(b"".join(lines_now))
    again = Manifest(tmp_path, METHODS, 3)
    again.read()
    assert list(again.rows()) == [good[0], good[1], good[3], good[4]]
    assert not again.state.is_done(1, 0)
    assert max(again.state.done) == 2


def test_an_incomplete_or_repeated_row_is_dropped(manifest: Manifest, tmp_path: Path) -> None:
    short = encode({key: value for key, value in of(1).items() if key != "settings"})
    manifest.path.write_bytes(encode(of(0)) + short + encode(of(0)) + encode(of(0, None, error="gone")))
    again = Manifest(tmp_path, METHODS)
    again.read()
    assert list(again.rows()) == [of(0), of(0, None, error="gone")]
    assert 1 not in again.state.done


def test_nan_in_a_row_is_damage(manifest: Manifest, tmp_path: Path) -> None:
    manifest.path.write_bytes(encode(of(0)) + encode(of(1, score=0.25)).replace(b"0.25", b"NaN"))
    again = Manifest(tmp_path, METHODS)
    again.read()
    assert list(again.rows()) == [of(0)]


def test_bytes_after_the_last_row_are_removed(manifest: Manifest, tmp_path: Path) -> None:
    manifest.append([of(0), of(0, "two")])
    manifest.close()
    with manifest.path.open("ab") as file:
        file.write(b"\0" * 100)
    Manifest(tmp_path, METHODS).read()
    assert manifest.path.read_bytes() == encode(of(0)) + encode(of(0, "two"))


def test_rows_with_missing_files_are_dropped_and_new_ones_sorted(manifest: Manifest, tmp_path: Path) -> None:
    there: dict[str, Any] = {"overlay": "x.png", "overlay_bytes": 1}
    rows = [of(0, **there), of(0, "two", overlay="y.png", overlay_bytes=1), of(1, **there), of(1, "two", photo="z.png")]
    manifest.append(rows)
    manifest.close()
    again = Manifest(tmp_path, METHODS)
    again.read()
    assert lines(again) == [(0, "one"), (1, "one")]
    assert [again.state.is_done(0, place) for place in (0, 1)] == [True, False]
    again.open()
    again.append([of(0, "two"), of(1, "two")])
    assert not again.state.is_sorted
    again.sort()
    assert lines(again) == [(0, "one"), (0, "two"), (1, "one"), (1, "two")]


def test_failures_are_dropped_for_a_retry(manifest: Manifest, tmp_path: Path) -> None:
    manifest.append([of(0, None, error="bad", error_kind="ImageError"), of(1), of(1, "two", error="bad")])
    manifest.close()
    again = Manifest(tmp_path, METHODS)
    again.read()
    assert all(again.state.is_done(0, place) for place in (0, 1))
    assert again.state.kinds == {"ImageError": 1, "None": 1}
    again.read(retry=True)
    assert lines(again) == [(1, "one")]


def test_a_failed_write_leaves_complete_rows_only(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert manifest.path.read_bytes() == encode(of(0))
    manifest.append([of(1)])
    assert lines(manifest) == [(0, "one"), (1, "one")]


def test_a_row_is_a_line_of_strict_json() -> None:
    with pytest.raises(ValueError, match="Out of range"):
        encode(of(0, score=float("nan")))
    assert json.loads(encode(of(0, source="\udcff")))["source"] == "\udcff"
