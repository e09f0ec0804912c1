"""The loop of a run, and the engines that run its batches: on this machine, or on a Ray cluster.

An engine maps a plan, and a store takes the rows.

On CPUs several networks run in parallel with one thread each, instead of one network with many threads. Threads then
do not wait for each other at the end of each layer, and loading and drawing use the idle time.

On a cluster, Ray Data maps the batches over actors that hold the model. The actors write the files into a folder that
all machines share. The rows return to the calling process, which writes the manifest. Ray restarts an actor that has
died, and repeats its batch.
"""

from __future__ import annotations

import copy
import importlib
import logging
import os
import queue
import re
import signal
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

import torch
from torch import nn

from ..attribution.allocator import keep_memory
from ..attribution.base import METHODS
from ..errors import SaliencyError, errors_as, optional_import
from ..model.call import bound
from .failures import BatchError, StoppedError, attempt, printable, sentence
from .network import BatchTooLargeError, LoadedImage, Network, find_devices, load_model, replicate
from .options import NetworkOptions, Progress, RunOptions, expected_errors
from .plan import BatchSlot, Plan
from .store import LOCK, Row, Store

MAX_PARALLEL = 8
"""Largest number of networks that run in parallel on CPUs. Each needs memory for one batch."""
BATCH_CPU, BATCH_ACCELERATOR = 8, 64
"""Default images per batch. Larger batches are not faster on CPUs."""
MOST_PIXELS = 2_000_000
"""Largest image, in pixels, that is kept for drawing. Larger images are decoded again, to limit memory use."""
MAX_TRIES = 4
"""Number of Ray actors that may die on the same batch before the run stops."""
MAX_CPUS = 8
"""Largest number of CPU cores of a Ray actor with a GPU, for loading and drawing."""
OBJECT_STORE = 256 << 20
"""Shared memory of a Ray cluster that this process starts, in bytes. A larger model is spilled to disk."""


def set_threads(count: int) -> None:
    """Set the number of threads of PyTorch for operations of the calling thread."""
    torch.get_num_threads()  # otherwise, the first operation takes over the number that any other thread set last
    torch.set_num_threads(count)


def count_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapper(ABC):
    """The work on each image, which an engine does in the threads and processes of its workers.

    Attributes:
        options: The model, the methods and the target.
        out: Folder of the run.
        is_interrupted: Returns whether to start nothing more for the images in progress.
        report: Called with a sentence about the preparation of the run.
    """

    options: NetworkOptions
    out: Path
    is_interrupted: Callable[[], bool] = bool
    report: Callable[[str], object] = str

    def check(self, *progress: object) -> None:
        """Raise KeyboardInterrupt if the run was interrupted. A listener of passes."""
        if self.is_interrupted():
            raise KeyboardInterrupt

    def warm(self, network: Network, batch: Sequence[LoadedImage]) -> None:
        """Run the passes of a batch, so that all programs of the run are compiled."""
        network.explain(batch)

    @abstractmethod
    def compute(self, network: Network, batch: Sequence[LoadedImage]) -> Sequence[Any]:
        """Run a network, which no other thread uses, on a batch. Return the input of `finish` for each image."""

    @abstractmethod
    def finish(self, loaded: LoadedImage, results: Any) -> list[Row]:
        """Return the rows of one image. This runs during the passes of other batches."""


class Worker:
    """Loads the images of a batch, and runs the steps of a mapper on them.

    Several threads may use it at once.

    Args:
        mapper: The work on each image.
        networks: Networks for the passes. A network runs one batch at a time.
        threads: Number of threads for loading and drawing.
    """

    def __init__(self, mapper: Mapper, networks: Sequence[Network], threads: int) -> None:
        self._mapper = mapper
        self._load = networks[0].load
        self._free: queue.SimpleQueue[Network] = queue.SimpleQueue()
        for network in networks:
            self._free.put(network)
        self.io = ThreadPoolExecutor(threads, "saliency-io", set_threads, (1,))

    def run(self, batch: Sequence[BatchSlot]) -> list[Future[list[Row]]]:
        """Compute a batch, and let threads finish its images. Return the future rows of every image."""
        loaded = list(self.io.map(lambda slot: self._load(slot, MOST_PIXELS), batch))
        network = self._free.get()
        try:
            with bound(compiles=False):  # tracing changes the state of the process
                results = self._mapper.compute(network, loaded)
        finally:
            self._free.put(network)
        return [self.io.submit(self._mapper.finish, *image) for image in zip(loaded, results, strict=True)]


class LocalEngine:
    """Engine that runs on this machine.

    Args:
        devices: Devices; one network runs on each.
        workers: Number of threads for loading and drawing. On a single CPU device also the number of networks that run
            in parallel, at most `MAX_PARALLEL`.

    Attributes:
        parallel: Number of batches that run in parallel.
        default_batch_size: Default number of images per batch, if there are enough for all parallel networks.
    """

    def __init__(self, devices: Sequence[torch.device], workers: int | None = None) -> None:
        self.devices = list(devices)
        on_cpu = all(device.type == "cpu" for device in devices)
        self.workers = workers or count_cores()
        self.parallel = min(self.workers, MAX_PARALLEL) if on_cpu and len(self.devices) == 1 else len(self.devices)
        self.default_batch_size = BATCH_CPU if on_cpu else BATCH_ACCELERATOR

    def map(self, mapper: Mapper, model: nn.Module, plan: Plan) -> Generator[list[Row], None, None]:
        """Yield the rows of each image, in the order of the images.

        Args:
            mapper: The work on each image.
            model: The model, on the CPU if it was loaded by name.
            plan: The batches. An image without methods is not explained and only keeps its position in the batch.

        Raises:
            BatchTooLargeError: A batch does not fit into memory. The rows of all earlier batches have been returned.
            StoppedError: The folder cannot be written to.
        """
        replicas = replicate(mapper.options, model, self.devices)
        networks = [replicas[index % len(replicas)] for index in range(self.parallel)]
        with ExitStack() as undo:
            undo.callback(torch.set_num_threads, torch.get_num_threads())
            threads = max(1, min(self.workers, count_cores()) // self.parallel)
            if mapper.options.compile:
                mapper.report("compiling the methods, up to some minutes")
                set_threads(threads)  # a program has as many threads as the thread that compiles it
                notes = [network.compile(plan, self.parallel, mapper.check, mapper.warm) for network in replicas]
                mapper.report(notes[0])
            worker = Worker(mapper, networks, max(2, self.workers))
            # One more thread than networks, to load the next batch.
            pool = ThreadPoolExecutor(self.parallel + 1, "saliency-batch", set_threads, (threads,))
            undo.callback(pool.shutdown, cancel_futures=True)
            undo.callback(worker.io.shutdown, cancel_futures=True)
            pending: deque[Future[list[Future[list[Row]]]]] = deque()
            for batch in plan:
                if mapper.is_interrupted():
                    break
                pending.append(pool.submit(worker.run, batch))
                if len(pending) > self.parallel + 1:
                    yield from _rows(pending.popleft().result())
            while pending:
                yield from _rows(pending.popleft().result())


class SequentialEngine:
    """Engine that explains one image after the other in the calling thread, so that Ctrl-C stops a slow method at once.

    Args:
        device: The device of the network.
    """

    parallel = default_batch_size = 1

    def __init__(self, device: torch.device) -> None:
        self.devices = [device]

    def map(self, mapper: Mapper, model: nn.Module, plan: Plan) -> Generator[list[Row], None, None]:
        """Yield the rows of each image, in the order of the images. See `LocalEngine.map`."""
        (network,) = replicate(mapper.options, model, self.devices)
        for slot in chain.from_iterable(plan):
            loaded = network.load(slot)
            yield mapper.finish(loaded, *mapper.compute(network, [loaded]))


def open_engine(options: NetworkOptions, run: RunOptions) -> AbstractContextManager[Engine]:
    """Return the engine of a run for a block; see `LocalEngine`, `find_devices` and `open_ray`."""
    if run.engine == "ray":
        if options.compile:
            raise BatchError("--compile (compile=True) is for this machine; leave it out, or use --engine local")
        return open_ray(options.device, run.workers)
    return nullcontext(LocalEngine(find_devices(options.device, options.model), run.workers))


def _rows(images: Iterable[Future[list[Row]]]) -> Iterator[list[Row]]:
    """Wait for the images of a batch, and yield the rows of each image that has rows."""
    return filter(None, (image.result() for image in images))


# Ray -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Resources of a cluster that the actors use.

    Attributes:
        actors: Number of actors.
        cpus: CPU cores per actor.
        gpus: GPUs per actor.
    """

    actors: int
    cpus: int = 1
    gpus: int = 0

    @classmethod
    def of(cls, available: dict[str, float], device: str, workers: int | None) -> Resources:
        """Choose one actor per GPU if there are any, else one per CPU core.

        Args:
            available: Resources of the cluster, as Ray names them.
            device: "auto", "cpu" or "cuda".
            workers: Number of actors; None for all that fit.

        Raises:
            BatchError: The cluster has no such device, or too few.
        """
        cpus, gpus = int(available.get("CPU", 0)), int(available.get("GPU", 0))
        if device not in ("auto", "cpu", "cuda"):
            raise BatchError(f'device "{device}": on Ray each worker has a GPU of its own; use auto, cpu or cuda')
        if device == "cuda" and not gpus:
            raise BatchError('device "cuda": the Ray cluster has no GPU; use cpu or auto')
        on_gpu = gpus > 0 and device != "cpu"
        most = gpus if on_gpu else cpus
        if (workers or 1) > most:
            raise BatchError(f"{workers or 1} workers: the Ray cluster has {cpus} CPU cores and {gpus} GPUs")
        cores = max(1, min(MAX_CPUS, cpus // gpus)) if on_gpu else 1
        return cls(actors=workers or most, cpus=cores, gpus=int(on_gpu))


@contextmanager
def open_ray(device: str = "auto", workers: int | None = None) -> Iterator[RayEngine]:
    """Connect to the Ray cluster of this process or at RAY_ADDRESS; if there is none, start one for the block.

    Args:
        device: "auto", "cpu" or "cuda".
        workers: Number of actors; by default one per GPU, or one per CPU core without GPUs.

    Raises:
        DependencyError: Ray is not installed.
        BatchError: The cluster cannot be reached or has no such device.
    """
    ray, _ = (optional_import(name, "ray", '--engine ray (engine="ray")') for name in ("ray", "ray.data"))
    with ExitStack() as undo:
        for name, level in (("ray.data", logging.WARNING), ("ray.data._internal.progress", logging.ERROR)):
            undo.callback(logging.getLogger(name).setLevel, logging.getLogger(name).level)
            logging.getLogger(name).setLevel(level)
        if not ray.is_initialized():
            _connect(ray, workers, undo)
        yield RayEngine(ray, Resources.of(ray.cluster_resources(), device, workers))


def _connect(ray: Any, workers: int | None, undo: ExitStack) -> None:
    """Connect to the cluster of RAY_ADDRESS, or start one on this machine."""
    address, options = os.environ.get("RAY_ADDRESS"), {}
    if not address:
        options = {"num_cpus": workers or count_cores(), "object_store_memory": OBJECT_STORE}
        if "RAY_USAGE_STATS_ENABLED" not in os.environ:
            os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
            undo.callback(os.environ.pop, "RAY_USAGE_STATS_ENABLED", None)
    undo.callback(ray.shutdown)
    # Ray replaces the SIGTERM handler that interrupts a run; restore it below.
    handler = signal.getsignal(signal.SIGTERM) if threading.current_thread() is threading.main_thread() else None
    try:
        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
        ray.init(address=address or "local", **options, **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        where = f"the cluster at RAY_ADDRESS={address} cannot be reached" if address else "Ray cannot be started"
        raise BatchError(f"{where}: {_in_one_line(error)}; check that it runs, or use --engine local") from error
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)


class RayEngine:
    """Engine that runs on a Ray cluster; created by `open_ray`.

    Args:
        ray: The module `ray`, connected to a cluster.
        resources: Resources that the actors use.
    """

    def __init__(self, ray: Any, resources: Resources) -> None:
        self._ray, self._resources = ray, resources
        self.parallel = resources.actors
        self.default_batch_size = BATCH_ACCELERATOR if resources.gpus else BATCH_CPU

    def map(self, mapper: Mapper, model: nn.Module, plan: Plan) -> Generator[list[Row], None, None]:
        """Yield the rows of each image, in the order of the images. See `LocalEngine.map`.

        Raises:
            StoppedError: Ray failed, or several actors died on the same images.
        """
        items = [{"batch": self._ray.cloudpickle.dumps(batch), "attempts": f".{uuid4().hex}.part"} for batch in plan]
        try:
            for row in self._results(self._share(mapper, model), items, mapper.out) if items else ():
                results = self._ray.cloudpickle.loads(row["results"])
                if isinstance(results, Exception):
                    raise results
                yield from results
                if mapper.is_interrupted():
                    return
        except self._ray.exceptions.RayError as error:
            raise StoppedError(
                f"Ray failed: {_in_one_line(error)}; finished images are kept: re-run to resume"
            ) from error

    def _share(self, mapper: Mapper, model: nn.Module) -> Any:
        """Put the mapper and the model into the shared memory of the cluster."""
        name = mapper.options.model_name
        with errors_as(BatchError, f"{name} must be picklable for Ray"):
            # The function `report` belongs to this process.
            mapper = replace(mapper, options=replace(mapper.options, model=name), report=str)
            return self._ray.put((mapper, copy.deepcopy(model).cpu()))

    def _results(self, shared: Any, items: list[dict[str, Any]], out: Path) -> Iterator[dict[str, bytes]]:
        """Map the batches over the actors, and yield the results of each batch, in order."""
        data, resources = self._ray.data, self._resources
        # One block per batch: its rows return as soon as the batch is done.
        batches = data.from_items(items, override_num_blocks=len(items))
        batches.context.execution_options.preserve_order = True
        batches.context.enable_progress_bars = batches.context.print_on_execution_start = False
        batches.context.execution_no_progress_timeout_s = -1  # a batch may take long
        results = batches.map(
            Actor,
            fn_constructor_args=(shared, (out / LOCK).read_bytes(), resources, MAX_TRIES),
            compute=data.ActorPoolStrategy(
                size=resources.actors,
                # With a GPU, images are loaded and drawn during the passes of another batch.
                max_concurrent_calls_per_actor=1 + resources.gpus,
                enable_true_multi_threading=resources.gpus > 0,
            ),
            num_cpus=resources.cpus,
            num_gpus=resources.gpus,
        )
        yield from results.iter_rows()


Engine: TypeAlias = LocalEngine | RayEngine | SequentialEngine
"""An engine."""


class Actor:
    """Ray actor that holds the model and explains batches.

    Args:
        shared: Ray reference to the mapper and the model.
        holder: Content of the lock file of the run.
        resources: Resources of the actors.
        max_tries: Number of actors that may die on the same batch.
    """

    def __init__(self, shared: Any, holder: bytes, resources: Resources, max_tries: int) -> None:
        ray = importlib.import_module("ray")
        self._pickle, self._holder, self._max_tries = ray.cloudpickle, holder, max_tries
        self._error: Exception | None = None
        # No other code uses this process, so process-wide settings are safe.
        keep_memory()
        try:
            mapper, model = ray.get(shared)
            self._out: Path = mapper.out
            network = Network(mapper.options, model.to("cuda" if resources.gpus else "cpu"))
            self._worker = Worker(mapper, [network], resources.cpus)
        except Exception as error:  # noqa: BLE001 - raised in __call__: Ray reports it after a minute, as its own bug
            self._error = error

    def __call__(self, row: dict[str, Any]) -> dict[str, bytes]:
        """Explain a batch. Return the pickled rows of every image, or the pickled error."""
        results = attempt(self._explain, self._pickle.loads(row["batch"]), row["attempts"])
        if isinstance(results, BaseException) and not isinstance(results, SaliencyError | BatchTooLargeError):
            results = StoppedError(f"{type(results).__name__}: {results}")  # not every error can be pickled
        return {"results": self._pickle.dumps(results)}

    def _explain(self, batch: Sequence[BatchSlot], counter: str) -> list[list[Row]]:
        """Explain a batch, unless the run has ended or too many actors have died on the batch.

        The size of the file `counter` is the number of actors that started the batch. The next run with work removes a
        leftover file. Ray Data repeats a batch without limit; its option `max_task_retries` is removed in Ray 2.64.
        That limit also counts batches that only wait for the dead actor, drops finished rows, and names no batch.
        """
        if self._error is not None:
            raise self._error
        self._require_lock()
        attempts = self._out / counter
        with attempts.open("ab") as file:
            file.write(b".")
        if attempts.stat().st_size > self._max_tries:
            names = [printable(slot.entry.source) for slot in batch if slot.methods]
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise StoppedError(
                f"{self._max_tries} workers died on the same images: {names[0]}{more}; finished images are kept: check "
                "the memory of the workers, use a smaller --batch-size, or leave these images out, and re-run to resume"
            )
        try:
            set_threads(1)
            return list(_rows(self._worker.run(batch)))
        finally:
            attempts.unlink(missing_ok=True)

    def _require_lock(self) -> None:
        """Raise BatchError if the output folder, as seen from this machine, is not locked by this run.

        A folder that is not shared would lose the files of this machine. Actors that outlive their run would write into
        the folder of the next one.
        """
        lock = self._out / LOCK
        if not lock.is_file() or lock.read_bytes() != self._holder:
            raise BatchError(
                f"{self._out} on {os.uname().nodename} is not the folder of this run, or the run has ended; "
                "choose a folder for --out that all machines share at the same path"
            )


def _in_one_line(error: BaseException) -> str:
    """Return the first and last line of an error. In Ray's errors, the last line often contains the cause."""
    lines = [line.strip() for line in re.sub(r"\x1b\[\d*m", "", str(error)).splitlines() if line.strip()]
    return ": ".join(dict.fromkeys([*lines[:1], *lines[-1:]])) or type(error).__name__


def execute(mapper: Mapper, store: Store, engine: Engine, options: RunOptions) -> None:
    """Compute the missing results of a store on an engine, and report each image.

    Args:
        mapper: The work on each image.
        store: The images and their results.
        engine: The engine.
        options: Options of the run.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed, or SIGTERM arrived and has the same handler.
        StoppedError: The folder cannot be written to, or an image failed in a strict run.
        SaliencyError: An option is invalid.
    """
    model = load_model(mapper.options)
    network = Network(mapper.options, model)
    network.require_preprocess(store.entries)
    store.prepare(network, engine.default_batch_size, engine.parallel)

    def report(note: str = "") -> None:
        if options.on_progress is not None:
            options.on_progress(Progress(store.done, store.total, store.fresh, len(store.failed), note))

    with interruption() if store.resumes else nullcontext(bool) as is_interrupted:
        mapper = replace(mapper, is_interrupted=is_interrupted, report=report)
        try:
            with closing(_compute(mapper, store, engine, model)) as images:
                for rows in images:
                    _require_success(mapper, store, rows, strict=options.strict)
                    store.append(rows)
                    report()
            if is_interrupted():
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            hint = "; re-run to resume" if store.resumes else ""
            raise KeyboardInterrupt(f"{store.done} of {store.total} images are done{hint}") from None


def _compute(mapper: Mapper, store: Store, engine: Engine, model: nn.Module) -> Generator[list[Row], None, None]:
    """Yield the rows of each image. If a batch does not fit into memory, continue with a plan of smaller batches."""
    while not mapper.is_interrupted():
        try:
            with closing(engine.map(mapper, model, store.plan())) as images:
                yield from images
            return
        except BatchTooLargeError:
            store.write_sizes(store.plan().halved().sizes)


def _require_success(mapper: Mapper, store: Store, rows: Sequence[Row], *, strict: bool) -> None:
    """Raise an error for failures that stop the run.

    Raises:
        BatchError: Invalid options caused the failures of the first images, so all images would fail.
        StoppedError: The image failed in a strict run.
    """
    expected = expected_errors(len(mapper.options.methods) == len(METHODS), mapper.options.detections)
    failed = [row for row in rows if row["error"] is not None and row["error_kind"] not in expected]
    has_succeeded = store.done > len(store.failed) or isinstance(store.entries[rows[0]["index"]].target, int | str)
    kinds = [None if row.get("overlay") else row["error_kind"] for row in rows]  # with an overlay, only its card failed
    if not has_succeeded and mapper.options.layer is not None and "LayerError" in kinds:
        raise BatchError(rows[kinds.index("LayerError")]["error"])
    if not has_succeeded and all(kind in ("MethodError", "TargetError") for kind in kinds):
        raise BatchError(rows[0]["error"])
    if failed and strict:
        reason = sentence(failed[0]["source"], failed[0]["method"], failed[0]["error"])
        raise StoppedError(f"{reason}; --strict (strict=True) stops at the first failure")


@contextmanager
def interruption() -> Iterator[Callable[[], bool]]:
    """Return a function that returns whether Ctrl-C was pressed, or SIGTERM arrived and has the same handler.

    The first interruption lets the images in progress finish, except those that a method explains in many passes. A
    second one raises KeyboardInterrupt at once.
    """
    pressed = False

    def handle(number: int, frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    is_main = threading.current_thread() is threading.main_thread()
    with ExitStack() as undo:
        for number in (signal.SIGINT, signal.SIGTERM):
            if is_main and signal.getsignal(number) is signal.default_int_handler:
                undo.callback(signal.signal, number, signal.signal(number, handle))
        yield lambda: pressed
