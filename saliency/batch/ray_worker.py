"""The actors of a Ray cluster: each holds the model, and writes the files of the groups that it is given."""

from __future__ import annotations

import importlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..engine.allocator import keep_memory
from .drawing import Made, Task, draw
from .errors import BatchError, StoppedError
from .image_entry import shown
from .loading import MemoryBudget, Prepared, prepare
from .network import Found, Network
from .output_folder import LOCK
from .run_options import Job
from .work_group import Group, explained, loaded, share_of


@dataclass(slots=True)
class Done:
    """What comes back of a group.

    Attributes:
        number: The one that it was handed out under.
        made: What was made of its photos.
        halved: The parts of it that memory had no room for, in the order in which they were halved.
        seconds: What the network took.
        error: What no photo is to blame for.
    """

    number: int
    made: list[Made] = field(default_factory=list)
    halved: list[range] = field(default_factory=list)
    seconds: float = 0.0
    error: Exception | None = None


class Worker:
    """An actor that holds the model, and takes groups through all three steps.

    Args:
        told: By name: the job, as a reference; the folder of the run; what its lock says; the feeder; the device; the
            number of threads; how many workers may die of a group.
    """

    def __init__(self, told: dict[str, Any]) -> None:
        self._ray = importlib.import_module("ray")
        self._feeder, self._threads, self._most_tries = told["feeder"], told["threads"], told["tries"]
        self._out = Path(told["out"])
        self._budget = MemoryBudget()
        self._io = ThreadPoolExecutor(self._threads, "saliency-io", torch.set_num_threads, (1,))
        self._problem: Exception | None = None
        # The process is this actor's alone.
        keep_memory()
        importlib.import_module("cv2").setNumThreads(1)
        try:
            self._require_shared(told["holder"])
            self._job: Job = self._ray.get(told["job"])
            self._network = Network(self._job, loaded(self._job).to(torch.device(told["device"])))
        except Exception as error:  # noqa: BLE001 - raised by the run; here, the actor would be made again and again
            self._problem = error

    def __call__(self, table: Any) -> Any:
        """The rows of a table, each with what was made of its group."""
        arrow = importlib.import_module("pyarrow")
        numbers, groups = table["number"].to_pylist(), table["group"].to_pylist()
        made = [self._packed(self._guarded(*each)) for each in zip(numbers, groups, strict=True)]
        return arrow.table({"done": arrow.array(made, arrow.binary())})

    def _guarded(self, number: int, packed: bytes) -> Done:
        if self._problem is not None:
            return Done(number, error=self._problem)
        if not packed:
            return Done(number)
        try:
            group: Group = self._ray.cloudpickle.loads(packed)
            tries = self._ray.get(self._feeder.begin.remote(number))
            if tries > self._most_tries:
                raise _deadly(group, self._most_tries)
            if not tries:
                return Done(number)
            return self._through(number, group)
        except Exception as error:  # noqa: BLE001 - raised by the run
            return Done(number, error=error)

    def _through(self, number: int, group: Group) -> Done:
        done = Done(number)

        def halve(part: range) -> tuple[range, range]:
            """As the plan does, which is told of it later."""
            done.halved.append(part)
            middle = part.start + (len(part) + 1) // 2
            return range(part.start, middle), range(middle, part.stop)

        torch.set_num_threads(1 if self._network.device.type != "cpu" else self._threads)
        prepared = list(self._io.map(self._read, group))
        photos = range(group[0].index, group[-1].index + 1)
        found, done.seconds = explained(self._network, photos, prepared, halve)
        share = share_of(done.seconds, group)
        drawing = [self._io.submit(self._drawn, *each, share) for each in zip(group, prepared, found, strict=True)]
        done.made = [each.result() for each in drawing]
        return done

    def _read(self, task: Task) -> Prepared:
        return prepare(task.photo, self._network.preprocess, self._budget)

    def _drawn(self, task: Task, prepared: Prepared, found: Found, share: float) -> Made:
        try:
            return draw(self._out, self._job, task, prepared, found, share)
        finally:
            self._budget.release(prepared)

    def _packed(self, done: Done) -> bytes:
        pickler = self._ray.cloudpickle
        try:
            packed: bytes = pickler.dumps(done)
            if done.error is not None:
                pickler.loads(packed)
        except Exception:  # noqa: BLE001 - some errors cannot be sent; their words can
            packed = pickler.dumps(Done(done.number, error=BatchError(f"{type(done.error).__name__}: {done.error}")))
        return packed

    def _require_shared(self, holder: bytes) -> None:
        """Raise BatchError where the folder here is not the one that the run holds."""
        try:
            same = (self._out / LOCK).read_bytes() == holder
        except OSError:
            same = False
        if not same:
            raise BatchError(
                f"{self._out} on {os.uname().nodename} is not the folder of this run; choose one for --out that all "
                "machines share, at the same path"
            )


def _deadly(group: Group, workers: int) -> StoppedError:
    names = [shown(task.photo.source) for task in group if task.wanted]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return StoppedError(
        f"{workers} workers died of the same photos: {names[0]}{more}; what is done is kept: see that a worker's "
        "memory suffices, take a smaller --batch-size, or leave them out, and the same command goes on"
    )
