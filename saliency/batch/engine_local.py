"""The local engine: threads that read ahead of the network, and threads that draw behind it.

On processors several networks run side by side, a thread each, rather than one with many threads: no thread then waits
for another one at the end of each layer, and reading and drawing fill every gap.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch

from .drawing import Made, Task, draw
from .errors import BatchError
from .loading import MemoryBudget, Prepared, prepare
from .network import Found, Network
from .work_group import Group, Work, explained, replicas, share_of

MOST_LANES = 8
"""Networks side by side on processors; each takes the memory of a batch."""
MOST_AHEAD = 8
"""Groups that may be begun while an early one is still under way, per lane."""


def cores() -> int:
    """The processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def devices_of(device: str) -> list[str]:
    """The devices of a word such as "auto", "cpu" or "cuda:0,cuda:1".

    Raises:
        BatchError: There is no such device.
    """
    if device == "auto":
        return ["cuda" if torch.cuda.is_available() else "cpu"]
    names = [name.strip() for name in device.split(",") if name.strip()]
    for name in names:
        try:
            found = torch.device(name)
        except RuntimeError as error:
            raise BatchError(f'no device "{name}"; try auto, cpu, cuda or cuda:0,cuda:1') from error
        if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
            raise BatchError(f"device {name}: torch finds {torch.cuda.device_count()} CUDA devices here; try cpu")
    if not names:
        raise BatchError(f"device {device!r} names none; try auto, cpu, cuda or cuda:0,cuda:1")
    return names


class Local:
    """The engine of one machine.

    Args:
        devices: One network is made for each; "" leaves the model where it is.
        workers: How many threads read and draw, and on a single processor device how many networks run side by side.
    """

    def __init__(self, devices: Sequence[str], workers: int | None = None) -> None:
        self.devices = list(devices)
        self.workers = workers or cores()

    def lanes(self, on_processor: bool) -> int:
        """How many groups go through networks at once."""
        return min(self.workers, MOST_LANES) if len(self.devices) == 1 and on_processor else len(self.devices)

    def __call__(self, work: Work) -> Iterator[Sequence[Made]]:
        """What was made of each group, as it is done.

        Raises:
            Exception: What no photo is to blame for.
        """
        networks = replicas(work.job, work.model, self.devices)
        lanes = self.lanes(_on_processor(networks[0]))
        threads = max(1, cores() // lanes)
        with _threads_of(threads), _Pipeline(work, networks, lanes, self.workers, threads) as pipeline:
            yield from pipeline.run()


class _Pipeline:
    """The threads of one run, and what is under way."""

    def __init__(self, work: Work, networks: list[Network], lanes: int, workers: int, threads: int) -> None:
        self._work = work
        self._lanes, self._preprocess = lanes, networks[0].preprocess
        self._networks: queue.SimpleQueue[Network] = queue.SimpleQueue()
        for at in range(max(lanes, len(networks))):
            self._networks.put(networks[at % len(networks)])
        self._budget = MemoryBudget()
        # A lane of one thread is timed by its own clock, which stands still while other threads have the processor.
        self._clock = time.thread_time if threads == 1 and _on_processor(networks[0]) else time.perf_counter
        self._ready: queue.SimpleQueue[_Under] = queue.SimpleQueue()
        self._under: dict[int, _Under] = {}  # by the first photo's number
        self._photos = 0  # under way
        self._ended = threading.Event()
        self._io = ThreadPoolExecutor(max(2, workers), "saliency-io", torch.set_num_threads, (1,))
        self._nets = ThreadPoolExecutor(lanes, "saliency-net", torch.set_num_threads, (threads,))

    def __enter__(self) -> _Pipeline:
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._nets.shutdown(cancel_futures=True)
        self._io.shutdown(cancel_futures=True)

    def run(self) -> Iterator[Sequence[Made]]:
        more = True
        while True:
            while more and not self._work.stopping() and self._has_room():
                group = next(self._work.groups, None)
                more = group is not None
                if group is not None:
                    self._begin(group)
            if not self._under:
                return
            done = self._ready.get()
            del self._under[done.group[0].index]
            self._photos -= len(done.group)
            if done.error is not None:
                raise done.error
            yield [each for each in done.made if each is not None]

    def _has_room(self) -> bool:
        """Whether another group may be begun: enough for every lane and for the threads ahead of and behind them."""
        if not self._under:
            return True
        newest = next(reversed(self._under.values()))
        size = len(newest.group)
        first = next(iter(self._under.values())).group[0].index
        far = newest.group[-1].index - first >= MOST_AHEAD * (self._lanes + 1) * max(size, 8)
        return not far and self._photos < self._lanes * size + max(size, 8)

    def _begin(self, group: Group) -> None:
        under = _Under(group)
        self._under[group[0].index] = under
        self._photos += len(group)
        reading = [self._io.submit(self._read, task) for task in group]
        self._nets.submit(self._guarded, under, lambda: self._through(under, reading))

    def _read(self, task: Task) -> Prepared:
        if self._ended.is_set():
            return Prepared(task.photo)
        return prepare(task.photo, self._preprocess, self._budget)

    def _through(self, under: _Under, reading: Sequence[Future[Prepared]]) -> None:
        """In a lane: wait for the group's photos, explain them, and hand them on to be drawn."""
        prepared = [each.result() for each in reading]
        if self._ended.is_set():
            return
        network = self._networks.get()
        try:
            numbers = range(under.group[0].index, under.group[-1].index + 1)
            found, seconds = explained(network, numbers, prepared, self._work.plan.halve, self._clock)
        finally:
            self._networks.put(network)
        self._work.plan.measured(len(under.group), seconds)
        share = share_of(seconds, under.group)
        for at, (one, its) in enumerate(zip(prepared, found, strict=True)):
            self._io.submit(self._guarded, under, self._drawing(under, at, one, its, share))

    def _drawing(self, under: _Under, at: int, prepared: Prepared, found: Found, share: float) -> Callable[[], None]:
        def drawing() -> None:
            try:
                made = draw(self._work.out, self._work.job, under.group[at], prepared, found, share)
            finally:
                self._budget.release(prepared)
            if under.finish(at, made):
                self._ready.put(under)

        return drawing

    def _guarded(self, under: _Under, step: Callable[[], None]) -> None:
        """A step of a group; an error that no photo is to blame for ends the run."""
        if self._ended.is_set():
            return
        try:
            step()
        except BaseException as error:  # noqa: BLE001 - raised in the calling thread
            under.error = error
            self._ready.put(under)


class _Under:
    """A group under way."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.made: list[Made | None] = [None] * len(group)
        self.error: BaseException | None = None
        self._left = len(group)
        self._lock = threading.Lock()

    def finish(self, at: int, made: Made) -> bool:
        """Take what was made of a photo, and say whether it was the last one."""
        with self._lock:
            self.made[at] = made
            self._left -= 1
            return not self._left


def _on_processor(network: Network) -> bool:
    return network.device.type == "cpu"


@contextmanager
def _threads_of(number: int) -> Iterator[None]:
    """PyTorch and OpenCV with so many threads to each of ours, and as before afterwards.

    Threads of threads would wait for each other more than they work.
    """
    import cv2

    before, before_cv2 = torch.get_num_threads(), cv2.getNumThreads()
    try:
        torch.set_num_threads(number)
        cv2.setNumThreads(1)
        yield
    finally:
        torch.set_num_threads(before)
        cv2.setNumThreads(before_cv2)


def most_at_once(devices: Sequence[str]) -> int:
    """The largest batch that is tried: beyond 16 a processor gains nothing."""
    return 256 if any(each.startswith("cuda") for each in devices) else 16
