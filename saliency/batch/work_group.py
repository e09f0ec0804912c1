"""The unit of work: a group of photos through reading, the network and drawing.

An engine decides where and when the three steps run; what they make depends on the group alone, so that every engine
makes the same files.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from ..errors import SaliencyError
from ..zoo import load
from .batch_size import Plan
from .drawing import Made, Task
from .errors import BatchError
from .loading import Prepared
from .network import Found, Network, TooLargeError
from .run_options import Job

Group = Sequence[Task]
Halving = Callable[[range], tuple[range, range]]


@dataclass(frozen=True, slots=True)
class Work:
    """What an engine is asked to do.

    Attributes:
        job: What is done to each photo.
        out: The folder of the run.
        model: The model, loaded, where the caller has it.
        plan: The groups; told what each took, and which of them memory had no room for.
        groups: The groups in which something is missing, each made when it is asked for.
        stopping: Whether no more groups are to be begun.
    """

    job: Job
    out: Path
    model: nn.Module
    plan: Plan
    groups: Iterator[Group]
    stopping: Callable[[], bool]


class Engine(Protocol):
    """Where a run is done."""

    def __call__(self, work: Work) -> Iterator[Sequence[Made]]:
        """What was made of each group, in any order; the groups are begun in theirs."""


def loaded(job: Job) -> nn.Module:
    """The model of a job, on the CPU where it comes by its name."""
    return load(job.model, weights=job.weights) if isinstance(job.model, str) else job.model


def replicas(job: Job, model: nn.Module, devices: Sequence[str]) -> list[Network]:
    """A network for each device.

    Args:
        job: What is to be done.
        model: The model; it serves the first device itself, unless it is the caller's own.
        devices: "cpu", "cuda:1", ...; an empty name leaves the model where it is.

    Raises:
        BatchError: No such device.
    """
    made = []
    for at, device in enumerate(devices):
        its_own = model if not device or (at == 0 and isinstance(job.model, str)) else copy.deepcopy(model)
        try:
            made.append(Network(job, its_own.to(torch.device(device)) if device else its_own))
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            if isinstance(error, SaliencyError):
                raise
            reason = str(error).partition("\n")[0]
            raise BatchError(f"the device {device} cannot be used: {reason}; try cpu") from error
    return made


def explained(
    network: Network,
    group: range,
    prepared: Sequence[Prepared],
    halve: Halving,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[Found], float]:
    """What the methods find on each photo of a group, and the seconds that it took.

    Where memory has no room for the group, its halves are run one after the other, and theirs.
    """
    start = clock()
    with suppress(TooLargeError):
        found = network.explain(prepared)
        return found, clock() - start
    made: list[Found] = []
    for half in halve(group):
        rows = prepared[half.start - group.start : half.stop - group.start]
        made += explained(network, half, rows, halve)[0]
    return made, clock() - start


def share_of(seconds: float, group: Group) -> float:
    """The part of the network's time that counts for one photo and method."""
    return seconds / max(1, len(group) * max(len(task.wanted) for task in group))
