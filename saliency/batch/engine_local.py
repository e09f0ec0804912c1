"""Run a batch on this machine, with threads for loading, network passes and drawing.

On CPUs several networks run in parallel with one thread each, instead of one network with many threads. Threads then
do not wait for each other at the end of each layer, and loading and drawing use the idle time.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import torch

from .drawing import write_results
from .manifest import Row
from .network import (
    BATCH_ACCELERATOR,
    BATCH_CPU,
    LoadedImage,
    Network,
    PictureBuffer,
    Results,
    RunContext,
    Task,
    replicate,
)

MAX_PARALLEL = 8
"""Networks that run in parallel on CPUs; each needs the memory of a batch."""


def count_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class LocalEngine:
    """Engine that runs on this machine.

    Args:
        devices: Devices; one network runs on each.
        workers: Number of threads for loading and drawing. On a single CPU device also the number of networks that run
            in parallel, at most `MAX_PARALLEL`.
    """

    def __init__(self, devices: Sequence[torch.device], workers: int | None = None) -> None:
        self.devices = list(devices)
        self.on_cpu = all(device.type == "cpu" for device in devices)
        self.workers = workers or count_cores()
        is_shared = self.on_cpu and len(self.devices) == 1
        self.parallel = min(self.workers, MAX_PARALLEL) if is_shared else len(self.devices)

    def batch_size(self, images: int) -> int:
        """Return the number of images per batch, small enough that every network gets a batch."""
        return max(1, min(BATCH_CPU if self.on_cpu else BATCH_ACCELERATOR, images // self.parallel))

    def execute(
        self, context: RunContext, groups: Iterator[Sequence[Task]], is_interrupted: Callable[[], bool]
    ) -> Generator[list[Row], None, None]:
        """Yield the rows of each image, in the order of the images.

        Args:
            context: The run.
            groups: The batches. An image without methods is not explained and only keeps its position in the batch.
            is_interrupted: Function that returns whether to stop starting batches.

        Raises:
            BatchTooLargeError: The first batch does not fit into memory, and nothing has been written yet.
            StoppedError: The folder cannot be written to.
        """
        import cv2

        networks = replicate(context.options, context.model, self.devices)
        free: queue.SimpleQueue[Network] = queue.SimpleQueue()
        for index in range(self.parallel):
            free.put(networks[index % len(networks)])
        threads = max(1, count_cores() // self.parallel)
        # The CPU time of one thread excludes the time in which other threads use the core.
        clock = time.thread_time if threads == 1 and self.on_cpu else time.perf_counter
        buffer = PictureBuffer()
        closed = threading.Event()

        def load(task: Task) -> LoadedImage:
            return LoadedImage(task.image) if closed.is_set() else networks[0].load(task.image, buffer)

        def explain(group: Sequence[Task], loading: Sequence[Future[LoadedImage]]) -> list[Future[list[Row]]]:
            loaded = [image.result() for image in loading]
            if closed.is_set():
                return []
            network = free.get()
            start = clock()
            try:
                results = network.explain(loaded, may_split=context.may_split(group))
            finally:
                free.put(network)
            share = seconds_per_row(group, clock() - start)
            return [io.submit(write, *image, share) for image in zip(group, loaded, results, strict=True)]

        def write(task: Task, loaded: LoadedImage, results: Results, seconds: float) -> list[Row]:
            try:
                return list(write_results(context.options, context.out, task, loaded, results, seconds))
            finally:
                buffer.release(loaded)

        with ExitStack() as undo:
            undo.callback(torch.set_num_threads, torch.get_num_threads())
            undo.callback(cv2.setNumThreads, cv2.getNumThreads())
            torch.set_num_threads(threads)
            cv2.setNumThreads(1)
            io = ThreadPoolExecutor(max(2, self.workers), "saliency-io", torch.set_num_threads, (1,))
            undo.callback(io.shutdown, cancel_futures=True)
            compute = ThreadPoolExecutor(self.parallel, "saliency-network", torch.set_num_threads, (threads,))
            undo.callback(compute.shutdown, cancel_futures=True)
            undo.callback(closed.set)
            pending: deque[tuple[int, Future[list[Future[list[Row]]]]]] = deque()
            for group in groups:
                if is_interrupted():
                    break
                loading = [io.submit(load, task) for task in group]
                pending.append((len(group), compute.submit(explain, group, loading)))
                # Limit the images in flight: a batch for every network, plus some for loading and drawing.
                while sum(size for size, _ in pending) >= (self.parallel + 1) * len(group) + 8:
                    yield from _rows(pending.popleft()[1])
            while pending:
                yield from _rows(pending.popleft()[1])


def _rows(group: Future[list[Future[list[Row]]]]) -> Iterator[list[Row]]:
    """Wait for the images of a group, and yield the rows of each image that has rows."""
    return filter(None, (drawing.result() for drawing in group.result()))


def seconds_per_row(group: Sequence[Task], seconds: float) -> float:
    """Return the network time per image and method."""
    return seconds / max(1, len(group) * max(len(task.methods) for task in group))
