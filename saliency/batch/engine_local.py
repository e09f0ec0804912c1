"""Run on this machine: threads that load images ahead of the network, and threads that draw after it.

On processors several networks run side by side, one thread each, rather than one with many threads: no thread then
waits for another at the end of each layer, and loading and drawing fill every gap.
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
"""Networks side by side on processors; each takes the memory of a batch."""


def count_cores() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class LocalEngine:
    """Run on this machine.

    Args:
        devices: One network runs on each.
        workers: Threads that load and draw, and networks side by side on a single processor device.
    """

    def __init__(self, devices: Sequence[torch.device], workers: int | None = None) -> None:
        self.devices = list(devices)
        self.on_cpu = all(device.type == "cpu" for device in devices)
        self.workers = workers or count_cores()
        is_shared = self.on_cpu and len(self.devices) == 1
        self.parallel = min(self.workers, MAX_PARALLEL) if is_shared else len(self.devices)

    def batch_size(self, images: int) -> int:
        """Return the images per batch: small enough that every network has a batch."""
        return max(1, min(BATCH_CPU if self.on_cpu else BATCH_ACCELERATOR, images // self.parallel))

    def execute(
        self, context: RunContext, groups: Iterator[Sequence[Task]], is_interrupted: Callable[[], bool]
    ) -> Generator[list[Row], None, None]:
        """Yield the rows of each image, in the order of the images.

        Args:
            context: The run.
            groups: The batches. An image without methods only keeps its position.
            is_interrupted: Whether no more batches are to be started.

        Raises:
            BatchTooLargeError: Nothing has been written yet, and the first batch does not fit into memory.
            StoppedError: The folder cannot be written to.
        """
        import cv2

        networks = replicate(context.options, context.model, self.devices)
        free: queue.SimpleQueue[Network] = queue.SimpleQueue()
        for index in range(self.parallel):
            free.put(networks[index % len(networks)])
        threads = max(1, count_cores() // self.parallel)
        # One thread is timed by its own clock, which stands still while other threads have the processor.
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
                # Enough for every network, and for the threads before and after them.
                while sum(size for size, _ in pending) >= (self.parallel + 1) * len(group) + 8:
                    yield from _rows(pending.popleft()[1])
            while pending:
                yield from _rows(pending.popleft()[1])


def _rows(group: Future[list[Future[list[Row]]]]) -> Iterator[list[Row]]:
    """Wait for the images of a group, and yield the rows of each that has any."""
    return filter(None, (drawing.result() for drawing in group.result()))


def seconds_per_row(group: Sequence[Task], seconds: float) -> float:
    """Return the share of the network's time of one image and method."""
    return seconds / max(1, len(group) * max(len(task.methods) for task in group))
