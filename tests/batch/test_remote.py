"""Images at fsspec addresses are explained and measured like those of a folder; output at addresses is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from saliency.batch import BatchError
from saliency.batch.folder_evaluation import evaluate
from saliency.batch.sources import find_images
from saliency.errors import DependencyError
from tests.batchwork import Tiny, contents, photos, quick, rows

fsspec: Any = pytest.importorskip("fsspec")
BUCKET = "memory:///bucket"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Any]:
    """A store with two images, one below in a subfolder, a text and hidden files; the folder `in` has the same."""
    files = fsspec.filesystem("memory")
    _, second = photos(tmp_path / "in", 2)
    (tmp_path / "in" / "sub").mkdir()
    second.rename(tmp_path / "in" / "sub" / second.name)
    (tmp_path / "in" / ".hidden").mkdir()
    for name in ("notes.md", ".jpg", ".hidden/02.png"):
        (tmp_path / "in" / name).touch()
    files.put(str(tmp_path / "in") + "/", "/bucket/", recursive=True)
    yield files
    files.rm("/bucket", recursive=True)


def test_the_files_of_a_run_over_an_address_are_those_of_a_run_over_a_folder(store: Any, tmp_path: Path) -> None:
    quick(BUCKET, tmp_path / "out", recursive=True, maps=True)
    quick(tmp_path / "in", tmp_path / "local", recursive=True, maps=True)
    here, there = (
        {name: file for name, file in contents(tmp_path / out).items() if isinstance(file, bytes)}
        for out in ("out", "local")
    )
    names = [name for name in here if name.startswith(("overlays/", "maps/", "heat/", "thumbnails/"))]
    assert len(names) == 8
    assert {name: here[name] for name in names} == {name: there[name] for name in names}
    assert [row["source"] for row in rows(tmp_path / "out")] == [f"{BUCKET}/00.png", f"{BUCKET}/sub/01.png"]


def test_a_run_over_an_address_resumes_and_finds_new_changed_removed_and_damaged_files(
    store: Any, tmp_path: Path
) -> None:
    quick(BUCKET, tmp_path / "out", recursive=True)
    assert quick(BUCKET, tmp_path / "out", recursive=True).fresh == 0
    store.pipe("/bucket/00.png", store.cat("/bucket/sub/01.png"))
    store.pipe("/bucket/02.png", b"no image")
    store.rm("/bucket/sub/01.png")
    summary = quick(BUCKET, tmp_path / "out", recursive=True)
    assert (summary.fresh, summary.changed, summary.failed) == (2, 1, 1)
    assert summary.removed == (f"{BUCKET}/sub/01.png",)


def test_addresses_are_folders_files_patterns_and_rows_of_lists(store: Any, tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text(f"path,target\n{BUCKET}/sub/01.png,3\n")
    for source, expected in (
        (BUCKET, ["00.png"]),
        (f"{BUCKET}/sub/01.png", ["sub/01.png"]),
        (f"{BUCKET}/s*/*.png", ["sub/01.png"]),
        (tmp_path / "list.csv", ["sub/01.png"]),
    ):
        found = find_images([source]).entries
        assert [entry.path for entry in found] == [f"{BUCKET}/{name}" for name in expected]
        assert all(entry.open().size == (40, 30) for entry in found)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("memory://nothing", "no images at this address"),
        ("memory://bucket/list.csv", "lists, shards and volumes are read from local files"),
        ("nosuch://bucket", "Protocol not known: nosuch"),
    ],
)
def test_an_address_without_images_is_an_error_with_the_reason(source: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(BatchError, match=message):
        quick(source, tmp_path / "out")


def test_an_evaluation_measures_images_with_masks_at_addresses(store: Any, tmp_path: Path) -> None:
    Image.new("L", (40, 30), 255).save(tmp_path / "mask.png")
    store.put(str(tmp_path / "mask.png"), "/bucket/masks/00.png")
    masks = f"{BUCKET}/masks"
    evaluate(BUCKET, tmp_path / "out", Tiny(), metrics="relevance_rank", masks=masks, device="cpu", workers=1)
    results = json.loads((tmp_path / "out" / "evaluation.json").read_text())["results"]
    assert [result["image"] for result in results] == ["00"]


def test_output_at_an_address_is_refused_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos(tmp_path / "in", 1)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BatchError, match=r"s3:/bucket is an address.*choose a local or mounted folder"):
        quick(tmp_path / "in", Path("s3://bucket"))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_without_fsspec_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(DependencyError, match=r"saliency-toolkit\[remote\]"):
        find_images(["s3://bucket"])
