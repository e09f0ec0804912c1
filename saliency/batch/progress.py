"""How a run goes about its work, how far it is, and what became of it."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """How a run goes about its work; none of it changes what a photo's files hold.

    Attributes:
        batch_size: How many photos go through the network at once; None to find out while running.
        restart: Whether what an earlier run made is removed first.
        retry: Whether photos that failed in an earlier run are tried again.
        limit: The number of photos, of the first ones in the listing, that are done.
        strict: Whether the first photo that fails stops the run.
        command: What was typed, for the manifest.
        on_progress: Told of every photo that is done.
    """

    batch_size: int | None = None
    restart: bool = False
    retry: bool = False
    limit: int | None = None
    strict: bool = False
    command: tuple[str, ...] = ()
    on_progress: Callable[[Progress], None] | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is.

    Attributes:
        done: The photos that are done, of this run and earlier ones.
        total: All photos.
        fresh: Those of this run.
        failed: The photos with an error so far.
    """

    done: int
    total: int
    fresh: int
    failed: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What became of a run.

    Attributes:
        folder: Where everything is.
        page: The gallery page, where it was made.
        photos: All photos of the listing.
        done: Those that are done, of this run and earlier ones.
        fresh: Those that were done in this run.
        failed: Those with an error in some row.
        kinds: How many rows failed, by the class of the error.
        failures: The first failures of this run: source, method, reason.
        seconds: How long this run took.
        changed: How many photos had changed since they were listed, and were explained again.
        removed: The sources of those that are not there any more; what was made of them is kept.
    """

    folder: Path
    page: Path | None
    photos: int
    done: int
    fresh: int
    failed: int
    kinds: Counter[str] = field(default_factory=Counter)
    failures: tuple[tuple[str, str, str], ...] = ()
    seconds: float = 0.0
    changed: int = 0
    removed: tuple[str, ...] = ()


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed, or SIGTERM came where it does the same, as on the command line.

    The first ends the run behind what is under way; a second one does not wait.
    """
    pressed = False

    def note(number: int, frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    mine = threading.current_thread() is threading.main_thread()
    signals = [
        each
        for each in (signal.SIGINT, signal.SIGTERM)
        if mine and signal.getsignal(each) is signal.default_int_handler
    ]
    for each in signals:
        signal.signal(each, note)
    try:
        yield lambda: pressed
    finally:
        for each in signals:
            signal.signal(each, signal.default_int_handler)
