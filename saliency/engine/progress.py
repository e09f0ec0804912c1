"""A progress bar for long work: in a terminal, in a notebook, or not at all."""

from __future__ import annotations

import importlib.util
import sys
import time
from typing import Any

LONG = 1.0
"""Seconds of work that are worth a bar."""


class Bar:
    """A progress bar that appears once the work has taken a second, or never.

    Args:
        label: What it says.
        wanted: True draws it from the start, wherever the output goes; False never; None on a terminal or in a
            notebook, behind the first second.
    """

    def __init__(self, label: str, wanted: bool | None) -> None:
        self._label, self._wanted = label, wanted
        self._began = time.perf_counter()
        self._total = self._done = 0
        self._bar: Any = None

    def extend(self, passes: int) -> None:
        """More work is ahead than was known."""
        self._total += passes
        if self._bar is not None:
            self._bar.total = self._total
            self._bar.refresh()

    def advance(self, passes: int) -> None:
        """Some work is done."""
        self._done += passes
        if self._bar is not None:
            self._bar.update(passes)
        elif self._is_due():
            self._bar = _kind()(
                total=self._total, initial=self._done, desc=self._label, unit="pass", leave=False, dynamic_ncols=True
            )

    def close(self) -> None:
        """The work is over."""
        if self._bar is not None:
            self._bar.close()

    def _is_due(self) -> bool:
        if self._wanted is not None:
            return self._wanted
        return time.perf_counter() - self._began > LONG and (sys.stderr.isatty() or _in_notebook())


def _kind() -> Any:
    """Tqdm's bar for where this runs."""
    if _in_notebook():
        from tqdm.notebook import tqdm as notebook_bar

        return notebook_bar
    from tqdm import tqdm

    return tqdm


def _in_notebook() -> bool:
    """Whether this is a notebook that can draw a bar."""
    shell = sys.modules.get("IPython")
    kernel = getattr(shell.get_ipython(), "kernel", None) if shell is not None else None
    return kernel is not None and importlib.util.find_spec("ipywidgets") is not None
