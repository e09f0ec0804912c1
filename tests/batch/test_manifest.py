"""The rows of the manifest."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from saliency.batch.store import Manifest, encode, make_row, read_rows

METHODS = ("one", "two")


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    (tmp_path / "x.png").write_text("x")
    found = Manifest(tmp_path, METHODS)
    found.read()
    return found


def of(index: int, method: str | None = "one", **more: Any) -> dict[str, Any]:
    return make_row(index=index, method=method, **more)


def stored(manifest: Manifest) -> list[dict[str, Any]]:
    return [row for row, _ in read_rows(manifest.path)]


def lines(manifest: Manifest) -> list[tuple[int, str]]:
    return [(row["index"], row["method"]) for row in stored(manifest)]


# Lines ---------------------------------------------------------------------------------------------------------------


def test_rows_come_back_as_they_were(manifest: Manifest) -> None:
    given = [of(0, source="é\u2028\n<b>\udc80"), of(0, "two", box=[0.5, 1.0, 2.0, 3.0]), of(1, None, error="no")]
    manifest.append(given)
    assert stored(manifest) == given
    assert manifest.path.read_bytes().count(b"\n") == 3
    assert manifest.failures(METHODS) == {(1, -1): "None"}


@pytest.mark.parametrize("damaged", [0, 1, 99, 100, 149])
@pytest.mark.parametrize("line", [b"{}\n", b"\xff\n", b"1, 2\n", b"{\n"])
def test_rows_end_before_the_first_damaged_line(manifest: Manifest, damaged: int, line: bytes) -> None:
    manifest.append([of(index) for index in range(150)])
    written = manifest.path.read_bytes().splitlines(keepends=True)
    manifest.path.write_bytes(b"".join([*written[:damaged], line, *written[damaged + 1 :]]))
    assert [row["index"] for row in stored(manifest)] == list(range(damaged))


@pytest.mark.parametrize("lost", [1, 5, 100])
def test_a_truncated_row_is_dropped_and_overwritten(manifest: Manifest, tmp_path: Path, lost: int) -> None:
    manifest.append([of(0), of(0, "two"), of(1)])
    os.truncate(manifest.path, manifest.path.stat().st_size - lost)
    again = Manifest(tmp_path, METHODS)
    again.read()
    assert lines(again) == [(0, "one"), (0, "two")]
    assert not again.is_done(1, "one")
    again.append([of(1)])
    assert lines(again) == [(0, "one"), (0, "two"), (1, "one")]


def test_rows_after_a_damaged_line_are_dropped(manifest: Manifest, tmp_path: Path) -> None:
    manifest.append([of(0), of(1)])
    data = manifest.path.read_bytes()
    for damage in (b"\0" * 10 + b"\n", b"[]\n", b"{}\n", b"\xff\n", encode(of(2))[:-1] + b"x\n"):
        manifest.path.write_bytes(encode(of(0)) + damage + data)
        again = Manifest(tmp_path, METHODS)
        again.read()
        assert manifest.path.read_bytes() == encode(of(0))


def test_spaces_around_a_row_are_no_damage(manifest: Manifest, tmp_path: Path) -> None:
    manifest.path.write_bytes(b" " + encode(of(0))[:-1] + b" \r\n" + encode(of(1)))
    Manifest(tmp_path, METHODS).read()
    assert lines(manifest) == [(0, "one"), (1, "one")]


def test_an_incomplete_row_is_damage(manifest: Manifest, tmp_path: Path) -> None:
    short = encode({key: value for key, value in of(1).items() if key != "settings"})
    manifest.path.write_bytes(encode(of(0)) + short + encode(of(2)))
    Manifest(tmp_path, METHODS).read()
    assert manifest.path.read_bytes() == encode(of(0))


def test_bytes_after_the_last_row_are_removed(manifest: Manifest, tmp_path: Path) -> None:
    manifest.append([of(0), of(0, "two")])
    with manifest.path.open("ab") as file:
        file.write(b"\0" * 100)
    Manifest(tmp_path, METHODS).read()
    assert manifest.path.read_bytes() == encode(of(0)) + encode(of(0, "two"))


def test_rows_with_missing_files_are_dropped_and_new_ones_sorted(manifest: Manifest, tmp_path: Path) -> None:
    there: dict[str, Any] = {"overlay": "x.png", "overlay_bytes": 1}
    rows = [
        of(0, **there),
        of(0, "two", overlay="y.png", overlay_bytes=1),
        of(1, **there),
        of(1, "two", thumbnail="z.png"),
    ]
    manifest.append(rows)
    again = Manifest(tmp_path, METHODS)
    again.read()
    assert lines(again) == [(0, "one"), (1, "one")]
    assert [again.is_done(0, method) for method in METHODS] == [True, False]
    again.append([of(0, "two"), of(1, "two")])
    assert not again.is_sorted()
    again.sort()
    assert lines(again) == [(0, "one"), (0, "two"), (1, "one"), (1, "two")]


def test_failures_are_dropped_for_a_retry(manifest: Manifest, tmp_path: Path) -> None:
    manifest.append([of(0, None, error="bad", error_kind="ImageError"), of(1), of(1, "two", error="bad")])
    again = Manifest(tmp_path, METHODS)
    again.read()
    assert all(again.is_done(0, method) for method in METHODS)
    assert again.failures(METHODS) == {(0, -1): "ImageError", (1, 1): "None"}
    assert again.failures(["one"]) == {(0, -1): "ImageError"}
    again.read(retry=(None, "two"))
    assert lines(again) == [(1, "one")]


def test_what_a_failed_write_left_is_removed(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullDisk(io.FileIO):
        def write(self, data: Any) -> int:
            super().write(data[:-200])
            raise OSError(28, "No space left on device")

    manifest.append([of(0)])
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, mode: FullDisk(path, mode))
        with pytest.raises(OSError, match="No space left"):
            manifest.append([of(1), of(2)])
    assert list(manifest.rows) == [(0, 0)]
    again = Manifest(tmp_path, METHODS)
    again.read()
    assert lines(again) == [(0, "one"), (1, "one")]
    assert manifest.path.read_bytes() == encode(of(0)) + encode(of(1))


def test_a_row_is_a_line_of_strict_json() -> None:
    with pytest.raises(ValueError, match="Out of range"):
        encode(of(0, score=float("nan")))
    assert json.loads(encode(of(0, source="\udcff")))["source"] == "\udcff"
