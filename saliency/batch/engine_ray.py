"""The engine of a cluster: Ray Data hands the groups to actors that hold the model.

Groups go out one by one as results come back, through a feeder: the plan learns from each while the next are made, and
memory does not grow with the number of photos. The actors write the files, into a folder that all machines share; the
rows come back here, to the one process that writes the manifest.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from .drawing import Made
from .engine_local import MOST_AHEAD, most_at_once
from .errors import BatchError, StoppedError
from .output_folder import LOCK
from .ray_cluster import Share, both_ends, connected, library
from .ray_feeder import Feeder, feed
from .ray_worker import Done, Worker
from .run_options import Job
from .work_group import Group, Work

MOST_TRIES = 4
"""Workers that may die of the same group before it is given up."""

_SETTINGS = {
    "target_max_block_size": 1,  # bytes: each group is a block of its own, and is handed on as soon as it is there
    "enable_progress_bars": False,
    "print_on_execution_start": False,
    "execution_no_progress_timeout_s": -1,  # a method may take its time
}


@contextmanager
def on_ray(device: str = "auto", workers: int | None = None) -> Iterator[OnRay]:
    """An engine on the cluster that this process is connected to, on that of RAY_ADDRESS, or on a Ray of its own.

    What was connected before stays so; what is started here is ended with the block.

    Args:
        device: "auto", "cpu" or "cuda".
        workers: How many actors hold the model; by default one per GPU, or one per processor where there are none.

    Raises:
        BatchError: Ray is not installed or not to be reached, or has no such device.
    """
    with connected(workers) as ray:
        yield OnRay(ray, Share.of(ray.cluster_resources(), device, workers))


class OnRay:
    """The engine of a cluster; made by `on_ray`.

    Args:
        ray: The library, connected.
        share: What the actors take.
    """

    def __init__(self, ray: Any, share: Share) -> None:
        self._ray, self._share = ray, share

    @property
    def lanes(self) -> int:
        """How many groups are done at once."""
        return self._share.actors * self._share.calls

    @property
    def most(self) -> int:
        """The largest batch that is tried."""
        return most_at_once([self._share.device])

    def __call__(self, work: Work) -> Iterator[Sequence[Made]]:
        """What was made of each group, as it is done.

        Raises:
            StoppedError: Ray has failed, or workers died of the same photos again and again.
            Exception: What no photo is to blame for.
        """
        feeder = self._ray.remote(num_cpus=0)(Feeder).remote()
        try:
            with closing(iter(self._results(work, feeder))) as results:
                driver = _Driver(self._ray, work, feeder, self.lanes)
                try:
                    yield from driver.run(results)
                except (Exception, GeneratorExit):
                    driver.end(results)
                    raise
        finally:
            self._ray.kill(feeder)

    def _results(self, work: Work, feeder: Any) -> Any:
        """The results of all groups, as they come."""
        data = library("ray.data")
        share = self._share
        told = {
            "job": self._sent(work.job),
            "out": os.path.abspath(work.out),  # noqa: PTH100 - keeps links, which may lead elsewhere on each machine
            "holder": (work.out / LOCK).read_bytes(),
            "feeder": feeder,
            "device": share.device,
            "threads": share.cpus,
            "tries": MOST_TRIES,
        }
        with _set(data.DataContext.get_current(), _SETTINGS):
            source = data.from_items([{"at": 0}], override_num_blocks=1)
            # With as many processors as the actors, both would be made one step, and groups be read by every actor.
            groups = source.map_batches(
                feed,
                fn_kwargs={"feeder": feeder},
                batch_size=1,
                batch_format="pyarrow",
                compute=data.TaskPoolStrategy(size=1),
                num_cpus=0,
            )
            # Ray Data restarts an actor that has died, and hands its groups to others.
            made = groups.map_batches(
                Worker,
                fn_constructor_kwargs={"told": told},
                batch_size=1,
                batch_format="pyarrow",
                compute=data.ActorPoolStrategy(
                    min_size=1,
                    max_size=share.actors,
                    initial_size=share.actors,
                    max_concurrent_calls_per_actor=share.calls,
                    enable_true_multi_threading=share.calls > 1,
                ),
                num_cpus=share.cpus,
                num_gpus=share.gpus,
            )
            return made.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)

    def _sent(self, job: Job) -> Any:
        """The job in the memory that the cluster shares, once, with the model where it has no name."""
        if isinstance(job.model, nn.Module) and any(each.device.type != "cpu" for each in _tensors(job.model)):
            job = replace(job, model=copy.deepcopy(job.model).cpu())
        try:
            return self._ray.put(job)
        except (TypeError, AttributeError, ValueError) as error:
            why = str(error).strip().partition("\n")[0]
            raise BatchError(f"{job.model_name} cannot be sent to the workers: {why}; pass a model by name") from error


@dataclass(slots=True)
class _Driver:
    """Groups out, results in, all in the thread of the run."""

    ray: Any
    work: Work
    feeder: Any
    lanes: int
    under: dict[int, Group] = field(default_factory=dict)  # by the number that each was handed out under
    number: int = 0
    ended: bool = False

    def run(self, results: Iterator[Any]) -> Iterator[Sequence[Made]]:
        while True:
            while not self.ended and self._has_room():
                self._hand_out()
            if not self.under:
                return
            for done in self._come(results):
                yield self._taken(done)

    def end(self, results: Iterator[Any]) -> None:
        """Wait until no worker writes any more: none begins another group."""
        with suppress(StoppedError):
            self._told(self.feeder.stop.remote())
            while self.under:
                for done in self._come(results):
                    self.under.pop(done.number, None)

    def _has_room(self) -> bool:
        """Whether another group may be handed out: one for each lane, one that waits for it, and not too far ahead."""
        oldest = next(iter(self.under), self.number)
        return len(self.under) < 2 * self.lanes + 2 and self.number - oldest < MOST_AHEAD * (self.lanes + 1)

    def _hand_out(self) -> None:
        group = None if self.work.stopping() else next(self.work.groups, None)
        if group is None:
            self.ended = True
            self._told(self.feeder.end.remote())
            return
        self.under[self.number] = group
        self._told(self.feeder.put.remote(self.number, self.ray.cloudpickle.dumps(group)))
        self.number += 1

    def _told(self, answer: Any) -> None:
        """Wait until the feeder has it: calls that are under way at once may overtake each other."""
        try:
            self.ray.get(answer)
        except self.ray.exceptions.RayError as error:
            raise _failed(both_ends(error)) from error

    def _come(self, results: Iterator[Any]) -> list[Done]:
        """The next results. Raises StoppedError where Ray gives none any more."""
        try:
            table = next(results)
        except Exception as error:
            why = "it ended before all was done" if isinstance(error, StopIteration) else both_ends(error)
            raise _failed(why) from error
        return [self.ray.cloudpickle.loads(each) for each in table["done"].to_pylist()]

    def _taken(self, done: Done) -> Sequence[Made]:
        """What was made; the plan is told of it first."""
        group = self.under.pop(done.number)
        if done.error is not None:
            raise done.error
        self.feeder.forget.remote(done.number)
        for numbers in done.halved:
            self.work.plan.halve(numbers)
        if not done.halved:
            self.work.plan.measured(len(group), done.seconds)
        return done.made


def _failed(why: str) -> StoppedError:
    return StoppedError(f"Ray has failed: {why}; what is done is kept, and the same command goes on from there")


@contextmanager
def _set(settings: Any, wanted: dict[str, Any]) -> Iterator[None]:
    """Settings as wanted within the block, as far as this version of Ray has them."""
    before = {name: getattr(settings, name) for name in wanted if hasattr(settings, name)}
    try:
        for name in before:
            setattr(settings, name, wanted[name])
        yield
    finally:
        for name, value in before.items():
            setattr(settings, name, value)


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
