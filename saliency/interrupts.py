"""Undoing what was done, also where Ctrl-C comes in between."""

from __future__ import annotations

from collections.abc import Callable


def surely(undo: Callable[[], None]) -> None:
    """Undo, and begin again where a Ctrl-C interrupts it; the interrupt is raised afterwards.

    What is to be undone must bear to be undone twice.
    """
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            undo()
            break
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
