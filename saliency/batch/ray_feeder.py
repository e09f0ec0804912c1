"""Where the workers of a Ray cluster get their groups from; light, for a process that has no need of PyTorch."""

from __future__ import annotations

import asyncio
import importlib
from collections import Counter
from collections.abc import Iterator
from typing import Any


class Feeder:
    """Groups that are handed out and not done yet: what a worker or a machine loses is asked for here again."""

    def __init__(self) -> None:
        self._groups: dict[int, bytes] = {}
        self._tries: Counter[int] = Counter()
        self._handed_out = 0
        self._ended = self._stopped = False
        self._more = asyncio.Condition()

    async def put(self, number: int, group: bytes) -> None:
        """Take a group; the numbers go up by one."""
        async with self._more:
            self._groups[number] = group
            self._handed_out = max(self._handed_out, number + 1)
            self._more.notify_all()

    async def end(self) -> None:
        """No more groups come."""
        async with self._more:
            self._ended = True
            self._more.notify_all()

    async def stop(self) -> None:
        """No group is begun any more."""
        self._stopped = True
        await self.end()

    async def take(self, number: int) -> bytes | None:
        """A group, once it is there; nothing of one that is done already; None behind the last one."""
        async with self._more:
            await self._more.wait_for(lambda: self._ended or number < self._handed_out)
        return self._groups.get(number, b"") if number < self._handed_out else None

    async def begin(self, number: int) -> int:
        """Note that a worker begins a group, and say how many have done so; 0 where it is to leave that."""
        if self._stopped:
            return 0
        self._tries[number] += 1
        return self._tries[number]

    async def forget(self, number: int) -> None:
        """The group is done."""
        self._groups.pop(number, None)
        self._tries.pop(number, None)


def feed(table: Any, feeder: Any) -> Iterator[Any]:
    """The groups, each as a table of one row, as they are handed out."""
    ray, arrow = importlib.import_module("ray"), importlib.import_module("pyarrow")
    number = 0
    while (group := ray.get(feeder.take.remote(number))) is not None:
        yield arrow.table({"number": [number], "group": arrow.array([group], arrow.binary())})
        number += 1
