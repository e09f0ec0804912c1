"""A Ray cluster: the one that is there, or one of this process's own for as long as it is needed."""

from __future__ import annotations

import importlib
import logging
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from .engine_local import cores
from .errors import BatchError

INSTALL = 'pip install "saliency-toolkit[ray]"'
MOST_THREADS = 8
"""Processors that an actor with a GPU takes, to read and to draw."""
STORE = 256 << 20
"""Bytes of shared memory of a Ray that is started here: what goes through it is small, but for a model without name,
for which Ray takes the disk where it has to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What the actors take of a cluster.

    Attributes:
        actors: How many there are.
        cpus: The processors of each.
        gpus: The GPUs of each.
        calls: The groups in each at once: the next is read and the last one drawn while a GPU works.
    """

    actors: int
    cpus: int = 1
    gpus: int = 0
    calls: int = 1

    @property
    def device(self) -> str:
        """Where the model of each actor is; Ray shows an actor no GPU but its own."""
        return "cuda" if self.gpus else "cpu"

    @classmethod
    def of(cls, resources: dict[str, float], device: str, workers: int | None) -> Share:
        """An actor per GPU where there are any, per processor otherwise.

        Args:
            resources: Of the cluster, as Ray names them.
            device: "auto", "cpu" or "cuda".
            workers: The number of actors, where another one is wanted.

        Raises:
            BatchError: The cluster has no such device, or too few.
        """
        cpus, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
        if device not in ("auto", "cpu", "cuda", ""):
            raise BatchError(f'device "{device}": on Ray each worker gets a GPU of its own; say auto, cpu or cuda')
        if device == "cuda" and not gpus:
            raise BatchError('device "cuda": the Ray cluster has no GPU; say cpu, or auto for what there is')
        on_gpus = gpus > 0 and device != "cpu"
        there = gpus if on_gpus else cpus
        if (workers or 1) > there:
            raise BatchError(f"{workers or 1} workers: the Ray cluster has {cpus} processors and {gpus} GPUs")
        actors = workers or there
        if not on_gpus:
            return cls(actors=actors)
        return cls(actors=actors, cpus=max(1, min(MOST_THREADS, cpus // gpus)), gpus=1, calls=2)


@contextmanager
def connected(workers: int | None) -> Iterator[Any]:
    """Ray, connected: as this process is already, to the cluster of RAY_ADDRESS, or to one that is started here.

    What was connected before stays so; the rest is undone with the block.

    Args:
        workers: How many processors a cluster that is started here has; by default this process's.

    Raises:
        BatchError: Ray is not installed or not to be reached.
    """
    ray = library("ray")
    library("ray.data")
    with ExitStack() as undo:
        undo.enter_context(_quiet())
        if not ray.is_initialized():
            _connect(ray, workers, undo)
        yield ray


def _connect(ray: Any, workers: int | None, undo: ExitStack) -> None:
    """Connect to the cluster of RAY_ADDRESS, or start one on this machine; `undo` leaves it."""
    address = os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {"address": address}
    if not address:
        options = {"address": "local", "num_cpus": workers or cores(), "include_dashboard": False}
        options |= {"object_store_memory": STORE}
        undo.enter_context(_environment("RAY_USAGE_STATS_ENABLED", "0"))  # nobody is told of it
    undo.callback(ray.shutdown)
    try:
        with _termination_kept():
            ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        where = f"the cluster at RAY_ADDRESS={address} cannot be reached" if address else "Ray cannot be started"
        raise BatchError(f"{where}: {first_line(error)}; see that it runs, or take --engine local") from error


def library(name: str) -> Any:
    """A part of Ray. Raises BatchError where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BatchError(f'--engine ray (engine="ray") needs Ray: {first_line(error)}; {INSTALL}') from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Ray Data without its reports, but with its warnings; that there are no progress bars is none."""
    levels = {"ray.data": logging.WARNING, "ray.data._internal.progress": logging.ERROR}
    loggers = {logging.getLogger(name): level for name, level in levels.items()}
    before = {logger: logger.level for logger in loggers}
    try:
        for logger, level in loggers.items():
            logger.setLevel(level)
        yield
    finally:
        for logger, level in before.items():
            logger.setLevel(level)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """A variable of the environment within the block, unless it is set already."""
    mine = name not in os.environ
    try:
        os.environ.setdefault(name, value)
        yield
    finally:
        if mine:
            os.environ.pop(name, None)


@contextmanager
def _termination_kept() -> Iterator[None]:
    """What a request to terminate does, which Ray changes, as it was behind the block."""
    mine = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if mine else None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def first_line(error: BaseException) -> str:
    """An error in a line."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def both_ends(error: BaseException) -> str:
    """An error of Ray in a line: its first one says what has ended, its last one often why."""
    lines = [line.strip() for line in re.sub(r"\x1b\[\d*m", "", str(error)).splitlines() if line.strip()]
    return ": ".join(dict.fromkeys([*lines[:1], *lines[-1:]])) or type(error).__name__
