"""The same work in many threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

_Result = TypeVar("_Result")


def in_threads(work: Callable[[int], _Result], numbers: Iterable[int], times: int = 5) -> dict[int, _Result]:
    """What some work gives for each number, one thread for each, where it is done several times over."""
    found: dict[int, _Result] = {}

    def repeat(number: int) -> None:
        for _ in range(times):
            found[number] = work(number)

    threads = [threading.Thread(target=repeat, args=(number,)) for number in numbers]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return found
