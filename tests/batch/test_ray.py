"""Runs on a Ray cluster: the files of the local engine, also after workers die."""

from __future__ import annotations

import importlib
import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from saliency.batch import BatchError, Progress, StoppedError, batch, engines
from saliency.batch.drawing import ExplainMapper
from saliency.batch.engines import Actor, RayEngine, Resources, execute, open_ray
from saliency.batch.listing import ImageEntry
from saliency.batch.options import NetworkOptions, OutputOptions, RunOptions
from saliency.batch.plan import Plan
from saliency.batch.report import report
from saliency.batch.sources import find_images
from saliency.batch.store import LOCK, ManifestStore, locked, make_row
from saliency.cli import main
from saliency.errors import DependencyError
from tests.batchwork import BLACK, Tiny, assert_same, photos, plain, quick, rows

# Ray builds its settings by way of names that it has deprecated itself.
pytestmark = pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\.")

ASSETS = Path(__file__).parents[2] / "assets"
METHODS = ("grad_cam", "layer_cam")
PLAN = Plan([ImageEntry("0", "0")], {0: ("grad_cam",)}, [(0, 1)])


class Deadly(Tiny):
    """Kills its process at a black image, a given number of times.

    Args:
        marks: Folder with a file per killed process.
        kills: Number of processes to kill.
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
    """Connect to a cluster, as a user may have."""
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


def on_cluster(source: Path, out: Path, model: Any, workers: int = 1, **options: Any) -> None:
    """Run a batch on Ray. Each worker is a new process, which imports torch."""
    out.mkdir(exist_ok=True)
    given = {"model": model, "methods": METHODS, "batch_size": 4, **options}
    network, output, run = NetworkOptions.of(given), OutputOptions.of(given), RunOptions.of(given)
    with locked(out):
        store = ManifestStore(out, find_images([source]).entries, network, output, run)
        with open_ray("cpu", workers) as engine:
            execute(ExplainMapper(options=network, out=out, output=output), store, engine, run)
        store.finish(report)


def mapper(out: Path, model: Any, **options: Any) -> ExplainMapper:
    """Return the mapper of a run."""
    return ExplainMapper(options=NetworkOptions(model=model, **options), out=out, output=OutputOptions())


def child_processes() -> set[Any]:
    """Return the processes that this one has started, with theirs; other tests may run Ray at the same time."""
    return set(psutil.Process().children(recursive=True))


# The same files ------------------------------------------------------------------------------------------------------


def test_ray_writes_the_files_of_the_local_engine_and_is_unchanged(ray: Any, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number, path in enumerate([*ASSETS.glob("*.jpg"), *ASSETS.glob("c*.jpg")]):
        shutil.copyfile(path, tmp_path / "in" / f"{number}.jpg")
    (tmp_path / "in" / "broken.jpg").write_bytes(b"\xff\xd8\xff")
    batch(tmp_path / "in", tmp_path / "local", "efficientnet_lite0", METHODS, maps=True, batch_size=4, workers=2)
    before, handler = child_processes(), signal.getsignal(signal.SIGTERM)
    workers: set[Any] = set()
    assert not ray.is_initialized()

    def watch(progress: Progress) -> None:
        workers.update(child_processes() - before)

    on_cluster(tmp_path / "in", tmp_path / "out", "efficientnet_lite0", workers=2, maps=True, on_progress=watch)
    assert not ray.is_initialized()
    assert signal.getsignal(signal.SIGTERM) is handler
    assert len(workers) > 2
    assert psutil.wait_procs(workers, timeout=300)[1] == []
    assert_same(tmp_path / "out", tmp_path / "local")
    assert [row["error_kind"] for row in rows(tmp_path / "out")].count("ImageError") == 1


@pytest.mark.slow
def test_the_batch_of_a_killed_worker_is_repeated(cluster: Any, tmp_path: Path) -> None:
    photos(tmp_path / "in", 20)
    plain(tmp_path / "in" / "09.png", BLACK)
    (tmp_path / "marks").mkdir()
    model = Deadly(tmp_path / "marks", 1)
    on_cluster(tmp_path / "in", tmp_path / "out", model, workers=2, maps=True)
    killed = [int(path.name) for path in (tmp_path / "marks").iterdir()]
    assert len(killed) == 1
    assert os.getpid() not in killed
    assert cluster.is_initialized()
    quick(tmp_path / "in", tmp_path / "local", model=model, methods=METHODS, maps=True)
    assert_same(tmp_path / "out", tmp_path / "local")


@pytest.mark.slow
def test_images_that_kill_every_worker_stop_the_run_and_it_resumes(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos(tmp_path / "in", 12)
    plain(tmp_path / "in" / "09.png", BLACK)
    (tmp_path / "marks").mkdir()
    monkeypatch.setattr(engines, "MAX_TRIES", 1)
    model = Deadly(tmp_path / "marks", 1)
    with pytest.raises(StoppedError, match=r"1 workers died on the same images: .*08\.png and 3 more; finished images"):
        on_cluster(tmp_path / "in", tmp_path / "out", model)
    assert {row["index"] for row in rows(tmp_path / "out")} <= set(range(8))
    quick(tmp_path / "in", tmp_path / "out", model=model, methods=METHODS)
    quick(tmp_path / "in", tmp_path / "local", model=model, methods=METHODS)
    assert_same(tmp_path / "out", tmp_path / "local")


@pytest.mark.slow
def test_ray_adds_a_method_to_a_local_run_and_either_engine_resumes_it(cluster: Any, tmp_path: Path) -> None:
    photos(tmp_path / "in", 40)
    quick(tmp_path / "in", tmp_path / "out", methods=METHODS[:1])

    def break_off(progress: Progress) -> None:
        if progress.fresh:
            raise StoppedError("enough")

    added = METHODS[1:]
    with pytest.raises(StoppedError, match="enough"):
        on_cluster(tmp_path / "in", tmp_path / "out", Tiny(), methods=added, on_progress=break_off)
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.layer_cam.png")}
    assert 40 < len(rows(tmp_path / "out")) < 80
    on_cluster(tmp_path / "in", tmp_path / "out", Tiny(), methods=added, limit=30)
    assert [row["method"] for row in rows(tmp_path / "out")].count(*added) == 30
    assert any(path.stat().st_mtime_ns == written for path, written in made.items())
    quick(tmp_path / "in", tmp_path / "out", methods=added)
    quick(tmp_path / "in", tmp_path / "local", methods=METHODS)
    assert_same(tmp_path / "out", tmp_path / "local")


@pytest.mark.slow
def test_a_first_batch_that_does_not_fit_is_halved_and_the_size_is_stored(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos(tmp_path / "in", 20)
    monkeypatch.setattr(engines, "MAX_TRIES", 1)  # a batch that does not fit kills no worker
    on_cluster(tmp_path / "in", tmp_path / "out", Tiny(most=3), maps=True, batch_size=8)
    about = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert about["batch_sizes"] == [[0, 2]]
    quick(tmp_path / "in", tmp_path / "local", methods=METHODS, batch_size=2, maps=True)
    assert [row["score"] for row in rows(tmp_path / "out")] == [row["score"] for row in rows(tmp_path / "local")]


@pytest.mark.slow
def test_trust_cards_of_a_cluster_equal_those_of_this_machine(cluster: Any, tmp_path: Path) -> None:
    source = photos(tmp_path / "in", 1)[0]
    options: dict[str, Any] = {"methods": ("grad_cam",), "trust": True}
    on_cluster(source, tmp_path / "ray", Tiny(), **options)
    quick(source, tmp_path / "here", **options)
    (card,), (expected,) = (rows(tmp_path / name) for name in ("ray", "here"))
    assert card["trust"] == expected["trust"]
    assert (tmp_path / "ray" / card["card"]).stat().st_size == card["card_bytes"]


@pytest.mark.slow
def test_evaluate_measures_on_ray_as_it_does_here_and_either_resumes_the_other(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saliency.batch.network.load", lambda name, weights: Tiny())
    photos(tmp_path / "in", 3)
    (tmp_path / "in" / "broken.jpg").write_bytes(b"\xff\xd8\xff")
    (tmp_path / "boxes.json").write_text(json.dumps({f"0{number}.png": [5, 5, 30, 20] for number in range(3)}))

    def evaluated(out: str, *words: str) -> list[dict[str, Any]]:
        given = [
            str(tmp_path / "in"),
            "--objects",
            str(tmp_path / "boxes.json"),
            "--metrics",
            "deletion",
            "relevance_rank",
        ]
        options = ["--set", "steps=2", "--device", "cpu", "--workers", "1", "--out", str(tmp_path / out)]
        assert main(["evaluate", *given, *options, "--quiet", *words]) == 1
        results = json.loads((tmp_path / out / "evaluation.json").read_text())["results"]
        return [{**each, "seconds": None} for each in results]

    evaluated("ray", "--engine", "ray", "--method", "grad_cam")
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "ray" / "results").iterdir()}
    both = ("--method", "grad_cam", "layer_cam")
    assert evaluated("ray", *both) == evaluated("local", *both)
    assert len(written) == 3
    assert written == {path: path.stat().st_mtime_ns for path in written}


@pytest.mark.slow
def test_more_workers_than_processors_are_refused(cluster: Any) -> None:
    with pytest.raises(BatchError, match="3 workers: the Ray cluster has 2 CPU cores and 0 GPUs"), open_ray("cpu", 3):
        pass


# Without a cluster ---------------------------------------------------------------------------------------------------


def test_a_missing_ray_is_an_error_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(DependencyError, match=r'pip install "saliency-toolkit\[ray\]"'), open_ray():
        pass


def test_an_unreachable_cluster_is_named(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    asked: list[Any] = []

    def init(**options: Any) -> None:
        asked.append(options["address"])
        raise ConnectionError("nobody answers")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(BatchError, match=r"RAY_ADDRESS=127\.0\.0\.1:1 cannot be reached: nobody answers"), open_ray():
        pass
    assert asked == ["127.0.0.1:1"]


def test_ray_does_not_replace_the_handler_of_sigterm(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "init", lambda **options: signal.signal(signal.SIGTERM, lambda number, frame: None))
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    with open_ray("cpu", 2):
        assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("resources", "device", "workers", "expected"),
    [
        ({"CPU": 8.0}, "auto", None, Resources(actors=8)),
        ({"CPU": 8.0}, "cpu", 3, Resources(actors=3)),
        ({"CPU": 64.0, "GPU": 4.0}, "auto", None, Resources(actors=4, cpus=8, gpus=1)),
        ({"CPU": 6.0, "GPU": 2.0}, "cuda", 1, Resources(actors=1, cpus=3, gpus=1)),
        ({"CPU": 64.0, "GPU": 4.0}, "cpu", None, Resources(actors=64)),
    ],
)
def test_there_is_an_actor_per_gpu_or_per_processor(
    resources: dict[str, float], device: str, workers: int | None, expected: Resources
) -> None:
    assert Resources.of(resources, device, workers) == expected


@pytest.mark.parametrize(
    ("resources", "device", "message"),
    [
        ({"CPU": 8.0}, "cuda", "has no GPU"),
        ({"CPU": 8.0, "GPU": 2.0}, "cuda:0,cuda:1", "each worker has a GPU of its own"),
        ({}, "cpu", "has 0 CPU cores and 0 GPUs"),
    ],
)
def test_missing_resources_of_a_cluster_are_an_error(resources: dict[str, float], device: str, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        Resources.of(resources, device, None)


class DeadError(Exception):
    """The error that Ray raises for a dead actor."""


def engine(results: Callable[[], Iterator[Any]], monkeypatch: pytest.MonkeyPatch) -> RayEngine:
    """Return an engine with given results instead of those of a cluster."""
    ray = SimpleNamespace(
        cloudpickle=SimpleNamespace(dumps=lambda batch: b"", loads=lambda result: result),
        exceptions=SimpleNamespace(RayError=DeadError),
        put=lambda options: options,
    )
    monkeypatch.setattr(RayEngine, "_results", lambda *arguments: results())
    return RayEngine(ray, Resources(actors=1))


def executed(local: RayEngine, tmp_path: Path, is_interrupted: Callable[[], bool] = lambda: False) -> list[Any]:
    given = replace(mapper(tmp_path, Tiny()), is_interrupted=is_interrupted)
    return list(local.map(given, torch.nn.Identity(), PLAN))


def test_rows_come_back_image_by_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [[make_row(index=index)] for index in range(3)]
    local = engine(lambda: iter([{"results": given[:2]}, {"results": given[2:]}]), monkeypatch)
    assert executed(local, tmp_path) == given


def test_no_more_batches_are_awaited_once_the_run_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [[make_row(index=index)] for index in range(3)]
    local = engine(lambda: iter([{"results": given[:2]}, {"results": given[2:]}]), monkeypatch)
    assert executed(local, tmp_path, lambda: True) == given[:2]


def test_an_error_that_no_image_caused_is_raised_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = engine(lambda: iter([{"results": ZeroDivisionError("in a worker")}]), monkeypatch)
    with pytest.raises(ZeroDivisionError, match="in a worker"):
        executed(local, tmp_path)


def test_a_run_can_be_resumed_after_ray_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[dict[str, Any]]:
        raise DeadError("\x1b[36mthe node died\x1b[39m\n  so and so\nNo module named 'saliency'\n")
        yield

    message = "Ray failed: the node died: No module named 'saliency'; finished images are kept"
    with pytest.raises(StoppedError, match=message):
        executed(engine(broken, monkeypatch), tmp_path)


def test_a_worker_that_sees_another_folder_is_an_error(
    ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "get", lambda shared: shared)
    for holder in (b"1", b"2"):
        actor = Actor((mapper(tmp_path, "tiny"), Tiny()), holder, Resources(actors=1), 1)
        with pytest.raises(BatchError, match="choose a folder for --out that all machines share"):
            actor._explain(next(iter(PLAN)), "attempts")
        (tmp_path / LOCK).write_bytes(b"1")


def test_an_error_of_a_worker_that_cannot_start_is_returned_and_not_raised(
    ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "get", lambda shared: shared)
    shared = mapper(tmp_path, "tiny", methods=("no_method",)), Tiny()
    returned = Actor(shared, b"", Resources(actors=1), 1)({"batch": ray.cloudpickle.dumps([]), "attempts": "attempts"})
    assert "no_method" in str(ray.cloudpickle.loads(returned["results"]))


def test_a_model_that_cannot_be_pickled_is_named() -> None:
    def refuse(shared: object) -> None:
        raise TypeError("cannot pickle '_thread.lock' object")

    local = RayEngine(SimpleNamespace(put=refuse), Resources(actors=1))
    with pytest.raises(BatchError, match=r"Tiny must be picklable for Ray: cannot pickle"):
        local._share(mapper(Path(), Tiny()), torch.nn.Identity())
