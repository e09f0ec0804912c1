"""Run a batch on a Ray cluster: Ray Data maps the batches over actors that hold the model.

The actors write the files into a folder that all machines share. The rows return to the calling process, which writes
the manifest. Ray restarts an actor that has died, and repeats its batch.
"""

from __future__ import annotations

import copy
import importlib
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import nn

from ..engine.allocator import keep_memory
from ..errors import SaliencyError
from .drawing import write_results
from .engine_local import count_cores, seconds_per_row
from .errors import BatchError, StoppedError, printable
from .manifest import Row
from .network import (
    BATCH_ACCELERATOR,
    BATCH_CPU,
    BatchTooLargeError,
    LoadedImage,
    Network,
    PictureBuffer,
    Results,
    RunContext,
    Task,
    load_model,
)
from .output_folder import LOCK

MAX_TRIES = 4
"""Number of actors that may die on the same batch before the run stops."""
MAX_CPUS = 8
"""Largest number of CPU cores of an actor with a GPU, for loading and drawing."""
OBJECT_STORE = 256 << 20
"""Shared memory of a cluster started here, in bytes. A large model that is passed as a module is spilled to disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Resources of a cluster that the actors use.

    Attributes:
        actors: Number of actors.
        cpus: CPU cores per actor.
        gpus: GPUs per actor.
        calls: Batches in flight per actor. With a GPU, images are loaded and drawn during the passes of another batch.
    """

    actors: int
    cpus: int = 1
    gpus: int = 0
    calls: int = 1

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
        if not on_gpu:
            return cls(actors=workers or most)
        return cls(actors=workers or most, cpus=max(1, min(MAX_CPUS, cpus // gpus)), gpus=1, calls=2)


@contextmanager
def open_ray(device: str = "auto", workers: int | None = None) -> Iterator[RayEngine]:
    """Connect to a Ray cluster: that of this process, that at RAY_ADDRESS, or one started here until the block ends.

    Args:
        device: "auto", "cpu" or "cuda".
        workers: Number of actors; by default one per GPU, or one per CPU core without GPUs.

    Raises:
        BatchError: Ray is not installed, or the cluster cannot be reached or has no such device.
    """
    ray = _import("ray")
    _import("ray.data")
    with ExitStack() as undo:
        for name, level in (("ray.data", logging.WARNING), ("ray.data._internal.progress", logging.ERROR)):
            undo.callback(logging.getLogger(name).setLevel, logging.getLogger(name).level)
            logging.getLogger(name).setLevel(level)
        if not ray.is_initialized():
            _connect(ray, workers, undo)
        yield RayEngine(ray, Resources.of(ray.cluster_resources(), device, workers))


def _connect(ray: Any, workers: int | None, undo: ExitStack) -> None:
    """Connect to the cluster of RAY_ADDRESS, or start one on this machine."""
    address = os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {"address": address}
    if not address:
        options = {"address": "local", "num_cpus": workers or count_cores(), "include_dashboard": False}
        options["object_store_memory"] = OBJECT_STORE
        if "RAY_USAGE_STATS_ENABLED" not in os.environ:
            os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
            undo.callback(os.environ.pop, "RAY_USAGE_STATS_ENABLED", None)
    undo.callback(ray.shutdown)
    # Ray replaces the SIGTERM handler that interrupts a run; restore it below.
    handler = signal.getsignal(signal.SIGTERM) if threading.current_thread() is threading.main_thread() else None
    try:
        ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        where = f"the cluster at RAY_ADDRESS={address} cannot be reached" if address else "Ray cannot be started"
        raise BatchError(f"{where}: {_in_one_line(error)}; check that it runs, or use --engine local") from error
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        install = 'pip install "saliency-toolkit[ray]"'
        raise BatchError(f'--engine ray (engine="ray") needs Ray: {_in_one_line(error)}; {install}') from error


class RayEngine:
    """Engine that runs on a Ray cluster; created by `open_ray`.

    Args:
        ray: The module `ray`, connected to a cluster.
        resources: Resources that the actors use.
    """

    def __init__(self, ray: Any, resources: Resources) -> None:
        self._ray, self._resources = ray, resources

    def batch_size(self, images: int) -> int:
        """Return the number of images per batch, small enough that every actor gets a batch."""
        most = BATCH_ACCELERATOR if self._resources.gpus else BATCH_CPU
        return max(1, min(most, images // self._resources.actors))

    def execute(
        self, context: RunContext, groups: Iterator[Sequence[Task]], is_interrupted: Callable[[], bool]
    ) -> Generator[list[Row], None, None]:
        """Yield the rows of each image, in the order of the images. See `LocalEngine.execute`.

        Raises:
            StoppedError: Ray failed, or several actors died on the same images.
        """
        items = [{"group": self._ray.cloudpickle.dumps(group)} for group in groups]
        try:
            for table in self._results(self._share(context), items, context.out) if items else ():
                for result in map(self._ray.cloudpickle.loads, table["result"].to_pylist()):
                    if isinstance(result, Exception):
                        raise result
                    yield result
                if is_interrupted():
                    return
        except self._ray.exceptions.RayError as error:
            raise StoppedError(
                f"Ray failed: {_in_one_line(error)}; finished images are kept, and the same call resumes"
            ) from error

    def _share(self, context: RunContext) -> Any:
        """Put the run context into the shared memory of the cluster, including a model that is passed as a module."""
        options = replace(context.options, on_progress=None)
        if isinstance(options.model, nn.Module):
            options = replace(options, model=copy.deepcopy(options.model).cpu())
        out = Path(os.path.abspath(context.out))  # noqa: PTH100 - links are kept: their targets may differ per machine
        try:
            return self._ray.put(RunContext(options, out, nn.Identity(), context.is_first))
        except (TypeError, AttributeError, ValueError) as error:
            raise BatchError(
                f"{options.model_name} cannot be sent to the workers: {_in_one_line(error)}; pass a model by name"
            ) from error

    def _results(self, context: Any, items: list[dict[str, bytes]], out: Path) -> Iterator[Any]:
        """Map the batches over the actors, and yield one table per batch, in order."""
        data, resources = _import("ray.data"), self._resources
        # One block per batch: its rows return as soon as the batch is done.
        batches = data.from_items(items, override_num_blocks=len(items))
        batches.context.execution_options.preserve_order = True
        batches.context.enable_progress_bars = batches.context.print_on_execution_start = False
        batches.context.execution_no_progress_timeout_s = -1  # a batch may take long
        results = batches.map_batches(
            Actor,
            fn_constructor_args=(context, (out / LOCK).read_bytes(), resources, MAX_TRIES, uuid4().hex[:16]),
            batch_size=None,
            batch_format="pyarrow",
            compute=data.ActorPoolStrategy(
                size=resources.actors,
                max_concurrent_calls_per_actor=resources.calls,
                enable_true_multi_threading=resources.calls > 1,
            ),
            num_cpus=resources.cpus,
            num_gpus=resources.gpus,
        )
        yield from results.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)


class Actor:
    """Ray actor that holds the model and explains batches.

    Args:
        context: Ray reference to the run context.
        holder: Content of the lock file of the run.
        resources: Resources of the actors.
        max_tries: Number of actors that may die on the same batch.
        execution: 16 hexadecimal digits that identify this execution of the run.
    """

    def __init__(self, context: Any, holder: bytes, resources: Resources, max_tries: int, execution: str) -> None:
        ray = importlib.import_module("ray")
        self._pickle, self._holder = ray.cloudpickle, holder
        self._max_tries, self._execution = max_tries, execution
        self._buffer = PictureBuffer()
        self._io = ThreadPoolExecutor(resources.cpus, "saliency-io", torch.set_num_threads, (1,))
        self._threads = 1 if resources.gpus else resources.cpus
        self._error: Exception | None = None
        # No other code uses this process, so process-wide settings are safe.
        keep_memory()
        importlib.import_module("cv2").setNumThreads(1)
        try:
            self._context: RunContext = ray.get(context)
            self._require_lock()
            model = load_model(self._context.options).to("cuda" if resources.gpus else "cpu")
            self._network = Network(self._context.options, model)
        except Exception as error:  # noqa: BLE001 - raised in __call__: Ray would retry a failing constructor forever
            self._error = error

    def __call__(self, table: Any) -> Any:
        """Explain a table of batches. Return the pickled rows of each image, or the pickled error of a batch."""
        arrow = importlib.import_module("pyarrow")
        results: list[list[Row] | Exception] = []
        for group in map(self._pickle.loads, table["group"].to_pylist()):
            try:
                results += self._explain_counted(group)
            except (SaliencyError, BatchTooLargeError) as error:
                results.append(error)
            except Exception as error:  # noqa: BLE001 - raised by the run; not every error can be pickled
                results.append(StoppedError(f"{type(error).__name__}: {error}"))
        return arrow.table({"result": arrow.array(map(self._pickle.dumps, results), arrow.binary())})

    def _explain_counted(self, group: Sequence[Task]) -> list[list[Row]]:
        """Explain a batch, unless too many actors have died on it."""
        if self._error is not None:
            raise self._error
        # The size of this file counts the actors that started this batch. The next run removes a leftover file.
        attempts = self._context.out / f".{self._execution}{group[0].index:016x}.part"
        with attempts.open("ab") as file:
            file.write(b".")
        if attempts.stat().st_size > self._max_tries:
            raise _deadly(group, self._max_tries)
        try:
            return self._explain(group)
        finally:
            attempts.unlink(missing_ok=True)

    def _explain(self, group: Sequence[Task]) -> list[list[Row]]:
        context = self._context
        torch.set_num_threads(self._threads)
        loaded = list(self._io.map(lambda task: self._network.load(task.image, self._buffer), group))
        start = time.perf_counter()
        results = self._network.explain(loaded, may_split=context.may_split(group))
        share = seconds_per_row(group, time.perf_counter() - start)

        def write(task: Task, image: LoadedImage, outcomes: Results) -> list[Row]:
            try:
                self._require_lock()  # the run may have ended in the meantime
                return list(write_results(context.options, context.out, task, image, outcomes, share))
            finally:
                self._buffer.release(image)

        return [rows for rows in self._io.map(write, group, loaded, results) if rows]

    def _require_lock(self) -> None:
        """Raise BatchError if the output folder, as seen from this machine, is not locked by this run."""
        try:
            is_locked = (self._context.out / LOCK).read_bytes() == self._holder
        except OSError:
            is_locked = False
        if not is_locked:
            raise BatchError(
                f"{self._context.out} on {os.uname().nodename} is not the folder of this run, or the run has ended; "
                "choose a folder for --out that all machines share at the same path"
            )


def _deadly(group: Sequence[Task], actors: int) -> StoppedError:
    names = [printable(task.image.source) for task in group if task.methods]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return StoppedError(
        f"{actors} workers died on the same images: {names[0]}{more}; finished images are kept: check the memory of "
        "the workers, use a smaller --batch-size, or leave these images out, and re-run to resume"
    )


def _in_one_line(error: BaseException) -> str:
    """Return the first and last line of an error. In Ray's errors, the last line often contains the cause."""
    lines = [line.strip() for line in re.sub(r"\x1b\[\d*m", "", str(error)).splitlines() if line.strip()]
    return ": ".join(dict.fromkeys([*lines[:1], *lines[-1:]])) or type(error).__name__
