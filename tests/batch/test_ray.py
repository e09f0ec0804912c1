"""The engine of a cluster: the same files as the local one's, whatever dies meanwhile, on a real Ray."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from saliency.batch import BatchError, Progress, StoppedError, batch
from saliency.batch import engine_ray as ray_engine
from saliency.batch.batch_size import Plan
from saliency.batch.drawing import Task
from saliency.batch.engine_local import MOST_AHEAD
from saliency.batch.engine_ray import OnRay, on_ray
from saliency.batch.image_entry import Photo
from saliency.batch.output_folder import LOCK, Folder, locked
from saliency.batch.progress import Orders
from saliency.batch.ray_cluster import Share, connected
from saliency.batch.ray_feeder import Feeder
from saliency.batch.ray_worker import Done, Worker
from saliency.batch.run import Run
from saliency.batch.run_options import Job
from saliency.batch.sources import find
from saliency.batch.work_group import Work
from tests.batchwork import BLACK, Tiny, assert_same, photos, plain, quick, rows

# Ray builds its settings by way of names that it has deprecated itself.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\.")]

ASSETS = Path(__file__).parents[2] / "assets"
METHODS = ("grad_cam", "layer_cam")


class Deadly(Tiny):
    """Kills its process when it meets a black photo, so many times.

    Args:
        marks: A folder with a file for each process that was killed.
        kills: How many are.
    """

    def __init__(self, marks: Path, kills: int) -> None:
        super().__init__()
        self.marks, self.kills = str(marks), kills

    def forward(self, x: Tensor) -> Tensor:
        if bool((x.mean((1, 2, 3)) < -0.99).any()) and len(list(Path(self.marks).iterdir())) < self.kills:
            Path(self.marks, str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


@pytest.fixture(scope="module")
def ray() -> Any:
    try:
        importlib.import_module("ray.data")
    except ImportError as error:
        what = f'the Ray engine is not tested: {error}; pip install "saliency-toolkit[ray]"'
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(what)
    return importlib.import_module("ray")


@pytest.fixture(scope="module")
def cluster(ray: Any) -> Iterator[Any]:
    """A cluster that the user is connected to."""
    before = signal.getsignal(signal.SIGTERM)
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=128 << 20,
    )
    try:
        yield ray
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, before)


@contextmanager
def opened(source: Path, out: Path, job: Job, **orders: Any) -> Iterator[Run]:
    """A run in a folder that is locked."""
    out.mkdir(exist_ok=True)
    found = find([str(source)], recursive=False, targets=None)
    with locked(out):
        run = Run(job, found, Folder(out), Orders(**{"batch_size": 4, **orders}))
        try:
            yield run
        finally:
            run.manifest.close()


def on_cluster(source: Path, out: Path, job: Job, **orders: Any) -> Run:
    """A whole run on Ray, by two workers."""
    with opened(source, out, job, **orders) as run, on_ray("cpu", 2) as engine:
        run.work(engine, engine.lanes, engine.most)
        run.finish()
    return run


def processes() -> set[int]:
    """The processes of Ray's workers, but for those that are dead and waited for."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "cmdline").read_bytes().startswith(b"ray::"):
                found.add(int(path.name))
        except OSError:
            continue
    return found


def wait_until_gone(before: set[int]) -> set[int]:
    """Those that are there after some time and were not before."""
    end = time.monotonic() + 20
    while (left := processes() - before) and time.monotonic() < end:
        time.sleep(0.05)
    return left


# The same files ------------------------------------------------------------------------------------------------------


def test_real_photos_make_the_same_folder_as_on_the_local_engine_and_ray_is_left_as_it_was(
    ray: Any, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    for number, path in enumerate([*ASSETS.glob("*.jpg"), *ASSETS.glob("c*.jpg")]):
        shutil.copyfile(path, tmp_path / "in" / f"{number}.jpg")
    (tmp_path / "in" / "broken.jpg").write_bytes(b"\xff\xd8\xff")
    job = Job(model="efficientnet_lite0", methods=METHODS, maps=True)
    batch(tmp_path / "in", tmp_path / "local", job.model, METHODS, maps=True, batch_size=4, workers=2)
    before, handler = processes(), signal.getsignal(signal.SIGTERM)
    assert not ray.is_initialized()
    on_cluster(tmp_path / "in", tmp_path / "out", job)
    assert not ray.is_initialized()
    assert signal.getsignal(signal.SIGTERM) is handler
    assert wait_until_gone(before) == set()
    assert_same(tmp_path / "out", tmp_path / "local")
    assert [row["error_kind"] for row in rows(tmp_path / "out")].count("ImageError") == 1


def test_a_worker_that_is_killed_amid_a_group_costs_nothing(cluster: Any, tmp_path: Path) -> None:
    photos(tmp_path / "in", 20)
    plain(tmp_path / "in" / "09.png", BLACK)
    (tmp_path / "marks").mkdir()
    job = Job(model=Deadly(tmp_path / "marks", 1), methods=METHODS, maps=True)
    on_cluster(tmp_path / "in", tmp_path / "out", job)
    killed = [int(path.name) for path in (tmp_path / "marks").iterdir()]
    assert len(killed) == 1
    assert os.getpid() not in killed
    assert cluster.is_initialized()
    quick(tmp_path / "in", tmp_path / "local", model=job.model, methods=METHODS, maps=True)
    assert_same(tmp_path / "out", tmp_path / "local")


def test_photos_that_kill_every_worker_stop_the_run_which_goes_on_without_them(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos(tmp_path / "in", 12)
    plain(tmp_path / "in" / "09.png", BLACK)
    (tmp_path / "marks").mkdir()
    monkeypatch.setattr(ray_engine, "MOST_TRIES", 1)
    job = Job(model=Deadly(tmp_path / "marks", 1), methods=METHODS)
    with pytest.raises(StoppedError, match=r"1 workers died of the same photos: .*08\.png and 3 more; what is done"):
        on_cluster(tmp_path / "in", tmp_path / "out", job)
    assert {row["index"] for row in rows(tmp_path / "out")} <= set(range(8))
    quick(tmp_path / "in", tmp_path / "out", model=job.model, methods=METHODS)
    quick(tmp_path / "in", tmp_path / "local", model=job.model, methods=METHODS)
    assert_same(tmp_path / "out", tmp_path / "local")


def test_a_run_that_is_broken_off_ends_its_workers_and_is_gone_on_with_by_either_engine(
    cluster: Any, tmp_path: Path
) -> None:
    photos(tmp_path / "in", 40)

    def break_off(progress: Progress) -> None:
        if progress.fresh:
            raise StoppedError("enough")

    job = Job(model=Tiny(), methods=METHODS, maps=False)
    with pytest.raises(StoppedError, match="enough"):
        on_cluster(tmp_path / "in", tmp_path / "out", job, on_progress=break_off)
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert 0 < len(rows(tmp_path / "out")) < 80
    done = on_cluster(tmp_path / "in", tmp_path / "out", job, limit=30).manifest.standing.done
    assert len(done) == 30
    unchanged = {path for path, written in made.items() if path.suffix == ".png" and path.stat().st_mtime_ns == written}
    assert len(unchanged) >= 4
    quick(tmp_path / "in", tmp_path / "out", methods=METHODS)
    quick(tmp_path / "in", tmp_path / "local", methods=METHODS)
    assert_same(tmp_path / "out", tmp_path / "local")


def test_what_memory_has_no_room_for_is_halved_and_the_plan_knows(cluster: Any, tmp_path: Path) -> None:
    photos(tmp_path / "in", 20)
    on_cluster(tmp_path / "in", tmp_path / "out", Job(model=Tiny(most=3), maps=True), batch_size=8)
    about = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert about["batch_size"] == 2
    assert about["batches"][0] == [0, 2]
    quick(tmp_path / "in", tmp_path / "local", batch_size=2, maps=True)
    assert [row["score"] for row in rows(tmp_path / "out")] == [row["score"] for row in rows(tmp_path / "local")]


def test_more_workers_than_there_is_room_for_are_refused(cluster: Any) -> None:
    with pytest.raises(BatchError, match="3 workers: the Ray cluster has 2 processors and 0 GPUs"), on_ray("cpu", 3):
        pass


# Without a cluster ---------------------------------------------------------------------------------------------------


def test_without_ray_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BatchError, match=r'pip install "saliency-toolkit\[ray\]"'), on_ray():
        pass


def test_a_cluster_that_cannot_be_reached_is_named(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    asked: list[Any] = []

    def init(**options: Any) -> None:
        asked.append(options["address"])
        raise ConnectionError("nobody answers")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(BatchError, match=r"RAY_ADDRESS=127\.0\.0\.1:1 cannot be reached: nobody answers"), on_ray():
        pass
    assert asked == ["127.0.0.1:1"]


def test_sigterm_stays_what_it_was_while_ray_runs(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "init", lambda **options: signal.signal(signal.SIGTERM, lambda number, frame: None))
    before = signal.getsignal(signal.SIGTERM)
    with connected(2):
        assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("resources", "device", "workers", "expected"),
    [
        ({"CPU": 8.0}, "auto", None, Share(actors=8)),
        ({"CPU": 8.0}, "cpu", 3, Share(actors=3)),
        ({"CPU": 64.0, "GPU": 4.0}, "auto", None, Share(actors=4, cpus=8, gpus=1, calls=2)),
        ({"CPU": 6.0, "GPU": 2.0}, "cuda", 1, Share(actors=1, cpus=3, gpus=1, calls=2)),
        ({"CPU": 64.0, "GPU": 4.0}, "cpu", None, Share(actors=64)),
    ],
)
def test_there_is_an_actor_per_gpu_or_per_processor(
    resources: dict[str, float], device: str, workers: int | None, expected: Share
) -> None:
    assert Share.of(resources, device, workers) == expected


@pytest.mark.parametrize(
    ("resources", "device", "message"),
    [
        ({"CPU": 8.0}, "cuda", "has no GPU"),
        ({"CPU": 8.0, "GPU": 2.0}, "cuda:0,cuda:1", "each worker gets a GPU of its own"),
        ({}, "cpu", "has 0 processors and 0 GPUs"),
    ],
)
def test_what_a_cluster_does_not_have_is_said(resources: dict[str, float], device: str, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        Share.of(resources, device, None)


def test_the_feeder_keeps_what_is_not_done_and_hands_it_out_again() -> None:
    async def fed() -> None:
        feeder = Feeder()
        waiting = asyncio.create_task(feeder.take(0))
        await asyncio.sleep(0)
        assert not waiting.done()
        await feeder.put(0, b"zero")
        await feeder.put(1, b"one")
        assert await waiting == b"zero"
        assert [await feeder.begin(0), await feeder.begin(0), await feeder.begin(1)] == [1, 2, 1]
        await feeder.forget(0)
        # A reader that has died begins again: of what is done it gets nothing, of the rest all.
        assert [await feeder.take(0), await feeder.take(1)] == [b"", b"one"]
        await feeder.end()
        assert await feeder.take(2) is None
        await feeder.stop()
        assert await feeder.begin(1) == 0

    asyncio.run(fed())


class Calls(list[Any]):
    """A method of an actor that only notes what it is called with."""

    def remote(self, *arguments: Any) -> None:
        self.append(arguments)


class DeadError(Exception):
    """What Ray says of an actor that is dead."""


def driver(tmp_path: Path, groups: Iterator[Any], lanes: int = 1, stopping: Callable[[], bool] = lambda: False) -> Any:
    """The engine's part in this process, with a feeder that only takes notes."""
    feeder = SimpleNamespace(put=Calls(), end=Calls(), forget=Calls(), stop=Calls())
    ray = SimpleNamespace(
        cloudpickle=SimpleNamespace(dumps=lambda group: b"", loads=lambda done: done),
        exceptions=SimpleNamespace(RayError=DeadError),
        get=lambda answer: None,
    )
    work = Work(Job(model=Tiny()), tmp_path, torch.nn.Identity(), Plan(200, 1), groups, stopping)
    return ray_engine._Driver(ray, work, feeder, lanes)


def tasks(count: int) -> Iterator[Sequence[Task]]:
    return ([Task(number, Photo(str(number), str(number)), ("grad_cam",))] for number in range(count))


def table(*done: Done) -> dict[str, Any]:
    return {"done": SimpleNamespace(to_pylist=lambda: list(done))}


@pytest.mark.parametrize("lanes", [1, 2, 5])
def test_groups_are_asked_for_only_as_results_come_back(lanes: int, tmp_path: Path) -> None:
    back: list[int] = []
    ahead: list[int] = []
    behind: list[int] = []

    def groups() -> Iterator[Sequence[Task]]:
        for number, group in enumerate(tasks(200)):
            ahead.append(number + 1 - len(back))
            behind.append(number - min(set(range(200)) - set(back)))
            yield group

    def results() -> Iterator[dict[str, Any]]:
        # The first of those that are under way comes back only when nothing else can.
        while True:
            under = [number for number, _ in local.feeder.put if number not in back]
            back.append(under[1] if len(under) > 1 else under[0])
            yield table(Done(back[-1]))

    local = driver(tmp_path, groups(), lanes)
    assert len(list(local.run(results()))) == 200
    assert sorted(back) == list(range(200))
    assert max(ahead) <= 2 * lanes + 2
    assert max(behind) <= MOST_AHEAD * (lanes + 1)
    assert len(local.feeder.end) == 1


def test_no_group_is_begun_once_the_run_is_to_stop(tmp_path: Path) -> None:
    pressed = False

    def results() -> Iterator[dict[str, Any]]:
        nonlocal pressed
        for number in range(4):
            pressed = True
            yield table(Done(number))

    local = driver(tmp_path, tasks(100), stopping=lambda: pressed)
    assert len(list(local.run(results()))) == 4
    assert len(local.feeder.put) == 4


def test_the_plan_hears_of_halves_before_the_rows_are_passed_on(tmp_path: Path) -> None:
    plan = Plan(8, 8)
    group = [Task(number, Photo("", ""), ()) for number in plan.next() or ()]
    local = driver(tmp_path, iter([group]))
    local.work = replace(local.work, plan=plan)
    for _ in local.run(iter([table(Done(0, halved=[range(8), range(4)]))])):
        assert plan.pieces == [(0, 2), (4, 4)]
    assert plan.settled == 2


def test_what_no_photo_is_to_blame_for_is_raised_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="in a worker"):
        list(driver(tmp_path, tasks(3)).run(iter([table(Done(0, error=ZeroDivisionError("in a worker")))])))


def test_where_ray_fails_the_run_can_be_gone_on_with(tmp_path: Path) -> None:
    def broken() -> Iterator[dict[str, Any]]:
        raise DeadError("\x1b[36mthe node died\x1b[39m\n  so and so\nNo module named 'saliency'\n")
        yield

    for results, why in (
        (broken(), "the node died: No module named 'saliency'; what is done is kept"),
        (iter(()), "it ended before all was done"),
    ):
        with pytest.raises(StoppedError, match=f"Ray has failed: {why}"):
            list(driver(tmp_path, tasks(3)).run(results))

    def dead(answer: object) -> None:
        raise DeadError("the feeder died")

    local = driver(tmp_path, tasks(3))
    local.ray.get = dead
    with pytest.raises(StoppedError, match="Ray has failed: the feeder died; what is done is kept"):
        list(local.run(iter(())))
    local.end(iter(()))


def test_a_worker_that_does_not_see_the_folder_of_the_run_says_so(ray: Any, tmp_path: Path) -> None:
    told = {"feeder": None, "threads": 1, "tries": 1, "out": str(tmp_path), "job": None, "device": "cpu"}
    for holder in (b"1", b"2"):
        done = Worker({**told, "holder": holder})._guarded(0, b"")
        assert isinstance(done.error, BatchError)
        assert "choose one for --out that all machines share" in str(done.error)
        (tmp_path / LOCK).write_bytes(b"1")


def test_a_model_that_cannot_be_sent_is_named() -> None:
    def refuse(job: Job) -> None:
        raise TypeError("cannot pickle '_thread.lock' object")

    engine = OnRay(SimpleNamespace(put=refuse), Share(actors=1))
    with pytest.raises(BatchError, match=r"Tiny cannot be sent to the workers: cannot pickle .* pass a model by name"):
        engine._sent(Job(model=Tiny()))
