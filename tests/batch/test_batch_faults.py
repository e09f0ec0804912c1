"""Faults of a batch run: kills, full disks, permissions, unreadable images, NaN, lack of memory; none is simulated."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import unicodedata
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from saliency import Explanation, GradCAM
from saliency.batch import BatchError, Progress, StoppedError
from saliency.batch.drawing import write_file
from saliency.batch.listing import ImageEntry, with_names
from saliency.batch.network import LoadedImage, Network, trust_card
from saliency.batch.options import NetworkOptions
from saliency.batch.plan import BatchSlot
from saliency.batch.sources import find_images
from saliency.errors import ImageError
from tests.batchwork import (
    BLACK,
    WHITE,
    FailsOnce,
    Tiny,
    assert_same,
    contents,
    forked,
    kinds,
    noise,
    photos,
    plain,
    quick,
    rows,
    run_batch,
)

METHODS = ("grad_cam", "layer_cam")


def need(condition: bool, what: str) -> None:
    """Skip if this machine lacks a right, such as mounting a file system, which no installation provides."""
    if not condition:
        pytest.skip(what)


# Kills ------------------------------------------------------------------------------------------------------------


def assert_nothing_is_cut_off(out: Path) -> None:
    """Assert that every file with a final name is complete, and that rows name existing files only."""
    for path in drawn(out):
        if not path.name.endswith(".part"):
            with Image.open(path) as picture:
                picture.load()
    for path in (out / "maps").glob("*.safetensors"):
        assert Explanation.load(path).values.numel()
    for name in ("manifest.json",):
        if (out / name).exists():
            json.loads((out / name).read_text())
    text = (out / "manifest.jsonl").read_bytes() if (out / "manifest.jsonl").exists() else b""
    last = (-1, "")
    for line in text.splitlines(keepends=True):
        if line.endswith(b"\n"):
            row = json.loads(line)
            assert (row["index"], row["method"] or "") > last
            last = row["index"], row["method"] or ""
            assert all((out / row[key]).stat().st_size for key in ("overlay", "thumbnail", "heat", "map") if row[key])


@pytest.mark.slow
@pytest.mark.parametrize("maps", [False, True])
def test_a_run_killed_at_any_moment_resumes_to_the_same_folder(tmp_path: Path, maps: bool) -> None:
    source = tmp_path / "in"
    photos(source, 34)
    (source / "07.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    plain(source / "12.png", WHITE)
    (source / "31.png").unlink()
    (source / "31.png").mkdir()
    options = {"methods": METHODS, "maps": maps}
    quick(source, tmp_path / "whole", **options)
    child, out = forked(run_batch, source, tmp_path / "slow", options, True), tmp_path / "slow"
    start = locked_by(child, out)
    child.join()
    longest = time.monotonic() - start
    draw = random.Random(5)  # noqa: S311
    killed = at_work = finished = folder = 0
    while at_work < 6 or finished < 1:
        assert killed < 100
        out = tmp_path / f"out-{folder}"
        begun = time.time_ns()
        child = forked(run_batch, source, out, options, at_work < 6)
        if at_work < 6:
            locked_by(child, out)
            child.join(draw.uniform(0, longest))
        else:
            child.join()
        alive = child.is_alive()
        child.kill()
        child.join()
        killed += alive
        at_work += alive and any(path.stat().st_mtime_ns > begun for path in drawn(out))
        assert_nothing_is_cut_off(out)
        if not alive:
            assert child.exitcode == 0
            assert_same(out, tmp_path / "whole")
            finished += 1
            folder += 1


def test_a_run_that_was_killed_while_it_wrote_its_page_leaves_no_temporary_file(tmp_path: Path) -> None:
    photos(tmp_path / "in", 2)
    out = quick(tmp_path / "in", tmp_path / "out", methods=METHODS).folder
    before = contents(out)
    (out / f".{'0' * 32}.part").write_text("half of a page")
    quick(tmp_path / "in", out, methods=METHODS)
    assert contents(out) == before


@pytest.mark.slow
def test_images_done_before_a_kill_are_kept(tmp_path: Path) -> None:
    photos(tmp_path / "in", 24)
    quick(tmp_path / "in", tmp_path / "whole", methods=METHODS, maps=True)
    out = tmp_path / "out"
    child = forked(run_batch, tmp_path / "in", out, {"methods": METHODS, "maps": True}, True)
    while child.is_alive() and not ((out / "manifest.jsonl").exists() and len(whole_rows(out)) >= 16):
        time.sleep(0.001)
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    done = {row["index"] for row in whole_rows(out)}
    assert 8 <= len(done) < 24
    files = [out / row[key] for row in whole_rows(out) for key in ("overlay", "heat", "map")]
    written = [path.stat().st_mtime_ns for path in files]
    assert quick(tmp_path / "in", out, methods=METHODS, maps=True).fresh in (24 - len(done), 25 - len(done))
    assert [path.stat().st_mtime_ns for path in files] == written
    assert_same(out, tmp_path / "whole")


def whole_rows(out: Path) -> list[dict[str, Any]]:
    """Return the complete rows of the manifest."""
    return [json.loads(line) for line in (out / "manifest.jsonl").read_bytes().splitlines(True) if line.endswith(b"\n")]


def locked_by(child: Any, out: Path) -> float:
    """Return the time when a process has locked its folder."""
    while child.is_alive() and not (out / ".lock").exists():
        time.sleep(0.001)
    return time.monotonic()


def drawn(out: Path) -> list[Path]:
    """Return the image files of the run, also temporary ones."""
    return [path for name in ("overlays", "photos", "heat") for path in (out / name).rglob("*") if path.is_file()]


def test_a_truncated_row_is_written_again(tmp_path: Path) -> None:
    photos(tmp_path / "in", 6)
    quick(tmp_path / "in", tmp_path / "whole")
    for at in (-1, -30, -700):
        out = tmp_path / f"out{at}"
        shutil.copytree(tmp_path / "whole", out)
        data = (out / "manifest.jsonl").read_bytes()
        (out / "manifest.jsonl").write_bytes(data[:at])
        (out / "overlays" / f".{'0' * 32}.part").write_bytes(b"half of a")
        quick(tmp_path / "in", out)
        assert_same(out, tmp_path / "whole")


# Disks and permissions -----------------------------------------------------------------------------------------------


def mount(*words: str) -> bool:
    """Mount a file system, and return whether that worked."""
    return subprocess.run(["mount", *words], capture_output=True, check=False).returncode == 0  # noqa: S603, S607


@pytest.fixture
def small_disk() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp())
    done = os.geteuid() == 0 and mount("-t", "tmpfs", "-o", "size=96k", "saliency-test", str(folder))
    try:
        need(done, "a small tmpfs cannot be mounted here, so no disk can be full")
        yield folder
    finally:
        if done:
            subprocess.run(["umount", str(folder)], check=True)  # noqa: S603, S607
        folder.rmdir()


@pytest.mark.parametrize("maps", [False, True])
def test_a_full_disk_stops_the_run_and_it_resumes(tmp_path: Path, small_disk: Path, maps: bool) -> None:
    photos(tmp_path / "in", 20)
    quick(tmp_path / "in", tmp_path / "whole", methods=METHODS, maps=maps)
    out = small_disk / "out"
    stops = []
    for size in ("96k", "160k", "240k", "64m"):
        assert mount("-o", f"remount,size={size}", str(small_disk))
        try:
            quick(tmp_path / "in", out, methods=METHODS, maps=maps)
        except StoppedError as error:
            stops.append(str(error))
        assert_nothing_is_cut_off(out)
    assert len(stops) >= 2
    assert all("No space left on device" in each for each in stops)
    assert all("free disk space, and run the command again" in each for each in stops)
    assert_same(out, tmp_path / "whole")


def test_no_row_is_written_before_its_maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        if path.suffix == ".safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_file(path, content)

    photos(tmp_path / "in", 4)
    monkeypatch.setattr("saliency.batch.drawing.write_file", full)
    with pytest.raises(StoppedError, match="free disk space"):
        quick(tmp_path / "in", tmp_path / "out", maps=True)
    assert not (tmp_path / "out" / "manifest.jsonl").exists()


def as_nobody(source: Path, folder: Path, answer: Connection) -> None:
    """Send what runs without rights report of folders and of an unreadable image."""
    warm = Path(tempfile.mkdtemp())
    quick(source, warm, limit=1)  # imports what it can import no more as nobody
    shutil.rmtree(warm)
    # The parts of the page lie in the package, which root may keep to itself.
    sys.modules["saliency.batch.report"].report = lambda folder: folder / "index.html"  # type: ignore[attr-defined]
    os.setgid(65534)
    os.setuid(65534)
    said = []
    for name in ("closed", "half", "open"):
        try:
            summary = quick(source, folder / name / "out")
            said.append(str([row["error"] for row in rows(summary.folder)]))
        except StoppedError as error:
            said.append(str(error))
    answer.send(said)


def test_missing_permissions_of_folder_and_image_are_reported() -> None:
    need(os.geteuid() == 0, "only root can become a user without rights")
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        photos(folder / "in", 3)
        (folder / "in" / "01.png").chmod(0)
        for name in ("closed", "half", "open"):
            (folder / name / "out").mkdir(parents=True)
        (folder / "half" / "out").chmod(0o777)
        (folder / "half" / "out" / "overlays").mkdir()  # which nobody may write into
        (folder / "open" / "out").chmod(0o777)
        here, there = Pipe()
        child = forked(as_nobody, folder / "in", folder, there)
        closed, half, allowed = here.recv() if here.poll(300) else ("", "", "")
        child.join()
        assert closed == (
            f"{folder}/closed/out cannot be written to: Permission denied; finished images are kept: check the folder, "
            "and run the command again"
        )
        assert "Permission denied" in half
        assert "free disk space" not in half
        assert allowed == "[None, 'cannot be read: Permission denied', None]"
        # What the closed folder stopped goes on where it is opened.
        (folder / "half" / "out" / "overlays").chmod(0o777)
        (folder / "in" / "01.png").chmod(0o644)
        quick(folder / "in", folder / "half" / "out")
        quick(folder / "in", folder / "whole")
        assert_same(folder / "half" / "out", folder / "whole")
    finally:
        shutil.rmtree(folder)


def test_a_second_run_is_refused_and_a_crash_leaves_no_lock(tmp_path: Path) -> None:
    photos(tmp_path / "in", 8)
    refusals: list[str] = []

    def second(progress: object) -> None:
        with suppress(StoppedError):
            try:
                quick(tmp_path / "in", tmp_path / "out")
            except BatchError as error:
                refusals.append(str(error))

    quick(tmp_path / "in", tmp_path / "out", on_progress=second)
    assert len(refusals) == 8
    assert f"is in use by another run (process {os.getpid()})" in refusals[0]
    child = forked(run_batch, tmp_path / "in", tmp_path / "killed", {"methods": METHODS})
    while child.is_alive() and not (tmp_path / "killed" / ".lock").exists():
        time.sleep(0.001)
    child.kill()
    child.join()
    assert quick(tmp_path / "in", tmp_path / "killed", methods=METHODS).done == 8


# Unreadable images ---------------------------------------------------------------------------------------------------


def bomb(path: Path) -> None:
    """Write a PNG whose header promises more pixels than fit into memory."""
    Image.new("1", (1, 1)).save(path, format="PNG")
    data = bytearray(path.read_bytes())
    data[16:24] = (60000).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    path.write_bytes(data)


def test_every_kind_of_unreadable_image_is_a_row_with_the_reason(tmp_path: Path) -> None:
    source = tmp_path / "in"
    photos(source, 4)
    good = (source / "00.png").read_bytes()
    (source / "a truncated.png").write_bytes(good[: len(good) // 2])
    (source / "b empty.jpg").touch()
    (source / "c text.png").write_text("no picture")
    bomb(source / "d bomb.png")
    (source / "e folder.png").mkdir()
    (source / "f dangling.png").symlink_to("nowhere")
    (source / "g loop.png").symlink_to("g loop.png")
    os.mkfifo(source / "h fifo.png")
    Image.fromarray(np.zeros((4, 4), np.float32)).save(source / "i float.tif")
    summary = quick(source, tmp_path / "out", methods=METHODS)
    made = rows(tmp_path / "out")
    assert summary.failed == 9
    assert [row["method"] for row in made if row["error"] is None] == list(METHODS) * 4
    reasons = {row["id"][0]: row["error"] for row in made if row["error"] is not None}
    expected = {
        "a": "damaged",
        "b": "is empty",
        "c": "is not an AVIF, BMP",
        "d": "60000 x 60000 pixels, more than the limit",
        "e": "is a folder",
        "f": "No such file",
        "g": "symbolic links",
        "h": "not a regular file",
        "i": "floating-point",
    }
    assert reasons.keys() == expected.keys()
    assert [kind for kind, reason in reasons.items() if expected[kind] not in reason] == []
    assert all(str(source) not in reason for reason in reasons.values())
    assert {row["error_kind"] for row in made} == {None, "ImageError"}
    assert all(row["method"] is None and row["overlay"] is None for row in made if row["error"])


def test_an_image_deleted_after_listing_is_a_row(tmp_path: Path) -> None:
    photos(tmp_path / "in", 30)

    def vanish(progress: object) -> None:
        (tmp_path / "in" / "29.png").unlink(missing_ok=True)

    quick(tmp_path / "in", tmp_path / "out", batch_size=1, workers=1, on_progress=vanish)
    assert kinds(tmp_path / "out") == [None] * 29 + ["ImageError"]
    assert "No such file" in rows(tmp_path / "out")[-1]["error"]


def test_an_unreadable_image_does_not_change_the_others(tmp_path: Path) -> None:
    photos(tmp_path / "in", 8)
    shutil.copytree(tmp_path / "in", tmp_path / "bad")
    (tmp_path / "bad" / "02.png").write_bytes(b"")
    model = Tiny()
    for name in ("in", "bad"):
        model.sizes.clear()
        quick(tmp_path / name, tmp_path / f"out-{name}", model=model, maps=True, batch_size=8)
        assert 8 in model.sizes
        assert 7 not in model.sizes
    one, two = contents(tmp_path / "out-in"), contents(tmp_path / "out-bad")
    drawn = {name for name in one if name.startswith(("overlays/", "heat/", "thumbnails/")) and "/02." not in name}
    assert drawn == {name for name in two if name.startswith(("overlays/", "heat/", "thumbnails/"))}
    assert all(one[name] == two[name] for name in drawn)


def test_a_nan_map_fails_only_its_image(tmp_path: Path) -> None:
    photos(tmp_path / "in", 8)
    plain(tmp_path / "in" / "05.png", WHITE)
    quick(tmp_path / "in", tmp_path / "out", model=Tiny(nan_on_white=True), methods=METHODS)
    assert kinds(tmp_path / "out") == [None] * 10 + ["NonFiniteError"] * 2 + [None] * 4
    assert "not finite" in rows(tmp_path / "out")[10]["error"]
    quick(tmp_path / "in", tmp_path / "sound", methods=METHODS)
    ours, theirs = rows(tmp_path / "out"), rows(tmp_path / "sound")
    assert [each["score"] for each in ours[:10]] == pytest.approx([each["score"] for each in theirs[:10]], rel=1e-5)


def test_an_error_in_a_batch_fails_only_the_image_that_caused_it(tmp_path: Path) -> None:
    photos(tmp_path / "in", 8)
    plain(tmp_path / "in" / "06.png", BLACK)
    model = Tiny(error_on_black=True)
    quick(tmp_path / "in", tmp_path / "out", model=model, workers=1)
    assert kinds(tmp_path / "out") == [None] * 6 + ["ModelError", None]
    assert rows(tmp_path / "out")[6]["error"].endswith("on cpu): a black photo is more than this model can bear")
    # The batch with the photo was run again one by one, the other one was not.
    assert [size for size in model.sizes if size > 1] == [4, 4]


def test_an_error_that_no_image_causes_is_in_the_rows_of_its_batch_and_in_the_summary(tmp_path: Path) -> None:
    photos(tmp_path / "in", 9)
    options: dict[str, Any] = {"methods": METHODS, "workers": 1, "maps": True}
    summary = quick(tmp_path / "in", tmp_path / "out", model=FailsOnce(), **options)
    (reason,) = summary.repeated
    assert reason.endswith("the driver was restarted")
    assert (summary.failed, summary.repeated[reason]) == (0, 4)
    marks = [row["repeated"] for row in rows(tmp_path / "out")]
    assert marks in ([reason] * 8 + [None] * 10, [None] * 8 + [reason] * 8 + [None] * 2)  # batches run in parallel
    again = quick(tmp_path / "in", tmp_path / "out", model=FailsOnce(), **options)
    assert (again.fresh, again.repeated) == (0, {})


def test_a_map_depends_on_its_position_in_the_batch_but_not_on_the_other_images(tmp_path: Path) -> None:
    """So a resumed run, whose images keep their batch and position, makes equal files; see docs/batch.md."""
    paths = photos(tmp_path / "in", 15)
    model = Tiny()
    network = Network(NetworkOptions(model=model), model)
    loaded = [network.load(BatchSlot(0, ImageEntry(str(path), path.name), ())) for path in paths]

    def values(batch: Sequence[LoadedImage]) -> list[Tensor]:
        found = []
        for results, _ in network.explain(batch):
            explanation = results["grad_cam"]
            assert isinstance(explanation, Explanation)
            found.append(explanation.values)
        return found

    expected = values(loaded[:8])
    others = values([*loaded[8:], loaded[7]])
    assert torch.equal(others[7], expected[7])
    for position, image in enumerate(loaded[:8]):
        alone, largest = values([image])[0], float(expected[position].abs().max())
        torch.testing.assert_close(alone, expected[position], rtol=0, atol=2e-6 * largest)


def test_a_first_batch_that_does_not_fit_is_halved(tmp_path: Path) -> None:
    photos(tmp_path / "in", 20)
    model = Tiny(most=3)
    summary = quick(tmp_path / "in", tmp_path / "out", model=model, batch_size=8, workers=1, maps=True)
    assert summary.failed == 0
    about = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert about["batch_sizes"] == [[0, 2]]
    quick(tmp_path / "in", tmp_path / "again", model=Tiny(), batch_size=2, maps=True)
    assert [row["score"] for row in rows(tmp_path / "out")] == [row["score"] for row in rows(tmp_path / "again")]


def test_a_size_that_was_halved_is_stored_before_the_first_row_and_kept(tmp_path: Path) -> None:
    photos(tmp_path / "in", 12)
    sizes: list[list[list[int]]] = []

    def look(progress: object) -> None:
        sizes.append(json.loads((tmp_path / "out" / "manifest.json").read_text())["batch_sizes"])

    quick(tmp_path / "in", tmp_path / "out", model=Tiny(most=3), batch_size=6, limit=2, on_progress=look)
    quick(tmp_path / "in", tmp_path / "out", model=Tiny(), batch_size=6, on_progress=look)
    assert sizes == [[[0, 3]]] * 12
    quick(tmp_path / "in", tmp_path / "whole", batch_size=3)
    assert [row["score"] for row in rows(tmp_path / "out")] == [row["score"] for row in rows(tmp_path / "whole")]


def run_with_less_memory(source: Path, out: Path, **options: Any) -> Tiny:
    """Explain 4 images in a batch, and then the others with memory for 2."""
    quick(source, out, batch_size=4, limit=4, maps=True)
    model = Tiny(most=2)
    quick(source, out, model=model, batch_size=4, maps=True, **options)
    return model


def test_a_later_batch_that_does_not_fit_is_halved_with_all_after_it(tmp_path: Path) -> None:
    photos(tmp_path / "in", 13)
    model = run_with_less_memory(tmp_path / "in", tmp_path / "out")
    assert kinds(tmp_path / "out") == [None] * 13
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["batch_sizes"] == [[0, 4], [4, 2]]
    assert [size for size in model.sizes if size == 2] == [2] * 4
    by_two = quick(tmp_path / "in", tmp_path / "two", batch_size=2, maps=True).folder
    assert rows(tmp_path / "out")[4]["score"] == rows(by_two)[4]["score"]
    for path in sorted((by_two / "maps").iterdir())[4:]:
        assert path.read_bytes() == (tmp_path / "out" / "maps" / path.name).read_bytes()


@pytest.mark.parametrize("last", [5, 6, 9])
def test_a_run_that_stops_after_halving_resumes_to_the_same_files(tmp_path: Path, last: int) -> None:
    def stop(progress: Progress) -> None:
        if progress.done == last:
            raise StoppedError("stopped")

    photos(tmp_path / "in", 13)
    run_with_less_memory(tmp_path / "in", tmp_path / "whole")
    with pytest.raises(StoppedError, match="stopped"):
        run_with_less_memory(tmp_path / "in", tmp_path / "out", on_progress=stop)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["batch_sizes"] == [[0, 4], [4, 2]]
    quick(tmp_path / "in", tmp_path / "out", batch_size=4, maps=True)  # with all memory
    assert_same(tmp_path / "out", tmp_path / "whole")


def test_a_part_of_the_images_that_is_explained_again_keeps_smaller_sizes_after_it(tmp_path: Path) -> None:
    photos(tmp_path / "in", 13)
    run_with_less_memory(tmp_path / "in", tmp_path / "out")
    noise(tmp_path / "in" / "01.png", 99)
    quick(tmp_path / "in", tmp_path / "out", model=Tiny(most=3), batch_size=4, maps=True)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["batch_sizes"] == [[0, 2], [4, 2]]


def test_an_image_that_does_not_fit_fails(tmp_path: Path) -> None:
    photos(tmp_path / "in", 3)
    quick(tmp_path / "in", tmp_path / "out", model=Tiny(most=0), layer="features")
    assert kinds(tmp_path / "out") == ["OutOfMemoryError"] * 3


def test_a_method_that_does_not_apply_leaves_the_others_their_shared_pass(tmp_path: Path) -> None:
    photos(tmp_path / "in", 12)
    model = Tiny()
    model.features[1] = __import__("torch").nn.SiLU()
    quick(tmp_path / "in", tmp_path / "out", model=model, methods=("guided_backprop", "grad_cam"), workers=1)
    made = rows(tmp_path / "out")
    assert kinds(tmp_path / "out") == ["NotApplicableError", None] * 12
    assert all(row["thumbnail"] for row in made)
    # Both share the first pass, and are asked for by themselves from then on.
    assert [size for size in model.sizes if size == 4] == [4] * (3 + 2 * 2)


# Names and sources ---------------------------------------------------------------------------------------------------


def test_hostile_names_stay_in_the_folder_and_unique(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    names: list[str | bytes] = [
        "a.jpg",
        "a.png",
        "A.png",
        "..png",
        "...png",
        "caf\u00e9.png",
        "cafe\u0301.png",
        "<img src=x onerror=alert(1)>.png",
        "line\nbreak.png",
        "quote\"'`.png",
        "tab\t.png",
        f"{'x' * 251}.png",
        f"{'é' * 125}.png",
        "con.png",
        " .png",
        b"\xff\xfe.png",
        "\u202egnp.png",
        "a.grad_cam.png",
    ]
    for number, name in enumerate(names):
        shutil.copyfile(noise(tmp_path / "one.png", number), source / os.fsdecode(name))
    for folder in ("sub", "sub.grad_cam.png", "deep/x", "deep/X"):
        noise(source / folder / "a.png", 90)
    summary = quick(source, tmp_path / "out", recursive=True)
    made = rows(tmp_path / "out")
    assert summary.failed == 1  # the folder called sub.grad_cam.png is no photo, but its photo is one
    hidden = {"..png", "...png"}
    assert len(made) == len(names) - len(hidden) + 4 + 1
    good = [row for row in made if row["error"] is None]
    for key in ("overlay", "heat", "thumbnail"):
        paths = [row[key] for row in good]
        assert len({unicodedata.normalize("NFC", path.casefold()) for path in paths}) == len(good)
        assert all(".." not in Path(path).parts and path.isprintable() for path in paths)
        assert not any(set('<>:"\\|?*\n\t') & set(path) for path in paths)
    outside = {path.name for path in tmp_path.iterdir()} - {"in", "out", "one.png"}
    assert outside == set()
    assert any(row["source"].endswith("\\xff\\xfe.png") for row in made)
    quick(source, tmp_path / "again", recursive=True)
    assert_same(tmp_path / "again", tmp_path / "out")


def test_shards_are_read_in_place(tmp_path: Path) -> None:
    shard = tmp_path / "data-0.tar"
    with tarfile.open(shard, "w") as tar:
        for number in range(5):
            tar.add(noise(tmp_path / "one.png", number), f"train/{number:04d}.png")
            (tmp_path / "note").write_text(str(number))
            tar.add(tmp_path / "note", f"train/{number:04d}.cls")
    (tmp_path / "one.png").unlink()
    quick(shard, tmp_path / "out")
    assert [row["target"] for row in rows(tmp_path / "out")] == [0, 1, 2, 3, 4]
    assert rows(tmp_path / "out")[2]["overlay"] == "overlays/data-0/train/0002.grad_cam.png"
    assert rows(tmp_path / "out")[2]["source"] == f"{shard}/train/0002.png"


def test_the_output_folder_is_not_a_source(tmp_path: Path) -> None:
    photos(tmp_path, 3)
    for _ in range(2):
        assert quick(tmp_path, tmp_path / "out", recursive=True).images == 3


def test_no_thread_is_left(tmp_path: Path) -> None:
    photos(tmp_path / "in", 3)
    (tmp_path / "in" / "01.png").write_bytes(b"")
    before = threading.active_count()
    with pytest.raises(StoppedError):
        quick(tmp_path / "in", tmp_path / "out", strict=True)
    assert threading.active_count() == before


def test_a_large_image_that_changes_during_the_run_is_an_error_and_not_a_map_on_another_image(tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    Image.new("RGB", (1500, 1400), "red").save(path)
    (entry,) = with_names(find_images(path).entries)
    loaded = Network(NetworkOptions(model=Tiny(), methods=("grad_cam",)), Tiny()).load(
        BatchSlot(0, entry, ("grad_cam",)), 2_000_000
    )
    assert loaded.image is None
    assert loaded.frame().image.getpixel((0, 0)) == (255, 0, 0)
    Image.new("RGB", (1500, 1400), "blue").save(path)
    os.utime(path, ns=(0, 0))
    for read in (loaded.open, loaded.frame):
        with pytest.raises(ImageError, match="changed during the run"):
            read()
    card = trust_card(GradCAM(Tiny()), loaded, None)
    assert isinstance(card, ImageError)
