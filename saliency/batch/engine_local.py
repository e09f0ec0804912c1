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
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from .drawing import write_results
from .manifest import Row
from .network import BATCH_ACCELERATOR, BATCH_CPU, LoadedImage, Network, PictureBuffer, Results, Task, replicate
from .run_options import RunOptions

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
        """Return the images per batch: small enough that all networks have work."""
        return max(1, min(BATCH_CPU if self.on_cpu else BATCH_ACCELERATOR, images // self.parallel))

    def execute(
        self, options: RunOptions, out: Path, model: nn.Module, groups: Iterator[Sequence[Task]], is_first: bool
    ) -> Generator[list[Row], None, None]:
        """Yield the rows of each image, in the order of the images. See `Engine.execute`."""
        networks = replicate(options, model, self.devices)
        threads = max(1, count_cores() // self.parallel)
        pipeline = _Pipeline(options, out, networks, self.parallel, self.workers, threads)
        with _threads_of_libraries(threads):
            try:
                yield from pipeline.run(groups, is_first)
            finally:
                pipeline.close()


class _Pipeline:
    """The threads of one run."""

    def __init__(
        self, options: RunOptions, out: Path, networks: Sequence[Network], parallel: int, workers: int, threads: int
    ) -> None:
        self._options, self._out, self._parallel = options, out, parallel
        self._network = networks[0]  # whose preprocessing is every network's
        self._free: queue.SimpleQueue[Network] = queue.SimpleQueue()
        for index in range(max(parallel, len(networks))):
            self._free.put(networks[index % len(networks)])
        self._buffer = PictureBuffer()
        # One thread is timed by its own clock, which stands still while other threads have the processor.
        is_single = threads == 1 and self._network.device.type == "cpu"
        self._clock = time.thread_time if is_single else time.perf_counter
        self._io = ThreadPoolExecutor(max(2, workers), "saliency-io", torch.set_num_threads, (1,))
        self._compute = ThreadPoolExecutor(parallel, "saliency-network", torch.set_num_threads, (threads,))
        self._closed = threading.Event()

    def run(self, groups: Iterator[Sequence[Task]], is_first: bool) -> Iterator[list[Row]]:
        pending: deque[Future[list[Future[list[Row]]]]] = deque()
        images: deque[int] = deque()  # of the pending groups
        for group in groups:
            loading = [self._io.submit(self._load, task) for task in group]
            # The size of the batches is settled by the first group: nothing has been written before it.
            may_split = not (is_first and group[0].index == 0)
            pending.append(self._compute.submit(self._explain, group, loading, may_split))
            images.append(len(group))
            # Enough for every network, and for the threads before and after them.
            while sum(images) >= (self._parallel + 1) * images[-1] + 8:
                images.popleft()
                yield from self._rows(pending.popleft())
        while pending:
            yield from self._rows(pending.popleft())

    def _rows(self, group: Future[list[Future[list[Row]]]]) -> Iterator[list[Row]]:
        for drawing in group.result():
            if rows := drawing.result():
                yield rows

    def close(self) -> None:
        """Finish what is under way, and end the threads."""
        self._closed.set()
        self._compute.shutdown(cancel_futures=True)
        self._io.shutdown(cancel_futures=True)

    def _load(self, task: Task) -> LoadedImage:
        return LoadedImage(task.image) if self._closed.is_set() else self._network.load(task.image, self._buffer)

    def _explain(
        self, group: Sequence[Task], loading: Sequence[Future[LoadedImage]], may_split: bool
    ) -> list[Future[list[Row]]]:
        loaded = [image.result() for image in loading]
        if self._closed.is_set():
            return []
        network = self._free.get()
        start = self._clock()
        try:
            results = network.explain(loaded, may_split=may_split)
        finally:
            self._free.put(network)
        share = seconds_per_row(group, self._clock() - start)
        return [
            self._io.submit(self._write, task, image, found, share)
            for task, image, found in zip(group, loaded, results, strict=True)
        ]

    def _write(self, task: Task, loaded: LoadedImage, results: Results, seconds: float) -> list[Row]:
        try:
            return list(write_results(self._options, self._out, task, loaded, results, seconds))
        finally:
            self._buffer.release(loaded)


def seconds_per_row(group: Sequence[Task], seconds: float) -> float:
    """Return the share of the network's time of one image and method."""
    return seconds / max(1, len(group) * max(len(task.methods) for task in group))


@contextmanager
def _threads_of_libraries(threads: int) -> Iterator[None]:
    """Give PyTorch and OpenCV so many threads per thread of ours, and restore their number afterwards."""
    import cv2

    before, before_cv2 = torch.get_num_threads(), cv2.getNumThreads()
    try:
        torch.set_num_threads(threads)
        cv2.setNumThreads(1)
        yield
    finally:
        torch.set_num_threads(before)
        cv2.setNumThreads(before_cv2)
